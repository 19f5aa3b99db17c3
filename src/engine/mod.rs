//! The pure model of who dies with whom: no I/O, no clock, no async runtime.

pub mod incident;
pub mod snapshot;

use crate::identity::DaemonName;
use incident::IncidentChange;

/// What the model asks of the world, or tells it.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    /// The model doubts what it knows of this daemon: look now.
    Look(DaemonName),
    /// Tell who this pid of the daemon's is, and when it ends.
    Watch(DaemonName, u32),
    /// The pid is of no more interest.
    Unwatch(DaemonName, u32),
    /// An incident changed.
    Incident(IncidentChange),
    /// A daemon that was alive is down, stale or wedged (`true`), or back (`false`).
    DaemonDown(DaemonName, bool),
}
