//! The `mps-exporter` command.

fn main() {}
