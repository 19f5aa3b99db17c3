//! The program as a user runs it, beside NVIDIA's own control daemons: what daemon, servers and clients do, and what
//! `/metrics` says of it.

#![allow(clippy::unwrap_used)]

#[path = "support/beside.rs"]
mod beside;
#[path = "support/mps/mod.rs"]
mod mps;
#[path = "support/program.rs"]
mod support;

use std::io::Write as _;
use std::time::{Duration, Instant};

use mps::bed::{Bed, is_root, kill, versions, wait_for};
use rustix::process::Signal;
use support::Program;

mps::entries!();

const GPU: &str = "GPU-8f6a2c10-1b2c-3d4e-5f60-718293a4b5c6";

/// A bed whose servers put their clients on one GPU, and the exporter beside it.
fn start(version: &str) -> (Bed, Program) {
    let bed = Bed::start(version);
    bed.order_new_servers(&format!("device {GPU}"));
    let program = Program::start(&bed);
    (bed, program)
}

/// The driver's branch: 535 can neither tell a server's state nor ask it to leave.
fn branch(version: &str) -> u32 {
    version.split('.').next().unwrap().parse().unwrap()
}

#[test]
fn clients_come_and_go() {
    for version in versions() {
        let (mut bed, exporter) = start(&version);
        exporter.expect(r#"mps_control_daemon_state{daemon="NAME",state="idle"}"#, 1.0);
        exporter.expect(r#"mps_control_daemon_up{daemon="NAME"}"#, 1.0);
        let first = bed.client(0).connected();
        let second = bed.client(0).connected();
        exporter.expect(r#"mps_server_clients{daemon="NAME",server="uid_0"}"#, 2.0);
        exporter.expect(r#"mps_control_daemon_state{daemon="NAME",state="serving"}"#, 1.0);
        exporter.expect_domain("mps_clients", GPU, "", 2.0);
        exporter.expect_domain("mps_blast_radius_clients", GPU, r#",scope="application""#, 2.0);
        exporter.expect_domain("mps_client_connects_total", GPU, "", 2.0);
        exporter.expect(r#"mps_server_starts_total{daemon="NAME",server="uid_0"}"#, 1.0);
        first.kill();
        exporter.expect_domain("mps_clients", GPU, "", 1.0);
        exporter.expect_domain("mps_client_disconnects_total", GPU, "", 1.0);
        second.kill();
        exporter.expect_domain("mps_blast_radius_clients", GPU, r#",scope="application""#, 0.0);
        exporter.is_clean();
    }
}

#[test]
fn a_client_of_another_user_waits_and_is_handed_over() {
    if !is_root() {
        return;
    }
    for version in versions() {
        let (mut bed, exporter) = start(&version);
        let first = bed.client(1001).connected();
        exporter.expect(r#"mps_server_clients{daemon="NAME",server="uid_1001"}"#, 1.0);
        let second = bed.client(1002);
        if branch(&version) >= 550 {
            // The server goes on serving: the other user waits.
            exporter.expect(r#"mps_pending_clients{daemon="NAME"}"#, 1.0);
            assert!(
                exporter.value(r#"mps_pending_client_oldest_timestamp_seconds{daemon="NAME"}"#).is_some()
            );
        }
        first.kill();
        let second = second.connected();
        exporter.expect(r#"mps_server_clients{daemon="NAME",server="uid_1002"}"#, 1.0);
        exporter.expect(r#"mps_pending_clients{daemon="NAME"}"#, 0.0);
        exporter.expect(r#"mps_server_up{daemon="NAME",server="uid_1001"}"#, 0.0);
        // The hand-over is orderly: nothing was lost.
        assert_eq!(exporter.incidents(), 0, "{version}");
        second.kill();
        exporter.is_clean();
    }
}

#[test]
fn a_fault_is_seen_explained_and_over() {
    for version in versions() {
        let (mut bed, exporter) = start(&version);
        let clients = [bed.client(0).connected(), bed.client(0).connected(), bed.client(0).connected()];
        exporter.expect_domain("mps_clients", GPU, "", 3.0);
        let pids: Vec<u32> = clients.iter().map(|client| client.pid).collect();
        bed.order("fault");
        bed.order(&format!("say Client process {} encountered a fatal GPU error.", pids[1]));
        bed.order("say Server is handling a fatal GPU error.");
        for pid in &pids {
            bed.order(&format!("say Status of client {{{pid}, 1}} is INACTIVE"));
        }
        bed.order("say The following devices will be reset:");
        bed.order("say 0");
        bed.order("say The following clients have a sticky error set:");
        for pid in &pids {
            bed.order(&format!("say {pid}"));
        }
        exporter.expect_domain("mps_mass_client_loss_total", GPU, "", 1.0);
        exporter.expect_domain("mps_clients_lost_total", GPU, r#",cause="fault""#, 3.0);
        exporter.expect_domain("mps_recovery_blocking_clients", GPU, "", 3.0);
        exporter.expect(r#"mps_server_state{daemon="NAME",server="uid_0",state="fault"}"#, 1.0);
        let incident = exporter.json("/api/v1/incidents")["incidents"][0].clone();
        assert_eq!(incident["culprit"]["pid"], pids[1]);
        assert_eq!(incident["culprit"]["evidence"], "server_log");
        assert_eq!(incident["victims"].as_array().unwrap().len(), 3);
        let page = exporter.scrape("text/plain");
        let of_last = |name: &str| page.lines().filter(|line| line.starts_with(name)).collect::<Vec<_>>();
        let culprit = of_last("mps_incident_last_culprit_info{");
        assert!(culprit.len() == 1 && culprit[0].contains(&format!("pid=\"{}\"", pids[1])), "{culprit:?}");
        let victims = of_last("mps_incident_last_victims{");
        assert!(victims.len() == 1 && victims[0].ends_with(" 3"), "{victims:?}");
        exporter.is_clean();
        for client in &clients {
            client.kill();
        }
        exporter.expect_domain("mps_recovery_blocking_clients", GPU, "", 0.0);
        bed.order("recover");
        bed.order("say Destroy server context on device 0");
        bed.order("say Creating server context on device 0 (NVIDIA H200)");
        exporter.expect(r#"mps_server_state{daemon="NAME",server="uid_0",state="active"}"#, 1.0);
        exporter.expect_domain("mps_recovery_duration_seconds_count", GPU, "", 1.0);
        assert_eq!(exporter.incidents(), 1);
    }
}

/// What the optional series are, and how many incidents are shown, changes with the file, without a restart.
#[test]
fn a_changed_configuration_reaches_the_page_and_the_model() {
    let Some(version) = versions().pop() else { return };
    let mut bed = Bed::start(&version);
    bed.order_new_servers(&format!("device {GPU}"));
    let exporter = Program::beside(&bed, "incidents: {window: 500ms}", None);
    let client = bed.client(0).connected();
    exporter.expect_domain("mps_clients", GPU, "", 1.0);
    let has = |name: &str| exporter.scrape("text/plain").lines().any(|line| line.starts_with(name));
    assert!(!has("mps_client_info{") && has("mps_workload_clients{"));
    let config = exporter.config();
    let reloads = r#"mps_exporter_config_reloads_total{result="accepted"}"#;

    exporter.reconfigure(&format!("{config}collectors: {{clients: true, workloads: false}}\n"));
    exporter.expect(reloads, 1.0);
    wait_for("the client's own series", || has("mps_client_info{").then_some(()));
    assert!(!has("mps_workload_clients{"));
    exporter.is_clean();

    exporter.reconfigure(&config);
    wait_for("the defaults", || (!has("mps_client_info{") && has("mps_workload_clients{")).then_some(()));

    // Two incidents are shown, then the newest only.
    client.kill();
    for count in 1..=2 {
        bed.order("say Server is handling a fatal GPU error.");
        wait_for("an incident", || (exporter.incidents() == count).then_some(()));
        bed.order("say Creating server context on device 0 (NVIDIA H200)");
        wait_for("its end", || {
            (exporter.json("/api/v1/incidents")["incidents"][0]["state"] == "closed").then_some(())
        });
    }
    exporter.reconfigure(&config.replace("state: {", "state: {incidents_kept: 1, "));
    wait_for("the surplus to go", || (exporter.incidents() == 1).then_some(()));
}

#[test]
fn a_server_that_cannot_start_is_a_loop_that_is_counted() {
    for version in versions() {
        let bed = Bed::start(&version);
        bed.order_new_servers("exit 1");
        let exporter = Program::start(&bed);
        let mut bed = bed;
        let _waiting = bed.client(0);
        exporter
            .expect_at_least(r#"mps_server_exits_total{daemon="NAME",server="uid_0",result="failed"}"#, 3.0);
        exporter.expect_at_least(r#"mps_server_starts_total{daemon="NAME",server="uid_0"}"#, 3.0);
        assert_eq!(exporter.incidents(), 0, "nobody was lost");
        exporter.is_clean();
    }
}

#[test]
fn a_killed_server_takes_its_clients() {
    for version in versions() {
        let (mut bed, exporter) = start(&version);
        let _clients = [bed.client(0).connected(), bed.client(0).connected()];
        exporter.expect_domain("mps_clients", GPU, "", 2.0);
        let server = exporter.json("/api/v1/status")["servers"][0]["pid"].as_u64().unwrap();
        kill(u32::try_from(server).unwrap(), Signal::KILL);
        exporter.expect_domain("mps_clients_lost_total", GPU, r#",cause="server_exit""#, 2.0);
        exporter.expect_domain("mps_mass_client_loss_total", GPU, "", 1.0);
        exporter.expect(r#"mps_server_exits_total{daemon="NAME",server="uid_0",result="failed"}"#, 1.0);
        exporter.is_clean();
    }
}

#[test]
fn a_killed_daemon_is_stale_and_its_quit_is_orderly() {
    for version in versions() {
        let (mut bed, exporter) = start(&version);
        let client = bed.client(0).connected();
        exporter.expect_domain("mps_clients", GPU, "", 1.0);
        bed.kill_daemon(Signal::KILL);
        exporter.expect(r#"mps_control_daemon_state{daemon="NAME",state="stale"}"#, 1.0);
        exporter.expect(r#"mps_control_daemon_up{daemon="NAME"}"#, 0.0);
        client.kill();
        exporter.expect_domain("mps_clients", GPU, "", 0.0);
        bed.start_daemon();
        exporter.expect(r#"mps_control_daemon_state{daemon="NAME",state="idle"}"#, 1.0);
        let _client = bed.client(0).connected();
        exporter.expect_domain("mps_clients", GPU, "", 1.0);
        bed.tell("quit -t 1");
        exporter.expect(r#"mps_control_daemon_up{daemon="NAME"}"#, 0.0);
        exporter.expect_domain("mps_clients", GPU, "", 0.0);
        assert_eq!(exporter.incidents(), 0, "{version}: {}", exporter.json("/api/v1/incidents"));
        exporter.is_clean();
    }
}

#[test]
fn a_server_that_hangs_makes_the_daemon_wedged_and_is_asked_no_second_time_meanwhile() {
    for version in versions() {
        let bed = Bed::start(&version);
        bed.order_new_servers(&format!("device {GPU}"));
        let exporter = Program::beside(&bed, "control: {interval: 1s, timeout: 300ms}", None);
        bed.start_server(0);
        exporter.expect(r#"mps_control_daemon_state{daemon="NAME",state="serving"}"#, 1.0);
        bed.order("hang");
        exporter.expect(r#"mps_control_daemon_state{daemon="NAME",state="wedged"}"#, 1.0);
        exporter.expect_at_least(r#"mps_control_queries_total{daemon="NAME",result="timeout"}"#, 3.0);
        exporter.is_clean();
        bed.order("resume");
        exporter.expect(r#"mps_control_daemon_state{daemon="NAME",state="serving"}"#, 1.0);
    }
}

/// Lines are counted once each, whatever happens to the files and to the exporter.
#[test]
fn no_line_is_lost_or_counted_twice_over_rotation_and_kill() {
    let Some(version) = versions().pop() else { return };
    let (bed, mut exporter) = start(&version);
    bed.start_server(0);
    let recognized = r#"mps_log_lines_total{daemon="NAME",file="server.log",class="recognized"}"#;
    let mut said = 0;
    let mut say = |count: u32| {
        for _ in 0..count {
            said += 1;
            bed.order("say Worker created");
        }
        said
    };
    let log = bed.log();
    say(50);
    std::fs::rename(log.join("server.log"), log.join("server.log.1")).unwrap();
    say(50);
    // The daemon goes on writing to the renamed file; a copytruncate of that one follows.
    std::fs::copy(log.join("server.log.1"), log.join("server.log.2")).unwrap();
    let total = say(0);
    exporter.settle(recognized);
    std::fs::OpenOptions::new().write(true).truncate(true).open(log.join("server.log.1")).unwrap();
    say(50);
    let before = exporter.settle(recognized);
    let startup = before - f64::from(total + 50);
    assert!((0.0..20.0).contains(&startup), "{before} lines for {} said and the server's start", total + 50);
    exporter.kill();
    say(30);
    exporter.start_again();
    // Counters begin anew: what was written meanwhile is all there is to read.
    let after = exporter.settle(recognized);
    assert!((after - 30.0).abs() < f64::EPSILON, "{after} lines for 30");
    exporter.kill();
    let mut file = std::fs::OpenOptions::new().append(true).open(log.join("server.log.1")).unwrap();
    file.write_all(b"[2026-04-01 08:00:00.000 Server  4242] Worker crea").unwrap();
    exporter.start_again();
    std::thread::sleep(Duration::from_millis(300));
    file.write_all(b"ted\n\xff\xfe broken \x00 line\r\n").unwrap();
    exporter.expect(recognized, 1.0);
    exporter.expect(r#"mps_log_lines_total{daemon="NAME",file="server.log",class="unrecognized"}"#, 1.0);
}

/// Lines that belong together, one half of them in the renamed file and one in its successor.
#[test]
fn a_rotation_in_the_middle_of_a_burst_changes_nothing() {
    for version in versions() {
        let (mut bed, exporter) = start(&version);
        let ranks: Vec<_> = (0..6).map(|_| bed.client(0).connected()).collect();
        exporter.expect_domain("mps_clients", GPU, "", 6.0);
        let log = bed.log().join("server.log");
        let rotate = |count: u32| {
            std::fs::copy(&log, log.with_extension(format!("log.{count}"))).unwrap();
            std::fs::OpenOptions::new().write(true).open(&log).unwrap().set_len(0).unwrap();
        };
        for rank in &ranks[..3] {
            rank.kill();
        }
        wait_for("the first to leave", || bed.server_log().contains("disconnected").then_some(()));
        rotate(1);
        for rank in &ranks[3..] {
            rank.kill();
        }
        exporter.expect_domain("mps_client_disconnects_total", GPU, "", 6.0);
        std::thread::sleep(Duration::from_secs(6));
        assert_eq!(exporter.incidents(), 0, "{version}: {}", exporter.json("/api/v1/incidents"));

        let clients: Vec<_> = (0..4).map(|_| bed.client(0).connected()).collect();
        exporter.expect_domain("mps_clients", GPU, "", 4.0);
        bed.order("fault");
        bed.order(&format!("say Client process {} encountered a fatal GPU error.", clients[0].pid));
        bed.order("say Server is handling a fatal GPU error.");
        bed.order(&format!("say Status of client {{{}, 1}} is INACTIVE", clients[0].pid));
        wait_for("the first victim", || bed.server_log().contains("INACTIVE").then_some(()));
        rotate(2);
        for client in &clients[1..] {
            bed.order(&format!("say Status of client {{{}, 1}} is INACTIVE", client.pid));
        }
        exporter.expect_domain("mps_clients_lost_total", GPU, r#",cause="fault""#, 4.0);
        exporter.expect_domain("mps_mass_client_loss_total", GPU, "", 1.0);
        assert_eq!(exporter.incidents(), 1);
        let incident = exporter.json("/api/v1/incidents")["incidents"][0].clone();
        assert_eq!(incident["victims"].as_array().unwrap().len(), 4);
        assert_eq!(incident["culprit"]["pid"], clients[0].pid);
    }
}

#[test]
fn no_line_of_control_log_is_lost_or_counted_twice_over_rotation_and_kill() {
    let Some(version) = versions().pop() else { return };
    let (bed, mut exporter) = start(&version);
    let counted = |exporter: &Program| {
        let of = |class: &str| {
            let series =
                format!(r#"mps_log_lines_total{{daemon="NAME",file="control.log",class="{class}"}}"#);
            exporter.value(&series).unwrap_or_default()
        };
        of("recognized") + of("unrecognized")
    };
    let still = r#"mps_log_lines_total{daemon="NAME",file="control.log",class="recognized"}"#;
    let talk = || (0..10).for_each(|_| drop(bed.ask("get_server_list")));
    let path = |name: &str| bed.log().join(name);
    let lines = |name: &str| {
        let written = std::fs::read(path(name)).unwrap().split(|byte| *byte == b'\n').count() - 1;
        f64::from(u32::try_from(written).unwrap())
    };
    // The exporter's own sessions add lines at any moment, so the two are compared until they agree.
    let agree = |what: &str, exporter: &Program, before: f64, written: &dyn Fn() -> f64| {
        let began = Instant::now();
        loop {
            let (seen, there) = (counted(exporter) - before, written());
            if (seen - there).abs() < f64::EPSILON {
                return seen + before;
            }
            assert!(began.elapsed() < Duration::from_secs(20), "{what}: {seen} lines counted of {there}");
            std::thread::sleep(Duration::from_millis(100));
        }
    };

    talk();
    exporter.settle(still);
    let (known, written) = (counted(&exporter), lines("control.log"));
    talk();
    std::fs::rename(path("control.log"), path("control.log.1")).unwrap();
    talk();
    exporter.settle(still);
    let sum = agree("renamed", &exporter, known, &|| lines("control.log.1") - written);
    // The daemon goes on writing to the renamed file; a copytruncate of that one follows.
    std::fs::copy(path("control.log.1"), path("control.log.2")).unwrap();
    std::fs::OpenOptions::new().write(true).truncate(true).open(path("control.log.1")).unwrap();
    talk();
    agree("truncated", &exporter, sum, &|| lines("control.log.1"));

    exporter.settle(still);
    let before = lines("control.log.1");
    exporter.kill();
    talk();
    exporter.start_again();
    exporter.expect_at_least(r#"mps_control_queries_total{daemon="NAME",result="ok"}"#, 1.0);
    agree("killed and started again", &exporter, 0.0, &|| lines("control.log.1") - before);
}

#[test]
fn an_unprivileged_user_sees_the_same() {
    if !is_root() {
        return;
    }
    for version in versions() {
        let mut bed = Bed::start(&version);
        bed.order_new_servers(&format!("device {GPU}"));
        let exporter = Program::beside(&bed, "", Some(65_534));
        let client = bed.client(0).connected();
        exporter.expect_domain("mps_clients", GPU, "", 1.0);
        exporter.expect_at_least(r#"mps_control_queries_total{daemon="NAME",result="ok"}"#, 1.0);
        client.kill();
        exporter.expect_domain("mps_clients", GPU, "", 0.0);
        exporter.is_clean();
    }
}

/// One session a minute, and only what it needs to.
#[test]
fn nothing_is_added_to_control_log_while_nothing_changes() {
    let Some(version) = versions().pop() else { return };
    let (mut bed, exporter) = start(&version);
    let _clients: Vec<_> = (0..4).map(|_| bed.client(0).connected()).collect();
    exporter.expect_domain("mps_clients", GPU, "", 4.0);
    std::thread::sleep(Duration::from_secs(3));
    let (before, began) = (bed.control_log().len(), Instant::now());
    for _ in 0..100 {
        exporter.scrape("text/plain");
    }
    std::thread::sleep(Duration::from_secs(5).saturating_sub(began.elapsed()));
    let added = bed.control_log().len() - before;
    assert!(added < 800, "{added} bytes in 5 s: more than one session");
}
