//! Asks through NVIDIA's own `nvidia-cuda-mps-control`, for daemons whose handshake is not the one we know.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::Command;

use super::answers::{AnswerError, Conversation, Depth, Question};
use crate::event::Look;

/// The program's name.
pub const PROGRAM: &str = "nvidia-cuda-mps-control";
/// What is read of its output: 16,384 lines of 64 bytes.
const MAX_OUTPUT: u64 = 1024 * 1024;
/// What is read of its complaints.
const MAX_COMPLAINT: u64 = 4 * 1024;

/// Why the program gave nothing.
#[derive(Debug, thiserror::Error)]
pub enum BinaryError {
    /// There is no program that could be trusted.
    #[error("no {PROGRAM} on PATH or beside the daemon that only root can change")]
    NotFound,
    /// It could not be run.
    #[error("cannot run {}: {source}", path.display())]
    Run {
        /// The program.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It ended with an error.
    #[error("{} failed: {complaint}", path.display())]
    Failed {
        /// The program.
        path: PathBuf,
        /// What it said.
        complaint: String,
    },
    /// It did not end in time and was killed.
    #[error("no answer from {} within {} s", path.display(), after.as_secs_f64())]
    Timeout {
        /// The program.
        path: PathBuf,
        /// The deadline.
        after: Duration,
    },
    /// An answer that cannot be understood.
    #[error(transparent)]
    Answer(#[from] AnswerError),
}

/// Finds the program: on `PATH`, else beside the daemon. We may be root and the daemon anybody's: a program
/// that somebody else could have changed is never run.
pub fn find(search: Option<&std::ffi::OsStr>, beside: Option<&Path>) -> Result<PathBuf, BinaryError> {
    let on_path: Vec<PathBuf> =
        search.map(|search| std::env::split_paths(search).collect()).unwrap_or_default();
    on_path
        .into_iter()
        .map(|directory| directory.join(PROGRAM))
        .chain(beside.map(Path::to_owned))
        .filter(|path| path.is_absolute())
        .filter_map(|path| path.canonicalize().ok())
        .find(|path| path.is_file() && is_trustworthy(path))
        .ok_or(BinaryError::NotFound)
}

/// Whether only root and we could have put this file there.
fn is_trustworthy(path: &Path) -> bool {
    let me = rustix::process::geteuid().as_raw();
    path.ancestors().all(|each| {
        std::fs::symlink_metadata(each).is_ok_and(|file| {
            let is_ours = file.uid() == 0 || file.uid() == me;
            let is_writable = file.mode() & 0o022 != 0;
            // In a sticky directory nobody can replace what is ours.
            let is_sticky = each != path && file.mode() & 0o1000 != 0;
            is_ours && (!is_writable || is_sticky)
        })
    })
}

/// Like [`super::wire::look`], in two sessions: the program prints its answers when its input ends.
pub async fn look(
    program: &Path,
    pipe: &Path,
    depth: Depth,
    deadline: Duration,
) -> Result<Look, BinaryError> {
    match tokio::time::timeout(deadline, sessions(program, pipe, depth)).await {
        Ok(result) => result,
        Err(_elapsed) => Err(BinaryError::Timeout { path: program.into(), after: deadline }),
    }
}

async fn sessions(program: &Path, pipe: &Path, depth: Depth) -> Result<Look, BinaryError> {
    let (mut conversation, opening) = Conversation::new(depth);
    let mut questions = opening;
    loop {
        let mut has_ended = false;
        for line in run(program, pipe, &questions).await?.split('\n') {
            has_ended |= conversation.line(line)?.contains(&Question::End);
        }
        if has_ended {
            break;
        }
        if !matches!(questions.first(), Some(Question::ServerList)) {
            return Err(AnswerError::Unanswered(conversation.awaited().to_string()).into());
        }
        // What the conversation would ask one after the other, asked at once.
        questions = conversation
            .servers()
            .flat_map(|pid| {
                let all = [
                    Question::ServerStatus(pid),
                    Question::ClientList(pid),
                    Question::EndOfClients(pid),
                    Question::Contexts(pid),
                ];
                all.into_iter().take(if depth == Depth::Full { all.len() } else { 1 })
            })
            .collect();
    }
    let mut look = conversation.finish()?;
    look.protocol = Some("binary".into());
    Ok(look)
}

async fn run(program: &Path, pipe: &Path, questions: &[Question]) -> Result<String, BinaryError> {
    let failed = |source| BinaryError::Run { path: program.into(), source };
    let mut child = Command::new(program)
        .env_clear()
        .env("CUDA_MPS_PIPE_DIRECTORY", pipe)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(failed)?;
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let lines: Vec<String> = questions.iter().map(ToString::to_string).collect();
    let text = lines.join("\n") + "\n";
    let ask = async {
        if let Some(mut stdin) = stdin {
            // It may have ended already; its status tells.
            let _broken_pipe = stdin.write_all(text.as_bytes()).await;
        }
    };
    let mut output = Vec::new();
    let hear = async {
        match stdout {
            Some(stdout) => stdout.take(MAX_OUTPUT).read_to_end(&mut output).await,
            None => Ok(0),
        }
    };
    let mut complaint = Vec::new();
    let complain = async {
        match stderr {
            Some(stderr) => stderr.take(MAX_COMPLAINT).read_to_end(&mut complaint).await,
            None => Ok(0),
        }
    };
    let ((), heard, complained) = tokio::join!(ask, hear, complain);
    heard.and(complained).map_err(failed)?;
    let status = child.wait().await.map_err(failed)?;
    if !status.success() {
        let complaint = String::from_utf8_lossy(&complaint);
        let complaint = match complaint.trim() {
            "" => status.to_string(),
            words => words.to_owned(),
        };
        return Err(BinaryError::Failed { path: program.into(), complaint });
    }
    Ok(String::from_utf8_lossy(&output).into_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A program in place of NVIDIA's.
    fn program(directory: &Path, script: &str) -> PathBuf {
        let path = directory.join(PROGRAM);
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    const ANSWERS: &str = r#"while read -r line; do case $line in
get_server_list) echo 77;;
get_default*) echo 100.0;;
"get_server_status 77") echo FAULT;;
"get_client_list 77") echo 100;;
"ps -p 77") echo "PID ID SERVER DEVICE NAMESPACE COMMAND"; echo "100 1 77 GPU-aa-bb-cc 7 app";;
esac; done"#;

    #[tokio::test]
    async fn the_program_answers_in_two_sessions() {
        let directory = tempfile::tempdir().unwrap();
        let program = program(directory.path(), ANSWERS);
        let look =
            super::look(&program, directory.path(), Depth::Full, Duration::from_secs(20)).await.unwrap();
        assert_eq!(look.protocol.as_deref(), Some("binary"));
        assert_eq!(look.servers[0].clients.as_deref(), Some([100].as_slice()));
        assert_eq!(look.servers[0].contexts.as_ref().unwrap().len(), 1);
        let look =
            super::look(&program, directory.path(), Depth::State, Duration::from_secs(20)).await.unwrap();
        assert_eq!(look.servers[0].clients, None);
    }

    #[tokio::test]
    async fn a_program_that_hangs_is_killed() {
        let directory = tempfile::tempdir().unwrap();
        let program = program(directory.path(), "echo $$ >pid; exec sleep 1000");
        let script = std::fs::read_to_string(&program).unwrap();
        let pid_file = directory.path().join("pid");
        std::fs::write(&program, script.replace(">pid", &format!(">{}", pid_file.display()))).unwrap();
        let error = super::look(&program, directory.path(), Depth::State, Duration::from_millis(500)).await;
        assert!(matches!(error, Err(BinaryError::Timeout { .. })));
        let pid: u32 = std::fs::read_to_string(pid_file).unwrap().trim().parse().unwrap();
        for _ in 0..100 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            if stat.is_empty() || stat.contains(") Z ") {
                return;
            }
        }
        panic!("{pid} still runs");
    }

    #[tokio::test]
    async fn its_complaint_is_passed_on() {
        let directory = tempfile::tempdir().unwrap();
        let program = program(directory.path(), "echo Cannot find MPS control daemon process >&2; exit 1");
        let error =
            super::look(&program, directory.path(), Depth::State, Duration::from_secs(20)).await.unwrap_err();
        assert!(error.to_string().ends_with("Cannot find MPS control daemon process"), "{error}");
    }

    #[test]
    fn a_program_that_others_can_change_is_never_run() {
        let directory = tempfile::tempdir().unwrap();
        let program = program(directory.path(), "exit 0");
        assert_eq!(find(Some(directory.path().as_os_str()), None).unwrap(), program.canonicalize().unwrap());
        assert_eq!(find(None, Some(&program)).unwrap(), program.canonicalize().unwrap());
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(find(None, Some(&program)), Err(BinaryError::NotFound)));
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(matches!(find(None, Some(&program)), Err(BinaryError::NotFound)));
    }
}
