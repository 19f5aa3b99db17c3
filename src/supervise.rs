//! Long tasks: each has a name, is started again when it ends unexpectedly, and such restarts are counted.

use std::future::Future;
use std::time::Duration;

use tokio::task::JoinSet;

use crate::source::Shutdown;
use crate::telemetry::Telemetry;

/// The pause before a task that ended unexpectedly is started again.
const PAUSE: Duration = Duration::from_secs(1);
/// The longest pause, for a task that keeps ending.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Runs what `task` makes until it returns by itself or the program stops; a panic starts it again.
pub async fn supervised<F>(
    name: &'static str,
    task: impl Fn(Shutdown) -> F,
    mut shutdown: Shutdown,
    telemetry: Telemetry,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let mut pause = PAUSE;
    loop {
        // A set of one: dropping it ends the task too.
        let mut running = JoinSet::new();
        running.spawn(task(shutdown.clone()));
        match running.join_next().await {
            Some(Err(error)) if error.is_panic() => {
                tracing::error!(task = name, %error, "A task ended unexpectedly and is started again.");
                telemetry.task_restart(name);
            }
            _ => return,
        }
        tokio::select! {
            () = shutdown.wait() => return,
            () = tokio::time::sleep(pause) => pause = (pause * 2).min(LONGEST_PAUSE),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_task_that_panics_is_started_again_and_one_that_returns_is_not() {
        let (_switch, shutdown) = Shutdown::new();
        let runs = Arc::new(AtomicU32::new(0));
        let counted = runs.clone();
        let task = move |_| {
            let run = counted.fetch_add(1, Ordering::Relaxed);
            async move { assert!(run >= 2, "the first two runs fail") }
        };
        supervised("test", task, shutdown, Telemetry::new()).await;
        assert_eq!(runs.load(Ordering::Relaxed), 3);
    }
}
