use super::*;
use crate::outlet::testing::{incident, incident_with_id};

fn record(id: &str, state: IncidentState) -> Record {
    Record::Incident(Arc::new(Incident { state, ..incident_with_id(id) }))
}

fn action(result: ActionResult) -> Action {
    Action {
        action: ActionKind::Hook,
        at: "2026-04-01T12:00:02Z".parse().unwrap(),
        event: Some("server_fault".into()),
        daemon: Some("default".into()),
        incident: Some("a".into()),
        result,
        detail: None,
        seconds: Some(0.5),
        output: Some("done".into()),
    }
}

fn ids(restored: &Restored) -> Vec<(&str, IncidentState)> {
    restored.incidents.iter().map(|incident| (&*incident.id, incident.state)).collect()
}

fn lines(directory: &Path) -> Vec<String> {
    std::fs::read_to_string(directory.join(FILE_NAME)).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn what_is_written_is_read_back_each_incident_once_as_last_written() {
    let directory = tempfile::tempdir().unwrap();
    let (mut journal, restored) = Journal::open(directory.path(), 10).unwrap();
    assert_eq!(restored, Restored::default());
    let whole = incident();
    journal.append(&[Record::Incident(Arc::new(whole.clone()))]).unwrap();
    journal.append(&[record("b", IncidentState::Open), record("a", IncidentState::Open)]).unwrap();
    journal.append(&[Record::Action(Arc::new(action(ActionResult::Ok)))]).unwrap();
    journal.append(&[record("a", IncidentState::Closed)]).unwrap();
    drop(journal);
    let (_journal, restored) = Journal::open(directory.path(), 10).unwrap();
    assert_eq!(
        ids(&restored),
        [(&*whole.id, IncidentState::Open), ("a", IncidentState::Closed), ("b", IncidentState::Open)]
    );
    assert_eq!(restored.incidents[0], whole);
    assert_eq!(restored.actions, [action(ActionResult::Ok)]);
    assert_eq!(restored.unreadable, 0);
}

#[test]
fn a_torn_last_line_is_cut_off_wherever_it_tore() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(FILE_NAME);
    let (mut journal, _) = Journal::open(directory.path(), 10).unwrap();
    journal.append(&[record("a", IncidentState::Open)]).unwrap();
    let kept = std::fs::metadata(&path).unwrap().len();
    journal.append(&[record("b", IncidentState::Open)]).unwrap();
    drop(journal);
    let whole = std::fs::read(&path).unwrap();
    for end in (usize::try_from(kept).unwrap()..whole.len()).step_by(37) {
        std::fs::write(&path, &whole[..end]).unwrap();
        let (mut journal, restored) = Journal::open(directory.path(), 10).unwrap();
        assert_eq!(ids(&restored), [("a", IncidentState::Open)]);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), kept);
        journal.append(&[record("c", IncidentState::Closed)]).unwrap();
        drop(journal);
        let (_journal, restored) = Journal::open(directory.path(), 10).unwrap();
        assert_eq!(ids(&restored), [("a", IncidentState::Open), ("c", IncidentState::Closed)]);
    }
}

#[test]
fn lines_that_are_not_ours_are_skipped() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(FILE_NAME);
    let good = serde_json::to_string(&incident()).unwrap();
    let from_later = good.replacen('{', r#"{"a_field_of_a_later_version":[1],"#, 1).replace("019b", "019c");
    let text = format!("\0\0\0\0\n{good}\nnot json\n{{\"id\":\"x\"}}\n\n{from_later}\n");
    std::fs::write(&path, text).unwrap();
    let (_journal, restored) = Journal::open(directory.path(), 10).unwrap();
    assert_eq!(restored.incidents.len(), 2);
    assert_eq!(restored.unreadable, 4);
}

#[test]
fn the_rest_of_a_failed_write_is_gone_before_the_next() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(FILE_NAME);
    let (mut journal, _) = Journal::open(directory.path(), 10).unwrap();
    journal.append(&[record("a", IncidentState::Open)]).unwrap();
    OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"id\":\"half").unwrap();
    journal.append(&[record("b", IncidentState::Open)]).unwrap();
    drop(journal);
    let (_journal, restored) = Journal::open(directory.path(), 10).unwrap();
    assert_eq!(ids(&restored), [("a", IncidentState::Open), ("b", IncidentState::Open)]);
    assert_eq!(restored.unreadable, 0);
}

#[test]
fn it_stays_bounded_and_keeps_open_incidents_and_the_newest() {
    let directory = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(directory.path(), 20).unwrap();
    journal.append(&[record("0000", IncidentState::Recovering)]).unwrap();
    for number in 1..=300 {
        let id = format!("{number:04}");
        journal.append(&[record(&id, IncidentState::Open)]).unwrap();
        journal.append(&[record(&id, IncidentState::Closed)]).unwrap();
        journal.append(&[Record::Action(Arc::new(action(ActionResult::Ok)))]).unwrap();
    }
    assert!(lines(directory.path()).len() < 200, "{} lines", lines(directory.path()).len());
    drop(journal);
    let (_journal, restored) = Journal::open(directory.path(), 20).unwrap();
    let ids: Vec<_> = restored.incidents.iter().map(|incident| &*incident.id).collect();
    let mut expected = vec!["0000".to_owned()];
    expected.extend((281..=300).map(|number| format!("{number:04}")));
    assert_eq!(ids, expected);
    assert_eq!(restored.actions.len(), 20);
}

#[test]
fn an_incident_that_changes_for_ever_does_not_grow_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(directory.path(), 10).unwrap();
    for _ in 0..700 {
        journal.append(&[record("a", IncidentState::Recovering)]).unwrap();
    }
    let length = std::fs::metadata(directory.path().join(FILE_NAME)).unwrap().len();
    assert!(length <= SLACK + 16 * 1024, "{length} bytes");
}

#[test]
fn a_leftover_of_a_rewrite_is_of_no_account() {
    let directory = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(directory.path(), 10).unwrap();
    journal.append(&[record("a", IncidentState::Open)]).unwrap();
    drop(journal);
    std::fs::write(directory.path().join(NEW_FILE_NAME), "half of a rew").unwrap();
    let (_journal, restored) = Journal::open(directory.path(), 10).unwrap();
    assert_eq!(ids(&restored), [("a", IncidentState::Open)]);
    assert!(!directory.path().join(NEW_FILE_NAME).exists());
}

#[test]
fn one_process_has_it_at_a_time() {
    let directory = tempfile::tempdir().unwrap();
    let (first, _) = Journal::open(directory.path(), 10).unwrap();
    let second = Journal::open(directory.path(), 10).unwrap_err();
    assert!(matches!(second, JournalError::InUse(_)), "{second}");
    drop(first);
    Journal::open(directory.path(), 10).unwrap();
}

#[test]
fn a_place_that_cannot_be_used_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = Journal::open(&file.join("state"), 10).unwrap_err().to_string();
    assert!(error.contains("file/state"), "{error}");
    std::fs::create_dir(directory.path().join(FILE_NAME)).unwrap();
    let error = Journal::open(directory.path(), 10).unwrap_err().to_string();
    assert!(error.contains(FILE_NAME), "{error}");
}

#[test]
fn a_journal_that_was_removed_is_noticed() {
    let directory = tempfile::tempdir().unwrap();
    let (mut journal, _) = Journal::open(directory.path(), 10).unwrap();
    std::fs::remove_file(directory.path().join(FILE_NAME)).unwrap();
    let error = journal.append(&[record("a", IncidentState::Open)]).unwrap_err();
    assert!(matches!(error, JournalError::Gone(_)), "{error}");
}
