//! Incidents through the pure model: how many a second, and that it does not grow.
//!
//! `cargo bench --bench incidents [-- COUNT]`; exits with 1 below [`WANTED`] incidents a second, or when resident memory
//! or anything that is counted of the state grows. Each incident is the whole story of a server: its start, four
//! clients, a fault that takes them, their ends, its recovery and its own end. `paced` leaves each time to close before
//! the next; in `storm` 10,000 begin in each second of the events' own time, so that the caps on what is open hold. The
//! effects are taken after each incident and a snapshot after every thousandth.
#![allow(missing_docs, clippy::unwrap_used)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use mps_exporter::engine::incident::Change;
use mps_exporter::engine::{Effect, Node, Settings};
use mps_exporter::event::{
    DaemonSite, Event, EventKind, Freshness, LogEntry, LogFile, LogMessage, LogPlace, ProcessFacts,
    SourceHealth, SourceName,
};
use mps_exporter::identity::{DaemonName, DeviceName, ProcessId, Workload};
use mps_exporter::time::{Moment, Mono};
use mps_exporter::xid::Catalogue;

/// Incidents a second that the model must be able to take.
const WANTED: f64 = 10_000.0;
/// How much the resident set may be larger at the end than after a tenth of the incidents, in KiB: what an allocator
/// does not give back at once.
const GROWTH: u64 = 2048;
const COUNT: u64 = 1_000_000;
const KEPT: usize = 1000;
const CLIENTS: u32 = 4;
const GPUS: u64 = 8;
/// Incidents between two looks at the state.
const LOOK_EVERY: u64 = 1000;

fn main() {
    let given = std::env::args().skip(1).find_map(|argument| argument.parse().ok());
    let count = given.unwrap_or(COUNT);
    let mut has_failed = false;
    for (name, pace) in [("paced", Duration::from_secs(6)), ("storm", Duration::from_micros(100))] {
        let run = run(count, pace);
        let rate = count as f64 / run.took.as_secs_f64();
        println!(
            "{name}: {count} incidents, {} events in {:.1} s: {rate:.0} incidents/s (wanted: {WANTED:.0})",
            run.events,
            run.took.as_secs_f64()
        );
        println!(
            "{name}: resident {} KiB after a tenth, {} KiB at the end; told {} opened, {} closed; at most {} open, {} clients, {} servers, {} domains",
            run.resident_early,
            run.resident,
            run.opened,
            run.closed,
            run.most_open,
            run.most_clients,
            run.most_servers,
            run.most_domains
        );
        let is_slow = rate < WANTED;
        let has_grown = run.resident > run.resident_early + GROWTH;
        let is_lossy = run.opened != count || run.closed + run.still_open != count;
        has_failed |= is_slow || has_grown || is_lossy;
        for (is_so, what) in
            [(is_slow, "too slow"), (has_grown, "it grows"), (is_lossy, "incidents are missing")]
        {
            if is_so {
                println!("{name}: FAILED: {what}");
            }
        }
    }
    std::process::exit(i32::from(has_failed));
}

#[derive(Default)]
struct Run {
    took: Duration,
    events: u64,
    opened: u64,
    closed: u64,
    still_open: u64,
    resident_early: u64,
    resident: u64,
    most_open: usize,
    most_clients: usize,
    most_servers: usize,
    most_domains: usize,
}

fn run(count: u64, pace: Duration) -> Run {
    let mut story = Story::new();
    let mut run = Run::default();
    let began = Instant::now();
    for number in 0..count {
        let at = story.at;
        story.incident(number);
        story.at = at.after(pace);
        for effect in story.node.take_effects() {
            if let Effect::Incident(change) = effect {
                run.opened += u64::from(change.change == Change::Opened);
                run.closed += u64::from(change.change == Change::Closed);
            }
        }
        if number % LOOK_EVERY == 0 {
            let snapshot = story.node.snapshot();
            run.still_open =
                snapshot.incidents.iter().filter(|incident| incident.ended_at.is_none()).count() as u64;
            run.most_open = run.most_open.max(usize::try_from(run.still_open).unwrap());
            run.most_clients = run.most_clients.max(snapshot.clients.len());
            run.most_servers = run.most_servers.max(snapshot.servers.len());
            run.most_domains = run.most_domains.max(snapshot.domains.len());
            assert!(
                snapshot.incidents.len() <= KEPT + run.most_open,
                "more closed incidents than are to be kept"
            );
        }
        if number == count / 10 {
            run.resident_early = resident();
        }
    }
    run.took = began.elapsed();
    run.resident = resident();
    run.events = story.events;
    let incidents = story.node.snapshot().incidents;
    run.still_open = incidents.iter().filter(|incident| incident.ended_at.is_none()).count() as u64;
    run
}

/// A node with one daemon, and a clock.
struct Story {
    node: Node,
    at: Moment,
    daemon: DaemonName,
    uuids: Vec<Arc<str>>,
    events: u64,
}

impl Story {
    fn new() -> Story {
        let at = Moment { wall: "2026-04-01T12:00:00Z".parse().unwrap(), mono: Mono(0) };
        let settings = Settings {
            window: Duration::from_secs(5),
            min_clients: 2,
            min_ratio: 0.5,
            incidents_kept: KEPT,
            look_interval: Duration::from_secs(60),
            xids: Arc::new(Catalogue::builtin().clone()),
        };
        let uuid = |gpu: u64| format!("GPU-{gpu:08x}-aaaa-bbbb-cccc-dddddddddddd").into();
        let mut story = Story {
            node: Node::new(settings, at),
            at,
            daemon: "default".into(),
            uuids: (0..GPUS).map(uuid).collect(),
            events: 0,
        };
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
        let source = SourceName::ServerLog;
        story.tell(EventKind::Source(SourceHealth {
            source,
            daemon: Some(story.daemon.clone()),
            state: Ok(()),
        }));
        story
    }

    fn tell(&mut self, kind: EventKind) {
        self.events += 1;
        self.node.apply(&Event { at: self.at, freshness: Freshness::Live, kind });
    }

    fn log(&mut self, writer: u32, message: LogMessage, text: &str) {
        let text = (!text.is_empty()).then(|| text.into());
        let entry = LogEntry { file: LogFile::Merged, writer, message, text };
        self.tell(EventKind::Log(self.daemon.clone(), entry));
    }

    fn incident(&mut self, number: u64) {
        // Pids go round, as the kernel's do.
        let server = 1000 + u32::try_from(number % 400_000).unwrap() * (CLIENTS + 1);
        let pids = server + 1..=server + CLIENTS;
        let uuid = self.uuids[usize::try_from(number % GPUS).unwrap()].clone();
        self.log(400, LogMessage::ServerStarting { pid: server, uid: 1000 }, "");
        self.log(400, LogMessage::ServerReady { pid: server }, "");
        for pid in pids.clone() {
            self.log(server, LogMessage::DeviceAssociated { device: DeviceName::Uuid(uuid.clone()) }, "");
            self.log(server, LogMessage::ContextActive { pid, context: 1 }, "");
            let facts = ProcessFacts {
                pid,
                process: Some(ProcessId { pid, start: number }),
                started_at: Some(self.at.wall),
                command: Some("train".into()),
                uid: Some(1000),
                workload: Some(Workload::Slurm { job: number.to_string().into(), step: None, user: None }),
            };
            self.tell(EventKind::ProcessSeen(self.daemon.clone(), facts));
        }
        self.log(
            server,
            LogMessage::ClientFault { pid: server + 1 },
            "Client process encountered a fatal GPU error.",
        );
        self.log(server, LogMessage::ServerFault, "Server is handling a fatal GPU error.");
        for pid in pids.clone() {
            self.log(server, LogMessage::ContextInactive { pid, context: 1 }, "Status of client is INACTIVE");
        }
        self.log(server, LogMessage::FaultDevice { ordinal: 0 }, "");
        self.log(server, LogMessage::ContextDestroyed { device: 0 }, "");
        for pid in pids {
            self.tell(EventKind::ProcessExited { daemon: self.daemon.clone(), pid });
        }
        self.log(server, LogMessage::ContextCreated { device: 0, name: None }, "");
        self.log(server, LogMessage::ServerLeaving, "");
        self.log(400, LogMessage::ServerExited { pid: server, status: 0 }, "");
    }
}

/// The resident set, in KiB.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
