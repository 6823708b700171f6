//! Protection domains, memory, completion queues, shared receive queues and address handles.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use riser_memory::MemSlice;

use super::{Ah, Nic, Pd};
use crate::mr::{KeyError, MrTable};
use crate::nic::cq::{Added, Cq};
use crate::nic::srq::Srq;
use crate::verbs::{
    Access, AhAttr, AhId, AsyncEvent, Completion, CqAttr, CqId, CqInitAttr, DeviceAttr, Gid,
    Moderation, Mr, MrAdvice, MrAttr, MrChange, MrId, Mw, MwId, MwType, Notify, PKey, PdId,
    PortAttr, PostError, PostReason, QpId, RecvWr, Sge, SrqAttr, SrqId, TimedCompletion,
    VerbsError,
};

/// The only port number.
pub(super) const PORT: u8 = 1;

pub(super) fn check_port(port: u8) -> Result<(), VerbsError> {
    if port == PORT {
        Ok(())
    } else {
        Err(VerbsError::InvalidPort(port))
    }
}

/// Verifies that an index is valid for a table with `len` entries.
fn check_index(port: u8, index: u16, len: usize) -> Result<(), VerbsError> {
    check_port(port)?;
    if usize::from(index) < len {
        Ok(())
    } else {
        Err(VerbsError::InvalidIndex(index))
    }
}

#[allow(
    missing_docs,
    reason = "the calls of the verbs traits, documented there"
)]
impl Nic {
    pub fn device_attr(&self) -> &DeviceAttr {
        &self.attr
    }

    pub fn query_port(&self, port: u8) -> Result<PortAttr, VerbsError> {
        check_port(port)?;
        Ok(PortAttr {
            state: self.port_state,
            max_mtu: self.config.mtu,
            active_mtu: self.config.mtu,
            max_msg_size: crate::rc::MAX_MESSAGE,
            gid_table_len: self.locals.len() as u16,
            pkey_table_len: 1,
            addr: self.config.addr,
        })
    }

    pub fn query_gid(&self, port: u8, index: u16) -> Result<Gid, VerbsError> {
        check_index(port, index, self.locals.len())?;
        Ok(self.locals[usize::from(index)].ip().into())
    }

    pub fn query_pkey(&self, port: u8, index: u16) -> Result<PKey, VerbsError> {
        check_index(port, index, 1)?;
        Ok(PKey::DEFAULT)
    }

    pub fn poll_async_event(&mut self) -> Option<AsyncEvent> {
        self.async_events.pop_front()
    }

    /// Returns whether events from the device or the connection manager are available.
    #[must_use]
    pub fn has_events(&self) -> bool {
        !self.async_events.is_empty() || self.has_cm_events()
    }

    pub fn alloc_pd(&mut self) -> Result<PdId, VerbsError> {
        self.pds.insert(Pd::default())
    }

    pub fn dealloc_pd(&mut self, pd: PdId) -> Result<(), VerbsError> {
        if self.pds.get(pd)?.users > 0 {
            return Err(VerbsError::ResourceBusy("protection domain"));
        }
        self.pds.remove(pd).map(drop)
    }

    pub fn reg_mr(&mut self, pd: PdId, range: &MemSlice, access: Access) -> Result<Mr, VerbsError> {
        self.make_region(pd, |mrs| mrs.reg(pd, range, access))
    }

    pub fn reg_mr_iova(
        &mut self,
        pd: PdId,
        range: &MemSlice,
        iova: u64,
        access: Access,
    ) -> Result<Mr, VerbsError> {
        self.make_region(pd, |mrs| mrs.reg_iova(pd, range, iova, access))
    }

    pub fn rereg_mr(&mut self, mr: MrId, change: &MrChange<'_>) -> Result<Mr, VerbsError> {
        if let Some(pd) = change.pd {
            self.pds.get(pd)?;
        }
        let before = self.mrs.query(mr)?.pd;
        let changed = self.mrs.rereg(mr, change)?;
        if let Some(pd) = change.pd {
            self.pds.get_mut(pd)?.users += 1;
            self.release_pd(before);
        }
        Ok(changed)
    }

    pub fn alloc_null_mr(&mut self, pd: PdId) -> Result<Mr, VerbsError> {
        self.make_region(pd, |mrs| mrs.alloc_null(pd))
    }

    pub fn advise_mr(
        &mut self,
        pd: PdId,
        advice: MrAdvice,
        sges: &[Sge],
    ) -> Result<(), VerbsError> {
        self.pds.get(pd)?;
        let write = advice == MrAdvice::PrefetchWrite;
        for sge in sges {
            let span = self
                .mrs
                .resolve_local(pd, sge, write)
                .map_err(|e| match e {
                    KeyError::Right => VerbsError::InvalidAccess("region is not writable"),
                    KeyError::Range => VerbsError::InvalidParameter("range of a region"),
                    _ => VerbsError::InvalidHandle("memory region"),
                })?;
            span.populate(write)
                .map_err(|_| VerbsError::InvalidParameter("range of a region"))?;
        }
        Ok(())
    }

    pub fn alloc_mw(&mut self, pd: PdId, mw_type: MwType) -> Result<Mw, VerbsError> {
        self.make_region(pd, |mrs| mrs.alloc_window(pd, mw_type))
    }

    pub fn dealloc_mw(&mut self, mw: MwId) -> Result<(), VerbsError> {
        let pd = self.mrs.dealloc_window(mw)?;
        self.release_pd(pd);
        Ok(())
    }

    /// Creates a region or window and adds it to the user count of its protection domain.
    fn make_region<T>(
        &mut self,
        pd: PdId,
        make: impl FnOnce(&mut MrTable) -> Result<T, VerbsError>,
    ) -> Result<T, VerbsError> {
        let domain = self.pds.get_mut(pd)?;
        let mr = make(&mut self.mrs)?;
        domain.users += 1;
        Ok(mr)
    }

    pub fn mr_at(&self, index: u32) -> Option<MrId> {
        self.mrs.at(index)
    }

    pub fn query_mr(&self, mr: MrId) -> Result<MrAttr, VerbsError> {
        self.mrs.query(mr)
    }

    pub fn dereg_mr(&mut self, mr: MrId) -> Result<(), VerbsError> {
        let pd = self.mrs.dereg(mr)?;
        self.release_pd(pd);
        Ok(())
    }

    pub fn alloc_fast_mr(&mut self, pd: PdId, max_segments: u32) -> Result<Mr, VerbsError> {
        self.make_region(pd, |mrs| mrs.alloc_fast(pd, max_segments))
    }

    pub fn map_mr_sg(&mut self, mr: MrId, segments: &[MemSlice]) -> Result<u64, VerbsError> {
        self.mrs.map_sg(mr, segments)
    }

    pub fn create_cq(&mut self, entries: u32) -> Result<CqId, VerbsError> {
        self.create_cq_with(&CqInitAttr::new(entries))
    }

    pub fn create_cq_with(&mut self, init: &CqInitAttr) -> Result<CqId, VerbsError> {
        self.check_cqe(init.entries)?;
        if init.vector >= self.config.limits.comp_vectors {
            return Err(VerbsError::InvalidParameter("completion vector"));
        }
        self.cqs.insert(Cq::new(init))
    }

    pub fn query_cq(&self, cq: CqId) -> Result<CqAttr, VerbsError> {
        Ok(self.cqs.get(cq)?.attr())
    }

    pub fn modify_cq(&mut self, cq: CqId, moderation: Moderation) -> Result<(), VerbsError> {
        let queue = self.cqs.get_mut(cq)?;
        queue.moderate(moderation);
        if let Some(at) = queue.take_due() {
            self.moderated.remove(&(at, cq));
            self.fire(cq);
        }
        Ok(())
    }

    /// Fires all delayed completion events that have expired. Returns the number of events.
    pub(super) fn handle_moderated(&mut self, now: Instant) -> usize {
        let mut fired = 0;
        while let Some(&(at, cq)) = self.moderated.first()
            && at <= now
        {
            self.moderated.remove(&(at, cq));
            if self.cqs.get_mut(cq).is_ok_and(|q| q.take_due().is_some()) {
                self.fire(cq);
                fired += 1;
            }
        }
        fired
    }

    fn check_cqe(&self, entries: u32) -> Result<(), VerbsError> {
        if entries == 0 || entries > self.config.limits.max_cqe {
            return Err(VerbsError::InvalidParameter("completion queue entries"));
        }
        Ok(())
    }

    pub fn resize_cq(&mut self, cq: CqId, entries: u32) -> Result<(), VerbsError> {
        self.check_cqe(entries)?;
        self.cqs.get_mut(cq)?.resize(entries)
    }

    pub fn destroy_cq(&mut self, cq: CqId) -> Result<(), VerbsError> {
        if self.cqs.get(cq)?.users() > 0 {
            return Err(VerbsError::ResourceBusy("completion queue"));
        }
        // A delayed event would refer to a queue that no longer exists.
        if let Some(at) = self.cqs.get_mut(cq)?.take_due() {
            self.moderated.remove(&(at, cq));
        }
        self.cq_events.retain(|&c| c != cq);
        self.async_events.retain(|&e| e != AsyncEvent::CqError(cq));
        self.cqs.remove(cq).map(drop)
    }

    pub fn poll_cq(
        &mut self,
        cq: CqId,
        max: usize,
        out: &mut Vec<Completion>,
    ) -> Result<usize, VerbsError> {
        self.cqs.get_mut(cq)?.poll(max, out)
    }

    pub fn poll_cq_timed(
        &mut self,
        cq: CqId,
        max: usize,
        out: &mut Vec<TimedCompletion>,
    ) -> Result<usize, VerbsError> {
        let wall_start = self.config.wall_start;
        let queue = self.cqs.get_mut(cq)?;
        queue.poll_timed(max, |completion, device_time| {
            out.push(TimedCompletion {
                completion,
                device_time,
                wall_time: wall_start + Duration::from_nanos(device_time),
            });
        })
    }

    pub fn peek_cq(&self, cq: CqId, max: usize) -> Result<usize, VerbsError> {
        Ok(self.cqs.get(cq)?.len().min(max))
    }

    pub fn req_notify_cq(&mut self, cq: CqId, notify: Notify) -> Result<bool, VerbsError> {
        Ok(self.cqs.get_mut(cq)?.arm(notify))
    }

    pub fn poll_cq_event(&mut self) -> Option<CqId> {
        self.cq_events.pop_front()
    }

    /// Adds a completion to its queue. This will return `true` if this caused an overrun.
    pub(super) fn complete(&mut self, cq: CqId, completion: Completion) -> bool {
        let Ok(queue) = self.cqs.get_mut(cq) else {
            debug_assert!(false, "a queue pair without its completion queue");
            return false;
        };
        let added = queue.push(completion);
        if queue.is_timed() {
            let time = self.now.duration_since(self.start);
            queue.stamp(time.as_nanos() as u64);
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
                let at = self.now + period;
                queue.set_due(at);
                self.moderated.insert((at, cq));
                false
            }
            Added::Overrun => {
                self.on_overrun(cq);
                true
            }
        }
    }

    pub(super) fn on_overrun(&mut self, cq: CqId) {
        self.counters.cq_overruns += 1;
        self.raise(AsyncEvent::CqError(cq));
        // Wake users that are waiting for the next completion, since there won't be any.
        self.fire(cq);
    }

    pub fn create_srq(&mut self, pd: PdId, attr: SrqAttr) -> Result<SrqId, VerbsError> {
        self.check_srq(attr)?;
        self.pds.get(pd)?;
        let id = self.srqs.insert(Srq::new(pd, attr))?;
        self.pds.get_mut(pd)?.users += 1;
        Ok(id)
    }

    fn check_srq(&self, attr: SrqAttr) -> Result<(), VerbsError> {
        let l = &self.config.limits;
        if attr.max_wr == 0 || attr.max_wr > l.max_srq_wr || attr.limit > attr.max_wr {
            return Err(VerbsError::InvalidParameter("shared receive queue size"));
        }
        if attr.max_sge > l.max_sge {
            return Err(VerbsError::InvalidParameter("scatter-gather entries"));
        }
        Ok(())
    }

    pub fn modify_srq(
        &mut self,
        srq: SrqId,
        max_wr: Option<u32>,
        limit: Option<u32>,
    ) -> Result<(), VerbsError> {
        if max_wr.is_some_and(|n| n > self.config.limits.max_srq_wr) {
            return Err(VerbsError::InvalidParameter("shared receive queue size"));
        }
        self.srqs.get_mut(srq)?.modify(max_wr, limit)?;
        // If the new limit is above the number of posted receives, it has already been reached.
        self.check_srq_limit(srq);
        Ok(())
    }

    pub fn query_srq(&self, srq: SrqId) -> Result<SrqAttr, VerbsError> {
        Ok(self.srqs.get(srq)?.attr())
    }

    pub fn destroy_srq(&mut self, srq: SrqId) -> Result<(), VerbsError> {
        if self.srqs.get(srq)?.users > 0 {
            return Err(VerbsError::ResourceBusy("shared receive queue"));
        }
        let gone = self.srqs.remove(srq)?;
        self.release_pd(gone.pd);
        if let Some(xrc) = gone.xrc {
            self.forget_xrc_srq(xrc);
        }
        self.async_events
            .retain(|&e| e != AsyncEvent::SrqLimitReached(srq));
        Ok(())
    }

    pub fn post_srq_recv(&mut self, srq: SrqId, wrs: &[RecvWr<'_>]) -> Result<(), PostError> {
        let queue = self.srqs.get_mut(srq).map_err(|_| PostError {
            index: 0,
            reason: PostReason::InvalidHandle,
        })?;
        // We don't need to schedule QPs that had no receive, because their peers will retransmit
        // the rejected messages.
        queue.queue.post(wrs)
    }

    pub(super) fn check_srq_limit(&mut self, srq: SrqId) {
        if self.srqs.get_mut(srq).is_ok_and(Srq::take_limit_event) {
            self.raise(AsyncEvent::SrqLimitReached(srq));
        }
    }

    pub(super) fn release_pd(&mut self, pd: PdId) {
        if let Ok(pd) = self.pds.get_mut(pd) {
            pd.users -= 1;
        }
    }

    /// Returns the IP address for an address vector if the device can send to this host.
    pub(super) fn reachable(&self, attr: &AhAttr) -> Result<IpAddr, VerbsError> {
        check_index(attr.port, attr.sgid_index, self.locals.len())?;
        let ip = attr.dgid.ip();
        let from = self.locals[usize::from(attr.sgid_index)];
        // The address must be a unicast address of the same family.
        if ip.is_ipv4() != from.is_ipv4() || ip.is_unspecified() || ip.is_multicast() {
            return Err(VerbsError::InvalidParameter("destination address"));
        }
        Ok(ip)
    }

    fn check_ah(&self, attr: &AhAttr) -> Result<(), VerbsError> {
        let ip = attr.dgid.ip();
        if ip.is_multicast() && self.has_groups_like(ip) {
            check_index(attr.port, attr.sgid_index, 1)?;
        } else {
            self.reachable(attr)?;
        }
        if attr.flow_label > 0x000f_ffff {
            return Err(VerbsError::InvalidParameter("flow label"));
        }
        Ok(())
    }

    pub fn create_ah(&mut self, pd: PdId, attr: AhAttr) -> Result<AhId, VerbsError> {
        self.config.check_packets("address handles")?;
        self.check_ah(&attr)?;
        self.pds.get(pd)?;
        let id = self.ahs.insert(Ah { pd, attr })?;
        self.pds.get_mut(pd)?.users += 1;
        Ok(id)
    }

    pub fn query_ah(&self, ah: AhId) -> Result<AhAttr, VerbsError> {
        Ok(self.ahs.get(ah)?.attr)
    }

    pub fn modify_ah(&mut self, ah: AhId, attr: AhAttr) -> Result<(), VerbsError> {
        self.ahs.get(ah)?;
        self.check_ah(&attr)?;
        self.ahs.get_mut(ah)?.attr = attr;
        Ok(())
    }

    pub fn destroy_ah(&mut self, ah: AhId) -> Result<(), VerbsError> {
        let pd = self.ahs.remove(ah)?.pd;
        self.release_pd(pd);
        Ok(())
    }

    /// Removes pending events of a destroyed QP.
    pub(super) fn forget_events(&mut self, qp: QpId) {
        self.async_events.retain(|e| {
            !matches!(*e,
                AsyncEvent::QpFatal(q)
                | AsyncEvent::QpReqError(q)
                | AsyncEvent::QpAccessError(q)
                | AsyncEvent::CommEstablished(q)
                | AsyncEvent::SqDrained(q)
                | AsyncEvent::PathMig(q)
                | AsyncEvent::PathMigError(q)
                | AsyncEvent::QpLastWqeReached(q) if q == qp)
        });
    }
}
