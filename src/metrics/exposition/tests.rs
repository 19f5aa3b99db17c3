use std::io::Read as _;

use super::*;
use crate::engine::incident::Cause;
use crate::metrics::openmetrics::strict;
use crate::test_nodes as nodes;

fn exposition(snapshot: Snapshot) -> (Exposition, Arc<ArcSwap<Snapshot>>, Telemetry) {
    let snapshots = Arc::new(ArcSwap::from_pointee(snapshot));
    let telemetry = Telemetry::new();
    let collectors = ArcSwap::from_pointee(Collectors { clients: true, ..Collectors::default() });
    (Exposition::new(snapshots.clone(), telemetry.clone(), Arc::new(collectors)), snapshots, telemetry)
}

fn text(page: &Bytes) -> &str {
    std::str::from_utf8(page).expect("pages are UTF-8")
}

#[test]
fn open_metrics_is_strict_in_every_state() {
    for snapshot in [nodes::empty(), nodes::node(8, 48), nodes::extreme()] {
        let (exposition, snapshots, telemetry) = exposition(snapshot);
        for daemon in &snapshots.load().daemons {
            telemetry.log_lag(&daemon.name, crate::event::LogFile::Server, 1);
        }
        let page = exposition.page(Format::OpenMetrics, Encoding::Identity);
        let families = strict::parse(text(&page)).unwrap_or_else(|error| panic!("{error}"));
        let daemons = |name: &str| -> Vec<String> {
            let family = families.iter().find(|family| family.name == name);
            let samples = family.map_or(&[][..], |family| &family.samples);
            let mut daemons: Vec<String> = samples.iter().map(|sample| sample.labels[0].1.clone()).collect();
            daemons.sort();
            daemons
        };
        assert_eq!(
            daemons("mps_control_daemon"),
            daemons("mps_log_lag_bytes"),
            "the label is the same everywhere"
        );
        assert!(families.iter().any(|family| family.name == "process_cpu_seconds"));
        assert!(families.iter().all(|family| !family.help.is_empty()));
    }
}

#[test]
fn the_incident_counter_names_the_last_incident() {
    let (exposition, ..) = exposition(nodes::node(1, 2));
    let page = exposition.page(Format::OpenMetrics, Encoding::Identity);
    let families = strict::parse(text(&page)).unwrap();
    let incidents = families.iter().find(|family| family.name == "mps_incidents").unwrap();
    for sample in &incidents.samples {
        let is_fault = sample.labels.contains(&("cause".into(), "fault".into()));
        let id = sample.exemplar.as_ref().map(|(labels, ..)| labels[0].clone());
        assert_eq!(id, is_fault.then(|| ("incident_id".into(), "0195f0000001-1".into())));
    }
}

#[test]
fn the_last_incident_is_named_where_it_was_counted() {
    let mut snapshot = nodes::node(1, 2);
    for incident in &mut snapshot.incidents {
        std::sync::Arc::make_mut(incident).cause = Cause::Gpu;
    }
    let (exposition, ..) = exposition(snapshot);
    let page = exposition.page(Format::OpenMetrics, Encoding::Identity);
    let families = strict::parse(text(&page)).unwrap();
    let incidents = families.iter().find(|family| family.name == "mps_incidents").unwrap();
    let named = incidents.samples.iter().filter(|sample| sample.exemplar.is_some());
    let causes: Vec<_> =
        named.flat_map(|sample| &sample.labels).filter(|(name, _)| name == "cause").collect();
    assert_eq!(causes, [&("cause".to_owned(), "fault".to_owned())]);
}

#[test]
fn other_collectors_hold_from_the_next_scrape_on() {
    let (exposition, ..) = exposition(nodes::node(1, 2));
    let has_clients =
        || text(&exposition.page(Format::Text, Encoding::Identity)).contains("mps_client_info{");
    assert!(has_clients());
    exposition.collectors.store(Arc::new(Collectors::default()));
    assert!(!has_clients());
}

#[test]
fn both_formats_have_the_same_series() {
    let (exposition, ..) = exposition(nodes::extreme());
    let open_metrics = exposition.page(Format::OpenMetrics, Encoding::Identity);
    let plain = exposition.page(Format::Text, Encoding::Identity);
    let series = |page: &Bytes| -> Vec<String> {
        let mut series: Vec<String> = text(page)
            .lines()
            .filter(|line| !line.starts_with('#'))
            .map(|line| {
                let line = line.split(" # {").next().unwrap();
                let (series, _) = line.rsplit_once(' ').unwrap();
                series.replace(".0\"}", "\"}")
            })
            .collect();
        series.sort();
        series
    };
    assert_eq!(series(&open_metrics), series(&plain));
}

#[test]
fn a_page_is_rendered_once_per_change() {
    let (exposition, snapshots, telemetry) = exposition(nodes::node(1, 2));
    let first = exposition.page(Format::Text, Encoding::Identity);
    let again = exposition.page(Format::Text, Encoding::Identity);
    assert_eq!(first.as_ptr(), again.as_ptr(), "the bytes are shared");
    telemetry.kmsg_lost(7);
    let after_telemetry = exposition.page(Format::Text, Encoding::Identity);
    assert!(text(&after_telemetry).contains("\nmps_kmsg_records_lost_total 7\n"));
    let mut changed = nodes::node(1, 3);
    changed.generation = 2;
    snapshots.store(Arc::new(changed));
    let after_snapshot = exposition.page(Format::Text, Encoding::Identity);
    assert!(text(&after_snapshot).contains("mps_server_clients{daemon=\"default\",server=\"uid_1000\"} 3\n"));
}

#[test]
fn only_the_part_that_changed_is_rendered_again() {
    let (exposition, snapshots, telemetry) = exposition(nodes::node(1, 2));
    let first = exposition.rendered(Format::Text);
    // The same generation with other content would show if the node were rendered again.
    snapshots.store(Arc::new(Snapshot { generation: 1, ..nodes::empty() }));
    telemetry.kmsg_lost(7);
    let counted = exposition.rendered(Format::Text);
    assert_eq!(first.part(0..first.node_end), counted.part(0..counted.node_end));
    assert!(counted.part(counted.node_end..counted.work_end).contains("\nmps_kmsg_records_lost_total 7\n"));
    assert_eq!(
        first.part(first.work_end..first.process_end),
        counted.part(counted.work_end..counted.process_end)
    );
    assert_eq!(first.process_at, counted.process_at);

    let aged = Arc::new(Rendered {
        generation: counted.generation,
        collectors: counted.collectors.clone(),
        version: counted.version,
        process_at: Instant::now().checked_sub(MAX_AGE).expect("the machine has been up for a second"),
        page: counted.page.clone(),
        node_end: counted.node_end,
        work_end: counted.work_end,
        process_end: counted.process_end,
        gzip: OnceLock::new(),
    });
    exposition.text.store(Some(aged));
    let renewed = exposition.rendered(Format::Text);
    assert_ne!(counted.page.as_ptr(), renewed.page.as_ptr());
    assert_eq!(counted.part(0..counted.work_end), renewed.part(0..renewed.work_end));
    assert!(renewed.process_at >= counted.process_at);
    assert!(renewed.part(renewed.work_end..renewed.process_end).contains("process_resident_memory_bytes"));
}

#[test]
fn gzip_holds_the_same_page() {
    let (exposition, ..) = exposition(nodes::node(8, 48));
    let plain = exposition.page(Format::Text, Encoding::Identity);
    let packed = exposition.page(Format::Text, Encoding::Gzip);
    let mut unpacked = Vec::new();
    flate2::read::GzDecoder::new(&*packed).read_to_end(&mut unpacked).unwrap();
    assert_eq!(plain, unpacked);
    assert!(packed.len() * 5 < plain.len(), "{} of {}", packed.len(), plain.len());
}
