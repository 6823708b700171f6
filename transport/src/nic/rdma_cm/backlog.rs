//! Messages from strangers, which are handled in rounds.

use std::collections::VecDeque;
use std::net::IpAddr;

use crate::wire::mad::Mad;

/// Max number of messages from strangers handled per round. The application may create an entire
/// channel for each of them.
const MADS_PER_ROUND: u32 = 16;
/// Max number of messages from strangers queued for later rounds.
const MAX_WAITING_MADS: usize = 512;
/// Number of rounds per message from a stranger while there are more packets in the socket. This
/// must not be unlimited, because the socket may never be empty due to data packets, and hosts
/// still need to be able to log in.
const ROUNDS_PER_MAD: u32 = 8;

/// Messages from strangers.
#[derive(Debug)]
pub(super) struct Backlog {
    /// Messages queued for a later round.
    waiting: VecDeque<(IpAddr, Mad)>,
    /// Number of messages that can still be handled in this round.
    turns: u32,
    /// Set if there were more packets in the socket after the last receive, and the number of
    /// rounds since the last message was handled.
    is_behind: bool,
    rounds: u32,
}

impl Backlog {
    pub(super) fn new() -> Self {
        Self {
            waiting: VecDeque::new(),
            turns: MADS_PER_ROUND,
            is_behind: false,
            rounds: 0,
        }
    }

    /// Sets whether there are more packets in the socket than we could receive.
    pub(super) fn set_behind(&mut self, is_behind: bool) {
        self.is_behind = is_behind;
    }

    /// Allows messages to be handled in a new round.
    pub(super) fn begin_round(&mut self) {
        self.rounds += 1;
        self.turns = match (self.is_behind, self.rounds >= ROUNDS_PER_MAD) {
            (false, _) => MADS_PER_ROUND,
            (true, is_due) => u32::from(is_due),
        };
        if self.turns > 0 {
            self.rounds = 0;
        }
    }

    /// Returns whether a new message can be handled in this round.
    pub(super) fn admits(&mut self) -> bool {
        // Queued messages must be handled first, to preserve the order.
        let admits = self.turns > 0 && self.waiting.is_empty();
        self.turns -= u32::from(admits);
        admits
    }

    /// Queues a message. If the queue is full, this will return `false`.
    pub(super) fn push(&mut self, from: IpAddr, mad: &Mad) -> bool {
        let fits = self.waiting.len() < MAX_WAITING_MADS;
        if fits {
            self.waiting.push_back((from, *mad));
        }
        fits
    }

    /// Removes the next message that can be handled in this round.
    pub(super) fn pop(&mut self) -> Option<(IpAddr, Mad)> {
        if self.turns == 0 {
            return None;
        }
        let next = self.waiting.pop_front()?;
        self.turns -= 1;
        Some(next)
    }

    /// Returns whether no messages are queued.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Removes all queued messages.
    pub(super) fn clear(&mut self) {
        self.waiting.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::mad::MAD_LEN;

    #[test]
    fn busy_socket_slows_down_strangers() {
        let from = IpAddr::from([10, 0, 0, 9]);
        let mut backlog = Backlog::new();
        for _ in 0..MADS_PER_ROUND {
            assert!(backlog.admits());
        }
        assert!(!backlog.admits());
        for _ in 0..MAX_WAITING_MADS {
            assert!(backlog.push(from, &[0; MAD_LEN]));
        }
        assert!(!backlog.push(from, &[0; MAD_LEN]));
        let handled = |backlog: &mut Backlog| {
            backlog.begin_round();
            std::iter::from_fn(|| backlog.pop()).count() as u32
        };
        assert_eq!(handled(&mut backlog), MADS_PER_ROUND);
        backlog.set_behind(true);
        let rounds: u32 = (0..2 * ROUNDS_PER_MAD).map(|_| handled(&mut backlog)).sum();
        assert_eq!(rounds, 2);
        backlog.set_behind(false);
        assert_eq!(handled(&mut backlog), MADS_PER_ROUND);
        assert!(!backlog.admits(), "older messages are waiting");
    }
}
