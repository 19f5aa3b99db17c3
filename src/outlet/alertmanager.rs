//! Posts the alerts of incidents to Alertmanager: at once, again while they last, and to every one that is configured.
//!
//! An incident's alert is posted the moment it is known and re-posted each [`Timing::resend`]; it ends
//! [`Timing::lapse`] after the last post. Where the Prometheus rule exists too, that is all: the rule resolves, and two
//! resolvers would make the alert flap. With `resolve: true` the end is posted as well, but not before the alert has
//! lasted for [`Timing::lapse`]: Alertmanager waits for `group_wait` or `group_interval` before it notifies, and drops
//! an alert that is over by then, page and all. For the same reason an alert that Alertmanager has not accepted before
//! its incident closed is still posted as if it lasted, and left to lapse.

mod queue;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use jiff::Timestamp;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::config::Alertmanager;
use crate::engine::incident::Incident;
use crate::http_client::{Client, UrlError};
use crate::outlet::post::{self, PostError};
use crate::source::Shutdown;
use crate::telemetry::Telemetry;
use queue::{Outcome, Queue};

/// How long a stop waits for a last post.
const LAST_POST: Duration = Duration::from_secs(2);

/// How often and how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    /// How often the alert of an open incident is posted again.
    pub resend: Duration,
    /// How long an alert lasts without another post. Longer than Alertmanager's default `group_interval` (5 min).
    pub lapse: Duration,
    /// How soon a changed annotation is posted.
    pub update: Duration,
    /// The first pause after a failed post; it doubles up to `max_backoff`.
    pub backoff: Duration,
    /// The longest pause between attempts.
    pub max_backoff: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Timing {
            resend: Duration::from_secs(60),
            lapse: Duration::from_secs(360),
            update: Duration::from_secs(2),
            backoff: Duration::from_millis(250),
            max_backoff: Duration::from_secs(30),
        }
    }
}

/// One Alertmanager. [`AlertmanagerOutlet::run`] posts what [`AlertmanagerOutlet::notify`] is given.
#[derive(Debug)]
pub struct AlertmanagerOutlet {
    config: Alertmanager,
    timing: Timing,
    client: Client,
    queue: Mutex<Queue>,
    wake: Notify,
    telemetry: Telemetry,
}

impl AlertmanagerOutlet {
    /// An outlet for this Alertmanager; nothing is connected yet.
    pub fn new(
        config: &Alertmanager,
        timing: Timing,
        telemetry: &Telemetry,
    ) -> Result<AlertmanagerOutlet, UrlError> {
        let client = post::client(config, config.timeout)?;
        telemetry.alertmanager_known(&config.url, &PostError::RESULTS);
        Ok(AlertmanagerOutlet {
            queue: Mutex::new(Queue::new(timing, config.resolve, config.max_age)),
            config: config.clone(),
            timing,
            client,
            wake: Notify::new(),
            telemetry: telemetry.clone(),
        })
    }

    /// What it was made from.
    pub fn config(&self) -> &Alertmanager {
        &self.config
    }

    /// Takes an incident as it is now. Never waits; a later state takes the place of an earlier one.
    pub fn notify(&self, incident: &Arc<Incident>) {
        let dropped = self.lock().take(incident, Instant::now(), Timestamp::now());
        self.count_dropped(dropped);
        self.wake.notify_one();
    }

    /// How many alerts are held: those that last, and those that are not delivered.
    pub fn held(&self) -> usize {
        self.lock().len()
    }

    /// Posts until the program stops. It can be started again after an unexpected end: what is held stays.
    pub async fn run(self: Arc<Self>, mut shutdown: Shutdown) {
        let mut failures = 0;
        let mut attempted_at = Instant::now();
        let mut not_before = attempted_at;
        loop {
            let due = {
                let queue = self.lock();
                // What has never been sent does not wait for the pause after an earlier failure to end.
                let gate = if queue.has_news() {
                    not_before.min(attempted_at + self.timing.backoff)
                } else {
                    not_before
                };
                queue.next_due().map(|due| due.max(gate))
            };
            tokio::select! {
                () = shutdown.wait() => break,
                () = self.wake.notified() => continue,
                () = sleep_until(due) => {}
            }
            attempted_at = Instant::now();
            match self.post_due().await {
                Ok(()) => {
                    if failures > 0 {
                        tracing::info!(
                            alertmanager = self.config.url,
                            failures,
                            "Alertmanager accepts alerts again."
                        );
                    }
                    failures = 0;
                    not_before = attempted_at;
                }
                Err(error) => {
                    if failures == 0 {
                        tracing::warn!(
                            alertmanager = self.config.url,
                            %error,
                            "Alertmanager did not accept alerts. They are kept and tried again."
                        );
                    }
                    not_before = Instant::now() + self.pause_after(failures);
                    failures = failures.saturating_add(1);
                }
            }
        }
        if self.lock().has_news() {
            let last = tokio::time::timeout(LAST_POST, self.post_due()).await;
            if !matches!(last, Ok(Ok(()))) {
                tracing::warn!(
                    alertmanager = self.config.url,
                    "Alerts were not delivered before the program stopped."
                );
            }
        }
    }

    /// Doubles with each failure, and is spread over half of itself so that the nodes of a cluster do not come at once.
    fn pause_after(&self, failures: u32) -> Duration {
        let pause = self.timing.backoff.saturating_mul(1 << failures.min(16)).min(self.timing.max_backoff);
        // Where the nanoseconds stand is random enough to spread nodes.
        let spread = f64::from(Timestamp::now().subsec_nanosecond().unsigned_abs() % 1_000_000) / 1e6;
        pause.mul_f64(0.5 + spread / 2.0)
    }

    async fn post_due(&self) -> Result<(), PostError> {
        let now = Timestamp::now();
        let (batch, dropped) = self.lock().due(Instant::now(), now, &self.config);
        self.count_dropped(dropped);
        if batch.is_empty() {
            return Ok(());
        }
        let body = serde_json::to_vec(&batch.body).expect("JSON values can be written");
        let result = post::post(&self.client, Bytes::from(body)).await;
        let outcome = match &result {
            Ok(()) => Outcome::Accepted,
            // The same again would be refused again: it waits for the next regular post.
            Err(PostError::Refused(..)) => Outcome::Refused,
            Err(_) => Outcome::Failed,
        };
        self.lock().posted(&batch, outcome, Instant::now());
        self.telemetry.alert_sent(&self.config.url, result.as_ref().map_or_else(PostError::label, |()| "ok"));
        result
    }

    fn count_dropped(&self, dropped: u64) {
        if dropped > 0 {
            tracing::warn!(
                alertmanager = self.config.url,
                alerts = dropped,
                "Alerts were given up: too many wait, or Alertmanager did not take them in time."
            );
            self.telemetry.alerts_dropped(&self.config.url, dropped);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sleeps for ever when there is nothing to wait for, and not at all when it is time: the runtime's timer would round
/// that up to a millisecond.
pub(super) async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) if due <= Instant::now() => {}
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}
