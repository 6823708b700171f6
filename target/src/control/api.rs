//! Requests to the daemon and their answers: between the routes, whose clients ask, and the thread
//! that owns the server.

use std::path::PathBuf;

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

/// Question or order to the daemon, without its origin.
#[derive(Clone, Debug, PartialEq)]
pub enum Ask {
    /// Show the state of the daemon.
    Status,
    /// Show the sessions that are logged in.
    Sessions,
    /// Show the targets that are served.
    Targets,
    /// Read the configuration file again.
    Reload,
    /// Measure the backends again.
    Rescan,
    /// Let flushes succeed again on the backend of the unit with this serial number, or on all.
    ClearFlushFailure(Option<String>),
    /// Hand over to a program, by default to the one at the daemon's own path.
    Upgrade(Option<PathBuf>),
    /// Return the configuration: [`Kept`].
    Config,
    /// Serve another configuration from now on.
    Apply {
        /// The configuration, or a change of the present one.
        proposal: Proposal,
        /// The revision in whose place; any where absent.
        replaces: Option<String>,
    },
    /// Show the changes that taking this configuration would make.
    Diff(Proposal),
    /// Go back by this number of configurations.
    Rollback(usize),
    /// List the configurations that were served.
    History,
    /// Begin to trace commands.
    Trace(Wanted),
    /// Return whether enough commands were traced.
    TraceLook,
    /// End a trace and return its result: [`Traced`](riser_admin_api::trace::Traced).
    TraceEnd,
    /// Return the metrics for Prometheus.
    Metrics,
    /// Return the counters of the status page.
    Live,
    /// Return the samples and events of the last minutes.
    Recent(Since),
    /// Return whether the daemon works.
    Health,
    /// Return whether the daemon serves all that it should.
    Ready,
}

/// A configuration that a client asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Proposal {
    /// Text of a whole configuration, YAML or JSON.
    Whole(String),
    /// Change of the present configuration.
    Patch(Patch),
}

/// A configuration in both forms.
#[derive(Debug, Serialize, Deserialize)]
pub struct Kept {
    /// Hash that names its content.
    pub revision: String,
    /// As a file that reads back equal.
    pub yaml: String,
    /// The same as JSON.
    pub json: Value,
}

/// Reason why a request was not fulfilled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The configuration has a mistake; nothing has changed.
    #[error("{0}")]
    Mistake(String),
    /// It is not possible as things are; nothing has changed.
    #[error("{why}")]
    Refused {
        /// Reason for the refusal, for people.
        why: String,
        /// Error number of the operating system, if one is the cause.
        errno: Option<i32>,
    },
    /// The configuration is not the revision that was to be replaced; nothing has changed.
    #[error("the configuration has changed meanwhile")]
    Outdated,
    /// An attempt failed, with this reason.
    #[error("{0}")]
    Failed(String),
    /// The daemon has no time for it now.
    #[error("the daemon is busy or ends; try again")]
    Busy,
}

/// Result of a request.
pub type Answer = Result<Value, Failure>;

/// A request on its way to the thread that owns the server.
#[derive(Debug)]
pub struct AdminRequest {
    /// Question or order.
    pub ask: Ask,
    /// User or process that asks, for the log.
    pub who: String,
    /// Channel that takes the answer.
    pub reply: oneshot::Sender<Answer>,
}

/// Process at the other end of the socket.
#[derive(Clone, Debug)]
pub struct Peer {
    name: String,
    /// As which user it runs.
    uid: Option<u32>,
    pub(super) entry: TableEntry,
}

impl Peer {
    /// Returns whether the peer may let the daemon run any program: root, and users that could run
    /// it as this user anyway. Others who may use the socket may change only what is served.
    pub(super) fn may_name_programs(&self) -> bool {
        let own = rustix::process::geteuid().as_raw();
        self.uid.is_some_and(|uid| uid == 0 || uid == own)
    }
}

impl Connected<IncomingStream<'_, Bounded<UnixListener>>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Bounded<UnixListener>>) -> Self {
        let entry = stream.io().entry().clone();
        // Without credentials there is no user, and so no right that depends on one.
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

/// A client that can only look.
impl Connected<IncomingStream<'_, Bounded<TcpListener>>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Bounded<TcpListener>>) -> Self {
        Self {
            name: "http".to_owned(),
            uid: None,
            entry: stream.io().entry().clone(),
        }
    }
}

/// Queue of requests to the thread that owns the server.
pub type Requests = mpsc::Sender<AdminRequest>;

pub(super) async fn forward(requests: &Requests, ask: Ask, peer: Peer) -> Answer {
    let _working = peer.entry.work();
    let (reply, answer) = oneshot::channel();
    let who = peer.name;
    let sent = requests.try_send(AdminRequest { ask, who, reply });
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
