//! Waking a workload from any thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Wake;

use riser_block::Mailbox;

use super::driver::Message;

/// Waker for a workload that waits for an event outside of the engine. The engine's thread calls
/// [`Workload::due`](super::Workload::due) after each wake-up, so the workload must return a past
/// time while the wake-up [is pending](Self::is_pending).
pub(crate) struct Wakeup {
    is_pending: AtomicBool,
    mailbox: Arc<Mailbox<Message>>,
}

impl Wakeup {
    pub(super) fn new(mailbox: Arc<Mailbox<Message>>) -> Self {
        Self {
            is_pending: AtomicBool::new(false),
            mailbox,
        }
    }

    /// Returns whether the workload was woken since the last [`Self::reset`].
    pub(crate) fn is_pending(&self) -> bool {
        self.is_pending.load(Ordering::Acquire)
    }

    /// Called before the workload polls the events for which it waits.
    pub(crate) fn reset(&self) {
        self.is_pending.store(false, Ordering::Release);
    }
}

impl Wake for Wakeup {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.is_pending.swap(true, Ordering::AcqRel) {
            // A closed mailbox has no workloads.
            let _ = self.mailbox.send(Message::Wake);
        }
    }
}
