//! Which lines of the kernel log matter, and what they say.

use std::sync::LazyLock;

use memchr::memmem::{self, Finder};

use super::xid::{MARK, Scan, XidLine, number_after};
use crate::identity::PciAddress;

static DRIVER: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"NVRM: "));
static SWITCH: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"SXid (PCI:"));
static KILLED: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"Killed process "));
static OOM_KILL: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"oom-kill:constraint="));

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
    /// What the text of a record or line says, if it matters. The text may have any prefix.
    pub fn line<'a>(&mut self, text: &'a [u8]) -> Option<Line<'a>> {
        if let Some(at) = DRIVER.find(text) {
            return self.driver_line(&text[at..]);
        }
        if let Some(at) = SWITCH.find(text) {
            return sxid(&text[at + b"SXid (".len()..]);
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
        let rest = &message[memmem::find(message, b"RC all ")?..];
        let code = number_after(rest, b"channels for critical error ")?;
        Some(Line::AllChannelsFailed(code))
    }

    /// `Out of memory: Killed process 1 (comm) …`, `Memory cgroup out of memory: Killed process …`, or before it
    /// `oom-kill:constraint=…,task=comm,pid=1,uid=0`.
    fn oom_kill<'a>(&mut self, text: &[u8]) -> Option<Line<'a>> {
        if let Some(at) = OOM_KILL.find(text) {
            // The last one: the command before it may hold anything.
            let pid = number_after(&text[at..], b",pid=").filter(|pid| *pid != 0)?;
            self.oom_pid = Some(pid);
            return Some(Line::OomKill(pid));
        }
        let at = KILLED.find(text)?;
        let before = &text[..at];
        if !before.is_empty() && !before.ends_with(b"ut of memory: ") {
            return None;
        }
        let mut scan = Scan(&text[at + b"Killed process ".len()..]);
        let pid = scan.decimal().filter(|pid| *pid != 0)?;
        let is_told = self.oom_pid.take() == Some(pid);
        (!is_told).then_some(Line::OomKill(pid))
    }
}

/// `SXid (PCI:0000:05:00.0): 12028, Non-fatal, …`. Lines that go on about an error repeat its number.
fn sxid<'a>(after: &[u8]) -> Option<Line<'a>> {
    let mut scan = Scan(after);
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
            one("[...] NVRM: GPU at 0000:3b:00: GPU-1B2C3D4E-0000-1111-2222-333344445555"),
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
        assert!(
            matches!(one("usb 1-1: halfNVRM: Xid (PCI:0000:3b:00): 13, x"), Some(Line::Xid(_))),
            "appended text"
        );
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
