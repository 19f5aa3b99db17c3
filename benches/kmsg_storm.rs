//! A storm in the kernel log: how fast 800,000 Xid lines are taken in, and in how much memory.
//!
//! `cargo bench --bench kmsg_storm`. The lines come as kmsg records through a FIFO and go the whole way through
//! `KernelLogSource`, on one runtime thread, to a model that only counts. `parse` is the parser alone.
#![allow(missing_docs, clippy::unwrap_used)]

use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use mps_exporter::config::KernelLog;
use mps_exporter::event::EventKind;
use mps_exporter::source::kernel_log::KernelLogSource;
use mps_exporter::source::kernel_log::recorded::Reader;
use mps_exporter::source::{Outbox, Shutdown};
use mps_exporter::telemetry::Telemetry;
use mps_exporter::time::Clock;

const LINES: usize = 800_000;
const RUNS: usize = 5;

fn main() {
    let few = storm(384);
    let many = storm(LINES);
    println!("{LINES} lines, {} MB; median of {RUNS}", few.len() / 1_000_000);
    let alone = median(|| parse(&few));
    println!("{:<34} {:>8.3} s  {:>5.2} M lines/s", "parse", alone, LINES as f64 / alone / 1e6);
    for (name, text) in [("source, 384 processes", &few), ("source, every line another process", &many)] {
        let before = peak_memory();
        let took = median(|| through_source(text));
        let grown = peak_memory() - before;
        println!("{name:<34} {took:>8.3} s  {:>5.2} M lines/s  peak +{grown} KiB", LINES as f64 / took / 1e6);
    }
}

/// Faults on eight GPUs: 13, 31, 43 and 45 of this many processes.
fn storm(processes: usize) -> String {
    let mut text = String::with_capacity(LINES * 110);
    for line in 0..LINES {
        let (gpu, pid, channel) = (line % 8, 10_000 + line % processes, line % 64);
        let code = [13, 31, 43, 45][line / 8 % 4];
        let _infallible = writeln!(
            text,
            "4,{line},{},c;NVRM: Xid (PCI:0000:{gpu:02x}:00): {code}, pid={pid}, name=pt_main_thread, Ch {channel:08x}, intr 00000000",
            1_000_000 + line
        );
    }
    text
}

fn median(mut run: impl FnMut() -> Duration) -> f64 {
    let mut took: Vec<Duration> = (0..RUNS).map(|_| run()).collect();
    took.sort();
    took[RUNS / 2].as_secs_f64()
}

fn parse(text: &str) -> Duration {
    let began = Instant::now();
    let mut reader = Reader::new();
    let found =
        text.as_bytes().split(|byte| *byte == b'\n').filter(|line| reader.line(line).is_some()).count();
    assert_eq!(found, LINES);
    began.elapsed()
}

fn through_source(text: &str) -> Duration {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kmsg");
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| write(&path, text));
        runtime.block_on(take(&path, folder.path()))
    })
}

fn write(path: &Path, text: &str) {
    let mut fifo = OpenOptions::new().write(true).open(path).unwrap();
    fifo.write_all(text.as_bytes()).unwrap();
}

async fn take(path: &Path, state: &Path) -> Duration {
    let (outbox, mut queue) = Outbox::new(Clock::new());
    let config = KernelLog { enabled: true, path: path.to_owned() };
    let source = KernelLogSource::new(&config, Some(state.to_owned()), outbox, Telemetry::new());
    let (_switch, shutdown) = Shutdown::new();
    let began = Instant::now();
    let running = tokio::spawn(source.run(shutdown));
    let mut counted = 0;
    while counted < LINES as u64 {
        for event in queue.recv().await.unwrap() {
            if let EventKind::Xid(xid) = event.kind {
                counted += xid.count;
            }
        }
    }
    let took = began.elapsed();
    running.abort();
    assert_eq!(counted, LINES as u64);
    took
}

/// The largest resident set so far, in KiB.
fn peak_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
