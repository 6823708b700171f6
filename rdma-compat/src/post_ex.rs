//! Work requests that programs build using function calls (`ibv_wr_post(3)`).
//!
//! A batch starts with `wr_start`. After that, a thread owns the queue pair until `wr_complete`
//! posts either all or none of the requests, or `wr_abort` drops them. The calls in between do not
//! return anything, so the first error is returned by `wr_complete`.

use std::ffi::{c_int, c_uint, c_void};
use std::slice;

use riser_rdma_core_sys::bindings::*;
use riser_transport::rdma_core::convert::send_flags_of;
use riser_transport::verbs::{
    LKey, PostError, QKey, RKey, RemoteAddr, SendOp, Sge, UdDest, Verbs as _, WrId,
};

use crate::address::Ah;
use crate::builder::{Batch, Builder, Data, Request};
use crate::context::{check_same, context_of};
use crate::domain::{Pd, Xrcd};
use crate::errno::{Errno, number, pointer};
use crate::object::Ref;
use crate::post::CHAIN;
use crate::qp::{Qp, create_qp_by, create_xrc_target, extra_attr, plain_attr};
use crate::sges::read_sges;
use crate::window::binding;

/// Maximum number of pieces of inline data in a process.
const MOST_PIECES: usize = isize::MAX as usize / size_of::<ibv_data_buf>();

/// `ibv_create_qp_ex(3)`.
pub(crate) unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    pointer(unsafe { context_of(context) }.and_then(|context| {
        // SAFETY: as above.
        let attr = unsafe { attr.as_mut() }.ok_or(Errno::INVALID)?;
        let extra = extra_attr(attr)?;
        if attr.qp_type == IBV_QPT_XRC_RECV {
            if attr.comp_mask & IBV_QP_INIT_ATTR_XRCD == 0 {
                return Err(Errno::INVALID);
            }
            // SAFETY: as above.
            let xrcd = unsafe { Ref::<Xrcd>::get(attr.xrcd) }?;
            check_same(context, xrcd.context)?;
            let mut plain = plain_attr(attr);
            let qp = create_xrc_target(xrcd, &mut plain, |nic, init| Ok(nic.create_qp(init)?))?;
            attr.cap = plain.cap;
            return Ok(qp.handle());
        }
        if attr.comp_mask & IBV_QP_INIT_ATTR_PD == 0 {
            return Err(Errno::INVALID);
        }
        // SAFETY: as above.
        let pd = unsafe { Ref::<Pd>::get(attr.pd) }?;
        if pd.context != context {
            return Err(Errno::INVALID);
        }
        let mut plain = plain_attr(attr);
        let qp = create_qp_by(pd, &mut plain, extra, |nic, init| Ok(nic.create_qp(init)?))?;
        attr.cap = plain.cap;
        set_calls(qp);
        Ok(qp.handle())
    }))
}

/// Sets the functions that build requests, if the queue pair was created for them.
pub(crate) fn set_calls(qp: Ref<Qp>) {
    if qp.builder.is_none() {
        return;
    }
    // SAFETY: the queue pair is alive, and the program has no access to it yet.
    let qp = unsafe { &mut *qp.c() };
    qp.wr_atomic_cmp_swp = Some(wr_atomic_cmp_swp);
    qp.wr_atomic_fetch_add = Some(wr_atomic_fetch_add);
    qp.wr_bind_mw = Some(wr_bind_mw);
    qp.wr_local_inv = Some(wr_local_inv);
    qp.wr_rdma_read = Some(wr_rdma_read);
    qp.wr_rdma_write = Some(wr_rdma_write);
    qp.wr_rdma_write_imm = Some(wr_rdma_write_imm);
    qp.wr_send = Some(wr_send);
    qp.wr_send_imm = Some(wr_send_imm);
    qp.wr_send_inv = Some(wr_send_inv);
    qp.wr_send_tso = Some(wr_send_tso);
    qp.wr_set_ud_addr = Some(wr_set_ud_addr);
    qp.wr_set_xrc_srqn = Some(wr_set_xrc_srqn);
    qp.wr_set_inline_data = Some(wr_set_inline_data);
    qp.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    qp.wr_set_sge = Some(wr_set_sge);
    qp.wr_set_sge_list = Some(wr_set_sge_list);
    qp.wr_start = Some(wr_start);
    qp.wr_complete = Some(wr_complete);
    qp.wr_abort = Some(wr_abort);
    qp.wr_atomic_write = Some(wr_atomic_write);
}

/// `ibv_wr_start`: starts a batch.
unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    let Ok(qp) = (unsafe { Ref::<Qp>::get(qp.cast()) }) else {
        return;
    };
    if let Some(builder) = &qp.builder {
        let begun = builder.turn.acquire();
        let mut batch = builder.batch();
        match begun {
            Ok(()) => batch.clear(),
            // There is already a batch, which fails.
            Err(errno) => batch.mistake = Some(errno),
        }
    }
}

/// `ibv_wr_complete`: posts the batch.
unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    number(unsafe { Ref::<Qp>::get(qp.cast()) }.and_then(|qp| {
        let builder = qp.builder.as_ref().ok_or(Errno::INVALID)?;
        if !builder.turn.is_taken() {
            return Err(Errno::INVALID);
        }
        let result = {
            let batch = builder.batch();
            batch.mistake.map_or_else(|| post(&qp, &batch), Err)
        };
        builder.turn.release();
        result
    }))
}

/// `ibv_wr_abort`: drops the batch.
unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    if let Ok(qp) = unsafe { Ref::<Qp>::get(qp.cast()) }
        && let Some(builder) = &qp.builder
    {
        builder.turn.release();
    }
}

/// Posts all requests of a batch, or none.
fn post(qp: &Qp, batch: &Batch) -> Result<(), Errno> {
    let mut locked = qp.context.lock();
    let mut posted = 0;
    for requests in batch.requests.chunks(CHAIN) {
        let result = locked.nic.post_send(qp.id, &batch.posts::<CHAIN>(requests));
        if let Err(PostError { index, reason }) = result {
            locked.nic.unpost_send(qp.id, posted + index);
            return Err(reason.into());
        }
        posted += requests.len();
    }
    locked.transmit();
    Ok(())
}

/// Executes a step of building requests. Errors are stored and returned when the batch is
/// completed. If there is no batch, this has no effect, but completing it will return an error.
///
/// # Safety
/// Same as for [`Ref::get`].
unsafe fn build(
    qp: *mut ibv_qp_ex,
    part: impl FnOnce(Ref<Qp>, &Builder, &mut Batch) -> Result<(), Errno>,
) {
    // SAFETY: guaranteed by the caller.
    let Ok(qp) = (unsafe { Ref::<Qp>::get(qp.cast()) }) else {
        return;
    };
    let Some(builder) = qp.builder.as_ref().filter(|b| b.turn.is_taken()) else {
        return;
    };
    let mut batch = builder.batch();
    if batch.mistake.is_none() {
        batch.mistake = part(qp, builder, &mut batch).err();
    }
}

/// Starts a request.
///
/// # Safety
/// Same as for [`Ref::get`].
unsafe fn begin(qp: *mut ibv_qp_ex, required: c_uint, op: SendOp) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        build(qp, |qp, builder, batch| {
            if builder.ops & required == 0 {
                return Err(Errno::INVALID);
            }
            // It could never be posted.
            if batch.requests.len() >= builder.cap.max_send_wr as usize {
                return Err(Errno::NO_MEMORY);
            }
            let c = qp.c();
            batch.requests.push(Request {
                // SAFETY: the queue pair is alive, and the program sets these fields in its own
                // thread.
                wr_id: WrId((*c).wr_id),
                op,
                flags: send_flags_of((*c).wr_flags),
                data: Data::None,
                ud: None,
                remote_srqn: None,
            });
            Ok(())
        });
    }
}

fn remote(addr: u64, rkey: u32) -> RemoteAddr {
    RemoteAddr {
        addr,
        rkey: RKey(rkey),
    }
}

/// Declares functions that start a request.
macro_rules! requests {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $ty:ty),*) $required:ident => $op:expr;)*) => {
        $(
            $(#[$doc])*
            unsafe extern "C" fn $name(qp: *mut ibv_qp_ex $(, $arg: $ty)*) {
                // SAFETY: the program passes a valid pointer, as required by the manual page.
                unsafe { begin(qp, $required, $op) };
            }
        )*
    };
}

requests! {
    /// `ibv_wr_send`.
    wr_send() IBV_QP_EX_WITH_SEND => SendOp::Send;
    /// `ibv_wr_send_imm`.
    wr_send_imm(imm: __be32) IBV_QP_EX_WITH_SEND_WITH_IMM => SendOp::SendImm(u32::from_be(imm));
    /// `ibv_wr_send_inv`.
    wr_send_inv(rkey: u32) IBV_QP_EX_WITH_SEND_WITH_INV => SendOp::SendInv(RKey(rkey));
    /// `ibv_wr_rdma_write`.
    wr_rdma_write(rkey: u32, addr: u64) IBV_QP_EX_WITH_RDMA_WRITE
        => SendOp::Write(remote(addr, rkey));
    /// `ibv_wr_rdma_write_imm`.
    wr_rdma_write_imm(rkey: u32, addr: u64, imm: __be32) IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
        => SendOp::WriteImm(remote(addr, rkey), u32::from_be(imm));
    /// `ibv_wr_rdma_read`.
    wr_rdma_read(rkey: u32, addr: u64) IBV_QP_EX_WITH_RDMA_READ
        => SendOp::Read(remote(addr, rkey));
    /// `ibv_wr_atomic_cmp_swp`.
    wr_atomic_cmp_swp(rkey: u32, addr: u64, compare: u64, swap: u64)
        IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
        => SendOp::CmpSwap { remote: remote(addr, rkey), compare, swap };
    /// `ibv_wr_atomic_fetch_add`.
    wr_atomic_fetch_add(rkey: u32, addr: u64, add: u64) IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
        => SendOp::FetchAdd { remote: remote(addr, rkey), add };
    /// `ibv_wr_local_inv`.
    wr_local_inv(rkey: u32) IBV_QP_EX_WITH_LOCAL_INV => SendOp::LocalInv(RKey(rkey));
}

/// Stores an error for an operation that is not supported by any queue pair.
///
/// # Safety
/// Same as for [`Ref::get`].
unsafe fn refuse(qp: *mut ibv_qp_ex) {
    // SAFETY: guaranteed by the caller.
    unsafe { build(qp, |_, _, _| Err(Errno::INVALID)) };
}

/// `ibv_wr_bind_mw`.
unsafe extern "C" fn wr_bind_mw(
    qp: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    unsafe {
        let bind = Ref::<Qp>::get(qp.cast()).and_then(|ours| {
            let info = info.as_ref().ok_or(Errno::INVALID)?;
            binding(&ours, mw, IBV_MW_TYPE_2, RKey(rkey), info)
        });
        match bind {
            Ok(bind) => begin(qp, IBV_QP_EX_WITH_BIND_MW, SendOp::BindMw(bind)),
            Err(errno) => build(qp, |_, _, _| Err(errno)),
        }
    }
}

/// `ibv_wr_send_tso`.
unsafe extern "C" fn wr_send_tso(
    qp: *mut ibv_qp_ex,
    _header: *mut c_void,
    _length: u16,
    _segment: u16,
) {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    unsafe { refuse(qp) };
}

/// `ibv_wr_atomic_write`.
unsafe extern "C" fn wr_atomic_write(
    qp: *mut ibv_qp_ex,
    _rkey: u32,
    _addr: u64,
    _data: *const c_void,
) {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    unsafe { refuse(qp) };
}

/// `ibv_wr_set_xrc_srqn`: sets the peer's shared receive queue.
unsafe extern "C" fn wr_set_xrc_srqn(qp: *mut ibv_qp_ex, srqn: u32) {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    unsafe {
        build(qp, |qp, _, batch| {
            let request = batch.last()?;
            if !qp.is_xrc || request.remote_srqn.is_some() {
                return Err(Errno::INVALID);
            }
            request.remote_srqn = Some(srqn);
            Ok(())
        });
    }
}

/// `ibv_wr_set_ud_addr`: sets the destination of a datagram.
unsafe extern "C" fn wr_set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, qpn: u32, qkey: u32) {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    unsafe {
        build(qp, |qp, _, batch| {
            let ah = Ref::<Ah>::get(ah)?;
            check_same(qp.context, ah.context)?;
            let ah = ah.id;
            let request = batch.last()?;
            if !qp.is_datagram || request.ud.is_some() {
                return Err(Errno::INVALID);
            }
            let qkey = QKey(qkey);
            request.ud = Some(UdDest { ah, qpn, qkey });
            Ok(())
        });
    }
}

/// `ibv_wr_set_sge`: sets data in a single piece of registered memory.
unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    let sge = Sge {
        addr,
        length,
        lkey: LKey(lkey),
    };
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    unsafe { build(qp, |_, _, batch| set_sges(batch, [sge])) };
}

/// `ibv_wr_set_sge_list`: sets data in multiple pieces of registered memory.
unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    unsafe {
        build(qp, |_, builder, batch| {
            let most = builder.cap.max_send_sge as usize;
            if count > most || list.is_null() && count > 0 {
                return Err(Errno::INVALID);
            }
            set_sges(batch, read_sges(list, count))
        });
    }
}

fn set_sges(batch: &mut Batch, list: impl IntoIterator<Item = Sge>) -> Result<(), Errno> {
    let start = batch.sges.len();
    batch.sges.extend(list);
    batch.set_data(Data::Sges(start..batch.sges.len()))
}

/// `ibv_wr_set_inline_data`: sets data that are copied immediately.
unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    let piece = ibv_data_buf { addr, length };
    // SAFETY: guaranteed by the program.
    unsafe { wr_set_inline_data_list(qp, 1, &raw const piece) };
}

/// `ibv_wr_set_inline_data_list`: sets data in multiple pieces that are copied immediately.
unsafe extern "C" fn wr_set_inline_data_list(
    qp: *mut ibv_qp_ex,
    count: usize,
    list: *const ibv_data_buf,
) {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    unsafe {
        build(qp, |_, builder, batch| {
            let pieces = match count {
                0 => &[],
                _ if list.is_null() || count > MOST_PIECES => return Err(Errno::INVALID),
                _ => slice::from_raw_parts(list, count),
            };
            let start = batch.inline.len();
            for piece in pieces.iter().filter(|piece| piece.length > 0) {
                let length = (batch.inline.len() - start).saturating_add(piece.length);
                if piece.addr.is_null() || length > builder.cap.max_inline as usize {
                    return Err(Errno::INVALID);
                }
                let bytes = slice::from_raw_parts(piece.addr.cast::<u8>(), piece.length);
                batch.inline.extend_from_slice(bytes);
            }
            batch.set_data(Data::Inline(start..batch.inline.len()))
        });
    }
}
