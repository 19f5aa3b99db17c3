//! When and how a place is written down.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::cursor::{CursorError, CursorFile, DaemonCursor};
use super::{SAVE_LATER, SAVE_SOON};
use crate::identity::DaemonName;
use crate::telemetry::Telemetry;

/// While the model has not taken everything yet, the place waits this long.
const POSTPONED: Duration = Duration::from_millis(20);

/// Writes places down: soon after they changed, one at a time, off the runtime's thread.
#[derive(Debug)]
pub(super) struct Saver {
    store: CursorFile,
    daemon: DaemonName,
    telemetry: Telemetry,
    due: Option<Instant>,
    writing: Option<JoinHandle<Result<(), CursorError>>>,
    has_failed: bool,
}

impl Saver {
    pub fn new(store: CursorFile, daemon: DaemonName, telemetry: Telemetry) -> Saver {
        Saver { store, daemon, telemetry, due: None, writing: None, has_failed: false }
    }

    /// The place changed; `matters`: by a line that changed the model.
    pub fn changed(&mut self, matters: bool) {
        let due = Instant::now() + if matters { SAVE_SOON } else { SAVE_LATER };
        if self.store.is_kept() {
            self.due = Some(self.due.map_or(due, |earlier| earlier.min(due)));
        }
    }

    /// Completes when the place should be written; never while one is being written.
    pub async fn wait(&mut self) {
        if let Some(writing) = &mut self.writing {
            let written = writing.await;
            self.writing = None;
            self.finished(written);
        }
        match self.due {
            Some(due) => tokio::time::sleep_until(due).await,
            None => std::future::pending().await,
        }
    }

    /// The model has not taken everything yet.
    pub fn postpone(&mut self) {
        self.due = Some(Instant::now() + POSTPONED);
    }

    /// Begins to write the place; [`Saver::wait`] sees to the end of it.
    pub fn begin(&mut self, cursor: DaemonCursor) {
        self.due = None;
        let store = self.store.clone();
        self.writing = Some(tokio::task::spawn_blocking(move || store.save(cursor)));
    }

    /// Writes the last place and waits for it.
    pub async fn finish(&mut self, cursor: Option<DaemonCursor>) {
        if let Some(writing) = self.writing.take() {
            let written = writing.await;
            self.finished(written);
        }
        if let Some(cursor) = cursor.filter(|_| self.store.is_kept()) {
            self.begin(cursor);
            if let Some(writing) = self.writing.take() {
                let written = writing.await;
                self.finished(written);
            }
        }
    }

    fn finished(&mut self, written: Result<Result<(), CursorError>, tokio::task::JoinError>) {
        let failure = match written {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(error) => Some(error.to_string()),
        };
        match failure {
            Some(error) => {
                self.telemetry.source_error("mps_log", "cursor");
                if !std::mem::replace(&mut self.has_failed, true) {
                    tracing::warn!(
                        daemon = %self.daemon, %error,
                        "The log position cannot be kept; after a restart lines are read again. \
                         Make state.directory writable."
                    );
                }
            }
            None if std::mem::take(&mut self.has_failed) => {
                tracing::info!(daemon = %self.daemon, "The log position is kept again.");
            }
            None => {}
        }
    }
}
