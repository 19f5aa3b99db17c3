//! From the text of a configuration file to a [`Config`]: the whole schema, key by key.
//!
//! Every function starts from the defaults and overwrites what the file gives, so that a key is named exactly once.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::diagnostics::{ConfigError, Diagnostic};
use super::node::{Node, locate, quote};
use super::table::{Faults, Table, Value, any_of};
use super::{
    Alertmanager, BasicAuth, CheckpointPath, Checkpoints, ClientTls, Collectors, Config, Control,
    ControlClient, Daemon, Discovery, Hook, HookEvent, Host, Incidents, KernelLog, LogChoice, Nvml,
    Remediation, Restart, Secret, State,
};
use crate::file;
use crate::outlet::hook::node_name;

/// A configuration is small; anything larger is a mistake, such as the path of a log.
const MAX_BYTES: u64 = 1 << 20;
/// More errors than these help nobody.
const MAX_DIAGNOSTICS: usize = 20;
/// In a label of alerts it stands for the node's name: one configuration serves every node of a `DaemonSet`.
const NODE_NAME: &str = "${NODE_NAME}";

const MILLISECOND: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(86_400);

/// The events that may have a hook, as the file names them.
const HOOK_EVENTS: [(&str, HookEvent); 5] = [
    ("daemon_down", HookEvent::DaemonDown),
    ("server_fault", HookEvent::ServerFault),
    ("recovery_blocked", HookEvent::RecoveryBlocked),
    ("mass_client_loss", HookEvent::MassClientLoss),
    ("recovered", HookEvent::Recovered),
];

impl Config {
    /// Reads and validates a configuration file.
    pub fn load(path: &Path) -> Result<Config, ConfigError> {
        Config::parse(&Config::read(path)?, &path.display().to_string())
    }

    /// The text of a configuration file.
    pub(super) fn read(path: &Path) -> Result<String, ConfigError> {
        let failed = |error| ConfigError::Read { path: path.to_owned(), error };
        file::read_text(path, MAX_BYTES).map_err(|error| match error.kind() {
            io::ErrorKind::FileTooLarge => ConfigError::TooLarge { path: path.to_owned(), limit: MAX_BYTES },
            _ => failed(error),
        })
    }

    /// Validates the text of a configuration file; `name` is what diagnostics call it.
    pub fn parse(text: &str, name: &str) -> Result<Config, ConfigError> {
        let document: Node = serde_yaml::from_str(text)
            .map_err(|error| ConfigError::Invalid(vec![syntax_diagnostic(name, text, &error)]))?;
        let mut faults = Faults::default();
        let config = config(Value::document(&document), &mut faults);
        if faults.0.is_empty() {
            return Ok(config);
        }
        let mut diagnostics: Vec<Diagnostic> = faults
            .0
            .into_iter()
            .take(MAX_DIAGNOSTICS)
            .map(|fault| Diagnostic::new(name, text, locate(text, &fault.steps), fault.key, fault.message))
            .collect();
        diagnostics.sort_by_key(|diagnostic| diagnostic.place);
        Err(ConfigError::Invalid(diagnostics))
    }
}

fn syntax_diagnostic(name: &str, text: &str, error: &serde_yaml::Error) -> Diagnostic {
    let place = error.location().map(|location| (location.line(), location.column()));
    let mut message = error.to_string();
    if let Some((line, column)) = place {
        // The place is told already; a second one, of what the parser was reading, stays.
        message = message.replace(&format!(" at line {line} column {column}"), "");
    }
    Diagnostic::new(name, text, place, String::new(), format!("not valid YAML: {message}"))
}

fn config(document: Value<'_>, faults: &mut Faults) -> Config {
    let mut config = Config::default();
    let Some(mut table) = document.table(faults) else { return config };
    if let Some(value) = table.get("daemons") {
        config.daemons = daemons(&value, faults);
    }
    section(&mut table, faults, "discovery", &mut config.discovery, discovery);
    section(&mut table, faults, "control", &mut config.control, control);
    section(&mut table, faults, "nvml", &mut config.nvml, nvml);
    section(&mut table, faults, "kernel_log", &mut config.kernel_log, kernel_log);
    section(&mut table, faults, "host", &mut config.host, host);
    section(&mut table, faults, "incidents", &mut config.incidents, incidents);
    section(&mut table, faults, "state", &mut config.state, state);
    section(&mut table, faults, "collectors", &mut config.collectors, collectors);
    section(&mut table, faults, "checkpoints", &mut config.checkpoints, checkpoints);
    if let Some(value) = table.get("alertmanagers") {
        let items = value.list(faults, "a list of Alertmanagers");
        config.alertmanagers = items.into_iter().filter_map(|item| alertmanager(item, faults)).collect();
    }
    section(&mut table, faults, "remediation", &mut config.remediation, remediation);
    table.end(faults);
    config
}

/// Reads a mapping under a key into a value that holds the defaults.
fn section<T>(
    parent: &mut Table<'_>,
    faults: &mut Faults,
    name: &'static str,
    into: &mut T,
    read: impl FnOnce(&mut Table<'_>, &mut Faults, &mut T),
) {
    if let Some(mut table) = parent.get(name).and_then(|value| value.table(faults)) {
        read(&mut table, faults, into);
        table.end(faults);
    }
}

fn daemons(value: &Value<'_>, faults: &mut Faults) -> Vec<Daemon> {
    let (mut names, mut directories) = (HashSet::new(), HashSet::new());
    let mut daemons = Vec::new();
    for item in value.list(faults, "a list of daemons") {
        let Some(mut table) = item.table(faults) else { continue };
        let mut daemon = Daemon {
            name: "default".into(),
            pipe_directory: "/tmp/nvidia-mps".into(),
            log_directory: "/var/log/nvidia-mps".into(),
            log: LogChoice::Auto,
        };
        let name = table.get("name");
        if let Some(text) = name.as_ref().and_then(|value| daemon_name(value, faults)) {
            daemon.name = text.into();
        }
        table.path(faults, "pipe_directory", &mut daemon.pipe_directory);
        table.path(faults, "log_directory", &mut daemon.log_directory);
        if let Some(value) = table.get("log") {
            daemon.log = log_choice(&value, faults).unwrap_or(LogChoice::Auto);
        }
        if !names.insert(daemon.name.clone()) {
            let message = format!("two daemons have the name {}: give each its own", quote(&daemon.name));
            match &name {
                Some(value) => value.fault(faults, message),
                None => table.fault(faults, message),
            }
        } else if !directories.insert(daemon.pipe_directory.clone()) {
            let directory = daemon.pipe_directory.display();
            table.fault(
                faults,
                format!("two daemons have the pipe directory {directory}: one of them must go"),
            );
        }
        table.end(faults);
        daemons.push(daemon);
    }
    daemons
}

/// A name that can be the first part of a fault domain: `<daemon>/<gpu>`, while `gpu/<index>` is a GPU without MPS.
fn daemon_name<'n>(value: &Value<'n>, faults: &mut Faults) -> Option<&'n str> {
    let text = value.string(faults, "a name")?;
    if text == "gpu" || text.len() > 128 || text.contains(|each: char| each == '/' || each.is_whitespace()) {
        let message = format!(
            "expected a name of at most 128 bytes without `/` and spaces, and not `gpu`, found {}",
            quote(text)
        );
        value.fault(faults, message);
        return None;
    }
    Some(text)
}

fn log_choice(value: &Value<'_>, faults: &mut Faults) -> Option<LogChoice> {
    const EXPECTED: &str = "`auto`, `files`, `journal` or an absolute path";
    let text = value.string(faults, EXPECTED)?;
    match text {
        "auto" => Some(LogChoice::Auto),
        "files" => Some(LogChoice::Files),
        "journal" => Some(LogChoice::Journal),
        path if Path::new(path).is_absolute() => Some(LogChoice::Path(path.into())),
        _ => {
            value.fault(faults, format!("expected {EXPECTED}, found {}", value.node.describe()));
            None
        }
    }
}

fn discovery(table: &mut Table<'_>, faults: &mut Faults, into: &mut Discovery) {
    table.boolean(faults, "enabled", &mut into.enabled);
    if let Some(value) = table.get("pipe_directories") {
        let items = value.list(faults, "a list of globs");
        into.pipe_directories = items.iter().filter_map(|item| glob(item, faults)).collect();
    }
    table.duration(faults, "interval", SECOND..=DAY, &mut into.interval);
}

fn glob(value: &Value<'_>, faults: &mut Faults) -> Option<String> {
    let text = value.string(faults, "an absolute path or glob")?;
    if !text.starts_with('/') {
        value.fault(faults, format!("expected an absolute path or glob, found {}", value.node.describe()));
        return None;
    }
    Some(text.to_owned())
}

fn control(table: &mut Table<'_>, faults: &mut Faults, into: &mut Control) {
    let clients =
        [("socket", ControlClient::Socket), ("binary", ControlClient::Binary), ("off", ControlClient::Off)];
    table.choice(faults, "client", &clients, &mut into.client);
    table.duration(faults, "interval", SECOND..=DAY, &mut into.interval);
    table.duration(faults, "timeout", 10 * MILLISECOND..=MINUTE, &mut into.timeout);
}

fn nvml(table: &mut Table<'_>, faults: &mut Faults, into: &mut Nvml) {
    table.boolean(faults, "enabled", &mut into.enabled);
    if let Some(value) = table.get("library")
        && let Some(text) = value.string(faults, "the name of a library, or its absolute path")
    {
        if text.contains('/') && !Path::new(text).is_absolute() {
            let found = value.node.describe();
            value.fault(
                faults,
                format!("expected the name of a library, or its absolute path, found {found}"),
            );
        } else {
            into.library = text.into();
        }
    }
    table.duration(faults, "interval", SECOND..=HOUR, &mut into.interval);
    table.duration(faults, "stuck_after", SECOND..=HOUR, &mut into.stuck_after);
}

fn kernel_log(table: &mut Table<'_>, faults: &mut Faults, into: &mut KernelLog) {
    table.boolean(faults, "enabled", &mut into.enabled);
    table.path(faults, "path", &mut into.path);
}

fn host(table: &mut Table<'_>, faults: &mut Faults, into: &mut Host) {
    table.path(faults, "proc", &mut into.proc);
    table.path(faults, "pod_logs", &mut into.pod_logs);
    table.optional_path(faults, "kubelet_socket", &mut into.kubelet_socket);
    table.boolean(faults, "slurm", &mut into.slurm);
}

fn incidents(table: &mut Table<'_>, faults: &mut Faults, into: &mut Incidents) {
    table.duration(faults, "window", 100 * MILLISECOND..=10 * MINUTE, &mut into.window);
    table.number(faults, "min_clients", 1..=100_000, &mut into.min_clients);
    table.ratio(faults, "min_ratio", &mut into.min_ratio);
    table.optional_path(faults, "xid_catalog", &mut into.xid_catalog);
}

fn state(table: &mut Table<'_>, faults: &mut Faults, into: &mut State) {
    table.optional_path(faults, "directory", &mut into.directory);
    table.number(faults, "incidents_kept", 1..=100_000, &mut into.incidents_kept);
}

fn collectors(table: &mut Table<'_>, faults: &mut Faults, into: &mut Collectors) {
    table.boolean(faults, "clients", &mut into.clients);
    table.number(faults, "clients_limit", 1..=100_000, &mut into.clients_limit);
    table.boolean(faults, "workloads", &mut into.workloads);
    table.number(faults, "workloads_limit", 1..=100_000, &mut into.workloads_limit);
}

fn checkpoints(table: &mut Table<'_>, faults: &mut Faults, into: &mut Checkpoints) {
    if let Some(value) = table.get("environment") {
        const EXPECTED: &str = "the name of an environment variable";
        if value.is_none() {
            into.environment = None;
        } else if let Some(text) = value.string(faults, EXPECTED) {
            if is_identifier(text) {
                into.environment = Some(text.to_owned());
            } else {
                value.fault(faults, format!("expected {EXPECTED}, found {}", value.node.describe()));
            }
        }
    }
    if let Some(value) = table.get("paths") {
        let items = value.list(faults, "a list of globs");
        into.paths = items.into_iter().filter_map(|item| checkpoint_path(item, faults)).collect();
    }
}

fn checkpoint_path(item: Value<'_>, faults: &mut Faults) -> Option<CheckpointPath> {
    let mut path =
        CheckpointPath { glob: String::new(), namespace: None, pod: None, unit: None, command: None };
    if !matches!(item.node, Node::Table(_)) {
        path.glob = glob(&item, faults)?;
        return Some(path);
    }
    let mut table = item.table(faults)?;
    match table.get("glob") {
        Some(value) => path.glob = glob(&value, faults).unwrap_or_default(),
        None => table.missing(faults, "glob"),
    }
    table.optional_string(faults, "namespace", "the name of a Kubernetes namespace", &mut path.namespace);
    table.optional_string(faults, "pod", "the beginning of a pod's name", &mut path.pod);
    table.optional_string(faults, "unit", "the name of a systemd unit", &mut path.unit);
    table.optional_string(faults, "command", "the name of a command", &mut path.command);
    table.end(faults);
    Some(path)
}

fn alertmanager(item: Value<'_>, faults: &mut Faults) -> Option<Alertmanager> {
    let mut table = item.table(faults)?;
    let mut into = Alertmanager {
        url: String::new(),
        labels: BTreeMap::new(),
        runbooks: None,
        basic_auth: None,
        bearer_token_file: None,
        tls: ClientTls::default(),
        resolve: false,
        timeout: 10 * SECOND,
        max_age: 15 * MINUTE,
    };
    match table.get("url") {
        Some(value) => into.url = url(&value, faults).unwrap_or_default(),
        None => table.missing(faults, "url"),
    }
    if let Some(labels) = table.get("labels").and_then(|value| value.table(faults)) {
        for (name, value) in labels.entries(faults) {
            if !is_identifier(name) {
                value.fault(
                    faults,
                    "expected a label name of letters, digits and `_`, not starting with a digit",
                );
            } else if name == "alertname" || name == "severity" {
                value.fault(faults, "alerts have this label of their own: choose another name");
            } else if let Some(text) = value.string(faults, "a label value") {
                let text = text.replace(NODE_NAME, &node_name());
                if text.contains("${") {
                    value.fault(faults, "only `${NODE_NAME}` is replaced, by the name of this node");
                }
                into.labels.insert(name.to_owned(), text);
            }
        }
    }
    into.runbooks = table.get("runbooks").and_then(|value| url(&value, faults));
    if let Some(auth) = table.get("basic_auth") {
        into.basic_auth = basic_auth(auth, faults);
        if table.get("bearer_token_file").is_some() {
            table.fault(faults, "`basic_auth` and `bearer_token_file` exclude each other: keep one of them");
        }
    }
    table.optional_path(faults, "bearer_token_file", &mut into.bearer_token_file);
    section(&mut table, faults, "tls", &mut into.tls, client_tls);
    if into.tls != ClientTls::default() && into.url.starts_with("http://") {
        table.fault(faults, "`tls` needs a URL that starts with `https://`");
    }
    table.boolean(faults, "resolve", &mut into.resolve);
    table.duration(faults, "timeout", 100 * MILLISECOND..=5 * MINUTE, &mut into.timeout);
    table.duration(faults, "max_age", SECOND..=30 * DAY, &mut into.max_age);
    table.end(faults);
    Some(into)
}

/// A URL to which a path is added. What was found is told only when it cannot hold a password.
fn url(value: &Value<'_>, faults: &mut Faults) -> Option<String> {
    const EXPECTED: &str = "a URL such as `http://alertmanager:9093`";
    let text = value.string(faults, EXPECTED)?;
    let authority = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
    let Some(authority) = authority.map(|rest| rest.split('/').next().unwrap_or_default()) else {
        value.fault(faults, format!("expected {EXPECTED}: it starts with `http://` or `https://`"));
        return None;
    };
    if text.contains('@') {
        value.fault(faults, "no user or password belongs in a URL: use `basic_auth`");
        return None;
    }
    let has_port_error = authority
        .rsplit_once(':')
        .is_some_and(|(_, port)| !port.ends_with(']') && port.parse::<u16>().is_err());
    let is_odd = |each: char| each.is_whitespace() || matches!(each, '?' | '#' | '"' | '<' | '>' | '\\');
    if authority.is_empty()
        || authority.starts_with(':')
        || has_port_error
        || text.contains(is_odd)
        || !text.is_ascii()
    {
        value.fault(faults, format!("expected {EXPECTED}, found {}", value.node.describe()));
        return None;
    }
    Some(text.trim_end_matches('/').to_owned())
}

fn basic_auth(value: Value<'_>, faults: &mut Faults) -> Option<BasicAuth> {
    let mut table = value.table(faults)?;
    let username = table.get("username");
    if username.is_none() {
        table.missing(faults, "username");
    }
    let username = username.and_then(|value| value.string(faults, "a user name").map(str::to_owned));
    let inline = table.get("password");
    let mut file: Option<PathBuf> = None;
    table.optional_path(faults, "password_file", &mut file);
    let password = match (inline, file) {
        (Some(value), None) => match value.node {
            Node::Text(text) if !text.is_empty() => Some(Secret::Inline(text.clone())),
            _ => {
                value.fault(faults, "expected a string that is not empty: put it in quotes");
                None
            }
        },
        (None, Some(file)) => Some(Secret::File(file)),
        _ => {
            table.fault(faults, "expected either `password` or `password_file`");
            None
        }
    };
    table.end(faults);
    Some(BasicAuth { username: username?, password: password? })
}

fn client_tls(table: &mut Table<'_>, faults: &mut Faults, into: &mut ClientTls) {
    table.optional_path(faults, "ca_file", &mut into.ca_file);
    table.optional_path(faults, "cert_file", &mut into.cert_file);
    table.optional_path(faults, "key_file", &mut into.key_file);
    table.optional_string(faults, "server_name", "a host name", &mut into.server_name);
    table.boolean(faults, "insecure_skip_verify", &mut into.insecure_skip_verify);
    if into.cert_file.is_some() != into.key_file.is_some() {
        table.fault(faults, "`cert_file` and `key_file` belong together: give both or none");
    }
}

fn remediation(table: &mut Table<'_>, faults: &mut Faults, into: &mut Remediation) {
    if let Some(value) = table.get("restart").filter(|value| !value.is_none()) {
        into.restart = restart(value, faults);
    }
    if let Some(hooks) = table.get("hooks").and_then(|value| value.table(faults)) {
        for (name, value) in hooks.entries(faults) {
            let Some((_, event)) = HOOK_EVENTS.iter().find(|(word, _)| *word == name) else {
                let events = HOOK_EVENTS.map(|(word, _)| word);
                value.fault(faults, format!("there is no such event, expected {}", any_of(&events)));
                continue;
            };
            if let Some(hook) = hook(value, faults) {
                into.hooks.insert(*event, hook);
            }
        }
    }
}

fn restart(value: Value<'_>, faults: &mut Faults) -> Option<Restart> {
    let mut table = value.table(faults)?;
    let mut into = Restart {
        daemons: Vec::new(),
        command: command(&mut table, faults),
        delay: 10 * SECOND,
        max_backoff: 5 * MINUTE,
        limit_per_hour: 3,
        timeout: 30 * SECOND,
    };
    if let Some(value) = table.get("daemons") {
        let items = value.list(faults, "a list of daemon names");
        into.daemons = items
            .iter()
            .filter_map(|item| item.string(faults, "the name of a daemon").map(str::to_owned))
            .collect();
    }
    table.duration(faults, "delay", Duration::ZERO..=HOUR, &mut into.delay);
    table.duration(faults, "max_backoff", SECOND..=DAY, &mut into.max_backoff);
    table.number(faults, "limit_per_hour", 1..=60, &mut into.limit_per_hour);
    table.duration(faults, "timeout", SECOND..=HOUR, &mut into.timeout);
    table.end(faults);
    Some(into)
}

fn hook(value: Value<'_>, faults: &mut Faults) -> Option<Hook> {
    let mut table = value.table(faults)?;
    let mut into = Hook { command: command(&mut table, faults), timeout: 30 * SECOND };
    table.duration(faults, "timeout", SECOND..=HOUR, &mut into.timeout);
    table.end(faults);
    Some(into)
}

/// A program with its arguments. Empty when something is wrong with it, which is reported.
fn command(table: &mut Table<'_>, faults: &mut Faults) -> Vec<String> {
    const EXPECTED: &str = "a list of a program and its arguments (no shell runs it)";
    let Some(value) = table.get("command") else {
        table.missing(faults, "command");
        return Vec::new();
    };
    if !matches!(value.node, Node::List(_)) {
        value.fault(faults, format!("expected {EXPECTED}, found {}", value.node.describe()));
        return Vec::new();
    }
    let items = value.list(faults, EXPECTED);
    let Some(program) = items.first() else {
        value.fault(faults, format!("expected {EXPECTED}, found an empty list"));
        return Vec::new();
    };
    if let Some(text) = program.string(faults, "a program")
        && text.contains('/')
        && !Path::new(text).is_absolute()
    {
        let found = program.node.describe();
        program
            .fault(faults, format!("expected a program's absolute path, or its name alone, found {found}"));
    }
    items.iter().skip(1).fold(vec![program_text(program)], |mut command, item| {
        match item.node {
            Node::Text(text) if !text.contains('\0') => command.push(text.clone()),
            _ => item.fault(
                faults,
                format!("expected a string, found {}: put it in quotes", item.node.describe()),
            ),
        }
        command
    })
}

fn program_text(program: &Value<'_>) -> String {
    match program.node {
        Node::Text(text) => text.clone(),
        _ => String::new(),
    }
}

/// A label name, or the name of an environment variable.
fn is_identifier(text: &str) -> bool {
    let mut characters = text.chars();
    characters.next().is_some_and(|first| first.is_ascii_alphabetic() || first == '_')
        && characters.all(|each| each.is_ascii_alphanumeric() || each == '_')
}
