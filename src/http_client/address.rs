//! Where a server listens.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use hyper::Uri;

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// `http://host:port` or `https://host:port`, perhaps with a path that a proxy puts in front.
    Http {
        /// Whether it is https.
        is_tls: bool,
        /// Name or address, an IPv6 one without brackets.
        host: String,
        /// Port: that of the scheme where the URL has none.
        port: u16,
        /// What comes before every path, without a slash at its end.
        prefix: String,
    },
    /// `unix:/path`.
    Unix(PathBuf),
}

/// Why a URL cannot be used. Never shows a password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// It cannot be parsed, has no host or another scheme.
    #[error("`{0}` is not a URL like http://host:port or https://host:port")]
    Malformed(String),
    /// `unix:` with something else than an absolute path.
    #[error("a Unix socket needs an absolute path, like unix:/run/mps-exporter.sock")]
    Relative,
    /// User and password within the URL.
    #[error("the URL holds a user or password: give them apart from it")]
    UserInfo,
    /// https without the feature.
    #[error("`{0}`: this mps-exporter was built without TLS")]
    NoTls(String),
}

impl Address {
    /// Whether connections are secured.
    pub fn is_tls(&self) -> bool {
        matches!(self, Address::Http { is_tls: true, .. })
    }

    /// The value of `Host`. Only a port that is not the scheme's is part of it: proxies that choose by the name may
    /// take it literally.
    pub(super) fn authority(&self) -> String {
        match self {
            Address::Http { is_tls, host, port, .. } if *port == usual_port(*is_tls) => bracketed(host),
            Address::Http { host, port, .. } => format!("{}:{port}", bracketed(host)),
            Address::Unix(_) => "localhost".to_owned(),
        }
    }

    /// What comes before every path.
    pub(super) fn prefix(&self) -> &str {
        match self {
            Address::Http { prefix, .. } => prefix,
            Address::Unix(_) => "",
        }
    }
}

impl FromStr for Address {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Address, UrlError> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return if path.starts_with('/') {
                Ok(Address::Unix(path.into()))
            } else {
                Err(UrlError::Relative)
            };
        }
        // Before anything else, because all other errors show the URL.
        if text.contains('@') {
            return Err(UrlError::UserInfo);
        }
        let malformed = || UrlError::Malformed(text.to_owned());
        let uri: Uri = text.parse().map_err(|_| malformed())?;
        let is_tls = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(malformed()),
        };
        let host =
            uri.host().filter(|host| !host.is_empty() && uri.query().is_none()).ok_or_else(malformed)?;
        if is_tls && cfg!(not(feature = "tls")) {
            return Err(UrlError::NoTls(text.to_owned()));
        }
        // `Uri` takes a port that is none for no port at all.
        let authority = uri.authority().map_or("", |authority| authority.as_str());
        let port = match uri.port_u16() {
            Some(port) => port,
            None if authority == host => usual_port(is_tls),
            None => return Err(malformed()),
        };
        Ok(Address::Http {
            is_tls,
            host: host.trim_start_matches('[').trim_end_matches(']').to_owned(),
            port,
            prefix: uri.path().trim_end_matches('/').to_owned(),
        })
    }
}

/// With the port, always: a forgotten one is a frequent mistake.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Http { is_tls, host, port, prefix } => {
                let scheme = if *is_tls { "https" } else { "http" };
                write!(f, "{scheme}://{}:{port}{prefix}", bracketed(host))
            }
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

fn usual_port(is_tls: bool) -> u16 {
    if is_tls { 443 } else { 80 }
}

fn bracketed(host: &str) -> String {
    if host.contains(':') { format!("[{host}]") } else { host.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_taken_apart_and_written() {
        // URL, as it is shown, `Host`, prefix
        for (text, shown, authority, prefix) in [
            ("http://127.0.0.1:10055", "http://127.0.0.1:10055", "127.0.0.1:10055", ""),
            ("http://[::1]:9093", "http://[::1]:9093", "[::1]:9093", ""),
            ("http://am.example/prefix/", "http://am.example:80/prefix", "am.example", "/prefix"),
            ("unix:/run/e.sock", "unix:/run/e.sock", "localhost", ""),
            ("unix:///run/e.sock", "unix:/run/e.sock", "localhost", ""),
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!(
                (&*address.to_string(), &*address.authority(), address.prefix()),
                (shown, authority, prefix)
            );
        }
        let Ok(Address::Http { host, .. }) = "http://[::1]".parse() else { panic!("an IPv6 address") };
        assert_eq!(host, "::1");
        let secured = "https://gpu-1".parse::<Address>();
        if cfg!(feature = "tls") {
            assert_eq!(secured.unwrap().to_string(), "https://gpu-1:443");
        } else {
            assert_eq!(secured.unwrap_err(), UrlError::NoTls("https://gpu-1".into()));
        }
    }

    #[test]
    fn a_url_that_cannot_work_is_refused_without_showing_a_password() {
        for text in
            ["gpu-1:10055", "ftp://x", "http://", "http://h:1/?x", "http://h:65536", "http://[::1]:", ""]
        {
            assert_eq!(text.parse::<Address>(), Err(UrlError::Malformed(text.into())));
        }
        assert_eq!("unix:run".parse::<Address>(), Err(UrlError::Relative));
        for text in ["http://user:secret@am:9093", "ftp://user:secret@am", "https://u:secret@"] {
            assert_eq!(text.parse::<Address>(), Err(UrlError::UserInfo));
        }
    }
}
