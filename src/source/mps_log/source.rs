//! The task that reads one daemon's log, wherever it is.

use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::watch;

use super::cursor::{CursorFile, DaemonCursor};
use super::files::Files;
use super::journal::Journal;
use super::watch::LogWatcher;
use crate::event::{DaemonSite, LogPlace, SourceName};
use crate::source::process::proc::ProcRoot;
use crate::source::{Outbox, Shutdown};
use crate::telemetry::Telemetry;

/// What the readers of all daemons share. Cheap to clone.
#[derive(Debug, Clone)]
pub struct LogSettings {
    /// Where cursors are kept; `None` keeps nothing over a restart.
    pub state_directory: Option<PathBuf>,
    /// The proc file system, to find the files that a daemon has open and the zone that it lives in.
    pub proc: ProcRoot,
    /// The journal reader; a name is looked for in `PATH`.
    pub journalctl: PathBuf,
}

impl LogSettings {
    /// The settings of a node.
    pub fn new(state_directory: Option<PathBuf>, proc: ProcRoot) -> LogSettings {
        LogSettings { state_directory, proc, journalctl: "journalctl".into() }
    }
}

/// Reads the log of one daemon.
#[derive(Debug)]
pub struct MpsLogSource {
    sites: watch::Receiver<DaemonSite>,
    pub(super) settings: LogSettings,
    pub(super) outbox: Outbox,
    pub(super) telemetry: Telemetry,
    pub(super) watcher: LogWatcher,
}

/// Why a reader of one place ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// The program stops, or the model is gone.
    Stopped,
    /// The log is somewhere else now.
    Moved,
}

impl MpsLogSource {
    /// A reader of the log of the daemon that `sites` tells of. A new site of the same daemon (another process after
    /// a restart, say) is taken up without losing the place.
    pub fn new(
        sites: watch::Receiver<DaemonSite>,
        settings: LogSettings,
        outbox: Outbox,
        telemetry: Telemetry,
        watcher: LogWatcher,
    ) -> MpsLogSource {
        MpsLogSource { sites, settings, outbox, telemetry, watcher }
    }

    /// Reads until the program stops or the model is gone. It may be dropped at any moment: what was not accepted by
    /// the model is read again.
    pub async fn run(mut self, mut shutdown: Shutdown) {
        let daemon = self.sites.borrow().name.clone();
        let store = CursorFile::new(self.settings.state_directory.as_deref(), &daemon);
        let mut cursor = match store.load() {
            Ok(cursor) => cursor,
            Err(error) => {
                tracing::warn!(%daemon, %error, "The log position is lost; the log is read as at a first start.");
                self.telemetry.source_error("mps_log", "cursor");
                None
            }
        };
        loop {
            let site = self.sites.borrow_and_update().clone();
            let ended = match &site.log {
                LogPlace::Files | LogPlace::Merged(_) => {
                    let mut files = Files::open(&self, site, store.clone(), cursor.as_ref());
                    let ended = files.run(&mut self.sites, &mut shutdown).await;
                    cursor = Some(files.cursor().unwrap_or_else(|| DaemonCursor::new(&daemon)));
                    ended
                }
                LogPlace::Journal { unit } => {
                    let unit = unit.clone();
                    let mut journal = Journal::open(&self, site, unit, store.clone(), cursor.take());
                    let ended = journal.run(&mut self.sites, &mut shutdown).await;
                    cursor = Some(journal.into_cursor());
                    ended
                }
                LogPlace::Nowhere(reason) => {
                    let reason: Arc<str> = reason.as_str().into();
                    tracing::warn!(%daemon, %reason, "This daemon's log cannot be read.");
                    self.outbox.health(SourceName::DaemonOutput, Some(&daemon), Err(reason)).await;
                    tokio::select! {
                        () = shutdown.wait() => Ended::Stopped,
                        changed = self.sites.changed() => if changed.is_ok() { Ended::Moved } else { Ended::Stopped },
                    }
                }
            };
            if ended == Ended::Stopped {
                return;
            }
        }
    }
}
