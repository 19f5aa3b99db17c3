//! How many connections may be open, and who goes when there are too many.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout};

/// The open connections.
///
/// When all places are taken, the connection that has waited longest without a request makes room: peers that only
/// sit there cannot keep out one that asks.
#[derive(Debug)]
pub(super) struct Connections {
    places: Arc<Semaphore>,
    next: AtomicU64,
    open: Mutex<BTreeMap<u64, Arc<Entry>>>,
}

#[derive(Debug)]
struct Entry {
    /// Since when no request is being answered; `None` while one is.
    idle_since: Mutex<Option<Instant>>,
    evicted: Notify,
}

/// An admitted connection; its place is free again when this is dropped.
#[derive(Debug)]
pub(super) struct Admitted {
    number: u64,
    entry: Arc<Entry>,
    connections: Arc<Connections>,
    _place: OwnedSemaphorePermit,
}

/// Held while a request is being answered.
#[derive(Debug)]
pub(super) struct Busy(Arc<Entry>);

impl Connections {
    pub(super) fn new(limit: usize) -> Arc<Connections> {
        Arc::new(Connections {
            places: Arc::new(Semaphore::new(limit)),
            next: AtomicU64::new(0),
            open: Mutex::default(),
        })
    }

    /// Waits for a place, and makes one where it can.
    pub(super) async fn admit(self: &Arc<Connections>) -> Admitted {
        let place = loop {
            if let Ok(place) = self.places.clone().try_acquire_owned() {
                break place;
            }
            self.evict_one();
            if let Ok(Ok(place)) =
                timeout(Duration::from_millis(100), self.places.clone().acquire_owned()).await
            {
                break place;
            }
        };
        let entry = Arc::new(Entry { idle_since: Mutex::new(Some(Instant::now())), evicted: Notify::new() });
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.lock().insert(number, entry.clone());
        Admitted { number, entry, connections: self.clone(), _place: place }
    }

    fn evict_one(&self) {
        let open = self.lock();
        let longest =
            open.values().filter_map(|entry| Some((entry.idle_since()?, entry))).min_by_key(|it| it.0);
        if let Some((_, entry)) = longest {
            entry.evicted.notify_one();
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, Arc<Entry>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn idle_since(&self) -> Option<Instant> {
        *self.idle_since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_idle_since(&self, since: Option<Instant>) {
        *self.idle_since.lock().unwrap_or_else(PoisonError::into_inner) = since;
    }
}

impl Admitted {
    /// Marks the connection as one that is being answered.
    pub(super) fn busy(&self) -> Busy {
        self.entry.set_idle_since(None);
        Busy(self.entry.clone())
    }

    /// Completes when the connection must make room.
    pub(super) async fn evicted(&self) {
        self.entry.evicted.notified().await;
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.connections.lock().remove(&self.number);
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.set_idle_since(Some(Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_longest_idle_connection_makes_room() {
        let connections = Connections::new(3);
        let first = connections.admit().await;
        tokio::time::advance(Duration::from_secs(1)).await;
        let second = connections.admit().await;
        let third = connections.admit().await;
        let answering = first.busy();
        let evicted = tokio::spawn(async move { second.evicted().await });
        let fourth = connections.admit().await;
        evicted.await.unwrap();
        drop((answering, third, fourth));
        assert_eq!(connections.lock().len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_who_is_being_answered_has_to_go() {
        let connections = Connections::new(1);
        let only = connections.admit().await;
        let answering = only.busy();
        assert!(timeout(Duration::from_secs(5), connections.admit()).await.is_err());
        drop(answering);
        let leaving = tokio::spawn(async move { only.evicted().await });
        connections.admit().await;
        leaving.await.unwrap();
    }
}
