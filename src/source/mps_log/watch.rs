//! Wakes the readers of logs when something happens in a directory. One watcher, with one thread, serves the process.
//!
//! It is a hint and nothing more: network file systems tell nothing, a directory that is replaced tells nothing any
//! more, and the kernel may refuse another watch. Readers look by themselves every second as well.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use notify::event::{AccessKind, AccessMode, CreateKind, Flag};
use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::Notify;

use super::tail::FileId;

/// Watches directories for the whole process. Cheap to clone.
#[derive(Debug, Clone)]
pub struct LogWatcher(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// `None`: the system gave no watcher, everybody polls.
    watcher: Mutex<Option<RecommendedWatcher>>,
    sleepers: Arc<Mutex<Sleepers>>,
    has_complained: Mutex<bool>,
}

#[derive(Debug, Default)]
struct Sleepers {
    next: u64,
    by_directory: HashMap<PathBuf, Vec<Sleeper>>,
}

#[derive(Debug)]
struct Sleeper {
    key: u64,
    /// What the names that matter begin with.
    names: Vec<OsString>,
    wake: Arc<Notify>,
}

impl Default for LogWatcher {
    fn default() -> Self {
        LogWatcher::new()
    }
}

impl LogWatcher {
    /// A watcher, or one that never wakes anybody where the system refuses.
    pub fn new() -> LogWatcher {
        let sleepers = Arc::new(Mutex::new(Sleepers::default()));
        let told = sleepers.clone();
        let made = notify::recommended_watcher(move |event: notify::Result<Event>| wake(&told, event));
        let shared = Shared { watcher: Mutex::new(None), sleepers, has_complained: Mutex::new(false) };
        match made {
            Ok(watcher) => *lock(&shared.watcher) = Some(watcher),
            Err(error) => shared.complain(&error),
        }
        LogWatcher(Arc::new(shared))
    }

    /// A watcher that never wakes anybody, as where inotify is exhausted.
    pub fn blind() -> LogWatcher {
        let sleepers = Arc::default();
        LogWatcher(Arc::new(Shared { watcher: Mutex::new(None), sleepers, has_complained: Mutex::new(true) }))
    }

    /// Wakes `wake` when something happens in `directory` to a file whose name begins with one of `names`, or to a
    /// folder, until what is returned is dropped. `None`: the directory is not there, or cannot be watched.
    pub fn watch(&self, directory: &Path, names: &[OsString], wake: &Arc<Notify>) -> Option<DirectoryWatch> {
        let id = identity(directory)?;
        let mut watcher = lock(&self.0.watcher);
        let watcher = watcher.as_mut()?;
        // Asked for again even if it is watched already: it may be another directory of the same name.
        if let Err(error) = watcher.watch(directory, RecursiveMode::NonRecursive) {
            self.0.complain(&error);
            return None;
        }
        let mut sleepers = lock(&self.0.sleepers);
        let key = sleepers.next;
        sleepers.next += 1;
        let sleeper = Sleeper { key, names: names.to_owned(), wake: wake.clone() };
        sleepers.by_directory.entry(directory.to_owned()).or_default().push(sleeper);
        Some(DirectoryWatch { shared: self.0.clone(), directory: directory.to_owned(), id, key })
    }
}

impl Shared {
    /// Says once that readers poll from now on.
    fn complain(&self, error: &notify::Error) {
        if !std::mem::replace(&mut *lock(&self.has_complained), true) {
            tracing::warn!(
                %error,
                "A log directory cannot be watched, so it is polled. Raise fs.inotify.max_user_instances or \
                 fs.inotify.max_user_watches to read its lines at once."
            );
        }
    }
}

/// A directory is watched as long as this lives.
#[derive(Debug)]
pub struct DirectoryWatch {
    shared: Arc<Shared>,
    directory: PathBuf,
    id: FileId,
    key: u64,
}

impl DirectoryWatch {
    /// Whether the watched directory still has its name. Nothing is ever told of one that was replaced.
    pub fn is_current(&self) -> bool {
        identity(&self.directory) == Some(self.id)
    }

    /// The directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

impl Drop for DirectoryWatch {
    fn drop(&mut self) {
        let mut watcher = lock(&self.shared.watcher);
        let is_last = {
            let mut sleepers = lock(&self.shared.sleepers);
            let Some(others) = sleepers.by_directory.get_mut(&self.directory) else { return };
            others.retain(|sleeper| sleeper.key != self.key);
            let is_last = others.is_empty();
            if is_last {
                sleepers.by_directory.remove(&self.directory);
            }
            is_last
        };
        // The watcher's thread answers this call, and takes the sleepers to wake them: they must be free here.
        if let (true, Some(watcher)) = (is_last, watcher.as_mut()) {
            let _already_gone = watcher.unwatch(&self.directory);
        }
    }
}

fn identity(directory: &Path) -> Option<FileId> {
    std::fs::metadata(directory).ok().filter(std::fs::Metadata::is_dir).map(|found| FileId::of(&found))
}

/// Runs on the watcher's thread.
fn wake(sleepers: &Mutex<Sleepers>, event: notify::Result<Event>) {
    let sleepers = lock(sleepers);
    let Ok(event) = event else { return };
    if event.attrs.flag() == Some(Flag::Rescan) {
        sleepers.by_directory.values().flatten().for_each(|sleeper| sleeper.wake.notify_one());
        return;
    }
    let is_interesting = match event.kind {
        // Every reader's `open`, our own included, arrives as an access.
        EventKind::Access(access) => access == AccessKind::Close(AccessMode::Write),
        _ => true,
    };
    if !is_interesting {
        return;
    }
    let is_folder = event.kind == EventKind::Create(CreateKind::Folder);
    for path in &event.paths {
        let beside = path.parent().and_then(|directory| sleepers.by_directory.get(directory));
        for sleeper in beside.into_iter().flatten() {
            let name = path.file_name().unwrap_or_default().as_bytes();
            if is_folder || sleeper.names.iter().any(|wanted| name.starts_with(wanted.as_bytes())) {
                sleeper.wake.notify_one();
            }
        }
        // The directory itself was moved or removed.
        for sleeper in sleepers.by_directory.get(path).into_iter().flatten() {
            sleeper.wake.notify_one();
        }
    }
}

/// No thread panics while it holds these locks, and what they guard is whole at every moment.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    const SOON: Duration = Duration::from_secs(5);
    const NEVER: Duration = Duration::from_millis(200);

    #[tokio::test]
    async fn names_that_matter_wake_and_reading_does_not() {
        let directory = tempfile::tempdir().unwrap();
        let watcher = LogWatcher::new();
        let woken = Arc::new(Notify::new());
        let path = directory.path().join("server.log");
        fs::write(&path, "a").unwrap();
        let watch = watcher.watch(directory.path(), &["server.log".into()], &woken).unwrap();
        fs::read(&path).unwrap();
        fs::write(directory.path().join("else"), "b").unwrap();
        assert!(
            timeout(NEVER, woken.notified()).await.is_err(),
            "neither our reading nor other files matter"
        );
        fs::write(&path, "b").unwrap();
        timeout(SOON, woken.notified()).await.unwrap();
        fs::create_dir(directory.path().join("a server")).unwrap();
        timeout(SOON, woken.notified()).await.unwrap();
        assert!(watch.is_current());
        drop(watch);
        timeout(NEVER, async { while timeout(NEVER / 4, woken.notified()).await.is_ok() {} }).await.unwrap();
        fs::write(&path, "c").unwrap();
        assert!(timeout(NEVER, woken.notified()).await.is_err());
    }

    #[tokio::test]
    async fn a_replaced_directory_is_noticed_and_watched_again() {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("log");
        let watcher = LogWatcher::new();
        let woken = Arc::new(Notify::new());
        let names = ["server.log".into()];
        assert!(watcher.watch(&directory, &names, &woken).is_none(), "it does not exist yet");
        fs::create_dir(&directory).unwrap();
        let old = watcher.watch(&directory, &names, &woken).unwrap();
        fs::rename(&directory, parent.path().join("old")).unwrap();
        assert!(!old.is_current());
        fs::create_dir(&directory).unwrap();
        assert!(!old.is_current());
        drop(old);
        let _new = watcher.watch(&directory, &names, &woken).unwrap();
        timeout(NEVER, async { while timeout(NEVER / 4, woken.notified()).await.is_ok() {} }).await.unwrap();
        fs::write(directory.join("server.log"), "b").unwrap();
        timeout(SOON, woken.notified()).await.unwrap();
    }
}
