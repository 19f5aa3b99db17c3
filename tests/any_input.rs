//! The fuzz targets' properties on lines as they are written, damaged and made up. `PROPTEST_CASES=100000` looks longer;
//! `fuzz/` looks with libFuzzer.

#![allow(clippy::unwrap_used)]

#[path = "../fuzz/properties.rs"]
mod properties;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

const ANSWERS: &str = include_str!("../fuzz/seeds/answers.txt");
const CONTROL: &str = include_str!("../fuzz/seeds/control.log");
const KERNEL: &str = include_str!("../fuzz/seeds/kernel.log");
const SERVER: &str = include_str!("../fuzz/seeds/server.log");

/// Lines of a log. A counterexample is read as text.
#[derive(Clone)]
struct Log(Vec<u8>);

impl std::fmt::Debug for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

/// What may happen to a line.
#[derive(Debug, Clone)]
enum Damage {
    Put(Index, u8),
    Insert(Index, Vec<u8>),
    Remove(Index, usize),
    CutAt(Index),
    /// Beyond what a line may have, perhaps.
    Lengthen(usize),
    /// The number that is nearest becomes this one.
    Number(Index, u64),
}

impl Damage {
    fn apply(self, line: &mut Vec<u8>) {
        if line.is_empty() {
            return;
        }
        match self {
            Damage::Put(at, byte) => *at.get_mut(line) = byte,
            Damage::Insert(at, bytes) => {
                let at = at.index(line.len());
                line.splice(at..at, bytes);
            }
            Damage::Remove(at, length) => {
                let at = at.index(line.len());
                line.drain(at..line.len().min(at + length));
            }
            Damage::CutAt(at) => line.truncate(at.index(line.len())),
            Damage::Lengthen(times) if line.len() < 200 => *line = line.repeat(times),
            Damage::Lengthen(_) => {}
            Damage::Number(at, number) => {
                let from = at.index(line.len());
                let Some(start) = line[from..].iter().position(u8::is_ascii_digit) else { return };
                let start = from + start;
                let digits = line[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
                line.splice(start..start + digits, number.to_string().into_bytes());
            }
        }
    }
}

fn damage() -> impl Strategy<Value = Damage> {
    let extreme = prop_oneof![
        Just(0),
        Just(u64::from(u32::MAX)),
        Just(u64::from(u32::MAX) + 1),
        Just(i64::MAX.unsigned_abs()),
        Just(u64::MAX),
        any::<u64>(),
        0..100u64,
    ];
    prop_oneof![
        (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Damage::Put(at, byte)),
        (any::<Index>(), vec(any::<u8>(), 1..6)).prop_map(|(at, bytes)| Damage::Insert(at, bytes)),
        (any::<Index>(), 1..30usize).prop_map(|(at, length)| Damage::Remove(at, length)),
        any::<Index>().prop_map(Damage::CutAt),
        (2..300usize).prop_map(Damage::Lengthen),
        (any::<Index>(), extreme).prop_map(|(at, number)| Damage::Number(at, number)),
    ]
}

/// Lines of a log: most as they are, some damaged, some of nothing known.
fn log(seeds: &'static str) -> impl Strategy<Value = Log> {
    let lines: Vec<&str> = seeds.lines().collect();
    let whole = select(lines.clone()).prop_map(|line| line.as_bytes().to_vec());
    let damaged = (select(lines), vec(damage(), 1..4)).prop_map(|(line, damages)| {
        let mut line = line.as_bytes().to_vec();
        for damage in damages {
            damage.apply(&mut line);
        }
        line
    });
    let line = prop_oneof![5 => whole, 4 => damaged, 1 => vec(any::<u8>(), 0..80)];
    vec(line, 0..30).prop_map(|lines| Log(lines.join(&b'\n')))
}

proptest! {
    #[test]
    fn whatever_a_daemon_answers(answers in log(ANSWERS)) {
        properties::control_answers(&answers.0);
    }

    #[test]
    fn whatever_a_kernel_log_holds(lines in log(KERNEL)) {
        properties::kernel_log(&lines.0);
    }

    #[test]
    fn whatever_follows_the_word_xid(lines in log(KERNEL)) {
        for line in lines.0.split(|byte| *byte == b'\n') {
            let after = memchr::memmem::find(line, b"Xid").map_or(0, |at| at + 3);
            properties::xid_line(&line[after..]);
        }
    }

    #[test]
    fn whatever_an_mps_log_holds(cut in any::<usize>(), server in log(SERVER), control in log(CONTROL)) {
        properties::mps_log(cut, &server.0);
        properties::mps_log(cut, &[server.0, control.0].join(&b'\n'));
    }

    #[test]
    fn whatever_logs_are_replayed(server in log(SERVER), control in log(CONTROL), kernel in log(KERNEL)) {
        properties::replay(&server.0, &control.0, &kernel.0);
    }
}
