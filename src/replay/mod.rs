//! Recorded logs through the same model: what happened, after the fact.
//!
//! Each stream (one log with its rotated parts) is read in its own order; streams are merged by their stamps. At equal
//! stamps server.log comes before control.log, so that a server's announcement of its end is known before the daemon
//! says that it ended, as when they are followed live.

mod stream;

use std::collections::BTreeMap;
use std::io::BufRead;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::engine::incident::Incident;
use crate::engine::snapshot::XidView;
use crate::engine::{Node, Settings};
use crate::event::{
    DaemonSite, Event, EventKind, Liveness, LockState, LogFile, LogPlace, SourceHealth, SourceName,
};
use crate::identity::DaemonName;
use crate::source::live;
use crate::source::mps_log::reader::Counts;
use crate::time::Moment;

use stream::Stream;
pub use stream::{Kind, detect};

/// How long after its last line a recording is let go on, so that what waits for more evidence is decided.
const AFTERMATH: Duration = Duration::from_secs(60);

/// Recorded logs of one node.
pub struct Recording {
    streams: Vec<Stream>,
    zone: TimeZone,
    boot: Option<Timestamp>,
    reference: Timestamp,
}

/// What a recording tells.
#[derive(Debug)]
pub struct Outcome {
    /// Incidents, oldest first.
    pub incidents: Vec<Arc<Incident>>,
    /// Lines by stream.
    pub counts: Vec<(String, Counts)>,
    /// Stamp of the first and the last event.
    pub span: Option<(Timestamp, Timestamp)>,
    /// Xids by code and device, also those that belong to no incident: of a GPU where no MPS client was seen.
    pub xids: Vec<XidView>,
    /// Events without a time that could be told; they are not in the incidents.
    pub undated: u64,
    /// Streams of which a part could not be read to its end, and why.
    pub broken_off: Vec<(String, std::io::Error)>,
}

impl Recording {
    /// An empty recording. `zone` is that of stamps that name none; `boot` is when the machine booted, for kernel logs
    /// that count from there; `reference` is when the recording was made, for stamps without a year.
    pub fn new(zone: TimeZone, boot: Option<Timestamp>, reference: Timestamp) -> Recording {
        Recording { streams: Vec::new(), zone, boot, reference }
    }

    /// Adds a log of `daemon` (for a kernel log: any name), with its rotated parts, oldest first.
    pub fn add(&mut self, label: &str, daemon: &str, kind: Kind, parts: Vec<Box<dyn BufRead>>) {
        self.streams.push(Stream::new(
            label,
            daemon.into(),
            kind,
            parts,
            self.zone.clone(),
            self.boot,
            self.reference,
        ));
    }

    /// Runs the model over it.
    pub fn run(mut self, mut settings: Settings) -> Outcome {
        settings.incidents_kept = usize::MAX;
        let mut next: Vec<Option<(Timestamp, EventKind)>> =
            self.streams.iter_mut().map(Stream::next).collect();
        let first = next.iter().flatten().map(|(at, _)| *at).min();
        let start = Moment::recorded(first.unwrap_or(self.reference));
        let mut node = Node::new(settings, start);
        self.introduce(&mut node, start);
        let mut last = first;
        while let Some(chosen) = earliest(&next, &self.streams) {
            let stream = &mut self.streams[chosen];
            let Some((at, kind)) = std::mem::replace(&mut next[chosen], stream.next()) else { continue };
            last = last.max(Some(at));
            node.apply(&live(Moment::recorded(at), kind));
            // Nobody listens to what the model asks.
            drop(node.take_effects());
        }
        if let Some(last) = last {
            node.apply(&live(Moment::recorded(last).after(AFTERMATH), EventKind::Tick));
        }
        let snapshot = node.snapshot();
        let mut incidents = snapshot.incidents;
        incidents.reverse();
        Outcome {
            incidents,
            xids: snapshot.xids,
            counts: self.streams.iter().map(|stream| (stream.label.clone(), stream.counts())).collect(),
            span: first.zip(last),
            undated: self.streams.iter().map(|stream| stream.undated).sum(),
            broken_off: self
                .streams
                .into_iter()
                .flat_map(|stream| {
                    stream.broken_off.into_iter().map(move |error| (stream.label.clone(), error))
                })
                .collect(),
        }
    }

    /// Tells the model which daemons there are and which sources tell of them.
    fn introduce(&self, node: &mut Node, at: Moment) {
        let mut daemons: BTreeMap<DaemonName, Vec<SourceName>> = BTreeMap::new();
        for stream in &self.streams {
            match stream.kind {
                Kind::Mps(file) => daemons.entry(stream.daemon.clone()).or_default().push(match file {
                    LogFile::Control => SourceName::ControlLog,
                    LogFile::Server => SourceName::ServerLog,
                    LogFile::Merged => SourceName::DaemonOutput,
                }),
                Kind::Kernel => node.apply(&healthy(at, SourceName::KernelLog, None)),
            }
        }
        for (name, sources) in daemons {
            node.apply(&live(at, EventKind::DaemonFound(site(&name))));
            let liveness = Liveness { state: LockState::HeldElsewhere, unanswered: 0, pid_file: None };
            node.apply(&live(at, EventKind::Liveness(name.clone(), liveness)));
            for source in sources {
                node.apply(&healthy(at, source, Some(name.clone())));
            }
        }
    }
}

fn healthy(at: Moment, source: SourceName, daemon: Option<DaemonName>) -> Event {
    live(at, EventKind::Source(SourceHealth { source, daemon, state: Ok(()) }))
}

fn site(name: &DaemonName) -> DaemonSite {
    DaemonSite {
        name: name.clone(),
        pipe_directory: "".into(),
        log_directory: "".into(),
        root: "".into(),
        process: None,
        started_at: None,
        log: LogPlace::Files,
        visible_devices: None,
        is_configured: true,
    }
}

/// The stream whose next event comes first.
fn earliest(next: &[Option<(Timestamp, EventKind)>], streams: &[Stream]) -> Option<usize> {
    let rank = |index: usize| match streams[index].kind {
        Kind::Kernel => 0,
        Kind::Mps(LogFile::Server | LogFile::Merged) => 1,
        Kind::Mps(LogFile::Control) => 2,
    };
    let waiting = next
        .iter()
        .enumerate()
        .filter_map(|(index, event)| event.as_ref().map(|(at, _)| (*at, rank(index), index)));
    waiting.min().map(|(_, _, index)| index)
}
