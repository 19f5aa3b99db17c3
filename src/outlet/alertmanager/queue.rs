//! The alerts that one Alertmanager should know: the newest state of each, and when to post it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::Value;
use tokio::time::Instant;

use super::Timing;
use crate::config::Alertmanager;
use crate::engine::incident::{Incident, IncidentState};
use crate::outlet::alert::{AlertKey, AlertName, alerts, to_json};

#[cfg(test)]
mod tests;

/// Alerts held at most. A node has as many as fault domains times alerts, so this is never reached by honest input.
const MOST: usize = 1024;
/// Alerts in one post, as Prometheus sends them.
const BATCH: usize = 64;

/// See the module.
#[derive(Debug)]
pub struct Queue {
    timing: Timing,
    resolve: bool,
    max_age: Duration,
    entries: BTreeMap<AlertKey, Entry>,
}

#[derive(Debug)]
struct Entry {
    incident: Arc<Incident>,
    due: Instant,
    /// When Alertmanager first took it.
    accepted_at: Option<Instant>,
    /// Since when it is over.
    over: Option<Timestamp>,
    /// Grows with every change, so that a change during a post is not taken for posted.
    version: u64,
    /// Not posted since it was new.
    is_news: bool,
}

/// What one post holds.
#[derive(Debug, Default)]
pub struct Batch {
    /// The alerts, as Alertmanager takes them.
    pub body: Vec<Value>,
    items: Vec<(AlertKey, u64, Form)>,
}

impl Batch {
    /// Whether there is nothing to post.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Firing,
    Resolved,
}

/// How a post ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Alertmanager has it.
    Accepted,
    /// Alertmanager does not want it.
    Refused,
    /// To be tried again.
    Failed,
}

impl Queue {
    /// An empty queue.
    pub fn new(timing: Timing, resolve: bool, max_age: Duration) -> Queue {
        Queue { timing, resolve, max_age, entries: BTreeMap::new() }
    }

    /// Alerts held.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether an alert is held that was never posted.
    pub fn has_news(&self) -> bool {
        self.entries.values().any(|entry| entry.is_news)
    }

    /// When the next post is due.
    pub fn next_due(&self) -> Option<Instant> {
        self.entries.values().map(|entry| entry.due).min()
    }

    /// Takes an incident as it is now. Returns how many alerts were given up for it.
    pub fn take(&mut self, incident: &Arc<Incident>, now: Instant, wall: Timestamp) -> u64 {
        let is_closed = incident.state == IncidentState::Closed;
        let is_old = age(incident.started_at, wall) > self.max_age;
        let is_history = incident.caught_up && is_old;
        let mut dropped = 0;
        let wanted = alerts(incident);
        for key in &wanted {
            // What still blocks recovery is news however old the fault.
            if is_history && key.name != AlertName::RecoveryBlocked {
                continue;
            }
            match self.entries.get_mut(key) {
                // Ids sort by time. An alert that is over for an older incident may still hold for a newer one.
                Some(entry) if entry.incident.id > incident.id => {}
                Some(entry) if entry.incident.id == incident.id => {
                    if entry.incident != *incident {
                        entry.incident = incident.clone();
                        entry.version += 1;
                        entry.due = entry.due.min(now + self.timing.update);
                    }
                    if !is_closed {
                        entry.over = None;
                    }
                }
                entry => {
                    // Nobody needs to be told of what is long over; an earlier run may have.
                    if is_closed && is_old {
                        continue;
                    }
                    // The same alert to Alertmanager, whichever incident it stands for.
                    let version = entry.map_or(0, |entry| entry.version + 1);
                    let incident = incident.clone();
                    self.entries.insert(
                        key.clone(),
                        Entry { incident, due: now, accepted_at: None, over: None, version, is_news: true },
                    );
                }
            }
        }
        let (resolve, lapse) = (self.resolve, self.timing.lapse);
        self.entries.retain(|key, entry| {
            let is_over = entry.incident.id == incident.id && (is_closed || !wanted.contains(key));
            if !is_over || entry.over.is_some() {
                return true;
            }
            entry.over = Some(wall);
            entry.version += 1;
            match entry.accepted_at {
                // It is still to be told; until then it lasts.
                None => true,
                Some(accepted_at) => {
                    entry.due = now.max(accepted_at + lapse);
                    resolve
                }
            }
        });
        while self.entries.len() > MOST {
            let oldest = self
                .entries
                .iter()
                .min_by_key(|(_, entry)| (entry.over.is_none(), entry.incident.id.clone()))
                .map(|(key, _)| key.clone());
            if oldest.is_some_and(|key| self.entries.remove(&key).is_some()) {
                dropped += 1;
            }
        }
        dropped
    }

    /// What is to be posted now, and how many alerts were given up as too old.
    pub fn due(&mut self, now: Instant, wall: Timestamp, config: &Alertmanager) -> (Batch, u64) {
        let mut dropped = 0;
        let (max_age, lapse) = (self.max_age, self.timing.lapse);
        self.entries.retain(|_, entry| {
            let Some(over_for) = entry.over.map(|since| age(since, wall)) else { return true };
            let is_told = entry.accepted_at.is_some();
            let keep = over_for <= if is_told { max_age.max(2 * lapse) } else { max_age };
            // An alert that was told once and whose end could not be told has lapsed by itself.
            dropped += u64::from(!keep && !is_told);
            keep
        });

        let mut due: Vec<_> = self.entries.iter_mut().filter(|(_, entry)| entry.due <= now).collect();
        due.sort_by_key(|(_, entry)| (!entry.is_news, entry.due));
        let mut batch = Batch::default();
        let lapses_at = wall.checked_add(self.timing.lapse).unwrap_or(wall);
        for (key, entry) in due.into_iter().take(BATCH) {
            let form = match (entry.over, entry.accepted_at) {
                (Some(_), Some(_)) if self.resolve => Form::Resolved,
                _ => Form::Firing,
            };
            let ends_at = if form == Form::Resolved { wall } else { lapses_at };
            entry.is_news = false;
            batch.body.push(to_json(key, &entry.incident, config, wall, ends_at));
            batch.items.push((key.clone(), entry.version, form));
        }
        (batch, dropped)
    }

    /// Notes how the post of `batch` ended.
    pub fn posted(&mut self, batch: &Batch, outcome: Outcome, now: Instant) {
        for (key, version, form) in &batch.items {
            let Some(entry) = self.entries.get_mut(key) else { continue };
            match outcome {
                Outcome::Failed => {}
                Outcome::Refused => entry.due = now + self.timing.resend,
                Outcome::Accepted => {
                    let accepted_at = *entry.accepted_at.get_or_insert(now);
                    let is_done = entry.over.is_some() && (!self.resolve || *form == Form::Resolved);
                    if is_done && !entry.is_news {
                        self.entries.remove(key);
                        continue;
                    }
                    entry.due = if entry.over.is_some() {
                        now.max(accepted_at + self.timing.lapse)
                    } else if entry.version == *version {
                        now + self.timing.resend
                    } else {
                        // It changed while it was on its way.
                        now + self.timing.update
                    };
                }
            }
        }
    }
}

/// How long before `now` something was; zero where the clock was set back.
fn age(since: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(since)).unwrap_or(Duration::ZERO)
}
