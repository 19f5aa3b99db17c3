//! Clients as they come, and the devices on which they are.

use super::Effect;
use super::device::DeviceId;
use super::node::Core;
use super::snapshot::DeviceEvidence;
use super::state::{Client, ClientKey, Context, Daemon};
use crate::time::Moment;

impl Core {
    /// A client is there; it is made when it is new. `is_news`: its coming counts as a connection.
    pub fn arrive(
        &mut self,
        daemon: &mut Daemon,
        server_pid: u32,
        key: ClientKey,
        is_news: bool,
        at: Moment,
    ) {
        let is_confirmed = self.is_news();
        let Some(server) = daemon.servers.get_mut(&server_pid) else { return };
        server.touched = at.mono;
        let name = &daemon.site.name;
        let effects = &mut self.effects;
        let client = server.clients.entry(key).or_insert_with(|| {
            if let ClientKey::Named(pid) = key {
                effects.push(Effect::Watch(name.clone(), pid));
            }
            let mut client = Client::new(key, at.mono);
            client.is_news = is_news;
            client.connected_at = Some(at.wall);
            client
        });
        client.touched = at.mono;
        client.is_confirmed |= is_confirmed;
        daemon.pending.retain(|pending| pending.pid == 0 || pending.pid != key.pid());
    }
}

impl Daemon {
    /// A context of a client is there, on a device where that is known.
    pub fn context(
        &mut self,
        server_pid: u32,
        key: ClientKey,
        context: u32,
        device: Option<(DeviceId, DeviceEvidence)>,
    ) {
        let Some(client) = self.client_mut(server_pid, key) else {
            return;
        };
        let known = client.contexts.entry(context).or_insert_with(Context::default);
        // `ps` stands over what was inferred from the order of log lines.
        if let Some((device, evidence)) = device
            && known.device.is_none_or(|(_, by)| evidence <= by)
        {
            known.device = Some((device, evidence));
        }
    }

    /// Takes note of the devices of a client; on each new one its connection counts.
    pub fn note_devices(&mut self, server_pid: u32, key: ClientKey, at: Moment) {
        let Some(client) = self.client_mut(server_pid, key) else {
            return;
        };
        let new: Vec<DeviceId> = client.devices().difference(&client.counted_on).copied().collect();
        let (is_news, connected) = (client.is_news, client.connected_at.unwrap_or(at.wall));
        client.counted_on.extend(&new);
        for device in new {
            let domain = self.domains.entry(device).or_default();
            if is_news {
                domain.connects.add(connected);
            }
        }
    }

    /// A client of one of its servers.
    pub fn client_mut(&mut self, server_pid: u32, key: ClientKey) -> Option<&mut Client> {
        self.servers.get_mut(&server_pid)?.clients.get_mut(&key)
    }
}
