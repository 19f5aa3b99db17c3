//! From an incident's change to Alertmanager's acceptance: journal on the disk, then the post, on the loopback.
//!
//! `cargo bench --bench alert_latency` posts 200 incidents to a server that answers as Alertmanager does, and to a real
//! Alertmanager where one is on the path. With `-- --rule EVENTS` as many events also go through a real Prometheus
//! (15 s scrape, 15 s evaluation, the project's rules) to a real Alertmanager in the same run; that takes about two
//! minutes.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "../tests/support/stack.rs"]
mod stack;

use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use mps_exporter::config::{Alertmanager, ClientTls, Config, State};
use mps_exporter::engine::incident::{Cause, Change, Incident, IncidentChange};
use mps_exporter::engine::snapshot::Snapshot;
use mps_exporter::outlet::Outlets;
use mps_exporter::source::Shutdown;
use mps_exporter::telemetry::Telemetry;

const INCIDENTS: usize = 200;

fn main() {
    let mut arguments = std::env::args().skip_while(|argument| argument != "--rule").skip(1);
    let events = arguments.next().map_or(0, |count| count.parse().expect("--rule takes a number of events"));
    let directory = tempfile::tempdir_in(Path::new(env!("CARGO_MANIFEST_DIR")).join("target")).unwrap();

    report("one line appended and synced by itself", disk(directory.path()));
    let page = stack::Page::start();
    for (name, state) in
        [("without a journal", None), ("with the journal", Some(directory.path().to_owned()))]
    {
        report(&format!("push, {name}, plain server"), push(page.address, state));
    }
    if stack::alertmanager_binary().is_none() {
        println!("no alertmanager on the path: nothing more is measured");
        return;
    }
    let sink = stack::Page::start();
    let route =
        "group_by: [alertname, fault_domain], group_wait: 0s, group_interval: 1s, repeat_interval: 1h";
    let alertmanager = stack::alertmanager(sink.address, route);
    let address = alertmanager.address;
    report("push, without a journal, Alertmanager", push(address, None));
    report("push, with the journal, Alertmanager", push(address, Some(directory.path().join("2"))));
    if events > 0 && stack::has("prometheus") {
        report("rule, 15 s scrape and evaluation, Alertmanager", rule(address, events));
    }
}

/// What the disk alone takes for as much as an incident's line.
fn disk(directory: &Path) -> Vec<Duration> {
    let mut file = std::fs::File::create(directory.join("line")).unwrap();
    let line = vec![b'x'; 1500];
    (0..INCIDENTS)
        .map(|_| {
            let begun = Instant::now();
            file.write_all(&line).unwrap();
            file.sync_data().unwrap();
            begun.elapsed()
        })
        .collect()
}

/// How long each of the incidents takes until the answer to its post is there.
fn push(address: SocketAddr, state: Option<std::path::PathBuf>) -> Vec<Duration> {
    let config = Config {
        alertmanagers: vec![Alertmanager {
            url: format!("http://{address}"),
            labels: [("job".into(), "push".into())].into(),
            runbooks: None,
            basic_auth: None,
            bearer_token_file: None,
            tls: ClientTls::default(),
            resolve: false,
            timeout: Duration::from_secs(5),
            max_age: Duration::from_secs(900),
        }],
        state: State { directory: state, incidents_kept: 1000 },
        ..Config::default()
    };
    let telemetry = Telemetry::new();
    let (outlets, _) = Outlets::new(&config, snapshot(), &telemetry).unwrap();
    let (stop, shutdown) = Shutdown::new();
    let running = {
        let outlets = outlets.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(outlets.run(shutdown));
        })
    };
    let times = (0..INCIDENTS)
        .map(|number| {
            // Not in step with anything.
            std::thread::sleep(Duration::from_micros((number as u64 * 7919) % 20_000));
            let incident = incident(number);
            let begun = Instant::now();
            outlets.incident(&IncidentChange { change: Change::Opened, incident });
            while accepted(&telemetry) <= number as f64 {
                std::thread::sleep(Duration::from_micros(50));
            }
            begun.elapsed()
        })
        .collect();
    stop.send(true).unwrap();
    running.join().unwrap();
    times
}

/// Posts that were answered with success.
fn accepted(telemetry: &Telemetry) -> f64 {
    let families = telemetry.registry().gather();
    let family = families.iter().find(|family| family.name() == "mps_alerts_sent_total").unwrap();
    let is_ok =
        |metric: &&prometheus::proto::Metric| metric.get_label().iter().any(|label| label.value() == "ok");
    family.get_metric().iter().find(is_ok).map_or(0.0, |metric| metric.get_counter().get_value())
}

/// An incident with one alert, in a fault domain of its own.
fn incident(number: usize) -> Arc<Incident> {
    let incident: Incident = serde_json::from_str(include_str!("../tests/support/incident.json")).unwrap();
    Arc::new(Incident {
        id: format!("{number:012x}-0").into(),
        cause: Cause::Gpu,
        fault_domains: vec![format!("push/{number}").into()],
        started_at: jiff::Timestamp::now(),
        ..incident
    })
}

/// The same alert by scrape, rule and evaluation: events at times that are spread over two scrapes.
fn rule(alertmanager: SocketAddr, events: u32) -> Vec<Duration> {
    let page = stack::Page::start();
    let _prometheus = stack::prometheus(page.address, alertmanager, "15s", "bench");
    // The first scrape comes seconds after the start, the first evaluation up to an interval later.
    std::thread::sleep(Duration::from_secs(35));
    let begun = Instant::now();
    let spread = Duration::from_secs(30) / events;
    let mut happened: Vec<(u32, f64, Instant)> = Vec::new();
    let mut seen: Vec<Option<Duration>> = vec![None; events as usize];
    while seen.iter().any(Option::is_none) {
        assert!(begun.elapsed() < Duration::from_secs(180), "the rule did not fire for all events");
        let next = u32::try_from(happened.len()).unwrap();
        if next < events && begun.elapsed() >= spread * next {
            let now = jiff::Timestamp::now();
            happened.push((next, mps_exporter::time::unix_seconds(now), Instant::now()));
            let all: Vec<(u32, f64)> = happened.iter().map(|(gpu, at, _)| (*gpu, *at)).collect();
            *page.text.lock().unwrap() = stack::mass_loss_page(&all);
        }
        let alerts = stack::get(alertmanager, "/api/v2/alerts?filter=instance%3D%22bench%22").unwrap();
        for (gpu, _, at) in &happened {
            let slot = &mut seen[*gpu as usize];
            if slot.is_none() && alerts.contains(&format!("\"GPU-{gpu}\"")) {
                *slot = Some(at.elapsed());
            }
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    seen.into_iter().flatten().collect()
}

fn report(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |share: usize| times[(times.len() * share / 100).min(times.len() - 1)];
    println!(
        "{what}: {} incidents, p50 {:.2?}, p99 {:.2?}, max {:.2?}",
        times.len(),
        at(50),
        at(99),
        times[times.len() - 1]
    );
}

fn snapshot() -> Arc<ArcSwap<Snapshot>> {
    Arc::new(ArcSwap::from_pointee(Snapshot {
        generation: 0,
        at: jiff::Timestamp::UNIX_EPOCH,
        daemons: Vec::new(),
        servers: Vec::new(),
        domains: Vec::new(),
        clients: Vec::new(),
        gpus: Vec::new(),
        xids: Vec::new(),
        sources: Vec::new(),
        incidents: Vec::new(),
        disagreements: Vec::new(),
    }))
}
