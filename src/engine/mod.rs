//! The pure model of who dies with whom: no I/O, no clock, no async runtime.
//!
//! [`Node::apply`] takes one [`Event`](crate::event::Event) after the other; [`Node::take_effects`] says what the model
//! asks of the world and tells it; [`Node::snapshot`] is what outlets read. Whatever order events come in, and however
//! sources contradict each other, the same events give the same state.

mod case;
mod client;
mod control;
mod device;
mod ending;
mod fault;
mod gpu;
pub mod incident;
mod log;
mod loss;
mod node;
mod process;
mod reach;
mod resume;
mod settle;
pub mod snapshot;
mod state;
#[cfg(test)]
mod tests;
mod view;
mod xids;

use std::sync::Arc;
use std::time::Duration;

use crate::identity::DaemonName;
use incident::IncidentChange;

pub use node::Node;

/// What the model is told once.
#[derive(Debug, Clone)]
pub struct Settings {
    /// What happens within this time belongs together.
    pub window: Duration,
    /// Lost clients that make a mass client loss.
    pub min_clients: u32,
    /// Share of the clients before that makes a mass client loss.
    pub min_ratio: f64,
    /// How many closed incidents outlets are shown.
    pub incidents_kept: usize,
    /// How often a healthy daemon is asked for its clients; knowledge three times older is no knowledge.
    pub look_interval: Duration,
    /// What Xid codes mean.
    pub xids: Arc<crate::xid::Catalogue>,
}

/// What the model asks of the world, or tells it.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// The model doubts what it knows of this daemon: ask it for everything, now.
    Look(DaemonName),
    /// The model doubts what it knows of devices: run an NVML cycle now.
    LookAtGpus,
    /// Tell who this pid of the daemon's is, and when it ends.
    Watch(DaemonName, u32),
    /// The pid is of no more interest.
    Unwatch(DaemonName, u32),
    /// An incident changed.
    Incident(IncidentChange),
    /// A daemon that was alive is down, stale or wedged (`true`), or back (`false`).
    DaemonDown(DaemonName, bool),
}
