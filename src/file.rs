//! Files that the configuration names: small ones, read at once.

use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Reads a regular file of at most `limit` bytes.
///
/// Anything else is refused: a FIFO would make the runtime's only thread wait for somebody who writes, or tell that
/// the file is empty.
///
/// # Errors
/// When it cannot be read, is not a regular file, or is larger ([`io::ErrorKind::FileTooLarge`]).
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    let mut bytes = Vec::new();
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        let message = format!("it is larger than {limit} bytes");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok(bytes)
}

/// Like [`read`], for certificates and keys in PEM form; no file of them is larger than 16 MiB.
///
/// # Errors
/// As there.
pub fn read_pem(path: &Path) -> io::Result<Vec<u8>> {
    read(path, 16 << 20)
}

/// Like [`read`], for text.
///
/// # Errors
/// As there, and when it is not UTF-8.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    String::from_utf8(read(path, limit)?)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.utf8_error()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_of_the_right_size_are_read_and_nothing_makes_us_wait() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        std::fs::write(&path, "0123456789").unwrap();
        assert_eq!(read_text(&path, 10).unwrap(), "0123456789");
        assert_eq!(read(&path, 9).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        std::fs::write(&path, [0xff]).unwrap();
        assert_eq!(read_text(&path, 10).unwrap_err().kind(), io::ErrorKind::InvalidData);

        let fifo = directory.path().join("fifo");
        let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
        assert!(made.success());
        for other in [fifo.as_path(), directory.path(), Path::new("/dev/null")] {
            let error = read(other, 10).unwrap_err();
            assert!(error.to_string().contains("regular file"), "{}: {error}", other.display());
        }
    }
}
