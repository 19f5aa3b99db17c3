//! `mps-exporter status`: who dies with whom, now, in a terminal.

mod ask;
mod picture;
mod screen;
#[cfg(test)]
mod tests;
mod tree;
mod watch;
mod words;

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use clap::Args;

use super::serve::runtime;
use super::text::{columns, print};
use crate::config::Config;
use crate::http_client::{Address, Client, Error};
use crate::serve::look::Look;
use ask::{Access, AskError, ask, usual_address};
use picture::Picture;
use screen::{Line, Style};

/// How long an own look may take.
pub const LOOK_LIMIT: Duration = Duration::from_secs(3);

/// Prose gets hard to read beyond this.
const PROSE: usize = 100;

/// Shows who dies with whom, now: daemons, servers, coupled devices, workloads, clients; incidents; blind sources.
///
/// Asks the exporter that runs on this node. Where none runs it takes one look itself: that shows the present, but not
/// what was lost before.
#[derive(Debug, Clone, Args)]
pub struct Status {
    /// The exporter to ask: http://host:port, https://host:port, or unix: and the path of a socket.
    #[arg(long, value_name = "URL")]
    pub url: Option<Address>,

    /// How to get at it.
    #[command(flatten)]
    pub access: Access,

    /// Ask nobody: take a look with this configuration file.
    #[arg(long = "config.file", value_name = "FILE", conflicts_with_all = ["url", "Access"])]
    pub config_file: Option<PathBuf>,

    /// Stay, and show every change as it happens. Ctrl-C ends it.
    #[arg(long, conflicts_with = "json")]
    pub watch: bool,

    /// Print the whole snapshot as JSON, as /api/v1/status does.
    #[arg(long)]
    pub json: bool,

    /// Show every client, however many there are.
    #[arg(long)]
    pub all: bool,
}

/// Who looks at the node.
enum Eye {
    /// A running exporter.
    Exporter(Box<Client>),
    /// This process.
    Own(Box<Look>),
}

impl Status {
    /// Prints the picture.
    ///
    /// # Errors
    /// When the exporter that was named does not answer, or the configuration file is wrong.
    pub fn run(&self) -> anyhow::Result<()> {
        let runtime = runtime()?;
        let outcome = runtime.block_on(self.show());
        // A source that hangs must not keep the command.
        runtime.shutdown_background();
        outcome
    }

    async fn show(&self) -> anyhow::Result<()> {
        let (eye, note) = self.open().await?;
        let outcome = if self.watch {
            watch::watch(&eye, note.as_deref(), self.all).await
        } else {
            self.show_once(&eye, note.as_deref()).await
        };
        if let Eye::Own(look) = eye {
            look.stop().await;
        }
        outcome
    }

    async fn show_once(&self, eye: &Eye, note: Option<&str>) -> anyhow::Result<()> {
        let json = eye.look().await?;
        if self.json {
            let value: serde_json::Value = serde_json::from_slice(&json).context("the answer is not JSON")?;
            return print(&super::text::json(&value)?);
        }
        let width = columns().unwrap_or(usize::MAX);
        print(&screen::text(&lines(&json, note, width, self.all)?, width, has_color()))
    }

    /// Who is asked, and what a person should know about that.
    async fn open(&self) -> anyhow::Result<(Eye, Option<String>)> {
        let mut note = "This is one look: it does not know what was lost before.".to_owned();
        if self.config_file.is_none() {
            let address = self.url.clone().unwrap_or_else(usual_address);
            let exporter = Box::new(self.access.client(address)?);
            if self.url.is_some() {
                return Ok((Eye::Exporter(exporter), None));
            }
            match ask(&exporter).await {
                Ok(_) => return Ok((Eye::Exporter(exporter), None)),
                // Who gives a password wants an exporter's answer.
                Err(error) if self.access.user.is_some() => return Err(error.into()),
                Err(AskError::NoAnswer { error: Error::Connect(_), .. }) => {
                    note = format!("No exporter runs at {}. {note}", exporter.address);
                }
                Err(error) => note = format!("{error}. {note}"),
            }
        }
        let config = self.config_file.as_deref().map(Config::load).transpose()?.unwrap_or_default();
        let look = Look::start(&config)?;
        look.settle(LOOK_LIMIT).await;
        Ok((Eye::Own(Box::new(look)), Some(note)))
    }
}

impl Eye {
    /// The snapshot as JSON.
    async fn look(&self) -> anyhow::Result<Bytes> {
        match self {
            Eye::Exporter(exporter) => Ok(ask(exporter).await?),
            Eye::Own(look) => {
                let snapshot: Arc<_> = look.snapshot();
                Ok(serde_json::to_vec(&*snapshot).context("the snapshot cannot be written as JSON")?.into())
            }
        }
    }
}

/// The picture and the note below it.
fn lines(json: &[u8], note: Option<&str>, width: usize, is_whole: bool) -> anyhow::Result<Vec<Line>> {
    let picture = Picture::from_json(json)
        .context("the exporter's answer is not understood; is it of another version?")?;
    let mut lines = tree::lines(&picture, width.min(PROSE), is_whole);
    lines.extend(note.map(|note| Line::new(Style::Faint, note)));
    Ok(lines)
}

/// Whether standard output shows colours, and its reader wants them (<https://no-color.org>).
fn has_color() -> bool {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    std::io::stdout().is_terminal() && !is_set("NO_COLOR") && !is_dumb
}
