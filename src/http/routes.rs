//! Which path answers what.

use std::sync::Arc;

use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use jiff::Timestamp;
use tokio::sync::Semaphore;

use crate::http::auth::Authenticator;
use crate::http::body::{Body, content, text};
use crate::http::web_config::WatchedConfig;
use crate::http::{AppState, api, events, page};
use crate::metrics::exposition::{Exposition, gzip};
use crate::metrics::negotiate::{self, Encoding};
use crate::source::Shutdown;

/// How many event streams may be open: each holds a connection for good.
const MAX_STREAMS: usize = 16;

/// Everything that answers requests.
pub(super) struct Site {
    state: AppState,
    exposition: Exposition,
    telemetry_path: String,
    pub(super) config: Arc<WatchedConfig>,
    authenticator: Authenticator,
    streams: Arc<Semaphore>,
    shutdown: Shutdown,
}

impl Site {
    pub(super) fn new(
        state: AppState,
        telemetry_path: String,
        config: Arc<WatchedConfig>,
        shutdown: Shutdown,
    ) -> Site {
        let exposition =
            Exposition::new(state.snapshots.clone(), state.telemetry.clone(), state.collectors.clone());
        Site {
            state,
            exposition,
            telemetry_path,
            config,
            authenticator: Authenticator::default(),
            streams: Arc::new(Semaphore::new(MAX_STREAMS)),
            shutdown,
        }
    }

    /// Answers a request. Its body, if it has one, is not read.
    pub(super) async fn answer<B>(&self, request: &Request<B>) -> Response<Body> {
        let config = self.config.current();
        let credentials = request.headers().get(header::AUTHORIZATION);
        let mut response = if !self.authenticator.admits(&config.users, credentials).await {
            let mut response = text(StatusCode::UNAUTHORIZED, "user name and password are required");
            let challenge = HeaderValue::from_static("Basic realm=\"mps-exporter\", charset=\"UTF-8\"");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
            response
        } else if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let mut response =
                text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD: no endpoint changes anything");
            response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("GET, HEAD"));
            response
        } else {
            self.route(request)
        };
        let headers = response.headers_mut();
        headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        for (name, value) in &config.headers {
            headers.insert(name.clone(), value.clone());
        }
        response
    }

    fn route<B>(&self, request: &Request<B>) -> Response<Body> {
        let path = request.uri().path();
        if path == self.telemetry_path {
            return self.metrics(request.headers());
        }
        match path {
            "/" => {
                let snapshot = self.state.snapshots.load();
                html(page::index(&snapshot, Timestamp::now(), &self.telemetry_path), request.headers())
            }
            "/page/state" => {
                html(page::state(&self.state.snapshots.load(), Timestamp::now()), request.headers())
            }
            "/page/style.css" => asset("text/css; charset=utf-8", page::STYLE),
            "/page/app.js" => asset("text/javascript; charset=utf-8", page::SCRIPT),
            "/page/icon.svg" => asset("image/svg+xml", page::ICON),
            "/-/healthy" => text(StatusCode::OK, "healthy"),
            "/-/ready" => {
                if self.state.readiness.is_ready() {
                    text(StatusCode::OK, "ready")
                } else {
                    text(
                        StatusCode::SERVICE_UNAVAILABLE,
                        "not ready: the first picture of the node is not complete",
                    )
                }
            }
            "/api/v1/fault-domains" => api::fault_domains(&self.state.snapshots.load()),
            "/api/v1/incidents" => api::incidents(&self.state.snapshots.load(), request.uri().query()),
            "/api/v1/status" => api::status(&self.state.snapshots.load()),
            "/api/v1/events" if request.method() == Method::HEAD => {
                content(StatusCode::OK, "text/event-stream", Body::whole(""))
            }
            "/api/v1/events" => self.events(),
            _ => text(StatusCode::NOT_FOUND, "no such path; the page at / lists all"),
        }
    }

    fn metrics(&self, headers: &HeaderMap) -> Response<Body> {
        let format = negotiate::format(joined(headers, &header::ACCEPT).as_deref());
        let encoding = negotiate::encoding(joined(headers, &header::ACCEPT_ENCODING).as_deref());
        let page = self.exposition.page(format, encoding);
        let mut response = content(StatusCode::OK, format.content_type(), Body::whole(page));
        let headers = response.headers_mut();
        headers.insert(header::VARY, HeaderValue::from_static("Accept, Accept-Encoding"));
        if encoding == Encoding::Gzip {
            headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        }
        response
    }

    fn events(&self) -> Response<Body> {
        let Ok(place) = self.streams.clone().try_acquire_owned() else {
            let mut response =
                text(StatusCode::SERVICE_UNAVAILABLE, "too many event streams are open; try again later");
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("10"));
            return response;
        };
        let body = events::stream(&self.state, self.shutdown.clone(), place);
        let mut response = content(StatusCode::OK, "text/event-stream", body);
        response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        response
    }
}

/// A part of the page that changes only with the program.
fn asset(content_type: &'static str, text: &'static str) -> Response<Body> {
    let mut response = content(StatusCode::OK, content_type, Body::whole(text));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

fn html(page: String, asked: &HeaderMap) -> Response<Body> {
    let encoding = negotiate::encoding(joined(asked, &header::ACCEPT_ENCODING).as_deref());
    let page = match encoding {
        Encoding::Gzip => Body::whole(gzip(page.as_bytes())),
        Encoding::Identity => Body::whole(page),
    };
    let mut response = content(StatusCode::OK, "text/html; charset=utf-8", page);
    let policy = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; \
        base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(policy));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    if encoding == Encoding::Gzip {
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    response
}

/// All values of a header as one list; values that are not text are no values.
fn joined(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let values: Vec<&str> = headers.get_all(name).iter().filter_map(|value| value.to_str().ok()).collect();
    (!values.is_empty()).then(|| values.join(","))
}
