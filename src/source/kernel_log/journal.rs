//! The kernel's messages from the systemd journal, where `/dev/kmsg` may not be opened.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use jiff::Timestamp;
use tokio::process::{Child, Command};

use super::cursor::Position;
use super::intake::{Age, Intake};
use super::recorded::JournalEntry;
use super::stamp::Stamp;
use super::stream::{Pipe, PipeState};
use crate::event::Freshness;

/// Entries that are looked through for GPUs' UUIDs when no cursor says where to begin.
const HISTORY: &str = "--lines=2000";

/// How to get at the journal.
#[derive(Debug, Clone)]
pub(super) struct JournalAccess {
    /// The program.
    pub journalctl: PathBuf,
    /// Where journal files are.
    pub directories: Vec<PathBuf>,
}

impl Default for JournalAccess {
    fn default() -> Self {
        JournalAccess {
            journalctl: "journalctl".into(),
            directories: vec!["/var/log/journal".into(), "/run/log/journal".into()],
        }
    }
}

impl JournalAccess {
    /// Why the journal is of no use; `None` when it can be tried.
    pub(super) fn obstacle(&self) -> Option<String> {
        let has_files =
            |directory: &PathBuf| std::fs::read_dir(directory).is_ok_and(|mut all| all.next().is_some());
        if !self.directories.iter().any(has_files) {
            let directories: Vec<String> =
                self.directories.iter().map(|path| path.display().to_string()).collect();
            return Some(format!("there are no journal files in {}", directories.join(" or ")));
        }
        (!is_program(&self.journalctl)).then(|| format!("there is no {}", self.journalctl.display()))
    }
}

/// Whether a path, or a name on the search path, is a file.
fn is_program(program: &Path) -> bool {
    if program.components().count() > 1 {
        return program.is_file();
    }
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|directory| directory.join(program).is_file()))
}

/// `journalctl`, following.
#[derive(Debug)]
pub(super) struct Journal {
    child: Child,
    pipe: Pipe,
    /// Entries up to here were there before us.
    began: Timestamp,
    past: Freshness,
}

impl Journal {
    pub(super) fn open(
        access: &JournalAccess,
        kept: Option<&Position>,
        began: Timestamp,
    ) -> io::Result<Journal> {
        let mut command = Command::new(&access.journalctl);
        command
            .args(["--follow", "--output=json", "--all", "--quiet"])
            .arg("--output-fields=MESSAGE,SYSLOG_FACILITY,_TRANSPORT");
        let past = if let Some(Position::Journal { cursor }) = kept {
            command.arg("--no-tail").arg(format!("--after-cursor={cursor}"));
            Freshness::CaughtUp
        } else {
            command.arg(HISTORY);
            Freshness::History
        };
        command
            .arg("_TRANSPORT=kernel")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .kill_on_drop(true);
        let mut child = command.spawn()?;
        let output = child.stdout.take().ok_or_else(|| io::Error::other("no standard output"))?;
        let output = output.into_owned_fd()?;
        rustix::fs::fcntl_setfl(&output, rustix::fs::fcntl_getfl(&output)? | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Journal { child, pipe: Pipe::new(output)?, began, past })
    }

    pub(super) async fn ready(&self) -> io::Result<()> {
        self.pipe.ready().await
    }

    pub(super) fn take(&mut self, intake: &mut Intake) -> io::Result<bool> {
        let now = intake.outbox.clock.now();
        let mut cursor = None;
        let (began, past) = (self.began, self.past);
        let state = self.pipe.take(|line| {
            let Some(mut entry) = JournalEntry::parse(line) else {
                if !line.is_empty() {
                    intake.telemetry.source_error("kernel_log", "malformed_record");
                }
                return;
            };
            cursor = entry.cursor.take().or(cursor.take());
            let age = match entry.stamp() {
                Some(Stamp::Wall(stamp)) if stamp <= began => Age::Past(past, None),
                Some(Stamp::Wall(stamp)) => {
                    let ago = now.wall.duration_since(stamp);
                    Age::Live(ago.try_into().unwrap_or_default())
                }
                _ => Age::Live(std::time::Duration::ZERO),
            };
            intake.journal_entry(entry, age, now);
        })?;
        if let Some(cursor) = cursor {
            intake.advance(Position::Journal { cursor });
        }
        if state == PipeState::Ended {
            let status =
                self.child.try_wait()?.map_or("its output ended".to_owned(), |status| status.to_string());
            return Err(io::Error::other(format!("journalctl stopped ({status})")));
        }
        Ok(state == PipeState::More)
    }
}
