//! Adding queue pairs to the table, and removing them.

use riser_rdma_core_sys::bindings::*;

use super::context::RdmaCoreDevice;
use super::convert;
use super::objects::{Qp, SlotId, SlotQueue, unpack};
use crate::verbs::*;

impl RdmaCoreDevice {
    /// Returns the attributes used to create a QP. They start with the same fields as
    /// `ibv_qp_init_attr`.
    pub(super) fn qp_init(&self, init: &QpInitAttr) -> Result<ibv_qp_init_attr_ex, VerbsError> {
        let qp_type = match init.qp_type {
            QpType::Smi => return Err(VerbsError::Unsupported("queue pair 0")),
            QpType::RawPacket => return Err(VerbsError::Unsupported("raw packets")),
            other => convert::qp_type(other),
        };
        let qp_type = qp_type.ok_or(VerbsError::WrongQpType(
            "queue pair 1 is managed by the kernel",
        ))?;
        let (cap, attr) = (&init.cap, &self.attr);
        for (wanted, most, what) in [
            (cap.max_send_wr, attr.max_qp_wr, "send queue depth"),
            (cap.max_recv_wr, attr.max_qp_wr, "receive queue depth"),
            (cap.max_send_sge, attr.max_sge, "send scatter list"),
            (cap.max_recv_sge, attr.max_sge, "receive scatter list"),
            (cap.max_inline, attr.max_inline, "inline data"),
        ] {
            if wanted > most {
                return Err(VerbsError::InvalidParameter(what));
            }
        }
        let is_target = init.qp_type == QpType::XrcTgt;
        if !is_target && init.xrcd.is_some() {
            return Err(VerbsError::InvalidParameter("XRC domain"));
        }
        // Check this now, so that we don't need to destroy a QP that the library has already
        // created.
        self.qps.check_room()?;
        let mut theirs = ibv_qp_init_attr_ex {
            qp_type,
            sq_sig_all: i32::from(init.sq_sig_all),
            ..Default::default()
        };
        if is_target {
            let xrcd = init.xrcd.ok_or(VerbsError::InvalidHandle("XRC domain"))?;
            theirs.comp_mask = IBV_QP_INIT_ATTR_XRCD;
            theirs.xrcd = self.xrcds.get(xrcd)?.ptr;
            return Ok(theirs);
        }
        theirs.comp_mask = IBV_QP_INIT_ATTR_PD;
        theirs.pd = self.regions.pd_ptr(init.pd)?;
        theirs.send_cq = self.cqs.ptr(init.send_cq)?;
        theirs.recv_cq = self.cqs.ptr(init.recv_cq)?;
        if let Some(srq) = init.srq {
            let srq = self.srqs.get(srq)?;
            if srq.xrc.is_some() || init.qp_type == QpType::XrcIni {
                return Err(VerbsError::InvalidParameter("shared receive queue"));
            }
            theirs.srq = srq.ptr;
        }
        let has_receives = init.srq.is_none() && init.qp_type != QpType::XrcIni;
        theirs.cap = ibv_qp_cap {
            max_send_wr: init.cap.max_send_wr,
            max_recv_wr: if has_receives {
                init.cap.max_recv_wr
            } else {
                0
            },
            max_send_sge: init.cap.max_send_sge.max(1),
            max_recv_sge: init.cap.max_recv_sge.max(1),
            max_inline_data: init.cap.max_inline,
        };
        if init.block_self_mcast {
            theirs.comp_mask |= IBV_QP_INIT_ATTR_CREATE_FLAGS;
            theirs.create_flags = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB;
        }
        Ok(theirs)
    }

    /// Adds a QP created by the library to the table and updates the user counts. [`Self::qp_init`]
    /// must have been called to check that there is space and that all objects are valid.
    pub(super) fn adopt_qp(
        &mut self,
        ptr: *mut ibv_qp,
        init: &QpInitAttr,
        owner: Option<CmId>,
    ) -> Result<QpId, VerbsError> {
        if ptr.is_null() {
            return Err(VerbsError::Os(libc::EIO));
        }
        // SAFETY: the QP has just been created.
        let qpn = unsafe { (*ptr).qp_num };
        let id = self.qps.insert(Qp {
            ptr,
            qpn,
            init: *init,
            rate: RateLimit::default(),
            groups: Vec::new(),
            owner,
            sent: Default::default(),
            received: Default::default(),
        })?;
        self.qpns.insert(qpn, id);
        self.use_parts(init, 1);
        Ok(id)
    }

    /// Updates the user counts of all objects used by a QP. Objects not used by this QP type are
    /// ignored.
    fn use_parts(&mut self, init: &QpInitAttr, change: i32) {
        let count = |users: &mut u32| *users = users.saturating_add_signed(change);
        if let Some(Ok(xrcd)) = init.xrcd.map(|id| self.xrcds.get_mut(id)) {
            count(&mut xrcd.users);
        }
        if init.qp_type == QpType::XrcTgt {
            return;
        }
        self.regions.change_users(init.pd, change);
        for cq in [init.send_cq, init.recv_cq] {
            self.cqs.change_users(cq, change);
        }
        if let Some(Ok(srq)) = init.srq.map(|id| self.srqs.get_mut(id)) {
            count(&mut srq.users);
        }
    }

    pub(super) fn forget_qp(&mut self, id: QpId) {
        self.release_requests(id);
        let Ok(qp) = self.qps.remove(id) else { return };
        self.qpns.remove(&qp.qpn);
        self.use_parts(&qp.init, -1);
    }

    /// Releases the requests of a QP that has been reset or destroyed. If there are still completions
    /// for them, they won't match a slot. Shared receives are returned to the owner, but without the
    /// QP.
    pub(super) fn release_requests(&mut self, qp: QpId) {
        let Ok(entry) = self.qps.get_mut(qp) else {
            return;
        };
        for slot in entry.sent.drain(..).chain(entry.received.drain(..)) {
            let _ = self.slots.remove(slot);
        }
        let (init, qpn) = (entry.init, entry.qpn);
        self.orphan_receives(&init, qpn);
    }
}

impl RdmaCoreDevice {
    /// Marks all shared receives used by a QP that have not been polled yet. Their completions only
    /// contain its number, which is the same after a reset, and which the device can use again for a
    /// new QP if it was destroyed.
    fn orphan_receives(&mut self, init: &QpInitAttr, qpn: u32) {
        let cqs: Vec<CqId> = match init.qp_type {
            QpType::XrcTgt => {
                let xrc = self.srqs.iter().filter_map(|(_, srq)| srq.xrc);
                xrc.filter(|(xrcd, _)| init.xrcd == Some(*xrcd))
                    .map(|(_, cq)| cq)
                    .collect()
            }
            _ => init.srq.map(|_| init.recv_cq).into_iter().collect(),
        };
        for cq in cqs {
            // Remove everything from the library, since the next use of the number could add to its
            // queue. If it has failed, there are no more completions.
            let _ = self.cqs.peek(cq, usize::MAX);
            let Ok(entry) = self.cqs.table.get(cq) else {
                continue;
            };
            let peeked = entry.peeked.borrow();
            for wc in peeked.iter().filter(|wc| wc.qp_num == qpn) {
                if let Ok(slot) = self.slots.get_mut(SlotId(unpack(wc.wr_id)))
                    && let SlotQueue::Shared(srq) = slot.queue
                {
                    slot.queue = SlotQueue::Orphaned(srq);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::{library, receive, write};
    use super::*;

    /// Their memory can be used for other requests after the reset.
    #[test]
    fn reset_discards_requests_and_completions() {
        let mut device = RdmaCoreDevice::fake();
        let (cq, qp) = device.fake_queues();
        for wr_id in 1..=3 {
            let number = device.fake_receive(qp, wr_id);
            if wr_id < 3 {
                device.fake_completion(cq, number);
            }
            // The first completion has already been removed from the library.
            device.peek_cq(cq, 1).unwrap();
        }
        device
            .post_send(qp, &[write(4, SendFlags::empty())])
            .unwrap();
        device.modify_qp(qp, &QpAttr::to(QpState::Reset)).unwrap();
        assert_eq!(device.slots.len(), 0);
        device.fake_message(cq, qp, 5);
        let mut out = Vec::new();
        device.poll_cq(cq, 8, &mut out).unwrap();
        assert_eq!(out.iter().map(|c| c.wr_id.0).collect::<Vec<_>>(), [5]);
    }

    /// Creates a device with a CQ and an SRQ, and returns the attributes of a QP using them.
    fn fake_shared() -> (RdmaCoreDevice, CqId, SrqId, QpInitAttr) {
        let mut device = RdmaCoreDevice::fake();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(8).unwrap();
        let attr = SrqAttr {
            max_wr: 8,
            max_sge: 1,
            limit: 0,
        };
        let srq = device.create_srq(pd, attr).unwrap();
        let mut init = QpInitAttr::new(pd, cq, QpType::Rc, QpCap::new(8, 8));
        init.srq = Some(srq);
        (device, cq, srq, init)
    }

    /// The device can use the number of a destroyed QP again while completions are still in the
    /// queue.
    #[test]
    fn stale_receive_does_not_name_new_qp() {
        let (mut device, cq, srq, init) = fake_shared();
        let old = device.create_qp(&init).unwrap();
        device.post_srq_recv(srq, &[1, 2].map(receive)).unwrap();
        let [first, second] = library(|library| [library.posted[0], library.posted[1]]);
        device.fake_completion(cq, first);
        let number = device.qp_num(old).unwrap();
        device.destroy_qp(old).unwrap();
        let new = device.create_qp(&init).unwrap();
        assert_eq!(device.qp_num(new), Ok(number), "the fake reuses it");
        device.fake_completion(cq, second);
        let mut out = Vec::new();
        device.poll_cq(cq, 8, &mut out).unwrap();
        let found: Vec<_> = out.iter().map(|c| (c.wr_id.0, c.qp == new)).collect();
        assert_eq!(found, [(1, false), (2, true)]);
        assert_eq!(device.slots.len(), 0);
    }

    /// The messages were sent by the previous peer.
    #[test]
    fn stale_receive_does_not_name_reset_qp() {
        let (mut device, cq, srq, init) = fake_shared();
        let qp = device.create_qp(&init).unwrap();
        device.post_srq_recv(srq, &[1, 2].map(receive)).unwrap();
        let [first, second] = library(|library| [library.posted[0], library.posted[1]]);
        device.fake_completion(cq, first);
        device.modify_qp(qp, &QpAttr::to(QpState::Reset)).unwrap();
        device.fake_completion(cq, second);
        let mut out = Vec::new();
        device.poll_cq(cq, 8, &mut out).unwrap();
        let found: Vec<_> = out.iter().map(|c| (c.wr_id.0, c.qp == qp)).collect();
        assert_eq!(found, [(1, false), (2, true)]);
        assert_eq!(device.slots.len(), 0);
    }
}
