//! The model by examples and properties.

mod losses;
mod properties;
mod radius;
mod resume;
mod sources;

use std::sync::Arc;
use std::time::Duration;

use super::incident::{Change, Incident, IncidentChange};
use super::snapshot::{DomainView, Scope, Snapshot};
use super::{Effect, Node, Settings};
use crate::config::Config;
use crate::event::{
    ContextLook, DaemonSite, Event, EventKind, Freshness, Liveness, LockState, LogEntry, LogFile, LogMessage,
    LogPlace, ProcessFacts, ServerLook, ServerStatus, SourceHealth, SourceName, Xid, XidSource,
};
use crate::identity::{DeviceName, PciAddress, ProcessId, Workload};
use crate::source::mps_log::reader::LineReader;
use crate::time::{Moment, Mono};

pub(super) const SERVER: u32 = 500;

pub(super) fn settings() -> Settings {
    Settings { incidents_kept: 100, ..Config::default().model().unwrap() }
}

/// A node with one daemon, a server of uid 1000, and a clock that the test moves.
pub(super) struct Bench {
    pub node: Node,
    pub at: Moment,
    pub freshness: Freshness,
    pub changes: Vec<IncidentChange>,
    pub effects: Vec<Effect>,
}

pub(super) fn uuid(gpu: u32) -> Arc<str> {
    format!("GPU-{gpu:08x}-aaaa-bbbb-cccc-dddddddddddd").into()
}

pub(super) fn pci(gpu: u32) -> PciAddress {
    PciAddress { domain: 0, bus: u8::try_from(0x10 + gpu).unwrap(), device: 0 }
}

impl Bench {
    pub fn new() -> Bench {
        let at = Moment { wall: "2026-04-01T12:00:00Z".parse().unwrap(), mono: Mono(1_000_000_000) };
        let mut bench = Bench::empty(at);
        bench.daemon("default");
        for gpu in 0..4 {
            bench.tell(EventKind::GpuUuid(pci(gpu), uuid(gpu)));
        }
        bench.log(LogFile::Control, 400, LogMessage::ServerStarting { pid: SERVER, uid: 1000 });
        bench.server(LogMessage::ServerStarted);
        bench.log(LogFile::Control, 400, LogMessage::ServerReady { pid: SERVER });
        bench
    }

    /// A node of which nothing is known.
    pub fn empty(at: Moment) -> Bench {
        Bench {
            node: Node::new(settings(), at),
            at,
            freshness: Freshness::Live,
            changes: Vec::new(),
            effects: Vec::new(),
        }
    }

    pub fn daemon(&mut self, name: &str) {
        self.found(name);
        self.log_read(name);
    }

    /// A daemon that lives, of whose log nothing has been read.
    pub fn found(&mut self, name: &str) {
        let process = Some(ProcessId { pid: 400, start: 1 });
        self.tell(EventKind::DaemonFound(DaemonSite {
            name: name.into(),
            pipe_directory: format!("/tmp/{name}").into(),
            log_directory: format!("/tmp/{name}-log").into(),
            root: "".into(),
            process,
            started_at: None,
            log: LogPlace::Files,
            visible_devices: None,
            is_configured: true,
        }));
        let state = LockState::Held(ProcessId { pid: 400, start: 1 });
        self.tell(EventKind::Liveness(name.into(), Liveness { state, unanswered: 0, pid_file: None }));
    }

    pub fn log_read(&mut self, name: &str) {
        for source in [SourceName::ControlLog, SourceName::ServerLog] {
            let daemon = Some(name.into());
            self.tell(EventKind::Source(SourceHealth { source, daemon, state: Ok(()) }));
        }
    }

    pub fn tell(&mut self, kind: EventKind) {
        self.node.apply(&Event { at: self.at, freshness: self.freshness, kind });
        for effect in self.node.take_effects() {
            match effect {
                Effect::Incident(change) => self.changes.push(change),
                other => self.effects.push(other),
            }
        }
    }

    pub fn pass(&mut self, millis: u64) {
        self.at = self.at.after(Duration::from_millis(millis));
        self.tell(EventKind::Tick);
    }

    pub fn log(&mut self, file: LogFile, writer: u32, message: LogMessage) {
        let text = Some(format!("{message:?}").into());
        self.tell(EventKind::Log("default".into(), LogEntry { file, writer, message, text }));
    }

    pub fn server(&mut self, message: LogMessage) {
        self.log(LogFile::Server, SERVER, message);
    }

    /// A line of server.log as the daemon writes it.
    pub fn server_line(&mut self, text: &str) {
        let line = format!("[2026-04-01 12:00:00.000 Server {SERVER:>5}] {text}");
        let mut reader = LineReader::new(LogFile::Server);
        let entry = reader.line(line.as_bytes()).map(|said| said.into_entry(LogFile::Server));
        assert_eq!(reader.take_counts().unrecognized, 0, "{text}");
        if let Some(entry) = entry {
            self.tell(EventKind::Log("default".into(), entry));
        }
    }

    pub fn control(&mut self, message: LogMessage) {
        self.log(LogFile::Control, 400, message);
    }

    /// A client of the workload `unit` with a context on each of `gpus`.
    pub fn client(&mut self, pid: u32, gpus: &[u32], unit: &str) {
        for (context, gpu) in gpus.iter().enumerate() {
            self.server(LogMessage::DeviceAssociated { device: DeviceName::Uuid(uuid(*gpu)) });
            let context = u32::try_from(context).unwrap() + 1;
            self.server(LogMessage::ContextActive { pid, context });
        }
        self.seen(pid, unit);
    }

    pub fn seen(&mut self, pid: u32, unit: &str) {
        let workload = (!unit.is_empty()).then(|| Workload::Unit { unit: unit.into() });
        self.seen_with(pid, workload);
    }

    pub fn seen_with(&mut self, pid: u32, workload: Option<Workload>) {
        let facts = ProcessFacts {
            pid,
            process: Some(ProcessId { pid, start: 7 }),
            started_at: Some(self.at.wall),
            command: Some(format!("cmd{pid}").into()),
            uid: Some(1000),
            workload,
        };
        self.tell(EventKind::ProcessSeen("default".into(), facts));
    }

    pub fn exit(&mut self, pid: u32) {
        self.tell(EventKind::ProcessExited { daemon: "default".into(), pid });
    }

    pub fn xid(&mut self, gpu: u32, code: u32, pid: Option<u32>) {
        self.xid_by(XidSource::Kmsg, gpu, code, pid);
    }

    pub fn xid_by(&mut self, source: XidSource, gpu: u32, code: u32, pid: Option<u32>) {
        self.tell(EventKind::Xid(Xid {
            code,
            source,
            pci: (source == XidSource::Kmsg).then(|| pci(gpu)),
            uuid: (source == XidSource::Nvml).then(|| uuid(gpu)),
            gpu_instance: None,
            compute_instance: None,
            pid,
            pid_owns_channel: pid.is_some(),
            caused_by: None,
            recovery_action: None,
            count: 1,
            text: Some(format!("Xid {code}").into()),
        }));
    }

    pub fn snapshot(&self) -> Snapshot {
        self.node.snapshot()
    }

    pub fn domain(&self, gpu: u32) -> DomainView {
        let label = uuid(gpu);
        let found = self.snapshot().domains.into_iter().find(|domain| domain.labels.uuid == label);
        found.unwrap_or_else(|| panic!("no domain for GPU {gpu}"))
    }

    pub fn radius(&self, gpu: u32, scope: Scope) -> Option<u32> {
        self.domain(gpu).radius.iter().find(|(each, _)| *each == scope).and_then(|(_, radius)| radius.clients)
    }

    pub fn incidents(&self) -> Vec<Arc<Incident>> {
        self.snapshot().incidents
    }

    /// The only incident.
    pub fn incident(&self) -> Arc<Incident> {
        let incidents = self.incidents();
        assert_eq!(incidents.len(), 1, "{incidents:#?}");
        incidents[0].clone()
    }

    pub fn told(&self) -> Vec<Change> {
        self.changes.iter().map(|change| change.change).collect()
    }

    pub fn look(&mut self, clients: &[(u32, u32)]) {
        self.look_with(None, clients);
    }

    pub fn look_with(&mut self, status: Option<ServerStatus>, clients: &[(u32, u32)]) {
        let contexts = clients.iter().map(|(pid, gpu)| ContextLook {
            pid: *pid,
            context: 1,
            device: DeviceName::UuidPrefix(uuid(*gpu)[..22].into()),
            namespace: None,
            command: None,
        });
        let server = ServerLook {
            pid: SERVER,
            status,
            clients: Some(clients.iter().map(|(pid, _)| *pid).collect()),
            contexts: Some(contexts.collect()),
        };
        let look = crate::event::Look { servers: vec![server], ..Default::default() };
        self.tell(EventKind::Look("default".into(), Ok(look)));
    }
}
