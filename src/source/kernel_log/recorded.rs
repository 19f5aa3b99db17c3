//! Kernel logs as people and programs keep them: kmsg records, `dmesg` output, syslog files, `journalctl` output.
//!
//! [`Reader`] takes them line by line and tells the shapes apart by itself. It serves `replay`, a file or FIFO in
//! `kernel_log.path`, and the journal.

use std::borrow::Cow;
use std::time::Duration;

use jiff::Timestamp;
use serde::Deserialize;

use super::line::{Line, Recognizer};
use super::record::{Record, decimal};
use super::stamp::{Stamp, StampContext, message_of};
use crate::event::EventKind;

/// An entry of the journal is cut beyond this many bytes of message.
const MAX_MESSAGE: usize = 8192;

/// The binary form of a message in an export begins with its length in so many bytes.
const LENGTH: usize = 8;

/// A line that matters.
#[derive(Debug, Clone, PartialEq)]
pub struct Found<'a> {
    /// What it says.
    pub line: Line<'a>,
    /// The message that says it.
    pub text: &'a [u8],
    /// Whether the kernel wrote it, as far as the log tells. What a process wrote proves nothing.
    pub is_from_kernel: bool,
    stamp: Stamped<'a>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Stamped<'a> {
    Known(Option<Stamp>),
    /// Somewhere in this line.
    Within(&'a [u8]),
}

impl Found<'_> {
    /// When the log says that it was written.
    pub fn stamp(&self, context: &StampContext) -> Option<Stamp> {
        match self.stamp {
            Stamped::Known(stamp) => stamp,
            Stamped::Within(line) => context.stamp(line),
        }
    }

    /// What it means to the model; `None` for lines that cannot be read.
    pub fn event(&self) -> Option<EventKind> {
        super::pending::event(&self.line, self.text)
    }
}

/// Reads recorded kernel logs.
#[derive(Debug, Default)]
pub struct Reader {
    recognizer: Recognizer,
    /// The message at hand, where it is not a piece of the line.
    message: Vec<u8>,
    /// The entry of `journalctl -o export` at hand.
    export: Option<Export>,
}

#[derive(Debug, Default)]
struct Export {
    stamp: Option<Stamp>,
    is_of_user: bool,
    /// The message comes in its binary form: over several lines, up to the empty one.
    in_message: bool,
}

impl Reader {
    /// A reader at the beginning of a log.
    pub fn new() -> Reader {
        Reader::default()
    }

    /// Reads a line without its line feed. An entry of `journalctl -o export` answers at the empty line that ends it:
    /// give one more at the end of the log.
    pub fn line<'a>(&'a mut self, line: &'a [u8]) -> Option<Found<'a>> {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if self.export.is_some() || line.starts_with(b"__CURSOR=") {
            return self.export_line(line);
        }
        let first = line.first()?;
        if first.is_ascii_digit()
            && let Some(record) = Record::parse(line)
        {
            return self.record(&record);
        }
        if *first == b'{'
            && let Some(entry) = JournalEntry::parse(line)
        {
            return self.journal_entry(entry);
        }
        let (text, is_of_user) = message_of(line);
        let found = self.recognizer.line(text)?;
        Some(Found { line: found, text, is_from_kernel: !is_of_user, stamp: Stamped::Within(line) })
    }

    /// Reads a record.
    pub fn record<'a>(&'a mut self, record: &Record<'a>) -> Option<Found<'a>> {
        let text = match record.text() {
            Cow::Borrowed(text) => text,
            Cow::Owned(text) => {
                self.message = text;
                &self.message
            }
        };
        let line = self.recognizer.line(text)?;
        let stamp = Stamp::SinceBoot(Duration::from_micros(record.micros));
        let stamp = Stamped::Known(Some(stamp));
        Some(Found { line, text, is_from_kernel: record.is_from_kernel(), stamp })
    }

    /// Reads an entry of `journalctl -o json`.
    pub(super) fn journal_entry(&mut self, entry: JournalEntry) -> Option<Found<'_>> {
        let stamp = Stamped::Known(entry.stamp());
        let is_from_kernel = entry.is_from_kernel();
        self.message = entry.message;
        let line = self.recognizer.line(&self.message)?;
        Some(Found { line, text: &self.message, is_from_kernel, stamp })
    }

    fn export_line(&mut self, line: &[u8]) -> Option<Found<'_>> {
        let entry = self.export.get_or_insert_default();
        // A length of ten is a line feed.
        let is_in_length = entry.in_message && self.message.len() < LENGTH;
        if line.is_empty() && !is_in_length {
            let entry = std::mem::take(entry);
            let text = if entry.in_message { self.message.get(LENGTH..)? } else { &self.message[..] };
            let line = self.recognizer.line(text)?;
            let stamp = Stamped::Known(entry.stamp);
            return Some(Found { line, text, is_from_kernel: !entry.is_of_user, stamp });
        }
        if line.starts_with(b"__CURSOR=") {
            *entry = Export::default();
            self.message.clear();
        } else if line == b"MESSAGE" {
            entry.in_message = true;
            self.message.clear();
        } else if entry.in_message {
            let room = MAX_MESSAGE.saturating_sub(self.message.len());
            self.message.extend(line.iter().take(room));
            self.message.push(b'\n');
        } else if let Some(text) = line.strip_prefix(b"MESSAGE=") {
            self.message.clear();
            self.message.extend(text.iter().take(MAX_MESSAGE));
        } else if let Some(micros) = line.strip_prefix(b"__REALTIME_TIMESTAMP=") {
            entry.stamp = decimal(micros).and_then(wall);
        } else if let Some(facility) = line.strip_prefix(b"SYSLOG_FACILITY=") {
            entry.is_of_user |= facility != b"0";
        } else if let Some(transport) = line.strip_prefix(b"_TRANSPORT=") {
            entry.is_of_user |= transport != b"kernel";
        }
        None
    }
}

fn wall(micros: u64) -> Option<Stamp> {
    Timestamp::from_microsecond(i64::try_from(micros).ok()?).ok().map(Stamp::Wall)
}

/// An entry of the journal, of which only these fields matter.
#[derive(Debug, Default)]
pub(super) struct JournalEntry {
    /// Where the journal goes on after this entry.
    pub cursor: Option<String>,
    realtime_micros: Option<u64>,
    facility: Option<String>,
    transport: Option<String>,
    message: Vec<u8>,
}

impl JournalEntry {
    /// Reads a line of `journalctl -o json`.
    pub(super) fn parse(line: &[u8]) -> Option<JournalEntry> {
        #[derive(Deserialize)]
        struct Fields {
            #[serde(rename = "__CURSOR")]
            cursor: Option<String>,
            #[serde(rename = "__REALTIME_TIMESTAMP")]
            realtime: Option<String>,
            #[serde(rename = "SYSLOG_FACILITY")]
            facility: Option<String>,
            #[serde(rename = "_TRANSPORT")]
            transport: Option<String>,
            #[serde(rename = "MESSAGE")]
            message: Option<Message>,
        }
        /// Text, or its bytes where it is not UTF-8 or has control characters.
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Message {
            Text(String),
            Bytes(Vec<u8>),
        }
        let fields: Fields = serde_json::from_slice(line).ok()?;
        Some(JournalEntry {
            cursor: fields.cursor,
            realtime_micros: fields.realtime.and_then(|digits| decimal(digits.as_bytes())),
            facility: fields.facility,
            transport: fields.transport,
            message: match fields.message {
                Some(Message::Text(text)) => text.into_bytes(),
                Some(Message::Bytes(bytes)) => bytes,
                None => Vec::new(),
            },
        })
    }

    /// When the journal received it.
    pub(super) fn stamp(&self) -> Option<Stamp> {
        wall(self.realtime_micros?)
    }

    /// journald marks what a process wrote to `/dev/kmsg` by its facility alone.
    fn is_from_kernel(&self) -> bool {
        self.facility.as_deref().is_none_or(|facility| facility == "0")
            && self.transport.as_deref().is_none_or(|transport| transport == "kernel")
    }
}

#[cfg(test)]
mod tests {
    use jiff::tz::TimeZone;
    use proptest::prelude::*;

    use super::*;

    /// Code or kind, wall stamp, whether from the kernel, of every line that matters.
    fn read(lines: &[&str]) -> Vec<(String, Option<Stamp>, bool)> {
        let context =
            StampContext { zone: TimeZone::UTC, reference: "2026-03-01T12:00:00Z".parse().unwrap() };
        let mut reader = Reader::new();
        let mut all = Vec::new();
        for line in lines.iter().copied().chain([""]) {
            if let Some(found) = reader.line(line.as_bytes()) {
                let what = match found.line {
                    Line::Xid(xid) => format!("xid {}", xid.code),
                    other => format!("{other:?}"),
                };
                all.push((what, found.stamp(&context), found.is_from_kernel));
            }
        }
        all
    }

    fn at(text: &str) -> Stamp {
        Stamp::Wall(text.parse().unwrap())
    }

    fn since(micros: u64) -> Stamp {
        Stamp::SinceBoot(Duration::from_micros(micros))
    }

    #[test]
    fn every_shape_of_log_is_read() {
        let xid = "NVRM: Xid (PCI:0000:3b:00): 31, pid=5, name=a, Ch 00000008";
        let line = |before: &str| format!("{before}{xid}");
        let cases = [
            (line("4,17,5000000,c,caller=T1;"), Some(since(5_000_000)), true),
            (line("12,17,5000000,-;"), Some(since(5_000_000)), false),
            (line("[    5.000000] "), Some(since(5_000_000)), true),
            (line("Feb 22 18:29:55 host kernel: [    5.000000] "), Some(at("2026-02-22T18:29:55Z")), true),
            (line("Feb 22 18:29:55 host logger: "), Some(at("2026-02-22T18:29:55Z")), false),
            (line("Feb 22 18:29:55 host logger[99]: "), Some(at("2026-02-22T18:29:55Z")), false),
            (line("2026-02-22T18:29:55+0100 host kernel: "), Some(at("2026-02-22T17:29:55Z")), true),
            (line(""), None, true),
            (
                format!(
                    "{{\"__REALTIME_TIMESTAMP\":\"1700000000250000\",\"_TRANSPORT\":\"kernel\",\"SYSLOG_FACILITY\":\"0\",\"MESSAGE\":\"{xid}\"}}"
                ),
                Some(at("2023-11-14T22:13:20.25Z")),
                true,
            ),
            (
                format!("{{\"SYSLOG_FACILITY\":\"1\",\"_TRANSPORT\":\"kernel\",\"MESSAGE\":\"{xid}\"}}"),
                None,
                false,
            ),
            (format!("{{\"_TRANSPORT\":\"stdout\",\"MESSAGE\":\"{xid}\"}}"), None, false),
            (format!("{{\"MESSAGE\":{:?}}}", xid.as_bytes()), None, true),
        ];
        for (line, stamp, is_from_kernel) in cases {
            assert_eq!(read(&[&line]), [("xid 31".to_owned(), stamp, is_from_kernel)], "{line}");
        }
    }

    #[test]
    fn an_export_of_the_journal_is_read() {
        let found = read(&[
            "__CURSOR=s=1",
            "__REALTIME_TIMESTAMP=1700000000000000",
            "MESSAGE=NVRM: Xid (PCI:0000:3b:00): 13, x",
            "_TRANSPORT=kernel",
            "",
            "__CURSOR=s=2",
            "MESSAGE=nothing",
            "__REALTIME_TIMESTAMP=1700000001000000",
            "",
            "__CURSOR=s=3",
            "__REALTIME_TIMESTAMP=1700000002000000",
            "MESSAGE",
            "\u{7}\0\0\0\0\0\0\0NVRM: The NVIDIA GPU 0000:3b:00.0",
            "NVRM: fallen off the bus",
            "",
            "__CURSOR=s=4",
            "MESSAGE=NVRM: Xid (PCI:0000:3b:00): 43, x",
            "SYSLOG_FACILITY=1",
        ]);
        let lost = "GpuLost(PciAddress { domain: 0, bus: 59, device: 0 })".to_owned();
        assert_eq!(
            found,
            [
                ("xid 13".to_owned(), Some(at("2023-11-14T22:13:20Z")), true),
                (lost, Some(at("2023-11-14T22:13:22Z")), true),
                ("xid 43".to_owned(), None, false),
            ]
        );
    }

    proptest! {
        #[test]
        fn no_lines_panic(lines in prop::collection::vec(
            prop_oneof![
                Just("__CURSOR=s=1".to_owned()), Just("MESSAGE".to_owned()), Just(String::new()),
                Just("MESSAGE=NVRM: Xid (PCI:0:0:0): 1".to_owned()), Just("{\"MESSAGE\":[1,2]}".to_owned()),
                "\\PC{0,40}",
            ],
            0..12,
        )) {
            let mut reader = Reader::new();
            for line in &lines {
                let _outcome = reader.line(line.as_bytes()).and_then(|found| found.event());
            }
        }
    }
}
