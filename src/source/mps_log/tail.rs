//! Follows one log through all that happens to log files.
//!
//! The daemon opens its logs once and keeps writing to them: after a rename it goes on in the renamed file. So what is
//! followed is the file, not its name; the name only tells of successors. Nothing here waits: [`Tail::step`] reads what
//! there is, up to a buffer, and says whether there is more.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use super::cursor::{FileCursor, MEMORY, hash};
use super::reader::{Context, Counts, LineReader, Said};
use super::siblings;
use crate::event::{Freshness, LogFile};

/// How much of a log is read to learn the present state.
pub const HISTORY_LIMIT: u64 = 64 * 1024 * 1024;

/// How long a file that lost its name is kept after it grew last, once a successor is being written.
const RETIRE_AFTER: Duration = Duration::from_secs(600);

/// The same, when its writer is known to have closed it.
const RETIRE_CLOSED_AFTER: Duration = Duration::from_secs(5);

/// How many files of one log are held at once.
const HELD_LIMIT: usize = 8;

/// A file, whatever its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileId {
    /// Device.
    pub device: u64,
    /// Inode.
    pub inode: u64,
}

impl FileId {
    /// The identity in `metadata`.
    pub fn of(metadata: &Metadata) -> FileId {
        FileId { device: metadata.dev(), inode: metadata.ino() }
    }
}

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

/// Lines that are read again to learn the present state.
#[derive(Debug)]
struct History {
    /// Lines that begin before this offset are history.
    until: u64,
    /// With a cursor: what the reader remembered there.
    context: Option<Context>,
}

/// A file that is being read.
#[derive(Debug)]
struct Held {
    file: File,
    id: FileId,
    /// Everything before it was consumed.
    offset: u64,
    reader: LineReader,
    /// The first bytes, to notice a file that was truncated and has grown again.
    head: Vec<u8>,
    /// The bytes before `offset`.
    before: Vec<u8>,
    history: Option<History>,
    /// Lines that begin before this offset were written while nobody read.
    caught_up: u64,
    /// A copy of something that was truncated is read up to here.
    end: Option<u64>,
    grew_at: Instant,
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
    /// Files that the daemon has open, where that could be told.
    written: Option<Vec<FileId>>,
    /// Times that lines may have been lost, since they were last asked for.
    losses: Vec<&'static str>,
}

impl Tail {
    /// Follows `path`, whether or not it exists, from where `cursor` says. With no cursor what is there is history.
    pub fn open(
        path: PathBuf,
        stream: LogFile,
        cursor: &[FileCursor],
        saved_at: Option<SystemTime>,
        now: Instant,
    ) -> Tail {
        let mut tail = Tail {
            path,
            held: Vec::new(),
            problem: None,
            looked_at: None,
            stream,
            written: None,
            losses: Vec::new(),
        };
        for place in cursor {
            tail.restore(place, now);
        }
        let is_resumed = !cursor.is_empty();
        if let Ok(Some((file, metadata))) = tail.open_successor(now) {
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
    pub fn cursor(&self) -> Vec<FileCursor> {
        let place = |held: &Held| FileCursor {
            device: held.id.device,
            inode: held.id.inode,
            offset: held.offset,
            before_length: held.before.len(),
            before_hash: hash(&held.before),
            context: held.reader.context().clone(),
        };
        self.held.iter().filter(|held| held.end.is_none()).map(place).collect()
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
            let Ok(Some((file, metadata))) = open_regular(link) else { continue };
            if FileId::of(&metadata) == *id {
                let mut held = Held::new(file, self.stream, &metadata, 0, Context::default(), now);
                held.make_history(metadata.len(), None);
                // It is older than what has the name now.
                self.held.insert(0, held);
            }
        }
        self.written = written.map(|files| files.into_iter().map(|(id, _)| id).collect());
    }

    /// Reads what there is, at most `buffer`, and gives every line that matters to `sink`.
    pub fn step(
        &mut self,
        buffer: &mut [u8],
        now: Instant,
        mut sink: impl FnMut(Freshness, Said<'_>),
    ) -> Step {
        let mut step = Step::default();
        let mut index = 0;
        while index < self.held.len() {
            if self.replace_truncated(index, now) {
                step.has_more = true;
            }
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
        let Ok(Some((file, metadata))) = self.open_successor(now) else { return false };
        let before = self.held.last().map(|held| held.reader.context().clone().of_next_file());
        let mut held = Held::new(file, self.stream, &metadata, 0, before.unwrap_or_default(), now);
        if looked_at.is_some_and(|looked_at| began_before(&metadata, looked_at)) {
            held.make_history(metadata.len(), None);
        }
        self.hold(held);
        true
    }

    /// The file that has the name, unless it is held already. What was rotated away before it could be seen under the
    /// name is held first.
    fn open_successor(&mut self, now: Instant) -> Result<Option<(File, Metadata)>, TailProblem> {
        let found = self.stat_and_open();
        self.problem = found.as_ref().err().cloned();
        self.looked_at = Some(SystemTime::now());
        if matches!(found, Ok(Some(_))) {
            self.hold_rotated(now);
        }
        found
    }

    /// Holds rotated files that were written after the newest one that is held.
    fn hold_rotated(&mut self, now: Instant) {
        let Some(newest) = self.held.iter().rev().find(|held| held.end.is_none()) else { return };
        let after = newest.file.metadata().and_then(|found| found.modified()).ok();
        for (file, metadata) in siblings::written_after(&self.path, after) {
            let mut between = Held::new(file, self.stream, &metadata, 0, Context::default(), now);
            let is_known = |held: &Held| held.id == between.id || held.begins_like(&between.file);
            if !self.held.iter().any(is_known) {
                between.caught_up = metadata.len();
                self.hold(between);
            }
        }
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

    /// Begins a truncated file again, after what of it a copy has kept. Returns whether it was truncated.
    fn replace_truncated(&mut self, index: usize, now: Instant) -> bool {
        let held = &self.held[index];
        if held.end.is_some() || !held.is_truncated() {
            return false;
        }
        let copy = siblings::find_copy(&self.path, held.offset, &held.before, held.id);
        let held = &mut self.held[index];
        let context = held.reader.context().clone();
        let was_catching_up = held.caught_up > 0 && held.offset < held.caught_up;
        held.begin_again();
        if was_catching_up {
            held.caught_up = held.file.metadata().map_or(0, |found| found.len());
        }
        let offset = copy.as_ref().map(|(_, metadata, offset)| (metadata.len(), *offset));
        match (copy, offset) {
            (Some((file, metadata, _)), Some((length, offset))) if length > offset => {
                let mut rest = Held::new(file, self.stream, &metadata, offset, context, now);
                rest.end = Some(length);
                rest.caught_up = if was_catching_up { length } else { 0 };
                self.held.insert(index, rest);
            }
            (Some(_), _) => {}
            (None, _) => self.losses.push("truncated"),
        }
        true
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
        let Some(found) = siblings::find_place(&self.path, place) else {
            if place.offset > 0 {
                self.losses.push("gone");
            }
            return;
        };
        let mut held =
            Held::new(found.file, self.stream, &found.metadata, place.offset, place.context.clone(), now);
        held.caught_up = found.metadata.len();
        if found.is_copy {
            held.end = Some(found.metadata.len());
        }
        held.make_history(place.offset, Some(place.context.clone()));
        self.hold(held);
    }
}

/// What reading one buffer did.
struct Read {
    bytes: u64,
    is_history: bool,
    has_more: bool,
}

impl Held {
    fn new(
        file: File,
        stream: LogFile,
        metadata: &Metadata,
        offset: u64,
        context: Context,
        now: Instant,
    ) -> Held {
        let mut held = Held {
            file,
            id: FileId::of(metadata),
            offset,
            reader: LineReader::resume(stream, context),
            head: Vec::new(),
            before: Vec::new(),
            history: None,
            caught_up: 0,
            end: None,
            grew_at: now,
        };
        held.remember_place();
        held
    }

    /// Reads the memory of the place from the file itself.
    fn remember_place(&mut self) {
        let length = usize::try_from(self.offset).unwrap_or(MEMORY).min(MEMORY);
        self.head = read_exactly(&self.file, 0, length).unwrap_or_default();
        self.before = read_exactly(&self.file, self.offset - length as u64, length).unwrap_or_default();
    }

    /// Makes everything before `until` history, and goes back as far as history reaches.
    fn make_history(&mut self, until: u64, context: Option<Context>) {
        if until == 0 {
            return;
        }
        self.offset = until.saturating_sub(HISTORY_LIMIT);
        let start = if self.offset > 0 { Context::inside_a_line() } else { Context::default() };
        self.reader = LineReader::resume(self.reader.file(), start);
        self.history = Some(History { until, context });
        self.remember_place();
    }

    fn begin_again(&mut self) {
        self.offset = 0;
        self.head.clear();
        self.before.clear();
        self.history = None;
        self.caught_up = 0;
        self.reader = LineReader::resume(self.reader.file(), self.reader.context().clone().of_next_file());
    }

    /// Whether the file is no longer what was read of it.
    fn is_truncated(&self) -> bool {
        let Ok(metadata) = self.file.metadata() else { return false };
        if metadata.len() < self.offset {
            return true;
        }
        let mut head = [0; MEMORY];
        let head = &mut head[..self.head.len()];
        match self.file.read_exact_at(head, 0) {
            Ok(()) => *head != self.head[..],
            Err(error) => error.kind() == io::ErrorKind::UnexpectedEof,
        }
    }

    fn read(
        &mut self,
        buffer: &mut [u8],
        now: Instant,
        sink: &mut impl FnMut(Freshness, Said<'_>),
    ) -> io::Result<Read> {
        let limit = self.history.as_ref().map(|past| past.until).or(self.end).unwrap_or(u64::MAX);
        let room = usize::try_from(limit - self.offset.min(limit)).unwrap_or(usize::MAX).min(buffer.len());
        let length = loop {
            match self.file.read_at(&mut buffer[..room], self.offset) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        let chunk = &buffer[..length];
        let (start, caught_up) = (self.offset, self.caught_up);
        let is_history = self.history.is_some();
        let done = self.reader.read(chunk, |at, said| {
            let freshness = if is_history {
                Freshness::History
            } else if start + (at as u64) < caught_up {
                Freshness::CaughtUp
            } else {
                Freshness::Live
            };
            sink(freshness, said);
        });
        self.advance(&buffer[..done], now);
        if is_history && (done == 0 || self.offset >= limit) {
            self.end_history();
        }
        Ok(Read { bytes: done as u64, is_history, has_more: is_history || length == buffer.len() })
    }

    fn advance(&mut self, consumed: &[u8], now: Instant) {
        if consumed.is_empty() {
            return;
        }
        if self.head.len() < MEMORY && self.offset == self.head.len() as u64 {
            let missing = (MEMORY - self.head.len()).min(consumed.len());
            self.head.extend_from_slice(&consumed[..missing]);
        }
        let kept = MEMORY.saturating_sub(consumed.len()).min(self.before.len());
        self.before.drain(..self.before.len() - kept);
        self.before.extend_from_slice(&consumed[consumed.len().saturating_sub(MEMORY)..]);
        self.offset += consumed.len() as u64;
        self.grew_at = now;
    }

    /// Goes to where news begins. Without a cursor that is the half line at the end, if there is one: it is news once
    /// it is whole.
    fn end_history(&mut self) {
        if let Some(History { until, context: Some(context) }) = self.history.take() {
            self.offset = until;
            self.reader = LineReader::resume(self.reader.file(), context);
            self.remember_place();
        }
    }

    /// Whether `other` is a copy of this file, as far as its beginning tells.
    fn begins_like(&self, other: &File) -> bool {
        let mut head = [0; MEMORY];
        let length = other.read_at(&mut head, 0).unwrap_or(0).min(self.head.len());
        length > 0 && head[..length] == self.head[..length]
    }

    /// Whether something is left that never became a line.
    fn has_rest(&self) -> bool {
        let length = self.end.or_else(|| self.file.metadata().ok().map(|found| found.len()));
        length.is_some_and(|length| length > self.offset)
    }
}

/// Whether a file existed before `looked_at`, so that it did not begin now but was moved or mounted here.
fn began_before(metadata: &Metadata, looked_at: SystemTime) -> bool {
    /// File times may lag by a timer tick.
    const SLACK: Duration = Duration::from_secs(2);
    let is_before = |at: io::Result<SystemTime>| at.is_ok_and(|at| at + SLACK < looked_at);
    is_before(metadata.created()) || is_before(metadata.modified())
}

/// Exactly `length` bytes, `None` when the file is shorter.
pub(super) fn read_exactly(file: &File, offset: u64, length: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, offset).ok()?;
    Some(bytes)
}

/// Opens a regular file for reading; `None` when it is something else, which is not opened: the pipe directory, which
/// may be the log directory too, has a FIFO that nobody else may read.
pub(super) fn open_regular(path: &Path) -> io::Result<Option<(File, Metadata)>> {
    if !fs::metadata(path)?.is_file() {
        return Ok(None);
    }
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    let metadata = file.metadata()?;
    Ok(metadata.is_file().then_some((file, metadata)))
}

#[cfg(test)]
mod tests;
