//! Whether a control daemon lives, without a line in any log.
//!
//! The daemon holds a POSIX write lock on `control_lock` for as long as it lives; `F_GETLK` names the holder (535, 550
//! and 555 alike). `quit` removes the `log` FIFO, a signal leaves every file behind: that tells a daemon that was
//! stopped from one that was killed.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;

use crate::event::{DaemonSite, EventKind, Liveness, LockState, SourceName};
use crate::identity::ProcessId;
use crate::source::process::proc::ProcRoot;
use crate::source::{Outbox, Shutdown};
use crate::sys::async_fd::readable;
use crate::sys::lock::{Holder, holder};

use super::discovery::ScanHandle;

/// How often the lock is looked at: two system calls.
const POLL: Duration = Duration::from_secs(1);
/// The pid file holds a bare number.
const MAX_PID_FILE: usize = 32;

/// Why the lock could not be looked at.
#[derive(Debug, thiserror::Error)]
pub enum LivenessError {
    /// It cannot be opened or read.
    #[error("cannot look at {}: {source}", path.display())]
    Lock {
        /// The lock file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is no plain file.
    #[error("{} is not a file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
}

/// Looks at the lock of a pipe directory. It never creates the file, takes no lock and does not wait.
pub fn lock_state(pipe: &Path, proc: &ProcRoot) -> Result<LockState, LivenessError> {
    let path = pipe.join("control_lock");
    let failed = |source: io::Error| LivenessError::Lock { path: path.clone(), source };
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(&path, flags, Mode::empty()) {
        Ok(file) => file,
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => return Ok(LockState::Absent),
        Err(error) => return Err(failed(error.into())),
    };
    let kind = rustix::fs::fstat(&file).map_err(|error| failed(error.into()))?.st_mode;
    if FileType::from_raw_mode(kind) != FileType::RegularFile {
        return Err(LivenessError::NotAFile { path });
    }
    Ok(match holder(&file).map_err(failed)? {
        Some(Holder::Elsewhere) => LockState::HeldElsewhere,
        Some(Holder::Process(pid)) => match proc.process(pid) {
            Ok((process, _)) => LockState::Held(process),
            // It let go between the two questions, or this /proc shows another pid namespace.
            Err(_) if holder(&file).map_err(failed)?.is_none() => dead(pipe),
            Err(_) => LockState::HeldElsewhere,
        },
        None => dead(pipe),
    })
}

/// Nobody holds the lock: killed, or stopped in order.
fn dead(pipe: &Path) -> LockState {
    if pipe.join("log").symlink_metadata().is_ok() { LockState::Stale } else { LockState::Absent }
}

/// The content of `nvidia-cuda-mps-control.pid` (from 550 on).
fn pid_file(pipe: &Path) -> Option<u32> {
    let path = pipe.join("nvidia-cuda-mps-control.pid");
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(&path, flags, Mode::empty()).ok()?;
    let mut content = [0; MAX_PID_FILE];
    let length = rustix::io::read(&file, &mut content).ok()?;
    std::str::from_utf8(&content[..length]).ok()?.trim().parse().ok()
}

/// Watches the lock of one daemon.
pub(super) struct Watcher {
    pub site: DaemonSite,
    pub proc: ProcRoot,
    pub outbox: Outbox,
    /// How many sessions in a row the daemon left unanswered.
    pub unanswered: watch::Receiver<u32>,
    /// What the querier goes by.
    pub state: watch::Sender<Option<LockState>>,
    /// Told when the daemon comes or goes: others may have as well.
    pub rescan: Option<ScanHandle>,
}

impl Watcher {
    pub async fn run(mut self, mut shutdown: Shutdown) {
        let pipe = self.site.pipe_path();
        let mut told: Option<Liveness> = None;
        let mut health: Option<Result<(), Arc<str>>> = None;
        let mut exit: Option<(ProcessId, AsyncFd<std::os::fd::OwnedFd>)> = None;
        let mut poll = tokio::time::interval(POLL);
        poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = poll.tick() => {}
                () = ended(exit.as_ref()) => exit = None,
                () = changed(&mut self.unanswered) => {}
                () = shutdown.wait() => return,
            }
            let (state, now_healthy) = match lock_state(&pipe, &self.proc) {
                Ok(state) => (state, Ok(())),
                Err(error) => (LockState::Unknown, Err(Arc::from(error.to_string()))),
            };
            if health.as_ref() != Some(&now_healthy) {
                health = Some(now_healthy.clone());
                let name = &self.site.name;
                match &now_healthy {
                    Ok(()) => {
                        tracing::debug!(daemon = %name, "The lock of the control daemon can be looked at.");
                    }
                    Err(error) => tracing::warn!(
                        daemon = %name, %error, "Whether the control daemon lives cannot be seen from its lock."
                    ),
                }
                if !self.outbox.health(SourceName::ControlLock, Some(name), now_healthy).await {
                    return;
                }
            }
            match state {
                LockState::Held(process) if exit.as_ref().is_none_or(|(watched, _)| *watched != process) => {
                    exit = watch_exit(process, &self.proc).map(|fd| (process, fd));
                }
                LockState::Held(_) => {}
                _ => exit = None,
            }
            let liveness = Liveness {
                state,
                unanswered: *self.unanswered.borrow_and_update(),
                pid_file: pid_file(&pipe),
            };
            let is_another = told.as_ref().is_none_or(|told| told.state != state);
            if is_another {
                let name = &self.site.name;
                match state {
                    LockState::Held(process) => {
                        tracing::info!(daemon = %name, pid = process.pid, "The control daemon lives.");
                    }
                    LockState::HeldElsewhere => {
                        tracing::info!(daemon = %name, "The control daemon lives, in another pid namespace.");
                    }
                    LockState::Stale => tracing::warn!(daemon = %name, "The control daemon was killed."),
                    LockState::Absent => tracing::info!(daemon = %name, "No control daemon runs here."),
                    LockState::Unknown => {}
                }
                self.state.send_if_modified(|known| known.replace(state) != Some(state));
                if let (Some(_), Some(rescan)) = (&told, &self.rescan) {
                    rescan.scan_now();
                }
            }
            if told.as_ref() != Some(&liveness) {
                told = Some(liveness.clone());
                let event = EventKind::Liveness(self.site.name.clone(), liveness);
                if !self.outbox.tell(event).await {
                    return;
                }
            }
        }
    }
}

/// A descriptor that becomes readable when this very process ends. `None` (old kernels, another pid namespace): the
/// poll will notice.
fn watch_exit(process: ProcessId, proc: &ProcRoot) -> Option<AsyncFd<std::os::fd::OwnedFd>> {
    if !proc.shows_own_namespace() {
        return None;
    }
    let pid = Pid::from_raw(i32::try_from(process.pid).ok()?)?;
    let fd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    // The pid may have been given to another process before the descriptor was had.
    if !proc.is_alive(process).unwrap_or(false) {
        return None;
    }
    readable(fd).ok()
}

async fn ended(exit: Option<&(ProcessId, AsyncFd<std::os::fd::OwnedFd>)>) {
    match exit {
        Some((_, fd)) => {
            let _ready_or_failed = fd.readable().await;
        }
        None => std::future::pending().await,
    }
}

/// Never completes when nobody holds sessions.
async fn changed(unanswered: &mut watch::Receiver<u32>) {
    if unanswered.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests;
