//! Log files of several driver generations, as a person would hand them in after an incident, through the model.
//!
//! First what must never page, then what must never be missed.

#![allow(clippy::unwrap_used)]

use std::io::Cursor;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use jiff::tz::TimeZone;
use mps_exporter::config::Config;
use mps_exporter::engine::incident::{Cause, CulpritEvidence, Incident, IncidentState};
use mps_exporter::event::LogFile;
use mps_exporter::replay::{Kind, Outcome, Recording};

/// Lines of the logs of one daemon, written with a clock that the scenario moves.
struct Logs {
    millis: i64,
    control: String,
    server: String,
    kernel: String,
    generation: Generation,
}

/// How a driver's MPS words its lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Generation {
    /// `Volta MPS: ` before lower-case verbs, no culprit line.
    R470,
    /// No prefix, culprit line.
    R550,
    /// Clients named as `{PID: …, Context ID: …}`.
    R580,
}

const SERVER: u32 = 4200;
const GENERATIONS: [Generation; 3] = [Generation::R470, Generation::R550, Generation::R580];

impl Logs {
    fn new(generation: Generation) -> Logs {
        let mut logs = Logs {
            millis: 0,
            control: String::new(),
            server: String::new(),
            kernel: String::new(),
            generation,
        };
        logs.control("Starting control daemon using socket /tmp/nvidia-mps/control");
        logs.start_server(SERVER, 1000);
        logs
    }

    fn pass(&mut self, millis: i64) -> &mut Logs {
        self.millis += millis;
        self
    }

    fn stamp(&self) -> String {
        let start: Timestamp = "2026-04-01T08:00:00Z".parse().unwrap();
        let at = start + Duration::from_millis(u64::try_from(self.millis).unwrap());
        format!("{at:.3}").replace('T', " ").replace('Z', "")
    }

    fn control(&mut self, text: &str) {
        let stamp = self.stamp();
        self.control.push_str(&format!("[{stamp} Control {:>5}] {text}\n", 4100));
    }

    fn server_of(&mut self, pid: u32, text: &str) {
        let (stamp, tag) =
            (self.stamp(), if self.generation == Generation::R470 { "Other" } else { "Server" });
        self.server.push_str(&format!("[{stamp} {tag} {pid:>5}] {text}\n"));
    }

    fn server(&mut self, text: &str) {
        self.server_of(SERVER, text);
    }

    fn xid(&mut self, text: &str) {
        let micros = self.millis * 1000 + 1_000_000;
        self.kernel.push_str(&format!("4,{micros},{micros},c;NVRM: Xid (PCI:0000:3b:00): {text}\n"));
    }

    fn start_server(&mut self, pid: u32, uid: u32) {
        self.control(&format!("Starting new server {pid} for user {uid}"));
        self.pass(200);
        let word = if self.generation == Generation::R470 { "Volta MPS: " } else { "" };
        self.server_of(pid, "Startup");
        self.server_of(pid, &format!("{word}Creating server context on device 0 (NVIDIA A100-SXM4-40GB)"));
        self.server_of(
            pid,
            if self.generation == Generation::R470 { "MPS Server is started" } else { "Server has started" },
        );
        self.control(&format!("NEW SERVER {pid}: Ready"));
    }

    /// A client with a context on each of these GPUs.
    fn client(&mut self, pid: u32, gpus: &[u32]) {
        self.control(&format!("NEW CLIENT {pid} from user 1000: Server already exists"));
        for (context, gpu) in (1..).zip(gpus) {
            let uuid = format!("GPU-{gpu:08x}-1a2b-3c4d-5e6f-708192a3b4c5");
            match self.generation {
                Generation::R470 => {
                    self.server("Volta MPS Server: Received new client request");
                    self.server("MPS Server: worker created");
                    self.server("Volta MPS: Creating worker thread");
                    let bytes = uuid[4..].replace('-', "");
                    let words: Vec<String> =
                        (0..4).map(|n| format!("0x{}", &bytes[n * 8..n * 8 + 8])).collect();
                    self.server(&format!(
                        "Volta MPS: Device NVIDIA A100 (uuid {}) is associated",
                        words.join("-")
                    ));
                    self.server(&format!("Volta MPS: status of client {{{pid}, {context}}} is ACTIVE"));
                }
                Generation::R550 => {
                    self.server("Received new client request");
                    self.server("Worker created");
                    self.server("Creating worker thread");
                    self.server(&format!("Device NVIDIA A100 (uuid {uuid}) is associated"));
                    self.server(&format!("Status of client {{{pid}, {context}}} is ACTIVE"));
                }
                Generation::R580 => {
                    self.server(&format!("Received new client request for {{PID: {pid}, Context ID: 0}}"));
                    self.server(&format!("Client {{PID: {pid}, Context ID: 0}} connected"));
                    self.server(&format!("Creating worker thread for client {{PID: {pid}, Context ID: 0}}"));
                    self.server(&format!("Device NVIDIA A100 (uuid {uuid}) is associated"));
                    self.server(&format!("Status of client {{{pid}, {context}}} is ACTIVE"));
                }
            }
        }
        self.pass(50);
    }

    fn leave(&mut self, pid: u32) {
        self.server("Receive command failed, assuming client exit");
        self.server(&format!("Client {{{pid}, 1}} exit"));
        self.server("Client process disconnected");
    }

    /// The fatal-fault sequence up to the list of victims.
    fn fault(&mut self, culprit: u32, devices: &[u32], victims: &[u32]) {
        let old = self.generation == Generation::R470;
        if !old {
            self.server(&format!("Client process {culprit} encountered a fatal GPU error."));
        }
        let word = |new: &str| {
            if old { format!("Volta MPS: {}{}", new[..1].to_lowercase(), &new[1..]) } else { new.to_owned() }
        };
        self.server(&if old {
            "Volta MPS: Server is handling a fatal GPU error.".to_owned()
        } else {
            "Server is handling a fatal GPU error.".to_owned()
        });
        for pid in victims {
            self.server(&word(&format!("Status of client {{{pid}, 1}} is INACTIVE")));
        }
        self.server(if old {
            "Volta MPS: The following devices"
        } else {
            "The following devices will be reset:"
        });
        for device in devices {
            self.server(&device.to_string());
        }
        self.server(if old {
            "Volta MPS: The following clients have a sticky error set:"
        } else {
            "The following clients have a sticky error set:"
        });
        for pid in victims {
            self.server(&pid.to_string());
        }
    }

    fn recover(&mut self, devices: &[u32]) {
        for device in devices {
            self.server(&format!("Destroy server context on device {device}"));
        }
        for device in devices {
            self.pass(400)
                .server(&format!("Creating server context on device {device} (NVIDIA A100-SXM4-40GB)"));
        }
    }

    fn replay(&self) -> Outcome {
        replay(&[("default", self)])
    }

    fn only(&self) -> Arc<Incident> {
        let incidents = self.replay().incidents;
        assert_eq!(incidents.len(), 1, "{incidents:#?}");
        incidents[0].clone()
    }

    fn none(&self) {
        let incidents = self.replay().incidents;
        assert!(incidents.is_empty(), "{incidents:#?}");
    }
}

/// The logs of several daemons of one node.
fn replay(daemons: &[(&str, &Logs)]) -> Outcome {
    let boot = "2026-04-01T07:59:59Z".parse().unwrap();
    let mut recording = Recording::new(TimeZone::UTC, Some(boot), "2026-04-02T00:00:00Z".parse().unwrap());
    let part =
        |text: &String| -> Vec<Box<dyn std::io::BufRead>> { vec![Box::new(Cursor::new(text.clone()))] };
    for (name, logs) in daemons {
        recording.add("control.log", name, Kind::Mps(LogFile::Control), part(&logs.control));
        recording.add("server.log", name, Kind::Mps(LogFile::Server), part(&logs.server));
        recording.add("kmsg", name, Kind::Kernel, part(&logs.kernel));
    }
    let outcome = recording.run(Config::default().model().unwrap());
    for (log, counts) in &outcome.counts {
        assert_eq!(counts.unrecognized, 0, "{log} has lines that are not known");
    }
    outcome
}

fn with_clients(generation: Generation, pids: &[u32]) -> Logs {
    let mut logs = Logs::new(generation);
    for pid in pids {
        logs.client(*pid, &[0]);
    }
    logs.pass(60_000);
    logs
}

// No false page.

#[test]
fn eight_ranks_of_a_job_that_finish_within_ten_milliseconds() {
    for generation in GENERATIONS {
        let pids: Vec<u32> = (7000..7008).collect();
        let mut logs = with_clients(generation, &pids);
        for pid in pids {
            logs.pass(1).leave(pid);
        }
        logs.none();
    }
}

#[test]
fn quit_while_clients_run() {
    // `quit` waits for the clients as long as they take, `quit -t 10` lets the server end them after 10 s.
    let commands = [("quit", 0, 3_600_000), ("quit -t 10", 10, 10_000)];
    for (generation, (command, limit, millis)) in
        GENERATIONS.into_iter().flat_map(|generation| commands.map(|command| (generation, command)))
    {
        let mut logs = with_clients(generation, &[7000, 7001, 7002]);
        logs.control("Accepting connection...");
        logs.control("NEW UI");
        logs.control(&format!("Cmd:{command}"));
        logs.control(&format!("quit command issued with timeout of {limit}"));
        logs.control("The MPS control daemon is shutting down");
        logs.server("Server has been notified to shutdown");
        logs.pass(millis);
        for pid in [7000, 7001, 7002] {
            logs.leave(pid);
        }
        logs.server("Exiting");
        logs.control(&format!("Server {SERVER} exited with status 0"));
        logs.control("Exit with status 0");
        logs.none();
    }
}

#[test]
fn a_daemon_without_clients_is_restarted_by_its_service_manager() {
    let mut logs = with_clients(Generation::R550, &[7000]);
    logs.leave(7000);
    // SIGTERM: no word of the end, then a new daemon on the same files.
    logs.pass(30_000).control("Starting control daemon using socket /tmp/nvidia-mps/control");
    logs.start_server(4300, 1000);
    logs.none();
}

#[test]
fn an_operator_terminates_a_client() {
    let mut logs = with_clients(Generation::R550, &[7000, 7001]);
    logs.server("Forcefully terminating client 7000");
    logs.server("Client {7000, 1} exit");
    logs.server("Client termination succeeded.");
    logs.none();
}

#[test]
fn a_server_makes_way_for_another_user() {
    let mut logs = with_clients(Generation::R550, &[7000, 7001]);
    logs.control("NEW CLIENT 8000 from user 2000: Server is not ready, push client to pending list");
    logs.control(&format!("Try shutting down server {SERVER}, backoff is enabled"));
    logs.server("Server was unable to shutdown due to 2 active workers threads");
    logs.pass(5_000).leave(7000);
    logs.leave(7001);
    logs.pass(300).control(&format!("Try shutting down server {SERVER}, backoff is enabled"));
    logs.server("Server has been notified to shutdown");
    logs.server("Exiting");
    logs.control(&format!("Server {SERVER} exited with status 0"));
    logs.start_server(4300, 2000);
    logs.none();
}

#[test]
fn ten_thousand_xids_45_of_jobs_that_end() {
    let mut logs = with_clients(Generation::R550, &[7000, 7001]);
    for n in 0..10_000 {
        logs.pass(2).xid(&format!("45, pid={}, name=python3, Ch {:08x}", 20_000 + n % 400, n % 64));
    }
    logs.leave(7000);
    logs.none();
}

#[test]
fn an_xid_13_of_a_process_that_is_no_client() {
    let mut logs = with_clients(Generation::R550, &[7000, 7001]);
    logs.xid("13, pid=31000, name=render, Graphics SM Warp Exception on (GPC 0, TPC 1, SM 1): Out Of Range Address");
    logs.pass(10).leave(7000);
    logs.leave(7001);
    logs.none();
}

// No missed page.

#[test]
fn a_fault_is_explained_in_every_generation() {
    for generation in GENERATIONS {
        let mut logs = with_clients(generation, &[7000, 7001, 7002]);
        logs.fault(7001, &[0], &[7000, 7001, 7002]);
        for pid in [7000, 7001, 7002] {
            logs.pass(80).leave(pid);
        }
        logs.recover(&[0]);
        let incident = logs.only();
        assert_eq!(incident.cause, Cause::Fault, "{generation:?}");
        assert!(incident.mass_client_loss);
        assert_eq!((incident.victims.len(), incident.clients_before), (3, 3));
        assert!(incident.victims.iter().all(|victim| victim.exited_at.is_some()));
        assert_eq!(incident.state, IncidentState::Closed);
        assert!((incident.recovery.seconds.unwrap() - 0.64).abs() < 0.01, "{:?}", incident.recovery);
        let culprit = incident.culprit.as_ref().map(|culprit| (culprit.pid, culprit.evidence));
        let named = (generation != Generation::R470).then_some((7001, CulpritEvidence::ServerLog));
        assert_eq!(culprit, named, "{generation:?}");
        assert_eq!(incident.started_at.to_string(), "2026-04-01T08:01:00.35Z");
    }
}

#[test]
fn the_culprit_is_named_by_the_xid_line_alone() {
    let mut logs = with_clients(Generation::R470, &[7000, 7001]);
    logs.kernel.push_str("4,10,10,c;NVRM: GPU at PCI:0000:3b:00: GPU-00000000-1a2b-3c4d-5e6f-708192a3b4c5\n");
    logs.xid("31, pid=7001, name=train, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_8 faulted @ 0x73ac_1c000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE");
    logs.xid("43, pid=7000, name=train, Ch 00000010");
    logs.pass(3).fault(7001, &[0], &[7000, 7001]);
    let incident = logs.only();
    let culprit = incident.culprit.clone().unwrap();
    assert_eq!((culprit.pid, culprit.evidence), (7001, CulpritEvidence::XidChannel));
    assert_eq!(incident.xids[0].xid, 31);
}

#[test]
fn nobody_names_the_culprit() {
    let mut logs = with_clients(Generation::R470, &[7000, 7001]);
    logs.fault(7001, &[0], &[7000, 7001]);
    let incident = logs.only();
    assert!(incident.culprit.is_none() && incident.mass_client_loss);
}

#[test]
fn a_killed_server_is_logged_with_status_0() {
    let mut logs = with_clients(Generation::R550, &[7000, 7001]);
    logs.control(&format!("Server {SERVER} exited with status 0"));
    let incident = logs.only();
    assert_eq!(incident.cause, Cause::ServerExit);
    assert!(incident.mass_client_loss);
}

#[test]
fn a_server_that_breaks_takes_its_clients() {
    let mut logs = with_clients(Generation::R550, &[7000, 7001]);
    logs.control("Server encountered a fatal exception. Shutting down");
    logs.control(&format!("Server {SERVER} exited with status 1"));
    logs.start_server(4300, 1000);
    let incident = logs.only();
    assert_eq!(incident.cause, Cause::ServerExit);
    assert!(incident.recovery.recovered_at.is_some());
}

#[test]
fn victims_that_hang_on_for_an_hour() {
    let mut logs = with_clients(Generation::R580, &[7000, 7001]);
    logs.fault(7001, &[0], &[7000, 7001]);
    logs.pass(3_600_000).leave(7000);
    logs.leave(7001);
    logs.recover(&[0]);
    let incident = logs.only();
    assert!(incident.recovery.seconds.unwrap() > 3600.0);
}

#[test]
fn coupled_gpus_are_one_incident_and_the_third_gpu_is_not_in_it() {
    let mut logs = Logs::new(Generation::R550);
    logs.client(7000, &[0]);
    logs.client(7001, &[0, 1]);
    logs.client(7002, &[1]);
    logs.client(7003, &[2]);
    logs.pass(60_000).fault(7000, &[0, 1], &[7000, 7001, 7002]);
    let incident = logs.only();
    assert_eq!(incident.fault_domains.len(), 2);
    assert_eq!(incident.victims.len(), 3);
    assert_eq!(incident.clients_before, 3);
}

#[test]
fn a_second_fault_while_recovering() {
    let mut logs = with_clients(Generation::R550, &[7000, 7001]);
    logs.client(7002, &[1]);
    logs.client(7003, &[1]);
    logs.fault(7000, &[0], &[7000, 7001]);
    logs.pass(60_000).fault(7002, &[1], &[7002, 7003]);
    let incidents = logs.replay().incidents;
    assert_eq!(incidents.len(), 2, "{incidents:#?}");
    assert!(incidents.iter().all(|incident| incident.mass_client_loss));
}

#[test]
fn a_gpu_falls_off_the_bus() {
    let mut logs = with_clients(Generation::R550, &[7000, 7001]);
    logs.kernel.push_str("4,10,10,c;NVRM: GPU at PCI:0000:3b:00: GPU-00000000-1a2b-3c4d-5e6f-708192a3b4c5\n");
    logs.xid("79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.");
    let incident = logs.only();
    assert_eq!(incident.cause, Cause::Gpu);
    assert!(incident.mass_client_loss);
}

#[test]
fn two_daemons_on_one_gpu_fault_apart_and_lose_the_gpu_together() {
    let mut one = with_clients(Generation::R550, &[7000, 7001]);
    let mut other = with_clients(Generation::R550, &[8000, 8001]);
    one.fault(7001, &[0], &[7000, 7001]);
    let incidents = replay(&[("one", &one), ("other", &other)]).incidents;
    assert_eq!(incidents.len(), 1, "{incidents:#?}");
    assert_eq!(incidents[0].daemon.as_deref(), Some("one"));
    assert_eq!(incidents[0].victims.iter().map(|victim| victim.pid).collect::<Vec<_>>(), [7000, 7001]);

    let mut one = with_clients(Generation::R550, &[7000, 7001]);
    one.kernel.push_str("4,10,10,c;NVRM: GPU at PCI:0000:3b:00: GPU-00000000-1a2b-3c4d-5e6f-708192a3b4c5\n");
    one.xid("79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.");
    other.pass(0);
    let incidents = replay(&[("one", &one), ("other", &other)]).incidents;
    assert_eq!(incidents.len(), 2, "one for each daemon: {incidents:#?}");
    for incident in &incidents {
        assert!(incident.cause == Cause::Gpu && incident.mass_client_loss && incident.victims.len() == 2);
    }
    assert_ne!(incidents[0].daemon, incidents[1].daemon);
    assert_ne!(incidents[0].id, incidents[1].id);
}
