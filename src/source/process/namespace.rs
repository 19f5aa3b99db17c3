//! A daemon's pids, found in the proc file system.
//!
//! Control daemon and server name clients by the pids of their own namespace. Mostly that is the one that the proc mount
//! shows; a daemon in a container without the host's pid namespace has one further in, and its clients live there or
//! deeper. `NSpid` gives a process's pid on every level, the inode of its namespace tells siblings of a level apart.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::OwnedFd;

use super::proc::{ProcError, ProcRoot};
use crate::identity::ProcessId;
use crate::sys;

/// The pid namespace that a daemon lives in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum View {
    /// The one that the proc mount shows: pids are the same.
    Same,
    /// One further in.
    Nested {
        /// Position of its pids in `NSpid`, from 1 for the first one further in.
        level: usize,
        /// Its inode.
        namespace: u64,
    },
}

impl View {
    /// Where this daemon's process lives. [`ProcError::Gone`] when it is not that process any more.
    pub fn of(proc: &ProcRoot, daemon: ProcessId) -> Result<View, ProcError> {
        let nested = proc.status(daemon.pid)?.namespace_pids.len().saturating_sub(1);
        let view = match nested {
            0 => View::Same,
            level => View::Nested { level, namespace: proc.pid_namespace(daemon.pid)? },
        };
        if proc.is_alive(daemon)? {
            Ok(view)
        } else {
            Err(ProcError::Gone { path: proc.file(daemon.pid, "stat") })
        }
    }
}

/// What became of a pid that was looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Located {
    /// It is this one in the proc mount.
    At(u32),
    /// No process of that namespace has it.
    Absent,
    /// A process may be it, but its namespace may not be looked at.
    Hidden,
}

/// Finds pids of the namespace `namespace` on `level`, by one pass over all processes.
pub fn locate(
    proc: &ProcRoot,
    level: usize,
    namespace: u64,
    pids: &[u32],
) -> Result<HashMap<u32, Located>, ProcError> {
    let mut found: HashMap<u32, Located> = pids.iter().map(|pid| (*pid, Located::Absent)).collect();
    for candidate in proc.pids()? {
        // One that has ended since is none.
        let Ok(status) = proc.status(candidate) else { continue };
        let Some(place) = status.namespace_pids.get(level).and_then(|pid| found.get_mut(pid)) else {
            continue;
        };
        match is_within(proc, candidate, status.namespace_pids.len() - 1 - level, namespace) {
            Ok(true) => *place = Located::At(candidate),
            Err(error) if !error.is_gone() && *place == Located::Absent => *place = Located::Hidden,
            Ok(false) | Err(_) => {}
        }
    }
    Ok(found)
}

/// Whether the namespace that lies `depth` levels above a process's own is this one.
fn is_within(proc: &ProcRoot, pid: u32, depth: usize, namespace: u64) -> Result<bool, ProcError> {
    if depth == 0 {
        return Ok(proc.pid_namespace(pid)? == namespace);
    }
    let path = proc.file(pid, "ns/pid");
    let mut here: OwnedFd = match File::open(&path) {
        Ok(file) => file.into(),
        Err(error) => return Err(ProcError::new(path, error)),
    };
    for _ in 0..depth {
        here = sys::namespace::parent(&here).map_err(|error| ProcError::new(path.clone(), error))?;
    }
    let inode = rustix::fs::fstat(&here).map_err(|error| ProcError::new(path, error.into()))?.st_ino;
    Ok(inode == namespace)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::process::testing::{Nested, find_sleeper};

    fn marks() -> [String; 2] {
        let unique = u64::from(std::process::id()) + 100_000;
        [unique.to_string(), (unique + 5_000_000).to_string()]
    }

    #[test]
    fn a_process_beside_us_is_seen_under_its_own_pid() {
        let proc = ProcRoot::new("/proc");
        let (me, _) = proc.process(std::process::id()).unwrap();
        if proc.status(me.pid).unwrap().namespace_pids.len() == 1 {
            assert_eq!(View::of(&proc, me).unwrap(), View::Same);
        }
        let before = ProcessId { start: me.start.wrapping_add(1), ..me };
        assert!(View::of(&proc, before).unwrap_err().is_gone());
    }

    #[test]
    fn pids_of_a_nested_namespace_are_found_also_one_level_deeper() {
        let [here, deeper] = marks();
        let script = format!(
            "sleep {here} & unshare --pid --fork --kill-child sh -c 'sleep {deeper} & wait' & echo ready; wait"
        );
        let Some(_nested) = Nested::start(&script) else { return };
        let proc = ProcRoot::new("/proc");
        let (daemon, client) = (find_sleeper(&here), find_sleeper(&deeper));
        let (daemon, _) = proc.process(daemon).unwrap();
        let View::Nested { level, namespace } = View::of(&proc, daemon).unwrap() else {
            panic!("a nested process was taken for one beside us")
        };
        let inner = |pid: u32| proc.status(pid).unwrap().namespace_pids[level];
        let wanted = [inner(daemon.pid), inner(client), 31_999];
        let found = locate(&proc, level, namespace, &wanted).unwrap();
        assert_eq!(found[&wanted[0]], Located::At(daemon.pid));
        assert_eq!(found[&wanted[1]], Located::At(client));
        assert_eq!(found[&31_999], Located::Absent);
    }

    #[test]
    fn a_sibling_namespace_with_the_same_pids_is_not_mistaken() {
        let [one, other] = marks().map(|mark| format!("{mark}7"));
        let script = |mark: &str| format!("sleep {mark} & echo ready; wait");
        let (Some(_first), Some(_second)) = (Nested::start(&script(&one)), Nested::start(&script(&other)))
        else {
            return;
        };
        let proc = ProcRoot::new("/proc");
        let (first, second) = (find_sleeper(&one), find_sleeper(&other));
        let pid = |host: u32| *proc.status(host).unwrap().namespace_pids.last().unwrap();
        assert_eq!(pid(first), pid(second), "the test needs the same pid in both");
        let View::Nested { level, namespace } = View::of(&proc, proc.process(second).unwrap().0).unwrap()
        else {
            panic!("not nested")
        };
        assert_eq!(locate(&proc, level, namespace, &[pid(first)]).unwrap()[&pid(first)], Located::At(second));
    }
}
