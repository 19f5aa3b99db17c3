//! The runbooks of docs/runbooks, for a terminal.

use std::fmt::Write as _;

use super::text::wrap_into;

/// Pages by the name of their alert.
macro_rules! pages {
    ($($name:ident)*) => {
        &[$((stringify!($name), include_str!(concat!("../../docs/runbooks/", stringify!($name), ".md")))),*]
    };
}

const PAGES: &[(&str, &str)] = pages! {
    MpsApplicationXid
    MpsBlastRadiusLarge
    MpsBypassingProcesses
    MpsCheckpointTooOld
    MpsClientLost
    MpsClientsPending
    MpsClientsRejected
    MpsDaemonDown
    MpsDaemonWedged
    MpsExclusiveModeWithoutDaemon
    MpsExporterBlind
    MpsExporterDown
    MpsGpuFatalXid
    MpsGpuLost
    MpsGpuRecoveryAction
    MpsMassClientLoss
    MpsRecoveryBlocked
    MpsServerExit
    MpsServerFault
    MpsServerRestartLoop
    MpsUnexplainedClientLoss
};

/// An alert's name and its page in Markdown. Upper and lower case are the same.
pub fn page(alert: &str) -> Option<(&'static str, &'static str)> {
    PAGES.iter().find(|(name, _)| name.eq_ignore_ascii_case(alert)).copied()
}

/// The names of all alerts.
pub fn names() -> impl Iterator<Item = &'static str> {
    PAGES.iter().map(|(name, _)| *name)
}

/// A page as plain text: headings without their marks, links as their text, paragraphs wrapped to `width`, code and
/// tables as they are.
pub fn plain(markdown: &str, width: usize) -> String {
    let mut out = String::new();
    let mut block = Block::default();
    let mut is_code = false;
    for line in markdown.lines() {
        let content = line.trim_start();
        let indent = line.len() - content.len();
        if content.starts_with("```") {
            block.end(&mut out, width);
            is_code = !is_code;
        } else if is_code || content.is_empty() || content.starts_with('|') {
            block.end(&mut out, width);
            let _infallible = writeln!(out, "{}{line}", if is_code { "    " } else { "" });
        } else if let Some(heading) = line.strip_prefix('#') {
            block.end(&mut out, width);
            let _infallible = writeln!(out, "{}", heading.trim_start_matches('#').trim());
        } else if let Some(mark) = list_mark(content) {
            block.end(&mut out, width);
            block = Block {
                first: " ".repeat(indent) + mark,
                indent: indent + mark.len(),
                text: content[mark.len()..].into(),
            };
        } else {
            if block.text.is_empty() {
                block = Block { first: " ".repeat(indent), indent, text: String::new() };
            }
            block.text.push(' ');
            block.text.push_str(content);
        }
    }
    block.end(&mut out, width);
    out
}

/// A paragraph or an item of a list.
#[derive(Default)]
struct Block {
    first: String,
    indent: usize,
    text: String,
}

impl Block {
    fn end(&mut self, out: &mut String, width: usize) {
        let Block { first, indent, text } = std::mem::take(self);
        if !text.is_empty() {
            out.push_str(&first);
            wrap_into(out, &without_links(&text), indent, width);
        }
    }
}

/// `- ` or `1. ` at the beginning.
fn list_mark(text: &str) -> Option<&str> {
    let digits = text.len() - text.trim_start_matches(|it: char| it.is_ascii_digit()).len();
    let rest = &text[digits..];
    let length = match () {
        () if digits > 0 && rest.starts_with(". ") => digits + 2,
        () if text.starts_with("- ") => 2,
        () => return None,
    };
    Some(&text[..length])
}

/// `[text](target)` as `text`.
fn without_links(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('[') {
        out.push_str(before);
        let link = after.split_once("](").and_then(|(name, rest)| Some((name, rest.split_once(')')?.1)));
        match link {
            Some((name, behind)) if !name.contains('[') => {
                out.push_str(name);
                rest = behind;
            }
            _ => {
                out.push('[');
                rest = after;
            }
        }
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_runbook_is_here_and_reads_as_plain_text() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/runbooks");
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .filter_map(|name| name.strip_suffix(".md").map(str::to_owned))
            .filter(|name| name.starts_with("Mps"))
            .collect();
        files.sort();
        assert_eq!(names().collect::<Vec<_>>(), files);
        for name in names() {
            let (_, markdown) = page(name).unwrap();
            let text = plain(markdown, 80);
            assert!(text.starts_with(&format!("{name}\n")), "{text}");
            assert!(!text.contains("](") && !text.contains("```"), "{text}");
            let words = |text: &str| text.split_whitespace().count();
            assert!(words(&text) * 10 > words(markdown) * 8, "{name} lost words: {text}");
        }
    }

    #[test]
    fn markdown_becomes_plain_text() {
        let page = "# A\n\nOne [two](x.md) `three[0]`\nfour.\n\n1. item that is\n   long\n\n   ```sh\n   run [x](y)\n   ```\n- b\n\n| c | d |\n";
        let expected = "A\n\nOne two `three[0]`\nfour.\n\n1. item that is\n   long\n\n       run [x](y)\n- b\n\n| c | d |\n";
        assert_eq!(plain(page, 18), expected);
    }
}
