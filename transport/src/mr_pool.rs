//! A pool of fast-registered regions, one for each connection.
//!
//! An initiator registers the memory of a command before it sends it, and must be sure that the
//! peer's key no longer works before it reports the command done. Allocating a region for each
//! command would be slow, so the regions are allocated once and registered again and again, each
//! time under a new key byte.
//!
//! ```text
//!            map                reg_wr              inv_wr
//!  Idle ────────────▶ Mapped ──────────▶ Registered ───────▶ Invalidating
//!   ▲ ▲                 │                    │                    │
//!   │ └──── put ────────┘   on_invalidated   │   on_invalidated   │
//!   └────────────────────────────────────────┴────────────────────┘
//! ```
//!
//! - [`MrPool`]: the regions not in use. Bound: as many as it was created for.
//! - [`PooledMr`]: a region taken out. It must be put back; a region that is put back while its key
//!   may still work is deregistered at once and replaced, so that no path, however broken, leaves a
//!   key behind.

use std::collections::VecDeque;

use riser_memory::MemSlice;
use riser_state::{State, become_state};

use crate::verbs::{Access, MrId, PdId, RKey, SendFlags, SendOp, SendWr, Verbs, VerbsError, WrId};

/// A range of memory, as it is advertised to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteSegment {
    /// Address of the first byte.
    pub addr: u64,
    /// Key of the region that it lies in.
    pub rkey: RKey,
    /// Length of the range in bytes.
    pub len: u32,
}

/// State of a pooled region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MrState {
    /// Covers nothing that matters; its key does not work.
    Idle,
    /// Has segments; its key does not work yet.
    Mapped,
    /// A registration was posted: from its execution on, its key works.
    Registered,
    /// An invalidation was posted: until its completion, its key may work.
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

/// A region taken from a pool.
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
    /// Identifier of the region.
    #[must_use]
    pub fn id(&self) -> MrId {
        self.id
    }

    /// State of the region.
    #[must_use]
    pub fn state(&self) -> MrState {
        self.state
    }

    /// Present key of the region.
    #[must_use]
    pub fn rkey(&self) -> RKey {
        self.key
    }

    /// Sets what it shall cover, which must be all of `segments`, and gives it a new key.
    ///
    /// # Errors
    /// The errors of [`Verbs::map_mr_sg`]; [`VerbsError::InvalidParameter`] if not all segments
    /// fit.
    ///
    /// # Panics
    /// If its key may still work.
    pub fn map<V: Verbs + ?Sized>(
        &mut self,
        verbs: &mut V,
        segments: &[MemSlice],
    ) -> Result<(), VerbsError> {
        assert!(
            matches!(self.state, MrState::Idle | MrState::Mapped),
            "mapped while {:?}",
            self.state
        );
        self.forget_mapping();
        let want: u64 = segments.iter().map(|s| s.len() as u64).sum();
        if verbs.map_mr_sg(self.id, segments)? != want {
            return Err(VerbsError::InvalidParameter("number of segments"));
        }
        // The device decides by which address peers name the region.
        self.addr = verbs.query_mr(self.id)?.mr.addr;
        self.len = want;
        // Another key byte for each use: a packet with the key of before is refused.
        self.key = self.key.next();
        become_state(&mut self.state, MrState::Mapped);
        Ok(())
    }

    /// The request that makes its key work, to post before the message that has the key.
    ///
    /// # Panics
    /// If nothing is mapped.
    pub fn reg_wr(&mut self, wr_id: WrId, access: Access) -> SendWr<'static> {
        // Its key counts as working from here on, since the device may execute the request before
        // the post returns.
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

    /// Returns the range to advertise to the peer.
    ///
    /// # Panics
    /// If it covers more than one range can say, 4 GiB.
    #[must_use]
    pub fn remote(&self) -> RemoteSegment {
        RemoteSegment {
            addr: self.addr,
            rkey: self.key,
            len: u32::try_from(self.len).expect("a registration shorter than 4 GiB"),
        }
    }

    /// The request that makes its key fail; signaled, since its completion is what counts.
    ///
    /// # Panics
    /// If its key does not work.
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

    /// The invalidation has completed, or the peer invalidated `key`. Answers whether that was this
    /// region's.
    pub fn on_invalidated(&mut self, key: RKey) -> bool {
        let ours =
            // A late completion may be about the key of an earlier use.
            key == self.key && matches!(self.state, MrState::Registered | MrState::Invalidating);
        if ours {
            become_state(&mut self.state, MrState::Idle);
        }
        ours
    }

    /// Drops what was mapped and never registered.
    fn forget_mapping(&mut self) {
        if self.state == MrState::Mapped {
            become_state(&mut self.state, MrState::Idle);
        }
    }
}

/// The regions of a connection that are not in use.
#[derive(Debug)]
pub struct MrPool {
    pd: PdId,
    max_segments: u32,
    free: VecDeque<PooledMr>,
    out: usize,
}

impl MrPool {
    /// Allocates `count` regions of `max_segments` segments.
    ///
    /// # Errors
    /// The errors of [`Verbs::alloc_fast_mr`]; nothing stays allocated then.
    pub fn new<V: Verbs + ?Sized>(
        verbs: &mut V,
        pd: PdId,
        count: usize,
        max_segments: u32,
    ) -> Result<Self, VerbsError> {
        let mut pool = Self {
            pd,
            max_segments,
            free: VecDeque::with_capacity(count),
            out: 0,
        };
        for _ in 0..count {
            match pool.alloc(verbs) {
                Ok(mr) => pool.free.push_back(mr),
                // Those that exist are given back: the caller has no pool to destroy.
                Err(e) => {
                    pool.destroy(verbs);
                    return Err(e);
                }
            }
        }
        Ok(pool)
    }

    fn alloc<V: Verbs + ?Sized>(&self, verbs: &mut V) -> Result<PooledMr, VerbsError> {
        let mr = verbs.alloc_fast_mr(self.pd, self.max_segments)?;
        Ok(PooledMr {
            id: mr.id,
            key: mr.rkey,
            addr: 0,
            len: 0,
            state: MrState::Idle,
        })
    }

    /// Segments that one region covers.
    #[must_use]
    pub fn max_segments(&self) -> u32 {
        self.max_segments
    }

    /// Regions that can be taken.
    #[must_use]
    pub fn available(&self) -> usize {
        self.free.len()
    }

    /// Regions taken and not yet put back.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.out
    }

    /// Takes a region, the one put back longest ago.
    pub fn get(&mut self) -> Option<PooledMr> {
        // The one that has rested longest, so that its key bytes come round as late as possible.
        let mr = self.free.pop_front()?;
        self.out += 1;
        Some(mr)
    }

    /// Puts a region back. One whose key may still work is deregistered, which ends the key, and
    /// replaced. If the device refuses a replacement the pool is one smaller.
    ///
    /// # Errors
    /// That of the replacement's allocation.
    pub fn put<V: Verbs + ?Sized>(
        &mut self,
        verbs: &mut V,
        mut mr: PooledMr,
    ) -> Result<(), VerbsError> {
        debug_assert!(self.out > 0, "a region of another pool");
        self.out = self.out.saturating_sub(1);
        if matches!(mr.state, MrState::Registered | MrState::Invalidating) {
            // The region may be gone already with its device; what counts is that the key is.
            let _ = verbs.dereg_mr(mr.id);
            mr = self.alloc(verbs)?;
        }
        mr.forget_mapping();
        self.free.push_back(mr);
        Ok(())
    }

    /// Deregisters every region that is not in use. Those in use are put back first, or
    /// deregistered by their holder with [`MrPool::discard`].
    pub fn destroy<V: Verbs + ?Sized>(&mut self, verbs: &mut V) {
        for mr in self.free.drain(..) {
            // As in `put`.
            let _ = verbs.dereg_mr(mr.id);
        }
    }

    /// Deregisters a region instead of putting it back; the pool is one smaller.
    pub fn discard<V: Verbs + ?Sized>(&mut self, verbs: &mut V, mr: PooledMr) {
        self.out = self.out.saturating_sub(1);
        // As in `put`.
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
    fn the_table_is_the_diagram() {
        let expected = "Idle: Mapped\n\
                        Mapped: Idle Registered\n\
                        Registered: Idle Invalidating\n\
                        Invalidating: Idle\n";
        assert_eq!(table(&STATES), expected);
    }

    #[test]
    fn every_transition_is_taken() {
        let mut verbs = Pair::new(FabricConfig::default()).a;
        let pd = verbs.alloc_pd().unwrap();
        let mut pool = MrPool::new(&mut verbs, pd, 1, 1).unwrap();
        let memory = [Memory::new(PAGE).unwrap().whole()];
        let access = Access::REMOTE_READ;
        assert_all_taken(&STATES, || {
            // Mapped and put back unused.
            let mut mr = pool.get().unwrap();
            mr.map(&mut verbs, &memory).unwrap();
            pool.put(&mut verbs, mr).unwrap();
            let mut mr = pool.get().unwrap();
            // Invalidated by the peer, then by ourselves.
            mr.map(&mut verbs, &memory).unwrap();
            let _ = mr.reg_wr(WrId(1), access);
            assert!(mr.on_invalidated(mr.rkey()));
            mr.map(&mut verbs, &memory).unwrap();
            let _ = mr.reg_wr(WrId(2), access);
            let _ = mr.inv_wr(WrId(3));
            assert!(mr.on_invalidated(mr.rkey()));
            pool.put(&mut verbs, mr).unwrap();
        });
    }

    #[test]
    #[should_panic(expected = "Idle became Registered")]
    fn nothing_is_registered_without_a_mapping() {
        let mut verbs = Pair::new(FabricConfig::default()).a;
        let pd = verbs.alloc_pd().unwrap();
        let mut mr = MrPool::new(&mut verbs, pd, 1, 1).unwrap().get().unwrap();
        let _ = mr.reg_wr(WrId(1), Access::REMOTE_READ);
    }
}
