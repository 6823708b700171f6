//! Post and poll: the data path.
//!
//! We pass a slot number of our table to the library to identify a request. Requests in a queue
//! complete in order, so a completion also indicates that all previous unsignaled requests are
//! complete. On iWARP adapters, READs have a separate order.

use std::net::IpAddr;
use std::ptr;

use riser_rdma_core_sys::bindings::*;
use riser_rdma_core_sys::ops;

use super::context::RdmaCoreDevice;
use super::convert;
use super::objects::{Scratch, Slot, SlotId, SlotQueue, Times, pack, unpack};
use crate::rc::recv_queue::message_len;
use crate::rc::send_queue::check_shape;
use crate::verbs::*;

/// Minimum length of unsignaled requests that siw sends without a copy (a page).
const SIW_IN_PLACE: u32 = 4096;

/// Invalid QP handle, because generations start at 1.
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

/// Returns whether siw would send this request from the caller's memory. TCP then reads the memory
/// after subsequent requests have completed, possibly as late as the peer, and the caller may already
/// have overwritten it. siw copies the data of signaled requests.
fn is_sent_in_place(
    attr: &DeviceAttr,
    init: &QpInitAttr,
    wr: &SendWr<'_>,
) -> Result<bool, PostReason> {
    Ok(attr.registered_reads
        && !init.sq_sig_all
        && !wr.flags.contains(SendFlags::SIGNALED)
        && matches!(wr.op.wc_opcode(), WcOpcode::Send | WcOpcode::Write)
        && message_len(wr.sges)? >= SIW_IN_PLACE)
}

impl RdmaCoreDevice {
    pub(super) fn post_requests(&mut self, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), PostError> {
        let mut done = 0;
        loop {
            let rest = &wrs[done..];
            let at = rest.iter().position(|wr| self.regions.is_call(&wr.op));
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

    /// Binds a type 1 window. The library uses a separate function for this instead of a work
    /// request, and always sets the next key.
    fn bind_type_1(&mut self, qp: QpId, wr: &SendWr<'_>) -> Result<(), PostReason> {
        let entry = self.qps.get(qp).map_err(|_| PostReason::InvalidHandle)?;
        if !entry.init.qp_type.has_operation(&wr.op) {
            return Err(PostReason::InvalidOpcode);
        }
        let (SendOp::BindMw(bind), [], None) = (wr.op, wr.sges, wr.inline) else {
            return Err(PostReason::InvalidRequest("bind request with data"));
        };
        let queue = entry.ptr;
        let window = self.regions.mw_ptr(bind.mw)?;
        // SAFETY: the window is alive and only used by this thread.
        if unsafe { RKey((*window).rkey).next() } != bind.key {
            return Err(PostReason::InvalidKey);
        }
        let mut theirs = ibv_mw_bind {
            send_flags: convert::send_flags(wr),
            bind_info: match bind.length {
                0 => self.regions.user_unbind(&bind)?,
                _ => self.regions.user_bind(&bind)?.bind_info,
            },
            wr_id: 0,
        };
        let slot = Slot {
            wr_id: wr.wr_id,
            opcode: WcOpcode::BindMw,
            queue: SlotQueue::Send(qp),
            is_quiet: false,
        };
        let slot = self.slots.insert(slot).map_err(|_| PostReason::QueueFull)?;
        theirs.wr_id = pack(slot.0);
        // SAFETY: the QP, window and region are alive.
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

    /// Posts requests that can be passed to the library as a list.
    fn post_list(&mut self, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), PostError> {
        let entry = self.qps.get(qp).map_err(|_| PostError {
            index: 0,
            reason: PostReason::InvalidHandle,
        })?;
        if wrs.is_empty() {
            return Ok(());
        }
        let (ptr, init) = (entry.ptr, entry.init);
        // Take this because we need `self` to build the list. It is put back afterwards to reuse
        // the memory.
        let mut scratch = std::mem::take(&mut self.scratch);
        // As in ibv_post_send(3), all requests before an invalid request are still posted.
        let refused = self.build_sends(qp, &init, wrs, &mut scratch).err();
        let mut result = refused.map_or(Ok(()), Err);
        if !scratch.sends.is_empty() {
            let mut bad = ptr::null_mut();
            let first = scratch.sends.as_mut_ptr();
            // SAFETY: the QP is alive. The chain and its scatter lists are stored in `scratch`.
            let r = unsafe { ops::ibv_post_send(ptr, first, &raw mut bad) };
            if r != 0 {
                // If ringing the doorbell fails, the provider may not return a bad request. In this
                // case, the entire chain is in the queue, and can be executed after the next
                // doorbell.
                let all = scratch.sends.len();
                let error = posted_before(place_in(&scratch.sends, bad), all, r);
                result = Err(self.post_error(qp, error));
            }
        }
        let posted = result.err().map_or(wrs.len(), |e| e.index);
        // Requests that were not posted don't complete, so we need to release their slots here.
        for slot in scratch.slots.drain(posted.min(scratch.slots.len())..) {
            let _ = self.slots.remove(slot);
        }
        if let Ok(entry) = self.qps.get_mut(qp) {
            entry.sent.extend(scratch.slots.iter());
        }
        // Only requests that have been posted affect the state of windows.
        for wr in &wrs[..posted] {
            self.regions.on_posted(&wr.op);
        }
        self.scratch = scratch;
        result
    }

    /// The library returns "invalid" if requests can't be posted in the current state. We return
    /// the state as well.
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

    /// Builds the chain up to the first invalid request. The error contains the index of this
    /// request.
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
        // We need to complete both lists before setting any pointers, since a list can be
        // reallocated when it grows.
        for wr in &mut scratch.sends {
            wr.sg_list = sge;
            sge = sge.wrapping_add(wr.num_sge as usize);
        }
        // Start at the end, so that each request can point to the next.
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
        let is_quiet = is_sent_in_place(&self.attr, init, wr)?;
        // Create the slot last, so that we don't leak it if there is an error.
        let slot = Slot {
            wr_id: wr.wr_id,
            opcode: wr.op.wc_opcode(),
            queue: SlotQueue::Send(qp),
            is_quiet,
        };
        let slot = self.slots.insert(slot).map_err(|_| PostReason::QueueFull)?;
        scratch.slots.push(slot);
        scratch.sends.push(ibv_send_wr {
            wr_id: pack(slot.0),
            num_sge: (scratch.sges.len() - before) as i32,
            send_flags: match is_quiet {
                true => convert::send_flags(wr) | IBV_SEND_SIGNALED,
                false => convert::send_flags(wr),
            },
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
        // We check this here since the library returns the same errno for different errors.
        if wr.sges.len() > init.cap.max_send_sge.max(1) as usize {
            return Err(PostReason::TooManySges);
        }
        if let Some(data) = wr.inline {
            if data.len() > init.cap.max_inline as usize {
                return Err(PostReason::InvalidInline);
            }
            // The data is copied by the library before the post returns, and the key is ignored.
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

    /// Converts a request, except for its scatter list.
    fn send_wr(&self, init: &QpInitAttr, wr: &SendWr<'_>) -> Result<ibv_send_wr, PostReason> {
        let mut out = ibv_send_wr::default();
        // Check this here, because the error returned by the library for an unsupported operation
        // depends on the device.
        if !init.qp_type.has_operation(&wr.op) {
            return Err(PostReason::InvalidOpcode);
        }
        // Most libraries don't check the rest either. They would read into inline data, and some of
        // them calculate the message size using 32 bits.
        check_shape(wr)?;
        if matches!(init.qp_type, QpType::Ud | QpType::Gsi) {
            return self.datagram(wr, init.pd, out);
        }
        if init.qp_type == QpType::XrcIni && !wr.op.is_local() {
            let number = wr.remote_srqn.filter(|number| *number <= 0x00ff_ffff);
            out.qp_type.xrc.remote_srqn = number.ok_or(PostReason::InvalidRequest(
                "number of a shared receive queue",
            ))?;
        }
        // Immediate data is in network byte order, but keys to invalidate use host byte order
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
                // The library of siw reads the key from here. A SEND does not use this field.
                out.wr = rdma(RemoteAddr { addr: 0, rkey: key });
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
                out.__bindgen_anon_2.bind_mw = self.regions.bind(mr, key, access)?;
            }
            SendOp::BindMw(bind) => {
                out.opcode = IBV_WR_BIND_MW;
                out.__bindgen_anon_2.bind_mw = self.regions.user_bind(&bind)?;
            }
        }
        Ok(out)
    }

    fn datagram(
        &self,
        wr: &SendWr<'_>,
        pd: PdId,
        mut out: ibv_send_wr,
    ) -> Result<ibv_send_wr, PostReason> {
        let dest = wr
            .ud
            .ok_or(PostReason::InvalidRequest("datagram without a destination"))?;
        // Some libraries copy the address without checking the domain of the handle.
        let ah = self.ahs.get(dest.ah).ok().filter(|ah| ah.pd == pd);
        let ah = ah.ok_or(PostReason::InvalidKey)?.ptr;
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
            // SAFETY: the QP is alive. The chain is stored in the scratch buffer.
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
                // SAFETY: the shared queue is alive. The chain is stored in the scratch buffer.
                unsafe { ops::ibv_post_srq_recv(ptr, first, bad) }
            });
        if let Ok(entry) = self.srqs.get_mut(srq) {
            entry.posted.extend(scratch.slots.iter());
        }
        self.scratch = scratch;
        result
    }

    /// Builds and posts a chain of receives. `scratch.slots` contains all receives that have been
    /// posted.
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
        let mut refused = None;
        for wr in wrs {
            let slot = Slot {
                wr_id: wr.wr_id,
                opcode: WcOpcode::Recv,
                queue,
                is_quiet: false,
            };
            let slot = message_len(wr.sges)
                .and_then(|_| self.slots.insert(slot).map_err(|_| PostReason::QueueFull));
            let slot = match slot {
                Ok(slot) => slot,
                Err(reason) => {
                    refused = Some(reason);
                    break;
                }
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
        // We need to complete both lists before setting any pointers, because a list can be
        // reallocated when it grows.
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
            0
        } else {
            post(first, &raw mut bad)
        };
        let error = if r != 0 {
            Some(posted_before(place_in(&scratch.recvs, bad), 0, r))
        } else {
            let index = scratch.slots.len();
            refused.map(|reason| PostError { index, reason })
        };
        let posted = error.map_or(wrs.len(), |e| e.index);
        // Like for sends, requests that were not posted don't complete.
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
            let entry = self.cqs.table.get_mut(cq)?;
            if entry.overrun {
                return Err(VerbsError::CqOverrun);
            }
            // Completions we have already removed from the library are older than those still in
            // its queue.
            let Some((wc, times)) = entry.next() else {
                if entry.pull(max - count)? == 0 {
                    break;
                }
                continue;
            };
            self.cqs.notices.note_completions();
            if let Some(completion) = self.completion(&wc) {
                take(self, completion, times);
                count += 1;
            }
        }
        Ok(count)
    }

    /// Converts a completion. This will return `None` if the QP, and therefore the request, has
    /// been destroyed, or if the caller didn't signal the request.
    fn completion(&mut self, wc: &ibv_wc) -> Option<Completion> {
        let id = SlotId(unpack(wc.wr_id));
        let slot = self.slots.remove(id).ok()?;
        let qp = match slot.queue {
            SlotQueue::Send(qp) => {
                self.retire(qp, id, slot.opcode);
                qp
            }
            SlotQueue::Recv(qp) => {
                // A receive queue completes in order, so this is the first one unless there is a
                // library bug.
                let received = &mut self.qps.get_mut(qp).ok()?.received;
                if received.front() == Some(&id) {
                    received.pop_front();
                } else {
                    received.retain(|s| *s != id);
                }
                qp
            }
            SlotQueue::Shared(srq) | SlotQueue::Orphaned(srq) => {
                if let Ok(srq) = self.srqs.get_mut(srq)
                    && let Some(at) = srq.posted.iter().position(|s| *s == id)
                {
                    srq.posted.swap_remove(at);
                }
                // A receive from a shared queue is returned to the owner even if the QP has been
                // destroyed.
                match slot.queue {
                    SlotQueue::Orphaned(_) => GONE,
                    _ => self.qpns.get(&wc.qp_num).copied().unwrap_or(GONE),
                }
            }
        };
        // If the request has failed, only the number, status and QP are valid (ibv_poll_cq(3)).
        let ok = wc.status == IBV_WC_SUCCESS;
        if ok && slot.is_quiet {
            return None;
        }
        let has = |flag| ok && wc.wc_flags & flag != 0;
        // SAFETY: both union fields are plain 32-bit numbers. The flags indicate which one to use.
        let (imm, key) = unsafe {
            (
                wc.__bindgen_anon_1.imm_data,
                wc.__bindgen_anon_1.invalidated_rkey,
            )
        };
        let imm = has(IBV_WC_WITH_IMM).then_some(u32::from_be(imm));
        let invalidated = has(IBV_WC_WITH_INV).then_some(RKey(key));
        if let Some(key) = invalidated {
            self.regions.on_invalidated(key);
        }
        // We use the device address to determine the address family, because the bytes before the
        // receive are ambiguous.
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

    /// Removes all unsignaled requests before this completion, since they must be complete as well.
    fn retire(&mut self, qp: QpId, completed: SlotId, opcode: WcOpcode) {
        let Ok(entry) = self.qps.get_mut(qp) else {
            return;
        };
        // Only iWARP adapters set this.
        if self.attr.registered_reads {
            // siw completes a SEND or WRITE before previously posted READs, which complete in order
            // with each other.
            let slots = &mut self.slots;
            let is_read = |opcode| opcode == WcOpcode::Read;
            let mut is_before = true;
            entry.sent.retain(|&slot| {
                if slot == completed {
                    is_before = false;
                    return false;
                }
                let is_done = is_before
                    && slots
                        .get(slot)
                        .is_ok_and(|slot| is_read(slot.opcode) == is_read(opcode));
                if is_done {
                    let _ = slots.remove(slot);
                }
                !is_done
            });
            return;
        }
        while let Some(slot) = entry.sent.pop_front() {
            if slot == completed {
                return;
            }
            let _ = self.slots.remove(slot);
        }
    }
}

/// Returns the index of the bad request returned by the library, or `None` if it is not in the
/// chain.
fn place_in<T>(chain: &[T], bad: *const T) -> Option<usize> {
    chain.iter().position(|wr| ptr::eq(wr, bad))
}

/// Returns the error for a chain which was posted up to the request `at`, or up to `unnamed` if the
/// library didn't return a bad request.
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

    fn poll_ids(device: &mut RdmaCoreDevice, cq: CqId) -> Vec<u64> {
        let mut out = Vec::new();
        device.poll_cq(cq, BATCH, &mut out).unwrap();
        out.iter().map(|completion| completion.wr_id.0).collect()
    }

    /// Requests accepted by the library complete once, and the caller can post the remaining
    /// requests again.
    #[test]
    fn failing_list_is_partially_posted() {
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
        assert_eq!(poll_ids(&mut device, cq), [1, 3]);
        assert_eq!(device.slots.len(), 1, "the last is not signaled");
    }

    /// siw completes a SEND while the READs before it wait for data of the peer.
    #[test]
    fn iwarp_send_does_not_retire_reads() {
        let mut device = RdmaCoreDevice::fake();
        device.attr.registered_reads = true;
        let (cq, qp) = device.fake_queues();
        let remote = RemoteAddr {
            addr: 0,
            rkey: RKey(1),
        };
        let (quiet, signaled) = (SendFlags::empty(), SendFlags::SIGNALED);
        let list = [
            SendWr::new(0, SendOp::Read(remote), &[]).flags(quiet),
            SendWr::new(1, SendOp::Read(remote), &[]).flags(signaled),
            write(2, quiet),
            SendWr::new(3, SendOp::Send, &[]).flags(signaled),
        ];
        device.post_send(qp, &list).unwrap();
        let posted = library(|library| library.posted.clone());
        device.fake_completion(cq, posted[3]);
        assert_eq!(poll_ids(&mut device, cq), [3]);
        assert_eq!(device.slots.len(), 2, "the WRITE is complete as well");
        device.fake_completion(cq, posted[1]);
        assert_eq!(poll_ids(&mut device, cq), [1]);
        assert_eq!(device.slots.len(), 0);
    }

    #[test]
    fn iwarp_signals_large_writes_silently() {
        let mut device = RdmaCoreDevice::fake();
        device.attr.registered_reads = true;
        let (cq, qp) = device.fake_queues();
        let lkey = LKey(1);
        let sges = [4095, 4096].map(|length| Sge {
            addr: 0,
            length,
            lkey,
        });
        let list = [0, 1, 1].map(|at| SendWr {
            sges: &sges[at..=at],
            ..write(at as u64, SendFlags::empty())
        });
        device.post_send(qp, &list).unwrap();
        assert_eq!(library(|l| l.signaled.clone()), [false, true, true]);
        let posted = library(|library| library.posted.clone());
        device.fake_completion(cq, posted[1]);
        assert_eq!(poll_ids(&mut device, cq), [0; 0]);
        assert_eq!(device.slots.len(), 1, "the first is complete as well");
        // Failures are reported as for any unsignaled request.
        let failure = ibv_wc {
            status: IBV_WC_WR_FLUSH_ERR,
            ..completion(posted[2])
        };
        device.fake_end(cq, failure);
        assert_eq!(poll_ids(&mut device, cq), [1]);
        assert_eq!(device.slots.len(), 0);
    }

    /// All requests of this queue pair are signaled without a flag.
    #[test]
    fn iwarp_reports_large_write_of_signaling_qp() {
        let mut device = RdmaCoreDevice::fake();
        device.attr.registered_reads = true;
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(8).unwrap();
        let init = QpInitAttr {
            sq_sig_all: true,
            ..QpInitAttr::new(pd, cq, QpType::Rc, QpCap::new(8, 8))
        };
        let qp = device.create_qp(&init).unwrap();
        let sges = [Sge {
            addr: 0,
            length: SIW_IN_PLACE,
            lkey: LKey(1),
        }];
        let wr = SendWr {
            sges: &sges,
            ..write(7, SendFlags::empty())
        };
        device.post_send(qp, &[wr]).unwrap();
        let posted = library(|library| library.posted.clone());
        device.fake_completion(cq, posted[0]);
        assert_eq!(poll_ids(&mut device, cq), [7]);
    }

    #[test]
    fn failing_receive_list_is_partially_posted() {
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
        assert_eq!(poll_ids(&mut device, cq), [10, 11, 12, 13]);
        assert_eq!(device.slots.len(), 0);
    }

    #[test]
    fn uc_qp_rejects_unsupported_operations() {
        let mut device = RdmaCoreDevice::fake();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(8).unwrap();
        let init = QpInitAttr::new(pd, cq, QpType::Uc, QpCap::new(8, 8));
        let qp = device.create_qp(&init).unwrap();
        // SAFETY: the QP is alive.
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

    /// The library of siw ignores the documented field.
    #[test]
    fn key_to_invalidate_is_in_both_fields() {
        let mut device = RdmaCoreDevice::fake();
        let (_, qp) = device.fake_queues();
        let init = device.qps.get(qp).unwrap().init;
        let wr = SendWr::new(1, SendOp::SendInv(RKey(7)), &[]);
        let out = device.send_wr(&init, &wr).unwrap();
        // SAFETY: both are plain numbers.
        let keys = unsafe { (out.__bindgen_anon_1.invalidate_rkey, out.wr.rdma.rkey) };
        assert_eq!(keys, (7, 7));
    }

    #[test]
    fn local_operation_needs_no_remote_queue() {
        let mut device = RdmaCoreDevice::fake();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(8).unwrap();
        let init = QpInitAttr::new(pd, cq, QpType::XrcIni, QpCap::new(8, 0));
        let qp = device.create_qp(&init).unwrap();
        let local = SendWr::new(1, SendOp::LocalInv(RKey(1)), &[]);
        device.post_send(qp, &[local]).unwrap();
        device
            .post_send(qp, &[SendWr::new(2, SendOp::Send, &[])])
            .unwrap_err();
    }

    #[test]
    fn address_handle_requires_same_domain() {
        let mut device = RdmaCoreDevice::fake();
        let [pd, other] = [(); 2].map(|()| device.alloc_pd().unwrap());
        let cq = device.create_cq(8).unwrap();
        let init = QpInitAttr::new(pd, cq, QpType::Ud, QpCap::new(8, 8));
        let qp = device.create_qp(&init).unwrap();
        let attr = AhAttr::new(Gid::from(IpAddr::from([10, 0, 0, 2])));
        let [ours, theirs] = [pd, other].map(|pd| device.create_ah(pd, attr).unwrap());
        let send = |ah| SendWr {
            ud: Some(UdDest {
                ah,
                qpn: 7,
                qkey: QKey(1),
            }),
            ..SendWr::new(1, SendOp::Send, &[])
        };
        let error = device.post_send(qp, &[send(theirs)]).unwrap_err();
        assert_eq!(error.reason, PostReason::InvalidKey);
        device.post_send(qp, &[send(ours)]).unwrap();
    }

    /// They would be executed with other memory than the caller has passed.
    #[test]
    fn invalid_requests_are_rejected_when_posted() {
        let mut device = RdmaCoreDevice::fake();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(8).unwrap();
        let cap = QpCap {
            max_send_sge: 2,
            max_inline: 16,
            ..QpCap::new(8, 8)
        };
        device.attr.max_inline = 16;
        let init = QpInitAttr::new(pd, cq, QpType::Rc, cap);
        let qp = device.create_qp(&init).unwrap();
        let remote = |addr| RemoteAddr {
            addr,
            rkey: RKey(1),
        };
        let sge = |length| Sge {
            addr: 0,
            length,
            lkey: LKey(1),
        };
        let add = |addr| SendOp::FetchAdd {
            remote: remote(addr),
            add: 1,
        };
        let (eight, huge) = ([sge(8)], [sge(1 << 31); 2]);
        let refused = [
            SendWr::with_inline(0, SendOp::Read(remote(8)), &[0; 8]),
            SendWr::with_inline(0, add(8), &[0; 8]),
            SendWr::with_inline(0, SendOp::LocalInv(RKey(1)), &[]),
            SendWr::new(0, SendOp::LocalInv(RKey(1)), &eight),
            SendWr::new(0, add(4), &eight),
            SendWr::new(0, add(8), &[]),
            // The sum wraps to zero in 32 bits.
            SendWr::new(0, SendOp::Write(remote(8)), &huge),
        ];
        for wr in refused {
            let posted = device.post_send(qp, &[wr]);
            assert!(posted.is_err(), "{:?}", wr.op);
        }
        assert_eq!(library(|library| library.posted.len()), 0);
        device
            .post_send(qp, &[SendWr::new(0, add(8), &eight)])
            .unwrap();
        let oversized = RecvWr {
            sges: &huge,
            ..receive(2)
        };
        let error = device.post_recv(qp, &[receive(1), oversized]).unwrap_err();
        assert_eq!((error.index, error.reason), (1, PostReason::MessageTooLong));
        assert_eq!(library(|library| library.posted.len()), 2);
    }

    #[test]
    fn failed_completion_has_no_stale_fields() {
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
    fn oversized_poll_result_overruns_queue() {
        let mut device = RdmaCoreDevice::fake();
        let (cq, _) = device.fake_queues();
        library(|library| library.is_overlong = true);
        let polled = device.poll_cq(cq, 4, &mut Vec::new());
        assert_eq!(polled, Err(VerbsError::CqOverrun));
        assert_eq!(device.peek_cq(cq, 4), Ok(0));
    }

    #[test]
    fn unknown_bad_request_has_no_index() {
        let chain = [7; 3];
        let at = |place: *const i32| place_in(&chain, place);
        assert_eq!(at(&raw const chain[2]), Some(2));
        assert_eq!(at(chain.as_ptr().wrapping_add(9)), None);
        assert_eq!(at(ptr::null()), None);
    }

    #[test]
    fn missing_bad_request_counts_as_posted() {
        let index = |at| posted_before(at, 3, libc::EINVAL).index;
        assert_eq!((index(None), index(Some(1)), index(Some(0))), (3, 1, 0));
    }
}
