//! `mps-exporter`: who dies with whom under NVIDIA's Multi-Process Service.
//!
//! Sources turn the world into [`event::Event`]s, one owner applies them to the pure model in [`engine`], outlets read
//! immutable snapshots and receive incidents. ARCHITECTURE.md shows the flow and where to change what.

pub mod cli;
pub mod config;
pub mod demo;
pub mod engine;
pub mod event;
pub mod file;
pub mod glob;
pub mod http;
pub mod http_client;
pub mod identity;
pub mod logging;
pub mod metrics;
pub mod outlet;
pub mod replay;
pub mod serve;
pub mod source;
pub mod supervise;
pub mod sys;
pub mod telemetry;
pub mod time;
pub mod xid;

// Lets the builders of `tests/support` serve the unit tests too.
#[cfg(test)]
extern crate self as mps_exporter;
#[cfg(test)]
#[path = "../tests/support/nodes.rs"]
mod test_nodes;
