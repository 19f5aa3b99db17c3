//! Incidents for the tests of this folder.

use std::sync::Arc;

use crate::engine::incident::Incident;

/// A mass client loss by a fault, open since `2026-04-01T12:00:00.25Z`, three victims, one of which blocks.
pub fn incident() -> Incident {
    serde_json::from_str(include_str!("../../tests/support/incident.json")).unwrap()
}

/// The same with another id.
pub fn incident_with_id(id: &str) -> Incident {
    Incident { id: id.into(), ..incident() }
}

/// A changed copy.
pub fn changed(incident: &Arc<Incident>, change: impl FnOnce(&mut Incident)) -> Arc<Incident> {
    let mut copy = Incident::clone(incident);
    change(&mut copy);
    Arc::new(copy)
}
