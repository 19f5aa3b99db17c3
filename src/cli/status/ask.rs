//! Asks a running exporter for its snapshot, and listens for changes.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, HOST, HeaderValue, USER_AGENT};
use hyper::{Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinSet;

#[cfg(feature = "tls")]
use crate::config::ClientTls;
use crate::outlet::client::{basic, read_secret};
#[cfg(feature = "tls")]
use crate::outlet::tls::TlsFiles;

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
    /// `http://host:port` or `https://host:port`, perhaps with a path that a proxy puts in front.
    Http { is_tls: bool, host: String, port: u16, prefix: String },
    /// `unix:/path`.
    Unix(PathBuf),
}

impl Address {
    /// The value of `Host`.
    fn authority(&self) -> String {
        match self {
            Address::Http { host, port, .. } if host.contains(':') => format!("[{host}]:{port}"),
            Address::Http { host, port, .. } => format!("{host}:{port}"),
            Address::Unix(_) => "localhost".to_owned(),
        }
    }

    /// Where `serve` listens by default.
    pub fn usual() -> Address {
        Address::Http { is_tls: false, host: "127.0.0.1".to_owned(), port: 10055, prefix: String::new() }
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
        let expected = "expected a URL like http://127.0.0.1:10055 or https://gpu-1:10055, or unix:/path";
        let uri: Uri = text.parse().map_err(|_| expected)?;
        let is_tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(expected.to_owned()),
        };
        if is_tls && cfg!(not(feature = "tls")) {
            return Err("this mps-exporter was built without TLS".to_owned());
        }
        let host = uri.host().filter(|host| !host.is_empty() && uri.query().is_none()).ok_or(expected)?;
        if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
            return Err("a user in the URL is not supported: use --user and --password-file".to_owned());
        }
        Ok(Address::Http {
            is_tls,
            host: host.trim_start_matches('[').trim_end_matches(']').to_owned(),
            port: uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 }),
            prefix: uri.path().trim_end_matches('/').to_owned(),
        })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Http { is_tls, prefix, .. } => {
                let scheme = if *is_tls { "https" } else { "http" };
                write!(f, "{scheme}://{}{prefix}", self.authority())
            }
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// What it takes to be let in by an exporter with `--web.config.file`.
#[derive(Debug, Clone, Default, Args)]
pub struct Access {
    /// Certificates to trust instead of the system's, for an exporter at https://.
    #[arg(long = "tls.ca-file", value_name = "FILE")]
    pub ca_file: Option<PathBuf>,

    /// Trust whatever certificate the exporter shows.
    #[arg(long = "tls.insecure-skip-verify", conflicts_with = "ca_file")]
    pub insecure_skip_verify: bool,

    /// Our certificate, for an exporter that asks for one.
    #[arg(long = "tls.cert-file", value_name = "FILE", requires = "key_file")]
    pub cert_file: Option<PathBuf>,

    /// Its key.
    #[arg(long = "tls.key-file", value_name = "FILE", requires = "cert_file")]
    pub key_file: Option<PathBuf>,

    /// The user that the exporter knows.
    #[arg(long, value_name = "NAME", requires = "password_file")]
    pub user: Option<String>,

    /// The file that holds this user's password.
    #[arg(long, value_name = "FILE", requires = "user")]
    pub password_file: Option<PathBuf>,
}

impl Access {
    fn authorization(&self) -> Result<Option<HeaderValue>, AskError> {
        let Some((user, file)) = self.user.as_ref().zip(self.password_file.as_ref()) else { return Ok(None) };
        let unusable = |error| AskError::Password { file: file.clone(), error };
        let password = read_secret(file).map_err(unusable)?;
        let value = HeaderValue::from_str(&basic(user, &password));
        let mut value = value.map_err(|_| unusable(std::io::ErrorKind::InvalidData.into()))?;
        value.set_sensitive(true);
        Ok(Some(value))
    }
}

/// An exporter, and how to get at it.
#[derive(Debug, Clone)]
pub struct Exporter {
    /// Where it listens.
    pub address: Address,
    /// What it asks for.
    pub access: Access,
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
    /// The password's file cannot be used.
    #[error("the password in {}: {error}", file.display())]
    Password {
        /// The file.
        file: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The connection cannot be secured.
    #[error("TLS with {address}: {error}{hint}", hint = tls_hint(error))]
    Tls {
        /// Where.
        address: Address,
        /// Why.
        error: std::io::Error,
    },
    /// Not within the deadline.
    #[error("{0} gave no answer within {deadline} s", deadline = DEADLINE.as_secs())]
    Timeout(Address),
    /// What answers is no exporter, or one that speaks TLS.
    #[error("{address} does not answer as an exporter does ({error}); does it want https://?")]
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

/// What to do about a certificate that is not trusted.
#[cfg(feature = "tls")]
fn tls_hint(error: &std::io::Error) -> &'static str {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    if matches!(inner, Some(rustls::Error::InvalidCertificate(_))) {
        "; --tls.ca-file says whom to trust"
    } else {
        ""
    }
}

#[cfg(not(feature = "tls"))]
fn tls_hint(_error: &std::io::Error) -> &'static str {
    ""
}

/// The answer to `/api/v1/status`.
pub async fn ask(exporter: &Exporter) -> Result<Bytes, AskError> {
    let address = &exporter.address;
    within_deadline(address, async {
        let answer = get(exporter, STATUS).await?;
        let body = Limited::new(answer.response.into_body(), MAX_ANSWER).collect().await;
        Ok(body.map_err(|error| AskError::Http { address: address.clone(), error })?.to_bytes())
    })
    .await
}

/// What an exporter tells of itself, as it happens: `/api/v1/events`.
pub struct News {
    exporter: Exporter,
    answer: Answer,
    events: Events,
}

impl News {
    /// Begins to listen. The first event comes at once.
    pub async fn listen(exporter: &Exporter) -> Result<News, AskError> {
        let answer = within_deadline(&exporter.address, get(exporter, EVENTS)).await?;
        Ok(News { exporter: exporter.clone(), answer, events: Events::default() })
    }

    /// Who tells.
    pub fn exporter(&self) -> &Exporter {
        &self.exporter
    }

    /// Waits for an event, whichever: the picture is another. Cancelling it loses none.
    pub async fn next(&mut self) -> Result<(), AskError> {
        let failed = |error| AskError::Http { address: self.exporter.address.clone(), error };
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

async fn get(exporter: &Exporter, path: &'static str) -> Result<Answer, AskError> {
    let address = &exporter.address;
    let failed = |error| AskError::Connect { address: address.clone(), error };
    match address {
        Address::Http { is_tls, host, port, .. } => {
            let stream = TcpStream::connect((host.as_str(), *port)).await.map_err(failed)?;
            if *is_tls {
                get_secured(exporter, stream, host, path).await
            } else {
                get_on(exporter, stream, path).await
            }
        }
        Address::Unix(socket) => {
            let stream = UnixStream::connect(socket).await.map_err(failed)?;
            get_on(exporter, stream, path).await
        }
    }
}

#[cfg(feature = "tls")]
async fn get_secured(
    exporter: &Exporter,
    stream: TcpStream,
    host: &str,
    path: &'static str,
) -> Result<Answer, AskError> {
    let Exporter { address, access } = exporter;
    let files = ClientTls {
        ca_file: access.ca_file.clone(),
        cert_file: access.cert_file.clone(),
        key_file: access.key_file.clone(),
        insecure_skip_verify: access.insecure_skip_verify,
        ..ClientTls::default()
    };
    let failed = |error| AskError::Tls { address: address.clone(), error };
    let stream = TlsFiles::new(files, host).handshake(stream).await.map_err(failed)?;
    get_on(exporter, stream, path).await
}

#[cfg(not(feature = "tls"))]
async fn get_secured(
    exporter: &Exporter,
    stream: TcpStream,
    _host: &str,
    path: &'static str,
) -> Result<Answer, AskError> {
    // No address with TLS is accepted.
    get_on(exporter, stream, path).await
}

async fn get_on<S>(exporter: &Exporter, stream: S, path: &'static str) -> Result<Answer, AskError>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let Exporter { address, access } = exporter;
    let failed = |error| AskError::Http { address: address.clone(), error };
    let authorization = access.authorization()?;
    let prefix = match address {
        Address::Http { prefix, .. } => prefix,
        Address::Unix(_) => "",
    };
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|error| failed(error.into()))?;
    let mut connections = JoinSet::new();
    connections.spawn(connection);
    let mut request = Request::get(format!("{prefix}{path}"))
        .header(HOST, address.authority())
        .header(USER_AGENT, concat!("mps-exporter/", env!("CARGO_PKG_VERSION")));
    if let Some(value) = &authorization {
        request = request.header(AUTHORIZATION, value);
    }
    let request = request.body(Empty::<Bytes>::new()).map_err(|error| failed(error.into()))?;
    let response = sender.send_request(request).await.map_err(|error| failed(error.into()))?;
    let status = response.status();
    if status != StatusCode::OK {
        let hint = match status {
            StatusCode::UNAUTHORIZED if authorization.is_some() => ": the user or the password is wrong",
            StatusCode::UNAUTHORIZED => ": it wants a password; --user and --password-file give it",
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
        for text in [
            "http://127.0.0.1:10055",
            "http://[::1]:8080",
            "http://gpu-1:80/mps",
            "https://gpu-1:10055",
            "unix:/run/e.sock",
        ] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        assert_eq!("http://gpu-1/".parse::<Address>().unwrap().to_string(), "http://gpu-1:80");
        assert_eq!("https://gpu-1".parse::<Address>().unwrap().to_string(), "https://gpu-1:443");
        for text in ["gpu-1:10055", "ftp://x", "http://", "http://u:p@h:1", "http://h:1/?x", "unix:run", ""] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
