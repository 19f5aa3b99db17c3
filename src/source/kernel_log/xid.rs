//! The Xid line of NVIDIA's driver, in the shapes of all driver generations.
//!
//! ```text
//! NVRM: Xid (ATTR): CODE[, pid=PID, name=NAME][, BODY][ caused by previous Xid N]
//! ATTR = ["PCI:"] DOMAIN ":" BUS ":" DEVICE [" GPU-I:" NN [" GPU-CI:" NN]]
//! PID  = decimal | '<unknown>'
//! ```
//!
//! After `krcReportXid_IMPL` of open-gpu-kernel-modules (515 to 595) and published logs of older drivers. Up to about
//! R367 there is no `PCI:`, up to R450 no pid, up to R495 no name; since R570 pid and name are left out when unknown.

use memchr::memmem;

use super::record::hex_digit;
use crate::identity::PciAddress;
use crate::xid::is_pid_of_bystander;

/// What comes before an Xid line's address.
pub(super) const MARK: &[u8] = b"NVRM: Xid";
const RECOVERY_ACTION_CHANGED: u32 = 154;

/// An Xid line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct XidLine {
    /// The GPU.
    pub pci: PciAddress,
    /// MIG GPU instance, where told.
    pub gpu_instance: Option<u32>,
    /// MIG compute instance, where told.
    pub compute_instance: Option<u32>,
    /// The code.
    pub code: u32,
    /// The process that the line names, in the host's pid namespace.
    pub pid: Option<u32>,
    /// Whether `pid` owns the faulting channel: the line names a channel, and the code is none whose pid is whoever
    /// was in the driver.
    pub pid_owns_channel: bool,
    /// `caused by previous Xid N`.
    pub caused_by: Option<u32>,
    /// For 154: the number of the new recovery action.
    pub recovery_action: Option<u32>,
}

impl XidLine {
    /// Reads what follows `MARK`; `None` when it is no Xid after all, or a mutilated one.
    pub fn parse(after_mark: &[u8]) -> Option<XidLine> {
        let mut scan = Scan(after_mark);
        scan.skip(b" (")?;
        let pci = scan.pci_address()?;
        let gpu_instance = scan.skip(b" GPU-I:").and_then(|()| scan.decimal());
        let compute_instance = scan.skip(b" GPU-CI:").and_then(|()| scan.decimal());
        scan.skip(b"): ")?;
        let code = scan.decimal()?;
        // `abc` after digits is no code; a comma, a blank or the end is.
        if scan.0.first().is_some_and(u8::is_ascii_alphanumeric) {
            return None;
        }
        let pid = scan.skip(b", pid=").map(|()| scan.field()).and_then(whole_decimal);
        let pid = pid.filter(|pid| *pid != 0);
        if scan.skip(b", name=").is_some() {
            scan.field();
        }
        let body = scan.0;
        let names_channel = has_channel(body);
        Some(XidLine {
            pci,
            gpu_instance,
            compute_instance,
            code,
            pid,
            pid_owns_channel: pid.is_some() && names_channel && !is_pid_of_bystander(code),
            caused_by: number_after(body, b" caused by previous Xid "),
            recovery_action: (code == RECOVERY_ACTION_CHANGED).then(|| recovery_action(body)).flatten(),
        })
    }
}

/// A cursor over the rest of a line.
pub(super) struct Scan<'a>(pub(super) &'a [u8]);

impl<'a> Scan<'a> {
    /// Moves past `what` when it is next.
    pub(super) fn skip(&mut self, what: &[u8]) -> Option<()> {
        self.0 = self.0.strip_prefix(what)?;
        Some(())
    }

    /// Takes a decimal number.
    pub(super) fn decimal(&mut self) -> Option<u32> {
        let digits = self.0.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let (number, rest) = self.0.split_at(digits);
        let number = whole_decimal(number)?;
        self.0 = rest;
        Some(number)
    }

    /// Takes a hexadecimal number of at most `max_digits` digits, 8 or fewer.
    fn hexadecimal(&mut self, max_digits: usize) -> Option<u32> {
        let digits = self.0.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
        if !(1..=max_digits).contains(&digits) {
            return None;
        }
        let (number, rest) = self.0.split_at(digits);
        self.0 = rest;
        number.iter().try_fold(0, |value: u32, digit| Some(value << 4 | u32::from(hex_digit(*digit)?)))
    }

    /// Takes a PCI address, with or without `PCI:` and function.
    pub(super) fn pci_address(&mut self) -> Option<PciAddress> {
        self.skip(b"PCI:");
        let domain = self.hexadecimal(8)?;
        self.skip(b":")?;
        let bus = u8::try_from(self.hexadecimal(2)?).ok()?;
        self.skip(b":")?;
        let device = u8::try_from(self.hexadecimal(2)?).ok()?;
        if self.skip(b".").is_some() {
            self.hexadecimal(1)?;
        }
        Some(PciAddress { domain, bus, device })
    }

    /// Takes everything up to the next `, `, or to the end.
    fn field(&mut self) -> &'a [u8] {
        let end = memmem::find(self.0, b", ").unwrap_or(self.0.len());
        let (field, rest) = self.0.split_at(end);
        self.0 = rest;
        field
    }
}

fn whole_decimal(digits: &[u8]) -> Option<u32> {
    super::record::decimal(digits).and_then(|number| u32::try_from(number).ok())
}

/// The decimal number after the last `words`.
pub(super) fn number_after(text: &[u8], words: &[u8]) -> Option<u32> {
    let at = memmem::rfind(text, words)?;
    Scan(&text[at + words.len()..]).decimal()
}

/// Whether a body names a channel: `Ch 00000008`, `ChID 0052`, `ChId 0008`, `Channel ID 0000000d`,
/// `Channel 00000020`, `channel 0x0000001a`.
fn has_channel(body: &[u8]) -> bool {
    const WORDS: [&[u8]; 4] = [b" ID ", b"ID ", b"Id ", b" "];
    memmem::find_iter(body, b"Ch").chain(memmem::find_iter(body, b"channel 0x")).any(|at| {
        if at > 0 && body[at - 1].is_ascii_alphanumeric() {
            return false;
        }
        let mut scan = Scan(&body[at..]);
        if scan.skip(b"channel 0x").is_none() {
            let word = if scan.skip(b"Channel").is_some() { Some(()) } else { scan.skip(b"Ch") };
            if word.is_none() || !WORDS.iter().any(|between| scan.skip(between).is_some()) {
                return false;
            }
        }
        let digits = scan.0.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
        (4..=8).contains(&digits)
    })
}

/// `… changed from 0x0 (None) to 0x1 (GPU Reset Required)`: 1. The words differ between versions.
fn recovery_action(body: &[u8]) -> Option<u32> {
    let from = memmem::find(body, b"changed from ")?;
    let to = memmem::rfind(&body[from..], b" to 0x")?;
    Scan(&body[from + to + b" to 0x".len()..]).hexadecimal(8)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(line: &str) -> Option<XidLine> {
        XidLine::parse(line.strip_prefix("NVRM: Xid").unwrap().as_bytes())
    }

    fn at(domain: u32, bus: u8, device: u8) -> PciAddress {
        PciAddress { domain, bus, device }
    }

    /// Address, code, pid, whether it owns the channel.
    type Basics = (PciAddress, u32, Option<u32>, bool);

    #[test]
    fn every_generation_is_read() {
        let cases: &[(&str, Basics)] = &[
            (
                "NVRM: Xid (0000:0a:00): 31, Ch 0000000c, engmask 00000110, intr 10000000",
                (at(0, 0x0a, 0), 31, None, false),
            ),
            (
                "NVRM: Xid (0000:00:06): 13, 0000 e0012300 00004497 00001818 00000000 00500000",
                (at(0, 0, 6), 13, None, false),
            ),
            (
                "NVRM: Xid (PCI:0000:21:00): 31, Ch 0000005b, intr 10000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_2 faulted @ 0x0_00001000. Fault is of type FAULT_PDE ACCESS_TYPE_READ",
                (at(0, 0x21, 0), 31, None, false),
            ),
            (
                "NVRM: Xid (PCI:0000:10:1c): 94, pid=7001, Contained: SM (0x1). RST: No, D-RST: No",
                (at(0, 0x10, 0x1c), 94, Some(7001), false),
            ),
            (
                "NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics SM Warp Exception on (GPC 2, TPC 1, SM 0): Out Of Range Address",
                (at(0, 0xcb, 0), 13, None, false),
            ),
            (
                "NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=train, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS",
                (at(0, 0x3b, 0), 31, Some(4711), true),
            ),
            (
                "NVRM: Xid (PCI:0000:3b:00): 43, pid=4712, name=pt_main_thread, Ch 00000010",
                (at(0, 0x3b, 0), 43, Some(4712), true),
            ),
            (
                "NVRM: Xid (PCI:0000:c1:00): 31, pid=26, name=python, channel 0x0000001a, intr 00000000. MMU Fault: ENGINE GRAPHICS GPC10 GPCCLIENT_T1_5",
                (at(0, 0xc1, 0), 31, Some(26), true),
            ),
            (
                "NVRM: Xid (PCI:0000:02:00): 31, pid=56, name=python3.12, channel 0x01000005. MMU Fault: ENGINE CE2",
                (at(0, 2, 0), 31, Some(56), true),
            ),
            (
                "NVRM: Xid (PCI:0000:02:00): 31, pid=57, name=modprobe, MMU Fault: ENGINE CE4 faulted @ 0xf_ffc01000, REGION_VIOLATION",
                (at(0, 2, 0), 31, Some(57), false),
            ),
            (
                "NVRM: Xid (PCI:0000:66:00): 32, pid=228, name=train.3, Channel ID 0000000e intr0 00040000",
                (at(0, 0x66, 0), 32, Some(228), true),
            ),
            (
                "NVRM: Xid (PCI:0001:ab:1d): 69, pid=131, name=a, Class Error: ChId 0009, Class 0000cbc0, Offset 00000184",
                (at(1, 0xab, 0x1d), 69, Some(131), true),
            ),
            (
                "NVRM: Xid (PCI:0000:01:00): 13, pid=5, name=x, Graphics Exception: ChID 0052, Class 00000000",
                (at(0, 1, 0), 13, Some(5), true),
            ),
            (
                "NVRM: Xid (PCI:0000:0b:00): 109, pid=112, name=Renderer, Ch 00000021, errorString CTX SWITCH TIMEOUT, Info 0xac00e",
                (at(0, 0x0b, 0), 109, Some(112), true),
            ),
            (
                "NVRM: Xid (PCI:0000:01:00): 109, name=WoW.exe, errorString CTX SWITCH TIMEOUT",
                (at(0, 1, 0), 109, None, false),
            ),
            (
                "NVRM: Xid (PCI:0000:9b:00): 119, pid=20, name=nvidia-smi, Timeout after 6s of waiting for RPC response from GPU4 GSP! Expected function 103 (GSP_RM_ALLOC) (0x2081 0x4).",
                (at(0, 0x9b, 0), 119, Some(20), false),
            ),
            (
                "NVRM: Xid (PCI:0002:00:00): 119, pid=15, name=nvc:[driver], Timeout after 6s of waiting",
                (at(2, 0, 0), 119, Some(15), false),
            ),
            (
                "NVRM: Xid (PCI:0018:01:00): 145, pid=87, name=ray::Worker, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008",
                (at(0x18, 1, 0), 145, Some(87), false),
            ),
            ("NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus.", (at(0, 6, 0), 79, None, false)),
            ("NVRM: Xid (PCI:0000:3f:00): 46", (at(0, 0x3f, 0), 46, None, false)),
            ("NVRM: Xid (PCI:0000:9b:00): 8, pid=5678, name=idle", (at(0, 0x9b, 0), 8, Some(5678), false)),
            (
                "NVRM: Xid (PCI:0000:66:00): 999, pid=1234, name=test",
                (at(0, 0x66, 0), 999, Some(1234), false),
            ),
            ("NVRM: Xid (PCI:0000:00:08.0): 145, RLW_REMAP Nonfatal XC1", (at(0, 0, 8), 145, None, false)),
            (
                "NVRM: Xid (PCI:00000000:02:00): 79, GPU has fallen off the bus.",
                (at(0, 2, 0), 79, None, false),
            ),
            (
                "NVRM: Xid (PCI:0000:65:00): 64, pid='N/A', Row Remapper: Failed",
                (at(0, 0x65, 0), 64, None, false),
            ),
            (
                "NVRM: Xid (PCI:0000:01:00): 79, pid=<varies>, name=<a|b>, GPU has fallen",
                (at(0, 1, 0), 79, None, false),
            ),
            (
                "NVRM: Xid (PCI:0000:01:00): 43, pid=99, name=x, y, Ch 00000008",
                (at(0, 1, 0), 43, Some(99), true),
            ),
            ("NVRM: Xid (PCI:0000:01:00): 43, pid=0, name=x, Ch 00000008", (at(0, 1, 0), 43, None, false)),
        ];
        for (line, expected) in cases {
            let xid = parse(line).unwrap_or_else(|| panic!("{line}"));
            assert_eq!((xid.pci, xid.code, xid.pid, xid.pid_owns_channel), *expected, "{line}");
            assert_eq!((xid.gpu_instance, xid.caused_by, xid.recovery_action), (None, None, None), "{line}");
        }
    }

    #[test]
    fn instances_causes_and_recovery_actions_are_read() {
        let mig =
            parse("NVRM: Xid (PCI:0000:3b:00 GPU-I:05 GPU-CI:01): 31, pid=1, name=a, Ch 00000008").unwrap();
        assert_eq!((mig.gpu_instance, mig.compute_instance), (Some(5), Some(1)));
        let mig = parse("NVRM: Xid (PCI:0000:3b:00 GPU-I:13): 94, pid=7, Contained").unwrap();
        assert_eq!((mig.gpu_instance, mig.compute_instance), (Some(13), None));
        let victim =
            parse("NVRM: Xid (PCI:0000:dc:00): 45, pid=18, name=p, Ch 00000001 caused by previous Xid 149")
                .unwrap();
        assert_eq!((victim.caused_by, victim.pid_owns_channel), (Some(149), true));
        for (text, action) in [
            ("changed from 0x0 (None) to 0x4 (Drain and Reset)", Some(4)),
            ("changed from 0x1 (GPU Reset Required) to 0x0 (None)", Some(0)),
            ("changed from 0x0 (None) to 0x2 (OS Reboot)", Some(2)),
            ("changed", None),
        ] {
            let line = format!("NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action {text}");
            assert_eq!(parse(&line).unwrap().recovery_action, action, "{line}");
        }
    }

    #[test]
    fn mutilated_lines_are_none() {
        for line in [
            "NVRM: Xid",
            "NVRM: Xid : 32, pid=2280636",
            "NVRM: Xid (PCI:0000:66:00): abc, pid=2280636",
            "NVRM: Xid (PCI:0000:66:00): 31abc",
            "NVRM: Xid (43, pid: 5678): ROBUST_CHANNEL_RESETCHANNEL_VERIF_ERROR",
            "NVRM: Xid (PCI:0000:66:00",
            "NVRM: Xid (PCI:0000:66): 31",
            "NVRM: Xid (PCI:0000:166:00): 31",
            "NVRM: Xid (PCI:000000000:66:00): 31",
            "NVRM: Xid (PCI:0000:66:00): 99999999999",
        ] {
            assert_eq!(parse(line), None, "{line}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            let _outcome = XidLine::parse(&bytes);
        }

        #[test]
        fn no_piece_of_a_line_panics_and_the_rest_is_not_misread(
            code in 1_u32..200, pid in 1_u32..4_000_000, name in "[ -~]{1,15}", channel: u32, cut in 0_usize..120,
        ) {
            let whole = format!(" (PCI:0000:3b:00): {code}, pid={pid}, name={name}, Ch {channel:08x}, intr 0");
            let xid = XidLine::parse(whole.as_bytes()).unwrap();
            prop_assert_eq!((xid.code, xid.pid), (code, Some(pid)));
            prop_assert_eq!(xid.pid_owns_channel, !is_pid_of_bystander(code));
            let cut = whole.as_bytes()[..cut.min(whole.len())].to_vec();
            if let Some(part) = XidLine::parse(&cut) {
                prop_assert!(code.to_string().starts_with(&part.code.to_string()));
            }
        }
    }
}
