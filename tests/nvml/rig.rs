//! The NVML source on the stand-in library, loaded as NVIDIA's would be, with a proc tree and clocks of its own.

use std::path::{Path, PathBuf};
use std::time::Duration;

use mps_exporter::event::{Event, EventKind, GpuReport, SourceName, Xid};
use mps_exporter::source::nvml::{self, Poke, Settings};
use mps_exporter::source::{Outbox, Shutdown};
use mps_exporter::telemetry::Telemetry;
use mps_exporter::time::Clock;
use tempfile::TempDir;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, timeout};

/// Longer than anything here may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// A GPU that is plugged in later: it makes the source ask what it asks but once, and register for events anew.
pub const THIRD: &str = "gpu index=2 uuid=GPU-cccc pci=0000:af:00.0\n";
/// What makes it fall back to older lists.
pub const NO_V3: &str = "error nvmlDeviceGetMPSComputeRunningProcesses_v3 13\n\
                         error nvmlDeviceGetComputeRunningProcesses_v3 13\n";
/// And to the oldest ones.
pub const NO_V2: &str = "error nvmlDeviceGetMPSComputeRunningProcesses_v2 13\n\
                         error nvmlDeviceGetComputeRunningProcesses_v2 13\n";

/// A library with its script, and a proc tree without processes.
pub struct Folder(TempDir);

impl Folder {
    /// With the whole library.
    pub fn new() -> Folder {
        Folder::with(&[])
    }

    /// With a library that lacks these symbols.
    fn with(missing: &[&str]) -> Folder {
        let folder = Folder(tempfile::tempdir().unwrap());
        std::fs::write(folder.library(), without(missing)).unwrap();
        std::fs::create_dir_all(folder.proc()).unwrap();
        folder
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn library(&self) -> PathBuf {
        self.path().join("libnvidia-ml.so.1")
    }

    pub fn proc(&self) -> PathBuf {
        self.path().join("proc")
    }

    /// Replaces the script.
    pub fn script(&self, text: &str) {
        let new = self.path().join("new-script");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, self.path().join("libnvidia-ml.so.1.script")).unwrap();
    }

    /// The statement that has calls noted.
    pub fn trace(&self) -> String {
        format!("trace {}\n", self.path().join("calls").display())
    }

    /// Functions called since the script said so, and the threads that did.
    pub fn calls(&self) -> Vec<(String, String)> {
        let text = std::fs::read_to_string(self.path().join("calls")).unwrap_or_default();
        let call = |line: &str| line.split_once(' ').map(|(call, thread)| (call.into(), thread.into()));
        text.lines().filter_map(call).collect()
    }

    /// Puts the driver's files in place, with those of the GPU that `GPUS` has at 3b.
    pub fn load_driver(&self) {
        let gpu = self.proc().join("driver/nvidia/gpus/0000:3b:00.0");
        std::fs::create_dir_all(&gpu).unwrap();
        std::fs::write(gpu.join("information"), "GPU UUID: \t GPU-aaaa\nBus Location: \t 0000:3b:00.0\n")
            .unwrap();
        std::fs::write(self.proc().join("driver/nvidia/version"), "NVRM version\n").unwrap();
    }

    /// Takes them away.
    pub fn unload_driver(&self) {
        std::fs::remove_dir_all(self.proc().join("driver")).unwrap();
    }
}

/// The source, running.
pub struct Rig {
    pub folder: Folder,
    queue: mpsc::Receiver<Vec<Event>>,
    backlog: std::collections::VecDeque<EventKind>,
    stop: watch::Sender<bool>,
    source: tokio::task::JoinHandle<std::io::Result<Option<nvml::Left>>>,
    pub poke: Poke,
}

/// How to set it up.
pub struct Setup<'s> {
    pub script: &'s str,
    /// Symbols that the library lacks.
    pub missing: &'s [&'s str],
    pub interval: Duration,
    /// Whether the driver's files are there.
    pub has_driver: bool,
    /// Another library than the stand-in.
    pub library: Option<PathBuf>,
}

impl Default for Setup<'_> {
    fn default() -> Self {
        let interval = Duration::from_millis(50);
        Setup { script: "", missing: &[], interval, has_driver: true, library: None }
    }
}

impl Rig {
    /// The whole library with this script.
    pub fn new(script: &str) -> Rig {
        Rig::with(&Setup { script, ..Setup::default() })
    }

    pub fn with(setup: &Setup<'_>) -> Rig {
        let folder = Folder::with(setup.missing);
        folder.script(setup.script);
        if setup.has_driver {
            folder.load_driver();
        }
        let settings = Settings {
            library: setup.library.clone().unwrap_or_else(|| folder.library()),
            proc: folder.proc(),
            module: folder.path().join("no-module"),
            interval: setup.interval,
            min_spacing: Duration::from_millis(5),
            event_wait: Duration::from_millis(100),
            stuck_after: Duration::from_millis(250),
            backoff: (Duration::from_millis(50), Duration::from_millis(400)),
        };
        let (outbox, queue) = Outbox::new(Clock::new());
        let (stop, shutdown) = Shutdown::new();
        let poke = Poke::default();
        let source =
            tokio::spawn(nvml::run(settings, poke.clone(), outbox, Telemetry::new(), None, shutdown));
        Rig { folder, queue, backlog: [].into(), stop, source, poke }
    }

    /// Replaces the script.
    pub fn script(&self, text: &str) {
        self.folder.script(text);
    }

    /// Gives a pid to a program.
    pub fn process(&self, pid: u32, comm: &str, exe: &str) {
        let process = self.folder.proc().join(pid.to_string());
        std::fs::create_dir_all(&process).unwrap();
        let zeros = "0 ".repeat(16);
        std::fs::write(process.join("stat"), format!("{pid} ({comm}) S {zeros}1 0 5000 0\n")).unwrap();
        std::os::unix::fs::symlink(exe, process.join("exe")).unwrap();
    }

    /// Functions called so far, of those since the script said `trace`.
    pub fn calls(&self) -> Vec<String> {
        self.folder.calls().into_iter().map(|(call, _thread)| call).collect()
    }

    /// The statement that has calls noted.
    pub fn trace(&self) -> String {
        self.folder.trace()
    }

    /// The next thing that the source says which `wanted` makes something of.
    pub async fn find<T>(&mut self, what: &str, mut wanted: impl FnMut(EventKind) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            while let Some(kind) = self.backlog.pop_front() {
                if let Some(found) = wanted(kind) {
                    return found;
                }
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let batch = timeout(left, self.queue.recv()).await;
            let batch = batch.unwrap_or_else(|_| panic!("no {what} came")).expect("the source has ended");
            self.backlog.extend(batch.into_iter().map(|event| event.kind));
        }
    }

    /// Forgets what was said so far.
    pub fn skip(&mut self) {
        self.backlog.clear();
        while self.queue.try_recv().is_ok() {}
    }

    /// The next report.
    pub async fn report(&mut self) -> GpuReport {
        self.find("report", report).await
    }

    /// The next report that fits.
    pub async fn report_where(&mut self, what: &str, fits: impl Fn(&GpuReport) -> bool) -> GpuReport {
        self.find(what, |kind| report(kind).filter(&fits)).await
    }

    /// The next Xid.
    pub async fn xid(&mut self) -> Xid {
        let xid = |kind| if let EventKind::Xid(xid) = kind { Some(xid) } else { None };
        self.find("Xid", xid).await
    }

    /// Until the source says that it is down; the reason.
    pub async fn down(&mut self) -> String {
        self.find("failure", |kind| health(kind)?.err()).await
    }

    /// Until the source is down for a reason with these words.
    pub async fn down_for(&mut self, words: &str) -> String {
        let fits = |kind| health(kind)?.err().filter(|reason| reason.contains(words));
        self.find(&format!("failure with {words:?}"), fits).await
    }

    /// Until the source says that it works.
    pub async fn up(&mut self) {
        self.find("success", |kind| health(kind)?.ok()).await;
    }

    /// Everything that is said within this time.
    pub async fn said_within(&mut self, time: Duration) -> Vec<EventKind> {
        let deadline = Instant::now() + time;
        let mut said: Vec<EventKind> = self.backlog.drain(..).collect();
        while let Ok(Some(batch)) =
            timeout(deadline.saturating_duration_since(Instant::now()), self.queue.recv()).await
        {
            said.extend(batch.into_iter().map(|event| event.kind));
        }
        said
    }

    /// Waits until the events thread waits for events of every GPU, with nothing left to register.
    pub async fn settle(&self, script: &str) {
        self.script(&format!("{}{script}", self.trace()));
        // The first cycle may make it register once more, after the wait that it is in.
        while self.calls().iter().filter(|call| *call == "nvmlEventSetWait_v2").count() < 3 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Stops the source and waits for it.
    pub async fn stop(self) {
        self.stop.send_replace(true);
        timeout(PATIENCE, self.source).await.expect("it ends").unwrap().unwrap();
    }
}

fn report(kind: EventKind) -> Option<GpuReport> {
    if let EventKind::Gpus(report) = kind { Some(report) } else { None }
}

/// What a health event says.
pub fn health(kind: EventKind) -> Option<Result<(), String>> {
    match kind {
        EventKind::Source(health) => {
            assert_eq!(health.source, SourceName::Nvml);
            Some(health.state.map_err(|reason| reason.to_string()))
        }
        _ => None,
    }
}

/// The stand-in without these symbols: their names in the file are made others.
fn without(missing: &[&str]) -> Vec<u8> {
    let mut library = mps_exporter::source::nvml::stand_in::library().expect("built with it").to_vec();
    for symbol in missing {
        let name = format!("\0{symbol}\0");
        let finder = memchr::memmem::Finder::new(name.as_bytes());
        let places: Vec<usize> = finder.find_iter(&library).collect();
        assert!(!places.is_empty(), "{symbol} is no symbol of the stand-in");
        for place in places {
            library[place + 1] = b'x';
        }
    }
    library
}
