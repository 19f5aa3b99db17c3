//! Numbers as people say them.

use jiff::Timestamp;

/// `1 client`, `2 clients`.
pub fn count(number: impl Into<u64>, one: &str, many: &str) -> String {
    let number = number.into();
    format!("{number} {}", if number == 1 { one } else { many })
}

/// `42 s`, `5 min`, `2 h 10 min`, `3 d 4 h`.
pub fn duration(seconds: f64) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "not negative, and saturates"
    )]
    let seconds = seconds.max(0.0) as u64;
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    let two = |large: u64, unit: &str, small: u64, small_unit: &str| match small {
        0 => format!("{large} {unit}"),
        _ => format!("{large} {unit} {small} {small_unit}"),
    };
    match () {
        () if days > 0 => two(days, "d", hours % 24, "h"),
        () if hours > 0 => two(hours, "h", minutes % 60, "min"),
        () if minutes > 0 => format!("{minutes} min"),
        () => format!("{seconds} s"),
    }
}

/// The time from one moment to another, not less than none.
pub fn between(from: Timestamp, to: Timestamp) -> String {
    duration(to.duration_since(from).as_secs_f64())
}

/// `1.5 GiB`, `640 MiB`.
pub fn bytes(bytes: u64) -> String {
    const GIB: f64 = 1_073_741_824.0;
    let gib = bytes as f64 / GIB;
    if gib >= 1.0 { format!("{gib:.1} GiB") } else { format!("{:.0} MiB", gib * 1024.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_said_shortly() {
        let all = [0.0, 59.9, 60.0, 7200.0, 7_800.0, 273_600.0, -3.0].map(duration);
        assert_eq!(all, ["0 s", "59 s", "1 min", "2 h", "2 h 10 min", "3 d 4 h", "0 s"]);
        assert_eq!([0, 640 << 20, 3 << 29].map(bytes), ["0 MiB", "640 MiB", "1.5 GiB"]);
        assert_eq!(count(1_u32, "client", "clients"), "1 client");
    }
}
