//! HTTP servers with graceful shutdown.

use std::pin::Pin;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Longest time for which answers may still be written at the end.
const LAST_ANSWERS: Duration = Duration::from_secs(1);

/// Resolves when a server is to end.
pub(super) type End = Pin<Box<dyn Future<Output = ()> + Send>>;

/// An HTTP server. Once this is dropped it accepts no connection, and answers the requests that it
/// has.
#[derive(Debug)]
pub(super) struct Serving {
    end: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Serving {
    /// Runs a server. Must be called on the control plane's runtime.
    pub(super) fn spawn<S>(serve: impl FnOnce(End) -> S) -> Self
    where
        S: IntoFuture,
        S::IntoFuture: Send + 'static,
    {
        let (end, ended) = oneshot::channel::<()>();
        let ended: End = Box::pin(async {
            // Nothing is ever sent: the other end goes.
            let _ = ended.await;
        });
        let service = serve(ended).into_future();
        let task = tokio::spawn(async {
            service.await;
        });
        Self { end, task }
    }

    /// Ends it, and waits until every client has its answer, or has had time for it.
    pub(super) async fn end(self) {
        let Self { end, mut task } = self;
        drop(end);
        if timeout(LAST_ANSWERS, &mut task).await.is_err() {
            task.abort();
        }
    }
}
