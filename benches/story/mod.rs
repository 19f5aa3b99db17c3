//! The model of a node that a benchmark tells its story: one daemon, whose log is read.

use mps_exporter::config::Config;
use mps_exporter::engine::{Node, Settings};
use mps_exporter::event::{
    DaemonSite, Event, EventKind, Freshness, LogEntry, LogFile, LogMessage, LogPlace, ProcessFacts,
    SourceHealth, SourceName,
};
use mps_exporter::identity::{DaemonName, ProcessId, Workload};
use mps_exporter::time::{Moment, Mono};

/// The daemon's pid.
pub const DAEMON: u32 = 400;

/// The model, and the clock of its events.
pub struct Story {
    pub node: Node,
    pub at: Moment,
    pub daemon: DaemonName,
    /// How many events were told.
    pub events: u64,
}

impl Story {
    pub fn new(incidents_kept: usize) -> Story {
        let at = Moment { wall: "2026-04-01T12:00:00Z".parse().unwrap(), mono: Mono(0) };
        let settings = Settings { incidents_kept, ..Config::default().model().unwrap() };
        let mut story = Story { node: Node::new(settings, at), at, daemon: "default".into(), events: 0 };
        story.tell(EventKind::DaemonFound(DaemonSite {
            name: story.daemon.clone(),
            pipe_directory: "/tmp/nvidia-mps".into(),
            log_directory: "/var/log/nvidia-mps".into(),
            root: "".into(),
            process: Some(ProcessId { pid: DAEMON, start: 1 }),
            started_at: None,
            log: LogPlace::Files,
            visible_devices: None,
            is_configured: true,
        }));
        let source = SourceName::ServerLog;
        let daemon = Some(story.daemon.clone());
        story.tell(EventKind::Source(SourceHealth { source, daemon, state: Ok(()) }));
        story
    }

    pub fn tell(&mut self, kind: EventKind) {
        self.events += 1;
        self.node.apply(&Event { at: self.at, freshness: Freshness::Live, kind });
    }

    /// A line of the daemon's log, with its text where the incident is to quote it.
    pub fn log(&mut self, writer: u32, message: LogMessage, text: &str) {
        let text = (!text.is_empty()).then(|| text.into());
        let entry = LogEntry { file: LogFile::Merged, writer, message, text };
        self.tell(EventKind::Log(self.daemon.clone(), entry));
    }

    /// A client's process is looked at.
    pub fn seen(&mut self, process: ProcessId, job: u64) {
        let facts = ProcessFacts {
            pid: process.pid,
            process: Some(process),
            started_at: Some(self.at.wall),
            command: Some("train".into()),
            uid: Some(1000),
            workload: Some(Workload::Slurm { job: job.to_string().into(), step: None, user: None }),
        };
        self.tell(EventKind::ProcessSeen(self.daemon.clone(), facts));
    }
}
