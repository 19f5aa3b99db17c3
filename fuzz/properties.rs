//! What must hold of whatever a log, a kernel or a daemon says. libFuzzer looks for counterexamples (`fuzz_targets`);
//! `tests/any_input.rs` looks for some in every run of the tests.

#![allow(dead_code, reason = "each fuzz target uses one of them")]

use std::io::{BufRead, Cursor};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use mps_exporter::engine::Settings;
use mps_exporter::event::LogFile;
use mps_exporter::replay::{Kind, Recording};
use mps_exporter::source::control::answers::{Conversation, Depth};
use mps_exporter::source::kernel_log::line::{Line, Recognizer};
use mps_exporter::source::kernel_log::record::Record;
use mps_exporter::source::kernel_log::recorded::Reader;
use mps_exporter::source::kernel_log::stamp::StampContext;
use mps_exporter::source::kernel_log::xid::XidLine;
use mps_exporter::source::mps_log::reader::LineReader;
use mps_exporter::xid::{Catalogue, is_pid_of_bystander};

/// Whatever a control daemon answers, a conversation neither panics nor grows without bound.
pub fn control_answers(answers: &[u8]) {
    let text = String::from_utf8_lossy(answers);
    for depth in [Depth::State, Depth::Full] {
        let (mut conversation, _) = Conversation::new(depth);
        if text.split(['\n', '\0']).all(|line| conversation.line(line).is_ok())
            && let Ok(look) = conversation.finish()
        {
            assert!(look.servers.len() <= 64);
        }
    }
}

/// Any lines, as a recorded kernel log: nothing panics, and what is not the kernel's own never passes for it.
pub fn kernel_log(bytes: &[u8]) {
    let context = StampContext { zone: TimeZone::UTC, reference: Timestamp::UNIX_EPOCH };
    let mut reader = Reader::new();
    for line in bytes.split(|byte| *byte == b'\n') {
        let record = Record::parse(line);
        if let Some(found) = reader.line(line) {
            let _stamp = found.stamp(&context);
            let _event = found.event();
            assert!(!(found.is_from_kernel && line.starts_with(b"12,") && record.is_some()));
        }
        if let Some(record) = record {
            assert!(record.text().len() <= line.len());
        }
    }
}

/// What may follow `NVRM: Xid`: nothing panics, and a pid is trusted only by the rules.
pub fn xid_line(bytes: &[u8]) {
    if let Some(xid) = XidLine::parse(bytes) {
        if xid.pid_owns_channel {
            assert!(xid.pid.is_some_and(|pid| pid > 0) && !is_pid_of_bystander(xid.code));
        }
        assert!(xid.recovery_action.is_none() || xid.code == 154);
        let whole = [b"NVRM: Xid", bytes].concat();
        assert_eq!(Recognizer::default().line(&whole), Some(Line::Xid(xid)));
    }
}

/// Any bytes as an MPS log: every line is counted once, and how they arrive does not matter.
pub fn mps_log(cut: usize, text: &[u8]) {
    for file in [LogFile::Server, LogFile::Merged] {
        let mut whole = LineReader::new(file);
        let mut expected = Vec::new();
        let done = whole.read(text, |_, said| expected.push(said.into_entry(file)));
        assert!(done <= text.len());

        let mut pieces = LineReader::new(file);
        let mut said = Vec::new();
        let cut = cut % (text.len() + 1);
        let first = pieces.read(&text[..cut], |_, each| said.push(each.into_entry(file)));
        pieces.read(&text[first..], |_, each| said.push(each.into_entry(file)));
        assert_eq!(said, expected);
        let (counts, in_pieces) = (whole.take_counts(), pieces.take_counts());
        assert_eq!(counts, in_pieces);
        let lines = text.split(|byte| *byte == b'\n').count() as u64;
        assert!(counts.recognized + counts.unrecognized <= lines);
    }
}

/// Logs of any content through the whole model: nothing panics, no incident is told twice or ends before it began, and
/// the same logs give the same incidents.
pub fn replay(server: &[u8], control: &[u8], kernel: &[u8]) {
    let run = || {
        let mut recording = Recording::new(TimeZone::UTC, None, Timestamp::UNIX_EPOCH);
        let logs = [
            ("server.log", Kind::Mps(LogFile::Server), server),
            ("control.log", Kind::Mps(LogFile::Control), control),
            ("kern.log", Kind::Kernel, kernel),
        ];
        for (label, kind, bytes) in logs {
            let parts: Vec<Box<dyn BufRead>> = vec![Box::new(Cursor::new(bytes.to_vec()))];
            recording.add(label, "default", kind, parts);
        }
        recording.run(settings())
    };
    let outcome = run();
    let mut ids = std::collections::BTreeSet::new();
    for incident in &outcome.incidents {
        assert!(ids.insert(incident.id.clone()), "{} twice", incident.id);
        assert!(incident.ended_at.is_none_or(|end| end >= incident.started_at), "{incident:?}");
    }
    assert_eq!(outcome.incidents, run().incidents);
}

fn settings() -> Settings {
    Settings {
        window: Duration::from_secs(5),
        min_clients: 2,
        min_ratio: 0.5,
        incidents_kept: 0,
        look_interval: Duration::from_secs(60),
        xids: Arc::new(Catalogue::builtin().clone()),
    }
}
