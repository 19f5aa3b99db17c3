//! NVML's process lists as bytes: three layouts under one name, told apart by what the library wrote.
//!
//! `…RunningProcesses_v3` has entries of 24 bytes, except in drivers 535.43 to 535.86, where the same symbol writes 32.
//! Nothing in the answer says which. So the buffer is filled with a pattern first, and the length of what was
//! overwritten gives the size of an entry.

/// A word that no entry ends in: its last fields are instance ids, small or all ones, or a size in bytes.
const UNTOUCHED: u64 = 0xa5a5_a5a5_a5a5_a5a5;
/// Words that an entry can take at most.
const MAX_ENTRY_WORDS: usize = 4;
/// Linux gives no higher pid (`PID_MAX_LIMIT`).
const MAX_PID: u32 = 1 << 22;
/// GPU and compute instance ids are far below this.
const MAX_INSTANCE: u32 = 256;
/// NVML's "none" for instance ids.
pub const NO_INSTANCE: u32 = u32::MAX;
/// Entries that a list may have: a bound for our memory, beyond any real GPU.
const MAX_ENTRIES: usize = 1 << 16;

/// An entry of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Process id.
    pub pid: u32,
    /// Bytes of device memory; `None`: not available.
    pub memory_bytes: Option<u64>,
    /// GPU instance, with MIG.
    pub gpu_instance: Option<u32>,
    /// Compute instance, with MIG.
    pub compute_instance: Option<u32>,
}

/// A list's generation: the suffix of its function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Generation {
    /// `_v3`.
    V3,
    /// `_v2`.
    V2,
    /// No suffix.
    V1,
}

impl Generation {
    /// Newest first.
    pub const ALL: [Generation; 3] = [Generation::V3, Generation::V2, Generation::V1];

    /// Words per entry, as documented.
    fn words(self, is_early_535: bool) -> usize {
        match self {
            Generation::V3 if is_early_535 => 4,
            Generation::V3 | Generation::V2 => 3,
            Generation::V1 => 2,
        }
    }
}

/// The buffer that lists are read into; reused from call to call.
#[derive(Debug, Default)]
pub struct Buffer {
    words: Vec<u64>,
    entries: Vec<Entry>,
}

impl Buffer {
    /// Makes the buffer ready for a call: untouched, and with room for more than `wanted` entries of any layout.
    ///
    /// Gives the room in entries; `None` when so many entries cannot be true.
    pub fn prepare(&mut self, wanted: usize) -> Option<u32> {
        if wanted > MAX_ENTRIES {
            return None;
        }
        // A list may grow between the question for its size and the answer.
        let room = (self.words.len() / MAX_ENTRY_WORDS).max(if wanted == 0 { 64 } else { 2 * wanted + 16 });
        self.words.clear();
        self.words.resize(room * MAX_ENTRY_WORDS, UNTOUCHED);
        u32::try_from(room).ok()
    }

    /// What [`Buffer::read`] read.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Where the library writes to.
    pub fn words_mut(&mut self) -> &mut [u64] {
        &mut self.words
    }

    /// Reads `count` entries that a function of this generation wrote; `None` when they make no sense in any layout.
    pub fn read(&mut self, count: u32, generation: Generation, is_early_535: bool) -> Option<&[Entry]> {
        let count = count as usize;
        self.entries.clear();
        if count == 0 {
            return Some(&self.entries);
        }
        let written = self.words.iter().rposition(|word| *word != UNTOUCHED).map_or(0, |last| last + 1);
        if count * MAX_ENTRY_WORDS > self.words.len() || written < count * 2 {
            return None;
        }
        let measured = written.div_ceil(count);
        let documented = generation.words(is_early_535);
        let stride = if (2..=MAX_ENTRY_WORDS).contains(&measured) { measured } else { documented };
        for words in self.words.chunks_exact(stride).take(count) {
            self.entries.push(entry(words)?);
        }
        Some(&self.entries)
    }
}

/// An entry of two words or more, unless it cannot be one.
fn entry(words: &[u64]) -> Option<Entry> {
    let (pid, _padding) = halves(words[0]);
    let (gpu_instance, compute_instance) =
        words.get(2).map_or((NO_INSTANCE, NO_INSTANCE), |word| halves(*word));
    let is_instance = |id: u32| id == NO_INSTANCE || id < MAX_INSTANCE;
    if pid == 0 || pid > MAX_PID || !is_instance(gpu_instance) || !is_instance(compute_instance) {
        return None;
    }
    let some = |id: u32| (id != NO_INSTANCE).then_some(id);
    Some(Entry {
        pid,
        memory_bytes: (words[1] != u64::MAX).then_some(words[1]),
        gpu_instance: some(gpu_instance),
        compute_instance: some(compute_instance),
    })
}

/// The two 32-bit fields that a word holds, in memory order.
fn halves(word: u64) -> (u32, u32) {
    let bytes = word.to_ne_bytes();
    let half =
        |from: usize| u32::from_ne_bytes([bytes[from], bytes[from + 1], bytes[from + 2], bytes[from + 3]]);
    (half(0), half(4))
}

#[cfg(test)]
mod tests;
