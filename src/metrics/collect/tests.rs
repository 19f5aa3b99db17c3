// Values are written and read, never computed: they are equal or wrong.
#![allow(clippy::float_cmp)]

use std::collections::BTreeMap;
use std::sync::Arc;

use prometheus::proto::{LabelPair, MetricFamily, MetricType};

use super::*;
use crate::engine::incident::Cause;
use crate::engine::snapshot::{ClientState, DaemonState, ServerView};
use crate::metrics::families::{Family, Kind, all};
use crate::test_nodes as nodes;

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
    &families::INCIDENT_LAST_CULPRIT,
    &families::INCIDENT_LAST_VICTIMS,
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

fn collected(snapshot: &Snapshot, options: &Collectors) -> BTreeMap<String, Vec<(Vec<String>, f64)>> {
    node(snapshot, options)
        .into_iter()
        .map(|family| {
            let samples = family.get_metric().iter().map(|metric| {
                let labels = metric.get_label().iter().map(|pair| pair.value().to_owned()).collect();
                let value = match family.get_field_type() {
                    MetricType::COUNTER => metric.get_counter().get_value(),
                    MetricType::HISTOGRAM => metric.get_histogram().get_sample_count() as f64,
                    _ => metric.get_gauge().get_value(),
                };
                (labels, value)
            });
            (family.name().to_owned(), samples.collect())
        })
        .collect()
}

fn value(page: &BTreeMap<String, Vec<(Vec<String>, f64)>>, name: &str, labels: &[&str]) -> Option<f64> {
    page.get(name)?.iter().find(|(values, _)| values == labels).map(|(_, value)| *value)
}

fn everything() -> Collectors {
    Collectors { clients: true, ..Collectors::default() }
}

#[test]
fn series_follow_the_table() {
    for snapshot in [nodes::empty(), nodes::node(2, 3), nodes::extreme()] {
        for family in node(&snapshot, &everything()) {
            let declared = families::named(family.name()).expect("a family that is not in the table");
            assert!(FAMILIES.contains(&declared), "{} is not in the list", declared.name);
            let expected = match declared.kind {
                Kind::Counter => MetricType::COUNTER,
                Kind::Histogram => MetricType::HISTOGRAM,
                Kind::Gauge | Kind::Info | Kind::StateSet => MetricType::GAUGE,
            };
            assert_eq!(family.get_field_type(), expected, "{}", declared.name);
            let mut seen = std::collections::BTreeSet::new();
            for metric in family.get_metric() {
                let names: Vec<&str> = metric.get_label().iter().map(LabelPair::name).collect();
                assert_eq!(names, declared.label_names().collect::<Vec<_>>(), "{}", declared.name);
                let values: Vec<&str> = metric.get_label().iter().map(LabelPair::value).collect();
                assert!(seen.insert(values.join("\u{0}")), "{} {values:?} twice", declared.name);
            }
        }
    }
}

#[test]
fn every_family_of_the_table_is_somebodys() {
    let telemetry = crate::telemetry::Telemetry::new();
    telemetry.control_query("default", crate::telemetry::QueryResult::Ok, std::time::Duration::ZERO);
    telemetry.log_read("default", crate::event::LogFile::Control, 1, 1, 1);
    telemetry.log_lag("default", crate::event::LogFile::Control, 1);
    telemetry.log_discontinuity("default", crate::event::LogFile::Control, "truncated");
    telemetry.source_error("nvml", "timeout");
    telemetry.alert_sent("http://127.0.0.1", "ok");
    telemetry.alerts_dropped("http://127.0.0.1", 1);
    telemetry.hook_run("recovered", "ok");
    telemetry.daemon_restart("default", "ok");
    telemetry.config_reload(true);
    telemetry.task_restart("model");
    let process = crate::metrics::process::ProcessCollector::default().collect();
    let known: Vec<String> = FAMILIES
        .iter()
        .map(|family| family.name.to_owned())
        .chain(telemetry.registry().gather().iter().map(|family| family.name().to_owned()))
        .chain(process.iter().map(|family| family.name().to_owned()))
        .collect();
    for family in all() {
        assert_eq!(known.iter().filter(|name| *name == family.name).count(), 1, "{}", family.name);
    }
    assert_eq!(known.len(), all().count());
}

#[test]
fn an_extreme_node_gives_every_family_of_the_collector() {
    let mut snapshot = nodes::extreme();
    snapshot.daemons[0].pending_oldest = Some(nodes::noon());
    snapshot.domains[0].fault_started_at = Some(nodes::noon());
    snapshot.domains[0].lost[0].1.add(nodes::noon());
    snapshot.clients[0].checkpoint_at = Some(nodes::noon());
    let page = collected(&snapshot, &everything());
    for family in FAMILIES {
        assert!(page.contains_key(family.name), "{} never appears", family.name);
    }
}

#[test]
fn what_is_unknown_is_absent() {
    let mut snapshot = nodes::node(1, 2);
    snapshot.daemons[0].state = DaemonState::Unknown;
    snapshot.daemons[0].pending_clients = None;
    snapshot.servers[0].is_up = None;
    snapshot.servers[0].status = None;
    snapshot.servers[0].clients = None;
    snapshot.domains[0].clients = None;
    snapshot.domains[0].contexts = None;
    snapshot.domains[0].radius[0].1 = crate::engine::snapshot::Radius::default();
    snapshot.gpus[0].is_up = None;
    snapshot.gpus[0].recovery_action = None;
    let page = collected(&snapshot, &Collectors::default());
    for name in [
        "mps_control_daemon_up",
        "mps_control_daemon_state",
        "mps_pending_clients",
        "mps_server_up",
        "mps_server_clients",
        "mps_clients",
        "mps_client_contexts",
        "mps_gpu_up",
        "mps_gpu_recovery_action",
        "mps_client_lost_last_timestamp_seconds",
    ] {
        assert_eq!(page.get(name), None, "{name}");
    }
    assert_eq!(page["mps_blast_radius_clients"].len(), 2, "only the two scopes that are known");
    assert_eq!(value(&page, "mps_server_state", &["default", "uid_1000", "unknown"]), Some(1.0));
}

#[test]
fn counters_start_at_zero_for_every_reason_and_cause() {
    let mut snapshot = nodes::node(1, 0);
    snapshot.domains[0].lost.clear();
    snapshot.domains[0].incidents.clear();
    let page = collected(&snapshot, &Collectors::default());
    assert_eq!(page["mps_clients_lost_total"].len(), 6);
    assert_eq!(page["mps_incidents_total"].len(), 5);
    assert_eq!(page["mps_clients_rejected_total"].len(), 5);
    assert_eq!(page["mps_server_exits_total"].len(), 2);
    assert!(page["mps_clients_lost_total"].iter().all(|(_, value)| *value == 0.0));
}

#[test]
fn a_state_set_has_exactly_one_state() {
    let page = collected(&nodes::extreme(), &Collectors::default());
    for name in
        ["mps_control_daemon_state", "mps_server_state", "mps_gpu_compute_mode", "mps_gpu_recovery_action"]
    {
        let mut sums: BTreeMap<&[String], f64> = BTreeMap::new();
        for (labels, value) in &page[name] {
            *sums.entry(&labels[..labels.len() - 1]).or_default() += value;
        }
        assert!(sums.values().all(|sum| *sum == 1.0), "{name}: {sums:?}");
    }
}

#[test]
fn a_server_that_is_gone_keeps_its_series_but_has_no_state() {
    let mut snapshot = nodes::node(1, 0);
    let gone = ServerView { is_up: Some(false), status: None, pid: None, ..snapshot.servers[0].clone() };
    snapshot.servers[0] = gone;
    let page = collected(&snapshot, &Collectors::default());
    assert_eq!(value(&page, "mps_server_up", &["default", "uid_1000"]), Some(0.0));
    assert_eq!(value(&page, "mps_server_starts_total", &["default", "uid_1000"]), Some(2.0));
    assert_eq!(page.get("mps_server_state"), None);
    assert_eq!(page.get("mps_server_info"), None);
}

#[test]
fn workloads_are_counted_by_domain_up_to_the_limit() {
    let mut snapshot = nodes::node(1, 4);
    snapshot.clients[1].workload = snapshot.clients[0].workload.clone();
    snapshot.clients[2].workload = None;
    snapshot.clients[3].state = ClientState::Lost;
    let domain = ["default/0", "0", &*nodes::uuid(0), ""];
    let page = collected(&snapshot, &Collectors::default());
    let of = |own: [&str; 4]| value(&page, "mps_workload_clients", &[domain, own].concat());
    assert_eq!(of(["research", "train-0", "main", ""]), Some(2.0));
    assert_eq!(of(["", "", "", ""]), Some(1.0));
    assert_eq!(page["mps_workload_clients"].len(), 2, "a lost client is no client any more");

    let limited = Collectors { workloads_limit: 1, ..Collectors::default() };
    let page = collected(&snapshot, &limited);
    assert_eq!(page["mps_workload_clients"].len(), 1);
    assert_eq!(value(&page, "mps_exporter_series_dropped", &["workloads"]), Some(1.0));
    let off = Collectors { workloads: false, ..Collectors::default() };
    assert_eq!(collected(&snapshot, &off).get("mps_workload_clients"), None);
}

#[test]
fn the_last_incident_of_a_domain_names_culprit_and_victims() {
    let mut snapshot = nodes::node(2, 1);
    let mut incident = nodes::incident("0195f0000002-1", Cause::Fault, "default/0");
    incident.started_at = nodes::noon();
    incident.fault_domains.push("default/1".into());
    let pod = snapshot.clients[0].workload.clone();
    incident.culprit.as_mut().unwrap().workload = pod.clone();
    incident.victims[0].workload = pod.clone();
    incident.victims[2].workload = pod;
    // The older one that stands before it is not the last.
    snapshot.incidents.push(Arc::new(incident.clone()));
    let page = collected(&snapshot, &Collectors::default());
    let work = ["research", "train-0", "main", ""];
    for gpu in 0..2 {
        let (name, index) = (format!("default/{gpu}"), gpu.to_string());
        let domain = [&*name, &*index, &*nodes::uuid(gpu), ""];
        let culprit = [&domain[..], &["0195f0000002-1", "9001", "train"], &work, &["server_log"]].concat();
        assert_eq!(value(&page, "mps_incident_last_culprit_info", &culprit), Some(1.0));
        let of = |work: &[&str]| value(&page, "mps_incident_last_victims", &[&domain, work].concat());
        assert_eq!((of(&work), of(&["", "", "", ""])), (Some(2.0), Some(1.0)));
    }
    assert_eq!(page["mps_incident_last_culprit_info"].len(), 2);

    // A later one without a culprit, and another limit.
    incident.id = "0195f0000003-1".into();
    incident.culprit = None;
    incident.fault_domains.truncate(1);
    snapshot.incidents.push(Arc::new(incident));
    let limited = Collectors { workloads_limit: 3, ..Collectors::default() };
    let page = collected(&snapshot, &limited);
    assert_eq!(page["mps_incident_last_culprit_info"].len(), 1);
    assert_eq!(page["mps_incident_last_victims"].len(), 3);
    assert_eq!(value(&page, "mps_exporter_series_dropped", &["workloads"]), Some(1.0));
    let off = Collectors { workloads: false, ..Collectors::default() };
    assert_eq!(collected(&snapshot, &off).get("mps_incident_last_victims"), None);
}

#[test]
fn clients_are_shown_only_when_asked_and_up_to_the_limit() {
    let snapshot = nodes::node(1, 4);
    assert_eq!(collected(&snapshot, &Collectors::default()).get("mps_client_info"), None);
    let options = Collectors { clients: true, clients_limit: 3, ..Collectors::default() };
    let page = collected(&snapshot, &options);
    assert_eq!(page["mps_client_info"].len(), 3);
    assert_eq!(value(&page, "mps_exporter_series_dropped", &["clients"]), Some(1.0));
}

#[test]
fn checkpoints_show_the_newest_of_a_workload() {
    let mut snapshot = nodes::node(1, 3);
    let (old, new) = (nodes::noon() - jiff::SignedDuration::from_secs(60), nodes::noon());
    snapshot.clients[1].workload = snapshot.clients[0].workload.clone();
    snapshot.clients[0].checkpoint_at = Some(new);
    snapshot.clients[1].checkpoint_at = Some(old);
    snapshot.clients[2].workload = None;
    snapshot.clients[2].checkpoint_at = Some(new);
    let page = collected(&snapshot, &Collectors::default());
    let labels = ["default", "research", "train-0", "main", ""];
    assert_eq!(value(&page, "mps_checkpoint_last_timestamp_seconds", &labels), Some(unix_seconds(new)));
    assert_eq!(page["mps_checkpoint_last_timestamp_seconds"].len(), 1);
}

#[test]
fn a_series_that_the_model_gives_twice_is_shown_once_and_counted() {
    let page = collected(&nodes::extreme(), &Collectors::default());
    let twice = page["mps_server_up"].iter().filter(|(labels, _)| labels == &["default", "uid_1000"]).count();
    assert_eq!(twice, 1);
    assert!(value(&page, "mps_exporter_series_dropped", &["duplicates"]).unwrap() > 0.0);
}

#[test]
fn the_default_node_stays_below_a_thousand_series() {
    let series: usize = node(&nodes::node(8, 48), &Collectors::default())
        .iter()
        .map(|family: &MetricFamily| {
            family
                .get_metric()
                .iter()
                .map(|metric| match family.get_field_type() {
                    MetricType::HISTOGRAM => metric.get_histogram().get_bucket().len() + 3,
                    _ => 1,
                })
                .sum::<usize>()
        })
        .sum();
    assert!(series < 950, "{series} series, and the exporter's own come on top");
}
