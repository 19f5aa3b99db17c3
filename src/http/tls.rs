//! `tls_server_config` of the web configuration.

use std::path::{Path, PathBuf};

use serde::Deserialize;

/// Why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The program was built without TLS.
    #[error("this build has no TLS; build it with the Cargo feature `tls`")]
    NotBuilt,
    /// A setting is missing.
    #[error("`{0}` is missing")]
    Missing(&'static str),
    /// A setting has a value that cannot be used.
    #[error("`{setting}`: `{value}` {problem}")]
    Value {
        /// The setting.
        setting: &'static str,
        /// Its value.
        value: String,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// Two settings contradict each other.
    #[error("{0}")]
    Contradiction(&'static str),
    /// A file cannot be read.
    #[error("`{setting}`: {path} cannot be read: {problem}")]
    File {
        /// The setting.
        setting: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Certificate and key cannot be used together.
    #[error("the certificate and its key cannot be used: {0}")]
    Certificate(String),
}

/// `tls_server_config`, as it is in the file.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct TlsSettings {
    cert_file: Option<PathBuf>,
    key_file: Option<PathBuf>,
    client_ca_file: Option<PathBuf>,
    client_auth_type: Option<String>,
    client_allowed_sans: Option<Vec<String>>,
    min_version: Option<String>,
    max_version: Option<String>,
    cipher_suites: Option<Vec<String>>,
    curve_preferences: Option<Vec<String>>,
    /// Taken and without effect, as in Go since 1.17.
    #[serde(rename = "prefer_server_cipher_suites")]
    _prefer_server_cipher_suites: Option<bool>,
}

impl TlsSettings {
    /// Makes file names relative to the folder of the web configuration, as exporter-toolkit does.
    pub(super) fn resolve_against(&mut self, folder: &Path) {
        for file in [&mut self.cert_file, &mut self.key_file, &mut self.client_ca_file].into_iter().flatten()
        {
            *file = folder.join(&*file);
        }
    }

    /// The files that it names.
    pub(super) fn files(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.cert_file, &self.key_file, &self.client_ca_file].into_iter().flatten()
    }
}

#[cfg(not(feature = "tls"))]
pub(super) use absent::Acceptor;
#[cfg(feature = "tls")]
pub(super) use rustls_acceptor::Acceptor;

#[cfg(not(feature = "tls"))]
mod absent {
    use std::future::Ready;
    use std::io;

    use super::{TlsError, TlsSettings};
    use crate::http::stream::Stream;

    /// There is none in this build.
    pub(in crate::http) enum Acceptor {}

    impl Acceptor {
        pub(in crate::http) fn new(_: &TlsSettings) -> Result<Acceptor, TlsError> {
            Err(TlsError::NotBuilt)
        }

        pub(in crate::http) fn accept(&self, _: Stream) -> Ready<io::Result<Stream>> {
            match *self {}
        }
    }
}

#[cfg(feature = "tls")]
mod rustls_acceptor;
