//! What `/proc` and pidfds mean to the model.

use jiff::SignedDuration;

use super::loss::Left;
use super::node::Core;
use super::state::{Client, ClientKey, Daemon};
use crate::event::ProcessFacts;
use crate::time::Moment;

impl Core {
    /// A process that was asked about exists.
    pub fn process_seen(&mut self, daemon: &mut Daemon, facts: &ProcessFacts, at: Moment) {
        if let Some(server) = daemon.servers.get_mut(&facts.pid) {
            server.started_at = facts.started_at.or(server.started_at);
            server.is_confirmed = true;
            server.is_running |= facts.process.is_some();
            if let Some(uid) = facts.uid {
                daemon.learn_uid(facts.pid, uid);
            }
            return;
        }
        self.not_that_victim(daemon, facts, at);
        let key = ClientKey::Named(facts.pid);
        let holders: Vec<u32> = daemon
            .servers
            .values()
            .filter(|server| server.clients.contains_key(&key))
            .map(|server| server.pid)
            .collect();
        for server_pid in holders {
            let Some(server) = daemon.servers.get_mut(&server_pid) else { continue };
            let Some(client) = server.clients.get(&key) else { continue };
            if is_later_process(client, facts) {
                // Its pid went to a process that nothing calls a client.
                self.leave(daemon, server_pid, key, at, Left::Exited);
                continue;
            }
            let is_another =
                client.process.is_some() && facts.process.is_some() && client.process != facts.process;
            if is_another {
                // The pid was reused: the client that had it is gone.
                let is_news = client.is_news;
                self.leave(daemon, server_pid, key, at, Left::Exited);
                self.arrive(daemon, server_pid, key, is_news, at);
            }
            // NVML may have told of the same process under its pid in this namespace.
            let host_key = facts.process.map(|process| ClientKey::Host(process.pid));
            let Some(server) = daemon.servers.get_mut(&server_pid) else { continue };
            let by_nvml = host_key.and_then(|key| server.clients.remove(&key));
            let Some(client) = server.clients.get_mut(&key) else { continue };
            if let Some(other) = by_nvml {
                client.nvml.extend(other.nvml);
                client.counted_on.extend(other.counted_on);
            }
            learn(client, facts);
            let client = client.clone();
            daemon.note_devices(server_pid, key, at);
            for case in self.cases.open_cases_mut() {
                case.learn(&client);
            }
        }
    }

    /// A victim of a recorded incident whose pid now is a process that started later has ended.
    fn not_that_victim(&mut self, daemon: &Daemon, facts: &ProcessFacts, at: Moment) {
        let Some(started_at) = facts.started_at else { return };
        for case in self.cases.open_cases_mut() {
            if case.is_restored && case.daemon == daemon.site.name && started_at > case.incident.started_at {
                case.victim_exited(ClientKey::Named(facts.pid), at.wall);
            }
        }
    }

    /// A process that was asked about has ended.
    pub fn process_exited(&mut self, daemon: &mut Daemon, pid: u32, at: Moment) {
        if let Some(awaited) = &mut daemon.log_awaited {
            awaited.exited.insert(pid);
            return;
        }
        daemon.pending.retain(|pending| pending.pid != pid);
        if let Some(server) = daemon.servers.get_mut(&pid) {
            server.is_running = false;
            let text = format!("the process of server {pid} ended").into();
            self.server_ended(daemon, pid, None, ("proc", text), at);
            return;
        }
        let key = ClientKey::Named(pid);
        let holders: Vec<u32> = daemon
            .servers
            .values()
            .filter(|server| server.clients.contains_key(&key))
            .map(|server| server.pid)
            .collect();
        for server_pid in &holders {
            self.leave(daemon, *server_pid, key, at, Left::Exited);
        }
        // Victims of a server that is gone are known to their incident alone.
        for case in self.cases.open_cases_mut() {
            if case.has_victim(key) && case.daemon == daemon.site.name {
                case.victim_exited(key, at.wall);
            }
        }
    }
}

/// Whether a process with a client's pid started after the client had connected: then it is not the client. Start times
/// are rounded to a second by the kernel's boot time.
fn is_later_process(client: &Client, facts: &ProcessFacts) -> bool {
    let (Some(connected), Some(started)) = (client.connected_at, facts.started_at) else { return false };
    client.process.is_none() && started.duration_since(connected) > SignedDuration::from_secs(2)
}

fn learn(client: &mut Client, facts: &ProcessFacts) {
    client.is_confirmed = true;
    client.process = facts.process.or(client.process);
    client.started_at = facts.started_at.or(client.started_at);
    if facts.command.is_some() {
        client.command.clone_from(&facts.command);
    }
    if facts.workload.is_some() {
        client.workload.clone_from(&facts.workload);
    }
}
