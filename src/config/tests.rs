use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use proptest::prelude::*;

use super::*;

/// What is wrong with the text, as a person reads it.
fn refusal(text: &str) -> String {
    Config::parse(text, "c.yml").expect_err(text).to_string()
}

#[test]
fn the_example_file_is_the_default() {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/mps-exporter.yml");
    assert_eq!(Config::load(&example).unwrap(), Config::default());
}

#[test]
fn nothing_is_the_default() {
    for text in ["", "# a comment\n", "---\n", "~\n", "{}", "discovery:\ncontrol:\ndaemons:\n"] {
        assert_eq!(Config::parse(text, "c.yml").unwrap(), Config::default(), "{text:?}");
    }
}

#[test]
fn every_key_is_taken() {
    let config = Config::parse(
        r#"
daemons:
  - {name: training, pipe_directory: /mps/pipe, log_directory: /mps/log, log: journal}
  - {name: b, pipe_directory: /b/pipe, log: /b/merged.log}
discovery: {enabled: false, pipe_directories: ["/x/*"], interval: 1m30s}
control: {client: binary, interval: 2m, timeout: 500ms}
nvml: {enabled: false, library: /opt/libnvidia-ml.so.1, interval: 5s, stuck_after: 1m}
kernel_log: {enabled: false, path: /var/log/kern.fifo}
host: {proc: /host/proc, pod_logs: /host/pods, kubelet_socket: /kubelet.sock, slurm: false}
incidents: {window: 2s, min_clients: 3, min_ratio: 1, xid_catalog: /etc/xids.csv}
state: {directory: "", incidents_kept: 10}
collectors: {clients: true, clients_limit: 10, workloads: false, workloads_limit: 20}
checkpoints:
  environment: ~
  paths:
    - /scratch/*/ckpt
    - {glob: /data/*, namespace: ml, pod: train-, unit: a.service, command: python}
alertmanagers:
  - url: https://am.example:9093/prefix/
    labels: {cluster: west, "_x": "1", instance: "${NODE_NAME}:1"}
    runbooks: https://wiki.example/mps/
    basic_auth: {username: u, password_file: /etc/pw}
    tls: {ca_file: /ca, cert_file: /c, key_file: /k, server_name: am, insecure_skip_verify: true}
    resolve: true
    timeout: 3s
    max_age: 1h
  - {url: "http://[::1]:9093", bearer_token_file: /etc/token}
  - {url: "http://am", basic_auth: {username: u, password: "p@ss: word"}}
remediation:
  restart: {daemons: [training], command: [systemctl, restart, mps], delay: 0s, max_backoff: 1h, limit_per_hour: 1, timeout: 5s}
  hooks:
    daemon_down: {command: [/bin/a, "", "--x"]}
    server_fault: {command: [b], timeout: 1s}
    recovery_blocked: {command: [c]}
    mass_client_loss: {command: [d]}
    recovered: {command: [e]}
"#,
        "c.yml",
    )
    .unwrap();
    let seconds = Duration::from_secs;
    assert_eq!(
        config.daemons,
        vec![
            Daemon {
                name: "training".into(),
                pipe_directory: "/mps/pipe".into(),
                log_directory: "/mps/log".into(),
                log: LogChoice::Journal,
            },
            Daemon {
                name: "b".into(),
                pipe_directory: "/b/pipe".into(),
                log_directory: "/var/log/nvidia-mps".into(),
                log: LogChoice::Path("/b/merged.log".into()),
            },
        ]
    );
    assert_eq!(
        config.discovery,
        Discovery { enabled: false, pipe_directories: vec!["/x/*".into()], interval: seconds(90) }
    );
    assert_eq!(
        config.control,
        Control {
            client: ControlClient::Binary,
            interval: seconds(120),
            timeout: Duration::from_millis(500),
        }
    );
    assert_eq!(
        config.nvml,
        Nvml {
            enabled: false,
            library: "/opt/libnvidia-ml.so.1".into(),
            interval: seconds(5),
            stuck_after: seconds(60),
        }
    );
    assert_eq!(config.kernel_log, KernelLog { enabled: false, path: "/var/log/kern.fifo".into() });
    assert_eq!(
        config.host,
        Host {
            proc: "/host/proc".into(),
            pod_logs: "/host/pods".into(),
            kubelet_socket: Some("/kubelet.sock".into()),
            slurm: false,
        }
    );
    assert_eq!(
        config.incidents,
        Incidents {
            window: seconds(2),
            min_clients: 3,
            min_ratio: 1.0,
            xid_catalog: Some("/etc/xids.csv".into()),
        }
    );
    assert_eq!(config.state, State { directory: None, incidents_kept: 10 });
    assert_eq!(
        config.collectors,
        Collectors { clients: true, clients_limit: 10, workloads: false, workloads_limit: 20 }
    );
    assert_eq!(config.checkpoints.environment, None);
    assert_eq!(
        config.checkpoints.paths[1],
        CheckpointPath {
            glob: "/data/*".into(),
            namespace: Some("ml".into()),
            pod: Some("train-".into()),
            unit: Some("a.service".into()),
            command: Some("python".into()),
        }
    );
    assert_eq!(config.checkpoints.paths[0].glob, "/scratch/*/ckpt");
    let first = &config.alertmanagers[0];
    assert_eq!(first.url, "https://am.example:9093/prefix");
    let instance = format!("{}:1", crate::outlet::hook::node_name());
    assert_eq!(
        first.labels,
        BTreeMap::from([
            ("cluster".into(), "west".into()),
            ("_x".into(), "1".into()),
            ("instance".into(), instance)
        ])
    );
    assert_eq!(first.runbooks.as_deref(), Some("https://wiki.example/mps"));
    assert_eq!(
        first.basic_auth,
        Some(BasicAuth { username: "u".into(), password: Secret::File("/etc/pw".into()) })
    );
    assert_eq!(
        first.tls,
        ClientTls {
            ca_file: Some("/ca".into()),
            cert_file: Some("/c".into()),
            key_file: Some("/k".into()),
            server_name: Some("am".into()),
            insecure_skip_verify: true,
        }
    );
    assert!(first.resolve);
    assert_eq!((first.timeout, first.max_age), (seconds(3), seconds(3600)));
    assert_eq!(config.alertmanagers[1].bearer_token_file, Some("/etc/token".into()));
    assert_eq!(config.alertmanagers[1].timeout, seconds(10));
    assert_eq!(
        config.alertmanagers[2].basic_auth,
        Some(BasicAuth { username: "u".into(), password: Secret::Inline("p@ss: word".into()) })
    );
    assert_eq!(
        config.remediation.restart,
        Some(Restart {
            daemons: vec!["training".into()],
            command: vec!["systemctl".into(), "restart".into(), "mps".into()],
            delay: Duration::ZERO,
            max_backoff: seconds(3600),
            limit_per_hour: 1,
            timeout: seconds(5),
        })
    );
    assert_eq!(config.remediation.hooks.len(), 5);
    assert_eq!(
        config.remediation.hooks[&HookEvent::DaemonDown],
        Hook { command: vec!["/bin/a".into(), String::new(), "--x".into()], timeout: seconds(30) }
    );
}

#[test]
fn an_error_shows_its_line_and_a_caret() {
    assert_eq!(
        refusal("control:\n  client: socket\n  interval: 15 sec\n"),
        "c.yml:3:13: control.interval: expected a duration such as `15s`, `1m30s`, `500ms` or `2h`, \
         found the string \"15 sec\"\n  |\n3 |   interval: 15 sec\n  |             ^"
    );
}

#[test]
fn several_errors_are_told_together_in_the_order_of_the_file() {
    assert_eq!(
        refusal("nvml: {intervall: 5s}\ncontrol: {timeout: 2}\nstate: {directory: here}\n"),
        "c.yml:1:8: nvml: unknown key \"intervall\", did you mean `interval`?\n  |\n\
         1 | nvml: {intervall: 5s}\n  |        ^\n\
         c.yml:2:20: control.timeout: expected a duration such as `15s`, `1m30s`, `500ms` or `2h`, found the number 2\n  |\n\
         2 | control: {timeout: 2}\n  |                    ^\n\
         c.yml:3:20: state.directory: expected an absolute path, found the string \"here\"\n  |\n\
         3 | state: {directory: here}\n  |                    ^\n\
         3 errors in the configuration"
    );
}

#[test]
fn each_mistake_has_its_message() {
    for (text, message) in [
        (
            "colour: red",
            "1:1: unknown key \"colour\", expected `daemons`, `discovery`, `control`, `nvml`, `kernel_log`, `host`, `incidents`, `state`, `collectors`, `checkpoints`, `alertmanagers` or `remediation`",
        ),
        ("- a", "1:1: expected a mapping of keys to values, found a list"),
        ("5: x", "1:1: expected a key, found the number 5"),
        ("nvml: {}\nnvml: {}", "2:1: the key \"nvml\" is given twice"),
        ("control: off", "1:10: control: expected a mapping of keys to values, found the string \"off\""),
        (
            "control: {client: telnet}",
            "1:19: control.client: expected `socket`, `binary` or `off`, found the string \"telnet\"",
        ),
        ("nvml: {enabled: yes}", "1:17: nvml.enabled: expected `true` or `false`, found the string \"yes\""),
        (
            "nvml: {interval: 0s}",
            "1:18: nvml.interval: expected a duration from 1s to 1h, found the string \"0s\"",
        ),
        (
            "nvml: {interval: }",
            "1:18: nvml.interval: expected a duration such as `15s`, `1m30s`, `500ms` or `2h`, found nothing",
        ),
        (
            "nvml: {library: lib/x.so}",
            "1:17: nvml.library: expected the name of a library, or its absolute path, found the string \"lib/x.so\"",
        ),
        (
            "incidents: {min_ratio: 0}",
            "1:24: incidents.min_ratio: expected a ratio above 0 and up to 1, found the number 0",
        ),
        (
            "incidents: {min_ratio: 1.5}",
            "1:24: incidents.min_ratio: expected a ratio above 0 and up to 1, found the number 1.5",
        ),
        (
            "incidents: {min_ratio: .nan}",
            "1:24: incidents.min_ratio: expected a ratio above 0 and up to 1, found the number NaN",
        ),
        (
            "incidents: {min_clients: -1}",
            "1:26: incidents.min_clients: expected a whole number from 1 to 100000, found the number -1",
        ),
        ("host: {proc: proc}", "1:14: host.proc: expected an absolute path, found the string \"proc\""),
        (
            "host: {proc: 5}",
            "1:14: host.proc: expected an absolute path, found the number 5: put it in quotes",
        ),
        ("daemons: {}", "1:10: daemons: expected a list of daemons, found a mapping"),
        (
            "daemons:\n- name: a\n  pipe_directory: /a\n- name: a\n  pipe_directory: /b",
            "4:9: daemons[1].name: two daemons have the name \"a\": give each its own",
        ),
        (
            "daemons:\n- name: a\n- name: b",
            "3:3: daemons[1]: two daemons have the pipe directory /tmp/nvidia-mps: one of them must go",
        ),
        (
            "daemons: [{name: gpu}]",
            "1:18: daemons[0].name: expected a name of at most 128 bytes without `/` and spaces, and not `gpu`, found \"gpu\"",
        ),
        (
            "daemons: [{name: a/b}]",
            "1:18: daemons[0].name: expected a name of at most 128 bytes without `/` and spaces, and not `gpu`, found \"a/b\"",
        ),
        (
            "daemons: [{log: both}]",
            "1:17: daemons[0].log: expected `auto`, `files`, `journal` or an absolute path, found the string \"both\"",
        ),
        (
            "discovery: {pipe_directories: [x]}",
            "1:32: discovery.pipe_directories[0]: expected an absolute path or glob, found the string \"x\"",
        ),
        (
            "checkpoints: {environment: A-B}",
            "1:28: checkpoints.environment: expected the name of an environment variable, found the string \"A-B\"",
        ),
        ("checkpoints: {paths: [{pod: x}]}", "1:23: checkpoints.paths[0]: the key `glob` is missing"),
        ("alertmanagers: [{}]", "1:17: alertmanagers[0]: the key `url` is missing"),
        (
            "alertmanagers: [{url: am}]",
            "1:23: alertmanagers[0].url: expected a URL such as `http://alertmanager:9093`: it starts with `http://` or `https://`",
        ),
        (
            "alertmanagers: [{url: \"http://a:b\"}]",
            "1:23: alertmanagers[0].url: expected a URL such as `http://alertmanager:9093`, found the string \"http://a:b\"",
        ),
        (
            "alertmanagers: [{url: \"http://a\", labels: {a-b: c}}]",
            "1:49: alertmanagers[0].labels.a-b: expected a label name of letters, digits and `_`, not starting with a digit",
        ),
        (
            "alertmanagers: [{url: \"http://a\", tls: {ca_file: /a}}]",
            "1:17: alertmanagers[0]: `tls` needs a URL that starts with `https://`",
        ),
        (
            "alertmanagers: [{url: \"https://a\", tls: {key_file: /a}}]",
            "1:41: alertmanagers[0].tls: `cert_file` and `key_file` belong together: give both or none",
        ),
        ("remediation: {restart: {}}", "1:24: remediation.restart: the key `command` is missing"),
        (
            "remediation: {hooks: {daemon_up: {command: [a]}}}",
            "1:34: remediation.hooks.daemon_up: there is no such event, expected `daemon_down`, `server_fault`, `recovery_blocked`, `mass_client_loss` or `recovered`",
        ),
        (
            "remediation: {hooks: {recovered: {command: ls -l}}}",
            "1:44: remediation.hooks.recovered.command: expected a list of a program and its arguments (no shell runs it), found the string \"ls -l\"",
        ),
        (
            "remediation: {hooks: {recovered: {command: []}}}",
            "1:44: remediation.hooks.recovered.command: expected a list of a program and its arguments (no shell runs it), found an empty list",
        ),
        (
            "remediation: {hooks: {recovered: {command: [\"\"]}}}",
            "1:45: remediation.hooks.recovered.command[0]: expected a program, found the string \"\"",
        ),
        (
            "remediation: {hooks: {recovered: {command: [./a]}}}",
            "1:45: remediation.hooks.recovered.command[0]: expected a program's absolute path, or its name alone, found the string \"./a\"",
        ),
        (
            "remediation: {hooks: {recovered: {command: [a, 5]}}}",
            "1:48: remediation.hooks.recovered.command[1]: expected a string, found the number 5: put it in quotes",
        ),
        (
            "nvml: !secret {}",
            "1:7: not valid YAML: nvml: YAML tags (`!name`) mean nothing here, remove the tag",
        ),
        ("a: [b", "not valid YAML: did not find expected ',' or ']'"),
        ("a: b: c", "1:5: not valid YAML: mapping values are not allowed in this context"),
    ] {
        let said = refusal(text);
        let first = said.lines().next().unwrap();
        assert!(first.starts_with("c.yml:") && first.contains(message), "{text}\n  {said}\n  {message}");
        if message.as_bytes()[0].is_ascii_digit() {
            assert_eq!(first, format!("c.yml:{message}"), "{text}");
        }
    }
}

#[test]
fn no_secret_is_ever_shown() {
    for text in [
        "alertmanagers: [{url: \"http://a\", basic_auth: {username: u, password: 12345678}}]",
        "alertmanagers:\n- url: http://a\n  basic_auth:\n    username: u\n    pasword: 12345678",
        "alertmanagers:\n- url: http://a\n  basic_auth:\n    username: u\n    password: \"12345678",
        "alertmanagers: [{url: \"http://u:12345678@a\"}]",
        "alertmanagers: [{url: \"ftp://u:12345678@a\"}]",
    ] {
        assert!(!refusal(text).contains("1234567"), "{}", refusal(text));
    }
    let text = "alertmanagers: [{url: \"http://a\", basic_auth: {username: u, password: \"12345678\"}}]";
    assert!(!format!("{:?}", Config::parse(text, "c").unwrap()).contains("12345678"));
}

#[test]
fn basic_and_bearer_exclude_each_other() {
    let said = refusal(
        "alertmanagers:\n- url: http://a\n  basic_auth: {username: u, password: p}\n  bearer_token_file: /t\n",
    );
    assert!(said.starts_with(
        "c.yml:2:3: alertmanagers[0]: `basic_auth` and `bearer_token_file` exclude each other: keep one of them"
    ));
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let error = Config::load(Path::new("/nonexistent/c.yml")).unwrap_err().to_string();
    assert!(
        error.starts_with("cannot read the configuration file /nonexistent/c.yml: No such file"),
        "{error}"
    );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("c.yml");
    std::fs::write(&path, [0xff, 0xfe, b'\n']).unwrap();
    assert!(Config::load(&path).unwrap_err().to_string().contains("invalid utf-8"));
    std::fs::write(&path, vec![b'#'; (1 << 20) + 1]).unwrap();
    assert!(Config::load(&path).unwrap_err().to_string().contains("larger than 1048576 bytes"));
}

#[test]
fn hostile_documents_are_bounded() {
    let mut laughs = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..10 {
        let name = format!("*a{}, ", level - 1).repeat(10);
        let _infallible = writeln!(laughs, "a{level}: &a{level} [{}]", name.trim_end_matches(", "));
    }
    assert!(refusal(&laughs).contains("repetition limit exceeded"));
    assert!(refusal(&"[".repeat(5000)).contains("recursion limit exceeded"));
    let many = (0..5000).map(|index| format!("key{index}: 1")).collect::<Vec<_>>().join("\n");
    assert_eq!(refusal(&many).matches("unknown key").count(), 20);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_text_panics(text in "\\PC{0,200}") {
        let _outcome = Config::parse(&text, "c.yml").map_err(|error| error.to_string());
    }

    #[test]
    fn no_document_of_our_keys_panics(
        lines in prop::collection::vec(
            "(  |    |- |  - )?(daemons|name|control|interval|alertmanagers|url|basic_auth|hooks|paths|command|\\*a|&a)(: |:)(15s|\\{|\\}|\\[a, b\\]|1|-|\"|é|\\*a|&a x|)?",
            0..12,
        ),
    ) {
        let text = lines.join("\n");
        if let Err(ConfigError::Invalid(diagnostics)) = Config::parse(&text, "c.yml") {
            for diagnostic in diagnostics {
                if !diagnostic.key.is_empty() {
                    prop_assert!(diagnostic.place.is_some(), "{}\n{}", text, diagnostic);
                }
            }
        }
    }
}
