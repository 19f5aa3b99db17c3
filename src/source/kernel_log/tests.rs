//! The whole source, on real files, FIFOs, processes and the real device.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tokio::sync::mpsc::Receiver;
use tokio::time::timeout;

use super::*;
use crate::event::{Event, EventKind, Freshness};
use crate::time::Clock;

const LONG: Duration = Duration::from_secs(30);

struct Running {
    queue: Receiver<Vec<Event>>,
    stop: tokio::sync::watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
    telemetry: Telemetry,
    waiting: std::collections::VecDeque<Event>,
}

fn start(path: &Path, state: Option<&Path>) -> Running {
    start_with(path, state, JournalAccess { journalctl: "/nonexistent".into(), directories: Vec::new() })
}

fn start_with(path: &Path, state: Option<&Path>, journal: JournalAccess) -> Running {
    let (outbox, queue) = Outbox::new(Clock::new());
    let telemetry = Telemetry::new();
    let config = config::KernelLog { enabled: true, path: path.to_owned() };
    let mut source = KernelLogSource::new(&config, state.map(Path::to_owned), outbox, telemetry.clone());
    source.journal = journal;
    let (stop, shutdown) = Shutdown::new();
    let task = tokio::spawn(source.run(shutdown));
    Running { queue, stop, task, telemetry, waiting: std::collections::VecDeque::new() }
}

impl Running {
    async fn next(&mut self) -> Event {
        while self.waiting.is_empty() {
            let batch =
                timeout(LONG, self.queue.recv()).await.expect("an event comes").expect("the source lives");
            self.waiting.extend(batch);
        }
        self.waiting.pop_front().unwrap()
    }

    /// The next Xid's code, count and freshness.
    async fn xid(&mut self) -> (u32, u64, Freshness) {
        loop {
            let event = self.next().await;
            if let EventKind::Xid(xid) = event.kind {
                return (xid.code, xid.count, event.freshness);
            }
        }
    }

    async fn health(&mut self) -> Result<(), Arc<str>> {
        loop {
            if let EventKind::Source(health) = self.next().await.kind {
                assert_eq!(health.source, SourceName::KernelLog);
                return health.state;
            }
        }
    }

    async fn stop(self) {
        self.stop.send(true).unwrap();
        timeout(LONG, self.task).await.expect("it stops").unwrap();
    }

    fn counter(&self, name: &str) -> u64 {
        let families = self.telemetry.registry().gather();
        let family = families.iter().find(|family| family.name() == name);
        let sum: f64 = family
            .map(|family| family.get_metric().iter().map(|metric| metric.get_counter().get_value()).sum())
            .unwrap_or_default();
        format!("{sum:.0}").parse().unwrap()
    }
}

fn xid(code: u32) -> String {
    format!("4,1,1,c;NVRM: Xid (PCI:0000:3b:00): {code}, pid=9, name=a, Ch 00000008\n")
}

fn append(path: &Path, text: &str) {
    OpenOptions::new().append(true).create(true).open(path).unwrap().write_all(text.as_bytes()).unwrap();
}

#[tokio::test]
async fn a_file_is_followed_over_rotation_and_restart() {
    let folder = tempfile::tempdir().unwrap();
    let (path, state) = (folder.path().join("kern.log"), folder.path().join("state"));
    append(&path, &xid(13));
    let mut source = start(&path, Some(&state));
    assert_eq!(source.xid().await, (13, 1, Freshness::History));
    append(&path, &xid(31)[..40]);
    tokio::time::sleep(Duration::from_millis(50)).await;
    append(&path, &xid(31)[40..]);
    assert_eq!(source.xid().await, (31, 1, Freshness::Live));
    std::fs::rename(&path, folder.path().join("kern.log.1")).unwrap();
    append(&path, &xid(43));
    assert_eq!(source.xid().await, (43, 1, Freshness::Live));
    File::create(&path).unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    append(&path, &xid(45));
    assert_eq!(source.xid().await, (45, 1, Freshness::Live));
    source.stop().await;

    append(&path, &xid(79));
    let mut source = start(&path, Some(&state));
    assert_eq!(source.xid().await, (79, 1, Freshness::CaughtUp), "45 is not repeated");
    append(&path, &xid(119));
    assert_eq!(source.xid().await, (119, 1, Freshness::Live));
    // Killed: nothing but the cursor remains.
    tokio::time::sleep(Duration::from_millis(300)).await;
    source.task.abort();
    append(&path, &xid(120));
    let mut source = start(&path, Some(&state));
    assert_eq!(source.xid().await, (120, 1, Freshness::CaughtUp));
    source.stop().await;
}

#[tokio::test]
async fn a_fifo_outlives_its_writers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kmsg");
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let mut source = start(&path, None);
    source.health().await.unwrap();
    for code in [31, 43, 79] {
        let mut writer = OpenOptions::new().write(true).open(&path).unwrap();
        writer.write_all(xid(code).as_bytes()).unwrap();
        drop(writer);
        assert_eq!(source.xid().await, (code, 1, Freshness::Live));
    }
    source.stop().await;
}

#[tokio::test]
async fn a_storm_is_counted_and_the_model_may_be_slow() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kmsg");
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let mut source = start(&path, None);
    source.health().await.unwrap();
    let writer_path = path.clone();
    let writer = std::thread::spawn(move || {
        let mut writer = OpenOptions::new().write(true).open(writer_path).unwrap();
        let lines: String = [xid(31), xid(43), xid(45)].concat().repeat(100);
        for _ in 0..200 {
            writer.write_all(lines.as_bytes()).unwrap();
        }
    });
    // Nobody takes events, and still everything is read.
    while !writer.is_finished() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    writer.join().unwrap();
    let mut counted = 0;
    while counted < 60_000 {
        counted += source.xid().await.1;
    }
    assert_eq!(counted, 60_000);
    source.stop().await;
}

#[tokio::test]
async fn injected_lines_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kmsg");
    append(&path, "");
    let mut source = start(&path, None);
    source.health().await.unwrap();
    append(&path, &xid(79).replace("4,1,", "12,1,"));
    append(&path, "4,2,2,c;NVRM: Xid : 32\n");
    append(&path, &xid(31));
    assert_eq!(source.xid().await.0, 31);
    assert_eq!(source.counter("mps_kmsg_records_injected_total"), 1);
    assert_eq!(source.counter("mps_exporter_source_errors_total"), 1);
    source.stop().await;
}

#[tokio::test]
async fn the_real_device_refuses_what_this_test_writes() {
    let device = Path::new("/dev/kmsg");
    if Device::open(device, None).is_err() || OpenOptions::new().write(true).open(device).is_err() {
        eprintln!("skipped: this user may not open /dev/kmsg");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut source = start(device, Some(folder.path()));
    source.health().await.unwrap();
    let mut writer = OpenOptions::new().write(true).open(device).unwrap();
    // The kernel gives a writer's record facility 1, whatever priority it asks for.
    let record = b"<4>NVRM: Xid (PCI:0000:3b:00): 79, test of mps-exporter, GPU has fallen off the bus.";
    let began = Instant::now();
    while source.counter("mps_kmsg_records_injected_total") == 0 {
        assert!(began.elapsed() < LONG, "the record comes");
        // What is written while the existing records are still being read is history, and not counted.
        writer.write_all(record).unwrap();
        tokio::time::sleep(Duration::from_millis(600)).await;
    }
    assert!(source.waiting.is_empty() && source.queue.try_recv().is_err(), "no event came of it");
    source.stop().await;
    let kept = Cursor::load(Some(folder.path().to_owned()), Telemetry::new());
    assert!(matches!(kept.position(), Some(Position::Device { .. })), "{:?}", kept.position());

    let mut source = start(device, Some(folder.path()));
    source.health().await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(source.counter("mps_kmsg_records_injected_total"), 0, "it is not counted again");
    assert_eq!(source.counter("mps_kmsg_records_lost_total"), 0);
    source.stop().await;
}

#[tokio::test]
async fn a_missing_log_is_told_and_found_when_it_comes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kmsg");
    let mut source = start(&path, None);
    let reason = source.health().await.unwrap_err();
    assert!(
        reason.contains("No such file") && reason.ends_with("mount the host's /dev/kmsg there"),
        "{reason}"
    );
    append(&path, &xid(31));
    source.health().await.unwrap();
    source.stop().await;

    let mut source = start(folder.path(), None);
    assert!(source.health().await.unwrap_err().ends_with("is a directory, not a kernel log"));
    source.stop().await;
    let mut source = start(Path::new("/dev/null"), None);
    assert_eq!(&*source.health().await.unwrap_err(), "cannot read /dev/null: it is no kernel log");
    source.stop().await;
}

/// A `journalctl` that notes its arguments, prints a file and waits.
fn fake_journalctl(folder: &Path) -> JournalAccess {
    let program = folder.join("journalctl");
    let script = format!(
        "#!/bin/sh\necho \"$@\" >> {0}/arguments\ncat {0}/entries\nexec sleep 60\n",
        folder.display()
    );
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    JournalAccess { journalctl: program, directories: vec![folder.to_owned()] }
}

fn entry(cursor: u32, code: u32, at: jiff::Timestamp) -> String {
    format!(
        "{{\"__CURSOR\":\"s={cursor}\",\"__REALTIME_TIMESTAMP\":\"{}\",\"_TRANSPORT\":\"kernel\",\"SYSLOG_FACILITY\":\"0\",\
         \"MESSAGE\":\"NVRM: Xid (PCI:0000:3b:00): {code}, pid=9, name=a, Ch 00000008\"}}\n",
        at.as_microsecond()
    )
}

#[tokio::test]
async fn the_journal_is_followed_with_its_cursor() {
    let folder = tempfile::tempdir().unwrap();
    let access = fake_journalctl(folder.path());
    let past = jiff::Timestamp::now() - jiff::SignedDuration::from_secs(60);
    let later = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(60);
    let entries = entry(1, 13, past) + &entry(2, 31, later);
    std::fs::write(folder.path().join("entries"), entries).unwrap();

    let follow = |kept: Option<Position>| {
        let (outbox, queue) = Outbox::new(Clock::new());
        let telemetry = Telemetry::new();
        let mut intake = Intake::new(outbox, telemetry.clone(), Cursor::load(None, telemetry));
        let now = intake.outbox.clock.now().wall;
        let mut journal = Journal::open(&access, kept.as_ref(), now).unwrap();
        async move {
            let mut all = Vec::new();
            let mut queue = queue;
            while all.len() < 2 {
                journal.ready().await.unwrap();
                journal.take(&mut intake).unwrap();
                if intake.has_events() {
                    let outbox = intake.outbox.clone();
                    intake.send(outbox.room().await.unwrap());
                    all.extend(queue.recv().await.unwrap());
                }
            }
            (all, intake.cursor.position().cloned())
        }
    };
    let (events, position) = timeout(LONG, follow(None)).await.unwrap();
    let freshness = |events: &[Event]| events.iter().map(|event| event.freshness).collect::<Vec<_>>();
    assert_eq!(freshness(&events), [Freshness::History, Freshness::Live]);
    assert_eq!(events[0].at.wall.as_second(), past.as_second());
    assert_eq!(position, Some(Position::Journal { cursor: "s=2".into() }));
    let (events, _) = timeout(LONG, follow(position)).await.unwrap();
    assert_eq!(freshness(&events), [Freshness::CaughtUp, Freshness::Live]);
    let arguments = std::fs::read_to_string(folder.path().join("arguments")).unwrap();
    let last = arguments.lines().last().unwrap();
    assert!(last.contains("--after-cursor=s=2") && last.ends_with("_TRANSPORT=kernel"), "{arguments}");
}

#[tokio::test]
async fn an_unusable_journal_says_why() {
    let access = JournalAccess {
        journalctl: "/nonexistent/journalctl".into(),
        directories: vec!["/nonexistent".into()],
    };
    assert_eq!(access.obstacle().unwrap(), "there are no journal files in /nonexistent");
    let access = JournalAccess { directories: vec!["/".into()], ..access };
    assert_eq!(access.obstacle().unwrap(), "there is no /nonexistent/journalctl");
    let access = JournalAccess { journalctl: "sh".into(), ..access };
    assert_eq!(access.obstacle(), None);
}
