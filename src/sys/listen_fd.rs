//! Sockets that systemd passes by number.

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;

use rustix::net::AddressFamily;
use rustix::net::sockopt;

/// The first descriptor of `LISTEN_FDS` (`sd_listen_fds(3)`).
const FIRST: RawFd = 3;

/// A listening socket, non-blocking.
#[derive(Debug)]
pub enum Socket {
    /// TCP.
    Tcp(TcpListener),
    /// Unix, stream.
    Unix(UnixListener),
}

/// Takes the descriptor `fd` of those that `LISTEN_FDS` announced. Each may be taken once.
///
/// # Errors
/// When it is not a listening TCP or Unix stream socket.
pub fn take(fd: RawFd) -> io::Result<Socket> {
    if fd < FIRST {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a descriptor of LISTEN_FDS"));
    }
    // SAFETY: by the protocol of sd_listen_fds(3) the descriptors from 3 on belong to this process and to nobody in
    // it; a number without an open descriptor only makes the calls below fail.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    if !sockopt::socket_acceptconn(fd.as_fd())? {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the socket is not listening"));
    }
    let family = sockopt::socket_domain(fd.as_fd())?;
    if family == AddressFamily::INET || family == AddressFamily::INET6 {
        let socket = TcpListener::from(fd);
        socket.set_nonblocking(true)?;
        Ok(Socket::Tcp(socket))
    } else if family == AddressFamily::UNIX {
        let socket = UnixListener::from(fd);
        socket.set_nonblocking(true)?;
        Ok(Socket::Unix(socket))
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a TCP nor a Unix socket"))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::IntoRawFd as _;

    use super::*;

    #[test]
    fn a_listening_socket_is_recognised_by_its_family() {
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap().into_raw_fd();
        assert!(matches!(take(tcp), Ok(Socket::Tcp(_))));
        let folder = tempfile::tempdir().unwrap();
        let unix = UnixListener::bind(folder.path().join("s")).unwrap().into_raw_fd();
        assert!(matches!(take(unix), Ok(Socket::Unix(_))));
        let file = std::fs::File::open("/dev/null").unwrap().into_raw_fd();
        assert!(take(file).is_err());
        assert!(take(1).is_err());
    }
}
