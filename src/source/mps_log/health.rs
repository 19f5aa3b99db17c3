//! What a person is told about a log that cannot be read.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::files::Files;
use super::stream::Stream;
use super::tail::TailProblem;
use crate::event::{DaemonSite, LogFile, SourceName};
use crate::identity::DaemonName;
use crate::source::Outbox;

/// How often a log that can be read is reported as such.
const REFRESH: Duration = Duration::from_secs(15);

/// Tells the model and the log how the sources fare, when that changes.
#[derive(Debug)]
pub(super) struct Health {
    outbox: Outbox,
    daemon: DaemonName,
    told: BTreeMap<SourceName, (Result<(), Arc<str>>, Instant)>,
}

impl Health {
    pub fn new(outbox: Outbox, daemon: DaemonName) -> Health {
        Health { outbox, daemon, told: BTreeMap::new() }
    }

    /// Tells how the logs of `site` fare. A kind of log works if one of its streams does.
    pub async fn tell(&mut self, site: &DaemonSite, streams: &[Stream]) {
        for file in [LogFile::Control, LogFile::Server, LogFile::Merged] {
            let mut problems = streams.iter().filter(|stream| stream.file == file).map(|s| s.tail.problem());
            let Some(first) = problems.next() else { continue };
            let state = match first {
                Some(problem) if problems.all(|other| other.is_some()) => Err(advice(problem, site).into()),
                _ => Ok(()),
            };
            self.tell_one(Files::source_of(file), state).await;
        }
    }

    /// Tells how one source fares.
    pub async fn tell_one(&mut self, source: SourceName, state: Result<(), Arc<str>>) {
        let before = self.told.get(&source);
        let has_changed = before.is_none_or(|(told, _)| *told != state);
        let is_due = before.is_none_or(|(_, at)| at.elapsed() >= REFRESH);
        if !has_changed && (!is_due || state.is_err()) {
            return;
        }
        if has_changed {
            let daemon = &self.daemon;
            if let Err(reason) = &state {
                tracing::warn!(%daemon, ?source, %reason, "This daemon's log cannot be read.");
            } else {
                tracing::info!(%daemon, ?source, "This daemon's log is being read.");
            }
        }
        self.told.insert(source, (state.clone(), Instant::now()));
        self.outbox.health(source, Some(&self.daemon), state).await;
    }
}

/// What is wrong, and what to do about it.
fn advice(problem: &TailProblem, site: &DaemonSite) -> String {
    match problem {
        TailProblem::Missing(path) => {
            let directory = path.parent().unwrap_or(Path::new("/"));
            let what = if directory.is_dir() { path.display() } else { directory.display() };
            if site.process.is_none() {
                return format!("{what} does not exist; the daemon does not seem to run");
            }
            format!(
                "{what} does not exist: the daemon writes its logs elsewhere or not at all; set log_directory of \
                 this daemon to its CUDA_MPS_LOG_DIRECTORY, or log to where its output goes if it runs with -f"
            )
        }
        TailProblem::Refused { path, reason } => format!(
            "{} cannot be read ({reason}): run the exporter as root or as the daemon's user, or let it read the \
             file and enter its directory",
            path.display()
        ),
        TailProblem::NotAFile(path) => format!("{} is not a regular file: remove it", path.display()),
    }
}
