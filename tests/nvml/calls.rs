//! Calls that hang.

use std::time::Duration;

use mps_exporter::event::EventKind;

use crate::GPUS;
use crate::rig::{NO_V2, NO_V3, Rig, THIRD, health};

/// What makes the source initialise NVML anew.
const FAILING: &str = "error nvmlDeviceGetCount_v2 999\n";
/// Every function that the poll thread calls, with what the script says beside the hang so that it is called.
const POLLED: [(&str, &[&str]); 22] = [
    ("nvmlInit_v2", &[FAILING]),
    ("nvmlSystemGetDriverVersion", &[FAILING]),
    ("nvmlShutdown", &[FAILING]),
    ("nvmlDeviceGetCount_v2", &[]),
    ("nvmlDeviceGetHandleByIndex_v2", &[]),
    ("nvmlDeviceGetUUID", &[]),
    ("nvmlDeviceGetName", &[THIRD]),
    ("nvmlDeviceGetPciInfo_v3", &[THIRD]),
    ("nvmlDeviceGetCudaComputeCapability", &[THIRD]),
    ("nvmlDeviceGetComputeMode", &[]),
    ("nvmlDeviceGetMigMode", &[]),
    ("nvmlDeviceGetMaxMigDeviceCount", &[]),
    ("nvmlDeviceGetMigDeviceHandleByIndex", &[]),
    ("nvmlDeviceGetGpuInstanceId", &[]),
    ("nvmlDeviceGetComputeInstanceId", &[]),
    ("nvmlDeviceGetFieldValues", &[]),
    ("nvmlDeviceGetMPSComputeRunningProcesses_v3", &[]),
    ("nvmlDeviceGetMPSComputeRunningProcesses_v2", &[NO_V3]),
    ("nvmlDeviceGetMPSComputeRunningProcesses", &[NO_V3, NO_V2]),
    ("nvmlDeviceGetComputeRunningProcesses_v3", &[]),
    ("nvmlDeviceGetComputeRunningProcesses_v2", &[NO_V3]),
    ("nvmlDeviceGetComputeRunningProcesses", &[NO_V3, NO_V2]),
];

#[tokio::test]
async fn a_hang_in_any_call_of_the_poll_thread_is_named_stops_nothing_else_and_ends_by_itself() {
    for (function, beside) in POLLED {
        let beside = beside.concat();
        let mut rig = Rig::new(GPUS);
        rig.up().await;
        rig.settle(GPUS).await;
        rig.script(&format!("{}{GPUS}{beside}hang {function}\n", rig.trace()));
        let reason = rig.down_for(function).await;
        assert!(reason.starts_with("stuck in ") && reason.contains(" since 2"), "{reason}");

        // The events thread waits on.
        let poll_calls =
            |calls: Vec<String>| calls.iter().filter(|call| *call != "nvmlEventSetWait_v2").count();
        let before = poll_calls(rig.calls());
        rig.skip();
        let said = rig.said_within(Duration::from_millis(300)).await;
        assert_eq!(poll_calls(rig.calls()), before, "no other call while {function} hangs");
        assert!(!said.iter().any(|kind| matches!(kind, EventKind::Gpus(_))), "{function}");
        assert!(!said.into_iter().any(|kind| health(kind) == Some(Ok(()))), "{function}");

        rig.script(GPUS);
        rig.up().await;
        rig.report_where("whole report", |report| report.gpus.len() >= 2).await;
        rig.stop().await;
    }
}

#[tokio::test]
async fn a_hang_in_any_call_of_the_events_thread_is_named_and_cycles_go_on() {
    let calls = [
        ("nvmlEventSetCreate", THIRD),
        ("nvmlEventSetFree", THIRD),
        ("nvmlDeviceGetSupportedEventTypes", THIRD),
        ("nvmlDeviceRegisterEvents", THIRD),
        ("nvmlEventSetWait_v2", ""),
    ];
    for (function, beside) in calls {
        let mut rig = Rig::new(GPUS);
        rig.up().await;
        rig.script(&format!("{GPUS}{beside}hang {function}\n"));
        let reason = rig.down_for(function).await;
        assert!(reason.starts_with("stuck in "), "{reason}");
        rig.skip();
        for _cycle in 0..3 {
            rig.report().await;
        }
        let said = rig.said_within(Duration::from_millis(200)).await;
        assert!(!said.into_iter().any(|kind| health(kind) == Some(Ok(()))), "{function}: no flapping");
        rig.script(GPUS);
        rig.up().await;
        rig.stop().await;
    }
}

#[tokio::test]
async fn an_xid_arrives_while_a_cycle_hangs() {
    let mut rig = Rig::new(GPUS);
    rig.up().await;
    rig.settle(GPUS).await;
    rig.script(&format!("{GPUS}hang nvmlDeviceGetFieldValues\n"));
    rig.down_for("stuck in nvmlDeviceGetFieldValues").await;
    rig.script(&format!("{GPUS}hang nvmlDeviceGetFieldValues\nevent seq=2 gpu=0 xid=31\n"));
    assert_eq!(rig.xid().await.code, 31);
    rig.skip();
    assert!(
        !rig.said_within(Duration::from_millis(100)).await.into_iter().any(|kind| health(kind).is_some())
    );
}

#[tokio::test]
async fn the_program_ends_in_time_although_both_threads_hang() {
    let mut rig = Rig::new(GPUS);
    rig.up().await;
    rig.script(&format!("{GPUS}hang nvmlDeviceGetCount_v2\nhang nvmlEventSetWait_v2\n"));
    rig.down_for("stuck in nvmlDeviceGetCount_v2").await;
    let started = std::time::Instant::now();
    rig.stop().await;
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}
