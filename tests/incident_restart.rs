//! The program is killed and started again around a fault: what it had seen goes on as the same incident, what it had
//! not seen is found in the logs, and nobody is paged a second time.

#![allow(clippy::unwrap_used)]

#[path = "support/beside.rs"]
mod beside;
#[path = "support/mps/mod.rs"]
mod mps;
#[path = "support/stack.rs"]
mod stack;
#[path = "support/program.rs"]
mod support;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mps::bed::{Bed, Client, versions, wait_for};
use serde_json::Value;
use stack::Page;
use support::Program;

mps::entries!();

const GPU: &str = "GPU-8f6a2c10-1b2c-3d4e-5f60-718293a4b5c6";
/// Short, so that an incident whose losses have all arrived is soon told apart from one where they still arrive.
const WINDOW: &str = "incidents: {window: 1s}";

/// Three clients on one GPU, the exporter beside them, and an Alertmanager that takes everything.
struct Scene {
    bed: Bed,
    exporter: Program,
    clients: [Client; 3],
    alertmanager: Page,
}

impl Scene {
    fn start(version: &str, max_age: &str) -> Scene {
        let mut bed = Bed::start(version);
        bed.order_new_servers(&format!("device {GPU}"));
        let alertmanager = Page::start();
        let config = format!(
            "{WINDOW}\nalertmanagers: [{{url: 'http://{}', max_age: {max_age}}}]",
            alertmanager.address
        );
        let exporter = Program::beside(&bed, &config, None);
        let clients = [bed.client(0).connected(), bed.client(0).connected(), bed.client(0).connected()];
        exporter.expect_domain("mps_clients", GPU, "", 3.0);
        Scene { bed, exporter, clients, alertmanager }
    }

    fn pids(&self) -> Vec<u32> {
        self.clients.iter().map(|client| client.pid).collect()
    }

    /// The fault of the second client, up to the list of victims.
    fn fault(&self) {
        let pids = self.pids();
        self.bed.order("fault");
        self.bed.order(&format!("say Client process {} encountered a fatal GPU error.", pids[1]));
        self.bed.order("say Server is handling a fatal GPU error.");
        for pid in &pids {
            self.bed.order(&format!("say Status of client {{{pid}, 1}} is INACTIVE"));
        }
        self.bed.order("say The following devices will be reset:");
        self.bed.order("say 0");
        self.bed.order("say The following clients have a sticky error set:");
        for pid in &pids {
            self.bed.order(&format!("say {pid}"));
        }
    }

    fn recover(&self) {
        self.bed.order("recover");
        self.bed.order("say Destroy server context on device 0");
        self.bed.order("say Creating server context on device 0 (NVIDIA H200)");
    }

    /// The only incident.
    fn incident(&self) -> Value {
        let all = self.exporter.json("/api/v1/incidents")["incidents"].as_array().unwrap().clone();
        assert_eq!(all.len(), 1, "{all:#?}");
        all[0].clone()
    }

    /// Waits until the only incident looks like this.
    #[track_caller]
    fn until(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        for _ in 0..1000 {
            last = self.incident();
            if holds(&last) {
                return last;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("not {what}: {last:#}\n{}", self.exporter.log());
    }

    /// Ids in the journal, each with the state of its last line.
    fn journal(&self) -> BTreeMap<String, String> {
        let text = std::fs::read_to_string(self.exporter.state().join("incidents.jsonl")).unwrap_or_default();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let word = |value: &Value| value.as_str().unwrap().to_owned();
        lines.map(|line| (word(&line["id"]), word(&line["state"]))).collect()
    }

    /// What was posted to Alertmanager: name and beginning of each alert. Posted again, it is the same one.
    fn posted(&self) -> BTreeSet<(String, String)> {
        let bodies = self.alertmanager.bodies.lock().unwrap();
        let alerts = bodies.iter().flat_map(|(_, body)| serde_json::from_str::<Vec<Value>>(body).unwrap());
        let word = |value: &Value| value.as_str().unwrap().to_owned();
        alerts.map(|alert| (word(&alert["labels"]["alertname"]), word(&alert["startsAt"]))).collect()
    }
}

fn pids_of(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|pid| pid.as_u64().unwrap()).collect()
}

/// When the exporter is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Killed {
    /// While losses may still arrive.
    AtOnce,
    /// When the victims that hang on are known to block recovery.
    Later,
}

#[test]
fn an_incident_goes_on_over_kill_9() {
    for version in versions() {
        for killed in [Killed::AtOnce, Killed::Later] {
            println!("{version}, killed {killed:?}");
            goes_on(&version, killed);
        }
    }
}

fn goes_on(version: &str, killed: Killed) {
    let mut scene = Scene::start(version, "15m");
    let mut pids: Vec<u64> = scene.pids().into_iter().map(u64::from).collect();
    scene.fault();
    scene.exporter.expect_domain("mps_clients_lost_total", GPU, r#",cause="fault""#, 3.0);
    scene.exporter.expect_domain("mps_mass_client_loss_total", GPU, "", 1.0);
    if killed == Killed::Later {
        scene.until("blocked", |incident| incident["state"] == "recovering");
    }
    let before = scene.until("told", |_| !scene.posted().is_empty());
    let posted = scene.posted();
    scene.exporter.kill();
    // One victim goes while nobody watches.
    scene.clients[0].kill();
    pids.remove(0);
    pids.sort_unstable();
    scene.exporter.start_again();

    let again = scene.until("blocked by the two that hang on", |incident| {
        incident["state"] == "recovering" && pids_of(&incident["recovery"]["blocked_by"]) == pids
    });
    assert_eq!(again["id"], before["id"], "{version} {killed:?}");
    assert_eq!(again["started_at"], before["started_at"]);
    assert_eq!(again["culprit"], before["culprit"]);
    assert_eq!(again["victims"].as_array().unwrap().len(), 3);
    assert_eq!(again["mass_client_loss"], true);
    assert_eq!(again["fault_domains"], before["fault_domains"]);
    let exporter = &scene.exporter;
    exporter.expect_domain("mps_recovery_blocking_clients", GPU, "", 2.0);
    exporter.expect(r#"mps_server_state{daemon="NAME",server="uid_0",state="fault"}"#, 1.0);
    // The line's time: the daemon's answer may have opened the incident a moment before the line was read.
    let began: jiff::Timestamp = before["started_at"].as_str().unwrap().parse().unwrap();
    let began = mps_exporter::time::unix_seconds(began);
    wait_for("the beginning of the fault", || {
        let told = exporter.domain_value("mps_fault_start_timestamp_seconds", GPU, "")?;
        ((told - began).abs() < 1.0).then_some(())
    });
    // The counters begin anew, and it was counted before.
    exporter.expect_domain("mps_incidents_total", GPU, r#",cause="fault""#, 0.0);
    exporter.expect_domain("mps_mass_client_loss_total", GPU, "", 0.0);
    exporter.expect_domain("mps_clients_lost_total", GPU, r#",cause="fault""#, 0.0);

    scene.clients[1].kill();
    scene.clients[2].kill();
    scene.exporter.expect_domain("mps_recovery_blocking_clients", GPU, "", 0.0);
    assert_ne!(scene.incident()["state"], "closed", "the server has not recovered");
    scene.recover();
    let over = scene.until("closed", |incident| incident["state"] == "closed");
    assert_eq!(over["id"], before["id"]);
    assert!(over["recovery"]["recovered_at"].is_string(), "{over:#}");
    assert!(over["recovery"]["seconds"].as_f64().unwrap() > 0.0);
    assert!(over["victims"].as_array().unwrap().iter().all(|victim| victim["exited_at"].is_string()));
    scene.exporter.expect_domain("mps_recovery_duration_seconds_count", GPU, "", 1.0);
    let id = before["id"].as_str().unwrap().to_owned();
    wait_for("the journal", || {
        (scene.journal() == BTreeMap::from([(id.clone(), "closed".into())])).then_some(())
    });
    // Each alert once, by name and beginning: to Alertmanager the same one, however often it is posted.
    let names: BTreeSet<String> = scene.posted().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names.len(), scene.posted().len(), "{:?}", scene.posted());
    assert!(scene.posted().is_superset(&posted));
    scene.exporter.is_clean();
}

/// The log from before was rotated away while the exporter was down: only the journal knows the victims.
#[test]
fn an_incident_goes_on_when_only_the_journal_tells_of_it() {
    let Some(version) = versions().pop() else { return };
    let mut scene = Scene::start(&version, "15m");
    scene.fault();
    scene.exporter.expect_domain("mps_mass_client_loss_total", GPU, "", 1.0);
    let before = scene.until("recovering", |incident| incident["state"] == "recovering");
    scene.exporter.kill();
    for log in ["server.log", "control.log"] {
        let file = std::fs::OpenOptions::new().write(true).open(scene.bed.log().join(log)).unwrap();
        file.set_len(0).unwrap();
    }
    scene.exporter.start_again();
    let again = scene.until("blocked by all", |incident| {
        pids_of(&incident["recovery"]["blocked_by"]).len() == 3 && incident["state"] == "recovering"
    });
    assert_eq!(again["id"], before["id"]);
    scene.exporter.expect_domain("mps_recovery_blocking_clients", GPU, "", 3.0);
    for client in &scene.clients {
        client.kill();
    }
    scene.exporter.expect_domain("mps_recovery_blocking_clients", GPU, "", 0.0);
    scene.recover();
    let over = scene.until("closed", |incident| incident["state"] == "closed");
    assert!(over["recovery"]["recovered_at"].is_string(), "{over:#}");
    scene.exporter.expect_domain("mps_incidents_total", GPU, r#",cause="fault""#, 0.0);
}

/// A fault while the exporter is down, and the end of all that it hit.
fn found_afterwards(version: &str, max_age: &str) -> (Scene, Value) {
    let mut scene = Scene::start(version, max_age);
    // The place up to here is on the disk.
    std::thread::sleep(Duration::from_millis(1500));
    scene.exporter.kill();
    let written_after = jiff::Timestamp::now();
    scene.fault();
    for client in &scene.clients {
        client.kill();
    }
    wait_for("the end of the clients", || {
        (scene.bed.server_log().matches("Client process disconnected").count() == 3).then_some(())
    });
    scene.recover();
    let written_before = jiff::Timestamp::now();
    std::thread::sleep(Duration::from_secs(3));
    scene.exporter.start_again();

    scene.exporter.expect_domain("mps_mass_client_loss_total", GPU, "", 1.0);
    let incident = scene.until("closed", |incident| incident["state"] == "closed");
    let started_at: jiff::Timestamp = incident["started_at"].as_str().unwrap().parse().unwrap();
    // Log lines carry milliseconds.
    let slack = Duration::from_millis(1);
    assert!(started_at + slack >= written_after && started_at <= written_before, "{started_at}");
    assert_eq!(incident["caught_up"], true);
    assert_eq!(incident["cause"], "fault");
    assert_eq!(incident["culprit"]["pid"], scene.clients[1].pid);
    assert_eq!(incident["victims"].as_array().unwrap().len(), 3);
    assert_eq!(incident["clients_before"], 3);
    assert_eq!(incident["mass_client_loss"], true);
    assert!(incident["recovery"]["recovered_at"].is_string(), "{incident:#}");
    let seconds = incident["recovery"]["seconds"].as_f64().unwrap();
    assert!(seconds < 3.0, "by the lines' own times, not by when they were read: {seconds} s");
    let exporter = &scene.exporter;
    exporter.expect_domain("mps_incidents_total", GPU, r#",cause="fault""#, 1.0);
    exporter.expect_domain("mps_clients_lost_total", GPU, r#",cause="fault""#, 3.0);
    let last = exporter.domain_value("mps_mass_client_loss_last_timestamp_seconds", GPU, "").unwrap();
    let distance = last - mps_exporter::time::unix_seconds(started_at);
    assert!((0.0..0.5).contains(&distance), "the time of the loss, not of its discovery");
    wait_for("the journal", || (scene.journal().len() == 1).then_some(()));
    exporter.is_clean();
    (scene, incident)
}

#[test]
fn a_fault_while_the_exporter_was_down_is_found_and_paged_while_it_is_young() {
    for version in versions() {
        let (mut scene, incident) = found_afterwards(&version, "15m");
        let started_at = incident["started_at"].as_str().unwrap().to_owned();
        let expected: BTreeSet<(String, String)> =
            ["MpsMassClientLoss", "MpsServerFault"].map(|name| (name.to_owned(), started_at.clone())).into();
        wait_for("the alerts", || (scene.posted() == expected).then_some(()));
        // Once more: what was found is found no second time.
        scene.exporter.kill();
        scene.alertmanager.bodies.lock().unwrap().clear();
        scene.exporter.start_again();
        scene.exporter.expect_domain("mps_clients", GPU, "", 0.0);
        std::thread::sleep(Duration::from_secs(2));
        assert_eq!(scene.incident()["id"], incident["id"]);
        assert_eq!(scene.exporter.domain_value("mps_mass_client_loss_total", GPU, ""), Some(0.0));
        assert_eq!(scene.posted(), BTreeSet::new());
        assert_eq!(scene.journal().len(), 1);
    }
}

#[test]
fn a_fault_while_the_exporter_was_down_is_only_recorded_when_it_is_old() {
    let Some(version) = versions().pop() else { return };
    let (scene, _) = found_afterwards(&version, "2s");
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(scene.posted(), BTreeSet::new());
}
