//! The whole program on the stand-in: while a call hangs, whichever it is, every scrape is answered.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::GPUS;
use crate::program::Program;
use crate::rig::{Folder, NO_V2, NO_V3, THIRD};

/// Scrapes while one call hangs.
const SCRAPES: usize = 100;
/// How long each may take, also on a busy machine.
const BOUND: Duration = Duration::from_millis(250);
/// Programs that run at a time. They sleep nearly all the time.
const AT_A_TIME: usize = 9;
const PATIENCE: Duration = Duration::from_secs(30);

const NVML_UP: &str = r#"mps_source_up{source="nvml",daemon=""}"#;
const XIDS: &str = r#"mps_gpu_xid_errors_total{UUID="GPU-aaaa",gpu="0",GPU_I_ID="",xid="31",source="kmsg"}"#;

#[test]
fn a_hundred_scrapes_succeed_while_any_call_hangs() {
    let functions = functions();
    assert!(functions.len() > 20, "{functions:?}");
    let queue = Mutex::new(functions.iter());
    let scraping = Mutex::new(());
    let slowest = Mutex::new(Duration::ZERO);
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some(function) = { queue.lock().unwrap().next() } {
                    let took = hang(function, &functions, &scraping);
                    let mut slowest = slowest.lock().unwrap();
                    *slowest = took.max(*slowest);
                }
            });
        }
    });
    let slowest = slowest.into_inner().unwrap();
    println!("{} calls, the slowest scrape took {slowest:?}", functions.len());
}

/// A changed configuration starts all sources anew, but makes no call beside the one that hangs.
#[test]
fn a_reload_makes_no_call_beside_one_that_hangs() {
    const FUNCTION: &str = "nvmlDeviceGetComputeMode";
    let folder = Folder::new();
    folder.script(GPUS);
    let program = start(&folder);
    program.expect(NVML_UP, 1.0);
    folder.script(&format!("{}{GPUS}hang {FUNCTION}\n", folder.trace()));
    program.expect(NVML_UP, 0.0);

    // The events thread, which hangs in nothing, lets go of its events.
    let calls = || folder.calls().iter().filter(|(call, _)| !call.starts_with("nvmlEvent")).count();
    let before = calls();
    for seconds in [2, 3] {
        program.reconfigure(&program.config().replace("stuck_after: ", &format!("stuck_after: {seconds}")));
        std::thread::sleep(Duration::from_secs(4));
        assert_eq!(program.value(NVML_UP), Some(0.0));
        let reason = reason(&program);
        assert!(reason.starts_with("stuck in ") && reason.contains(FUNCTION), "{reason}");
        assert_eq!(calls(), before, "{:?}", folder.calls());
    }

    folder.script(GPUS);
    program.expect(NVML_UP, 1.0);
    program.expect(r#"mps_gpu_up{UUID="GPU-bbbb",gpu="1"}"#, 1.0);
}

/// A call that hangs already is judged by the limit that holds now.
#[test]
fn a_lowered_limit_counts_for_the_call_that_hangs() {
    const FUNCTION: &str = "nvmlDeviceGetComputeMode";
    let folder = Folder::new();
    folder.script(GPUS);
    let program = start(&folder);
    let config = program.config();
    program.reconfigure(&config.replace("stuck_after: 1s", "stuck_after: 600s"));
    folder.script(&format!("{}{GPUS}hang {FUNCTION}\n", folder.trace()));
    let begun = Instant::now();
    while hanging(&folder, FUNCTION).is_empty() {
        assert!(begun.elapsed() < PATIENCE, "{FUNCTION} is not called: {:?}", folder.calls());
        std::thread::sleep(Duration::from_millis(50));
    }
    std::thread::sleep(Duration::from_secs(2));
    assert_ne!(program.value(NVML_UP), Some(0.0), "the limit is not reached");

    program.reconfigure(&config);
    program.expect(NVML_UP, 0.0);
    assert!(reason(&program).contains(FUNCTION), "{}", reason(&program));
    folder.script(GPUS);
    program.expect(NVML_UP, 1.0);
}

/// What the program says of NVML.
fn reason(program: &Program) -> String {
    let status = program.json("/api/v1/status");
    let mut sources = status["sources"].as_array().unwrap().iter();
    sources.find(|it| it["source"] == "nvml").unwrap()["reason"].as_str().unwrap_or("").to_owned()
}

/// Has one function hang under a program of its own; gives the time of the slowest scrape.
fn hang(function: &str, functions: &BTreeSet<String>, scraping: &Mutex<()>) -> Duration {
    let folder = Folder::new();
    folder.script(GPUS);
    let program = start(&folder);
    program.expect(NVML_UP, 1.0);

    // Without the driver's files the source ends its session and begins another, in which it calls everything anew.
    folder.script(&format!("{}{GPUS}{}hang {function}\n", folder.trace(), beside(function)));
    folder.unload_driver();
    let begun = Instant::now();
    loop {
        let reason = reason(&program);
        if reason.starts_with("stuck in ") && reason.contains(function) {
            break;
        }
        assert!(begun.elapsed() < PATIENCE, "{function} does not hang: {:?} {reason:?}", folder.calls());
        std::thread::sleep(Duration::from_millis(50));
    }

    let before = hanging(&folder, function);
    assert!(!before.is_empty(), "{function}");
    let mut slowest = Duration::ZERO;
    {
        let _alone = scraping.lock().unwrap();
        for _ in 0..SCRAPES {
            let begun = Instant::now();
            assert_eq!(program.value(NVML_UP), Some(0.0), "{function}");
            slowest = begun.elapsed().max(slowest);
        }
    }
    assert!(slowest < BOUND, "{slowest:?} for a scrape while {function} hangs");
    assert_eq!(hanging(&folder, function), before, "no other call of the thread while {function} hangs");
    // Everything else goes on.
    assert_eq!(program.value(XIDS), None, "{function}");
    let xid = "4,1,1,c;NVRM: Xid (PCI:0000:3b:00): 31, pid=711, name=a, Ch 00000008\n";
    std::fs::write(folder.path().join("kmsg"), xid).unwrap();
    program.expect(XIDS, 1.0);

    folder.script(&format!("{}{GPUS}", folder.trace()));
    program.expect(NVML_UP, 1.0);
    program.expect(r#"mps_gpu_up{UUID="GPU-bbbb",gpu="1"}"#, 1.0);
    for (call, _thread) in folder.calls() {
        assert!(functions.contains(&call), "{call} is called, and the source's code does not name it");
    }
    slowest
}

fn start(folder: &Folder) -> Program {
    folder.load_driver();
    std::fs::write(folder.path().join("kmsg"), "").unwrap();
    let config = format!(
        "discovery: {{enabled: false}}\nhost: {{proc: {proc}}}\nkernel_log: {{path: {kmsg}}}\n\
         state: {{directory: \"\"}}\n\
         nvml: {{library: {library}, interval: 1s, stuck_after: 1s}}\n",
        proc = folder.proc().display(),
        kmsg = folder.path().join("kmsg").display(),
        library = folder.library().display(),
    );
    Program::start_with(&folder.path().join("exporter"), &config, None)
}

/// How many calls each thread that is in `function` has made so far.
fn hanging(folder: &Folder, function: &str) -> BTreeMap<String, usize> {
    let mut calls: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (call, thread) in folder.calls() {
        calls.entry(thread).or_default().push(call);
    }
    calls.retain(|_, calls| calls.last().is_some_and(|last| last == function));
    calls.into_iter().map(|(thread, calls)| (thread, calls.len())).collect()
}

/// What the script says beside the hang so that the function is called: GPUs that are new, lists that are missing.
fn beside(function: &str) -> String {
    let older = match function.split_once("RunningProcesses") {
        Some((_, "_v2")) => [NO_V3, ""],
        Some((_, "")) => [NO_V3, NO_V2],
        _ => ["", ""],
    };
    older.concat() + THIRD
}

/// Every NVML function that the source calls: its code names each call, as `"nvmlX"` or in a macro as `(nvmlX)`.
fn functions() -> BTreeSet<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/source/nvml");
    let mut names = BTreeSet::new();
    for file in ["raw.rs", "raw/device.rs", "raw/event_set.rs"] {
        let code = std::fs::read_to_string(folder.join(file)).unwrap();
        for (at, _) in code.match_indices("nvml").filter(|(at, _)| code[..*at].ends_with(['"', '('])) {
            let rest = &code[at..];
            let end = rest.find(|it: char| !it.is_ascii_alphanumeric() && it != '_').unwrap_or(rest.len());
            if rest[4..].starts_with(|it: char| it.is_ascii_uppercase()) {
                names.insert(rest[..end].to_owned());
            }
        }
    }
    names
}
