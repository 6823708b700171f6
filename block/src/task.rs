//! Executor used by exports to run their requests.
//!
//! A request is a future. [`spawn`] polls it immediately on the current thread. Later it is polled
//! by the thread that calls the waker, directly in the wake call. This way, an operation completed
//! by the transport continues with its reply without a thread switch, which would be most of the
//! latency for small requests. So a future must never block, and the thread that calls the waker
//! must not hold any lock used by the future.
//!
//! If a task is woken by a poll on the same thread, it is queued and will run after that poll has
//! returned. This avoids a stack overflow if requests complete each other in a chain.
//!
//! [`block_on`] waits for a future on the current thread.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

/// Not running, and not woken.
const IDLE: u8 = 0;
/// Polled by a thread, or in the queue of a thread.
const RUNNING: u8 = 1;
/// Same as `RUNNING`, but it has been woken since, so we need to poll again.
const AGAIN: u8 = 2;
/// The future has completed and was dropped.
const DONE: u8 = 3;

struct Task {
    state: AtomicU8,
    future: Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>,
}

thread_local! {
    /// Tasks to run after the current poll; `None` if there is no current poll.
    static QUEUE: RefCell<Option<VecDeque<Arc<Task>>>> = const { RefCell::new(None) };
}

/// Runs a future on the current thread until it has to wait, then on the threads that wake it.
pub fn spawn(future: impl Future<Output = ()> + Send + 'static) {
    run(Arc::new(Task {
        state: AtomicU8::new(RUNNING),
        future: Mutex::new(Some(Box::pin(future))),
    }));
}

/// Runs a `RUNNING` task, either immediately or after the current poll.
fn run(task: Arc<Task>) {
    let queued = QUEUE.with_borrow_mut(|queue| match queue {
        Some(queue) => {
            queue.push_back(task.clone());
            true
        }
        None => {
            *queue = Some(VecDeque::new());
            false
        }
    });
    if queued {
        return;
    }
    // If a poll panics, we must not leave the queue in the busy state.
    struct Leave;
    impl Drop for Leave {
        fn drop(&mut self) {
            QUEUE.with_borrow_mut(|queue| *queue = None);
        }
    }
    let _leave = Leave;
    let mut next = Some(task);
    while let Some(task) = next {
        poll(task);
        next = QUEUE.with_borrow_mut(|queue| queue.as_mut().and_then(VecDeque::pop_front));
    }
}

fn poll(task: Arc<Task>) {
    let waker = Waker::from(task.clone());
    loop {
        let done = {
            let mut slot = task.future.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(future) = slot.as_mut() else { return };
            let done = future
                .as_mut()
                .poll(&mut Context::from_waker(&waker))
                .is_ready();
            if done {
                *slot = None;
            }
            done
        };
        if done {
            task.state.store(DONE, Ordering::Release);
            return;
        }
        if task
            .state
            .compare_exchange(RUNNING, IDLE, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
        {
            return;
        }
        // It was woken during the poll.
        task.state.store(RUNNING, Ordering::Release);
    }
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        let mut state = self.state.load(Ordering::Acquire);
        loop {
            let next = match state {
                IDLE => RUNNING,
                RUNNING => AGAIN,
                _ => return,
            };
            match self
                .state
                .compare_exchange(state, next, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(IDLE) => return run(self),
                Ok(_) => return,
                Err(now) => state = now,
            }
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits for a future on the current thread.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut cx = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
            return output;
        }
        thread::park();
    }
}

/// Waits for multiple futures, running concurrently. All pending futures are polled on each wake,
/// so this should only be used for a small number.
pub async fn join_all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut futures: Vec<_> = futures
        .into_iter()
        .map(|f| (Some(Box::pin(f)), None))
        .collect();
    poll_fn(|cx| {
        let mut pending = false;
        for (future, output) in &mut futures {
            if let Some(running) = future {
                match running.as_mut().poll(cx) {
                    Poll::Ready(value) => {
                        *output = Some(value);
                        // A future must not be polled after it has completed. This also releases
                        // its memory early.
                        *future = None;
                    }
                    Poll::Pending => pending = true,
                }
            }
        }
        if pending {
            Poll::Pending
        } else {
            Poll::Ready(())
        }
    })
    .await;
    futures
        .into_iter()
        .map(|(_, output)| output.expect("all are done"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::sync::mpsc;

    #[test]
    fn waking_thread_polls_task() {
        let (tx, rx) = mpsc::channel();
        let (waker_tx, waker_rx) = mpsc::channel::<Waker>();
        let mut polls = 0;
        spawn(poll_fn(move |cx| {
            polls += 1;
            if polls == 1 {
                waker_tx.send(cx.waker().clone()).unwrap();
                return Poll::Pending;
            }
            tx.send(thread::current().id()).unwrap();
            Poll::Ready(())
        }));
        let waker = waker_rx.recv().unwrap();
        let other = thread::spawn(move || {
            waker.wake_by_ref();
            // It has completed, so this should do nothing.
            waker.wake();
            thread::current().id()
        })
        .join()
        .unwrap();
        assert_eq!(rx.recv().unwrap(), other);
    }

    #[test]
    fn wake_chain_uses_constant_stack() {
        const TASKS: usize = 200_000;
        let woken: Arc<Mutex<Vec<Waker>>> = Arc::default();
        let ran = Arc::new(AtomicUsize::new(0));
        for _ in 0..TASKS {
            let (woken, ran) = (woken.clone(), ran.clone());
            let mut first = true;
            spawn(poll_fn(move |cx| {
                if std::mem::take(&mut first) {
                    woken.lock().unwrap().push(cx.waker().clone());
                    return Poll::Pending;
                }
                ran.fetch_add(1, Ordering::Relaxed);
                let next = woken.lock().unwrap().pop();
                if let Some(next) = next {
                    next.wake();
                }
                Poll::Ready(())
            }));
        }
        let first = woken.lock().unwrap().pop().unwrap();
        first.wake();
        assert_eq!(ran.load(Ordering::Relaxed), TASKS);
    }

    #[test]
    fn block_on_waits_for_cross_thread_wake() {
        let (tx, rx) = mpsc::channel::<Waker>();
        let flag = Arc::new(AtomicUsize::new(0));
        let set = flag.clone();
        let helper = thread::spawn(move || {
            let waker = rx.recv().unwrap();
            set.store(7, Ordering::Release);
            waker.wake();
        });
        let got = block_on(poll_fn(|cx| match flag.load(Ordering::Acquire) {
            0 => {
                tx.send(cx.waker().clone()).ok();
                Poll::Pending
            }
            n => Poll::Ready(n),
        }));
        assert_eq!(got, 7);
        helper.join().unwrap();
    }
}
