//! Records of `/dev/kmsg`: `prio,seq,timestamp_us,flags[,extra…];text`, then lines ` KEY=value`.
//!
//! After Documentation/ABI/testing/dev-kmsg of the Linux kernel. NVIDIA's driver prints with `KERN_CONT`, so its whole
//! lines carry the flag `c`: records are never joined by it.

use std::borrow::Cow;

/// Priorities from here on have a facility other than the kernel's: a process wrote the record.
pub(super) const FIRST_OF_USERS: u32 = 8;

/// One record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    /// Facility × 8 + level.
    pub priority: u32,
    /// Number of the record since boot.
    pub sequence: u64,
    /// Microseconds of the kernel's local clock since boot.
    pub micros: u64,
    /// The message as it is written there, `\xNN` for odd bytes.
    escaped: &'a [u8],
}

impl<'a> Record<'a> {
    /// Reads a record; `None` when it is none. Extra header fields are ignored, a missing flag is forgiven.
    pub fn parse(bytes: &'a [u8]) -> Option<Record<'a>> {
        let end = memchr::memchr(b';', bytes)?;
        let (header, text) = (&bytes[..end], &bytes[end + 1..]);
        let mut fields = header.split(|byte| *byte == b',');
        let priority = u32::try_from(decimal(fields.next()?)?).ok()?;
        let sequence = decimal(fields.next()?)?;
        let micros = decimal(fields.next()?)?;
        let escaped = &text[..memchr::memchr(b'\n', text).unwrap_or(text.len())];
        Some(Record { priority, sequence, micros, escaped })
    }

    /// Whether the kernel itself wrote it. What processes write to `/dev/kmsg` gets another facility.
    pub fn is_from_kernel(&self) -> bool {
        self.priority < FIRST_OF_USERS
    }

    /// The message.
    pub fn text(&self) -> Cow<'a, [u8]> {
        unescape(self.escaped)
    }
}

/// A number of digits alone.
pub(super) fn decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0_u64, |number, byte| {
        let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0'))?;
        number.checked_mul(10)?.checked_add(digit)
    })
}

/// `\xNN` as the byte that it stands for.
fn unescape(escaped: &[u8]) -> Cow<'_, [u8]> {
    if memchr::memchr(b'\\', escaped).is_none() {
        return Cow::Borrowed(escaped);
    }
    let mut plain = Vec::with_capacity(escaped.len());
    let mut rest = escaped;
    while let Some((&byte, after)) = rest.split_first() {
        let escape = match after {
            [b'x', high, low, ..] if byte == b'\\' => hex_digit(*high).zip(hex_digit(*low)),
            _ => None,
        };
        if let Some((high, low)) = escape {
            plain.push(high << 4 | low);
            rest = &after[3..];
        } else {
            plain.push(byte);
            rest = after;
        }
    }
    Cow::Owned(plain)
}

/// The value of a hexadecimal digit.
pub(super) fn hex_digit(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn records_of_all_shapes_are_read() {
        for (bytes, priority, sequence, micros, text) in [
            ("4,1227,437812449,c;NVRM: hello", 4, 1227, 437_812_449, "NVRM: hello"),
            (
                "4,1227,437812449,c,caller=T99,x;NVRM: hello\n SUBSYSTEM=pci\n DEVICE=+pci:0\n",
                4,
                1227,
                437_812_449,
                "NVRM: hello",
            ),
            ("6,0,0,-;a;b,c", 6, 0, 0, "a;b,c"),
            ("12,5,6;no flag", 12, 5, 6, "no flag"),
            ("3,5,6,c;a\\x0ab\\x5cx41\\", 3, 5, 6, "a\nb\\x41\\"),
            ("3,5,6,c;\\x0\\xzz", 3, 5, 6, "\\x0\\xzz"),
            ("3,5,6,c;", 3, 5, 6, ""),
        ] {
            let record = Record::parse(bytes.as_bytes()).unwrap();
            assert_eq!(
                (record.priority, record.sequence, record.micros),
                (priority, sequence, micros),
                "{bytes}"
            );
            assert_eq!(record.text(), text.as_bytes(), "{bytes}");
        }
    }

    #[test]
    fn other_bytes_are_no_record() {
        for bytes in [
            "",
            ";",
            "4,1;x",
            "4,1,2,-",
            "a,1,2;x",
            "4,,2;x",
            "4,1,-2;x",
            "99999999999,1,2;x",
            " SUBSYSTEM=pci;",
            "4,1,99999999999999999999;x",
        ] {
            assert_eq!(Record::parse(bytes.as_bytes()), None, "{bytes}");
        }
    }

    #[test]
    fn a_process_cannot_pass_for_the_kernel() {
        assert!(Record::parse(b"7,1,2,-;x").unwrap().is_from_kernel());
        assert!(!Record::parse(b"8,1,2,-;x").unwrap().is_from_kernel());
        assert!(!Record::parse(b"12,1,2,-;x").unwrap().is_from_kernel());
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            if let Some(record) = Record::parse(&bytes) {
                prop_assert!(record.text().len() <= bytes.len());
            }
        }

        #[test]
        fn what_the_kernel_escapes_is_read_back(text in prop::collection::vec(any::<u8>(), 0..64)) {
            let mut bytes = b"4,1,2,-;".to_vec();
            for byte in &text {
                if (32..127).contains(byte) && *byte != b'\\' {
                    bytes.push(*byte);
                } else {
                    bytes.extend(format!("\\x{byte:02x}").bytes());
                }
            }
            let record = Record::parse(&bytes).unwrap();
            let read_back = record.text();
            prop_assert_eq!(read_back.as_ref(), text.as_slice());
        }
    }
}
