//! Two kinds of credit: the request limit used by the initiator, and the send queue used by us.

use std::collections::VecDeque;

use crate::fabric::TaskIdx;

/// The request limit of a channel (SRP r16a, REQUEST LIMIT).
///
/// Invariant: the credits held by the initiator, the outstanding requests, and the credits that we
/// owe to the initiator always add up to the limit from the login. If an initiator exceeds its
/// limit, its own share becomes negative, but it does not get more than any other channel.
#[derive(Clone, Debug)]
pub struct ReqLim {
    limit: u32,
    at_initiator: i64,
    outstanding: u32,
    owed: u32,
    over_limit: u64,
}

impl ReqLim {
    /// Creates the state for an initiator that starts with `limit` credits.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self {
            limit,
            at_initiator: i64::from(limit),
            outstanding: 0,
            owed: 0,
            over_limit: 0,
        }
    }

    /// Returns the limit from the login.
    #[must_use]
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Returns the number of credits that the initiator should have.
    #[must_use]
    pub fn at_initiator(&self) -> i64 {
        self.at_initiator
    }

    /// Returns the number of requests that were received but not completed or aborted yet.
    #[must_use]
    pub fn outstanding(&self) -> u32 {
        self.outstanding
    }

    /// Returns the number of credits that were not returned by a response yet.
    #[must_use]
    pub fn owed(&self) -> u32 {
        self.owed
    }

    /// Returns the number of requests received without a credit.
    #[must_use]
    pub fn over_limit(&self) -> u64 {
        self.over_limit
    }

    /// Called when a request is received.
    pub fn on_request(&mut self) {
        // We only count these: the request has to wait for a context like any other request, so the
        // initiator does not gain anything.
        if self.at_initiator <= 0 {
            self.over_limit += 1;
        }
        self.at_initiator -= 1;
        self.outstanding += 1;
        self.check();
    }

    /// Called when a request is completed. Returns the REQUEST LIMIT DELTA for the response.
    pub fn on_response(&mut self) -> i32 {
        self.outstanding -= 1;
        self.owed += 1;
        self.grant()
    }

    /// Called when a request is aborted without a response. Its credit is now owed.
    pub fn on_silence(&mut self) {
        self.outstanding -= 1;
        self.owed += 1;
        self.check();
    }

    /// Returns whether there are owed credits, but no pending response that could return them.
    #[must_use]
    pub fn is_stuck(&self) -> bool {
        self.owed > 0 && self.outstanding == 0
    }

    /// Returns the owed credits, to be sent in a message.
    pub fn grant(&mut self) -> i32 {
        let delta = std::mem::take(&mut self.owed);
        self.at_initiator += i64::from(delta);
        self.check();
        i32::try_from(delta).expect("no more than the limit is owed")
    }

    fn check(&self) {
        debug_assert_eq!(
            self.at_initiator + i64::from(self.outstanding) + i64::from(self.owed),
            i64::from(self.limit),
            "credits are conserved"
        );
    }
}

/// Free entries of the send queue, and the contexts that are waiting for them.
///
/// The number of waiting contexts is bounded, because each context can only wait once.
#[derive(Debug)]
pub struct SendQueue {
    size: u32,
    free: u32,
    waiting: VecDeque<TaskIdx>,
}

impl SendQueue {
    /// Creates a queue of `size` work requests, for at most `contexts` waiting contexts.
    #[must_use]
    pub fn new(size: u32, contexts: usize) -> Self {
        Self {
            size,
            free: size,
            waiting: VecDeque::with_capacity(contexts),
        }
    }

    /// Returns the number of work requests that can be posted.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Returns whether all posted requests have completed.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.free == self.size
    }

    /// Reserves credit for a chain. Returns false if there is not enough, or if another context is
    /// already waiting.
    pub fn reserve(&mut self, wrs: u32) -> bool {
        assert!(wrs <= self.size, "a chain fits the queue");
        let granted = self.waiting.is_empty() && wrs <= self.free;
        if granted {
            self.free -= wrs;
        }
        granted
    }

    /// Adds a context to the end of the waiting list.
    pub fn wait(&mut self, idx: TaskIdx) {
        self.waiting.push_back(idx);
    }

    /// Returns the next waiting context, if any.
    #[must_use]
    pub fn front(&self) -> Option<TaskIdx> {
        self.waiting.front().copied()
    }

    /// Reserves credit for the first waiting context, if there is enough.
    pub fn take_front(&mut self, wrs: u32) -> bool {
        let granted = wrs <= self.free;
        if granted {
            self.free -= wrs;
            self.waiting.pop_front();
        }
        granted
    }

    /// Removes a context from the waiting list.
    pub fn remove_waiting(&mut self, idx: TaskIdx) {
        self.waiting.retain(|&w| w != idx);
    }

    /// Called when a chain has completed.
    pub fn release(&mut self, wrs: u32) {
        self.free += wrs;
        assert!(self.free <= self.size, "credit comes back once");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_return_owed_credits() {
        let mut lim = ReqLim::new(3);
        lim.on_request();
        lim.on_request();
        lim.on_request();
        assert_eq!(lim.at_initiator(), 0);
        lim.on_silence();
        assert!(!lim.is_stuck(), "a response will contain it");
        assert_eq!(lim.on_response(), 2);
        lim.on_silence();
        assert!(lim.is_stuck());
        assert_eq!(lim.grant(), 1);
        assert_eq!(lim.at_initiator(), 3);
        assert!(!lim.is_stuck());
    }

    #[test]
    fn requests_over_limit_conserve_credits() {
        let mut lim = ReqLim::new(1);
        lim.on_request();
        lim.on_request();
        assert_eq!((lim.over_limit(), lim.at_initiator()), (1, -1));
        assert_eq!(lim.on_response(), 1);
        assert_eq!(lim.on_response(), 1);
        assert_eq!(lim.at_initiator(), 1);
    }

    #[test]
    fn waiting_chain_is_not_overtaken() {
        let mut queue = SendQueue::new(4, 2);
        assert!(queue.reserve(3));
        assert!(!queue.reserve(2));
        queue.wait(TaskIdx(7));
        assert!(!queue.reserve(1), "behind the one that waits");
        queue.release(3);
        assert_eq!(queue.front(), Some(TaskIdx(7)));
        assert!(queue.take_front(2));
        assert!(queue.reserve(2));
        queue.release(4);
        assert!(queue.is_idle());
    }
}
