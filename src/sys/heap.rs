//! The allocator's memory.

/// Has all threads share one heap. glibc gives each thread that allocates one of its own, and what one has freed another
/// cannot use; our threads allocate too rarely to be in each other's way.
///
/// To be called first thing in `main`: heaps that are there stay.
pub fn share() {
    #[cfg(target_env = "gnu")]
    // SAFETY: no pointer is passed, and no other thread allocates yet.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}
