use super::*;
use crate::config::State;
use crate::engine::snapshot::{ClientView, Count, DaemonView, ServerView};

fn restart_config(script: &str) -> config::Restart {
    config::Restart {
        daemons: Vec::new(),
        command: ["/bin/sh", "-c", script].map(String::from).to_vec(),
        delay: Duration::from_millis(50),
        max_backoff: Duration::from_millis(200),
        limit_per_hour: 3,
        timeout: Duration::from_secs(10),
    }
}

fn snapshot(state: DaemonState) -> Snapshot {
    let daemon = DaemonView {
        name: "default".into(),
        state,
        pid: None,
        started_at: None,
        pipe_directory: "/tmp/pipe".into(),
        log_directory: "/tmp/log".into(),
        log: crate::event::LogPlace::Files,
        protocol: None,
        version: None,
        pending_clients: None,
        pending_oldest: None,
        default_active_thread_percentage: None,
        rejected: Vec::new(),
        troubles: Vec::new(),
    };
    Snapshot {
        generation: 1,
        at: Timestamp::UNIX_EPOCH,
        daemons: vec![daemon],
        servers: Vec::new(),
        domains: Vec::new(),
        clients: Vec::new(),
        gpus: Vec::new(),
        xids: Vec::new(),
        sources: Vec::new(),
        incidents: Vec::new(),
        disagreements: Vec::new(),
    }
}

fn server(is_up: Option<bool>, clients: Option<u32>) -> ServerView {
    ServerView {
        daemon: "default".into(),
        server: "uid_0".into(),
        is_up,
        status: None,
        pid: None,
        uid: Some(0),
        version: None,
        started_at: None,
        clients,
        starts: Count::default(),
        exits_orderly: Count::default(),
        exits_failed: Count::default(),
        faults: Count::default(),
        last_exit_status: None,
        last_start_failure: None,
    }
}

fn client(state: ClientState) -> ClientView {
    ClientView {
        daemon: "default".into(),
        server: "uid_0".into(),
        pid: 9,
        host_pid: None,
        command: None,
        workload: None,
        domains: Vec::new(),
        devices_known_by: None,
        contexts: 1,
        memory_bytes: None,
        connected_at: None,
        started_at: None,
        checkpoint_at: None,
        has_checkpoint_place: false,
        state,
    }
}

struct Bed {
    directory: tempfile::TempDir,
    snapshot: Arc<ArcSwap<Snapshot>>,
    restarter: Arc<Restarter>,
    telemetry: Telemetry,
    running: tokio::task::JoinSet<()>,
}

/// A restarter over a journal in a directory of its own; `script` sees that directory as `$DIRECTORY`.
fn bed(directory: tempfile::TempDir, script: &str, change: impl FnOnce(&mut config::Restart)) -> Bed {
    let mut config = restart_config(&format!("DIRECTORY={}; {script}", directory.path().display()));
    change(&mut config);
    let telemetry = Telemetry::new();
    let state = State { directory: Some(directory.path().to_owned()), incidents_kept: 100 };
    let (recorder, restored) = Recorder::start(&state, &telemetry);
    let snapshot = Arc::new(ArcSwap::from_pointee(snapshot(DaemonState::Stale)));
    let restarter = Arc::new(Restarter::new(
        &config,
        snapshot.clone(),
        &restored.actions,
        &recorder,
        &Commands::default(),
        &telemetry,
    ));
    let mut running = tokio::task::JoinSet::new();
    running.spawn({
        let restarter = restarter.clone();
        async move {
            let (_switch, shutdown) = Shutdown::new();
            restarter.run(shutdown).await;
        }
    });
    Bed { directory, snapshot, restarter, telemetry, running }
}

impl Bed {
    fn tries(&self) -> usize {
        let text = std::fs::read_to_string(self.directory.path().join("tries")).unwrap_or_default();
        text.lines().count()
    }

    fn counted(&self, result: &str) -> f64 {
        let families = self.telemetry.registry().gather();
        let family = families.iter().find(|family| family.name() == "mps_daemon_restarts_total");
        let metrics = family.map(prometheus::proto::MetricFamily::get_metric).unwrap_or_default();
        let has = |metric: &&prometheus::proto::Metric| {
            metric.get_label().iter().any(|label| label.value() == result)
        };
        metrics.iter().find(has).map_or(0.0, |metric| metric.get_counter().get_value())
    }

    async fn until(&self, holds: impl Fn(&Bed) -> bool) {
        for _ in 0..500 {
            if holds(self) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("it did not come to that within 10 s: {:?}", self.restarter);
    }
}

const TRY: &str = "echo $MPS_DAEMON $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY >>$DIRECTORY/tries";

#[tokio::test]
async fn a_dead_daemon_is_restarted_after_the_delay_and_left_alone_once_back() {
    let bed = bed(tempfile::tempdir().unwrap(), &format!("{TRY}; cat >$DIRECTORY/input"), |_| {});
    let started = std::time::Instant::now();
    bed.restarter.daemon_down(&"default".into(), true);
    bed.restarter.daemon_down(&"default".into(), true);
    bed.until(|bed| bed.counted("ok") > 0.0).await;
    assert!(started.elapsed() >= Duration::from_millis(50));
    bed.restarter.daemon_down(&"default".into(), false);
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert_eq!(bed.tries(), 1);
    let tries = std::fs::read_to_string(bed.directory.path().join("tries")).unwrap();
    assert_eq!(tries, "default /tmp/pipe /tmp/log\n");
    let input = std::fs::read_to_string(bed.directory.path().join("input")).unwrap();
    let input: serde_json::Value = serde_json::from_str(&input).unwrap();
    assert_eq!((&input["event"], &input["daemon"]["state"]), (&"restart".into(), &"stale".into()));
    drop(bed.running);
}

#[tokio::test]
async fn it_backs_off_gives_up_at_the_limit_says_so_and_starts_over_when_the_daemon_was_back() {
    let bed =
        bed(tempfile::tempdir().unwrap(), &format!("{TRY}; exit 1"), |config| config.limit_per_hour = 2);
    bed.restarter.daemon_down(&"default".into(), true);
    bed.until(|bed| bed.counted("gave_up") > 0.0).await;
    assert_eq!(bed.tries(), 2);
    tokio::time::sleep(Duration::from_millis(1200)).await;
    assert_eq!(bed.tries(), 2);
    assert_eq!(
        (bed.counted("failed").to_bits(), bed.counted("gave_up").to_bits()),
        (2_f64.to_bits(), 1_f64.to_bits())
    );
    // Back, and dead again within the hour: the limit still counts.
    bed.restarter.daemon_down(&"default".into(), false);
    bed.restarter.daemon_down(&"default".into(), true);
    bed.until(|bed| bed.counted("gave_up") > 1.0).await;
    assert_eq!(bed.tries(), 2);

    // So it does after a restart of the exporter: the journal knows.
    let Bed { directory, running, restarter, .. } = bed;
    drop((running, restarter));
    tokio::time::sleep(Duration::from_millis(200)).await;
    let text = std::fs::read_to_string(directory.path().join("incidents.jsonl")).unwrap();
    assert_eq!(text.matches(r#""result":"gave_up""#).count(), 2, "{text}");
    let bed = self::bed(directory, TRY, |config| config.limit_per_hour = 2);
    bed.restarter.daemon_down(&"default".into(), true);
    bed.until(|bed| bed.counted("gave_up") > 0.0).await;
    assert_eq!(bed.tries(), 2);
}

#[tokio::test]
async fn it_never_acts_while_clients_run_or_may_run() {
    let bed = bed(tempfile::tempdir().unwrap(), TRY, |_| {});
    let cases = [
        (vec![client(ClientState::Active)], vec![server(Some(false), Some(0))]),
        (vec![client(ClientState::Lost)], vec![]),
        (vec![], vec![server(Some(true), Some(1))]),
        (vec![], vec![server(Some(true), None)]),
        (vec![], vec![server(Some(false), None), server(None, Some(0))]),
    ];
    let mut stale = snapshot(DaemonState::Stale);
    for (clients, servers) in cases {
        (stale.clients, stale.servers) = (clients, servers);
        let verdict = bed.restarter.verdict(&"default".into(), &stale);
        assert!(matches!(verdict, Verdict::HoldBack(_)), "{verdict:?}");
    }
    bed.snapshot.store(Arc::new(stale.clone()));
    bed.restarter.daemon_down(&"default".into(), true);
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!(bed.tries(), 0);
    // The last client has gone.
    stale.servers = vec![server(Some(true), Some(0)), server(Some(false), None)];
    bed.snapshot.store(Arc::new(stale));
    bed.until(|bed| bed.tries() == 1).await;
}

#[tokio::test]
async fn only_what_is_down_for_sure_is_restarted() {
    let bed = bed(tempfile::tempdir().unwrap(), TRY, |config| config.daemons = vec!["training".into()]);
    let name = "default".into();
    for (state, expected) in [
        (DaemonState::Down, Verdict::Restart),
        (DaemonState::Stale, Verdict::Restart),
        (DaemonState::Wedged, Verdict::Restart),
        (DaemonState::Idle, Verdict::Leave),
        (DaemonState::Serving, Verdict::Leave),
    ] {
        assert_eq!(bed.restarter.verdict(&name, &snapshot(state)), expected);
    }
    assert!(matches!(bed.restarter.verdict(&name, &snapshot(DaemonState::Unknown)), Verdict::HoldBack(_)));
    assert!(matches!(
        bed.restarter.verdict(&"gone".into(), &snapshot(DaemonState::Stale)),
        Verdict::HoldBack(_)
    ));
    bed.restarter.daemon_down(&name, true);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(bed.tries(), 0, "another daemon is configured");
}

#[test]
fn the_back_off_doubles_up_to_its_bound() {
    let telemetry = Telemetry::new();
    let state = State { directory: None, incidents_kept: 1 };
    let (recorder, _) = Recorder::start(&state, &telemetry);
    let snapshot = Arc::new(ArcSwap::from_pointee(snapshot(DaemonState::Stale)));
    let config = config::Restart {
        delay: Duration::from_secs(10),
        max_backoff: Duration::from_secs(60),
        ..restart_config("true")
    };
    let restarter = Restarter::new(&config, snapshot, &[], &recorder, &Commands::default(), &telemetry);
    let pauses: Vec<u64> = (1..6).map(|tries| restarter.backoff(tries).as_secs()).collect();
    assert_eq!(pauses, [10, 20, 40, 60, 60]);
}

#[tokio::test]
async fn a_restart_that_runs_goes_on_over_a_changed_configuration_and_no_other_begins_meanwhile() {
    let script = format!("{TRY}; cat >/dev/null; sleep 0.7; echo said; echo ended >>$DIRECTORY/tries");
    let mut bed = bed(tempfile::tempdir().unwrap(), &script, |_| {});
    bed.restarter.daemon_down(&"default".into(), true);
    bed.until(|bed| bed.tries() == 1).await;
    bed.running.shutdown().await;
    let earlier = bed.restarter.clone();
    let mut next = Restarter::new(
        &earlier.config,
        bed.snapshot.clone(),
        &[],
        &earlier.recorder,
        &earlier.commands,
        &bed.telemetry,
    );
    next.take_over(&earlier);
    let (_stop, stopped) = Shutdown::new();
    tokio::spawn(Arc::new(next).run(stopped));
    bed.until(|bed| bed.counted("ok") > 1.5).await;
    let tries = std::fs::read_to_string(bed.directory.path().join("tries")).unwrap();
    let ends: Vec<bool> = tries.lines().map(|line| line == "ended").collect();
    assert_eq!(ends[..4], [false, true, false, true], "{tries}");
}
