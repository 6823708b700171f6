//! Queue pairs and receive queues of identifiers.

use std::ffi::c_int;
use std::mem;
use std::ptr;

use riser_rdma_core_sys::bindings::*;
use riser_transport::verbs::RdmaCm as _;

use super::{Id, id_of, shared};
use crate::context::check_same;
use crate::cq::*;
use crate::domain::Pd;
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
    // SAFETY: the program's pointers, as the manual page demands.
    minus(unsafe { id_of(id) }.and_then(|id| {
        let pd = (!pd.is_null())
            // SAFETY: as above.
            .then(|| unsafe { Ref::<Pd>::get(pd) })
            .transpose()?;
        // SAFETY: as above.
        create_qp(
            id,
            pd,
            unsafe { attr.as_mut() }.ok_or(Errno::INVALID)?,
            ExtraAttr::default(),
        )
    }))
}

/// `rdma_create_qp_ex(3)`.
pub(crate) unsafe extern "C" fn rdma_create_qp_ex(
    id: *mut rdma_cm_id,
    attr: *mut ibv_qp_init_attr_ex,
) -> c_int {
    // SAFETY: the program's pointers, as the manual page demands.
    minus(unsafe { id_of(id) }.and_then(|id| {
        // SAFETY: as above.
        let attr = unsafe { attr.as_mut() }.ok_or(Errno::INVALID)?;
        let extra = extra_attr(attr)?;
        let has_pd = attr.comp_mask & IBV_QP_INIT_ATTR_PD != 0 && !attr.pd.is_null();
        let pd = has_pd
            // SAFETY: as above.
            .then(|| unsafe { Ref::<Pd>::get(attr.pd) })
            .transpose()?;
        let mut plain = plain_attr(attr);
        create_qp(id, pd, &mut plain, extra)?;
        attr.cap = plain.cap;
        Ok(())
    }))
}

/// Creates a queue pair for an identifier, with completion queues of its own where it is given none.
pub(super) fn create_qp(
    id: Ref<Id>,
    pd: Option<Ref<Pd>>,
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
                // SAFETY: the identifier's own.
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
    make_cqs(id, attr)?;
    let qp = create_qp_by(pd, attr, extra, |nic, init| {
        Ok(nic.create_cm_qp(device_id, init)?)
    });
    match qp {
        Ok(qp) => {
            set_calls(qp);
            // SAFETY: the identifier and its queue pair are alive.
            unsafe {
                (*qp.handle()).state = match attr.qp_type {
                    IBV_QPT_UD => IBV_QPS_RTS,
                    _ => IBV_QPS_INIT,
                };
                (*c).qp = qp.handle();
                (*c).pd = pd.handle();
                (*c).send_cq = attr.send_cq;
                (*c).recv_cq = attr.recv_cq;
                (*c).send_cq_channel = (*attr.send_cq).channel;
                (*c).recv_cq_channel = (*attr.recv_cq).channel;
            }
            Ok(())
        }
        Err(errno) => {
            destroy_cqs(id);
            Err(errno)
        }
    }
}

/// Makes the completion queues that a program leaves to the library, each with a channel.
fn make_cqs(id: Ref<Id>, attr: &mut ibv_qp_init_attr) -> Result<(), Errno> {
    let make = |entries: u32| {
        let (context, _) = id.link()?;
        // SAFETY: the pointers are the library's own.
        unsafe {
            let channel = ibv_create_comp_channel(context.handle());
            if channel.is_null() {
                return Err(Errno::last());
            }
            let entries = entries.max(1) as c_int;
            let cq = ibv_create_cq(context.handle(), entries, id.c().cast(), channel, 0);
            if cq.is_null() {
                let errno = Errno::last();
                ibv_destroy_comp_channel(channel);
                return Err(errno);
            }
            Ok(cq)
        }
    };
    if attr.send_cq.is_null() {
        attr.send_cq = make(attr.cap.max_send_wr)?;
        id.lock().owns_send_cq = true;
        // SAFETY: the identifier is alive.
        unsafe { (*id.c()).send_cq = attr.send_cq };
    }
    if attr.recv_cq.is_null() {
        let made = make(attr.cap.max_recv_wr);
        attr.recv_cq = made.inspect_err(|_| destroy_cqs(id))?;
        id.lock().owns_recv_cq = true;
        // SAFETY: the identifier is alive.
        unsafe { (*id.c()).recv_cq = attr.recv_cq };
    }
    Ok(())
}

/// Destroys the completion queues that were made with the queue pair.
fn destroy_cqs(id: Ref<Id>) {
    let (send, recv) = {
        let mut state = id.lock();
        (
            mem::take(&mut state.owns_send_cq),
            mem::take(&mut state.owns_recv_cq),
        )
    };
    // SAFETY: the identifier is alive, and has what was made for it.
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
    // SAFETY: the program's pointer, as the manual page demands.
    let Ok(id) = (unsafe { id_of(id) }) else {
        return;
    };
    // SAFETY: the identifier is alive.
    let qp = unsafe { mem::replace(&mut (*id.c()).qp, ptr::null_mut()) };
    if !qp.is_null() {
        // SAFETY: the identifier's own.
        unsafe { ibv_destroy_qp(qp) };
    }
    destroy_cqs(id);
}

/// `rdma_create_srq(3)`.
pub(crate) unsafe extern "C" fn rdma_create_srq(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    attr: *mut ibv_srq_init_attr,
) -> c_int {
    // SAFETY: the program's pointers, as the manual page demands.
    minus(unsafe { id_of(id) }.and_then(|id| {
        let (context, _) = id.link()?;
        let pd = match pd.is_null() {
            true => shared(context.device)?.pd,
            // SAFETY: as above.
            false => unsafe { Ref::<Pd>::get(pd) }?,
        };
        check_same(context, pd.context)?;
        // SAFETY: as above; the identifier is alive.
        unsafe {
            let srq = ibv_create_srq(pd.handle(), attr);
            if srq.is_null() {
                return Err(Errno::last());
            }
            (*id.c()).srq = srq;
            (*id.c()).pd = pd.handle();
        }
        Ok(())
    }))
}

/// `rdma_destroy_srq(3)`.
pub(crate) unsafe extern "C" fn rdma_destroy_srq(id: *mut rdma_cm_id) {
    // SAFETY: the program's pointer, as the manual page demands.
    if let Ok(id) = unsafe { id_of(id) } {
        // SAFETY: the identifier is alive, and its queue its own.
        unsafe {
            let srq = mem::replace(&mut (*id.c()).srq, ptr::null_mut());
            if !srq.is_null() {
                ibv_destroy_srq(srq);
            }
        }
    }
}
