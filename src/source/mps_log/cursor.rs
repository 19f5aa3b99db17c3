//! Where reading stopped, kept over restarts: one small file per daemon in the state directory.
//!
//! The promise: a place is written down only after everything before it was accepted by the model's queue, and the
//! queue was empty again. After an orderly stop reading goes on at exactly the next line. After `kill -9` no line is
//! lost; lines read within the last moments (`SAVE_SOON`, `SAVE_LATER` for lines that change
//! nothing) may be read again, as caught up, at their own time.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::reader::Context;
use super::tail::FileId;

/// How many bytes before a place are remembered, to know the file again.
pub const MEMORY: usize = 256;

/// How much of the beginning of a file tells it from other files of the same log: a time and some of a message.
pub const BEGINNING: usize = 64;

/// Cursors of daemons that were not seen for this long are removed.
const FORGET_AFTER: Duration = Duration::from_secs(30 * 24 * 3600);

/// A cursor file holds a handful of places.
const FILE_LIMIT: u64 = 1 << 20;

const VERSION: u32 = 1;

/// Why a cursor could not be kept or used.
#[derive(Debug, thiserror::Error)]
pub enum CursorError {
    /// The file could not be read or written.
    #[error("cannot keep the log position in {path}: {source}")]
    Io {
        /// The cursor file, or its directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is not a cursor.
    #[error("{path} is no log position of this version ({reason})")]
    Unreadable {
        /// The cursor file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// All places of one daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DaemonCursor {
    /// The form of the file.
    pub version: u32,
    /// The daemon, for people who look into the file.
    pub daemon: String,
    /// When it was written, in seconds since the epoch.
    pub saved_at: u64,
    /// By stream: `control.log`, `server.log`, `NAME/server.log`, `stdout`.
    #[serde(default)]
    pub streams: Vec<StreamCursor>,
    /// journald's cursor, for a daemon whose output is in the journal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub journal: Option<JournalCursor>,
}

/// The places of one stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamCursor {
    /// The stream's name inside the daemon's log directory.
    pub name: String,
    /// Its files, oldest first: a renamed one that is still written to, and its successor.
    pub files: Vec<FileCursor>,
    /// How the newest file that was read begins. A rotated one that begins later was read by nobody.
    #[serde(default)]
    pub newest: Vec<u8>,
}

/// A place in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileCursor {
    /// Which file.
    pub id: FileId,
    /// Everything before this was read.
    pub offset: u64,
    /// How many bytes before `offset` were hashed.
    pub before_length: usize,
    /// Their hash.
    pub before_hash: u64,
    /// Whether it had no name any more: it can only be found where its writer has it open.
    #[serde(default)]
    pub is_nameless: bool,
    /// What the reader must remember.
    pub context: Context,
}

/// A place in the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JournalCursor {
    /// `__CURSOR` of the last entry that was read.
    pub cursor: String,
    /// What the reader must remember.
    pub context: Context,
}

impl DaemonCursor {
    /// A cursor that knows no place yet.
    pub fn new(daemon: &str) -> DaemonCursor {
        DaemonCursor {
            version: VERSION,
            daemon: daemon.to_owned(),
            saved_at: 0,
            streams: Vec::new(),
            journal: None,
        }
    }

    /// When it was written.
    pub fn saved_at(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(self.saved_at)
    }

    /// The places of a stream.
    pub fn stream(&self, name: &str) -> Option<&StreamCursor> {
        self.streams.iter().find(|stream| stream.name == name)
    }
}

/// The cursor file of one daemon. Without a state directory it keeps nothing.
#[derive(Debug, Clone)]
pub struct CursorFile(Option<PathBuf>);

impl CursorFile {
    /// The cursor file of `daemon` in `directory`, whatever bytes the name has.
    pub fn new(directory: Option<&Path>, daemon: &str) -> CursorFile {
        CursorFile(directory.map(|directory| directory.join(file_name(daemon))))
    }

    /// Whether anything is kept.
    pub fn is_kept(&self) -> bool {
        self.0.is_some()
    }

    /// The cursor as it was saved last; `None` when there is none.
    pub fn load(&self) -> Result<Option<DaemonCursor>, CursorError> {
        let Some(path) = &self.0 else { return Ok(None) };
        remove_forgotten(path);
        let unreadable = |reason: String| CursorError::Unreadable { path: path.clone(), reason };
        let text = match fs::metadata(path).and_then(|found| {
            if found.len() > FILE_LIMIT { Err(io::ErrorKind::FileTooLarge.into()) } else { fs::read(path) }
        }) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(CursorError::Io { path: path.clone(), source }),
        };
        let cursor: DaemonCursor =
            serde_json::from_slice(&text).map_err(|error| unreadable(error.to_string()))?;
        if cursor.version != VERSION {
            return Err(unreadable(format!("version {}, not {VERSION}", cursor.version)));
        }
        Ok(Some(cursor))
    }

    /// Writes the cursor so that after a crash at any instant the old or the new one is there, whole. Blocks on the
    /// disk: call it off the runtime's thread.
    pub fn save(&self, mut cursor: DaemonCursor) -> Result<(), CursorError> {
        let Some(path) = &self.0 else { return Ok(()) };
        let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        cursor.saved_at = since_epoch.map_or(0, |since| since.as_secs());
        let in_progress = path.with_extension("new");
        let write = || {
            let mut file = File::create(&in_progress)?;
            file.write_all(&serde_json::to_vec(&cursor)?)?;
            file.sync_all()?;
            fs::rename(&in_progress, path)?;
            // The rename itself must reach the disk too; a directory that cannot be synced costs only freshness.
            if let Some(directory) = path.parent().and_then(|directory| File::open(directory).ok()) {
                let _best_effort = directory.sync_all();
            }
            Ok(())
        };
        write().map_err(|source| CursorError::Io { path: path.clone(), source })
    }
}

/// A safe file name for any daemon name: what is readable of it, and a hash of all of it.
fn file_name(daemon: &str) -> String {
    let readable: String = daemon
        .chars()
        .take(40)
        .map(|c| if c.is_ascii_alphanumeric() || c == '-' || c == '_' { c } else { '_' })
        .collect();
    format!("mps-log-{readable}-{:016x}.json", hash(daemon.as_bytes()))
}

/// Removes cursors in the same directory that nobody has written for long: names of daemons may come and go for ever.
fn remove_forgotten(own: &Path) {
    let Some(entries) = own.parent().and_then(|directory| fs::read_dir(directory).ok()) else { return };
    for entry in entries.flatten().take(4096) {
        let name = entry.file_name();
        let is_cursor = name.as_bytes().starts_with(b"mps-log-") && entry.path() != own;
        let age = entry.metadata().and_then(|found| found.modified()).ok().and_then(|at| at.elapsed().ok());
        if is_cursor && age.is_some_and(|age| age > FORGET_AFTER) {
            let _next_time = fs::remove_file(entry.path());
        }
    }
}

/// 64-bit FNV-1a: stable over versions and machines.
pub(super) fn hash(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cursor(daemon: &str) -> DaemonCursor {
        let file = FileCursor {
            id: FileId { device: 1, inode: 2 },
            offset: 3,
            before_length: 3,
            before_hash: hash(b"abc"),
            is_nameless: false,
            context: Context::default(),
        };
        let streams =
            vec![StreamCursor { name: "server.log".to_owned(), files: vec![file], newest: Vec::new() }];
        DaemonCursor { streams, ..DaemonCursor::new(daemon) }
    }

    #[test]
    fn what_is_saved_is_loaded_for_any_name() {
        let directory = tempfile::tempdir().unwrap();
        for daemon in ["default", "nvidia.com/gpu.shared", "../../etc", "a b\n", "", "ü".repeat(300).as_str()]
        {
            let file = CursorFile::new(Some(directory.path()), daemon);
            assert_eq!(file.load().unwrap(), None, "{daemon}");
            file.save(cursor(daemon)).unwrap();
            let loaded = file.load().unwrap().unwrap();
            assert_eq!(loaded.streams, cursor(daemon).streams);
            assert_eq!(loaded.daemon, daemon);
        }
        let names: Vec<_> = fs::read_dir(directory.path()).unwrap().collect();
        assert_eq!(names.len(), 6, "every file is in the directory, none in progress: {names:?}");
    }

    #[test]
    fn nothing_is_kept_without_a_directory() {
        let file = CursorFile::new(None, "default");
        file.save(cursor("default")).unwrap();
        assert_eq!(file.load().unwrap(), None);
    }

    #[test]
    fn a_damaged_or_newer_file_is_an_error_that_names_it() {
        let directory = tempfile::tempdir().unwrap();
        let file = CursorFile::new(Some(directory.path()), "default");
        let path = file.0.clone().unwrap();
        for text in ["", "{", "{\"version\": 2, \"daemon\": \"default\", \"saved_at\": 0}", "\0\0\0\0"] {
            fs::write(&path, text).unwrap();
            let error = file.load().unwrap_err().to_string();
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
    }

    #[test]
    fn an_unwritable_directory_is_an_error() {
        let file = CursorFile::new(Some(Path::new("/dev/null/state")), "default");
        assert!(matches!(file.save(cursor("default")), Err(CursorError::Io { .. })));
    }
}
