//! What a report holds, whatever the library lacks or refuses.

use mps_exporter::event::{ComputeMode, GpuFacts, GpuProcess, GpuReport, RecoveryAction};
use mps_exporter::identity::PciAddress;

use crate::GPUS;
use crate::rig::{Rig, Setup};

/// `GPUS` for a generation of the library.
fn shaped(shape: &str) -> String {
    format!("shape {shape}\n{GPUS}")
}

fn pids(list: Option<&Vec<GpuProcess>>) -> Option<Vec<(u32, Option<u64>)>> {
    list.map(|list| list.iter().map(|process| (process.pid, process.memory_bytes)).collect())
}

fn check_whole(report: &GpuReport, has_recovery_action: bool) {
    assert_eq!(report.driver_version.as_deref(), Some("580.65.06"));
    let [a, b] = &report.gpus[..] else { panic!("{report:?}") };
    assert_eq!((&*a.uuid, a.index, a.is_lost, a.mig_enabled), ("GPU-aaaa", 0, false, Some(false)));
    assert_eq!(a.pci, PciAddress { domain: 0, bus: 0x3b, device: 0 });
    assert_eq!(a.model.as_deref(), Some("NVIDIA A100-SXM4-40GB"));
    assert_eq!(a.compute_mode, Some(ComputeMode::ExclusiveProcess));
    assert_eq!(a.compute_capability, Some((8, 0)));
    assert_eq!(a.recovery_action, has_recovery_action.then_some(RecoveryAction::DrainP2p));
    let clients = vec![(711, Some(1000)), (712, None), (713, Some(3000))];
    assert_eq!(pids(a.mps_clients.as_ref()), Some(clients));
    assert_eq!(pids(a.compute_processes.as_ref()), Some(vec![(700, Some(300))]));
    assert!(a.instances.is_empty());

    assert_eq!((b.mig_enabled, b.compute_mode), (Some(true), None));
    assert_eq!(pids(b.mps_clients.as_ref()), Some(vec![(811, Some(500))]));
    assert_eq!(b.mps_clients.as_ref().unwrap()[0].gpu_instance, Some(1));
    let [first, second] = &b.instances[..] else { panic!("{b:?}") };
    assert_eq!((&*first.uuid, first.gpu_instance, first.compute_instance), ("MIG-b0", 1, 0));
    assert_eq!((first.profile.as_deref(), second.profile.as_deref()), (Some("3g.20gb"), Some("3g.20gb")));
    assert_eq!(first.compute_mode, Some(ComputeMode::ExclusiveProcess));
    assert_eq!(pids(first.mps_clients.as_ref()), Some(vec![(811, Some(500))]));
    assert_eq!(pids(first.compute_processes.as_ref()), Some(vec![]));
    assert_eq!((&*second.uuid, second.gpu_instance), ("MIG-b2", 2));
    assert_eq!(pids(second.compute_processes.as_ref()), Some(vec![(900, Some(70))]));
}

#[tokio::test]
async fn every_generation_gives_all_that_it_has() {
    let early: &[&str] = &["nvmlDeviceGetRunningProcessDetailList"];
    for (shape, missing, has_recovery_action) in
        [("early-535", early, false), ("535", &[], false), ("550", &[], false), ("580", &[], true)]
    {
        let mut rig = Rig::with(&Setup { script: &shaped(shape), missing, ..Setup::default() });
        check_whole(&rig.report().await, has_recovery_action);
        rig.up().await;
        rig.stop().await;
    }
}

#[tokio::test]
async fn entries_of_another_size_than_the_symbols_promise_are_read_right() {
    // 32 bytes where the symbols promise 24, and the other way round.
    for (shape, missing) in [("early-535", &[][..]), ("580", &["nvmlDeviceGetRunningProcessDetailList"])] {
        let mut rig = Rig::with(&Setup { script: &shaped(shape), missing, ..Setup::default() });
        check_whole(&rig.report().await, shape == "580");
    }
}

#[tokio::test]
async fn older_lists_serve_where_newer_ones_are_missing() {
    let v3 = ["nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v3"];
    let mut rig = Rig::with(&Setup { script: GPUS, missing: &v3, ..Setup::default() });
    check_whole(&rig.report().await, true);

    let v2 = ["nvmlDeviceGetMPSComputeRunningProcesses_v2", "nvmlDeviceGetComputeRunningProcesses_v2"];
    let mut rig = Rig::with(&Setup { script: GPUS, missing: &[v3, v2].concat(), ..Setup::default() });
    let report = rig.report().await;
    let clients = report.gpus[0].mps_clients.as_ref();
    assert_eq!(pids(clients), Some(vec![(711, Some(1000)), (712, None), (713, Some(3000))]));
    assert_eq!(
        report.gpus[1].mps_clients.as_ref().unwrap()[0].gpu_instance,
        None,
        "16 bytes have no instance"
    );
}

/// A call, what its failure takes from the report, and the same for its absence.
type Loss = (&'static str, fn(&mut GpuReport), fn(&mut GpuReport));

fn nothing(_: &mut GpuReport) {}

fn of_all(report: &mut GpuReport, lose: impl Fn(&mut GpuFacts)) {
    report.gpus.iter_mut().for_each(lose);
}

fn instances(report: &mut GpuReport) {
    of_all(report, |gpu| gpu.instances.clear());
}

fn mps_clients(report: &mut GpuReport) {
    of_all(report, |gpu| {
        gpu.mps_clients = None;
        gpu.instances.iter_mut().for_each(|instance| instance.mps_clients = None);
    });
}

fn compute_processes(report: &mut GpuReport) {
    of_all(report, |gpu| {
        gpu.compute_processes = None;
        gpu.instances.iter_mut().for_each(|instance| instance.compute_processes = None);
    });
}

fn mig_mode(report: &mut GpuReport) {
    of_all(report, |gpu| gpu.mig_enabled = None);
    instances(report);
}

fn compute_mode(report: &mut GpuReport) {
    of_all(report, |gpu| {
        gpu.compute_mode = None;
        gpu.instances.iter_mut().for_each(|instance| instance.compute_mode = None);
    });
}

fn names(report: &mut GpuReport) {
    of_all(report, |gpu| {
        gpu.model = None;
        gpu.instances.iter_mut().for_each(|instance| instance.profile = None);
    });
}

/// Without a PCI address from NVML the driver's files serve; they know the first GPU only.
fn second_gpu(report: &mut GpuReport) {
    report.gpus.truncate(1);
}

const LOSSES: [Loss; 18] = [
    (
        "nvmlSystemGetDriverVersion",
        |report| report.driver_version = None,
        |report| report.driver_version = None,
    ),
    ("nvmlDeviceGetName", names, names),
    ("nvmlDeviceGetPciInfo_v3", second_gpu, second_gpu),
    ("nvmlDeviceGetComputeMode", compute_mode, compute_mode),
    (
        "nvmlDeviceGetCudaComputeCapability",
        |report| of_all(report, |gpu| gpu.compute_capability = None),
        |report| of_all(report, |gpu| gpu.compute_capability = None),
    ),
    ("nvmlDeviceGetMigMode", mig_mode, mig_mode),
    ("nvmlDeviceGetMaxMigDeviceCount", instances, instances),
    ("nvmlDeviceGetMigDeviceHandleByIndex", instances, instances),
    ("nvmlDeviceGetGpuInstanceId", instances, instances),
    ("nvmlDeviceGetComputeInstanceId", instances, instances),
    (
        "nvmlDeviceGetFieldValues",
        |report| of_all(report, |gpu| gpu.recovery_action = None),
        |report| of_all(report, |gpu| gpu.recovery_action = None),
    ),
    ("nvmlDeviceGetMPSComputeRunningProcesses_v3", mps_clients, nothing),
    ("nvmlDeviceGetComputeRunningProcesses_v3", compute_processes, nothing),
    ("nvmlEventSetCreate", nothing, nothing),
    ("nvmlEventSetFree", nothing, nothing),
    ("nvmlDeviceGetSupportedEventTypes", nothing, nothing),
    ("nvmlDeviceRegisterEvents", nothing, nothing),
    ("nvmlEventSetWait_v2", nothing, nothing),
];

#[tokio::test]
async fn a_missing_symbol_costs_its_own_value_only() {
    let whole = Rig::new(GPUS).report().await;
    let rest =
        ["nvmlShutdown", "nvmlErrorString", "nvmlDeviceGetConfComputeMemSizeInfo", "nvmlInitWithFlags"];
    let rest = rest.map(|symbol| -> Loss { (symbol, nothing, nothing) });
    for (symbol, _, lose) in LOSSES.into_iter().chain(rest) {
        let mut rig = Rig::with(&Setup { script: GPUS, missing: &[symbol], ..Setup::default() });
        let mut expected = whole.clone();
        lose(&mut expected);
        assert_eq!(rig.report().await, expected, "without {symbol}");
        rig.up().await;
        rig.stop().await;
    }
}

#[tokio::test]
async fn an_error_costs_its_own_value_only_and_for_as_long_as_it_lasts() {
    let whole = Rig::new(GPUS).report().await;
    for (number, (function, lose, _)) in LOSSES.into_iter().enumerate() {
        // Codes that the binding knows and codes that it does not.
        let code = [3, 4, 999, 28, 4711][number % 5];
        let mut rig = Rig::new(&format!("{GPUS}error {function} {code}\n"));
        let mut expected = whole.clone();
        lose(&mut expected);
        let report = rig.report().await;
        assert_eq!(report, expected, "{function} returns {code}");
        rig.up().await;
        rig.script(GPUS);
        if function != "nvmlSystemGetDriverVersion" {
            rig.report_where("whole report", |report| *report == whole).await;
        }
        rig.stop().await;
    }
}

#[tokio::test]
async fn an_error_on_one_gpu_leaves_the_other_alone() {
    let mut rig = Rig::new(&format!("{GPUS}error nvmlDeviceGetMPSComputeRunningProcesses_v3 4 gpu=0\n"));
    let report = rig.report().await;
    assert_eq!(report.gpus[0].mps_clients, None);
    assert_eq!(pids(report.gpus[1].mps_clients.as_ref()), Some(vec![(811, Some(500))]));
}

#[tokio::test]
async fn a_list_that_grows_while_it_is_read_is_read_whole() {
    let mut rig = Rig::new(&format!("{GPUS}grow gpu=0 list=mps by=200 times=2\n"));
    let report = rig.report_where("long list", |report| {
        report.gpus[0].mps_clients.as_ref().is_some_and(|list| list.len() == 403)
    });
    let clients = report.await.gpus[0].mps_clients.clone().unwrap();
    assert_eq!((clients[0].pid, clients[3].pid, clients[402].pid), (711, 714, 713 + 400));
}

#[tokio::test]
async fn a_list_that_never_stops_growing_is_given_up() {
    let mut rig = Rig::new(&format!("{GPUS}grow gpu=0 list=mps by=9000 times=4000\n"));
    let report = rig.report_where("report without the list", |report| report.gpus[0].mps_clients.is_none());
    let report = report.await;
    assert_eq!(pids(report.gpus[0].compute_processes.as_ref()), Some(vec![(700, Some(300))]));
    rig.up().await;
}

#[tokio::test]
async fn processes_have_their_names_and_the_server_is_known() {
    let mut rig = Rig::new("driver 580.1\n");
    rig.process(700, "nvidia-cuda-mps", "/usr/bin/nvidia-cuda-mps-server");
    rig.process(711, "train", "/usr/bin/python3.11");
    rig.script(GPUS);
    let report = rig.report_where("GPUs", |report| !report.gpus.is_empty()).await;
    let server = &report.gpus[0].compute_processes.as_ref().unwrap()[0];
    assert_eq!((server.is_mps_server, server.command.as_deref()), (true, Some("nvidia-cuda-mps")));
    let clients = report.gpus[0].mps_clients.as_ref().unwrap();
    assert_eq!((clients[0].is_mps_server, clients[0].command.as_deref()), (false, Some("train")));
    assert_eq!((clients[1].is_mps_server, clients[1].command.as_deref()), (false, None));
}
