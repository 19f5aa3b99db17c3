//! Outlets: the incident journal, Alertmanagers, hooks, restarts.
