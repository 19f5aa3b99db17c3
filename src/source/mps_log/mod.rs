//! control.log and server.log, or a `-f` daemon's standard output: what happened, in order.

mod common;
pub mod cri;
pub mod cursor;
pub mod envelope;
mod files;
pub mod grammar;
mod health;
mod held;
mod journal;
pub mod reader;
mod save;
mod siblings;
mod source;
pub mod stamp;
pub mod stream;
pub mod tail;
mod watch;

pub use source::{LogSettings, MpsLogSource};
pub use watch::LogWatcher;

use std::time::Duration;

/// A line that matters is behind the saved place within this time.
const SAVE_SOON: Duration = Duration::from_millis(100);

/// So is any other line within this time.
const SAVE_LATER: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
