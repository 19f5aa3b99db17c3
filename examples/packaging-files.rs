//! Writes man pages and shell completions, as the packages hold them: `cargo run --example packaging-files -- FOLDER`.

use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory as _};
use clap_complete::Shell;
use mps_exporter::cli::Cli;

fn main() -> std::io::Result<()> {
    let folder = PathBuf::from(std::env::args_os().nth(1).expect("usage: packaging-files FOLDER"));
    // The command `help` has no page of its own.
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    let man = folder.join("man");
    std::fs::create_dir_all(&man)?;
    write_man_pages(&command, "mps-exporter", &man)?;
    let completions = folder.join("completions");
    std::fs::create_dir_all(&completions)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut Cli::command(), "mps-exporter", &completions)?;
    }
    Ok(())
}

/// A page for the command, and one for each of its own: `mps-exporter-replay.1`.
fn write_man_pages(command: &Command, name: &str, folder: &Path) -> std::io::Result<()> {
    let mut page = Vec::new();
    clap_mangen::Man::new(command.clone())
        .source(concat!("mps-exporter ", env!("CARGO_PKG_VERSION")))
        .manual("mps-exporter")
        .render(&mut page)?;
    std::fs::write(folder.join(format!("{name}.1")), page)?;
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        write_man_pages(below, &format!("{name}-{}", below.get_name()), folder)?;
    }
    Ok(())
}
