//! The age of checkpoints: the newest modification time among the files that a client's checkpoint place names.
//!
//! A place is a file, a directory or a pattern as the client sees it, and is looked at through the client's own root
//! directory. It may lie on a network file system whose server is gone, so all of this runs on a [`super::worker`] thread.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use rustix::fs::{Dir, FileType, Stat};
use rustix::io::Errno;

use super::proc::ProcRoot;
use super::rooted::{self, Root};
use crate::config::Checkpoints;
use crate::glob;
use crate::identity::{ProcessId, Workload};

/// Directory entries that are looked at for one client.
const MAX_ENTRIES: usize = 10_000;
/// How far below a named directory files are looked for.
const MAX_DEPTH: usize = 3;
/// Time spent on one client, as far as the file system lets go.
const MAX_TIME: Duration = Duration::from_secs(2);
/// Parts of a place's path.
const MAX_PARTS: usize = 64;

/// Why the newest checkpoint is not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    /// The client has ended.
    #[error("the process has ended")]
    Gone,
    /// Its files may not be looked at.
    #[error("{} may not be looked at: run as root, or with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH", .0.display())]
    Denied(PathBuf),
    /// There is more than may be looked at, so that the newest may be among the rest.
    #[error("{} holds more than {MAX_ENTRIES} entries, or takes longer than {MAX_TIME:?}: name the files by a narrower pattern", .0.display())]
    TooMuch(PathBuf),
    /// The file system failed.
    #[error("cannot look at {}: {}", .0.display(), .1)]
    Io(PathBuf, Errno),
}

impl CheckpointError {
    /// A constant word for the label `reason`.
    pub fn reason(&self) -> &'static str {
        match self {
            CheckpointError::Gone => "gone",
            CheckpointError::Denied(_) => "denied",
            CheckpointError::TooMuch(_) => "too_much",
            CheckpointError::Io(..) => "io",
        }
    }
}

/// A client to look after.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    /// Names it in the answer.
    pub key: u64,
    /// The process.
    pub process: ProcessId,
    /// Its places.
    pub places: Vec<PathBuf>,
}

/// The newest checkpoint of a client; `None` when there is none yet.
pub type Newest = Result<Option<Timestamp>, CheckpointError>;

/// Where a client writes its checkpoints: what its environment says, else what the configuration says of its workload.
/// A path that is not absolute names nothing, because a process's working directory changes.
pub fn places(
    config: &Checkpoints,
    variable: Option<&OsStr>,
    workload: Option<&Workload>,
    command: Option<&str>,
) -> Vec<PathBuf> {
    let is_usable = |path: &PathBuf| path.is_absolute() && path.components().count() <= MAX_PARTS;
    if let Some(value) = variable.filter(|value| !value.is_empty()) {
        return Some(PathBuf::from(value)).filter(is_usable).into_iter().collect();
    }
    let (mut namespace, mut pod, mut unit) = (None, None, None);
    match workload {
        Some(Workload::Pod { namespace: in_namespace, pod: name, .. }) => {
            (namespace, pod) = (in_namespace.as_deref(), name.as_deref());
        }
        Some(Workload::Unit { unit: name }) => unit = Some(&**name),
        _ => {}
    }
    let is_same = |wanted: &Option<String>, is: Option<&str>| wanted.is_none() || wanted.as_deref() == is;
    config
        .paths
        .iter()
        .filter(|path| {
            let has_pod = |prefix: &String| pod.is_some_and(|pod| pod.starts_with(prefix.as_str()));
            is_same(&path.namespace, namespace)
                && path.pod.as_ref().is_none_or(has_pod)
                && is_same(&path.unit, unit)
                && is_same(&path.command, command)
        })
        .map(|path| PathBuf::from(&path.glob))
        .filter(is_usable)
        .collect()
}

/// Looks at every client's places, at those that several share only once.
pub fn look(proc: &ProcRoot, subjects: &[Subject]) -> Vec<(u64, Newest)> {
    let mut seen: HashMap<(u64, u64, u64, &[PathBuf]), Newest> = HashMap::new();
    let mut answers = Vec::with_capacity(subjects.len());
    for subject in subjects {
        let pid = subject.process.pid;
        let inode =
            |name: &str| std::fs::metadata(proc.file(pid, name)).map(|meta| (meta.dev(), meta.ino())).ok();
        // The same root directory can hold different mounts.
        let shared = inode("ns/mnt").zip(inode("root"));
        let shared = shared.map(|((_, mounts), (device, root))| (mounts, device, root, &subject.places[..]));
        let known = shared.as_ref().and_then(|shared| seen.get(shared)).cloned();
        let newest = known.unwrap_or_else(|| of_process(proc, subject));
        if let Some(shared) = shared.filter(|_| newest != Err(CheckpointError::Gone)) {
            seen.insert(shared, newest.clone());
        }
        answers.push((subject.key, newest));
    }
    answers
}

fn of_process(proc: &ProcRoot, subject: &Subject) -> Newest {
    let root = match Root::of(proc, subject.process) {
        Ok(root) => root,
        Err(Errno::ACCESS | Errno::PERM) => {
            return Err(CheckpointError::Denied(proc.file(subject.process.pid, "root")));
        }
        Err(_) => return Err(CheckpointError::Gone),
    };
    let mut search = Search::new(&root);
    for place in &subject.places {
        search.place(place)?;
    }
    Ok(search.newest)
}

/// A bounded search for the newest file.
struct Search<'a> {
    root: &'a Root,
    newest: Option<Timestamp>,
    entries: usize,
    until: Instant,
}

impl Search<'_> {
    fn new(root: &Root) -> Search<'_> {
        Search { root, newest: None, entries: 0, until: Instant::now() + MAX_TIME }
    }

    fn place(&mut self, place: &Path) -> Result<(), CheckpointError> {
        let parts: Vec<Component<'_>> = place.components().collect();
        self.expand(PathBuf::from("/"), &parts, place)
    }

    /// Goes from `here` along `parts`, into every entry that fits where a part is a pattern.
    fn expand(
        &mut self,
        mut here: PathBuf,
        parts: &[Component<'_>],
        place: &Path,
    ) -> Result<(), CheckpointError> {
        let is_pattern = |part: &Component<'_>| glob::is_pattern(part.as_os_str().as_bytes());
        let literal = parts.iter().position(is_pattern).unwrap_or(parts.len());
        here.extend(&parts[..literal]);
        let Some((pattern, rest)) = parts[literal..].split_first() else {
            return self.take(&here, place);
        };
        let opened = self.root.find(&here).and_then(|named| rooted::directory(&named));
        let Some(directory) = absent_is_none(opened, place)? else { return Ok(()) };
        for entry in Dir::new(directory).map_err(|error| failed(error, place))? {
            let entry = entry.map_err(|error| failed(error, place))?;
            self.count(place)?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." && glob::fits(pattern.as_os_str().as_bytes(), name) {
                self.expand(here.join(OsStr::from_bytes(name)), rest, place)?;
            }
        }
        Ok(())
    }

    /// What the place names: a file, or a directory with files.
    fn take(&mut self, path: &Path, place: &Path) -> Result<(), CheckpointError> {
        let Some(named) = absent_is_none(self.root.find(path), place)? else { return Ok(()) };
        let stat = rooted::stat(&named).map_err(|error| failed(error, place))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => self.note(&stat),
            FileType::Directory => {
                if let Some(directory) = absent_is_none(rooted::directory(&named), place)? {
                    self.descend(
                        Dir::new(directory).map_err(|error| failed(error, place))?,
                        MAX_DEPTH,
                        place,
                    )?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn descend(&mut self, mut directory: Dir, depth: usize, place: &Path) -> Result<(), CheckpointError> {
        while let Some(entry) = directory.read() {
            let entry = entry.map_err(|error| failed(error, place))?;
            self.count(place)?;
            let name: OsString = OsStr::from_bytes(entry.file_name().to_bytes()).to_owned();
            if name == "." || name == ".." {
                continue;
            }
            let here = directory.fd().map_err(|error| failed(error, place))?;
            let Some(stat) = absent_is_none(rooted::stat_in(here, &name), place)? else { continue };
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile => self.note(&stat),
                FileType::Directory if depth > 1 => {
                    if let Some(below) = absent_is_none(rooted::directory_in(here, &name), place)? {
                        self.descend(
                            Dir::new(below).map_err(|error| failed(error, place))?,
                            depth - 1,
                            place,
                        )?;
                    }
                }
                // Links are not followed on the way down: a place names what belongs to it.
                _ => {}
            }
        }
        Ok(())
    }

    fn note(&mut self, stat: &Stat) {
        let nanos = i32::try_from(stat.st_mtime_nsec).unwrap_or(0);
        self.newest = self.newest.max(Timestamp::new(stat.st_mtime, nanos).ok());
    }

    fn count(&mut self, place: &Path) -> Result<(), CheckpointError> {
        self.entries += 1;
        if self.entries > MAX_ENTRIES || Instant::now() > self.until {
            return Err(CheckpointError::TooMuch(place.to_owned()));
        }
        Ok(())
    }
}

/// What is not there yet, or is gone again, is no error.
fn absent_is_none<T>(result: Result<T, Errno>, place: &Path) -> Result<Option<T>, CheckpointError> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
        Err(error) => Err(failed(error, place)),
    }
}

fn failed(error: Errno, place: &Path) -> CheckpointError {
    match error {
        Errno::ACCESS | Errno::PERM => CheckpointError::Denied(place.to_owned()),
        other => CheckpointError::Io(place.to_owned(), other),
    }
}

#[cfg(test)]
mod tests;
