//! `mps-exporter healthcheck`: asks a running exporter whether it lives. For images, which have no shell and no curl.

use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;

use crate::http::ListenAddress;

/// How long each step may take.
const PATIENCE: Duration = Duration::from_secs(3);
/// More of an answer is not needed.
const ENOUGH: u64 = 12;
/// A TLS record of type alert, version 3.x: what a server that expects TLS says to plain HTTP.
const TLS_ALERT: &[u8] = &[0x15, 0x03];

/// Asks a running exporter whether it lives: exit status 0 when it does.
#[derive(Debug, Clone, Args)]
pub struct Healthcheck {
    /// Where it listens. The same value as it was started with.
    #[arg(long = "web.listen-address", value_name = "ADDRESS", default_value = ":10055")]
    pub address: ListenAddress,
}

impl Healthcheck {
    /// Asks `/-/healthy`. A refusal for want of a password or of TLS proves life as well.
    ///
    /// # Errors
    /// When nobody answers in time, or with anything else than that it is healthy.
    pub fn run(self) -> anyhow::Result<()> {
        let answer = ask(&self.address).with_context(|| format!("{} does not answer", self.address))?;
        if !is_alive(&answer) {
            bail!("{} answers, but not as a healthy exporter", self.address);
        }
        Ok(())
    }
}

/// The first bytes of the answer.
fn ask(address: &ListenAddress) -> anyhow::Result<Vec<u8>> {
    match address {
        ListenAddress::Unix(path) => {
            let stream = UnixStream::connect(path)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            talk(stream)
        }
        ListenAddress::Tcp { host, port } => {
            let host = match host.as_deref() {
                None | Some("0.0.0.0") => "127.0.0.1",
                Some("::") => "::1",
                Some(host) => host,
            };
            let mut outcome = Err(anyhow::anyhow!("`{host}` has no address"));
            for address in (host, *port).to_socket_addrs()? {
                match TcpStream::connect_timeout(&address, PATIENCE) {
                    Ok(stream) => {
                        stream.set_read_timeout(Some(PATIENCE))?;
                        stream.set_write_timeout(Some(PATIENCE))?;
                        return talk(stream);
                    }
                    Err(error) => outcome = Err(error.into()),
                }
            }
            outcome
        }
    }
}

fn talk(mut stream: impl Read + Write) -> anyhow::Result<Vec<u8>> {
    stream.write_all(b"GET /-/healthy HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.take(ENOUGH).read_to_end(&mut answer)?;
    Ok(answer)
}

fn is_alive(answer: &[u8]) -> bool {
    matches!(answer, b"HTTP/1.1 200" | b"HTTP/1.1 401") || answer.starts_with(TLS_ALERT)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Asks a server that answers `answer` to whatever comes.
    fn asked(answer: &'static [u8]) -> anyhow::Result<()> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string().parse().unwrap();
        let server = std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            let _heard = peer.read(&mut [0; 512]).unwrap();
            peer.write_all(answer).unwrap();
        });
        let outcome = Healthcheck { address }.run();
        server.join().unwrap();
        outcome
    }

    #[test]
    fn only_an_exporter_that_lives_is_healthy() {
        asked(b"HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\nhealthy").unwrap();
        asked(b"HTTP/1.1 401 Unauthorized\r\n\r\n").unwrap();
        asked(&[0x15, 0x03, 0x03, 0x00, 0x02, 0x02, 0x46]).unwrap();
        for answer in
            [&b"HTTP/1.1 404 Not Found\r\n\r\n"[..], b"HTTP/1.1 500 \r\n\r\n", b"SSH-2.0-x\r\n", b""]
        {
            assert!(asked(answer).is_err(), "{answer:?}");
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let free = listener.local_addr().unwrap().to_string();
        drop(listener);
        assert!(Healthcheck { address: free.parse().unwrap() }.run().is_err());
    }

    #[test]
    fn a_unix_socket_is_asked_too() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            let _heard = peer.read(&mut [0; 512]).unwrap();
            peer.write_all(b"HTTP/1.1 200 OK\r\n\r\n").unwrap();
        });
        Healthcheck { address: ListenAddress::Unix(path) }.run().unwrap();
        server.join().unwrap();
    }
}
