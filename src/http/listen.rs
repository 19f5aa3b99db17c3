//! Where to listen: TCP addresses, Unix sockets, sockets passed by systemd.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use tokio::net::{TcpListener, UnixListener};

use crate::http::stream::Stream;
use crate::sys::listen_fd;

/// A value of `--web.listen-address`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenAddress {
    /// A host, or every address, and a port.
    Tcp {
        /// Name or address; `None` is every address of the machine.
        host: Option<String>,
        /// Port; 0 lets the system choose.
        port: u16,
    },
    /// A Unix socket.
    Unix(PathBuf),
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<ListenAddress, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return if path.starts_with('/') {
                Ok(ListenAddress::Unix(path.into()))
            } else {
                Err("a Unix socket needs an absolute path, like unix:/run/mps-exporter.sock".into())
            };
        }
        let expected = "expected host:port, :port, [IPv6]:port or unix:/path";
        let (host, port) = text.rsplit_once(':').ok_or(expected)?;
        let port = port.parse().map_err(|_| format!("`{port}` is no port; {expected}"))?;
        let host = match host.strip_prefix('[').map(|rest| rest.strip_suffix(']')) {
            Some(Some(address)) => address,
            Some(None) => return Err(expected.into()),
            None if host.contains(':') => return Err(format!("an IPv6 address needs brackets; {expected}")),
            None => host,
        };
        Ok(ListenAddress::Tcp { host: (!host.is_empty()).then(|| host.to_owned()), port })
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenAddress::Tcp { host: None, port } => write!(f, ":{port}"),
            ListenAddress::Tcp { host: Some(host), port } if host.contains(':') => {
                write!(f, "[{host}]:{port}")
            }
            ListenAddress::Tcp { host: Some(host), port } => write!(f, "{host}:{port}"),
            ListenAddress::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Why an address cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The system refuses.
    #[error("cannot listen on {address} ({hint})")]
    Bind {
        /// The address.
        address: String,
        /// What to do.
        hint: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// There is a file in the place of the socket.
    #[error("cannot listen on {0}: a file is there that is not a socket")]
    NotASocket(PathBuf),
    /// Another process listens there.
    #[error("cannot listen on {0}: another process listens there")]
    InUse(PathBuf),
    /// systemd passed nothing.
    #[error(
        "--web.systemd-socket is given, but systemd passed no socket (LISTEN_FDS): start it by its .socket unit"
    )]
    NoSystemdSocket(#[source] Option<io::Error>),
}

/// A bound socket.
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix {
        listener: UnixListener,
        /// Removed with the listener; `None` when the file is systemd's.
        _file: Option<SocketFile>,
    },
}

/// Removes a socket's file when the socket is no longer listened on.
pub(super) struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _already_gone = std::fs::remove_file(&self.0);
    }
}

impl Listener {
    pub(super) async fn bind(address: &ListenAddress) -> Result<Listener, ListenError> {
        let failed = |source: io::Error| ListenError::Bind {
            address: address.to_string(),
            hint: match source.kind() {
                io::ErrorKind::AddrInUse => "another process uses it: choose another --web.listen-address",
                io::ErrorKind::PermissionDenied => {
                    "not permitted: ports below 1024 need CAP_NET_BIND_SERVICE"
                }
                _ => "check --web.listen-address",
            },
            source,
        };
        match address {
            ListenAddress::Tcp { host: Some(host), port } => {
                TcpListener::bind((host.as_str(), *port)).await.map(Listener::Tcp).map_err(failed)
            }
            ListenAddress::Tcp { host: None, port } => {
                // The IPv6 wildcard takes IPv4 too, unless the machine has no IPv6.
                match TcpListener::bind((Ipv6Addr::UNSPECIFIED, *port)).await {
                    Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
                        TcpListener::bind((Ipv4Addr::UNSPECIFIED, *port)).await
                    }
                    other => other,
                }
                .map(Listener::Tcp)
                .map_err(failed)
            }
            ListenAddress::Unix(path) => {
                remove_stale(path)?;
                let listener = UnixListener::bind(path).map_err(failed)?;
                Ok(Listener::Unix { listener, _file: Some(SocketFile(path.clone())) })
            }
        }
    }

    /// The sockets that systemd passed.
    pub(super) fn from_systemd() -> Result<Vec<Listener>, ListenError> {
        let fds = sd_notify::listen_fds().map_err(|error| ListenError::NoSystemdSocket(Some(error)))?;
        let listeners: Vec<Listener> = fds
            .map(|fd| {
                Ok(match listen_fd::take(fd)? {
                    listen_fd::Socket::Tcp(socket) => Listener::Tcp(TcpListener::from_std(socket)?),
                    listen_fd::Socket::Unix(socket) => {
                        Listener::Unix { listener: UnixListener::from_std(socket)?, _file: None }
                    }
                })
            })
            .collect::<io::Result<_>>()
            .map_err(|error| ListenError::NoSystemdSocket(Some(error)))?;
        if listeners.is_empty() { Err(ListenError::NoSystemdSocket(None)) } else { Ok(listeners) }
    }

    /// Waits for a peer.
    pub(super) async fn accept(&self) -> io::Result<Stream> {
        match self {
            Listener::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                stream.set_nodelay(true)?;
                Ok(Stream::Tcp(stream))
            }
            Listener::Unix { listener, .. } => {
                listener.accept().await.map(|(stream, _)| Stream::Unix(stream))
            }
        }
    }

    /// Where it listens, for people.
    pub(super) fn describe(&self) -> String {
        match self {
            Listener::Tcp(listener) => {
                listener.local_addr().map_or_else(|_| "TCP".into(), |it| it.to_string())
            }
            Listener::Unix { listener, .. } => {
                let address = listener.local_addr().ok();
                let path = address.as_ref().and_then(|address| address.as_pathname());
                path.map_or_else(|| "unix".into(), |path| format!("unix:{}", path.display()))
            }
        }
    }

    /// The TCP address that was bound.
    pub(super) fn tcp_address(&self) -> Option<SocketAddr> {
        match self {
            Listener::Tcp(listener) => listener.local_addr().ok(),
            Listener::Unix { .. } => None,
        }
    }
}

/// Removes the socket of an exporter that was killed, and nothing else.
fn remove_stale(path: &Path) -> Result<(), ListenError> {
    let Ok(metadata) = std::fs::symlink_metadata(path) else {
        return Ok(());
    };
    if !metadata.file_type().is_socket() {
        return Err(ListenError::NotASocket(path.to_owned()));
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            let _bind_will_tell = std::fs::remove_file(path);
            Ok(())
        }
        _ => Err(ListenError::InUse(path.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        let tcp = |host: Option<&str>, port| ListenAddress::Tcp { host: host.map(Into::into), port };
        let cases = [
            (":10055", tcp(None, 10055)),
            ("127.0.0.1:0", tcp(Some("127.0.0.1"), 0)),
            ("localhost:9", tcp(Some("localhost"), 9)),
            ("[::1]:9", tcp(Some("::1"), 9)),
            ("unix:/run/x.sock", ListenAddress::Unix("/run/x.sock".into())),
        ];
        for (text, expected) in cases {
            let address: ListenAddress = text.parse().unwrap();
            assert_eq!(address, expected);
            assert_eq!(address.to_string(), text);
        }
        assert_eq!("unix:///run/x".parse(), Ok(ListenAddress::Unix("/run/x".into())));
        for text in ["", "10055", "host:", "host:99999", "::1:9", "[::1:9", "unix:x", "unix:"] {
            assert!(text.parse::<ListenAddress>().is_err(), "{text}");
        }
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_living_one_respected() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let listener = Listener::bind(&ListenAddress::Unix(path.clone())).await.unwrap();
        let second = Listener::bind(&ListenAddress::Unix(path.clone())).await;
        assert!(matches!(second, Err(ListenError::InUse(_))));
        drop(listener);
        assert!(!path.exists());
        std::fs::write(&path, "precious").unwrap();
        let third = Listener::bind(&ListenAddress::Unix(path.clone())).await;
        assert!(matches!(third, Err(ListenError::NotASocket(_))));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }
}
