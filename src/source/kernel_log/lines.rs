//! Cuts a stream of bytes into lines, within a fixed room.

use std::io;

/// Longer lines than this are passed over. The longest record of the kernel is 8 KiB.
const ROOM: usize = 64 << 10;

/// The beginning of a stream that is not cut yet.
#[derive(Debug)]
pub(super) struct Lines {
    room: Box<[u8]>,
    filled: usize,
    /// The line at hand is longer than the room: its rest is passed over.
    skips: bool,
}

impl Lines {
    pub(super) fn new() -> Lines {
        Lines { room: vec![0; ROOM].into_boxed_slice(), filled: 0, skips: false }
    }

    /// Reads once by `read`, and hands over every whole line without its line feed. Gives the number of bytes read.
    pub(super) fn read(
        &mut self,
        read: impl FnOnce(&mut [u8]) -> io::Result<usize>,
        mut each: impl FnMut(&[u8]),
    ) -> io::Result<usize> {
        let count = read(&mut self.room[self.filled..])?;
        let fresh = self.filled;
        self.filled += count;
        let mut start = 0;
        // What was there before has no line feed.
        for at in memchr::memchr_iter(b'\n', &self.room[fresh..self.filled]) {
            let end = fresh + at;
            if !std::mem::take(&mut self.skips) {
                each(&self.room[start..end]);
            }
            start = end + 1;
        }
        self.room.copy_within(start..self.filled, 0);
        self.filled -= start;
        if self.filled == self.room.len() {
            self.filled = 0;
            self.skips = true;
        }
        Ok(count)
    }

    /// The stream has ended or begins anew: hands over a last line without line feed.
    pub(super) fn end(&mut self, each: impl FnOnce(&[u8])) {
        if self.filled > 0 && !self.skips {
            each(&self.room[..self.filled]);
        }
        self.filled = 0;
        self.skips = false;
    }

    /// How many bytes wait for the end of their line.
    pub(super) fn waiting(&self) -> usize {
        self.filled
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cut(pieces: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut lines = Lines::new();
        let mut cut = Vec::new();
        for piece in pieces {
            let mut rest = *piece;
            while !rest.is_empty() {
                lines.read(|room| io::Read::read(&mut rest, room), |line| cut.push(line.to_vec())).unwrap();
            }
        }
        lines.end(|line| cut.push(line.to_vec()));
        cut
    }

    #[test]
    fn a_line_that_is_too_long_costs_only_itself() {
        let long = vec![b'x'; 3 * ROOM];
        assert_eq!(cut(&[b"a\n", &long, b"y\nb\n"]), [b"a".to_vec(), b"b".to_vec()]);
        assert_eq!(cut(&[&long, b"\n", b"c"]), [b"c".to_vec()]);
        assert_eq!(cut(&[&long]), [[0_u8; 0]; 0]);
    }

    proptest! {
        #[test]
        fn lines_do_not_depend_on_how_they_arrive(pieces in prop::collection::vec("[a\n]{0,9}", 0..9)) {
            let whole = pieces.concat();
            let bytes: Vec<&[u8]> = pieces.iter().map(String::as_bytes).collect();
            let expected: Vec<Vec<u8>> = whole.lines().map(|line| line.as_bytes().to_vec()).collect();
            prop_assert_eq!(cut(&bytes), expected);
        }
    }
}
