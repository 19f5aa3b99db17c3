//! Calls about the library and the system.

use std::ffi::{c_char, c_int, c_uint};

use crate::abi::{DRIVER_NOT_LOADED, Return, SUCCESS, put, put_text};
use crate::state::{enter, with_state};

fn init(function: &str) -> Return {
    match enter(function) {
        Ok(script) if script.driver.is_none() => DRIVER_NOT_LOADED,
        Ok(_) => {
            with_state(|state| state.initialized += 1);
            SUCCESS
        }
        Err(code) => code,
    }
}

/// `nvmlInit_v2`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> Return {
    init("nvmlInit_v2")
}

/// `nvmlInit`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit() -> Return {
    init("nvmlInit")
}

/// `nvmlInitWithFlags`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> Return {
    init("nvmlInitWithFlags")
}

/// `nvmlShutdown`; event sets die with the last initialisation.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> Return {
    if let Err(code) = enter("nvmlShutdown") {
        return code;
    }
    with_state(|state| {
        state.initialized = state.initialized.saturating_sub(1);
        if state.initialized == 0 {
            state.sets.clear();
        }
    });
    SUCCESS
}

/// `nvmlErrorString`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(result: Return) -> *const c_char {
    let text = match result {
        SUCCESS => c"Success",
        DRIVER_NOT_LOADED => c"Driver Not Loaded",
        _ => c"Scripted error",
    };
    text.as_ptr()
}

/// `nvmlSystemGetDriverVersion`.
///
/// # Safety
/// As in NVML.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) -> Return {
    match enter("nvmlSystemGetDriverVersion") {
        // SAFETY: as the caller promises.
        Ok(script) => unsafe { put_text(version, length, script.driver.as_deref().unwrap_or_default()) },
        Err(code) => code,
    }
}

/// `nvmlSystemGetNVMLVersion`: the query that works before the initialisation. It says that this is a stand-in.
///
/// # Safety
/// As in NVML.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: c_uint) -> Return {
    let driver = match enter("nvmlSystemGetNVMLVersion") {
        Ok(script) => script.driver.clone(),
        Err(DRIVER_NOT_LOADED) => None,
        Err(code) => return code,
    };
    let text = format!("13.{}-stand-in", driver.as_deref().unwrap_or("0"));
    // SAFETY: as the caller promises.
    unsafe { put_text(version, length, &text) }
}

/// `nvmlSystemGetCudaDriverVersion_v2`.
///
/// # Safety
/// As in NVML.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) -> Return {
    match enter("nvmlSystemGetCudaDriverVersion_v2") {
        // SAFETY: as the caller promises.
        Ok(_) => unsafe { put(version, 13_000) },
        Err(code) => code,
    }
}
