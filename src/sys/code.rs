//! The program's own code in memory.

use std::os::unix::fs::MetadataExt as _;

use rustix::mm::{Advice, madvise};

/// Lets go of the code that is mapped but not needed now, most of which only the start needed: it counts as resident
/// memory. What is run again is mapped again from the page cache. Gives the bytes of code that were looked at; 0 where
/// `/proc` does not tell.
pub fn release_code() -> usize {
    let (Ok(maps), Ok(program)) =
        (std::fs::read_to_string("/proc/self/maps"), std::fs::metadata("/proc/self/exe"))
    else {
        return 0;
    };
    let mut released = 0;
    for (start, end) in maps.lines().filter_map(|line| code(line, program.ino())) {
        // SAFETY: the range is executable and not writable, and maps the program's file: dropping its pages changes
        // nothing, the kernel reads the same bytes again when they are run.
        let result = unsafe { madvise(start as *mut _, end - start, Advice::LinuxDontNeed) };
        if result.is_ok() {
            released += end - start;
        }
    }
    released
}

/// The range of a line of `/proc/self/maps` that is code of the file with this inode.
fn code(line: &str, inode: u64) -> Option<(usize, usize)> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let is_code = fields.next()? == "r-xp";
    let is_program = fields.nth(2)?.parse() == Ok(inode);
    let range = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
    (is_code && is_program).then_some(range)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_runs_on_without_the_pages_of_its_code() {
        assert!(release_code() > 100_000);
        assert!(release_code() > 100_000, "it may be done at any time");
    }

    #[test]
    fn only_code_of_the_program_is_meant() {
        let line = "55d0a1000000-55d0a1700000 r-xp 00200000 fe:01 1234  /usr/bin/mps-exporter";
        assert_eq!(code(line, 1234), Some((0x55d0_a100_0000, 0x55d0_a170_0000)));
        assert_eq!(code(line, 1235), None, "another file");
        assert_eq!(code(&line.replace("r-xp", "rw-p"), 1234), None, "data that was written to would be lost");
        assert_eq!(code(&line.replace("r-xp", "rwxp"), 1234), None);
        assert_eq!(code("55d0a1000000-55d0a1700000", 1234), None);
    }
}
