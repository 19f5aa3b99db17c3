//! TLS, mutual TLS and basic authentication by a web configuration file, and its reload.
#![cfg(feature = "tls")]
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use mps_exporter::config::Collectors;
use mps_exporter::http::{AppState, BindError, Readiness, Server, WebOptions};
use mps_exporter::telemetry::Telemetry;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, SupportedProtocolVersion, version};
use support::nodes;
use support::server::{Answer, Running, request_on, serve};
use tokio::net::TcpStream;
use tokio::time::sleep;
use tokio_rustls::TlsConnector;

/// A certificate authority and what it signed, in a folder.
struct Authority {
    folder: tempfile::TempDir,
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// A certificate and its key as PEM.
struct Identity {
    certificate: String,
    key: String,
}

impl Authority {
    fn new() -> Authority {
        let mut parameters = CertificateParams::new(Vec::new()).unwrap();
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(parameters, KeyPair::generate().unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("ca.pem"), issuer.pem()).unwrap();
        Authority { folder, issuer }
    }

    fn sign(&self, name: &str) -> Identity {
        let key = KeyPair::generate().unwrap();
        let parameters = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = parameters.signed_by(&key, &self.issuer).unwrap();
        Identity { certificate: certificate.pem(), key: key.serialize_pem() }
    }

    fn write_server(&self, identity: &Identity) {
        fs::write(self.folder.path().join("server.pem"), &identity.certificate).unwrap();
        fs::write(self.folder.path().join("server.key"), &identity.key).unwrap();
    }

    /// A web configuration with a server certificate for localhost. File names are relative to it.
    fn config(&self, more: &str) -> PathBuf {
        if !self.folder.path().join("server.pem").exists() {
            self.write_server(&self.sign("localhost"));
        }
        let path = self.folder.path().join("web.yml");
        let text = format!("tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n{more}");
        fs::write(&path, text).unwrap();
        path
    }

    fn client(
        &self,
        identity: Option<&Identity>,
        versions: &[&'static SupportedProtocolVersion],
    ) -> TlsConnector {
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .unwrap()
            .with_root_certificates(roots);
        let config = match identity {
            None => config.with_no_client_auth(),
            Some(identity) => {
                let chain = vec![CertificateDer::from_pem_slice(identity.certificate.as_bytes()).unwrap()];
                let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes()).unwrap();
                config.with_client_auth_cert(chain, key).unwrap()
            }
        };
        TlsConnector::from(Arc::new(config))
    }
}

/// The answer over TLS, or the reason why there is none.
async fn get(server: &Running, client: &TlsConnector, head: &str) -> Result<Answer, String> {
    let stream = TcpStream::connect(server.address).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    let mut stream = client.connect(name, stream).await.map_err(|error| error.to_string())?;
    // With TLS 1.3 a refused client certificate shows only after the handshake.
    let answer = request_on(&mut stream, head).await;
    if answer.status == 0 { Err("closed without an answer".into()) } else { Ok(answer) }
}

const METRICS: &str = "GET /metrics HTTP/1.1\r\n";
const BOTH: &[&SupportedProtocolVersion] = &[&version::TLS12, &version::TLS13];

#[tokio::test]
async fn scrapes_go_over_tls_of_both_versions() {
    let authority = Authority::new();
    let server = serve(nodes::node(1, 1), Some(authority.config(""))).await;
    for versions in [&[&version::TLS12], &[&version::TLS13]] {
        let answer = get(&server, &authority.client(None, versions), METRICS).await.unwrap();
        assert_eq!(answer.status, 200);
    }
    let stranger = Authority::new().client(None, BOTH);
    assert!(get(&server, &stranger, METRICS).await.is_err(), "a client that does not know the authority");
    assert_eq!(server.get("/metrics").await.status, 0, "plain HTTP gets no answer");
}

#[tokio::test]
async fn versions_suites_and_curves_can_be_chosen() {
    let authority = Authority::new();
    let more = "  min_version: TLS12\n  max_version: TLS12\n  curve_preferences: [CurveP256]\n  cipher_suites: \
                [TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305]\n";
    let server = serve(nodes::empty(), Some(authority.config(more))).await;
    assert!(get(&server, &authority.client(None, &[&version::TLS12]), METRICS).await.is_ok());
    assert!(get(&server, &authority.client(None, &[&version::TLS13]), METRICS).await.is_err());
}

#[tokio::test]
async fn mutual_tls_lets_in_only_certificates_of_the_authority() {
    let authority = Authority::new();
    let more = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n";
    let server = serve(nodes::empty(), Some(authority.config(more))).await;
    let scraper = authority.sign("prometheus");
    let foreign = Authority::new().sign("prometheus");
    for versions in [&[&version::TLS12], &[&version::TLS13]] {
        assert_eq!(
            get(&server, &authority.client(Some(&scraper), versions), METRICS).await.unwrap().status,
            200
        );
        assert!(get(&server, &authority.client(None, versions), METRICS).await.is_err());
        assert!(get(&server, &authority.client(Some(&foreign), versions), METRICS).await.is_err());
    }
}

#[tokio::test]
async fn the_other_kinds_of_client_authentication() {
    let authority = Authority::new();
    let (scraper, foreign) = (authority.sign("prometheus"), Authority::new().sign("prometheus"));
    // kind, without certificate, with one of the authority, with a foreign one
    let cases = [
        ("VerifyClientCertIfGiven\n  client_ca_file: ca.pem", [true, true, false]),
        ("RequestClientCert", [true, true, true]),
        ("RequireAnyClientCert", [false, true, true]),
        (
            "RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n  client_allowed_sans: [prometheus]",
            [false, true, false],
        ),
        (
            "RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n  client_allowed_sans: [other]",
            [false, false, false],
        ),
    ];
    for (kind, expected) in cases {
        let more = format!("  client_auth_type: {kind}\n");
        let server = serve(nodes::empty(), Some(authority.config(&more))).await;
        for (identity, expected) in [None, Some(&scraper), Some(&foreign)].into_iter().zip(expected) {
            let answer = get(&server, &authority.client(identity, BOTH), METRICS).await;
            assert_eq!(answer.is_ok(), expected, "{kind} {:?}", answer.err());
        }
    }
}

#[tokio::test]
async fn a_renewed_certificate_is_served_without_a_restart() {
    let (old, new) = (Authority::new(), Authority::new());
    let server = serve(nodes::empty(), Some(old.config(""))).await;
    assert!(get(&server, &old.client(None, BOTH), METRICS).await.is_ok());

    // Half of a renewal: the key does not fit, and the old pair stays in force.
    let renewed = new.sign("localhost");
    fs::write(old.folder.path().join("server.key"), &renewed.key).unwrap();
    (server.reload)();
    assert!(get(&server, &old.client(None, BOTH), METRICS).await.is_ok());
    let page = get(&server, &old.client(None, BOTH), METRICS).await.unwrap();
    assert!(page.text().contains("mps_exporter_web_config_reloads_total{result=\"refused\"} 1\n"));

    old.write_server(&renewed);
    for attempt in 0.. {
        if get(&server, &new.client(None, BOTH), METRICS).await.is_ok() {
            break;
        }
        assert!(attempt < 30, "the new certificate is not noticed");
        sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn basic_authentication_guards_every_path() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("web.yml");
    let hash = bcrypt::hash("correct horse", 4).unwrap();
    fs::write(&path, format!("basic_auth_users: {{prometheus: {hash}}}\nhttp_server_config: {{headers: {{Strict-Transport-Security: max-age=1}}}}\n"))
        .unwrap();
    let server = serve(nodes::empty(), Some(path)).await;
    let with = |user: &str, password: &str| {
        let token = BASE64_STANDARD.encode(format!("{user}:{password}"));
        format!("Authorization: Basic {token}\r\n")
    };
    for path in ["/metrics", "/", "/-/healthy", "/api/v1/events"] {
        let answer = server.get(path).await;
        assert_eq!(answer.status, 401, "{path}");
        assert!(answer.header("www-authenticate").unwrap().starts_with("Basic"));
        assert_eq!(answer.header("strict-transport-security"), Some("max-age=1"));
    }
    let request = |header: String| format!("{METRICS}{header}");
    assert_eq!(server.request(&request(with("prometheus", "correct horse"))).await.status, 200);
    assert_eq!(server.request(&request(with("prometheus", "battery"))).await.status, 401);
    assert_eq!(server.request(&request(with("root", "correct horse"))).await.status, 401);
}

/// What the program says when it is started with this configuration.
async fn refusal(path: &Path) -> String {
    let (_, generations) = tokio::sync::watch::channel(0);
    let state = AppState {
        snapshots: Arc::new(arc_swap::ArcSwap::from_pointee(nodes::empty())),
        generations,
        incidents: tokio::sync::broadcast::channel(1).0,
        telemetry: Telemetry::new(),
        collectors: Arc::new(arc_swap::ArcSwap::from_pointee(Collectors::default())),
        readiness: Readiness::default(),
    };
    let options = WebOptions {
        listen: vec!["127.0.0.1:0".parse().unwrap()],
        systemd_socket: false,
        telemetry_path: "/metrics".into(),
        config_file: Some(path.to_owned()),
    };
    let error = Server::bind(&options, state).await.err().expect("the configuration was taken");
    assert!(matches!(error, BindError::Config(_)));
    format!("{:#}", anyhow::Error::from(error))
}

#[tokio::test]
async fn settings_that_cannot_be_honoured_are_refused_by_name() {
    let authority = Authority::new();
    let cases = [
        ("  min_version: TLS10\n", "`min_version`: `TLS10`"),
        ("  max_version: TLS12\n  min_version: TLS13\n", "`min_version` is above `max_version`"),
        ("  cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]\n", "`TLS_RSA_WITH_RC4_128_SHA` is not supported"),
        ("  curve_preferences: [CurveP521]\n", "`CurveP521` is not supported"),
        ("  client_auth_type: Maybe\n", "`client_auth_type`: `Maybe` is unknown"),
        ("  client_auth_type: RequireAndVerifyClientCert\n", "`client_ca_file` is missing"),
        ("  client_ca_file: ca.pem\n", "has no effect"),
        ("  client_allowed_sans: [x]\n", "`client_allowed_sans` needs"),
        (
            "  client_auth_type: VerifyClientCertIfGiven\n  client_ca_file: none.pem\n",
            "none.pem cannot be read",
        ),
        ("  client_auth_type: VerifyClientCertIfGiven\n  client_ca_file: web.yml\n", "no certificate in PEM"),
        ("  cert: inline\n", "unknown field `cert`"),
    ];
    for (more, expected) in cases {
        let told = refusal(&authority.config(more)).await;
        assert!(told.contains(expected), "{more}: {told}");
    }
    let path = authority.folder.path().join("web.yml");
    fs::write(&path, "tls_server_config: {cert_file: server.pem}\n").unwrap();
    assert!(refusal(&path).await.contains("`key_file` is missing"));
    fs::write(&path, "tls_server_config: {cert_file: server.pem, key_file: ca.pem}\n").unwrap();
    assert!(refusal(&path).await.contains("`key_file`"));
    fs::write(authority.folder.path().join("other.key"), authority.sign("x").key).unwrap();
    fs::write(&path, "tls_server_config: {cert_file: server.pem, key_file: other.key}\n").unwrap();
    assert!(refusal(&path).await.contains("cannot be used"), "a key of another certificate");
}

/// `mps-exporter status` is let in with what it is given, and says what is missing.
#[tokio::test]
async fn status_is_asked_for_over_tls_with_a_password() {
    let authority = Authority::new();
    let hash = bcrypt::hash("correct horse", 4).unwrap();
    let config = authority.config(&format!(
        "  client_auth_type: VerifyClientCertIfGiven\n  client_ca_file: ca.pem\nbasic_auth_users: {{operator: {hash}}}\n"
    ));
    let mut node = nodes::node(1, 2);
    node.incidents.clear();
    let server = serve(node, Some(config)).await;
    let password = authority.folder.path().join("password");
    fs::write(&password, "correct horse\n").unwrap();
    let wrong = authority.folder.path().join("wrong");
    fs::write(&wrong, "battery\n").unwrap();
    let (ca, password, wrong) = (authority.folder.path().join("ca.pem"), path(&password), path(&wrong));
    let ca = path(&ca);
    let url = format!("https://localhost:{}", server.address.port());
    let status = async |arguments: &[&str]| {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_mps-exporter"));
        let output = command.args(["status", "--url", &url]).args(arguments).output().await.unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).unwrap())
    };
    let identity = authority.sign("operator");
    let (certificate, key) = (authority.folder.path().join("me.pem"), authority.folder.path().join("me.key"));
    fs::write(&certificate, identity.certificate).unwrap();
    fs::write(&key, identity.key).unwrap();
    let trusting = ["--tls.ca-file", ca, "--user", "operator", "--password-file"];

    let (code, text) = status(&[&trusting[..], &[password]].concat()).await;
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("2 clients on 1 fault domain"), "{text}");
    let blind = ["--tls.insecure-skip-verify", "--user", "operator", "--password-file", password];
    assert_eq!(status(&blind).await.0, Some(0));
    let shown = ["--tls.cert-file", path(&certificate), "--tls.key-file", path(&key)];
    assert_eq!(status(&[&trusting[..], &[password], &shown[..]].concat()).await.0, Some(0));

    for (arguments, expected) in [
        (vec!["--user", "operator", "--password-file", password], "--tls.ca-file says whom to trust"),
        (vec!["--tls.ca-file", ca], "--user and --password-file give it"),
        ([&trusting[..], &[wrong]].concat(), "the user or the password is wrong"),
        ([&trusting[..], &["/nowhere"]].concat(), "the password in /nowhere: No such file"),
    ] {
        let (code, text) = status(&arguments).await;
        assert!(code == Some(1) && text.contains(expected), "{arguments:?}: {text}");
    }
}

/// What an exporter's TLS wants, and what `mps-exporter status` says when it is not given.
#[tokio::test]
async fn status_says_what_a_connection_wants() {
    let authority = Authority::new();
    let ca = authority.folder.path().join("ca.pem");
    let status = async |url: &str, arguments: &[&str]| {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_mps-exporter"));
        let output = command.args(["status", "--url", url]).args(arguments).output().await.unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    for version in ["TLS12", "TLS13"] {
        let more = format!(
            "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n  min_version: {version}\n  \
             max_version: {version}\n"
        );
        let server = serve(nodes::empty(), Some(authority.config(&more))).await;
        let port = server.address.port();
        // The refusal comes after the handshake, and perhaps when the question is on its way.
        for _ in 0..10 {
            let told = status(&format!("https://localhost:{port}"), &["--tls.ca-file", path(&ca)]).await;
            assert!(
                told.contains("; --tls.cert-file and --tls.key-file show a certificate"),
                "{version}: {told}"
            );
            assert!(!told.contains("https://?"), "{version}: {told}");
        }
        let plain = status(&format!("http://localhost:{port}"), &[]).await;
        assert!(plain.contains("; does it want https://?"), "{version}: {plain}");
        let useless = status(&format!("http://localhost:{port}"), &["--tls.ca-file", path(&ca)]).await;
        assert!(useless.contains("--tls.* has no effect on http://"), "{useless}");
    }
}

fn path(path: &Path) -> &str {
    path.to_str().unwrap()
}
