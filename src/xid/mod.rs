//! The Xid catalogue, and what each code means for MPS clients.
