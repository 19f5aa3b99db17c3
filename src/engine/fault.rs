//! Fatal GPU errors: from the first line to recreated contexts.

use std::sync::Arc;

use super::Effect;
use super::case::Case;
use super::incident::{Cause, Change, CulpritEvidence, VictimEvidence};
use super::loss::{Loss, clients_on};
use super::node::Core;
use super::snapshot::LossCause;
use super::state::{Client, ClientKey, Daemon, Fault, Server};
use crate::event::{Freshness, ServerStatus};
use crate::time::Moment;

impl Core {
    /// A server meets a fatal GPU error.
    pub fn fault(
        &mut self,
        daemon: &mut Daemon,
        server_pid: u32,
        culprit: Option<u32>,
        text: Option<&(&'static str, Arc<str>)>,
        at: Moment,
    ) {
        let window = self.settings.window;
        let is_news = self.is_news();
        let Some(server) = daemon.servers.get_mut(&server_pid) else { return };
        server.status = Some(ServerStatus::Fault);
        let is_same = server.fault.as_ref().is_some_and(|fault| at.mono.since(fault.began.mono) <= window);
        if !is_same {
            let awaiting = server.fault.take().map(|fault| fault.awaiting).unwrap_or_default();
            server.fault = Some(Fault { began: at, awaiting, has_recreated: false, culprit: None });
        }
        let Some(server) = daemon.servers.get_mut(&server_pid) else { return };
        if let (Some(fault), Some(pid)) = (&mut server.fault, culprit) {
            fault.culprit = fault.culprit.or(Some(pid));
        }
        let named = culprit.map(ClientKey::Named);
        let client = named.and_then(|key| server.clients.get(&key).cloned()).or_else(|| {
            let left = daemon
                .departed
                .iter()
                .rev()
                .find(|left| left.server == server_pid && Some(left.client.key) == named);
            left.map(|left| left.client.clone())
        });
        let devices = client.as_ref().map(Client::devices).unwrap_or_default();
        let coupled =
            daemon.servers.get(&server_pid).map(|server| server.coupled(&devices)).unwrap_or_default();
        let before = daemon.servers.get(&server_pid).map_or(0, |server| clients_on(server, &coupled));
        let Some(number) = self.case_for(daemon, Some(server_pid), &coupled, Cause::Fault, at) else {
            return;
        };
        let is_recorded = self.cases.get(number).is_some_and(|case| case.is_restored);
        if is_news && !is_same && !is_recorded {
            daemon.place(server_pid).faults.add(at.wall);
        }
        if let Some(case) = self.cases.get_mut(number) {
            if !devices.is_empty() {
                case.incident_mut().clients_before = case.incident.clients_before.max(before);
            }
            if let Some((source, text)) = text {
                case.evidence(source, at.wall, text);
            }
            if let Some(pid) = culprit {
                case.culprit(pid, client.as_ref(), CulpritEvidence::ServerLog);
            }
        }
        self.culprit_by_xid(daemon, number, at);
    }

    /// server.log names this client in a fault: it is lost, whether or not it is still there.
    pub fn named_in_fault(
        &mut self,
        daemon: &mut Daemon,
        server_pid: u32,
        pid: u32,
        text: Option<&Arc<str>>,
        at: Moment,
    ) {
        let key = ClientKey::Named(pid);
        let loss = Loss {
            cause: LossCause::Fault,
            incident: Some(Cause::Fault),
            victim: VictimEvidence::ServerLog,
            hits: None,
            at,
            evidence: text.map(|text| ("server.log", text.clone())),
        };
        let Some(server) = daemon.servers.get(&server_pid) else { return };
        if server.clients.contains_key(&key) {
            self.lose_active(daemon, server_pid, key, &loss);
            return;
        }
        let window = self.settings.window;
        // Declared INACTIVE, gone, and only then listed among the victims: it is lost once.
        let is_victim = self.cases.open_cases().any(|case| {
            case.daemon == daemon.site.name
                && case.incident.server_pid == Some(server_pid)
                && case.opened.distance(at.mono) <= window
                && case.has_victim(key)
        });
        if is_victim {
            return;
        }
        let left = daemon.departed.iter().rev().find(|left| {
            left.server == server_pid && left.client.key == key && at.mono.since(left.at.mono) <= window
        });
        if let Some(left) = left.filter(|left| !left.is_settled).cloned() {
            self.lose_departed(daemon, &left, &loss);
        } else if left.is_none() && self.is_news() && pid != 0 {
            // A client that no source had told of.
            let mut client = Client::new(key, at.mono);
            client.is_confirmed = true;
            if let Some(server) = daemon.servers.get_mut(&server_pid) {
                server.clients.insert(key, client);
            }
            self.effects.push(Effect::Watch(daemon.site.name.clone(), pid));
            self.lose_active(daemon, server_pid, key, &loss);
        }
    }

    /// Whether the server's contexts are all back; if so the fault is over.
    pub fn check_recovery(&mut self, daemon: &mut Daemon, server_pid: u32, at: Moment) {
        let Some(server) = daemon.servers.get(&server_pid) else { return };
        let Some(fault) = &server.fault else { return };
        if fault.has_recreated && fault.awaiting.is_empty() && server.blocking().next().is_none() {
            self.recovered(daemon, server_pid, at);
        }
    }

    /// The server serves again.
    pub fn recovered(&mut self, daemon: &mut Daemon, server_pid: u32, at: Moment) {
        let Some(server) = daemon.servers.get_mut(&server_pid) else { return };
        server.status = Some(ServerStatus::Active);
        server.fault = None;
        // A server that serves again has let go of every victim, whatever its process does.
        let gone: Vec<ClientKey> = server.blocking().map(|client| client.key).collect();
        for key in gone {
            server.clients.remove(&key);
        }
        self.cases_recovered(daemon, at, |case, _| case.incident.server_pid == Some(server_pid));
    }

    /// Writes the recovery into the incidents that wait for it.
    fn cases_recovered(
        &mut self,
        daemon: &mut Daemon,
        at: Moment,
        is_meant: impl Fn(&Case, &Daemon) -> bool,
    ) {
        let is_news = self.freshness != Freshness::History;
        let name = daemon.site.name.clone();
        for case in self.cases.open_cases_mut() {
            // History tells of earlier recoveries too.
            let is_before = at.mono < case.opened;
            let is_known = case.incident.recovery.recovered_at.is_some();
            if is_before || is_known || !is_meant(case, daemon) || case.daemon != name {
                continue;
            }
            let seconds = at.mono.since(case.opened).as_secs_f64();
            case.incident_mut().recovery.recovered_at = Some(at.wall.max(case.incident.started_at));
            case.incident_mut().recovery.seconds = Some(seconds);
            case.incident_mut().recovery.blocked_by.clear();
            case.note(Change::Recovered);
            if is_news {
                for device in &case.devices {
                    daemon.domains.entry(*device).or_default().recovery_durations.observe(seconds);
                }
            }
        }
    }

    /// A new server is ready: whatever waited for one has recovered.
    pub fn server_replaced(&mut self, daemon: &mut Daemon, new_pid: u32, at: Moment) {
        self.cases_recovered(daemon, at, |case, daemon| {
            let waits_for = case.incident.server_pid.filter(|pid| *pid != new_pid);
            waits_for.is_some_and(|pid| !daemon.servers.contains_key(&pid))
        });
    }

    /// Writes into an incident who still blocks recovery.
    pub fn update_blocking(&mut self, daemon: &Daemon, number: u64) {
        let blocking: Vec<u32> = daemon
            .servers
            .values()
            .flat_map(Server::blocking)
            .filter(|client| client.lost.as_ref().is_some_and(|lost| lost.case == Some(number)))
            .map(|client| client.key.pid())
            .collect();
        if let Some(case) = self.cases.get_mut(number)
            && case.incident.recovery.blocked_by != blocking
        {
            case.incident_mut().recovery.blocked_by = blocking;
            case.note(Change::Updated);
        }
    }
}
