//! Whatever sources say, in whatever order, some things hold.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::super::log::MAX_SERVERS;
use super::super::state::MAX_ENDED_PLACES;
use super::*;

fn message() -> impl Strategy<Value = LogMessage> {
    let pid = 10_u32..16;
    let gpu = 0_u32..3;
    prop_oneof![
        (pid.clone(), 1_u32..3).prop_map(|(pid, context)| LogMessage::ContextActive { pid, context }),
        (pid.clone(), 1_u32..3).prop_map(|(pid, context)| LogMessage::ContextInactive { pid, context }),
        gpu.prop_map(|gpu| LogMessage::DeviceAssociated { device: DeviceName::Uuid(uuid(gpu)) }),
        pid.clone().prop_map(|pid| LogMessage::ClientConnected { pid }),
        (pid.clone(), proptest::option::of(1_u32..3))
            .prop_map(|(pid, context)| LogMessage::ClientLeft { pid, context }),
        Just(LogMessage::ClientLeftUnnamed { contexts_left: Some(0) }),
        Just(LogMessage::ClientLeftUnnamed { contexts_left: None }),
        pid.clone().prop_map(|pid| LogMessage::ClientFault { pid }),
        pid.clone().prop_map(|pid| LogMessage::StickyClient { pid }),
        pid.clone().prop_map(|pid| LogMessage::ClientTerminating { pid }),
        Just(LogMessage::ServerFault),
        (0_u32..2).prop_map(|ordinal| LogMessage::FaultDevice { ordinal }),
        (0_u32..2).prop_map(|device| LogMessage::ContextCreated { device, name: None }),
        Just(LogMessage::ServerLeaving),
        Just(LogMessage::DaemonStopping),
        Just(LogMessage::DaemonStarted),
        (500_u32..503, 1000_u32..1002).prop_map(|(pid, uid)| LogMessage::ServerStarting { pid, uid }),
        (500_u32..503).prop_map(|pid| LogMessage::ServerReady { pid }),
        (500_u32..503, 0_i32..2).prop_map(|(pid, status)| LogMessage::ServerExited { pid, status }),
        (pid, 1000_u32..1002).prop_map(|(pid, uid)| LogMessage::ClientQueued { pid, uid }),
    ]
}

#[derive(Debug, Clone)]
enum Step {
    Log(u32, LogMessage),
    Exit(u32),
    Seen(u32),
    Look(Vec<(u32, u32)>),
    Xid(u32, u32, Option<u32>),
    Pass(u64),
    Fresh(bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        10 => (500_u32..502, message()).prop_map(|(writer, message)| Step::Log(writer, message)),
        2 => prop_oneof![10_u32..16, 500_u32..502].prop_map(Step::Exit),
        2 => (10_u32..16).prop_map(Step::Seen),
        1 => proptest::collection::vec((10_u32..16, 0_u32..3), 0..5).prop_map(Step::Look),
        1 => (0_u32..3, prop_oneof![Just(31_u32), Just(45), Just(79), Just(13)], proptest::option::of(10_u32..16))
            .prop_map(|(gpu, code, pid)| Step::Xid(gpu, code, pid)),
        2 => prop_oneof![Just(1_u64), Just(100), Just(3_000), Just(10_000)].prop_map(Step::Pass),
        1 => any::<bool>().prop_map(Step::Fresh),
    ]
}

fn run(steps: &[Step]) -> Bench {
    let mut bench = Bench::new();
    let mut before = BTreeMap::new();
    for step in steps {
        match step {
            Step::Log(writer, message) => bench.log(LogFile::Merged, *writer, message.clone()),
            Step::Exit(pid) => bench.exit(*pid),
            Step::Seen(pid) => bench.seen(*pid, if pid % 2 == 0 { "even" } else { "odd" }),
            Step::Look(clients) => bench.look(clients),
            Step::Xid(gpu, code, pid) => bench.xid(*gpu, *code, *pid),
            Step::Pass(millis) => bench.pass(*millis),
            Step::Fresh(is_live) => {
                bench.freshness = if *is_live { Freshness::Live } else { Freshness::History };
            }
        }
        let snapshot = bench.snapshot();
        check(&snapshot);
        let counters = counters(&snapshot);
        for (name, total) in before {
            assert!(counters.get(&name).is_some_and(|now| *now >= total), "{name} went down");
        }
        before = counters;
    }
    bench
}

/// Every counter of the domains and servers by a name of its own. A server's belong to its uid once that is known.
fn counters(snapshot: &Snapshot) -> BTreeMap<String, u64> {
    let mut all = BTreeMap::new();
    for domain in &snapshot.domains {
        let name = &domain.labels.fault_domain;
        all.insert(format!("{name} connects"), domain.connects.total);
        all.insert(format!("{name} disconnects"), domain.disconnects.total);
        all.insert(format!("{name} mass losses"), domain.mass_losses.total);
        all.extend(domain.lost.iter().map(|(cause, count)| (format!("{name} lost {cause:?}"), count.total)));
        all.extend(
            domain
                .incidents
                .iter()
                .map(|(cause, count)| (format!("{name} incidents {cause:?}"), count.total)),
        );
    }
    for server in snapshot.servers.iter().filter(|server| server.server.starts_with("uid_")) {
        let name = &server.server;
        all.insert(format!("{name} starts"), server.starts.total);
        all.insert(format!("{name} exits"), server.exits_orderly.total + server.exits_failed.total);
        all.insert(format!("{name} faults"), server.faults.total);
    }
    all
}

fn check(snapshot: &Snapshot) {
    let mut labels = BTreeSet::new();
    for domain in &snapshot.domains {
        assert!(labels.insert(domain.labels.fault_domain.clone()), "a domain is listed twice");
        let of = |scope| {
            domain.radius.iter().find(|(each, _)| *each == scope).and_then(|(_, radius)| radius.clients)
        };
        let (clients, application, server) = (domain.clients, of(Scope::Application), of(Scope::Server));
        assert!(application >= clients, "the radius holds the device's clients");
        assert!(server >= application, "the server's radius holds the application's");
        assert!(domain.contexts >= domain.clients, "a client on a device has a context there");
        let incidents: u64 = domain.incidents.iter().map(|(_, count)| count.total).sum();
        assert!(domain.mass_losses.total <= incidents);
        assert!(domain.mass_loss_last_clients.is_none_or(|clients| clients >= 2));
    }
    for server in &snapshot.servers {
        if server.is_up == Some(true) {
            let clients = snapshot.clients.iter().filter(|client| {
                client.daemon == server.daemon
                    && client.server == server.server
                    && client.state == super::super::snapshot::ClientState::Active
            });
            assert!(server.clients.is_none_or(|told| told as usize <= clients.count()));
        }
    }
    let mut ids = BTreeSet::new();
    for incident in &snapshot.incidents {
        ids.insert(incident.id.clone());
        assert_eq!(incident.fault_domains.len(), incident.devices.len());
        assert!(incident.clients_before as usize >= incident.victims.len());
        let pids: BTreeSet<u32> = incident.victims.iter().map(|victim| victim.pid).collect();
        assert_eq!(pids.len(), incident.victims.len(), "a victim is listed twice");
        assert!(incident.recovery.blocked_by.iter().all(|pid| pids.contains(pid)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_of_events_keeps_the_invariants(steps in proptest::collection::vec(step(), 0..80)) {
        run(&steps);
    }

    #[test]
    fn the_same_events_give_the_same_state(steps in proptest::collection::vec(step(), 0..60)) {
        let (a, b) = (run(&steps), run(&steps));
        prop_assert_eq!(format!("{:?}", a.snapshot()), format!("{:?}", b.snapshot()));
        prop_assert_eq!(a.changes, b.changes);
    }

    #[test]
    fn every_incident_is_opened_once_and_ends(steps in proptest::collection::vec(step(), 0..80)) {
        let mut bench = run(&steps);
        bench.freshness = Freshness::Live;
        for pid in (10..16).chain(500..503) {
            bench.exit(pid);
        }
        bench.pass(1_000);
        bench.pass(60_000);
        bench.pass(60_000);
        let opened = bench.changes.iter().filter(|change| change.change == Change::Opened).count();
        let closed = bench.changes.iter().filter(|change| change.change == Change::Closed).count();
        prop_assert_eq!(opened, closed);
        prop_assert_eq!(bench.node.next_deadline(), None);
    }
}

proptest! {
    // Long, and each case is like any other.
    #![proptest_config(ProptestConfig { cases: 4, ..ProptestConfig::default() })]

    /// Lines of any pids and uids, as somebody could write them into the log.
    #[test]
    fn whatever_the_lines_the_picture_is_bounded(
        lines in proptest::collection::vec((any::<u32>(), any::<u32>(), any::<u32>(), 0_u32..8), 500..600),
    ) {
        let mut bench = Bench::new();
        for (n, (writer, pid, uid, kind)) in lines.into_iter().enumerate() {
            let message = match kind {
                0 => LogMessage::ServerStartup,
                1 | 2 => LogMessage::ServerStartFailed("no device".into()),
                3 => LogMessage::ServerStarting { pid, uid },
                4 | 5 => LogMessage::ServerExited { pid, status: 1 },
                6 => LogMessage::ServerFault,
                _ => LogMessage::ServerReady { pid },
            };
            bench.log(LogFile::Merged, writer, message);
            if n % 7 == 0 {
                bench.exit(writer);
            }
            if n % 50 == 0 {
                bench.pass(1_000);
            }
        }
        let most = MAX_SERVERS + MAX_ENDED_PLACES;
        prop_assert!(bench.snapshot().servers.len() <= most);
        prop_assert!(bench.node.daemons.values().all(|daemon| daemon.places.len() <= most));
    }
}
