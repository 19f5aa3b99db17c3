//! CPU of one NVML cycle with 8 GPUs and 48 MPS clients on each, on the stand-in library.
//!
//! `cargo bench --bench nvml_cycle`; exits with 1 when a cycle costs more than it may.

use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use mps_exporter::event::EventKind;
use mps_exporter::source::nvml::{self, Poke, Settings, stand_in};
use mps_exporter::source::{Outbox, Shutdown};
use mps_exporter::telemetry::Telemetry;
use mps_exporter::time::Clock;

const GPUS: u32 = 8;
const CLIENTS: u32 = 48;
/// Cycles that are measured, after as many that are not.
const CYCLES: u32 = 300;
/// What a cycle may cost.
const LIMIT: Duration = Duration::from_millis(2);

fn main() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let library = folder.path().join("libnvidia-ml.so.1");
    std::fs::write(&library, stand_in::library().expect("built with the stand-in"))
        .expect("room for a library");
    std::fs::write(folder.path().join("libnvidia-ml.so.1.script"), script(folder.path()))
        .expect("room for a script");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let figures = runtime.block_on(measure(Settings {
        library,
        proc: folder.path().join("proc"),
        module: folder.path().join("none"),
        interval: Duration::from_millis(1),
        min_spacing: Duration::from_millis(1),
        event_wait: Duration::from_secs(1),
        stuck_after: Duration::from_secs(30),
        backoff: (Duration::from_secs(1), Duration::from_secs(1)),
    }));
    println!("{GPUS} GPUs × {CLIENTS} MPS clients, {} processes listed per cycle", GPUS * (2 * CLIENTS + 1));
    println!("first cycle (initialisation, /proc of every process): {:.2?} CPU", figures.first);
    println!("later cycles: {:.3?} CPU each (mean of {CYCLES}), {:.3?} wall", figures.cpu, figures.wall);
    println!("resident: {} KiB", figures.resident_kib);
    if figures.cpu > LIMIT {
        println!("a cycle may cost {LIMIT:?}");
        std::process::exit(1);
    }
}

struct Figures {
    first: Duration,
    cpu: Duration,
    wall: Duration,
    resident_kib: u64,
}

async fn measure(settings: Settings) -> Figures {
    let (outbox, mut queue) = Outbox::new(Clock::new());
    let (stop, shutdown) = Shutdown::new();
    let source = tokio::spawn(nvml::run(settings, Poke::default(), outbox, Telemetry::new(), None, shutdown));
    let mut reports = 0;
    let mut figures =
        Figures { first: Duration::ZERO, cpu: Duration::ZERO, wall: Duration::ZERO, resident_kib: 0 };
    let (mut cpu, mut started) = (Duration::ZERO, Instant::now());
    while let Some(batch) = queue.recv().await {
        for event in batch {
            let EventKind::Gpus(report) = event.kind else { continue };
            let listed: usize =
                report.gpus.iter().filter_map(|gpu| gpu.mps_clients.as_ref().map(Vec::len)).sum();
            assert_eq!(listed, (GPUS * CLIENTS) as usize, "every client is listed");
            reports += 1;
            if reports == 1 {
                figures.first = poll_cpu();
            } else if reports == CYCLES {
                (cpu, started) = (poll_cpu(), Instant::now());
            }
        }
        if reports >= 2 * CYCLES {
            break;
        }
    }
    figures.cpu = poll_cpu().saturating_sub(cpu) / (reports - CYCLES);
    figures.wall = started.elapsed() / (reports - CYCLES);
    figures.resident_kib = resident_kib();
    stop.send_replace(true);
    source.await.expect("no panic").expect("threads start");
    figures
}

/// CPU time of the poll thread.
fn poll_cpu() -> Duration {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux").flatten();
    let of_poll = tasks
        .map(|task| task.path())
        .find(|path| std::fs::read_to_string(path.join("comm")).is_ok_and(|name| name.trim() == "nvml-poll"));
    let line =
        std::fs::read_to_string(of_poll.expect("the thread runs").join("schedstat")).expect("schedstat");
    Duration::from_nanos(line.split(' ').next().and_then(|field| field.parse().ok()).expect("nanoseconds"))
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// GPUs with a server and its clients, which are in both lists, as the worst case has it.
fn script(folder: &Path) -> String {
    let mut script = String::from("driver 580.65.06\n");
    for gpu in 0..GPUS {
        let bus = 0x10 + gpu;
        let _infallible = writeln!(
            script,
            "gpu index={gpu} uuid=GPU-{gpu:08x}-0000-4000-8000-000000000000 pci=0000:{bus:02x}:00.0 mode=exclusive_process"
        );
        process(folder, 90_000, "nvidia-cuda-mps");
        let _infallible = writeln!(script, "compute gpu={gpu} pid=90000 memory=500000000");
        for client in 0..CLIENTS {
            let pid = 100_000 + gpu * 1000 + client;
            process(folder, pid, "train");
            let _infallible = writeln!(script, "compute gpu={gpu} pid={pid} memory=1000000000");
            let _infallible = writeln!(script, "mps gpu={gpu} pid={pid} memory=1000000000");
        }
    }
    script
}

fn process(folder: &Path, pid: u32, comm: &str) {
    let process = folder.join("proc").join(pid.to_string());
    std::fs::create_dir_all(&process).expect("a folder");
    let zeros = "0 ".repeat(16);
    std::fs::write(process.join("stat"), format!("{pid} ({comm}) S {zeros}1 0 5000 0\n")).expect("a file");
}
