//! Counters about the exporter's own work. What the node is like is in the model's snapshot instead.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use prometheus::{
    GaugeVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGaugeVec, Opts, Registry,
};

use crate::event::LogFile;
use crate::metrics::families::{self, Family};
use crate::time::unix_seconds;

/// Buckets of `mps_control_query_duration_seconds`: a healthy session takes about a millisecond, the deadline is 2 s.
const QUERY_BUCKETS: [f64; 9] = [0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 2.0];

/// Shared by every source and outlet. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Telemetry(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    registry: Registry,
    version: AtomicU64,
    log_lines: IntCounterVec,
    log_bytes: IntCounterVec,
    log_lag: IntGaugeVec,
    log_lost: IntCounterVec,
    control_queries: IntCounterVec,
    control_query_duration: HistogramVec,
    kmsg_lost: IntCounter,
    kmsg_rejected: IntCounter,
    source_errors: IntCounterVec,
    alerts_sent: Events,
    alerts_dropped: IntCounterVec,
    hook_runs: Events,
    restarts: Events,
    journal_errors: IntCounter,
    config_reloads: IntCounterVec,
    web_config_reloads: IntCounterVec,
    task_restarts: IntCounterVec,
}

/// A counter of events and the time of the last.
#[derive(Debug)]
struct Events {
    total: IntCounterVec,
    last: GaugeVec,
}

impl Events {
    fn add(&self, labels: &[&str]) {
        self.total.with_label_values(labels).inc();
        self.last.with_label_values(labels).set(unix_seconds(Timestamp::now()));
    }
}

/// How a look at a control daemon ended; the label `result`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QueryResult {
    /// Answered.
    Ok,
    /// No answer within the deadline.
    Timeout,
    /// Nobody listens, or we may not connect.
    Refused,
    /// Anything else.
    Error,
}

impl QueryResult {
    /// Every value, so that series start at 0.
    pub const ALL: [QueryResult; 4] =
        [QueryResult::Ok, QueryResult::Timeout, QueryResult::Refused, QueryResult::Error];

    /// The label's value.
    pub fn label(self) -> &'static str {
        match self {
            QueryResult::Ok => "ok",
            QueryResult::Timeout => "timeout",
            QueryResult::Refused => "refused",
            QueryResult::Error => "error",
        }
    }
}

/// The label value of a log file.
pub fn file_label(file: LogFile) -> &'static str {
    match file {
        LogFile::Control => "control.log",
        LogFile::Server => "server.log",
        LogFile::Merged => "stdout",
    }
}

fn reload_label(accepted: bool) -> &'static str {
    if accepted { "accepted" } else { "refused" }
}

/// Both results, from 0.
fn reloads(counters: IntCounterVec) -> IntCounterVec {
    for accepted in [true, false] {
        counters.with_label_values(&[reload_label(accepted)]);
    }
    counters
}

impl Default for Telemetry {
    fn default() -> Self {
        Telemetry::new()
    }
}

impl Telemetry {
    /// All counters, registered and at 0.
    pub fn new() -> Telemetry {
        let registry = Registry::new();
        let options = |family: &Family| Opts::new(family.name, family.help);
        let counters = |family: &Family| {
            let made = IntCounterVec::new(options(family), family.labels)
                .expect("the table's names and labels are valid");
            registry.register(Box::new(made.clone())).expect("each name is registered once");
            made
        };
        let counter = |family: &Family| {
            let made = IntCounter::with_opts(options(family)).expect("the table's names are valid");
            registry.register(Box::new(made.clone())).expect("each name is registered once");
            made
        };
        let log_lag = IntGaugeVec::new(options(&families::LOG_LAG), families::LOG_LAG.labels)
            .expect("the table's names and labels are valid");
        registry.register(Box::new(log_lag.clone())).expect("each name is registered once");
        let duration = &families::CONTROL_QUERY_DURATION;
        let control_query_duration = HistogramVec::new(
            HistogramOpts::new(duration.name, duration.help).buckets(QUERY_BUCKETS.to_vec()),
            duration.labels,
        )
        .expect("the table's names and labels are valid");
        registry.register(Box::new(control_query_duration.clone())).expect("each name is registered once");
        let events = |family: &Family, last: &Family| {
            let made =
                GaugeVec::new(options(last), last.labels).expect("the table's names and labels are valid");
            registry.register(Box::new(made.clone())).expect("each name is registered once");
            Events { total: counters(family), last: made }
        };
        Telemetry(Arc::new(Inner {
            version: AtomicU64::new(0),
            log_lines: counters(&families::LOG_LINES),
            log_bytes: counters(&families::LOG_BYTES),
            log_lag,
            log_lost: counters(&families::LOG_DISCONTINUITIES),
            control_queries: counters(&families::CONTROL_QUERIES),
            control_query_duration,
            kmsg_lost: counter(&families::KMSG_RECORDS_LOST),
            kmsg_rejected: counter(&families::KMSG_RECORDS_INJECTED),
            source_errors: counters(&families::SOURCE_ERRORS),
            alerts_sent: events(&families::ALERTS_SENT, &families::ALERT_SENT_LAST),
            alerts_dropped: counters(&families::ALERTS_DROPPED),
            hook_runs: events(&families::HOOK_RUNS, &families::HOOK_RUN_LAST),
            restarts: events(&families::DAEMON_RESTARTS, &families::DAEMON_RESTART_LAST),
            journal_errors: counter(&families::JOURNAL_ERRORS),
            config_reloads: reloads(counters(&families::CONFIG_RELOADS)),
            web_config_reloads: reloads(counters(&families::WEB_CONFIG_RELOADS)),
            task_restarts: counters(&families::TASK_RESTARTS),
            registry,
        }))
    }

    /// The registry that holds these counters.
    pub fn registry(&self) -> &Registry {
        &self.0.registry
    }

    /// Grows with every change, so that a rendered page knows when it is old.
    pub fn version(&self) -> u64 {
        self.0.version.load(Ordering::Relaxed)
    }

    fn changed(&self) {
        self.0.version.fetch_add(1, Ordering::Relaxed);
    }

    /// Lines and bytes read from an MPS log.
    pub fn log_read(&self, daemon: &str, file: LogFile, recognized: u64, unrecognized: u64, bytes: u64) {
        let file = file_label(file);
        self.0.log_lines.with_label_values(&[daemon, file, "recognized"]).inc_by(recognized);
        self.0.log_lines.with_label_values(&[daemon, file, "unrecognized"]).inc_by(unrecognized);
        self.0.log_bytes.with_label_values(&[daemon, file]).inc_by(bytes);
        self.changed();
    }

    /// What of an MPS log is not read yet.
    pub fn log_lag(&self, daemon: &str, file: LogFile, bytes: u64) {
        let gauge = self.0.log_lag.with_label_values(&[daemon, file_label(file)]);
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        if gauge.get() != bytes {
            gauge.set(bytes);
            self.changed();
        }
    }

    /// An MPS log was truncated, replaced or cut: `reason` is one of a few constant words.
    pub fn log_discontinuity(&self, daemon: &str, file: LogFile, reason: &'static str) {
        self.0.log_lost.with_label_values(&[daemon, file_label(file), reason]).inc();
        self.changed();
    }

    /// A session with a control daemon ended.
    pub fn control_query(&self, daemon: &str, result: QueryResult, took: Duration) {
        for each in QueryResult::ALL {
            self.0.control_queries.with_label_values(&[daemon, each.label()]);
        }
        self.0.control_queries.with_label_values(&[daemon, result.label()]).inc();
        self.0
            .control_query_duration
            .with_label_values(&[daemon, result.label()])
            .observe(took.as_secs_f64());
        self.changed();
    }

    /// Kernel log records were overwritten unread.
    pub fn kmsg_lost(&self, records: u64) {
        self.0.kmsg_lost.inc_by(records);
        self.changed();
    }

    /// A user process wrote an Xid line into the kernel log.
    pub fn kmsg_injected(&self) {
        self.0.kmsg_rejected.inc();
        self.changed();
    }

    /// A source met an error: `reason` is one of a few constant words.
    pub fn source_error(&self, source: &'static str, reason: &'static str) {
        self.0.source_errors.with_label_values(&[source, reason]).inc();
        self.changed();
    }

    /// An Alertmanager is configured: its series start at 0.
    pub fn alertmanager_known(&self, alertmanager: &str, results: &[&'static str]) {
        for result in results {
            self.0.alerts_sent.total.with_label_values(&[alertmanager, result]);
        }
        self.0.alerts_dropped.with_label_values(&[alertmanager]);
        self.changed();
    }

    /// A hook is configured: its series start at 0.
    pub fn hook_known(&self, hook: &str, results: &[&'static str]) {
        for result in results {
            self.0.hook_runs.total.with_label_values(&[hook, result]);
        }
        self.changed();
    }

    /// A post to an Alertmanager ended: `result` is one of a few constant words.
    pub fn alert_sent(&self, alertmanager: &str, result: &'static str) {
        self.0.alerts_sent.add(&[alertmanager, result]);
        self.changed();
    }

    /// Alerts to an Alertmanager were given up.
    pub fn alerts_dropped(&self, alertmanager: &str, alerts: u64) {
        self.0.alerts_dropped.with_label_values(&[alertmanager]).inc_by(alerts);
        self.changed();
    }

    /// A hook ran: `result` is one of a few constant words.
    pub fn hook_run(&self, hook: &str, result: &'static str) {
        self.0.hook_runs.add(&[hook, result]);
        self.changed();
    }

    /// A daemon restart was tried: `result` is one of a few constant words.
    pub fn daemon_restart(&self, daemon: &str, result: &'static str) {
        self.0.restarts.add(&[daemon, result]);
        self.changed();
    }

    /// The incident journal could not be written.
    pub fn journal_error(&self) {
        self.0.journal_errors.inc();
        self.changed();
    }

    /// The configuration was read again.
    pub fn config_reload(&self, accepted: bool) {
        self.0.config_reloads.with_label_values(&[reload_label(accepted)]).inc();
        self.changed();
    }

    /// The web configuration, or a certificate that it names, was read again.
    pub fn web_config_reload(&self, accepted: bool) {
        self.0.web_config_reloads.with_label_values(&[reload_label(accepted)]).inc();
        self.changed();
    }

    /// A task ended unexpectedly and was started again.
    pub fn task_restart(&self, task: &'static str) {
        self.0.task_restarts.with_label_values(&[task]).inc();
        self.changed();
    }

    /// A daemon is gone for good: its series go with it.
    pub fn forget_daemon(&self, daemon: &str) {
        for file in [LogFile::Control, LogFile::Server, LogFile::Merged].map(file_label) {
            for class in ["recognized", "unrecognized"] {
                let _absent = self.0.log_lines.remove_label_values(&[daemon, file, class]);
            }
            let _absent = self.0.log_bytes.remove_label_values(&[daemon, file]);
            let _absent = self.0.log_lag.remove_label_values(&[daemon, file]);
        }
        for result in QueryResult::ALL {
            let _absent = self.0.control_queries.remove_label_values(&[daemon, result.label()]);
            let _absent = self.0.control_query_duration.remove_label_values(&[daemon, result.label()]);
        }
        self.changed();
    }
}
