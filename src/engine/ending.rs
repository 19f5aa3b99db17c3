//! The end of a server, and whether it was orderly.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::Effect;
use super::device::DeviceId;
use super::incident::{Cause, VictimEvidence};
use super::loss::{Left, Loss};
use super::node::Core;
use super::snapshot::LossCause;
use super::state::{Client, ClientKey, Daemon, Departure, Ending, Server};
use crate::event::Freshness;
use crate::time::Moment;

/// How long a server's unannounced end waits for an announcement that is written but not read yet.
const ENDING_SETTLES: Duration = Duration::from_millis(50);

/// How long the end of a server's process waits for the daemon's line about it.
const EXIT_LINE_SETTLES: Duration = Duration::from_millis(250);

/// How long a line that tells of a server's end waits for the end of its process, while that is known to live. A daemon
/// learns of the end from the kernel like everybody else, so the line comes after it.
const PROCESS_END_TAKES: Duration = Duration::from_secs(1);

/// A client that left so shortly before its server ended unannounced was taken by that end: the two are noticed in any
/// order, and on a busy machine not at once. A server never ends unannounced by itself.
const SAME_END: Duration = Duration::from_secs(1);

/// How many ended servers are remembered per daemon.
const MAX_ENDED_SERVERS: usize = 64;

impl Core {
    /// A server's process, its exit line or the daemon says that it ended; the line, and it alone, tells a status.
    ///
    /// Any local user can make the daemon write such a line. While the process is known to live, the line proves
    /// nothing: it waits for the end of the process.
    pub fn server_ended(
        &mut self,
        daemon: &mut Daemon,
        server_pid: u32,
        status: Option<i32>,
        evidence: (&'static str, Arc<str>),
        at: Moment,
    ) {
        let (is_stopping, is_orphan) = (daemon.is_stopping, daemon.is_alive() == Some(false));
        let Some(server) = daemon.servers.get_mut(&server_pid) else { return };
        let before = server.ending.take();
        let rests_on_line = status.is_some()
            && server.is_running
            && self.freshness != Freshness::History
            && before.as_ref().is_none_or(|before| before.rests_on_line);
        let had_line = before.as_ref().is_some_and(|before| before.rests_on_line);
        let (began, status_before) = before.as_ref().map_or((at, None), |before| (before.at, before.status));
        let status = status.or(status_before);
        let settles = match status {
            _ if rests_on_line => PROCESS_END_TAKES,
            Some(_) => ENDING_SETTLES,
            None => EXIT_LINE_SETTLES,
        };
        // A line says more than the end that bears it out.
        let (evidence_source, evidence) = match before {
            Some(before) if had_line => (before.evidence_source, before.evidence),
            _ => evidence,
        };
        server.ending = Some(Ending {
            at: began,
            status,
            decide_at: at.mono.after(settles),
            is_orphan,
            rests_on_line,
            evidence,
            evidence_source,
        });
        if rests_on_line {
            return;
        }
        let is_clear = status.is_some_and(|status| status != 0) || server.is_leaving || is_stopping;
        if (is_clear && status.is_some()) || self.freshness != Freshness::Live {
            self.decide_ending(daemon, server_pid);
        }
    }

    /// A server's process lives on after a line told of its end: the line is not believed, and the daemon is asked
    /// whether it still lists the server.
    fn refute_ending(&mut self, daemon: &mut Daemon, server_pid: u32) {
        let Some(server) = daemon.servers.get_mut(&server_pid) else { return };
        server.ending = None;
        let text: Arc<str> =
            format!("a log line said that server {server_pid} exited, but its process lives").into();
        server.refuted = Some(text.clone());
        daemon.log_disagreement = Some(text);
        self.effects.push(Effect::Look(daemon.site.name.clone()));
    }

    /// Decides about servers whose end has waited long enough.
    pub fn settle_endings(&mut self, daemon: &mut Daemon, at: Moment) {
        let due: Vec<(u32, bool)> = daemon
            .servers
            .values()
            .filter_map(|server| {
                let ending = server.ending.as_ref().filter(|ending| ending.decide_at <= at.mono)?;
                Some((server.pid, ending.rests_on_line))
            })
            .collect();
        for (pid, rests_on_line) in due {
            self.freshness = Freshness::Live;
            if rests_on_line {
                self.refute_ending(daemon, pid);
            } else {
                self.decide_ending(daemon, pid);
            }
        }
    }

    fn decide_ending(&mut self, daemon: &mut Daemon, server_pid: u32) {
        let Some(server) = daemon.servers.get(&server_pid) else { return };
        let Some(ending) = server.ending.clone() else { return };
        let just_left: Vec<Departure> = daemon
            .departed
            .iter()
            .filter(|left| {
                left.server == server_pid
                    && !left.is_settled
                    && left.at.mono.distance(ending.at.mono) <= SAME_END
            })
            .cloned()
            .collect();
        let has_failed = ending.status.is_some_and(|status| status != 0);
        let is_announced = server.is_leaving || daemon.is_stopping;
        let took_nobody = server.clients.is_empty() && (just_left.is_empty() || ending.is_orphan);
        let is_orderly = !has_failed && (is_announced || took_nobody);
        let was_in_fault = server.fault.is_some();
        let (at, confirmed) = (ending.at, server.is_confirmed);
        let active: Vec<ClientKey> = server.active().map(|client| client.key).collect();
        // Whatever couples them: with the server all its contexts are gone, on every device.
        let mut hits: BTreeSet<DeviceId> = server.active().flat_map(Client::devices).collect();
        hits.extend(just_left.iter().flat_map(|left| &left.devices));
        if self.is_news() && confirmed {
            let place = daemon.place(server_pid);
            place.last_exit_status = ending.status;
            if is_orderly { place.exits_orderly.add(at.wall) } else { place.exits_failed.add(at.wall) }
        }
        // An announced end takes its clients with it by intent.
        if !is_announced && !is_orderly {
            let loss = Loss {
                cause: if was_in_fault { LossCause::Fault } else { LossCause::ServerExit },
                incident: Some(if was_in_fault { Cause::Fault } else { Cause::ServerExit }),
                victim: VictimEvidence::Snapshot,
                hits: Some(hits),
                at,
                evidence: Some((ending.evidence_source, ending.evidence.clone())),
            };
            for key in active {
                self.lose_active(daemon, server_pid, key, &loss);
            }
            for left in just_left {
                self.lose_departed(daemon, &left, &loss);
            }
            if let Some((_, killed)) = self.ooms.iter().rev().find(|(pid, _)| *pid == server_pid).copied() {
                self.server_out_of_memory(server_pid, killed);
            }
        }
        self.server_gone(daemon, server_pid, at);
    }

    /// Writes into the incident of a server's end that the kernel ended it for want of memory.
    pub fn server_out_of_memory(&mut self, server_pid: u32, at: Moment) {
        let window = self.settings.window;
        let text: Arc<str> = format!("the kernel's OOM killer ended process {server_pid}").into();
        for case in self.cases.open_cases_mut() {
            if case.incident.server_pid == Some(server_pid) && case.opened.distance(at.mono) <= window {
                case.evidence("kmsg", at.wall, &text);
            }
        }
    }

    /// Forgets a server. Its lost clients' processes are still watched through their incidents.
    pub fn server_gone(&mut self, daemon: &mut Daemon, server_pid: u32, at: Moment) {
        let keys: Vec<ClientKey> = daemon
            .servers
            .get(&server_pid)
            .into_iter()
            .flat_map(Server::active)
            .map(|client| client.key)
            .collect();
        for key in keys {
            if let Some(server) = daemon.servers.get_mut(&server_pid) {
                server.is_leaving = true;
            }
            self.leave(daemon, server_pid, key, at, Left::Told);
        }
        daemon.forget_server(server_pid);
        daemon.ended_servers.push_back((server_pid, self.now.mono));
        if daemon.ended_servers.len() > MAX_ENDED_SERVERS {
            daemon.ended_servers.pop_front();
        }
        self.effects.push(Effect::Unwatch(daemon.site.name.clone(), server_pid));
        let name = &daemon.site.name;
        for case in self.cases.open_cases_mut() {
            if case.daemon == *name && case.incident.server_pid == Some(server_pid) {
                case.incident_mut().recovery.blocked_by.clear();
            }
        }
    }
}
