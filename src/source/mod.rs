//! Sources: each turns one part of the world into [`Event`]s.
//!
//! A source never blocks the runtime, never asks a second time while a first question hangs, and says when it is blind.

pub mod control;
pub mod kernel_log;
pub mod mps_log;
pub mod nvml;
pub mod process;

use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use crate::event::{Event, EventKind, Freshness, SourceHealth, SourceName};
use crate::identity::DaemonName;
use crate::time::{Clock, Moment};

/// How many batches may wait for the model. A full queue makes sources wait, not the model.
pub const QUEUE_BATCHES: usize = 256;

/// Where a source puts what it learnt.
#[derive(Debug, Clone)]
pub struct Outbox {
    events: mpsc::Sender<Vec<Event>>,
    /// The clocks to stamp events with.
    pub clock: Clock,
}

impl Outbox {
    /// An outbox, and the queue that the model reads.
    pub fn new(clock: Clock) -> (Outbox, mpsc::Receiver<Vec<Event>>) {
        let (events, queue) = mpsc::channel(QUEUE_BATCHES);
        (Outbox { events, clock }, queue)
    }

    /// Sends a batch; waits while the queue is full. `false`: the model is gone, the source should end.
    pub async fn send(&self, batch: Vec<Event>) -> bool {
        batch.is_empty() || self.events.send(batch).await.is_ok()
    }

    /// Waits for room in the queue; nothing is lost when the wait is given up. `None`: the model is gone.
    pub async fn room(&self) -> Option<Room<'_>> {
        self.events.reserve().await.ok().map(Room)
    }

    /// Whether the model has taken every batch that was sent.
    pub fn is_drained(&self) -> bool {
        self.events.capacity() == self.events.max_capacity()
    }

    /// Sends one event that happens now.
    pub async fn tell(&self, kind: EventKind) -> bool {
        self.send(vec![live(self.clock.now(), kind)]).await
    }

    /// Like [`Outbox::send`], for a source with a thread of its own. Never call it on the runtime's thread.
    pub fn send_blocking(&self, batch: Vec<Event>) -> bool {
        batch.is_empty() || self.events.blocking_send(batch).is_ok()
    }

    /// Tells how a source fares.
    pub async fn health(
        &self,
        source: SourceName,
        daemon: Option<&DaemonName>,
        state: Result<(), Arc<str>>,
    ) -> bool {
        self.tell(EventKind::Source(SourceHealth { source, daemon: daemon.cloned(), state })).await
    }
}

/// Room for one batch.
#[derive(Debug)]
pub struct Room<'a>(mpsc::Permit<'a, Vec<Event>>);

impl Room<'_> {
    /// Sends the batch.
    pub fn send(self, batch: Vec<Event>) {
        self.0.send(batch);
    }
}

/// An event that is news.
pub fn live(at: Moment, kind: EventKind) -> Event {
    Event { at, freshness: Freshness::Live, kind }
}

/// Told when the program stops.
#[derive(Debug, Clone)]
pub struct Shutdown(watch::Receiver<bool>);

impl Shutdown {
    /// The switch (send `true`) and what it stops.
    pub fn new() -> (watch::Sender<bool>, Shutdown) {
        let (switch, stopped) = watch::channel(false);
        (switch, Shutdown(stopped))
    }

    /// Completes when the program stops, or its owner is gone.
    pub async fn wait(&mut self) {
        let _owner_gone = self.0.wait_for(|stop| *stop).await;
    }

    /// Whether the program stops.
    pub fn is_set(&self) -> bool {
        *self.0.borrow() || self.0.has_changed().is_err()
    }
}
