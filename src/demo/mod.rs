//! A simulated node, for `mps-exporter demo` and for tests: no GPU, nothing to install.
//!
//! Everything that the exporter reads is real in kind: a control daemon that speaks the wire protocol and holds its
//! lock, log files that grow, processes with pids of their own, a kernel log, and NVML by the stand-in library. Only
//! what happens is scripted. All of it lives in one temporary directory, below one child process of its own process
//! group, which ends with us however we end: it reads our end of a pipe.

mod control;
mod log;
mod node;
mod process;
mod story;

use std::ffi::OsString;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use crate::config::{Config, Daemon, Discovery, KernelLog, LogChoice, Nvml, State};
use crate::source::nvml::stand_in;

/// The first argument of our hidden processes.
const HIDDEN: &str = "__demo";
/// NVML's library, the stand-in.
const LIBRARY: &str = "libnvidia-ml.so.1";
/// How long the simulated node may take to come up.
const START: Duration = Duration::from_secs(20);
/// How long it may take to clean up after itself.
const END: Duration = Duration::from_secs(3);

/// When what happens.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// From the start to the first incident.
    pub first: Duration,
    /// From one incident to the next.
    pub period: Duration,
    /// What the pauses within an incident are multiplied with. At 1 it takes about 12 s until all clients are back.
    pub scale: f64,
    /// The program that holds [`hidden`]; `None`: this very one.
    pub program: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Options { first: Duration::from_secs(10), period: Duration::from_secs(60), scale: 1.0, program: None }
    }
}

/// Why there is no simulated node.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// Its directory cannot be made.
    #[error("cannot make {}: {source}", path.display())]
    Directory {
        /// The path.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Its process cannot be started.
    #[error("cannot start the simulated node: {0}")]
    Start(#[source] std::io::Error),
    /// Its process ended, or did not come up.
    #[error("the simulated node did not come up within {} s", START.as_secs())]
    NotReady,
}

/// A simulated node. It ends, and its directory with it, when this is dropped.
#[derive(Debug)]
pub struct Simulation {
    directory: PathBuf,
    child: Child,
    has_gpus: bool,
}

impl Simulation {
    /// Starts a node, and waits until its daemon serves. Blocking.
    pub fn start(options: &Options) -> Result<Simulation, DemoError> {
        let directory = make_directory()?;
        let library = directory.join(LIBRARY);
        let has_gpus = stand_in::library().is_some_and(|bytes| std::fs::write(&library, bytes).is_ok());
        let started = start_child(&directory, options);
        let (child, output) = started.inspect_err(|_error| {
            let _best_effort = std::fs::remove_dir_all(&directory);
        })?;
        let simulation = Simulation { directory, child, has_gpus };
        wait_until_ready(output)?;
        Ok(simulation)
    }

    /// Its directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The configuration with which the production sources read this node and nothing else.
    pub fn config(&self) -> Config {
        let daemon = Daemon {
            name: "default".into(),
            pipe_directory: self.directory.join(node::PIPE),
            log_directory: self.directory.join(node::LOG),
            log: LogChoice::Files,
        };
        Config {
            daemons: vec![daemon],
            discovery: Discovery { enabled: false, ..Discovery::default() },
            nvml: Nvml {
                enabled: self.has_gpus,
                library: self.directory.join(LIBRARY),
                interval: Duration::from_secs(1),
                ..Nvml::default()
            },
            kernel_log: KernelLog { path: self.directory.join(node::KERNEL_LOG), ..KernelLog::default() },
            state: State { directory: None, ..State::default() },
            ..Config::default()
        }
    }
}

impl Drop for Simulation {
    fn drop(&mut self) {
        // The end of the pipe tells it to clean up.
        drop(self.child.stdin.take());
        let begun = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if begun.elapsed() > END {
                let _already_dead = self.child.kill();
                let _status = self.child.wait();
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _already_gone = std::fs::remove_dir_all(&self.directory);
    }
}

/// A directory that nobody else can have prepared. Its name never comes again: the node and whoever started it both
/// remove it, and a second node must not be where the first one was.
fn make_directory() -> Result<PathBuf, DemoError> {
    let random = RandomState::new().build_hasher().finish();
    let path = std::env::temp_dir().join(format!("mps-exporter-demo-{}-{random:016x}", std::process::id()));
    match std::fs::DirBuilder::new().mode(0o700).create(&path) {
        Ok(()) => Ok(path),
        Err(source) => Err(DemoError::Directory { path, source }),
    }
}

fn start_child(directory: &Path, options: &Options) -> Result<(Child, ChildStdout), DemoError> {
    let program = match &options.program {
        Some(program) => program.clone(),
        None => std::env::current_exe().map_err(DemoError::Start)?,
    };
    let mut child = Command::new(program)
        .args([HIDDEN, "node"])
        .arg(directory)
        .arg(options.first.as_millis().to_string())
        .arg(options.period.as_millis().to_string())
        .arg(options.scale.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(DemoError::Start)?;
    let output = child.stdout.take().ok_or(DemoError::NotReady)?;
    Ok((child, output))
}

/// The node says one line when it is up.
fn wait_until_ready(output: ChildStdout) -> Result<(), DemoError> {
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let is_up = BufReader::new(output).read_line(&mut line).is_ok() && line.trim() == process::READY;
        let _nobody_waits = tell.send(is_up);
    });
    match told.recv_timeout(START) {
        Ok(true) => Ok(()),
        _ => Err(DemoError::NotReady),
    }
}

/// Runs a hidden process of the simulated node, if the arguments ask for one. The program's `main` calls it first.
pub fn hidden(arguments: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    let mut arguments = arguments.skip(1);
    if arguments.next()? != HIDDEN {
        return None;
    }
    let rest: Vec<OsString> = arguments.collect();
    let text = |at: usize| rest.get(at).and_then(|word| word.to_str());
    let outcome = match text(0)? {
        "node" => {
            let millis = |at| text(at)?.parse().ok().map(Duration::from_millis);
            node::main(
                &PathBuf::from(rest.get(1)?),
                &story::Timing { first: millis(2)?, period: millis(3)?, scale: text(4)?.parse().ok()? },
            )
        }
        "process" => process::main(text(1)?),
        _ => return None,
    };
    Some(match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mps-exporter: the simulated node failed: {error}");
            ExitCode::FAILURE
        }
    })
}
