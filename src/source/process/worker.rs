//! A thread for questions that may never be answered.
//!
//! Reading another process's environment, or a file system that a network serves, can block for as long as the kernel
//! likes. Such questions are asked one at a time on a thread of their own, and never again while one hangs. A thread that
//! hangs can be given up for a new one, up to a limit.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

/// Threads that were given up and still hang; with so many no new one is made.
const MAX_ABANDONED: usize = 4;

/// Makes what a thread does with each question.
type Make<Q, A> = Box<dyn Fn() -> Box<dyn FnMut(Q) -> A + Send> + Send>;

/// A thread that answers one question at a time.
pub struct Worker<Q, A> {
    name: &'static str,
    make: Make<Q, A>,
    questions: std::sync::mpsc::Sender<Q>,
    answers: mpsc::UnboundedReceiver<A>,
    asked_at: Option<Instant>,
    /// Held by every thread for as long as it runs.
    running: Arc<()>,
}

impl<Q: Send + 'static, A: Send + 'static> Worker<Q, A> {
    /// Starts the thread. `make` is called again for each thread that takes its place.
    pub fn new(
        name: &'static str,
        make: impl Fn() -> Box<dyn FnMut(Q) -> A + Send> + Send + 'static,
    ) -> Self {
        let running = Arc::new(());
        let (questions, answers) = start(name, make(), &running);
        Worker { name, make: Box::new(make), questions, answers, asked_at: None, running }
    }

    /// Whether a question may be asked.
    pub fn is_idle(&self) -> bool {
        self.asked_at.is_none()
    }

    /// Asks, when idle; otherwise the question comes back.
    pub fn ask(&mut self, question: Q, now: Instant) -> Result<(), Q> {
        if !self.is_idle() {
            return Err(question);
        }
        if let Err(refused) = self.questions.send(question) {
            // The thread could not be started.
            self.start_anew();
            return Err(refused.0);
        }
        self.asked_at = Some(now);
        Ok(())
    }

    /// For how long the present question has been waiting for its answer.
    pub fn busy_for(&self, now: Instant) -> Option<Duration> {
        self.asked_at.map(|asked_at| now.saturating_duration_since(asked_at))
    }

    /// The answer, as soon as it is there; never ready while idle. `None`: the thread panicked over the question, and a
    /// new one has taken its place. Nothing is lost when the future is dropped before it is ready.
    pub async fn answer(&mut self) -> Option<A> {
        if self.is_idle() {
            return std::future::pending().await;
        }
        let answer = self.answers.recv().await;
        self.asked_at = None;
        if answer.is_none() {
            self.start_anew();
        }
        answer
    }

    /// Gives the hanging thread up for a new one. `false`: too many hang already, and this one goes on being waited for.
    pub fn give_up(&mut self) -> bool {
        // One is ours, one the present thread's.
        if Arc::strong_count(&self.running) > MAX_ABANDONED + 1 {
            return false;
        }
        self.start_anew();
        true
    }

    fn start_anew(&mut self) {
        (self.questions, self.answers) = start(self.name, (self.make)(), &self.running);
        self.asked_at = None;
    }
}

impl<Q, A> std::fmt::Debug for Worker<Q, A> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker")
            .field("name", &self.name)
            .field("asked_at", &self.asked_at)
            .finish_non_exhaustive()
    }
}

/// The queues hold one question or answer at most, because one is asked at a time.
fn start<Q: Send + 'static, A: Send + 'static>(
    name: &'static str,
    mut answer: Box<dyn FnMut(Q) -> A + Send>,
    running: &Arc<()>,
) -> (std::sync::mpsc::Sender<Q>, mpsc::UnboundedReceiver<A>) {
    let (questions, queue) = std::sync::mpsc::channel::<Q>();
    let (answers, receiver) = mpsc::unbounded_channel();
    let running = running.clone();
    let thread = std::thread::Builder::new().name(name.into()).stack_size(256 * 1024);
    let started = thread.spawn(move || {
        while let Ok(question) = queue.recv() {
            if answers.send(answer(question)).is_err() {
                break;
            }
        }
        drop(running);
    });
    if let Err(error) = started {
        tracing::warn!(%error, thread = name, "A thread could not be started.");
    }
    (questions, receiver)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(5);

    fn doubling() -> Worker<u32, u32> {
        Worker::new("test", || {
            Box::new(|question| {
                if question == 0 {
                    std::thread::sleep(Duration::from_secs(3600));
                }
                assert!(question != 13, "thirteen");
                question * 2
            })
        })
    }

    #[tokio::test]
    async fn one_question_at_a_time_is_answered() {
        let mut worker = doubling();
        let now = Instant::now();
        assert_eq!(worker.ask(4, now), Ok(()));
        assert_eq!(worker.ask(5, now), Err(5));
        assert_eq!(tokio::time::timeout(PATIENCE, worker.answer()).await.unwrap(), Some(8));
        assert!(worker.is_idle());
    }

    #[tokio::test]
    async fn a_hanging_thread_is_given_up_so_many_times() {
        let mut worker = doubling();
        let now = Instant::now();
        for _ in 0..MAX_ABANDONED {
            worker.ask(0, now).unwrap();
            assert_eq!(worker.busy_for(now + PATIENCE), Some(PATIENCE));
            assert!(worker.give_up());
            worker.ask(1, now).unwrap();
            assert_eq!(tokio::time::timeout(PATIENCE, worker.answer()).await.unwrap(), Some(2));
        }
        worker.ask(0, now).unwrap();
        assert!(!worker.give_up(), "hanging threads pile up");
        assert!(!worker.is_idle());
    }

    #[tokio::test]
    async fn a_panic_costs_one_answer() {
        let mut worker = doubling();
        worker.ask(13, Instant::now()).unwrap();
        assert_eq!(tokio::time::timeout(PATIENCE, worker.answer()).await.unwrap(), None);
        worker.ask(7, Instant::now()).unwrap();
        assert_eq!(tokio::time::timeout(PATIENCE, worker.answer()).await.unwrap(), Some(14));
    }
}
