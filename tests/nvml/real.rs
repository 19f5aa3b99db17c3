//! NVIDIA's own library, where `scripts/get-mps-daemons` has put it; without a driver.

use std::path::PathBuf;
use std::time::Duration;

use crate::rig::{Rig, Setup};

/// The libraries in `$MPS_DAEMONS`, by default `/tmp/mps`: `<version>/usr/lib/*/nvidia/current/libnvidia-ml.so.1`.
fn libraries() -> Vec<PathBuf> {
    let root = std::env::var_os("MPS_DAEMONS").map_or_else(|| PathBuf::from("/tmp/mps"), PathBuf::from);
    let versions = std::fs::read_dir(root).into_iter().flatten().flatten();
    let folder = format!("usr/lib/{}-linux-gnu/nvidia/current/libnvidia-ml.so.1", std::env::consts::ARCH);
    let found: Vec<PathBuf> =
        versions.map(|version| version.path().join(&folder)).filter(|path| path.exists()).collect();
    if found.is_empty() {
        eprintln!("skipped: no libnvidia-ml.so.1 of NVIDIA's here; run scripts/get-mps-daemons");
    }
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
