//! Renders `/metrics` once per change and lets every scrape share the bytes.

use std::borrow::Cow;
use std::io::Write as _;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use prometheus::TextEncoder;
use prometheus::proto::{LabelPair, MetricFamily};
use tracing::warn;

use crate::config::Collectors;
use crate::engine::snapshot::Snapshot;
use crate::metrics::collect;
use crate::metrics::families;
use crate::metrics::labels::{LabelValue, sanitized};
use crate::metrics::negotiate::{Encoding, Format};
use crate::metrics::openmetrics::{self, Exemplar};
use crate::metrics::process::ProcessCollector;
use crate::telemetry::Telemetry;
use crate::time::unix_seconds;

/// How old the `process_*` values on a page may be. Everything else is as new as the snapshot.
const MAX_AGE: Duration = Duration::from_secs(1);

/// The page at `/metrics`. It never waits for a source.
pub struct Exposition {
    snapshots: Arc<ArcSwap<Snapshot>>,
    telemetry: Telemetry,
    collectors: Arc<ArcSwap<Collectors>>,
    process: ProcessCollector,
    text: ArcSwapOption<Rendered>,
    open_metrics: ArcSwapOption<Rendered>,
}

/// A page in one format: the node's families, those of our own work, those of our process.
struct Rendered {
    /// The snapshot's generation.
    generation: u64,
    /// Which optional series it has.
    collectors: Arc<Collectors>,
    /// The telemetry's version.
    version: u64,
    /// When our process was looked at.
    process_at: Instant,
    page: Bytes,
    /// Where the node's families end.
    node_end: usize,
    /// Where the families of our own work end.
    work_end: usize,
    /// Where the families of our process end.
    process_end: usize,
    gzip: OnceLock<Bytes>,
}

impl Rendered {
    fn part(&self, range: Range<usize>) -> &str {
        std::str::from_utf8(&self.page[range]).expect("a page is text, and its parts are whole lines")
    }
}

impl Exposition {
    /// A page of whatever `snapshots`, `telemetry` and `collectors` hold when it is asked for.
    pub fn new(
        snapshots: Arc<ArcSwap<Snapshot>>,
        telemetry: Telemetry,
        collectors: Arc<ArcSwap<Collectors>>,
    ) -> Exposition {
        Exposition {
            snapshots,
            telemetry,
            collectors,
            process: ProcessCollector::default(),
            text: ArcSwapOption::empty(),
            open_metrics: ArcSwapOption::empty(),
        }
    }

    /// The page.
    pub fn page(&self, format: Format, encoding: Encoding) -> Bytes {
        let rendered = self.rendered(format);
        match encoding {
            Encoding::Identity => rendered.page.clone(),
            Encoding::Gzip => rendered.gzip.get_or_init(|| gzip(&rendered.page)).clone(),
        }
    }

    fn rendered(&self, format: Format) -> Arc<Rendered> {
        let slot = match format {
            Format::Text => &self.text,
            Format::OpenMetrics => &self.open_metrics,
        };
        let previous = slot.load_full();
        let snapshot = self.snapshots.load_full();
        let collectors = self.collectors.load_full();
        // Taken before the data: a change in between makes the page newer than it says, never older.
        let version = self.telemetry.version();
        let mut page =
            String::with_capacity(previous.as_ref().map_or(0, |previous| previous.page.len() + 1024));
        match &previous {
            Some(previous)
                if previous.generation == snapshot.generation
                    && Arc::ptr_eq(&previous.collectors, &collectors) =>
            {
                if previous.version == version && previous.process_at.elapsed() < MAX_AGE {
                    return previous.clone();
                }
                page.push_str(previous.part(0..previous.node_end));
            }
            _ => write(&mut page, format, &snapshot, &collect::node(&snapshot, &collectors)),
        }
        let node_end = page.len();
        match &previous {
            Some(previous) if previous.version == version => {
                page.push_str(previous.part(previous.node_end..previous.work_end));
            }
            _ => {
                let mut work = self.telemetry.registry().gather();
                sanitize(&mut work);
                write(&mut page, format, &snapshot, &work);
            }
        }
        let work_end = page.len();
        let process_at = match &previous {
            Some(previous) if previous.process_at.elapsed() < MAX_AGE => {
                page.push_str(previous.part(previous.work_end..previous.process_end));
                previous.process_at
            }
            _ => {
                write(&mut page, format, &snapshot, &self.process.collect());
                Instant::now()
            }
        };
        let process_end = page.len();
        if format == Format::OpenMetrics {
            page.push_str(openmetrics::END);
        }
        let rendered = Arc::new(Rendered {
            generation: snapshot.generation,
            collectors,
            version,
            process_at,
            page: page.into(),
            node_end,
            work_end,
            process_end,
            gzip: OnceLock::new(),
        });
        slot.store(Some(rendered.clone()));
        rendered
    }
}

fn write(page: &mut String, format: Format, snapshot: &Snapshot, families: &[MetricFamily]) {
    match format {
        Format::OpenMetrics => {
            openmetrics::write(page, families, |name, labels| incident_exemplar(snapshot, name, labels));
        }
        Format::Text => {
            for family in families {
                let before = page.len();
                if let Err(error) = TextEncoder::new().encode_utf8(std::slice::from_ref(family), page) {
                    page.truncate(before);
                    warn!(family = family.name(), %error, "A metric family cannot be written and is left out.");
                }
            }
        }
    }
}

/// Makes the labels of our own counters say the same as those of the snapshot's series.
fn sanitize(families: &mut [MetricFamily]) {
    for metric in families.iter_mut().flat_map(MetricFamily::mut_metric) {
        for pair in metric.mut_label() {
            if let Cow::Owned(changed) = sanitized(pair.value()) {
                pair.set_value(changed);
            }
        }
    }
}

/// The last incident of a series of `mps_incidents_total`.
fn incident_exemplar(snapshot: &Snapshot, name: &str, labels: &[LabelPair]) -> Option<Exemplar> {
    if name != families::INCIDENTS.name {
        return None;
    }
    let label = |name| labels.iter().find(|label| label.name() == name).map(LabelPair::value);
    let (domain, cause) = (label("fault_domain")?, label("cause")?);
    let domain = snapshot.domains.iter().find(|it| &*it.labels.fault_domain == domain)?;
    let (cause, id) = domain.last_incidents.iter().find(|(it, _)| it.label() == cause)?;
    let (_, count) = domain.incidents.iter().find(|(it, count)| it == cause && count.total > 0)?;
    Some(Exemplar { label: "incident_id", value: id.to_string(), at: unix_seconds(count.last?) })
}

/// The page, compressed fast rather than well.
pub(crate) fn gzip(page: &[u8]) -> Bytes {
    let mut encoder = GzEncoder::new(Vec::with_capacity(page.len() / 8), Compression::fast());
    encoder.write_all(page).and_then(|()| encoder.finish()).expect("writing to memory cannot fail").into()
}

#[cfg(test)]
mod tests;
