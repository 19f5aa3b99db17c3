use std::sync::Arc;

use super::*;
use crate::engine::incident::{Cause, IncidentState};
use crate::engine::snapshot::{ClientState, ClientView, DomainView, Radius, Scope, Sharing, Snapshot};
use crate::event::{RecoveryAction, ServerStatus, SourceName};
use crate::test_nodes as nodes;

fn shown(node: &Snapshot, width: usize, is_whole: bool) -> String {
    let json = serde_json::to_vec(node).unwrap();
    screen::text(&lines(&json, None, width, is_whole).unwrap(), width, false)
}

/// Two GPUs that one client couples, and one without MPS.
fn coupled() -> Snapshot {
    let mut node = nodes::node(2, 2);
    node.incidents.clear();
    let both: Vec<Arc<str>> = vec!["default/0".into(), "default/1".into()];
    let all = Radius {
        clients: Some(4),
        workloads: Some(4),
        memory_bytes: Some(4 << 30),
        work_at_risk: Some(Duration::from_secs(4 * 3600)),
    };
    for domain in &mut node.domains {
        domain.coupled_with.clone_from(&both);
        domain.coupled_devices = Some(2);
        for (scope, radius) in &mut domain.radius {
            if *scope != Scope::Gpu {
                *radius = all;
            }
        }
    }
    node.clients[1].domains = both;
    node.domains.push(DomainView {
        labels: Arc::new(crate::engine::snapshot::DomainLabels {
            fault_domain: "gpu/2".into(),
            gpu: "2".into(),
            uuid: nodes::uuid(2),
            gpu_instance: "".into(),
        }),
        daemon: None,
        sharing: Some(Sharing::TimeSlicing),
        ..nodes::domain("default", 2, 0)
    });
    node
}

#[test]
fn a_healthy_node_shows_who_dies_with_whom() {
    let expected = "\
1 MPS control daemon, 1 server, 4 clients on 2 fault domains   2026-04-01 12:00:00 UTC

No incident.

daemon default  serving  pid 4000  version 550  /tmp/nvidia-mps
└─ server uid_1000  active  pid 4100  4 clients
   └─ default/0 + default/1  coupled: they share clients  NVIDIA H200
      │ client fault or server exit takes 4 processes of 4 workloads, 4.0 GiB, 4 h of work
      │ loss of GPU 0 or loss of GPU 1 takes 2 processes of 2 workloads, 2.0 GiB, 2 h of work
      ├─ pod research/train-0 (main)  train 10000  on default/0  1.0 GiB  runs 1 h
      ├─ pod research/train-1 (main)  train 10001  on default/0, default/1  1.0 GiB  runs 1 h
      ├─ pod research/train-2 (main)  train 10002  on default/1  1.0 GiB  runs 1 h
      └─ pod research/train-3 (main)  train 10003  on default/1  1.0 GiB  runs 1 h
gpu/2  without MPS: time slicing  a fault takes its own process only  NVIDIA H200

All 8 sources work.
";
    assert_eq!(shown(&coupled(), 100, false), expected);
}

#[test]
fn during_an_incident_the_picture_says_who_did_it_and_who_blocks() {
    let mut node = nodes::node(1, 3);
    node.servers[0].status = Some(ServerStatus::Fault);
    let domain = &mut node.domains[0];
    domain.fault_started_at = Some(node.at - jiff::SignedDuration::from_secs(90));
    domain.recovery_blocking = 1;
    node.clients.truncate(1);
    node.clients[0] =
        ClientView { pid: 9001, state: ClientState::Lost, workload: None, ..node.clients[0].clone() };
    let mut incident = nodes::incident("0195f0000001-1", Cause::Fault, "default/0");
    incident.state = IncidentState::Recovering;
    incident.ended_at = None;
    incident.recovery.blocked_by = vec![9001];
    node.incidents = vec![Arc::new(incident)];
    node.sources[1].is_up = false;
    node.sources[1].reason = Some("cannot load libnvidia-ml.so.1: no such file".into());
    node.gpus[0].recovery_action = Some(RecoveryAction::DrainAndReset);
    assert_eq!(node.sources[1].source, SourceName::Nvml);
    let expected = "\
1 MPS control daemon, 1 server, 1 client on 1 fault domain   2026-04-01 12:00:00 UTC

MASS CLIENT LOSS: fault on default/0, 10 min ago, recovering
  culprit         train 9001; named by server.log
  victims         3 of 3 clients lost: train 9001, train 9002, train 9003
  Xids            31 (mps-exporter explain 31)
  work lost       1 h 30 min
  blocks recovery train 9001: the server takes no new client until they have exited

daemon default  serving  pid 4000  version 550  /tmp/nvidia-mps
└─ server uid_1000  fault  pid 4100  3 clients
   │ It takes no new client on any of its GPUs.
   └─ default/0  NVIDIA H200
      │ FAULT for 1 min; 1 process blocks recovery
      │ GPU 0 asks for recovery: drain and reset
      │ client fault or server exit or loss of GPU 0 takes 3 processes of 3 workloads, 3.0 GiB, 3 h of work
      └─ train 9001  1.0 GiB  runs 1 h  culprit  lost, has not exited

1 source of 8 blind; `mps-exporter check` says what to change:
  nvml: cannot load libnvidia-ml.so.1: no such file
";
    assert_eq!(shown(&node, 110, false), expected);
}

#[test]
fn hundreds_of_clients_stay_readable_unless_all_are_wanted() {
    let mut node = nodes::node(1, 400);
    // Two large jobs, and many small ones.
    let (first, second) = (node.clients[0].workload.clone(), node.clients[1].workload.clone());
    for (index, client) in node.clients.iter_mut().enumerate().take(300) {
        client.workload = if index % 3 == 0 { second.clone() } else { first.clone() };
    }
    node.clients[250].state = ClientState::Lost;
    let short = shown(&node, 80, false);
    assert!(short.lines().count() < 60, "{short}");
    assert!(short.contains("pod research/train-0 (main)  200 clients  200.0 GiB"), "{short}");
    assert!(short.contains("… 194 more (--all shows them)"), "{short}");
    assert!(short.contains("… 78 more workloads with 78 clients (--all shows them)"), "{short}");
    let lost = short.lines().position(|line| line.contains("10250")).unwrap();
    assert!(lost < 15, "the lost one comes first: {short}");
    let whole = shown(&node, 80, true);
    assert!((10_000..10_400).all(|pid| whole.contains(&format!(" {pid} "))), "{whole}");
}

#[test]
fn whatever_the_node_says_the_picture_fits_and_commands_nothing() {
    for node in [nodes::empty(), nodes::extreme()] {
        for width in [1, 20, 80, 300] {
            let text = shown(&node, width, true);
            assert!(text.lines().all(|line| line.chars().count() <= width.max(1)), "{width}: {text}");
            assert!(!text.contains(|it: char| it.is_control() && it != '\n'));
        }
    }
    assert!(shown(&nodes::empty(), 80, false).contains("No source has told anything yet."));
    assert!(shown(&nodes::empty(), 80, false).contains("\nNo MPS control daemon is visible.\n"));
    let closed = shown(&nodes::node(1, 1), 120, false);
    assert!(
        closed
            .contains("No open incident. The last one, 10 min ago: fault on default/0, 3 of 3 clients lost."),
        "{closed}"
    );
}
