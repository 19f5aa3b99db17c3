//! Who a process works for: from its control group to names that people know.
//!
//! The control group, which only the host can set, goes first; the environment, which the process's owner can, fills in what
//! the group does not say. Nothing is guessed: names that cannot be joined by UID or container id stay absent.
//!
//! Everything here may block and runs on a [`super::worker`] thread. Answers are kept per process and per control group,
//! those that lack something for a shorter time.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cache::Cache;
use super::cgroup::{self, Placement};
use super::kubelet::{self, ListedPod};
use super::pod_logs::{PodLogs, PodName};
use super::proc::{ProcError, ProcRoot};
use super::rooted::Root;
use crate::identity::{ProcessId, Workload};

/// For how long an answer with every name holds. A process may be moved to another group, seldom enough.
pub const KEEP_WHOLE: Duration = Duration::from_secs(600);
/// For how long an answer that lacks names holds: the kubelet writes them a little after the start.
pub const KEEP_PARTIAL: Duration = Duration::from_secs(30);
const PROCESSES: usize = 8192;
const GROUPS: usize = 4096;
const HOSTNAME: u64 = 256;

const JOB_ID: &str = "SLURM_JOB_ID";
const STEP_ID: &str = "SLURM_STEP_ID";
const JOB_USER: &str = "SLURM_JOB_USER";
const APPTAINER: &str = "APPTAINER_NAME";
const SINGULARITY: &str = "SINGULARITY_NAME";

/// What to look at, and with what.
#[derive(Debug, Clone)]
pub struct Attributor {
    /// The host's processes.
    pub proc: ProcRoot,
    /// The kubelet's pod logs.
    pub pod_logs: PathBuf,
    /// Whether to look for Slurm jobs.
    pub slurm: bool,
    /// The variable that names a process's checkpoints.
    pub checkpoint_variable: Option<String>,
}

/// A process to attribute.
#[derive(Debug, Clone)]
pub struct Subject {
    /// The process.
    pub process: ProcessId,
    /// Its real uid.
    pub uid: Option<u32>,
    /// What the kubelet lists, when it was asked.
    pub listed: Option<Arc<[ListedPod]>>,
}

/// What was found out about a process.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Attribution {
    /// Who it works for; `None` where nothing tells.
    pub workload: Option<Workload>,
    /// Whether nothing is missing that could still become known.
    pub is_whole: bool,
    /// The value of the checkpoint variable.
    pub checkpoint: Option<OsString>,
    /// Whether the environment could not be read.
    pub is_denied: bool,
}

/// The state that attribution keeps between processes.
#[derive(Debug)]
pub struct Attributions {
    with: Attributor,
    pods: PodLogs,
    processes: Cache<ProcessId, Attribution>,
    groups: Cache<Vec<u8>, Named>,
    dropped: u64,
}

/// A placement with the names that could be joined to it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Named {
    workload: Option<Workload>,
    is_whole: bool,
}

impl Attributions {
    /// Nothing known yet.
    pub fn new(with: Attributor) -> Attributions {
        let pods = PodLogs::new(with.pod_logs.clone());
        Attributions { with, pods, processes: Cache::new(PROCESSES), groups: Cache::new(GROUPS), dropped: 0 }
    }

    /// How the pods' logs were read last; `None` while no pod asked for them.
    pub fn pod_logs(&self) -> Option<Result<(), Arc<str>>> {
        self.pods.state().cloned()
    }

    /// Answers that had to go before their time since this was asked last.
    pub fn take_dropped(&mut self) -> u64 {
        std::mem::take(&mut self.dropped)
    }

    /// Who this process works for. [`ProcError::Gone`] when it has ended meanwhile.
    pub fn attribute(&mut self, subject: &Subject, now: Instant) -> Result<Attribution, ProcError> {
        if let Some(known) = self.processes.get(&subject.process, now)
            && (known.is_whole || subject.listed.is_none())
        {
            return Ok(known.clone());
        }
        let pid = subject.process.pid;
        let content = self.with.proc.cgroup(pid)?;
        let (environment, is_denied) = self.environment(pid)?;
        let named = self.group(&content, subject, now);
        let workload = overlay(named.workload, subject, &environment);
        let checkpoint =
            self.with.checkpoint_variable.as_ref().and_then(|name| environment.get(name).cloned());
        // All of this was read by pid: it counts only if the pid was still that process's at the end.
        if !self.with.proc.is_alive(subject.process)? {
            return Err(ProcError::Gone { path: self.with.proc.file(pid, "stat") });
        }
        let attribution = Attribution { workload, is_whole: named.is_whole, checkpoint, is_denied };
        let keep = if attribution.is_whole { KEEP_WHOLE } else { KEEP_PARTIAL };
        self.dropped += u64::from(self.processes.put(subject.process, attribution.clone(), now, keep));
        Ok(attribution)
    }

    fn environment(&self, pid: u32) -> Result<(HashMap<String, OsString>, bool), ProcError> {
        let mut wanted = vec![APPTAINER, SINGULARITY];
        if self.with.slurm {
            wanted.extend([JOB_ID, STEP_ID, JOB_USER]);
        }
        wanted.extend(self.with.checkpoint_variable.as_deref());
        match self.with.proc.environment(pid, &wanted) {
            Ok(found) => Ok((found, false)),
            Err(error) if error.is_gone() && self.with.proc.is_procfs() => Err(error),
            Err(error) => Ok((HashMap::new(), matches!(error, ProcError::Denied { .. }))),
        }
    }

    /// What the control group says, with names. Kept for the group, unless the group alone does not tell the container.
    fn group(&mut self, content: &[u8], subject: &Subject, now: Instant) -> Named {
        if let Some(known) = self.groups.get(&content.to_vec(), now)
            && (known.is_whole || subject.listed.is_none())
        {
            return known.clone();
        }
        let placement = cgroup::placement(content, self.with.slurm);
        let is_of_one_container = matches!(
            placement,
            Some(Placement::Pod { container: Some(_), .. } | Placement::Container { .. })
        );
        let named = self.name(placement, subject, now);
        if is_of_one_container {
            let keep = if named.is_whole { KEEP_WHOLE } else { KEEP_PARTIAL };
            self.dropped += u64::from(self.groups.put(content.to_vec(), named.clone(), now, keep));
        }
        named
    }

    fn name(&mut self, placement: Option<Placement>, subject: &Subject, now: Instant) -> Named {
        let whole = |workload| Named { workload: Some(workload), is_whole: true };
        match placement {
            Some(Placement::Pod { uid, container }) => self.pod(&uid, container.as_deref(), subject, now),
            Some(Placement::Container { id }) => match self.hidden_pod(Some(&id), subject, now) {
                Some(named) => named,
                None => whole(Workload::Container { id: id.into() }),
            },
            Some(Placement::Slurm { job, step, uid }) => {
                let user = uid.or_else(|| subject.uid.map(|uid| uid.to_string()));
                whole(Workload::Slurm {
                    job: job.into(),
                    step: step.map(Into::into),
                    user: user.map(Into::into),
                })
            }
            Some(Placement::Unit { unit }) => whole(Workload::Unit { unit: unit.into() }),
            // From inside a cgroup namespace, a container's group may look like the root, or like one beside it.
            Some(Placement::Path { path }) if path.starts_with("/..") => {
                let other = || whole(Workload::Cgroup { path: path.into() });
                self.hidden_pod(None, subject, now).unwrap_or_else(other)
            }
            Some(Placement::Path { path }) => whole(Workload::Cgroup { path: path.into() }),
            None => self.hidden_pod(None, subject, now).unwrap_or(Named { workload: None, is_whole: true }),
        }
    }

    /// The pod of a process whose group does not show it, by its container's id or by what the kubelet mounts into it.
    fn hidden_pod(&mut self, id: Option<&str>, subject: &Subject, now: Instant) -> Option<Named> {
        let mounted = self.mounted(subject);
        let by_mount = mounted.map(|(uid, _)| uid);
        // Asking for a container's id reads the kubelet's folders: only where there is a kubelet.
        let has_kubelet = by_mount.is_some() || self.with.pod_logs.is_dir();
        let by_id =
            id.filter(|_| has_kubelet).and_then(|id| self.pods.container(id, now)).and_then(|name| name.uid);
        let uid = by_mount.or_else(|| by_id.map(|uid| uid.to_string()))?;
        Some(self.pod(&uid, id, subject, now))
    }

    /// A pod's names, as far as they can be joined to its UID.
    fn pod(&mut self, uid: &str, id: Option<&str>, subject: &Subject, now: Instant) -> Named {
        let by_id = id.and_then(|id| self.pods.container(id, now));
        let mut container = by_id.as_ref().map(|name| name.container.clone());
        let mut name = self.pods.pod(uid, now).or_else(|| by_id.map(|name| name.pod));
        if container.is_none() {
            let mounted =
                self.mounted(subject).filter(|(of, _)| of == uid).map(|(_, container)| container.into());
            container = mounted.or_else(|| id.and_then(|_| self.pods.only_container(uid)));
        }
        if name.is_none() {
            name = self.listed(subject, container.as_deref());
        }
        let is_whole = name.is_some() && container.is_some();
        let (namespace, pod) = name.map(|name| (name.namespace, name.pod)).unzip();
        Named { workload: Some(Workload::Pod { uid: uid.into(), namespace, pod, container }), is_whole }
    }

    /// UID and container name in the mounts of a process: the kubelet mounts the file
    /// `<its folder>/pods/<uid>/containers/<name>/<hash>` into each container for its last words.
    fn mounted(&self, subject: &Subject) -> Option<(String, String)> {
        let mounts = self.with.proc.mounts(subject.process.pid).ok()?;
        let mut found: Option<(String, String)> = None;
        for line in mounts.split(|byte| *byte == b'\n') {
            let Some(this) = line.split(|byte| *byte == b' ').nth(3).and_then(kubelet_mount) else {
                continue;
            };
            if found.as_ref().is_some_and(|found| *found != this) {
                return None;
            }
            found = Some(this);
        }
        found
    }

    /// The pod that the kubelet lists under the host name that it wrote into this process's container.
    fn listed(&self, subject: &Subject, container: Option<&str>) -> Option<PodName> {
        let listed = subject.listed.as_ref()?;
        let root = Root::of(&self.with.proc, subject.process).ok()?;
        let hostname = root.read(Path::new("/etc/hostname"), HOSTNAME).ok()?;
        let hostname = std::str::from_utf8(&hostname).ok()?.trim();
        let pod = kubelet::pod_by_hostname(listed, hostname, container)?;
        Some(PodName { namespace: pod.namespace.as_str().into(), pod: pod.name.as_str().into() })
    }
}

/// What the environment adds to what the control group says.
fn overlay(
    by_group: Option<Workload>,
    subject: &Subject,
    environment: &HashMap<String, OsString>,
) -> Option<Workload> {
    let value = |name: &str| environment.get(name).and_then(|value| word(value));
    match by_group {
        Some(Workload::Slurm { job, step, user }) => {
            Some(Workload::Slurm { job, step, user: value(JOB_USER).map(Into::into).or(user) })
        }
        Some(Workload::Pod { .. }) => by_group,
        _ => {
            let is_number = |text: &&str| text.bytes().all(|byte| byte.is_ascii_digit());
            if let Some(job) = value(JOB_ID).filter(is_number) {
                let step = value(STEP_ID).filter(is_number).map(|step| step_name(step).into());
                let user = value(JOB_USER).map(str::to_owned);
                let user = user.or_else(|| subject.uid.map(|uid| uid.to_string())).map(Into::into);
                return Some(Workload::Slurm { job: job.into(), step, user });
            }
            match (value(APPTAINER).or_else(|| value(SINGULARITY)), by_group) {
                // Without limits Apptainer makes no group of its own, and its name is that of the image.
                (Some(image), Some(Workload::Unit { unit: at } | Workload::Cgroup { path: at })) => {
                    Some(Workload::Container { id: format!("{at}/{image}").into() })
                }
                (Some(image), None) => Some(Workload::Container { id: image.into() }),
                (_, by_group) => by_group,
            }
        }
    }
}

/// `…/pods/<uid>/containers/<name>/<hash>`.
fn kubelet_mount(root: &[u8]) -> Option<(String, String)> {
    let mut parts = std::str::from_utf8(root).ok()?.rsplit('/');
    let (_hash, name, containers, uid, pods) =
        (parts.next()?, parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let is_uid = uid.len() >= 32 && uid.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    (pods == "pods" && containers == "containers" && is_uid && !name.is_empty())
        .then(|| (uid.to_owned(), name.to_owned()))
}

/// Slurm's own steps have numbers from the top (`slurm.h`).
fn step_name(number: &str) -> &str {
    match number {
        "4294967292" => "extern",
        "4294967291" => "batch",
        "4294967290" => "interactive",
        other => other,
    }
}

/// A value fit to be a name: a process's owner can set anything.
fn word(value: &OsStr) -> Option<&str> {
    let text = value.to_str()?;
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-@+$".contains(&byte);
    ((1..=128).contains(&text.len()) && text.bytes().all(is_allowed)).then_some(text)
}

#[cfg(test)]
mod tests;
