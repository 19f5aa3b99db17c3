//! The poll thread: initialises NVML when there is a driver, asks everything in every cycle, starts anew when the
//! library stops working, the driver goes or its GPUs change.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::driver::Driver;
use super::error::Error;
use super::raw::Library;
use super::shared::Shared;
use super::survey::Survey;
use crate::event::{Event, EventKind, GpuReport};
use crate::source::live;
use crate::source::process::proc::ProcRoot;

/// How often to look whether the events thread has let go of the library.
const RELEASE_POLL: Duration = Duration::from_millis(20);

/// Runs until the source is stopped.
pub fn run(shared: &Shared) {
    let mut poll = Poll::new(shared);
    while !shared.is_stopped() {
        let started = Instant::now();
        let turn = catch_unwind(AssertUnwindSafe(|| poll.turn()));
        if turn.is_err() {
            shared.telemetry.source_error("nvml", "panic");
            poll = Poll::new(shared);
            shared.finish_cycle(
                Err("the NVML cycle failed by a fault of this program; it goes on".into()),
                vec![],
            );
        }
        shared.poke.wait(started + shared.settings.min_spacing, started + shared.settings.interval);
    }
    poll.end_session();
}

struct Poll<'s> {
    shared: &'s Shared,
    driver: Driver,
    survey: Survey,
    open: Option<Open>,
    /// How long to wait after the next failure, and until when after the last one.
    backoff: Duration,
    retry_at: Option<Instant>,
    /// The UUIDs enumerated last in this session, by index.
    devices: Option<BTreeMap<u32, Arc<str>>>,
}

/// A session of this thread's.
struct Open {
    library: Arc<Library>,
    driver_version: Option<Arc<str>>,
    /// Whether the driver's files were there: the stand-in has none.
    has_driver: bool,
    /// What the driver had bound when the session began.
    bound: BTreeSet<OsString>,
}

impl<'s> Poll<'s> {
    fn new(shared: &'s Shared) -> Poll<'s> {
        let settings = &shared.settings;
        let driver = Driver::new(&settings.proc, &settings.module);
        let survey =
            Survey::new(driver.clone(), ProcRoot::new(settings.proc.clone()), shared.telemetry.clone());
        let backoff = settings.backoff.0;
        Poll { shared, driver, survey, open: None, backoff, retry_at: None, devices: None }
    }

    /// One turn: a cycle, or an attempt to start, or nothing while it is too early for one.
    fn turn(&mut self) {
        self.end_stale_session();
        if self.open.is_none() {
            if self.retry_at.is_some_and(|at| Instant::now() < at) {
                return;
            }
            match self.begin_session() {
                Ok(open) => self.open = Some(open),
                Err(error) => return self.fail(&error),
            }
        }
        let Some(open) = &self.open else { return };
        let caller = open.library.caller(&self.shared.poll_call);
        match self.survey.run(caller, open.driver_version.clone()) {
            Ok(report) => self.succeed(report),
            Err(error) => {
                self.fail(&error);
                self.end_session();
            }
        }
    }

    fn begin_session(&mut self) -> Result<Open, Error> {
        let (shared, slot) = (self.shared, &self.shared.poll_call);
        let library = &shared.settings.library;
        self.driver.check(library, slot)?;
        let has_driver = self.driver.is_loaded();
        let bound = self.driver.gpus();
        let library = Arc::new(Library::open(library, slot)?);
        let driver_version = library.caller(slot).driver_version().ok().map(Arc::from);
        self.devices = None;
        shared.set_session(Some(Arc::clone(&library)));
        Ok(Open { library, driver_version, has_driver, bound })
    }

    /// Ends a session whose driver is gone, or has other GPUs by now: NVML would not notice.
    fn end_stale_session(&mut self) {
        let Some(open) = self.open.as_ref().filter(|open| open.has_driver) else { return };
        if !self.driver.is_loaded() {
            tracing::info!("The NVIDIA driver was unloaded.");
        } else if self.driver.gpus() != open.bound {
            tracing::info!("The NVIDIA driver has other GPUs than before; NVML is initialised anew.");
        } else {
            return;
        }
        self.end_session();
    }

    /// Shuts NVML down once the events thread has let go of it. While that thread hangs in the driver this waits.
    fn end_session(&mut self) {
        let Some(open) = self.open.take() else { return };
        drop(self.shared.set_session(None));
        let mut library = open.library;
        loop {
            match Arc::try_unwrap(library) {
                Ok(library) => return library.close(&self.shared.poll_call),
                Err(still_used) => library = still_used,
            }
            if self.shared.is_stopped() && self.shared.events_call.is_busy() {
                return;
            }
            std::thread::sleep(RELEASE_POLL);
        }
    }

    fn succeed(&mut self, report: GpuReport) {
        (self.backoff, self.retry_at) = (self.shared.settings.backoff.0, None);
        let present = report.gpus.iter().filter(|gpu| !gpu.is_lost);
        let devices: BTreeMap<u32, Arc<str>> =
            present.map(|gpu| (gpu.index, Arc::clone(&gpu.uuid))).collect();
        // The events thread registered what there was when the session began.
        let before = self.devices.replace(devices);
        if before.is_some() && before != self.devices {
            self.shared.devices.fetch_add(1, Ordering::Relaxed);
        }
        self.shared.finish_cycle(Ok(()), vec![self.event(EventKind::Gpus(report))]);
    }

    fn fail(&mut self, error: &Error) {
        // Looking for the driver costs nothing; initialising in vain does.
        if !matches!(error, Error::NoDriver { .. }) {
            self.shared.telemetry.source_error("nvml", error.call().unwrap_or("dlopen"));
            self.retry_at = Some(Instant::now() + self.backoff);
            self.backoff = (self.backoff * 2).min(self.shared.settings.backoff.1);
        }
        self.shared.finish_cycle(Err(error.to_string().into()), vec![]);
    }

    fn event(&self, kind: EventKind) -> Event {
        live(self.shared.outbox.clock.now(), kind)
    }
}
