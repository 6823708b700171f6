//! Completion queues and their events.

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use crate::nic::cq::{Added, Cq};
use crate::nic::{Clock, NicConfig};
use crate::table::Table;
use crate::verbs::{
    Completion, CqAttr, CqId, CqInitAttr, Moderation, Notify, QpId, TimedCompletion, VerbsError,
};

/// Completion queues and their events.
#[derive(Debug)]
pub(crate) struct CompletionQueues {
    table: Table<CqId, Cq>,
    /// CQs with an unread event.
    events: VecDeque<CqId>,
    /// CQs with a delayed event, ordered by the time when it expires.
    moderated: BTreeSet<(Instant, CqId)>,
    max_cqe: u32,
    vectors: u32,
    wall_start: Duration,
}

impl CompletionQueues {
    /// Creates an empty table.
    pub(in crate::nic) fn new(config: &NicConfig) -> Self {
        Self {
            table: Table::new("completion queue", config.limits.max_cq),
            events: VecDeque::new(),
            moderated: BTreeSet::new(),
            max_cqe: config.limits.max_cqe,
            vectors: config.limits.comp_vectors,
            wall_start: config.wall_start,
        }
    }

    /// Returns the number of CQs.
    pub(in crate::nic) fn len(&self) -> usize {
        self.table.len()
    }

    pub(crate) fn create(&mut self, init: &CqInitAttr) -> Result<CqId, VerbsError> {
        self.check_entries(init.entries)?;
        if init.vector.is_some_and(|vector| vector >= self.vectors) {
            return Err(VerbsError::InvalidParameter("completion vector"));
        }
        self.table.insert(Cq::new(init))
    }

    fn check_entries(&self, entries: u32) -> Result<(), VerbsError> {
        if entries == 0 || entries > self.max_cqe {
            return Err(VerbsError::InvalidParameter("completion queue entries"));
        }
        Ok(())
    }

    /// Verifies that a CQ exists.
    pub(in crate::nic) fn check(&self, cq: CqId) -> Result<(), VerbsError> {
        self.table.get(cq).map(drop)
    }

    pub(crate) fn query(&self, cq: CqId) -> Result<CqAttr, VerbsError> {
        Ok(self.table.get(cq)?.attr())
    }

    pub(crate) fn modify(&mut self, cq: CqId, moderation: Moderation) -> Result<(), VerbsError> {
        let queue = self.table.get_mut(cq)?;
        queue.moderate(moderation);
        if let Some(at) = queue.take_due() {
            self.moderated.remove(&(at, cq));
            self.fire(cq);
        }
        Ok(())
    }

    pub(crate) fn resize(&mut self, cq: CqId, entries: u32) -> Result<(), VerbsError> {
        self.check_entries(entries)?;
        self.table.get_mut(cq)?.resize(entries)
    }

    pub(in crate::nic) fn destroy(&mut self, cq: CqId) -> Result<(), VerbsError> {
        let queue = self.table.get_mut(cq)?;
        if queue.users() > 0 {
            return Err(VerbsError::ResourceBusy("completion queue"));
        }
        // A delayed event would refer to a queue that no longer exists.
        if let Some(at) = queue.take_due() {
            self.moderated.remove(&(at, cq));
        }
        self.events.retain(|&c| c != cq);
        self.table.remove(cq).map(drop)
    }

    /// Adds a work queue to the user count of a CQ.
    pub(in crate::nic) fn add_user(&mut self, cq: CqId) -> Result<(), VerbsError> {
        self.table.get_mut(cq)?.add_user();
        Ok(())
    }

    /// Removes a work queue from the user count of a CQ.
    pub(in crate::nic) fn remove_user(&mut self, cq: CqId) {
        if let Ok(cq) = self.table.get_mut(cq) {
            cq.remove_user();
        }
    }

    #[inline]
    pub(crate) fn poll(
        &mut self,
        cq: CqId,
        max: usize,
        out: &mut Vec<Completion>,
    ) -> Result<usize, VerbsError> {
        self.table.get_mut(cq)?.poll(max, out)
    }

    pub(crate) fn poll_timed(
        &mut self,
        cq: CqId,
        max: usize,
        out: &mut Vec<TimedCompletion>,
    ) -> Result<usize, VerbsError> {
        let wall_start = self.wall_start;
        let queue = self.table.get_mut(cq)?;
        queue.poll_timed(max, |completion, device_time| {
            out.push(TimedCompletion {
                completion,
                device_time,
                wall_time: wall_start + Duration::from_nanos(device_time),
            });
        })
    }

    #[inline]
    pub(crate) fn peek(&self, cq: CqId, max: usize) -> Result<usize, VerbsError> {
        Ok(self.table.get(cq)?.len().min(max))
    }

    #[inline]
    pub(crate) fn req_notify(&mut self, cq: CqId, notify: Notify) -> Result<bool, VerbsError> {
        self.table.get_mut(cq)?.arm(notify)
    }

    #[inline]
    pub(crate) fn poll_event(&mut self) -> Option<CqId> {
        self.events.pop_front()
    }

    fn fire(&mut self, cq: CqId) {
        if !self.events.contains(&cq) {
            self.events.push_back(cq);
        }
    }

    /// Adds a completion to its queue. This will return `true` if this caused an overrun.
    #[inline]
    pub(in crate::nic) fn complete(
        &mut self,
        cq: CqId,
        completion: Completion,
        clock: &Clock,
    ) -> bool {
        let Ok(queue) = self.table.get_mut(cq) else {
            debug_assert!(false, "a queue pair without its completion queue");
            return false;
        };
        let added = queue.push(completion);
        if queue.is_timed() {
            queue.stamp(clock.device_time());
        }
        match added {
            Added::Quiet | Added::Dead => false,
            Added::Fire => {
                // The event was delayed, but the count has been reached before the timeout.
                if let Some(at) = queue.take_due() {
                    self.moderated.remove(&(at, cq));
                }
                self.fire(cq);
                false
            }
            Added::Wait(period) => {
                let at = clock.now() + period;
                queue.set_due(at);
                self.moderated.insert((at, cq));
                false
            }
            Added::Overrun => {
                // Wake users that are waiting for the next completion, since there won't be any.
                self.fire(cq);
                true
            }
        }
    }

    /// Breaks a CQ as if it had been full. This will return `true` if it was not broken before.
    pub(in crate::nic) fn overrun(&mut self, cq: CqId) -> bool {
        let is_new = self.table.get_mut(cq).is_ok_and(Cq::overrun);
        if is_new {
            self.fire(cq);
        }
        is_new
    }

    /// Removes the completions of a QP that has been reset.
    pub(in crate::nic) fn forget_qp(&mut self, cq: CqId, qp: QpId) {
        if let Ok(cq) = self.table.get_mut(cq) {
            cq.forget(qp);
        }
    }

    /// Fires all delayed completion events that have expired. Returns the number of events.
    pub(in crate::nic) fn handle_timeouts(&mut self, now: Instant) -> usize {
        let mut fired = 0;
        while let Some(&(at, cq)) = self.moderated.first()
            && at <= now
        {
            self.moderated.remove(&(at, cq));
            if self.table.get_mut(cq).is_ok_and(|q| q.take_due().is_some()) {
                self.fire(cq);
                fired += 1;
            }
        }
        fired
    }

    /// Returns when the next delayed event expires.
    pub(in crate::nic) fn deadline(&self) -> Option<Instant> {
        self.moderated.first().map(|(at, _)| *at)
    }

    /// Fires all delayed events and disables moderation.
    pub(in crate::nic) fn stop_moderation(&mut self) {
        let all: Vec<CqId> = self.table.iter().map(|(id, _)| id).collect();
        for cq in all {
            // This can't fail because the queue exists.
            let _ = self.modify(cq, Moderation::default());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::{Handle, WcOpcode, WcStatus, WrId};

    fn queues() -> (CompletionQueues, Clock) {
        let config = NicConfig::new([10, 0, 0, 1].into(), [7; 32]);
        (CompletionQueues::new(&config), Clock::new(Instant::now()))
    }

    fn wc(n: u64) -> Completion {
        let qp = QpId(Handle::new(0, 1));
        Completion::new(WrId(n), WcStatus::Success, WcOpcode::Send, qp, 0x11)
    }

    #[test]
    fn cq_with_users_is_busy() {
        let (mut cqs, _) = queues();
        let cq = cqs.create(&CqInitAttr::new(4)).unwrap();
        cqs.add_user(cq).unwrap();
        let busy = VerbsError::ResourceBusy("completion queue");
        assert_eq!(cqs.destroy(cq), Err(busy));
        cqs.remove_user(cq);
        cqs.destroy(cq).unwrap();
        assert!(cqs.check(cq).is_err());
    }

    #[test]
    fn delayed_event_fires_at_deadline() {
        let (mut cqs, mut clock) = queues();
        let cq = cqs.create(&CqInitAttr::new(4)).unwrap();
        let period = Duration::from_micros(50);
        cqs.modify(cq, Moderation { count: 3, period }).unwrap();
        cqs.req_notify(cq, Notify::Next).unwrap();
        assert!(!cqs.complete(cq, wc(0), &clock));
        let due = clock.now() + period;
        assert_eq!((cqs.poll_event(), cqs.deadline()), (None, Some(due)));
        assert_eq!(cqs.handle_timeouts(clock.now()), 0);
        clock.set_now(due);
        assert_eq!(cqs.handle_timeouts(clock.now()), 1);
        assert_eq!((cqs.poll_event(), cqs.deadline()), (Some(cq), None));
    }

    #[test]
    fn destroyed_cq_has_no_events() {
        let (mut cqs, clock) = queues();
        let [fired, delayed] = [(); 2].map(|()| cqs.create(&CqInitAttr::new(4)).unwrap());
        let period = Duration::from_micros(50);
        let moderation = Moderation { count: 0, period };
        cqs.modify(delayed, moderation).unwrap();
        for cq in [fired, delayed] {
            cqs.req_notify(cq, Notify::Next).unwrap();
            cqs.complete(cq, wc(0), &clock);
            cqs.destroy(cq).unwrap();
        }
        assert_eq!((cqs.poll_event(), cqs.deadline()), (None, None));
    }

    #[test]
    fn lost_completion_wakes_user() {
        let (mut cqs, clock) = queues();
        let cq = cqs.create(&CqInitAttr::new(1)).unwrap();
        assert!(!cqs.complete(cq, wc(0), &clock));
        assert!(cqs.complete(cq, wc(1), &clock));
        assert!(!cqs.complete(cq, wc(2), &clock), "it has already overrun");
        assert_eq!(cqs.poll_event(), Some(cq));
        assert!(!cqs.overrun(cq));
    }
}
