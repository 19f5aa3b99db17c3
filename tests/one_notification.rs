//! The pushed alert and the rule's, at a real Prometheus and a real Alertmanager: one notification.
//!
//! Without `prometheus` and `prometheus-alertmanager` on the path these tests say so and pass.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "support/stack.rs"]
mod stack;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mps_exporter::config::{Alertmanager, ClientTls};
use mps_exporter::engine::incident::{Incident, IncidentDevice, IncidentState};
use mps_exporter::outlet::alertmanager::{AlertmanagerOutlet, Timing};
use mps_exporter::source::Shutdown;
use mps_exporter::telemetry::Telemetry;
use serde_json::Value;

const INSTANCE: &str = "gpu-07:10055";

fn config(address: SocketAddr, resolve: bool) -> Alertmanager {
    let labels = [("job", "mps"), ("instance", INSTANCE), ("site", "lab")];
    Alertmanager {
        url: format!("http://{address}"),
        labels: labels.map(|(name, value)| (name.into(), value.into())).into(),
        runbooks: None,
        basic_auth: None,
        bearer_token_file: None,
        tls: ClientTls::default(),
        resolve,
        timeout: Duration::from_secs(5),
        max_age: Duration::from_secs(900),
    }
}

fn incident() -> Arc<Incident> {
    let incident: Incident = serde_json::from_str(include_str!("support/incident.json")).unwrap();
    let device =
        IncidentDevice { uuid: "GPU-0".into(), gpu: "0".into(), gpu_instance: "".into(), mig_uuid: None };
    Arc::new(Incident { devices: vec![device], started_at: jiff::Timestamp::now(), ..incident })
}

/// Runs an outlet on a thread of its own until the test ends.
fn push(config: &Alertmanager, timing: Timing) -> Arc<AlertmanagerOutlet> {
    let outlet = Arc::new(AlertmanagerOutlet::new(config, timing, &Telemetry::new()).unwrap());
    let running = outlet.clone();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (_stop, shutdown) = Shutdown::new();
        runtime.block_on(running.run(shutdown));
    });
    outlet
}

fn alerts(alertmanager: SocketAddr) -> Vec<Value> {
    let text = stack::get(alertmanager, "/api/v2/alerts").unwrap();
    serde_json::from_str(&text).unwrap()
}

fn has_stack() -> bool {
    let is_there = stack::has("prometheus") && stack::alertmanager_binary().is_some();
    if !is_there {
        eprintln!("skipped: there is no prometheus or no alertmanager on the path");
    }
    is_there
}

#[test]
fn a_push_and_a_rule_make_one_notification() {
    if !has_stack() {
        return;
    }
    let (page, sink) = (stack::Page::start(), stack::Page::start());
    let alertmanager = stack::alertmanager(
        sink.address,
        "group_by: [alertname], group_wait: 0s, group_interval: 1s, repeat_interval: 1h",
    );
    let incident = incident();
    let pushed_at = Instant::now();
    let outlet = push(&config(alertmanager.address, false), Timing::default());
    outlet.notify(&incident);
    let expected = ["MpsMassClientLoss", "MpsServerFault"].map(|name| ("firing".to_owned(), name.to_owned()));
    let sorted = || {
        let mut notifications = sink.notifications();
        notifications.sort();
        notifications
    };
    stack::wait_for("notification", Duration::from_secs(5), || (sorted() == expected).then_some(()));
    println!("pushed to notified: {:?}", pushed_at.elapsed());
    let by_name: BTreeMap<String, Value> = alerts(alertmanager.address)
        .into_iter()
        .map(|alert| {
            (alert["labels"]["alertname"].as_str().unwrap().to_owned(), alert["annotations"].clone())
        })
        .collect();
    assert!(by_name["MpsMassClientLoss"]["description"].as_str().unwrap().contains("train (pid 4711"));

    let at = mps_exporter::time::unix_seconds(incident.started_at);
    *page.text.lock().unwrap() = stack::mass_loss_page(&[(0, at)]);
    let _prometheus = stack::prometheus(page.address, alertmanager.address, "1s", INSTANCE);
    // An alert whose sender was Prometheus names it.
    stack::wait_for("alert by the rule", Duration::from_secs(40), || {
        let alerts = alerts(alertmanager.address);
        let by_rule = alerts.iter().filter(|alert| {
            alert["generatorURL"].as_str().is_some_and(|url| url.contains("/graph"))
                && alert["labels"]["gpu"] == "0"
        });
        (by_rule.count() == 2).then_some(())
    });
    assert_eq!(alerts(alertmanager.address).len(), 2, "{:#?}", alerts(alertmanager.address));
    // Longer than group_interval: another alert would have been told by now.
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(sorted(), expected);

    // The push ends; the rule still fires, and nothing flaps.
    outlet.notify(&Arc::new(Incident { state: IncidentState::Closed, ..Incident::clone(&incident) }));
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(sorted(), expected);
}

#[test]
fn an_alert_without_a_rule_lapses_or_is_resolved() {
    if !has_stack() {
        return;
    }
    let sink = stack::Page::start();
    let alertmanager = stack::alertmanager(
        sink.address,
        "group_by: [alertname], group_wait: 0s, group_interval: 1s, repeat_interval: 1h",
    );
    for resolve in [false, true] {
        sink.bodies.lock().unwrap().clear();
        let timing =
            Timing { resend: Duration::from_millis(500), lapse: Duration::from_secs(2), ..Timing::default() };
        let incident = incident();
        let incident = Arc::new(Incident {
            fault_domains: vec![format!("default/{resolve}").into()],
            ..Incident::clone(&incident)
        });
        let outlet = push(&config(alertmanager.address, resolve), timing);
        outlet.notify(&incident);
        let has = |status: &str| sink.notifications().iter().filter(|(is, _)| is == status).count() >= 2;
        stack::wait_for("notification", Duration::from_secs(5), || has("firing").then_some(()));
        std::thread::sleep(Duration::from_secs(4));
        assert!(!has("resolved"), "it is re-sent while the incident is open");
        outlet.notify(&Arc::new(Incident { state: IncidentState::Closed, ..Incident::clone(&incident) }));
        let closed_at = Instant::now();
        stack::wait_for("end of the alert", Duration::from_secs(8), || has("resolved").then_some(()));
        println!("resolve: {resolve}: over {:?} after the close", closed_at.elapsed());
    }
}
