//! The logs of the simulated node.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use jiff::ZonedDateTime;

/// control.log or server.log.
#[derive(Debug)]
pub(super) struct MpsLog(File);

impl MpsLog {
    pub fn create(path: &Path) -> io::Result<MpsLog> {
        Ok(MpsLog(File::options().append(true).create(true).open(path)?))
    }

    /// Appends a line in NVIDIA's envelope, in one write. A full disk loses the line, as it would for the daemon.
    pub fn say(&mut self, tag: &str, pid: u32, text: &str) {
        let now = ZonedDateTime::now().strftime("%Y-%m-%d %H:%M:%S%.3f");
        let _lost = self.0.write_all(format!("[{now} {tag} {pid:5}] {text}\n").as_bytes());
    }
}

/// Records of /dev/kmsg.
#[derive(Debug)]
pub(super) struct KernelLog {
    file: File,
    sequence: u64,
}

impl KernelLog {
    pub fn create(path: &Path) -> io::Result<KernelLog> {
        Ok(KernelLog { file: File::options().append(true).create(true).open(path)?, sequence: 1 })
    }

    /// Appends a record of the driver (facility kern, level warning).
    pub fn say(&mut self, text: &str) {
        let record = format!("4,{},{},-;NVRM: {text}\n", self.sequence, uptime_microseconds());
        self.sequence += 1;
        let _lost = self.file.write_all(record.as_bytes());
    }
}

fn uptime_microseconds() -> u64 {
    let uptime = std::fs::read_to_string("/proc/uptime").unwrap_or_default();
    let (seconds, hundredths) =
        uptime.split(' ').next().and_then(|up| up.split_once('.')).unwrap_or(("0", "0"));
    let number = |digits: &str| digits.parse::<u64>().unwrap_or(0);
    number(seconds) * 1_000_000 + number(hundredths) * 10_000
}
