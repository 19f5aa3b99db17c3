//! Which NVML call each thread is in, and since when: a call may hang for ever, in the driver, where nothing can end it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;

/// The call that one thread is in.
#[derive(Debug, Default)]
pub struct CallSlot(Mutex<Option<Running>>);

/// A call that has not returned.
#[derive(Debug, Clone, Copy)]
struct Running {
    call: &'static str,
    since: Instant,
    /// How long the call may take by its own arguments.
    patience: Duration,
}

impl CallSlot {
    /// Runs an NVML call of this name.
    pub fn during<T>(&self, call: &'static str, then: impl FnOnce() -> T) -> T {
        self.waiting(call, Duration::ZERO, then)
    }

    /// Runs an NVML call that is meant to wait for as long as `patience`.
    pub fn waiting<T>(&self, call: &'static str, patience: Duration, then: impl FnOnce() -> T) -> T {
        self.set(Some(Running { call, since: Instant::now(), patience }));
        let _clear = Clear(self);
        then()
    }

    /// The call that has run for longer than it may, in the words of `mps_source_up`'s reason.
    pub fn stuck(&self, after: Duration, now: Timestamp) -> Option<Arc<str>> {
        let running = (*self.0.lock().unwrap_or_else(PoisonError::into_inner))?;
        let elapsed = running.since.elapsed();
        if elapsed < after + running.patience {
            return None;
        }
        let since = now.checked_sub(elapsed).unwrap_or(now);
        let since = since.strftime("%Y-%m-%dT%H:%M:%SZ");
        Some(format!("stuck in {} since {since}", running.call).into())
    }

    /// Whether a call is running.
    pub fn is_busy(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn set(&self, running: Option<Running>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = running;
    }
}

/// Clears the slot also when the call panics.
struct Clear<'s>(&'s CallSlot);

impl Drop for Clear<'_> {
    fn drop(&mut self) {
        self.0.set(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_stuck_only_after_its_time() {
        let slot = CallSlot::default();
        let now = Timestamp::now();
        assert_eq!(slot.stuck(Duration::ZERO, now), None);
        slot.during("nvmlDeviceGetName", || {
            assert_eq!(slot.stuck(Duration::from_secs(60), now), None);
            let reason = slot.stuck(Duration::ZERO, now).unwrap();
            assert!(reason.starts_with("stuck in nvmlDeviceGetName since 2"), "{reason}");
        });
        assert_eq!(slot.stuck(Duration::ZERO, now), None);
        slot.waiting("nvmlEventSetWait_v2", Duration::from_secs(60), || {
            assert_eq!(slot.stuck(Duration::ZERO, now), None, "it is meant to wait");
        });
    }
}
