//! What may follow `NVRM: Xid`: nothing panics, and a pid is trusted only by the rules.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mps_exporter::source::kernel_log::line::{Line, Recognizer};
use mps_exporter::source::kernel_log::xid::XidLine;
use mps_exporter::xid::is_pid_of_bystander;

fuzz_target!(|bytes: &[u8]| {
    if let Some(xid) = XidLine::parse(bytes) {
        if xid.pid_owns_channel {
            assert!(xid.pid.is_some_and(|pid| pid > 0) && !is_pid_of_bystander(xid.code));
        }
        assert!(xid.recovery_action.is_none() || xid.code == 154);
        let whole = [b"NVRM: Xid", bytes].concat();
        assert_eq!(Recognizer::default().line(&whole), Some(Line::Xid(xid)));
    }
});
