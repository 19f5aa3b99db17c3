//! What the page calls things.

use std::fmt::{self, Display};
use std::time::Duration;

use jiff::Timestamp;

use super::html::Html;
use crate::engine::incident::{Cause, Culprit, CulpritEvidence, IncidentState, VictimEvidence};
use crate::engine::snapshot::{DaemonState, DomainLabels, DomainView};
use crate::event::{RecoveryAction, ServerStatus, SourceName};
use crate::identity::Workload;

/// How bad something is: the class of its colour. The word beside it says the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    Unknown,
    Good,
    Warning,
    Bad,
}

impl Level {
    pub fn class(self) -> &'static str {
        match self {
            Level::Unknown => "unknown",
            Level::Good => "good",
            Level::Warning => "warning",
            Level::Bad => "bad",
        }
    }
}

/// A state as a word in its colour.
pub(super) fn badge(html: &mut Html, level: Level, word: &'static str) {
    html.raw("<span class=\"badge ").raw(level.class()).raw("\">").raw(word).raw("</span>");
}

/// `1 client`, `2 clients`, `0 clients`.
pub(super) struct Many<N>(pub N, pub &'static str);

impl<N: Display + PartialEq + From<u8>> Display for Many<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = if self.0 == N::from(1) {
            ""
        } else if self.1.ends_with("ss") {
            "es"
        } else {
            "s"
        };
        write!(f, "{} {}{plural}", self.0, self.1)
    }
}

/// An amount of memory.
pub(super) struct Memory(pub u64);

impl Display for Memory {
    #[allow(clippy::cast_precision_loss, reason = "three digits are shown")]
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = self.0 as f64 / f64::from(1 << 30);
        match gib {
            ..0.1 => write!(f, "{:.0} MiB", gib * 1024.0),
            ..9.95 => write!(f, "{gib:.1} GiB"),
            _ => write!(f, "{gib:.0} GiB"),
        }
    }
}

/// A time span, to the two largest units. The page's script says it the same way.
pub(super) struct Span(pub Duration);

impl Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
        if seconds < 60 {
            write!(f, "{seconds} s")
        } else if minutes < 60 {
            write!(f, "{minutes} min")
        } else if hours < 24 {
            write!(f, "{hours} h {} min", minutes % 60)
        } else {
            write!(f, "{days} d {} h", hours % 24)
        }
    }
}

/// How long before `now` this was; nothing is in the future.
pub(super) fn since(at: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(at)).unwrap_or_default()
}

/// A time as its age, which the page's script keeps current.
pub(super) fn age(html: &mut Html, at: Timestamp, now: Timestamp, after: &'static str) {
    html.raw("<time data-after=\"")
        .raw(after)
        .raw("\" datetime=\"")
        .text(at)
        .raw("\" title=\"")
        .text(full(at));
    html.raw("\">").text(Span(since(at, now))).raw(after).raw("</time>");
}

/// A time in full, to the second.
pub(super) fn full(at: Timestamp) -> impl Display {
    at.strftime("%Y-%m-%d %H:%M:%S UTC")
}

/// `GPU 0`, `GPU 0 MIG 3`, or the UUID where no index is known.
pub(super) struct Device<'a>(pub &'a DomainLabels);

impl Display for Device<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        device(f, &self.0.gpu, &self.0.uuid, &self.0.gpu_instance)
    }
}

/// A device by its three labels.
pub(super) fn device(f: &mut impl fmt::Write, gpu: &str, uuid: &str, instance: &str) -> fmt::Result {
    match (gpu, instance) {
        ("", _) => f.write_str(uuid),
        (_, "") => write!(f, "GPU {gpu}"),
        _ => write!(f, "GPU {gpu} MIG {instance}"),
    }
}

/// The number within [`Device`], for narrow places.
pub(super) fn short_device(domain: &DomainView) -> String {
    let labels = &domain.labels;
    match (&*labels.gpu, &*labels.gpu_instance) {
        ("", _) => labels.uuid.chars().take(8).collect(),
        (gpu, "") => gpu.to_owned(),
        (gpu, instance) => format!("{gpu}/{instance}"),
    }
}

/// A process: its command and pid.
pub(super) struct Process<'a>(pub u32, pub Option<&'a str>);

impl Display for Process<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.1 {
            Some(command) => write!(f, "{command} (pid {})", self.0),
            None => write!(f, "pid {}", self.0),
        }
    }
}

/// The culprit with its workload.
pub(super) struct Named<'a>(pub &'a Culprit);

impl Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Process(self.0.pid, self.0.command.as_deref()).fmt(f)?;
        self.0.workload.as_ref().map_or(Ok(()), |workload| write!(f, ", {workload}"))
    }
}

/// A workload, or that none is known.
pub(super) fn workload(known: Option<&Workload>) -> String {
    known.map_or_else(|| "workload not known".to_owned(), ToString::to_string)
}

pub(super) fn cause(cause: Cause) -> &'static str {
    match cause {
        Cause::Fault => "a client\u{2019}s fatal fault",
        Cause::ServerExit => "the MPS server died",
        Cause::Gpu => "GPU error",
        Cause::Killed => "clients were killed",
        Cause::Unexplained => "unexplained loss",
    }
}

pub(super) fn incident_state(state: IncidentState, is_blocked: bool) -> (Level, &'static str) {
    match state {
        IncidentState::Open if is_blocked => (Level::Bad, "open, blocked"),
        IncidentState::Open => (Level::Bad, "open"),
        IncidentState::Recovering if is_blocked => (Level::Bad, "blocked"),
        IncidentState::Recovering => (Level::Warning, "recovering"),
        IncidentState::Closed => (Level::Unknown, "closed"),
    }
}

pub(super) fn culprit_evidence(evidence: CulpritEvidence) -> &'static str {
    match evidence {
        CulpritEvidence::ServerLog => "named by server.log",
        CulpritEvidence::XidChannel => "owns the channel that the Xid names",
    }
}

pub(super) fn victim_evidence(evidence: VictimEvidence) -> &'static str {
    match evidence {
        VictimEvidence::ServerLog => "server.log",
        VictimEvidence::Snapshot => "left with the fault",
        VictimEvidence::Xid => "Xid",
    }
}

pub(super) fn daemon_state(state: DaemonState) -> (Level, &'static str) {
    match state {
        DaemonState::Serving => (Level::Good, "serving"),
        DaemonState::Idle => (Level::Unknown, "idle"),
        DaemonState::Wedged => (Level::Bad, "wedged"),
        DaemonState::Down => (Level::Bad, "down"),
        DaemonState::Stale => (Level::Bad, "killed"),
        DaemonState::Unknown => (Level::Unknown, "unknown"),
    }
}

pub(super) fn server_state(is_up: Option<bool>, status: Option<ServerStatus>) -> (Level, &'static str) {
    match (is_up, status) {
        (Some(false), _) => (Level::Unknown, "not running"),
        (_, Some(ServerStatus::Fault)) => (Level::Bad, "in fault"),
        (_, Some(ServerStatus::Active)) => (Level::Good, "active"),
        (_, Some(ServerStatus::Initializing)) => (Level::Warning, "starting"),
        (Some(true), None) => (Level::Unknown, "running"),
        (None, None) => (Level::Unknown, "unknown"),
    }
}

pub(super) fn recovery_action(action: RecoveryAction) -> &'static str {
    match action {
        RecoveryAction::None => "none",
        RecoveryAction::GpuReset => "needs a GPU reset",
        RecoveryAction::NodeReboot => "needs a node reboot",
        RecoveryAction::DrainP2p => "needs its peers drained",
        RecoveryAction::DrainAndReset => "needs drain and reset",
        RecoveryAction::RecoverImexDomain => "needs its IMEX domain recovered",
        RecoveryAction::BusReset => "needs a bus reset",
        RecoveryAction::SystemReboot => "needs a system reboot",
    }
}

pub(super) fn source(name: SourceName) -> &'static str {
    match name {
        SourceName::ControlLog => "control.log",
        SourceName::ServerLog => "server.log",
        SourceName::DaemonOutput => "daemon output",
        SourceName::Control => "control socket",
        SourceName::ControlLock => "control lock",
        SourceName::Nvml => "NVML",
        SourceName::KernelLog => "kernel log",
        SourceName::Proc => "/proc",
        SourceName::PodLogs => "pod logs",
        SourceName::Kubelet => "kubelet",
        SourceName::Discovery => "discovery",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_read_well() {
        let span = |seconds| Span(Duration::from_secs(seconds)).to_string();
        assert_eq!([span(0), span(59), span(60)], ["0 s", "59 s", "1 min"]);
        assert_eq!([span(7260), span(90_000)], ["2 h 1 min", "1 d 1 h"]);
        let memory = |bytes| Memory(bytes).to_string();
        assert_eq!([memory(0), memory(1 << 20), memory(3 << 29)], ["0 MiB", "1 MiB", "1.5 GiB"]);
        assert_eq!(memory(80 << 30), "80 GiB");
        assert_eq!(Many(1_u32, "process").to_string(), "1 process");
        assert_eq!(Many(2_u32, "process").to_string(), "2 processes");
        assert_eq!(Many(0_u32, "client").to_string(), "0 clients");
    }
}
