//! NVML: devices, MIG, MPS client pids, memory, modes and Xid events.

pub mod stand_in;
