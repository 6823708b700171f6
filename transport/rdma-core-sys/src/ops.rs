//! Calls via the operation tables of an opened device: the data path, and functions that were added
//! to verbs after the first table.
//!
//! Each function is equivalent to the inline function of the same name in `infiniband/verbs.h`. If
//! an operation is not supported by the library or the device, the function returns `EOPNOTSUPP`,
//! or a null pointer with this error in `errno`.

use std::ffi::c_int;
use std::mem::{offset_of, size_of};
use std::ptr;

use crate::bindings::*;

/// Returned if the device does not support an operation.
const UNSUPPORTED: c_int = libc::EOPNOTSUPP;

/// Posts a chain of send requests. On failure, `bad` points to the first request that was not
/// posted. Returns 0 or an `errno` value.
///
/// # Safety
/// `qp` must be a live queue pair, `wr` a chain whose scatter lists are valid during the call, and
/// `bad` must be writable.
#[inline]
pub unsafe fn ibv_post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: a live queue pair points to its context.
    match unsafe { (*(*qp).context).ops.post_send } {
        // SAFETY: guaranteed by the caller.
        Some(f) => unsafe { f(qp, wr, bad) },
        None => UNSUPPORTED,
    }
}

/// Posts a chain of receive requests, like [`ibv_post_send`].
///
/// # Safety
/// Same as for [`ibv_post_send`].
#[inline]
pub unsafe fn ibv_post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a live queue pair points to its context.
    match unsafe { (*(*qp).context).ops.post_recv } {
        // SAFETY: guaranteed by the caller.
        Some(f) => unsafe { f(qp, wr, bad) },
        None => UNSUPPORTED,
    }
}

/// Posts a chain of receive requests to a shared receive queue, like [`ibv_post_send`].
///
/// # Safety
/// `srq` must be live. The rest is the same as for [`ibv_post_send`].
#[inline]
pub unsafe fn ibv_post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a live shared receive queue points to its context.
    match unsafe { (*(*srq).context).ops.post_srq_recv } {
        // SAFETY: guaranteed by the caller.
        Some(f) => unsafe { f(srq, wr, bad) },
        None => UNSUPPORTED,
    }
}

/// Polls up to `entries` completions. Returns their number, or a negative number on error.
///
/// # Safety
/// `cq` must be live and `wc` must have room for `entries` completions.
#[inline]
pub unsafe fn ibv_poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: a live completion queue points to its context.
    match unsafe { (*(*cq).context).ops.poll_cq } {
        // SAFETY: guaranteed by the caller.
        Some(f) => unsafe { f(cq, entries, wc) },
        None => -UNSUPPORTED,
    }
}

/// Arms a completion queue. Returns 0 or an `errno` value.
///
/// # Safety
/// `cq` must be live and must have been created with a completion channel.
#[inline]
pub unsafe fn ibv_req_notify_cq(cq: *mut ibv_cq, solicited_only: bool) -> c_int {
    // SAFETY: a live completion queue points to its context.
    match unsafe { (*(*cq).context).ops.req_notify_cq } {
        // SAFETY: guaranteed by the caller.
        Some(f) => unsafe { f(cq, c_int::from(solicited_only)) },
        None => UNSUPPORTED,
    }
}

/// Sets `errno` and returns null.
fn unsupported<T>() -> *mut T {
    // SAFETY: the C library provides a location for each thread.
    unsafe { *libc::__errno_location() = UNSUPPORTED };
    ptr::null_mut()
}

/// Allocates a memory window. Returns null and sets `errno` on error.
///
/// # Safety
/// `pd` must be live.
pub unsafe fn ibv_alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    // SAFETY: a live protection domain points to its context.
    match unsafe { (*(*pd).context).ops.alloc_mw } {
        // SAFETY: guaranteed by the caller.
        Some(f) => unsafe { f(pd, kind) },
        None => unsupported(),
    }
}

/// Deallocates a memory window. Returns 0 or an `errno` value.
///
/// # Safety
/// `mw` must have been returned by [`ibv_alloc_mw`] and must not be used afterwards.
pub unsafe fn ibv_dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: a live window points to its context.
    match unsafe { (*(*mw).context).ops.dealloc_mw } {
        // SAFETY: guaranteed by the caller.
        Some(f) => unsafe { f(mw) },
        None => UNSUPPORTED,
    }
}

/// Posts a bind request for a type 1 window, which changes its key. Returns 0 or an `errno` value.
///
/// # Safety
/// `qp` and `mw` must be live, and so must be the region in `bind`, if any.
pub unsafe fn ibv_bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    // SAFETY: guaranteed by the caller. A live window points to its context.
    unsafe {
        let info = &(*bind).bind_info;
        if (*mw).type_ != IBV_MW_TYPE_1 || (info.mr.is_null() && (info.addr, info.length) != (0, 0))
        {
            return libc::EINVAL;
        }
        if !info.mr.is_null() && (*info.mr).pd != (*mw).pd {
            return libc::EPERM;
        }
        match (*(*mw).context).ops.bind_mw {
            Some(f) => f(qp, mw, bind),
            None => UNSUPPORTED,
        }
    }
}

/// Returns the extended table that precedes a context, if it exists and includes the member at this
/// offset. New members are added at the beginning of this table, and it contains its size.
///
/// # Safety
/// `context` must be live.
unsafe fn extended_table(context: *mut ibv_context, at: usize) -> Option<*mut verbs_context> {
    // SAFETY: guaranteed by the caller. A context with this marker is the last member of its table.
    unsafe {
        if (*context).abi_compat.addr() != usize::MAX {
            return None;
        }
        let table = context.byte_sub(offset_of!(verbs_context, context));
        let table = table.cast::<verbs_context>();
        ((*table).sz >= size_of::<verbs_context>() - at).then_some(table)
    }
}

/// Reads an operation from a context's extended table. Must be used in an unsafe block.
macro_rules! extended {
    ($context:expr, $name:ident) => {
        extended_table($context, offset_of!(verbs_context, $name))
            .and_then(|table| (&raw const (*table).$name).read())
    };
}

/// Declares functions that call an operation of the extended table and return 0 or an `errno`
/// value, or a pointer.
macro_rules! extended_calls {
    ($(
        $(#[$doc:meta])*
        $name:ident = $op:ident of $context:expr => ($($arg:ident: $ty:ty),*) -> $ret:ty, $absent:expr;
    )*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// The objects must be live and belong to the same context, and attributes must be valid
        /// during the call.
        pub unsafe fn $name($($arg: $ty),*) -> $ret {
            // SAFETY: guaranteed by the caller. A live object points to its context.
            unsafe {
                match extended!($context, $op) {
                    Some(f) => f($($arg),*),
                    None => $absent,
                }
            }
        }
    )*};
}

extended_calls! {
    /// Opens an XRC domain.
    ibv_open_xrcd = open_xrcd of context => (
        context: *mut ibv_context, attr: *mut ibv_xrcd_init_attr
    ) -> *mut ibv_xrcd, unsupported();
    /// Closes an XRC domain.
    ibv_close_xrcd = close_xrcd of (*xrcd).context => (xrcd: *mut ibv_xrcd) -> c_int, UNSUPPORTED;
    /// Creates a shared receive queue. Use `ibv_create_srq` if it only needs a protection domain.
    ibv_create_srq_ex = create_srq_ex of context => (
        context: *mut ibv_context, attr: *mut ibv_srq_init_attr_ex
    ) -> *mut ibv_srq, unsupported();
    /// Returns the number of a shared receive queue of an XRC domain.
    ibv_get_srq_num = get_srq_num of (*srq).context => (
        srq: *mut ibv_srq, number: *mut u32
    ) -> c_int, UNSUPPORTED;
    /// Creates a queue pair. Use `ibv_create_qp` if it only needs a protection domain.
    ibv_create_qp_ex = create_qp_ex of context => (
        context: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex
    ) -> *mut ibv_qp, unsupported();
    /// Creates an extended completion queue.
    ibv_create_cq_ex = create_cq_ex of context => (
        context: *mut ibv_context, attr: *mut ibv_cq_init_attr_ex
    ) -> *mut ibv_cq_ex, unsupported();
    /// Changes the moderation of a completion queue.
    ibv_modify_cq = modify_cq of (*cq).context => (
        cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr
    ) -> c_int, UNSUPPORTED;
    /// Limits the rate of a queue pair.
    ibv_modify_qp_rate_limit = modify_qp_rate_limit of (*qp).context => (
        qp: *mut ibv_qp, attr: *mut ibv_qp_rate_limit_attr
    ) -> c_int, UNSUPPORTED;
    /// Allocates a null region.
    ibv_alloc_null_mr = alloc_null_mr of (*pd).context => (pd: *mut ibv_pd) -> *mut ibv_mr,
        unsupported();
    /// Gives advice about ranges of regions.
    ibv_advise_mr = advise_mr of (*pd).context => (
        pd: *mut ibv_pd, advice: ib_uverbs_advise_mr_advice, flags: u32, list: *mut ibv_sge, count: u32
    ) -> c_int, UNSUPPORTED;
}

/// Queries attributes of the device that are not returned by `ibv_query_device`. Returns 0 or an
/// `errno` value.
///
/// # Safety
/// `context` must be live, and `attr` writable.
pub unsafe fn ibv_query_device_ex(
    context: *mut ibv_context,
    attr: *mut ibv_device_attr_ex,
) -> c_int {
    // SAFETY: guaranteed by the caller. There is no input.
    unsafe {
        match extended!(context, query_device_ex) {
            Some(f) => f(context, ptr::null(), attr, size_of::<ibv_device_attr_ex>()),
            None => UNSUPPORTED,
        }
    }
}

/// Starts a batch of an extended completion queue with its first completion. Returns 0, `ENOENT` if
/// the queue is empty, or another `errno` value. [`ibv_end_poll`] must only be called on success.
///
/// # Safety
/// `cq` must be live and extended, and must not have an active batch.
pub unsafe fn ibv_start_poll(cq: *mut ibv_cq_ex) -> c_int {
    let mut attr = ibv_poll_cq_attr::default();
    // SAFETY: guaranteed by the caller.
    unsafe {
        match (*cq).start_poll {
            Some(f) => f(cq, &raw mut attr),
            None => UNSUPPORTED,
        }
    }
}

/// Advances to the next completion of a batch, like [`ibv_start_poll`].
///
/// # Safety
/// `cq` must be live, and must have an active batch.
pub unsafe fn ibv_next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: guaranteed by the caller.
    match unsafe { (*cq).next_poll } {
        // SAFETY: guaranteed by the caller.
        Some(f) => unsafe { f(cq) },
        None => UNSUPPORTED,
    }
}

/// Finishes a batch.
///
/// # Safety
/// Same as for [`ibv_next_poll`].
pub unsafe fn ibv_end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: guaranteed by the caller.
    if let Some(f) = unsafe { (*cq).end_poll } {
        // SAFETY: guaranteed by the caller.
        unsafe { f(cq) };
    }
}

/// Declares functions that read a field of the current completion in a batch. They return 0 if the
/// queue does not support it.
macro_rules! readers {
    ($($(#[$doc:meta])* $name:ident = $op:ident -> $ty:ty;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// Same as for [`ibv_next_poll`].
        #[must_use]
        pub unsafe fn $name(cq: *mut ibv_cq_ex) -> $ty {
            // SAFETY: guaranteed by the caller.
            unsafe { (*cq).$op.map_or(0, |f| f(cq)) }
        }
    )*};
}

readers! {
    /// Returns the opcode of a successful completion.
    ibv_wc_read_opcode = read_opcode -> ibv_wc_opcode;
    /// Returns the vendor-specific error code.
    ibv_wc_read_vendor_err = read_vendor_err -> u32;
    /// Returns the length of the message in bytes.
    ibv_wc_read_byte_len = read_byte_len -> u32;
    /// Returns the immediate data in network byte order, or the invalidated key.
    ibv_wc_read_imm_data = read_imm_data -> u32;
    /// Returns the number of the queue pair.
    ibv_wc_read_qp_num = read_qp_num -> u32;
    /// Returns the number of the sender's queue pair.
    ibv_wc_read_src_qp = read_src_qp -> u32;
    /// Returns the flags of the completion.
    ibv_wc_read_wc_flags = read_wc_flags -> u32;
    /// Returns the completion time in ticks of the device's clock.
    ibv_wc_read_completion_ts = read_completion_ts -> u64;
    /// Returns the completion time in nanoseconds since the Unix epoch.
    ibv_wc_read_completion_wallclock_ns = read_completion_wallclock_ns -> u64;
}
