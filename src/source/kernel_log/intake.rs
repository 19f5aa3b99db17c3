//! What all inputs share: reading lines, waiting events, the cursor.

use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use rustix::time::{ClockId, clock_gettime};
use tokio::time::Instant;
use tracing::warn;

use super::cursor::{Cursor, Position};
use super::line::Line;
use super::pending::Pending;
use super::record::Record;
use super::recorded::{Found, JournalEntry, Reader};
use super::stamp::{Stamp, StampContext};
use crate::event::{EventKind, Freshness, SourceHealth, SourceName};
use crate::source::{Outbox, Room, live};
use crate::telemetry::Telemetry;
use crate::time::Moment;

/// Turns lines into events that wait.
#[derive(Debug)]
pub(super) struct Intake {
    pub outbox: Outbox,
    pub telemetry: Telemetry,
    pub cursor: Cursor,
    reader: Reader,
    judge: Judge,
}

/// How a line relates to what was read before.
#[derive(Debug, Clone, Copy)]
pub(super) enum Age {
    /// It happened now, or that long ago on the monotonic clock.
    Live(Duration),
    /// It was there before this program looked. The moment is the line's own, where it tells one that can be true.
    Past(Freshness, Option<Duration>),
    /// A former run has sent it; only what the model forgot with that run is sent again.
    Known,
}

impl Intake {
    pub(super) fn new(outbox: Outbox, telemetry: Telemetry, cursor: Cursor) -> Intake {
        let judge = Judge { pending: Pending::default(), telemetry: telemetry.clone(), has_warned: false };
        Intake { outbox, telemetry, cursor, reader: Reader::new(), judge }
    }

    /// Another input begins: nothing of the last one is half read.
    pub(super) fn restart(&mut self) {
        self.reader = Reader::new();
    }

    /// Takes a record.
    pub(super) fn record(&mut self, record: &Record<'_>, age: Age, now: Moment) {
        if let Some(found) = self.reader.record(record) {
            self.judge.take(&found, age, now);
        }
    }

    /// Takes a line of a recorded log.
    pub(super) fn line(&mut self, line: &[u8], age: Age, now: Moment) {
        if let Some(found) = self.reader.line(line) {
            self.judge.take(&found, age, now);
        }
    }

    /// Takes an entry of the journal.
    pub(super) fn journal_entry(&mut self, entry: JournalEntry, age: Age, now: Moment) {
        if let Some(found) = self.reader.journal_entry(entry) {
            self.judge.take(&found, age, now);
        }
    }

    /// The source works. It waits its turn with the other events.
    pub(super) fn works(&mut self) {
        let health = SourceHealth { source: SourceName::KernelLog, daemon: None, state: Ok(()) };
        self.judge.pending.tell(live(self.outbox.clock.now(), EventKind::Source(health)));
    }

    /// Whether events wait.
    pub(super) fn has_events(&self) -> bool {
        !self.judge.pending.is_empty()
    }

    /// Everything up to here was read.
    pub(super) fn advance(&mut self, position: Position) {
        let had_events = self.has_events();
        self.cursor.advance(position, had_events);
    }

    /// When the cursor is to be written; never while events wait, for it says that they were sent.
    pub(super) fn cursor_due(&self) -> Option<Instant> {
        if self.has_events() { None } else { self.cursor.due() }
    }

    /// Sends what waits.
    pub(super) fn send(&mut self, room: Room<'_>) {
        let (events, dropped) = self.judge.pending.take();
        room.send(events);
        if dropped > 0 {
            self.telemetry.source_error("kernel_log", "overflow");
            warn!(
                dropped,
                "The kernel logged more distinct events at once than can be kept; some were dropped."
            );
        }
        self.cursor.write_if_due();
    }

    /// The program stops.
    pub(super) fn finish(&mut self) {
        if !self.has_events() {
            self.cursor.write();
        }
    }
}

/// Decides what becomes of a line.
#[derive(Debug)]
struct Judge {
    pending: Pending,
    telemetry: Telemetry,
    /// Whether people were told of lines that no kernel wrote.
    has_warned: bool,
}

impl Judge {
    fn take(&mut self, found: &Found<'_>, age: Age, now: Moment) {
        let is_news = matches!(age, Age::Live(_) | Age::Past(Freshness::CaughtUp, _));
        if !found.is_from_kernel {
            if is_news {
                self.telemetry.kmsg_injected();
                if !std::mem::replace(&mut self.has_warned, true) {
                    let line = String::from_utf8_lossy(found.text);
                    warn!(%line, "A process wrote a line of the GPU driver into the kernel log; such lines are refused.");
                }
            }
            return;
        }
        if found.line == Line::Unreadable {
            if is_news {
                self.telemetry.source_error("kernel_log", "unreadable_line");
            }
            return;
        }
        let (at, freshness) = match age {
            Age::Live(ago) => (before(now, ago), Freshness::Live),
            Age::Past(freshness, Some(ago)) => (before(now, ago), freshness),
            Age::Past(freshness, None) => (moment_of(found, now), freshness),
            Age::Known if matches!(found.line, Line::GpuUuid(..)) => (now, Freshness::History),
            Age::Known => return,
        };
        self.pending.add(&found.line, found.text, at, freshness);
    }
}

/// When a recorded line was written, or now where that is unknown or lies ahead.
fn moment_of(found: &Found<'_>, now: Moment) -> Moment {
    let context = StampContext { zone: TimeZone::system(), reference: now.wall };
    match found.stamp(&context) {
        Some(Stamp::Wall(wall)) if wall <= now.wall => now.at_wall(wall),
        Some(Stamp::SinceBoot(since)) => monotonic().checked_sub(since).map_or(now, |ago| before(now, ago)),
        _ => now,
    }
}

/// The moment `ago` earlier on both clocks.
pub(super) fn before(now: Moment, ago: Duration) -> Moment {
    let wall = now.wall.checked_sub(ago).unwrap_or(Timestamp::MIN);
    Moment { wall, mono: now.mono.before(ago) }
}

/// The clock that the kernel's own is nearest to: both stop while the machine is suspended.
pub(super) fn monotonic() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0))
}
