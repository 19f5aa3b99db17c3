//! What can go wrong with NVML, by NVML's numbers.

use std::path::PathBuf;

use nvml_wrapper::error::NvmlError;

/// NVML's return codes that change what we do; the others are data.
pub mod code {
    /// The library was not initialised, or was shut down.
    pub const UNINITIALIZED: u32 = 1;
    /// The device cannot do this.
    pub const NOT_SUPPORTED: u32 = 3;
    /// The user may not do this.
    pub const NO_PERMISSION: u32 = 4;
    /// There is no such thing.
    pub const NOT_FOUND: u32 = 6;
    /// The buffer is too small.
    pub const INSUFFICIENT_SIZE: u32 = 7;
    /// No driver.
    pub const DRIVER_NOT_LOADED: u32 = 9;
    /// The time was up.
    pub const TIMEOUT: u32 = 10;
    /// The driver lacks this function.
    pub const FUNCTION_NOT_FOUND: u32 = 13;
    /// The GPU has fallen off the bus or is otherwise out of reach.
    pub const GPU_IS_LOST: u32 = 15;
    /// The GPU needs a reset first.
    pub const RESET_REQUIRED: u32 = 16;
    /// The loaded driver and the library are of different versions.
    pub const VERSION_MISMATCH: u32 = 18;
}

/// Why NVML gave nothing.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no driver to ask. The library was not touched.
    #[error("the NVIDIA driver is not loaded: neither {} nor {} exists", .version.display(), .module.display())]
    NoDriver {
        /// `driver/nvidia/version` under the host's `/proc`.
        version: PathBuf,
        /// The driver's folder in sysfs.
        module: PathBuf,
    },
    /// The library cannot be loaded.
    #[error("cannot load {}: {reason}", .path.display())]
    Load {
        /// As configured.
        path: PathBuf,
        /// The dynamic linker's words.
        reason: String,
    },
    /// This generation of the library has no such function.
    #[error("{call} is missing from this NVML library")]
    Missing {
        /// The function.
        call: &'static str,
    },
    /// The function returned a code.
    #[error("{call} failed: {} (code {code})", meaning(*code))]
    Failed {
        /// The function.
        call: &'static str,
        /// NVML's return code.
        code: u32,
    },
    /// The function succeeded, and what it wrote cannot be what it should be.
    #[error("{call} wrote something that cannot be read")]
    Garbled {
        /// The function.
        call: &'static str,
    },
}

impl Error {
    /// The binding's error of this call.
    pub fn from_binding(call: &'static str, error: NvmlError) -> Error {
        match error {
            NvmlError::FailedToLoadSymbol(_) => Error::Missing { call },
            NvmlError::Utf8Error(_) | NvmlError::NulError(_) | NvmlError::IncorrectBits(_) => {
                Error::Garbled { call }
            }
            error => Error::Failed { call, code: error.into() },
        }
    }

    /// The function that failed, where it was one.
    pub fn call(&self) -> Option<&'static str> {
        match self {
            Error::Missing { call } | Error::Failed { call, .. } | Error::Garbled { call } => Some(call),
            Error::NoDriver { .. } | Error::Load { .. } => None,
        }
    }

    /// NVML's return code, where there is one.
    pub fn code(&self) -> Option<u32> {
        match self {
            Error::Failed { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Whether the device or the library simply does not have this: nothing to tell anybody.
    pub fn is_absence(&self) -> bool {
        matches!(self, Error::Missing { .. })
            || matches!(self.code(), Some(code::NOT_SUPPORTED | code::NOT_FOUND | code::FUNCTION_NOT_FOUND))
    }
}

/// What a return code means, in a few words.
fn meaning(code: u32) -> &'static str {
    match code {
        code::UNINITIALIZED => "the library is not initialised",
        2 => "invalid argument",
        code::NOT_SUPPORTED => "not supported here",
        code::NO_PERMISSION => "no permission; run as root or with access to the device files",
        code::NOT_FOUND => "not found",
        code::INSUFFICIENT_SIZE => "the list kept growing while it was read",
        8 => "the GPU's external power is not attached",
        code::DRIVER_NOT_LOADED => "the NVIDIA driver is not loaded",
        code::TIMEOUT => "the driver gave no answer in time",
        11 => "the kernel reports an interrupt problem with a GPU",
        12 => "a library that NVML needs was not found",
        code::FUNCTION_NOT_FOUND => "the driver lacks this function",
        14 => "the GPU's infoROM is corrupted",
        code::GPU_IS_LOST => "the GPU is lost",
        code::RESET_REQUIRED => "the GPU needs a reset",
        17 => "blocked by the operating system or the device cgroup",
        code::VERSION_MISMATCH => {
            "the loaded driver and the library are of different versions; reload the driver or restart the node"
        }
        19 => "the GPU is in use",
        20 => "out of memory",
        21 => "no data",
        23 => "out of resources",
        25 => "the driver knows another version of a structure",
        27 => "not ready",
        28 => "no such GPU",
        29 => "the GPU is in a state that does not allow this",
        999 => "unknown error in the driver",
        _ => "unknown return code",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_that_the_binding_does_not_know_keep_their_number() {
        for code in [1, 4, 15, 18, 25, 28, 29, 999, 4711] {
            let error = Error::from_binding("nvmlX", NvmlError::from(code));
            assert_eq!(error.code(), Some(code));
        }
        let missing = Error::from_binding("nvmlX", NvmlError::FailedToLoadSymbol("undefined symbol".into()));
        assert_eq!(missing.to_string(), "nvmlX is missing from this NVML library");
        assert!(missing.is_absence());
    }
}
