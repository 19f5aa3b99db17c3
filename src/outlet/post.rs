//! One post of alerts to one Alertmanager, and what its answer means.

use std::time::Duration;

use bytes::Bytes;
use hyper::StatusCode;

use crate::config::Alertmanager;
use crate::http_client::{Auth, Client, Error, UrlError};

/// Where Alertmanager takes alerts.
const PATH: &str = "/api/v2/alerts";
/// How much of an answer is read.
const MAX_ANSWER: usize = 16 << 10;
/// How much of an answer is quoted in an error.
const MAX_QUOTE: usize = 300;

/// Why a post failed.
#[derive(Debug, thiserror::Error)]
pub enum PostError {
    /// There is no answer.
    #[error(transparent)]
    NoAnswer(#[from] Error),
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
            PostError::NoAnswer(Error::Timeout(_)) => "timeout",
            PostError::NoAnswer(Error::Connect(_) | Error::Tls(_)) => "unreachable",
            PostError::NoAnswer(Error::Secret(..)) | PostError::Unauthorized(_) => "unauthorized",
            PostError::Refused(..) => "refused",
            PostError::NoAnswer(Error::Http(_)) | PostError::Status(..) => "error",
        }
    }
}

/// A client of this Alertmanager, with this deadline.
pub fn client(config: &Alertmanager, deadline: Duration) -> Result<Client, UrlError> {
    let auth = match (&config.basic_auth, &config.bearer_token_file) {
        (Some(basic), _) => Auth::Basic(basic.clone()),
        (None, Some(file)) => Auth::Bearer(file.clone()),
        (None, None) => Auth::None,
    };
    Ok(Client::new(config.url.parse()?, auth, &config.tls, deadline))
}

/// Posts alerts as JSON. Success is any 2xx.
pub async fn post(client: &Client, alerts: Bytes) -> Result<(), PostError> {
    let exchange = async {
        let answer = client.post(PATH, alerts).await?;
        let status = answer.response.status();
        if status.is_success() {
            return Ok((status, String::new()));
        }
        Ok((status, answer.body(MAX_ANSWER).await.map(|body| quote(&body)).unwrap_or_default()))
    };
    let (status, quote) = client.within_deadline(exchange).await?;
    let passes = [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS, StatusCode::NOT_FOUND];
    match status {
        _ if status.is_success() => Ok(()),
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(PostError::Unauthorized(status.as_u16())),
        _ if status.is_client_error() && !passes.contains(&status) => {
            Err(PostError::Refused(status.as_u16(), quote))
        }
        _ => Err(PostError::Status(status.as_u16(), quote)),
    }
}

fn quote(answer: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(answer).chars().take(MAX_QUOTE).collect();
    text.trim().replace(char::is_control, " ")
}
