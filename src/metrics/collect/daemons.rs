//! Control daemons and servers.

use crate::engine::snapshot::{Count, DaemonState, DaemonView, ServerView, Snapshot};
use crate::event::{Rejection, ServerStatus, Trouble};
use crate::metrics::families::{self, Family};
use crate::metrics::labels::LabelValue;
use crate::metrics::series::{Page, flag, last, total};
use crate::time::unix_seconds;

pub(super) fn daemons(page: &mut Page, snapshot: &Snapshot) {
    let known = DaemonState::ALL.strip_suffix(&[DaemonState::Unknown]).expect("unknown is the last");
    page.family(&families::CONTROL_DAEMON_STATE, |series| {
        for daemon in snapshot.daemons.iter().filter(|daemon| daemon.state != DaemonState::Unknown) {
            series.states(&[&daemon.name], known, daemon.state);
        }
    });
    page.family(&families::CONTROL_DAEMON_INFO, |series| {
        for daemon in &snapshot.daemons {
            let pid = daemon.pid.map(|pid| pid.to_string()).unwrap_or_default();
            let labels = [
                &*daemon.name,
                &pid,
                &daemon.pipe_directory,
                &daemon.log_directory,
                daemon.protocol.as_deref().unwrap_or_default(),
                daemon.version.as_deref().unwrap_or_default(),
            ];
            series.value(&labels, 1.0);
        }
    });
    each(page, snapshot, &families::CONTROL_DAEMON_UP, |daemon| daemon.is_up().map(flag));
    each(page, snapshot, &families::CONTROL_DAEMON_START_TIME, |daemon| daemon.started_at.map(unix_seconds));
    each(page, snapshot, &families::DEFAULT_ACTIVE_THREAD, |daemon| {
        daemon.default_active_thread_percentage.map(|percent| percent / 100.0)
    });
    each(page, snapshot, &families::PENDING_CLIENTS, |daemon| daemon.pending_clients.map(f64::from));
    each(page, snapshot, &families::PENDING_CLIENT_OLDEST, |daemon| daemon.pending_oldest.map(unix_seconds));
    counts::<Rejection>(
        page,
        snapshot,
        &families::CLIENTS_REJECTED,
        &families::CLIENT_REJECTED_LAST,
        |daemon| &daemon.rejected,
    );
    counts::<Trouble>(page, snapshot, &families::TROUBLES, &families::TROUBLE_LAST, |daemon| {
        &daemon.troubles
    });
}

/// A gauge of each daemon that has it.
fn each(
    page: &mut Page,
    snapshot: &Snapshot,
    family: &'static Family,
    value: impl Fn(&DaemonView) -> Option<f64>,
) {
    page.family(family, |series| {
        for daemon in &snapshot.daemons {
            if let Some(value) = value(daemon) {
                series.value(&[&daemon.name], value);
            }
        }
    });
}

/// A counter of each daemon by a closed set of words, all from 0, and its last times.
fn counts<T: LabelValue>(
    page: &mut Page,
    snapshot: &Snapshot,
    counter: &'static Family,
    timestamp: &'static Family,
    of: impl Fn(&DaemonView) -> &Vec<(T, Count)>,
) {
    let count = |daemon, word| of(daemon).iter().find(|(it, _)| *it == word).map(|(_, count)| *count);
    page.family(counter, |series| {
        for daemon in &snapshot.daemons {
            for word in T::ALL {
                let count = count(daemon, *word).unwrap_or_default();
                series.value(&[&daemon.name, word.label()], total(&count));
            }
        }
    });
    page.family(timestamp, |series| {
        for daemon in &snapshot.daemons {
            for (word, count) in of(daemon) {
                if let Some(at) = last(count) {
                    series.value(&[&daemon.name, word.label()], at);
                }
            }
        }
    });
}

pub(super) fn servers(page: &mut Page, snapshot: &Snapshot) {
    let server = |page: &mut Page, family, value: fn(&ServerView) -> Option<f64>| {
        page.family(family, |series| {
            for server in &snapshot.servers {
                if let Some(value) = value(server) {
                    series.value(&[&server.daemon, &server.server], value);
                }
            }
        });
    };
    server(page, &families::SERVER_UP, |server| server.is_up.map(flag));
    page.family(&families::SERVER_STATE, |series| {
        // A server that is gone has no state, and one that nobody can see has the state unknown.
        for server in snapshot.servers.iter().filter(|server| server.is_up != Some(false)) {
            let labels = |state| [&*server.daemon, &*server.server, state];
            for status in ServerStatus::ALL {
                series.value(&labels(status.label()), flag(server.status == Some(*status)));
            }
            series.value(&labels("unknown"), flag(server.status.is_none()));
        }
    });
    server(page, &families::SERVER_CLIENTS, |server| server.clients.map(f64::from));
    page.family(&families::SERVER_INFO, |series| {
        for server in &snapshot.servers {
            if let Some(pid) = server.pid {
                let uid = server.uid.map(|uid| uid.to_string()).unwrap_or_default();
                let version = server.version.as_deref().unwrap_or_default();
                series.value(&[&server.daemon, &server.server, &pid.to_string(), &uid, version], 1.0);
            }
        }
    });
    server(page, &families::SERVER_START_TIME, |server| server.started_at.map(unix_seconds));
    server(page, &families::SERVER_STARTS, |server| Some(total(&server.starts)));
    server(page, &families::SERVER_START_LAST, |server| last(&server.starts));
    server(page, &families::SERVER_FAULTS, |server| Some(total(&server.faults)));
    server(page, &families::SERVER_FAULT_LAST, |server| last(&server.faults));
    let exits = |server: &ServerView| [("orderly", server.exits_orderly), ("failed", server.exits_failed)];
    page.family(&families::SERVER_EXITS, |series| {
        for server in &snapshot.servers {
            for (result, count) in exits(server) {
                series.value(&[&server.daemon, &server.server, result], total(&count));
            }
        }
    });
    page.family(&families::SERVER_EXIT_LAST, |series| {
        for server in &snapshot.servers {
            for (result, count) in exits(server) {
                if let Some(at) = last(&count) {
                    series.value(&[&server.daemon, &server.server, result], at);
                }
            }
        }
    });
}
