//! When to ask a control daemon next, and how much.
//!
//! Each session makes control.log grow, and a daemon that hangs holds up every other caller: so sessions are
//! scarce, and scarcer the worse the daemon fares.

use std::time::Duration;

use tokio::time::Instant;

use super::answers::Depth;
use crate::event::Look;

/// Questions of the model that come within this time are answered by one session.
const SPACING: Duration = Duration::from_millis(200);
/// How many sessions may follow each other at that spacing, and how often one more is granted. A server that
/// dies and starts ten times a second must not make us write ten sessions a second.
const BURST: u32 = 20;
const GRANT_EVERY: Duration = Duration::from_secs(10);
/// Upper bound of the back-off from a daemon that does not answer.
const MAX_BACKOFF: Duration = Duration::from_secs(300);
/// The back-off from a daemon that refuses or answers what cannot be read.
const REFUSED_BACKOFF: Duration = Duration::from_secs(1);
const MAX_REFUSED_BACKOFF: Duration = Duration::from_secs(60);
/// What looking at clients without being asked may add to control.log, in bytes a day. Looking at the servers' state
/// every minute adds about 0.7 MB a day on top.
const REFRESH_BYTES_PER_DAY: u64 = 256 * 1024;
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// How a session failed, as far as the pace is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// The deadline passed.
    Unanswered,
    /// Anything else.
    Refused,
}

/// The pace of one daemon's sessions.
#[derive(Debug)]
pub struct Pace {
    interval: Duration,
    timeout: Duration,
    /// Look at clients every time: no log tells of them.
    is_always_full: bool,
    due: Instant,
    full_due: Instant,
    not_before: Instant,
    /// Every requested session is paid for with [`GRANT_EVERY`]; [`BURST`] of them are lent.
    paid_until: Instant,
    failures: u32,
}

impl Pace {
    /// A pace whose first session is due now.
    pub fn new(now: Instant, interval: Duration, timeout: Duration, is_always_full: bool) -> Pace {
        Pace {
            interval,
            timeout,
            is_always_full,
            due: now,
            full_due: now,
            not_before: now,
            paid_until: now,
            failures: 0,
        }
    }

    /// When the next session may begin: at once for a request, unless the back-off or the burst limit says later.
    pub fn next(&self, now: Instant, is_requested: bool) -> Instant {
        if is_requested { self.earliest_grant().max(now).max(self.not_before) } else { self.due }
    }

    fn earliest_grant(&self) -> Instant {
        self.paid_until.checked_sub(GRANT_EVERY * (BURST - 1)).unwrap_or(self.paid_until)
    }

    /// How much the session that begins now asks.
    pub fn depth(&self, now: Instant, is_requested: bool) -> Depth {
        if is_requested || self.is_always_full || self.full_due <= now { Depth::Full } else { Depth::State }
    }

    /// A session begins.
    pub fn begun(&mut self, now: Instant, is_requested: bool) {
        if is_requested {
            self.paid_until = self.paid_until.max(now) + GRANT_EVERY;
        }
    }

    /// A session was answered.
    pub fn answered(&mut self, now: Instant, depth: Depth, look: &Look) {
        self.failures = 0;
        self.due = now + self.interval;
        self.not_before = now + SPACING;
        if depth == Depth::Full {
            let nanos = DAY.as_nanos() * u128::from(log_bytes(look)) / u128::from(REFRESH_BYTES_PER_DAY);
            let refresh = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
            self.full_due = now + refresh.clamp(self.interval, DAY);
        }
    }

    /// A session failed. A request does not shorten the wait that follows.
    pub fn failed(&mut self, now: Instant, failure: Failure) {
        let doubled = |first: Duration, most: Duration, failures: u32| {
            first.saturating_mul(1 << failures.min(16)).min(most.max(first))
        };
        let wait = match failure {
            Failure::Unanswered => doubled(self.timeout * 2, MAX_BACKOFF, self.failures),
            Failure::Refused => {
                doubled(REFUSED_BACKOFF, MAX_REFUSED_BACKOFF.min(self.interval), self.failures)
            }
        };
        self.failures = self.failures.saturating_add(1);
        self.not_before = now + wait;
        self.due = now + wait;
    }

    /// The daemon is another one: what its predecessor did is forgotten.
    pub fn restart(&mut self, now: Instant) {
        self.failures = 0;
        self.due = now;
        self.full_due = now;
        self.not_before = now;
    }
}

/// About what a full session adds to control.log: 40 bytes of envelope a line, and the line.
fn log_bytes(look: &Look) -> u64 {
    const SESSION: u64 = 330;
    const SERVER: u64 = 400;
    const CLIENT: u64 = 45;
    const CONTEXT: u64 = 150;
    let servers = look.servers.iter().map(|server| {
        let clients = server.clients.as_ref().map_or(0, Vec::len) as u64;
        let contexts = server.contexts.as_ref().map_or(0, Vec::len) as u64;
        SERVER + clients * CLIENT + contexts * CONTEXT
    });
    SESSION + servers.sum::<u64>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::ServerLook;

    const INTERVAL: Duration = Duration::from_secs(60);
    const TIMEOUT: Duration = Duration::from_secs(2);

    fn pace() -> (Pace, Instant) {
        let now = Instant::now();
        (Pace::new(now, INTERVAL, TIMEOUT, false), now)
    }

    fn crowded(clients: u32) -> Look {
        let clients = Some((0..clients).collect());
        let server = ServerLook { pid: 1, status: None, clients, contexts: None };
        Look { servers: vec![server], ..Look::default() }
    }

    #[test]
    fn a_request_is_answered_at_once_and_then_at_most_every_200_ms() {
        let (mut pace, now) = pace();
        assert_eq!(pace.next(now, true), now);
        pace.begun(now, true);
        pace.answered(now, Depth::Full, &Look::default());
        assert_eq!(pace.next(now, true), now + SPACING);
        assert_eq!(pace.next(now, false), now + INTERVAL);
    }

    #[test]
    fn requests_without_end_are_held_to_one_a_grant() {
        let (mut pace, start) = pace();
        let mut now = start;
        let mut sessions = 0;
        while now < start + Duration::from_secs(600) {
            now = pace.next(now, true);
            pace.begun(now, true);
            pace.answered(now, Depth::Full, &Look::default());
            sessions += 1;
        }
        assert!((60..=60 + BURST + 2).contains(&sessions), "{sessions}");
    }

    #[test]
    fn silence_doubles_the_wait_and_a_request_does_not_shorten_it() {
        let (mut pace, mut now) = pace();
        let mut waits = Vec::new();
        for _ in 0..9 {
            pace.failed(now, Failure::Unanswered);
            let next = pace.next(now, true);
            waits.push(next.duration_since(now).as_secs());
            now = next;
        }
        assert_eq!(waits, [4, 8, 16, 32, 64, 128, 256, 300, 300]);
        pace.answered(now, Depth::State, &Look::default());
        pace.failed(now, Failure::Unanswered);
        assert_eq!(pace.next(now, true), now + Duration::from_secs(4));
    }

    #[test]
    fn a_new_daemon_is_asked_at_once() {
        let (mut pace, now) = pace();
        for _ in 0..9 {
            pace.failed(now, Failure::Unanswered);
        }
        pace.restart(now);
        assert_eq!(pace.next(now, false), now);
        assert_eq!(pace.depth(now, false), Depth::Full);
    }

    #[test]
    fn clients_are_refreshed_within_the_budget() {
        let (mut pace, start) = pace();
        let look = crowded(384);
        let mut written = 0;
        let mut now = start;
        while now < start + DAY {
            now = pace.next(now, false);
            let depth = pace.depth(now, false);
            if depth == Depth::Full {
                written += log_bytes(&look);
            }
            pace.begun(now, false);
            pace.answered(now, depth, &look);
        }
        assert!(written <= REFRESH_BYTES_PER_DAY + 2 * log_bytes(&look), "{written}");
        assert!(written > REFRESH_BYTES_PER_DAY / 2, "{written}");
    }

    #[test]
    fn without_a_log_every_session_looks_at_the_clients() {
        let now = Instant::now();
        let mut pace = Pace::new(now, INTERVAL, TIMEOUT, true);
        pace.answered(now, Depth::Full, &crowded(384));
        assert_eq!(pace.depth(now + INTERVAL, false), Depth::Full);
    }
}
