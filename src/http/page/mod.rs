//! The page at `/` for people who open the exporter in a browser.

/// The page, given the path of the metrics.
pub fn index(telemetry_path: &str) -> String {
    include_str!("index.html")
        .replace("{{version}}", env!("CARGO_PKG_VERSION"))
        .replace("{{telemetry_path}}", &escape(telemetry_path))
}

/// The page's style sheet.
pub const STYLE: &str = include_str!("style.css");

/// Text inside HTML.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_to_fill_in_and_nothing_breaks_out() {
        let page = index("/\"><script>");
        assert!(!page.contains("{{") && !page.contains("<script>"), "{page}");
        assert!(page.contains(env!("CARGO_PKG_VERSION")));
    }
}
