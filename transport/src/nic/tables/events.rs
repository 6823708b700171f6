//! Asynchronous events.

use std::collections::VecDeque;

use crate::verbs::{AsyncEvent, QpId};

/// Unread asynchronous events of a device.
#[derive(Debug, Default)]
pub(crate) struct AsyncEvents(VecDeque<AsyncEvent>);

impl AsyncEvents {
    /// Adds an event. Only a single entry is stored per object and event type, so that a peer
    /// cannot make the queue grow, and no event is lost.
    pub(in crate::nic) fn raise(&mut self, event: AsyncEvent) {
        if !self.0.contains(&event) {
            self.0.push_back(event);
        }
    }

    /// Returns the oldest event.
    pub(crate) fn poll(&mut self) -> Option<AsyncEvent> {
        self.0.pop_front()
    }

    /// Returns whether there are no events.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Removes an event that is out of date.
    pub(in crate::nic) fn forget(&mut self, event: AsyncEvent) {
        self.0.retain(|&e| e != event);
    }

    /// Removes the events of a destroyed QP.
    pub(in crate::nic) fn forget_qp(&mut self, qp: QpId) {
        self.0.retain(|e| {
            !matches!(*e,
                AsyncEvent::QpFatal(q)
                | AsyncEvent::QpReqError(q)
                | AsyncEvent::QpAccessError(q)
                | AsyncEvent::CommEstablished(q)
                | AsyncEvent::SqDrained(q)
                | AsyncEvent::PathMig(q)
                | AsyncEvent::PathMigError(q)
                | AsyncEvent::QpLastWqeReached(q) if q == qp)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::Handle;

    #[test]
    fn repeated_event_is_reported_once() {
        let qp = QpId(Handle::new(1, 1));
        let mut events = AsyncEvents::default();
        for event in [AsyncEvent::QpFatal(qp), AsyncEvent::DeviceFatal] {
            events.raise(event);
            events.raise(event);
        }
        assert_eq!(events.poll(), Some(AsyncEvent::QpFatal(qp)));
        events.raise(AsyncEvent::QpFatal(qp));
        assert_eq!(events.poll(), Some(AsyncEvent::DeviceFatal));
        assert_eq!(events.poll(), Some(AsyncEvent::QpFatal(qp)));
        assert_eq!(events.poll(), None);
    }

    #[test]
    fn events_of_destroyed_qp_are_removed() {
        let [qp, other] = [1, 2].map(|index| QpId(Handle::new(index, 1)));
        let mut events = AsyncEvents::default();
        events.raise(AsyncEvent::SqDrained(qp));
        events.raise(AsyncEvent::SqDrained(other));
        events.raise(AsyncEvent::DeviceFatal);
        events.forget_qp(qp);
        events.forget(AsyncEvent::DeviceFatal);
        assert_eq!(events.poll(), Some(AsyncEvent::SqDrained(other)));
        assert!(events.is_empty());
    }
}
