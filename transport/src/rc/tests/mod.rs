//! Test scripts: packets and time as input, packets and events as output. Packets are written as
//! bytes based on the specification, instead of using the code under test.

mod hostile;
mod requester;
mod responder;
mod states;
mod xrc;

use std::time::{Duration, Instant};

use riser_memory::Memory;

use super::*;
use crate::verbs::{
    Handle, LKey, Mr, QpState, RKey, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge, WcStatus,
    WrId,
};
use crate::wire::Packet;

pub(crate) const PD: PdId = PdId(Handle::new(1, 1));
pub(crate) const QP: QpId = QpId(Handle::new(7, 1));
/// First PSN sent by the QP, and first PSN it expects.
pub(super) const SQ_PSN: u32 = 0x200;
pub(super) const RQ_PSN: u32 = 0x100;
/// ACK timeout code and its value: 4.096 µs × 2^10.
pub(super) const TIMEOUT: u8 = 10;
pub(super) const T: Duration = Duration::from_nanos(4_194_304);
pub(super) const PEER: RemoteAddr = RemoteAddr {
    addr: 0x1122_3344_5566_7788,
    rkey: RKey(0xabcd_ef01),
};

/// Capacity of the QP in a rig.
pub(crate) const CAP: QpCap = QpCap {
    max_send_wr: 16,
    max_recv_wr: 4,
    max_send_sge: 2,
    max_recv_sge: 2,
    max_inline: 32,
};

/// QP of any service with its environment. Receives use memory at offset 32 KiB.
pub(crate) struct Bench<Q> {
    pub(crate) qp: Q,
    pub(crate) mrs: MrTable,
    pub(crate) rq: RecvQueue,
    pub(crate) out: Vec<RcEvent>,
    pub(crate) now: Instant,
    pub(crate) memory: Memory,
    pub(crate) mr: Mr,
}

pub(super) type Rig = Bench<RcQp>;

impl<Q> Bench<Q> {
    pub(crate) fn of(qp: Q) -> Self {
        let mut mrs = MrTable::new(16, 8, [5; 16]);
        let memory = Memory::new(64 * 1024).unwrap();
        // Zero-based, so that a script can use addresses before the memory is allocated.
        let access = Access::LOCAL_WRITE | Access::REMOTE | Access::ZERO_BASED;
        let mr = mrs.reg(PD, &memory.whole(), access).unwrap();
        Self {
            qp,
            mrs,
            rq: RecvQueue::new(4, 2),
            out: Vec::new(),
            now: Instant::now(),
            memory,
            mr,
        }
    }

    pub(crate) fn run<R>(&mut self, f: impl FnOnce(&mut Q, &mut Env<'_>) -> R) -> R {
        let mut env = Env {
            mrs: &mut self.mrs,
            rq: &mut self.rq,
            out: &mut self.out,
        };
        f(&mut self.qp, &mut env)
    }

    pub(crate) fn sge(&self, offset: usize, length: usize) -> Sge {
        self.mr.sge(offset, length)
    }

    pub(crate) fn received(&self, length: usize) -> Vec<u8> {
        self.memory.slice(0x8000..0x8000 + length).unwrap().to_vec()
    }

    pub(crate) fn events(&mut self) -> Vec<RcEvent> {
        std::mem::take(&mut self.out)
    }

    /// Returns the IDs and status values of send completions since the last call. Panics on any
    /// other event.
    pub(crate) fn sends(&mut self) -> Vec<(u64, WcStatus)> {
        let send = |e| match e {
            RcEvent::Send(c) => (c.wr_id.0, c.status),
            other => panic!("unexpected {other:?}"),
        };
        self.events().into_iter().map(send).collect()
    }
}

pub(super) struct Options {
    pub(super) service: Service,
    pub(super) state: QpState,
    pub(super) has_srq: bool,
    pub(super) access: Access,
    pub(super) sq_psn: u32,
    pub(super) rq_psn: u32,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) reads: u8,
    pub(super) window: u32,
    pub(super) ack_every: u32,
}

pub(super) const DEFAULT: Options = Options {
    service: Service::Rc,
    state: QpState::Rts,
    has_srq: false,
    access: Access::REMOTE,
    sq_psn: SQ_PSN,
    rq_psn: RQ_PSN,
    retry_cnt: 1,
    rnr_retry: 1,
    reads: 2,
    window: 16,
    ack_every: 8,
};

impl Rig {
    pub(super) fn new() -> Self {
        Self::with(&DEFAULT)
    }

    pub(super) fn with(options: &Options) -> Self {
        let mut cfg = RcConfig::new(QP, PD, CAP);
        cfg.service = options.service;
        cfg.has_srq = options.has_srq;
        cfg.max_inflight_bytes = options.window * packet_cost(Mtu::Mtu256);
        cfg.first_retransmit = T;
        cfg.min_retransmit = T;
        cfg.ack_every = options.ack_every;
        let mut rig = Self::of(RcQp::new(cfg));
        if options.state == QpState::Reset {
            return rig;
        }
        rig.qp.to_init();
        if options.state == QpState::Init {
            return rig;
        }
        rig.qp.to_rtr(&RtrParams {
            path_mtu: Mtu::Mtu256,
            dest_qpn: Qpn::new(0x22),
            rq_psn: Psn::new(options.rq_psn),
            max_dest_rd_atomic: options.reads,
            min_rnr_timer: RnrTimer::new(14),
            access: options.access,
        });
        if options.state == QpState::Rtr {
            return rig;
        }
        rig.qp.to_rts(&RtsParams {
            sq_psn: Psn::new(options.sq_psn),
            timeout: TIMEOUT,
            retry_cnt: options.retry_cnt,
            rnr_retry: options.rnr_retry,
            max_rd_atomic: options.reads,
        });
        rig
    }

    /// Posts a signaled request for `length` bytes at the start of the memory.
    pub(super) fn post(&mut self, wr_id: u64, op: SendOp, length: usize) {
        self.post_flags(wr_id, op, length, SendFlags::SIGNALED);
    }

    pub(super) fn post_flags(&mut self, wr_id: u64, op: SendOp, length: usize, flags: SendFlags) {
        let sges = [self.sge(0, length)];
        let list = if length == 0 { &[][..] } else { &sges[..] };
        let wr = SendWr::new(wr_id, op, list).flags(flags);
        self.run(|qp, env| qp.post_send(&[wr], env)).unwrap();
    }

    /// Posts a receive of `length` bytes at offset 32 KiB in the memory.
    pub(super) fn post_recv(&mut self, wr_id: u64, length: usize) {
        let sges = [self.sge(0x8000, length)];
        let wr = RecvWr {
            wr_id: WrId(wr_id),
            sges: &sges,
        };
        self.run(|qp, env| {
            if qp.config().has_srq {
                env.rq.post(&[wr])
            } else {
                qp.post_recv(&[wr], env)
            }
        })
        .unwrap();
    }

    /// Returns all packets that are currently sent, without ICRCs.
    pub(super) fn sent(&mut self) -> Vec<Vec<u8>> {
        let (now, mut tx, mut packets) = (self.now, TxPacket::default(), Vec::new());
        while self.run(|qp, env| qp.poll_transmit(now, env, &mut tx)) {
            let mut bytes = Vec::new();
            tx.copy_to(&mut bytes);
            assert_eq!(bytes.len(), tx.len());
            assert_eq!(bytes.len() % 4, 0);
            packets.push(bytes);
            assert!(packets.len() < 1000, "an endless stream");
        }
        packets
    }

    /// Returns opcodes and PSNs of all packets that are currently sent. Bit 31 is set for an ACK
    /// request.
    pub(super) fn sent_brief(&mut self) -> Vec<(u8, u32)> {
        self.sent().iter().map(|p| brief(p)).collect()
    }

    /// Processes a packet with a congestion mark.
    pub(super) fn feed_marked(&mut self, bytes: &[u8]) {
        let mut datagram = bytes.to_vec();
        datagram.extend_from_slice(&[0; 4]);
        let packet = Packet::parse(&datagram).expect("a well-formed packet");
        self.qp.handle_mark(self.now, &packet);
        self.feed(bytes);
    }

    /// Processes a congestion notification.
    pub(super) fn notify(&mut self) {
        let mut bytes = vec![0x81, 0, 0xff, 0xff, 0x40, 0, 0, 0x11];
        bytes.resize(28, 0);
        self.feed(&bytes);
    }

    pub(super) fn feed(&mut self, bytes: &[u8]) {
        let mut datagram = bytes.to_vec();
        datagram.extend_from_slice(&[0; 4]);
        let packet = Packet::parse(&datagram).expect("a well-formed packet");
        let now = self.now;
        self.run(|qp, env| qp.handle_packet(now, &packet, env));
    }

    pub(super) fn ack(&mut self, psn: u32, syndrome: u8) {
        self.feed(&packet(0x11, psn, false, &[syndrome, 0, 0, 0], &[]));
    }

    /// Advances the time to the deadline and processes the timers.
    pub(super) fn expire(&mut self) -> Duration {
        let at = self.qp.poll_timeout().expect("a deadline");
        let waited = at.saturating_duration_since(self.now);
        self.now = self.now.max(at);
        let now = self.now;
        self.run(|qp, env| qp.handle_timeout(now, env));
        waited
    }
}

/// Returns opcode and PSN, with the ACK request in bit 31 of the PSN.
pub(super) fn brief(p: &[u8]) -> (u8, u32) {
    (p[0], u32::from_be_bytes([p[8] & 0x80, p[9], p[10], p[11]]))
}

pub(super) const ACK_REQUEST: u32 = 0x8000_0000;

/// Creates a packet for the QP, without ICRC.
pub(super) fn packet(
    opcode: u8,
    psn: u32,
    ack_request: bool,
    ext: &[u8],
    payload: &[u8],
) -> Vec<u8> {
    let pad = (4 - payload.len() % 4) % 4;
    let mut p = vec![opcode, (pad as u8) << 4, 0xff, 0xff, 0, 0, 0, 0x11];
    p.push(if ack_request { 0x80 } else { 0 });
    p.extend_from_slice(&psn.to_be_bytes()[1..]);
    p.extend_from_slice(ext);
    p.extend_from_slice(payload);
    p.resize(p.len() + pad, 0);
    p
}

/// Creates a RETH.
pub(super) fn reth(addr: u64, rkey: RKey, len: u32) -> Vec<u8> {
    [
        &addr.to_be_bytes()[..],
        &rkey.0.to_be_bytes(),
        &len.to_be_bytes(),
    ]
    .concat()
}

/// Creates an AtomicETH.
pub(super) fn atomic_eth(addr: u64, rkey: RKey, swap_or_add: u64, compare: u64) -> Vec<u8> {
    let tail = [swap_or_add.to_be_bytes(), compare.to_be_bytes()].concat();
    [&addr.to_be_bytes()[..], &rkey.0.to_be_bytes(), &tail].concat()
}

/// Returns test data with different bytes.
pub(super) fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 256) as u8).collect()
}
