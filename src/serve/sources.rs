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

/// Running sources. Dropping them does not stop them; [`Sources::stop`] does.
pub struct Sources {
    /// Where the model's questions go.
    pub handles: Arc<Handles>,
    stop: watch::Sender<bool>,
    tasks: Vec<(&'static str, JoinHandle<()>)>,
}

impl Sources {
    /// Starts every source that the configuration wants.
    pub fn start(config: &Config, outbox: &Outbox, telemetry: &Telemetry) -> Sources {
        let (stop, stopped) = Shutdown::new();
        let mut tasks: Vec<(&'static str, JoinHandle<()>)> = Vec::new();

        let (processes, watcher) =
            ProcessSource::new(&ProcessSettings::from(config), outbox.clone(), telemetry.clone());
        tasks.push(("processes", tokio::spawn(processes.run(stopped.clone()))));

        let poke = config.nvml.enabled.then(nvml::Poke::default);
        if let Some(poke) = &poke {
            let settings = nvml::Settings::new(&config.nvml, &config.host);
            let run = nvml::run(settings, poke.clone(), outbox.clone(), telemetry.clone(), stopped.clone());
            tasks.push((
                "nvml",
                tokio::spawn(async move {
                    if let Err(error) = run.await {
                        tracing::error!(%error, "NVML cannot be watched: its threads could not be started.");
                    }
                }),
            ));
        }

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
        let (discovery, rescan, sites) = Discovery::new(config, outbox.clone());
        tasks.push(("discovery", tokio::spawn(discovery.run(stopped.clone()))));
        let daemons = Daemons {
            config: config.clone(),
            outbox: outbox.clone(),
            telemetry: telemetry.clone(),
            handles: handles.clone(),
            rescan,
            logs: LogSettings::new(config.state.directory.clone(), ProcRoot::new(&config.host.proc)),
            log_watcher: LogWatcher::new(),
            running: BTreeMap::new(),
        };
        tasks.push(("daemons", tokio::spawn(daemons.run(sites, stopped))));
        Sources { handles, stop, tasks }
    }

    /// Stops every source and waits for it: cursors are then on the disk.
    pub async fn stop(self) {
        self.stop.send_replace(true);
        for (name, task) in self.tasks {
            if let Err(error) = task.await {
                tracing::error!(task = name, %error, "A source ended unexpectedly.");
            }
        }
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
            let wanted = sites.borrow_and_update().clone();
            self.follow(wanted).await;
            tokio::select! {
                () = shutdown.wait() => break,
                changed = sites.changed() => if changed.is_err() { break },
            }
        }
        let names: Vec<DaemonName> = self.running.keys().cloned().collect();
        for name in names {
            self.end(&name).await;
        }
    }

    /// Makes the running sources those of the wanted daemons.
    async fn follow(&mut self, wanted: Vec<DaemonSite>) {
        let gone: Vec<DaemonName> = self
            .running
            .keys()
            .filter(|name| !wanted.iter().any(|site| site.name == **name))
            .cloned()
            .collect();
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
