//! When a line of a recorded kernel log was written, in the many ways that programs write it.

use std::time::Duration;

use jiff::civil::{Date, DateTime, Time};
use jiff::tz::{Offset, TimeZone};
use jiff::{SignedDuration, Timestamp};
use memchr::{memchr, memmem};

use super::record::FIRST_OF_USERS;

const MONTHS: [&[u8]; 12] =
    [b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec"];
/// How far into a line a stamp can begin.
const PREFIX: usize = 64;

/// When a line says that it was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stamp {
    /// On the wall clock.
    Wall(Timestamp),
    /// On the kernel's clock, since boot.
    SinceBoot(Duration),
}

impl Stamp {
    /// On the wall clock, where the time of boot is known.
    pub fn wall(self, boot: Option<Timestamp>) -> Option<Timestamp> {
        match self {
            Stamp::Wall(wall) => Some(wall),
            Stamp::SinceBoot(since) => boot?.checked_add(since).ok(),
        }
    }
}

/// How to read what stamps leave out.
#[derive(Debug, Clone)]
pub struct StampContext {
    /// The zone of stamps that name none.
    pub zone: TimeZone,
    /// Stamps without a year are the last such date that is not after this, but for a day's difference of zones.
    pub reference: Timestamp,
}

impl StampContext {
    /// The stamp of a line, `None` when it has none that is known.
    pub(super) fn stamp(&self, line: &[u8]) -> Option<Stamp> {
        let line = line.trim_ascii_start();
        let line = strip_priority(line);
        match line.first()? {
            b'[' => self.bracket(line),
            b'0'..=b'9' => {
                self.iso(line).or_else(|| unix(line)).map(Stamp::Wall).or_else(|| self.bracket_within(line))
            }
            _ => self
                .syslog(line)
                .or_else(|| self.weekday(line))
                .map(Stamp::Wall)
                .or_else(|| self.after_level(line))
                .or_else(|| self.bracket_within(line)),
        }
    }

    /// `[  966.503025]`, `[Sun Feb 23 16:24:18 2025]`, `[2026-04-22T21:27:51Z]`.
    fn bracket(&self, line: &[u8]) -> Option<Stamp> {
        let inner = line[1..line.iter().take(PREFIX).position(|byte| *byte == b']')?].trim_ascii();
        if let Some(since) = seconds(inner) {
            return Some(Stamp::SinceBoot(since));
        }
        self.ctime(inner).or_else(|| self.iso(inner)).map(Stamp::Wall)
    }

    /// `kernel: [16450076.435595] …` behind something else.
    fn bracket_within(&self, line: &[u8]) -> Option<Stamp> {
        let at = memchr(b'[', &line[..line.len().min(PREFIX)])?;
        self.bracket(&line[at..])
    }

    /// `kern  :warn  : <stamp> …` of `dmesg -x`.
    fn after_level(&self, line: &[u8]) -> Option<Stamp> {
        let mut parts = line.splitn(3, |byte| *byte == b':');
        let (facility, level, rest) = (parts.next()?.trim_ascii(), parts.next()?.trim_ascii(), parts.next()?);
        let is_word = |word: &[u8]| !word.is_empty() && word.iter().all(u8::is_ascii_lowercase);
        if !is_word(facility) || !is_word(level) {
            return None;
        }
        let rest = rest.trim_ascii_start();
        if rest.starts_with(b"[") { self.bracket(rest) } else { self.iso(rest).map(Stamp::Wall) }
    }

    fn iso(&self, line: &[u8]) -> Option<Timestamp> {
        let (local, offset, _) = iso(line)?;
        match offset {
            Some(seconds) => Offset::from_seconds(seconds).ok()?.to_timestamp(local).ok(),
            None => self.zone.to_timestamp(local).ok(),
        }
    }

    /// `Sun Feb 23 16:24:18 2025`.
    fn ctime(&self, text: &[u8]) -> Option<Timestamp> {
        let rest = text.get(4..)?;
        let (month, day, rest) = month_and_day(rest)?;
        let (time, rest) = clock(rest)?;
        let date = date(number(rest.strip_prefix(b" ")?.get(..4)?)?, month, day)?;
        self.zone.to_timestamp(DateTime::from_parts(date, time)).ok()
    }

    /// `Nov 22 18:29:55[.123456]`, without a year.
    fn syslog(&self, line: &[u8]) -> Option<Timestamp> {
        let (month, day, rest) = month_and_day(line)?;
        let (time, _) = clock(rest)?;
        let latest = self.reference.checked_add(SignedDuration::from_hours(24)).ok()?;
        let year = self.zone.to_datetime(latest).year();
        // Four years back always hold a 29 February.
        (year - 4..=year).rev().find_map(|year| {
            let date = Date::new(year, i8::try_from(month).ok()?, i8::try_from(day).ok()?).ok()?;
            let stamp = self.zone.to_timestamp(DateTime::from_parts(date, time)).ok()?;
            (stamp <= latest).then_some(stamp)
        })
    }

    /// `Tue 2025-01-21 04:41:44 UTC`.
    fn weekday(&self, line: &[u8]) -> Option<Timestamp> {
        self.iso(line.get(3..)?.strip_prefix(b" ")?)
    }
}

/// The message of a line without what programs put before it, and whether that says that a process wrote it.
///
/// Only what is known to stand there is taken away, in its order, and nothing that a message can hold: priority,
/// facility and level, stamp, host and `kernel:`, the kernel's stamp.
pub(super) fn message_of(line: &[u8]) -> (&[u8], bool) {
    let (priority, text) = priority(line.trim_ascii_start());
    let mut is_of_user = priority.is_some_and(|priority| priority >= FIRST_OF_USERS);
    let mut text = text;
    if let Some((facility, rest)) = facility_of(text) {
        is_of_user |= facility != b"kern";
        text = rest;
    }
    // RFC 5424 counts its versions.
    if let Some(rest) = wall_stamp(text).or_else(|| wall_stamp(text.strip_prefix(b"1 ")?)) {
        text = rest;
        if let Some((tag, rest)) = host(text).and_then(tag) {
            is_of_user |= tag != b"kernel";
            text = rest;
        }
    }
    text = text.strip_prefix(b"kernel: ").unwrap_or(text);
    // The second names the caller.
    for _ in 0..2 {
        text = bracketed(text).unwrap_or(text);
    }
    (text, is_of_user)
}

/// Moves past the stamp on the wall clock that a line begins with, and the blanks behind it.
fn wall_stamp(text: &[u8]) -> Option<&[u8]> {
    let by_syslog = || {
        let (_, _, rest) = month_and_day(text)?;
        Some(clock(rest)?.1)
    };
    let by_iso = || {
        let rest = iso(text).or_else(|| iso(text.get(3..)?.strip_prefix(b" ")?))?.2;
        // `CET`
        let zone = rest.strip_prefix(b" ").unwrap_or_default();
        let zone = zone.iter().take_while(|byte| byte.is_ascii_uppercase()).count();
        let is_zone = (2..=5).contains(&zone) && rest.get(zone + 1) == Some(&b' ');
        Some(if is_zone { &rest[zone + 1..] } else { rest })
    };
    let by_epoch = || {
        unix(text)?;
        Some(&text[memchr(b' ', text)?..])
    };
    let rest: &[u8] = by_syslog().or_else(by_iso).or_else(by_epoch)?;
    rest.first().is_none_or(|byte| *byte == b' ').then(|| rest.trim_ascii_start())
}

/// Moves past a host's name or address.
fn host(text: &[u8]) -> Option<&[u8]> {
    let end = memchr(b' ', text)?;
    let host = &text[..end];
    let is_name = host.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(byte));
    let is_address = || host.iter().all(|byte| byte.is_ascii_hexdigit() || *byte == b':');
    (end > 0 && (is_name || is_address())).then(|| &text[end + 1..])
}

/// Who writes, and the text behind: `kernel: …`, `name[123]: …`, `kernel - - - …`.
fn tag(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = memchr(b' ', text)?;
    match text[..end].strip_suffix(b":") {
        Some(tag) => Some((tag, &text[end + 1..])),
        None => Some((&text[..end], text[end..].strip_prefix(b" - - - ")?)),
    }
}

/// Moves past `[  966.503025] `, `[Sun Feb 23 16:24:18 2025] `, `[   T99] `, `[2026-04-22T21:27:51Z]: `.
fn bracketed(text: &[u8]) -> Option<&[u8]> {
    let text = text.strip_prefix(b"[")?;
    let end = text.iter().take(PREFIX).position(|byte| *byte == b']')?;
    let is_stamp = text[..end].iter().all(|byte| byte.is_ascii_alphanumeric() || b" :.,+-".contains(byte));
    let rest = &text[end + 1..];
    let rest = rest.strip_prefix(b":").unwrap_or(rest);
    (is_stamp && rest.first().is_some_and(|next| b" [".contains(next))).then(|| rest.trim_ascii_start())
}

/// The facility in `kern  :warn  : …` of `dmesg -x` or `192.0.2.1: kern: warning: …`, and what follows.
fn facility_of(text: &[u8]) -> Option<(&[u8], &[u8])> {
    const LEVELS: [&[u8]; 10] =
        [b"emerg", b"alert", b"crit", b"err", b"error", b"warn", b"warning", b"notice", b"info", b"debug"];
    let sender = memmem::find(text, b": ").map(|end| (&text[..end], &text[end + 2..]));
    let is_address = |(name, _): &(&[u8], &[u8])| {
        name.iter().all(|byte| byte.is_ascii_hexdigit() || b".:".contains(byte)) && name.contains(&b'.')
    };
    let text = sender.filter(is_address).map_or(text, |(_, rest)| rest);
    let mut parts = text.splitn(3, |byte| *byte == b':');
    let (facility, level, rest) = (parts.next()?.trim_ascii_end(), parts.next()?.trim_ascii(), parts.next()?);
    let is_word = !facility.is_empty() && facility.iter().all(u8::is_ascii_lowercase);
    (is_word && LEVELS.contains(&level)).then(|| (facility, rest.trim_ascii_start()))
}

/// Moves past `<4>`.
fn strip_priority(line: &[u8]) -> &[u8] {
    priority(line).1
}

/// The number in `<4>`, and what follows.
fn priority(line: &[u8]) -> (Option<u32>, &[u8]) {
    let digits = line.get(1..).unwrap_or_default().iter().take_while(|byte| byte.is_ascii_digit()).count();
    match line {
        [b'<', ..] if (1..=4).contains(&digits) && line.get(digits + 1) == Some(&b'>') => {
            let priority = number(&line[1..=digits]).map(u32::from);
            (priority, line[digits + 2..].trim_ascii_start())
        }
        _ => (None, line),
    }
}

/// `2025-01-21T04:41:44,283302+00:00`, `2025-01-21 04:41:44 UTC`, `2025-01-21T04:41:44+0000`: local time, seconds
/// east of UTC where told, and what follows.
fn iso(line: &[u8]) -> Option<(DateTime, Option<i32>, &[u8])> {
    let date = date(number(line.get(..4)?)?, number(line.get(5..7)?)?, number(line.get(8..10)?)?)?;
    if line[4] != b'-' || line[7] != b'-' || !matches!(line.get(10)?, b'T' | b' ') {
        return None;
    }
    let (time, rest) = clock(&line[11..])?;
    let local = DateTime::from_parts(date, time);
    Some(match rest {
        [b'Z', rest @ ..] | [b' ', b'U', b'T', b'C', rest @ ..] => (local, Some(0), rest),
        [sign @ (b'+' | b'-'), rest @ ..] => {
            let hours = number(rest.get(..2)?)?;
            let after = rest[2..].strip_prefix(b":").unwrap_or(&rest[2..]);
            let minutes = after.get(..2).and_then(number);
            let seconds = i32::from(hours) * 3600 + i32::from(minutes.unwrap_or(0)) * 60;
            let rest = if minutes.is_some() { &after[2..] } else { &rest[2..] };
            (local, Some(if *sign == b'-' { -seconds } else { seconds }), rest)
        }
        _ => (local, None, rest),
    })
}

/// `966.503025`; with a sign it is a difference and no stamp.
fn seconds(text: &[u8]) -> Option<Duration> {
    let dot = memchr(b'.', text)?;
    let whole = super::record::decimal(&text[..dot])?;
    Some(Duration::new(whole, fraction(&text[dot + 1..])?))
}

/// `1700000000.123456 host`.
fn unix(line: &[u8]) -> Option<Timestamp> {
    let end = line.iter().position(|byte| *byte == b' ')?;
    let since = seconds(&line[..end]).filter(|since| since.as_secs() > 100_000_000)?;
    Timestamp::UNIX_EPOCH.checked_add(since).ok()
}

/// Digits after the point, as nanoseconds.
fn fraction(digits: &[u8]) -> Option<u32> {
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let padded = digits.iter().copied().chain(std::iter::repeat(b'0')).take(9);
    Some(padded.fold(0, |nanos, digit| nanos * 10 + u32::from(digit - b'0')))
}

/// `16:24:18[.123456]`, and what follows.
fn clock(text: &[u8]) -> Option<(Time, &[u8])> {
    let part = |at: usize| number(text.get(at..at + 2)?).and_then(|part| i8::try_from(part).ok());
    let (hour, minute, second) = (part(0)?, part(3)?, part(6)?);
    if text[2] != b':' || text[5] != b':' {
        return None;
    }
    let mut rest = &text[8..];
    let mut nanos = 0;
    if let [b'.' | b',', digits @ ..] = rest {
        let length = digits.iter().take_while(|byte| byte.is_ascii_digit()).count();
        nanos = fraction(&digits[..length])?;
        rest = &digits[length..];
    }
    // A leap second is told as the last moment of its minute.
    Some((Time::new(hour, minute, second.min(59), i32::try_from(nanos).ok()?).ok()?, rest))
}

/// `Feb 23 `, `Feb  3 `.
fn month_and_day(text: &[u8]) -> Option<(u16, u16, &[u8])> {
    let month = MONTHS.iter().position(|name| text.starts_with(name))?;
    let rest = text[3..].trim_ascii_start();
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let day = number(&rest[..digits])?;
    Some((u16::try_from(month + 1).ok()?, day, rest[digits..].strip_prefix(b" ")?))
}

fn date(year: u16, month: u16, day: u16) -> Option<Date> {
    Date::new(i16::try_from(year).ok()?, i8::try_from(month).ok()?, i8::try_from(day).ok()?).ok()
}

fn number(digits: &[u8]) -> Option<u16> {
    super::record::decimal(digits).and_then(|number| u16::try_from(number).ok())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn context() -> StampContext {
        StampContext {
            zone: TimeZone::fixed(Offset::from_seconds(3600).unwrap()),
            reference: "2026-03-01T12:00:00Z".parse().unwrap(),
        }
    }

    #[test]
    fn stamps_on_the_wall_clock_are_read() {
        for (line, stamp) in [
            ("[Sun Feb 23 16:24:18 2025] NVRM: x", "2025-02-23T15:24:18Z"),
            ("[Wed Jan  1 00:00:00 2025] NVRM: x", "2024-12-31T23:00:00Z"),
            ("2025-01-21T04:41:44,283302+00:00 NVRM: x", "2025-01-21T04:41:44.283302Z"),
            ("kern  :warn  : 2025-01-21T04:41:44,283302+02:00 NVRM: x", "2025-01-21T02:41:44.283302Z"),
            ("kern  :warn  : [Sun Feb 23 16:24:18 2025] NVRM: x", "2025-02-23T15:24:18Z"),
            ("2025-01-21T04:41:44-0530 host kernel: NVRM: x", "2025-01-21T10:11:44Z"),
            ("2025-01-21T04:41:44.5Z host kernel: NVRM: x", "2025-01-21T04:41:44.5Z"),
            ("2025-01-21 04:41:44 host kernel: NVRM: x", "2025-01-21T03:41:44Z"),
            ("Tue 2025-01-21 04:41:44 UTC host kernel: NVRM: x", "2025-01-21T04:41:44Z"),
            ("Feb 22 18:29:55 host kernel: [  966.503025] NVRM: x", "2026-02-22T17:29:55Z"),
            ("Nov 22 18:29:55 host kernel: NVRM: x", "2025-11-22T17:29:55Z"),
            ("Feb 29 18:29:55.25 host kernel: NVRM: x", "2024-02-29T17:29:55.25Z"),
            ("Aug 19 11:36:35  NVRM: x", "2025-08-19T10:36:35Z"),
            ("1700000000.250000 host kernel: NVRM: x", "2023-11-14T22:13:20.25Z"),
            (
                "192.0.2.1: kern: warning: [2026-02-22T21:27:51.291660856Z]: NVRM: x",
                "2026-02-22T21:27:51.291660856Z",
            ),
            ("<4>2025-01-21T04:41:60Z x", "2025-01-21T04:41:59Z"),
        ] {
            let stamp: Timestamp = stamp.parse().unwrap();
            assert_eq!(context().stamp(line.as_bytes()), Some(Stamp::Wall(stamp)), "{line}");
        }
    }

    #[test]
    fn stamps_since_boot_are_read() {
        for (line, micros) in [
            ("[  966.503025] NVRM: x", 966_503_025),
            ("<4>[6781741.548768] NVRM: x", 6_781_741_548_768),
            ("kern  :warn  : [   12.5] NVRM: x", 12_500_000),
            ("kernel: [16450076.435595] NVRM: x", 16_450_076_435_595),
        ] {
            let since = Duration::from_micros(micros);
            assert_eq!(context().stamp(line.as_bytes()), Some(Stamp::SinceBoot(since)), "{line}");
        }
        let boot: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let since = Stamp::SinceBoot(Duration::from_secs(60));
        assert_eq!(since.wall(Some(boot)), Some("2026-01-01T00:01:00Z".parse().unwrap()));
        assert_eq!(since.wall(None), None);
    }

    #[test]
    fn other_lines_have_none() {
        for line in [
            "",
            "NVRM: x",
            "[  +6.010643] NVRM: x",
            "[...] NVRM: x",
            "[",
            "2025-13-01T00:00:00Z x",
            "kernel: NVRM: x",
            "Feb 30 1",
            "<4>",
            "12.5 x",
        ] {
            assert_eq!(context().stamp(line.as_bytes()), None, "{line}");
        }
    }

    #[test]
    fn messages_are_freed_of_what_is_before_them() {
        const MESSAGE: &str = "NVRM: Xid (PCI:0000:3b:00): 79, x";
        for (before, is_of_user) in [
            ("", false),
            ("kernel: ", false),
            ("kernel: [16450076.435595] ", false),
            ("[  966.503025] ", false),
            ("[  966.503025][   T99] ", false),
            ("[  966.503025] [   T99] ", false),
            ("[  +6.010643] ", false),
            ("[...] ", false),
            ("[Sun Feb 23 16:24:18 2025] ", false),
            ("<4>[  966.503025] ", false),
            ("<12>[  966.503025] ", true),
            ("kern  :warn  : [  966.503025] ", false),
            ("kern  :warn  : 2025-01-21T04:41:44,283302+00:00 ", false),
            ("user  :warn  : [  966.503025] ", true),
            ("192.0.2.1: kern: warning: [2026-02-22T21:27:51.291660856Z]: ", false),
            ("2025-01-21T04:41:44,283302+00:00 ", false),
            ("2025-01-21T04:41:44+0000 host kernel: ", false),
            ("2025-01-21 04:41:44 UTC host kernel: ", false),
            ("2025-01-21 04:41:44 host-1.example.org kernel: ", false),
            ("Tue 2025-01-21 04:41:44 CET host kernel: ", false),
            ("1700000000.250000 host kernel: ", false),
            ("<4>1 2025-01-21T04:41:44Z host kernel - - - ", false),
            ("Nov 22 18:29:55 host kernel: [  966.503025] ", false),
            ("Nov 22 18:29:55.25 fe80::1 kernel: ", false),
            ("Aug 19 11:36:35  ", false),
            ("Nov 22 18:29:55 host app[123]: ", true),
            ("Nov 22 18:29:55 host app: ", true),
            ("<13>1 2025-01-21T04:41:44Z host app - - - ", true),
        ] {
            let line = format!("{before}{MESSAGE}");
            assert_eq!(message_of(line.as_bytes()), (MESSAGE.as_bytes(), is_of_user), "{line}");
        }
        for (before, message) in [
            ("foo: ", "foo: "),
            ("[  966.503025] process '/home/u/", "process '/home/u/"),
            ("[  966.503025] oom-kill:task_memcg=/a kernel: ", "oom-kill:task_memcg=/a kernel: "),
            ("2025-01-21T04:41:44Z oom-kill:task_memcg=/a kernel: ", "oom-kill:task_memcg=/a kernel: "),
            ("Nov 22 18:29:55 host kernel: audit: kernel: ", "audit: kernel: "),
            ("Nov 22 18:29:55 host kernel: [  1.5] a kernel: ", "a kernel: "),
            ("Nov 22 18:29:55 host kernel: '[  1.5] ", "'[  1.5] "),
            ("[a/b] ", "[a/b] "),
        ] {
            let line = format!("{before}{MESSAGE}");
            assert_eq!(message_of(line.as_bytes()).0, format!("{message}{MESSAGE}").as_bytes(), "{line}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(line in "(<4>|\\[| |Feb|Sun|[0-9]{1,4}|-|:|T|\\.|,|\\+|Z|\\]|kern|kernel: |é|: ){0,20}") {
            let _outcome = context().stamp(line.as_bytes());
            let _outcome = message_of(line.as_bytes());
        }
    }
}
