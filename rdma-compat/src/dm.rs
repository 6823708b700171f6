//! Device memory (`ibv_alloc_dm(3)`): memory of the library that can only be accessed by programs
//! using function calls, and by the device using regions.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::{ptr, slice};

use riser_memory::Memory;
use riser_rdma_core_sys::bindings::*;
use riser_transport::verbs::Access;

use crate::command::Family;
use crate::context::{Context, DEVICE_MEMORY, context_of};
use crate::domain::Pd;
use crate::errno::{Errno, number, pointer};
use crate::lock::shielded;
use crate::memory::{register, rights_of};
use crate::object::{Ref, kind};

/// Alignment of copies in bytes.
const WORD: u64 = 4;

/// Logarithm of the maximum alignment, which is the page size.
const MAX_ALIGN: u32 = 12;

/// Number of allocated bytes.
static TAKEN: AtomicUsize = AtomicUsize::new(0);

/// Handle of the next piece.
static NEXT: AtomicU32 = AtomicU32::new(1);

/// Pieces by handle, with the contexts that can import them.
static PIECES: Mutex<BTreeMap<u32, (Family, Arc<DeviceMemory>)>> = Mutex::new(BTreeMap::new());

/// A piece of device memory. It is shared by all structures that were imported from the same piece.
struct DeviceMemory {
    memory: Memory,
    length: usize,
    /// Its reference count includes one reference for each region.
    users: Arc<()>,
}

/// A program's structure of a piece.
pub(crate) struct Dm {
    handle: u32,
    piece: Arc<DeviceMemory>,
}

kind!(Dm, ibv_dm, b"dmem");

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        TAKEN.fetch_sub(self.length, Ordering::Relaxed);
    }
}

impl DeviceMemory {
    /// Returns a range of the memory, as offset and length.
    fn range(&self, offset: u64, length: usize) -> Option<(usize, usize)> {
        let offset = usize::try_from(offset).ok()?;
        let end = offset.checked_add(length)?;
        (end <= self.length).then_some((offset, length))
    }

    /// Returns a range to copy from or to.
    ///
    /// # Errors
    /// Returns `EFAULT` if it is not aligned or out of bounds.
    fn words(&self, offset: u64, length: usize) -> Result<(usize, usize), Errno> {
        let is_aligned = offset.is_multiple_of(WORD) && (length as u64).is_multiple_of(WORD);
        let range = self.range(offset, length).filter(|_| is_aligned);
        range.ok_or(Errno(libc::EFAULT))
    }
}

/// `ibv_alloc_dm(3)`.
pub(crate) unsafe extern "C" fn alloc_dm(
    context: *mut ibv_context,
    attr: *mut ibv_alloc_dm_attr,
) -> *mut ibv_dm {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    pointer(unsafe { context_of(context) }.and_then(|context| {
        // SAFETY: as above.
        let attr = unsafe { attr.as_ref() }.ok_or(Errno::INVALID)?;
        let length = attr.length;
        if attr.comp_mask != 0 || length == 0 || attr.log_align_req > MAX_ALIGN {
            return Err(Errno::INVALID);
        }
        let take = |taken: usize| {
            taken
                .checked_add(length)
                .filter(|sum| *sum <= DEVICE_MEMORY)
        };
        TAKEN
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
            .map_err(|_| Errno::NO_MEMORY)?;
        let memory = Memory::new(length).inspect_err(|_| {
            TAKEN.fetch_sub(length, Ordering::Relaxed);
        })?;
        let piece = Arc::new(DeviceMemory {
            memory,
            length,
            users: Arc::new(()),
        });
        let handle = NEXT.fetch_add(1, Ordering::Relaxed);
        let shared = (context.command.family, Arc::clone(&piece));
        shielded(&PIECES).insert(handle, shared);
        Ok(hand_out(context, handle, piece))
    }))
}

fn hand_out(context: Ref<Context>, handle: u32, piece: Arc<DeviceMemory>) -> *mut ibv_dm {
    let c = ibv_dm {
        context: context.handle(),
        memcpy_to_dm: Some(memcpy_to_dm),
        memcpy_from_dm: Some(memcpy_from_dm),
        comp_mask: 0,
        handle,
    };
    let dm = Dm { handle, piece };
    Ref::new(c, dm).handle()
}

/// `ibv_import_dm(3)`: imports device memory from a context of the same family.
pub(crate) unsafe extern "C" fn ibv_import_dm(
    context: *mut ibv_context,
    handle: u32,
) -> *mut ibv_dm {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    pointer(unsafe { context_of(context) }.and_then(|context| {
        let piece = {
            let pieces = shielded(&PIECES);
            let found = pieces.get(&handle);
            let found = found.filter(|(family, _)| *family == context.command.family);
            Arc::clone(&found.ok_or(Errno::NOT_FOUND)?.1)
        };
        Ok(hand_out(context, handle, piece))
    }))
}

/// `ibv_unimport_dm(3)`: drops device memory without freeing it.
pub(crate) unsafe extern "C" fn ibv_unimport_dm(dm: *mut ibv_dm) {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    if let Ok(dm) = unsafe { Ref::<Dm>::get(dm) } {
        // There is no way to report an error.
        let _ = dm.retire();
    }
}

/// `ibv_free_dm(3)`.
pub(crate) unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    number(unsafe { Ref::<Dm>::get(dm) }.and_then(|dm| {
        {
            let mut pieces = shielded(&PIECES);
            if Arc::strong_count(&dm.piece.users) > 1 {
                return Err(Errno(libc::EBUSY));
            }
            // It may already have been freed using another structure of the same piece.
            pieces.remove(&dm.handle).ok_or(Errno::NOT_FOUND)?;
        }
        dm.retire()
    }))
}

/// `ibv_reg_dm_mr(3)`: addresses of the region start at 0, as in device memory. Like with adapters,
/// it can be empty.
pub(crate) unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    let objects = unsafe { Ref::<Pd>::get(pd).and_then(|pd| Ok((pd, Ref::<Dm>::get(dm)?))) };
    pointer(objects.and_then(|(pd, dm)| {
        let rights = rights_of(access)?;
        let (offset, length) = dm.piece.range(offset, length).ok_or(Errno::INVALID)?;
        let range = dm.piece.memory.slice(offset..offset + length);
        let range = range.filter(|_| rights.contains(Access::ZERO_BASED));
        let range = range.ok_or(Errno::INVALID)?;
        let user = Some(Arc::clone(&dm.piece.users));
        register(pd, &range, ptr::null_mut(), 0, rights, user).map(Ref::handle)
    }))
}

/// `ibv_memcpy_to_dm`.
unsafe extern "C" fn memcpy_to_dm(
    dm: *mut ibv_dm,
    offset: u64,
    from: *const c_void,
    length: usize,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    number(unsafe { Ref::<Dm>::get(dm) }.and_then(|dm| {
        let (offset, length) = dm.piece.words(offset, length)?;
        if length > 0 {
            // SAFETY: as above.
            dm.piece.memory.write(offset, unsafe {
                slice::from_raw_parts(from.cast(), length)
            });
        }
        Ok(())
    }))
}

/// `ibv_memcpy_from_dm`.
unsafe extern "C" fn memcpy_from_dm(
    to: *mut c_void,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    number(unsafe { Ref::<Dm>::get(dm) }.and_then(|dm| {
        let (offset, length) = dm.piece.words(offset, length)?;
        if length > 0 {
            // SAFETY: as above, and nothing else accesses the program's memory at the same time.
            dm.piece.memory.read(offset, unsafe {
                slice::from_raw_parts_mut(to.cast(), length)
            });
        }
        Ok(())
    }))
}
