//! Stands in for `nvidia-cuda-mps-server`, which needs a GPU: registers with the daemon that launched it, answers what
//! that forwards, writes server.log through the daemon's FIFO, and does what the test says.
//!
//! The numbers and layouts are what NVIDIA's daemons 535, 550 and 555 send and take.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use mps_exporter::sys::seqpacket::{self, Attachment};
use rustix::event::{PollFd, PollFlags, poll};

use super::{BED, CREDENTIALS, HANDOVER, HELLO};

/// Connection type of a server.
const SERVER: u32 = 1;
/// Defaults that the daemon sends to a new server.
const GREETINGS: usize = 35;

/// What the daemon forwards.
const NEW_CLIENT: u32 = 2;
const SHUT_DOWN: u32 = 5;
const LIST_CLIENTS: u32 = 6;
const LIST_CLIENTS_OF_DEVICES: u32 = 7;
const LIST_CONTEXTS: u32 = 14;
const STATUS: u32 = 17;

/// A context, as the test tells of it.
#[derive(Debug, Clone)]
struct Context {
    pid: u32,
    id: u32,
    device: String,
}

struct Server {
    log: std::fs::File,
    /// `None` once the daemon has let go.
    daemon: Option<OwnedFd>,
    orders: UnixDatagram,
    is_faulty: bool,
    is_hung: bool,
    device: String,
    told: Vec<Context>,
    /// Clients that came through the daemon; pid 0 until they have spoken.
    connected: BTreeMap<usize, (OwnedFd, u32)>,
    next: usize,
}

/// Serves until the daemon and all clients are gone.
pub fn run() {
    let bed = PathBuf::from(std::env::var_os(BED).unwrap());
    let pipe = PathBuf::from(std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").unwrap());
    let pids = std::fs::OpenOptions::new().append(true).open(bed.join("servers"));
    writeln!(pids.unwrap(), "{}", std::process::id()).unwrap();
    let log = rustix::fs::open(
        pipe.join("log"),
        rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    );
    let place = bed.join("server.sock");
    let _none_yet = std::fs::remove_file(&place);
    let mut server = Server {
        log: log.unwrap().into(),
        daemon: None,
        orders: UnixDatagram::bind(&place).unwrap(),
        is_faulty: false,
        is_hung: false,
        device: "GPU-cb1213a3-d6a4-be7f-1122-334455667788".to_owned(),
        told: Vec::new(),
        connected: BTreeMap::new(),
        next: 0,
    };
    server.say("Other", "Startup");
    for order in std::fs::read_to_string(bed.join("orders")).unwrap_or_default().lines() {
        server.obey(order);
    }
    server.register(&pipe);
    server.serve();
}

impl Server {
    fn register(&mut self, pipe: &Path) {
        self.say("Other", &format!("Connecting to control daemon on socket: {}/control", pipe.display()));
        let daemon = seqpacket::socket(true).unwrap();
        seqpacket::connect(&daemon, &pipe.join("control")).unwrap();
        assert_eq!(seqpacket::receive_bytes(&daemon).unwrap(), HELLO);
        seqpacket::send(&daemon, CREDENTIALS, Attachment::Credentials).unwrap();
        self.say("Other", "Initializing server process");
        send(&daemon, &SERVER.to_le_bytes());
        // Volta or newer, and no name of shared memory.
        let mut features = vec![0; 516];
        features[0] = 1;
        send(&daemon, &features);
        for _ in 0..GREETINGS {
            seqpacket::receive_bytes(&daemon).unwrap();
        }
        self.say("Other", "Creating server context on device 0 (NVIDIA H200)");
        self.say("Server", "Server has started");
        self.daemon = Some(daemon);
    }

    fn serve(&mut self) {
        while self.daemon.is_some() || !self.connected.is_empty() {
            let (has_question, has_order, spoke) = self.wait();
            if has_order {
                self.take_order();
            }
            for key in spoke {
                self.hear(key);
            }
            if has_question {
                self.answer();
            }
        }
        self.leave();
    }

    /// Waits for somebody to speak.
    fn wait(&self) -> (bool, bool, Vec<usize>) {
        let keys: Vec<usize> = self.connected.keys().copied().collect();
        let clients = self.connected.values().map(|(client, _)| client.as_fd());
        let all: Vec<_> = [self.orders.as_fd()]
            .into_iter()
            .chain(clients)
            .chain(self.daemon.as_ref().map(AsFd::as_fd))
            .collect();
        let mut waiting: Vec<PollFd<'_>> =
            all.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
        poll(&mut waiting, None).unwrap();
        let ready: Vec<bool> = waiting.iter().map(|each| !each.revents().is_empty()).collect();
        let spoke = keys.iter().zip(&ready[1..]).filter(|(_, ready)| **ready).map(|(key, _)| *key).collect();
        (ready.get(1 + keys.len()).copied().unwrap_or(false), ready[0], spoke)
    }

    fn answer(&mut self) {
        let question = self.daemon.as_ref().and_then(|daemon| seqpacket::receive_bytes(daemon).ok());
        let Some(question) = question else {
            // 535 lets go of a server when another user waits; or the daemon is dead.
            self.daemon = None;
            self.say("Server", "Waiting for current clients to finish");
            return;
        };
        let Ok(question) = <[u8; 4]>::try_from(question.as_slice()).map(u32::from_le_bytes) else { return };
        while self.is_hung {
            self.take_order();
        }
        let daemon = self.daemon.as_ref().unwrap();
        let count = |n: usize| send(daemon, &u32::try_from(n).unwrap().to_le_bytes());
        let contexts = self.contexts();
        match question {
            NEW_CLIENT => {
                let packet = seqpacket::receive(daemon).unwrap();
                assert_eq!(packet.bytes, HANDOVER);
                let client = packet.descriptor.unwrap();
                rustix::net::sockopt::set_socket_passcred(&client, true).unwrap();
                self.connected.insert(self.next, (client, 0));
                self.next += 1;
                self.say("Server", "Received new client request");
                self.say("Server", "Worker created");
                self.say("Server", "Creating worker thread");
            }
            SHUT_DOWN => {
                count(self.connected.len());
                if self.connected.is_empty() {
                    self.say("Server", "Server has been notified to shutdown");
                    self.leave();
                }
                let busy = self.connected.len();
                self.say(
                    "Server",
                    &format!("Server was unable to shutdown due to {busy} active workers threads"),
                );
            }
            LIST_CLIENTS => {
                count(contexts.len());
                for context in contexts {
                    send(daemon, &context.pid.to_le_bytes());
                }
            }
            LIST_CLIENTS_OF_DEVICES => count(0),
            LIST_CONTEXTS => {
                count(contexts.len());
                for context in contexts {
                    send(daemon, &row(&context));
                }
            }
            STATUS => count(usize::from(!self.is_faulty)),
            _ => {}
        }
    }

    fn contexts(&self) -> Vec<Context> {
        let arrived = self.connected.values().filter(|(_, pid)| *pid != 0);
        let arrived = arrived.map(|(_, pid)| Context { pid: *pid, id: 1, device: self.device.clone() });
        self.told.iter().cloned().chain(arrived).collect()
    }

    /// A client that came through the daemon speaks, or leaves.
    fn hear(&mut self, key: usize) {
        let Some((client, pid)) = self.connected.get_mut(&key) else { return };
        if let Ok(packet) = seqpacket::receive(client.as_fd()) {
            *pid = packet.sender.map_or(0, |(pid, _)| pid);
            let (pid, device) = (*pid, self.device.clone());
            self.say("Server", &format!("Device NVIDIA H200 (uuid {device}) is associated"));
            self.say("Server", &format!("Status of client {{{pid}, 1}} is ACTIVE"));
        } else {
            let (_, pid) = self.connected.remove(&key).unwrap();
            self.say("Server", "Receive command failed, assuming client exit");
            self.say("Server", &format!("Client {{{pid}, 1}} exit"));
            self.say("Server", "Client process disconnected");
        }
    }

    fn take_order(&mut self) {
        let mut order = [0; 4096];
        let length = self.orders.recv(&mut order).unwrap();
        self.obey(std::str::from_utf8(&order[..length]).unwrap());
    }

    /// See [`super::bed::Bed::order`].
    fn obey(&mut self, order: &str) {
        let (verb, rest) = order.split_once(' ').unwrap_or((order, ""));
        match verb {
            "say" => self.say("Server", rest),
            "fault" => self.is_faulty = true,
            "recover" => self.is_faulty = false,
            "hang" => self.is_hung = true,
            "resume" => self.is_hung = false,
            "device" => rest.clone_into(&mut self.device),
            "context" => {
                let words: Vec<&str> = rest.split(' ').collect();
                let [pid, id, device] = words[..] else { panic!("context PID ID DEVICE, not {rest}") };
                let context =
                    Context { pid: pid.parse().unwrap(), id: id.parse().unwrap(), device: device.to_owned() };
                self.told.push(context);
            }
            "forget" => self.told.clear(),
            "exit" => std::process::exit(rest.parse().unwrap()),
            _ => panic!("unknown order {order}"),
        }
    }

    fn leave(&mut self) -> ! {
        self.say("Server", "Exiting");
        std::process::exit(0)
    }

    /// Has the daemon write a line to server.log.
    fn say(&mut self, tag: &str, text: &str) {
        let now = jiff::ZonedDateTime::now();
        let number = |n: i16| u32::try_from(n).unwrap();
        let tag = ["Control", "Server", "Client", "Other"].iter().position(|each| *each == tag).unwrap();
        let mut record = Vec::new();
        record.extend((0xabcd_e000 | u32::try_from(tag).unwrap()).to_le_bytes());
        record.extend(std::process::id().to_le_bytes());
        for part in [
            now.year(),
            now.month().into(),
            now.day().into(),
            now.weekday().to_sunday_zero_offset().into(),
            now.hour().into(),
            now.minute().into(),
            now.second().into(),
            now.millisecond(),
        ] {
            record.extend(number(part).to_le_bytes());
        }
        record.extend((text.len() as u64).to_le_bytes());
        record.extend(text.as_bytes());
        // The daemon may be dead.
        let _broken_pipe = self.log.write_all(&record);
    }
}

/// A row for `ps`: the daemon looks the pid up in /proc and adds the namespace and the command.
fn row(context: &Context) -> Vec<u8> {
    let (kind, uuid) = context.device.split_once('-').unwrap();
    let digits: Vec<u8> = uuid.bytes().filter(u8::is_ascii_hexdigit).collect();
    let uuid =
        digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap());
    let mut row = Vec::new();
    for number in [context.pid, 0, u32::from(kind == "MIG"), 0] {
        row.extend(number.to_le_bytes());
    }
    row.extend(uuid);
    row.extend(context.id.to_le_bytes());
    row.extend(0_u32.to_le_bytes());
    row
}

fn send(socket: &OwnedFd, packet: &[u8]) {
    // A daemon that is gone is noticed by its silence.
    let _gone = seqpacket::send(socket, packet, Attachment::None);
}
