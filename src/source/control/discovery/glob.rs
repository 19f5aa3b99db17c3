//! Globs of directories: `*` and `?` within a path component, nothing else.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// Matches of one glob that are looked at.
const MAX_MATCHES: usize = 256;
/// Entries of a directory that are looked at.
const MAX_ENTRIES: usize = 16_384;

/// The directories that match, in order of their names. What cannot be read does not match.
pub fn directories(pattern: &Path) -> Vec<PathBuf> {
    let mut found = vec![PathBuf::new()];
    for component in pattern.components() {
        let Component::Normal(name) = component else {
            for path in &mut found {
                path.push(component);
            }
            continue;
        };
        if !has_wildcard(name) {
            for path in &mut found {
                path.push(name);
            }
            continue;
        }
        found = found.iter().flat_map(|directory| matches_in(directory, name)).take(MAX_MATCHES).collect();
    }
    found.retain(|path| path.is_dir());
    found
}

/// Whether there is anything to expand.
fn has_wildcard(name: &OsStr) -> bool {
    name.as_bytes().iter().any(|byte| matches!(byte, b'*' | b'?'))
}

fn matches_in(directory: &Path, pattern: &OsStr) -> Vec<PathBuf> {
    let place = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    let Ok(entries) = std::fs::read_dir(place) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .take(MAX_ENTRIES)
        .map(|entry| entry.file_name())
        .filter(|name| matches(pattern.as_bytes(), name.as_bytes()))
        .map(|name| directory.join(name))
        .collect();
    found.sort();
    found
}

/// Whether a name matches; as in a shell, a wildcard does not match a leading dot.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    if name.first() == Some(&b'.') && pattern.first() != Some(&b'.') {
        return false;
    }
    let (mut at, mut in_name) = (0, 0);
    let mut retry = None;
    while in_name < name.len() {
        match pattern.get(at) {
            Some(b'*') => {
                retry = Some((at, in_name));
                at += 1;
            }
            Some(byte) if *byte == b'?' || *byte == name[in_name] => {
                at += 1;
                in_name += 1;
            }
            _ => {
                // Let the last star take one byte more.
                let Some((star, taken)) = retry else { return false };
                retry = Some((star, taken + 1));
                (at, in_name) = (star + 1, taken + 1);
            }
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stays_within_its_component() {
        for (pattern, name, is_match) in [
            ("*", "gpu.shared", true),
            ("*", ".hidden", false),
            (".*", ".hidden", true),
            ("nvidia-mps_*", "nvidia-mps_0", true),
            ("nvidia-mps_*", "nvidia-mps", false),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("?p?", "mps", true),
            ("?", "", false),
            ("*****", "", true),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), is_match, "{pattern} {name}");
        }
    }

    #[test]
    fn many_stars_do_not_take_for_ever() {
        let pattern = "*a".repeat(40);
        assert!(!matches(pattern.as_bytes(), "a".repeat(39).as_bytes()));
    }

    #[test]
    fn directories_are_found_in_order() {
        let root = tempfile::tempdir().unwrap();
        for path in ["nvidia.com/gpu/pipe", "nvidia.com/gpu.shared/pipe", "nvidia.com/gpu/log", "other"] {
            std::fs::create_dir_all(root.path().join(path)).unwrap();
        }
        std::fs::write(root.path().join("nvidia.com/file"), "").unwrap();
        let found = directories(&root.path().join("*/*/pipe"));
        let expected = ["nvidia.com/gpu/pipe", "nvidia.com/gpu.shared/pipe"];
        assert_eq!(found, expected.map(|path| root.path().join(path)));
        assert_eq!(directories(&root.path().join("nvidia.com/fil?")), Vec::<PathBuf>::new());
    }
}
