use super::*;
use crate::config::ClientTls;
use crate::outlet::testing::incident;

fn config() -> Alertmanager {
    Alertmanager {
        url: "http://am:9093".into(),
        labels: BTreeMap::from([("cluster".into(), "west".into()), ("job".into(), "mps".into())]),
        runbooks: Some("https://wiki.example/mps/".into()),
        basic_auth: None,
        bearer_token_file: None,
        tls: ClientTls::default(),
        resolve: false,
        timeout: std::time::Duration::from_secs(1),
        max_age: std::time::Duration::from_secs(900),
    }
}

fn names(incident: &Incident) -> Vec<&'static str> {
    alerts(incident).iter().map(|key| key.name.label()).collect()
}

fn rendered(incident: &Incident, name: AlertName) -> Value {
    let now = "2026-04-01T12:00:03Z".parse().unwrap();
    let ends_at = "2026-04-01T12:06:03Z".parse().unwrap();
    let key = AlertKey { name, fault_domain: "default/0".into() };
    to_json(&key, incident, &config(), now, ends_at)
}

#[test]
fn an_incident_is_the_alerts_that_the_rules_would_make_of_it() {
    let mut incident = incident();
    assert_eq!(names(&incident), ["MpsMassClientLoss", "MpsServerFault"]);
    incident.state = IncidentState::Recovering;
    assert_eq!(names(&incident), ["MpsMassClientLoss", "MpsServerFault", "MpsRecoveryBlocked"]);
    incident.cause = Cause::ServerExit;
    incident.recovery.blocked_by.clear();
    assert_eq!(names(&incident), ["MpsMassClientLoss", "MpsServerExit"]);
    incident.cause = Cause::Gpu;
    assert_eq!(names(&incident), ["MpsMassClientLoss"]);
    incident.mass_client_loss = false;
    assert_eq!(names(&incident), ["MpsClientLost"]);
    incident.state = IncidentState::Open;
    assert_eq!(
        names(&incident),
        [""; 0],
        "while losses arrive the first of many is not told from the only one"
    );
}

#[test]
fn what_nothing_explains_never_pages() {
    for state in [IncidentState::Open, IncidentState::Recovering, IncidentState::Closed] {
        let unexplained = Incident { cause: Cause::Unexplained, state, ..incident() };
        let alerts = alerts(&unexplained);
        assert_eq!(alerts.len(), 1);
        assert_eq!(alerts[0].name.label(), "MpsUnexplainedClientLoss");
        assert_eq!(alerts[0].name.severity(), "warning");
    }
}

#[test]
fn each_fault_domain_has_its_own_alert_with_its_own_device() {
    let mut incident = incident();
    incident.fault_domains.push("default/1/3".into());
    incident.devices.push(IncidentDevice {
        uuid: "GPU-1".into(),
        gpu: "1".into(),
        gpu_instance: "3".into(),
        mig_uuid: None,
    });
    assert_eq!(alerts(&incident).len(), 4);
    let key = AlertKey { name: AlertName::ServerFault, fault_domain: "default/1/3".into() };
    let alert = to_json(&key, &incident, &config(), incident.started_at, incident.started_at);
    assert_eq!(
        alert["labels"],
        json!({"alertname": "MpsServerFault", "severity": "critical", "fault_domain": "default/1/3", "gpu": "1",
               "UUID": "GPU-1", "GPU_I_ID": "3", "cluster": "west", "job": "mps"})
    );
}

#[test]
fn an_alert_names_who_did_it_and_who_was_lost() {
    let alert = rendered(&incident(), AlertName::MassClientLoss);
    assert_eq!(
        alert["labels"],
        json!({"alertname": "MpsMassClientLoss", "severity": "critical", "fault_domain": "default/0", "gpu": "0",
               "UUID": "GPU-6f1d0a52-1c3b-4a7e-9d55-0c2b7a9e4f10", "cluster": "west", "job": "mps"})
    );
    assert_eq!(
        alert["annotations"]["summary"],
        "3 of 3 MPS clients of fault domain default/0 were lost at once (a client's fatal fault)."
    );
    assert_eq!(
        alert["annotations"]["description"],
        "Caused by train (pid 4711, pod ml/train-0 (main)). Lost: train (pid 4711), infer (pid 4712, Slurm job 91.0), \
         pid 4713. Xid 31. Recovery waits for these to exit: infer (pid 4712, Slurm job 91.0)."
    );
    assert_eq!(alert["annotations"]["runbook_url"], "https://wiki.example/mps/MpsMassClientLoss.md");
    assert_eq!(alert["startsAt"], "2026-04-01T12:00:00.25Z");
    assert_eq!(alert["endsAt"], "2026-04-01T12:06:03Z");
}

#[test]
fn annotations_are_bounded_whatever_processes_call_themselves() {
    let mut incident = incident();
    let victim = incident.victims[0].clone();
    incident.victims = (0..3000)
        .map(|pid| Victim { pid, command: Some("ü\n\u{1b}[31m".repeat(500).into()), ..victim.clone() })
        .collect();
    incident.recovery.blocked_by = (0..3000).collect();
    for name in [AlertName::MassClientLoss, AlertName::RecoveryBlocked] {
        let alert = rendered(&incident, name);
        let description = alert["annotations"]["description"].as_str().unwrap();
        assert!(description.len() <= MAX_DESCRIPTION, "{}", description.len());
        assert!(description.contains("and 2988 more"), "{description}");
        assert!(!description.contains(char::is_control));
        assert!(alert["annotations"]["summary"].as_str().unwrap().len() <= MAX_SUMMARY);
    }
}

#[test]
fn an_alert_of_the_future_starts_now() {
    let late = Incident { started_at: "2026-04-01T13:00:00Z".parse().unwrap(), ..incident() };
    assert_eq!(rendered(&late, AlertName::ServerFault)["startsAt"], "2026-04-01T12:00:03Z");
}
