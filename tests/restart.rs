//! The restart of NVIDIA's own daemon: killed, wedged, and left alone while clients run.
//!
//! What the daemon's state is comes from the control source. The few lines between it and the restarter stand for the
//! model, whose part they take.
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "support/mps/mod.rs"]
mod mps;
#[path = "support/nodes.rs"]
#[allow(dead_code)]
mod nodes;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use mps::bed::{Bed, kill, program, versions};
use mps_exporter::config::{Control, Restart, State};
use mps_exporter::engine::snapshot::{ClientView, DaemonState, DaemonView, Snapshot};
use mps_exporter::event::{DaemonSite, Event, EventKind, Liveness, LockState, LogPlace};
use mps_exporter::outlet::command::Commands;
use mps_exporter::outlet::recorder::Recorder;
use mps_exporter::outlet::restart::Restarter;
use mps_exporter::source::control::ControlWatch;
use mps_exporter::source::process::proc::ProcRoot;
use mps_exporter::source::{Outbox, Shutdown};
use mps_exporter::telemetry::Telemetry;
use mps_exporter::time::Clock;
use rustix::process::Signal;
use tokio::sync::{mpsc, watch};

mps::entries!();

const DELAY: Duration = Duration::from_millis(300);
const NAME: &str = "default";

/// A bed that is watched and whose daemon is restarted.
struct Watched {
    bed: Bed,
    snapshot: Arc<ArcSwap<Snapshot>>,
    telemetry: Telemetry,
    _stop: watch::Sender<bool>,
}

impl Watched {
    fn new(version: &str, limit_per_hour: u32) -> Watched {
        let bed = Bed::start(version);
        let script = format!(
            // A wedged daemon is still there, and holds the lock.
            "pid=$(sed -n 's/.*\"pid\":\\([0-9]*\\).*/\\1/p'); [ -z \"$pid\" ] || kill -9 \"$pid\"; sleep 0.1; \
             PATH='{}/bin':/usr/bin:/bin exec '{}' -d",
            bed.directory().display(),
            program(version).display()
        );
        let config = Restart {
            daemons: vec![NAME.into()],
            command: ["/bin/sh", "-c", &script].map(String::from).to_vec(),
            delay: DELAY,
            max_backoff: Duration::from_secs(2),
            limit_per_hour,
            timeout: Duration::from_secs(10),
        };
        let telemetry = Telemetry::new();
        let state = State { directory: Some(bed.directory().join("state")), incidents_kept: 10 };
        let (recorder, _) = Recorder::start(&state, &telemetry);
        let snapshot = Arc::new(ArcSwap::from_pointee(nodes::empty()));
        let restarter = Arc::new(Restarter::new(
            &config,
            snapshot.clone(),
            &[],
            &recorder,
            &Commands::default(),
            &telemetry,
        ));
        let (outbox, events) = Outbox::new(Clock::new());
        let (stop, shutdown) = Shutdown::new();
        let site = DaemonSite {
            name: NAME.into(),
            pipe_directory: bed.pipe().into(),
            log_directory: bed.log(),
            root: PathBuf::new(),
            process: None,
            started_at: None,
            log: LogPlace::Files,
            visible_devices: None,
            is_configured: true,
        };
        let control = Control {
            interval: Duration::from_millis(500),
            timeout: Duration::from_millis(300),
            ..Control::default()
        };
        let (control, _look) =
            ControlWatch::new(site, &control, ProcRoot::new("/proc"), outbox, telemetry.clone(), None);
        tokio::spawn(control.run(shutdown.clone()));
        tokio::spawn(restarter.clone().run(shutdown));
        // The restart command is given these directories.
        let daemon = DaemonView {
            pipe_directory: bed.pipe().display().to_string(),
            log_directory: bed.log().display().to_string(),
            ..nodes::daemon(NAME)
        };
        tokio::spawn(model(events, snapshot.clone(), restarter, daemon));
        Watched { bed, snapshot, telemetry, _stop: stop }
    }

    fn state(&self) -> DaemonState {
        self.snapshot.load().daemons.first().map_or(DaemonState::Unknown, |daemon| daemon.state)
    }

    async fn until(&self, what: &str, holds: impl Fn(&Watched) -> bool) -> Duration {
        let begun = Instant::now();
        while !holds(self) {
            assert!(begun.elapsed() < mps::bed::PATIENCE, "waited in vain: {what}; {:?}", self.state());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        begun.elapsed()
    }

    async fn until_serving(&self) -> Duration {
        self.until("serving", |watched| watched.state() == DaemonState::Serving).await
    }

    fn restarts(&self, result: &str) -> f64 {
        let families = self.telemetry.registry().gather();
        let family = families.iter().find(|family| family.name() == "mps_daemon_restarts_total");
        let metrics = family.map(prometheus::proto::MetricFamily::get_metric).unwrap_or_default();
        let has = |metric: &&prometheus::proto::Metric| {
            metric.get_label().iter().any(|label| label.value() == result)
        };
        metrics.iter().find(has).map_or(0.0, |metric| metric.get_counter().get_value())
    }

    /// Puts clients into the snapshot, as the model has them.
    fn clients(&self, clients: &[ClientView]) {
        self.snapshot.rcu(|snapshot| Snapshot { clients: clients.to_vec(), ..Snapshot::clone(snapshot) });
    }
}

async fn model(
    mut events: mpsc::Receiver<Vec<Event>>,
    snapshot: Arc<ArcSwap<Snapshot>>,
    restarter: Arc<Restarter>,
    daemon: DaemonView,
) {
    while let Some(batch) = events.recv().await {
        for event in batch {
            let EventKind::Liveness(name, liveness) = event.kind else { continue };
            let (state, pid) = state_of(&liveness);
            let view = DaemonView { state, pid, ..daemon.clone() };
            snapshot.rcu(|snapshot| Snapshot { daemons: vec![view.clone()], ..Snapshot::clone(snapshot) });
            restarter.daemon_down(&name, state != DaemonState::Serving);
        }
    }
}

fn state_of(liveness: &Liveness) -> (DaemonState, Option<u32>) {
    match liveness.state {
        LockState::Held(process) if liveness.unanswered > 1 => (DaemonState::Wedged, Some(process.pid)),
        LockState::Held(process) => (DaemonState::Serving, Some(process.pid)),
        _ => (DaemonState::Stale, None),
    }
}

#[tokio::test]
async fn a_killed_and_a_wedged_daemon_are_restarted_within_the_delay() {
    for version in versions() {
        let watched = Watched::new(&version, 3);
        watched.until_serving().await;
        let first = watched.bed.daemon().unwrap();

        let killed_at = Instant::now();
        kill(first, Signal::KILL);
        watched.until("seen dead", |watched| watched.state() == DaemonState::Stale).await;
        let dead_after = killed_at.elapsed();
        watched.until("a new daemon", |watched| watched.bed.daemon().is_some_and(|pid| pid != first)).await;
        let took = killed_at.elapsed();
        assert!(took >= DELAY, "{took:?}");
        assert!(
            took < dead_after + DELAY + Duration::from_secs(2),
            "seen after {dead_after:?}, back after {took:?}"
        );
        watched.until_serving().await;
        let second = watched.bed.daemon().unwrap();

        kill(second, Signal::STOP);
        let seen_after = watched.until("seen wedged", |watched| watched.state() == DaemonState::Wedged).await;
        let restarted_after = watched
            .until("a new daemon", |watched| watched.bed.daemon().is_some_and(|pid| pid != second))
            .await;
        watched.until_serving().await;
        println!(
            "{version}: killed: seen {dead_after:?} later, back {took:?} later; wedged: seen {seen_after:?} later, restarted {restarted_after:?} after that"
        );
        watched.until("both counted", |watched| watched.restarts("ok") > 1.0).await;
        let journal = std::fs::read_to_string(watched.bed.directory().join("state/incidents.jsonl")).unwrap();
        assert!(journal.matches(r#""action":"restart""#).count() >= 3, "{journal}");
    }
}

#[tokio::test]
async fn a_daemon_whose_clients_run_on_is_left_alone_until_they_are_gone() {
    let Some(version) = versions().pop() else { return };
    let mut watched = Watched::new(&version, 3);
    watched.until_serving().await;
    watched.bed.start_server(0);
    let client = watched.bed.client(0).connected();
    watched.clients(&[ClientView { daemon: NAME.into(), pid: client.pid, ..nodes::client(0, 0) }]);
    kill(watched.bed.daemon().unwrap(), Signal::KILL);
    watched.until("seen dead", |watched| watched.state() == DaemonState::Stale).await;
    tokio::time::sleep(DELAY * 6).await;
    assert_eq!(watched.bed.daemon(), None, "its client still runs");
    client.kill();
    watched.clients(&[]);
    watched.until("a new daemon", |watched| watched.bed.daemon().is_some()).await;
}

#[tokio::test]
async fn a_daemon_that_keeps_dying_is_given_up_at_the_limit() {
    let Some(version) = versions().pop() else { return };
    let watched = Watched::new(&version, 2);
    for _ in 0..2 {
        watched.until_serving().await;
        let daemon = watched.bed.daemon().unwrap();
        kill(daemon, Signal::KILL);
        watched.until("a new daemon", |watched| watched.bed.daemon().is_some_and(|pid| pid != daemon)).await;
    }
    watched.until_serving().await;
    kill(watched.bed.daemon().unwrap(), Signal::KILL);
    watched.until("given up", |watched| watched.restarts("gave_up") > 0.0).await;
    tokio::time::sleep(DELAY * 4).await;
    assert_eq!(watched.bed.daemon(), None);
}
