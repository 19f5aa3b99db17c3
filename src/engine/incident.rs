//! The record of what was lost, who did it and what blocks recovery.

use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::identity::Workload;

/// An incident on a coupled set, in the form of `/api/v1/incidents` and of the journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Incident {
    /// Stable, sorts by time: the opening time in milliseconds as 12 hex digits, a dash, and a hash of what opened it.
    pub id: Arc<str>,
    /// The fault's time.
    pub started_at: Timestamp,
    /// When it closed.
    pub ended_at: Option<Timestamp>,
    /// Open, recovering or closed.
    pub state: IncidentState,
    /// Why clients were lost.
    pub cause: Cause,
    /// Whether the lost clients reach the configured share.
    pub mass_client_loss: bool,
    /// Clients of the coupled set before the first loss.
    pub clients_before: u32,
    /// The daemon; `None` for a GPU without MPS.
    pub daemon: Option<Arc<str>>,
    /// The server's label.
    pub server: Option<Arc<str>>,
    /// The server's pid, as the daemon names it.
    #[serde(default)]
    pub server_pid: Option<u32>,
    /// `fault_domain` labels.
    pub fault_domains: Vec<Arc<str>>,
    /// The devices of those domains: one for each of `fault_domains`, in the same order.
    pub devices: Vec<IncidentDevice>,
    /// Who did it; `None` when no source named one.
    pub culprit: Option<Culprit>,
    /// Who was lost.
    pub victims: Vec<Victim>,
    /// Xids on its devices.
    pub xids: Vec<IncidentXid>,
    /// How the node comes back.
    pub recovery: Recovery,
    /// Work that the victims lost, summed over them, where it is known for any.
    pub work_lost_seconds: Option<f64>,
    /// The lines that it rests on, each with source and time.
    pub evidence: Vec<Evidence>,
    /// Found after a restart rather than seen live.
    pub caught_up: bool,
}

/// The state of an incident.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IncidentState {
    /// Losses are still arriving (within the window).
    Open,
    /// The server has not recovered yet.
    Recovering,
    /// Over.
    Closed,
}

/// Why an incident happened; the label `cause` of `mps_incidents_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// A client's fatal fault.
    Fault,
    /// The MPS server died.
    ServerExit,
    /// A GPU-level error.
    Gpu,
    /// Clients were killed.
    Killed,
    /// Clients of several workloads left together and nothing says why.
    Unexplained,
}

/// A device of an incident.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncidentDevice {
    /// The label `UUID`.
    #[serde(rename = "UUID")]
    pub uuid: Arc<str>,
    /// The label `gpu`, empty where unknown.
    pub gpu: Arc<str>,
    /// The label `GPU_I_ID`, empty without MIG.
    #[serde(rename = "GPU_I_ID")]
    pub gpu_instance: Arc<str>,
    /// The UUID of the MIG device, whose label `UUID` is its GPU's.
    #[serde(rename = "MIG_UUID", default, skip_serializing_if = "Option::is_none")]
    pub mig_uuid: Option<Arc<str>>,
}

/// Who did it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Culprit {
    /// Pid as the daemon names it (`server_log`) or the host's (`xid_channel`).
    pub pid: u32,
    /// Command name, where known.
    pub command: Option<Arc<str>>,
    /// Who it works for, where known.
    pub workload: Option<Workload>,
    /// How it is known.
    pub evidence: CulpritEvidence,
}

/// How a culprit is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CulpritEvidence {
    /// server.log names it.
    ServerLog,
    /// The Xid line names the owner of the faulting channel.
    XidChannel,
}

/// A lost client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Victim {
    /// Pid as the daemon names it.
    pub pid: u32,
    /// Command name, where known.
    pub command: Option<Arc<str>>,
    /// Who it works for, where known.
    pub workload: Option<Workload>,
    /// How it is known to be lost.
    pub evidence: VictimEvidence,
    /// When its process ended; `None` while it hangs on.
    pub exited_at: Option<Timestamp>,
    /// Work that it lost: seconds since its last checkpoint, or since its start.
    pub work_lost_seconds: Option<u64>,
}

/// How a victim is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VictimEvidence {
    /// server.log declared it INACTIVE or sticky.
    ServerLog,
    /// It was a client before, and left with the fault.
    Snapshot,
    /// An Xid names it.
    Xid,
}

/// An Xid of an incident.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IncidentXid {
    /// The code.
    pub xid: u32,
    /// Who told first.
    pub source: crate::event::XidSource,
    /// The pid that it names, where it owns the faulting channel.
    pub pid: Option<u32>,
    /// When.
    pub at: Timestamp,
    /// How many reports this stands for.
    pub count: u64,
}

/// How the node comes back.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Recovery {
    /// Pids, as the daemon names them, that have not exited: until they do, the server refuses new clients.
    pub blocked_by: Vec<u32>,
    /// When contexts were recreated, or a new server was ready.
    pub recovered_at: Option<Timestamp>,
    /// From the fault to that.
    pub seconds: Option<f64>,
}

/// A line that an incident rests on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evidence {
    /// Where it came from: `server.log`, `control.log`, `kmsg`, `nvml`, `proc`.
    pub source: Arc<str>,
    /// When.
    pub at: Timestamp,
    /// The line, or what was inferred and from what.
    pub text: Arc<str>,
}

/// What the model tells the outlets about an incident.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct IncidentChange {
    /// What changed.
    pub change: Change,
    /// The incident as it is now.
    pub incident: Arc<Incident>,
}

/// What changed about an incident.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// It opened.
    Opened,
    /// It became a mass client loss.
    MassLoss,
    /// Something was learnt.
    Updated,
    /// Processes still block recovery after the window.
    Blocked,
    /// The server recovered.
    Recovered,
    /// It is over.
    Closed,
}
