//! Extended completion queues: completions are polled one by one, and read using function calls.

use std::ffi::{c_int, c_uint};

use riser_rdma_core_sys::bindings::*;

use crate::context::context_of;
use crate::cq::{Cq, CqParams, Shown, convert, create};
use crate::domain::Pd;
use crate::errno::{Errno, pointer};
use crate::object::Ref;

/// Flags of `enum ibv_create_cq_attr_flags`.
const SINGLE_THREADED: u32 = 1;
const IGNORE_OVERRUN: u32 = 2;

/// Supported fields of completions. All other fields belong to raw packets and tag matching.
const SUPPORTED: u64 = (IBV_WC_EX_WITH_BYTE_LEN
    | IBV_WC_EX_WITH_IMM
    | IBV_WC_EX_WITH_QP_NUM
    | IBV_WC_EX_WITH_SRC_QP
    | IBV_WC_EX_WITH_SLID
    | IBV_WC_EX_WITH_SL
    | IBV_WC_EX_WITH_DLID_PATH_BITS
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK) as u64;

const TIMES: u64 =
    (IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK) as u64;

/// `ibv_create_cq_ex(3)`.
pub(crate) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    pointer(unsafe { context_of(context) }.and_then(|context| {
        // SAFETY: as above.
        let attr = unsafe { attr.as_ref() }.ok_or(Errno::INVALID)?;
        check(attr)?;
        if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_PD != 0 {
            // SAFETY: as above.
            let pd = unsafe { Ref::<Pd>::get(attr.parent_domain) }?;
            if pd.context != context {
                return Err(Errno::INVALID);
            }
        }
        let params = CqParams {
            entries: attr.cqe,
            cq_context: attr.cq_context,
            channel: attr.channel,
            vector: attr.comp_vector,
            is_timed: attr.wc_flags & TIMES != 0,
        };
        // SAFETY: as above.
        let cq = unsafe { create(context, &params) }?;
        let shown = cq.c();
        // SAFETY: the queue is alive, and the program has no access to it yet.
        unsafe { set_calls(&mut (*shown).ex) };
        Ok(shown.cast())
    }))
}

/// Rejects attributes that are not supported by the device.
fn check(attr: &ibv_cq_init_attr_ex) -> Result<(), Errno> {
    if attr.comp_mask & !(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD) != 0 {
        return Err(Errno::INVALID);
    }
    if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 {
        // The device always reports overruns.
        if attr.flags & IGNORE_OVERRUN != 0 {
            return Err(Errno::UNSUPPORTED);
        }
        // The device has a single lock, so this flag makes no difference.
        if attr.flags & !SINGLE_THREADED != 0 {
            return Err(Errno::INVALID);
        }
    }
    if attr.wc_flags & !SUPPORTED != 0 {
        return Err(Errno::UNSUPPORTED);
    }
    Ok(())
}

fn set_calls(cq: &mut ibv_cq_ex) {
    cq.start_poll = Some(start_poll);
    cq.next_poll = Some(next_poll);
    cq.end_poll = Some(end_poll);
    cq.read_opcode = Some(read_opcode);
    cq.read_vendor_err = Some(read_vendor_err);
    cq.read_byte_len = Some(read_byte_len);
    cq.read_imm_data = Some(read_imm_data);
    cq.read_qp_num = Some(read_qp_num);
    cq.read_src_qp = Some(read_src_qp);
    cq.read_wc_flags = Some(read_wc_flags);
    cq.read_slid = Some(read_slid);
    cq.read_sl = Some(read_sl);
    cq.read_dlid_path_bits = Some(read_dlid_path_bits);
    cq.read_completion_ts = Some(read_completion_ts);
    cq.read_completion_wallclock_ns = Some(read_completion_wallclock_ns);
}

/// Converts the result of a poll. An empty queue is not an error, so `errno` is not set.
fn polled(result: Result<(), Errno>) -> c_int {
    result.map_or_else(|errno| errno.0, |()| 0)
}

/// `ibv_start_poll`: starts a batch with its first completion.
unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    polled(unsafe { Ref::<Cq>::get(cq.cast()) }.and_then(|cq| {
        // SAFETY: as above. No bit of the mask is supported.
        if unsafe { attr.as_ref() }.is_some_and(|attr| attr.comp_mask != 0) {
            return Err(Errno::INVALID);
        }
        cq.polling.acquire()?;
        step(cq).inspect_err(|_| cq.polling.release())
    }))
}

/// `ibv_next_poll`: advances to the next completion.
unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    polled(unsafe { Ref::<Cq>::get(cq.cast()) }.and_then(|cq| {
        if !cq.polling.is_taken() {
            return Err(Errno::INVALID);
        }
        step(cq)
    }))
}

/// `ibv_end_poll`: finishes a batch.
unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    if let Ok(cq) = unsafe { Ref::<Cq>::get(cq.cast()) } {
        cq.polling.release();
    }
}

/// Advances to the next completion.
///
/// # Errors
/// Returns `ENOENT` if the queue is empty. In this case, the current completion does not change.
fn step(cq: Ref<Cq>) -> Result<(), Errno> {
    const NONE: Errno = Errno(libc::ENOENT);
    let shown = cq.c();
    let mut locked = cq.context.lock();
    let wc = if cq.is_timed {
        let timed = locked.poll_cq_timed(cq.id)?.ok_or(NONE)?;
        // SAFETY: the queue is alive, and this thread owns it during the batch.
        unsafe {
            (*shown).device_time = timed.device_time;
            (*shown).wall_time = timed.wall_time.as_nanos() as u64;
        }
        convert(&timed.completion)
    } else {
        convert(locked.poll_cq(cq.id, 1)?.first().ok_or(NONE)?)
    };
    drop(locked);
    // SAFETY: as above.
    unsafe {
        (*shown).ex.wr_id = wc.wr_id;
        (*shown).ex.status = wc.status;
        (*shown).current = wc;
    }
    Ok(())
}

/// Reads a field of the current completion. Returns 0 if the queue was destroyed.
///
/// # Safety
/// Same as for [`Ref::get`].
unsafe fn read<T: Default>(cq: *mut ibv_cq_ex, member: impl FnOnce(&Shown) -> T) -> T {
    // SAFETY: guaranteed by the caller. Only the polling thread writes to it.
    match unsafe { Ref::<Cq>::get(cq.cast()) } {
        // SAFETY: as above.
        Ok(cq) => member(unsafe { &*cq.c() }),
        Err(_) => T::default(),
    }
}

/// Declares functions that read a field of the current completion.
macro_rules! readers {
    ($($(#[$doc:meta])* $name:ident() -> $ty:ty { |$shown:ident| $value:expr })*) => {
        $(
            $(#[$doc])*
            unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $ty {
                // SAFETY: the program passes a valid pointer, as required by the manual page.
                unsafe { read(cq, |$shown| $value) }
            }
        )*
    };
}

readers! {
    /// `ibv_wc_read_opcode`.
    read_opcode() -> ibv_wc_opcode { |shown| shown.current.opcode }
    /// `ibv_wc_read_vendor_err`.
    read_vendor_err() -> u32 { |shown| shown.current.vendor_err }
    /// `ibv_wc_read_byte_len`.
    read_byte_len() -> u32 { |shown| shown.current.byte_len }
    /// `ibv_wc_read_imm_data` and `ibv_wc_read_invalidated_rkey`: a completion has one of them.
    /// Both members of the union are integers of the same size.
    read_imm_data() -> __be32 { |shown| shown.current.__bindgen_anon_1.imm_data }
    /// `ibv_wc_read_qp_num`.
    read_qp_num() -> u32 { |shown| shown.current.qp_num }
    /// `ibv_wc_read_src_qp`.
    read_src_qp() -> u32 { |shown| shown.current.src_qp }
    /// `ibv_wc_read_wc_flags`.
    read_wc_flags() -> c_uint { |shown| shown.current.wc_flags }
    /// `ibv_wc_read_slid`: not used on Ethernet.
    read_slid() -> u32 { |shown| shown.current.slid.into() }
    /// `ibv_wc_read_sl`.
    read_sl() -> u8 { |shown| shown.current.sl }
    /// `ibv_wc_read_dlid_path_bits`: not used on Ethernet.
    read_dlid_path_bits() -> u8 { |shown| shown.current.dlid_path_bits }
    /// `ibv_wc_read_completion_ts`: when the completion was added to the queue, using the device's
    /// clock.
    read_completion_ts() -> u64 { |shown| shown.device_time }
    /// `ibv_wc_read_completion_wallclock_ns`: the same, using wall-clock time.
    read_completion_wallclock_ns() -> u64 { |shown| shown.wall_time }
}
