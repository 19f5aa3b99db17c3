//! Finds a log file again after it was renamed, copied or rotated: it lies beside its old name, under a longer one.

use std::fs::{self, File, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::cursor::{BEGINNING, FileCursor, MEMORY, hash};
use super::envelope::Stamp;
use super::held::{FileId, open_regular, read_exactly};

/// How many names of a directory are looked at.
const ENTRIES_LIMIT: usize = 4096;

/// How many rotated files of one log are looked at.
const FILES_LIMIT: usize = 64;

/// What a compressed file's name has in it, also while it is being written.
const PACKED: [&str; 4] = [".gz", ".xz", ".bz2", ".zst"];

/// A file that holds the place of a cursor.
#[derive(Debug)]
pub(super) struct FoundPlace {
    pub file: File,
    pub metadata: Metadata,
    /// It is another file with the same beginning: what a copytruncate left.
    pub is_copy: bool,
}

/// Finds the file of a cursor: under its name, under a rotated one, or as a copy.
pub(super) fn find_place(path: &Path, place: &FileCursor) -> Option<FoundPlace> {
    let named = std::iter::once(path.to_owned()).chain(beside(path));
    let mut copy = None;
    for name in named {
        let Some((file, metadata)) = open_regular(&name).ok().flatten().filter(|found| holds(place, found))
        else {
            continue;
        };
        if FileId::of(&metadata) == place.id {
            return Some(FoundPlace { file, metadata, is_copy: false });
        }
        // An empty beginning is in every file.
        if place.offset > 0 && copy.is_none() {
            copy = Some(FoundPlace { file, metadata, is_copy: name != path });
        }
    }
    copy
}

/// Whether a file has what was read before the place.
pub(super) fn holds(place: &FileCursor, (file, metadata): &(File, Metadata)) -> bool {
    place.before_length <= MEMORY
        && place.before_length as u64 <= place.offset
        && metadata.len() >= place.offset
        && read_exactly(file, place.offset - place.before_length as u64, place.before_length)
            .is_some_and(|before| hash(&before) == place.before_hash)
}

/// A copy of a file that was read up to `offset`, with `before` in front of it.
pub(super) fn find_copy(path: &Path, offset: u64, before: &[u8], own: FileId) -> Option<(File, Metadata)> {
    if before.is_empty() {
        return None;
    }
    let start = offset - before.len() as u64;
    beside(path)
        .filter_map(|name| open_regular(&name).ok()?)
        .filter(|(_, metadata)| FileId::of(metadata) != own && metadata.len() >= offset)
        .find(|(file, _)| read_exactly(file, start, before.len()).is_some_and(|found| found == before))
}

/// A rotated file, and how it begins.
#[derive(Debug)]
pub(super) struct Rotated {
    pub file: File,
    pub metadata: Metadata,
    pub beginning: Vec<u8>,
}

/// The rotated files that begin after `newest`, oldest first.
pub(super) fn later_than(path: &Path, newest: &[u8]) -> Vec<Rotated> {
    let mut found: Vec<Rotated> = beside(path)
        .filter_map(|name| {
            let (file, metadata) = open_regular(&name).ok()??;
            let beginning = beginning(&file);
            (beginning.as_slice() > newest).then_some(Rotated { file, metadata, beginning })
        })
        .take(FILES_LIMIT)
        .collect();
    found.sort_by(|one, other| one.beginning.cmp(&other.beginning));
    found
}

/// How a file begins, by which files are ordered.
pub(super) fn beginning(file: &File) -> Vec<u8> {
    let mut bytes = [0; MEMORY];
    let length = file.read_at(&mut bytes, 0).unwrap_or(0);
    beginning_of(&bytes[..length])
}

/// How a file begins whose first bytes are `head`: its first line that begins with its time, up to [`BEGINNING`] bytes.
/// A copytruncate may leave the second half of a line before it. Empty where there is none: such a file has no order.
pub(super) fn beginning_of(head: &[u8]) -> Vec<u8> {
    let is_dated = |start: &usize| {
        let stamp = head[*start..].strip_prefix(b"[").and_then(|rest| rest.get(..23));
        stamp.and_then(Stamp::new).is_some()
    };
    let starts = std::iter::once(0).chain(memchr::memchr_iter(b'\n', head).map(|end| end + 1));
    let start = starts.into_iter().find(is_dated).unwrap_or(head.len());
    head[start..head.len().min(start + BEGINNING)].to_vec()
}

/// The names in the same directory that a rotation gives: the log's own with something behind it, not compressed.
fn beside(path: &Path) -> impl Iterator<Item = PathBuf> {
    let name = path.file_name().map(|name| name.as_bytes().to_owned()).unwrap_or_default();
    let entries = path.parent().and_then(|directory| fs::read_dir(directory).ok());
    entries
        .into_iter()
        .flatten()
        .take(ENTRIES_LIMIT)
        .flatten()
        .filter(move |entry| {
            let other = entry.file_name();
            let other = other.as_bytes();
            let is_packed = PACKED.iter().any(|end| memchr::memmem::find(other, end.as_bytes()).is_some());
            other.len() > name.len() && other.starts_with(&name) && !is_packed
        })
        .map(|entry| entry.path())
}
