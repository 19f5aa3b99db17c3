//! The kernel log: Xids with pid and channel, GPU-level errors, OOM kills.
