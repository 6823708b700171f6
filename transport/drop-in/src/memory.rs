//! Protection domains and memory regions.

use std::ffi::{c_int, c_uint, c_void};

use riser_memory::Memory;
use riser_rdma_core_sys::bindings::*;
use riser_transport::rdma_core::convert::access_of;
use riser_transport::verbs::{Access, MrId, PdId, Verbs as _};

use crate::context::{Context, context_of};
use crate::errno::{Errno, number, pointer};
use crate::object::{Ref, kind};

/// A protection domain.
pub(crate) struct Pd {
    pub(crate) context: Ref<Context>,
    pub(crate) id: PdId,
}

kind!(Pd, ibv_pd, b"pdom");

/// A memory region.
pub(crate) struct Mr {
    context: Ref<Context>,
    id: MrId,
}

kind!(Mr, ibv_mr, b"mreg");

/// Access flags that a region may have.
const KNOWN_ACCESS: c_uint = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC
    | IBV_ACCESS_ZERO_BASED
    | IBV_ACCESS_ON_DEMAND
    | IBV_ACCESS_HUGETLB
    | IBV_ACCESS_RELAXED_ORDERING;

/// Access flags that a device may ignore (`IBV_ACCESS_OPTIONAL_RANGE`).
const OPTIONAL_ACCESS: c_uint = 0x3ff0_0000;

/// `ibv_alloc_pd(3)`.
pub(crate) unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: the program's pointer, as the manual page demands.
    pointer(unsafe { context_of(context) }.and_then(|c| alloc_pd(c).map(Ref::handle)))
}

pub(crate) fn alloc_pd(context: Ref<Context>) -> Result<Ref<Pd>, Errno> {
    let id = context.lock().nic.alloc_pd()?;
    let c = ibv_pd {
        context: context.handle(),
        handle: id.0.index() as u32,
    };
    Ok(Ref::new(c, Pd { context, id }))
}

/// `ibv_dealloc_pd(3)`.
pub(crate) unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: the program's pointer, as the manual page demands.
    number(unsafe { Ref::<Pd>::get(pd) }.and_then(|pd| {
        pd.context.lock().nic.dealloc_pd(pd.id)?;
        pd.retire()
    }))
}

/// `ibv_reg_mr(3)`.
pub(crate) unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    let iova = addr.addr() as u64;
    // SAFETY: as the program promises.
    unsafe { ibv_reg_mr_iova2(pd, addr, length, iova, access as c_uint) }
}

/// `ibv_reg_mr_iova(3)`: a region whose addresses count from `iova`.
pub(crate) unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: as the program promises.
    unsafe { ibv_reg_mr_iova2(pd, addr, length, iova, access as c_uint) }
}

/// `ibv_reg_mr_iova(3)` as the header's inline functions call it.
pub(crate) unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: the program's pointer, as the manual page demands.
    pointer(unsafe { Ref::<Pd>::get(pd) }.and_then(|pd| {
        // The upper ones are wishes, which a device may ignore.
        let required = access & !OPTIONAL_ACCESS;
        if required & !KNOWN_ACCESS != 0 || length == 0 {
            return Err(Errno::INVALID);
        }
        check_mapped(addr, length)?;
        let mut rights = access_of(access);
        rights.set(Access::ZERO_BASED, access & IBV_ACCESS_ZERO_BASED != 0);
        // SAFETY: the program keeps the range mapped as long as it is registered, and the device
        // and the program may both write it.
        let memory = unsafe { Memory::foreign(addr.cast(), length) };
        let mr = pd
            .context
            .lock()
            .nic
            .reg_mr_iova(pd.id, &memory.whole(), iova, rights)?;
        let c = ibv_mr {
            context: pd.context.handle(),
            pd: pd.handle(),
            addr,
            length,
            handle: mr.id.0.index() as u32,
            lkey: mr.lkey.0,
            rkey: mr.rkey.0,
        };
        let context = pd.context;
        Ok(Ref::new(c, Mr { context, id: mr.id }).handle())
    }))
}

/// Whether a range is mapped at all: `EFAULT` where it is not, as the kernel answers.
fn check_mapped(addr: *mut c_void, length: usize) -> Result<(), Errno> {
    const FAULT: Errno = Errno(libc::EFAULT);
    const PAGE: usize = riser_memory::PAGE;
    let start = addr.addr() & !(PAGE - 1);
    let end = addr.addr().checked_add(length).ok_or(FAULT)?;
    // `msync` looks whether all of the range is mapped, and with this flag it does nothing else.
    let length = end.checked_sub(start).ok_or(FAULT)?.next_multiple_of(PAGE);
    // SAFETY: the call changes nothing.
    let answer = unsafe { libc::msync(addr.with_addr(start), length, libc::MS_ASYNC) };
    if answer == 0 { Ok(()) } else { Err(FAULT) }
}

/// `ibv_dereg_mr(3)`.
pub(crate) unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: the program's pointer, as the manual page demands.
    number(unsafe { Ref::<Mr>::get(mr) }.and_then(|mr| {
        mr.context.lock().nic.dereg_mr(mr.id)?;
        mr.retire()
    }))
}
