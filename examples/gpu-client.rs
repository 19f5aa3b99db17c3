//! A tiny CUDA program for `scripts/gpu-check`: keeps a GPU a little busy, and breaks on request.
//!
//! It needs the driver's `libcuda.so.1` and nothing of the CUDA toolkit: the kernels are PTX in text, which the driver
//! compiles. Commands are lines on standard input: `bad_address`, `trap`, `quit`; end of input means `quit`. Everything
//! that happens is a line on standard output, with the time in seconds since 1970.
//!
//!     gpu-client --probe            # can libcuda be loaded, is there a device?
//!     gpu-client NAME [LINGER]      # LINGER: seconds to stay after an error, like a program that does not check (2)
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::io::BufRead as _;
use std::process::ExitCode;
use std::ptr;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Kernels for Volta and newer.
const PTX: &str = include_str!("gpu-client.ptx");
/// Clock cycles of one turn of work: some 30 ms.
const WORK_CYCLES: u64 = 50_000_000;
/// Pause between two turns, so that three clients share a GPU easily.
const REST: Duration = Duration::from_millis(10);
/// Exit status for "no libcuda or no device".
const NO_GPU: u8 = 2;

type Status = c_int;
type Pointer = *mut c_void;

/// A failed CUDA call.
struct Failure {
    call: &'static str,
    status: Status,
    name: String,
}

/// The driver API, with what one context needs.
struct Cuda {
    library: libloading::Library,
}

impl Cuda {
    fn load() -> Result<Cuda, libloading::Error> {
        // SAFETY: loading NVIDIA's driver library runs its initialisers, as in every CUDA program.
        let library = unsafe { libloading::Library::new("libcuda.so.1") }?;
        Ok(Cuda { library })
    }

    /// A function by its symbol. `F` must be its type in `cuda.h`.
    fn function<F: Copy>(&self, call: &'static str) -> Result<F, Failure> {
        let symbol = CString::new(call).expect("a constant without NUL");
        // SAFETY: every caller names the type that cuda.h declares for this symbol.
        let found = unsafe { self.library.get::<F>(symbol.as_bytes_with_nul()) };
        found.map(|function| *function).map_err(|error| Failure { call, status: -1, name: error.to_string() })
    }

    fn check(&self, call: &'static str, status: Status) -> Result<(), Failure> {
        if status == 0 {
            return Ok(());
        }
        Err(Failure { call, status, name: self.error_name(status) })
    }

    fn error_name(&self, status: Status) -> String {
        type GetErrorName = unsafe extern "C" fn(Status, *mut *const c_char) -> Status;
        let Ok(get) = self.function::<GetErrorName>("cuGetErrorName") else { return String::new() };
        let mut name = ptr::null();
        // SAFETY: `name` is a valid place; a name that is given is a constant string of the library.
        unsafe {
            if get(status, &raw mut name) != 0 || name.is_null() {
                return String::new();
            }
            CStr::from_ptr(name).to_string_lossy().into_owned()
        }
    }

    /// Initialises, and gives the number of devices.
    fn devices(&self) -> Result<c_int, Failure> {
        type Init = unsafe extern "C" fn(c_uint) -> Status;
        type GetCount = unsafe extern "C" fn(*mut c_int) -> Status;
        let init = self.function::<Init>("cuInit")?;
        let get = self.function::<GetCount>("cuDeviceGetCount")?;
        let mut count = 0;
        // SAFETY: as cuda.h asks.
        unsafe {
            self.check("cuInit", init(0))?;
            self.check("cuDeviceGetCount", get(&raw mut count))?;
        }
        Ok(count)
    }

    /// Makes the first device's context current and compiles the kernels.
    fn module(&self) -> Result<Pointer, Failure> {
        type Get = unsafe extern "C" fn(*mut c_int, c_int) -> Status;
        type Retain = unsafe extern "C" fn(*mut Pointer, c_int) -> Status;
        type SetCurrent = unsafe extern "C" fn(Pointer) -> Status;
        type Load = unsafe extern "C" fn(*mut Pointer, *const c_char) -> Status;
        let get = self.function::<Get>("cuDeviceGet")?;
        let retain = self.function::<Retain>("cuDevicePrimaryCtxRetain")?;
        let set_current = self.function::<SetCurrent>("cuCtxSetCurrent")?;
        let load = self.function::<Load>("cuModuleLoadData")?;
        let ptx = CString::new(PTX).expect("a constant without NUL");
        let (mut device, mut context, mut module) = (0, ptr::null_mut(), ptr::null_mut());
        // SAFETY: as cuda.h asks; the text outlives the call.
        unsafe {
            self.check("cuDeviceGet", get(&raw mut device, 0))?;
            self.check("cuDevicePrimaryCtxRetain", retain(&raw mut context, device))?;
            self.check("cuCtxSetCurrent", set_current(context))?;
            self.check("cuModuleLoadData", load(&raw mut module, ptx.as_ptr()))?;
        }
        Ok(module)
    }

    /// Runs a kernel on one thread, with a number that only `work` reads, and waits for it.
    fn run(&self, module: Pointer, kernel: &str, mut number: u64) -> Result<(), Failure> {
        type GetFunction = unsafe extern "C" fn(*mut Pointer, Pointer, *const c_char) -> Status;
        type Launch = unsafe extern "C" fn(
            Pointer,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            Pointer,
            *mut Pointer,
            *mut Pointer,
        ) -> Status;
        type Synchronize = unsafe extern "C" fn() -> Status;
        let get = self.function::<GetFunction>("cuModuleGetFunction")?;
        let launch = self.function::<Launch>("cuLaunchKernel")?;
        let synchronize = self.function::<Synchronize>("cuCtxSynchronize")?;
        let name = CString::new(kernel).expect("a constant without NUL");
        let mut function = ptr::null_mut();
        let mut parameters = [(&raw mut number).cast::<c_void>()];
        // SAFETY: as cuda.h asks; the only parameter of every kernel is this 64-bit number.
        unsafe {
            self.check("cuModuleGetFunction", get(&raw mut function, module, name.as_ptr()))?;
            let no_stream = ptr::null_mut();
            let arguments = parameters.as_mut_ptr();
            let status = launch(function, 1, 1, 1, 1, 1, 1, 0, no_stream, arguments, ptr::null_mut());
            self.check("cuLaunchKernel", status)?;
            self.check("cuCtxSynchronize", synchronize())
        }
    }
}

fn say(name: &str, what: &str) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    println!("{}.{:06} client={name} pid={} {what}", now.as_secs(), now.subsec_micros(), std::process::id());
}

/// Lines of standard input, until its end.
fn commands() -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if sender.send(line.trim().to_owned()).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Works until told to stop or to break.
fn work(cuda: &Cuda, name: &str) -> Result<(), Failure> {
    cuda.devices()?;
    let module = cuda.module()?;
    cuda.run(module, "work", WORK_CYCLES)?;
    say(name, "ready");
    let commands = commands();
    loop {
        match commands.try_recv() {
            Ok(command) if command == "quit" => return Ok(()),
            Ok(kernel) if kernel == "bad_address" || kernel == "trap" => {
                say(name, &format!("breaks by={kernel}"));
                cuda.run(module, if kernel == "trap" { "trap_now" } else { "bad_address" }, 0)?;
                say(name, "the fault went unnoticed");
            }
            Ok(other) => say(name, &format!("unknown command {other:?}")),
            Err(TryRecvError::Disconnected) => return Ok(()),
            Err(TryRecvError::Empty) => {}
        }
        cuda.run(module, "work", WORK_CYCLES)?;
        std::thread::sleep(REST);
    }
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let Some(name) = arguments.next() else {
        eprintln!("usage: gpu-client --probe | NAME [LINGER]");
        return ExitCode::from(64);
    };
    let linger = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(2.0);
    let cuda = match Cuda::load() {
        Ok(cuda) => cuda,
        Err(error) => {
            eprintln!("gpu-client: cannot load libcuda.so.1, the CUDA part of the NVIDIA driver: {error}");
            return ExitCode::from(NO_GPU);
        }
    };
    if name == "--probe" {
        return match cuda.devices() {
            Ok(count) if count > 0 => {
                println!("{count} CUDA devices");
                ExitCode::SUCCESS
            }
            Ok(_) => {
                eprintln!("gpu-client: libcuda sees no device");
                ExitCode::from(NO_GPU)
            }
            Err(Failure { call, status, name }) => {
                eprintln!("gpu-client: {call} failed with {status} {name}");
                ExitCode::from(NO_GPU)
            }
        };
    }
    match work(&cuda, &name) {
        Ok(()) => {
            say(&name, "quits");
            ExitCode::SUCCESS
        }
        Err(Failure { call, status, name: error }) => {
            say(&name, &format!("error={status} {error} in={call}"));
            std::thread::sleep(Duration::try_from_secs_f64(linger).unwrap_or_default());
            say(&name, "exits");
            ExitCode::FAILURE
        }
    }
}
