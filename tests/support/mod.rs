//! What several tests use.
#![allow(dead_code, reason = "no test uses all of it")]
#![allow(missing_docs, clippy::unwrap_used)]

pub mod nodes;
pub mod open_metrics;
pub mod server;
