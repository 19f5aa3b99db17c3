//! The first lines of the page: what is going on, in a word and a sentence.

use std::fmt::Write as _;

use super::words::{self, Device, Level, Many, Named, Process};
use crate::engine::incident::{Incident, IncidentState};
use crate::engine::snapshot::{DomainView, Scope, Snapshot, SourceView};
use crate::event::RecoveryAction;

/// What is going on.
#[derive(Debug, PartialEq)]
pub(super) struct Verdict {
    pub level: Level,
    /// For the headline and the browser's tab.
    pub word: &'static str,
    /// What a person needs to know first. Without ages, which would be read out over and over.
    pub sentence: String,
}

impl Verdict {
    /// Judges the node: the worst comes first.
    pub fn of(snapshot: &Snapshot) -> Verdict {
        let verdict = |level, word, sentence| Verdict { level, word, sentence };
        let mut active = snapshot.incidents.iter().filter(|it| it.state != IncidentState::Closed);
        if let Some(incident) = active.next() {
            let mut sentence = describe(incident);
            let others = active.count();
            if others > 0 {
                let _infallible = write!(sentence, " {} more.", Many(others as u64, "incident"));
            }
            return verdict(Level::Bad, "Incident", sentence);
        }
        if let Some(domain) = snapshot.domains.iter().find(|domain| domain.fault_started_at.is_some()) {
            let sentence =
                format!("{} is handling a fatal fault: no new client gets on.", Device(&domain.labels));
            return verdict(Level::Bad, "Fault", sentence);
        }
        if let Some(gpu) = snapshot.gpus.iter().find(|gpu| gpu.is_up == Some(false)) {
            return verdict(
                Level::Bad,
                "GPU lost",
                format!("NVML does not reach GPU {} any more.", gpu.index),
            );
        }
        if let Some(daemon) = snapshot.daemons.iter().find(|daemon| daemon.is_up() == Some(false)) {
            let (level, word) = words::daemon_state(daemon.state);
            let sentence = format!("The MPS control daemon {} is {word}.", daemon.name);
            return verdict(level, "Daemon", sentence);
        }
        let needs = |action: Option<RecoveryAction>| action.filter(|it| *it != RecoveryAction::None);
        if let Some((gpu, action)) =
            snapshot.gpus.iter().find_map(|gpu| needs(gpu.recovery_action).map(|action| (gpu, action)))
        {
            let sentence = format!("GPU {} {}.", gpu.index, words::recovery_action(action));
            return verdict(Level::Warning, "GPU", sentence);
        }
        let blind: Vec<&SourceView> = snapshot.sources.iter().filter(|source| !source.is_up).collect();
        if let Some(first) = blind.first() {
            let mut sentence = format!("{} sees nothing", words::source(first.source));
            if blind.len() > 1 {
                let _infallible =
                    write!(sentence, ", nor do {}", Many(blind.len() as u64 - 1, "other source"));
            }
            sentence.push_str(". What they would tell is missing here, not zero.");
            return verdict(Level::Warning, "Partly blind", sentence);
        }
        if snapshot.domains.is_empty() && snapshot.daemons.is_empty() {
            let sentence = "No GPU and no MPS daemon has been seen on this node.".to_owned();
            return verdict(Level::Unknown, "Nothing here", sentence);
        }
        verdict(Level::Good, "Quiet", risk(snapshot))
    }
}

/// The incident in one or two sentences.
fn describe(incident: &Incident) -> String {
    let lost = incident.victims.len();
    let mut text = if incident.clients_before as usize >= lost && lost > 0 {
        format!("{lost} of {} lost", Many(incident.clients_before, "client"))
    } else {
        format!("{} lost", Many(lost as u64, "client"))
    };
    let _infallible = write!(text, " on {}: {}.", devices(incident), words::cause(incident.cause));
    if let Some(culprit) = &incident.culprit {
        let _infallible = write!(text, " Culprit: {}.", Named(culprit));
    }
    match &*incident.recovery.blocked_by {
        [] if incident.recovery.recovered_at.is_some() => text.push_str(" Recovered."),
        [] => text.push_str(" Recovering."),
        [pid] => {
            let victim = incident.victims.iter().find(|victim| victim.pid == *pid);
            let process = Process(*pid, victim.and_then(|victim| victim.command.as_deref()));
            let _infallible = write!(text, " Recovery waits for {process} to exit.");
        }
        more => {
            let _infallible = write!(text, " Recovery waits for {} processes to exit.", more.len());
        }
    }
    text
}

/// `GPU 0 and GPU 1`.
pub(super) fn devices(incident: &Incident) -> String {
    let names = incident.devices.iter().map(|it| {
        let mut name = String::new();
        let _infallible = words::device(&mut name, &it.gpu, &it.uuid, &it.gpu_instance);
        name
    });
    let names: Vec<String> = names.collect();
    match &*names {
        [] => "an unknown device".to_owned(),
        [one] => one.clone(),
        [some @ .., last] => format!("{} and {last}", some.join(", ")),
    }
}

/// What the worst single fault would take, while all is well.
fn risk(snapshot: &Snapshot) -> String {
    let application = |domain: &DomainView| {
        let radius = domain.radius.iter().find(|(scope, _)| *scope == Scope::Application);
        radius.and_then(|(_, radius)| radius.clients)
    };
    let worst = snapshot.domains.iter().filter(|it| it.daemon.is_some()).max_by_key(|it| application(it));
    match worst.and_then(|domain| Some((domain, application(domain)?))) {
        Some((_, 0)) => "No client is on MPS.".to_owned(),
        Some((domain, clients)) => {
            let coupled = domain.coupled_devices.filter(|devices| *devices > 1);
            let place = coupled.map_or_else(
                || format!("{}", Device(&domain.labels)),
                |devices| format!("{devices} coupled devices"),
            );
            format!(
                "{}. The worst single fault now would kill {clients} of them, on {place}.",
                Many(snapshot.clients.len() as u64, "MPS client")
            )
        }
        None if snapshot.domains.iter().all(|domain| domain.daemon.is_none()) => {
            "No MPS here: each process dies alone.".to_owned()
        }
        None => "How many clients are on MPS is not known.".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::engine::incident::Cause;
    use crate::test_nodes as nodes;

    #[test]
    fn the_worst_comes_first() {
        assert_eq!(Verdict::of(&nodes::empty()).word, "Nothing here");
        let mut node = nodes::node(2, 3);
        let quiet = Verdict::of(&node);
        assert_eq!((quiet.level, quiet.word), (Level::Good, "Quiet"));
        assert_eq!(
            quiet.sentence,
            "6 MPS clients. The worst single fault now would kill 3 of them, on GPU 1."
        );
        node.sources[0].is_up = false;
        assert_eq!(Verdict::of(&node).word, "Partly blind");
        node.gpus[0].is_up = Some(false);
        assert_eq!(Verdict::of(&node).word, "GPU lost");
        let mut incident = nodes::incident("1-1", Cause::Fault, "default/0");
        incident.state = IncidentState::Recovering;
        incident.recovery.blocked_by = vec![9002];
        node.incidents.insert(0, Arc::new(incident));
        let bad = Verdict::of(&node);
        assert_eq!((bad.level, bad.word), (Level::Bad, "Incident"));
        assert_eq!(
            bad.sentence,
            "3 of 3 clients lost on GPU 0: a client\u{2019}s fatal fault. Culprit: train (pid 9001). Recovery waits for \
             train (pid 9002) to exit."
        );
    }
}
