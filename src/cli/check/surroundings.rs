//! Where the command runs: what there is to change depends on it.

use std::path::Path;

/// The number of the first pid namespace, a constant of the kernel (`PROC_PID_INIT_INO`).
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";

/// Where the command runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Surroundings {
    /// Effective user id.
    pub uid: u32,
    /// Whether this is a container.
    pub is_container: bool,
    /// Whether pids here are the host's.
    pub has_host_pids: bool,
}

impl Surroundings {
    /// Those of this process.
    pub fn here() -> Surroundings {
        let is_set = |name| std::env::var_os(name).is_some();
        let exists = |path| Path::new(path).exists();
        Surroundings {
            uid: rustix::process::geteuid().as_raw(),
            is_container: exists("/.dockerenv")
                || exists("/run/.containerenv")
                || is_set("KUBERNETES_SERVICE_HOST")
                || is_set("container"),
            has_host_pids: std::fs::read_link("/proc/self/ns/pid")
                .is_ok_and(|link| link.as_os_str() == FIRST_PID_NAMESPACE),
        }
    }

    /// One line about it.
    pub fn sentence(self) -> String {
        let user = if self.uid == 0 { "root".to_owned() } else { format!("uid {}", self.uid) };
        let place = match (self.is_container, self.has_host_pids) {
            (false, true) => "on the host",
            (true, true) => "in a container with the host's pids",
            (true, false) => "in a container with pids of its own",
            (false, false) => "in a pid namespace of its own",
        };
        format!("runs as {user}, {place}")
    }
}
