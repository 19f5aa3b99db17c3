//! `/api/v1/events`: server-sent events for the live page and for scripts.
//!
//! `snapshot` events carry a summary and may skip generations; `incident` events carry each change of an incident.
//! A reader that falls behind gets `lagged` and should read `/api/v1/incidents`: the queue to it is bounded.

use std::time::Duration;

use bytes::Bytes;
use jiff::Timestamp;
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, broadcast, mpsc};
use tokio::time::{Instant, sleep_until};

use crate::engine::incident::IncidentState;
use crate::engine::snapshot::Snapshot;
use crate::http::AppState;
use crate::http::body::Body;
use crate::source::Shutdown;

/// Frames that wait for a reader.
const QUEUE: usize = 16;
/// Summaries come at most this often, however fast the node changes.
const MIN_PAUSE: Duration = Duration::from_millis(200);
/// A comment after this much silence keeps proxies from closing the stream and finds readers that are gone.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

#[derive(Serialize)]
struct Summary<'a> {
    generation: u64,
    at: Timestamp,
    clients: usize,
    open_incidents: usize,
    sources_down: usize,
    fault_domains: Vec<DomainSummary<'a>>,
}

#[derive(Serialize)]
struct DomainSummary<'a> {
    fault_domain: &'a str,
    clients: Option<u32>,
    recovery_blocking: u32,
    is_in_fault: bool,
}

impl Summary<'_> {
    fn of(snapshot: &Snapshot) -> Summary<'_> {
        Summary {
            generation: snapshot.generation,
            at: snapshot.at,
            clients: snapshot.clients.len(),
            open_incidents: snapshot.incidents.iter().filter(|it| it.state != IncidentState::Closed).count(),
            sources_down: snapshot.sources.iter().filter(|source| !source.is_up).count(),
            fault_domains: snapshot
                .domains
                .iter()
                .map(|domain| DomainSummary {
                    fault_domain: &domain.labels.fault_domain,
                    clients: domain.clients,
                    recovery_blocking: domain.recovery_blocking,
                    is_in_fault: domain.fault_started_at.is_some(),
                })
                .collect(),
        }
    }
}

/// Starts a stream. It ends with the reader, or with the program.
pub(super) fn stream(state: &AppState, shutdown: Shutdown, place: OwnedSemaphorePermit) -> Body {
    let (frames, body) = mpsc::channel(QUEUE);
    let incidents = state.incidents.subscribe();
    let state = state.clone();
    tokio::spawn(async move {
        let _place = place;
        let closed = frames.clone();
        tokio::select! {
            _gone = feed(state, incidents, shutdown, frames) => {}
            () = closed.closed() => {}
        }
    });
    Body::stream(body)
}

/// Sends frames until the reader is gone (an error) or the program stops.
async fn feed(
    state: AppState,
    mut incidents: broadcast::Receiver<crate::engine::incident::IncidentChange>,
    mut shutdown: Shutdown,
    frames: mpsc::Sender<Bytes>,
) -> Result<(), mpsc::error::SendError<Bytes>> {
    let mut generations = state.generations.clone();
    frames.send(Bytes::from_static(b"retry: 3000\n\n")).await?;
    generations.mark_changed();
    let mut summary_allowed = Instant::now();
    let mut silent_until = Instant::now() + KEEP_ALIVE;
    loop {
        let frame = tokio::select! {
            () = shutdown.wait() => return Ok(()),
            change = incidents.recv() => match change {
                Ok(change) => frame("incident", &change),
                Err(broadcast::error::RecvError::Lagged(missed)) => frame("lagged", &missed),
                Err(broadcast::error::RecvError::Closed) => return Ok(()),
            },
            () = async { sleep_until(summary_allowed).await; if generations.changed().await.is_err() { std::future::pending().await } } => {
                summary_allowed = Instant::now() + MIN_PAUSE;
                frame("snapshot", &Summary::of(&state.snapshots.load()))
            }
            () = sleep_until(silent_until) => Bytes::from_static(b": still here\n\n"),
        };
        silent_until = Instant::now() + KEEP_ALIVE;
        frames.send(frame).await?;
    }
}

fn frame(event: &str, data: &impl Serialize) -> Bytes {
    // JSON on one line: serde_json escapes line ends, which would end a data field.
    let data = serde_json::to_string(data).unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"));
    format!("event: {event}\ndata: {data}\n\n").into()
}
