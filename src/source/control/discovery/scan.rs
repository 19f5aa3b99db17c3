//! One look around for control daemons. Blocking.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use crate::config::{Daemon, LogChoice};
use crate::event::{DaemonSite, LockState, LogPlace};
use crate::source::control::liveness::lock_state;
use crate::source::process::proc::ProcRoot;

use super::process::{DaemonProcess, Settings};
use super::{glob, identity, layout, log_place, process, under};

/// Where to look.
#[derive(Debug)]
pub(super) struct Places {
    pub configured: Vec<Daemon>,
    /// Globs of pipe directories; `None`: only the configured ones are watched.
    pub patterns: Option<Vec<PathBuf>>,
    pub proc: ProcRoot,
    pub pod_logs: PathBuf,
}

/// What a look around found.
#[derive(Debug, Default)]
pub(super) struct Scan {
    /// Daemons; the name is empty unless configured.
    pub found: Vec<DaemonSite>,
    /// What could not be seen, as sentences for a person.
    pub problems: Vec<String>,
}

/// A pipe directory and how it is reached.
struct Place {
    root: PathBuf,
    pipe: PathBuf,
    configured: Option<Daemon>,
    /// What was known of it, when nothing else knows better.
    known: Option<DaemonSite>,
}

/// Looks around once. `known` is what the last look found: what is left of it is found again.
pub(super) fn scan(places: &Places, known: &[DaemonSite]) -> Scan {
    let mut scan = Scan::default();
    let mut processes = match process::daemons(&places.proc) {
        Ok(processes) => processes,
        Err(error) => {
            scan.problems.push(error.to_string());
            Vec::new()
        }
    };
    let roots = roots(&places.proc);
    let mut seen = HashSet::new();
    for place in candidates(places, known, &roots) {
        let path = under(&place.root, &place.pipe);
        let id = identity(&path);
        if place.configured.is_none() && (id.is_none() || !layout::is_pipe_directory(&path)) {
            continue;
        }
        if id.is_some_and(|id| !seen.insert(id)) && place.configured.is_none() {
            continue;
        }
        let held = lock_state(&path, &places.proc).ok();
        let owner = owner(&mut processes, id, held);
        scan.found.push(site(places, place, owner.as_ref(), held, &roots));
    }
    if places.patterns.is_none() {
        return scan;
    }
    // Daemons in directories that only they know.
    while !processes.is_empty() {
        let first = processes.remove(0);
        let settings = match &first.settings {
            Ok(settings) => settings.clone(),
            Err(error) => {
                scan.problems
                    .push(format!("a control daemon (pid {}) cannot be placed: {error}", first.process.pid));
                continue;
            }
        };
        let root = reach(&first, &settings, &roots);
        let path = under(&root, &settings.pipe_directory);
        let id = identity(&path);
        if id.is_none_or(|id| !seen.insert(id)) {
            continue; // not there yet, or a process that its daemon has just forked
        }
        let held = lock_state(&path, &places.proc).ok();
        processes.insert(0, first);
        let owner = owner(&mut processes, id, held);
        let place = Place { root, pipe: settings.pipe_directory, configured: None, known: None };
        scan.found.push(site(places, place, owner.as_ref(), held, &roots));
    }
    scan
}

/// Every directory to look into, the surest first.
fn candidates(places: &Places, known: &[DaemonSite], roots: &[PathBuf]) -> Vec<Place> {
    let configured = places.configured.iter().map(|daemon| Place {
        root: PathBuf::new(),
        pipe: daemon.pipe_directory.clone(),
        configured: Some(daemon.clone()),
        known: None,
    });
    let mut all: Vec<Place> = configured.collect();
    let Some(patterns) = &places.patterns else { return all };
    for root in roots {
        for pattern in patterns {
            for path in glob::directories(&under(root, pattern)) {
                let pipe = if root.as_os_str().is_empty() {
                    path
                } else {
                    Path::new("/").join(path.strip_prefix(root).unwrap_or(&path))
                };
                all.push(Place { root: root.clone(), pipe, configured: None, known: None });
            }
        }
    }
    all.extend(known.iter().filter(|site| !site.is_configured && roots.contains(&site.root)).map(|site| {
        Place {
            root: site.root.clone(),
            pipe: site.pipe_directory.clone(),
            configured: None,
            known: Some(site.clone()),
        }
    }));
    for place in &mut all {
        if place.known.is_none() {
            let is_it = |site: &&DaemonSite| site.pipe_directory == place.pipe && site.root == place.root;
            place.known = known.iter().find(is_it).cloned();
        }
    }
    all
}

/// Roots that outlive a daemon: our own, and the host's when that is another one.
fn roots(proc: &ProcRoot) -> Vec<PathBuf> {
    let host = proc.file(1, "root");
    let is_another = identity(&host).is_some_and(|host| Some(host) != identity(Path::new("/")));
    if is_another { vec![PathBuf::new(), host] } else { vec![PathBuf::new()] }
}

/// Takes out the process of a directory: the holder of its lock, else the oldest that was started with it.
fn owner(
    processes: &mut Vec<DaemonProcess>,
    directory: Option<(u64, u64)>,
    held: Option<LockState>,
) -> Option<DaemonProcess> {
    let is_holder = |each: &DaemonProcess| held == Some(LockState::Held(each.process));
    let is_started_with = |each: &DaemonProcess| {
        each.settings.as_ref().is_ok_and(|settings| {
            directory.is_some() && identity(&under(&each.root, &settings.pipe_directory)) == directory
        })
    };
    let at = processes.iter().position(is_holder).or_else(|| match held {
        Some(LockState::Held(_)) => None,
        _ => processes.iter().position(is_started_with),
    });
    let owner = at.map(|at| processes.remove(at));
    // What else was started with this directory is a child that has not become a server yet, or was refused.
    processes.retain(|each| !is_started_with(each));
    owner
}

fn site(
    places: &Places,
    mut place: Place,
    owner: Option<&DaemonProcess>,
    held: Option<LockState>,
    roots: &[PathBuf],
) -> DaemonSite {
    let settings = owner.and_then(|owner| owner.settings.clone().ok());
    let log_directory = match (&place.configured, owner, &settings) {
        (Some(daemon), _, _) => daemon.log_directory.clone(),
        (None, Some(owner), Some(settings)) => {
            let beside = layout::log_directory(&place.root, &place.pipe);
            let is_known_here = identity(&under(&owner.root, &settings.log_directory))
                .is_some_and(|log| identity(&under(&place.root, &beside)) == Some(log));
            if is_known_here {
                beside
            } else {
                place.root = reach(owner, settings, roots);
                place.pipe.clone_from(&settings.pipe_directory);
                settings.log_directory.clone()
            }
        }
        (None, ..) => match &place.known {
            Some(known) => known.log_directory.clone(),
            None => layout::log_directory(&place.root, &place.pipe),
        },
    };
    let choice = place.configured.as_ref().map_or(LogChoice::Auto, |daemon| daemon.log.clone());
    let log = log_place::find(&choice, owner, &places.proc, &places.pod_logs)
        .or_else(|| place.known.as_ref().map(|known| known.log.clone()))
        .unwrap_or(LogPlace::Files);
    let holder = match held {
        Some(LockState::Held(process)) => Some(process),
        _ => owner.map(|owner| owner.process),
    };
    let started_at = owner.and_then(|owner| owner.started_at).or_else(|| {
        let boot = places.proc.boot_time().ok()?;
        places.proc.started_at(boot, holder?.start)
    });
    DaemonSite {
        name: place.configured.as_ref().map(|daemon| daemon.name.clone()).unwrap_or_default(),
        pipe_directory: place.pipe,
        log_directory,
        root: place.root,
        process: holder,
        started_at,
        log,
        visible_devices: settings.and_then(|settings| settings.visible_devices),
        is_configured: place.configured.is_some(),
    }
}

/// The root through which both directories of a daemon are the ones that it sees, preferably one that outlives it.
fn reach(owner: &DaemonProcess, settings: &Settings, roots: &[PathBuf]) -> PathBuf {
    let through = |root: &Path, path: &Path| identity(&under(root, path));
    let both =
        |root: &Path| (through(root, &settings.pipe_directory), through(root, &settings.log_directory));
    // Without the right to look through /proc/PID/root, our own view is all there is.
    let is_hidden = identity(&owner.root).is_none();
    let own = both(&owner.root);
    let found = if is_hidden { roots.first() } else { roots.iter().find(|root| both(root) == own) };
    found.unwrap_or(&owner.root).clone()
}
