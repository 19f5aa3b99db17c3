//! Answers that hold for a while, at most so many of them.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::time::{Duration, Instant};

/// A map whose entries expire, bounded by dropping the oldest.
#[derive(Debug)]
pub struct Cache<K, V> {
    entries: HashMap<K, Entry<V>>,
    /// Insertion order; an entry that was replaced since is found by its number not fitting.
    order: VecDeque<(u64, K)>,
    limit: usize,
    inserted: u64,
}

#[derive(Debug)]
struct Entry<V> {
    value: V,
    expires: Instant,
    number: u64,
}

impl<K: Hash + Eq + Clone, V> Cache<K, V> {
    /// An empty one of at most `limit` entries.
    pub fn new(limit: usize) -> Cache<K, V> {
        Cache { entries: HashMap::new(), order: VecDeque::new(), limit: limit.max(1), inserted: 0 }
    }

    /// The value, unless it is older than it was meant to get.
    pub fn get(&self, key: &K, now: Instant) -> Option<&V> {
        self.entries.get(key).filter(|entry| now < entry.expires).map(|entry| &entry.value)
    }

    /// Keeps a value for this long. `true`: another one had to go before its time.
    pub fn put(&mut self, key: K, value: V, now: Instant, keep: Duration) -> bool {
        self.inserted += 1;
        let number = self.inserted;
        self.order.push_back((number, key.clone()));
        self.entries.insert(key, Entry { value, expires: now + keep, number });
        let mut has_dropped = false;
        while self.entries.len() > self.limit || self.order.len() > self.limit * 2 {
            let Some((number, key)) = self.order.pop_front() else { break };
            let Some(entry) = self.entries.get(&key).filter(|entry| entry.number == number) else { continue };
            has_dropped |= now < entry.expires;
            self.entries.remove(&key);
        }
        has_dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_expire_and_the_oldest_makes_room() {
        let start = Instant::now();
        let keep = Duration::from_secs(10);
        let mut cache = Cache::new(2);
        assert!(!cache.put("a", 1, start, keep));
        assert_eq!(cache.get(&"a", start + Duration::from_secs(9)), Some(&1));
        assert_eq!(cache.get(&"a", start + keep), None);
        cache.put("b", 2, start, keep);
        assert!(cache.put("c", 3, start, keep), "a living entry was dropped without saying so");
        assert_eq!((cache.get(&"a", start), cache.get(&"c", start)), (None, Some(&3)));
        assert!(!cache.put("d", 4, start + keep, keep), "an expired entry is no loss");
    }

    #[test]
    fn replacing_one_entry_for_ever_stays_bounded() {
        let start = Instant::now();
        let mut cache = Cache::new(3);
        cache.put(0, 0, start, Duration::from_secs(1));
        for round in 0..1000 {
            cache.put(1, round, start, Duration::from_secs(1));
        }
        assert!(cache.order.len() <= 6);
        assert_eq!(cache.get(&1, start), Some(&999));
    }
}
