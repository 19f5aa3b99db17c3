#![no_main]

#[path = "../properties.rs"]
mod properties;

libfuzzer_sys::fuzz_target!(|input: (usize, &[u8])| properties::mps_log(input.0, input.1));
