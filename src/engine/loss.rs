//! Which clients were lost, why, and which incident that is.
//!
//! A client that leaves is orderly unless there is evidence. Evidence may come before the client is seen to leave, or
//! shortly after: the log, the kernel log and the end of the process reach the exporter on different ways. So a client
//! that left is remembered for the window.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::Effect;
use super::case::Opening;
use super::device::DeviceId;
use super::incident::{Cause, Change, VictimEvidence};
use super::node::Core;
use super::snapshot::LossCause;
use super::state::{Client, ClientKey, Daemon, Departure, Lost, Server};
use crate::event::Freshness;
use crate::time::Moment;

/// How long after a client left an Xid may still explain it: the kernel log may be read later than the process's end.
const LATE_XID: Duration = Duration::from_secs(1);

/// How many clients that left are remembered per daemon.
const MAX_DEPARTED: usize = 4096;

/// A loss and what says so.
#[derive(Debug, Clone)]
pub(super) struct Loss {
    pub cause: LossCause,
    /// The incident that it opens or joins; `None` for an intended loss.
    pub incident: Option<Cause>,
    pub victim: VictimEvidence,
    /// The devices that are hit; `None` for the coupled set of the client that is lost.
    pub hits: Option<BTreeSet<DeviceId>>,
    pub at: Moment,
    /// Source and line.
    pub evidence: Option<(&'static str, Arc<str>)>,
}

/// Who ended a client, as far as known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Left {
    /// A log line, an NVML cycle or a session says that it is gone.
    Told,
    /// Its process ended.
    Exited,
}

impl Core {
    /// Opens an incident, or finds the one that this belongs to.
    pub fn case_for(
        &mut self,
        daemon: &mut Daemon,
        server_pid: Option<u32>,
        devices: &BTreeSet<DeviceId>,
        cause: Cause,
        at: Moment,
    ) -> Option<u64> {
        let server_label = server_pid.and_then(|pid| daemon.servers.get(&pid)).map(Server::label);
        let name = daemon.site.name.clone();
        let opening = Opening {
            daemon: &name,
            server_pid,
            server_label,
            devices,
            cause,
            at,
            now: self.now.mono,
            freshness: self.freshness,
        };
        let window = self.settings.window;
        let joined = self.cases.matching(&opening, window);
        let number = match joined {
            Some(number) => number,
            None if self.freshness == Freshness::History || self.cases.is_over(&opening, window) => {
                return None;
            }
            None => self.cases.open(&opening),
        };
        let is_news = self.is_news();
        let case = self.cases.get_mut(number)?;
        case.incident_mut().server_pid = case.incident.server_pid.or(server_pid);
        let has_grown = joined.is_none() || !devices.is_subset(&case.devices);
        case.devices.extend(devices);
        // A cause with evidence stands over one that was only supposed.
        let is_weak = matches!(case.incident.cause, Cause::Killed | Cause::Unexplained);
        if (is_weak && !matches!(cause, Cause::Killed | Cause::Unexplained)) || cause == Cause::Gpu {
            case.incident_mut().cause = cause;
        }
        case.label(&self.devices);
        case.note(Change::Updated);
        case.count(daemon, is_news);
        if has_grown {
            // Xids that came before belong to it, and may name the culprit.
            self.xids_into_case(daemon, number, at);
        }
        Some(number)
    }

    /// Adds a victim to an incident and says whether that makes it a mass client loss.
    fn add_victim(
        &mut self,
        daemon: &mut Daemon,
        number: u64,
        client: &Client,
        before: u32,
        loss: &Loss,
        exited: Option<Moment>,
    ) {
        let exited_at = exited.map(|at| at.wall);
        let Some(case) = self.cases.get_mut(number) else { return };
        case.victim(client, loss.victim, loss.at.wall, exited_at);
        if let Some((source, text)) = &loss.evidence {
            case.evidence(source, loss.at.wall, text);
        }
        let lost = u32::try_from(case.incident.victims.len()).unwrap_or(u32::MAX);
        case.incident_mut().clients_before = case.incident.clients_before.max(before).max(lost);
        let ratio = f64::from(lost) / f64::from(case.incident.clients_before);
        let is_mass = lost >= self.settings.min_clients
            && ratio >= self.settings.min_ratio
            && case.incident.cause != Cause::Unexplained;
        let becomes_mass = is_mass && !case.incident.mass_client_loss;
        if becomes_mass {
            case.incident_mut().mass_client_loss = true;
            case.note(Change::MassLoss);
        }
        case.count_mass_loss(daemon, loss.at.wall, self.freshness != Freshness::History);
    }

    /// Counts a loss on `devices`, unless the earlier run that recorded its incident has.
    fn count_loss(
        &self,
        daemon: &mut Daemon,
        devices: &BTreeSet<DeviceId>,
        loss: &Loss,
        key: ClientKey,
        number: Option<u64>,
    ) {
        let case = number.and_then(|number| self.cases.get(number));
        let is_over = case.is_none() && loss.incident.is_some();
        let is_recorded = case.is_some_and(|case| case.is_restored && case.has_victim(key));
        if self.is_news() && !is_over && !is_recorded {
            for device in devices {
                daemon
                    .domains
                    .entry(*device)
                    .or_default()
                    .lost
                    .entry(loss.cause)
                    .or_default()
                    .add(loss.at.wall);
            }
        }
    }

    /// A client is lost while its process still runs: it blocks recovery until it ends.
    pub fn lose_active(&mut self, daemon: &mut Daemon, server_pid: u32, key: ClientKey, loss: &Loss) {
        let Some(server) = daemon.servers.get_mut(&server_pid) else { return };
        let Some(client) = server.clients.get(&key).cloned() else { return };
        if let Some(lost) = client.lost {
            // Better evidence for a known loss.
            if let Some(case) = lost.case.and_then(|number| self.cases.get_mut(number)) {
                case.victim(&server.clients[&key], loss.victim, loss.at.wall, None);
            }
            return;
        }
        let devices = client.devices();
        let hit = loss.hits.clone().unwrap_or_else(|| server.coupled(&devices));
        let before = clients_on(server, &hit);
        if let Some(client) = server.clients.get_mut(&key) {
            client.lost = Some(Lost { case: None });
        }
        let devices = if devices.is_empty() { self.placeholder(daemon, server_pid) } else { devices };
        let number =
            loss.incident.and_then(|cause| self.case_for(daemon, Some(server_pid), &hit, cause, loss.at));
        self.count_loss(daemon, &devices, loss, key, number);
        let Some(number) = number else { return };
        self.add_victim(daemon, number, &client, before, loss, None);
        if let Some(client) = daemon.client_mut(server_pid, key) {
            client.lost = Some(Lost { case: Some(number) });
        }
        self.update_blocking(daemon, number);
    }

    /// A client that has left turns out to be lost.
    pub fn lose_departed(&mut self, daemon: &mut Daemon, left: &Departure, loss: &Loss) {
        for other in &mut daemon.departed {
            if other.server == left.server && other.client.key == left.client.key && other.at == left.at {
                other.is_settled = true;
            }
        }
        let devices = if left.devices.is_empty() {
            self.placeholder(daemon, left.server)
        } else {
            left.devices.clone()
        };
        let hit = loss.hits.as_ref().unwrap_or(&left.coupled);
        let number =
            loss.incident.and_then(|cause| self.case_for(daemon, Some(left.server), hit, cause, loss.at));
        self.count_loss(daemon, &devices, loss, left.client.key, number);
        let Some(number) = number else { return };
        self.add_victim(daemon, number, &left.client, left.clients_before, loss, Some(left.at));
    }

    /// The devices to blame when no source tells on which a lost client was: the only one of its daemon, or a
    /// placeholder. A loss is never dropped for want of a label.
    fn placeholder(&mut self, daemon: &Daemon, _server_pid: u32) -> BTreeSet<DeviceId> {
        let known: Vec<DeviceId> = daemon.domains.keys().copied().collect();
        match known.as_slice() {
            [only] => BTreeSet::from([*only]),
            _ => self.devices.unknown(&daemon.site.name).into_iter().collect(),
        }
    }

    /// A client is gone from its server.
    pub fn leave(&mut self, daemon: &mut Daemon, server_pid: u32, key: ClientKey, at: Moment, left: Left) {
        let Some(server) = daemon.servers.get_mut(&server_pid) else { return };
        let Some(client) = server.clients.get(&key).cloned() else { return };
        let devices = client.devices();
        // Whom it was with is asked of all clients of the server, so only where a loss may come of it.
        let may_be_loss =
            client.lost.is_none() && client.is_confirmed && self.freshness != Freshness::History;
        let company = may_be_loss.then(|| {
            let coupled = server.coupled(&devices);
            let clients_before = clients_on(server, &coupled);
            (coupled, clients_before)
        });
        server.clients.remove(&key);
        server.last_departure = Some(at.mono);
        server.touched = at.mono;
        if left == Left::Told && client.lost.is_none() {
            self.effects.push(Effect::Unwatch(daemon.site.name.clone(), key.pid()));
        }
        if self.is_news() && client.is_confirmed {
            for device in &devices {
                daemon.domains.entry(*device).or_default().disconnects.add(at.wall);
            }
        }
        if let Some(lost) = &client.lost {
            if let Some(number) = lost.case {
                if let Some(case) = self.cases.get_mut(number) {
                    case.victim_exited(key, at.wall);
                }
                self.update_blocking(daemon, number);
            }
            self.check_recovery(daemon, server_pid, at);
            return;
        }
        let Some((coupled, clients_before)) = company else { return };
        let departure = Departure {
            client,
            server: server_pid,
            at,
            devices,
            coupled,
            clients_before,
            is_settled: daemon.is_stopping
                || daemon.servers.get(&server_pid).is_some_and(|server| server.is_leaving),
        };
        let loss = self.explain(daemon, &departure);
        if daemon.departed.len() >= MAX_DEPARTED {
            daemon.departed.pop_front();
        }
        daemon.departed.push_back(departure.clone());
        if let Some(loss) = loss {
            self.lose_departed(daemon, &departure, &loss);
        }
    }

    /// Why a client that leaves now is lost, by evidence that came before.
    fn explain(&self, daemon: &Daemon, left: &Departure) -> Option<Loss> {
        let window = self.settings.window;
        let at = left.at;
        let loss = |cause, incident, text: Option<(&'static str, Arc<str>)>| Loss {
            cause,
            incident,
            victim: VictimEvidence::Snapshot,
            hits: None,
            at,
            evidence: text,
        };
        if left.client.is_terminating {
            return Some(loss(LossCause::Terminated, None, None));
        }
        let server = daemon.servers.get(&left.server);
        if let Some(fault) = server.and_then(|server| server.fault.as_ref()) {
            let hit = self.cases.open_cases().filter(|case| {
                case.daemon == daemon.site.name
                    && case.incident.server_pid == Some(left.server)
                    && case.incident.cause == Cause::Fault
            });
            let mut devices = BTreeSet::new();
            for case in hit {
                devices.extend(&case.devices);
            }
            if devices.is_empty() || left.coupled.is_empty() || !devices.is_disjoint(&left.coupled) {
                let text = "it left while its server was handling a fatal GPU error";
                // Beyond the window it is the fault's own incident that it belongs to.
                let mut loss = loss(LossCause::Fault, Some(Cause::Fault), Some(("proc", text.into())));
                if at.mono.since(fault.began.mono) > window {
                    loss.at = Moment { wall: at.wall, mono: fault.began.mono };
                }
                return Some(loss);
            }
        }
        if let Some(xid) = self.xids.explains(&self.devices, left, at, window) {
            let (cause, incident) = if xid.is_gpu_level {
                (LossCause::Gpu, Cause::Gpu)
            } else {
                (LossCause::Fault, Cause::Fault)
            };
            return Some(loss(cause, Some(incident), xid.text));
        }
        let killed =
            left.client.host_pid().is_some_and(|pid| self.ooms.iter().any(|(killed, _)| *killed == pid));
        (killed || left.client.oom.is_some()).then(|| {
            let text = "the kernel's OOM killer ended it".into();
            loss(LossCause::Killed, Some(Cause::Killed), Some(("kmsg", text)))
        })
    }

    /// Looks again at clients that left shortly before an Xid was read.
    pub fn explain_departed(&mut self, daemon: &mut Daemon, at: Moment) {
        let late: Vec<Departure> = daemon
            .departed
            .iter()
            .filter(|left| !left.is_settled && at.mono.since(left.at.mono) <= LATE_XID)
            .cloned()
            .collect();
        for left in late {
            if let Some(loss) = self.explain(daemon, &left) {
                self.lose_departed(daemon, &left, &loss);
            }
        }
    }
}

/// Clients of a coupled set, lost ones that have not left included: those before the first loss.
pub(super) fn clients_on(server: &Server, coupled: &BTreeSet<DeviceId>) -> u32 {
    let hit = server.clients.values().filter(|client| {
        let mut devices = client.each_device().peekable();
        coupled.is_empty() || devices.peek().is_none() || devices.any(|device| coupled.contains(&device))
    });
    u32::try_from(hit.count()).unwrap_or(u32::MAX)
}
