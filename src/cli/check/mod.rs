//! `mps-exporter check`: what each source sees, what is missing, what fixes it.

mod finding;
mod setup;
mod sources;
mod surroundings;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

use super::serve::runtime;
use super::status::LOOK_LIMIT;
use super::text::{json, print, width};
use crate::serve::look::Look;
use finding::{Finding, Report, State};
use sources::Judge;
use surroundings::Surroundings;

/// Says what the exporter would see here, what is missing, and the command or setting that fixes it.
///
/// Run it as the user and in the place of the exporter. It takes one look and changes nothing. Exit status: 0
/// everything works; 1 something is blind; 2 the exporter cannot do its work (a wrong file, no MPS control daemon).
#[derive(Debug, Clone, Args)]
pub struct Check {
    /// Configuration file of the exporter.
    #[arg(long = "config.file", value_name = "FILE")]
    pub config_file: Option<PathBuf>,

    /// Web configuration of the exporter.
    #[arg(long = "web.config.file", value_name = "FILE")]
    pub web_config_file: Option<PathBuf>,

    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

impl Check {
    /// Prints the findings.
    ///
    /// # Errors
    /// When standard output cannot be written, or the runtime cannot be started.
    pub fn run(&self) -> anyhow::Result<ExitCode> {
        let runtime = runtime()?;
        let report = runtime.block_on(self.report());
        // A source that hangs must not keep the command.
        runtime.shutdown_background();
        if self.json {
            print(&json(&report)?)?;
        } else {
            print(&report.text(width()))?;
        }
        Ok(report.exit_status.into())
    }

    async fn report(&self) -> Report {
        let around = Surroundings::here();
        let (config, found) = setup::configuration(self.config_file.as_deref());
        let mut findings = vec![Finding::fine("surroundings", State::Ok, around.sentence()), found];
        findings.extend(self.web_config_file.as_deref().map(setup::web_config));
        let Some(config) = config else { return Report::new(findings) };
        let catalog = setup::xid_catalog(&config);
        let is_catalog_usable = catalog.as_ref().is_none_or(|finding| finding.state == State::Ok);
        findings.extend(catalog);
        findings.push(setup::state_directory(&config, around));
        findings.extend(setup::alertmanagers(&config).await);
        findings.extend(setup::commands(&config, std::env::var_os("PATH").as_deref()));
        let mut config = config;
        if !is_catalog_usable {
            config.incidents.xid_catalog = None;
        }
        match Look::start(&config) {
            Ok(look) => {
                look.settle(LOOK_LIMIT).await;
                let (snapshot, silent) = (look.snapshot(), look.silent_sources());
                look.stop().await;
                let judge = Judge { config: &config, snapshot: &snapshot, silent: &silent, around };
                findings.extend(judge.findings());
            }
            Err(error) => {
                let sees = format!("no look could be taken: {error:#}");
                findings.push(Finding::bad("sources", State::Broken, sees, "", Vec::new()));
            }
        }
        Report::new(findings)
    }
}
