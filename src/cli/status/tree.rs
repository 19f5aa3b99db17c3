//! A picture of a node as lines: incidents first, then who dies with whom, then what is not seen.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::picture::{Client, Daemon, Domain, Picture, Radius, Server};
use super::screen::{Line, Style};
use super::words::{between, bytes, count, duration};
use crate::cli::text::wrap_into;
use crate::engine::incident::{CulpritEvidence, Incident, IncidentState};
use crate::metrics::labels::LabelValue as _;

/// Clients of one workload that are named one by one.
const CLIENTS_SHOWN: usize = 6;
/// Workloads of one coupled set that are shown.
const WORKLOADS_SHOWN: usize = 24;
/// Lost clients that an incident names.
const VICTIMS_SHOWN: usize = 8;

/// Lines of the picture, for a terminal that is `width` columns wide. `is_whole`: every client, however many.
pub fn lines(picture: &Picture, width: usize, is_whole: bool) -> Vec<Line> {
    let view = View { picture, width, is_whole };
    let mut lines = vec![view.summary(), Line::default()];
    lines.extend(view.incidents());
    if picture.daemons.is_empty() {
        lines.push(Line::new(Style::Uncertain, "No MPS control daemon is visible."));
    }
    for daemon in &picture.daemons {
        view.daemon(daemon).draw("", "", &mut lines);
    }
    lines.extend(view.without_mps());
    lines.push(Line::default());
    lines.extend(view.sources());
    lines
}

struct View<'p> {
    picture: &'p Picture,
    width: usize,
    is_whole: bool,
}

/// A line of the tree, with what belongs to it below.
struct Branch {
    line: Line,
    notes: Vec<Line>,
    below: Vec<Branch>,
}

impl Branch {
    fn leaf(line: Line) -> Branch {
        Branch { line, notes: Vec::new(), below: Vec::new() }
    }

    /// `first` is drawn before its own line, `rest` before all others.
    fn draw(self, first: &str, rest: &str, lines: &mut Vec<Line>) {
        lines.push(self.line.behind(first));
        let bar = if self.below.is_empty() { "  " } else { "│ " };
        lines.extend(self.notes.into_iter().map(|note| note.behind(&format!("{rest}{bar}"))));
        let last = self.below.len().saturating_sub(1);
        for (index, branch) in self.below.into_iter().enumerate() {
            let (fork, bar) = if index == last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
            branch.draw(&format!("{rest}{fork}"), &format!("{rest}{bar}"), lines);
        }
    }
}

/// Domains whose clients die together.
struct Coupled<'p> {
    domains: Vec<&'p Domain>,
    clients: Vec<&'p Client>,
}

impl<'p> View<'p> {
    fn summary(&self) -> Line {
        let picture = self.picture;
        let with_mps = picture.domains.iter().filter(|domain| domain.daemon.is_some()).count();
        let up = picture.servers.iter().filter(|server| server.is_up == Some(true)).count();
        let text = format!(
            "{}, {}, {} on {}",
            count(picture.daemons.len() as u64, "MPS control daemon", "MPS control daemons"),
            count(up as u64, "server", "servers"),
            count(picture.clients.len() as u64, "client", "clients"),
            count(with_mps as u64, "fault domain", "fault domains"),
        );
        let at = picture.at.strftime("%Y-%m-%d %H:%M:%S UTC").to_string();
        Line::new(Style::Strong, &text).and(Style::Faint, &format!("   {at}"))
    }

    fn open_incidents(&self) -> impl Iterator<Item = &'p Incident> {
        self.picture.incidents.iter().filter(|incident| incident.state != IncidentState::Closed)
    }

    fn incidents(&self) -> Vec<Line> {
        let mut lines: Vec<Line> =
            self.open_incidents().flat_map(|incident| self.incident(incident)).collect();
        if lines.is_empty() {
            let text = match self.picture.incidents.first() {
                None => "No incident.".to_owned(),
                Some(last) => format!(
                    "No open incident. The last one, {} ago: {} on {}, {}.",
                    between(last.started_at, self.picture.at),
                    cause(last),
                    last.fault_domains.join(", "),
                    lost(last),
                ),
            };
            lines.push(Line::new(Style::Faint, &text));
        }
        lines.push(Line::default());
        lines
    }

    fn incident(&self, incident: &Incident) -> Vec<Line> {
        let state = if incident.state == IncidentState::Open { "open" } else { "recovering" };
        let heading = format!(
            "{}: {} on {}, {} ago, {state}",
            if incident.mass_client_loss { "MASS CLIENT LOSS" } else { "INCIDENT" },
            cause(incident),
            incident.fault_domains.join(", "),
            between(incident.started_at, self.picture.at),
        );
        let mut lines = vec![Line::new(Style::Bad, &heading)];
        let mut row = |heading: &str, text: &str| self.prose(&mut lines, &format!("  {heading:<16}"), text);
        let culprit = incident.culprit.as_ref().map_or_else(
            || "not named by any source".to_owned(),
            |it| {
                let workload = it.workload.as_ref().map_or(String::new(), |it| format!(", {it}"));
                let known = match it.evidence {
                    CulpritEvidence::ServerLog => "server.log",
                    CulpritEvidence::XidChannel => "the Xid's channel",
                };
                format!("{}{workload}; named by {known}", process(it.command.as_deref(), it.pid))
            },
        );
        row("culprit", &culprit);
        let mut names: Vec<String> = incident
            .victims
            .iter()
            .take(if self.is_whole { usize::MAX } else { VICTIMS_SHOWN })
            .map(|victim| process(victim.command.as_deref(), victim.pid))
            .collect();
        if names.len() < incident.victims.len() {
            names.push(format!("and {} more", incident.victims.len() - names.len()));
        }
        let names = if names.is_empty() { String::new() } else { format!(": {}", names.join(", ")) };
        row("victims", &format!("{}{names}", lost(incident)));
        if !incident.xids.is_empty() {
            let mut codes: Vec<u32> = incident.xids.iter().map(|xid| xid.xid).collect();
            codes.sort_unstable();
            codes.dedup();
            let codes: Vec<String> = codes.iter().map(ToString::to_string).collect();
            row("Xids", &format!("{} (mps-exporter explain {})", codes.join(", "), codes.join(" ")));
        }
        if let Some(seconds) = incident.work_lost_seconds {
            row("work lost", &duration(seconds));
        }
        if !incident.recovery.blocked_by.is_empty() {
            let blockers: Vec<String> = incident
                .recovery
                .blocked_by
                .iter()
                .map(|pid| {
                    let victim = incident.victims.iter().find(|victim| victim.pid == *pid);
                    process(victim.and_then(|victim| victim.command.as_deref()), *pid)
                })
                .collect();
            row(
                "blocks recovery",
                &format!("{}: the server takes no new client until they have exited", blockers.join(", ")),
            );
        }
        lines
    }

    fn daemon(&self, daemon: &'p Daemon) -> Branch {
        let mut line = Line::new(Style::Strong, &format!("daemon {}", daemon.name))
            .plain("  ")
            .and(state_style(&daemon.state), &daemon.state);
        if let Some(pid) = daemon.pid {
            line = line.plain(&format!("  pid {pid}"));
        }
        if let Some(version) = &daemon.version {
            line = line.plain(&format!("  version {version}"));
        }
        line = line.and(Style::Faint, &format!("  {}", daemon.pipe_directory));
        let mut notes = Vec::new();
        if let Some(pending) = daemon.pending_clients.filter(|pending| *pending > 0) {
            let text = format!("{} for a server", count(pending, "client waits", "clients wait"));
            notes.push(Line::new(Style::Uncertain, &text));
        }
        let servers: Vec<&Server> =
            self.picture.servers.iter().filter(|server| server.daemon == daemon.name).collect();
        let mut by_server: BTreeMap<Option<&str>, Vec<Coupled<'p>>> = BTreeMap::new();
        for set in self.coupled(daemon) {
            let owner = set.clients.first().map(|client| client.server.as_str());
            let only = servers.first().filter(|_| servers.len() == 1).map(|server| server.label.as_str());
            by_server.entry(owner.or(only)).or_default().push(set);
        }
        let mut below: Vec<Branch> = servers
            .iter()
            .map(|server| self.server(server, &by_server.remove(&Some(&*server.label)).unwrap_or_default()))
            .collect();
        // Devices that no server holds at the moment.
        below.extend(by_server.into_values().flatten().map(|set| self.set(&set)));
        Branch { line, notes, below }
    }

    fn server(&self, server: &'p Server, sets: &[Coupled<'p>]) -> Branch {
        let state = match (server.is_up, server.status.as_deref()) {
            (Some(false), _) => "down",
            (None, _) => "unknown",
            (Some(true), None) => "up, state unknown",
            (Some(true), Some(status)) => status,
        };
        let mut line = Line::default()
            .plain(&format!("server {}  ", server.label))
            .and(if state == "down" { Style::Uncertain } else { state_style(state) }, state);
        if let Some(pid) = server.pid {
            line = line.plain(&format!("  pid {pid}"));
        }
        if let Some(clients) = server.clients {
            line = line.plain(&format!("  {}", count(clients, "client", "clients")));
        }
        let mut notes = Vec::new();
        if state == "fault" {
            notes.push(Line::new(Style::Bad, "It takes no new client on any of its GPUs."));
        }
        if let Some(failure) = server.last_start_failure.as_ref().filter(|_| server.is_up != Some(true)) {
            notes.push(Line::new(Style::Uncertain, &format!("Its last start failed: {failure}")));
        }
        let mut below: Vec<Branch> = sets.iter().map(|set| self.set(set)).collect();
        let homeless: Vec<&Client> = self
            .picture
            .clients
            .iter()
            .filter(|it| it.daemon == server.daemon && it.server == server.label && it.domains.is_empty())
            .collect();
        if !homeless.is_empty() {
            let line = Line::new(Style::Uncertain, "device not known yet");
            below.push(Branch { line, notes: Vec::new(), below: self.workloads(&homeless, false) });
        }
        Branch { line, notes, below }
    }

    /// The daemon's domains, by who dies with whom.
    fn coupled(&self, daemon: &Daemon) -> Vec<Coupled<'p>> {
        let mut sets: BTreeMap<&str, Vec<&Domain>> = BTreeMap::new();
        let mut order = Vec::new();
        for domain in self.picture.domains.iter().filter(|it| it.daemon.as_ref() == Some(&daemon.name)) {
            let key = domain.coupled_with.iter().min().unwrap_or(&domain.label).as_str();
            if !sets.contains_key(key) {
                order.push(key);
            }
            sets.entry(key).or_default().push(domain);
        }
        order
            .into_iter()
            .filter_map(|key| sets.remove(key))
            .map(|domains| {
                let is_on = |client: &&Client| {
                    client.daemon == daemon.name
                        && domains.iter().any(|domain| client.domains.contains(&domain.label))
                };
                let clients = self.picture.clients.iter().filter(is_on).collect();
                Coupled { domains, clients }
            })
            .collect()
    }

    fn set(&self, set: &Coupled<'p>) -> Branch {
        let labels: Vec<&str> = set.domains.iter().map(|domain| domain.label.as_str()).collect();
        let mut line = Line::new(Style::Strong, &labels.join(" + "));
        if set.domains.len() > 1 {
            line = line.and(Style::Uncertain, "  coupled: they share clients");
        }
        if let Some(model) = set.domains.first().and_then(|domain| domain.model_name.as_deref()) {
            let profile = set.domains.first().and_then(|domain| domain.gpu_instance_profile.as_deref());
            line = line.and(
                Style::Faint,
                &format!("  {model}{}", profile.map_or(String::new(), |it| format!(" {it}"))),
            );
        }
        let mut notes = Vec::new();
        let fault = set.domains.iter().filter_map(|domain| domain.fault_started_at).min();
        if let Some(since) = fault {
            let blocking = set.domains.iter().map(|domain| domain.recovery_blocking).max().unwrap_or(0);
            let blocked = match blocking {
                0 => String::new(),
                number => format!("; {} recovery", count(number, "process blocks", "processes block")),
            };
            notes.push(Line::new(
                Style::Bad,
                &format!("FAULT for {}{blocked}", between(since, self.picture.at)),
            ));
        }
        for (gpu, action) in set.domains.iter().filter_map(|domain| self.gpu_trouble(domain)) {
            notes.push(Line::new(Style::Bad, &format!("GPU {gpu} {action}")));
        }
        notes.extend(radius_lines(&set.domains));
        for domain in &set.domains {
            if let Some(number) = domain.bypassing_processes.filter(|number| *number > 0) {
                let text =
                    format!("{} use GPU {} beside MPS", count(number, "process", "processes"), domain.gpu);
                notes.push(Line::new(Style::Uncertain, &text));
            }
        }
        Branch { line, notes, below: self.workloads(&set.clients, set.domains.len() > 1) }
    }

    /// What is wrong with the GPU of a domain.
    fn gpu_trouble(&self, domain: &'p Domain) -> Option<(&'p str, String)> {
        let gpu = self.picture.gpus.iter().find(|gpu| gpu.index.to_string() == domain.gpu)?;
        if gpu.is_up == Some(false) {
            return Some((&domain.gpu, "is out of NVML's reach".to_owned()));
        }
        let action = gpu.recovery_action.as_deref().filter(|action| *action != "none")?;
        Some((&domain.gpu, format!("asks for recovery: {}", action.replace('_', " "))))
    }

    /// `is_coupled`: they are on several devices, and each is shown with its own.
    fn workloads(&self, clients: &[&'p Client], is_coupled: bool) -> Vec<Branch> {
        let mut groups: Vec<(String, Vec<&Client>)> = Vec::new();
        let mut index: BTreeMap<Result<(&str, &str), u32>, usize> = BTreeMap::new();
        for client in clients {
            let key = client.workload.as_ref().map(crate::identity::Workload::key).ok_or(client.pid);
            let at = *index.entry(key).or_insert_with(|| {
                let name = client.workload.as_ref().map_or_else(String::new, ToString::to_string);
                groups.push((name, Vec::new()));
                groups.len() - 1
            });
            groups[at].1.push(client);
        }
        // Who has lost a client comes first; nothing else moves.
        groups.sort_by_key(|(_, clients)| !clients.iter().any(|client| client.state == "lost"));
        let shown = if self.is_whole { groups.len() } else { WORKLOADS_SHOWN };
        let hidden: Vec<usize> = groups.iter().skip(shown).map(|(_, clients)| clients.len()).collect();
        let mut branches: Vec<Branch> = groups
            .iter()
            .take(shown)
            .map(|(name, clients)| self.workload(name, clients, is_coupled))
            .collect();
        if !hidden.is_empty() {
            let text = format!(
                "… {} with {} (--all shows them)",
                count(hidden.len() as u64, "more workload", "more workloads"),
                count(hidden.iter().sum::<usize>() as u64, "client", "clients"),
            );
            branches.push(Branch::leaf(Line::new(Style::Faint, &text)));
        }
        branches
    }

    fn workload(&self, name: &str, clients: &[&Client], is_coupled: bool) -> Branch {
        if let [client] = clients {
            let separator = if name.is_empty() { "" } else { "  " };
            return Branch::leaf(self.client(
                Line::default().plain(name).plain(separator),
                client,
                is_coupled,
            ));
        }
        let memory: Option<u64> = clients.iter().map(|client| client.memory_bytes).sum();
        let memory = memory.map_or(String::new(), |memory| format!("  {}", bytes(memory)));
        let line = Line::default()
            .plain(&format!("{name}  {}{memory}", count(clients.len() as u64, "client", "clients")));
        let mut sorted = clients.to_vec();
        sorted.sort_by_key(|client| client.state != "lost");
        let shown = if self.is_whole { sorted.len() } else { CLIENTS_SHOWN };
        let mut below: Vec<Branch> = sorted
            .iter()
            .take(shown)
            .map(|client| Branch::leaf(self.client(Line::default(), client, is_coupled)))
            .collect();
        if sorted.len() > shown {
            let text = format!("… {} more (--all shows them)", sorted.len() - shown);
            below.push(Branch::leaf(Line::new(Style::Faint, &text)));
        }
        Branch { line, notes: Vec::new(), below }
    }

    fn client(&self, line: Line, client: &Client, is_coupled: bool) -> Line {
        let mut line = line.plain(&process(client.command.as_deref(), client.pid));
        if is_coupled && !client.domains.is_empty() {
            line = line.plain(&format!("  on {}", client.domains.join(", ")));
        }
        if let Some(memory) = client.memory_bytes {
            line = line.plain(&format!("  {}", bytes(memory)));
        }
        let saved =
            client.checkpoint_at.map(|at| format!("  checkpoint {} ago", between(at, self.picture.at)));
        let run = client.started_at.map(|at| format!("  runs {}", between(at, self.picture.at)));
        if let Some(text) = saved.or(run) {
            line = line.and(Style::Faint, &text);
        }
        if self.is_culprit(client) {
            line = line.and(Style::Bad, "  culprit");
        }
        match client.state.as_str() {
            "active" => line,
            "lost" => line.and(Style::Bad, "  lost, has not exited"),
            other => line.and(Style::Uncertain, &format!("  {other}")),
        }
    }

    fn is_culprit(&self, client: &Client) -> bool {
        self.open_incidents().any(|incident| {
            incident.daemon.as_deref() == Some(&client.daemon)
                && incident
                    .culprit
                    .as_ref()
                    .is_some_and(|it| it.evidence == CulpritEvidence::ServerLog && it.pid == client.pid)
        })
    }

    fn without_mps(&self) -> Vec<Line> {
        let domains = self.picture.domains.iter().filter(|domain| domain.daemon.is_none());
        domains
            .map(|domain| {
                let (sharing, meaning) = match domain.sharing.as_deref() {
                    Some("time_slicing") => ("time slicing", "  a fault takes its own process only"),
                    Some("exclusive") => ("exclusive", "  one process at a time"),
                    Some(other) => (other, ""),
                    None => ("unknown how it is shared", ""),
                };
                let mut line =
                    Line::new(Style::Strong, &domain.label).plain(&format!("  without MPS: {sharing}"));
                if let Some((_, trouble)) = self.gpu_trouble(domain) {
                    line = line.and(Style::Bad, &format!("  {trouble}"));
                }
                let model = domain.model_name.as_deref().map_or(String::new(), |model| format!("  {model}"));
                line.plain(meaning).and(Style::Faint, &model)
            })
            .collect()
    }

    fn sources(&self) -> Vec<Line> {
        let picture = self.picture;
        let blind: Vec<_> = picture.sources.iter().filter(|source| !source.is_up).collect();
        let mut lines = Vec::new();
        if picture.sources.is_empty() {
            lines.push(Line::new(Style::Uncertain, "No source has told anything yet."));
        } else if blind.is_empty() {
            let text = format!("All {} sources work.", picture.sources.len());
            lines.push(Line::new(Style::Good, &text));
        } else {
            let text = format!(
                "{} of {} blind; `mps-exporter check` says what to change:",
                count(blind.len() as u64, "source", "sources"),
                picture.sources.len()
            );
            lines.push(Line::new(Style::Uncertain, &text));
        }
        for source in blind {
            let name = place(&source.name, source.daemon.as_deref());
            self.prose(
                &mut lines,
                &format!("  {name}: "),
                source.reason.as_deref().unwrap_or("no reason given"),
            );
        }
        for it in &picture.disagreements {
            let name = place(&it.source, it.daemon.as_deref());
            self.prose(&mut lines, &format!("  {name} disagrees: "), &it.about);
        }
        lines
    }

    /// A heading, and text that goes on below itself.
    fn prose(&self, lines: &mut Vec<Line>, heading: &str, text: &str) {
        let indent = heading.chars().count();
        let mut wrapped = heading.to_owned();
        wrap_into(&mut wrapped, text, indent, self.width);
        lines.extend(wrapped.lines().map(|line| Line::default().plain(line)));
    }
}

/// What each kind of fault would take, alike ones on one line.
fn radius_lines(domains: &[&Domain]) -> Vec<Line> {
    let Some(first) = domains.first() else { return Vec::new() };
    let mut rows: Vec<(String, Option<Radius>)> = vec![
        ("client fault".to_owned(), first.radius.get("application").copied()),
        ("server exit".to_owned(), first.radius.get("server").copied()),
    ];
    for domain in domains {
        let name = if domain.gpu.is_empty() { &domain.label } else { &domain.gpu };
        rows.push((format!("loss of GPU {name}"), domain.radius.get("gpu").copied()));
    }
    let mut merged: Vec<(String, Radius)> = Vec::new();
    for (what, radius) in rows {
        let Some(radius) = radius else { continue };
        match merged.last_mut() {
            Some((before, same)) if *same == radius => {
                before.push_str(" or ");
                before.push_str(&what);
            }
            _ => merged.push((what, radius)),
        }
    }
    let line =
        |(what, radius): (String, Radius)| Line::default().plain(&format!("{what} {}", radius_text(&radius)));
    merged.into_iter().map(line).collect()
}

fn radius_text(radius: &Radius) -> String {
    let Some(clients) = radius.clients else { return "takes an unknown number".to_owned() };
    if clients == 0 {
        return "takes nobody".to_owned();
    }
    let mut text = format!("takes {}", count(clients, "process", "processes"));
    if let Some(workloads) = radius.workloads {
        let _infallible = write!(text, " of {}", count(workloads, "workload", "workloads"));
    }
    if let Some(memory) = radius.memory_bytes {
        let _infallible = write!(text, ", {}", bytes(memory));
    }
    if let Some(seconds) = radius.work_at_risk_seconds.filter(|seconds| *seconds > 0.0) {
        let _infallible = write!(text, ", {} of work", duration(seconds));
    }
    text
}

fn state_style(state: &str) -> Style {
    match state {
        "serving" | "active" => Style::Good,
        "idle" => Style::Plain,
        "wedged" | "down" | "stale" | "fault" => Style::Bad,
        _ => Style::Uncertain,
    }
}

fn cause(incident: &Incident) -> String {
    match incident.cause.label() {
        "server_exit" => "server exit".to_owned(),
        "gpu" => "GPU error".to_owned(),
        label => label.to_owned(),
    }
}

fn lost(incident: &Incident) -> String {
    format!("{} of {} lost", incident.victims.len(), count(incident.clients_before, "client", "clients"))
}

fn process(command: Option<&str>, pid: u32) -> String {
    format!("{} {pid}", command.unwrap_or("pid"))
}

fn place(source: &str, daemon: Option<&str>) -> String {
    daemon.map_or_else(|| source.to_owned(), |daemon| format!("{source} of {daemon}"))
}
