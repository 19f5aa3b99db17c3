//! The Alertmanager outlet against an Alertmanager that fails in every way.
#![cfg(feature = "tls")]
#![allow(missing_docs, clippy::unwrap_used)]

#[path = "support/fake_alertmanager.rs"]
mod fake_alertmanager;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fake_alertmanager::{Answer, FakeAlertmanager};
use mps_exporter::config::{Alertmanager, BasicAuth, ClientTls, Config, Secret};
use mps_exporter::engine::incident::{Cause, Change, Incident, IncidentChange, IncidentState};
use mps_exporter::outlet::Outlets;
use mps_exporter::outlet::alertmanager::{AlertmanagerOutlet, Timing};
use mps_exporter::source::Shutdown;
use mps_exporter::telemetry::Telemetry;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Times short enough for a test.
const TIMING: Timing = Timing {
    resend: Duration::from_millis(200),
    lapse: Duration::from_millis(1200),
    update: Duration::from_millis(50),
    backoff: Duration::from_millis(20),
    max_backoff: Duration::from_millis(100),
};

fn config(url: String) -> Alertmanager {
    Alertmanager {
        url,
        labels: BTreeMap::from([("job".into(), "mps".into())]),
        runbooks: None,
        basic_auth: None,
        bearer_token_file: None,
        tls: ClientTls::default(),
        resolve: false,
        timeout: Duration::from_millis(300),
        max_age: Duration::from_secs(900),
    }
}

/// An incident with one alert that has just begun.
fn incident() -> Arc<Incident> {
    let incident: Incident = serde_json::from_str(include_str!("support/incident.json")).unwrap();
    Arc::new(Incident { cause: Cause::Gpu, started_at: jiff::Timestamp::now(), ..incident })
}

fn with_state(incident: &Arc<Incident>, state: IncidentState) -> Arc<Incident> {
    Arc::new(Incident { state, ..Incident::clone(incident) })
}

/// A running outlet.
struct Running {
    outlet: Arc<AlertmanagerOutlet>,
    telemetry: Telemetry,
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

fn run(config: &Alertmanager) -> Running {
    let telemetry = Telemetry::new();
    let outlet = Arc::new(AlertmanagerOutlet::new(config, TIMING, &telemetry).unwrap());
    let (stop, shutdown) = Shutdown::new();
    let task = tokio::spawn(outlet.clone().run(shutdown));
    Running { outlet, telemetry, stop, task }
}

impl Running {
    /// `mps_alerts_sent_total` with this result.
    fn sent(&self, result: &str) -> f64 {
        let families = self.telemetry.registry().gather();
        let family = families.iter().find(|family| family.name() == "mps_alerts_sent_total").unwrap();
        let has = |metric: &&prometheus::proto::Metric| {
            metric.get_label().iter().any(|label| label.value() == result)
        };
        family.get_metric().iter().find(has).unwrap().get_counter().get_value()
    }
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..500 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("it did not come to this within 5 s: {what}");
}

#[tokio::test]
async fn an_alert_is_posted_as_the_api_wants_it_and_again_while_the_incident_is_open() {
    let fake = FakeAlertmanager::start(Answer::Status(200), None).await;
    let running = run(&config(format!("http://{}/prefix/", fake.address)));
    let incident = incident();
    running.outlet.notify(&incident);
    until("three posts", || fake.posts().len() >= 3).await;
    let posts = fake.posts();
    assert_eq!(
        (posts[0].path.as_str(), posts[0].content_type.as_str()),
        ("/prefix/api/v2/alerts", "application/json")
    );
    assert!(posts[1].at - posts[0].at >= Duration::from_millis(150), "not more often than it must");
    assert_eq!(posts[0].alerts[0]["startsAt"], serde_json::to_value(incident.started_at).unwrap());
    running.outlet.notify(&with_state(&incident, IncidentState::Closed));
    tokio::time::sleep(Duration::from_millis(100)).await;
    let count = fake.posts().len();
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(fake.posts().len(), count, "after the close it lapses");
    assert_eq!(running.outlet.held(), 0);
}

#[tokio::test]
async fn every_alertmanager_is_told_even_when_another_hangs() {
    let hanging = FakeAlertmanager::start(Answer::Hang, None).await;
    let well = FakeAlertmanager::start(Answer::Status(200), None).await;
    let configured = Config {
        alertmanagers: [&hanging, &well].map(|fake| config(format!("http://{}", fake.address))).to_vec(),
        state: mps_exporter::config::State { directory: None, incidents_kept: 1 },
        ..Config::default()
    };
    let (outlets, stop, task) = run_all(&configured);
    outlets.incident(&IncidentChange { change: Change::Opened, incident: incident() });
    until("the other is told", || !well.accepted().is_empty()).await;
    assert!(hanging.posts().is_empty());
    stop.send(true).unwrap();
    tokio::time::timeout(Duration::from_secs(4), task).await.unwrap().unwrap();
}

fn run_all(config: &Config) -> (Arc<Outlets>, watch::Sender<bool>, JoinHandle<()>) {
    let (outlets, _) = Outlets::new(config, empty_snapshot(), &Telemetry::new()).unwrap();
    let (stop, shutdown) = Shutdown::new();
    let task = tokio::spawn(outlets.clone().run(shutdown));
    (outlets, stop, task)
}

fn empty_snapshot() -> Arc<arc_swap::ArcSwap<mps_exporter::engine::snapshot::Snapshot>> {
    Arc::new(arc_swap::ArcSwap::from_pointee(mps_exporter::engine::snapshot::Snapshot {
        generation: 0,
        at: jiff::Timestamp::UNIX_EPOCH,
        daemons: Vec::new(),
        servers: Vec::new(),
        domains: Vec::new(),
        clients: Vec::new(),
        gpus: Vec::new(),
        xids: Vec::new(),
        sources: Vec::new(),
        incidents: Vec::new(),
        disagreements: Vec::new(),
    }))
}

#[tokio::test]
async fn failures_are_tried_again_until_it_works_and_each_is_counted() {
    let fake = FakeAlertmanager::start(Answer::Status(500), None).await;
    let running = run(&config(format!("http://{}", fake.address)));
    running.outlet.notify(&incident());
    until("three failures", || running.sent("error") >= 3.0).await;
    fake.answers(Answer::Hang);
    until("a timeout", || running.sent("timeout") >= 1.0).await;
    fake.answers(Answer::Slow(Duration::from_millis(100)));
    until("success", || running.sent("ok") >= 1.0).await;
    fake.answers(Answer::Status(400));
    until("a refusal", || running.sent("refused") >= 1.0).await;
    assert_eq!(running.outlet.held(), 1);
}

#[tokio::test]
async fn an_alertmanager_that_comes_back_learns_of_open_and_of_brief_incidents() {
    let fake = FakeAlertmanager::start(Answer::Status(200), None).await;
    let address = fake.stop().await;
    let running = run(&config(format!("http://{address}")));
    let (open, brief) = (incident(), incident());
    let brief = Arc::new(Incident {
        id: "019b2c4d5e70-0".into(),
        fault_domains: vec!["default/1".into()],
        ..Incident::clone(&brief)
    });
    running.outlet.notify(&open);
    running.outlet.notify(&brief);
    running.outlet.notify(&with_state(&brief, IncidentState::Closed));
    until("failures", || running.sent("unreachable") >= 5.0).await;
    let fake = FakeAlertmanager::start_at(address, Answer::Status(200), None).await;
    let has = |domain: &str| fake.accepted().iter().any(|alert| alert["labels"]["fault_domain"] == domain);
    until("both", || has("default/0") && has("default/1")).await;
    let ends_at: jiff::Timestamp = fake.accepted()[0]["endsAt"].as_str().unwrap().parse().unwrap();
    assert!(ends_at > jiff::Timestamp::now(), "an alert that is over when it comes pages nobody");
}

#[tokio::test]
async fn news_does_not_wait_for_the_pause_after_a_failure() {
    let fake = FakeAlertmanager::start(Answer::Status(503), None).await;
    let telemetry = Telemetry::new();
    let timing = Timing {
        backoff: Duration::from_millis(100),
        max_backoff: Duration::from_secs(3600),
        resend: Duration::from_secs(3600),
        ..TIMING
    };
    let outlet =
        AlertmanagerOutlet::new(&config(format!("http://{}", fake.address)), timing, &telemetry).unwrap();
    let outlet = Arc::new(outlet);
    let (_stop, shutdown) = Shutdown::new();
    tokio::spawn(outlet.clone().run(shutdown));
    outlet.notify(&incident());
    // 50 to 100 ms, 100 to 200, and so on: the sixth pause is at least 1.6 s.
    until("five failures", || fake.posts().len() >= 6).await;
    fake.answers(Answer::Status(200));
    let incident = Incident { fault_domains: vec!["default/1".into()], ..Incident::clone(&incident()) };
    let asked = std::time::Instant::now();
    outlet.notify(&Arc::new(incident));
    until("both", || fake.accepted().len() == 2).await;
    assert!(asked.elapsed() < Duration::from_millis(800), "{:?}", asked.elapsed());
}

#[tokio::test]
async fn passwords_and_tokens_are_read_at_each_post() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("secret");
    let fake = FakeAlertmanager::start(Answer::For("Bearer new-token".into()), None).await;
    let mut config = config(format!("http://{}", fake.address));
    config.bearer_token_file = Some(file.clone());
    let running = run(&config);
    running.outlet.notify(&incident());
    until("no file", || running.sent("unauthorized") >= 1.0).await;
    assert!(fake.posts().is_empty(), "nothing is sent without the token");
    std::fs::write(&file, "old-token\n").unwrap();
    until("the wrong token", || !fake.posts().is_empty()).await;
    std::fs::write(&file, "new-token\n").unwrap();
    until("the right token", || running.sent("ok") >= 1.0).await;

    // echo -n 'mps:pa:ss' | base64
    fake.answers(Answer::For("Basic bXBzOnBhOnNz".into()));
    std::fs::write(&file, "pa:ss\n").unwrap();
    config.bearer_token_file = None;
    config.basic_auth = Some(BasicAuth { username: "mps".into(), password: Secret::File(file) });
    let running = run(&config);
    running.outlet.notify(&incident());
    until("the password", || running.sent("ok") >= 1.0).await;
}

#[tokio::test]
async fn what_waits_is_posted_before_the_program_stops() {
    let fake = FakeAlertmanager::start(Answer::Status(200), None).await;
    let configured = Config {
        alertmanagers: vec![config(format!("http://{}", fake.address))],
        state: mps_exporter::config::State { directory: None, incidents_kept: 1 },
        ..Config::default()
    };
    let (outlets, stop, task) = run_all(&configured);
    outlets.incident(&IncidentChange { change: Change::Updated, incident: incident() });
    stop.send(true).unwrap();
    task.await.unwrap();
    assert_eq!(fake.accepted().len(), 1);
}

#[tokio::test]
async fn an_incident_is_on_the_disk_before_its_alert_leaves() {
    let directory = tempfile::tempdir().unwrap();
    let fake = FakeAlertmanager::start(Answer::Status(200), None).await;
    let configured = Config {
        alertmanagers: vec![config(format!("http://{}", fake.address))],
        state: mps_exporter::config::State { directory: Some(directory.path().into()), incidents_kept: 100 },
        ..Config::default()
    };
    let (outlets, stop, task) = run_all(&configured);
    for number in 0..20 {
        let incident = Incident {
            id: format!("019b2c4d5e6f-{number}").into(),
            fault_domains: vec![format!("default/{number}").into()],
            ..Incident::clone(&incident())
        };
        outlets.incident(&IncidentChange { change: Change::Opened, incident: Arc::new(incident) });
        // Looked at as often as the runtime allows: the first time that the post is there, the line is too.
        while fake.accepted().len() <= number {
            tokio::task::yield_now().await;
        }
        let journal = std::fs::read_to_string(directory.path().join("incidents.jsonl")).unwrap();
        assert_eq!(journal.lines().count(), number + 1);
    }
    stop.send(true).unwrap();
    task.await.unwrap();
}

/// A certificate authority and what it signed.
struct Authority {
    certificate: rcgen::Certificate,
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
}

impl Authority {
    fn new() -> Authority {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut parameters = rcgen::CertificateParams::new(Vec::new()).unwrap();
        parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let certificate = parameters.self_signed(&key).unwrap();
        Authority { certificate, issuer: rcgen::Issuer::new(parameters, key) }
    }

    fn sign(&self, name: &str) -> (String, String) {
        let key = rcgen::KeyPair::generate().unwrap();
        let parameters = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        (parameters.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }
}

/// A server for `name` that wants client certificates of `clients`.
fn tls_server(authority: &Authority, name: &str, clients: Option<&Authority>) -> tokio_rustls::TlsAcceptor {
    use rustls::pki_types::pem::PemObject;
    use rustls::pki_types::{CertificateDer, PrivateKeyDer};
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let (certificate, key) = authority.sign(name);
    let builder = rustls::ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .unwrap();
    let builder = match clients {
        Some(clients) => {
            let mut roots = rustls::RootCertStore::empty();
            roots.add(clients.certificate.der().clone()).unwrap();
            let verifier =
                rustls::server::WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            builder.with_client_cert_verifier(verifier.build().unwrap())
        }
        None => builder.with_no_client_auth(),
    };
    let config = builder
        .with_single_cert(
            vec![CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()],
            PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap(),
        )
        .unwrap();
    tokio_rustls::TlsAcceptor::from(Arc::new(config))
}

fn write(directory: &Path, name: &str, text: &str) -> std::path::PathBuf {
    let path = directory.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

#[tokio::test]
async fn tls_trusts_the_configured_authority_only_and_files_are_read_again() {
    let directory = tempfile::tempdir().unwrap();
    let (ours, other) = (Authority::new(), Authority::new());
    let fake =
        FakeAlertmanager::start(Answer::Status(200), Some(tls_server(&ours, "am.example", None))).await;
    let mut config = config(format!("https://{}", fake.address));
    config.timeout = Duration::from_secs(2);
    config.tls.ca_file = Some(write(directory.path(), "ca.pem", &other.certificate.pem()));
    config.tls.server_name = Some("am.example".into());
    let running = run(&config);
    running.outlet.notify(&incident());
    until("refused: another authority", || running.sent("unreachable") >= 2.0).await;
    // Another length, so that the change is seen within the clock's grain too.
    write(directory.path(), "ca.pem", &format!("{}\n\n", ours.certificate.pem()));
    until("trusted", || running.sent("ok") >= 1.0).await;

    config.tls.server_name = None;
    let running = run(&config);
    running.outlet.notify(&incident());
    until("refused: another name", || running.sent("unreachable") >= 2.0).await;

    config.tls.insecure_skip_verify = true;
    let running = run(&config);
    running.outlet.notify(&incident());
    until("trusted blindly", || running.sent("ok") >= 1.0).await;
}

#[tokio::test]
async fn a_client_certificate_is_shown_where_one_is_configured() {
    let directory = tempfile::tempdir().unwrap();
    let authority = Authority::new();
    let server = tls_server(&authority, "localhost", Some(&authority));
    let fake = FakeAlertmanager::start(Answer::Status(200), Some(server)).await;
    let mut config = config(format!("https://localhost:{}", fake.address.port()));
    config.timeout = Duration::from_secs(2);
    config.tls.ca_file = Some(write(directory.path(), "ca.pem", &authority.certificate.pem()));
    let running = run(&config);
    running.outlet.notify(&incident());
    until("refused without", || running.sent("unreachable") + running.sent("error") >= 1.0).await;

    let (certificate, key) = authority.sign("mps-exporter");
    config.tls.cert_file = Some(write(directory.path(), "client.pem", &certificate));
    config.tls.key_file = Some(write(directory.path(), "client.key", &key));
    let running = run(&config);
    running.outlet.notify(&incident());
    until("accepted with", || running.sent("ok") >= 1.0).await;
    running.stop.send(true).unwrap();
    running.task.await.unwrap();
}
