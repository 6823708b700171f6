//! The data path: calls through the operation table of an opened device.
//!
//! Each function does what the inline function of the same name in `infiniband/verbs.h` does.

use std::ffi::c_int;

use crate::bindings::*;

/// The answer where a device lacks an operation.
const UNSUPPORTED: c_int = libc::EOPNOTSUPP;

/// Posts a chain of send requests; on failure `bad` points at the first that was not posted.
/// Answers 0 or `errno`.
///
/// # Safety
/// `qp` is a live queue pair, `wr` a chain whose scatter lists are valid for the call, `bad`
/// writable.
#[inline]
pub unsafe fn ibv_post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: a live queue pair points at its context.
    match unsafe { (*(*qp).context).ops.post_send } {
        // SAFETY: as the caller promises.
        Some(f) => unsafe { f(qp, wr, bad) },
        None => UNSUPPORTED,
    }
}

/// Posts a chain of receives; as [`ibv_post_send`].
///
/// # Safety
/// As [`ibv_post_send`].
#[inline]
pub unsafe fn ibv_post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a live queue pair points at its context.
    match unsafe { (*(*qp).context).ops.post_recv } {
        // SAFETY: as the caller promises.
        Some(f) => unsafe { f(qp, wr, bad) },
        None => UNSUPPORTED,
    }
}

/// Posts a chain of receives to a shared receive queue; as [`ibv_post_send`].
///
/// # Safety
/// `srq` is live; the rest as [`ibv_post_send`].
#[inline]
pub unsafe fn ibv_post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a live shared receive queue points at its context.
    match unsafe { (*(*srq).context).ops.post_srq_recv } {
        // SAFETY: as the caller promises.
        Some(f) => unsafe { f(srq, wr, bad) },
        None => UNSUPPORTED,
    }
}

/// Takes up to `entries` completions; answers how many, or a negative number.
///
/// # Safety
/// `cq` is live and `wc` has room for `entries` completions.
#[inline]
pub unsafe fn ibv_poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: a live completion queue points at its context.
    match unsafe { (*(*cq).context).ops.poll_cq } {
        // SAFETY: as the caller promises.
        Some(f) => unsafe { f(cq, entries, wc) },
        None => -UNSUPPORTED,
    }
}

/// Arms a completion queue. Answers 0 or `errno`.
///
/// # Safety
/// `cq` is live and was created with a completion channel.
#[inline]
pub unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: bool) -> c_int {
    // SAFETY: a live completion queue points at its context.
    match unsafe { (*(*cq).context).ops.req_notify_cq } {
        // SAFETY: as the caller promises.
        Some(f) => unsafe { f(cq, c_int::from(solicited_only)) },
        None => UNSUPPORTED,
    }
}

/// Allocates a memory window; null, with `errno` unset, where the device has none.
///
/// # Safety
/// `pd` is live.
pub unsafe fn ibv_alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    // SAFETY: a live protection domain points at its context.
    match unsafe { (*(*pd).context).ops.alloc_mw } {
        // SAFETY: as the caller promises.
        Some(f) => unsafe { f(pd, kind) },
        None => std::ptr::null_mut(),
    }
}

/// Frees a memory window. Answers 0 or `errno`.
///
/// # Safety
/// `mw` came from [`ibv_alloc_mw`] and is not used again.
pub unsafe fn ibv_dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: a live window points at its context.
    match unsafe { (*(*mw).context).ops.dealloc_mw } {
        // SAFETY: as the caller promises.
        Some(f) => unsafe { f(mw) },
        None => UNSUPPORTED,
    }
}
