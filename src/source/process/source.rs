//! The source itself: takes the model's questions, and tells who a process is, who it works for, and when it ends.
//!
//! What never blocks (`stat`, `status`, pidfds) is done on the runtime; what may (environments, folders, checkpoints, a
//! pass over all processes) on two threads, one question at a time.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;

use super::checkpoint::{self, Newest};
use super::kubelet::{self, KubeletError, ListedPod};
use super::namespace::{self, Located, View};
use super::pidfd::{ExitWatch, Refusal};
use super::proc::{ProcError, ProcRoot};
use super::watch::{Follow, Watches};
use super::worker::Worker;
use super::workload::{self, Attribution, Attributions, Attributor, KEEP_PARTIAL, KEEP_WHOLE};
use crate::config::{Checkpoints, Config, Host};
use crate::event::{Event, EventKind, ProcessFacts, SourceHealth, SourceName};
use crate::identity::{DaemonName, ProcessId};
use crate::source::{Outbox, Shutdown, live};
use crate::telemetry::Telemetry;

/// Questions that may wait. The model never waits for this source: beyond, they are dropped and counted.
const QUEUE: usize = 65_536;
/// Done at once, before the runtime's other tasks get their turn.
const BATCH: usize = 64;
/// How often processes without a pidfd are looked at.
const TICK: Duration = Duration::from_secs(1);
/// After how long a thread that gives no answer is given up.
const STUCK_AFTER: Duration = Duration::from_secs(5);
/// How often checkpoints are looked at.
const CHECKPOINT_INTERVAL: Duration = Duration::from_secs(30);
/// For how long a new client's first checkpoint look waits for other new clients.
const CHECKPOINT_DELAY: Duration = Duration::from_millis(500);
/// After how long a look at checkpoints counts as hanging.
const CHECKPOINT_STUCK_AFTER: Duration = Duration::from_secs(60);
/// How often this source says that it is well.
const HEALTH_INTERVAL: Duration = Duration::from_secs(30);
/// For how long the time of boot is believed; it moves when the wall clock is set.
const BOOT_KEEP: Duration = Duration::from_secs(60);
/// How often a pid of another namespace may make all processes be looked through.
const LOCATE_INTERVAL: Duration = Duration::from_millis(250);
/// How often the kubelet is asked while names are missing, and how seldom while it fails.
const KUBELET_INTERVAL: Duration = Duration::from_secs(30);
const KUBELET_MAX_BACKOFF: Duration = Duration::from_secs(300);
/// A daemon's first pids may be asked about just before its process is made known.
const GRACE: Duration = Duration::from_secs(2);
/// Daemons that are remembered although nobody watches a process of theirs.
const DAEMONS: usize = 256;

const SOURCE: &str = "proc";

/// What the source needs of the configuration.
#[derive(Debug, Clone)]
pub struct ProcessSettings {
    /// `host`.
    pub host: Host,
    /// `checkpoints`.
    pub checkpoints: Checkpoints,
}

impl From<&Config> for ProcessSettings {
    fn from(config: &Config) -> Self {
        ProcessSettings { host: config.host.clone(), checkpoints: config.checkpoints.clone() }
    }
}

#[derive(Debug)]
enum Command {
    Watch(DaemonName, u32),
    Unwatch(DaemonName, u32),
    Daemon(DaemonName, Option<ProcessId>),
}

/// Where the model's questions go. Never waits. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ProcessWatcher {
    commands: mpsc::Sender<Command>,
    telemetry: Telemetry,
}

impl ProcessWatcher {
    /// Tells who this pid of the daemon's is, and when it ends. Asked again for the same pid, everything known of it is
    /// told again. `daemon_process` says in which namespace the pid is to be understood; `None`: as last told.
    pub fn watch(&self, daemon: &DaemonName, pid: u32, daemon_process: Option<ProcessId>) {
        if daemon_process.is_some() {
            self.daemon(daemon, daemon_process);
        }
        self.send(Command::Watch(daemon.clone(), pid));
    }

    /// The pid is of no more interest.
    pub fn unwatch(&self, daemon: &DaemonName, pid: u32) {
        self.send(Command::Unwatch(daemon.clone(), pid));
    }

    /// A daemon's process became known. When it ends, its namespace is still remembered.
    pub fn daemon(&self, daemon: &DaemonName, process: Option<ProcessId>) {
        self.send(Command::Daemon(daemon.clone(), process));
    }

    fn send(&self, command: Command) {
        if let Err(mpsc::error::TrySendError::Full(_)) = self.commands.try_send(command) {
            self.telemetry.source_error(SOURCE, "queue_full");
        }
    }
}

/// A question that may block.
enum Question {
    Attribute(u64, workload::Subject),
    Locate { daemon: DaemonName, level: usize, namespace: u64, pids: Vec<u32> },
}

enum Answer {
    Attributed {
        key: u64,
        found: Result<Attribution, ProcError>,
        pod_logs: Option<Result<(), Arc<str>>>,
        dropped: u64,
    },
    Located {
        daemon: DaemonName,
        found: Result<HashMap<u32, Located>, ProcError>,
    },
}

/// What is known of the namespace of a daemon's pids.
struct Daemon {
    process: Option<ProcessId>,
    /// From when on it is worth a word that its namespace is not known.
    blind_at: Instant,
    view: Result<View, Arc<str>>,
}

/// The kubelet, asked only while names are missing.
struct Kubelet {
    socket: PathBuf,
    listed: Option<Arc<[ListedPod]>>,
    call: Option<JoinHandle<Result<Arc<[ListedPod]>, KubeletError>>>,
    next: Instant,
    backoff: Duration,
}

/// Who a pid is, who it works for, and when it ends.
pub struct ProcessSource {
    proc: ProcRoot,
    checkpoints: Checkpoints,
    outbox: Outbox,
    telemetry: Telemetry,
    commands: mpsc::Receiver<Command>,
    /// Only where pids of the proc mount are those of our own system calls.
    exits: Option<ExitWatch>,
    watches: Watches,
    daemons: HashMap<DaemonName, Daemon>,
    asker: Worker<Question, Answer>,
    /// Keys to attribute.
    to_ask: VecDeque<u64>,
    /// What the asker is at.
    asking: Option<u64>,
    has_to_locate: bool,
    locate_at: Instant,
    looker: Worker<Vec<checkpoint::Subject>, Vec<(u64, Newest)>>,
    look_at: Option<Instant>,
    stuck: Stuck,
    kubelet: Option<Kubelet>,
    boot: Option<(Timestamp, Instant)>,
    health: HashMap<(SourceName, Option<DaemonName>), Result<(), Arc<str>>>,
    health_at: Instant,
    hides_processes: bool,
    said: Said,
    events: Vec<Event>,
}

/// Which thread is known to hang.
#[derive(Debug, Default)]
struct Stuck {
    asker: bool,
    looker: bool,
}

/// What is logged once.
#[derive(Debug, Default)]
struct Said {
    no_pidfd: bool,
    environment: bool,
    checkpoint: Option<Arc<str>>,
}

impl ProcessSource {
    /// A source that reads nothing yet, and where to ask it.
    pub fn new(
        settings: &ProcessSettings,
        outbox: Outbox,
        telemetry: Telemetry,
    ) -> (ProcessSource, ProcessWatcher) {
        let (sender, commands) = mpsc::channel(QUEUE);
        let proc = ProcRoot::new(&settings.host.proc);
        let with = Attributor {
            proc: proc.clone(),
            pod_logs: settings.host.pod_logs.clone(),
            slurm: settings.host.slurm,
            checkpoint_variable: settings.checkpoints.environment.clone(),
        };
        let asker_proc = proc.clone();
        let asker = Worker::new("process-facts", move || {
            let (proc, mut attributions) = (asker_proc.clone(), Attributions::new(with.clone()));
            Box::new(move |question| answer(&proc, &mut attributions, question))
        });
        let looker_proc = proc.clone();
        let looker = Worker::new("checkpoints", move || {
            let proc = looker_proc.clone();
            Box::new(move |subjects: Vec<checkpoint::Subject>| checkpoint::look(&proc, &subjects))
        });
        let now = Instant::now();
        let kubelet = settings.host.kubelet_socket.clone().map(|socket| Kubelet {
            socket,
            listed: None,
            call: None,
            next: now,
            backoff: KUBELET_INTERVAL / 6,
        });
        let source = ProcessSource {
            hides_processes: proc.hides_processes(),
            proc,
            checkpoints: settings.checkpoints.clone(),
            outbox,
            telemetry: telemetry.clone(),
            commands,
            exits: None,
            watches: Watches::default(),
            daemons: HashMap::new(),
            asker,
            to_ask: VecDeque::new(),
            asking: None,
            has_to_locate: false,
            locate_at: now,
            looker,
            look_at: None,
            stuck: Stuck::default(),
            kubelet,
            boot: None,
            health: HashMap::new(),
            health_at: now,
            said: Said::default(),
            events: Vec::new(),
        };
        (source, ProcessWatcher { commands: sender, telemetry })
    }

    /// Runs until the program stops, or nobody is left who could ask.
    pub async fn run(mut self, mut shutdown: Shutdown) {
        self.start();
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut commands = Vec::with_capacity(BATCH);
        loop {
            self.ask();
            if !self.outbox.send(std::mem::take(&mut self.events)).await {
                return;
            }
            tokio::select! {
                biased;
                () = shutdown.wait() => return,
                ended = ended(self.exits.as_mut()) => self.take_ends(ended),
                count = self.commands.recv_many(&mut commands, BATCH) => {
                    if count == 0 {
                        return;
                    }
                    for command in commands.drain(..) {
                        self.obey(command);
                    }
                }
                answer = self.asker.answer() => self.take_answer(answer),
                answer = self.looker.answer() => self.take_checkpoints(answer),
                listed = listed(self.kubelet.as_mut()) => self.take_listed(listed),
                _ = ticks.tick() => {
                    self.tick();
                    self.poll().await;
                }
            }
        }
    }

    fn start(&mut self) {
        if self.proc.shows_own_namespace() {
            match ExitWatch::new() {
                Ok(exits) => self.exits = Some(exits),
                Err(error) => self.say_no_pidfd(&error.to_string()),
            }
        } else if self.proc.is_procfs() {
            self.say_no_pidfd("the proc file system shows another pid namespace than that of mps-exporter");
        }
        self.tell_own_health();
    }

    /// Whether the proc file system can be relied on, checked as often as this source says that it is well.
    fn tell_own_health(&mut self) {
        let path = self.proc.path().display();
        let state = match self.proc.boot_time() {
            Err(error) => {
                Err(format!("{}; set host.proc to the host's proc file system", chain(&error)).into())
            }
            Ok(_) if self.hides_processes && self.exits.is_none() => Err(format!(
                "{path} is mounted with hidepid, so that other users' processes are hidden: \
                 run as root or with CAP_SYS_PTRACE, or with the gid that the mount names"
            )
            .into()),
            Ok(_) => Ok(()),
        };
        self.tell_health(SourceName::Proc, None, state);
    }

    fn tell_health(&mut self, source: SourceName, daemon: Option<DaemonName>, state: Result<(), Arc<str>>) {
        let place = (source, daemon);
        let before = self.health.get(&place);
        if before.is_some_and(Result::is_ok) != state.is_ok() || before.is_none() {
            match &state {
                Err(reason) => {
                    tracing::warn!(?source, daemon = place.1.as_deref(), %reason, "A source is blind.");
                }
                Ok(()) if before.is_some() => {
                    tracing::info!(?source, daemon = place.1.as_deref(), "A source sees again.");
                }
                Ok(()) => {}
            }
        }
        self.tell(EventKind::Source(SourceHealth { source, daemon: place.1.clone(), state: state.clone() }));
        self.health.insert(place, state);
    }

    fn say_no_pidfd(&mut self, reason: &str) {
        if !std::mem::replace(&mut self.said.no_pidfd, true) {
            tracing::info!(reason, "The end of processes is noticed by looking every second, not by pidfd.");
        }
    }

    fn tell(&mut self, kind: EventKind) {
        self.events.push(live(self.outbox.clock.now(), kind));
    }
}

/// The question is answered on the asker's thread.
fn answer(proc: &ProcRoot, attributions: &mut Attributions, question: Question) -> Answer {
    match question {
        Question::Attribute(key, subject) => {
            let found = attributions.attribute(&subject, Instant::now());
            let (pod_logs, dropped) = (attributions.pod_logs(), attributions.take_dropped());
            Answer::Attributed { key, found, pod_logs, dropped }
        }
        Question::Locate { daemon, level, namespace, pids } => {
            Answer::Located { daemon, found: namespace::locate(proc, level, namespace, &pids) }
        }
    }
}

/// Never ready without a set.
async fn ended(exits: Option<&mut ExitWatch>) -> std::io::Result<Vec<u64>> {
    match exits {
        Some(exits) => exits.ended().await,
        None => std::future::pending().await,
    }
}

/// Never ready without a call.
async fn listed(kubelet: Option<&mut Kubelet>) -> Result<Arc<[ListedPod]>, KubeletError> {
    let Some(call) = kubelet.and_then(|kubelet| kubelet.call.as_mut()) else {
        return std::future::pending().await;
    };
    call.await.unwrap_or_else(|error| Err(KubeletError::Connection(error.to_string())))
}

/// An error with its causes, on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

mod attribute;
mod follow;

#[cfg(test)]
mod tests;
