//! The few system calls that no safe wrapper covers.
#![allow(unsafe_code)]

pub mod async_fd;
pub mod code;
pub mod env;
pub mod heap;
pub mod listen_fd;
pub mod lock;
pub mod namespace;
pub mod seqpacket;
