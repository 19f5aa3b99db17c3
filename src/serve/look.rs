//! The node seen from a command, without an exporter that serves it: the same sources and model, nothing kept, nothing
//! sent, nobody restarted.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::{broadcast, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::owner::{Outputs, Owner};
use super::sources::{Legacy, Sources};
use crate::config::{Config, ControlClient, Remediation};
use crate::engine::Node;
use crate::engine::snapshot::{DaemonState, Snapshot};
use crate::event::{LogPlace, SourceName};
use crate::identity::DaemonName;
use crate::outlet::Outlets;
use crate::source::{Outbox, Shutdown};
use crate::telemetry::Telemetry;
use crate::time::Clock;

/// When every source has reported and nothing new has come for this long, the picture is complete.
const QUIET: Duration = Duration::from_millis(300);

/// How long the sources get to end.
const STOP: Duration = Duration::from_secs(1);

/// A source, and the daemon that it is for.
pub type SourceKey = (SourceName, Option<DaemonName>);

/// Sources and model, running.
pub struct Look {
    config: Config,
    outputs: Outputs,
    sources: Sources,
    stop: watch::Sender<bool>,
    owner: JoinHandle<()>,
    /// What the owner listens to; it must not see their end.
    _handles: watch::Sender<Arc<super::sources::Handles>>,
    _settings: watch::Sender<crate::engine::Settings>,
    _outlets: watch::Sender<Arc<Outlets>>,
}

impl Look {
    /// Starts looking. Of the configuration, what would write, post or run commands is left out.
    ///
    /// # Errors
    /// When the Xid catalogue of the configuration cannot be used.
    pub fn start(config: &Config) -> anyhow::Result<Look> {
        let mut config = config.clone();
        config.state.directory = None;
        config.alertmanagers.clear();
        config.remediation = Remediation::default();
        let telemetry = Telemetry::new();
        let clock = Clock::new();
        let settings = config.model()?;
        let node = Node::new(settings.clone(), clock.now());
        let outputs = Outputs {
            snapshots: Arc::new(ArcSwap::from_pointee(node.snapshot())),
            generations: watch::Sender::new(0),
            incidents: broadcast::Sender::new(1),
        };
        let (outlets, _nothing_restored) = Outlets::new(&config, outputs.snapshots.clone(), &telemetry)?;
        let (outbox, queue) = Outbox::new(clock);
        let sources = Sources::start(&config, &outbox, &telemetry, Legacy::default());
        let (handles, handles_seen) = watch::channel(sources.handles.clone());
        let (settings, settings_seen) = watch::channel(settings);
        let (outlets, outlets_seen) = watch::channel(outlets);
        let owner =
            Owner::new(node, clock, queue, outputs.clone(), outlets_seen, handles_seen, settings_seen);
        let (stop, stopped) = Shutdown::new();
        let owner = tokio::spawn(owner.run(stopped));
        Ok(Look {
            config,
            outputs,
            sources,
            stop,
            owner,
            _handles: handles,
            _settings: settings,
            _outlets: outlets,
        })
    }

    /// What is seen now.
    pub fn snapshot(&self) -> Arc<Snapshot> {
        self.outputs.snapshots.load_full()
    }

    /// Tells when what is seen changes.
    pub fn generations(&self) -> watch::Receiver<u64> {
        self.outputs.generations.subscribe()
    }

    /// Waits until every source has told something and nothing new comes, but no longer than `limit`.
    pub async fn settle(&self, limit: Duration) {
        let deadline = Instant::now() + limit;
        let mut generations = self.outputs.generations.subscribe();
        loop {
            let is_complete = self.silent_sources().is_empty();
            let until = if is_complete { deadline.min(Instant::now() + QUIET) } else { deadline };
            let news = tokio::time::timeout_at(until, generations.changed()).await;
            if !matches!(news, Ok(Ok(()))) || Instant::now() >= deadline {
                return;
            }
        }
    }

    /// The sources that should have told something and have not.
    pub fn silent_sources(&self) -> Vec<SourceKey> {
        let snapshot = self.snapshot();
        let told: BTreeSet<SourceKey> =
            snapshot.sources.iter().map(|source| (source.source, source.daemon.clone())).collect();
        expected(&self.config, &snapshot).into_iter().filter(|key| !told.contains(key)).collect()
    }

    /// Ends the sources. One that hangs is left to the end of the program.
    pub async fn stop(self) {
        self.stop.send_replace(true);
        self.owner.abort();
        let _hangs = tokio::time::timeout(STOP, self.sources.stop()).await;
    }
}

/// The sources that tell how they fare without being asked about anything.
fn expected(config: &Config, snapshot: &Snapshot) -> Vec<SourceKey> {
    let mut keys = vec![(SourceName::Discovery, None)];
    if config.nvml.enabled {
        keys.push((SourceName::Nvml, None));
    }
    if config.kernel_log.enabled {
        keys.push((SourceName::KernelLog, None));
    }
    for daemon in &snapshot.daemons {
        let of_daemon = |source| (source, Some(daemon.name.clone()));
        keys.push(of_daemon(SourceName::ControlLock));
        let is_there = !matches!(daemon.state, DaemonState::Down | DaemonState::Stale);
        if config.control.client != ControlClient::Off && is_there {
            keys.push(of_daemon(SourceName::Control));
        }
        match daemon.log {
            LogPlace::Files => {
                keys.extend([of_daemon(SourceName::ControlLog), of_daemon(SourceName::ServerLog)]);
            }
            _ => keys.push(of_daemon(SourceName::DaemonOutput)),
        }
    }
    keys
}
