//! Drivers that come and go, GPUs that are lost, plugged and replaced, libraries that refuse.

use std::time::Duration;

use mps_exporter::event::GpuReport;

use crate::GPUS;
use crate::rig::{Rig, Setup};

fn lost(report: &GpuReport) -> Vec<(&str, bool)> {
    report.gpus.iter().map(|gpu| (&*gpu.uuid, gpu.is_lost)).collect()
}

#[tokio::test]
async fn a_lost_gpu_stays_in_the_report_until_it_is_back() {
    let mut rig = Rig::new(GPUS);
    let whole = rig.report().await;
    rig.script(&GPUS.replace("index=1", "index=1 lost=yes"));
    let report = rig.report_where("lost GPU", |report| report.gpus[1].is_lost).await;
    assert_eq!(lost(&report), [("GPU-aaaa", false), ("GPU-bbbb", true)]);
    let gpu = &report.gpus[1];
    assert_eq!((gpu.pci, &gpu.model, gpu.index), (whole.gpus[1].pci, &whole.gpus[1].model, 1));
    assert_eq!(gpu.instances.len(), 2, "what died with it");
    assert_eq!((&gpu.mps_clients, &gpu.compute_processes), (&None, &None), "unknown, not none");

    let first = GPUS.split("gpu index=1").next().unwrap();
    rig.script(first);
    for _cycle in 0..3 {
        assert_eq!(
            lost(&rig.report().await),
            [("GPU-aaaa", false), ("GPU-bbbb", true)],
            "no longer enumerated"
        );
    }
    rig.script(GPUS);
    assert_eq!(rig.report_where("GPU back", |report| !report.gpus[1].is_lost).await, whole);
}

#[tokio::test]
async fn a_gpu_that_any_call_finds_lost_is_lost() {
    let mut rig = Rig::new(GPUS);
    rig.report().await;
    for function in
        ["nvmlDeviceGetUUID", "nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetFieldValues"]
    {
        rig.script(&format!("{GPUS}error {function} 15 gpu=0\n"));
        let report = rig.report_where("lost GPU", |report| report.gpus[0].is_lost).await;
        assert_eq!(lost(&report), [("GPU-aaaa", true), ("GPU-bbbb", false)], "{function}");
        rig.script(GPUS);
        rig.report_where("GPU back", |report| !report.gpus[0].is_lost).await;
    }
}

#[tokio::test]
async fn another_gpu_in_the_same_place_replaces_a_lost_one() {
    let mut rig = Rig::new(GPUS);
    rig.report().await;
    rig.script(&GPUS.replace("GPU-bbbb", "GPU-dddd"));
    let report = rig.report_where("new GPU", |report| &*report.gpus[1].uuid == "GPU-dddd").await;
    assert_eq!(lost(&report), [("GPU-aaaa", false), ("GPU-dddd", false)]);
}

#[tokio::test]
async fn mig_may_be_reconfigured_at_any_time() {
    let mut rig = Rig::new(GPUS);
    rig.report().await;
    rig.script(&GPUS.replace("slot=2 uuid=MIG-b2", "slot=6 uuid=MIG-b6"));
    let report =
        rig.report_where("new layout", |report| &*report.gpus[1].instances[1].uuid == "MIG-b6").await;
    assert_eq!(report.gpus[1].instances.len(), 2);
    rig.script(&GPUS.replace("mig=on", "mig=off"));
    let report = rig.report_where("MIG off", |report| report.gpus[1].mig_enabled == Some(false)).await;
    assert!(report.gpus[1].instances.is_empty());
}

#[tokio::test]
async fn nvml_is_not_touched_while_no_driver_is_loaded() {
    // By its whole path even the stand-in is asked what it is, and nothing more.
    let library = std::path::PathBuf::from("libnvidia-ml.so.1");
    let mut rig = Rig::with(&Setup { has_driver: false, library: Some(library), ..Setup::default() });
    let reason = rig.down().await;
    assert!(reason.starts_with("the NVIDIA driver is not loaded"), "{reason}");
    assert!(rig.said_within(Duration::from_millis(300)).await.is_empty(), "the same reason is told once");
}

#[tokio::test]
async fn the_stand_in_needs_no_driver() {
    let mut rig = Rig::with(&Setup { script: GPUS, has_driver: false, ..Setup::default() });
    assert_eq!(rig.report().await.gpus.len(), 2);
    rig.up().await;
}

#[tokio::test]
async fn a_driver_may_be_unloaded_and_loaded_again() {
    let mut rig = Rig::new(GPUS);
    rig.up().await;
    rig.script(&format!("{}{GPUS}", rig.trace()));
    rig.folder.unload_driver();
    // The stand-in goes on without a driver; what matters is that the old session was ended first.
    while !rig.calls().iter().any(|call| call == "nvmlInit_v2") {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let calls = rig.calls();
    let place =
        |name: &str| calls.iter().position(|call| call == name).unwrap_or_else(|| panic!("no {name}"));
    assert!(place("nvmlEventSetFree") < place("nvmlShutdown"), "{calls:?}");
    assert!(place("nvmlShutdown") < place("nvmlInit_v2"), "{calls:?}");
    rig.folder.load_driver();
    rig.skip();
    rig.report_where("GPUs", |report| report.gpus.len() == 2).await;
}

#[tokio::test]
async fn a_gpu_that_the_driver_binds_later_has_nvml_initialised_anew() {
    let mut rig = Rig::new(GPUS);
    rig.up().await;
    rig.script(&format!("{}{GPUS}", rig.trace()));
    std::fs::create_dir(rig.folder.proc().join("driver/nvidia/gpus/0000:af:00.0")).unwrap();
    while !rig.calls().iter().any(|call| call == "nvmlInit_v2") {
        rig.report().await;
    }
    rig.report().await;
    let inits = rig.calls().iter().filter(|call| *call == "nvmlInit_v2").count();
    rig.said_within(Duration::from_millis(300)).await;
    assert_eq!(rig.calls().iter().filter(|call| *call == "nvmlInit_v2").count(), inits, "and only once");
}

#[tokio::test]
async fn failed_initialisations_become_rare() {
    let mut rig = Rig::new("");
    rig.script(&rig.trace());
    let reason = rig.down().await;
    assert!(reason.starts_with("nvmlInit_v2 failed: the NVIDIA driver is not loaded (code 9)"), "{reason}");
    // 50, 100, 200, then 400 ms apart.
    rig.said_within(Duration::from_secs(2)).await;
    let inits = rig.calls().iter().filter(|call| *call == "nvmlInit_v2").count();
    assert!((3..=9).contains(&inits), "{inits} initialisations in 2 s");
    rig.script(GPUS);
    rig.up().await;
}

#[tokio::test]
async fn a_library_that_stops_working_is_initialised_anew() {
    for (function, code, words) in [
        (
            "nvmlDeviceGetCount_v2",
            999,
            "nvmlDeviceGetCount_v2 failed: unknown error in the driver (code 999)",
        ),
        ("nvmlDeviceGetHandleByIndex_v2", 1, "nvmlDeviceGetHandleByIndex_v2 failed"),
        ("nvmlInit_v2", 18, "are of different versions"),
    ] {
        let mut rig = Rig::new(GPUS);
        rig.up().await;
        let failing = if function == "nvmlInit_v2" { "error nvmlDeviceGetCount_v2 9\n" } else { "" };
        rig.script(&format!("{GPUS}{failing}error {function} {code}\n"));
        let reason = rig.down_for(words).await;
        assert!(reason.contains(&format!("(code {code})")), "{reason}");
        rig.script(GPUS);
        rig.up().await;
        rig.report_where("GPUs", |report| report.gpus.len() == 2).await;
    }
}

#[tokio::test]
async fn a_library_that_cannot_be_loaded_is_named() {
    let library = std::path::PathBuf::from("/nowhere/libnvidia-ml.so.1");
    let mut rig = Rig::with(&Setup { library: Some(library), ..Setup::default() });
    let reason = rig.down().await;
    assert!(reason.starts_with("cannot load /nowhere/libnvidia-ml.so.1: "), "{reason}");
}

#[tokio::test]
async fn a_cycle_can_be_asked_for() {
    let interval = Duration::from_secs(3600);
    let mut rig = Rig::with(&Setup { script: GPUS, interval, ..Setup::default() });
    rig.report().await;
    rig.script(&GPUS.replace("pid=712", "pid=799"));
    rig.poke.poke();
    let report = rig.report().await;
    assert_eq!(report.gpus[0].mps_clients.as_ref().unwrap()[1].pid, 799);
}

#[tokio::test]
async fn the_threads_end_with_the_program() {
    let threads = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
        names.filter(|name| name.starts_with("nvml-")).count()
    };
    let before = threads();
    let mut rig = Rig::new(GPUS);
    rig.up().await;
    assert!(threads() >= 2);
    rig.stop().await;
    // Other tests of this process may run theirs at the same time.
    assert!(threads() <= before || std::env::var_os("NEXTEST").is_none(), "{} threads left", threads());
}
