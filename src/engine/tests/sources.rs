//! What is known when a source sees less than it did, or is switched off.

use super::super::device::DeviceId;
use super::super::snapshot::DeviceEvidence;
use super::super::state::{ClientKey, MAX_ENDED_PLACES};
use super::*;
use crate::event::{ComputeMode, GpuFacts, GpuProcess, GpuReport};

impl Bench {
    /// An NVML cycle that lists these pids on the first GPUs.
    fn nvml(&mut self, listed: &[&[u32]]) {
        let gpu = |(index, pids): (usize, &&[u32])| {
            let index = u32::try_from(index).unwrap();
            let process = |pid: &u32| GpuProcess {
                pid: *pid,
                memory_bytes: Some(1),
                gpu_instance: None,
                compute_instance: None,
                is_mps_server: false,
                command: None,
            };
            let clients: Vec<GpuProcess> = pids.iter().map(process).collect();
            GpuFacts {
                index,
                uuid: uuid(index),
                pci: pci(index),
                model: None,
                is_lost: false,
                compute_mode: Some(ComputeMode::ExclusiveProcess),
                recovery_action: Some(crate::event::RecoveryAction::None),
                compute_capability: None,
                mig_enabled: None,
                instances: Vec::new(),
                mps_clients: Some(clients.clone()),
                compute_processes: Some(clients),
            }
        };
        let gpus = listed.iter().enumerate().map(gpu).collect();
        self.tell(EventKind::Gpus(GpuReport { driver_version: None, gpus }));
        self.health(SourceName::Nvml, None);
    }

    fn health(&mut self, source: SourceName, daemon: Option<&str>) {
        let daemon = daemon.map(Into::into);
        self.tell(EventKind::Source(SourceHealth { source, daemon, state: Ok(()) }));
    }

    fn devices(&self, pid: u32) -> Vec<DeviceId> {
        let server = &self.node.daemons["default"].servers[&SERVER];
        server.clients[&ClientKey::Named(pid)].devices().into_iter().collect()
    }
}

#[test]
fn a_device_that_nvml_lists_no_more_is_taken_from_a_client_whose_process_nobody_has_found() {
    let mut bench = Bench::new();
    bench.server(LogMessage::DeviceAssociated { device: DeviceName::Uuid(uuid(1)) });
    bench.server(LogMessage::ContextActive { pid: 11, context: 1 });
    bench.nvml(&[&[11], &[11]]);
    assert_eq!(bench.devices(11).len(), 2);
    bench.nvml(&[&[], &[11]]);
    assert_eq!(bench.devices(11).len(), 1);
    // What its log line says stays, and the daemon is asked.
    bench.effects.clear();
    bench.nvml(&[&[], &[]]);
    bench.nvml(&[&[], &[]]);
    assert_eq!(bench.devices(11).len(), 1);
    assert!(bench.effects.contains(&Effect::Look("default".into())), "{:?}", bench.effects);
}

#[test]
fn a_source_that_is_switched_off_is_absent_with_what_only_it_told() {
    let mut bench = Bench::new();
    bench.client(11, &[0], "unit");
    bench.nvml(&[&[11], &[11]]);
    bench.health(SourceName::KernelLog, None);
    bench.health(SourceName::Control, Some("default"));
    let sources = |bench: &Bench| -> Vec<SourceName> {
        bench.snapshot().sources.iter().map(|view| view.source).collect()
    };
    let gpu = |bench: &Bench| bench.snapshot().gpus[0].clone();
    assert_eq!(
        (gpu(&bench).is_up, gpu(&bench).compute_mode),
        (Some(true), Some(ComputeMode::ExclusiveProcess))
    );
    for source in [SourceName::Nvml, SourceName::KernelLog, SourceName::Control] {
        assert!(sources(&bench).contains(&source));
        bench.tell(EventKind::SourceOff(source));
        assert!(!sources(&bench).contains(&source), "{source:?}");
    }
    assert_eq!(gpu(&bench).is_up, None);
    assert_eq!(gpu(&bench).compute_mode, None);
    assert_eq!(gpu(&bench).recovery_action, None);
    let client = &bench.snapshot().clients[0];
    assert_eq!((client.domains.len(), client.memory_bytes), (1, None));
    assert_eq!(client.devices_known_by, Some(DeviceEvidence::LogOrder));
    assert!(sources(&bench).contains(&SourceName::ServerLog), "others stay");
    assert!(bench.incidents().is_empty());
}

#[test]
fn late_news_of_the_sources_of_a_daemon_that_is_gone_bring_nothing_back() {
    let mut bench = Bench::new();
    bench.tell(EventKind::DaemonGone("default".into()));
    bench.log_read("default");
    let snapshot = bench.snapshot();
    assert!(snapshot.daemons.is_empty() && snapshot.sources.is_empty(), "{:?}", snapshot.sources);
}

#[test]
fn sources_of_a_log_that_is_read_elsewhere_now_are_absent() {
    let mut bench = Bench::new();
    let mut site = bench.node.daemons["default"].site.clone();
    site.log = LogPlace::Merged("/var/log/mps".into());
    bench.tell(EventKind::DaemonFound(site));
    assert!(bench.snapshot().sources.is_empty(), "{:?}", bench.snapshot().sources);
}

#[test]
fn servers_that_fail_at_once_again_and_again_do_not_fill_the_memory() {
    let mut bench = Bench::new();
    let starts = |bench: &Bench| {
        let snapshot = bench.snapshot();
        snapshot.servers.iter().find(|server| &*server.server == "uid_1000").unwrap().starts.total
    };
    for pid in 10_000..12_000 {
        bench.log(LogFile::Server, pid, LogMessage::ServerStartup);
        bench.log(LogFile::Server, pid, LogMessage::ServerStartFailed("no device".into()));
        bench.exit(pid);
        bench.pass(300);
    }
    let servers = bench.snapshot().servers;
    assert!(servers.len() <= MAX_ENDED_PLACES + 1, "{}", servers.len());
    assert!(servers.iter().any(|server| &*server.server == "pid_11999" && server.exits_orderly.total == 1));
    assert_eq!(starts(&bench), 1, "a uid's counters stay");
}
