//! `mps-exporter completions`: completions for a shell, from the definitions of the commands themselves.

use clap::{Args, CommandFactory as _};
use clap_complete::Shell;

use super::{Cli, text::print};

/// Prints the completions for a shell. The packages install them.
///
/// For this session of bash: source <(mps-exporter completions bash)
#[derive(Debug, Args)]
pub struct Completions {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

impl Completions {
    /// Prints them to standard output.
    ///
    /// # Errors
    /// When nothing can be written there.
    pub fn run(&self) -> anyhow::Result<()> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "mps-exporter", &mut script);
        print(&String::from_utf8(script)?)
    }
}
