//! HTML that cannot be broken out of: markup comes from this program's text, everything else is escaped.

use std::fmt::{self, Display, Write as _};

/// A page in the making.
#[derive(Debug, Default)]
pub(super) struct Html(String);

impl Html {
    /// Adds markup: text of this program, never of the world.
    pub fn raw(&mut self, markup: &'static str) -> &mut Html {
        self.0.push_str(markup);
        self
    }

    /// Adds text, escaped for elements and for quoted attributes.
    pub fn text(&mut self, text: impl Display) -> &mut Html {
        // Writing into a string cannot fail.
        let _infallible = write!(Escaped(&mut self.0), "{text}");
        self
    }

    /// The page.
    pub fn finish(self) -> String {
        self.0
    }
}

struct Escaped<'a>(&'a mut String);

impl fmt::Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars() {
            match character {
                '&' => self.0.push_str("&amp;"),
                '<' => self.0.push_str("&lt;"),
                '>' => self.0.push_str("&gt;"),
                '"' => self.0.push_str("&quot;"),
                control if control.is_control() => self.0.push('\u{fffd}'),
                other => self.0.push(other),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_stays_text() {
        let mut html = Html::default();
        html.raw("<b title=\"").text("\"><script>&\0").raw("\">").text(7).raw("</b>");
        assert_eq!(html.finish(), "<b title=\"&quot;&gt;&lt;script&gt;&amp;\u{fffd}\">7</b>");
    }
}
