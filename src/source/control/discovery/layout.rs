//! Where deployments put a daemon's directories, and what to call it.

use std::path::{Path, PathBuf};

/// `CUDA_MPS_PIPE_DIRECTORY` when it is not set (NVIDIA's documentation).
pub const DEFAULT_PIPE: &str = "/tmp/nvidia-mps";
/// `CUDA_MPS_LOG_DIRECTORY` when it is not set (NVIDIA's documentation).
pub const DEFAULT_LOG: &str = "/var/log/nvidia-mps";
/// The default pipe directory of root in NVIDIA's newest documentation.
pub const DEFAULT_PIPE_OF_ROOT: &str = "/run/nvidia-mps";

/// Pipe directories of known deployments: bare metal; Kubernetes device plugin, GPU Operator and Bottlerocket;
/// Kubernetes DRA driver; ECS; Slurm's sample prolog and single users.
pub const WELL_KNOWN: [&str; 7] = [
    DEFAULT_PIPE,
    DEFAULT_PIPE_OF_ROOT,
    "/run/nvidia/mps/*/*/pipe",
    "/var/lib/kubelet/plugins/gpu.nvidia.com/mps/*/pipe",
    "/run/mps-ecs",
    "/tmp/nvidia-mps_*",
    "/tmp/nvidia-mps-*",
];

/// Whether this looks like a pipe directory that a daemon has used.
pub fn is_pipe_directory(path: &Path) -> bool {
    ["control_lock", "control"].iter().any(|name| path.join(name).symlink_metadata().is_ok())
}

/// The log directory that belongs to a pipe directory by convention. `root` is where both are reached.
pub fn log_directory(root: &Path, pipe: &Path) -> PathBuf {
    if [DEFAULT_PIPE, DEFAULT_PIPE_OF_ROOT].iter().any(|default| pipe == Path::new(default)) {
        return DEFAULT_LOG.into();
    }
    let name = pipe.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let parent = pipe.parent().unwrap_or(Path::new("/"));
    if name == "pipe" {
        return parent.join("log");
    }
    if let Some(device) = name.strip_prefix("nvidia-mps_") {
        return parent.join(format!("nvidia-log_{device}"));
    }
    let candidates = [pipe.to_owned(), pipe.join("log"), parent.join("log"), DEFAULT_LOG.into()];
    let has_log = |log: &&PathBuf| super::under(root, log).join("control.log").symlink_metadata().is_ok();
    candidates.iter().find(has_log).unwrap_or(&candidates[3]).clone()
}

/// What a daemon is called when nobody says otherwise: `default`, its Kubernetes resource, or its directory.
pub fn name(pipe: &Path) -> String {
    if [DEFAULT_PIPE, DEFAULT_PIPE_OF_ROOT].iter().any(|default| pipe == Path::new(default)) {
        return "default".to_owned();
    }
    let mut names = pipe.components().rev().map(|part| part.as_os_str().to_string_lossy());
    let mut own = names.next().unwrap_or_default();
    if own == "pipe" {
        own = names.next().unwrap_or_default();
        // A resource name has a domain: `nvidia.com/gpu.shared`.
        if let Some(domain) = names.next().filter(|domain| domain.contains('.')) {
            return format!("{domain}/{own}");
        }
    }
    match own.as_ref() {
        "" | "/" => "root".to_owned(),
        own => own.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_is_named_after_its_resource_or_directory() {
        for (pipe, expected) in [
            ("/tmp/nvidia-mps", "default"),
            ("/run/nvidia-mps", "default"),
            ("/run/nvidia/mps/nvidia.com/gpu.shared/pipe", "nvidia.com/gpu.shared"),
            ("/mps/nvidia.com/gpu/pipe", "nvidia.com/gpu"),
            ("/var/lib/kubelet/plugins/gpu.nvidia.com/mps/7c1f-9a/pipe", "7c1f-9a"),
            ("/run/mps-ecs", "mps-ecs"),
            ("/tmp/nvidia-mps_3", "nvidia-mps_3"),
            ("/home/alice/my pipe", "my pipe"),
            ("/pipe", "root"),
            ("/", "root"),
        ] {
            assert_eq!(name(Path::new(pipe)), expected);
        }
    }

    #[test]
    fn logs_are_where_the_layout_puts_them() {
        let none = Path::new("");
        for (pipe, expected) in [
            ("/tmp/nvidia-mps", "/var/log/nvidia-mps"),
            ("/run/nvidia/mps/nvidia.com/gpu/pipe", "/run/nvidia/mps/nvidia.com/gpu/log"),
            ("/tmp/nvidia-mps_3", "/tmp/nvidia-log_3"),
            ("/run/mps-ecs", "/var/log/nvidia-mps"),
        ] {
            assert_eq!(log_directory(none, Path::new(pipe)), Path::new(expected));
        }
        let own = tempfile::tempdir().unwrap();
        std::fs::write(own.path().join("control.log"), "").unwrap();
        assert_eq!(log_directory(none, own.path()), own.path());
    }
}
