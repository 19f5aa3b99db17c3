//! POSIX record locks.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// `struct flock` holds its small constants in shorts.
#[allow(clippy::cast_possible_truncation)]
const fn short(constant: libc::c_int) -> libc::c_short {
    constant as libc::c_short
}

/// Who holds a lock on a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holder {
    /// This process of our pid namespace.
    Process(u32),
    /// A process that our pid namespace does not show, or a lock that belongs to an open file and not to a process.
    Elsewhere,
}

/// Who holds a write or read lock on any byte of `file` that would keep us from writing it (`F_GETLK`); `None`: nobody
/// else. It takes no lock, changes nothing, and needs no more than read access.
///
/// `rustix` has the same call, but trips over the pid -1 that the kernel gives for locks of open files.
pub fn holder(file: impl AsFd) -> io::Result<Option<Holder>> {
    let mut lock = libc::flock {
        l_type: short(libc::F_WRLCK),
        l_whence: short(libc::SEEK_SET),
        l_start: 0,
        l_len: 0, // to the end, wherever it is
        l_pid: 0,
    };
    // SAFETY: the descriptor is open for the call, and `lock` is a valid `struct flock` that outlives it.
    let result = unsafe { libc::fcntl(file.as_fd().as_raw_fd(), libc::F_GETLK, &raw mut lock) };
    if result == -1 {
        return Err(io::Error::last_os_error());
    }
    if lock.l_type == short(libc::F_UNLCK) {
        return Ok(None);
    }
    Ok(Some(match u32::try_from(lock.l_pid) {
        Ok(pid) if pid > 0 => Holder::Process(pid),
        _ => Holder::Elsewhere,
    }))
}
