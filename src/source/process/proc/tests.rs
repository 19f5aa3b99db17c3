use std::process::Command;

use proptest::prelude::*;

use super::*;
use crate::source::process::testing::FakeProc;

#[test]
fn a_command_with_spaces_and_brackets_does_not_shift_the_fields() {
    let line = b"812 (a) (b) S) R 1 812 812 0 -1 4194560 5 0 0 0 1 2 0 0 20 0 7 0 90210 1 1 1\n";
    let stat = parse_stat(line).unwrap();
    assert_eq!((stat.command.as_str(), stat.start), ("a) (b) S", 90210));
    assert!(!stat.is_dead());
}

#[test]
fn a_zombie_is_dead_but_a_zombie_leader_with_threads_is_not() {
    let line =
        |state: char, threads: u32| format!("9 (x) {state} 1 9 9 0 -1 0 0 0 0 0 1 2 0 0 20 0 {threads} 0 77");
    assert!(parse_stat(line('Z', 1).as_bytes()).unwrap().is_dead());
    assert!(!parse_stat(line('Z', 3).as_bytes()).unwrap().is_dead());
    assert!(!parse_stat(line('D', 1).as_bytes()).unwrap().is_dead());
}

#[test]
fn a_cut_stat_is_malformed_and_says_where() {
    let proc = FakeProc::new();
    proc.write(5, "stat", "5 (half");
    let error = proc.root().stat(5).unwrap_err();
    assert_eq!(error.reason(), "malformed");
    assert!(error.to_string().contains("5/stat"), "{error}");
}

#[test]
fn a_missing_process_is_gone_and_a_reused_pid_is_another_process() {
    let proc = FakeProc::new();
    assert!(proc.root().process(7).unwrap_err().is_gone());
    proc.process(7, "train", 100);
    let (first, _) = proc.root().process(7).unwrap();
    assert!(proc.root().is_alive(first).unwrap());
    proc.process(7, "train", 200);
    assert!(!proc.root().is_alive(first).unwrap());
}

#[test]
fn status_gives_real_uid_and_every_nested_pid() {
    let status = parse_status(b"Name:\tx\nTgid:\t44\nUid:\t1000\t0\t0\t0\nNSpid:\t44\t7\t1\n");
    assert_eq!(status, Status { thread_group: Some(44), uid: Some(1000), namespace_pids: vec![44, 7, 1] });
}

#[test]
fn only_wanted_variables_are_kept_and_the_first_setting_counts() {
    let found = select_variables(b"SECRET=x\0JOB=1=2\0JOB=3\0NOEQUALS\0=empty\0JOBX=9\0", &["JOB", "ABSENT"]);
    assert_eq!(found.len(), 1);
    assert_eq!(found["JOB"], "1=2");
}

#[test]
fn start_time_is_boot_time_and_ticks() {
    let proc = FakeProc::new();
    let root = proc.root();
    let boot = root.boot_time().unwrap();
    let ticks = rustix::param::clock_ticks_per_second();
    let start = root.started_at(boot, 3 * ticks + ticks / 2).unwrap();
    assert_eq!(start.duration_since(boot).as_millis(), 3500);
}

#[test]
fn programs_of_mps_are_known_by_file_or_by_first_argument() {
    let proc = FakeProc::new();
    proc.process(20, MPS_COMMAND, 1);
    proc.link(20, "exe", "/usr/bin/nvidia-cuda-mps-server (deleted)");
    proc.process(21, MPS_COMMAND, 1);
    proc.write(21, "cmdline", "/opt/bin/nvidia-cuda-mps-control\0-d\0");
    proc.process(22, "python3", 1);
    proc.write(22, "cmdline", "nvidia-cuda-mps-server\0");
    proc.process(23, MPS_COMMAND, 1);
    proc.link(23, "exe", "/tmp/nvidia-cuda-mps-impostor");
    let root = proc.root();
    let is_mps = |pid| root.program(pid).unwrap().is_mps;
    assert!(is_mps(20) && is_mps(21));
    assert!(!is_mps(22) && !is_mps(23));
    assert_eq!(root.program(99), None);
}

#[test]
fn reads_are_bounded() {
    let proc = FakeProc::new();
    proc.process(3, "big", 1);
    proc.write(3, "environ", &format!("A=1\0PAD={}\0LATE=1\0", "x".repeat(200 * 1024)));
    let found = proc.root().environment(3, &["A", "LATE"]).unwrap();
    assert_eq!(found.keys().collect::<Vec<_>>(), ["A"]);
}

#[test]
fn this_very_process_is_read_from_the_kernel() {
    let root = ProcRoot::new("/proc");
    assert!(root.is_procfs() && root.shows_own_namespace());
    let pid = std::process::id();
    let (process, stat) = root.process(pid).unwrap();
    assert!(!stat.command.is_empty());
    let status = root.status(pid).unwrap();
    assert_eq!(status.thread_group, Some(pid));
    assert_eq!(status.uid, Some(rustix::process::getuid().as_raw()));
    let started = root.started_at(root.boot_time().unwrap(), process.start).unwrap();
    let age = Timestamp::now().duration_since(started).as_secs_f64();
    assert!((0.0..3600.0).contains(&age), "{age}");
    assert!((root.age(process.start).as_secs_f64() - age).abs() < 1.5, "{age}");
    assert!(root.pids().unwrap().contains(&pid));
}

#[test]
fn a_killed_child_that_nobody_waited_for_is_gone() {
    let root = ProcRoot::new("/proc");
    let mut child = Command::new("sleep").arg("60").spawn().unwrap();
    let (process, _) = root.process(child.id()).unwrap();
    assert!(root.is_alive(process).unwrap());
    child.kill().unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(5);
    while root.is_alive(process).unwrap() {
        assert!(std::time::Instant::now() < deadline, "the zombie counts as alive");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(root.stat(process.pid).is_ok(), "the zombie's entry should still be there");
    child.wait().unwrap();
}

#[test]
fn a_tree_of_files_is_not_a_procfs_and_hides_nothing() {
    let root = FakeProc::new();
    assert!(!root.root().is_procfs() && !root.root().shows_own_namespace() && !root.root().hides_processes());
}

proptest! {
    #[test]
    fn no_content_makes_a_parser_panic(content in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = parse_stat(&content);
        let _ = parse_status(&content);
        let _ = select_variables(&content, &["A", ""]);
        let _ = is_mps_program(&content);
    }

    #[test]
    fn any_command_name_survives(command in "[ -~]{1,15}", start in any::<u64>()) {
        let line = format!("1 ({command}) S 1 1 1 0 -1 0 0 0 0 0 1 2 0 0 20 0 1 0 {start} 1");
        let stat = parse_stat(line.as_bytes()).unwrap();
        prop_assert_eq!((stat.command, stat.start), (command, start));
    }
}
