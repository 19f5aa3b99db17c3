//! The commands: one file each.

pub mod explain;
pub mod text;
