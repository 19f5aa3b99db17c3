//! The demo as a user runs it, scraped by a real Prometheus with the project's rules, paging a real Alertmanager.

#![allow(clippy::unwrap_used)]

#[path = "support/stack.rs"]
mod stack;

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use stack::{Page, alertmanager, alertmanager_binary, free_address, get, has, prometheus, wait_for};

const LIMIT: Duration = Duration::from_secs(60);

/// The demo's process, ended as a person would end it.
struct Demo(Child);

impl Drop for Demo {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.0);
        let _has_ended = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _has_ended = self.0.wait();
    }
}

/// The largest value of the series with this name that hold all of these labels.
fn largest(page: &str, name: &str, labels: &[&str]) -> Option<f64> {
    let lines = page.lines().filter(|line| line.starts_with(&format!("{name}{{")));
    let values = lines.filter(|line| labels.iter().all(|label| line.contains(label)));
    values.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).reduce(f64::max)
}

#[test]
fn the_blast_radius_rises_an_incident_hits_and_somebody_is_paged() {
    if alertmanager_binary().is_none() || !has("prometheus") {
        assert!(std::env::var_os("CI").is_none(), "Prometheus and Alertmanager must be there in CI");
        println!("skipped: no prometheus or alertmanager on the path");
        return;
    }
    let address = free_address();
    let demo = Command::new(env!("CARGO_BIN_EXE_mps-exporter"))
        .args(["demo", "--web.listen-address", &address.to_string(), "--first-incident", "12"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let demo = Demo(demo);
    let metrics = || get(address, "/metrics");
    wait_for("blast radius of six clients on two coupled GPUs", LIMIT, || {
        let page = metrics()?;
        let radius = largest(&page, "mps_blast_radius_clients", &["scope=\"application\""])?;
        (radius >= 6.0 && largest(&page, "mps_coupled_devices", &[])? >= 2.0).then_some(())
    });

    let sink = Page::start();
    let pager = alertmanager(sink.address, "group_wait: 0s, group_interval: 1s");
    let prometheus = prometheus(address, pager.address, "1s", "demo");
    let query = |query: &str| -> Option<f64> {
        let path = format!(
            "/api/v1/query?query={}",
            query.replace('"', "%22").replace('{', "%7B").replace('}', "%7D")
        );
        let answer: serde_json::Value = serde_json::from_str(&get(prometheus.address, &path)?).ok()?;
        answer["data"]["result"][0]["value"][1].as_str()?.parse().ok()
    };

    wait_for("mass client loss", LIMIT, || {
        largest(&metrics()?, "mps_mass_client_loss_total", &[]).filter(|total| *total >= 1.0)
    });
    let incidents: serde_json::Value =
        serde_json::from_str(&get(address, "/api/v1/incidents").unwrap()).unwrap();
    let incident = &incidents["incidents"][0];
    assert_eq!(incident["cause"], "fault");
    assert_eq!(incident["culprit"]["evidence"], "server_log");
    assert_eq!(incident["victims"].as_array().unwrap().len(), 6);
    wait_for("clients gone", LIMIT, || {
        largest(&metrics()?, "mps_blast_radius_clients", &["scope=\"server\""]).filter(|radius| *radius < 1.0)
    });
    wait_for("clients back", LIMIT, || {
        largest(&metrics()?, "mps_blast_radius_clients", &["scope=\"server\""])
            .filter(|radius| *radius >= 6.0)
    });

    wait_for("scrapes by Prometheus", LIMIT, || query("up").filter(|up| (*up - 1.0).abs() < f64::EPSILON));
    wait_for("the loss in Prometheus", LIMIT, || {
        query("max(mps_mass_client_loss_total)").filter(|total| *total >= 1.0)
    });
    wait_for("a page", LIMIT, || {
        let bodies = sink.bodies.lock().unwrap();
        bodies.iter().find(|(_, body)| body.contains("MpsMassClientLoss")).map(|_| ())
    });
    assert!(query("scrape_samples_scraped").unwrap() < 1000.0);

    let pid = demo.0.id();
    drop(demo);
    let left: Vec<_> = std::fs::read_dir(std::env::temp_dir())
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with(&format!("mps-exporter-demo-{pid}-")))
        .collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}
