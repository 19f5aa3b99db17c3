//! A real Prometheus and a real Alertmanager on the loopback, a page for the one to scrape and a sink for the other.
#![allow(dead_code, reason = "no test uses all of it")]
#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Debian calls Alertmanager otherwise than its makers.
pub fn alertmanager_binary() -> Option<&'static str> {
    ["prometheus-alertmanager", "alertmanager"].into_iter().find(|name| has(name))
}

/// Whether a program is on the path.
pub fn has(program: &str) -> bool {
    let found = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    found.is_ok_and(|status| status.success())
}

pub fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// The body of an answer to GET, or `None` where nobody answers with 200.
pub fn get(address: SocketAddr, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n").ok()?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).ok()?;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) = answer.split_once("\r\n\r\n")?;
    head.split(' ').nth(1).filter(|status| *status == "200").map(|_| body.to_owned())
}

pub fn wait_for<T>(what: &str, limit: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < limit, "no {what} within {limit:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A server that is stopped with the test.
pub struct Server {
    pub address: SocketAddr,
    child: Child,
    _directory: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

fn start(program: &str, arguments: &[String], address: SocketAddr, directory: tempfile::TempDir) -> Server {
    let log = std::fs::File::create(directory.path().join("log")).unwrap();
    let child = Command::new(program)
        .args(arguments)
        .current_dir(directory.path())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap();
    let mut server = Server { address, child, _directory: directory };
    wait_for(program, Duration::from_secs(30), || {
        if let Some(status) = server.child.try_wait().unwrap() {
            panic!("{program} ended with {status}");
        }
        get(address, "/-/ready")
    });
    server
}

/// Alertmanager with one receiver, the webhook at `sink`, and these settings of the route.
pub fn alertmanager(sink: SocketAddr, route: &str) -> Server {
    let directory = tempfile::tempdir().unwrap();
    let address = free_address();
    let config = format!(
        "route: {{receiver: sink, {route}}}\nreceivers:\n- name: sink\n  webhook_configs: [{{url: 'http://{sink}/', send_resolved: true}}]\n"
    );
    std::fs::write(directory.path().join("alertmanager.yml"), config).unwrap();
    let arguments = [
        "--config.file=alertmanager.yml".into(),
        "--storage.path=data".into(),
        "--cluster.listen-address=".into(),
        format!("--web.listen-address={address}"),
    ];
    start(alertmanager_binary().unwrap(), &arguments, address, directory)
}

/// Prometheus with the project's alerting rules, scraping `page` as `job` and `instance`.
pub fn prometheus(page: SocketAddr, alertmanager: SocketAddr, interval: &str, instance: &str) -> Server {
    let directory = tempfile::tempdir().unwrap();
    let address = free_address();
    let rules = Path::new(env!("CARGO_MANIFEST_DIR")).join("alerts/mps-alerts.yml");
    let config = format!(
        "global: {{scrape_interval: {interval}, scrape_timeout: {interval}, evaluation_interval: {interval}, external_labels: {{site: lab}}}}\n\
         rule_files: ['{}']\n\
         alerting: {{alertmanagers: [{{static_configs: [{{targets: ['{alertmanager}']}}]}}]}}\n\
         scrape_configs: [{{job_name: mps, static_configs: [{{targets: ['{page}'], labels: {{instance: '{instance}'}}}}]}}]\n",
        rules.display()
    );
    std::fs::write(directory.path().join("prometheus.yml"), config).unwrap();
    let arguments = [
        "--config.file=prometheus.yml".into(),
        "--storage.tsdb.path=data".into(),
        format!("--web.listen-address={address}"),
    ];
    start("prometheus", &arguments, address, directory)
}

/// Answers every request with a text that the test sets, and keeps the bodies that it was sent.
pub struct Page {
    pub address: SocketAddr,
    pub text: Arc<Mutex<String>>,
    pub bodies: Arc<Mutex<Vec<(Instant, String)>>>,
}

impl Page {
    pub fn start() -> Page {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let page = Page { address, text: Arc::default(), bodies: Arc::default() };
        let (text, bodies) = (page.text.clone(), page.bodies.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (text, bodies) = (text.clone(), bodies.clone());
                std::thread::spawn(move || answer(stream, &text, &bodies));
            }
        });
        page
    }

    /// The notifications of Alertmanager that arrived: status and alert name of each alert in each.
    pub fn notifications(&self) -> Vec<(String, String)> {
        let bodies = self.bodies.lock().unwrap();
        let bodies = bodies.iter().map(|(_, body)| serde_json::from_str::<serde_json::Value>(body).unwrap());
        bodies
            .flat_map(|body| body["alerts"].as_array().unwrap().clone())
            .map(|alert| {
                let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
                (text(&alert["status"]), text(&alert["labels"]["alertname"]))
            })
            .collect()
    }
}

fn answer(mut stream: TcpStream, text: &Mutex<String>, bodies: &Mutex<Vec<(Instant, String)>>) {
    let mut request = Vec::new();
    let mut buffer = [0; 4096];
    let body = loop {
        let Ok(count @ 1..) = stream.read(&mut buffer) else { return };
        request.extend_from_slice(&buffer[..count]);
        let Some(end) = request.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
        let head = String::from_utf8_lossy(&request[..end]).to_ascii_lowercase();
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "))
            .map_or(0, |length| length.trim().parse().unwrap());
        if request.len() >= end + 4 + length {
            break String::from_utf8_lossy(&request[end + 4..]).into_owned();
        }
    };
    if !body.is_empty() {
        bodies.lock().unwrap().push((Instant::now(), body));
    }
    let text = text.lock().unwrap().clone();
    let _gone = write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
        text.len()
    );
}

/// What the exporter's page says of a mass client loss by a fault, on each of these GPUs at its time.
pub fn mass_loss_page(events: &[(u32, f64)]) -> String {
    use std::fmt::Write as _;
    let mut page = String::new();
    for (gpu, at) in events {
        let labels = format!(r#"fault_domain="default/{gpu}",gpu="{gpu}",UUID="GPU-{gpu}",GPU_I_ID="""#);
        write!(
            page,
            "mps_mass_client_loss_total{{{labels}}} 1\n\
             mps_mass_client_loss_last_clients{{{labels}}} 3\n\
             mps_mass_client_loss_last_timestamp_seconds{{{labels}}} {at}\n\
             mps_incidents_total{{{labels},cause=\"fault\"}} 1\n\
             mps_incident_last_timestamp_seconds{{{labels},cause=\"fault\"}} {at}\n"
        )
        .unwrap();
    }
    page
}
