//! The stand-in library that `mps-exporter demo` carries (its source is `nvml-stand-in/`). Data, never linked.

/// The shared library's bytes; `None` in a build from a source archive that lacks it.
///
/// Written to a file, it is loaded by naming that file as `nvml.library`; its script is that path with `.script` added.
pub fn library() -> Option<&'static [u8]> {
    static LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libnvml_stand_in.so"));
    (!LIBRARY.is_empty()).then_some(LIBRARY)
}
