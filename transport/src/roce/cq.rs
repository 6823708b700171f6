//! Completion queues.
//!
//! A queue holds as many completions as it was created for. One more than that is lost, and losing
//! one is never silent: the queue is dead from then on ([`VerbsError::CqOverrun`]), the device
//! raises an asynchronous error and takes the queue pairs that use it to the error state.
//!
//! ```text
//!   idle ──req_notify──▶ armed ──matching completion──▶ idle, one event
//! ```
//!
//! With a [`Moderation`] the event waits for further completions that match: until there are as many
//! as that says, or until its time has passed, for which the device sets a timer.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::verbs::{Completion, CqAttr, CqInitAttr, Moderation, Notify, QpId, VerbsError};

/// Result of adding a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Added {
    /// No event is due.
    Quiet,
    /// The armed notification fires.
    Fire,
    /// The armed notification waits for further completions, so long at most.
    Wait(Duration),
    /// There was no room: the completion is lost and the queue is dead.
    Overrun,
    /// The queue was dead already.
    Dead,
}

/// Completion queue of the software NIC.
#[derive(Debug)]
pub struct Cq {
    entries: VecDeque<Completion>,
    capacity: usize,
    armed: Option<Notify>,
    moderation: Moderation,
    /// Completions that the event of an armed queue has waited for, and until when it waits.
    moderated: u16,
    due: Option<Instant>,
    /// Times of the completions that wait, in nanoseconds of the device's clock, if they have any.
    times: Option<VecDeque<u64>>,
    vector: u32,
    overrun: bool,
    users: u32,
}

impl Cq {
    /// An empty queue.
    #[must_use]
    pub fn new(init: &CqInitAttr) -> Self {
        let capacity = init.entries as usize;
        Self {
            // A huge queue that stays nearly empty should not cost its whole size; the first
            // thousand are there from the start, so that the data path does not allocate.
            entries: VecDeque::with_capacity(capacity.min(1024)),
            capacity,
            armed: None,
            moderation: Moderation::default(),
            moderated: 0,
            due: None,
            times: init.is_timed.then(VecDeque::new),
            vector: init.vector,
            overrun: false,
            users: 0,
        }
    }

    /// Attributes of the queue at present.
    #[must_use]
    pub fn attr(&self) -> CqAttr {
        CqAttr {
            entries: self.capacity as u32,
            vector: self.vector,
            is_timed: self.times.is_some(),
            moderation: self.moderation,
        }
    }

    /// Sets how long an event may wait from now on.
    pub fn moderate(&mut self, moderation: Moderation) {
        self.moderation = moderation;
    }

    /// Notes until when the event of an armed queue waits.
    pub fn set_due(&mut self, at: Instant) {
        self.due = Some(at);
    }

    /// An event that waits comes now. Returns until when it would have waited; `None` if none does.
    pub fn take_due(&mut self) -> Option<Instant> {
        let due = self.due.take()?;
        self.armed = None;
        self.moderated = 0;
        Some(due)
    }

    /// Whether completions have times.
    #[must_use]
    pub fn is_timed(&self) -> bool {
        self.times.is_some()
    }

    /// Gives the completion that was added last its time, in nanoseconds of the device's clock.
    pub fn stamp(&mut self, time: u64) {
        if let Some(times) = &mut self.times {
            // One that was lost has none.
            times.resize(self.entries.len(), time);
        }
    }

    /// Completions that it has room for.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes of memory that a queue for `capacity` completions holds when it is full.
    #[must_use]
    pub const fn memory(capacity: u32) -> usize {
        size_of::<Self>() + capacity as usize * size_of::<Completion>()
    }

    /// Number of completions that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether no completion waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether a completion was lost.
    #[must_use]
    pub fn is_overrun(&self) -> bool {
        self.overrun
    }

    /// Work queues that complete here.
    #[must_use]
    pub fn users(&self) -> u32 {
        self.users
    }

    /// Counts a work queue in.
    pub fn add_user(&mut self) {
        self.users += 1;
    }

    /// Counts a work queue out.
    pub fn remove_user(&mut self) {
        debug_assert!(self.users > 0, "a queue left that never came");
        self.users = self.users.saturating_sub(1);
    }

    /// Loses a completion; returns whether it is the first.
    pub(super) fn overrun(&mut self) -> bool {
        // What waits would look like a complete record of what was done.
        self.entries.clear();
        if let Some(times) = &mut self.times {
            times.clear();
        }
        !std::mem::replace(&mut self.overrun, true)
    }

    /// Adds a completion; the result says whether an armed notification fires.
    pub fn push(&mut self, completion: Completion) -> Added {
        // An overrun queue completes nothing any more: its user could not know what is missing.
        if self.overrun {
            return Added::Dead;
        }
        if self.entries.len() >= self.capacity {
            self.overrun();
            return Added::Overrun;
        }
        // An error wakes a user that waits for solicited completions only, or it would never
        // learn of it.
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

    /// Takes up to `max` completions, oldest first, appending them to `out`.
    ///
    /// # Errors
    /// [`VerbsError::CqOverrun`] once a completion has been lost.
    pub fn poll(&mut self, max: usize, out: &mut Vec<Completion>) -> Result<usize, VerbsError> {
        if self.overrun {
            return Err(VerbsError::CqOverrun);
        }
        let n = max.min(self.entries.len());
        out.extend(self.entries.drain(..n));
        if let Some(times) = &mut self.times {
            times.drain(..n);
        }
        if self.entries.is_empty() {
            // Begins again at the front of its memory, so that one which is never deep touches
            // little of it.
            self.entries.clear();
        }
        Ok(n)
    }

    /// The same, with the time of each completion.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] where completions have no times, and those of
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

    /// Removes the completions of a queue pair that goes back to RESET: they are of its life before, as
    /// those of adapters are (IBTA 11.2.4.2 leaves it open).
    pub fn forget(&mut self, qp: QpId) {
        if let Some(times) = &mut self.times {
            let mut entries = self.entries.iter();
            times.retain(|_| entries.next().is_some_and(|entry| entry.qp != qp));
        }
        self.entries.retain(|entry| entry.qp != qp);
    }

    /// Arms the queue; a later call replaces an earlier one, but a solicited notification does not
    /// weaken one for the next completion (IBTA 11.4.2.2). Answers whether completions wait.
    pub fn arm(&mut self, notify: Notify) -> bool {
        let weaker = self.armed == Some(Notify::Next) && notify == Notify::Solicited;
        if !weaker {
            // A count of 0 would never be reached.
            self.armed = Some(match notify {
                Notify::Count(0) => Notify::Count(1),
                other => other,
            });
        }
        // An overrun queue reports completions, so that its user polls and meets the error.
        !self.entries.is_empty() || self.overrun
    }

    /// Changes the capacity.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] below the number of completions that wait.
    pub fn resize(&mut self, capacity: u32) -> Result<(), VerbsError> {
        if capacity == 0 || (capacity as usize) < self.entries.len() {
            return Err(VerbsError::InvalidParameter("completion queue entries"));
        }
        self.capacity = capacity as usize;
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
    fn completions_come_out_in_order_and_in_portions() {
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
    fn completions_of_a_queue_pair_are_forgotten_with_their_times() {
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
    fn a_lost_completion_kills_the_queue() {
        let mut cq = Cq::new(&CqInitAttr::new(1));
        assert_eq!(cq.push(wc(0)), Added::Quiet);
        assert_eq!(cq.push(wc(1)), Added::Overrun);
        assert_eq!(cq.push(wc(2)), Added::Dead);
        let mut out = Vec::new();
        assert_eq!(cq.poll(9, &mut out), Err(VerbsError::CqOverrun));
        assert!(out.is_empty());
        assert!(cq.arm(Notify::Next));
    }

    #[test]
    fn an_armed_queue_fires_once() {
        let mut cq = Cq::new(&CqInitAttr::new(16));
        assert!(!cq.arm(Notify::Next));
        assert_eq!(cq.push(wc(0)), Added::Fire);
        assert_eq!(cq.push(wc(1)), Added::Quiet);
        assert!(cq.arm(Notify::Next), "completions wait already");
    }

    #[test]
    fn solicited_and_counted_notifications_wait_for_theirs() {
        let mut cq = Cq::new(&CqInitAttr::new(16));
        cq.arm(Notify::Solicited);
        assert_eq!(cq.push(wc(0)), Added::Quiet);
        let solicited = Completion {
            solicited: true,
            ..wc(1)
        };
        assert_eq!(cq.push(solicited), Added::Fire);
        cq.arm(Notify::Solicited);
        let failed = Completion {
            status: WcStatus::WrFlushErr,
            ..wc(2)
        };
        assert_eq!(cq.push(failed), Added::Fire);
        cq.arm(Notify::Count(2));
        assert_eq!(cq.push(wc(3)), Added::Quiet);
        assert_eq!(cq.push(wc(4)), Added::Fire);
        cq.arm(Notify::Next);
        cq.arm(Notify::Solicited);
        assert_eq!(cq.push(wc(5)), Added::Fire);
    }

    #[test]
    fn a_resize_keeps_what_waits() {
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
    fn a_moderated_event_waits_for_its_count_or_its_time() {
        let mut cq = Cq::new(&CqInitAttr::new(16));
        let period = Duration::from_micros(50);
        cq.moderate(Moderation { count: 3, period });
        assert_eq!(cq.push(wc(0)), Added::Quiet, "not armed");
        cq.arm(Notify::Next);
        assert_eq!(cq.push(wc(1)), Added::Wait(period));
        assert_eq!(cq.push(wc(2)), Added::Quiet);
        assert_eq!(cq.push(wc(3)), Added::Fire);
        assert_eq!(cq.push(wc(4)), Added::Quiet, "fired once");
        cq.arm(Notify::Next);
        assert_eq!(cq.push(wc(5)), Added::Wait(period));
        let at = Instant::now();
        cq.set_due(at);
        assert_eq!(cq.take_due(), Some(at));
        assert_eq!(cq.take_due(), None);
        assert_eq!(cq.push(wc(6)), Added::Quiet, "its time has disarmed it");
        // Without a count the time alone decides.
        cq.moderate(Moderation { count: 0, period });
        cq.arm(Notify::Next);
        assert_eq!(cq.push(wc(7)), Added::Wait(period));
        assert_eq!(cq.push(wc(8)), Added::Quiet);
    }

    #[test]
    fn times_go_with_their_completions() {
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
