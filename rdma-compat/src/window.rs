//! Memory windows, changes of regions, and null regions.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

use riser_rdma_core_sys::bindings::*;
use riser_transport::rdma_core::convert::send_flags_of;
use riser_transport::verbs::{
    Access, Handle, MrAdvice, MrChange, MrId, MwBind, MwId, MwType, RKey, SendOp, SendWr,
    Verbs as _, VerbsError, WrId,
};

use crate::context::{Context, check_same};
use crate::domain::Pd;
use crate::errno::{Errno, number, pointer};
use crate::memory::{Mr, check_range, foreign, hand_out, rights_of};
use crate::object::{Ref, kind};
use crate::qp::Qp;
use crate::sges::read_sges;

/// A memory window.
pub(crate) struct Mw {
    context: Ref<Context>,
    id: MwId,
}

kind!(Mw, ibv_mw, b"mwin");

/// Results of `ibv_rereg_mr(3)` if the request is rejected by this function, or by the device.
const REREG_INPUT: c_int = -1;
const REREG_COMMAND: c_int = -4;

/// `ibv_rereg_mr(3)`.
pub(crate) unsafe extern "C" fn ibv_rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    let flags = flags as c_uint;
    let moves = flags & IBV_REREG_MR_CHANGE_TRANSLATION != 0;
    if flags & !IBV_REREG_MR_FLAGS_SUPPORTED != 0 || (moves && (length == 0 || addr.is_null())) {
        Errno::INVALID.set();
        return REREG_INPUT;
    }
    // SAFETY: the program passes valid pointers, as required by the manual page.
    match unsafe { rereg_mr(mr, flags, pd, addr, length, access as c_uint) } {
        Ok(()) => 0,
        Err(errno) => {
            errno.set();
            REREG_COMMAND
        }
    }
}

/// Changes a region and the program's structure.
///
/// # Safety
/// The program must pass valid pointers for the given `flags`, as required by the manual page.
unsafe fn rereg_mr(
    mr: *mut ibv_mr,
    flags: c_uint,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_uint,
) -> Result<(), Errno> {
    // SAFETY: guaranteed by the caller.
    let ours = unsafe { Ref::<Mr>::get(mr) }?;
    let has = |flag| flags & flag != 0;
    let domain = match has(IBV_REREG_MR_CHANGE_PD) {
        true => {
            // SAFETY: guaranteed by the caller.
            let pd = unsafe { Ref::<Pd>::get(pd) }?;
            check_same(ours.context, pd.context)?;
            Some(pd.id)
        }
        false => None,
    };
    let rights = match has(IBV_REREG_MR_CHANGE_ACCESS) {
        true => Some(rights_of(access)?),
        false => None,
    };
    let current = || ours.context.lock().nic.query_mr(ours.id);
    let range = match (has(IBV_REREG_MR_CHANGE_TRANSLATION), rights) {
        (true, rights) => {
            let rights = rights.map_or_else(|| current().map(|attr| attr.access), Ok)?;
            // SAFETY: the program keeps the range mapped while it is registered.
            Some(unsafe { foreign(addr, length, rights) }?)
        }
        (false, Some(rights)) => {
            // SAFETY: the region is owned by the program.
            let (addr, length) = unsafe { ((*mr).addr, (*mr).length) };
            // The memory of an imported region has no address here.
            if !addr.is_null() {
                check_range(addr, length, rights)?;
            }
            None
        }
        (false, None) => None,
    };
    let range = range.map(|memory| memory.whole());
    let change = MrChange {
        translation: range.as_ref().map(|range| (range, range.addr())),
        pd: domain,
        access: rights,
    };
    let changed = ours.context.lock().nic.rereg_mr(ours.id, &change)?;
    // SAFETY: the region is owned by the program, which must not change it in another thread.
    unsafe {
        if has(IBV_REREG_MR_CHANGE_PD) {
            (*mr).pd = pd;
        }
        if has(IBV_REREG_MR_CHANGE_TRANSLATION) {
            (*mr).addr = addr;
            (*mr).length = length;
        }
        (*mr).lkey = changed.lkey.0;
        (*mr).rkey = changed.rkey.0;
    }
    Ok(())
}

/// `ibv_alloc_null_mr(3)`.
pub(crate) unsafe extern "C" fn alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    pointer(unsafe { Ref::<Pd>::get(pd) }.and_then(|pd| {
        let mr = pd.context.lock().nic.alloc_null_mr(pd.id)?;
        Ok(hand_out(pd, &mr, ptr::null_mut(), None).handle())
    }))
}

/// `ibv_advise_mr(3)`.
pub(crate) unsafe extern "C" fn advise_mr(
    pd: *mut ibv_pd,
    advice: ib_uverbs_advise_mr_advice,
    flags: u32,
    list: *mut ibv_sge,
    count: u32,
) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    number(unsafe { Ref::<Pd>::get(pd) }.and_then(|pd| {
        let advice = match advice {
            IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH | IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT => {
                MrAdvice::Prefetch
            }
            IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE => MrAdvice::PrefetchWrite,
            _ => return Err(Errno::UNSUPPORTED),
        };
        // The flush flag has no effect, because the advice is always executed before the call
        // returns.
        if flags & !IB_UVERBS_ADVISE_MR_FLAG_FLUSH != 0 || count == 0 || list.is_null() {
            return Err(Errno::INVALID);
        }
        // SAFETY: the program passes a valid list.
        let mut list = unsafe { read_sges(list, count as usize) };
        let mut locked = pd.context.lock();
        let result = list.try_for_each(|sge| locked.nic.advise_mr(pd.id, advice, &[sge]));
        result.map_err(|error| match error {
            VerbsError::InvalidHandle(_) => Errno(libc::ENOENT),
            VerbsError::InvalidAccess(_) => Errno(libc::EPERM),
            VerbsError::InvalidParameter(_) => Errno(libc::EFAULT),
            other => other.into(),
        })
    }))
}

/// `ibv_alloc_mw(3)`.
pub(crate) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, mw_type: ibv_mw_type) -> *mut ibv_mw {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    pointer(unsafe { Ref::<Pd>::get(pd) }.and_then(|pd| {
        let ours = match mw_type {
            IBV_MW_TYPE_1 => MwType::Type1,
            IBV_MW_TYPE_2 => MwType::Type2,
            _ => return Err(Errno::INVALID),
        };
        let mw = pd.context.lock().nic.alloc_mw(pd.id, ours)?;
        let c = ibv_mw {
            context: pd.context.handle(),
            pd: pd.handle(),
            rkey: mw.rkey.0,
            handle: mw.id.0.index() as u32,
            type_: mw_type,
        };
        let context = pd.context;
        Ok(Ref::new(c, Mw { context, id: mw.id }).handle())
    }))
}

/// `ibv_dealloc_mw(3)`.
pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    number(unsafe { Ref::<Mw>::get(mw) }.and_then(|mw| {
        mw.context.lock().nic.dealloc_mw(mw.id)?;
        mw.retire()
    }))
}

/// `ibv_bind_mw(3)`: binds a type 1 window, whose next key is chosen by the library.
pub(crate) unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp,
    mw: *mut ibv_mw,
    bind: *mut ibv_mw_bind,
) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    number(unsafe { Ref::<Qp>::get(qp) }.and_then(|qp| {
        // SAFETY: as above.
        let theirs = unsafe { bind.as_ref() }.ok_or(Errno::INVALID)?;
        // SAFETY: as above.
        let rkey = unsafe { RKey((*Ref::<Mw>::get(mw)?.c()).rkey).next() };
        // SAFETY: as above.
        let bind = unsafe { binding(&qp, mw, IBV_MW_TYPE_1, rkey, &theirs.bind_info) }?;
        let wr = SendWr {
            wr_id: WrId(theirs.wr_id),
            flags: send_flags_of(theirs.send_flags),
            ..SendWr::new(0, SendOp::BindMw(bind), &[])
        };
        let mut locked = qp.context.lock();
        let posted = locked.nic.post_send(qp.id, &[wr]);
        locked.transmit_soon();
        drop(locked);
        posted.map_err(|error| Errno::from(error.reason))?;
        // SAFETY: the window is owned by the program, which must not bind it in another thread.
        unsafe { (*mw).rkey = rkey.0 };
        Ok(())
    }))
}

/// Converts a program's bind request for a window of this type. Type 1 windows can only be bound
/// using `ibv_bind_mw(3)`.
///
/// # Errors
/// Returns `EINVAL` for invalid windows or regions, a window of the wrong type, or unknown rights.
///
/// # Safety
/// The program must pass valid pointers, as required by the manual page.
pub(crate) unsafe fn binding(
    qp: &Qp,
    mw: *mut ibv_mw,
    mw_type: ibv_mw_type,
    rkey: RKey,
    info: &ibv_mw_bind_info,
) -> Result<MwBind, Errno> {
    // Unbinding a window does not need a region.
    const NONE: MrId = MrId(Handle::new(0, 0));
    // SAFETY: guaranteed by the caller.
    let (mw, mr) = unsafe {
        let mr = match info.mr.is_null() {
            true => NONE,
            false => {
                let mr = Ref::<Mr>::get(info.mr)?;
                check_same(qp.context, mr.context)?;
                mr.id
            }
        };
        let mw = Ref::<Mw>::get(mw)?;
        check_same(qp.context, mw.context)?;
        if (*mw.c()).type_ != mw_type {
            return Err(Errno::INVALID);
        }
        (mw.id, mr)
    };
    Ok(MwBind {
        mw,
        key: rkey,
        mr,
        addr: info.addr,
        length: info.length,
        // Programs also pass local rights, which windows do not have.
        access: rights_of(info.mw_access_flags)? & (Access::REMOTE | Access::ZERO_BASED),
    })
}
