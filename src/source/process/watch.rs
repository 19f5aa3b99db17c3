//! The processes that the model asked about.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Instant;

use jiff::Timestamp;

use crate::event::ProcessFacts;
use crate::identity::{DaemonName, ProcessId};

/// How a process's end is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Follow {
    /// The pid is not found yet: its daemon's namespace is not known, or may not be looked at.
    Unfound,
    /// By the kernel.
    Kernel,
    /// By looking every second.
    Polling(ProcessId),
}

/// A process that the model asked about.
#[derive(Debug)]
pub struct Watch {
    /// The daemon that names it.
    pub daemon: DaemonName,
    /// The pid as that daemon names it.
    pub pid: u32,
    /// How its end is noticed.
    pub follow: Follow,
    /// What was told of it last.
    pub facts: Option<ProcessFacts>,
    /// When to ask again who it works for; `None`: never, or being asked.
    pub ask_at: Option<Instant>,
    /// Where its checkpoints are.
    pub places: Vec<PathBuf>,
    /// The checkpoint that was told last.
    pub checkpoint: Option<Option<Timestamp>>,
}

impl Watch {
    /// The process, once it is found.
    pub fn process(&self) -> Option<ProcessId> {
        self.facts.as_ref().and_then(|facts| facts.process)
    }
}

/// All of them, by a key that is never used twice: an answer that comes late meets no other process.
#[derive(Debug, Default)]
pub struct Watches {
    by_key: HashMap<u64, Watch>,
    by_pid: HashMap<(DaemonName, u32), u64>,
    last: u64,
}

impl Watches {
    /// More processes than this are not watched.
    pub const LIMIT: usize = 65_536;

    /// Takes one in; `None`: there are too many.
    pub fn add(&mut self, daemon: DaemonName, pid: u32) -> Option<u64> {
        if self.by_key.len() >= Self::LIMIT {
            return None;
        }
        self.last += 1;
        self.by_pid.insert((daemon.clone(), pid), self.last);
        let watch = Watch {
            daemon,
            pid,
            follow: Follow::Unfound,
            facts: None,
            ask_at: None,
            places: Vec::new(),
            checkpoint: None,
        };
        self.by_key.insert(self.last, watch);
        Some(self.last)
    }

    /// The key of a daemon's pid.
    pub fn key(&self, daemon: &DaemonName, pid: u32) -> Option<u64> {
        self.by_pid.get(&(daemon.clone(), pid)).copied()
    }

    /// The one with this key.
    pub fn get(&mut self, key: u64) -> Option<&mut Watch> {
        self.by_key.get_mut(&key)
    }

    /// Lets one go.
    pub fn remove(&mut self, key: u64) -> Option<Watch> {
        let watch = self.by_key.remove(&key)?;
        self.by_pid.remove(&(watch.daemon.clone(), watch.pid));
        Some(watch)
    }

    /// Every one with its key, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &Watch)> {
        self.by_key.iter().map(|(key, watch)| (*key, watch))
    }

    /// The keys of those for which this holds.
    pub fn keys_where(&self, mut holds: impl FnMut(&Watch) -> bool) -> Vec<u64> {
        self.iter().filter(|(_, watch)| holds(watch)).map(|(key, _)| key).collect()
    }
}
