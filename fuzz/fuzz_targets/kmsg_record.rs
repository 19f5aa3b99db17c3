//! Any lines, as a recorded kernel log: nothing panics, and what is not the kernel's own never passes for it.
#![no_main]

use jiff::tz::TimeZone;
use jiff::Timestamp;
use libfuzzer_sys::fuzz_target;
use mps_exporter::source::kernel_log::record::Record;
use mps_exporter::source::kernel_log::recorded::Reader;
use mps_exporter::source::kernel_log::stamp::StampContext;

fuzz_target!(|bytes: &[u8]| {
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
});
