use std::collections::BTreeMap;

use super::*;
use crate::config::ClientTls;
use crate::engine::incident::Cause;
use crate::outlet::testing::{changed, incident};

const SECOND: Duration = Duration::from_secs(1);
const MAX_AGE: Duration = Duration::from_secs(900);

/// A queue with its clocks.
struct Bench {
    queue: Queue,
    config: Alertmanager,
    now: Instant,
    wall: Timestamp,
}

impl Bench {
    fn new(resolve: bool) -> Bench {
        Bench {
            queue: Queue::new(Timing::default(), resolve, MAX_AGE),
            config: Alertmanager {
                url: "http://am".into(),
                labels: BTreeMap::new(),
                runbooks: None,
                basic_auth: None,
                bearer_token_file: None,
                tls: ClientTls::default(),
                resolve,
                timeout: SECOND,
                max_age: MAX_AGE,
            },
            now: Instant::now(),
            wall: "2026-04-01T12:00:01Z".parse().unwrap(),
        }
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.wall += time;
    }

    fn take(&mut self, incident: &Arc<Incident>) -> u64 {
        self.queue.take(incident, self.now, self.wall)
    }

    /// Posts what is due: for each alert its name and how many seconds from now it ends.
    fn post(&mut self, outcome: Outcome) -> Vec<(String, i64)> {
        let (batch, _) = self.queue.due(self.now, self.wall, &self.config);
        self.queue.posted(&batch, outcome, self.now);
        batch
            .body
            .iter()
            .map(|alert| {
                let ends_at: Timestamp = alert["endsAt"].as_str().unwrap().parse().unwrap();
                let name = alert["labels"]["alertname"].as_str().unwrap().to_owned();
                (name, ends_at.duration_since(self.wall).as_secs())
            })
            .collect()
    }

    fn due_in(&self) -> Option<u64> {
        self.queue.next_due().map(|due| due.saturating_duration_since(self.now).as_secs())
    }
}

/// One alert only: a client lost by a GPU error.
fn single() -> Arc<Incident> {
    Arc::new(Incident { cause: Cause::Gpu, ..incident() })
}

fn closed(incident: &Arc<Incident>) -> Arc<Incident> {
    changed(incident, |incident| incident.state = IncidentState::Closed)
}

fn mass(seconds: i64) -> Vec<(String, i64)> {
    vec![("MpsMassClientLoss".into(), seconds)]
}

#[test]
fn an_open_incident_is_posted_at_once_and_again_until_it_closes_and_then_lapses() {
    let mut bench = Bench::new(false);
    let incident = single();
    bench.take(&incident);
    assert_eq!(bench.due_in(), Some(0));
    for _ in 0..3 {
        assert_eq!(bench.post(Outcome::Accepted), mass(360));
        assert_eq!(bench.due_in(), Some(60));
        bench.pass(60 * SECOND);
    }
    bench.take(&closed(&incident));
    assert_eq!(bench.queue.len(), 0, "the rule resolves; a second resolver would make it flap");
}

#[test]
fn with_resolve_the_end_is_told_but_not_before_it_could_have_been_notified() {
    let mut bench = Bench::new(true);
    let incident = single();
    bench.take(&incident);
    assert_eq!(bench.post(Outcome::Accepted), mass(360));
    bench.pass(SECOND);
    bench.take(&closed(&incident));
    assert_eq!(bench.due_in(), Some(359));
    bench.pass(359 * SECOND);
    assert_eq!(bench.post(Outcome::Failed), mass(0));
    assert_eq!(bench.post(Outcome::Accepted), mass(0));
    assert_eq!(bench.queue.len(), 0);

    bench.take(&incident);
    bench.post(Outcome::Accepted);
    bench.pass(3600 * SECOND);
    bench.take(&closed(&incident));
    assert_eq!(bench.due_in(), Some(0), "after an hour there is nothing to wait for");
}

#[test]
fn an_incident_that_closed_before_alertmanager_took_it_still_pages() {
    for resolve in [false, true] {
        let mut bench = Bench::new(resolve);
        let incident = single();
        bench.take(&incident);
        assert_eq!(bench.post(Outcome::Failed), mass(360));
        bench.take(&closed(&incident));
        bench.pass(600 * SECOND);
        assert_eq!(bench.post(Outcome::Failed), mass(360));
        assert_eq!(bench.post(Outcome::Accepted), mass(360), "an alert that is over would notify nobody");
        assert_eq!(bench.queue.len(), usize::from(resolve));
    }
}

#[test]
fn an_alertmanager_that_is_down_for_an_hour_learns_what_is_still_true() {
    let mut bench = Bench::new(false);
    let (open, brief) = (single(), single());
    let brief = changed(&brief, |incident| {
        incident.id = "019b2c4d5e70-0".into();
        incident.fault_domains = vec!["default/1".into()];
    });
    bench.take(&open);
    bench.take(&brief);
    bench.take(&closed(&brief));
    assert_eq!(bench.post(Outcome::Failed).len(), 2);
    bench.pass(3600 * SECOND);
    let (batch, dropped) = bench.queue.due(bench.now, bench.wall, &bench.config);
    assert_eq!((batch.body.len(), dropped), (1, 1), "the closed one is too old, and counted");
    assert_eq!(batch.body[0]["labels"]["fault_domain"], "default/0");
    assert_eq!(batch.body[0]["startsAt"], "2026-04-01T12:00:00.25Z");
}

#[test]
fn a_changed_annotation_is_posted_soon_and_an_unchanged_incident_is_not() {
    let mut bench = Bench::new(false);
    let incident = single();
    bench.take(&incident);
    bench.post(Outcome::Accepted);
    bench.take(&incident);
    assert_eq!(bench.due_in(), Some(60));
    bench.take(&changed(&incident, |incident| incident.recovery.blocked_by.clear()));
    assert_eq!(bench.due_in(), Some(2));
}

#[test]
fn a_change_during_a_post_is_not_taken_for_posted() {
    let mut bench = Bench::new(false);
    let incident = single();
    bench.take(&incident);
    let (batch, _) = bench.queue.due(bench.now, bench.wall, &bench.config);
    bench.take(&changed(&incident, |incident| incident.clients_before = 9));
    bench.queue.posted(&batch, Outcome::Accepted, bench.now);
    assert_eq!(bench.due_in(), Some(2));
}

#[test]
fn a_close_during_the_first_post_ends_it() {
    let mut bench = Bench::new(false);
    let incident = single();
    bench.take(&incident);
    let (batch, _) = bench.queue.due(bench.now, bench.wall, &bench.config);
    bench.take(&closed(&incident));
    assert_eq!(bench.queue.len(), 1);
    bench.queue.posted(&batch, Outcome::Accepted, bench.now);
    assert_eq!(bench.queue.len(), 0);
}

#[test]
fn an_alert_of_an_incident_can_end_before_it_and_come_back() {
    let mut bench = Bench::new(false);
    let blocked = changed(&single(), |incident| incident.state = IncidentState::Recovering);
    bench.take(&blocked);
    bench.post(Outcome::Accepted);
    assert_eq!(bench.queue.len(), 2);
    bench.take(&changed(&blocked, |incident| incident.recovery.blocked_by.clear()));
    assert_eq!(bench.queue.len(), 1);
    bench.take(&blocked);
    assert_eq!(bench.post(Outcome::Accepted)[0].0, "MpsRecoveryBlocked");
}

#[test]
fn the_end_of_an_older_incident_does_not_end_a_newer_one_on_the_same_domain() {
    let mut bench = Bench::new(true);
    let older = single();
    let newer = changed(&older, |incident| incident.id = "019b2c4d5e80-0".into());
    bench.take(&older);
    bench.post(Outcome::Accepted);
    bench.take(&newer);
    bench.post(Outcome::Accepted);
    bench.take(&closed(&older));
    bench.pass(400 * SECOND);
    assert_eq!(bench.post(Outcome::Accepted), mass(360));
}

#[test]
fn what_happened_long_before_the_start_is_no_news_except_that_it_still_blocks() {
    let mut bench = Bench::new(false);
    let old = changed(&single(), |incident| {
        incident.caught_up = true;
        incident.state = IncidentState::Recovering;
    });
    bench.pass(MAX_AGE);
    bench.take(&old);
    assert_eq!(bench.post(Outcome::Accepted), [("MpsRecoveryBlocked".into(), 360)]);
    bench.take(&closed(&old));
    assert_eq!(bench.queue.len(), 0);

    let recent = changed(&old, |incident| incident.started_at = bench.wall);
    bench.take(&closed(&recent));
    assert_eq!(bench.post(Outcome::Accepted), mass(360), "found a moment late, it still pages");
}

#[test]
fn an_old_incident_of_an_earlier_run_is_told_while_it_lasts_and_not_when_it_is_over() {
    let mut bench = Bench::new(false);
    bench.pass(MAX_AGE + SECOND);
    bench.take(&closed(&single()));
    assert_eq!(bench.queue.len(), 0, "that run has told it");
    bench.take(&single());
    assert_eq!(bench.post(Outcome::Accepted), mass(360), "to Alertmanager the alert that it has");
}

#[test]
fn a_refused_alert_waits_for_the_next_regular_post() {
    let mut bench = Bench::new(false);
    bench.take(&single());
    bench.post(Outcome::Refused);
    assert_eq!(bench.due_in(), Some(60));
    assert_eq!(bench.queue.len(), 1);
}

#[test]
fn the_queue_is_bounded_and_gives_up_what_is_over_first() {
    let mut bench = Bench::new(false);
    let base = single();
    let mut dropped = 0;
    for number in 0..MOST + 50 {
        let each = changed(&base, |incident| {
            incident.id = format!("{number:06}").into();
            incident.fault_domains = vec![format!("default/{number}").into()];
        });
        dropped += bench.take(&each);
        if number == 700 {
            dropped += bench.take(&closed(&each));
        }
    }
    assert_eq!((bench.queue.len(), dropped), (MOST, 50));
    let has = |number: usize| {
        bench.queue.entries.keys().any(|key| *key.fault_domain == *format!("default/{number}"))
    };
    assert!(!has(700) && !has(0) && has(49) && has(MOST + 49));
}

#[test]
fn posts_are_small_and_news_goes_first() {
    let mut bench = Bench::new(false);
    let base = single();
    let each = |number: usize| {
        changed(&base, |incident| {
            incident.id = format!("{number:06}").into();
            incident.fault_domains = vec![format!("default/{number}").into()];
        })
    };
    for number in 0..100 {
        bench.take(&each(number));
    }
    assert_eq!(bench.post(Outcome::Accepted).len(), BATCH);
    assert_eq!(bench.post(Outcome::Failed).len(), 36);
    bench.pass(120 * SECOND);
    bench.take(&each(100));
    let (batch, _) = bench.queue.due(bench.now, bench.wall, &bench.config);
    assert_eq!(batch.body.len(), BATCH);
    assert_eq!(batch.body[0]["labels"]["fault_domain"], "default/100");
}
