//! The web endpoints over loopback, with well-behaved and with rude peers.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::io::Read as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mps_exporter::engine::incident::{Cause, Change, IncidentChange};
use mps_exporter::engine::snapshot::Snapshot;
use mps_exporter::http::{BindError, Server, WebOptions};
use support::nodes;
use support::open_metrics;
use support::server::{Running, read_answer, request_on, serve, serve_with};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{sleep, timeout};

#[tokio::test]
async fn metrics_come_in_the_format_and_encoding_that_was_asked_for() {
    let server = serve(nodes::node(2, 3), None).await;
    let plain = server.get("/metrics").await;
    assert_eq!(plain.status, 200);
    assert_eq!(plain.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    assert_eq!(plain.header("vary"), Some("Accept, Accept-Encoding"));
    assert_eq!(plain.header("x-content-type-options"), Some("nosniff"));
    assert_eq!(plain.header("content-encoding"), None);
    assert!(plain.text().contains("\nmps_server_clients{daemon=\"default\",server=\"uid_1000\"} 6\n"));

    let accept = "Accept: application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5\r\n";
    let prometheus = format!("GET /metrics HTTP/1.1\r\n{accept}Accept-Encoding: gzip\r\n");
    let packed = server.request(&prometheus).await;
    assert_eq!(
        packed.header("content-type"),
        Some("application/openmetrics-text; version=1.0.0; charset=utf-8")
    );
    assert_eq!(packed.header("content-encoding"), Some("gzip"));
    let mut page = String::new();
    flate2::read::GzDecoder::new(&*packed.body).read_to_string(&mut page).unwrap();
    open_metrics::parse(&page).unwrap();

    let refused = server.request("GET /metrics HTTP/1.1\r\nAccept-Encoding: gzip;q=0, identity\r\n").await;
    assert_eq!(refused.header("content-encoding"), None);
}

#[tokio::test]
async fn paths_and_methods() {
    let server = serve(nodes::node(1, 1), None).await;
    for (path, kind) in [
        ("/", "text/html; charset=utf-8"),
        ("/page/state", "text/html; charset=utf-8"),
        ("/page/style.css", "text/css; charset=utf-8"),
        ("/page/app.js", "text/javascript; charset=utf-8"),
        ("/page/icon.svg", "image/svg+xml"),
        ("/api/v1/fault-domains", "application/json"),
        ("/api/v1/incidents?limit=5", "application/json"),
        ("/api/v1/status", "application/json"),
        ("/-/healthy", "text/plain; charset=utf-8"),
    ] {
        let answer = server.get(path).await;
        assert_eq!((answer.status, answer.header("content-type")), (200, Some(kind)), "{path}");
    }
    assert!(
        server.get("/").await.header("content-security-policy").unwrap().starts_with("default-src 'none'")
    );
    assert_eq!(server.get("/metricsx").await.status, 404);
    assert_eq!(server.get("/../etc/passwd").await.status, 404);
    assert_eq!(server.get("/api/v1/incidents?limit=many").await.status, 400);
    let posted = server.request("POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n").await;
    assert_eq!((posted.status, posted.header("allow")), (405, Some("GET, HEAD")));

    let head = server.request("HEAD /metrics HTTP/1.1\r\n").await;
    let length: usize = head.header("content-length").unwrap().parse().unwrap();
    assert!(head.status == 200 && head.body.is_empty() && length > 1000);
}

#[tokio::test]
async fn ready_only_after_the_first_picture() {
    let mut server = serve(nodes::empty(), None).await;
    assert_eq!(server.get("/-/ready").await.status, 503);
    assert_eq!(server.get("/-/healthy").await.status, 200);
    assert_eq!(server.get("/metrics").await.status, 200, "an exporter that knows nothing says so");
    server.latch = None;
    assert_eq!(server.get("/-/ready").await.status, 200);
}

#[tokio::test]
async fn a_change_is_in_the_next_scrape() {
    let server = serve(nodes::node(1, 1), None).await;
    let clients = |text: &str| {
        let line = text.lines().find(|line| line.starts_with("mps_server_clients{")).unwrap();
        line.rsplit_once(' ').unwrap().1.to_owned()
    };
    assert_eq!(clients(server.get("/metrics").await.text()), "1");
    server.snapshots.store(Arc::new(Snapshot { generation: 2, ..nodes::node(1, 5) }));
    assert_eq!(clients(server.get("/metrics").await.text()), "5");
}

#[tokio::test]
async fn events_tell_of_snapshots_and_incidents_until_the_end() {
    let server = serve(nodes::node(1, 2), None).await;
    let mut stream = server.connect().await;
    stream.write_all(b"GET /api/v1/events HTTP/1.1\r\nHost: test\r\n\r\n").await.unwrap();
    let mut seen = String::new();
    read_until(&mut stream, &mut seen, "\"generation\":1,").await;
    assert!(seen.contains("content-type: text/event-stream"), "{seen}");
    assert!(seen.contains("event: snapshot\ndata: {"), "{seen}");

    server.snapshots.store(Arc::new(Snapshot { generation: 2, ..nodes::node(1, 3) }));
    server.generations.send(2).unwrap();
    read_until(&mut stream, &mut seen, "\"generation\":2,").await;
    let incident = Arc::new(nodes::incident("0195f0000002-1", Cause::Gpu, "default/0"));
    server.incidents.send(IncidentChange { change: Change::Opened, incident }).unwrap();
    read_until(&mut stream, &mut seen, "0195f0000002-1").await;
    assert!(seen.contains("event: incident\ndata: {\"change\":\"opened\",\"incident\":{"), "{seen}");

    server.stop.send(true).unwrap();
    let ended = timeout(Duration::from_secs(3), stream.read_to_string(&mut seen)).await;
    assert!(ended.is_ok(), "the stream ends with the program");
    timeout(Duration::from_secs(3), server.serving).await.unwrap().unwrap();
}

async fn read_until(stream: &mut TcpStream, seen: &mut String, what: &str) {
    let reading = async {
        let mut buffer = [0; 4096];
        while !seen.contains(what) {
            let read = stream.read(&mut buffer).await.unwrap();
            assert!(read > 0, "the stream ended: {seen}");
            seen.push_str(std::str::from_utf8(&buffer[..read]).unwrap());
        }
    };
    timeout(Duration::from_secs(5), reading).await.unwrap_or_else(|_| panic!("no {what}"));
}

#[tokio::test]
async fn event_streams_are_limited() {
    let server = serve(nodes::empty(), None).await;
    let mut streams = Vec::new();
    for _ in 0..16 {
        let mut stream = server.connect().await;
        stream.write_all(b"GET /api/v1/events HTTP/1.1\r\nHost: test\r\n\r\n").await.unwrap();
        read_until(&mut stream, &mut String::new(), "generation").await;
        streams.push(stream);
    }
    let refused = server.get("/api/v1/events").await;
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("10")));
    assert_eq!(server.get("/metrics").await.status, 200);
    streams.pop();
    for attempt in 0.. {
        let mut stream = server.connect().await;
        stream.write_all(b"GET /api/v1/events HTTP/1.1\r\nHost: test\r\n\r\n").await.unwrap();
        let mut start = [0; 12];
        stream.read_exact(&mut start).await.unwrap();
        if &start == b"HTTP/1.1 200" {
            break;
        }
        assert!(attempt < 50, "the place of a reader that is gone is not free");
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn two_hundred_silent_peers_do_not_keep_out_a_scraper() {
    let server = serve(nodes::node(1, 1), None).await;
    let mut silent = Vec::new();
    for number in 0..200 {
        let mut stream = server.connect().await;
        if number % 2 == 0 {
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: slow").await.unwrap();
        }
        silent.push(stream);
    }
    let start = Instant::now();
    assert_eq!(server.get("/metrics").await.status, 200);
    assert!(start.elapsed() < Duration::from_secs(3), "took {:?}", start.elapsed());
}

#[tokio::test]
async fn a_head_that_is_too_long_is_refused() {
    let server = serve(nodes::empty(), None).await;
    let mut stream = server.connect().await;
    let long = format!("GET /metrics HTTP/1.1\r\nHost: x\r\nX-Long: {}\r\n\r\n", "x".repeat(64 * 1024));
    // The server may close before all of it is sent.
    let _may_break = stream.write_all(long.as_bytes()).await;
    let mut bytes = Vec::new();
    let _reset = timeout(Duration::from_secs(5), stream.read_to_end(&mut bytes)).await.unwrap();
    let answer = String::from_utf8_lossy(&bytes);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431"), "{answer}");

    let mut stream = server.connect().await;
    stream.write_all(b"\x16\x03\x01 this is no HTTP\r\n\r\n").await.unwrap();
    assert!([0, 400].contains(&read_answer(&mut stream).await.status));
    assert_eq!(server.get("/metrics").await.status, 200);
}

#[tokio::test]
async fn a_slow_head_is_given_up_and_a_quiet_event_stream_is_not() {
    let server = serve(nodes::empty(), None).await;
    let mut events = server.connect().await;
    events.write_all(b"GET /api/v1/events HTTP/1.1\r\nHost: test\r\n\r\n").await.unwrap();
    let mut stream = server.connect().await;
    let start = Instant::now();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n").await.unwrap();
    let trickle = async {
        loop {
            sleep(Duration::from_millis(500)).await;
            if stream.write_all(b"X-A: b\r\n").await.is_err() {
                return;
            }
        }
    };
    timeout(Duration::from_secs(15), trickle).await.expect("closed within 15 s");
    assert!(start.elapsed() >= Duration::from_secs(9), "closed after {:?}", start.elapsed());
    read_until(&mut events, &mut String::new(), "event: snapshot").await;
    server.snapshots.store(Arc::new(Snapshot { generation: 9, ..nodes::empty() }));
    server.generations.send(9).unwrap();
    read_until(&mut events, &mut String::new(), "\"generation\":9,").await;
}

#[tokio::test]
async fn answers_under_way_are_finished_and_new_peers_refused() {
    let Running { address, stop, serving, .. } = serve(nodes::node(8, 48), None).await;
    let mut idle = TcpStream::connect(address).await.unwrap();
    let mut asked = TcpStream::connect(address).await.unwrap();
    asked.write_all(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n").await.unwrap();
    asked.readable().await.unwrap();
    stop.send(true).unwrap();
    assert_eq!(read_answer(&mut asked).await.status, 200);
    timeout(Duration::from_secs(3), serving).await.unwrap().unwrap();
    assert!(TcpStream::connect(address).await.is_err(), "nobody listens any more");
    assert_eq!(idle.read(&mut [0; 1]).await.unwrap_or(0), 0);
}

#[tokio::test]
async fn several_addresses_and_another_path() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("exporter.sock");
    let options = WebOptions {
        listen: vec![
            "127.0.0.1:0".parse().unwrap(),
            format!("unix:{}", socket.display()).parse().unwrap(),
            ":0".parse().unwrap(),
        ],
        systemd_socket: false,
        telemetry_path: "/probe".into(),
        config_file: None,
    };
    let server = serve_with(&options, nodes::empty()).await;
    assert_eq!(server.get("/probe").await.status, 200);
    assert_eq!(server.get("/metrics").await.status, 404);
    assert!(server.get("/").await.text().contains("href=\"./probe\""));
    let mut local = UnixStream::connect(&socket).await.unwrap();
    assert_eq!(request_on(&mut local, "GET /probe HTTP/1.1\r\n").await.status, 200);
    server.stop.send(true).unwrap();
    server.serving.await.unwrap();
    assert!(!socket.exists());
}

#[tokio::test]
async fn an_address_that_is_taken_is_an_error() {
    let server = serve(nodes::empty(), None).await;
    let options = WebOptions {
        listen: vec![server.address.to_string().parse().unwrap()],
        systemd_socket: false,
        telemetry_path: "/metrics".into(),
        config_file: None,
    };
    let (_, generations) = tokio::sync::watch::channel(0);
    let state = mps_exporter::http::AppState {
        snapshots: server.snapshots.clone(),
        generations,
        incidents: server.incidents.clone(),
        telemetry: server.telemetry.clone(),
        collectors: std::sync::Arc::default(),
        readiness: mps_exporter::http::Readiness::default(),
    };
    let error = Server::bind(&options, state).await.err().unwrap();
    assert!(matches!(error, BindError::Listen(_)));
    assert!(error.to_string().contains("another process uses it"), "{error}");
}
