//! Plain text that fits the terminal.

use std::fmt::Write as _;
use std::io::{ErrorKind, Write as _};

use anyhow::Context as _;
use serde::Serialize;

/// Writes to standard output. A reader that has gone away (`| head`) is no error.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(error).context("cannot write to standard output")
        }
        _ => Ok(()),
    }
}

/// A character of other people's text (log lines, names of processes and files) as a terminal may be sent it: nothing
/// that commands it, nor what turns the direction of writing.
pub fn harmless(character: char) -> char {
    match character {
        '\t' => ' ',
        '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => char::REPLACEMENT_CHARACTER,
        control if control.is_control() => char::REPLACEMENT_CHARACTER,
        other => other,
    }
}

/// A text of several lines, with [`harmless`] characters.
pub fn harmless_lines(text: &str) -> String {
    text.chars().map(|it| if it == '\n' { it } else { harmless(it) }).collect()
}

/// A value as JSON for people: over several lines, and with escapes for what is not [`harmless`].
pub fn json(value: &impl Serialize) -> anyhow::Result<String> {
    let mut out = String::new();
    // Outside of strings there are line feeds, and no other such character.
    for character in serde_json::to_string_pretty(value)?.chars() {
        if character == '\n' || harmless(character) == character {
            out.push(character);
        } else {
            let _infallible = write!(out, "\\u{:04x}", u32::from(character));
        }
    }
    out.push('\n');
    Ok(out)
}

/// Columns of the terminal; `None` where standard output is none.
pub fn columns() -> Option<usize> {
    terminal().map(|size| usize::from(size.ws_col)).filter(|columns| *columns > 0)
}

/// Rows of the terminal; `None` where standard output is none.
pub fn rows() -> Option<usize> {
    terminal().map(|size| usize::from(size.ws_row)).filter(|rows| *rows > 0)
}

fn terminal() -> Option<rustix::termios::Winsize> {
    rustix::termios::tcgetwinsize(std::io::stdout()).ok()
}

/// Columns to fill: the terminal's, else 80; never so many that lines get hard to read.
pub fn width() -> usize {
    columns().unwrap_or(80).clamp(30, 100)
}

/// Appends `text` in lines of at most `width` columns. The first line follows what is already on it, `indent`
/// columns wide; the others begin with as many spaces. A word that is too long stays whole.
pub fn wrap_into(out: &mut String, text: &str, indent: usize, width: usize) {
    let mut column = indent;
    for (index, word) in text.split_whitespace().enumerate() {
        let length = word.chars().count();
        if index > 0 {
            if column + 1 + length > width {
                let _infallible = write!(out, "\n{:indent$}", "");
                column = indent;
            } else {
                out.push(' ');
                column += 1;
            }
        }
        out.push_str(word);
        column += length;
    }
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_commands_the_terminal() {
        let text = "a\tb\x1b[31m\u{9b}1m\u{202e}\r\nc";
        assert_eq!(harmless_lines(text), "a b\u{fffd}[31m\u{fffd}1m\u{fffd}\u{fffd}\nc");
    }

    #[test]
    fn json_commands_no_terminal_and_stays_what_it_is() {
        let text = "a\t\n\x1b[31m\u{9b}1m\u{7f}\u{202e}é\u{fffd}";
        let json = json(&[text]).unwrap();
        assert_eq!(json, "[\n  \"a\\t\\n\\u001b[31m\\u009b1m\\u007f\\u202eé\u{fffd}\"\n]\n");
        assert_eq!(serde_json::from_str::<[String; 1]>(&json).unwrap(), [text]);
    }

    #[test]
    fn lines_fit_and_no_word_is_lost() {
        let mut out = String::from("  - ");
        wrap_into(&mut out, "one two  three\nextraordinarily four", 4, 14);
        assert_eq!(out, "  - one two\n    three\n    extraordinarily\n    four\n");
    }
}
