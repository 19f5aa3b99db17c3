//! The exporter's own process: `process_*` as Prometheus client libraries name them.

use std::fs;

use prometheus::proto::MetricFamily;

use crate::metrics::families::{self, Family};
use crate::metrics::series::Page;

/// Reads `/proc/self`. What cannot be read is absent.
pub struct ProcessCollector {
    boot_time: Option<f64>,
    ticks_per_second: f64,
    page_size: f64,
}

impl Default for ProcessCollector {
    fn default() -> ProcessCollector {
        let boot_time = fs::read_to_string("/proc/stat").ok().and_then(|text| {
            text.lines()
                .find_map(|line| line.strip_prefix("btime "))
                .and_then(|time| time.trim().parse().ok())
        });
        ProcessCollector {
            boot_time,
            ticks_per_second: rustix::param::clock_ticks_per_second() as f64,
            page_size: rustix::param::page_size() as f64,
        }
    }
}

impl ProcessCollector {
    /// The present values.
    pub fn collect(&self) -> Vec<MetricFamily> {
        let mut page = Page::default();
        if let Some(stat) = fs::read_to_string("/proc/self/stat").ok().as_deref().and_then(Stat::parse) {
            let seconds = |ticks: f64| ticks / self.ticks_per_second;
            one(&mut page, &families::PROCESS_CPU, Some(seconds(stat.cpu_ticks)));
            one(&mut page, &families::PROCESS_RESIDENT_MEMORY, Some(stat.resident_pages * self.page_size));
            one(&mut page, &families::PROCESS_VIRTUAL_MEMORY, Some(stat.virtual_bytes));
            let start = self.boot_time.map(|boot| boot + seconds(stat.start_ticks));
            one(&mut page, &families::PROCESS_START_TIME, start);
            one(&mut page, &families::PROCESS_THREADS, Some(stat.threads));
        }
        one(&mut page, &families::PROCESS_OPEN_FDS, open_descriptors().map(|open| open as f64));
        let limits = fs::read_to_string("/proc/self/limits").ok();
        one(&mut page, &families::PROCESS_MAX_FDS, limits.as_deref().and_then(max_fds));
        page.into_families()
    }
}

/// Since Linux 6.2 the directory's size is their number. To list them, one for each client, takes longer than to write
/// the whole page.
fn open_descriptors() -> Option<u64> {
    match fs::metadata("/proc/self/fd").ok()?.len() {
        0 => listed_descriptors(),
        open => Some(open),
    }
}

/// How many are listed, but for the one that lists them.
fn listed_descriptors() -> Option<u64> {
    Some(fs::read_dir("/proc/self/fd").ok()?.count().saturating_sub(1) as u64)
}

fn one(page: &mut Page, family: &'static Family, value: Option<f64>) {
    page.family(family, |series| {
        if let Some(value) = value {
            series.value(&[], value);
        }
    });
}

/// The fields of `/proc/PID/stat` that matter here.
#[derive(Debug, PartialEq)]
struct Stat {
    cpu_ticks: f64,
    threads: f64,
    start_ticks: f64,
    virtual_bytes: f64,
    resident_pages: f64,
}

impl Stat {
    fn parse(line: &str) -> Option<Stat> {
        // The command name is in parentheses and may hold anything, parentheses too. Field 3 follows it.
        let (_, rest) = line.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<f64>().ok();
        Some(Stat {
            cpu_ticks: field(14)? + field(15)?,
            threads: field(20)?,
            start_ticks: field(22)?,
            virtual_bytes: field(23)?,
            resident_pages: field(24)?,
        })
    }
}

fn max_fds(limits: &str) -> Option<f64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    match line.split_ascii_whitespace().next()? {
        "unlimited" => Some(f64::INFINITY),
        number => number.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAMILIES: &[&Family] = &[
        &families::PROCESS_CPU,
        &families::PROCESS_RESIDENT_MEMORY,
        &families::PROCESS_VIRTUAL_MEMORY,
        &families::PROCESS_START_TIME,
        &families::PROCESS_THREADS,
        &families::PROCESS_OPEN_FDS,
        &families::PROCESS_MAX_FDS,
    ];

    /// Other tests open and close theirs meanwhile.
    #[test]
    fn both_ways_to_count_descriptors_come_to_agree() {
        let agree = || open_descriptors() == listed_descriptors();
        assert!((0..1000).any(|_| agree()));
        assert!(listed_descriptors().unwrap() >= 3);
    }

    #[test]
    fn a_command_name_with_parentheses_does_not_shift_the_fields() {
        let line =
            "7 (a) b) S 1 7 7 0 -1 4194560 100 0 0 0 20 5 0 0 20 0 3 0 1234 5000000 700 18446744073709551615";
        let stat = Stat::parse(line).unwrap();
        let expected = Stat {
            cpu_ticks: 25.0,
            threads: 3.0,
            start_ticks: 1234.0,
            virtual_bytes: 5_000_000.0,
            resident_pages: 700.0,
        };
        assert_eq!(stat, expected);
        assert_eq!(Stat::parse("7 (a) S 1"), None);
        assert_eq!(Stat::parse(""), None);
    }

    #[test]
    fn limits_are_found() {
        let text = "Limit  Soft Limit  Hard Limit  Units\nMax open files            1024   4096  files \n";
        assert_eq!(max_fds(text), Some(1024.0));
        assert_eq!(max_fds("Max open files   unlimited unlimited files"), Some(f64::INFINITY));
        assert_eq!(max_fds(""), None);
    }

    #[test]
    fn this_process_has_every_family() {
        let families = ProcessCollector::default().collect();
        assert_eq!(families.len(), FAMILIES.len());
        let now = jiff::Timestamp::now().as_second() as f64;
        let start =
            families.iter().find(|family| family.name() == families::PROCESS_START_TIME.name).unwrap();
        let started = start.get_metric()[0].get_gauge().get_value();
        assert!((now - started).abs() < 3600.0, "started at {started}, now {now}");
    }
}
