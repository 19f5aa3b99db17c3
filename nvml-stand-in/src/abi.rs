//! NVML's types and numbers, as far as they are needed: sizes and offsets as the library has them on `x86_64` Linux.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong};

/// `nvmlReturn_t`.
pub type Return = c_uint;
/// `nvmlDevice_t` and `nvmlEventSet_t`: opaque; here a number that is never dereferenced.
pub type Handle = *mut std::ffi::c_void;

pub const SUCCESS: Return = 0;
pub const UNINITIALIZED: Return = 1;
pub const INVALID_ARGUMENT: Return = 2;
pub const NOT_SUPPORTED: Return = 3;
pub const NOT_FOUND: Return = 6;
pub const INSUFFICIENT_SIZE: Return = 7;
pub const DRIVER_NOT_LOADED: Return = 9;
pub const TIMEOUT: Return = 10;
pub const GPU_IS_LOST: Return = 15;
pub const ARGUMENT_VERSION_MISMATCH: Return = 25;
pub const UNKNOWN: Return = 999;

/// What stands for "none" in instance ids.
pub const NO_INSTANCE: u32 = u32::MAX;
/// What stands for "not available" in memory sizes.
pub const NO_MEMORY: u64 = u64::MAX;

/// `nvmlPciInfo_t`, 68 bytes.
#[repr(C)]
pub struct PciInfo {
    pub bus_id_legacy: [c_char; 16],
    pub domain: c_uint,
    pub bus: c_uint,
    pub device: c_uint,
    pub pci_device_id: c_uint,
    pub pci_subsystem_id: c_uint,
    pub bus_id: [c_char; 32],
}

/// `nvmlEventData_t`, 32 bytes.
#[repr(C)]
pub struct EventData {
    pub device: Handle,
    pub kind: c_ulonglong,
    pub value: c_ulonglong,
    pub gpu_instance: c_uint,
    pub compute_instance: c_uint,
}

/// `nvmlFieldValue_t`, 40 bytes; the value's union is read as its widest integer.
#[repr(C)]
pub struct FieldValue {
    pub field: c_uint,
    pub scope: c_uint,
    pub timestamp: i64,
    pub latency: i64,
    pub value_type: c_int,
    pub result: Return,
    pub value: u64,
}

/// `nvmlProcessDetailList_v1_t`, 24 bytes.
#[repr(C)]
pub struct DetailList {
    pub version: c_uint,
    pub mode: c_uint,
    pub count: c_uint,
    pub entries: *mut u8,
}

/// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`.
pub const FIELD_RECOVERY_ACTION: u32 = 230;
/// `NVML_VALUE_TYPE_UNSIGNED_INT`.
pub const VALUE_UNSIGNED: c_int = 1;

const _: () = assert!(size_of::<PciInfo>() == 68);
const _: () = assert!(size_of::<EventData>() == 32);
const _: () = assert!(size_of::<FieldValue>() == 40);
const _: () = assert!(size_of::<DetailList>() == 24);

/// Copies `text` and a NUL into a caller's buffer of `length` bytes.
///
/// # Safety
/// `buffer` must be null or writable for `length` bytes.
pub unsafe fn put_text(buffer: *mut c_char, length: c_uint, text: &str) -> Return {
    if buffer.is_null() {
        return INVALID_ARGUMENT;
    }
    if text.len() >= length as usize {
        return INSUFFICIENT_SIZE;
    }
    // SAFETY: the caller gave `length` writable bytes, and the text with its NUL fits.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buffer, text.len());
        *buffer.add(text.len()) = 0;
    }
    SUCCESS
}

/// Writes through an out pointer, unless it is null.
///
/// # Safety
/// `place` must be null or valid for a write.
pub unsafe fn put<T>(place: *mut T, value: T) -> Return {
    if place.is_null() {
        return INVALID_ARGUMENT;
    }
    // SAFETY: not null, and the caller promises that it can be written.
    unsafe { place.write(value) };
    SUCCESS
}
