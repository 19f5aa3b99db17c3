//! A scripted `libnvidia-ml.so.1`.
