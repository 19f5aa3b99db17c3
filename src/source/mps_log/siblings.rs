//! Finds a log file again after it was renamed, copied or rotated: it lies beside its old name, under a longer one.

use std::fs::{self, File, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::cursor::{FileCursor, MEMORY, hash};
use super::tail::{FileId, open_regular, read_exactly};

/// How many names of a directory are looked at.
const ENTRIES_LIMIT: usize = 4096;

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
    let id = FileId { device: place.device, inode: place.inode };
    let holds = |file: &File, metadata: &Metadata| {
        place.before_length <= MEMORY
            && place.before_length as u64 <= place.offset
            && metadata.len() >= place.offset
            && read_exactly(file, place.offset - place.before_length as u64, place.before_length)
                .is_some_and(|before| hash(&before) == place.before_hash)
    };
    let named = std::iter::once(path.to_owned()).chain(beside(path));
    let files = named.filter_map(|name| Some((name.clone(), open_regular(&name).ok()??)));
    let mut copy = None;
    for (name, (file, metadata)) in files {
        if !holds(&file, &metadata) {
            continue;
        }
        if FileId::of(&metadata) == id {
            return Some(FoundPlace { file, metadata, is_copy: false });
        }
        // An empty beginning is in every file.
        if place.offset > 0 && copy.is_none() {
            copy = Some(FoundPlace { file, metadata, is_copy: name != path });
        }
    }
    copy
}

/// A copy of a file that was read up to `offset`, with `before` in front of it; and the offset.
pub(super) fn find_copy(
    path: &Path,
    offset: u64,
    before: &[u8],
    own: FileId,
) -> Option<(File, Metadata, u64)> {
    if before.is_empty() {
        return None;
    }
    let start = offset - before.len() as u64;
    beside(path)
        .filter_map(|name| open_regular(&name).ok()?)
        .filter(|(_, metadata)| FileId::of(metadata) != own && metadata.len() >= offset)
        .find(|(file, _)| read_exactly(file, start, before.len()).is_some_and(|found| found == before))
        .map(|(file, metadata)| (file, metadata, offset))
}

/// The rotated files that were last written after `after`, oldest first, without what now has the name.
pub(super) fn written_after(path: &Path, after: Option<SystemTime>) -> Vec<(File, Metadata)> {
    let present = fs::metadata(path).ok().map(|metadata| FileId::of(&metadata));
    let mut found: Vec<(SystemTime, File, Metadata)> = beside(path)
        .filter_map(|name| {
            let (file, metadata) = open_regular(&name).ok()??;
            let modified = metadata.modified().ok()?;
            let is_between =
                after.is_none_or(|after| modified > after) && Some(FileId::of(&metadata)) != present;
            (is_between && metadata.len() > 0).then_some((modified, file, metadata))
        })
        .collect();
    found.sort_by_key(|(modified, ..)| *modified);
    found.into_iter().map(|(_, file, metadata)| (file, metadata)).collect()
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
            let is_packed = [".gz", ".xz", ".bz2", ".zst"].iter().any(|end| other.ends_with(end.as_bytes()));
            other.len() > name.len() && other.starts_with(&name) && !is_packed
        })
        .map(|entry| entry.path())
}
