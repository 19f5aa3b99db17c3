use std::path::Path;

use super::*;
use crate::config::{ClientTls, Hook, HookEvent};
use crate::engine::snapshot::Snapshot;
use crate::outlet::testing::{changed, incident};

fn snapshot(incidents: Vec<Arc<Incident>>) -> Arc<ArcSwap<Snapshot>> {
    Arc::new(ArcSwap::from_pointee(Snapshot { incidents, ..crate::test_nodes::empty() }))
}

/// Nobody listens there.
fn unreachable() -> Alertmanager {
    Alertmanager {
        url: "http://127.0.0.1:1".into(),
        labels: BTreeMap::new(),
        runbooks: None,
        basic_auth: None,
        bearer_token_file: None,
        tls: ClientTls::default(),
        resolve: false,
        timeout: Duration::from_secs(1),
        max_age: Duration::from_secs(900),
    }
}

fn config(directory: &Path) -> Config {
    let script = format!("cat >>{}", directory.join("ran").display());
    let hook = Hook {
        command: ["/bin/sh", "-c", &script].map(String::from).to_vec(),
        timeout: Duration::from_secs(10),
    };
    let mut config = Config::default();
    config.state.directory = Some(directory.to_owned());
    config.remediation.hooks.insert(HookEvent::ServerFault, hook);
    config
}

fn ran(directory: &Path) -> usize {
    std::fs::read_to_string(directory.join("ran")).unwrap_or_default().lines().count()
}

async fn until(mut holds: impl FnMut() -> bool) {
    for _ in 0..500 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("it did not come to that within 10 s");
}

#[tokio::test]
async fn a_changed_configuration_goes_on_with_the_journal_the_alerts_and_what_has_run() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path();
    let opened = changed(&Arc::new(incident()), |incident| incident.started_at = jiff::Timestamp::now());
    let mut config = config(folder);
    let telemetry = Telemetry::new();
    let (outlets, _) = Outlets::new(&config, snapshot(vec![opened.clone()]), &telemetry).unwrap();
    let (stop, stopped) = Shutdown::new();
    let running = tokio::spawn(outlets.clone().run(stopped));
    outlets.incident(&IncidentChange { change: Change::Opened, incident: opened.clone() });
    until(|| ran(folder) == 1).await;
    stop.send(true).unwrap();
    running.await.unwrap();
    // Came after the stop: it is not lost.
    let another = changed(&opened, |incident| incident.id = "019b2c4d5e80-0".into());
    outlets.incident(&IncidentChange { change: Change::Opened, incident: another });

    config.alertmanagers.push(unreachable());
    config.state.incidents_kept = 7;
    let next = outlets.with_config(&config).unwrap();
    assert_eq!(next.alertmanagers[0].held(), 2, "a new Alertmanager is told of what is open");
    drop(outlets);
    let (_stop, stopped) = Shutdown::new();
    tokio::spawn(next.clone().run(stopped));
    next.incident(&IncidentChange { change: Change::Recovered, incident: opened.clone() });
    let journal = || std::fs::read_to_string(folder.join(journal::FILE_NAME)).unwrap_or_default();
    until(|| journal().matches(r#"{"id":"019b2c4d5e6f"#).count() == 2).await;
    until(|| ran(folder) == 2 && journal().contains("019b2c4d5e80-0")).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let ran = std::fs::read_to_string(folder.join("ran")).unwrap();
    assert_eq!(ran.matches(&*opened.id).count(), 1, "the hook has run for it before");
    assert!(Arc::ptr_eq(&next.with_config(&config).unwrap().alertmanagers[0], &next.alertmanagers[0]));
    let errors = telemetry.registry().gather();
    let errors = errors.iter().find(|family| family.name() == "mps_journal_errors_total").unwrap();
    assert_eq!(errors.get_metric()[0].get_counter().get_value().to_bits(), 0_f64.to_bits());
}

#[tokio::test(start_paused = true)]
async fn what_an_earlier_run_left_open_is_told_again_once_the_model_still_holds_it() {
    let open = changed(&Arc::new(incident()), |incident| incident.state = IncidentState::Recovering);
    let over = changed(&open, |incident| {
        incident.id = "019b2c4d5e80-0".into();
        incident.fault_domains = vec!["default/1".into()];
        incident.state = IncidentState::Closed;
    });
    let mut config = Config::default();
    config.state.directory = None;
    config.alertmanagers.push(unreachable());
    let (outlets, _) = Outlets::new(&config, snapshot(vec![open, over]), &Telemetry::new()).unwrap();
    let (_stop, stopped) = Shutdown::new();
    tokio::spawn(outlets.clone().run(stopped));
    tokio::time::sleep(CONFIRMED.saturating_sub(Duration::from_secs(1))).await;
    assert_eq!(outlets.alertmanagers[0].held(), 0, "nothing has confirmed it yet");
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(outlets.alertmanagers[0].held(), 3);
}
