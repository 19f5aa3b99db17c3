//! Runs a configured command: no shell, JSON on standard input, a time limit for its whole process group.

use std::collections::VecDeque;
use std::process::{ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::outlet::journal::ActionResult;
use crate::source::Shutdown;

/// How much of what a command prints is kept: the end of it.
const MAX_OUTPUT: usize = 4 << 10;
/// How long after its end the rest of its output is awaited. A child that it left behind may hold the pipe.
const LAST_OUTPUT: Duration = Duration::from_millis(200);
/// How long killed commands are awaited when the program stops, and that they are in the journal.
const LAST_RECORD: Duration = Duration::from_millis(1500);
/// What the service manager told us is not for a child to use.
const NOT_INHERITED: [&str; 6] =
    ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"];

/// A command to run.
#[derive(Debug, Clone)]
pub struct Task<'a> {
    /// The program and its arguments.
    pub command: &'a [String],
    /// Variables beside those of this process.
    pub environment: &'a [(&'static str, &'a str)],
    /// What it reads on standard input.
    pub input: &'a [u8],
    /// Time limit.
    pub timeout: Duration,
    /// Ends it before its limit, in the same way.
    pub stop: Shutdown,
}

/// The commands that run. Cheap to clone.
///
/// Each is attended to in a task of its own, which a changed configuration does not end: without it nobody would read
/// what the command prints, which kills it with its next line, nor keep its limit, nor write down how it went.
#[derive(Debug, Clone)]
pub struct Commands {
    running: watch::Sender<usize>,
    stop: watch::Sender<bool>,
    stopped: Shutdown,
}

impl Default for Commands {
    fn default() -> Self {
        let (stop, stopped) = Shutdown::new();
        Commands { running: watch::Sender::new(0), stop, stopped }
    }
}

impl Commands {
    /// What ends the commands before their limits: see [`Task::stop`].
    pub fn stop(&self) -> Shutdown {
        self.stopped.clone()
    }

    /// Starts what attends to a command. It goes on when the handle is dropped.
    pub fn spawn<F>(&self, attend: F) -> JoinHandle<()>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let counted = Counted::new(&self.running);
        tokio::spawn(async move {
            attend.await;
            drop(counted);
        })
    }

    /// Lets running commands end within `limit`; those that do not are ended.
    pub async fn finish(&self, limit: Duration) {
        let mut running = self.running.subscribe();
        let count = *running.borrow();
        if count == 0 {
            return;
        }
        tracing::info!(commands = count, "Waiting for commands of hooks and restarts to end.");
        let ended = tokio::time::timeout(limit, running.wait_for(|running| *running == 0)).await.is_ok();
        if !ended {
            self.stop.send_replace(true);
            let _late = tokio::time::timeout(LAST_RECORD, running.wait_for(|running| *running == 0)).await;
        }
    }
}

/// A command that is counted as running until this is dropped.
struct Counted(watch::Sender<usize>);

impl Counted {
    fn new(running: &watch::Sender<usize>) -> Counted {
        running.send_modify(|running| *running += 1);
        Counted(running.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.send_modify(|running| *running -= 1);
    }
}

/// How a command went.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// Never [`ActionResult::Started`].
    pub result: ActionResult,
    /// The exit status in words, or why there is none.
    pub detail: String,
    /// How long it took.
    pub took: Duration,
    /// The end of its standard output and error, as they came.
    pub output: String,
}

/// Runs a command to its end, or to its limit: then every process of its group is killed. A process that has made a
/// session of its own, as a daemon does, is no longer of the group.
pub async fn run(mut task: Task<'_>) -> Run {
    let started = Instant::now();
    let ended = |result, detail: String, output: &Tail| Run {
        result,
        detail,
        took: started.elapsed(),
        output: output.text(),
    };
    let mut output = Tail::default();
    let mut child = match spawn(&task) {
        Ok(child) => child,
        Err(error) => return ended(ActionResult::NotStarted, error.to_string(), &output),
    };
    let status = tokio::select! {
        status = attend(&mut child, task.input, &mut output) => Ok(status),
        () = tokio::time::sleep(task.timeout) => Err(format!("after {:?}", task.timeout)),
        () = task.stop.wait() => Err("because mps-exporter stopped".to_owned()),
    };
    match status {
        Ok(Ok(status)) if status.success() => ended(ActionResult::Ok, status.to_string(), &output),
        Ok(Ok(status)) => ended(ActionResult::Failed, status.to_string(), &output),
        Ok(Err(error)) => ended(ActionResult::Failed, error.to_string(), &output),
        Err(why) => {
            kill_group(&child);
            // Killed processes end at once, unless they hang in the kernel.
            let reaped = tokio::time::timeout(Duration::from_secs(1), child.wait()).await;
            let detail = match reaped {
                Ok(_) => format!("killed with its process group {why}"),
                Err(_) => format!("killed {why}, but it hangs in the kernel"),
            };
            ended(ActionResult::Timeout, detail, &output)
        }
    }
}

fn spawn(task: &Task<'_>) -> std::io::Result<Child> {
    let (program, arguments) = task
        .command
        .split_first()
        .ok_or_else(|| std::io::Error::new(std::io::ErrorKind::InvalidInput, "the command is empty"))?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .envs(task.environment.iter().copied())
        .current_dir("/")
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    for name in NOT_INHERITED {
        command.env_remove(name);
    }
    command.spawn()
}

/// Feeds the command, reads what it prints, and waits for its end.
async fn attend(child: &mut Child, input: &[u8], output: &mut Tail) -> std::io::Result<ExitStatus> {
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let feed = async {
        if let Some(mut stdin) = stdin {
            // A command need not read it.
            let _unread = stdin.write_all(input).await;
        }
    };
    let output = Mutex::new(output);
    let talk = async {
        tokio::join!(feed, read_all(stdout, &output), read_all(stderr, &output));
    };
    tokio::pin!(talk);
    let status = tokio::select! {
        () = &mut talk => return child.wait().await,
        status = child.wait() => status,
    };
    let _held_open = tokio::time::timeout(LAST_OUTPUT, &mut talk).await;
    status
}

async fn read_all(pipe: Option<impl AsyncRead + Unpin>, output: &Mutex<&mut Tail>) {
    let Some(mut pipe) = pipe else { return };
    let mut buffer = [0; 1024];
    while let Ok(count @ 1..) = pipe.read(&mut buffer).await {
        output.lock().unwrap_or_else(PoisonError::into_inner).push(&buffer[..count]);
    }
}

/// The child is not reaped yet, so its id is still that of its group.
fn kill_group(child: &Child) {
    let id = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    if let Some(id) = id
        && let Err(error) = kill_process_group(id, Signal::KILL)
    {
        tracing::warn!(pid = id.as_raw_nonzero(), %error, "A command's process group could not be killed.");
    }
}

/// The last bytes of a stream.
#[derive(Debug, Default)]
struct Tail {
    bytes: VecDeque<u8>,
    is_cut: bool,
}

impl Tail {
    fn push(&mut self, more: &[u8]) {
        self.bytes.extend(more);
        let surplus = self.bytes.len().saturating_sub(MAX_OUTPUT);
        self.bytes.drain(..surplus);
        self.is_cut |= surplus > 0;
    }

    fn text(&self) -> String {
        let (front, back) = self.bytes.as_slices();
        let text = String::from_utf8_lossy(&[front, back].concat()).trim().to_owned();
        if self.is_cut { format!("…{text}") } else { text }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Vec<String> {
        ["/bin/sh", "-c", script].map(String::from).to_vec()
    }

    async fn run_shell(script: &str, input: &[u8], timeout: Duration) -> Run {
        let environment = [("MPS_TEST", "seen")];
        let stop = Commands::default();
        let task =
            Task { command: &shell(script), environment: &environment, input, timeout, stop: stop.stop() };
        run(task).await
    }

    #[tokio::test]
    async fn a_command_reads_its_input_and_its_output_is_kept() {
        let run = run_shell("cat; echo $MPS_TEST >&2", b"{\"a\":1}\n", Duration::from_secs(10)).await;
        assert_eq!(run.result, ActionResult::Ok, "{run:?}");
        assert!(run.output.contains("{\"a\":1}") && run.output.contains("seen"), "{run:?}");
    }

    #[tokio::test]
    async fn a_failure_says_how() {
        let failed = run_shell("exit 3", b"", Duration::from_secs(10)).await;
        assert_eq!((failed.result, failed.detail.as_str()), (ActionResult::Failed, "exit status: 3"));
        let stop = Commands::default();
        let missing = run(Task {
            command: &["/nonexistent/command".into()],
            environment: &[],
            input: b"",
            timeout: Duration::from_secs(1),
            stop: stop.stop(),
        })
        .await;
        assert_eq!(missing.result, ActionResult::NotStarted);
    }

    #[tokio::test]
    async fn a_command_that_never_reads_and_prints_without_end_is_bounded() {
        let input = vec![b'x'; 1 << 20];
        let run =
            run_shell("head -c 3000000 /dev/zero | tr '\\0' y; echo end", &input, Duration::from_secs(20))
                .await;
        assert_eq!(run.result, ActionResult::Ok, "{}", run.detail);
        assert!(run.output.len() <= MAX_OUTPUT + 4 && run.output.ends_with("end"));
    }

    #[tokio::test]
    async fn the_limit_kills_the_whole_group() {
        let directory = tempfile::tempdir().unwrap();
        let pids = directory.path().join("pids");
        let script = format!(
            "sleep 600 & echo $! >{0}; (sleep 601 & echo $! >>{0}; wait) & echo $! >>{0}; wait",
            pids.display()
        );
        let run = run_shell(&script, b"", Duration::from_millis(500)).await;
        assert_eq!(run.result, ActionResult::Timeout, "{run:?}");
        let pids: Vec<i32> =
            std::fs::read_to_string(pids).unwrap().lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(pids.len(), 3);
        // A killed process takes a moment to end, and whoever adopts it to reap it.
        let lives = |pid: &i32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            !matches!(state, None | Some('Z' | 'X'))
        };
        for _ in 0..100 {
            if !pids.iter().any(lives) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("of {pids:?} some live");
    }

    #[tokio::test]
    async fn the_end_of_the_program_waits_for_a_command_and_ends_one_that_takes_too_long() {
        let commands = Commands::default();
        let results = std::sync::Arc::new(Mutex::new(Vec::new()));
        for script in ["sleep 0.3; echo said", "sleep 600"] {
            let (results, stop) = (results.clone(), commands.stop());
            let handle = commands.spawn(async move {
                let command = shell(script);
                let task = Task {
                    command: &command,
                    environment: &[],
                    input: b"",
                    timeout: Duration::from_secs(60),
                    stop,
                };
                let run = run(task).await;
                results.lock().unwrap().push(run);
            });
            drop(handle);
        }
        let started = std::time::Instant::now();
        commands.finish(Duration::from_secs(3)).await;
        assert!(started.elapsed() >= Duration::from_secs(3));
        let results = results.lock().unwrap();
        let [ended, killed] = results.as_slice() else { panic!("{results:?}") };
        assert_eq!((ended.result, ended.output.as_str()), (ActionResult::Ok, "said"));
        assert_eq!(killed.result, ActionResult::Timeout, "{killed:?}");
        assert!(killed.detail.contains("stopped"), "{killed:?}");
    }

    #[tokio::test]
    async fn a_child_left_behind_does_not_hold_the_run() {
        let started = std::time::Instant::now();
        let run = run_shell("setsid sleep 3 & echo started", b"", Duration::from_secs(10)).await;
        assert_eq!(run.result, ActionResult::Ok);
        assert!(run.output.contains("started"));
        assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    }
}
