//! control.log and server.log, or a `-f` daemon's standard output: what happened, in order.

mod common;
pub mod cri;
pub mod cursor;
pub mod envelope;
pub mod grammar;
pub mod reader;
mod siblings;
pub mod stamp;
pub mod tail;

use std::time::Duration;

/// A line that matters is behind the saved place within this time.
const SAVE_SOON: Duration = Duration::from_millis(100);

/// So is any other line within this time.
const SAVE_LATER: Duration = Duration::from_secs(1);
