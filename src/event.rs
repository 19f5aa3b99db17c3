//! What sources may say. The model learns of the world by these values and by nothing else.

use std::path::PathBuf;
use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::identity::{DaemonName, DeviceName, PciAddress, ProcessId, Workload};
use crate::time::Moment;

/// One statement of a source.
#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    /// When it happened (not when it was read).
    pub at: Moment,
    /// Whether it is news.
    pub freshness: Freshness,
    /// What happened.
    pub kind: EventKind,
}

/// Whether an event is news to the counters and to people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freshness {
    /// Read as it happened.
    Live,
    /// It happened while the exporter was down and was found from a cursor: counted and recorded with its own
    /// time, paged only when recent.
    CaughtUp,
    /// Read without a cursor, to learn the present state: never counted, never an incident.
    History,
}

/// What happened.
#[derive(Debug, Clone, PartialEq)]
pub enum EventKind {
    /// A control daemon, running or only configured, is watched from now on. Repeated when something about it changes.
    DaemonFound(DaemonSite),
    /// A daemon that was only discovered is gone, with its directories.
    DaemonGone(DaemonName),
    /// What `control_lock` and the socket say about a daemon.
    Liveness(DaemonName, Liveness),
    /// A line of control.log, server.log, or a `-f` daemon's standard output.
    Log(DaemonName, LogEntry),
    /// An answered or failed session with the control daemon.
    Look(DaemonName, Result<Look, LookError>),
    /// A process that the model asked about exists; repeated when its workload becomes known.
    ProcessSeen(DaemonName, ProcessFacts),
    /// A process that the model asked about has ended, or never was. `pid` is as the daemon names it.
    ProcessExited {
        /// The daemon in whose logs or answers the pid was named.
        daemon: DaemonName,
        /// The pid as that daemon names it.
        pid: u32,
    },
    /// The newest checkpoint of a client.
    Checkpoint {
        /// The daemon whose client it is.
        daemon: DaemonName,
        /// The pid as that daemon names it.
        pid: u32,
        /// When the newest checkpoint file was written; `None` when the place is known but empty.
        newest: Option<Timestamp>,
    },
    /// Everything that one NVML cycle saw.
    Gpus(GpuReport),
    /// An Xid, by NVML's event or by the kernel log.
    Xid(Xid),
    /// An `NVSwitch` error.
    Sxid(Sxid),
    /// The kernel log says that a GPU is gone, without an Xid.
    GpuLost(PciAddress),
    /// The kernel log says that the driver failed every channel on some GPU for this Xid
    /// (`RC all channels for critical error N`). The line names no GPU.
    AllChannelsFailed {
        /// The critical error that it names.
        xid: u32,
    },
    /// The kernel killed a process for want of memory. The pid is the host's.
    OomKill {
        /// Host pid.
        pid: u32,
    },
    /// The kernel log tells a GPU's UUID (`NVRM: GPU at PCI:…: GPU-…`).
    GpuUuid(PciAddress, Arc<str>),
    /// A source's own health.
    Source(SourceHealth),
    /// The configuration switches a source off, for every daemon: what only it can tell is not known any more.
    SourceOff(SourceName),
    /// Time passed. The model asks for it by `Node::next_deadline`.
    Tick,
}

/// A control daemon as discovery or configuration gives it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DaemonSite {
    /// The label `daemon`.
    pub name: DaemonName,
    /// `CUDA_MPS_PIPE_DIRECTORY` as the daemon sees it.
    pub pipe_directory: PathBuf,
    /// `CUDA_MPS_LOG_DIRECTORY` as the daemon sees it.
    pub log_directory: PathBuf,
    /// What to put before both directories to reach them: empty, or `/proc/PID/root` for a daemon in another mount
    /// namespace.
    pub root: PathBuf,
    /// The daemon's process, when one was found.
    pub process: Option<ProcessId>,
    /// When that process started.
    pub started_at: Option<Timestamp>,
    /// Where its log is.
    pub log: LogPlace,
    /// `CUDA_VISIBLE_DEVICES` of the daemon: its ordinals are positions in this list.
    pub visible_devices: Option<String>,
    /// Whether the configuration names it. Only a changed configuration makes such a daemon
    /// [`EventKind::DaemonGone`].
    pub is_configured: bool,
}

impl DaemonSite {
    /// The pipe directory as the exporter reaches it.
    pub fn pipe_path(&self) -> PathBuf {
        under(&self.root, &self.pipe_directory)
    }

    /// The log directory as the exporter reaches it.
    pub fn log_path(&self) -> PathBuf {
        under(&self.root, &self.log_directory)
    }
}

/// `path` inside the root `root`.
pub(crate) fn under(root: &std::path::Path, path: &std::path::Path) -> PathBuf {
    if root.as_os_str().is_empty() {
        return path.to_owned();
    }
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Where a daemon's log lines are.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum LogPlace {
    /// `control.log` and `server.log` in the log directory (daemon `-d`).
    Files,
    /// The journal entries of this systemd unit, or of this pid when no unit is known (daemon `-f`).
    Journal {
        /// systemd unit.
        unit: Option<String>,
    },
    /// A file with both streams interleaved, plain or with CRI prefixes (daemon `-f`).
    Merged(PathBuf),
    /// Nowhere that can be read; the reason.
    Nowhere(String),
}

/// The answer of the silent liveness check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Liveness {
    /// Whether the daemon lives.
    pub state: LockState,
    /// Consecutive sessions in which the daemon sent no hello, or no answer, within the deadline.
    pub unanswered: u32,
    /// The content of `nvidia-cuda-mps-control.pid`, where it exists (550+).
    pub pid_file: Option<u32>,
}

/// What `F_GETLK` on `control_lock` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockState {
    /// A living process holds the lock.
    Held(ProcessId),
    /// A process outside this pid namespace holds the lock (the kernel gives pid 0 then).
    HeldElsewhere,
    /// Files are there, nobody holds the lock: the daemon was killed.
    Stale,
    /// No lock file: no daemon here.
    Absent,
    /// The lock file could not be looked at.
    Unknown,
}

/// A log line that matters to the model.
#[derive(Debug, Clone, PartialEq)]
pub struct LogEntry {
    /// Which stream it came from.
    pub file: LogFile,
    /// The pid in the line's tag: the writer, except for `Starting new server` (facts: it may be the child's).
    pub writer: u32,
    /// What the line says.
    pub message: LogMessage,
    /// The line, for the evidence of an incident. Set only for lines that can be evidence.
    pub text: Option<Arc<str>>,
}

/// A stream of log lines; the label `file`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFile {
    /// `control.log`.
    Control,
    /// `server.log`.
    Server,
    /// Both, interleaved on a daemon's standard output.
    Merged,
}

/// What a log line says, in the words of the model. Lines that change nothing never become a message.
#[derive(Debug, Clone, PartialEq)]
pub enum LogMessage {
    // control.log
    /// The control daemon started.
    DaemonStarted,
    /// `CUDA MPS Control binary version: N`.
    DaemonVersion(u32),
    /// A client was admitted to a server that exists. Pid 0: the daemon cannot see the client's pid.
    ClientAdmitted {
        /// Client pid, or 0.
        pid: u32,
        /// Client uid.
        uid: u32,
    },
    /// A client was queued until a server for its uid is ready.
    ClientQueued {
        /// Client pid, or 0.
        pid: u32,
        /// Client uid.
        uid: u32,
    },
    /// A server was launched.
    ServerStarting {
        /// Server pid.
        pid: u32,
        /// The uid that it serves.
        uid: u32,
    },
    /// A server is ready for clients.
    ServerReady {
        /// Server pid.
        pid: u32,
    },
    /// A server broke; its exit line follows.
    ServerBroke,
    /// A server ended. Status 0 is also logged for a server killed by a signal.
    ServerExited {
        /// Server pid.
        pid: u32,
        /// Exit status as logged.
        status: i32,
    },
    /// A server could not be launched.
    ServerLaunchFailed {
        /// The uid that it was for.
        uid: u32,
    },
    /// The daemon asks a server to leave, because another uid waits.
    ServerAskedToLeave {
        /// Server pid.
        pid: u32,
    },
    /// The daemon forces a server to leave.
    ServerForcedToLeave {
        /// Server pid.
        pid: u32,
    },
    /// An orderly shutdown of the daemon has begun (`quit`).
    DaemonStopping,

    // server.log; the server is the writer
    /// A server starts up.
    ServerStartup,
    /// A server cannot serve; the reason in its words.
    ServerStartFailed(Arc<str>),
    /// A context was created on a device; after a fault: recovered there.
    ContextCreated {
        /// Ordinal in the server's enumeration.
        device: u32,
        /// Device name, where logged.
        name: Option<Arc<str>>,
    },
    /// A context was destroyed: the last victim on the device is gone.
    ContextDestroyed {
        /// Ordinal in the server's enumeration.
        device: u32,
    },
    /// The server is up.
    ServerStarted,
    /// The server's version (`Binary version: N`).
    ServerVersion(u32),
    /// A client, named by pid, connected (580 shape) or is being set up.
    ClientConnected {
        /// Client pid.
        pid: u32,
    },
    /// A client whose pid is not told is being set up.
    ClientArriving,
    /// A device was associated with the client being set up; the line does not say which client.
    DeviceAssociated {
        /// The device.
        device: DeviceName,
    },
    /// A client's context is active.
    ContextActive {
        /// Client pid.
        pid: u32,
        /// Context id.
        context: u32,
    },
    /// A client's context was declared dead: a victim.
    ContextInactive {
        /// Client pid.
        pid: u32,
        /// Context id.
        context: u32,
    },
    /// A client's context, or the whole client (`context` absent), left.
    ClientLeft {
        /// Client pid.
        pid: u32,
        /// Context id, where told.
        context: Option<u32>,
    },
    /// Some client left; the line does not say which.
    ClientLeftUnnamed {
        /// Active client contexts left on the server, where told.
        contexts_left: Option<u32>,
    },
    /// The culprit: this client met a fatal GPU error.
    ClientFault {
        /// Client pid.
        pid: u32,
    },
    /// The server enters FAULT.
    ServerFault,
    /// A device of the fault, from the block under `The following devices will be reset`.
    FaultDevice {
        /// Ordinal in the server's enumeration.
        ordinal: u32,
    },
    /// A victim, from the block under `The following clients have a sticky error set`.
    StickyClient {
        /// Client pid.
        pid: u32,
    },
    /// An operator terminates this client.
    ClientTerminating {
        /// Client pid.
        pid: u32,
    },
    /// The termination failed: the client may still be there.
    ClientTerminationFailed,
    /// A new client was turned away.
    ClientRejected(Rejection),
    /// The server announced an orderly end.
    ServerLeaving,
    /// Something a person should see: a limit, a missing segment, an unsupported device.
    Trouble(Trouble),
}

/// Why a client was turned away; the label `reason`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Rejection {
    /// The server has its maximum of clients.
    ClientLimit,
    /// The device has its maximum of connections.
    DeviceConnectionLimit,
    /// The server is in reset after a fault.
    InReset,
    /// The server is shutting down.
    Teardown,
    /// The client's credentials were refused by the server.
    Credentials,
}

/// Trouble that a server or daemon tells of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Trouble {
    /// The file-descriptor limit is low.
    FileDescriptorLimit,
    /// Shared memory could not be had.
    SharedMemory,
    /// A device is not served.
    DeviceNotServed,
    /// The daemon cannot write its logs.
    LogsUnwritable,
    /// A start was refused because a daemon runs already.
    AlreadyRunning,
    /// The pipe directory cannot be used.
    PipeDirectory,
    /// Somebody's command was refused for want of privileges.
    Privileges,
}

/// What one control session told.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Look {
    /// The servers, by pid.
    pub servers: Vec<ServerLook>,
    /// `get_default_active_thread_percentage`.
    pub default_active_thread_percentage: Option<f64>,
    /// Which protocol the daemon speaks; the label `protocol`.
    pub protocol: Option<Arc<str>>,
}

/// A server in a [`Look`].
#[derive(Debug, Clone, PartialEq)]
pub struct ServerLook {
    /// Server pid.
    pub pid: u32,
    /// State, where the daemon can tell (550+).
    pub status: Option<ServerStatus>,
    /// Client pids, `None` when they were not told.
    pub clients: Option<Vec<u32>>,
    /// Contexts as `ps` lists them, `None` when they were not told.
    pub contexts: Option<Vec<ContextLook>>,
}

/// A row of `ps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContextLook {
    /// Client pid.
    pub pid: u32,
    /// Context id.
    pub context: u32,
    /// The device.
    pub device: DeviceName,
    /// Inode of the client's pid namespace.
    pub namespace: Option<u64>,
    /// The program's name without its directory, never its arguments.
    pub command: Option<Arc<str>>,
}

/// What `get_server_status` answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ServerStatus {
    /// Starting, not yet serving.
    Initializing,
    /// Serving.
    Active,
    /// Handling a fatal GPU error: no new clients on any of its GPUs.
    Fault,
}

/// Why a session gave nothing; the label `result` of `mps_control_queries_total`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LookError {
    /// The deadline passed; no hello or no answer.
    #[error("no answer within the deadline ({0})")]
    Timeout(Arc<str>),
    /// Nobody listens, we may not connect, or the daemon turns us away.
    #[error("refused ({0})")]
    Refused(Arc<str>),
    /// The peer broke the protocol or the connection.
    #[error("failed ({0})")]
    Failed(Arc<str>),
}

/// What is known of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessFacts {
    /// The pid as the daemon names it (its own pid namespace).
    pub pid: u32,
    /// The process in the exporter's namespace, where it could be found there.
    pub process: Option<ProcessId>,
    /// When it started.
    pub started_at: Option<Timestamp>,
    /// Command name (`comm`), never the command line.
    pub command: Option<Arc<str>>,
    /// Real uid.
    pub uid: Option<u32>,
    /// Who it works for.
    pub workload: Option<Workload>,
}

/// Everything that one NVML cycle saw.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GpuReport {
    /// Driver version.
    pub driver_version: Option<Arc<str>>,
    /// GPUs, by index. A GPU that NVML has lost stays, with `is_lost`.
    pub gpus: Vec<GpuFacts>,
}

/// A GPU in a [`GpuReport`].
#[derive(Debug, Clone, PartialEq)]
pub struct GpuFacts {
    /// NVML index; the label `gpu`.
    pub index: u32,
    /// `GPU-…`.
    pub uuid: Arc<str>,
    /// PCI address.
    pub pci: PciAddress,
    /// Product name.
    pub model: Option<Arc<str>>,
    /// Whether NVML says that the GPU is lost.
    pub is_lost: bool,
    /// Compute mode, `None` when it could not be read.
    pub compute_mode: Option<ComputeMode>,
    /// Recovery action, `None` when the driver does not tell.
    pub recovery_action: Option<RecoveryAction>,
    /// CUDA compute capability, major and minor.
    pub compute_capability: Option<(u32, u32)>,
    /// Whether MIG is on, `None` when it could not be read.
    pub mig_enabled: Option<bool>,
    /// MIG instances.
    pub instances: Vec<MigFacts>,
    /// MPS clients and their memory, `None` when the list could not be read.
    pub mps_clients: Option<Vec<GpuProcess>>,
    /// Compute processes, MPS servers included, `None` when the list could not be read.
    pub compute_processes: Option<Vec<GpuProcess>>,
}

/// A MIG device (compute instance).
#[derive(Debug, Clone, PartialEq)]
pub struct MigFacts {
    /// `MIG-…`.
    pub uuid: Arc<str>,
    /// GPU instance id; the label `GPU_I_ID`.
    pub gpu_instance: u32,
    /// Compute instance id.
    pub compute_instance: u32,
    /// Profile (`1g.10gb`); the label `GPU_I_PROFILE`.
    pub profile: Option<Arc<str>>,
    /// Compute mode of the instance.
    pub compute_mode: Option<ComputeMode>,
    /// MPS clients and their memory.
    pub mps_clients: Option<Vec<GpuProcess>>,
    /// Compute processes.
    pub compute_processes: Option<Vec<GpuProcess>>,
}

/// A process that NVML lists on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuProcess {
    /// Pid in the exporter's pid namespace.
    pub pid: u32,
    /// Device memory in bytes, where NVML tells.
    pub memory_bytes: Option<u64>,
    /// GPU instance, with MIG.
    pub gpu_instance: Option<u32>,
    /// Compute instance, with MIG.
    pub compute_instance: Option<u32>,
    /// Whether the process is an MPS control daemon or server (`/proc/PID/exe`).
    pub is_mps_server: bool,
    /// Command name, where it could be read.
    pub command: Option<Arc<str>>,
}

/// NVML's compute modes; the label values of `mps_gpu_compute_mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ComputeMode {
    /// Any number of processes.
    Default,
    /// Retired by NVIDIA, still a value.
    ExclusiveThread,
    /// No compute processes.
    Prohibited,
    /// One process: with MPS, the server.
    ExclusiveProcess,
}

/// NVML's field 230; the label values of `mps_gpu_recovery_action`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RecoveryAction {
    /// Healthy.
    None,
    /// Reset the GPU.
    GpuReset,
    /// Reboot the node.
    NodeReboot,
    /// Start no new peer-to-peer work.
    DrainP2p,
    /// Drain, then reset.
    DrainAndReset,
    /// Recover the IMEX domain.
    RecoverImexDomain,
    /// Reset the bus.
    BusReset,
    /// Reboot the system.
    SystemReboot,
}

/// One Xid.
#[derive(Debug, Clone, PartialEq)]
pub struct Xid {
    /// The code.
    pub code: u32,
    /// Who told.
    pub source: XidSource,
    /// The GPU's PCI address (kernel log).
    pub pci: Option<PciAddress>,
    /// The GPU's UUID (NVML).
    pub uuid: Option<Arc<str>>,
    /// MIG GPU instance, where told.
    pub gpu_instance: Option<u32>,
    /// MIG compute instance, where told.
    pub compute_instance: Option<u32>,
    /// The process that owns the faulting channel, in the host's pid namespace.
    pub pid: Option<u32>,
    /// Whether `pid` owns the channel. Otherwise it is whoever was in the driver, and never a culprit.
    pub pid_owns_channel: bool,
    /// `caused by previous Xid N`.
    pub caused_by: Option<u32>,
    /// For Xid 154: the new recovery action, as the number in the line.
    pub recovery_action: Option<u32>,
    /// How many identical reports this stands for (a storm is coalesced by its source); at least 1.
    pub count: u64,
    /// The line, for evidence.
    pub text: Option<Arc<str>>,
}

/// Who told of an Xid; the label `source`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum XidSource {
    /// The kernel log.
    Kmsg,
    /// NVML's event.
    Nvml,
}

/// An `NVSwitch` error line (`Fatal` or `Non-fatal`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sxid {
    /// The code.
    pub code: u32,
    /// The switch.
    pub pci: PciAddress,
    /// Whether it is fatal.
    pub is_fatal: bool,
    /// The line.
    pub text: Option<Arc<str>>,
}

/// A source; the label `source`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SourceName {
    /// control.log.
    ControlLog,
    /// server.log.
    ServerLog,
    /// The standard output of a `-f` daemon.
    DaemonOutput,
    /// The control socket.
    Control,
    /// `control_lock`.
    ControlLock,
    /// NVML.
    Nvml,
    /// The kernel log.
    KernelLog,
    /// `/proc`.
    Proc,
    /// `/var/log/pods`.
    PodLogs,
    /// The kubelet's pod-resources API.
    Kubelet,
    /// Daemon discovery.
    Discovery,
}

/// A source's own health, sent when it changes and at every success or failure that matters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceHealth {
    /// Which source.
    pub source: SourceName,
    /// For which daemon, where it is a daemon's.
    pub daemon: Option<DaemonName>,
    /// Whether it works; the reason when it does not, as a sentence for a person.
    pub state: Result<(), Arc<str>>,
}

impl RecoveryAction {
    /// The action with this number.
    pub fn from_number(number: u32) -> Option<RecoveryAction> {
        use RecoveryAction::{
            BusReset, DrainAndReset, DrainP2p, GpuReset, NodeReboot, None as Healthy, RecoverImexDomain,
            SystemReboot,
        };
        let all = [
            Healthy,
            GpuReset,
            NodeReboot,
            DrainP2p,
            DrainAndReset,
            RecoverImexDomain,
            BusReset,
            SystemReboot,
        ];
        all.get(number as usize).copied()
    }
}
