//! The admin API, version 1: HTTP/1.1 and JSON on a Unix socket.
//!
//! | request | answer |
//! | --- | --- |
//! | `GET /v1/status` | [`Status`](super::view::Status) |
//! | `GET /v1/sessions` | a list of [`SessionView`](super::view::SessionView) |
//! | `GET /v1/targets` | a list of [`TargetView`](super::view::TargetView) |
//! | `POST /v1/reload` | reads the configuration file again; the targets after it |
//! | `POST /v1/rescan` | measures every backend again; the targets after it |
//!
//! An error is `{"error": TEXT}`: 404 for a path that is not here, 405 for a method, 409 for a
//! configuration that was not applied, 500 for what failed, 503 while too much waits or the daemon
//! ends.
//!
//! ```text
//! curl --unix-socket /run/riserd/admin.sock http://riserd/v1/sessions
//! ```

use axum::Json;
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, MethodRouter, on};
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};

/// What is asked of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// How it is.
    Status,
    /// Who is logged in.
    Sessions,
    /// What is served.
    Targets,
    /// To read its configuration again.
    Reload,
    /// To measure its backends again.
    Rescan,
}

/// Why a request was not fulfilled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// It is not possible as things are; nothing has changed.
    #[error("{0}")]
    Refused(String),
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
    /// Where the answer goes.
    pub reply: oneshot::Sender<Answer>,
}

/// The routes. Requests go to `requests`.
pub fn router(requests: mpsc::Sender<Request>) -> Router {
    Router::new()
        .route("/v1/status", asking(MethodFilter::GET, Ask::Status))
        .route("/v1/sessions", asking(MethodFilter::GET, Ask::Sessions))
        .route("/v1/targets", asking(MethodFilter::GET, Ask::Targets))
        .route("/v1/reload", asking(MethodFilter::POST, Ask::Reload))
        .route("/v1/rescan", asking(MethodFilter::POST, Ask::Rescan))
        .fallback(async || error(StatusCode::NOT_FOUND, "there is no such path"))
        .method_not_allowed_fallback(async || {
            error(
                StatusCode::METHOD_NOT_ALLOWED,
                "this path does not take this method",
            )
        })
        .with_state(requests)
}

/// A handler that asks this.
fn asking(method: MethodFilter, ask: Ask) -> MethodRouter<mpsc::Sender<Request>> {
    on(
        method,
        async move |State(requests): State<mpsc::Sender<Request>>| match forward(&requests, ask)
            .await
        {
            Ok(value) => Json(value).into_response(),
            Err(failure) => error(status(&failure), &failure.to_string()),
        },
    )
}

async fn forward(requests: &mpsc::Sender<Request>, ask: Ask) -> Answer {
    let (reply, answer) = oneshot::channel();
    let sent = requests.try_send(Request { ask, reply });
    sent.map_err(|_| Failure::Busy)?;
    answer.await.unwrap_or(Err(Failure::Busy))
}

fn status(failure: &Failure) -> StatusCode {
    match failure {
        Failure::Refused(_) => StatusCode::CONFLICT,
        Failure::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        Failure::Busy => StatusCode::SERVICE_UNAVAILABLE,
    }
}

fn error(status: StatusCode, text: &str) -> Response {
    (status, Json(json!({ "error": text }))).into_response()
}
