//! The sources of a configuration: started together, stopped together, and per daemon as daemons come and go.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::config::Config;
use crate::engine::snapshot::Snapshot;
use crate::event::DaemonSite;
use crate::identity::DaemonName;
use crate::source::control::discovery::Discovery;
use crate::source::control::{ControlWatch, LookHandle, discovery};
use crate::source::kernel_log::KernelLogSource;
use crate::source::mps_log::{LogSettings, LogWatcher, MpsLogSource};
use crate::source::nvml;
use crate::source::process::proc::ProcRoot;
use crate::source::process::source::{ProcessSettings, ProcessSource, ProcessWatcher};
use crate::source::{Outbox, Shutdown};
use crate::telemetry::Telemetry;

/// Where the model's questions go.
pub struct Handles {
    looks: Mutex<BTreeMap<DaemonName, LookHandle>>,
    nvml: Option<nvml::Poke>,
    processes: ProcessWatcher,
}

impl Handles {
    /// Asks a daemon.
    pub fn look(&self, daemon: &DaemonName) {
        if let Some(handle) = self.looks().get(daemon) {
            handle.look_now();
        }
    }

    /// Asks NVML.
    pub fn look_at_gpus(&self) {
        if let Some(poke) = &self.nvml {
            poke.poke();
        }
    }

    /// Where to ask about processes.
    pub fn processes(&self) -> &ProcessWatcher {
        &self.processes
    }

    /// New sources know nothing of what the model asked their predecessors.
    pub fn watch_again(&self, snapshot: &Snapshot) {
        for client in &snapshot.clients {
            self.processes.watch(&client.daemon, client.pid, None);
        }
        for server in &snapshot.servers {
            if let Some(pid) = server.pid {
                self.processes.watch(&server.daemon, pid, None);
            }
        }
    }

    fn looks(&self) -> std::sync::MutexGuard<'_, BTreeMap<DaemonName, LookHandle>> {
        self.looks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What stopped sources hand on to those that take their place.
#[derive(Default)]
pub struct Legacy {
    /// The daemons that the model has been told of.
    daemons: Vec<DaemonSite>,
    /// NVML's threads, while a call hangs.
    nvml: Option<nvml::Left>,
}

/// Running sources. Dropping them does not stop them; [`Sources::stop`] does.
pub struct Sources {
    /// Where the model's questions go.
    pub handles: Arc<Handles>,
    stop: watch::Sender<bool>,
    discovery: JoinHandle<Vec<DaemonSite>>,
    nvml: JoinHandle<Option<nvml::Left>>,
    tasks: Vec<(&'static str, JoinHandle<()>)>,
}

impl Sources {
    /// Starts every source that the configuration wants, after those that left `legacy`.
    pub fn start(config: &Config, outbox: &Outbox, telemetry: &Telemetry, legacy: Legacy) -> Sources {
        let Legacy { daemons: known, nvml: left } = legacy;
        let (stop, stopped) = Shutdown::new();
        let mut tasks: Vec<(&'static str, JoinHandle<()>)> = Vec::new();

        let (processes, watcher) =
            ProcessSource::new(&ProcessSettings::from(config), outbox.clone(), telemetry.clone());
        tasks.push(("processes", tokio::spawn(processes.run(stopped.clone()))));

        let poke = config.nvml.enabled.then(nvml::Poke::default);
        let nvml = match &poke {
            Some(poke) => {
                let settings = nvml::Settings::new(&config.nvml, &config.host);
                let (poke, outbox, telemetry) = (poke.clone(), outbox.clone(), telemetry.clone());
                let run = nvml::run(settings, poke, outbox, telemetry, left, stopped.clone());
                tokio::spawn(async move {
                    run.await.unwrap_or_else(|error| {
                        tracing::error!(%error, "NVML cannot be watched: its threads could not be started.");
                        None
                    })
                })
            }
            None => tokio::spawn(async { left }),
        };

        if config.kernel_log.enabled {
            let source = KernelLogSource::new(
                &config.kernel_log,
                config.state.directory.clone(),
                outbox.clone(),
                telemetry.clone(),
            );
            tasks.push(("kernel_log", tokio::spawn(source.run(stopped.clone()))));
        }

        let handles = Arc::new(Handles { looks: Mutex::default(), nvml: poke, processes: watcher });
        let earlier = known.iter().map(|site| site.name.clone()).collect();
        let (discovery, rescan, sites) = Discovery::new(config, outbox.clone(), known);
        let discovery = tokio::spawn(discovery.run(stopped.clone()));
        let daemons = Daemons {
            config: config.clone(),
            outbox: outbox.clone(),
            telemetry: telemetry.clone(),
            handles: handles.clone(),
            rescan,
            logs: LogSettings::new(config.state.directory.clone(), ProcRoot::new(&config.host.proc)),
            log_watcher: LogWatcher::new(),
            running: BTreeMap::new(),
            earlier,
        };
        tasks.push(("daemons", tokio::spawn(daemons.run(sites, stopped))));
        Sources { handles, stop, discovery, nvml, tasks }
    }

    /// Stops every source and waits for it: cursors are then on the disk.
    pub async fn stop(self) -> Legacy {
        self.stop.send_replace(true);
        let ended = |task: &'static str, error: tokio::task::JoinError| {
            tracing::error!(task, %error, "A source ended unexpectedly.");
        };
        for (name, task) in self.tasks {
            if let Err(error) = task.await {
                ended(name, error);
            }
        }
        let daemons = self.discovery.await.unwrap_or_else(|error| {
            ended("discovery", error);
            Vec::new()
        });
        let nvml = self.nvml.await.unwrap_or_else(|error| {
            ended("nvml", error);
            None
        });
        Legacy { daemons, nvml }
    }
}

/// The sources of each daemon.
struct Daemons {
    config: Config,
    outbox: Outbox,
    telemetry: Telemetry,
    handles: Arc<Handles>,
    rescan: discovery::ScanHandle,
    logs: LogSettings,
    log_watcher: LogWatcher,
    running: BTreeMap<DaemonName, Running>,
    /// Whom earlier sources followed, until it is known who of them is still wanted.
    earlier: Vec<DaemonName>,
}

/// The sources of one daemon.
struct Running {
    site: DaemonSite,
    control: Task,
    log: Task,
    /// Tells the log source of changes: it keeps its place over a restart of the daemon.
    log_site: watch::Sender<DaemonSite>,
}

/// A task that can be stopped on its own.
struct Task {
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Task {
    async fn stop(self) {
        self.stop.send_replace(true);
        let _ended = self.task.await;
    }
}

impl Daemons {
    async fn run(mut self, mut sites: watch::Receiver<Vec<DaemonSite>>, mut shutdown: Shutdown) {
        loop {
            tokio::select! {
                () = shutdown.wait() => break,
                changed = sites.changed() => if changed.is_err() { break },
            }
            let wanted = sites.borrow_and_update().clone();
            self.follow(wanted).await;
        }
        let names: Vec<DaemonName> = self.running.keys().cloned().collect();
        for name in names {
            self.end(&name).await;
        }
    }

    /// Makes the running sources those of the wanted daemons.
    async fn follow(&mut self, wanted: Vec<DaemonSite>) {
        let mut gone = std::mem::take(&mut self.earlier);
        gone.extend(self.running.keys().cloned());
        gone.retain(|name| !wanted.iter().any(|site| site.name == *name));
        for name in gone {
            self.end(&name).await;
            self.telemetry.forget_daemon(&name);
        }
        for site in wanted {
            self.handles.processes.daemon(&site.name, site.process);
            match self.running.remove(&site.name) {
                None => {
                    let control = self.start_control(&site);
                    let (log, log_site) = self.start_log(&site);
                    self.running.insert(site.name.clone(), Running { site, control, log, log_site });
                }
                Some(running) if running.site == site => {
                    self.running.insert(site.name.clone(), running);
                }
                Some(running) => {
                    running.log_site.send_replace(site.clone());
                    running.control.stop().await;
                    let control = self.start_control(&site);
                    self.running.insert(site.name.clone(), Running { site, control, ..running });
                }
            }
        }
    }

    fn start_control(&self, site: &DaemonSite) -> Task {
        let (stop, stopped) = Shutdown::new();
        let (watch, look) = ControlWatch::new(
            site.clone(),
            &self.config.control,
            ProcRoot::new(&self.config.host.proc),
            self.outbox.clone(),
            self.telemetry.clone(),
            Some(self.rescan.clone()),
        );
        self.handles.looks().insert(site.name.clone(), look);
        Task { stop, task: tokio::spawn(watch.run(stopped)) }
    }

    fn start_log(&self, site: &DaemonSite) -> (Task, watch::Sender<DaemonSite>) {
        let (stop, stopped) = Shutdown::new();
        let (log_site, sites) = watch::channel(site.clone());
        let source = MpsLogSource::new(
            sites,
            self.logs.clone(),
            self.outbox.clone(),
            self.telemetry.clone(),
            self.log_watcher.clone(),
        );
        (Task { stop, task: tokio::spawn(source.run(stopped)) }, log_site)
    }

    async fn end(&mut self, name: &DaemonName) {
        self.handles.looks().remove(name);
        if let Some(running) = self.running.remove(name) {
            running.control.stop().await;
            running.log.stop().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ControlClient, Daemon, LogChoice};
    use crate::event::EventKind;
    use crate::telemetry::QueryResult;
    use crate::time::Clock;

    /// Waits for an event that tells what `wanted` wants.
    async fn told<T>(
        queue: &mut tokio::sync::mpsc::Receiver<Vec<crate::event::Event>>,
        wanted: impl Fn(EventKind) -> Option<T>,
    ) -> T {
        let told = async {
            loop {
                let batch = queue.recv().await.expect("a source lives");
                if let Some(told) = batch.into_iter().find_map(|event| wanted(event.kind)) {
                    return told;
                }
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(10), told).await.expect("waited in vain")
    }

    #[tokio::test]
    async fn a_daemon_that_a_changed_configuration_leaves_out_is_told_to_be_gone_and_its_series_end() {
        let directory = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.discovery.enabled = false;
        config.nvml.enabled = false;
        config.kernel_log.enabled = false;
        config.control.client = ControlClient::Off;
        config.state.directory = None;
        config.daemons = vec![Daemon {
            name: "default".into(),
            pipe_directory: directory.path().into(),
            log_directory: directory.path().into(),
            log: LogChoice::Files,
        }];
        let telemetry = Telemetry::new();
        let (outbox, mut queue) = Outbox::new(Clock::new());
        let sources = Sources::start(&config, &outbox, &telemetry, Legacy::default());
        told(&mut queue, |kind| matches!(kind, EventKind::DaemonFound(_)).then_some(())).await;
        let legacy = sources.stop().await;
        assert_eq!(legacy.daemons.iter().map(|site| &*site.name).collect::<Vec<_>>(), ["default"]);

        let has_series = || {
            telemetry.registry().gather().iter().any(|family| {
                family.get_metric().iter().any(|metric| {
                    metric
                        .get_label()
                        .iter()
                        .any(|label| label.name() == "daemon" && label.value() == "default")
                })
            })
        };
        telemetry.control_query("default", QueryResult::Ok, std::time::Duration::ZERO);
        assert!(has_series());
        config.daemons.clear();
        let sources = Sources::start(&config, &outbox, &telemetry, legacy);
        let gone = told(&mut queue, |kind| match kind {
            EventKind::DaemonGone(name) => Some(name),
            _ => None,
        });
        assert_eq!(&*gone.await, "default");
        for _ in 0..100 {
            if !has_series() {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        assert!(!has_series());
        assert!(sources.stop().await.daemons.is_empty());
    }
}
