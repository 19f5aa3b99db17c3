//! Paths inside another process's root directory, resolved as that process would resolve them.
//!
//! A container's files are reached through `/proc/PID/root`. What lies there is the container's to arrange: a symbolic
//! link in it must never lead to the host's files. The kernel sees to that with `openat2` (Linux 5.6); before, the path
//! is walked part by part, never letting the kernel follow a link.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::{Errno, Result};

use super::proc::ProcRoot;
use crate::identity::ProcessId;

/// As many links as the kernel follows in one path.
const MAX_LINKS: usize = 40;
/// Flags that name a file without opening it: no device wakes, no FIFO blocks.
const NAME_ONLY: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// The root directory of a process.
#[derive(Debug)]
pub struct Root {
    directory: OwnedFd,
    has_openat2: bool,
}

impl Root {
    /// The root of this very process. `ESRCH` when it has ended, `EACCES` when it may not be looked into.
    pub fn of(proc: &ProcRoot, process: ProcessId) -> Result<Root> {
        let root = Root::at(&proc.file(process.pid, "root"))?;
        // The pid may have passed on before the directory was opened, but not after this.
        match proc.is_alive(process) {
            Ok(true) => Ok(root),
            _ => Err(Errno::SRCH),
        }
    }

    /// A directory as a root.
    pub fn at(path: &Path) -> Result<Root> {
        let directory = rustix::fs::open(path, NAME_ONLY | OFlags::DIRECTORY, Mode::empty())?;
        Ok(Root { directory, has_openat2: true })
    }

    /// Names the file at `path`, links followed, without opening it. A relative path starts at the root.
    pub fn find(&self, path: &Path) -> Result<OwnedFd> {
        if !self.has_openat2 {
            return self.walk(path);
        }
        let inside = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        match rustix::fs::openat2(&self.directory, path, NAME_ONLY, Mode::empty(), inside) {
            // Seccomp profiles older than the call answer EPERM for it.
            Err(Errno::NOSYS | Errno::PERM) => self.walk(path),
            found => found,
        }
    }

    /// Reads at most `limit` bytes of the regular file at `path`.
    pub fn read(&self, path: &Path, limit: u64) -> std::io::Result<Vec<u8>> {
        let mut content = Vec::new();
        let file = std::fs::File::from(reopen(&self.find(path)?, OFlags::RDONLY, FileType::RegularFile)?);
        file.take(limit).read_to_end(&mut content)?;
        Ok(content)
    }

    fn walk(&self, path: &Path) -> Result<OwnedFd> {
        let mut above: Vec<OwnedFd> = Vec::new();
        let mut here = self.directory.try_clone().map_err(|error| errno(&error))?;
        let mut left: VecDeque<Step> = steps(path).collect();
        let mut links = 0;
        while let Some(step) = left.pop_front() {
            let name = match step {
                Step::Root => {
                    above.clear();
                    here = self.directory.try_clone().map_err(|error| errno(&error))?;
                    continue;
                }
                Step::Up => {
                    if let Some(parent) = above.pop() {
                        here = parent;
                    }
                    continue;
                }
                Step::Into(name) => name,
            };
            let next = rustix::fs::openat(&here, &name, NAME_ONLY | OFlags::NOFOLLOW, Mode::empty())?;
            if FileType::from_raw_mode(rustix::fs::fstat(&next)?.st_mode) == FileType::Symlink {
                links += 1;
                if links > MAX_LINKS {
                    return Err(Errno::LOOP);
                }
                let target = rustix::fs::readlinkat(&next, "", Vec::new())?;
                let target = OsString::from_vec(target.into_bytes());
                let within: Vec<Step> = steps(Path::new(&target)).collect();
                for step in within.into_iter().rev() {
                    left.push_front(step);
                }
            } else {
                above.push(std::mem::replace(&mut here, next));
            }
        }
        Ok(here)
    }
}

/// What `fstat` says of a named file.
pub fn stat(file: impl AsFd) -> Result<Stat> {
    rustix::fs::fstat(file)
}

/// What lies under `name` in an opened directory; a link itself, not what it points to.
pub fn stat_in(directory: impl AsFd, name: &OsStr) -> Result<Stat> {
    rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT)
}

/// Opens for reading a directory that [`Root::find`] named.
pub fn directory(named: &OwnedFd) -> Result<OwnedFd> {
    rustix::fs::openat(named, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

/// Opens for reading a directory directly below another; `ELOOP` or `ENOTDIR` for a link.
pub fn directory_in(parent: impl AsFd, name: &OsStr) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(parent, name, flags, Mode::empty())
}

/// Opens for reading what was only named, when it is of the expected kind.
fn reopen(named: &OwnedFd, flags: OFlags, kind: FileType) -> Result<OwnedFd> {
    use std::os::fd::AsRawFd;

    if FileType::from_raw_mode(stat(named)?.st_mode) != kind {
        return Err(Errno::INVAL);
    }
    // Our own /proc: the descriptor is this process's, wherever the host's proc is mounted.
    let path = format!("/proc/self/fd/{}", named.as_raw_fd());
    rustix::fs::open(path, flags | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty())
}

/// A step of a path.
enum Step {
    Root,
    Up,
    Into(OsString),
}

fn steps(path: &Path) -> impl Iterator<Item = Step> + '_ {
    path.components().filter_map(|component| match component {
        Component::RootDir | Component::Prefix(_) => Some(Step::Root),
        Component::ParentDir => Some(Step::Up),
        Component::Normal(name) => Some(Step::Into(OsStr::from_bytes(name.as_bytes()).to_owned())),
        Component::CurDir => None,
    })
}

fn errno(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// `outside` is beside the root; every resolver must miss it.
    fn tree() -> tempfile::TempDir {
        let tree = tempfile::tempdir().unwrap();
        let root = tree.path().join("root");
        std::fs::create_dir_all(root.join("data/run")).unwrap();
        std::fs::write(tree.path().join("outside"), "host").unwrap();
        std::fs::write(root.join("outside"), "container").unwrap();
        std::fs::write(root.join("data/run/last"), "weights").unwrap();
        symlink("/data/run", root.join("latest")).unwrap();
        symlink("../../../../outside", root.join("data/up")).unwrap();
        symlink(tree.path().join("outside"), root.join("escape")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        tree
    }

    fn both(tree: &tempfile::TempDir) -> [Root; 2] {
        let root = tree.path().join("root");
        let walking = Root { has_openat2: false, ..Root::at(&root).unwrap() };
        [Root::at(&root).unwrap(), walking]
    }

    #[test]
    fn links_lead_within_the_root_and_never_out_of_it() {
        let tree = tree();
        for root in both(&tree) {
            let read = |path: &str| root.read(Path::new(path), 100);
            assert_eq!(read("/latest/last").unwrap(), b"weights");
            assert_eq!(read("data/run/../run/./last").unwrap(), b"weights");
            assert_eq!(read("/data/up").unwrap(), b"container");
            assert_eq!(read("/../../../outside").unwrap(), b"container");
            assert_eq!(read("/escape").unwrap_err().kind(), std::io::ErrorKind::NotFound);
            assert_eq!(root.find(Path::new("/loop")).unwrap_err(), Errno::LOOP);
            assert_eq!(root.find(Path::new("/outside/x")).unwrap_err(), Errno::NOTDIR);
        }
    }

    #[test]
    fn only_regular_files_are_read_and_a_fifo_does_not_block() {
        let tree = tree();
        let fifo = tree.path().join("root/fifo");
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        for root in both(&tree) {
            assert!(root.read(Path::new("/fifo"), 10).is_err());
            assert!(root.read(Path::new("/data"), 10).is_err());
            assert_eq!(root.read(Path::new("/outside"), 4).unwrap(), b"cont");
        }
    }

    #[test]
    fn the_root_of_a_process_that_has_ended_is_refused() {
        let proc = ProcRoot::new("/proc");
        let (me, _) = proc.process(std::process::id()).unwrap();
        assert!(Root::of(&proc, me).is_ok());
        let before = ProcessId { start: me.start.wrapping_sub(1), ..me };
        assert_eq!(Root::of(&proc, before).unwrap_err(), Errno::SRCH);
    }
}
