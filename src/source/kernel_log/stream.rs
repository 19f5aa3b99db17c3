//! A file or FIFO of kernel-log lines instead of the device.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Mode, OFlags, open};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::cursor::Position;
use super::intake::{Age, Intake};
use super::lines::Lines;
use crate::event::Freshness;
use crate::sys::async_fd;

/// How often a file is looked at for new lines.
const POLL: Duration = Duration::from_millis(200);
/// Reads before others get their turn on the runtime.
const READS: usize = 2;

/// A regular file, followed by its name.
#[derive(Debug)]
pub(super) struct LogFile {
    path: PathBuf,
    file: File,
    lines: Lines,
    /// What was read, up to the end of the last whole line.
    offset: u64,
    /// Bytes that were there before us end here.
    past_end: u64,
    past: Freshness,
    at_end: bool,
}

impl LogFile {
    /// Opens the file where a former run left it, else at its beginning, which is history then.
    pub(super) fn open(path: &Path, kept: Option<&Position>) -> io::Result<LogFile> {
        let file = File::open(path)?;
        let meta = file.metadata()?;
        let is_same = |kept: &Position| match kept {
            Position::File { device, inode, offset, .. } => {
                (*device == meta.dev() && *inode == meta.ino() && *offset <= meta.len()).then_some(*offset)
            }
            _ => None,
        };
        let is_known = matches!(kept, Some(Position::File { path: kept, .. }) if kept == path);
        let offset = kept.filter(|_| is_known).and_then(is_same).unwrap_or(0);
        Ok(LogFile {
            path: path.to_owned(),
            lines: Lines::new(),
            offset,
            past_end: meta.len(),
            past: if is_known { Freshness::CaughtUp } else { Freshness::History },
            at_end: false,
            file,
        })
    }

    pub(super) async fn ready(&self) -> io::Result<()> {
        if self.at_end {
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    pub(super) fn take(&mut self, intake: &mut Intake) -> io::Result<bool> {
        let now = intake.outbox.clock.now();
        for _ in 0..READS {
            let LogFile { file, lines, offset, past_end, past, .. } = self;
            let from = *offset + lines.waiting() as u64;
            let read = |room: &mut [u8]| std::os::unix::fs::FileExt::read_at(file, room, from);
            let mut end_of_line = *offset;
            let count = lines.read(read, |line| {
                end_of_line += line.len() as u64 + 1;
                let age =
                    if end_of_line <= *past_end { Age::Past(*past, None) } else { Age::Live(Duration::ZERO) };
                intake.line(line, age, now);
            })?;
            // Exact also where a line was passed over for its length.
            *offset = from + count as u64 - lines.waiting() as u64;
            if count == 0 {
                self.at_end = true;
                self.follow(intake)?;
                break;
            }
            self.at_end = false;
        }
        let meta = self.file.metadata()?;
        let position = Position::File {
            path: self.path.clone(),
            device: meta.dev(),
            inode: meta.ino(),
            offset: self.offset,
        };
        intake.advance(position);
        Ok(!self.at_end)
    }

    /// At the end of the file: goes on with its successor, or from the beginning when it was cut.
    fn follow(&mut self, intake: &mut Intake) -> io::Result<()> {
        let held = self.file.metadata()?;
        if held.len() < self.offset {
            self.begin_anew();
            return Ok(());
        }
        // Renamed away, the successor not there yet: the old one may still grow.
        let Ok(named) = std::fs::metadata(&self.path) else { return Ok(()) };
        if (named.dev(), named.ino()) != (held.dev(), held.ino()) && named.is_file() {
            let now = intake.outbox.clock.now();
            self.lines.end(|line| intake.line(line, Age::Live(Duration::ZERO), now));
            self.file = File::open(&self.path)?;
            self.begin_anew();
        }
        Ok(())
    }

    fn begin_anew(&mut self) {
        self.lines.end(|_| {});
        self.offset = 0;
        self.past_end = 0;
        self.at_end = false;
    }
}

/// A FIFO, or the standard output of `journalctl`. All of it is new.
#[derive(Debug)]
pub(super) struct Pipe {
    pipe: AsyncFd<OwnedFd>,
    lines: Lines,
}

/// What a read of a pipe gave.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum PipeState {
    /// There may be more.
    More,
    /// Nothing for now.
    Empty,
    /// All writers are gone.
    Ended,
}

impl Pipe {
    /// Takes a descriptor that does not block.
    pub(super) fn new(pipe: OwnedFd) -> io::Result<Pipe> {
        Ok(Pipe { pipe: async_fd::readable(pipe)?, lines: Lines::new() })
    }

    pub(super) async fn ready(&self) -> io::Result<()> {
        self.pipe.readable().await.map(|mut ready| ready.retain_ready())
    }

    /// Hands over whole lines.
    pub(super) fn take(&mut self, mut each: impl FnMut(&[u8])) -> io::Result<PipeState> {
        for _ in 0..READS {
            let pipe = &self.pipe;
            let read = |room: &mut [u8]| {
                pipe.try_io(Interest::READABLE, |pipe| rustix::io::read(pipe, room).map_err(io::Error::from))
            };
            match self.lines.read(read, &mut each) {
                Ok(0) => {
                    self.lines.end(&mut each);
                    return Ok(PipeState::Ended);
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(PipeState::Empty),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(PipeState::More)
    }
}

/// A FIFO by its name. It is opened again when all its writers are gone.
#[derive(Debug)]
pub(super) struct Fifo {
    path: PathBuf,
    pipe: Pipe,
}

impl Fifo {
    pub(super) fn open(path: &Path) -> io::Result<Fifo> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        // Not readable until its first writer comes, and an end only after the last has gone.
        let pipe = Pipe::new(open(path, flags, Mode::empty())?)?;
        Ok(Fifo { path: path.to_owned(), pipe })
    }

    pub(super) async fn ready(&self) -> io::Result<()> {
        self.pipe.ready().await
    }

    pub(super) fn take(&mut self, intake: &mut Intake) -> io::Result<bool> {
        let now = intake.outbox.clock.now();
        let state = self.pipe.take(|line| intake.line(line, Age::Live(Duration::ZERO), now))?;
        if state == PipeState::Ended {
            *self = Fifo::open(&self.path)?;
        }
        Ok(state == PipeState::More)
    }
}

/// Whether a path is a FIFO.
pub(super) fn is_fifo(meta: &std::fs::Metadata) -> bool {
    meta.file_type().is_fifo()
}
