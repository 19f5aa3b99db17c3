use std::path::Path;

use serde_json::Value;

use super::*;
use crate::config::State;
use crate::engine::incident::IncidentState;
use crate::outlet::journal::Restored;
use crate::outlet::testing::{changed, incident};

fn hook(script: &str, timeout: Duration) -> Hook {
    Hook { command: ["/bin/sh", "-c", script].map(String::from).to_vec(), timeout }
}

fn state(directory: &Path) -> State {
    State { directory: Some(directory.to_owned()), incidents_kept: 100 }
}

/// Hooks that append what they read to `<directory>/<event>`.
fn appending(directory: &Path) -> BTreeMap<HookEvent, Hook> {
    let each = |event: HookEvent| {
        (event, hook(&format!("cat >>{}", directory.join(event.label()).display()), Duration::from_secs(10)))
    };
    HookEvent::ALL.into_iter().map(each).collect()
}

fn daemon() -> DaemonInput {
    DaemonInput {
        name: "default".into(),
        state: DaemonState::Serving,
        pid: Some(7),
        pipe_directory: "/tmp/nvidia-mps".into(),
        log_directory: "/var/log/nvidia-mps".into(),
    }
}

fn inputs(directory: &Path, event: HookEvent) -> Vec<Value> {
    let text = std::fs::read_to_string(directory.join(event.label())).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
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

/// Starts hooks over a journal in `directory`; the handle stops them.
fn start(
    directory: &Path,
    hooks: &BTreeMap<HookEvent, Hook>,
) -> (Arc<Hooks>, Restored, Telemetry, JoinSet<()>) {
    let telemetry = Telemetry::new();
    let (recorder, restored) = Recorder::start(&state(directory), &telemetry);
    let hooks = Arc::new(Hooks::new(hooks, &restored.actions, &recorder, &Commands::default(), &telemetry));
    let mut running = JoinSet::new();
    running.spawn({
        let hooks = hooks.clone();
        async move {
            let (_switch, shutdown) = Shutdown::new();
            hooks.run(shutdown).await;
        }
    });
    (hooks, restored, telemetry, running)
}

fn runs(telemetry: &Telemetry, event: HookEvent, result: &str) -> u64 {
    let families = telemetry.registry().gather();
    let family = families.iter().find(|family| family.name() == "mps_hook_runs_total").unwrap();
    let is_it = |name: &str, value: &str, metric: &prometheus::proto::Metric| {
        metric.get_label().iter().any(|label| label.name() == name && label.value() == value)
    };
    let metric = family
        .get_metric()
        .iter()
        .find(|metric| is_it("hook", event.label(), metric) && is_it("result", result, metric));
    // Counters of a handful of runs.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    metric.map_or(0, |metric| metric.get_counter().get_value() as u64)
}

#[tokio::test]
async fn each_event_runs_its_hook_once_per_incident_also_over_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path();
    let configured = appending(folder);
    let opened = Arc::new(incident());
    let blocked = changed(&opened, |incident| incident.state = IncidentState::Recovering);
    let recovered = changed(&blocked, |incident| {
        incident.recovery.recovered_at = Some("2026-04-01T12:01:00Z".parse().unwrap());
        incident.recovery.blocked_by.clear();
    });
    let (hooks, _, telemetry, running) = start(folder, &configured);
    assert_eq!(runs(&telemetry, HookEvent::Recovered, "ok"), 0);
    for _ in 0..3 {
        hooks.incident(&opened, Some(&daemon()));
        hooks.incident(&blocked, Some(&daemon()));
        hooks.incident(&recovered, Some(&daemon()));
    }
    hooks.daemon_down(daemon());
    until(|| HookEvent::ALL.into_iter().all(|event| runs(&telemetry, event, "ok") == 1)).await;

    let fault = &inputs(folder, HookEvent::ServerFault)[0];
    assert_eq!(fault["event"], "server_fault");
    assert_eq!(fault["daemon"]["pipe_directory"], "/tmp/nvidia-mps");
    assert_eq!(fault["incident"], serde_json::to_value(&*opened).unwrap());
    assert!(!fault["node"].as_str().unwrap().is_empty());
    fault["at"].as_str().unwrap().parse::<Timestamp>().unwrap();
    let down = &inputs(folder, HookEvent::DaemonDown)[0];
    assert!(down["incident"].is_null());
    assert_eq!(down["daemon"]["state"], "serving");

    // The end of each run is in the journal a moment after it is counted.
    tokio::time::sleep(Duration::from_millis(200)).await;
    drop(running);
    drop(hooks);
    let mut again = None;
    until(|| {
        // The journal's thread ends when its last user is gone.
        let started = start(folder, &configured);
        let is_open = !started.1.actions.is_empty();
        again = Some(started);
        is_open
    })
    .await;
    let (hooks, restored, telemetry, _running) = again.unwrap();
    let count = |result| restored.actions.iter().filter(|action| action.result == result).count();
    assert_eq!((count(ActionResult::Started), count(ActionResult::Ok)), (5, 5));
    hooks.incident(&recovered, Some(&daemon()));
    let another = changed(&opened, |incident| incident.id = "019b2c4d5e80-0".into());
    hooks.incident(&another, None);
    until(|| runs(&telemetry, HookEvent::ServerFault, "ok") == 1).await;
    assert_eq!(inputs(folder, HookEvent::Recovered).len(), 1);
    assert_eq!(inputs(folder, HookEvent::ServerFault).len(), 2);
}

#[tokio::test]
async fn a_loss_that_nothing_explains_and_old_history_run_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (hooks, _, telemetry, _running) = start(directory.path(), &appending(directory.path()));
    let open = Arc::new(incident());
    hooks.incident(&changed(&open, |incident| incident.cause = Cause::Unexplained), None);
    hooks.incident(&changed(&open, |incident| incident.caught_up = true), None);
    // The next in line is run, so the others would have been.
    let fresh = changed(&open, |incident| {
        incident.caught_up = true;
        incident.started_at = Timestamp::now();
    });
    hooks.incident(&fresh, None);
    until(|| {
        runs(&telemetry, HookEvent::ServerFault, "ok") == 1
            && runs(&telemetry, HookEvent::MassClientLoss, "ok") == 1
    })
    .await;
    assert_eq!(inputs(directory.path(), HookEvent::MassClientLoss).len(), 1);
}

#[tokio::test]
async fn a_hook_that_hangs_is_killed_and_too_many_waiting_are_dropped_and_counted() {
    let directory = tempfile::tempdir().unwrap();
    let configured = BTreeMap::from([(HookEvent::DaemonDown, hook("sleep 600", Duration::from_millis(100)))]);
    let (hooks, _, telemetry, _running) = start(directory.path(), &configured);
    for _ in 0..QUEUE + 3 {
        hooks.daemon_down(daemon());
    }
    assert_eq!(runs(&telemetry, HookEvent::DaemonDown, "dropped"), 3);
    until(|| runs(&telemetry, HookEvent::DaemonDown, "timeout") == QUEUE as u64).await;
}

#[tokio::test]
async fn a_hook_that_runs_goes_on_over_a_changed_configuration_and_the_next_one_waits_for_it() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().join("said");
    let said = || std::fs::read_to_string(&place).unwrap_or_default();
    // It prints after the change, which must not break it.
    let script = format!(
        "cat >/dev/null; echo begun >>{0}; sleep 0.6; echo one; sleep 0.1; echo two; echo ended >>{0}",
        place.display()
    );
    let configured = BTreeMap::from([
        (HookEvent::DaemonDown, hook(&script, Duration::from_secs(10))),
        (HookEvent::ServerFault, hook("sleep 600", Duration::from_secs(1))),
    ]);
    let (hooks, _, telemetry, running) = start(directory.path(), &configured);
    hooks.daemon_down(daemon());
    hooks.incident(&Arc::new(incident()), None);
    until(|| said() == "begun\n").await;
    hooks.daemon_down(daemon());
    drop(running);
    let next = Arc::new(hooks.with_config(&configured, &hooks.recorder));
    drop(hooks);
    let (_stop, stopped) = Shutdown::new();
    tokio::spawn(next.run(stopped));
    until(|| runs(&telemetry, HookEvent::DaemonDown, "ok") == 2).await;
    assert_eq!(said(), "begun\nended\nbegun\nended\n");
    until(|| runs(&telemetry, HookEvent::ServerFault, "timeout") == 1).await;
    let journal = || std::fs::read_to_string(directory.path().join("incidents.jsonl")).unwrap();
    until(|| journal().matches(r#""result":"ok""#).count() == 2).await;
}
