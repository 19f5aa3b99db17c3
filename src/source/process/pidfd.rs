//! The end of processes, told by the kernel the moment it happens.
//!
//! One pidfd per process (Linux 5.3), all in one epoll set of which the runtime watches a single descriptor: no task and
//! no timer per client.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Resource};
use tokio::io::unix::AsyncFd;

use crate::sys::async_fd;

/// More pidfds than this are never held; clients beyond are polled.
const MAX_DESCRIPTORS: usize = 4096;
/// Ends reported at once.
const BATCH: usize = 256;

/// Why the kernel does not report a process's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// No such process: it has ended already, or the pid is a thread's.
    Gone,
    /// As many as may be are held already.
    Full,
    /// The kernel cannot, or not now (`ENOSYS`, `EMFILE`, a security policy).
    Impossible(Errno),
}

/// A set of processes whose end is awaited.
#[derive(Debug)]
pub struct ExitWatch {
    epoll: AsyncFd<OwnedFd>,
    descriptors: HashMap<u64, OwnedFd>,
    limit: usize,
}

impl ExitWatch {
    /// An empty set. It never takes more than half of the descriptors that this process may open.
    ///
    /// Needs the runtime.
    pub fn new() -> io::Result<ExitWatch> {
        let allowed = rustix::process::getrlimit(Resource::Nofile).current;
        let half = allowed.and_then(|allowed| usize::try_from(allowed / 2).ok());
        let epoll = async_fd::readable(epoll::create(epoll::CreateFlags::CLOEXEC)?)?;
        let limit = half.unwrap_or(MAX_DESCRIPTORS).min(MAX_DESCRIPTORS);
        Ok(ExitWatch { epoll, descriptors: HashMap::new(), limit })
    }

    /// Awaits the end of the process that has this pid now, in the namespace of this very process. `key` names it.
    ///
    /// Whether it is the process that was meant is for the caller to check afterwards, by its start time: once this
    /// has succeeded, the pid cannot have passed on to another without the end being reported.
    pub fn add(&mut self, key: u64, pid: u32) -> Result<(), Refusal> {
        if self.descriptors.len() >= self.limit {
            return Err(Refusal::Full);
        }
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(Refusal::Gone)?;
        let descriptor = rustix::process::pidfd_open(pid, PidfdFlags::empty()).map_err(refusal)?;
        let once = epoll::EventFlags::IN | epoll::EventFlags::ONESHOT;
        epoll::add(self.epoll.get_ref(), &descriptor, epoll::EventData::new_u64(key), once)
            .map_err(Refusal::Impossible)?;
        self.descriptors.insert(key, descriptor);
        Ok(())
    }

    /// Awaits it no longer. Does nothing for a key that is not in the set.
    pub fn remove(&mut self, key: u64) {
        if let Some(descriptor) = self.descriptors.remove(&key) {
            // A child of ours may hold a copy until its exec: closing alone would leave it in the set until then.
            let _already_gone = epoll::delete(self.epoll.get_ref(), &descriptor);
        }
    }

    /// How many are awaited.
    pub fn len(&self) -> usize {
        self.descriptors.len()
    }

    /// Whether none is awaited.
    pub fn is_empty(&self) -> bool {
        self.descriptors.is_empty()
    }

    /// Waits until at least one process has ended, and gives their keys; they leave the set. Nothing is lost when the
    /// future is dropped before it is ready.
    pub async fn ended(&mut self) -> io::Result<Vec<u64>> {
        loop {
            let mut guard = self.epoll.readable().await?;
            let mut events = Vec::with_capacity(BATCH);
            let spare = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(guard.get_inner(), spare, Some(&rustix::fs::Timespec { tv_sec: 0, tv_nsec: 0 }))
            {
                Ok(count) if count < BATCH => guard.clear_ready(),
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            let keys: Vec<u64> = events
                .iter()
                .map(|event| event.data.u64())
                .filter(|key| self.descriptors.contains_key(key))
                .collect();
            for key in &keys {
                self.remove(*key);
            }
            if !keys.is_empty() {
                return Ok(keys);
            }
        }
    }
}

/// `EINVAL` and `ENOENT` are what kernels say of a thread's id.
fn refusal(error: Errno) -> Refusal {
    match error {
        Errno::SRCH | Errno::INVAL | Errno::NOENT => Refusal::Gone,
        other => Refusal::Impossible(other),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn the_end_of_each_process_is_told_once_by_its_key() {
        let mut watch = ExitWatch::new().unwrap();
        let mut children: Vec<_> = (0..5).map(|_| Command::new("sleep").arg("60").spawn().unwrap()).collect();
        for (key, child) in children.iter().enumerate() {
            watch.add(key as u64, child.id()).unwrap();
        }
        let nothing = tokio::time::timeout(Duration::from_millis(30), watch.ended()).await;
        assert!(nothing.is_err(), "an end was told while all live");
        watch.remove(4);
        for child in &mut children {
            child.kill().unwrap();
        }
        let mut told = Vec::new();
        while told.len() < 4 {
            let ended = tokio::time::timeout(Duration::from_secs(5), watch.ended()).await;
            told.extend(ended.expect("the ends were not told").unwrap());
        }
        told.sort_unstable();
        assert_eq!(told, [0, 1, 2, 3]);
        assert!(watch.is_empty());
        for child in &mut children {
            child.wait().unwrap();
        }
    }

    #[tokio::test]
    async fn a_zombie_counts_as_ended_at_once_and_no_pid_as_gone() {
        let mut watch = ExitWatch::new().unwrap();
        let mut child = Command::new("true").spawn().unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        watch.add(1, child.id()).unwrap();
        let ended = tokio::time::timeout(Duration::from_secs(5), watch.ended()).await.unwrap();
        assert_eq!(ended.unwrap(), [1]);
        child.wait().unwrap();
        assert_eq!(watch.add(2, child.id()), Err(Refusal::Gone));
        assert_eq!(watch.add(3, 0), Err(Refusal::Gone));
    }

    #[tokio::test]
    async fn a_full_set_refuses() {
        let mut watch = ExitWatch::new().unwrap();
        watch.limit = 1;
        watch.add(1, std::process::id()).unwrap();
        assert_eq!(watch.add(2, std::process::id()), Err(Refusal::Full));
        watch.remove(1);
        assert_eq!(watch.add(2, std::process::id()), Ok(()));
    }
}
