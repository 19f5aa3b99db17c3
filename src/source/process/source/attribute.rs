//! Asking who processes work for and when they last wrote a checkpoint, off the runtime.

use super::{
    Answer, Arc, Attribution, CHECKPOINT_DELAY, CHECKPOINT_INTERVAL, CHECKPOINT_STUCK_AFTER, EventKind,
    HEALTH_INTERVAL, Instant, KEEP_PARTIAL, KEEP_WHOLE, KUBELET_INTERVAL, KUBELET_MAX_BACKOFF, KubeletError,
    ListedPod, Newest, ProcError, ProcessSource, Question, SOURCE, STUCK_AFTER, SourceName, checkpoint,
    kubelet, workload,
};
use crate::identity::Workload;

impl ProcessSource {
    /// Gives the asker its next question, when it is idle.
    pub(super) fn ask(&mut self) {
        if !self.asker.is_idle() {
            return;
        }
        let now = Instant::now();
        if let Some(question) = self.next_locate(now) {
            let _thread_missing = self.asker.ask(question, now);
            self.asking = None;
            return;
        }
        let listed = self.kubelet.as_ref().and_then(|kubelet| kubelet.listed.clone());
        while let Some(key) = self.to_ask.pop_front() {
            let Some(watch) = self.watches.get(key) else { continue };
            let Some(process) = watch.process() else { continue };
            watch.ask_at = None;
            let uid = watch.facts.as_ref().and_then(|facts| facts.uid);
            let question = Question::Attribute(key, workload::Subject { process, uid, listed });
            match self.asker.ask(question, now) {
                Ok(()) => self.asking = Some(key),
                Err(_) => watch.ask_at = Some(now + KEEP_PARTIAL),
            }
            return;
        }
    }

    pub(super) fn take_answer(&mut self, answer: Option<Answer>) {
        self.asking = None;
        self.stuck.asker = false;
        match answer {
            Some(Answer::Attributed { key, found, pod_logs, dropped }) => {
                for _ in 0..dropped {
                    self.telemetry.source_error(SOURCE, "cache_full");
                }
                if let Some(state) = pod_logs
                    && self.health.get(&(SourceName::PodLogs, None)) != Some(&state)
                {
                    self.tell_health(SourceName::PodLogs, None, state);
                }
                self.take_attribution(key, found);
            }
            Some(Answer::Located { daemon, found }) => self.take_located(&daemon, found),
            None => self.telemetry.source_error(SOURCE, "panic"),
        }
    }

    fn take_attribution(&mut self, key: u64, found: Result<Attribution, ProcError>) {
        let now = Instant::now();
        let Some(watch) = self.watches.get(key) else { return };
        let found = match found {
            Ok(found) => found,
            // Its end is told by other means.
            Err(error) => {
                watch.ask_at = Some(now + KEEP_PARTIAL);
                if !error.is_gone() {
                    self.telemetry.source_error(SOURCE, error.reason());
                }
                return;
            }
        };
        watch.ask_at = Some(now + if found.is_whole { KEEP_WHOLE } else { KEEP_PARTIAL });
        let Some(facts) = watch.facts.as_mut() else { return };
        let places = checkpoint::places(
            &self.checkpoints,
            found.checkpoint.as_deref(),
            found.workload.as_ref(),
            facts.command.as_deref(),
        );
        let is_news = facts.workload != found.workload;
        facts.workload = found.workload;
        let facts = facts.clone();
        let daemon = watch.daemon.clone();
        if watch.places != places {
            if !places.is_empty() {
                let soon = now + CHECKPOINT_DELAY;
                self.look_at = Some(self.look_at.map_or(soon, |look_at| look_at.min(soon)));
            }
            watch.places = places;
            watch.checkpoint = None;
        }
        if is_news {
            self.tell(EventKind::ProcessSeen(daemon, facts));
        }
        if found.is_denied {
            self.telemetry.source_error(SOURCE, "environment_denied");
            if !std::mem::replace(&mut self.said.environment, true) {
                tracing::warn!(
                    "The environment of other users' processes may not be read, so that Slurm jobs without cgroups and \
                     checkpoint places are not seen: run as root, or with CAP_SYS_PTRACE, and not under a container's \
                     profile of AppArmor or SELinux."
                );
            }
        }
    }

    /// What is due by time.
    pub(super) fn tick(&mut self) {
        let now = Instant::now();
        if self.asker.busy_for(now).is_some_and(|busy| busy > STUCK_AFTER) {
            self.give_asker_up();
        }
        let due = self.watches.keys_where(|watch| watch.ask_at.is_some_and(|at| at <= now));
        for key in due {
            if let Some(watch) = self.watches.get(key) {
                watch.ask_at = None;
                self.to_ask.push_back(key);
            }
        }
        self.look_at_checkpoints(now);
        self.call_kubelet(now);
        if now >= self.health_at {
            self.health_at = now + HEALTH_INTERVAL;
            self.hides_processes = self.proc.hides_processes();
            self.tell_own_health();
        }
    }

    /// The process over which the asker hangs is not asked about again: its turn was taken when the question was put.
    fn give_asker_up(&mut self) {
        let is_replaced = self.asker.give_up();
        if self.stuck.asker && !is_replaced {
            return;
        }
        self.stuck.asker = !is_replaced;
        self.telemetry.source_error(SOURCE, "stuck");
        let process =
            self.asking.take().and_then(|key| self.watches.get(key)).and_then(|watch| watch.process());
        let pid = process.map(|process| process.pid);
        if is_replaced {
            tracing::warn!(
                pid,
                "Reading about a process hangs in the kernel; who it works for stays unknown."
            );
        } else {
            tracing::warn!(
                pid,
                "Reading about several processes hangs; who new ones work for stays unknown."
            );
        }
    }

    fn look_at_checkpoints(&mut self, now: Instant) {
        if self.look_at.is_none_or(|look_at| now < look_at) {
            return;
        }
        if let Some(busy) = self.looker.busy_for(now) {
            if busy > CHECKPOINT_STUCK_AFTER && !self.stuck.looker {
                self.stuck.looker = true;
                self.telemetry.source_error("checkpoints", "stuck");
                tracing::warn!(
                    seconds = busy.as_secs(),
                    "A look at checkpoints hangs, probably on a network file system; their age stays as last seen."
                );
            }
            return;
        }
        let subjects: Vec<checkpoint::Subject> = self
            .watches
            .iter()
            .filter(|(_, watch)| !watch.places.is_empty())
            .filter_map(|(key, watch)| {
                Some(checkpoint::Subject { key, process: watch.process()?, places: watch.places.clone() })
            })
            .collect();
        self.look_at = (!subjects.is_empty()).then(|| now + CHECKPOINT_INTERVAL);
        if !subjects.is_empty() && self.looker.ask(subjects, now).is_err() {
            self.telemetry.source_error("checkpoints", "no_thread");
        }
    }

    pub(super) fn take_checkpoints(&mut self, answers: Option<Vec<(u64, Newest)>>) {
        if std::mem::take(&mut self.stuck.looker) {
            tracing::info!("Checkpoints are seen again.");
        }
        let Some(answers) = answers else { return self.telemetry.source_error("checkpoints", "panic") };
        let mut said = None;
        for (key, newest) in answers {
            match newest {
                Ok(newest) => {
                    let Some(watch) = self.watches.get(key) else { continue };
                    if watch.checkpoint.replace(newest) != Some(newest) {
                        let (daemon, pid) = (watch.daemon.clone(), watch.pid);
                        self.tell(EventKind::Checkpoint { daemon, pid, newest });
                    }
                }
                Err(checkpoint::CheckpointError::Gone) => {}
                Err(error) => {
                    self.telemetry.source_error("checkpoints", error.reason());
                    said.get_or_insert_with(|| Arc::from(error.to_string()));
                }
            }
        }
        if let Some(error) = said.as_deref().filter(|error| self.said.checkpoint.as_deref() != Some(*error)) {
            tracing::warn!(error, "The age of a checkpoint cannot be told.");
        }
        self.said.checkpoint = said;
    }

    /// Asks the kubelet, when a pod's name is missing.
    fn call_kubelet(&mut self, now: Instant) {
        let Some(kubelet) = &mut self.kubelet else { return };
        let is_nameless = |workload: &Workload| matches!(workload, Workload::Pod { pod: None, .. });
        let is_wanted = self.watches.iter().any(|(_, watch)| {
            watch.facts.as_ref().is_some_and(|facts| facts.workload.as_ref().is_some_and(is_nameless))
        });
        if is_wanted && kubelet.call.is_none() && now >= kubelet.next {
            let socket = kubelet.socket.clone();
            kubelet.call = Some(tokio::spawn(async move { kubelet::list(&socket).await }));
        }
    }

    pub(super) fn take_listed(&mut self, listed: Result<Arc<[ListedPod]>, KubeletError>) {
        let now = Instant::now();
        let Some(kubelet) = &mut self.kubelet else { return };
        kubelet.call = None;
        match listed {
            Ok(pods) => {
                kubelet.listed = Some(pods);
                kubelet.next = now + KUBELET_INTERVAL;
                kubelet.backoff = KUBELET_INTERVAL / 6;
                let is_nameless = |workload: &Workload| matches!(workload, Workload::Pod { pod: None, .. });
                let nameless = self.watches.keys_where(|watch| {
                    watch.facts.as_ref().is_some_and(|facts| facts.workload.as_ref().is_some_and(is_nameless))
                });
                for key in nameless {
                    if let Some(watch) = self.watches.get(key) {
                        watch.ask_at = Some(now);
                    }
                }
                self.tell_health(SourceName::Kubelet, None, Ok(()));
            }
            Err(error) => {
                kubelet.next = now + kubelet.backoff;
                kubelet.backoff = (kubelet.backoff * 2).min(KUBELET_MAX_BACKOFF);
                self.telemetry.source_error("kubelet", error.reason());
                self.tell_health(SourceName::Kubelet, None, Err(super::chain(&error).into()));
            }
        }
    }
}
