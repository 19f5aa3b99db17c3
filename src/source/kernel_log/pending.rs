//! What was read and is not sent yet. A storm of equal lines takes the room of one.

use std::collections::HashMap;
use std::sync::Arc;

use super::line::Line;
use super::xid::XidLine;
use crate::event::{Event, EventKind, Freshness, Sxid, Xid, XidSource};
use crate::identity::PciAddress;
use crate::time::Moment;

/// Distinct events from which on Xids lose what tells them apart: pid, channel, cause.
const DETAILED: usize = 1024;
/// Distinct events at most. Only what is beyond both is dropped, and counted.
const MAX: usize = 2 * DETAILED;
/// Bytes of a line that are kept as evidence.
const MAX_TEXT: usize = 512;

/// Events that wait for the model.
#[derive(Debug, Default)]
pub(super) struct Pending {
    events: Vec<Event>,
    /// Where the event of a key is.
    known: HashMap<Key, usize>,
    /// Where the last Xid 154 of a GPU is: only repetitions of the last state are the same news.
    recovery: HashMap<PciAddress, usize>,
    dropped: u64,
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct Key {
    is_live: bool,
    what: What,
}

/// A [`Line`] without what is only text.
#[derive(Debug, PartialEq, Eq, Hash)]
enum What {
    Xid(XidLine),
    Sxid(PciAddress, u32, bool),
    GpuLost(PciAddress),
    AllChannelsFailed(u32),
    OomKill(u32),
    GpuUuid(PciAddress),
}

impl Pending {
    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Takes a line. Equal ones become one event with a count, at the moment of the first.
    pub(super) fn add(&mut self, line: &Line<'_>, text: &[u8], at: Moment, freshness: Freshness) {
        let is_full = self.events.len() >= DETAILED;
        let what = match *line {
            Line::Xid(xid) if is_full => What::Xid(XidLine {
                pid: None,
                pid_owns_channel: false,
                caused_by: None,
                compute_instance: None,
                ..xid
            }),
            Line::Xid(xid) => What::Xid(xid),
            Line::Sxid { code, pci, is_fatal } => What::Sxid(pci, code, is_fatal),
            Line::GpuLost(pci) => What::GpuLost(pci),
            Line::AllChannelsFailed(code) => What::AllChannelsFailed(code),
            Line::OomKill(pid) => What::OomKill(pid),
            Line::GpuUuid(pci, _) => What::GpuUuid(pci),
            Line::Unreadable => return,
        };
        let state = match what {
            What::Xid(XidLine { pci, recovery_action: Some(_), .. }) => Some(pci),
            _ => None,
        };
        let key = Key { is_live: freshness == Freshness::Live, what };
        let same = self.known.get(&key).copied().filter(|same| {
            let overtaken = state.and_then(|pci| self.recovery.get(&pci)).is_some_and(|last| last != same);
            !overtaken
        });
        if let Some(Event { kind: EventKind::Xid(known), .. }) = same.map(|same| &mut self.events[same]) {
            known.count += 1;
            return;
        }
        if same.is_some() {
            return;
        }
        if self.events.len() >= MAX {
            self.dropped += 1;
            return;
        }
        let line = if let (true, What::Xid(xid)) = (is_full, &key.what) { &Line::Xid(*xid) } else { line };
        let Some(kind) = event(line, text) else { return };
        if let Some(pci) = state {
            self.recovery.insert(pci, self.events.len());
        }
        self.known.insert(key, self.events.len());
        self.events.push(Event { at, freshness, kind });
    }

    /// Adds an event that no line stands for.
    pub(super) fn tell(&mut self, event: Event) {
        if self.events.len() < MAX {
            self.events.push(event);
        }
    }

    /// Everything, in the order of its first occurrence, and how many events were dropped.
    pub(super) fn take(&mut self) -> (Vec<Event>, u64) {
        self.known.clear();
        self.recovery.clear();
        // A storm's capacity is not kept for ever.
        self.known.shrink_to(64);
        (std::mem::take(&mut self.events), std::mem::take(&mut self.dropped))
    }
}

/// What a line means to the model; `None` for one that cannot be read.
pub(super) fn event(line: &Line<'_>, text: &[u8]) -> Option<EventKind> {
    Some(match *line {
        Line::Xid(xid) => EventKind::Xid(Xid {
            code: xid.code,
            source: XidSource::Kmsg,
            pci: Some(xid.pci),
            uuid: None,
            gpu_instance: xid.gpu_instance,
            compute_instance: xid.compute_instance,
            pid: xid.pid,
            pid_owns_channel: xid.pid_owns_channel,
            caused_by: xid.caused_by,
            recovery_action: xid.recovery_action,
            count: 1,
            text: Some(evidence(text)),
        }),
        Line::Sxid { code, pci, is_fatal } => {
            EventKind::Sxid(Sxid { code, pci, is_fatal, text: Some(evidence(text)) })
        }
        Line::GpuLost(pci) => EventKind::GpuLost(pci),
        Line::AllChannelsFailed(xid) => EventKind::AllChannelsFailed { xid },
        Line::OomKill(pid) => EventKind::OomKill { pid },
        Line::GpuUuid(pci, uuid) => {
            EventKind::GpuUuid(pci, format!("GPU-{}", uuid["GPU-".len()..].to_ascii_lowercase()).into())
        }
        Line::Unreadable => return None,
    })
}

/// A line as evidence: printable, from the driver's mark on, of bounded length.
fn evidence(text: &[u8]) -> Arc<str> {
    let start = [&b"NVRM: "[..], b"nvidia-nvswitch"].iter().find_map(|mark| memchr::memmem::find(text, mark));
    let text = &text[start.unwrap_or(0)..];
    let text = String::from_utf8_lossy(&text[..text.len().min(MAX_TEXT)]);
    text.chars().map(|each| if each.is_control() { ' ' } else { each }).collect::<String>().trim_end().into()
}

#[cfg(test)]
mod tests {
    use super::super::line::Recognizer;
    use super::*;
    use crate::time::Mono;

    fn moment(seconds: i64) -> Moment {
        Moment { wall: jiff::Timestamp::from_second(seconds).unwrap(), mono: Mono(seconds * 1_000_000_000) }
    }

    fn add(pending: &mut Pending, text: &str, second: i64, freshness: Freshness) {
        let line = Recognizer::default().line(text.as_bytes()).unwrap();
        pending.add(&line, text.as_bytes(), moment(second), freshness);
    }

    fn xids(events: &[Event]) -> Vec<(u32, Option<u32>, u64)> {
        let xid = |event: &Event| match &event.kind {
            EventKind::Xid(xid) => Some((xid.code, xid.pid, xid.count)),
            _ => None,
        };
        events.iter().filter_map(xid).collect()
    }

    #[test]
    fn equal_lines_are_one_event_with_a_count() {
        let mut pending = Pending::default();
        for second in 0..5 {
            add(
                &mut pending,
                "NVRM: Xid (PCI:0000:3b:00): 43, pid=7, name=a, Ch 00000008",
                second,
                Freshness::Live,
            );
            add(
                &mut pending,
                "NVRM: Xid (PCI:0000:3b:00): 43, pid=8, name=a, Ch 00000009",
                second,
                Freshness::Live,
            );
            add(&mut pending, "Out of memory: Killed process 7 (a)", second, Freshness::Live);
        }
        add(
            &mut pending,
            "NVRM: Xid (PCI:0000:3b:00): 43, pid=7, name=a, Ch 00000008",
            9,
            Freshness::History,
        );
        let (events, dropped) = pending.take();
        assert_eq!(xids(&events), [(43, Some(7), 5), (43, Some(8), 5), (43, Some(7), 1)]);
        assert_eq!((events.len(), dropped), (4, 0));
        assert_eq!(events[0].at, moment(0));
        assert!(pending.is_empty() && pending.take().0.is_empty());
    }

    #[test]
    fn the_last_recovery_action_comes_last() {
        let mut pending = Pending::default();
        for (from, to) in [(0, 1), (0, 1), (1, 0), (0, 1), (0, 1)] {
            let line = format!(
                "NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed from 0x{from} (A) to 0x{to} (B)"
            );
            add(&mut pending, &line, 0, Freshness::Live);
        }
        let (events, _) = pending.take();
        let actions: Vec<_> = events
            .iter()
            .map(|event| match &event.kind {
                EventKind::Xid(xid) => (xid.recovery_action, xid.count),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(actions, [(Some(1), 2), (Some(0), 1), (Some(1), 2)]);
    }

    #[test]
    fn a_storm_of_distinct_lines_is_bounded_and_counted() {
        let mut pending = Pending::default();
        for pid in 1..=100_000 {
            add(
                &mut pending,
                &format!("NVRM: Xid (PCI:0000:3b:00): 45, pid={pid}, name=a, Ch 00000008"),
                0,
                Freshness::Live,
            );
        }
        for pid in 1..=5000 {
            add(&mut pending, &format!("Out of memory: Killed process {pid} (a)"), 0, Freshness::Live);
        }
        let (events, dropped) = pending.take();
        assert_eq!(events.len(), MAX);
        let counted: u64 = xids(&events).iter().map(|(_, _, count)| count).sum();
        assert_eq!(counted, 100_000, "no Xid goes uncounted");
        assert_eq!(dropped, 5000 - (MAX - DETAILED - 1) as u64);
    }

    #[test]
    fn evidence_is_printable_and_short() {
        assert_eq!(&*evidence(b"junk NVRM: Xid \xff\na\x07b\n"), "NVRM: Xid \u{fffd} a b");
        assert!(evidence(&[b'x'; 5000]).len() <= MAX_TEXT);
    }

    #[test]
    fn a_uuid_is_spelt_as_nvml_spells_it() {
        let mut pending = Pending::default();
        add(
            &mut pending,
            "NVRM: GPU at PCI:0000:3b:00: GPU-1B2C3D4E-0000-1111-2222-33334444ABCD",
            0,
            Freshness::Live,
        );
        let (events, _) = pending.take();
        let pci = PciAddress { domain: 0, bus: 0x3b, device: 0 };
        assert_eq!(
            events[0].kind,
            EventKind::GpuUuid(pci, "GPU-1b2c3d4e-0000-1111-2222-33334444abcd".into())
        );
    }
}
