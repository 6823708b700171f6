//! Protection domains, and their memory regions and windows.

use std::collections::HashMap;

use riser_memory::MemSlice;
use riser_rdma_core_sys::bindings::*;
use riser_rdma_core_sys::{Verbs as Functions, ops};

use super::convert::{self, checked, last_os_error, last_refusal, refused};
use super::objects::{MANY, Pd, Region, UserWindow, Window};
use crate::table::Table;
use crate::umem;
use crate::verbs::*;

/// If a peer is allowed to modify memory, the device needs write access as well (IBTA 11.2.8.2).
fn check_rights(access: Access) -> Result<(), VerbsError> {
    let remote_change = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    if access.intersects(remote_change) && !access.contains(Access::LOCAL_WRITE) {
        let what = "remote write without local write";
        return Err(VerbsError::InvalidAccess(what));
    }
    Ok(())
}

/// Returns the flag of a window whose addresses start at 0.
fn zero_based(access: Access) -> u32 {
    match access.contains(Access::ZERO_BASED) {
        true => IBV_ACCESS_ZERO_BASED,
        false => 0,
    }
}

/// Checks the new key of a window: only the low byte can be changed by its owner (IBTA 10.6.3.2).
/// The library would use the rest to find the window for the next bind.
fn check_key(now: RKey, new: RKey) -> Result<(), PostReason> {
    match now.0 >> 8 == new.0 >> 8 {
        true => Ok(()),
        false => Err(PostReason::InvalidKey),
    }
}

/// Protection domains, and their memory regions and windows.
pub(super) struct RegionTable {
    verbs: Functions,
    context: *mut ibv_context,
    pds: Table<PdId, Pd>,
    regions: Table<MrId, Region>,
    mws: Table<MwId, UserWindow>,
    /// Maps keys to windows. This is rarely used.
    rkeys: HashMap<u32, MrId>,
}

impl RegionTable {
    /// Creates empty tables. The context must be open while they are used.
    pub(super) fn new(verbs: Functions, context: *mut ibv_context) -> Self {
        Self {
            verbs,
            context,
            pds: Table::new("protection domains", MANY),
            regions: Table::new("memory regions", MANY),
            mws: Table::new("memory windows", MANY),
            rkeys: HashMap::new(),
        }
    }

    pub(super) fn pd_ptr(&self, pd: PdId) -> Result<*mut ibv_pd, VerbsError> {
        Ok(self.pds.get(pd)?.ptr)
    }

    pub(super) fn use_pd(&mut self, pd: PdId) {
        if let Ok(pd) = self.pds.get_mut(pd) {
            pd.users += 1;
        }
    }

    pub(super) fn release_pd(&mut self, pd: PdId) {
        if let Ok(pd) = self.pds.get_mut(pd) {
            pd.users -= 1;
        }
    }

    pub(super) fn alloc_pd(&mut self) -> Result<PdId, VerbsError> {
        self.pds.check_room()?;
        // SAFETY: the context is open.
        let ptr = unsafe { (self.verbs.ibv_alloc_pd)(self.context) };
        if ptr.is_null() {
            Err(last_os_error())
        } else {
            self.pds.insert(Pd { ptr, users: 0 })
        }
    }

    pub(super) fn dealloc_pd(&mut self, pd: PdId) -> Result<(), VerbsError> {
        let entry = self.pds.get(pd)?;
        if entry.users > 0 {
            return Err(VerbsError::ResourceBusy("protection domain"));
        }
        // SAFETY: it is not in use, and will be removed from the table.
        checked(unsafe { (self.verbs.ibv_dealloc_pd)(entry.ptr) })?;
        self.pds.remove(pd).map(drop)
    }

    pub(super) fn reg_mr(
        &mut self,
        pd: PdId,
        range: &MemSlice,
        access: Access,
    ) -> Result<Mr, VerbsError> {
        let iova = if access.contains(Access::ZERO_BASED) {
            0
        } else {
            range.addr()
        };
        self.reg_mr_iova(pd, range, iova, access)
    }

    pub(super) fn reg_mr_iova(
        &mut self,
        pd: PdId,
        range: &MemSlice,
        addr: u64,
        access: Access,
    ) -> Result<Mr, VerbsError> {
        check_rights(access)?;
        if addr.checked_add(range.len() as u64).is_none()
            || (addr != 0 && access.contains(Access::ZERO_BASED))
        {
            return Err(VerbsError::InvalidParameter("address of the region"));
        }
        let domain = self.pd_ptr(pd)?;
        // Check this before creating an object in the library which we would have to destroy again.
        self.regions.check_room()?;
        // Windows must be allowed in any region, because they are used to implement fast
        // registration.
        let flags = (convert::access_flags(access) | IBV_ACCESS_MW_BIND) as i32;
        // SAFETY: the range is mapped, and the table entry keeps it mapped until it is
        // deregistered.
        let ptr = unsafe {
            let (start, len) = (range.ptr().cast(), range.len());
            if addr == range.addr() {
                (self.verbs.ibv_reg_mr)(domain, start, len, flags)
            } else {
                (self.verbs.ibv_reg_mr_iova)(domain, start, len, addr, flags)
            }
        };
        if ptr.is_null() {
            return Err(last_os_error());
        }
        // SAFETY: the region has just been created.
        let (lkey, rkey) = unsafe { ((*ptr).lkey, (*ptr).rkey) };
        let length = range.len() as u64;
        let mr = |id| Mr {
            id,
            lkey: LKey(lkey),
            rkey: RKey(rkey),
            addr,
            length,
        };
        let placeholder = mr(MrId(Handle::new(0, 0)));
        let id = self.regions.insert(Region::Plain {
            pd,
            ptr,
            access,
            mr: placeholder,
            memory: range.clone(),
            windows: 0,
        })?;
        if let Ok(Region::Plain { mr: entry, .. }) = self.regions.get_mut(id) {
            *entry = mr(id);
        }
        self.use_pd(pd);
        Ok(mr(id))
    }

    pub(super) fn rereg_mr(&mut self, id: MrId, change: &MrChange<'_>) -> Result<Mr, VerbsError> {
        let Region::Plain {
            pd: old_pd,
            ptr,
            access: old_access,
            mr: old,
            memory: old_memory,
            windows,
        } = self.regions.get(id)?
        else {
            return Err(VerbsError::InvalidState("region is not registered"));
        };
        if *windows > 0 {
            return Err(VerbsError::ResourceBusy("memory region"));
        }
        let (ptr, old_pd) = (*ptr, *old_pd);
        let (pd, access) = (
            change.pd.unwrap_or(old_pd),
            change.access.unwrap_or(*old_access),
        );
        check_rights(access)?;
        let (memory, addr) = match change.translation {
            // The library requires that the region uses the same address as the memory.
            Some((range, iova)) if iova != range.addr() => {
                return Err(VerbsError::Unsupported("changing the address of a region"));
            }
            Some((range, iova)) => (range.clone(), iova),
            None => (old_memory.clone(), old.addr),
        };
        let flags = [
            (
                change.translation.is_some(),
                IBV_REREG_MR_CHANGE_TRANSLATION,
            ),
            (change.pd.is_some(), IBV_REREG_MR_CHANGE_PD),
            (change.access.is_some(), IBV_REREG_MR_CHANGE_ACCESS),
        ];
        let flags = flags
            .iter()
            .filter(|(is_set, _)| *is_set)
            .fold(0, |all, (_, flag)| all | flag);
        if flags == 0 {
            return Err(VerbsError::InvalidParameter("change"));
        }
        let rights = (convert::access_flags(access) | IBV_ACCESS_MW_BIND) as i32;
        let domain = self.pd_ptr(pd)?;
        // SAFETY: the region and the domain are alive, and the memory is mapped while the slice is
        // in the table.
        let r = unsafe {
            let start = memory.ptr().cast();
            (self.verbs.ibv_rereg_mr)(ptr, flags as i32, domain, start, memory.len(), rights)
        };
        if r != 0 {
            return Err(last_os_error());
        }
        // SAFETY: the region is alive. The library may have changed its keys.
        let (lkey, rkey) = unsafe { ((*ptr).lkey, (*ptr).rkey) };
        let mr = Mr {
            id,
            lkey: LKey(lkey),
            rkey: RKey(rkey),
            addr,
            length: memory.len() as u64,
        };
        *self.regions.get_mut(id)? = Region::Plain {
            pd,
            ptr,
            access,
            mr,
            memory,
            windows: 0,
        };
        self.use_pd(pd);
        self.release_pd(old_pd);
        Ok(mr)
    }

    pub(super) fn alloc_null_mr(&mut self, pd: PdId) -> Result<Mr, VerbsError> {
        let domain = self.pd_ptr(pd)?;
        self.regions.check_room()?;
        // SAFETY: the domain is alive.
        let ptr = unsafe { ops::ibv_alloc_null_mr(domain) };
        if ptr.is_null() {
            return Err(last_refusal("null regions"));
        }
        // SAFETY: the region has just been created.
        let (lkey, rkey) = unsafe { ((*ptr).lkey, (*ptr).rkey) };
        let mut mr = Mr {
            id: MrId(Handle::new(0, 0)),
            lkey: LKey(lkey),
            rkey: RKey(rkey),
            addr: 0,
            length: u64::MAX,
        };
        mr.id = self.regions.insert(Region::Null { pd, ptr, mr })?;
        if let Ok(Region::Null { mr: entry, .. }) = self.regions.get_mut(mr.id) {
            *entry = mr;
        }
        self.use_pd(pd);
        Ok(mr)
    }

    pub(super) fn advise_mr(
        &mut self,
        pd: PdId,
        advice: MrAdvice,
        sges: &[Sge],
    ) -> Result<(), VerbsError> {
        let domain = self.pd_ptr(pd)?;
        if sges.is_empty() {
            return Ok(());
        }
        let count = u32::try_from(sges.len());
        let count = count.map_err(|_| VerbsError::InvalidParameter("scatter list"))?;
        let advice = match advice {
            MrAdvice::Prefetch => IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH,
            MrAdvice::PrefetchWrite => IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE,
        };
        let theirs = sges.iter().map(|sge| ibv_sge {
            addr: sge.addr,
            length: sge.length,
            lkey: sge.lkey.0,
        });
        let mut theirs: Vec<_> = theirs.collect();
        let (flags, list) = (IB_UVERBS_ADVISE_MR_FLAG_FLUSH, theirs.as_mut_ptr());
        // SAFETY: the domain is alive, and the list contains this number of entries.
        let r = unsafe { ops::ibv_advise_mr(domain, advice, flags, list, count) };
        // Errors documented in ibv_advise_mr(3).
        match r.abs() {
            0 => Ok(()),
            libc::ENOENT => Err(VerbsError::InvalidHandle("memory region")),
            libc::EPERM => Err(VerbsError::InvalidAccess("prefetching")),
            libc::EFAULT => Err(VerbsError::InvalidParameter("range of a region")),
            libc::EINVAL => Err(VerbsError::InvalidParameter("advice")),
            other => Err(refused(other, "prefetching")),
        }
    }

    pub(super) fn alloc_mw(&mut self, pd: PdId, mw_type: MwType) -> Result<Mw, VerbsError> {
        self.mws.check_room()?;
        let (theirs, what) = match mw_type {
            MwType::Type1 => (IBV_MW_TYPE_1, "memory windows of type 1"),
            MwType::Type2 => (IBV_MW_TYPE_2, "memory windows of type 2"),
        };
        // SAFETY: the domain is alive.
        let ptr = unsafe { ops::ibv_alloc_mw(self.pd_ptr(pd)?, theirs) };
        if ptr.is_null() {
            return Err(last_refusal(what));
        }
        let id = self.mws.insert(UserWindow { pd, ptr, mw_type })?;
        self.use_pd(pd);
        Ok(Mw {
            id,
            // SAFETY: the window has just been created.
            rkey: RKey(unsafe { (*ptr).rkey }),
            mw_type,
        })
    }

    pub(super) fn query_mw(&self, mw: MwId) -> Result<MwAttr, VerbsError> {
        let window = self.mws.get(mw)?;
        Ok(MwAttr {
            pd: window.pd,
            // SAFETY: the window is alive.
            rkey: RKey(unsafe { (*window.ptr).rkey }),
            mw_type: window.mw_type,
        })
    }

    pub(super) fn dealloc_mw(&mut self, mw: MwId) -> Result<(), VerbsError> {
        let ptr = self.mws.get(mw)?.ptr;
        // SAFETY: the window will be removed from the table, and there are no other references to
        // it.
        checked(unsafe { ops::ibv_dealloc_mw(ptr) })?;
        let pd = self.mws.remove(mw)?.pd;
        self.release_pd(pd);
        Ok(())
    }

    pub(super) fn query_mr(&self, mr: MrId) -> Result<MrAttr, VerbsError> {
        Ok(match self.regions.get(mr)? {
            Region::Plain { pd, access, mr, .. } => MrAttr {
                pd: *pd,
                mr: *mr,
                access: *access,
                valid: true,
            },
            Region::Null { pd, mr, .. } => MrAttr {
                pd: *pd,
                mr: *mr,
                access: Access::LOCAL_WRITE,
                valid: true,
            },
            Region::Window(w) => MrAttr {
                pd: w.pd,
                mr: w.mr,
                access: w.access,
                valid: w.valid,
            },
        })
    }

    pub(super) fn dereg_mr(&mut self, mr: MrId) -> Result<(), VerbsError> {
        // A region cannot be deregistered while windows are mapped to it.
        let pd = match self.regions.get(mr)? {
            Region::Plain { windows: 1.., .. } => {
                return Err(VerbsError::ResourceBusy("memory region"));
            }
            Region::Plain { pd, ptr, .. } | Region::Null { pd, ptr, .. } => {
                // SAFETY: the region will be removed from the table, and there are no other
                // references to it.
                checked(unsafe { (self.verbs.ibv_dereg_mr)(*ptr) })?;
                *pd
            }
            Region::Window(w) => {
                // SAFETY: same as above.
                checked(unsafe { ops::ibv_dealloc_mw(w.ptr) })?;
                self.rkeys.remove(&w.mr.rkey.0);
                let (pd, mapped) = (w.pd, w.mapped.as_ref().map(|(id, _)| *id));
                self.unmap_window(mapped);
                pd
            }
        };
        self.release_pd(pd);
        self.regions.remove(mr).map(drop)
    }

    pub(super) fn alloc_fast_mr(
        &mut self,
        pd: PdId,
        max_segments: u32,
        most: u32,
    ) -> Result<Mr, VerbsError> {
        if max_segments == 0 || max_segments > most {
            return Err(VerbsError::InvalidParameter("number of segments"));
        }
        self.regions.check_room()?;
        // SAFETY: the domain is alive.
        let ptr = unsafe { ops::ibv_alloc_mw(self.pd_ptr(pd)?, IBV_MW_TYPE_2) };
        if ptr.is_null() {
            return Err(last_os_error());
        }
        // SAFETY: the window has just been created.
        let rkey = unsafe { (*ptr).rkey };
        let mr = |id| Mr {
            id,
            lkey: LKey(0),
            rkey: RKey(rkey),
            addr: 0,
            length: 0,
        };
        // The entry contains its own handle, which is not known until we insert it into the table.
        let placeholder = mr(MrId(Handle::new(0, 0)));
        let window = Window {
            pd,
            ptr,
            mr: placeholder,
            access: Access::empty(),
            mapped: None,
            valid: false,
        };
        let id = self.regions.insert(Region::Window(window))?;
        if let Ok(Region::Window(w)) = self.regions.get_mut(id) {
            w.mr = mr(id);
        }
        self.rkeys.insert(rkey, id);
        self.use_pd(pd);
        Ok(mr(id))
    }

    pub(super) fn map_mr_sg(&mut self, mr: MrId, segments: &[MemSlice]) -> Result<u64, VerbsError> {
        let Some(segment) = &umem::ranges(segments).next() else {
            return Err(VerbsError::InvalidParameter("scatter list"));
        };
        let pd = self.regions.get(mr)?.pd();
        // Only use the first range, since that is all a window supports. The caller is told how
        // many bytes are covered.
        let (start, end) = (segment.addr(), segment.addr() + segment.len() as u64);
        // A window must be bound to a single region, so the segment must be inside a region of the
        // same domain.
        let base = self.regions.iter().find_map(|(id, region)| match region {
            Region::Plain {
                pd: p, memory, mr, ..
            } if *p == pd
                && memory.addr() <= start
                && end <= memory.addr() + memory.len() as u64 =>
            {
                Some((id, mr.addr + (start - memory.addr())))
            }
            _ => None,
        });
        let (base, addr) = base.ok_or(VerbsError::InvalidParameter(
            "segment outside registered memory",
        ))?;
        let Region::Window(w) = self.regions.get_mut(mr)? else {
            return Err(VerbsError::InvalidHandle("fast-registration region"));
        };
        if w.valid {
            return Err(VerbsError::InvalidState("region is still valid"));
        }
        // The window now uses a new region, so its old region can be deregistered.
        let before = w.mapped.replace((base, segment.clone())).map(|(id, _)| id);
        // A window uses the addresses of its region.
        w.mr.addr = addr;
        w.mr.length = segment.len() as u64;
        self.unmap_window(before);
        if let Ok(Region::Plain { windows, .. }) = self.regions.get_mut(base) {
            *windows += 1;
        }
        Ok(segment.len() as u64)
    }

    /// Called when a window is no longer mapped to a region.
    fn unmap_window(&mut self, base: Option<MrId>) {
        if let Some(Ok(Region::Plain { windows, .. })) = base.map(|b| self.regions.get_mut(b)) {
            *windows -= 1;
        }
    }

    /// Returns whether the library uses a separate function for this operation instead of a work
    /// request.
    #[inline]
    pub(super) fn is_call(&self, op: &SendOp) -> bool {
        let SendOp::BindMw(bind) = op else {
            return false;
        };
        let window = self.mws.get(bind.mw);
        window.is_ok_and(|window| window.mw_type == MwType::Type1)
    }

    /// Returns the region of a window for use by the library, and the address of `segment` in it.
    fn base(&self, base: MrId, segment: &MemSlice) -> Option<(*mut ibv_mr, u64)> {
        match self.regions.get(base).ok()? {
            Region::Plain {
                ptr, mr, memory, ..
            } => Some((*ptr, mr.addr + (segment.addr() - memory.addr()))),
            Region::Null { .. } | Region::Window(_) => None,
        }
    }

    pub(super) fn bind(
        &self,
        mr: MrId,
        key: RKey,
        access: Access,
    ) -> Result<ibv_send_wr__bindgen_ty_4__bindgen_ty_1, PostReason> {
        let Ok(Region::Window(w)) = self.regions.get(mr) else {
            return Err(PostReason::InvalidKey);
        };
        check_key(w.mr.rkey, key)?;
        let Some((base, segment)) = &w.mapped else {
            return Err(PostReason::InvalidKey);
        };
        let (ptr, addr) = self.base(*base, segment).ok_or(PostReason::InvalidKey)?;
        Ok(ibv_send_wr__bindgen_ty_4__bindgen_ty_1 {
            mw: w.ptr,
            rkey: key.0,
            bind_info: ibv_mw_bind_info {
                mr: ptr,
                addr,
                length: segment.len() as u64,
                // A window sets the access rights of the peer. Local access depends on its region.
                mw_access_flags: convert::access_flags(access & Access::REMOTE)
                    | zero_based(access),
            },
        })
    }

    /// Returns the parameters to bind a user's window.
    pub(super) fn user_bind(
        &self,
        bind: &MwBind,
    ) -> Result<ibv_send_wr__bindgen_ty_4__bindgen_ty_1, PostReason> {
        let invalid = |_| PostReason::InvalidKey;
        let mw = self.mw_ptr(bind.mw)?;
        // SAFETY: the window is valid and only used by this thread.
        check_key(RKey(unsafe { (*mw).rkey }), bind.key)?;
        let Region::Plain { ptr, access, .. } = self.regions.get(bind.mr).map_err(invalid)? else {
            return Err(PostReason::InvalidKey);
        };
        // The library does not check this, since every region has this right there.
        if !access.contains(Access::MW_BIND) {
            return Err(PostReason::InvalidKey);
        }
        Ok(ibv_send_wr__bindgen_ty_4__bindgen_ty_1 {
            mw,
            rkey: bind.key.0,
            bind_info: ibv_mw_bind_info {
                mr: *ptr,
                addr: bind.addr,
                length: bind.length,
                mw_access_flags: convert::access_flags(bind.access) | zero_based(bind.access),
            },
        })
    }

    /// Returns the parameters to remove the range of a type 1 window. This does not need a region
    /// according to the specification, but several libraries read its key, and the kernel checks
    /// that the address is within the region.
    pub(super) fn user_unbind(&self, bind: &MwBind) -> Result<ibv_mw_bind_info, PostReason> {
        let Ok(Region::Plain { ptr, mr, .. }) = self.regions.get(bind.mr) else {
            return Err(PostReason::InvalidKey);
        };
        Ok(ibv_mw_bind_info {
            mr: *ptr,
            addr: mr.addr,
            ..ibv_mw_bind_info::default()
        })
    }

    /// Updates our state for a request that has been added to the queue.
    #[inline]
    pub(super) fn on_posted(&mut self, op: &SendOp) {
        match *op {
            SendOp::RegMr { mr, key, access } => {
                let addr = match self.regions.get(mr) {
                    Ok(Region::Window(w)) if !access.contains(Access::ZERO_BASED) => {
                        let (base, segment) = w.mapped.as_ref().expect("checked when posting");
                        self.base(*base, segment)
                            .map_or(w.mr.addr, |(_, addr)| addr)
                    }
                    _ => 0,
                };
                if let Ok(Region::Window(w)) = self.regions.get_mut(mr) {
                    // If the peer invalidates the window, it will use the new key.
                    self.rkeys.remove(&w.mr.rkey.0);
                    self.rkeys.insert(key.0, mr);
                    w.mr.rkey = key;
                    // The library needs the last key of the window to bind it again. SAFETY: the
                    // window is valid and only used by this thread.
                    unsafe { (*w.ptr).rkey = key.0 };
                    w.access = access;
                    w.valid = true;
                    w.mr.addr = addr;
                }
            }
            SendOp::BindMw(bind) => {
                if let Ok(mw) = self.mws.get(bind.mw) {
                    // Same as above. SAFETY: the window is valid and only used by this thread.
                    unsafe { (*mw.ptr).rkey = bind.key.0 };
                }
            }
            SendOp::LocalInv(key) => self.on_invalidated(key),
            _ => {}
        }
    }

    /// Called when the key of a window has been invalidated.
    pub(super) fn on_invalidated(&mut self, key: RKey) {
        if let Some(Ok(Region::Window(w))) =
            self.rkeys.get(&key.0).map(|id| self.regions.get_mut(*id))
        {
            w.valid = false;
        }
    }

    /// Returns the number of regions.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.regions.len()
    }

    /// Returns a window for use by the library.
    pub(super) fn mw_ptr(&self, mw: MwId) -> Result<*mut ibv_mw, PostReason> {
        let window = self.mws.get(mw).map_err(|_| PostReason::InvalidKey)?;
        Ok(window.ptr)
    }

    /// Updates the number of objects in a protection domain.
    pub(super) fn change_users(&mut self, pd: PdId, change: i32) {
        if let Ok(pd) = self.pds.get_mut(pd) {
            pd.users = pd.users.saturating_add_signed(change);
        }
    }

    /// Destroys all regions and windows.
    ///
    /// # Safety
    /// All other objects that use them must have been destroyed, and they can't be used after this.
    pub(super) unsafe fn destroy_regions(&mut self) {
        // SAFETY: all pointers in the tables are valid, and are only freed here.
        unsafe {
            // Windows must be destroyed before the regions they are bound to.
            for (_, mw) in self.mws.iter() {
                ops::ibv_dealloc_mw(mw.ptr);
            }
            for (_, region) in self.regions.iter() {
                if let Region::Window(w) = region {
                    ops::ibv_dealloc_mw(w.ptr);
                }
            }
            for (_, region) in self.regions.iter() {
                if let Region::Plain { ptr, .. } | Region::Null { ptr, .. } = region {
                    (self.verbs.ibv_dereg_mr)(*ptr);
                }
            }
        }
    }

    /// Destroys all protection domains.
    ///
    /// # Safety
    /// All objects that use them must have been destroyed, and they can't be used after this.
    pub(super) unsafe fn destroy_pds(&mut self) {
        for (_, pd) in self.pds.iter() {
            // SAFETY: the pointer is valid, and is only freed here.
            unsafe { (self.verbs.ibv_dealloc_pd)(pd.ptr) };
        }
    }
}

#[cfg(test)]
mod tests {
    use riser_memory::Memory;

    use super::super::context::RdmaCoreDevice;
    use super::*;

    /// The device only uses the low byte of a key, and the library uses the rest to find the window
    /// for the next bind.
    #[test]
    fn key_of_other_window_is_rejected() {
        let mut device = RdmaCoreDevice::fake();
        device.fake_windows();
        let (_, qp) = device.fake_queues();
        let pd = device.alloc_pd().unwrap();
        let memory = Memory::new(4096).unwrap();
        let access = Access::LOCAL_WRITE | Access::MW_BIND;
        let base = device.reg_mr(pd, &memory.whole(), access).unwrap();
        let [fast, other] = [(); 2].map(|()| device.alloc_fast_mr(pd, 1).unwrap());
        device.map_mr_sg(fast.id, &[memory.whole()]).unwrap();
        let window = device.alloc_mw(pd, MwType::Type2).unwrap();
        let reg = |key| SendOp::RegMr {
            mr: fast.id,
            key,
            access: Access::REMOTE_READ,
        };
        let bind = |key| {
            SendOp::BindMw(MwBind {
                mw: window.id,
                key,
                mr: base.id,
                addr: base.addr,
                length: 8,
                access: Access::REMOTE_READ,
            })
        };
        for op in [reg(other.rkey), bind(other.rkey)] {
            let error = device.post_send(qp, &[SendWr::new(1, op, &[])]);
            assert_eq!(error.unwrap_err().reason, PostReason::InvalidKey);
        }
        for op in [reg(fast.rkey.next()), bind(window.rkey.next())] {
            device.post_send(qp, &[SendWr::new(1, op, &[])]).unwrap();
        }
    }

    #[test]
    fn fast_region_reports_address_for_peers() {
        let mut device = RdmaCoreDevice::fake();
        device.fake_windows();
        let (_, qp) = device.fake_queues();
        let pd = device.alloc_pd().unwrap();
        let memory = Memory::new(8192).unwrap();
        let part = memory.slice(4096..4104).unwrap();
        let iova = 0x5000_0000;
        let access = Access::LOCAL_WRITE;
        device
            .reg_mr_iova(pd, &memory.whole(), iova, access)
            .unwrap();
        let fast = device.alloc_fast_mr(pd, 1).unwrap();
        device.map_mr_sg(fast.id, &[part]).unwrap();
        let addr = |device: &RdmaCoreDevice| device.query_mr(fast.id).unwrap().mr.addr;
        assert_eq!(addr(&device), iova + 4096);
        let key = fast.rkey.next();
        let bind = |access| device.regions.bind(fast.id, key, access).unwrap();
        let [plain, zero_based] = [Access::empty(), Access::ZERO_BASED].map(bind);
        assert_eq!(plain.bind_info.addr, iova + 4096);
        assert_eq!(plain.bind_info.mw_access_flags, 0);
        assert_eq!(zero_based.bind_info.mw_access_flags, IBV_ACCESS_ZERO_BASED);
        let op = SendOp::RegMr {
            mr: fast.id,
            key,
            access: Access::ZERO_BASED,
        };
        device.post_send(qp, &[SendWr::new(1, op, &[])]).unwrap();
        assert_eq!(addr(&device), 0);
        // The mapping does not change when it is invalidated.
        let op = SendOp::LocalInv(key);
        device.post_send(qp, &[SendWr::new(2, op, &[])]).unwrap();
        let op = SendOp::RegMr {
            mr: fast.id,
            key: key.next(),
            access: Access::empty(),
        };
        device.post_send(qp, &[SendWr::new(3, op, &[])]).unwrap();
        assert_eq!(addr(&device), iova + 4096);
    }
}
