//! Shared receive queues.
//!
//! ```text
//!  unarmed ──limit set──▶ armed ──fewer receives than the limit──▶ unarmed, one event
//! ```

use crate::rc::RecvQueue;
use crate::verbs::{CqId, PdId, SrqAttr, VerbsError, XrcdId};

/// Receive queue shared by multiple QPs.
#[derive(Debug)]
pub struct Srq {
    /// Protection domain of the queue.
    pub pd: PdId,
    /// Posted receives.
    pub queue: RecvQueue,
    limit: u32,
    /// Number of QPs using this queue.
    pub users: u32,
    /// Additional state of an XRC SRQ.
    pub xrc: Option<XrcSrq>,
}

/// Additional state of an XRC SRQ.
#[derive(Clone, Copy, Debug)]
pub struct XrcSrq {
    /// XRC domain.
    pub xrcd: XrcdId,
    /// CQ used for receives.
    pub cq: CqId,
    /// Number used by peers to address this queue.
    pub number: u32,
}

impl Srq {
    /// Creates an empty queue.
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

    /// Returns the capacity and the limit of the queue.
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
    /// [`VerbsError::InvalidParameter`] if the new capacity is less than the number of posted
    /// receives, or the limit exceeds the capacity. The queue is not modified in this case.
    pub fn modify(&mut self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), VerbsError> {
        let capacity = max_wr.unwrap_or(self.queue.capacity() as u32);
        // Check everything before we resize the queue.
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

    /// Returns whether the limit has been reached. If so, the limit is disarmed.
    pub fn take_limit_event(&mut self) -> bool {
        // The event is generated when we are below the limit, not at the limit. It is only
        // generated once: the application should arm the limit again after posting more receives.
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
    fn limit_event_fires_once() {
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
    fn rejected_modify_has_no_effect() {
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
