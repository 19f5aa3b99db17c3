use std::fs::{File, FileTimes};
use std::os::unix::fs::symlink;
use std::time::SystemTime;

use super::*;
use crate::config::CheckpointPath;
use crate::source::process::testing::FakeProc;

struct Client {
    proc: FakeProc,
}

impl Client {
    fn new() -> Client {
        let proc = FakeProc::new();
        proc.process(7, "train", 50);
        std::fs::create_dir_all(proc.root().file(7, "root")).unwrap();
        Client { proc }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.proc.root().file(7, &format!("root/{path}"))
    }

    /// A file that was written `seconds` after the epoch.
    fn file(&self, path: &str, seconds: u64) {
        let path = self.path(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let at = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        File::create(path).unwrap().set_times(FileTimes::new().set_modified(at)).unwrap();
    }

    fn newest(&self, places: &[&str]) -> Newest {
        let places = places.iter().map(PathBuf::from).collect();
        let subject = Subject { key: 3, process: ProcessId { pid: 7, start: 50 }, places };
        let [(3, newest)] = &look(&self.proc.root(), &[subject])[..] else { panic!("another answer") };
        newest.clone()
    }
}

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(seconds).unwrap()
}

#[test]
fn a_file_a_directory_and_a_pattern_are_places() {
    let client = Client::new();
    client.file("ckpt/run/step-1/model.pt", 100);
    client.file("ckpt/run/step-2/model.pt", 300);
    client.file("ckpt/run/step-2/log.txt", 900);
    assert_eq!(client.newest(&["/ckpt/run/step-1/model.pt"]), Ok(Some(at(100))));
    assert_eq!(client.newest(&["/ckpt/run"]), Ok(Some(at(900))));
    assert_eq!(client.newest(&["/ckpt/run/step-*/*.pt"]), Ok(Some(at(300))));
    assert_eq!(client.newest(&["/ckpt/run/step-1/*", "/ckpt/*/step-2/model.pt"]), Ok(Some(at(300))));
}

#[test]
fn a_place_with_nothing_in_it_yet_is_known_but_empty() {
    let client = Client::new();
    std::fs::create_dir_all(client.path("ckpt")).unwrap();
    for place in ["/ckpt", "/ckpt/*.pt", "/absent/deep/*", "/absent"] {
        assert_eq!(client.newest(&[place]), Ok(None), "{place}");
    }
}

#[test]
fn links_that_the_place_names_are_followed_inside_the_clients_root_only() {
    let client = Client::new();
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("host.pt"), "x").unwrap();
    client.file("data/step-9/model.pt", 500);
    std::fs::create_dir_all(client.path("ckpt")).unwrap();
    symlink("/data/step-9", client.path("ckpt/latest")).unwrap();
    symlink(outside.path(), client.path("ckpt/escape")).unwrap();
    symlink("../../../../../../../../../../../../../etc", client.path("ckpt/up")).unwrap();
    assert_eq!(client.newest(&["/ckpt/latest"]), Ok(Some(at(500))));
    assert_eq!(client.newest(&["/ckpt/*/model.pt"]), Ok(Some(at(500))));
    assert_eq!(client.newest(&["/ckpt/escape", "/ckpt/escape/*", "/ckpt/up/*"]), Ok(None));
    assert_eq!(client.newest(&["/ckpt"]), Ok(None), "a link was followed on the way down");
}

#[test]
fn depth_and_number_of_entries_are_bounded() {
    let client = Client::new();
    client.file("ckpt/1/2/three", 10);
    client.file("ckpt/1/2/3/four", 20);
    assert_eq!(client.newest(&["/ckpt"]), Ok(Some(at(10))));
    std::fs::create_dir_all(client.path("many")).unwrap();
    for number in 0..=MAX_ENTRIES {
        File::create(client.path(&format!("many/{number}"))).unwrap();
    }
    let error = client.newest(&["/many"]).unwrap_err();
    assert_eq!(error.reason(), "too_much");
    assert!(error.to_string().contains("/many"), "{error}");
}

#[test]
fn special_files_are_neither_opened_nor_counted() {
    let client = Client::new();
    client.file("ckpt/a", 10);
    let fifo = client.path("ckpt/fifo");
    assert!(std::process::Command::new("mkfifo").arg(fifo).status().unwrap().success());
    assert_eq!(client.newest(&["/ckpt", "/ckpt/fifo"]), Ok(Some(at(10))));
}

#[test]
fn a_client_that_ended_has_no_answer_and_ranks_of_one_root_share_theirs() {
    let client = Client::new();
    client.file("ckpt/a", 10);
    client.proc.process(8, "train", 51);
    symlink(client.path(""), client.proc.root().file(8, "root")).unwrap();
    client.proc.write(7, "ns/mnt", "");
    client.proc.write(8, "ns/pid", "");
    client.proc.link(8, "ns/mnt", client.proc.root().file(7, "ns/mnt").to_str().unwrap());
    let subject =
        |key, pid, start| Subject { key, process: ProcessId { pid, start }, places: vec!["/ckpt".into()] };
    let found = look(&client.proc.root(), &[subject(1, 7, 49), subject(2, 7, 50), subject(3, 8, 51)]);
    assert_eq!(found, [(1, Err(CheckpointError::Gone)), (2, Ok(Some(at(10)))), (3, Ok(Some(at(10))))]);
}

#[test]
fn the_environment_names_the_place_and_else_the_workload_does() {
    let path = |glob: &str, pod: Option<&str>, unit: Option<&str>, command: Option<&str>| CheckpointPath {
        glob: glob.into(),
        namespace: pod.map(|_| "vision".into()),
        pod: pod.map(Into::into),
        unit: unit.map(Into::into),
        command: command.map(Into::into),
    };
    let config = Checkpoints {
        environment: Some("X".into()),
        paths: vec![
            path("/pod", Some("train-"), None, None),
            path("/unit", None, Some("a.service"), None),
            path("/python", None, None, Some("python3")),
            path("relative", None, None, None),
        ],
    };
    let pod = |name: &str| Workload::Pod {
        uid: "u".into(),
        namespace: Some("vision".into()),
        pod: Some(name.into()),
        container: None,
    };
    let unit = Workload::Unit { unit: "a.service".into() };
    let of = |variable: Option<&str>, workload: Option<&Workload>, command| {
        let found = places(&config, variable.map(OsStr::new), workload, command);
        found.iter().map(|path| path.to_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(of(Some("/mine/*"), Some(&unit), None), ["/mine/*"]);
    assert_eq!(of(Some("mine"), Some(&unit), None), [""; 0]);
    assert_eq!(of(Some(""), Some(&unit), Some("python3")), ["/unit", "/python"]);
    assert_eq!(of(None, Some(&pod("train-0")), Some("sh")), ["/pod"]);
    assert_eq!(of(None, Some(&pod("infer")), None), [""; 0]);
    assert_eq!(of(None, None, Some("python3")), ["/python"]);
}
