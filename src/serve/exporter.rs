//! Everything that runs, as one thing that is started, reconfigured and stopped.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use arc_swap::ArcSwap;
use tokio::sync::{broadcast, watch};
use tokio::task::JoinHandle;

use super::owner::{Outputs, Owner};
use super::sources::{Handles, Legacy, Sources};
use crate::cli::serve::Serve;
use crate::config::{Collectors, Config, ControlClient};
use crate::engine::{Node, Settings};
use crate::event::{EventKind, SourceName};
use crate::http::{AppState, Readiness, Server};
use crate::outlet::Outlets;
use crate::source::{Outbox, Shutdown};
use crate::telemetry::Telemetry;
use crate::time::Clock;

/// Incident changes that an event stream may lag behind.
const STREAM_LAG: usize = 256;

/// How long sources get to tell what they see first, before the exporter calls itself ready.
const FIRST_LOOK: Duration = Duration::from_millis(50);

/// The running exporter.
pub struct Exporter {
    config: Arc<Config>,
    /// Whether the command line wants a series per client, whatever the configuration says.
    collects_clients: bool,
    collectors: Arc<ArcSwap<Collectors>>,
    telemetry: Telemetry,
    outbox: Outbox,
    sources: Option<Sources>,
    handles: watch::Sender<Arc<Handles>>,
    settings: watch::Sender<Settings>,
    outlets: watch::Sender<Arc<Outlets>>,
    outlets_running: Option<Running>,
    owner: Running,
    server: Running,
    reload_web: Box<dyn Fn() + Send + Sync>,
}

/// A task and what stops it.
struct Running {
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Running {
    fn start<F>(task: impl FnOnce(Shutdown) -> F) -> Running
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (stop, stopped) = Shutdown::new();
        Running { stop, task: tokio::spawn(task(stopped)) }
    }

    async fn stop(self) -> anyhow::Result<()> {
        self.stop.send_replace(true);
        self.task.await.context("a task ended unexpectedly")
    }
}

impl Exporter {
    /// Starts everything.
    pub async fn start(
        options: &Serve,
        config: Arc<Config>,
        telemetry: Telemetry,
    ) -> anyhow::Result<Exporter> {
        let clock = Clock::new();
        let settings = config.model()?;
        let mut node = Node::new(settings.clone(), clock.now());
        let outputs = Outputs {
            snapshots: Arc::new(ArcSwap::from_pointee(node.snapshot())),
            generations: watch::Sender::new(0),
            incidents: broadcast::Sender::new(STREAM_LAG),
        };
        let (latch, readiness) = Readiness::new();
        let collects_clients = options.collect_clients;
        let collectors = Arc::new(ArcSwap::from_pointee(collectors(&config, collects_clients)));
        let state = AppState {
            snapshots: outputs.snapshots.clone(),
            generations: outputs.generations.subscribe(),
            incidents: outputs.incidents.clone(),
            telemetry: telemetry.clone(),
            collectors: collectors.clone(),
            readiness,
        };
        let server = Server::bind(&options.web, state).await?;
        let reload_web = Box::new(server.reloader());
        let server = Running::start(|stopped| server.serve(stopped));

        let (outlets, restored) = Outlets::new(&config, outputs.snapshots.clone(), &telemetry)?;
        node.restore(restored.incidents);
        let outlets_running = Running::start(|stopped| outlets.clone().run(stopped));
        let (outbox, queue) = Outbox::new(clock);
        let sources = Sources::start(&config, &outbox, &telemetry, Legacy::default());
        let (handles, handles_seen) = watch::channel(sources.handles.clone());
        let (settings, settings_seen) = watch::channel(settings);
        let (outlets, outlets_seen) = watch::channel(outlets);
        let owner =
            Owner::new(node, clock, queue, outputs.clone(), outlets_seen, handles_seen, settings_seen);
        let owner = Running::start(|stopped| owner.run(stopped));
        tokio::time::sleep(FIRST_LOOK).await;
        drop(latch);
        Ok(Exporter {
            config,
            collects_clients,
            collectors,
            telemetry,
            outbox,
            sources: Some(sources),
            handles,
            settings,
            outlets,
            outlets_running: Some(outlets_running),
            owner,
            server,
            reload_web,
        })
    }

    /// Reads the web configuration again.
    pub fn reload_web(&self) {
        (self.reload_web)();
    }

    /// Takes over a changed configuration. Only what it changes is started again.
    pub async fn reconfigure(&mut self, config: Arc<Config>) {
        let old = std::mem::replace(&mut self.config, config.clone());
        match config.model() {
            Ok(settings) => {
                self.settings.send_replace(settings);
            }
            Err(error) => {
                tracing::error!(
                    error = format!("{error:#}"),
                    "The Xid catalogue cannot be used; the old one stays."
                );
            }
        }
        if old.collectors != config.collectors {
            self.collectors.store(Arc::new(collectors(&config, self.collects_clients)));
        }
        let outlets_differ = old.alertmanagers != config.alertmanagers
            || old.remediation != config.remediation
            || old.state != config.state;
        if outlets_differ && let Err(error) = self.replace_outlets(&config).await {
            tracing::error!(
                error = format!("{error:#}"),
                "The new outlets cannot be used; the old ones stay."
            );
        }
        let sources_differ = old.daemons != config.daemons
            || old.discovery != config.discovery
            || old.control != config.control
            || old.nvml != config.nvml
            || old.kernel_log != config.kernel_log
            || old.host != config.host
            || old.checkpoints != config.checkpoints
            || old.state != config.state;
        if sources_differ {
            // One after the other: two readers of one log would tell everything twice.
            let legacy = match self.sources.take() {
                Some(sources) => sources.stop().await,
                None => Legacy::default(),
            };
            for source in switched_off(&old, &config) {
                self.outbox.tell(EventKind::SourceOff(source)).await;
            }
            let started = Sources::start(&config, &self.outbox, &self.telemetry, legacy);
            self.handles.send_replace(started.handles.clone());
            self.sources = Some(started);
        }
    }

    /// One after the other here too: there is one journal.
    async fn replace_outlets(&mut self, config: &Config) -> anyhow::Result<()> {
        if let Some(running) = self.outlets_running.take() {
            running.stop().await?;
        }
        let earlier = self.outlets.borrow().clone();
        let made = earlier.with_config(config);
        let outlets = made.as_ref().map_or(earlier, Arc::clone);
        self.outlets.send_replace(outlets.clone());
        self.outlets_running = Some(Running::start(|stopped| outlets.run(stopped)));
        made.map(|_| ()).map_err(Into::into)
    }

    /// Stops everything: sources first, so that what they have read is in the model and their cursors are saved, then
    /// the model, then who is told by it.
    pub async fn stop(self) -> anyhow::Result<()> {
        if let Some(sources) = self.sources {
            sources.stop().await;
        }
        self.owner.stop().await?;
        if let Some(outlets) = self.outlets_running {
            outlets.stop().await?;
        }
        let outlets = self.outlets.borrow().clone();
        outlets.finish_commands().await;
        self.server.stop().await
    }
}

/// Which optional series to show.
fn collectors(config: &Config, collects_clients: bool) -> Collectors {
    let clients = config.collectors.clients || collects_clients;
    Collectors { clients, ..config.collectors.clone() }
}

/// The sources that were watched and are not any more.
fn switched_off(old: &Config, new: &Config) -> Vec<SourceName> {
    let is_on = |config: &Config| {
        [
            (SourceName::Nvml, config.nvml.enabled),
            (SourceName::KernelLog, config.kernel_log.enabled),
            (SourceName::Control, config.control.client != ControlClient::Off),
        ]
    };
    let both = is_on(old).into_iter().zip(is_on(new));
    both.filter(|((_, was), (_, is))| *was && !*is).map(|((source, _), _)| source).collect()
}
