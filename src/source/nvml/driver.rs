//! Whether there is a driver to ask, by files alone: initialising NVML without one creates `/dev/nvidiactl` as root.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use super::error::Error;
use super::raw;
use super::watch::CallSlot;
use crate::identity::PciAddress;

/// The driver's folder under `/proc`.
const FOLDER: &str = "driver/nvidia";

/// Where the driver shows itself.
#[derive(Debug, Clone)]
pub struct Driver {
    proc: PathBuf,
    module: PathBuf,
}

impl Driver {
    /// Under these roots: the host's `/proc`, and `/sys/module/nvidia`.
    pub fn new(proc: &Path, module: &Path) -> Driver {
        Driver { proc: proc.join(FOLDER), module: module.to_owned() }
    }

    /// Whether NVML may be initialised. A library that is named by its whole path and says of itself that it is the
    /// stand-in needs no driver.
    pub fn check(&self, library: &Path, slot: &CallSlot) -> Result<(), Error> {
        if self.is_loaded() || (library.is_absolute() && raw::is_stand_in(library, slot)) {
            return Ok(());
        }
        Err(Error::NoDriver { version: self.proc.join("version"), module: self.module.clone() })
    }

    /// Whether the driver is loaded.
    pub fn is_loaded(&self) -> bool {
        self.proc.join("version").exists() || self.module.exists()
    }

    /// The GPUs that the driver has bound, as it names them. A change tells of hot-plug: NVML enumerates only when it
    /// is initialised.
    pub fn gpus(&self) -> BTreeSet<OsString> {
        let entries = std::fs::read_dir(self.proc.join("gpus"));
        entries.map(|entries| entries.flatten().map(|entry| entry.file_name()).collect()).unwrap_or_default()
    }

    /// A GPU's PCI address by the driver's own files, for when NVML does not tell it.
    pub fn pci_of(&self, uuid: &str) -> Option<PciAddress> {
        self.gpus().into_iter().find_map(|name| {
            let information =
                std::fs::read_to_string(self.proc.join("gpus").join(&name).join("information")).ok()?;
            let field = |key: &str| {
                information.lines().find_map(|line| line.strip_prefix(key)?.trim_start().strip_prefix(':'))
            };
            (field("GPU UUID")?.trim() == uuid).then(|| pci(field("Bus Location")?.trim())).flatten()
        })
    }
}

/// `0000:3b:00.0`.
fn pci(text: &str) -> Option<PciAddress> {
    let mut parts = text.split(['.', ':']);
    let domain = u32::from_str_radix(parts.next()?, 16).ok()?;
    let mut byte = || u8::from_str_radix(parts.next()?, 16).ok();
    Some(PciAddress { domain, bus: byte()?, device: byte()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_is_found_by_its_files_and_its_gpus_by_their_folders() {
        let root = tempfile::tempdir().unwrap();
        let driver = Driver::new(root.path(), &root.path().join("no-module"));
        assert!(!driver.is_loaded());
        assert!(driver.gpus().is_empty());
        let slot = CallSlot::default();
        let error = driver.check(Path::new("libnvidia-ml.so.1"), &slot).unwrap_err().to_string();
        assert!(error.starts_with("the NVIDIA driver is not loaded: neither"), "{error}");

        let gpu = root.path().join("driver/nvidia/gpus/0000:3b:00.0");
        std::fs::create_dir_all(&gpu).unwrap();
        std::fs::write(root.path().join("driver/nvidia/version"), "NVRM version: …\n").unwrap();
        let information = "Model: \t\t NVIDIA A100\nGPU UUID: \t GPU-1\nBus Location: \t 0000:3b:00.0\n";
        std::fs::write(gpu.join("information"), information).unwrap();
        assert!(driver.is_loaded());
        assert_eq!(driver.gpus().len(), 1);
        assert_eq!(driver.pci_of("GPU-1"), Some(PciAddress { domain: 0, bus: 0x3b, device: 0 }));
        assert_eq!(driver.pci_of("GPU-2"), None);
    }
}
