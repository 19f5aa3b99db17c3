//! `incidents.jsonl`: what happened and what was done about it, one JSON object a line.
//!
//! A line is either an incident as it was then, in the form of `/api/v1/incidents` (the last line of an id is the
//! incident), or an [`Action`]. Lines are only ever appended, and are on the disk before [`Journal::append`] returns.
//! A process that is killed at any instruction leaves at most one unfinished last line, which the next
//! [`Journal::open`] cuts off. When superseded lines outweigh the rest, the file is written anew beside the old one
//! and renamed over it.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jiff::Timestamp;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::engine::incident::{Incident, IncidentState};

#[cfg(test)]
mod tests;

/// The journal's name in the state directory.
pub const FILE_NAME: &str = "incidents.jsonl";
const NEW_FILE_NAME: &str = "incidents.jsonl.new";

/// A longer line is not ours: an incident with 3,000 victims takes about 1 MiB.
const MAX_LINE: u64 = 16 << 20;
/// Superseded lines up to this size never cause a rewrite.
const SLACK: u64 = 512 << 10;

/// Why the journal could not be opened or written.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The directory is missing and could not be made, or cannot be used.
    #[error("state directory {0}: {1}")]
    Directory(PathBuf, #[source] io::Error),
    /// Another process has the journal open.
    #[error("state directory {0} is in use by another mps-exporter")]
    InUse(PathBuf),
    /// The file could not be opened, read or repaired.
    #[error("cannot read {0}: {1}")]
    Read(PathBuf, #[source] io::Error),
    /// The file is not where it was opened: removed, or another took its place.
    #[error("{0} was removed or replaced while it was in use")]
    Gone(PathBuf),
    /// The file could not be written; nothing of the call is in it.
    #[error("cannot write {0}: {1}")]
    Write(PathBuf, #[source] io::Error),
}

/// Something that the exporter did: a hook that ran, a daemon that was restarted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Action {
    /// What kind. The first key of its line.
    pub action: ActionKind,
    /// When the line was written.
    pub at: Timestamp,
    /// For a hook: the event that it runs for.
    pub event: Option<Arc<str>>,
    /// The daemon that it is about.
    pub daemon: Option<Arc<str>>,
    /// The incident that it is about.
    pub incident: Option<Arc<str>>,
    /// How it stands.
    pub result: ActionResult,
    /// The exit status in words, or why there is none.
    pub detail: Option<Arc<str>>,
    /// How long it ran.
    pub seconds: Option<f64>,
    /// The end of what it printed.
    pub output: Option<Arc<str>>,
}

/// The kind of an [`Action`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActionKind {
    /// A hook.
    Hook,
    /// A restart of a control daemon.
    Restart,
}

/// How an action stands; also the label `result` of its counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ActionResult {
    /// Its command is about to start.
    Started,
    /// Its command ended with status 0.
    Ok,
    /// Its command ended with another status, or by a signal.
    Failed,
    /// Its command ran past the limit, and its process group was killed.
    Timeout,
    /// Its command could not be started.
    NotStarted,
    /// It was not run because too many waited.
    Dropped,
    /// The limit per hour is reached: no more until the daemon is back.
    GaveUp,
}

impl ActionResult {
    /// Results that a hook's run can have.
    pub const OF_HOOKS: [ActionResult; 5] = [
        ActionResult::Ok,
        ActionResult::Failed,
        ActionResult::Timeout,
        ActionResult::NotStarted,
        ActionResult::Dropped,
    ];
    /// Results that a restart can have.
    pub const OF_RESTARTS: [ActionResult; 5] = [
        ActionResult::Ok,
        ActionResult::Failed,
        ActionResult::Timeout,
        ActionResult::NotStarted,
        ActionResult::GaveUp,
    ];

    /// The label's value.
    pub fn label(self) -> &'static str {
        match self {
            ActionResult::Started => "started",
            ActionResult::Ok => "ok",
            ActionResult::Failed => "failed",
            ActionResult::Timeout => "timeout",
            ActionResult::NotStarted => "not_started",
            ActionResult::Dropped => "dropped",
            ActionResult::GaveUp => "gave_up",
        }
    }
}

/// One line.
#[derive(Debug, Clone, PartialEq)]
pub enum Record {
    /// An incident as it is now.
    Incident(Arc<Incident>),
    /// Something that was done.
    Action(Arc<Action>),
}

/// What an earlier run left.
#[derive(Debug, Default, PartialEq)]
pub struct Restored {
    /// Incidents, each once, as last written, oldest first.
    pub incidents: Vec<Incident>,
    /// Actions, oldest first.
    pub actions: Vec<Action>,
    /// Lines that could not be read. They are skipped.
    pub unreadable: usize,
}

/// The open journal. One process has it at a time.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    /// Holds the lock; synced after a rename.
    directory: File,
    file: File,
    /// Bytes of whole lines. Whatever is beyond them is the rest of a failed write.
    length: u64,
    kept: usize,
    incidents: BTreeMap<Arc<str>, Line>,
    actions: VecDeque<Line>,
    /// A rewrite that failed is not tried again below this length.
    rewrite_above: u64,
}

#[derive(Debug, Clone, Copy)]
struct Line {
    offset: u64,
    length: u64,
    is_open: bool,
}

enum Parsed {
    Incident(Box<Incident>),
    Action(Action),
}

impl Drop for Journal {
    /// Gives the lock back at once. Closing would not: a command that is being started has a copy of the descriptor until
    /// its program runs.
    fn drop(&mut self) {
        let _never_locked = rustix::fs::flock(&self.directory, FlockOperation::Unlock);
    }
}

impl Journal {
    /// Opens or creates the journal in `directory`, repairs its end and reads it back. `kept` bounds the closed
    /// incidents, the open ones and the actions that a rewrite keeps: of each the newest.
    pub fn open(directory: &Path, kept: usize) -> Result<(Journal, Restored), JournalError> {
        let in_directory = |error| JournalError::Directory(directory.to_owned(), error);
        fs::create_dir_all(directory).map_err(in_directory)?;
        let lock = File::open(directory).map_err(in_directory)?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(JournalError::InUse(directory.to_owned())),
            // Some network file systems cannot lock a directory. That must not cost the record.
            Err(error) => {
                tracing::debug!(%error, directory = %directory.display(), "The state directory cannot be locked.");
            }
        }
        let path = directory.join(FILE_NAME);
        // A leftover of a rewrite that was cut short; the journal itself is whole.
        let _absent = fs::remove_file(directory.join(NEW_FILE_NAME));
        let existed = path.exists();
        let file = open_file(&path, false).map_err(|error| JournalError::Read(path.clone(), error))?;
        if !existed {
            lock.sync_all().map_err(in_directory)?;
        }
        let mut journal = Journal {
            path,
            directory: lock,
            file,
            length: 0,
            kept: kept.max(1),
            incidents: BTreeMap::new(),
            actions: VecDeque::new(),
            rewrite_above: 0,
        };
        let restored =
            journal.read_back().map_err(|error| JournalError::Read(journal.path.clone(), error))?;
        Ok((journal, restored))
    }

    /// Changes how many are kept from the next rewrite on.
    pub fn keep(&mut self, kept: usize) {
        self.kept = kept.max(1);
    }

    /// Appends `records`. When it returns, all of them are on the disk; after an error none of them is.
    pub fn append(&mut self, records: &[Record]) -> Result<(), JournalError> {
        if !self.is_in_place() {
            return Err(JournalError::Gone(self.path.clone()));
        }
        let mut bytes = Vec::with_capacity(1024);
        let mut lines = Vec::with_capacity(records.len());
        for record in records {
            let start = bytes.len() as u64;
            let is_open = match record {
                Record::Incident(incident) => serde_json::to_writer(&mut bytes, incident)
                    .map(|()| incident.state != IncidentState::Closed),
                Record::Action(action) => serde_json::to_writer(&mut bytes, action).map(|()| false),
            }
            .map_err(|error| JournalError::Write(self.path.clone(), error.into()))?;
            bytes.push(b'\n');
            let line = Line { offset: self.length + start, length: bytes.len() as u64 - start, is_open };
            lines.push(line);
        }
        self.write(&bytes).map_err(|error| JournalError::Write(self.path.clone(), error))?;
        for (record, line) in records.iter().zip(lines) {
            match record {
                Record::Incident(incident) => {
                    self.incidents.insert(incident.id.clone(), line);
                }
                Record::Action(_) => self.actions.push_back(line),
            }
        }
        if self.wants_rewrite()
            && let Err(error) = self.rewrite()
        {
            // The journal is whole, only longer than it need be.
            tracing::warn!(%error, path = %self.path.display(), "The incident journal could not be shortened.");
            let _absent = fs::remove_file(self.path.with_file_name(NEW_FILE_NAME));
            self.rewrite_above = self.length + self.length / 4 + SLACK;
        }
        Ok(())
    }

    /// Whether what is written here can be found by its name.
    fn is_in_place(&self) -> bool {
        match (fs::metadata(&self.path), self.file.metadata()) {
            (Ok(named), Ok(held)) => (named.dev(), named.ino()) == (held.dev(), held.ino()),
            _ => false,
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.file.metadata()?.len() != self.length {
            self.file.set_len(self.length)?;
        }
        let written = (&self.file).write_all(bytes).and_then(|()| self.file.sync_data());
        match written {
            Ok(()) => self.length += bytes.len() as u64,
            Err(_) => {
                // Should this fail too, the next write or the next open does it.
                let _later = self.file.set_len(self.length);
            }
        }
        written
    }

    /// Reads every line, notes where the newest of each id is, and cuts off an unfinished last one.
    fn read_back(&mut self) -> io::Result<Restored> {
        let mut restored = Restored::default();
        let mut incidents: BTreeMap<Arc<str>, Incident> = BTreeMap::new();
        let mut reader = BufReader::with_capacity(64 << 10, &self.file);
        let mut bytes = Vec::new();
        let mut offset = 0;
        loop {
            bytes.clear();
            let length = read_line(&mut reader, &mut bytes)?;
            if bytes.last() != Some(&b'\n') {
                break;
            }
            let mut line = Line { offset, length, is_open: false };
            offset += length;
            match parse(&bytes) {
                Some(Parsed::Incident(incident)) => {
                    line.is_open = incident.state != IncidentState::Closed;
                    self.incidents.insert(incident.id.clone(), line);
                    incidents.insert(incident.id.clone(), *incident);
                }
                Some(Parsed::Action(action)) => {
                    self.actions.push_back(line);
                    restored.actions.push(action);
                }
                None => restored.unreadable += 1,
            }
        }
        self.length = offset;
        let end = self.file.metadata()?.len();
        if end > self.length {
            tracing::info!(
                path = %self.path.display(),
                bytes = end - self.length,
                "The last line of the incident journal was unfinished and has been cut off."
            );
            self.file.set_len(self.length)?;
            self.file.sync_all()?;
        }
        if restored.unreadable > 0 {
            tracing::warn!(
                path = %self.path.display(),
                lines = restored.unreadable,
                "Lines of the incident journal could not be read and are skipped."
            );
        }
        let keep = self.kept_ids();
        restored.incidents = incidents
            .into_iter()
            .filter(|(id, _)| keep.contains_key(id))
            .map(|(_, incident)| incident)
            .collect();
        let surplus = restored.actions.len().saturating_sub(self.kept);
        restored.actions.drain(..surplus);
        Ok(restored)
    }

    /// The newest closed and the newest open ones: neither pushes out the other. Ids sort by time.
    fn kept_ids(&self) -> BTreeMap<Arc<str>, Line> {
        let newest = |is_open| {
            let of_kind = self.incidents.iter().rev().filter(move |(_, line)| line.is_open == is_open);
            of_kind.take(self.kept).map(|(id, line)| (id.clone(), *line))
        };
        newest(true).chain(newest(false)).collect()
    }

    fn wants_rewrite(&self) -> bool {
        if self.length < self.rewrite_above {
            return false;
        }
        let most = self.kept + self.kept / 10 + 8;
        let live: u64 = self.incidents.values().chain(&self.actions).map(|line| line.length).sum();
        let open = self.incidents.values().filter(|line| line.is_open).count();
        let closed = self.incidents.len() - open;
        open.max(closed).max(self.actions.len()) > most || self.length > 2 * live + SLACK
    }

    /// Writes what is kept into a new file and renames it over the old one.
    fn rewrite(&mut self) -> io::Result<()> {
        let new_path = self.path.with_file_name(NEW_FILE_NAME);
        let new_file = open_file(&new_path, true)?;
        let mut out = BufWriter::with_capacity(64 << 10, &new_file);
        let mut length = 0;
        let mut copy = |line: &Line| -> io::Result<Line> {
            let size = usize::try_from(line.length).map_err(io::Error::other)?;
            let mut bytes = vec![0; size];
            self.file.read_exact_at(&mut bytes, line.offset)?;
            out.write_all(&bytes)?;
            let moved = Line { offset: length, ..*line };
            length += line.length;
            Ok(moved)
        };
        let mut incidents = BTreeMap::new();
        for (id, line) in self.kept_ids() {
            incidents.insert(id, copy(&line)?);
        }
        let surplus = self.actions.len().saturating_sub(self.kept);
        let actions = self.actions.iter().skip(surplus).map(&mut copy).collect::<io::Result<_>>()?;
        out.flush()?;
        drop(out);
        new_file.sync_all()?;
        fs::rename(&new_path, &self.path)?;
        self.file = new_file;
        self.length = length;
        self.incidents = incidents;
        self.actions = actions;
        self.rewrite_above = 0;
        self.directory.sync_all()
    }
}

fn open_file(path: &Path, empty: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).append(true).create(true).mode(0o640);
    let file = options.open(path)?;
    if empty {
        file.set_len(0)?;
    }
    Ok(file)
}

/// Reads a line with its end into `line` and returns its length. Of an overlong line only the beginning is kept.
fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<u64> {
    let mut length = reader.take(MAX_LINE + 1).read_until(b'\n', line)? as u64;
    if length > MAX_LINE {
        line.truncate(64);
        loop {
            let chunk = reader.fill_buf()?;
            let end = memchr::memchr(b'\n', chunk);
            let used = end.map_or(chunk.len(), |end| end + 1);
            reader.consume(used);
            length += used as u64;
            if end.is_some() {
                line.push(b'\n');
            }
            if end.is_some() || used == 0 {
                break;
            }
        }
    }
    Ok(length)
}

fn parse(line: &[u8]) -> Option<Parsed> {
    if line.starts_with(br#"{"action":"#) {
        serde_json::from_slice(line).ok().map(Parsed::Action)
    } else {
        serde_json::from_slice(line).ok().map(Parsed::Incident)
    }
}
