//! The exporter's own binary, running.

#![allow(dead_code)]

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a change may take to be seen.
const PATIENCE: Duration = Duration::from_secs(20);

/// A running exporter. It is killed when dropped.
pub struct Program {
    child: Child,
    config: PathBuf,
    uid: Option<u32>,
    address: String,
}

impl Program {
    /// With this configuration, which is kept in this directory, as this user or as whoever runs the test.
    pub fn start_with(directory: &Path, config: &str, uid: Option<u32>) -> Program {
        std::fs::create_dir_all(directory).unwrap();
        if uid.is_some() {
            std::os::unix::fs::chown(directory, uid, uid).unwrap();
        }
        let path = directory.join("config.yml");
        std::fs::write(&path, config).unwrap();
        let (child, address) = spawn(&path, uid);
        Program { child, config: path, uid, address }
    }

    /// Its state directory.
    pub fn state(&self) -> &Path {
        self.config.parent().unwrap()
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.config.with_extension("log")).unwrap_or_default()
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Writes another configuration and asks for it to be read.
    pub fn reconfigure(&self, config: &str) {
        std::fs::write(&self.config, config).unwrap();
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::HUP).unwrap();
    }

    /// The configuration as it was written last.
    pub fn config(&self) -> String {
        std::fs::read_to_string(&self.config).unwrap()
    }

    /// After [`Program::kill`], with the same state.
    pub fn start_again(&mut self) {
        (self.child, self.address) = spawn(&self.config, self.uid);
    }

    /// The page, by `Accept`.
    pub fn scrape(&self, accept: &str) -> String {
        get(&self.address, "/metrics", accept)
    }

    /// An API answer.
    pub fn json(&self, path: &str) -> serde_json::Value {
        serde_json::from_str(&get(&self.address, path, "application/json")).unwrap()
    }

    /// How many incidents there are.
    pub fn incidents(&self) -> usize {
        self.json("/api/v1/incidents")["incidents"].as_array().unwrap().len()
    }

    /// The value of a series; `NAME` stands for the bed's daemon.
    pub fn value(&self, series: &str) -> Option<f64> {
        let series = series.replace("NAME", "bed");
        let wanted = parts(&series);
        let page = self.scrape("text/plain");
        let mut lines = page.lines().filter(|line| !line.starts_with('#'));
        let line =
            lines.find(|line| parts(line.rsplit_once(' ').map_or("", |(series, _)| series)) == wanted)?;
        line.rsplit_once(' ').map(|(_, value)| value.parse().unwrap())
    }

    /// Waits until a series has this value.
    #[track_caller]
    pub fn expect(&self, series: &str, value: f64) {
        self.wait(series, |seen| seen.is_some_and(|seen| (seen - value).abs() < 1e-9), &format!("= {value}"));
    }

    /// Waits until a series is at least this.
    #[track_caller]
    pub fn expect_at_least(&self, series: &str, value: f64) {
        self.wait(series, |seen| seen.is_some_and(|seen| seen >= value), &format!(">= {value}"));
    }

    /// The same for a series of the bed's fault domain on this GPU.
    #[track_caller]
    pub fn expect_domain(&self, name: &str, uuid: &str, more: &str, value: f64) {
        self.expect(&of_domain(name, uuid, more), value);
    }

    /// The value of such a series.
    pub fn domain_value(&self, name: &str, uuid: &str, more: &str) -> Option<f64> {
        self.value(&of_domain(name, uuid, more))
    }

    #[track_caller]
    fn wait(&self, series: &str, is_it: impl Fn(Option<f64>) -> bool, wanted: &str) {
        let began = Instant::now();
        loop {
            let seen = self.value(series);
            if is_it(seen) {
                return;
            }
            assert!(
                began.elapsed() <= PATIENCE,
                "{series} is {seen:?}, wanted {wanted}; the page:\n{}\nthe log:\n{}",
                self.scrape("text/plain"),
                self.log()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until a series has stood still for a while.
    pub fn settle(&self, series: &str) -> f64 {
        let mut last = (None, Instant::now());
        let began = Instant::now();
        loop {
            let seen = self.value(series);
            if seen != last.0 {
                last = (seen, Instant::now());
            } else if let Some(value) = seen.filter(|_| last.1.elapsed() > Duration::from_millis(1500)) {
                return value;
            }
            assert!(began.elapsed() < PATIENCE, "{series} does not settle: {seen:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// `promtool check metrics` has nothing to say about the page.
    #[track_caller]
    pub fn is_clean(&self) {
        let mut promtool = match Command::new("promtool")
            .args(["check", "metrics"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
        {
            Ok(promtool) => promtool,
            Err(error) if std::env::var_os("CI").is_none() => {
                println!("skipped: promtool cannot be run: {error}");
                return;
            }
            Err(error) => panic!("promtool cannot be run: {error}"),
        };
        let page = self.scrape("text/plain");
        promtool.stdin.take().unwrap().write_all(page.as_bytes()).unwrap();
        let output = promtool.wait_with_output().unwrap();
        let said =
            String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.trim().is_empty(), "{said}\n{page}");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _may_have_ended = self.child.kill();
        let _may_have_ended = self.child.wait();
    }
}

fn of_domain(name: &str, uuid: &str, more: &str) -> String {
    format!(r#"{name}{{fault_domain="NAME/{uuid}",gpu="",UUID="{uuid}",GPU_I_ID=""{more}}}"#)
}

/// Starts the program on a free port; it is ready when this returns.
fn spawn(config: &Path, uid: Option<u32>) -> (Child, String) {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap().to_string();
    drop(free);
    let log =
        std::fs::OpenOptions::new().create(true).append(true).open(config.with_extension("log")).unwrap();
    let mut command = Command::new(binary(config.parent().unwrap(), uid));
    command
        .args([
            "--config.file",
            config.to_str().unwrap(),
            "--web.listen-address",
            &address,
            "--log.level",
            "debug",
        ])
        .stderr(log)
        .stdout(Stdio::null());
    if let Some(uid) = uid {
        command.uid(uid).gid(uid);
    }
    let child = command.spawn().unwrap();
    let began = Instant::now();
    while !try_get(&address, "/-/ready", "text/plain").is_some_and(|body| body.contains("ready")) {
        assert!(began.elapsed() < PATIENCE, "the exporter does not come up");
        std::thread::sleep(Duration::from_millis(10));
    }
    (child, address)
}

/// The program, where the user can run it.
fn binary(directory: &Path, uid: Option<u32>) -> PathBuf {
    let built = PathBuf::from(env!("CARGO_BIN_EXE_mps-exporter"));
    if uid.is_none() {
        return built;
    }
    let copy = directory.join("mps-exporter");
    std::fs::copy(built, &copy).unwrap();
    copy
}

fn get(address: &str, path: &str, accept: &str) -> String {
    try_get(address, path, accept).unwrap_or_else(|| panic!("no answer from {address}{path}"))
}

fn try_get(address: &str, path: &str, accept: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: test\r\nAccept: {accept}\r\nConnection: close\r\n\r\n")
        .ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    head.starts_with("HTTP/1.1 200").then(|| body.to_owned())
}

/// Name and labels of a series, whatever their order. The values in these tests hold no comma.
fn parts(series: &str) -> std::collections::BTreeSet<&str> {
    series.split(['{', '}', ',']).filter(|part| !part.is_empty()).collect()
}
