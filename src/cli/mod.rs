//! The commands: one file each.

pub mod check;
pub mod completions;
pub mod demo;
pub mod explain;
pub mod healthcheck;
pub mod replay;
mod report;
mod runbook;
pub mod serve;
pub mod status;
pub mod text;

use clap::{Parser, Subcommand};

use crate::logging::{LogLevel, LogOptions};

/// Prometheus exporter and alerting sidecar for NVIDIA MPS: who dies with whom, what was lost, who did it, what blocks
/// recovery.
///
/// Without a command it serves, like `mps-exporter serve`.
#[derive(Debug, Parser)]
#[command(name = "mps-exporter", version, args_conflicts_with_subcommands = true, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// The flags of `serve`, when no command is given.
    #[command(flatten)]
    pub serve: serve::Serve,

    /// How to log.
    #[command(flatten)]
    pub log: LogOptions,
}

impl Cli {
    /// Whether to log. `status` and `check` say themselves what the log would; at level debug it shows how they know.
    pub fn wants_log(&self) -> bool {
        !matches!(self.command, Some(Command::Status(_) | Command::Check(_)))
            || self.log.level == LogLevel::Debug
    }
}

/// A command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Watches this node and serves metrics, page and API.
    Serve(serve::Serve),
    /// Serves a simulated node with a scripted incident a minute: no GPU, nothing to install.
    Demo(demo::Demo),
    /// Shows who dies with whom, now: the tree of daemons, servers, devices, workloads and clients.
    Status(status::Status),
    /// Says what the exporter would see here, what is missing, and what fixes it.
    Check(check::Check),
    /// Reports the incidents in recorded logs: control.log, server.log, kernel logs; plain, rotated or .gz.
    Replay(replay::Replay),
    /// Explains Xid codes (what each means for MPS clients, who dies, what to do) and alerts (the runbook).
    Explain(explain::Explain),
    /// Prints the completions for a shell: bash, zsh, fish and others.
    Completions(completions::Completions),
    /// Asks a running exporter whether it lives: exit status 0 when it does. For images without a shell.
    #[command(hide = true)]
    Healthcheck(healthcheck::Healthcheck),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn every_command_can_be_given() {
        Cli::command().debug_assert();
        for command in Cli::command().get_subcommands() {
            let argument = match command.get_name() {
                "replay" => Some("server.log"),
                "explain" => Some("31"),
                "completions" => Some("bash"),
                _ => None,
            };
            let line = ["mps-exporter", command.get_name()].into_iter().chain(argument);
            let line = line.chain(["--log.level", "warn"]);
            Cli::try_parse_from(line).unwrap_or_else(|error| panic!("{}: {error}", command.get_name()));
        }
        assert!(Cli::try_parse_from(["mps-exporter"]).unwrap().command.is_none());
    }
}
