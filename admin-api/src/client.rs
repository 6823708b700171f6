//! A client for the admin API, used by `riserd sessions` and similar commands.

use std::borrow::Cow;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use nix::unistd::Group;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

use crate::upgrade::Upgrade;
use crate::view::Status;

/// Timeout for responses that are available immediately.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Timeout for an upgrade: a shutdown with all of its wait times, followed by a start.
const UPGRADE: Duration = Duration::from_secs(150);

/// Interval to poll the daemon during an upgrade.
const LOOK: Duration = Duration::from_millis(50);

/// Maximum response size in bytes.
const MAX_RESPONSE: usize = 64 << 20;

/// A request that failed, or has no valid response.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no default path for the socket.
    #[error("no default admin socket for this user; name one with --socket")]
    Nowhere,
    /// The socket refused the connection, or it was closed before we received a response.
    #[error("cannot connect to riserd at {}: {source}", path.display())]
    Unreachable {
        /// Path of the admin socket.
        path: PathBuf,
        /// Connection error.
        source: io::Error,
    },
    /// The user is not allowed to use the socket.
    #[error(
        "permission denied at {}: use root, or join the group {group} and log in again", path.display()
    )]
    Denied {
        /// Path of the admin socket.
        path: PathBuf,
        /// Group that is allowed to use the socket.
        group: String,
    },
    /// The request timed out.
    #[error("timed out waiting for a response from riserd")]
    Timeout,
    /// The daemon found an error in the request.
    #[error("{0}")]
    Mistake(String),
    /// The daemon rejected the request.
    #[error("{why}")]
    Refused {
        /// Human-readable reason.
        why: String,
        /// The `errno` value of the daemon, if the request failed with a system error.
        errno: Option<i32>,
    },
    /// The current configuration is not the revision that should be replaced.
    #[error("{0}")]
    Outdated(String),
    /// The upgrade failed, and the old program is still running.
    #[error("{0}")]
    NotUpgraded(String),
    /// The response is not valid for this API.
    #[error("invalid response from riserd's admin API: {0}")]
    Garbled(String),
}

/// A request to the daemon.
#[derive(Clone, Debug)]
pub struct ApiRequest {
    /// HTTP method. GET only reads data, POST changes it.
    pub method: Method,
    /// Request path, starting with `/v1`.
    pub path: Cow<'static, str>,
    /// Request body; can be empty.
    pub body: String,
    /// Accepted response format. `None` uses the default.
    pub accept: Option<&'static str>,
    /// Configuration revision to replace. `None` replaces any revision.
    pub replaces: Option<String>,
    /// Response timeout.
    pub patience: Duration,
}

/// A response from the daemon, before its status is checked.
#[derive(Clone, Debug)]
pub struct ApiResponse {
    /// Response body, usually in JSON format.
    pub body: Bytes,
    /// Configuration revision, if the response is a configuration.
    pub revision: Option<String>,
}

impl ApiRequest {
    /// Creates a request without a body.
    #[must_use]
    pub fn new(method: Method, path: impl Into<Cow<'static, str>>) -> Self {
        Self {
            method,
            path: path.into(),
            body: String::new(),
            accept: None,
            replaces: None,
            patience: PATIENCE,
        }
    }

    /// Sets the request body.
    #[must_use]
    pub fn with(self, body: String) -> Self {
        Self { body, ..self }
    }
}

/// Sends a request to the daemon's socket, and waits for the response.
///
/// # Errors
/// See [`ClientError`].
pub fn call<T: DeserializeOwned>(socket: &Path, question: ApiRequest) -> Result<T, ClientError> {
    let said = fetch(socket, question)?;
    serde_json::from_slice(&said.body).map_err(|e| ClientError::Garbled(e.to_string()))
}

/// A completed upgrade.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upgraded {
    /// The upgrade, as announced by the daemon before it started.
    #[serde(flatten)]
    pub upgrade: Upgrade,
    /// Process ID of the daemon, which does not change.
    pub pid: u32,
}

/// Upgrades the daemon on this socket to a program, by default to the program at its current path.
/// Waits until the new program is ready.
///
/// # Errors
/// Returns a [`ClientError`] if the upgrade was rejected, or if it failed, no matter if the old
/// daemon is still running or not.
pub fn upgrade(socket: &Path, program: Option<&str>) -> Result<Upgraded, ClientError> {
    let question = ApiRequest::new(Method::POST, "/v1/upgrade");
    let question = question.with(program.unwrap_or_default().to_owned());
    let upgrade: Upgrade = call(socket, question)?;
    let until = Instant::now() + UPGRADE;
    loop {
        // No requests are handled between the two programs, so a response must be from one of them.
        let status = call::<Status>(socket, ApiRequest::new(Method::GET, "/v1/status"));
        match status {
            Ok(status) if status.upgrade_record.upgrades == upgrade.upgrades => {
                let pid = status.pid;
                return Ok(Upgraded { upgrade, pid });
            }
            Ok(status) => {
                let error = status.upgrade_record.upgrade_error;
                let why = error.unwrap_or_else(|| "the daemon has restarted".to_owned());
                return Err(ClientError::NotUpgraded(why));
            }
            Err(error) if Instant::now() > until => return Err(error),
            Err(_) => std::thread::sleep(LOOK),
        }
    }
}

/// Same as [`call`], for responses in any format.
///
/// # Errors
/// See [`ClientError`].
pub fn fetch(socket: &Path, question: ApiRequest) -> Result<ApiResponse, ClientError> {
    let unreachable = |source: io::Error| {
        let path = socket.to_owned();
        match source.kind() {
            io::ErrorKind::PermissionDenied => ClientError::Denied {
                group: group_of(socket),
                path,
            },
            _ => ClientError::Unreachable { path, source },
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(unreachable)?;
    runtime.block_on(async {
        let stream = UnixStream::connect(socket).await.map_err(unreachable)?;
        let exchange = tokio::time::timeout(question.patience, exchange(stream, question));
        let (status, said) = exchange.await.map_err(|_| ClientError::Timeout)??;
        if status == StatusCode::OK {
            return Ok(said);
        }
        let error: serde_json::Value = serde_json::from_slice(&said.body).unwrap_or_default();
        let Some(text) = error["error"].as_str().map(str::to_owned) else {
            return Err(ClientError::Garbled(status.to_string()));
        };
        let errno = error["errno"].as_i64().and_then(|n| n.try_into().ok());
        Err(match status {
            StatusCode::BAD_REQUEST => ClientError::Mistake(text),
            StatusCode::PRECONDITION_FAILED => ClientError::Outdated(text),
            _ => ClientError::Refused { why: text, errno },
        })
    })
}

/// Returns the group name or ID of a socket. If we cannot access the socket, this is the group of
/// its directory.
fn group_of(socket: &Path) -> String {
    let metadata = socket.ancestors().find_map(|path| fs::metadata(path).ok());
    let Some(gid) = metadata.map(|metadata| metadata.gid()) else {
        return "of the daemon".to_owned();
    };
    match Group::from_gid(gid.into()) {
        Ok(Some(group)) => group.name,
        _ => gid.to_string(),
    }
}

async fn exchange(
    stream: UnixStream,
    question: ApiRequest,
) -> Result<(StatusCode, ApiResponse), ClientError> {
    let garbled = |e: hyper::Error| ClientError::Garbled(e.to_string());
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(garbled)?;
    tokio::spawn(connection);
    // HTTP/1.1 requires a host (RFC 9112 3.2), even though a Unix socket does not have one.
    let mut request = Request::builder()
        .method(question.method)
        .uri(&*question.path)
        .header(hyper::header::HOST, "riserd");
    if let Some(accept) = question.accept {
        request = request.header(hyper::header::ACCEPT, accept);
    }
    if let Some(revision) = question.replaces {
        request = request.header(hyper::header::IF_MATCH, format!("\"{revision}\""));
    }
    let request = request
        .body(Full::new(Bytes::from(question.body)))
        .map_err(|e| ClientError::Garbled(e.to_string()))?;
    let response = sender.send_request(request).await.map_err(garbled)?;
    let status = response.status();
    let revision = response.headers().get(hyper::header::ETAG);
    let revision = revision.and_then(|tag| tag.to_str().ok());
    let revision = revision.map(|tag| tag.trim_matches('"').to_owned());
    let body = Limited::new(response.into_body(), MAX_RESPONSE)
        .collect()
        .await;
    let body = body.map_err(|e| ClientError::Garbled(e.to_string()))?;
    let body = body.to_bytes();
    Ok((status, ApiResponse { body, revision }))
}
