//! Event sets.

use std::ffi::c_uint;
use std::ptr;
use std::time::Duration;

use nvml_wrapper_sys::bindings as sys;

use super::{Caller, Device, HandleKey, symbol};
use crate::source::nvml::error::{Error, code};
use crate::source::nvml::lists::NO_INSTANCE;

/// An event of NVML's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawEvent {
    /// The GPU.
    pub device: HandleKey,
    /// Event bit.
    pub kind: u64,
    /// For an Xid event: the code.
    pub data: u64,
    /// GPU instance, where the event belongs to one.
    pub gpu_instance: Option<u32>,
    /// Compute instance, where the event belongs to one.
    pub compute_instance: Option<u32>,
}

/// An event set; freed when dropped.
pub struct EventSet<'l> {
    pub(super) caller: Caller<'l>,
    pub(super) set: sys::nvmlEventSet_t,
}

impl EventSet<'_> {
    /// Registers those of the `wanted` event bits that a GPU supports; gives them.
    pub fn register(&self, device: &Device<'_>, wanted: u64) -> Result<u64, Error> {
        const SUPPORTED: &str = "nvmlDeviceGetSupportedEventTypes";
        const REGISTER: &str = "nvmlDeviceRegisterEvents";
        let lib = self.caller.lib();
        let supported = symbol(SUPPORTED, &lib.nvmlDeviceGetSupportedEventTypes)?;
        let register = symbol(REGISTER, &lib.nvmlDeviceRegisterEvents)?;
        let mut types = 0;
        // SAFETY: the handle was made just now, and `types` is a valid place.
        self.caller.check(SUPPORTED, || unsafe { supported(device.handle(), &raw mut types) })?;
        // One unsupported bit refuses the whole call.
        types &= wanted;
        // SAFETY: handle and set are valid.
        self.caller.check(REGISTER, || unsafe { register(device.handle(), types, self.set) })?;
        Ok(types)
    }

    /// Waits for an event; `None` when there was none in that time. May return early.
    pub fn wait(&self, timeout: Duration) -> Result<Option<RawEvent>, Error> {
        const CALL: &str = "nvmlEventSetWait_v2";
        let wait = symbol(CALL, &self.caller.lib().nvmlEventSetWait_v2)?;
        let mut data = sys::nvmlEventData_t {
            device: ptr::null_mut(),
            eventType: 0,
            eventData: 0,
            gpuInstanceId: NO_INSTANCE,
            computeInstanceId: NO_INSTANCE,
        };
        let milliseconds = c_uint::try_from(timeout.as_millis()).unwrap_or(c_uint::MAX);
        // SAFETY: the set is valid until it is dropped, and `data` is a valid place.
        let result = self
            .caller
            .slot
            .waiting(CALL, timeout, || unsafe { wait(self.set, &raw mut data, milliseconds) });
        match result {
            0 => {}
            code::TIMEOUT => return Ok(None),
            code => return Err(Error::Failed { call: CALL, code }),
        }
        let instance = |id: u32| (id != NO_INSTANCE).then_some(id);
        Ok(Some(RawEvent {
            device: HandleKey(data.device.expose_provenance()),
            kind: data.eventType,
            data: data.eventData,
            gpu_instance: instance(data.gpuInstanceId),
            compute_instance: instance(data.computeInstanceId),
        }))
    }
}

impl Drop for EventSet<'_> {
    fn drop(&mut self) {
        if let Ok(free) = &self.caller.lib().nvmlEventSetFree {
            // SAFETY: the set is valid, and nobody uses it any more.
            let _nothing_to_do = self.caller.slot.during("nvmlEventSetFree", || unsafe { free(self.set) });
        }
    }
}
