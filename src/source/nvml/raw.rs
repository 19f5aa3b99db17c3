//! NVML itself. The only unsafe code about it, and the only module that knows the bindings.
//!
//! Loading, initialisation and simple getters are `nvml-wrapper`'s; what it drops or gets wrong for us (instance ids and
//! high bits of events, process lists that grow or have entries of another size, field 230) is called through its
//! bindings. Every symbol was looked up on its own when the library was loaded: a missing one is an [`Error::Missing`]
//! of that call and of nothing else. Every call notes itself in its thread's [`CallSlot`].
#![allow(unsafe_code)]

mod device;
mod event_set;

use std::ffi::{CStr, c_char, c_uint};
use std::mem::ManuallyDrop;
use std::path::Path;
use std::ptr;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings as sys;

use super::error::Error;
use super::watch::CallSlot;

pub use device::{Device, HandleKey, List};
pub use event_set::{EventSet, RawEvent};

/// GPUs, and MIG slots of one, that we ask for at most.
const MAX_DEVICES: u32 = 256;
/// What the stand-in's version of NVML ends in.
const STAND_IN: &[u8] = b"-stand-in";

/// A loaded and initialised NVML.
///
/// Dropping it leaks it: only [`Library::close`], when no other thread is inside, may shut it down.
pub struct Library {
    nvml: ManuallyDrop<Nvml>,
    /// Whether the library is of the few whose `_v3` lists have entries of 32 bytes.
    is_early_535: bool,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").field("is_early_535", &self.is_early_535).finish_non_exhaustive()
    }
}

/// Whether the library at this path says of itself that it is the stand-in, which needs no driver.
///
/// Asks only for NVML's version, the one query that touches neither the driver nor a device node.
pub fn is_stand_in(path: &Path, slot: &CallSlot) -> bool {
    const CALL: &str = "nvmlSystemGetNVMLVersion";
    type GetVersion = unsafe extern "C" fn(*mut c_char, c_uint) -> sys::nvmlReturn_t;
    let mut text = [0u8; 80];
    slot.during(CALL, || {
        // SAFETY: loading runs the library's initialisers, as loading it for real will; the symbol has this signature
        // in every NVML, and is told the true length of the buffer.
        unsafe {
            let Ok(library) = libloading::Library::new(path) else { return };
            let Ok(get) = library.get::<GetVersion>(b"nvmlSystemGetNVMLVersion\0") else { return };
            let _version_or_zeros = get(text.as_mut_ptr().cast(), 80);
        }
    });
    CStr::from_bytes_until_nul(&text).is_ok_and(|text| text.to_bytes().ends_with(STAND_IN))
}

impl Library {
    /// Loads and initialises NVML.
    ///
    /// As root this creates `/dev/nvidiactl` where it is missing: ask [`super::driver`] first.
    pub fn open(path: &Path, slot: &CallSlot) -> Result<Library, Error> {
        // The binding asks for the driver's version right after the initialisation, so a hang may be in either.
        let init = || Nvml::builder().lib_path(path.as_os_str()).init();
        let nvml =
            slot.during("nvmlInit_v2 or nvmlSystemGetDriverVersion", init).map_err(|error| match error {
                NvmlError::LibloadingError(error) => {
                    Error::Load { path: path.to_owned(), reason: error.to_string() }
                }
                error => Error::from_binding("nvmlInit_v2", error),
            })?;
        // How nvitop tells them: the symbol came with 535, the other one when the entries were back at 24 bytes.
        let is_early_535 = nvml.lib().nvmlDeviceGetConfComputeMemSizeInfo.is_ok()
            && nvml.lib().nvmlDeviceGetRunningProcessDetailList.is_err();
        Ok(Library { nvml: ManuallyDrop::new(nvml), is_early_535 })
    }

    /// Shuts NVML down and unloads it, so that an upgraded library can be loaded later.
    pub fn close(self, slot: &CallSlot) {
        // The binding panics on a missing nvmlShutdown: such a library stays loaded.
        if self.nvml.lib().nvmlShutdown.is_ok() {
            let nvml = ManuallyDrop::into_inner(self.nvml);
            if let Err(error) = slot.during("nvmlShutdown", || nvml.shutdown()) {
                tracing::debug!(%error, "NVML did not shut down cleanly.");
            }
        }
    }

    /// The library for the thread that owns this slot.
    pub fn caller<'l>(&'l self, slot: &'l CallSlot) -> Caller<'l> {
        Caller { library: self, slot }
    }
}

/// NVML for one thread.
#[derive(Debug, Clone, Copy)]
pub struct Caller<'l> {
    library: &'l Library,
    slot: &'l CallSlot,
}

impl<'l> Caller<'l> {
    /// The driver's version.
    pub fn driver_version(self) -> Result<String, Error> {
        self.simple("nvmlSystemGetDriverVersion", Nvml::sys_driver_version)
    }

    /// How many GPUs NVML enumerates.
    pub fn device_count(self) -> Result<u32, Error> {
        Ok(self.simple("nvmlDeviceGetCount_v2", Nvml::device_count)?.min(MAX_DEVICES))
    }

    /// The GPU with this index. To be asked anew in every cycle: handles do not outlive a reset.
    pub fn device(self, index: u32) -> Result<Device<'l>, Error> {
        let device = self.simple("nvmlDeviceGetHandleByIndex_v2", |nvml| nvml.device_by_index(index))?;
        Ok(Device { caller: self, device })
    }

    /// The UUID of the device that an event names.
    pub fn uuid_of(self, event: &RawEvent) -> Result<String, Error> {
        let handle = ptr::with_exposed_provenance_mut(event.device.0);
        // SAFETY: NVML gave this handle with the event, and it is only given back to NVML.
        let device = unsafe { nvml_wrapper::Device::new(handle, &self.library.nvml) };
        Device { caller: self, device }.uuid()
    }

    /// A new event set.
    pub fn event_set(self) -> Result<EventSet<'l>, Error> {
        const CALL: &str = "nvmlEventSetCreate";
        // A set that cannot be freed is not made.
        symbol("nvmlEventSetFree", &self.lib().nvmlEventSetFree)?;
        let create = symbol(CALL, &self.lib().nvmlEventSetCreate)?;
        let mut set = ptr::null_mut();
        // SAFETY: the library is initialised, and `set` is a valid place.
        self.check(CALL, || unsafe { create(&raw mut set) })?;
        Ok(EventSet { caller: self, set })
    }

    fn lib(self) -> &'l sys::NvmlLib {
        self.library.nvml.lib()
    }

    /// A call that the binding does right.
    fn simple<T>(
        self,
        call: &'static str,
        ask: impl FnOnce(&'l Nvml) -> Result<T, NvmlError>,
    ) -> Result<T, Error> {
        let nvml: &'l Nvml = &self.library.nvml;
        self.slot.during(call, || ask(nvml)).map_err(|error| Error::from_binding(call, error))
    }

    fn check(self, call: &'static str, ask: impl FnOnce() -> sys::nvmlReturn_t) -> Result<(), Error> {
        match self.slot.during(call, ask) {
            0 => Ok(()),
            code => Err(Error::Failed { call, code }),
        }
    }
}

/// A function that was looked up when the library was loaded.
fn symbol<F: Copy>(call: &'static str, found: &Result<F, libloading::Error>) -> Result<F, Error> {
    found.as_ref().copied().map_err(|_| Error::Missing { call })
}
