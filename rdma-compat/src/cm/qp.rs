//! Queue pairs and receive queues of identifiers.

use std::ffi::c_int;
use std::mem::{self, zeroed};
use std::ptr;

use riser_rdma_core_sys::bindings::*;
use riser_transport::roce::Roce;
use riser_transport::verbs::{Ece, QpInitAttr, RdmaCm as _};

use super::{Id, id_of, shared};
use crate::context::check_same;
use crate::cq::*;
use crate::domain::{Pd, Xrcd};
use crate::errno::{Errno, minus};
use crate::object::Ref;
use crate::post_ex::set_calls;
use crate::qp::*;

/// `rdma_create_qp(3)`.
pub(crate) unsafe extern "C" fn rdma_create_qp(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    minus(unsafe { id_of(id) }.and_then(|id| {
        let pd = (!pd.is_null())
            // SAFETY: as above.
            .then(|| unsafe { Ref::<Pd>::get(pd) })
            .transpose()?;
        // SAFETY: as above.
        let attr = unsafe { attr.as_mut() }.ok_or(Errno::INVALID)?;
        create_qp(id, pd, None, attr, ExtraAttr::default())
    }))
}

/// `rdma_create_qp_ex(3)`.
pub(crate) unsafe extern "C" fn rdma_create_qp_ex(
    id: *mut rdma_cm_id,
    attr: *mut ibv_qp_init_attr_ex,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    minus(unsafe { id_of(id) }.and_then(|id| {
        // SAFETY: as above.
        let attr = unsafe { attr.as_mut() }.ok_or(Errno::INVALID)?;
        let extra = extra_attr(attr)?;
        let has_pd = attr.comp_mask & IBV_QP_INIT_ATTR_PD != 0 && !attr.pd.is_null();
        let pd = has_pd
            // SAFETY: as above.
            .then(|| unsafe { Ref::<Pd>::get(attr.pd) })
            .transpose()?;
        let has_xrcd = attr.comp_mask & IBV_QP_INIT_ATTR_XRCD != 0 && !attr.xrcd.is_null();
        let xrcd = has_xrcd
            // SAFETY: as above.
            .then(|| unsafe { Ref::<Xrcd>::get(attr.xrcd) })
            .transpose()?;
        let mut plain = plain_attr(attr);
        create_qp(id, pd, xrcd, &mut plain, extra)?;
        attr.cap = plain.cap;
        Ok(())
    }))
}

/// Creates a queue pair for an identifier, and its completion queues if none are specified. For the
/// receiving end of an XRC connection, it uses an XRC domain instead of completion queues.
pub(super) fn create_qp(
    id: Ref<Id>,
    pd: Option<Ref<Pd>>,
    xrcd: Option<Ref<Xrcd>>,
    attr: &mut ibv_qp_init_attr,
    extra: ExtraAttr,
) -> Result<(), Errno> {
    let (context, device_id) = id.link()?;
    let c = id.c();
    let pd = match pd {
        Some(pd) => pd,
        None => {
            // SAFETY: the identifier is alive.
            let own = unsafe { (*c).pd };
            match own.is_null() {
                // SAFETY: it belongs to the identifier.
                false => unsafe { Ref::<Pd>::get(own) }?,
                true => shared(context.device)?.pd,
            }
        }
    };
    if pd.context != context {
        return Err(Errno::INVALID);
    }
    // SAFETY: the identifier is alive.
    unsafe {
        if (*c).qp_type != attr.qp_type || !(*c).qp.is_null() {
            return Err(Errno::INVALID);
        }
        if attr.srq.is_null() {
            attr.srq = (*c).srq;
        }
    }
    let make = |nic: &mut Roce, init: &QpInitAttr| Ok(nic.create_cm_qp(device_id, init)?);
    let qp = if attr.qp_type == IBV_QPT_XRC_RECV {
        let xrcd = xrcd.map_or_else(|| shared(context.device)?.xrcd(), Ok)?;
        check_same(context, xrcd.context)?;
        create_xrc_target(xrcd, attr, make)
    } else {
        make_cqs(id, attr)?;
        create_qp_by(pd, attr, extra, make)
    };
    match qp {
        Ok(qp) => {
            set_calls(qp);
            // The device's queue pairs have no vendor options.
            id.lock().local_ece = Ece::default();
            // SAFETY: the identifier, its queue pair and the completion queues are alive.
            unsafe {
                (*qp.handle()).state = match attr.qp_type {
                    IBV_QPT_UD => IBV_QPS_RTS,
                    _ => IBV_QPS_INIT,
                };
                (*c).qp = qp.handle();
                (*c).pd = pd.handle();
                // At the receiving end of an XRC connection, these may belong to the receive queue.
                if attr.qp_type != IBV_QPT_XRC_RECV {
                    (*c).send_cq = attr.send_cq;
                    (*c).recv_cq = attr.recv_cq;
                    (*c).send_cq_channel = (*attr.send_cq).channel;
                    (*c).recv_cq_channel = (*attr.recv_cq).channel;
                }
            }
            Ok(())
        }
        Err(errno) => {
            destroy_cqs(id);
            Err(errno)
        }
    }
}

/// Creates a completion queue with a channel.
fn make_cq(id: Ref<Id>, entries: u32) -> Result<*mut ibv_cq, Errno> {
    let (context, _) = id.link()?;
    // SAFETY: the pointers were created by this library.
    unsafe {
        let channel = ibv_create_comp_channel(context.handle());
        if channel.is_null() {
            return Err(Errno::last());
        }
        let entries = c_int::try_from(entries.max(1)).map_err(|_| Errno::INVALID);
        let cq = entries.and_then(|entries| {
            let cq = ibv_create_cq(context.handle(), entries, id.c().cast(), channel, 0);
            (!cq.is_null()).then_some(cq).ok_or_else(Errno::last)
        });
        if cq.is_err() {
            ibv_destroy_comp_channel(channel);
        }
        cq
    }
}

/// Creates completion queues that are not specified by the program.
fn make_cqs(id: Ref<Id>, attr: &mut ibv_qp_init_attr) -> Result<(), Errno> {
    if attr.send_cq.is_null() {
        attr.send_cq = make_cq(id, attr.cap.max_send_wr)?;
        id.lock().owns_send_cq = true;
        // SAFETY: the identifier is alive.
        unsafe { (*id.c()).send_cq = attr.send_cq };
    }
    if attr.recv_cq.is_null() {
        let made = make_cq(id, attr.cap.max_recv_wr);
        attr.recv_cq = made.inspect_err(|_| destroy_cqs(id))?;
        id.lock().owns_recv_cq = true;
        // SAFETY: the identifier is alive.
        unsafe { (*id.c()).recv_cq = attr.recv_cq };
    }
    Ok(())
}

/// Destroys the completion queues that were created with the queue pair.
fn destroy_cqs(id: Ref<Id>) {
    let (send, recv) = {
        let mut state = id.lock();
        (
            mem::take(&mut state.owns_send_cq),
            mem::take(&mut state.owns_recv_cq),
        )
    };
    // SAFETY: the identifier is alive, and owns the objects created for it.
    unsafe {
        let c = &mut *id.c();
        for (owns, cq) in [(send, c.send_cq), (recv, c.recv_cq)] {
            if owns {
                let channel = (*cq).channel;
                ibv_destroy_cq(cq);
                ibv_destroy_comp_channel(channel);
            }
        }
        c.send_cq = ptr::null_mut();
        c.recv_cq = ptr::null_mut();
        c.send_cq_channel = ptr::null_mut();
        c.recv_cq_channel = ptr::null_mut();
    }
}

/// `rdma_destroy_qp(3)`.
pub(crate) unsafe extern "C" fn rdma_destroy_qp(id: *mut rdma_cm_id) {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    let Ok(id) = (unsafe { id_of(id) }) else {
        return;
    };
    // SAFETY: the identifier is alive.
    let (qp, has_xrc_srq) = unsafe {
        let c = &mut *id.c();
        let has_xrc_srq = c.qp_type == IBV_QPT_XRC_RECV && !c.srq.is_null();
        (mem::replace(&mut c.qp, ptr::null_mut()), has_xrc_srq)
    };
    if !qp.is_null() {
        // SAFETY: it belongs to the identifier.
        unsafe { ibv_destroy_qp(qp) };
    }
    // In this case, the completion queue belongs to the receive queue, and is destroyed with it.
    if !has_xrc_srq {
        destroy_cqs(id);
    }
}

/// `rdma_create_srq(3)`.
pub(crate) unsafe extern "C" fn rdma_create_srq(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    attr: *mut ibv_srq_init_attr,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    minus(unsafe { id_of(id) }.and_then(|id| {
        // SAFETY: as above, and the identifier is alive. All zeroes is valid for attributes.
        let (attr, kind, mut extended) = unsafe {
            let attr = attr.as_mut().ok_or(Errno::INVALID)?;
            (attr, (*id.c()).qp_type, zeroed::<ibv_srq_init_attr_ex>())
        };
        extended.srq_context = attr.srq_context;
        extended.attr = attr.attr;
        extended.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD;
        extended.srq_type = match kind {
            IBV_QPT_XRC_RECV => IBV_SRQT_XRC,
            _ => IBV_SRQT_BASIC,
        };
        extended.pd = pd;
        create_id_srq(id, &mut extended)?;
        attr.attr = extended.attr;
        Ok(())
    }))
}

/// `rdma_create_srq_ex(3)`.
pub(crate) unsafe extern "C" fn rdma_create_srq_ex(
    id: *mut rdma_cm_id,
    attr: *mut ibv_srq_init_attr_ex,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    minus(unsafe { id_of(id) }.and_then(|id| {
        // SAFETY: as above.
        let attr = unsafe { attr.as_mut() }.ok_or(Errno::INVALID)?;
        create_id_srq(id, attr)
    }))
}

/// Creates a receive queue of an identifier. Domains and the completion queue are created if the
/// program has not specified them.
fn create_id_srq(id: Ref<Id>, attr: &mut ibv_srq_init_attr_ex) -> Result<(), Errno> {
    let (context, _) = id.link()?;
    let has = |attr: &ibv_srq_init_attr_ex, bit| attr.comp_mask & bit != 0;
    // SAFETY: the identifier is alive.
    let (own_pd, own_cq, srq) = unsafe {
        let c = &*id.c();
        (c.pd, c.recv_cq, c.srq)
    };
    if !srq.is_null() || !has(attr, IBV_SRQ_INIT_ATTR_TYPE) {
        return Err(Errno::INVALID);
    }
    if !has(attr, IBV_SRQ_INIT_ATTR_PD) || attr.pd.is_null() {
        attr.pd = match own_pd.is_null() {
            true => shared(context.device)?.pd.handle(),
            false => own_pd,
        };
        attr.comp_mask |= IBV_SRQ_INIT_ATTR_PD;
    }
    if attr.srq_type == IBV_SRQT_XRC {
        if !has(attr, IBV_SRQ_INIT_ATTR_XRCD) || attr.xrcd.is_null() {
            attr.xrcd = shared(context.device)?.xrcd()?.handle();
            attr.comp_mask |= IBV_SRQ_INIT_ATTR_XRCD;
        }
        if !has(attr, IBV_SRQ_INIT_ATTR_CQ) || attr.cq.is_null() {
            attr.cq = own_cq;
            if own_cq.is_null() {
                attr.cq = make_cq(id, attr.attr.max_wr)?;
                id.lock().owns_recv_cq = true;
            }
            attr.comp_mask |= IBV_SRQ_INIT_ATTR_CQ;
        }
    }
    // SAFETY: the identifier is alive, and the objects passed to the library were checked or
    // created above. The library checks the rest.
    unsafe {
        let c = &mut *id.c();
        if attr.srq_type == IBV_SRQT_XRC && own_cq.is_null() && id.lock().owns_recv_cq {
            c.recv_cq = attr.cq;
            c.recv_cq_channel = (*attr.cq).channel;
        }
        let srq = create_srq_ex(context.handle(), attr);
        if srq.is_null() {
            let errno = Errno::last();
            if own_cq.is_null() {
                destroy_cqs(id);
            }
            return Err(errno);
        }
        c.srq = srq;
        c.pd = attr.pd;
    }
    Ok(())
}

/// `rdma_destroy_srq(3)`.
pub(crate) unsafe extern "C" fn rdma_destroy_srq(id: *mut rdma_cm_id) {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    if let Ok(id) = unsafe { id_of(id) } {
        // SAFETY: the identifier is alive and owns its queue.
        unsafe {
            let srq = mem::replace(&mut (*id.c()).srq, ptr::null_mut());
            if srq.is_null() {
                return;
            }
            ibv_destroy_srq(srq);
            // The completion queues may still be used by a queue pair.
            if (*id.c()).qp.is_null() || (*id.c()).qp_type == IBV_QPT_XRC_RECV {
                destroy_cqs(id);
            }
        }
    }
}
