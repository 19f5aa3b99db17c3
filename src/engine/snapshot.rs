//! What outlets read: an immutable picture of the node.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Serialize, Serializer};

use crate::engine::incident::{Cause, Incident};
use crate::event::{
    ComputeMode, LogPlace, RecoveryAction, Rejection, ServerStatus, SourceName, Trouble, XidSource,
};
use crate::identity::{DaemonName, Workload};

/// The node at one moment.
#[derive(Debug, Clone, Serialize)]
pub struct Snapshot {
    /// Grows with every change.
    pub generation: u64,
    /// When it was taken.
    pub at: Timestamp,
    /// Control daemons, by name.
    pub daemons: Vec<DaemonView>,
    /// Servers by daemon and label; a server that is gone stays, with `is_up` false.
    pub servers: Vec<ServerView>,
    /// Fault domains, by label.
    pub domains: Vec<DomainView>,
    /// Clients, by daemon and pid.
    pub clients: Vec<ClientView>,
    /// GPUs, by index.
    pub gpus: Vec<GpuView>,
    /// Xid counts.
    pub xids: Vec<XidView>,
    /// Sources, by name and daemon.
    pub sources: Vec<SourceView>,
    /// Incidents, newest first: every open one and the most recent closed ones.
    pub incidents: Vec<Arc<Incident>>,
    /// Things that sources disagree about, by source.
    pub disagreements: Vec<Disagreement>,
}

/// A control daemon.
#[derive(Debug, Clone, Serialize)]
pub struct DaemonView {
    /// The label `daemon`.
    pub name: DaemonName,
    /// Serving, idle, wedged, down or stale.
    pub state: DaemonState,
    /// Pid in the exporter's namespace.
    pub pid: Option<u32>,
    /// When it started.
    pub started_at: Option<Timestamp>,
    /// Pipe directory as the daemon sees it.
    pub pipe_directory: String,
    /// Log directory as the daemon sees it.
    pub log_directory: String,
    /// Where its log lines are read.
    #[serde(skip)]
    pub log: LogPlace,
    /// Wire protocol, once a session has told.
    pub protocol: Option<Arc<str>>,
    /// Version, where it logged one.
    pub version: Option<Arc<str>>,
    /// Clients queued for a server that is not theirs or not ready; `None` when no source can tell.
    pub pending_clients: Option<u32>,
    /// Since when the oldest of them waits.
    pub pending_oldest: Option<Timestamp>,
    /// Default active thread percentage.
    pub default_active_thread_percentage: Option<f64>,
    /// Clients turned away, by reason (every reason, from 0).
    #[serde(serialize_with = "as_map")]
    pub rejected: Vec<(Rejection, Count)>,
    /// Trouble told of, by kind, since the daemon's start (only kinds that occurred).
    #[serde(serialize_with = "as_map")]
    pub troubles: Vec<(Trouble, Count)>,
}

impl DaemonView {
    /// Whether the daemon lives and answers.
    pub fn is_up(&self) -> Option<bool> {
        match self.state {
            DaemonState::Serving | DaemonState::Idle => Some(true),
            DaemonState::Wedged | DaemonState::Down | DaemonState::Stale => Some(false),
            DaemonState::Unknown => None,
        }
    }
}

/// The state of a control daemon; the label values of `mps_control_daemon_state`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DaemonState {
    /// Alive, with a server.
    Serving,
    /// Alive, without a server.
    Idle,
    /// Alive, but it does not answer.
    Wedged,
    /// Not there.
    Down,
    /// Killed: its files are still there.
    Stale,
    /// No source can tell. Not a label value: nothing is exported.
    Unknown,
}

/// How often something happened and when last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Count {
    /// How often.
    pub total: u64,
    /// When last; `None` before the first time.
    pub last: Option<Timestamp>,
}

impl Count {
    /// Counts one more.
    pub fn add(&mut self, at: Timestamp) {
        self.add_many(1, at);
    }

    /// Counts `n` more. A clock that was set back does not move `last` back.
    pub fn add_many(&mut self, n: u64, at: Timestamp) {
        self.total = self.total.saturating_add(n);
        self.last = self.last.max(Some(at));
    }
}

/// An MPS server, or the place of one: keyed by daemon and label.
#[derive(Debug, Clone, Serialize)]
pub struct ServerView {
    /// The label `daemon`.
    pub daemon: DaemonName,
    /// The label `server`: `uid_<uid>`, or its v3 name, or `pid_<pid>` while the uid is unknown.
    pub server: Arc<str>,
    /// Whether it runs; `None` when no source can tell.
    pub is_up: Option<bool>,
    /// State, `None` = unknown. Only while it runs.
    pub status: Option<ServerStatus>,
    /// Its pid while it runs.
    pub pid: Option<u32>,
    /// The uid that it serves.
    pub uid: Option<u32>,
    /// Version, where it logged one.
    pub version: Option<Arc<str>>,
    /// When it started.
    pub started_at: Option<Timestamp>,
    /// Clients, each once; `None` when no source can tell.
    pub clients: Option<u32>,
    /// Starts.
    pub starts: Count,
    /// Orderly exits.
    pub exits_orderly: Count,
    /// Exits otherwise than by an orderly shutdown.
    pub exits_failed: Count,
    /// Fatal GPU errors handled.
    pub faults: Count,
    /// Status of the last exit, as logged.
    pub last_exit_status: Option<i32>,
    /// Why the last start failed, in the server's words.
    pub last_start_failure: Option<Arc<str>>,
}

/// A fault domain.
#[derive(Debug, Clone, Serialize)]
pub struct DomainView {
    /// Its labels.
    #[serde(flatten)]
    pub labels: Arc<DomainLabels>,
    /// The daemon that serves the device; `None` without MPS.
    pub daemon: Option<DaemonName>,
    /// How the device is shared; `None` when no source can tell.
    pub sharing: Option<Sharing>,
    /// Product name.
    pub model_name: Option<Arc<str>>,
    /// PCI address.
    pub pci_bus_id: Option<String>,
    /// MIG profile.
    pub gpu_instance_profile: Option<Arc<str>>,
    /// Driver version.
    pub driver_version: Option<Arc<str>>,
    /// Clients with a context on the device; `None` when no source can tell.
    pub clients: Option<u32>,
    /// Their contexts on the device.
    pub contexts: Option<u32>,
    /// How many contexts the device can have, where known.
    pub contexts_limit: Option<u32>,
    /// Clients that connected.
    pub connects: Count,
    /// Clients that left, for whatever reason.
    pub disconnects: Count,
    /// Clients that were lost, by cause (every cause, from 0).
    #[serde(serialize_with = "as_map")]
    pub lost: Vec<(LossCause, Count)>,
    /// Blast radius by scope (every scope).
    #[serde(serialize_with = "as_map")]
    pub radius: Vec<(Scope, Radius)>,
    /// Devices in the coupled set, this one included.
    pub coupled_devices: Option<u32>,
    /// `fault_domain` labels of the coupled set, this one included.
    pub coupled_with: Vec<Arc<str>>,
    /// Compute processes on the device that are not clients of its MPS server; `None` without NVML or MPS.
    pub bypassing_processes: Option<u32>,
    /// Incidents, by cause (every cause, from 0).
    #[serde(serialize_with = "as_map")]
    pub incidents: Vec<(Cause, Count)>,
    /// Id of the last incident that counted under a cause, for every cause that has one.
    #[serde(serialize_with = "as_map")]
    pub last_incidents: Vec<(Cause, Arc<str>)>,
    /// Mass client losses.
    pub mass_losses: Count,
    /// Clients lost in the last of them.
    pub mass_loss_last_clients: Option<u32>,
    /// Processes that still block recovery.
    pub recovery_blocking: u32,
    /// When the fault that is not recovered yet began.
    pub fault_started_at: Option<Timestamp>,
    /// How long recoveries took.
    pub recovery_durations: Histogram,
}

/// The labels that every series of a domain carries.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct DomainLabels {
    /// `<daemon>/<gpu index>[/<gpu instance id>]`, the UUID where no index is known, `gpu/<index>` without MPS.
    pub fault_domain: Arc<str>,
    /// NVML index, empty where unknown.
    pub gpu: Arc<str>,
    /// UUID of the GPU with its prefix, also of a MIG instance's GPU.
    #[serde(rename = "UUID")]
    pub uuid: Arc<str>,
    /// GPU instance id, empty without MIG.
    #[serde(rename = "GPU_I_ID")]
    pub gpu_instance: Arc<str>,
}

/// How a device is shared; the label `sharing`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Sharing {
    /// Through an MPS server.
    Mps,
    /// By time slices: each process is its own fault domain.
    TimeSlicing,
    /// One process at a time.
    Exclusive,
}

/// What a fault would take down.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Radius {
    /// Client processes.
    pub clients: Option<u32>,
    /// Workloads that they belong to.
    pub workloads: Option<u32>,
    /// Their GPU memory.
    pub memory_bytes: Option<u64>,
    /// Work since each client's last checkpoint, or since its start, summed.
    #[serde(rename = "work_at_risk_seconds", serialize_with = "as_seconds")]
    pub work_at_risk: Option<Duration>,
}

/// What kind of fault; the label `scope`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// A client's fatal fault: the clients of the coupled set.
    Application,
    /// The MPS server dies: all its clients.
    Server,
    /// The GPU is lost: every process on it.
    Gpu,
}

/// Why a client was lost; the label `cause` of `mps_clients_lost_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LossCause {
    /// A fatal fault of a client of the coupled set.
    Fault,
    /// Its server ended otherwise than by an orderly shutdown.
    ServerExit,
    /// A GPU-level error on its device.
    Gpu,
    /// Killed: out of memory, or by a signal.
    Killed,
    /// An operator terminated it.
    Terminated,
    /// It left with others, and nothing says why.
    Unexplained,
}

/// A client process of an MPS server.
#[derive(Debug, Clone, Serialize)]
pub struct ClientView {
    /// The daemon.
    pub daemon: DaemonName,
    /// The server's label.
    pub server: Arc<str>,
    /// Pid as the daemon names it.
    pub pid: u32,
    /// Pid in the exporter's namespace, where it was found there.
    pub host_pid: Option<u32>,
    /// Command name.
    pub command: Option<Arc<str>>,
    /// Who it works for.
    pub workload: Option<Workload>,
    /// `fault_domain` labels of the devices where it has contexts.
    pub domains: Vec<Arc<str>>,
    /// How the devices are known.
    pub devices_known_by: Option<DeviceEvidence>,
    /// Contexts, over all devices.
    pub contexts: u32,
    /// GPU memory, over all devices, where NVML tells.
    pub memory_bytes: Option<u64>,
    /// When it connected, as far as known.
    pub connected_at: Option<Timestamp>,
    /// When its process started.
    pub started_at: Option<Timestamp>,
    /// Its newest checkpoint.
    pub checkpoint_at: Option<Timestamp>,
    /// Whether a checkpoint place is known for it.
    pub has_checkpoint_place: bool,
    /// Alive, or lost but not gone.
    pub state: ClientState,
}

/// Whether a client lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ClientState {
    /// Working.
    Active,
    /// Lost: its context is dead, its process has not exited and blocks recovery.
    Lost,
}

/// What says on which devices a client has contexts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceEvidence {
    /// The daemon's `ps`.
    Ps,
    /// NVML's process list.
    Nvml,
    /// The `is associated` line before its context became active: inferred from order.
    LogOrder,
}

/// A GPU, or the parent of MIG instances.
#[derive(Debug, Clone, Serialize)]
pub struct GpuView {
    /// The label `gpu`.
    pub index: u32,
    /// The label `UUID`.
    pub uuid: Arc<str>,
    /// Whether NVML reaches it; `None` while NVML is down or stuck.
    pub is_up: Option<bool>,
    /// Compute mode.
    pub compute_mode: Option<ComputeMode>,
    /// Recovery action.
    pub recovery_action: Option<RecoveryAction>,
}

/// Xids of one code on one device by one source.
#[derive(Debug, Clone, Serialize)]
pub struct XidView {
    /// UUID, or the PCI address where no UUID is known.
    pub uuid: Arc<str>,
    /// Index, empty where unknown.
    pub gpu: Arc<str>,
    /// GPU instance id, empty without MIG.
    pub gpu_instance: Arc<str>,
    /// The code; `None` collects the codes beyond the cap.
    pub code: Option<u32>,
    /// Who told.
    pub source: XidSource,
    /// How often.
    pub count: Count,
}

/// A source's health.
#[derive(Debug, Clone, Serialize)]
pub struct SourceView {
    /// Which.
    pub source: SourceName,
    /// For which daemon.
    pub daemon: Option<DaemonName>,
    /// Whether it works.
    pub is_up: bool,
    /// Why not.
    pub reason: Option<Arc<str>>,
    /// Its last success.
    pub last_success: Option<Timestamp>,
}

/// Two sources that say different things.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Disagreement {
    /// The source that the model does not follow in this.
    pub source: SourceName,
    /// About which daemon.
    pub daemon: Option<DaemonName>,
    /// About what, as a sentence.
    pub about: Arc<str>,
}

/// A histogram with fixed bounds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Histogram {
    /// Upper bounds, ascending; `+Inf` is not in it.
    pub bounds: &'static [f64],
    /// Observations per bound (not cumulative), and beyond the last.
    pub counts: Vec<u64>,
    /// Sum of the observations.
    pub sum: f64,
}

impl Histogram {
    /// An empty histogram.
    pub fn new(bounds: &'static [f64]) -> Histogram {
        Histogram { bounds, counts: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    /// Counts one observation.
    pub fn observe(&mut self, value: f64) {
        let slot = self.bounds.partition_point(|bound| *bound < value);
        self.counts[slot] += 1;
        self.sum += value;
    }
}

/// Pairs as a JSON object, their first halves as its keys.
fn as_map<K: Serialize, V: Serialize, S: Serializer>(
    pairs: &[(K, V)],
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().map(|(key, value)| (key, value)))
}

/// A duration as a number of seconds.
#[allow(clippy::ref_option, reason = "serde hands over a reference to the field")]
fn as_seconds<S: Serializer>(duration: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    duration.map(|duration| duration.as_secs_f64()).serialize(serializer)
}
