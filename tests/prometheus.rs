//! The pages before the real judges: `promtool check metrics` and a Prometheus that scrapes.
//!
//! Without `promtool` and `prometheus` (Debian package `prometheus`) on the path these tests say so and pass.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::io::Write as _;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use mps_exporter::config::Collectors;
use mps_exporter::event::LogFile;
use mps_exporter::metrics::exposition::Exposition;
use mps_exporter::metrics::negotiate::{Encoding, Format};
use mps_exporter::telemetry::{QueryResult, Telemetry};
use support::nodes;
use support::server::{request_on, serve};
use tokio::net::TcpStream;
use tokio::time::sleep;

/// Whether the program is there; says so when it is not.
fn has(program: &str) -> bool {
    let found = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    let is_there = found.is_ok_and(|status| status.success());
    if !is_there {
        eprintln!("skipped: there is no {program}");
    }
    is_there
}

#[test]
fn promtool_finds_nothing_in_any_state() {
    if !has("promtool") {
        return;
    }
    let mut without_devices = nodes::node(2, 2);
    without_devices.gpus.clear();
    without_devices.domains.clear();
    let states = [
        ("empty", nodes::empty()),
        ("normal", nodes::node(8, 48)),
        ("without devices", without_devices),
        ("extreme", nodes::extreme()),
    ];
    for (state, snapshot) in states {
        for clients in [false, true] {
            let telemetry = Telemetry::new();
            if clients {
                telemetry.log_read("default", LogFile::Server, 10, 1, 1000);
                telemetry.log_lag("default", LogFile::Server, 0);
                telemetry.control_query("default", QueryResult::Ok, Duration::from_millis(1));
                telemetry.source_error("nvml", "timeout");
                telemetry.alert_sent("http://127.0.0.1:9093", "ok");
                telemetry.daemon_restart("default", "ok");
            }
            let snapshots = Arc::new(ArcSwap::from_pointee(snapshot.clone()));
            let collectors = Arc::new(ArcSwap::from_pointee(Collectors { clients, ..Collectors::default() }));
            let page =
                Exposition::new(snapshots, telemetry, collectors).page(Format::Text, Encoding::Identity);
            let told = promtool(&page);
            assert!(told.is_empty(), "{state}, clients {clients}: {told}");
        }
    }
}

/// What `promtool check metrics` finds in a page.
fn promtool(page: &[u8]) -> String {
    let mut child = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(page).unwrap();
    let output = child.wait_with_output().unwrap();
    let told =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    if output.status.success() { told } else { format!("{}: {told}", output.status) }
}

/// A Prometheus that ends with the test.
struct Prometheus {
    child: Child,
    address: String,
    _folder: tempfile::TempDir,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _already_gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

impl Prometheus {
    fn scraping(target: &str) -> Prometheus {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("prometheus.yml");
        let text = format!(
            "scrape_configs:\n- job_name: mps\n  scrape_interval: 200ms\n  scrape_timeout: 200ms\n  static_configs:\n  - targets: ['{target}']\n"
        );
        std::fs::write(&config, text).unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let address = format!("127.0.0.1:{port}");
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .arg("--enable-feature=exemplar-storage")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Prometheus { child, address, _folder: folder }
    }

    /// Asks until the answer holds `expected`.
    async fn answers(&self, path: &str, expected: &str) -> String {
        let mut last = String::new();
        for _ in 0..200 {
            if let Ok(mut stream) = TcpStream::connect(&self.address).await {
                let answer = request_on(&mut stream, &format!("GET {path} HTTP/1.1\r\n")).await;
                last = String::from_utf8_lossy(&answer.body).into_owned();
                if last.contains(expected) {
                    return last;
                }
            }
            sleep(Duration::from_millis(100)).await;
        }
        panic!("{path} never held {expected}: {last}");
    }
}

#[tokio::test]
async fn a_real_prometheus_takes_every_series() {
    if !has("prometheus") {
        return;
    }
    for (snapshot, radius) in [(nodes::node(8, 48), "\"48\""), (nodes::extreme(), "\"40\"")] {
        let server = serve(snapshot, None).await;
        let prometheus = Prometheus::scraping(&server.address.to_string());
        prometheus.answers("/api/v1/query?query=up", "\"1\"]").await;
        let query = "/api/v1/query?query=mps_blast_radius_clients%7Bfault_domain%3D%22default%2F0%22%2Cscope%3D%22application%22%7D";
        let answer = prometheus.answers(query, radius).await;
        assert!(answer.contains(&*nodes::uuid(0)), "{answer}");

        // Only OpenMetrics has the type info: this is what a default Prometheus negotiated.
        let metadata = "/api/v1/targets/metadata?metric=mps_fault_domain";
        prometheus.answers(metadata, "\"type\":\"info\"").await;
        let exemplars = "/api/v1/query_exemplars?query=mps_incidents_total&start=1700000000&end=2000000000";
        prometheus.answers(exemplars, "0195f0000001-1").await;

        let page = server.get("/metrics").await;
        let series = page.text().lines().filter(|line| !line.starts_with('#')).count();
        let scraped = prometheus.answers("/api/v1/query?query=scrape_samples_scraped", "\"value\"").await;
        assert!(scraped.contains(&format!("\"{series}\"]")), "{series} series, Prometheus took {scraped}");
        prometheus.answers("/api/v1/targets?state=active", "\"lastError\":\"\"").await;
    }
}
