//! Runs a workload if the device doesn't have a thread: each operation is a task, so the workload
//! continues on the thread that completes the operation.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use super::{BlockDevice, Completion, Operation, Submissions, Workload, task};

/// Runs a workload on the device thread if there is one, otherwise on the threads that complete its
/// operations.
///
/// # Errors
/// Returns an error if the timer thread can't be started.
pub fn drive<D: BlockDevice>(device: &Arc<D>, workload: Box<dyn Workload>) -> std::io::Result<()> {
    let Err(workload) = device.drive(workload) else {
        return Ok(());
    };
    let shared = Arc::new(Shared {
        device: device.clone(),
        state: Mutex::new(State {
            workload: Some(workload),
            outstanding: 0,
            wakes_at: None,
        }),
        changed: Condvar::new(),
    });
    let timer = shared.clone();
    let thread = thread::Builder::new().name("workload-timer".into());
    thread.spawn(move || timer.keep_time())?;
    Ok(())
}

struct Shared<D> {
    device: Arc<D>,
    state: Mutex<State>,
    /// Notified if the workload is done, or if the next due time is earlier than before.
    changed: Condvar,
}

struct State {
    /// `None` if the workload is done.
    workload: Option<Box<dyn Workload>>,
    outstanding: usize,
    /// Next timer expiry; `None` if not set.
    wakes_at: Option<Instant>,
}

/// Workload call.
enum Call {
    Submit,
    Complete(u32, Completion),
}

impl<D: BlockDevice> Shared<D> {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls the workload and starts the submitted operations.
    fn step(self: &Arc<Self>, call: Call) {
        let mut queue = Submissions::default();
        let over = {
            let mut state = self.state();
            let State {
                workload: Some(workload),
                outstanding,
                wakes_at,
            } = &mut *state
            else {
                return;
            };
            match call {
                Call::Submit => workload.submit(&mut queue),
                Call::Complete(tag, completion) => {
                    *outstanding -= 1;
                    workload.complete(tag, completion, &mut queue);
                }
            }
            *outstanding += queue.len();
            let due = workload.due();
            let is_over = *outstanding == 0 && due.is_none();
            let is_earlier = match (due, *wakes_at) {
                (Some(due), Some(at)) => due < at,
                (due, None) => due.is_some(),
                (None, Some(_)) => false,
            };
            if is_over || is_earlier {
                self.changed.notify_one();
            }
            is_over.then(|| state.workload.take())
        };
        // Drop it after unlocking, because it may call other code.
        drop(over);
        for (tag, operation) in queue.drain() {
            let shared = self.clone();
            task::spawn(async move {
                let completion = carry_out(&*shared.device, operation).await;
                shared.step(Call::Complete(tag, completion));
            });
        }
    }

    /// Submits operations when they are due, until the workload is done.
    fn keep_time(self: Arc<Self>) {
        self.step(Call::Submit);
        loop {
            let mut state = self.state();
            let Some(workload) = &state.workload else {
                return;
            };
            let due = workload.due();
            let left = due.map(|due| due.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                drop(state);
                self.step(Call::Submit);
                continue;
            }
            state.wakes_at = due;
            // A spurious wakeup is harmless, it just checks again.
            match left {
                Some(left) => drop(self.changed.wait_timeout(state, left)),
                None => drop(self.changed.wait(state)),
            }
        }
    }
}

async fn carry_out<D: BlockDevice>(device: &D, operation: Operation) -> Completion {
    match operation {
        Operation::Read { offset, buffer } => device.read(offset, buffer).await.map(Some),
        Operation::Write {
            offset,
            buffer,
            fua,
        } => device.write(offset, buffer, fua).await.map(Some),
        Operation::Discard(range) => device.discard(range).await.map(|()| None),
        Operation::Flush => device.flush().await.map(|()| None),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::MemoryDevice;

    /// Sends flushes: some immediately, and the others at a fixed interval.
    struct Flushes {
        at_once: u32,
        later: u32,
        due: Option<Instant>,
        completed: u32,
        over: mpsc::Sender<u32>,
    }

    impl Workload for Flushes {
        fn submit(&mut self, queue: &mut Submissions) {
            for tag in 0..std::mem::take(&mut self.at_once) {
                queue.push(tag, Operation::Flush);
            }
            if self.later > 0 {
                self.later -= 1;
                queue.push(99, Operation::Flush);
                let due = Instant::now() + Duration::from_millis(1);
                self.due = (self.later > 0).then_some(due);
            }
        }

        fn complete(&mut self, _tag: u32, completion: Completion, _queue: &mut Submissions) {
            assert!(completion.unwrap().is_none());
            self.completed += 1;
        }

        fn due(&self) -> Option<Instant> {
            self.due
        }
    }

    impl Drop for Flushes {
        fn drop(&mut self) {
            let _ = self.over.send(self.completed);
        }
    }

    fn completed(device: MemoryDevice) -> u32 {
        let (over, ended) = mpsc::channel();
        let flushes = Flushes {
            at_once: 20,
            later: 5,
            due: None,
            completed: 0,
            over,
        };
        drive(&Arc::new(device), Box::new(flushes)).unwrap();
        ended.recv().unwrap()
    }

    #[test]
    fn workload_completes_on_any_device() {
        let device = || MemoryDevice::new(1 << 20, 512).unwrap();
        assert_eq!(completed(device().with_thread().unwrap()), 25);
        // Operations complete in the submit call.
        assert_eq!(completed(device()), 25);
    }
}
