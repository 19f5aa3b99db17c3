//! Who dies with whom: how far a fault on each device reaches, worked out once for a whole picture.
//!
//! Every client is added up once, and the sums are merged per device: a picture is taken after every change.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use super::case::domain_label;
use super::device::DeviceId;
use super::node::{Core, Node};
use super::snapshot::Radius;
use super::state::{Client, Daemon, Server, WorkloadKey, component};

/// A client and what is asked of it again and again.
pub(super) struct Seen<'a> {
    pub server: u32,
    pub client: &'a Client,
    /// Its devices, each once, in order.
    pub devices: Vec<DeviceId>,
    /// Equal for the clients of one workload.
    workload: usize,
    pub memory_bytes: Option<u64>,
    work_at_risk: Option<Duration>,
}

impl Seen<'_> {
    pub fn is_active(&self) -> bool {
        self.client.lost.is_none()
    }
}

/// A daemon, its clients and where they are.
pub(super) struct Site<'a> {
    pub daemon: &'a Daemon,
    pub seen: Vec<Seen<'a>>,
    /// The names of its fault domains.
    pub labels: BTreeMap<DeviceId, Arc<str>>,
    /// The clients on a device, as positions in `seen`.
    on: BTreeMap<DeviceId, Vec<usize>>,
    /// By server. Each is its own context: what couples devices for one server's clients does not for another's.
    contexts: BTreeMap<u32, Context>,
    /// Lost clients whose process has not ended, by incident.
    blocking: BTreeMap<Option<u64>, u32>,
}

/// A server's shared context, and what it takes with it.
#[derive(Default)]
struct Context {
    all: Sum,
    sets: Vec<CoupledSet>,
    /// The position in `sets` of a device.
    set_of: BTreeMap<DeviceId, usize>,
}

/// Devices that die together, and the clients on them.
struct CoupledSet {
    devices: BTreeSet<DeviceId>,
    sum: Sum,
}

/// What a fault on a device takes.
pub(super) struct Reach {
    /// When a client's fault is the cause.
    pub application: Radius,
    /// When the server dies.
    pub server: Radius,
    /// The devices that are hit with this one, and itself.
    pub coupled: BTreeSet<DeviceId>,
}

impl<'a> Site<'a> {
    /// All daemons of a node.
    pub fn all(node: &'a Node) -> Vec<Site<'a>> {
        let mut workloads = HashMap::new();
        node.daemons.values().map(|daemon| Site::new(&node.core, daemon, &mut workloads)).collect()
    }

    fn new(core: &Core, daemon: &'a Daemon, workloads: &mut HashMap<WorkloadKey<'a>, usize>) -> Site<'a> {
        let mut seen = Vec::new();
        for server in daemon.servers.values() {
            seen.extend(server.clients.values().map(|client| {
                let next = workloads.len();
                let mut devices: Vec<DeviceId> = client.each_device().collect();
                devices.sort_unstable();
                devices.dedup();
                Seen {
                    server: server.pid,
                    client,
                    devices,
                    workload: *workloads.entry(client.workload_key()).or_insert(next),
                    memory_bytes: client.memory_bytes(),
                    work_at_risk: client.work_at_risk(core.now.wall),
                }
            }));
        }
        let mut on: BTreeMap<DeviceId, Vec<usize>> = BTreeMap::new();
        for (place, seen) in seen.iter().enumerate() {
            for device in &seen.devices {
                on.entry(*device).or_default().push(place);
            }
        }
        let mut contexts: BTreeMap<u32, Context> = BTreeMap::new();
        for of_server in seen.chunk_by(|one, other| one.server == other.server) {
            contexts.insert(of_server[0].server, Context::new(of_server));
        }
        let mut blocking = BTreeMap::new();
        for lost in daemon.servers.values().flat_map(Server::blocking).filter_map(|it| it.lost.as_ref()) {
            *blocking.entry(lost.case).or_insert(0) += 1;
        }
        let name = |id| domain_label(&daemon.site.name, &core.devices, id);
        let labels = core.devices.iter().map(|(id, _)| (id, name(id))).collect();
        Site { daemon, seen, labels, on, contexts, blocking }
    }

    /// The clients on a device, lost ones too.
    pub fn on(&self, device: DeviceId) -> impl Iterator<Item = &Seen<'a>> {
        self.on.get(&device).into_iter().flatten().map(|place| &self.seen[*place])
    }

    /// What a fault on a device takes of this daemon's clients.
    pub fn reach(&self, device: DeviceId) -> Reach {
        let mut coupled = BTreeSet::from([device]);
        let (mut application, mut server) = (Sum::default(), Sum::default());
        for context in self.contexts.values() {
            let Some(set) = context.set_of.get(&device).map(|place| &context.sets[*place]) else { continue };
            coupled.extend(&set.devices);
            application.merge(&set.sum);
            server.merge(&context.all);
        }
        Reach { application: application.radius(), server: server.radius(), coupled }
    }

    /// Lost clients whose process has not ended: those on the device, and those of incidents that hit it.
    pub fn blocking(&self, core: &Core, device: DeviceId) -> u32 {
        let hits: BTreeSet<u64> = core
            .cases
            .open_cases()
            .filter(|case| case.devices.contains(&device))
            .map(|case| case.number)
            .collect();
        let of_cases = hits.iter().filter_map(|case| self.blocking.get(&Some(*case)));
        let others = self.on(device).filter_map(|seen| seen.client.lost.as_ref());
        let others = others.filter(|lost| !lost.case.is_some_and(|case| hits.contains(&case)));
        let others = u32::try_from(others.count()).unwrap_or(u32::MAX);
        of_cases.fold(others, |sum, count| sum.saturating_add(*count))
    }
}

/// Everything on a piece of hardware: clients of all daemons, and processes without MPS, on all MIG instances.
pub(super) fn gpu_radius(core: &Core, sites: &[Site<'_>], device: DeviceId) -> Radius {
    let gpu = core.devices.same_gpu(device);
    let mut sum = Sum::default();
    let mut pids = BTreeSet::new();
    for site in sites {
        // A client may be on several instances of one GPU.
        let places: BTreeSet<usize> =
            gpu.iter().filter_map(|device| site.on.get(device)).flatten().copied().collect();
        for seen in places.into_iter().map(|place| &site.seen[place]).filter(|seen| seen.is_active()) {
            sum.add(seen);
            pids.extend(seen.client.host_pid());
        }
    }
    // Without NVML nobody tells of the processes that do not use MPS.
    let mut others: BTreeMap<u32, Option<u64>> = BTreeMap::new();
    for device in &gpu {
        let Some(facts) = core.devices.get(*device).facts.as_ref() else { return Radius::default() };
        let Some(compute) = &facts.compute_processes else { return Radius::default() };
        for process in compute.iter().filter(|process| !process.is_mps_server) {
            if pids.contains(&process.pid) {
                continue;
            }
            let sum = others.entry(process.pid).or_insert(Some(0));
            *sum = sum.zip(process.memory_bytes).map(|(a, b)| a.saturating_add(b));
        }
    }
    let mine = sum.radius();
    let extra = u32::try_from(others.len()).unwrap_or(u32::MAX);
    let extra_memory = others.values().try_fold(0_u64, |sum, bytes| Some(sum.saturating_add((*bytes)?)));
    Radius {
        clients: mine.clients.map(|clients| clients.saturating_add(extra)),
        workloads: mine.workloads.map(|workloads| workloads.saturating_add(extra)),
        memory_bytes: mine.memory_bytes.zip(extra_memory).map(|(a, b)| a.saturating_add(b)),
        work_at_risk: mine.work_at_risk,
    }
}

impl Context {
    /// The context of one server's clients. A lost client couples its devices until it is gone.
    fn new(clients: &[Seen<'_>]) -> Context {
        let mut context = Context::default();
        let spans: BTreeSet<BTreeSet<DeviceId>> = clients
            .iter()
            .filter(|seen| seen.devices.len() > 1)
            .map(|seen| seen.devices.iter().copied().collect())
            .collect();
        for seen in clients {
            for device in &seen.devices {
                if !context.set_of.contains_key(device) {
                    let devices = component(BTreeSet::from([*device]), spans.iter());
                    context.set_of.extend(devices.iter().map(|device| (*device, context.sets.len())));
                    context.sets.push(CoupledSet { devices, sum: Sum::default() });
                }
            }
            if seen.is_active() {
                context.all.add(seen);
                // All devices of a client are in one set.
                if let Some(place) = seen.devices.first().and_then(|device| context.set_of.get(device)) {
                    context.sets[*place].sum.add(seen);
                }
            }
        }
        context
    }
}

/// Clients taken together.
struct Sum {
    clients: u32,
    /// With repetitions.
    workloads: Vec<usize>,
    /// Unknown as soon as it is unknown of one.
    memory_bytes: Option<u64>,
    /// Of those of which it is known.
    work_at_risk: Option<Duration>,
}

impl Default for Sum {
    fn default() -> Sum {
        Sum { clients: 0, workloads: Vec::new(), memory_bytes: Some(0), work_at_risk: None }
    }
}

impl Sum {
    fn add(&mut self, seen: &Seen<'_>) {
        self.workloads.push(seen.workload);
        self.add_amounts(1, seen.memory_bytes, seen.work_at_risk);
    }

    /// Adds other clients: a client is in one of the two only.
    fn merge(&mut self, other: &Sum) {
        self.workloads.extend(&other.workloads);
        self.add_amounts(other.clients, other.memory_bytes, other.work_at_risk);
    }

    fn add_amounts(&mut self, clients: u32, memory_bytes: Option<u64>, work_at_risk: Option<Duration>) {
        self.clients = self.clients.saturating_add(clients);
        self.memory_bytes = self.memory_bytes.zip(memory_bytes).map(|(a, b)| a.saturating_add(b));
        self.work_at_risk = match (self.work_at_risk, work_at_risk) {
            (Some(a), Some(b)) => Some(a.saturating_add(b)),
            (a, b) => a.or(b),
        };
    }

    fn radius(mut self) -> Radius {
        self.workloads.sort_unstable();
        self.workloads.dedup();
        Radius {
            clients: Some(self.clients),
            workloads: Some(u32::try_from(self.workloads.len()).unwrap_or(u32::MAX)),
            memory_bytes: self.memory_bytes,
            work_at_risk: if self.clients == 0 { Some(Duration::ZERO) } else { self.work_at_risk },
        }
    }
}
