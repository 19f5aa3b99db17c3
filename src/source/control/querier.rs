//! Holds the sessions with one control daemon: one at a time, when asked and now and then.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::config::{Control, ControlClient};
use crate::event::{DaemonSite, EventKind, LockState, Look, LookError, SourceName};
use crate::source::process::proc::ProcRoot;
use crate::source::{Outbox, Shutdown};
use crate::telemetry::{QueryResult, Telemetry};

use super::answers::Depth;
use super::binary::{self, BinaryError};
use super::pace::{Failure, Pace};
use super::wire::{self, WireError};

/// How long a daemon is left alone after its start. Who starts one sets it up right afterwards, each setting by a run of
/// NVIDIA's program, and a run that meets our session is lost (see [`wire`]). By then its sockets are open, too.
const SETTLE: Duration = Duration::from_secs(2);

/// Asks the sessions of one daemon.
pub(super) struct Querier {
    pub site: DaemonSite,
    pub settings: Control,
    pub proc: ProcRoot,
    pub outbox: Outbox,
    pub telemetry: Telemetry,
    pub requests: Arc<Notify>,
    /// What the lock says; `None` before it was looked at.
    pub state: watch::Receiver<Option<LockState>>,
    pub unanswered: watch::Sender<u32>,
    pub client: ControlClient,
    /// `PATH`, for NVIDIA's program.
    pub search: Option<OsString>,
    pub health: Option<Result<(), Arc<str>>>,
}

impl Querier {
    pub async fn run(mut self, mut shutdown: Shutdown) {
        let Control { interval, timeout, .. } = self.settings;
        let is_logless = matches!(self.site.log, crate::event::LogPlace::Nowhere(_));
        let mut pace = Pace::new(Instant::now(), interval, timeout, is_logless);
        let mut is_requested = false;
        let mut servers = None;
        let mut holder = None;
        loop {
            let state = *self.state.borrow_and_update();
            let is_dead = matches!(state, Some(LockState::Stale | LockState::Absent));
            if is_dead {
                // Whoever comes next is another, also where its process cannot be told from this one's.
                holder = None;
            }
            if is_dead && !self.tell_health(Err("no control daemon runs here".into())).await {
                return;
            }
            let is_another =
                matches!(state, Some(LockState::Held(_) | LockState::HeldElsewhere)) && state != holder;
            if is_another {
                holder = state;
                self.forget_silence();
                pace.restart(Instant::now() + self.settles_in(state));
            }
            let next = pace.next(Instant::now(), is_requested);
            tokio::select! {
                biased;
                () = shutdown.wait() => return,
                changed = self.state.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    continue;
                }
                () = self.requests.notified() => {
                    is_requested = true;
                    continue;
                }
                () = tokio::time::sleep_until(next), if state.is_some() && !is_dead => {}
            }
            let depth = pace.depth(Instant::now(), is_requested);
            pace.begun(Instant::now(), is_requested);
            let begun = Instant::now();
            let result = tokio::select! {
                result = self.look(depth) => result,
                () = shutdown.wait() => return,
            };
            let (now, result) = (Instant::now(), result.map_err(LookError::from));
            self.telemetry.control_query(&self.site.name, label(&result), now - begun);
            match &result {
                Ok(look) => {
                    let before = servers.replace(states(look));
                    let is_news = before.is_some_and(|before| before != states(look));
                    pace.answered(now, depth, look);
                    // The clients of a server that has come, gone or changed its state.
                    is_requested = is_news && depth == Depth::State;
                    self.forget_silence();
                }
                Err(LookError::Timeout(_)) => {
                    pace.failed(now, Failure::Unanswered);
                    self.unanswered.send_modify(|unanswered| *unanswered = unanswered.saturating_add(1));
                }
                Err(_) => pace.failed(now, Failure::Refused),
            }
            let health = result.as_ref().map(|_look| ()).map_err(|error| Arc::from(error.to_string()));
            let event = EventKind::Look(self.site.name.clone(), result);
            if !self.outbox.tell(event).await || !self.tell_health(health).await {
                return;
            }
        }
    }

    /// How much of [`SETTLE`] is left: all of it for a daemon of which it is not known when it started.
    fn settles_in(&self, state: Option<LockState>) -> Duration {
        match state {
            Some(LockState::Held(process)) => SETTLE.saturating_sub(self.proc.age(process.start)),
            _ => SETTLE,
        }
    }

    fn forget_silence(&mut self) {
        self.unanswered.send_if_modified(|unanswered| std::mem::take(unanswered) != 0);
    }

    async fn look(&mut self, depth: Depth) -> Result<Look, SessionError> {
        let (pipe, timeout) = (self.site.pipe_path(), self.settings.timeout);
        if self.client == ControlClient::Socket {
            match wire::look(&pipe, depth, timeout).await {
                Err(error @ WireError::UnknownProtocol { .. }) => {
                    tracing::warn!(
                        daemon = %self.site.name, %error,
                        "The control daemon's protocol is not the known one; from now on it is asked through {}.",
                        binary::PROGRAM,
                    );
                    self.client = ControlClient::Binary;
                }
                result => return Ok(result?),
            }
        }
        let program = binary::find(self.search.as_deref(), self.daemon_program().as_deref())?;
        Ok(binary::look(&program, &pipe, depth, timeout).await?)
    }

    /// The daemon's own program, where it is a file of our own mount namespace.
    fn daemon_program(&self) -> Option<PathBuf> {
        let process = self.site.process.filter(|_| self.site.root.as_os_str().is_empty())?;
        std::fs::read_link(self.proc.file(process.pid, "exe")).ok()
    }

    /// Tells when it changes, and every success.
    async fn tell_health(&mut self, health: Result<(), Arc<str>>) -> bool {
        let is_same = self.health.as_ref() == Some(&health);
        if is_same && health.is_err() {
            return true;
        }
        if self.health.as_ref().is_some_and(Result::is_ok) != health.is_ok() || self.health.is_none() {
            match &health {
                Ok(()) => tracing::info!(daemon = %self.site.name, "The control daemon answers."),
                Err(error) => {
                    tracing::warn!(daemon = %self.site.name, %error, "The control daemon gives no answer.");
                }
            }
        }
        self.health = Some(health.clone());
        self.outbox.health(SourceName::Control, Some(&self.site.name), health).await
    }
}

/// Why a session gave nothing, by either way of asking.
#[derive(Debug, thiserror::Error)]
enum SessionError {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(transparent)]
    Binary(#[from] BinaryError),
}

impl From<SessionError> for LookError {
    fn from(error: SessionError) -> LookError {
        let text = error.to_string().into();
        match error {
            SessionError::Wire(WireError::Timeout { .. })
            | SessionError::Binary(BinaryError::Timeout { .. }) => LookError::Timeout(text),
            SessionError::Wire(WireError::Connect { .. } | WireError::TurnedAway { .. })
            | SessionError::Binary(BinaryError::Failed { .. }) => LookError::Refused(text),
            SessionError::Wire(_) | SessionError::Binary(_) => LookError::Failed(text),
        }
    }
}

fn label(result: &Result<Look, LookError>) -> QueryResult {
    match result {
        Ok(_) => QueryResult::Ok,
        Err(LookError::Timeout(_)) => QueryResult::Timeout,
        Err(LookError::Refused(_)) => QueryResult::Refused,
        Err(LookError::Failed(_)) => QueryResult::Error,
    }
}

/// What a change of makes it worth to look at the clients.
fn states(look: &Look) -> Vec<(u32, Option<crate::event::ServerStatus>)> {
    look.servers.iter().map(|server| (server.pid, server.status)).collect()
}

#[cfg(test)]
mod tests;
