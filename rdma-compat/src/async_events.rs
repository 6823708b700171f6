//! Asynchronous events, as returned to programs.

use std::ffi::c_int;
use std::mem::zeroed;

use riser_rdma_core_sys::bindings::*;
use riser_transport::verbs::AsyncEvent;

use crate::cancel::{read_count, step};
use crate::context::{Event, context_of};
use crate::cq::Cq;
use crate::errno::{Errno, minus};
use crate::object::Ref;
use crate::qp::{Qp, Srq};

/// `ibv_get_async_event(3)`.
pub(crate) unsafe extern "C-unwind" fn ibv_get_async_event(
    context: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    let fd = step(|| unsafe { context_of(context) }.map(|context| context.events.raw_fd()));
    let Ok(fd) = fd else {
        return step(|| minus(Err(Errno::INVALID)));
    };
    loop {
        // SAFETY: the program owns the context, and no frame has anything to drop.
        let error = unsafe { read_count(fd) };
        // SAFETY: the program passes valid pointers, as required by the manual page.
        if let Some(result) = step(|| unsafe { take_event(context, error, event) }) {
            return result;
        }
    }
}

/// Returns the next event to the program. Returns `None` if it must wait again.
///
/// # Safety
/// The program must pass valid pointers, as required by the manual page.
unsafe fn take_event(
    context: *mut ibv_context,
    error: c_int,
    event: *mut ibv_async_event,
) -> Option<c_int> {
    if error != 0 {
        return Some(minus(Err(Errno(error))));
    }
    // SAFETY: guaranteed by the caller.
    let context = match unsafe { context_of(context) } {
        Ok(context) => context,
        Err(errno) => return Some(minus(Err(errno))),
    };
    let next = context.events.pop(|event| {
        if let Some(subject) = event.object {
            subject.unacknowledged.add();
        }
    })?;
    // SAFETY: the program provides memory for the event.
    unsafe { event.write(async_event(next)) };
    Some(0)
}

fn async_event(event: Event) -> ibv_async_event {
    // SAFETY: all zeroes is valid for this plain C structure.
    let mut theirs: ibv_async_event = unsafe { zeroed() };
    match event.object {
        Some(subject) => {
            // All members of the union are pointers at the same offset.
            theirs.element.cq = subject.handle.cast();
        }
        None => theirs.element.port_num = 1,
    }
    theirs.event_type = match event.kind {
        AsyncEvent::CqError(_) => IBV_EVENT_CQ_ERR,
        AsyncEvent::QpFatal(_) => IBV_EVENT_QP_FATAL,
        AsyncEvent::QpReqError(_) => IBV_EVENT_QP_REQ_ERR,
        AsyncEvent::QpAccessError(_) => IBV_EVENT_QP_ACCESS_ERR,
        AsyncEvent::CommEstablished(_) => IBV_EVENT_COMM_EST,
        AsyncEvent::SqDrained(_) => IBV_EVENT_SQ_DRAINED,
        AsyncEvent::PathMig(_) => IBV_EVENT_PATH_MIG,
        AsyncEvent::PathMigError(_) => IBV_EVENT_PATH_MIG_ERR,
        AsyncEvent::QpLastWqeReached(_) => IBV_EVENT_QP_LAST_WQE_REACHED,
        AsyncEvent::SrqLimitReached(_) => IBV_EVENT_SRQ_LIMIT_REACHED,
        AsyncEvent::PortActive(_) => IBV_EVENT_PORT_ACTIVE,
        AsyncEvent::PortError(_) => IBV_EVENT_PORT_ERR,
        AsyncEvent::GidChange(_) => IBV_EVENT_GID_CHANGE,
        AsyncEvent::DeviceFatal => IBV_EVENT_DEVICE_FATAL,
    };
    theirs
}

/// `ibv_ack_async_event(3)`.
pub(crate) unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: the program passes a valid pointer, as required by the manual page, and the type
    // determines the active member of the union. If the object was destroyed, it has no
    // unacknowledged events.
    unsafe {
        match (*event).event_type {
            IBV_EVENT_CQ_ERR => {
                if let Ok(cq) = Ref::<Cq>::get((*event).element.cq.cast()) {
                    cq.async_events.acknowledge(1);
                }
            }
            IBV_EVENT_QP_FATAL
            | IBV_EVENT_QP_REQ_ERR
            | IBV_EVENT_QP_ACCESS_ERR
            | IBV_EVENT_COMM_EST
            | IBV_EVENT_SQ_DRAINED
            | IBV_EVENT_PATH_MIG
            | IBV_EVENT_PATH_MIG_ERR
            | IBV_EVENT_QP_LAST_WQE_REACHED => {
                if let Ok(qp) = Ref::<Qp>::get((*event).element.qp.cast()) {
                    qp.async_events.acknowledge(1);
                }
            }
            IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => {
                if let Ok(srq) = Ref::<Srq>::get((*event).element.srq) {
                    srq.async_events.acknowledge(1);
                }
            }
            _ => {}
        }
    }
}
