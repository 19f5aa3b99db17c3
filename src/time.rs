//! Time as the model sees it: a wall clock for people, a monotonic one for windows.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

/// When something happened.
///
/// `wall` is what people and metrics are shown; it jumps when the clock is set. `mono` is what windows and
/// durations are computed from; it never jumps. Both belong to the occurrence, not to its arrival: a source that
/// reads an old record gives the past on both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// The wall-clock time.
    pub wall: Timestamp,
    /// The monotonic time.
    pub mono: Mono,
}

/// A monotonic instant, in nanoseconds from an arbitrary origin. Negative before the origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Mono(pub i64);

impl Mono {
    /// How long after `earlier` this instant is; zero when it is not after it.
    pub fn since(self, earlier: Mono) -> Duration {
        Duration::from_nanos(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }

    /// How far apart the two instants are, whichever comes first.
    pub fn distance(self, other: Mono) -> Duration {
        Duration::from_nanos(self.0.abs_diff(other.0))
    }

    /// This instant moved into the future.
    #[must_use]
    pub fn after(self, by: Duration) -> Mono {
        Mono(self.0.saturating_add(i64::try_from(by.as_nanos()).unwrap_or(i64::MAX)))
    }

    /// This instant moved into the past.
    #[must_use]
    pub fn before(self, by: Duration) -> Mono {
        Mono(self.0.saturating_sub(i64::try_from(by.as_nanos()).unwrap_or(i64::MAX)))
    }
}

impl Moment {
    /// The moment `by` later on both clocks.
    #[must_use]
    pub fn after(self, by: Duration) -> Moment {
        let wall = self.wall.checked_add(by).unwrap_or(Timestamp::MAX);
        Moment { wall, mono: self.mono.after(by) }
    }

    /// The moment `millis` earlier on both clocks.
    #[cfg(test)]
    #[must_use]
    pub fn before(self, millis: u64) -> Moment {
        let by = Duration::from_millis(millis);
        Moment { wall: self.wall.checked_sub(by).unwrap_or(Timestamp::MIN), mono: self.mono.before(by) }
    }

    /// The moment at which the wall clock, as it runs now, showed `wall`.
    ///
    /// Sources use it for records that carry only a wall-clock stamp.
    #[must_use]
    pub fn at_wall(self, wall: Timestamp) -> Moment {
        let back = self.wall.duration_since(wall);
        let nanos =
            i64::try_from(back.as_nanos()).unwrap_or(if back.is_negative() { i64::MIN } else { i64::MAX });
        Moment { wall, mono: Mono(self.mono.0.saturating_sub(nanos)) }
    }

    /// A moment on the wall clock alone, for recorded input: both clocks then run by its stamps.
    pub fn recorded(wall: Timestamp) -> Moment {
        let since_epoch = wall.duration_since(Timestamp::UNIX_EPOCH);
        Moment { wall, mono: Mono(i64::try_from(since_epoch.as_nanos()).unwrap_or(i64::MAX)) }
    }
}

/// The clocks of this machine. Sources stamp their events with it; the model never sees it.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    origin: std::time::Instant,
}

impl Default for Clock {
    fn default() -> Self {
        Clock::new()
    }
}

impl Clock {
    /// A clock whose monotonic origin is now.
    pub fn new() -> Clock {
        Clock { origin: std::time::Instant::now() }
    }

    /// Now, on both clocks.
    pub fn now(&self) -> Moment {
        let mono = i64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(i64::MAX);
        Moment { wall: Timestamp::now(), mono: Mono(mono) }
    }
}

/// Seconds since the Unix epoch, as metrics give times.
pub fn unix_seconds(at: Timestamp) -> f64 {
    SignedDuration::from_nanos(i64::try_from(at.as_nanosecond()).unwrap_or(i64::MAX)).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_of_the_past_is_the_past_on_both_clocks() {
        let now = Moment { wall: "2026-04-01T12:00:00Z".parse().unwrap(), mono: Mono(5_000_000_000) };
        let then = now.at_wall("2026-04-01T11:59:58Z".parse().unwrap());
        assert_eq!(now.mono.since(then.mono), Duration::from_secs(2));
        assert_eq!(then.after(Duration::from_secs(2)), now);
    }

    #[test]
    fn an_earlier_instant_is_zero_after_a_later_one() {
        assert_eq!(Mono(1).since(Mono(5)), Duration::ZERO);
        assert_eq!(Mono(1).distance(Mono(5)), Duration::from_nanos(4));
    }
}
