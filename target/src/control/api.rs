//! Requests and responses of the daemon, exchanged between the HTTP routes and the thread that owns
//! the server.

use std::path::PathBuf;
use std::time::Duration;

use axum::Json;
use axum::extract::connect_info::Connected;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::serve::IncomingStream;
use riser_config::Patch;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{mpsc, oneshot};

use super::bounded::{Bounded, TableEntry};
use super::timeline::Since;
use super::trace::Wanted;

/// Time to block an initiator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Block {
    /// Until an administrator unblocks the initiator.
    Unlimited,
    /// For the given time.
    For(Duration),
}

impl Block {
    /// Returns the duration, if limited.
    #[must_use]
    pub fn duration(self) -> Option<Duration> {
        match self {
            Self::Unlimited => None,
            Self::For(duration) => Some(duration),
        }
    }
}

/// A request to the daemon, without its origin.
#[derive(Clone, Debug, PartialEq)]
pub enum AdminCommand {
    /// Show the state of the daemon.
    Status,
    /// Show the current sessions.
    Sessions,
    /// Show the active targets.
    Targets,
    /// Reload the configuration file.
    Reload,
    /// Check the backends again.
    Rescan,
    /// Clear a failed flush for the backend of the unit with this serial number, or for all
    /// backends.
    ClearFlushFailure(Option<String>),
    /// List the last scrub of each backend.
    Scrubs,
    /// Start a scrub of a backend.
    Scrub {
        /// Name of the backend.
        backend: String,
        /// Maximum number of bytes read in a second, or `None` if this is not limited.
        rate: Option<u64>,
    },
    /// Stop the scrub of a backend.
    StopScrub(String),
    /// Log out the sessions of an initiator, or the session with a number.
    Disconnect {
        /// Initiator name or session number.
        name: String,
        /// Also block the initiator.
        block: Option<Block>,
    },
    /// Unblock an initiator.
    Unblock(String),
    /// Upgrade to a program, by default to the program at the daemon's path.
    Upgrade(Option<PathBuf>),
    /// Return the current configuration: [`Kept`].
    Config,
    /// Apply a new configuration.
    Apply {
        /// The new configuration, or a change to the current configuration.
        proposal: Proposal,
        /// Only replace this revision, if set.
        replaces: Option<String>,
        /// Command used by the client.
        how: How,
        /// Allow backends, portals and metrics addresses that are not available.
        allow_unavailable: bool,
    },
    /// Show the changes between the current configuration and this proposal.
    Diff(Proposal),
    /// Return to a previous configuration.
    Rollback {
        /// Number of configurations to go back.
        back: usize,
        /// Same as in [`AdminCommand::Apply`].
        allow_unavailable: bool,
    },
    /// List previous configurations.
    History,
    /// Start a trace.
    Trace(Wanted),
    /// Check if the trace is complete.
    TraceLook,
    /// Stop the trace and return its result: [`Traced`](riser_admin_api::trace::Traced).
    TraceEnd,
    /// Return the metrics in Prometheus format.
    Metrics,
    /// Return the counters for the status page.
    Live,
    /// Return the samples and events of the last minutes.
    Recent(Since),
    /// Check if the daemon is alive.
    Health,
    /// Check if all configured objects are available.
    Ready,
}

/// Command used to change the configuration, for the history and the audit log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum How {
    /// Apply a whole configuration, or a patch.
    #[default]
    Apply,
    /// Set keys of an object.
    Set,
    /// Create an object.
    Create,
    /// Delete an object or a key.
    Delete,
}

impl How {
    /// Returns the name of the command.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Apply => "apply",
            Self::Set => "set",
            Self::Create => "create",
            Self::Delete => "delete",
        }
    }
}

/// A new configuration requested by a client.
#[derive(Clone, Debug, PartialEq)]
pub enum Proposal {
    /// A whole configuration in YAML or JSON format.
    Whole(String),
    /// A change to the current configuration.
    Patch(Patch),
}

/// A configuration in both formats.
#[derive(Debug, Serialize, Deserialize)]
pub struct Kept {
    /// Hash of the content.
    pub revision: String,
    /// The configuration as a file, which can be parsed again.
    pub yaml: String,
    /// The same configuration in JSON format.
    pub json: Value,
}

/// Reason why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The configuration is not valid; nothing was changed.
    #[error("{0}")]
    Mistake(String),
    /// The request is not possible in the current state; nothing was changed.
    #[error("{why}")]
    Refused {
        /// Human-readable reason.
        why: String,
        /// The `errno` value, if this was caused by a system error.
        errno: Option<i32>,
    },
    /// The current configuration is not the revision to replace; nothing was changed.
    #[error("the configuration was changed in the meantime")]
    Outdated,
    /// The operation failed with this error.
    #[error("{0}")]
    Failed(String),
    /// The daemon is currently busy.
    #[error("the daemon is busy or terminating; try again")]
    Busy,
}

/// Result of a request.
pub type AdminResult = Result<Value, Failure>;

/// A request sent to the thread that owns the server.
#[derive(Debug)]
pub struct AdminRequest {
    /// The request.
    pub command: AdminCommand,
    /// Client user or process, for the log.
    pub who: String,
    /// Channel for the response.
    pub reply: oneshot::Sender<AdminResult>,
}

/// Process at the other end of the socket.
#[derive(Clone, Debug)]
pub struct Peer {
    name: String,
    /// User ID of the process.
    uid: Option<u32>,
    pub(super) entry: TableEntry,
}

impl Peer {
    /// Returns true if the peer is allowed to choose the program for an upgrade. This is the case
    /// for root and for users who could run programs as this user anyway. Other users of the socket
    /// can only change the configuration.
    pub(super) fn may_name_programs(&self) -> bool {
        let own = rustix::process::geteuid().as_raw();
        self.uid.is_some_and(|uid| uid == 0 || uid == own)
    }
}

impl Connected<IncomingStream<'_, Bounded<UnixListener>>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Bounded<UnixListener>>) -> Self {
        let entry = stream.io().entry().clone();
        // If there are no credentials, we don't know the user and cannot grant any rights.
        let Ok(peer) = stream.io().stream().peer_cred() else {
            return Self {
                name: "the admin socket".to_owned(),
                uid: None,
                entry,
            };
        };
        let uid = peer.uid();
        Self {
            name: match peer.pid() {
                Some(pid) => format!("uid {uid} (process {pid})"),
                None => format!("uid {uid}"),
            },
            uid: Some(uid),
            entry,
        }
    }
}

/// A read-only client.
impl Connected<IncomingStream<'_, Bounded<TcpListener>>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Bounded<TcpListener>>) -> Self {
        Self {
            name: "http".to_owned(),
            uid: None,
            entry: stream.io().entry().clone(),
        }
    }
}

/// Request queue of the thread that owns the server.
pub type Requests = mpsc::Sender<AdminRequest>;

pub(super) async fn forward(requests: &Requests, command: AdminCommand, peer: Peer) -> AdminResult {
    let _working = peer.entry.work();
    let (reply, result) = oneshot::channel();
    let who = peer.name;
    let sent = requests.try_send(AdminRequest {
        command,
        who,
        reply,
    });
    sent.map_err(|_| Failure::Busy)?;
    result.await.unwrap_or(Err(Failure::Busy))
}

pub(super) fn to_response(result: AdminResult) -> Response {
    match result {
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
