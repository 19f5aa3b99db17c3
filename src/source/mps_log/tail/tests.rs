use std::io::Write;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::event::LogMessage;

/// Reads all that there is; gives the pids of `NEW SERVER N: Ready` with their freshness, and the counts.
fn drain(tail: &mut Tail, buffer: &mut [u8], now: Instant) -> (Vec<(Freshness, u32)>, Counts) {
    let mut read = Vec::new();
    let mut counts = Counts::default();
    for _ in 0..10_000 {
        let step = tail.step(buffer, now, |freshness, said| match said.message {
            LogMessage::ServerReady { pid } => read.push((freshness, pid)),
            other => panic!("{other:?}"),
        });
        counts.recognized += step.counts.recognized;
        counts.unrecognized += step.counts.unrecognized;
        if !step.has_more {
            return (read, counts);
        }
    }
    panic!("there is always more");
}

fn line(number: u32) -> String {
    let (minute, milli) = (number / 1000 % 60, number % 1000);
    format!("[2026-04-23 06:{minute:02}:59.{milli:03} Control  4411] NEW SERVER {number}: Ready\n")
}

fn open(path: &Path, cursor: Option<&StreamCursor>) -> Tail {
    let saved_at = cursor.map(|_| SystemTime::UNIX_EPOCH);
    Tail::open(path.to_owned(), LogFile::Control, cursor, saved_at, Instant::now())
}

/// A daemon and its rotation, as the file system sees them.
struct World {
    directory: TempDir,
    writer: File,
    written: u32,
    half: Option<String>,
    rotations: u32,
}

impl World {
    fn new() -> World {
        let directory = tempfile::tempdir().unwrap();
        let writer = appending(&directory.path().join("control.log"));
        World { directory, writer, written: 0, half: None, rotations: 0 }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("control.log")
    }

    fn write(&mut self) {
        let text = self.half.take().unwrap_or_else(|| {
            self.written += 1;
            line(self.written)
        });
        self.writer.write_all(text.as_bytes()).unwrap();
    }

    fn write_half(&mut self) {
        if self.half.is_none() {
            self.written += 1;
            let text = line(self.written);
            let (now, later) = text.split_at(40);
            self.writer.write_all(now.as_bytes()).unwrap();
            self.half = Some(later.to_owned());
        }
    }

    fn finish_half(&mut self) {
        if self.half.is_some() {
            self.write();
        }
    }

    fn rotated(&mut self) -> PathBuf {
        self.rotations += 1;
        self.directory.path().join(format!("control.log.{}", self.rotations))
    }

    fn rename(&mut self) {
        let to = self.rotated();
        let _if_there = fs::rename(self.path(), to);
    }

    fn create(&mut self) {
        appending(&self.path());
    }

    /// The daemon restarts.
    fn reopen(&mut self) {
        self.finish_half();
        self.writer = appending(&self.path());
    }

    fn copy_truncate(&mut self) {
        self.finish_half();
        let to = self.rotated();
        if fs::copy(self.path(), to).is_ok() {
            File::options().write(true).truncate(true).open(self.path()).unwrap();
        }
    }

    fn has_name(&self) -> bool {
        let own = FileId::of(&self.writer.metadata().unwrap());
        let entries = fs::read_dir(self.directory.path());
        entries
            .is_ok_and(|entries| entries.flatten().any(|entry| FileId::of(&entry.metadata().unwrap()) == own))
    }
}

fn appending(path: &Path) -> File {
    File::options().create(true).append(true).open(path).unwrap()
}

#[derive(Debug, Clone, Copy)]
enum Action {
    Write,
    WriteHalf,
    Rename,
    RenameAndCreate,
    Reopen,
    CopyTruncate,
    Delete,
    RecreateDirectory,
    Poll,
    /// The exporter stops and starts again; what is done meanwhile is done unseen.
    Stop,
    Start,
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        12 => Just(Action::Write),
        3 => Just(Action::WriteHalf),
        2 => Just(Action::Rename),
        2 => Just(Action::RenameAndCreate),
        3 => Just(Action::Reopen),
        2 => Just(Action::CopyTruncate),
        1 => Just(Action::Delete),
        1 => Just(Action::RecreateDirectory),
        6 => Just(Action::Poll),
        2 => Just(Action::Stop),
        3 => Just(Action::Start),
    ]
}

/// The model: whatever happens to the files, every line written after the first start is read once, in order.
fn check(before: u32, actions: &[Action]) {
    let mut world = World::new();
    let mut buffer = vec![0; 32 * 1024];
    let now = Instant::now();
    for _ in 0..before {
        world.write();
    }
    let mut running = Some(open(&world.path(), None));
    let mut cursor = None;
    let mut news = Vec::new();
    let mut counted = 0;
    let mut poll = |tail: &mut Tail, first: bool| {
        let (read, counts) = drain(tail, &mut buffer, now);
        if first {
            let history =
                read.iter().filter(|(freshness, _)| *freshness == Freshness::History).map(|(_, n)| *n);
            assert_eq!(history.collect::<Vec<_>>(), (1..=before).collect::<Vec<_>>(), "the present state");
        }
        news.extend(read.iter().filter(|(freshness, _)| *freshness != Freshness::History).map(|(_, n)| *n));
        counted += counts.recognized;
        assert_eq!(counts.unrecognized, 0);
        assert_eq!(tail.take_losses(), Vec::<&str>::new());
    };
    poll(running.as_mut().unwrap(), true);
    let start = |world: &World, cursor: &mut Option<StreamCursor>| {
        let kept = serde_json::to_vec(&cursor.take().unwrap()).unwrap();
        open(&world.path(), Some(&serde_json::from_slice(&kept).unwrap()))
    };
    for action in actions.iter().chain(&[Action::Start, Action::Poll]) {
        match action {
            Action::Write => world.write(),
            Action::WriteHalf => world.write_half(),
            Action::Rename => world.rename(),
            Action::RenameAndCreate => {
                world.rename();
                world.create();
            }
            Action::Reopen => world.reopen(),
            Action::CopyTruncate => world.copy_truncate(),
            Action::Delete | Action::RecreateDirectory => {
                // What has no name and is held by nobody is gone for good: that is no loss of ours.
                let Some(tail) = running.as_mut() else { continue };
                poll(tail, false);
                let writer = FileId::of(&world.writer.metadata().unwrap());
                if !tail.held.iter().any(|held| held.id == writer) {
                    continue;
                }
                if matches!(action, Action::Delete) {
                    let _if_there = fs::remove_file(world.path());
                } else {
                    fs::remove_dir_all(world.directory.path()).unwrap();
                    fs::create_dir(world.directory.path()).unwrap();
                }
            }
            Action::Poll => running.iter_mut().for_each(|tail| poll(tail, false)),
            Action::Stop => {
                if !world.has_name() {
                    world.reopen();
                }
                if let Some(mut tail) = running.take() {
                    poll(&mut tail, false);
                    cursor = Some(tail.cursor("control.log"));
                }
            }
            Action::Start => {
                if running.is_none() {
                    let mut tail = start(&world, &mut cursor);
                    poll(&mut tail, false);
                    running = Some(tail);
                }
            }
        }
    }
    world.finish_half();
    poll(running.as_mut().unwrap(), false);
    let expected: Vec<u32> = (before + 1..=world.written).collect();
    assert_eq!(news, expected);
    assert_eq!(counted, expected.len() as u64);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    #[test]
    fn every_line_is_read_once(before in 0_u32..4, actions in prop::collection::vec(action(), 0..40)) {
        check(before, &actions);
    }
}

#[test]
fn a_truncated_file_that_has_grown_again_is_noticed() {
    let mut world = World::new();
    let mut buffer = vec![0; 32 * 1024];
    let mut tail = open(&world.path(), None);
    world.write();
    drain(&mut tail, &mut buffer, Instant::now());
    File::options().write(true).truncate(true).open(world.path()).unwrap();
    for _ in 0..5 {
        world.write();
    }
    let (read, _) = drain(&mut tail, &mut buffer, Instant::now());
    assert_eq!(read.iter().map(|(_, n)| *n).collect::<Vec<_>>(), [2, 3, 4, 5, 6]);
    assert_eq!(tail.take_losses(), ["truncated"], "nothing kept what was truncated");
}

#[test]
fn what_is_written_back_after_a_truncation_is_no_news() {
    let world = World::new();
    let path = world.path();
    let old: String = (1..=20).map(line).collect();
    let mut writer = appending(&path);
    let mut tail = open(&path, None);
    writer.write_all(old.as_bytes()).unwrap();
    let mut buffer = vec![0; 4096];
    assert_eq!(drain(&mut tail, &mut buffer, Instant::now()).0.len(), 20);
    // The same, in pieces, twice; then what is new behind it.
    for _ in 0..2 {
        appending(&path).set_len(0).unwrap();
        assert_eq!(drain(&mut tail, &mut buffer, Instant::now()).0, []);
        for piece in old.as_bytes().chunks(300) {
            writer.write_all(piece).unwrap();
            assert_eq!(drain(&mut tail, &mut buffer, Instant::now()).0, []);
        }
    }
    writer.write_all(line(21).as_bytes()).unwrap();
    assert_eq!(drain(&mut tail, &mut buffer, Instant::now()).0, [(Freshness::Live, 21)]);
    // A part of it.
    appending(&path).set_len(0).unwrap();
    drain(&mut tail, &mut buffer, Instant::now());
    writer.write_all((line(1) + &line(2) + &line(22)).as_bytes()).unwrap();
    assert_eq!(drain(&mut tail, &mut buffer, Instant::now()).0, [(Freshness::Live, 22)]);
    // Another beginning is another log, also when the clock was set back.
    appending(&path).set_len(0).unwrap();
    drain(&mut tail, &mut buffer, Instant::now());
    writer.write_all((line(3) + &line(4)).as_bytes()).unwrap();
    let news = drain(&mut tail, &mut buffer, Instant::now()).0;
    assert_eq!(news, [(Freshness::Live, 3), (Freshness::Live, 4)]);
}

#[test]
fn a_file_that_begins_with_half_a_line_hides_no_later_one() {
    let mut world = World::new();
    let path = world.path();
    let mut buffer = vec![0; 4096];
    let mut tail = open(&path, None);
    world.write();
    drain(&mut tail, &mut buffer, Instant::now());
    world.writer.set_len(0).unwrap();
    world.writer.write_all(b"rker created\n").unwrap();
    drain(&mut tail, &mut buffer, Instant::now());
    world.writer.write_all(line(2).as_bytes()).unwrap();
    assert_eq!(drain(&mut tail, &mut buffer, Instant::now()).0, [(Freshness::Live, 2)]);
    let cursor = tail.cursor("control");
    assert_eq!(cursor.newest, line(2).as_bytes()[..cursor.newest.len()]);
    drop(tail);
    // Rotated twice meanwhile: nobody has read the file between.
    std::fs::rename(&path, world.directory.path().join("control.log.2")).unwrap();
    let between = world.directory.path().join("control.log.1");
    std::fs::write(&between, format!("half of a line\n{}", line(3))).unwrap();
    appending(&path).write_all(line(4).as_bytes()).unwrap();
    let mut tail = open(&path, Some(&cursor));
    let news = drain(&mut tail, &mut buffer, Instant::now()).0;
    let news: Vec<u32> =
        news.into_iter().filter(|(at, _)| *at != Freshness::History).map(|(_, pid)| pid).collect();
    assert_eq!(news, [3, 4]);
}

#[test]
fn a_fifo_is_never_opened() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("server.log");
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0)
        .unwrap();
    let tail = open(&path, None);
    assert_eq!(tail.problem(), Some(&TailProblem::NotAFile(path)));
}

#[test]
fn a_problem_is_told_until_it_is_over() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("log/control.log");
    let mut tail = open(&path, None);
    assert_eq!(tail.problem(), Some(&TailProblem::Missing(path.clone())));
    fs::create_dir(path.parent().unwrap()).unwrap();
    fs::write(&path, line(1)).unwrap();
    let (read, _) = drain(&mut tail, &mut vec![0; 32 * 1024], Instant::now());
    assert_eq!((read, tail.problem()), (vec![(Freshness::Live, 1)], None));
}

#[test]
fn a_file_with_a_past_that_appears_is_history() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("control.log");
    let mut tail = open(&path, None);
    let mut file = File::create(&path).unwrap();
    file.write_all(line(1).as_bytes()).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(3600)).unwrap();
    let (read, counts) = drain(&mut tail, &mut vec![0; 32 * 1024], Instant::now());
    assert_eq!((read, counts), (vec![(Freshness::History, 1)], Counts::default()));
}

#[test]
fn history_is_bounded() {
    let mut world = World::new();
    let long = "x".repeat(8000);
    let lines = u32::try_from(HISTORY_LIMIT / 8000).unwrap() + 100;
    for _ in 0..lines {
        writeln!(world.writer, "{long}").unwrap();
    }
    world.write();
    let mut tail = open(&world.path(), None);
    assert_eq!(tail.history_bytes(), HISTORY_LIMIT);
    let mut buffer = vec![0; 64 * 1024];
    let (read, _) = drain(&mut tail, &mut buffer, Instant::now());
    assert_eq!(read, [(Freshness::History, 1)]);
    assert!(!tail.is_in_history());
}

#[test]
fn a_block_goes_on_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("server.log");
    let mut file = appending(&path);
    let mut tail = Tail::open(path.clone(), LogFile::Server, None, None, Instant::now());
    let mut buffer = vec![0; 32 * 1024];
    let write = |file: &mut File, text: &str| {
        writeln!(file, "[2026-04-23 06:04:59.367 Server  4428] {text}").unwrap();
    };
    write(&mut file, "The following clients have a sticky error set:");
    write(&mut file, "71");
    tail.step(&mut buffer, Instant::now(), |_, _| {});
    let cursor = tail.cursor("server.log");
    write(&mut file, "72");
    let mut tail =
        Tail::open(path, LogFile::Server, Some(&cursor), Some(SystemTime::UNIX_EPOCH), Instant::now());
    let mut said = Vec::new();
    while tail
        .step(&mut buffer, Instant::now(), |freshness, each| said.push((freshness, each.message)))
        .has_more
    {}
    let expected = [
        (Freshness::History, LogMessage::StickyClient { pid: 71 }),
        (Freshness::CaughtUp, LogMessage::StickyClient { pid: 72 }),
    ];
    assert_eq!(said, expected);
}

#[test]
fn the_file_that_the_daemon_has_open_is_followed_whatever_its_name() {
    let mut world = World::new();
    world.write();
    world.rename();
    world.create();
    fs::remove_file(world.directory.path().join("control.log.1")).unwrap();
    let mut tail = open(&world.path(), None);
    let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&world.writer));
    let id = FileId::of(&world.writer.metadata().unwrap());
    tail.set_written(Some(vec![(id, link.into())]), Instant::now());
    let mut buffer = vec![0; 32 * 1024];
    world.write();
    let (read, _) = drain(&mut tail, &mut buffer, Instant::now());
    assert_eq!(read, [(Freshness::History, 1), (Freshness::Live, 2)]);
    // Its writer lets go of it: it is not held for ever.
    world.reopen();
    tail.set_written(Some(Vec::new()), Instant::now());
    world.write();
    let later = Instant::now() + RETIRE_CLOSED_AFTER * 2;
    let (read, _) = drain(&mut tail, &mut buffer, later);
    assert_eq!(read, [(Freshness::Live, 3)]);
    assert_eq!(tail.held.len(), 1);
}
