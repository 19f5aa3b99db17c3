#![no_main]

#[path = "../properties.rs"]
mod properties;

libfuzzer_sys::fuzz_target!(|answers: &[u8]| properties::control_answers(answers));
