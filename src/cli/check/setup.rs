//! What the exporter needs beside its sources: files that it can read, a place to write, somebody to post to.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Access, AtFlags, CWD, accessat};

use super::finding::{Finding, State};
use super::surroundings::Surroundings;
use crate::config::{Alertmanager, Config};
use crate::http::check_web_config;
use crate::http_client::Error;
use crate::outlet::post;
use crate::xid::Catalogue;

/// How long an Alertmanager may take to accept a connection.
const REACH: Duration = Duration::from_secs(2);
/// Where execvp(3) looks for a program while PATH is not set.
const NO_PATH: &str = "/bin:/usr/bin";

/// The configuration, and what to say of it.
pub fn configuration(file: Option<&Path>) -> (Option<Config>, Finding) {
    const WHAT: &str = "configuration";
    let Some(path) = file else {
        return (
            Some(Config::default()),
            Finding::fine(WHAT, State::Ok, "defaults; no --config.file is given"),
        );
    };
    match Config::load(path) {
        Ok(config) => (Some(config), Finding::fine(WHAT, State::Ok, path.display().to_string())),
        Err(error) => {
            let fix = vec![
                "mend the file at the place that is shown; deploy/mps-exporter.yml has every key".to_owned(),
            ];
            (None, Finding::bad(WHAT, State::Broken, error.to_string(), "the exporter does not start", fix))
        }
    }
}

/// The file of `--web.config.file`.
pub fn web_config(file: &Path) -> Finding {
    const WHAT: &str = "web config";
    match check_web_config(file) {
        Ok(()) => Finding::fine(WHAT, State::Ok, file.display().to_string()),
        Err(error) => {
            let sees = format!("{:#}", anyhow::Error::from(error));
            let fix = vec!["mend the file; docs/http.md says what it may hold".to_owned()];
            Finding::bad(WHAT, State::Broken, sees, "the exporter does not start", fix)
        }
    }
}

/// The site's own Xid catalogue, where there is one.
pub fn xid_catalog(config: &Config) -> Option<Finding> {
    const WHAT: &str = "xid_catalog";
    let path = config.incidents.xid_catalog.as_deref()?;
    Some(match Catalogue::with_overrides(path) {
        Ok(_) => Finding::fine(WHAT, State::Ok, path.display().to_string()),
        Err(error) => {
            let sees = format!("{:#}", anyhow::Error::from(error));
            let fix =
                vec!["mend the file, or remove incidents.xid_catalog from the configuration".to_owned()];
            Finding::bad(WHAT, State::Broken, sees, "the exporter does not start", fix)
        }
    })
}

/// Whether the state directory can be written. Nothing is written to find out.
pub fn state_directory(config: &Config, around: Surroundings) -> Finding {
    const WHAT: &str = "state directory";
    let Some(directory) = config.state.directory.as_deref() else {
        return Finding::fine(WHAT, State::Off, "state.directory is empty: nothing survives a restart");
    };
    // The exporter makes the directory, in the nearest one that exists.
    let Some(nearest) = directory.ancestors().find(|path| path.exists()) else {
        return Finding::bad(WHAT, State::Blind, "it has no parent that exists", "", Vec::new());
    };
    let allowed = if nearest.is_dir() {
        accessat(CWD, nearest, Access::WRITE_OK | Access::EXEC_OK, AtFlags::EACCESS)
            .map_err(std::io::Error::from)
    } else {
        Err(std::io::ErrorKind::NotADirectory.into())
    };
    let Err(error) = allowed else {
        let will = if nearest == directory { "" } else { " (will be made)" };
        return Finding::fine(WHAT, State::Ok, format!("{}{will}", directory.display()));
    };
    let sees = format!("{} cannot be written: {}: {error}", directory.display(), nearest.display());
    let path = directory.display();
    let fix = if around.is_container {
        vec![
            format!(
                "mount a volume at {path} that uid {} may write (Kubernetes: hostPath or emptyDir, fsGroup)",
                around.uid
            ),
            "state: {directory: \"\"} in the configuration, to keep nothing".to_owned(),
        ]
    } else {
        vec![
            format!("install -d -o {} {path}   (systemd: StateDirectory=mps-exporter)", around.uid),
            "state: {directory: \"\"} in the configuration, to keep nothing".to_owned(),
        ]
    };
    let missing = "after a restart: incidents so far, and what happened meanwhile";
    Finding::bad(WHAT, State::Blind, sees, missing, fix)
}

/// Whether the commands of `remediation` can be run, looked up in `search`, the value of PATH. None is.
pub fn commands(config: &Config, search: Option<&OsStr>) -> Vec<Finding> {
    let remediation = &config.remediation;
    let restart = remediation.restart.iter().map(|restart| ("restart".to_owned(), &restart.command));
    let hooks =
        remediation.hooks.iter().map(|(event, hook)| (format!("hooks.{}", event.label()), &hook.command));
    restart.chain(hooks).map(|(key, command)| runnable(&key, command, search)).collect()
}

fn runnable(key: &str, command: &[String], search: Option<&OsStr>) -> Finding {
    let what = format!("remediation.{key}");
    let program = command.first().map(String::as_str).unwrap_or_default();
    let places: Vec<PathBuf> = if program.contains('/') {
        vec![program.into()]
    } else {
        std::env::split_paths(search.unwrap_or(OsStr::new(NO_PATH))).map(|it| it.join(program)).collect()
    };
    let may_run = |path: &Path| {
        let is_allowed = accessat(CWD, path, Access::EXEC_OK, AtFlags::EACCESS).map_err(std::io::Error::from);
        is_allowed.and_then(|()| if path.is_dir() { Err(ErrorKind::IsADirectory.into()) } else { Ok(()) })
    };
    let mut problem = std::io::Error::from(ErrorKind::NotFound);
    for path in &places {
        match may_run(path) {
            Ok(()) => return Finding::fine(&what, State::Ok, path.display().to_string()),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => problem = error,
        }
    }
    let place = if program.contains('/') { "" } else { " on PATH" };
    let sees = format!("`{program}` cannot be run{place}: {problem}");
    let fix = vec![format!("install the program, chmod +x it, or mend remediation.{key}.command")];
    Finding::bad(&what, State::Blind, sees, "nothing is done when its event comes", fix)
}

/// Whether each Alertmanager accepts a connection. Nothing is posted.
pub async fn alertmanagers(config: &Config) -> Vec<Finding> {
    let mut findings = Vec::new();
    for each in &config.alertmanagers {
        findings.push(alertmanager(each).await);
    }
    findings
}

async fn alertmanager(config: &Alertmanager) -> Finding {
    const WHAT: &str = "alertmanager";
    let client = match post::client(config, REACH) {
        Ok(client) => client,
        Err(error) => {
            let fix = vec!["mend alertmanagers[].url in the configuration".to_owned()];
            return Finding::bad(WHAT, State::Broken, error.to_string(), "the exporter does not start", fix);
        }
    };
    match client.reach().await {
        Ok(()) => Finding::fine(WHAT, State::Ok, format!("{} accepts connections", config.url)),
        Err(error) => {
            let sees = format!("{}: {error}", config.url);
            let fix = vec![match error {
                Error::Secret(..) => {
                    "mend basic_auth or bearer_token_file, or let the exporter's user read the file"
                        .to_owned()
                }
                Error::Tls(_) => "mend alertmanagers[].tls: ca_file says whom to trust".to_owned(),
                _ => format!(
                    "curl -sf {}/-/ready from here; open the way to it (network policy, firewall, name) or mend the URL",
                    config.url
                ),
            }];
            Finding::bad(
                WHAT,
                State::Blind,
                sees,
                "pages in milliseconds; Prometheus's rules still page",
                fix,
            )
        }
    }
}
