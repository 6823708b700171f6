//! Pool of fast-registration regions or integrity regions, used per connection.
//!
//! An initiator must register the memory of a command before sending it, and must ensure that the
//! peer can't use the key anymore before completing the command. Allocating a region for each
//! command would be too slow, so we allocate them once and register them repeatedly, each time with
//! a new key byte.
//!
//! ```text
//!            map                reg_wr              inv_wr
//!  Idle ────────────▶ Mapped ──────────▶ Registered ───────▶ Invalidating
//!   ▲ ▲                 │                    │                    │
//!   │ └──── put ────────┘   on_invalidated   │   on_invalidated   │
//!   └────────────────────────────────────────┴────────────────────┘
//! ```
//!
//! - [`MrPool`]: unused regions. The maximum number is set when the pool is created.
//! - [`PooledMr`]: a region that is in use and must be returned. If its key may still be valid when
//!   it is returned, the region is immediately deregistered and replaced, so that no error path can
//!   leave a valid key behind.

use std::collections::VecDeque;

use riser_memory::MemSlice;
use riser_state::{State, become_state};

use crate::verbs::{
    Access, LKey, Mr, MrId, PdId, RKey, SendFlags, SendOp, SendWr, Sge, SigAttrs, Verbs,
    VerbsError, WrId,
};

/// Memory range as advertised to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteSegment {
    /// Start address.
    pub addr: u64,
    /// Region key.
    pub rkey: RKey,
    /// Size in bytes.
    pub len: u32,
}

/// State of a pooled region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MrState {
    /// No memory is mapped and the key is invalid.
    Idle,
    /// Memory is mapped but the key is still invalid.
    Mapped,
    /// A registration was posted. The key will be valid when it is executed.
    Registered,
    /// An invalidation was posted. The key may be valid until it completes.
    Invalidating,
}

impl State for MrState {
    fn may_become(&self, next: &Self) -> bool {
        match self {
            Self::Idle => matches!(next, Self::Mapped),
            Self::Mapped => matches!(next, Self::Idle | Self::Registered),
            Self::Registered => matches!(next, Self::Idle | Self::Invalidating),
            Self::Invalidating => matches!(next, Self::Idle),
        }
    }
}

/// Region allocated from a pool.
#[derive(Debug)]
#[must_use = "a region must be put back"]
pub struct PooledMr {
    id: MrId,
    key: RKey,
    addr: u64,
    len: u64,
    state: MrState,
}

impl PooledMr {
    /// Returns the region ID.
    #[must_use]
    pub fn id(&self) -> MrId {
        self.id
    }

    /// Returns the current state.
    #[must_use]
    pub fn state(&self) -> MrState {
        self.state
    }

    /// Returns the current key.
    #[must_use]
    pub fn rkey(&self) -> RKey {
        self.key
    }

    /// Maps the memory in `segments` and creates a new key.
    ///
    /// # Errors
    /// Returns an error from [`Verbs::map_mr_sg`], or [`VerbsError::InvalidParameter`] if not all
    /// segments fit into the region.
    ///
    /// # Panics
    /// Panics if the key may still be valid.
    pub fn map<V: Verbs + ?Sized>(
        &mut self,
        verbs: &mut V,
        segments: &[MemSlice],
    ) -> Result<(), VerbsError> {
        self.forget_mapping();
        let want: u64 = segments.iter().map(|s| s.len() as u64).sum();
        if verbs.map_mr_sg(self.id, segments)? != want {
            return Err(VerbsError::InvalidParameter("number of segments"));
        }
        self.on_mapped(verbs)
    }

    /// Maps the memory and signature attributes of an integrity region and creates a new key. The
    /// size of the region is the size of the wire layout.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// Returns an error from [`Verbs::map_mr_sg_pi`].
    ///
    /// # Panics
    /// Panics if the key may still be valid.
    pub fn map_pi<V: Verbs + ?Sized>(
        &mut self,
        verbs: &mut V,
        data: &[MemSlice],
        protection: &[MemSlice],
        attrs: &SigAttrs,
    ) -> Result<(), VerbsError> {
        self.forget_mapping();
        verbs.map_mr_sg_pi(self.id, data, protection, attrs)?;
        self.on_mapped(verbs)
    }

    fn on_mapped<V: Verbs + ?Sized>(&mut self, verbs: &mut V) -> Result<(), VerbsError> {
        // The address used by peers is chosen by the device.
        let Mr { addr, length, .. } = verbs.query_mr(self.id)?.mr;
        (self.addr, self.len) = (addr, length);
        // Use a new key byte each time, so that packets using the previous key are rejected.
        self.key = self.key.next();
        become_state(&mut self.state, MrState::Mapped);
        Ok(())
    }

    /// Returns the work request to make the key valid, which must be posted before the message
    /// containing the key.
    ///
    /// # Panics
    /// Panics if no memory is mapped.
    pub fn reg_wr(&mut self, wr_id: WrId, access: Access) -> SendWr<'static> {
        // We assume that the key is valid after this, since the device can execute the request
        // before the post returns.
        become_state(&mut self.state, MrState::Registered);
        SendWr {
            wr_id,
            op: SendOp::RegMr {
                mr: self.id,
                key: self.key,
                access,
            },
            sges: &[],
            inline: None,
            remote_srqn: None,
            flags: SendFlags::empty(),
            ud: None,
        }
    }

    /// Returns the range to be advertised to the peer.
    ///
    /// # Panics
    /// Panics if the size exceeds the maximum of a single range, which is 4 GiB.
    #[must_use]
    pub fn remote(&self) -> RemoteSegment {
        RemoteSegment {
            addr: self.addr,
            rkey: self.key,
            len: u32::try_from(self.len).expect("registration is less than 4 GiB"),
        }
    }

    /// Returns the range for a scatter list. The local key of a region that is registered by a work
    /// request has the same number as its remote key.
    ///
    /// Currently not used.
    ///
    /// # Panics
    /// See [`PooledMr::remote`].
    #[must_use]
    pub fn sge(&self) -> Sge {
        let RemoteSegment { addr, rkey, len } = self.remote();
        Sge {
            addr,
            length: len,
            lkey: LKey(rkey.0),
        }
    }

    /// Returns the work request to invalidate the key. This is signaled because we need to wait for
    /// the completion.
    ///
    /// # Panics
    /// Panics if the key is not valid.
    pub fn inv_wr(&mut self, wr_id: WrId) -> SendWr<'static> {
        become_state(&mut self.state, MrState::Invalidating);
        SendWr {
            wr_id,
            op: SendOp::LocalInv(self.key),
            sges: &[],
            inline: None,
            remote_srqn: None,
            flags: SendFlags::SIGNALED,
            ud: None,
        }
    }

    /// Called when the invalidation has completed or the peer has invalidated `key`. Returns true
    /// if this is the key of this region.
    pub fn on_invalidated(&mut self, key: RKey) -> bool {
        let ours =
            // A delayed completion can be for a previously used key.
            key == self.key && matches!(self.state, MrState::Registered | MrState::Invalidating);
        if ours {
            become_state(&mut self.state, MrState::Idle);
        }
        ours
    }

    /// Removes mapped memory that was not registered.
    ///
    /// # Panics
    /// Panics if the key may still be valid.
    fn forget_mapping(&mut self) {
        assert!(
            matches!(self.state, MrState::Idle | MrState::Mapped),
            "mapped while {:?}",
            self.state
        );
        if self.state == MrState::Mapped {
            become_state(&mut self.state, MrState::Idle);
        }
    }
}

/// Unused regions of a connection.
#[derive(Debug)]
pub struct MrPool {
    pd: PdId,
    max_segments: u32,
    /// Maximum number of protection segments, for integrity regions.
    max_protection: Option<u32>,
    free: VecDeque<PooledMr>,
    out: usize,
}

impl MrPool {
    /// Allocates `count` regions with `max_segments` segments.
    ///
    /// # Errors
    /// Returns an error from [`Verbs::alloc_fast_mr`]. In this case nothing is allocated.
    pub fn new<V: Verbs + ?Sized>(
        verbs: &mut V,
        pd: PdId,
        count: usize,
        max_segments: u32,
    ) -> Result<Self, VerbsError> {
        Self::fill(verbs, pd, count, max_segments, None)
    }

    /// Allocates `count` integrity regions with `max_data` data segments and `max_protection`
    /// protection segments.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// Returns an error from [`Verbs::alloc_mr_integrity`]. In this case nothing is allocated.
    pub fn with_integrity<V: Verbs + ?Sized>(
        verbs: &mut V,
        pd: PdId,
        count: usize,
        max_data: u32,
        max_protection: u32,
    ) -> Result<Self, VerbsError> {
        Self::fill(verbs, pd, count, max_data, Some(max_protection))
    }

    fn fill<V: Verbs + ?Sized>(
        verbs: &mut V,
        pd: PdId,
        count: usize,
        max_segments: u32,
        max_protection: Option<u32>,
    ) -> Result<Self, VerbsError> {
        let mut pool = Self {
            pd,
            max_segments,
            max_protection,
            free: VecDeque::with_capacity(count),
            out: 0,
        };
        for _ in 0..count {
            match pool.alloc(verbs) {
                Ok(mr) => pool.free.push_back(mr),
                // Deallocate existing regions, since the caller has no pool to destroy.
                Err(e) => {
                    pool.destroy(verbs);
                    return Err(e);
                }
            }
        }
        Ok(pool)
    }

    fn alloc<V: Verbs + ?Sized>(&self, verbs: &mut V) -> Result<PooledMr, VerbsError> {
        let mr = match self.max_protection {
            None => verbs.alloc_fast_mr(self.pd, self.max_segments)?,
            Some(protection) => verbs.alloc_mr_integrity(self.pd, self.max_segments, protection)?,
        };
        Ok(PooledMr {
            id: mr.id,
            key: mr.rkey,
            addr: 0,
            len: 0,
            state: MrState::Idle,
        })
    }

    /// Returns the maximum number of segments per region, or of data segments.
    #[must_use]
    pub fn max_segments(&self) -> u32 {
        self.max_segments
    }

    /// Returns the number of available regions.
    #[must_use]
    pub fn available(&self) -> usize {
        self.free.len()
    }

    /// Returns the number of regions in use.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.out
    }

    /// Allocates the region that was returned to the pool first.
    pub fn get(&mut self) -> Option<PooledMr> {
        // Use the oldest region, so that it takes as long as possible until a key byte is reused.
        let mr = self.free.pop_front()?;
        self.out += 1;
        Some(mr)
    }

    /// Returns a region to the pool. If its key may still be valid, the region is deregistered,
    /// which invalidates the key, and replaced. If the device cannot allocate a new region, the
    /// pool size is reduced.
    ///
    /// # Errors
    /// Returns the allocation error for the new region.
    pub fn release<V: Verbs + ?Sized>(
        &mut self,
        verbs: &mut V,
        mut mr: PooledMr,
    ) -> Result<(), VerbsError> {
        debug_assert!(self.out > 0, "a region of another pool");
        self.out = self.out.saturating_sub(1);
        if matches!(mr.state, MrState::Registered | MrState::Invalidating) {
            // The region may already have been removed together with its device, which also
            // invalidates the key.
            let _ = verbs.dereg_mr(mr.id);
            mr = self.alloc(verbs)?;
        }
        mr.forget_mapping();
        self.free.push_back(mr);
        Ok(())
    }

    /// Deregisters all unused regions. Regions in use must be returned first, or deregistered using
    /// [`MrPool::discard`].
    pub fn destroy<V: Verbs + ?Sized>(&mut self, verbs: &mut V) {
        for mr in self.free.drain(..) {
            // See `release`.
            let _ = verbs.dereg_mr(mr.id);
        }
    }

    /// Deregisters a region instead of returning it. This reduces the pool size.
    pub fn discard<V: Verbs + ?Sized>(&mut self, verbs: &mut V, mr: PooledMr) {
        self.out = self.out.saturating_sub(1);
        // See `release`.
        let _ = verbs.dereg_mr(mr.id);
    }
}

#[cfg(test)]
mod tests {
    use riser_memory::{Memory, PAGE};
    use riser_state::testing::{assert_all_taken, table};

    use super::*;
    use crate::loopback::{FabricConfig, Pair};

    const STATES: [MrState; 4] = [
        MrState::Idle,
        MrState::Mapped,
        MrState::Registered,
        MrState::Invalidating,
    ];

    #[test]
    fn transitions_match_diagram() {
        let expected = "Idle: Mapped\n\
                        Mapped: Idle Registered\n\
                        Registered: Idle Invalidating\n\
                        Invalidating: Idle\n";
        assert_eq!(table(&STATES), expected);
    }

    #[test]
    fn tests_cover_all_transitions() {
        let mut verbs = Pair::new(FabricConfig::default()).a;
        let pd = verbs.alloc_pd().unwrap();
        let mut pool = MrPool::new(&mut verbs, pd, 1, 1).unwrap();
        let memory = [Memory::new(PAGE).unwrap().whole()];
        let access = Access::REMOTE_READ;
        assert_all_taken(&STATES, || {
            // Mapped and returned without being used.
            let mut mr = pool.get().unwrap();
            mr.map(&mut verbs, &memory).unwrap();
            pool.release(&mut verbs, mr).unwrap();
            let mut mr = pool.get().unwrap();
            // Invalidated first by the peer and then by us.
            mr.map(&mut verbs, &memory).unwrap();
            let _ = mr.reg_wr(WrId(1), access);
            assert!(mr.on_invalidated(mr.rkey()));
            mr.map(&mut verbs, &memory).unwrap();
            let _ = mr.reg_wr(WrId(2), access);
            let _ = mr.inv_wr(WrId(3));
            assert!(mr.on_invalidated(mr.rkey()));
            pool.release(&mut verbs, mr).unwrap();
        });
    }

    #[test]
    #[should_panic(expected = "Idle became Registered")]
    fn registering_without_mapping_panics() {
        let mut verbs = Pair::new(FabricConfig::default()).a;
        let pd = verbs.alloc_pd().unwrap();
        let mut mr = MrPool::new(&mut verbs, pd, 1, 1).unwrap().get().unwrap();
        let _ = mr.reg_wr(WrId(1), Access::REMOTE_READ);
    }
}
