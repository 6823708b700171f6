//! Two kinds of credit: the request limit that the initiator spends, and the send queue that we do.

use std::collections::VecDeque;

use crate::fabric::TaskIdx;

/// The request limit of a channel (SRP r16a, REQUEST LIMIT).
///
/// Invariant: credits at the initiator, requests taken in and not settled, and credits owed to the
/// initiator add up to the limit of the login. An initiator that sends more than it may makes its
/// own share negative; it gets no more than any other channel.
#[derive(Clone, Debug)]
pub struct ReqLim {
    limit: u32,
    at_initiator: i64,
    outstanding: u32,
    owed: u32,
    over_limit: u64,
}

impl ReqLim {
    /// The initiator starts with `limit` credits.
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

    /// The limit of the login.
    #[must_use]
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Credits that the initiator has, as far as we know.
    #[must_use]
    pub fn at_initiator(&self) -> i64 {
        self.at_initiator
    }

    /// Requests taken in and neither answered nor aborted.
    #[must_use]
    pub fn outstanding(&self) -> u32 {
        self.outstanding
    }

    /// Credits that no answer has carried back yet.
    #[must_use]
    pub fn owed(&self) -> u32 {
        self.owed
    }

    /// Requests that came without a credit.
    #[must_use]
    pub fn over_limit(&self) -> u64 {
        self.over_limit
    }

    /// A request came in.
    pub fn on_request(&mut self) {
        // Only counted: such a request waits for a context like the others, and gets nothing by
        // it.
        if self.at_initiator <= 0 {
            self.over_limit += 1;
        }
        self.at_initiator -= 1;
        self.outstanding += 1;
        self.check();
    }

    /// A request is answered: the REQUEST LIMIT DELTA of the answer.
    pub fn on_answer(&mut self) -> i32 {
        self.outstanding -= 1;
        self.owed += 1;
        self.grant()
    }

    /// A request ends without an answer; its credit is owed.
    pub fn on_silence(&mut self) {
        self.outstanding -= 1;
        self.owed += 1;
        self.check();
    }

    /// Whether credits are owed that no answer is going to carry.
    #[must_use]
    pub fn is_stuck(&self) -> bool {
        self.owed > 0 && self.outstanding == 0
    }

    /// Takes what is owed, for a message to carry.
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

/// Work requests that the send queue still takes, and the contexts that wait for them.
///
/// The queue of waiting contexts is bounded by their number: each waits once.
#[derive(Debug)]
pub struct SendQueue {
    size: u32,
    free: u32,
    waiting: VecDeque<TaskIdx>,
}

impl SendQueue {
    /// A queue of `size` work requests with room for `contexts` waiting ones.
    #[must_use]
    pub fn new(size: u32, contexts: usize) -> Self {
        Self {
            size,
            free: size,
            waiting: VecDeque::with_capacity(contexts),
        }
    }

    /// Work requests that may be posted.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Whether everything posted has completed.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.free == self.size
    }

    /// Takes credit for a chain. No context overtakes one that waits already.
    pub fn take(&mut self, wrs: u32) -> bool {
        assert!(wrs <= self.size, "a chain fits the queue");
        let granted = self.waiting.is_empty() && wrs <= self.free;
        if granted {
            self.free -= wrs;
        }
        granted
    }

    /// Waits behind the others.
    pub fn wait(&mut self, idx: TaskIdx) {
        self.waiting.push_back(idx);
    }

    /// Returns the context that is next, if one waits.
    #[must_use]
    pub fn front(&self) -> Option<TaskIdx> {
        self.waiting.front().copied()
    }

    /// Gives the front of the queue its credit, if there is enough.
    pub fn take_front(&mut self, wrs: u32) -> bool {
        let granted = wrs <= self.free;
        if granted {
            self.free -= wrs;
            self.waiting.pop_front();
        }
        granted
    }

    /// Gives up the place of a context in the queue.
    pub fn forget(&mut self, idx: TaskIdx) {
        self.waiting.retain(|&w| w != idx);
    }

    /// A chain has completed.
    pub fn give_back(&mut self, wrs: u32) {
        self.free += wrs;
        assert!(self.free <= self.size, "credit comes back once");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_carry_what_silence_owes() {
        let mut lim = ReqLim::new(3);
        lim.on_request();
        lim.on_request();
        lim.on_request();
        assert_eq!(lim.at_initiator(), 0);
        lim.on_silence();
        assert!(!lim.is_stuck(), "an answer will carry it");
        assert_eq!(lim.on_answer(), 2);
        lim.on_silence();
        assert!(lim.is_stuck());
        assert_eq!(lim.grant(), 1);
        assert_eq!(lim.at_initiator(), 3);
        assert!(!lim.is_stuck());
    }

    #[test]
    fn an_initiator_over_its_limit_is_counted_and_conserved() {
        let mut lim = ReqLim::new(1);
        lim.on_request();
        lim.on_request();
        assert_eq!((lim.over_limit(), lim.at_initiator()), (1, -1));
        assert_eq!(lim.on_answer(), 1);
        assert_eq!(lim.on_answer(), 1);
        assert_eq!(lim.at_initiator(), 1);
    }

    #[test]
    fn a_waiting_chain_is_not_overtaken() {
        let mut queue = SendQueue::new(4, 2);
        assert!(queue.take(3));
        assert!(!queue.take(2));
        queue.wait(TaskIdx(7));
        assert!(!queue.take(1), "behind the one that waits");
        queue.give_back(3);
        assert_eq!(queue.front(), Some(TaskIdx(7)));
        assert!(queue.take_front(2));
        assert!(queue.take(2));
        queue.give_back(4);
        assert!(queue.is_idle());
    }
}
