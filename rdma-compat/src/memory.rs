//! Memory regions.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;
use std::sync::{Arc, OnceLock};

use riser_memory::{MemSlice, Memory, fault};
use riser_rdma_core_sys::bindings::*;
use riser_transport::rdma_core::convert::access_of;
use riser_transport::verbs::{self, Access, MrId, Verbs as _};
use rustix::io::Errno as Os;
use rustix::mm::{Advice, MsyncFlags, madvise, msync};
use tracing::debug;

use crate::context::Context;
use crate::domain::Pd;
use crate::errno::{Errno, number, pointer};
use crate::object::{Ref, kind};

/// A memory region.
pub(crate) struct Mr {
    pub(crate) context: Ref<Context>,
    pub(crate) id: MrId,
    /// Counts as a user of device memory.
    _user: Option<Arc<()>>,
}

kind!(Mr, ibv_mr, b"mreg");

/// Access flags supported by regions.
const KNOWN_ACCESS: c_uint = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC
    | IBV_ACCESS_MW_BIND
    | IBV_ACCESS_ZERO_BASED
    | IBV_ACCESS_ON_DEMAND
    | IBV_ACCESS_HUGETLB
    | IBV_ACCESS_RELAXED_ORDERING;

/// Access flags that a device may ignore (`IBV_ACCESS_OPTIONAL_RANGE`).
const OPTIONAL_ACCESS: c_uint = 0x3ff0_0000;

/// `ibv_reg_mr(3)`.
pub(crate) unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    let iova = addr.addr() as u64;
    // SAFETY: guaranteed by the program.
    unsafe { ibv_reg_mr_iova2(pd, addr, length, iova, access as c_uint) }
}

/// `ibv_reg_mr_iova(3)`: creates a region whose addresses start at `iova`.
pub(crate) unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: guaranteed by the program.
    unsafe { ibv_reg_mr_iova2(pd, addr, length, iova, access as c_uint) }
}

/// `ibv_reg_mr_iova(3)`, as called by the header's inline functions.
pub(crate) unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    pointer(unsafe { Ref::<Pd>::get(pd) }.and_then(|pd| {
        let rights = rights_of(access)?;
        // SAFETY: guaranteed by the program.
        let memory = unsafe { foreign(addr, length, rights) }?;
        // `ibv_reg_mr` and the header's inline functions pass the address of the memory.
        let iova = match rights.contains(Access::ZERO_BASED) {
            true => 0,
            false => iova,
        };
        register(pd, &memory.whole(), addr, iova, rights, None).map(Ref::handle)
    }))
}

/// Creates a handle for memory of the program.
///
/// # Errors
/// Returns `EINVAL` if the length is zero, or `EFAULT` if the range is not mapped, or if access to
/// its first or last page is not permitted as required by the region. The latter is not checked for
/// regions that are on demand.
///
/// # Safety
/// The device and the program may both write to the range. The program must keep it mapped while it
/// is registered, unless the region is on demand or faults are caught.
pub(crate) unsafe fn foreign(
    addr: *mut c_void,
    length: usize,
    rights: Access,
) -> Result<Memory, Errno> {
    if length == 0 {
        return Err(Errno::INVALID);
    }
    check_range(addr, length, rights)?;
    if let Err(error) = fault::catch() {
        debug!("cannot catch faults: unmapping registered memory will crash the process: {error}");
    }
    // SAFETY: guaranteed by the caller.
    Ok(unsafe { Memory::foreign(addr.cast(), length) })
}

/// Converts access flags.
///
/// # Errors
/// Returns `EINVAL` for unknown flags that the device must not ignore.
pub(crate) fn rights_of(access: c_uint) -> Result<Access, Errno> {
    // The upper flags are optional, and may be ignored by a device.
    let required = access & !OPTIONAL_ACCESS;
    if required & !KNOWN_ACCESS != 0 {
        return Err(Errno::INVALID);
    }
    let mut rights = access_of(access);
    rights.set(Access::ZERO_BASED, access & IBV_ACCESS_ZERO_BASED != 0);
    Ok(rights)
}

/// Registers memory. `addr` is the address stored in the program's structure. `user` is released
/// when the region is deregistered.
pub(crate) fn register(
    pd: Ref<Pd>,
    memory: &MemSlice,
    addr: *mut c_void,
    iova: u64,
    rights: Access,
    user: Option<Arc<()>>,
) -> Result<Ref<Mr>, Errno> {
    let mr = {
        let nic = &mut pd.context.lock().nic;
        match memory.is_empty() {
            // A region without a mapping is empty.
            true => nic.alloc_fast_mr(pd.id, 1)?,
            false => nic.reg_mr_iova(pd.id, memory, iova, rights)?,
        }
    };
    Ok(hand_out(pd, &mr, addr, user))
}

/// Creates the program's structure of a region.
pub(crate) fn hand_out(
    pd: Ref<Pd>,
    mr: &verbs::Mr,
    addr: *mut c_void,
    user: Option<Arc<()>>,
) -> Ref<Mr> {
    let context = pd.context;
    let c = ibv_mr {
        context: context.handle(),
        pd: pd.handle(),
        addr,
        length: mr.length as usize,
        handle: mr.id.0.index() as u32,
        lkey: mr.lkey.0,
        rkey: mr.rkey.0,
    };
    let id = mr.id;
    Ref::new(
        c,
        Mr {
            context,
            id,
            _user: user,
        },
    )
}

/// `ibv_import_mr(3)`: imports a region from a context of the same family. Its memory has no
/// address here.
pub(crate) unsafe extern "C" fn ibv_import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    pointer(unsafe { Ref::<Pd>::get(pd) }.and_then(|pd| {
        let attr = {
            let locked = pd.context.lock();
            let id = locked.nic.mr_at(handle).ok_or(Errno::NOT_FOUND)?;
            let attr = locked.nic.query_mr(id)?;
            let family = locked.pds.get(&attr.pd);
            if family != Some(&pd.context.command.family) {
                return Err(Errno::NOT_FOUND);
            }
            attr
        };
        Ok(hand_out(pd, &attr.mr, ptr::null_mut(), None).handle())
    }))
}

/// `ibv_unimport_mr(3)`: drops a region without deregistering it.
pub(crate) unsafe extern "C" fn ibv_unimport_mr(mr: *mut ibv_mr) {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    if let Ok(mr) = unsafe { Ref::<Mr>::get(mr) } {
        // There is no way to report an error.
        let _ = mr.retire();
    }
}

/// Checks that a region can use a range of the program's memory, unless it is on demand.
///
/// The kernel would fault in all pages, for writing if the region has local write access. This
/// would allocate the memory of a sparse range, so we only fault in the first and the last page.
///
/// # Errors
/// Like the kernel, returns `EFAULT` if the range is not mapped, read-only or inaccessible.
pub(crate) fn check_range(addr: *mut c_void, length: usize, rights: Access) -> Result<(), Errno> {
    const FAULT: Errno = Errno(libc::EFAULT);
    const PAGE: usize = riser_memory::PAGE;
    if rights.contains(Access::ON_DEMAND) {
        return Ok(());
    }
    let start = addr.addr() & !(PAGE - 1);
    let end = addr.addr().checked_add(length).ok_or(FAULT)?;
    // `msync` checks that the whole range is mapped. With this flag it has no other effect.
    let length = end.checked_sub(start).ok_or(FAULT)?;
    let length = length.checked_next_multiple_of(PAGE).ok_or(FAULT)?;
    let first = addr.with_addr(start);
    // SAFETY: the call has no side effects.
    unsafe { msync(first, length, MsyncFlags::ASYNC) }.map_err(|_| FAULT)?;
    let advice = match rights.contains(Access::LOCAL_WRITE) {
        true => Advice::LinuxPopulateWrite,
        false => Advice::LinuxPopulateRead,
    };
    let last = first.with_addr(start + length - PAGE);
    match can_populate() && !(populate(first, advice) && populate(last, advice)) {
        true => Err(FAULT),
        false => Ok(()),
    }
}

/// Faults in a page. Returns whether the access is permitted.
fn populate(page: *mut c_void, advice: Advice) -> bool {
    // SAFETY: the call has the effect of a page fault.
    let populated = unsafe { madvise(page, riser_memory::PAGE, advice) };
    // If there is not enough memory for the page, the access is still permitted.
    !matches!(populated, Err(Os::FAULT | Os::INVAL | Os::ACCESS))
}

/// Returns whether the kernel can fault in pages (Linux 5.14). We need to check this, because it
/// returns the same error for inaccessible memory and for unknown requests.
fn can_populate() -> bool {
    static CAN_POPULATE: OnceLock<bool> = OnceLock::new();
    *CAN_POPULATE.get_or_init(|| {
        let here = 0u8;
        let page = ptr::from_ref(&here).cast_mut().cast::<c_void>();
        let page = page.map_addr(|at| at & !(riser_memory::PAGE - 1));
        populate(page, Advice::LinuxPopulateRead)
    })
}

/// `ibv_dereg_mr(3)`.
pub(crate) unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    number(unsafe { Ref::<Mr>::get(mr) }.and_then(|mr| {
        mr.context.lock().nic.dereg_mr(mr.id)?;
        mr.retire()
    }))
}
