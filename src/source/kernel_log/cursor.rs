//! How far the kernel log was read, kept over a restart.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tracing::warn;

use crate::telemetry::Telemetry;

const FILE: &str = "kernel-log.cursor";
/// After events were sent the cursor is written at once, but not more often than this.
const SPACING: Duration = Duration::from_millis(100);
/// When only noise was read, it may wait.
const LAZY: Duration = Duration::from_secs(5);

/// How far it was read. What is at or before it was sent to the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Position {
    /// In the records of a boot.
    Device {
        boot_id: String,
        sequence: u64,
        /// How far the kernel's clock is behind the monotonic one.
        skew_nanos: Option<i64>,
    },
    /// In a file.
    File { path: PathBuf, device: u64, inode: u64, offset: u64 },
    /// In the journal, by its own cursor.
    Journal { cursor: String },
}

/// The position, and the file that keeps it.
#[derive(Debug)]
pub(super) struct Cursor {
    path: Option<PathBuf>,
    position: Option<Position>,
    written_at: Option<Instant>,
    due: Option<Instant>,
    has_failed: bool,
    telemetry: Telemetry,
}

impl Cursor {
    /// The cursor that a former run left in this directory. `None`: nothing is kept.
    pub(super) fn load(directory: Option<PathBuf>, telemetry: Telemetry) -> Cursor {
        let path = directory.map(|directory| directory.join(FILE));
        let position = path.as_deref().and_then(|path| match fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .inspect_err(|error| {
                    let path = path.display();
                    warn!(%path, %error, "The kernel-log cursor cannot be read; the log is taken as history.");
                })
                .ok(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                let path = path.display();
                warn!(%path, %error, "The kernel-log cursor cannot be read; the log is taken as history.");
                None
            }
        });
        Cursor { path, position, written_at: None, due: None, has_failed: false, telemetry }
    }

    pub(super) fn position(&self) -> Option<&Position> {
        self.position.as_ref()
    }

    /// Moves on. It is written soon when events came with it, else later.
    pub(super) fn advance(&mut self, position: Position, had_events: bool) {
        if self.position.as_ref() == Some(&position) {
            return;
        }
        self.position = Some(position);
        let earliest = self.written_at.map_or_else(Instant::now, |last| last + SPACING);
        let due = if had_events { earliest } else { Instant::now() + LAZY };
        self.due = Some(self.due.map_or(due, |known| known.min(due)));
    }

    /// When it wants to be written.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Writes it if it is due. Call it only while nothing that was read waits to be sent.
    pub(super) fn write_if_due(&mut self) {
        if self.due.is_some_and(|due| due <= Instant::now()) {
            self.write();
        }
    }

    /// Writes what is not written yet. Call it only while nothing that was read waits to be sent.
    pub(super) fn write(&mut self) {
        if self.due.take().is_none() {
            return;
        }
        self.written_at = Some(Instant::now());
        let (Some(path), Some(position)) = (&self.path, &self.position) else { return };
        match replace(path, position) {
            Ok(()) => self.has_failed = false,
            Err(error) => {
                self.telemetry.source_error("kernel_log", "cursor");
                if !std::mem::replace(&mut self.has_failed, true) {
                    let path = path.display();
                    warn!(%path, %error, "The kernel-log cursor cannot be written: a restart may repeat or miss Xids.");
                }
            }
        }
    }
}

/// Replaces the file in one step. It is not forced to the disk: after a crash of the whole machine there is another
/// boot, whose records are all new.
fn replace(path: &Path, position: &Position) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    let new = path.with_extension("new");
    let mut file = File::create(&new)?;
    file.write_all(&serde_json::to_vec(position)?)?;
    drop(file);
    fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn journal(cursor: &str) -> Position {
        Position::Journal { cursor: cursor.into() }
    }

    fn load(directory: &Path) -> Cursor {
        Cursor::load(Some(directory.to_owned()), Telemetry::new())
    }

    #[tokio::test(start_paused = true)]
    async fn events_are_noted_at_once_and_noise_later() {
        let folder = tempfile::tempdir().unwrap();
        let directory = folder.path().join("not/there/yet");
        let mut cursor = load(&directory);
        assert_eq!(cursor.position(), None);
        cursor.advance(journal("a"), true);
        cursor.write_if_due();
        assert_eq!(load(&directory).position(), Some(&journal("a")));

        cursor.advance(journal("b"), true);
        cursor.write_if_due();
        assert_eq!(load(&directory).position(), Some(&journal("a")), "not twice within the spacing");
        tokio::time::advance(SPACING).await;
        cursor.write_if_due();
        assert_eq!(load(&directory).position(), Some(&journal("b")));

        cursor.advance(journal("c"), false);
        tokio::time::advance(SPACING).await;
        cursor.write_if_due();
        assert_eq!(load(&directory).position(), Some(&journal("b")), "noise can wait");
        cursor.write();
        assert_eq!(load(&directory).position(), Some(&journal("c")));
    }

    #[tokio::test]
    async fn a_broken_file_is_no_cursor() {
        let folder = tempfile::tempdir().unwrap();
        for broken in ["", "{", "{\"journal\":{}}", "null"] {
            fs::write(folder.path().join(FILE), broken).unwrap();
            assert_eq!(load(folder.path()).position(), None, "{broken}");
        }
    }

    #[tokio::test]
    async fn without_a_directory_nothing_is_written() {
        let mut cursor = Cursor::load(None, Telemetry::new());
        cursor.advance(journal("a"), true);
        cursor.write();
        assert_eq!(cursor.position(), Some(&journal("a")));
        assert_eq!(cursor.due(), None);
    }
}
