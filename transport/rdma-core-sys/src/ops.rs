//! Calls through the operation tables of an opened device: the data path, and what came to the verbs
//! after the first table.
//!
//! Each function does what the inline function of the same name in `infiniband/verbs.h` does. Where
//! library or device lack an operation, the answer is `EOPNOTSUPP`; a null pointer goes with that in
//! `errno`.

use std::ffi::c_int;
use std::mem::{offset_of, size_of};
use std::ptr;

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

/// Null, with the reason in `errno`.
fn unsupported<T>() -> *mut T {
    // SAFETY: the C library gives each thread a place for its error.
    unsafe { *libc::__errno_location() = UNSUPPORTED };
    ptr::null_mut()
}

/// Allocates a memory window; null with the reason in `errno`.
///
/// # Safety
/// `pd` is live.
pub unsafe fn ibv_alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    // SAFETY: a live protection domain points at its context.
    match unsafe { (*(*pd).context).ops.alloc_mw } {
        // SAFETY: as the caller promises.
        Some(f) => unsafe { f(pd, kind) },
        None => unsupported(),
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

/// Posts the binding of a window of type 1, which gives it its next key. Answers 0 or `errno`.
///
/// # Safety
/// `qp` and `mw` are live, and so is the region that `bind` names, if it names one.
pub unsafe fn ibv_bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    // SAFETY: as the caller promises; a live window points at its context.
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

/// The extended table that lies before a context, if it has one that reaches to the member at this
/// offset: it has grown at its beginning, and says its size.
///
/// # Safety
/// `context` is live.
unsafe fn extended_table(context: *mut ibv_context, at: usize) -> Option<*mut verbs_context> {
    // SAFETY: as the caller promises; a context with this mark is the last member of its table.
    unsafe {
        if (*context).abi_compat.addr() != usize::MAX {
            return None;
        }
        let table = context.byte_sub(offset_of!(verbs_context, context));
        let table = table.cast::<verbs_context>();
        ((*table).sz >= size_of::<verbs_context>() - at).then_some(table)
    }
}

/// An operation of a context's extended table, which lies in the caller's unsafe block.
macro_rules! extended {
    ($context:expr, $name:ident) => {
        extended_table($context, offset_of!(verbs_context, $name))
            .and_then(|table| (&raw const (*table).$name).read())
    };
}

/// Declares functions that call an operation of the extended table and answer 0 or `errno`, or a
/// pointer.
macro_rules! extended_calls {
    ($(
        $(#[$doc:meta])*
        $name:ident = $op:ident of $context:expr => ($($arg:ident: $ty:ty),*) -> $ret:ty, $absent:expr;
    )*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// The objects are live and of one context, and attributes valid for the call.
        pub unsafe fn $name($($arg: $ty),*) -> $ret {
            // SAFETY: as the caller promises; a live object points at its context.
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
    /// Creates a shared receive queue; one of a protection domain and of nothing else is made by
    /// `ibv_create_srq`.
    ibv_create_srq_ex = create_srq_ex of context => (
        context: *mut ibv_context, attr: *mut ibv_srq_init_attr_ex
    ) -> *mut ibv_srq, unsupported();
    /// Number of a shared receive queue of an XRC domain.
    ibv_get_srq_num = get_srq_num of (*srq).context => (
        srq: *mut ibv_srq, number: *mut u32
    ) -> c_int, UNSUPPORTED;
    /// Creates a queue pair; one of a protection domain and of nothing else is made by
    /// `ibv_create_qp`.
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

/// Queries what the device has beyond `ibv_query_device`. Answers 0 or `errno`.
///
/// # Safety
/// `context` is live, and `attr` writable.
pub unsafe fn ibv_query_device_ex(
    context: *mut ibv_context,
    attr: *mut ibv_device_attr_ex,
) -> c_int {
    // SAFETY: as the caller promises; there is no input.
    unsafe {
        match extended!(context, query_device_ex) {
            Some(f) => f(context, ptr::null(), attr, size_of::<ibv_device_attr_ex>()),
            None => UNSUPPORTED,
        }
    }
}

/// Begins a batch of an extended completion queue with its first completion. Answers 0, `ENOENT` where
/// there is none, or another `errno`; only a batch that has begun is ended.
///
/// # Safety
/// `cq` is live and extended, and has no batch under way.
pub unsafe fn ibv_start_poll(cq: *mut ibv_cq_ex) -> c_int {
    let mut attr = ibv_poll_cq_attr::default();
    // SAFETY: as the caller promises.
    unsafe {
        match (*cq).start_poll {
            Some(f) => f(cq, &raw mut attr),
            None => UNSUPPORTED,
        }
    }
}

/// Goes on to the next completion of a batch; as [`ibv_start_poll`].
///
/// # Safety
/// `cq` is live, and has a batch under way.
pub unsafe fn ibv_next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: as the caller promises.
    match unsafe { (*cq).next_poll } {
        // SAFETY: as the caller promises.
        Some(f) => unsafe { f(cq) },
        None => UNSUPPORTED,
    }
}

/// Ends a batch.
///
/// # Safety
/// As [`ibv_next_poll`].
pub unsafe fn ibv_end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: as the caller promises.
    if let Some(f) = unsafe { (*cq).end_poll } {
        // SAFETY: as the caller promises.
        unsafe { f(cq) };
    }
}

/// Declares functions that read a member of the completion at which a batch stands; 0 where the queue
/// does not have it.
macro_rules! readers {
    ($($(#[$doc:meta])* $name:ident = $op:ident -> $ty:ty;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// As [`ibv_next_poll`].
        #[must_use]
        pub unsafe fn $name(cq: *mut ibv_cq_ex) -> $ty {
            // SAFETY: as the caller promises.
            unsafe { (*cq).$op.map_or(0, |f| f(cq)) }
        }
    )*};
}

readers! {
    /// Opcode of a successful completion.
    ibv_wc_read_opcode = read_opcode -> ibv_wc_opcode;
    /// The vendor's detail of an error.
    ibv_wc_read_vendor_err = read_vendor_err -> u32;
    /// Length of the message, in bytes.
    ibv_wc_read_byte_len = read_byte_len -> u32;
    /// Immediate data in network byte order, or the key that was invalidated.
    ibv_wc_read_imm_data = read_imm_data -> u32;
    /// Number of the queue pair.
    ibv_wc_read_qp_num = read_qp_num -> u32;
    /// Number of the sender's queue pair.
    ibv_wc_read_src_qp = read_src_qp -> u32;
    /// Flags of the completion.
    ibv_wc_read_wc_flags = read_wc_flags -> u32;
    /// Time by the device's clock, in its ticks.
    ibv_wc_read_completion_ts = read_completion_ts -> u64;
    /// Time of day, in nanoseconds since the Unix epoch.
    ibv_wc_read_completion_wallclock_ns = read_completion_wallclock_ns -> u64;
}
