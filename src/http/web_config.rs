//! The file of `--web.config.file`, in the format of Prometheus's exporter-toolkit, read again when it changes.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use hyper::header::{HeaderName, HeaderValue};
use serde::Deserialize;
use tracing::{error, info};

use crate::file;
use crate::http::auth::Users;
use crate::http::tls::{Acceptor, TlsError, TlsSettings};
use crate::telemetry::Telemetry;

/// How often the files are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// bcrypt at this cost takes five seconds of a core; a higher one would only keep scrapers out.
const MAX_BCRYPT_COST: u32 = 16;
/// The file is not larger.
const MAX_BYTES: u64 = 1 << 20;
/// The headers that exporter-toolkit lets a file set.
const SETTABLE_HEADERS: [&str; 5] = [
    "content-security-policy",
    "strict-transport-security",
    "x-content-type-options",
    "x-frame-options",
    "x-xss-protection",
];

/// Why a web configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum WebConfigError {
    /// The file cannot be read.
    #[error("web configuration {path}: cannot be read")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file is not in the format.
    #[error("web configuration {path}")]
    Format {
        /// The file.
        path: PathBuf,
        /// What and where.
        #[source]
        source: serde_yaml::Error,
    },
    /// A header may not be set.
    #[error(
        "web configuration {path}: http_server_config.headers: `{name}` cannot be set; allowed are {}",
        SETTABLE_HEADERS.join(", ")
    )]
    Header {
        /// The file.
        path: PathBuf,
        /// The header.
        name: String,
    },
    /// A header's value is no header value.
    #[error(
        "web configuration {path}: http_server_config.headers: the value of `{name}` holds characters that a header cannot"
    )]
    HeaderValue {
        /// The file.
        path: PathBuf,
        /// The header.
        name: String,
    },
    /// A user's hash is not usable.
    #[error(
        "web configuration {path}: basic_auth_users: the hash of `{user}` {problem}; make one with `htpasswd -nBC 10 {user}`"
    )]
    User {
        /// The file.
        path: PathBuf,
        /// The user.
        user: String,
        /// What is wrong.
        problem: &'static str,
    },
    /// TLS cannot be set up.
    #[error("web configuration {path}: tls_server_config")]
    Tls {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: TlsError,
    },
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct RawFile {
    tls_server_config: Option<TlsSettings>,
    http_server_config: Option<RawHttp>,
    basic_auth_users: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
struct RawHttp {
    /// Taken and without effect: HTTP/1.1 is served, which every scraper speaks.
    #[serde(rename = "http2")]
    _http2: Option<bool>,
    headers: Option<BTreeMap<String, String>>,
}

/// What the file says.
#[derive(Default)]
pub(super) struct WebConfig {
    pub(super) tls: Option<Acceptor>,
    pub(super) headers: Vec<(HeaderName, HeaderValue)>,
    pub(super) users: Users,
    /// The files that it was read from.
    files: Vec<PathBuf>,
}

impl WebConfig {
    fn read(path: &Path) -> Result<WebConfig, WebConfigError> {
        let text = file::read_text(path, MAX_BYTES)
            .map_err(|source| WebConfigError::Read { path: path.to_owned(), source })?;
        let raw: Option<RawFile> = if text.trim().is_empty() {
            None
        } else {
            serde_yaml::from_str(&text)
                .map_err(|source| WebConfigError::Format { path: path.to_owned(), source })?
        };
        let raw = raw.unwrap_or_default();
        let mut config = WebConfig { files: vec![path.to_owned()], ..WebConfig::default() };
        if let Some(mut settings) = raw.tls_server_config {
            settings.resolve_against(path.parent().unwrap_or(Path::new("")));
            config.files.extend(settings.files().cloned());
            let acceptor = Acceptor::new(&settings)
                .map_err(|source| WebConfigError::Tls { path: path.to_owned(), source })?;
            config.tls = Some(acceptor);
        }
        for (name, value) in raw.http_server_config.and_then(|http| http.headers).unwrap_or_default() {
            let header = HeaderName::from_str(&name)
                .ok()
                .filter(|header| SETTABLE_HEADERS.contains(&header.as_str()))
                .ok_or_else(|| WebConfigError::Header { path: path.to_owned(), name: name.clone() })?;
            let value = HeaderValue::from_str(&value)
                .map_err(|_| WebConfigError::HeaderValue { path: path.to_owned(), name })?;
            config.headers.push((header, value));
        }
        for (user, hash) in raw.basic_auth_users.unwrap_or_default() {
            let problem = match bcrypt::HashParts::from_str(&hash) {
                Err(_) => Some("is not a bcrypt hash"),
                Ok(parts) if parts.get_cost() > MAX_BCRYPT_COST => {
                    Some("has a cost above 16, which would take minutes of a core per check")
                }
                Ok(_) => None,
            };
            if let Some(problem) = problem {
                return Err(WebConfigError::User { path: path.to_owned(), user, problem });
            }
            config.users.insert(user, hash);
        }
        Ok(config)
    }
}

/// Whether the file can be used, with the certificates that it names.
///
/// # Errors
/// What is wrong with it.
pub fn check(path: &Path) -> Result<(), WebConfigError> {
    WebConfig::read(path).map(|_usable| ())
}

/// The configuration in force. A changed file that is wrong leaves the old one in force and is counted.
pub(super) struct WatchedConfig {
    path: Option<PathBuf>,
    current: ArcSwap<WebConfig>,
    looked: Mutex<Looked>,
    telemetry: Telemetry,
}

struct Looked {
    at: Instant,
    stamps: Vec<Option<Stamp>>,
}

/// Tells one content of a file from another.
#[derive(PartialEq)]
struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

impl WatchedConfig {
    /// Reads the file; without a path there is no TLS and no authentication.
    pub(super) fn open(path: Option<PathBuf>, telemetry: Telemetry) -> Result<WatchedConfig, WebConfigError> {
        let config = path.as_deref().map(WebConfig::read).transpose()?.unwrap_or_default();
        let looked = Mutex::new(Looked { at: Instant::now(), stamps: stamps(&config.files) });
        Ok(WatchedConfig { path, current: ArcSwap::from_pointee(config), looked, telemetry })
    }

    /// The configuration for the next connection or request.
    pub(super) fn current(&self) -> Arc<WebConfig> {
        self.look(LOOK_EVERY);
        self.current.load_full()
    }

    /// Reads the file again, whether it seems changed or not.
    pub(super) fn reload(&self) {
        if let Some(path) = &self.path {
            let mut looked = self.lock();
            self.read_again(path, &mut looked);
        }
    }

    fn look(&self, pause: Duration) {
        let Some(path) = &self.path else {
            return;
        };
        let mut looked = self.lock();
        if looked.at.elapsed() < pause {
            return;
        }
        looked.at = Instant::now();
        if stamps(&self.current.load().files) != looked.stamps {
            self.read_again(path, &mut looked);
        }
    }

    fn read_again(&self, path: &Path, looked: &mut Looked) {
        // Stamps are taken before the read: a change during it is noticed at the next look.
        let before = stamps(&self.current.load().files);
        match WebConfig::read(path) {
            Ok(config) => {
                looked.stamps =
                    if config.files == self.current.load().files { before } else { stamps(&config.files) };
                self.current.store(Arc::new(config));
                self.telemetry.web_config_reload(true);
                info!(path = %path.display(), "The web configuration was read again.");
            }
            Err(error) => {
                looked.stamps = before;
                self.telemetry.web_config_reload(false);
                let reason = with_sources(&error);
                error!(%reason, "The web configuration was changed but is not usable; the old one stays in force.");
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Looked> {
        self.looked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An error and what is behind it, on one line.
fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text = format!("{text}: {source}");
        next = source.source();
    }
    text
}

fn stamps(files: &[PathBuf]) -> Vec<Option<Stamp>> {
    let stamp = |path: &PathBuf| {
        let metadata = fs::metadata(path).ok()?;
        Some(Stamp {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        })
    };
    files.iter().map(stamp).collect()
}

#[cfg(test)]
mod tests;
