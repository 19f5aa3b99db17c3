//! A server on a free port, with hands on everything that it shows.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use mps_exporter::config::Collectors;
use mps_exporter::engine::incident::IncidentChange;
use mps_exporter::engine::snapshot::Snapshot;
use mps_exporter::http::{AppState, Latch, Readiness, Server, WebOptions};
use mps_exporter::source::Shutdown;
use mps_exporter::telemetry::Telemetry;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{broadcast, watch};
use tokio::task::JoinHandle;

/// A running server.
pub struct Running {
    pub address: SocketAddr,
    pub snapshots: Arc<ArcSwap<Snapshot>>,
    pub generations: watch::Sender<u64>,
    pub incidents: broadcast::Sender<IncidentChange>,
    pub telemetry: Telemetry,
    pub latch: Option<Latch>,
    pub reload: Box<dyn Fn()>,
    pub stop: watch::Sender<bool>,
    pub serving: JoinHandle<()>,
}

/// Serves `snapshot` on 127.0.0.1.
pub async fn serve(snapshot: Snapshot, config_file: Option<PathBuf>) -> Running {
    let options = WebOptions {
        listen: vec!["127.0.0.1:0".parse().unwrap()],
        systemd_socket: false,
        telemetry_path: "/metrics".into(),
        config_file,
    };
    serve_with(&options, snapshot).await
}

/// Serves `snapshot` as the options say.
pub async fn serve_with(options: &WebOptions, snapshot: Snapshot) -> Running {
    let (generations, generation) = watch::channel(snapshot.generation);
    let snapshots = Arc::new(ArcSwap::from_pointee(snapshot));
    let (incidents, _) = broadcast::channel(16);
    let telemetry = Telemetry::new();
    let (latch, readiness) = Readiness::new();
    let state = AppState {
        snapshots: snapshots.clone(),
        generations: generation,
        incidents: incidents.clone(),
        telemetry: telemetry.clone(),
        collectors: Arc::new(ArcSwap::from_pointee(Collectors::default())),
        readiness,
    };
    let server = Server::bind(options, state).await.unwrap();
    let address = server.tcp_addresses().first().copied().unwrap_or(([0, 0, 0, 0], 0).into());
    let reload = Box::new(server.reloader());
    let (stop, shutdown) = Shutdown::new();
    let serving = tokio::spawn(server.serve(shutdown));
    Running {
        address,
        snapshots,
        generations,
        incidents,
        telemetry,
        latch: Some(latch),
        reload,
        stop,
        serving,
    }
}

impl Running {
    pub async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Sends a request on a connection of its own.
    pub async fn request(&self, head: &str) -> Answer {
        request_on(&mut self.connect().await, head).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.request(&format!("GET {path} HTTP/1.1\r\n")).await
    }
}

/// Sends a request head (without `Host` and the final line) and reads until the peer closes.
pub async fn request_on<S: AsyncReadExt + AsyncWriteExt + Unpin>(stream: &mut S, head: &str) -> Answer {
    let request = format!("{head}Host: test\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    read_answer(stream).await
}

/// Reads an answer until the peer closes.
pub async fn read_answer<S: AsyncReadExt + Unpin>(stream: &mut S) -> Answer {
    let mut bytes = Vec::new();
    let reading = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut bytes)).await;
    // A TLS peer that closes without its goodbye is no matter here.
    let _end = reading.expect("an answer within 20 s");
    Answer::parse(&bytes)
}

/// An HTTP answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Answer {
    fn parse(bytes: &[u8]) -> Answer {
        let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else {
            return Answer { status: 0, head: String::from_utf8_lossy(bytes).into_owned(), body: Vec::new() };
        };
        let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        Answer { status, head, body: bytes[end + 4..].to_vec() }
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("a body in UTF-8")
    }

    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(": ")?;
            key.eq_ignore_ascii_case(name).then_some(value)
        })
    }
}
