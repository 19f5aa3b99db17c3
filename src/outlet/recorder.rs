//! The journal behind a thread of its own, so that a slow or hung disk stops neither scrapes nor alerts.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::config::State;
use crate::outlet::journal::{Action, Journal, JournalError, Record, Restored};
use crate::telemetry::Telemetry;

/// How long an alert waits for its incident to be on the disk before it leaves without.
pub const DEADLINE: Duration = Duration::from_millis(500);
/// Requests that may wait for the disk.
const QUEUE: usize = 256;
/// Records kept in memory while the journal cannot be written. Beyond, the oldest are lost.
const UNWRITTEN: usize = 1024;
/// How often a journal that cannot be written is tried again.
const RETRY: Duration = Duration::from_secs(10);

/// Hands records to the journal's thread. Cheap to clone; the thread ends with the last of them.
#[derive(Debug, Clone)]
pub struct Recorder {
    requests: Option<SyncSender<Request>>,
    kept: Arc<AtomicUsize>,
    telemetry: Telemetry,
}

#[derive(Debug)]
struct Request {
    records: Vec<Record>,
    done: oneshot::Sender<bool>,
}

impl Recorder {
    /// Opens the journal and reads back what an earlier run left. A journal that cannot be opened is reported, tried
    /// again later, and meanwhile its records wait in memory.
    pub fn start(state: &State, telemetry: &Telemetry) -> (Recorder, Restored) {
        let Some(directory) = state.directory.clone() else {
            let recorder = Recorder { requests: None, kept: Arc::default(), telemetry: telemetry.clone() };
            return (recorder, Restored::default());
        };
        let kept = Arc::new(AtomicUsize::new(state.incidents_kept));
        let mut writer = Writer {
            directory,
            kept: kept.clone(),
            telemetry: telemetry.clone(),
            journal: None,
            unwritten: Unwritten::default(),
            trouble: None,
            tried_at: Instant::now(),
        };
        let restored = writer.open().unwrap_or_default();
        let (requests, queue) = sync_channel(QUEUE);
        let thread = std::thread::Builder::new().name("journal".into()).spawn(move || writer.run(&queue));
        if let Err(error) = &thread {
            tracing::error!(%error, "The thread of the incident journal could not be started: nothing is recorded.");
            telemetry.journal_error();
        }
        (
            Recorder { requests: thread.is_ok().then_some(requests), kept, telemetry: telemetry.clone() },
            restored,
        )
    }

    /// Changes how many incidents are kept.
    pub fn keep(&self, incidents: usize) {
        self.kept.store(incidents, Ordering::Relaxed);
    }

    /// Writes `records`. Returns when they are on the disk, could not be written, or [`DEADLINE`] has passed; whoever
    /// waits goes on in any case. `true`: they are on the disk, or nothing is to be kept.
    pub async fn record(&self, records: Vec<Record>) -> bool {
        let Some(requests) = &self.requests else { return true };
        let (done, written) = oneshot::channel();
        if requests.try_send(Request { records, done }).is_err() {
            self.telemetry.journal_error();
            return false;
        }
        matches!(tokio::time::timeout(DEADLINE, written).await, Ok(Ok(true)))
    }

    /// Writes an action.
    pub async fn action(&self, action: Action) -> bool {
        self.record(vec![Record::Action(Arc::new(action))]).await
    }
}

/// Records that could not be written yet: of each incident the newest state.
#[derive(Debug, Default)]
struct Unwritten {
    incidents: BTreeMap<Arc<str>, Record>,
    actions: VecDeque<Record>,
}

impl Unwritten {
    fn add(&mut self, record: Record) {
        match &record {
            Record::Incident(incident) => {
                self.incidents.insert(incident.id.clone(), record);
                if self.incidents.len() > UNWRITTEN {
                    self.incidents.pop_first();
                }
            }
            Record::Action(_) => {
                self.actions.push_back(record);
                if self.actions.len() > UNWRITTEN {
                    self.actions.pop_front();
                }
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.incidents.is_empty() && self.actions.is_empty()
    }

    fn all(&self) -> Vec<Record> {
        self.incidents.values().chain(&self.actions).cloned().collect()
    }
}

/// What the thread owns.
struct Writer {
    directory: PathBuf,
    kept: Arc<AtomicUsize>,
    telemetry: Telemetry,
    journal: Option<Journal>,
    unwritten: Unwritten,
    /// What is wrong, as last said.
    trouble: Option<String>,
    tried_at: Instant,
}

impl Writer {
    fn run(mut self, queue: &Receiver<Request>) {
        loop {
            let first = if self.unwritten.is_empty() {
                queue.recv().ok()
            } else {
                match queue.recv_timeout(RETRY) {
                    Ok(request) => Some(request),
                    Err(RecvTimeoutError::Timeout) => {
                        self.write();
                        continue;
                    }
                    Err(RecvTimeoutError::Disconnected) => None,
                }
            };
            let Some(first) = first else { break };
            // Whatever waits goes to the disk with it: one sync for all.
            let mut waiting = Vec::new();
            for request in std::iter::once(first).chain(queue.try_iter()) {
                for record in request.records {
                    self.unwritten.add(record);
                }
                waiting.push(request.done);
            }
            let written = self.write();
            for done in waiting {
                let _gone = done.send(written);
            }
        }
        if !self.unwritten.is_empty() {
            self.write();
        }
    }

    /// Tries to write everything that is not written yet.
    fn write(&mut self) -> bool {
        if self.journal.is_none() && (self.trouble.is_none() || self.tried_at.elapsed() >= RETRY) {
            self.open();
        }
        let mut written = self.append();
        if let Some(Err(error @ JournalError::Gone(_))) = &written {
            self.failed(error);
            self.journal = None;
            self.open();
            written = self.append();
        }
        match written {
            Some(Ok(())) => {
                self.unwritten = Unwritten::default();
                if self.trouble.take().is_some() {
                    tracing::info!("The incident journal can be written again.");
                }
                true
            }
            Some(Err(error)) => {
                self.failed(&error);
                false
            }
            None => {
                self.telemetry.journal_error();
                false
            }
        }
    }

    fn append(&mut self) -> Option<Result<(), JournalError>> {
        let journal = self.journal.as_mut()?;
        journal.keep(self.kept.load(Ordering::Relaxed));
        Some(journal.append(&self.unwritten.all()))
    }

    fn open(&mut self) -> Option<Restored> {
        self.tried_at = Instant::now();
        match Journal::open(&self.directory, self.kept.load(Ordering::Relaxed)) {
            Ok((journal, restored)) => {
                self.journal = Some(journal);
                Some(restored)
            }
            Err(error) => {
                self.failed(&error);
                None
            }
        }
    }

    /// Counts the error, and says it when it is another than before.
    fn failed(&mut self, error: &JournalError) {
        self.telemetry.journal_error();
        let text = error.to_string();
        if self.trouble.as_ref() != Some(&text) {
            tracing::error!(
                error = text,
                "The incident journal cannot be written. Incidents still page and are kept in memory; state.directory names the place."
            );
            self.trouble = Some(text);
        }
    }
}
