//! The control source against NVIDIA's own daemons.

#![allow(clippy::unwrap_used)]

#[path = "support/mps/mod.rs"]
mod mps;

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use mps::bed::{Bed, PATIENCE, is_root, kill, program, versions, wait_for};
use mps_exporter::config::{Config, Control, ControlClient};
use mps_exporter::event::{
    DaemonSite, Event, EventKind, Liveness, LockState, LogFile, LogPlace, Look, LookError, ServerStatus,
};
use mps_exporter::identity::DeviceName;
use mps_exporter::source::control::answers::Depth;
use mps_exporter::source::control::discovery::Discovery;
use mps_exporter::source::control::liveness::lock_state;
use mps_exporter::source::control::{ControlWatch, LookHandle, binary, wire};
use mps_exporter::source::mps_log::reader::LineReader;
use mps_exporter::source::process::proc::ProcRoot;
use mps_exporter::source::{Outbox, Shutdown};
use mps_exporter::telemetry::Telemetry;
use mps_exporter::time::Clock;
use rustix::process::Signal;
use tokio::sync::{mpsc, watch};

mps::entries!();

/// A [`ControlWatch`] of a bed, and what it tells.
struct Watched {
    events: mpsc::Receiver<Vec<Event>>,
    seen: Vec<EventKind>,
    look: LookHandle,
    _stop: watch::Sender<bool>,
}

impl Watched {
    fn new(bed: &Bed, settings: &Control) -> Watched {
        let site = DaemonSite {
            name: "default".into(),
            pipe_directory: bed.pipe().into(),
            log_directory: bed.log(),
            root: PathBuf::new(),
            process: None,
            started_at: None,
            log: LogPlace::Files,
            visible_devices: None,
            is_configured: true,
        };
        let (outbox, events) = Outbox::new(Clock::new());
        let (stop, shutdown) = Shutdown::new();
        let (control, look) =
            ControlWatch::new(site, settings, ProcRoot::new("/proc"), outbox, Telemetry::new(), None);
        tokio::spawn(control.run(shutdown));
        Watched { events, seen: Vec::new(), look, _stop: stop }
    }

    /// The next event that is `wanted`; the others are dropped.
    async fn next<T>(&mut self, wanted: impl Fn(&EventKind) -> Option<T>) -> T {
        let search = async {
            loop {
                while !self.seen.is_empty() {
                    if let Some(found) = wanted(&self.seen.remove(0)) {
                        return found;
                    }
                }
                self.seen.extend(self.events.recv().await.unwrap().into_iter().map(|event| event.kind));
            }
        };
        tokio::time::timeout(PATIENCE, search).await.expect("waited in vain for an event")
    }

    async fn liveness(&mut self, wanted: impl Fn(&Liveness) -> bool) -> Liveness {
        self.next(|event| match event {
            EventKind::Liveness(_, liveness) => Some(liveness.clone()).filter(|liveness| wanted(liveness)),
            _ => None,
        })
        .await
    }

    async fn looked(&mut self) -> Result<Look, LookError> {
        self.next(|event| match event {
            EventKind::Look(_, result) => Some(result.clone()),
            _ => None,
        })
        .await
    }
}

fn is_held(liveness: &Liveness) -> bool {
    matches!(liveness.state, LockState::Held(_))
}

/// One session, as a user of ours would hold it.
async fn look(bed: &Bed) -> Look {
    wire::look(bed.pipe(), Depth::Full, PATIENCE).await.unwrap()
}

#[tokio::test]
async fn every_version_tells_servers_states_clients_and_contexts() {
    for version in versions() {
        let mut bed = Bed::start(&version);
        let idle = look(&bed).await;
        assert_eq!((idle.servers.len(), idle.default_active_thread_percentage), (0, Some(100.0)));

        let server = bed.start_server(0);
        let alone = look(&bed).await;
        assert_eq!(alone.servers[0].pid, server);
        assert_eq!(alone.servers[0].clients.as_deref(), Some([].as_slice()));
        assert_eq!(alone.servers[0].contexts.as_deref(), Some([].as_slice()));

        let client = bed.client(0).connected();
        let other = std::process::id();
        bed.order(&format!("context {other} 7 MIG-cb1213a3-d6a4-be7f-1122-334455667799"));
        let crowded =
            wait_for_look(&bed, |look| look.servers[0].contexts.as_ref().is_some_and(|all| all.len() == 2));
        let crowded = crowded.await;
        let mut clients = crowded.servers[0].clients.clone().unwrap();
        clients.sort_unstable();
        let mut expected = [client.pid, other];
        expected.sort_unstable();
        assert_eq!(clients, expected, "{version}");
        let contexts = crowded.servers[0].contexts.as_ref().unwrap();
        let of = |pid| contexts.iter().find(|context| context.pid == pid).unwrap();
        assert_eq!(of(client.pid).device, DeviceName::UuidPrefix("GPU-cb1213a3-d6a4-be7f".into()));
        assert_eq!(of(other).device, DeviceName::UuidPrefix("MIG-cb1213a3-d6a4-be7f".into()));
        assert_eq!(of(other).context, 7);
        assert!(of(other).command.as_ref().unwrap().starts_with("control_daemon-"));
        assert!(of(other).namespace.is_some());

        let knows_states = !version.starts_with("535.");
        assert_eq!(crowded.servers[0].status, knows_states.then_some(ServerStatus::Active));
        bed.order("fault");
        let expected = knows_states.then_some(ServerStatus::Fault);
        wait_for_look(&bed, |look| look.servers[0].status == expected).await;

        client.kill();
        wait_for_look(&bed, |look| look.servers[0].clients.as_deref() == Some(&[other])).await;
        bed.order("exit 1");
        wait_for_look(&bed, |look| look.servers.is_empty()).await;

        // What a real daemon wrote meanwhile is in the grammar, our own sessions included.
        for (file, text) in [(LogFile::Control, bed.control_log()), (LogFile::Server, bed.server_log())] {
            let mut reader = LineReader::new(file);
            // Our server has no shared memory whose name could stand in that line.
            for line in text.split_inclusive('\n').filter(|line| !line.ends_with("Removed Shm file at \n")) {
                reader.read(line.as_bytes(), |_, _| {});
                assert_eq!(reader.take_counts().unrecognized, 0, "{version}: {line}");
            }
        }
    }
}

async fn wait_for_look(bed: &Bed, wanted: impl Fn(&Look) -> bool) -> Look {
    let begun = std::time::Instant::now();
    loop {
        let look = look(bed).await;
        if wanted(&look) {
            return look;
        }
        assert!(begun.elapsed() < PATIENCE, "waited in vain; last: {look:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn nvidias_own_program_gives_the_same_answers() {
    for version in versions() {
        let mut bed = Bed::start(&version);
        bed.start_server(0);
        let _client = bed.client(0).connected();
        let ours =
            wait_for_look(&bed, |look| look.servers[0].clients.as_ref().is_some_and(|all| all.len() == 1))
                .await;
        let theirs = binary::look(&program(&version), bed.pipe(), Depth::Full, PATIENCE).await.unwrap();
        assert_eq!(theirs.servers, ours.servers, "{version}");
        assert_eq!(theirs.protocol.as_deref(), Some("binary"));
    }
}

#[tokio::test]
async fn nothing_but_the_sessions_is_added_to_the_log() {
    for version in versions() {
        let bed = Bed::start(&version);
        bed.start_server(0);
        let (before, sessions) = (bed.control_log(), bed.sessions());
        // Liveness alone writes nothing at all.
        let mut silent = Watched::new(&bed, &Control { client: ControlClient::Off, ..Control::default() });
        silent.liveness(is_held).await;
        tokio::time::sleep(Duration::from_millis(1500)).await;
        assert_eq!(bed.control_log(), before, "{version}");
        drop(silent);

        // One session on the first look, and one for any number of requests that come together.
        let mut watched = Watched::new(&bed, &Control::default());
        watched.looked().await.unwrap();
        for _ in 0..50 {
            watched.look.look_now();
        }
        watched.looked().await.unwrap();
        tokio::time::sleep(Duration::from_millis(600)).await;
        assert_eq!(bed.sessions(), sessions + 2, "{version}");

        // A look at the state, which is what each interval costs.
        let before = bed.control_log().len();
        wire::look(bed.pipe(), Depth::State, PATIENCE).await.unwrap();
        wait_for("the end of the session", || bed.control_log().ends_with("UI closed\n").then_some(()));
        let cost = bed.control_log().len() - before;
        println!("{version}: a look at the state adds {cost} bytes to control.log");
        assert!(cost < 1_000_000 / (24 * 60), "{cost}");
    }
}

#[tokio::test]
async fn a_killed_daemon_is_stale_and_a_restarted_one_is_looked_at_again() {
    for version in versions() {
        let bed = Bed::start(&version);
        let mut watched = Watched::new(&bed, &Control::default());
        let first = watched.liveness(is_held).await;
        assert_eq!(first.pid_file, if version.starts_with("535.") { None } else { bed.daemon() });
        watched.looked().await.unwrap();

        let killed = std::time::Instant::now();
        bed.kill_daemon(Signal::KILL);
        watched.liveness(|liveness| liveness.state == LockState::Stale).await;
        assert!(killed.elapsed() < Duration::from_millis(900), "{:?}", killed.elapsed());

        bed.start_daemon();
        let second = watched.liveness(is_held).await;
        assert_ne!(second.state, first.state);
        // Not after the interval, but at once.
        watched.looked().await.unwrap();

        bed.tell("quit");
        watched.liveness(|liveness| liveness.state == LockState::Absent).await;
    }
}

#[tokio::test]
async fn a_daemon_that_has_just_started_is_left_to_those_who_set_it_up() {
    for version in versions() {
        let bed = Bed::start(&version);
        let mut watched = Watched::new(&bed, &Control::default());
        watched.liveness(is_held).await;
        watched.look.look_now();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(bed.sessions(), 0, "{version}");
        watched.looked().await.unwrap();
    }
}

#[tokio::test]
async fn a_session_beside_another_is_turned_away_and_comes_again() {
    for version in versions() {
        let mut bed = Bed::start(&version);
        let mut other = bed.open_session();
        let mut watched = Watched::new(&bed, &Control::default());
        let error = watched.looked().await.unwrap_err();
        assert!(matches!(&error, LookError::Refused(_)), "{version}: {error}");
        assert!(error.to_string().contains("another user interface is open"), "{version}: {error}");
        drop(other.stdin.take());
        other.wait().unwrap();
        watched.looked().await.unwrap();
        // Clients are served beside a session.
        let mut open = bed.open_session();
        bed.client(0).connected();
        drop(open.stdin.take());
        open.wait().unwrap();
    }
}

#[tokio::test]
async fn a_hung_server_makes_the_daemon_wedged_and_is_never_asked_twice() {
    for version in versions() {
        let bed = Bed::start(&version);
        bed.start_server(0);
        let sessions = bed.sessions();
        bed.order("hang");
        let settings = Control { timeout: Duration::from_millis(150), ..Control::default() };
        let mut watched = Watched::new(&bed, &settings);
        for unanswered in 1..=3 {
            assert!(matches!(watched.looked().await, Err(LookError::Timeout(_))), "{version}");
            watched.look.look_now(); // does not shorten the wait
            let liveness = watched.liveness(|liveness| liveness.unanswered == unanswered).await;
            assert!(is_held(&liveness));
        }
        // The daemon took one session. It stands in it, with the one question that hangs.
        assert_eq!(bed.sessions(), sessions + 1, "{version}");
        let log = bed.control_log();
        let asked: Vec<&str> = log
            .rsplit("NEW UI")
            .next()
            .unwrap()
            .lines()
            .filter_map(|line| line.split("Cmd:").nth(1))
            .collect();
        let hung = if version.starts_with("535.") { "get_client_list" } else { "get_server_status" };
        assert!(asked.last().unwrap().starts_with(hung), "{version}: {asked:?}");

        // We left it no harm: as soon as its server answers it serves us, and everybody else.
        bed.order("resume");
        watched.liveness(|liveness| liveness.unanswered == 0).await;
        watched.look.look_now();
        assert_eq!(watched.looked().await.unwrap().servers.len(), 1, "{version}");
        assert_eq!(bed.ask("get_default_active_thread_percentage").trim(), "100.0");
    }
}

#[tokio::test]
async fn a_path_too_long_for_a_socket_is_reached() {
    for version in versions() {
        let bed = Bed::start(&version);
        let detour = "/proc/self/root".repeat(8);
        let pipe = Path::new(&detour).join(bed.pipe().strip_prefix("/").unwrap());
        assert!(pipe.as_os_str().len() > 120);
        wire::look(&pipe, Depth::Full, PATIENCE).await.unwrap();
        let state = lock_state(&pipe, &ProcRoot::new("/proc")).unwrap();
        assert!(matches!(state, LockState::Held(process) if Some(process.pid) == bed.daemon()));
    }
}

/// Looks at the daemon of a bed as whoever runs this.
#[tokio::test]
#[ignore = "run by an_unprivileged_user_may_look, as another user"]
async fn mps_looker() {
    let pipe = PathBuf::from(std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").unwrap());
    let look = wire::look(&pipe, Depth::Full, PATIENCE).await.unwrap();
    let state = lock_state(&pipe, &ProcRoot::new("/proc")).unwrap();
    println!("saw {} server, {}", look.servers.len(), matches!(state, LockState::Held(_)));
}

#[test]
fn an_unprivileged_user_may_look() {
    for version in versions().into_iter().filter(|_| is_root()) {
        let bed = Bed::start(&version);
        bed.start_server(0);
        let output = Command::new(bed.own_binary())
            .args(["--exact", "mps_looker", "--ignored", "--nocapture"])
            .env("CUDA_MPS_PIPE_DIRECTORY", bed.pipe())
            .uid(65534)
            .gid(65534)
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.contains("saw 1 server, true"), "{version}: {output}");
    }
}

/// A discovery that looks once a second, and the daemons of this test among what it finds.
struct Discovered {
    sites: watch::Receiver<Vec<DaemonSite>>,
    _events: mpsc::Receiver<Vec<Event>>,
    _stop: watch::Sender<bool>,
}

impl Discovered {
    fn new() -> Discovered {
        let mut config = Config::default();
        config.discovery.interval = Duration::from_secs(1);
        let (outbox, mut events) = Outbox::new(Clock::new());
        let (discovery, _, sites) = Discovery::new(&config, outbox, Vec::new());
        let (stop, shutdown) = Shutdown::new();
        tokio::spawn(discovery.run(shutdown));
        let (forward, kept) = mpsc::channel(1024);
        tokio::spawn(async move {
            while let Some(batch) = events.recv().await
                && forward.send(batch).await.is_ok()
            {}
        });
        Discovered { sites, _events: kept, _stop: stop }
    }

    async fn find(&mut self, wanted: impl Fn(&DaemonSite) -> bool) -> DaemonSite {
        let found = self.sites.wait_for(|sites| sites.iter().any(&wanted));
        let sites =
            tokio::time::timeout(PATIENCE, found).await.expect("waited in vain for a daemon").unwrap();
        sites.iter().find(|site| wanted(site)).unwrap().clone()
    }
}

#[tokio::test]
async fn a_running_daemon_is_discovered_and_followed_through_a_restart() {
    for version in versions() {
        let mut bed = Bed::start(&version);
        let mut discovered = Discovered::new();
        let pipe = bed.pipe().to_owned();
        let first = discovered.find(|site| site.pipe_directory == pipe).await;
        assert_eq!((first.log_directory.clone(), first.root.clone()), (bed.log(), PathBuf::new()));
        assert_eq!(first.process.map(|process| process.pid), bed.daemon());
        assert!(first.started_at.is_some());
        assert_eq!(first.log, LogPlace::Files);

        bed.kill_daemon(Signal::KILL);
        let stale = discovered.find(|site| site.pipe_directory == pipe && site.process.is_none()).await;
        assert_eq!((&stale.name, &stale.log_directory), (&first.name, &first.log_directory));

        let output = bed.directory().join("output");
        bed.start_in_foreground(&output);
        let second = discovered.find(|site| site.pipe_directory == pipe && site.process.is_some()).await;
        assert_eq!(second.name, first.name);
        assert_ne!(second.process, first.process);
        assert_eq!(second.log, LogPlace::Merged(output));
    }
}

/// Whether we may make mount namespaces. Prints why not: containers are often forbidden to.
fn may_unshare() -> bool {
    let tried = Command::new("unshare").args(["--mount", "true"]).stderr(Stdio::null()).status();
    let may = tried.is_ok_and(|status| status.success());
    if !may {
        eprintln!("skipped: mount namespaces may not be made here");
    }
    may
}

#[tokio::test]
async fn a_daemon_of_another_mount_namespace_is_discovered_and_reached() {
    for version in versions().into_iter().filter(|_| may_unshare()) {
        let bed = Bed::start(&version);
        bed.kill_daemon(Signal::TERM);
        // The same paths name other directories in its namespace.
        let script = format!(
            "mount -t tmpfs none {0} && mkdir {0}/pipe {0}/log && exec {1} -d",
            bed.directory().display(),
            program(&version).display()
        );
        let status = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-c", &script])
            .envs([("CUDA_MPS_PIPE_DIRECTORY", bed.pipe().to_owned()), ("CUDA_MPS_LOG_DIRECTORY", bed.log())])
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert!(status.success());
        let mut discovered = Discovered::new();
        let pipe = bed.pipe().to_owned();
        let site = discovered.find(|site| site.pipe_directory == pipe && site.process.is_some()).await;
        let pid = site.process.unwrap().pid;
        assert_eq!(site.root, Path::new("/proc").join(pid.to_string()).join("root"));
        assert_eq!(site.log_directory, bed.log());
        assert!(site.log_path().join("control.log").exists());
        wire::look(&site.pipe_path(), Depth::Full, PATIENCE).await.unwrap();

        // With the namespace goes everything that could be watched.
        kill(pid, Signal::KILL);
        let gone = discovered.sites.wait_for(|sites| sites.iter().all(|site| site.pipe_directory != pipe));
        tokio::time::timeout(PATIENCE, gone).await.expect("the daemon stays").unwrap();
    }
}
