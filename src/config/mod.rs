//! The validated configuration. `raw` parses the file, `diagnostics` says what is wrong with it.

mod diagnostics;
mod duration;
mod node;
mod raw;
mod reload;
mod table;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use diagnostics::{ConfigError, Diagnostic};
pub use duration::{NotADuration, format_duration, parse_duration};
pub use reload::{Reload, ReloadRequest};

use crate::engine::Settings;
use crate::xid::{Catalogue, CatalogueError};

/// Everything that a configuration file can say, with defaults filled in.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Config {
    /// Daemons beside those that are discovered.
    pub daemons: Vec<Daemon>,
    /// Discovery of daemons.
    pub discovery: Discovery,
    /// Questions to control daemons.
    pub control: Control,
    /// NVML.
    pub nvml: Nvml,
    /// The kernel log.
    pub kernel_log: KernelLog,
    /// The host, as seen from here.
    pub host: Host,
    /// What makes an incident.
    pub incidents: Incidents,
    /// What is kept on disk.
    pub state: State,
    /// Optional series and their caps.
    pub collectors: Collectors,
    /// Where checkpoints are.
    pub checkpoints: Checkpoints,
    /// Alertmanagers to post to.
    pub alertmanagers: Vec<Alertmanager>,
    /// What to do about it.
    pub remediation: Remediation,
}

impl Config {
    /// What the model is told of it, with the Xid catalogue read.
    pub fn model(&self) -> Result<Settings, CatalogueError> {
        let xids = match &self.incidents.xid_catalog {
            Some(path) => Catalogue::with_overrides(path)?,
            None => Catalogue::builtin().clone(),
        };
        Ok(Settings {
            window: self.incidents.window,
            min_clients: self.incidents.min_clients,
            min_ratio: self.incidents.min_ratio,
            incidents_kept: self.state.incidents_kept,
            look_interval: self.control.interval,
            xids: Arc::new(xids),
        })
    }
}

/// A configured daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Daemon {
    /// The label `daemon`.
    pub name: Arc<str>,
    /// `CUDA_MPS_PIPE_DIRECTORY`.
    pub pipe_directory: PathBuf,
    /// `CUDA_MPS_LOG_DIRECTORY`.
    pub log_directory: PathBuf,
    /// Where its log lines are.
    pub log: LogChoice,
}

/// `daemons[].log`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LogChoice {
    /// Files when there are any, else the daemon's standard output.
    Auto,
    /// The two files of the log directory.
    Files,
    /// The journal.
    Journal,
    /// A file with the merged output of a `-f` daemon, plain or CRI.
    Path(PathBuf),
}

/// `discovery`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Discovery {
    /// Whether to look for daemons.
    pub enabled: bool,
    /// Globs of pipe directories, beside the well-known ones.
    pub pipe_directories: Vec<String>,
    /// How often.
    pub interval: Duration,
}

impl Default for Discovery {
    fn default() -> Self {
        Discovery {
            enabled: true,
            pipe_directories: vec!["/run/nvidia/mps/*/*/pipe".into()],
            interval: Duration::from_secs(15),
        }
    }
}

/// `control`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Control {
    /// How to ask.
    pub client: ControlClient,
    /// How often to ask when nothing happens.
    pub interval: Duration,
    /// Deadline of a whole session.
    pub timeout: Duration,
}

impl Default for Control {
    fn default() -> Self {
        Control {
            client: ControlClient::Socket,
            interval: Duration::from_secs(60),
            timeout: Duration::from_secs(2),
        }
    }
}

/// `control.client`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControlClient {
    /// Our own client of the wire protocol.
    Socket,
    /// The `nvidia-cuda-mps-control` binary.
    Binary,
    /// Never ask.
    Off,
}

/// `nvml`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nvml {
    /// Whether to use it.
    pub enabled: bool,
    /// Library name or path.
    pub library: PathBuf,
    /// How often.
    pub interval: Duration,
    /// How long a call may take before the source counts as stuck.
    pub stuck_after: Duration,
}

impl Default for Nvml {
    fn default() -> Self {
        Nvml {
            enabled: true,
            library: "libnvidia-ml.so.1".into(),
            interval: Duration::from_secs(10),
            stuck_after: Duration::from_secs(30),
        }
    }
}

/// `kernel_log`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelLog {
    /// Whether to read it.
    pub enabled: bool,
    /// `/dev/kmsg`, or any file or FIFO of its records.
    pub path: PathBuf,
}

impl Default for KernelLog {
    fn default() -> Self {
        KernelLog { enabled: true, path: "/dev/kmsg".into() }
    }
}

/// `host`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// The host's `/proc`.
    pub proc: PathBuf,
    /// The kubelet's pod logs.
    pub pod_logs: PathBuf,
    /// The kubelet's pod-resources socket; empty: not asked.
    pub kubelet_socket: Option<PathBuf>,
    /// Whether to look for Slurm jobs.
    pub slurm: bool,
}

impl Default for Host {
    fn default() -> Self {
        Host { proc: "/proc".into(), pod_logs: "/var/log/pods".into(), kubelet_socket: None, slurm: true }
    }
}

/// `incidents`.
#[derive(Debug, Clone, PartialEq)]
pub struct Incidents {
    /// What happens within this time belongs together.
    pub window: Duration,
    /// Lost clients that make a mass client loss.
    pub min_clients: u32,
    /// Share of the clients before that makes a mass client loss.
    pub min_ratio: f64,
    /// Overrides and additions to the Xid catalogue.
    pub xid_catalog: Option<PathBuf>,
}

impl Default for Incidents {
    fn default() -> Self {
        Incidents { window: Duration::from_secs(5), min_clients: 2, min_ratio: 0.5, xid_catalog: None }
    }
}

/// `state`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// Where cursors and `incidents.jsonl` are kept; `None` keeps nothing.
    pub directory: Option<PathBuf>,
    /// How many incidents.
    pub incidents_kept: usize,
}

impl Default for State {
    fn default() -> Self {
        State { directory: Some("/var/lib/mps-exporter".into()), incidents_kept: 1000 }
    }
}

/// `collectors`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Collectors {
    /// Whether to export a series per client.
    pub clients: bool,
    /// At most how many.
    pub clients_limit: usize,
    /// Whether to export a series per workload.
    pub workloads: bool,
    /// At most how many.
    pub workloads_limit: usize,
}

impl Default for Collectors {
    fn default() -> Self {
        Collectors { clients: false, clients_limit: 512, workloads: true, workloads_limit: 512 }
    }
}

/// `checkpoints`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoints {
    /// The variable in a client's environment that names its checkpoint file, directory or glob; `None`: not read.
    pub environment: Option<String>,
    /// Globs per workload.
    pub paths: Vec<CheckpointPath>,
}

impl Default for Checkpoints {
    fn default() -> Self {
        Checkpoints { environment: Some("MPS_CHECKPOINT_PATH".into()), paths: Vec::new() }
    }
}

/// `checkpoints.paths[]`: a glob for the clients whose workload matches every given field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointPath {
    /// The glob, as the client sees it.
    pub glob: String,
    /// Kubernetes namespace.
    pub namespace: Option<String>,
    /// Prefix of the pod's name.
    pub pod: Option<String>,
    /// systemd unit.
    pub unit: Option<String>,
    /// Command name.
    pub command: Option<String>,
}

/// `alertmanagers[]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Alertmanager {
    /// Base URL; `/api/v2/alerts` is added.
    pub url: String,
    /// Labels added to every alert: the `external_labels` of the Prometheus beside it.
    pub labels: BTreeMap<String, String>,
    /// Where the runbooks are; `/<AlertName>.md` is added for the annotation `runbook_url`. `None`: no such annotation.
    pub runbooks: Option<String>,
    /// User and password.
    pub basic_auth: Option<BasicAuth>,
    /// A file with a bearer token, read at every post.
    pub bearer_token_file: Option<PathBuf>,
    /// TLS towards it.
    pub tls: ClientTls,
    /// Send the resolved form too, for sites without the Prometheus rules.
    pub resolve: bool,
    /// Deadline of one post.
    pub timeout: Duration,
    /// Incidents older than this when found after a restart are not posted.
    pub max_age: Duration,
}

/// `alertmanagers[].basic_auth`.
#[derive(Clone, PartialEq, Eq)]
pub struct BasicAuth {
    /// User name.
    pub username: String,
    /// Password, or the file that holds it.
    pub password: Secret,
}

/// A password in the file itself or in a file of its own.
#[derive(Clone, PartialEq, Eq)]
pub enum Secret {
    /// In the configuration.
    Inline(String),
    /// In this file, read at every use.
    File(PathBuf),
}

impl std::fmt::Debug for BasicAuth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BasicAuth {{ username: {:?}, password: <secret> }}", self.username)
    }
}

/// `alertmanagers[].tls`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClientTls {
    /// Certificates to trust, instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// Our certificate.
    pub cert_file: Option<PathBuf>,
    /// Its key.
    pub key_file: Option<PathBuf>,
    /// The name to expect instead of the URL's host.
    pub server_name: Option<String>,
    /// Trust anything. For tests.
    pub insecure_skip_verify: bool,
}

/// `remediation`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Remediation {
    /// Restart of a dead or wedged control daemon.
    pub restart: Option<Restart>,
    /// A command per event.
    pub hooks: BTreeMap<HookEvent, Hook>,
}

/// `remediation.restart`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restart {
    /// The daemons that it is for; empty: all configured and discovered ones.
    pub daemons: Vec<String>,
    /// The command and its arguments; no shell.
    pub command: Vec<String>,
    /// How long a daemon must be down first.
    pub delay: Duration,
    /// Upper bound of the back-off between attempts.
    pub max_backoff: Duration,
    /// At most so many restarts in an hour.
    pub limit_per_hour: u32,
    /// Time limit of one run.
    pub timeout: Duration,
}

/// When a hook runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HookEvent {
    /// A control daemon is down, stale or wedged.
    DaemonDown,
    /// A server met a fatal GPU error or died.
    ServerFault,
    /// Processes still block recovery after the window.
    RecoveryBlocked,
    /// A mass client loss.
    MassClientLoss,
    /// The server recovered.
    Recovered,
}

/// `remediation.hooks.<event>`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hook {
    /// The command and its arguments; no shell. The event is on its standard input as JSON.
    pub command: Vec<String>,
    /// Time limit; then the whole process group is killed.
    pub timeout: Duration,
}
