//! A log file that is being read, under whatever name.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::cursor::MEMORY;
use super::reader::{Context, LineReader, Said};
use super::siblings;
use crate::event::{Freshness, LogFile};

/// How much of a log is read to learn the present state.
pub const HISTORY_LIMIT: u64 = 64 * 1024 * 1024;

/// A file, whatever its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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

/// Lines that are read again to learn the present state.
#[derive(Debug)]
pub(super) struct History {
    /// Lines that begin before this offset are history.
    pub until: u64,
    /// With a cursor: what the reader remembered there.
    pub context: Option<Context>,
}

/// What was read of a file before it was truncated. The same may be written into it again: by an editor, or by
/// whoever restores a copy.
#[derive(Debug)]
pub(super) struct Known {
    /// How it began.
    head: Vec<u8>,
    /// How far it was read.
    until: u64,
    /// The stamp of the last line that mattered.
    last: [u8; 23],
}

impl Known {
    /// Whether a file that begins with `start` may be the same again.
    fn begins_like(&self, start: &[u8]) -> bool {
        let first_line = memchr::memchr(b'\n', &self.head).unwrap_or(self.head.len());
        let length = first_line.min(start.len());
        self.head[..length] == start[..length]
    }
}

/// A file that is being read.
#[derive(Debug)]
pub(super) struct Held {
    pub file: File,
    pub id: FileId,
    /// Everything before it was consumed.
    pub offset: u64,
    pub reader: LineReader,
    /// The first bytes, to notice a file that was truncated and has grown again.
    pub head: Vec<u8>,
    /// The bytes before `offset`.
    pub before: Vec<u8>,
    /// The stamp of the last line that mattered.
    last: Option<[u8; 23]>,
    /// What is not told again.
    known: Option<Known>,
    pub history: Option<History>,
    /// Lines that begin before this offset were written while nobody read.
    pub caught_up: u64,
    /// A copy of something that was truncated is read up to here.
    pub end: Option<u64>,
    pub grew_at: Instant,
}

/// What reading one buffer did.
pub(super) struct Read {
    pub bytes: u64,
    pub is_history: bool,
    pub has_more: bool,
}

impl Held {
    pub fn new(
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
            last: None,
            known: None,
            history: None,
            caught_up: 0,
            end: None,
            grew_at: now,
        };
        held.remember_place();
        held
    }

    /// Reads the memory of the place from the file itself.
    pub fn remember_place(&mut self) {
        let length = usize::try_from(self.offset).unwrap_or(MEMORY).min(MEMORY);
        self.head = read_exactly(&self.file, 0, length).unwrap_or_default();
        self.before = read_exactly(&self.file, self.offset - length as u64, length).unwrap_or_default();
    }

    /// Makes everything before `until` history, and goes back as far as history reaches.
    pub fn make_history(&mut self, until: u64, context: Option<Context>) {
        if until == 0 {
            return;
        }
        self.offset = until.saturating_sub(HISTORY_LIMIT);
        let start = if self.offset > 0 { Context::inside_a_line() } else { Context::default() };
        self.reader = LineReader::resume(self.reader.file(), start);
        self.history = Some(History { until, context });
        self.remember_place();
    }

    /// Goes to the beginning of a file that was truncated.
    pub fn begin_again(&mut self) {
        let head = std::mem::take(&mut self.head);
        if let Some(last) = self.last
            && self.known.as_ref().is_none_or(|known| known.until < self.offset)
        {
            self.known = Some(Known { head, until: self.offset, last });
        }
        self.offset = 0;
        self.before.clear();
        self.history = None;
        self.caught_up = 0;
        self.reader = LineReader::resume(self.reader.file(), self.reader.context().clone().of_next_file());
    }

    /// Whether the file is no longer what was read of it.
    pub fn is_truncated(&self) -> bool {
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

    pub fn read(
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
        if start == 0
            && !chunk.is_empty()
            && self.known.as_ref().is_some_and(|known| !known.begins_like(chunk))
        {
            self.known = None;
        }
        let (known, last) = (&self.known, &mut self.last);
        let done = self.reader.read(chunk, |at, said| {
            let at = start + at as u64;
            let stamp = said.stamp.bytes();
            if known.as_ref().is_some_and(|known| at < known.until && stamp <= known.last) {
                return;
            }
            *last = Some(stamp);
            let freshness = if is_history {
                Freshness::History
            } else if at < caught_up {
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

    pub fn advance(&mut self, consumed: &[u8], now: Instant) {
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
    pub fn end_history(&mut self) {
        if let Some(History { until, context: Some(context) }) = self.history.take() {
            self.offset = until;
            self.reader = LineReader::resume(self.reader.file(), context);
            self.remember_place();
        }
    }

    /// How the file begins: as it was read, or as it is.
    pub fn beginning(&self) -> Vec<u8> {
        if self.head.is_empty() {
            siblings::beginning(&self.file)
        } else {
            siblings::beginning_of(&self.head)
        }
    }

    /// Whether a file that begins with `other` begins as this one does.
    pub fn begins_like(&self, other: &[u8]) -> bool {
        let own = self.beginning();
        let length = own.len().min(other.len());
        length > 0 && own[..length] == other[..length]
    }

    /// Whether something is left that never became a line.
    pub fn has_rest(&self) -> bool {
        let length = self.end.or_else(|| self.file.metadata().ok().map(|found| found.len()));
        length.is_some_and(|length| length > self.offset)
    }
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
