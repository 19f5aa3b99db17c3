use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use tokio::sync::mpsc::Receiver;

use super::*;
use crate::event::Event;
use crate::time::Clock;

const FILE: &str = "MPS_EXPORTER_TEST_LOCK";

/// Another process that holds a lock until it is killed: this test binary, in [`holds_a_lock`].
struct LockHolder(Child);

impl LockHolder {
    fn new(pipe: &Path) -> LockHolder {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "source::control::liveness::tests::holds_a_lock", "--ignored", "--nocapture"])
            .env(FILE, pipe.join("control_lock"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        assert!(output.lines().any(|line| line.unwrap().contains("locked")));
        LockHolder(child)
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for LockHolder {
    fn drop(&mut self) {
        let _already_dead = self.0.kill();
        let _status = self.0.wait();
    }
}

#[test]
#[ignore = "run by LockHolder, in a process of its own"]
fn holds_a_lock() {
    let path = std::env::var_os(FILE).unwrap();
    let file = std::fs::OpenOptions::new().write(true).create(true).truncate(false).open(path).unwrap();
    rustix::fs::fcntl_lock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    println!("locked");
    std::io::stdout().flush().unwrap();
    std::io::stdin().lines().for_each(drop);
}

fn proc() -> ProcRoot {
    ProcRoot::new("/proc")
}

#[test]
fn a_daemon_is_alive_while_it_holds_the_lock() {
    let pipe = tempfile::tempdir().unwrap();
    assert_eq!(lock_state(pipe.path(), &proc()).unwrap(), LockState::Absent);
    std::fs::write(pipe.path().join("log"), "").unwrap();
    let mut daemon = LockHolder::new(pipe.path());
    let state = lock_state(pipe.path(), &proc()).unwrap();
    assert!(matches!(state, LockState::Held(process) if process.pid == daemon.0.id()), "{state:?}");
    daemon.kill();
    assert_eq!(lock_state(pipe.path(), &proc()).unwrap(), LockState::Stale);
    // `quit` removes the FIFO.
    std::fs::remove_file(pipe.path().join("log")).unwrap();
    assert_eq!(lock_state(pipe.path(), &proc()).unwrap(), LockState::Absent);
}

#[test]
fn a_holder_that_is_not_shown_lives_elsewhere() {
    let (pipe, empty) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let _daemon = LockHolder::new(pipe.path());
    let state = lock_state(pipe.path(), &ProcRoot::new(empty.path())).unwrap();
    assert_eq!(state, LockState::HeldElsewhere);
}

#[test]
fn a_lock_that_is_no_file_is_not_opened_for_long() {
    let pipe = tempfile::tempdir().unwrap();
    let path = pipe.path().join("control_lock");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    assert!(matches!(lock_state(pipe.path(), &proc()), Err(LivenessError::NotAFile { .. })));
}

fn site(pipe: &Path) -> DaemonSite {
    DaemonSite {
        name: "default".into(),
        pipe_directory: pipe.into(),
        log_directory: pipe.into(),
        root: PathBuf::new(),
        process: None,
        started_at: None,
        log: crate::event::LogPlace::Files,
        visible_devices: None,
        is_configured: true,
    }
}

async fn next_liveness(queue: &mut Receiver<Vec<Event>>) -> Liveness {
    loop {
        let batch = tokio::time::timeout(Duration::from_secs(10), queue.recv()).await.unwrap().unwrap();
        for event in batch {
            if let EventKind::Liveness(_, liveness) = event.kind {
                return liveness;
            }
        }
    }
}

#[tokio::test]
async fn the_watcher_tells_what_changes_and_notices_an_exit_at_once() {
    let pipe = tempfile::tempdir().unwrap();
    std::fs::write(pipe.path().join("log"), "").unwrap();
    std::fs::write(pipe.path().join("nvidia-cuda-mps-control.pid"), "4711").unwrap();
    let mut daemon = LockHolder::new(pipe.path());
    let (outbox, mut queue) = Outbox::new(Clock::new());
    let (unanswered, unanswered_seen) = watch::channel(0);
    let (state, state_seen) = watch::channel(None);
    let (stop, shutdown) = Shutdown::new();
    let watcher = Watcher {
        site: site(pipe.path()),
        proc: proc(),
        outbox,
        unanswered: unanswered_seen,
        state,
        rescan: None,
    };
    let task = tokio::spawn(watcher.run(shutdown));
    let first = next_liveness(&mut queue).await;
    assert!(matches!(first.state, LockState::Held(_)));
    assert_eq!((first.unanswered, first.pid_file), (0, Some(4711)));

    unanswered.send_replace(1);
    assert_eq!(next_liveness(&mut queue).await.unanswered, 1);

    // The exit is told by the kernel, not by the next poll.
    let killed = std::time::Instant::now();
    daemon.kill();
    assert_eq!(next_liveness(&mut queue).await.state, LockState::Stale);
    assert!(killed.elapsed() < POLL / 2, "{:?}", killed.elapsed());
    assert_eq!(*state_seen.borrow(), Some(LockState::Stale));

    stop.send_replace(true);
    task.await.unwrap();
}
