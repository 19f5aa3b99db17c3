//! A tree that looks like a proc file system, and processes in namespaces of their own, for tests.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use super::proc::ProcRoot;

/// The fake machine's start.
pub const BOOT_SECONDS: i64 = 1_700_000_000;

/// A directory with the shape of `/proc`.
pub struct FakeProc(TempDir);

impl FakeProc {
    pub fn new() -> FakeProc {
        let directory = tempfile::tempdir().unwrap();
        let stat = format!("cpu  1 2 3\nintr 5 0\nbtime {BOOT_SECONDS}\nprocesses 9\n");
        std::fs::write(directory.path().join("stat"), stat).unwrap();
        FakeProc(directory)
    }

    pub fn root(&self) -> ProcRoot {
        ProcRoot::new(self.0.path())
    }

    /// A process of uid 1000 in the namespace of the tree.
    pub fn process(&self, pid: u32, command: &str, start: u64) {
        self.write(
            pid,
            "stat",
            &format!("{pid} ({command}) S 1 {pid} {pid} 0 -1 4194304 9 0 0 0 1 2 0 0 20 0 1 0 {start} 1 1"),
        );
        self.write(pid, "status", &format!("Name:\t{command}\nTgid:\t{pid}\nUid:\t1000\t1000\t1000\t1000\n"));
    }

    pub fn write(&self, pid: u32, name: &str, content: &str) {
        let path = self.root().file(pid, name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    pub fn link(&self, pid: u32, name: &str, target: &str) {
        symlink(target, self.root().file(pid, name)).unwrap();
    }

    pub fn remove(&self, pid: u32) {
        std::fs::remove_dir_all(self.0.path().join(pid.to_string())).unwrap();
    }
}

/// A process that runs in a pid namespace of its own; `None` where that is not allowed.
pub struct Nested(Child);

impl Nested {
    pub fn start(script: &str) -> Option<Nested> {
        if !rustix::process::getuid().is_root() {
            eprintln!("skipped: a pid namespace needs root");
            return None;
        }
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "sh", "-c", script]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        if line.trim() == "ready" {
            return Some(Nested(child));
        }
        child.wait().unwrap();
        eprintln!("skipped: no pid namespace can be made here");
        None
    }
}

impl Drop for Nested {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _gone = self.0.wait();
    }
}

/// The host's pid of the process `sleep <word>`, waited for.
pub fn find_sleeper(word: &str) -> u32 {
    let proc = ProcRoot::new("/proc");
    let is_it = |pid: &u32| {
        std::fs::read(proc.file(*pid, "cmdline"))
            .is_ok_and(|line| line == format!("sleep\0{word}\0").into_bytes())
    };
    let mut found = None;
    for _ in 0..100 {
        found = proc.pids().unwrap().into_iter().find(is_it);
        if found.is_some() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    found.unwrap()
}
