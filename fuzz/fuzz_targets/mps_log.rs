//! Any bytes are read without a panic, every line is counted once, and how they arrive does not matter.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mps_exporter::event::LogFile;
use mps_exporter::source::mps_log::reader::LineReader;

fuzz_target!(|input: (usize, &[u8])| {
    let (cut, text) = input;
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
        let lines = text.iter().filter(|byte| **byte == b'\n').count() as u64;
        assert!(counts.recognized + counts.unrecognized <= lines + 1);
    }
});
