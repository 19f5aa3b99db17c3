use std::collections::BTreeSet;

use super::*;

/// What a sample of a family may be called in OpenMetrics beyond the family's own name.
const SUFFIXES: [&str; 8] = ["_total", "_created", "_bucket", "_count", "_sum", "_gcount", "_gsum", "_info"];

fn open_metrics_name(family: &Family) -> &'static str {
    match family.kind {
        Kind::Counter => family.name.strip_suffix("_total").expect("checked by another test"),
        Kind::Info => family.name.strip_suffix("_info").expect("checked by another test"),
        Kind::Gauge | Kind::StateSet | Kind::Histogram => family.name,
    }
}

#[test]
fn names_are_well_formed_and_unique() {
    let mut seen = BTreeSet::new();
    for family in all() {
        let Family { name, kind, .. } = *family;
        assert!(seen.insert(name), "{name} twice");
        assert!(name.starts_with("mps_") || name.starts_with("process_"), "{name}");
        assert!(name.bytes().all(|byte| byte == b'_' || byte.is_ascii_lowercase()), "{name}");
        assert_eq!(name.ends_with("_total"), kind == Kind::Counter, "{name}");
        assert_eq!(name.ends_with("_info"), kind == Kind::Info, "{name}");
    }
}

#[test]
fn no_sample_can_be_taken_for_one_of_another_family() {
    let names: BTreeSet<&str> = all().map(open_metrics_name).collect();
    assert_eq!(names.len(), all().count(), "two families have the same OpenMetrics name");
    for name in &names {
        for suffix in SUFFIXES {
            assert!(
                !names.contains(format!("{name}{suffix}").as_str()),
                "{name}{suffix} clashes with {name}"
            );
        }
    }
}

#[test]
fn labels_are_allowed_and_unique() {
    for family in all() {
        let labels: Vec<&str> = family.label_names().collect();
        let unique: BTreeSet<&str> = labels.iter().copied().collect();
        assert_eq!(labels.len(), unique.len(), "{}", family.name);
        for label in labels {
            assert!(
                !["hostname", "node", "job", "instance", "le", "quantile"].contains(&label),
                "{} must not carry {label}",
                family.name
            );
            let is_word = label.bytes().all(|byte| byte == b'_' || byte.is_ascii_alphabetic());
            assert!(is_word && !label.starts_with("__"), "{} label {label}", family.name);
        }
    }
}

#[test]
fn help_is_one_finished_line() {
    for family in all() {
        assert!(family.help.ends_with('.') && !family.help.contains('\n'), "{}", family.name);
        assert!(family.help.len() > 20, "{} explains nothing", family.name);
    }
}

#[test]
fn counters_of_the_model_have_their_last_timestamp() {
    let pairs = [
        (&CLIENTS_REJECTED, &CLIENT_REJECTED_LAST),
        (&TROUBLES, &TROUBLE_LAST),
        (&DAEMON_RESTARTS, &DAEMON_RESTART_LAST),
        (&SERVER_STARTS, &SERVER_START_LAST),
        (&SERVER_EXITS, &SERVER_EXIT_LAST),
        (&SERVER_FAULTS, &SERVER_FAULT_LAST),
        (&CLIENT_CONNECTS, &CLIENT_CONNECT_LAST),
        (&CLIENT_DISCONNECTS, &CLIENT_DISCONNECT_LAST),
        (&CLIENTS_LOST, &CLIENT_LOST_LAST),
        (&INCIDENTS, &INCIDENT_LAST),
        (&MASS_CLIENT_LOSS, &MASS_CLIENT_LOSS_LAST),
        (&GPU_XID_ERRORS, &GPU_XID_LAST),
        (&ALERTS_SENT, &ALERT_SENT_LAST),
        (&HOOK_RUNS, &HOOK_RUN_LAST),
    ];
    for (counter, last) in pairs {
        assert_eq!(counter.kind, Kind::Counter);
        assert!(last.name.ends_with("_last_timestamp_seconds"), "{}", last.name);
        assert_eq!(counter.labels, last.labels, "{}", counter.name);
        assert_eq!(counter.is_per_domain, last.is_per_domain, "{}", counter.name);
    }
    let ours = ["Control daemons", "Servers", "Fault domains", "Incidents and recovery", "GPUs"];
    let event_counters = SECTIONS
        .iter()
        .filter(|section| ours.contains(&section.title))
        .flat_map(|section| section.families)
        .filter(|family| family.kind == Kind::Counter && **family != &CONTROL_QUERIES)
        .count();
    assert_eq!(event_counters + 2, pairs.len(), "a counter of events has no timestamp beside it");
}

#[test]
fn units_come_from_names() {
    assert_eq!(unit_of("process_cpu_seconds_total"), Some("seconds"));
    assert_eq!(unit_of("mps_log_lag_bytes"), Some("bytes"));
    assert_eq!(unit_of("mps_clients"), None);
}
