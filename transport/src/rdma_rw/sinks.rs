//! Regions for the local memory of READs on iWARP adapters.
//!
//! ```text
//! register ──▶ READ ──▶ completion, or queue pair destroyed ──▶ release ──▶ data is used
//! ```
//!
//! User space has no work request to register memory for local use, and type 2 memory windows only
//! apply to keys of peers. A sink is therefore a separate region, which the device registers and
//! deregisters in a call. Regions are not reused: a key identifies one READ, and is invalid after it.

use riser_memory::MemSlice;

use crate::verbs::{Access, DeviceAttr, MrId, PdId, Sge, Verbs, VerbsError, WrId};

/// Returns the number of READs for a transfer to `segments` contiguous pieces of memory, where each
/// piece is in a different place (Linux `rdma_rw_mr_factor`). With
/// [`DeviceAttr::registered_reads`], this is also the number of regions.
#[must_use]
pub fn mr_factor(attr: &DeviceAttr, segments: u32) -> u32 {
    let per_read = match attr.registered_reads {
        // A region is contiguous.
        true => 1,
        false => attr.max_sge_rd.max(1),
    };
    segments.div_ceil(per_read)
}

/// Sinks of a connection.
#[derive(Debug)]
pub struct ReadSinks {
    pd: PdId,
    /// Maximum number of sinks.
    limit: usize,
    /// Registered sinks with the work request that completes their READs.
    sinks: Vec<(WrId, MrId)>,
    /// Number of sinks since the start.
    total: u64,
}

impl ReadSinks {
    /// Creates the sinks for `transfers` concurrent transfers, each to `segments` pieces of memory.
    /// Returns `None` if the device does not need sinks.
    ///
    /// # Errors
    /// [`VerbsError::InsufficientResources`] if the device does not have as many regions.
    pub fn new(
        attr: &DeviceAttr,
        pd: PdId,
        transfers: u32,
        segments: u32,
    ) -> Result<Option<Self>, VerbsError> {
        if !attr.registered_reads {
            return Ok(None);
        }
        let limit = transfers.saturating_mul(mr_factor(attr, segments));
        if limit > attr.max_mr {
            return Err(VerbsError::InsufficientResources("memory regions"));
        }
        Ok(Some(Self {
            pd,
            limit: limit as usize,
            sinks: Vec::new(),
            total: 0,
        }))
    }

    /// Registers the local memory of a READ that is complete when `wr_id` has completed. Returns the
    /// scatter list entry.
    ///
    /// # Errors
    /// [`VerbsError::InsufficientResources`] if there are too many sinks, or an error from
    /// [`Verbs::reg_mr`].
    pub fn register<V: Verbs + ?Sized>(
        &mut self,
        verbs: &mut V,
        wr_id: WrId,
        memory: &MemSlice,
    ) -> Result<Sge, VerbsError> {
        if self.sinks.len() >= self.limit {
            return Err(VerbsError::InsufficientResources("sinks of READs"));
        }
        let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mr = verbs.reg_mr(self.pd, memory, rights)?;
        self.sinks.push((wr_id, mr.id));
        self.total += 1;
        Ok(mr.sge(0, memory.len()))
    }

    /// Deregisters the sinks of a work request, so that the peer cannot write to them any more. The
    /// READs must have completed, must not have been posted, or their queue pair must be destroyed.
    ///
    /// # Errors
    /// The last error from [`Verbs::dereg_mr`]. The remaining sinks are deregistered nevertheless.
    pub fn release<V: Verbs + ?Sized>(
        &mut self,
        verbs: &mut V,
        wr_id: WrId,
    ) -> Result<(), VerbsError> {
        self.release_if(verbs, |id| id == wr_id)
    }

    /// Deregisters all sinks of a destroyed queue pair.
    ///
    /// # Errors
    /// See [`Self::release`].
    pub fn release_all<V: Verbs + ?Sized>(&mut self, verbs: &mut V) -> Result<(), VerbsError> {
        self.release_if(verbs, |_| true)
    }

    fn release_if<V: Verbs + ?Sized>(
        &mut self,
        verbs: &mut V,
        is_released: impl Fn(WrId) -> bool,
    ) -> Result<(), VerbsError> {
        let mut released = Ok(());
        self.sinks.retain(|&(id, mr)| {
            let is_kept = !is_released(id);
            if !is_kept && let Err(error) = verbs.dereg_mr(mr) {
                released = Err(error);
            }
            is_kept
        });
        released
    }

    /// Returns the number of sinks that are registered.
    #[must_use]
    pub fn registered(&self) -> usize {
        self.sinks.len()
    }

    /// Returns the number of sinks since the start.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::Handle;

    fn attr(registered_reads: bool) -> DeviceAttr {
        DeviceAttr {
            max_mr: 64,
            max_sge_rd: 4,
            registered_reads,
            ..DeviceAttr::default()
        }
    }

    #[test]
    fn sinks_are_counted_by_segment() {
        let factors = |attr: &DeviceAttr| [0, 1, 4, 5, 32].map(|n| mr_factor(attr, n));
        assert_eq!(factors(&attr(true)), [0, 1, 4, 5, 32]);
        assert_eq!(factors(&attr(false)), [0, 1, 1, 2, 8]);
        // The attribute is unknown.
        assert_eq!(factors(&DeviceAttr::default()), [0, 1, 4, 5, 32]);
    }

    #[test]
    fn sinks_fit_into_device() {
        let pd = PdId(Handle::new(0, 1));
        let new = |attr, transfers| ReadSinks::new(&attr, pd, transfers, 2);
        assert!(new(attr(false), u32::MAX).unwrap().is_none());
        assert!(new(attr(true), 32).unwrap().is_some());
        let error = VerbsError::InsufficientResources("memory regions");
        assert_eq!(new(attr(true), 33).unwrap_err(), error);
        assert_eq!(new(attr(true), u32::MAX).unwrap_err(), error);
    }
}
