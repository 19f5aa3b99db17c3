//! Response bodies.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body as HyperBody, Frame, SizeHint};
use hyper::header::{self, HeaderValue};
use hyper::{Response, StatusCode};
use serde::Serialize;
use tokio::sync::mpsc;

use crate::http::connections::Busy;

/// The body of a response: whole, or a stream of events.
pub(super) struct Body {
    kind: Kind,
    busy: Option<Busy>,
}

enum Kind {
    Whole(Full<Bytes>),
    Stream(mpsc::Receiver<Bytes>),
}

impl Body {
    pub(super) fn whole(bytes: impl Into<Bytes>) -> Body {
        Body { kind: Kind::Whole(Full::new(bytes.into())), busy: None }
    }

    pub(super) fn stream(frames: mpsc::Receiver<Bytes>) -> Body {
        Body { kind: Kind::Stream(frames), busy: None }
    }

    /// Keeps the connection marked as busy until the body is written.
    pub(super) fn hold(&mut self, busy: Busy) {
        self.busy = Some(busy);
    }
}

impl HyperBody for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut self.get_mut().kind {
            Kind::Whole(full) => Pin::new(full).poll_frame(cx),
            Kind::Stream(frames) => {
                frames.poll_recv(cx).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Whole(full) => full.is_end_stream(),
            Kind::Stream(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Whole(full) => full.size_hint(),
            Kind::Stream(_) => SizeHint::default(),
        }
    }
}

/// A response with this type of content.
pub(super) fn content(status: StatusCode, content_type: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// A line for people.
pub(super) fn text(status: StatusCode, line: &str) -> Response<Body> {
    content(status, "text/plain; charset=utf-8", Body::whole(format!("{line}\n")))
}

/// JSON that must not be kept by caches.
pub(super) fn json(status: StatusCode, value: &impl Serialize) -> Response<Body> {
    match serde_json::to_vec(value) {
        Ok(bytes) => {
            let mut response = content(status, "application/json", Body::whole(bytes));
            response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
            response
        }
        Err(error) => {
            text(StatusCode::INTERNAL_SERVER_ERROR, &format!("the answer cannot be written as JSON: {error}"))
        }
    }
}
