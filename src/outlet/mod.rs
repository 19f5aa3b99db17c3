//! Outlets: what the exporter does with incidents beside showing them.
//!
//! [`Outlets`] is the way in. It puts the newest state of an incident into the [`journal`], and when that is on the
//! disk (or cannot be, or takes too long) hands it to each [`alertmanager`] and to the [`hook`]s. None of these can
//! hold up the model or each other.

pub mod alert;
pub mod alertmanager;
pub mod command;
pub mod hook;
pub mod journal;
pub mod post;
pub mod recorder;
pub mod restart;

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::config::{Alertmanager, Config, State};
use crate::engine::incident::{Change, Incident, IncidentChange, IncidentState};
use crate::engine::snapshot::Snapshot;
use crate::http_client::UrlError;
use crate::identity::DaemonName;
use crate::source::Shutdown;
use crate::telemetry::Telemetry;
use alertmanager::{AlertmanagerOutlet, Timing, sleep_until};
use command::Commands;
use hook::{DaemonInput, Hooks};
use journal::{Record, Restored};
use recorder::Recorder;
use restart::Restarter;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

/// Incidents and daemon changes that may wait. Each incident counts once, so honest input never comes near.
const MOST: usize = 1024;
/// What was merely learnt of an incident waits so long for more, to be written once.
const GATHER: Duration = Duration::from_millis(100);
/// How long a stop waits for last posts.
const STOP: Duration = Duration::from_secs(3);
/// How long the end of the program waits for commands that run. With the last posts it fits into the 15 s that the
/// Kubernetes manifests give.
const LAST_COMMANDS: Duration = Duration::from_secs(8);
/// How long after the start an incident that an earlier run left open must still be held open by the model to be told
/// again. By then every source has had its first look.
const CONFIRMED: Duration = Duration::from_secs(30);
/// The pause before an outlet that ended unexpectedly is started again.
const RESTART_PAUSE: Duration = Duration::from_secs(1);

/// All outlets of a configuration.
#[derive(Debug)]
pub struct Outlets {
    alertmanagers: Vec<Arc<AlertmanagerOutlet>>,
    hooks: Arc<Hooks>,
    restarter: Option<Arc<Restarter>>,
    state: State,
    recorder: Recorder,
    commands: Commands,
    snapshot: Arc<ArcSwap<Snapshot>>,
    waiting: Mutex<Waiting>,
    wake: Notify,
    telemetry: Telemetry,
}

#[derive(Debug, Default)]
struct Waiting {
    incidents: BTreeMap<Arc<str>, Arc<Incident>>,
    daemons_down: Vec<DaemonName>,
    /// When they are handed on.
    due: Option<Instant>,
}

impl Outlets {
    /// Opens the journal and sets up every configured outlet; [`Outlets::run`] starts them. Also returns what the
    /// journal holds of earlier runs, for the model to take up.
    pub fn new(
        config: &Config,
        snapshot: Arc<ArcSwap<Snapshot>>,
        telemetry: &Telemetry,
    ) -> Result<(Arc<Outlets>, Restored), UrlError> {
        let alertmanagers = alertmanagers(config, &[], telemetry)?;
        let (recorder, restored) = Recorder::start(&config.state, telemetry);
        let commands = Commands::default();
        let hooks = Hooks::new(&config.remediation.hooks, &restored.actions, &recorder, &commands, telemetry);
        let restarter = config.remediation.restart.as_ref().map(|restart| {
            let earlier = &restored.actions;
            Arc::new(Restarter::new(restart, snapshot.clone(), earlier, &recorder, &commands, telemetry))
        });
        let outlets = Outlets {
            alertmanagers,
            hooks: Arc::new(hooks),
            restarter,
            state: config.state.clone(),
            recorder,
            commands,
            snapshot,
            waiting: Mutex::default(),
            wake: Notify::new(),
            telemetry: telemetry.clone(),
        };
        Ok((Arc::new(outlets), restored))
    }

    /// The outlets of a changed configuration, to run in place of these once these are stopped. They go on where these
    /// were: with the same journal unless it is another place, with the alerts that unchanged Alertmanagers hold, and
    /// knowing which hooks ran and which daemons are down. New Alertmanagers are told of the open incidents.
    pub fn with_config(&self, config: &Config) -> Result<Arc<Outlets>, UrlError> {
        let alertmanagers = alertmanagers(config, &self.alertmanagers, &self.telemetry)?;
        let recorder = if config.state == self.state {
            self.recorder.clone()
        } else if config.state.directory == self.state.directory {
            self.recorder.keep(config.state.incidents_kept);
            self.recorder.clone()
        } else {
            Recorder::start(&config.state, &self.telemetry).0
        };
        let hooks = self.hooks.with_config(&config.remediation.hooks, &recorder);
        let restarter = config.remediation.restart.as_ref().map(|restart| {
            let snapshot = self.snapshot.clone();
            let mut made = Restarter::new(restart, snapshot, &[], &recorder, &self.commands, &self.telemetry);
            if let Some(earlier) = &self.restarter {
                made.take_over(earlier);
            }
            Arc::new(made)
        });
        let outlets = Outlets {
            alertmanagers,
            hooks: Arc::new(hooks),
            restarter,
            state: config.state.clone(),
            recorder,
            commands: self.commands.clone(),
            snapshot: self.snapshot.clone(),
            waiting: Mutex::new(std::mem::take(&mut *self.lock())),
            wake: Notify::new(),
            telemetry: self.telemetry.clone(),
        };
        outlets.tell(&outlets.open_incidents());
        Ok(Arc::new(outlets))
    }

    /// To be called when the program ends, after [`Outlets::run`] has: gives commands that still run, started under an
    /// earlier configuration too, a few seconds, and ends those that need longer.
    pub async fn finish_commands(&self) {
        self.commands.finish(LAST_COMMANDS).await;
    }

    /// Takes a change of an incident. Never waits.
    pub fn incident(&self, change: &IncidentChange) {
        let pause = if change.change == Change::Updated { GATHER } else { Duration::ZERO };
        let mut waiting = self.lock();
        waiting.incidents.insert(change.incident.id.clone(), change.incident.clone());
        if waiting.incidents.len() > MOST {
            waiting.incidents.pop_first();
            self.telemetry.journal_error();
        }
        waiting.hand_on_after(pause);
        drop(waiting);
        self.wake.notify_one();
    }

    /// Takes that a daemon is down, stale or wedged (`true`) or back (`false`). Never waits.
    pub fn daemon_down(&self, daemon: &DaemonName, is_down: bool) {
        if let Some(restarter) = &self.restarter {
            restarter.daemon_down(daemon, is_down);
        }
        if is_down {
            let mut waiting = self.lock();
            if waiting.daemons_down.len() < MOST {
                waiting.daemons_down.push(daemon.clone());
            }
            waiting.hand_on_after(Duration::ZERO);
            drop(waiting);
            self.wake.notify_one();
        }
    }

    /// Runs every outlet until the program stops, and then for a moment longer, to let out what waits. Can be started
    /// again after an unexpected end.
    pub async fn run(self: Arc<Self>, mut shutdown: Shutdown) {
        let (stop, stopped) = Shutdown::new();
        let mut tasks = JoinSet::new();
        for outlet in &self.alertmanagers {
            let (outlet, telemetry) = (outlet.clone(), self.telemetry.clone());
            let each = move |stopped| outlet.clone().run(stopped);
            tasks.spawn(supervised("alertmanager", each, stopped.clone(), telemetry));
        }
        let (hooks, telemetry) = (self.hooks.clone(), self.telemetry.clone());
        tasks.spawn(supervised(
            "hooks",
            move |stopped| hooks.clone().run(stopped),
            stopped.clone(),
            telemetry,
        ));
        if let Some(restarter) = self.restarter.clone() {
            let each = move |stopped| restarter.clone().run(stopped);
            tasks.spawn(supervised("restart", each, stopped.clone(), self.telemetry.clone()));
        }
        let mut confirmed = Some(Instant::now() + CONFIRMED);
        loop {
            let due = self.lock().due;
            tokio::select! {
                () = shutdown.wait() => break,
                () = self.wake.notified() => {}
                () = sleep_until(due) => self.hand_on().await,
                () = sleep_until(confirmed) => {
                    confirmed = None;
                    self.tell(&self.open_incidents());
                }
            }
        }
        self.hand_on().await;
        let _gone = stop.send(true);
        let _late = tokio::time::timeout(STOP, async { while tasks.join_next().await.is_some() {} }).await;
    }

    /// Records what waits, then tells everybody.
    async fn hand_on(&self) {
        let waiting = std::mem::take(&mut *self.lock());
        let incidents: Vec<_> = waiting.incidents.into_values().collect();
        if !incidents.is_empty() {
            self.recorder.record(incidents.iter().cloned().map(Record::Incident).collect()).await;
        }
        self.tell(&incidents);
        let snapshot = self.snapshot.load();
        for daemon in &waiting.daemons_down {
            self.hooks.daemon_down(DaemonInput::of(daemon, &snapshot));
        }
    }

    /// Tells everybody. Who knows an incident as it is does nothing more.
    fn tell(&self, incidents: &[Arc<Incident>]) {
        let snapshot = self.snapshot.load();
        for incident in incidents {
            for alertmanager in &self.alertmanagers {
                alertmanager.notify(incident);
            }
            let daemon = incident.daemon.as_ref().map(|name| DaemonInput::of(name, &snapshot));
            self.hooks.incident(incident, daemon.as_ref());
        }
    }

    /// What the model holds open.
    fn open_incidents(&self) -> Vec<Arc<Incident>> {
        let snapshot = self.snapshot.load();
        snapshot.incidents.iter().filter(|it| it.state != IncidentState::Closed).cloned().collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    fn hand_on_after(&mut self, pause: Duration) {
        let due = Instant::now() + pause;
        self.due = Some(self.due.map_or(due, |earlier| earlier.min(due)));
    }
}

/// An outlet for each configured Alertmanager: the one that there is where nothing about it changed.
fn alertmanagers(
    config: &Config,
    earlier: &[Arc<AlertmanagerOutlet>],
    telemetry: &Telemetry,
) -> Result<Vec<Arc<AlertmanagerOutlet>>, UrlError> {
    let one = |config: &Alertmanager| match earlier.iter().find(|outlet| outlet.config() == config) {
        Some(outlet) => Ok(outlet.clone()),
        None => AlertmanagerOutlet::new(config, Timing::default(), telemetry).map(Arc::new),
    };
    config.alertmanagers.iter().map(one).collect()
}

/// Runs a task, and starts it again when it panics.
async fn supervised<F>(
    name: &'static str,
    task: impl Fn(Shutdown) -> F,
    mut stopped: Shutdown,
    telemetry: Telemetry,
) where
    F: Future<Output = ()> + Send + 'static,
{
    loop {
        // A set of one: dropping it ends the task too.
        let mut running = JoinSet::new();
        running.spawn(task(stopped.clone()));
        match running.join_next().await {
            Some(Err(error)) if error.is_panic() => {
                tracing::error!(task = name, %error, "A task ended unexpectedly and is started again.");
                telemetry.task_restart(name);
            }
            _ => return,
        }
        tokio::select! {
            () = stopped.wait() => return,
            () = tokio::time::sleep(RESTART_PAUSE) => {}
        }
    }
}
