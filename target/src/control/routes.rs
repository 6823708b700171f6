//! The admin API, version 1: HTTP/1.1 and JSON on a Unix socket.
//!
//! | request | answer |
//! | --- | --- |
//! | `GET /v1/status` | [`Status`](riser_admin_api::view::Status) |
//! | `GET /v1/sessions` | a list of [`SessionView`](riser_admin_api::view::SessionView) |
//! | `GET /v1/targets` | a list of [`TargetView`](riser_admin_api::view::TargetView) |
//! | `GET /v1/config` | the configuration as YAML that reads back equal, secrets included; as JSON for `Accept: application/json`; `ETag` is its revision |
//! | `PUT /v1/config` | takes the YAML in the body as the configuration, with `If-Match` only in place of that revision; [`Changes`](riser_admin_api::view::Changes) |
//! | `PATCH /v1/config` | the same for a [`Patch`] of the JSON, by its media type: `application/merge-patch+json` (RFC 7396) or `application/json-patch+json` (RFC 6902); likewise |
//! | `POST /v1/diff` | what `PUT` or, by the media type, `PATCH` would change, without doing it; likewise |
//! | `POST /v1/rollback` | takes again the configuration N before, N in the body or 1; likewise |
//! | `GET /v1/history` | a list of [`HistoryView`](riser_admin_api::view::HistoryView) |
//! | `POST /v1/upgrade` | hands over to another program, whose path is in the body, or to the one at this one's place: see [`upgrade`](super::upgrade); [`Upgrade`](riser_admin_api::upgrade::Upgrade), as it begins |
//! | `POST /v1/reload` | reads the configuration file again and applies it; the changes |
//! | `POST /v1/rescan` | measures every backend again; the targets after it |
//! | `POST /v1/clear-flush-failure` | lets flushes succeed again on the backends of units with the serial number in the body, or of all; the targets after it |
//! | `POST /v1/trace` | looks for the commands that the body wants ([`Wanted`]) until there are enough or time is over; [`Traced`](riser_admin_api::trace::Traced) |
//! | `GET /v1/live` | [`Live`](riser_admin_api::live::Live) |
//! | `GET /v1/recent?sample=N&event=N` | what is newer than these: [`Recent`](riser_admin_api::recent::Recent) |
//! | `GET /metrics`, `/healthz`, `/readyz`, `/` | see [`http`] |
//!
//! An error is `{"error": TEXT}`: 400 for a mistake in a configuration, 404 for a path that is not
//! here, 405 for a method, 409 for a configuration that was not applied, 412 for one in place of
//! another revision than the present one, 415 for a patch of another media type, 500 for what
//! failed, 503 while too much waits or the daemon ends. Where the operating system said no,
//! `"errno"` is its number.
//!
//! ```text
//! curl --unix-socket /run/riserd/admin.sock http://riserd/v1/sessions
//! ```

use std::path::PathBuf;

use axum::Json;
use axum::Router;
use axum::extract::{ConnectInfo, DefaultBodyLimit, State};
use axum::http::header::{ACCEPT, CONTENT_TYPE, ETAG, IF_MATCH};
use axum::http::{HeaderMap, HeaderName, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, MethodRouter, on};
use riser_config::Patch;
use serde_json::Value;
use tokio::sync::oneshot;

use super::api::{
    AdminRequest, Ask, Failure, Kept, Peer, Proposal, Requests, error, forward, said,
};
use super::http;
use super::trace::{EVERY, Wanted};

/// The longest configuration that is taken, in bytes.
const MAX_BODY: usize = 16 << 20;

/// Media types of patches that a server accepts (RFC 5789 3.1).
const ACCEPT_PATCH: HeaderName = HeaderName::from_static("accept-patch");

/// The routes. Requests go to `requests`.
pub fn router(requests: Requests) -> Router {
    Router::new()
        .route("/v1/status", get(Ask::Status))
        .route("/v1/sessions", get(Ask::Sessions))
        .route("/v1/targets", get(Ask::Targets))
        .route("/v1/history", get(Ask::History))
        .route(
            "/v1/config",
            on(MethodFilter::GET, config)
                .on(MethodFilter::PUT, apply)
                .on(MethodFilter::PATCH, patch),
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
        // Health, metrics and the status page are here, too, since the address for them is off by
        // default.
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

/// The revision of the configuration that a request is to replace; `None` for any. What is no text
/// is a condition, too, and no revision meets it.
fn replaced(headers: &HeaderMap) -> Option<String> {
    let tag = headers.get(&IF_MATCH)?.to_str().unwrap_or_default();
    (tag != "*").then(|| tag.trim_matches('"').to_owned())
}

async fn apply(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    headers: HeaderMap,
    text: String,
) -> Response {
    let apply = Ask::Apply {
        proposal: Proposal::Whole(text),
        replaces: replaced(&headers),
    };
    said(forward(&requests, apply, peer).await)
}

/// A patch, if the media type is that of one.
fn patch_of(headers: &HeaderMap, text: &str) -> Option<Result<Proposal, Failure>> {
    let media_type = text_of(headers, &CONTENT_TYPE).unwrap_or_default();
    let patch = Patch::parse(media_type, text)?.map(Proposal::Patch);
    Some(patch.map_err(|error| Failure::Mistake(error.to_string())))
}

async fn patch(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    headers: HeaderMap,
    text: String,
) -> Response {
    let proposal = match patch_of(&headers, &text) {
        Some(Ok(proposal)) => proposal,
        Some(Err(mistake)) => return said(Err(mistake)),
        // RFC 5789 2.2: the answer names what would be accepted.
        None => {
            let accepted = [Patch::MERGE, Patch::OPERATIONS].join(", ");
            let why = format!(
                "a patch is of the media type {}",
                accepted.replace(", ", " or ")
            );
            let refused = error(StatusCode::UNSUPPORTED_MEDIA_TYPE, &why);
            return ([(ACCEPT_PATCH, accepted)], refused).into_response();
        }
    };
    let replaces = replaced(&headers);
    said(forward(&requests, Ask::Apply { proposal, replaces }, peer).await)
}

async fn diff(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    headers: HeaderMap,
    text: String,
) -> Response {
    match patch_of(&headers, &text).unwrap_or(Ok(Proposal::Whole(text))) {
        Ok(proposal) => said(forward(&requests, Ask::Diff(proposal), peer).await),
        Err(mistake) => said(Err(mistake)),
    }
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

/// Looks for commands. A client that disconnects ends it.
async fn trace(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    text: String,
) -> Response {
    let _working = peer.entry.work();
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

/// Ends the search for commands of a client that has disconnected.
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
            let _ = requests.try_send(AdminRequest { ask, who, reply });
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

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn a_condition_that_cannot_be_read_is_not_met() {
        let replaced = |value: &[u8]| {
            let value = HeaderValue::from_bytes(value).unwrap();
            replaced(&HeaderMap::from_iter([(IF_MATCH, value)]))
        };
        assert_eq!(replaced(b"*"), None);
        assert_eq!(replaced(b"\"0123\"").as_deref(), Some("0123"));
        assert_eq!(replaced(b"\"\xe9\"").as_deref(), Some(""));
    }
}
