//! What is wrong with a configuration file, said so that a person can put it right.

use std::fmt;
use std::path::PathBuf;

/// One thing that is wrong, with its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostic {
    /// The file, as it was named.
    pub file: String,
    /// Line and column, both from 1; `None` where the parser could not tell.
    pub place: Option<(usize, usize)>,
    /// The key path: `daemons[1].name`. Empty for the document itself.
    pub key: String,
    /// What was expected, what was found, what to do.
    pub message: String,
    /// The line, `None` where it may hold a secret or there is none.
    pub line: Option<String>,
}

impl Diagnostic {
    /// Builds one and takes the line out of the text.
    ///
    /// Lines that may hold a password are never shown: diagnostics go to logs.
    pub(super) fn new(
        file: &str,
        text: &str,
        place: Option<(usize, usize)>,
        key: String,
        message: String,
    ) -> Self {
        let line = place
            .and_then(|(line, _)| text.lines().nth(line.checked_sub(1)?))
            .filter(|line| !key.contains("basic_auth") && !may_hold_secret(line))
            .map(str::to_owned);
        Diagnostic { file: file.to_owned(), place, key, message, line }
    }
}

fn may_hold_secret(line: &str) -> bool {
    let line = line.to_ascii_lowercase();
    ["pass", "basic_auth", "secret"].iter().any(|word| line.contains(word))
        || line.contains("://") && line.contains('@')
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if let Some((line, column)) = self.place {
            write!(f, ":{line}:{column}")?;
        }
        f.write_str(": ")?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.message)?;
        if let (Some((number, column)), Some(line)) = (self.place, &self.line) {
            let gutter = number.to_string().len();
            // A tab before the caret is kept, so that both lines are as wide.
            let indent: String =
                line.chars().take(column - 1).map(|each| if each == '\t' { '\t' } else { ' ' }).collect();
            write!(f, "\n{:gutter$} |\n{number} | {line}\n{:gutter$} | {indent}^", "", "")?;
        }
        Ok(())
    }
}

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read the configuration file {}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why. It is in the message, so it is no `source` that would be said again.
        error: std::io::Error,
    },
    /// The file is larger than any configuration.
    #[error("{} is no configuration file: it is larger than {limit} bytes", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The limit.
        limit: u64,
    },
    /// The text is wrong, in at least one place.
    #[error("{}", join(.0))]
    Invalid(Vec<Diagnostic>),
}

fn join(diagnostics: &[Diagnostic]) -> String {
    let mut lines: Vec<String> = diagnostics.iter().map(ToString::to_string).collect();
    if lines.len() > 1 {
        lines.push(format!("{} errors in the configuration", diagnostics.len()));
    }
    lines.join("\n")
}
