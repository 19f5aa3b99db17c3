//! What the model remembers of daemons, servers and clients.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use super::device::DeviceId;
use super::incident::Cause;
use super::resume::LogAwaited;
use super::snapshot::{Count, DeviceEvidence, Histogram, LossCause};
use crate::event::{DaemonSite, Liveness, LockState, Rejection, ServerStatus, Trouble};
use crate::identity::{ProcessId, Workload};
use crate::time::{Moment, Mono};

/// Buckets of `mps_recovery_duration_seconds`. Published recoveries took 0.07 to 1.5 s; a stuck victim has no limit.
pub(super) const RECOVERY_BUCKETS: [f64; 10] = [0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 300.0, 1800.0, 7200.0];

/// Sessions without an answer after which a daemon counts as wedged.
pub(super) const WEDGED_AFTER: u32 = 3;

/// Places of a daemon that are kept though none of their servers runs.
pub(super) const MAX_ENDED_PLACES: usize = 64;

/// A control daemon, its servers and the counters of its fault domains.
#[derive(Debug)]
pub(super) struct Daemon {
    pub site: DaemonSite,
    pub liveness: Option<Liveness>,
    /// A clean shutdown was announced: what ends now is no loss.
    pub is_stopping: bool,
    pub servers: BTreeMap<u32, Server>,
    /// Counters by server label. They outlive the servers, up to [`MAX_ENDED_PLACES`].
    pub places: BTreeMap<Arc<str>, Place>,
    /// How often any place was used.
    place_uses: u64,
    pub pending: Vec<Pending>,
    /// Servers that ended lately: an answer that was on its way may still list them.
    pub ended_servers: VecDeque<(u32, Mono)>,
    /// Every device on which this daemon ever had a client or a server.
    pub domains: BTreeMap<DeviceId, Domain>,
    /// Clients that left lately: evidence may still come.
    pub departed: VecDeque<Departure>,
    pub version: Option<Arc<str>>,
    pub protocol: Option<Arc<str>>,
    pub default_active_thread_percentage: Option<f64>,
    pub rejected: BTreeMap<Rejection, Count>,
    pub troubles: BTreeMap<Trouble, Count>,
    /// When a session last told all clients.
    pub looked_at: Option<Mono>,
    /// What waits for its log to be read; `None` once it has been.
    pub log_awaited: Option<LogAwaited>,
    /// Whether the last full session found what the logs had told.
    pub log_disagreement: Option<Arc<str>>,
    /// Whether outlets were told that it is down.
    pub told_down: bool,
    /// Whether it was ever seen alive: one that never was cannot go down.
    pub was_alive: bool,
}

/// A client of another uid, or one that came before the server was ready.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Pending {
    pub pid: u32,
    pub uid: u32,
    pub since: Timestamp,
}

/// The counters of a server label.
#[derive(Debug, Clone, Default)]
pub(super) struct Place {
    pub uid: Option<u32>,
    /// When it was used last, by [`Daemon::place_uses`].
    used: u64,
    pub starts: Count,
    pub exits_orderly: Count,
    pub exits_failed: Count,
    pub faults: Count,
    pub last_exit_status: Option<i32>,
    pub last_start_failure: Option<Arc<str>>,
}

/// The counters of a fault domain.
#[derive(Debug, Clone)]
pub(super) struct Domain {
    pub connects: Count,
    pub disconnects: Count,
    pub lost: BTreeMap<LossCause, Count>,
    pub incidents: BTreeMap<Cause, Count>,
    pub last_incidents: BTreeMap<Cause, Arc<str>>,
    pub mass_losses: Count,
    pub mass_loss_last_clients: Option<u32>,
    pub recovery_durations: Histogram,
}

impl Default for Domain {
    fn default() -> Self {
        Domain {
            connects: Count::default(),
            disconnects: Count::default(),
            lost: BTreeMap::new(),
            incidents: BTreeMap::new(),
            last_incidents: BTreeMap::new(),
            mass_losses: Count::default(),
            mass_loss_last_clients: None,
            recovery_durations: Histogram::new(&RECOVERY_BUCKETS),
        }
    }
}

/// A running MPS server.
#[derive(Debug)]
pub(super) struct Server {
    pub pid: u32,
    pub uid: Option<u32>,
    pub status: Option<ServerStatus>,
    pub started_at: Option<Timestamp>,
    pub version: Option<Arc<str>>,
    /// It announced its end, or the daemon asked for it.
    pub is_leaving: bool,
    pub clients: BTreeMap<ClientKey, Client>,
    pub fault: Option<Fault>,
    /// Devices associated by the log that no context has claimed yet.
    pub arriving: Vec<DeviceId>,
    /// Which bare-number or unnamed line makes the model doubt, and until when it waits for better news.
    pub doubt_until: Option<Mono>,
    /// When a client last left.
    pub last_departure: Option<Mono>,
    /// When the server was first heard of by news, not history.
    pub is_confirmed: bool,
    /// Its process is watched and has not ended.
    pub is_running: bool,
    /// Its process ended, or a line says so: the verdict waits for what may still be unread.
    pub ending: Option<Ending>,
    /// A line that told of an end which was none, until the daemon has been asked.
    pub refuted: Option<Arc<str>>,
    /// When something about it was last heard.
    pub touched: Mono,
}

/// A server's end, before it is known whether it was orderly.
#[derive(Debug, Clone)]
pub(super) struct Ending {
    pub at: Moment,
    pub status: Option<i32>,
    pub decide_at: Mono,
    /// Its daemon was dead by then: nobody was left to write down an announcement.
    pub is_orphan: bool,
    /// Nothing but a line tells of it, and the process is known to live.
    pub rests_on_line: bool,
    pub evidence: Arc<str>,
    pub evidence_source: &'static str,
}

/// A fatal GPU error that the server has not recovered from.
#[derive(Debug, Clone)]
pub(super) struct Fault {
    pub began: Moment,
    /// Ordinals of `The following devices will be reset` whose context has not been recreated yet.
    pub awaiting: BTreeSet<u32>,
    /// A context was recreated since.
    pub has_recreated: bool,
    /// Whose fault it is, by server.log.
    pub culprit: Option<u32>,
}

/// A client of a server. A daemon that cannot see its clients' pid namespace names them all 0; then only NVML's pid
/// tells them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum ClientKey {
    /// By the pid in the daemon's namespace.
    Named(u32),
    /// By the pid that NVML gives, in the exporter's namespace.
    Host(u32),
}

impl ClientKey {
    pub fn pid(self) -> u32 {
        match self {
            ClientKey::Named(pid) | ClientKey::Host(pid) => pid,
        }
    }
}

/// A client process.
#[derive(Debug, Clone)]
pub(super) struct Client {
    pub key: ClientKey,
    pub process: Option<ProcessId>,
    pub command: Option<Arc<str>>,
    pub workload: Option<Workload>,
    pub started_at: Option<Timestamp>,
    pub connected_at: Option<Timestamp>,
    /// Contexts by id, as logs and `ps` tell them.
    pub contexts: BTreeMap<u32, Context>,
    /// Devices and memory, as NVML tells them.
    pub nvml: BTreeMap<DeviceId, Option<u64>>,
    /// Devices on which it was counted as connected.
    pub counted_on: BTreeSet<DeviceId>,
    /// Whether its coming was news: only then its connection counts.
    pub is_news: bool,
    /// Whether anything but old log lines says that it exists.
    pub is_confirmed: bool,
    /// Whether it is known where its checkpoints are.
    pub has_checkpoint_place: bool,
    /// Its newest checkpoint.
    pub checkpoint: Option<Timestamp>,
    pub lost: Option<Lost>,
    /// `terminate_client` was used on it.
    pub is_terminating: bool,
    /// The kernel's OOM killer took it.
    pub oom: Option<Mono>,
    pub touched: Mono,
    /// NVML cycles in a row that did not list it on a device of its.
    pub missing_cycles: u32,
}

/// A lost client's loss.
#[derive(Debug, Clone)]
pub(super) struct Lost {
    /// The incident's number in the model.
    pub case: Option<u64>,
}

/// A context of a client.
#[derive(Debug, Clone, Default)]
pub(super) struct Context {
    pub device: Option<(DeviceId, DeviceEvidence)>,
}

/// A client that left.
#[derive(Debug, Clone)]
pub(super) struct Departure {
    pub client: Client,
    pub server: u32,
    pub at: Moment,
    pub devices: BTreeSet<DeviceId>,
    /// The coupled set that it belonged to.
    pub coupled: BTreeSet<DeviceId>,
    /// Clients of the coupled set when it left, itself included.
    pub clients_before: u32,
    /// Whether its loss has been explained, or its end announced.
    pub is_settled: bool,
}

impl Daemon {
    pub fn new(site: DaemonSite) -> Daemon {
        Daemon {
            site,
            liveness: None,
            is_stopping: false,
            servers: BTreeMap::new(),
            places: BTreeMap::new(),
            place_uses: 0,
            pending: Vec::new(),
            ended_servers: VecDeque::new(),
            domains: BTreeMap::new(),
            departed: VecDeque::new(),
            version: None,
            protocol: None,
            default_active_thread_percentage: None,
            rejected: BTreeMap::new(),
            troubles: BTreeMap::new(),
            looked_at: None,
            log_awaited: None,
            log_disagreement: None,
            told_down: false,
            was_alive: false,
        }
    }

    /// The server label's counters.
    pub fn place(&mut self, server_pid: u32) -> &mut Place {
        let server = self.servers.get(&server_pid);
        let (label, uid) =
            server.map_or_else(|| (label(None, server_pid), None), |server| (server.label(), server.uid));
        let place = self.use_place(label);
        place.uid = place.uid.or(uid);
        place
    }

    /// The place of this label. A new one takes the room of those that have not been used for longest: a server that
    /// fails at once and is started again and again, of whose uid no line has told, would make a new one each time.
    fn use_place(&mut self, label: Arc<str>) -> &mut Place {
        if !self.places.contains_key(&label) {
            self.keep_ended_places(MAX_ENDED_PLACES - 1);
        }
        self.place_uses += 1;
        let place = self.places.entry(label).or_default();
        place.used = self.place_uses;
        place
    }

    /// Forgets a server that has ended. Its place stays while there is room.
    pub fn forget_server(&mut self, server_pid: u32) {
        self.servers.remove(&server_pid);
        self.keep_ended_places(MAX_ENDED_PLACES);
    }

    fn keep_ended_places(&mut self, most: usize) {
        if self.places.len() <= most {
            return;
        }
        let running: BTreeSet<Arc<str>> = self.servers.values().map(Server::label).collect();
        let ended = self.places.iter().filter(|(label, _)| !running.contains(*label));
        let mut ended: Vec<(bool, u64, Arc<str>)> =
            ended.map(|(label, place)| (place.uid.is_some(), place.used, label.clone())).collect();
        ended.sort_unstable();
        let surplus = ended.len().saturating_sub(most);
        for (_, _, label) in ended.into_iter().take(surplus) {
            self.places.remove(&label);
        }
    }

    /// A server's uid became known: what was counted under its pid belongs to the uid.
    pub fn learn_uid(&mut self, server_pid: u32, uid: u32) {
        let Some(server) = self.servers.get_mut(&server_pid) else { return };
        if server.uid.is_some() {
            return;
        }
        let old = server.label();
        server.uid = Some(uid);
        let new = server.label();
        let Some(counted) = self.places.remove(&old) else { return };
        let place = self.use_place(new);
        place.uid = Some(uid);
        for (into, from) in [
            (&mut place.starts, counted.starts),
            (&mut place.exits_orderly, counted.exits_orderly),
            (&mut place.exits_failed, counted.exits_failed),
            (&mut place.faults, counted.faults),
        ] {
            into.total += from.total;
            into.last = into.last.max(from.last);
        }
    }

    /// Whether the lock says that the daemon lives; `None` when it cannot be told.
    pub fn is_alive(&self) -> Option<bool> {
        match self.liveness.as_ref().map(|liveness| liveness.state) {
            Some(LockState::Held(_) | LockState::HeldElsewhere) => Some(true),
            Some(LockState::Stale | LockState::Absent) => Some(false),
            Some(LockState::Unknown) | None => None,
        }
    }

    /// Another process of the daemon lives: what the earlier one announced is over.
    pub fn restarted(&mut self) {
        self.is_stopping = false;
        self.pending.clear();
        self.version = None;
    }

    /// A client's newest checkpoint is known.
    pub fn checkpoint(&mut self, pid: u32, newest: Option<Timestamp>) {
        for server in self.servers.values_mut() {
            if let Some(client) = server.clients.get_mut(&ClientKey::Named(pid)) {
                client.has_checkpoint_place = true;
                client.checkpoint = newest;
            }
        }
    }

    pub fn is_wedged(&self) -> bool {
        self.liveness.as_ref().is_some_and(|liveness| liveness.unanswered >= WEDGED_AFTER)
    }
}

/// The label `server`.
pub(super) fn label(uid: Option<u32>, pid: u32) -> Arc<str> {
    uid.map_or_else(|| format!("pid_{pid}"), |uid| format!("uid_{uid}")).into()
}

/// `set` and whatever `spans` join to it, directly or by others.
pub(super) fn component<'a>(
    mut set: BTreeSet<DeviceId>,
    spans: impl Iterator<Item = &'a BTreeSet<DeviceId>>,
) -> BTreeSet<DeviceId> {
    let mut apart: Vec<&BTreeSet<DeviceId>> = spans.collect();
    loop {
        let before = apart.len();
        apart.retain(|span| {
            let is_apart = span.is_disjoint(&set);
            if !is_apart {
                set.extend(*span);
            }
            is_apart
        });
        if apart.len() == before {
            return set;
        }
    }
}

impl Server {
    pub fn new(pid: u32, at: Mono) -> Server {
        Server {
            pid,
            uid: None,
            status: None,
            started_at: None,
            version: None,
            is_leaving: false,
            clients: BTreeMap::new(),
            fault: None,
            arriving: Vec::new(),
            doubt_until: None,
            last_departure: None,
            is_confirmed: false,
            is_running: false,
            ending: None,
            refuted: None,
            touched: at,
        }
    }

    /// The label `server`.
    pub fn label(&self) -> Arc<str> {
        label(self.uid, self.pid)
    }

    /// Clients that are not lost.
    pub fn active(&self) -> impl Iterator<Item = &Client> {
        self.clients.values().filter(|client| client.lost.is_none())
    }

    /// Lost clients whose process has not ended.
    pub fn blocking(&self) -> impl Iterator<Item = &Client> {
        self.clients.values().filter(|client| client.lost.is_some())
    }

    /// The coupled set that holds any of `devices`: the connected component of the clients-devices graph.
    ///
    /// NVIDIA documents one step (a client that spans two GPUs couples them); whether longer chains close is not
    /// documented, so the component is taken as the worst case.
    pub fn coupled(&self, devices: &BTreeSet<DeviceId>) -> BTreeSet<DeviceId> {
        let spanning = self.clients.values().filter(|client| client.spans_devices());
        let spans: Vec<BTreeSet<DeviceId>> = spanning.map(Client::devices).collect();
        component(devices.clone(), spans.iter())
    }
}

impl Client {
    pub fn new(key: ClientKey, at: Mono) -> Client {
        Client {
            key,
            process: None,
            command: None,
            workload: None,
            started_at: None,
            connected_at: None,
            contexts: BTreeMap::new(),
            nvml: BTreeMap::new(),
            counted_on: BTreeSet::new(),
            is_news: false,
            is_confirmed: false,
            has_checkpoint_place: false,
            checkpoint: None,
            lost: None,
            is_terminating: false,
            oom: None,
            touched: at,
            missing_cycles: 0,
        }
    }

    /// The pid in the exporter's namespace.
    pub fn host_pid(&self) -> Option<u32> {
        match (self.process, self.key) {
            (Some(process), _) => Some(process.pid),
            (None, ClientKey::Host(pid)) => Some(pid),
            (None, ClientKey::Named(_)) => None,
        }
    }

    /// Whether it is this process of the exporter's pid namespace.
    pub fn is_process(&self, host_pid: u32) -> bool {
        self.host_pid().map_or(self.key == ClientKey::Named(host_pid), |pid| pid == host_pid)
    }

    /// The devices on which it has contexts.
    pub fn devices(&self) -> BTreeSet<DeviceId> {
        self.each_device().collect()
    }

    /// Its devices as they come, a device perhaps several times. Cheap: it is asked of every client for every loss.
    pub fn each_device(&self) -> impl Iterator<Item = DeviceId> {
        let contexts = self.contexts.values().filter_map(|context| context.device.map(|(device, _)| device));
        contexts.chain(self.nvml.keys().copied())
    }

    /// Whether it is on more than one device.
    fn spans_devices(&self) -> bool {
        let mut devices = self.each_device();
        devices.next().is_some_and(|first| devices.any(|device| device != first))
    }

    /// Contexts on a device: as counted by logs or `ps`, else one where NVML lists it.
    pub fn contexts_on(&self, device: DeviceId) -> u32 {
        let told = self
            .contexts
            .values()
            .filter(|context| context.device.is_some_and(|(on, _)| on == device))
            .count();
        let listed = usize::from(self.nvml.contains_key(&device));
        u32::try_from(told.max(listed)).unwrap_or(u32::MAX)
    }

    /// What says on which devices it is: the best of its contexts' evidence.
    pub fn evidence(&self) -> Option<DeviceEvidence> {
        let told = self.contexts.values().filter_map(|context| context.device.map(|(_, evidence)| evidence));
        told.chain(self.nvml.keys().map(|_| DeviceEvidence::Nvml)).min()
    }

    /// Work since its last checkpoint, or since its start.
    pub fn work_at_risk(&self, now: Timestamp) -> Option<Duration> {
        let since = self.checkpoint.max(self.started_at)?;
        Some(Duration::try_from(now.duration_since(since)).unwrap_or_default())
    }

    /// Equal for the processes of one workload; this process's own where none is known.
    pub fn workload_key(&self) -> WorkloadKey<'_> {
        self.workload
            .as_ref()
            .map_or(WorkloadKey::Process(self.key), |workload| WorkloadKey::Known(workload.key()))
    }

    /// Its GPU memory, as NVML lists it; unknown as soon as it is unknown on one device.
    pub fn memory_bytes(&self) -> Option<u64> {
        let listed = Some(&self.nvml).filter(|nvml| !nvml.is_empty())?;
        listed.values().try_fold(0_u64, |sum, bytes| Some(sum.saturating_add((*bytes)?)))
    }
}

/// What tells workloads apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum WorkloadKey<'a> {
    /// A workload that a source named.
    Known((&'static str, &'a str)),
    /// A process that no source attributes.
    Process(ClientKey),
}

#[cfg(test)]
mod tests {
    use super::super::device::Devices;
    use super::*;
    use crate::identity::DeviceName;

    /// NVIDIA's example: A on GPU 0, B on 0 and 1, C on 1, D on 2.
    #[test]
    fn devices_that_a_client_spans_are_coupled_and_no_others() {
        let mut devices = Devices::default();
        let ids: Vec<DeviceId> = (0..3)
            .map(|n| devices.resolve(&DeviceName::Uuid(format!("GPU-{n}").into()), None).unwrap())
            .collect();
        let mut server = Server::new(1, Mono(0));
        for (pid, on) in [(10, vec![0]), (11, vec![0, 1]), (12, vec![1]), (13, vec![2])] {
            let mut client = Client::new(ClientKey::Named(pid), Mono(0));
            for (n, device) in on.into_iter().enumerate() {
                let device = Some((ids[device], DeviceEvidence::Ps));
                client.contexts.insert(u32::try_from(n).unwrap(), Context { device });
            }
            server.clients.insert(client.key, client);
        }
        let coupled = |n: usize| server.coupled(&BTreeSet::from([ids[n]]));
        assert_eq!(coupled(0), BTreeSet::from([ids[0], ids[1]]));
        assert_eq!(coupled(1), coupled(0));
        assert_eq!(coupled(2), BTreeSet::from([ids[2]]));
    }
}
