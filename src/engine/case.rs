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
use super::state::{Client, ClientKey};
use crate::identity::DaemonName;
use crate::time::{Moment, Mono};

/// Lines kept as evidence of one incident.
const MAX_EVIDENCE: usize = 64;
/// Xid codes kept in one incident.
const MAX_XIDS: usize = 32;
/// Incidents that can be open at once. With more the oldest is closed.
const MAX_OPEN: usize = 256;

/// All open incidents, and the closed ones that outlets still show.
#[derive(Debug)]
pub(super) struct Cases {
    open: BTreeMap<u64, Case>,
    closed: VecDeque<Arc<Incident>>,
    next: u64,
    kept: usize,
    told: Vec<IncidentChange>,
    /// Ids of incidents that an earlier run recorded: they are not news.
    known: BTreeSet<Arc<str>>,
}

/// An open incident.
#[derive(Debug)]
pub(super) struct Case {
    pub number: u64,
    pub incident: Incident,
    pub daemon: DaemonName,
    pub server_pid: Option<u32>,
    pub devices: BTreeSet<DeviceId>,
    pub opened: Mono,
    /// Whether the window has passed.
    pub is_settled: bool,
    /// Victims by client; the value is the position in the incident's list.
    victims: BTreeMap<ClientKey, usize>,
    changes: Vec<Change>,
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
    pub caught_up: bool,
}

impl Cases {
    pub fn new(kept: usize) -> Cases {
        Cases {
            open: BTreeMap::new(),
            closed: VecDeque::new(),
            next: 1,
            kept,
            told: Vec::new(),
            known: BTreeSet::new(),
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
        let open = self.open.values().rev().map(|case| Arc::new(case.incident.clone()));
        let mut all: Vec<Arc<Incident>> = open.chain(self.closed.iter().rev().cloned()).collect();
        all.sort_by(|a, b| b.started_at.cmp(&a.started_at).then_with(|| b.id.cmp(&a.id)));
        all
    }

    /// Takes over what an earlier run recorded.
    pub fn restore(&mut self, recorded: Vec<Incident>, now: Moment) {
        for incident in recorded {
            self.known.insert(incident.id.clone());
            if incident.state == IncidentState::Closed {
                self.keep(Arc::new(incident));
                continue;
            }
            let Some(daemon) = incident.daemon.clone() else { continue };
            let number = self.next;
            self.next += 1;
            let victims = incident.victims.iter().enumerate();
            let victims = victims.map(|(place, victim)| (ClientKey::Named(victim.pid), place)).collect();
            let case = Case {
                number,
                daemon,
                server_pid: None,
                devices: BTreeSet::new(),
                opened: now.at_wall(incident.started_at).mono,
                is_settled: false,
                mass_counted_on: BTreeSet::new(),
                victims,
                changes: Vec::new(),
                is_restored: true,
                incident,
            };
            self.open.insert(number, case);
        }
    }

    /// The incident that evidence on `devices` belongs to: one on the same server and coupled set that opened within
    /// the window. Without devices, any of that server's.
    pub fn matching(&self, opening: &Opening<'_>, window: Duration) -> Option<u64> {
        let joins = |case: &&Case| {
            let same_server = case.server_pid.is_none()
                || opening.server_pid.is_none()
                || case.server_pid == opening.server_pid;
            let same_set = case.devices.is_empty()
                || opening.devices.is_empty()
                || !case.devices.is_disjoint(opening.devices);
            case.daemon == *opening.daemon
                && same_server
                && same_set
                && case.opened.distance(opening.at.mono) <= window
        };
        self.open.values().rev().find(joins).map(|case| case.number)
    }

    /// Opens an incident. The second value says whether an earlier run had recorded the same one.
    pub fn open(&mut self, opening: &Opening<'_>) -> (u64, bool) {
        if self.open.len() >= MAX_OPEN
            && let Some(oldest) = self.open.keys().next().copied()
        {
            self.close(oldest, opening.at.wall);
        }
        let id = incident_id(opening);
        let is_known = self.known.contains(&id);
        if is_known && let Some(case) = self.open.values_mut().find(|case| case.incident.id == id) {
            case.server_pid = case.server_pid.or(opening.server_pid);
            case.devices.extend(opening.devices);
            return (case.number, true);
        }
        self.closed.retain(|incident| incident.id != id);
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
            fault_domains: Vec::new(),
            devices: Vec::new(),
            culprit: None,
            victims: Vec::new(),
            xids: Vec::new(),
            recovery: Recovery::default(),
            work_lost_seconds: None,
            evidence: Vec::new(),
            caught_up: opening.caught_up,
        };
        let case = Case {
            number,
            incident,
            daemon: opening.daemon.clone(),
            server_pid: opening.server_pid,
            devices: opening.devices.clone(),
            opened: opening.at.mono,
            is_settled: false,
            mass_counted_on: BTreeSet::new(),
            victims: BTreeMap::new(),
            changes: vec![if is_known { Change::Updated } else { Change::Opened }],
            is_restored: is_known,
        };
        self.open.insert(number, case);
        (number, is_known)
    }

    /// Ends an incident.
    pub fn close(&mut self, number: u64, at: Timestamp) {
        let Some(mut case) = self.open.remove(&number) else { return };
        case.incident.state = IncidentState::Closed;
        case.incident.ended_at = Some(at.max(case.incident.started_at));
        case.incident.recovery.blocked_by.clear();
        case.note(Change::Closed);
        let incident = case.tell(&mut self.told);
        self.keep(incident);
    }

    fn keep(&mut self, incident: Arc<Incident>) {
        self.closed.push_back(incident);
        while self.closed.len() > self.kept {
            if let Some(old) = self.closed.pop_front() {
                self.known.remove(&old.id);
            }
        }
    }

    /// What outlets have to be told since the last call, in order.
    pub fn take_changes(&mut self) -> Vec<IncidentChange> {
        for case in self.open.values_mut() {
            if !case.changes.is_empty() {
                case.tell(&mut self.told);
            }
        }
        std::mem::take(&mut self.told)
    }
}

impl Case {
    /// Remembers that outlets have to be told.
    pub fn note(&mut self, change: Change) {
        if !self.changes.contains(&change) {
            self.changes.push(change);
        }
    }

    fn tell(&mut self, told: &mut Vec<IncidentChange>) -> Arc<Incident> {
        let incident = Arc::new(self.incident.clone());
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
            self.incident.evidence.push(Evidence { source: source.into(), at, text: text.clone() });
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
            let known = &mut self.incident.victims[*place];
            if evidence == VictimEvidence::ServerLog {
                known.evidence = evidence;
            }
            known.exited_at = known.exited_at.or(exited_at);
            return false;
        }
        let work_lost_seconds = client.work_at_risk(at).map(|work| work.as_secs());
        self.victims.insert(client.key, self.incident.victims.len());
        self.incident.victims.push(Victim {
            pid: client.key.pid(),
            command: client.command.clone(),
            workload: client.workload.clone(),
            evidence,
            exited_at,
            work_lost_seconds,
        });
        if let Some(work) = work_lost_seconds {
            *self.incident.work_lost_seconds.get_or_insert(0.0) += work as f64;
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
        let victim = &mut self.incident.victims[*place];
        if victim.exited_at.is_none() {
            victim.exited_at = Some(at);
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
        if let Some(place) = self.victims.get(&client.key) {
            let victim = &mut self.incident.victims[*place];
            news |= learnt(&mut victim.command, &mut victim.workload);
        }
        if let Some(culprit) = &mut self.incident.culprit
            && culprit.pid == client.key.pid()
        {
            news |= learnt(&mut culprit.command, &mut culprit.workload);
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
            self.incident.culprit = Some(Culprit {
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
        if let Some(known) = self.incident.xids.iter_mut().find(same) {
            known.pid = known.pid.or(xid.pid);
            known.count = known.count.max(xid.count);
        } else if self.incident.xids.len() < MAX_XIDS {
            self.incident.xids.push(xid);
            self.note(Change::Updated);
        }
    }

    /// Victims whose process has not ended.
    pub fn unexited(&self) -> impl Iterator<Item = u32> {
        self.incident.victims.iter().filter(|victim| victim.exited_at.is_none()).map(|victim| victim.pid)
    }

    /// Writes down the labels of the devices.
    pub fn label(&mut self, devices: &Devices) {
        let label = |id: &DeviceId| {
            let device = devices.get(*id);
            IncidentDevice {
                uuid: device.uuid_label(),
                gpu: device.gpu_label(),
                gpu_instance: device.gpu_instance_label(),
            }
        };
        self.incident.devices = self.devices.iter().map(label).collect();
        self.incident.fault_domains =
            self.devices.iter().map(|id| domain_label(&self.daemon, devices, *id)).collect();
    }
}

/// The label `fault_domain` of a daemon's device.
pub(super) fn domain_label(daemon: &DaemonName, devices: &Devices, id: DeviceId) -> Arc<str> {
    format!("{daemon}/{}", devices.get(id).domain_part()).into()
}

/// An id that sorts by time and is the same whenever the same lines are read again.
fn incident_id(opening: &Opening<'_>) -> Arc<str> {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64; // FNV-1a
    let cause = [opening.cause as u8];
    let server = opening.server_pid.unwrap_or(0).to_le_bytes();
    for byte in opening.daemon.as_bytes().iter().chain(&server).chain(&cause) {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    format!("{:012x}-{:08x}", opening.at.wall.as_millisecond().max(0), (hash ^ (hash >> 32)) & 0xffff_ffff)
        .into()
}
