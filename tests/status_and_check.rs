//! `status` and `check`, as a person runs them.

#![allow(clippy::unwrap_used)]

mod support;

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use mps_exporter::demo::{Options, Simulation};
use mps_exporter::http::WebOptions;
use support::nodes;
use support::server::{Running as Exporter, serve, serve_with};
use tokio::io::{AsyncBufReadExt as _, BufReader as AsyncBufReader, Lines};
use tokio::process::ChildStdout;

const PROGRAM: &str = env!("CARGO_BIN_EXE_mps-exporter");
const PATIENCE: Duration = Duration::from_secs(30);

fn run(command: &mut Command) -> (Output, String) {
    let output = command.env_remove("KUBERNETES_SERVICE_HOST").stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    (output, text)
}

/// A simulated node, and a configuration file with which the program reads it.
fn node() -> (Simulation, tempfile::TempDir, PathBuf) {
    let options = Options {
        first: Duration::from_secs(3600),
        period: Duration::from_secs(3600),
        program: Some(PROGRAM.into()),
        ..Options::default()
    };
    let node = Simulation::start(&options).unwrap();
    let config = node.config();
    let daemon = &config.daemons[0];
    let yaml = format!(
        "daemons: [{{name: default, pipe_directory: {}, log_directory: {}, log: files}}]\n\
         discovery: {{enabled: false}}\nnvml: {{enabled: {}, library: {}}}\nkernel_log: {{path: {}}}\n\
         state: {{directory: \"\"}}\n",
        daemon.pipe_directory.display(),
        daemon.log_directory.display(),
        config.nvml.enabled,
        config.nvml.library.display(),
        config.kernel_log.path.display(),
    );
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yml");
    std::fs::write(&file, yaml).unwrap();
    (node, folder, file)
}

#[test]
fn one_look_shows_the_tree_and_checks_the_sources() {
    let (_node, _folder, file) = node();
    let (output, text) = run(Command::new(PROGRAM).args(["status", "--config.file"]).arg(&file));
    assert!(output.status.success(), "{output:?}");
    for part in [
        "6 clients on 2 fault domains",
        "daemon default  serving",
        "└─ server uid_",
        "default/0 + default/1  coupled",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains('\x1b'), "colours are for terminals: {text}");

    let (output, json) = run(Command::new(PROGRAM).args(["status", "--json", "--config.file"]).arg(&file));
    assert!(output.status.success(), "{output:?}");
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["clients"].as_array().unwrap().len(), 6);

    let (output, text) = run(Command::new(PROGRAM).args(["check", "--config.file"]).arg(&file));
    let (_, json) = run(Command::new(PROGRAM).args(["check", "--json", "--config.file"]).arg(&file));
    let report: serde_json::Value = serde_json::from_str(&json).unwrap();
    let state_of = |what: &str| {
        let findings = report["findings"].as_array().unwrap();
        findings.iter().find(|it| it["what"] == what).unwrap_or_else(|| panic!("{what}: {text}"))["state"]
            .clone()
    };
    for source in
        ["daemons", "control", "control_lock", "kernel_log", "nvml", "proc", "control_log", "server_log"]
    {
        assert_eq!(state_of(source), "ok", "{source}: {text}");
    }
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert_eq!(report["exit_status"], 0);
}

/// A program that runs until this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _already_gone = rustix::process::kill_process(
            rustix::process::Pid::from_child(&self.0),
            rustix::process::Signal::TERM,
        );
        let _status = self.0.wait();
    }
}

#[test]
fn a_running_exporter_is_asked_over_a_socket_and_watched() {
    let folder = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}", folder.path().join("e.sock").display());
    let demo = Command::new(PROGRAM)
        .args(["demo", "--first-incident", "3600", "--log.level", "error", "--web.listen-address", &socket])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let _demo = Running(demo);
    let begun = Instant::now();
    let text = loop {
        let (output, text) = run(Command::new(PROGRAM).args(["status", "--url", &socket]));
        // Who the clients work for is learnt a little later than that they are there.
        let is_whole =
            text.contains("6 clients on 2 fault domains") && text.contains("├─ Slurm job 8801  2 clients");
        if output.status.success() && is_whole {
            break text;
        }
        assert!(begun.elapsed() < PATIENCE, "{output:?}");
        std::thread::sleep(Duration::from_millis(100));
    };
    assert!(!text.contains("one look"), "{text}");

    let mut watch = Command::new(PROGRAM)
        .args(["status", "--watch", "--url", &socket])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(watch.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("6 clients on 2 fault domains") {
        line.clear();
        assert_ne!(output.read_line(&mut line).unwrap(), 0, "it ended by itself");
    }
    rustix::process::kill_process(rustix::process::Pid::from_child(&watch), rustix::process::Signal::INT)
        .unwrap();
    assert!(watch.wait().unwrap().success());
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert!(!rest.contains('\x1b'), "no terminal, no escape sequences: {rest}");
}

/// What a watch prints until a line has this part; how many pictures began meanwhile.
async fn printed(lines: &mut Lines<AsyncBufReader<ChildStdout>>, part: &str) -> usize {
    let mut pictures = 0;
    let found = async {
        while let Some(line) = lines.next_line().await.unwrap() {
            pictures += usize::from(line.contains("1 MPS control daemon"));
            if line.contains(part) {
                return;
            }
        }
        panic!("it ended by itself");
    };
    tokio::time::timeout(PATIENCE, found).await.unwrap_or_else(|_| panic!("{part:?} was not printed"));
    pictures
}

fn show_clients(exporter: &Exporter, clients: u32) {
    exporter.snapshots.store(nodes::node(1, clients).into());
    exporter.generations.send_modify(|generation| *generation += 1);
}

#[tokio::test]
async fn a_change_is_shown_when_it_happens() {
    let exporter = serve(nodes::node(1, 2), None).await;
    let address = exporter.address;
    let mut watch = tokio::process::Command::new(PROGRAM)
        .args(["status", "--watch", "--url", &format!("http://{address}")])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = AsyncBufReader::new(watch.stdout.take().unwrap()).lines();
    printed(&mut lines, " 2 clients on").await;
    let begun = Instant::now();
    for clients in 3..=12 {
        show_clients(&exporter, clients);
        printed(&mut lines, &format!(" {clients} clients on")).await;
    }
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(10), "ten changes took {took:?}, as if they were polled for");

    let begun = Instant::now();
    for clients in (2..200).chain([1]) {
        show_clients(&exporter, clients);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let pictures = printed(&mut lines, " 1 client on").await;
    let bound = begun.elapsed().as_millis() / 200 + 2;
    assert!(pictures as u128 <= bound, "{pictures} pictures of two hundred changes");

    exporter.stop.send_replace(true);
    exporter.serving.await.unwrap();
    printed(&mut lines, "no exporter answers at").await;
    let options = WebOptions {
        listen: vec![address.to_string().parse().unwrap()],
        systemd_socket: false,
        telemetry_path: "/metrics".into(),
        config_file: None,
    };
    let exporter = serve_with(&options, nodes::node(1, 5)).await;
    printed(&mut lines, " 5 clients on").await;
    show_clients(&exporter, 6);
    printed(&mut lines, " 6 clients on").await;
}

#[test]
fn an_exporter_that_was_named_and_is_not_there_is_an_error() {
    let (output, _) = run(Command::new(PROGRAM).args(["status", "--url", "http://127.0.0.1:1"]));
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.starts_with("mps-exporter: no exporter answers at http://127.0.0.1:1: "), "{error}");
    assert_eq!(error.matches("refused").count(), 1, "the reason is told once: {error}");
}

#[test]
fn no_option_about_an_exporter_is_ignored() {
    let password = ["--user", "operator", "--password-file", "/nowhere"];
    // arguments, exit status, what is said
    for (arguments, code, expected) in [
        (&password[..], 1, "the password in /nowhere: No such file"),
        (&[&password[..], &["--config.file", "/dev/null"]].concat(), 2, "cannot be used with"),
        (&["--tls.insecure-skip-verify", "--config.file", "/dev/null"], 2, "cannot be used with"),
        (&["--tls.insecure-skip-verify"], 2, "--url <URL>"),
        (&["--tls.ca-file", "/nowhere"], 2, "--url <URL>"),
        (&["--tls.cert-file", "/nowhere", "--tls.key-file", "/nowhere"], 2, "--url <URL>"),
        (&["--url", "unix:/nowhere", "--tls.insecure-skip-verify"], 1, "has no effect on unix:/nowhere"),
    ] {
        let (output, text) = run(Command::new(PROGRAM).arg("status").args(arguments));
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {output:?}");
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(told.contains(expected) && text.is_empty(), "{arguments:?}: {told}");
    }
}

/// The program as nobody, where a test may become that.
fn as_nobody(folder: &tempfile::TempDir) -> Option<Command> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can become another user");
        return None;
    }
    // Where it was built may be closed to others.
    let program = folder.path().join("mps-exporter");
    std::fs::copy(PROGRAM, &program).unwrap();

    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(program);
    command.uid(65_534).gid(65_534).current_dir("/");
    Some(command)
}

#[test]
fn nobody_in_a_bare_place_is_told_what_to_change() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yml");
    let yaml = "discovery: {pipe_directories: []}\nstate: {directory: /root/state}\nnvml: {library: /nonexistent/nvml.so}\n";
    std::fs::write(&file, yaml).unwrap();
    let Some(mut command) = as_nobody(&folder) else { return };
    let (output, text) = run(command.env("container", "test").args(["check", "--config.file"]).arg(&file));
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("surroundings runs as uid 65534, in a container"), "{text}");
    assert!(words.contains("BLIND state directory /root/state cannot be written: /root"), "{text}");
    assert!(words.contains("BLIND nvml "), "{text}");
    if !words.contains("ok daemons") {
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(words.contains("BROKEN daemons no MPS control daemon is visible"), "{text}");
        let has_host_pids = words.contains("in a container with the host's pids");
        assert_eq!(
            words.contains("let it see the host's processes: hostPID: true"),
            !has_host_pids,
            "{text}"
        );
        assert!(words.contains("mount the daemon's pipe and log directories"), "{text}");
        assert!(words.contains("run as root: the environment of other users' daemons"), "{text}");
    }
    if words.contains("BLIND kernel_log") {
        assert!(
            words.contains("securityContext: {runAsUser: 0") && words.contains("--cap-add SYSLOG"),
            "{text}"
        );
    }
    let mut command = as_nobody(&folder).unwrap();
    let (output, text) = run(command.args(["status", "--config.file"]).arg(&file));
    assert!(output.status.success(), "a picture with blind sources is one: {output:?}");
    assert!(text.contains("blind; `mps-exporter check` says what to change:"), "{text}");
    assert!(text.contains("This is one look"), "{text}");
}

#[test]
fn a_wrong_configuration_cannot_work() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.yml");
    std::fs::write(&file, "nvml: {interval: never}\n").unwrap();
    let (output, text) = run(Command::new(PROGRAM).args(["check", "--config.file"]).arg(&file));
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("config.yml:1:18: nvml.interval: "), "{text}");
}
