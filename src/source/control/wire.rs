//! Own client of the control daemon's wire protocol.
//!
//! A session over `AF_UNIX` `SOCK_SEQPACKET`, little endian (read off 535, 550 and 555, which are alike): the daemon
//! sends `OUTBHELL`, we answer `OUTBCRED` with our credentials attached and the connection type, then per command its
//! length and its text.
//!
//! What a session costs others (seen at the same three): the daemon turns a second user interface away while one is open.
//! NVIDIA's own program then ends with status 1, or with 0 and without having done anything. CUDA clients are served
//! meanwhile, but while the daemon waits for a server's answer to a forwarded question, every caller waits with it. So a
//! session is as short as can be, has one deadline for all of it and closes whatever happens.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::unix::AsyncFd;

use super::answers::{AnswerError, Conversation, Depth, Question};
use crate::event::Look;
use crate::sys::async_fd::readable_and_writable;
use crate::sys::seqpacket::{self, Attachment};

/// What the daemon says first.
const HELLO: &[u8] = b"OUTBHELL\0";
/// What we say first, with `SCM_CREDENTIALS`.
const CREDENTIALS: &[u8] = b"OUTBCRED\0";
/// The connection type of a user interface (1 is a server, 2 a CUDA client, 3 a debugger).
const USER_INTERFACE: u32 = 4;
/// The kind of a packet that holds a line of answer.
const KIND_LINE: u32 = 0;
/// The kind of the packet that confirms the end; its payload is an exit status.
const KIND_END: u32 = 1;

/// Why a session failed.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// Nobody listens on the socket, it is not there, or we may not connect.
    #[error("cannot connect to {}: {source}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The deadline passed.
    #[error("no {awaited} from {} within {} s", path.display(), after.as_secs_f64())]
    Timeout {
        /// The socket.
        path: PathBuf,
        /// What was awaited: `hello`, or the answer to a command.
        awaited: String,
        /// The deadline.
        after: Duration,
    },
    /// The peer does not begin as the known protocol does. Nothing was sent to it.
    #[error("{} does not speak the known protocol: it began with {began:?}", path.display())]
    UnknownProtocol {
        /// The socket.
        path: PathBuf,
        /// Its first bytes.
        began: String,
    },
    /// The daemon took the connection and closed it again without an answer.
    #[error("{} turned us away: another user interface is open, or the daemon is ending", path.display())]
    TurnedAway {
        /// The socket.
        path: PathBuf,
    },
    /// The peer closed or broke the connection.
    #[error("{} closed the connection before {awaited}: {source}", path.display())]
    Broken {
        /// The socket.
        path: PathBuf,
        /// What was awaited.
        awaited: String,
        /// Why.
        source: io::Error,
    },
    /// An answer that cannot be understood.
    #[error(transparent)]
    Answer(#[from] AnswerError),
}

/// Holds one session with the daemon of this pipe directory. Never takes longer than `deadline`.
pub async fn look(pipe: &Path, depth: Depth, deadline: Duration) -> Result<Look, WireError> {
    let path = socket_path(pipe);
    let mut progress = Progress { awaited: "hello".to_owned() };
    match tokio::time::timeout(deadline, session(&path, depth, &mut progress)).await {
        Ok(result) => result,
        Err(_elapsed) => Err(WireError::Timeout { path, awaited: progress.awaited, after: deadline }),
    }
}

/// What a session waits for; outlives the session when that is cut short.
struct Progress {
    awaited: String,
}

async fn session(path: &Path, depth: Depth, progress: &mut Progress) -> Result<Look, WireError> {
    let peer = connect(path).await?;
    let broken =
        |awaited: &str, source| WireError::Broken { path: path.into(), awaited: awaited.to_owned(), source };

    let hello = peer.receive().await.map_err(|source| broken("its hello", source))?;
    if hello != HELLO {
        let began = String::from_utf8_lossy(&hello[..hello.len().min(32)]).into_owned();
        return Err(WireError::UnknownProtocol { path: path.into(), began });
    }
    peer.introduce().await.map_err(|source| broken("the introduction", source))?;

    let (mut conversation, mut questions) = Conversation::new(depth);
    let mut is_let_in = false;
    let ended = |is_let_in: bool, awaited: &str, source: io::Error| {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
        let is_hang_up = matches!(source.kind(), BrokenPipe | ConnectionReset | UnexpectedEof);
        if is_hang_up && !is_let_in {
            return WireError::TurnedAway { path: path.into() };
        }
        broken(awaited, source)
    };
    loop {
        for question in questions.drain(..) {
            let asked = peer.ask(question).await;
            asked.map_err(|source| ended(is_let_in, &question.to_string(), source))?;
        }
        progress.awaited = format!("answer to `{}`", conversation.awaited());
        let packet = peer.receive().await.map_err(|source| ended(is_let_in, &progress.awaited, source))?;
        is_let_in = true;
        match packet.split_first_chunk::<4>().map(|(kind, text)| (u32::from_le_bytes(*kind), text)) {
            Some((KIND_LINE, text)) => {
                for line in String::from_utf8_lossy(text).split(['\n', '\0']) {
                    questions.extend(conversation.line(line)?);
                }
            }
            Some((KIND_END, _status)) => {
                let mut look = conversation.finish()?;
                look.protocol = Some("socket".into());
                return Ok(look);
            }
            _ => {
                let answer = format!("{:02x?}", &packet[..packet.len().min(16)]);
                let question = conversation.awaited().to_string();
                return Err(AnswerError::Unexpected { question, answer }.into());
            }
        }
    }
}

/// `control_privileged` for root and the daemon's user, `control` for everybody else.
fn socket_path(pipe: &Path) -> PathBuf {
    let privileged = pipe.join("control_privileged");
    let me = rustix::process::geteuid().as_raw();
    match std::fs::metadata(&privileged) {
        Ok(socket) if me == 0 || socket.uid() == me => privileged,
        _ => pipe.join("control"),
    }
}

async fn connect(path: &Path) -> Result<Peer, WireError> {
    let failed = |source: io::Error| WireError::Connect { path: path.into(), source };
    let socket = seqpacket::socket(false).map_err(failed)?;
    loop {
        match seqpacket::connect(&socket, path) {
            Ok(()) => break,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // The accept queue is full: others wait for the daemon as well. Only the deadline ends this.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Err(error) => return Err(failed(error)),
        }
    }
    Ok(Peer { socket: readable_and_writable(socket).map_err(failed)? })
}

/// The other end of a session.
struct Peer {
    socket: AsyncFd<OwnedFd>,
}

impl Peer {
    async fn receive(&self) -> io::Result<Vec<u8>> {
        loop {
            let mut guard = self.socket.readable().await?;
            match guard.try_io(seqpacket::receive_bytes) {
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(result) => return result,
                Err(_would_block) => {}
            }
        }
    }

    async fn introduce(&self) -> io::Result<()> {
        self.send(CREDENTIALS, Attachment::Credentials).await?;
        self.send(&USER_INTERFACE.to_le_bytes(), Attachment::None).await
    }

    async fn ask(&self, question: Question) -> io::Result<()> {
        if question == Question::End {
            return self.send(&0_u64.to_le_bytes(), Attachment::None).await;
        }
        let command = format!("{question}\n\0");
        self.send(&(command.len() as u64).to_le_bytes(), Attachment::None).await?;
        self.send(command.as_bytes(), Attachment::None).await
    }

    async fn send(&self, packet: &[u8], attachment: Attachment<'_>) -> io::Result<()> {
        loop {
            let mut guard = self.socket.writable().await?;
            match guard.try_io(|socket| seqpacket::send(socket, packet, attachment)) {
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(result) => return result,
                Err(_would_block) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests;
