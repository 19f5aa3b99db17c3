//! The one table of every metric family: name, help, type and labels.
//!
//! HELP and TYPE lines, `docs/metrics.md` and the tests are made from it. Beside every counter of events stands a
//! gauge `<singular of the event>_last_timestamp_seconds`, absent before the first: `increase()` cannot see the event
//! that creates a series.

/// The labels of a fault domain, the same on every series about one. `UUID` and `GPU_I_ID` are spelt as
/// `dcgm-exporter` spells them, so that both join.
pub const DOMAIN_LABELS: [&str; 4] = ["fault_domain", "gpu", "UUID", "GPU_I_ID"];

/// A metric family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Family {
    /// The name as queries use it, with `_total` or `_info`.
    pub name: &'static str,
    /// What it means and which source says so; one line.
    pub help: &'static str,
    /// How to read its values.
    pub kind: Kind,
    /// Whether its series carry [`DOMAIN_LABELS`] before its own labels.
    pub is_per_domain: bool,
    /// Its own labels, in order.
    pub labels: &'static [&'static str],
}

/// The type of a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only grows, until the exporter or what it counts starts anew.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Always 1; the labels are the message.
    Info,
    /// One gauge per value of the label `state` (or the one that the family names last): 1 for the value that holds.
    StateSet,
    /// Buckets, sum and count.
    Histogram,
}

impl Family {
    /// Every label of its series, in order (`le` of a histogram aside).
    pub fn label_names(&self) -> impl Iterator<Item = &'static str> + use<> {
        let domain: &[&str] = if self.is_per_domain { &DOMAIN_LABELS } else { &[] };
        domain.iter().chain(self.labels).copied()
    }

    /// The unit, which is the last part of the name before `_total`; `None` for plain numbers.
    pub fn unit(&self) -> Option<&'static str> {
        unit_of(self.name)
    }
}

/// The unit that a family's name ends in.
pub fn unit_of(name: &str) -> Option<&'static str> {
    let base = name.strip_suffix("_total").unwrap_or(name);
    ["seconds", "bytes", "ratio"]
        .into_iter()
        .find(|unit| base.strip_suffix(unit).is_some_and(|rest| rest.ends_with('_')))
}

impl Kind {
    /// The word for people.
    pub fn word(self) -> &'static str {
        match self {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Info => "info",
            Kind::StateSet => "state set",
            Kind::Histogram => "histogram",
        }
    }
}

/// Families that belong together.
#[derive(Debug, Clone, Copy)]
pub struct Section {
    /// Heading in the documentation.
    pub title: &'static str,
    /// Its families.
    pub families: &'static [&'static Family],
}

/// Every family, in the order of the table.
pub fn all() -> impl Iterator<Item = &'static Family> {
    SECTIONS.iter().flat_map(|section| section.families.iter().copied())
}

/// The family of this name.
pub fn named(name: &str) -> Option<&'static Family> {
    all().find(|family| family.name == name)
}

macro_rules! families {
    ($($title:literal {
        $($id:ident = $kind:ident $name:literal $($per:ident)? [$($label:literal),*] $help:literal;)*
    })*) => {
        $($(
            #[doc = concat!("`", $name, "`")]
            pub const $id: Family = Family {
                name: $name,
                help: $help,
                kind: Kind::$kind,
                is_per_domain: families!(@per $($per)?),
                labels: &[$($label),*],
            };
        )*)*
        /// The table.
        pub const SECTIONS: &[Section] = &[
            $(Section { title: $title, families: &[$(&$id),*] }),*
        ];
    };
    (@per domain) => { true };
    (@per) => { false };
}

families! {
    "Control daemons" {
        CONTROL_DAEMON_UP = Gauge "mps_control_daemon_up" ["daemon"]
            "Whether the MPS control daemon lives and answers (control_lock, control socket).";
        CONTROL_DAEMON_STATE = StateSet "mps_control_daemon_state" ["daemon", "state"]
            "State of the MPS control daemon; idle is alive without a server, stale is killed with its files left (control_lock, control socket).";
        CONTROL_DAEMON_INFO = Info "mps_control_daemon_info" ["daemon", "pid", "pipe_directory", "log_directory", "protocol", "version"]
            "The MPS control daemon; always 1 (discovery, control socket, control.log).";
        CONTROL_DAEMON_START_TIME = Gauge "mps_control_daemon_start_time_seconds" ["daemon"]
            "When the MPS control daemon started, in seconds since the Unix epoch (/proc).";
        DEFAULT_ACTIVE_THREAD = Gauge "mps_default_active_thread_ratio" ["daemon"]
            "Share of a GPU's threads that a new client may use by default, 0 to 1 (control socket).";
        PENDING_CLIENTS = Gauge "mps_pending_clients" ["daemon"]
            "Clients that wait for an MPS server: another user's server is there, or theirs is not ready (control.log).";
        PENDING_CLIENT_OLDEST = Gauge "mps_pending_client_oldest_timestamp_seconds" ["daemon"]
            "Since when the oldest pending client waits, in seconds since the Unix epoch (control.log).";
        CLIENTS_REJECTED = Counter "mps_clients_rejected_total" ["daemon", "reason"]
            "Clients that an MPS server turned away; the log does not tell for which device (server.log).";
        CLIENT_REJECTED_LAST = Gauge "mps_client_rejected_last_timestamp_seconds" ["daemon", "reason"]
            "When an MPS server last turned a client away, in seconds since the Unix epoch (server.log).";
        TROUBLES = Counter "mps_control_daemon_troubles_total" ["daemon", "trouble"]
            "Complaints of the MPS control daemon or its servers about their surroundings since the daemon's start (control.log, server.log).";
        TROUBLE_LAST = Gauge "mps_control_daemon_trouble_last_timestamp_seconds" ["daemon", "trouble"]
            "When the MPS control daemon or a server last complained of this, in seconds since the Unix epoch (control.log, server.log).";
        CONTROL_QUERIES = Counter "mps_control_queries_total" ["daemon", "result"]
            "Sessions of this exporter with the MPS control daemon, by result (control socket).";
        CONTROL_QUERY_DURATION = Histogram "mps_control_query_duration_seconds" ["daemon", "result"]
            "Duration of this exporter's sessions with the MPS control daemon (control socket).";
        DAEMON_RESTARTS = Counter "mps_daemon_restarts_total" ["daemon", "result"]
            "Restarts of an MPS control daemon that this exporter tried, by result (remediation).";
        DAEMON_RESTART_LAST = Gauge "mps_daemon_restart_last_timestamp_seconds" ["daemon", "result"]
            "When this exporter last tried to restart an MPS control daemon, in seconds since the Unix epoch (remediation).";
    }
    "Servers" {
        SERVER_UP = Gauge "mps_server_up" ["daemon", "server"]
            "Whether the MPS server runs; a server that is gone keeps its series with 0 (control.log, control socket).";
        SERVER_STATE = StateSet "mps_server_state" ["daemon", "server", "state"]
            "State of the MPS server while it runs; in fault it refuses new clients on all its GPUs (control socket, server.log).";
        SERVER_CLIENTS = Gauge "mps_server_clients" ["daemon", "server"]
            "Clients of the MPS server, each once, also those whose device is not known yet (server.log, control socket).";
        SERVER_INFO = Info "mps_server_info" ["daemon", "server", "pid", "uid", "version"]
            "The MPS server that runs; always 1 (control.log, server.log).";
        SERVER_START_TIME = Gauge "mps_server_start_time_seconds" ["daemon", "server"]
            "When the MPS server started, in seconds since the Unix epoch (control.log, /proc).";
        SERVER_STARTS = Counter "mps_server_starts_total" ["daemon", "server"]
            "Starts of the MPS server (control.log).";
        SERVER_START_LAST = Gauge "mps_server_start_last_timestamp_seconds" ["daemon", "server"]
            "When an MPS server last started here, in seconds since the Unix epoch (control.log).";
        SERVER_EXITS = Counter "mps_server_exits_total" ["daemon", "server", "result"]
            "Ends of the MPS server; failed is any end without an orderly shutdown, whatever its exit status (control.log, server.log).";
        SERVER_EXIT_LAST = Gauge "mps_server_exit_last_timestamp_seconds" ["daemon", "server", "result"]
            "When an MPS server last ended here, in seconds since the Unix epoch (control.log).";
        SERVER_FAULTS = Counter "mps_server_faults_total" ["daemon", "server"]
            "Fatal GPU errors that the MPS server handled (server.log).";
        SERVER_FAULT_LAST = Gauge "mps_server_fault_last_timestamp_seconds" ["daemon", "server"]
            "When the MPS server last handled a fatal GPU error, in seconds since the Unix epoch (server.log).";
    }
    "Fault domains" {
        FAULT_DOMAIN_INFO = Info "mps_fault_domain_info" domain ["daemon", "sharing", "model_name", "pci_bus_id", "GPU_I_PROFILE", "driver_version"]
            "The fault domain: a device and how it is shared; always 1 (NVML, control.log).";
        CLIENTS = Gauge "mps_clients" domain []
            "MPS clients with a context on the device; one that spans devices counts on each, so never sum over devices (server.log, control socket, NVML).";
        CLIENT_CONTEXTS = Gauge "mps_client_contexts" domain []
            "Contexts of MPS clients on the device (server.log, control socket).";
        CLIENT_CONTEXTS_LIMIT = Gauge "mps_client_contexts_limit" domain []
            "How many client contexts the MPS server allows on the device (compute capability by NVML).";
        CLIENT_CONNECTS = Counter "mps_client_connects_total" domain []
            "MPS clients that connected to the device (server.log, control socket).";
        CLIENT_CONNECT_LAST = Gauge "mps_client_connect_last_timestamp_seconds" domain []
            "When an MPS client last connected to the device, in seconds since the Unix epoch (server.log, control socket).";
        CLIENT_DISCONNECTS = Counter "mps_client_disconnects_total" domain []
            "MPS clients that left the device, for whatever reason (server.log, control socket).";
        CLIENT_DISCONNECT_LAST = Gauge "mps_client_disconnect_last_timestamp_seconds" domain []
            "When an MPS client last left the device, in seconds since the Unix epoch (server.log, control socket).";
        CLIENTS_LOST = Counter "mps_clients_lost_total" domain ["cause"]
            "MPS clients that did not leave in an orderly way, by cause (server.log, control.log, Xids, kernel log).";
        CLIENT_LOST_LAST = Gauge "mps_client_lost_last_timestamp_seconds" domain ["cause"]
            "When an MPS client was last lost for this cause, in seconds since the Unix epoch (server.log, control.log, Xids, kernel log).";
        BLAST_RADIUS_CLIENTS = Gauge "mps_blast_radius_clients" domain ["scope"]
            "Client processes that a fault of this scope would kill now (server.log, control socket, NVML).";
        BLAST_RADIUS_WORKLOADS = Gauge "mps_blast_radius_workloads" domain ["scope"]
            "Workloads (pods, Slurm jobs, else control groups) that a fault of this scope would hit now (/proc, cgroups).";
        BLAST_RADIUS_MEMORY = Gauge "mps_blast_radius_memory_bytes" domain ["scope"]
            "GPU memory of the processes that a fault of this scope would kill now (NVML).";
        WORK_AT_RISK = Gauge "mps_work_at_risk_seconds" domain ["scope"]
            "Work that a fault of this scope would lose now: time since each client's last checkpoint, else since its start, summed (checkpoint files, /proc).";
        COUPLED_DEVICES = Gauge "mps_coupled_devices" domain []
            "Devices that one client's fatal fault takes down together, because clients span them; this one included (server.log, control socket).";
        BYPASSING_PROCESSES = Gauge "mps_bypassing_processes" domain []
            "Compute processes on a device under MPS that are not clients of its server (NVML, /proc).";
    }
    "Incidents and recovery" {
        INCIDENTS = Counter "mps_incidents_total" domain ["cause"]
            "Incidents on the fault domain, each counted once, by the cause known when it reached the domain: what it turned out to be is in mps_clients_lost_total and the record. The OpenMetrics exemplar names the last incident (model).";
        INCIDENT_LAST = Gauge "mps_incident_last_timestamp_seconds" domain ["cause"]
            "When the last incident of this cause began, in seconds since the Unix epoch (model).";
        INCIDENT_LAST_CULPRIT = Info "mps_incident_last_culprit_info" domain ["incident", "pid", "command", "namespace", "pod", "container", "slurm_job", "evidence"]
            "The client that the fault domain's last incident is put down to; always 1; absent where no source named one (server.log, Xid lines).";
        INCIDENT_LAST_VICTIMS = Gauge "mps_incident_last_victims" domain ["namespace", "pod", "container", "slurm_job"]
            "Clients lost in the fault domain's last incident, on all its devices, so never sum over domains; by workload, at most collectors.workloads_limit (model, /proc, cgroups).";
        MASS_CLIENT_LOSS = Counter "mps_mass_client_loss_total" domain []
            "Incidents that took a large share of the clients at once: at least incidents.min_clients and incidents.min_ratio (model).";
        MASS_CLIENT_LOSS_LAST = Gauge "mps_mass_client_loss_last_timestamp_seconds" domain []
            "When the last mass client loss happened, in seconds since the Unix epoch (model).";
        MASS_CLIENT_LOSS_LAST_CLIENTS = Gauge "mps_mass_client_loss_last_clients" domain []
            "Clients lost in the last mass client loss (model).";
        RECOVERY_BLOCKING_CLIENTS = Gauge "mps_recovery_blocking_clients" domain []
            "Processes hit by a fault that have not exited: until they do, the MPS server refuses new clients (server.log, pidfd).";
        FAULT_START = Gauge "mps_fault_start_timestamp_seconds" domain []
            "When the fault began that the domain has not recovered from, in seconds since the Unix epoch; absent while healthy (server.log).";
        RECOVERY_DURATION = Histogram "mps_recovery_duration_seconds" domain []
            "Time from a fault to contexts recreated or a new server ready (server.log, control.log).";
    }
    "GPUs" {
        GPU_UP = Gauge "mps_gpu_up" ["gpu", "UUID"]
            "Whether NVML reaches the GPU; a lost GPU keeps its series with 0 (NVML).";
        GPU_COMPUTE_MODE = StateSet "mps_gpu_compute_mode" ["gpu", "UUID", "mode"]
            "Compute mode of the GPU; with MPS it should be exclusive_process (NVML).";
        GPU_RECOVERY_ACTION = StateSet "mps_gpu_recovery_action" ["gpu", "UUID", "action"]
            "What the driver says must be done to bring the GPU back; none is healthy (NVML).";
        GPU_XID_ERRORS = Counter "mps_gpu_xid_errors_total" ["gpu", "UUID", "GPU_I_ID", "xid", "source"]
            "Xid errors by the source that told; both sources tell of the same errors, so never add them up (kernel log, NVML).";
        GPU_XID_LAST = Gauge "mps_gpu_xid_last_timestamp_seconds" ["gpu", "UUID", "GPU_I_ID", "xid", "source"]
            "When the Xid was last told, in seconds since the Unix epoch (kernel log, NVML).";
    }
    "Workloads and clients" {
        WORKLOAD_CLIENTS = Gauge "mps_workload_clients" domain ["namespace", "pod", "container", "slurm_job"]
            "MPS clients on the device by workload, empty labels for those without a pod, container or job; at most collectors.workloads_limit series (cgroups, /proc).";
        CHECKPOINT_LAST = Gauge "mps_checkpoint_last_timestamp_seconds" ["daemon", "namespace", "pod", "container", "slurm_job"]
            "When the workload last wrote a checkpoint, in seconds since the Unix epoch; absent where no checkpoint place is known (checkpoint files).";
        CLIENT_INFO = Info "mps_client_info" ["daemon", "server", "pid", "host_pid", "command", "namespace", "pod", "container", "slurm_job", "state"]
            "An MPS client process; always 1; with collectors.clients, at most collectors.clients_limit (server.log, control socket, /proc).";
        CLIENT_MEMORY = Gauge "mps_client_memory_bytes" ["daemon", "server", "pid"]
            "GPU memory of an MPS client on all its devices; with collectors.clients (NVML).";
        CLIENT_CONNECTED = Gauge "mps_client_connected_timestamp_seconds" ["daemon", "server", "pid"]
            "When an MPS client connected, in seconds since the Unix epoch; with collectors.clients (server.log).";
        CLIENT_CHECKPOINT_LAST = Gauge "mps_client_checkpoint_last_timestamp_seconds" ["daemon", "server", "pid"]
            "When an MPS client last wrote a checkpoint, in seconds since the Unix epoch; with collectors.clients (checkpoint files).";
    }
    "Sources" {
        SOURCE_UP = Gauge "mps_source_up" ["source", "daemon"]
            "Whether the source works; 0 means that what rests on it alone is absent or old.";
        SOURCE_LAST_SUCCESS = Gauge "mps_source_last_success_timestamp_seconds" ["source", "daemon"]
            "When the source last worked, in seconds since the Unix epoch.";
        SOURCE_DISAGREEMENT = Gauge "mps_source_disagreement" ["source", "daemon"]
            "Whether the source says something that others contradict; the log says what (model).";
        LOG_LINES = Counter "mps_log_lines_total" ["daemon", "file", "class"]
            "Lines read from MPS logs. An unrecognized line is in no known grammar and changed nothing.";
        LOG_BYTES = Counter "mps_log_bytes_total" ["daemon", "file"]
            "Bytes read from MPS logs.";
        LOG_LAG = Gauge "mps_log_lag_bytes" ["daemon", "file"]
            "Bytes of an MPS log that are written but not read yet (stat of the file).";
        LOG_DISCONTINUITIES = Counter "mps_log_discontinuities_total" ["daemon", "file", "reason"]
            "Times that an MPS log was truncated, replaced or cut so that lines may have been missed.";
        KMSG_RECORDS_LOST = Counter "mps_kmsg_records_lost_total" []
            "Kernel log records that were overwritten before they could be read (sequence gaps of /dev/kmsg).";
        KMSG_RECORDS_INJECTED = Counter "mps_kmsg_records_injected_total" []
            "Xid lines in the kernel log that a user process wrote, not the kernel (facility above 0): not believed.";
        SOURCE_ERRORS = Counter "mps_exporter_source_errors_total" ["source", "reason"]
            "Errors of a source, by reason.";
    }
    "Alerts and actions" {
        ALERTS_SENT = Counter "mps_alerts_sent_total" ["alertmanager", "result"]
            "Posts of alerts to an Alertmanager, by result.";
        ALERT_SENT_LAST = Gauge "mps_alert_sent_last_timestamp_seconds" ["alertmanager", "result"]
            "When a post of alerts to an Alertmanager last ended so, in seconds since the Unix epoch.";
        ALERTS_DROPPED = Counter "mps_alerts_dropped_total" ["alertmanager"]
            "Alerts given up because the queue to an Alertmanager was full or the alert too old.";
        HOOK_RUNS = Counter "mps_hook_runs_total" ["hook", "result"]
            "Runs of remediation hooks, by result.";
        HOOK_RUN_LAST = Gauge "mps_hook_run_last_timestamp_seconds" ["hook", "result"]
            "When a remediation hook last ended so, in seconds since the Unix epoch.";
        JOURNAL_ERRORS = Counter "mps_journal_errors_total" []
            "Writes to the incident journal that failed. The incidents paged all the same.";
    }
    "The exporter itself" {
        BUILD_INFO = Info "mps_exporter_build_info" ["version", "revision"]
            "The version of this exporter; always 1.";
        CONFIG_RELOADS = Counter "mps_exporter_config_reloads_total" ["result"]
            "Reloads of the configuration file, by result. A refused file leaves the old configuration in force.";
        WEB_CONFIG_RELOADS = Counter "mps_exporter_web_config_reloads_total" ["result"]
            "Reloads of the web configuration and its certificates, by result. A refused file leaves the old ones in force.";
        TASK_RESTARTS = Counter "mps_exporter_task_restarts_total" ["task"]
            "Restarts of a task of this exporter that ended unexpectedly.";
        SERIES_DROPPED = Gauge "mps_exporter_series_dropped" ["collector"]
            "Series that this page leaves out because a collector's limit is reached (clients, workloads) or because they would repeat another (duplicates).";
        SNAPSHOT_TIMESTAMP = Gauge "mps_exporter_snapshot_timestamp_seconds" []
            "When the model last took the snapshot that this page shows, in seconds since the Unix epoch.";
        PROCESS_CPU = Counter "process_cpu_seconds_total" []
            "User and system CPU time of this exporter (/proc/self/stat).";
        PROCESS_RESIDENT_MEMORY = Gauge "process_resident_memory_bytes" []
            "Resident memory of this exporter (/proc/self/stat).";
        PROCESS_VIRTUAL_MEMORY = Gauge "process_virtual_memory_bytes" []
            "Virtual memory of this exporter (/proc/self/stat).";
        PROCESS_START_TIME = Gauge "process_start_time_seconds" []
            "When this exporter started, in seconds since the Unix epoch (/proc/self/stat).";
        PROCESS_THREADS = Gauge "process_threads" []
            "Threads of this exporter (/proc/self/stat).";
        PROCESS_OPEN_FDS = Gauge "process_open_fds" []
            "Open file descriptors of this exporter (/proc/self/fd).";
        PROCESS_MAX_FDS = Gauge "process_max_fds" []
            "How many file descriptors this exporter may open (/proc/self/limits).";
    }
}

#[cfg(test)]
mod tests;
