//! Builds the stand-in NVML, which `mps-exporter demo` carries as data and loads as it would load NVIDIA's library.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The crate root of the stand-in. It has no dependencies, so that `rustc` alone builds it.
const ROOT: &str = "nvml-stand-in/src/lib.rs";

fn main() {
    println!("cargo::rerun-if-changed=nvml-stand-in/src");
    println!("cargo::rerun-if-changed=build.rs");
    let library = PathBuf::from(variable("OUT_DIR")).join("libnvml_stand_in.so");
    // A source archive of this package alone has no stand-in: the program then has no simulated GPUs.
    if Path::new(ROOT).exists() { compile(&library) } else { write_empty(&library) }
}

fn compile(library: &Path) {
    let mut rustc = Command::new(variable("RUSTC"));
    rustc
        .args(["--crate-name", "nvml_stand_in", "--crate-type", "cdylib", "--edition", "2024"])
        .args(["-C", "opt-level=s", "-C", "panic=abort", "-C", "strip=symbols"])
        .args(["--cap-lints", "allow", "--target"])
        .arg(variable("TARGET"))
        .arg("-o")
        .arg(library)
        .arg(ROOT);
    if variable("PROFILE") == "release" {
        rustc.args(["-C", "lto=fat", "-C", "codegen-units=1"]);
    }
    if let Ok(linker) = std::env::var("RUSTC_LINKER") {
        rustc.arg("-C").arg(format!("linker={linker}"));
    }
    let status = rustc.status().unwrap_or_else(|error| panic!("cannot run rustc for {ROOT}: {error}"));
    assert!(status.success(), "rustc could not build {ROOT}: {status}");
}

fn write_empty(library: &Path) {
    std::fs::write(library, []).unwrap_or_else(|error| panic!("cannot write {}: {error}", library.display()));
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"))
}
