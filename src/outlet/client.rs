//! A small HTTP client: one POST over one connection, within one deadline.
//!
//! A connection of its own for each post costs a tenth of a millisecond on a local network, and has no stale
//! connection to find out about at the moment when an alert must leave.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue, USER_AGENT};
use hyper::{Method, Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use crate::config::{Alertmanager, BasicAuth, Secret};
use crate::file;
#[cfg(feature = "tls")]
use crate::outlet::tls::TlsFiles;

/// How much of an answer is read.
const MAX_ANSWER: usize = 16 << 10;
/// How much of an answer is quoted in an error.
const MAX_QUOTE: usize = 300;
/// A secret's file is not larger.
const MAX_SECRET: u64 = 64 << 10;

/// Why a URL cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// It cannot be parsed, or has no host.
    #[error("`{0}` is not a URL like http://alertmanager:9093")]
    Malformed(String),
    /// A scheme other than http and https.
    #[error("`{0}`: the scheme must be http or https")]
    Scheme(String),
    /// User and password within the URL.
    #[error("the URL holds a user or password: use basic_auth")]
    UserInfo,
    /// https without the feature.
    #[error("`{0}`: this mps-exporter was built without TLS")]
    NoTls(String),
}

/// Why a post failed.
#[derive(Debug, thiserror::Error)]
pub enum PostError {
    /// No answer within the deadline.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// No connection.
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    /// A certificate, key or handshake failed.
    #[error("TLS: {0}")]
    Tls(#[source] io::Error),
    /// A file with a password or token cannot be used.
    #[error("cannot use {0}: {1}")]
    Secret(PathBuf, #[source] io::Error),
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Http(#[source] hyper::Error),
    /// 401 or 403.
    #[error("not authorized (status {0})")]
    Unauthorized(u16),
    /// Another 4xx: sending the same again does not help.
    #[error("refused (status {0}): {1}")]
    Refused(u16, String),
    /// Anything else than success.
    #[error("answered status {0}: {1}")]
    Status(u16, String),
}

impl PostError {
    /// Every label, and that of success.
    pub const RESULTS: [&str; 6] = ["ok", "timeout", "unreachable", "unauthorized", "refused", "error"];

    /// The label `result`.
    pub fn label(&self) -> &'static str {
        match self {
            PostError::Timeout(_) => "timeout",
            PostError::Connect(_) | PostError::Tls(_) => "unreachable",
            PostError::Unauthorized(_) | PostError::Secret(..) => "unauthorized",
            PostError::Refused(..) => "refused",
            PostError::Http(_) | PostError::Status(..) => "error",
        }
    }
}

/// Where and how to post.
#[derive(Debug)]
pub struct Client {
    /// The URL that is configured, without a slash at its end; the label `alertmanager`.
    pub name: String,
    host: String,
    port: u16,
    authority: HeaderValue,
    path: String,
    auth: Auth,
    timeout: Duration,
    #[cfg(feature = "tls")]
    tls: Option<TlsFiles>,
}

#[derive(Debug)]
enum Auth {
    None,
    Basic(BasicAuth),
    Bearer(PathBuf),
}

impl Client {
    /// A client that posts to `path` below the configured URL. Files that it names are read at each post.
    pub fn new(config: &Alertmanager, path: &str) -> Result<Client, UrlError> {
        let base = config.url.trim_end_matches('/');
        if base.split_once("://").is_some_and(|(_, rest)| rest.split('/').next().unwrap_or("").contains('@'))
        {
            return Err(UrlError::UserInfo);
        }
        let malformed = || UrlError::Malformed(config.url.clone());
        let uri: Uri = config.url.parse().map_err(|_| malformed())?;
        let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(malformed)?;
        if uri.query().is_some() {
            return Err(malformed());
        }
        let is_tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(UrlError::Scheme(config.url.clone())),
        };
        if is_tls && cfg!(not(feature = "tls")) {
            return Err(UrlError::NoTls(config.url.clone()));
        }
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let auth = match (&config.basic_auth, &config.bearer_token_file) {
            (Some(basic), _) => Auth::Basic(basic.clone()),
            (None, Some(file)) => Auth::Bearer(file.clone()),
            (None, None) => Auth::None,
        };
        Ok(Client {
            name: base.to_owned(),
            port: uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 }),
            authority: HeaderValue::from_str(uri.authority().ok_or_else(malformed)?.as_str())
                .map_err(|_| malformed())?,
            path: format!("{}{path}", uri.path().trim_end_matches('/')),
            auth,
            timeout: config.timeout,
            #[cfg(feature = "tls")]
            tls: is_tls.then(|| TlsFiles::new(config.tls.clone(), &host)),
            host,
        })
    }

    /// Posts JSON. Success is any 2xx.
    pub async fn post(&self, body: Bytes) -> Result<(), PostError> {
        tokio::time::timeout(self.timeout, self.exchange(body))
            .await
            .unwrap_or(Err(PostError::Timeout(self.timeout)))
    }

    /// Whether there is a password or token to show, and a connection within `limit`, secured where it has to be. Nothing
    /// is posted.
    pub async fn reach(&self, limit: Duration) -> Result<(), PostError> {
        let reached = async {
            self.authorization()?;
            let stream = self.connect().await.map_err(PostError::Connect)?;
            #[cfg(feature = "tls")]
            if let Some(tls) = &self.tls {
                tls.handshake(stream).await.map_err(PostError::Tls)?;
                return Ok(());
            }
            drop(stream);
            Ok(())
        };
        tokio::time::timeout(limit, reached).await.unwrap_or(Err(PostError::Timeout(limit)))
    }

    async fn exchange(&self, body: Bytes) -> Result<(), PostError> {
        let request = self.request(body)?;
        let stream = self.connect().await.map_err(PostError::Connect)?;
        #[cfg(feature = "tls")]
        if let Some(tls) = &self.tls {
            let stream = tls.handshake(stream).await.map_err(PostError::Tls)?;
            return send(stream, request).await;
        }
        send(stream, request).await
    }

    fn request(&self, body: Bytes) -> Result<Request<Full<Bytes>>, PostError> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = Uri::try_from(&self.path).expect("the path was part of a valid URI");
        let headers = request.headers_mut();
        headers.insert(HOST, self.authority.clone());
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(
            USER_AGENT,
            HeaderValue::from_static(concat!("mps-exporter/", env!("CARGO_PKG_VERSION"))),
        );
        if let Some(value) = self.authorization()? {
            headers.insert(AUTHORIZATION, value);
        }
        Ok(request)
    }

    fn authorization(&self) -> Result<Option<HeaderValue>, PostError> {
        let secret =
            |path: &PathBuf| read_secret(path).map_err(|error| PostError::Secret(path.clone(), error));
        let (text, origin) = match &self.auth {
            Auth::None => return Ok(None),
            Auth::Basic(BasicAuth { username, password }) => {
                let (password, origin) = match password {
                    Secret::Inline(password) => (password.clone(), PathBuf::from("basic_auth")),
                    Secret::File(path) => (secret(path)?, path.clone()),
                };
                (basic(username, &password), origin)
            }
            Auth::Bearer(path) => (format!("Bearer {}", secret(path)?), path.clone()),
        };
        let mut value = HeaderValue::from_str(&text).map_err(|_| {
            let what = io::Error::new(io::ErrorKind::InvalidData, "it does not fit into a header");
            PostError::Secret(origin, what)
        })?;
        value.set_sensitive(true);
        Ok(Some(value))
    }

    /// Connects to the first address that answers; each gets its share of the deadline.
    async fn connect(&self) -> io::Result<TcpStream> {
        let addresses: Vec<_> = tokio::net::lookup_host((self.host.as_str(), self.port)).await?.collect();
        let share = self.timeout / u32::try_from(addresses.len()).unwrap_or(u32::MAX).max(1);
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

async fn send<S>(stream: S, request: Request<Full<Bytes>>) -> Result<(), PostError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(PostError::Http)?;
    let exchange = async {
        let response = sender.send_request(request).await.map_err(PostError::Http)?;
        let status = response.status();
        if status.is_success() {
            return Ok(());
        }
        if status == StatusCode::UNAUTHORIZED || status == StatusCode::FORBIDDEN {
            return Err(PostError::Unauthorized(status.as_u16()));
        }
        let answer = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
        let quote = answer.map(|answer| quote(&answer.to_bytes())).unwrap_or_default();
        let passes = [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS, StatusCode::NOT_FOUND];
        if status.is_client_error() && !passes.contains(&status) {
            return Err(PostError::Refused(status.as_u16(), quote));
        }
        Err(PostError::Status(status.as_u16(), quote))
    };
    // Both halves run in this future, so that dropping it at the deadline drops the connection.
    tokio::pin!(connection, exchange);
    let mut is_connected = true;
    loop {
        tokio::select! {
            biased;
            result = &mut exchange => return result,
            _ = &mut connection, if is_connected => is_connected = false,
        }
    }
}

fn quote(answer: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(answer).chars().take(MAX_QUOTE).collect();
    text.trim().replace(char::is_control, " ")
}

/// The value of `Authorization` by which a user shows a password.
pub fn basic(username: &str, password: &str) -> String {
    format!("Basic {}", BASE64_STANDARD.encode(format!("{username}:{password}")))
}

/// The content of a secret's file without the line end that editors put there.
pub fn read_secret(path: &Path) -> io::Result<String> {
    let text = file::read_text(path, MAX_SECRET)?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(url: &str) -> Alertmanager {
        Alertmanager {
            url: url.into(),
            labels: std::collections::BTreeMap::new(),
            runbooks: None,
            basic_auth: None,
            bearer_token_file: None,
            tls: crate::config::ClientTls::default(),
            resolve: false,
            timeout: Duration::from_secs(1),
            max_age: Duration::from_secs(900),
        }
    }

    #[test]
    fn urls_are_taken_apart() {
        let client = Client::new(&config("http://am.example/prefix/"), "/api/v2/alerts").unwrap();
        assert_eq!((client.host.as_str(), client.port), ("am.example", 80));
        assert_eq!(client.path, "/prefix/api/v2/alerts");
        assert_eq!(client.name, "http://am.example/prefix");
        let client = Client::new(&config("http://[::1]:9093"), "/api/v2/alerts").unwrap();
        assert_eq!((client.host.as_str(), client.port), ("::1", 9093));
        assert_eq!(client.authority, "[::1]:9093");
    }

    #[test]
    fn a_url_that_cannot_work_is_refused_at_once() {
        for (url, expected) in [
            ("alertmanager:9093", "scheme"),
            ("ftp://am", "scheme must be"),
            ("http://", "not a URL"),
            ("http://user:secret@am:9093", "basic_auth"),
            ("http://am:9093/?x=1", "not a URL"),
        ] {
            let error = Client::new(&config(url), "/").unwrap_err().to_string();
            assert!(error.contains(expected), "{url}: {error}");
            assert!(!error.contains("secret"));
        }
    }
}
