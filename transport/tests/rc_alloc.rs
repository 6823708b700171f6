//! Once a connection has warmed up, messages do not cause allocations: not in the requester, the
//! responder, the key table, or for registrations.

use std::cell::Cell;
use std::time::{Duration, Instant};

use riser_memory::Memory;
use riser_testkit::alloc::Counting;
use riser_transport::mr::MrTable;
use riser_transport::rc::{
    Env, RcConfig, RcEvent, RcQp, RecvQueue, RtrParams, RtsParams, TxPacket,
};
use riser_transport::verbs::{
    Access, Handle, Mr, Mtu, PdId, QpCap, QpId, RecvWr, RemoteAddr, SendOp, SendWr, Sge, WrId,
};
use riser_transport::wire::{Packet, Psn, Qpn, RnrTimer};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    // A terminating thread no longer has a counter.
    let _ = ALLOCATIONS.try_with(|n| n.set(n.get() + 1));
}

#[global_allocator]
static ALLOCATOR: Counting = Counting::new(count);

const PD: PdId = PdId(Handle::new(1, 1));
const LEN: usize = 32 * 1024;

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
        let memory = Memory::new(2 * LEN).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE;
        let mr = mrs.reg(PD, &memory.whole(), access).unwrap();
        let fast = mrs.alloc_fast(PD, 4).unwrap();
        let cap = QpCap {
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 2,
            max_recv_sge: 2,
            max_inline: 64,
        };
        let mut qp = RcQp::new(RcConfig::new(QpId(Handle::new(index, 1)), PD, cap));
        qp.to_init();
        qp.to_rtr(&RtrParams {
            path_mtu: Mtu::Mtu1024,
            dest_qpn: Qpn::new(100),
            rq_psn: Psn::new(0xff_ff00),
            max_dest_rd_atomic: 4,
            min_rnr_timer: RnrTimer::new(1),
            access: Access::REMOTE,
        });
        qp.to_rts(&RtsParams {
            sq_psn: Psn::new(0xff_ff00),
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            max_rd_atomic: 4,
        });
        Self {
            qp,
            mrs,
            rq: RecvQueue::new(16, 2),
            out: Vec::new(),
            memory,
            mr,
            fast,
        }
    }

    fn run<R>(&mut self, f: impl FnOnce(&mut RcQp, &mut Env<'_>) -> R) -> R {
        let mut env = Env {
            mrs: &mut self.mrs,
            rq: &mut self.rq,
            out: &mut self.out,
        };
        f(&mut self.qp, &mut env)
    }

    fn sge(&self, offset: usize, length: usize) -> Sge {
        self.mr.sge(offset, length)
    }
}

/// Returns whether a packet is lost. One in `lose` packets is lost, distributed so that no traffic
/// pattern is always affected.
fn is_lost(packet: u64, lose: u64) -> bool {
    (packet.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32).is_multiple_of(lose)
}

struct Link {
    ends: [End; 2],
    now: Instant,
    tx: TxPacket,
    wire: Vec<u8>,
    packets: u64,
}

impl Link {
    /// Transfers packets in both directions until none are left; one in `lose` is lost.
    fn carry(&mut self, lose: u64) {
        loop {
            let mut is_quiet = true;
            for me in 0..2 {
                let (now, tx) = (self.now, &mut self.tx);
                while self.ends[me].run(|qp, env| qp.poll_transmit(now, env, tx)) {
                    is_quiet = false;
                    self.packets += 1;
                    if is_lost(self.packets, lose) {
                        continue;
                    }
                    self.wire.clear();
                    tx.copy_to(&mut self.wire);
                    self.wire.extend_from_slice(&[0; 4]);
                    let packet = Packet::parse(&self.wire).unwrap();
                    self.ends[1 - me].run(|qp, env| qp.handle_packet(now, &packet, env));
                }
            }
            if !is_quiet {
                continue;
            }
            let deadlines = self.ends.iter().filter_map(|e| e.qp.poll_timeout());
            let Some(next) = deadlines.min() else { return };
            self.now = self.now.max(next);
            let now = self.now;
            for end in &mut self.ends {
                end.run(|qp, env| qp.handle_timeout(now, env));
            }
        }
    }

    /// Sends one message of each kind from the first end to the second.
    fn round(&mut self, lose: u64) {
        let [a, b] = &mut self.ends;
        let receive = [b.sge(0, 100), b.sge(100, LEN - 100)];
        for id in 0..4 {
            let wr = RecvWr {
                wr_id: WrId(id),
                sges: &receive,
            };
            b.run(|qp, env| qp.post_recv(&[wr], env)).unwrap();
        }
        let segments = [
            a.memory.slice(0..1000).unwrap(),
            a.memory.slice(5000..6000).unwrap(),
        ];
        a.mrs.map_sg(a.fast.id, &segments).unwrap();
        let key = a.mrs.query(a.fast.id).unwrap().mr.rkey.next();
        let remote = RemoteAddr {
            addr: b.mr.addr + LEN as u64,
            rkey: b.mr.rkey,
        };
        let (long, eight) = ([a.sge(0, 100), a.sge(100, LEN - 100)], [a.sge(64, 8)]);
        let reg = SendOp::RegMr {
            mr: a.fast.id,
            key,
            access: Access::REMOTE_READ,
        };
        let wrs = [
            SendWr::new(0, SendOp::Send, &long),
            SendWr::new(1, SendOp::WriteImm(remote, 7), &long),
            SendWr::new(2, SendOp::Read(remote), &long),
            SendWr::new(3, SendOp::FetchAdd { remote, add: 1 }, &eight),
            SendWr::new(4, reg, &[]),
            SendWr::new(5, SendOp::SendImm(9), &eight),
            SendWr::new(6, SendOp::LocalInv(key), &[]),
            SendWr::new(7, SendOp::Send, &[]),
        ];
        a.run(|qp, env| qp.post_send(&wrs, env)).unwrap();
        self.carry(lose);
        for (end, expected) in self.ends.iter_mut().zip([8, 4]) {
            let is_ok =
                |e: &RcEvent| matches!(e, RcEvent::Send(c) | RcEvent::Recv(c) if c.status.is_ok());
            assert!(end.out.iter().all(is_ok), "{:?}", end.out);
            assert_eq!(end.out.len(), expected);
            end.out.clear();
        }
        self.now += Duration::from_millis(1);
    }
}

#[test]
fn messages_move_without_allocation() {
    let mut link = Link {
        ends: [End::new(0), End::new(1)],
        now: Instant::now(),
        tx: TxPacket::default(),
        wire: Vec::new(),
        packets: 0,
    };
    for _ in 0..3 {
        link.round(17);
    }
    // The round itself refers to its two segments without allocating, and so must all code below
    // it.
    let before = ALLOCATIONS.get();
    let footprints = [0, 1].map(|i: usize| link.ends[i].qp.footprint());
    assert!(
        footprints.iter().all(|&bytes| bytes < 16 * 1024),
        "{footprints:?}"
    );
    for lose in [u64::MAX, 17, 5] {
        for _ in 0..20 {
            link.round(lose);
        }
    }
    assert_eq!(ALLOCATIONS.get() - before, 0);
    assert_eq!(
        footprints,
        [0, 1].map(|i: usize| link.ends[i].qp.footprint())
    );
    assert!(link.packets > 5000);
}
