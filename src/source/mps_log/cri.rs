//! The prefix that container runtimes give every line of a log: `2026-04-23T06:04:59.367188348Z stdout F `.

use serde::{Deserialize, Serialize};

/// The stream that a record came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stream {
    /// `stdout`.
    Stdout,
    /// `stderr`.
    Stderr,
}

/// A record of a container's log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    /// Where it was written.
    pub stream: Stream,
    /// Whether it ends a line (tag `F`); otherwise (`P`) the next record of the stream goes on with it.
    pub is_whole: bool,
    /// What was written.
    pub text: &'a [u8],
}

/// The record that a line is, `None` for a line without the prefix.
pub fn record(line: &[u8]) -> Option<Record<'_>> {
    if !line.first()?.is_ascii_digit() {
        return None;
    }
    // RFC 3339 with nanoseconds and a zone.
    let end = line.iter().take(40).position(|byte| *byte == b' ')?;
    if line.get(10) != Some(&b'T') || end < 20 {
        return None;
    }
    let rest = &line[end + 1..];
    let (stream, rest) = match rest.split_first_chunk::<7>()? {
        (b"stdout ", rest) => (Stream::Stdout, rest),
        (b"stderr ", rest) => (Stream::Stderr, rest),
        _ => return None,
    };
    // Tags are separated by colons; the first says whether the line is whole.
    let end = rest.iter().take(64).position(|byte| *byte == b' ').unwrap_or(rest.len().min(64));
    let is_whole = match rest[..end].split(|byte| *byte == b':').next()? {
        b"F" => true,
        b"P" => false,
        _ => return None,
    };
    Some(Record { stream, is_whole, text: rest.get(end + 1..).unwrap_or_default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_told_from_lines() {
        let whole = record(b"2026-04-23T06:04:59.367188348Z stdout F [x").unwrap();
        assert_eq!(whole, Record { stream: Stream::Stdout, is_whole: true, text: b"[x" });
        let part = record(b"2026-04-23T06:04:59.367188348+02:00 stderr P:more ").unwrap();
        assert_eq!(part, Record { stream: Stream::Stderr, is_whole: false, text: b"" });
        for line in [
            "",
            "2026-04-23T06:04:59.367188348Z stdout",
            "2026-04-23T06:04:59.367188348Z stdlog F x",
            "2026-04-23T06:04:59.367188348Z stdout X x",
            "2026-04-23 06:04:59.367188348Z stdout F x",
            "[2026-04-23 06:04:59.367 Server  4428] x",
        ] {
            assert_eq!(record(line.as_bytes()), None, "{line}");
        }
    }
}
