//! control.log and server.log, or a `-f` daemon's standard output: what happened, in order.
