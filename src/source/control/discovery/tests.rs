use std::os::unix::fs::symlink;

use super::*;
use crate::config::{Daemon, LogChoice};
use crate::event::{Event, LogPlace};
use crate::source::process::testing::FakeProc;
use crate::time::Clock;

/// A machine of plain files: its processes, and the directories that they name.
struct Machine {
    proc: FakeProc,
    files: tempfile::TempDir,
}

impl Machine {
    fn new() -> Machine {
        let machine = Machine { proc: FakeProc::new(), files: tempfile::tempdir().unwrap() };
        machine.proc.process(1, "init", 1);
        machine.proc.link(1, "root", "/");
        machine
    }

    fn path(&self, path: &str) -> PathBuf {
        self.files.path().join(path)
    }

    /// A pipe directory that a daemon has used.
    fn pipe(&self, path: &str) -> PathBuf {
        let pipe = self.path(path);
        std::fs::create_dir_all(&pipe).unwrap();
        std::fs::write(pipe.join("control_lock"), "").unwrap();
        std::fs::write(pipe.join("log"), "").unwrap();
        pipe
    }

    /// A daemon's process that sees `root` as `/`.
    fn daemon(&self, pid: u32, mode: &str, pipe: &Path, log: &Path, root: &Path) {
        self.proc.process(pid, "nvidia-cuda-mps", u64::from(pid));
        self.proc.write(pid, "cmdline", &format!("/usr/bin/nvidia-cuda-mps-control\0{mode}\0"));
        let environment = format!(
            "PATH=/bin\0CUDA_MPS_PIPE_DIRECTORY={}\0CUDA_MPS_LOG_DIRECTORY={}\0CUDA_VISIBLE_DEVICES=1,0\0",
            pipe.display(),
            log.display(),
        );
        self.proc.write(pid, "environ", &environment);
        self.proc.link(pid, "exe", "/usr/bin/nvidia-cuda-mps-control");
        self.proc.link(pid, "cwd", "/");
        self.proc.link(pid, "root", root.to_str().unwrap());
    }

    fn output(&self, pid: u32, target: &Path) {
        self.proc.write(pid, "fd/0", "");
        self.proc.link(pid, "fd/1", target.to_str().unwrap());
    }

    fn places(&self, patterns: &[&str]) -> Places {
        Places {
            configured: Vec::new(),
            patterns: Some(patterns.iter().map(|pattern| self.path(pattern)).collect()),
            proc: self.proc.root(),
            pod_logs: self.path("pods"),
        }
    }

    /// A discovery of these places alone, and its events.
    fn discovery(places: Places) -> (Discovery, tokio::sync::mpsc::Receiver<Vec<Event>>) {
        let (outbox, queue) = Outbox::new(Clock::new());
        let (mut discovery, _, _) = Discovery::new(&Config::default(), outbox, Vec::new());
        discovery.places = Arc::new(places);
        (discovery, queue)
    }
}

fn only(places: &Places) -> DaemonSite {
    let mut scan = scan::scan(places, &[]);
    assert_eq!(scan.problems, Vec::<String>::new());
    assert_eq!(scan.found.len(), 1, "{:?}", scan.found);
    scan.found.remove(0)
}

#[test]
fn a_running_daemon_is_found_by_its_environment() {
    let machine = Machine::new();
    let (pipe, log) = (machine.pipe("alice/mps"), machine.path("alice/logs"));
    machine.daemon(42, "-d", &pipe, &log, Path::new("/"));
    // Its child before it becomes a server, and a client of it, look alike.
    machine.daemon(43, "-d", &pipe, &log, Path::new("/"));
    machine.daemon(44, "", &pipe, &log, Path::new("/"));
    let site = only(&machine.places(&[]));
    assert_eq!((site.pipe_directory, site.log_directory, site.root), (pipe, log, PathBuf::new()));
    assert_eq!(site.process.map(|process| process.pid), Some(42));
    assert!(site.started_at.is_some());
    assert_eq!(site.visible_devices.as_deref(), Some("1,0"));
    assert_eq!(site.log, LogPlace::Files);
}

#[test]
fn a_directory_without_a_daemon_is_found_by_its_layout() {
    let machine = Machine::new();
    let pipe = machine.pipe("nvidia.com/gpu.shared/pipe");
    std::fs::create_dir_all(machine.path("nvidia.com/empty/pipe")).unwrap();
    let site = only(&machine.places(&["*/*/pipe"]));
    assert_eq!((site.pipe_directory, site.process), (pipe, None));
    assert_eq!(site.log_directory, machine.path("nvidia.com/gpu.shared/log"));
}

#[test]
fn two_ways_to_one_directory_are_one_daemon_named_by_the_host() {
    let machine = Machine::new();
    let pipe = machine.pipe("run/nvidia.com/gpu/pipe");
    std::fs::create_dir_all(machine.path("run/nvidia.com/gpu/log")).unwrap();
    // The container of the device plugin mounts it at another path.
    let container = machine.path("container");
    std::fs::create_dir_all(&container).unwrap();
    symlink(machine.path("run"), container.join("mps")).unwrap();
    let inside = Path::new("/mps/nvidia.com/gpu");
    machine.daemon(42, "-d", &inside.join("pipe"), &inside.join("log"), &container);
    let site = only(&machine.places(&["run/*/*/pipe"]));
    assert_eq!((&site.pipe_directory, &site.root), (&pipe, &PathBuf::new()));
    assert_eq!(site.log_directory, machine.path("run/nvidia.com/gpu/log"));
    assert_eq!(site.process.map(|process| process.pid), Some(42));
}

#[test]
fn a_daemon_of_another_mount_namespace_is_reached_through_its_root() {
    let machine = Machine::new();
    machine.pipe("container/secret/mps");
    let (pipe, log) = (Path::new("/secret/mps"), Path::new("/secret/log"));
    machine.daemon(42, "-d", pipe, log, &machine.path("container"));
    let site = only(&machine.places(&[]));
    assert_eq!((site.pipe_directory.as_path(), site.log_directory.as_path()), (pipe, log));
    assert_eq!(site.root, machine.proc.root().file(42, "root"));
    assert!(site.pipe_path().join("control_lock").exists());
}

#[test]
fn a_configured_daemon_keeps_its_name_and_is_there_without_a_process() {
    let machine = Machine::new();
    let pipe = machine.pipe("mps");
    let mut places = machine.places(&["mp?"]);
    for (name, pipe) in [("mine", pipe), ("absent", machine.path("none"))] {
        let log_directory = machine.path("logs");
        places.configured.push(Daemon {
            name: name.into(),
            pipe_directory: pipe,
            log_directory,
            log: LogChoice::Auto,
        });
    }
    let found = scan::scan(&places, &[]).found;
    let names: Vec<_> = found.iter().map(|site| (&*site.name, site.is_configured)).collect();
    assert_eq!(names, [("mine", true), ("absent", true)]);
    places.patterns = None;
    assert_eq!(scan::scan(&places, &[]).found.len(), 2);
}

#[test]
fn the_output_of_a_foreground_daemon_is_found() {
    let machine = Machine::new();
    let pipe = machine.pipe("mps");
    machine.daemon(42, "-f", &pipe, &machine.path("log"), Path::new("/"));
    let place = |machine: &Machine| only(&machine.places(&[])).log;
    assert!(
        matches!(place(&machine), LogPlace::Nowhere(reason) if reason.contains("fd/1") && reason.contains("root"))
    );

    let file = machine.path("output.txt");
    std::fs::write(&file, "").unwrap();
    machine.output(42, &file);
    assert_eq!(place(&machine), LogPlace::Merged(file));

    let swap = |machine: &Machine, target: &Path| {
        std::fs::remove_file(machine.proc.root().file(42, "fd/1")).unwrap();
        machine.output(42, target);
    };
    let socket = machine.path("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    swap(&machine, &socket);
    machine.proc.write(42, "cgroup", "0::/system.slice/nvidia-mps.service\n");
    assert_eq!(place(&machine), LogPlace::Journal { unit: Some("nvidia-mps.service".into()) });

    swap(&machine, Path::new("pipe:[4711]"));
    assert!(matches!(place(&machine), LogPlace::Nowhere(_)));

    let uid = "9bd6f3f1-6c1c-4f5f-9d0e-2f6f4f3f2a11";
    let slice = format!("kubepods-pod{}.slice", uid.replace('-', "_"));
    let id = "ab".repeat(32);
    machine.proc.write(42, "cgroup", &format!("0::/kubepods.slice/{slice}/cri-containerd-{id}.scope\n"));
    assert!(matches!(place(&machine), LogPlace::Nowhere(reason) if reason.contains(uid)));
    let folder = machine.path(&format!("pods/gpu-operator_mps-x_{uid}/mps-control-daemon-ctr"));
    std::fs::create_dir_all(&folder).unwrap();
    for restart in ["0.log", "9.log", "10.log", "10.log.20260401-000000.gz"] {
        std::fs::write(folder.join(restart), "").unwrap();
    }
    assert_eq!(place(&machine), LogPlace::Merged(folder.join("10.log")));
}

#[test]
fn a_daemon_that_cannot_be_placed_is_told_of() {
    let machine = Machine::new();
    let pipe = machine.pipe("mps");
    machine.daemon(42, "-d", &pipe, &pipe, Path::new("/"));
    std::fs::remove_file(machine.proc.root().file(42, "environ")).unwrap();
    let scan = scan::scan(&machine.places(&[]), &[]);
    assert!(scan.found.is_empty());
    assert!(scan.problems[0].contains("pid 42"), "{:?}", scan.problems);
}

#[tokio::test]
async fn daemons_come_change_stay_stale_and_go() {
    let machine = Machine::new();
    let (mut discovery, mut queue) = Machine::discovery(machine.places(&[]));
    let mut told = async |discovery: &mut Discovery| {
        assert!(discovery.scan().await);
        let mut told = Vec::new();
        while let Ok(batch) = queue.try_recv() {
            for event in batch {
                match event.kind {
                    EventKind::DaemonFound(site) => {
                        told.push((site.name, site.process.map(|process| process.pid)));
                    }
                    EventKind::DaemonGone(name) => told.push((name, Some(0))),
                    _ => {}
                }
            }
        }
        told
    };
    assert_eq!(told(&mut discovery).await, []);

    // Two users call their directory the same.
    let first = machine.pipe("alice/mps");
    let second = machine.pipe("bob/mps");
    machine.daemon(42, "-d", &first, &first, Path::new("/"));
    machine.daemon(43, "-d", &second, &second, Path::new("/"));
    assert_eq!(told(&mut discovery).await, [("mps".into(), Some(42)), ("mps-2".into(), Some(43))]);
    assert_eq!(told(&mut discovery).await, []);

    // One is restarted, and keeps its name.
    machine.proc.remove(43);
    machine.daemon(52, "-d", &second, &second, Path::new("/"));
    assert_eq!(told(&mut discovery).await, [("mps-2".into(), Some(52))]);

    // One is killed: what it leaves is still watched, until it is removed.
    machine.proc.remove(42);
    assert_eq!(told(&mut discovery).await, [("mps".into(), None)]);
    std::fs::remove_dir_all(&first).unwrap();
    assert_eq!(told(&mut discovery).await, [("mps".into(), Some(0))]);
    assert_eq!(discovery.sites.borrow().len(), 1);
}

#[tokio::test]
async fn a_crowd_of_directories_is_cut() {
    let machine = Machine::new();
    for n in 0..80 {
        machine.pipe(&format!("nvidia-mps_{n}"));
    }
    let (mut discovery, _queue) = Machine::discovery(machine.places(&["nvidia-mps_*"]));
    assert!(discovery.scan().await);
    assert_eq!(discovery.sites.borrow().len(), MAX_DISCOVERED);
    assert!(matches!(&discovery.health, Some(Err(problem)) if problem.contains("16 pipe directories")));
}

#[tokio::test]
async fn what_a_changed_configuration_leaves_out_or_moves_is_gone() {
    let machine = Machine::new();
    let (first, second) = (machine.pipe("first"), machine.pipe("second"));
    let configured = |name: &str, pipe: &Path| Daemon {
        name: name.into(),
        pipe_directory: pipe.to_owned(),
        log_directory: pipe.to_owned(),
        log: crate::config::LogChoice::Files,
    };
    let watching = |daemons: Vec<Daemon>| Places {
        configured: daemons,
        patterns: None,
        proc: machine.proc.root(),
        pod_logs: machine.path("pods"),
    };
    let scan = async |places: Places, known: Vec<DaemonSite>| {
        let (mut discovery, mut queue) = Machine::discovery(places);
        discovery.known = known;
        let mut sites = discovery.sites.subscribe();
        assert!(discovery.scan().await);
        assert!(sites.has_changed().unwrap(), "the first scan is told, whatever it finds");
        sites.mark_unchanged();
        let mut told = Vec::new();
        for event in queue.try_recv().unwrap() {
            match event.kind {
                EventKind::DaemonFound(site) => told.push(format!("{} found", site.name)),
                EventKind::DaemonGone(name) => told.push(format!("{name} gone")),
                _ => {}
            }
        }
        assert!(discovery.scan().await);
        assert!(!sites.has_changed().unwrap());
        (discovery.known, told)
    };
    let (known, told) = scan(watching(vec![configured("a", &first), configured("b", &second)]), vec![]).await;
    assert_eq!(told, ["a found", "b found"]);
    // One is renamed.
    let (known, told) = scan(watching(vec![configured("c", &first), configured("b", &second)]), known).await;
    assert_eq!(told, ["a gone", "c found"]);
    // A name goes over to another daemon.
    let (known, told) = scan(watching(vec![configured("b", &first)]), known).await;
    assert_eq!(told, ["c gone", "b gone", "b found"]);
    let (_, told) = scan(watching(vec![]), known).await;
    assert_eq!(told, ["b gone"]);
}
