//! Basic authentication against bcrypt hashes.

use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Mutex, PoisonError};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use hyper::header::HeaderValue;
use tokio::sync::Semaphore;

/// bcrypt hashes by user name; empty: no authentication.
pub(super) type Users = BTreeMap<String, String>;

/// bcrypt takes a core for 80 ms at cost 10: so many at a time.
const PARALLEL: usize = 1;
/// Verdicts that are remembered. A scraper asks with the same credentials every time.
const REMEMBERED: usize = 100;
/// bcrypt looks at no more of a password.
const MAX_PASSWORD_BYTES: usize = 72;

/// Checks credentials and remembers the verdicts.
pub(super) struct Authenticator {
    permits: Semaphore,
    verdicts: Mutex<VecDeque<(Key, bool)>>,
    hashers: [RandomState; 2],
}

/// Two keyed hashes of user, hash and password: the password itself is not kept.
type Key = [u64; 2];

impl Default for Authenticator {
    fn default() -> Authenticator {
        Authenticator {
            permits: Semaphore::new(PARALLEL),
            verdicts: Mutex::default(),
            hashers: [RandomState::new(), RandomState::new()],
        }
    }
}

impl Authenticator {
    /// Whether these credentials may see anything.
    pub(super) async fn admits(&self, users: &Users, header: Option<&HeaderValue>) -> bool {
        if users.is_empty() {
            return true;
        }
        let Some((user, password)) = header.and_then(credentials) else {
            return false;
        };
        let known = users.get(&user);
        // An unknown user costs the same time as a wrong password, so that names cannot be guessed by the clock.
        let hash = known.cloned().unwrap_or_else(|| stand_in(users));
        let key = self.hashers.each_ref().map(|hasher| hasher.hash_one((&user, &hash, &password)));
        if let Some(verdict) = self.remembered(key) {
            return verdict;
        }
        let Ok(_permit) = self.permits.acquire().await else {
            return false;
        };
        // Whoever waited here with the same credentials finds the verdict now.
        if let Some(verdict) = self.remembered(key) {
            return verdict;
        }
        let checked =
            tokio::task::spawn_blocking(move || bcrypt::verify(password, &hash).unwrap_or(false)).await;
        let verdict = checked.unwrap_or(false) && known.is_some();
        let mut verdicts = self.lock();
        if verdicts.len() == REMEMBERED {
            // A refused guess goes before the verdict on a scraper that is let in.
            let oldest = verdicts.iter().position(|(_, verdict)| !verdict).unwrap_or(0);
            verdicts.remove(oldest);
        }
        verdicts.push_back((key, verdict));
        verdict
    }

    fn remembered(&self, key: Key) -> Option<bool> {
        self.lock().iter().find(|(known, _)| *known == key).map(|(_, verdict)| *verdict)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<(Key, bool)>> {
        self.verdicts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A hash that no known password has, as costly as the users' own.
fn stand_in(users: &Users) -> String {
    let cost = users.values().filter_map(|hash| hash.get(4..6)).max().unwrap_or("10");
    format!("$2b${cost}$abcdefghijklmnopqrstuu5s2v8.iXieOjg/.AySBTTZIIVFJeBui")
}

/// User and password of an `Authorization: Basic` header.
fn credentials(header: &HeaderValue) -> Option<(String, String)> {
    let (scheme, token) = header.to_str().ok()?.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let plain = String::from_utf8(BASE64_STANDARD.decode(token.trim()).ok()?).ok()?;
    let (user, password) = plain.split_once(':')?;
    (password.len() <= MAX_PASSWORD_BYTES).then(|| (user.to_owned(), password.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(user: &str, password: &str) -> HeaderValue {
        let token = BASE64_STANDARD.encode(format!("{user}:{password}"));
        HeaderValue::from_str(&format!("Basic {token}")).unwrap()
    }

    fn users() -> Users {
        // Cost 4 keeps the test quick.
        Users::from([("prometheus".into(), bcrypt::hash("secret:word", 4).unwrap())])
    }

    #[tokio::test]
    async fn only_the_right_password_of_a_known_user_is_let_in() {
        let authenticator = Authenticator::default();
        let users = users();
        let admits = |header: HeaderValue| {
            let (authenticator, users) = (&authenticator, &users);
            async move { authenticator.admits(users, Some(&header)).await }
        };
        for _ in 0..2 {
            assert!(admits(header("prometheus", "secret:word")).await);
            assert!(!admits(header("prometheus", "secret")).await);
            assert!(!admits(header("prometheus", &"x".repeat(73))).await);
            assert!(!admits(header("root", "secret:word")).await);
            assert!(!admits(HeaderValue::from_static("Basic")).await);
            assert!(!admits(HeaderValue::from_static("Basic ????")).await);
            assert!(!admits(HeaderValue::from_static("Bearer abc")).await);
            assert!(!authenticator.admits(&users, None).await);
        }
        assert!(authenticator.admits(&Users::new(), None).await);
    }

    #[tokio::test]
    async fn a_changed_hash_is_not_answered_from_memory() {
        let authenticator = Authenticator::default();
        let credentials = header("prometheus", "secret:word");
        assert!(authenticator.admits(&users(), Some(&credentials)).await);
        let changed = Users::from([("prometheus".into(), bcrypt::hash("other", 4).unwrap())]);
        assert!(!authenticator.admits(&changed, Some(&credentials)).await);
    }

    #[tokio::test]
    async fn many_guesses_do_not_push_out_who_is_let_in() {
        let authenticator = Authenticator::default();
        let users = users();
        let scraper = header("prometheus", "secret:word");
        assert!(authenticator.admits(&users, Some(&scraper)).await);
        for guess in 0..REMEMBERED + 10 {
            assert!(!authenticator.admits(&users, Some(&header("prometheus", &guess.to_string()))).await);
        }
        let verdicts = authenticator.lock();
        assert_eq!(verdicts.len(), REMEMBERED);
        assert!(verdicts.iter().any(|(_, verdict)| *verdict));
    }

    #[test]
    fn the_stand_in_is_a_real_hash_of_the_same_cost() {
        let hash = stand_in(&users());
        assert!(hash.starts_with("$2b$04$"));
        assert_eq!(bcrypt::verify("anything", &hash).ok(), Some(false));
    }
}
