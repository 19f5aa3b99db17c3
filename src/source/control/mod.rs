//! The control daemon: who is there, whether it lives, and what it answers.

pub mod answers;
pub mod wire;
