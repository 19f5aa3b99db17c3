//! The devices of the node, however sources name them.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::event::{ComputeMode, GpuFacts, GpuProcess, GpuReport, MigFacts, RecoveryAction};
use crate::identity::{DaemonName, DeviceName, PciAddress};

/// A device of this node for as long as the exporter runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct DeviceId(u32);

/// A GPU, a MIG instance, or something that only its UUID's first groups are known of.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Device {
    /// What is known of its UUID.
    pub name: Name,
    /// NVML's facts; `None` until NVML has listed it.
    pub facts: Option<Facts>,
    /// PCI address, by NVML or by the kernel log.
    pub pci: Option<PciAddress>,
    /// Whether NVML listed it in its last report.
    pub is_listed: bool,
    /// Whether it is gone: NVML says lost, or the kernel log says fallen off the bus.
    pub is_lost: bool,
}

/// How much of a UUID is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Name {
    /// All of it.
    Whole(Arc<str>),
    /// Its first groups, from `ps`.
    Prefix(Arc<str>),
    /// Nothing: the kernel log named it by its PCI address.
    PciOnly,
    /// Clients of this daemon are on a device that no source names.
    Unknown(DaemonName),
}

/// What NVML says of a device.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Facts {
    pub index: u32,
    pub gpu_uuid: Arc<str>,
    pub model: Option<Arc<str>>,
    pub compute_mode: Option<ComputeMode>,
    pub recovery_action: Option<RecoveryAction>,
    pub compute_capability: Option<(u32, u32)>,
    /// GPU instance, compute instance, profile; `None` for a whole GPU.
    pub instance: Option<(u32, u32, Option<Arc<str>>)>,
    /// Whether MIG is on: then processes are on its instances.
    pub is_mig_parent: bool,
    pub mps_clients: Option<Vec<GpuProcess>>,
    pub compute_processes: Option<Vec<GpuProcess>>,
}

/// All devices.
#[derive(Debug, Default)]
pub(super) struct Devices {
    all: BTreeMap<DeviceId, Device>,
    next: u32,
    /// Driver version, once NVML has told.
    pub driver_version: Option<Arc<str>>,
}

/// How many devices are remembered that only logs or kernel lines name. A node has 16 GPUs with 7 instances each.
const MAX_DEVICES: usize = 512;

impl Devices {
    pub fn get(&self, id: DeviceId) -> &Device {
        self.all.get(&id).expect("a device id is only made by this table, which never forgets one")
    }

    pub fn iter(&self) -> impl Iterator<Item = (DeviceId, &Device)> {
        self.all.iter().map(|(id, device)| (*id, device))
    }

    fn add(&mut self, name: Name) -> Option<DeviceId> {
        if self.all.len() >= MAX_DEVICES {
            return None;
        }
        let id = DeviceId(self.next);
        self.next += 1;
        let device = Device { name, facts: None, pci: None, is_listed: false, is_lost: false };
        self.all.insert(id, device);
        Some(id)
    }

    fn find(&self, wanted: impl Fn(&Device) -> bool) -> Option<DeviceId> {
        self.iter().find(|(_, device)| wanted(device)).map(|(id, _)| id)
    }

    /// The device with this name; it is remembered when it is new. `None` for an ordinal that cannot be resolved.
    ///
    /// `visible` is the daemon's `CUDA_VISIBLE_DEVICES`: ordinals are positions in it.
    pub fn resolve(&mut self, name: &DeviceName, visible: Option<&str>) -> Option<DeviceId> {
        match name {
            DeviceName::Uuid(uuid) => self.by_uuid(uuid),
            DeviceName::UuidPrefix(prefix) => {
                let known = self.find(|device| match &device.name {
                    Name::Whole(uuid) => uuid.starts_with(prefix.as_ref()),
                    Name::Prefix(other) => other == prefix,
                    Name::PciOnly | Name::Unknown(_) => false,
                });
                known.or_else(|| self.add(Name::Prefix(prefix.clone())))
            }
            DeviceName::Ordinal(ordinal) => self.by_ordinal(*ordinal, visible),
        }
    }

    fn by_uuid(&mut self, uuid: &Arc<str>) -> Option<DeviceId> {
        if let Some(known) = self.find(|device| device.name == Name::Whole(uuid.clone())) {
            return Some(known);
        }
        let cut = self
            .find(|device| matches!(&device.name, Name::Prefix(prefix) if uuid.starts_with(prefix.as_ref())));
        match cut {
            Some(id) => {
                self.entry(id).name = Name::Whole(uuid.clone());
                Some(id)
            }
            None => self.add(Name::Whole(uuid.clone())),
        }
    }

    /// An ordinal is a position in `CUDA_VISIBLE_DEVICES`. Without that list CUDA orders devices by speed, so NVML's
    /// index is the same only when all GPUs are of one model.
    fn by_ordinal(&mut self, ordinal: u32, visible: Option<&str>) -> Option<DeviceId> {
        if let Some(list) = visible.filter(|list| !list.is_empty()) {
            let entry = list.split(',').nth(ordinal as usize)?.trim();
            if let Ok(index) = entry.parse::<u32>() {
                return self.gpu_by_index(index);
            }
            return self.find(|device| matches!(&device.name, Name::Whole(uuid) if uuid.starts_with(entry)));
        }
        let mut models = self.all.values().filter_map(|device| {
            device.facts.as_ref().filter(|facts| facts.instance.is_none()).map(|facts| facts.model.clone())
        });
        let first = models.next()?;
        models.all(|model| model == first).then(|| self.gpu_by_index(ordinal)).flatten()
    }

    fn gpu_by_index(&self, index: u32) -> Option<DeviceId> {
        self.find(|device| {
            device.facts.as_ref().is_some_and(|facts| facts.index == index && facts.instance.is_none())
        })
    }

    /// The GPU at this address, or its MIG instance.
    pub fn at_pci(&mut self, pci: PciAddress, gpu_instance: Option<u32>) -> Option<DeviceId> {
        if let Some(wanted) = gpu_instance
            && let Some(id) =
                self.find(|device| device.pci == Some(pci) && device.gpu_instance() == Some(wanted))
        {
            return Some(id);
        }
        if let Some(id) = self.find(|device| device.pci == Some(pci) && device.gpu_instance().is_none()) {
            return Some(id);
        }
        let id = self.add(Name::PciOnly)?;
        self.entry(id).pci = Some(pci);
        Some(id)
    }

    /// The kernel log told which UUID the GPU at an address has.
    pub fn learn_pci(&mut self, pci: PciAddress, uuid: &Arc<str>) {
        let by_pci = self.find(|device| device.pci == Some(pci) && device.gpu_instance().is_none());
        let by_uuid = self.find(|device| device.name == Name::Whole(uuid.clone()));
        match (by_uuid, by_pci) {
            (Some(id), _) => self.entry(id).pci = Some(pci),
            (None, Some(id)) if self.get(id).name == Name::PciOnly => {
                self.entry(id).name = Name::Whole(uuid.clone());
            }
            _ => {
                if let Some(id) = self.by_uuid(uuid) {
                    self.entry(id).pci = Some(pci);
                }
            }
        }
    }

    /// The stand-in for a device that no source names.
    pub fn unknown(&mut self, daemon: &DaemonName) -> Option<DeviceId> {
        let name = Name::Unknown(daemon.clone());
        self.find(|device| device.name == name).or_else(|| self.add(name))
    }

    /// Takes over what NVML reports. Devices that it no longer lists stay, unlisted.
    pub fn report(&mut self, report: &GpuReport) {
        for device in self.all.values_mut() {
            device.is_listed = false;
        }
        if report.driver_version.is_some() {
            self.driver_version.clone_from(&report.driver_version);
        }
        for gpu in &report.gpus {
            self.learn_pci(gpu.pci, &gpu.uuid);
            let Some(id) = self.by_uuid(&gpu.uuid) else { continue };
            let device = self.entry(id);
            device.pci = Some(gpu.pci);
            device.is_listed = true;
            device.is_lost = gpu.is_lost;
            device.facts = Some(Facts::of_gpu(gpu));
            for instance in &gpu.instances {
                let Some(id) = self.by_uuid(&instance.uuid) else { continue };
                let device = self.entry(id);
                device.pci = Some(gpu.pci);
                device.is_listed = true;
                device.is_lost = gpu.is_lost;
                device.facts = Some(Facts::of_instance(gpu, instance));
            }
        }
    }

    /// NVML tells nothing any more: what may have changed since is not known. What a device is stays.
    pub fn unlist(&mut self) {
        for device in self.all.values_mut() {
            device.is_listed = false;
            if let Some(facts) = &mut device.facts {
                facts.compute_mode = None;
                facts.recovery_action = None;
                facts.mps_clients = None;
                facts.compute_processes = None;
            }
        }
    }

    pub fn entry(&mut self, id: DeviceId) -> &mut Device {
        self.all.get_mut(&id).expect("a device id is only made by this table, which never forgets one")
    }

    /// A device and every other one on the same piece of hardware.
    pub fn same_gpu(&self, id: DeviceId) -> Vec<DeviceId> {
        let device = self.get(id);
        let same = |other: &Device| match (&device.facts, &other.facts) {
            (Some(a), Some(b)) => a.gpu_uuid == b.gpu_uuid,
            _ => device.pci.is_some() && device.pci == other.pci,
        };
        self.iter().filter(|(other, device)| *other == id || same(device)).map(|(id, _)| id).collect()
    }
}

impl Device {
    /// GPU instance id of a MIG instance.
    pub fn gpu_instance(&self) -> Option<u32> {
        self.facts.as_ref().and_then(|facts| facts.instance.as_ref()).map(|(gpu_instance, ..)| *gpu_instance)
    }

    /// The label `UUID`: as much of it as is known, or empty. That of a MIG instance is its GPU's, as `dcgm-exporter` has
    /// it; `GPU_I_ID` tells the instances apart.
    pub fn uuid_label(&self) -> Arc<str> {
        if let Some(facts) = self.facts.as_ref().filter(|facts| facts.instance.is_some()) {
            return facts.gpu_uuid.clone();
        }
        match &self.name {
            Name::Whole(uuid) | Name::Prefix(uuid) => uuid.clone(),
            Name::PciOnly | Name::Unknown(_) => "".into(),
        }
    }

    /// The UUID of a MIG device.
    pub fn mig_uuid(&self) -> Option<Arc<str>> {
        match &self.name {
            Name::Whole(uuid) | Name::Prefix(uuid) if uuid.starts_with("MIG-") => Some(uuid.clone()),
            _ => None,
        }
    }

    /// The label `gpu`, empty where no index is known.
    pub fn gpu_label(&self) -> Arc<str> {
        self.facts.as_ref().map_or_else(|| "".into(), |facts| facts.index.to_string().into())
    }

    /// The label `GPU_I_ID`.
    pub fn gpu_instance_label(&self) -> Arc<str> {
        self.gpu_instance().map_or_else(|| "".into(), |id| id.to_string().into())
    }

    /// The device's part of the label `fault_domain`.
    pub fn domain_part(&self) -> String {
        match (&self.facts, &self.name) {
            (Some(facts), _) => match &facts.instance {
                Some((gpu_instance, ..)) => format!("{}/{gpu_instance}", facts.index),
                None => facts.index.to_string(),
            },
            (None, Name::Whole(uuid) | Name::Prefix(uuid)) => uuid.to_string(),
            (None, Name::PciOnly) => self.pci.map_or_else(|| "unknown".to_owned(), |pci| pci.to_string()),
            (None, Name::Unknown(_)) => "unknown".to_owned(),
        }
    }
}

impl Facts {
    fn of_gpu(gpu: &GpuFacts) -> Facts {
        Facts {
            index: gpu.index,
            gpu_uuid: gpu.uuid.clone(),
            model: gpu.model.clone(),
            compute_mode: gpu.compute_mode,
            recovery_action: gpu.recovery_action,
            compute_capability: gpu.compute_capability,
            instance: None,
            is_mig_parent: gpu.mig_enabled == Some(true) && !gpu.instances.is_empty(),
            mps_clients: gpu.mps_clients.clone(),
            compute_processes: gpu.compute_processes.clone(),
        }
    }

    fn of_instance(gpu: &GpuFacts, instance: &MigFacts) -> Facts {
        Facts {
            instance: Some((instance.gpu_instance, instance.compute_instance, instance.profile.clone())),
            compute_mode: instance.compute_mode,
            is_mig_parent: false,
            mps_clients: instance.mps_clients.clone(),
            compute_processes: instance.compute_processes.clone(),
            ..Facts::of_gpu(gpu)
        }
    }

    /// Contexts that one device can have: 16 before Volta, 48 from Volta on, 60 from CUDA 13.1 (driver 590) on.
    pub fn contexts_limit(&self, driver_version: Option<&str>) -> Option<u32> {
        let (major, _) = self.compute_capability?;
        if major < 7 {
            return Some(16);
        }
        let driver: u32 = driver_version?.split('.').next()?.parse().ok()?;
        Some(if driver >= 590 { 60 } else { 48 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_uuid_and_the_whole_one_are_one_device() {
        let mut devices = Devices::default();
        let cut = devices.resolve(&DeviceName::UuidPrefix("GPU-1111aaaa-2222-3333".into()), None);
        let whole: Arc<str> = "GPU-1111aaaa-2222-3333-4444-555566667777".into();
        assert_eq!(devices.resolve(&DeviceName::Uuid(whole.clone()), None), cut);
        assert_eq!(devices.resolve(&DeviceName::UuidPrefix("GPU-1111aaaa-2222-3333".into()), None), cut);
        assert_eq!(devices.get(cut.unwrap()).uuid_label(), whole);
    }

    #[test]
    fn an_ordinal_is_a_position_in_the_visible_devices_and_unknown_without() {
        let mut devices = Devices::default();
        let uuid: Arc<str> = "GPU-1111aaaa-2222-3333-4444-555566667777".into();
        let id = devices.resolve(&DeviceName::Uuid(uuid.clone()), None);
        let visible = format!("GPU-ffff0000-0000-0000-0000-000000000000,{uuid}");
        assert_eq!(devices.resolve(&DeviceName::Ordinal(1), Some(&visible)), id);
        assert_eq!(devices.resolve(&DeviceName::Ordinal(0), Some(&visible)), None);
        assert_eq!(devices.resolve(&DeviceName::Ordinal(0), None), None);
    }

    #[test]
    fn instances_have_the_uuid_label_of_their_gpu() {
        let instance = |gpu_instance: u32| MigFacts {
            uuid: format!("MIG-0000000{gpu_instance}-2222-3333-4444-555566667777").into(),
            gpu_instance,
            compute_instance: 0,
            profile: None,
            compute_mode: None,
            mps_clients: None,
            compute_processes: None,
        };
        let gpu: Arc<str> = "GPU-1111aaaa-2222-3333-4444-555566667777".into();
        let facts = GpuFacts {
            index: 0,
            uuid: gpu.clone(),
            pci: PciAddress { domain: 0, bus: 0x3b, device: 0 },
            model: None,
            is_lost: false,
            compute_mode: None,
            recovery_action: None,
            compute_capability: None,
            mig_enabled: Some(true),
            instances: vec![instance(1), instance(2)],
            mps_clients: None,
            compute_processes: None,
        };
        let mut devices = Devices::default();
        devices.report(&GpuReport { driver_version: None, gpus: vec![facts] });
        let labels: Vec<_> =
            devices.iter().map(|(_, device)| (device.uuid_label(), device.gpu_instance_label())).collect();
        let expected = ["", "1", "2"].map(|instance| (gpu.clone(), instance.into()));
        assert_eq!(labels, expected);
    }

    #[test]
    fn the_kernel_log_names_a_gpu_before_nvml_does() {
        let mut devices = Devices::default();
        let pci = PciAddress { domain: 0, bus: 0x3b, device: 0 };
        let first = devices.at_pci(pci, None);
        devices.learn_pci(pci, &"GPU-1111aaaa-2222-3333-4444-555566667777".into());
        assert_eq!(devices.at_pci(pci, None), first);
        assert_eq!(devices.by_uuid(&"GPU-1111aaaa-2222-3333-4444-555566667777".into()), first);
    }
}
