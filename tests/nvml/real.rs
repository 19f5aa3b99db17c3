//! NVIDIA's own library, where `scripts/get-mps-daemons` has put it; without a driver.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::rig::{Rig, Setup};

/// NVIDIA's libraries, one a driver version. Empty, with the reason printed, where they cannot be had; in CI, and with
/// `MPS_DAEMONS_REQUIRED` set, that is a failure.
fn libraries() -> Vec<PathBuf> {
    let project = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = std::env::var_os("MPS_DAEMONS").map_or_else(|| project.join("target/mps"), PathBuf::from);
    let fetched = Command::new(project.join("scripts/get-mps-daemons")).arg(&folder).output().unwrap();
    if !fetched.status.success() {
        let reason = String::from_utf8_lossy(&fetched.stderr).into_owned();
        let is_required = ["CI", "MPS_DAEMONS_REQUIRED"].iter().any(|name| std::env::var_os(name).is_some());
        assert!(!is_required, "{reason}");
        eprintln!("skipped: {reason}");
        return Vec::new();
    }
    let versions = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let found: Vec<PathBuf> =
        versions.map(|version| version.join("libnvidia-ml.so.1")).filter(|path| path.exists()).collect();
    assert!(!found.is_empty());
    found
}

#[tokio::test]
async fn without_a_driver_the_source_is_down_and_no_device_node_appears() {
    let node = PathBuf::from("/dev/nvidiactl");
    if node.exists() || PathBuf::from("/proc/driver/nvidia/version").exists() {
        eprintln!("skipped: this machine has an NVIDIA driver");
        return;
    }
    for library in libraries() {
        let mut rig =
            Rig::with(&Setup { has_driver: false, library: Some(library.clone()), ..Setup::default() });
        let reason = rig.down().await;
        assert!(reason.starts_with("the NVIDIA driver is not loaded: neither"), "{reason}");
        let cpu = cpu_time();
        let said = rig.said_within(Duration::from_secs(1)).await;
        let spent = cpu_time().saturating_sub(cpu);
        assert!(said.is_empty(), "{said:?}");
        assert!(!node.exists(), "{} created {}", library.display(), node.display());
        // Twenty looks for a driver, each with a load of the library to ask whether it is the stand-in.
        assert!(spent < Duration::from_millis(500), "{spent:?} of CPU in 1 s");
        rig.stop().await;
    }
}

/// CPU time of this process.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/schedstat").unwrap();
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let per_task = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("schedstat")).ok());
    let nanoseconds = |line: String| line.split(' ').next().and_then(|field| field.parse::<u64>().ok());
    let total: u64 = per_task.filter_map(nanoseconds).sum();
    Duration::from_nanos(total.max(nanoseconds(stat).unwrap_or(0)))
}

#[test]
fn the_stand_in_exports_nothing_that_nvidia_does_not() {
    let stand_in = mps_exporter::source::nvml::stand_in::library().expect("built with it");
    let names: Vec<&[u8]> = stand_in
        .split(|byte| *byte == 0)
        .filter(|name| {
            name.starts_with(b"nvml") && name.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
        })
        .collect();
    assert!(names.len() > 30, "{}", names.len());
    for library in libraries() {
        let real = std::fs::read(&library).unwrap();
        for name in &names {
            let with_end = [b"\0", *name, b"\0"].concat();
            let is_there = memchr::memmem::find(&real, &with_end).is_some();
            assert!(is_there, "{} lacks {}", library.display(), String::from_utf8_lossy(name));
        }
    }
}
