//! The simulated control daemon's sockets: the wire protocol from the other side.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::event::ServerStatus;
use crate::sys::seqpacket::{self, Attachment};

use super::node::{GPUS, Node, ROLES, Shared, contexts};

const HELLO: &[u8] = b"OUTBHELL\0";
const CREDENTIALS: &[u8] = b"OUTBCRED\0";
/// The connection type of a user interface; there are no others here.
const USER_INTERFACE: u32 = 4;
const KIND_LINE: u32 = 0;
const KIND_END: u32 = 1;

/// Opens the daemon's two sockets.
pub(super) fn listen(pipe: &Path) -> io::Result<[OwnedFd; 2]> {
    let open = |name: &str, mode| {
        let path = pipe.join(name);
        let listener = seqpacket::listen(&path)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))?;
        io::Result::Ok(listener)
    };
    Ok([open("control", 0o666)?, open("control_privileged", 0o700)?])
}

/// Serves one caller after the other.
pub(super) fn serve(listener: &OwnedFd, node: &Shared) {
    while let Ok(caller) = seqpacket::accept(listener) {
        node.lock().control("Accepting connection...");
        // A caller that breaks off is no concern of the next one's.
        let _broken = session(&caller, node);
    }
}

fn session(caller: &OwnedFd, node: &Shared) -> io::Result<()> {
    seqpacket::send(caller, HELLO, Attachment::None)?;
    let introduction = seqpacket::receive_bytes(caller)?;
    let kind = seqpacket::receive_bytes(caller)?;
    if introduction != CREDENTIALS || kind != USER_INTERFACE.to_le_bytes() {
        node.lock().control("Unknown type of connection");
        return Ok(());
    }
    node.lock().control("NEW UI");
    let outcome = converse(caller, node);
    node.lock().control("UI closed");
    outcome
}

fn converse(caller: &OwnedFd, node: &Shared) -> io::Result<()> {
    loop {
        if seqpacket::receive_bytes(caller)? == 0_u64.to_le_bytes() {
            let end = [KIND_END.to_le_bytes(), 0_u32.to_le_bytes()].concat();
            return seqpacket::send(caller, &end, Attachment::None);
        }
        let command = seqpacket::receive_bytes(caller)?;
        let command = String::from_utf8_lossy(&command);
        let command = command.trim_end_matches(['\n', '\0']);
        let lines = {
            let mut node = node.lock();
            node.control(&format!("Cmd:{command}"));
            let lines = answer(&node, command);
            for line in &lines {
                node.control(line);
            }
            lines
        };
        lines.iter().try_for_each(|line| say(caller.as_fd(), line))?;
    }
}

fn say(caller: impl AsFd, line: &str) -> io::Result<()> {
    let packet = [&KIND_LINE.to_le_bytes(), line.as_bytes(), b"\n\0"].concat();
    seqpacket::send(caller, &packet, Attachment::None)
}

/// What 550 answers.
fn answer(node: &Node, command: &str) -> Vec<String> {
    let mut words = command.split_ascii_whitespace();
    let verb = words.next().unwrap_or_default();
    let server = node.server.pid();
    let named = words.find_map(|word| word.parse::<u32>().ok());
    let unknown = |pid: u32| vec![format!("Server {pid} not found")];
    match (verb, named) {
        ("get_server_list", _) => vec![server.to_string()],
        ("get_default_active_thread_percentage", _) => vec!["100.0".to_owned()],
        ("get_server_status" | "get_client_list", None) => vec!["A server PID is required".to_owned()],
        ("get_server_status" | "get_client_list" | "ps", Some(pid)) if pid != server => unknown(pid),
        ("get_server_status", _) => vec![
            match node.status {
                ServerStatus::Initializing => "INITIALIZING",
                ServerStatus::Active => "ACTIVE",
                ServerStatus::Fault => "FAULT",
            }
            .to_owned(),
        ],
        ("get_client_list", _) => node.present().map(|(_, pid)| pid.to_string()).collect(),
        ("ps", _) => rows(node),
        _ => vec![format!("Unknown command \"{verb}\"")],
    }
}

fn rows(node: &Node) -> Vec<String> {
    let row = |pid: &str, id: &str, server: &str, device: &str, namespace: &str, command: &str| {
        format!("{pid:<10}{id:<10}{server:<15}{device:<26}{namespace:<15}{command:<15}")
    };
    let server = node.server.pid().to_string();
    let rows = node.present().flat_map(|(role, pid)| {
        let (pid, server) = (pid.to_string(), server.clone());
        contexts(role).map(move |(id, gpu)| {
            // The daemon cuts a UUID after its third group.
            let device = GPUS[gpu].uuid.rsplitn(3, '-').last().unwrap_or_default();
            let command = format!("/opt/demo/{}", ROLES[role].command);
            row(&pid, &id.to_string(), &server, device, &namespace(), &command)
        })
    });
    let mut rows: Vec<String> = rows.collect();
    if !rows.is_empty() {
        rows.insert(0, row("PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND"));
    }
    rows
}

/// The inode of our pid namespace, which is the clients' too.
fn namespace() -> String {
    let link = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    link.to_string_lossy().trim_matches(|c: char| !c.is_ascii_digit()).to_owned()
}
