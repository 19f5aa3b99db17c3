use std::os::fd::AsFd as _;
use std::os::unix::net::UnixDatagram;

use super::*;
use crate::event::{Event, EventKind, Xid};
use crate::source::Outbox;
use crate::source::kernel_log::cursor::Cursor;
use crate::telemetry::Telemetry;
use crate::time::Clock;

/// A kernel whose device is a pair of datagram sockets: one `read` is one record there too.
struct Kernel {
    records: UnixDatagram,
    end: UnixDatagram,
    micros: u64,
}

fn kernel() -> (Kernel, OwnedFd, OwnedFd) {
    let pair = || {
        let (ours, theirs) = UnixDatagram::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        (ours, OwnedFd::from(theirs))
    };
    let ((records, read), (end, read_end)) = (pair(), pair());
    // A machine that has been up for an hour.
    let micros = u64::try_from(monotonic().as_micros()).unwrap();
    (Kernel { records, end, micros }, read, read_end)
}

impl Kernel {
    fn xid(&self, sequence: u64, code: u32, age: Duration) -> String {
        let micros = self.micros.saturating_sub(u64::try_from(age.as_micros()).unwrap());
        format!("4,{sequence},{micros},c;NVRM: Xid (PCI:0000:3b:00): {code}, pid=9, name=a, Ch 00000008\n")
    }

    fn old(&self, sequence: u64, code: u32) {
        self.records.send(self.xid(sequence, code, Duration::from_secs(1)).as_bytes()).unwrap();
    }

    /// A record that comes after the device was opened.
    fn new_record(&self, sequence: u64, code: u32) {
        let record = self.xid(sequence, code, Duration::ZERO);
        self.records.send(record.as_bytes()).unwrap();
        // Closed once the boundary is known.
        let _closed = self.end.send(record.as_bytes());
    }
}

fn intake() -> (Intake, tokio::sync::mpsc::Receiver<Vec<Event>>, Telemetry) {
    let (outbox, queue) = Outbox::new(Clock::new());
    let telemetry = Telemetry::new();
    let cursor = Cursor::load(None, telemetry.clone());
    (Intake::new(outbox, telemetry.clone(), cursor), queue, telemetry)
}

fn at(sequence: u64) -> Position {
    Position::Device { boot_id: "boot".into(), sequence, skew_nanos: None }
}

/// Codes with their freshness, of everything that can be read now.
async fn read(
    device: &mut Device,
    intake: &mut Intake,
    queue: &mut tokio::sync::mpsc::Receiver<Vec<Event>>,
) -> Vec<(u32, Freshness)> {
    let mut all = Vec::new();
    loop {
        device.ready().await.unwrap();
        let more = device.take(intake).unwrap();
        if intake.has_events() {
            let outbox = intake.outbox.clone();
            intake.send(outbox.room().await.unwrap());
            for event in queue.recv().await.unwrap() {
                if let EventKind::Xid(Xid { code, .. }) = event.kind {
                    all.push((code, event.freshness));
                }
            }
        }
        if !more {
            return all;
        }
    }
}

fn lost(telemetry: &Telemetry) -> f64 {
    let families = telemetry.registry().gather();
    let lost = families.iter().find(|family| family.name() == "mps_kmsg_records_lost_total").unwrap();
    lost.get_metric()[0].get_counter().get_value()
}

#[tokio::test]
async fn without_a_cursor_the_past_is_history() {
    let (kernel, records, end) = kernel();
    kernel.old(5, 31);
    kernel.old(6, 43);
    let mut device = Device::new(records, Some(end), "boot", None).unwrap();
    let (mut intake, mut queue, telemetry) = intake();
    // The boundary is exact, also for what comes before the first read.
    kernel.new_record(7, 45);
    assert_eq!(
        read(&mut device, &mut intake, &mut queue).await,
        [(31, Freshness::History), (43, Freshness::History), (45, Freshness::Live)]
    );
    kernel.new_record(8, 79);
    assert_eq!(read(&mut device, &mut intake, &mut queue).await, [(79, Freshness::Live)]);
    assert_eq!(lost(&telemetry).to_bits(), 0_f64.to_bits(), "what was before us is not lost");
    assert!(
        matches!(intake.cursor.position(), Some(Position::Device { sequence: 8, boot_id, .. }) if boot_id == "boot")
    );
}

#[tokio::test]
async fn a_cursor_neither_loses_nor_repeats() {
    let (kernel, records, end) = kernel();
    for (sequence, code) in [(5, 31), (6, 43), (7, 45)] {
        kernel.old(sequence, code);
    }
    let mut device = Device::new(records, Some(end), "boot", Some(&at(6))).unwrap();
    let (mut intake, mut queue, telemetry) = intake();
    assert_eq!(read(&mut device, &mut intake, &mut queue).await, [(45, Freshness::CaughtUp)]);
    kernel.new_record(8, 79);
    assert_eq!(read(&mut device, &mut intake, &mut queue).await, [(79, Freshness::Live)]);
    assert_eq!(lost(&telemetry).to_bits(), 0_f64.to_bits());
}

#[tokio::test]
async fn another_boot_is_all_new() {
    let (kernel, records, end) = kernel();
    kernel.old(3, 31);
    let mut device = Device::new(records, Some(end), "another boot", Some(&at(900))).unwrap();
    let (mut intake, mut queue, telemetry) = intake();
    assert_eq!(read(&mut device, &mut intake, &mut queue).await, [(31, Freshness::CaughtUp)]);
    assert_eq!(lost(&telemetry).to_bits(), 3_f64.to_bits(), "0 to 2 were overwritten before we came");
}

#[tokio::test]
async fn a_gap_is_counted_and_passed() {
    let (kernel, records, end) = kernel();
    let mut device = Device::new(records, Some(end), "boot", Some(&at(6))).unwrap();
    let (mut intake, mut queue, telemetry) = intake();
    kernel.old(10, 31);
    assert_eq!(read(&mut device, &mut intake, &mut queue).await, [(31, Freshness::CaughtUp)]);
    assert_eq!(lost(&telemetry).to_bits(), 3_f64.to_bits(), "7 to 9");
    kernel.new_record(21, 43);
    assert_eq!(read(&mut device, &mut intake, &mut queue).await, [(43, Freshness::Live)]);
    assert_eq!(lost(&telemetry).to_bits(), 13_f64.to_bits(), "and 11 to 20");
    kernel.records.send(b"no record").unwrap();
    kernel.new_record(22, 45);
    assert_eq!(read(&mut device, &mut intake, &mut queue).await, [(45, Freshness::Live)]);
}

#[tokio::test]
async fn what_was_sent_tells_uuids_once_more() {
    let (kernel, records, end) = kernel();
    let uuid = "GPU-1b2c3d4e-0000-1111-2222-333344445555";
    kernel.records.send(format!("4,1,1,c;NVRM: GPU at PCI:0000:3b:00: {uuid}\n").as_bytes()).unwrap();
    kernel.old(2, 31);
    let mut device = Device::new(records, Some(end), "boot", Some(&at(6))).unwrap();
    let (mut intake, mut queue, _) = intake();
    device.ready().await.unwrap();
    device.take(&mut intake).unwrap();
    let outbox = intake.outbox.clone();
    intake.send(outbox.room().await.unwrap());
    let events = queue.recv().await.unwrap();
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].freshness, Freshness::History);
    assert!(matches!(&events[0].kind, EventKind::GpuUuid(_, told) if **told == *uuid));
}

#[tokio::test]
async fn an_old_record_has_its_own_time() {
    let (kernel, records, end) = kernel();
    let record = kernel.xid(7, 31, Duration::from_secs(40));
    kernel.records.send(record.as_bytes()).unwrap();
    let mut device = Device::new(records, Some(end), "boot", Some(&at(6))).unwrap();
    let (mut intake, mut queue, _) = intake();
    device.ready().await.unwrap();
    device.take(&mut intake).unwrap();
    let outbox = intake.outbox.clone();
    intake.send(outbox.room().await.unwrap());
    let now = outbox.clock.now();
    let event = &queue.recv().await.unwrap()[0];
    let age = now.mono.since(event.at.mono);
    assert!((Duration::from_secs(40)..Duration::from_secs(42)).contains(&age), "{age:?}");
    let wall_age = now.wall.duration_since(event.at.wall).as_secs_f64();
    assert!((wall_age - age.as_secs_f64()).abs() < 0.1, "{wall_age}");
}

#[tokio::test]
async fn a_device_with_an_end_is_refused() {
    let (kernel, records, _end) = kernel();
    kernel.records.send(b"").unwrap();
    let mut device = Device::new(records, None, "boot", None).unwrap();
    let (mut intake, _queue, _) = intake();
    device.ready().await.unwrap();
    assert!(device.take(&mut intake).unwrap_err().to_string().contains("it has an end"));
    let regular = tempfile::tempfile().unwrap();
    assert!(Device::new(regular.as_fd().try_clone_to_owned().unwrap(), None, "boot", None).is_err());
}

#[test]
fn the_clock_follows_drift_and_notices_delay() {
    let second = 1_000_000_000;
    let mut clock = KernelClock { skew: None, idle_at: None };
    // The kernel's clock is 100 s behind, which is nobody's delay.
    assert_eq!(clock.live(500 * second, 400_000_000), Duration::ZERO);
    assert_eq!(clock.past(500 * second, 390_000_000), Duration::from_secs(10));
    // Read one second late, and there was nothing to read two seconds before.
    clock.idle_at = Some(508 * second);
    assert_eq!(clock.live(510 * second, 409_000_000), Duration::from_secs(1));
    // Three seconds are impossible: the clocks have drifted.
    clock.idle_at = Some(598 * second);
    assert_eq!(clock.live(600 * second, 497_000_000), Duration::ZERO);
    assert_eq!(clock.past(600 * second, 497_000_000), Duration::ZERO);
    // Ahead is impossible too.
    assert_eq!(clock.live(700 * second, 599_000_000), Duration::ZERO);
    assert_eq!(clock.live(700 * second, u64::MAX), Duration::ZERO);
}

#[test]
fn advice_names_the_thing_to_change() {
    let path = Path::new("/dev/kmsg");
    let denied = || io::Error::from_raw_os_error(libc::EPERM);
    let all = Capabilities { syslog: true, overrides_permissions: true };
    for (error, restricted, mode, capabilities, advice) in [
        (io::Error::from_raw_os_error(libc::ENOENT), true, None, all, "mount the host's /dev/kmsg there"),
        (
            denied(),
            true,
            Some(0o644),
            Capabilities::default(),
            "give the process CAP_SYSLOG, or set kernel.dmesg_restrict=0",
        ),
        (
            denied(),
            false,
            Some(0o640),
            Capabilities::default(),
            "run as root, or let the process read /dev/kmsg",
        ),
        (
            denied(),
            true,
            Some(0o644),
            all,
            "the device cgroup forbids it: run the container privileged, or with --device /dev/kmsg",
        ),
    ] {
        let said = advice_for(path, &error, restricted, mode, capabilities);
        assert_eq!(said, format!("cannot open /dev/kmsg ({error}): {advice}"));
    }
    let odd = io::Error::from_raw_os_error(libc::EIO);
    assert!(advice_for(path, &odd, true, None, all).starts_with("cannot read /dev/kmsg: "));
    assert_eq!(
        capabilities("Name:\tx\nCapEff:\t0000000400000000\n"),
        Capabilities { syslog: true, overrides_permissions: false }
    );
    assert_eq!(capabilities("CapEff:\tzz"), Capabilities::default());
}
