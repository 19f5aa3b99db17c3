//! The last incident of each fault domain: who did it, and who was lost.

use std::collections::BTreeMap;

use super::workloads::workload_labels;
use crate::config::Collectors;
use crate::engine::incident::Incident;
use crate::engine::snapshot::{DomainLabels, Snapshot};
use crate::metrics::families;
use crate::metrics::labels::LabelValue;
use crate::metrics::series::Page;

/// Returns how many series the limit of workloads left out.
pub(super) fn incidents(page: &mut Page, snapshot: &Snapshot, options: &Collectors) -> usize {
    let last = last_of_each_domain(snapshot);
    page.family(&families::INCIDENT_LAST_CULPRIT, |series| {
        for (domain, incident) in &last {
            let Some(culprit) = &incident.culprit else { continue };
            let [namespace, pod, container, job] = workload_labels(culprit.workload.as_ref());
            let labels = [
                &*incident.id,
                &culprit.pid.to_string(),
                culprit.command.as_deref().unwrap_or_default(),
                namespace,
                pod,
                container,
                job,
                culprit.evidence.label(),
            ];
            series.domain(domain, &labels, 1.0);
        }
    });
    if !options.workloads {
        return 0;
    }
    let mut victims: BTreeMap<(&DomainLabels, [&str; 4]), u32> = BTreeMap::new();
    for (domain, incident) in &last {
        for victim in &incident.victims {
            *victims.entry((*domain, workload_labels(victim.workload.as_ref()))).or_default() += 1;
        }
    }
    page.family(&families::INCIDENT_LAST_VICTIMS, |series| {
        for ((domain, workload), count) in victims.iter().take(options.workloads_limit) {
            series.domain(domain, workload, f64::from(*count));
        }
    });
    victims.len().saturating_sub(options.workloads_limit)
}

fn last_of_each_domain(snapshot: &Snapshot) -> Vec<(&DomainLabels, &Incident)> {
    let mut last: BTreeMap<&str, &Incident> = BTreeMap::new();
    for incident in &snapshot.incidents {
        for domain in &incident.fault_domains {
            let newest = last.entry(domain).or_insert(incident);
            if (incident.started_at, &incident.id) > (newest.started_at, &newest.id) {
                *newest = incident;
            }
        }
    }
    let domains = snapshot.domains.iter().map(|domain| &*domain.labels);
    domains.filter_map(|labels| Some((labels, *last.get(&*labels.fault_domain)?))).collect()
}
