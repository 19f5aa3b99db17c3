//! The commands that need no node, as a person runs them.

#![allow(clippy::unwrap_used)]

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output};

use flate2::Compression;
use flate2::write::GzEncoder;

const PROGRAM: &str = env!("CARGO_BIN_EXE_mps-exporter");

const SERVER: &str = include_str!("../fuzz/seeds/server.log");
const CONTROL: &str = include_str!("../fuzz/seeds/control.log");
/// The culprit's line, which says when by itself.
const KERNEL: &str = "2026-02-03T04:05:00.000100+00:00 node7 kernel: NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, \
                      name=train, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS faulted @ 0x7f3a_00000000\n";

fn run(arguments: &[&str]) -> Output {
    Command::new(PROGRAM).args(arguments).output().unwrap()
}

/// What a command prints when all is well.
fn said(arguments: &[&str]) -> String {
    let output = run(arguments);
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    assert!(output.stderr.is_empty(), "progress is for terminals: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn gzip(path: &Path, text: &str) {
    let mut file = GzEncoder::new(std::fs::File::create(path).unwrap(), Compression::fast());
    file.write_all(text.as_bytes()).unwrap();
    file.finish().unwrap();
}

#[test]
fn recorded_logs_become_a_report_however_they_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let (plain, rotated) = (folder.path().join("plain"), folder.path().join("rotated"));
    for folder in [&plain, &rotated] {
        std::fs::create_dir(folder).unwrap();
        std::fs::write(folder.join("control.log"), CONTROL).unwrap();
    }
    std::fs::write(plain.join("server.log"), SERVER).unwrap();
    std::fs::write(plain.join("kern.log"), KERNEL).unwrap();
    let lines: Vec<&str> = SERVER.split_inclusive('\n').collect();
    gzip(&rotated.join("server.log.2.gz"), &lines[..10].concat());
    std::fs::write(rotated.join("server.log.1"), lines[10..24].concat()).unwrap();
    std::fs::write(rotated.join("server.log"), lines[24..].concat()).unwrap();
    gzip(&rotated.join("kern.log.gz"), KERNEL);

    let report = |folder: &Path, format: &str| {
        said(&["replay", "--time-zone", "UTC", "--format", format, folder.to_str().unwrap()])
    };
    let text = report(&plain, "text");
    for part in [
        "1 incident, mass client loss in 1, between 2026-02-03T03:59:59.000Z and ",
        "server.log: 32 lines known, 3 unknown.",
        "culprit       pid 4711, named by the Xid line",
        "lost          2 of 2 clients",
        "Xids          31 (pid 4711)",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let json = report(&plain, "json");
    assert_eq!(json, report(&rotated, "json"), "parts and compression do not matter");
    let incidents: serde_json::Value = serde_json::from_str(&json).unwrap();
    let incident = &incidents["incidents"][0];
    assert_eq!(
        (incident["culprit"]["pid"].as_u64(), incident["cause"].as_str()),
        (Some(4711), Some("fault"))
    );
    let markdown = report(&rotated, "markdown");
    assert!(markdown.starts_with("# MPS incidents\n") && markdown.contains("\n### Victims\n"), "{markdown}");
}

#[test]
fn what_is_no_log_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("notes");
    std::fs::write(&file, "nothing of interest\n").unwrap();
    let output = run(&["replay", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("neither a log of an MPS daemon nor a kernel log"), "{error}");
}

#[test]
fn what_cannot_be_read_does_not_keep_the_rest_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let lines: Vec<&str> = SERVER.split_inclusive('\n').collect();
    std::fs::write(path("server.log"), lines[10..].concat()).unwrap();
    // Half an archive: the machine went down while it was written.
    gzip(&path("server.log.1.gz"), &lines[..10].concat().repeat(2_000));
    let whole = std::fs::read(path("server.log.1.gz")).unwrap();
    std::fs::write(path("server.log.1.gz"), &whole[..whole.len() / 2]).unwrap();
    std::fs::write(path("kern.log.gz"), "no archive").unwrap();
    let logs = folder.path().to_str().unwrap();
    let output = run(&["replay", "--time-zone", "UTC", "/nowhere/server.log", logs]);
    let (report, error) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(
        report.starts_with("1 incident") && report.contains("server.log breaks off before its end"),
        "{report}"
    );
    assert_eq!(output.status.code(), Some(1), "the report is not the whole truth");
    assert!(error.contains("not complete") && error.contains("kern.log.gz"), "{error}");
    assert!(error.contains("server.log breaks off"), "{error}");
    assert!(error.contains("cannot open /nowhere/server.log: No such file"), "{error}");
}

#[test]
fn an_xid_without_mps_is_no_incident_but_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kern.log");
    let off_the_bus = KERNEL.replace("31, pid=4711, name=train,", "79, GPU has fallen off the bus.");
    std::fs::write(&file, off_the_bus.repeat(2)).unwrap();
    let text = said(&["replay", file.to_str().unwrap()]);
    assert!(text.starts_with("0 incidents") && text.contains("Xid 79 on 00000000:3B:00.0"), "{text}");
    assert!(text.contains(": 2 times."), "{text}");
}

#[test]
fn an_error_commands_no_terminal() {
    let output = run(&["replay", "/nowhere/\x1b[31m"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("[31m") && !error.contains('\x1b'), "{error:?}");
}

#[test]
fn a_log_line_commands_neither_terminal_nor_markdown() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("server.log");
    let fault = "Server is handling a fatal GPU error.";
    let poisoned = SERVER.replacen(fault, &format!("{fault}\x1b]0;x\x07\u{9b}31m\u{202e}<b>|`[x](y)"), 1);
    assert!(poisoned.contains("\x1b]0;x"));
    std::fs::write(&file, poisoned).unwrap();
    let report = |format| said(&["replay", "--format", format, file.to_str().unwrap()]);
    for format in ["text", "markdown", "json"] {
        let report = report(format);
        assert!(report.contains("]0;x"), "the line is shown: {report}");
        assert!(!report.contains(['\x1b', '\x07', '\u{9b}', '\u{202e}']), "{report:?}");
    }
    assert!(report("markdown").contains("&lt;b>\\|\\`\\[x](y)"), "{}", report("markdown"));
}

#[test]
fn progress_is_shown_on_a_terminal() {
    // It gives its command a terminal.
    if Command::new("script").arg("--version").output().is_err() {
        eprintln!("skipped: script (of util-linux) is not installed");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kern.log.gz");
    let noise = "2026-02-03T04:05:00.000100+00:00 node7 kernel: usb 1-1: new high-speed USB device\n";
    gzip(&file, &noise.repeat(500_000));
    let command = format!("{PROGRAM} replay {}", file.display());
    let output = Command::new("script").args(["-qec", &command, "/dev/null"]).output().unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && shown.contains("\r0 of 0 MiB"), "{shown:?}");
    assert!(shown.contains("0 incidents"), "{shown:?}");
}

#[test]
fn xids_and_alerts_are_explained() {
    let text = said(&["explain", "31", "MpsMassClientLoss", "999"]);
    for part in ["MpsMassClientLoss", "31", "999"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let json: serde_json::Value = serde_json::from_str(&said(&["explain", "--json", "31"])).unwrap();
    assert!(json.to_string().contains("31"), "{json}");
    assert_eq!(run(&["explain", "MpsNoSuchAlert"]).status.code(), Some(1));
}

#[test]
fn completions_are_a_script_that_the_shell_takes() {
    let command = format!("source <({PROGRAM} completions bash) && complete -p mps-exporter");
    let output = Command::new("bash").args(["-c", &command]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    for shell in ["zsh", "fish"] {
        assert!(said(&["completions", shell]).contains("replay"), "{shell}");
    }
}
