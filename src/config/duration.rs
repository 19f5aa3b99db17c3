//! Durations as people write them: `15s`, `1m30s`, `500ms`.

use std::fmt::Write as _;
use std::time::Duration;

/// Units, largest first, and their milliseconds.
const UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)];

/// Why a text is not a duration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected a duration such as `15s`, `1m30s`, `500ms` or `2h`")]
pub struct NotADuration;

/// Parses whole numbers with the units `d`, `h`, `m`, `s`, `ms`, each at most once, largest first.
pub fn parse_duration(text: &str) -> Result<Duration, NotADuration> {
    let mut rest = text;
    let mut units = UNITS.iter();
    let mut millis = 0_u64;
    if rest.is_empty() {
        return Err(NotADuration);
    }
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let (number, after) = rest.split_at(digits);
        let letters = after.bytes().take_while(u8::is_ascii_alphabetic).count();
        let (unit, after) = after.split_at(letters);
        let number: u64 = number.parse().map_err(|_| NotADuration)?;
        let (_, scale) = units.find(|(name, _)| *name == unit).ok_or(NotADuration)?;
        millis = number.checked_mul(*scale).and_then(|part| millis.checked_add(part)).ok_or(NotADuration)?;
        rest = after;
    }
    Ok(Duration::from_millis(millis))
}

/// The duration as [`parse_duration`] reads it, to the millisecond.
pub fn format_duration(duration: Duration) -> String {
    let mut millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let mut text = String::new();
    for (unit, scale) in UNITS {
        if millis >= scale {
            let _infallible = write!(text, "{}{unit}", millis / scale);
            millis %= scale;
        }
    }
    if text.is_empty() { "0s".into() } else { text }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn durations_are_read() {
        for (text, millis) in [
            ("15s", 15_000),
            ("1m30s", 90_000),
            ("500ms", 500),
            ("2h", 7_200_000),
            ("1d1ms", 86_400_001),
            ("0s", 0),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "15",
            "s",
            "15 s",
            "1s1m",
            "1s1s",
            "-1s",
            "1.5s",
            "1S",
            "15sec",
            "99999999999999999999s",
            "1m ",
            "é",
        ] {
            assert_eq!(parse_duration(text), Err(NotADuration), "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(millis in 0..u64::MAX / 2) {
            let duration = Duration::from_millis(millis);
            prop_assert_eq!(parse_duration(&format_duration(duration)), Ok(duration));
        }

        #[test]
        fn no_text_panics(text in "\\PC*") {
            let _outcome = parse_duration(&text);
        }
    }
}
