//! What `/api/v1/status` tells, as far as the tree shows it. States stay words: a newer exporter may have more of them.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Deserialize;

use crate::engine::incident::Incident;
use crate::identity::Workload;

/// A node at one moment.
#[derive(Debug, Deserialize)]
pub struct Picture {
    pub at: Timestamp,
    pub daemons: Vec<Daemon>,
    pub servers: Vec<Server>,
    pub domains: Vec<Domain>,
    pub clients: Vec<Client>,
    pub gpus: Vec<Gpu>,
    pub sources: Vec<Source>,
    pub incidents: Vec<Incident>,
    #[serde(default)]
    pub disagreements: Vec<Disagreement>,
}

#[derive(Debug, Deserialize)]
pub struct Daemon {
    pub name: String,
    pub state: String,
    pub pid: Option<u32>,
    pub pipe_directory: String,
    pub version: Option<String>,
    pub pending_clients: Option<u32>,
}

#[derive(Debug, Deserialize)]
pub struct Server {
    pub daemon: String,
    #[serde(rename = "server")]
    pub label: String,
    pub is_up: Option<bool>,
    pub status: Option<String>,
    pub pid: Option<u32>,
    pub clients: Option<u32>,
    pub last_start_failure: Option<String>,
}

#[derive(Debug, Deserialize)]
pub struct Domain {
    #[serde(rename = "fault_domain")]
    pub label: String,
    pub daemon: Option<String>,
    pub gpu: String,
    pub sharing: Option<String>,
    pub model_name: Option<String>,
    pub gpu_instance_profile: Option<String>,
    #[serde(default)]
    pub radius: BTreeMap<String, Radius>,
    #[serde(default)]
    pub coupled_with: Vec<String>,
    pub bypassing_processes: Option<u32>,
    #[serde(default)]
    pub recovery_blocking: u32,
    pub fault_started_at: Option<Timestamp>,
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub struct Radius {
    pub clients: Option<u32>,
    pub workloads: Option<u32>,
    pub memory_bytes: Option<u64>,
    pub work_at_risk_seconds: Option<f64>,
}

#[derive(Debug, Deserialize)]
pub struct Client {
    pub daemon: String,
    pub server: String,
    pub pid: u32,
    pub command: Option<String>,
    pub workload: Option<Workload>,
    #[serde(default)]
    pub domains: Vec<String>,
    pub memory_bytes: Option<u64>,
    pub started_at: Option<Timestamp>,
    pub checkpoint_at: Option<Timestamp>,
    pub state: String,
}

#[derive(Debug, Deserialize)]
pub struct Gpu {
    pub index: u32,
    pub is_up: Option<bool>,
    pub recovery_action: Option<String>,
}

#[derive(Debug, Deserialize)]
pub struct Source {
    #[serde(rename = "source")]
    pub name: String,
    pub daemon: Option<String>,
    pub is_up: bool,
    pub reason: Option<String>,
}

#[derive(Debug, Deserialize)]
pub struct Disagreement {
    pub source: String,
    pub daemon: Option<String>,
    pub about: String,
}

impl Picture {
    /// From the answer of an exporter.
    pub fn from_json(json: &[u8]) -> serde_json::Result<Picture> {
        serde_json::from_slice(json)
    }
}
