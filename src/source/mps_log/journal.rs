//! A `-f` daemon whose output is in the journal: `journalctl` is asked to follow it, and asked again when it ends.

use std::borrow::Cow;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use jiff::Timestamp;
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::watch;
use tokio::time::Instant;

use super::cursor::{CursorFile, DaemonCursor, JournalCursor};
use super::health::Health;
use super::reader::LineReader;
use super::save::Saver;
use super::source::{Ended, MpsLogSource};
use crate::event::{DaemonSite, Event, EventKind, Freshness, LogFile, LogPlace, SourceName};
use crate::source::{Outbox, Shutdown};
use crate::telemetry::Telemetry;
use crate::time::Moment;

/// An entry of the journal as text; a longer one is skipped and counted.
const ENTRY_LIMIT: usize = 256 * 1024;

/// How many entries are read to learn the present state.
const HISTORY_ENTRIES: u32 = 100_000;

/// How many events are sent at once.
const BATCH: usize = 256;

/// How much of what `journalctl` complains of is kept.
const COMPLAINT_LIMIT: u64 = 1024;

/// The wait before `journalctl` is started again doubles from the first to the second.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// One that ran this long is well.
const WELL_AFTER: Duration = Duration::from_secs(2);

/// How long the last place may take to be kept.
const SETTLE: Duration = Duration::from_secs(1);

/// Follows the journal entries of one daemon.
#[derive(Debug)]
pub(super) struct Journal {
    site: DaemonSite,
    unit: Option<String>,
    program: PathBuf,
    outbox: Outbox,
    telemetry: Telemetry,
    reader: LineReader,
    cursor: Option<String>,
    saver: Saver,
    health: Health,
}

/// The fields that matter of an entry in `journalctl`'s JSON.
#[derive(Debug, Deserialize)]
struct Entry<'a> {
    #[serde(rename = "__CURSOR", borrow)]
    cursor: Cow<'a, str>,
    /// Microseconds since the epoch.
    #[serde(rename = "__REALTIME_TIMESTAMP", borrow)]
    realtime: Cow<'a, str>,
    #[serde(rename = "MESSAGE", default)]
    message: Option<Message>,
}

/// A message: text, or bytes where it is not UTF-8.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Message {
    Text(String),
    Bytes(Vec<u8>),
}

/// Why following stopped.
enum Stop {
    Ended(Ended),
    /// `journalctl` ended, or could not be started.
    Broken(String),
}

impl Journal {
    /// The entries of `site`'s daemon, from where `cursor` says.
    pub fn open(
        source: &MpsLogSource,
        site: DaemonSite,
        unit: Option<String>,
        store: CursorFile,
        cursor: Option<DaemonCursor>,
    ) -> Journal {
        let place = cursor.and_then(|cursor| cursor.journal);
        let (cursor, context) = place.map(|place| (place.cursor, place.context)).unzip();
        source.telemetry.log_read(&site.name, LogFile::Merged, 0, 0, 0);
        Journal {
            unit,
            program: source.settings.journalctl.clone(),
            outbox: source.outbox.clone(),
            telemetry: source.telemetry.clone(),
            reader: LineReader::resume(LogFile::Merged, context.unwrap_or_default()),
            cursor,
            saver: Saver::new(store, site.name.clone(), source.telemetry.clone()),
            health: Health::new(source.outbox.clone(), site.name.clone()),
            site,
        }
    }

    /// The place to go on from.
    pub fn into_cursor(self) -> DaemonCursor {
        self.place()
    }

    fn place(&self) -> DaemonCursor {
        let journal = self.cursor.clone().map(|cursor| {
            let context = self.reader.context().clone();
            JournalCursor { cursor, context }
        });
        DaemonCursor { journal, ..DaemonCursor::new(&self.site.name) }
    }

    /// Follows the journal until the program stops, the model is gone, or the log is somewhere else.
    pub async fn run(&mut self, sites: &mut watch::Receiver<DaemonSite>, shutdown: &mut Shutdown) -> Ended {
        let mut wait = RETRY.0;
        loop {
            let started = Instant::now();
            let reason = match self.follow(sites, shutdown).await {
                Stop::Ended(ended) => {
                    let place = self.place();
                    let _best_effort = tokio::time::timeout(SETTLE, self.saver.finish(Some(place))).await;
                    return ended;
                }
                Stop::Broken(reason) => reason,
            };
            let is_well = started.elapsed() >= WELL_AFTER;
            wait = if is_well { RETRY.0 } else { (wait * 2).min(RETRY.1) };
            self.telemetry.source_error("mps_log", "journalctl");
            let advice = format!(
                "journalctl does not give this daemon's output ({reason}): let the exporter run it and read the \
                 journal (group systemd-journal), or set log of this daemon to a file"
            );
            self.health.tell_one(SourceName::DaemonOutput, Err(advice.into())).await;
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = shutdown.wait() => {
                    let place = self.place();
                    self.saver.finish(Some(place)).await;
                    return Ended::Stopped;
                }
            }
        }
    }

    fn start(&self) -> std::io::Result<Child> {
        let mut command = Command::new(&self.program);
        command.args(["--follow", "--no-pager", "--quiet", "--output=json", "--output-fields=MESSAGE"]);
        match &self.cursor {
            Some(cursor) => {
                // Without `--no-tail`, following begins ten entries before the end.
                command.arg("--no-tail").arg(format!("--after-cursor={cursor}"));
            }
            None => {
                command.arg(format!("--lines={HISTORY_ENTRIES}"));
            }
        }
        match (&self.unit, self.site.process) {
            // The unit's own lines, not what systemd says of it.
            (Some(unit), _) => command.arg(format!("--unit={unit}")).arg("_TRANSPORT=stdout"),
            (None, Some(process)) => command.arg("--boot").arg(format!("_PID={}", process.pid)),
            (None, None) => return Err(std::io::Error::other("neither a unit nor a process is known")),
        };
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn()
    }

    /// Follows one `journalctl` to its end.
    async fn follow(&mut self, sites: &mut watch::Receiver<DaemonSite>, shutdown: &mut Shutdown) -> Stop {
        let mut child = match self.start() {
            Ok(child) => child,
            Err(error) => return Stop::Broken(format!("{}: {error}", self.program.display())),
        };
        let (Some(output), Some(mut errors)) = (child.stdout.take(), child.stderr.take()) else {
            return Stop::Broken("it has no output".to_owned());
        };
        let begun = self.outbox.clock.now();
        let is_resumed = self.cursor.is_some();
        let mut output = BufReader::with_capacity(64 * 1024, output);
        let mut entry = Vec::new();
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                biased;
                () = shutdown.wait() => return Stop::Ended(Ended::Stopped),
                changed = sites.changed() => {
                    if changed.is_err() {
                        return Stop::Ended(Ended::Stopped);
                    }
                    let site = sites.borrow_and_update().clone();
                    let is_other = site.log != LogPlace::Journal { unit: self.unit.clone() }
                        || (self.unit.is_none() && site.process != self.site.process);
                    self.site = site;
                    if is_other {
                        return Stop::Ended(Ended::Moved);
                    }
                }
                () = self.saver.wait() => {
                    if self.outbox.is_drained() {
                        let place = self.place();
                        self.saver.begin(place);
                    } else {
                        self.saver.postpone();
                    }
                }
                () = tokio::time::sleep(WELL_AFTER) => {
                    self.health.tell_one(SourceName::DaemonOutput, Ok(())).await;
                }
                // Cancelled between two reads, it goes on with what `entry` holds.
                read = read_entry(&mut output, &mut entry) => match read {
                    Ok(true) => {
                        self.take(&entry, begun, is_resumed, &mut batch);
                        entry.clear();
                        let has_more = output.buffer().contains(&b'\n');
                        if (!has_more || batch.len() >= BATCH) && !batch.is_empty() {
                            self.saver.changed(true);
                            if !self.outbox.send(std::mem::take(&mut batch)).await {
                                return Stop::Ended(Ended::Stopped);
                            }
                        }
                        if !has_more {
                            self.saver.changed(false);
                            self.health.tell_one(SourceName::DaemonOutput, Ok(())).await;
                            tokio::task::yield_now().await;
                        }
                    }
                    Ok(false) => {
                        let mut complaint = String::new();
                        let _partial = (&mut errors).take(COMPLAINT_LIMIT).read_to_string(&mut complaint).await;
                        let status = child.wait().await;
                        let status = status.map_or_else(|error| error.to_string(), |status| status.to_string());
                        let last = complaint.trim().lines().last().unwrap_or(&status).to_owned();
                        return Stop::Broken(last);
                    }
                    Err(error) => return Stop::Broken(error.to_string()),
                },
            }
        }
    }

    fn take(&mut self, text: &[u8], begun: Moment, is_resumed: bool, batch: &mut Vec<Event>) {
        let mut is_history = false;
        match serde_json::from_slice::<Entry<'_>>(text) {
            Ok(entry) => {
                let at =
                    entry.realtime.parse().ok().and_then(|micros| Timestamp::from_microsecond(micros).ok());
                let now = self.outbox.clock.now();
                let at = at.map_or(now, |wall| now.at_wall(wall));
                let freshness = match (at.wall < begun.wall, is_resumed) {
                    (false, _) => Freshness::Live,
                    (true, true) => Freshness::CaughtUp,
                    (true, false) => Freshness::History,
                };
                is_history = freshness == Freshness::History;
                let at =
                    if freshness == Freshness::Live { Moment { wall: at.wall, mono: now.mono } } else { at };
                let message = match &entry.message {
                    Some(Message::Text(text)) => text.as_bytes(),
                    Some(Message::Bytes(bytes)) => bytes,
                    None => b"?",
                };
                if let Some(said) = self.reader.line(message) {
                    let kind = EventKind::Log(self.site.name.clone(), said.into_entry(LogFile::Merged));
                    batch.push(Event { at, freshness, kind });
                }
                self.cursor = Some(entry.cursor.into_owned());
            }
            Err(_not_an_entry) => {
                self.reader.line(b"?");
            }
        }
        let counts = self.reader.take_counts();
        if !is_history {
            let bytes = text.len() as u64;
            self.telemetry.log_read(
                &self.site.name,
                LogFile::Merged,
                counts.recognized,
                counts.unrecognized,
                bytes,
            );
        }
    }
}

/// Reads an entry into `entry`, bounded; `false` at the end. Safe to be cancelled and called again.
async fn read_entry(output: &mut BufReader<ChildStdout>, entry: &mut Vec<u8>) -> std::io::Result<bool> {
    loop {
        let piece = output.fill_buf().await?;
        if piece.is_empty() {
            return Ok(false);
        }
        let end = memchr::memchr(b'\n', piece);
        let length = end.map_or(piece.len(), |end| end + 1);
        let room = ENTRY_LIMIT.saturating_sub(entry.len());
        entry.extend_from_slice(&piece[..length.min(room)]);
        output.consume(length);
        if end.is_some() {
            return Ok(true);
        }
    }
}
