//! Questions to one device.

use std::ffi::c_uint;

use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings as sys;

use super::{Caller, MAX_DEVICES, symbol};
use crate::identity::PciAddress;
use crate::source::nvml::error::{Error, code};
use crate::source::nvml::lists::{Buffer, Entry, Generation};

/// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`, since 12.8.
const FIELD_RECOVERY_ACTION: u32 = 230;
/// How often a list is asked again because it grew in between.
const LIST_ATTEMPTS: usize = 5;

/// Which process list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum List {
    /// MPS clients.
    Mps,
    /// Compute processes.
    Compute,
}

/// A GPU or a MIG device, valid for one cycle.
pub struct Device<'l> {
    pub(super) caller: Caller<'l>,
    pub(super) device: nvml_wrapper::Device<'l>,
}

/// A device handle as a number, to compare with the one in an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HandleKey(pub(super) usize);

impl<'l> Device<'l> {
    /// The handle.
    pub fn key(&self) -> HandleKey {
        HandleKey(self.handle().expose_provenance())
    }

    /// `GPU-…` or `MIG-…`.
    pub fn uuid(&self) -> Result<String, Error> {
        self.simple("nvmlDeviceGetUUID", nvml_wrapper::Device::uuid)
    }

    /// Product name; a MIG device's ends in `MIG` and its profile.
    pub fn name(&self) -> Result<String, Error> {
        self.simple("nvmlDeviceGetName", nvml_wrapper::Device::name)
    }

    /// PCI address.
    pub fn pci(&self) -> Result<PciAddress, Error> {
        const CALL: &str = "nvmlDeviceGetPciInfo_v3";
        let info = self.simple(CALL, nvml_wrapper::Device::pci_info)?;
        let byte = |number: u32| u8::try_from(number).map_err(|_| Error::Garbled { call: CALL });
        Ok(PciAddress { domain: info.domain, bus: byte(info.bus)?, device: byte(info.device)? })
    }

    /// Compute mode, as its number. Not through the binding: it cannot tell an unknown mode from an unknown error.
    pub fn compute_mode(&self) -> Result<u32, Error> {
        let function = &self.caller.lib().nvmlDeviceGetComputeMode;
        // SAFETY: see `number`.
        self.number("nvmlDeviceGetComputeMode", function, |function, handle, mode| unsafe {
            function(handle, mode)
        })
    }

    /// CUDA compute capability, major and minor.
    pub fn compute_capability(&self) -> Result<(u32, u32), Error> {
        const CALL: &str = "nvmlDeviceGetCudaComputeCapability";
        let capability = self.simple(CALL, nvml_wrapper::Device::cuda_compute_capability)?;
        let number = |number: i32| u32::try_from(number).map_err(|_| Error::Garbled { call: CALL });
        Ok((number(capability.major)?, number(capability.minor)?))
    }

    /// Whether MIG is on now.
    pub fn is_mig_enabled(&self) -> Result<bool, Error> {
        Ok(self.simple("nvmlDeviceGetMigMode", nvml_wrapper::Device::mig_mode)?.current == 1)
    }

    /// How many MIG devices there can be.
    pub fn mig_slots(&self) -> Result<u32, Error> {
        let slots = self.simple("nvmlDeviceGetMaxMigDeviceCount", nvml_wrapper::Device::mig_device_count)?;
        Ok(slots.min(MAX_DEVICES))
    }

    /// The MIG device in this slot; `None` for an empty one. Slots can have holes.
    pub fn mig_device(&self, slot: u32) -> Result<Option<Device<'l>>, Error> {
        let found = self
            .simple("nvmlDeviceGetMigDeviceHandleByIndex", |device: &nvml_wrapper::Device<'l>| {
                device.mig_device_by_index(slot)
            });
        match found {
            Ok(device) => Ok(Some(Device { caller: self.caller, device })),
            Err(error) if error.code() == Some(code::NOT_FOUND) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// GPU instance id of a MIG device.
    pub fn gpu_instance(&self) -> Result<u32, Error> {
        let function = &self.caller.lib().nvmlDeviceGetGpuInstanceId;
        // SAFETY: see `number`.
        self.number("nvmlDeviceGetGpuInstanceId", function, |function, handle, id| unsafe {
            function(handle, id)
        })
    }

    /// Compute instance id of a MIG device.
    pub fn compute_instance(&self) -> Result<u32, Error> {
        let function = &self.caller.lib().nvmlDeviceGetComputeInstanceId;
        // SAFETY: see `number`.
        self.number("nvmlDeviceGetComputeInstanceId", function, |function, handle, id| unsafe {
            function(handle, id)
        })
    }

    /// Field 230, as its number.
    pub fn recovery_action(&self) -> Result<u32, Error> {
        const CALL: &str = "nvmlDeviceGetFieldValues";
        let get = symbol(CALL, &self.caller.lib().nvmlDeviceGetFieldValues)?;
        let mut field = sys::nvmlFieldValue_t {
            fieldId: FIELD_RECOVERY_ACTION,
            scopeId: 0,
            timestamp: 0,
            latencyUsec: 0,
            valueType: 0,
            nvmlReturn: code::NOT_SUPPORTED,
            value: sys::nvmlValue_t { ullVal: 0 },
        };
        // SAFETY: one entry is announced and given; the handle is of this cycle.
        self.caller.check(CALL, || unsafe { get(self.handle(), 1, &raw mut field) })?;
        if field.nvmlReturn != 0 {
            return Err(Error::Failed { call: CALL, code: field.nvmlReturn });
        }
        if field.valueType != sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT {
            return Err(Error::Garbled { call: CALL });
        }
        // SAFETY: the entry's type says that this member was written; every bit pattern is a number.
        Ok(unsafe { field.value.uiVal })
    }

    /// The processes in a list, from the newest function that gives a readable answer.
    pub fn processes<'b>(&self, list: List, buffer: &'b mut Buffer) -> Result<&'b [Entry], Error> {
        let mut first_error = None;
        for generation in Generation::ALL {
            match self.fill(list, generation, buffer) {
                Ok((call, count)) => {
                    let is_early = self.caller.library.is_early_535;
                    // The borrow checker cannot see that a buffer without sense is not given away.
                    if buffer.read(count, generation, is_early).is_some() {
                        return Ok(buffer.entries());
                    }
                    first_error.get_or_insert(Error::Garbled { call });
                }
                Err(error) if error.is_absence() && error.code() != Some(code::NOT_SUPPORTED) => {
                    first_error.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
        Err(first_error.unwrap_or(Error::Missing { call: "nvmlDeviceGetComputeRunningProcesses" }))
    }

    /// Has a list written into the buffer; gives the function and the number of entries.
    fn fill(
        &self,
        list: List,
        generation: Generation,
        buffer: &mut Buffer,
    ) -> Result<(&'static str, u32), Error> {
        let lib = self.caller.lib();
        let mut wanted = 0;
        let mut shortage = Error::Missing { call: "" };
        for _attempt in 0..LIST_ATTEMPTS {
            macro_rules! ask {
                ($function:ident) => {{
                    const CALL: &str = stringify!($function);
                    let function = symbol(CALL, &lib.$function)?;
                    let Some(room) = buffer.prepare(wanted) else { return Err(Error::Garbled { call: CALL }) };
                    let mut count = room;
                    let place = buffer.words_mut().as_mut_ptr();
                    // SAFETY: the buffer has `room` entries of 32 bytes, the longest that any generation writes, and is
                    // aligned for them; the handle is of this cycle.
                    let result = self.caller.check(CALL, || unsafe {
                        function(self.handle(), &raw mut count, place.cast())
                    });
                    (CALL, count, result)
                }};
            }
            let (call, count, result) = match (list, generation) {
                (List::Mps, Generation::V3) => ask!(nvmlDeviceGetMPSComputeRunningProcesses_v3),
                (List::Mps, Generation::V2) => ask!(nvmlDeviceGetMPSComputeRunningProcesses_v2),
                (List::Mps, Generation::V1) => ask!(nvmlDeviceGetMPSComputeRunningProcesses),
                (List::Compute, Generation::V3) => ask!(nvmlDeviceGetComputeRunningProcesses_v3),
                (List::Compute, Generation::V2) => ask!(nvmlDeviceGetComputeRunningProcesses_v2),
                (List::Compute, Generation::V1) => ask!(nvmlDeviceGetComputeRunningProcesses),
            };
            match result {
                Ok(()) => return Ok((call, count)),
                Err(error) if error.code() == Some(code::INSUFFICIENT_SIZE) => {
                    wanted = count as usize;
                    shortage = error;
                }
                Err(error) => return Err(error),
            }
        }
        Err(shortage)
    }

    /// To be given to NVML only.
    pub(super) fn handle(&self) -> sys::nvmlDevice_t {
        // SAFETY: the handle is only given to NVML, while the library that made it is borrowed.
        unsafe { self.device.handle() }
    }

    fn simple<T>(
        &self,
        call: &'static str,
        ask: impl FnOnce(&nvml_wrapper::Device<'l>) -> Result<T, NvmlError>,
    ) -> Result<T, Error> {
        self.caller.slot.during(call, || ask(&self.device)).map_err(|error| Error::from_binding(call, error))
    }

    /// A function that writes one number about a device. `ask` may rely on a valid handle and a valid place.
    fn number<F: Copy>(
        &self,
        call: &'static str,
        found: &Result<F, libloading::Error>,
        ask: impl FnOnce(F, sys::nvmlDevice_t, *mut c_uint) -> sys::nvmlReturn_t,
    ) -> Result<u32, Error> {
        let function = symbol(call, found)?;
        let mut number = 0;
        self.caller.check(call, || ask(function, self.handle(), &raw mut number))?;
        Ok(number)
    }
}
