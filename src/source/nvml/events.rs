//! The events thread: waits for Xids and for whatever makes a new cycle worth its while.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::error::{Error, code};
use super::raw::{Caller, EventSet, HandleKey, RawEvent};
use super::shared::{Session, Shared};
use crate::event::{Event, EventKind, Xid, XidSource};
use crate::source::live;

/// A wait that ends sooner than this without an event was interrupted; something is paused for, so as not to spin.
const TOO_SOON: Duration = Duration::from_millis(50);
/// Pause while there is no session, or no GPU in it. A change of session ends it.
const NOTHING_TO_DO: Duration = Duration::from_secs(1);
/// Events taken at once, so that a storm becomes few batches.
const BATCH: usize = 256;
/// Pause after a failure: first and longest.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// `nvmlEventTypeXidCriticalError`.
const XID: u64 = 0x8;
/// Events that tell that a cycle would see something new, with the words for the log.
const NEWS: [(u64, &str); 5] = [
    (0x100, "MIG configuration changed"),
    (0x1000, "contained memory poison"),
    (0x2000, "fatal memory poison"),
    (0x4000, "GPU unavailable"),
    (0x8000, "recovery action changed"),
];

/// Runs until the source is stopped.
pub fn run(shared: &Shared) {
    let mut thread = Thread { shared, refused: HashSet::new(), backoff: BACKOFF.0, told: String::new() };
    while !shared.is_stopped() {
        let session = shared.session();
        let Some(library) = &session.library else {
            thread.refused.clear();
            shared.sleep_in_session(session.number, NOTHING_TO_DO);
            continue;
        };
        let caller = library.caller(&shared.events_call);
        let outcome = catch_unwind(AssertUnwindSafe(|| thread.watch(caller, &session)));
        let number = session.number;
        let pause = match outcome {
            Ok(Ok(())) => Duration::ZERO,
            Ok(Err(error)) => thread.fail(&error),
            Err(_panic) => {
                shared.telemetry.source_error("nvml", "panic");
                BACKOFF.1
            }
        };
        // Without the library, or the poll thread would wait for this pause.
        drop(session);
        shared.sleep_in_session(number, pause);
    }
}

struct Thread<'s> {
    shared: &'s Shared,
    /// GPUs that made a whole event set useless, by handle; tried again in the next session.
    refused: HashSet<usize>,
    backoff: Duration,
    /// The failure that was logged last.
    told: String,
}

/// A GPU in the event set.
struct Registered {
    handle: HandleKey,
    uuid: Arc<str>,
}

impl Thread<'_> {
    /// Waits for events until the session or its GPUs change.
    fn watch(&mut self, caller: Caller<'_>, session: &Session) -> Result<(), Error> {
        let devices = self.shared.devices.load(Ordering::Relaxed);
        let set = caller.event_set()?;
        let gpus = self.register(caller, &set)?;
        let is_over = || {
            self.shared.is_stopped()
                || self.shared.session().number != session.number
                || self.shared.devices.load(Ordering::Relaxed) != devices
        };
        if gpus.is_empty() {
            while !is_over() {
                self.shared.sleep_in_session(session.number, NOTHING_TO_DO);
            }
            return Ok(());
        }
        while !is_over() {
            let started = Instant::now();
            match set.wait(self.shared.settings.event_wait)? {
                Some(event) => self.take(caller, &set, &gpus, event)?,
                None if started.elapsed() < TOO_SOON => std::thread::sleep(TOO_SOON),
                None => {}
            }
            if !self.told.is_empty() {
                tracing::info!("NVML gives events again.");
                self.told.clear();
            }
            self.backoff = BACKOFF.0;
        }
        Ok(())
    }

    /// Registers every GPU that takes part.
    fn register(&mut self, caller: Caller<'_>, set: &EventSet<'_>) -> Result<Vec<Registered>, Error> {
        let wanted = NEWS.iter().fold(XID, |bits, (bit, _)| bits | bit);
        let mut gpus = Vec::new();
        for index in 0..caller.device_count()? {
            if self.refused.contains(&(index as usize)) {
                continue;
            }
            let registered = caller.device(index).and_then(|device| {
                let uuid = device.uuid()?;
                set.register(&device, wanted)?;
                Ok(Registered { handle: device.key(), uuid: uuid.into() })
            });
            match registered {
                Ok(gpu) => gpus.push(gpu),
                // After an unknown error the set is undefined: another one, without this GPU.
                Err(error) if error.code() == Some(999) => {
                    self.refused.insert(index as usize);
                    return Err(error);
                }
                Err(error @ Error::Missing { .. }) => return Err(error),
                Err(error) => {
                    self.shared.telemetry.source_error("nvml", error.call().unwrap_or("events"));
                    tracing::debug!(gpu = index, %error, "A GPU gives no events.");
                }
            }
        }
        Ok(gpus)
    }

    /// Sends an event, with those that are already waiting behind it.
    fn take(
        &self,
        caller: Caller<'_>,
        set: &EventSet<'_>,
        gpus: &[Registered],
        first: RawEvent,
    ) -> Result<(), Error> {
        let mut batch: Vec<Event> = Vec::new();
        self.add(caller, gpus, &first, &mut batch);
        let mut end = Ok(());
        for _ in 1..BATCH {
            match set.wait(Duration::ZERO) {
                Ok(Some(event)) => self.add(caller, gpus, &event, &mut batch),
                Ok(None) => break,
                Err(error) => {
                    end = Err(error);
                    break;
                }
            }
        }
        if !self.shared.outbox.send_blocking(batch) {
            self.shared.stop();
        }
        end
    }

    fn add(&self, caller: Caller<'_>, gpus: &[Registered], event: &RawEvent, batch: &mut Vec<Event>) {
        let known = gpus.iter().find(|gpu| gpu.handle == event.device).map(|gpu| Arc::clone(&gpu.uuid));
        let uuid = known.or_else(|| caller.uuid_of(event).ok().map(Arc::from));
        if event.kind & XID == 0 {
            let what = NEWS.iter().find(|(bit, _)| event.kind & bit != 0).map_or("unknown", |(_, what)| what);
            tracing::info!(uuid = uuid.as_deref(), event = what, bits = event.kind, "NVML reports an event.");
            self.shared.poke.poke();
            return;
        }
        let Ok(number) = u32::try_from(event.data) else { return };
        let xid = Xid {
            code: number,
            source: XidSource::Nvml,
            pci: None,
            uuid,
            gpu_instance: event.gpu_instance,
            compute_instance: event.compute_instance,
            pid: None,
            pid_owns_channel: false,
            caused_by: None,
            recovery_action: None,
            count: 1,
            text: None,
        };
        // A GPU whose Xid came may be lost or need a reset by now.
        self.shared.poke.poke();
        if let Some(EventKind::Xid(same)) = batch
            .iter_mut()
            .map(|event| &mut event.kind)
            .find(|kind| matches!(kind, EventKind::Xid(before) if Xid { count: 1, ..before.clone() } == xid))
        {
            same.count += 1;
            return;
        }
        batch.push(live(self.shared.outbox.clock.now(), EventKind::Xid(xid)));
    }

    /// Notes a failure; gives the pause after it.
    fn fail(&mut self, error: &Error) -> Duration {
        let text = error.to_string();
        self.shared.telemetry.source_error("nvml", error.call().unwrap_or("events"));
        if error.code() == Some(code::GPU_IS_LOST) {
            self.shared.poke.poke();
        }
        if self.told != text {
            tracing::warn!(%error, "NVML gives no events; Xids come from the kernel log alone.");
            self.told = text;
        }
        let pause = self.backoff;
        self.backoff = (self.backoff * 2).min(BACKOFF.1);
        pause
    }
}
