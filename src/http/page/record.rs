//! What happened, and what the exporter itself can see.

use jiff::Timestamp;

use super::html::Html;
use super::map::blockers;
use super::words::{self, Level, Many, Named, Process, Span, age, badge};
use super::{verdict, words::since};
use crate::engine::incident::{Incident, IncidentState};
use crate::engine::snapshot::Snapshot;

/// Incidents on the page; the API and the journal have more.
const INCIDENTS: usize = 20;
/// Victims of an incident that are named.
const VICTIMS: usize = 100;
/// Lines of evidence that are shown.
const LINES: usize = 40;

/// The incidents, newest first.
pub(super) fn incidents(html: &mut Html, snapshot: &Snapshot, now: Timestamp) {
    html.raw("<section aria-labelledby=incidents><h2 id=incidents>Incidents</h2>");
    if snapshot.incidents.is_empty() {
        html.raw("<p class=empty>None since the exporter\u{2019}s record begins.</p>");
    }
    for incident in snapshot.incidents.iter().take(INCIDENTS) {
        entry(html, incident, now);
    }
    if snapshot.incidents.len() > INCIDENTS {
        html.raw("<p class=empty>").text(snapshot.incidents.len() - INCIDENTS);
        html.raw(" older ones: <a href=\"api/v1/incidents\">all as JSON</a></p>");
    }
    html.raw("</section>");
}

fn entry(html: &mut Html, incident: &Incident, now: Timestamp) {
    let is_over = incident.state == IncidentState::Closed;
    let is_blocked = !incident.recovery.blocked_by.is_empty();
    let (level, word) = words::incident_state(incident.state, is_blocked);
    html.raw("<details class=incident id=\"i-").text(&incident.id).raw(if is_over {
        "\">"
    } else {
        "\" open>"
    });
    html.raw("<summary>");
    badge(html, level, word);
    html.raw("<span class=what>").text(words::cause(incident.cause)).raw("</span><span>");
    html.text(verdict::devices(incident)).raw("</span><span>").text(incident.victims.len());
    html.raw(" of ").text(Many(incident.clients_before, "client")).raw(" lost</span>");
    if let Some(culprit) = &incident.culprit {
        html.raw("<span>by <span class=name>").text(Process(culprit.pid, culprit.command.as_deref()));
        html.raw("</span></span>");
    }
    html.raw("<span class=count>");
    age(html, incident.started_at, now, " ago");
    html.raw("</span></summary><dl><dt>Began<dd>").text(words::full(incident.started_at));
    if incident.caught_up {
        html.raw(" (found after a restart of the exporter)");
    }
    html.raw("<dt>Culprit<dd>");
    match &incident.culprit {
        Some(culprit) => html
            .text(Named(culprit))
            .raw(" <small>")
            .raw(words::culprit_evidence(culprit.evidence))
            .raw("</small>"),
        None => html.raw("no source names one"),
    };
    html.raw("<dt>Recovery<dd>");
    recovery(html, incident);
    if !incident.xids.is_empty() {
        html.raw("<dt>Xids<dd>");
        for (index, xid) in incident.xids.iter().enumerate() {
            html.raw(if index > 0 { ", " } else { "" }).text(xid.xid);
            if let Some(pid) = xid.pid {
                html.raw(" (pid ").text(pid).raw(")");
            }
            if xid.count > 1 {
                html.raw(" \u{d7} ").text(xid.count);
            }
        }
    }
    if let Some(seconds) = incident.work_lost_seconds {
        let lost = std::time::Duration::try_from_secs_f64(seconds).unwrap_or_default();
        html.raw("<dt>Work lost<dd>").text(Span(lost)).raw(" of process time");
    }
    html.raw("<dt>Incident<dd class=name>").text(&incident.id).raw("</dl>");
    victims(html, incident);
    evidence(html, incident);
    html.raw("</details>");
}

fn recovery(html: &mut Html, incident: &Incident) {
    if !incident.recovery.blocked_by.is_empty() {
        html.raw("blocked by ");
        blockers(html, incident);
    } else if let Some(at) = incident.recovery.recovered_at {
        html.raw("after ").text(Span(since(incident.started_at, at))).raw(", at ").text(words::full(at));
    } else if incident.state == IncidentState::Closed {
        html.raw("not needed, or not seen");
    } else {
        html.raw("under way");
    }
}

fn victims(html: &mut Html, incident: &Incident) {
    if incident.victims.is_empty() {
        return;
    }
    html.raw(
        "<div class=scroll><table><caption>Victims</caption><thead><tr><th>process<th>workload<th>known by",
    );
    html.raw("<th>work lost<th>exited<tbody>");
    for victim in incident.victims.iter().take(VICTIMS) {
        html.raw("<tr><td class=name>").text(Process(victim.pid, victim.command.as_deref()));
        html.raw("<td class=name>").text(words::workload(victim.workload.as_ref())).raw("<td>");
        html.raw(words::victim_evidence(victim.evidence)).raw("<td>");
        if let Some(seconds) = victim.work_lost_seconds {
            html.text(Span(std::time::Duration::from_secs(seconds)));
        }
        html.raw("<td>");
        match victim.exited_at {
            Some(at) => html.raw("after ").text(Span(since(incident.started_at, at))),
            None if incident.state == IncidentState::Closed => html.raw("not seen"),
            None => html.raw("not yet"),
        };
    }
    html.raw("</table></div>");
    if incident.victims.len() > VICTIMS {
        html.raw("<p>").text(incident.victims.len() - VICTIMS);
        html.raw(" more: <a href=\"api/v1/incidents\">all as JSON</a></p>");
    }
}

fn evidence(html: &mut Html, incident: &Incident) {
    if incident.evidence.is_empty() {
        return;
    }
    html.raw("<h5>Evidence</h5><ol class=evidence>");
    for line in incident.evidence.iter().take(LINES) {
        html.raw("<li><span>")
            .text(line.at.strftime("%H:%M:%S%.3f"))
            .raw("</span> <span>")
            .text(&line.source);
        html.raw("</span> <code>").text(&line.text).raw("</code></li>");
    }
    html.raw("</ol>");
}

/// The sources, those that are blind first.
pub(super) fn sources(html: &mut Html, snapshot: &Snapshot, now: Timestamp) {
    let mut sources: Vec<_> = snapshot.sources.iter().collect();
    sources.sort_by_key(|source| source.is_up);
    html.raw("<section aria-labelledby=sources><h2 id=sources>What is seen</h2>");
    for disagreement in &snapshot.disagreements {
        html.raw("<p class=disagreement>");
        badge(html, Level::Warning, "disagreement");
        html.raw(" ").raw(words::source(disagreement.source)).raw(": ").text(&disagreement.about).raw("</p>");
    }
    html.raw("<ul class=sources>");
    for source in sources {
        html.raw("<li>");
        badge(
            html,
            if source.is_up { Level::Good } else { Level::Bad },
            if source.is_up { "sees" } else { "blind" },
        );
        html.raw(" <b>").raw(words::source(source.source)).raw("</b>");
        if let Some(daemon) = &source.daemon {
            html.raw(" <span class=name>").text(daemon).raw("</span>");
        }
        if let Some(reason) = &source.reason {
            html.raw(" <span class=reason>").text(reason).raw("</span>");
        }
        if !source.is_up {
            html.raw(" <span class=reason>");
            match source.last_success {
                Some(at) => {
                    html.raw("last saw something ");
                    age(html, at, now, " ago");
                }
                None => _ = html.raw("has never seen anything"),
            }
            html.raw("</span>");
        }
        html.raw("</li>");
    }
    if snapshot.sources.is_empty() {
        html.raw("<li class=empty>No source has reported yet.</li>");
    }
    html.raw("</ul></section>");
}
