//! Follows the log files of one daemon: control.log with server.log, or one file with both.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use jiff::tz::TimeZone;
use tokio::sync::{Notify, watch};

use super::cursor::{CursorFile, DaemonCursor, StreamCursor};
use super::health::Health;
use super::save::Saver;
use super::source::{Ended, MpsLogSource};
use super::stamp::zone_of;
use super::stream::{Stream, are_done, merge};
use super::tail::{FileId, HISTORY_LIMIT, Tail};
use super::watch::{DirectoryWatch, LogWatcher};
use crate::event::{DaemonSite, LogFile, LogPlace, SourceName};
use crate::source::process::proc::ProcRoot;
use crate::source::{Outbox, Shutdown};
use crate::telemetry::Telemetry;

/// How much of one log is read before others have their turn.
const PIECE: usize = 64 * 1024;

/// How many events are sent at once.
const BATCH: usize = 256;

/// How often the files are looked at without being woken.
const POLL: Duration = Duration::from_secs(1);

/// The same, where nothing wakes.
const POLL_ALONE: Duration = Duration::from_millis(200);

/// How often the daemon's open files and the folders of its servers are looked at.
const LOOK_AROUND: Duration = Duration::from_secs(10);

/// File times may lag by a timer tick.
const FILE_TIME_SLACK: Duration = Duration::from_secs(1);

/// How many servers' folders are followed (protocol v3).
const FOLDERS_LIMIT: usize = 64;

/// How many names of a log directory are looked at for them.
const ENTRIES_LIMIT: usize = 4096;

/// How long the last lines may wait for the model when the program stops.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The log files of one daemon.
#[derive(Debug)]
pub(super) struct Files {
    site: DaemonSite,
    proc: ProcRoot,
    outbox: Outbox,
    telemetry: Telemetry,
    watcher: LogWatcher,
    /// In the order in which they are read: control.log first, so that what a server logged before the daemon wrote
    /// a line is read in the same turn.
    streams: Vec<Stream>,
    saver: Saver,
    buffer: Vec<u8>,
    woken: Arc<Notify>,
    watches: Vec<DirectoryWatch>,
    health: Health,
    looked_around: Option<(Instant, SystemTime)>,
    folders_changed_at: Option<SystemTime>,
}

impl Files {
    /// The files of `site`, from where `cursor` says.
    pub fn open(
        source: &MpsLogSource,
        site: DaemonSite,
        store: CursorFile,
        cursor: Option<&DaemonCursor>,
    ) -> Files {
        let saver = Saver::new(store, site.name.clone(), source.telemetry.clone());
        let mut files = Files {
            proc: source.settings.proc.clone(),
            outbox: source.outbox.clone(),
            telemetry: source.telemetry.clone(),
            watcher: source.watcher.clone(),
            streams: Vec::new(),
            saver,
            buffer: vec![0; PIECE],
            woken: Arc::new(Notify::new()),
            watches: Vec::new(),
            health: Health::new(source.outbox.clone(), site.name.clone()),
            looked_around: None,
            folders_changed_at: None,
            site,
        };
        let saved_at = cursor.map(DaemonCursor::saved_at);
        let zone = files.zone();
        for (name, path, file) in files.places() {
            files.follow(name, path, file, cursor, saved_at, &zone);
        }
        let history: u64 = files.streams.iter().map(|stream| stream.tail.history_bytes()).sum();
        if history > 0 {
            tracing::info!(
                daemon = %files.site.name, bytes = history, limit_per_file = HISTORY_LIMIT,
                "Reading the existing log to learn who is connected; it is counted as history."
            );
        }
        files
    }

    /// The streams that there are: their names, paths and kinds.
    fn places(&self) -> Vec<(String, PathBuf, LogFile)> {
        if let LogPlace::Merged(path) = &self.site.log {
            return vec![("stdout".to_owned(), path.clone(), LogFile::Merged)];
        }
        let directory = self.site.log_path();
        let mut places = vec![
            ("control.log".to_owned(), directory.join("control.log"), LogFile::Control),
            ("server.log".to_owned(), directory.join("server.log"), LogFile::Server),
        ];
        for folder in server_folders(&directory) {
            let name = format!("{}/server.log", folder.to_string_lossy());
            places.push((name, directory.join(folder).join("server.log"), LogFile::Server));
        }
        places
    }

    fn follow(
        &mut self,
        name: String,
        path: PathBuf,
        file: LogFile,
        cursor: Option<&DaemonCursor>,
        saved_at: Option<SystemTime>,
        zone: &TimeZone,
    ) {
        let place = cursor.and_then(|cursor| cursor.stream(&name));
        let tail = Tail::open(path, file, place, saved_at, Instant::now());
        self.telemetry.log_read(&self.site.name, file, 0, 0, 0);
        self.streams.push(Stream::new(name, file, tail, zone.clone()));
    }

    /// Follows the files until the program stops, the model is gone, or the log is somewhere else.
    pub async fn run(&mut self, sites: &mut watch::Receiver<DaemonSite>, shutdown: &mut Shutdown) -> Ended {
        self.look_around();
        loop {
            self.keep_watches();
            if !self.take_turn(shutdown).await {
                return Ended::Stopped;
            }
            self.health.tell(&self.site, &self.streams).await;
            let poll = if self.watches.is_empty() { POLL_ALONE } else { POLL };
            tokio::select! {
                biased;
                () = shutdown.wait() => {
                    self.finish().await;
                    return Ended::Stopped;
                }
                changed = sites.changed() => {
                    if changed.is_err() {
                        self.finish().await;
                        return Ended::Stopped;
                    }
                    let site = sites.borrow_and_update().clone();
                    if self.is_elsewhere(&site) {
                        self.finish().await;
                        return Ended::Moved;
                    }
                    self.take_site(site);
                }
                () = self.woken.notified() => {}
                () = tokio::time::sleep(poll) => self.look_around(),
                () = self.saver.wait() => self.save(),
            }
        }
    }

    /// The places to go on from; `None` while there is none worth keeping.
    pub fn cursor(&self) -> Option<DaemonCursor> {
        if self.streams.iter().any(|stream| stream.tail.is_in_history() || !stream.is_quiet()) {
            return None;
        }
        let streams = self.streams.iter().map(|stream| stream.tail.cursor(&stream.name)).collect();
        Some(DaemonCursor { streams, ..DaemonCursor::new(&self.site.name) })
    }

    /// Reads everything that there is and sends it. `false`: the model is gone.
    async fn take_turn(&mut self, shutdown: &Shutdown) -> bool {
        self.streams.iter_mut().for_each(Stream::begin_turn);
        loop {
            self.read();
            let batch = merge(&mut self.streams, &self.site.name, BATCH, false);
            let is_done = are_done(&self.streams);
            if !batch.is_empty() {
                self.saver.changed(true);
                if !self.outbox.send(batch).await {
                    return false;
                }
            }
            if is_done || shutdown.is_set() {
                break;
            }
            // A long backlog must not keep the model from what it has been given, nor others from the thread.
            tokio::task::yield_now().await;
        }
        self.tell_lag();
        true
    }

    fn read(&mut self) {
        let (now, instant) = (self.outbox.clock.now(), Instant::now());
        let mut has_daemon_spoken = false;
        for stream in &mut self.streams {
            if has_daemon_spoken && stream.file == LogFile::Server {
                // What a server logged before the daemon's line is there by now, if it was not a moment ago.
                stream.look_again();
            }
            let step = stream.read(&mut self.buffer, now, instant);
            has_daemon_spoken |= stream.file == LogFile::Control && step.bytes > 0;
            if step.bytes > 0 || step.counts.unrecognized > 0 {
                let counts = step.counts;
                self.telemetry.log_read(
                    &self.site.name,
                    stream.file,
                    counts.recognized,
                    counts.unrecognized,
                    step.bytes,
                );
                self.saver.changed(false);
            }
            for reason in stream.tail.take_losses() {
                self.telemetry.log_discontinuity(&self.site.name, stream.file, reason);
                tracing::warn!(
                    daemon = %self.site.name, path = %stream.tail.path().display(), reason,
                    "Lines of this log may have been missed."
                );
            }
        }
    }

    fn tell_lag(&self) {
        for file in [LogFile::Control, LogFile::Server, LogFile::Merged] {
            let mut streams = self.streams.iter().filter(|stream| stream.file == file).peekable();
            if streams.peek().is_some() {
                let lag = streams.map(|stream| stream.tail.lag()).sum();
                self.telemetry.log_lag(&self.site.name, file, lag);
            }
        }
    }

    fn save(&mut self) {
        if !self.outbox.is_drained() {
            return self.saver.postpone();
        }
        match self.cursor() {
            Some(cursor) => self.saver.begin(cursor),
            None => self.saver.postpone(),
        }
    }

    /// Sends what was read already and keeps the place exactly.
    async fn finish(&mut self) {
        let rest = merge(&mut self.streams, &self.site.name, usize::MAX, true);
        let sent = tokio::time::timeout(LAST_WORDS, self.outbox.send(rest)).await;
        let cursor = if sent == Ok(true) { self.cursor() } else { None };
        self.saver.finish(cursor).await;
    }

    /// Whether a new site of the daemon has its log somewhere else.
    fn is_elsewhere(&self, site: &DaemonSite) -> bool {
        match (&self.site.log, &site.log) {
            (LogPlace::Files, LogPlace::Files) => self.site.log_directory != site.log_directory,
            (own, other) => own != other,
        }
    }

    /// Takes up another process of the same daemon: its files are reached by another way, or are others.
    fn take_site(&mut self, site: DaemonSite) {
        let has_other_process = self.site.process != site.process;
        self.site = site;
        for (name, path, _) in self.places() {
            if let Some(stream) = self.streams.iter_mut().find(|stream| stream.name == name) {
                stream.tail.set_path(path);
            }
        }
        if has_other_process {
            let zone = self.zone();
            self.streams.iter_mut().for_each(|stream| stream.set_zone(zone.clone()));
            self.looked_around = None;
            self.look_around();
        }
    }

    fn zone(&self) -> TimeZone {
        let process = self.site.process.map(|process| self.proc.file(process.pid, ""));
        zone_of(process.as_deref())
    }

    /// Looks for what no event tells: files that the daemon has open under no name of theirs, folders of new servers.
    fn look_around(&mut self) {
        let now = Instant::now();
        let is_due =
            self.looked_around.is_none_or(|(at, _)| now.saturating_duration_since(at) >= LOOK_AROUND);
        let directory = self.site.log_path();
        let changed_at = std::fs::metadata(&directory).and_then(|found| found.modified()).ok();
        if is_due || changed_at != self.folders_changed_at {
            self.folders_changed_at = changed_at;
            self.follow_new_folders();
        }
        if is_due {
            self.looked_around = Some((now, SystemTime::now()));
            self.note_open_files(now);
        }
    }

    /// Follows the logs of servers that came since the last look, from their beginning.
    fn follow_new_folders(&mut self) {
        let saved_at = self.looked_around.and_then(|(_, at)| at.checked_sub(FILE_TIME_SLACK));
        let zone = self.zone();
        for (name, path, file) in self.places() {
            if self.streams.len() > FOLDERS_LIMIT || self.streams.iter().any(|stream| stream.name == name) {
                continue;
            }
            let streams = vec![StreamCursor { name: name.clone(), files: Vec::new(), newest: Vec::new() }];
            let beginning = DaemonCursor { streams, ..DaemonCursor::new(&self.site.name) };
            self.follow(name, path, file, Some(&beginning), saved_at, &zone);
        }
    }

    fn note_open_files(&mut self, now: Instant) {
        let open = self.site.process.and_then(|process| open_files(&self.proc, process.pid));
        // Which of several servers' files is whose, only their names would tell.
        let has_folders = self.streams.len() > 2;
        for stream in &mut self.streams {
            let wanted = stream.tail.path().file_name().map(OsString::from).unwrap_or_default();
            let is_told = !(has_folders && stream.file == LogFile::Server);
            let own = open.as_ref().filter(|_| is_told).map(|open| {
                let own = open.iter().filter(|open| open.is_named_like(&wanted));
                own.map(|open| (open.id, open.link.clone())).collect()
            });
            stream.tail.set_written(own, now);
        }
    }

    /// Watches the directories that there are, and again those that were replaced.
    fn keep_watches(&mut self) {
        let mut wanted: Vec<(PathBuf, OsString)> = Vec::new();
        for stream in &self.streams {
            let path = stream.tail.path();
            // A link's events come where it points to.
            for path in [Some(path.to_owned()), std::fs::canonicalize(path).ok()].into_iter().flatten() {
                if let (Some(directory), Some(name)) = (path.parent(), path.file_name()) {
                    let pair = (directory.to_owned(), name.to_owned());
                    if !wanted.contains(&pair) {
                        wanted.push(pair);
                    }
                }
            }
        }
        self.watches.retain(|watch| {
            wanted.iter().any(|(directory, _)| directory == watch.directory()) && watch.is_current()
        });
        for (directory, _) in &wanted {
            if self.watches.iter().any(|watch| watch.directory() == directory) {
                continue;
            }
            let here = wanted.iter().filter(|(other, _)| other == directory);
            let names: Vec<OsString> = here.map(|(_, name)| name.clone()).collect();
            self.watches.extend(self.watcher.watch(directory, &names, &self.woken));
        }
    }

    /// The source that a log counts as.
    pub fn source_of(file: LogFile) -> SourceName {
        match file {
            LogFile::Control => SourceName::ControlLog,
            LogFile::Server => SourceName::ServerLog,
            LogFile::Merged => SourceName::DaemonOutput,
        }
    }
}

/// The folders of named servers in a log directory (protocol v3: `<log>/<server>/server.log`).
fn server_folders(directory: &Path) -> Vec<OsString> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let mut folders: Vec<OsString> = entries
        .take(ENTRIES_LIMIT)
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter(|entry| entry.path().join("server.log").is_file())
        .map(|entry| entry.file_name())
        .take(FOLDERS_LIMIT)
        .collect();
    folders.sort();
    folders
}

/// A regular file that a process has open.
struct OpenFile {
    id: FileId,
    /// `/proc/PID/fd/N`: it opens the file whatever became of its name.
    link: PathBuf,
    /// The name that it had last.
    name: OsString,
}

impl OpenFile {
    /// Whether it is, or once was, the log with this name.
    fn is_named_like(&self, log: &OsString) -> bool {
        self.name.as_encoded_bytes().starts_with(log.as_encoded_bytes())
    }
}

/// The regular files that a process has open; `None` when we may not know.
fn open_files(proc: &ProcRoot, pid: u32) -> Option<Vec<OpenFile>> {
    let entries = std::fs::read_dir(proc.file(pid, "fd")).ok()?;
    let mut open = Vec::new();
    for entry in entries.take(ENTRIES_LIMIT).flatten() {
        let link = entry.path();
        let target = std::fs::read_link(&link).ok()?;
        let Ok(metadata) = std::fs::metadata(&link) else { continue };
        if let (true, Some(name)) = (metadata.is_file(), target.file_name()) {
            open.push(OpenFile { id: FileId::of(&metadata), link, name: name.to_owned() });
        }
    }
    Some(open)
}
