//! Reads a proc file system: the host's own, one mounted elsewhere, or a tree of the same shape in a test.
//!
//! Every read is bounded, and every error names its file. A process is a [`ProcessId`]: callers compare the start time
//! after whatever they did by pid, because the kernel gives pids out again.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use rustix::time::{ClockId, clock_gettime};

use crate::identity::ProcessId;

/// `PROC_SUPER_MAGIC` of `linux/magic.h`.
const PROC_MAGIC: i128 = 0x9fa0;

/// `stat`, `status`: a few hundred bytes to a few KiB.
const SMALL: u64 = 16 * 1024;
/// `cgroup`: at most a path of 4 KiB for each of some fourteen hierarchies.
const CGROUP: u64 = 64 * 1024;
/// The kernel lets an environment grow to megabytes; what a launcher sets stands within this.
const ENVIRON: u64 = 128 * 1024;
/// `mountinfo` of a container.
const MOUNTS: u64 = 1024 * 1024;
/// `/proc/stat`: its line of interrupts grows with the machine.
const MACHINE: u64 = 4 * 1024 * 1024;
/// `argv[0]` is all that is looked at.
const FIRST_ARGUMENT: u64 = 4096;
/// More processes than this are not looked through.
const PROCESSES: usize = 262_144;

/// The base name of the control daemon's program.
const CONTROL_PROGRAM: &str = "nvidia-cuda-mps-control";
/// The base name of the server's program.
const SERVER_PROGRAM: &str = "nvidia-cuda-mps-server";
/// `comm` of both, cut to 15 bytes by the kernel (seen with drivers 535 to 555).
const MPS_COMMAND: &str = "nvidia-cuda-mps";

/// Why something about a process could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ProcError {
    /// There is no such process (any more).
    #[error("{} does not exist", path.display())]
    Gone {
        /// The file.
        path: PathBuf,
    },
    /// The kernel refuses: another user's process, a proc mount with `hidepid`, or a security module.
    #[error(
        "{} may not be read: run as root, or with CAP_SYS_PTRACE, and not under a container's profile of AppArmor or SELinux",
        path.display()
    )]
    Denied {
        /// The file.
        path: PathBuf,
    },
    /// Any other error.
    #[error("cannot read {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The content is not what proc(5) says.
    #[error("{} holds no {item}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What was looked for.
        item: &'static str,
    },
}

impl ProcError {
    pub(super) fn new(path: PathBuf, source: io::Error) -> ProcError {
        match source.kind() {
            io::ErrorKind::NotFound => ProcError::Gone { path },
            io::ErrorKind::PermissionDenied => ProcError::Denied { path },
            _ if source.raw_os_error() == Some(libc::ESRCH) => ProcError::Gone { path },
            _ => ProcError::Io { path, source },
        }
    }

    /// Whether the process is gone, as far as this proc mount tells.
    pub fn is_gone(&self) -> bool {
        matches!(self, ProcError::Gone { .. })
    }

    /// A constant word for the label `reason`.
    pub fn reason(&self) -> &'static str {
        match self {
            ProcError::Gone { .. } => "gone",
            ProcError::Denied { .. } => "denied",
            ProcError::Io { .. } => "io",
            ProcError::Malformed { .. } => "malformed",
        }
    }
}

/// What `/proc/PID/stat` tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stat {
    /// Command name, without its brackets.
    pub command: String,
    /// Field 22, clock ticks from boot.
    pub start: u64,
    state: u8,
    threads: u64,
}

impl Stat {
    /// Whether the process has ended: only its entry is left for the parent to collect.
    ///
    /// A leader that ended before its other threads is shown as a zombie too, and its process still runs.
    pub fn is_dead(&self) -> bool {
        matches!(self.state, b'Z' | b'X' | b'x') && self.threads <= 1
    }
}

/// What `/proc/PID/status` tells.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Status {
    /// The process to which this task belongs; differs from the pid for a thread.
    pub thread_group: Option<u32>,
    /// Real uid.
    pub uid: Option<u32>,
    /// The pid in each nested namespace, from that of the proc mount inwards; empty before Linux 4.1.
    pub namespace_pids: Vec<u32>,
}

/// A proc file system. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ProcRoot {
    root: Arc<Path>,
    is_procfs: bool,
    ticks_per_second: u64,
}

impl ProcRoot {
    /// The proc file system mounted, or imitated, at `root`.
    pub fn new(root: impl Into<PathBuf>) -> ProcRoot {
        let root = root.into();
        let is_procfs = rustix::fs::statfs(&root).is_ok_and(|fs| i128::from(fs.f_type) == PROC_MAGIC);
        ProcRoot {
            root: root.into(),
            is_procfs,
            ticks_per_second: rustix::param::clock_ticks_per_second().max(1),
        }
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// Whether the kernel answers here, and not a tree of plain files.
    pub fn is_procfs(&self) -> bool {
        self.is_procfs
    }

    /// Whether pids here are those that system calls of this process take.
    pub fn shows_own_namespace(&self) -> bool {
        let own = std::fs::read_link(self.root.join("self")).ok();
        let is_me = own.is_some_and(|own| own.as_os_str() == &*std::process::id().to_string());
        self.is_procfs
            && is_me
            && self.status(std::process::id()).is_ok_and(|status| status.namespace_pids.len() <= 1)
    }

    /// Whether other users' processes are hidden here (mount option `hidepid`), so that absence proves nothing.
    pub fn hides_processes(&self) -> bool {
        self.is_procfs && !self.root.join("1/stat").exists()
    }

    /// A file of a process.
    pub fn file(&self, pid: u32, name: &str) -> PathBuf {
        let mut path = self.root.join(pid.to_string());
        path.push(name);
        path
    }

    /// `/proc/PID/stat`.
    pub fn stat(&self, pid: u32) -> Result<Stat, ProcError> {
        let path = self.file(pid, "stat");
        let content = read(&path, SMALL)?;
        parse_stat(&content).ok_or(ProcError::Malformed { path, item: "command, state and start time" })
    }

    /// The process that has this pid now; [`ProcError::Gone`] when it has ended, be it a zombie.
    pub fn process(&self, pid: u32) -> Result<(ProcessId, Stat), ProcError> {
        let stat = self.stat(pid)?;
        if stat.is_dead() {
            return Err(ProcError::Gone { path: self.file(pid, "stat") });
        }
        Ok((ProcessId { pid, start: stat.start }, stat))
    }

    /// Whether this very process still lives. An error means that nobody can tell.
    pub fn is_alive(&self, process: ProcessId) -> Result<bool, ProcError> {
        match self.stat(process.pid) {
            Ok(stat) => Ok(stat.start == process.start && !stat.is_dead()),
            Err(error) if error.is_gone() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// `/proc/PID/status`.
    pub fn status(&self, pid: u32) -> Result<Status, ProcError> {
        let content = read(&self.file(pid, "status"), SMALL)?;
        Ok(parse_status(&content))
    }

    /// `/proc/PID/cgroup`.
    pub fn cgroup(&self, pid: u32) -> Result<Vec<u8>, ProcError> {
        read(&self.file(pid, "cgroup"), CGROUP)
    }

    /// `/proc/PID/mountinfo`.
    pub fn mounts(&self, pid: u32) -> Result<Vec<u8>, ProcError> {
        read(&self.file(pid, "mountinfo"), MOUNTS)
    }

    /// These variables of the environment with which the process was started; nothing else of it is kept.
    ///
    /// May block for as long as the process's memory map is locked: never call it on the runtime's thread.
    pub fn environment(&self, pid: u32, wanted: &[&str]) -> Result<HashMap<String, OsString>, ProcError> {
        let content = read(&self.file(pid, "environ"), ENVIRON)?;
        Ok(select_variables(&content, wanted))
    }

    /// The inode that names the pid namespace of a process.
    pub fn pid_namespace(&self, pid: u32) -> Result<u64, ProcError> {
        let path = self.file(pid, "ns/pid");
        std::fs::metadata(&path).map(|meta| meta.ino()).map_err(|error| ProcError::new(path, error))
    }

    /// Every pid that is shown, in no order.
    pub fn pids(&self) -> Result<Vec<u32>, ProcError> {
        let path = self.root.to_path_buf();
        let entries = std::fs::read_dir(&path).map_err(|error| ProcError::new(path, error))?;
        let pids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        Ok(pids.take(PROCESSES).collect())
    }

    /// When the machine started: `btime`, in whole seconds, by the wall clock as it is set now.
    pub fn boot_time(&self) -> Result<Timestamp, ProcError> {
        let path = self.root.join("stat");
        let content = read(&path, MACHINE)?;
        let seconds = content
            .split(|byte| *byte == b'\n')
            .find_map(|line| number(line.strip_prefix(b"btime ")?))
            .and_then(|seconds| Timestamp::from_second(i64::try_from(seconds).ok()?).ok());
        seconds.ok_or(ProcError::Malformed { path, item: "btime" })
    }

    /// When a process with this start time started, on a machine that started at `boot`.
    pub fn started_at(&self, boot: Timestamp, start: u64) -> Option<Timestamp> {
        let seconds = Duration::from_secs(start / self.ticks_per_second);
        let rest = Duration::from_nanos(1_000_000_000 / self.ticks_per_second)
            * u32::try_from(start % self.ticks_per_second).ok()?;
        boot.checked_add(seconds + rest).ok()
    }

    /// How long ago a process with this start time started. Setting the wall clock changes nothing.
    pub fn age(&self, start: u64) -> Duration {
        let now = clock_gettime(ClockId::Boottime);
        let now = Duration::try_from(now).unwrap_or_default();
        now.saturating_sub(Duration::from_secs_f64(start as f64 / self.ticks_per_second as f64))
    }

    /// What a process on a GPU is, for lists that give nothing but a pid. `None` when it is not there.
    ///
    /// Blocking, but short: two small files, and the command line's first word only for what may be MPS itself.
    pub fn program(&self, pid: u32) -> Option<Program> {
        let (_, stat) = self.process(pid).ok()?;
        let is_mps = match std::fs::read_link(self.file(pid, "exe")) {
            Ok(target) => is_mps_program(target.as_os_str().as_encoded_bytes()),
            Err(_) if stat.command == MPS_COMMAND => {
                let command_line = read(&self.file(pid, "cmdline"), FIRST_ARGUMENT).unwrap_or_default();
                is_mps_program(command_line.split(|byte| *byte == 0).next().unwrap_or_default())
            }
            Err(_) => false,
        };
        Some(Program { command: stat.command.into(), is_mps })
    }
}

/// What a process runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// Command name (`comm`).
    pub command: Arc<str>,
    /// Whether it is an MPS control daemon or server.
    pub is_mps: bool,
}

/// Whether this is the path of one of the two programs of MPS, also when its file has been replaced since.
fn is_mps_program(path: &[u8]) -> bool {
    let path = path.strip_suffix(b" (deleted)").unwrap_or(path);
    let base = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
    base == CONTROL_PROGRAM.as_bytes() || base == SERVER_PROGRAM.as_bytes()
}

/// At most `limit` bytes of a file; the rest is left out.
fn read(path: &Path, limit: u64) -> Result<Vec<u8>, ProcError> {
    let mut content = Vec::new();
    File::open(path)
        .and_then(|file| file.take(limit).read_to_end(&mut content))
        .map_err(|error| ProcError::new(path.to_owned(), error))?;
    Ok(content)
}

/// The command stands in brackets and may itself hold brackets and spaces: its end is the last closing one.
fn parse_stat(content: &[u8]) -> Option<Stat> {
    let open = memchr::memchr(b'(', content)?;
    let close = memchr::memrchr(b')', content)?;
    let command = String::from_utf8_lossy(content.get(open + 1..close)?).into_owned();
    let mut fields = content[close + 1..].split(u8::is_ascii_whitespace).filter(|field| !field.is_empty());
    // Fields 3, 20 and 22, counted from 1 as proc(5) does.
    let state = *fields.next()?.first()?;
    let threads = number(fields.nth(16)?)?;
    let start = number(fields.nth(1)?)?;
    Some(Stat { command, start, state, threads })
}

fn parse_status(content: &[u8]) -> Status {
    let mut status = Status::default();
    for line in content.split(|byte| *byte == b'\n') {
        let Some(colon) = memchr::memchr(b':', line) else { continue };
        let mut numbers = line[colon + 1..]
            .split(u8::is_ascii_whitespace)
            .filter_map(|word| u32::try_from(number(word)?).ok());
        match &line[..colon] {
            b"Tgid" => status.thread_group = numbers.next(),
            b"Uid" => status.uid = numbers.next(),
            b"NSpid" => status.namespace_pids = numbers.collect(),
            _ => {}
        }
    }
    status
}

/// The first of several settings of a variable counts, as it does for `getenv`.
fn select_variables(content: &[u8], wanted: &[&str]) -> HashMap<String, OsString> {
    use std::os::unix::ffi::OsStringExt;

    let mut found = HashMap::new();
    for setting in content.split(|byte| *byte == 0) {
        let Some(equals) = memchr::memchr(b'=', setting) else { continue };
        let Some(name) = wanted.iter().find(|name| name.as_bytes() == &setting[..equals]) else { continue };
        found.entry((*name).to_owned()).or_insert_with(|| OsString::from_vec(setting[equals + 1..].to_vec()));
    }
    found
}

fn number(digits: &[u8]) -> Option<u64> {
    std::str::from_utf8(digits).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests;
