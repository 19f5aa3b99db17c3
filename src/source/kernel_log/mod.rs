//! The kernel log: Xids with their pid and channel, lost GPUs, OOM kills.

pub mod line;
mod pending;
pub mod record;
pub mod recorded;
pub mod stamp;
pub mod xid;
