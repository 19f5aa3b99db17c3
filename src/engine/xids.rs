//! Xids: counted by device, code and source, and kept for a while as evidence.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::device::{DeviceId, Devices};
use super::snapshot::Count;
use super::state::Departure;
use crate::event::XidSource;
use crate::time::{Moment, Mono};

/// Distinct codes counted per node; further ones share one series. The driver knows about 170.
const MAX_CODES: usize = 256;
/// Reports kept as evidence. A storm says the same again and again.
const MAX_RECENT: usize = 512;
/// How far apart two sources may report the same event.
pub(super) const SAME_EVENT: Duration = Duration::from_secs(2);

/// What is counted, and what was reported lately.
#[derive(Debug, Default)]
pub(super) struct Xids {
    pub counts: BTreeMap<XidKey, Count>,
    recent: VecDeque<Report>,
}

/// A series.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct XidKey {
    pub device: DeviceId,
    /// `None`: all codes beyond the cap.
    pub code: Option<u32>,
    pub source: XidSource,
}

/// A report that may be evidence.
#[derive(Debug, Clone)]
pub(super) struct Report {
    pub device: DeviceId,
    pub code: u32,
    pub at: Moment,
    /// When it was told: one that was found after a restart may come before the log lines that it explains.
    pub told: Mono,
    pub source: XidSource,
    /// The pid, where it owns the faulting channel.
    pub pid: Option<u32>,
    pub count: u64,
    pub text: Option<Arc<str>>,
    pub kind: Kind,
}

/// What a code can explain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A fault of an application: fatal to all clients of its server on the device.
    Application,
    /// A fault of the device: fatal to every process on it.
    Gpu,
    /// A consequence, or something that ends nobody.
    Other,
}

/// An Xid that explains a loss.
#[derive(Debug)]
pub(super) struct Explanation {
    pub is_gpu_level: bool,
    pub text: Option<(&'static str, Arc<str>)>,
}

impl Xids {
    /// Counts a report.
    pub fn count(&mut self, device: DeviceId, code: u32, source: XidSource, count: u64, at: Moment) {
        let mut key = XidKey { device, code: Some(code), source };
        if !self.counts.contains_key(&key) && self.counts.len() >= MAX_CODES {
            key.code = None;
        }
        self.counts.entry(key).or_default().add_many(count, at.wall);
    }

    /// Keeps a report as evidence, and gives the event that it belongs to. `false`: another source has reported the
    /// same event, or it is a repetition.
    pub fn keep(&mut self, report: Report) -> (Report, bool) {
        let same = |known: &&mut Report| {
            known.device == report.device
                && known.code == report.code
                && known.at.mono.distance(report.at.mono) <= SAME_EVENT
                && (known.pid == report.pid || known.pid.is_none() || report.pid.is_none())
        };
        if let Some(known) = self.recent.iter_mut().find(same) {
            if known.pid.is_none() && report.pid.is_some() {
                known.pid = report.pid;
                known.text = report.text;
                known.source = report.source;
                return (known.clone(), true);
            }
            if known.source == report.source {
                known.count += report.count;
            }
            return (known.clone(), false);
        }
        if self.recent.len() >= MAX_RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(report.clone());
        (report, true)
    }

    /// Reports not further than `within` from `at`.
    pub fn near(&self, at: Moment, within: Duration) -> impl Iterator<Item = &Report> {
        self.recent.iter().filter(move |report| report.at.mono.distance(at.mono) <= within)
    }

    /// The Xid that explains why a client left, if any: on one of its devices, or on its coupled set for a fault of an
    /// application whose channel belonged to somebody there or is not told.
    pub fn explains(
        &self,
        devices: &Devices,
        left: &Departure,
        at: Moment,
        window: Duration,
    ) -> Option<Explanation> {
        let own: Vec<DeviceId> = left.devices.iter().flat_map(|id| devices.same_gpu(*id)).collect();
        let text = |report: &Report| {
            let source = if report.source == XidSource::Kmsg { "kmsg" } else { "nvml" };
            report.text.clone().map(|text| (source, text))
        };
        let mut near = self.near(at, window);
        if let Some(report) = near.find(|report| report.kind == Kind::Gpu && own.contains(&report.device)) {
            return Some(Explanation { is_gpu_level: true, text: text(report) });
        }
        let is_hit = |report: &&Report| {
            report.kind == Kind::Application
                && (left.coupled.contains(&report.device)
                    // No source tells on which device this client was, but the line names it.
                    || (left.devices.is_empty() && report.pid.is_some_and(|pid| left.client.is_process(pid))))
        };
        let report = self.near(at, window).find(is_hit)?;
        Some(Explanation { is_gpu_level: false, text: text(report) })
    }

    /// The latest report of this code.
    pub fn latest(&self, code: u32, at: Moment) -> Option<&Report> {
        self.recent
            .iter()
            .rev()
            .find(|report| report.code == code && report.at.mono.distance(at.mono) <= SAME_EVENT)
    }

    /// Forgets evidence that is older than `mono` and was told before.
    pub fn forget_before(&mut self, mono: Mono) {
        self.recent.retain(|report| report.at.mono.max(report.told) >= mono);
    }
}
