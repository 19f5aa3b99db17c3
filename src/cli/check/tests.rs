use std::sync::Arc;

use super::*;
use crate::config::Config;
use crate::engine::snapshot::Snapshot;
use crate::event::SourceName;
use crate::test_nodes as nodes;

const ROOT: Surroundings = Surroundings { uid: 0, is_container: false, has_host_pids: true };
const POD: Surroundings = Surroundings { uid: 65_534, is_container: true, has_host_pids: false };

fn judged(snapshot: &Snapshot, around: Surroundings) -> Report {
    let config = Config::default();
    Report::new(Judge { config: &config, snapshot, silent: &[], around }.findings())
}

fn with_blind(source: SourceName, reason: &str) -> Snapshot {
    let mut node = nodes::node(1, 2);
    let daemon = node.sources.iter().find(|it| it.source == source).and_then(|it| it.daemon.clone());
    node.sources.retain(|it| it.source != source);
    let mut view = nodes::source_view(source, daemon.as_deref());
    view.is_up = false;
    view.reason = Some(Arc::from(reason));
    node.sources.push(view);
    node
}

#[test]
fn a_node_that_is_well_needs_nothing() {
    let report = judged(&nodes::node(2, 3), ROOT);
    assert_eq!(report.exit_status, 0, "{}", report.text(100));
    let text = report.text(100);
    assert!(text.contains("ok      daemons          default (serving, /tmp/nvidia-mps)\n"), "{text}");
    assert!(
        text.contains("ok      control (default) it answers; servers: 1, clients: 6\n")
            || text.contains("it answers; servers: 1, clients: 6"),
        "{text}"
    );
    assert!(text.ends_with("\nEverything that the configuration wants works.\n"), "{text}");
}

#[test]
fn a_blind_kernel_log_says_what_is_missing_and_what_to_change() {
    let reason = "cannot open /dev/kmsg (Operation not permitted (os error 1)): give the process CAP_SYSLOG, or set \
                  kernel.dmesg_restrict=0";
    let node = with_blind(SourceName::KernelLog, reason);
    let expected = "\
BLIND   kernel_log       cannot open /dev/kmsg (Operation not permitted (os error 1)): give the
                         process CAP_SYSLOG, or set kernel.dmesg_restrict=0
          missing        Xids with pid and channel, which name culprits; GPU errors; the OOM killer
          fix            AmbientCapabilities=CAP_SYSLOG in the systemd unit
          or             sysctl kernel.dmesg_restrict=0
          or             usermod -aG systemd-journal USER: the journal is read instead

It works, but some sources are blind: 1 of 9.
";
    let report = judged(&node, ROOT);
    assert_eq!(report.exit_status, 1);
    let text = report.text(100);
    assert!(text.ends_with(expected), "{text}");
    let in_pod = judged(&node, POD).text(100);
    assert!(in_pod.contains("securityContext: {runAsUser: 0, privileged: true}"), "{in_pod}");
    assert!(in_pod.contains("--cap-add SYSLOG --device /dev/kmsg:/dev/kmsg"), "{in_pod}");
}

#[test]
fn every_source_that_is_blind_has_a_fix_and_says_what_is_missing() {
    use crate::metrics::labels::LabelValue as _;
    for source in SourceName::ALL {
        for around in [ROOT, POD] {
            let report = judged(&with_blind(*source, "no reason that anybody knows"), around);
            let blind: Vec<&Finding> =
                report.findings.iter().filter(|finding| finding.state == State::Blind).collect();
            let [finding] = blind[..] else { panic!("{source:?}: {blind:?}") };
            assert_eq!(finding.what, source.label());
            assert!(finding.missing.is_some(), "{source:?}");
            let is_of_daemon = finding.daemon.is_some();
            let needs_daemon = matches!(
                source,
                SourceName::Control
                    | SourceName::ControlLock
                    | SourceName::ControlLog
                    | SourceName::ServerLog
            );
            assert!(!finding.fix.is_empty() || (needs_daemon && !is_of_daemon), "{source:?}");
        }
    }
}

#[test]
fn without_a_daemon_it_cannot_work() {
    let report = judged(&nodes::empty(), POD);
    assert_eq!(report.exit_status, 2);
    let text = report.text(80);
    assert!(text.contains("BROKEN  daemons          no MPS control daemon is visible\n"), "{text}");
    for word in ["hostPID: true", "/tmp/nvidia-mps", "run as root", "It cannot work: 1 broken"] {
        assert!(text.split_whitespace().collect::<Vec<_>>().join(" ").contains(word), "{word}: {text}");
    }
    assert!(judged(&nodes::empty(), ROOT).text(80).contains("nvidia-cuda-mps-control -d"));
}

#[test]
fn clients_that_are_nobodys_process_are_told_of() {
    let mut node = nodes::node(1, 2);
    node.clients[1].host_pid = None;
    let report = judged(&node, POD);
    assert_eq!(report.exit_status, 1);
    assert!(report.text(100).contains("1 of 2 clients are not found among the processes"));
    assert!(report.text(100).contains("hostPID: true (Kubernetes), --pid=host (Docker)"));
}

#[test]
fn a_silent_source_is_blind_and_hostile_names_command_nothing() {
    let config = Config::default();
    let snapshot = nodes::extreme();
    let silent = [(SourceName::Nvml, None)];
    let report =
        Report::new(Judge { config: &config, snapshot: &snapshot, silent: &silent, around: ROOT }.findings());
    let text = report.text(60);
    assert!(
        text.contains("it told nothing within the time of one look")
            || text.contains("it told nothing within the time of"),
        "{text}"
    );
    assert!(!text.contains(|it: char| it.is_control() && it != '\n'), "{text}");
}

#[test]
fn a_wrong_file_is_shown_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yml");
    std::fs::write(&path, "nvml: {intervall: 20s}\n").unwrap();
    let (config, finding) = setup::configuration(Some(&path));
    assert!(config.is_none() && finding.state == State::Broken);
    let text = Report::new(vec![finding]).text(80);
    assert!(text.contains("config.yml:1:8: "), "{text}");
    assert!(text.contains("1 | nvml: {intervall: 20s}\n") && text.contains("|        ^"), "{text}");
    std::fs::write(&path, "basic_auth_users: {prometheus: secret}\n").unwrap();
    let web = setup::web_config(&path);
    assert!(web.state == State::Broken && web.sees.contains("not a bcrypt hash"), "{web:?}");
}

#[tokio::test]
async fn alertmanagers_are_reached_but_not_posted_to() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let config =
        |url: &str| Config::parse(&format!("alertmanagers: [{{url: \"{url}\"}}]\n"), "test").unwrap();
    let url = format!("http://{address}");
    let found = setup::alertmanagers(&config(&url)).await;
    assert_eq!(found[0].state, State::Ok, "{found:?}");
    let (mut peer, _) = listener.accept().unwrap();
    let mut sent = Vec::new();
    std::io::Read::read_to_end(&mut peer, &mut sent).unwrap();
    assert!(sent.is_empty());
    drop(listener);
    let found = setup::alertmanagers(&config(&url)).await;
    assert_eq!(found[0].state, State::Blind, "{found:?}");
    assert!(found[0].fix[0].contains(&format!("curl -sf {url}/-/ready")), "{found:?}");
}

#[tokio::test]
async fn an_alertmanager_whose_password_cannot_be_read_is_not_reached() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let text = format!("alertmanagers: [{{url: \"{url}\", bearer_token_file: /nowhere/token}}]\n");
    let found = setup::alertmanagers(&Config::parse(&text, "test").unwrap()).await;
    assert_eq!(found[0].state, State::Blind);
    assert!(found[0].sees.contains("/nowhere/token"), "{found:?}");
    assert!(found[0].fix[0].contains("bearer_token_file"), "{found:?}");
}

#[test]
fn commands_are_looked_for_and_not_run() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("restart-mps");
    let text = format!(
        "remediation:\n  restart: {{command: [restart-mps]}}\n  hooks:\n    recovered: {{command: [\"{}\"]}}\n",
        program.display()
    );
    let config = Config::parse(&text, "test").unwrap();
    let found = || setup::commands(&config, Some(folder.path().as_os_str()));
    let states = || found().iter().map(|finding| finding.state).collect::<Vec<_>>();
    assert_eq!(states(), [State::Blind, State::Blind]);
    assert!(found()[0].sees.contains("`restart-mps` cannot be run on PATH: "), "{:?}", found());

    std::fs::write(&program, "#!/bin/sh\ntouch ran\n").unwrap();
    assert_eq!(states(), [State::Blind, State::Blind]);
    assert!(found()[1].sees.contains("ermission denied"), "{:?}", found());
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    assert_eq!(states(), [State::Ok, State::Ok]);
    assert_eq!(
        (&*found()[0].what, &*found()[1].what),
        ("remediation.restart", "remediation.hooks.recovered")
    );
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "it was run");
}

#[test]
fn a_command_is_looked_for_where_it_would_be_run_without_a_path() {
    let text =
        "remediation: {hooks: {recovered: {command: [env]}, server_fault: {command: [mps-nowhere]}}}\n";
    let found = setup::commands(&Config::parse(text, "test").unwrap(), None);
    let state = |key: &str| found.iter().find(|finding| finding.what.ends_with(key)).unwrap().state;
    assert_eq!((state("recovered"), state("server_fault")), (State::Ok, State::Blind), "{found:?}");
}

#[test]
fn the_state_directory_is_judged_without_being_made() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = Config::default();
    let place = folder.path().join("a/b");
    config.state.directory = Some(place.clone());
    let found = setup::state_directory(&config, ROOT);
    assert_eq!(found.state, State::Ok);
    assert!(found.sees.ends_with("(will be made)") && !place.exists(), "{found:?}");
    std::fs::write(folder.path().join("a"), "a file").unwrap();
    assert_eq!(setup::state_directory(&config, ROOT).state, State::Blind);
    config.state.directory = None;
    assert_eq!(setup::state_directory(&config, ROOT).state, State::Off);
}
