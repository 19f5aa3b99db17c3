//! Who shares a fate: coupled sets, and the processes in them by workload.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use jiff::Timestamp;

use super::words;
use crate::engine::incident::{Incident, IncidentState, Victim};
use crate::engine::snapshot::{ClientState, ClientView, DomainView, Snapshot};
use crate::identity::Workload;

/// Domains that one client's fault takes down together.
pub(super) struct Set<'a> {
    pub domains: Vec<&'a DomainView>,
    /// The incident that is not over on any of them, the newest.
    pub incident: Option<&'a Incident>,
    /// Its processes by workload: those that are hit first, then the largest.
    pub workloads: Vec<Group<'a>>,
}

/// The processes of a workload.
pub(super) struct Group<'a> {
    pub name: String,
    pub entries: Vec<Entry<'a>>,
}

/// A client, or a victim that is gone.
pub(super) struct Entry<'a> {
    pub pid: u32,
    pub command: Option<&'a str>,
    /// The `fault_domain` labels where it has contexts.
    pub domains: Vec<&'a str>,
    pub memory: Option<u64>,
    /// Since when its work would be lost, and whether that is a checkpoint.
    pub work_since: Option<(Timestamp, bool)>,
    pub mark: Mark,
    pub is_culprit: bool,
}

/// How a client fares; the worst last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Mark {
    Active,
    /// A victim whose process has exited.
    Exited,
    /// Its context is dead, its process lives on.
    Lost,
    /// Nobody gets on before it has exited.
    Blocks,
}

/// The coupled sets, in the order of their first domain.
pub(super) fn sets(snapshot: &Snapshot) -> Vec<Set<'_>> {
    let mut sets: BTreeMap<&str, Vec<&DomainView>> = BTreeMap::new();
    let mut order: Vec<&str> = Vec::new();
    for domain in &snapshot.domains {
        let own = &*domain.labels.fault_domain;
        // The clients that coupled them are dead, but they fell together and come back together.
        let fallen = snapshot
            .incidents
            .iter()
            .filter(|incident| is_unrecovered(incident))
            .find(|incident| is_hit(incident, domain))
            .map_or(&[][..], |incident| &incident.fault_domains);
        let together = fallen.iter().chain(&domain.coupled_with);
        let key = together.map(|label| &**label).min().unwrap_or(own);
        let set = sets.entry(key).or_default();
        if set.is_empty() {
            order.push(key);
        }
        set.push(domain);
    }
    let mut clients: BTreeMap<&str, Vec<&ClientView>> = BTreeMap::new();
    for client in &snapshot.clients {
        // All devices of a client are in one set.
        if let Some(label) = client.domains.first() {
            clients.entry(label).or_default().push(client);
        }
    }
    order
        .into_iter()
        .filter_map(|key| sets.remove(key))
        .map(|domains| {
            let here: Vec<&ClientView> = domains
                .iter()
                .filter_map(|domain| clients.get(&*domain.labels.fault_domain))
                .flatten()
                .copied()
                .collect();
            let incident = snapshot.incidents.iter().map(|incident| &**incident).find(|incident| {
                incident.state != IncidentState::Closed
                    && domains.iter().any(|domain| is_hit(incident, domain))
            });
            Set { workloads: workloads(&here, incident), domains, incident }
        })
        .collect()
}

/// Clients whose device no source has told yet.
pub(super) fn without_device(snapshot: &Snapshot) -> Vec<Group<'_>> {
    let clients: Vec<&ClientView> =
        snapshot.clients.iter().filter(|client| client.domains.is_empty()).collect();
    workloads(&clients, None)
}

fn is_unrecovered(incident: &Incident) -> bool {
    incident.state != IncidentState::Closed && incident.recovery.recovered_at.is_none()
}

fn is_hit(incident: &Incident, domain: &DomainView) -> bool {
    incident.fault_domains.contains(&domain.labels.fault_domain)
}

fn workloads<'a>(clients: &[&'a ClientView], incident: Option<&'a Incident>) -> Vec<Group<'a>> {
    let mut groups: BTreeMap<(&'static str, &'a str), Group<'a>> = BTreeMap::new();
    let mut add = |workload: Option<&'a Workload>, entry: Entry<'a>| {
        let key = workload.map_or_else(|| ("command", entry.command.unwrap_or_default()), Workload::key);
        let name = || words::workload(workload);
        groups.entry(key).or_insert_with(|| Group { name: name(), entries: Vec::new() }).entries.push(entry);
    };
    for client in clients {
        add(client.workload.as_ref(), present(client, incident));
    }
    // Once new work is taken, those that are gone would only be counted beside it.
    let victims = incident.filter(|incident| is_unrecovered(incident));
    let victims = victims.map_or(&[][..], |incident| &incident.victims);
    for victim in victims.iter().filter(|victim| clients.iter().all(|client| client.pid != victim.pid)) {
        let is_culprit =
            incident.is_some_and(|it| it.culprit.as_ref().is_some_and(|it| it.pid == victim.pid));
        add(victim.workload.as_ref(), gone(victim, is_culprit));
    }
    let mut groups: Vec<Group> = groups.into_values().collect();
    for group in &mut groups {
        group.entries.sort_by_key(|entry| (std::cmp::Reverse((entry.is_culprit, entry.mark)), entry.pid));
    }
    groups.sort_by_key(|group| std::cmp::Reverse((group.worst(), group.entries.len())));
    groups
}

fn present<'a>(client: &'a ClientView, incident: Option<&Incident>) -> Entry<'a> {
    let blocks = incident.is_some_and(|incident| incident.recovery.blocked_by.contains(&client.pid));
    let culprit = incident.and_then(|incident| incident.culprit.as_ref()).map(|culprit| culprit.pid);
    let work_since = client.checkpoint_at.map(|at| (at, true));
    Entry {
        pid: client.pid,
        command: client.command.as_deref(),
        domains: client.domains.iter().map(|label| &**label).collect(),
        memory: client.memory_bytes,
        work_since: work_since.or_else(|| client.started_at.or(client.connected_at).map(|at| (at, false))),
        mark: match client.state {
            _ if blocks => Mark::Blocks,
            ClientState::Lost => Mark::Lost,
            ClientState::Active => Mark::Active,
        },
        is_culprit: culprit.is_some_and(|pid| pid == client.pid || Some(pid) == client.host_pid),
    }
}

fn gone(victim: &Victim, is_culprit: bool) -> Entry<'_> {
    Entry {
        pid: victim.pid,
        command: victim.command.as_deref(),
        domains: Vec::new(),
        memory: None,
        work_since: None,
        mark: if victim.exited_at.is_some() { Mark::Exited } else { Mark::Lost },
        is_culprit,
    }
}

impl Group<'_> {
    fn worst(&self) -> (bool, Option<Mark>) {
        let is_culprit = self.entries.iter().any(|entry| entry.is_culprit);
        (is_culprit, self.entries.iter().map(|entry| entry.mark).max())
    }

    /// Their memory, where it is known of all that live.
    pub fn memory(&self) -> Option<u64> {
        let living = self.entries.iter().filter(|entry| entry.mark != Mark::Exited);
        living.map(|entry| entry.memory).sum::<Option<u64>>().filter(|sum| *sum > 0)
    }

    /// How many fare like this.
    pub fn count(&self, mark: Mark) -> usize {
        self.entries.iter().filter(|entry| entry.mark == mark).count()
    }
}

/// A name for an element that stays the same while the page is refreshed.
pub(super) fn id(parts: &[&str]) -> String {
    let mut hasher = DefaultHasher::new();
    parts.hash(&mut hasher);
    format!("{:x}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::engine::incident::Cause;
    use crate::test_nodes as nodes;

    #[test]
    fn coupled_devices_are_one_set_and_each_client_is_in_it_once() {
        let mut node = nodes::node(3, 2);
        let both: Vec<Arc<str>> = vec!["default/0".into(), "default/1".into()];
        for domain in &mut node.domains[..2] {
            domain.coupled_with.clone_from(&both);
        }
        node.clients[0].domains = both;
        let sets = sets(&node);
        let sizes: Vec<(usize, usize)> =
            sets.iter().map(|set| (set.domains.len(), set.workloads.len())).collect();
        assert_eq!(sizes, [(2, 4), (1, 2)]);
    }

    #[test]
    fn the_culprit_comes_first_and_victims_that_are_gone_stay_in_sight() {
        let mut node = nodes::node(1, 2);
        let mut incident = nodes::incident("2-2", Cause::Fault, "default/0");
        incident.state = IncidentState::Recovering;
        incident.recovery.recovered_at = None;
        incident.culprit.as_mut().unwrap().pid = node.clients[1].pid;
        incident.recovery.blocked_by = vec![node.clients[0].pid];
        node.clients[0].state = ClientState::Lost;
        node.incidents.insert(0, Arc::new(incident));
        let sets = sets(&node);
        let marks: Vec<_> = sets[0]
            .workloads
            .iter()
            .flat_map(|group| &group.entries)
            .map(|entry| (entry.mark, entry.is_culprit))
            .collect();
        let exited = (Mark::Exited, false);
        assert_eq!(marks, [(Mark::Active, true), (Mark::Blocks, false), exited, exited, exited]);
    }
}
