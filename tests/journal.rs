//! The journal under `kill -9`, and on a disk that is full.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use mps_exporter::config::State;
use mps_exporter::engine::incident::{Incident, IncidentState};
use mps_exporter::outlet::journal::{Action, ActionKind, ActionResult, FILE_NAME, Journal, Record, Restored};
use mps_exporter::outlet::recorder::Recorder;
use mps_exporter::telemetry::Telemetry;

/// Where the driver writes. Set only for the process that is to be killed.
const DIRECTORY: &str = "JOURNAL_CRASH_DIRECTORY";
/// Kills of the crash test.
const KILLS: usize = 200;
/// Small, so that rewrites are often under way when the kill comes.
const KEPT: usize = 6;

fn incident(number: u64, state: IncidentState) -> Record {
    let mut incident: Incident = serde_json::from_str(include_str!("support/incident.json")).unwrap();
    incident.id = format!("{number:012x}-0").into();
    incident.state = state;
    // Lines of many lengths. Only a write of many pages can be torn by a signal.
    let count = if number.is_multiple_of(4) { 600 } else { usize::try_from(number * 7 % 60).unwrap() };
    incident.victims = incident.victims.iter().cycle().take(count).cloned().collect();
    Record::Incident(Arc::new(incident))
}

fn action(number: u64) -> Record {
    Record::Action(Arc::new(Action {
        action: ActionKind::Hook,
        at: jiff::Timestamp::UNIX_EPOCH,
        event: Some("server_fault".into()),
        daemon: None,
        incident: Some(format!("{number:012x}-0").into()),
        result: ActionResult::Started,
        detail: None,
        seconds: None,
        output: None,
    }))
}

/// Not a test of its own: what the crash test kills. Writes incidents as fast as it can, and says of each that it is
/// on the disk once `append` has returned.
#[test]
fn driver() {
    let Some(directory) = std::env::var_os(DIRECTORY) else { return };
    let (mut journal, restored) = Journal::open(Path::new(&directory), KEPT).unwrap();
    let last = restored.incidents.last().map_or(0, number_of);
    let mut out = std::io::stdout();
    for number in last + 1.. {
        for (step, state) in
            [IncidentState::Open, IncidentState::Recovering, IncidentState::Closed].into_iter().enumerate()
        {
            let mut records = vec![incident(number, state)];
            if step == 0 {
                records.push(action(number));
            }
            journal.append(&records).unwrap();
            // Shorter than a pipe's atomic write: it arrives whole or not at all.
            out.write_all(format!("\nacknowledged {number} {step}\n").as_bytes()).unwrap();
            out.flush().unwrap();
        }
    }
}

fn number_of(incident: &Incident) -> u64 {
    u64::from_str_radix(incident.id.split('-').next().unwrap(), 16).unwrap()
}

fn step_of(state: IncidentState) -> usize {
    match state {
        IncidentState::Open => 0,
        IncidentState::Recovering => 1,
        IncidentState::Closed => 2,
    }
}

/// Runs the driver for about `life` and kills it. Returns what it acknowledged.
fn run_and_kill(directory: &Path, life: Duration) -> Vec<(u64, usize)> {
    let mut driver = Command::new(std::env::current_exe().unwrap())
        .args(["driver", "--exact", "--nocapture", "--test-threads=1"])
        .env(DIRECTORY, directory)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(driver.stdout.take().unwrap()).lines().map(Result::unwrap);
    let parse = |line: String| {
        let mut words = line.strip_prefix("acknowledged ")?.split(' ');
        Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
    };
    // The life counts from the first acknowledgement, or else it would mostly be spent on starting.
    let first = lines.by_ref().find_map(parse);
    std::thread::sleep(life);
    driver.kill().unwrap();
    driver.wait().unwrap();
    first.into_iter().chain(lines.filter_map(parse)).collect()
}

#[test]
fn no_kill_loses_doubles_or_tears_an_incident() {
    // Where memory is the disk, a driver gets much further in its short life. To a signal they are the same.
    let memory = Path::new("/dev/shm");
    let directory =
        if memory.is_dir() { tempfile::tempdir_in(memory).unwrap() } else { tempfile::tempdir().unwrap() };
    let path = directory.path().join(FILE_NAME);
    // What was acknowledged of each incident, newest state.
    let mut acknowledged: BTreeMap<u64, usize> = BTreeMap::new();
    let (mut torn, mut rewrites_cut_short) = (0, 0);
    // A small generator of its own, seeded by the time: each run kills elsewhere.
    let mut seed = u64::from(jiff::Timestamp::now().subsec_nanosecond().unsigned_abs()) | 1;
    for _ in 0..KILLS {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        acknowledged.extend(run_and_kill(directory.path(), Duration::from_micros(seed % 40_000)));
        torn += usize::from(std::fs::read(&path).unwrap().last() != Some(&b'\n'));
        rewrites_cut_short += usize::from(directory.path().join("incidents.jsonl.new").exists());
        let (journal, restored) = Journal::open(directory.path(), KEPT).unwrap();
        drop(journal);
        check(&path, &restored, &acknowledged);
    }
    let total = acknowledged.len();
    println!(
        "{KILLS} kills, {total} incidents, {torn} torn lines repaired, {rewrites_cut_short} rewrites cut short"
    );
    assert!(total > KILLS, "the driver hardly ran: {total} incidents");
}

fn check(path: &Path, restored: &Restored, acknowledged: &BTreeMap<u64, usize>) {
    assert_eq!(restored.unreadable, 0);
    let found: BTreeMap<u64, usize> =
        restored.incidents.iter().map(|incident| (number_of(incident), step_of(incident.state))).collect();
    assert_eq!(found.len(), restored.incidents.len(), "an incident is there twice");
    for (number, step) in acknowledged.iter().rev().take(KEPT - 1) {
        let there = found.get(number);
        assert!(
            there.is_some_and(|there| there >= step),
            "incident {number}: acknowledged {step}, there {there:?}"
        );
    }
    let newest = acknowledged.last_key_value().map_or(0, |(number, _)| *number);
    // At most the one that was being written is there without an acknowledgement.
    assert!(found.keys().all(|number| *number <= newest + 1));
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.ends_with('\n'));
    for line in text.lines() {
        serde_json::from_str::<serde_json::Value>(line).unwrap();
    }
    for (number, _) in acknowledged.iter().rev().take(KEPT / 2) {
        let id = format!("{number:012x}-0");
        let runs = restored.actions.iter().filter(|action| action.incident.as_deref() == Some(&*id)).count();
        assert_eq!(runs, 1, "the action of incident {number}");
    }
}

/// A file system of 64 KiB, or `None` where it cannot be mounted (that needs root).
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount() -> Option<SmallDisk> {
        let directory = tempfile::tempdir().unwrap();
        let mount = ["-t", "tmpfs", "-o", "size=256k,mode=700", "mps-exporter-test"];
        let status = Command::new("mount").args(mount).arg(directory.path()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success()).then_some(SmallDisk(directory))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _left = Command::new("umount").arg(self.0.path()).status();
    }
}

fn journal_errors(telemetry: &Telemetry) -> f64 {
    let families = telemetry.registry().gather();
    let family = families.iter().find(|family| family.name() == "mps_journal_errors_total").unwrap();
    family.get_metric()[0].get_counter().get_value()
}

#[test]
fn a_full_disk_tears_nothing() {
    let Some(disk) = SmallDisk::mount() else {
        println!("skipped: a tmpfs cannot be mounted here");
        return;
    };
    let (mut journal, _) = Journal::open(disk.0.path(), 100).unwrap();
    journal.append(&[incident(1, IncidentState::Closed)]).unwrap();
    let filler = disk.0.path().join("filler");
    let mut written = Vec::new();
    let mut refused = 0;
    for number in 2..60 {
        match journal.append(&[incident(number, IncidentState::Closed)]) {
            Ok(()) => written.push(number),
            Err(error) => {
                refused += 1;
                assert!(error.to_string().contains("No space left on device"), "{error}");
            }
        }
    }
    assert!(refused > 10 && !written.is_empty());
    assert!(journal.append(&[incident(99, IncidentState::Closed)]).is_err() || written.len() > 5);
    drop(journal);
    let _absent = std::fs::remove_file(&filler);
    let (_, restored) = Journal::open(disk.0.path(), 100).unwrap();
    assert_eq!(restored.unreadable, 0);
    let found: Vec<u64> = restored.incidents.iter().map(number_of).collect();
    assert!(written.iter().all(|number| found.contains(number)));
    assert!(found.len() <= written.len() + 2, "refused and yet there: {found:?}");
}

#[tokio::test]
async fn a_full_disk_holds_up_nobody_and_what_it_refused_is_written_when_there_is_room() {
    let Some(disk) = SmallDisk::mount() else {
        println!("skipped: a tmpfs cannot be mounted here");
        return;
    };
    let telemetry = Telemetry::new();
    let state = State { directory: Some(disk.0.path().to_owned()), incidents_kept: 100 };
    let (recorder, _) = Recorder::start(&state, &telemetry);
    let filler = disk.0.path().join("filler");
    // Writes until there is no room for a byte more.
    std::fs::write(&filler, vec![0; 1 << 20]).unwrap_err();
    for number in 1..=5 {
        let started = std::time::Instant::now();
        assert!(!recorder.record(vec![incident(number, IncidentState::Open)]).await);
        assert!(started.elapsed() < Duration::from_millis(500));
    }
    assert!(journal_errors(&telemetry) >= 5.0);
    std::fs::remove_file(&filler).unwrap();
    assert!(recorder.record(vec![incident(6, IncidentState::Open)]).await, "there is room again");
    drop(recorder);
    let restored = reopen(disk.0.path()).await;
    assert_eq!(restored.incidents.iter().map(number_of).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
}

/// Opens the journal when the thread of the last recorder has let go of it.
async fn reopen(directory: &Path) -> Restored {
    for _ in 0..200 {
        match Journal::open(directory, 100) {
            Ok((_, restored)) => return restored,
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
    panic!("the journal is still in use after 2 s");
}

#[tokio::test]
async fn a_directory_that_vanishes_or_cannot_be_made_costs_no_more_than_the_record() {
    let directory = tempfile::tempdir().unwrap();
    let telemetry = Telemetry::new();
    let place = directory.path().join("state");
    let state = State { directory: Some(place.clone()), incidents_kept: 100 };
    let (recorder, _) = Recorder::start(&state, &telemetry);
    assert!(recorder.record(vec![incident(1, IncidentState::Open)]).await);
    std::fs::remove_dir_all(&place).unwrap();
    assert!(recorder.record(vec![incident(2, IncidentState::Open)]).await, "it is made again");
    assert!(journal_errors(&telemetry) > 0.0, "and that something was lost is counted");
    drop(recorder);
    assert_eq!(reopen(&place).await.incidents.len(), 1);

    std::fs::write(directory.path().join("file"), "").unwrap();
    let state = State { directory: Some(directory.path().join("file/state")), incidents_kept: 100 };
    let (recorder, restored) = Recorder::start(&state, &Telemetry::new());
    assert_eq!(restored, Restored::default());
    assert!(!recorder.record(vec![incident(1, IncidentState::Open)]).await);
}
