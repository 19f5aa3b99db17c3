//! The few system calls that no safe wrapper covers.
