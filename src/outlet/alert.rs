//! What an incident is to Alertmanager: which alerts, with which labels, in which words.
//!
//! The label sets are those of the rules in `alerts/mps-alerts.yml`: Alertmanager takes an alert of either way for the
//! same one exactly when all labels are equal.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::config::Alertmanager;
use crate::engine::incident::{Cause, Incident, IncidentDevice, IncidentState, Victim};
use crate::identity::Workload;

#[cfg(test)]
mod tests;

/// Processes that an annotation names before it counts the rest.
const NAMED: usize = 12;
/// Upper bound of a process's or workload's name in an annotation, in bytes.
const MAX_NAME: usize = 80;
/// Upper bounds of the annotations, in bytes.
const MAX_SUMMARY: usize = 512;
const MAX_DESCRIPTION: usize = 4096;

/// An alert that is both a rule's and the sidecar's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AlertName {
    /// Many clients of a fault domain were lost at once.
    MassClientLoss,
    /// A client's fatal fault took many with it.
    ServerFault,
    /// The server died with many clients.
    ServerExit,
    /// Processes that have not exited keep the server from recovering.
    RecoveryBlocked,
    /// Clients were lost, too few for a mass client loss.
    ClientLost,
    /// Clients of several workloads left together and nothing says why.
    UnexplainedClientLoss,
}

impl AlertName {
    /// The label `alertname`.
    pub fn label(self) -> &'static str {
        match self {
            AlertName::MassClientLoss => "MpsMassClientLoss",
            AlertName::ServerFault => "MpsServerFault",
            AlertName::ServerExit => "MpsServerExit",
            AlertName::RecoveryBlocked => "MpsRecoveryBlocked",
            AlertName::ClientLost => "MpsClientLost",
            AlertName::UnexplainedClientLoss => "MpsUnexplainedClientLoss",
        }
    }

    /// The label `severity`.
    pub fn severity(self) -> &'static str {
        match self {
            AlertName::MassClientLoss
            | AlertName::ServerFault
            | AlertName::ServerExit
            | AlertName::RecoveryBlocked => "critical",
            AlertName::UnexplainedClientLoss => "warning",
            AlertName::ClientLost => "info",
        }
    }
}

/// What Alertmanager knows an alert by, apart from the labels that are the same for all.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AlertKey {
    /// Which alert.
    pub name: AlertName,
    /// For which fault domain.
    pub fault_domain: Arc<str>,
}

/// The alerts of an incident as it is now. Of a closed one: those that it had at its end.
pub fn alerts(incident: &Incident) -> Vec<AlertKey> {
    let mut names = Vec::new();
    if incident.cause == Cause::Unexplained {
        names.push(AlertName::UnexplainedClientLoss);
    } else {
        if incident.mass_client_loss {
            names.push(AlertName::MassClientLoss);
            match incident.cause {
                Cause::Fault => names.push(AlertName::ServerFault),
                Cause::ServerExit => names.push(AlertName::ServerExit),
                Cause::Gpu | Cause::Killed | Cause::Unexplained => {}
            }
        } else if incident.state != IncidentState::Open && !incident.victims.is_empty() {
            // While losses still arrive, the first of many is not told apart from the only one.
            names.push(AlertName::ClientLost);
        }
        if is_blocked(incident) {
            names.push(AlertName::RecoveryBlocked);
        }
    }
    let key = |name| {
        incident.fault_domains.iter().map(move |domain| AlertKey { name, fault_domain: domain.clone() })
    };
    names.into_iter().flat_map(key).collect()
}

/// Whether processes still block recovery after the window in which losses arrive.
pub fn is_blocked(incident: &Incident) -> bool {
    incident.state == IncidentState::Recovering
        && incident.recovery.recovered_at.is_none()
        && !incident.recovery.blocked_by.is_empty()
}

/// The alert in the form of Alertmanager's API v2.
pub fn to_json(
    key: &AlertKey,
    incident: &Incident,
    config: &Alertmanager,
    now: Timestamp,
    ends_at: Timestamp,
) -> Value {
    let mut labels: BTreeMap<&str, &str> =
        config.labels.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    labels.insert("alertname", key.name.label());
    labels.insert("severity", key.name.severity());
    labels.insert("fault_domain", &key.fault_domain);
    if let Some(device) = device_of(incident, &key.fault_domain) {
        labels.insert("gpu", &device.gpu);
        labels.insert("UUID", &device.uuid);
        labels.insert("GPU_I_ID", &device.gpu_instance);
    }
    // To Prometheus an empty label is none.
    labels.retain(|_, value| !value.is_empty());
    let (summary, description) = words(key, incident);
    let mut annotations = BTreeMap::from([
        ("summary", bounded(summary, MAX_SUMMARY)),
        ("description", bounded(description, MAX_DESCRIPTION)),
        ("incident", incident.id.to_string()),
    ]);
    if let Some(runbooks) = &config.runbooks {
        annotations
            .insert("runbook_url", format!("{}/{}.md", runbooks.trim_end_matches('/'), key.name.label()));
    }
    json!({
        "labels": labels,
        "annotations": annotations,
        // Alertmanager refuses an alert that starts after it ends.
        "startsAt": incident.started_at.min(now).min(ends_at),
        "endsAt": ends_at,
    })
}

fn device_of<'a>(incident: &'a Incident, fault_domain: &str) -> Option<&'a IncidentDevice> {
    let place = incident.fault_domains.iter().position(|domain| **domain == *fault_domain)?;
    incident.devices.get(place)
}

/// Summary and description.
fn words(key: &AlertKey, incident: &Incident) -> (String, String) {
    let domain = &key.fault_domain;
    let lost = incident.victims.len();
    let before = incident.clients_before.max(u32::try_from(lost).unwrap_or(u32::MAX));
    let server = incident.server.as_deref().unwrap_or("?");
    let daemon = incident.daemon.as_deref().unwrap_or("?");
    let summary = match key.name {
        AlertName::MassClientLoss => {
            let cause = because(incident.cause);
            format!("{lost} of {before} MPS clients of fault domain {domain} were lost at once ({cause}).")
        }
        AlertName::ServerFault => format!(
            "A fatal GPU fault took {lost} clients of MPS server {server}, daemon {daemon}, in fault domain {domain}."
        ),
        AlertName::ServerExit => {
            format!(
                "MPS server {server} of daemon {daemon} died with {lost} clients in fault domain {domain}."
            )
        }
        AlertName::RecoveryBlocked => {
            let blocking = match incident.recovery.blocked_by.len() {
                1 => "1 process blocks".to_owned(),
                count => format!("{count} processes block"),
            };
            format!("{blocking} the recovery of fault domain {domain}: its server takes no new clients.")
        }
        AlertName::ClientLost => {
            let cause = because(incident.cause);
            format!("{lost} of {before} MPS clients of fault domain {domain} lost ({cause}).")
        }
        AlertName::UnexplainedClientLoss => {
            format!(
                "{lost} MPS clients of several workloads left fault domain {domain} together; nothing says why."
            )
        }
    };
    let culprit = match &incident.culprit {
        Some(culprit) => {
            format!(
                "Caused by {}.",
                process(culprit.pid, culprit.command.as_deref(), culprit.workload.as_ref())
            )
        }
        None => "No source names a culprit.".into(),
    };
    let description =
        format!("{culprit} Lost: {}.{}{}", victims(&incident.victims), xids(incident), blockers(incident));
    (summary, description)
}

fn because(cause: Cause) -> &'static str {
    match cause {
        Cause::Fault => "a client's fatal fault",
        Cause::ServerExit => "the MPS server died",
        Cause::Gpu => "a GPU-level error",
        Cause::Killed => "they were killed",
        Cause::Unexplained => "nothing says why",
    }
}

fn victims(victims: &[Victim]) -> String {
    list(
        victims.len(),
        victims.iter().map(|victim| process(victim.pid, victim.command.as_deref(), victim.workload.as_ref())),
    )
}

fn blockers(incident: &Incident) -> String {
    let pids = &incident.recovery.blocked_by;
    if pids.is_empty() {
        return String::new();
    }
    let named = pids.iter().map(|pid| {
        let victim = incident.victims.iter().find(|victim| victim.pid == *pid);
        let culprit = incident.culprit.as_ref().filter(|culprit| culprit.pid == *pid);
        let command = victim
            .and_then(|victim| victim.command.as_deref())
            .or_else(|| culprit.and_then(|culprit| culprit.command.as_deref()));
        let workload = victim
            .and_then(|victim| victim.workload.as_ref())
            .or_else(|| culprit.and_then(|culprit| culprit.workload.as_ref()));
        process(*pid, command, workload)
    });
    format!(" Recovery waits for these to exit: {}.", list(pids.len(), named))
}

fn xids(incident: &Incident) -> String {
    let mut codes: Vec<u32> = incident.xids.iter().map(|xid| xid.xid).collect();
    codes.sort_unstable();
    codes.dedup();
    match codes.len() {
        0 => String::new(),
        count => format!(" Xid {}.", list(count, codes.iter().map(u32::to_string))),
    }
}

fn list(count: usize, names: impl Iterator<Item = String>) -> String {
    let mut text = names.take(NAMED).collect::<Vec<_>>().join(", ");
    if count == 0 {
        text.push_str("nobody yet");
    } else if count > NAMED {
        let _ = write!(text, " and {} more", count - NAMED);
    }
    text
}

fn process(pid: u32, command: Option<&str>, workload: Option<&Workload>) -> String {
    let mut text = match command {
        Some(command) => format!("{} (pid {pid}", bounded(command.to_owned(), MAX_NAME)),
        None => format!("pid {pid}"),
    };
    if let Some(workload) = workload {
        let separator = if command.is_some() { ", " } else { " (" };
        let _ = write!(text, "{separator}{}", bounded(workload.to_string(), 2 * MAX_NAME));
    }
    if command.is_some() || workload.is_some() {
        text.push(')');
    }
    text
}

/// Cuts at a character's end and says so. Control characters, which a process may put in its name, become spaces.
fn bounded(mut text: String, most: usize) -> String {
    if text.len() > most {
        let mut end = most - '…'.len_utf8();
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push('…');
    }
    if text.contains(char::is_control) {
        text = text.replace(char::is_control, " ");
    }
    text
}
