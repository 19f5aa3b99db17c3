//! Processes of the simulated node: they have a pid, a name and an environment, and do nothing.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// What a hidden process says once it is what it is to be.
pub(super) const READY: &str = "ready";

/// Such a process, as its parent holds it. It ends when this is dropped, or when the parent does.
#[derive(Debug)]
pub(super) struct Actor {
    child: Child,
}

impl Actor {
    /// Starts one with this name, of this Slurm job. `program` holds [`super::hidden`].
    pub fn start(program: &Path, name: &str, job: Option<u32>) -> io::Result<Actor> {
        let mut command = Command::new(program);
        command.arg0(name).args([super::HIDDEN, "process", name]).env_clear();
        if let Some(job) = job {
            command.env("SLURM_JOB_ID", job.to_string()).env("SLURM_JOB_USER", "demo");
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        if let Some(output) = child.stdout.take() {
            BufReader::new(output).read_line(&mut line)?;
        }
        Ok(Actor { child })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _already_dead = self.child.kill();
        let _status = self.child.wait();
    }
}

/// The process itself: takes its name, and stays until its parent lets go.
pub(super) fn main(name: &str) -> io::Result<()> {
    std::fs::write("/proc/self/comm", name)?;
    let mut output = io::stdout();
    writeln!(output, "{READY}")?;
    output.flush()?;
    let mut nothing = [0];
    while io::stdin().read(&mut nothing)? > 0 {}
    Ok(())
}
