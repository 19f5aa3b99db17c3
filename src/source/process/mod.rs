//! `/proc` and pidfds: who a pid is, who it works for, and when it ends.
//!
//! [`source`] is the source; [`proc`], [`namespace`] and [`pidfd`] know processes, [`cgroup`], [`workload`], [`pod_logs`] and
//! [`kubelet`] whom they work for, [`checkpoint`] and [`rooted`] their files. docs/workloads.md tells it from outside.

pub mod cache;
pub mod cgroup;
pub mod checkpoint;
pub mod kubelet;
pub mod namespace;
pub mod pidfd;
pub mod pod_logs;
pub mod proc;
pub mod rooted;
pub mod source;
pub mod watch;
pub mod worker;
pub mod workload;

#[cfg(test)]
pub(crate) mod testing;
