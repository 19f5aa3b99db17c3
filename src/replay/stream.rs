//! One recorded log, part after part, as events with their times.

use std::collections::VecDeque;
use std::io::{self, BufRead};

use jiff::Timestamp;
use jiff::tz::TimeZone;
use memchr::memmem;

use crate::event::{EventKind, LogFile};
use crate::identity::DaemonName;
use crate::source::kernel_log::line::Line;
use crate::source::kernel_log::recorded;
use crate::source::kernel_log::stamp::StampContext;
use crate::source::mps_log::reader::{Counts, LINE_LIMIT, LineReader};
use crate::source::mps_log::stamp::StampClock;

/// How much of a log is looked at to tell what it is.
const SNIFFED: usize = 256 * 1024;

/// What a log is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A log of an MPS daemon.
    Mps(LogFile),
    /// A kernel log, as records or as people and programs print it.
    Kernel,
}

/// What a log with this name and beginning is; `None` when it is none that is known.
pub fn detect(name: &str, beginning: &[u8]) -> Option<Kind> {
    let beginning = &beginning[..beginning.len().min(SNIFFED)];
    let has = |needle: &[u8]| memmem::find(beginning, needle).is_some();
    let is_control = has(b" Control ");
    let is_server = [&b" Server "[..], b" Other ", b" Client "].into_iter().any(has);
    let is_kernel = has(b"NVRM:") || has(b"kernel:") || has(b"_TRANSPORT") || has(b",-;") || has(b",c;");
    let by_name = |part: &str| name.to_ascii_lowercase().contains(part);
    if by_name("control.log") && !is_kernel {
        return Some(Kind::Mps(if is_server && is_control { LogFile::Merged } else { LogFile::Control }));
    }
    if by_name("server.log") && !is_kernel {
        return Some(Kind::Mps(if is_server && is_control { LogFile::Merged } else { LogFile::Server }));
    }
    match (is_kernel, is_control, is_server) {
        (true, _, _) => Some(Kind::Kernel),
        (false, true, true) => Some(Kind::Mps(LogFile::Merged)),
        (false, true, false) => Some(Kind::Mps(LogFile::Control)),
        (false, false, true) => Some(Kind::Mps(LogFile::Server)),
        (false, false, false) => {
            let kernel_names = ["dmesg", "kmsg", "kern", "messages", "syslog", "journal"];
            kernel_names.into_iter().any(by_name).then_some(Kind::Kernel)
        }
    }
}

/// A log that is being read.
pub(super) struct Stream {
    pub label: String,
    pub daemon: DaemonName,
    pub kind: Kind,
    /// Events whose time no line told.
    pub undated: u64,
    /// Why parts could not be read to their end.
    pub broken_off: Vec<io::Error>,
    parts: VecDeque<Box<dyn BufRead>>,
    mps: LineReader,
    clock: StampClock,
    kernel: recorded::Reader,
    context: StampContext,
    boot: Option<Timestamp>,
    counts: Counts,
    line: Vec<u8>,
    /// Time never goes back within a stream: its order is that of its lines.
    last: Option<Timestamp>,
    ready: VecDeque<(Timestamp, EventKind)>,
}

impl Stream {
    pub fn new(
        label: &str,
        daemon: DaemonName,
        kind: Kind,
        parts: Vec<Box<dyn BufRead>>,
        zone: TimeZone,
        boot: Option<Timestamp>,
        reference: Timestamp,
    ) -> Stream {
        let file = match kind {
            Kind::Mps(file) => file,
            Kind::Kernel => LogFile::Merged,
        };
        Stream {
            label: label.to_owned(),
            daemon,
            kind,
            undated: 0,
            broken_off: Vec::new(),
            parts: parts.into(),
            mps: LineReader::new(file),
            clock: StampClock::new(zone.clone()),
            kernel: recorded::Reader::new(),
            context: StampContext { zone, reference },
            boot,
            counts: Counts::default(),
            line: Vec::new(),
            last: None,
            ready: VecDeque::new(),
        }
    }

    /// Lines read so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The next event and when it happened.
    pub fn next(&mut self) -> Option<(Timestamp, EventKind)> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if !self.read_line() {
                return None;
            }
            let line = std::mem::take(&mut self.line);
            match self.kind {
                Kind::Mps(file) => self.mps_line(file, &line),
                Kind::Kernel => self.kernel_line(&line),
            }
            self.line = line;
        }
    }

    fn mps_line(&mut self, file: LogFile, line: &[u8]) {
        let daemon = self.daemon.clone();
        let (clock, ready, undated, last) =
            (&mut self.clock, &mut self.ready, &mut self.undated, &mut self.last);
        self.mps.read(line, |_, said| {
            let Some(at) = clock.instant(said.stamp) else {
                *undated += 1;
                return;
            };
            *last = (*last).max(Some(at));
            ready.push_back((last.unwrap_or(at), EventKind::Log(daemon.clone(), said.into_entry(file))));
        });
        let counts = self.mps.take_counts();
        self.counts.recognized += counts.recognized;
        self.counts.unrecognized += counts.unrecognized;
    }

    fn kernel_line(&mut self, line: &[u8]) {
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        let Some(found) = self.kernel.line(line) else { return };
        if found.line == Line::Unreadable {
            self.counts.unrecognized += 1;
        } else {
            self.counts.recognized += 1;
        }
        let Some(kind) = found.event().filter(|_| found.is_from_kernel) else { return };
        let at = found.stamp(&self.context).and_then(|stamp| stamp.wall(self.boot));
        let Some(at) = at else {
            self.undated += 1;
            return;
        };
        self.last = self.last.max(Some(at));
        self.ready.push_back((self.last.unwrap_or(at), kind));
    }

    /// Reads the next line with its line feed into `self.line`; `false` at the end of the last part. A line that is
    /// too long is cut: the rest of it comes as lines that no grammar knows. A part that breaks off (the disk, half an
    /// archive) is worth what was read of it.
    fn read_line(&mut self) -> bool {
        self.line.clear();
        while let Some(part) = self.parts.front_mut() {
            let limit = u64::try_from(LINE_LIMIT).unwrap_or(u64::MAX) + 1;
            let error = io::Read::take(&mut *part, limit).read_until(b'\n', &mut self.line).err();
            if error.is_some() || self.line.is_empty() {
                self.parts.pop_front();
            }
            self.broken_off.extend(error);
            if self.line.is_empty() {
                continue;
            }
            if self.line.last() != Some(&b'\n') {
                self.line.push(b'\n');
            }
            return true;
        }
        false
    }
}
