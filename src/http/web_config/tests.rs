use super::*;

fn write(folder: &Path, text: &str) -> PathBuf {
    let path = folder.join("web.yml");
    fs::write(&path, text).unwrap();
    path
}

fn refusal(text: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    match WebConfig::read(&write(folder.path(), text)) {
        Ok(_) => panic!("taken: {text}"),
        Err(error) => with_sources(&error),
    }
}

#[test]
fn what_is_wrong_is_said() {
    let hash = "$2b$31$abcdefghijklmnopqrstuu5s2v8.iXieOjg/.AySBTTZIIVFJeBui";
    let costly = format!("basic_auth_users: {{a: {hash}}}");
    let cases = [
        ("tls_server_confg: {}", "unknown field `tls_server_confg`"),
        ("http_server_config: {header: {}}", "unknown field `header`"),
        ("http_server_config: {headers: {Set-Cookie: x}}", "`Set-Cookie` cannot be set"),
        ("http_server_config: {headers: {X-Frame-Options: \"a\\nb\"}}", "X-Frame-Options"),
        ("basic_auth_users: {a: plain}", "not a bcrypt hash"),
        (&costly, "cost above 16"),
        ("- a list", "invalid type"),
    ];
    for (text, expected) in cases {
        let told = refusal(text);
        assert!(told.contains(expected) && told.contains("web.yml"), "{text}: {told}");
    }
    let missing = WebConfig::read(Path::new("/nonexistent/web.yml")).err().unwrap();
    assert!(with_sources(&missing).contains("/nonexistent/web.yml"));
}

#[cfg(not(feature = "tls"))]
#[test]
fn without_tls_in_the_build_a_tls_configuration_is_refused() {
    let told = refusal("tls_server_config: {cert_file: a, key_file: b}");
    assert!(told.contains("Cargo feature `tls`"), "{told}");
}

#[test]
fn an_empty_file_asks_for_nothing() {
    let folder = tempfile::tempdir().unwrap();
    for text in
        ["", "# nothing\n", "basic_auth_users:\nhttp_server_config:\n", "http_server_config: {http2: true}"]
    {
        let config = WebConfig::read(&write(folder.path(), text)).unwrap();
        assert!(config.tls.is_none() && config.users.is_empty() && config.headers.is_empty(), "{text}");
    }
}

#[test]
fn a_changed_file_is_noticed_and_a_broken_one_is_counted_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "http_server_config: {headers: {X-Frame-Options: deny}}");
    let telemetry = Telemetry::new();
    let watched = WatchedConfig::open(Some(path.clone()), telemetry.clone()).unwrap();
    let frame_options = || {
        watched.look(Duration::ZERO);
        watched.current.load().headers.first().map(|(_, value)| value.to_str().unwrap().to_owned())
    };
    let reloads = || {
        let families = telemetry.registry().gather();
        let family = families.iter().find(|it| it.name().contains("web_config_reloads")).unwrap();
        let values: Vec<f64> = family.get_metric().iter().map(|it| it.get_counter().get_value()).collect();
        // Sorted by label: accepted, refused.
        (values[0], values[1])
    };
    assert_eq!(frame_options().as_deref(), Some("deny"));
    fs::write(&path, "http_server_config: {headers: {X-Frame-Options: sameorigin}}").unwrap();
    assert_eq!(frame_options().as_deref(), Some("sameorigin"));
    assert_eq!(reloads(), (1.0, 0.0));
    fs::write(&path, "nonsense").unwrap();
    for _ in 0..3 {
        assert_eq!(frame_options().as_deref(), Some("sameorigin"), "the old one stays in force");
    }
    assert_eq!(reloads(), (1.0, 1.0));
    fs::remove_file(&path).unwrap();
    assert_eq!(frame_options().as_deref(), Some("sameorigin"));
    fs::write(&path, "").unwrap();
    assert_eq!(frame_options(), None);
    assert_eq!(reloads(), (2.0, 2.0));
    watched.reload();
    assert_eq!(reloads(), (3.0, 2.0));
}
