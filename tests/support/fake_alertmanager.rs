//! An Alertmanager that answers as it is told, and keeps what it was sent.
#![allow(dead_code, reason = "no test uses all of it")]
#![allow(missing_docs, clippy::unwrap_used)]

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;

/// How it answers.
#[derive(Debug, Clone)]
pub enum Answer {
    /// With this status.
    Status(u16),
    /// With 200, after a while.
    Slow(Duration),
    /// Never.
    Hang,
    /// With 200 to whoever sends this `Authorization`, else with 401.
    For(String),
}

/// A post that arrived.
#[derive(Debug, Clone)]
pub struct Post {
    pub at: Instant,
    pub path: String,
    pub content_type: String,
    pub accepted: bool,
    pub alerts: Vec<Value>,
}

pub struct FakeAlertmanager {
    pub address: SocketAddr,
    pub posts: Arc<Mutex<Vec<Post>>>,
    answer: Arc<Mutex<Answer>>,
    running: JoinSet<()>,
}

impl FakeAlertmanager {
    /// Starts on a free port of the loopback, with TLS when an acceptor is given.
    pub async fn start(answer: Answer, tls: Option<TlsAcceptor>) -> FakeAlertmanager {
        FakeAlertmanager::start_at("127.0.0.1:0".parse().unwrap(), answer, tls).await
    }

    pub async fn start_at(address: SocketAddr, answer: Answer, tls: Option<TlsAcceptor>) -> FakeAlertmanager {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let answer = Arc::new(Mutex::new(answer));
        let posts: Arc<Mutex<Vec<Post>>> = Arc::default();
        let mut running = JoinSet::new();
        running.spawn(serve(listener, tls, answer.clone(), posts.clone()));
        FakeAlertmanager { address, posts, answer, running }
    }

    pub fn answers(&self, answer: Answer) {
        *self.answer.lock().unwrap() = answer;
    }

    pub fn posts(&self) -> Vec<Post> {
        self.posts.lock().unwrap().clone()
    }

    /// The alerts of accepted posts, in order.
    pub fn accepted(&self) -> Vec<Value> {
        self.posts().into_iter().filter(|post| post.accepted).flat_map(|post| post.alerts).collect()
    }

    /// Closes its port and every connection.
    pub async fn stop(mut self) -> SocketAddr {
        self.running.shutdown().await;
        self.address
    }
}

async fn serve(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    answer: Arc<Mutex<Answer>>,
    posts: Arc<Mutex<Vec<Post>>>,
) {
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let (tls, answer, posts) = (tls.clone(), answer.clone(), posts.clone());
        connections.spawn(async move {
            let service = service_fn(move |request| take(request, answer.clone(), posts.clone()));
            let server = hyper::server::conn::http1::Builder::new();
            // A client may give up at any moment: that is what is tested.
            let _ended = match tls {
                Some(tls) => match tls.accept(stream).await {
                    Ok(stream) => server.serve_connection(TokioIo::new(stream), service).await,
                    Err(_refused) => return,
                },
                None => server.serve_connection(TokioIo::new(stream), service).await,
            };
        });
    }
}

async fn take(
    request: Request<Incoming>,
    answer: Arc<Mutex<Answer>>,
    posts: Arc<Mutex<Vec<Post>>>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let at = Instant::now();
    let header = |name: &str| {
        request.headers().get(name).map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default()
    };
    let (path, content_type, authorization) =
        (request.uri().path().to_owned(), header("content-type"), header("authorization"));
    let body =
        request.into_body().collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let answer = answer.lock().unwrap().clone();
    let (pause, status) = match answer {
        Answer::Status(status) => (Duration::ZERO, status),
        Answer::Slow(pause) => (pause, 200),
        Answer::Hang => (Duration::from_secs(3600), 200),
        Answer::For(expected) => (Duration::ZERO, if authorization == expected { 200 } else { 401 }),
    };
    tokio::time::sleep(pause).await;
    let alerts = serde_json::from_slice(&body).unwrap_or_default();
    posts.lock().unwrap().push(Post { at, path, content_type, accepted: status / 100 == 2, alerts });
    let mut response = Response::new(Full::new(Bytes::from_static(b"\"said so\"")));
    *response.status_mut() = status.try_into().unwrap();
    Ok(response)
}
