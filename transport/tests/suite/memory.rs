//! Memory: regions at custom addresses, reregistered and null regions, and windows.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use riser_memory::Memory;
use riser_transport::verbs::{
    Access, AhAttr, AsyncEvent, Gid, LKey, Mr, MrAdvice, MrChange, Mtu, Mw, MwAttr, MwBind, MwType,
    PostReason, QpAttr, QpId, QpState, RKey, RemoteAddr, SendFlags, SendOp, SendWr, Sge,
    Verbs as _, VerbsError, WcOpcode, WcStatus, WrId,
};

use crate::suite::ops::{ok, written};
use crate::suite::world::{
    End, Side, Wants, World, connect_on, connected, init_attr, objects, pattern,
};

#[allow(unsafe_code, reason = "memory that is not ours is the subject")]
pub(crate) fn regions_of_foreign_memory_at_other_addresses<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    let owner = Memory::new(8192).unwrap();
    // SAFETY: `owner` outlives the regions, and there is no reference to its bytes.
    let foreign = unsafe { Memory::foreign(owner.ptr(100), 5000) };
    let access = Access::LOCAL_WRITE | Access::REMOTE;
    // A kernel requires the same offset within a page.
    let iova = 0x1234_5678_9000 + 100;
    let p = w.provider(End::B);
    let mr = p.reg_mr_iova(b.pd, &foreign.whole(), iova, access).unwrap();
    assert_eq!((mr.addr, mr.length), (iova, 5000));
    assert_eq!(p.query_mr(mr.id).unwrap().mr, mr);
    let wraps = p.reg_mr_iova(b.pd, &foreign.whole(), u64::MAX - 99, access);
    assert!(matches!(wraps, Err(VerbsError::InvalidParameter(_))));
    let remote = |offset| RemoteAddr {
        addr: iova + offset,
        rkey: mr.rkey,
    };
    let data = pattern(3, 4900);
    a.memory.write(0, &data);
    a.send(w, 1, SendOp::Write(remote(100)), 0, 4900);
    written(w, &a, 1);
    assert_eq!(owner.slice(200..5100).unwrap().to_vec(), data);
    // The owner uses the same addresses.
    let sges = [sge(&mr, 101, 7)];
    let wr = SendWr::new(2, SendOp::Write(a.remote(9000)), &sges);
    w.provider(End::B).post_send(b.qp, &[wr]).unwrap();
    written(w, &b, 2);
    assert_eq!(a.bytes(9000, 7), data[1..8]);
    refused(w, &a, remote(4093), 908);
    w.provider(End::B).dereg_mr(mr.id).unwrap();
    assert_eq!(owner.slice(200..5100).unwrap().to_vec(), data);
}

fn sge(mr: &Mr, offset: u64, length: u32) -> Sge {
    Sge {
        addr: mr.addr + offset,
        length,
        lkey: mr.lkey,
    }
}

/// Sends a WRITE that the peer rejects, which closes the connection.
fn refused<W: World>(w: &mut W, side: &Side, to: RemoteAddr, length: usize) {
    side.send(w, 999, SendOp::Write(to), 0, length);
    let c = side.completion(w);
    // With iWARP, it has already completed when it is rejected.
    let is_iwarp = w.is_iwarp(side.end);
    let status = match is_iwarp {
        true => WcStatus::Success,
        false => WcStatus::RemAccessErr,
    };
    assert_eq!((c.wr_id, c.status), (WrId(999), status), "{c:?}");
    if is_iwarp {
        assert_eq!(side.event(w), AsyncEvent::QpFatal(side.qp));
    }
}

/// Changes the domain, the memory, the rights, and all of them, and tests invalid changes.
pub(crate) fn region_can_be_reregistered<W: World>(mut w: W) {
    if w.is_rxe(End::B) {
        // Drivers support different changes.
        return;
    }
    let w = &mut w;
    let (a, b) = connected(w);
    let other = Memory::new(8192).unwrap();
    let is_library = w.is_rdma_core(End::B);
    let p = w.provider(End::B);
    let pd = p.alloc_pd().unwrap();
    let all = Access::LOCAL_WRITE | Access::REMOTE;
    let mr = p.reg_mr(pd, &b.memory.whole(), Access::empty()).unwrap();
    let range = other.whole();
    let at_another = MrChange {
        translation: Some((&range, 4096)),
        ..MrChange::default()
    };
    // The library call has no parameter for this address.
    let addr = if is_library {
        let refused = p.rereg_mr(mr.id, &at_another);
        assert!(matches!(refused, Err(VerbsError::Unsupported(_))));
        range.addr()
    } else {
        4096
    };
    let change = MrChange {
        translation: Some((&range, addr)),
        pd: Some(b.pd),
        access: Some(all),
    };
    let wrong = MrChange {
        access: Some(Access::REMOTE_WRITE),
        ..change
    };
    assert!(matches!(
        p.rereg_mr(mr.id, &wrong),
        Err(VerbsError::InvalidAccess(_))
    ));
    assert_eq!(p.query_mr(mr.id).unwrap().mr, mr);
    let mr = p.rereg_mr(mr.id, &change).unwrap();
    let attr = p.query_mr(mr.id).unwrap();
    assert_eq!((attr.mr, attr.pd, attr.access), (mr, b.pd, all));
    // The region no longer belongs to its first domain.
    p.dealloc_pd(pd).unwrap();
    assert!(matches!(
        p.rereg_mr(
            mr.id,
            &MrChange {
                pd: Some(pd),
                ..MrChange::default()
            }
        ),
        Err(VerbsError::InvalidHandle(_))
    ));
    a.memory.write(0, b"anew");
    let to = |addr| RemoteAddr {
        addr,
        rkey: mr.rkey,
    };
    a.send(w, 1, SendOp::Write(to(addr + 8188)), 0, 4);
    written(w, &a, 1);
    assert_eq!(other.slice(8188..8192).unwrap().to_vec(), b"anew");
    let less = MrChange {
        access: Some(Access::LOCAL_WRITE | Access::REMOTE_READ),
        ..MrChange::default()
    };
    w.provider(End::B).rereg_mr(mr.id, &less).unwrap();
    refused(w, &a, to(addr), 4);
    w.provider(End::B).dereg_mr(mr.id).unwrap();
}

/// Returns whether a page of this process is in memory: the top bit of its entry in
/// `/proc/self/pagemap`.
fn is_resident(memory: &Memory, offset: usize) -> bool {
    let pages = File::open("/proc/self/pagemap").unwrap();
    let mut entry = [0; 8];
    let page = memory.ptr(offset).addr() / 4096;
    pages.read_exact_at(&mut entry, page as u64 * 8).unwrap();
    u64::from_ne_bytes(entry) >> 63 == 1
}

pub(crate) fn prefetching_makes_pages_resident<W: World>(mut w: W) {
    let w = &mut w;
    if w.is_rxe(End::A) {
        return;
    }
    let p = w.provider(End::A);
    let pd = p.alloc_pd().unwrap();
    for advice in [MrAdvice::Prefetch, MrAdvice::PrefetchWrite] {
        let memory = Memory::new(64 * 4096).unwrap();
        let mr = p.reg_mr(pd, &memory.whole(), Access::LOCAL_WRITE).unwrap();
        let resident = |pages: std::ops::Range<usize>| {
            let mut pages = pages.map(|page| is_resident(&memory, page * 4096));
            (pages.clone().any(|is| is), pages.all(|is| is))
        };
        // Our libibverbs accesses the first and the last page to check the range.
        assert_eq!(resident(1..63), (false, false), "nothing was accessed");
        // The bounds of the second range are within a page.
        let sges = [sge(&mr, 4 * 4096, 4096), sge(&mr, 9 * 4096 - 1, 4096 + 2)];
        p.advise_mr(pd, advice, &sges).unwrap();
        assert_eq!(resident(4..5), (true, true));
        assert_eq!(resident(8..11), (true, true));
        p.dereg_mr(mr.id).unwrap();
    }
}

pub(crate) fn null_regions_and_prefetching<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    let is_rxe = w.is_rxe(End::A);
    let p = w.provider(End::A);
    let own = [sge(&a.mr, 0, 4096)];
    if is_rxe {
        // This device supports neither, or only prefetches on-demand regions.
        let unsupported = |r| matches!(r, Err(VerbsError::Unsupported(_)));
        assert!(unsupported(p.alloc_null_mr(a.pd).map(drop)));
        assert!(p.advise_mr(a.pd, MrAdvice::Prefetch, &own).is_err());
        return;
    }
    let null = p.alloc_null_mr(a.pd).unwrap();
    p.advise_mr(a.pd, MrAdvice::PrefetchWrite, &own).unwrap();
    let beyond = [sge(&a.mr, a.mr.length - 1, 2)];
    assert!(matches!(
        p.advise_mr(a.pd, MrAdvice::Prefetch, &beyond),
        Err(VerbsError::InvalidParameter(_))
    ));
    let unknown = [Sge {
        lkey: LKey(!a.mr.lkey.0),
        ..own[0]
    }];
    assert!(matches!(
        p.advise_mr(a.pd, MrAdvice::Prefetch, &unknown),
        Err(VerbsError::InvalidHandle(_))
    ));
    // Keys are looked up in a single domain.
    let other = p.alloc_pd().unwrap();
    p.advise_mr(other, MrAdvice::Prefetch, &own).unwrap_err();
    let data = pattern(4, 20_000);
    b.memory.write(0, &data);
    // The null region discards the middle of a READ, and provides zeros for the middle of a WRITE.
    let list = [a.sge(0, 5000), sge(&null, 77, 10_000), a.sge(9000, 5000)];
    let read = SendWr::new(1, SendOp::Read(b.remote(0)), &list);
    let write = SendWr::new(2, SendOp::Write(b.remote(0)), &list);
    p.post_send(a.qp, &[read]).unwrap();
    ok(w, &a, WcOpcode::Read, 1);
    assert_eq!(a.bytes(0, 5000), data[..5000]);
    assert_eq!(a.bytes(9000, 5000), data[15_000..]);
    w.provider(End::A).post_send(a.qp, &[write]).unwrap();
    written(w, &a, 2);
    let expected = [&data[..5000], &[0; 10_000], &data[15_000..]].concat();
    assert_eq!(b.bytes(0, 20_000), expected);
    let p = w.provider(End::A);
    let busy = p.dealloc_pd(a.pd);
    assert!(matches!(busy, Err(VerbsError::ResourceBusy(_))));
    p.dereg_mr(null.id).unwrap();
}

/// Registers a region of B to which windows can be bound, without remote access.
fn bindable<W: World>(w: &mut W, b: &Side) -> Mr {
    let access = Access::LOCAL_WRITE | Access::MW_BIND;
    let range = b.memory.whole();
    w.provider(b.end).reg_mr(b.pd, &range, access).unwrap()
}

fn bind(mw: &Mw, key: RKey, mr: &Mr, offset: u64, length: u64, access: Access) -> MwBind {
    MwBind {
        mw: mw.id,
        key,
        mr: mr.id,
        addr: mr.addr + offset,
        length,
        access,
    }
}

pub(crate) fn windows_of_type_1<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    let mw = w.provider(End::B).alloc_mw(b.pd, MwType::Type1).unwrap();
    let initial = MwAttr {
        pd: b.pd,
        rkey: mw.rkey,
        mw_type: MwType::Type1,
    };
    assert_eq!(w.provider(End::B).query_mw(mw.id), Ok(initial));
    let mr = bindable(w, &b);
    let both = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let key = mw.rkey.next();
    let first = bind(&mw, key, &mr, 5000, 3000, both);
    b.send(w, 1, SendOp::BindMw(first), 0, 0);
    ok(w, &b, WcOpcode::BindMw, 1);
    let bound = MwAttr {
        rkey: key,
        ..initial
    };
    assert_eq!(w.provider(End::B).query_mw(mw.id), Ok(bound));
    let data = pattern(5, 3000);
    a.memory.write(0, &data);
    let at = |offset, rkey| RemoteAddr {
        addr: mr.addr + offset,
        rkey,
    };
    a.send(w, 2, SendOp::Write(at(5000, key)), 0, 3000);
    written(w, &a, 2);
    assert_eq!(b.bytes(5000, 3000), data);
    let busy = w.provider(End::B).dereg_mr(mr.id).unwrap_err();
    // rdma_rxe returns a different error.
    assert!(w.is_rxe(End::B) || matches!(busy, VerbsError::ResourceBusy(_)));
    // Bind again without unbinding, in the middle of a chain.
    let second = bind(&mw, key.next(), &mr, 0, 10, Access::REMOTE_READ);
    let write = SendWr::new(13, SendOp::Write(a.remote(0)), &[]);
    let chain = [write, SendWr::new(3, SendOp::BindMw(second), &[]), write];
    w.provider(End::B).post_send(b.qp, &chain).unwrap();
    let done = b.completions(w, 3);
    assert!(done.iter().all(|c| c.status.is_ok()), "{done:?}");
    assert_eq!([0, 1, 2].map(|n| done[n].wr_id), [13, 3, 13].map(WrId));
    assert_eq!(done[1].opcode, WcOpcode::BindMw);
    a.send(w, 4, SendOp::Read(at(0, second.key)), 100, 10);
    ok(w, &a, WcOpcode::Read, 4);
    let none = MwBind {
        key: second.key.next(),
        length: 0,
        ..second
    };
    b.send(w, 5, SendOp::BindMw(none), 0, 0);
    ok(w, &b, WcOpcode::BindMw, 5);
    w.provider(End::B).dereg_mr(mr.id).unwrap();
    refused(w, &a, at(5000, key), 1);
    let p = w.provider(End::B);
    p.dealloc_mw(mw.id).unwrap();
    assert!(matches!(
        p.query_mw(mw.id),
        Err(VerbsError::InvalidHandle(_))
    ));
}

pub(crate) fn windows_of_type_2<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    let mr = bindable(w, &b);
    let mw = w.provider(End::B).alloc_mw(b.pd, MwType::Type2).unwrap();
    let write = Access::REMOTE_WRITE;
    let key = mw.rkey.next();
    let first = bind(&mw, key, &mr, 5000, 3000, write | Access::ZERO_BASED);
    b.send(w, 1, SendOp::BindMw(first), 0, 0);
    ok(w, &b, WcOpcode::BindMw, 1);
    let data = pattern(6, 100);
    a.memory.write(0, &data);
    let to = |addr, rkey| SendOp::Write(RemoteAddr { addr, rkey });
    a.send(w, 2, to(2900, key), 0, 100);
    written(w, &a, 2);
    assert_eq!(b.bytes(7900, 100), data);
    // The peer invalidates the key, and the owner invalidates it after the next bind.
    b.recv(w, 7, 0, 64);
    a.send(w, 3, SendOp::SendInv(key), 0, 1);
    ok(w, &a, WcOpcode::Send, 3);
    assert!(b.completion(w).status.is_ok());
    let second = bind(&mw, key.next(), &mr, 0, 64, write);
    b.send(w, 4, SendOp::BindMw(second), 0, 0);
    ok(w, &b, WcOpcode::BindMw, 4);
    a.send(w, 5, to(mr.addr, second.key), 0, 64);
    written(w, &a, 5);
    b.send(w, 6, SendOp::LocalInv(second.key), 0, 0);
    ok(w, &b, WcOpcode::LocalInv, 6);
    refused(
        w,
        &a,
        RemoteAddr {
            addr: mr.addr,
            rkey: second.key,
        },
        1,
    );
    let p = w.provider(End::B);
    p.dealloc_mw(mw.id).unwrap();
    p.dereg_mr(mr.id).unwrap();
}

pub(crate) fn invalid_bind_completes_with_error<W: World>(mut w: W) {
    let w = &mut w;
    let wants = Wants::default();
    let (_a, b) = connect_on(w, 5001, &wants, &wants);
    let mw = w.provider(End::B).alloc_mw(b.pd, MwType::Type2).unwrap();
    // A region with all remote rights, but not for windows.
    let wr = bind(&mw, mw.rkey.next(), &b.mr, 0, 64, Access::REMOTE_READ);
    let list = [b.sge(0, 1)];
    let with_list = SendWr::new(1, SendOp::BindMw(wr), &list);
    let p = w.provider(End::B);
    p.post_send(b.qp, &[with_list]).unwrap_err();
    if w.is_rdma_core(End::B) {
        // This is rejected before calling the library, for which all regions allow windows.
        let plain = SendWr::new(2, SendOp::BindMw(wr), &[]);
        let refused = w.provider(End::B).post_send(b.qp, &[plain]).unwrap_err();
        assert_eq!(refused.reason, PostReason::InvalidKey);
        return;
    }
    b.send(w, 2, SendOp::BindMw(wr), 0, 0);
    let c = b.completion(w);
    assert_eq!((c.wr_id, c.status), (WrId(2), WcStatus::MwBindErr));
    w.provider(End::B).dealloc_mw(mw.id).unwrap();
}

/// Moves a queue pair to RTS, with another queue pair as its peer.
fn join<W: World>(w: &mut W, end: End, qp: QpId, to: (End, u32)) {
    let peer = Gid::from(w.addr(to.0));
    let p = w.provider(end);
    let init = QpAttr {
        state: Some(QpState::Init),
        pkey_index: Some(0),
        port: Some(1),
        access: Some(Access::REMOTE),
        ..QpAttr::default()
    };
    let rtr = QpAttr {
        state: Some(QpState::Rtr),
        ah: Some(AhAttr {
            dgid: peer,
            sgid_index: 0,
            flow_label: 0,
            hop_limit: 64,
            traffic_class: 0,
            port: 1,
        }),
        path_mtu: Some(Mtu::Mtu1024),
        dest_qp: Some(to.1),
        rq_psn: Some(5),
        max_dest_rd_atomic: Some(4),
        min_rnr_timer: Some(12),
        ..QpAttr::default()
    };
    let rts = QpAttr {
        state: Some(QpState::Rts),
        sq_psn: Some(5),
        timeout: Some(14),
        retry_cnt: Some(7),
        rnr_retry: Some(7),
        max_rd_atomic: Some(4),
        ..QpAttr::default()
    };
    for attr in [init, rtr, rts] {
        p.modify_qp(qp, &attr).unwrap();
    }
}

/// Uses two queue pairs on the same device and in the same domain, which are distinguished by type
/// 2 windows.
pub(crate) fn device_connects_to_itself<W: World>(mut w: W) {
    let provider = w.provider(End::A).device_attr().provider;
    if w.is_rxe(End::A) || provider == "shm" {
        // The GID index is unknown with a kernel, and shared memory only connects to other
        // processes.
        return;
    }
    let w = &mut w;
    let wants = Wants::default();
    let (pd, cq, memory, mr) = objects(w, End::A, &wants);
    let init = init_attr(pd, cq, &wants);
    let qps: [QpId; 4] = std::array::from_fn(|_| w.provider(End::A).create_qp(&init).unwrap());
    let numbers = qps.map(|qp| w.provider(End::A).qp_num(qp).unwrap());
    for (i, qp) in qps.iter().enumerate() {
        join(w, End::A, *qp, (End::A, numbers[i ^ 1]));
    }
    let data = pattern(7, 50_000);
    memory.write(0, &data);
    let p = w.provider(End::A);
    let at = |offset, rkey| RemoteAddr {
        addr: mr.addr + offset,
        rkey,
    };
    let next = |w: &mut W| {
        let mut out = Vec::new();
        w.until("a completion", |w| {
            w.provider(End::A).poll_cq(cq, 1, &mut out).unwrap();
            out.pop()
        })
    };
    let list = [sge(&mr, 0, 50_000)];
    let write = SendWr::new(1, SendOp::Write(at(100_000, mr.rkey)), &list);
    p.post_send(qps[0], &[write]).unwrap();
    let c = next(w);
    assert_eq!(
        (c.status, c.qp, c.qp_num),
        (WcStatus::Success, qps[0], numbers[0])
    );
    assert_eq!(memory.slice(100_000..150_000).unwrap().to_vec(), data);
    // A window bound on one queue pair is not accessible to the peer of another.
    let p = w.provider(End::A);
    let region = Access::LOCAL_WRITE | Access::MW_BIND;
    let region = p.reg_mr(pd, &memory.whole(), region).unwrap();
    let mw = p.alloc_mw(pd, MwType::Type2).unwrap();
    let key = mw.rkey.next();
    let wr = bind(&mw, key, &region, 200_000, 64, Access::REMOTE_WRITE);
    let wr = SendWr::new(2, SendOp::BindMw(wr), &[]);
    p.post_send(qps[1], &[wr]).unwrap();
    assert_eq!(next(w).opcode, WcOpcode::BindMw);
    let list = [sge(&mr, 0, 64)];
    let write = |wr_id| SendWr::new(wr_id, SendOp::Write(at(200_000, key)), &list);
    w.provider(End::A).post_send(qps[0], &[write(3)]).unwrap();
    let c = next(w);
    assert_eq!((c.wr_id, c.status), (WrId(3), WcStatus::Success));
    assert_eq!(memory.slice(200_000..200_064).unwrap().to_vec(), data[..64]);
    let quiet = write(4).flags(SendFlags::empty());
    w.provider(End::A).post_send(qps[2], &[quiet]).unwrap();
    let c = next(w);
    assert_eq!((c.wr_id, c.status), (WrId(4), WcStatus::RemAccessErr));
    // The window outlives a RESET of its queue pair, like with rdma_rxe.
    let reset = QpAttr::to(QpState::Reset);
    for i in [0, 1] {
        w.provider(End::A).modify_qp(qps[i], &reset).unwrap();
    }
    for i in [0, 1] {
        join(w, End::A, qps[i], (End::A, numbers[i ^ 1]));
    }
    w.provider(End::A).post_send(qps[0], &[write(5)]).unwrap();
    let c = next(w);
    assert_eq!((c.wr_id, c.status), (WrId(5), WcStatus::Success));
    // The window is invalidated when the queue pair is destroyed.
    let p = w.provider(End::A);
    let busy = p.dereg_mr(region.id);
    assert!(matches!(busy, Err(VerbsError::ResourceBusy(_))));
    p.destroy_qp(qps[1]).unwrap();
    p.dereg_mr(region.id).unwrap();
    p.dealloc_mw(mw.id).unwrap();
    w.pass(Duration::from_millis(5));
    for qp in [qps[0], qps[2], qps[3]] {
        w.provider(End::A).destroy_qp(qp).unwrap();
    }
}
