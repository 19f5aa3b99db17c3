//! A small HTTP client: one request over one connection, within one deadline. Alerts are posted with it, and `status`
//! asks an exporter.
//!
//! A connection of its own for each request costs a tenth of a millisecond on a local network, and has no stale
//! connection to find out about at the moment when an alert must leave.

mod address;
#[cfg(feature = "tls")]
mod tls;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Collected, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue, USER_AGENT};
use hyper::http::request;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinSet;

use crate::config::{BasicAuth, ClientTls, Secret};
use crate::file;
pub use address::{Address, UrlError};

/// A secret's file is not larger.
const MAX_SECRET: u64 = 64 << 10;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not within the deadline.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// No connection.
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    /// A certificate, key or handshake failed, or the server refuses ours.
    #[error("TLS: {0}")]
    Tls(#[source] io::Error),
    /// A file with a password or token cannot be used.
    #[error("cannot use {0}: {1}")]
    Secret(PathBuf, #[source] io::Error),
    /// The connection broke, or what came is no HTTP.
    #[error("the connection broke: {0}")]
    Http(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl From<hyper::Error> for Error {
    fn from(error: hyper::Error) -> Error {
        // With TLS 1.3 a server refuses a certificate, or the want of one, only after the handshake.
        #[cfg(feature = "tls")]
        if let Some(refusal) = tls::refusal(&error) {
            return Error::Tls(refusal);
        }
        Error::Http(error.into())
    }
}

/// How a client shows who it is.
#[derive(Debug)]
pub enum Auth {
    /// Not at all.
    None,
    /// By a user's password.
    Basic(BasicAuth),
    /// By the token in this file.
    Bearer(PathBuf),
}

impl Auth {
    /// The value of `Authorization`. Secrets are read from their files now.
    fn header(&self) -> Result<Option<HeaderValue>, Error> {
        let (text, origin) = match self {
            Auth::None => return Ok(None),
            Auth::Basic(BasicAuth { username, password }) => {
                let (password, origin) = match password {
                    Secret::Inline(password) => (password.clone(), PathBuf::from("basic_auth")),
                    Secret::File(path) => (read_secret(path)?, path.clone()),
                };
                let credentials = BASE64_STANDARD.encode(format!("{username}:{password}"));
                (format!("Basic {credentials}"), origin)
            }
            Auth::Bearer(path) => (format!("Bearer {}", read_secret(path)?), path.clone()),
        };
        let mut value = HeaderValue::from_str(&text).map_err(|_| {
            let what = io::Error::new(io::ErrorKind::InvalidData, "it does not fit into a header");
            Error::Secret(origin, what)
        })?;
        value.set_sensitive(true);
        Ok(Some(value))
    }
}

/// The content of a secret's file without the line end that editors put there.
fn read_secret(path: &Path) -> Result<String, Error> {
    let text = file::read_text(path, MAX_SECRET).map_err(|error| Error::Secret(path.to_owned(), error))?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

/// One server, and how to get at it.
#[derive(Debug)]
pub struct Client {
    /// Where it listens.
    pub address: Address,
    /// What we show.
    pub auth: Auth,
    deadline: Duration,
    #[cfg(feature = "tls")]
    tls: Option<tls::TlsFiles>,
}

impl Client {
    /// A client of the server at this address. Nothing is connected; files are read at each request.
    #[cfg_attr(not(feature = "tls"), allow(unused_variables))]
    pub fn new(address: Address, auth: Auth, tls: &ClientTls, deadline: Duration) -> Client {
        Client {
            #[cfg(feature = "tls")]
            tls: match &address {
                Address::Http { is_tls: true, host, .. } => Some(tls::TlsFiles::new(tls.clone(), host)),
                _ => None,
            },
            address,
            auth,
            deadline,
        }
    }

    /// An exchange within the deadline. Its connection ends with it.
    pub async fn within_deadline<T>(
        &self,
        exchange: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let exchange = tokio::time::timeout(self.deadline, exchange).await;
        exchange.unwrap_or(Err(Error::Timeout(self.deadline)))
    }

    /// Whether there is a password or token to show, and a connection within the deadline, secured where it has to be.
    /// Nothing is sent.
    pub async fn reach(&self) -> Result<(), Error> {
        self.auth.header()?;
        self.within_deadline(self.connect()).await.map(drop)
    }

    /// Asks for `path`. Gives the answer once its head is there.
    pub async fn get(&self, path: &str) -> Result<Answer, Error> {
        self.send(path, Request::get, Bytes::new()).await
    }

    /// Posts JSON to `path`. Gives the answer once its head is there.
    pub async fn post(&self, path: &str, json: Bytes) -> Result<Answer, Error> {
        let head = |path| Request::post(path).header(CONTENT_TYPE, "application/json");
        self.send(path, head, json).await
    }

    async fn send(
        &self,
        path: &str,
        head: impl FnOnce(String) -> request::Builder,
        body: Bytes,
    ) -> Result<Answer, Error> {
        let mut head = head(format!("{}{path}", self.address.prefix()))
            .header(HOST, self.address.authority())
            .header(USER_AGENT, concat!("mps-exporter/", env!("CARGO_PKG_VERSION")));
        if let Some(value) = self.auth.header()? {
            head = head.header(AUTHORIZATION, value);
        }
        let request = head.body(Full::new(body)).expect("path and host were parts of a valid URL");
        let (mut sender, connection) = http1::handshake(TokioIo::new(self.connect().await?)).await?;
        // A set of one: dropping it ends the connection.
        let mut connections = JoinSet::new();
        connections.spawn(connection);
        let response = sender.send_request(request).await?;
        Ok(Answer { response, _connection: connections })
    }

    async fn connect(&self) -> Result<Box<dyn Stream>, Error> {
        let stream = match &self.address {
            Address::Http { host, port, .. } => self.connect_to(host, *port).await.map_err(Error::Connect)?,
            Address::Unix(path) => {
                return Ok(Box::new(UnixStream::connect(path).await.map_err(Error::Connect)?));
            }
        };
        #[cfg(feature = "tls")]
        if let Some(tls) = &self.tls {
            return Ok(Box::new(tls.handshake(stream).await.map_err(Error::Tls)?));
        }
        Ok(Box::new(stream))
    }

    /// Connects to the first address that answers; each gets its share of the deadline.
    async fn connect_to(&self, host: &str, port: u16) -> io::Result<TcpStream> {
        let addresses: Vec<_> = tokio::net::lookup_host((host, port)).await?.collect();
        let share = self.deadline / u32::try_from(addresses.len()).unwrap_or(u32::MAX).max(1);
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for address in addresses {
            match tokio::time::timeout(share, TcpStream::connect(address)).await {
                Ok(Ok(stream)) => {
                    stream.set_nodelay(true)?;
                    return Ok(stream);
                }
                Ok(Err(error)) => last = error,
                Err(_) => last = io::ErrorKind::TimedOut.into(),
            }
        }
        Err(last)
    }
}

/// Whatever HTTP is spoken over.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// An answer whose body is still to be read. The connection ends with it.
#[derive(Debug)]
pub struct Answer {
    /// Head and body.
    pub response: Response<Incoming>,
    _connection: JoinSet<hyper::Result<()>>,
}

impl Answer {
    /// The whole body, if it is not longer than `limit` bytes.
    pub async fn body(self, limit: usize) -> Result<Bytes, Error> {
        let body = Limited::new(self.response.into_body(), limit).collect().await;
        body.map(Collected::to_bytes).map_err(Error::Http)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn a_connection_ends_with_its_deadline() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}/below", listener.local_addr().unwrap()).parse().unwrap();
        let client = Client::new(address, Auth::None, &ClientTls::default(), Duration::from_millis(200));
        let server = async {
            let mut heard = String::new();
            listener.accept().await.unwrap().0.read_to_string(&mut heard).await.unwrap();
            heard
        };
        let posted = client.within_deadline(client.post("/alerts", Bytes::from_static(b"[]")));
        let limit = Duration::from_secs(10);
        let (heard, outcome) = tokio::join!(tokio::time::timeout(limit, server), posted);
        assert!(matches!(outcome, Err(Error::Timeout(_))), "{outcome:?}");
        let heard = heard.expect("the connection is still open");
        assert!(
            heard.starts_with("POST /below/alerts HTTP/1.1\r\n") && heard.ends_with("\r\n\r\n[]"),
            "{heard}"
        );
    }
}
