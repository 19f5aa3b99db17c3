//! What each source sees, what is missing without it, and what a person has to change.

use std::path::Path;

use super::finding::{Finding, State};
use super::surroundings::Surroundings;
use crate::config::{Config, ControlClient};
use crate::engine::snapshot::{DaemonState, DaemonView, Snapshot, SourceView};
use crate::event::{LogPlace, SourceName};
use crate::metrics::labels::LabelValue as _;
use crate::serve::look::SourceKey;

/// One look, judged.
pub struct Judge<'l> {
    /// What the exporter was told to do.
    pub config: &'l Config,
    /// What was seen.
    pub snapshot: &'l Snapshot,
    /// Sources that told nothing in time.
    pub silent: &'l [SourceKey],
    /// Where this runs.
    pub around: Surroundings,
}

impl Judge<'_> {
    /// A finding per daemon and source.
    pub fn findings(&self) -> Vec<Finding> {
        let mut findings = vec![self.daemons()];
        findings.extend(self.switched_off());
        findings.extend(self.snapshot.sources.iter().map(|source| self.source(source)));
        findings.extend(self.silent.iter().map(silent_source));
        findings.extend(self.unfound_clients());
        findings.extend(self.snapshot.disagreements.iter().map(|it| {
            let fix = vec![
                "mps-exporter status, and compare; tell the project if the exporter is wrong".to_owned(),
            ];
            Finding::bad(
                it.source.label(),
                State::Blind,
                &*it.about,
                "a picture that all sources agree on",
                fix,
            )
            .of(it.daemon.as_deref())
        }));
        findings
    }

    fn daemons(&self) -> Finding {
        const WHAT: &str = "daemons";
        let daemons = &self.snapshot.daemons;
        if daemons.is_empty() {
            let missing =
                "everything about MPS: without a control daemon there are only GPUs and Xids to see";
            return Finding::bad(
                WHAT,
                State::Broken,
                "no MPS control daemon is visible",
                missing,
                self.find_daemons(),
            );
        }
        let sees: Vec<String> = daemons
            .iter()
            .map(|daemon| format!("{} ({}, {})", daemon.name, state(daemon.state), daemon.pipe_directory))
            .collect();
        Finding::fine(WHAT, State::Ok, sees.join("; "))
    }

    fn find_daemons(&self) -> Vec<String> {
        let mut fix = Vec::new();
        if !self.around.has_host_pids {
            fix.push(
                "let it see the host's processes: hostPID: true (Kubernetes), --pid=host (Docker)".to_owned(),
            );
        }
        if self.around.is_container {
            fix.push(
                "mount the daemon's pipe and log directories (/tmp/nvidia-mps, /var/log/nvidia-mps) and name them \
                 under `daemons`"
                    .to_owned(),
            );
        } else {
            fix.push(
                "name its directories: daemons: [{name: default, pipe_directory: …, log_directory: …}]"
                    .to_owned(),
            );
        }
        if self.around.uid != 0 {
            fix.push(format!(
                "run as root: the environment of other users' daemons, which says where their directories are, is closed \
                 to uid {}",
                self.around.uid
            ));
        }
        fix.push("start one on the host, if none runs: nvidia-cuda-mps-control -d".to_owned());
        fix
    }

    fn switched_off(&self) -> Vec<Finding> {
        let off = |source: SourceName, key: &str| {
            Finding::fine(source.label(), State::Off, format!("{key} in the configuration"))
        };
        let mut findings = Vec::new();
        if !self.config.nvml.enabled {
            findings.push(off(SourceName::Nvml, "nvml.enabled: false"));
        }
        if !self.config.kernel_log.enabled {
            findings.push(off(SourceName::KernelLog, "kernel_log.enabled: false"));
        }
        if self.config.control.client == ControlClient::Off {
            findings.push(off(SourceName::Control, "control.client: off"));
        }
        findings
    }

    fn source(&self, source: &SourceView) -> Finding {
        let daemon = source.daemon.as_deref();
        let name = source.source.label();
        if source.is_up {
            return Finding::fine(name, State::Ok, self.sees(source)).of(daemon);
        }
        let reason = source.reason.as_deref().unwrap_or("it gives no reason");
        let fix = self.fix(source.source, self.daemon(daemon), reason);
        Finding::bad(name, State::Blind, reason, missing(source.source), fix).of(daemon)
    }

    fn daemon(&self, name: Option<&str>) -> Option<&DaemonView> {
        self.snapshot.daemons.iter().find(|daemon| Some(&*daemon.name) == name)
    }

    fn sees(&self, source: &SourceView) -> String {
        let snapshot = self.snapshot;
        let is_its = |daemon: &crate::identity::DaemonName| Some(daemon) == source.daemon.as_ref();
        let directory = self.daemon(source.daemon.as_deref()).map_or("", |daemon| &daemon.log_directory);
        match source.source {
            SourceName::Discovery => format!("daemons found: {}", snapshot.daemons.len()),
            SourceName::Nvml => {
                let driver = snapshot.domains.iter().find_map(|domain| domain.driver_version.as_deref());
                format!("GPUs: {}; driver {}", snapshot.gpus.len(), driver.unwrap_or("of unknown version"))
            }
            SourceName::KernelLog => {
                let total: u64 = snapshot.xids.iter().map(|xid| xid.count.total).sum();
                format!("{} is read; Xids in it: {total}", self.config.kernel_log.path.display())
            }
            SourceName::Control => {
                let servers = snapshot.servers.iter().filter(|server| is_its(&server.daemon)).count();
                let clients = snapshot.clients.iter().filter(|client| is_its(&client.daemon)).count();
                format!("it answers; servers: {servers}, clients: {clients}")
            }
            SourceName::ControlLock => "whether the daemon lives is seen from its lock".to_owned(),
            SourceName::ControlLog => format!("{directory}/control.log is followed"),
            SourceName::ServerLog => format!("{directory}/server.log is followed"),
            SourceName::DaemonOutput => "the daemon's output is followed".to_owned(),
            SourceName::Proc => {
                let known = snapshot.clients.iter().filter(|client| client.workload.is_some()).count();
                format!(
                    "processes are seen; clients with a known workload: {known} of {}",
                    snapshot.clients.len()
                )
            }
            SourceName::PodLogs => format!("{} names pods", self.config.host.pod_logs.display()),
            SourceName::Kubelet => "the kubelet names pods".to_owned(),
        }
    }

    /// Clients that are nobody's process here, though no source calls itself blind for it.
    fn unfound_clients(&self) -> Option<Finding> {
        let is_told = self.snapshot.sources.iter().any(|it| it.source == SourceName::Proc && !it.is_up);
        let unfound = self.snapshot.clients.iter().filter(|client| client.host_pid.is_none()).count();
        (unfound > 0 && !is_told).then(|| {
            let sees = format!(
                "{unfound} of {} clients are not found among the processes",
                self.snapshot.clients.len()
            );
            let fix = self.fix(SourceName::Proc, None, &sees);
            Finding::bad(SourceName::Proc.label(), State::Blind, sees, missing(SourceName::Proc), fix)
        })
    }

    /// What a person can change.
    fn fix(&self, source: SourceName, daemon: Option<&DaemonView>, reason: &str) -> Vec<String> {
        let config = self.config;
        let is_container = self.around.is_container;
        match source {
            SourceName::Discovery => self.find_daemons(),
            SourceName::Control => control(daemon, reason),
            SourceName::ControlLock => daemon.map_or_else(Vec::new, |daemon| {
                let pipe = &daemon.pipe_directory;
                vec![format!("chmod a+rx {pipe}; chmod a+r {pipe}/control_lock"), "run as root".to_owned()]
            }),
            SourceName::ControlLog | SourceName::ServerLog => daemon.map_or_else(Vec::new, |daemon| {
                let log = &daemon.log_directory;
                let mut fix = vec![format!("chmod a+rx {log}; chmod a+r {log}/*.log   (or run as root)")];
                if is_container {
                    fix.push(format!("mount the host's {log} at the same path, read-only"));
                }
                fix.push("set log_directory of this daemon in the configuration, if its logs are elsewhere".to_owned());
                fix
            }),
            SourceName::DaemonOutput => match daemon.map(|daemon| &daemon.log) {
                Some(LogPlace::Journal { .. }) => vec![
                    "usermod -aG systemd-journal USER   (systemd: SupplementaryGroups=systemd-journal)".to_owned(),
                    "in a container, mount /var/log/journal and /run/log/journal read-only".to_owned(),
                ],
                _ => vec![
                    "start the daemon with -d instead of -f: it then writes log files".to_owned(),
                    "set `log` of this daemon in the configuration: a file with its output, or `journal`".to_owned(),
                ],
            },
            SourceName::Nvml => nvml(config, reason, is_container),
            SourceName::KernelLog => kernel_log(&config.kernel_log.path, reason, is_container),
            SourceName::Proc => {
                let mut fix = Vec::new();
                if is_container || !self.around.has_host_pids {
                    fix.push("hostPID: true (Kubernetes), --pid=host (Docker)".to_owned());
                    fix.push("mount the host's /proc read-only and set host.proc to that place".to_owned());
                }
                if self.around.uid != 0 {
                    fix.push("run as root, or with CAP_SYS_PTRACE (systemd: AmbientCapabilities=CAP_SYS_PTRACE)".to_owned());
                }
                if fix.is_empty() {
                    fix.push("mount -o remount,hidepid=0 /proc".to_owned());
                }
                fix
            }
            SourceName::PodLogs => {
                let place = config.host.pod_logs.display();
                vec![
                    format!("mount the host's /var/log/pods at {place}, read-only"),
                    "set host.pod_logs to where it is mounted".to_owned(),
                ]
            }
            SourceName::Kubelet => vec![
                "mount the host's /var/lib/kubelet/pod-resources, and set host.kubelet_socket to kubelet.sock in it".to_owned(),
                "host: {kubelet_socket: \"\"} in the configuration, to do without it".to_owned(),
            ],
        }
    }
}

fn silent_source((source, daemon): &SourceKey) -> Finding {
    let fix = vec!["mps-exporter --log.level=debug check: shows how far it came".to_owned()];
    Finding::bad(
        source.label(),
        State::Blind,
        "it told nothing within the time of one look",
        missing(*source),
        fix,
    )
    .of(daemon.as_deref())
}

fn control(daemon: Option<&DaemonView>, reason: &str) -> Vec<String> {
    let Some(daemon) = daemon else { return Vec::new() };
    let pipe = &daemon.pipe_directory;
    if matches!(daemon.state, DaemonState::Down | DaemonState::Stale) {
        return vec![format!(
            "start it: CUDA_MPS_PIPE_DIRECTORY={pipe} CUDA_MPS_LOG_DIRECTORY={} nvidia-cuda-mps-control -d",
            daemon.log_directory
        )];
    }
    if reason.starts_with("no answer") {
        return vec!["it is wedged: mps-exporter explain MpsDaemonWedged".to_owned()];
    }
    vec![
        format!("chmod a+rx {pipe}   (its socket `control` has mode 0666)"),
        "run as root, or as the daemon's user".to_owned(),
        "control: {client: off} in the configuration, to go by logs and NVML alone".to_owned(),
    ]
}

fn nvml(config: &Config, reason: &str, is_container: bool) -> Vec<String> {
    let mut fix = Vec::new();
    if is_container {
        fix.push(
            "run it with the NVIDIA runtime: runtimeClassName: nvidia (Kubernetes), --gpus all (Docker), and \
             NVIDIA_DRIVER_CAPABILITIES=utility, NVIDIA_VISIBLE_DEVICES=all"
                .to_owned(),
        );
    }
    if reason.contains("driver is not loaded") {
        fix.push("modprobe nvidia   (install the NVIDIA driver first)".to_owned());
    } else if reason.starts_with("cannot load") {
        fix.push(format!(
            "install {} (Debian: libnvidia-ml1, Ubuntu: libnvidia-compute-VERSION), or set nvml.library to its path",
            config.nvml.library.display()
        ));
    } else if reason.starts_with("stuck") {
        fix.push("the driver hangs: mps-exporter explain MpsExporterBlind".to_owned());
    }
    fix.push("nvml: {enabled: false} in the configuration, where there is no GPU".to_owned());
    fix
}

fn kernel_log(path: &Path, reason: &str, is_container: bool) -> Vec<String> {
    let shown = path.display();
    let mut fix = Vec::new();
    if is_container {
        // Kubernetes and Docker give capabilities to root only: they have no ambient ones.
        fix.push(
            "Kubernetes: securityContext: {runAsUser: 0, privileged: true}, or with {capabilities: {add: [SYSLOG]}} a \
             device cgroup that allows c 1:11 r; a capability does not reach another user than root"
                .to_owned(),
        );
        fix.push(format!("Docker: --user 0 --cap-add SYSLOG --device /dev/kmsg:{shown}"));
    } else if reason.contains("CAP_SYSLOG") {
        fix.push("AmbientCapabilities=CAP_SYSLOG in the systemd unit".to_owned());
        fix.push("sysctl kernel.dmesg_restrict=0".to_owned());
    } else {
        fix.push(format!("run as root, or let this user read {shown}"));
    }
    fix.push("usermod -aG systemd-journal USER: the journal is read instead".to_owned());
    fix
}

/// What cannot be told without a source.
fn missing(source: SourceName) -> &'static str {
    match source {
        SourceName::Discovery => "daemons that the configuration does not name",
        SourceName::ControlLog => "client losses, faults and refused clients in order; exits of servers",
        SourceName::ServerLog => "who did it: culprit and victims by name; when recovery ends",
        SourceName::DaemonOutput => "who did it: culprit and victims by name; what happened in order",
        SourceName::Control => "server states, and clients from before the logs began",
        SourceName::ControlLock => "that a daemon was killed, before somebody asks it",
        SourceName::Nvml => {
            "devices, memory of clients, blast radius of a lost GPU, processes that bypass MPS"
        }
        SourceName::KernelLog => "Xids with pid and channel, which name culprits; GPU errors; the OOM killer",
        SourceName::Proc => {
            "names, workloads, work at risk and exits of client processes; who blocks recovery"
        }
        SourceName::PodLogs | SourceName::Kubelet => "names of pods; their UIDs are shown instead",
    }
}

fn state(state: DaemonState) -> &'static str {
    match state {
        DaemonState::Unknown => "state unknown",
        known => known.label(),
    }
}
