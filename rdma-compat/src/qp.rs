//! Queue pairs and shared receive queues.

use std::collections::BTreeSet;
use std::ffi::c_int;
use std::mem::zeroed;
use std::ptr;
use std::sync::{Mutex, MutexGuard};

use riser_rdma_core_sys::bindings::*;
use riser_transport::rdma_core::convert::{qp_attr, qp_attr_from_mask};
use riser_transport::roce::Roce;
use riser_transport::verbs::{
    CqId, Gid, QpCap, QpId, QpInitAttr, QpType, RateLimit, RecvOrder, SrqAttr, SrqId, Verbs as _,
    XrcdId,
};

use crate::builder::Builder;
use crate::context::{Context, HasEvents, check_same, context_of};
use crate::cq::Cq;
use crate::domain::{Pd, Xrcd};
use crate::engine::Locked;
use crate::errno::{Errno, number, pointer};
use crate::lock::unpoisoned;
use crate::object::{Ref, kind};
use crate::queue::Unacknowledged;

/// Bits of `enum ibv_qp_open_attr_mask`.
const OPEN_NUM: u32 = 1;
const OPEN_XRCD: u32 = 2;
const OPEN_CONTEXT: u32 = 4;
const OPEN_TYPE: u32 = 8;

/// Minimum amount of inline data supported by every queue pair, in bytes.
const LEAST_INLINE: u32 = 64;

/// A queue pair.
pub(crate) struct Qp {
    pub(crate) context: Ref<Context>,
    pub(crate) id: QpId,
    pub(crate) is_datagram: bool,
    /// Set if its requests specify a shared receive queue of the peer.
    pub(crate) is_xrc: bool,
    pub(crate) init: ibv_qp_init_attr,
    /// Set if it was created for requests that are built using function calls.
    pub(crate) builder: Option<Builder>,
    /// Multicast groups that it is attached to.
    groups: Mutex<BTreeSet<[u8; 16]>>,
    pub(crate) async_events: Unacknowledged,
}

// SAFETY: pointers in the attributes are only returned to the program and never dereferenced.
unsafe impl Send for Qp {}
// SAFETY: as above.
unsafe impl Sync for Qp {}

kind!(Qp, ibv_qp_ex, ibv_qp, 0, b"qpai");

/// A shared receive queue.
pub(crate) struct Srq {
    pub(crate) context: Ref<Context>,
    pub(crate) id: SrqId,
    /// Maximum number of pieces of a receive request.
    pub(crate) max_sge: u32,
    pub(crate) async_events: Unacknowledged,
}

kind!(Srq, ibv_srq, b"srqu");

impl HasEvents for Qp {
    fn context(&self) -> Ref<Context> {
        self.context
    }

    fn async_events(&self) -> &Unacknowledged {
        &self.async_events
    }
}

impl HasEvents for Srq {
    fn context(&self) -> Ref<Context> {
        self.context
    }

    fn async_events(&self) -> &Unacknowledged {
        &self.async_events
    }
}

/// `ibv_create_qp(3)`.
pub(crate) unsafe extern "C" fn ibv_create_qp(
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    pointer(unsafe { Ref::<Pd>::get(pd) }.and_then(|pd| {
        // SAFETY: as above.
        let attr = unsafe { attr.as_mut() }.ok_or(Errno::INVALID)?;
        create_qp_by(pd, attr, ExtraAttr::default(), |nic, init| {
            Ok(nic.create_qp(init)?)
        })
        .map(Ref::handle)
    }))
}

/// Attributes of a queue pair that are only supported by the extended call.
#[derive(Clone, Copy, Default)]
pub(crate) struct ExtraAttr {
    /// Operations to be built using function calls, if the program has requested this.
    send_ops: Option<u64>,
    block_self_mcast: bool,
}

/// Returns the attributes that are not supported by the older call, except for the domain.
///
/// # Errors
/// Returns `EOPNOTSUPP` for features that the device does not support.
pub(crate) fn extra_attr(attr: &ibv_qp_init_attr_ex) -> Result<ExtraAttr, Errno> {
    const KNOWN: u32 = IBV_QP_INIT_ATTR_PD
        | IBV_QP_INIT_ATTR_XRCD
        | IBV_QP_INIT_ATTR_CREATE_FLAGS
        | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    let has = |bit| attr.comp_mask & bit != 0;
    let flags = if has(IBV_QP_INIT_ATTR_CREATE_FLAGS) {
        attr.create_flags
    } else {
        0
    };
    if attr.comp_mask & !KNOWN != 0 || flags & !IBV_QP_CREATE_BLOCK_SELF_MCAST_LB != 0 {
        return Err(Errno::UNSUPPORTED);
    }
    Ok(ExtraAttr {
        send_ops: has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS).then_some(attr.send_ops_flags),
        block_self_mcast: flags & IBV_QP_CREATE_BLOCK_SELF_MCAST_LB != 0,
    })
}

/// Returns the attributes that are also supported by the older call.
pub(crate) fn plain_attr(attr: &ibv_qp_init_attr_ex) -> ibv_qp_init_attr {
    ibv_qp_init_attr {
        qp_context: attr.qp_context,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        cap: attr.cap,
        qp_type: attr.qp_type,
        sq_sig_all: attr.sq_sig_all,
    }
}

/// Creates a queue pair. `make` calls the device.
pub(crate) fn create_qp_by(
    pd: Ref<Pd>,
    attr: &mut ibv_qp_init_attr,
    extra: ExtraAttr,
    make: impl FnOnce(&mut Roce, &QpInitAttr) -> Result<QpId, Errno>,
) -> Result<Ref<Qp>, Errno> {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    let send_cq = unsafe { Ref::<Cq>::get(attr.send_cq) }?;
    let recv_cq = match attr.qp_type {
        // It does not receive anything.
        IBV_QPT_XRC_SEND => send_cq,
        // SAFETY: as above.
        _ => unsafe { Ref::<Cq>::get(attr.recv_cq) }?,
    };
    let srq = (!attr.srq.is_null())
        // SAFETY: as above.
        .then(|| unsafe { Ref::<Srq>::get(attr.srq) })
        .transpose()?;
    let qp_type = match attr.qp_type {
        IBV_QPT_RC => QpType::Rc,
        IBV_QPT_UC => QpType::Uc,
        IBV_QPT_UD => QpType::Ud,
        IBV_QPT_XRC_SEND => QpType::XrcIni,
        IBV_QPT_RAW_PACKET | IBV_QPT_DRIVER => return Err(Errno::UNSUPPORTED),
        _ => return Err(Errno::INVALID),
    };
    let context = pd.context;
    check_same(context, send_cq.context)?;
    check_same(context, recv_cq.context)?;
    if let Some(srq) = srq {
        check_same(context, srq.context)?;
    }
    let mut locked = context.lock();
    let cap = QpCap {
        // Here, a queue without entries is allowed, and we create one entry.
        max_send_wr: attr.cap.max_send_wr.max(1),
        max_recv_wr: attr.cap.max_recv_wr.max(1),
        max_send_sge: attr.cap.max_send_sge.max(1),
        max_recv_sge: attr.cap.max_recv_sge.max(1),
        // Programs send a few inline bytes without requesting this, because adapters support it.
        max_inline: attr.cap.max_inline_data.max(LEAST_INLINE),
    };
    let builder = extra
        .send_ops
        .map(|ops| Builder::new(qp_type, cap, ops))
        .transpose()?;
    let init = QpInitAttr {
        pd: pd.id,
        send_cq: send_cq.id,
        recv_cq: recv_cq.id,
        srq: srq.map(|s| s.id),
        qp_type,
        cap,
        sq_sig_all: attr.sq_sig_all != 0,
        xrcd: None,
        recv_order: RecvOrder::OldestFirst,
        block_self_mcast: extra.block_self_mcast,
    };
    let id = make(&mut locked.nic, &init)?;
    let has_receives = srq.is_none() && qp_type != QpType::XrcIni;
    attr.cap = ibv_qp_cap {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: if has_receives { cap.max_recv_wr } else { 0 },
        max_send_sge: cap.max_send_sge,
        max_recv_sge: if has_receives { cap.max_recv_sge } else { 0 },
        max_inline_data: cap.max_inline,
    };
    show(&mut locked, context, id, pd.handle(), attr, builder)
}

/// Creates the receiving end of an XRC connection, which has no queues. `make` calls the device.
pub(crate) fn create_xrc_target(
    xrcd: Ref<Xrcd>,
    attr: &mut ibv_qp_init_attr,
    make: impl FnOnce(&mut Roce, &QpInitAttr) -> Result<QpId, Errno>,
) -> Result<Ref<Qp>, Errno> {
    let context = xrcd.context;
    let mut locked = context.lock();
    let id = make(&mut locked.nic, &QpInitAttr::xrc_target(xrcd.id))?;
    let number = locked.nic.qp_num(id)?;
    locked.targets.insert((xrcd.id, number), id);
    attr.cap = ibv_qp_cap::default();
    attr.send_cq = ptr::null_mut();
    attr.recv_cq = ptr::null_mut();
    attr.srq = ptr::null_mut();
    show(&mut locked, context, id, ptr::null_mut(), attr, None)
}

/// `ibv_open_qp(3)`: opens the receiving end of an XRC connection that was created by another
/// context of the domain. It is destroyed with its last structure.
pub(crate) unsafe extern "C" fn open_qp(
    context: *mut ibv_context,
    attr: *mut ibv_qp_open_attr,
) -> *mut ibv_qp {
    const NEEDED: u32 = OPEN_NUM | OPEN_XRCD | OPEN_TYPE;
    // SAFETY: the program passes valid pointers, as required by the manual page.
    pointer(unsafe { context_of(context) }.and_then(|context| {
        // SAFETY: as above.
        let attr = unsafe { attr.as_ref() }.ok_or(Errno::INVALID)?;
        if attr.comp_mask & !(NEEDED | OPEN_CONTEXT) != 0 {
            return Err(Errno::UNSUPPORTED);
        }
        if attr.comp_mask & NEEDED != NEEDED || attr.qp_type != IBV_QPT_XRC_RECV {
            return Err(Errno::INVALID);
        }
        // SAFETY: as above.
        let xrcd = unsafe { Ref::<Xrcd>::get(attr.xrcd) }?;
        check_same(context, xrcd.context)?;
        let mut locked = context.lock();
        let target = locked.targets.get(&(xrcd.id, attr.qp_num)).copied();
        let id = target.ok_or(Errno::INVALID)?;
        // SAFETY: all zeroes is valid: no queues.
        let mut init: ibv_qp_init_attr = unsafe { zeroed() };
        init.qp_type = attr.qp_type;
        if attr.comp_mask & OPEN_CONTEXT != 0 {
            init.qp_context = attr.qp_context;
        }
        let (now, _) = qp_attr(&locked.nic.query_qp(id)?);
        let qp = show(&mut locked, context, id, ptr::null_mut(), &init, None)?;
        // SAFETY: the queue pair is alive.
        unsafe { (*qp.handle()).state = now.qp_state };
        Ok(qp.handle())
    }))
}

/// Creates an object for a queue pair of the device.
fn show(
    locked: &mut Locked<'_>,
    context: Ref<Context>,
    id: QpId,
    pd: *mut ibv_pd,
    attr: &ibv_qp_init_attr,
    builder: Option<Builder>,
) -> Result<Ref<Qp>, Errno> {
    // SAFETY: all zeroes is valid: no functions, an unlocked mutex.
    let mut c: ibv_qp_ex = unsafe { zeroed() };
    c.qp_base.context = context.handle();
    c.qp_base.qp_context = attr.qp_context;
    c.qp_base.pd = pd;
    c.qp_base.send_cq = attr.send_cq;
    c.qp_base.recv_cq = attr.recv_cq;
    c.qp_base.srq = attr.srq;
    c.qp_base.handle = id.0.index() as u32;
    c.qp_base.qp_num = locked.nic.qp_num(id)?;
    c.qp_base.state = IBV_QPS_RESET;
    c.qp_base.qp_type = attr.qp_type;
    let qp = Ref::new(
        c,
        Qp {
            context,
            id,
            is_datagram: attr.qp_type == IBV_QPT_UD,
            is_xrc: attr.qp_type == IBV_QPT_XRC_SEND,
            init: *attr,
            builder,
            groups: Mutex::default(),
            async_events: Unacknowledged::default(),
        },
    );
    locked.qps.entry(id).or_default().push(Box::new(qp));
    Ok(qp)
}

/// `ibv_modify_qp(3)`.
pub(crate) unsafe extern "C" fn ibv_modify_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    number(unsafe { Ref::<Qp>::get(qp) }.and_then(|qp| {
        // SAFETY: as above.
        let attr = unsafe { attr.as_ref() }.ok_or(Errno::INVALID)?;
        // SAFETY: the queue pair is alive.
        let mask = mask as u32 & !superfluous(unsafe { (*qp.handle()).qp_type });
        let ours = qp_attr_from_mask(attr, mask & !IBV_QP_RATE_LIMIT)?;
        let limit = (mask & IBV_QP_RATE_LIMIT != 0).then_some(RateLimit {
            rate_kbps: attr.rate_limit,
            max_burst: 0,
        });
        let mut locked = qp.context.lock();
        let device = locked.nic.device_attr();
        let legal = device.min_rate_kbps..=device.max_rate_kbps;
        // This must be checked before anything is modified.
        if limit.is_some_and(|limit| limit.rate_kbps != 0 && !legal.contains(&limit.rate_kbps)) {
            return Err(Errno::INVALID);
        }
        if mask & IBV_QP_CUR_STATE != 0 {
            let current = locked.nic.query_qp(qp.id)?.state;
            let given = qp_attr_from_mask(
                &ibv_qp_attr {
                    qp_state: attr.cur_qp_state,
                    ..*attr
                },
                IBV_QP_STATE,
            )?;
            if given.state != current {
                return Err(Errno::INVALID);
            }
        }
        if mask & IBV_QP_STATE != 0 {
            // Send posted requests before the new state can flush them.
            locked.transmit();
        }
        if mask != IBV_QP_RATE_LIMIT {
            locked.nic.modify_qp(qp.id, &ours)?;
        }
        if let Some(limit) = limit {
            locked.nic.modify_qp_rate_limit(qp.id, limit)?;
        }
        if mask & IBV_QP_STATE != 0 {
            // SAFETY: the queue pair is alive.
            unsafe { (*qp.handle()).state = attr.qp_state };
        }
        locked.transmit();
        Ok(())
    }))
}

/// `ibv_modify_qp_rate_limit(3)`. We count bytes exactly, so the typical packet length is not used.
pub(crate) unsafe extern "C" fn modify_qp_rate_limit(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_rate_limit_attr,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    number(unsafe { Ref::<Qp>::get(qp) }.and_then(|qp| {
        // SAFETY: as above.
        let attr = unsafe { attr.as_ref() }.ok_or(Errno::INVALID)?;
        if attr.comp_mask != 0 {
            return Err(Errno::INVALID);
        }
        let limit = RateLimit {
            rate_kbps: attr.rate_limit,
            max_burst: attr.max_burst_sz,
        };
        let mut locked = qp.context.lock();
        locked.nic.modify_qp_rate_limit(qp.id, limit)?;
        locked.transmit();
        Ok(())
    }))
}

/// Returns attributes that this type of queue pair does not have, but that are set by programs,
/// because connections usually have them. Linux ignores them too.
fn superfluous(qp_type: ibv_qp_type) -> u32 {
    match qp_type {
        IBV_QPT_XRC_SEND => IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
        IBV_QPT_XRC_RECV => IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY,
        _ => 0,
    }
}

/// `ibv_query_qp(3)`.
pub(crate) unsafe extern "C" fn ibv_query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    number(unsafe { Ref::<Qp>::get(qp) }.and_then(|qp| {
        let (ours, limit) = {
            let nic = &qp.context.lock().nic;
            (nic.query_qp(qp.id)?, nic.query_qp_rate_limit(qp.id)?)
        };
        let (mut theirs, _) = qp_attr(&ours);
        theirs.rate_limit = limit.rate_kbps;
        theirs.cur_qp_state = theirs.qp_state;
        theirs.cap = qp.init.cap;
        theirs.sq_draining = u8::from(ours.sq_draining == Some(true));
        // SAFETY: the program provides memory for both, and the queue pair is alive.
        unsafe {
            attr.write(theirs);
            if !init.is_null() {
                init.write(qp.init);
            }
            (*qp.handle()).state = theirs.qp_state;
        }
        Ok(())
    }))
}

/// `ibv_query_qp_data_in_order(3)`: packets are received in order, and are never executed twice.
/// But a copy writes 32 bytes at a time, and if they cross a cache line, another processor may see
/// the end first. So there is no ordering guarantee for individual bytes.
pub(crate) unsafe extern "C" fn ibv_query_qp_data_in_order(
    _qp: *mut ibv_qp,
    _op: ibv_wr_opcode,
    _flags: u32,
) -> c_int {
    0
}

/// `ibv_qp_to_qp_ex(3)`: fails unless the queue pair was created for the extended interface.
pub(crate) unsafe extern "C" fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    pointer(unsafe { Ref::<Qp>::get(qp) }.and_then(|qp| {
        let is_extended = qp.builder.is_some();
        is_extended.then(|| qp.c()).ok_or(Errno::UNSUPPORTED)
    }))
}

impl Qp {
    /// Returns the groups of a queue pair. The device must be locked, so that the process can't
    /// fork.
    fn groups(&self) -> MutexGuard<'_, BTreeSet<[u8; 16]>> {
        unpoisoned(self.groups.lock())
    }
}

/// `ibv_query_ece(3)`: the device has no vendor options.
pub(crate) unsafe extern "C" fn ibv_query_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    number(unsafe { Ref::<Qp>::get(qp) }.and_then(|_| {
        if ece.is_null() {
            return Err(Errno::INVALID);
        }
        // Programs forward the returned options even if there is an error.
        // SAFETY: as above.
        unsafe { ece.write(ibv_ece::default()) };
        Err(Errno::UNSUPPORTED)
    }))
}

/// `ibv_set_ece(3)`: the device has no vendor options.
pub(crate) unsafe extern "C" fn ibv_set_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    number(
        unsafe { Ref::<Qp>::get(qp) }.and_then(|_| match ece.is_null() {
            true => Err(Errno::INVALID),
            false => Err(Errno::UNSUPPORTED),
        }),
    )
}

/// `ibv_attach_mcast(3)`.
pub(crate) unsafe extern "C" fn ibv_attach_mcast(
    qp: *mut ibv_qp,
    gid: *const ibv_gid,
    lid: u16,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    number(unsafe { Ref::<Qp>::get(qp) }.and_then(|qp| {
        // SAFETY: as above, and a GID is 16 bytes.
        let gid = unsafe { gid.as_ref().ok_or(Errno::INVALID)?.raw };
        if !qp.is_datagram {
            return Err(Errno::INVALID);
        }
        let mut locked = qp.context.lock();
        locked.nic.attach_mcast(qp.id, Gid(gid), lid)?;
        qp.groups().insert(gid);
        Ok(())
    }))
}

/// `ibv_detach_mcast(3)`.
pub(crate) unsafe extern "C" fn ibv_detach_mcast(
    qp: *mut ibv_qp,
    gid: *const ibv_gid,
    lid: u16,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    number(unsafe { Ref::<Qp>::get(qp) }.and_then(|qp| {
        // SAFETY: as above, and a GID is 16 bytes.
        let gid = unsafe { gid.as_ref().ok_or(Errno::INVALID)?.raw };
        let mut locked = qp.context.lock();
        locked.nic.detach_mcast(qp.id, Gid(gid), lid)?;
        qp.groups().remove(&gid);
        Ok(())
    }))
}

/// `ibv_destroy_qp(3)`.
pub(crate) unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    number(unsafe { Ref::<Qp>::get(qp) }.and_then(|qp| {
        {
            let mut locked = qp.context.lock();
            if !qp.groups().is_empty() {
                return Err(Errno(libc::EBUSY));
            }
            if locked.close_qp(qp.id, qp.handle().addr()) {
                locked.destroy_qp(qp.id)?;
                // Send the last responses now, because the program may exit after this.
                locked.transmit();
            }
        }
        qp.context.retract_events(&qp.async_events);
        qp.retire()
    }))
}

/// `ibv_create_srq(3)`.
pub(crate) unsafe extern "C" fn ibv_create_srq(
    pd: *mut ibv_pd,
    attr: *mut ibv_srq_init_attr,
) -> *mut ibv_srq {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    pointer(unsafe { Ref::<Pd>::get(pd) }.and_then(|pd| {
        // SAFETY: as above.
        let attr = unsafe { attr.as_mut() }.ok_or(Errno::INVALID)?;
        create_srq(pd, attr.srq_context, &mut attr.attr, None)
    }))
}

/// `ibv_create_srq_ex(3)`.
pub(crate) unsafe extern "C" fn create_srq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    pointer(unsafe { context_of(context) }.and_then(|context| {
        // SAFETY: as above.
        let attr = unsafe { attr.as_mut() }.ok_or(Errno::INVALID)?;
        let has = |bit| attr.comp_mask & bit != 0;
        let srq_type = match has(IBV_SRQ_INIT_ATTR_TYPE) {
            true => attr.srq_type,
            false => IBV_SRQT_BASIC,
        };
        // SAFETY: as above.
        let pd = unsafe { Ref::<Pd>::get(attr.pd) }?;
        check_same(context, pd.context)?;
        let extended = match srq_type {
            IBV_SRQT_BASIC => None,
            IBV_SRQT_XRC if has(IBV_SRQ_INIT_ATTR_XRCD) && has(IBV_SRQ_INIT_ATTR_CQ) => {
                // SAFETY: as above.
                let (xrcd, cq) =
                    unsafe { (Ref::<Xrcd>::get(attr.xrcd)?, Ref::<Cq>::get(attr.cq)?) };
                check_same(context, xrcd.context)?;
                check_same(context, cq.context)?;
                Some((xrcd.id, cq.id))
            }
            IBV_SRQT_XRC => return Err(Errno::INVALID),
            _ => return Err(Errno::UNSUPPORTED),
        };
        create_srq(pd, attr.srq_context, &mut attr.attr, extended)
    }))
}

/// `ibv_get_srq_num(3)`.
pub(crate) unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, to: *mut u32) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    number(unsafe { Ref::<Srq>::get(srq) }.and_then(|srq| {
        let ours = srq.context.lock().nic.srq_num(srq.id)?;
        // SAFETY: the program provides memory for the number.
        unsafe { to.write(ours) };
        Ok(())
    }))
}

fn create_srq(
    pd: Ref<Pd>,
    srq_context: *mut std::ffi::c_void,
    attr: &mut ibv_srq_attr,
    extended: Option<(XrcdId, CqId)>,
) -> Result<*mut ibv_srq, Errno> {
    let context = pd.context;
    let mut locked = context.lock();
    let ours = SrqAttr {
        max_wr: attr.max_wr.max(1),
        max_sge: attr.max_sge.max(1),
        limit: 0,
    };
    let id = match extended {
        None => locked.nic.create_srq(pd.id, ours)?,
        Some((xrcd, cq)) => locked.nic.create_xrc_srq(pd.id, xrcd, cq, ours)?,
    };
    attr.max_wr = ours.max_wr;
    attr.max_sge = ours.max_sge;
    // SAFETY: all zeroes is valid: an unlocked mutex.
    let mut c: ibv_srq = unsafe { zeroed() };
    c.context = context.handle();
    c.srq_context = srq_context;
    c.pd = pd.handle();
    c.handle = id.0.index() as u32;
    let srq = Ref::new(
        c,
        Srq {
            context,
            id,
            max_sge: ours.max_sge,
            async_events: Unacknowledged::default(),
        },
    );
    locked.srqs.insert(id, Box::new(srq));
    Ok(srq.handle())
}

/// `ibv_modify_srq(3)`.
pub(crate) unsafe extern "C" fn ibv_modify_srq(
    srq: *mut ibv_srq,
    attr: *mut ibv_srq_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    number(unsafe { Ref::<Srq>::get(srq) }.and_then(|srq| {
        // SAFETY: as above.
        let attr = unsafe { attr.as_ref() }.ok_or(Errno::INVALID)?;
        let mask = mask as u32;
        if mask & !(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) != 0 {
            return Err(Errno::INVALID);
        }
        let max_wr = (mask & IBV_SRQ_MAX_WR != 0).then_some(attr.max_wr);
        let limit = (mask & IBV_SRQ_LIMIT != 0).then_some(attr.srq_limit);
        Ok(srq.context.lock().nic.modify_srq(srq.id, max_wr, limit)?)
    }))
}

/// `ibv_query_srq(3)`.
pub(crate) unsafe extern "C" fn ibv_query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    number(unsafe { Ref::<Srq>::get(srq) }.and_then(|srq| {
        let ours = srq.context.lock().nic.query_srq(srq.id)?;
        let theirs = ibv_srq_attr {
            max_wr: ours.max_wr,
            max_sge: ours.max_sge,
            srq_limit: ours.limit,
        };
        // SAFETY: the program provides memory for the attributes.
        unsafe { attr.write(theirs) };
        Ok(())
    }))
}

/// `ibv_destroy_srq(3)`.
pub(crate) unsafe extern "C" fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    number(unsafe { Ref::<Srq>::get(srq) }.and_then(|srq| {
        {
            let mut locked = srq.context.lock();
            locked.nic.destroy_srq(srq.id)?;
            locked.srqs.remove(&srq.id);
        }
        srq.context.retract_events(&srq.async_events);
        srq.retire()
    }))
}
