//! What happens on the simulated node: now and then one client's fatal fault takes everybody with it.

use std::io;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::event::ServerStatus;

use super::node::{GPUS, ROLES, Shared, contexts};

/// When what happens.
#[derive(Debug, Clone)]
pub(super) struct Timing {
    /// From the start to the first incident.
    pub first: Duration,
    /// From one incident to the next.
    pub period: Duration,
    /// What the pauses within an incident are multiplied with.
    pub scale: f64,
}

impl Timing {
    fn pause(&self, milliseconds: u64) {
        sleep(Duration::from_millis(milliseconds).mul_f64(self.scale.clamp(0.0, 1000.0)));
    }
}

/// Who is to blame, in turn.
const CULPRITS: [usize; 3] = [2, 5, 1];
/// Who hangs on, and blocks the recovery of everybody.
const STUCK: usize = 0;

/// Tells it for as long as the process lives. An error (a full disk) ends the story, not the node.
pub(super) fn tell(node: &Shared, timing: &Timing) {
    let begun = Instant::now();
    for (turn, culprit) in (0_u32..).zip(CULPRITS.iter().cycle()) {
        let due = begun + timing.first + timing.period * turn;
        sleep(due.saturating_duration_since(Instant::now()));
        if let Err(error) = incident(node, timing, *culprit) {
            eprintln!("mps-exporter: the simulated node stands still: {error}");
            return;
        }
    }
}

fn incident(node: &Shared, timing: &Timing, culprit: usize) -> io::Result<()> {
    fault(node, culprit)?;
    timing.pause(300);
    for role in (0..ROLES.len()).filter(|role| *role != STUCK) {
        node.lock().leave(role)?;
        timing.pause(120);
    }
    // As long as this one hangs on, the server takes no client on any GPU.
    timing.pause(5_000);
    node.lock().leave(STUCK)?;
    recover(node, timing);
    timing.pause(2_000);
    for role in 0..ROLES.len() {
        node.lock().arrive(role)?;
        timing.pause(400);
    }
    Ok(())
}

/// What server.log says from 535 on, in its order.
fn fault(node: &Shared, culprit: usize) -> io::Result<()> {
    let mut node = node.lock();
    let Some((_, pid)) = node.present().find(|(role, _)| *role == culprit) else { return Ok(()) };
    let present: Vec<(usize, u32)> = node.present().collect();
    let gpu = ROLES[culprit].gpus[0];
    let fault = "Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f2a_00000000. \
                 Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ";
    node.xid(gpu, 31, pid, ROLES[culprit].command, fault)?;
    node.serve("Server", &format!("Client process {pid} encountered a fatal GPU error."));
    node.serve("Server", "Server is handling a fatal GPU error.");
    node.status = ServerStatus::Fault;
    for (role, pid) in &present {
        for (id, _) in contexts(*role) {
            node.serve("Server", &format!("Status of client {{{pid}, {id}}} is INACTIVE"));
        }
    }
    node.serve("Server", "The following devices will be reset:");
    for gpu in [0, 1] {
        node.serve("Server", &format!("{gpu}"));
    }
    node.serve("Server", "The following clients have a sticky error set:");
    for (_, pid) in &present {
        node.serve("Server", &pid.to_string());
    }
    Ok(())
}

fn recover(node: &Shared, timing: &Timing) {
    for gpu in [0, 1] {
        node.lock().serve("Server", &format!("Destroy server context on device {gpu}"));
    }
    timing.pause(1_000);
    let mut node = node.lock();
    for gpu in [0, 1] {
        node.serve("Server", &format!("Creating server context on device {gpu} ({})", GPUS[gpu].name));
    }
    node.status = ServerStatus::Active;
}
