//! Protection domains, and their memory regions and windows.

use riser_memory::{MemSlice, fault};

use crate::mr::{KeyError, MrTable};
use crate::nic::NicLimits;
use crate::table::Table;
use crate::verbs::{
    Access, Mr, MrAdvice, MrAttr, MrChange, MrId, Mw, MwAttr, MwId, MwType, PdId, QpId, Sge,
    SigAttrs, SigError, VerbsError,
};

#[derive(Debug, Default)]
struct Pd {
    /// Number of QPs, SRQs, address handles and memory regions.
    users: u32,
}

/// Protection domains, and their memory regions and windows.
#[derive(Debug)]
pub(crate) struct MemoryTables {
    pds: Table<PdId, Pd>,
    pub(in crate::nic) mrs: MrTable,
    /// Number of failed memory accesses in this process already reported to the regions.
    faults: u64,
}

impl MemoryTables {
    /// Creates empty tables. Keys are generated from `key_seed`.
    pub(in crate::nic) fn new(limits: &NicLimits, key_seed: [u8; 16]) -> Self {
        Self {
            pds: Table::new("protection domain", limits.max_pd),
            mrs: MrTable::new(limits.max_mr, limits.max_fast_reg_segments, key_seed),
            faults: fault::count(),
        }
    }

    /// Returns the number of protection domains.
    pub(in crate::nic) fn pd_count(&self) -> usize {
        self.pds.len()
    }

    pub(crate) fn alloc_pd(&mut self) -> Result<PdId, VerbsError> {
        self.pds.insert(Pd::default())
    }

    pub(crate) fn dealloc_pd(&mut self, pd: PdId) -> Result<(), VerbsError> {
        if self.pds.get(pd)?.users > 0 {
            return Err(VerbsError::ResourceBusy("protection domain"));
        }
        self.pds.remove(pd).map(drop)
    }

    /// Verifies that a protection domain exists.
    pub(in crate::nic) fn check_pd(&self, pd: PdId) -> Result<(), VerbsError> {
        self.pds.get(pd).map(drop)
    }

    /// Adds an object to the user count of its protection domain.
    pub(in crate::nic) fn hold_pd(&mut self, pd: PdId) -> Result<(), VerbsError> {
        self.pds.get_mut(pd)?.users += 1;
        Ok(())
    }

    /// Removes an object from the user count of its protection domain.
    pub(in crate::nic) fn release_pd(&mut self, pd: PdId) {
        if let Ok(pd) = self.pds.get_mut(pd) {
            pd.users -= 1;
        }
    }

    /// Creates a region or window and adds it to the user count of its protection domain.
    fn register<T>(
        &mut self,
        pd: PdId,
        register: impl FnOnce(&mut MrTable) -> Result<T, VerbsError>,
    ) -> Result<T, VerbsError> {
        let domain = self.pds.get_mut(pd)?;
        let mr = register(&mut self.mrs)?;
        domain.users += 1;
        Ok(mr)
    }

    pub(crate) fn reg_mr(
        &mut self,
        pd: PdId,
        range: &MemSlice,
        access: Access,
    ) -> Result<Mr, VerbsError> {
        self.register(pd, |mrs| mrs.reg(pd, range, access))
    }

    pub(crate) fn reg_mr_iova(
        &mut self,
        pd: PdId,
        range: &MemSlice,
        iova: u64,
        access: Access,
    ) -> Result<Mr, VerbsError> {
        self.register(pd, |mrs| mrs.reg_iova(pd, range, iova, access))
    }

    pub(crate) fn rereg_mr(&mut self, mr: MrId, change: &MrChange<'_>) -> Result<Mr, VerbsError> {
        if let Some(pd) = change.pd {
            self.pds.get(pd)?;
        }
        let before = self.mrs.query(mr)?.pd;
        let changed = self.mrs.rereg(mr, change)?;
        if let Some(pd) = change.pd {
            self.hold_pd(pd)?;
            self.release_pd(before);
        }
        Ok(changed)
    }

    pub(crate) fn alloc_null_mr(&mut self, pd: PdId) -> Result<Mr, VerbsError> {
        self.register(pd, |mrs| mrs.alloc_null(pd))
    }

    pub(crate) fn alloc_fast_mr(&mut self, pd: PdId, max_segments: u32) -> Result<Mr, VerbsError> {
        self.register(pd, |mrs| mrs.alloc_fast(pd, max_segments))
    }

    pub(crate) fn advise_mr(
        &mut self,
        pd: PdId,
        advice: MrAdvice,
        sges: &[Sge],
    ) -> Result<(), VerbsError> {
        self.pds.get(pd)?;
        let write = advice == MrAdvice::PrefetchWrite;
        for sge in sges {
            let span = self
                .mrs
                .resolve_local(pd, sge, write)
                .map_err(|e| match e {
                    KeyError::Right => VerbsError::InvalidAccess("region is not writable"),
                    KeyError::Range => VerbsError::InvalidParameter("range of a region"),
                    _ => VerbsError::InvalidHandle("memory region"),
                })?;
            span.populate(write)
                .map_err(|_| VerbsError::InvalidParameter("range of a region"))?;
        }
        Ok(())
    }

    pub(crate) fn map_mr_sg(&mut self, mr: MrId, segments: &[MemSlice]) -> Result<u64, VerbsError> {
        self.mrs.map_sg(mr, segments)
    }

    pub(crate) fn alloc_mr_integrity(
        &mut self,
        pd: PdId,
        max_data: u32,
        max_protection: u32,
    ) -> Result<Mr, VerbsError> {
        self.register(pd, |mrs| mrs.alloc_integrity(pd, max_data, max_protection))
    }

    pub(crate) fn map_mr_sg_pi(
        &mut self,
        mr: MrId,
        data: &[MemSlice],
        protection: &[MemSlice],
        attrs: &SigAttrs,
    ) -> Result<u64, VerbsError> {
        self.mrs.map_sg_pi(mr, data, protection, attrs)
    }

    pub(crate) fn check_mr_status(&mut self, mr: MrId) -> Result<Option<SigError>, VerbsError> {
        self.mrs.check_status(mr)
    }

    /// Returns the memory region with this index in its id.
    pub(crate) fn mr_at(&self, index: u32) -> Option<MrId> {
        self.mrs.at(index)
    }

    pub(crate) fn query_mr(&self, mr: MrId) -> Result<MrAttr, VerbsError> {
        self.mrs.query(mr)
    }

    pub(crate) fn dereg_mr(&mut self, mr: MrId) -> Result<(), VerbsError> {
        let pd = self.mrs.dereg(mr)?;
        self.release_pd(pd);
        Ok(())
    }

    pub(crate) fn alloc_mw(&mut self, pd: PdId, mw_type: MwType) -> Result<Mw, VerbsError> {
        self.register(pd, |mrs| mrs.alloc_window(pd, mw_type))
    }

    pub(crate) fn query_mw(&self, mw: MwId) -> Result<MwAttr, VerbsError> {
        self.mrs.query_window(mw)
    }

    pub(crate) fn dealloc_mw(&mut self, mw: MwId) -> Result<(), VerbsError> {
        let pd = self.mrs.dealloc_window(mw)?;
        self.release_pd(pd);
        Ok(())
    }

    /// Unbinds the windows of a destroyed QP.
    pub(in crate::nic) fn unbind_all(&mut self, qp: QpId) {
        self.mrs.unbind_all(qp);
    }

    /// Reports new failed memory accesses to the regions. Returns the number of all failed memory
    /// accesses in this process.
    pub(in crate::nic) fn report_faults(&mut self) -> u64 {
        let faults = fault::count();
        if faults != self.faults {
            self.faults = faults;
            self.mrs.page_faulted();
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use riser_memory::Memory;

    use super::*;

    fn memory() -> MemoryTables {
        let limits = NicLimits {
            max_pd: 2,
            ..NicLimits::default()
        };
        MemoryTables::new(&limits, [7; 16])
    }

    #[test]
    fn pd_is_busy_until_users_are_released() {
        let mut memory = memory();
        let pd = memory.alloc_pd().unwrap();
        let buffer = Memory::new(4096).unwrap();
        let access = Access::LOCAL_WRITE;
        let mr = memory.reg_mr(pd, &buffer.whole(), access).unwrap();
        let mw = memory.alloc_mw(pd, MwType::Type2).unwrap();
        memory.hold_pd(pd).unwrap();
        let busy = Err(VerbsError::ResourceBusy("protection domain"));
        assert_eq!(memory.dealloc_pd(pd), busy);
        memory.dereg_mr(mr.id).unwrap();
        memory.dealloc_mw(mw.id).unwrap();
        assert_eq!(memory.dealloc_pd(pd), busy);
        memory.release_pd(pd);
        memory.dealloc_pd(pd).unwrap();
        assert!(memory.check_pd(pd).is_err() && memory.hold_pd(pd).is_err());
    }

    #[test]
    fn rereg_moves_region_to_other_pd() {
        let mut memory = memory();
        let [old, new] = [(); 2].map(|()| memory.alloc_pd().unwrap());
        let mr = memory.alloc_fast_mr(old, 1).unwrap();
        assert_eq!(memory.query_mr(mr.id).unwrap().pd, old);
        memory.dereg_mr(mr.id).unwrap();
        let buffer = Memory::new(4096).unwrap();
        let access = Access::LOCAL_WRITE;
        let mr = memory.reg_mr(old, &buffer.whole(), access).unwrap();
        let change = MrChange {
            pd: Some(new),
            ..MrChange::default()
        };
        let mr = memory.rereg_mr(mr.id, &change).unwrap();
        memory.dealloc_pd(old).unwrap();
        assert!(memory.dealloc_pd(new).is_err());
        memory.dereg_mr(mr.id).unwrap();
        memory.dealloc_pd(new).unwrap();
    }

    #[test]
    fn failed_registration_does_not_hold_pd() {
        let mut memory = memory();
        let pd = memory.alloc_pd().unwrap();
        let segments = NicLimits::default().max_fast_reg_segments + 1;
        assert!(memory.alloc_fast_mr(pd, segments).is_err());
        memory.dealloc_pd(pd).unwrap();
    }
}
