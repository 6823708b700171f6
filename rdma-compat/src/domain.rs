//! Protection domains, parent domains, thread domains and XRC domains.
//!
//! A thread domain indicates that its objects are only used by one thread. Because the device has a
//! single lock, this has no effect. A parent domain is a protection domain with a thread domain and
//! allocators for the memory of queues. We allocate queues ourselves, so the allocators are never
//! called. An XRC domain that is opened using a file is shared by everything in the process that
//! opens it using the same file. Each process has its own NIC, and so its own domains, even for the
//! same file: queue pairs of other processes can't be found (`ibv_open_qp`, `EINVAL`).

use std::ffi::c_int;
use std::mem::zeroed;
use std::sync::atomic::{AtomicU32, Ordering};

use riser_rdma_core_sys::bindings::*;
use riser_transport::verbs::{PdId, Verbs as _, XrcdId};

use crate::command::Family;
use crate::context::{Context, context_of};
use crate::engine::File;
use crate::errno::{Errno, number, pointer};
use crate::object::{Ref, kind};

const BUSY: Errno = Errno(libc::EBUSY);

/// Bits of `enum ibv_parent_domain_init_attr_mask`.
const ALLOCATORS: u32 = 1;
const PD_CONTEXT: u32 = 2;

/// A protection domain, or a parent domain, which uses an existing protection domain.
pub(crate) struct Pd {
    pub(crate) context: Ref<Context>,
    pub(crate) id: PdId,
    /// The domains that a parent domain was created for.
    made_for: Option<(Ref<Pd>, Option<Ref<Td>>)>,
    /// Number of parent domains that use it.
    parents: AtomicU32,
}

kind!(Pd, ibv_pd, b"pdom");

/// A thread domain.
pub(crate) struct Td {
    context: Ref<Context>,
    /// Number of parent domains that use it.
    parents: AtomicU32,
}

kind!(Td, ibv_td, b"tdom");

/// Bits of `enum ibv_xrcd_init_attr_mask`.
const XRCD_FD: u32 = 1;
const XRCD_OFLAGS: u32 = 2;

/// An XRC domain.
pub(crate) struct Xrcd {
    pub(crate) context: Ref<Context>,
    pub(crate) id: XrcdId,
    file: Option<File>,
}

kind!(Xrcd, ibv_xrcd, b"xrcd");

/// `ibv_alloc_pd(3)`.
pub(crate) unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    pointer(unsafe { context_of(context) }.and_then(|c| alloc_pd(c).map(Ref::handle)))
}

pub(crate) fn alloc_pd(context: Ref<Context>) -> Result<Ref<Pd>, Errno> {
    let mut locked = context.lock();
    let id = locked.nic.alloc_pd()?;
    locked.pds.insert(id, context.command.family);
    Ok(make(context, id, None))
}

/// `ibv_import_pd(3)`: imports a domain from a context of the same family.
pub(crate) unsafe extern "C" fn ibv_import_pd(
    context: *mut ibv_context,
    handle: u32,
) -> *mut ibv_pd {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    pointer(unsafe { context_of(context) }.and_then(|context| {
        let is_it = |(id, family): &(&PdId, &Family)| {
            id.0.index() == handle as usize && **family == context.command.family
        };
        let locked = context.lock();
        let (id, _) = locked.pds.iter().find(is_it).ok_or(Errno::NOT_FOUND)?;
        Ok(make(context, *id, None).handle())
    }))
}

/// `ibv_unimport_pd(3)`: drops a domain without destroying it.
pub(crate) unsafe extern "C" fn ibv_unimport_pd(pd: *mut ibv_pd) {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    if let Ok(pd) = unsafe { Ref::<Pd>::get(pd) }
        && pd.parents.load(Ordering::Acquire) == 0
    {
        // There is no way to report an error.
        let _ = pd.retire();
    }
}

fn make(context: Ref<Context>, id: PdId, made_for: Option<(Ref<Pd>, Option<Ref<Td>>)>) -> Ref<Pd> {
    let c = ibv_pd {
        context: context.handle(),
        handle: id.0.index() as u32,
    };
    let pd = Pd {
        context,
        id,
        made_for,
        parents: AtomicU32::new(0),
    };
    Ref::new(c, pd)
}

/// `ibv_dealloc_pd(3)`, which also supports parent domains.
pub(crate) unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    number(unsafe { Ref::<Pd>::get(pd) }.and_then(|pd| {
        if pd.parents.load(Ordering::Acquire) > 0 {
            return Err(BUSY);
        }
        match pd.made_for {
            Some((real, td)) => {
                pd.retire()?;
                real.parents.fetch_sub(1, Ordering::AcqRel);
                if let Some(td) = td {
                    td.parents.fetch_sub(1, Ordering::AcqRel);
                }
                Ok(())
            }
            None => {
                {
                    let mut locked = pd.context.lock();
                    locked.nic.dealloc_pd(pd.id)?;
                    locked.pds.remove(&pd.id);
                }
                pd.retire()
            }
        }
    }))
}

/// `ibv_alloc_td(3)`.
pub(crate) unsafe extern "C" fn alloc_td(
    context: *mut ibv_context,
    attr: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    pointer(unsafe { context_of(context) }.and_then(|context| {
        // SAFETY: as above. No bit of the mask is supported.
        if unsafe { attr.as_ref() }.is_none_or(|attr| attr.comp_mask != 0) {
            return Err(Errno::INVALID);
        }
        let c = ibv_td {
            context: context.handle(),
        };
        let parents = AtomicU32::new(0);
        Ok(Ref::new(c, Td { context, parents }).handle())
    }))
}

/// `ibv_dealloc_td(3)`.
pub(crate) unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    number(unsafe { Ref::<Td>::get(td) }.and_then(|td| {
        if td.parents.load(Ordering::Acquire) > 0 {
            return Err(BUSY);
        }
        td.retire()
    }))
}

/// `ibv_alloc_parent_domain(3)`.
pub(crate) unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    pointer(unsafe { context_of(context) }.and_then(|context| {
        // SAFETY: as above.
        let attr = unsafe { attr.as_ref() }.ok_or(Errno::INVALID)?;
        let has_allocators = attr.alloc.is_some() && attr.free.is_some();
        let unknown = attr.comp_mask & !(ALLOCATORS | PD_CONTEXT) != 0;
        if unknown || (attr.comp_mask & ALLOCATORS != 0 && !has_allocators) {
            return Err(Errno::INVALID);
        }
        // SAFETY: as above.
        let pd = unsafe { Ref::<Pd>::get(attr.pd) }?;
        let td = (!attr.td.is_null())
            // SAFETY: as above.
            .then(|| unsafe { Ref::<Td>::get(attr.td) })
            .transpose()?;
        let is_ours = pd.context == context && td.is_none_or(|td| td.context == context);
        if !is_ours || pd.made_for.is_some() {
            return Err(Errno::INVALID);
        }
        pd.parents.fetch_add(1, Ordering::AcqRel);
        if let Some(td) = td {
            td.parents.fetch_add(1, Ordering::AcqRel);
        }
        Ok(make(context, pd.id, Some((pd, td))).handle())
    }))
}

/// `ibv_open_xrcd(3)`.
pub(crate) unsafe extern "C" fn open_xrcd(
    context: *mut ibv_context,
    attr: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    pointer(unsafe { context_of(context) }.and_then(|context| {
        // SAFETY: as above.
        let attr = unsafe { attr.as_ref() }.ok_or(Errno::INVALID)?;
        if attr.comp_mask != XRCD_FD | XRCD_OFLAGS {
            return Err(Errno::INVALID);
        }
        let file = match attr.fd {
            -1 if attr.oflags & libc::O_CREAT != 0 => None,
            -1 => return Err(Errno::INVALID),
            fd => Some(file_of(fd)?),
        };
        let mut locked = context.lock();
        let id = match file {
            None => locked.nic.open_xrcd()?,
            Some(file) => {
                match locked
                    .xrc_domains
                    .iter_mut()
                    .find(|(name, ..)| *name == file)
                {
                    Some(_) if attr.oflags & libc::O_EXCL != 0 => return Err(Errno::INVALID),
                    Some((_, id, users)) => {
                        *users += 1;
                        *id
                    }
                    // The kernel returns the same error if the domain doesn't exist.
                    None if attr.oflags & libc::O_CREAT == 0 => return Err(Errno(libc::EAGAIN)),
                    None => {
                        let id = locked.nic.open_xrcd()?;
                        locked.xrc_domains.push((file, id, 1));
                        id
                    }
                }
            }
        };
        let c = ibv_xrcd {
            context: context.handle(),
        };
        Ok(Ref::new(c, Xrcd { context, id, file }).handle())
    }))
}

/// Opens an XRC domain without a file.
///
/// # Errors
/// Returns errors of the device.
pub(crate) fn open_unnamed_xrcd(context: Ref<Context>) -> Result<Ref<Xrcd>, Errno> {
    let id = context.lock().nic.open_xrcd()?;
    let c = ibv_xrcd {
        context: context.handle(),
    };
    let file = None;
    Ok(Ref::new(c, Xrcd { context, id, file }))
}

/// Returns the name of a file's domain.
fn file_of(fd: c_int) -> Result<File, Errno> {
    // SAFETY: all zeroes is valid for the structure, which is initialized by the call.
    unsafe {
        let mut stat: libc::stat = zeroed();
        if libc::fstat(fd, &raw mut stat) != 0 {
            return Err(Errno::last());
        }
        Ok((stat.st_dev, stat.st_ino))
    }
}

/// `ibv_close_xrcd(3)`.
pub(crate) unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    number(unsafe { Ref::<Xrcd>::get(xrcd) }.and_then(|xrcd| {
        let mut locked = xrcd.context.lock();
        let mut shared = locked.xrc_domains.iter();
        let at = shared.position(|(name, ..)| Some(*name) == xrcd.file);
        match at {
            Some(at) if locked.xrc_domains[at].2 > 1 => locked.xrc_domains[at].2 -= 1,
            at => {
                locked.nic.close_xrcd(xrcd.id)?;
                if let Some(at) = at {
                    locked.xrc_domains.swap_remove(at);
                }
            }
        }
        drop(locked);
        xrcd.retire()
    }))
}
