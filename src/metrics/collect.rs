//! The collector over the model's snapshot. It exports what is known: an unknown value is an absent series, never 0.

mod daemons;
mod devices;
mod domains;
mod incidents;
mod workloads;

use prometheus::proto::MetricFamily;

use crate::config::Collectors;
use crate::engine::snapshot::Snapshot;
use crate::metrics::families;
use crate::metrics::labels::LabelValue;
use crate::metrics::series::{Page, flag};
use crate::time::unix_seconds;

/// The snapshot as metric families.
pub fn node(snapshot: &Snapshot, options: &Collectors) -> Vec<MetricFamily> {
    let mut page = Page::default();
    daemons::daemons(&mut page, snapshot);
    daemons::servers(&mut page, snapshot);
    domains::domains(&mut page, snapshot);
    let victims_dropped = incidents::incidents(&mut page, snapshot, options);
    devices::gpus(&mut page, snapshot);
    let workloads_dropped = workloads::workloads(&mut page, snapshot, options) + victims_dropped;
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
