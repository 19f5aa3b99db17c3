//! Where a namespace stands among others.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// `NS_GET_PARENT` of `ioctl_ns(2)`: `_IO(0xb7, 2)`.
const NS_GET_PARENT: libc::Ioctl = 0xb702;

/// The parent of a pid or user namespace, given a descriptor of its file (`/proc/PID/ns/pid`).
///
/// Errors with `EPERM` when the parent lies outside the caller's own namespace.
pub fn parent(namespace: impl AsFd) -> io::Result<OwnedFd> {
    // SAFETY: the request takes no argument and touches no memory of ours; the descriptor is open for the call.
    let fd = unsafe { libc::ioctl(namespace.as_fd().as_raw_fd(), NS_GET_PARENT) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: on success the kernel returns a new descriptor that nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
