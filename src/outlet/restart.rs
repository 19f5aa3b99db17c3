//! Restart of a control daemon that is dead or wedged: off unless configured, and never while clients run.
//!
//! A daemon that dies leaves its servers and clients running. Starting another then would give new clients a server
//! beside the old one, and a wedged daemon that is killed may take its server along. So nothing is done until no
//! client is left, and nothing where the number of clients is not known.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use jiff::Timestamp;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::config;
use crate::engine::snapshot::{ClientState, DaemonState, Snapshot};
use crate::identity::DaemonName;
use crate::outlet::alertmanager::sleep_until;
use crate::outlet::command::{self, Commands, Task};
use crate::outlet::hook::{DaemonInput, Input, ended, finished, node_name};
use crate::outlet::journal::{Action, ActionKind, ActionResult};
use crate::outlet::recorder::Recorder;
use crate::source::Shutdown;
use crate::telemetry::Telemetry;

#[cfg(test)]
mod tests;

/// The span of `limit_per_hour`.
const HOUR: Duration = Duration::from_secs(3600);
/// How often it is looked again whether the clients of a dead daemon are gone.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// The first pause after a restart that did not help, when `delay` is shorter.
const MIN_BACKOFF: Duration = Duration::from_secs(1);
/// Daemons that are watched at most.
const MOST: usize = 64;

/// The configured restart.
#[derive(Debug)]
pub struct Restarter {
    config: config::Restart,
    snapshot: Arc<ArcSwap<Snapshot>>,
    daemons: Mutex<BTreeMap<DaemonName, Watched>>,
    wake: Notify,
    node: String,
    recorder: Recorder,
    commands: Commands,
    /// Held while the command runs.
    turn: Arc<tokio::sync::Mutex<()>>,
    telemetry: Telemetry,
}

#[derive(Debug, Default)]
struct Watched {
    /// Set while it is down: what to do when.
    down: Option<Down>,
    /// When it was restarted within the last hour.
    attempts: VecDeque<Instant>,
}

#[derive(Debug)]
struct Down {
    /// When to act; `None` after giving up.
    due: Option<Instant>,
    /// Restarts in this spell of being down.
    tries: u32,
    /// Why nothing is done yet, as last said.
    held_back: Option<String>,
}

/// What to do about a daemon now.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Restart,
    /// Not down any more, as far as the snapshot tells.
    Leave,
    HoldBack(String),
    GiveUp,
}

impl Restarter {
    /// A restarter. `earlier` is what the journal says was done: it counts against the limit.
    pub fn new(
        config: &config::Restart,
        snapshot: Arc<ArcSwap<Snapshot>>,
        earlier: &[Action],
        recorder: &Recorder,
        commands: &Commands,
        telemetry: &Telemetry,
    ) -> Restarter {
        let mut daemons: BTreeMap<DaemonName, Watched> = BTreeMap::new();
        for action in earlier {
            let is_attempt = action.action == ActionKind::Restart && action.result == ActionResult::Started;
            let age = Duration::try_from(Timestamp::now().duration_since(action.at)).unwrap_or_default();
            if let (true, true, Some(daemon), Some(at)) =
                (is_attempt, age < HOUR, &action.daemon, Instant::now().checked_sub(age))
            {
                daemons.entry(daemon.clone()).or_default().attempts.push_back(at);
            }
        }
        Restarter {
            config: config.clone(),
            snapshot,
            daemons: Mutex::new(daemons),
            wake: Notify::new(),
            node: node_name(),
            recorder: recorder.clone(),
            commands: commands.clone(),
            turn: Arc::default(),
            telemetry: telemetry.clone(),
        }
    }

    /// Takes over what an earlier one knows: which daemons are down, what was tried within the hour, and whether its
    /// command still runs.
    pub fn take_over(&mut self, earlier: &Restarter) {
        self.turn = earlier.turn.clone();
        for (daemon, known) in std::mem::take(&mut *earlier.lock()) {
            let is_down = known.down.is_some();
            self.lock().entry(daemon.clone()).or_default().attempts.extend(known.attempts);
            if is_down {
                self.daemon_down(&daemon, true);
            }
        }
    }

    /// Takes that a daemon is down, stale or wedged (`true`) or back (`false`). Never waits.
    pub fn daemon_down(&self, daemon: &DaemonName, is_down: bool) {
        let is_ours =
            self.config.daemons.is_empty() || self.config.daemons.iter().any(|name| **name == **daemon);
        if !is_ours {
            return;
        }
        let mut daemons = self.lock();
        if daemons.len() >= MOST && !daemons.contains_key(daemon) {
            // Nothing is forgotten that counts: only daemons that are up and were not restarted within the hour.
            daemons.retain(|_, watched| watched.down.is_some() || watched.attempts_in_the_hour() > 0);
        }
        let watched = daemons.entry(daemon.clone()).or_default();
        match (is_down, &watched.down) {
            (true, None) => {
                let due = Some(Instant::now() + self.config.delay);
                watched.down = Some(Down { due, tries: 0, held_back: None });
            }
            (true, Some(_)) => {}
            (false, down) => {
                if let Some(down) = down.as_ref().filter(|down| down.tries > 0) {
                    tracing::info!(
                        daemon = &**daemon,
                        restarts = down.tries,
                        "The MPS control daemon is back."
                    );
                }
                watched.down = None;
            }
        }
        self.wake.notify_one();
    }

    /// Restarts daemons, one at a time, until the program stops. Can be started again after an unexpected end.
    pub async fn run(self: Arc<Self>, mut shutdown: Shutdown) {
        loop {
            let due = self.lock().values().filter_map(|watched| watched.down.as_ref()?.due).min();
            tokio::select! {
                () = shutdown.wait() => return,
                () = self.wake.notified() => continue,
                () = sleep_until(due) => {}
            }
            tokio::select! {
                () = shutdown.wait() => return,
                () = self.act() => {}
            }
        }
    }

    /// Acts on every daemon whose time has come.
    async fn act(self: &Arc<Self>) {
        let now = Instant::now();
        let is_due = |watched: &Watched| {
            watched.down.as_ref().is_some_and(|down| down.due.is_some_and(|due| due <= now))
        };
        let due: Vec<DaemonName> =
            self.lock().iter().filter(|(_, watched)| is_due(watched)).map(|(name, _)| name.clone()).collect();
        for daemon in due {
            let Ok(turn) = self.turn.clone().try_lock_owned() else {
                // One that began before the configuration changed. It may be what brings this daemon back.
                self.with_down(&daemon, |down| down.due = Some(now + self.backoff(1)));
                continue;
            };
            let snapshot = self.snapshot.load_full();
            let verdict = self.verdict(&daemon, &snapshot);
            match verdict {
                Verdict::Restart => {
                    let restarter = self.clone();
                    let attend = async move {
                        restarter.restart(&daemon, &snapshot).await;
                        drop(turn);
                    };
                    finished(self.commands.spawn(attend).await);
                }
                Verdict::GiveUp => self.give_up(&daemon).await,
                Verdict::Leave => self.with_down(&daemon, |down| down.due = Some(now + LOOK_AGAIN)),
                Verdict::HoldBack(reason) => self.with_down(&daemon, |down| {
                    down.due = Some(now + LOOK_AGAIN);
                    if down.held_back.as_ref() != Some(&reason) {
                        tracing::warn!(
                            daemon = &*daemon,
                            reason,
                            "The MPS control daemon is down but is not restarted."
                        );
                        down.held_back = Some(reason);
                    }
                }),
            }
        }
    }

    fn verdict(&self, daemon: &DaemonName, snapshot: &Snapshot) -> Verdict {
        let Some(view) = snapshot.daemons.iter().find(|view| view.name == *daemon) else {
            return Verdict::HoldBack("nothing is known of it any more".into());
        };
        match view.state {
            DaemonState::Down | DaemonState::Stale | DaemonState::Wedged => {}
            DaemonState::Serving | DaemonState::Idle => return Verdict::Leave,
            DaemonState::Unknown => return Verdict::HoldBack("no source can tell whether it runs".into()),
        }
        if let Some(reason) = clients_of(daemon, snapshot) {
            return Verdict::HoldBack(reason);
        }
        let attempts = self.lock().get(daemon).map_or(0, Watched::attempts_in_the_hour);
        if attempts >= self.config.limit_per_hour { Verdict::GiveUp } else { Verdict::Restart }
    }

    async fn restart(&self, daemon: &DaemonName, snapshot: &Snapshot) {
        let view = snapshot.daemons.iter().find(|view| view.name == *daemon).map(DaemonInput::from);
        let at = Timestamp::now();
        let input = Input { event: "restart", at, node: &self.node, daemon: view.as_ref(), incident: None };
        let mut json = serde_json::to_vec(&input).expect("plain structures can be written as JSON");
        json.push(b'\n');
        let about = action(daemon, ActionResult::Started);
        self.recorder.action(about.clone()).await;
        let mut tries = 0;
        {
            let mut daemons = self.lock();
            let watched = daemons.entry(daemon.clone()).or_default();
            watched.attempts.retain(|at| at.elapsed() < HOUR);
            watched.attempts.push_back(Instant::now());
            if let Some(down) = &mut watched.down {
                down.tries += 1;
                tries = down.tries;
            }
        }
        tracing::warn!(daemon = &**daemon, attempt = tries, "Restarting the MPS control daemon.");
        let mut environment = vec![("MPS_DAEMON", &**daemon)];
        if let Some(view) = &view {
            environment.push(("CUDA_MPS_PIPE_DIRECTORY", &view.pipe_directory));
            environment.push(("CUDA_MPS_LOG_DIRECTORY", &view.log_directory));
        }
        let run = command::run(Task {
            command: &self.config.command,
            environment: &environment,
            input: &json,
            timeout: self.config.timeout,
            stop: self.commands.stop(),
        })
        .await;
        self.telemetry.daemon_restart(daemon, run.result.label());
        let next = Instant::now() + self.backoff(tries);
        self.with_down(daemon, |down| down.due = Some(next));
        if run.result == ActionResult::Ok {
            tracing::info!(daemon = &**daemon, output = run.output, "The restart command ran.");
        } else {
            tracing::error!(
                daemon = &**daemon,
                result = run.result.label(),
                detail = run.detail,
                output = run.output,
                "The restart command failed."
            );
        }
        self.recorder.action(ended(about, run)).await;
    }

    /// Doubles with each restart that did not help.
    fn backoff(&self, tries: u32) -> Duration {
        let first = self.config.delay.max(MIN_BACKOFF);
        first.saturating_mul(1 << tries.saturating_sub(1).min(16)).min(self.config.max_backoff.max(first))
    }

    async fn give_up(&self, daemon: &DaemonName) {
        tracing::error!(
            daemon = &**daemon,
            limit_per_hour = self.config.limit_per_hour,
            "The MPS control daemon is down and its restarts of this hour are used up. It is not restarted again until it has come back."
        );
        self.with_down(daemon, |down| down.due = None);
        self.telemetry.daemon_restart(daemon, ActionResult::GaveUp.label());
        self.recorder.action(action(daemon, ActionResult::GaveUp)).await;
    }

    /// Changes what is known of a daemon that is still down.
    fn with_down(&self, daemon: &DaemonName, change: impl FnOnce(&mut Down)) {
        if let Some(down) = self.lock().get_mut(daemon).and_then(|watched| watched.down.as_mut()) {
            change(down);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<DaemonName, Watched>> {
        self.daemons.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watched {
    fn attempts_in_the_hour(&self) -> u32 {
        let count = self.attempts.iter().filter(|at| at.elapsed() < HOUR).count();
        u32::try_from(count).unwrap_or(u32::MAX)
    }
}

/// Why a daemon must not be restarted for the sake of its clients; `None`: no client runs.
fn clients_of(daemon: &DaemonName, snapshot: &Snapshot) -> Option<String> {
    let clients: Vec<_> = snapshot.clients.iter().filter(|client| client.daemon == *daemon).collect();
    if !clients.is_empty() {
        let lost = clients.iter().filter(|client| client.state == ClientState::Lost).count();
        return Some(match lost {
            0 => format!("{} clients still run", clients.len()),
            _ => format!("{} clients have not exited ({lost} of them lost)", clients.len()),
        });
    }
    let mut servers = snapshot.servers.iter().filter(|server| server.daemon == *daemon);
    servers.find_map(|server| match (server.is_up, server.clients) {
        (Some(false), _) | (Some(true), Some(0)) => None,
        (Some(true), Some(count)) => Some(format!("server {} still has {count} clients", server.server)),
        (Some(true), None) => Some(format!("server {} runs and nothing tells its clients", server.server)),
        (None, _) => Some(format!("no source can tell whether server {} still runs", server.server)),
    })
}

fn action(daemon: &DaemonName, result: ActionResult) -> Action {
    Action {
        action: ActionKind::Restart,
        at: Timestamp::now(),
        event: None,
        daemon: Some(daemon.clone()),
        incident: None,
        result,
        detail: None,
        seconds: None,
        output: None,
    }
}
