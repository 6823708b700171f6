//! Memory windows: R_Keys for a part of a region, bound and invalidated by work requests (IBTA
//! 10.6.7).
//!
//! Windows and regions use the same table. While a window is bound, its slot contains the memory of
//! its range, so that its key can be used like the key of a region.
//!
//! ```text
//!             bind (type 1: repeatedly)
//!   Unbound ──────────────────────────────────▶ Bound to a region; type 2 also to a queue pair
//!      ▲                                           │
//!      └── type 1: zero-length bind ───────────────┤
//!      └── type 2: LOCAL_INV, SEND with invalidate,│
//!          queue pair destroyed ───────────────────┘
//! ```
//!
//! Like in Linux `rdma_rxe`, windows remain bound after a RESET of the QP and can be used by the
//! peer of the next connection. In Linux, a QP cannot be destroyed while windows are bound, but
//! here this will unbind them.

use super::segment::{self, Segment};
use super::{KeyError, Kind, MrTable, Region};
use crate::verbs::{Access, Mw, MwAttr, MwBind, MwId, MwType, PdId, QpId, RKey, VerbsError};

/// Region and QP used by a bound window.
#[derive(Clone, Copy, Debug)]
pub(super) struct Binding {
    /// Region slot.
    region: u32,
    /// QP used to bind the window. A type 2 window can only be used by the peer of this QP.
    qp: QpId,
}

impl Region {
    pub(super) fn is_window(&self) -> bool {
        matches!(self.kind, Kind::Window(_))
    }

    /// Returns whether the window can be used via this QP, where `None` means a scatter list.
    pub(super) fn admits(&self, kind: MwType, qp: Option<QpId>) -> bool {
        // Window keys can only be used by a peer (IBTA 10.6.7.1).
        let Some(qp) = qp else { return false };
        kind == MwType::Type1 || self.binding.is_some_and(|binding| binding.qp == qp)
    }
}

impl MrTable {
    /// Allocates a window (see [`crate::verbs::Verbs::alloc_mw`]).
    ///
    /// # Errors
    /// [`VerbsError::InsufficientResources`].
    pub fn alloc_window(&mut self, pd: PdId, mw_type: MwType) -> Result<Mw, VerbsError> {
        let handle = self.take_slot(pd)?;
        let window = &mut self.slots[handle.index()];
        window.kind = Kind::Window(mw_type);
        Ok(Mw {
            id: MwId(handle),
            rkey: RKey(window.key),
            mw_type,
        })
    }

    /// Returns the current attributes of a window.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    pub fn query_window(&self, id: MwId) -> Result<MwAttr, VerbsError> {
        let window = &self.slots[self.window(id)?];
        let Kind::Window(mw_type) = window.kind else {
            return Err(VerbsError::InvalidHandle("memory window"));
        };
        Ok(MwAttr {
            pd: window.pd,
            rkey: RKey(window.key),
            mw_type,
        })
    }

    /// Deallocates a window, which can be bound. Returns its protection domain.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    pub fn dealloc_window(&mut self, id: MwId) -> Result<PdId, VerbsError> {
        let slot = self.window(id)?;
        self.unbind(slot);
        Ok(self.free_slot(slot))
    }

    fn window(&self, id: MwId) -> Result<usize, VerbsError> {
        let slot = id.0.index();
        self.slots
            .get(slot)
            .filter(|w| w.is_window() && w.generation == id.0.generation())
            .map(|_| slot)
            .ok_or(VerbsError::InvalidHandle("memory window"))
    }

    /// Executes a BIND_MW for a QP in domain `pd`.
    ///
    /// # Errors
    /// Returns [`KeyError`]. In this case nothing is changed.
    pub fn bind(&mut self, pd: PdId, qp: QpId, wr: &MwBind) -> Result<(), KeyError> {
        let slot = self.window(wr.mw).map_err(|_| KeyError::Key)?;
        let window = &self.slots[slot];
        let Kind::Window(mw_type) = window.kind else {
            return Err(KeyError::Kind);
        };
        if window.pd != pd {
            return Err(KeyError::Domain);
        }
        // Only the low byte of a key can be changed by its owner (IBTA 10.6.3.2).
        if window.key >> 8 != wr.key.0 >> 8 {
            return Err(KeyError::Key);
        }
        let is_legal = match mw_type {
            // IBTA o10-36.2.2: a type 1 window uses the addresses of its region.
            MwType::Type1 => !wr.access.contains(Access::ZERO_BASED),
            // A bound window must be invalidated first, which is not possible with a zero-length
            // bind (o10-37.2.30, o10-37.2.40).
            MwType::Type2 => !window.valid && wr.length > 0,
        };
        if !is_legal {
            return Err(KeyError::Kind);
        }
        if mw_type == MwType::Type1 && wr.length == 0 {
            self.unbind(slot);
            self.slots[slot].key = wr.key.0;
            return Ok(());
        }
        let segments = self.window_segments(pd, wr)?;
        self.unbind(slot);
        let region = wr.mr.0.index() as u32;
        let holder = &mut self.slots[region as usize];
        holder.windows += 1;
        let is_paged = holder.is_paged;
        if mw_type == MwType::Type2 {
            self.by_qp.insert((qp, slot as u32));
        }
        let window = &mut self.slots[slot];
        window.binding = Some(Binding { region, qp });
        window.key = wr.key.0;
        window.access = wr.access;
        window.is_paged = is_paged;
        window.base = if wr.access.contains(Access::ZERO_BASED) {
            0
        } else {
            wr.addr
        };
        window.length = wr.length;
        window.segments = segments;
        window.valid = true;
        Ok(())
    }

    /// Returns the memory of a window if this is allowed by its region (IBTA C10-72 to C10-75).
    fn window_segments(&self, pd: PdId, wr: &MwBind) -> Result<Vec<Segment>, KeyError> {
        if !(Access::REMOTE | Access::ZERO_BASED).contains(wr.access) {
            return Err(KeyError::Right);
        }
        let region = self.region(wr.mr).map_err(|_| KeyError::Key)?;
        if region.pd != pd {
            return Err(KeyError::Domain);
        }
        // If the region could be invalidated by a work request, the window would still be valid.
        if region.kind != Kind::Registered || region.access.contains(Access::ZERO_BASED) {
            return Err(KeyError::Kind);
        }
        let writes = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let needed = match wr.access.intersects(writes) {
            true => Access::MW_BIND | Access::LOCAL_WRITE,
            false => Access::MW_BIND,
        };
        if !region.access.contains(needed) {
            return Err(KeyError::Right);
        }
        let span = region.span(wr.addr, wr.length).ok_or(KeyError::Range)?;
        let mut slices = Vec::new();
        span.push_slices(0, span.len(), &mut slices);
        let mut segments = Vec::new();
        segment::assign(&mut segments, slices.into_iter());
        Ok(segments)
    }

    /// Unbinds a window, which removes its key and range.
    pub(super) fn unbind(&mut self, slot: usize) {
        let window = &mut self.slots[slot];
        window.valid = false;
        window.length = 0;
        window.segments = Vec::new();
        if let Some(Binding { region, qp }) = window.binding.take() {
            self.slots[region as usize].windows -= 1;
            self.by_qp.remove(&(qp, slot as u32));
        }
    }

    /// Unbinds all type 2 windows bound by a QP that is being destroyed.
    pub fn unbind_all(&mut self, qp: QpId) {
        while let Some(&(_, slot)) = self.by_qp.range((qp, 0)..=(qp, u32::MAX)).next() {
            self.unbind(slot as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use riser_memory::Memory;

    use super::*;
    use crate::verbs::{Handle, LKey, Mr, Sge};

    const PD: PdId = PdId(Handle::new(1, 1));
    const OTHER: PdId = PdId(Handle::new(2, 1));
    const QP: QpId = QpId(Handle::new(1, 1));
    const OTHER_QP: QpId = QpId(Handle::new(1, 2));

    const READ: Access = Access::REMOTE_READ;
    const WRITE: Access = Access::REMOTE_WRITE;

    struct Bench {
        mrs: MrTable,
        memory: Memory,
        mr: Mr,
    }

    fn bench(access: Access) -> Bench {
        let mut mrs = MrTable::new(16, 8, *b"sixteen bytes!!!");
        let memory = Memory::new(4096).unwrap();
        let mr = mrs.reg(PD, &memory.whole(), access).unwrap();
        Bench { mrs, memory, mr }
    }

    impl Bench {
        fn wr(&self, mw: &Mw, at: u64, length: u64, access: Access) -> MwBind {
            MwBind {
                mw: mw.id,
                key: mw.rkey.next(),
                mr: self.mr.id,
                addr: self.mr.addr + at,
                length,
                access,
            }
        }

        fn get(
            &self,
            qp: QpId,
            key: RKey,
            at: u64,
            len: u32,
            right: Access,
        ) -> Result<(), KeyError> {
            let addr = self.mr.addr + at;
            let span = self.mrs.resolve_remote(PD, qp, key, addr, len, right)?;
            assert_eq!(span.len(), len as usize);
            Ok(())
        }
    }

    #[test]
    fn type_1_window_is_shared_by_qps() {
        let mut b = bench(Access::MW_BIND | Access::LOCAL_WRITE);
        let mw = b.mrs.alloc_window(PD, MwType::Type1).unwrap();
        assert_eq!(b.get(QP, mw.rkey, 0, 1, READ), Err(KeyError::Key));
        let wr = b.wr(&mw, 100, 50, READ | WRITE);
        b.mrs.bind(PD, QP, &wr).unwrap();
        for qp in [QP, OTHER_QP] {
            assert_eq!(b.get(qp, wr.key, 100, 50, READ), Ok(()));
            assert_eq!(b.get(qp, wr.key, 149, 2, READ), Err(KeyError::Range));
            assert_eq!(b.get(qp, wr.key, 99, 1, READ), Err(KeyError::Range));
            assert_eq!(
                b.get(qp, wr.key, 100, 8, Access::REMOTE_ATOMIC),
                Err(KeyError::Right)
            );
        }
        let addr = b.mr.addr + 120;
        let span = b.mrs.resolve_remote(PD, QP, wr.key, addr, 3, WRITE);
        span.unwrap().write(0, b"abc");
        assert_eq!(b.memory.slice(120..123).unwrap().to_vec(), b"abc");
        // The region does not allow remote access, and the window key can't be used in a scatter
        // list.
        assert_eq!(b.get(QP, b.mr.rkey, 100, 1, READ), Err(KeyError::Right));
        let sge = Sge {
            addr,
            length: 1,
            lkey: LKey(wr.key.0),
        };
        assert_eq!(
            b.mrs.resolve_local(PD, &sge, false).unwrap_err(),
            KeyError::Key
        );
        assert_eq!(b.mrs.invalidate(PD, QP, wr.key), Err(KeyError::Kind));
        // When bound again, the window uses a different range and the old key is not valid anymore.
        let again = MwBind {
            key: wr.key.next(),
            ..b.wr(&mw, 0, 10, READ)
        };
        b.mrs.bind(PD, QP, &again).unwrap();
        assert_eq!(b.get(QP, wr.key, 100, 1, READ), Err(KeyError::Key));
        assert_eq!(b.get(QP, again.key, 0, 10, READ), Ok(()));
        let unbind = MwBind {
            key: again.key.next(),
            length: 0,
            ..again
        };
        b.mrs.bind(PD, QP, &unbind).unwrap();
        assert_eq!(b.get(QP, unbind.key, 0, 1, READ), Err(KeyError::Key));
        b.mrs.dereg(b.mr.id).unwrap();
    }

    #[test]
    fn type_2_window_belongs_to_qp() {
        let mut b = bench(Access::MW_BIND);
        let mw = b.mrs.alloc_window(PD, MwType::Type2).unwrap();
        let wr = b.wr(&mw, 100, 50, READ | Access::ZERO_BASED);
        b.mrs.bind(PD, QP, &wr).unwrap();
        let zero = |b: &Bench, qp| b.mrs.resolve_remote(PD, qp, wr.key, 49, 1, READ).map(drop);
        assert_eq!(zero(&b, QP), Ok(()));
        assert_eq!(zero(&b, OTHER_QP), Err(KeyError::Key));
        let again = MwBind {
            key: wr.key.next(),
            ..wr
        };
        assert_eq!(
            b.mrs.bind(PD, QP, &again),
            Err(KeyError::Kind),
            "still bound"
        );
        assert_eq!(b.mrs.invalidate(PD, OTHER_QP, wr.key), Err(KeyError::Kind));
        b.mrs.check_invalidate(PD, QP, wr.key).unwrap();
        b.mrs.invalidate(PD, QP, wr.key).unwrap();
        assert_eq!(zero(&b, QP), Err(KeyError::Key));
        let none = MwBind { length: 0, ..again };
        assert_eq!(b.mrs.bind(PD, QP, &none), Err(KeyError::Kind));
        b.mrs.bind(PD, OTHER_QP, &again).unwrap();
        // It is only unbound when its own QP is destroyed.
        b.mrs.unbind_all(QP);
        assert!(matches!(
            b.mrs.dereg(b.mr.id),
            Err(VerbsError::ResourceBusy(_))
        ));
        b.mrs.unbind_all(OTHER_QP);
        assert_eq!(
            b.mrs.invalidate(PD, OTHER_QP, again.key),
            Err(KeyError::Key)
        );
        b.mrs.dereg(b.mr.id).unwrap();
    }

    #[test]
    #[allow(unsafe_code, reason = "the region covers the whole address space")]
    fn on_demand_window_rejects_unmapped_pages() {
        let mut b = bench(Access::MW_BIND);
        // SAFETY: we check that memory is mapped before it is accessed.
        let space = unsafe { Memory::foreign(std::ptr::null_mut(), usize::MAX) };
        let access = Access::MW_BIND | Access::LOCAL_WRITE | Access::ON_DEMAND;
        b.mr = b.mrs.reg(PD, &space.whole(), access).unwrap();
        let mapped = b.memory.addr();
        for mw_type in [MwType::Type1, MwType::Type2] {
            let mw = b.mrs.alloc_window(PD, mw_type).unwrap();
            let wr = b.wr(&mw, 0, 1 << 47, READ | WRITE);
            b.mrs.bind(PD, QP, &wr).unwrap();
            for right in [READ, WRITE] {
                assert_eq!(b.get(QP, wr.key, mapped, 4096, right), Ok(()));
                assert_eq!(b.get(QP, wr.key, 8, 1, right), Err(KeyError::Range));
            }
        }
    }

    #[test]
    fn region_with_bound_windows_is_busy() {
        let mut b = bench(Access::MW_BIND);
        let mws = [MwType::Type1, MwType::Type2].map(|t| b.mrs.alloc_window(PD, t).unwrap());
        for mw in &mws {
            let wr = b.wr(mw, 0, 9, READ);
            b.mrs.bind(PD, QP, &wr).unwrap();
        }
        for mw in mws {
            let busy = b.mrs.dereg(b.mr.id);
            assert!(matches!(busy, Err(VerbsError::ResourceBusy(_))));
            assert_eq!(b.mrs.dealloc_window(mw.id), Ok(PD));
            assert!(b.mrs.dealloc_window(mw.id).is_err());
        }
        assert!(b.mrs.by_qp.is_empty());
        b.mrs.dereg(b.mr.id).unwrap();
        assert!(b.mrs.is_empty());
    }

    #[test]
    fn invalid_binds_have_no_effect() {
        let mut b = bench(Access::MW_BIND | READ);
        let plain = b.mrs.reg(PD, &b.memory.whole(), READ).unwrap();
        let zero = Access::MW_BIND | Access::ZERO_BASED;
        let zero = b.mrs.reg(PD, &b.memory.whole(), zero).unwrap();
        let fast = b.mrs.alloc_fast(PD, 2).unwrap();
        let foreign = b
            .mrs
            .reg(OTHER, &b.memory.whole(), Access::MW_BIND)
            .unwrap();
        for mw_type in [MwType::Type1, MwType::Type2] {
            let mw = b.mrs.alloc_window(PD, mw_type).unwrap();
            let good = b.wr(&mw, 0, 9, READ);
            let of = |mr: &Mr| MwBind {
                mr: mr.id,
                addr: mr.addr,
                ..good
            };
            let bad = [
                (of(&plain), KeyError::Right),
                (of(&zero), KeyError::Kind),
                (of(&fast), KeyError::Kind),
                (of(&foreign), KeyError::Domain),
                (
                    MwBind {
                        length: 4097,
                        ..good
                    },
                    KeyError::Range,
                ),
                (
                    MwBind {
                        addr: u64::MAX,
                        ..good
                    },
                    KeyError::Range,
                ),
                (
                    MwBind {
                        access: READ | WRITE,
                        ..good
                    },
                    KeyError::Right,
                ),
                (
                    MwBind {
                        access: Access::LOCAL_WRITE,
                        ..good
                    },
                    KeyError::Right,
                ),
                (
                    MwBind {
                        key: RKey(good.key.0 ^ 0x100),
                        ..good
                    },
                    KeyError::Key,
                ),
                (
                    MwBind {
                        mw: MwId(b.mr.id.0),
                        ..good
                    },
                    KeyError::Key,
                ),
            ];
            for (wr, error) in bad {
                assert_eq!(b.mrs.bind(PD, QP, &wr), Err(error), "{wr:?}");
                assert_eq!(b.get(QP, wr.key, 0, 1, READ), Err(KeyError::Key));
            }
            assert_eq!(b.mrs.bind(OTHER, QP, &good), Err(KeyError::Domain));
            b.mrs.bind(PD, QP, &good).unwrap();
            // A window cannot be used as a region.
            let id = crate::verbs::MrId(mw.id.0);
            assert!(b.mrs.query(id).is_err() && b.mrs.dereg(id).is_err());
        }
    }
}
