//! What NVML and the kernel log mean to the model.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::case::Case;
use super::device::{Device, DeviceId};
use super::incident::{Cause, CulpritEvidence, IncidentXid, VictimEvidence};
use super::loss::{Left, Loss};
use super::node::Core;
use super::snapshot::LossCause;
use super::state::{Client, ClientKey, Daemon};
use super::xids::{Kind, Report};
use crate::event::{GpuProcess, GpuReport, LockState, Sxid, Xid, XidSource};
use crate::identity::{DaemonName, PciAddress};
use crate::time::Moment;

/// NVML cycles that may miss a client before it counts as gone from the device.
const MISSING_CYCLES: u32 = 2;

/// The GPU has fallen off the bus: nothing on it lives on.
const OFF_THE_BUS: u32 = 79;

/// All daemons of the node.
type Daemons = BTreeMap<DaemonName, Daemon>;

impl Core {
    /// Applies an NVML cycle.
    pub fn gpus(&mut self, daemons: &mut Daemons, report: &GpuReport, at: Moment) {
        let lost_before: BTreeSet<DeviceId> =
            self.devices.iter().filter(|(_, device)| device.is_lost).map(|(id, _)| id).collect();
        self.devices.report(report);
        self.has_gpus = true;
        let listed: Vec<(DeviceId, Device)> = self
            .devices
            .iter()
            .filter(|(_, device)| device.is_listed)
            .map(|(id, device)| (id, device.clone()))
            .collect();
        for (id, device) in listed {
            if device.is_lost {
                if !lost_before.contains(&id) {
                    let text: Arc<str> = format!("NVML lost GPU {}", device.domain_part()).into();
                    self.device_lost(daemons, id, ("nvml", text), at);
                }
                continue;
            }
            let Some(facts) = &device.facts else { continue };
            if let Some(processes) = &facts.compute_processes {
                for process in processes.iter().filter(|process| process.is_mps_server) {
                    if let Some(daemon) = daemon_of_server(daemons, process.pid) {
                        daemon.domains.entry(id).or_default();
                    }
                }
            }
            if let Some(clients) = &facts.mps_clients {
                self.clients_on_device(daemons, id, clients, facts.compute_processes.as_deref(), at);
            }
        }
    }

    /// Joins NVML's list of a device's MPS clients with what logs and sessions told.
    fn clients_on_device(
        &mut self,
        daemons: &mut Daemons,
        id: DeviceId,
        listed: &[GpuProcess],
        compute: Option<&[GpuProcess]>,
        at: Moment,
    ) {
        let mut unknown = Vec::new();
        for process in listed {
            let found = daemons.values().find_map(|daemon| {
                let server = daemon.servers.values().find_map(|server| {
                    let client = server.clients.values().find(|client| client.is_process(process.pid))?;
                    Some((server.pid, client.key))
                })?;
                Some((daemon.site.name.clone(), server))
            });
            let Some((name, (server_pid, key))) = found else {
                unknown.push(process);
                continue;
            };
            let Some(daemon) = daemons.get_mut(&name) else { continue };
            listed_on(daemon, server_pid, key, id, process, at);
        }
        for process in unknown {
            self.adopt(daemons, id, process, compute, at);
        }
        for daemon in daemons.values_mut() {
            self.not_listed(daemon, id, listed, at);
        }
    }

    /// A client that neither logs nor sessions told of. It belongs to the one server that can serve this device; when
    /// several could, its daemon is asked instead.
    fn adopt(
        &mut self,
        daemons: &mut Daemons,
        id: DeviceId,
        process: &GpuProcess,
        compute: Option<&[GpuProcess]>,
        at: Moment,
    ) {
        let on_device: BTreeSet<u32> = compute
            .into_iter()
            .flatten()
            .filter(|process| process.is_mps_server)
            .map(|process| process.pid)
            .collect();
        let servers: Vec<(DaemonName, u32)> = daemons
            .values()
            .flat_map(|daemon| daemon.servers.values().map(|server| (daemon.site.name.clone(), server.pid)))
            .collect();
        let serving: Vec<&(DaemonName, u32)> =
            servers.iter().filter(|(_, pid)| on_device.contains(pid)).collect();
        let chosen = match (serving.as_slice(), servers.as_slice()) {
            ([only], _) => (*only).clone(),
            ([], [only]) => only.clone(),
            _ => {
                for daemon in daemons.values() {
                    self.effects.push(super::Effect::Look(daemon.site.name.clone()));
                }
                return;
            }
        };
        let Some(daemon) = daemons.get_mut(&chosen.0) else { return };
        // In the daemon's own pid namespace the pid is a name; else only NVML knows the process by it.
        let same_namespace =
            matches!(daemon.liveness.as_ref().map(|liveness| liveness.state), Some(LockState::Held(_)))
                && daemon.site.root.as_os_str().is_empty();
        let key = if same_namespace { ClientKey::Named(process.pid) } else { ClientKey::Host(process.pid) };
        let was_seen_before = self.is_up(crate::event::SourceName::Nvml, None);
        self.arrive(daemon, chosen.1, key, was_seen_before, at);
        listed_on(daemon, chosen.1, key, id, process, at);
    }

    /// Clients that the model has on a device, and NVML has not.
    fn not_listed(&mut self, daemon: &mut Daemon, id: DeviceId, listed: &[GpuProcess], at: Moment) {
        let mut gone = Vec::new();
        let mut asks = false;
        for server in daemon.servers.values_mut() {
            for client in server.clients.values_mut() {
                if listed.iter().any(|process| client.is_process(process.pid)) {
                    continue;
                }
                if client.nvml.remove(&id).is_some()
                    && client.nvml.is_empty()
                    && matches!(client.key, ClientKey::Host(_))
                {
                    gone.push((server.pid, client.key));
                } else if client.each_device().any(|device| device == id) {
                    client.missing_cycles += 1;
                    asks |= client.missing_cycles == MISSING_CYCLES;
                }
            }
        }
        for (server_pid, key) in gone {
            self.leave(daemon, server_pid, key, at, Left::Told);
        }
        if asks {
            self.effects.push(super::Effect::Look(daemon.site.name.clone()));
        }
    }

    /// NVML is switched off. Clients that only it told of are gone from the picture, which is no loss.
    pub fn nvml_off(&mut self, daemons: &mut Daemons) {
        self.has_gpus = false;
        self.devices.unlist();
        for daemon in daemons.values_mut() {
            for server in daemon.servers.values_mut() {
                server.clients.retain(|key, client| {
                    client.nvml.clear();
                    client.missing_cycles = 0;
                    let is_unseen = matches!(key, ClientKey::Host(_)) && client.lost.is_none();
                    if is_unseen {
                        self.effects.push(super::Effect::Unwatch(daemon.site.name.clone(), key.pid()));
                    }
                    !is_unseen
                });
            }
        }
    }

    /// Applies an Xid.
    pub fn xid(&mut self, daemons: &mut Daemons, xid: &Xid, at: Moment) {
        let by_uuid = xid.uuid.as_ref().map(|uuid| crate::identity::DeviceName::Uuid(uuid.clone()));
        let whole = by_uuid.and_then(|name| self.devices.resolve(&name, None));
        let pci = xid.pci.or_else(|| whole.and_then(|id| self.devices.get(id).pci));
        let device = match (pci, xid.gpu_instance, whole) {
            (Some(pci), instance, None) | (Some(pci), instance @ Some(_), _) => {
                self.devices.at_pci(pci, instance)
            }
            (_, _, whole) => whole,
        };
        let Some(device) = device else { return };
        if self.is_news() {
            self.xids.count(device, xid.code, xid.source, xid.count.max(1), at);
        }
        if let Some(action) = xid.recovery_action
            && let Some(facts) = &mut self.devices.entry(device).facts
        {
            facts.recovery_action =
                crate::event::RecoveryAction::from_number(action).or(facts.recovery_action);
        }
        if !self.is_news() {
            return;
        }
        let catalogue = self.settings.xids.clone();
        // 43, 45 and 154 tell of consequences; the cause that such a line names is what counts.
        let code = if crate::xid::is_never_primary(xid.code) { xid.caused_by } else { Some(xid.code) };
        let kind = match code {
            Some(code) if catalogue.is_gpu_fatal(code) => Kind::Gpu,
            Some(code) if catalogue.is_application(code) => Kind::Application,
            _ => Kind::Other,
        };
        let is_own_code = code == Some(xid.code);
        let pid = xid.pid.filter(|_| xid.pid_owns_channel && is_own_code);
        let kind = if kind == Kind::Application && !self.can_hit_clients(daemons, device, pid) {
            Kind::Other
        } else {
            kind
        };
        let report = Report {
            device,
            code: xid.code,
            at,
            told: self.now.mono,
            source: xid.source,
            pid,
            count: xid.count.max(1),
            text: xid.text.clone(),
            kind,
        };
        let (report, is_new) = self.xids.keep(report);
        self.report_into_cases(daemons, &report, is_new);
        if !is_new || kind == Kind::Other {
            return;
        }
        if code == Some(OFF_THE_BUS) {
            let text = xid.text.clone().unwrap_or_else(|| format!("Xid {}", xid.code).into());
            self.device_lost(daemons, device, (source_name(xid.source), text), at);
        }
        for daemon in daemons.values_mut() {
            let serves = daemon.domains.contains_key(&device);
            self.explain_departed(daemon, at);
            let is_in_fault = daemon.servers.values().any(|server| server.fault.is_some());
            if serves && !is_in_fault && !daemon.servers.is_empty() {
                self.effects.push(super::Effect::Look(daemon.site.name.clone()));
            }
        }
    }

    /// Whether an application's Xid can be one of an MPS client: its process is one, or nobody else is on the device.
    fn can_hit_clients(&self, daemons: &Daemons, device: DeviceId, pid: Option<u32>) -> bool {
        match pid {
            Some(pid) => daemons
                .values()
                .any(|daemon| daemon.servers.contains_key(&pid) || client_of(daemon, pid).is_some()),
            None => {
                daemons.values().any(|daemon| daemon.domains.contains_key(&device))
                    && self.bypassing(daemons, device).is_none_or(|processes| processes == 0)
            }
        }
    }

    /// Compute processes on a device that are neither MPS servers nor clients.
    pub fn bypassing(&self, daemons: &Daemons, device: DeviceId) -> Option<u32> {
        let facts = self.devices.get(device).facts.as_ref()?;
        let (compute, clients) = (facts.compute_processes.as_ref()?, facts.mps_clients.as_ref()?);
        let is_client = |pid: u32| {
            clients.iter().any(|client| client.pid == pid)
                || daemons.values().any(|daemon| {
                    daemon.servers.contains_key(&pid)
                        || daemon
                            .servers
                            .values()
                            .any(|server| server.clients.values().any(|client| client.is_process(pid)))
                })
        };
        let count =
            compute.iter().filter(|process| !process.is_mps_server && !is_client(process.pid)).count();
        u32::try_from(count).ok()
    }

    /// Adds an Xid to the open incidents that it belongs to.
    fn report_into_cases(&mut self, daemons: &mut Daemons, report: &Report, is_new: bool) {
        let window = self.settings.window;
        let numbers: Vec<(u64, DaemonName)> = self
            .cases
            .open_cases()
            .filter(|case| case.opened.distance(report.at.mono) <= window)
            .filter(|case| {
                daemons.get(&case.daemon).is_some_and(|daemon| self.is_of_case(daemon, case, report))
            })
            .map(|case| (case.number, case.daemon.clone()))
            .collect();
        for (number, name) in numbers {
            self.report_into_case(number, report);
            let Some(daemon) = daemons.get_mut(&name).filter(|_| is_new) else { continue };
            if report.kind == Kind::Gpu
                && let Some(case) = self.cases.get_mut(number)
            {
                case.incident_mut().cause = Cause::Gpu;
            }
            self.culprit_by_xid(daemon, number, report.at);
        }
    }

    /// Whether a report is about an incident: it is on one of its GPUs, or names a client of its daemon whose device no
    /// source has told.
    fn is_of_case(&self, daemon: &Daemon, case: &Case, report: &Report) -> bool {
        let is_on_device = case.devices.iter().any(|id| self.devices.same_gpu(*id).contains(&report.device));
        let is_of_unplaced = || {
            let client = report.pid.and_then(|pid| client_of(daemon, pid));
            client.is_some_and(|client| client.each_device().next().is_none())
        };
        is_on_device || is_of_unplaced()
    }

    fn report_into_case(&mut self, number: u64, report: &Report) {
        let Some(case) = self.cases.get_mut(number) else { return };
        case.xid(IncidentXid {
            xid: report.code,
            source: report.source,
            pid: report.pid,
            at: report.at.wall,
            count: report.count,
        });
        if let Some(text) = &report.text {
            case.evidence(source_name(report.source), report.at.wall, text);
        }
    }

    /// Adds the Xids that came before to an incident, and names the culprit by them.
    pub fn xids_into_case(&mut self, daemon: &Daemon, number: u64, at: Moment) {
        for report in self.reports_of_case(daemon, number, at) {
            self.report_into_case(number, &report);
        }
        self.culprit_by_xid(daemon, number, at);
    }

    fn reports_of_case(&mut self, daemon: &Daemon, number: u64, at: Moment) -> Vec<Report> {
        let window = self.settings.window;
        let Some(case) = self.cases.get(number) else { return Vec::new() };
        self.xids.near(at, window).filter(|report| self.is_of_case(daemon, case, report)).cloned().collect()
    }

    /// Names the culprit by the Xid line that names a channel's owner, when server.log named none.
    pub fn culprit_by_xid(&mut self, daemon: &Daemon, number: u64, at: Moment) {
        let reports = self.reports_of_case(daemon, number, at);
        let named =
            reports.iter().filter(|report| report.kind == Kind::Application).filter_map(|report| report.pid);
        let Some(client) = named.into_iter().find_map(|pid| client_of(daemon, pid)) else { return };
        if let Some(case) = self.cases.get_mut(number) {
            case.culprit(client.key.pid(), Some(client), CulpritEvidence::XidChannel);
        }
    }

    /// A GPU is gone: every client on it is lost, whether or not its process has ended.
    fn device_lost(
        &mut self,
        daemons: &mut Daemons,
        id: DeviceId,
        evidence: (&'static str, Arc<str>),
        at: Moment,
    ) {
        let gpu = self.devices.same_gpu(id);
        for device in &gpu {
            self.devices.entry(*device).is_lost = true;
        }
        let loss = Loss {
            cause: LossCause::Gpu,
            incident: Some(Cause::Gpu),
            victim: VictimEvidence::Snapshot,
            hits: None,
            at,
            evidence: Some(evidence),
        };
        for daemon in daemons.values_mut() {
            let hit: Vec<(u32, ClientKey)> = daemon
                .servers
                .values()
                .flat_map(|server| server.active().map(|client| (server.pid, client)))
                .filter(|(_, client)| client.each_device().any(|device| gpu.contains(&device)))
                .map(|(pid, client)| (pid, client.key))
                .collect();
            for (server_pid, key) in hit {
                self.lose_active(daemon, server_pid, key, &loss);
            }
        }
    }

    /// The kernel log says that a GPU fell off the bus.
    pub fn gpu_lost(&mut self, daemons: &mut Daemons, pci: PciAddress, at: Moment) {
        if !self.is_news() {
            return;
        }
        let Some(id) = self.devices.at_pci(pci, None) else { return };
        let text: Arc<str> = format!("GPU {pci} has fallen off the bus").into();
        self.device_lost(daemons, id, ("kmsg", text), at);
    }

    /// The driver failed every channel of a GPU for this Xid: all its clients are gone. The line names no GPU, the Xid
    /// line before it does.
    pub fn all_channels_failed(&mut self, daemons: &mut Daemons, code: u32, at: Moment) {
        let Some(report) = self.xids.latest(code, at) else { return };
        let device = report.device;
        let text: Arc<str> = format!("the driver failed all channels for critical error {code}").into();
        let is_lost = self.devices.get(device).is_lost;
        self.device_lost(daemons, device, ("kmsg", text), at);
        self.devices.entry(device).is_lost = is_lost;
    }

    /// An `NVSwitch` error: evidence for incidents that are open.
    pub fn sxid(&mut self, sxid: &Sxid, at: Moment) {
        let window = self.settings.window;
        let Some(text) = sxid
            .text
            .as_ref()
            .filter(|_| sxid.is_fatal && self.freshness != crate::event::Freshness::History)
        else {
            return;
        };
        for case in self.cases.open_cases_mut() {
            if case.opened.distance(at.mono) <= window {
                case.evidence("kmsg", at.wall, text);
            }
        }
    }

    /// The kernel ended a process for want of memory.
    pub fn oom_kill(&mut self, daemons: &mut Daemons, pid: u32, at: Moment) {
        if !self.is_news() {
            return;
        }
        self.ooms.push_back((pid, at));
        while self.ooms.len() > 256 {
            self.ooms.pop_front();
        }
        for daemon in daemons.values_mut() {
            for server in daemon.servers.values_mut() {
                for client in server.clients.values_mut().filter(|client| client.is_process(pid)) {
                    client.oom = Some(at.mono);
                }
            }
            self.explain_departed(daemon, at);
        }
        self.server_out_of_memory(pid, at);
    }
}

fn daemon_of_server(daemons: &mut Daemons, pid: u32) -> Option<&mut Daemon> {
    daemons.values_mut().find(|daemon| daemon.servers.contains_key(&pid))
}

fn source_name(source: XidSource) -> &'static str {
    match source {
        XidSource::Kmsg => "kmsg",
        XidSource::Nvml => "nvml",
    }
}

/// NVML lists a known client on a device.
fn listed_on(
    daemon: &mut Daemon,
    server_pid: u32,
    key: ClientKey,
    id: DeviceId,
    process: &GpuProcess,
    at: Moment,
) {
    if let Some(client) = daemon.client_mut(server_pid, key) {
        client.nvml.insert(id, process.memory_bytes);
        client.is_confirmed = true;
        client.missing_cycles = 0;
        if client.command.is_none() {
            client.command.clone_from(&process.command);
        }
    }
    daemon.note_devices(server_pid, key, at);
}

/// The client, or the one that left lately, that is this process of the exporter's pid namespace.
fn client_of(daemon: &Daemon, host_pid: u32) -> Option<&Client> {
    let clients = daemon.servers.values().flat_map(|server| server.clients.values());
    let departed = daemon.departed.iter().rev().map(|left| &left.client);
    clients.chain(departed).find(|client| client.is_process(host_pid))
}
