//! What goes on over a restart, and what is found after one.

use super::super::incident::{Cause, IncidentState};
use super::super::snapshot::LossCause;
use super::*;

/// Says something in the words of the past.
fn past(bench: &mut Bench, freshness: Freshness, at: Moment, say: impl FnOnce(&mut Bench)) {
    let (now, before) = (bench.at, bench.freshness);
    (bench.at, bench.freshness) = (at, freshness);
    say(bench);
    (bench.at, bench.freshness) = (now, before);
}

/// The lines that tell of clients 10 and 11 on GPU 0 and 12 and 13 on GPU 1.
fn four(bench: &mut Bench) {
    bench.control(LogMessage::ServerStarting { pid: SERVER, uid: 1000 });
    bench.server(LogMessage::ServerStarted);
    for (pid, gpu) in [(10, 0), (11, 0), (12, 1), (13, 1)] {
        bench.server(LogMessage::DeviceAssociated { device: DeviceName::Uuid(uuid(gpu)) });
        bench.server(LogMessage::ContextActive { pid, context: 1 });
    }
}

/// The fault of client 11 on GPU 0.
fn fault(bench: &mut Bench) {
    bench.server(LogMessage::ClientFault { pid: 11 });
    bench.server(LogMessage::ServerFault);
    for pid in [10, 11] {
        bench.server(LogMessage::ContextInactive { pid, context: 1 });
    }
}

/// A node where that fault is 100 ms old, and its record.
fn recorded() -> (Bench, Incident) {
    let mut bench = Bench::new();
    four(&mut bench);
    bench.pass(60_000);
    fault(&mut bench);
    bench.pass(100);
    let incident = Incident::clone(&bench.incident());
    (bench, incident)
}

/// The next run, `millis` later, that knows of it.
fn restarted(earlier: &Bench, incident: &Incident, millis: u64) -> Bench {
    let mut at = earlier.at.after(Duration::from_millis(millis));
    at.mono = Mono(0);
    let mut bench = Bench::empty(at);
    bench.node.restore(vec![incident.clone()]);
    bench
}

fn lost(bench: &Bench, gpu: u32) -> u64 {
    bench.domain(gpu).lost.iter().map(|(_, count)| count.total).sum()
}

fn counted(bench: &Bench, gpu: u32, cause: Cause) -> u64 {
    bench.domain(gpu).incidents.iter().find(|(each, _)| *each == cause).unwrap().1.total
}

#[test]
fn an_open_incident_waits_for_its_daemon_and_closes_without_one() {
    let (earlier, incident) = recorded();
    let mut bench = restarted(&earlier, &incident, 600_000);
    bench.pass(1);
    bench.pass(20_000);
    assert_eq!(bench.incident().state, IncidentState::Open, "nothing has told what became of it");
    assert_eq!(bench.told(), []);
    bench.pass(15_000);
    assert_eq!(bench.incident().state, IncidentState::Closed, "its daemon is no longer there");
    assert_eq!(bench.node.next_deadline(), None);
}

#[test]
fn an_incident_recorded_in_the_future_is_not_open_until_then() {
    let (earlier, mut incident) = recorded();
    incident.started_at = earlier.at.after(Duration::from_secs(300 * 86_400)).wall;
    let mut bench = restarted(&earlier, &incident, 600_000);
    assert_eq!(bench.incident().started_at, bench.at.wall);
    bench.pass(1);
    bench.pass(35_000);
    assert_eq!(bench.incident().state, IncidentState::Closed);
}

#[test]
fn history_links_a_recorded_incident_to_what_is_there() {
    let (earlier, incident) = recorded();
    let mut bench = restarted(&earlier, &incident, 600_000);
    bench.found("default");
    let watched: Vec<_> =
        bench.effects.iter().filter(|effect| matches!(effect, Effect::Watch(_, 10 | 11))).collect();
    assert_eq!(watched.len(), 2, "{:?}", bench.effects);
    // An earlier fault of the same server and its recovery are not this one's.
    let before = bench.at.at_wall(incident.started_at).before(50_000);
    past(&mut bench, Freshness::History, before, |bench| {
        four(bench);
        bench.server(LogMessage::ServerFault);
        bench.server(LogMessage::ContextCreated { device: 0, name: None });
    });
    let then = bench.at.at_wall(incident.started_at);
    past(&mut bench, Freshness::History, then, fault);
    // The first process was gone when that was read.
    bench.exit(10);
    bench.log_read("default");
    bench.pass(1_500);
    let again = bench.incident();
    assert_eq!((again.id.clone(), again.state), (incident.id.clone(), IncidentState::Recovering));
    assert_eq!((again.victims.len(), again.recovery.blocked_by.clone()), (2, vec![11]));
    assert_eq!(bench.domain(0).recovery_blocking, 1);
    assert_eq!(bench.domain(0).fault_started_at, Some(incident.started_at));
    assert_eq!(bench.domain(1).recovery_blocking, 0);
    assert_eq!(
        (counted(&bench, 0, Cause::Fault), bench.domain(0).mass_losses.total, lost(&bench, 0)),
        (0, 0, 0)
    );
    assert!(!bench.told().contains(&Change::Opened) && !bench.told().contains(&Change::MassLoss));
    bench.exit(11);
    bench.server(LogMessage::ContextCreated { device: 0, name: None });
    bench.pass(10);
    let over = bench.incident();
    assert_eq!(over.state, IncidentState::Closed);
    assert!((over.recovery.seconds.unwrap() - 601.6).abs() < 0.1, "{:?}", over.recovery);
    assert_eq!(bench.domain(0).recovery_durations.counts.iter().sum::<u64>(), 1);
}

#[test]
fn an_answer_of_the_daemon_continues_a_recorded_incident_where_no_line_does() {
    let (earlier, incident) = recorded();
    let mut bench = restarted(&earlier, &incident, 600_000);
    bench.found("default");
    bench.log_read("default");
    bench.tell(EventKind::GpuUuid(pci(1), uuid(1)));
    bench.look_with(Some(ServerStatus::Fault), &[(10, 0), (11, 0), (12, 1), (13, 1)]);
    bench.pass(2_000);
    let again = bench.incident();
    assert_eq!((again.id.clone(), again.state), (incident.id.clone(), IncidentState::Recovering));
    assert_eq!(again.recovery.blocked_by, [10, 11]);
    assert_eq!(bench.domain(0).recovery_blocking, 2);
    assert_eq!(bench.domain(0).clients, Some(0));
    assert_eq!(bench.domain(1).clients, Some(2));
    assert_eq!(bench.snapshot().servers[0].faults.total, 0, "it was counted before the restart");
    bench.exit(10);
    bench.exit(11);
    bench.look_with(Some(ServerStatus::Active), &[(12, 1), (13, 1)]);
    bench.pass(10);
    assert_eq!(bench.incident().state, IncidentState::Closed);
    assert!(bench.incident().recovery.recovered_at.is_some());
}

#[test]
fn clients_of_a_lost_gpu_are_lost_still_after_a_restart() {
    let mut bench = Bench::new();
    four(&mut bench);
    bench.pass(60_000);
    bench.xid(0, 79, None);
    bench.pass(6_000);
    let incident = Incident::clone(&bench.incident());
    assert_eq!((incident.cause, incident.state), (Cause::Gpu, IncidentState::Recovering));
    let mut bench = restarted(&bench, &incident, 1_000);
    bench.found("default");
    let before = bench.at.before(50_000);
    past(&mut bench, Freshness::History, before, four);
    bench.log_read("default");
    bench.pass(2_000);
    assert_eq!(bench.incident().recovery.blocked_by, [10, 11]);
    assert_eq!((bench.domain(0).clients, bench.domain(1).clients), (Some(0), Some(2)));
    bench.exit(10);
    bench.exit(11);
    bench.pass(10_000);
    assert_eq!(bench.incident().state, IncidentState::Closed);
    assert_eq!(lost(&bench, 0), 0);
}

#[test]
fn what_an_incident_becomes_after_the_restart_is_news() {
    let (earlier, mut incident) = recorded();
    // Killed after the first victim had been recorded.
    incident.victims.truncate(1);
    incident.mass_client_loss = false;
    let mut bench = restarted(&earlier, &incident, 100);
    bench.found("default");
    let then = bench.at.at_wall(incident.started_at);
    past(&mut bench, Freshness::History, then.before(50_000), four);
    past(&mut bench, Freshness::CaughtUp, then, fault);
    bench.log_read("default");
    bench.pass(1_500);
    assert_eq!(bench.incident().victims.len(), 2);
    assert_eq!(bench.told().iter().filter(|change| **change == Change::MassLoss).count(), 1);
    assert!(!bench.told().contains(&Change::Opened));
    let domain = bench.domain(0);
    assert_eq!((domain.mass_losses.total, lost(&bench, 0), counted(&bench, 0, Cause::Fault)), (1, 1, 0));
}

#[test]
fn lines_of_a_closed_incident_that_are_read_again_say_nothing_new() {
    let (mut earlier, _) = recorded();
    for pid in [10, 11] {
        earlier.exit(pid);
    }
    earlier.server(LogMessage::ContextCreated { device: 0, name: None });
    earlier.pass(6_000);
    let incident = Incident::clone(&earlier.incident());
    assert_eq!(incident.state, IncidentState::Closed);
    let mut bench = restarted(&earlier, &incident, 1_000);
    bench.found("default");
    let then = bench.at.at_wall(incident.started_at);
    past(&mut bench, Freshness::History, then.before(50_000), four);
    past(&mut bench, Freshness::CaughtUp, then, fault);
    past(&mut bench, Freshness::CaughtUp, then.after(Duration::from_millis(200)), |bench| {
        bench.server(LogMessage::ContextCreated { device: 0, name: None });
    });
    bench.log_read("default");
    bench.pass(10_000);
    assert_eq!(*bench.incident(), incident);
    assert_eq!(bench.told(), []);
    assert_eq!((lost(&bench, 0), counted(&bench, 0, Cause::Fault)), (0, 0));
    assert_eq!(bench.snapshot().servers[0].faults.total, 0);
}

#[test]
fn a_fault_is_found_with_its_devices_although_its_victims_are_seen_gone_first() {
    let mut bench = Bench::empty(Bench::new().at.after(Duration::from_secs(3600)));
    bench.found("default");
    let then = bench.at.before(600_000);
    past(&mut bench, Freshness::History, then.before(50_000), four);
    for pid in [10, 11] {
        bench.exit(pid);
    }
    bench.look(&[(12, 1), (13, 1)]);
    // An Xid may be read before the lines that it explains.
    past(&mut bench, Freshness::CaughtUp, then, |bench| {
        bench.tell(EventKind::GpuUuid(pci(0), uuid(0)));
        bench.xid(0, 31, Some(11));
    });
    bench.pass(200);
    past(&mut bench, Freshness::CaughtUp, then, fault);
    bench.pass(300);
    bench.log_read("default");
    bench.look(&[(12, 1), (13, 1)]);
    bench.pass(10);
    let incident = bench.incident();
    assert!(incident.caught_up && incident.mass_client_loss);
    assert_eq!(incident.started_at, then.wall);
    assert_eq!(incident.fault_domains, [Arc::from(format!("default/{}", uuid(0)))]);
    assert_eq!((incident.victims.len(), incident.clients_before), (2, 2));
    assert!(incident.victims.iter().all(|victim| victim.exited_at.is_some()));
    assert_eq!(incident.xids.len(), 1);
    assert_eq!((lost(&bench, 0), lost(&bench, 1)), (2, 0));
    assert_eq!(bench.domain(0).mass_losses.last, Some(then.wall));
}

#[test]
fn a_server_that_was_killed_while_nobody_watched_took_its_clients() {
    let mut bench = Bench::empty(Bench::new().at.after(Duration::from_secs(3600)));
    bench.found("default");
    let then = bench.at.before(600_000);
    past(&mut bench, Freshness::History, then.before(50_000), four);
    for pid in [10, 11, 12, 13, SERVER] {
        bench.exit(pid);
    }
    bench.pass(500);
    past(&mut bench, Freshness::CaughtUp, then, |bench| {
        bench.control(LogMessage::ServerExited { pid: SERVER, status: 0 });
    });
    bench.log_read("default");
    bench.pass(10);
    let incident = bench.incident();
    assert_eq!((incident.cause, incident.started_at), (Cause::ServerExit, then.wall));
    assert_eq!((incident.victims.len(), incident.fault_domains.len()), (4, 2));
    assert!(incident.mass_client_loss);
    assert_eq!(
        bench.domain(0).lost.iter().find(|(cause, _)| *cause == LossCause::ServerExit).unwrap().1.total,
        2
    );
}

#[test]
fn a_log_that_never_comes_is_not_waited_for() {
    let mut bench = Bench::empty(Bench::new().at);
    bench.found("default");
    bench.look(&[(10, 0), (11, 0)]);
    assert_eq!(bench.snapshot().clients.len(), 0);
    bench.pass(11_000);
    assert_eq!(bench.snapshot().clients.len(), 2, "the answer that came before it holds");
    assert_eq!(bench.node.next_deadline(), None);
}

#[test]
fn labels_of_a_recorded_incident_stand_until_nvml_tells_them_again() {
    let (earlier, mut incident) = recorded();
    incident.fault_domains = vec!["default/0".into()];
    incident.devices[0].gpu = "0".into();
    let mut bench = restarted(&earlier, &incident, 1_000);
    bench.found("default");
    let then = bench.at.at_wall(incident.started_at);
    past(&mut bench, Freshness::History, then.before(50_000), four);
    past(&mut bench, Freshness::CaughtUp, then, fault);
    bench.log_read("default");
    bench.pass(2_000);
    let again = bench.incident();
    assert_eq!(again.fault_domains, ["default/0".into()], "or else it were another alert");
    assert_eq!(again.devices, incident.devices);
}

#[test]
fn a_recorded_mig_device_is_known_again_by_its_own_uuid() {
    let (earlier, mut incident) = recorded();
    // NVML had told that the device, as the log names it, is an instance.
    let mig: Arc<str> = "MIG-00000003-aaaa-bbbb-cccc-dddddddddddd".into();
    incident.fault_domains = vec!["default/0/3".into()];
    incident.devices[0].gpu_instance = "3".into();
    incident.devices[0].mig_uuid = Some(mig.clone());
    let mut bench = restarted(&earlier, &incident, 1_000);
    bench.found("default");
    let then = bench.at.at_wall(incident.started_at);
    past(&mut bench, Freshness::History, then.before(50_000), |bench| {
        bench.control(LogMessage::ServerStarting { pid: SERVER, uid: 1000 });
        for pid in [10, 11] {
            bench.server(LogMessage::DeviceAssociated { device: DeviceName::Uuid(mig.clone()) });
            bench.server(LogMessage::ContextActive { pid, context: 1 });
        }
    });
    past(&mut bench, Freshness::CaughtUp, then, fault);
    bench.log_read("default");
    bench.pass(2_000);
    let again = bench.incident();
    assert_eq!((&again.fault_domains, &again.devices), (&incident.fault_domains, &incident.devices));
    let domain = &bench.snapshot().domains[0];
    assert_eq!(domain.incidents.iter().map(|(_, count)| count.total).sum::<u64>(), 0);
}

#[test]
fn a_client_that_comes_after_the_first_answer_is_news_although_the_log_was_read_later() {
    let mut bench = Bench::empty(Bench::new().at);
    bench.found("default");
    bench.tell(EventKind::GpuUuid(pci(0), uuid(0)));
    bench.look(&[(10, 0)]);
    bench.pass(20);
    bench.log_read("default");
    // The second session is faster than the line.
    bench.look(&[(10, 0), (11, 0)]);
    assert_eq!(bench.domain(0).clients, Some(2));
    assert_eq!(bench.domain(0).connects.total, 1);
}
