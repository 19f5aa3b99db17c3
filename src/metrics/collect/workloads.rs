//! Workloads, and with `collectors.clients` each client: the series that can be many, so each has a limit.

use std::collections::BTreeMap;

use jiff::Timestamp;

use crate::config::Collectors;
use crate::engine::snapshot::{ClientState, ClientView, DomainLabels, Snapshot};
use crate::identity::Workload;
use crate::metrics::families::{self, Family};
use crate::metrics::labels::LabelValue;
use crate::metrics::series::Page;
use crate::time::unix_seconds;

/// The labels `namespace`, `pod`, `container`, `slurm_job`; empty where they do not apply.
pub(super) fn workload_labels(workload: Option<&Workload>) -> [&str; 4] {
    match workload {
        Some(Workload::Pod { namespace, pod, container, .. }) => [
            namespace.as_deref().unwrap_or_default(),
            pod.as_deref().unwrap_or_default(),
            container.as_deref().unwrap_or_default(),
            "",
        ],
        Some(Workload::Slurm { job, .. }) => ["", "", "", job],
        Some(Workload::Container { id }) => ["", "", id, ""],
        Some(Workload::Unit { .. } | Workload::Cgroup { .. }) | None => [""; 4],
    }
}

/// Clients and checkpoints by workload. Returns how many series the limit left out.
pub(super) fn workloads(page: &mut Page, snapshot: &Snapshot, options: &Collectors) -> usize {
    if !options.workloads {
        return 0;
    }
    let labels: BTreeMap<&str, &DomainLabels> =
        snapshot.domains.iter().map(|domain| (&*domain.labels.fault_domain, &*domain.labels)).collect();
    let mut clients: BTreeMap<(&DomainLabels, [&str; 4]), u32> = BTreeMap::new();
    let mut checkpoints: BTreeMap<(&str, [&str; 4]), Timestamp> = BTreeMap::new();
    for client in snapshot.clients.iter().filter(|client| client.state == ClientState::Active) {
        let workload = workload_labels(client.workload.as_ref());
        for domain in client.domains.iter().filter_map(|domain| labels.get(&**domain)) {
            *clients.entry((*domain, workload)).or_default() += 1;
        }
        // Without a name the checkpoints of strangers would be taken for one workload's.
        if let Some(at) = client.checkpoint_at.filter(|_| workload != [""; 4]) {
            let newest = checkpoints.entry((&*client.daemon, workload)).or_insert(at);
            *newest = at.max(*newest);
        }
    }
    let limit = options.workloads_limit;
    page.family(&families::WORKLOAD_CLIENTS, |series| {
        for ((domain, workload), count) in clients.iter().take(limit) {
            series.domain(domain, workload, f64::from(*count));
        }
    });
    page.family(&families::CHECKPOINT_LAST, |series| {
        for ((daemon, [namespace, pod, container, job]), at) in checkpoints.iter().take(limit) {
            series.value(&[daemon, namespace, pod, container, job], unix_seconds(*at));
        }
    });
    clients.len().saturating_sub(limit) + checkpoints.len().saturating_sub(limit)
}

/// Each client. Returns how many clients the limit left out.
pub(super) fn clients(page: &mut Page, snapshot: &Snapshot, options: &Collectors) -> usize {
    if !options.clients {
        return 0;
    }
    let shown = &snapshot.clients[..snapshot.clients.len().min(options.clients_limit)];
    page.family(&families::CLIENT_INFO, |series| {
        for client in shown {
            let host_pid = client.host_pid.map(|pid| pid.to_string()).unwrap_or_default();
            let [namespace, pod, container, job] = workload_labels(client.workload.as_ref());
            let labels = [
                &*client.daemon,
                &*client.server,
                &client.pid.to_string(),
                &host_pid,
                client.command.as_deref().unwrap_or_default(),
                namespace,
                pod,
                container,
                job,
                client.state.label(),
            ];
            series.value(&labels, 1.0);
        }
    });
    each(page, shown, &families::CLIENT_MEMORY, |client| client.memory_bytes.map(|bytes| bytes as f64));
    each(page, shown, &families::CLIENT_CONNECTED, |client| client.connected_at.map(unix_seconds));
    each(page, shown, &families::CLIENT_CHECKPOINT_LAST, |client| client.checkpoint_at.map(unix_seconds));
    snapshot.clients.len() - shown.len()
}

fn each(
    page: &mut Page,
    clients: &[ClientView],
    family: &'static Family,
    value: impl Fn(&ClientView) -> Option<f64>,
) {
    page.family(family, |series| {
        for client in clients {
            if let Some(value) = value(client) {
                series.value(&[&client.daemon, &client.server, &client.pid.to_string()], value);
            }
        }
    });
}
