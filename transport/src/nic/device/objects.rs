//! Calls that involve several tables.

use super::Device;
use crate::verbs::{AhAttr, AhId, AsyncEvent, CqId, PdId, SrqAttr, SrqId, VerbsError, XrcdId};

impl Device {
    pub(crate) fn destroy_cq(&mut self, cq: CqId) -> Result<(), VerbsError> {
        self.cqs.destroy(cq)?;
        self.events.forget(AsyncEvent::CqError(cq));
        Ok(())
    }

    pub(crate) fn create_srq(&mut self, pd: PdId, attr: SrqAttr) -> Result<SrqId, VerbsError> {
        self.srqs.create(pd, attr, &mut self.memory)
    }

    pub(crate) fn open_xrcd(&mut self) -> Result<XrcdId, VerbsError> {
        self.config.check_packets("XRC domains")?;
        self.srqs.open_xrcd()
    }

    pub(crate) fn create_xrc_srq(
        &mut self,
        pd: PdId,
        xrcd: XrcdId,
        cq: CqId,
        attr: SrqAttr,
    ) -> Result<SrqId, VerbsError> {
        let ids = (pd, xrcd, cq);
        let (memory, cqs) = (&mut self.memory, &mut self.cqs);
        self.srqs
            .create_xrc(ids, attr, memory, cqs, &mut self.random)
    }

    pub(crate) fn modify_srq(
        &mut self,
        srq: SrqId,
        max_wr: Option<u32>,
        limit: Option<u32>,
    ) -> Result<(), VerbsError> {
        self.srqs.modify(srq, max_wr, limit)?;
        // If the new limit is above the number of posted receives, it has already been reached.
        self.check_srq_limit(srq);
        Ok(())
    }

    pub(crate) fn destroy_srq(&mut self, srq: SrqId) -> Result<(), VerbsError> {
        self.srqs.destroy(srq, &mut self.memory, &mut self.cqs)?;
        self.events.forget(AsyncEvent::SrqLimitReached(srq));
        Ok(())
    }

    /// Raises an event if the limit of an SRQ has been reached.
    #[inline]
    pub(super) fn check_srq_limit(&mut self, srq: SrqId) {
        if self.srqs.take_limit_event(srq) {
            self.events.raise(AsyncEvent::SrqLimitReached(srq));
        }
    }

    pub(crate) fn create_ah(&mut self, pd: PdId, attr: AhAttr) -> Result<AhId, VerbsError> {
        self.config.check_packets("address handles")?;
        self.ahs.create(pd, attr, &self.port, &mut self.memory)
    }

    pub(crate) fn modify_ah(&mut self, ah: AhId, attr: AhAttr) -> Result<(), VerbsError> {
        self.ahs.modify(ah, attr, &self.port)
    }

    pub(crate) fn destroy_ah(&mut self, ah: AhId) -> Result<(), VerbsError> {
        self.ahs.destroy(ah, &mut self.memory)
    }
}
