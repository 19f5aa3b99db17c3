//! The kubelet's pod-resources API (`v1.PodResourcesLister/List`), a single gRPC call over its Unix socket.
//!
//! What it lists are pods by namespace and name with their containers' names and devices: neither a pod's UID nor a
//! container's id. It can therefore never say whose a process is; it confirms a name that was learnt otherwise. Devices are
//! not looked at: with MPS many pods hold the same one, and a slot of a device plugin is no proof of use.

#[cfg_attr(not(feature = "kubelet"), allow(dead_code))]
mod message;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub use message::ListedPod;

/// gRPC libraries stop at 4 MiB by default, which the answer exceeds on nodes with many devices.
const MAX_ANSWER: usize = 16 * 1024 * 1024;
/// The kubelet answers in milliseconds, and in seconds while it starts.
const DEADLINE: Duration = Duration::from_secs(5);

/// Why the kubelet could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum KubeletError {
    /// Nobody listens, or we may not connect.
    #[error("cannot connect to {}: mount the kubelet's pod-resources folder, or empty host.kubelet_socket", socket.display())]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// What the kernel said.
        #[source]
        source: std::io::Error,
    },
    /// The deadline passed.
    #[error("the kubelet at {} did not answer within {DEADLINE:?}", .0.display())]
    Timeout(PathBuf),
    /// The peer does not speak HTTP/2, or broke off.
    #[error("the kubelet's connection failed: {0}")]
    Connection(String),
    /// The kubelet answered with an error.
    #[error("the kubelet refused with gRPC status {code} {message:?}")]
    Refused {
        /// gRPC status code.
        code: String,
        /// Its message.
        message: String,
    },
    /// The answer is too large.
    #[error("the kubelet's answer exceeds {} MiB", MAX_ANSWER / 1024 / 1024)]
    TooLarge,
    /// The answer is not the known message.
    #[error("the kubelet's answer cannot be read: {0}")]
    Malformed(&'static str),
    /// The program was built without it.
    #[error("this mps-exporter was built without the feature \"kubelet\"")]
    NotBuilt,
}

impl KubeletError {
    /// A constant word for the label `reason`.
    pub fn reason(&self) -> &'static str {
        match self {
            KubeletError::Connect { .. } => "refused",
            KubeletError::Timeout(_) => "timeout",
            KubeletError::Connection(_) => "connection",
            KubeletError::Refused { .. } => "status",
            KubeletError::TooLarge => "too_large",
            KubeletError::Malformed(_) => "malformed",
            KubeletError::NotBuilt => "not_built",
        }
    }
}

/// The pods of this node. A connection of its own, within a deadline: after a restart of the kubelet there is nothing to
/// mend.
pub async fn list(socket: &Path) -> Result<Arc<[ListedPod]>, KubeletError> {
    let answer = tokio::time::timeout(DEADLINE, client::call(socket)).await;
    let answer = answer.map_err(|_| KubeletError::Timeout(socket.to_owned()))??;
    message::pods(&answer).map(Into::into).map_err(KubeletError::Malformed)
}

/// The one listed pod with this host name, and with a container of this name where it is known.
///
/// The kubelet writes a pod's name into its `/etc/hostname`, cut to 63 bytes, unless its specification says otherwise.
pub fn pod_by_hostname<'a>(
    pods: &'a [ListedPod],
    hostname: &str,
    container: Option<&str>,
) -> Option<&'a ListedPod> {
    const HOSTNAME: usize = 63;

    let is_named = |pod: &&ListedPod| {
        let cut = pod.name.get(..HOSTNAME).unwrap_or(&pod.name).trim_end_matches(['-', '.']);
        (pod.name == hostname || cut == hostname)
            && container.is_none_or(|container| pod.containers.iter().any(|listed| listed == container))
    };
    let mut found = pods.iter().filter(is_named);
    let only = found.next()?;
    found.next().is_none().then_some(only)
}

#[cfg(feature = "kubelet")]
mod client {
    use std::path::Path;

    use bytes::Bytes;
    use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
    use hyper::header::HeaderMap;
    use hyper::{Request, Response, StatusCode};
    use hyper_util::rt::{TokioExecutor, TokioIo};
    use tokio::net::UnixStream;

    use super::{KubeletError, MAX_ANSWER, message};

    /// Calls `List` with its empty request and gives the answer's message.
    pub async fn call(socket: &Path) -> Result<Bytes, KubeletError> {
        let stream = UnixStream::connect(socket)
            .await
            .map_err(|source| KubeletError::Connect { socket: socket.to_owned(), source })?;
        let broken = |error: hyper::Error| KubeletError::Connection(error.to_string());
        let handshake = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream));
        let (mut sender, connection) = handshake.await.map_err(broken)?;
        let connection = AbortOnDrop(tokio::spawn(connection));
        let request = Request::post("http://localhost/v1.PodResourcesLister/List")
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(Full::new(Bytes::from_static(&message::EMPTY_FRAME)))
            .expect("constant parts make a request");
        let answer = read(sender.send_request(request).await.map_err(broken)?).await;
        drop(connection);
        answer
    }

    async fn read(response: Response<hyper::body::Incoming>) -> Result<Bytes, KubeletError> {
        let (head, body) = response.into_parts();
        if head.status != StatusCode::OK {
            return Err(KubeletError::Connection(format!("HTTP status {}", head.status)));
        }
        refused(&head.headers)?;
        let body = Limited::new(body, MAX_ANSWER).collect().await.map_err(|error| {
            if error.is::<LengthLimitError>() {
                KubeletError::TooLarge
            } else {
                KubeletError::Connection(error.to_string())
            }
        })?;
        match body.trailers() {
            Some(trailers) => refused(trailers)?,
            None => return Err(KubeletError::Malformed("it ended without a gRPC status")),
        }
        message::unframe(&body.to_bytes()).map_err(KubeletError::Malformed)
    }

    fn refused(headers: &HeaderMap) -> Result<(), KubeletError> {
        let text =
            |name| headers.get(name).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
        match text("grpc-status") {
            Some(code) if code != "0" => {
                Err(KubeletError::Refused { code, message: text("grpc-message").unwrap_or_default() })
            }
            _ => Ok(()),
        }
    }

    /// The connection's task, which ends with the call, also when the deadline cuts it off.
    struct AbortOnDrop(tokio::task::JoinHandle<hyper::Result<()>>);

    impl Drop for AbortOnDrop {
        fn drop(&mut self) {
            self.0.abort();
        }
    }
}

#[cfg(not(feature = "kubelet"))]
mod client {
    use std::path::Path;

    use bytes::Bytes;

    use super::KubeletError;

    pub async fn call(_socket: &Path) -> Result<Bytes, KubeletError> {
        std::future::ready(Err(KubeletError::NotBuilt)).await
    }
}

#[cfg(test)]
#[cfg(feature = "kubelet")]
pub(super) mod tests;
