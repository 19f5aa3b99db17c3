//! Calls about GPUs and MIG devices.

use std::ffi::{c_char, c_int, c_uint};

use crate::abi::{
    FIELD_RECOVERY_ACTION, FieldValue, GPU_IS_LOST, Handle, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED,
    PciInfo, Return, SUCCESS, VALUE_UNSIGNED, put, put_text,
};
use crate::script::Script;
use crate::state::{Device, enter, enter_device, enter_for, find, with_state};

/// MIG devices that a GPU can have.
const MIG_SLOTS: u32 = 7;

/// Runs a call on a device that the script knows.
fn on_device(function: &str, device: Handle, then: impl FnOnce(&Script, &Device<'_>) -> Return) -> Return {
    match enter_device(function, device) {
        Ok((script, uuid)) => find(&script, &uuid).map_or(INVALID_ARGUMENT, |device| then(&script, &device)),
        Err(code) => code,
    }
}

/// `nvmlDeviceGetCount_v2`.
///
/// # Safety
/// As in NVML.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> Return {
    match enter("nvmlDeviceGetCount_v2") {
        // SAFETY: as the caller promises.
        Ok(script) => unsafe { put(count, u32::try_from(script.gpus.len()).unwrap_or(u32::MAX)) },
        Err(code) => code,
    }
}

/// `nvmlDeviceGetHandleByIndex_v2`.
///
/// # Safety
/// As in NVML.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut Handle) -> Return {
    match enter_for("nvmlDeviceGetHandleByIndex_v2", Some(&|_| Some(index))) {
        Ok(script) => match script.gpu(index) {
            None => INVALID_ARGUMENT,
            Some(gpu) if gpu.is_lost => GPU_IS_LOST,
            // SAFETY: as the caller promises.
            Some(gpu) => unsafe { put(device, with_state(|state| state.handle(&gpu.uuid))) },
        },
        Err(code) => code,
    }
}

/// `nvmlDeviceGetName`: a MIG device's name ends in its profile.
///
/// # Safety
/// As in NVML.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetName(device: Handle, name: *mut c_char, length: c_uint) -> Return {
    on_device("nvmlDeviceGetName", device, |_, device| {
        let text = match device {
            Device::Gpu(gpu) => gpu.name.clone(),
            Device::Instance(gpu, instance) => format!("{} MIG {}", gpu.name, instance.profile),
        };
        // SAFETY: as the caller promises.
        unsafe { put_text(name, length, &text) }
    })
}

/// `nvmlDeviceGetUUID`.
///
/// # Safety
/// As in NVML.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUUID(device: Handle, uuid: *mut c_char, length: c_uint) -> Return {
    on_device("nvmlDeviceGetUUID", device, |_, device| {
        let text = match device {
            Device::Gpu(gpu) => &gpu.uuid,
            Device::Instance(_, instance) => &instance.uuid,
        };
        // SAFETY: as the caller promises.
        unsafe { put_text(uuid, length, text) }
    })
}

/// `nvmlDeviceGetPciInfo_v3`.
///
/// # Safety
/// As in NVML.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(device: Handle, pci: *mut PciInfo) -> Return {
    on_device("nvmlDeviceGetPciInfo_v3", device, |_, device| {
        let (domain, bus, slot) = device.gpu().pci;
        let mut info = PciInfo {
            bus_id_legacy: [0; 16],
            domain,
            bus,
            device: slot,
            pci_device_id: 0x20b0_10de,
            pci_subsystem_id: 0x1463_10de,
            bus_id: [0; 32],
        };
        fill(&mut info.bus_id_legacy, &format!("{domain:04X}:{bus:02X}:{slot:02X}.0"));
        fill(&mut info.bus_id, &format!("{domain:08X}:{bus:02X}:{slot:02X}.0"));
        // SAFETY: as the caller promises.
        unsafe { put(pci, info) }
    })
}

/// Text into a zeroed field, cut so that a NUL stays.
fn fill(field: &mut [c_char], text: &str) {
    let room = field.len() - 1;
    for (place, byte) in field[..room].iter_mut().zip(text.bytes()) {
        *place = c_char::from_ne_bytes([byte]);
    }
}

/// `nvmlDeviceGetComputeMode`: with MIG on, only a MIG device has one.
///
/// # Safety
/// As in NVML.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeMode(device: Handle, mode: *mut c_uint) -> Return {
    on_device("nvmlDeviceGetComputeMode", device, |_, device| {
        let value = match device {
            Device::Gpu(gpu) if gpu.mig == Some(true) => return NOT_SUPPORTED,
            Device::Gpu(gpu) => gpu.mode,
            Device::Instance(_, instance) => instance.mode,
        };
        // SAFETY: as the caller promises.
        unsafe { put(mode, value) }
    })
}

/// `nvmlDeviceGetCudaComputeCapability`.
///
/// # Safety
/// As in NVML.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCudaComputeCapability(
    device: Handle,
    major: *mut c_int,
    minor: *mut c_int,
) -> Return {
    on_device("nvmlDeviceGetCudaComputeCapability", device, |_, device| {
        let capability = device.gpu().capability;
        // SAFETY: as the caller promises.
        unsafe { put(major, capability.0).max(put(minor, capability.1)) }
    })
}

/// `nvmlDeviceGetMigMode`.
///
/// # Safety
/// As in NVML.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigMode(
    device: Handle,
    current: *mut c_uint,
    pending: *mut c_uint,
) -> Return {
    on_device("nvmlDeviceGetMigMode", device, |_, device| match device {
        Device::Gpu(gpu) => match gpu.mig {
            None => NOT_SUPPORTED,
            // SAFETY: as the caller promises.
            Some(is_on) => unsafe { put(current, u32::from(is_on)).max(put(pending, u32::from(is_on))) },
        },
        Device::Instance(..) => INVALID_ARGUMENT,
    })
}

/// `nvmlDeviceGetMaxMigDeviceCount`.
///
/// # Safety
/// As in NVML.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMaxMigDeviceCount(device: Handle, count: *mut c_uint) -> Return {
    on_device("nvmlDeviceGetMaxMigDeviceCount", device, |_, device| {
        let is_on = device.gpu().mig == Some(true);
        // SAFETY: as the caller promises.
        unsafe { put(count, if is_on { MIG_SLOTS } else { 0 }) }
    })
}

/// `nvmlDeviceGetMigDeviceHandleByIndex`: 6 for a slot without an instance.
///
/// # Safety
/// As in NVML.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(
    device: Handle,
    index: c_uint,
    mig: *mut Handle,
) -> Return {
    on_device("nvmlDeviceGetMigDeviceHandleByIndex", device, |_, device| {
        let Device::Gpu(gpu) = device else { return INVALID_ARGUMENT };
        match gpu.instances.iter().find(|instance| instance.slot == index && gpu.mig == Some(true)) {
            // SAFETY: as the caller promises.
            Some(instance) => unsafe { put(mig, with_state(|state| state.handle(&instance.uuid))) },
            None => NOT_FOUND,
        }
    })
}

/// `nvmlDeviceGetGpuInstanceId`.
///
/// # Safety
/// As in NVML.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGpuInstanceId(device: Handle, id: *mut c_uint) -> Return {
    on_device("nvmlDeviceGetGpuInstanceId", device, |_, device| match device {
        Device::Gpu(_) => INVALID_ARGUMENT,
        // SAFETY: as the caller promises.
        Device::Instance(_, instance) => unsafe { put(id, instance.gi) },
    })
}

/// `nvmlDeviceGetComputeInstanceId`.
///
/// # Safety
/// As in NVML.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeInstanceId(device: Handle, id: *mut c_uint) -> Return {
    on_device("nvmlDeviceGetComputeInstanceId", device, |_, device| match device {
        Device::Gpu(_) => INVALID_ARGUMENT,
        // SAFETY: as the caller promises.
        Device::Instance(_, instance) => unsafe { put(id, instance.ci) },
    })
}

/// `nvmlDeviceGetFieldValues`: knows field 230, where the shape has it.
///
/// # Safety
/// As in NVML.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetFieldValues(
    device: Handle,
    count: c_int,
    values: *mut FieldValue,
) -> Return {
    on_device("nvmlDeviceGetFieldValues", device, |script, device| {
        if values.is_null() {
            return INVALID_ARGUMENT;
        }
        for number in 0..usize::try_from(count).unwrap_or(0) {
            // SAFETY: the caller gave `count` entries.
            let value = unsafe { &mut *values.add(number) };
            value.result = NOT_SUPPORTED;
            if value.field == FIELD_RECOVERY_ACTION && script.shape.recovery_action {
                value.value_type = VALUE_UNSIGNED;
                value.value = u64::from(device.gpu().recovery);
                value.result = SUCCESS;
            }
        }
        SUCCESS
    })
}

/// `nvmlDeviceGetConfComputeMemSizeInfo`: exported, because its presence tells generations apart.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceGetConfComputeMemSizeInfo(device: Handle, _info: *mut u64) -> Return {
    on_device("nvmlDeviceGetConfComputeMemSizeInfo", device, |_, _| NOT_SUPPORTED)
}
