//! What messages cost between two queue pairs in memory, what a registration costs, and what the
//! plan of a transfer costs.
//!
//! `cargo bench -p riser-tests --bench data_path [-- FILTER]`. The packets go through their wire
//! format and back, and not through a NIC; the benchmark `parsers` has the ICRC. Instructions of a
//! whole read are counted by `cargo xtask instructions`.

#![allow(missing_docs, reason = "a benchmark")]

use std::hint::black_box;
use std::time::Instant;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use riser_memory::Memory;
use riser_target::fabric::{Direction, PortionLimits, RemoteMemory, RemoteRange, Transfer};
use riser_target::pool::Pool;
use riser_transport::mr::MrTable;
use riser_transport::rc::{
    Env, RcConfig, RcEvent, RcQp, RecvQueue, RtrParams, RtsParams, TxPacket,
};
use riser_transport::verbs::{
    Access, Handle, Mr, Mtu, PdId, QpCap, QpId, RKey, RecvWr, RemoteAddr, SendFlags, SendOp,
    SendWr, Sge, WrId,
};
use riser_transport::wire::{Packet, Psn, Qpn, RnrTimer};

const PD: PdId = PdId(Handle::new(1, 1));
const REGION: usize = 1 << 20;

/// A queue pair with its keys, its receive queue and its memory.
struct End {
    qp: RcQp,
    mrs: MrTable,
    rq: RecvQueue,
    out: Vec<RcEvent>,
    memory: Memory,
    mr: Mr,
    fast: Mr,
}

impl End {
    fn new(index: u32) -> Self {
        let mut mrs = MrTable::new(16, 8, [index as u8; 16]);
        let memory = Memory::new(REGION).expect("a region");
        let access = Access::LOCAL_WRITE | Access::REMOTE;
        let mr = mrs.reg(PD, &memory.whole(), access).expect("a key");
        let fast = mrs.alloc_fast(PD, 1).expect("a region");
        let cap = QpCap {
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
        };
        let mut qp = RcQp::new(RcConfig::new(QpId(Handle::new(index, 1)), PD, cap));
        qp.to_init();
        qp.to_rtr(&RtrParams {
            path_mtu: Mtu::Mtu4096,
            dest_qpn: Qpn::new(100),
            rq_psn: Psn::new(1),
            max_dest_rd_atomic: 4,
            min_rnr_timer: RnrTimer::new(1),
            access: Access::REMOTE,
        });
        qp.to_rts(&RtsParams {
            sq_psn: Psn::new(1),
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            max_rd_atomic: 4,
        });
        Self {
            qp,
            mrs,
            rq: RecvQueue::new(16, 1),
            out: Vec::new(),
            memory,
            mr,
            fast,
        }
    }

    fn run<R>(&mut self, work: impl FnOnce(&mut RcQp, &mut Env<'_>) -> R) -> R {
        let mut env = Env {
            mrs: &mut self.mrs,
            rq: &mut self.rq,
            out: &mut self.out,
        };
        work(&mut self.qp, &mut env)
    }

    fn sge(&self, length: u32) -> [Sge; 1] {
        [Sge {
            addr: self.mr.addr,
            length,
            lkey: self.mr.lkey,
        }]
    }
}

/// Two ends, and a packet on its way between them.
struct Link {
    ends: [End; 2],
    now: Instant,
    tx: TxPacket,
    wire: Vec<u8>,
}

impl Link {
    fn new() -> Self {
        Self {
            ends: [End::new(0), End::new(1)],
            now: Instant::now(),
            tx: TxPacket::default(),
            wire: Vec::new(),
        }
    }

    /// Carries the data and the responses of this number of reads, in the order in which a target
    /// posts them: all data first, and a completion with the last response.
    fn responses(&mut self, remote: RemoteAddr, reads: u64) {
        const RESPONSE: u32 = 36;
        let [a, b] = &mut self.ends;
        let sges = b.sge(RESPONSE);
        let receive = RecvWr {
            wr_id: WrId(1),
            sges: &sges,
        };
        for _ in 0..reads {
            b.run(|qp, env| qp.post_recv(&[receive], env))
                .expect("room");
        }
        let (data, response) = (a.sge(4096), a.sge(RESPONSE));
        for n in 0..reads {
            let wr = SendWr::new(n, SendOp::Write(remote), &data).flags(SendFlags::empty());
            a.run(|qp, env| qp.post_send(&[wr], env)).expect("room");
        }
        for n in 0..reads {
            let wr = SendWr::new(n, SendOp::Send, &response);
            let is_last = n + 1 == reads;
            let wr = if is_last {
                wr
            } else {
                wr.flags(SendFlags::empty())
            };
            a.run(|qp, env| qp.post_send(&[wr], env)).expect("room");
        }
        self.carry();
        self.take([1, reads as usize]);
    }

    /// Registers 4 KiB for a remote read and invalidates the key, as an initiator does for a
    /// command.
    fn registration(&mut self) {
        let [a, _] = &mut self.ends;
        let segments = [a.memory.slice(0..4096).expect("a part")];
        a.mrs.map_sg(a.fast.id, &segments).expect("no key is valid");
        let key = a.mrs.query(a.fast.id).expect("it is there").mr.rkey.next();
        let reg = SendOp::RegMr {
            mr: a.fast.id,
            key,
            access: Access::REMOTE_READ,
        };
        let wrs = [
            SendWr::new(1, reg, &[]),
            SendWr::new(2, SendOp::LocalInv(key), &[]),
        ];
        a.run(|qp, env| qp.post_send(&wrs, env)).expect("room");
        self.carry();
        self.take([2, 0]);
    }

    /// Carries one message of the first end to the second, with its acknowledgement.
    fn message(&mut self, op: SendOp, len: u32, receives: bool) {
        let [a, b] = &mut self.ends;
        if receives {
            let sges = b.sge(len);
            let wr = RecvWr {
                wr_id: WrId(1),
                sges: &sges,
            };
            b.run(|qp, env| qp.post_recv(&[wr], env)).expect("room");
        }
        let sges = a.sge(len);
        let wr = SendWr::new(2, op, &sges);
        a.run(|qp, env| qp.post_send(&[wr], env)).expect("room");
        self.carry();
        self.take([1, usize::from(receives)]);
    }

    /// Carries packets back and forth until there is none.
    fn carry(&mut self) {
        let mut is_quiet = false;
        while !is_quiet {
            is_quiet = true;
            for me in 0..2 {
                let (now, tx) = (self.now, &mut self.tx);
                while self.ends[me].run(|qp, env| qp.poll_transmit(now, env, tx)) {
                    is_quiet = false;
                    self.wire.clear();
                    tx.copy_to(&mut self.wire);
                    // The ICRC, which the NIC fills.
                    self.wire.extend_from_slice(&[0; 4]);
                    let packet = Packet::parse(&self.wire).expect("our own");
                    self.ends[1 - me].run(|qp, env| qp.handle_packet(now, &packet, env));
                }
            }
        }
    }

    /// Takes the completions of both ends, of which there must be that many, and no error.
    fn take(&mut self, expected: [usize; 2]) {
        for (end, expected) in self.ends.iter_mut().zip(expected) {
            let is_ok =
                |e: &RcEvent| matches!(e, RcEvent::Send(c) | RcEvent::Recv(c) if c.status.is_ok());
            assert!(
                end.out.iter().all(is_ok) && end.out.len() == expected,
                "{:?}",
                end.out
            );
            end.out.clear();
        }
    }
}

fn rc(criterion: &mut Criterion) {
    let mut link = Link::new();
    let b = &link.ends[1].mr;
    let remote = RemoteAddr {
        addr: b.addr,
        rkey: b.rkey,
    };
    let mut group = criterion.benchmark_group("RC");
    for (name, op, receives) in [
        ("SEND", SendOp::Send, true),
        ("WRITE", SendOp::Write(remote), false),
        ("READ", SendOp::Read(remote), false),
    ] {
        for len in [64, 4096, 65_536] {
            group.throughput(Throughput::Bytes(len.into()));
            group.bench_function(BenchmarkId::new(name, len), |bencher| {
                bencher.iter(|| link.message(op, len, receives));
            });
        }
    }
    for reads in [1_u64, 8] {
        group.throughput(Throughput::Elements(reads));
        group.bench_function(BenchmarkId::new("reads of 4 KiB", reads), |bencher| {
            bencher.iter(|| link.responses(remote, reads));
        });
    }
    group.throughput(Throughput::Elements(1));
    group.bench_function("registration", |bencher| {
        bencher.iter(|| link.registration());
    });
}

/// Ranges of an initiator of one length.
struct Ranges(u32);

impl RemoteMemory for Ranges {
    fn range(&self, index: u32) -> RemoteRange {
        RemoteRange {
            addr: u64::from(index) << 32,
            rkey: RKey(index),
            len: self.0,
        }
    }
}

/// A transfer of 64 KiB is counted, then its requests are made.
fn planner(criterion: &mut Criterion) {
    const LEN: u32 = 64 << 10;
    let mut pool = Pool::new(1 << 20).expect("a pool");
    let buffer = pool.allocate(LEN).expect("room");
    let limits = PortionLimits { wrs: 128, sges: 4 };
    let mut group = criterion.benchmark_group("plan of 64 KiB");
    for range in [LEN, 4096, 512] {
        let remote = Ranges(range);
        group.throughput(Throughput::Elements((LEN / range).into()));
        group.bench_function(BenchmarkId::new("ranges of", range), |bencher| {
            bencher.iter(|| {
                let mut transfer = Transfer::new(Direction::ToInitiator, black_box(LEN));
                let counted = transfer.plan(&remote, &buffer, limits);
                let made = transfer.requests(&remote, &buffer).count();
                assert_eq!(made, counted as usize);
                black_box(made)
            });
        });
    }
    pool.release(buffer);
}

criterion_group!(benches, rc, planner);
criterion_main!(benches);
