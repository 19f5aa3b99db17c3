//! A scripted `libnvidia-ml.so.1`: NVML's C ABI without a GPU, for tests and for the demo.
//!
//! It is loaded by the same `dlopen` as NVIDIA's library and says what a small text file tells it to say; the file is
//! read again at every call after it changed. README.md describes its grammar. Nothing here is linked into the
//! product. The crate has one root, no dependency and no build script, so that a bare `rustc` can build it, and it
//! exports no symbol that NVML does not have.

mod abi;
mod device;
mod event;
mod list;
mod script;
mod state;
mod system;
