//! NVML's events.

use std::time::Duration;

use mps_exporter::event::{RecoveryAction, XidSource};

use crate::GPUS;
use crate::rig::{Rig, Setup};

/// A source that asks again only when it has a reason to.
async fn slow(script: &str, missing: &[&str]) -> Rig {
    let interval = Duration::from_secs(3600);
    let mut rig = Rig::with(&Setup { script, missing, interval, ..Setup::default() });
    rig.report().await;
    rig.settle(script).await;
    rig.skip();
    rig
}

#[tokio::test]
async fn an_xid_carries_its_gpu_and_its_instances() {
    for shape in ["early-535", "535", "550", "580"] {
        let script = format!("shape {shape}\n{GPUS}");
        let mut rig = slow(&script, &[]).await;
        rig.script(&format!("{script}event seq=1 gpu=1 xid=43 gi=2 ci=0\nevent seq=2 gpu=0 xid=31\n"));
        let xid = rig.xid().await;
        assert_eq!((xid.code, xid.source, xid.count), (43, XidSource::Nvml, 1));
        assert_eq!(xid.uuid.as_deref(), Some("GPU-bbbb"));
        assert_eq!((xid.gpu_instance, xid.compute_instance, xid.pid), (Some(2), Some(0), None));
        let xid = rig.xid().await;
        assert_eq!((xid.code, xid.gpu_instance, xid.compute_instance), (31, None, None));
        assert_eq!(xid.uuid.as_deref(), Some("GPU-aaaa"));
        rig.report().await;
        rig.stop().await;
    }
}

#[tokio::test]
async fn events_from_before_the_start_are_not_news() {
    let script = format!("{GPUS}event seq=1 gpu=0 xid=31\n");
    let mut rig = slow(&script, &[]).await;
    rig.script(&format!("{script}event seq=2 gpu=0 xid=45\n"));
    assert_eq!(rig.xid().await.code, 45);
}

#[tokio::test]
async fn a_storm_is_counted_in_few_batches() {
    let mut rig = slow(GPUS, &[]).await;
    let storm: Vec<String> = (1..=2000).map(|seq| format!("event seq={seq} gpu=0 xid=13")).collect();
    rig.script(&format!("{GPUS}{}\n", storm.join("\n")));
    let (mut count, mut batches) = (0, 0);
    while count < 2000 {
        count += rig.xid().await.count;
        batches += 1;
    }
    assert_eq!(count, 2000);
    assert!(batches <= 20, "{batches} batches");
}

#[tokio::test]
async fn a_mig_event_brings_the_new_layout_at_once() {
    let mut rig = slow(GPUS, &[]).await;
    let other = GPUS.replace("mig gpu=1 slot=0 uuid=MIG-b0 gi=1", "mig gpu=1 slot=5 uuid=MIG-new gi=7");
    rig.script(&format!("{other}event seq=1 gpu=1 type=0x100\n"));
    let report = rig.report_where("new layout", |report| report.gpus[1].instances.len() == 2).await;
    let mut instances: Vec<(&str, u32)> =
        report.gpus[1].instances.iter().map(|instance| (&*instance.uuid, instance.gpu_instance)).collect();
    instances.sort_unstable();
    assert_eq!(instances, [("MIG-b2", 2), ("MIG-new", 7)]);
}

#[tokio::test]
async fn events_beyond_the_bindings_bring_a_cycle_and_are_no_xids() {
    for bit in ["0x1000", "0x2000", "0x4000", "0x8000"] {
        let mut rig = slow(GPUS, &[]).await;
        let worse = GPUS.replace("recovery=3", "recovery=1");
        rig.script(&format!("{worse}event seq=1 gpu=0 type={bit}\nevent seq=2 gpu=0 xid=154\n"));
        let xid = rig.xid().await;
        assert_eq!((xid.code, xid.count), (154, 1), "{bit} is no Xid");
        let expected = Some(RecoveryAction::GpuReset);
        rig.report_where("new action", |report| report.gpus[0].recovery_action == expected).await;
    }
}

#[tokio::test]
async fn an_event_that_nobody_registered_for_is_not_delivered() {
    // 0x200 is a storm of corrected errors: nothing here depends on it.
    let mut rig = slow(GPUS, &[]).await;
    rig.script(&format!("{GPUS}event seq=1 gpu=0 type=0x200\n"));
    assert!(rig.said_within(Duration::from_millis(300)).await.is_empty());
}

#[tokio::test]
async fn a_gpu_that_refuses_registration_does_not_silence_the_other() {
    for code in [3, 15, 999] {
        let script = format!("{GPUS}error nvmlDeviceRegisterEvents {code} gpu=0\n");
        let mut rig = slow(&script, &[]).await;
        tokio::time::sleep(Duration::from_millis(if code == 999 { 1500 } else { 0 })).await;
        rig.script(&format!("{script}event seq=1 gpu=0 xid=31\nevent seq=2 gpu=1 xid=43\n"));
        assert_eq!(rig.xid().await.code, 43, "code {code}");
        rig.stop().await;
    }
}

#[tokio::test]
async fn a_wait_that_fails_is_tried_again_without_haste() {
    let mut rig = slow(GPUS, &[]).await;
    rig.script(&format!("{}{GPUS}error nvmlEventSetWait_v2 15\n", rig.trace()));
    rig.said_within(Duration::from_millis(2500)).await;
    let waits = rig.calls().iter().filter(|call| *call == "nvmlEventSetWait_v2").count();
    assert!(waits <= 12, "{waits} waits in 2.5 s");
    rig.script(GPUS);
    rig.stop().await;
}
