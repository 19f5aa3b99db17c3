//! Time to take a picture of the model, which every change costs: `cargo bench --bench picture`.
//!
//! `one` has a client on one GPU, `coupled` has a tenth of them on two. `fault` is the whole story of a fault that takes
//! every client of a server: its lines, a picture after each, and the ends of all processes.
#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mps_exporter::engine::{Node, Settings};
use mps_exporter::event::{
    DaemonSite, Event, EventKind, Freshness, LogEntry, LogFile, LogMessage, LogPlace, ProcessFacts,
    SourceHealth, SourceName,
};
use mps_exporter::identity::{DaemonName, DeviceName, ProcessId, Workload};
use mps_exporter::time::{Moment, Mono};
use mps_exporter::xid::Catalogue;

const SERVER: u32 = 4000;
const FIRST_CLIENT: u32 = 5000;
const ROUNDS: usize = 200;

fn main() {
    println!("{:<12} {:>8} {:>8} {:>12} {:>12}", "GPUs", "clients", "", "p50", "p99");
    for (gpus, per_gpu) in [(8, 48), (64, 30), (8, 375)] {
        for (kind, couple_every) in [("one", None), ("coupled", Some(10))] {
            let story = Story::new(gpus, gpus * per_gpu, couple_every);
            let mut times: Vec<Duration> = (0..ROUNDS)
                .map(|_| {
                    let start = Instant::now();
                    black_box(story.node.snapshot());
                    start.elapsed()
                })
                .collect();
            times.sort();
            let (middle, late) = (times[ROUNDS / 2], times[ROUNDS * 99 / 100]);
            println!("{gpus:<12} {:>8} {kind:>8} {middle:>12.1?} {late:>12.1?}", gpus * per_gpu);
        }
        let mut story = Story::new(gpus, gpus * per_gpu, None);
        let start = Instant::now();
        story.fault();
        println!("{gpus:<12} {:>8} {:>8} {:>12.1?}", gpus * per_gpu, "fault", start.elapsed());
    }
}

/// A node with one daemon and one server.
struct Story {
    node: Node,
    at: Moment,
    daemon: DaemonName,
    clients: std::ops::Range<u32>,
}

impl Story {
    fn new(gpus: u32, clients: u32, couple_every: Option<u32>) -> Story {
        let at = Moment { wall: "2026-04-01T12:00:00Z".parse().unwrap(), mono: Mono(0) };
        let settings = Settings {
            window: Duration::from_secs(5),
            min_clients: 2,
            min_ratio: 0.5,
            incidents_kept: 100,
            look_interval: Duration::from_secs(60),
            xids: Arc::new(Catalogue::builtin().clone()),
        };
        let daemon: DaemonName = "default".into();
        let clients = FIRST_CLIENT..FIRST_CLIENT + clients;
        let mut story = Story { node: Node::new(settings, at), at, daemon, clients: clients.clone() };
        story.tell(EventKind::DaemonFound(DaemonSite {
            name: story.daemon.clone(),
            pipe_directory: "/tmp/nvidia-mps".into(),
            log_directory: "/var/log/nvidia-mps".into(),
            root: "".into(),
            process: Some(ProcessId { pid: 400, start: 1 }),
            started_at: None,
            log: LogPlace::Files,
            visible_devices: None,
            is_configured: true,
        }));
        let health =
            SourceHealth { source: SourceName::ServerLog, daemon: Some(story.daemon.clone()), state: Ok(()) };
        story.tell(EventKind::Source(health));
        story.log(400, LogMessage::ServerStarting { pid: SERVER, uid: 1000 });
        story.log(400, LogMessage::ServerReady { pid: SERVER });
        for pid in clients {
            let gpu = pid % gpus;
            story.context(pid, 1, gpu);
            if couple_every.is_some_and(|every| pid % every == 0) {
                story.context(pid, 2, (gpu + 1) % gpus);
            }
            let facts = ProcessFacts {
                pid,
                process: Some(ProcessId { pid, start: 1 }),
                started_at: Some(at.wall),
                command: Some("train".into()),
                uid: Some(1000),
                workload: Some(Workload::Slurm { job: (pid / 4).to_string().into(), step: None, user: None }),
            };
            story.tell(EventKind::ProcessSeen(story.daemon.clone(), facts));
        }
        story
    }

    fn context(&mut self, pid: u32, context: u32, gpu: u32) {
        let uuid = format!("GPU-{gpu:08x}-aaaa-bbbb-cccc-dddddddddddd");
        self.log(SERVER, LogMessage::DeviceAssociated { device: DeviceName::Uuid(uuid.into()) });
        self.log(SERVER, LogMessage::ContextActive { pid, context });
    }

    fn tell(&mut self, kind: EventKind) {
        self.node.apply(&Event { at: self.at, freshness: Freshness::Live, kind });
    }

    fn log(&mut self, writer: u32, message: LogMessage) {
        let entry = LogEntry { file: LogFile::Merged, writer, message, text: None };
        self.tell(EventKind::Log(self.daemon.clone(), entry));
    }

    fn fault(&mut self) {
        self.told(LogMessage::ClientFault { pid: self.clients.start });
        self.told(LogMessage::ServerFault);
        for pid in self.clients.clone() {
            self.told(LogMessage::ContextInactive { pid, context: 1 });
        }
        self.told(LogMessage::FaultDevice { ordinal: 0 });
        for pid in self.clients.clone() {
            self.tell(EventKind::ProcessExited { daemon: self.daemon.clone(), pid });
            self.look();
        }
    }

    fn told(&mut self, message: LogMessage) {
        self.log(SERVER, message);
        self.look();
    }

    /// What the owner does after every batch.
    fn look(&mut self) {
        self.at = self.at.after(Duration::from_micros(10));
        black_box(self.node.take_effects());
        black_box(self.node.snapshot());
    }
}
