//! Snapshots of nodes, made by hand: what the model would give in states that tests care about.

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use mps_exporter::engine::incident::{
    Cause, Culprit, CulpritEvidence, Evidence, Incident, IncidentDevice, IncidentState, IncidentXid,
    Recovery, Victim, VictimEvidence,
};
use mps_exporter::engine::snapshot::{
    ClientState, ClientView, Count, DaemonState, DaemonView, DeviceEvidence, Disagreement, DomainLabels,
    DomainView, GpuView, Histogram, Radius, Scope, ServerView, Sharing, Snapshot, SourceView, XidView,
};
use mps_exporter::event::{
    ComputeMode, LogPlace, RecoveryAction, Rejection, ServerStatus, SourceName, Trouble, XidSource,
};
use mps_exporter::identity::Workload;
use mps_exporter::metrics::labels::LabelValue;

const RECOVERY_BOUNDS: &[f64] = &[0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0];

/// A moment that all snapshots count from.
pub fn noon() -> Timestamp {
    "2026-04-01T12:00:00Z".parse().unwrap()
}

fn ago(seconds: i64) -> Timestamp {
    noon() - jiff::SignedDuration::from_secs(seconds)
}

/// A node of which nothing is known yet.
pub fn empty() -> Snapshot {
    Snapshot {
        generation: 0,
        at: noon(),
        daemons: Vec::new(),
        servers: Vec::new(),
        domains: Vec::new(),
        clients: Vec::new(),
        gpus: Vec::new(),
        xids: Vec::new(),
        sources: Vec::new(),
        incidents: Vec::new(),
        disagreements: Vec::new(),
    }
}

/// A node with one daemon and server, `gpus` GPUs, and `clients_per_gpu` clients on each, every client a workload of
/// its own. With an incident behind it and all sources up.
pub fn node(gpus: u32, clients_per_gpu: u32) -> Snapshot {
    let mut node = Snapshot { generation: 1, ..empty() };
    node.daemons.push(daemon("default"));
    node.servers.push(server("default", "uid_1000", gpus * clients_per_gpu));
    for index in 0..gpus {
        node.gpus.push(gpu(index));
        node.domains.push(domain("default", index, clients_per_gpu));
        for slot in 0..clients_per_gpu {
            node.clients.push(client(index, index * clients_per_gpu + slot));
        }
    }
    for source in [SourceName::Discovery, SourceName::Nvml, SourceName::KernelLog, SourceName::Proc] {
        node.sources.push(source_view(source, None));
    }
    for source in
        [SourceName::ControlLog, SourceName::ServerLog, SourceName::Control, SourceName::ControlLock]
    {
        node.sources.push(source_view(source, Some("default")));
    }
    node.incidents.push(Arc::new(incident("0195f0000001-1", Cause::Fault, "default/0")));
    node
}

/// A node on which everything is as odd as the types allow: unknown, infinite, hostile and plenty.
pub fn extreme() -> Snapshot {
    let mut node = node(3, 40);
    node.generation = u64::MAX;
    let hostile = "a\"b\\c\nd\re\u{0}f{}=,# EOF \u{1f600}";
    let mut odd = daemon(hostile);
    odd.state = DaemonState::Wedged;
    odd.pipe_directory = "/tmp/".repeat(2000);
    odd.pid = None;
    odd.pending_clients = None;
    odd.default_active_thread_percentage = Some(f64::NAN);
    odd.rejected = Rejection::ALL
        .iter()
        .map(|it| (*it, Count { total: u64::MAX, last: Some(Timestamp::MAX) }))
        .collect();
    odd.troubles =
        Trouble::ALL.iter().map(|it| (*it, Count { total: 1, last: Some(Timestamp::MIN) })).collect();
    node.daemons.push(odd);
    node.daemons.push(DaemonView { state: DaemonState::Unknown, ..daemon("unknown") });
    for (index, status) in [None, Some(ServerStatus::Fault)].into_iter().enumerate() {
        let mut it = server(hostile, &format!("pid_{index}"), 0);
        it.status = status;
        it.is_up = (index == 0).then_some(true);
        node.servers.push(it);
    }
    // The same server twice: the page must not show a series twice.
    node.servers.push(server("default", "uid_1000", 1));
    let mut lost = domain("default", 7, 0);
    lost.labels = Arc::new(DomainLabels {
        fault_domain: "default/MIG-x".into(),
        gpu: "".into(),
        uuid: "MIG-x".into(),
        gpu_instance: "7".into(),
    });
    lost.recovery_durations.observe(f64::INFINITY);
    lost.recovery_durations.observe(0.3);
    lost.radius = vec![(Scope::Gpu, Radius { memory_bytes: Some(u64::MAX), ..Radius::default() })];
    node.domains.push(lost);
    for action in RecoveryAction::ALL {
        let index = 100 + u32::try_from(node.gpus.len()).unwrap();
        node.gpus.push(GpuView { is_up: Some(false), recovery_action: Some(*action), ..gpu(index) });
    }
    for (code, source) in [(Some(31), XidSource::Kmsg), (Some(31), XidSource::Nvml), (None, XidSource::Kmsg)]
    {
        let count = Count { total: 5, last: Some(noon()) };
        node.xids.push(XidView {
            uuid: uuid(0),
            gpu: "0".into(),
            gpu_instance: "".into(),
            code,
            source,
            count,
        });
    }
    let about = "ps lists a client that server.log does not know".into();
    node.disagreements.push(Disagreement {
        source: SourceName::Control,
        daemon: Some("default".into()),
        about,
    });
    for cause in Cause::ALL {
        node.incidents.push(Arc::new(incident(
            &format!("0195f0000000-{}", cause.label()),
            *cause,
            "default/1",
        )));
    }
    node
}

pub fn uuid(index: u32) -> Arc<str> {
    format!("GPU-5c0a1b2c-0000-4000-8000-{index:012x}").into()
}

pub fn daemon(name: &str) -> DaemonView {
    DaemonView {
        name: name.into(),
        state: DaemonState::Serving,
        pid: Some(4000),
        started_at: Some(ago(86_400)),
        pipe_directory: "/tmp/nvidia-mps".into(),
        log_directory: "/var/log/nvidia-mps".into(),
        log: LogPlace::Files,
        protocol: Some("1".into()),
        version: Some("550".into()),
        pending_clients: Some(0),
        pending_oldest: None,
        default_active_thread_percentage: Some(100.0),
        rejected: Rejection::ALL.iter().map(|reason| (*reason, Count::default())).collect(),
        troubles: Vec::new(),
    }
}

pub fn server(daemon: &str, label: &str, clients: u32) -> ServerView {
    ServerView {
        daemon: daemon.into(),
        server: label.into(),
        is_up: Some(true),
        status: Some(ServerStatus::Active),
        pid: Some(4100),
        uid: Some(1000),
        version: Some("550".into()),
        started_at: Some(ago(86_000)),
        clients: Some(clients),
        starts: Count { total: 2, last: Some(ago(86_000)) },
        exits_orderly: Count { total: 1, last: Some(ago(86_100)) },
        exits_failed: Count::default(),
        faults: Count { total: 1, last: Some(ago(600)) },
        last_exit_status: Some(0),
        last_start_failure: None,
    }
}

pub fn domain(daemon: &str, index: u32, clients: u32) -> DomainView {
    let count = |total| Count { total, last: (total > 0).then(|| ago(600)) };
    let radius = Radius {
        clients: Some(clients),
        workloads: Some(clients),
        memory_bytes: Some(u64::from(clients) << 30),
        work_at_risk: Some(Duration::from_secs(3600) * clients),
    };
    let is_hit = u64::from(index == 0);
    let mut recovery_durations = Histogram::new(RECOVERY_BOUNDS);
    if is_hit == 1 {
        recovery_durations.observe(2.5);
    }
    DomainView {
        labels: Arc::new(DomainLabels {
            fault_domain: format!("{daemon}/{index}").into(),
            gpu: index.to_string().into(),
            uuid: uuid(index),
            gpu_instance: "".into(),
        }),
        daemon: Some(daemon.into()),
        sharing: Some(Sharing::Mps),
        model_name: Some("NVIDIA H200".into()),
        pci_bus_id: Some(format!("00000000:{index:02X}:00.0")),
        gpu_instance_profile: None,
        driver_version: Some("550.90.07".into()),
        clients: Some(clients),
        contexts: Some(clients),
        contexts_limit: Some(48),
        connects: count(u64::from(clients) + 3 * is_hit),
        disconnects: count(3 * is_hit),
        lost: LabelValue::ALL.iter().map(|cause| (*cause, Count::default())).collect(),
        radius: Scope::ALL.iter().map(|scope| (*scope, radius)).collect(),
        coupled_devices: Some(1),
        coupled_with: vec![format!("{daemon}/{index}").into()],
        bypassing_processes: Some(0),
        incidents: Cause::ALL
            .iter()
            .map(|cause| (*cause, if *cause == Cause::Fault { count(is_hit) } else { Count::default() }))
            .collect(),
        last_incidents: (is_hit == 1).then(|| (Cause::Fault, "0195f0000001-1".into())).into_iter().collect(),
        mass_losses: count(is_hit),
        mass_loss_last_clients: (is_hit == 1).then_some(3),
        recovery_blocking: 0,
        fault_started_at: None,
        recovery_durations,
    }
}

pub fn client(gpu: u32, number: u32) -> ClientView {
    ClientView {
        daemon: "default".into(),
        server: "uid_1000".into(),
        pid: 10_000 + number,
        host_pid: Some(10_000 + number),
        command: Some("train".into()),
        workload: Some(Workload::Pod {
            uid: format!("7d0e9f5c-0000-4000-8000-{number:012x}").into(),
            namespace: Some("research".into()),
            pod: Some(format!("train-{number}").into()),
            container: Some("main".into()),
        }),
        domains: vec![format!("default/{gpu}").into()],
        devices_known_by: Some(DeviceEvidence::Ps),
        contexts: 1,
        memory_bytes: Some(1 << 30),
        connected_at: Some(ago(3600)),
        started_at: Some(ago(3605)),
        checkpoint_at: None,
        has_checkpoint_place: false,
        state: ClientState::Active,
    }
}

pub fn gpu(index: u32) -> GpuView {
    GpuView {
        index,
        uuid: uuid(index),
        is_up: Some(true),
        compute_mode: Some(ComputeMode::ExclusiveProcess),
        recovery_action: Some(RecoveryAction::None),
    }
}

pub fn source_view(source: SourceName, daemon: Option<&str>) -> SourceView {
    SourceView {
        source,
        daemon: daemon.map(Into::into),
        is_up: true,
        reason: None,
        last_success: Some(noon()),
    }
}

pub fn incident(id: &str, cause: Cause, domain: &str) -> Incident {
    let victim = |pid| Victim {
        pid,
        command: Some("train".into()),
        workload: None,
        evidence: VictimEvidence::ServerLog,
        exited_at: Some(ago(598)),
        work_lost_seconds: Some(1800),
    };
    Incident {
        id: id.into(),
        started_at: ago(600),
        ended_at: Some(ago(597)),
        state: IncidentState::Closed,
        cause,
        mass_client_loss: true,
        clients_before: 3,
        server_pid: None,
        daemon: Some("default".into()),
        server: Some("uid_1000".into()),
        fault_domains: vec![domain.into()],
        devices: vec![IncidentDevice {
            uuid: uuid(0),
            gpu: "0".into(),
            gpu_instance: "".into(),
            mig_uuid: None,
        }],
        culprit: Some(Culprit {
            pid: 9001,
            command: Some("train".into()),
            workload: None,
            evidence: CulpritEvidence::ServerLog,
        }),
        victims: vec![victim(9001), victim(9002), victim(9003)],
        xids: vec![IncidentXid { xid: 31, source: XidSource::Kmsg, pid: Some(9001), at: ago(600), count: 1 }],
        recovery: Recovery { blocked_by: Vec::new(), recovered_at: Some(ago(597)), seconds: Some(2.5) },
        work_lost_seconds: Some(5400.0),
        evidence: vec![Evidence {
            source: "server.log".into(),
            at: ago(600),
            text: "fatal error of a client".into(),
        }],
        caught_up: false,
    }
}
