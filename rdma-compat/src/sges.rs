//! Scatter lists of programs.

use std::cell::OnceCell;
use std::ffi::c_int;
use std::slice;

use arrayvec::ArrayVec;
use riser_rdma_core_sys::bindings::ibv_sge;
use riser_transport::verbs::Sge;

use crate::errno::Errno;

/// Maximum number of pieces in a scatter list that is copied. No queue pair supports more.
const SGES: usize = 32;

/// Space for one scatter list in a part of a chain.
pub(crate) type Copied = OnceCell<ArrayVec<Sge, SGES>>;

// A program's scatter list is used without conversion.
const _: () = {
    assert!(size_of::<Sge>() == size_of::<ibv_sge>());
    assert!(std::mem::offset_of!(Sge, addr) == std::mem::offset_of!(ibv_sge, addr));
    assert!(std::mem::offset_of!(Sge, length) == std::mem::offset_of!(ibv_sge, length));
    assert!(std::mem::offset_of!(Sge, lkey) == std::mem::offset_of!(ibv_sge, lkey));
};

/// Returns a program's scatter list of up to `most` pieces.
///
/// An unaligned list, such as those in the packed structures of libiscsi, is copied. Returns `None`
/// if the space for the copy is already used. The providers of rdma-core support such lists on
/// processors that allow unaligned accesses.
///
/// # Safety
/// The list must have `count` entries while the result is used, unless it is too long.
pub(crate) unsafe fn sges(
    list: *mut ibv_sge,
    count: c_int,
    most: u32,
    copied: &Copied,
) -> Result<Option<&[Sge]>, Errno> {
    let count = usize::try_from(count).map_err(|_| Errno::INVALID)?;
    if count == 0 {
        return Ok(Some(&[]));
    }
    // If it is rejected, it is not read.
    if list.is_null() || count > most as usize {
        return Err(Errno::INVALID);
    }
    if list.is_aligned() {
        // SAFETY: guaranteed by the caller, and both types have the same layout.
        return Ok(Some(unsafe {
            slice::from_raw_parts(list.cast::<Sge>(), count)
        }));
    }
    if count > SGES {
        return Err(Errno::INVALID);
    }
    // SAFETY: as above.
    let pieces = unsafe { read_sges(list, count) };
    let is_taken = copied.set(pieces.collect()).is_err();
    Ok(copied.get().filter(|_| !is_taken).map(|list| &list[..]))
}

/// Reads a program's scatter list, which may be unaligned.
///
/// # Safety
/// The list must have `count` entries.
pub(crate) unsafe fn read_sges(list: *const ibv_sge, count: usize) -> impl Iterator<Item = Sge> {
    // SAFETY: guaranteed by the caller, and both types have the same layout.
    (0..count).map(move |i| unsafe { list.add(i).cast::<Sge>().read_unaligned() })
}
