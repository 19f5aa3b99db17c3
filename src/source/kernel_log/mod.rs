//! The kernel log: Xids with their pid and channel, lost GPUs, OOM kills.
//!
//! [`KernelLogSource`] follows `/dev/kmsg`, else the journal, or the file or FIFO that the configuration names. It never
//! waits for the model while there is something to read: what waits is kept as few distinct events with a count, so
//! that a storm neither fills memory nor lets the kernel overwrite what was not read. [`recorded::Reader`] reads
//! recorded logs of all shapes without any I/O.

mod cursor;
mod device;
mod intake;
mod journal;
pub mod line;
mod lines;
mod pending;
pub mod record;
pub mod recorded;
pub mod stamp;
mod stream;
#[cfg(test)]
mod tests;
pub mod xid;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until};
use tracing::{info, warn};

use self::cursor::{Cursor, Position};
use self::device::Device;
use self::intake::Intake;
use self::journal::{Journal, JournalAccess};
use self::stream::{Fifo, LogFile};
use crate::config;
use crate::event::SourceName;
use crate::source::{Outbox, Shutdown};
use crate::telemetry::Telemetry;

/// Pause before the first attempt to open the log again; doubled up to the last.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_secs(30);

/// How often the model hears that the log can still be read, when nothing happens.
const HEALTH_INTERVAL: Duration = Duration::from_secs(30);

/// Follows the kernel log.
#[derive(Debug)]
pub struct KernelLogSource {
    config: config::KernelLog,
    journal: JournalAccess,
    intake: Intake,
    /// What people were told last; `None` while all is well.
    failure: Option<String>,
}

/// What is being read.
#[derive(Debug)]
enum Input {
    Device(Device),
    File(LogFile),
    Fifo(Fifo),
    Journal(Journal),
}

/// Why following ended.
enum Ended {
    /// The program stops, or the model is gone.
    ForGood,
    Failed(io::Error),
}

impl KernelLogSource {
    /// A source; its cursor is kept in `state_directory`.
    pub fn new(
        config: &config::KernelLog,
        state_directory: Option<PathBuf>,
        outbox: Outbox,
        telemetry: Telemetry,
    ) -> KernelLogSource {
        let cursor = Cursor::load(state_directory, telemetry.clone());
        KernelLogSource {
            config: config.clone(),
            journal: JournalAccess::default(),
            intake: Intake::new(outbox, telemetry, cursor),
            failure: None,
        }
    }

    /// Follows the log until the program stops.
    pub async fn run(mut self, mut shutdown: Shutdown) {
        if !self.config.enabled {
            return;
        }
        let mut pause = FIRST_PAUSE;
        loop {
            match self.open() {
                Ok(input) => {
                    let began = Instant::now();
                    let ended = tokio::select! {
                        () = shutdown.wait() => Ended::ForGood,
                        ended = self.follow(input) => ended,
                    };
                    let Ended::Failed(error) = ended else {
                        self.intake.finish();
                        return;
                    };
                    let path = self.config.path.display();
                    self.fail(format!("cannot read {path}: {error}")).await;
                    if began.elapsed() > LAST_PAUSE {
                        pause = FIRST_PAUSE;
                    }
                }
                Err(reason) => self.fail(reason).await,
            }
            tokio::select! {
                () = shutdown.wait() => return,
                () = sleep(pause) => pause = (pause * 2).min(LAST_PAUSE),
            }
        }
    }

    /// Opens what the configuration names, else the journal; or says what has to change.
    fn open(&mut self) -> Result<Input, String> {
        let path = &self.config.path;
        self.intake.restart();
        let kept = self.intake.cursor.position().cloned();
        let failed = match std::fs::metadata(path) {
            Ok(meta) if meta.is_file() => LogFile::open(path, kept.as_ref()).map(Input::File),
            Ok(meta) if stream::is_fifo(&meta) => Fifo::open(path).map(Input::Fifo),
            Ok(meta) if meta.is_dir() => {
                return Err(format!("{} is a directory, not a kernel log", path.display()));
            }
            Ok(_) => Device::open(path, kept.as_ref().filter(|kept| is_device(kept))).map(Input::Device),
            Err(error) => Err(error),
        };
        let error = match failed {
            Ok(input) => {
                info!(path = %path.display(), "Following the kernel log.");
                return Ok(input);
            }
            Err(error) => error,
        };
        let reason = device::advice(path, &error);
        if *path != config::KernelLog::default().path {
            return Err(reason);
        }
        if let Some(obstacle) = self.journal.obstacle() {
            return Err(format!("{reason}; instead of it, the journal could be read, but {obstacle}"));
        }
        let now = self.intake.outbox.clock.now().wall;
        match Journal::open(&self.journal, kept.as_ref(), now) {
            Ok(journal) => {
                info!(%reason, "Following the kernel log in the journal.");
                Ok(Input::Journal(journal))
            }
            Err(error) => Err(format!("{reason}; instead of it, the journal was tried, but {error}")),
        }
    }

    async fn follow(&mut self, mut input: Input) -> Ended {
        let outbox = self.intake.outbox.clone();
        let mut look = tokio::time::interval(device::LOOK_INTERVAL);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut told_at: Option<Instant> = None;
        loop {
            let has_events = self.intake.has_events();
            let cursor_due = self.intake.cursor_due();
            let taken = tokio::select! {
                biased;
                room = outbox.room(), if has_events => {
                    let Some(room) = room else { return Ended::ForGood };
                    self.intake.send(room);
                    continue;
                }
                () = until(cursor_due), if cursor_due.is_some() => {
                    self.intake.cursor.write_if_due();
                    continue;
                }
                _ = look.tick() => input.take(&mut self.intake),
                ready = input.ready() => ready.and_then(|()| input.take(&mut self.intake)),
            };
            match taken {
                Ok(more) => {
                    // A log that gives something, or nothing, without error is one.
                    if told_at.is_none_or(|told| told.elapsed() >= HEALTH_INTERVAL) {
                        told_at = Some(Instant::now());
                        self.failure = None;
                        self.intake.works();
                    }
                    if more {
                        tokio::task::yield_now().await;
                    }
                }
                Err(error) => return Ended::Failed(error),
            }
        }
    }

    /// Tells the model, and people when it is news.
    async fn fail(&mut self, reason: String) {
        if self.failure.as_ref() != Some(&reason) {
            warn!(%reason, "The kernel log cannot be read: its Xids, culprits by channel and OOM kills are missing.");
        }
        let state = Err(Arc::from(reason.as_str()));
        self.failure = Some(reason);
        self.intake.outbox.health(SourceName::KernelLog, None, state).await;
    }
}

impl Input {
    async fn ready(&self) -> io::Result<()> {
        match self {
            Input::Device(device) => device.ready().await,
            Input::File(file) => file.ready().await,
            Input::Fifo(fifo) => fifo.ready().await,
            Input::Journal(journal) => journal.ready().await,
        }
    }

    /// Takes a bounded piece of what is there. `true`: there may be more.
    fn take(&mut self, intake: &mut Intake) -> io::Result<bool> {
        match self {
            Input::Device(device) => device.take(intake),
            Input::File(file) => file.take(intake),
            Input::Fifo(fifo) => fifo.take(intake),
            Input::Journal(journal) => journal.take(intake),
        }
    }
}

fn is_device(position: &Position) -> bool {
    matches!(position, Position::Device { .. })
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
