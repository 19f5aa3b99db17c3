use std::convert::Infallible;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::header::HeaderMap;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tempfile::TempDir;
use tokio::net::UnixListener;

use super::*;

fn listed(namespace: &str, name: &str, containers: &[&str]) -> ListedPod {
    let containers = containers.iter().map(|name| (*name).to_owned()).collect();
    ListedPod { namespace: namespace.into(), name: name.into(), containers }
}

/// A kubelet that answers every call with this message and status, over real HTTP/2.
pub(in crate::source::process) struct Kubelet {
    folder: TempDir,
    task: tokio::task::JoinHandle<()>,
}

impl Kubelet {
    /// One that lists these pods.
    pub(in crate::source::process) fn with(pods: &[ListedPod]) -> Kubelet {
        Kubelet::start(message::testing::encode(pods), "0")
    }

    fn start(message: Vec<u8>, status: &'static str) -> Kubelet {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join("kubelet.sock")).unwrap();
        let mut framed = vec![0];
        framed.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
        framed.extend(message);
        let framed = Bytes::from(framed);
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let framed = framed.clone();
                let serve =
                    hyper::service::service_fn(move |request| answer(request, framed.clone(), status));
                let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                tokio::spawn(connection.serve_connection(TokioIo::new(stream), serve));
            }
        });
        Kubelet { folder, task }
    }

    pub(in crate::source::process) fn socket(&self) -> PathBuf {
        self.folder.path().join("kubelet.sock")
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn answer(
    request: Request<Incoming>,
    message: Bytes,
    status: &'static str,
) -> Result<Response<http_body_util::combinators::BoxBody<Bytes, Infallible>>, Infallible> {
    assert_eq!(request.uri().path(), "/v1.PodResourcesLister/List");
    assert_eq!(request.headers()["content-type"], "application/grpc");
    assert_eq!(request.headers()["te"], "trailers");
    assert_eq!(request.into_body().collect().await.unwrap().to_bytes(), Bytes::from_static(&[0; 5]));
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", status.parse().unwrap());
    trailers.insert("grpc-message", "rate limited".parse().unwrap());
    let body = Full::new(message).with_trailers(async move { Some(Ok(trailers)) });
    Ok(Response::builder().header("content-type", "application/grpc").body(body.boxed()).unwrap())
}

#[tokio::test]
async fn pods_are_listed_also_beyond_the_usual_limit_of_a_message() {
    let mut pods: Vec<ListedPod> = (0..9000)
        .map(|at| listed("batch", &format!("{at}-{}", "x".repeat(240)), &["main", "side"]))
        .collect();
    pods.push(listed("vision", "train-0", &["main"]));
    let encoded = message::testing::encode(&pods);
    assert!(encoded.len() > 2 * 1024 * 1024);
    let kubelet = Kubelet::start([encoded.clone(), encoded].concat(), "0");
    let found = list(&kubelet.socket()).await.unwrap();
    assert_eq!(found.len(), 2 * pods.len());
    assert_eq!(found[pods.len() - 1], pods[pods.len() - 1]);
}

#[tokio::test]
async fn refusals_and_oversized_answers_are_told_apart() {
    let refusing = Kubelet::start(Vec::new(), "8");
    let error = list(&refusing.socket()).await.unwrap_err();
    assert!(
        matches!(&error, KubeletError::Refused { code, message } if code == "8" && message == "rate limited")
    );
    let boundless = Kubelet::start(vec![0; MAX_ANSWER + 1], "0");
    assert!(matches!(list(&boundless.socket()).await, Err(KubeletError::TooLarge)));
    let crooked = Kubelet::start(vec![0x0a, 0x7f, 1], "0");
    assert!(matches!(list(&crooked.socket()).await, Err(KubeletError::Malformed(_))));
}

#[tokio::test]
async fn an_absent_a_deaf_and_a_foreign_kubelet_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    assert!(matches!(list(&socket).await, Err(KubeletError::Connect { .. })));
    let listener = UnixListener::bind(&socket).unwrap();
    let asked = tokio::spawn({
        let socket = socket.clone();
        async move { list(&socket).await }
    });
    let (stream, _) = listener.accept().await.unwrap();
    stream.writable().await.unwrap();
    stream.try_write(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
    assert!(matches!(asked.await.unwrap(), Err(KubeletError::Connection(_))));
}

#[tokio::test(start_paused = true)]
async fn a_silent_kubelet_is_given_up_at_the_deadline() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let _listener = UnixListener::bind(&socket).unwrap();
    assert!(matches!(list(&socket).await, Err(KubeletError::Timeout(_))));
}

#[test]
fn a_host_name_names_a_pod_only_when_it_is_the_only_one() {
    let long = format!("{}-abcde", "long".repeat(15));
    let pods = [
        listed("a", "train-0", &["main"]),
        listed("b", "train-0", &["other"]),
        listed("a", "infer", &["main", "side"]),
        listed("a", &long, &["main"]),
    ];
    let find = |hostname, container| pod_by_hostname(&pods, hostname, container).map(|pod| &*pod.namespace);
    assert_eq!(find("train-0", None), None);
    assert_eq!(find("train-0", Some("other")), Some("b"));
    assert_eq!(find("infer", Some("side")), Some("a"));
    assert_eq!(find("infer", Some("absent")), None);
    assert_eq!(find("node-7", None), None);
    assert_eq!(find(&long[..63], None), Some("a"));
}

#[tokio::test]
async fn a_body_without_trailers_is_no_answer() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let serve = hyper::service::service_fn(|_: Request<Incoming>| async {
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(&[0; 5]))))
        });
        let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        let _closed = connection.serve_connection(TokioIo::new(stream), serve).await;
    });
    assert!(matches!(list(&socket).await, Err(KubeletError::Malformed(_))));
    server.abort();
}
