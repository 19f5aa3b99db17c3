//! Finds the control daemons of the node: configured ones, running ones, and what killed ones left behind.
//!
//! A daemon is its pipe directory: two ways to the same directory (a host path, and a container's path through
//! `/proc/PID/root`) are one daemon. Its process is whoever holds the lock in that directory.

pub mod glob;
pub mod layout;
mod log_place;
pub mod process;
mod scan;

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, oneshot, watch};
use tokio::time::Instant;

use crate::config::{self, Config};
use crate::event::{DaemonSite, EventKind, SourceName, under};
use crate::identity::DaemonName;
use crate::source::process::proc::ProcRoot;
use crate::source::{Outbox, Shutdown, live};

use scan::Places;

/// Requests for a scan that come within this time are answered by one.
const SPACING: Duration = Duration::from_millis(250);
/// A scan that takes longer is stuck: some process or file system does not answer.
const STUCK_AFTER: Duration = Duration::from_secs(10);
/// More daemons than this are not watched: in `/tmp` anybody can make a directory that looks like one's.
const MAX_DISCOVERED: usize = 64;

/// Asks for a scan at once. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ScanHandle(Arc<Notify>);

impl ScanHandle {
    /// Scans soon, whatever the interval says.
    pub fn scan_now(&self) {
        self.0.notify_one();
    }
}

/// Finds daemons, again and again.
pub struct Discovery {
    places: Arc<Places>,
    interval: Duration,
    outbox: Outbox,
    requests: Arc<Notify>,
    /// What the model was told of.
    known: Vec<DaemonSite>,
    sites: watch::Sender<Vec<DaemonSite>>,
    has_scanned: bool,
    health: Option<Result<(), Arc<str>>>,
}

impl Discovery {
    /// A discovery, the handle that asks for a scan, and the list of daemons, which starts empty and counts as changed
    /// at the first scan, whatever that finds.
    ///
    /// `known` is what an earlier discovery has told the model of. What of it is not found any more, by a changed
    /// configuration too, is told to be gone.
    pub fn new(
        config: &Config,
        outbox: Outbox,
        known: Vec<DaemonSite>,
    ) -> (Discovery, ScanHandle, watch::Receiver<Vec<DaemonSite>>) {
        let requests = Arc::new(Notify::new());
        let (sites, seen) = watch::channel(Vec::new());
        let config::Discovery { enabled, pipe_directories, interval } = config.discovery.clone();
        let places = Places {
            configured: config.daemons.clone(),
            patterns: enabled.then(|| {
                let own = pipe_directories.into_iter().map(PathBuf::from);
                own.chain(layout::WELL_KNOWN.map(PathBuf::from)).collect()
            }),
            proc: ProcRoot::new(config.host.proc.clone()),
            pod_logs: config.host.pod_logs.clone(),
        };
        let discovery = Discovery {
            places: Arc::new(places),
            interval,
            outbox,
            requests: requests.clone(),
            known,
            sites,
            has_scanned: false,
            health: None,
        };
        (discovery, ScanHandle(requests), seen)
    }

    /// Scans until the program stops or the model is gone. Returns what the model was told of.
    pub async fn run(mut self, mut shutdown: Shutdown) -> Vec<DaemonSite> {
        let mut due = Instant::now();
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(due) => {}
                () = self.requests.notified() => {}
                () = shutdown.wait() => return self.known,
            }
            let is_ours = tokio::select! {
                is_ours = self.scan() => is_ours,
                () = shutdown.wait() => return self.known,
            };
            if !is_ours {
                return self.known;
            }
            due = Instant::now() + self.interval;
            tokio::time::sleep(SPACING.min(self.interval)).await;
        }
    }

    /// Scans once; `false`: the model is gone.
    async fn scan(&mut self) -> bool {
        let places = self.places.clone();
        let known = self.known.clone();
        let (answer, mut answered) = oneshot::channel();
        // A thread of its own: reading about a process can take for ever, and must not keep the program from ending.
        let spawned = std::thread::Builder::new().name("discovery".into()).spawn(move || {
            let _nobody_waits = answer.send(scan::scan(&places, &known));
        });
        if let Err(error) = spawned {
            return self.tell_health(Err(format!("cannot start a thread: {error}").into())).await;
        }
        let outcome = match tokio::time::timeout(STUCK_AFTER, &mut answered).await {
            Ok(outcome) => outcome,
            Err(_elapsed) => {
                let problem = format!("a scan takes longer than {} s", STUCK_AFTER.as_secs());
                if !self.tell_health(Err(problem.into())).await {
                    return false;
                }
                answered.await // never a second scan while one hangs
            }
        };
        let Ok(scan) = outcome else {
            return self.tell_health(Err("a scan failed unexpectedly".into())).await;
        };
        let (sites, mut problems) = self.name(scan.found);
        problems.extend(scan.problems);
        let events = self.changes(&sites);
        // The model knows a daemon before its sources tell of it.
        if !self.outbox.send(events).await {
            return false;
        }
        self.known.clone_from(&sites);
        let is_first = !std::mem::replace(&mut self.has_scanned, true);
        self.sites.send_if_modified(|told| std::mem::replace(told, sites.clone()) != sites || is_first);
        let problem = (!problems.is_empty()).then(|| Arc::from(problems.join("; ")));
        self.tell_health(problem.map_or(Ok(()), Err)).await
    }

    /// Gives every daemon a name of its own, the one that it had before where it had one.
    fn name(&self, found: Vec<DaemonSite>) -> (Vec<DaemonSite>, Vec<String>) {
        let known = &self.known;
        let mut problems = Vec::new();
        let mut taken: BTreeSet<DaemonName> =
            self.places.configured.iter().map(|daemon| daemon.name.clone()).collect();
        let was = |found: &DaemonSite| {
            let is_it = |site: &&DaemonSite| {
                !site.is_configured
                    && site.pipe_directory == found.pipe_directory
                    && (site.root == found.root || (site.process.is_some() && site.process == found.process))
            };
            known.iter().find(is_it).map(|site| site.name.clone())
        };
        taken.extend(found.iter().filter(|site| !site.is_configured).filter_map(was));
        let mut sites = Vec::new();
        let mut left_out = 0;
        for mut site in found {
            if !site.is_configured {
                if sites.len() >= MAX_DISCOVERED + self.places.configured.len() {
                    left_out += 1;
                    continue;
                }
                site.name =
                    was(&site).unwrap_or_else(|| free_name(&layout::name(&site.pipe_directory), &taken));
                taken.insert(site.name.clone());
            }
            sites.push(site);
        }
        if left_out > 0 {
            problems.push(format!(
                "{left_out} pipe directories beyond the first {MAX_DISCOVERED} are not watched"
            ));
        }
        (sites, problems)
    }

    fn changes(&self, sites: &[DaemonSite]) -> Vec<crate::event::Event> {
        let known = &self.known;
        let now = self.outbox.clock.now();
        let mut events = Vec::new();
        // A name that means another directory now, by a changed configuration, means another daemon.
        let is_same = |known: &DaemonSite, site: &DaemonSite| {
            known.name == site.name && known.pipe_directory == site.pipe_directory
        };
        for gone in known.iter().filter(|known| !sites.iter().any(|site| is_same(known, site))) {
            tracing::info!(
                daemon = %gone.name,
                "A control daemon is watched no more: its directories are gone, or the configuration leaves it out."
            );
            events.push(live(now, EventKind::DaemonGone(gone.name.clone())));
        }
        for site in sites.iter().filter(|site| !known.contains(site)) {
            tracing::info!(
                daemon = %site.name,
                pipe_directory = %site.pipe_path().display(),
                log = ?site.log,
                pid = site.process.map(|process| process.pid),
                "A control daemon is watched.",
            );
            events.push(live(now, EventKind::DaemonFound(site.clone())));
        }
        events
    }

    async fn tell_health(&mut self, health: Result<(), Arc<str>>) -> bool {
        if self.health.as_ref() != Some(&health) {
            if let Err(error) = &health {
                tracing::warn!(%error, "Discovery does not see every control daemon.");
            }
            self.health = Some(health.clone());
        } else if health.is_err() {
            return true;
        }
        self.outbox.health(SourceName::Discovery, None, health).await
    }
}

/// The name, or the first free one of `name-2`, `name-3`, ….
fn free_name(name: &str, taken: &BTreeSet<DaemonName>) -> DaemonName {
    let mut free = DaemonName::from(name);
    let mut n = 1_u32;
    while taken.contains(&free) {
        n += 1;
        free = format!("{name}-{n}").into();
    }
    free
}

/// Device and inode: the same directory by whatever path.
fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

#[cfg(test)]
mod tests;
