//! What a control group's path says about who a process works for. Pure: bytes in, placement out.
//!
//! One process has a path per hierarchy (one with cgroup v2, up to fourteen with v1, both when hybrid). Every path is
//! looked at, and the most telling wins; within a path the innermost job or pod does. A path is relative to the cgroup
//! namespace of whoever reads it and may therefore begin with `/..`, so nothing here relies on its beginning.

use std::borrow::Cow;

/// How long the id of an OCI container is: hex digits of a SHA-256.
const CONTAINER_ID: usize = 64;

/// Where a process stands, by its control group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Placement {
    /// In a pod's group, or that of one of its containers.
    Pod {
        /// The pod's UID, with dashes. Static pods have 32 hex digits without.
        uid: String,
        /// The container's id.
        container: Option<String>,
    },
    /// In a Slurm job's group.
    Slurm {
        /// Job id.
        job: String,
        /// Step: a number, `batch`, `extern` or `interactive`.
        step: Option<String>,
        /// The user's id, with cgroup v1.
        uid: Option<String>,
    },
    /// In the group of a container that shows no pod.
    Container {
        /// The runtime's id or name for it.
        id: String,
    },
    /// In a systemd unit. A user's unit has its manager in front: `user@1000.service/train.service`.
    Unit {
        /// Name as systemd escapes it.
        unit: String,
    },
    /// In a group that nobody known names.
    Path {
        /// The path.
        path: String,
    },
}

impl Placement {
    /// How telling it is.
    fn rank(&self) -> u8 {
        match self {
            Placement::Pod { container: Some(_), .. } => 5,
            Placement::Pod { .. } | Placement::Slurm { .. } => 4,
            Placement::Container { .. } => 3,
            Placement::Unit { .. } => 2,
            Placement::Path { .. } => 1,
        }
    }
}

/// What `/proc/PID/cgroup` says; `None` for a process in the root group everywhere. Without `slurm` no job is looked for.
pub fn placement(content: &[u8], slurm: bool) -> Option<Placement> {
    let mut paths: Vec<(u8, Cow<'_, str>)> = content
        .split(|byte| *byte == b'\n')
        .filter_map(|line| {
            let mut fields = line.splitn(3, |byte| *byte == b':');
            let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            let path = path.strip_suffix(b" (deleted)").unwrap_or(path);
            Some((hierarchy_order(controllers), String::from_utf8_lossy(path)))
        })
        .collect();
    paths.sort_by_key(|(order, _)| *order);
    let mut best: Option<Placement> = None;
    for (_, path) in paths {
        let Some(found) = place(&path, slurm) else { continue };
        if best.as_ref().is_none_or(|best| found.rank() > best.rank()) {
            best = Some(found);
        }
    }
    best
}

/// Of two equally telling paths the one that the service manager keeps is the better.
fn hierarchy_order(controllers: &[u8]) -> u8 {
    match controllers {
        b"" => 0,
        b"name=systemd" => 1,
        b"memory" => 2,
        b"pids" => 3,
        _ => 4,
    }
}

/// What one path says; `None` for the root.
fn place(path: &str, with_slurm: bool) -> Option<Placement> {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty() && *part != "..").collect();
    let mut best: Option<Placement> = None;
    for (at, part) in parts.iter().enumerate() {
        let before = at.checked_sub(1).map_or("", |before| parts[before]);
        let after = parts.get(at + 1).copied().unwrap_or_default();
        if let Some((uid, container)) = pod(part) {
            best = Some(Placement::Pod { uid, container });
        } else if let Some(found) = with_slurm.then(|| slurm(before, part, after)).flatten() {
            best = Some(found);
        } else if let Some(id) = container(before, part) {
            match &mut best {
                Some(Placement::Pod { container, .. }) => {
                    // A container that a pod's own container runs is still that pod's.
                    container.get_or_insert(id);
                }
                Some(Placement::Slurm { .. }) => {}
                _ => best = Some(Placement::Container { id }),
            }
        }
    }
    let rest = || (!parts.is_empty()).then(|| Placement::Path { path: path.to_owned() });
    best.or_else(|| unit(&parts)).or_else(rest)
}

/// `pod<uid>` (cgroupfs driver), `kubepods[-burstable|-besteffort]-pod<uid with _>.slice` (systemd driver), or the
/// latter followed by `:cri-containerd:<id>` (kubelet with the one and containerd with the other driver).
fn pod(part: &str) -> Option<(String, Option<String>)> {
    let (slice, runtime) = part.split_once(':').map_or((part, None), |(slice, rest)| (slice, Some(rest)));
    let name = slice.strip_suffix(".slice").unwrap_or(slice);
    let at = name.rfind("pod")?;
    if !(at == 0 || name[..at].ends_with('-')) {
        return None;
    }
    let uid = name[at + 3..].replace('_', "-").to_ascii_lowercase();
    let is_hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_static = uid.len() == 32 && is_hex(&uid);
    let is_uuid =
        uid.len() == 36 && uid.split('-').map(str::len).eq([8, 4, 4, 4, 12]) && uid.split('-').all(is_hex);
    (is_static || is_uuid).then(|| (uid, runtime.and_then(container_id)))
}

/// `job_<id>/step_<step>` below `slurm/uid_<uid>` (cgroup v1) or `[<node>_]slurmstepd.scope` (v2).
fn slurm(before: &str, part: &str, after: &str) -> Option<Placement> {
    let job = part.strip_prefix("job_").filter(|job| is_number(job))?;
    let uid = before.strip_prefix("uid_").filter(|uid| is_number(uid));
    let step = after.strip_prefix("step_").filter(|step| !step.is_empty());
    let is_slurms = uid.is_some() || step.is_some() || before.contains("slurm");
    is_slurms.then(|| Placement::Slurm {
        job: job.to_owned(),
        step: step.map(str::to_owned),
        uid: uid.map(str::to_owned),
    })
}

/// The container whose own group this part names.
fn container(before: &str, part: &str) -> Option<String> {
    if let Some(id) = container_id(part) {
        return Some(id);
    }
    if let Some(name) = part.strip_prefix("lxc.payload.") {
        return Some(name.to_owned());
    }
    if before == "lxc" {
        return Some(part.to_owned());
    }
    // `apptainer-<pid>.scope`, or `apptainer/<pid>` where systemd makes no groups.
    ["apptainer", "singularity"].into_iter().find_map(|runtime| {
        let scoped = || part.strip_suffix(".scope").unwrap_or(part).strip_prefix(runtime)?.strip_prefix('-');
        let pid = if before == runtime { Some(part) } else { scoped() };
        pid.filter(|pid| is_number(pid)).map(|pid| format!("{runtime}-{pid}"))
    })
}

/// `<id>`, `<runtime>-<id>`, `<runtime>-<id>.scope` or `<runtime>:<id>`, but not the runtime's monitor of it.
fn container_id(part: &str) -> Option<String> {
    let name = part.strip_suffix(".scope").unwrap_or(part);
    let (runtime, id) = name.rsplit_once(['-', ':']).unwrap_or(("", name));
    let is_id = id.len() == CONTAINER_ID
        && id.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte));
    (is_id && !runtime.ends_with("conmon")).then(|| id.to_owned())
}

/// The outermost service or scope; below a user's manager, that manager's own.
fn unit(parts: &[&str]) -> Option<Placement> {
    let is_unit = |part: &&&str| [".service", ".scope"].iter().any(|kind| part.ends_with(kind));
    let mut units = parts.iter().filter(is_unit);
    let first = units.next()?;
    let unit = match units.next() {
        Some(own) if first.starts_with("user@") => format!("{first}/{own}"),
        _ => (*first).to_owned(),
    };
    Some(Placement::Unit { unit })
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.len() <= 20 && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests;
