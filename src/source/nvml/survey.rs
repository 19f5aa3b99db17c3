//! One cycle: everything that NVML tells, as a [`GpuReport`]. A value that cannot be read is absent; the rest is not.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Slot;
use std::sync::Arc;

use super::driver::Driver;
use super::error::{Error, code};
use super::lists::Buffer;
use super::names::Names;
use super::raw::{Caller, Device, List};
use crate::event::{ComputeMode, GpuFacts, GpuProcess, GpuReport, MigFacts, RecoveryAction};
use crate::identity::PciAddress;
use crate::source::process::proc::ProcRoot;
use crate::telemetry::Telemetry;

/// What is remembered from cycle to cycle.
#[derive(Debug)]
pub struct Survey {
    driver: Driver,
    telemetry: Telemetry,
    /// Every GPU seen since the start, by UUID: a lost one keeps its identity.
    known: BTreeMap<Arc<str>, Known>,
    buffer: Buffer,
    names: Names,
    troubles: Troubles,
}

/// A GPU's identity, which does not change while it exists.
#[derive(Debug, Default)]
struct Known {
    index: u32,
    pci: Option<PciAddress>,
    model: Option<Arc<str>>,
    compute_capability: Option<(u32, u32)>,
    mig_enabled: Option<bool>,
    instances: Vec<MigFacts>,
    is_lost: bool,
    /// The last cycle's mark: whether it was enumerated.
    is_seen: bool,
}

impl Survey {
    /// Nothing seen yet.
    pub fn new(driver: Driver, proc: ProcRoot, telemetry: Telemetry) -> Survey {
        Survey {
            driver,
            telemetry,
            known: BTreeMap::new(),
            buffer: Buffer::default(),
            names: Names::new(proc),
            troubles: Troubles::default(),
        }
    }

    /// Asks everything. An error means that the library as a whole does not work.
    pub fn run(&mut self, caller: Caller<'_>, driver_version: Option<Arc<str>>) -> Result<GpuReport, Error> {
        let count = caller.device_count()?;
        self.names.begin();
        for known in self.known.values_mut() {
            known.is_seen = false;
        }
        let mut gpus = Vec::with_capacity(count as usize);
        for index in 0..count {
            let found = caller.device(index).and_then(|device| Ok((device.uuid()?, device)));
            let facts = match found {
                Ok((uuid, device)) => self.gpu(index, &uuid, &device),
                Err(error) if is_end_of_session(&error) => return Err(error),
                Err(error) => self.out_of_reach(index, error),
            };
            gpus.extend(facts);
        }
        self.add_vanished(&mut gpus);
        gpus.sort_by_key(|gpu| gpu.index);
        self.troubles.settle(&self.telemetry);
        Ok(GpuReport { driver_version, gpus })
    }

    /// A GPU that has a handle.
    fn gpu(&mut self, index: u32, uuid: &str, device: &Device<'_>) -> Option<GpuFacts> {
        let mut asked = Asked { troubles: &mut self.troubles, index, is_lost: false };
        let (uuid, known) = match self.known.entry(uuid.into()) {
            Slot::Occupied(slot) => (Arc::clone(slot.key()), slot.into_mut()),
            Slot::Vacant(slot) => (Arc::clone(slot.key()), slot.insert(Known::default())),
        };
        (known.index, known.is_seen) = (index, true);
        if known.pci.is_none() {
            known.pci = asked.value(device.pci()).or_else(|| self.driver.pci_of(&uuid));
        }
        if known.model.is_none() {
            known.model = asked.value(device.name()).map(Arc::from);
        }
        if known.compute_capability.is_none() {
            known.compute_capability = asked.value(device.compute_capability());
        }
        let mut facts = known.facts(&uuid)?;
        facts.mig_enabled = asked.value(device.is_mig_enabled());
        let is_mig = facts.mig_enabled == Some(true);
        facts.instances = Vec::new();
        if is_mig {
            facts.instances = instances(device, &mut asked, &mut self.buffer, &mut self.names);
        } else {
            facts.compute_mode = asked.value(device.compute_mode()).and_then(mode);
        }
        facts.recovery_action = asked.value(device.recovery_action()).and_then(RecoveryAction::from_number);
        let (buffer, names) = (&mut self.buffer, &mut self.names);
        facts.mps_clients = processes(device, List::Mps, &mut asked, buffer, names);
        facts.compute_processes = processes(device, List::Compute, &mut asked, buffer, names);
        if asked.is_lost {
            return known.lost(&uuid);
        }
        known.found(&facts);
        Some(facts)
    }

    /// A GPU whose handle or UUID could not be had: it is the one that had this index, if any.
    fn out_of_reach(&mut self, index: u32, error: Error) -> Option<GpuFacts> {
        let is_lost = error.code() == Some(code::GPU_IS_LOST);
        self.troubles.note(index, error);
        let (uuid, known) =
            self.known.iter_mut().find(|(_, known)| known.index == index && !known.is_seen)?;
        known.is_seen = true;
        if is_lost { known.lost(uuid) } else { known.facts(uuid) }
    }

    /// GPUs that NVML no longer enumerates: lost, unless another one took their place on the bus.
    fn add_vanished(&mut self, gpus: &mut Vec<GpuFacts>) {
        let is_replaced = |known: &Known| gpus.iter().any(|gpu| Some(gpu.pci) == known.pci);
        self.known.retain(|_, known| known.is_seen || !is_replaced(known));
        for (uuid, known) in &mut self.known {
            if !known.is_seen {
                gpus.extend(known.lost(uuid));
            }
        }
    }
}

impl Known {
    /// What is known without asking; `None` while the PCI address is not.
    fn facts(&self, uuid: &Arc<str>) -> Option<GpuFacts> {
        let Some(pci) = self.pci else {
            tracing::debug!(%uuid, "A GPU is left out until its PCI address is known.");
            return None;
        };
        Some(GpuFacts {
            index: self.index,
            uuid: Arc::clone(uuid),
            pci,
            model: self.model.clone(),
            is_lost: self.is_lost,
            compute_mode: None,
            recovery_action: None,
            compute_capability: self.compute_capability,
            mig_enabled: self.mig_enabled,
            instances: self.instances.clone(),
            mps_clients: None,
            compute_processes: None,
        })
    }

    /// The facts of a lost GPU: its identity and its MIG instances as they were last.
    fn lost(&mut self, uuid: &Arc<str>) -> Option<GpuFacts> {
        if !self.is_lost {
            tracing::error!(%uuid, gpu = self.index, "NVML has lost a GPU.");
            self.is_lost = true;
        }
        self.facts(uuid)
    }

    /// A GPU answered.
    fn found(&mut self, facts: &GpuFacts) {
        if self.is_lost {
            tracing::info!(uuid = %facts.uuid, gpu = self.index, "A lost GPU is back.");
            self.is_lost = false;
        }
        self.mig_enabled = facts.mig_enabled;
        let without_processes =
            |instance: &MigFacts| MigFacts { mps_clients: None, compute_processes: None, ..instance.clone() };
        self.instances.clear();
        self.instances.extend(facts.instances.iter().map(without_processes));
    }
}

/// The MIG devices of a GPU.
fn instances(
    gpu: &Device<'_>,
    asked: &mut Asked<'_>,
    buffer: &mut Buffer,
    names: &mut Names,
) -> Vec<MigFacts> {
    let slots = asked.value(gpu.mig_slots()).unwrap_or(0);
    let mut instances = Vec::new();
    for slot in 0..slots {
        let Some(Some(device)) = asked.value(gpu.mig_device(slot)) else { continue };
        let ids = asked
            .value(device.uuid())
            .zip(asked.value(device.gpu_instance()).zip(asked.value(device.compute_instance())));
        // Without its ids an instance cannot be told from another.
        let Some((uuid, (gpu_instance, compute_instance))) = ids else { continue };
        instances.push(MigFacts {
            uuid: uuid.into(),
            gpu_instance,
            compute_instance,
            profile: asked.value(device.name()).and_then(|name| profile(&name)),
            compute_mode: asked.value(device.compute_mode()).and_then(mode),
            mps_clients: processes(&device, List::Mps, asked, buffer, names),
            compute_processes: processes(&device, List::Compute, asked, buffer, names),
        });
    }
    instances
}

fn processes(
    device: &Device<'_>,
    list: List,
    asked: &mut Asked<'_>,
    buffer: &mut Buffer,
    names: &mut Names,
) -> Option<Vec<GpuProcess>> {
    let entries = asked.value(device.processes(list, buffer))?;
    let process = |entry: &super::lists::Entry| {
        let program = names.program(entry.pid);
        GpuProcess {
            pid: entry.pid,
            memory_bytes: entry.memory_bytes,
            gpu_instance: entry.gpu_instance,
            compute_instance: entry.compute_instance,
            is_mps_server: program.as_ref().is_some_and(|program| program.is_mps),
            command: program.map(|program| program.command),
        }
    };
    Some(entries.iter().map(process).collect())
}

/// NVML's number of a compute mode.
fn mode(number: u32) -> Option<ComputeMode> {
    match number {
        0 => Some(ComputeMode::Default),
        1 => Some(ComputeMode::ExclusiveThread),
        2 => Some(ComputeMode::Prohibited),
        3 => Some(ComputeMode::ExclusiveProcess),
        _ => None,
    }
}

/// The GPU instance's profile in a MIG device's name: `… MIG 1g.10gb`, or `… MIG 1c.3g.20gb` for a part of one.
fn profile(name: &str) -> Option<Arc<str>> {
    let (_, profile) = name.rsplit_once("MIG ")?;
    let of_gpu_instance = match profile.split_once('.') {
        Some((part, rest)) if part.strip_suffix('c').is_some_and(|n| n.parse::<u32>().is_ok()) => rest,
        _ => profile,
    };
    (!of_gpu_instance.is_empty()).then(|| of_gpu_instance.into())
}

/// Whether the library has to be initialised anew.
fn is_end_of_session(error: &Error) -> bool {
    matches!(error.code(), Some(code::UNINITIALIZED | code::DRIVER_NOT_LOADED | code::VERSION_MISMATCH))
}

/// The questions to one GPU: after one was answered "lost", the answers count for nothing.
struct Asked<'t> {
    troubles: &'t mut Troubles,
    index: u32,
    is_lost: bool,
}

impl Asked<'_> {
    fn value<T>(&mut self, answer: Result<T, Error>) -> Option<T> {
        answer
            .map_err(|error| {
                self.is_lost |= error.code() == Some(code::GPU_IS_LOST);
                self.troubles.note(self.index, error);
            })
            .ok()
    }
}

/// Calls that fail: told when they begin to and when they end, not in every cycle.
#[derive(Debug, Default)]
struct Troubles {
    now: BTreeMap<(u32, &'static str), Error>,
    before: BTreeMap<(u32, &'static str), Error>,
}

impl Troubles {
    fn note(&mut self, index: u32, error: Error) {
        if let Some(call) = error.call().filter(|_| !error.is_absence()) {
            self.now.insert((index, call), error);
        }
    }

    /// The end of a cycle.
    fn settle(&mut self, telemetry: &Telemetry) {
        for ((gpu, call), error) in &self.now {
            telemetry.source_error("nvml", call);
            if self.before.get(&(*gpu, *call)).is_none_or(|before| before.code() != error.code()) {
                tracing::warn!(gpu, %error, "NVML does not answer a question about a GPU.");
            }
        }
        for (gpu, call) in self.before.keys().filter(|key| !self.now.contains_key(*key)) {
            tracing::info!(gpu, call, "NVML answers again.");
        }
        self.before = std::mem::take(&mut self.now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_profile_is_the_gpu_instances() {
        assert_eq!(profile("NVIDIA A100-SXM4-40GB MIG 1g.5gb").as_deref(), Some("1g.5gb"));
        assert_eq!(profile("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb").as_deref(), Some("3g.20gb"));
        assert_eq!(profile("NVIDIA H100 MIG 1g.10gb+me").as_deref(), Some("1g.10gb+me"));
        assert_eq!(profile("NVIDIA A100-SXM4-40GB"), None);
    }
}
