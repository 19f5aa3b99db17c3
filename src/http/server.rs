//! Accepts connections and serves them until the program stops.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use crate::http::body::Body;
use crate::http::connections::{Admitted, Connections};
use crate::http::listen::{ListenError, Listener};
use crate::http::routes::Site;
use crate::http::stream::{Stream, WriteDeadline};
use crate::http::web_config::{WatchedConfig, WebConfigError};
use crate::http::{AppState, WebOptions};
use crate::source::Shutdown;

/// Connections at a time. Beyond that, whoever waits longest without asking makes room.
const MAX_CONNECTIONS: usize = 64;
/// How long a TLS handshake, and the head of a request, may take.
const HEAD_LIMIT: Duration = Duration::from_secs(10);
/// How long a peer may take to accept a response.
const WRITE_LIMIT: Duration = Duration::from_secs(30);
/// The most that is buffered of a request's head.
const HEAD_BYTES: usize = 16 * 1024;
/// Pause after a failed accept: without file descriptors it would fail again at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long answers under way may take when the program stops.
const DRAIN_LIMIT: Duration = Duration::from_secs(5);

/// Why the server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// An address cannot be listened on.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The web configuration cannot be used.
    #[error(transparent)]
    Config(#[from] WebConfigError),
}

/// The web server, bound and not serving yet.
pub struct Server {
    listeners: Vec<Listener>,
    state: AppState,
    telemetry_path: String,
    config: Arc<WatchedConfig>,
}

impl Server {
    /// Reads the web configuration and binds every address. Call it on the runtime.
    ///
    /// # Errors
    /// When an address cannot be bound, or the web configuration is missing or wrong.
    pub async fn bind(options: &WebOptions, state: AppState) -> Result<Server, BindError> {
        let config = Arc::new(WatchedConfig::open(options.config_file.clone(), state.telemetry.clone())?);
        let listeners = if options.systemd_socket {
            Listener::from_systemd()?
        } else {
            let mut listeners = Vec::new();
            for address in &options.listen {
                listeners.push(Listener::bind(address).await?);
            }
            listeners
        };
        Ok(Server { listeners, state, telemetry_path: options.telemetry_path.clone(), config })
    }

    /// The TCP addresses that were bound.
    pub fn tcp_addresses(&self) -> Vec<SocketAddr> {
        self.listeners.iter().filter_map(Listener::tcp_address).collect()
    }

    /// What reads the web configuration again, for SIGHUP. Changed files are also noticed without it.
    pub fn reloader(&self) -> impl Fn() + Send + Sync + use<> {
        let config = self.config.clone();
        move || config.reload()
    }

    /// Serves until `shutdown`; then no new connection is taken and answers under way get five seconds.
    pub async fn serve(self, mut shutdown: Shutdown) {
        let site = Arc::new(Site::new(self.state, self.telemetry_path, self.config, shutdown.clone()));
        let connections = Connections::new(MAX_CONNECTIONS);
        let graceful = Arc::new(GracefulShutdown::new());
        let mut accepting = JoinSet::new();
        for listener in self.listeners {
            let tls = site.config.current().tls.is_some();
            info!(address = listener.describe(), tls, "Listening for scrapes.");
            accepting.spawn(accept_loop(listener, site.clone(), connections.clone(), graceful.clone()));
        }
        shutdown.wait().await;
        // The listeners go first: a connection in the backlog of a socket that nobody accepts would hang.
        accepting.shutdown().await;
        let Ok(graceful) = Arc::try_unwrap(graceful) else {
            unreachable!("the accept loops held the only other references, and they have ended");
        };
        if timeout(DRAIN_LIMIT, graceful.shutdown()).await.is_err() {
            warn!("Connections were cut off while they were being answered.");
        }
    }
}

async fn accept_loop(
    listener: Listener,
    site: Arc<Site>,
    connections: Arc<Connections>,
    graceful: Arc<GracefulShutdown>,
) {
    let mut is_failing = false;
    loop {
        let stream = match listener.accept().await {
            Ok(stream) => stream,
            Err(error) => {
                if !std::mem::replace(&mut is_failing, true) {
                    warn!(%error, "Connections cannot be accepted; trying on.");
                }
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        if std::mem::take(&mut is_failing) {
            info!("Connections can be accepted again.");
        }
        let admitted = connections.admit().await;
        let watcher = graceful.watcher();
        let site = site.clone();
        tokio::spawn(async move {
            let admitted = Arc::new(admitted);
            let eviction = admitted.clone();
            tokio::select! {
                () = serve_connection(stream, site, admitted, watcher) => {}
                () = eviction.evicted() => debug!("A connection made room for a new one."),
            }
        });
    }
}

async fn serve_connection(
    stream: Stream,
    site: Arc<Site>,
    admitted: Arc<Admitted>,
    watcher: hyper_util::server::graceful::Watcher,
) {
    let stream = match &site.config.current().tls {
        None => stream,
        Some(acceptor) => match timeout(HEAD_LIMIT, acceptor.accept(stream)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => {
                debug!(%error, "A TLS handshake failed.");
                return;
            }
            Err(_) => {
                debug!("A TLS handshake took too long.");
                return;
            }
        },
    };
    let service = service_fn(|request: Request<Incoming>| {
        let site = site.clone();
        let busy = admitted.busy();
        async move {
            let mut response: Response<Body> = site.answer(&request).await;
            response.body_mut().hold(busy);
            Ok::<_, Infallible>(response)
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_LIMIT)
        .max_buf_size(HEAD_BYTES)
        .serve_connection(TokioIo::new(WriteDeadline::new(stream, WRITE_LIMIT)), service);
    if let Err(error) = watcher.watch(connection).await {
        debug!(%error, "A connection ended early.");
    }
}
