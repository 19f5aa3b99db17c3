//! `/dev/kmsg`.
//!
//! One `read` is one record. The kernel overwrites what is not read in time and says so with `EPIPE`; how much is
//! missing shows in the sequence numbers.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Mode, OFlags, SeekFrom, open, seek};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::cursor::Position;
use super::intake::{Age, Intake, monotonic};
use super::record::Record;
use crate::event::Freshness;
use crate::sys::async_fd;

/// The kernel gives `EINVAL` and keeps the record when it does not fit. Its own limit is 8 KiB.
const BUFFER: usize = 16 << 10;
/// Records taken before others get their turn on the runtime.
const BATCH: usize = 256;
/// How often records are looked for though nothing woke us; it bounds how wrong the clock can be.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_secs(5);

/// The device, as it is being read.
#[derive(Debug)]
pub(super) struct Device {
    records: AsyncFd<OwnedFd>,
    buffer: Box<[u8]>,
    /// A second descriptor at the end of the log as it was when we came: its first record is the first that is live.
    end: Option<OwnedFd>,
    /// The first record that is live, once it is known.
    first_live: Option<u64>,
    boot_id: String,
    /// What a former run has sent of this boot.
    sent: Option<u64>,
    /// What records that were there before are to the model.
    past: Freshness,
    expected: Option<u64>,
    clock: KernelClock,
}

impl Device {
    /// Opens the device. Records that were there before are history without a cursor, else they are caught up with.
    pub(super) fn open(path: &Path, kept: Option<&Position>) -> io::Result<Device> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        // The end first: what comes between the two is then read as live.
        let end = open(path, flags, Mode::empty())?;
        seek(&end, SeekFrom::End(0))?;
        let records = open(path, flags, Mode::empty())?;
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
        Device::new(records, Some(end), boot_id.trim(), kept)
    }

    fn new(
        records: OwnedFd,
        end: Option<OwnedFd>,
        boot_id: &str,
        kept: Option<&Position>,
    ) -> io::Result<Device> {
        let (sent, skew, expected) = match kept {
            Some(Position::Device { boot_id: kept, sequence, skew_nanos }) if kept == boot_id => {
                (Some(*sequence), *skew_nanos, Some(sequence + 1))
            }
            // Another boot: all of this one is new.
            Some(_) => (None, None, Some(0)),
            None => (None, None, None),
        };
        Ok(Device {
            // EPERM here says that there is nothing to wait for, not that somebody forbids it.
            records: async_fd::readable(records).map_err(|_| io::Error::other("it is no kernel log"))?,
            buffer: vec![0; BUFFER].into_boxed_slice(),
            end,
            first_live: None,
            boot_id: boot_id.to_owned(),
            sent,
            past: if kept.is_some() { Freshness::CaughtUp } else { Freshness::History },
            expected,
            clock: KernelClock { skew, idle_at: None },
        })
    }

    /// Waits until there is something to read.
    pub(super) async fn ready(&self) -> io::Result<()> {
        self.records.readable().await.map(|mut ready| ready.retain_ready())
    }

    /// Takes a batch of records. `true`: there may be more.
    pub(super) fn take(&mut self, intake: &mut Intake) -> io::Result<bool> {
        let now = intake.outbox.clock.now();
        let kernel_now = nanos(monotonic());
        let mut newest = None;
        let mut more = true;
        for _ in 0..BATCH {
            let buffer = &mut self.buffer;
            let read = self.records.try_io(Interest::READABLE, |records| {
                rustix::io::read(records, &mut **buffer).map_err(io::Error::from)
            });
            let length = match read {
                Ok(0) => {
                    return Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "it has an end, as no kernel log has",
                    ));
                }
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    more = false;
                    break;
                }
                // Overwritten before we came: the next number tells how many.
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => continue,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error)
                    if error.raw_os_error() == Some(libc::EINVAL) && self.buffer.len() < BUFFER << 4 =>
                {
                    self.buffer = vec![0; self.buffer.len() * 2].into_boxed_slice();
                    continue;
                }
                Err(error) => return Err(error),
            };
            let Some(record) = Record::parse(&self.buffer[..length]) else {
                intake.telemetry.source_error("kernel_log", "malformed_record");
                continue;
            };
            if let Some(expected) = self.expected
                && record.sequence > expected
            {
                intake.telemetry.kmsg_lost(record.sequence - expected);
            }
            self.expected = Some(record.sequence + 1);
            let age = if is_live(&mut self.first_live, &mut self.end, record.sequence) {
                Age::Live(self.clock.live(kernel_now, record.micros))
            } else if self.sent.is_some_and(|sent| record.sequence <= sent) {
                Age::Known
            } else {
                Age::Past(self.past, Some(self.clock.past(kernel_now, record.micros)))
            };
            intake.record(&record, age, now);
            newest = Some(record.sequence);
        }
        if !more {
            self.clock.idle_at = Some(kernel_now);
            if self.first_live.is_none() {
                self.first_live = Some(self.expected.unwrap_or(0));
                self.end = None;
            }
        }
        if let Some(sequence) = newest.filter(|newest| self.sent.is_none_or(|sent| *newest > sent)) {
            let boot_id = self.boot_id.clone();
            intake.advance(Position::Device { boot_id, sequence, skew_nanos: self.clock.skew });
        }
        Ok(more)
    }
}

/// Whether a record came after we did. It is asked right after the record was read: a second descriptor that was put
/// at the end of the log has nothing then, or the first record since.
fn is_live(first_live: &mut Option<u64>, end: &mut Option<OwnedFd>, sequence: u64) -> bool {
    if let Some(end_fd) = end {
        let mut buffer = [0; BUFFER];
        match rustix::io::read(&*end_fd, &mut buffer) {
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return false,
            Ok(length) => *first_live = Record::parse(&buffer[..length]).map(|record| record.sequence),
            Err(_) => {}
        }
        // Overwritten or odd: then this record is newer than the end as well.
        first_live.get_or_insert(sequence);
        *end = None;
    }
    first_live.is_some_and(|first| sequence >= first)
}

/// Relates the kernel's clock to the monotonic one. They run at slightly different speeds: over months they drift
/// apart by minutes.
#[derive(Debug)]
struct KernelClock {
    /// Monotonic minus kernel clock at the last record that was read as it came.
    skew: Option<i64>,
    /// When there was last nothing to read.
    idle_at: Option<i64>,
}

impl KernelClock {
    /// How long ago a live record was written.
    fn live(&mut self, now: i64, micros: u64) -> Duration {
        let skew = now - kernel_nanos(micros);
        // Since then there has been nothing: the record cannot be older.
        let oldest = self.idle_at.map_or(0, |idle| now - idle);
        let age = self.skew.map_or(0, |known| skew - known);
        if (1..=oldest).contains(&age) {
            return Duration::from_nanos(age.unsigned_abs());
        }
        self.skew = Some(skew);
        Duration::ZERO
    }

    /// How long ago a record was written that was there before.
    fn past(&self, now: i64, micros: u64) -> Duration {
        let age = now - kernel_nanos(micros) - self.skew.unwrap_or(0);
        Duration::from_nanos(u64::try_from(age).unwrap_or(0))
    }
}

fn kernel_nanos(micros: u64) -> i64 {
    i64::try_from(micros).map_or(i64::MAX, |micros| micros.saturating_mul(1000)).min(i64::MAX / 4)
}

fn nanos(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX / 4)
}

/// What a person has to change when the device cannot be opened.
pub(super) fn advice(path: &Path, error: &io::Error) -> String {
    let is_restricted =
        std::fs::read_to_string("/proc/sys/kernel/dmesg_restrict").map_or(true, |text| text.trim() != "0");
    let mode = std::fs::metadata(path).ok().map(|meta| std::os::unix::fs::MetadataExt::mode(&meta));
    let may_read = File::open("/proc/self/status")
        .and_then(|mut status| {
            let mut text = String::new();
            io::Read::read_to_string(&mut status, &mut text)?;
            Ok(text)
        })
        .map(|status| capabilities(&status));
    advice_for(path, error, is_restricted, mode, may_read.unwrap_or_default())
}

/// The capabilities that matter here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Capabilities {
    syslog: bool,
    overrides_permissions: bool,
}

/// From `/proc/self/status`.
fn capabilities(status: &str) -> Capabilities {
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .unwrap_or(0);
    let has = |bit: u32| effective & (1 << bit) != 0;
    // CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_SYS_ADMIN, CAP_SYSLOG.
    Capabilities { syslog: has(34) || has(21), overrides_permissions: has(1) || has(2) }
}

fn advice_for(
    path: &Path,
    error: &io::Error,
    is_restricted: bool,
    mode: Option<u32>,
    capabilities: Capabilities,
) -> String {
    let path = path.display();
    let what_to_do = match error.kind() {
        io::ErrorKind::NotFound => "mount the host's /dev/kmsg there".to_owned(),
        io::ErrorKind::PermissionDenied => {
            let is_unreadable = mode.is_some_and(|mode| mode & 0o004 == 0);
            if is_restricted && !capabilities.syslog {
                "give the process CAP_SYSLOG, or set kernel.dmesg_restrict=0".to_owned()
            } else if is_unreadable && !capabilities.overrides_permissions {
                format!("run as root, or let the process read {path}")
            } else {
                "the device cgroup forbids it: run the container privileged, or with --device /dev/kmsg"
                    .to_owned()
            }
        }
        _ => return format!("cannot read {path}: {error}"),
    };
    format!("cannot open {path} ({error}): {what_to_do}")
}

#[cfg(test)]
mod tests;
