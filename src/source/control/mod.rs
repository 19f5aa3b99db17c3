//! The control daemon: its socket, its lock and where it is.
