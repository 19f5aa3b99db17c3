//! The time of a line. MPS logs carry local time without a zone, so what a stamp means depends on where the daemon
//! runs and, for an hour each autumn, on what came before it.

use std::path::Path;

use jiff::tz::{AmbiguousOffset, TimeZone};
use jiff::{SignedDuration, Timestamp};

use super::envelope::Stamp;
use crate::event::Freshness;
use crate::time::Moment;

/// A live line whose stamp is farther from its arrival than this is dated by its arrival: the zone is not the
/// daemon's, or a clock was set.
const LIVE_TOLERANCE: SignedDuration = SignedDuration::from_secs(5);

/// Turns stamps of one stream, given in its order, into times.
#[derive(Debug, Clone)]
pub struct StampClock {
    zone: TimeZone,
    /// The last stamp up to its minute, and when that minute began, in milliseconds of the epoch: lines come many
    /// to a minute.
    minute: Option<([u8; 16], i64)>,
    last: Option<Timestamp>,
}

impl StampClock {
    /// A clock for a daemon in this zone.
    pub fn new(zone: TimeZone) -> StampClock {
        StampClock { zone, minute: None, last: None }
    }

    /// Takes another zone from now on.
    pub fn set_zone(&mut self, zone: TimeZone) {
        *self = StampClock::new(zone);
    }

    /// The instant of a stamp; `None` when it is no date. In the hour that a zone repeats, the first of the two
    /// instants that does not go back behind the line before.
    pub fn instant(&mut self, stamp: Stamp<'_>) -> Option<Timestamp> {
        let (minute, millis) = stamp.split_at_minute()?;
        let start = match self.minute {
            Some((known, start)) if known == minute => start,
            _ => self.resolve(stamp)?.as_millisecond() - millis,
        };
        self.minute = Some((minute, start));
        let instant = Timestamp::from_millisecond(start + millis).ok()?;
        self.last = Some(instant);
        Some(instant)
    }

    fn resolve(&self, stamp: Stamp<'_>) -> Option<Timestamp> {
        let ambiguous = self.zone.to_ambiguous_timestamp(stamp.civil()?);
        match (ambiguous.offset(), self.last) {
            (AmbiguousOffset::Fold { .. }, Some(last)) => {
                let earlier = ambiguous.earlier().ok()?;
                if earlier >= last { Some(earlier) } else { ambiguous.later().ok() }
            }
            _ => ambiguous.compatible().ok(),
        }
    }

    /// When a line with this stamp happened, having arrived at `now`.
    pub fn moment(&mut self, stamp: Stamp<'_>, now: Moment, freshness: Freshness) -> Moment {
        let Some(instant) = self.instant(stamp) else { return now };
        match freshness {
            Freshness::Live if now.wall.duration_since(instant).abs() <= LIVE_TOLERANCE => {
                Moment { wall: instant, mono: now.mono }
            }
            Freshness::Live => now,
            // Nothing was written later than it was read.
            Freshness::CaughtUp | Freshness::History => now.at_wall(instant.min(now.wall)),
        }
    }
}

/// The zone that a daemon writes its stamps in: its own `TZ`, else `/etc/localtime` of its mount namespace, else
/// this machine's. `process_directory` is the daemon's `/proc/PID`.
pub fn zone_of(process_directory: Option<&Path>) -> TimeZone {
    let Some(process) = process_directory else { return TimeZone::system() };
    zone_by_variable(process)
        .or_else(|| zone_file(&process.join("root/etc/localtime")))
        .unwrap_or_else(TimeZone::system)
}

fn zone_by_variable(process: &Path) -> Option<TimeZone> {
    let environment = std::fs::read(process.join("environ")).ok()?;
    let variable = environment.split(|byte| *byte == 0).find_map(|variable| variable.strip_prefix(b"TZ="))?;
    let name = std::str::from_utf8(variable).ok()?.trim_start_matches(':');
    if name.is_empty() {
        return Some(TimeZone::UTC);
    }
    let file = Path::new("root/usr/share/zoneinfo").join(name.trim_start_matches('/'));
    zone_file(&process.join(file)).or_else(|| TimeZone::get(name).ok()).or_else(|| TimeZone::posix(name).ok())
}

fn zone_file(path: &Path) -> Option<TimeZone> {
    /// The largest zone file is a few KiB.
    const LIMIT: u64 = 64 * 1024;
    let metadata = std::fs::metadata(path).ok()?;
    if !metadata.is_file() || metadata.len() > LIMIT {
        return None;
    }
    TimeZone::tzif("the daemon's zone", &std::fs::read(path).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Mono;

    fn berlin() -> TimeZone {
        TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap()
    }

    fn instants(zone: TimeZone, stamps: &[&str]) -> Vec<String> {
        let mut clock = StampClock::new(zone);
        stamps
            .iter()
            .map(|text| {
                let stamp = Stamp::new(text.as_bytes()).unwrap();
                clock.instant(stamp).map_or_else(|| "none".to_owned(), |at| at.to_string())
            })
            .collect()
    }

    #[test]
    fn the_repeated_hour_goes_on() {
        let stamps = ["2026-10-25 02:59:59.900", "2026-10-25 02:00:00.100", "2026-10-25 03:00:00.000"];
        let expected = ["2026-10-25T00:59:59.9Z", "2026-10-25T01:00:00.1Z", "2026-10-25T02:00:00Z"];
        assert_eq!(instants(berlin(), &stamps), expected);
    }

    #[test]
    fn a_skipped_hour_and_no_date() {
        let stamps = ["2026-03-29 02:30:00.000", "2026-13-29 02:30:00.000", "2026-03-29 04:30:61.000"];
        assert_eq!(instants(berlin(), &stamps), ["2026-03-29T01:30:00Z", "none", "none"]);
    }

    #[test]
    fn a_minute_seen_before_gives_the_same_answer() {
        let stamps = ["2026-06-01 10:00:01.001", "2026-06-01 10:00:59.999", "2026-06-01 10:00:00.000"];
        let expected = ["2026-06-01T08:00:01.001Z", "2026-06-01T08:00:59.999Z", "2026-06-01T08:00:00Z"];
        assert_eq!(instants(berlin(), &stamps), expected);
    }

    #[test]
    fn a_live_line_is_dated_by_its_stamp_only_near_its_arrival() {
        let now = Moment { wall: "2026-06-01T08:00:03Z".parse().unwrap(), mono: Mono(77) };
        let mut clock = StampClock::new(berlin());
        let mut moment =
            |text: &str, freshness| clock.moment(Stamp::new(text.as_bytes()).unwrap(), now, freshness);
        let near = moment("2026-06-01 10:00:00.500", Freshness::Live);
        assert_eq!((near.wall.to_string().as_str(), near.mono), ("2026-06-01T08:00:00.5Z", Mono(77)));
        assert_eq!(moment("2026-06-01 08:00:00.500", Freshness::Live), now);
        let old = moment("2026-06-01 09:59:59.000", Freshness::CaughtUp);
        assert_eq!(
            (old.wall.to_string().as_str(), old.mono),
            ("2026-06-01T07:59:59Z", Mono(77 - 4_000_000_000))
        );
        for freshness in [Freshness::CaughtUp, Freshness::History] {
            assert_eq!(moment("2026-06-01 15:00:00.000", freshness), now, "no line is from the future");
        }
    }

    #[test]
    fn the_zone_of_a_process_is_its_variable_or_its_file() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("environ"), b"PATH=/bin\0TZ=EST5EDT,M3.2.0,M11.1.0\0").unwrap();
        let zone = zone_of(Some(root.path()));
        assert_eq!(instants(zone, &["2026-01-01 00:00:00.000"]), ["2026-01-01T05:00:00Z"]);
        std::fs::write(root.path().join("environ"), b"TZ=\0").unwrap();
        assert_eq!(
            instants(zone_of(Some(root.path())), &["2026-01-01 00:00:00.000"]),
            ["2026-01-01T00:00:00Z"]
        );
    }
}
