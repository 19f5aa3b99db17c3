//! Time to render `/metrics`: `cargo bench --bench scrape`.
//!
//! `changed` renders everything, as the first scrape after a change does; `shared` is every further scrape.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "../tests/support/nodes.rs"]
#[allow(dead_code, reason = "shared with the tests, which use more of it")]
mod nodes;

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use mps_exporter::config::Collectors;
use mps_exporter::engine::snapshot::Snapshot;
use mps_exporter::metrics::exposition::Exposition;
use mps_exporter::metrics::negotiate::{Encoding, Format};
use mps_exporter::telemetry::Telemetry;

fn main() {
    let everything =
        Collectors { clients: true, clients_limit: 4000, workloads: true, workloads_limit: 4000 };
    println!("{:<28} {:>7} {:>9} {:>24} {:>10} {:>10}", "node", "series", "bytes", "page", "p50", "p99");
    measure("8 domains x 48, default", &nodes::node(8, 48), &Collectors::default());
    measure("8 domains x 48, clients", &nodes::node(8, 48), &everything);
    measure("64 domains x 30, clients", &nodes::node(64, 30), &everything);
}

fn measure(name: &str, node: &Snapshot, collectors: &Collectors) {
    let snapshots = Arc::new(ArcSwap::from_pointee(node.clone()));
    let collectors = Arc::new(ArcSwap::from_pointee(collectors.clone()));
    let exposition = Exposition::new(snapshots.clone(), Telemetry::new(), collectors);
    let page = exposition.page(Format::Text, Encoding::Identity);
    let series = page.split(|byte| *byte == b'\n').filter(|line| !line.starts_with(b"#")).count() - 1;
    let rounds: u64 = if series > 5000 { 100 } else { 400 };
    for (format, encoding) in [
        (Format::Text, Encoding::Identity),
        (Format::OpenMetrics, Encoding::Identity),
        (Format::OpenMetrics, Encoding::Gzip),
    ] {
        for is_changed in [true, false] {
            let mut times: Vec<Duration> = (1..=rounds)
                .map(|generation| {
                    if is_changed {
                        snapshots.store(Arc::new(Snapshot { generation, ..node.clone() }));
                    }
                    let start = Instant::now();
                    black_box(exposition.page(format, encoding));
                    start.elapsed()
                })
                .collect();
            times.sort();
            let kind = format!("{format:?} {encoding:?} {}", if is_changed { "changed" } else { "shared" });
            let kind = kind.replace("Identity ", "");
            let (middle, late) = (times[times.len() / 2], times[times.len() * 99 / 100]);
            println!("{name:<28} {series:>7} {:>9} {kind:>24} {middle:>10.1?} {late:>10.1?}", page.len());
        }
    }
}
