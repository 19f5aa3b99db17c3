//! What is exposed: the table of families, the collector over a snapshot, both text formats.

pub mod collect;
pub mod exposition;
pub mod families;
pub mod labels;
pub mod negotiate;
pub mod openmetrics;
pub mod process;
pub mod series;
