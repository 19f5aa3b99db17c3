//! Names of pods and containers from the folders in which the kubelet keeps their logs.
//!
//! `<pod_logs>/<namespace>_<pod>_<uid>/<container>/` names a pod by its UID. Beside it the kubelet keeps
//! `containers/<pod>_<namespace>_<container>-<container id>.log`, which names a container by its id.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A node runs some hundreds of pods at most.
const MAX_ENTRIES: usize = 20_000;
/// A name that is not found makes the folders be read again, but not more often.
const MIN_AGE: Duration = Duration::from_secs(2);

/// The names of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodName {
    /// Namespace.
    pub namespace: Arc<str>,
    /// Pod name.
    pub pod: Arc<str>,
}

/// A container as `containers/` names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerName {
    /// Its pod.
    pub pod: PodName,
    /// Its name in the pod.
    pub container: Arc<str>,
    /// The pod's UID, where the link's target tells.
    pub uid: Option<Arc<str>>,
}

/// An index of the folders, read again when a name is missing.
#[derive(Debug)]
pub struct PodLogs {
    pods: PathBuf,
    containers: PathBuf,
    by_uid: HashMap<String, (PodName, PathBuf)>,
    by_id: HashMap<String, ContainerName>,
    read_at: Option<Instant>,
    state: Result<(), Arc<str>>,
}

impl PodLogs {
    /// The folder of pods' logs; that of containers' logs is beside it.
    pub fn new(pods: PathBuf) -> PodLogs {
        let containers = pods.parent().unwrap_or(Path::new("/")).join("containers");
        PodLogs {
            pods,
            containers,
            by_uid: HashMap::new(),
            by_id: HashMap::new(),
            read_at: None,
            state: Ok(()),
        }
    }

    /// How the last reading fared; `None` before the first.
    pub fn state(&self) -> Option<&Result<(), Arc<str>>> {
        self.read_at.and(Some(&self.state))
    }

    /// The names of the pod with this UID.
    pub fn pod(&mut self, uid: &str, now: Instant) -> Option<PodName> {
        if !self.by_uid.contains_key(uid) {
            self.read_again(now);
        }
        self.by_uid.get(uid).map(|(name, _)| name.clone())
    }

    /// The container with this id.
    pub fn container(&mut self, id: &str, now: Instant) -> Option<ContainerName> {
        if !self.by_id.contains_key(id) {
            self.read_again(now);
        }
        self.by_id.get(id).cloned()
    }

    /// The container of a pod that never had another one: init containers have folders too, and a folder is made before
    /// its container starts.
    pub fn only_container(&self, uid: &str) -> Option<Arc<str>> {
        let (_, folder) = self.by_uid.get(uid)?;
        let mut names = std::fs::read_dir(folder)
            .ok()?
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .map(|entry| entry.file_name());
        let only = names.next()?;
        let only = only.to_str().filter(|name| is_name(name))?;
        names.next().is_none().then(|| only.into())
    }

    fn read_again(&mut self, now: Instant) {
        if self.read_at.is_some_and(|read_at| now.saturating_duration_since(read_at) < MIN_AGE) {
            return;
        }
        self.read_at = Some(now);
        self.by_uid.clear();
        self.by_id.clear();
        self.state = Ok(());
        match std::fs::read_dir(&self.pods) {
            Ok(entries) => {
                for entry in entries.flatten().take(MAX_ENTRIES) {
                    if let Some((uid, name)) = pod_of_folder(&entry.file_name()) {
                        self.by_uid.insert(uid, (name, entry.path()));
                    }
                }
            }
            Err(error) => {
                let path = self.pods.display();
                let advice = "pods are known by UID only; mount the host's /var/log/pods read-only, or set host.pod_logs";
                self.state = Err(format!("cannot read {path} ({error}): {advice}").into());
            }
        }
        // Its absence is no error: there are other ways to a container's name.
        for entry in std::fs::read_dir(&self.containers).into_iter().flatten().flatten().take(MAX_ENTRIES) {
            if let Some((id, mut name)) = container_of_link(&entry.file_name()) {
                name.uid = std::fs::read_link(entry.path()).ok().and_then(|target| uid_of_target(&target));
                self.by_id.insert(id, name);
            }
        }
    }
}

/// `<namespace>_<pod>_<uid>`.
fn pod_of_folder(name: &OsStr) -> Option<(String, PodName)> {
    let mut parts = name.to_str()?.split('_');
    let (namespace, pod, uid) = (parts.next()?, parts.next()?, parts.next()?);
    let is_whole = parts.next().is_none() && is_name(namespace) && is_name(pod) && is_name(uid);
    is_whole.then(|| (uid.to_owned(), PodName { namespace: namespace.into(), pod: pod.into() }))
}

/// `<pod>_<namespace>_<container>-<id>.log`.
fn container_of_link(name: &OsStr) -> Option<(String, ContainerName)> {
    let mut parts = name.to_str()?.strip_suffix(".log")?.split('_');
    let (pod, namespace, container) = (parts.next()?, parts.next()?, parts.next()?);
    let (container, id) = container.rsplit_once('-')?;
    let is_whole = parts.next().is_none() && is_name(pod) && is_name(namespace) && is_name(container);
    (is_whole && id.len() == 64).then(|| {
        let pod = PodName { namespace: namespace.into(), pod: pod.into() };
        (id.to_owned(), ContainerName { pod, container: container.into(), uid: None })
    })
}

/// The link points to `…/<namespace>_<pod>_<uid>/<container>/<restart>.log`.
fn uid_of_target(target: &Path) -> Option<Arc<str>> {
    let folder = target.parent()?.parent()?.file_name()?;
    pod_of_folder(folder).map(|(uid, _)| uid.into())
}

/// What Kubernetes allows in the names of namespaces, pods and containers.
fn is_name(text: &str) -> bool {
    let is_allowed =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-' || byte == b'.';
    (1..=253).contains(&text.len()) && text.bytes().all(is_allowed)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const UID: &str = "0f9d3c1a-77e2-4b0e-9c55-1d2e3f405162";

    struct Logs(tempfile::TempDir);

    impl Logs {
        fn new() -> Logs {
            let logs = tempfile::tempdir().unwrap();
            std::fs::create_dir_all(logs.path().join("pods")).unwrap();
            std::fs::create_dir_all(logs.path().join("containers")).unwrap();
            Logs(logs)
        }

        fn index(&self) -> PodLogs {
            PodLogs::new(self.0.path().join("pods"))
        }

        fn container(&self, name: &str, id: &str) {
            let folder = self.0.path().join(format!("pods/vision_train-0_{UID}")).join(name);
            std::fs::create_dir_all(&folder).unwrap();
            let link = self.0.path().join(format!("containers/train-0_vision_{name}-{id}.log"));
            symlink(folder.join("0.log"), link).unwrap();
        }
    }

    #[test]
    fn a_pod_is_named_by_uid_and_a_container_by_id() {
        let logs = Logs::new();
        let id = "c".repeat(64);
        logs.container("main-2", &id);
        let mut index = logs.index();
        assert_eq!(index.state(), None);
        let now = Instant::now();
        let name = PodName { namespace: "vision".into(), pod: "train-0".into() };
        assert_eq!(index.pod(UID, now), Some(name.clone()));
        let expected = ContainerName { pod: name, container: "main-2".into(), uid: Some(UID.into()) };
        assert_eq!(index.container(&id, now), Some(expected));
        assert_eq!(index.state(), Some(&Ok(())));
    }

    #[test]
    fn a_pod_that_comes_later_is_found_but_not_by_reading_all_the_time() {
        let logs = Logs::new();
        let mut index = logs.index();
        let start = Instant::now();
        assert_eq!(index.pod(UID, start), None);
        logs.container("main", &"d".repeat(64));
        assert_eq!(index.pod(UID, start + Duration::from_secs(1)), None);
        assert!(index.pod(UID, start + MIN_AGE).is_some());
    }

    #[test]
    fn only_a_single_folder_names_the_container_without_its_id() {
        let logs = Logs::new();
        logs.container("main", &"a".repeat(64));
        let mut index = logs.index();
        index.pod(UID, Instant::now()).unwrap();
        assert_eq!(index.only_container(UID).as_deref(), Some("main"));
        logs.container("setup", &"b".repeat(64));
        assert_eq!(index.only_container(UID), None);
    }

    #[test]
    fn an_unreadable_folder_says_what_to_do() {
        let mut index = PodLogs::new("/nonexistent/pods".into());
        assert_eq!(index.pod(UID, Instant::now()), None);
        let reason = index.state().unwrap().clone().unwrap_err();
        assert!(reason.contains("/nonexistent/pods") && reason.contains("host.pod_logs"), "{reason}");
    }

    #[test]
    fn foreign_names_are_passed_over() {
        for name in ["lost+found", "a_b", "a_b_c_d", "Upper_pod_uid", "_pod_uid"] {
            assert_eq!(pod_of_folder(OsStr::new(name)), None, "{name}");
        }
        for name in ["a_b_c-short.log", "a_b_c.log", "notes.txt"] {
            assert_eq!(container_of_link(OsStr::new(name)), None, "{name}");
        }
    }
}
