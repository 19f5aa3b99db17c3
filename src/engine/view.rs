//! The state as outlets see it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::device::{Device, DeviceId, Name};
use super::incident::Cause;
use super::node::{Core, Node};
use super::reach::{Site, gpu_radius};
use super::snapshot::{
    ClientState, ClientView, Count, DaemonState, DaemonView, Disagreement, DomainLabels, DomainView, GpuView,
    LossCause, Radius, Scope, ServerView, Sharing, Snapshot, XidView,
};
use super::state::{Client, Daemon, Domain, Server};
use crate::event::{ComputeMode, Rejection, SourceName};

const REJECTIONS: [Rejection; 5] = [
    Rejection::ClientLimit,
    Rejection::DeviceConnectionLimit,
    Rejection::InReset,
    Rejection::Teardown,
    Rejection::Credentials,
];
const LOSSES: [LossCause; 6] = [
    LossCause::Fault,
    LossCause::ServerExit,
    LossCause::Gpu,
    LossCause::Killed,
    LossCause::Terminated,
    LossCause::Unexplained,
];
const CAUSES: [Cause; 5] = [Cause::Fault, Cause::ServerExit, Cause::Gpu, Cause::Killed, Cause::Unexplained];

pub(super) fn snapshot(node: &Node) -> Snapshot {
    let core = &node.core;
    let sites = Site::all(node);
    let mut domains: Vec<DomainView> = sites
        .iter()
        .flat_map(|site| {
            let counted = site.daemon.domains.iter();
            counted.map(|(id, counters)| domain(node, site, &sites, *id, counters))
        })
        .collect();
    let served: BTreeSet<DeviceId> =
        node.daemons.values().flat_map(|daemon| daemon.domains.keys().copied()).collect();
    for (id, device) in core.devices.iter() {
        let is_whole = device.facts.as_ref().is_some_and(|facts| !facts.is_mig_parent);
        if is_whole && !served.contains(&id) {
            domains.push(domain_without_mps(core, device));
        }
    }
    domains.sort_by(|a, b| a.labels.cmp(&b.labels));
    Snapshot {
        generation: core.generation,
        at: core.now.wall,
        daemons: node.daemons.values().map(|daemon| daemon_view(core, daemon)).collect(),
        servers: node.daemons.values().flat_map(|daemon| servers(core, daemon)).collect(),
        domains,
        clients: sites.iter().flat_map(clients).collect(),
        gpus: gpus(core),
        xids: xids(core),
        sources: core.sources.values().cloned().collect(),
        incidents: core.cases.list(),
        disagreements: node.daemons.values().filter_map(disagreement).collect(),
    }
}

fn count<T>(items: impl Iterator<Item = T>) -> u32 {
    u32::try_from(items.count()).unwrap_or(u32::MAX)
}

fn daemon_view(core: &Core, daemon: &Daemon) -> DaemonView {
    let site = &daemon.site;
    let name = Some(&site.name);
    let sees_pending = core.is_up(SourceName::ControlLog, name) || core.is_up(SourceName::DaemonOutput, name);
    let held = daemon.liveness.as_ref().and_then(|liveness| match liveness.state {
        crate::event::LockState::Held(process) => Some(process.pid),
        _ => None,
    });
    DaemonView {
        name: site.name.clone(),
        state: daemon_state(daemon),
        pid: held
            .or_else(|| site.process.map(|process| process.pid).filter(|_| daemon.is_alive() == Some(true))),
        started_at: site.started_at.filter(|_| daemon.is_alive() == Some(true)),
        pipe_directory: site.pipe_directory.to_string_lossy().into_owned(),
        log_directory: site.log_directory.to_string_lossy().into_owned(),
        log: site.log.clone(),
        protocol: daemon.protocol.clone(),
        version: daemon.version.clone(),
        pending_clients: sees_pending.then(|| count(daemon.pending.iter())),
        pending_oldest: daemon.pending.iter().map(|pending| pending.since).min().filter(|_| sees_pending),
        default_active_thread_percentage: daemon.default_active_thread_percentage,
        rejected: REJECTIONS
            .into_iter()
            .map(|reason| (reason, daemon.rejected.get(&reason).copied().unwrap_or_default()))
            .collect(),
        troubles: daemon.troubles.iter().map(|(trouble, count)| (*trouble, *count)).collect(),
    }
}

fn daemon_state(daemon: &Daemon) -> DaemonState {
    let is_serving = !daemon.servers.is_empty();
    match daemon.liveness.as_ref().map(|liveness| liveness.state) {
        Some(crate::event::LockState::Stale) => DaemonState::Stale,
        Some(crate::event::LockState::Absent) => DaemonState::Down,
        Some(crate::event::LockState::Held(_) | crate::event::LockState::HeldElsewhere) => {
            if daemon.is_wedged() {
                DaemonState::Wedged
            } else if is_serving {
                DaemonState::Serving
            } else {
                DaemonState::Idle
            }
        }
        Some(crate::event::LockState::Unknown) | None => DaemonState::Unknown,
    }
}

fn servers(core: &Core, daemon: &Daemon) -> Vec<ServerView> {
    let sees = core.sees_clients(daemon);
    let mut labels: BTreeMap<Arc<str>, Option<&Server>> =
        daemon.places.keys().map(|label| (label.clone(), None)).collect();
    for server in daemon.servers.values() {
        labels.insert(server.label(), Some(server));
    }
    let view = |(label, server): (Arc<str>, Option<&Server>)| {
        let place = daemon.places.get(&label).cloned().unwrap_or_default();
        ServerView {
            daemon: daemon.site.name.clone(),
            server: label,
            is_up: Some(server.is_some()),
            status: server.and_then(|server| server.status),
            pid: server.map(|server| server.pid),
            uid: server.map_or(place.uid, |server| server.uid),
            version: server.and_then(|server| server.version.clone()),
            started_at: server.and_then(|server| server.started_at),
            clients: match server {
                Some(server) => sees.then(|| count(server.active())),
                None => Some(0),
            },
            starts: place.starts,
            exits_orderly: place.exits_orderly,
            exits_failed: place.exits_failed,
            faults: place.faults,
            last_exit_status: place.last_exit_status,
            last_start_failure: place.last_start_failure,
        }
    };
    labels.into_iter().map(view).collect()
}

fn clients<'a>(site: &'a Site<'_>) -> impl Iterator<Item = ClientView> + use<'a> {
    let servers: BTreeMap<u32, Arc<str>> =
        site.daemon.servers.values().map(|server| (server.pid, server.label())).collect();
    site.seen.iter().map(move |seen| {
        let client = seen.client;
        ClientView {
            daemon: site.daemon.site.name.clone(),
            server: servers[&seen.server].clone(),
            pid: client.key.pid(),
            host_pid: client.host_pid(),
            command: client.command.clone(),
            workload: client.workload.clone(),
            domains: labels_of(site, &seen.devices),
            devices_known_by: client.evidence(),
            contexts: count(client.contexts.keys()).max(count(client.nvml.keys())),
            memory_bytes: seen.memory_bytes,
            connected_at: client.connected_at,
            started_at: client.started_at,
            checkpoint_at: client.checkpoint,
            has_checkpoint_place: client.has_checkpoint_place,
            state: if client.lost.is_some() { ClientState::Lost } else { ClientState::Active },
        }
    })
}

fn domain(node: &Node, site: &Site<'_>, sites: &[Site<'_>], id: DeviceId, counters: &Domain) -> DomainView {
    let core = &node.core;
    let daemon = site.daemon;
    let device = core.devices.get(id);
    let sees = core.sees_clients(daemon);
    let here: Vec<&Client> = site.on(id).filter(|seen| seen.is_active()).map(|seen| seen.client).collect();
    let reach = site.reach(id);
    let known = |radius: Radius| if sees { radius } else { Radius::default() };
    let scopes = vec![
        (Scope::Application, known(reach.application)),
        (Scope::Server, known(reach.server)),
        (Scope::Gpu, gpu_radius(core, sites, id)),
    ];
    let faults = daemon.servers.values().filter_map(|server| server.fault.as_ref());
    let is_hit = core.cases.open_cases().any(|case| {
        case.daemon == daemon.site.name
            && case.devices.contains(&id)
            && case.incident.recovery.recovered_at.is_none()
    });
    let facts = device.facts.as_ref();
    DomainView {
        labels: labels(site.labels[&id].clone(), device),
        daemon: Some(daemon.site.name.clone()),
        sharing: Some(Sharing::Mps),
        model_name: facts.and_then(|facts| facts.model.clone()),
        pci_bus_id: device.pci.map(|pci| pci.to_string()),
        gpu_instance_profile: facts
            .and_then(|facts| facts.instance.as_ref())
            .and_then(|instance| instance.2.clone()),
        driver_version: core.devices.driver_version.clone(),
        clients: sees.then(|| count(here.iter())),
        contexts: sees.then(|| here.iter().map(|client| client.contexts_on(id)).sum()),
        contexts_limit: facts.and_then(|facts| facts.contexts_limit(core.devices.driver_version.as_deref())),
        connects: counters.connects,
        disconnects: counters.disconnects,
        lost: LOSSES.into_iter().map(|cause| (cause, of(&counters.lost, &cause))).collect(),
        radius: scopes,
        coupled_devices: sees.then(|| count(reach.coupled.iter())),
        coupled_with: labels_of(site, &reach.coupled),
        bypassing_processes: core.bypassing(&node.daemons, id),
        incidents: CAUSES.into_iter().map(|cause| (cause, of(&counters.incidents, &cause))).collect(),
        last_incidents: counters.last_incidents.iter().map(|(cause, id)| (*cause, id.clone())).collect(),
        mass_losses: counters.mass_losses,
        mass_loss_last_clients: counters.mass_loss_last_clients,
        recovery_blocking: site.blocking(core, id),
        fault_started_at: faults.map(|fault| fault.began.wall).min().filter(|_| is_hit),
        recovery_durations: counters.recovery_durations.clone(),
    }
}

fn of<K: Ord>(counts: &BTreeMap<K, Count>, key: &K) -> Count {
    counts.get(key).copied().unwrap_or_default()
}

fn labels_of<'b>(site: &Site<'_>, devices: impl IntoIterator<Item = &'b DeviceId>) -> Vec<Arc<str>> {
    devices.into_iter().map(|id| site.labels[id].clone()).collect()
}

fn labels(fault_domain: Arc<str>, device: &Device) -> Arc<DomainLabels> {
    Arc::new(DomainLabels {
        fault_domain,
        gpu: device.gpu_label(),
        uuid: device.uuid_label(),
        gpu_instance: device.gpu_instance_label(),
    })
}

fn domain_without_mps(core: &Core, device: &Device) -> DomainView {
    let facts = device.facts.as_ref();
    let processes = facts.and_then(|facts| facts.compute_processes.as_ref());
    let sharing = facts.and_then(|facts| facts.compute_mode).and_then(|mode| match mode {
        ComputeMode::Default => Some(Sharing::TimeSlicing),
        ComputeMode::ExclusiveProcess | ComputeMode::ExclusiveThread => Some(Sharing::Exclusive),
        ComputeMode::Prohibited => None,
    });
    // Without MPS a process is its own fault domain: its fault takes the largest one at most.
    let largest =
        processes.map(|all| all.iter().filter_map(|process| process.memory_bytes).max().unwrap_or(0));
    let one = processes.map(|all| u32::from(!all.is_empty()));
    let sum = processes.and_then(|all| {
        all.iter().try_fold(0_u64, |sum, process| Some(sum.saturating_add(process.memory_bytes?)))
    });
    let all = processes.map(|all| count(all.iter()));
    let application = Radius { clients: one, workloads: one, memory_bytes: largest, work_at_risk: None };
    let gpu = Radius { clients: all, workloads: all, memory_bytes: sum, work_at_risk: None };
    let empty = Domain::default();
    DomainView {
        labels: labels(format!("gpu/{}", device.domain_part()).into(), device),
        daemon: None,
        sharing,
        model_name: facts.and_then(|facts| facts.model.clone()),
        pci_bus_id: device.pci.map(|pci| pci.to_string()),
        gpu_instance_profile: facts
            .and_then(|facts| facts.instance.as_ref())
            .and_then(|instance| instance.2.clone()),
        driver_version: core.devices.driver_version.clone(),
        clients: None,
        contexts: None,
        contexts_limit: None,
        connects: Count::default(),
        disconnects: Count::default(),
        lost: Vec::new(),
        radius: vec![(Scope::Application, application), (Scope::Gpu, gpu)],
        coupled_devices: None,
        coupled_with: Vec::new(),
        bypassing_processes: None,
        incidents: Vec::new(),
        last_incidents: Vec::new(),
        mass_losses: Count::default(),
        mass_loss_last_clients: None,
        recovery_blocking: 0,
        fault_started_at: None,
        recovery_durations: empty.recovery_durations,
    }
}

fn gpus(core: &Core) -> Vec<GpuView> {
    let nvml_up = core.is_up(SourceName::Nvml, None);
    let mut gpus: Vec<GpuView> = core
        .devices
        .iter()
        .filter_map(|(_, device)| {
            let facts = device.facts.as_ref().filter(|facts| facts.instance.is_none())?;
            let Name::Whole(uuid) = &device.name else { return None };
            let is_lost = device.is_lost || !device.is_listed;
            Some(GpuView {
                index: facts.index,
                uuid: uuid.clone(),
                is_up: if device.is_lost { Some(false) } else { nvml_up.then_some(!is_lost) },
                compute_mode: facts.compute_mode.filter(|_| nvml_up && !is_lost),
                recovery_action: facts.recovery_action,
            })
        })
        .collect();
    gpus.sort_by_key(|gpu| gpu.index);
    gpus
}

fn xids(core: &Core) -> Vec<XidView> {
    let view = |(key, count): (&super::xids::XidKey, &Count)| {
        let device = core.devices.get(key.device);
        let uuid = match &device.name {
            Name::PciOnly => device.pci.map_or_else(|| "".into(), |pci| pci.to_string().into()),
            _ => device.uuid_label(),
        };
        XidView {
            uuid,
            gpu: device.gpu_label(),
            gpu_instance: device.gpu_instance_label(),
            code: key.code,
            source: key.source,
            count: *count,
        }
    };
    core.xids.counts.iter().map(view).collect()
}

fn disagreement(daemon: &Daemon) -> Option<Disagreement> {
    let about = daemon.log_disagreement.clone()?;
    Some(Disagreement { source: SourceName::ServerLog, daemon: Some(daemon.site.name.clone()), about })
}
