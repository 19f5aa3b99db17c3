// Values are written and read, never computed: they are equal or wrong.
#![allow(clippy::float_cmp)]

use prometheus::proto::{Bucket, Counter, Gauge};
use proptest::prelude::*;

use super::strict::{Sample, parse};
use super::*;

fn labels(pairs: &[(String, String)]) -> Vec<LabelPair> {
    pairs
        .iter()
        .map(|(name, value)| {
            let mut pair = LabelPair::default();
            pair.set_name(name.clone());
            pair.set_value(value.clone());
            pair
        })
        .collect()
}

fn family(name: &str, help: &str, kind: MetricType, metrics: Vec<Metric>) -> MetricFamily {
    let mut family = MetricFamily::default();
    family.set_name(name.into());
    family.set_help(help.into());
    family.set_field_type(kind);
    family.set_metric(metrics);
    family
}

fn gauge_series(pairs: &[(String, String)], value: f64) -> Metric {
    let mut gauge = Gauge::default();
    gauge.set_value(value);
    let mut metric = Metric::from_label(labels(pairs));
    metric.set_gauge(gauge);
    metric
}

fn counter_series(pairs: &[(String, String)], value: f64) -> Metric {
    let mut counter = Counter::default();
    counter.set_value(value);
    let mut metric = Metric::from_label(labels(pairs));
    metric.set_counter(counter);
    metric
}

fn page(families: &[MetricFamily]) -> String {
    let mut out = String::new();
    write(&mut out, families, |_, _| None);
    out + END
}

#[test]
fn each_type_is_written_as_the_specification_wants() {
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let mut bucket = Bucket::default();
    bucket.set_upper_bound(1.0);
    bucket.set_cumulative_count(2);
    let mut histogram = Histogram::default();
    histogram.set_bucket(vec![bucket]);
    histogram.set_sample_count(3);
    histogram.set_sample_sum(9.5);
    let mut histogram_series = Metric::from_label(labels(&[pair("d", "x")]));
    histogram_series.set_histogram(histogram);
    let families = [
        family("a_info", "An \"info\".", MetricType::GAUGE, vec![gauge_series(&[pair("v", "1\n2\\")], 1.0)]),
        family("b_seconds", "Back\\slash.", MetricType::GAUGE, vec![gauge_series(&[], f64::INFINITY)]),
        family("c_total", "Count.", MetricType::COUNTER, vec![counter_series(&[pair("x", "y")], 3.0)]),
        family("d_bytes", "Sizes.", MetricType::HISTOGRAM, vec![histogram_series]),
    ];
    let mut out = String::new();
    write(&mut out, &families, |name, _| {
        (name == "c_total").then(|| Exemplar { label: "incident_id", value: "i-1".into(), at: 1.5 })
    });
    let expected = r#"# TYPE a info
# HELP a An \"info\".
a_info{v="1\n2\\"} 1
# TYPE b_seconds gauge
# UNIT b_seconds seconds
# HELP b_seconds Back\\slash.
b_seconds +Inf
# TYPE c counter
# HELP c Count.
c_total{x="y"} 3 # {incident_id="i-1"} 1 1.5
# TYPE d_bytes histogram
# UNIT d_bytes bytes
# HELP d_bytes Sizes.
d_bytes_bucket{d="x",le="1.0"} 2
d_bytes_bucket{d="x",le="+Inf"} 3
d_bytes_count{d="x"} 3
d_bytes_sum{d="x"} 9.5
"#;
    assert_eq!(out, expected);
    parse(&(out + END)).unwrap();
}

#[test]
fn an_exemplar_that_is_too_long_is_left_out() {
    let families = [family("c_total", "Count.", MetricType::COUNTER, vec![counter_series(&[], 1.0)])];
    let mut out = String::new();
    write(&mut out, &families, |_, _| {
        Some(Exemplar { label: "incident_id", value: "x".repeat(118), at: 0.0 })
    });
    assert!(out.ends_with("c_total 1\n"), "{out}");
}

#[test]
fn the_strict_parser_refuses_what_is_forbidden() {
    let pages = [
        ("a 1\n", "no end"),
        ("# TYPE a gauge\na 1\n# EOF\n# EOF\n", "text after the end"),
        ("# TYPE a gauge\na 1\n\n# EOF\n", "empty line"),
        ("# TYPE a gauge\r\na 1\n# EOF\n", "carriage return"),
        ("# TYPE a counter\na 1\n# EOF\n", "counter without suffix"),
        ("# TYPE a_total counter\na_total 1\n# EOF\n", "suffix in the family's name"),
        ("# TYPE a counter\na_total -1\n# EOF\n", "negative counter"),
        ("# TYPE a gauge\na{x=\"1\",x=\"2\"} 1\n# EOF\n", "label twice"),
        ("# TYPE a gauge\na{x=\"1\",} 1\n# EOF\n", "comma at the end"),
        ("# TYPE a gauge\na{x=\"\\t\"} 1\n# EOF\n", "unknown escape"),
        ("# TYPE a gauge\na{x=\"1\"} 1\na{x=\"1\"} 2\n# EOF\n", "series twice"),
        ("# TYPE a gauge\na 1\n# TYPE b gauge\nb 1\n# TYPE a gauge\n# EOF\n", "interleaved"),
        ("# TYPE a gauge\na 1\n# HELP a Late.\n# EOF\n", "metadata after samples"),
        ("# TYPE a gauge\n# TYPE a gauge\na 1\n# EOF\n", "metadata twice"),
        ("# TYPE a gauge\n# UNIT a seconds\na 1\n# EOF\n", "unit not in the name"),
        ("# TYPE a info\na_info 2\n# EOF\n", "info that is not 1"),
        ("# TYPE a stateset\na{state=\"x\"} 1\n# EOF\n", "state set with another label"),
        ("# TYPE a gauge\na inf\n# EOF\n", "infinity in lower case"),
        ("# TYPE a gauge\na  1\n# EOF\n", "two blanks"),
        ("# TYPE a gauge\na 1 # {x=\"1\"} 1\n# EOF\n", "exemplar on a gauge"),
        (
            "# TYPE h histogram\nh_bucket{le=\"1\"} 0\nh_bucket{le=\"+Inf\"} 0\nh_count 0\nh_sum 0\n# EOF\n",
            "integer le",
        ),
        ("# TYPE h histogram\nh_bucket{le=\"1.0\"} 0\nh_count 0\nh_sum 0\n# EOF\n", "no +Inf"),
        (
            "# TYPE h histogram\nh_bucket{le=\"1.0\"} 2\nh_bucket{le=\"+Inf\"} 1\nh_count 1\nh_sum 0\n# EOF\n",
            "falling",
        ),
        ("# TYPE a counter\na_total 1\n# TYPE a_total gauge\na_total 1\n# EOF\n", "clash"),
        ("a 1\n# EOF\n", "sample without type"),
    ];
    for (page, what) in pages {
        assert!(parse(page).is_err(), "{what} was taken:\n{page}");
    }
    assert_eq!(parse("# EOF\n"), Ok(Vec::new()));
}

fn pairs() -> impl Strategy<Value = Vec<(String, String)>> {
    proptest::collection::btree_map("[a-zA-Z_][a-zA-Z0-9_]{0,8}", any::<String>(), 0..4)
        .prop_map(|map| map.into_iter().filter(|(name, _)| name != "le").collect())
}

proptest! {
    #[test]
    fn whatever_is_written_is_read_back(
        help in any::<String>(),
        series in proptest::collection::btree_map(pairs(), any::<f64>(), 1..8),
        is_counter in any::<bool>(),
    ) {
        // Line ends other than \n are sanitised before they get here.
        let clean = |text: &str| text.replace('\r', "");
        let series: std::collections::BTreeMap<Vec<(String, String)>, f64> = series
            .into_iter()
            .map(|(pairs, value)| {
                let pairs = pairs.into_iter().map(|(name, text)| (name, clean(&text))).collect();
                (pairs, if is_counter { value.abs().max(0.0) } else { value })
            })
            .collect();
        let help = format!("{}.", clean(&help));
        let (name, kind) = if is_counter {
            ("mps_x_total", MetricType::COUNTER)
        } else {
            ("mps_x", MetricType::GAUGE)
        };
        let made = series
            .iter()
            .map(|(pairs, value)| {
                if is_counter { counter_series(pairs, *value) } else { gauge_series(pairs, *value) }
            })
            .collect();
        let parsed = parse(&page(&[family(name, &help, kind, made)])).map_err(TestCaseError::fail)?;
        prop_assert_eq!(parsed.len(), 1);
        prop_assert_eq!(&parsed[0].help, &help);
        prop_assert_eq!(parsed[0].samples.len(), series.len());
        for (Sample { name: read, labels, value, .. }, (pairs, expected)) in parsed[0].samples.iter().zip(&series) {
            prop_assert_eq!(read, name);
            prop_assert_eq!(labels, pairs);
            prop_assert!(value == expected || (value.is_nan() && expected.is_nan()), "{} {}", value, expected);
        }
    }
}
