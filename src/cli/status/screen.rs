//! Lines for a terminal: styled, cut to its width, and without anything that could command it.

use std::fmt::Write as _;

use crate::cli::text::harmless;

/// How a piece of text stands out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    Plain,
    Strong,
    Faint,
    Good,
    Uncertain,
    Bad,
}

impl Style {
    fn code(self) -> &'static str {
        match self {
            Style::Plain => "",
            Style::Strong => "1",
            Style::Faint => "2",
            Style::Good => "32",
            Style::Uncertain => "33",
            Style::Bad => "1;31",
        }
    }
}

/// A line, made of styled pieces.
#[derive(Debug, Clone, Default)]
pub struct Line(Vec<(Style, String)>);

impl Line {
    /// A line that begins with this.
    pub fn new(style: Style, text: &str) -> Line {
        Line::default().and(style, text)
    }

    /// The line with more text. Names of processes and paths are other people's: no control character passes.
    #[must_use]
    pub fn and(mut self, style: Style, text: &str) -> Line {
        self.0.push((style, text.chars().map(harmless).collect()));
        self
    }

    /// The line with more plain text.
    #[must_use]
    pub fn plain(self, text: &str) -> Line {
        self.and(Style::Plain, text)
    }

    /// The line behind a prefix.
    #[must_use]
    pub fn behind(mut self, prefix: &str) -> Line {
        self.0.insert(0, (Style::Faint, prefix.to_owned()));
        self
    }

    /// The text, at most `width` columns of it, with escape sequences if `has_color`.
    pub fn render(&self, width: usize, has_color: bool) -> String {
        let mut left = width;
        let total: usize = self.0.iter().map(|(_, text)| text.chars().count()).sum();
        let is_cut = total > width;
        if is_cut {
            left = width.saturating_sub(1);
        }
        let mut out = String::new();
        for (style, text) in &self.0 {
            let piece: String = text.chars().take(left).collect();
            left -= piece.chars().count();
            if piece.is_empty() {
                continue;
            }
            if has_color && *style != Style::Plain {
                let _infallible = write!(out, "\x1b[{}m{piece}\x1b[0m", style.code());
            } else {
                out.push_str(&piece);
            }
        }
        if is_cut {
            out.push('…');
        }
        out.truncate(out.trim_end().len());
        out
    }
}

/// Lines as one text.
pub fn text(lines: &[Line], width: usize, has_color: bool) -> String {
    lines.iter().map(|line| line.render(width, has_color) + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_cut_to_the_width_and_colored_on_request() {
        let line = Line::new(Style::Strong, "default").plain("  ").and(Style::Bad, "wedged");
        assert_eq!(line.render(80, false), "default  wedged");
        assert_eq!(line.render(11, false), "default  w…");
        assert_eq!(line.render(80, true), "\x1b[1mdefault\x1b[0m  \x1b[1;31mwedged\x1b[0m");
    }

    #[test]
    fn a_process_cannot_command_the_terminal() {
        let line = Line::default().plain("tr\x1b]0;gone\x07ain\n\u{202e}");
        assert_eq!(line.render(80, true), "tr\u{fffd}]0;gone\u{fffd}ain\u{fffd}\u{fffd}");
    }
}
