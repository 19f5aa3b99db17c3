//! Incidents through the pure model: how many a second, and that it does not grow.
//!
//! `cargo bench --bench incidents [-- COUNT]`; exits with 1 below [`WANTED`] incidents a second, or when resident memory
//! or anything that is counted of the state grows. Each incident is the whole story of a server: its start, four
//! clients, a fault that takes them, their ends, its recovery and its own end. `paced` leaves each time to close before
//! the next; in `storm` 10,000 begin in each second of the events' own time, so that the caps on what is open hold. The
//! effects are taken after each incident and a snapshot after every thousandth.
#![allow(missing_docs, clippy::unwrap_used)]

mod story;

use std::sync::Arc;
use std::time::{Duration, Instant};

use mps_exporter::engine::Effect;
use mps_exporter::engine::incident::Change;
use mps_exporter::event::{EventKind, LogMessage};
use mps_exporter::identity::{DeviceName, ProcessId};
use story::{DAEMON, Story};

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
    let mut story = Story::new(KEPT);
    let uuids: Vec<Arc<str>> =
        (0..GPUS).map(|gpu| format!("GPU-{gpu:08x}-aaaa-bbbb-cccc-dddddddddddd").into()).collect();
    let mut run = Run::default();
    let began = Instant::now();
    for number in 0..count {
        let at = story.at;
        incident(&mut story, &uuids, number);
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

/// The whole story of a server.
fn incident(story: &mut Story, uuids: &[Arc<str>], number: u64) {
    // Pids go round, as the kernel's do.
    let server = 1000 + u32::try_from(number % 400_000).unwrap() * (CLIENTS + 1);
    let pids = server + 1..=server + CLIENTS;
    let uuid = uuids[usize::try_from(number % GPUS).unwrap()].clone();
    story.log(DAEMON, LogMessage::ServerStarting { pid: server, uid: 1000 }, "");
    story.log(DAEMON, LogMessage::ServerReady { pid: server }, "");
    for pid in pids.clone() {
        story.log(server, LogMessage::DeviceAssociated { device: DeviceName::Uuid(uuid.clone()) }, "");
        story.log(server, LogMessage::ContextActive { pid, context: 1 }, "");
        story.seen(ProcessId { pid, start: number }, number);
    }
    story.log(
        server,
        LogMessage::ClientFault { pid: server + 1 },
        "Client process encountered a fatal GPU error.",
    );
    story.log(server, LogMessage::ServerFault, "Server is handling a fatal GPU error.");
    for pid in pids.clone() {
        story.log(server, LogMessage::ContextInactive { pid, context: 1 }, "Status of client is INACTIVE");
    }
    story.log(server, LogMessage::FaultDevice { ordinal: 0 }, "");
    story.log(server, LogMessage::ContextDestroyed { device: 0 }, "");
    for pid in pids {
        story.tell(EventKind::ProcessExited { daemon: story.daemon.clone(), pid });
    }
    story.log(server, LogMessage::ContextCreated { device: 0, name: None }, "");
    story.log(server, LogMessage::ServerLeaving, "");
    story.log(DAEMON, LogMessage::ServerExited { pid: server, status: 0 }, "");
}

/// The resident set, in KiB.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
