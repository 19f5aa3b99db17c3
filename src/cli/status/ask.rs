//! Asks a running exporter for its snapshot, and listens for changes.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{HOST, USER_AGENT};
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinSet;

/// How long a question may take, connection and all.
const DEADLINE: Duration = Duration::from_secs(5);
/// A snapshot is not larger.
const MAX_ANSWER: usize = 64 << 20;
/// The whole snapshot.
const STATUS: &str = "/api/v1/status";
/// What happens, as it happens.
const EVENTS: &str = "/api/v1/events";
/// A stream that tells nothing for this long, not even that it lives, is dead. A sign of life comes every 15 s.
const SILENCE: Duration = Duration::from_secs(40);

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
    #[error("no exporter answers at {address}: {error}")]
    Connect {
        /// Where.
        address: Address,
        /// Why.
        error: std::io::Error,
    },
    /// Not within the deadline.
    #[error("{0} gave no answer within {deadline} s", deadline = DEADLINE.as_secs())]
    Timeout(Address),
    /// What answers is no exporter, or one that speaks TLS.
    #[error("{address} does not answer as an exporter does ({error}); does it want TLS?")]
    Http {
        /// Where.
        address: Address,
        /// What went wrong.
        error: Box<dyn std::error::Error + Send + Sync>,
    },
    /// It refuses.
    #[error("{address} answered {path} with status {status}{hint}")]
    Status {
        /// Where.
        address: Address,
        /// To what.
        path: &'static str,
        /// The status.
        status: StatusCode,
        /// What to do about it.
        hint: &'static str,
    },
}

/// The answer to `/api/v1/status`.
pub async fn ask(address: &Address) -> Result<Bytes, AskError> {
    within_deadline(address, async {
        let answer = get(address, STATUS).await?;
        let body = Limited::new(answer.response.into_body(), MAX_ANSWER).collect().await;
        Ok(body.map_err(|error| AskError::Http { address: address.clone(), error })?.to_bytes())
    })
    .await
}

/// What an exporter tells of itself, as it happens: `/api/v1/events`.
pub struct News {
    address: Address,
    answer: Answer,
    events: Events,
}

impl News {
    /// Begins to listen. The first event comes at once.
    pub async fn listen(address: &Address) -> Result<News, AskError> {
        let answer = within_deadline(address, get(address, EVENTS)).await?;
        Ok(News { address: address.clone(), answer, events: Events::default() })
    }

    /// Who tells.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Waits for an event, whichever: the picture is another. Cancelling it loses none.
    pub async fn next(&mut self) -> Result<(), AskError> {
        let failed = |error| AskError::Http { address: self.address.clone(), error };
        loop {
            let frame = tokio::time::timeout(SILENCE, self.answer.response.body_mut().frame()).await;
            let frame = frame.map_err(|_| failed("it fell silent".into()))?;
            let frame = frame.ok_or_else(|| failed("it ended the stream".into()))?;
            let frame = frame.map_err(|error| failed(error.into()))?;
            if frame.data_ref().is_some_and(|bytes| self.events.end_in(bytes)) {
                return Ok(());
            }
        }
    }
}

/// A stream of server-sent events, of which only the ends matter.
#[derive(Debug, Default)]
struct Events {
    /// The line so far: its first byte.
    line: Option<u8>,
    has_data: bool,
}

impl Events {
    /// Whether an event ends in the next bytes of the stream: at an empty line below its data.
    fn end_in(&mut self, bytes: &[u8]) -> bool {
        let mut is_end = false;
        for byte in bytes {
            match (byte, self.line) {
                (b'\n', None) => is_end |= std::mem::take(&mut self.has_data),
                (b'\n', Some(first)) => {
                    self.has_data |= first == b'd';
                    self.line = None;
                }
                (byte, None) => self.line = Some(*byte),
                (_, Some(_)) => {}
            }
        }
        is_end
    }
}

/// An answer that is being read. The connection ends with it.
struct Answer {
    response: Response<Incoming>,
    _connection: JoinSet<hyper::Result<()>>,
}

async fn within_deadline<T>(
    address: &Address,
    asked: impl Future<Output = Result<T, AskError>>,
) -> Result<T, AskError> {
    let asked = tokio::time::timeout(DEADLINE, asked).await;
    asked.unwrap_or_else(|_| Err(AskError::Timeout(address.clone())))
}

async fn get(address: &Address, path: &'static str) -> Result<Answer, AskError> {
    let failed = |error| AskError::Connect { address: address.clone(), error };
    match address {
        Address::Http { host, port, prefix } => {
            let stream = TcpStream::connect((host.as_str(), *port)).await.map_err(failed)?;
            let authority =
                if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
            get_on(address, stream, &authority, prefix, path).await
        }
        Address::Unix(socket) => {
            let stream = UnixStream::connect(socket).await.map_err(failed)?;
            get_on(address, stream, "localhost", "", path).await
        }
    }
}

async fn get_on<S>(
    address: &Address,
    stream: S,
    authority: &str,
    prefix: &str,
    path: &'static str,
) -> Result<Answer, AskError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let failed = |error| AskError::Http { address: address.clone(), error };
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| failed(error.into()))?;
    let mut connections = JoinSet::new();
    connections.spawn(connection);
    let request = Request::get(format!("{prefix}{path}"))
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
        return Err(AskError::Status { address: address.clone(), path, status, hint });
    }
    Ok(Answer { response, _connection: connections })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_seen_at_its_end_however_it_arrives() {
        let text =
            b"retry: 3000\n\n: still here\n\nevent: snapshot\ndata: {}\n\nevent: incident\ndata: {}\n\n";
        for length in 1..text.len() {
            let mut events = Events::default();
            let ends = text.chunks(length).filter(|bytes| events.end_in(bytes)).count();
            assert!((1..=2).contains(&ends) && (length > 20 || ends == 2), "{ends} in pieces of {length}");
        }
        let mut events = Events::default();
        assert!(!events.end_in(b": still here\n\nretry: 3000\n\nevent: snapshot\ndata: {}\n"));
        assert!(events.end_in(b"\n"));
    }

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
