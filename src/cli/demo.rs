//! `mps-exporter demo`: the exporter on a simulated node.

use std::io::Write as _;
use std::time::Duration;

use clap::Args;

use crate::cli::serve::{Serve, runtime};
use crate::demo::{Options, Simulation};
use crate::http::{ListenAddress, WebOptions};
use crate::serve::Configuration;
use crate::source::Shutdown;
use crate::telemetry::Telemetry;

/// Serves a simulated node: no GPU, nothing to install, nothing left behind.
///
/// Two GPUs are shared through MPS by six clients of three jobs, one of which works on both; a third GPU is
/// time-sliced. Now and then a client's fault takes all of them with it, and they come back.
#[derive(Debug, Clone, Args)]
pub struct Demo {
    /// Address to listen on: `host:port`, `:port`, `[IPv6]:port`, or `unix:` and the path of a socket. May be repeated.
    #[arg(long = "web.listen-address", value_name = "ADDRESS", default_value = "127.0.0.1:10055")]
    pub listen: Vec<ListenAddress>,

    /// Seconds from the start to the first incident.
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    pub first_incident: u32,

    /// Seconds from one incident to the next; at least 20.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(20..))]
    pub incident_interval: u32,
}

impl Demo {
    /// Serves until a signal tells it to stop.
    ///
    /// # Errors
    /// When it cannot start; the message says why.
    pub fn run(&self) -> anyhow::Result<()> {
        let simulation = Simulation::start(&Options {
            first: Duration::from_secs(self.first_incident.into()),
            period: Duration::from_secs(self.incident_interval.into()),
            ..Options::default()
        })?;
        let mut output = std::io::stdout();
        let addresses: Vec<String> = self.listen.iter().map(ToString::to_string).collect();
        // A closed standard output is no reason to stop.
        let _unheard = writeln!(
            output,
            "A simulated node runs in {}. The first incident is in {} s.\nLook at http://{}/ or /metrics; Ctrl-C ends it.",
            simulation.directory().display(),
            self.first_incident,
            addresses.join(", http://"),
        );
        let serve = Serve {
            config_file: None,
            collect_clients: true,
            web: WebOptions {
                listen: self.listen.clone(),
                systemd_socket: false,
                telemetry_path: "/metrics".to_owned(),
                config_file: None,
            },
        };
        let configuration = Configuration::fixed(simulation.config());
        let (_never_stopped_from_here, shutdown) = Shutdown::new();
        runtime()?.block_on(crate::serve::run(&serve, configuration, Telemetry::new(), shutdown))
    }
}
