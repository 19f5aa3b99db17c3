//! One log of a daemon on its way to the model: read, dated, and put in order with the daemon's other logs.

use std::collections::VecDeque;
use std::time::Instant;

use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::stamp::StampClock;
use super::tail::{Step, Tail};
use crate::event::{Event, EventKind, Freshness, LogEntry, LogFile};
use crate::identity::DaemonName;
use crate::time::Moment;

/// A log and what was read of it but is not sent yet.
#[derive(Debug)]
pub struct Stream {
    /// Its name inside the daemon's log directory.
    pub name: String,
    /// Which log it is.
    pub file: LogFile,
    /// The file.
    pub tail: Tail,
    clock: StampClock,
    waiting: VecDeque<Waiting>,
    is_drained: bool,
    /// The time of the newest line in this turn: lines keep the order of their file, whatever the clock did.
    turn: Option<Timestamp>,
}

#[derive(Debug)]
struct Waiting {
    order: Timestamp,
    at: Moment,
    freshness: Freshness,
    entry: LogEntry,
}

impl Stream {
    /// A log that nothing was read of.
    pub fn new(name: String, file: LogFile, tail: Tail, zone: TimeZone) -> Stream {
        Stream {
            name,
            file,
            tail,
            clock: StampClock::new(zone),
            waiting: VecDeque::new(),
            is_drained: false,
            turn: None,
        }
    }

    /// Takes another zone from now on.
    pub fn set_zone(&mut self, zone: TimeZone) {
        self.clock.set_zone(zone);
    }

    /// Begins a turn: there may be something to read again.
    pub fn begin_turn(&mut self) {
        self.is_drained = false;
        self.turn = None;
    }

    /// There may be more by now, in the same turn.
    pub fn look_again(&mut self) {
        self.is_drained = false;
    }

    /// Whether nothing of it is under way.
    pub fn is_quiet(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Reads on, if nothing is waiting and there may be more.
    pub fn read(&mut self, buffer: &mut [u8], now: Moment, instant: Instant) -> Step {
        if self.is_drained || !self.waiting.is_empty() {
            return Step::default();
        }
        let (clock, turn, waiting, file) = (&mut self.clock, &mut self.turn, &mut self.waiting, self.file);
        let step = self.tail.step(buffer, instant, |freshness, said| {
            let at = clock.moment(said.stamp, now, freshness);
            let order = turn.map_or(at.wall, |newest| newest.max(at.wall));
            *turn = Some(order);
            waiting.push_back(Waiting { order, at, freshness, entry: said.into_entry(file) });
        });
        self.is_drained = !step.has_more;
        step
    }
}

/// Whether every stream was read to its end and nothing waits.
pub fn are_done(streams: &[Stream]) -> bool {
    streams.iter().all(|stream| stream.is_drained && stream.waiting.is_empty())
}

/// Takes what is ready out of `streams` by time, up to `limit` events. Of lines with the same time a server's come
/// before the control daemon's: the server announces its orderly end before the daemon tells of its exit.
///
/// Unless `all` is wanted, nothing is taken that a stream with more to read might still precede.
pub fn merge(streams: &mut [Stream], daemon: &DaemonName, limit: usize, all: bool) -> Vec<Event> {
    let mut batch = Vec::new();
    while batch.len() < limit {
        if !all && streams.iter().any(|stream| stream.waiting.is_empty() && !stream.is_drained) {
            break;
        }
        let next = streams
            .iter_mut()
            .filter(|stream| !stream.waiting.is_empty())
            .min_by_key(|stream| (stream.waiting[0].order, stream.file == LogFile::Control));
        let Some(waiting) = next.and_then(|stream| stream.waiting.pop_front()) else { break };
        let kind = EventKind::Log(daemon.clone(), waiting.entry);
        batch.push(Event { at: waiting.at, freshness: waiting.freshness, kind });
    }
    batch
}
