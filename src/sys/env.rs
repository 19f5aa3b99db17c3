//! The process environment.

/// Switches NVML of 13.5 and newer to a view in which devices are what MPS makes of them.
const MPS_DEVICE_VIEW: &str = "NVML_MPS_DEVICE_ENUMERATION";

/// Unsets `NVML_MPS_DEVICE_ENUMERATION` for this process: with it, NVML's devices, UUIDs and memory would silently
/// change their meaning.
///
/// To be called first thing in `main`, while there is one thread only.
pub fn unset_mps_device_view() {
    if std::env::var_os(MPS_DEVICE_VIEW).is_some() {
        // SAFETY: the caller has started no thread, so nobody else reads the environment now.
        unsafe { std::env::remove_var(MPS_DEVICE_VIEW) };
    }
}
