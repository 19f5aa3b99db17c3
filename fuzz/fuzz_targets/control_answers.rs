//! Whatever a control daemon answers, a conversation neither panics nor grows without bound.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mps_exporter::source::control::answers::{Conversation, Depth};

fuzz_target!(|answers: &[u8]| {
    for depth in [Depth::State, Depth::Full] {
        let (mut conversation, _) = Conversation::new(depth);
        let text = String::from_utf8_lossy(answers);
        if text.split(['\n', '\0']).all(|line| conversation.line(line).is_ok())
            && let Ok(look) = conversation.finish()
        {
            assert!(look.servers.len() <= 64);
        }
    }
});
