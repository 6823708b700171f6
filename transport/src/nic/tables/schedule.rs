//! Queue pairs waiting to send, and their timers.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Instant;

use super::QueuePairs;
use crate::nic::qp::Peer;
use crate::verbs::QpId;
use crate::wire::HeaderBuf;

/// Max number of queued acknowledgements for QPs which have been destroyed. Any more will be
/// dropped.
const MAX_LAST_RESPONSES: usize = 1024;

/// QPs waiting to send, and their timers. Entries refer to QPs using handles with a generation, so
/// they cannot be used after the QP has been destroyed (CVE-2026-45910).
#[derive(Debug, Default)]
pub(crate) struct Schedule {
    /// QPs that may have something to send.
    ready: VecDeque<QpId>,
    timers: BinaryHeap<Reverse<(Instant, QpId)>>,
    /// Headers and destinations of the last acknowledgements from destroyed QPs.
    last_responses: VecDeque<(Peer, HeaderBuf)>,
}

impl Schedule {
    /// Adds a QP that may have something to send.
    #[inline]
    pub(in crate::nic) fn push(&mut self, qp: QpId) {
        self.ready.push_back(qp);
    }

    /// Removes the next QP that may have something to send.
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<QpId> {
        self.ready.pop_front()
    }

    /// Returns the number of QPs that may have something to send.
    pub(crate) fn ready(&self) -> usize {
        self.ready.len()
    }

    /// Adds a timer. We remove invalid entries before the heap needs to grow, so its size depends
    /// on the number of QPs and not on the number of packets.
    #[inline]
    pub(in crate::nic) fn push_timer(&mut self, at: Instant, id: QpId, qps: &QueuePairs) {
        if self.timers.len() == self.timers.capacity() {
            self.timers
                .retain(|Reverse((at, id))| qps.get(*id).is_ok_and(|qp| qp.armed == Some(*at)));
            self.timers.reserve(self.timers.len().max(8));
        }
        self.timers.push(Reverse((at, id)));
    }

    /// Removes the next timer if it has expired.
    #[inline]
    pub(in crate::nic) fn pop_expired(&mut self, now: Instant) -> Option<(Instant, QpId)> {
        let &Reverse((at, _)) = self.timers.peek()?;
        if at > now {
            return None;
        }
        self.timers.pop().map(|Reverse(timer)| timer)
    }

    /// Returns when the next timer expires.
    pub(in crate::nic) fn next_timer(&self) -> Option<Instant> {
        self.timers.peek().map(|Reverse((at, _))| *at)
    }

    /// Returns whether another last acknowledgement can be added. This must be bounded, because a
    /// peer can close many connections at once.
    pub(in crate::nic) fn has_room_for_response(&self) -> bool {
        self.last_responses.len() < MAX_LAST_RESPONSES
    }

    /// Adds an acknowledgement of a QP that is being destroyed.
    pub(in crate::nic) fn push_response(&mut self, peer: Peer, headers: HeaderBuf) {
        self.last_responses.push_back((peer, headers));
    }

    /// Removes the next last acknowledgement.
    #[inline]
    pub(in crate::nic) fn pop_response(&mut self) -> Option<(Peer, HeaderBuf)> {
        self.last_responses.pop_front()
    }

    /// Returns whether there is anything to send.
    #[inline]
    pub(crate) fn has_output(&self) -> bool {
        !self.ready.is_empty() || !self.last_responses.is_empty()
    }

    /// Removes all entries when the device is removed.
    pub(in crate::nic) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns the number of timers, including invalid entries.
    #[cfg(test)]
    pub(in crate::nic) fn timer_count(&self) -> usize {
        self.timers.len()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::nic::NicConfig;
    use crate::verbs::Handle;

    #[test]
    fn timers_of_destroyed_qps_are_removed() {
        let qps = QueuePairs::new(&NicConfig::new([10, 0, 0, 1].into(), [7; 32]));
        let (mut schedule, start) = (Schedule::default(), Instant::now());
        let destroyed = QpId(Handle::new(0, 1));
        for n in 0..1000 {
            schedule.push_timer(start + Duration::from_nanos(n), destroyed, &qps);
        }
        assert!(schedule.timer_count() <= 8);
    }

    #[test]
    fn timers_expire_in_order() {
        let qps = QueuePairs::new(&NicConfig::new([10, 0, 0, 1].into(), [7; 32]));
        let (mut schedule, start) = (Schedule::default(), Instant::now());
        let [first, second] = [1, 2].map(|index| QpId(Handle::new(index, 1)));
        let later = start + Duration::from_nanos(1);
        schedule.push_timer(later, second, &qps);
        schedule.push_timer(start, first, &qps);
        assert_eq!(schedule.next_timer(), Some(start));
        assert_eq!(schedule.pop_expired(start), Some((start, first)));
        assert_eq!(schedule.pop_expired(start), None);
        assert_eq!(schedule.pop_expired(later), Some((later, second)));
    }
}
