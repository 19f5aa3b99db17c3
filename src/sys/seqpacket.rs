//! `AF_UNIX` `SOCK_SEQPACKET`, which MPS speaks: whole packets, with credentials and descriptors attached.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, UCred,
};
use rustix::process::{getegid, geteuid, getpid};

/// `sun_path` holds 108 bytes with the NUL.
const MAX_PATH: usize = 107;
/// The longest packet that is received whole.
const MAX_PACKET: usize = 16 * 1024;

/// A packet and what came with it.
#[derive(Debug)]
pub struct Packet {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// The sender's pid and uid, where the receiving socket asks for them.
    pub sender: Option<(u32, u32)>,
    /// The descriptor that it carries.
    pub descriptor: Option<OwnedFd>,
}

/// What is sent with a packet.
#[derive(Debug, Clone, Copy)]
pub enum Attachment<'a> {
    /// Nothing.
    None,
    /// This process's credentials (`SCM_CREDENTIALS`).
    Credentials,
    /// A descriptor (`SCM_RIGHTS`).
    Descriptor(BorrowedFd<'a>),
}

/// A new socket that asks for its peers' credentials.
pub fn socket(is_blocking: bool) -> io::Result<OwnedFd> {
    let flags = if is_blocking { SocketFlags::CLOEXEC } else { SocketFlags::CLOEXEC | SocketFlags::NONBLOCK };
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::sockopt::set_socket_passcred(&socket, true)?;
    Ok(socket)
}

/// Connects to the socket at `path`. `WouldBlock`, on a socket that does not block: its accept queue is full.
pub fn connect(socket: impl AsFd, path: &Path) -> io::Result<()> {
    let (address, _directory) = address(path)?;
    Ok(rustix::net::connect(socket, &address)?)
}

/// Listens at `path`, which must not exist.
pub fn listen(path: &Path) -> io::Result<OwnedFd> {
    let listener = socket(true)?;
    let (address, _directory) = address(path)?;
    rustix::net::bind(&listener, &address)?;
    rustix::net::listen(&listener, 128)?;
    Ok(listener)
}

/// Waits for a caller.
pub fn accept(listener: impl AsFd) -> io::Result<OwnedFd> {
    Ok(rustix::net::accept_with(listener, SocketFlags::CLOEXEC)?)
}

/// The address of a socket. A path that does not fit is reached through its directory, which must then stay open.
fn address(path: &Path) -> io::Result<(SocketAddrUnix, Option<OwnedFd>)> {
    if path.as_os_str().as_bytes().len() <= MAX_PATH {
        return Ok((SocketAddrUnix::new(path)?, None));
    }
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let directory =
        rustix::fs::open(parent, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let short = Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name);
    Ok((SocketAddrUnix::new(&short)?, Some(directory)))
}

/// Sends one packet. A peer that is gone is an error, not a signal.
pub fn send(socket: impl AsFd, packet: &[u8], attachment: Attachment<'_>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1), ScmCredentials(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors;
    match attachment {
        Attachment::None => {}
        Attachment::Credentials => {
            let me = UCred { pid: getpid(), uid: geteuid(), gid: getegid() };
            ancillary.push(SendAncillaryMessage::ScmCredentials(me));
        }
        Attachment::Descriptor(descriptor) => {
            descriptors = [descriptor];
            ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
        }
    }
    rustix::net::sendmsg(socket, &[IoSlice::new(packet)], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives the bytes of one packet; what is attached is dropped by the kernel. `UnexpectedEof`: the peer has closed;
/// `InvalidData`: the packet is too long.
pub fn receive_bytes(socket: impl AsFd) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; MAX_PACKET];
    let (taken, whole) = rustix::net::recv(socket, &mut bytes[..], RecvFlags::TRUNC)?;
    if whole > taken {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "packet too long"));
    }
    if taken == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    bytes.truncate(taken);
    Ok(bytes)
}

/// Like [`receive_bytes`], with what is attached. Only for peers of our own pid namespace: the kernel gives pid 0 for
/// others, which `rustix` cannot hold.
pub fn receive(socket: impl AsFd) -> io::Result<Packet> {
    let mut bytes = vec![0; MAX_PACKET];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4), ScmCredentials(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let (mut sender, mut descriptor) = (None, None);
    for message in ancillary.drain() {
        match message {
            RecvAncillaryMessage::ScmCredentials(credentials) => {
                let pid = u32::try_from(credentials.pid.as_raw_nonzero().get()).unwrap_or(0);
                sender = Some((pid, credentials.uid.as_raw()));
            }
            RecvAncillaryMessage::ScmRights(descriptors) => {
                // What is not wanted is closed.
                for each in descriptors {
                    descriptor.get_or_insert(each);
                }
            }
            _ => {}
        }
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "packet too long"));
    }
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    bytes.truncate(received.bytes);
    Ok(Packet { bytes, sender, descriptor })
}
