//! Names of the things that the model is about.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The name of a control daemon: the metric label `daemon`, unique on the node.
pub type DaemonName = Arc<str>;

/// A process for as long as it lives: a pid alone is reused by the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct ProcessId {
    /// The pid in the exporter's pid namespace.
    pub pid: u32,
    /// Field 22 of `/proc/PID/stat`: clock ticks from boot to the start of the process.
    pub start: u64,
}

/// A PCI address without its function, as numbers: the kernel log and NVML spell it differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PciAddress {
    /// PCI domain.
    pub domain: u32,
    /// PCI bus.
    pub bus: u8,
    /// PCI device.
    pub device: u8,
}

impl fmt::Display for PciAddress {
    /// NVML's spelling, which `dcgm-exporter` uses for its label: `00000000:3B:00.0`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08X}:{:02X}:{:02X}.0", self.domain, self.bus, self.device)
    }
}

/// A GPU or a MIG instance as a source names it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeviceName {
    /// A whole UUID with its prefix: `GPU-…` or `MIG-…`, lower-case hex.
    Uuid(Arc<str>),
    /// A UUID cut after its third group, as the daemon's `ps` prints it.
    UuidPrefix(Arc<str>),
    /// The number of a device in the MPS server's own enumeration. It is not NVML's index.
    Ordinal(u32),
}

impl DeviceName {
    /// By what was known of a UUID.
    pub fn of_uuid(uuid: &Arc<str>) -> DeviceName {
        /// `GPU-` or `MIG-` and 32 digits in five groups.
        const WHOLE: usize = 40;
        if uuid.len() < WHOLE { DeviceName::UuidPrefix(uuid.clone()) } else { DeviceName::Uuid(uuid.clone()) }
    }
}

/// Who a process works for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Workload {
    /// A Kubernetes container. Names are absent until the pod's name is known.
    Pod {
        /// Pod UID.
        uid: Arc<str>,
        /// Namespace, where known.
        namespace: Option<Arc<str>>,
        /// Pod name, where known.
        pod: Option<Arc<str>>,
        /// Container name, where known.
        container: Option<Arc<str>>,
    },
    /// A Slurm job.
    Slurm {
        /// Job id.
        job: Arc<str>,
        /// Step, where known.
        step: Option<Arc<str>>,
        /// User id or name, where known.
        user: Option<Arc<str>>,
    },
    /// A container outside Kubernetes (Docker, Podman, Apptainer).
    Container {
        /// Container id, or its instance name.
        id: Arc<str>,
    },
    /// A systemd unit.
    Unit {
        /// Unit name.
        unit: Arc<str>,
    },
    /// Nothing better than the control group.
    Cgroup {
        /// Path in the cgroup hierarchy.
        path: Arc<str>,
    },
}

impl Workload {
    /// Whether two processes belong to the same workload: a pod's containers and a job's steps do.
    pub fn is_same(&self, other: &Workload) -> bool {
        self.key() == other.key()
    }

    /// A key that is equal exactly when [`Workload::is_same`] holds.
    pub fn key(&self) -> (&'static str, &str) {
        match self {
            Workload::Pod { uid, .. } => ("pod", uid),
            Workload::Slurm { job, .. } => ("slurm", job),
            Workload::Container { id } => ("container", id),
            Workload::Unit { unit } => ("unit", unit),
            Workload::Cgroup { path } => ("cgroup", path),
        }
    }
}

/// A container's id as engines abbreviate it; a name is left whole.
fn short(id: &str) -> &str {
    let is_id = id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    id.get(..12).filter(|_| is_id).unwrap_or(id)
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Workload::Pod { uid, namespace, pod, container } => {
                match (namespace, pod) {
                    (Some(namespace), Some(pod)) => write!(f, "pod {namespace}/{pod}")?,
                    _ => write!(f, "pod {uid}")?,
                }
                container.as_ref().map_or(Ok(()), |container| write!(f, " ({container})"))
            }
            Workload::Slurm { job, step, .. } => {
                write!(f, "Slurm job {job}")?;
                step.as_ref().map_or(Ok(()), |step| write!(f, ".{step}"))
            }
            Workload::Container { id } => write!(f, "container {}", short(id)),
            Workload::Unit { unit } => write!(f, "unit {unit}"),
            Workload::Cgroup { path } => write!(f, "cgroup {path}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_containers_are_shown_short_and_names_whole() {
        let shown = |id: &str| Workload::Container { id: id.into() }.to_string();
        assert_eq!(shown(&"0123456789abcdef".repeat(4)), "container 0123456789ab");
        assert_eq!(shown("session-4.scope/pytorch.sif"), "container session-4.scope/pytorch.sif");
    }
}
