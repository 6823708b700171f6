//! Shared receive queues.
//!
//! ```text
//!  unarmed ──limit set──▶ armed ──fewer receives than the limit──▶ unarmed, one event
//! ```

use crate::rc::RecvQueue;
use crate::verbs::{CqId, PdId, SrqAttr, VerbsError, XrcdId};

/// A receive queue that several queue pairs draw from.
#[derive(Debug)]
pub struct Srq {
    /// Protection domain of the queue.
    pub pd: PdId,
    /// Receives that are posted.
    pub queue: RecvQueue,
    limit: u32,
    /// Queue pairs that use it.
    pub users: u32,
    /// What it has besides in an XRC domain.
    pub xrc: Option<XrcSrq>,
}

/// What a shared receive queue of an XRC domain has besides.
#[derive(Clone, Copy, Debug)]
pub struct XrcSrq {
    /// XRC domain of the queue.
    pub xrcd: XrcdId,
    /// Completion queue of its receives.
    pub cq: CqId,
    /// Number by which peers name it.
    pub number: u32,
}

impl Srq {
    /// Makes an empty queue.
    #[must_use]
    pub fn new(pd: PdId, attr: SrqAttr) -> Self {
        Self {
            pd,
            queue: RecvQueue::new(attr.max_wr, attr.max_sge),
            limit: attr.limit,
            users: 0,
            xrc: None,
        }
    }

    /// Capacity and limit of the queue.
    #[must_use]
    pub fn attr(&self) -> SrqAttr {
        SrqAttr {
            max_wr: self.queue.capacity() as u32,
            max_sge: self.queue.max_sge(),
            limit: self.limit,
        }
    }

    /// Resizes the queue or arms its limit.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] below what is posted, or a limit above the capacity;
    /// nothing has changed then.
    pub fn modify(&mut self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), VerbsError> {
        let capacity = max_wr.unwrap_or(self.queue.capacity() as u32);
        // Everything is checked before the queue is resized.
        if limit.is_some_and(|l| l > capacity) {
            return Err(VerbsError::InvalidParameter("shared receive queue limit"));
        }
        if let Some(max_wr) = max_wr
            && (max_wr == 0 || !self.queue.resize(max_wr))
        {
            return Err(VerbsError::InvalidParameter("shared receive queue size"));
        }
        if let Some(limit) = limit {
            self.limit = limit;
        }
        Ok(())
    }

    /// Returns whether the limit has been reached; it is unarmed then.
    pub fn take_limit_event(&mut self) -> bool {
        // Below the limit, not at it. The event comes once; the user arms it again when it has
        // posted.
        let reached = self.limit > 0 && (self.queue.len() as u64) < u64::from(self.limit);
        if reached {
            self.limit = 0;
        }
        reached
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::{Handle, RecvWr, WrId};

    #[test]
    fn the_limit_fires_once_and_must_be_armed_again() {
        let attr = SrqAttr {
            max_wr: 4,
            max_sge: 1,
            limit: 0,
        };
        let mut srq = Srq::new(PdId(Handle::new(0, 1)), attr);
        let wr = RecvWr {
            wr_id: WrId(1),
            sges: &[],
        };
        srq.queue.post(&[wr, wr, wr]).unwrap();
        assert!(!srq.take_limit_event());
        srq.modify(None, Some(3)).unwrap();
        assert!(!srq.take_limit_event(), "three are not fewer than three");
        srq.queue.pop_id();
        assert!(srq.take_limit_event());
        assert!(!srq.take_limit_event());
        assert_eq!(srq.attr(), attr);
    }

    #[test]
    fn a_refused_change_changes_nothing() {
        let attr = SrqAttr {
            max_wr: 4,
            max_sge: 1,
            limit: 2,
        };
        let mut srq = Srq::new(PdId(Handle::new(0, 1)), attr);
        let wr = RecvWr {
            wr_id: WrId(1),
            sges: &[],
        };
        srq.queue.post(&[wr, wr, wr]).unwrap();
        for (max_wr, limit) in [
            (Some(2), Some(1)),
            (Some(8), Some(9)),
            (None, Some(5)),
            (Some(0), None),
        ] {
            assert!(srq.modify(max_wr, limit).is_err());
            assert_eq!(srq.attr(), attr);
        }
        srq.modify(Some(8), Some(8)).unwrap();
        assert_eq!((srq.attr().max_wr, srq.attr().limit), (8, 8));
    }
}
