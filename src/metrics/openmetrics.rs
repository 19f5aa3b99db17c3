//! OpenMetrics 1.0 over the `prometheus` crate's data model, which has no encoder for it.
//!
//! State sets are written as gauges: OpenMetrics wants a state set's label to be named like the family, and a label
//! must not change its name with the format that a scraper happens to negotiate.

use std::fmt::Write;

use prometheus::proto::{Histogram, LabelPair, Metric, MetricFamily, MetricType};

use crate::metrics::families::unit_of;

/// The last line of every page.
pub const END: &str = "# EOF\n";

/// OpenMetrics allows this many characters in an exemplar's label names and values together.
const MAX_EXEMPLAR_CHARACTERS: usize = 128;

/// An example of what a counter counted.
#[derive(Debug, Clone, PartialEq)]
pub struct Exemplar {
    /// Its label's name.
    pub label: &'static str,
    /// Its label's value.
    pub value: String,
    /// When it happened, in seconds since the Unix epoch.
    pub at: f64,
}

/// Appends `families`. `exemplar` gives the example of a counter's series, where there is one.
///
/// The caller appends [`END`] after the last family.
pub fn write(
    out: &mut String,
    families: &[MetricFamily],
    exemplar: impl Fn(&str, &[LabelPair]) -> Option<Exemplar>,
) {
    for family in families {
        let sample = family.name();
        let (name, kind) = match family.get_field_type() {
            MetricType::COUNTER => (sample.strip_suffix("_total").unwrap_or(sample), "counter"),
            MetricType::HISTOGRAM => (sample, "histogram"),
            MetricType::GAUGE => match sample.strip_suffix("_info") {
                Some(name) => (name, "info"),
                None => (sample, "gauge"),
            },
            MetricType::SUMMARY | MetricType::UNTYPED => continue,
        };
        push(out, format_args!("# TYPE {name} {kind}\n"));
        if let Some(unit) = unit_of(sample) {
            push(out, format_args!("# UNIT {name} {unit}\n"));
        }
        out.push_str("# HELP ");
        out.push_str(name);
        out.push(' ');
        escape(out, family.help());
        out.push('\n');
        for metric in family.get_metric() {
            match family.get_field_type() {
                MetricType::HISTOGRAM => histogram(out, name, metric, metric.get_histogram()),
                MetricType::COUNTER => {
                    let labels = metric.get_label();
                    counter(out, name, labels, metric.get_counter().get_value(), exemplar(sample, labels));
                }
                _ => {
                    series(out, sample, "", metric.get_label(), None);
                    number(out, metric.get_gauge().get_value());
                    out.push('\n');
                }
            }
        }
    }
}

fn counter(out: &mut String, name: &str, labels: &[LabelPair], value: f64, exemplar: Option<Exemplar>) {
    series(out, name, "_total", labels, None);
    number(out, value);
    if let Some(exemplar) = exemplar {
        let characters = exemplar.label.chars().count() + exemplar.value.chars().count();
        if characters <= MAX_EXEMPLAR_CHARACTERS {
            push(out, format_args!(" # {{{}=\"", exemplar.label));
            escape(out, &exemplar.value);
            out.push_str("\"} 1 ");
            number(out, exemplar.at);
        }
    }
    out.push('\n');
}

fn histogram(out: &mut String, name: &str, metric: &Metric, histogram: &Histogram) {
    let labels = metric.get_label();
    let mut line = |suffix: &str, le: Option<f64>, value: f64| {
        series(out, name, suffix, labels, le);
        number(out, value);
        out.push('\n');
    };
    let finite = histogram.get_bucket().iter().filter(|bucket| bucket.upper_bound() != f64::INFINITY);
    for bucket in finite {
        line("_bucket", Some(bucket.upper_bound()), bucket.cumulative_count() as f64);
    }
    let count = histogram.get_sample_count() as f64;
    line("_bucket", Some(f64::INFINITY), count);
    line("_count", None, count);
    line("_sum", None, histogram.get_sample_sum());
}

/// A sample's name and labels, and the blank before its value.
fn series(out: &mut String, name: &str, suffix: &str, labels: &[LabelPair], le: Option<f64>) {
    out.push_str(name);
    out.push_str(suffix);
    let mut before = '{';
    for label in labels {
        out.push(before);
        before = ',';
        out.push_str(label.name());
        out.push_str("=\"");
        escape(out, label.value());
        out.push('"');
    }
    if let Some(bound) = le {
        out.push(before);
        before = ',';
        out.push_str("le=\"");
        number(out, bound);
        // OpenMetrics wants a bound to look like a float.
        if bound.is_finite() && bound.fract() == 0.0 {
            out.push_str(".0");
        }
        out.push('"');
    }
    if before == ',' {
        out.push('}');
    }
    out.push(' ');
}

fn number(out: &mut String, value: f64) {
    if value == f64::INFINITY {
        out.push_str("+Inf");
    } else if value == f64::NEG_INFINITY {
        out.push_str("-Inf");
    } else if value.is_finite() && (value.abs() >= 1e16 || (value != 0.0 && value.abs() < 1e-6)) {
        push(out, format_args!("{value:e}"));
    } else {
        push(out, format_args!("{value}"));
    }
}

fn escape(out: &mut String, text: &str) {
    if !text.bytes().any(|byte| matches!(byte, b'\\' | b'\n' | b'"')) {
        out.push_str(text);
        return;
    }
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '"' => out.push_str("\\\""),
            other => out.push(other),
        }
    }
}

fn push(out: &mut String, arguments: std::fmt::Arguments<'_>) {
    out.write_fmt(arguments).expect("writing to a String cannot fail");
}

#[cfg(test)]
#[path = "../../tests/support/open_metrics.rs"]
pub(crate) mod strict;
#[cfg(test)]
mod tests;
