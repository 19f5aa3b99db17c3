//! Label values: the words for every enumerated one, and what is done to free text before it becomes one.

use std::borrow::Cow;

use crate::engine::incident::{Cause, CulpritEvidence};
use crate::engine::snapshot::{ClientState, DaemonState, LossCause, Scope, Sharing};
use crate::event::{ComputeMode, RecoveryAction, Rejection, ServerStatus, SourceName, Trouble, XidSource};

/// A closed set of label values.
pub trait LabelValue: Copy + PartialEq + 'static {
    /// Every value, so that counters start at 0 and state sets are complete.
    const ALL: &'static [Self];

    /// The word in the label.
    fn label(self) -> &'static str;
}

macro_rules! label_values {
    ($($type:ident { $($variant:ident = $word:literal),* $(,)? })*) => {
        $(impl LabelValue for $type {
            const ALL: &'static [$type] = &[$($type::$variant),*];

            fn label(self) -> &'static str {
                match self {
                    $($type::$variant => $word),*
                }
            }
        })*

        #[cfg(test)]
        fn assert_words_are_serde_names() {
            $(for value in $type::ALL {
                let json = serde_json::to_value(value).unwrap();
                assert_eq!(json, value.label(), stringify!($type));
            })*
        }
    };
}

label_values! {
    DaemonState {
        Serving = "serving", Idle = "idle", Wedged = "wedged", Down = "down", Stale = "stale", Unknown = "unknown",
    }
    ServerStatus { Initializing = "initializing", Active = "active", Fault = "fault" }
    Rejection {
        ClientLimit = "client_limit", DeviceConnectionLimit = "device_connection_limit", InReset = "in_reset",
        Teardown = "teardown", Credentials = "credentials",
    }
    Trouble {
        FileDescriptorLimit = "file_descriptor_limit", SharedMemory = "shared_memory",
        DeviceNotServed = "device_not_served", LogsUnwritable = "logs_unwritable",
        AlreadyRunning = "already_running", PipeDirectory = "pipe_directory", Privileges = "privileges",
    }
    LossCause {
        Fault = "fault", ServerExit = "server_exit", Gpu = "gpu", Killed = "killed", Terminated = "terminated",
        Unexplained = "unexplained",
    }
    Cause {
        Fault = "fault", ServerExit = "server_exit", Gpu = "gpu", Killed = "killed", Unexplained = "unexplained",
    }
    CulpritEvidence { ServerLog = "server_log", XidChannel = "xid_channel" }
    Scope { Application = "application", Server = "server", Gpu = "gpu" }
    Sharing { Mps = "mps", TimeSlicing = "time_slicing", Exclusive = "exclusive" }
    ComputeMode {
        Default = "default", ExclusiveThread = "exclusive_thread", Prohibited = "prohibited",
        ExclusiveProcess = "exclusive_process",
    }
    RecoveryAction {
        None = "none", GpuReset = "gpu_reset", NodeReboot = "node_reboot", DrainP2p = "drain_p2p",
        DrainAndReset = "drain_and_reset", RecoverImexDomain = "recover_imex_domain", BusReset = "bus_reset",
        SystemReboot = "system_reboot",
    }
    XidSource { Kmsg = "kmsg", Nvml = "nvml" }
    SourceName {
        ControlLog = "control_log", ServerLog = "server_log", DaemonOutput = "daemon_output", Control = "control",
        ControlLock = "control_lock", Nvml = "nvml", KernelLog = "kernel_log", Proc = "proc", PodLogs = "pod_logs",
        Kubelet = "kubelet", Discovery = "discovery",
    }
    ClientState { Active = "active", Lost = "lost" }
}

/// The longest label value, in bytes. Command names, paths and pod names are shorter.
pub const MAX_VALUE_BYTES: usize = 256;

/// Free text as a label value: bounded, without control characters. A value that had to change ends in a hash of the
/// original, so that two values that differ stay different.
pub fn sanitized(value: &str) -> Cow<'_, str> {
    // Nearly all are plain ASCII, and a page has thousands.
    let is_clean =
        value.bytes().all(|byte| (b' '..=b'~').contains(&byte)) || !value.chars().any(char::is_control);
    if value.len() <= MAX_VALUE_BYTES && is_clean {
        return Cow::Borrowed(value);
    }
    let mark = format!("~{:08x}", fnv1a(value.as_bytes()));
    let mut kept = String::with_capacity(MAX_VALUE_BYTES);
    for character in value.chars() {
        let character = if character.is_control() { '\u{fffd}' } else { character };
        if kept.len() + character.len_utf8() + mark.len() > MAX_VALUE_BYTES {
            break;
        }
        kept.push(character);
    }
    Cow::Owned(kept + &mark)
}

/// 32-bit FNV-1a: the same on every run, so that series keep their names across restarts.
fn fnv1a(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn words_are_those_of_the_api() {
        assert_words_are_serde_names();
    }

    #[test]
    fn ordinary_values_pass_untouched() {
        for value in ["", "default/0", "GPU-5c0a…", "träning-7"] {
            assert_eq!(sanitized(value), value);
        }
    }

    #[test]
    fn changed_values_stay_distinct() {
        let long = "x".repeat(MAX_VALUE_BYTES);
        assert_eq!(sanitized(&long), long);
        assert_ne!(sanitized(&format!("{long}a")), sanitized(&format!("{long}b")));
        assert_ne!(sanitized("a\u{1}"), sanitized("a\u{2}"));
    }

    proptest! {
        #[test]
        fn any_text_becomes_a_bounded_value(text in any::<String>(), repeat in 1_usize..200) {
            let value = sanitized(&text.repeat(repeat)).into_owned();
            prop_assert!(value.len() <= MAX_VALUE_BYTES);
            prop_assert!(!value.chars().any(char::is_control));
        }
    }
}
