//! `mps-exporter replay`: recorded logs to an incident report.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, IsTerminal as _, Read, Write as _};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::report;
use crate::config::Config;
use crate::replay::{Kind, Recording, detect};

/// How much is read to tell what a file is.
const SNIFFED: usize = 256 * 1024;
/// How often progress is shown on a terminal.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);

/// Reads recorded control.log, server.log and kernel logs, and reports the incidents in them: the same model, the
/// same answers as live.
#[derive(Debug, Args)]
pub struct Replay {
    /// Files (plain, rotated, .gz) or directories of them: control.log, server.log, the output of a `-f` daemon, a
    /// kernel log (kmsg, dmesg, syslog) or a journal export.
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,

    /// How to report.
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,

    /// Time zone of the machine that wrote the logs, such as `Europe/Berlin`; MPS logs name none. Default: this
    /// machine's.
    #[arg(long, value_name = "ZONE")]
    time_zone: Option<String>,

    /// When that machine booted, for kernel logs that count from there: what `date -Is -d "$(uptime -s)"` says on it.
    #[arg(long, value_name = "TIME")]
    boot_time: Option<Timestamp>,

    /// A configuration file, for `incidents` (window, thresholds, Xid catalogue).
    #[arg(long = "config.file", alias = "config", value_name = "FILE")]
    config: Option<PathBuf>,
}

/// How a report is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For a terminal.
    Text,
    /// The incidents as `/api/v1/incidents` shows them.
    Json,
    /// For a post-mortem.
    Markdown,
}

impl Replay {
    /// Prints the report to standard output.
    ///
    /// # Errors
    /// When no file can be read or nothing is known of what they hold; after the report, when that is so of some.
    pub fn run(&self) -> anyhow::Result<()> {
        let zone = match &self.time_zone {
            Some(name) => TimeZone::get(name).with_context(|| format!("unknown time zone {name:?}"))?,
            None => TimeZone::system(),
        };
        let config = match &self.config {
            Some(path) => Config::load(path)?,
            None => Config::default(),
        };
        let (logs, mut left_out) = logs(&self.paths)?;
        let total: u64 = logs.iter().flat_map(|log| &log.parts).map(|part| part.size).sum();
        let mut recording = Recording::new(zone, self.boot_time, Timestamp::now());
        let progress = Rc::new(Progress::new(total));
        for log in logs {
            let parts = log.parts.iter().map(|part| open(&part.path, Some(&progress)));
            recording.add(&log.label, &log.daemon, log.kind, parts.collect::<anyhow::Result<_>>()?);
        }
        let outcome = recording.run(config.model()?);
        progress.end();
        let text = match self.format {
            Format::Text => report::text(&outcome, super::text::width()),
            Format::Markdown => report::markdown(&outcome),
            Format::Json => super::text::json(&serde_json::json!({ "incidents": outcome.incidents }))?,
        };
        super::text::print(&text)?;
        left_out.extend(outcome.broken_off.iter().map(|(log, error)| format!("{log} breaks off: {error}")));
        if !left_out.is_empty() {
            bail!("this report is not complete: {}", left_out.join("; "));
        }
        Ok(())
    }
}

/// A log with its rotated parts, oldest first.
#[derive(Debug)]
struct Log {
    label: String,
    daemon: String,
    kind: Kind,
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    path: PathBuf,
    size: u64,
}

/// Finds logs among the paths and puts rotated parts together. Beside them it says what had to be left out, and why.
fn logs(paths: &[PathBuf]) -> anyhow::Result<(Vec<Log>, Vec<String>)> {
    let mut files = Vec::new();
    let mut left_out = Vec::new();
    for path in paths {
        if path.is_dir() {
            let entries = match std::fs::read_dir(path) {
                Ok(entries) => entries,
                Err(error) => {
                    left_out.push(format!("cannot read {}: {error}", path.display()));
                    continue;
                }
            };
            for entry in entries {
                let entry = entry.with_context(|| format!("cannot read {}", path.display()))?.path();
                if !entry.is_file() {
                    continue;
                }
                match beginning(&entry) {
                    Ok(begins) if detect(&name(&entry), &begins).is_some() => files.push(entry),
                    // Something else that lies there.
                    Ok(_) => {}
                    Err(error) => left_out.push(format!("{error:#}")),
                }
            }
        } else {
            files.push(path.clone());
        }
    }
    let mut groups: BTreeMap<PathBuf, Vec<(Age, PathBuf)>> = BTreeMap::new();
    for file in files {
        let (base, age) = rotation(&file);
        groups.entry(base).or_default().push((age, file));
    }
    let directories: std::collections::BTreeSet<Option<&Path>> =
        groups.keys().map(|base| base.parent()).collect();
    let are_several = directories.len() > 1;
    let mut logs = Vec::new();
    for (base, mut parts) in groups.clone() {
        parts.sort();
        parts.dedup();
        let mut begins = Vec::new();
        parts.retain(|(_, part)| match beginning(part) {
            Ok(bytes) => {
                begins.extend(bytes);
                true
            }
            Err(error) => {
                left_out.push(format!("{error:#}"));
                false
            }
        });
        if parts.is_empty() {
            continue;
        }
        let Some(kind) = detect(&name(&base), &begins) else {
            left_out.push(format!(
                "{}: neither a log of an MPS daemon nor a kernel log (no line of a known shape in its first {} KiB)",
                base.display(),
                SNIFFED / 1024
            ));
            continue;
        };
        let directory =
            base.parent().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
        let daemon = directory.filter(|_| are_several).unwrap_or_else(|| "default".to_owned());
        let parts = parts.into_iter().map(|(_, path)| {
            let size = std::fs::metadata(&path).map_or(0, |metadata| metadata.len());
            Part { path, size }
        });
        logs.push(Log { label: base.display().to_string(), daemon, kind, parts: parts.collect() });
    }
    if logs.is_empty() {
        if left_out.is_empty() {
            bail!("no log of an MPS daemon and no kernel log in {}", paths[0].display());
        }
        bail!("{}", left_out.join("; "));
    }
    Ok((logs, left_out))
}

/// How old a part is; the oldest sorts first.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Age {
    /// `log-20260401`, `log.2026-04-01`.
    Dated(String),
    /// `log.3`: the higher the older.
    Numbered(std::cmp::Reverse<u32>),
    /// The log itself.
    Current,
}

/// The log that a file is a part of, and how old the part is.
fn rotation(file: &Path) -> (PathBuf, Age) {
    let full = name(file);
    let plain = full.strip_suffix(".gz").unwrap_or(&full);
    let split = |at: usize| (file.with_file_name(&plain[..at]), plain[at + 1..].to_owned());
    if let Some(at) = plain.rfind(['.', '-']) {
        let (base, suffix) = split(at);
        let is_number = !suffix.is_empty() && suffix.bytes().all(|byte| byte.is_ascii_digit());
        if is_number && suffix.len() >= 8 {
            return (base, Age::Dated(suffix));
        }
        if is_number && let Ok(number) = suffix.parse() {
            // `log-2026-04-01` ends in a number too.
            let looks_dated =
                plain[..at].rsplit(['.', '-']).take(2).all(|part| part.bytes().all(|b| b.is_ascii_digit()));
            if !looks_dated {
                return (base, Age::Numbered(std::cmp::Reverse(number)));
            }
        }
    }
    (file.with_file_name(plain), Age::Current)
}

fn name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// What a file begins with, as far as it can be read.
fn beginning(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = open(path, None)?.take(SNIFFED as u64).read_to_end(&mut bytes);
    if bytes.is_empty() {
        read.with_context(|| format!("cannot read {}", path.display()))?;
    }
    Ok(bytes)
}

fn open(path: &Path, progress: Option<&Rc<Progress>>) -> anyhow::Result<Box<dyn BufRead>> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let file = Watched { file, progress: progress.cloned() };
    Ok(if name(path).ends_with(".gz") {
        Box::new(BufReader::new(flate2::read::MultiGzDecoder::new(file)))
    } else {
        Box::new(BufReader::with_capacity(256 * 1024, file))
    })
}

/// A file, as it is on the disk, whose reading is shown.
struct Watched {
    file: File,
    progress: Option<Rc<Progress>>,
}

impl Read for Watched {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.file.read(buffer)?;
        if let Some(progress) = &self.progress {
            progress.add(read as u64);
        }
        Ok(read)
    }
}

/// Progress on a terminal's standard error.
struct Progress {
    /// Bytes of all files.
    total: u64,
    read: Cell<u64>,
    shown: Cell<Instant>,
    is_shown: bool,
}

impl Progress {
    fn new(total: u64) -> Progress {
        let is_shown = std::io::stderr().is_terminal();
        Progress { total, read: Cell::new(0), shown: Cell::new(Instant::now()), is_shown }
    }

    fn add(&self, bytes: u64) {
        self.read.set(self.read.get() + bytes);
        if self.is_shown && self.shown.get().elapsed() >= PROGRESS_EVERY {
            self.shown.set(Instant::now());
            let mebibytes = |bytes: u64| bytes >> 20;
            let _terminal_is_gone = write!(
                std::io::stderr(),
                "\r{} of {} MiB",
                mebibytes(self.read.get()),
                mebibytes(self.total)
            );
        }
    }

    fn end(&self) {
        if self.is_shown {
            let _terminal_is_gone = write!(std::io::stderr(), "\r{:30}\r", "");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotated_parts_belong_to_one_log_and_come_oldest_first() {
        let names =
            ["server.log", "server.log.1", "server.log.12.gz", "server.log-20260401.gz", "server.log.2.gz"];
        let mut parts: Vec<(Age, PathBuf)> = names
            .iter()
            .map(|name| {
                let (base, age) = rotation(&Path::new("/logs").join(name));
                assert_eq!(base, Path::new("/logs/server.log"), "{name}");
                (age, PathBuf::from(name))
            })
            .collect();
        parts.sort();
        let order: Vec<String> = parts.into_iter().map(|(_, path)| path.display().to_string()).collect();
        assert_eq!(
            order,
            ["server.log-20260401.gz", "server.log.12.gz", "server.log.2.gz", "server.log.1", "server.log"]
        );
    }
}
