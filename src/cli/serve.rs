//! `mps-exporter serve`: the exporter itself.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;

use crate::http::WebOptions;
use crate::serve::Configuration;
use crate::source::Shutdown;
use crate::telemetry::Telemetry;

/// Watches this node and serves metrics, page and API.
#[derive(Debug, Clone, Args)]
pub struct Serve {
    /// Configuration file (YAML). Without one every setting has its default.
    #[arg(long = "config.file", value_name = "FILE")]
    pub config_file: Option<PathBuf>,

    /// Export series per client process, with its pid. The same as `collectors.clients: true`.
    #[arg(long = "collector.clients")]
    pub collect_clients: bool,

    /// Where and how to serve.
    #[command(flatten)]
    pub web: WebOptions,
}

impl Serve {
    /// Serves until a signal tells it to stop.
    ///
    /// # Errors
    /// When it cannot start; the message says what to change.
    pub fn run(&self) -> anyhow::Result<()> {
        let telemetry = Telemetry::new();
        let configuration = Configuration::open(self.config_file.as_deref(), &telemetry)?;
        let (_never_stopped_from_here, shutdown) = Shutdown::new();
        runtime()?.block_on(crate::serve::run(self, configuration, telemetry, shutdown))
    }
}

/// The runtime of everything but what blocks: one thread.
///
/// # Errors
/// When the operating system refuses what it needs.
pub fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the async runtime")
}
