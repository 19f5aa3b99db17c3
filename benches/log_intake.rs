//! How fast an MPS log is taken in: every line read, classified and, where it matters, made into an entry with its
//! time. `grep -c` with one literal runs on the same file in the same run, and `mtail` where it is installed.
//!
//! `cargo bench --bench log_intake [-- FILE]`; without FILE a server.log of 200 MB is written to the temporary
//! directory, the same one at every run.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufWriter, Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use jiff::tz::TimeZone;
use mps_exporter::event::LogFile;
use mps_exporter::source::mps_log::reader::LineReader;
use mps_exporter::source::mps_log::stamp::StampClock;

const SIZE: usize = 200_000_000;
const RUNS: usize = 7;
/// As the source reads it.
const CHUNK: usize = 64 * 1024;
const LITERAL: &str = "encountered a fatal";

/// Counts what the entries of ours count, as an mtail user would write it.
const MTAIL_PROGRAM: &str = r"
counter lines
counter connected
counter disconnected
counter fatal
/$/ {
  lines++
}
/Client .PID: \d+, Context ID: \d+. connected/ {
  connected++
}
/Client process disconnected/ {
  disconnected++
}
/Server encountered a fatal exception/ {
  fatal++
}
";

fn main() {
    let given = std::env::args().skip(1).find(|argument| !argument.starts_with("--")).map(PathBuf::from);
    let directory = tempfile::tempdir().expect("a temporary directory");
    let log = given.unwrap_or_else(|| {
        let log = directory.path().join("server.log");
        generate(&log);
        log
    });
    let bytes = std::fs::metadata(&log).expect("the log").len();
    let mut contents = Vec::new();
    File::open(&log)
        .and_then(|mut file| file.read_to_end(&mut contents))
        .expect("the log is read once, to cache it");
    let lines = memchr::memchr_iter(b'\n', &contents).count();
    drop(contents);
    println!("{} MB, {lines} lines, median of {RUNS} runs each, alternating", bytes / 1_000_000);

    let (mut grep, mut ours) = (Vec::new(), Vec::new());
    let mut summary = Intake::default();
    for _ in 0..RUNS {
        grep.push(time(|| run_grep(&log)));
        ours.push(time(|| summary = take_in(&log)));
    }
    let (grep, ours) = (median(grep), median(ours));
    report("grep -c", bytes, grep);
    report("mps-exporter", bytes, ours);
    println!(
        "    {} recognized, {} unrecognized, {} entries",
        summary.recognized, summary.unrecognized, summary.entries
    );
    println!("mps-exporter / grep -c: {:.2} (wanted: 0.5)", grep.as_secs_f64() / ours.as_secs_f64());
    assert_eq!(summary.recognized + summary.unrecognized, lines as u64, "every line is classified");
    if let Some(mtail) = run_mtail(directory.path(), &log) {
        report("mtail", bytes, mtail);
        println!("mps-exporter / mtail: {:.0} (wanted: 50)", mtail.as_secs_f64() / ours.as_secs_f64());
    } else {
        println!("mtail: not installed or failed, skipped");
    }
}

#[derive(Default)]
struct Intake {
    recognized: u64,
    unrecognized: u64,
    entries: u64,
}

fn take_in(log: &Path) -> Intake {
    let mut reader = LineReader::new(LogFile::Server);
    let mut clock = StampClock::new(TimeZone::UTC);
    let mut file = File::open(log).expect("the log");
    let mut buffer = vec![0; CHUNK];
    let mut held = 0;
    let mut entries = 0;
    loop {
        let read = file.read(&mut buffer[held..]).expect("the log is readable");
        let chunk = &buffer[..held + read];
        let done = reader.read(chunk, |_, said| {
            std::hint::black_box(clock.instant(said.stamp));
            std::hint::black_box(said.into_entry(LogFile::Server));
            entries += 1;
        });
        let end = chunk.len();
        if read == 0 {
            break;
        }
        buffer.copy_within(done..end, 0);
        held = end - done;
    }
    let counts = reader.take_counts();
    Intake { recognized: counts.recognized, unrecognized: counts.unrecognized, entries }
}

fn run_grep(log: &Path) {
    // Into a pipe: GNU grep stops at the first match when it writes to /dev/null.
    let output =
        Command::new("grep").args(["-c", LITERAL]).arg(log).stderr(Stdio::null()).output().expect("grep");
    std::hint::black_box(output.stdout);
}

fn run_mtail(directory: &Path, log: &Path) -> Option<Duration> {
    let program = directory.join("mps.mtail");
    std::fs::write(&program, MTAIL_PROGRAM).ok()?;
    let start = Instant::now();
    let status = Command::new("mtail")
        .args(["--one_shot", "--progs"])
        .arg(&program)
        .arg("--logs")
        .arg(log)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .ok()?;
    status.success().then(|| start.elapsed())
}

fn time(run: impl FnOnce()) -> Duration {
    let start = Instant::now();
    run();
    start.elapsed()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn report(name: &str, bytes: u64, took: Duration) {
    println!(
        "{name:>14}: {:7.1} ms, {:7.0} MB/s",
        took.as_secs_f64() * 1e3,
        bytes as f64 / 1e6 / took.as_secs_f64()
    );
}

/// The mix of a busy 580 server: 20 % connects, 15 % disconnects, 0.05 % fatal exceptions, the rest chatter.
fn generate(path: &Path) {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path).expect("the log can be made"));
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    let (mut written, mut millis) = (0, 0);
    let mut line = String::new();
    while written < SIZE {
        millis += 1 + next(40);
        let (seconds, pid) = (millis / 1000, 1000 + next(59_000));
        line.clear();
        let _infallible = write!(
            line,
            "[2026-04-{:02} {:02}:{:02}:{:02}.{:03} ",
            1 + seconds / 86_400 % 28,
            seconds / 3600 % 24,
            seconds / 60 % 60,
            seconds % 60,
            millis % 1000
        );
        let _infallible = match next(10_000) {
            0..2000 => {
                writeln!(line, "Server  4428] Received new client request for {{PID: {pid}, Context ID: 0}}")
            }
            2000..4000 => writeln!(line, "Server  4428] Client {{PID: {pid}, Context ID: 0}} connected"),
            4000..6000 => writeln!(
                line,
                "Server  4428] Creating worker thread for client {{PID: {pid}, Context ID: 0}}"
            ),
            6000..7500 => writeln!(line, "Server  4428] Receive command failed, assuming client exit"),
            7500..9000 => writeln!(line, "Server  4428] Client process disconnected"),
            9000..9995 => writeln!(line, "Control  4411] Accepting connection..."),
            _ => writeln!(line, "Server  4428] Server encountered a fatal exception. Shutting down"),
        };
        file.write_all(line.as_bytes()).expect("the log can be written");
        written += line.len();
    }
    file.flush().expect("the log can be written");
}
