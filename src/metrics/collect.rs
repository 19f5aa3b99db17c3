//! The collector over the model's snapshot. It exports what is known: an unknown value is an absent series, never 0.

mod daemons;
mod devices;
mod domains;
mod workloads;

use std::sync::Arc;

use arc_swap::ArcSwap;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;

use crate::config::Collectors;
use crate::engine::snapshot::Snapshot;
use crate::metrics::families::{self, Family};
use crate::metrics::labels::LabelValue;
use crate::metrics::series::{Page, flag};
use crate::time::unix_seconds;

/// Every family that [`node`] can give.
const FAMILIES: &[&Family] = &[
    &families::CONTROL_DAEMON_UP,
    &families::CONTROL_DAEMON_STATE,
    &families::CONTROL_DAEMON_INFO,
    &families::CONTROL_DAEMON_START_TIME,
    &families::DEFAULT_ACTIVE_THREAD,
    &families::PENDING_CLIENTS,
    &families::PENDING_CLIENT_OLDEST,
    &families::CLIENTS_REJECTED,
    &families::CLIENT_REJECTED_LAST,
    &families::TROUBLES,
    &families::TROUBLE_LAST,
    &families::SERVER_UP,
    &families::SERVER_STATE,
    &families::SERVER_CLIENTS,
    &families::SERVER_INFO,
    &families::SERVER_START_TIME,
    &families::SERVER_STARTS,
    &families::SERVER_START_LAST,
    &families::SERVER_EXITS,
    &families::SERVER_EXIT_LAST,
    &families::SERVER_FAULTS,
    &families::SERVER_FAULT_LAST,
    &families::FAULT_DOMAIN_INFO,
    &families::CLIENTS,
    &families::CLIENT_CONTEXTS,
    &families::CLIENT_CONTEXTS_LIMIT,
    &families::CLIENT_CONNECTS,
    &families::CLIENT_CONNECT_LAST,
    &families::CLIENT_DISCONNECTS,
    &families::CLIENT_DISCONNECT_LAST,
    &families::CLIENTS_LOST,
    &families::CLIENT_LOST_LAST,
    &families::BLAST_RADIUS_CLIENTS,
    &families::BLAST_RADIUS_WORKLOADS,
    &families::BLAST_RADIUS_MEMORY,
    &families::WORK_AT_RISK,
    &families::COUPLED_DEVICES,
    &families::BYPASSING_PROCESSES,
    &families::INCIDENTS,
    &families::INCIDENT_LAST,
    &families::MASS_CLIENT_LOSS,
    &families::MASS_CLIENT_LOSS_LAST,
    &families::MASS_CLIENT_LOSS_LAST_CLIENTS,
    &families::RECOVERY_BLOCKING_CLIENTS,
    &families::FAULT_START,
    &families::RECOVERY_DURATION,
    &families::GPU_UP,
    &families::GPU_COMPUTE_MODE,
    &families::GPU_RECOVERY_ACTION,
    &families::GPU_XID_ERRORS,
    &families::GPU_XID_LAST,
    &families::WORKLOAD_CLIENTS,
    &families::CHECKPOINT_LAST,
    &families::CLIENT_INFO,
    &families::CLIENT_MEMORY,
    &families::CLIENT_CONNECTED,
    &families::CLIENT_CHECKPOINT_LAST,
    &families::SOURCE_UP,
    &families::SOURCE_LAST_SUCCESS,
    &families::SOURCE_DISAGREEMENT,
    &families::BUILD_INFO,
    &families::SERIES_DROPPED,
    &families::SNAPSHOT_TIMESTAMP,
];

/// Collects the present snapshot.
pub struct NodeCollector {
    snapshots: Arc<ArcSwap<Snapshot>>,
    options: Arc<ArcSwap<Collectors>>,
    descriptions: Vec<Desc>,
}

impl NodeCollector {
    /// A collector of whatever `snapshots` holds when it is asked, as `options` then want it.
    pub fn new(snapshots: Arc<ArcSwap<Snapshot>>, options: Arc<ArcSwap<Collectors>>) -> NodeCollector {
        NodeCollector { snapshots, options, descriptions: descriptions(FAMILIES) }
    }
}

impl Collector for NodeCollector {
    fn desc(&self) -> Vec<&Desc> {
        self.descriptions.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        node(&self.snapshots.load(), &self.options.load())
    }
}

/// What a registry wants to know of each family beforehand.
pub(super) fn descriptions(families: &[&Family]) -> Vec<Desc> {
    families
        .iter()
        .map(|family| {
            let labels = family.label_names().map(str::to_owned).collect();
            Desc::new(
                family.name.to_owned(),
                family.help.to_owned(),
                labels,
                std::collections::HashMap::new(),
            )
            .expect("the table's names and labels are valid")
        })
        .collect()
}

/// The snapshot as metric families.
pub fn node(snapshot: &Snapshot, options: &Collectors) -> Vec<MetricFamily> {
    let mut page = Page::default();
    daemons::daemons(&mut page, snapshot);
    daemons::servers(&mut page, snapshot);
    domains::domains(&mut page, snapshot);
    devices::gpus(&mut page, snapshot);
    let workloads_dropped = workloads::workloads(&mut page, snapshot, options);
    let clients_dropped = workloads::clients(&mut page, snapshot, options);
    sources(&mut page, snapshot);
    page.family(&families::SNAPSHOT_TIMESTAMP, |series| series.value(&[], unix_seconds(snapshot.at)));
    page.family(&families::BUILD_INFO, |series| {
        series.value(&[env!("CARGO_PKG_VERSION"), option_env!("MPS_EXPORTER_REVISION").unwrap_or("")], 1.0);
    });
    let duplicates = page.duplicates();
    page.family(&families::SERIES_DROPPED, |series| {
        let dropped =
            [("clients", clients_dropped), ("workloads", workloads_dropped), ("duplicates", duplicates)];
        for (collector, count) in dropped {
            series.value(&[collector], count as f64);
        }
    });
    page.into_families()
}

fn sources(page: &mut Page, snapshot: &Snapshot) {
    page.family(&families::SOURCE_UP, |series| {
        for view in &snapshot.sources {
            series
                .value(&[view.source.label(), view.daemon.as_deref().unwrap_or_default()], flag(view.is_up));
        }
    });
    page.family(&families::SOURCE_LAST_SUCCESS, |series| {
        for view in &snapshot.sources {
            if let Some(at) = view.last_success {
                let daemon = view.daemon.as_deref().unwrap_or_default();
                series.value(&[view.source.label(), daemon], unix_seconds(at));
            }
        }
    });
    page.family(&families::SOURCE_DISAGREEMENT, |series| {
        for view in &snapshot.sources {
            let disagrees =
                snapshot.disagreements.iter().any(|it| it.source == view.source && it.daemon == view.daemon);
            series.value(&[view.source.label(), view.daemon.as_deref().unwrap_or_default()], flag(disagrees));
        }
    });
}

#[cfg(test)]
mod tests;
