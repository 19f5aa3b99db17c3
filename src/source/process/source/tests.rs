use std::fs::{File, FileTimes};
use std::process::{Child, Command as Program};
use std::time::SystemTime;

use tokio::sync::{mpsc::Receiver, watch};

use super::*;
use crate::identity::Workload;
use crate::source::process::testing::{FakeProc, Nested, find_sleeper};
use crate::time::Clock;

/// Generous, because machines that run tests are busy.
const PATIENCE: Duration = Duration::from_secs(30);

/// A running source and its reader.
struct Running {
    watcher: ProcessWatcher,
    queue: Receiver<Vec<Event>>,
    waiting: VecDeque<EventKind>,
    daemon: DaemonName,
    stop: watch::Sender<bool>,
    telemetry: Telemetry,
}

impl Running {
    fn start(config: &Config) -> Running {
        let (outbox, queue) = Outbox::new(Clock::new());
        let telemetry = Telemetry::new();
        let (source, watcher) = ProcessSource::new(&ProcessSettings::from(config), outbox, telemetry.clone());
        let (stop, shutdown) = Shutdown::new();
        tokio::spawn(source.run(shutdown));
        Running { watcher, queue, waiting: VecDeque::new(), daemon: "default".into(), stop, telemetry }
    }

    /// On the host's own processes, beside a daemon in our own namespace.
    fn beside_us() -> Running {
        let running = Running::start(&Config::default());
        let (me, _) = ProcRoot::new("/proc").process(std::process::id()).unwrap();
        running.watcher.daemon(&running.daemon, Some(me));
        running
    }

    /// On a tree of files, with a daemon as process 1.
    fn on(proc: &FakeProc, change: impl FnOnce(&mut Config)) -> Running {
        proc.process(1, "nvidia-cuda-mps", 1);
        let mut config = Config::default();
        config.host.proc = proc.root().path().to_owned();
        config.host.pod_logs = proc.root().path().join("pods");
        change(&mut config);
        let running = Running::start(&config);
        running.watcher.daemon(&running.daemon, Some(ProcessId { pid: 1, start: 1 }));
        running
    }

    fn watch(&self, pid: u32) {
        self.watcher.watch(&self.daemon, pid, None);
    }

    /// The next event of which `choose` makes something.
    async fn next<T>(&mut self, choose: impl Fn(&EventKind) -> Option<T>) -> T {
        let wait = async {
            loop {
                while let Some(kind) = self.waiting.pop_front() {
                    if let Some(chosen) = choose(&kind) {
                        return chosen;
                    }
                }
                let batch = self.queue.recv().await.expect("the source has ended");
                self.waiting.extend(batch.into_iter().map(|event| event.kind));
            }
        };
        tokio::time::timeout(PATIENCE, wait).await.expect("the event did not come")
    }

    async fn seen(&mut self, pid: u32) -> ProcessFacts {
        self.next(|kind| match kind {
            EventKind::ProcessSeen(_, facts) if facts.pid == pid => Some(facts.clone()),
            EventKind::ProcessExited { pid: other, .. } if *other == pid => {
                panic!("it was said to have exited")
            }
            _ => None,
        })
        .await
    }

    async fn workload(&mut self, pid: u32, is_it: impl Fn(&Workload) -> bool) -> Workload {
        self.next(|kind| match kind {
            EventKind::ProcessSeen(_, facts) if facts.pid == pid => facts.workload.clone().filter(&is_it),
            _ => None,
        })
        .await
    }

    async fn exited(&mut self) -> u32 {
        self.next(|kind| match kind {
            EventKind::ProcessExited { pid, .. } => Some(*pid),
            _ => None,
        })
        .await
    }

    /// Whether nothing about processes is said for a while.
    async fn is_silent(&mut self, time: Duration) -> bool {
        let until = tokio::time::Instant::now() + time;
        while let Ok(Some(batch)) = tokio::time::timeout_at(until, self.queue.recv()).await {
            let is_about_process = |event: &Event| {
                matches!(event.kind, EventKind::ProcessSeen(..) | EventKind::ProcessExited { .. })
            };
            if batch.iter().any(is_about_process) {
                return false;
            }
        }
        true
    }

    fn errors(&self, source: &str, reason: &str) -> f64 {
        let families = self.telemetry.registry().gather();
        let errors = families.iter().find(|family| family.name() == "mps_exporter_source_errors_total");
        let is_it = |metric: &&prometheus::proto::Metric| {
            metric.get_label().iter().all(|label| [source, reason].contains(&label.value()))
        };
        let found = errors.and_then(|family| family.get_metric().iter().find(is_it).cloned());
        found.map_or(0.0, |metric| metric.get_counter().get_value())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ended = self.stop.send(true);
    }
}

/// A sleeping process, killed in the end.
struct Sleeper(Child);

impl Sleeper {
    fn start() -> Sleeper {
        Sleeper(Program::new("sleep").arg("300").spawn().unwrap())
    }

    fn end(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _gone = self.0.wait();
    }
}

#[tokio::test]
async fn a_process_is_seen_then_attributed_and_its_end_is_told_at_once() {
    let mut running = Running::beside_us();
    let mut child = Sleeper::start();
    let pid = child.0.id();
    running.watch(pid);
    let facts = running.seen(pid).await;
    assert_eq!(facts.process.map(|process| process.pid), Some(pid));
    assert_eq!(facts.command.as_deref(), Some("sleep"));
    assert_eq!(facts.uid, Some(rustix::process::getuid().as_raw()));
    let age = Timestamp::now().duration_since(facts.started_at.unwrap()).as_secs_f64();
    assert!((0.0..60.0).contains(&age), "{age}");
    child.end();
    // Nobody polls a process that the kernel follows: this can only have come by its pidfd.
    assert_eq!(running.exited().await, pid);
}

#[tokio::test]
async fn a_pid_without_a_process_has_exited_and_pid_0_is_nobody() {
    let mut running = Running::beside_us();
    let mut child = Sleeper::start();
    let pid = child.0.id();
    child.end();
    running.watch(0);
    running.watch(pid);
    assert_eq!(running.exited().await, pid);
    assert!(running.is_silent(Duration::from_millis(100)).await);
}

#[tokio::test]
async fn a_thread_is_not_taken_for_a_process() {
    let mut running = Running::beside_us();
    let (sender, receiver) = std::sync::mpsc::channel();
    let (keep, released) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        let own = std::fs::read_link("/proc/thread-self").unwrap();
        sender.send(own.file_name().unwrap().to_str().unwrap().parse().unwrap()).unwrap();
        let _released = released.recv();
    });
    let pid: u32 = receiver.recv().unwrap();
    running.watch(pid);
    assert_eq!(running.exited().await, pid);
    drop(keep);
    thread.join().unwrap();
}

#[tokio::test]
async fn asked_again_everything_is_told_again_and_let_go_nothing_is() {
    let mut running = Running::beside_us();
    let mut child = Sleeper::start();
    let pid = child.0.id();
    running.watch(pid);
    let first = running.seen(pid).await;
    running.watch(pid);
    assert_eq!(running.seen(pid).await.process, first.process);
    running.watcher.unwatch(&running.daemon, pid);
    tokio::time::sleep(Duration::from_millis(50)).await;
    child.end();
    running.queue.try_recv().ok();
    running.waiting.clear();
    assert!(running.is_silent(Duration::from_millis(200)).await);
}

#[tokio::test]
async fn without_the_daemons_namespace_nothing_is_said_but_what_to_do() {
    let mut running = Running::start(&Config::default());
    let child = Sleeper::start();
    running.watch(child.0.id());
    let reason = running
        .next(|kind| match kind {
            EventKind::Source(SourceHealth { daemon: Some(_), state: Err(reason), .. }) => {
                Some(reason.clone())
            }
            EventKind::ProcessSeen(..) | EventKind::ProcessExited { .. } => panic!("{kind:?}"),
            _ => None,
        })
        .await;
    assert!(reason.contains("hostPID"), "{reason}");
    let (me, _) = ProcRoot::new("/proc").process(std::process::id()).unwrap();
    running.watcher.daemon(&running.daemon, Some(me));
    let is_well = |kind: &EventKind| {
        matches!(kind, EventKind::Source(SourceHealth { daemon: Some(_), state: Ok(()), .. })).then_some(())
    };
    running.next(is_well).await;
    running.seen(child.0.id()).await;
}

#[tokio::test]
async fn in_a_tree_elsewhere_ends_and_reused_pids_are_found_by_looking() {
    let proc = FakeProc::new();
    proc.process(7, "train", 100);
    proc.process(8, "infer", 100);
    let mut running = Running::on(&proc, |_| ());
    running.watch(7);
    running.watch(8);
    let facts = running.seen(7).await;
    assert_eq!((facts.command.as_deref(), facts.uid), (Some("train"), Some(1000)));
    assert_eq!(facts.process, Some(ProcessId { pid: 7, start: 100 }));
    running.seen(8).await;
    proc.process(7, "train", 200);
    assert_eq!(running.exited().await, 7);
    running.watch(7);
    assert_eq!(running.seen(7).await.process, Some(ProcessId { pid: 7, start: 200 }));
    proc.remove(8);
    assert_eq!(running.exited().await, 8);
}

#[tokio::test]
async fn a_reused_pid_that_is_asked_about_again_ends_and_begins() {
    let proc = FakeProc::new();
    proc.process(7, "train", 100);
    let mut running = Running::on(&proc, |_| ());
    running.watch(7);
    running.seen(7).await;
    proc.process(7, "other", 200);
    running.watch(7);
    assert_eq!(running.exited().await, 7);
    assert_eq!(running.seen(7).await.command.as_deref(), Some("other"));
}

#[tokio::test]
async fn pids_of_a_daemon_in_a_namespace_of_its_own_are_mapped() {
    let mark = (u64::from(std::process::id()) + 200_000).to_string();
    let other = format!("{mark}1");
    let Some(_nested) = Nested::start(&format!("sleep {mark} & sleep {other} & echo ready; wait")) else {
        return;
    };
    let proc = ProcRoot::new("/proc");
    let (daemon, client) = (find_sleeper(&mark), find_sleeper(&other));
    let inner = *proc.status(client).unwrap().namespace_pids.last().unwrap();
    assert_ne!(inner, client);
    let mut running = Running::start(&Config::default());
    running.watcher.watch(&running.daemon, inner, Some(proc.process(daemon).unwrap().0));
    let facts = running.seen(inner).await;
    assert_eq!(facts.process.map(|process| process.pid), Some(client));
    running.watch(31_999);
    assert_eq!(running.exited().await, 31_999);
    let pid = rustix::process::Pid::from_raw(i32::try_from(client).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    assert_eq!(running.exited().await, inner);
}

#[tokio::test]
async fn checkpoints_are_told_when_they_change_and_when_there_is_none() {
    let proc = FakeProc::new();
    for pid in [7, 8] {
        proc.process(pid, "train", 100);
        proc.write(pid, "cgroup", "0::/system.slice/train.service\n");
        proc.write(pid, "environ", "MPS_CHECKPOINT_PATH=/ckpt/*.pt\0");
        std::fs::create_dir_all(proc.root().file(pid, "root/ckpt")).unwrap();
    }
    let written = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
    let file = File::create(proc.root().file(7, "root/ckpt/a.pt")).unwrap();
    file.set_times(FileTimes::new().set_modified(written)).unwrap();
    let mut running = Running::on(&proc, |_| ());
    running.watch(7);
    running.watch(8);
    let mut found = HashMap::new();
    while found.len() < 2 {
        let (pid, newest) = running
            .next(|kind| match kind {
                EventKind::Checkpoint { pid, newest, .. } => Some((*pid, *newest)),
                _ => None,
            })
            .await;
        found.insert(pid, newest);
    }
    assert_eq!(found[&7], Some(Timestamp::from_second(1_800_000_000).unwrap()));
    assert_eq!(found[&8], None);
    running.watch(7);
    let again = |kind: &EventKind| matches!(kind, EventKind::Checkpoint { pid: 7, .. }).then_some(());
    running.next(again).await;
}

#[cfg(feature = "kubelet")]
#[tokio::test]
async fn a_pod_is_named_by_the_kubelet_where_its_logs_are_not_mounted() {
    use crate::source::process::kubelet::tests::Kubelet;

    let kubelet = Kubelet::with(&[ListedPod {
        namespace: "vision".into(),
        name: "train-0".into(),
        containers: vec!["main".into()],
    }]);
    let proc = FakeProc::new();
    proc.process(7, "train", 100);
    let (uid, id) = ("0f9d3c1a-77e2-4b0e-9c55-1d2e3f405162", "c".repeat(64));
    proc.write(7, "cgroup", &format!("0::/kubepods/pod{uid}/{id}\n"));
    proc.write(7, "environ", "");
    proc.write(7, "root/etc/hostname", "train-0\n");
    let mut running = Running::on(&proc, |config| config.host.kubelet_socket = Some(kubelet.socket()));
    running.watch(7);
    let logs = |kind: &EventKind| match kind {
        EventKind::Source(SourceHealth { source: SourceName::PodLogs, state, .. }) => Some(state.clone()),
        _ => None,
    };
    assert!(running.next(logs).await.is_err());
    let workload =
        running.workload(7, |workload| matches!(workload, Workload::Pod { pod: Some(_), .. })).await;
    assert_eq!(workload.to_string(), "pod vision/train-0");
}

#[tokio::test]
async fn an_environment_that_hangs_costs_only_that_process_its_name() {
    let proc = FakeProc::new();
    for pid in [7, 8] {
        proc.process(pid, "train", 100);
        proc.write(pid, "cgroup", "0::/system.slice/train.service\n");
        proc.write(pid, "environ", "");
    }
    // A FIFO without a writer blocks its reader for ever, as the memory map of a stuck process does.
    let environ = proc.root().file(7, "environ");
    std::fs::remove_file(&environ).unwrap();
    assert!(Program::new("mkfifo").arg(&environ).status().unwrap().success());
    let mut running = Running::on(&proc, |_| ());
    running.watch(7);
    running.seen(7).await;
    running.watch(8);
    running.seen(8).await;
    tokio::time::sleep(STUCK_AFTER).await;
    let workload = running.workload(8, |_| true).await;
    assert_eq!(workload, Workload::Unit { unit: "train.service".into() });
    assert!((running.errors("proc", "stuck") - 1.0).abs() < f64::EPSILON);
    // Lets the thread go.
    drop(File::options().write(true).open(&environ));
}

#[tokio::test]
async fn hundreds_of_processes_at_once_are_seen_and_their_ends_told() {
    let mut running = Running::beside_us();
    let mut children: Vec<Sleeper> = (0..150).map(|_| Sleeper::start()).collect();
    for child in &children {
        running.watch(child.0.id());
    }
    let mut seen = std::collections::HashSet::new();
    while seen.len() < children.len() {
        let pid = running.next(|kind| match kind {
            EventKind::ProcessSeen(_, facts) => Some(facts.pid),
            EventKind::ProcessExited { .. } => panic!("nobody has exited"),
            _ => None,
        });
        seen.insert(pid.await);
    }
    for child in &mut children {
        child.0.kill().unwrap();
    }
    for _ in 0..children.len() {
        assert!(seen.remove(&running.exited().await), "an end was told twice");
    }
}

#[tokio::test]
async fn a_tree_without_a_boot_time_is_blind() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = Config::default();
    config.host.proc = folder.path().to_owned();
    let mut running = Running::start(&config);
    let reason = running
        .next(|kind| match kind {
            EventKind::Source(SourceHealth { daemon: None, state: Err(reason), .. }) => Some(reason.clone()),
            _ => None,
        })
        .await;
    assert!(reason.contains("host.proc"), "{reason}");
}

/// Prints what docs/performance.md quotes; run with `--run-ignored only --no-capture`.
#[tokio::test]
#[ignore = "a measurement"]
async fn measure_from_exit_to_event() {
    let mut running = Running::beside_us();
    let mut took = Vec::new();
    for _ in 0..1000 {
        let mut child = Sleeper::start();
        running.watch(child.0.id());
        running.seen(child.0.id()).await;
        let pid = child.0.id();
        // Killed from another thread, so that the time to be scheduled again is part of it.
        let killer = std::thread::spawn(move || {
            let at = Instant::now();
            child.0.kill().unwrap();
            (at, child)
        });
        assert_eq!(running.exited().await, pid);
        let told = Instant::now();
        let (at, mut child) = killer.join().unwrap();
        took.push(told.duration_since(at));
        child.0.wait().unwrap();
    }
    took.sort_unstable();
    let at = |share: usize| took[took.len() * share / 1000];
    println!("kill to event: p50 {:?}, p90 {:?}, p99 {:?}, max {:?}", at(500), at(900), at(990), took[999]);
}
