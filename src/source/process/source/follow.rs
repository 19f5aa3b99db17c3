//! Finding the processes that the model asks about, and noticing their end.

use super::{
    Arc, BATCH, Command, DAEMONS, Daemon, DaemonName, EventKind, Follow, Instant, LOCATE_INTERVAL, Located,
    ProcError, ProcessFacts, ProcessId, ProcessSource, Question, Refusal, SOURCE, SourceName, View, chain,
};

use super::{BOOT_KEEP, GRACE};

impl ProcessSource {
    pub(super) fn obey(&mut self, command: Command) {
        match command {
            Command::Watch(daemon, pid) => self.watch(daemon, pid),
            Command::Unwatch(daemon, pid) => {
                if let Some(key) = self.watches.key(&daemon, pid) {
                    self.let_go(key);
                }
            }
            Command::Daemon(daemon, process) => self.know_daemon(&daemon, process),
        }
    }

    fn watch(&mut self, daemon: DaemonName, pid: u32) {
        // The daemon's name for a client that it cannot see.
        if pid == 0 {
            return;
        }
        if let Some(key) = self.watches.key(&daemon, pid) {
            let process = self.watches.get(key).and_then(|watch| watch.process());
            match process.map(|process| self.proc.is_alive(process)) {
                Some(Ok(false)) => self.end(key),
                _ => return self.tell_again(key),
            }
        }
        self.daemons.entry(daemon.clone()).or_insert_with(|| Daemon {
            process: None,
            blind_at: Instant::now() + GRACE,
            view: Err(
                "its process was never seen from here, so that its pids cannot be told apart from others: \
                       run mps-exporter in the host's pid namespace (Kubernetes: hostPID), or in the daemon's"
                    .into(),
            ),
        });
        match self.watches.add(daemon, pid) {
            Some(key) => self.find(key),
            None => self.telemetry.source_error(SOURCE, "too_many_processes"),
        }
    }

    fn tell_again(&mut self, key: u64) {
        let Some(watch) = self.watches.get(key) else { return };
        let (daemon, pid, checkpoint) = (watch.daemon.clone(), watch.pid, watch.checkpoint);
        if let Some(facts) = watch.facts.clone() {
            self.tell(EventKind::ProcessSeen(daemon.clone(), facts));
        }
        if let Some(newest) = checkpoint {
            self.tell(EventKind::Checkpoint { daemon, pid, newest });
        }
    }

    /// Learns in which namespace a daemon's pids are; what was known stays when its process is gone.
    fn know_daemon(&mut self, daemon: &DaemonName, process: Option<ProcessId>) {
        let Some(process) = process else { return };
        let known = self.daemons.get(daemon);
        if known.is_some_and(|known| known.process == Some(process) && known.view.is_ok()) {
            return;
        }
        let view = match View::of(&self.proc, process) {
            Ok(view) => Ok(view),
            // It has just ended: what was known of it, or of the one before it, is still the best.
            Err(error) if error.is_gone() && known.is_some() => return,
            Err(error) => {
                self.telemetry.source_error(SOURCE, error.reason());
                Err(format!("the pid namespace of its daemon cannot be told: {}", chain(&error)).into())
            }
        };
        if self.daemons.len() >= DAEMONS {
            let watched: std::collections::HashSet<DaemonName> =
                self.watches.iter().map(|(_, watch)| watch.daemon.clone()).collect();
            self.daemons.retain(|name, _| watched.contains(name));
        }
        self.daemons
            .insert(daemon.clone(), Daemon { process: Some(process), blind_at: Instant::now(), view });
        for key in self.unfound(daemon) {
            self.find(key);
        }
    }

    fn unfound(&self, daemon: &DaemonName) -> Vec<u64> {
        self.watches.keys_where(|watch| watch.follow == Follow::Unfound && watch.daemon == *daemon)
    }

    /// Finds a watched pid, at once where pids are the same.
    fn find(&mut self, key: u64) {
        let Some(watch) = self.watches.get(key) else { return };
        let (daemon, pid) = (watch.daemon.clone(), watch.pid);
        let known = self.daemons.get(&daemon);
        if known.is_some_and(|known| known.view.is_err() && Instant::now() < known.blind_at) {
            return;
        }
        match known.map(|known| known.view.clone()) {
            Some(Ok(View::Same)) => self.identify(key, pid, None),
            // All that are still unfound are looked for together.
            Some(Ok(View::Nested { .. })) => self.has_to_locate = true,
            None => {}
            Some(Err(reason)) => self.tell_blind(&daemon, reason),
        }
    }

    /// Says once that a daemon's pids cannot be found.
    fn tell_blind(&mut self, daemon: &DaemonName, reason: Arc<str>) {
        let place = (SourceName::Proc, Some(daemon.clone()));
        if self.health.get(&place) != Some(&Err(reason.clone())) {
            self.tell_health(SourceName::Proc, Some(daemon.clone()), Err(reason));
        }
    }

    /// Takes back what [`ProcessSource::tell_blind`] said.
    fn tell_seeing(&mut self, daemon: &DaemonName) {
        let place = (SourceName::Proc, Some(daemon.clone()));
        if self.health.get(&place).is_some_and(Result::is_err) {
            self.tell_health(SourceName::Proc, Some(daemon.clone()), Ok(()));
        }
    }

    /// The next daemon whose pids have to be looked for among all processes.
    pub(super) fn next_locate(&mut self, now: Instant) -> Option<Question> {
        if !self.has_to_locate || now < self.locate_at {
            return None;
        }
        self.has_to_locate = false;
        let nested = self.daemons.iter().find_map(|(name, daemon)| {
            let Ok(View::Nested { level, namespace }) = daemon.view else { return None };
            let pids: Vec<u32> = self
                .watches
                .iter()
                .filter(|(_, watch)| watch.follow == Follow::Unfound && watch.daemon == *name)
                .map(|(_, watch)| watch.pid)
                .collect();
            (!pids.is_empty()).then(|| Question::Locate { daemon: name.clone(), level, namespace, pids })
        });
        self.locate_at = now + LOCATE_INTERVAL;
        nested
    }

    pub(super) fn take_located(
        &mut self,
        daemon: &DaemonName,
        found: Result<std::collections::HashMap<u32, Located>, ProcError>,
    ) {
        let Some(Ok(View::Nested { level, .. })) = self.daemons.get(daemon).map(|daemon| daemon.view.clone())
        else {
            return;
        };
        let found = match found {
            Ok(found) => found,
            Err(error) => {
                self.telemetry.source_error(SOURCE, error.reason());
                return self.tell_blind(daemon, chain(&error).into());
            }
        };
        let mut is_blind = false;
        for (pid, located) in found {
            let Some(key) = self.watches.key(daemon, pid) else { continue };
            match located {
                Located::At(host) => self.identify(key, host, Some((level, pid))),
                Located::Absent if !self.hides_processes => self.end(key),
                Located::Absent | Located::Hidden => is_blind = true,
            }
        }
        if is_blind {
            let reason = "its clients live in another pid namespace that may not be looked at: \
                          run mps-exporter as root, or with CAP_SYS_PTRACE";
            self.tell_blind(daemon, reason.into());
        } else {
            self.tell_seeing(daemon);
        }
    }

    /// Learns who a pid of the proc mount is and follows it. `inner`: the pid that it must have on a level further in.
    fn identify(&mut self, key: u64, host: u32, inner: Option<(usize, u32)>) {
        let is_followed = match self.exits.as_mut().map(|exits| exits.add(key, host)) {
            Some(Ok(())) => true,
            Some(Err(Refusal::Gone)) => return self.end(key),
            Some(Err(Refusal::Full)) => {
                self.say_no_pidfd("as many descriptors as may be are in use");
                false
            }
            Some(Err(Refusal::Impossible(error))) => {
                self.say_no_pidfd(&error.to_string());
                false
            }
            None => false,
        };
        let identity = self
            .proc
            .process(host)
            .and_then(|(process, stat)| self.proc.status(host).map(|status| (process, stat, status)));
        let (process, stat, status) = match identity {
            Ok(identity) => identity,
            Err(error) => return self.unreadable(key, &error, is_followed),
        };
        let is_thread = status.thread_group.is_some_and(|group| group != host);
        let is_other = inner.is_some_and(|(level, pid)| status.namespace_pids.get(level) != Some(&pid));
        if is_thread || is_other {
            return self.end(key);
        }
        let started_at = self.started_at(process);
        let Some(watch) = self.watches.get(key) else { return };
        watch.follow = if is_followed { Follow::Kernel } else { Follow::Polling(process) };
        let facts = ProcessFacts {
            pid: watch.pid,
            process: Some(process),
            started_at,
            command: Some(stat.command.into()),
            uid: status.uid,
            workload: None,
        };
        watch.facts = Some(facts.clone());
        let daemon = watch.daemon.clone();
        self.tell_seeing(&daemon);
        self.tell(EventKind::ProcessSeen(daemon, facts));
        self.to_ask.push_back(key);
    }

    /// A process whose files could not be read.
    fn unreadable(&mut self, key: u64, error: &ProcError, is_followed: bool) {
        let Some(watch) = self.watches.get(key) else { return };
        let daemon = watch.daemon.clone();
        if is_followed {
            // The kernel tells when it ends, which is now when it has just become a zombie.
            watch.follow = Follow::Kernel;
            if !error.is_gone() || self.hides_processes {
                let facts = ProcessFacts {
                    pid: watch.pid,
                    process: None,
                    started_at: None,
                    command: None,
                    uid: None,
                    workload: None,
                };
                watch.facts = Some(facts.clone());
                self.telemetry.source_error(SOURCE, error.reason());
                self.tell(EventKind::ProcessSeen(daemon, facts));
            }
        } else if error.is_gone() && !self.hides_processes {
            self.end(key);
        } else {
            self.telemetry.source_error(SOURCE, error.reason());
            self.tell_blind(&daemon, chain(error).into());
        }
    }

    fn started_at(&mut self, process: ProcessId) -> Option<jiff::Timestamp> {
        let now = Instant::now();
        if self.boot.is_none_or(|(_, read_at)| now.saturating_duration_since(read_at) > BOOT_KEEP) {
            match self.proc.boot_time() {
                Ok(boot) => self.boot = Some((boot, now)),
                Err(error) => self.telemetry.source_error(SOURCE, error.reason()),
            }
        }
        self.proc.started_at(self.boot?.0, process.start)
    }

    pub(super) fn take_ends(&mut self, ended: std::io::Result<Vec<u64>>) {
        match ended {
            Ok(keys) => keys.into_iter().for_each(|key| self.end(key)),
            Err(error) => {
                // Not known to happen. Everybody is polled from now on.
                self.telemetry.source_error(SOURCE, "epoll");
                self.say_no_pidfd(&error.to_string());
                self.exits = None;
                for key in self.watches.keys_where(|watch| watch.follow == Follow::Kernel) {
                    let Some(watch) = self.watches.get(key) else { continue };
                    watch.follow = watch.process().map_or(Follow::Unfound, Follow::Polling);
                }
            }
        }
    }

    /// Looks at every process whose end the kernel does not tell, and for every one that is not found yet.
    pub(super) async fn poll(&mut self) {
        let due: Vec<(u64, Follow)> = self
            .watches
            .iter()
            .filter(|(_, watch)| watch.follow != Follow::Kernel)
            .map(|(key, watch)| (key, watch.follow))
            .collect();
        for (at, (key, follow)) in due.into_iter().enumerate() {
            match follow {
                Follow::Polling(process) => match self.proc.is_alive(process) {
                    Ok(true) => {}
                    Ok(false) => self.end(key),
                    Err(error) => self.telemetry.source_error(SOURCE, error.reason()),
                },
                _ => self.find(key),
            }
            if at % BATCH == BATCH - 1 {
                tokio::task::yield_now().await;
            }
        }
    }

    /// Tells that a process has ended, and lets it go.
    fn end(&mut self, key: u64) {
        if let Some((daemon, pid)) = self.let_go(key) {
            self.tell(EventKind::ProcessExited { daemon, pid });
        }
    }

    fn let_go(&mut self, key: u64) -> Option<(DaemonName, u32)> {
        if let Some(exits) = &mut self.exits {
            exits.remove(key);
        }
        self.watches.remove(key).map(|watch| (watch.daemon, watch.pid))
    }
}
