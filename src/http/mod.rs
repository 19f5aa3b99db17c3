//! The web endpoints: metrics, a page, an API and health checks. Reads only; no endpoint changes anything.
//!
//! Everything is answered from the present snapshot, so no request waits for a source. Limits on connections, header
//! size and time keep one slow peer from stopping the others.

mod api;
mod auth;
mod body;
mod connections;
mod events;
mod listen;
pub mod page;
mod readiness;
mod routes;
mod server;
mod stream;
mod tls;
mod web_config;

use std::path::PathBuf;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::sync::{broadcast, watch};

use crate::config::Collectors;
use crate::engine::incident::IncidentChange;
use crate::engine::snapshot::Snapshot;
use crate::telemetry::Telemetry;

pub use listen::{ListenAddress, ListenError};
pub use readiness::{Latch, Readiness};
pub use server::{BindError, Server};
pub use tls::TlsError;
pub use web_config::{WebConfigError, check as check_web_config};

/// Where and how to serve; the flags are those of Prometheus's exporter-toolkit.
#[derive(Debug, Clone, PartialEq, Eq, clap::Args)]
pub struct WebOptions {
    /// Address to listen on: `host:port`, `:port`, `[IPv6]:port`, or `unix:` and the path of a socket. May be repeated.
    #[arg(long = "web.listen-address", value_name = "ADDRESS", default_value = ":10055")]
    pub listen: Vec<ListenAddress>,

    /// Use the sockets that systemd passes (socket activation) instead of --web.listen-address.
    #[arg(long = "web.systemd-socket")]
    pub systemd_socket: bool,

    /// Path under which the metrics are.
    #[arg(long = "web.telemetry-path", value_name = "PATH", default_value = "/metrics", value_parser = telemetry_path)]
    pub telemetry_path: String,

    /// File with TLS and basic authentication settings, in the format of Prometheus's exporter-toolkit.
    #[arg(id = "web_config_file", long = "web.config.file", value_name = "FILE")]
    pub config_file: Option<PathBuf>,
}

fn telemetry_path(path: &str) -> Result<String, String> {
    if !path.starts_with('/') || path.contains(['?', '#', ' ']) {
        return Err("a path starts with `/` and holds no `?`, `#` or blank".into());
    }
    if path.starts_with("/api/") || path.starts_with("/-/") || path.starts_with("/page/") {
        return Err("the paths below /api/, /-/ and /page/ are taken".into());
    }
    Ok(path.to_owned())
}

/// What the endpoints show.
#[derive(Clone)]
pub struct AppState {
    /// The present snapshot.
    pub snapshots: Arc<ArcSwap<Snapshot>>,
    /// Told the generation of each new snapshot, after it is in `snapshots`.
    pub generations: watch::Receiver<u64>,
    /// Where incident changes are sent; each event stream subscribes.
    pub incidents: broadcast::Sender<IncidentChange>,
    /// Counters of our own work.
    pub telemetry: Telemetry,
    /// Which optional series to show; a new value holds from the next scrape on.
    pub collectors: Arc<ArcSwap<Collectors>>,
    /// Whether all that must be there at the start is there.
    pub readiness: Readiness,
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        web: WebOptions,
    }

    #[test]
    fn flags_are_those_of_exporter_toolkit() {
        let flags = Flags::try_parse_from(["x"]).unwrap().web;
        assert_eq!(flags.listen, [":10055".parse().unwrap()]);
        assert_eq!(flags.telemetry_path, "/metrics");
        let given = [
            "x",
            "--web.listen-address=127.0.0.1:1",
            "--web.listen-address=unix:/run/x",
            "--web.telemetry-path=/m",
            "--web.config.file=web.yml",
            "--web.systemd-socket",
        ];
        let flags = Flags::try_parse_from(given).unwrap().web;
        assert_eq!(flags.listen, ["127.0.0.1:1".parse().unwrap(), "unix:/run/x".parse().unwrap()]);
        assert!(flags.systemd_socket && flags.config_file.is_some());
        for wrong in
            ["--web.listen-address=x", "--web.telemetry-path=m", "--web.telemetry-path=/api/v1/status"]
        {
            assert!(Flags::try_parse_from(["x", wrong]).is_err(), "{wrong}");
        }
    }
}
