//! What stands around every message: `[2026-04-28 18:20:41.986 Server  4428] `.
//!
//! The format string is the same in the 535, 550 and 555 daemons: `[%d-%02d-%02d %02d:%02d:%02d.%03d %s %5d] %s`.
//! Copies by container runtimes, compose and journald put their own text before it, and pasted copies lose blanks.

use jiff::civil::DateTime;

/// How far into a line an envelope is looked for: container and journal prefixes are short.
const PREFIX_LIMIT: usize = 512;

/// A line taken apart, still borrowed from what was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Envelope<'a> {
    /// When, in the daemon's local time, without a zone.
    pub stamp: Stamp<'a>,
    /// Who speaks.
    pub tag: Tag,
    /// The pid in the tag.
    pub writer: u32,
    /// What is said, without blanks and carriage returns at its end.
    pub text: &'a [u8],
}

/// The speaker that a line names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tag {
    /// The control daemon.
    Control,
    /// A server. `Other`, which servers use while they start (and always, up to 510), counts as one too.
    Server,
    /// A client's library.
    Client,
    /// A server for devices older than Volta.
    LegacyServer,
}

/// `YYYY-MM-DD hh:mm:ss.mmm`: digits and separators are where they belong, values are checked when it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stamp<'a>(&'a [u8; 23]);

impl<'a> Stamp<'a> {
    /// The stamp that `text` is.
    pub fn new(text: &'a [u8]) -> Option<Stamp<'a>> {
        let text: &[u8; 23] = text.try_into().ok()?;
        text.iter()
            .zip(b"0000-00-00 00:00:00.000")
            .all(|(byte, shape)| if *shape == b'0' { byte.is_ascii_digit() } else { byte == shape })
            .then_some(Stamp(text))
    }

    /// What is written, which sorts by time.
    pub(super) fn bytes(self) -> [u8; 23] {
        *self.0
    }

    /// The date and time, `None` for the 30th of February and the like.
    pub fn civil(self) -> Option<DateTime> {
        let number = |from: usize, to: usize| {
            self.0[from..to].iter().try_fold(0_i16, |value, byte| {
                byte.is_ascii_digit().then(|| value * 10 + i16::from(byte - b'0'))
            })
        };
        let short = |from: usize| number(from, from + 2).and_then(|value| i8::try_from(value).ok());
        let millis = i32::from(number(20, 23)?);
        DateTime::new(
            number(0, 4)?,
            short(5)?,
            short(8)?,
            short(11)?,
            short(14)?,
            short(17)?,
            millis * 1_000_000,
        )
        .ok()
    }

    /// Everything but seconds and milliseconds, then those in milliseconds; the halves of a cheap conversion.
    pub(super) fn split_at_minute(self) -> Option<([u8; 16], i64)> {
        let (minute, rest) = self.0.split_first_chunk::<16>()?;
        let digit = |at: usize| rest[at].is_ascii_digit().then(|| i64::from(rest[at] - b'0'));
        let seconds = digit(1)? * 10 + digit(2)?;
        let millis = digit(4)? * 100 + digit(5)? * 10 + digit(6)?;
        (seconds < 60).then_some((*minute, seconds * 1000 + millis))
    }
}

/// The envelope of a line and its message, or `None` for a line that has none.
#[inline]
pub fn open(line: &[u8]) -> Option<Envelope<'_>> {
    open_at_start(line).or_else(|| open_later(line))
}

/// The next envelope inside a line: behind a copy's prefix, or behind a record that a crash cut short.
#[cold]
pub(super) fn open_later(line: &[u8]) -> Option<Envelope<'_>> {
    let reach = &line[..line.len().min(PREFIX_LIMIT)];
    memchr::memchr_iter(b'[', reach).filter(|at| *at > 0).find_map(|at| open_at_start(&line[at..]))
}

/// `[2026-04` `-01 00:0` `0:00.021`: for digits only the high half is compared.
const SHAPE: [(u64, u64); 3] = [shape(*b"[0000-00"), shape(*b"-00 00:0"), shape(*b"0:00.000")];

const fn shape(text: [u8; 8]) -> (u64, u64) {
    let mut mask = [0xff; 8];
    let mut at = 0;
    while at < 8 {
        if text[at] == b'0' {
            mask[at] = 0xf0;
        }
        at += 1;
    }
    (u64::from_le_bytes(mask), u64::from_le_bytes(text) & u64::from_le_bytes(mask))
}

#[inline]
fn word(head: &[u8; 32], at: usize) -> u64 {
    u64::from_le_bytes(*head[at..].first_chunk().expect("a head of 32 bytes holds four words"))
}

const SERVER: u64 = u64::from_le_bytes(*b" Server ");
const CONTROL: u64 = u64::from_le_bytes(*b" Control");
const CLIENT: u64 = u64::from_le_bytes(*b" Client ");
const LEGACY: u64 = u64::from_le_bytes(*b" Legacy ");
const OTHER: u64 = u64::from_le_bytes(*b" Other \0");
const SEVEN_BYTES: u64 = u64::MAX >> 8;

#[inline]
fn open_at_start(line: &[u8]) -> Option<Envelope<'_>> {
    let head = head(line)?;
    Some(Envelope {
        stamp: head.stamp,
        tag: head.tag,
        writer: head.writer,
        text: trim_end(&line[head.text..]),
    })
}

/// An envelope, and where the message begins.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head<'a> {
    pub stamp: Stamp<'a>,
    pub tag: Tag,
    pub writer: u32,
    pub text: usize,
}

/// The envelope at the start of `line`, which may go on beyond its end.
#[inline]
pub(super) fn head(line: &[u8]) -> Option<Head<'_>> {
    let head: &[u8; 32] = line.first_chunk()?;
    for (index, (mask, value)) in SHAPE.iter().enumerate() {
        if word(head, index * 8) & mask != *value {
            return None;
        }
    }
    let (tag, after) = match word(head, 24) {
        SERVER => (Tag::Server, 32),
        CONTROL => (Tag::Control, 32),
        CLIENT => (Tag::Client, 32),
        LEGACY if line[32..].starts_with(b"Server ") => (Tag::LegacyServer, 39),
        other if other & SEVEN_BYTES == OTHER => (Tag::Server, 31),
        _ => return None,
    };
    let (writer, text) = writer(line, after)?;
    let stamp = Stamp(head[1..].first_chunk()?);
    Some(Head { stamp, tag, writer, text })
}

/// The rest of an envelope: blanks, pid, `] `; and where it ends.
#[inline]
fn writer(line: &[u8], mut at: usize) -> Option<(u32, usize)> {
    while *line.get(at)? == b' ' {
        at += 1;
    }
    let start = at;
    let mut pid = 0_u32;
    loop {
        let byte = *line.get(at)?;
        let digit = u32::from(byte.wrapping_sub(b'0'));
        if digit > 9 {
            if byte != b']' || at == start {
                return None;
            }
            break;
        }
        pid = pid.checked_mul(10)?.checked_add(digit)?;
        at += 1;
    }
    Some((pid, if line.get(at + 1) == Some(&b' ') { at + 2 } else { at + 1 }))
}

#[inline]
fn trim_end(mut text: &[u8]) -> &[u8] {
    while let [start @ .., b' ' | b'\r' | b'\t'] = text {
        text = start;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(line: &str) -> Option<(Tag, u32, &str)> {
        open(line.as_bytes()).map(|e| (e.tag, e.writer, std::str::from_utf8(e.text).unwrap()))
    }

    #[test]
    fn every_tag_and_padding() {
        for (line, tag, writer) in [
            ("[2026-04-23 06:04:59.367 Server  4428] x", Tag::Server, 4428),
            ("[2026-04-23 06:04:59.367 Control     6] x", Tag::Control, 6),
            ("[2026-04-23 06:04:59.367 Other 123456] x", Tag::Server, 123_456),
            ("[2026-04-23 06:04:59.367 Other 6] x", Tag::Server, 6),
            ("[2026-04-23 06:04:59.367 Client    77] x", Tag::Client, 77),
            ("[2026-04-23 06:04:59.367 Legacy Server   425] x", Tag::LegacyServer, 425),
            ("[2026-04-23 06:04:59.367 Control 61] x \r", Tag::Control, 61),
        ] {
            assert_eq!(opened(line), Some((tag, writer, "x")), "{line}");
        }
    }

    #[test]
    fn copies_keep_their_envelope() {
        for prefix in [
            "2026-04-23T06:04:59.367188348Z stdout F ",
            "mps-1  | ",
            "Apr 23 06:04:59 node7 nvidia-cuda-mps-control[4411]: ",
            "\0\0\0",
            "[2026-04-23 06:04:59.300 Serv",
        ] {
            let line = format!("{prefix}[2026-04-23 06:04:59.367 Server  4428] Exiting");
            assert_eq!(opened(&line), Some((Tag::Server, 4428, "Exiting")), "{line}");
        }
    }

    #[test]
    fn anything_else_has_none() {
        for line in [
            "",
            "[",
            "Other   425] Startup",
            "I1220 11:03:48.293356 99 daemon.go:97] \"Staring MPS daemon\"",
            "[2026-04-23 06:04:59.367 Server  4428",
            "[2026-04-23 06:04:59.367 Server  99999999999] x",
            "[2026-04-23 06:04:59.367 Server  ] x",
            "[2026-04-23 06:04:59.367 Serving 12] x",
            "[2026/04-23 06:04:59.367 Server  4428] x",
        ] {
            assert_eq!(opened(line), None, "{line}");
        }
    }

    #[test]
    fn a_stamp_is_a_date_only_if_the_calendar_has_it() {
        let civil = |text: &str| open(text.as_bytes()).and_then(|e| e.stamp.civil());
        let expected = "2026-04-23T06:04:59.367".parse().unwrap();
        assert_eq!(civil("[2026-04-23 06:04:59.367 Server  4428] x"), Some(expected));
        assert_eq!(civil("[2026-02-30 06:04:59.367 Server  4428] x"), None);
        assert_eq!(civil("[2026-04-2: 06:04:59.367 Server  4428] x"), None);
    }
}
