//! A control daemon of NVIDIA's in a directory of its own.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use mps_exporter::sys::lock::{Holder, holder};
use rustix::process::{Pid, Signal, kill_process};

use super::BED;

/// How long anything in a test may take.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// The versions of the daemon to test against. Empty, with the reason printed, where they cannot be had; in CI, and
/// with `MPS_DAEMONS_REQUIRED` set, that is a failure.
pub fn versions() -> Vec<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/get-mps-daemons");
    let fetched = Command::new(script).arg(daemons()).output().unwrap();
    if !fetched.status.success() {
        let reason = String::from_utf8_lossy(&fetched.stderr).into_owned();
        let is_required = ["CI", "MPS_DAEMONS_REQUIRED"].iter().any(|name| std::env::var_os(name).is_some());
        assert!(!is_required, "{reason}");
        eprintln!("skipped: {reason}");
        return Vec::new();
    }
    let mut versions: Vec<String> = std::fs::read_dir(daemons())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| !name.starts_with('.'))
        .collect();
    versions.sort();
    assert!(!versions.is_empty());
    versions
}

/// Whether the tests may take other users. Prints why not.
pub fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("skipped: needs root, to take other users");
    }
    is_root
}

fn daemons() -> PathBuf {
    std::env::var_os("MPS_DAEMONS")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target/mps"), PathBuf::from)
}

/// The program of one version.
pub fn program(version: &str) -> PathBuf {
    daemons().join(version).join("nvidia-cuda-mps-control")
}

/// A daemon and its directories. Everything is ended by pid when it is dropped.
pub struct Bed {
    directory: tempfile::TempDir,
    pub version: String,
    pipe: PathBuf,
    /// Clients and the daemon's children of `-f`.
    children: Vec<Child>,
}

impl Bed {
    /// Starts a daemon with `-d`.
    pub fn start(version: &str) -> Bed {
        Bed::start_in(version, "pipe")
    }

    /// Starts a daemon whose pipe directory has this name.
    pub fn start_in(version: &str, pipe: &str) -> Bed {
        let directory = tempfile::tempdir().unwrap();
        let pipe = directory.path().join(pipe);
        let bed = Bed { pipe, directory, version: version.to_owned(), children: Vec::new() };
        let open = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        open(bed.directory.path(), 0o777);
        for path in [bed.pipe(), &bed.log(), &bed.directory.path().join("bin")] {
            std::fs::create_dir_all(path).unwrap();
        }
        open(bed.pipe(), 0o777);
        std::fs::write(bed.directory.path().join("servers"), "").unwrap();
        open(&bed.directory.path().join("servers"), 0o666);
        let server = bed.directory.path().join("bin/nvidia-cuda-mps-server");
        let binary = bed.own_binary();
        let script = format!(
            "#!/bin/sh\nexport {BED}='{}'\nexec '{}' --exact mps_server --ignored --nocapture >/dev/null 2>&1\n",
            bed.directory.path().display(),
            binary.display(),
        );
        std::fs::write(&server, script).unwrap();
        open(&server, 0o755);
        bed.start_daemon();
        bed
    }

    /// This test binary, at a path that other users can reach.
    pub fn own_binary(&self) -> PathBuf {
        let binary = std::env::current_exe().unwrap();
        let is_open =
            |path: &Path| path.metadata().is_ok_and(|meta| meta.permissions().mode() & 0o005 == 0o005);
        if binary.ancestors().all(is_open) {
            return binary;
        }
        let copy = self.directory.path().join("bin/test");
        if !copy.exists() {
            std::fs::copy(&binary, &copy).unwrap();
        }
        copy
    }

    /// A command of the daemon's program, with its environment.
    pub fn program(&self) -> Command {
        // The daemon ends a server that does not leave by a signal. Tests that run in the background of a shell have it
        // ignored, and so would the server.
        let mut command = Command::new("env");
        command.arg("--default-signal=HUP,INT,QUIT").arg(program(&self.version));
        command.env_clear().current_dir("/").env("PATH", self.path()).envs(self.environment());
        command
    }

    fn path(&self) -> String {
        format!("{}:/usr/bin:/bin", self.directory.path().join("bin").display())
    }

    fn environment(&self) -> [(&'static str, PathBuf); 2] {
        [("CUDA_MPS_PIPE_DIRECTORY", self.pipe().to_owned()), ("CUDA_MPS_LOG_DIRECTORY", self.log())]
    }

    /// Starts the daemon (again), and waits until it holds its lock and its sockets are there.
    pub fn start_daemon(&self) {
        let before = self.daemon();
        assert_eq!(before, None, "a daemon runs already");
        let status = self.program().arg("-d").stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap();
        assert!(status.success());
        wait_for("the daemon", || self.daemon().filter(|_| self.pipe().join("control").exists()));
    }

    /// The same daemon in the foreground, with its output in `output`.
    pub fn start_in_foreground(&mut self, output: &Path) {
        let file = std::fs::File::create(output).unwrap();
        let child = self
            .program()
            .arg("-f")
            .stdin(Stdio::null())
            .stdout(file.try_clone().unwrap())
            .stderr(file)
            .spawn()
            .unwrap();
        self.children.push(child);
        wait_for("the daemon", || self.daemon().filter(|_| self.pipe().join("control").exists()));
    }

    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub fn pipe(&self) -> &Path {
        &self.pipe
    }

    pub fn log(&self) -> PathBuf {
        self.directory.path().join("log")
    }

    /// The daemon's pid, by its lock.
    pub fn daemon(&self) -> Option<u32> {
        let lock = std::fs::File::open(self.pipe().join("control_lock")).ok()?;
        match holder(lock).unwrap()? {
            Holder::Process(pid) => Some(pid),
            Holder::Elsewhere => panic!("the daemon is in another pid namespace"),
        }
    }

    /// Ends the daemon by a signal, and waits until it is gone.
    pub fn kill_daemon(&self, signal: Signal) {
        let pid = self.daemon().unwrap();
        kill(pid, signal);
        wait_for("the daemon's end", || self.daemon().is_none().then_some(()));
    }

    /// Asks the daemon by NVIDIA's own program. That adds a session to control.log, if it is not turned away.
    pub fn ask(&self, command: &str) -> String {
        let mut child = self.program().stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        writeln!(child.stdin.take().unwrap(), "{command}").unwrap();
        let output = child.wait_with_output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    }

    /// Has the daemon do something: asks again while it turns us away, as it does beside somebody else's session.
    pub fn tell(&self, command: &str) {
        let heard = || self.control_log().matches(&format!("] Cmd:{command}\n")).count();
        let before = heard();
        wait_for("the daemon to hear a command", || {
            self.ask(command);
            (heard() > before).then_some(())
        });
    }

    /// Opens a session by NVIDIA's own program, which lasts until its input is closed.
    pub fn open_session(&self) -> Child {
        let sessions = self.sessions();
        let mut child = self.program().stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        writeln!(child.stdin.as_mut().unwrap(), "get_server_list").unwrap();
        wait_for("the session", || (self.sessions() > sessions).then_some(()));
        child
    }

    /// Has the daemon start a server for a user, and gives its pid.
    pub fn start_server(&self, uid: u32) -> u32 {
        self.tell(&format!("start_server -uid {uid}"));
        wait_for("a server", || {
            let log = self.control_log();
            let ready =
                log.lines().rev().find_map(|line| line.split("NEW SERVER ").nth(1)?.strip_suffix(": Ready"));
            ready.and_then(|pid| pid.parse().ok())
        })
    }

    /// What the newest server does from now on:
    /// `say TEXT` in server.log; `fault`, `recover`: what it answers for its state; `hang`, `resume`: when it is next asked
    /// something; `device UUID`: of clients that connect; `context PID ID UUID`: of a client that does not; `forget` those; `exit STATUS`.
    pub fn order(&self, order: &str) {
        let socket = UnixDatagram::unbound().unwrap();
        let place = self.directory.path().join("server.sock");
        wait_for("the server", || socket.send_to(order.as_bytes(), &place).ok());
    }

    /// What every new server does first.
    pub fn order_new_servers(&self, orders: &str) {
        std::fs::write(self.directory.path().join("orders"), orders).unwrap();
    }

    /// Starts a client of a user; it may have to wait for its server.
    pub fn client(&mut self, uid: u32) -> Client {
        let mut command = Command::new(self.own_binary());
        command.args(["--exact", "mps_client", "--ignored", "--nocapture"]);
        command.env_clear().envs(self.environment()).current_dir("/").uid(uid).gid(uid);
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(output.any(|line| line.unwrap().ends_with("waiting")), "the client cannot reach the daemon");
        let pid = child.id();
        self.children.push(child);
        Client { pid, output: Box::new(output) }
    }

    pub fn control_log(&self) -> String {
        read(self.log().join("control.log"))
    }

    pub fn server_log(&self) -> String {
        read(self.log().join("server.log"))
    }

    /// Sessions that the daemon has served, anybody's.
    pub fn sessions(&self) -> usize {
        self.control_log().lines().filter(|line| line.ends_with("] NEW UI")).count()
    }

    fn servers(&self) -> Vec<u32> {
        read(self.directory.path().join("servers")).lines().filter_map(|pid| pid.parse().ok()).collect()
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _already_dead = child.kill();
            let _status = child.wait();
        }
        if let Some(pid) = self.daemon() {
            kill(pid, Signal::KILL);
        }
        for pid in self.servers() {
            // A pid may have been given to another process since.
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let own = self.directory.path().as_os_str().as_encoded_bytes();
            if environment.windows(own.len()).any(|window| window == own) {
                kill(pid, Signal::KILL);
            }
        }
    }
}

/// A client of a [`Bed`], which ends it at the latest.
pub struct Client {
    pub pid: u32,
    output: Box<dyn Iterator<Item = std::io::Result<String>>>,
}

impl Client {
    /// Waits until a server has the client.
    pub fn connected(mut self) -> Client {
        assert!(self.output.any(|line| line.unwrap().ends_with("connected")), "the client was not served");
        self
    }

    pub fn kill(&self) {
        kill(self.pid, Signal::KILL);
    }
}

/// Sends a signal to a process that may have ended.
pub fn kill(pid: u32, signal: Signal) {
    let _already_dead = kill_process(Pid::from_raw(pid.try_into().unwrap()).unwrap(), signal);
}

/// Waits until there is something.
pub fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn read(path: impl AsRef<OsStr>) -> String {
    String::from_utf8_lossy(&std::fs::read(Path::new(path.as_ref())).unwrap_or_default()).into_owned()
}
