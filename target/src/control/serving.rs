//! HTTP servers with graceful shutdown.

use std::pin::Pin;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Maximum time to send responses during shutdown.
const LAST_RESPONSES: Duration = Duration::from_secs(1);

/// Resolves when a server should shut down.
pub(super) type End = Pin<Box<dyn Future<Output = ()> + Send>>;

/// An HTTP server. When this is dropped, the server stops accepting connections, and completes the
/// pending requests.
#[derive(Debug)]
pub(super) struct Serving {
    end: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Serving {
    /// Spawns a server. This must be called on the control plane's runtime.
    pub(super) fn spawn<S>(serve: impl FnOnce(End) -> S) -> Self
    where
        S: IntoFuture,
        S::IntoFuture: Send + 'static,
    {
        let (end, ended) = oneshot::channel::<()>();
        let ended: End = Box::pin(async {
            // The sender never sends anything, so this waits until it is dropped.
            let _ = ended.await;
        });
        let service = serve(ended).into_future();
        let task = tokio::spawn(async {
            service.await;
        });
        Self { end, task }
    }

    /// Shuts down the server, and waits until all clients have received their responses or have
    /// timed out.
    pub(super) async fn shut_down(self) {
        let Self { end, mut task } = self;
        drop(end);
        if timeout(LAST_RESPONSES, &mut task).await.is_err() {
            task.abort();
        }
    }
}
