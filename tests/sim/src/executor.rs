//! Executor which polls woken futures in a deterministic order.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};

/// Set when a future must be polled again.
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

struct Task {
    future: Pin<Box<dyn Future<Output = ()>>>,
    woken: Arc<Woken>,
}

/// Pending tasks.
#[derive(Default)]
pub struct Executor(Vec<Task>);

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor")
            .field("tasks", &self.0.len())
            .finish()
    }
}

impl Executor {
    /// Adds a task that will be polled in the next turn.
    pub fn spawn(&mut self, future: impl Future<Output = ()> + 'static) {
        self.0.push(Task {
            future: Box::pin(future),
            woken: Arc::new(Woken(AtomicBool::new(true))),
        });
    }

    /// Returns the number of pending tasks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there are no pending tasks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Polls all woken tasks once. Returns their number.
    pub fn turn(&mut self) -> usize {
        let mut polled = 0;
        self.0.retain_mut(|task| {
            if !task.woken.0.swap(false, Ordering::SeqCst) {
                return true;
            }
            polled += 1;
            let waker = Waker::from(Arc::clone(&task.woken));
            let mut cx = Context::from_waker(&waker);
            task.future.as_mut().poll(&mut cx).is_pending()
        });
        polled
    }
}

impl Executor {
    /// Waits until all tasks have completed.
    pub async fn finish(mut self) {
        std::future::poll_fn(move |cx| {
            self.turn_with(cx.waker());
            match self.is_empty() {
                true => std::task::Poll::Ready(()),
                false => std::task::Poll::Pending,
            }
        })
        .await;
    }

    fn turn_with(&mut self, waker: &Waker) {
        self.0.retain_mut(|task| {
            let mut cx = Context::from_waker(waker);
            task.future.as_mut().poll(&mut cx).is_pending()
        });
    }
}
