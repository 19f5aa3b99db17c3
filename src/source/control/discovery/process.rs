//! Control daemons among the processes.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use jiff::Timestamp;

use crate::identity::ProcessId;
use crate::source::process::proc::{ProcError, ProcRoot};

use super::layout;
use crate::source::control::binary::PROGRAM;

/// What the kernel leaves of the program's name in `comm`; the server's is the same.
const COMMAND: &str = "nvidia-cuda-mps";
/// What is read of a command line.
const MAX_COMMAND_LINE: u64 = 64 * 1024;

/// A control daemon's process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaemonProcess {
    /// The process.
    pub process: ProcessId,
    /// When it started.
    pub started_at: Option<Timestamp>,
    /// `-f`: it writes no log files.
    pub is_foreground: bool,
    /// Its settings; an error when its environment may not be read.
    pub settings: Result<Settings, String>,
    /// Its root directory, as we reach it.
    pub root: PathBuf,
}

/// What a daemon was started with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// `CUDA_MPS_PIPE_DIRECTORY`, or the default.
    pub pipe_directory: PathBuf,
    /// `CUDA_MPS_LOG_DIRECTORY`, or the default.
    pub log_directory: PathBuf,
    /// `CUDA_VISIBLE_DEVICES`.
    pub visible_devices: Option<String>,
}

/// The control daemons that run, oldest first. Blocking, without bound: an environment is only readable while the
/// process's memory map is not locked.
pub fn daemons(proc: &ProcRoot) -> Result<Vec<DaemonProcess>, ProcError> {
    let boot = proc.boot_time().ok();
    let mut found: Vec<DaemonProcess> =
        proc.pids()?.into_iter().filter_map(|pid| daemon(proc, boot, pid)).collect();
    found.sort_by_key(|daemon| (daemon.process.start, daemon.process.pid));
    Ok(found)
}

fn daemon(proc: &ProcRoot, boot: Option<Timestamp>, pid: u32) -> Option<DaemonProcess> {
    // `stat` never blocks, and rules out everybody else.
    let (process, stat) = proc.process(pid).ok()?;
    if stat.command != COMMAND {
        return None;
    }
    let is_foreground = mode(&command_line(proc, pid)?)?;
    if let Ok(program) = std::fs::read_link(proc.file(pid, "exe"))
        && !is_named(program.as_os_str().as_bytes(), PROGRAM)
    {
        return None;
    }
    let names = ["CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES"];
    let settings = proc.environment(pid, &names).map_err(|error| error.to_string()).map(|mut set| {
        let working_directory = std::fs::read_link(proc.file(pid, "cwd")).unwrap_or_default();
        let mut directory = |name: &str, default: &str| {
            let given = set.remove(name).filter(|value| !value.is_empty());
            working_directory.join(given.map_or_else(|| PathBuf::from(default), PathBuf::from))
        };
        Settings {
            pipe_directory: directory(names[0], layout::DEFAULT_PIPE),
            log_directory: directory(names[1], layout::DEFAULT_LOG),
            visible_devices: set.remove(names[2]).map(|devices| devices.to_string_lossy().into_owned()),
        }
    });
    Some(DaemonProcess {
        process,
        started_at: boot.and_then(|boot| proc.started_at(boot, process.start)),
        is_foreground,
        settings,
        root: proc.file(pid, "root"),
    })
}

fn command_line(proc: &ProcRoot, pid: u32) -> Option<Vec<u8>> {
    let mut content = Vec::new();
    let file = std::fs::File::open(proc.file(pid, "cmdline")).ok()?;
    file.take(MAX_COMMAND_LINE).read_to_end(&mut content).ok()?;
    Some(content)
}

/// Whether this is a control daemon's command line, and then whether it stays in the foreground. The same program
/// without `-d` and `-f` is somebody's client of a daemon.
fn mode(command_line: &[u8]) -> Option<bool> {
    let mut arguments = command_line.split(|byte| *byte == 0);
    if !is_named(arguments.next()?, PROGRAM) {
        return None;
    }
    arguments.find_map(|argument| match argument {
        b"-d" => Some(false),
        b"-f" => Some(true),
        _ => None,
    })
}

fn is_named(path: &[u8], name: &str) -> bool {
    let path = path.strip_suffix(b" (deleted)").unwrap_or(path);
    Path::new(OsStr::from_bytes(path)).file_name() == Some(OsStr::new(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_is_told_from_its_clients_and_servers() {
        for (line, expected) in [
            ("/usr/bin/nvidia-cuda-mps-control\0-d\0", Some(false)),
            ("nvidia-cuda-mps-control\0-f\0", Some(true)),
            ("nvidia-cuda-mps-control\0-multiuser-server\0-d\0", Some(false)),
            ("nvidia-cuda-mps-control\0", None),
            ("nvidia-cuda-mps-server\0-d\0", None),
            ("grep\0nvidia-cuda-mps-control\0-d\0", None),
            ("", None),
        ] {
            assert_eq!(mode(line.as_bytes()), expected, "{line:?}");
        }
    }

    #[test]
    fn a_replaced_program_is_still_one() {
        assert!(is_named(b"/usr/bin/nvidia-cuda-mps-control (deleted)", PROGRAM));
        assert!(!is_named(b"/usr/bin/nvidia-cuda-mps-control-wrapper", PROGRAM));
    }
}
