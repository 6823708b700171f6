//! Scatter lists of the program's.

use std::cell::OnceCell;
use std::ffi::c_int;
use std::slice;

use arrayvec::ArrayVec;
use riser_rdma_core_sys::bindings::ibv_sge;
use riser_transport::verbs::Sge;

use crate::errno::Errno;

/// Most pieces of a scatter list that is copied: no queue pair takes more.
const SGES: usize = 32;

/// Room for one scatter list of a chain's part.
pub(crate) type Copied = OnceCell<ArrayVec<Sge, SGES>>;

// A program's scatter list is used as it is.
const _: () = {
    assert!(size_of::<Sge>() == size_of::<ibv_sge>());
    assert!(std::mem::offset_of!(Sge, addr) == std::mem::offset_of!(ibv_sge, addr));
    assert!(std::mem::offset_of!(Sge, length) == std::mem::offset_of!(ibv_sge, length));
    assert!(std::mem::offset_of!(Sge, lkey) == std::mem::offset_of!(ibv_sge, lkey));
};

/// A scatter list of the program's, of no more than `most` pieces.
///
/// One that is not aligned, as in the packed structures of libiscsi, is copied; `None` where the room
/// for that is taken. rdma-core's providers read such lists on the processors that can.
///
/// # Safety
/// The list has `count` entries for as long as the result is used, or is too long.
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
    // It is not read where it is refused.
    if list.is_null() || count > most as usize {
        return Err(Errno::INVALID);
    }
    if list.is_aligned() {
        // SAFETY: as the caller promises; the two types have the same layout.
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

/// Reads a scatter list of the program's, at any address.
///
/// # Safety
/// The list has `count` entries.
pub(crate) unsafe fn read_sges(list: *const ibv_sge, count: usize) -> impl Iterator<Item = Sge> {
    // SAFETY: as the caller promises; the two types have the same layout.
    (0..count).map(move |i| unsafe { list.add(i).cast::<Sge>().read_unaligned() })
}
