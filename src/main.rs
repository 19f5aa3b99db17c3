//! The `mps-exporter` command.

use std::process::ExitCode;

use clap::Parser as _;
use mps_exporter::cli::{Cli, Command, text};
use mps_exporter::{logging, sys};

fn main() -> ExitCode {
    if let Some(code) = mps_exporter::demo::hidden(std::env::args_os()) {
        return code;
    }
    // Before any thread: NVML would show another set of devices with this variable set.
    sys::env::unset_mps_device_view();
    sys::heap::share();
    let cli = Cli::parse();
    if cli.wants_log() {
        logging::start(cli.log);
    }
    let outcome = match cli.command {
        None => cli.serve.run(),
        Some(Command::Serve(serve)) => serve.run(),
        Some(Command::Demo(demo)) => demo.run(),
        Some(Command::Status(status)) => status.run(),
        Some(Command::Check(check)) => return exit(check.run()),
        Some(Command::Replay(replay)) => replay.run(),
        Some(Command::Explain(explain)) => explain.run(),
        Some(Command::Completions(completions)) => completions.run(),
        Some(Command::Healthcheck(healthcheck)) => healthcheck.run(),
    };
    exit(outcome.map(|()| ExitCode::SUCCESS))
}

fn exit(outcome: anyhow::Result<ExitCode>) -> ExitCode {
    outcome.unwrap_or_else(|error| {
        // Names of files and what a daemon said are other people's.
        eprintln!("mps-exporter: {}", text::harmless_lines(&format!("{error:#}")));
        ExitCode::FAILURE
    })
}
