//! Transfers: plans the RDMA READs or WRITEs that move bytes between local memory and the ranges of
//! a peer.
//!
//! A target answers a command by writing to, or reading from, memory that the initiator described as
//! a list of remote ranges, while its own data lies in a list of local segments. [`RwContext::plan`]
//! cuts both lists into work requests: one request covers one remote range at most, has as many
//! scatter-gather entries as the queue pair allows and is no longer than a message may be. The number
//! of requests is known before anything is posted, so that the caller can take that much send-queue
//! credit first and wait if there is none.
//!
//! ```text
//!  empty ──plan──▶ planned ──post──▶ posted ──last completion──▶ release ──▶ empty
//!                     └──────────────── release ────────────────────────────────┘
//! ```
//!
//! - [`RwContext`]: one transfer. It keeps the local memory alive until it is released, and keeps its
//!   own lists, so that a context used again allocates nothing.
//! - [`LocalSegment`], [`RemoteSegment`]: what is given.
//!
//! Bounds: [`RwLimits::max_wrs`] requests in a plan.
//!
//! Not implemented: registering the local side, which a device that needs a remote key for the sink of
//! a READ would want. None of our providers is of that kind.

use arrayvec::ArrayVec;
use riser_memory::MemSlice;
use thiserror::Error;

use crate::verbs::{
    LKey, PostError, QpId, RKey, RemoteAddr, SendFlags, SendOp, SendWr, Sge, Verbs, WrId,
};

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the peer's memory to ours: RDMA READ.
    Read,
    /// From our memory to the peer's: RDMA WRITE.
    Write,
}

/// A piece of local memory with the key of the region it lies in.
#[derive(Clone, Debug)]
pub struct LocalSegment {
    /// The bytes.
    pub slice: MemSlice,
    /// Their key.
    pub lkey: LKey,
}

/// A range of the peer's memory, as it described it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteSegment {
    /// Address of the first byte, as the peer counts.
    pub addr: u64,
    /// The peer's key.
    pub rkey: RKey,
    /// Length in bytes.
    pub len: u32,
}

/// What a plan must keep to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RwLimits {
    /// Scatter-gather entries of one request.
    pub max_sge: u32,
    /// Bytes of one request.
    pub max_message: u32,
    /// Requests of one plan.
    pub max_wrs: u32,
}

/// Why a transfer cannot be planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RwError {
    /// A remote range runs past the end of the address space.
    #[error("remote range {addr:#x}+{len} wraps")]
    RemoteWraps {
        /// Where it begins.
        addr: u64,
        /// Its length.
        len: u32,
    },
    /// The local memory is shorter than the remote ranges together.
    #[error("{local} bytes of local memory for {remote} bytes of remote ranges")]
    LocalTooShort {
        /// Bytes there are after the offset.
        local: u64,
        /// Bytes that the remote ranges name.
        remote: u64,
    },
    /// It takes more requests than a plan may have.
    #[error("the transfer takes more than {max} work requests")]
    TooManyWrs {
        /// The limit.
        max: u32,
    },
    /// The limits allow no request at all.
    #[error("limits of zero")]
    NoRoom,
}

#[derive(Clone, Copy, Debug)]
struct Planned {
    remote: RemoteAddr,
    first_sge: usize,
    sges: usize,
}

/// One transfer.
#[derive(Debug)]
pub struct RwContext {
    direction: Direction,
    wrs: Vec<Planned>,
    sges: Vec<Sge>,
    keep: Vec<MemSlice>,
    bytes: u64,
}

impl Default for RwContext {
    fn default() -> Self {
        Self::with_capacity(0, 0)
    }
}

impl RwContext {
    /// An empty context with room for this many requests and entries before it allocates.
    #[must_use]
    pub fn with_capacity(wrs: usize, sges: usize) -> Self {
        Self {
            direction: Direction::Read,
            wrs: Vec::with_capacity(wrs),
            sges: Vec::with_capacity(sges),
            keep: Vec::with_capacity(sges),
            bytes: 0,
        }
    }

    /// Plans the transfer of all bytes of `remote`, from or to the local bytes that begin `offset`
    /// bytes into `local`. Answers the number of requests. What was planned before is released.
    ///
    /// # Errors
    /// [`RwError`]; the context is empty then.
    pub fn plan(
        &mut self,
        direction: Direction,
        local: &[LocalSegment],
        offset: u64,
        remote: &[RemoteSegment],
        limits: RwLimits,
    ) -> Result<usize, RwError> {
        self.release();
        self.direction = direction;
        let outcome = self.plan_all(local, offset, remote, limits);
        if outcome.is_err() {
            self.release();
        }
        outcome
    }

    fn plan_all(
        &mut self,
        local: &[LocalSegment],
        offset: u64,
        remote: &[RemoteSegment],
        limits: RwLimits,
    ) -> Result<usize, RwError> {
        if limits.max_sge == 0 || limits.max_message == 0 {
            return Err(RwError::NoRoom);
        }
        let have: u64 = local.iter().map(|s| s.slice.len() as u64).sum();
        let want: u64 = remote.iter().map(|r| u64::from(r.len)).sum();
        let after = have.saturating_sub(offset);
        if after < want {
            return Err(RwError::LocalTooShort {
                local: after,
                remote: want,
            });
        }
        let mut cursor = Cursor::new(local, offset);
        for range in remote {
            // The last byte may be the address space's last.
            let last = u64::from(range.len).saturating_sub(1);
            if range.addr.checked_add(last).is_none() {
                return Err(RwError::RemoteWraps {
                    addr: range.addr,
                    len: range.len,
                });
            }
            let mut done = 0;
            while done < range.len {
                if self.wrs.len() as u64 >= u64::from(limits.max_wrs) {
                    return Err(RwError::TooManyWrs {
                        max: limits.max_wrs,
                    });
                }
                let room = (range.len - done).min(limits.max_message);
                let remote = RemoteAddr {
                    addr: range.addr + u64::from(done),
                    rkey: range.rkey,
                };
                done += self.plan_one(&mut cursor, remote, room, limits.max_sge);
            }
        }
        self.bytes = want;
        self.keep
            .extend(cursor.used().iter().map(|s| s.slice.clone()));
        Ok(self.wrs.len())
    }

    /// Plans one request of at most `room` bytes; answers how many it has.
    fn plan_one(
        &mut self,
        cursor: &mut Cursor<'_>,
        remote: RemoteAddr,
        room: u32,
        max_sge: u32,
    ) -> u32 {
        let first_sge = self.sges.len();
        let mut taken = 0;
        while taken < room && self.sges.len() - first_sge < max_sge as usize {
            let sge = cursor.take(room - taken);
            taken += sge.length;
            self.sges.push(sge);
        }
        self.wrs.push(Planned {
            remote,
            first_sge,
            sges: self.sges.len() - first_sge,
        });
        taken
    }

    /// Work requests that it takes.
    #[must_use]
    pub fn wr_count(&self) -> usize {
        self.wrs.len()
    }

    /// Bytes that it moves.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Posts the plan, and `then` behind it. The last request of all is signaled as `then` says, or,
    /// without one, always, and bears `wr_id`; those before complete only if they fail, and bear
    /// `inner`.
    ///
    /// # Errors
    /// [`PostError`], whose index counts the plan's requests and then `then`. What came before it is
    /// posted and will complete.
    pub fn post<V: Verbs + ?Sized>(
        &self,
        verbs: &mut V,
        qp: QpId,
        wr_id: WrId,
        inner: WrId,
        then: Option<SendWr<'_>>,
    ) -> Result<(), PostError> {
        const CHUNK: usize = 16;
        let total = self.wrs.len() + usize::from(then.is_some());
        let mut posted = 0;
        while posted < total {
            let end = (posted + CHUNK).min(total);
            let chunk: ArrayVec<SendWr<'_>, CHUNK> = (posted..end)
                .map(|i| match (self.wrs.get(i), then) {
                    (Some(w), then) => {
                        let is_last = then.is_none() && i + 1 == total;
                        self.request(w, if is_last { wr_id } else { inner }, is_last)
                    }
                    (None, Some(then)) => then,
                    (None, None) => unreachable!("the count leaves nothing else"),
                })
                .collect();
            verbs.post_send(qp, &chunk).map_err(|e| PostError {
                index: e.index + posted,
                ..e
            })?;
            posted = end;
        }
        Ok(())
    }

    fn request(&self, w: &Planned, wr_id: WrId, signaled: bool) -> SendWr<'_> {
        SendWr {
            wr_id,
            op: match self.direction {
                Direction::Read => SendOp::Read(w.remote),
                Direction::Write => SendOp::Write(w.remote),
            },
            sges: &self.sges[w.first_sge..][..w.sges],
            flags: if signaled {
                SendFlags::SIGNALED
            } else {
                SendFlags::empty()
            },
            ud: None,
        }
    }

    /// Lets go of the local memory. Only once every posted request has completed or the queue pair
    /// is gone.
    pub fn release(&mut self) {
        self.wrs.clear();
        self.sges.clear();
        self.keep.clear();
        self.bytes = 0;
    }
}

/// A walk over the local segments.
struct Cursor<'a> {
    local: &'a [LocalSegment],
    first: usize,
    index: usize,
    within: usize,
}

impl<'a> Cursor<'a> {
    fn new(local: &'a [LocalSegment], offset: u64) -> Self {
        let mut left = offset;
        let mut index = 0;
        while let Some(s) = local.get(index) {
            let len = s.slice.len() as u64;
            if left < len {
                break;
            }
            left -= len;
            index += 1;
        }
        Self {
            local,
            first: index,
            index,
            within: left as usize,
        }
    }

    /// The next at most `max` bytes that lie in one segment. There must be some.
    fn take(&mut self, max: u32) -> Sge {
        loop {
            let s = &self.local[self.index];
            let left = s.slice.len() - self.within;
            if left == 0 {
                self.index += 1;
                self.within = 0;
                continue;
            }
            let length = left.min(max as usize);
            let addr = s.slice.addr() + self.within as u64;
            self.within += length;
            return Sge {
                addr,
                length: length as u32,
                lkey: s.lkey,
            };
        }
    }

    fn used(&self) -> &'a [LocalSegment] {
        let end = (self.index + 1).min(self.local.len());
        &self.local[self.first.min(end)..end]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use riser_memory::Memory;

    use super::*;

    const LIMITS: RwLimits = RwLimits {
        max_sge: 3,
        max_message: 1000,
        max_wrs: 64,
    };

    fn locals(memory: &Memory, lens: &[usize]) -> Vec<LocalSegment> {
        let mut at = 0;
        lens.iter()
            .map(|&len| {
                let slice = memory.slice(at..at + len).unwrap();
                at += len + 1;
                LocalSegment {
                    slice,
                    lkey: LKey(7),
                }
            })
            .collect()
    }

    fn remote(addr: u64, len: u32) -> RemoteSegment {
        RemoteSegment {
            addr,
            rkey: RKey(9),
            len,
        }
    }

    fn shape(c: &RwContext) -> Vec<(u64, Vec<u32>)> {
        c.wrs
            .iter()
            .map(|w| {
                let sges = &c.sges[w.first_sge..][..w.sges];
                (w.remote.addr, sges.iter().map(|s| s.length).collect())
            })
            .collect()
    }

    #[test]
    fn requests_end_at_remote_ranges_at_the_entry_limit_and_at_the_message_limit() {
        let memory = Memory::new(8192).unwrap();
        let local = locals(&memory, &[10, 20, 30, 40, 3000]);
        let mut c = RwContext::default();
        let n = c
            .plan(
                Direction::Write,
                &local,
                5,
                &[remote(0x1000, 15), remote(0x9000, 0), remote(0x5000, 2080)],
                LIMITS,
            )
            .unwrap();
        assert_eq!(n, 4);
        assert_eq!(c.bytes(), 2095);
        assert_eq!(
            shape(&c),
            [
                (0x1000, vec![5, 10]),
                (0x5000, vec![10, 30, 40]),
                (0x5050, vec![1000]),
                (0x5438, vec![1000]),
            ]
        );
        assert_eq!(c.keep.len(), 5);
        c.release();
        assert!(c.keep.is_empty() && c.wr_count() == 0);
    }

    #[test]
    fn what_cannot_be_planned_leaves_nothing() {
        let memory = Memory::new(8192).unwrap();
        let local = locals(&memory, &[100]);
        let mut c = RwContext::default();
        let mut fails = |offset, remote: &[RemoteSegment], limits| {
            let e = c
                .plan(Direction::Read, &local, offset, remote, limits)
                .unwrap_err();
            assert!(c.wr_count() == 0 && c.keep.is_empty() && c.sges.is_empty());
            e
        };
        assert_eq!(
            fails(1, &[remote(0, 100)], LIMITS),
            RwError::LocalTooShort {
                local: 99,
                remote: 100
            }
        );
        assert_eq!(
            fails(0, &[remote(u64::MAX - 1, 3)], LIMITS),
            RwError::RemoteWraps {
                addr: u64::MAX - 1,
                len: 3
            }
        );
        let one = RwLimits {
            max_wrs: 1,
            ..LIMITS
        };
        assert_eq!(
            fails(0, &[remote(0, 1), remote(8, 1)], one),
            RwError::TooManyWrs { max: 1 }
        );
        let none = RwLimits {
            max_sge: 0,
            ..LIMITS
        };
        assert_eq!(fails(0, &[remote(0, 1)], none), RwError::NoRoom);
        let last = [remote(u64::MAX - 1, 2)];
        assert_eq!(c.plan(Direction::Read, &local, 0, &last, LIMITS), Ok(1));
    }

    proptest! {
        #[test]
        fn splitting_conserves_bytes_and_their_order(
            local_lens in proptest::collection::vec(0usize..300, 1..12),
            remote_lens in proptest::collection::vec(0u32..400, 0..8),
            offset in 0u64..200, max_sge in 1u32..5, max_message in 1u32..500,
        ) {
            let memory = Memory::new(8192).unwrap();
            let local = locals(&memory, &local_lens);
            let remote: Vec<_> = remote_lens
                .iter()
                .enumerate()
                .map(|(i, &len)| remote(i as u64 * 10_000, len))
                .collect();
            let limits = RwLimits { max_sge, max_message, max_wrs: 10_000 };
            let mut c = RwContext::default();
            let have = local_lens.iter().sum::<usize>() as u64;
            let want: u64 = remote_lens.iter().map(|&l| u64::from(l)).sum();
            let planned = c.plan(Direction::Read, &local, offset, &remote, limits);
            prop_assert_eq!(planned.is_ok(), have.saturating_sub(offset) >= want);
            if planned.is_ok() {
                let bytes = |addr: u64, len: u64| (addr..addr + len).collect::<Vec<_>>();
                let local_bytes: Vec<u64> = local
                    .iter()
                    .flat_map(|s| bytes(s.slice.addr(), s.slice.len() as u64))
                    .skip(offset as usize)
                    .take(want as usize)
                    .collect();
                let remote_bytes: Vec<u64> =
                    remote.iter().flat_map(|r| bytes(r.addr, u64::from(r.len))).collect();
                let (mut l, mut r) = (Vec::new(), Vec::new());
                for w in &c.wrs {
                    let sges = &c.sges[w.first_sge..][..w.sges];
                    prop_assert!(!sges.is_empty() && sges.len() <= max_sge as usize);
                    let len: u64 = sges.iter().map(|s| u64::from(s.length)).sum();
                    prop_assert!(len > 0 && len <= u64::from(max_message));
                    l.extend(sges.iter().flat_map(|s| bytes(s.addr, u64::from(s.length))));
                    r.extend(bytes(w.remote.addr, len));
                }
                prop_assert_eq!(l, local_bytes);
                prop_assert_eq!(r, remote_bytes);
            }
        }
    }
}
