use proptest::prelude::*;

use super::*;

/// What a library with entries of `stride` words writes.
fn write(buffer: &mut Buffer, entries: &[Entry], stride: usize) {
    for (words, entry) in buffer.words_mut().chunks_exact_mut(stride).zip(entries) {
        let mut first = words[0].to_ne_bytes();
        first[..4].copy_from_slice(&entry.pid.to_ne_bytes());
        words[0] = u64::from_ne_bytes(first);
        words[1] = entry.memory_bytes.unwrap_or(u64::MAX);
        if stride > 2 {
            let mut ids = [0; 8];
            ids[..4].copy_from_slice(&entry.gpu_instance.unwrap_or(NO_INSTANCE).to_ne_bytes());
            ids[4..].copy_from_slice(&entry.compute_instance.unwrap_or(NO_INSTANCE).to_ne_bytes());
            words[2] = u64::from_ne_bytes(ids);
        }
        if stride > 3 {
            words[3] = 0;
        }
    }
}

fn entries() -> impl Strategy<Value = Vec<Entry>> {
    let id = || prop_oneof![Just(None), (0u32..16).prop_map(Some)];
    let memory = prop_oneof![Just(None), (0u64..1 << 40).prop_map(Some)];
    let entry =
        (1..=MAX_PID, memory, id(), id()).prop_map(|(pid, memory_bytes, gpu_instance, compute_instance)| {
            Entry { pid, memory_bytes, gpu_instance, compute_instance }
        });
    proptest::collection::vec(entry, 0..60)
}

proptest! {
    #[test]
    fn every_layout_is_read_whatever_the_symbol_promises(
        entries in entries(),
        stride in 2usize..=4,
        is_early_535: bool,
    ) {
        let mut buffer = Buffer::default();
        buffer.prepare(entries.len()).unwrap();
        write(&mut buffer, &entries, stride);
        let mut expected = entries.clone();
        if stride == 2 {
            for entry in &mut expected {
                (entry.gpu_instance, entry.compute_instance) = (None, None);
            }
        }
        let count = u32::try_from(entries.len()).unwrap();
        for generation in Generation::ALL {
            prop_assert_eq!(buffer.read(count, generation, is_early_535).unwrap(), &expected[..]);
        }
    }

    #[test]
    fn garbage_never_panics(words in proptest::collection::vec(any::<u64>(), 0..400), count: u32) {
        let mut buffer = Buffer::default();
        buffer.prepare(words.len()).unwrap();
        for (place, word) in buffer.words_mut().iter_mut().zip(words) {
            *place = word;
        }
        for generation in Generation::ALL {
            let _ = buffer.read(count % 500, generation, false);
        }
    }
}

#[test]
fn a_count_without_entries_is_not_believed() {
    let mut buffer = Buffer::default();
    buffer.prepare(4).unwrap();
    assert_eq!(buffer.read(3, Generation::V3, false), None);
    assert_eq!(buffer.read(1_000_000, Generation::V3, false), None);
    assert_eq!(buffer.read(0, Generation::V3, false), Some(&[][..]));
}

#[test]
fn a_library_that_touches_the_whole_buffer_is_read_as_documented() {
    let mut buffer = Buffer::default();
    buffer.prepare(1).unwrap();
    buffer.words_mut().fill(0);
    let entry = Entry { pid: 7, memory_bytes: Some(1), gpu_instance: None, compute_instance: None };
    write(&mut buffer, &[entry, Entry { pid: 8, ..entry }], 3);
    let pids: Vec<u32> =
        buffer.read(2, Generation::V3, false).unwrap().iter().map(|entry| entry.pid).collect();
    assert_eq!(pids, [7, 8]);
}

#[test]
fn memory_stays_bounded() {
    let mut buffer = Buffer::default();
    assert_eq!(buffer.prepare(usize::MAX), None);
    assert!(buffer.prepare(MAX_ENTRIES).is_some());
}
