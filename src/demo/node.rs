//! What the simulated node consists of, and what it says of itself.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::{FileType, FlockOperation, Mode};

use crate::event::ServerStatus;

use super::log::{KernelLog, MpsLog};
use super::process::{Actor, READY};
use super::{control, story};

/// The pipe directory, below the node's.
pub(super) const PIPE: &str = "pipe";
/// The log directory.
pub(super) const LOG: &str = "log";
/// The kernel log.
pub(super) const KERNEL_LOG: &str = "kmsg";
/// NVML's script, beside the library.
const NVML_SCRIPT: &str = "libnvidia-ml.so.1.script";

const GIB: u64 = 1 << 30;
/// NVML keeps the events that were written; ours need not be remembered for ever.
const EVENTS_KEPT: usize = 32;

/// A GPU.
pub(super) struct Gpu {
    pub uuid: &'static str,
    pub pci: &'static str,
    pub name: &'static str,
    is_mps: bool,
}

/// Two GPUs with MPS, and one in time-slicing.
pub(super) const GPUS: [Gpu; 3] = [
    Gpu {
        uuid: "GPU-5c0f4a1e-7d36-4b1a-9a53-0e6b7c2d1f00",
        pci: "0000:3b:00",
        name: "NVIDIA H100 80GB HBM3",
        is_mps: true,
    },
    Gpu {
        uuid: "GPU-a81d93f2-2c54-4e0f-8b77-5d1c9e4f3a01",
        pci: "0000:86:00",
        name: "NVIDIA H100 80GB HBM3",
        is_mps: true,
    },
    Gpu {
        uuid: "GPU-e4b72c60-91fd-4d3c-a2c8-7f0a6b5d8c02",
        pci: "0000:d8:00",
        name: "NVIDIA L4",
        is_mps: false,
    },
];

/// A client as it is cast.
pub(super) struct Role {
    pub command: &'static str,
    pub job: u32,
    /// Indexes of its GPUs, one context each.
    pub gpus: &'static [usize],
    memory: u64,
}

/// Six clients of three workloads. The second one works on both GPUs: it couples them.
pub(super) const ROLES: [Role; 6] = [
    Role { command: "train", job: 8801, gpus: &[0], memory: 24 * GIB },
    Role { command: "train", job: 8801, gpus: &[0, 1], memory: 12 * GIB },
    Role { command: "infer", job: 8802, gpus: &[0], memory: 6 * GIB },
    Role { command: "infer", job: 8802, gpus: &[0], memory: 6 * GIB },
    Role { command: "etl", job: 8803, gpus: &[1], memory: 16 * GIB },
    Role { command: "etl", job: 8803, gpus: &[1], memory: 16 * GIB },
];

/// Processes on the GPU without MPS.
const STRANGERS: [(&str, u32, u64); 2] = [("notebook", 8804, 4 * GIB), ("render", 8805, 7 * GIB)];

/// The context ids of a role: ids are the server's own, and unique in it.
pub(super) fn contexts(role: usize) -> impl Iterator<Item = (u32, usize)> {
    let first: usize = ROLES[..role].iter().map(|role| role.gpus.len()).sum();
    ROLES[role].gpus.iter().zip(first..).map(|(gpu, id)| (u32::try_from(id).unwrap_or(0), *gpu))
}

/// The node.
pub(super) struct Node {
    directory: PathBuf,
    program: PathBuf,
    pub control_log: MpsLog,
    server_log: MpsLog,
    pub kernel_log: KernelLog,
    pub server: Actor,
    pub status: ServerStatus,
    /// The process of each role, while it is there.
    pub clients: [Option<Actor>; ROLES.len()],
    strangers: Vec<Actor>,
    events: Vec<String>,
    event: u64,
}

/// The node, for its threads. A thread that panicked has ended the process.
#[derive(Clone)]
pub(super) struct Shared(Arc<Mutex<Node>>);

impl Shared {
    pub fn lock(&self) -> MutexGuard<'_, Node> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The hidden process: the node, until the pipe from its parent ends.
pub(super) fn main(directory: &Path, timing: &story::Timing) -> io::Result<()> {
    let outcome = run(directory, timing);
    let _already_gone = std::fs::remove_dir_all(directory);
    outcome
}

fn run(directory: &Path, timing: &story::Timing) -> io::Result<()> {
    let pipe = directory.join(PIPE);
    std::fs::create_dir_all(&pipe)?;
    std::fs::create_dir_all(directory.join(LOG))?;
    let lock = File::options().write(true).create(true).truncate(false).open(pipe.join("control_lock"))?;
    rustix::fs::fcntl_lock(&lock, FlockOperation::NonBlockingLockExclusive)?;
    rustix::fs::mknodat(rustix::fs::CWD, pipe.join("log"), FileType::Fifo, Mode::from_raw_mode(0o666), 0)?;
    std::fs::write(pipe.join("nvidia-cuda-mps-control.pid"), std::process::id().to_string())?;
    let mut control_log = MpsLog::create(&directory.join(LOG).join("control.log"))?;
    let (me, path) = (std::process::id(), pipe.display());
    control_log.say("Control", me, &format!("Starting control daemon using socket {path}/control"));
    control_log.say(
        "Control",
        me,
        &format!("To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY={path}"),
    );
    let sockets = control::listen(&pipe)?;
    let node = Shared(Arc::new(Mutex::new(Node::new(directory, control_log)?)));
    for socket in sockets {
        let node = node.clone();
        std::thread::spawn(move || control::serve(&socket, &node));
    }
    let (story, timing) = (node.clone(), timing.clone());
    std::thread::spawn(move || story::tell(&story, &timing));
    writeln!(io::stdout(), "{READY}")?;
    io::stdout().flush()?;

    let mut nothing = [0];
    while io::stdin().read(&mut nothing)? > 0 {}
    // Nobody starts a process any more: the lock is kept until the end of this one.
    let mut node = node.lock();
    node.clients.fill_with(|| None);
    node.strangers.clear();
    std::fs::remove_dir_all(directory)?;
    std::process::exit(0)
}

impl Node {
    fn new(directory: &Path, control_log: MpsLog) -> io::Result<Node> {
        let program = std::env::current_exe()?;
        let server_log = MpsLog::create(&directory.join(LOG).join("server.log"))?;
        let mut kernel_log = KernelLog::create(&directory.join(KERNEL_LOG))?;
        for gpu in &GPUS {
            kernel_log.say(&format!("GPU at PCI:{}: {}", gpu.pci, gpu.uuid));
        }
        let strangers = STRANGERS.iter().map(|(name, job, _)| Actor::start(&program, name, Some(*job)));
        let strangers = strangers.collect::<io::Result<_>>()?;
        // NVML's lists show which process is the server by its program's name.
        let server_program = directory.join("nvidia-cuda-mps-server");
        if std::fs::hard_link(&program, &server_program).is_err() {
            std::fs::copy(&program, &server_program)?;
        }
        let server = Actor::start(&server_program, "nvidia-cuda-mps", None)?;
        let mut node = Node {
            directory: directory.to_owned(),
            program,
            control_log,
            server_log,
            kernel_log,
            server,
            status: ServerStatus::Active,
            clients: Default::default(),
            strangers,
            events: Vec::new(),
            event: 0,
        };
        node.open()?;
        Ok(node)
    }

    /// The first client makes the daemon start its server.
    fn open(&mut self) -> io::Result<()> {
        let (me, uid, server) = (std::process::id(), uid(), self.server.pid());
        let first = Actor::start(&self.program, ROLES[0].command, Some(ROLES[0].job))?;
        let pid = first.pid();
        let arrival =
            format!("NEW CLIENT {pid} from user {uid}: Server is not ready, push client to pending list");
        self.control("Accepting connection...");
        self.control(&arrival);
        self.control_log.say("Control", server, &format!("Starting new server {server} for user {uid}"));
        self.serve("Other", "Startup");
        let pipe = self.directory.join(PIPE);
        self.serve("Other", &format!("Connecting to control daemon on socket: {}/control", pipe.display()));
        self.serve("Other", "Initializing server process");
        for (index, gpu) in GPUS.iter().enumerate().filter(|(_, gpu)| gpu.is_mps) {
            self.serve("Server", &format!("Creating server context on device {index} ({})", gpu.name));
        }
        self.serve("Server", "Active Threads Percentage set to 100.0");
        self.serve("Server", "Server has started");
        self.control("Accepting connection...");
        self.control_log.say("Control", me, &format!("NEW SERVER {server}: Ready"));
        self.join(0, first)?;
        (1..ROLES.len()).try_for_each(|role| self.arrive(role))
    }

    /// A client comes to the server that runs.
    pub fn arrive(&mut self, role: usize) -> io::Result<()> {
        let actor = Actor::start(&self.program, ROLES[role].command, Some(ROLES[role].job))?;
        let pid = actor.pid();
        self.control("Accepting connection...");
        self.control(&format!("NEW CLIENT {pid} from user {}: Server already exists", uid()));
        self.join(role, actor)
    }

    fn join(&mut self, role: usize, actor: Actor) -> io::Result<()> {
        let pid = actor.pid();
        for (id, gpu) in contexts(role) {
            self.serve("Server", "Received new client request");
            self.serve("Server", "Worker created");
            self.serve("Server", "Creating worker thread");
            let Gpu { name, uuid, .. } = GPUS[gpu];
            self.serve("Server", &format!("Device {name} (uuid {uuid}) is associated"));
            self.serve("Server", &format!("Status of client {{{pid}, {id}}} is ACTIVE"));
        }
        self.clients[role] = Some(actor);
        self.tell_nvml()
    }

    /// A client's process ends.
    pub fn leave(&mut self, role: usize) -> io::Result<()> {
        let Some(actor) = self.clients[role].take() else { return Ok(()) };
        let pid = actor.pid();
        drop(actor);
        for (id, _) in contexts(role) {
            self.serve("Server", "Receive command failed, assuming client exit");
            self.serve("Server", &format!("Client {{{pid}, {id}}} exit"));
        }
        self.serve("Server", "Client process disconnected");
        self.tell_nvml()
    }

    /// A line of the daemon in control.log.
    pub fn control(&mut self, text: &str) {
        self.control_log.say("Control", std::process::id(), text);
    }

    /// A line of the server in server.log.
    pub fn serve(&mut self, tag: &str, text: &str) {
        self.server_log.say(tag, self.server.pid(), text);
    }

    /// An Xid of a process on a GPU, in the kernel log and by NVML.
    pub fn xid(&mut self, gpu: usize, code: u32, pid: u32, command: &str, rest: &str) -> io::Result<()> {
        let pci = GPUS[gpu].pci;
        self.kernel_log.say(&format!("Xid (PCI:{pci}): {code}, pid={pid}, name={command}, {rest}"));
        self.event += 1;
        self.events.push(format!("event seq={} gpu={gpu} xid={code}", self.event));
        if self.events.len() > EVENTS_KEPT {
            self.events.remove(0);
        }
        self.tell_nvml()
    }

    /// Clients and their processes, by role.
    pub fn present(&self) -> impl Iterator<Item = (usize, u32)> {
        self.clients.iter().enumerate().filter_map(|(role, actor)| Some((role, actor.as_ref()?.pid())))
    }

    /// Writes NVML's script anew; the stand-in reads it when it changes.
    fn tell_nvml(&self) -> io::Result<()> {
        let mut script = String::from("driver 550.163.01\n");
        for (index, gpu) in GPUS.iter().enumerate() {
            let Gpu { uuid, pci, name, is_mps } = gpu;
            let mode = if *is_mps { "exclusive_process" } else { "default" };
            let _infallible = writeln!(
                script,
                "gpu index={index} uuid={uuid} pci={pci}.0 name=\"{name}\" mode={mode} cc=9.0"
            );
            if *is_mps {
                let server = self.server.pid();
                let _infallible = writeln!(script, "compute gpu={index} pid={server} memory={}", GIB / 2);
                for (role, pid) in self.present().filter(|(role, _)| ROLES[*role].gpus.contains(&index)) {
                    let memory = ROLES[role].memory;
                    let _infallible = writeln!(script, "mps gpu={index} pid={pid} memory={memory}");
                }
            } else {
                for (actor, (_, _, memory)) in self.strangers.iter().zip(STRANGERS) {
                    let _infallible =
                        writeln!(script, "compute gpu={index} pid={} memory={memory}", actor.pid());
                }
            }
        }
        script.extend(self.events.iter().flat_map(|event| [event.as_str(), "\n"]));
        let (new, path) = (self.directory.join("script.new"), self.directory.join(NVML_SCRIPT));
        std::fs::write(&new, script)?;
        std::fs::rename(&new, &path)
    }
}

/// The user whose clients and server these are.
fn uid() -> u32 {
    rustix::process::getuid().as_raw()
}
