//! Work requests.

use std::ffi::c_int;
use std::ops::Range;
use std::slice;

use arrayvec::ArrayVec;
use riser_rdma_core_sys::bindings::*;
use riser_transport::rdma_core::convert::send_flags_of;
use riser_transport::verbs::{
    PostError, QKey, RKey, RecvWr, RemoteAddr, SendOp, SendWr, UdDest, Verbs as _, WrId,
};

use crate::address::Ah;
use crate::context::check_same;
use crate::errno::{Errno, number};
use crate::object::Ref;
use crate::qp::{Qp, Srq};
use crate::sges::{Copied, sges};
use crate::window::binding;

/// Number of requests of a chain that are posted at a time.
pub(crate) const CHAIN: usize = 16;

/// Maximum number of bytes of inline data for a part of a chain. They are stored on the stack.
const INLINE: usize = 4096;

/// A converted request, and the range of its inline data.
struct Request<'a> {
    wr: SendWr<'a>,
    inline: Option<Range<usize>>,
}

/// Returns the result. On error, also returns the first request of the chain that could not be
/// posted.
fn report<T>(bad: *mut *mut T, at: *mut T, result: Result<(), Errno>) -> c_int {
    if result.is_err() && !bad.is_null() {
        // SAFETY: the program provides memory for the pointer.
        unsafe { bad.write(at) };
    }
    number(result)
}

/// `ibv_post_send(3)`.
pub(crate) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    let qp = match unsafe { Ref::<Qp>::get(qp) } {
        Ok(qp) => qp,
        Err(errno) => return report(bad, wr, Err(errno)),
    };
    let mut locked = qp.context.lock();
    let mut result = Ok(());
    while !wr.is_null() && result.is_ok() {
        let first = wr;
        let mut inline = ArrayVec::<u8, INLINE>::new();
        let copied = Copied::new();
        let mut chain = ArrayVec::<Request<'_>, CHAIN>::new();
        while !wr.is_null() && !chain.is_full() {
            // SAFETY: this is a request of the chain.
            let theirs = unsafe { &*wr };
            // SAFETY: as above.
            match unsafe { request(theirs, &qp, &mut inline, &copied) } {
                Ok(Some(ours)) => chain.push(ours),
                // There's not enough space for its inline data or scatter list.
                Ok(None) if !chain.is_empty() => break,
                Ok(None) => result = Err(Errno::INVALID),
                Err(errno) => result = Err(errno),
            }
            if result.is_err() {
                break;
            }
            wr = theirs.next;
        }
        let wrs: ArrayVec<SendWr<'_>, CHAIN> = chain
            .iter()
            .map(|request| SendWr {
                inline: request.inline.clone().map(|range| &inline[range]),
                ..request.wr
            })
            .collect();
        if let Err(PostError { index, reason }) = locked.nic.post_send(qp.id, &wrs) {
            result = Err(reason.into());
            wr = first;
            for _ in 0..index {
                // SAFETY: this number of requests in the chain was converted.
                wr = unsafe { (*wr).next };
            }
        }
    }
    locked.transmit_soon();
    drop(locked);
    report(bad, wr, result)
}

/// Converts a request. Its inline data are appended to `inline`, and its scatter list may be
/// copied. Returns `None` if there's not enough space for them.
///
/// # Safety
/// The request must be valid, as required by the manual page.
unsafe fn request<'a>(
    wr: &ibv_send_wr,
    qp: &Qp,
    inline: &mut ArrayVec<u8, INLINE>,
    copied: &'a Copied,
) -> Result<Option<Request<'a>>, Errno> {
    // SAFETY: the opcode determines the active member of each union.
    let op = unsafe {
        let remote = || RemoteAddr {
            addr: wr.wr.rdma.remote_addr,
            rkey: RKey(wr.wr.rdma.rkey),
        };
        let atomic = RemoteAddr {
            addr: wr.wr.atomic.remote_addr,
            rkey: RKey(wr.wr.atomic.rkey),
        };
        let imm = || u32::from_be(wr.__bindgen_anon_1.imm_data);
        let key = || RKey(wr.__bindgen_anon_1.invalidate_rkey);
        match wr.opcode {
            IBV_WR_SEND => SendOp::Send,
            IBV_WR_SEND_WITH_IMM => SendOp::SendImm(imm()),
            IBV_WR_SEND_WITH_INV => SendOp::SendInv(key()),
            IBV_WR_RDMA_WRITE => SendOp::Write(remote()),
            IBV_WR_RDMA_WRITE_WITH_IMM => SendOp::WriteImm(remote(), imm()),
            IBV_WR_RDMA_READ => SendOp::Read(remote()),
            IBV_WR_ATOMIC_CMP_AND_SWP => SendOp::CmpSwap {
                remote: atomic,
                compare: wr.wr.atomic.compare_add,
                swap: wr.wr.atomic.swap,
            },
            IBV_WR_ATOMIC_FETCH_AND_ADD => SendOp::FetchAdd {
                remote: atomic,
                add: wr.wr.atomic.compare_add,
            },
            IBV_WR_LOCAL_INV => SendOp::LocalInv(key()),
            IBV_WR_BIND_MW => {
                let theirs = &wr.__bindgen_anon_2.bind_mw;
                let key = RKey(theirs.rkey);
                SendOp::BindMw(binding(
                    qp,
                    theirs.mw,
                    IBV_MW_TYPE_2,
                    key,
                    &theirs.bind_info,
                )?)
            }
            IBV_WR_TSO | IBV_WR_DRIVER1 => return Err(Errno::UNSUPPORTED),
            _ => return Err(Errno::INVALID),
        }
    };
    let ud = if qp.is_datagram {
        // SAFETY: datagram queue pairs use this member.
        let ud = unsafe { wr.wr.ud };
        // SAFETY: the program passes a valid pointer.
        let ah = unsafe { Ref::<Ah>::get(ud.ah) }?;
        check_same(qp.context, ah.context)?;
        Some(UdDest {
            ah: ah.id,
            qpn: ud.remote_qpn,
            qkey: QKey(ud.remote_qkey),
        })
    } else {
        None
    };
    let most = qp.init.cap.max_send_sge;
    // SAFETY: guaranteed by the caller.
    let Some(mut list) = unsafe { sges(wr.sg_list, wr.num_sge, most, copied) }? else {
        return Ok(None);
    };
    let mut range = None;
    if wr.send_flags & IBV_SEND_INLINE != 0 {
        let start = inline.len();
        // An empty piece may not have an address.
        for sge in list.iter().filter(|sge| sge.length > 0) {
            let address = sge.addr as usize;
            let length = sge.length as usize;
            if inline.remaining_capacity() < length {
                inline.truncate(start);
                return Ok(None);
            }
            // SAFETY: this is memory of the program. It doesn't need to be registered, but must not
            // be changed now.
            let bytes = unsafe {
                slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(address), length)
            };
            inline.extend(bytes.iter().copied());
        }
        range = Some(start..inline.len());
        list = &[];
    }
    let ours = SendWr {
        wr_id: WrId(wr.wr_id),
        op,
        sges: list,
        flags: send_flags_of(wr.send_flags),
        inline: None,
        // SAFETY: XRC queue pairs use this member, which is an integer in any case.
        remote_srqn: qp.is_xrc.then_some(unsafe { wr.qp_type.xrc.remote_srqn }),
        ud,
    };
    Ok(Some(Request {
        wr: ours,
        inline: range,
    }))
}

/// Posts a chain of receive requests using `post`, a few at a time. Each can have up to `most`
/// pieces.
///
/// # Safety
/// The chain must be valid, as required by the manual page.
unsafe fn receive(
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
    most: u32,
    mut post: impl FnMut(&[RecvWr<'_>]) -> Result<(), PostError>,
) -> c_int {
    let mut result = Ok(());
    while !wr.is_null() && result.is_ok() {
        let first = wr;
        let copied = Copied::new();
        let mut chain = ArrayVec::<RecvWr<'_>, CHAIN>::new();
        while !wr.is_null() && !chain.is_full() {
            // SAFETY: this is a request of the chain.
            let theirs = unsafe { &*wr };
            // SAFETY: as above.
            match unsafe { sges(theirs.sg_list, theirs.num_sge, most, &copied) } {
                Ok(Some(sges)) => chain.push(RecvWr {
                    wr_id: WrId(theirs.wr_id),
                    sges,
                }),
                // There's not enough space for its scatter list.
                Ok(None) => break,
                Err(errno) => {
                    result = Err(errno);
                    break;
                }
            }
            wr = theirs.next;
        }
        if let Err(PostError { index, reason }) = post(&chain) {
            result = Err(reason.into());
            wr = first;
            for _ in 0..index {
                // SAFETY: this number of requests in the chain was converted.
                wr = unsafe { (*wr).next };
            }
        }
    }
    report(bad, wr, result)
}

/// `ibv_post_recv(3)`.
pub(crate) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    match unsafe { Ref::<Qp>::get(qp) } {
        Ok(qp) => {
            let mut locked = qp.context.lock();
            // SAFETY: as above.
            unsafe {
                receive(wr, bad, qp.init.cap.max_recv_sge, |wrs| {
                    locked.nic.post_recv(qp.id, wrs)
                })
            }
        }
        Err(errno) => report(bad, wr, Err(errno)),
    }
}

/// `ibv_post_srq_recv(3)`.
pub(crate) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    match unsafe { Ref::<Srq>::get(srq) } {
        Ok(srq) => {
            let mut locked = srq.context.lock();
            // SAFETY: as above.
            unsafe {
                receive(wr, bad, srq.max_sge, |wrs| {
                    locked.nic.post_srq_recv(srq.id, wrs)
                })
            }
        }
        Err(errno) => report(bad, wr, Err(errno)),
    }
}
