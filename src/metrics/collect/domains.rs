//! Fault domains: their clients, blast radius, incidents and recovery.

use crate::engine::incident::Cause;
use crate::engine::snapshot::{Count, DomainView, LossCause, Radius, Scope, Snapshot};
use crate::metrics::families::{self, Family};
use crate::metrics::labels::LabelValue;
use crate::metrics::series::{Page, last, total};
use crate::time::unix_seconds;

pub(super) fn domains(page: &mut Page, snapshot: &Snapshot) {
    let domains = &snapshot.domains[..];
    page.family(&families::FAULT_DOMAIN_INFO, |series| {
        for domain in domains {
            let own = [
                domain.daemon.as_deref().unwrap_or_default(),
                domain.sharing.map(LabelValue::label).unwrap_or_default(),
                domain.model_name.as_deref().unwrap_or_default(),
                domain.pci_bus_id.as_deref().unwrap_or_default(),
                domain.gpu_instance_profile.as_deref().unwrap_or_default(),
                domain.driver_version.as_deref().unwrap_or_default(),
            ];
            series.domain(&domain.labels, &own, 1.0);
        }
    });
    each(page, domains, &families::CLIENTS, |domain| domain.clients.map(f64::from));
    each(page, domains, &families::CLIENT_CONTEXTS, |domain| domain.contexts.map(f64::from));
    each(page, domains, &families::CLIENT_CONTEXTS_LIMIT, |domain| domain.contexts_limit.map(f64::from));
    each(page, domains, &families::CLIENT_CONNECTS, |domain| Some(total(&domain.connects)));
    each(page, domains, &families::CLIENT_CONNECT_LAST, |domain| last(&domain.connects));
    each(page, domains, &families::CLIENT_DISCONNECTS, |domain| Some(total(&domain.disconnects)));
    each(page, domains, &families::CLIENT_DISCONNECT_LAST, |domain| last(&domain.disconnects));
    counts::<LossCause>(page, domains, &families::CLIENTS_LOST, &families::CLIENT_LOST_LAST, |domain| {
        &domain.lost
    });
    radius(page, domains, &families::BLAST_RADIUS_CLIENTS, |radius| radius.clients.map(f64::from));
    radius(page, domains, &families::BLAST_RADIUS_WORKLOADS, |radius| radius.workloads.map(f64::from));
    radius(page, domains, &families::BLAST_RADIUS_MEMORY, |radius| {
        radius.memory_bytes.map(|bytes| bytes as f64)
    });
    radius(page, domains, &families::WORK_AT_RISK, |radius| {
        radius.work_at_risk.map(|work| work.as_secs_f64())
    });
    each(page, domains, &families::COUPLED_DEVICES, |domain| domain.coupled_devices.map(f64::from));
    each(page, domains, &families::BYPASSING_PROCESSES, |domain| domain.bypassing_processes.map(f64::from));
    counts::<Cause>(page, domains, &families::INCIDENTS, &families::INCIDENT_LAST, |domain| {
        &domain.incidents
    });
    each(page, domains, &families::MASS_CLIENT_LOSS, |domain| Some(total(&domain.mass_losses)));
    each(page, domains, &families::MASS_CLIENT_LOSS_LAST, |domain| last(&domain.mass_losses));
    each(page, domains, &families::MASS_CLIENT_LOSS_LAST_CLIENTS, |domain| {
        domain.mass_loss_last_clients.map(f64::from)
    });
    each(page, domains, &families::RECOVERY_BLOCKING_CLIENTS, |domain| {
        Some(f64::from(domain.recovery_blocking))
    });
    each(page, domains, &families::FAULT_START, |domain| domain.fault_started_at.map(unix_seconds));
    page.family(&families::RECOVERY_DURATION, |series| {
        for domain in domains {
            series.histogram(&domain.labels, &[], &domain.recovery_durations);
        }
    });
}

/// A value of each domain that has it.
fn each(
    page: &mut Page,
    domains: &[DomainView],
    family: &'static Family,
    value: impl Fn(&DomainView) -> Option<f64>,
) {
    page.family(family, |series| {
        for domain in domains {
            if let Some(value) = value(domain) {
                series.domain(&domain.labels, &[], value);
            }
        }
    });
}

/// A part of the radius of each domain, by scope.
fn radius(
    page: &mut Page,
    domains: &[DomainView],
    family: &'static Family,
    part: impl Fn(&Radius) -> Option<f64>,
) {
    page.family(family, |series| {
        for domain in domains {
            for (scope, radius) in &domain.radius {
                if let Some(value) = part(radius) {
                    series.domain(&domain.labels, &[Scope::label(*scope)], value);
                }
            }
        }
    });
}

/// A counter by cause, every cause from 0, and its last times.
fn counts<T: LabelValue>(
    page: &mut Page,
    domains: &[DomainView],
    counter: &'static Family,
    timestamp: &'static Family,
    of: impl Fn(&DomainView) -> &Vec<(T, Count)>,
) {
    page.family(counter, |series| {
        for domain in domains {
            for cause in T::ALL {
                let count =
                    of(domain).iter().find(|(it, _)| it == cause).map_or(0.0, |(_, count)| total(count));
                series.domain(&domain.labels, &[cause.label()], count);
            }
        }
    });
    page.family(timestamp, |series| {
        for domain in domains {
            for (cause, count) in of(domain) {
                if let Some(at) = last(count) {
                    series.domain(&domain.labels, &[cause.label()], at);
                }
            }
        }
    });
}
