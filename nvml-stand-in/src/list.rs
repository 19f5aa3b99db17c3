//! The process lists, in all their generations.

use std::ffi::c_uint;

use crate::abi::{
    ARGUMENT_VERSION_MISMATCH, DetailList, Handle, INSUFFICIENT_SIZE, INVALID_ARGUMENT, NO_INSTANCE,
    NOT_SUPPORTED, Return, SUCCESS,
};
use crate::script::{Process, Script};
use crate::state::{Device, enter_device, find, with_state};

/// `nvmlProcessDetailList_v1_t`'s version.
const DETAIL_LIST_VERSION: u32 = 0x0100_0018;

/// The list's entries now. Grown entries are numbered on from the last pid.
fn entries(device: &Device<'_>, list: &'static str) -> Vec<Process> {
    let gpu = device.gpu();
    let processes = if list == "mps" { &gpu.mps } else { &gpu.compute };
    let mut entries: Vec<Process> = match device {
        Device::Gpu(_) => processes.list.clone(),
        Device::Instance(_, instance) => {
            let belongs = |process: &&Process| {
                process.gpu_instance == instance.gi
                    && (process.compute_instance == instance.ci || process.compute_instance == NO_INSTANCE)
            };
            processes.list.iter().filter(belongs).cloned().collect()
        }
    };
    let (by, times) = processes.growth;
    let grown = with_state(|state| {
        let (grown, calls) = state.grown.entry((gpu.index, list)).or_default();
        let now = *grown;
        if *calls < times {
            (*grown, *calls) = (*grown + by, *calls + 1);
        }
        now
    });
    let highest = entries.last().map_or(100_000, |process| process.pid);
    entries.extend((1..=grown).map(|more| Process {
        pid: highest + more,
        memory: 1 << 20,
        gpu_instance: NO_INSTANCE,
        compute_instance: NO_INSTANCE,
    }));
    entries
}

/// An entry as a generation lays it out: the first `stride` bytes of the longest form.
fn record(process: &Process) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[0..4].copy_from_slice(&process.pid.to_ne_bytes());
    bytes[8..16].copy_from_slice(&process.memory.to_ne_bytes());
    bytes[16..20].copy_from_slice(&process.gpu_instance.to_ne_bytes());
    bytes[20..24].copy_from_slice(&process.compute_instance.to_ne_bytes());
    bytes
}

/// # Safety
/// `count` must be valid and `infos` null or writable for `count` entries of the stride.
unsafe fn answer(
    function: &str,
    list: &'static str,
    device: Handle,
    count: *mut c_uint,
    infos: *mut u8,
    stride: impl FnOnce(&Script) -> usize,
) -> Return {
    let (script, uuid) = match enter_device(function, device) {
        Ok(entered) => entered,
        Err(code) => return code,
    };
    let Some(device) = find(&script, &uuid) else { return INVALID_ARGUMENT };
    if count.is_null() {
        return INVALID_ARGUMENT;
    }
    let entries = entries(&device, list);
    let stride = stride(&script);
    // SAFETY: `count` is not null, and the caller promises room for as many entries as it says.
    unsafe {
        let room = *count as usize;
        *count = u32::try_from(entries.len()).unwrap_or(u32::MAX);
        if entries.len() > room {
            return INSUFFICIENT_SIZE;
        }
        if infos.is_null() && !entries.is_empty() {
            return INVALID_ARGUMENT;
        }
        for (number, process) in entries.iter().enumerate() {
            let bytes = record(process);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), infos.add(number * stride), stride);
        }
    }
    SUCCESS
}

macro_rules! list_functions {
    ($($name:ident, $list:literal, $stride:expr;)*) => {$(
        #[doc = concat!("`", stringify!($name), "`.")]
        ///
        /// # Safety
        /// As in NVML.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(device: Handle, count: *mut c_uint, infos: *mut u8) -> Return {
            // SAFETY: as the caller promises.
            unsafe { answer(stringify!($name), $list, device, count, infos, $stride) }
        }
    )*};
}

list_functions! {
    nvmlDeviceGetMPSComputeRunningProcesses, "mps", |_| 16;
    nvmlDeviceGetMPSComputeRunningProcesses_v2, "mps", |_| 24;
    nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps", |script| script.shape.stride;
    nvmlDeviceGetComputeRunningProcesses, "compute", |_| 16;
    nvmlDeviceGetComputeRunningProcesses_v2, "compute", |_| 24;
    nvmlDeviceGetComputeRunningProcesses_v3, "compute", |script| script.shape.stride;
}

/// `nvmlDeviceGetRunningProcessDetailList`: modes 0 compute and 2 MPS.
///
/// # Safety
/// As in NVML.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetRunningProcessDetailList(
    device: Handle,
    list: *mut DetailList,
) -> Return {
    if list.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: not null, and the caller promises a valid structure with room for `count` entries.
    unsafe {
        if (*list).version != DETAIL_LIST_VERSION {
            return ARGUMENT_VERSION_MISMATCH;
        }
        let name = match (*list).mode {
            0 => "compute",
            2 => "mps",
            _ => return NOT_SUPPORTED,
        };
        let function = "nvmlDeviceGetRunningProcessDetailList";
        answer(function, name, device, &raw mut (*list).count, (*list).entries, |_| 32)
    }
}
