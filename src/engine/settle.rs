//! What open incidents and unexplained departures come to when their time has passed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::case::Case;
use super::device::DeviceId;
use super::incident::{Cause, Change, IncidentState, VictimEvidence};
use super::loss::Loss;
use super::node::Core;
use super::snapshot::LossCause;
use super::state::{Client, Daemon, Departure};
use crate::identity::{DaemonName, Workload};
use crate::time::Moment;

/// How long the lines that name the devices of a fault may be awaited; then the incident is put on all devices of the
/// server. They follow within a millisecond in the only published sample.
pub(super) const DEVICES_UNKNOWN_AFTER: Duration = Duration::from_millis(250);

impl Core {
    /// What open incidents have to be told because time passed.
    pub fn settle_cases(&mut self, daemons: &mut BTreeMap<DaemonName, Daemon>, at: Moment) {
        let window = self.settings.window;
        let is_due = |case: &&Case| {
            let age = at.mono.since(case.since);
            let lacks_devices = case.devices.is_empty() && age >= DEVICES_UNKNOWN_AFTER;
            case.awaits.map_or(lacks_devices || age >= window, |until| until <= at.mono)
        };
        let due: Vec<u64> = self.cases.open_cases().filter(is_due).map(|case| case.number).collect();
        for number in due {
            let Some(case) = self.cases.get_mut(number) else { continue };
            case.awaits = None;
            let age = at.mono.since(case.since);
            let (name, server_pid) = (case.daemon.clone(), case.incident.server_pid);
            let Some(daemon) = daemons.get_mut(&name) else {
                if age > window {
                    self.cases.close(number, at.wall);
                }
                continue;
            };
            if case.devices.is_empty() && age >= DEVICES_UNKNOWN_AFTER {
                self.blame_whole_server(daemon, number, server_pid);
            }
            if age >= window {
                self.settle_case(daemon, number, at);
            }
        }
    }

    /// No line named a device: every one of the server may be hit.
    fn blame_whole_server(&mut self, daemon: &mut Daemon, number: u64, server_pid: Option<u32>) {
        let server = server_pid.and_then(|pid| daemon.servers.get(&pid));
        let mut devices: BTreeSet<DeviceId> =
            server.into_iter().flat_map(|server| server.clients.values()).flat_map(Client::devices).collect();
        if devices.is_empty() {
            devices = daemon.domains.keys().copied().collect();
        }
        if devices.is_empty() {
            devices = self.devices.unknown(&daemon.site.name).into_iter().collect();
        }
        let Some(case) = self.cases.get_mut(number) else { return };
        case.devices.clone_from(&devices);
        case.label(&self.devices);
        let text: Arc<str> =
            "which devices were hit is not known: all of the server's are taken as hit".into();
        let started = case.incident.started_at;
        case.evidence("server.log", started, &text);
        case.count(daemon, true);
        case.count_mass_loss(daemon, started, true);
    }

    fn settle_case(&mut self, daemon: &mut Daemon, number: u64, at: Moment) {
        let Some(case) = self.cases.get_mut(number) else { return };
        let in_fault = case
            .incident
            .server_pid
            .and_then(|pid| daemon.servers.get(&pid))
            .is_some_and(|server| server.fault.is_some());
        let hangs_on = case.unexited().next().is_some();
        let has_recovered = case.incident.recovery.recovered_at.is_some();
        let waits = match case.incident.cause {
            Cause::Fault | Cause::ServerExit | Cause::Gpu => in_fault || (hangs_on && !has_recovered),
            Cause::Killed | Cause::Unexplained => false,
        };
        let was_settled = std::mem::replace(&mut case.is_settled, true);
        if !waits {
            self.cases.close(number, at.wall);
        } else if !was_settled {
            case.incident_mut().state = IncidentState::Recovering;
            case.note(Change::Updated);
            if !case.incident.recovery.blocked_by.is_empty() {
                case.note(Change::Blocked);
            }
        }
    }

    /// Clients that left the same coupled set with nothing to say why: orderly, unless they were of several workloads
    /// and as many as make a mass loss. Then it is at most a warning.
    pub fn settle_departures(&mut self, daemon: &mut Daemon, at: Moment) {
        let window = self.settings.window;
        while let Some(oldest) = daemon.departed.iter().find(|left| !left.is_settled) {
            let (since, set) = (oldest.at.mono, oldest.coupled.clone());
            if at.mono.since(since) < window {
                break;
            }
            let together = |left: &Departure| {
                !left.is_settled
                    && left.at.mono.distance(since) <= window
                    && (!left.coupled.is_disjoint(&set) || (left.coupled.is_empty() && set.is_empty()))
            };
            let group: Vec<Departure> =
                daemon.departed.iter().filter(|left| together(left)).cloned().collect();
            for left in daemon.departed.iter_mut().filter(|left| together(left)) {
                left.is_settled = true;
            }
            // One that was gone before its workload was known proves nothing.
            let workloads: BTreeSet<(&str, &str)> =
                group.iter().filter_map(|left| left.client.workload.as_ref().map(Workload::key)).collect();
            let enough = u32::try_from(group.len()).unwrap_or(u32::MAX) >= self.settings.min_clients.max(2);
            if enough && workloads.len() >= 2 {
                self.unexplained(daemon, &group);
            }
        }
        while daemon
            .departed
            .front()
            .is_some_and(|left| left.is_settled && at.mono.since(left.at.mono) > window)
        {
            daemon.departed.pop_front();
        }
    }

    fn unexplained(&mut self, daemon: &mut Daemon, group: &[Departure]) {
        let Some(first) = group.first() else { return };
        let text: Arc<str> = format!(
            "{} clients of several workloads left within {} s; no log line, Xid or shutdown says why",
            group.len(),
            self.settings.window.as_secs()
        )
        .into();
        for left in group {
            let lost = Loss {
                cause: LossCause::Unexplained,
                incident: Some(Cause::Unexplained),
                victim: VictimEvidence::Snapshot,
                hits: None,
                at: first.at,
                evidence: Some(("proc", text.clone())),
            };
            self.lose_departed(daemon, left, &lost);
        }
    }
}
