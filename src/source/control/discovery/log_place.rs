//! Where a daemon's log lines can be read.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::config::LogChoice;
use crate::event::LogPlace;
use crate::source::process::cgroup::{Placement, placement};
use crate::source::process::pod_logs::PodLogs;
use crate::source::process::proc::ProcRoot;

use super::process::DaemonProcess;

/// Finds the log of a daemon. `None` for `process`: no daemon runs, or nothing is known of its process.
pub fn find(
    choice: &LogChoice,
    process: Option<&DaemonProcess>,
    proc: &ProcRoot,
    pods: &Path,
) -> Option<LogPlace> {
    match choice {
        LogChoice::Files => Some(LogPlace::Files),
        LogChoice::Path(path) => Some(LogPlace::Merged(path.clone())),
        LogChoice::Journal => {
            let unit = process.and_then(|process| unit(&placement_of(process, proc)?));
            Some(LogPlace::Journal { unit })
        }
        LogChoice::Auto => process.map(|process| {
            if process.is_foreground { standard_output(process, proc, pods) } else { LogPlace::Files }
        }),
    }
}

/// Where the standard output of a `-f` daemon goes.
fn standard_output(process: &DaemonProcess, proc: &ProcRoot, pods: &Path) -> LogPlace {
    let nowhere = |reason: String| LogPlace::Nowhere(reason);
    let link = proc.file(process.process.pid, "fd/1");
    let target = match std::fs::read_link(&link) {
        Ok(target) => target,
        Err(error) => {
            return nowhere(format!(
                "where the daemon's standard output goes may not be seen: {}: {error}; run as root, or set `log` for this daemon",
                link.display()
            ));
        }
    };
    let kind = std::fs::metadata(&link).map(|meta| meta.file_type());
    if kind.as_ref().is_ok_and(std::fs::FileType::is_file) {
        return LogPlace::Merged(super::under(&root_of(process), &target));
    }
    let placement = placement_of(process, proc);
    if kind.as_ref().is_ok_and(FileTypeExt::is_socket) {
        return match &placement {
            Some(Placement::Pod { .. } | Placement::Container { .. }) | None => nowhere(
                "the daemon's standard output is a socket that is not a systemd unit's; set `log` for this daemon".into(),
            ),
            Some(placement) => LogPlace::Journal { unit: unit(placement) },
        };
    }
    match placement {
        Some(Placement::Pod { uid, container }) => pod_log(pods, &uid, container.as_deref())
            .map_or_else(
                || nowhere(format!(
                    "the daemon runs in pod {uid}, whose log is not below {}; mount it, or set `log` for this daemon",
                    pods.display()
                )),
                LogPlace::Merged,
            ),
        Some(Placement::Container { id }) => nowhere(format!(
            "the daemon runs in container {id}, and its runtime keeps its output; set `log` for this daemon"
        )),
        _ => nowhere(format!(
            "the daemon's standard output is {}, which only its reader sees; set `log` for this daemon",
            target.display()
        )),
    }
}

/// The newest log of a pod's container.
fn pod_log(pods: &Path, uid: &str, container: Option<&str>) -> Option<PathBuf> {
    let now = Instant::now();
    let mut names = PodLogs::new(pods.to_owned());
    let known = container.and_then(|id| names.container(id, now));
    let pod = match &known {
        Some(known) => known.pod.clone(),
        None => names.pod(uid, now)?,
    };
    let container = known.map(|known| known.container).or_else(|| names.only_container(uid))?;
    let folder = pods.join(format!("{}_{}_{uid}", pod.namespace, pod.pod)).join(&*container);
    let newest = std::fs::read_dir(&folder)
        .ok()?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".log")?.parse::<u32>().ok())
        .max()?;
    Some(folder.join(format!("{newest}.log")))
}

/// The unit whose journal holds a process's output.
fn unit(placement: &Placement) -> Option<String> {
    match placement {
        Placement::Unit { unit } => unit.rsplit('/').next().map(str::to_owned),
        _ => None,
    }
}

/// Empty when the daemon sees the same files as we do.
fn root_of(process: &DaemonProcess) -> PathBuf {
    let is_ours =
        super::identity(&process.root).is_some_and(|root| Some(root) == super::identity(Path::new("/")));
    if is_ours { PathBuf::new() } else { process.root.clone() }
}

fn placement_of(process: &DaemonProcess, proc: &ProcRoot) -> Option<Placement> {
    placement(&proc.cgroup(process.process.pid).ok()?, false)
}
