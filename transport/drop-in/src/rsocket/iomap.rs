//! Memory that a program maps for the other end to write to.

use std::ffi::{c_int, c_void};

use riser_rdma_core_sys::bindings::*;

use super::wire::{Iomap, Segment};
use crate::errno::Errno;
use crate::memory::{ibv_dereg_mr, ibv_reg_mr};

/// Mapped memory of a stream.
#[derive(Default)]
pub(super) struct Maps(Vec<Map>);

/// A registered buffer of the program's.
struct Map {
    mr: *mut ibv_mr,
    offset: u64,
    /// Its entry in the other end's list; none for a buffer that the other end cannot write to.
    index: Option<u16>,
    /// The other end knows of it.
    is_announced: bool,
}

impl Maps {
    /// Registers a buffer of the program's, and gives it an offset and, where the other end may
    /// write it, one of the `places` of that end.
    ///
    /// # Errors
    /// `ENOMEM` where all places are taken; those of `ibv_reg_mr(3)`.
    ///
    /// # Safety
    /// The protection domain is alive, and the program keeps the buffer until it unmaps it.
    pub(super) unsafe fn add(
        &mut self,
        pd: *mut ibv_pd,
        (buffer, length): (*mut c_void, usize),
        places: Option<u16>,
        offset: u64,
    ) -> Result<(), Errno> {
        let mut access = IBV_ACCESS_LOCAL_WRITE;
        let mut index = None;
        if let Some(places) = places {
            let is_free = |i: &u16| self.0.iter().all(|m| m.index != Some(*i));
            index = Some((0..places).find(is_free).ok_or(Errno::NO_MEMORY)?);
            access |= IBV_ACCESS_REMOTE_WRITE;
            // An entry has 32 bits for it.
            u32::try_from(length).map_err(|_| Errno::INVALID)?;
        }
        // SAFETY: as the caller promises.
        let mr = unsafe { ibv_reg_mr(pd, buffer, length, access as c_int) };
        if mr.is_null() {
            return Err(Errno::last());
        }
        self.0.push(Map {
            mr,
            offset,
            index,
            is_announced: index.is_none(),
        });
        Ok(())
    }

    /// Forgets a buffer.
    ///
    /// # Errors
    /// `EINVAL` where there is none like this.
    pub(super) fn remove(&mut self, buffer: *mut c_void, length: usize) -> Result<(), Errno> {
        let is_it = |map: &Map| {
            // SAFETY: the region is alive.
            unsafe { (*map.mr).addr == buffer && (*map.mr).length == length }
        };
        let at = self.0.iter().position(is_it).ok_or(Errno::INVALID)?;
        // Dropped, and deregistered by that.
        self.0.remove(at);
        Ok(())
    }

    /// A buffer that the other end does not know of yet, and its entry.
    pub(super) fn unannounced(&self) -> Option<(u16, Iomap)> {
        let map = self.0.iter().find(|map| !map.is_announced)?;
        // SAFETY: the region is alive.
        let (addr, length, key) = unsafe { ((*map.mr).addr, (*map.mr).length, (*map.mr).rkey) };
        let segment = Segment {
            addr: addr.addr() as u64,
            key,
            length: length as u32,
        };
        let offset = map.offset;
        map.index.map(|index| (index, Iomap { offset, segment }))
    }

    /// The other end knows of the buffer with this entry.
    pub(super) fn set_announced(&mut self, index: u16) {
        if let Some(map) = self.0.iter_mut().find(|map| map.index == Some(index)) {
            map.is_announced = true;
        }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the region is alive, and no one else has it.
        unsafe { ibv_dereg_mr(self.mr) };
    }
}
