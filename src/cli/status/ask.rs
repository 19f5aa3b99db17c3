//! Asks a running exporter for its snapshot, and listens for changes.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use bytes::Bytes;
use clap::Args;
use http_body_util::BodyExt as _;
use hyper::StatusCode;

use crate::config::{BasicAuth, ClientTls, Secret};
use crate::http_client::{Address, Answer, Auth, Client, Error};

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

/// Where `serve` listens by default.
pub fn usual_address() -> Address {
    Address::Http { is_tls: false, host: "127.0.0.1".to_owned(), port: 10055, prefix: String::new() }
}

/// What it takes to be let in by an exporter with `--web.config.file`.
#[derive(Debug, Clone, Default, Args)]
pub struct Access {
    /// Certificates to trust instead of the system's, for an exporter at https://.
    #[arg(long = "tls.ca-file", value_name = "FILE", requires = "url")]
    pub ca_file: Option<PathBuf>,

    /// Trust whatever certificate the exporter shows.
    #[arg(long = "tls.insecure-skip-verify", conflicts_with = "ca_file", requires = "url")]
    pub insecure_skip_verify: bool,

    /// Our certificate, for an exporter that asks for one.
    #[arg(long = "tls.cert-file", value_name = "FILE", requires = "key_file", requires = "url")]
    pub cert_file: Option<PathBuf>,

    /// Its key.
    #[arg(long = "tls.key-file", value_name = "FILE", requires = "cert_file", requires = "url")]
    pub key_file: Option<PathBuf>,

    /// The user that the exporter knows. An exporter that does not answer is an error then, as with --url.
    #[arg(long, value_name = "NAME", requires = "password_file")]
    pub user: Option<String>,

    /// The file that holds this user's password.
    #[arg(long, value_name = "FILE", requires = "user")]
    pub password_file: Option<PathBuf>,
}

impl Access {
    /// A client of the exporter at this address.
    ///
    /// # Errors
    /// When there is something that this address has no use for.
    pub fn client(&self, address: Address) -> anyhow::Result<Client> {
        let tls = self.tls();
        ensure!(
            address.is_tls() || tls == ClientTls::default(),
            "--tls.* has no effect on {address}: it needs a URL that starts with https://"
        );
        let auth = match (&self.user, &self.password_file) {
            (Some(user), Some(file)) => {
                Auth::Basic(BasicAuth { username: user.clone(), password: Secret::File(file.clone()) })
            }
            _ => Auth::None,
        };
        Ok(Client::new(address, auth, &tls, DEADLINE))
    }

    fn tls(&self) -> ClientTls {
        ClientTls {
            ca_file: self.ca_file.clone(),
            cert_file: self.cert_file.clone(),
            key_file: self.key_file.clone(),
            server_name: None,
            insecure_skip_verify: self.insecure_skip_verify,
        }
    }
}

/// Why there is no snapshot.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// It cannot be asked, or gives no answer.
    #[error("{}", in_words(address, error))]
    NoAnswer {
        /// Where.
        address: Address,
        /// Why.
        error: Error,
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

/// Why an exporter gives no answer, and what to do about it.
fn in_words(address: &Address, error: &Error) -> String {
    match error {
        Error::Connect(error) => format!("no exporter answers at {address}: {error}"),
        Error::Secret(file, error) => format!("the password in {}: {error}", file.display()),
        Error::Tls(error) => format!("TLS with {address}: {error}{}", tls_hint(error)),
        Error::Timeout(limit) => format!("{address} gave no answer within {} s", limit.as_secs()),
        Error::Http(error) => {
            let hint = if wants_tls(address, &**error) { "; does it want https://?" } else { "" };
            format!("{address} does not answer as an exporter does ({error}){hint}")
        }
    }
}

/// Whether plain HTTP may be the mistake: a server that expects TLS answers with an alert of TLS, or hangs up.
fn wants_tls(address: &Address, error: &(dyn std::error::Error + 'static)) -> bool {
    matches!(address, Address::Http { is_tls: false, .. })
        && error
            .downcast_ref::<hyper::Error>()
            .is_some_and(|error| error.is_parse() || error.is_incomplete_message())
}

/// What to do about a certificate that is not trusted, here or there.
#[cfg(feature = "tls")]
fn tls_hint(error: &std::io::Error) -> &'static str {
    use rustls::AlertDescription as Alert;
    match error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(rustls::Error::InvalidCertificate(_)) => "; --tls.ca-file says whom to trust",
        Some(rustls::Error::AlertReceived(Alert::CertificateRequired)) => {
            "; --tls.cert-file and --tls.key-file show a certificate"
        }
        _ => "",
    }
}

#[cfg(not(feature = "tls"))]
fn tls_hint(_error: &std::io::Error) -> &'static str {
    ""
}

/// The answer to `/api/v1/status`.
pub async fn ask(exporter: &Client) -> Result<Bytes, AskError> {
    let exchange = async {
        let answer = exporter.get(STATUS).await?;
        let status = answer.response.status();
        let body = if status == StatusCode::OK { answer.body(MAX_ANSWER).await? } else { Bytes::new() };
        Ok((status, body))
    };
    let (status, body) = exporter.within_deadline(exchange).await.map_err(no_answer(exporter))?;
    accepted(exporter, STATUS, status).map(|()| body)
}

fn no_answer(exporter: &Client) -> impl Fn(Error) -> AskError {
    |error| AskError::NoAnswer { address: exporter.address.clone(), error }
}

fn accepted(exporter: &Client, path: &'static str, status: StatusCode) -> Result<(), AskError> {
    let hint = match (status, &exporter.auth) {
        (StatusCode::OK, _) => return Ok(()),
        (StatusCode::UNAUTHORIZED, Auth::None) => ": it wants a password; --user and --password-file give it",
        (StatusCode::UNAUTHORIZED, _) => ": the user or the password is wrong",
        (StatusCode::NOT_FOUND, _) => ": is it an mps-exporter?",
        _ => "",
    };
    Err(AskError::Status { address: exporter.address.clone(), path, status, hint })
}

/// What an exporter tells of itself, as it happens: `/api/v1/events`.
pub struct News {
    answer: Answer,
    events: Events,
}

impl News {
    /// Begins to listen. The first event comes at once.
    pub async fn listen(exporter: &Client) -> Result<News, AskError> {
        let answer = exporter.within_deadline(exporter.get(EVENTS)).await.map_err(no_answer(exporter))?;
        accepted(exporter, EVENTS, answer.response.status())?;
        Ok(News { answer, events: Events::default() })
    }

    /// Waits for an event, whichever: the picture is another. Cancelling it loses none. Whether the stream goes on:
    /// it ends also when it falls silent.
    pub async fn next(&mut self) -> bool {
        loop {
            let frame = tokio::time::timeout(SILENCE, self.answer.response.body_mut().frame()).await;
            let Ok(Some(Ok(frame))) = frame else { return false };
            if frame.data_ref().is_some_and(|bytes| self.events.end_in(bytes)) {
                return true;
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
}
