//! Post and poll: the data path.
//!
//! A request goes to the library under the number of a slot in our table. Requests of one queue
//! complete in order, so a completion also retires the unsignaled requests before it.

use std::net::IpAddr;
use std::ptr;

use riser_rdma_core_sys::bindings::*;
use riser_rdma_core_sys::ops;

use super::convert;
use super::objects::{
    RdmaCoreDevice, Region, Scratch, Slot, SlotId, SlotQueue, Times, pack, unpack,
};
use crate::verbs::*;

/// Names no queue pair: generations begin at 1.
const GONE: QpId = QpId(Handle::new(0, 0));

fn rdma(remote: RemoteAddr) -> ibv_send_wr__bindgen_ty_2 {
    ibv_send_wr__bindgen_ty_2 {
        rdma: ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
            remote_addr: remote.addr,
            rkey: remote.rkey.0,
        },
    }
}

fn atomic(remote: RemoteAddr, compare_add: u64, swap: u64) -> ibv_send_wr__bindgen_ty_2 {
    ibv_send_wr__bindgen_ty_2 {
        atomic: ibv_send_wr__bindgen_ty_2__bindgen_ty_2 {
            remote_addr: remote.addr,
            compare_add,
            swap,
            rkey: remote.rkey.0,
        },
    }
}

impl RdmaCoreDevice {
    pub(super) fn post_requests(&mut self, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), PostError> {
        let mut done = 0;
        loop {
            let rest = &wrs[done..];
            let at = rest.iter().position(|wr| self.is_call(&wr.op));
            let list = self.post_list(qp, &rest[..at.unwrap_or(rest.len())]);
            list.map_err(|e| PostError {
                index: done + e.index,
                ..e
            })?;
            let Some(at) = at else {
                return Ok(());
            };
            let bound = self.bind_type_1(qp, &rest[at]);
            let index = done + at;
            bound.map_err(|reason| PostError { index, reason })?;
            done = index + 1;
        }
    }

    /// Whether the library has a call for a request, instead of a work request.
    fn is_call(&self, op: &SendOp) -> bool {
        let SendOp::BindMw(bind) = op else {
            return false;
        };
        let window = self.mws.get(bind.mw);
        window.is_ok_and(|window| window.mw_type == MwType::Type1)
    }

    /// Binds a window of type 1, for which the library has a call that is not a work request. It
    /// chooses the next key itself.
    fn bind_type_1(&mut self, qp: QpId, wr: &SendWr<'_>) -> Result<(), PostReason> {
        let entry = self.qps.get(qp).map_err(|_| PostReason::InvalidHandle)?;
        if !entry.init.qp_type.has_operation(&wr.op) {
            return Err(PostReason::InvalidOpcode);
        }
        let (SendOp::BindMw(bind), [], None) = (wr.op, wr.sges, wr.inline) else {
            return Err(PostReason::InvalidRequest("a binding with data"));
        };
        let queue = entry.ptr;
        let window = self
            .mws
            .get(bind.mw)
            .map_err(|_| PostReason::InvalidKey)?
            .ptr;
        // SAFETY: the window is alive, and this thread alone uses it.
        if unsafe { RKey((*window).rkey).next() } != bind.key {
            return Err(PostReason::InvalidKey);
        }
        let mut theirs = ibv_mw_bind {
            send_flags: convert::send_flags(wr),
            bind_info: match bind.length {
                // Takes the range away, for which no region is needed.
                0 => ibv_mw_bind_info::default(),
                _ => self.user_bind(&bind)?.bind_info,
            },
            wr_id: 0,
        };
        let slot = Slot {
            wr_id: wr.wr_id,
            opcode: WcOpcode::BindMw,
            queue: SlotQueue::Send(qp),
        };
        let slot = self.slots.insert(slot).map_err(|_| PostReason::QueueFull)?;
        theirs.wr_id = pack(slot.0);
        // SAFETY: queue pair, window and region are alive.
        let r = unsafe { ops::ibv_bind_mw(queue, window, &raw mut theirs) };
        if r != 0 {
            let _ = self.slots.remove(slot);
            let reason = convert::post_reason(r);
            return Err(self.post_error(qp, PostError { index: 0, reason }).reason);
        }
        if let Ok(entry) = self.qps.get_mut(qp) {
            entry.sent.push_back(slot);
        }
        Ok(())
    }

    /// Posts requests that the library takes in one list.
    fn post_list(&mut self, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), PostError> {
        let entry = self.qps.get(qp).map_err(|_| PostError {
            index: 0,
            reason: PostReason::InvalidHandle,
        })?;
        if wrs.is_empty() {
            return Ok(());
        }
        let (ptr, init) = (entry.ptr, entry.init);
        // Taken out, since building needs `self`; it comes back with its memory.
        let mut scratch = std::mem::take(&mut self.scratch);
        // What precedes a request that cannot be built is posted all the same, as ibv_post_send(3)
        // does.
        let refused = self.build_sends(qp, &init, wrs, &mut scratch).err();
        let mut result = refused.map_or(Ok(()), Err);
        if !scratch.sends.is_empty() {
            let mut bad = ptr::null_mut();
            let first = scratch.sends.as_mut_ptr();
            // SAFETY: the queue pair is alive; the chain and its scatter lists live in `scratch`.
            let r = unsafe { ops::ibv_post_send(ptr, first, &raw mut bad) };
            if r != 0 {
                // A provider whose doorbell fails may name no request: the whole chain is in the
                // queue then, and a later doorbell may carry it out.
                let all = scratch.sends.len();
                let error = posted_before(place_in(&scratch.sends, bad), all, r);
                result = Err(self.post_error(qp, error));
            }
        }
        let posted = result.err().map_or(wrs.len(), |e| e.index);
        // Requests that the library did not take have no completion that would free their slots.
        for slot in scratch.slots.drain(posted.min(scratch.slots.len())..) {
            let _ = self.slots.remove(slot);
        }
        if let Ok(entry) = self.qps.get_mut(qp) {
            entry.sent.extend(scratch.slots.iter());
        }
        // Only what was posted changes the state of windows.
        for wr in &wrs[..posted] {
            self.on_posted(&wr.op);
        }
        self.scratch = scratch;
        result
    }

    /// The library says "invalid" for a queue pair whose state takes no requests; we say which.
    fn post_error(&self, qp: QpId, e: PostError) -> PostError {
        let state = self.query_qp(qp).ok().and_then(|a| a.state);
        let reason = match (e.reason, state) {
            (PostReason::InvalidRequest(_), Some(state))
                if matches!(state, QpState::Reset | QpState::Init | QpState::Rtr) =>
            {
                PostReason::InvalidState(state)
            }
            (reason, _) => reason,
        };
        PostError { reason, ..e }
    }

    /// Builds the chain up to the first request that cannot be built, which the error names.
    fn build_sends(
        &mut self,
        qp: QpId,
        init: &QpInitAttr,
        wrs: &[SendWr<'_>],
        scratch: &mut Scratch,
    ) -> Result<(), PostError> {
        scratch.sges.clear();
        scratch.sends.clear();
        scratch.slots.clear();
        let mut result = Ok(());
        for (index, wr) in wrs.iter().enumerate() {
            if let Err(reason) = self.build_send(qp, init, wr, scratch) {
                result = Err(PostError { index, reason });
                break;
            }
        }
        let mut sge = scratch.sges.as_mut_ptr();
        let mut next: *mut ibv_send_wr = ptr::null_mut();
        // Pointers are set when both lists are complete, since they move as they grow.
        for wr in &mut scratch.sends {
            wr.sg_list = sge;
            sge = sge.wrapping_add(wr.num_sge as usize);
        }
        // From the end, so that each request can name the next.
        for wr in scratch.sends.iter_mut().rev() {
            wr.next = next;
            next = wr;
        }
        result
    }

    fn build_send(
        &mut self,
        qp: QpId,
        init: &QpInitAttr,
        wr: &SendWr<'_>,
        scratch: &mut Scratch,
    ) -> Result<(), PostReason> {
        let theirs = self.send_wr(init, wr)?;
        let before = scratch.sges.len();
        self.push_sges(wr, init, scratch)?;
        // The slot last: what is refused before it leaves none behind.
        let slot = Slot {
            wr_id: wr.wr_id,
            opcode: wr.op.wc_opcode(),
            queue: SlotQueue::Send(qp),
        };
        let slot = self.slots.insert(slot).map_err(|_| PostReason::QueueFull)?;
        scratch.slots.push(slot);
        scratch.sends.push(ibv_send_wr {
            wr_id: pack(slot.0),
            num_sge: (scratch.sges.len() - before) as i32,
            send_flags: convert::send_flags(wr),
            ..theirs
        });
        Ok(())
    }

    fn push_sges(
        &self,
        wr: &SendWr<'_>,
        init: &QpInitAttr,
        scratch: &mut Scratch,
    ) -> Result<(), PostReason> {
        // Checked here, where the reason is known: the library has one errno for several.
        if wr.sges.len() > init.cap.max_send_sge.max(1) as usize {
            return Err(PostReason::TooManySges);
        }
        if let Some(data) = wr.inline {
            if data.len() > init.cap.max_inline as usize || !wr.sges.is_empty() {
                return Err(PostReason::InvalidInline);
            }
            // The library copies them before the post returns, and looks at no key.
            scratch.sges.push(ibv_sge {
                addr: data.as_ptr() as u64,
                length: data.len() as u32,
                lkey: 0,
            });
        }
        scratch.sges.extend(wr.sges.iter().map(|sge| ibv_sge {
            addr: sge.addr,
            length: sge.length,
            lkey: sge.lkey.0,
        }));
        Ok(())
    }

    /// One request in the library's form, without its scatter list.
    fn send_wr(&self, init: &QpInitAttr, wr: &SendWr<'_>) -> Result<ibv_send_wr, PostReason> {
        let mut out = ibv_send_wr::default();
        // Refused by ourselves: what a library answers to a request that the queue pair has not is
        // its own.
        if !init.qp_type.has_operation(&wr.op) {
            return Err(PostReason::InvalidOpcode);
        }
        if matches!(init.qp_type, QpType::Ud | QpType::Gsi) {
            return self.datagram(wr, out);
        }
        if init.qp_type == QpType::XrcIni {
            let number = wr.remote_srqn.filter(|number| *number <= 0x00ff_ffff);
            out.qp_type.xrc.remote_srqn = number.ok_or(PostReason::InvalidRequest(
                "number of a shared receive queue",
            ))?;
        }
        // Immediate data are in network byte order, keys to invalidate in host order
        // (ibv_post_send(3)).
        match wr.op {
            SendOp::Send => out.opcode = IBV_WR_SEND,
            SendOp::SendImm(imm) => {
                out.opcode = IBV_WR_SEND_WITH_IMM;
                out.__bindgen_anon_1.imm_data = imm.to_be();
            }
            SendOp::SendInv(key) => {
                out.opcode = IBV_WR_SEND_WITH_INV;
                out.__bindgen_anon_1.invalidate_rkey = key.0;
            }
            SendOp::Write(remote) => {
                out.opcode = IBV_WR_RDMA_WRITE;
                out.wr = rdma(remote);
            }
            SendOp::WriteImm(remote, imm) => {
                out.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
                out.wr = rdma(remote);
                out.__bindgen_anon_1.imm_data = imm.to_be();
            }
            SendOp::Read(remote) => {
                out.opcode = IBV_WR_RDMA_READ;
                out.wr = rdma(remote);
            }
            SendOp::CmpSwap {
                remote,
                compare,
                swap,
            } => {
                out.opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
                out.wr = atomic(remote, compare, swap);
            }
            SendOp::FetchAdd { remote, add } => {
                out.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD;
                out.wr = atomic(remote, add, 0);
            }
            SendOp::LocalInv(key) => {
                out.opcode = IBV_WR_LOCAL_INV;
                out.__bindgen_anon_1.invalidate_rkey = key.0;
            }
            SendOp::RegMr { mr, key, access } => {
                out.opcode = IBV_WR_BIND_MW;
                out.__bindgen_anon_2.bind_mw = self.bind(mr, key, access)?;
            }
            SendOp::BindMw(bind) => {
                out.opcode = IBV_WR_BIND_MW;
                out.__bindgen_anon_2.bind_mw = self.user_bind(&bind)?;
            }
        }
        Ok(out)
    }

    fn bind(
        &self,
        mr: MrId,
        key: RKey,
        access: Access,
    ) -> Result<ibv_send_wr__bindgen_ty_4__bindgen_ty_1, PostReason> {
        let Ok(Region::Window(w)) = self.regions.get(mr) else {
            return Err(PostReason::InvalidKey);
        };
        let Some((base, segment)) = &w.mapped else {
            return Err(PostReason::InvalidKey);
        };
        let Ok(Region::Plain {
            ptr, mr, memory, ..
        }) = self.regions.get(*base)
        else {
            return Err(PostReason::InvalidKey);
        };
        Ok(ibv_send_wr__bindgen_ty_4__bindgen_ty_1 {
            mw: w.ptr,
            rkey: key.0,
            bind_info: ibv_mw_bind_info {
                mr: *ptr,
                addr: mr.addr + (segment.addr() - memory.addr()),
                length: segment.len() as u64,
                // A window grants what a peer may do; local rights are those of its region.
                mw_access_flags: convert::access_flags(access & Access::REMOTE),
            },
        })
    }

    /// The binding of a window of the user's.
    fn user_bind(
        &self,
        bind: &MwBind,
    ) -> Result<ibv_send_wr__bindgen_ty_4__bindgen_ty_1, PostReason> {
        let invalid = |_| PostReason::InvalidKey;
        let mw = self.mws.get(bind.mw).map_err(invalid)?.ptr;
        let Region::Plain { ptr, access, .. } = self.regions.get(bind.mr).map_err(invalid)? else {
            return Err(PostReason::InvalidKey);
        };
        // The library would bind it: every region has the right there.
        if !access.contains(Access::MW_BIND) {
            return Err(PostReason::InvalidKey);
        }
        let zero_based = match bind.access.contains(Access::ZERO_BASED) {
            true => IBV_ACCESS_ZERO_BASED,
            false => 0,
        };
        Ok(ibv_send_wr__bindgen_ty_4__bindgen_ty_1 {
            mw,
            rkey: bind.key.0,
            bind_info: ibv_mw_bind_info {
                mr: *ptr,
                addr: bind.addr,
                length: bind.length,
                mw_access_flags: convert::access_flags(bind.access) | zero_based,
            },
        })
    }

    fn datagram(&self, wr: &SendWr<'_>, mut out: ibv_send_wr) -> Result<ibv_send_wr, PostReason> {
        let dest = wr.ud.ok_or(PostReason::InvalidRequest(
            "a datagram without a destination",
        ))?;
        let ah = self.ahs.get(dest.ah);
        let ah = ah.map_err(|_| PostReason::InvalidKey)?.ptr;
        out.opcode = match wr.op {
            SendOp::Send => IBV_WR_SEND,
            SendOp::SendImm(imm) => {
                out.__bindgen_anon_1.imm_data = imm.to_be();
                IBV_WR_SEND_WITH_IMM
            }
            _ => return Err(PostReason::InvalidOpcode),
        };
        out.wr.ud = ibv_send_wr__bindgen_ty_2__bindgen_ty_3 {
            ah,
            remote_qpn: dest.qpn,
            remote_qkey: dest.qkey.0,
        };
        Ok(out)
    }

    /// Carries out the effects that a request has as soon as it is in the queue.
    fn on_posted(&mut self, op: &SendOp) {
        match *op {
            SendOp::RegMr { mr, key, access } => {
                if let Ok(Region::Window(w)) = self.regions.get_mut(mr) {
                    // From now on a peer's invalidation finds the window by its new key.
                    self.rkeys.remove(&w.mr.rkey.0);
                    self.rkeys.insert(key.0, mr);
                    w.mr.rkey = key;
                    // The library names the window by its last key when it binds it again.
                    // SAFETY: the window is alive, and this thread alone uses it.
                    unsafe { (*w.ptr).rkey = key.0 };
                    w.access = access;
                    w.valid = true;
                }
            }
            SendOp::BindMw(bind) => {
                if let Ok(mw) = self.mws.get(bind.mw) {
                    // As above.
                    // SAFETY: the window is alive, and this thread alone uses it.
                    unsafe { (*mw.ptr).rkey = bind.key.0 };
                }
            }
            SendOp::LocalInv(key) => self.on_invalidated(key),
            _ => {}
        }
    }

    /// A window's key no longer works.
    fn on_invalidated(&mut self, key: RKey) {
        if let Some(Ok(Region::Window(w))) =
            self.rkeys.get(&key.0).map(|id| self.regions.get_mut(*id))
        {
            w.valid = false;
        }
    }

    pub(super) fn post_receives(&mut self, qp: QpId, wrs: &[RecvWr<'_>]) -> Result<(), PostError> {
        let invalid = |reason| PostError { index: 0, reason };
        let entry = self
            .qps
            .get(qp)
            .map_err(|_| invalid(PostReason::InvalidHandle))?;
        let is_xrc = matches!(entry.init.qp_type, QpType::XrcIni | QpType::XrcTgt);
        if is_xrc || entry.init.srq.is_some() {
            return Err(invalid(PostReason::InvalidOpcode));
        }
        let ptr = entry.ptr;
        let mut scratch = std::mem::take(&mut self.scratch);
        let result = self.post_recv_chain(wrs, SlotQueue::Recv(qp), &mut scratch, |first, bad| {
            // SAFETY: the queue pair is alive; the chain lives in the scratch room.
            unsafe { ops::ibv_post_recv(ptr, first, bad) }
        });
        if let Ok(entry) = self.qps.get_mut(qp) {
            entry.received.extend(scratch.slots.iter());
        }
        self.scratch = scratch;
        result.map_err(|e| self.post_error(qp, e))
    }

    pub(super) fn post_shared(&mut self, srq: SrqId, wrs: &[RecvWr<'_>]) -> Result<(), PostError> {
        let entry = self.srqs.get(srq).map_err(|_| PostError {
            index: 0,
            reason: PostReason::InvalidHandle,
        })?;
        let ptr = entry.ptr;
        let mut scratch = std::mem::take(&mut self.scratch);
        let result =
            self.post_recv_chain(wrs, SlotQueue::Shared(srq), &mut scratch, |first, bad| {
                // SAFETY: the shared queue is alive; the chain lives in the scratch room.
                unsafe { ops::ibv_post_srq_recv(ptr, first, bad) }
            });
        if let Ok(entry) = self.srqs.get_mut(srq) {
            entry.posted.extend(scratch.slots.iter());
        }
        self.scratch = scratch;
        result
    }

    /// Builds and posts a chain of receives; `scratch.slots` names those that were posted.
    fn post_recv_chain(
        &mut self,
        wrs: &[RecvWr<'_>],
        queue: SlotQueue,
        scratch: &mut Scratch,
        post: impl FnOnce(*mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> i32,
    ) -> Result<(), PostError> {
        scratch.sges.clear();
        scratch.recvs.clear();
        scratch.slots.clear();
        if wrs.is_empty() {
            return Ok(());
        }
        for wr in wrs {
            let slot = Slot {
                wr_id: wr.wr_id,
                opcode: WcOpcode::Recv,
                queue,
            };
            let Ok(slot) = self.slots.insert(slot) else {
                break;
            };
            scratch.slots.push(slot);
            let sges = wr.sges.iter();
            scratch.sges.extend(sges.map(|s| ibv_sge {
                addr: s.addr,
                length: s.length,
                lkey: s.lkey.0,
            }));
            scratch.recvs.push(ibv_recv_wr {
                wr_id: pack(slot.0),
                num_sge: wr.sges.len() as i32,
                ..Default::default()
            });
        }
        // Pointers are set when both lists are complete, since they move as they grow.
        let mut sge = scratch.sges.as_mut_ptr();
        for (wr, ours) in scratch.recvs.iter_mut().zip(wrs) {
            wr.sg_list = sge;
            sge = sge.wrapping_add(ours.sges.len());
        }
        let mut next: *mut ibv_recv_wr = ptr::null_mut();
        for wr in scratch.recvs.iter_mut().rev() {
            wr.next = next;
            next = wr;
        }
        let first = scratch.recvs.as_mut_ptr();
        let mut bad = ptr::null_mut();
        let r = if scratch.recvs.is_empty() {
            libc::ENOMEM
        } else {
            post(first, &raw mut bad)
        };
        let error = if r != 0 {
            Some(posted_before(place_in(&scratch.recvs, bad), 0, r))
        } else if scratch.slots.len() < wrs.len() {
            Some(PostError {
                index: scratch.slots.len(),
                reason: PostReason::QueueFull,
            })
        } else {
            None
        };
        let posted = error.map_or(wrs.len(), |e| e.index);
        // As for sends: what was not taken never completes.
        for slot in scratch.slots.drain(posted.min(scratch.slots.len())..) {
            let _ = self.slots.remove(slot);
        }
        error.map_or(Ok(()), Err)
    }

    pub(super) fn poll(
        &mut self,
        cq: CqId,
        max: usize,
        mut take: impl FnMut(&Self, Completion, Times),
    ) -> Result<usize, VerbsError> {
        let mut count = 0;
        while count < max {
            let entry = self.cqs.get_mut(cq)?;
            if entry.overrun {
                return Err(VerbsError::CqOverrun);
            }
            // What a peek took out of the library is older than what is still in it.
            let Some((wc, times)) = entry.next() else {
                if entry.pull(max - count)? == 0 {
                    break;
                }
                continue;
            };
            self.notices.note_completions();
            if let Some(completion) = self.completion(&wc) {
                take(self, completion, times);
                count += 1;
            }
        }
        Ok(count)
    }

    pub(super) fn peek(&self, cq: CqId, max: usize) -> Result<usize, VerbsError> {
        let entry = self.cqs.get(cq)?;
        // The library cannot look without reading, so what was read from the queue is kept for the
        // next poll.
        loop {
            let held = entry.peeked.borrow().len();
            if held >= max || !matches!(entry.pull(max - held), Ok(1..)) {
                let held = entry.peeked.borrow().len();
                return Ok(held.min(max));
            }
        }
    }

    /// Our form of a completion, or `None` where its request went with its queue pair, as those of
    /// its own queues do.
    fn completion(&mut self, wc: &ibv_wc) -> Option<Completion> {
        let id = SlotId(unpack(wc.wr_id));
        let slot = self.slots.remove(id).ok()?;
        let qp = match slot.queue {
            SlotQueue::Send(qp) => {
                self.retire(qp, id);
                qp
            }
            SlotQueue::Recv(qp) => {
                // A receive queue completes in order, so it is the first but for a fault of the
                // library.
                let received = &mut self.qps.get_mut(qp).ok()?.received;
                if received.front() == Some(&id) {
                    received.pop_front();
                } else {
                    received.retain(|s| *s != id);
                }
                qp
            }
            SlotQueue::Shared(srq) => {
                if let Ok(srq) = self.srqs.get_mut(srq)
                    && let Some(at) = srq.posted.iter().position(|s| *s == id)
                {
                    srq.posted.swap_remove(at);
                }
                // A shared receive goes back to its owner although its queue pair is gone.
                self.qpns.get(&wc.qp_num).copied().unwrap_or(GONE)
            }
        };
        // Of a failed request only number, status and queue pair are valid (ibv_poll_cq(3)).
        let ok = wc.status == IBV_WC_SUCCESS;
        let has = |flag| ok && wc.wc_flags & flag != 0;
        // SAFETY: both members of the union are plain 32-bit numbers; the flags say which is meant.
        let (imm, key) = unsafe {
            (
                wc.__bindgen_anon_1.imm_data,
                wc.__bindgen_anon_1.invalidated_rkey,
            )
        };
        let imm = has(IBV_WC_WITH_IMM).then_some(u32::from_be(imm));
        let invalidated = has(IBV_WC_WITH_INV).then_some(RKey(key));
        if let Some(key) = invalidated {
            self.on_invalidated(key);
        }
        // Which of the two it is, the device's address says; bytes before a receive say no more.
        let network = match self.addr {
            IpAddr::V4(_) => NetworkHeader::Ipv4,
            IpAddr::V6(_) => NetworkHeader::Ipv6,
        };
        Some(Completion {
            wr_id: slot.wr_id,
            status: convert::wc_status(wc.status),
            opcode: if ok {
                convert::wc_opcode(wc.opcode, slot.opcode)
            } else {
                slot.opcode
            },
            qp,
            qp_num: wc.qp_num,
            byte_len: wc.byte_len,
            imm,
            invalidated,
            src_qp: wc.src_qp,
            solicited: false,
            network: has(IBV_WC_GRH).then_some(network),
            vendor_err: wc.vendor_err,
        })
    }

    /// Forgets the unsignaled requests that a completion shows to be done.
    fn retire(&mut self, qp: QpId, completed: SlotId) {
        let Ok(entry) = self.qps.get_mut(qp) else {
            return;
        };
        while let Some(slot) = entry.sent.pop_front() {
            if slot == completed {
                return;
            }
            let _ = self.slots.remove(slot);
        }
    }
}

/// Index of the request of a chain that the library names as the first that it did not take; `None`
/// where it names none of them.
fn place_in<T>(chain: &[T], bad: *const T) -> Option<usize> {
    chain.iter().position(|wr| ptr::eq(wr, bad))
}

/// The error of a chain that the library took up to the request `at`; up to `unnamed` where it
/// names none.
fn posted_before(at: Option<usize>, unnamed: usize, errno: i32) -> PostError {
    PostError {
        index: at.unwrap_or(unnamed),
        reason: convert::post_reason(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::super::fake::{completion, library, receive, write};
    use super::super::objects::BATCH;
    use super::*;

    fn taken(device: &mut RdmaCoreDevice, cq: CqId) -> Vec<u64> {
        let mut out = Vec::new();
        device.poll_cq(cq, BATCH, &mut out).unwrap();
        out.iter().map(|completion| completion.wr_id.0).collect()
    }

    /// What the library took completes once, and what it did not take is the caller's to post again.
    #[test]
    fn a_list_that_fails_in_the_middle_is_posted_up_to_there() {
        let mut device = RdmaCoreDevice::fake();
        let (cq, qp) = device.fake_queues();
        let list: Vec<_> = (0..5)
            .map(|n| match n % 2 {
                0 => write(n, SendFlags::empty()),
                _ => write(n, SendFlags::SIGNALED),
            })
            .collect();
        library(|library| library.room = 2);
        let error = device.post_send(qp, &list).unwrap_err();
        assert_eq!((error.index, error.reason), (2, PostReason::QueueFull));
        assert_eq!(device.slots.len(), 2, "as many as may complete");
        library(|library| library.room = usize::MAX);
        device.post_send(qp, &list[error.index..]).unwrap();
        let (posted, lists) = library(|l| (l.posted.clone(), l.lists.clone()));
        assert_eq!(lists, [5, 3], "one call for each list");
        let distinct: std::collections::HashSet<_> = posted.iter().collect();
        assert_eq!((posted.len(), distinct.len()), (5, 5), "each once");
        for signaled in [posted[1], posted[3]] {
            device.fake_completion(cq, signaled);
        }
        assert_eq!(taken(&mut device, cq), [1, 3]);
        assert_eq!(device.slots.len(), 1, "the last is not signaled");
    }

    #[test]
    fn a_list_of_receives_that_fails_in_the_middle_is_posted_up_to_there() {
        let mut device = RdmaCoreDevice::fake();
        let (cq, qp) = device.fake_queues();
        let list: Vec<_> = (10..14).map(receive).collect();
        library(|library| library.room = 3);
        let error = device.post_recv(qp, &list).unwrap_err();
        assert_eq!((error.index, device.slots.len()), (3, 3));
        library(|library| library.room = usize::MAX);
        device.post_recv(qp, &list[error.index..]).unwrap();
        for number in library(|library| library.posted.clone()) {
            device.fake_completion(cq, number);
        }
        assert_eq!(taken(&mut device, cq), [10, 11, 12, 13]);
        assert_eq!(device.slots.len(), 0);
    }

    #[test]
    fn an_unreliable_connection_is_made_as_one_and_posts_what_it_has() {
        let mut device = RdmaCoreDevice::fake();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(8).unwrap();
        let init = QpInitAttr::new(pd, cq, QpType::Uc, QpCap::new(8, 8));
        let qp = device.create_qp(&init).unwrap();
        // SAFETY: the queue pair is alive.
        let made = unsafe { (*device.qps.get(qp).unwrap().ptr).qp_type };
        assert_eq!(made, IBV_QPT_UC);
        let good = write(1, SendFlags::SIGNALED);
        let bad = SendWr {
            op: SendOp::SendInv(RKey(1)),
            ..good
        };
        let error = device.post_send(qp, &[good, bad, good]).unwrap_err();
        assert_eq!((error.index, error.reason), (1, PostReason::InvalidOpcode));
        assert_eq!(library(|library| library.posted.len()), 1);
    }

    #[test]
    fn a_failed_request_has_nothing_of_the_one_before_it() {
        let mut device = RdmaCoreDevice::fake();
        let (cq, qp) = device.fake_queues();
        let [first, second] = [1, 2].map(|n| device.fake_receive(qp, n));
        let received = ibv_wc {
            byte_len: 7,
            src_qp: 9,
            ..completion(first)
        };
        let failed = ibv_wc {
            status: IBV_WC_LOC_PROT_ERR,
            ..completion(second)
        };
        let mut out = Vec::new();
        for wc in [received, failed] {
            device.fake_end(cq, wc);
            device.poll_cq(cq, BATCH, &mut out).unwrap();
        }
        let found: Vec<_> = out.iter().map(|c| (c.byte_len, c.src_qp)).collect();
        assert_eq!(found, [(7, 9), (0, 0)]);
    }

    #[test]
    fn a_poll_that_answers_more_than_there_is_room_for_ends_the_queue() {
        let mut device = RdmaCoreDevice::fake();
        let (cq, _) = device.fake_queues();
        library(|library| library.is_overlong = true);
        let polled = device.poll_cq(cq, 4, &mut Vec::new());
        assert_eq!(polled, Err(VerbsError::CqOverrun));
        assert_eq!(device.peek_cq(cq, 4), Ok(0));
    }

    #[test]
    fn a_request_that_is_none_of_the_chain_is_not_named() {
        let chain = [7; 3];
        let at = |place: *const i32| place_in(&chain, place);
        assert_eq!(at(&raw const chain[2]), Some(2));
        assert_eq!(at(chain.as_ptr().wrapping_add(9)), None);
        assert_eq!(at(ptr::null()), None);
    }

    #[test]
    fn a_chain_without_a_named_request_may_all_be_posted() {
        let index = |at| posted_before(at, 3, libc::EINVAL).index;
        assert_eq!((index(None), index(Some(1)), index(Some(0))), (3, 1, 0));
    }
}
