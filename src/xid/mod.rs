//! What an Xid means for MPS clients: the built-in catalogue, and a site's own rows over it.
//!
//! `catalogue.csv` holds one row per code. Its facts come from NVIDIA's Xid catalogue, the driver's public `nverror.h`
//! (595) and what health checkers do; what a code does to MPS clients is mostly reasoned from how MPS shares one
//! channel group, and the notes say where it was never measured.

mod csv;

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use serde::Serialize;

use crate::file;

const BUILTIN: &str = include_str!("catalogue.csv");
/// The columns, in the order of the built-in file. A site's file names those that it gives, in any order.
const COLUMNS: [&str; 9] =
    ["code", "mnemonic", "scope", "cause", "severity", "fatal", "action", "description", "note"];
/// A site's file is small.
const MAX_BYTES: u64 = 1 << 20;

/// Declares an enum of words as the catalogue spells them.
macro_rules! words {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $word:literal => $variant:ident,)+ }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
        #[serde(rename_all = "kebab-case")]
        pub enum $name { $($(#[$doc])* $variant,)+ }

        impl $name {
            const WORDS: &[(&str, $name)] = &[$(($word, $name::$variant)),+];

            fn from_word(word: &str) -> Option<$name> {
                $name::WORDS.iter().find(|(each, _)| *each == word).map(|(_, value)| *value)
            }

            /// The word that the catalogue uses.
            pub fn word(self) -> &'static str {
                match self { $($name::$variant => $word),+ }
            }
        }
    };
}

words! {
    /// How far a fault reaches, at most.
    Scope {
        /// One process.
        "process" => Process,
        /// One channel or context of one process.
        "context" => Context,
        /// Every client of the MPS server on this GPU, and of the GPUs coupled to it.
        "mps-server" => MpsServer,
        /// Everything on the GPU.
        "gpu" => Gpu,
        /// GPUs joined by NVLink, or the node.
        "node" => Node,
    }
}

words! {
    /// Who is to blame, mostly.
    Cause {
        /// The program that used the GPU.
        "application" => Application,
        /// The driver or the GPU's firmware.
        "driver" => Driver,
        /// The hardware.
        "hardware" => Hardware,
    }
}

words! {
    /// How bad it is where MPS shares the GPU.
    Severity {
        /// Nothing to do.
        "info" => Info,
        /// To look at in working hours.
        "warning" => Warning,
        /// Somebody's work is lost, or will be.
        "critical" => Critical,
    }
}

words! {
    /// What to do.
    Action {
        /// Nothing.
        "none" => None,
        /// Mend and restart the program.
        "restart-app" => RestartApp,
        /// Update driver or firmware.
        "update-driver" => UpdateDriver,
        /// Reset the GPU.
        "reset-gpu" => ResetGpu,
        /// Reboot the node.
        "reboot-node" => RebootNode,
        /// Check cables, seating, power.
        "check-hardware" => CheckHardware,
        /// Ask the vendor; perhaps the board must be replaced.
        "contact-support" => ContactSupport,
        /// The line itself says what to do.
        "follow-text" => FollowText,
        /// Another Xid beside it is the one to follow.
        "follow-other" => FollowOther,
    }
}

/// What is known of a code.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Entry {
    /// The code.
    pub code: u32,
    /// The driver's own name for it.
    pub mnemonic: String,
    /// How far it reaches, at most.
    pub scope: Scope,
    /// Who is to blame, mostly.
    pub cause: Cause,
    /// How bad it is where MPS shares the GPU.
    pub severity: Severity,
    /// Whether what it reaches loses its work.
    pub fatal: bool,
    /// What to do, in this order.
    pub actions: Vec<Action>,
    /// What it is.
    pub description: String,
    /// What to know beside it; may be empty.
    pub note: String,
}

/// Why a catalogue file was refused.
#[derive(Debug, thiserror::Error)]
pub enum CatalogueError {
    /// The file could not be read.
    #[error("cannot read the Xid catalogue {}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// A line is wrong.
    #[error("{}:{line}: {message}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong and what was expected.
        message: String,
    },
}

/// What every code means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Catalogue {
    entries: BTreeMap<u32, Entry>,
}

static BUILTIN_CATALOGUE: LazyLock<Catalogue> = LazyLock::new(|| {
    let mut catalogue = Catalogue { entries: BTreeMap::new() };
    catalogue.take(BUILTIN).expect("the built-in catalogue is tested");
    catalogue
});

impl Catalogue {
    /// The built-in catalogue.
    pub fn builtin() -> &'static Catalogue {
        &BUILTIN_CATALOGUE
    }

    /// The built-in catalogue with the rows of a CSV file over it (`incidents.xid_catalog`).
    ///
    /// The first line names columns of the built-in file, `code` among them. For a known code the cells that are not
    /// empty win; a new code needs `scope`, `severity`, `fatal` and `description`.
    pub fn with_overrides(path: &Path) -> Result<Catalogue, CatalogueError> {
        let read_failed = |error| CatalogueError::Read { path: path.to_owned(), error };
        let text = file::read_text(path, MAX_BYTES).map_err(read_failed)?;
        let mut catalogue = Catalogue::builtin().clone();
        catalogue.take(&text).map_err(|(line, message)| CatalogueError::Invalid {
            path: path.to_owned(),
            line,
            message,
        })?;
        Ok(catalogue)
    }

    /// What is known of a code; `None` for one that this catalogue does not have.
    pub fn get(&self, code: u32) -> Option<&Entry> {
        self.entries.get(&code)
    }

    /// Every entry, by code.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    /// Whether it takes every process on the GPU with it. An unknown code does not.
    pub fn is_gpu_fatal(&self, code: u32) -> bool {
        self.get(code).is_some_and(|entry| entry.fatal && matches!(entry.scope, Scope::Gpu | Scope::Node))
    }

    /// Whether it is fatal to every client of the MPS server, and to no one else.
    pub fn is_application(&self, code: u32) -> bool {
        self.get(code).is_some_and(|entry| entry.fatal && entry.scope == Scope::MpsServer)
    }

    /// Whether it can reach other GPUs of the node too.
    pub fn is_node_wide(&self, code: u32) -> bool {
        self.get(code).is_some_and(|entry| entry.scope == Scope::Node)
    }

    fn take(&mut self, text: &str) -> Result<(), (usize, String)> {
        let mut rows = csv::rows(text);
        let (line, header) = rows.next().unwrap_or(Ok((1, Vec::new())))?;
        let mut columns = Vec::new();
        for name in &header {
            let known = COLUMNS.iter().find(|column| *column == name);
            let Some(column) = known else {
                return Err((line, format!("unknown column {name:?}, expected {}", COLUMNS.join(", "))));
            };
            if columns.contains(column) {
                return Err((line, format!("the column {column:?} is given twice")));
            }
            columns.push(*column);
        }
        if !columns.contains(&"code") {
            return Err((line, "the first line must name the columns, `code` among them".into()));
        }
        let mut seen = HashSet::new();
        for row in rows {
            let (line, cells) = row?;
            if cells.len() != columns.len() {
                let message =
                    format!("expected {} cells as in the first line, found {}", columns.len(), cells.len());
                return Err((line, message));
            }
            let cell = |name: &str| {
                let index = columns.iter().position(|column| *column == name)?;
                Some(cells[index].as_str()).filter(|text| !text.is_empty())
            };
            let code = cell("code").and_then(|text| text.parse::<u32>().ok());
            let Some(code) = code else {
                return Err((
                    line,
                    format!("expected a number as code, found {:?}", cell("code").unwrap_or_default()),
                ));
            };
            if !seen.insert(code) {
                return Err((line, format!("the code {code} is given twice")));
            }
            let entry = entry(code, self.entries.get(&code), cell).map_err(|message| (line, message))?;
            self.entries.insert(code, entry);
        }
        Ok(())
    }
}

/// A row over what was known of its code.
fn entry<'c>(
    code: u32,
    known: Option<&Entry>,
    cell: impl Fn(&str) -> Option<&'c str>,
) -> Result<Entry, String> {
    let need =
        |name: &str| cell(name).ok_or_else(|| format!("the new code {code} needs the column `{name}`"));
    let fatal = |word: &str| match word {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err(format!("expected yes or no as fatal, found {word:?}")),
    };
    let mut entry = match known {
        Some(known) => known.clone(),
        None => Entry {
            code,
            mnemonic: String::new(),
            scope: word("scope", need("scope")?, Scope::WORDS, Scope::from_word)?,
            cause: Cause::Driver,
            severity: word("severity", need("severity")?, Severity::WORDS, Severity::from_word)?,
            fatal: fatal(need("fatal")?)?,
            actions: Vec::new(),
            description: need("description")?.to_owned(),
            note: String::new(),
        },
    };
    if let Some(text) = cell("scope") {
        entry.scope = word("scope", text, Scope::WORDS, Scope::from_word)?;
    }
    if let Some(text) = cell("cause") {
        entry.cause = word("cause", text, Cause::WORDS, Cause::from_word)?;
    }
    if let Some(text) = cell("severity") {
        entry.severity = word("severity", text, Severity::WORDS, Severity::from_word)?;
    }
    if let Some(text) = cell("fatal") {
        entry.fatal = fatal(text)?;
    }
    if let Some(text) = cell("action") {
        let actions = text.split('+').map(|part| word("action", part, Action::WORDS, Action::from_word));
        entry.actions = actions.collect::<Result<_, _>>()?;
    }
    for (name, into) in [
        ("mnemonic", &mut entry.mnemonic),
        ("description", &mut entry.description),
        ("note", &mut entry.note),
    ] {
        if let Some(text) = cell(name) {
            text.clone_into(into);
        }
    }
    Ok(entry)
}

fn word<T>(
    column: &str,
    text: &str,
    words: &[(&str, T)],
    from: impl Fn(&str) -> Option<T>,
) -> Result<T, String> {
    from(text).ok_or_else(|| {
        let mut message = format!("expected as {column} one of");
        for (index, (word, _)) in words.iter().enumerate() {
            let _infallible = write!(message, "{} {word}", if index == 0 { "" } else { "," });
        }
        let _infallible = write!(message, "; found {text:?}");
        message
    })
}

/// Whether this code only ever follows another: 43 and 45 name victims, 154 says what to do. It becomes a primary
/// cause only when a later line names it as such (`caused by previous Xid`).
pub fn is_never_primary(code: u32) -> bool {
    matches!(code, 43 | 45 | 154)
}

/// Whether the pid in the line is whoever was in the driver at that moment, and says nothing of the fault.
pub fn is_pid_of_bystander(code: u32) -> bool {
    matches!(code, 79 | 119 | 120 | 137 | 144..=150 | 154 | 175)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn overridden(text: &str) -> Result<Catalogue, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.csv");
        std::fs::write(&path, text).unwrap();
        let folder = format!("{}/", folder.path().display());
        Catalogue::with_overrides(&path).map_err(|error| error.to_string().replace(&folder, ""))
    }

    #[test]
    fn the_builtin_catalogue_is_whole() {
        let catalogue = Catalogue::builtin();
        let codes: Vec<u32> = catalogue.entries().map(|entry| entry.code).collect();
        assert_eq!(codes, (1..=176).collect::<Vec<_>>(), "every code of driver 595, in order");
        for entry in catalogue.entries() {
            assert!(!entry.description.is_empty() && !entry.mnemonic.is_empty() && !entry.actions.is_empty());
            assert!(!entry.description.ends_with('.'), "{}", entry.code);
            assert!(entry.note.is_empty() || entry.note.ends_with('.'), "{}", entry.code);
        }
        assert_eq!(BUILTIN.lines().next().unwrap(), COLUMNS.join(","));
    }

    #[test]
    fn codes_are_told_apart() {
        let catalogue = Catalogue::builtin();
        let which = |is: &dyn Fn(u32) -> bool| (0..=200).filter(|code| is(*code)).collect::<Vec<u32>>();
        assert_eq!(
            which(&|code| catalogue.is_gpu_fatal(code)),
            [
                38, 44, 46, 48, 57, 58, 62, 74, 79, 95, 110, 119, 120, 140, 143, 149, 150, 158, 167, 169,
                173, 175
            ]
        );
        let applications = which(&|code| catalogue.is_application(code));
        for code in [8, 13, 31, 32, 39, 69, 94, 109, 135] {
            assert!(applications.contains(&code), "{code}");
        }
        assert!(!applications.iter().any(|code| catalogue.is_gpu_fatal(*code)));
        assert_eq!(which(&is_never_primary), [43, 45, 154]);
        for code in [13, 31, 32, 43, 45, 109] {
            assert!(!is_pid_of_bystander(code), "{code}");
        }
        assert!(is_pid_of_bystander(79) && is_pid_of_bystander(119) && is_pid_of_bystander(147));
        assert!(catalogue.is_node_wide(149) && !catalogue.is_node_wide(79));
        assert!(
            catalogue.get(999).is_none() && !catalogue.is_gpu_fatal(999) && !catalogue.is_application(999)
        );
    }

    #[test]
    fn a_site_adds_and_overrides() {
        let catalogue = overridden(
            "code,severity,note\n109,critical,\"Here it is always a wedged GPU, \"\"always\"\".\"\n13,,\n",
        )
        .unwrap();
        let entry = catalogue.get(109).unwrap();
        assert_eq!(entry.severity, Severity::Critical);
        assert_eq!(entry.note, "Here it is always a wedged GPU, \"always\".");
        assert_eq!(entry.description, Catalogue::builtin().get(109).unwrap().description);
        assert_eq!(catalogue.get(13), Catalogue::builtin().get(13));
        let catalogue = overridden(
            "code,scope,severity,fatal,action,description\r\n\r\n900,gpu,critical,yes,reset-gpu+contact-support,New\r\n",
        )
        .unwrap();
        assert!(catalogue.is_gpu_fatal(900));
        assert_eq!(catalogue.get(900).unwrap().actions, [Action::ResetGpu, Action::ContactSupport]);
    }

    #[test]
    fn mistakes_are_told_with_their_line() {
        for (text, message) in [
            ("", "x.csv:1: the first line must name the columns, `code` among them"),
            ("scope\n", "x.csv:1: the first line must name the columns, `code` among them"),
            (
                "code,colour\n",
                "x.csv:1: unknown column \"colour\", expected code, mnemonic, scope, cause, severity, fatal, action, description, note",
            ),
            ("code,code\n", "x.csv:1: the column \"code\" is given twice"),
            ("code,note\n1\n", "x.csv:2: expected 2 cells as in the first line, found 1"),
            ("code,note\n1,\"a\nb\"\nx,\n", "x.csv:4: expected a number as code, found \"x\""),
            ("code\n1\n\n1\n", "x.csv:4: the code 1 is given twice"),
            ("code,note\n900,x\n", "x.csv:2: the new code 900 needs the column `scope`"),
            (
                "code,severity\n1,bad\n",
                "x.csv:2: expected as severity one of info, warning, critical; found \"bad\"",
            ),
            ("code,fatal\n1,true\n", "x.csv:2: expected yes or no as fatal, found \"true\""),
            (
                "code,action\n1,reset-gpu+\n",
                "x.csv:2: expected as action one of none, restart-app, update-driver, reset-gpu, reboot-node, check-hardware, contact-support, follow-text, follow-other; found \"\"",
            ),
            ("code,note\n1,\"a\n", "x.csv:2: a quoted cell does not end"),
            ("code,note\n1,\"a\"b\n", "x.csv:2: expected a comma or the end of the line after a quoted cell"),
        ] {
            assert_eq!(overridden(text).unwrap_err(), message, "{text}");
        }
        assert!(
            Catalogue::with_overrides(Path::new("/nonexistent"))
                .unwrap_err()
                .to_string()
                .starts_with("cannot read the Xid catalogue /nonexistent: ")
        );
    }

    proptest! {
        #[test]
        fn no_file_panics(text in "(code|note|,|\"|\n|\r|1|é| )*") {
            let mut catalogue = Catalogue::builtin().clone();
            let _outcome = catalogue.take(&text);
        }
    }
}
