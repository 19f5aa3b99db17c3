//! The few messages that nearly all lines of a busy log are. They are matched from the front, so that where they end
//! need not be searched for first, and with one branch to tell them apart. The grammar says the same of them; this is
//! only faster, and what is not matched here is left to it.

use super::envelope::{self, Stamp};
use super::grammar::{PLACEHOLDER_PID, number};

/// The longest line that is matched here, with its newline.
const LONGEST: usize = 128;

/// A line of a common shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Common<'a> {
    /// When, by the line.
    pub stamp: Stamp<'a>,
    /// The pid in the tag.
    pub writer: u32,
    /// What it says.
    pub says: Says,
    /// Where the message begins in the line.
    pub text: usize,
    /// How long the line is, with its newline.
    pub length: usize,
}

/// What a line of a common shape says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Says {
    /// Nothing that changes anything.
    Noise,
    /// `Accepting connection...`: the daemon answers no command any more.
    Accepting,
    /// A client, named by pid, connected or is being set up.
    Connected(u32),
    /// Some client left.
    LeftUnnamed,
}

/// The line at the start of `rest`, if it is a common one and whole.
#[inline]
pub fn line(rest: &[u8]) -> Option<Common<'_>> {
    if rest.len() < LONGEST {
        return None;
    }
    let head = envelope::head(rest)?;
    let text = rest.get(head.text..)?;
    let first = u64::from_le_bytes(*text.first_chunk()?);
    let after = &text[8..];
    let (says, end) = match slot(first) {
        CLIENT if first == word(*b"Client {") => named(after, b"} connected\n")?,
        CREATING if first == word(*b"Creating") => {
            let (_, end) = named(after.strip_prefix(b" worker thread for client {")?, b"}\n")?;
            (Says::Noise, end)
        }
        RECEIVED if first == word(*b"Received") => {
            named(after.strip_prefix(b" new client request for {")?, b"}\n")?
        }
        RECEIVE if first == word(*b"Receive ") => {
            (Says::Noise, after.strip_prefix(b"command failed, assuming client exit\n")?)
        }
        PROCESS if first == word(*b"Client p") => {
            (Says::LeftUnnamed, after.strip_prefix(b"rocess disconnected\n")?)
        }
        ACCEPTING if first == word(*b"Acceptin") => {
            (Says::Accepting, after.strip_prefix(b"g connection...\n")?)
        }
        _ => return None,
    };
    let length = rest.len() - end.len();
    Some(Common { stamp: head.stamp, writer: head.writer, says, text: head.text, length })
}

/// `PID: 4267, Context ID: 0` and `close` behind it; and the rest.
#[inline]
fn named<'a>(text: &'a [u8], close: &'static [u8]) -> Option<(Says, &'a [u8])> {
    let (pid, rest) = number(text.strip_prefix(b"PID: ")?)?;
    let (_, rest) = number(rest.strip_prefix(b", Context ID: ")?)?;
    let says = if pid == PLACEHOLDER_PID { Says::Noise } else { Says::Connected(pid) };
    Some((says, rest.strip_prefix(close)?))
}

const fn word(text: [u8; 8]) -> u64 {
    u64::from_le_bytes(text)
}

/// A number below 8 that differs between the words above.
const fn slot(word: u64) -> u64 {
    word.wrapping_mul(MULTIPLIER) >> 61
}

const CLIENT: u64 = slot(word(*b"Client {"));
const PROCESS: u64 = slot(word(*b"Client p"));
const CREATING: u64 = slot(word(*b"Creating"));
const RECEIVED: u64 = slot(word(*b"Received"));
const RECEIVE: u64 = slot(word(*b"Receive "));
const ACCEPTING: u64 = slot(word(*b"Acceptin"));

/// Found by trial, so that the slots are the numbers from 0 to 5.
const MULTIPLIER: u64 = 0x4c78_c7ab_4fd2_4207;

const _: () = {
    let slots = [CLIENT, PROCESS, CREATING, RECEIVED, RECEIVE, ACCEPTING];
    let mut seen = 0_u64;
    let mut at = 0;
    while at < slots.len() {
        assert!(seen & (1 << slots[at]) == 0, "two words share a slot: choose another multiplier");
        seen |= 1 << slots[at];
        at += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::LogMessage;
    use crate::source::mps_log::grammar::{Interface, Message, message};

    #[test]
    fn the_grammar_says_the_same() {
        let texts = [
            "Client {PID: 4267, Context ID: 0} connected",
            "Client {PID: 1073741824, Context ID: 1} connected",
            "Client {PID: 4267, Context ID: 0} exit",
            "Client process disconnected",
            "Client process 12 encountered a fatal GPU error.",
            "Creating worker thread for client {PID: 4267, Context ID: 12}",
            "Creating worker thread",
            "Received new client request for {PID: 4267, Context ID: 0}",
            "Received new client request for {PID: 1073741824, Context ID: 0}",
            "Received new client request",
            "Receive command failed, assuming client exit",
            "Receive command failed, assuming client exit.",
            "Accepting connection...",
            "Accepting connection",
        ];
        let mut matched = 0;
        for text in texts {
            let line_text = format!("[2026-04-23 06:04:59.367 Server  4428] {text}");
            let rest = format!("{line_text}\n{}", "x".repeat(LONGEST));
            let opened = envelope::open(line_text.as_bytes()).unwrap();
            let Some(common) = line(rest.as_bytes()) else { continue };
            matched += 1;
            assert_eq!((common.stamp, common.writer), (opened.stamp, opened.writer), "{text}");
            assert_eq!(&rest.as_bytes()[common.text..common.length - 1], opened.text, "{text}");
            let expected = match common.says {
                Says::Noise => Message::Noise,
                Says::Accepting => Message::Interface(Interface::Quiet),
                Says::Connected(pid) => Message::Tells(LogMessage::ClientConnected { pid }),
                Says::LeftUnnamed => Message::Tells(LogMessage::ClientLeftUnnamed { contexts_left: None }),
            };
            assert_eq!(message(opened.tag, opened.text), expected, "{text}");
        }
        assert_eq!(matched, 8, "shapes of 580 and the two that all have in common");
    }

    #[test]
    fn a_line_that_is_not_whole_is_left_alone() {
        let whole =
            format!("[2026-04-23 06:04:59.367 Server  4428] Client process disconnected\n{}", "x".repeat(99));
        assert!(line(whole.as_bytes()).is_some());
        for end in 0..whole.find('\n').unwrap() {
            assert_eq!(line(&whole.as_bytes()[..end]), None);
            let cut = format!("{}\n{}", &whole[..end], "x".repeat(200));
            assert_eq!(line(cut.as_bytes()), None, "{cut}");
        }
    }
}
