//! Builds [`MetricFamily`] values that follow the table of families.

use prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType};

use crate::engine::snapshot::{self, Count, DomainLabels};
use crate::metrics::families::{DOMAIN_LABELS, Family, Kind};
use crate::metrics::labels::{LabelValue, sanitized};
use crate::time::unix_seconds;

/// The families of one collection.
#[derive(Debug, Default)]
pub struct Page {
    families: Vec<MetricFamily>,
    duplicates: usize,
}

impl Page {
    /// Adds the series that `fill` gives to `family`. A family without series is left out.
    pub fn family(&mut self, family: &'static Family, fill: impl FnOnce(&mut Series)) {
        let mut series = Series { family, metrics: Vec::new() };
        fill(&mut series);
        let mut metrics = series.metrics;
        if metrics.is_empty() {
            return;
        }
        // A page with a series twice is refused as a whole by some scrapers: one of the two must go.
        metrics.sort_by(|one, other| label_values(one).cmp(label_values(other)));
        let before = metrics.len();
        metrics.dedup_by(|one, other| label_values(one).eq(label_values(other)));
        self.duplicates += before - metrics.len();

        let mut made = MetricFamily::default();
        made.set_name(family.name.to_owned());
        made.set_help(family.help.to_owned());
        made.set_field_type(match family.kind {
            Kind::Counter => MetricType::COUNTER,
            Kind::Histogram => MetricType::HISTOGRAM,
            Kind::Gauge | Kind::Info | Kind::StateSet => MetricType::GAUGE,
        });
        made.set_metric(metrics);
        self.families.push(made);
    }

    /// How many series were left out because they repeat another.
    pub fn duplicates(&self) -> usize {
        self.duplicates
    }

    /// What was added.
    pub fn into_families(self) -> Vec<MetricFamily> {
        self.families
    }
}

fn label_values(metric: &Metric) -> impl Iterator<Item = &str> {
    metric.get_label().iter().map(LabelPair::value)
}

/// The series of one family.
#[derive(Debug)]
pub struct Series {
    family: &'static Family,
    metrics: Vec<Metric>,
}

impl Series {
    /// A sample with the family's own labels.
    pub fn value(&mut self, labels: &[&str], value: f64) {
        self.push(None, labels, value);
    }

    /// A sample of a fault domain.
    pub fn domain(&mut self, domain: &DomainLabels, labels: &[&str], value: f64) {
        self.push(Some(domain), labels, value);
    }

    /// A state set whose last label takes every value of `T`; all 0 never happens, so call it only when one holds.
    pub fn states<T: LabelValue>(&mut self, labels: &[&str], states: &[T], holds: T) {
        let mut all = labels.to_vec();
        all.push("");
        for state in states {
            *all.last_mut().expect("a label was pushed") = state.label();
            self.value(&all, flag(*state == holds));
        }
    }

    /// A histogram of a fault domain.
    pub fn histogram(&mut self, domain: &DomainLabels, labels: &[&str], histogram: &snapshot::Histogram) {
        let mut cumulative = 0;
        let mut buckets = Vec::with_capacity(histogram.bounds.len());
        for (bound, count) in histogram.bounds.iter().zip(&histogram.counts) {
            cumulative += count;
            let mut bucket = Bucket::default();
            bucket.set_upper_bound(*bound);
            bucket.set_cumulative_count(cumulative);
            buckets.push(bucket);
        }
        let mut made = Histogram::default();
        made.set_sample_count(histogram.counts.iter().sum());
        made.set_sample_sum(histogram.sum);
        made.set_bucket(buckets);
        let mut metric = Metric::from_label(self.labels(Some(domain), labels));
        metric.set_histogram(made);
        self.metrics.push(metric);
    }

    fn push(&mut self, domain: Option<&DomainLabels>, labels: &[&str], value: f64) {
        let mut metric = Metric::from_label(self.labels(domain, labels));
        if self.family.kind == Kind::Counter {
            let mut counter = Counter::default();
            counter.set_value(value);
            metric.set_counter(counter);
        } else {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            metric.set_gauge(gauge);
        }
        self.metrics.push(metric);
    }

    fn labels(&self, domain: Option<&DomainLabels>, own: &[&str]) -> Vec<LabelPair> {
        debug_assert_eq!(self.family.is_per_domain, domain.is_some(), "{}", self.family.name);
        debug_assert_eq!(self.family.labels.len(), own.len(), "{}", self.family.name);
        let mut pairs = Vec::with_capacity(DOMAIN_LABELS.len() + own.len());
        if let Some(domain) = domain {
            let values = [&domain.fault_domain, &domain.gpu, &domain.uuid, &domain.gpu_instance];
            pairs.extend(DOMAIN_LABELS.iter().zip(values).map(|(name, value)| pair(name, value)));
        }
        pairs.extend(self.family.labels.iter().zip(own).map(|(name, value)| pair(name, value)));
        pairs
    }
}

fn pair(name: &str, value: &str) -> LabelPair {
    let mut pair = LabelPair::default();
    pair.set_name(name.to_owned());
    pair.set_value(sanitized(value).into_owned());
    pair
}

/// 1 for true.
pub fn flag(is_set: bool) -> f64 {
    f64::from(u8::from(is_set))
}

/// A counter's value.
pub fn total(count: &Count) -> f64 {
    count.total as f64
}

/// A counter's last time, in seconds since the Unix epoch.
pub fn last(count: &Count) -> Option<f64> {
    count.last.map(unix_seconds)
}
