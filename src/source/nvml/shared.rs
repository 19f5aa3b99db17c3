//! What the two NVML threads and their watcher share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::raw::Library;
use super::watch::CallSlot;
use super::{Poke, Settings};
use crate::event::{Event, EventKind, SourceHealth, SourceName};
use crate::source::{Outbox, live};
use crate::telemetry::Telemetry;

/// How a source fares: `Err` with the reason.
type Health = Result<(), Arc<str>>;

/// Shared by the threads.
pub struct Shared {
    /// How to go about it.
    pub settings: Settings,
    /// Where reports and Xids go.
    pub outbox: Outbox,
    /// Counters.
    pub telemetry: Telemetry,
    /// What asks for a cycle before its time.
    pub poke: Poke,
    /// The call that the poll thread is in.
    pub poll_call: CallSlot,
    /// The call that the events thread is in.
    pub events_call: CallSlot,
    /// Grows when the GPUs that NVML enumerates are others than before.
    pub devices: AtomicU64,
    session: Mutex<Session>,
    session_changed: Condvar,
    /// What the last cycle came to; `None` before the first one ended.
    result: Mutex<Option<Health>>,
    told: Mutex<Option<Health>>,
    is_stopped: AtomicBool,
}

/// An initialised library, and how many there were before it.
#[derive(Clone, Default)]
pub struct Session {
    /// The library, between initialisation and shutdown.
    pub library: Option<Arc<Library>>,
    /// Grows with every change.
    pub number: u64,
}

impl Shared {
    /// Nothing done yet.
    pub fn new(settings: Settings, poke: Poke, outbox: Outbox, telemetry: Telemetry) -> Shared {
        Shared {
            settings,
            outbox,
            telemetry,
            poke,
            poll_call: CallSlot::default(),
            events_call: CallSlot::default(),
            devices: AtomicU64::new(0),
            session: Mutex::default(),
            session_changed: Condvar::new(),
            result: Mutex::default(),
            told: Mutex::default(),
            is_stopped: AtomicBool::new(false),
        }
    }

    /// Ends both threads as soon as they are in no call.
    pub fn stop(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        self.poke.poke();
        self.session_changed.notify_all();
    }

    /// Whether the threads should end.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    /// The present session.
    pub fn session(&self) -> Session {
        locked(&self.session).clone()
    }

    /// Begins or ends a session; gives the library of the last one.
    pub fn set_session(&self, library: Option<Arc<Library>>) -> Option<Arc<Library>> {
        let mut session = locked(&self.session);
        session.number += 1;
        let last = std::mem::replace(&mut session.library, library);
        drop(session);
        self.session_changed.notify_all();
        last
    }

    /// Sleeps for this long, unless the session changes from this number or the threads should end.
    pub fn sleep_in_session(&self, number: u64, time: Duration) {
        let until = Instant::now() + time;
        let mut session = locked(&self.session);
        while session.number == number && !self.is_stopped() {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            session =
                self.session_changed.wait_timeout(session, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// What a cycle came to. A success is told every time, a failure when its reason changes. Blocks while the model
    /// is busy.
    pub fn finish_cycle(&self, result: Health, mut batch: Vec<Event>) {
        let is_success = result.is_ok();
        *locked(&self.result) = Some(result);
        if let Some(health) = self.news(is_success) {
            batch.push(live(self.outbox.clock.now(), health));
        }
        // A cycle that was stopped in its midst is not told: by now nobody may want NVML any more.
        if !self.is_stopped() && !self.outbox.send_blocking(batch) {
            self.stop();
        }
    }

    /// The source's health, where it is news, or where it is to be repeated.
    pub fn news(&self, repeat: bool) -> Option<EventKind> {
        let health = self.health()?;
        let mut told = locked(&self.told);
        if told.as_ref() == Some(&health) && !(repeat && health.is_ok()) {
            return None;
        }
        if told.as_ref() != Some(&health) {
            log(told.as_ref(), &health);
        }
        *told = Some(health.clone());
        Some(EventKind::Source(SourceHealth { source: SourceName::Nvml, daemon: None, state: health }))
    }

    /// A stuck call outweighs what the last cycle came to.
    fn health(&self) -> Option<Health> {
        self.stuck(self.settings.stuck_after).map(Err).or_else(|| locked(&self.result).clone())
    }

    /// The call that has run for longer than it may.
    pub fn stuck(&self, after: Duration) -> Option<Arc<str>> {
        let now = self.outbox.clock.now().wall;
        self.poll_call.stuck(after, now).or_else(|| self.events_call.stuck(after, now))
    }
}

fn log(before: Option<&Health>, health: &Health) {
    match (before, health) {
        (_, Err(reason)) => tracing::warn!(%reason, "NVML tells nothing."),
        (Some(Err(_)), Ok(())) => tracing::info!("NVML answers again."),
        (_, Ok(())) => tracing::info!("NVML answers."),
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
