//! What the library remembers between calls: the script, who initialised it, handles and event sets.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::abi::{DRIVER_NOT_LOADED, GPU_IS_LOST, Handle, INVALID_ARGUMENT, Return, UNINITIALIZED, UNKNOWN};
use crate::script::{Gpu, Instance, Script};

/// How often a call that hangs looks whether it still should.
const HANG_POLL: Duration = Duration::from_millis(5);
/// Handles are this plus a number times 16: never a valid address.
const HANDLE_BASE: usize = 0x5a00_0000;

/// Everything behind the library's one lock.
#[derive(Default)]
pub struct State {
    path: Option<PathBuf>,
    /// Inode, modification time in nanoseconds and size of the script that was read last.
    read: Option<(u64, i64, i64, u64)>,
    script: Option<Arc<Script>>,
    /// Nesting of `nvmlInit`.
    pub initialized: u32,
    /// UUIDs that have a handle, by the handle's number.
    handles: Vec<String>,
    /// Entries that lists have grown by, by GPU and list, since the script was read.
    pub grown: HashMap<(u32, &'static str), (u32, u32)>,
    /// Event sets, by their number.
    pub sets: BTreeMap<usize, EventSet>,
    /// Event sets made so far.
    pub sets_made: usize,
}

/// An event set.
#[derive(Default)]
pub struct EventSet {
    /// Event bits and the newest event at the time of registration, by GPU.
    pub registered: HashMap<u32, (u64, u64)>,
    /// The sequence number of the last event delivered.
    pub delivered: u64,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// The state, locked.
pub fn with_state<T>(then: impl FnOnce(&mut State) -> T) -> T {
    let mut state: MutexGuard<'_, Option<State>> = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    then(state.get_or_insert_with(State::default))
}

/// A device handle's meaning.
pub enum Device<'s> {
    Gpu(&'s Gpu),
    Instance(&'s Gpu, &'s Instance),
}

impl<'s> Device<'s> {
    /// The GPU, or the one that the instance belongs to.
    pub fn gpu(&self) -> &'s Gpu {
        match self {
            Device::Gpu(gpu) | Device::Instance(gpu, _) => gpu,
        }
    }
}

/// Finds the index of the GPU that a call is about.
pub type FindGpu<'f> = &'f dyn Fn(&Script) -> Option<u32>;

/// The start of every call: hangs or fails when the script says so, else gives the script.
pub fn enter(function: &str) -> Result<Arc<Script>, Return> {
    enter_for(function, None)
}

/// As [`enter`], for a call on a device.
pub fn enter_device(function: &str, device: Handle) -> Result<(Arc<Script>, String), Return> {
    let uuid = with_state(|state| state.uuid(device));
    let index =
        |script: &Script| uuid.as_deref().and_then(|uuid| find(script, uuid)).map(|it| it.gpu().index);
    let script = enter_for(function, Some(&index))?;
    let uuid = uuid.ok_or(INVALID_ARGUMENT)?;
    match find(&script, &uuid) {
        None => Err(INVALID_ARGUMENT),
        Some(device) if device.gpu().is_lost => Err(GPU_IS_LOST),
        Some(_) => Ok((script, uuid)),
    }
}

/// As [`enter`], for a call on the GPU that `index` finds.
pub fn enter_for(function: &str, index: Option<FindGpu<'_>>) -> Result<Arc<Script>, Return> {
    let mut is_traced = false;
    loop {
        let (script, initialized) = with_state(|state| (state.script(), state.initialized));
        let Some(script) = script else { return Err(DRIVER_NOT_LOADED) };
        if let (Some(path), false) = (&script.trace, is_traced) {
            trace(path, function);
            is_traced = true;
        }
        let gpu = index.and_then(|index| index(&script));
        if script.hangs.iter().any(|hang| hang.is_for(function, gpu)) {
            std::thread::sleep(HANG_POLL);
            continue;
        }
        if let Some(error) = script.errors.iter().find(|error| error.is_for(function, gpu)) {
            return Err(error.code);
        }
        let needs_init = !matches!(
            function,
            "nvmlInit_v2" | "nvmlInit" | "nvmlInitWithFlags" | "nvmlShutdown" | "nvmlSystemGetNVMLVersion"
        );
        if needs_init && initialized == 0 {
            return Err(UNINITIALIZED);
        }
        return Ok(script);
    }
}

/// The device with this UUID.
pub fn find<'s>(script: &'s Script, uuid: &str) -> Option<Device<'s>> {
    for gpu in &script.gpus {
        if gpu.uuid == uuid {
            return Some(Device::Gpu(gpu));
        }
        if let Some(instance) = gpu.instances.iter().find(|instance| instance.uuid == uuid) {
            return gpu.mig.unwrap_or(false).then_some(Device::Instance(gpu, instance));
        }
    }
    None
}

/// The name of the function, and which of the system's threads calls it.
fn trace(path: &str, function: &str) {
    let thread = std::fs::read_link("/proc/thread-self").unwrap_or_default();
    let line = format!("{function} {}\n", thread.display());
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    let _untraced = file.and_then(|mut file| file.write_all(line.as_bytes()));
}

impl State {
    /// The handle of a UUID: always the same for the same UUID.
    pub fn handle(&mut self, uuid: &str) -> Handle {
        let known = self.handles.iter().position(|known| known == uuid);
        let number = known.unwrap_or_else(|| {
            self.handles.push(uuid.to_owned());
            self.handles.len() - 1
        });
        std::ptr::without_provenance_mut(HANDLE_BASE + number * 16)
    }

    fn uuid(&self, handle: Handle) -> Option<String> {
        let offset = handle.addr().checked_sub(HANDLE_BASE)?;
        (offset % 16 == 0).then(|| self.handles.get(offset / 16).cloned()).flatten()
    }

    /// The script as it is now; `None`: there is none, or it says that no driver is loaded.
    pub fn script(&mut self) -> Option<Arc<Script>> {
        let path = self.path.get_or_insert_with(script_path);
        let seen = std::fs::metadata(&*path)
            .ok()
            .map(|file| (file.ino(), file.mtime(), file.mtime_nsec(), file.size()));
        if seen.is_none() {
            (self.read, self.script) = (None, None);
            return None;
        }
        if self.read != seen {
            let text = std::fs::read_to_string(&*path).unwrap_or_default();
            match Script::parse(&text) {
                Ok(script) => self.script = Some(Arc::new(script)),
                Err(error) => {
                    eprintln!("nvml-stand-in: {}: {error}", path.display());
                    self.script = Some(Arc::new(broken()));
                }
            }
            self.read = seen;
            self.grown.clear();
        }
        self.script.clone()
    }
}

/// What a script that cannot be read makes of the library: everything fails as unknown.
fn broken() -> Script {
    let fault = |function: &str| crate::script::Fault { function: function.into(), gpu: None, code: UNKNOWN };
    Script { errors: ["nvmlInit_v2", "nvmlDeviceGetCount_v2"].map(fault).into(), ..Script::default() }
}

#[repr(C)]
struct DlInfo {
    file_name: *const c_char,
    base: *mut c_void,
    symbol_name: *const c_char,
    symbol: *mut c_void,
}

unsafe extern "C" {
    fn dladdr(address: *const c_void, info: *mut DlInfo) -> c_int;
}

/// `NVML_STAND_IN_SCRIPT`, else the library's own path with `.script` added.
fn script_path() -> PathBuf {
    if let Some(path) = std::env::var_os("NVML_STAND_IN_SCRIPT") {
        return path.into();
    }
    let mut info = DlInfo {
        file_name: std::ptr::null(),
        base: std::ptr::null_mut(),
        symbol_name: std::ptr::null(),
        symbol: std::ptr::null_mut(),
    };
    // SAFETY: the address is that of a static of this library, `info` is writable, and the name that `dladdr` gives
    // lives as long as the library is loaded.
    let name = unsafe {
        if dladdr((&raw const STATE).cast(), &raw mut info) == 0 || info.file_name.is_null() {
            return PathBuf::new();
        }
        CStr::from_ptr(info.file_name)
    };
    let mut path = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(name.to_bytes()).to_owned();
    path.push(".script");
    path.into()
}
