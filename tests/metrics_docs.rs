//! `docs/metrics.md` is made from the table of families.
#![allow(missing_docs, clippy::unwrap_used)]

use std::fmt::Write as _;

use mps_exporter::metrics::families::{DOMAIN_LABELS, SECTIONS};

const INTRODUCTION: &str = "\
# Metrics

<!-- Made from src/metrics/families.rs: `UPDATE=1 cargo test --test metrics_docs` writes it anew. -->

Every metric of `/metrics`, in Prometheus text 0.0.4 and OpenMetrics 1.0.

- A value that no source can tell is **absent**, never 0. `mps_source_up` says which source is blind.
- Counters start at 0 as soon as their labels are known. Where the labels only become known with the first event (an
  Xid, an Alertmanager's answer), `increase()` cannot see that event: use the gauge `…_last_timestamp_seconds` beside
  the counter, which is absent before the first event.
- *Domain labels* are `fault_domain`, `gpu`, `UUID`, `GPU_I_ID`. `UUID` and `GPU_I_ID` have dcgm-exporter's spelling and
  values, so that both exporters join on them; of a MIG instance, `UUID` is its GPU's. `fault_domain` is
  `<daemon>/<gpu index>[/<gpu instance id>]`, the UUID where no index is known, `gpu/<index>` for a GPU without MPS.
- A client that spans devices counts on each of them: never sum `mps_clients` over devices; `mps_server_clients` counts
  every client once.
- State sets are gauges with one series per state, 1 for the one that holds.
- An incident is counted once, when it reaches the domain, by the cause that is known then: a counter never goes down, so
  it does not move to another cause when evidence for one comes later. `mps_clients_lost_total` counts each lost client
  by its own cause, and `/api/v1/incidents` has the cause that the incident turned out to have. After a restart an
  incident that went on is not counted again.
- `mps_incidents_total` carries the last incident's id as an OpenMetrics exemplar (`incident_id`), which
  `/api/v1/incidents` resolves.
- Text from outside (command and pod names, paths) is cut at 256 bytes and freed of control characters; such a value
  ends in `~` and a hash.
";

fn documentation() -> String {
    let mut out = INTRODUCTION.to_owned();
    for section in SECTIONS {
        let title = section.title;
        write!(out, "\n## {title}\n\n| metric | type | labels | meaning (source) |\n|---|---|---|---|\n")
            .unwrap();
        for family in section.families {
            let own: Vec<String> = family.labels.iter().map(|label| format!("`{label}`")).collect();
            let labels = match (family.is_per_domain, own.is_empty()) {
                (true, true) => "domain".to_owned(),
                (true, false) => format!("domain, {}", own.join(", ")),
                (false, _) => own.join(", "),
            };
            let help = family.help.replace('|', "\\|");
            writeln!(out, "| `{}` | {} | {labels} | {help} |", family.name, family.kind.word()).unwrap();
        }
    }
    out
}

#[test]
fn the_document_follows_the_table() {
    for label in DOMAIN_LABELS {
        assert!(INTRODUCTION.contains(&format!("`{label}`")), "{label}");
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md");
    let expected = documentation();
    if std::env::var_os("UPDATE").is_some() {
        std::fs::create_dir_all(concat!(env!("CARGO_MANIFEST_DIR"), "/docs")).unwrap();
        std::fs::write(path, &expected).unwrap();
    }
    let found = std::fs::read_to_string(path).unwrap_or_default();
    assert!(found == expected, "docs/metrics.md is stale: UPDATE=1 cargo test --test metrics_docs");
}
