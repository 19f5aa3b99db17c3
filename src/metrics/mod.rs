//! Snapshots as metrics: one table of families, two text formats.
