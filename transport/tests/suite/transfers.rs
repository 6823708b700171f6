//! `rw` and `mr_pool` as a target and an initiator use them.

use riser_transport::mr_pool::{MrPool, MrState};
use riser_transport::rw::{Direction, LocalSegment, RemoteSegment, RwContext, RwLimits};
use riser_transport::verbs::{Access, SendOp, SendWr, WcOpcode, WcStatus, WrId};

use riser_transport::verbs::Verbs as _;

use crate::suite::world::{End, World, connected, pattern};

const LIMITS: RwLimits = RwLimits {
    max_sge: 4,
    max_message: 30_000,
    max_wrs: 60,
};

/// B is the target: it writes to, then reads from, memory that A registers for each command.
pub(crate) fn a_command_registers_transfers_and_invalidates<W: World>(mut w: W) {
    let w = &mut w;
    let (a, b) = connected(w);
    let is_told = w.provider(End::A).device_attr().tells_invalidation;
    // Where a region is a window, it takes one segment.
    let segments = w
        .provider(End::A)
        .device_attr()
        .max_fast_reg_segments
        .min(8);
    let mut pool = MrPool::new(w.provider(End::A), a.pd, 2, segments).unwrap();
    let mut rw = RwContext::with_capacity(64, 64);
    let source = pattern(8, 100_000);
    b.memory.write(0, &source);
    let local: Vec<_> = [(0, 33_333), (50_000, 50_000), (33_333, 10)]
        .map(|(at, len)| LocalSegment {
            slice: b.slice(at, len),
            lkey: b.mr.lkey,
        })
        .into();
    let mut keys = Vec::new();
    for round in 0..6u64 {
        let direction = if round % 2 == 0 {
            Direction::Write
        } else {
            Direction::Read
        };
        let mut mr = pool.get().unwrap();
        let parts = match segments {
            1 => vec![a.slice(200_000, 70_000)],
            _ => vec![a.slice(200_000, 40_000), a.slice(300_001, 30_000)],
        };
        mr.map(w.provider(End::A), &parts).unwrap();
        assert!(!keys.contains(&mr.rkey()), "a key came back");
        keys.push(mr.rkey());
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let reg = mr.reg_wr(WrId(1), access);
        w.provider(End::A).post_send(a.qp, &[reg]).unwrap();
        a.recv(w, 5, 900_000, 64);
        w.pass(std::time::Duration::from_millis(1));
        let remote = mr.remote();
        let halves = [
            RemoteSegment {
                len: 12_345,
                ..remote
            },
            RemoteSegment {
                addr: remote.addr + 12_345,
                len: remote.len - 12_345,
                ..remote
            },
        ];
        let n = rw.plan(direction, &local, 100, &halves, LIMITS).unwrap();
        assert!(n >= 3 && n == rw.wr_count() && rw.bytes() == 70_000);
        let answer_sge = [b.sge(0, 16)];
        let op = match is_told {
            true => SendOp::SendInv(mr.rkey()),
            false => SendOp::Send,
        };
        let answer = SendWr::new(round, op, &answer_sge);
        match direction {
            Direction::Write => {
                rw.post(w.provider(End::B), b.qp, WrId(7), WrId(8), Some(answer))
                    .unwrap();
            }
            Direction::Read => {
                rw.post(w.provider(End::B), b.qp, WrId(7), WrId(8), None)
                    .unwrap();
                let c = b.completion(w);
                assert_eq!(
                    (c.wr_id, c.opcode, c.status),
                    (WrId(7), WcOpcode::Read, WcStatus::Success)
                );
                w.provider(End::B).post_send(b.qp, &[answer]).unwrap();
            }
        }
        let c = b.completion(w);
        assert_eq!(
            (c.wr_id, c.opcode, c.status),
            (WrId(round), WcOpcode::Send, WcStatus::Success)
        );
        rw.release();
        let c = a.completion(w);
        assert_eq!(c.invalidated, is_told.then_some(mr.rkey()));
        if !is_told {
            // Where nobody tells, one invalidates oneself.
            let inv = mr.inv_wr(WrId(9));
            w.provider(End::A).post_send(a.qp, &[inv]).unwrap();
            let c = a.completion(w);
            assert_eq!(
                (c.opcode, c.status),
                (WcOpcode::LocalInv, WcStatus::Success)
            );
        }
        assert!(mr.on_invalidated(mr.rkey()) && mr.state() == MrState::Idle);
        pool.put(w.provider(End::A), mr).unwrap();
        let here: Vec<_> = parts
            .iter()
            .flat_map(riser_memory::MemSlice::to_vec)
            .collect();
        let there = [b.bytes(0, 33_333), b.bytes(50_000, 50_000)].concat();
        assert!(here == there[100..70_100], "round {round}");
        // The next round brings something else.
        a.memory.write(200_000, &pattern(round + 50, 40_000));
    }
    assert_eq!((pool.available(), pool.outstanding()), (2, 0));
    pool.destroy(w.provider(End::A));
}

pub(crate) fn a_region_put_back_alive_is_replaced<W: World>(mut w: W) {
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
    pool.put(w.provider(End::A), mr).unwrap();
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
    // A local invalidation does as well as a remote one.
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
    pool.put(w.provider(End::A), mr).unwrap();
    pool.destroy(w.provider(End::A));
}
