//! Incidents for people: as plain text, and as Markdown for a post-mortem.

use std::fmt::Write as _;

use jiff::Timestamp;

use super::text::{harmless_lines, wrap_into};
use crate::engine::incident::{Cause, CulpritEvidence, Incident, VictimEvidence};
use crate::identity::Workload;
use crate::replay::Outcome;

/// Victims and lines that plain text shows of one incident.
const SHOWN: usize = 12;

/// Plain text, `width` columns wide.
pub fn text(outcome: &Outcome, width: usize) -> String {
    let mut out = String::new();
    summary(&mut out, outcome, str::to_owned);
    for incident in &outcome.incidents {
        out.push('\n');
        let _infallible = writeln!(out, "{}  {}", incident.id, title(incident));
        for (name, value) in facts(incident) {
            let _infallible = write!(out, "  {name:<14}");
            wrap_into(&mut out, &value, 16, width);
        }
        for victim in incident.victims.iter().take(SHOWN) {
            let _infallible = write!(out, "  {:<14}", "victim");
            wrap_into(&mut out, &victim_line(victim), 16, width);
        }
        let more = incident.victims.len().saturating_sub(SHOWN);
        if more > 0 {
            let _infallible = writeln!(out, "  {:<14}and {more} more", "");
        }
        for line in incident.evidence.iter().take(SHOWN) {
            let _infallible = write!(out, "  {:<14}", line.source);
            wrap_into(&mut out, &format!("{}  {}", stamp(line.at), line.text), 16, width);
        }
    }
    harmless_lines(&out)
}

/// Markdown: what a post-mortem starts from.
pub fn markdown(outcome: &Outcome) -> String {
    let mut out = String::from("# MPS incidents\n\n");
    summary(&mut out, outcome, cell);
    for incident in &outcome.incidents {
        let _infallible = write!(
            out,
            "\n## {}\n\n| | |\n| --- | --- |\n| incident | `{}` |\n",
            title(incident),
            incident.id
        );
        for (name, value) in facts(incident) {
            let _infallible = writeln!(out, "| {name} | {} |", cell(&value));
        }
        if !incident.victims.is_empty() {
            out.push_str("\n### Victims\n\n| pid | command | workload | known by | exited | work lost |\n| --- | --- | --- | --- | --- | --- |\n");
            for victim in &incident.victims {
                let _infallible = writeln!(
                    out,
                    "| {} | {} | {} | {} | {} | {} |",
                    victim.pid,
                    cell(victim.command.as_deref().unwrap_or("")),
                    cell(&victim.workload.as_ref().map(Workload::to_string).unwrap_or_default()),
                    known_by(victim.evidence),
                    victim.exited_at.map(stamp).unwrap_or_default(),
                    victim.work_lost_seconds.map(|seconds| format!("{seconds} s")).unwrap_or_default(),
                );
            }
        }
        if !incident.evidence.is_empty() {
            out.push_str("\n### Evidence\n\n| when | source | line |\n| --- | --- | --- |\n");
            for line in &incident.evidence {
                let _infallible =
                    writeln!(out, "| {} | {} | {} |", stamp(line.at), line.source, cell(&line.text));
            }
        }
    }
    harmless_lines(&out)
}

/// `escaped` makes plain text of a file's name.
fn summary(out: &mut String, outcome: &Outcome, escaped: fn(&str) -> String) {
    let incidents = outcome.incidents.len();
    let mass = outcome.incidents.iter().filter(|incident| incident.mass_client_loss).count();
    let span = outcome
        .span
        .map(|(first, last)| format!(", between {} and {}", stamp(first), stamp(last)))
        .unwrap_or_default();
    let noun = if incidents == 1 { "incident" } else { "incidents" };
    let _infallible = writeln!(out, "{incidents} {noun}, mass client loss in {mass}{span}.");
    for (label, counts) in &outcome.counts {
        let (label, known, unknown) = (escaped(label), counts.recognized, counts.unrecognized);
        let _infallible = writeln!(out, "{label}: {known} lines known, {unknown} unknown.");
    }
    for xids in &outcome.xids {
        let (Some(code), count) = (xids.code, xids.count.total) else { continue };
        let times = if count == 1 { "once" } else { "times" };
        let number = if count == 1 { String::new() } else { format!("{count} ") };
        let _infallible = writeln!(out, "Xid {code} on {}: {number}{times}.", escaped(&xids.uuid));
    }
    for (label, error) in &outcome.broken_off {
        let _infallible = writeln!(out, "{} breaks off before its end: {error}.", escaped(label));
    }
    if outcome.undated > 0 {
        let _infallible = writeln!(
            out,
            "{} events had no time that could be told and are left out; a kernel log that counts from boot needs --boot-time.",
            outcome.undated
        );
    }
}

fn title(incident: &Incident) -> String {
    let what = match incident.cause {
        Cause::Fault => "fatal GPU error of a client",
        Cause::ServerExit => "the MPS server died",
        Cause::Gpu => "GPU-level error",
        Cause::Killed => "clients were killed",
        Cause::Unexplained => "clients of several workloads left together, unexplained",
    };
    let mass = if incident.mass_client_loss { "mass client loss: " } else { "" };
    format!("{}  {mass}{what}", stamp(incident.started_at))
}

/// Name and value of everything but lists.
fn facts(incident: &Incident) -> Vec<(&'static str, String)> {
    let mut facts = Vec::new();
    facts.push(("fault domains", incident.fault_domains.join(", ")));
    if let Some(server) = &incident.server {
        facts.push(("server", format!("{server} of daemon {}", incident.daemon.as_deref().unwrap_or("?"))));
    }
    facts.push((
        "culprit",
        match &incident.culprit {
            Some(culprit) => format!(
                "pid {}{}{}, named by {}",
                culprit.pid,
                culprit.command.as_ref().map(|command| format!(" ({command})")).unwrap_or_default(),
                culprit.workload.as_ref().map(|workload| format!(" of {workload}")).unwrap_or_default(),
                match culprit.evidence {
                    CulpritEvidence::ServerLog => "server.log",
                    CulpritEvidence::XidChannel => "the Xid line (owner of the faulting channel)",
                }
            ),
            None => "not named by any source".to_owned(),
        },
    ));
    facts.push(("lost", format!("{} of {} clients", incident.victims.len(), incident.clients_before)));
    if let Some(work) = incident.work_lost_seconds {
        facts.push(("work lost", format!("{work:.0} s, summed over the victims")));
    }
    if !incident.xids.is_empty() {
        let xids: Vec<String> = incident
            .xids
            .iter()
            .map(|xid| {
                format!("{}{}", xid.xid, xid.pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default())
            })
            .collect();
        facts.push(("Xids", xids.join(", ")));
    }
    let recovery = &incident.recovery;
    facts.push((
        "recovery",
        match (recovery.seconds, recovery.blocked_by.as_slice()) {
            (Some(seconds), _) => format!("{seconds:.3} s after the fault"),
            (None, []) if incident.ended_at.is_some() => "not seen".to_owned(),
            (None, []) => "not yet".to_owned(),
            (None, pids) => {
                let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
                format!("blocked by {} until they have exited", pids.join(", "))
            }
        },
    ));
    facts
}

fn victim_line(victim: &crate::engine::incident::Victim) -> String {
    let mut line = format!("pid {}", victim.pid);
    if let Some(command) = &victim.command {
        let _infallible = write!(line, " ({command})");
    }
    if let Some(workload) = &victim.workload {
        let _infallible = write!(line, " of {workload}");
    }
    let _infallible = write!(line, ", known by {}", known_by(victim.evidence));
    if let Some(at) = victim.exited_at {
        let _infallible = write!(line, ", exited {}", stamp(at));
    }
    line
}

fn known_by(evidence: VictimEvidence) -> &'static str {
    match evidence {
        VictimEvidence::ServerLog => "server.log",
        VictimEvidence::Snapshot => "its being a client before",
        VictimEvidence::Xid => "an Xid",
    }
}

fn stamp(at: Timestamp) -> String {
    format!("{at:.3}")
}

/// A cell of a Markdown table: log lines may hold anything, and it is to be read as it is.
fn cell(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '<' => out.push_str("&lt;"),
            '&' => out.push_str("&amp;"),
            '\n' | '\r' => out.push(' '),
            '\\' | '|' | '`' | '*' | '_' | '~' | '[' => out.extend(['\\', character]),
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_is_read_as_it_is() {
        let text = "a|b<img> &lt; [x](http://evil) `c` **d** __e__ ~~f~~\\\n";
        let expected = "a\\|b&lt;img> &amp;lt; \\[x](http://evil) \\`c\\` \\*\\*d\\*\\* \\_\\_e\\_\\_ \\~\\~f\\~\\~\\\\ ";
        assert_eq!(cell(text), expected);
    }
}
