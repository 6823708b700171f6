//! Chains of RDMA requests and `mr_pool`, as used by a target and an initiator.

use riser_transport::mr_pool::{MrPool, MrState};
use riser_transport::rdma_rw::{Direction, ProtectedMemory, ReadSinks, SignatureContext};
use riser_transport::verbs::{
    Access, DeviceAttr, QpAttr, QpState, RKey, RemoteAddr, SendFlags, SendOp, SendWr, Sge,
    SigAttrs, SigCheck, SigDomain, SigError, SigErrorKind, T10Dif, Verbs as _, VerbsError,
    WcOpcode, WcStatus, WrId,
};

use crate::suite::world::{End, Side, World, connected, ended, pattern};

/// Requests that transfer 70 kB at offset 100 of the local data: the offset in the remote region,
/// and the local pieces. The local data consist of 33,333 bytes at 0, followed by the bytes at
/// 50,000.
const REQUESTS: [(u64, &[(usize, usize)]); 3] = [
    (0, &[(100, 12_345)]),
    (12_345, &[(12_445, 20_888), (50_000, 9_112)]),
    (42_345, &[(59_112, 27_655)]),
];

/// B acts as the target: it writes to and reads from memory that A registers for each command.
pub(crate) fn command_registers_transfers_and_invalidates<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    let is_reported = w.provider(End::A).device_attr().reports_invalidation;
    // If a region is a window, it has only one segment.
    let segments = w
        .provider(End::A)
        .device_attr()
        .max_fast_reg_segments
        .min(8);
    let mut pool = MrPool::new(w.provider(End::A), a.pd, 2, segments).unwrap();
    let source = pattern(8, 100_000);
    b.memory.write(0, &source);
    let mut keys = Vec::new();
    for round in 0..6u64 {
        let is_write = round % 2 == 0;
        let mut mr = pool.get().unwrap();
        let parts = match segments {
            1 => vec![a.slice(200_000, 70_000)],
            _ => vec![a.slice(200_000, 40_000), a.slice(300_001, 30_000)],
        };
        mr.map(w.provider(End::A), &parts).unwrap();
        assert!(!keys.contains(&mr.rkey()), "a key was reused");
        keys.push(mr.rkey());
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let reg = mr.reg_wr(WrId(1), access);
        // The command follows the registration, so B receives a valid key.
        let command_sge = [a.sge(900_100, 32)];
        let command = SendWr::new(2, SendOp::Send, &command_sge).flags(SendFlags::empty());
        b.recv(w, 3, 900_000, 64);
        a.recv(w, 5, 900_000, 64);
        w.provider(End::A).post_send(a.qp, &[reg, command]).unwrap();
        let c = b.completion(w);
        assert_eq!(
            (c.wr_id, c.opcode, c.status),
            (WrId(3), WcOpcode::Recv, WcStatus::Success)
        );
        let remote = mr.remote();
        let sges = REQUESTS.map(|(_, local)| -> Vec<Sge> {
            local.iter().map(|(at, len)| b.sge(*at, *len)).collect()
        });
        let requests = REQUESTS.iter().zip(&sges).map(|((offset, _), sges)| {
            let at = RemoteAddr {
                addr: remote.addr + offset,
                rkey: remote.rkey,
            };
            let op = match is_write {
                true => SendOp::Write(at),
                false => SendOp::Read(at),
            };
            let mut request = SendWr::new(8, op, sges);
            request.flags = SendFlags::empty();
            request
        });
        let mut chain: Vec<_> = requests.collect();
        let response_sge = [b.sge(0, 16)];
        let op = match is_reported {
            true => SendOp::SendInv(mr.rkey()),
            false => SendOp::Send,
        };
        let response = SendWr::new(round, op, &response_sge);
        if is_write {
            chain.push(response);
            w.provider(End::B).post_send(b.qp, &chain).unwrap();
        } else {
            let last = chain.last_mut().expect("three requests");
            (last.wr_id, last.flags) = (WrId(7), SendFlags::SIGNALED);
            w.provider(End::B).post_send(b.qp, &chain).unwrap();
            let c = b.completion(w);
            assert_eq!(
                (c.wr_id, c.opcode, c.status),
                (WrId(7), WcOpcode::Read, WcStatus::Success)
            );
            w.provider(End::B).post_send(b.qp, &[response]).unwrap();
        }
        let c = b.completion(w);
        assert_eq!(
            (c.wr_id, c.opcode, c.status),
            (WrId(round), WcOpcode::Send, WcStatus::Success)
        );
        let c = a.completion(w);
        assert_eq!(c.invalidated, is_reported.then_some(mr.rkey()));
        if !is_reported {
            // If invalidation is not reported, invalidate the key locally.
            let inv = mr.inv_wr(WrId(9));
            w.provider(End::A).post_send(a.qp, &[inv]).unwrap();
            let c = a.completion(w);
            assert_eq!(
                (c.opcode, c.status),
                (WcOpcode::LocalInv, WcStatus::Success)
            );
        }
        assert!(mr.on_invalidated(mr.rkey()) && mr.state() == MrState::Idle);
        pool.release(w.provider(End::A), mr).unwrap();
        let here: Vec<_> = parts
            .iter()
            .flat_map(riser_memory::MemSlice::to_vec)
            .collect();
        let there = [b.bytes(0, 33_333), b.bytes(50_000, 50_000)].concat();
        assert!(here == there[100..70_100], "round {round}");
        // The next round transfers different data.
        a.memory.write(200_000, &pattern(round + 50, 40_000));
    }
    assert_eq!((pool.available(), pool.outstanding()), (2, 0));
    pool.destroy(w.provider(End::A));
}

pub(crate) fn region_returned_valid_is_replaced<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    let segments = w
        .provider(End::A)
        .device_attr()
        .max_fast_reg_segments
        .min(2);
    let mut pool = MrPool::new(w.provider(End::A), a.pd, 1, segments).unwrap();
    let mut mr = pool.get().unwrap();
    assert!(pool.get().is_none());
    let too_many = [a.slice(0, 1), a.slice(2, 1), a.slice(4, 1)];
    assert!(mr.map(w.provider(End::A), &too_many).is_err());
    mr.map(w.provider(End::A), &[a.slice(0, 64)]).unwrap();
    let reg = mr.reg_wr(WrId(1), Access::REMOTE_READ);
    w.provider(End::A).post_send(a.qp, &[reg]).unwrap();
    w.pass(std::time::Duration::from_millis(1));
    let (id, remote) = (mr.id(), mr.remote());
    pool.release(w.provider(End::A), mr).unwrap();
    assert!(
        w.provider(End::A).query_mr(id).is_err(),
        "the old region is gone"
    );
    let from = riser_transport::verbs::RemoteAddr {
        addr: remote.addr,
        rkey: remote.rkey,
    };
    b.send(w, 1, SendOp::Read(from), 0, 8);
    assert_eq!(b.completion(w).status, WcStatus::RemAccessErr);
    ended(w);
    // A local invalidation is equivalent to a remote one.
    let (a, _b) =
        crate::suite::world::connect_on(w, 5001, &Default::default(), &Default::default());
    let mut pool = MrPool::new(w.provider(End::A), a.pd, 1, segments).unwrap();
    let mut mr = pool.get().unwrap();
    mr.map(w.provider(End::A), &[a.slice(0, 64)]).unwrap();
    let chain = [mr.reg_wr(WrId(1), Access::REMOTE_READ), mr.inv_wr(WrId(2))];
    w.provider(End::A).post_send(a.qp, &chain).unwrap();
    let c = a.completion(w);
    assert_eq!(
        (c.opcode, c.status, c.wr_id),
        (WcOpcode::LocalInv, WcStatus::Success, WrId(2))
    );
    assert!(mr.on_invalidated(mr.rkey()));
    pool.release(w.provider(End::A), mr).unwrap();
    pool.destroy(w.provider(End::A));
}

/// B acts as the target: it reads and writes interleaved blocks, with and without tuples in its own
/// memory.
pub(crate) fn signature_contexts_transfer_and_check<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    let p = w.provider(End::B);
    if p.device_attr().integrity.is_none() {
        let refused = MrPool::with_integrity(p, b.pd, 1, 2, 1).map(drop);
        let error = VerbsError::Unsupported("integrity regions");
        assert_eq!(refused, Err(error));
        return;
    }
    let mut pool = MrPool::with_integrity(p, b.pd, 1, 2, 1).unwrap();
    let dif = SigDomain::T10Dif(T10Dif::new(512, 0x0100));
    let attrs = SigAttrs {
        mem: SigDomain::None,
        wire: dif,
        check: SigCheck::all(),
    };
    let data = [b.slice(0, 700), b.slice(1000, 324)];
    let memory = ProtectedMemory {
        data: &data,
        protection: &[],
    };
    // Blocks of bytes 01h and 02h, with their known tuples, are inserted and stripped.
    b.memory.fill(0, 512, 1);
    b.memory.fill(512, 188, 2);
    b.memory.fill(1000, 324, 2);
    let mut image = vec![1; 512];
    image.extend([0x06, 0x88, 0, 0, 0, 0, 1, 0]);
    image.extend([2; 512]);
    image.extend([0x0d, 0x10, 0, 0, 0, 0, 1, 1]);
    let run = |w: &mut W, pool: &mut MrPool, direction, memory, attrs: &SigAttrs| {
        let p = w.provider(End::B);
        let remote = a.remote(64);
        let mut context =
            SignatureContext::init(p, pool, memory, attrs, remote, direction).unwrap();
        assert_eq!(context.wire_len(), 1040);
        assert_eq!((pool.available(), pool.outstanding()), (0, 1));
        p.post_send(b.qp, &context.wrs(WrId(40))).unwrap();
        let c = b.completion(w);
        assert_eq!(
            (c.wr_id, c.opcode, c.status),
            (WrId(40), WcOpcode::LocalInv, WcStatus::Success)
        );
        context.on_completed();
        let p = w.provider(End::B);
        let error = context.destroy(p, pool).unwrap();
        assert_eq!((pool.available(), pool.outstanding()), (1, 0));
        error
    };
    let sent = run(w, &mut pool, Direction::ToPeer, memory, &attrs);
    assert_eq!(sent, None);
    w.until("the last bytes", |_| {
        (a.bytes(64, 1040) == image).then_some(())
    });
    b.memory.fill(0, 2000, 0);
    let received = run(w, &mut pool, Direction::FromPeer, memory, &attrs);
    assert_eq!(received, None);
    let blocks = [b.bytes(0, 700), b.bytes(1000, 324)].concat();
    assert_eq!(blocks, [[1; 512], [2; 512]].concat());
    // Tuples are passed to memory. The last one has a wrong reference tag.
    a.memory.write(64 + 1039, &[7]);
    let tuples = [b.slice(5000, 16)];
    let memory = ProtectedMemory {
        protection: &tuples,
        ..memory
    };
    let attrs = SigAttrs { mem: dif, ..attrs };
    let received = run(w, &mut pool, Direction::FromPeer, memory, &attrs);
    let error = SigError {
        kind: SigErrorKind::BadRefTag,
        expected: 0x0101,
        actual: 0x0107,
        offset: 520,
    };
    assert_eq!(received, Some(error));
    let stored = [0x06, 0x88, 0, 0, 0, 0, 1, 0, 0x0d, 0x10, 0, 0, 0, 0, 1, 7];
    assert_eq!(b.bytes(5000, 16), stored);
    // A context that cannot be used returns its region.
    let p = w.provider(End::B);
    let short = ProtectedMemory {
        data: &data[..1],
        ..memory
    };
    let remote = a.remote(64);
    let refused = SignatureContext::init(p, &mut pool, short, &attrs, remote, Direction::ToPeer);
    assert!(matches!(refused, Err(VerbsError::InvalidParameter(_))));
    assert_eq!(pool.available(), 1);
    let unused = SignatureContext::init(p, &mut pool, memory, &attrs, remote, Direction::ToPeer);
    let empty = SignatureContext::init(p, &mut pool, memory, &attrs, remote, Direction::ToPeer);
    let error = VerbsError::InsufficientResources("integrity regions");
    assert_eq!(empty.map(drop), Err(error));
    assert_eq!(unused.unwrap().destroy(p, &mut pool), Ok(None));
    // The region of a failed transfer is replaced.
    let wrong = RemoteAddr {
        rkey: a.mr.rkey.next(),
        ..remote
    };
    let mut failed =
        SignatureContext::init(p, &mut pool, memory, &attrs, wrong, Direction::FromPeer).unwrap();
    p.post_send(b.qp, &failed.wrs(WrId(41))).unwrap();
    assert_eq!(b.completion(w).status, WcStatus::RemAccessErr);
    assert_eq!(b.completion(w).status, WcStatus::WrFlushErr);
    let p = w.provider(End::B);
    assert_eq!(failed.destroy(p, &mut pool), Ok(None));
    assert_eq!((pool.available(), pool.outstanding()), (1, 0));
    pool.destroy(p);
}

/// Returns sinks for up to `count` READs, as on an iWARP adapter.
fn sinks_of<W: World>(w: &mut W, side: &Side, count: u32) -> ReadSinks {
    let attr = DeviceAttr {
        registered_reads: true,
        ..w.provider(side.end).device_attr().clone()
    };
    let sinks = ReadSinks::new(&attr, side.pd, count, 1).unwrap();
    sinks.expect("a device that needs sinks")
}

/// A acts as the target. B can write to the sink of a READ until it is released, and not after.
pub(crate) fn read_sink_is_inaccessible_after_read<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    let data = pattern(3, 20_000);
    b.memory.write(0, &data);
    let mut sinks = sinks_of(w, &a, 3);
    let pieces = [(100_000, 12_345), (300_001, 7655)];
    for round in 0..4 {
        let id = WrId(round);
        let p = w.provider(End::A);
        let entries = pieces.map(|(at, len)| {
            let entry = sinks.register(p, id, &a.slice(at, len)).unwrap();
            let place = a.sge(at, len);
            assert_eq!((entry.addr, entry.length), (place.addr, place.length));
            assert_ne!(entry.lkey, place.lkey);
            entry
        });
        sinks.register(p, WrId(99), &a.slice(0, 8)).unwrap();
        let full = sinks.register(p, WrId(99), &a.slice(8, 8));
        let error = VerbsError::InsufficientResources("sinks of READs");
        assert_eq!((full, sinks.registered()), (Err(error), 3));
        let reads = [
            SendWr::new(7, SendOp::Read(b.remote(0)), &entries[..1]).flags(SendFlags::empty()),
            SendWr::new(round, SendOp::Read(b.remote(12_345)), &entries[1..]),
        ];
        p.post_send(a.qp, &reads).unwrap();
        let c = a.completion(w);
        assert_eq!(
            (c.wr_id, c.opcode, c.status),
            (id, WcOpcode::Read, WcStatus::Success)
        );
        let p = w.provider(End::A);
        sinks.release(p, id).unwrap();
        assert_eq!(sinks.registered(), 1);
        sinks.release(p, id).unwrap();
        sinks.release(p, WrId(99)).unwrap();
        let read = pieces.map(|(at, len)| a.bytes(at, len)).concat();
        assert!(read == data, "round {round}");
        a.memory.write(100_000, &[0; 12_345]);
    }
    assert_eq!((sinks.registered(), sinks.total()), (0, 12));
    let sink = sinks
        .register(w.provider(End::A), WrId(1), &a.slice(0, 8))
        .unwrap();
    // These devices use the same number for local and remote access.
    let to = RemoteAddr {
        addr: sink.addr,
        rkey: RKey(sink.lkey.0),
    };
    let before = a.bytes(0, 8);
    b.send(w, 1, SendOp::Write(to), 0, 8);
    assert_eq!(b.completion(w).status, WcStatus::Success);
    w.until("the written bytes", |_| {
        (a.bytes(0, 8) != before).then_some(())
    });
    sinks.release_all(w.provider(End::A)).unwrap();
    b.send(w, 2, SendOp::Write(to), 100, 8);
    // With iWARP, a WRITE completes before it is rejected.
    let status = match w.is_iwarp(End::B) {
        true => WcStatus::Success,
        false => WcStatus::RemAccessErr,
    };
    assert_eq!(b.completion(w).status, status);
    ended(w);
    assert_eq!(a.bytes(0, 8), data[..8]);
}

/// The queue pair fails before the READs are complete. Each sink is released once, after its READ
/// was flushed.
pub(crate) fn flushed_reads_release_sinks_once<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    let mut sinks = sinks_of(w, &a, 3);
    let p = w.provider(End::A);
    for n in 0..3 {
        let sink = sinks.register(p, WrId(n), &a.slice(1000 * n as usize, 1000));
        let entry = [sink.unwrap()];
        let read = SendWr::new(n, SendOp::Read(b.remote(0)), &entry);
        p.post_send(a.qp, &[read]).unwrap();
    }
    p.modify_qp(a.qp, &QpAttr::to(QpState::Error)).unwrap();
    for left in (0..3).rev() {
        let c = a.completion(w);
        assert_eq!(c.opcode, WcOpcode::Read);
        let p = w.provider(End::A);
        let full = sinks.register(p, WrId(9), &a.slice(0, 8));
        assert_eq!(full.is_err(), left == 2, "a READ may still use its sink");
        sinks.release(p, WrId(9)).unwrap();
        sinks.release(p, c.wr_id).unwrap();
        sinks.release(p, c.wr_id).unwrap();
        assert_eq!(sinks.registered(), left);
    }
    // No region is left in the domain.
    let p = w.provider(End::A);
    p.dereg_mr(a.mr.id).unwrap();
    p.destroy_qp(a.qp).unwrap();
    p.dealloc_pd(a.pd).unwrap();
}
