//! Completion queues.
//!
//! A queue can hold the number of completions it was created for. If another completion is added to
//! a full queue, it will be lost, but this is never silent: the queue enters a permanent error
//! state ([`VerbsError::CqOverrun`]), the device reports an asynchronous error, and all queue pairs
//! using the queue are moved to the error state.
//!
//! ```text
//!   idle ──req_notify──▶ armed ──matching completion──▶ idle, one event
//! ```
//!
//! With [`Moderation`], the event is delayed until the configured number of matching completions is
//! available or the configured time has passed. The device sets a timer for the latter.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::verbs::{Completion, CqAttr, CqInitAttr, Moderation, Notify, QpId, VerbsError};

/// Result of adding a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Added {
    /// No event needs to be generated.
    Quiet,
    /// The armed notification fires.
    Fire,
    /// The armed notification is waiting for more completions, for up to this time.
    Wait(Duration),
    /// The queue was full, so the completion is lost and the queue cannot be used anymore.
    Overrun,
    /// The queue had already overrun.
    Dead,
}

/// CQ of the software NIC.
#[derive(Debug)]
pub struct Cq {
    entries: VecDeque<Completion>,
    capacity: usize,
    armed: Option<Notify>,
    moderation: Moderation,
    /// Number of completions received since the event of an armed queue was delayed, and the time
    /// when the delay expires.
    moderated: u16,
    due: Option<Instant>,
    /// Timestamps of the available completions, in nanoseconds of the device clock, if enabled.
    times: Option<VecDeque<u64>>,
    vector: u32,
    overrun: bool,
    users: u32,
}

impl Cq {
    /// Creates an empty queue.
    #[must_use]
    pub fn new(init: &CqInitAttr) -> Self {
        let capacity = init.entries as usize;
        Self {
            // A huge queue that is mostly empty shouldn't use memory for its maximum size. We
            // allocate the first thousand entries up front to avoid allocations on the data path.
            entries: VecDeque::with_capacity(capacity.min(1024)),
            capacity,
            armed: None,
            moderation: Moderation::default(),
            moderated: 0,
            due: None,
            times: init.is_timed.then(VecDeque::new),
            // Vectors of a software NIC are equivalent: its owner handles all events.
            vector: init.vector.unwrap_or(0),
            overrun: false,
            users: 0,
        }
    }

    /// Returns the current attributes of the queue.
    #[must_use]
    pub fn attr(&self) -> CqAttr {
        CqAttr {
            entries: self.capacity as u32,
            vector: self.vector,
            is_timed: self.times.is_some(),
            moderation: self.moderation,
        }
    }

    /// Sets how long future events may be delayed.
    pub fn moderate(&mut self, moderation: Moderation) {
        self.moderation = moderation;
    }

    /// Sets the time when the delayed event of an armed queue expires.
    pub fn set_due(&mut self, at: Instant) {
        self.due = Some(at);
    }

    /// Fires a delayed event immediately. Returns when the delay would have expired, or `None` if
    /// no event is delayed.
    pub fn take_due(&mut self) -> Option<Instant> {
        let due = self.due.take()?;
        self.armed = None;
        self.moderated = 0;
        Some(due)
    }

    /// Returns whether completions have timestamps.
    #[must_use]
    pub fn is_timed(&self) -> bool {
        self.times.is_some()
    }

    /// Sets the timestamp of the last completion added, in nanoseconds of the device clock.
    pub fn stamp(&mut self, time: u64) {
        if let Some(times) = &mut self.times {
            // A lost completion does not have a timestamp.
            times.resize(self.entries.len(), time);
        }
    }

    /// Returns the capacity of the queue.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the memory in bytes used by a full queue with this capacity.
    #[must_use]
    pub const fn memory(capacity: u32) -> usize {
        size_of::<Self>() + capacity as usize * size_of::<Completion>()
    }

    /// Returns the number of available completions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether the queue is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns whether a completion has been lost.
    #[must_use]
    pub fn is_overrun(&self) -> bool {
        self.overrun
    }

    /// Returns the number of work queues using this CQ.
    #[must_use]
    pub fn users(&self) -> u32 {
        self.users
    }

    /// Adds a work queue to the user count.
    pub fn add_user(&mut self) {
        self.users += 1;
    }

    /// Removes a work queue from the user count.
    pub fn remove_user(&mut self) {
        debug_assert!(self.users > 0, "removed an unknown queue");
        self.users = self.users.saturating_sub(1);
    }

    /// Discards a completion. This will return `true` if this is the first lost completion.
    pub(super) fn overrun(&mut self) -> bool {
        // Otherwise, the remaining completions would look like a full record of the completed work.
        self.entries.clear();
        if let Some(times) = &mut self.times {
            times.clear();
        }
        !std::mem::replace(&mut self.overrun, true)
    }

    /// Adds a completion. The return value indicates if an armed notification fires.
    pub fn push(&mut self, completion: Completion) -> Added {
        // We don't add completions to an overrun queue, because the application couldn't know which
        // ones are missing.
        if self.overrun {
            return Added::Dead;
        }
        if self.entries.len() >= self.capacity {
            self.overrun();
            return Added::Overrun;
        }
        // Errors must also wake a user who is only waiting for solicited completions, since they
        // would never learn about the error otherwise.
        let wakes = completion.solicited || !completion.status.is_ok();
        self.entries.push_back(completion);
        let matches = match &mut self.armed {
            None => false,
            Some(Notify::Next) => true,
            Some(Notify::Solicited) => wakes,
            Some(Notify::Count(left)) => {
                *left = left.saturating_sub(1);
                *left == 0
            }
        };
        if !matches {
            return Added::Quiet;
        }
        let Moderation { count, period } = self.moderation;
        if !period.is_zero() {
            self.moderated = self.moderated.saturating_add(1);
            let is_enough = count > 0 && self.moderated >= count;
            if !is_enough {
                return match self.moderated {
                    1 => Added::Wait(period),
                    _ => Added::Quiet,
                };
            }
        }
        self.armed = None;
        self.moderated = 0;
        Added::Fire
    }

    /// Removes up to `max` completions, oldest first, and appends them to `out`.
    ///
    /// # Errors
    /// [`VerbsError::CqOverrun`] if a completion has been lost.
    pub fn poll(&mut self, max: usize, out: &mut Vec<Completion>) -> Result<usize, VerbsError> {
        if self.overrun {
            return Err(VerbsError::CqOverrun);
        }
        let n = max.min(self.entries.len());
        out.reserve(n);
        // There are usually few, for which this is cheaper than `drain`.
        for completion in std::iter::from_fn(|| self.entries.pop_front()).take(n) {
            out.push(completion);
        }
        if let Some(times) = &mut self.times {
            times.drain(..n);
        }
        if self.entries.is_empty() {
            // Start at the beginning of the buffer again, so a queue that is never deep only uses a
            // small part of this memory.
            self.entries.clear();
        }
        Ok(n)
    }

    /// Same as [`Cq::poll`], but also returns the timestamp of each completion.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] if timestamps are not enabled, and the errors of
    /// [`Cq::poll`].
    pub fn poll_timed(
        &mut self,
        max: usize,
        mut take: impl FnMut(Completion, u64),
    ) -> Result<usize, VerbsError> {
        let Some(times) = &mut self.times else {
            return Err(VerbsError::InvalidParameter("queue without times"));
        };
        if self.overrun {
            return Err(VerbsError::CqOverrun);
        }
        let n = max.min(self.entries.len());
        for (completion, time) in self.entries.drain(..n).zip(times.drain(..n)) {
            take(completion, time);
        }
        Ok(n)
    }

    /// Removes all completions of a QP when it is reset: they belong to its previous use. Hardware
    /// adapters do the same (IBTA 11.2.4.2 doesn't specify this).
    pub fn forget(&mut self, qp: QpId) {
        if let Some(times) = &mut self.times {
            let mut entries = self.entries.iter();
            times.retain(|_| entries.next().is_some_and(|entry| entry.qp != qp));
        }
        self.entries.retain(|entry| entry.qp != qp);
    }

    /// Arms the queue. A new call replaces the previous one, except that a solicited notification
    /// does not replace a notification for the next completion (IBTA 11.4.2.2). This will return
    /// whether completions are available.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] for a count of 0, or one that exceeds the capacity.
    pub fn arm(&mut self, notify: Notify) -> Result<bool, VerbsError> {
        if let Notify::Count(count) = notify
            && (count == 0 || count as usize > self.capacity)
        {
            return Err(VerbsError::InvalidParameter("completion count"));
        }
        let weaker = self.armed == Some(Notify::Next) && notify == Notify::Solicited;
        if !weaker {
            self.armed = Some(notify);
        }
        // An overrun queue reports that completions are available, so the application will poll it
        // and get the error.
        Ok(!self.entries.is_empty() || self.overrun)
    }

    /// Changes the capacity. An armed count is reduced to the new capacity.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] if the new capacity is smaller than the number of available
    /// completions.
    pub fn resize(&mut self, capacity: u32) -> Result<(), VerbsError> {
        if capacity == 0 || (capacity as usize) < self.entries.len() {
            return Err(VerbsError::InvalidParameter("completion queue entries"));
        }
        self.capacity = capacity as usize;
        if let Some(Notify::Count(left)) = &mut self.armed {
            *left = (*left).min(capacity);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::{Handle, WcOpcode, WcStatus, WrId};

    fn wc(n: u64) -> Completion {
        let qp = QpId(Handle::new(0, 1));
        Completion::new(WrId(n), WcStatus::Success, WcOpcode::Send, qp, 0x11)
    }

    #[test]
    fn poll_returns_completions_in_order() {
        let mut cq = Cq::new(&CqInitAttr::new(4));
        for n in 0..4 {
            assert_eq!(cq.push(wc(n)), Added::Quiet);
        }
        let mut out = vec![wc(9)];
        assert_eq!(cq.poll(3, &mut out), Ok(3));
        assert_eq!(cq.poll(3, &mut out), Ok(1));
        assert_eq!(cq.poll(3, &mut out), Ok(0));
        let ids: Vec<u64> = out.iter().map(|c| c.wr_id.0).collect();
        assert_eq!(ids, [9, 0, 1, 2, 3]);
    }

    #[test]
    fn forget_removes_completions_and_timestamps() {
        let mut cq = Cq::new(&CqInitAttr {
            is_timed: true,
            ..CqInitAttr::new(4)
        });
        let other = QpId(Handle::new(1, 1));
        for n in 0..4 {
            let completion = wc(n);
            let qp = if n % 2 == 0 { completion.qp } else { other };
            cq.push(Completion { qp, ..completion });
            cq.stamp(n * 10);
        }
        cq.forget(other);
        let mut out = Vec::new();
        assert_eq!(
            cq.poll_timed(9, |c, time| out.push((c.wr_id.0, time))),
            Ok(2)
        );
        assert_eq!(out, [(0, 0), (2, 20)]);
    }

    #[test]
    fn lost_completion_makes_queue_unusable() {
        let mut cq = Cq::new(&CqInitAttr::new(1));
        assert_eq!(cq.push(wc(0)), Added::Quiet);
        assert_eq!(cq.push(wc(1)), Added::Overrun);
        assert_eq!(cq.push(wc(2)), Added::Dead);
        let mut out = Vec::new();
        assert_eq!(cq.poll(9, &mut out), Err(VerbsError::CqOverrun));
        assert!(out.is_empty());
        assert_eq!(cq.arm(Notify::Next), Ok(true));
    }

    #[test]
    fn armed_queue_fires_once() {
        let mut cq = Cq::new(&CqInitAttr::new(16));
        assert_eq!(cq.arm(Notify::Next), Ok(false));
        assert_eq!(cq.push(wc(0)), Added::Fire);
        assert_eq!(cq.push(wc(1)), Added::Quiet);
        assert_eq!(cq.arm(Notify::Next), Ok(true), "completions wait already");
    }

    #[test]
    fn solicited_and_counted_notifications_fire() {
        let mut cq = Cq::new(&CqInitAttr::new(16));
        cq.arm(Notify::Solicited).unwrap();
        assert_eq!(cq.push(wc(0)), Added::Quiet);
        let solicited = Completion {
            solicited: true,
            ..wc(1)
        };
        assert_eq!(cq.push(solicited), Added::Fire);
        cq.arm(Notify::Solicited).unwrap();
        let failed = Completion {
            status: WcStatus::WrFlushErr,
            ..wc(2)
        };
        assert_eq!(cq.push(failed), Added::Fire);
        cq.arm(Notify::Count(2)).unwrap();
        assert_eq!(cq.push(wc(3)), Added::Quiet);
        assert_eq!(cq.push(wc(4)), Added::Fire);
        cq.arm(Notify::Next).unwrap();
        cq.arm(Notify::Solicited).unwrap();
        assert_eq!(cq.push(wc(5)), Added::Fire);
    }

    #[test]
    fn count_above_capacity_is_rejected() {
        let mut cq = Cq::new(&CqInitAttr::new(4));
        for count in [0, 5, u32::MAX] {
            let refused = cq.arm(Notify::Count(count));
            assert_eq!(
                refused,
                Err(VerbsError::InvalidParameter("completion count"))
            );
        }
        for n in 0..4 {
            assert_eq!(cq.push(wc(n)), Added::Quiet, "not armed");
        }
        cq.poll(4, &mut Vec::new()).unwrap();
        cq.arm(Notify::Count(4)).unwrap();
        assert_eq!(cq.push(wc(4)), Added::Quiet);
        // Three more are needed, but only two fit.
        cq.resize(2).unwrap();
        assert_eq!(cq.push(wc(5)), Added::Quiet);
        cq.poll(2, &mut Vec::new()).unwrap();
        assert_eq!(cq.push(wc(6)), Added::Fire);
    }

    #[test]
    fn resize_keeps_completions() {
        let mut cq = Cq::new(&CqInitAttr::new(2));
        cq.push(wc(0));
        cq.push(wc(1));
        assert!(cq.resize(1).is_err());
        assert!(cq.resize(0).is_err());
        cq.resize(3).unwrap();
        assert_eq!(cq.push(wc(2)), Added::Quiet);
        let mut out = Vec::new();
        cq.poll(9, &mut out).unwrap();
        assert_eq!(out, [wc(0), wc(1), wc(2)]);
    }

    #[test]
    fn moderated_event_waits_for_count_or_timeout() {
        let mut cq = Cq::new(&CqInitAttr::new(16));
        let period = Duration::from_micros(50);
        cq.moderate(Moderation { count: 3, period });
        assert_eq!(cq.push(wc(0)), Added::Quiet, "not armed");
        cq.arm(Notify::Next).unwrap();
        assert_eq!(cq.push(wc(1)), Added::Wait(period));
        assert_eq!(cq.push(wc(2)), Added::Quiet);
        assert_eq!(cq.push(wc(3)), Added::Fire);
        assert_eq!(cq.push(wc(4)), Added::Quiet, "fired once");
        cq.arm(Notify::Next).unwrap();
        assert_eq!(cq.push(wc(5)), Added::Wait(period));
        let at = Instant::now();
        cq.set_due(at);
        assert_eq!(cq.take_due(), Some(at));
        assert_eq!(cq.take_due(), None);
        assert_eq!(cq.push(wc(6)), Added::Quiet, "its time has disarmed it");
        // If there is no count, only the timeout is used.
        cq.moderate(Moderation { count: 0, period });
        cq.arm(Notify::Next).unwrap();
        assert_eq!(cq.push(wc(7)), Added::Wait(period));
        assert_eq!(cq.push(wc(8)), Added::Quiet);
    }

    #[test]
    fn timestamps_match_completions() {
        let init = CqInitAttr {
            is_timed: true,
            ..CqInitAttr::new(3)
        };
        let mut cq = Cq::new(&init);
        for n in 0..3 {
            cq.push(wc(n));
            cq.stamp(100 + n);
        }
        let mut got = Vec::new();
        cq.poll(1, &mut Vec::new()).unwrap();
        cq.poll_timed(1, |c, time| got.push((c.wr_id.0, time)))
            .unwrap();
        cq.push(wc(3));
        cq.stamp(200);
        cq.poll_timed(9, |c, time| got.push((c.wr_id.0, time)))
            .unwrap();
        assert_eq!(got, [(1, 101), (2, 102), (3, 200)]);
        for n in 0..4 {
            cq.push(wc(n));
            cq.stamp(n);
        }
        let lost = cq.poll_timed(9, |_, _| panic!("nothing is left"));
        assert_eq!(lost, Err(VerbsError::CqOverrun));
        let mut plain = Cq::new(&CqInitAttr::new(1));
        assert!(plain.poll_timed(1, |_, _| {}).is_err());
    }
}
