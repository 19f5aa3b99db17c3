//! Shell patterns for one part of a path: `*`, `?`, `[a-z]`, `[!a-z]`, and `\` before a character that stands for itself.

/// Whether a part of a path is a pattern.
pub fn is_pattern(part: &[u8]) -> bool {
    part.iter().any(|byte| matches!(byte, b'*' | b'?' | b'['))
}

/// Whether a file name fits a pattern. Hidden files need a pattern that begins with a dot, as in a shell.
///
/// Takes at most pattern times name steps, whatever both hold.
pub fn fits(pattern: &[u8], name: &[u8]) -> bool {
    if name.first() == Some(&b'.') && pattern.first() != Some(&b'.') {
        return false;
    }
    // Where to go on after the last `*` when what follows it does not fit.
    let mut again: Option<(usize, usize)> = None;
    let (mut at, mut from) = (0, 0);
    loop {
        let step = match pattern.get(at) {
            Some(b'*') => {
                again = Some((at + 1, from));
                at += 1;
                continue;
            }
            Some(_) => name.get(from).and_then(|byte| one(&pattern[at..], *byte)),
            None if from == name.len() => return true,
            None => None,
        };
        match (step, again) {
            (Some(length), _) => (at, from) = (at + length, from + 1),
            (None, Some((next, reached))) if reached < name.len() => {
                again = Some((next, reached + 1));
                (at, from) = (next, reached + 1);
            }
            (None, _) => return false,
        }
    }
}

/// Whether the pattern's first element fits one byte, and how long the element is.
fn one(pattern: &[u8], byte: u8) -> Option<usize> {
    match pattern {
        [b'?', ..] => Some(1),
        [b'\\', literal, ..] => (*literal == byte).then_some(2),
        [b'[', rest @ ..] => match set(rest, byte) {
            Some((does_fit, length)) => does_fit.then_some(length + 1),
            // Without its end it is a bracket.
            None => (byte == b'[').then_some(1),
        },
        [literal, ..] => (*literal == byte).then_some(1),
        [] => None,
    }
}

/// A set after its opening bracket: whether it holds the byte, and its length with the closing bracket.
fn set(pattern: &[u8], byte: u8) -> Option<(bool, usize)> {
    let is_negated = matches!(pattern.first(), Some(b'!' | b'^'));
    let start = usize::from(is_negated);
    let mut at = start;
    let mut is_in = false;
    loop {
        match pattern.get(at..)? {
            [b']', ..] if at > start => return Some((is_in != is_negated, at + 1)),
            [low, b'-', high, ..] if *high != b']' => {
                is_in |= (*low..=*high).contains(&byte);
                at += 3;
            }
            [single, ..] => {
                is_in |= *single == byte;
                at += 1;
            }
            [] => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn patterns_fit_as_in_a_shell() {
        let cases = [
            ("*", "anything", true),
            ("*", ".hidden", false),
            (".*", ".hidden", true),
            ("ckpt-*.pt", "ckpt-00120.pt", true),
            ("ckpt-*.pt", "ckpt-00120.pt.tmp", false),
            ("step_?", "step_7", true),
            ("step_?", "step_", false),
            ("[a-c]x[!0-9]", "bxy", true),
            ("[a-c]x[!0-9]", "bx3", false),
            ("[]x]", "]", true),
            ("a[b", "a[b", true),
            ("\\*", "*", true),
            ("\\*", "x", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("", "", true),
            ("", "x", false),
        ];
        for (pattern, name, expected) in cases {
            assert_eq!(fits(pattern.as_bytes(), name.as_bytes()), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn many_stars_do_not_take_for_ever() {
        assert!(!fits("*a".repeat(60).as_bytes(), "a".repeat(59).as_bytes()));
        assert!(!fits(format!("{}b", "*a".repeat(100)).as_bytes(), "a".repeat(250).as_bytes()));
    }

    proptest! {
        #[test]
        fn a_name_fits_itself_and_what_a_star_leaves_out(name in "[a-z0-9]{1,20}", cut in 0usize..20) {
            prop_assert!(fits(name.as_bytes(), name.as_bytes()));
            let cut = cut.min(name.len());
            let (head, tail) = (format!("{}*", &name[..cut]), format!("*{}", &name[cut..]));
            prop_assert!(fits(head.as_bytes(), name.as_bytes()));
            prop_assert!(fits(tail.as_bytes(), name.as_bytes()));
        }

        #[test]
        fn no_bytes_make_it_panic(pattern in proptest::collection::vec(any::<u8>(), 0..40), name in proptest::collection::vec(any::<u8>(), 0..40)) {
            let _ = fits(&pattern, &name);
        }
    }
}
