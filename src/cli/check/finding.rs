//! What `check` found, and how it is said.

use std::fmt::Write as _;

use serde::Serialize;

use crate::cli::text::{harmless_lines, wrap_into};

/// Width of the column of states, of that of names.
const STATE: usize = 8;
const NAME: usize = 16;

/// How something fares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It works.
    Ok,
    /// The configuration does not want it.
    Off,
    /// It does not work; the exporter works without it and says less.
    Blind,
    /// The exporter cannot do its work.
    Broken,
}

impl State {
    fn word(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Off => "off",
            State::Blind => "BLIND",
            State::Broken => "BROKEN",
        }
    }
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What: a source by the label's word, or a part of the configuration.
    pub what: String,
    /// The daemon, where it is one's source.
    pub daemon: Option<String>,
    /// How it fares.
    pub state: State,
    /// What is seen, or why nothing is.
    pub sees: String,
    /// What the exporter cannot tell without it.
    pub missing: Option<String>,
    /// What a person can change, one way each.
    pub fix: Vec<String>,
}

impl Finding {
    /// Something that works, or is off.
    pub fn fine(what: &str, state: State, sees: impl Into<String>) -> Finding {
        Finding {
            what: what.to_owned(),
            daemon: None,
            state,
            sees: sees.into(),
            missing: None,
            fix: Vec::new(),
        }
    }

    /// Something that does not work.
    pub fn bad(
        what: &str,
        state: State,
        sees: impl Into<String>,
        missing: &str,
        fix: Vec<String>,
    ) -> Finding {
        let missing = (!missing.is_empty()).then(|| missing.to_owned());
        Finding { missing, fix, ..Finding::fine(what, state, sees) }
    }

    /// The same, of a daemon.
    #[must_use]
    pub fn of(self, daemon: Option<&str>) -> Finding {
        Finding { daemon: daemon.map(str::to_owned), ..self }
    }
}

/// The whole answer.
#[derive(Debug, Serialize)]
pub struct Report {
    /// 0: everything works. 1: something is blind. 2: the exporter cannot do its work.
    pub exit_status: u8,
    /// Everything that was looked at.
    pub findings: Vec<Finding>,
}

impl Report {
    /// Of these.
    pub fn new(findings: Vec<Finding>) -> Report {
        let exit_status = match findings.iter().map(|finding| finding.state).max() {
            Some(State::Broken) => 2,
            Some(State::Blind) => 1,
            _ => 0,
        };
        Report { exit_status, findings }
    }

    /// For people.
    pub fn text(&self, width: usize) -> String {
        let mut out = String::new();
        for finding in &self.findings {
            let name = match &finding.daemon {
                Some(daemon) => format!("{} ({daemon})", finding.what),
                None => finding.what.clone(),
            };
            row(&mut out, finding.state.word(), &name, &finding.sees, width);
            if let Some(missing) = &finding.missing {
                row(&mut out, "", "  missing", missing, width);
            }
            for (index, fix) in finding.fix.iter().enumerate() {
                row(&mut out, "", if index == 0 { "  fix" } else { "  or" }, fix, width);
            }
        }
        let number = |state| self.findings.iter().filter(|finding| finding.state == state).count();
        let verdict = match self.exit_status {
            0 => "Everything that the configuration wants works.".to_owned(),
            1 => format!(
                "It works, but some sources are blind: {} of {}.",
                number(State::Blind),
                self.findings.len()
            ),
            _ => format!(
                "It cannot work: {} broken, {} blind of {}.",
                number(State::Broken),
                number(State::Blind),
                self.findings.len()
            ),
        };
        let _infallible = writeln!(out, "\n{verdict}");
        // Paths and names are other people's.
        harmless_lines(&out)
    }
}

/// Text in lines of its own stays in them: diagnostics show where in a file.
fn row(out: &mut String, state: &str, name: &str, text: &str, width: usize) {
    let indent = STATE + NAME + 1;
    let _infallible = write!(out, "{state:STATE$}{name:NAME$} ");
    let begins_at = (STATE + name.chars().count().max(NAME) + 1).max(indent);
    if begins_at > indent {
        let _infallible = write!(out, "\n{:indent$}", "");
    }
    if text.contains('\n') {
        out.push_str(&text.replace('\n', &format!("\n{:indent$}", "")));
        out.push('\n');
    } else {
        wrap_into(out, text, indent, width);
    }
}
