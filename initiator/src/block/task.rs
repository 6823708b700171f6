//! The executor that exports run their requests on.
//!
//! A request is a future. [`spawn`] polls it at once on the caller's thread; the thread
//! that wakes it later polls it, inside the wake. So an operation that the transport completes
//! goes on to its reply without a switch to another thread, which is most of the latency of a
//! small request. A future must therefore never block, and the thread that wakes it must hold no
//! lock that the future takes.
//!
//! A wake from within a poll on the same thread is queued and runs when that poll returns, so
//! chains of requests that complete one another need no stack.
//!
//! [`block_on`] waits for one future on the calling thread.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

/// It is not polled, and was not woken.
const IDLE: u8 = 0;
/// A thread polls it or has it in its queue.
const RUNNING: u8 = 1;
/// As `RUNNING`, and it was woken since: poll again.
const AGAIN: u8 = 2;
/// Its future is done and gone.
const DONE: u8 = 3;

struct Task {
    state: AtomicU8,
    future: Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>,
}

thread_local! {
    /// Tasks to run after the poll that is going on; `None` when none is.
    static QUEUE: RefCell<Option<VecDeque<Arc<Task>>>> = const { RefCell::new(None) };
}

/// Runs a future on the calling thread until it first waits, then on the threads that wake it.
pub fn spawn(future: impl Future<Output = ()> + Send + 'static) {
    run(Arc::new(Task {
        state: AtomicU8::new(RUNNING),
        future: Mutex::new(Some(Box::pin(future))),
    }));
}

/// Runs a task that is `RUNNING`, now or after the poll that this thread is in.
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
    // A panic in a poll must not leave the queue looking busy for ever.
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
        // Woken while it was polled.
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

/// Waits for a future on the calling thread.
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

/// Waits for all of some futures, which go on side by side. Every wake polls all that are not done
/// yet, so it is for a handful of them.
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
                        // A future must not be polled after it has returned; this also frees its
                        // memory early.
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
    fn the_waking_thread_goes_on_with_the_task() {
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
            // It is done; waking it again is harmless.
            waker.wake();
            thread::current().id()
        })
        .join()
        .unwrap();
        assert_eq!(rx.recv().unwrap(), other);
    }

    #[test]
    fn a_chain_of_tasks_that_wake_one_another_needs_no_stack() {
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
    fn block_on_waits_for_a_wake_from_another_thread() {
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
