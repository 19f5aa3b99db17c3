//! NVML: devices, MIG, MPS client pids, memory, modes and Xid events.
//!
//! A call into the driver may hang for ever, and nothing can end it. So NVML has two threads of its own: one asks
//! everything once per cycle ("nvml-poll"), one waits for events ("nvml-events"). Each notes the call that it is in;
//! [`run`] looks at these notes, and says that the source is stuck when one is too old. The thread that hangs makes no
//! other call, everything else goes on, and when the call returns the source is as before.
//!
//! NVML is not touched while no driver is loaded, except for the stand-in library (`nvml-stand-in/`), which needs none.

mod driver;
mod error;
mod events;
mod lists;
mod names;
mod poll;
mod raw;
mod shared;
pub mod stand_in;
mod survey;
mod watch;

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::config;
use crate::event::SourceName;
use crate::source::{Outbox, Shutdown};
use crate::telemetry::Telemetry;
use shared::Shared;

/// How long the end of the program waits for the threads. A thread that hangs in the driver is left behind.
const FAREWELL: Duration = Duration::from_millis(1500);
/// How often to look whether they have ended.
const FAREWELL_POLL: Duration = Duration::from_millis(10);
/// How often to look for a call that hangs, at most.
const WATCH_EVERY: Duration = Duration::from_secs(1);

/// How to go about NVML.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Name or path of the library.
    pub library: PathBuf,
    /// The host's `/proc`.
    pub proc: PathBuf,
    /// Where the driver's module shows itself.
    pub module: PathBuf,
    /// Time from the start of a cycle to that of the next one.
    pub interval: Duration,
    /// The same, at least, when a cycle is asked for.
    pub min_spacing: Duration,
    /// How long one call waits for events: also how long the end of a session, or of the program, may take.
    pub event_wait: Duration,
    /// How long a call may take before the source counts as stuck.
    pub stuck_after: Duration,
    /// Pause after a failed initialisation: the first one and the longest one.
    pub backoff: (Duration, Duration),
}

impl Settings {
    /// As configured.
    pub fn new(nvml: &config::Nvml, host: &config::Host) -> Settings {
        Settings {
            library: nvml.library.clone(),
            proc: host.proc.clone(),
            module: "/sys/module/nvidia".into(),
            interval: nvml.interval,
            min_spacing: Duration::from_secs(1).min(nvml.interval),
            event_wait: Duration::from_secs(1),
            stuck_after: nvml.stuck_after,
            backoff: (Duration::from_secs(5), Duration::from_secs(60)),
        }
    }
}

/// Asks for a cycle before its time. Cheap to clone; never blocks.
#[derive(Debug, Clone, Default)]
pub struct Poke(Arc<(Mutex<bool>, Condvar)>);

impl Poke {
    /// Asks for a cycle; several requests become one.
    pub fn poke(&self) {
        let (asked, wake) = &*self.0;
        *asked.lock().unwrap_or_else(PoisonError::into_inner) = true;
        wake.notify_all();
    }

    /// Waits until somebody asks, but not before `earliest` and not after `latest`.
    fn wait(&self, earliest: Instant, latest: Instant) {
        let (asked, wake) = &*self.0;
        let mut is_asked = asked.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let now = Instant::now();
            let until = if *is_asked { earliest } else { latest };
            if now >= until {
                *is_asked = false;
                return;
            }
            is_asked = wake.wait_timeout(is_asked, until - now).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Threads that were told to stop and are in a call that has not returned.
pub struct Left(Threads);

/// Starts the threads and watches them until the program stops, or this future is dropped.
///
/// `left` are threads of an earlier run: while one of them hangs no other call is made. Gives those that hang at the end.
///
/// Sends [`Gpus`](crate::event::EventKind::Gpus) per cycle, [`Xid`](crate::event::EventKind::Xid) at once, and the
/// health of [`Nvml`](crate::event::SourceName::Nvml).
///
/// # Errors
/// When a thread cannot be started.
pub async fn run(
    settings: Settings,
    poke: Poke,
    outbox: Outbox,
    telemetry: Telemetry,
    left: Option<Left>,
    mut shutdown: Shutdown,
) -> std::io::Result<Option<Left>> {
    let every = (settings.stuck_after / 10).clamp(FAREWELL_POLL, WATCH_EVERY);
    if let Some(Left(threads)) = left {
        tokio::select! {
            () = threads.finish(settings.stuck_after, every, &outbox) => {}
            () = shutdown.wait() => return Ok(threads.left()),
        }
    }
    let shared = Arc::new(Shared::new(settings, poke, outbox, telemetry));
    let threads = Threads::start(&shared)?;
    let watch = async {
        let mut tick = tokio::time::interval(every);
        loop {
            tick.tick().await;
            if let Some(health) = shared.news(false)
                && !shared.outbox.tell(health).await
            {
                return;
            }
        }
    };
    tokio::select! {
        () = watch => {}
        () = shutdown.wait() => {}
    }
    shared.stop();
    let deadline = tokio::time::Instant::now() + FAREWELL;
    while !threads.are_finished() && tokio::time::Instant::now() < deadline {
        tokio::time::sleep(FAREWELL_POLL).await;
    }
    Ok(threads.left())
}

/// The two threads; told to stop when this is dropped, and never joined: they may hang.
struct Threads {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
}

impl Threads {
    fn start(shared: &Arc<Shared>) -> std::io::Result<Threads> {
        let mut threads = Threads { shared: Arc::clone(shared), handles: Vec::new() };
        for (name, body) in [("nvml-poll", poll::run as fn(&Shared)), ("nvml-events", events::run)] {
            let shared = Arc::clone(shared);
            let thread = std::thread::Builder::new().name(name.into()).spawn(move || body(&shared))?;
            threads.handles.push(thread);
        }
        Ok(threads)
    }

    fn are_finished(&self) -> bool {
        self.handles.iter().all(JoinHandle::is_finished)
    }

    /// Waits for the end of threads that were told to stop, and tells when they are stuck: in a call longer than
    /// `after`, which need not be what they were started with.
    async fn finish(&self, after: Duration, every: Duration, outbox: &Outbox) {
        let mut tick = tokio::time::interval(every);
        let mut told = None;
        while !self.are_finished() {
            tick.tick().await;
            let stuck = self.shared.stuck(after);
            if let Some(reason) = stuck.clone().filter(|_| stuck != told) {
                let _nobody_listens = outbox.health(SourceName::Nvml, None, Err(reason)).await;
                told = stuck;
            }
        }
    }

    fn left(self) -> Option<Left> {
        (!self.are_finished()).then(|| Left(self))
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.stop();
    }
}
