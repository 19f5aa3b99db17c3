//! The simulated node, read by the production sources.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use mps_exporter::demo::{Options, Simulation};
use mps_exporter::event::{EventKind, LockState, LogFile, Look, ServerStatus};
use mps_exporter::source::control::answers::Depth;
use mps_exporter::source::control::discovery::Discovery;
use mps_exporter::source::control::liveness::lock_state;
use mps_exporter::source::control::wire;
use mps_exporter::source::kernel_log::recorded::Reader;
use mps_exporter::source::mps_log::reader::LineReader;
use mps_exporter::source::process::proc::ProcRoot;
use mps_exporter::source::{Outbox, Shutdown};
use mps_exporter::time::Clock;

const PATIENCE: Duration = Duration::from_secs(20);

/// A node whose first incident comes after `first`, told a few times faster than to people.
fn node(first: Duration) -> Simulation {
    let program = Some(PathBuf::from(env!("CARGO_BIN_EXE_mps-exporter")));
    Simulation::start(&Options { first, period: Duration::from_secs(3600), scale: 0.2, program }).unwrap()
}

async fn look(node: &Simulation) -> Look {
    wire::look(&node.config().daemons[0].pipe_directory, Depth::Full, PATIENCE).await.unwrap()
}

async fn wait_for<T>(what: &str, node: &Simulation, wanted: impl Fn(&Look) -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        let look = look(node).await;
        if let Some(found) = wanted(&look) {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "waited in vain for {what}; last: {look:#?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn clients(look: &Look) -> Vec<u32> {
    look.servers[0].clients.clone().unwrap()
}

fn name_of(pid: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
}

fn log(node: &Simulation, name: &str) -> String {
    std::fs::read_to_string(node.config().daemons[0].log_directory.join(name)).unwrap()
}

#[tokio::test]
async fn a_node_is_what_it_says() {
    let node = node(Duration::from_secs(3600));
    let seen = look(&node).await;
    assert_eq!(seen.servers[0].status, Some(ServerStatus::Active));
    let mut names: Vec<String> = clients(&seen).into_iter().map(name_of).collect();
    names.sort();
    assert_eq!(names, ["etl", "etl", "infer", "infer", "train", "train"]);
    let contexts = seen.servers[0].contexts.as_ref().unwrap();
    assert_eq!(contexts.len(), 7);
    let couples = clients(&seen)
        .into_iter()
        .filter(|pid| contexts.iter().filter(|context| context.pid == *pid).count() == 2);
    assert_eq!(couples.count(), 1);
    let state = lock_state(&node.config().daemons[0].pipe_directory, &ProcRoot::new("/proc")).unwrap();
    assert!(matches!(state, LockState::Held(_)));

    let (outbox, mut events) = Outbox::new(Clock::new());
    let (discovery, _, _) = Discovery::new(&node.config(), outbox, Vec::new());
    let (_stop, shutdown) = Shutdown::new();
    tokio::spawn(discovery.run(shutdown));
    let found = events.recv().await.unwrap();
    assert!(
        matches!(&found[..], [event] if matches!(&event.kind, EventKind::DaemonFound(site) if &*site.name == "default"))
    );
}

#[tokio::test]
async fn an_incident_takes_everybody_and_they_come_back() {
    let node = node(Duration::from_millis(300));
    let before = clients(&look(&node).await);
    let fault = |look: &Look| (look.servers[0].status == Some(ServerStatus::Fault)).then_some(());
    wait_for("the fault", &node, fault).await;
    let stuck = wait_for("the one that hangs on", &node, |look| {
        let left = clients(look);
        (left.len() == 1).then(|| left[0])
    })
    .await;
    assert_eq!(name_of(stuck), "train");
    let after = wait_for("everybody's return", &node, |look| {
        let all = clients(look);
        (all.len() == 6).then_some(all)
    })
    .await;
    assert!(after.iter().all(|pid| !before.contains(pid)), "{before:?} {after:?}");
    assert!(before.iter().all(|pid| name_of(*pid).is_empty()), "the old processes are gone, and collected");

    let server_log = log(&node, "server.log");
    for line in [
        "encountered a fatal GPU error.",
        "Server is handling a fatal GPU error.",
        "} is INACTIVE",
        "The following devices will be reset:",
        "The following clients have a sticky error set:",
        "Destroy server context on device 1",
        "Creating server context on device 1",
    ] {
        assert!(server_log.contains(line), "{line} is not in {server_log}");
    }
    assert!(log(&node, "control.log").contains("Server already exists"));
    assert_logs_are_understood(&node);
    let kernel_log = std::fs::read_to_string(node.config().kernel_log.path).unwrap();
    assert!(
        kernel_log.lines().any(|line| line.contains("NVRM: Xid (PCI:0000:3b:00): 31, pid=")),
        "{kernel_log}"
    );
}

/// Every line that the node writes is in the grammar of the sources that read it.
fn assert_logs_are_understood(node: &Simulation) {
    for (name, file) in [("control.log", LogFile::Control), ("server.log", LogFile::Server)] {
        let mut reader = LineReader::new(file);
        let text = log(node, name);
        reader.read(text.as_bytes(), |_, _| {});
        let counts = reader.take_counts();
        assert_eq!(counts.unrecognized, 0, "{name}: {text}");
        assert_eq!(counts.recognized, text.lines().count() as u64);
    }
    let text = std::fs::read_to_string(node.config().kernel_log.path).unwrap();
    let mut reader = Reader::new();
    for line in text.lines() {
        let found = reader.line(line.as_bytes()).unwrap_or_else(|| panic!("not understood: {line}"));
        assert!(found.event().is_some(), "{line}");
    }
}

/// Holds a node until it is killed.
#[test]
#[ignore = "run by a_node_ends_with_its_parent, to be killed"]
fn holder_of_a_node() {
    let node = node(Duration::from_secs(3600));
    println!("holds {}", node.directory().display());
    std::thread::sleep(PATIENCE);
}

#[test]
fn a_node_ends_with_its_parent_even_if_that_is_killed() {
    let mut holder = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "holder_of_a_node", "--ignored", "--nocapture"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(holder.stdout.take().unwrap()).lines();
    let directory =
        lines.find_map(|line| Some(PathBuf::from(line.unwrap().split_once("holds ")?.1))).unwrap();
    assert!(directory.join("pipe").exists());
    holder.kill().unwrap();
    holder.wait().unwrap();
    let begun = Instant::now();
    while directory.exists() {
        assert!(begun.elapsed() < PATIENCE, "{} stays", directory.display());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[tokio::test]
async fn nothing_is_left_behind() {
    let node = node(Duration::from_secs(3600));
    let pids = clients(&look(&node).await);
    let directory = node.directory().to_owned();
    drop(node);
    assert!(!directory.exists());
    assert!(pids.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists()));
    let next = self::node(Duration::from_secs(3600));
    assert_ne!(next.directory(), directory, "a place that its last user still clears away");
}
