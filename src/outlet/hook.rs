//! Hooks: a command of the operator's for each event. That is how a site checkpoints, drains or cordons.
//!
//! Whether an event has come is read off the incident's state, not off the change that brought it, and each hook runs
//! once per incident: what has run is in the journal, so a restart of the exporter does not run it again.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};

use crate::config::{Hook, HookEvent};
use crate::engine::incident::{Cause, Incident};
use crate::engine::snapshot::{DaemonState, DaemonView, Snapshot};
use crate::identity::DaemonName;
use crate::outlet::alert::is_blocked;
use crate::outlet::command::{self, Commands, Run, Task};
use crate::outlet::journal::{Action, ActionKind, ActionResult};
use crate::outlet::recorder::Recorder;
use crate::source::Shutdown;
use crate::telemetry::Telemetry;

#[cfg(test)]
mod tests;

/// Events that may wait for a hook that still runs.
const QUEUE: usize = 16;
/// Incidents remembered per program as having run their hooks.
const REMEMBERED: usize = 4096;
/// An incident found after a restart runs no hook when it is older.
const MAX_AGE: Duration = Duration::from_secs(600);
/// How much of a command's output goes into the journal.
const MAX_JOURNAL_OUTPUT: usize = 1024;

impl HookEvent {
    /// Every event.
    pub const ALL: [HookEvent; 5] = [
        HookEvent::DaemonDown,
        HookEvent::ServerFault,
        HookEvent::RecoveryBlocked,
        HookEvent::MassClientLoss,
        HookEvent::Recovered,
    ];

    /// Its name in the configuration, in the hook's input and in the label `hook`.
    pub fn label(self) -> &'static str {
        match self {
            HookEvent::DaemonDown => "daemon_down",
            HookEvent::ServerFault => "server_fault",
            HookEvent::RecoveryBlocked => "recovery_blocked",
            HookEvent::MassClientLoss => "mass_client_loss",
            HookEvent::Recovered => "recovered",
        }
    }

    /// Whether an incident as it is now has come to this.
    fn holds_for(self, incident: &Incident) -> bool {
        match self {
            HookEvent::DaemonDown => false,
            HookEvent::ServerFault => matches!(incident.cause, Cause::Fault | Cause::ServerExit),
            HookEvent::RecoveryBlocked => is_blocked(incident),
            // A loss that nothing explains is a warning: no reason to cordon a node.
            HookEvent::MassClientLoss => incident.mass_client_loss && incident.cause != Cause::Unexplained,
            HookEvent::Recovered => incident.recovery.recovered_at.is_some(),
        }
    }
}

/// What a hook, or the restart command, reads on its standard input: one JSON object.
#[derive(Debug, Clone, Serialize)]
pub struct Input<'a> {
    /// The event; `restart` for the restart command.
    pub event: &'a str,
    /// When the command was started.
    pub at: Timestamp,
    /// The node: `NODE_NAME` where it is set, else the host's name.
    pub node: &'a str,
    /// The daemon, where it is known.
    pub daemon: Option<&'a DaemonInput>,
    /// The incident as in `/api/v1/incidents`; null for `daemon_down` and `restart`.
    pub incident: Option<&'a Incident>,
}

/// The daemon in an [`Input`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DaemonInput {
    /// The label `daemon`.
    pub name: Arc<str>,
    /// Its state, as `mps_control_daemon_state` has it.
    pub state: DaemonState,
    /// Its pid in the exporter's namespace.
    pub pid: Option<u32>,
    /// Its pipe directory.
    pub pipe_directory: String,
    /// Its log directory.
    pub log_directory: String,
}

impl From<&DaemonView> for DaemonInput {
    fn from(daemon: &DaemonView) -> Self {
        DaemonInput {
            name: daemon.name.clone(),
            state: daemon.state,
            pid: daemon.pid,
            pipe_directory: daemon.pipe_directory.clone(),
            log_directory: daemon.log_directory.clone(),
        }
    }
}

impl DaemonInput {
    /// What the snapshot knows of this daemon.
    pub fn of(name: &DaemonName, snapshot: &Snapshot) -> DaemonInput {
        match snapshot.daemons.iter().find(|daemon| daemon.name == *name) {
            Some(daemon) => daemon.into(),
            None => DaemonInput {
                name: name.clone(),
                state: DaemonState::Unknown,
                pid: None,
                pipe_directory: String::new(),
                log_directory: String::new(),
            },
        }
    }
}

/// The name of this node.
pub fn node_name() -> String {
    std::env::var("NODE_NAME").ok().filter(|name| !name.is_empty()).unwrap_or_else(|| {
        std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
    })
}

/// The configured hooks.
#[derive(Debug)]
pub struct Hooks {
    runners: BTreeMap<HookEvent, Runner>,
    ran: Mutex<Ran>,
    node: String,
    recorder: Recorder,
    commands: Commands,
    telemetry: Telemetry,
}

#[derive(Debug)]
struct Runner {
    hook: Hook,
    waiting: mpsc::Sender<Occasion>,
    queue: Arc<tokio::sync::Mutex<mpsc::Receiver<Occasion>>>,
}

/// Why a hook runs.
#[derive(Debug)]
struct Occasion {
    daemon: Option<DaemonInput>,
    incident: Option<Arc<Incident>>,
}

/// Which hook ran for which incident.
#[derive(Debug, Default, Clone)]
struct Ran {
    set: HashSet<(HookEvent, Arc<str>)>,
    order: VecDeque<(HookEvent, Arc<str>)>,
}

impl Ran {
    /// Whether it had not run before.
    fn first(&mut self, event: HookEvent, incident: &Arc<str>) -> bool {
        if !self.set.insert((event, incident.clone())) {
            return false;
        }
        self.order.push_back((event, incident.clone()));
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.set.remove(&oldest);
        }
        true
    }
}

impl Hooks {
    /// The hooks of a configuration. `earlier` is what the journal says was done.
    pub fn new(
        hooks: &BTreeMap<HookEvent, Hook>,
        earlier: &[Action],
        recorder: &Recorder,
        commands: &Commands,
        telemetry: &Telemetry,
    ) -> Hooks {
        let mut ran = Ran::default();
        for action in earlier.iter().filter(|action| action.action == ActionKind::Hook) {
            let event =
                HookEvent::ALL.into_iter().find(|event| action.event.as_deref() == Some(event.label()));
            if let (Some(event), Some(incident)) = (event, &action.incident) {
                ran.first(event, incident);
            }
        }
        Hooks::of(hooks, &BTreeMap::new(), ran, recorder, commands, telemetry)
    }

    /// The hooks of a changed configuration. They know what these have run, and run what still waits.
    #[must_use]
    pub fn with_config(&self, hooks: &BTreeMap<HookEvent, Hook>, recorder: &Recorder) -> Hooks {
        Hooks::of(hooks, &self.runners, self.lock_ran().clone(), recorder, &self.commands, &self.telemetry)
    }

    fn of(
        hooks: &BTreeMap<HookEvent, Hook>,
        earlier: &BTreeMap<HookEvent, Runner>,
        ran: Ran,
        recorder: &Recorder,
        commands: &Commands,
        telemetry: &Telemetry,
    ) -> Hooks {
        let runner = |event: &HookEvent, hook: &Hook| {
            let (waiting, queue) = if let Some(runner) = earlier.get(event) {
                (runner.waiting.clone(), runner.queue.clone())
            } else {
                let (waiting, queue) = mpsc::channel(QUEUE);
                (waiting, Arc::new(tokio::sync::Mutex::new(queue)))
            };
            (*event, Runner { hook: hook.clone(), waiting, queue })
        };
        for event in hooks.keys() {
            telemetry.hook_known(event.label(), &ActionResult::OF_HOOKS.map(ActionResult::label));
        }
        Hooks {
            runners: hooks.iter().map(|(event, hook)| runner(event, hook)).collect(),
            ran: Mutex::new(ran),
            node: node_name(),
            recorder: recorder.clone(),
            commands: commands.clone(),
            telemetry: telemetry.clone(),
        }
    }

    /// Takes an incident as it is now, with its daemon. Never waits.
    pub fn incident(&self, incident: &Arc<Incident>, daemon: Option<&DaemonInput>) {
        let age = Timestamp::now().duration_since(incident.started_at);
        if incident.caught_up && age.unsigned_abs() > MAX_AGE {
            return;
        }
        for (event, runner) in &self.runners {
            if event.holds_for(incident) && self.lock_ran().first(*event, &incident.id) {
                let occasion = Occasion { daemon: daemon.cloned(), incident: Some(incident.clone()) };
                self.queue(*event, runner, occasion);
            }
        }
    }

    /// Takes that a daemon is down, stale or wedged. Never waits.
    pub fn daemon_down(&self, daemon: DaemonInput) {
        if let Some(runner) = self.runners.get(&HookEvent::DaemonDown) {
            let occasion = Occasion { daemon: Some(daemon), incident: None };
            self.queue(HookEvent::DaemonDown, runner, occasion);
        }
    }

    fn queue(&self, event: HookEvent, runner: &Runner, occasion: Occasion) {
        if runner.waiting.try_send(occasion).is_err() {
            tracing::error!(hook = event.label(), "A hook was not run: too many runs of it wait.");
            self.telemetry.hook_run(event.label(), ActionResult::Dropped.label());
        }
    }

    fn lock_ran(&self) -> std::sync::MutexGuard<'_, Ran> {
        self.ran.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs hooks until the program stops: each event's one at a time, different events' side by side. A command that
    /// runs then goes on, for [`Commands::finish`] to await. Can be started again after an unexpected end.
    pub async fn run(self: Arc<Self>, shutdown: Shutdown) {
        let mut tasks = JoinSet::new();
        for event in self.runners.keys().copied() {
            let hooks = self.clone();
            let mut shutdown = shutdown.clone();
            tasks.spawn(async move {
                tokio::select! {
                    () = hooks.clone().serve(event) => {}
                    () = shutdown.wait() => {}
                }
            });
        }
        while let Some(ended) = tasks.join_next().await {
            finished(ended);
        }
    }

    async fn serve(self: Arc<Self>, event: HookEvent) {
        let Some(runner) = self.runners.get(&event) else { return };
        loop {
            let mut queue = runner.queue.clone().lock_owned().await;
            let Some(occasion) = queue.recv().await else { return };
            let hooks = self.clone();
            let attend = async move {
                if let Some(runner) = hooks.runners.get(&event) {
                    hooks.run_once(event, &runner.hook, &occasion).await;
                }
                // Until now the hooks of a changed configuration have waited, too.
                drop(queue);
            };
            finished(self.commands.spawn(attend).await);
        }
    }

    async fn run_once(&self, event: HookEvent, hook: &Hook, occasion: &Occasion) {
        let input = Input {
            event: event.label(),
            at: Timestamp::now(),
            node: &self.node,
            daemon: occasion.daemon.as_ref(),
            incident: occasion.incident.as_deref(),
        };
        let mut json = serde_json::to_vec(&input).expect("plain structures can be written as JSON");
        json.push(b'\n');
        let about = Action {
            action: ActionKind::Hook,
            at: input.at,
            event: Some(event.label().into()),
            daemon: occasion.daemon.as_ref().map(|daemon| daemon.name.clone()),
            incident: occasion.incident.as_ref().map(|incident| incident.id.clone()),
            result: ActionResult::Started,
            detail: None,
            seconds: None,
            output: None,
        };
        // On the disk before it starts: after a crash it is rather not run than run twice.
        self.recorder.action(about.clone()).await;
        let run = command::run(Task {
            command: &hook.command,
            environment: &[],
            input: &json,
            timeout: hook.timeout,
            stop: self.commands.stop(),
        })
        .await;
        self.telemetry.hook_run(event.label(), run.result.label());
        let incident = about.incident.as_deref().unwrap_or_default();
        let took = run.took.as_secs_f64();
        if run.result == ActionResult::Ok {
            tracing::info!(
                hook = event.label(),
                incident,
                seconds = took,
                output = run.output,
                "A hook ran."
            );
        } else {
            tracing::error!(
                hook = event.label(),
                incident,
                result = run.result.label(),
                detail = run.detail,
                seconds = took,
                output = run.output,
                "A hook failed."
            );
        }
        self.recorder.action(ended(about, run)).await;
    }
}

/// Passes a panic on to whoever starts the outlet again.
pub(super) fn finished(ended: Result<(), JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        std::panic::resume_unwind(error.into_panic());
    }
}

/// The record of a run that has ended.
pub(super) fn ended(about: Action, run: Run) -> Action {
    let from = run.output.len().saturating_sub(MAX_JOURNAL_OUTPUT);
    let from = (from..=run.output.len()).find(|at| run.output.is_char_boundary(*at)).unwrap_or(0);
    Action {
        at: Timestamp::now(),
        result: run.result,
        detail: Some(run.detail.into()),
        seconds: Some(run.took.as_secs_f64()),
        output: Some(run.output[from..].into()),
        ..about
    }
}
