//! Extended reliable connections (IBTA annex A14).
//!
//! An XRC domain contains shared receive queues and the receiving side of connections, called
//! targets. Each request specifies the number of a queue: a receive from this queue will be used,
//! it is completed in the completion queue assigned to this queue, and keys are checked against its
//! protection domain. As a result, a peer only needs a single connection per host instead of one
//! for each process, since each process can have its own shared receive queue.
//!
//! XRC is not supported by Linux `rdma_rxe`.

use super::qp::with_env;
use super::rx::RxOutcome;
use super::{Machine, Nic, Xrcd};
use crate::nic::srq::{Srq, XrcSrq};
use crate::rc::Env;
use crate::verbs::{CqId, PdId, QpId, QpType, SrqAttr, SrqId, VerbsError, XrcdId};
use crate::wire::Packet;

#[allow(
    missing_docs,
    reason = "the calls of the verbs traits, documented there"
)]
impl Nic {
    pub fn open_xrcd(&mut self) -> Result<XrcdId, VerbsError> {
        self.config.check_packets("XRC domains")?;
        self.xrcds.insert(Xrcd::default())
    }

    pub fn close_xrcd(&mut self, xrcd: XrcdId) -> Result<(), VerbsError> {
        if self.xrcds.get(xrcd)?.users > 0 {
            return Err(VerbsError::ResourceBusy("XRC domain"));
        }
        self.xrcds.remove(xrcd).map(drop)
    }

    pub fn create_xrc_srq(
        &mut self,
        pd: PdId,
        xrcd: XrcdId,
        cq: CqId,
        attr: SrqAttr,
    ) -> Result<SrqId, VerbsError> {
        self.xrcds.get(xrcd)?;
        self.cqs.get(cq)?;
        let id = self.create_srq(pd, attr)?;
        // Like QP numbers, these numbers are random and are not reused for some time, so that a
        // peer connected to the domain cannot guess them.
        let number = self.srqns.allocate(&mut self.random);
        self.srqs.get_mut(id)?.xrc = Some(XrcSrq { xrcd, cq, number });
        self.by_srqn.insert(number, id);
        self.xrcds.get_mut(xrcd)?.users += 1;
        self.cqs.get_mut(cq)?.add_user();
        Ok(id)
    }

    pub fn srq_num(&self, srq: SrqId) -> Result<u32, VerbsError> {
        let xrc = self.srqs.get(srq)?.xrc;
        let xrc = xrc.ok_or(VerbsError::InvalidParameter("shared receive queue"))?;
        Ok(xrc.number)
    }

    /// Releases the resources of an XRC SRQ that was destroyed.
    pub(super) fn forget_xrc_srq(&mut self, xrc: XrcSrq) {
        self.by_srqn.remove(&xrc.number);
        self.srqns.release(xrc.number);
        self.release_xrcd(xrc.xrcd);
        if let Ok(cq) = self.cqs.get_mut(xrc.cq) {
            cq.remove_user();
        }
    }

    pub(super) fn release_xrcd(&mut self, xrcd: XrcdId) {
        if let Ok(xrcd) = self.xrcds.get_mut(xrcd) {
            xrcd.users -= 1;
        }
    }

    /// Returns the CQ of an XRC SRQ.
    pub(super) fn xrc_cq(&self, srq: SrqId) -> Option<CqId> {
        Some(self.srqs.get(srq).ok()?.xrc?.cq)
    }

    /// Returns the queue with this number if it belongs to this domain.
    fn xrc_srq(&self, xrcd: XrcdId, number: u32) -> Option<(SrqId, PdId)> {
        let id = *self.by_srqn.get(&number)?;
        let srq: &Srq = self.srqs.get(id).ok()?;
        (srq.xrc?.xrcd == xrcd).then_some((id, srq.pd))
    }

    /// Passes a verified packet to an extended connection. This will return `None` if it is not
    /// accepted.
    pub(super) fn hand_over_xrc(&mut self, id: QpId, packet: &Packet<'_>) -> Option<RxOutcome> {
        let now = self.now;
        let qp = self.qps.get(id).ok()?;
        // Requests must be sent to a target, and responses to an initiator.
        if packet.op.is_request() != (qp.qp_type == QpType::XrcTgt) {
            self.counters.rx_unknown_qp += 1;
            return None;
        }
        let number = packet.ext.xrc.map(|eth| eth.srqn());
        let named = number.zip(qp.xrcd);
        let named = named.and_then(|(number, xrcd)| self.xrc_srq(xrcd, number));
        let qp = self.qps.get_mut(id).ok()?;
        let Machine::Xrc(rc) = &mut qp.machine else {
            return None;
        };
        // A message always uses the queue that its receive was taken from. We only need to check
        // the next expected request: if it has already been received, the response is sent again
        // regardless of the queue number.
        let mut is_refused = false;
        match named {
            Some((srq, pd)) if !rc.has_receive() || qp.srq == Some(srq) => {
                qp.srq = Some(srq);
                rc.set_domain(pd);
            }
            _ => is_refused = packet.op.is_request() && rc.expects(packet.bth.psn()),
        }
        with_env!(self, qp, env);
        let mut is_first = qp.awaits_first_packet;
        if let Machine::Xrc(rc) = &mut qp.machine {
            if is_refused {
                rc.refuse_expected(now, &mut env);
            } else {
                rc.handle_packet(now, packet, &mut env);
            }
            is_first &= rc.has_received();
        }
        qp.awaits_first_packet &= !is_first;
        // Its events must be assigned to the queue specified by this packet.
        self.finish_turn(id);
        Some(RxOutcome {
            is_peer: true,
            is_first,
        })
    }
}
