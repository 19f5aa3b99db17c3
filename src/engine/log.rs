//! What MPS log lines mean to the model.

use std::time::Duration;

use super::Effect;
use super::loss::Left;
use super::node::Core;
use super::snapshot::DeviceEvidence;
use super::state::{ClientKey, Daemon, Pending, Server};
use crate::event::{LogEntry, LogMessage, ServerStatus};
use crate::identity::DeviceName;
use crate::time::Moment;

/// How long a line that does not say which client it means waits for better news of the same thing.
const DOUBT_SETTLES: Duration = Duration::from_millis(500);

/// Clients that may be queued at once, as far as they are counted.
const MAX_PENDING: usize = 4096;

/// Servers that a daemon can have in the model. More are stray lines.
pub(super) const MAX_SERVERS: usize = 256;

impl Core {
    /// Applies one log line.
    pub fn log(&mut self, daemon: &mut Daemon, entry: &LogEntry, at: Moment) {
        use LogMessage as M;
        let writer = entry.writer;
        let text = entry.text.as_ref();
        match &entry.message {
            M::DaemonStarted => self.daemon_started(daemon, at),
            M::DaemonVersion(version) => daemon.version = Some(version.to_string().into()),
            M::ClientAdmitted { pid, uid } => client_admitted(daemon, *pid, *uid),
            M::ClientQueued { pid, uid } => self.client_queued(daemon, *pid, *uid, at),
            M::ServerStarting { pid, uid } => self.server_starting(daemon, *pid, *uid, at),
            M::ServerReady { pid } => self.server_ready(daemon, *pid, at),
            M::ServerBroke => {}
            M::ServerExited { pid, status } => {
                self.ensure_server(daemon, *pid, at);
                let line = text
                    .cloned()
                    .unwrap_or_else(|| format!("Server {pid} exited with status {status}").into());
                self.server_ended(daemon, *pid, Some(*status), ("control.log", line), at);
            }
            M::ServerLaunchFailed { uid } => {
                daemon.pending.retain(|pending| pending.uid != *uid);
            }
            M::ServerAskedToLeave { pid } => {
                // It may refuse and go on serving (550+): only its own word counts.
                self.ensure_server(daemon, *pid, at);
            }
            M::ServerForcedToLeave { pid } => {
                if let Some(server) = self.ensure_server(daemon, *pid, at) {
                    server.is_leaving = true;
                }
            }
            M::DaemonStopping => {
                daemon.is_stopping = true;
                for left in &mut daemon.departed {
                    left.is_settled = true;
                }
            }
            M::ServerStartup => {
                self.ensure_server(daemon, writer, at);
            }
            M::ServerStartFailed(reason) => {
                if self.ensure_server(daemon, writer, at).is_some() {
                    daemon.place(writer).last_start_failure = Some(reason.clone());
                }
            }
            M::ContextCreated { device, .. } => self.context_created(daemon, writer, *device, at),
            M::ContextDestroyed { .. } => self.context_destroyed(daemon, writer, at),
            M::ServerStarted => {
                if let Some(server) = self.ensure_server(daemon, writer, at)
                    && server.status != Some(ServerStatus::Fault)
                {
                    server.status = Some(ServerStatus::Active);
                }
            }
            M::ServerVersion(version) => {
                if let Some(server) = self.ensure_server(daemon, writer, at) {
                    server.version = Some(version.to_string().into());
                }
            }
            M::ClientArriving => {
                if let Some(server) = self.ensure_server(daemon, writer, at) {
                    server.arriving.clear();
                    server.doubt_until = server.doubt_until.or(Some(at.mono.after(DOUBT_SETTLES)));
                }
            }
            M::ClientConnected { pid } if *pid != 0 => {
                self.ensure_server(daemon, writer, at);
                let is_news = self.is_news();
                self.arrive(daemon, writer, ClientKey::Named(*pid), is_news, at);
                if let Some(server) = daemon.servers.get_mut(&writer) {
                    server.doubt_until = server.doubt_until.or(Some(at.mono.after(DOUBT_SETTLES)));
                }
            }
            M::ClientConnected { .. } => {
                self.ensure_server(daemon, writer, at);
                self.doubt(daemon);
            }
            M::DeviceAssociated { device } => self.device_associated(daemon, writer, device, at),
            M::ContextActive { pid, context } => self.context_active(daemon, writer, *pid, *context, at),
            M::ContextInactive { pid, .. } | M::StickyClient { pid } => {
                self.ensure_fault(daemon, writer, at);
                self.named_in_fault(daemon, writer, *pid, text, at);
            }
            M::ClientLeft { pid, context } => self.client_left(daemon, writer, *pid, *context, at),
            M::ClientLeftUnnamed { contexts_left } => self.unnamed_left(daemon, writer, *contexts_left, at),
            M::ClientFault { pid } => {
                self.ensure_server(daemon, writer, at);
                let line = text.map(|text| ("server.log", text.clone()));
                self.fault(daemon, writer, Some(*pid), line.as_ref(), at);
            }
            M::ServerFault => {
                self.ensure_server(daemon, writer, at);
                let line = text.map(|text| ("server.log", text.clone()));
                self.fault(daemon, writer, None, line.as_ref(), at);
            }
            M::FaultDevice { ordinal } => self.fault_device(daemon, writer, *ordinal, at),
            M::ClientTerminating { pid } => {
                if let Some(client) = self
                    .ensure_server(daemon, writer, at)
                    .and_then(|server| server.clients.get_mut(&ClientKey::Named(*pid)))
                {
                    client.is_terminating = true;
                }
            }
            M::ClientTerminationFailed => {
                if let Some(server) = daemon.servers.get_mut(&writer) {
                    for client in server.clients.values_mut() {
                        client.is_terminating = false;
                    }
                }
            }
            M::ClientRejected(reason) => {
                if self.is_news() {
                    daemon.rejected.entry(*reason).or_default().add(at.wall);
                }
            }
            M::ServerLeaving => {
                if let Some(server) = self.ensure_server(daemon, writer, at) {
                    server.is_leaving = true;
                }
                for left in daemon.departed.iter_mut().filter(|left| left.server == writer) {
                    left.is_settled = true;
                }
            }
            M::Trouble(trouble) => {
                if self.is_news() {
                    daemon.troubles.entry(*trouble).or_default().add(at.wall);
                }
            }
        }
    }

    /// The server with this pid; it is made when no line has told of it before.
    pub fn ensure_server<'a>(
        &mut self,
        daemon: &'a mut Daemon,
        pid: u32,
        at: Moment,
    ) -> Option<&'a mut Server> {
        if pid == 0 || (daemon.servers.len() >= MAX_SERVERS && !daemon.servers.contains_key(&pid)) {
            return None;
        }
        let is_news = self.is_news();
        let (name, effects) = (&daemon.site.name, &mut self.effects);
        let server = daemon.servers.entry(pid).or_insert_with(|| {
            effects.push(Effect::Watch(name.clone(), pid));
            Server::new(pid, at.mono)
        });
        server.is_confirmed |= is_news;
        server.touched = at.mono;
        Some(server)
    }

    fn daemon_started(&mut self, daemon: &mut Daemon, at: Moment) {
        daemon.restarted();
        if !self.is_news() {
            // An earlier daemon's servers left no word of their end.
            let servers: Vec<u32> = daemon.servers.keys().copied().collect();
            for pid in servers {
                self.server_gone(daemon, pid, at);
            }
        }
    }

    fn client_queued(&mut self, daemon: &mut Daemon, pid: u32, uid: u32, at: Moment) {
        let is_known = pid != 0 && daemon.pending.iter().any(|pending| pending.pid == pid);
        if is_known || daemon.pending.len() >= MAX_PENDING {
            return;
        }
        daemon.pending.push(Pending { pid, uid, since: at.wall });
        if pid != 0 {
            self.effects.push(Effect::Watch(daemon.site.name.clone(), pid));
        }
    }

    fn server_starting(&mut self, daemon: &mut Daemon, pid: u32, uid: u32, at: Moment) {
        let Some(server) = self.ensure_server(daemon, pid, at) else { return };
        server.started_at = Some(at.wall);
        server.status = server.status.or(Some(ServerStatus::Initializing));
        daemon.learn_uid(pid, uid);
        if self.is_news() {
            daemon.place(pid).starts.add(at.wall);
        } else {
            daemon.place(pid);
        }
    }

    fn server_ready(&mut self, daemon: &mut Daemon, pid: u32, at: Moment) {
        let Some(server) = self.ensure_server(daemon, pid, at) else { return };
        if server.status != Some(ServerStatus::Fault) {
            server.status = Some(ServerStatus::Active);
        }
        // Clients of its uid are admitted now; the daemon logs each.
        if let Some(uid) = server.uid {
            daemon.pending.retain(|pending| pending.uid != uid);
        }
        self.server_replaced(daemon, pid, at);
    }

    fn context_created(&mut self, daemon: &mut Daemon, writer: u32, device: u32, at: Moment) {
        let visible = daemon.site.visible_devices.clone();
        if let Some(id) = self.devices.resolve(&DeviceName::Ordinal(device), visible.as_deref()) {
            daemon.domains.entry(id).or_default();
        }
        let Some(server) = self.ensure_server(daemon, writer, at) else { return };
        if let Some(fault) = &mut server.fault {
            fault.awaiting.remove(&device);
            fault.has_recreated = true;
            // The server recreates a device's contexts only when its last victim has let go.
            if fault.awaiting.is_empty() {
                self.recovered(daemon, writer, at);
            }
        }
    }

    fn context_destroyed(&mut self, daemon: &mut Daemon, writer: u32, at: Moment) {
        self.ensure_server(daemon, writer, at);
    }

    fn device_associated(&mut self, daemon: &mut Daemon, writer: u32, device: &DeviceName, at: Moment) {
        let visible = daemon.site.visible_devices.clone();
        let Some(id) = self.devices.resolve(device, visible.as_deref()) else { return };
        daemon.domains.entry(id).or_default();
        if let Some(server) = self.ensure_server(daemon, writer, at)
            && !server.arriving.contains(&id)
            && server.arriving.len() < 64
        {
            server.arriving.push(id);
        }
    }

    /// A context became active. The device of the `is associated` line before it is its own, unless several devices
    /// were associated since the last one: then only `ps` or NVML can tell.
    fn context_active(&mut self, daemon: &mut Daemon, writer: u32, pid: u32, context: u32, at: Moment) {
        let Some(server) = self.ensure_server(daemon, writer, at) else { return };
        let device = match std::mem::take(&mut server.arriving).as_slice() {
            [only] => Some(*only),
            _ => None,
        };
        // A context of a client that is no victim shows that the server serves again.
        let serves_again = server.fault.is_some() && !server.clients.contains_key(&ClientKey::Named(pid));
        if device.is_some() {
            server.doubt_until = None;
        }
        if serves_again && server.blocking().next().is_none() {
            self.recovered(daemon, writer, at);
        }
        if pid == 0 {
            self.doubt(daemon);
            return;
        }
        let key = ClientKey::Named(pid);
        let is_news = self.is_news();
        self.arrive(daemon, writer, key, is_news, at);
        daemon.context(writer, key, context, device.map(|device| (device, DeviceEvidence::LogOrder)));
        daemon.note_devices(writer, key, at);
        let has_device =
            daemon.servers.get(&writer).and_then(|server| server.clients.get(&key)).is_some_and(|client| {
                client.contexts.get(&context).is_some_and(|context| context.device.is_some())
                    || !client.nvml.is_empty()
            });
        if !has_device && self.is_news() {
            self.doubt(daemon);
        }
    }

    /// A victim line without a fault line before it (an older server, or a log read from the middle).
    fn ensure_fault(&mut self, daemon: &mut Daemon, writer: u32, at: Moment) {
        let is_known = self.ensure_server(daemon, writer, at).is_some_and(|server| server.fault.is_some());
        if !is_known {
            self.fault(daemon, writer, None, None, at);
        }
    }

    fn fault_device(&mut self, daemon: &mut Daemon, writer: u32, ordinal: u32, at: Moment) {
        self.ensure_fault(daemon, writer, at);
        if let Some(fault) = daemon.servers.get_mut(&writer).and_then(|server| server.fault.as_mut())
            && fault.awaiting.len() < 256
        {
            fault.awaiting.insert(ordinal);
        }
    }

    fn client_left(&mut self, daemon: &mut Daemon, writer: u32, pid: u32, context: Option<u32>, at: Moment) {
        let key = ClientKey::Named(pid);
        let Some(client) = daemon.client_mut(writer, key) else {
            return;
        };
        if let Some(context) = context {
            // The last context takes the client with it. One that was never told of says nothing about the others.
            let is_last = client.contexts.keys().all(|known| *known == context);
            if !is_last {
                client.contexts.remove(&context);
                return;
            }
        }
        self.leave(daemon, writer, key, at, Left::Told);
    }

    fn unnamed_left(&mut self, daemon: &mut Daemon, writer: u32, contexts_left: Option<u32>, at: Moment) {
        let Some(server) = self.ensure_server(daemon, writer, at) else { return };
        let just_left = server.last_departure.is_some_and(|left| at.mono.distance(left) <= DOUBT_SETTLES);
        if contexts_left == Some(0) && server.clients.values().all(|client| client.lost.is_none()) {
            let keys: Vec<ClientKey> = server.clients.keys().copied().collect();
            if let [only] = keys.as_slice() {
                let only = *only;
                self.leave(daemon, writer, only, at, Left::Told);
            }
            return;
        }
        if !just_left && !server.clients.is_empty() {
            server.doubt_until = server.doubt_until.or(Some(at.mono.after(DOUBT_SETTLES)));
        }
    }

    /// Asks about servers whose doubt was not resolved by the end of a process or a better line.
    pub fn settle_doubts(&mut self, daemon: &mut Daemon, at: Moment) {
        let mut asks = false;
        for server in daemon.servers.values_mut() {
            if let Some(until) = server.doubt_until
                && until <= at.mono
            {
                server.doubt_until = None;
                let resolved =
                    server.last_departure.is_some_and(|left| until.since(left) <= DOUBT_SETTLES * 2);
                let all_known = server.clients.values().all(|client| client.each_device().next().is_some());
                asks |= !(resolved && all_known);
            }
        }
        if asks {
            self.doubt(daemon);
        }
    }
}

/// A server took a client in: it waits no longer.
fn client_admitted(daemon: &mut Daemon, pid: u32, uid: u32) {
    if pid == 0 {
        if let Some(place) = daemon.pending.iter().position(|pending| pending.pid == 0 && pending.uid == uid)
        {
            daemon.pending.remove(place);
        }
    } else {
        daemon.pending.retain(|pending| pending.pid != pid);
    }
}
