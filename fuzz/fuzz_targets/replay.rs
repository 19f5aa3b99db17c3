#![no_main]

#[path = "../properties.rs"]
mod properties;

// server.log, control.log and kernel log, with a byte between them that is in no text.
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let mut logs = bytes.splitn(3, |byte| *byte == 0xff);
    let mut next = || logs.next().unwrap_or_default();
    properties::replay(next(), next(), next());
});
