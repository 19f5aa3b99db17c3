//! The one owner of the model: applies events, publishes snapshots, carries out what the model asks.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::{broadcast, mpsc, watch};
use tokio::time::Instant;

use super::sources::Handles;
use crate::engine::incident::{Change, IncidentChange};
use crate::engine::snapshot::Snapshot;
use crate::engine::{Effect, Node, Settings};
use crate::event::{Event, EventKind};
use crate::metrics::labels::LabelValue as _;
use crate::outlet::Outlets;
use crate::source::{Shutdown, live};
use crate::time::{Clock, Mono};

/// A picture is taken this often even if nothing happens: work at risk grows with time.
const PICTURE_EVERY: Duration = Duration::from_secs(5);

/// A picture that costs less than this is taken after every change.
const CHEAP_PICTURE: Duration = Duration::from_millis(1);
/// Of one that costs more, how many times the excess passes before the next: what thousands of clients do at once must not
/// cost a picture each.
const PAUSE_FACTOR: u32 = 4;

/// Batches applied before others on the runtime get their turn and a picture is published.
const BATCHES_PER_TURN: usize = 32;

/// What the owner publishes to.
#[derive(Clone)]
pub struct Outputs {
    /// The present snapshot.
    pub snapshots: Arc<ArcSwap<Snapshot>>,
    /// Its generation, sent after it.
    pub generations: watch::Sender<u64>,
    /// Incident changes, for event streams.
    pub incidents: broadcast::Sender<IncidentChange>,
}

/// The owner of the model.
pub struct Owner {
    node: Node,
    clock: Clock,
    queue: mpsc::Receiver<Vec<Event>>,
    outputs: Outputs,
    outlets: watch::Receiver<Arc<Outlets>>,
    handles: watch::Receiver<Arc<Handles>>,
    settings: watch::Receiver<Settings>,
    published: u64,
    /// No picture before this, unless an outlet has to be told something.
    next_picture: Instant,
}

impl Owner {
    /// An owner of `node`.
    pub fn new(
        node: Node,
        clock: Clock,
        queue: mpsc::Receiver<Vec<Event>>,
        outputs: Outputs,
        outlets: watch::Receiver<Arc<Outlets>>,
        handles: watch::Receiver<Arc<Handles>>,
        settings: watch::Receiver<Settings>,
    ) -> Owner {
        Owner {
            node,
            clock,
            queue,
            outputs,
            outlets,
            handles,
            settings,
            published: 0,
            next_picture: Instant::now(),
        }
    }

    /// Applies events until the program stops.
    pub async fn run(mut self, mut shutdown: Shutdown) {
        let mut pictures = tokio::time::interval(PICTURE_EVERY);
        pictures.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        self.act();
        loop {
            let due = self.until_deadline();
            tokio::select! {
                biased;
                () = shutdown.wait() => {
                    // The cursors of the sources, which have ended, are beyond what they sent last.
                    while let Ok(batch) = self.queue.try_recv() {
                        self.apply_all(batch);
                        self.act();
                    }
                    return;
                }
                batch = self.queue.recv() => match batch {
                    Some(batch) => self.apply_all(batch),
                    None => return,
                },
                () = tokio::time::sleep_until(self.next_picture), if self.is_unpublished() => {}
                () = tokio::time::sleep(due.unwrap_or(PICTURE_EVERY)), if due.is_some() => self.tick(),
                changed = self.settings.changed() => {
                    if changed.is_ok() {
                        let settings = self.settings.borrow_and_update().clone();
                        self.node.reconfigure(settings);
                    }
                }
                _ = self.handles.changed() => {
                    let handles = self.handles.borrow_and_update().clone();
                    handles.watch_again(&self.node.snapshot());
                }
                _ = pictures.tick() => {
                    self.tick();
                }
            }
            self.act();
            // Sources and scrapes share this thread.
            tokio::task::yield_now().await;
        }
    }

    /// Applies a batch, and those that wait behind it.
    fn apply_all(&mut self, first: Vec<Event>) {
        let mut batch = first;
        for _ in 0..BATCHES_PER_TURN {
            for event in &batch {
                self.node.apply(event);
            }
            match self.queue.try_recv() {
                Ok(next) => batch = next,
                Err(_) => return,
            }
        }
        for event in &batch {
            self.node.apply(event);
        }
    }

    fn tick(&mut self) {
        self.node.apply(&live(self.clock.now(), EventKind::Tick));
    }

    /// How long until the model has something to do by itself.
    fn until_deadline(&self) -> Option<Duration> {
        let deadline: Mono = self.node.next_deadline()?;
        Some(deadline.since(self.clock.now().mono) + Duration::from_millis(1))
    }

    fn is_unpublished(&self) -> bool {
        self.node.generation() != self.published
    }

    fn publish(&mut self) {
        let begun = Instant::now();
        self.published = self.node.generation();
        self.outputs.snapshots.store(Arc::new(self.node.snapshot()));
        self.outputs.generations.send_replace(self.published);
        self.next_picture = pause_after(begun, Instant::now());
    }

    /// Publishes the state, then tells outlets and sources: who is told can then read it. Only the details of an incident
    /// may be told before they are in a picture that costs much.
    fn act(&mut self) {
        let effects = self.node.take_effects();
        let tells = |effect: &Effect| match effect {
            Effect::Incident(change) => change.change != Change::Updated,
            effect => matches!(effect, Effect::DaemonDown(..)),
        };
        if self.is_unpublished() && (Instant::now() >= self.next_picture || effects.iter().any(tells)) {
            self.publish();
        }
        let handles = self.handles.borrow().clone();
        let outlets = self.outlets.borrow().clone();
        for effect in effects {
            match effect {
                Effect::Incident(change) => {
                    log_incident(&change);
                    outlets.incident(&change);
                    let _nobody_listens = self.outputs.incidents.send(change);
                }
                Effect::DaemonDown(daemon, is_down) => {
                    if is_down {
                        tracing::warn!(daemon = %daemon, "The MPS control daemon is down or does not answer.");
                    } else {
                        tracing::info!(daemon = %daemon, "The MPS control daemon is back.");
                    }
                    outlets.daemon_down(&daemon, is_down);
                }
                Effect::Look(daemon) => handles.look(&daemon),
                Effect::LookAtGpus => handles.look_at_gpus(),
                Effect::Watch(daemon, pid) => handles.processes().watch(&daemon, pid, None),
                Effect::Unwatch(daemon, pid) => handles.processes().unwatch(&daemon, pid),
            }
        }
    }
}

/// When the picture after one that was begun and done then may be taken.
fn pause_after(begun: Instant, done: Instant) -> Instant {
    let pause = done.duration_since(begun).saturating_sub(CHEAP_PICTURE).saturating_mul(PAUSE_FACTOR);
    // The process itself may have been stopped in the middle of it.
    done + pause.min(PICTURE_EVERY)
}

fn log_incident(change: &IncidentChange) {
    let incident = &change.incident;
    let domains = incident.fault_domains.join(",");
    let culprit = incident.culprit.as_ref().map_or_else(
        || "not named by any source".to_owned(),
        |culprit| format!("{} (pid {})", culprit.command.as_deref().unwrap_or("?"), culprit.pid),
    );
    match change.change {
        Change::Opened => tracing::warn!(
            incident = %incident.id, cause = incident.cause.label(), fault_domains = domains, culprit,
            "An incident opened."
        ),
        Change::MassLoss => tracing::error!(
            incident = %incident.id, cause = incident.cause.label(), fault_domains = domains, culprit,
            lost = incident.victims.len(), before = incident.clients_before,
            "Mass client loss."
        ),
        Change::Blocked => tracing::warn!(
            incident = %incident.id, fault_domains = domains, blocked_by = ?incident.recovery.blocked_by,
            "Processes block recovery: the server refuses new clients until they have exited."
        ),
        Change::Recovered => tracing::info!(
            incident = %incident.id, fault_domains = domains, seconds = incident.recovery.seconds,
            "The server has recovered."
        ),
        Change::Closed => tracing::info!(
            incident = %incident.id, lost = incident.victims.len(), "The incident is closed."
        ),
        Change::Updated => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_that_costs_much_is_followed_by_a_pause() {
        let begun = Instant::now();
        let after = |micros| {
            let done = begun + Duration::from_micros(micros);
            pause_after(begun, done) - done
        };
        assert_eq!(after(250), Duration::ZERO);
        assert_eq!(after(1000), Duration::ZERO);
        assert_eq!(after(3500), Duration::from_millis(10));
        assert_eq!(after(600_000_000), PICTURE_EVERY);
    }
}
