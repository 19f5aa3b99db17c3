//! Clients, coupled sets and blast radius.

use super::*;

#[test]
fn a_client_that_spans_two_gpus_couples_them_and_not_the_third() {
    let mut bench = Bench::new();
    bench.client(10, &[0], "a");
    bench.client(11, &[0, 1], "b");
    bench.client(12, &[1], "c");
    bench.client(13, &[2], "d");
    assert_eq!(bench.radius(0, Scope::Application), Some(3));
    assert_eq!(bench.radius(1, Scope::Application), Some(3));
    assert_eq!(bench.radius(2, Scope::Application), Some(1));
    assert_eq!(bench.radius(2, Scope::Server), Some(4));
    assert_eq!(bench.domain(0).clients, Some(2));
    assert_eq!(bench.domain(0).coupled_devices, Some(2));
    assert_eq!(bench.snapshot().servers[0].clients, Some(4));
    bench.exit(11);
    assert_eq!(bench.radius(0, Scope::Application), Some(1));
}

#[test]
fn what_couples_gpus_for_one_servers_clients_does_not_for_anothers() {
    let mut bench = Bench::new();
    bench.client(10, &[0, 1], "a");
    let other = SERVER + 1;
    bench.control(LogMessage::ServerStarting { pid: other, uid: 1001 });
    bench.log(LogFile::Server, other, LogMessage::DeviceAssociated { device: DeviceName::Uuid(uuid(1)) });
    bench.log(LogFile::Server, other, LogMessage::ContextActive { pid: 11, context: 1 });
    assert_eq!(bench.radius(0, Scope::Application), Some(1), "a context of another server is not hit");
    assert_eq!(bench.radius(1, Scope::Application), Some(2));
    assert_eq!(bench.radius(0, Scope::Server), Some(1));
}

#[test]
fn processes_of_one_workload_count_once_as_workload() {
    let mut bench = Bench::new();
    bench.client(10, &[0], "job");
    bench.client(11, &[0], "job");
    bench.client(12, &[0], "other");
    let workloads = bench.domain(0).radius[0].1.workloads;
    assert_eq!(workloads, Some(2));
}

#[test]
fn a_session_finds_what_the_logs_missed_and_says_so() {
    let mut bench = Bench::new();
    bench.client(10, &[0], "a");
    bench.pass(2_000);
    bench.look(&[(10, 0)]);
    bench.pass(2_000);
    bench.look(&[(10, 0), (11, 1)]);
    assert_eq!(bench.domain(1).clients, Some(1));
    assert_eq!(bench.snapshot().disagreements.len(), 1);
    bench.pass(2_000);
    bench.look(&[(11, 1)]);
    assert_eq!(bench.domain(0).clients, Some(0));
    bench.pass(2_000);
    bench.look(&[(11, 1)]);
    assert_eq!(bench.snapshot().disagreements, []);
}

#[test]
fn an_answer_older_than_a_log_line_does_not_undo_it() {
    let mut bench = Bench::new();
    bench.client(10, &[0], "a");
    bench.look(&[]);
    assert_eq!(bench.domain(0).clients, Some(1));
    bench.exit(10);
    bench.look(&[(10, 0)]);
    assert_eq!(bench.domain(0).clients, Some(0));
}

#[test]
fn history_tells_who_is_connected_and_counts_nothing() {
    let mut bench = Bench::new();
    bench.freshness = Freshness::History;
    bench.client(10, &[0], "");
    bench.client(11, &[0], "");
    bench.server(LogMessage::ClientLeft { pid: 11, context: None });
    bench.freshness = Freshness::Live;
    let domain = bench.domain(0);
    assert_eq!((domain.clients, domain.connects.total, domain.disconnects.total), (Some(1), 0, 0));
    bench.exit(10);
    assert_eq!(bench.domain(0).clients, Some(0));
}

#[test]
fn a_reused_pid_is_another_process() {
    let mut bench = Bench::new();
    bench.client(10, &[0], "a");
    let again = ProcessFacts {
        pid: 10,
        process: Some(ProcessId { pid: 10, start: 99 }),
        started_at: None,
        command: Some("other".into()),
        uid: None,
        workload: None,
    };
    bench.tell(EventKind::ProcessSeen("default".into(), again));
    let snapshot = bench.snapshot();
    assert_eq!(snapshot.clients.len(), 1);
    assert_eq!(snapshot.clients[0].command.as_deref(), Some("other"));
    assert_eq!(snapshot.clients[0].workload, None);
    assert_eq!(bench.domain(0).disconnects.total, 1);
}

#[test]
fn a_client_of_another_uid_is_pending_until_its_server_is_ready() {
    let mut bench = Bench::new();
    bench.control(LogMessage::ClientQueued { pid: 20, uid: 2000 });
    let daemon = bench.snapshot().daemons[0].clone();
    assert_eq!(daemon.pending_clients, Some(1));
    assert_eq!(daemon.pending_oldest, Some(bench.at.wall));
    bench.server(LogMessage::ServerLeaving);
    bench.control(LogMessage::ServerExited { pid: SERVER, status: 0 });
    bench.control(LogMessage::ServerStarting { pid: 501, uid: 2000 });
    bench.control(LogMessage::ServerReady { pid: 501 });
    let snapshot = bench.snapshot();
    assert_eq!(snapshot.daemons[0].pending_clients, Some(0));
    assert_eq!(snapshot.servers.len(), 2);
    let old = snapshot.servers.iter().find(|server| &*server.server == "uid_1000").unwrap();
    assert_eq!((old.is_up, old.exits_orderly.total, old.exits_failed.total), (Some(false), 1, 0));
    assert_eq!(bench.incidents(), []);
}

#[test]
fn what_no_source_can_tell_is_absent() {
    let mut bench = Bench::new();
    bench.client(10, &[0], "a");
    for source in [SourceName::ControlLog, SourceName::ServerLog] {
        let state = Err("gone".into());
        bench.tell(EventKind::Source(SourceHealth { source, daemon: Some("default".into()), state }));
    }
    assert_eq!(bench.domain(0).clients, None);
    assert_eq!(bench.radius(0, Scope::Application), None);
    assert_eq!(bench.snapshot().daemons[0].pending_clients, None);
    assert_eq!(bench.snapshot().servers[0].clients, None);
}

#[test]
fn a_process_that_started_after_the_client_connected_is_not_the_client() {
    let mut bench = Bench::new();
    bench.freshness = Freshness::History;
    bench.server(LogMessage::DeviceAssociated { device: DeviceName::Uuid(uuid(0)) });
    bench.server(LogMessage::ContextActive { pid: 10, context: 1 });
    bench.freshness = Freshness::Live;
    bench.pass(60_000);
    bench.seen(10, "other");
    assert_eq!(bench.domain(0).clients, Some(0));
    assert_eq!(bench.incidents(), []);
}

#[test]
fn a_client_leaves_its_devices_when_its_last_context_does() {
    let mut bench = Bench::new();
    bench.client(10, &[0, 1], "a");
    bench.server(LogMessage::ClientLeft { pid: 10, context: Some(1) });
    assert_eq!((bench.domain(0).clients, bench.domain(1).clients), (Some(0), Some(1)));
    bench.server(LogMessage::ClientLeft { pid: 10, context: Some(2) });
    assert_eq!((bench.domain(1).clients, bench.domain(1).disconnects.total), (Some(0), 1));
    assert_eq!(bench.snapshot().clients.len(), 0);
}
