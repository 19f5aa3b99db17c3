//! The owner of the whole state: takes events, keeps deadlines, gives effects and snapshots.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::case::Cases;
use super::device::Devices;
use super::incident::Incident;
use super::snapshot::{Snapshot, SourceView};
use super::state::Daemon;
use super::xids::Xids;
use super::{Effect, Settings, settle, view};
use crate::event::{DaemonSite, Event, EventKind, Freshness, Liveness, SourceHealth, SourceName};
use crate::identity::DaemonName;
use crate::time::{Moment, Mono};

/// The node: daemons, servers, clients, devices and incidents.
#[derive(Debug)]
pub struct Node {
    pub(super) daemons: BTreeMap<DaemonName, Daemon>,
    pub(super) core: Core,
}

/// What is shared by all daemons.
#[derive(Debug)]
pub(super) struct Core {
    pub settings: Settings,
    pub devices: Devices,
    pub cases: Cases,
    pub xids: Xids,
    pub sources: BTreeMap<(SourceName, Option<DaemonName>), SourceView>,
    pub effects: Vec<Effect>,
    /// The latest moment that any event told of.
    pub now: Moment,
    pub freshness: Freshness,
    pub generation: u64,
    /// Whether NVML has answered since the start.
    pub has_gpus: bool,
    /// OOM kills by host pid, for clients whose end is not known yet.
    pub ooms: VecDeque<(u32, Moment)>,
}

impl Node {
    /// A node of which nothing is known. `now` is the time of its start.
    pub fn new(settings: Settings, now: Moment) -> Node {
        let kept = settings.incidents_kept;
        Node {
            daemons: BTreeMap::new(),
            core: Core {
                settings,
                devices: Devices::default(),
                cases: Cases::new(kept),
                xids: Xids::default(),
                sources: BTreeMap::new(),
                effects: Vec::new(),
                now,
                freshness: Freshness::Live,
                generation: 0,
                has_gpus: false,
                ooms: VecDeque::new(),
            },
        }
    }

    /// Takes over the incidents that an earlier run recorded. Those that are open go on.
    pub fn restore(&mut self, incidents: Vec<Incident>) {
        let core = &mut self.core;
        core.cases.restore(incidents, &mut core.devices, core.now);
        self.core.generation += 1;
    }

    /// Takes over changed settings.
    pub fn reconfigure(&mut self, settings: Settings) {
        self.core.cases.keep_at_most(settings.incidents_kept);
        self.core.settings = settings;
        self.core.generation += 1;
    }

    /// Grows with every change of the state.
    pub fn generation(&self) -> u64 {
        self.core.generation
    }

    /// Applies one event.
    pub fn apply(&mut self, event: &Event) {
        self.advance(event.at);
        self.core.freshness = event.freshness;
        self.core.generation += 1;
        let (core, at) = (&mut self.core, event.at);
        match &event.kind {
            EventKind::DaemonFound(site) => self.daemon_found(site),
            EventKind::DaemonGone(name) => self.daemon_gone(name, at),
            EventKind::Liveness(name, liveness) => self.liveness(name, liveness),
            EventKind::Log(name, entry) => {
                if let Some(daemon) = self.daemons.get_mut(name) {
                    core.log(daemon, entry, at);
                }
            }
            EventKind::Look(name, result) => {
                if let Some(daemon) = self.daemons.get_mut(name) {
                    core.look(daemon, result, at);
                }
            }
            EventKind::ProcessSeen(name, facts) => {
                if let Some(daemon) = self.daemons.get_mut(name) {
                    core.process_seen(daemon, facts, at);
                }
            }
            EventKind::ProcessExited { daemon, pid } => {
                if let Some(daemon) = self.daemons.get_mut(daemon) {
                    core.process_exited(daemon, *pid, at);
                }
            }
            EventKind::Checkpoint { daemon, pid, newest } => {
                if let Some(daemon) = self.daemons.get_mut(daemon) {
                    daemon.checkpoint(*pid, *newest);
                }
            }
            EventKind::Gpus(report) => core.gpus(&mut self.daemons, report, at),
            EventKind::Xid(xid) => core.xid(&mut self.daemons, xid, at),
            EventKind::Sxid(sxid) => core.sxid(sxid, at),
            EventKind::GpuLost(pci) => core.gpu_lost(&mut self.daemons, *pci, at),
            EventKind::AllChannelsFailed { xid } => core.all_channels_failed(&mut self.daemons, *xid, at),
            EventKind::OomKill { pid } => core.oom_kill(&mut self.daemons, *pid, at),
            EventKind::GpuUuid(pci, uuid) => core.devices.learn_pci(*pci, uuid),
            // Of a daemon that is gone its sources may still have had something to say.
            EventKind::Source(SourceHealth { daemon: Some(name), .. })
                if !self.daemons.contains_key(name) => {}
            EventKind::Source(health) => {
                core.source(health, at);
                if let Some(daemon) = health.daemon.as_ref().and_then(|name| self.daemons.get_mut(name)) {
                    core.heard_of_source(daemon, health.source, at);
                }
            }
            EventKind::SourceOff(source) => self.source_off(*source),
            EventKind::Tick => {}
        }
    }

    /// The moment until which nothing has to be done unless an event comes.
    pub fn next_deadline(&self) -> Option<Mono> {
        let window = self.core.settings.window;
        let endings = self.daemons.values().flat_map(|daemon| daemon.servers.values());
        let endings = endings.flat_map(|server| {
            [server.ending.as_ref().map(|ending| ending.decide_at), server.doubt_until].into_iter().flatten()
        });
        let departures = self.daemons.values().flat_map(|daemon| daemon.departed.iter());
        let departures = departures.filter(|left| !left.is_settled).map(|left| left.at.mono.after(window));
        let cases = self.core.cases.open_cases().filter(|case| !case.is_settled);
        let cases = cases.map(|case| {
            let fallback = case.since.after(settle::DEVICES_UNKNOWN_AFTER);
            case.awaits.unwrap_or(if case.devices.is_empty() && fallback > self.core.now.mono {
                fallback
            } else {
                case.since.after(window)
            })
        });
        let logs = self.daemons.values().filter_map(|daemon| daemon.log_awaited.as_ref());
        let logs = logs.map(|awaited| awaited.until);
        endings.chain(departures).chain(cases).chain(logs).min()
    }

    /// Does what is due at `at`. [`Node::apply`] calls it; a caller without events sends [`EventKind::Tick`].
    fn advance(&mut self, at: Moment) {
        if at.mono <= self.core.now.mono {
            return;
        }
        self.core.now = at;
        for daemon in self.daemons.values_mut() {
            if daemon.log_awaited.as_ref().is_some_and(|awaited| awaited.until <= at.mono) {
                self.core.log_read(daemon, at);
            }
            self.core.settle_endings(daemon, at);
            self.core.settle_doubts(daemon, at);
            self.core.settle_departures(daemon, at);
        }
        self.core.settle_cases(&mut self.daemons, at);
        self.core.xids.forget_before(at.mono.before(self.core.settings.window + Duration::from_secs(2)));
        let window = self.core.settings.window;
        self.core.ooms.retain(|(_, killed)| at.mono.since(killed.mono) <= window);
    }

    /// What the model asks and tells since the last call.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        for daemon in self.daemons.values_mut() {
            let is_down = match daemon.is_alive() {
                Some(true) => Some(daemon.is_wedged()),
                Some(false) => Some(daemon.was_alive),
                None => None,
            };
            daemon.was_alive |= daemon.is_alive() == Some(true);
            if let Some(is_down) = is_down
                && is_down != daemon.told_down
            {
                daemon.told_down = is_down;
                self.core.effects.push(Effect::DaemonDown(daemon.site.name.clone(), is_down));
            }
        }
        let incidents = self.core.cases.take_changes().into_iter().map(Effect::Incident);
        let mut effects = std::mem::take(&mut self.core.effects);
        let mut asked = BTreeSet::new();
        effects.retain(|effect| match effect {
            Effect::Look(daemon) => asked.insert(Some(daemon.clone())),
            Effect::LookAtGpus => asked.insert(None),
            _ => true,
        });
        effects.extend(incidents);
        effects
    }

    /// The node as it is now.
    pub fn snapshot(&self) -> Snapshot {
        view::snapshot(self)
    }

    fn daemon_found(&mut self, site: &DaemonSite) {
        let Some(daemon) = self.daemons.get_mut(&site.name) else {
            let mut daemon = Daemon::new(site.clone());
            self.core.welcome(&mut daemon);
            self.daemons.insert(site.name.clone(), daemon);
            return;
        };
        let is_another =
            site.process.is_some() && daemon.site.process.is_some() && site.process != daemon.site.process;
        if is_another {
            daemon.restarted();
        }
        if std::mem::discriminant(&daemon.site.log) != std::mem::discriminant(&site.log) {
            // Its log is read by other sources now.
            let of = Some(&site.name);
            let is_log = |source| {
                matches!(source, SourceName::ControlLog | SourceName::ServerLog | SourceName::DaemonOutput)
            };
            self.core.sources.retain(|(source, daemon), _| daemon.as_ref() != of || !is_log(*source));
        }
        daemon.site = site.clone();
    }

    fn source_off(&mut self, source: SourceName) {
        self.core.sources.retain(|(name, _), _| *name != source);
        match source {
            SourceName::Nvml => self.core.nvml_off(&mut self.daemons),
            SourceName::Control => {
                for daemon in self.daemons.values_mut() {
                    daemon.protocol = None;
                    daemon.default_active_thread_percentage = None;
                    daemon.looked_at = None;
                }
            }
            _ => {}
        }
    }

    fn daemon_gone(&mut self, name: &DaemonName, at: Moment) {
        let Some(mut daemon) = self.daemons.remove(name) else { return };
        let servers: Vec<u32> = daemon.servers.keys().copied().collect();
        for pid in servers {
            self.core.server_gone(&mut daemon, pid, at);
        }
        if daemon.told_down {
            self.core.effects.push(Effect::DaemonDown(name.clone(), false));
        }
        self.core.sources.retain(|(_, of), _| of.as_ref() != Some(name));
    }

    fn liveness(&mut self, name: &DaemonName, liveness: &Liveness) {
        let Some(daemon) = self.daemons.get_mut(name) else { return };
        let was_alive = daemon.is_alive();
        daemon.liveness = Some(liveness.clone());
        match (was_alive, daemon.is_alive()) {
            (Some(true), Some(false)) => daemon.pending.clear(),
            (Some(false), Some(true)) => daemon.restarted(),
            _ => {}
        }
    }
}

impl Core {
    /// Whether what happens now is counted and may be an incident.
    pub fn is_news(&self) -> bool {
        self.freshness != Freshness::History
    }

    fn source(&mut self, health: &SourceHealth, at: Moment) {
        let key = (health.source, health.daemon.clone());
        let view = self.sources.entry(key).or_insert_with(|| SourceView {
            source: health.source,
            daemon: health.daemon.clone(),
            is_up: false,
            reason: None,
            last_success: None,
        });
        view.is_up = health.state.is_ok();
        view.reason = health.state.as_ref().err().cloned();
        if view.is_up {
            view.last_success = view.last_success.max(Some(at.wall));
        }
    }

    /// Whether a source is known to work.
    pub fn is_up(&self, source: SourceName, daemon: Option<&DaemonName>) -> bool {
        self.sources.get(&(source, daemon.cloned())).is_some_and(|view| view.is_up)
    }

    /// Whether any source tells which clients a daemon's servers have.
    pub fn sees_clients(&self, daemon: &Daemon) -> bool {
        let name = Some(&daemon.site.name);
        let fresh = daemon
            .looked_at
            .is_some_and(|at| self.now.mono.since(at) <= self.settings.look_interval.saturating_mul(3));
        self.is_up(SourceName::ServerLog, name)
            || self.is_up(SourceName::DaemonOutput, name)
            || self.is_up(SourceName::Nvml, None)
            || fresh
    }

    /// Asks for what is in doubt: NVML when it can tell, since that costs the daemon nothing; else the daemon.
    pub fn doubt(&mut self, daemon: &Daemon) {
        if self.is_up(SourceName::Nvml, None) {
            self.effects.push(Effect::LookAtGpus);
        } else {
            self.effects.push(Effect::Look(daemon.site.name.clone()));
        }
    }
}
