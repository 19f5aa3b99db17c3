//! Asks a running exporter for its snapshot.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::client::conn::http1;
use hyper::header::{HOST, USER_AGENT};
use hyper::{Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

/// How long a question may take, connection and all.
const DEADLINE: Duration = Duration::from_secs(5);
/// A snapshot is not larger.
const MAX_ANSWER: usize = 64 << 20;
/// What is asked for.
const PATH: &str = "/api/v1/status";

/// Where an exporter listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// `http://host:port`, perhaps with a path that a proxy puts in front.
    Http { host: String, port: u16, prefix: String },
    /// `unix:/path`.
    Unix(PathBuf),
}

impl Address {
    /// Where `serve` listens by default.
    pub fn usual() -> Address {
        Address::Http { host: "127.0.0.1".to_owned(), port: 10055, prefix: String::new() }
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return if path.starts_with('/') {
                Ok(Address::Unix(path.into()))
            } else {
                Err("a Unix socket needs an absolute path, like unix:/run/mps-exporter.sock".to_owned())
            };
        }
        let expected = "expected a URL like http://127.0.0.1:10055, or unix:/path";
        if text.starts_with("https:") {
            return Err(format!("TLS is not spoken here; {expected}"));
        }
        let uri: Uri = text.parse().map_err(|_| expected)?;
        let is_plain = uri.scheme_str() == Some("http") && uri.query().is_none();
        let host = uri.host().filter(|host| !host.is_empty() && is_plain).ok_or(expected)?;
        if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            return Err(format!("a user in the URL is not supported; {expected}"));
        }
        Ok(Address::Http {
            host: host.trim_start_matches('[').trim_end_matches(']').to_owned(),
            port: uri.port_u16().unwrap_or(80),
            prefix: uri.path().trim_end_matches('/').to_owned(),
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Http { host, port, prefix } if host.contains(':') => {
                write!(f, "http://[{host}]:{port}{prefix}")
            }
            Address::Http { host, port, prefix } => write!(f, "http://{host}:{port}{prefix}"),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Why there is no snapshot.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// Nobody is there.
    #[error("no exporter answers at {address}: {source}")]
    Connect {
        /// Where.
        address: Address,
        /// Why.
        source: std::io::Error,
    },
    /// Not within the deadline.
    #[error("{0} gave no answer within {deadline} s", deadline = DEADLINE.as_secs())]
    Timeout(Address),
    /// What answers is no exporter, or one that speaks TLS.
    #[error("{address} does not answer as an exporter does ({source}); does it want TLS?")]
    Http {
        /// Where.
        address: Address,
        /// What went wrong.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// It refuses.
    #[error("{address} answered {path} with status {status}{hint}", path = PATH)]
    Status {
        /// Where.
        address: Address,
        /// The status.
        status: StatusCode,
        /// What to do about it.
        hint: &'static str,
    },
}

/// The answer to `/api/v1/status`.
pub async fn ask(address: &Address) -> Result<Bytes, AskError> {
    let asked = tokio::time::timeout(DEADLINE, async {
        let failed = |source| AskError::Connect { address: address.clone(), source };
        match address {
            Address::Http { host, port, prefix } => {
                let stream = TcpStream::connect((host.as_str(), *port)).await.map_err(failed)?;
                let authority =
                    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
                get(address, stream, &authority, prefix).await
            }
            Address::Unix(path) => {
                let stream = UnixStream::connect(path).await.map_err(failed)?;
                get(address, stream, "localhost", "").await
            }
        }
    });
    asked.await.unwrap_or_else(|_| Err(AskError::Timeout(address.clone())))
}

async fn get<S>(address: &Address, stream: S, authority: &str, prefix: &str) -> Result<Bytes, AskError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let failed = |source| AskError::Http { address: address.clone(), source };
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| failed(error.into()))?;
    let connection = tokio::spawn(connection);
    let request = Request::get(format!("{prefix}{PATH}"))
        .header(HOST, authority)
        .header(USER_AGENT, concat!("mps-exporter/", env!("CARGO_PKG_VERSION")))
        .body(Empty::<Bytes>::new())
        .map_err(|error| failed(error.into()))?;
    let response = sender.send_request(request).await.map_err(|error| failed(error.into()))?;
    let status = response.status();
    if status != StatusCode::OK {
        let hint = match status {
            StatusCode::UNAUTHORIZED => {
                ": it wants a password, which `status` cannot give; --config.file makes it look for itself"
            }
            StatusCode::NOT_FOUND => ": is it an mps-exporter?",
            _ => "",
        };
        return Err(AskError::Status { address: address.clone(), status, hint });
    }
    let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await.map_err(failed)?;
    connection.abort();
    Ok(body.to_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for text in ["http://127.0.0.1:10055", "http://[::1]:8080", "http://gpu-1:80/mps", "unix:/run/e.sock"]
        {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!("http://gpu-1/".parse::<Address>().unwrap().to_string(), "http://gpu-1:80");
        for text in
            ["gpu-1:10055", "https://gpu-1:10055", "ftp://x", "http://", "http://u:p@h:1", "unix:run", ""]
        {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
