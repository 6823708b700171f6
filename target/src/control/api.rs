//! The admin API, version 1: HTTP/1.1 and JSON on a Unix socket.
//!
//! | request | answer |
//! | --- | --- |
//! | `GET /v1/status` | [`Status`](super::view::Status) |
//! | `GET /v1/sessions` | a list of [`SessionView`](super::view::SessionView) |
//! | `GET /v1/targets` | a list of [`TargetView`](super::view::TargetView) |
//! | `GET /v1/config` | the configuration as YAML that reads back equal, secrets included; as JSON for `Accept: application/json`; `ETag` is its revision |
//! | `PUT /v1/config` | takes the YAML in the body as the configuration, with `If-Match` only in place of that revision; [`Changes`](super::view::Changes) |
//! | `POST /v1/diff` | what `PUT` would change, without doing it; likewise |
//! | `POST /v1/rollback` | takes again the configuration N before, N in the body or 1; likewise |
//! | `GET /v1/history` | a list of [`HistoryView`](super::view::HistoryView) |
//! | `POST /v1/upgrade` | hands over to another program, whose path is in the body, or to the one at this one's place: see [`upgrade`](super::upgrade); [`Upgrade`](super::upgrade::Upgrade), as it begins |
//! | `POST /v1/reload` | reads the configuration file again; the targets after it |
//! | `POST /v1/rescan` | measures every backend again; the targets after it |
//! | `POST /v1/clear-flush-failure` | lets flushes succeed again on the backends of units with the serial number in the body, or of all; the targets after it |
//! | `POST /v1/trace` | looks for the commands that the body wants ([`Wanted`]) until there are enough or time is over; [`Traced`](super::trace::Traced) |
//! | `GET /v1/live` | [`Live`](super::live::Live) |
//! | `GET /v1/recent?sample=N&event=N` | what is newer than these: [`Recent`](super::timeline::Recent) |
//! | `GET /metrics`, `/healthz`, `/readyz`, `/` | see [`http`] |
//!
//! An error is `{"error": TEXT}`: 400 for a mistake in a configuration, 404 for a path that is not here,
//! 405 for a method, 409 for a configuration that was not applied, 412 for one in place of another
//! revision than the present one, 500 for what failed, 503 while too much waits or the daemon ends.
//! Where the operating system said no, `"errno"` is its number.
//!
//! ```text
//! curl --unix-socket /run/riserd/admin.sock http://riserd/v1/sessions
//! ```

use std::path::PathBuf;

use axum::Json;
use axum::Router;
use axum::extract::connect_info::Connected;
use axum::extract::{ConnectInfo, DefaultBodyLimit, State};
use axum::http::header::{ACCEPT, CONTENT_TYPE, ETAG, IF_MATCH};
use axum::http::{HeaderMap, HeaderName, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, MethodRouter, on};
use axum::serve::IncomingStream;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{mpsc, oneshot};

use super::bounded::{Bounded, Place};
use super::http;
use super::timeline::Since;
use super::trace::{EVERY, Wanted};

/// The longest configuration that is taken, in bytes.
const MAX_BODY: usize = 16 << 20;

/// What is asked of the daemon.
#[derive(Clone, Debug, PartialEq)]
pub enum Ask {
    /// How it is.
    Status,
    /// Who is logged in.
    Sessions,
    /// What is served.
    Targets,
    /// To read its configuration file again.
    Reload,
    /// To measure its backends again.
    Rescan,
    /// To let flushes succeed again on the backend of the unit with this serial number, or on all.
    ClearFlushFailure(Option<String>),
    /// To hand over to a program, by default to the one at its own place.
    Upgrade(Option<PathBuf>),
    /// What configuration it has: [`Kept`].
    Config,
    /// To take a text as its configuration.
    Apply {
        /// The text.
        text: String,
        /// The revision in whose place; any where absent.
        replaces: Option<String>,
    },
    /// What taking this text would change.
    Diff(String),
    /// To take again the configuration so many before the present one.
    Rollback(usize),
    /// Which configurations it has had.
    History,
    /// To look for commands.
    Trace(Wanted),
    /// Whether enough were found.
    TraceLook,
    /// To look no more: [`Traced`](super::trace::Traced).
    TraceEnd,
    /// What it has counted, for Prometheus.
    Metrics,
    /// What it has counted, for people.
    Live,
    /// What it has done in the last minutes.
    Recent(Since),
    /// Whether it works.
    Health,
    /// Whether it serves all that it should.
    Ready,
}

/// A configuration in both forms.
#[derive(Debug, Serialize, Deserialize)]
pub struct Kept {
    /// Names its content.
    pub revision: String,
    /// As a file that reads back equal.
    pub yaml: String,
    /// The same as JSON.
    pub json: Value,
}

/// Why a request was not fulfilled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The configuration has a mistake; nothing has changed.
    #[error("{0}")]
    Mistake(String),
    /// It is not possible as things are; nothing has changed.
    #[error("{why}")]
    Refused {
        /// Why.
        why: String,
        /// What the operating system said, where it did.
        errno: Option<i32>,
    },
    /// The configuration is not the revision that was to be replaced; nothing has changed.
    #[error("the configuration has changed meanwhile")]
    Outdated,
    /// It went wrong.
    #[error("{0}")]
    Failed(String),
    /// Nobody can look at it now.
    #[error("the daemon is busy or ends; try again")]
    Busy,
}

/// What comes of a request.
pub type Answer = Result<Value, Failure>;

/// A request on its way to the thread that owns the server.
#[derive(Debug)]
pub struct Request {
    /// What is asked.
    pub ask: Ask,
    /// By whom.
    pub who: String,
    /// Where the answer goes.
    pub reply: oneshot::Sender<Answer>,
}

/// Who is at the other end of the socket.
#[derive(Clone, Debug)]
pub struct Peer {
    name: String,
    /// As which user it runs.
    uid: Option<u32>,
    place: Place,
}

impl Peer {
    /// Whether it may let the daemon run any program: root, and whoever could run it as this user
    /// anyhow. Others who may use the socket may change what is served, and no more.
    fn may_name_programs(&self) -> bool {
        let own = rustix::process::geteuid().as_raw();
        self.uid.is_some_and(|uid| uid == 0 || uid == own)
    }
}

impl Connected<IncomingStream<'_, Bounded<UnixListener>>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Bounded<UnixListener>>) -> Self {
        let place = stream.io().place().clone();
        let Ok(peer) = stream.io().stream().peer_cred() else {
            return Self {
                name: "the admin socket".to_owned(),
                uid: None,
                place,
            };
        };
        let uid = peer.uid();
        Self {
            name: match peer.pid() {
                Some(pid) => format!("uid {uid} (process {pid})"),
                None => format!("uid {uid}"),
            },
            uid: Some(uid),
            place,
        }
    }
}

/// A client that can only look.
impl Connected<IncomingStream<'_, Bounded<TcpListener>>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Bounded<TcpListener>>) -> Self {
        Self {
            name: "http".to_owned(),
            uid: None,
            place: stream.io().place().clone(),
        }
    }
}

/// Where requests go.
pub type Requests = mpsc::Sender<Request>;

/// The routes. Requests go to `requests`.
pub fn router(requests: Requests) -> Router {
    Router::new()
        .route("/v1/status", get(Ask::Status))
        .route("/v1/sessions", get(Ask::Sessions))
        .route("/v1/targets", get(Ask::Targets))
        .route("/v1/history", get(Ask::History))
        .route(
            "/v1/config",
            on(MethodFilter::GET, config).on(MethodFilter::PUT, apply),
        )
        .route("/v1/diff", on(MethodFilter::POST, diff))
        .route("/v1/rollback", on(MethodFilter::POST, rollback))
        .route("/v1/trace", on(MethodFilter::POST, trace))
        .route("/v1/upgrade", on(MethodFilter::POST, upgrade))
        .route("/v1/reload", post(Ask::Reload))
        .route("/v1/rescan", post(Ask::Rescan))
        .route(
            "/v1/clear-flush-failure",
            on(MethodFilter::POST, clear_flush_failure),
        )
        .merge(http::router())
        .fallback(http::not_found)
        .method_not_allowed_fallback(async || {
            error(
                StatusCode::METHOD_NOT_ALLOWED,
                "this path does not take this method",
            )
        })
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(requests)
}

fn get(ask: Ask) -> MethodRouter<Requests> {
    asking(MethodFilter::GET, ask)
}

fn post(ask: Ask) -> MethodRouter<Requests> {
    asking(MethodFilter::POST, ask)
}

/// A handler that asks this.
fn asking(method: MethodFilter, ask: Ask) -> MethodRouter<Requests> {
    on(
        method,
        async move |State(requests): State<Requests>, ConnectInfo(peer): ConnectInfo<Peer>| {
            said(forward(&requests, ask, peer).await)
        },
    )
}

async fn config(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    headers: HeaderMap,
) -> Response {
    let answer = forward(&requests, Ask::Config, peer).await;
    let kept: Kept = match answer.map(serde_json::from_value) {
        Ok(Ok(kept)) => kept,
        Ok(Err(garbled)) => return said(Err(Failure::Failed(garbled.to_string()))),
        Err(failure) => return said(Err(failure)),
    };
    let revision = [(ETAG, format!("\"{}\"", kept.revision))];
    match text_of(&headers, &ACCEPT) {
        Some(accept) if accept.contains("application/json") => {
            (revision, Json(kept.json)).into_response()
        }
        _ => {
            let form = [(CONTENT_TYPE, "application/yaml")];
            (revision, form, kept.yaml).into_response()
        }
    }
}

fn text_of<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

async fn apply(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    headers: HeaderMap,
    text: String,
) -> Response {
    let replaces = text_of(&headers, &IF_MATCH).filter(|tag| *tag != "*");
    let replaces = replaces.map(|tag| tag.trim_matches('"').to_owned());
    said(forward(&requests, Ask::Apply { text, replaces }, peer).await)
}

async fn diff(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    text: String,
) -> Response {
    said(forward(&requests, Ask::Diff(text), peer).await)
}

async fn clear_flush_failure(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    text: String,
) -> Response {
    let serial = Some(text.trim().to_owned()).filter(|serial| !serial.is_empty());
    said(forward(&requests, Ask::ClearFlushFailure(serial), peer).await)
}

async fn rollback(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    text: String,
) -> Response {
    let back = match text.trim() {
        "" => Ok(1),
        number => number.parse(),
    };
    match back {
        Ok(back) => said(forward(&requests, Ask::Rollback(back), peer).await),
        Err(_) => error(StatusCode::BAD_REQUEST, "how many back is a number"),
    }
}

/// Looks for commands. Whoever goes away meanwhile ends it.
async fn trace(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    text: String,
) -> Response {
    let _working = peer.place.work();
    let text = if text.trim().is_empty() { "{}" } else { &text };
    let wanted: Wanted = match serde_json::from_str(text) {
        Ok(wanted) => wanted,
        Err(mistake) => return error(StatusCode::BAD_REQUEST, &mistake.to_string()),
    };
    let patience = wanted.check().map(|()| wanted.patience());
    if let Err(failure) = forward(&requests, Ask::Trace(wanted), peer.clone()).await {
        return said(Err(failure));
    }
    let until = tokio::time::Instant::now() + patience.unwrap_or_default();
    let ending = EndTrace(Some(requests.clone()));
    while tokio::time::Instant::now() < until {
        tokio::time::sleep_until(until.min(tokio::time::Instant::now() + EVERY)).await;
        // One that the daemon has no time for is made up for by the next.
        let looked = forward(&requests, Ask::TraceLook, peer.clone()).await;
        if looked.is_ok_and(|enough| enough == Value::Bool(true)) {
            break;
        }
    }
    ending.defuse();
    said(forward(&requests, Ask::TraceEnd, peer).await)
}

/// Ends a search for commands that nobody waits for any more.
struct EndTrace(Option<Requests>);

impl EndTrace {
    /// It is ended otherwise.
    fn defuse(mut self) {
        self.0 = None;
    }
}

impl Drop for EndTrace {
    fn drop(&mut self) {
        if let Some(requests) = self.0.take() {
            let (reply, _) = oneshot::channel();
            let (ask, who) = (Ask::TraceEnd, String::new());
            // A daemon that is too busy for this finds out that it was forgotten.
            let _ = requests.try_send(Request { ask, who, reply });
        }
    }
}

async fn upgrade(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    path: String,
) -> Response {
    let program = Some(PathBuf::from(path)).filter(|path| !path.as_os_str().is_empty());
    if program.is_some() && !peer.may_name_programs() {
        let why = "only root and the daemon's own user may name a program".to_owned();
        return said(Err(Failure::Refused { why, errno: None }));
    }
    said(forward(&requests, Ask::Upgrade(program), peer).await)
}

pub(super) async fn forward(requests: &Requests, ask: Ask, peer: Peer) -> Answer {
    let _working = peer.place.work();
    let (reply, answer) = oneshot::channel();
    let who = peer.name;
    let sent = requests.try_send(Request { ask, who, reply });
    sent.map_err(|_| Failure::Busy)?;
    answer.await.unwrap_or(Err(Failure::Busy))
}

pub(super) fn said(answer: Answer) -> Response {
    match answer {
        Ok(value) => Json(value).into_response(),
        Err(failure) => {
            let mut body = json!({ "error": failure.to_string() });
            if let Failure::Refused {
                errno: Some(errno), ..
            } = failure
            {
                body["errno"] = json!(errno);
            }
            (status(&failure), Json(body)).into_response()
        }
    }
}

fn status(failure: &Failure) -> StatusCode {
    match failure {
        Failure::Mistake(_) => StatusCode::BAD_REQUEST,
        Failure::Refused { .. } => StatusCode::CONFLICT,
        Failure::Outdated => StatusCode::PRECONDITION_FAILED,
        Failure::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        Failure::Busy => StatusCode::SERVICE_UNAVAILABLE,
    }
}

pub(super) fn error(status: StatusCode, text: &str) -> Response {
    (status, Json(json!({ "error": text }))).into_response()
}
