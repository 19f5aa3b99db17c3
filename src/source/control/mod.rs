//! The control daemon: who is there, whether it lives, and what it answers.
//!
//! [`discovery::Discovery`] finds the daemons of the node; a [`ControlWatch`] per daemon watches its lock and asks it.

pub mod answers;
pub mod binary;
pub mod discovery;
pub mod liveness;
pub mod pace;
mod querier;
pub mod wire;

use std::sync::Arc;

use tokio::sync::{Notify, watch};

use crate::config::{Control, ControlClient};
use crate::event::DaemonSite;
use crate::source::process::proc::ProcRoot;
use crate::source::{Outbox, Shutdown};
use crate::telemetry::Telemetry;

use discovery::ScanHandle;

/// Asks a daemon's [`ControlWatch`] to look at once. Cheap to clone.
#[derive(Debug, Clone)]
pub struct LookHandle(Arc<Notify>);

impl LookHandle {
    /// Looks as soon as the pace allows: requests that come together are answered by one session, and none shortens
    /// the wait for a daemon that did not answer.
    pub fn look_now(&self) {
        self.0.notify_one();
    }
}

/// Watches one control daemon: its lock, and its answers.
pub struct ControlWatch {
    watcher: liveness::Watcher,
    querier: Option<querier::Querier>,
}

impl ControlWatch {
    /// A watch of the daemon of `site`, and the handle that asks it to look. `rescan` is told when the daemon comes
    /// or goes.
    pub fn new(
        site: DaemonSite,
        settings: &Control,
        proc: ProcRoot,
        outbox: Outbox,
        telemetry: Telemetry,
        rescan: Option<ScanHandle>,
    ) -> (ControlWatch, LookHandle) {
        let requests = Arc::new(Notify::new());
        let (state, state_seen) = watch::channel(None);
        let (unanswered, unanswered_seen) = watch::channel(0);
        let watcher = liveness::Watcher {
            site: site.clone(),
            proc: proc.clone(),
            outbox: outbox.clone(),
            unanswered: unanswered_seen,
            state,
            rescan,
        };
        let querier = querier::Querier {
            site,
            settings: settings.clone(),
            proc,
            outbox,
            telemetry,
            requests: requests.clone(),
            state: state_seen,
            unanswered,
            client: settings.client,
            search: std::env::var_os("PATH"),
            health: None,
        };
        let querier = (settings.client != ControlClient::Off).then_some(querier);
        (ControlWatch { watcher, querier }, LookHandle(requests))
    }

    /// Watches until the program stops or the model is gone.
    pub async fn run(self, shutdown: Shutdown) {
        let ControlWatch { watcher, querier } = self;
        match querier {
            Some(querier) => {
                tokio::join!(watcher.run(shutdown.clone()), querier.run(shutdown));
            }
            None => watcher.run(shutdown).await,
        }
    }
}
