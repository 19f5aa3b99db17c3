//! The example hooks of `deploy/hooks`, given what a hook is given.
#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use mps_exporter::engine::incident::Incident;
use mps_exporter::outlet::hook::Input;
use rustix::process::geteuid;
use serde_json::{Value, json};

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/hooks").join(name)
}

/// Runs a command with a hook's input.
fn run(command: &mut Command) -> Output {
    let incident: Incident = serde_json::from_str(include_str!("support/incident.json")).unwrap();
    let input = Input {
        event: "server_fault",
        at: jiff::Timestamp::UNIX_EPOCH,
        node: "gpu-07",
        daemon: None,
        incident: Some(&incident),
    };
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // One that ends early does not read it.
    let _unread = child.stdin.take().unwrap().write_all(&serde_json::to_vec(&input).unwrap());
    child.wait_with_output().unwrap()
}

/// A folder with programs that print how they were called.
fn programs(names: &[&str]) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    for name in names {
        let path = folder.path().join(name);
        std::fs::write(&path, format!("#!/bin/sh\necho \"{name} $*\"\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:/usr/bin:/bin", folder.path().display());
    (folder, path)
}

#[test]
fn a_node_is_cordoned_with_the_incident_as_the_reason() {
    let (_folder, path) = programs(&["kubectl"]);
    let output = run(Command::new(example("cordon-node")).env("PATH", &path).env("NODE_NAME", "gpu-07"));
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        "kubectl cordon gpu-07\n\
         kubectl annotate node gpu-07 --overwrite mps-exporter/incident=019b2c4d5e6f-a1b2c3d4\n"
    );
    let output = run(Command::new(example("cordon-node")).env("PATH", &path).env_remove("NODE_NAME"));
    assert!(!output.status.success());
    assert!(String::from_utf8(output.stderr).unwrap().contains("NODE_NAME"));
}

#[test]
fn systemd_restarts_the_unit() {
    let (_folder, path) = programs(&["systemctl"]);
    let output =
        run(Command::new(example("restart-mps")).env("PATH", &path).env("MPS_UNIT", "mps@0.service"));
    assert!(output.status.success());
    assert!(String::from_utf8(output.stdout).unwrap().contains("systemctl restart mps@0.service\n"));
}

/// A process that is ended with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _reaped = self.0.wait();
    }
}

fn process(program: &str, arguments: &[&str]) -> Process {
    Process(Command::new(program).args(arguments).stdout(Stdio::piped()).spawn().unwrap())
}

/// One that writes a checkpoint when it is asked.
fn trainer() -> (Process, Lines<BufReader<ChildStdout>>) {
    let mut trainer =
        process("sh", &["-c", "trap 'echo checkpoint; exit' USR1; echo up; while :; do sleep 0.05; done"]);
    let mut lines = BufReader::new(trainer.0.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "up");
    (trainer, lines)
}

/// Where an exporter answers once, with this.
fn exporter(status: Value) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 4096];
        let _request = stream.read(&mut request).unwrap();
        write!(stream, "HTTP/1.0 200 OK\r\n\r\n{status}").unwrap();
    });
    address
}

fn client(pid: u32, host_pid: Option<u32>, command: &str) -> Value {
    json!({"daemon": "default", "pid": pid, "host_pid": host_pid, "command": command, "state": "active"})
}

#[test]
fn spared_clients_that_can_take_the_signal_get_it_and_nobody_else() {
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("skipped: there is no python3");
        return;
    }
    let (trainer, mut lines) = trainer();
    let (mut deaf, mut victim) = (process("sleep", &["60"]), process("sleep", &["60"]));
    let status = json!({"clients": [
        client(1, Some(trainer.0.id()), "train"),
        client(2, Some(deaf.0.id()), "deaf"),
        client(4712, Some(victim.0.id()), "victim"),
        client(3, None, "elsewhere"),
    ]});
    let exporter = exporter(status);
    let output = run(Command::new(example("signal-checkpoint")).env("EXPORTER", exporter));
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("asked for a checkpoint: train"), "{said}");
    assert!(said.contains("deaf") && !said.contains("victim"), "{said}");
    assert_eq!(lines.next().unwrap().unwrap(), "checkpoint");
    assert!(deaf.0.try_wait().unwrap().is_none() && victim.0.try_wait().unwrap().is_none());
}

#[test]
fn a_client_that_may_not_be_signalled_is_named_with_the_capability() {
    if Command::new("python3").arg("--version").output().is_err() || !geteuid().is_root() {
        eprintln!("skipped: there is no python3, or no other user to be");
        return;
    }
    let (trainer, _lines) = trainer();
    let exporter = exporter(json!({"clients": [client(1, Some(trainer.0.id()), "train")]}));
    // The folder of the project may be closed to others.
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let hook = folder.path().join("signal-checkpoint");
    std::fs::copy(example("signal-checkpoint"), &hook).unwrap();
    let output = run(Command::new(hook).env("EXPORTER", exporter).current_dir("/").uid(65_534));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && said.contains("may not signal train"), "{said}");
    assert!(said.contains("CAP_KILL"), "{said}");
}
