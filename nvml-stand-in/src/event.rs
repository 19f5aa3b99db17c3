//! Event sets.

use std::ffi::{c_uint, c_ulonglong};
use std::time::{Duration, Instant};

use crate::abi::{EventData, Handle, INVALID_ARGUMENT, NOT_SUPPORTED, Return, SUCCESS, TIMEOUT, put};
use crate::state::{Device, EventSet, enter, enter_device, find, with_state};

/// How often a waiting call looks for new events.
const POLL: Duration = Duration::from_millis(2);
/// Event sets are this plus their number times 16: never a valid address.
const SET_BASE: usize = 0x6a00_0000;

fn number(set: Handle) -> Option<usize> {
    set.addr().checked_sub(SET_BASE).map(|offset| offset / 16)
}

/// `nvmlEventSetCreate`.
///
/// # Safety
/// As in NVML.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetCreate(set: *mut Handle) -> Return {
    if let Err(code) = enter("nvmlEventSetCreate") {
        return code;
    }
    let made = with_state(|state| {
        state.sets_made += 1;
        state.sets.insert(state.sets_made, EventSet::default());
        state.sets_made
    });
    // SAFETY: as the caller promises.
    unsafe { put(set, std::ptr::without_provenance_mut(SET_BASE + made * 16)) }
}

/// `nvmlEventSetFree`.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlEventSetFree(set: Handle) -> Return {
    if let Err(code) = enter("nvmlEventSetFree") {
        return code;
    }
    let freed = with_state(|state| number(set).and_then(|number| state.sets.remove(&number)));
    if freed.is_some() { SUCCESS } else { INVALID_ARGUMENT }
}

/// `nvmlDeviceGetSupportedEventTypes`.
///
/// # Safety
/// As in NVML.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetSupportedEventTypes(device: Handle, types: *mut c_ulonglong) -> Return {
    match enter_device("nvmlDeviceGetSupportedEventTypes", device) {
        // SAFETY: as the caller promises.
        Ok((script, _)) => unsafe { put(types, script.shape.events) },
        Err(code) => code,
    }
}

/// `nvmlDeviceRegisterEvents`: one unsupported bit refuses the whole call.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlDeviceRegisterEvents(device: Handle, types: c_ulonglong, set: Handle) -> Return {
    let (script, uuid) = match enter_device("nvmlDeviceRegisterEvents", device) {
        Ok(entered) => entered,
        Err(code) => return code,
    };
    let Some(Device::Gpu(gpu)) = find(&script, &uuid) else { return NOT_SUPPORTED };
    if types & !script.shape.events != 0 {
        return NOT_SUPPORTED;
    }
    let newest = script.events.last().map_or(0, |event| event.sequence);
    with_state(|state| match number(set).and_then(|number| state.sets.get_mut(&number)) {
        Some(set) => {
            set.registered.entry(gpu.index).or_insert((0, newest)).0 |= types;
            SUCCESS
        }
        None => INVALID_ARGUMENT,
    })
}

/// `nvmlEventSetWait_v2`.
///
/// # Safety
/// As in NVML.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlEventSetWait_v2(set: Handle, data: *mut EventData, timeout: c_uint) -> Return {
    let deadline = Instant::now() + Duration::from_millis(timeout.into());
    if let Err(code) = enter("nvmlEventSetWait_v2") {
        return code;
    }
    loop {
        match next(set) {
            // SAFETY: as the caller promises.
            Ok(Some(event)) => return unsafe { put(data, event) },
            Ok(None) => {}
            Err(code) => return code,
        }
        if Instant::now() >= deadline {
            return TIMEOUT;
        }
        std::thread::sleep(POLL);
    }
}

/// The next event of a set, which then counts as delivered.
fn next(set: Handle) -> Result<Option<EventData>, Return> {
    with_state(|state| {
        let Some(script) = state.script() else { return Ok(None) };
        let number = number(set).ok_or(INVALID_ARGUMENT)?;
        let set = state.sets.get_mut(&number).ok_or(INVALID_ARGUMENT)?;
        let due = script.events.iter().find(|event| {
            event.sequence > set.delivered
                && set
                    .registered
                    .get(&event.gpu)
                    .is_some_and(|(types, since)| event.sequence > *since && types & event.kind != 0)
        });
        let Some(event) = due else { return Ok(None) };
        set.delivered = event.sequence;
        let uuid = script.gpu(event.gpu).map(|gpu| gpu.uuid.clone()).unwrap_or_default();
        Ok(Some(EventData {
            device: state.handle(&uuid),
            kind: event.kind,
            value: event.data,
            gpu_instance: event.gpu_instance,
            compute_instance: event.compute_instance,
        }))
    })
}
