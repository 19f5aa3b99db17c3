//! Which lines of the kernel log matter, and what they say.

use memchr::memmem;

use super::xid::{MARK, Scan, XidLine, number_after};
use crate::identity::PciAddress;

const DRIVER: &[u8] = b"NVRM: ";
const SWITCH: &[u8] = b"nvidia-nvswitch";
const OOM_KILL: &[u8] = b"oom-kill:constraint=";
/// What `oom_kill_process` of the kernel puts before `Killed process`; nothing on older ones.
const OUT_OF_MEMORY: [&[u8]; 4] = [
    b"",
    b"Out of memory: ",
    b"Out of memory (oom_kill_allocating_task): ",
    b"Memory cgroup out of memory: ",
];

const OFF_THE_BUS: &[u8] = b"fallen off the bus";
const XID_OFF_THE_BUS: u32 = 79;
/// A GPU's UUID: the prefix and 8-4-4-4-12 digits.
const UUID_LENGTH: usize = 40;

/// What a line says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Line<'a> {
    /// An Xid.
    Xid(XidLine),
    /// An `NVSwitch` error.
    Sxid {
        /// The code.
        code: u32,
        /// The switch.
        pci: PciAddress,
        /// Whether the line calls it fatal.
        is_fatal: bool,
    },
    /// A GPU is gone, and no Xid said so.
    GpuLost(PciAddress),
    /// The driver failed every channel of a GPU for this Xid.
    AllChannelsFailed(u32),
    /// The kernel killed this process for want of memory.
    OomKill(u32),
    /// A GPU's UUID, as it is spelt there.
    GpuUuid(PciAddress, &'a str),
    /// It calls itself an Xid or SXid, but cannot be read.
    Unreadable,
}

/// Recognises lines. It remembers the line before where one message comes as several.
#[derive(Debug, Clone, Default)]
pub struct Recognizer {
    /// `The NVIDIA GPU <address>`, and how many lines may still say what is with it.
    subject: Option<(PciAddress, u8)>,
    /// A GPU whose Xid 79 was seen: the same words without Xid follow it.
    off_the_bus: Option<PciAddress>,
    /// The process of the last `oom-kill:` line: `Killed process` follows it.
    oom_pid: Option<u32>,
}

impl Recognizer {
    /// What a message of the kernel says, if it matters. It must begin with the mark of who speaks: further on,
    /// messages hold names that any user may choose, of files, commands and control groups.
    pub fn line<'a>(&mut self, text: &'a [u8]) -> Option<Line<'a>> {
        if text.starts_with(DRIVER) {
            return self.driver_line(text);
        }
        if let Some(after) = text.strip_prefix(SWITCH) {
            return switch_line(after);
        }
        self.oom_kill(text)
    }

    fn driver_line<'a>(&mut self, text: &'a [u8]) -> Option<Line<'a>> {
        if let Some(after) = text.strip_prefix(MARK) {
            let Some(xid) = XidLine::parse(after) else { return Some(Line::Unreadable) };
            if xid.code == XID_OFF_THE_BUS {
                self.off_the_bus = Some(xid.pci);
            }
            return Some(Line::Xid(xid));
        }
        let message = &text[b"NVRM: ".len()..];
        let mut scan = Scan(message);
        if scan.skip(b"GPU at ").is_some() {
            return gpu_uuid(scan);
        }
        if scan.skip(b"The NVIDIA GPU ").is_some() {
            // Lost at probe: one record with line feeds inside, or three lines of a text log.
            let pci = scan.pci_address()?;
            if memmem::find(message, OFF_THE_BUS).is_some() {
                return Some(Line::GpuLost(pci));
            }
            self.subject = Some((pci, 2));
            return None;
        }
        if let Some((pci, lines_left)) = self.subject.take() {
            if memmem::find(message, OFF_THE_BUS).is_some() {
                return Some(Line::GpuLost(pci));
            }
            self.subject = lines_left.checked_sub(1).filter(|left| *left > 0).map(|left| (pci, left));
        }
        if scan.skip(b"GPU ").is_some() {
            let pci = scan.pci_address()?;
            scan.skip(b": ")?;
            memmem::find(scan.0, OFF_THE_BUS)?;
            let is_told = self.off_the_bus.take_if(|told| *told == pci).is_some();
            return (!is_told).then_some(Line::GpuLost(pci));
        }
        all_channels_failed(message)
    }

    /// `Out of memory: Killed process 1 (comm) …`, `Memory cgroup out of memory: Killed process …`, or before it
    /// `oom-kill:constraint=…,task=comm,pid=1,uid=0`.
    fn oom_kill<'a>(&mut self, text: &[u8]) -> Option<Line<'a>> {
        if let Some(after) = text.strip_prefix(OOM_KILL) {
            // The last one: the command before it may hold anything.
            let pid = number_after(after, b",pid=").filter(|pid| *pid != 0)?;
            self.oom_pid = Some(pid);
            return Some(Line::OomKill(pid));
        }
        let killed =
            OUT_OF_MEMORY.iter().find_map(|why| text.strip_prefix(*why)?.strip_prefix(b"Killed process "))?;
        let mut scan = Scan(killed);
        let pid = scan.decimal().filter(|pid| *pid != 0)?;
        let is_told = self.oom_pid.take() == Some(pid);
        (!is_told).then_some(Line::OomKill(pid))
    }
}

/// `krcRcAndNotifyAllChannels_IMPL: RC all user channels for critical error 79.`, since 590 behind `GPU0 `.
fn all_channels_failed<'a>(message: &[u8]) -> Option<Line<'a>> {
    let mut scan = Scan(message);
    if scan.skip(b"GPU").is_some() {
        scan.decimal()?;
        scan.skip(b" ")?;
    }
    // The name of the function.
    if let Some(end) = memmem::find(scan.0, b": ") {
        let is_name = scan.0[..end].iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_');
        scan.0 = if is_name { &scan.0[end + 2..] } else { scan.0 };
    }
    scan.skip(b"RC all ")?;
    scan.skip(b"user ");
    scan.skip(b"channels for critical error ")?;
    scan.decimal().map(Line::AllChannelsFailed)
}

/// `3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, …`. Lines that go on about an error repeat its number.
fn switch_line<'a>(after: &[u8]) -> Option<Line<'a>> {
    let mut scan = Scan(after);
    scan.decimal()?;
    scan.skip(b": SXid (")?;
    let mut head = || {
        let pci = scan.pci_address()?;
        scan.skip(b"): ")?;
        Some((pci, scan.decimal()?))
    };
    let Some((pci, code)) = head() else { return Some(Line::Unreadable) };
    scan.skip(b", ")?;
    let is_fatal = scan.0.starts_with(b"Fatal");
    let is_first = is_fatal || scan.0.starts_with(b"Non-fatal");
    is_first.then_some(Line::Sxid { code, pci, is_fatal })
}

/// `GPU at PCI:0000:9b:00: GPU-<uuid>`, printed once per GPU before its first Xid.
fn gpu_uuid(mut scan: Scan<'_>) -> Option<Line<'_>> {
    let pci = scan.pci_address()?;
    scan.skip(b": ")?;
    let uuid = std::str::from_utf8(scan.0.get(..UUID_LENGTH)?).ok()?;
    let digits = uuid.strip_prefix("GPU-")?;
    let is_uuid = digits.char_indices().all(|(index, each)| match index {
        8 | 13 | 18 | 23 => each == '-',
        _ => each.is_ascii_hexdigit(),
    });
    let ends = scan.0.get(UUID_LENGTH).is_none_or(|next| !next.is_ascii_alphanumeric());
    (is_uuid && ends).then_some(Line::GpuUuid(pci, uuid))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const HERE: PciAddress = PciAddress { domain: 0, bus: 0x3b, device: 0 };

    fn lines(texts: &[&str]) -> Vec<String> {
        let mut recognizer = Recognizer::default();
        texts
            .iter()
            .filter_map(|text| recognizer.line(text.as_bytes()).map(|line| format!("{line:?}")))
            .collect()
    }

    fn one(text: &str) -> Option<Line<'_>> {
        Recognizer::default().line(text.as_bytes())
    }

    #[test]
    fn companions_of_xids_are_read() {
        assert_eq!(
            one("NVRM: GPU at PCI:0000:3b:00: GPU-1b2c3d4e-0000-1111-2222-333344445555"),
            Some(Line::GpuUuid(HERE, "GPU-1b2c3d4e-0000-1111-2222-333344445555"))
        );
        assert!(matches!(
            one("NVRM: GPU at 0000:3b:00: GPU-1B2C3D4E-0000-1111-2222-333344445555"),
            Some(Line::GpuUuid(HERE, _))
        ));
        assert_eq!(one("NVRM: GPU at PCI:0000:3b:00: GPU-1b2c"), None);
        assert_eq!(one("NVRM: GPU at PCI:0000:3b:00: GPU-1b2c3d4e-0000-1111-2222-3333444455556"), None);
        assert_eq!(
            one("NVRM: krcRcAndNotifyAllChannels_IMPL: RC all user channels for critical error 79."),
            Some(Line::AllChannelsFailed(79))
        );
        assert_eq!(
            one("NVRM: kgspRcAndNotifyAllChannels_IMPL: RC all channels for critical error 119."),
            Some(Line::AllChannelsFailed(119))
        );
    }

    #[test]
    fn a_loss_without_an_xid_is_told_once() {
        let lost = ["GpuLost(PciAddress { domain: 0, bus: 59, device: 0 })"];
        let record = "NVRM: The NVIDIA GPU 0000:3b:00.0\nNVRM: (PCI ID: 10de:2330) installed in this system has\n\
                      NVRM: fallen off the bus and is not responding to commands.";
        assert_eq!(lines(&[record]), lost);
        assert_eq!(lines(&record.lines().collect::<Vec<_>>()), lost, "the same as three lines");
        assert_eq!(lines(&["NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."]), lost);
        let told = lines(&[
            "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
            "NVRM: GPU 0000:3b:00.0: GPU serial number is 1650000000000.",
        ]);
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(told[0].starts_with("Xid"));
        let another = lines(&[
            "NVRM: The NVIDIA GPU 0000:3b:00.0",
            "NVRM: (PCI ID: 10de:2330) installed in this system is",
            "NVRM: not supported by the NVIDIA driver.",
            "NVRM: of 1999, which has fallen off the bus",
        ]);
        assert_eq!(another, [""; 0]);
    }

    #[test]
    fn switch_errors_are_counted_by_their_first_line() {
        let pci = PciAddress { domain: 0, bus: 5, device: 0 };
        assert_eq!(
            one(
                "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)"
            ),
            Some(Line::Sxid { code: 12028, pci, is_fatal: false })
        );
        assert_eq!(
            one("nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 63 LTSSM Fault Up"),
            Some(Line::Sxid { code: 20034, pci, is_fatal: true })
        );
        assert_eq!(
            one("nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Severity 1 Engine instance 60"),
            None
        );
        assert_eq!(one("nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Data {0x10000000, 0x0}"), None);
        assert_eq!(one("nvidia-nvswitch0: SXid (PCI:junk): 20034"), Some(Line::Unreadable));
    }

    #[test]
    fn oom_kills_are_told_once() {
        let oom = |pid: u32| format!("OomKill({pid})");
        assert_eq!(
            lines(&[
                "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,mems_allowed=0,oom_memcg=/a,task_memcg=/a,task=t,pid=9,x,pid=71,uid=0",
                "Memory cgroup out of memory: Killed process 71 (t,pid=9,x) total-vm:1kB, anon-rss:1kB",
                "Out of memory: Killed process 72 (b) total-vm:1kB",
                "Killed process 73 (c) total-vm:1kB, anon-rss:1kB",
                "someone: Killed process 74 (d)",
                "oom_reaper: reaped process 72 (b), now anon-rss:0kB",
                "Out of memory: Killed process 0 (e)",
            ]),
            [oom(71), oom(72), oom(73)]
        );
    }

    #[test]
    fn noise_around_errors_is_none_of_them() {
        for text in [
            "",
            "NVRM: ",
            "NVRM: GPU Board Serial Number: 1650000000000",
            "NVRM: GPU4 GSP RPC buffer contains function 103 (GSP_RM_ALLOC) and data 0x2081 0x4.",
            "NVRM:      0    103  GSP_RM_ALLOC          0x2081 0x4 0x00062ed1a6bd61fa 0x0          y",
            "NVRM: Rate limiting GSP RPC error prints for GPU at PCI:0000:9b:00 (printing 1 of every 30).",
            "NVRM: GPU6 _kgspLogRpcTimeout: ************ GSP Timeout ************",
            "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  595.71.05  Release Build  (root@host)",
            "NVRM: krcWatchdog_IMPL: RC watchdog: GPU is probably locked!  Notify Timeout Seconds: 7",
            "CPU: 17 PID: 2024380 Comm: nvidia-smi Tainted: P           OE",
            "python[4711]: segfault at 0 ip 0 sp 0 error 4 in NVRM",
        ] {
            assert_eq!(one(text), None, "{text}");
        }
        assert_eq!(one("NVRM: Xid : 32, pid=2280636"), Some(Line::Unreadable));
    }

    /// Whatever a user may choose stands behind something that the kernel put there.
    #[test]
    fn what_a_user_can_name_is_none_of_them() {
        for told in [
            "NVRM: Xid (PCI:0000:10:00): 79, GPU has fallen off the bus.",
            "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
            "NVRM: x: RC all channels for critical error 79.",
            "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 63",
            "oom-kill:constraint=CONSTRAINT_NONE,task=t,pid=71,uid=0",
            "Out of memory: Killed process 72 (b) total-vm:1kB",
        ] {
            assert!(one(told).is_some(), "{told}");
            for forged in [
                format!("foo: {told}"),
                format!(" {told}"),
                format!("x\n{told}"),
                format!("audit: type=1701 audit(1.2:3): comm=\"x\n{told}\""),
                format!("process '/home/u/{told}' started with executable stack"),
                format!("{}[71]: segfault at 0 ip 0 sp 0 error 4 in {told}", &told[..15]),
                format!("Out of memory of {told}"),
            ] {
                let line = one(&forged);
                assert!(matches!(line, None | Some(Line::Unreadable)), "{forged}: {line:?}");
            }
            let oom = format!(
                "oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/{told},task_memcg=/{told},task=a,pid=9,uid=1"
            );
            assert_eq!(one(&oom), Some(Line::OomKill(9)));
        }
        // A command of 15 bytes, and the library's name.
        let text = "NVRM: RC all [71]: segfault at 0 in RC all channels for critical error 79[400000+1000]";
        assert_eq!(one(text), None);
        let text =
            "NVRM: [71]: segfault at 0 in libfallen off the bus, RC all channels for critical error 79";
        assert_eq!(one(text), None);
    }

    proptest! {
        #[test]
        fn no_bytes_panic(
            pieces in prop::collection::vec(
                prop_oneof![
                    Just("NVRM: "), Just("Xid"), Just(" (PCI:"), Just("0000:3b:00"), Just("): "), Just("79"), Just(", "),
                    Just("GPU at "), Just("The NVIDIA GPU "), Just("GPU "), Just("fallen off the bus"), Just("SXid (PCI:"),
                    Just("Killed process "), Just("oom-kill:constraint="), Just(",pid="), Just("RC all channels for critical error "),
                    Just("GPU-1b2c3d4e-0000-1111-2222-333344445555"), Just("\u{fe}é"), Just("pid="), Just("name="),
                ],
                0..14,
            ),
        ) {
            let text = pieces.concat();
            let mut recognizer = Recognizer::default();
            for _ in 0..3 {
                let _outcome = recognizer.line(text.as_bytes());
            }
        }
    }
}
