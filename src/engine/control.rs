//! What a session with the control daemon means to the model: it reconciles what logs missed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::loss::Left;
use super::node::Core;
use super::snapshot::DeviceEvidence;
use super::state::{ClientKey, Daemon};
use crate::event::{ContextLook, Look, LookError, ServerLook, ServerStatus, SourceName};
use crate::time::Moment;

/// What logs told so shortly before an answer may be newer than the answer.
const ANSWER_MAY_BE_OLDER: Duration = Duration::from_secs(1);

/// How long a session may take from its first question to its answer's being read.
const SESSION_TAKES: Duration = Duration::from_secs(5);

impl Core {
    /// Applies the result of a session.
    pub fn look(&mut self, daemon: &mut Daemon, result: &Result<Look, LookError>, at: Moment) {
        let Ok(look) = result else { return };
        if let Some(awaited) = &mut daemon.log_awaited {
            awaited.answer = Some((look.clone(), at));
            return;
        }
        daemon.protocol = look.protocol.clone().or(daemon.protocol.take());
        daemon.default_active_thread_percentage =
            look.default_active_thread_percentage.or(daemon.default_active_thread_percentage);
        let listed: BTreeSet<u32> = look.servers.iter().map(|server| server.pid).collect();
        let gone: Vec<u32> = daemon
            .servers
            .values()
            .filter(|server| {
                !listed.contains(&server.pid) && at.mono.since(server.touched) > ANSWER_MAY_BE_OLDER
            })
            .map(|server| server.pid)
            .collect();
        for pid in gone {
            let text: Arc<str> = format!("the control daemon no longer lists server {pid}").into();
            self.server_ended(daemon, pid, None, ("control", text), at);
        }
        let is_first = daemon.looked_at.is_none();
        let mut differences = Vec::new();
        let mut is_full = true;
        for server in &look.servers {
            is_full &= server.clients.is_some() || server.contexts.is_some();
            self.look_at_server(daemon, server, is_first, &mut differences, at);
        }
        if is_full {
            daemon.looked_at = Some(at.mono);
            daemon.log_disagreement = None;
            if !is_first && let Some(first) = differences.first() {
                daemon.log_disagreement = Some(first.clone());
            }
        }
    }

    fn look_at_server(
        &mut self,
        daemon: &mut Daemon,
        told: &ServerLook,
        is_first: bool,
        differences: &mut Vec<Arc<str>>,
        at: Moment,
    ) {
        let mut ended = daemon.ended_servers.iter();
        if ended.any(|(pid, ended)| *pid == told.pid && at.mono.since(*ended) <= SESSION_TAKES) {
            return;
        }
        if self.ensure_server(daemon, told.pid, at).is_none() {
            return;
        }
        self.take_up(daemon, told.pid, told.status == Some(ServerStatus::Fault), at);
        let Some(server) = daemon.servers.get_mut(&told.pid) else { return };
        // Another answer had missed it. An exit line or the end of its process is newer than any answer.
        server.ending = server.ending.take().filter(|ending| ending.evidence_source != "control");
        differences.extend(server.refuted.take());
        let (in_fault, has_ended) = (server.fault.is_some(), server.ending.is_some());
        match (told.status, in_fault) {
            // Of a server that is dead the daemon says the same.
            (Some(ServerStatus::Fault), false) if has_ended => {}
            (Some(ServerStatus::Fault), false) => {
                let text = "get_server_status answered FAULT".into();
                self.fault(daemon, told.pid, None, Some(&("control", text)), at);
            }
            (Some(ServerStatus::Active), true) => self.recovered(daemon, told.pid, at),
            (Some(status), _) => server.status = Some(status),
            // 535 cannot tell; a server that lists clients serves.
            (None, _) => {}
        }
        let clients: Option<BTreeSet<u32>> = match (&told.clients, &told.contexts) {
            (None, None) => None,
            (clients, contexts) => {
                let named = clients.iter().flatten().copied();
                Some(
                    named
                        .chain(contexts.iter().flatten().map(|context| context.pid))
                        .filter(|pid| *pid != 0)
                        .collect(),
                )
            }
        };
        let Some(clients) = clients else { return };
        let log_up = self.is_up(SourceName::ServerLog, Some(&daemon.site.name))
            || self.is_up(SourceName::DaemonOutput, Some(&daemon.site.name));
        let known: BTreeMap<ClientKey, bool> = daemon
            .servers
            .get(&told.pid)
            .into_iter()
            .flat_map(|server| server.clients.values())
            .map(|client| (client.key, at.mono.since(client.touched) > ANSWER_MAY_BE_OLDER))
            .collect();
        for (key, is_old) in &known {
            if let ClientKey::Named(pid) = key
                && *is_old
                && !clients.contains(pid)
            {
                if log_up {
                    differences.push(
                        format!("client {pid} of server {} is no longer listed, but no log line said that it left", told.pid)
                            .into(),
                    );
                }
                self.leave(daemon, told.pid, *key, at, Left::Told);
            }
        }
        let just_left = |daemon: &Daemon, pid: u32| {
            daemon.departed.iter().any(|left| {
                left.server == told.pid
                    && left.client.key == ClientKey::Named(pid)
                    && at.mono.since(left.at.mono) <= ANSWER_MAY_BE_OLDER
            })
        };
        for pid in clients {
            let key = ClientKey::Named(pid);
            if !known.contains_key(&key) {
                if just_left(daemon, pid) {
                    continue;
                }
                if log_up && !is_first {
                    let text =
                        format!("client {pid} of server {} is listed, but no log line told of it", told.pid);
                    differences.push(text.into());
                }
                // What the first session finds was there before: its coming is no news.
                self.arrive(daemon, told.pid, key, !is_first, at);
            }
        }
        if let Some(contexts) = &told.contexts {
            self.contexts(daemon, told.pid, contexts, at);
        }
    }

    /// Takes over `ps`: contexts and their devices. Rows that are gone are gone.
    fn contexts(&mut self, daemon: &mut Daemon, server_pid: u32, rows: &[ContextLook], at: Moment) {
        let visible = daemon.site.visible_devices.clone();
        let mut by_client: BTreeMap<u32, Vec<&ContextLook>> = BTreeMap::new();
        for row in rows {
            by_client.entry(row.pid).or_default().push(row);
        }
        for (pid, rows) in by_client {
            let key = ClientKey::Named(pid);
            let Some(client) = daemon.client_mut(server_pid, key) else {
                continue;
            };
            client.is_confirmed = true;
            if at.mono.since(client.touched) > ANSWER_MAY_BE_OLDER {
                client.contexts.retain(|id, _| rows.iter().any(|row| row.context == *id));
            }
            if client.command.is_none() {
                client.command = rows.iter().find_map(|row| row.command.clone());
            }
            for row in rows {
                let device = self.devices.resolve(&row.device, visible.as_deref());
                let device = device.map(|device| (device, DeviceEvidence::Ps));
                daemon.context(server_pid, key, row.context, device);
            }
            daemon.note_devices(server_pid, key, at);
        }
    }
}
