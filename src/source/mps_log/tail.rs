//! Follows one log through all that happens to log files.
//!
//! The daemon opens its logs once and keeps writing to them: after a rename it goes on in the renamed file. So what is
//! followed is the file, not its name; the name only tells of successors. Nothing here waits: [`Tail::step`] reads what
//! there is, up to a buffer, and says whether there is more.

use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use super::cursor::{FileCursor, StreamCursor, hash};
pub use super::held::{FileId, HISTORY_LIMIT};
use super::held::{Held, open_regular};
use super::reader::{Context, Counts, Said};
use super::siblings;
use crate::event::{Freshness, LogFile};

/// How long a file that lost its name is kept after it grew last, once a successor is being written.
const RETIRE_AFTER: Duration = Duration::from_secs(600);

/// The same, when its writer is known to have closed it.
const RETIRE_CLOSED_AFTER: Duration = Duration::from_secs(5);

/// How many files of one log are held at once.
const HELD_LIMIT: usize = 8;

/// Why a log cannot be read now.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TailProblem {
    /// Nothing has this name.
    #[error("{0} does not exist")]
    Missing(PathBuf),
    /// It is there but may not be read.
    #[error("{path} cannot be read ({reason})")]
    Refused {
        /// The log.
        path: PathBuf,
        /// What the system said.
        reason: String,
    },
    /// It is a directory, a FIFO or a device.
    #[error("{0} is not a regular file")]
    NotAFile(PathBuf),
}

/// What a step did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Step {
    /// Whether there may be more to read at once.
    pub has_more: bool,
    /// Bytes that were consumed, without history.
    pub bytes: u64,
    /// Lines that were consumed, without history.
    pub counts: Counts,
}

/// Follows one log.
#[derive(Debug)]
pub struct Tail {
    path: PathBuf,
    /// Oldest first.
    held: Vec<Held>,
    /// What became of the last attempt to open `path`.
    problem: Option<TailProblem>,
    /// When `path` was looked at last: a file that existed before did not just begin.
    looked_at: Option<SystemTime>,
    stream: LogFile,
    /// How the newest file that was held begins; what it was when that was looked at last.
    newest: Option<Vec<u8>>,
    /// When names last came or went in the directory, unless that is too short ago to be sure.
    directory_at: Option<SystemTime>,
    /// Files that the daemon has open, where that could be told.
    written: Option<Vec<FileId>>,
    /// Whether what the daemon had open before was seen: by a cursor, or by a look at its open files.
    is_past_known: bool,
    /// Places in files that have no name any more and were not found yet.
    unplaced: Vec<FileCursor>,
    /// Times that lines may have been lost, since they were last asked for.
    losses: Vec<&'static str>,
}

impl Tail {
    /// Follows `path`, whether or not it exists, from where `cursor` says. With no cursor what is there is history.
    pub fn open(
        path: PathBuf,
        stream: LogFile,
        cursor: Option<&StreamCursor>,
        saved_at: Option<SystemTime>,
        now: Instant,
    ) -> Tail {
        let mut tail = Tail {
            path,
            held: Vec::new(),
            problem: None,
            looked_at: None,
            stream,
            newest: cursor.map(|cursor| siblings::beginning_of(&cursor.newest)),
            directory_at: None,
            written: None,
            is_past_known: cursor.is_some(),
            unplaced: Vec::new(),
            losses: Vec::new(),
        };
        for place in cursor.iter().flat_map(|cursor| &cursor.files) {
            tail.restore(place, now);
        }
        tail.look_for_rotated(now);
        let is_resumed = cursor.is_some();
        if let Ok(Some((file, metadata))) = tail.open_successor() {
            let is_news = is_resumed
                && saved_at.is_none_or(|saved| metadata.modified().is_ok_and(|modified| modified >= saved));
            let mut held = Held::new(file, stream, &metadata, 0, Context::default(), now);
            if is_news {
                held.caught_up = metadata.len();
            } else {
                held.make_history(metadata.len(), None);
            }
            tail.hold(held);
        }
        tail
    }

    /// The path that is followed.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Follows another path to the same log: the daemon's root may be reached another way after its restart.
    pub fn set_path(&mut self, path: PathBuf) {
        self.path = path;
    }

    /// Why the log cannot be read; `None` while it can, under whatever name.
    pub fn problem(&self) -> Option<&TailProblem> {
        if self.held.is_empty() { self.problem.as_ref() } else { None }
    }

    /// Bytes that are written but not consumed.
    pub fn lag(&self) -> u64 {
        let unread =
            |held: &Held| held.file.metadata().map_or(0, |found| found.len().saturating_sub(held.offset));
        self.held.iter().map(unread).sum()
    }

    /// Whether history is still being read: a cursor taken now would not be worth saving.
    pub fn is_in_history(&self) -> bool {
        self.held.iter().any(|held| held.history.is_some())
    }

    /// How much history there is to read.
    pub fn history_bytes(&self) -> u64 {
        let left =
            |held: &Held| held.history.as_ref().map_or(0, |past| past.until.saturating_sub(held.offset));
        self.held.iter().map(left).sum()
    }

    /// The places to go on from.
    pub fn cursor(&self, name: &str) -> StreamCursor {
        let place = |held: &Held| FileCursor {
            id: held.id,
            offset: held.offset,
            before_length: held.before.len(),
            before_hash: hash(&held.before),
            is_nameless: held.file.metadata().is_ok_and(|found| found.nlink() == 0),
            context: held.reader.context().clone(),
        };
        // A file of which nothing was read is found again by its name or its beginning; its inode proves nothing.
        let read = self.held.iter().filter(|held| held.end.is_none() && held.offset > 0);
        let files = read.map(place).collect();
        StreamCursor { name: name.to_owned(), files, newest: self.newest() }
    }

    /// Reasons for which lines may have been lost since the last call.
    pub fn take_losses(&mut self) -> Vec<&'static str> {
        std::mem::take(&mut self.losses)
    }

    /// Takes note of the files that the daemon itself has open (`open` reaches each of them, whatever its name), or
    /// that this cannot be told. One that was unknown is followed from now on: it lost its name before we came.
    pub fn set_written(&mut self, written: Option<Vec<(FileId, PathBuf)>>, now: Instant) {
        // What just began under the name is news, not a past that was missed.
        self.look_for_successor(now);
        for (id, link) in written.iter().flatten() {
            if self.held.iter().any(|held| held.id == *id) {
                continue;
            }
            let Some(found) = open_regular(link).ok().flatten() else { continue };
            if FileId::of(&found.1) != *id {
                continue;
            }
            let place =
                self.unplaced.iter().position(|place| place.id == *id && siblings::holds(place, &found));
            let place = place.map(|index| self.unplaced.remove(index));
            let (file, metadata) = found;
            let held = if let Some(place) = &place {
                self.resumed(file, &metadata, place, now)
            } else {
                let mut held = Held::new(file, self.stream, &metadata, 0, Context::default(), now);
                if self.is_past_known && held.beginning() > self.newest() {
                    held.caught_up = metadata.len();
                } else {
                    held.make_history(metadata.len(), None);
                }
                held
            };
            // It is older than what has the name now.
            self.held.insert(0, held);
        }
        self.is_past_known |= written.is_some();
        self.written = written.map(|files| files.into_iter().map(|(id, _)| id).collect());
    }

    /// Reads what there is, at most `buffer`, and gives every line that matters to `sink`.
    pub fn step(
        &mut self,
        buffer: &mut [u8],
        now: Instant,
        mut sink: impl FnMut(Freshness, Said<'_>),
    ) -> Step {
        for index in (0..self.held.len()).rev() {
            self.replace_truncated(index, now);
        }
        self.look_for_rotated(now);
        let mut step = Step::default();
        let mut index = 0;
        while index < self.held.len() {
            let held = &mut self.held[index];
            match held.read(buffer, now, &mut sink) {
                Ok(read) => {
                    let counts = held.reader.take_counts();
                    if !read.is_history {
                        step.bytes += read.bytes;
                        step.counts.recognized += counts.recognized;
                        step.counts.unrecognized += counts.unrecognized;
                    }
                    if read.has_more {
                        step.has_more = true;
                        return step;
                    }
                }
                Err(error) => {
                    self.problem =
                        Some(TailProblem::Refused { path: self.path.clone(), reason: error.to_string() });
                    self.losses.push("read_error");
                    self.held.remove(index);
                    continue;
                }
            }
            if self.is_over(index, now) {
                self.newest = Some(self.newest());
                let over = self.held.remove(index);
                step.counts.unrecognized += u64::from(over.has_rest());
                continue;
            }
            index += 1;
        }
        step.has_more |= self.look_for_successor(now);
        step
    }

    fn hold(&mut self, held: Held) {
        if self.held.len() == HELD_LIMIT {
            self.held.remove(0);
            self.losses.push("too_many_rotations");
        }
        self.held.push(held);
    }

    /// Opens what has the name now. Returns whether that is something new to read.
    fn look_for_successor(&mut self, now: Instant) -> bool {
        let looked_at = self.looked_at;
        let held = self.held.len();
        let (file, metadata) = match self.open_successor() {
            Ok(Some(found)) => found,
            Ok(None) => return false,
            Err(_told) => {
                // The daemon may have begun a file that lost its name, empty, before we saw it.
                self.hold_rotated(now);
                return self.held.len() > held;
            }
        };
        let before = self.held.last().map(|held| held.reader.context().clone().of_next_file());
        let mut held = Held::new(file, self.stream, &metadata, 0, before.unwrap_or_default(), now);
        if looked_at.is_some_and(|looked_at| began_before(&metadata, looked_at)) {
            held.make_history(metadata.len(), None);
        }
        self.hold(held);
        true
    }

    /// The file that has the name, unless it is held already.
    fn open_successor(&mut self) -> Result<Option<(File, Metadata)>, TailProblem> {
        let found = self.stat_and_open();
        self.problem = found.as_ref().err().cloned();
        self.looked_at = Some(SystemTime::now());
        found
    }

    /// Holds the rotated files that nobody has read: those that begin after the newest one that was.
    fn hold_rotated(&mut self, now: Instant) {
        if self.newest.is_none() {
            // The first look: what was rotated before is of no interest.
            self.newest =
                siblings::later_than(&self.path, b"").pop().map(|last| last.beginning).or(Some(Vec::new()));
            return;
        }
        let mut newest = self.newest();
        for rotated in siblings::later_than(&self.path, &newest) {
            let id = FileId::of(&rotated.metadata);
            let is_named = fs::metadata(&self.path).is_ok_and(|named| FileId::of(&named) == id);
            let is_known = |held: &Held| held.id == id || held.begins_like(&rotated.beginning);
            if is_named || self.held.iter().any(is_known) || self.held.len() >= HELD_LIMIT {
                continue;
            }
            let is_earlier = |held: &Held| {
                let own = held.beginning();
                !own.is_empty() && own < rotated.beginning
            };
            let index = self.held.iter().rposition(is_earlier).map_or(0, |earlier| earlier + 1);
            let mut between =
                Held::new(rotated.file, self.stream, &rotated.metadata, 0, Context::default(), now);
            between.caught_up = rotated.metadata.len();
            self.held.insert(index, between);
            newest = rotated.beginning;
        }
        self.newest = Some(newest);
    }

    /// How the newest file begins that was read, be it in part.
    fn newest(&self) -> Vec<u8> {
        let read = self.held.iter().filter(|held| !held.head.is_empty()).map(Held::beginning);
        read.chain(self.newest.clone()).max().unwrap_or_default()
    }

    /// Looks for rotated files when names came or went in the directory, or may have within the resolution of its time.
    fn look_for_rotated(&mut self, now: Instant) {
        /// File times may lag by a timer tick.
        const RESOLUTION: Duration = Duration::from_millis(20);
        let changed_at =
            self.path.parent().and_then(|directory| fs::metadata(directory).ok()?.modified().ok());
        if changed_at == self.directory_at {
            return;
        }
        let is_settled = changed_at.is_none_or(|at| at.elapsed().is_ok_and(|since| since > RESOLUTION));
        self.directory_at = changed_at.filter(|_| is_settled);
        self.hold_rotated(now);
    }

    fn stat_and_open(&self) -> Result<Option<(File, Metadata)>, TailProblem> {
        let told = |error: &io::Error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => TailProblem::Missing(self.path.clone()),
            _ => TailProblem::Refused { path: self.path.clone(), reason: error.to_string() },
        };
        let named = fs::metadata(&self.path).map_err(|error| told(&error))?;
        if self.held.iter().any(|held| held.id == FileId::of(&named)) {
            return Ok(None);
        }
        match open_regular(&self.path).map_err(|error| told(&error))? {
            Some((_, metadata)) if self.held.iter().any(|held| held.id == FileId::of(&metadata)) => Ok(None),
            Some(found) => Ok(Some(found)),
            None => Err(TailProblem::NotAFile(self.path.clone())),
        }
    }

    /// Begins a truncated file again, after what of it a copy has kept.
    fn replace_truncated(&mut self, index: usize, now: Instant) {
        let held = &self.held[index];
        if held.end.is_some() || !held.is_truncated() {
            return;
        }
        let offset = held.offset;
        self.newest = Some(self.newest());
        let held = &self.held[index];
        let copy = siblings::find_copy(&self.path, offset, &held.before, held.id);
        let held = &mut self.held[index];
        let context = held.reader.context().clone();
        let was_catching_up = held.caught_up > 0 && held.offset < held.caught_up;
        held.begin_again();
        if was_catching_up {
            held.caught_up = held.file.metadata().map_or(0, |found| found.len());
        }
        match copy {
            Some((file, metadata)) => {
                let mut rest = Held::new(file, self.stream, &metadata, offset, context, now);
                rest.end = Some(metadata.len());
                rest.caught_up = if was_catching_up { metadata.len() } else { 0 };
                self.held.insert(index, rest);
            }
            None => self.losses.push("truncated"),
        }
    }

    /// Whether a file that was read to its end need not be held any longer.
    fn is_over(&self, index: usize, now: Instant) -> bool {
        let held = &self.held[index];
        if held.end.is_some() {
            return true;
        }
        let idle = now.saturating_duration_since(held.grew_at);
        if idle < RETIRE_CLOSED_AFTER
            || fs::metadata(&self.path).is_ok_and(|named| FileId::of(&named) == held.id)
        {
            return false;
        }
        if self.written.as_ref().is_some_and(|written| !written.contains(&held.id)) {
            return true;
        }
        let has_written_successor = self.held[index + 1..].iter().any(|later| later.offset > 0);
        let is_empty = held.offset == 0;
        let has_successor = index + 1 < self.held.len();
        self.written.is_none()
            && idle >= RETIRE_AFTER
            && (has_written_successor || (is_empty && has_successor))
    }

    /// Holds the file of a cursor again, wherever it is now.
    fn restore(&mut self, place: &FileCursor, now: Instant) {
        match siblings::find_place(&self.path, place) {
            Some(found) => {
                let mut held = self.resumed(found.file, &found.metadata, place, now);
                held.end = found.is_copy.then_some(found.metadata.len());
                self.hold(held);
            }
            None if place.is_nameless => self.unplaced.push(place.clone()),
            None if place.offset > 0 => self.losses.push("gone"),
            None => {}
        }
    }

    /// A file that is read on from a place, after the history before it.
    fn resumed(&self, file: File, metadata: &Metadata, place: &FileCursor, now: Instant) -> Held {
        let mut held = Held::new(file, self.stream, metadata, place.offset, place.context.clone(), now);
        held.caught_up = metadata.len();
        held.make_history(place.offset, Some(place.context.clone()));
        held
    }
}

/// Whether a file existed before `looked_at`, so that it did not begin now but was moved or mounted here.
fn began_before(metadata: &Metadata, looked_at: SystemTime) -> bool {
    /// File times may lag by a timer tick.
    const SLACK: Duration = Duration::from_secs(2);
    let is_before = |at: io::Result<SystemTime>| at.is_ok_and(|at| at + SLACK < looked_at);
    is_before(metadata.created()) || is_before(metadata.modified())
}

#[cfg(test)]
mod tests;
