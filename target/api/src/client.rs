//! A client of the admin API: what `riserd sessions` and its like ask with.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;

use crate::upgrade::Upgrade;
use crate::view::Status;

/// Time limit for an answer that a daemon has at once.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Time limit for an upgrade: a shutdown that waits for all it may wait for, and a start.
const UPGRADE: Duration = Duration::from_secs(150);

/// Interval at which a daemon is asked for the end of its upgrade.
const LOOK: Duration = Duration::from_millis(50);

/// The longest answer that is read, in bytes.
const MAX_ANSWER: usize = 64 << 20;

/// A request without a usable answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no place to look for a daemon.
    #[error("no default admin socket for this user; name one with --socket")]
    Nowhere,
    /// The socket accepts no connection, or a connection failed before its answer.
    #[error("no riserd answers at {}: {source}", path.display())]
    Unreachable {
        /// Path of the admin socket.
        path: PathBuf,
        /// Error of the connection.
        source: io::Error,
    },
    /// It took too long.
    #[error("riserd did not answer in time")]
    Timeout,
    /// The daemon found a mistake in what it was sent.
    #[error("{0}")]
    Mistake(String),
    /// The daemon said no.
    #[error("{why}")]
    Refused {
        /// The daemon's reason, for people.
        why: String,
        /// Error number of the operating system at the daemon, if that is what it failed for.
        errno: Option<i32>,
    },
    /// The daemon's configuration is not the revision that was to be replaced.
    #[error("{0}")]
    Outdated(String),
    /// No program has taken over.
    #[error("{0}")]
    NotUpgraded(String),
    /// Not an answer of this API.
    #[error("not an answer of riserd's admin API: {0}")]
    Garbled(String),
}

/// A request to a daemon.
#[derive(Clone, Debug)]
pub struct Question {
    /// HTTP method: GET only looks, POST changes something.
    pub method: Method,
    /// Path of the request, from `/v1` on.
    pub path: &'static str,
    /// The body; empty for none.
    pub body: String,
    /// The form of the answer; `None` for what the daemon prefers.
    pub accept: Option<&'static str>,
    /// The revision of the configuration that is to be replaced; `None` for any.
    pub replaces: Option<String>,
    /// Time limit for the answer.
    pub patience: Duration,
}

/// The daemon's answer, with its status still to be judged.
#[derive(Clone, Debug)]
pub struct Said {
    /// The body, which is JSON as a rule.
    pub body: Bytes,
    /// The revision of the configuration that it is, if it is one.
    pub revision: Option<String>,
}

impl Question {
    /// One without a body.
    #[must_use]
    pub fn new(method: Method, path: &'static str) -> Self {
        Self {
            method,
            path,
            body: String::new(),
            accept: None,
            replaces: None,
            patience: PATIENCE,
        }
    }

    /// The same with a body.
    #[must_use]
    pub fn with(self, body: String) -> Self {
        Self { body, ..self }
    }
}

/// Asks the daemon at a socket and waits for what it says.
///
/// # Errors
/// [`ClientError`].
pub fn call<T: DeserializeOwned>(socket: &Path, question: Question) -> Result<T, ClientError> {
    let said = fetch(socket, question)?;
    serde_json::from_slice(&said.body).map_err(|e| ClientError::Garbled(e.to_string()))
}

/// An upgrade that is done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Upgraded {
    /// The upgrade as the daemon has announced it before it ended.
    #[serde(flatten)]
    pub upgrade: Upgrade,
    /// Process id of the daemon, which stays the same.
    pub pid: u32,
}

/// Lets the daemon at a socket hand over to a program, by default to the one at its own place, and
/// waits until that serves.
///
/// # Errors
/// [`ClientError`]: refused; or it was begun and this daemon serves on, or none does.
pub fn upgrade(socket: &Path, program: Option<&str>) -> Result<Upgraded, ClientError> {
    let question = Question::new(Method::POST, "/v1/upgrade");
    let question = question.with(program.unwrap_or_default().to_owned());
    let upgrade: Upgrade = call(socket, question)?;
    let until = Instant::now() + UPGRADE;
    loop {
        // Between the two programs no request is answered, so an answer is of the one or the other.
        let status = call::<Status>(socket, Question::new(Method::GET, "/v1/status"));
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

/// As [`call`], for an answer of any form.
///
/// # Errors
/// [`ClientError`].
pub fn fetch(socket: &Path, question: Question) -> Result<Said, ClientError> {
    let unreachable = |source| ClientError::Unreachable {
        path: socket.to_owned(),
        source,
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

async fn exchange(
    stream: UnixStream,
    question: Question,
) -> Result<(StatusCode, Said), ClientError> {
    let garbled = |e: hyper::Error| ClientError::Garbled(e.to_string());
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(garbled)?;
    tokio::spawn(connection);
    // HTTP/1.1 requires a host (RFC 9112 3.2), though a Unix socket has none.
    let mut request = Request::builder()
        .method(question.method)
        .uri(question.path)
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
    let body = Limited::new(response.into_body(), MAX_ANSWER)
        .collect()
        .await;
    let body = body.map_err(|e| ClientError::Garbled(e.to_string()))?;
    let body = body.to_bytes();
    Ok((status, Said { body, revision }))
}
