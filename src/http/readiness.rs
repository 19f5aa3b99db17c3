//! Whether the program has come up.

use std::sync::{Arc, Weak};

/// Ready once every [`Latch`] is dropped; then it stays ready.
#[derive(Debug, Clone, Default)]
pub struct Readiness(Weak<()>);

/// Holds readiness back as long as it, or a clone of it, exists.
#[derive(Debug, Clone)]
pub struct Latch(#[allow(dead_code, reason = "it is held, not read")] Arc<()>);

impl Readiness {
    /// A readiness and what holds it back. [`Readiness::default`] is ready at once.
    pub fn new() -> (Latch, Readiness) {
        let held = Arc::new(());
        let readiness = Readiness(Arc::downgrade(&held));
        (Latch(held), readiness)
    }

    /// Whether every latch is gone.
    pub fn is_ready(&self) -> bool {
        self.0.strong_count() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_when_the_last_latch_is_dropped() {
        let (latch, readiness) = Readiness::new();
        let second = latch.clone();
        drop(latch);
        assert!(!readiness.is_ready());
        drop(second);
        assert!(readiness.is_ready() && Readiness::default().is_ready());
    }
}
