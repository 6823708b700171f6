//! A client of the admin API: what `riserd sessions` and its like ask with.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::body::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

/// How long a daemon may take for an answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// The longest answer that is read, in bytes.
const MAX_ANSWER: usize = 64 << 20;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no place to look for a daemon.
    #[error("no default admin socket for this user; name one with --socket")]
    Nowhere,
    /// Nobody answers.
    #[error("no riserd answers at {}: {source}", path.display())]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It took too long.
    #[error("riserd did not answer within {} s", PATIENCE.as_secs())]
    Timeout,
    /// The daemon found a mistake in what it was sent.
    #[error("{0}")]
    Mistake(String),
    /// The daemon said no.
    #[error("{0}")]
    Refused(String),
    /// Not an answer of this API.
    #[error("not an answer of riserd's admin API: {0}")]
    Garbled(String),
}

/// What is asked of a daemon.
#[derive(Clone, Debug)]
pub struct Question {
    /// What to do.
    pub method: Method,
    /// With what.
    pub path: &'static str,
    /// The body; empty for none.
    pub body: String,
    /// The form of the answer; `None` for what the daemon prefers.
    pub accept: Option<&'static str>,
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
    let body = fetch(socket, question)?;
    serde_json::from_slice(&body).map_err(|e| ClientError::Garbled(e.to_string()))
}

/// As [`call`], for an answer of any form.
///
/// # Errors
/// [`ClientError`].
pub fn fetch(socket: &Path, question: Question) -> Result<Bytes, ClientError> {
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
        let exchange = tokio::time::timeout(PATIENCE, exchange(stream, question));
        let (status, body) = exchange.await.map_err(|_| ClientError::Timeout)??;
        if status == StatusCode::OK {
            return Ok(body);
        }
        let said: Option<serde_json::Value> = serde_json::from_slice(&body).ok();
        let text = said.as_ref().and_then(|v| v["error"].as_str());
        Err(text.map_or_else(
            || ClientError::Garbled(status.to_string()),
            |text| match status {
                StatusCode::BAD_REQUEST => ClientError::Mistake(text.to_owned()),
                _ => ClientError::Refused(text.to_owned()),
            },
        ))
    })
}

async fn exchange(
    stream: UnixStream,
    question: Question,
) -> Result<(StatusCode, Bytes), ClientError> {
    let garbled = |e: hyper::Error| ClientError::Garbled(e.to_string());
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(garbled)?;
    tokio::spawn(connection);
    let mut request = Request::builder()
        .method(question.method)
        .uri(question.path)
        .header(hyper::header::HOST, "riserd");
    if let Some(accept) = question.accept {
        request = request.header(hyper::header::ACCEPT, accept);
    }
    let request = request
        .body(Full::new(Bytes::from(question.body)))
        .map_err(|e| ClientError::Garbled(e.to_string()))?;
    let response = sender.send_request(request).await.map_err(garbled)?;
    let status = response.status();
    let body = Limited::new(response.into_body(), MAX_ANSWER)
        .collect()
        .await;
    let body = body.map_err(|e| ClientError::Garbled(e.to_string()))?;
    Ok((status, body.to_bytes()))
}
