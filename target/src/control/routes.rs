//! The admin API, version 1: HTTP/1.1 and JSON on a Unix socket.
//!
//! | request | response |
//! | --- | --- |
//! | `GET /v1/status` | [`Status`](riser_admin_api::view::Status) |
//! | `GET /v1/sessions` | a list of [`SessionView`](riser_admin_api::view::SessionView) |
//! | `GET /v1/targets` | a list of [`TargetView`](riser_admin_api::view::TargetView) |
//! | `GET /v1/config` | the configuration as YAML which can be parsed again, including secrets; as JSON with `Accept: application/json`; `ETag` is the revision |
//! | `PUT /v1/config` | applies the YAML configuration in the body, with `If-Match` only if this is the current revision; [`Changes`](riser_admin_api::view::Changes) |
//! | `PUT /v1/config?how=VERB` | same, with `set`, `create` or `delete` in the history instead of `apply`; `allow_unavailable=true` allows backends, portals and a metrics address that are not available |
//! | `PATCH /v1/config` | same for a [`Patch`] of the JSON, according to its media type: `application/merge-patch+json` (RFC 7396) or `application/json-patch+json` (RFC 6902) |
//! | `POST /v1/diff` | shows the changes of `PUT`, or of `PATCH` depending on the media type, without applying them; [`Changes`](riser_admin_api::view::Changes) |
//! | `POST /v1/rollback` | returns to the configuration from N changes ago, where N is in the body or 1; same response, with `allow_unavailable` as above |
//! | `GET /v1/history` | a list of [`HistoryView`](riser_admin_api::view::HistoryView) |
//! | `POST /v1/upgrade` | upgrades to the program in the body, or by default to the program at the current path: see [`upgrade`](super::upgrade); returns [`Upgrade`](riser_admin_api::upgrade::Upgrade) when it starts |
//! | `POST /v1/reload` | reloads the configuration file and applies it; returns the changes |
//! | `POST /v1/rescan` | checks all backends again; returns the updated targets |
//! | `POST /v1/clear-flush-failure` | clears failed flushes for the units with the serial number in the body, or for all units; returns the updated targets |
//! | `GET /v1/scrubs` | the last scrub of each backend: a list of [`ScrubView`](riser_admin_api::view::ScrubView) |
//! | `POST /v1/scrub?rate=BYTES` | starts a scrub of the backend in the body, which reads at most this number of bytes in a second; by default [`SCRUB_RATE`], zero for no limit; [`ScrubView`](riser_admin_api::view::ScrubView) |
//! | `POST /v1/stop-scrub` | stops the scrub of the backend in the body; same response |
//! | `POST /v1/disconnect` | requests a logout for the initiator name or session number in the body; a list of [`SessionView`](riser_admin_api::view::SessionView) with the affected sessions |
//! | `POST /v1/disconnect?block=true&seconds=N` | same, and also blocks the initiator for this time, or until it is unblocked |
//! | `POST /v1/unblock` | unblocks the initiator name in the body; a list of [`BlockedView`](riser_admin_api::view::BlockedView) with the remaining blocked initiators |
//! | `POST /v1/trace` | traces commands that match the body ([`Wanted`]) until there are enough, or until the timeout; [`Traced`](riser_admin_api::trace::Traced) |
//! | `GET /v1/live` | [`Live`](riser_admin_api::live::Live) |
//! | `GET /v1/recent?sample=N&event=N` | data after these numbers: [`Recent`](riser_admin_api::recent::Recent) |
//! | `GET /metrics`, `/healthz`, `/readyz`, `/` | see [`http`] |
//!
//! Errors are returned as `{"error": TEXT}`: 400 for an invalid configuration, 404 for an unknown
//! path, 405 for an invalid method, 409 for a configuration that was not applied, 412 if the
//! revision to replace is not the current revision, 415 for an unsupported patch media type, 500
//! for internal failures, 503 if the queue is full or if the daemon is terminating. For system
//! errors, `"errno"` is set.
//!
//! ```text
//! curl --unix-socket /run/riserd/admin.sock http://riserd/v1/sessions
//! ```

use std::path::PathBuf;
use std::time::Duration;

use axum::Json;
use axum::Router;
use axum::extract::{ConnectInfo, DefaultBodyLimit, Query, State};
use axum::http::header::{ACCEPT, CONTENT_TYPE, ETAG, IF_MATCH};
use axum::http::{HeaderMap, HeaderName, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, MethodRouter, on};
use riser_config::Patch;
use serde::Deserialize;
use serde_json::Value;
use tokio::sync::oneshot;

use super::api::{
    AdminCommand, AdminRequest, Block, Failure, How, Kept, Peer, Proposal, Requests, error,
    forward, to_response,
};
use super::http;
use super::trace::{EVERY, Wanted};

/// Maximum configuration size in bytes.
const MAX_BODY: usize = 16 << 20;

/// Default rate of a scrub, in bytes per second.
pub const SCRUB_RATE: u64 = 64 << 20;

/// Supported patch media types (RFC 5789 3.1).
const ACCEPT_PATCH: HeaderName = HeaderName::from_static("accept-patch");

/// Creates the routes, which send requests to `requests`.
pub fn router(requests: Requests) -> Router {
    Router::new()
        .route("/v1/status", get(AdminCommand::Status))
        .route("/v1/sessions", get(AdminCommand::Sessions))
        .route("/v1/targets", get(AdminCommand::Targets))
        .route("/v1/history", get(AdminCommand::History))
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
        .route("/v1/reload", post(AdminCommand::Reload))
        .route("/v1/rescan", post(AdminCommand::Rescan))
        .route(
            "/v1/clear-flush-failure",
            on(MethodFilter::POST, clear_flush_failure),
        )
        .route("/v1/scrubs", get(AdminCommand::Scrubs))
        .route("/v1/scrub", on(MethodFilter::POST, scrub))
        .route("/v1/stop-scrub", on(MethodFilter::POST, stop_scrub))
        .route("/v1/disconnect", on(MethodFilter::POST, disconnect))
        .route("/v1/unblock", on(MethodFilter::POST, unblock))
        // Health, metrics and the status page are also included here, because their TCP address is
        // disabled by default.
        .merge(http::router())
        .fallback(http::not_found)
        .method_not_allowed_fallback(async || {
            error(
                StatusCode::METHOD_NOT_ALLOWED,
                "unsupported method for this path",
            )
        })
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(requests)
}

fn get(command: AdminCommand) -> MethodRouter<Requests> {
    command_route(MethodFilter::GET, command)
}

fn post(command: AdminCommand) -> MethodRouter<Requests> {
    command_route(MethodFilter::POST, command)
}

/// Returns a handler for this request.
fn command_route(method: MethodFilter, command: AdminCommand) -> MethodRouter<Requests> {
    on(
        method,
        async move |State(requests): State<Requests>, ConnectInfo(peer): ConnectInfo<Peer>| {
            to_response(forward(&requests, command, peer).await)
        },
    )
}

async fn config(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    headers: HeaderMap,
) -> Response {
    let result = forward(&requests, AdminCommand::Config, peer).await;
    let kept: Kept = match result.map(serde_json::from_value) {
        Ok(Ok(kept)) => kept,
        Ok(Err(garbled)) => return to_response(Err(Failure::Failed(garbled.to_string()))),
        Err(failure) => return to_response(Err(failure)),
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

/// Returns the configuration revision to replace, or `None` for any revision. If the header is not
/// valid text, it is a condition that no revision can match.
fn replaced(headers: &HeaderMap) -> Option<String> {
    let tag = headers.get(&IF_MATCH)?.to_str().unwrap_or_default();
    (tag != "*").then(|| tag.trim_matches('"').to_owned())
}

/// Parameters for configuration changes.
#[derive(Debug, Deserialize)]
struct Origin {
    /// Command used by the client.
    #[serde(default)]
    how: How,
    /// Allow objects that are not available.
    #[serde(default)]
    allow_unavailable: bool,
}

async fn apply(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Query(origin): Query<Origin>,
    headers: HeaderMap,
    text: String,
) -> Response {
    let apply = AdminCommand::Apply {
        proposal: Proposal::Whole(text),
        replaces: replaced(&headers),
        how: origin.how,
        allow_unavailable: origin.allow_unavailable,
    };
    to_response(forward(&requests, apply, peer).await)
}

/// Parses a patch, if the media type is a patch type.
fn patch_of(headers: &HeaderMap, text: &str) -> Option<Result<Proposal, Failure>> {
    let media_type = text_of(headers, &CONTENT_TYPE).unwrap_or_default();
    let patch = Patch::parse(media_type, text)?.map(Proposal::Patch);
    Some(patch.map_err(|error| Failure::Mistake(error.to_string())))
}

async fn patch(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Query(origin): Query<Origin>,
    headers: HeaderMap,
    text: String,
) -> Response {
    let proposal = match patch_of(&headers, &text) {
        Some(Ok(proposal)) => proposal,
        Some(Err(mistake)) => return to_response(Err(mistake)),
        // RFC 5789 2.2: the response should list the supported types.
        None => {
            let accepted = [Patch::MERGE, Patch::OPERATIONS].join(", ");
            let why = format!(
                "unsupported media type for a patch: use {}",
                accepted.replace(", ", " or ")
            );
            let refused = error(StatusCode::UNSUPPORTED_MEDIA_TYPE, &why);
            return ([(ACCEPT_PATCH, accepted)], refused).into_response();
        }
    };
    let apply = AdminCommand::Apply {
        proposal,
        replaces: replaced(&headers),
        how: origin.how,
        allow_unavailable: origin.allow_unavailable,
    };
    to_response(forward(&requests, apply, peer).await)
}

async fn diff(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    headers: HeaderMap,
    text: String,
) -> Response {
    match patch_of(&headers, &text).unwrap_or(Ok(Proposal::Whole(text))) {
        Ok(proposal) => to_response(forward(&requests, AdminCommand::Diff(proposal), peer).await),
        Err(mistake) => to_response(Err(mistake)),
    }
}

async fn clear_flush_failure(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    text: String,
) -> Response {
    let serial = Some(text.trim().to_owned()).filter(|serial| !serial.is_empty());
    to_response(forward(&requests, AdminCommand::ClearFlushFailure(serial), peer).await)
}

/// Parameters for a scrub.
#[derive(Debug, Deserialize)]
struct Pace {
    /// Maximum number of bytes read in a second, or zero if this is not limited.
    #[serde(default = "default_rate")]
    rate: u64,
}

const fn default_rate() -> u64 {
    SCRUB_RATE
}

async fn scrub(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Query(pace): Query<Pace>,
    text: String,
) -> Response {
    let scrub = AdminCommand::Scrub {
        backend: text.trim().to_owned(),
        rate: (pace.rate > 0).then_some(pace.rate),
    };
    to_response(forward(&requests, scrub, peer).await)
}

async fn stop_scrub(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    text: String,
) -> Response {
    let stop = AdminCommand::StopScrub(text.trim().to_owned());
    to_response(forward(&requests, stop, peer).await)
}

/// Parameters for a disconnect.
#[derive(Debug, Deserialize)]
struct Blocking {
    /// Block the initiator.
    #[serde(default)]
    block: bool,
    /// Blocking time in seconds; not set if there is no limit.
    seconds: Option<u64>,
}

async fn disconnect(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Query(blocking): Query<Blocking>,
    text: String,
) -> Response {
    let block = match (blocking.block, blocking.seconds) {
        (false, None) => None,
        (true, None) => Some(Block::Unlimited),
        (true, Some(seconds)) => Some(Block::For(Duration::from_secs(seconds))),
        (false, Some(_)) => return error(StatusCode::BAD_REQUEST, "`seconds` requires block=true"),
    };
    match text.trim() {
        "" => error(
            StatusCode::BAD_REQUEST,
            "missing initiator or session number",
        ),
        name => {
            let name = name.to_owned();
            to_response(forward(&requests, AdminCommand::Disconnect { name, block }, peer).await)
        }
    }
}

async fn unblock(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    text: String,
) -> Response {
    to_response(
        forward(
            &requests,
            AdminCommand::Unblock(text.trim().to_owned()),
            peer,
        )
        .await,
    )
}

/// Parameters for a rollback.
#[derive(Debug, Deserialize)]
struct Availability {
    /// Same as in [`Origin`].
    #[serde(default)]
    allow_unavailable: bool,
}

async fn rollback(
    State(requests): State<Requests>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    Query(availability): Query<Availability>,
    text: String,
) -> Response {
    let back = match text.trim() {
        "" => Ok(1),
        number => number.parse(),
    };
    match back {
        Ok(back) => {
            let rollback = AdminCommand::Rollback {
                back,
                allow_unavailable: availability.allow_unavailable,
            };
            to_response(forward(&requests, rollback, peer).await)
        }
        Err(_) => error(
            StatusCode::BAD_REQUEST,
            "invalid number of configurations to roll back",
        ),
    }
}

/// Traces commands until the client disconnects or the trace is complete.
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
    if let Err(failure) = forward(&requests, AdminCommand::Trace(wanted), peer.clone()).await {
        return to_response(Err(failure));
    }
    let until = tokio::time::Instant::now() + patience.unwrap_or_default();
    let ending = EndTrace(Some(requests.clone()));
    while tokio::time::Instant::now() < until {
        tokio::time::sleep_until(until.min(tokio::time::Instant::now() + EVERY)).await;
        // If the daemon is too busy, we just try again in the next iteration.
        let looked = forward(&requests, AdminCommand::TraceLook, peer.clone()).await;
        if looked.is_ok_and(|enough| enough == Value::Bool(true)) {
            break;
        }
    }
    ending.defuse();
    to_response(forward(&requests, AdminCommand::TraceEnd, peer).await)
}

/// Stops the trace if the client disconnects.
struct EndTrace(Option<Requests>);

impl EndTrace {
    /// Call this if the trace is stopped in a different way.
    fn defuse(mut self) {
        self.0 = None;
    }
}

impl Drop for EndTrace {
    fn drop(&mut self) {
        if let Some(requests) = self.0.take() {
            let (reply, _) = oneshot::channel();
            let (command, who) = (AdminCommand::TraceEnd, String::new());
            // If the daemon is too busy for this, it will detect that the trace is no longer
            // polled.
            let _ = requests.try_send(AdminRequest {
                command,
                who,
                reply,
            });
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
        let why = "only root and the daemon's own user can specify a program".to_owned();
        return to_response(Err(Failure::Refused { why, errno: None }));
    }
    to_response(forward(&requests, AdminCommand::Upgrade(program), peer).await)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn unreadable_condition_is_not_met() {
        let replaced = |value: &[u8]| {
            let value = HeaderValue::from_bytes(value).unwrap();
            replaced(&HeaderMap::from_iter([(IF_MATCH, value)]))
        };
        assert_eq!(replaced(b"*"), None);
        assert_eq!(replaced(b"\"0123\"").as_deref(), Some("0123"));
        assert_eq!(replaced(b"\"\xe9\"").as_deref(), Some(""));
    }
}
