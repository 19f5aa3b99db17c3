//! What is exposed: the table of families, the collector over a snapshot, both text formats.

pub mod families;
