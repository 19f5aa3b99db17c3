//! Readiness of any file descriptor on the runtime.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Waits on the runtime until `fd` can be read (pidfds, epoll sets, `/dev/kmsg`, `SOCK_SEQPACKET` sockets).
///
/// Errors with `EPERM` when the kernel cannot wait on that kind of file (regular files).
pub fn readable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    register(fd, Interest::READABLE)
}

/// Like [`readable`], for reading and writing.
pub fn readable_and_writable(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    register(fd, Interest::READABLE | Interest::WRITABLE)
}

fn register(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: tokio asks that the descriptor stays the same open one for as long as it is registered. An `OwnedFd`
    // cannot be closed or replaced through a shared reference, and `AsyncFd` deregisters before it drops it.
    unsafe { AsyncFd::register_with_interest(fd, interest) }.map_err(|error| error.into_parts().1)
}
