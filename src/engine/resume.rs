//! How an incident that an earlier run left open goes on, and what waits until the log of its daemon has been read.
//!
//! At a start sources tell in any order. What became of a process, or what the daemon answers, means little before the
//! lines that were written meanwhile have been read: a client that is gone may have been lost in a fault that only the
//! log tells of. So both wait for the log, and an incident is neither told nor closed before.

use std::collections::BTreeSet;
use std::time::Duration;

use super::Effect;
use super::incident::Cause;
use super::node::Core;
use super::state::{Client, ClientKey, Daemon, Fault, Lost};
use crate::event::{Look, ServerStatus, SourceName};
use crate::time::Moment;

/// How long the log of a daemon may take to be read. A log that cannot be read is told of at once.
const LOG_TAKES: Duration = Duration::from_secs(10);

/// What waits for the log of a daemon to be read.
#[derive(Debug, Clone)]
pub(super) struct LogAwaited {
    /// When it is no longer waited for.
    pub until: crate::time::Mono,
    /// Processes that have ended.
    pub exited: BTreeSet<u32>,
    /// The daemon's last answer, and when it came.
    pub answer: Option<(Look, Moment)>,
}

impl Core {
    /// A daemon is watched from now on: its log is awaited, and so is what became of the victims that are on record.
    pub fn welcome(&mut self, daemon: &mut Daemon) {
        let until = self.now.mono.after(LOG_TAKES);
        daemon.log_awaited = Some(LogAwaited { until, exited: BTreeSet::new(), answer: None });
        for case in self.cases.open_cases().filter(|case| case.daemon == daemon.site.name) {
            for device in &case.devices {
                let domain = daemon.domains.entry(*device).or_default();
                let started = Some(case.incident.started_at);
                domain.last_incidents.insert(case.incident.cause, case.incident.id.clone());
                let count = domain.incidents.entry(case.incident.cause).or_default();
                count.last = count.last.max(started);
                if case.incident.mass_client_loss {
                    domain.mass_losses.last = domain.mass_losses.last.max(started);
                    domain.mass_loss_last_clients = u32::try_from(case.incident.victims.len()).ok();
                }
            }
            for pid in case.unexited() {
                self.effects.push(Effect::Watch(daemon.site.name.clone(), pid));
            }
        }
    }

    /// A source of a daemon has told how it fares. A log source does so when it has read what there is, or cannot.
    pub fn heard_of_source(&mut self, daemon: &mut Daemon, source: SourceName, at: Moment) {
        if matches!(source, SourceName::ControlLog | SourceName::ServerLog | SourceName::DaemonOutput) {
            self.log_read(daemon, at);
        }
    }

    /// The log of a daemon has been read, or has been waited for long enough.
    pub fn log_read(&mut self, daemon: &mut Daemon, at: Moment) {
        let Some(awaited) = daemon.log_awaited.take() else { return };
        let servers: BTreeSet<u32> = daemon.servers.keys().copied().collect();
        for pid in servers {
            self.take_up(daemon, pid, false, at);
        }
        for pid in awaited.exited {
            self.process_exited(daemon, pid, at);
        }
        if let Some((answer, at)) = awaited.answer {
            self.look(daemon, &Ok(answer), at);
        }
        self.cases.log_read(&daemon.site.name, at.mono);
    }

    /// Takes up the incidents that an earlier run left open on a server, where no line has told of them again: whoever
    /// was lost in them is lost still, and the server is in FAULT until it says otherwise. `in_fault`: it says so.
    pub fn take_up(&mut self, daemon: &mut Daemon, server_pid: u32, in_fault: bool, at: Moment) {
        let Some(server) = daemon.servers.get_mut(&server_pid) else { return };
        let mut taken = Vec::new();
        for case in self.cases.open_cases_mut() {
            let incident = &case.incident;
            let is_meant = case.is_restored
                && case.daemon == daemon.site.name
                && incident.server_pid == Some(server_pid)
                && incident.recovery.recovered_at.is_none();
            if !is_meant {
                continue;
            }
            for victim in incident.victims.iter().filter(|victim| victim.exited_at.is_none()) {
                let key = ClientKey::Named(victim.pid);
                let is_another = |client: &Client| {
                    client.lost.is_none()
                        && client.connected_at.is_some_and(|connected| connected > incident.started_at)
                };
                if server.clients.get(&key).is_some_and(is_another) {
                    continue;
                }
                let client = server.clients.entry(key).or_insert_with(|| Client::new(key, at.mono));
                client.is_confirmed = true;
                client.command = client.command.take().or_else(|| victim.command.clone());
                client.workload = client.workload.take().or_else(|| victim.workload.clone());
                client.lost = Some(Lost { case: Some(case.number) });
            }
            if incident.cause == Cause::Fault
                && server.fault.is_none()
                && (in_fault || case.unexited().next().is_some())
            {
                let began = Moment { wall: incident.started_at, mono: case.opened };
                server.status = Some(ServerStatus::Fault);
                server.fault = Some(Fault {
                    began,
                    awaiting: BTreeSet::new(),
                    has_recreated: false,
                    culprit: incident.culprit.as_ref().map(|culprit| culprit.pid),
                });
            }
            taken.push(case.number);
        }
        for number in taken {
            self.update_blocking(daemon, number);
        }
    }
}
