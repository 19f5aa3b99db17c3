//! Who the pids in NVML's lists are. Remembered while a pid stays listed: a cycle reads `/proc` only for new ones.

use std::collections::HashMap;

use crate::source::process::proc::{ProcRoot, Program};

/// After so many cycles a pid is looked at again: its process may have changed its name, or be another one by now.
const REVISIT_CYCLES: u64 = 30;
/// How many pids are looked at again in one cycle, so that the cost of a cycle stays even.
const REVISITS: usize = 16;

/// Programs of the pids in the lists.
#[derive(Debug)]
pub struct Names {
    proc: ProcRoot,
    cycle: u64,
    revisits: usize,
    known: HashMap<u32, Known>,
}

#[derive(Debug)]
struct Known {
    program: Option<Program>,
    read: u64,
    listed: u64,
}

impl Names {
    /// Programs of the processes in this proc file system.
    pub fn new(proc: ProcRoot) -> Names {
        Names { proc, cycle: 0, revisits: 0, known: HashMap::new() }
    }

    /// A new cycle: pids that the last one did not list are forgotten.
    pub fn begin(&mut self) {
        let cycle = self.cycle;
        self.known.retain(|_, known| known.listed == cycle);
        self.cycle += 1;
        self.revisits = 0;
    }

    /// What this pid runs; `None` when there is no such process to be seen.
    pub fn program(&mut self, pid: u32) -> Option<Program> {
        let cycle = self.cycle;
        if let Some(known) = self.known.get_mut(&pid) {
            known.listed = cycle;
            let is_due = cycle - known.read >= REVISIT_CYCLES && self.revisits < REVISITS;
            if !is_due {
                return known.program.clone();
            }
            self.revisits += 1;
        }
        let program = self.proc.program(pid);
        self.known.insert(pid, Known { program: program.clone(), read: cycle, listed: cycle });
        program
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn run(root: &Path, pid: u32, comm: &str) {
        let folder = root.join(pid.to_string());
        std::fs::create_dir_all(&folder).unwrap();
        let zeros = "0 ".repeat(16);
        std::fs::write(folder.join("stat"), format!("{pid} ({comm}) S {zeros}1 0 5000 0\n")).unwrap();
    }

    fn command(names: &mut Names, pid: u32) -> Option<String> {
        names.program(pid).map(|program| program.command.to_string())
    }

    #[test]
    fn a_pid_is_remembered_while_it_is_listed_and_read_again_after_a_while() {
        let root = tempfile::tempdir().unwrap();
        run(root.path(), 10, "one");
        let mut names = Names::new(ProcRoot::new(root.path()));
        names.begin();
        assert_eq!(command(&mut names, 10).as_deref(), Some("one"));
        assert_eq!(command(&mut names, 11), None);
        run(root.path(), 10, "two");
        names.begin();
        assert_eq!(command(&mut names, 10).as_deref(), Some("one"), "remembered");
        names.begin();
        names.begin();
        assert_eq!(command(&mut names, 10).as_deref(), Some("two"), "it was not listed for a cycle");
        run(root.path(), 10, "three");
        for _ in 0..REVISIT_CYCLES {
            names.begin();
            names.program(10);
        }
        assert_eq!(command(&mut names, 10).as_deref(), Some("three"));
        assert_eq!(names.known.len(), 1, "pids that are not listed are forgotten");
    }
}
