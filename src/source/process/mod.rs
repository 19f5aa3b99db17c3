//! `/proc` and pidfds: who a pid is, who it works for, and when it ends.
