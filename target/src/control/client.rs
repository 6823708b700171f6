//! A client of the admin API: what `riserd sessions` and its like ask with.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::body::Bytes;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

/// How long a daemon may take for an answer.
const PATIENCE: Duration = Duration::from_secs(10);

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
    /// The daemon said no.
    #[error("{0}")]
    Refused(String),
    /// Not an answer of this API.
    #[error("not an answer of riserd's admin API: {0}")]
    Garbled(String),
}

/// Sends a request to the daemon at a socket and waits for what it says.
///
/// # Errors
/// [`ClientError`].
pub fn call<T: DeserializeOwned>(
    socket: &Path,
    method: Method,
    path: &str,
) -> Result<T, ClientError> {
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
        let exchange = tokio::time::timeout(PATIENCE, exchange(stream, method, path));
        let (status, body) = exchange.await.map_err(|_| ClientError::Timeout)??;
        if status == StatusCode::OK {
            return serde_json::from_slice(&body).map_err(|e| ClientError::Garbled(e.to_string()));
        }
        let said: Option<serde_json::Value> = serde_json::from_slice(&body).ok();
        let text = said.as_ref().and_then(|v| v["error"].as_str());
        Err(text.map_or_else(
            || ClientError::Garbled(status.to_string()),
            |text| ClientError::Refused(text.to_owned()),
        ))
    })
}

async fn exchange(
    stream: UnixStream,
    method: Method,
    path: &str,
) -> Result<(StatusCode, Bytes), ClientError> {
    let garbled = |e: hyper::Error| ClientError::Garbled(e.to_string());
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(garbled)?;
    tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header(hyper::header::HOST, "riserd")
        .body(Empty::<Bytes>::new())
        .map_err(|e| ClientError::Garbled(e.to_string()))?;
    let response = sender.send_request(request).await.map_err(garbled)?;
    let status = response.status();
    let body = Limited::new(response.into_body(), MAX_ANSWER)
        .collect()
        .await;
    let body = body.map_err(|e| ClientError::Garbled(e.to_string()))?;
    Ok((status, body.to_bytes()))
}
