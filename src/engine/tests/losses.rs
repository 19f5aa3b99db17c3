//! Which departures are losses, and which incident they are.

use super::super::incident::{Cause, CulpritEvidence, IncidentState, VictimEvidence};
use super::super::snapshot::LossCause;
use super::*;

/// Six clients of three workloads on one GPU.
fn six() -> Bench {
    let mut bench = Bench::new();
    for (pid, unit) in [(10, "a"), (11, "a"), (12, "b"), (13, "b"), (14, "c"), (15, "c")] {
        bench.client(pid, &[0], unit);
    }
    bench.pass(60_000);
    bench
}

fn fault(bench: &mut Bench, culprit: u32, victims: &[u32]) {
    bench.server(LogMessage::ClientFault { pid: culprit });
    bench.server(LogMessage::ServerFault);
    for pid in victims {
        bench.server(LogMessage::ContextInactive { pid: *pid, context: 1 });
    }
    bench.server(LogMessage::FaultDevice { ordinal: 0 });
    for pid in victims {
        bench.server(LogMessage::StickyClient { pid: *pid });
    }
}

fn lost(bench: &Bench, gpu: u32, cause: LossCause) -> u64 {
    bench.domain(gpu).lost.iter().find(|(each, _)| *each == cause).unwrap().1.total
}

#[test]
fn a_fault_names_culprit_victims_and_who_blocks_recovery() {
    let mut bench = six();
    fault(&mut bench, 12, &[10, 11, 12, 13, 14, 15]);
    let incident = bench.incident();
    assert_eq!(incident.cause, Cause::Fault);
    assert!(incident.mass_client_loss);
    assert_eq!(incident.clients_before, 6);
    let culprit = incident.culprit.clone().unwrap();
    assert_eq!((culprit.pid, culprit.evidence), (12, CulpritEvidence::ServerLog));
    assert_eq!(culprit.command.as_deref(), Some("cmd12"));
    assert_eq!(incident.victims.len(), 6);
    assert!(incident.victims.iter().all(|victim| victim.evidence == VictimEvidence::ServerLog));
    assert_eq!(incident.work_lost_seconds, Some(360.0));
    assert_eq!(incident.recovery.blocked_by.len(), 6);
    assert_eq!(bench.told().iter().filter(|change| **change == Change::Opened).count(), 1);
    assert_eq!(bench.told().iter().filter(|change| **change == Change::MassLoss).count(), 1);
    assert_eq!(lost(&bench, 0, LossCause::Fault), 6);
    let domain = bench.domain(0);
    assert_eq!((domain.clients, domain.recovery_blocking, domain.mass_losses.total), (Some(0), 6, 1));
    assert_eq!(domain.mass_loss_last_clients, Some(6));

    bench.pass(100);
    for pid in 10..15 {
        bench.exit(pid);
    }
    assert_eq!(bench.incident().recovery.blocked_by, [15]);
    bench.pass(6_000);
    assert_eq!(bench.incident().state, IncidentState::Recovering);
    assert!(bench.told().contains(&Change::Blocked));
    bench.exit(15);
    bench.server(LogMessage::ContextDestroyed { device: 0 });
    bench.server(LogMessage::ContextCreated { device: 0, name: None });
    bench.pass(10);
    let incident = bench.incident();
    assert_eq!(incident.state, IncidentState::Closed);
    assert!((incident.recovery.seconds.unwrap() - 6.1).abs() < 0.01);
    assert_eq!(bench.domain(0).recovery_durations.counts.iter().sum::<u64>(), 1);
    assert_eq!(bench.domain(0).fault_started_at, None);
}

#[test]
fn only_the_coupled_set_is_hit() {
    let mut bench = Bench::new();
    bench.client(10, &[0], "a");
    bench.client(11, &[0, 1], "b");
    bench.client(12, &[2], "c");
    bench.pass(1_000);
    fault(&mut bench, 10, &[10, 11]);
    // A client of a healthy GPU that ends during the fault is no victim.
    bench.exit(12);
    bench.pass(1_000);
    let incident = bench.incident();
    assert_eq!(incident.victims.len(), 2);
    assert_eq!(incident.fault_domains.len(), 2);
    assert_eq!(lost(&bench, 2, LossCause::Fault), 0);
}

#[test]
fn victims_that_were_seen_to_leave_before_the_line_about_them_are_victims() {
    let mut bench = six();
    for pid in 10..13 {
        bench.exit(pid);
    }
    bench.pass(5);
    fault(&mut bench, 12, &[10, 11, 12, 13, 14, 15]);
    let incident = bench.incident();
    assert_eq!((incident.victims.len(), incident.clients_before), (6, 6));
    assert_eq!(incident.culprit.as_ref().unwrap().command.as_deref(), Some("cmd12"));
    assert_eq!(bench.domain(0).disconnects.total, 3);
    assert_eq!(lost(&bench, 0, LossCause::Fault), 6);
}

#[test]
fn ranks_of_one_job_that_end_together_are_orderly() {
    let mut bench = Bench::new();
    for pid in 10..18 {
        bench.client(pid, &[0], "mpi");
    }
    bench.pass(60_000);
    for pid in 10..18 {
        bench.pass(1);
        bench.exit(pid);
    }
    bench.pass(20_000);
    assert_eq!(bench.incidents(), []);
    assert_eq!(bench.domain(0).disconnects.total, 8);
}

#[test]
fn clients_of_several_workloads_that_leave_together_are_a_warning() {
    let mut bench = six();
    for pid in 10..16 {
        bench.exit(pid);
    }
    bench.pass(20_000);
    let incident = bench.incident();
    assert_eq!(incident.cause, Cause::Unexplained);
    assert!(!incident.mass_client_loss);
    assert_eq!(bench.domain(0).mass_losses.total, 0);
    assert_eq!(lost(&bench, 0, LossCause::Unexplained), 6);
}

#[test]
fn a_shutdown_is_no_loss_whatever_the_order() {
    let mut bench = six();
    bench.exit(10);
    bench.control(LogMessage::DaemonStopping);
    bench.exit(12);
    bench.exit(14);
    bench.server(LogMessage::ServerLeaving);
    bench.control(LogMessage::ServerExited { pid: SERVER, status: 0 });
    bench.pass(20_000);
    assert_eq!(bench.incidents(), []);
    assert_eq!(bench.domain(0).clients, Some(0));
    let server = &bench.snapshot().servers[0];
    assert_eq!((server.exits_orderly.total, server.exits_failed.total), (1, 0));
}

#[test]
fn a_server_killed_by_a_signal_logs_status_0_and_takes_its_clients() {
    let mut bench = six();
    bench.exit(10);
    bench.control(LogMessage::ServerExited { pid: SERVER, status: 0 });
    assert_eq!(bench.incidents(), []);
    bench.pass(60);
    let incident = bench.incident();
    assert_eq!(incident.cause, Cause::ServerExit);
    assert_eq!(incident.victims.len(), 6);
    assert_eq!(lost(&bench, 0, LossCause::ServerExit), 6);
    for pid in 11..16 {
        bench.exit(pid);
    }
    bench.control(LogMessage::ServerStarting { pid: 501, uid: 1000 });
    bench.control(LogMessage::ServerReady { pid: 501 });
    bench.pass(6_000);
    let incident = bench.incident();
    assert_eq!(incident.state, IncidentState::Closed);
    assert!(incident.recovery.recovered_at.is_some());
    assert!(incident.victims.iter().all(|victim| victim.exited_at.is_some()));
}

#[test]
fn a_server_whose_process_ends_without_any_line_takes_its_clients() {
    let mut bench = six();
    bench.exit(SERVER);
    bench.pass(300);
    assert_eq!(bench.incident().cause, Cause::ServerExit);
    assert!(bench.incident().mass_client_loss);
}

#[test]
fn a_server_takes_its_clients_on_all_gpus_in_one_incident() {
    let mut bench = Bench::new();
    for gpu in 0..4 {
        bench.client(10 + gpu, &[gpu], &format!("job {gpu}"));
    }
    bench.tell(EventKind::OomKill { pid: SERVER });
    bench.control(LogMessage::ServerExited { pid: SERVER, status: 0 });
    bench.pass(60);
    let incident = bench.incident();
    assert_eq!((incident.cause, incident.victims.len(), incident.clients_before), (Cause::ServerExit, 4, 4));
    assert!(incident.mass_client_loss, "one client a GPU, and all of them lost");
    assert_eq!(incident.fault_domains.len(), 4);
    assert!(incident.evidence.iter().any(|evidence| evidence.text.contains("OOM killer ended process")));
    for gpu in 0..4 {
        assert_eq!(lost(&bench, gpu, LossCause::ServerExit), 1);
        assert_eq!(bench.domain(gpu).mass_losses.total, 1);
    }
}

#[test]
fn a_server_that_dies_of_a_fault_takes_the_gpus_that_the_fault_spared() {
    let mut bench = Bench::new();
    for gpu in 0..3 {
        bench.client(10 + gpu, &[gpu], &format!("job {gpu}"));
    }
    bench.server(LogMessage::ClientFault { pid: 10 });
    bench.server(LogMessage::ServerFault);
    bench.pass(1_000);
    bench.control(LogMessage::ServerExited { pid: SERVER, status: 1 });
    bench.pass(60);
    let incident = bench.incident();
    assert_eq!((incident.cause, incident.victims.len()), (Cause::Fault, 3));
    assert!(incident.mass_client_loss);
}

#[test]
fn an_idle_server_that_ends_is_no_loss() {
    let mut bench = six();
    for pid in 10..16 {
        bench.exit(pid);
        bench.pass(10_000);
    }
    bench.control(LogMessage::ServerExited { pid: SERVER, status: 0 });
    bench.pass(20_000);
    assert_eq!(bench.incidents(), []);
}

#[test]
fn a_terminated_client_is_lost_by_intent() {
    let mut bench = six();
    bench.server(LogMessage::ClientTerminating { pid: 10 });
    bench.server(LogMessage::ClientLeft { pid: 10, context: None });
    bench.pass(20_000);
    assert_eq!(bench.incidents(), []);
    assert_eq!(lost(&bench, 0, LossCause::Terminated), 1);
}

#[test]
fn an_xid_names_the_culprit_when_the_log_does_not() {
    let mut bench = six();
    bench.xid(0, 31, Some(13));
    bench.xid_by(XidSource::Nvml, 0, 31, None);
    bench.server(LogMessage::ServerFault);
    for pid in 10..16 {
        bench.server(LogMessage::ContextInactive { pid, context: 1 });
    }
    let incident = bench.incident();
    let culprit = incident.culprit.clone().unwrap();
    assert_eq!((culprit.pid, culprit.evidence), (13, CulpritEvidence::XidChannel));
    assert_eq!(incident.xids.len(), 1);
    let xids = bench.snapshot().xids;
    assert_eq!(xids.len(), 2, "one event, two series");
}

#[test]
fn an_xid_explains_losses_when_no_log_can_be_read() {
    let mut bench = six();
    bench.xid(0, 31, Some(13));
    bench.exit(13);
    bench.exit(12);
    bench.exit(11);
    let incident = bench.incident();
    assert_eq!(incident.cause, Cause::Fault);
    assert!(incident.mass_client_loss);
    assert_eq!(incident.culprit.as_ref().unwrap().pid, 13);
}

#[test]
fn an_xid_that_is_read_late_explains_who_has_just_left() {
    let mut bench = six();
    bench.exit(13);
    bench.exit(12);
    bench.exit(11);
    bench.pass(50);
    bench.xid(0, 31, Some(13));
    assert_eq!(bench.incident().victims.len(), 3);
}

#[test]
fn a_storm_of_consequences_is_no_incident() {
    let mut bench = six();
    for _ in 0..10_000 {
        bench.xid(0, 45, Some(10));
    }
    bench.exit(10);
    bench.pass(20_000);
    assert_eq!(bench.incidents(), []);
}

#[test]
fn an_xid_of_a_process_that_is_no_client_explains_nothing() {
    let mut bench = six();
    bench.xid(0, 13, Some(9999));
    bench.xid(1, 13, Some(8888));
    bench.exit(10);
    bench.pass(20_000);
    assert_eq!(bench.incidents(), []);
}

#[test]
fn a_gpu_off_the_bus_takes_every_client_at_once() {
    let mut bench = six();
    bench.client(20, &[1], "z");
    bench.pass(1_000);
    bench.xid(0, 79, None);
    let incident = bench.incident();
    assert_eq!(incident.cause, Cause::Gpu);
    assert_eq!(incident.victims.len(), 6);
    assert!(incident.mass_client_loss);
    bench.tell(EventKind::GpuLost(pci(0)));
    assert_eq!(bench.incidents().len(), 1);
}

#[test]
fn a_second_fault_while_recovering_is_a_second_incident() {
    let mut bench = Bench::new();
    for (pid, gpu) in [(10, 0), (11, 0), (12, 1), (13, 1)] {
        bench.client(pid, &[gpu], "a");
    }
    bench.pass(1_000);
    fault(&mut bench, 10, &[10, 11]);
    bench.pass(30_000);
    fault(&mut bench, 12, &[12, 13]);
    assert_eq!(bench.incidents().len(), 2);
    assert_eq!(bench.domain(0).mass_losses.total, 1);
    assert_eq!(bench.domain(1).mass_losses.total, 1);
}

#[test]
fn a_fault_without_known_devices_is_put_on_the_whole_server() {
    let mut bench = Bench::new();
    bench.server(LogMessage::ClientConnected { pid: 10 });
    bench.server(LogMessage::ClientConnected { pid: 11 });
    bench.pass(1_000);
    bench.server(LogMessage::ServerFault);
    bench.server(LogMessage::StickyClient { pid: 10 });
    bench.server(LogMessage::StickyClient { pid: 11 });
    bench.pass(300);
    let incident = bench.incident();
    assert!(incident.mass_client_loss);
    assert_eq!(incident.fault_domains, ["default/unknown".into()]);
    let domains = bench.snapshot().domains;
    let hit = domains.iter().find(|domain| &*domain.labels.fault_domain == "default/unknown").unwrap();
    assert_eq!(hit.mass_losses.total, 1);
}

#[test]
fn a_recorded_incident_goes_on_after_a_restart() {
    let mut bench = six();
    fault(&mut bench, 12, &[10, 11, 12, 13, 14, 15]);
    bench.pass(100);
    let recorded = bench.incident();

    let mut bench = Bench::new();
    bench.pass(120_000);
    bench.node.restore(vec![(*recorded).clone()]);
    bench.freshness = Freshness::CaughtUp;
    bench.at = bench.at.at_wall(recorded.started_at);
    for pid in 10..16 {
        bench.client(pid, &[0], "a");
    }
    fault(&mut bench, 12, &[10, 11, 12, 13, 14, 15]);
    assert_eq!(bench.incident().id, recorded.id);
    assert!(!bench.told().contains(&Change::Opened), "{:?}", bench.told());
    assert_eq!(bench.domain(0).mass_losses.total, 0, "it was counted before the restart");
}

#[test]
fn the_kernel_ends_a_client_for_want_of_memory() {
    let mut bench = six();
    bench.tell(EventKind::OomKill { pid: 10 });
    bench.exit(10);
    let incident = bench.incident();
    assert_eq!(incident.cause, Cause::Killed);
    assert!(!incident.mass_client_loss);
    assert_eq!(lost(&bench, 0, LossCause::Killed), 1);
}

#[test]
fn a_clock_step_changes_nothing() {
    let mut bench = six();
    bench.exit(10);
    bench.at.wall = "2020-01-01T00:00:00Z".parse().unwrap();
    bench.pass(10);
    bench.exit(11);
    bench.at.wall = "2030-01-01T00:00:00Z".parse().unwrap();
    bench.pass(10_000);
    assert_eq!(bench.incidents(), []);
}

#[test]
fn a_server_that_ends_with_its_last_client_after_its_daemon_was_killed_lost_nobody() {
    let mut bench = Bench::new();
    bench.client(10, &[0], "a");
    bench.pass(60_000);
    let liveness = |state| Liveness { state, unanswered: 0, pid_file: None };
    bench.tell(EventKind::Liveness("default".into(), liveness(LockState::Stale)));
    bench.exit(10);
    bench.pass(4);
    bench.exit(SERVER);
    // The next daemon is there before the verdict.
    bench.pass(100);
    let next = LockState::Held(ProcessId { pid: 401, start: 9 });
    bench.tell(EventKind::Liveness("default".into(), liveness(next)));
    bench.pass(1_000);
    assert_eq!(bench.incidents(), []);
    assert_eq!(bench.snapshot().servers[0].exits_orderly.total, 1);
}

#[test]
fn one_xid_by_two_sources_is_one_xid_of_the_incident() {
    let mut bench = six();
    bench.xid_by(XidSource::Nvml, 0, 31, None);
    fault(&mut bench, 13, &[10, 11, 12, 13, 14, 15]);
    bench.xid(0, 31, Some(13));
    let incident = bench.incident();
    assert_eq!(incident.xids.len(), 1);
    assert_eq!((incident.xids[0].pid, incident.xids[0].source), (Some(13), XidSource::Nvml));
    assert_eq!(bench.snapshot().xids.len(), 2);
}

#[test]
fn an_exit_line_about_a_server_whose_process_lives_is_not_believed() {
    let mut bench = six();
    bench.seen(SERVER, "");
    let clients = [(10, 0), (11, 0), (12, 0), (13, 0), (14, 0), (15, 0)];
    bench.look(&clients);
    bench.control(LogMessage::ServerExited { pid: SERVER, status: 1 });
    bench.effects.clear();
    bench.pass(1_000);
    assert_eq!(bench.effects, [Effect::Look("default".into())]);
    let disagreement = |bench: &Bench| bench.snapshot().disagreements.len();
    assert_eq!(disagreement(&bench), 1);
    bench.look(&clients);
    assert_eq!(disagreement(&bench), 1, "until the next answer");
    bench.look(&clients);
    assert_eq!(disagreement(&bench), 0);
    bench.pass(60_000);
    assert_eq!(bench.incidents(), []);
    assert_eq!(bench.radius(0, Scope::Application), Some(6));

    // Its real end, in either order.
    bench.control(LogMessage::ServerExited { pid: SERVER, status: 1 });
    bench.pass(300);
    assert_eq!(bench.incidents(), []);
    bench.exit(SERVER);
    let incident = bench.incident();
    assert_eq!((incident.cause, incident.victims.len()), (Cause::ServerExit, 6));
    let evidence: Vec<_> = incident.evidence.iter().map(|evidence| &*evidence.source).collect();
    assert_eq!(evidence, ["control.log"]);
    let servers = bench.snapshot().servers;
    assert_eq!((servers[0].last_exit_status, servers[0].exits_failed.total), (Some(1), 1));

    let mut bench = six();
    bench.seen(SERVER, "");
    bench.exit(SERVER);
    bench.control(LogMessage::ServerExited { pid: SERVER, status: 1 });
    assert_eq!(bench.incident().cause, Cause::ServerExit);
}

#[test]
fn an_exit_line_that_the_daemon_bears_out_is_believed() {
    let mut bench = six();
    bench.seen(SERVER, "");
    bench.control(LogMessage::ServerExited { pid: SERVER, status: 1 });
    bench.pass(1_100);
    assert_eq!(bench.incidents(), []);
    bench.tell(EventKind::Look("default".into(), Ok(crate::event::Look::default())));
    bench.pass(300);
    assert_eq!(bench.incident().cause, Cause::ServerExit);
}

#[test]
fn an_answer_that_was_on_its_way_does_not_bring_a_dead_server_back() {
    let mut bench = six();
    bench.control(LogMessage::ServerExited { pid: SERVER, status: 0 });
    bench.look(&[(10, 0), (11, 0)]);
    bench.pass(60);
    assert_eq!(bench.incident().cause, Cause::ServerExit);
    bench.look(&[(10, 0), (11, 0)]);
    bench.pass(60);
    let servers = bench.snapshot().servers;
    assert_eq!((servers[0].is_up, servers[0].exits_failed.total), (Some(false), 1));
    assert_eq!(bench.incident().victims.len(), 6);
}

#[test]
fn two_gpus_lost_in_the_same_instant_are_two_incidents() {
    let mut bench = Bench::new();
    for (pid, gpu) in [(10, 0), (11, 0), (12, 1), (13, 1)] {
        bench.client(pid, &[gpu], "a");
    }
    bench.pass(1_000);
    bench.xid(0, 79, None);
    bench.xid(1, 79, None);
    let incidents = bench.incidents();
    assert_eq!(incidents.len(), 2);
    assert_ne!(incidents[0].id, incidents[1].id);
}

/// A counter never goes down, and each incident counts once: by the cause that was known when it reached the domain. What
/// its cause turns out to be, the record and the lost clients tell.
#[test]
fn an_incident_whose_cause_changes_is_counted_once_by_its_first() {
    let mut bench = six();
    bench.tell(EventKind::OomKill { pid: 10 });
    bench.exit(10);
    let counts = |bench: &Bench| -> Vec<(Cause, u64)> {
        let counts = bench.domain(0).incidents.into_iter().map(|(cause, count)| (cause, count.total));
        counts.filter(|(_, total)| *total > 0).collect()
    };
    assert_eq!((bench.incident().cause, counts(&bench)), (Cause::Killed, vec![(Cause::Killed, 1)]));
    fault(&mut bench, 11, &[11, 12, 13, 14, 15]);
    assert_eq!((bench.incident().cause, counts(&bench)), (Cause::Fault, vec![(Cause::Killed, 1)]));
    assert_eq!((lost(&bench, 0, LossCause::Killed), lost(&bench, 0, LossCause::Fault)), (1, 5));
    bench.xid(0, 79, None);
    assert_eq!((bench.incident().cause, counts(&bench)), (Cause::Gpu, vec![(Cause::Killed, 1)]));
    assert_eq!(bench.domain(0).mass_losses.total, 1);
}

/// Two containers with two processes each, of the pods `a` and `b`.
fn pods() -> Bench {
    let mut bench = Bench::new();
    for (pid, pod, container) in
        [(10, "a", "main"), (11, "a", "side"), (12, "a", "main"), (20, "b", "main"), (21, "b", "main")]
    {
        bench.server_line("Received new client request");
        bench.server_line("Worker created");
        bench.server_line("Creating worker thread");
        bench.server_line(&format!("Device NVIDIA H200 (uuid {}) is associated", uuid(0)));
        bench.server_line(&format!("Status of client {{{pid}, 1}} is ACTIVE"));
        let workload = Workload::Pod {
            uid: format!("uid-{pod}").into(),
            namespace: Some(format!("team-{pod}").into()),
            pod: Some(pod.into()),
            container: Some(container.into()),
        };
        bench.seen_with(pid, Some(workload));
    }
    bench.pass(60_000);
    bench
}

/// The kubelet kills the processes; what is seen first is chance.
fn deleted(bench: &mut Bench, pids: &[u32]) {
    for pid in pids {
        bench.pass(3);
        let says = |bench: &mut Bench| {
            bench.server_line("Receive command failed, assuming client exit");
            bench.server_line(&format!("Client {{{pid}, 1}} exit"));
            bench.server_line("Client process disconnected");
        };
        if pid % 2 == 0 {
            bench.exit(*pid);
            says(bench);
        } else {
            says(bench);
            bench.exit(*pid);
        }
    }
    bench.pass(20_000);
}

#[test]
fn a_pod_that_is_deleted_is_no_loss() {
    let mut bench = pods();
    deleted(&mut bench, &[10, 11, 12]);
    assert_eq!(bench.incidents(), []);
    assert_eq!((bench.domain(0).clients, bench.domain(0).disconnects.total), (Some(2), 3));
}

#[test]
fn two_pods_of_different_owners_that_are_deleted_at_once_are_at_most_a_warning() {
    let mut bench = pods();
    deleted(&mut bench, &[10, 11, 20, 12, 21]);
    let incident = bench.incident();
    assert_eq!((incident.cause, incident.mass_client_loss), (Cause::Unexplained, false));
    assert_eq!(bench.domain(0).mass_losses.total, 0);
    let alerts: Vec<&str> =
        crate::outlet::alert::alerts(&incident).iter().map(|key| key.name.severity()).collect();
    assert_eq!(alerts, ["warning"]);
}

#[test]
fn a_gpu_off_the_bus_is_found_by_the_kernel_log_while_nvml_is_dead() {
    let mut bench = six();
    let state = Err("nvmlInit does not return".into());
    bench.tell(EventKind::Source(SourceHealth { source: SourceName::Nvml, daemon: None, state }));
    bench.tell(EventKind::GpuLost(pci(0)));
    let incident = bench.incident();
    assert_eq!((incident.cause, incident.victims.len()), (Cause::Gpu, 6));
    assert!(incident.mass_client_loss);
}

#[test]
fn a_fault_and_an_orderly_end_of_the_next_clients_are_told_apart() {
    let mut bench = six();
    fault(&mut bench, 12, &[10, 11, 12, 13, 14, 15]);
    for pid in 10..16 {
        bench.exit(pid);
    }
    bench.server(LogMessage::ContextCreated { device: 0, name: None });
    bench.pass(6_000);
    for (pid, unit) in [(30, "d"), (31, "d"), (32, "d")] {
        bench.client(pid, &[0], unit);
    }
    for pid in [30, 31, 32] {
        bench.exit(pid);
    }
    bench.pass(20_000);
    assert_eq!(bench.incident().victims.len(), 6);
}

#[test]
fn a_client_that_was_gone_before_its_workload_was_known_makes_no_second_one() {
    let mut bench = Bench::new();
    for pid in 10..13 {
        bench.client(pid, &[0], "mpi");
    }
    bench.server(LogMessage::DeviceAssociated { device: DeviceName::Uuid(uuid(0)) });
    bench.server(LogMessage::ContextActive { pid: 13, context: 1 });
    bench.pass(50);
    for pid in 10..14 {
        bench.exit(pid);
    }
    bench.pass(20_000);
    assert_eq!(bench.incidents(), []);
}

#[test]
fn an_answer_about_a_server_that_has_just_been_killed_makes_no_fault_of_it() {
    let mut bench = six();
    bench.control(LogMessage::ServerExited { pid: SERVER, status: 0 });
    bench.look_with(Some(ServerStatus::Fault), &[(10, 0), (11, 0)]);
    bench.pass(60);
    assert_eq!(bench.incident().cause, Cause::ServerExit);
    assert_eq!(lost(&bench, 0, LossCause::ServerExit), 6);
    assert_eq!(bench.snapshot().servers[0].faults.total, 0);
}

#[test]
fn a_victim_that_is_gone_before_the_list_of_victims_is_lost_once() {
    let mut bench = six();
    bench.server(LogMessage::ClientFault { pid: 12 });
    bench.server(LogMessage::ServerFault);
    for pid in 10..16 {
        bench.server(LogMessage::ContextInactive { pid, context: 1 });
    }
    bench.server(LogMessage::ClientLeft { pid: 10, context: Some(1) });
    bench.exit(11);
    for pid in 10..16 {
        bench.server(LogMessage::StickyClient { pid });
    }
    assert_eq!(bench.incident().victims.len(), 6);
    assert_eq!(lost(&bench, 0, LossCause::Fault), 6);
    assert_eq!(bench.incident().recovery.blocked_by, [12, 13, 14, 15]);
}
