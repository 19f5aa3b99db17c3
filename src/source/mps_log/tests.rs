//! The whole source over real files: what the model is told, whatever happens meanwhile.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::*;
use crate::event::{DaemonSite, Event, EventKind, Freshness, LogMessage as L, LogPlace};
use crate::source::process::proc::ProcRoot;
use crate::source::{Outbox, Shutdown};
use crate::telemetry::Telemetry;
use crate::time::Clock;

const SOON: Duration = Duration::from_secs(10);

/// A daemon's log directory, a state directory, and the source that reads them.
struct Bed {
    directory: TempDir,
    watcher: LogWatcher,
    settings: LogSettings,
    telemetry: Telemetry,
    site: watch::Sender<DaemonSite>,
}

struct Running {
    queue: mpsc::Receiver<Vec<Event>>,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
    health: Vec<(String, bool)>,
    waiting: Vec<(Freshness, L)>,
}

impl Bed {
    fn new() -> Bed {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("state")).unwrap();
        let log = directory.path().join("log");
        fs::create_dir(&log).unwrap();
        Bed::with(directory, log, LogPlace::Files)
    }

    fn with(directory: TempDir, log: PathBuf, place: LogPlace) -> Bed {
        let site = DaemonSite {
            name: "nvidia.com/gpu".into(),
            pipe_directory: directory.path().join("pipe"),
            log_directory: log,
            root: PathBuf::new(),
            process: None,
            started_at: None,
            log: place,
            visible_devices: None,
            is_configured: true,
        };
        let settings = LogSettings::new(
            Some(directory.path().join("state")),
            ProcRoot::new(directory.path().join("proc")),
        );
        Bed {
            directory,
            watcher: LogWatcher::new(),
            settings,
            telemetry: Telemetry::new(),
            site: watch::channel(site).0,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join("log").join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let mut file = File::options().create(true).append(true).open(self.path(name)).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }

    /// A source that runs: it has told how it fares, after reading what there was.
    async fn start(&self) -> Running {
        let mut running = self.spawn();
        while running.health.is_empty() {
            let batch = timeout(SOON, running.queue.recv()).await.unwrap().unwrap();
            running.take(batch);
        }
        running
    }

    fn spawn(&self) -> Running {
        let (outbox, queue) = Outbox::new(Clock::new());
        let (stop, shutdown) = Shutdown::new();
        let source = MpsLogSource::new(
            self.site.subscribe(),
            self.settings.clone(),
            outbox,
            self.telemetry.clone(),
            self.watcher.clone(),
        );
        let task = tokio::spawn(source.run(shutdown));
        Running { queue, stop, task, health: Vec::new(), waiting: Vec::new() }
    }

    fn counted(&self, class: &str) -> f64 {
        let families = self.telemetry.registry().gather();
        let lines = families.iter().find(|family| family.name() == "mps_log_lines_total").unwrap();
        let of_class = |metric: &&prometheus::proto::Metric| {
            metric.get_label().iter().any(|label| label.value() == class)
        };
        lines.get_metric().iter().filter(of_class).map(|metric| metric.get_counter().get_value()).sum()
    }
}

impl Running {
    /// The next `count` log messages.
    async fn next(&mut self, count: usize) -> Vec<(Freshness, L)> {
        let enough = async {
            while self.waiting.len() < count {
                let batch = self.queue.recv().await.expect("the source runs");
                self.take(batch);
            }
        };
        let in_time = timeout(SOON, enough).await;
        assert!(in_time.is_ok(), "only {:?} of {count} came", self.waiting);
        self.waiting.drain(..count).collect()
    }

    fn take(&mut self, batch: Vec<Event>) {
        for event in batch {
            match event.kind {
                EventKind::Log(_, entry) => self.waiting.push((event.freshness, entry.message)),
                EventKind::Source(health) => {
                    let reason = health.state.as_ref().err().map(ToString::to_string);
                    self.health.push((reason.unwrap_or_default(), health.state.is_ok()));
                }
                other => panic!("{other:?}"),
            }
        }
    }

    /// Stops in good order; gives what was not asked for.
    async fn stop(mut self) -> Vec<(Freshness, L)> {
        self.stop.send(true).unwrap();
        timeout(SOON, self.task).await.unwrap().unwrap();
        while let Ok(batch) = self.queue.try_recv() {
            for event in batch {
                if let EventKind::Log(_, entry) = event.kind {
                    self.waiting.push((event.freshness, entry.message));
                }
            }
        }
        self.waiting
    }
}

fn stamp() -> String {
    jiff::tz::TimeZone::system()
        .to_datetime(jiff::Timestamp::now())
        .strftime("%Y-%m-%d %H:%M:%S%.3f")
        .to_string()
}

fn server(text: &str) -> String {
    format!("[{} Server  4428] {text}\n", stamp())
}

fn control(text: &str) -> String {
    format!("[{} Control  4411] {text}\n", stamp())
}

fn ready(pid: u32) -> String {
    control(&format!("NEW SERVER {pid}: Ready"))
}

fn readies(freshness: Freshness, pids: std::ops::Range<u32>) -> Vec<(Freshness, L)> {
    pids.map(|pid| (freshness, L::ServerReady { pid })).collect()
}

#[tokio::test]
async fn what_exists_is_history_and_what_comes_is_news() {
    let bed = Bed::new();
    bed.write("control.log", &ready(1));
    let mut running = bed.start().await;
    assert_eq!(running.next(1).await, readies(Freshness::History, 1..2));
    bed.write("control.log", &ready(2));
    bed.write("server.log", "no such line\n");
    bed.write("server.log", &server("Server has started"));
    let news = running.next(2).await;
    assert!(news.contains(&(Freshness::Live, L::ServerReady { pid: 2 })), "{news:?}");
    assert!(news.contains(&(Freshness::Live, L::ServerStarted)), "{news:?}");
    assert_eq!(running.stop().await, []);
    assert_eq!(
        (bed.counted("recognized"), bed.counted("unrecognized")),
        (2.0, 1.0),
        "history is not counted"
    );
}

#[tokio::test]
async fn a_servers_last_words_come_before_its_exit() {
    let bed = Bed::new();
    let mut running = bed.start().await;
    for _ in 0..50 {
        // The daemon writes both, in this order; the stamps may be equal.
        bed.write("server.log", &server("Exiting"));
        bed.write("control.log", &control("Server 4428 exited with status 0"));
        let news: Vec<L> = running.next(2).await.into_iter().map(|(_, message)| message).collect();
        assert_eq!(news, [L::ServerLeaving, L::ServerExited { pid: 4428, status: 0 }]);
    }
}

#[tokio::test]
async fn the_logs_of_a_backlog_are_read_in_the_order_of_their_times() {
    let bed = Bed::new();
    let (mut server_log, mut control_log) = (String::new(), String::new());
    for pid in 0..3000_u32 {
        let (minute, second, milli) = (pid / 60 % 60, pid % 60, pid % 1000);
        let at = format!("2026-04-23 {:02}:{minute:02}:{second:02}.{milli:03}", pid / 3600);
        writeln!(control_log, "[{at} Control  4411] NEW SERVER {pid}: Ready").unwrap();
        writeln!(server_log, "[{at} Server {pid:5}] Exiting").unwrap();
        writeln!(server_log, "[{at} Server {pid:5}] Receive command failed, assuming client exit").unwrap();
        writeln!(control_log, "[{at} Control  4411] Server {pid} exited with status 0").unwrap();
    }
    bed.write("server.log", &server_log);
    bed.write("control.log", &control_log);
    let mut running = bed.start().await;
    let read = running.next(9000).await;
    for (pid, three) in (0..).zip(read.chunks(3)) {
        let said: Vec<&L> = three.iter().map(|(_, message)| message).collect();
        let leaving = said.iter().position(|each| **each == L::ServerLeaving).unwrap();
        let exit = said.iter().position(|each| **each == L::ServerExited { pid, status: 0 }).unwrap();
        assert!(leaving < exit, "{pid}: {said:?}");
    }
}

#[tokio::test]
async fn an_orderly_restart_goes_on_at_the_next_line() {
    let bed = Bed::new();
    let mut running = bed.start().await;
    bed.write("control.log", &ready(1));
    running.next(1).await;
    assert_eq!(running.stop().await, []);
    for (first, rotate) in [(2, false), (3, true), (4, false)] {
        if rotate {
            fs::rename(bed.path("control.log"), bed.path("control.log.1")).unwrap();
            let mut old = File::options().append(true).open(bed.path("control.log.1")).unwrap();
            old.write_all(ready(first).as_bytes()).unwrap();
        } else {
            bed.write("control.log", &ready(first));
        }
        let mut running = bed.start().await;
        let mut read = Vec::new();
        while read.last() != Some(&(Freshness::CaughtUp, L::ServerReady { pid: first })) {
            read.extend(running.next(1).await);
        }
        read.extend(running.stop().await);
        let news: Vec<_> =
            read.into_iter().filter(|(freshness, _)| *freshness != Freshness::History).collect();
        assert_eq!(news, readies(Freshness::CaughtUp, first..first + 1));
    }
}

/// A task that is dropped is killed as far as its own state goes: nothing is written on the way out.
#[tokio::test]
async fn a_killed_source_loses_nothing_and_repeats_nothing_that_was_saved() {
    let bed = Bed::new();
    let mut written = 0;
    for waits in [true, false, true, false, false, true] {
        let mut running = bed.start().await;
        let before = written;
        let mut news = Vec::new();
        for _ in 0..20 {
            written += 1;
            bed.write("control.log", &ready(written));
        }
        while news.last() != Some(&written) {
            let (freshness, message) = running.next(1).await.remove(0);
            let L::ServerReady { pid } = message else { panic!("{message:?}") };
            if freshness != Freshness::History {
                news.push(pid);
            }
        }
        let first = news[0];
        assert_eq!(news, (first..=written).collect::<Vec<_>>(), "in order, each once");
        assert!(first <= before + 1, "nothing is lost: {first} after {before}");
        if waits {
            tokio::time::sleep(SAVE_LATER + SAVE_SOON).await;
        }
        running.task.abort();
        let _cancelled = running.task.await;
        if waits {
            let mut again = bed.start().await;
            bed.write("control.log", &ready(written + 1));
            written += 1;
            let mut read = Vec::new();
            while read.last() != Some(&L::ServerReady { pid: written }) {
                let (freshness, message) = again.next(1).await.remove(0);
                read.extend((freshness != Freshness::History).then_some(message));
            }
            assert_eq!(read, [L::ServerReady { pid: written }], "what was saved is not repeated");
            again.stop().await;
        }
    }
}

#[tokio::test]
async fn lines_come_at_once() {
    let bed = Bed::new();
    let mut running = bed.start().await;
    bed.write("server.log", &server("Server has started"));
    running.next(1).await;
    let mut latencies = Vec::new();
    for _ in 0..200 {
        tokio::time::sleep(Duration::from_millis(2)).await;
        let written = Instant::now();
        bed.write("server.log", &server("Client {PID: 4267, Context ID: 0} connected"));
        running.next(1).await;
        latencies.push(written.elapsed());
    }
    latencies.sort();
    let (median, p99) = (latencies[100], latencies[198]);
    println!("line written to event received: median {median:?}, p99 {p99:?}");
    assert!(median < Duration::from_millis(100), "woken, not polled: {median:?}");
}

#[tokio::test]
async fn without_events_it_polls() {
    let mut bed = Bed::new();
    bed.watcher = LogWatcher::blind();
    let mut running = bed.start().await;
    bed.write("server.log", &server("Server has started"));
    assert_eq!(running.next(1).await, [(Freshness::Live, L::ServerStarted)]);
}

#[tokio::test]
async fn a_directory_may_come_go_and_be_replaced() {
    let bed = Bed::new();
    fs::remove_dir(bed.path("")).unwrap();
    let mut running = bed.start().await;
    let (reason, is_well) = &running.health[0];
    assert!(!is_well && reason.contains("/log does not exist"), "{reason}");
    for pid in 1..4 {
        fs::create_dir(bed.path("")).unwrap();
        bed.write("control.log", &ready(pid));
        assert_eq!(running.next(1).await, readies(Freshness::Live, pid..pid + 1));
        fs::rename(bed.path(""), bed.directory.path().join(format!("old-{pid}"))).unwrap();
    }
    assert!(running.health.iter().any(|(_, is_well)| *is_well));
}

#[tokio::test]
async fn folders_of_named_servers_are_followed() {
    let bed = Bed::new();
    fs::create_dir(bed.path("one")).unwrap();
    bed.write("one/server.log", &server("Server has started"));
    let mut running = bed.start().await;
    assert_eq!(running.next(1).await, [(Freshness::History, L::ServerStarted)]);
    fs::create_dir(bed.path("two")).unwrap();
    bed.write("two/server.log", &server("Startup"));
    let (freshness, message) = running.next(1).await.remove(0);
    assert_eq!(message, L::ServerStartup);
    assert_ne!(freshness, Freshness::History, "a server that came later is news");
    bed.write("two/server.log", &server("Exiting"));
    assert_eq!(running.next(1).await, [(Freshness::Live, L::ServerLeaving)]);
}

#[tokio::test]
async fn a_container_log_is_followed_through_its_rotation() {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("state")).unwrap();
    let log = directory.path().join(std::ffi::OsStr::from_bytes(b"pods \xff"));
    fs::create_dir(&log).unwrap();
    let path = log.join("0.log");
    let cri = |line: &str| format!("2026-04-23T06:04:59.367188348Z stdout F {line}");
    fs::write(&path, cri(&ready(1))).unwrap();
    let bed = Bed::with(directory, log.clone(), LogPlace::Merged(path.clone()));
    let mut running = bed.start().await;
    assert_eq!(running.next(1).await, readies(Freshness::History, 1..2));
    fs::rename(&path, log.join("0.log.20260423-060459")).unwrap();
    fs::write(&path, cri(&ready(2)) + &cri(&server("Exiting"))).unwrap();
    let expected = [(Freshness::Live, L::ServerReady { pid: 2 }), (Freshness::Live, L::ServerLeaving)];
    assert_eq!(running.next(2).await, expected);
}

#[tokio::test]
async fn another_process_of_the_daemon_changes_nothing_but_the_way() {
    let bed = Bed::new();
    let mut running = bed.start().await;
    bed.write("control.log", &ready(1));
    running.next(1).await;
    // The same files by another way, as after a restart in another container.
    let root = bed.directory.path().join("root");
    std::os::unix::fs::symlink("/", &root).unwrap();
    bed.site.send_modify(|site| {
        site.root = root;
        site.process = Some(crate::identity::ProcessId { pid: 4_000_000, start: 1 });
    });
    bed.write("control.log", &ready(2));
    assert_eq!(running.next(1).await, readies(Freshness::Live, 2..3));
    assert_eq!(running.stop().await, []);
}

/// A stand-in for `journalctl` that notes how it was called and plays what a file holds.
fn fake_journalctl(directory: &Path, entries: &str, then: &str) -> PathBuf {
    let program = directory.join("journalctl");
    fs::write(directory.join("entries"), entries).unwrap();
    let script = format!(
        "#!/bin/sh\necho \"$@\" >>{0}/calls\necho $$ >{0}/pid\ncat {0}/entries\n{then}\n",
        directory.display()
    );
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    program
}

fn journal_bed(entries: &str, then: &str) -> Bed {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("state")).unwrap();
    let program = fake_journalctl(directory.path(), entries, then);
    let log = directory.path().join("log");
    let mut bed = Bed::with(directory, log, LogPlace::Journal { unit: Some("nvidia-mps.service".into()) });
    bed.settings.journalctl = program;
    bed
}

fn entry(cursor: u32, micros: i64, message: &str) -> String {
    format!("{{\"__CURSOR\":\"s={cursor}\",\"__REALTIME_TIMESTAMP\":\"{micros}\",\"MESSAGE\":{message}}}\n")
}

#[tokio::test]
async fn the_journal_is_followed_and_resumed() {
    let later = jiff::Timestamp::now().as_microsecond() + 3_600_000_000;
    let bytes = control("NEW SERVER 3: Ready").trim_end().bytes().map(|b| b.to_string()).collect::<Vec<_>>();
    let quoted = |line: String| format!("\"{}\"", line.trim_end());
    let entries = [
        entry(1, 1_000_000, &quoted(ready(1))),
        entry(2, later, &quoted(ready(2))),
        entry(3, later, &format!("[{}]", bytes.join(","))),
        entry(4, later, "null"),
        "not json\n".to_owned(),
        format!("{}\n", "x".repeat(600_000)),
        entry(5, later, &quoted(server("Exiting"))),
    ]
    .concat();
    let bed = journal_bed(&entries, "exec sleep 1000");
    let mut running = bed.start().await;
    let mut expected = readies(Freshness::History, 1..2);
    expected.extend(readies(Freshness::Live, 2..4));
    expected.push((Freshness::Live, L::ServerLeaving));
    assert_eq!(running.next(4).await, expected);
    assert_eq!(running.stop().await, []);
    assert_eq!((bed.counted("recognized"), bed.counted("unrecognized")), (3.0, 3.0));
    let pid: u32 = fs::read_to_string(bed.directory.path().join("pid")).unwrap().trim().parse().unwrap();
    let gone = async {
        while fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z ")) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(SOON, gone).await.expect("journalctl ends with us");

    fs::write(bed.directory.path().join("entries"), entry(6, 1_000_000, &quoted(ready(6)))).unwrap();
    let mut running = bed.start().await;
    assert_eq!(running.next(1).await, readies(Freshness::CaughtUp, 6..7));
    let calls = fs::read_to_string(bed.directory.path().join("calls")).unwrap();
    let calls: Vec<&str> = calls.lines().collect();
    assert!(calls[0].contains("--lines=") && calls[0].contains("--unit=nvidia-mps.service"), "{calls:?}");
    assert!(calls[1].contains("--after-cursor=s=5") && !calls[1].contains("--lines="), "{calls:?}");
}

#[tokio::test]
async fn a_journalctl_that_fails_is_told_of_and_tried_again() {
    let bed =
        journal_bed("", "echo 'No journal files were opened due to insufficient permissions.' >&2; exit 1");
    let mut running = bed.start().await;
    let (reason, is_well) = &running.health[0];
    assert!(!is_well && reason.contains("insufficient permissions"), "{reason}");
    fake_journalctl(
        bed.directory.path(),
        &entry(1, 9_000_000_000_000_000, &format!("\"{}\"", ready(1).trim_end())),
        "exec sleep 1000",
    );
    assert_eq!(running.next(1).await, readies(Freshness::Live, 1..2));
    assert_eq!(running.stop().await, []);
}

#[tokio::test]
async fn a_log_that_is_nowhere_is_told_of_until_it_is_somewhere() {
    let bed = Bed::new();
    bed.site.send_modify(|site| site.log = LogPlace::Nowhere("its output is a terminal".into()));
    let mut running = bed.start().await;
    assert_eq!(running.health, [("its output is a terminal".to_owned(), false)]);
    bed.write("control.log", &ready(1));
    bed.site.send_modify(|site| site.log = LogPlace::Files);
    assert_eq!(running.next(1).await, readies(Freshness::History, 1..2));
}

#[tokio::test]
async fn a_damaged_cursor_is_read_as_none() {
    let bed = Bed::new();
    bed.write("control.log", &ready(1));
    let mut running = bed.start().await;
    running.next(1).await;
    running.stop().await;
    for file in fs::read_dir(bed.directory.path().join("state")).unwrap() {
        fs::write(file.unwrap().path(), "{").unwrap();
    }
    let mut running = bed.start().await;
    assert_eq!(running.next(1).await, readies(Freshness::History, 1..2));
}

/// Puts entries into a journal file by systemd's own hand; `false` where that is not installed.
fn into_journal(directory: &Path, pids: std::ops::Range<u32>) -> bool {
    let writer = Path::new("/lib/systemd/systemd-journal-remote");
    if !writer.exists() {
        return false;
    }
    let now = jiff::Timestamp::now().as_microsecond();
    let mut export = String::new();
    for pid in pids {
        let at = now - 1_000_000 + i64::from(pid);
        for (unit, transport, text) in [
            ("nvidia-mps.service", "stdout", ready(pid)),
            ("nvidia-mps.service", "journal", "Started NVIDIA MPS.".to_owned()),
            ("other.service", "stdout", ready(999)),
        ] {
            let text = text.trim_end();
            writeln!(
                export,
                "__REALTIME_TIMESTAMP={at}\n__MONOTONIC_TIMESTAMP={at}\n_BOOT_ID={:032}\n_SYSTEMD_UNIT={unit}\n\
                 _TRANSPORT={transport}\nMESSAGE={text}\n",
                7
            )
            .unwrap();
        }
    }
    fs::write(directory.join("export"), export).unwrap();
    let to = directory.join("own.journal");
    let written =
        std::process::Command::new(writer).arg("-o").arg(to).arg(directory.join("export")).output().unwrap();
    assert!(written.status.success(), "{written:?}");
    true
}

#[tokio::test]
async fn a_real_journal_is_read_and_resumed() {
    let bed = journal_bed("", "");
    let program = bed.directory.path().join("journalctl");
    let script =
        format!("#!/bin/sh\nexec journalctl --file={}/own.journal \"$@\"\n", bed.directory.path().display());
    fs::write(&program, script).unwrap();
    if !into_journal(bed.directory.path(), 1..30) {
        println!("skipped: systemd-journal-remote is not installed");
        return;
    }
    let mut running = bed.start().await;
    assert_eq!(running.next(29).await, readies(Freshness::History, 1..30));
    assert_eq!(running.stop().await, []);
    into_journal(bed.directory.path(), 30..32);
    let mut running = bed.start().await;
    assert_eq!(running.next(2).await, readies(Freshness::CaughtUp, 30..32));
    assert_eq!(running.stop().await, []);
    assert_eq!((bed.counted("recognized"), bed.counted("unrecognized")), (2.0, 0.0));
}
