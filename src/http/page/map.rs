//! The map: daemons, their coupled sets with GPUs as boxes, clients by workload.

use jiff::Timestamp;

use super::fates::{self, Entry, Group, Mark, Set};
use super::html::Html;
use super::words::{self, Device, Level, Many, Memory, Named, Process, Span, age, badge};
use crate::engine::incident::Incident;
use crate::engine::snapshot::{DaemonView, DomainView, GpuView, Radius, Scope, Sharing, Snapshot};
use crate::event::{RecoveryAction, ServerStatus};

/// Workloads that are shown one by one in a set, while there are few sets.
const SHOWN: usize = 12;
/// The least that is shown of each of many sets.
const SHOWN_AT_LEAST: usize = 4;
/// Processes in the table of the rest; the API has all.
const LISTED: usize = 512;

/// Draws the node.
pub(super) fn draw(html: &mut Html, snapshot: &Snapshot, now: Timestamp) {
    let (shared, alone): (Vec<Set>, Vec<Set>) =
        fates::sets(snapshot).into_iter().partition(|set| set.domains[0].daemon.is_some());
    let shown = (4 * SHOWN / shared.len().max(1)).clamp(SHOWN_AT_LEAST, SHOWN);
    let pen = Pen { snapshot, now, shown };
    html.raw("<section aria-labelledby=map><h2 id=map>Who dies with whom</h2><div class=map>");
    for daemon in &snapshot.daemons {
        let own = shared.iter().filter(|set| set.domains[0].daemon.as_ref() == Some(&daemon.name));
        pen.daemon(html, daemon, &own.collect::<Vec<_>>());
    }
    if !alone.is_empty() {
        html.raw(group(&alone.iter().collect::<Vec<_>>()))
            .raw("<header><h3>GPUs without MPS</h3></header><div class=sets>");
        for set in &alone {
            pen.set(html, set);
        }
        html.raw("</div></div>");
    }
    let nowhere = fates::without_device(snapshot);
    if !nowhere.is_empty() {
        html.raw("<div class=group><header><h3>Clients whose GPU is not known yet</h3></header>");
        html.raw("<div class=sets><article class=set>");
        pen.workloads(html, "nowhere", &nowhere);
        html.raw("</article></div></div>");
    }
    if snapshot.daemons.is_empty() && alone.is_empty() {
        html.raw("<p class=empty>No MPS control daemon and no GPU has been found. <code>mps-exporter check</code> ");
        html.raw("says what each source sees and what it lacks.</p>");
    }
    html.raw("</div></section>");
}

/// The start of a group, of a width for what is in it.
fn group(sets: &[&Set]) -> &'static str {
    match sets.iter().map(|set| set.domains.len()).sum() {
        0 | 1 => "<div class=\"group small\">",
        2 => "<div class=\"group middle\">",
        _ => "<div class=group>",
    }
}

struct Pen<'a> {
    snapshot: &'a Snapshot,
    now: Timestamp,
    shown: usize,
}

impl Pen<'_> {
    fn daemon(&self, html: &mut Html, daemon: &DaemonView, sets: &[&Set]) {
        let (level, word) = words::daemon_state(daemon.state);
        html.raw(group(sets)).raw("<header><h3>MPS daemon <span class=name>").text(&daemon.name);
        html.raw("</span></h3> ");
        badge(html, level, word);
        for server in self.snapshot.servers.iter().filter(|server| server.daemon == daemon.name) {
            let (level, word) = words::server_state(server.is_up, server.status);
            html.raw(" <span class=fact>server <span class=name>").text(&server.server).raw("</span> ");
            badge(html, level, word);
            html.raw("</span>");
        }
        if let Some(waiting) = daemon.pending_clients.filter(|waiting| *waiting > 0) {
            html.raw(" <span class=fact>");
            badge(html, Level::Warning, "waiting");
            html.raw(" ").text(Many(waiting, "client")).raw(" cannot get on</span>");
        }
        html.raw("</header><div class=sets>");
        for set in sets {
            self.set(html, set);
        }
        if sets.is_empty() {
            html.raw("<p class=empty>No device of this daemon is known.</p>");
        }
        html.raw("</div></div>");
    }

    fn set(&self, html: &mut Html, set: &Set) {
        let is_wide = set.domains.len() > 1;
        html.raw("<article class=\"set").raw(if is_wide { " wide" } else { "" });
        html.raw(if set.incident.is_some() { " hit\"" } else { "\"" })
            .raw(" id=s")
            .text(fates::id(&[&set.domains[0].labels.fault_domain]));
        html.raw("><h4 class=sr>").text(names(set)).raw("</h4>");
        if is_wide {
            html.raw("<p class=coupled>Coupled: one client\u{2019}s fault ");
            html.raw(if set.incident.is_some() { "took " } else { "takes " });
            match set.domains.len() {
                2 => html.raw("both"),
                many => html.raw("all ").text(many),
            };
            html.raw(" GPUs</p>");
        }
        html.raw("<ul class=gpus>");
        set.domains.iter().for_each(|domain| self.gpu(html, domain));
        html.raw("</ul>");
        if let Some(incident) = set.incident {
            self.callout(html, incident);
        }
        takes(html, set.domains[0]);
        self.workloads(html, &set.domains[0].labels.fault_domain, &set.workloads);
        html.raw("</article>");
    }

    fn gpu(&self, html: &mut Html, domain: &DomainView) {
        let gpu = self.snapshot.gpus.iter().find(|gpu| gpu.index.to_string() == *domain.labels.gpu);
        let takes_no_clients = self.snapshot.servers.iter().any(|server| {
            Some(&server.daemon) == domain.daemon.as_ref() && server.status == Some(ServerStatus::Fault)
        });
        let (level, word) = domain_state(domain, gpu, takes_no_clients);
        html.raw("<li class=\"gpu ")
            .raw(level.class())
            .raw("\"><b>")
            .text(Device(&domain.labels))
            .raw("</b> ");
        badge(html, level, word);
        html.raw("<span class=model>").text(domain.model_name.as_deref().unwrap_or("model not known"));
        if let Some(profile) = &domain.gpu_instance_profile {
            html.raw(" ").text(profile);
        }
        html.raw("</span><span class=numbers>");
        if domain.daemon.is_some() {
            match domain.clients {
                Some(clients) => html.text(Many(clients, "client")),
                None => html.raw("clients not known"),
            };
            if let (Some(contexts), Some(limit)) = (domain.contexts, domain.contexts_limit) {
                html.raw(" <meter min=0 max=").text(limit).raw(" high=").text(limit - limit / 10);
                html.raw(" value=").text(contexts).raw(" aria-label=\"contexts in use\">").text(contexts);
                html.raw("</meter> ").text(contexts).raw("/").text(limit).raw(" contexts");
            }
        }
        // What is lost and has not exited still lies on the GPU: the radius, what a fault would kill, leaves it out.
        if domain.recovery_blocking == 0
            && let Some(radius) = radius_of(domain, Scope::Gpu)
            && let Some(clients) = radius.clients
        {
            html.raw(if domain.daemon.is_some() { " \u{b7} " } else { "" });
            html.text(Many(clients, "process"));
            if let Some(bytes) = radius.memory_bytes {
                html.raw(", ").text(Memory(bytes));
            }
        }
        html.raw("</span>");
        self.troubles(html, domain);
        html.raw("</li>");
    }

    fn troubles(&self, html: &mut Html, domain: &DomainView) {
        if let Some(strangers) = domain.bypassing_processes.filter(|strangers| *strangers > 0) {
            html.raw("<span class=trouble>").text(Many(strangers, "process")).raw(" bypass MPS</span>");
        }
        let labels = &domain.labels;
        let mut xids: Vec<_> = self
            .snapshot
            .xids
            .iter()
            .filter(|xid| xid.uuid == labels.uuid && xid.gpu_instance == labels.gpu_instance)
            .filter_map(|xid| Some((xid.count.last?, xid.code?)))
            .collect();
        xids.sort_unstable();
        if let Some((at, code)) = xids.last() {
            html.raw("<span class=trouble>last Xid ").text(code).raw(", ");
            age(html, *at, self.now, " ago");
            html.raw("</span>");
        }
    }

    /// What goes on here, during an incident.
    fn callout(&self, html: &mut Html, incident: &Incident) {
        let is_blocked = !incident.recovery.blocked_by.is_empty();
        let (level, word) = words::incident_state(incident.state, is_blocked);
        html.raw("<div class=callout><p><b>").text(words::cause(incident.cause)).raw("</b> ");
        badge(html, level, word);
        html.raw(" ");
        age(html, incident.started_at, self.now, " ago");
        html.raw(" <a href=\"#i-").text(&incident.id).raw("\">details</a></p><dl><dt>Culprit<dd>");
        match &incident.culprit {
            Some(culprit) => html.text(Named(culprit)),
            None => html.raw("no source names one"),
        };
        let exited = incident.victims.iter().filter(|victim| victim.exited_at.is_some()).count();
        html.raw("<dt>Victims<dd>").text(incident.victims.len()).raw(" lost, ").text(exited).raw(" exited");
        if is_blocked {
            html.raw("<dt>Blocks recovery<dd>");
            blockers(html, incident);
        }
        html.raw("</dl></div>");
    }

    fn workloads(&self, html: &mut Html, place: &str, groups: &[Group]) {
        if groups.is_empty() {
            return;
        }
        html.raw("<div class=workloads>");
        // One row more is no worse than a row that says so.
        let shown = if groups.len() == self.shown + 1 { groups.len() } else { self.shown.min(groups.len()) };
        for group in &groups[..shown] {
            html.raw("<details id=w")
                .text(fates::id(&[place, &group.name]))
                .raw("><summary><span class=name>");
            html.text(&group.name).raw("</span>");
            cells(html, std::slice::from_ref(group));
            counts(html, group);
            html.raw("</summary>");
            self.table(html, std::slice::from_ref(group), false);
            html.raw("</details>");
        }
        let rest = &groups[shown..];
        if !rest.is_empty() {
            let clients: usize = rest.iter().map(|group| group.entries.len()).sum();
            html.raw("<details id=r").text(fates::id(&[place])).raw("><summary><span>");
            html.text(Many(rest.len() as u64, "more workload")).raw("</span>");
            cells(html, rest);
            html.raw("<span class=count>").text(Many(clients as u64, "client")).raw("</span></summary>");
            self.table(html, rest, true);
            html.raw("</details>");
        }
        html.raw("</div>");
    }

    fn table(&self, html: &mut Html, groups: &[Group], with_workload: bool) {
        html.raw("<div class=scroll><table><thead><tr>");
        html.raw(if with_workload { "<th>workload" } else { "" });
        html.raw("<th>process<th>GPU<th>memory<th>work since<th>state<tbody>");
        let entries = groups.iter().flat_map(|group| group.entries.iter().map(move |entry| (group, entry)));
        for (group, entry) in entries.take(LISTED) {
            html.raw("<tr>");
            if with_workload {
                html.raw("<td class=name>").text(&group.name);
            }
            html.raw("<td class=name>").text(Process(entry.pid, entry.command)).raw("<td>");
            html.text(self.places(entry)).raw("<td>");
            if let Some(bytes) = entry.memory {
                html.text(Memory(bytes));
            }
            html.raw("<td>");
            if let Some((at, is_checkpoint)) = entry.work_since {
                html.text(Span(words::since(at, self.now))).raw(if is_checkpoint {
                    " (checkpoint)"
                } else {
                    ""
                });
            }
            html.raw("<td>");
            state(html, entry);
        }
        html.raw("</table></div>");
        let all: usize = groups.iter().map(|group| group.entries.len()).sum();
        if all > LISTED {
            html.raw("<p>")
                .text(all - LISTED)
                .raw(" more: <a href=\"api/v1/fault-domains\">all as JSON</a></p>");
        }
    }

    fn places(&self, entry: &Entry) -> String {
        let domains = entry.domains.iter();
        let names = domains.filter_map(|label| {
            let domain =
                self.snapshot.domains.iter().find(|domain| *domain.labels.fault_domain == **label)?;
            Some(words::short_device(domain))
        });
        names.collect::<Vec<_>>().join(", ")
    }
}

/// What a fault here takes.
fn takes(html: &mut Html, domain: &DomainView) {
    match (domain.daemon.as_ref(), domain.sharing) {
        (Some(_), _) => {}
        (None, Some(Sharing::TimeSlicing)) => {
            html.raw("<p class=radius>Time slicing: each process dies alone.</p>");
            return;
        }
        (None, _) => {
            html.raw("<p class=radius>Not shared: a process dies alone.</p>");
            return;
        }
    }
    let Some(application) = radius_of(domain, Scope::Application) else { return };
    match application.clients {
        None => {
            html.raw("<p class=radius>Who is on it is not known.</p>");
            return;
        }
        Some(0) => return,
        Some(clients) => {
            html.raw("<p class=radius>A client\u{2019}s fault kills <b>").text(Many(clients, "client"));
        }
    }
    html.raw("</b>");
    if let Some(workloads) = application.workloads {
        html.raw(" of <b>").text(Many(workloads, "workload")).raw("</b>");
    }
    if let Some(bytes) = application.memory_bytes {
        html.raw(", ").text(Memory(bytes));
    }
    if let Some(work) = application.work_at_risk {
        html.raw(", <span title=\"process time since the last checkpoint, or since the start\">");
        html.text(Span(work)).raw(" of work</span>");
    }
    if let Some(clients) = radius_of(domain, Scope::Server).and_then(|radius| radius.clients) {
        html.raw(". The server\u{2019}s death: ").text(clients);
    }
    html.raw(".</p>");
}

/// Who blocks recovery, by name.
pub(super) fn blockers(html: &mut Html, incident: &Incident) {
    for (index, pid) in incident.recovery.blocked_by.iter().enumerate() {
        let victim = incident.victims.iter().find(|victim| victim.pid == *pid);
        html.raw(if index > 0 { "; " } else { "" });
        html.text(Process(*pid, victim.and_then(|victim| victim.command.as_deref())));
        if let Some(workload) = victim.and_then(|victim| victim.workload.as_ref()) {
            html.raw(", ").text(workload);
        }
    }
}

fn names(set: &Set) -> String {
    let names: Vec<String> = set.domains.iter().map(|domain| Device(&domain.labels).to_string()).collect();
    names.join(" and ")
}

fn domain_state(domain: &DomainView, gpu: Option<&GpuView>, takes_no_clients: bool) -> (Level, &'static str) {
    let action = gpu.and_then(|gpu| gpu.recovery_action).filter(|action| *action != RecoveryAction::None);
    if gpu.is_some_and(|gpu| gpu.is_up == Some(false)) {
        return (Level::Bad, "lost");
    }
    if domain.fault_started_at.is_some() {
        return (Level::Bad, if domain.recovery_blocking > 0 { "blocked" } else { "in fault" });
    }
    match (action, domain.clients) {
        (Some(action), _) => (Level::Warning, words::recovery_action(action)),
        (None, _) if domain.daemon.is_none() && gpu.is_some_and(|gpu| gpu.is_up == Some(true)) => {
            (Level::Good, "well")
        }
        (None, None) => (Level::Unknown, "unknown"),
        // The fault is on another GPU, and the server refuses work on this one too.
        (None, Some(_)) if takes_no_clients => (Level::Warning, "takes no new clients"),
        (None, Some(0)) => (Level::Unknown, "no clients"),
        (None, Some(_)) => (Level::Good, "well"),
    }
}

fn radius_of(domain: &DomainView, wanted: Scope) -> Option<&Radius> {
    domain.radius.iter().find(|(scope, _)| *scope == wanted).map(|(_, radius)| radius)
}

/// One square for each client. The words beside it say the same.
fn cells(html: &mut Html, groups: &[Group]) {
    html.raw("<span class=cells aria-hidden=true>");
    for entry in groups.iter().flat_map(|group| &group.entries).take(LISTED) {
        html.raw(match (entry.is_culprit, entry.mark) {
            (true, _) => "<i class=c></i>",
            (_, Mark::Active) => "<i></i>",
            (_, Mark::Exited) => "<i class=x></i>",
            (_, Mark::Lost) => "<i class=l></i>",
            (_, Mark::Blocks) => "<i class=b></i>",
        });
    }
    html.raw("</span>");
}

fn counts(html: &mut Html, group: &Group) {
    html.raw("<span class=count>");
    if group.entries.iter().any(|entry| entry.is_culprit) {
        badge(html, Level::Bad, "culprit");
        html.raw(" ");
    }
    if group.count(Mark::Blocks) > 0 {
        badge(html, Level::Warning, "blocks recovery");
        html.raw(" ");
    }
    let lost = group.entries.len() - group.count(Mark::Active);
    if lost > 0 {
        html.text(lost).raw(" of ");
    }
    html.text(Many(group.entries.len() as u64, "client")).raw(if lost > 0 { " lost" } else { "" });
    if let Some(bytes) = group.memory() {
        html.raw(" \u{b7} ").text(Memory(bytes));
    }
    html.raw("</span>");
}

fn state(html: &mut Html, entry: &Entry) {
    if entry.is_culprit {
        badge(html, Level::Bad, "culprit");
        html.raw(" ");
    }
    match entry.mark {
        Mark::Active => badge(html, Level::Good, "active"),
        Mark::Exited => badge(html, Level::Unknown, "lost, exited"),
        Mark::Lost => badge(html, Level::Bad, "lost"),
        Mark::Blocks => badge(html, Level::Warning, "lost, blocks recovery"),
    }
}
