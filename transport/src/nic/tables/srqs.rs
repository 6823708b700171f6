//! Shared receive queues and XRC domains.

use chacha20::ChaCha20Rng;

use super::{CompletionQueues, MemoryTables};
use crate::nic::NicLimits;
use crate::nic::qpn::{QpnAllocator, QpnMap};
use crate::nic::srq::{Srq, XrcSrq};
use crate::rc::RecvQueue;
use crate::table::Table;
use crate::verbs::{CqId, PdId, PostError, PostReason, RecvWr, SrqAttr, SrqId, VerbsError, XrcdId};

#[derive(Debug, Default)]
struct Xrcd {
    /// Number of QPs and SRQs.
    users: u32,
}

/// Shared receive queues and XRC domains.
#[derive(Debug)]
pub(crate) struct SharedQueues {
    table: Table<SrqId, Srq>,
    xrcds: Table<XrcdId, Xrcd>,
    /// XRC SRQs by number.
    by_number: QpnMap<SrqId>,
    numbers: QpnAllocator,
    max_wr: u32,
    max_sge: u32,
}

impl SharedQueues {
    /// Creates empty tables.
    pub(in crate::nic) fn new(limits: &NicLimits) -> Self {
        Self {
            table: Table::new("shared receive queue", limits.max_srq),
            xrcds: Table::new("XRC domain", limits.max_pd),
            by_number: QpnMap::default(),
            // Packets are steered to workers using the QP number only.
            numbers: QpnAllocator::new(0, 0),
            max_wr: limits.max_srq_wr,
            max_sge: limits.max_sge,
        }
    }

    pub(in crate::nic) fn create(
        &mut self,
        pd: PdId,
        attr: SrqAttr,
        memory: &mut MemoryTables,
    ) -> Result<SrqId, VerbsError> {
        if attr.max_wr == 0 || attr.max_wr > self.max_wr || attr.limit > attr.max_wr {
            return Err(VerbsError::InvalidParameter("shared receive queue size"));
        }
        if attr.max_sge > self.max_sge {
            return Err(VerbsError::InvalidParameter("scatter-gather entries"));
        }
        memory.check_pd(pd)?;
        let id = self.table.insert(Srq::new(pd, attr))?;
        memory.hold_pd(pd)?;
        Ok(id)
    }

    pub(in crate::nic) fn create_xrc(
        &mut self,
        (pd, xrcd, cq): (PdId, XrcdId, CqId),
        attr: SrqAttr,
        memory: &mut MemoryTables,
        cqs: &mut CompletionQueues,
        random: &mut ChaCha20Rng,
    ) -> Result<SrqId, VerbsError> {
        self.xrcds.get(xrcd)?;
        cqs.check(cq)?;
        let id = self.create(pd, attr, memory)?;
        // Like QP numbers, these numbers are random and are not reused for some time, so that a
        // peer connected to the domain cannot guess them.
        let number = self.numbers.allocate(random);
        self.table.get_mut(id)?.xrc = Some(XrcSrq { xrcd, cq, number });
        self.by_number.insert(number, id);
        self.hold_xrcd(xrcd)?;
        cqs.add_user(cq)?;
        Ok(id)
    }

    pub(crate) fn query(&self, srq: SrqId) -> Result<SrqAttr, VerbsError> {
        Ok(self.table.get(srq)?.attr())
    }

    pub(in crate::nic) fn modify(
        &mut self,
        srq: SrqId,
        max_wr: Option<u32>,
        limit: Option<u32>,
    ) -> Result<(), VerbsError> {
        if max_wr.is_some_and(|n| n > self.max_wr) {
            return Err(VerbsError::InvalidParameter("shared receive queue size"));
        }
        self.table.get_mut(srq)?.modify(max_wr, limit)
    }

    pub(in crate::nic) fn destroy(
        &mut self,
        srq: SrqId,
        memory: &mut MemoryTables,
        cqs: &mut CompletionQueues,
    ) -> Result<(), VerbsError> {
        if self.table.get(srq)?.users > 0 {
            return Err(VerbsError::ResourceBusy("shared receive queue"));
        }
        let destroyed = self.table.remove(srq)?;
        memory.release_pd(destroyed.pd);
        if let Some(xrc) = destroyed.xrc {
            self.by_number.remove(&xrc.number);
            self.numbers.release(xrc.number);
            self.release_xrcd(xrc.xrcd);
            cqs.remove_user(xrc.cq);
        }
        Ok(())
    }

    pub(crate) fn post(&mut self, srq: SrqId, wrs: &[RecvWr<'_>]) -> Result<(), PostError> {
        let queue = self.table.get_mut(srq).map_err(|_| PostError {
            index: 0,
            reason: PostReason::InvalidHandle,
        })?;
        // We don't need to schedule QPs that had no receive, because their peers will retransmit
        // the rejected messages.
        queue.queue.post(wrs)
    }

    /// Returns the receives of an SRQ.
    #[inline]
    pub(in crate::nic) fn receives(&mut self, srq: SrqId) -> Option<&mut RecvQueue> {
        self.table.get_mut(srq).ok().map(|srq| &mut srq.queue)
    }

    /// Returns the attributes of an SRQ for a QP, which can't use an SRQ of an XRC domain.
    pub(in crate::nic) fn attr_for_qp(&self, srq: SrqId) -> Result<SrqAttr, VerbsError> {
        let srq = self.table.get(srq)?;
        if srq.xrc.is_some() {
            return Err(VerbsError::WrongQpType(
                "shared receive queue of an XRC domain",
            ));
        }
        Ok(srq.attr())
    }

    /// Adds a QP to the user count of an SRQ.
    pub(in crate::nic) fn add_user(&mut self, srq: SrqId) -> Result<(), VerbsError> {
        self.table.get_mut(srq)?.users += 1;
        Ok(())
    }

    /// Removes a QP from the user count of an SRQ.
    pub(in crate::nic) fn remove_user(&mut self, srq: SrqId) {
        if let Ok(srq) = self.table.get_mut(srq) {
            srq.users -= 1;
        }
    }

    /// Returns whether the limit of an SRQ has been reached. If so, the limit is disarmed.
    #[inline]
    pub(in crate::nic) fn take_limit_event(&mut self, srq: SrqId) -> bool {
        self.table.get_mut(srq).is_ok_and(Srq::take_limit_event)
    }

    pub(in crate::nic) fn open_xrcd(&mut self) -> Result<XrcdId, VerbsError> {
        self.xrcds.insert(Xrcd::default())
    }

    pub(crate) fn close_xrcd(&mut self, xrcd: XrcdId) -> Result<(), VerbsError> {
        if self.xrcds.get(xrcd)?.users > 0 {
            return Err(VerbsError::ResourceBusy("XRC domain"));
        }
        self.xrcds.remove(xrcd).map(drop)
    }

    /// Verifies that an XRC domain exists.
    pub(in crate::nic) fn check_xrcd(&self, xrcd: XrcdId) -> Result<(), VerbsError> {
        self.xrcds.get(xrcd).map(drop)
    }

    /// Adds an object to the user count of its XRC domain.
    pub(in crate::nic) fn hold_xrcd(&mut self, xrcd: XrcdId) -> Result<(), VerbsError> {
        self.xrcds.get_mut(xrcd)?.users += 1;
        Ok(())
    }

    /// Removes an object from the user count of its XRC domain.
    pub(in crate::nic) fn release_xrcd(&mut self, xrcd: XrcdId) {
        if let Ok(xrcd) = self.xrcds.get_mut(xrcd) {
            xrcd.users -= 1;
        }
    }

    pub(crate) fn number(&self, srq: SrqId) -> Result<u32, VerbsError> {
        let xrc = self.table.get(srq)?.xrc;
        let xrc = xrc.ok_or(VerbsError::InvalidParameter("shared receive queue"))?;
        Ok(xrc.number)
    }

    /// Returns the CQ of an XRC SRQ.
    pub(in crate::nic) fn xrc_cq(&self, srq: SrqId) -> Option<CqId> {
        Some(self.table.get(srq).ok()?.xrc?.cq)
    }

    /// Returns the queue with this number and its protection domain, if it belongs to this XRC
    /// domain.
    pub(in crate::nic) fn find_xrc(&self, xrcd: XrcdId, number: u32) -> Option<(SrqId, PdId)> {
        let id = *self.by_number.get(&number)?;
        let srq = self.table.get(id).ok()?;
        (srq.xrc?.xrcd == xrcd).then_some((id, srq.pd))
    }
}

#[cfg(test)]
mod tests {
    use chacha20::rand_core::SeedableRng;

    use super::*;
    use crate::nic::NicConfig;
    use crate::verbs::CqInitAttr;

    const ATTR: SrqAttr = SrqAttr {
        max_wr: 4,
        max_sge: 1,
        limit: 0,
    };

    fn tables() -> (SharedQueues, MemoryTables, CompletionQueues) {
        let config = NicConfig::new([10, 0, 0, 1].into(), [7; 32]);
        (
            SharedQueues::new(&config.limits),
            MemoryTables::new(&config.limits, [7; 16]),
            CompletionQueues::new(&config),
        )
    }

    #[test]
    fn srq_with_users_is_busy() {
        let (mut srqs, mut memory, mut cqs) = tables();
        let pd = memory.alloc_pd().unwrap();
        let srq = srqs.create(pd, ATTR, &mut memory).unwrap();
        srqs.add_user(srq).unwrap();
        let busy = Err(VerbsError::ResourceBusy("shared receive queue"));
        assert_eq!(srqs.destroy(srq, &mut memory, &mut cqs), busy);
        assert!(memory.dealloc_pd(pd).is_err());
        srqs.remove_user(srq);
        srqs.destroy(srq, &mut memory, &mut cqs).unwrap();
        memory.dealloc_pd(pd).unwrap();
    }

    #[test]
    fn xrc_srq_is_found_in_its_domain() {
        let (mut srqs, mut memory, mut cqs) = tables();
        let mut random = ChaCha20Rng::from_seed([1; 32]);
        let pd = memory.alloc_pd().unwrap();
        let cq = cqs.create(&CqInitAttr::new(4)).unwrap();
        let [xrcd, other] = [(); 2].map(|()| srqs.open_xrcd().unwrap());
        let ids = (pd, xrcd, cq);
        let srq = srqs
            .create_xrc(ids, ATTR, &mut memory, &mut cqs, &mut random)
            .unwrap();
        let number = srqs.number(srq).unwrap();
        assert_eq!(srqs.find_xrc(xrcd, number), Some((srq, pd)));
        assert_eq!(srqs.find_xrc(other, number), None);
        assert_eq!(srqs.xrc_cq(srq), Some(cq));
        assert!(srqs.attr_for_qp(srq).is_err());
        assert!(srqs.close_xrcd(xrcd).is_err() && cqs.destroy(cq).is_err());
        srqs.destroy(srq, &mut memory, &mut cqs).unwrap();
        assert_eq!(srqs.find_xrc(xrcd, number), None);
        srqs.close_xrcd(xrcd).unwrap();
        cqs.destroy(cq).unwrap();
    }

    #[test]
    fn invalid_srq_size_is_rejected() {
        let (mut srqs, mut memory, _) = tables();
        let pd = memory.alloc_pd().unwrap();
        let limits = NicLimits::default();
        for attr in [
            SrqAttr { max_wr: 0, ..ATTR },
            SrqAttr {
                max_wr: limits.max_srq_wr + 1,
                ..ATTR
            },
            SrqAttr { limit: 5, ..ATTR },
            SrqAttr {
                max_sge: limits.max_sge + 1,
                ..ATTR
            },
        ] {
            assert!(srqs.create(pd, attr, &mut memory).is_err());
        }
        let srq = srqs.create(pd, ATTR, &mut memory).unwrap();
        let too_many = Some(limits.max_srq_wr + 1);
        assert!(srqs.modify(srq, too_many, None).is_err());
        assert_eq!(srqs.query(srq), Ok(ATTR));
    }
}
