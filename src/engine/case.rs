//! Incidents in the making: what joins which, when they end, and what outlets are told.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use super::device::{DeviceId, Devices};
use super::incident::{
    Cause, Change, Culprit, CulpritEvidence, Evidence, Incident, IncidentChange, IncidentDevice,
    IncidentState, IncidentXid, Recovery, Victim, VictimEvidence,
};
use super::state::{Client, ClientKey, Daemon};
use crate::event::Freshness;
use crate::identity::{DaemonName, DeviceName};
use crate::time::{Moment, Mono};

/// Lines kept as evidence of one incident.
const MAX_EVIDENCE: usize = 64;
/// Xid codes kept in one incident.
const MAX_XIDS: usize = 32;
/// Incidents that can be open at once: a node has at most 16 GPUs with 7 instances each. With more the oldest is closed.
const MAX_OPEN: usize = 128;

/// How long an incident that an earlier run left open waits for the log of its daemon.
const LOG_AWAITED: Duration = Duration::from_secs(30);
/// How long after that what became of its processes is awaited.
const PROCESSES_AWAITED: Duration = Duration::from_secs(1);

/// All open incidents, and the closed ones that outlets still show.
#[derive(Debug)]
pub(super) struct Cases {
    open: BTreeMap<u64, Case>,
    closed: VecDeque<Arc<Incident>>,
    next: u64,
    kept: usize,
    told: Vec<IncidentChange>,
    /// Ids of all of them.
    ids: BTreeSet<Arc<str>>,
    /// Ids of those that an earlier run recorded.
    recorded: BTreeSet<Arc<str>>,
}

/// An open incident.
#[derive(Debug)]
pub(super) struct Case {
    pub number: u64,
    /// Shared with whoever was told; changed by [`Case::incident_mut`].
    pub incident: Arc<Incident>,
    pub daemon: DaemonName,
    pub devices: BTreeSet<DeviceId>,
    pub opened: Mono,
    /// When the window in which losses arrive began: at the opening, or when that was told of.
    pub since: Mono,
    /// Until when an incident of an earlier run is left as it was recorded: the lines and processes that tell what
    /// became of it may not have been looked at yet.
    pub awaits: Option<Mono>,
    /// Whether the window has passed.
    pub is_settled: bool,
    /// Victims by client; the value is the position in the incident's list.
    victims: BTreeMap<ClientKey, usize>,
    changes: Vec<Change>,
    /// Domains where it has been counted, by this run or an earlier one.
    pub counted_on: BTreeSet<DeviceId>,
    /// Domains where the mass client loss has been counted.
    pub mass_counted_on: BTreeSet<DeviceId>,
    /// An earlier run opened it.
    pub is_restored: bool,
}

/// What opens an incident.
pub(super) struct Opening<'a> {
    pub daemon: &'a DaemonName,
    pub server_pid: Option<u32>,
    pub server_label: Option<Arc<str>>,
    pub devices: &'a BTreeSet<DeviceId>,
    pub cause: Cause,
    pub at: Moment,
    /// When that is told.
    pub now: Mono,
    pub freshness: Freshness,
}

impl Cases {
    pub fn new(kept: usize) -> Cases {
        Cases {
            open: BTreeMap::new(),
            closed: VecDeque::new(),
            next: 1,
            kept,
            told: Vec::new(),
            ids: BTreeSet::new(),
            recorded: BTreeSet::new(),
        }
    }

    pub fn get(&self, number: u64) -> Option<&Case> {
        self.open.get(&number)
    }

    pub fn get_mut(&mut self, number: u64) -> Option<&mut Case> {
        self.open.get_mut(&number)
    }

    pub fn open_cases(&self) -> impl Iterator<Item = &Case> {
        self.open.values()
    }

    pub fn open_cases_mut(&mut self) -> impl Iterator<Item = &mut Case> {
        self.open.values_mut()
    }

    /// Open incidents, then closed ones, newest first.
    pub fn list(&self) -> Vec<Arc<Incident>> {
        let open = self.open.values().rev().map(|case| case.incident.clone());
        let mut all: Vec<Arc<Incident>> = open.chain(self.closed.iter().rev().cloned()).collect();
        all.sort_by(|a, b| b.started_at.cmp(&a.started_at).then_with(|| b.id.cmp(&a.id)));
        all
    }

    /// Takes over what an earlier run recorded.
    pub fn restore(&mut self, recorded: Vec<Incident>, devices: &mut Devices, now: Moment) {
        for mut incident in recorded {
            // The clock may have been set back since.
            incident.started_at = incident.started_at.min(now.wall);
            self.ids.insert(incident.id.clone());
            self.recorded.insert(incident.id.clone());
            let Some(daemon) = incident.daemon.clone().filter(|_| incident.state != IncidentState::Closed)
            else {
                self.keep(Arc::new(incident));
                continue;
            };
            let on: BTreeSet<DeviceId> = incident
                .devices
                .iter()
                .filter_map(|device| match device.mig_uuid.as_ref().unwrap_or(&device.uuid) {
                    uuid if uuid.is_empty() => devices.unknown(&daemon),
                    uuid => devices.resolve(&DeviceName::of_uuid(uuid), None),
                })
                .collect();
            let number = self.next;
            self.next += 1;
            let victims = incident.victims.iter().enumerate();
            let victims = victims.map(|(place, victim)| (ClientKey::Named(victim.pid), place)).collect();
            let opened = now.at_wall(incident.started_at).mono;
            let case = Case {
                number,
                daemon,
                opened,
                since: opened,
                awaits: Some(now.mono.after(LOG_AWAITED)),
                is_settled: false,
                counted_on: on.clone(),
                mass_counted_on: if incident.mass_client_loss { on.clone() } else { BTreeSet::new() },
                devices: on,
                victims,
                changes: Vec::new(),
                is_restored: true,
                incident: Arc::new(incident),
            };
            self.open.insert(number, case);
        }
    }

    /// The log of this daemon has been read: its incidents of an earlier run go on when their processes have been
    /// looked at too.
    pub fn log_read(&mut self, daemon: &DaemonName, at: Mono) {
        for case in self.open.values_mut().filter(|case| case.daemon == *daemon) {
            case.awaits = case.awaits.map(|until| until.min(at.after(PROCESSES_AWAITED)));
        }
    }

    /// The incident that evidence on `devices` belongs to: one on the same server and coupled set that opened within
    /// the window. Without devices, any of that server's. History belongs to what an earlier run recorded, or to none.
    pub fn matching(&self, opening: &Opening<'_>, window: Duration) -> Option<u64> {
        let joins = |case: &&Case| {
            let same_server = case.incident.server_pid.is_none()
                || opening.server_pid.is_none()
                || case.incident.server_pid == opening.server_pid;
            let same_set = case.devices.is_empty()
                || opening.devices.is_empty()
                || !case.devices.is_disjoint(opening.devices);
            case.daemon == *opening.daemon
                && same_server
                && same_set
                && case.opened.distance(opening.at.mono) <= window
                && (case.is_restored || opening.freshness != Freshness::History)
        };
        self.open.values().rev().find(joins).map(|case| case.number)
    }

    /// Whether evidence is only read again: an earlier run has recorded its incident from beginning to end.
    pub fn is_over(&self, opening: &Opening<'_>, window: Duration) -> bool {
        opening.freshness == Freshness::CaughtUp
            && self.closed.iter().any(|incident| {
                incident.daemon.as_ref() == Some(opening.daemon)
                    && (incident.server_pid.is_none() || incident.server_pid == opening.server_pid)
                    && incident.started_at.duration_since(opening.at.wall).unsigned_abs() <= window
                    && self.recorded.contains(&incident.id)
            })
    }

    /// Opens an incident.
    pub fn open(&mut self, opening: &Opening<'_>) -> u64 {
        if self.open.len() >= MAX_OPEN
            && let Some(oldest) = self.open.keys().next().copied()
        {
            self.close(oldest, opening.at.wall);
        }
        // Two GPUs may be lost in the same instant.
        let mut id = incident_id(opening, 0);
        for salt in 1.. {
            if self.ids.insert(id.clone()) {
                break;
            }
            id = incident_id(opening, salt);
        }
        let number = self.next;
        self.next += 1;
        let incident = Incident {
            id,
            started_at: opening.at.wall,
            ended_at: None,
            state: IncidentState::Open,
            cause: opening.cause,
            mass_client_loss: false,
            clients_before: 0,
            daemon: Some(opening.daemon.clone()),
            server: opening.server_label.clone(),
            server_pid: opening.server_pid,
            fault_domains: Vec::new(),
            devices: Vec::new(),
            culprit: None,
            victims: Vec::new(),
            xids: Vec::new(),
            recovery: Recovery::default(),
            work_lost_seconds: None,
            evidence: Vec::new(),
            caught_up: opening.freshness == Freshness::CaughtUp,
        };
        let case = Case {
            number,
            incident: Arc::new(incident),
            daemon: opening.daemon.clone(),
            devices: opening.devices.clone(),
            opened: opening.at.mono,
            since: opening.at.mono.max(opening.now),
            awaits: None,
            is_settled: false,
            counted_on: BTreeSet::new(),
            mass_counted_on: BTreeSet::new(),
            victims: BTreeMap::new(),
            changes: vec![Change::Opened],
            is_restored: false,
        };
        self.open.insert(number, case);
        number
    }

    /// Ends an incident.
    pub fn close(&mut self, number: u64, at: Timestamp) {
        let Some(mut case) = self.open.remove(&number) else { return };
        let incident = case.incident_mut();
        incident.state = IncidentState::Closed;
        incident.ended_at = Some(at.max(incident.started_at));
        incident.recovery.blocked_by.clear();
        case.note(Change::Closed);
        let incident = case.tell(&mut self.told);
        self.keep(incident);
    }

    /// Changes how many closed incidents are shown.
    pub fn keep_at_most(&mut self, kept: usize) {
        self.kept = kept;
        self.forget_surplus();
    }

    fn keep(&mut self, incident: Arc<Incident>) {
        self.closed.push_back(incident);
        self.forget_surplus();
    }

    fn forget_surplus(&mut self) {
        while self.closed.len() > self.kept {
            if let Some(old) = self.closed.pop_front() {
                self.ids.remove(&old.id);
                self.recorded.remove(&old.id);
            }
        }
    }

    /// What outlets have to be told since the last call, in order.
    pub fn take_changes(&mut self) -> Vec<IncidentChange> {
        for case in self.open.values_mut() {
            if !case.changes.is_empty() && case.awaits.is_none() {
                case.tell(&mut self.told);
            }
        }
        std::mem::take(&mut self.told)
    }
}

impl Case {
    /// The incident, to be changed. Whoever was told of it keeps what it was.
    pub fn incident_mut(&mut self) -> &mut Incident {
        Arc::make_mut(&mut self.incident)
    }

    /// Remembers that outlets have to be told.
    pub fn note(&mut self, change: Change) {
        if !self.changes.contains(&change) {
            self.changes.push(change);
        }
    }

    fn tell(&mut self, told: &mut Vec<IncidentChange>) -> Arc<Incident> {
        let incident = self.incident.clone();
        let news = self.changes.iter().any(|change| *change != Change::Updated);
        for change in std::mem::take(&mut self.changes) {
            // The others carry the same state: an update beside them says nothing more.
            if change != Change::Updated || !news {
                told.push(IncidentChange { change, incident: incident.clone() });
            }
        }
        incident
    }

    /// Adds a line that the incident rests on.
    pub fn evidence(&mut self, source: &'static str, at: Timestamp, text: &Arc<str>) {
        let is_known = self.incident.evidence.iter().any(|known| known.text == *text && known.at == at);
        if self.incident.evidence.len() < MAX_EVIDENCE && !is_known {
            let evidence = Evidence { source: source.into(), at, text: text.clone() };
            self.incident_mut().evidence.push(evidence);
            self.note(Change::Updated);
        }
    }

    /// Adds a victim, or better evidence for one. Whether it is new.
    pub fn victim(
        &mut self,
        client: &Client,
        evidence: VictimEvidence,
        at: Timestamp,
        exited_at: Option<Timestamp>,
    ) -> bool {
        self.note(Change::Updated);
        if let Some(place) = self.victims.get(&client.key) {
            let known = &mut Arc::make_mut(&mut self.incident).victims[*place];
            if evidence == VictimEvidence::ServerLog {
                known.evidence = evidence;
            }
            known.exited_at = known.exited_at.or(exited_at);
            return false;
        }
        let work_lost_seconds = client.work_at_risk(at).map(|work| work.as_secs());
        self.victims.insert(client.key, self.incident.victims.len());
        let incident = Arc::make_mut(&mut self.incident);
        incident.victims.push(Victim {
            pid: client.key.pid(),
            command: client.command.clone(),
            workload: client.workload.clone(),
            evidence,
            exited_at,
            work_lost_seconds,
        });
        if let Some(work) = work_lost_seconds {
            *incident.work_lost_seconds.get_or_insert(0.0) += work as f64;
        }
        true
    }

    /// Whether the client is a victim of this incident.
    pub fn has_victim(&self, key: ClientKey) -> bool {
        self.victims.contains_key(&key)
    }

    /// A victim's process has ended.
    pub fn victim_exited(&mut self, key: ClientKey, at: Timestamp) {
        let Some(place) = self.victims.get(&key) else { return };
        if self.incident.victims[*place].exited_at.is_none() {
            Arc::make_mut(&mut self.incident).victims[*place].exited_at = Some(at);
            self.note(Change::Updated);
        }
    }

    /// Something was learnt about a client after it became a victim or the culprit.
    pub fn learn(&mut self, client: &Client) {
        let learnt = |command: &mut Option<Arc<str>>, workload: &mut Option<crate::identity::Workload>| {
            let before = (command.is_some(), workload.clone());
            if command.is_none() {
                command.clone_from(&client.command);
            }
            if client.workload.is_some() {
                workload.clone_from(&client.workload);
            }
            before != (command.is_some(), workload.clone())
        };
        let mut news = false;
        let place = self.victims.get(&client.key);
        let is_culprit = self.incident.culprit.as_ref().is_some_and(|it| it.pid == client.key.pid());
        if place.is_some() || is_culprit {
            let incident = Arc::make_mut(&mut self.incident);
            if let Some(place) = place {
                let victim = &mut incident.victims[*place];
                news |= learnt(&mut victim.command, &mut victim.workload);
            }
            if let Some(culprit) = incident.culprit.as_mut().filter(|_| is_culprit) {
                news |= learnt(&mut culprit.command, &mut culprit.workload);
            }
        }
        if news {
            self.note(Change::Updated);
        }
    }

    /// Names the culprit. server.log's word stands over an Xid's.
    pub fn culprit(&mut self, pid: u32, client: Option<&Client>, evidence: CulpritEvidence) {
        let is_better = match &self.incident.culprit {
            None => true,
            Some(known) => {
                known.evidence == CulpritEvidence::XidChannel && evidence == CulpritEvidence::ServerLog
            }
        };
        if is_better {
            self.incident_mut().culprit = Some(Culprit {
                pid,
                command: client.and_then(|client| client.command.clone()),
                workload: client.and_then(|client| client.workload.clone()),
                evidence,
            });
            self.note(Change::Updated);
        }
    }

    /// Adds an Xid. The same event by another source is not another event.
    pub fn xid(&mut self, xid: IncidentXid) {
        let same = |known: &&mut IncidentXid| {
            known.xid == xid.xid && (known.pid == xid.pid || known.pid.is_none() || xid.pid.is_none())
        };
        let xids = &mut Arc::make_mut(&mut self.incident).xids;
        if let Some(known) = xids.iter_mut().find(same) {
            known.pid = known.pid.or(xid.pid);
            known.count = known.count.max(xid.count);
        } else if xids.len() < MAX_XIDS {
            xids.push(xid);
            self.note(Change::Updated);
        }
    }

    /// Counts the incident on the domains where it has not been, under its cause as it is now known; it is never
    /// counted again under another. `is_news`: no earlier run has.
    pub fn count(&mut self, daemon: &mut Daemon, is_news: bool) {
        for device in &self.devices {
            if self.counted_on.insert(*device) && is_news {
                let domain = daemon.domains.entry(*device).or_default();
                domain.last_incidents.insert(self.incident.cause, self.incident.id.clone());
                domain.incidents.entry(self.incident.cause).or_default().add(self.incident.started_at);
            }
        }
    }

    /// Counts the mass client loss, if it is one, on the domains where it has not been.
    pub fn count_mass_loss(&mut self, daemon: &mut Daemon, at: Timestamp, is_news: bool) {
        if !self.incident.mass_client_loss {
            return;
        }
        for device in &self.devices {
            let domain = daemon.domains.entry(*device).or_default();
            domain.mass_loss_last_clients = u32::try_from(self.incident.victims.len()).ok();
            if self.mass_counted_on.insert(*device) && is_news {
                domain.mass_losses.add(at);
            }
        }
    }

    /// Victims whose process has not ended.
    pub fn unexited(&self) -> impl Iterator<Item = u32> {
        self.incident.victims.iter().filter(|victim| victim.exited_at.is_none()).map(|victim| victim.pid)
    }

    /// Writes down the labels of the devices. What an earlier run knew of one stands until NVML tells it again.
    pub fn label(&mut self, devices: &Devices) {
        let incident = Arc::make_mut(&mut self.incident);
        let recorded: Vec<_> = incident.fault_domains.drain(..).zip(incident.devices.drain(..)).collect();
        for id in &self.devices {
            let device = devices.get(*id);
            let labels = IncidentDevice {
                uuid: device.uuid_label(),
                gpu: device.gpu_label(),
                gpu_instance: device.gpu_instance_label(),
                mig_uuid: device.mig_uuid(),
            };
            let known = recorded.iter().find(|(_, known)| {
                device.facts.is_none()
                    && known.mig_uuid == labels.mig_uuid
                    && (known.uuid == labels.uuid || labels.mig_uuid.is_some())
            });
            let (domain, labels) =
                known.cloned().unwrap_or_else(|| (domain_label(&self.daemon, devices, *id), labels));
            incident.fault_domains.push(domain);
            incident.devices.push(labels);
        }
    }
}

/// The label `fault_domain` of a daemon's device.
pub(super) fn domain_label(daemon: &DaemonName, devices: &Devices, id: DeviceId) -> Arc<str> {
    format!("{daemon}/{}", devices.get(id).domain_part()).into()
}

/// An id that sorts by time and is the same whenever the same lines are read again. `salt` tells incidents apart that
/// the same thing opened.
fn incident_id(opening: &Opening<'_>, salt: u8) -> Arc<str> {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64; // FNV-1a
    let rest = [opening.cause as u8, salt];
    let rest = &rest[..if salt == 0 { 1 } else { 2 }];
    let server = opening.server_pid.unwrap_or(0).to_le_bytes();
    for byte in opening.daemon.as_bytes().iter().chain(&server).chain(rest) {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    format!("{:012x}-{:08x}", opening.at.wall.as_millisecond().max(0), (hash ^ (hash >> 32)) & 0xffff_ffff)
        .into()
}
