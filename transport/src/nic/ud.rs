//! Datagram queue pairs: unreliable datagram and queue pair 1 (IBTA 9.8.3, 10.2.9).
//!
//! Each send uses a single packet, and completes when this packet has been sent. A receive starts
//! with 40 bytes for the global route header: for IPv6, this is the IP header; for IPv4, the last
//! 20 bytes contain the IP header. Datagrams are dropped if the queue key is wrong, if no receive
//! is posted, or if they don't fit into the receive. This is what "unreliable" means.
//!
//! ```text
//!  RESET → INIT → RTR → RTS ⇄ SQD      SQE: a send failed, later sends flush, receives continue
//!    ↑                   ↓ ↑           ERROR: everything flushes
//!    └── any state      SQE            any state → ERROR
//! ```
//!
//! Bounds: queue depths are set when the queue pair is created.

use std::collections::VecDeque;

use arrayvec::ArrayVec;

use crate::mr::{MrTable, Span};
use crate::nic::batch::TxPath;
use crate::rc::{RcEvent, RecvQueue, RecvWqe, TxPacket};
use crate::verbs::{
    AsyncEvent, Completion, GRH_LEN, PdId, PostReason, QKey, QpCap, QpId, QpState, QpType,
    RouteHeader, SendFlags, SendOp, SendWr, Sge, WcOpcode, WcStatus, WrId, qp_state,
};
use crate::wire::{Bth, Deth, ExtHeaders, ImmDt, Opcode, Packet, Psn, Qpn, emit_headers};

/// Max number of scatter-gather entries for a datagram send.
pub const MAX_UD_SGE: usize = 16;

#[derive(Debug)]
struct UdSend {
    wr_id: WrId,
    flags: SendFlags,
    imm: Option<u32>,
    way: TxPath,
    qpn: Qpn,
    qkey: u32,
    sges: ArrayVec<Sge, MAX_UD_SGE>,
    inline: Option<Box<[u8]>>,
    length: u32,
}

/// A datagram QP.
#[derive(Debug)]
pub struct UdQp {
    id: QpId,
    pd: PdId,
    qpn: Qpn,
    cap: QpCap,
    sq_sig_all: bool,
    state: QpState,
    qkey: u32,
    psn: Psn,
    mtu: usize,
    sends: VecDeque<UdSend>,
    wqe: RecvWqe,
    /// Number of datagrams dropped due to a missing receive, a wrong key, or their length.
    pub dropped: u64,
}

impl UdQp {
    /// Creates a QP in the RESET state. The maximum message size is `mtu` bytes.
    #[must_use]
    pub fn new(id: QpId, pd: PdId, qpn: Qpn, cap: QpCap, sq_sig_all: bool, mtu: usize) -> Self {
        Self {
            id,
            pd,
            qpn,
            cap,
            sq_sig_all,
            state: QpState::Reset,
            qkey: 0,
            psn: Psn::new(0),
            mtu,
            sends: VecDeque::with_capacity(cap.max_send_wr as usize),
            wqe: RecvWqe::new(cap.max_recv_sge),
            dropped: 0,
        }
    }

    /// Returns the current state.
    #[must_use]
    pub fn state(&self) -> QpState {
        self.state
    }

    /// Returns whether a send is ready to be transmitted.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.sends.is_empty() && matches!(self.state, QpState::Rts)
    }

    /// Sets the queue key required for received datagrams.
    pub fn set_qkey(&mut self, qkey: QKey) {
        self.qkey = qkey.0;
    }

    /// Sets the PSN of the next datagram.
    pub fn set_sq_psn(&mut self, psn: u32) {
        self.psn = Psn::new(psn);
    }

    /// Changes the state. The caller must check that this transition is valid. In the ERROR state,
    /// both queues are flushed; in the RESET state, they are cleared.
    pub fn on_state(&mut self, state: QpState, rq: &mut RecvQueue, out: &mut Vec<RcEvent>) {
        self.become_state(state);
        match state {
            QpState::Reset => {
                self.sends.clear();
                rq.clear();
            }
            QpState::Error => self.flush(rq, out),
            // A started datagram is always complete, so we don't need to wait for anything.
            QpState::Sqd => out.push(RcEvent::Async(AsyncEvent::SqDrained(self.id))),
            _ => {}
        }
    }

    fn become_state(&mut self, next: QpState) {
        let qp_type = if self.qpn == Qpn::GSI {
            QpType::Gsi
        } else {
            QpType::Ud
        };
        qp_state::become_state(&mut self.state, qp_type, next);
    }

    fn flush(&mut self, rq: &mut RecvQueue, out: &mut Vec<RcEvent>) {
        self.flush_sends(out);
        while let Some(wr_id) = rq.pop_id() {
            let c = self.completion(wr_id, WcOpcode::Recv, WcStatus::WrFlushErr);
            out.push(RcEvent::Recv(c));
        }
    }

    fn flush_sends(&mut self, out: &mut Vec<RcEvent>) {
        while let Some(s) = self.sends.pop_front() {
            let c = self.completion(s.wr_id, WcOpcode::Send, WcStatus::WrFlushErr);
            out.push(RcEvent::Send(c));
        }
    }

    fn completion(&self, wr_id: WrId, opcode: WcOpcode, status: WcStatus) -> Completion {
        Completion::new(wr_id, status, opcode, self.id, self.qpn.value())
    }

    /// Posts a send using `way` from its address handle. In the SQE and ERROR states, it is flushed
    /// immediately.
    ///
    /// # Errors
    /// Returns the reason why the request was rejected.
    pub fn post_send(
        &mut self,
        wr: &SendWr<'_>,
        way: TxPath,
        out: &mut Vec<RcEvent>,
    ) -> Result<(), PostReason> {
        if !matches!(
            self.state,
            QpState::Rts | QpState::Sqd | QpState::Sqe | QpState::Error
        ) {
            return Err(PostReason::InvalidState(self.state));
        }
        let imm = match wr.op {
            SendOp::Send => None,
            SendOp::SendImm(imm) => Some(imm),
            _ => return Err(PostReason::InvalidOpcode),
        };
        // A datagram QP is not connected, so each send must specify the destination.
        let ud = wr.ud.ok_or(PostReason::InvalidRequest("no destination"))?;
        let length = match wr.inline {
            Some(data) => data.len() as u64,
            None => wr.sges.iter().map(|s| u64::from(s.length)).sum(),
        };
        if length > self.mtu as u64 {
            return Err(PostReason::MessageTooLong);
        }
        let most = (self.cap.max_send_sge as usize).min(MAX_UD_SGE);
        if wr.sges.len() > most {
            return Err(PostReason::TooManySges);
        }
        if wr.inline.is_some() && (length > u64::from(self.cap.max_inline) || !wr.sges.is_empty()) {
            return Err(PostReason::InvalidInline);
        }
        if self.sends.len() >= self.cap.max_send_wr as usize {
            return Err(PostReason::QueueFull);
        }
        // We only copy the scatter list here. The data is read when we send the datagram.
        self.sends.push_back(UdSend {
            wr_id: wr.wr_id,
            flags: wr.flags,
            imm,
            way,
            qpn: Qpn::new(ud.qpn),
            qkey: ud.qkey.0,
            sges: wr.sges.iter().copied().collect(),
            inline: wr.inline.map(Box::from),
            length: length as u32,
        });
        // Nothing is sent in this state, so flush the request immediately.
        if matches!(self.state, QpState::Sqe | QpState::Error) {
            self.flush_sends(out);
        }
        Ok(())
    }

    /// Removes the last `count` sends.
    pub fn unpost_send(&mut self, count: usize) {
        self.sends.truncate(self.sends.len().saturating_sub(count));
    }

    /// Returns the next packet to send and its destination, and completes the send.
    pub fn poll_transmit(
        &mut self,
        mrs: &MrTable,
        out: &mut Vec<RcEvent>,
        tx: &mut TxPacket,
    ) -> Option<TxPath> {
        // In the SQD state, posted sends must wait until the state is RTS again.
        if self.state != QpState::Rts {
            return None;
        }
        let send = self.sends.pop_front()?;
        tx.segments.clear();
        tx.inline.clear();
        if let Some(data) = &send.inline {
            tx.inline.extend_from_slice(data);
        }
        for sge in &send.sges {
            match mrs.resolve_local(self.pd, sge, false) {
                Ok(span) => span.push_slices(0, span.len(), &mut tx.segments),
                Err(_) => {
                    // IBTA 10.3.1.6: the send queue stops if a datagram send fails.
                    let c = self.completion(send.wr_id, WcOpcode::Send, WcStatus::LocProtErr);
                    out.push(RcEvent::Send(c));
                    self.become_state(QpState::Sqe);
                    self.flush_sends(out);
                    return None;
                }
            }
        }
        let opcode = if send.imm.is_some() {
            Opcode::UdSendOnlyImm
        } else {
            Opcode::UdSendOnly
        };
        let bth = Bth::new(opcode, send.qpn, self.psn)
            .with_solicited(send.flags.contains(SendFlags::SOLICITED))
            .with_pad_for(send.length as usize);
        // If the top bit of the queue key is set, use the key of the QP instead (IBTA 10.2.5).
        let qkey = if send.qkey & 0x8000_0000 != 0 && self.qpn != Qpn::GSI {
            self.qkey
        } else {
            send.qkey
        };
        let ext = ExtHeaders {
            deth: Some(Deth::new(qkey, self.qpn)),
            imm: send.imm.map(ImmDt::new),
            ..ExtHeaders::default()
        };
        // Each datagram needs a PSN, even though receivers don't check it.
        self.psn = self.psn.next();
        tx.headers = emit_headers(&bth, &ext);
        tx.payload_len = send.length as usize;
        // Datagrams are not acknowledged, so complete it now.
        if self.sq_sig_all || send.flags.contains(SendFlags::SIGNALED) {
            let mut c = self.completion(send.wr_id, WcOpcode::Send, WcStatus::Success);
            c.byte_len = send.length;
            out.push(RcEvent::Send(c));
        }
        Some(send.way)
    }

    /// Handles a received datagram with this IP header. The ICRC and the partition key must have
    /// been verified.
    pub fn handle_packet(
        &mut self,
        packet: &Packet<'_>,
        header: &RouteHeader,
        mrs: &MrTable,
        rq: &mut RecvQueue,
        out: &mut Vec<RcEvent>,
    ) {
        let receives = matches!(
            self.state,
            QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe
        );
        // Check the state first: a QP in the INIT or ERROR state does not receive anything.
        let Some(deth) = packet.ext.deth.filter(|_| receives) else {
            self.dropped += 1;
            return;
        };
        let total = GRH_LEN + packet.payload.len();
        // IBTA 9.9.3, class D: a sender must not be able to stop a QP that is also used by other
        // senders.
        let fits = rq.next_length().is_some_and(|room| room as usize >= total);
        if deth.qkey() != self.qkey || packet.payload.len() > self.mtu || !fits {
            self.dropped += 1;
            return;
        }
        // Take the receive while we need `self`. This doesn't allocate since the scatter list of
        // the new value is empty.
        let mut wqe = std::mem::replace(&mut self.wqe, RecvWqe::new(0));
        rq.pop(&mut wqe);
        let grh = header.to_bytes();
        let status = place(self.pd, mrs, wqe.sges(), &[&grh, packet.payload]);
        let mut c = self.completion(wqe.wr_id, WcOpcode::Recv, status);
        self.wqe = wqe;
        if status.is_ok() {
            c.byte_len = total as u32;
            c.imm = packet.ext.imm.map(|i| i.data());
            c.src_qp = deth.src_qpn().value();
            c.solicited = packet.bth.is_solicited();
            c.network = Some(header.network());
        }
        out.push(RcEvent::Recv(c));
        // Unlike all errors above, an invalid receive is the fault of the local user.
        if !status.is_ok() {
            self.on_state(QpState::Error, rq, out);
        }
    }
}

/// Writes all `parts` to a scatter list, which must be large enough.
fn place(pd: PdId, mrs: &MrTable, sges: &[Sge], parts: &[&[u8]]) -> WcStatus {
    let mut sges = sges.iter();
    let mut span = None;
    // The position is kept across parts: the route header and the payload are a single message for
    // the application.
    let mut within = 0;
    let mut rest: usize = parts.iter().map(|part| part.len()).sum();
    for part in parts {
        let mut left = *part;
        while !left.is_empty() {
            let full = span.as_ref().is_none_or(|s: &Span<'_>| within == s.len());
            if full {
                let Some(sge) = sges.next() else {
                    return WcStatus::LocLenErr;
                };
                let part = 0..rest.min(sge.length as usize);
                match mrs.resolve_local_part(pd, sge, part, true) {
                    Ok(s) => span = Some(s),
                    Err(_) => return WcStatus::LocProtErr,
                }
                within = 0;
                continue;
            }
            let s = span.as_ref().expect("not full");
            let n = left.len().min(s.len() - within);
            s.write(within, &left[..n]);
            within += n;
            rest -= n;
            left = &left[n..];
        }
    }
    WcStatus::Success
}

#[cfg(test)]
mod tests {
    use riser_memory::Memory;
    use riser_state::State;
    use riser_state::testing::assert_all_taken;

    use super::*;
    use crate::verbs::qp_state::{OfType, STATES};
    use crate::verbs::{Access, AhId, Handle, Mr, NetworkHeader, RecvWr, UdDest};

    const PD: PdId = PdId(Handle::new(0, 1));
    const CAP: QpCap = QpCap {
        max_send_wr: 2,
        max_recv_wr: 2,
        max_send_sge: 2,
        max_recv_sge: 2,
        max_inline: 64,
    };

    struct Bench {
        qp: UdQp,
        rq: RecvQueue,
        mrs: MrTable,
        memory: Memory,
        mr: Mr,
        out: Vec<RcEvent>,
    }

    fn in_rts(qpn: Qpn) -> Bench {
        let mut mrs = MrTable::new(4, 4, [5; 16]);
        let memory = Memory::new(8192).unwrap();
        let mr = mrs.reg(PD, &memory.whole(), Access::LOCAL_WRITE).unwrap();
        let mut b = Bench {
            qp: UdQp::new(QpId(Handle::new(0, 1)), PD, qpn, CAP, false, 1024),
            rq: RecvQueue::new(2, 2),
            mrs,
            memory,
            mr,
            out: Vec::new(),
        };
        b.qp.set_qkey(QKey(0x11));
        for s in [QpState::Init, QpState::Rtr, QpState::Rts] {
            b.qp.on_state(s, &mut b.rq, &mut b.out);
        }
        b
    }

    fn peer() -> TxPath {
        TxPath::to("10.0.0.9:4791".parse().unwrap())
    }

    /// Creates the IP header of a datagram of `len` bytes from 10.0.0.1 to 10.0.0.2.
    fn header(len: usize) -> RouteHeader {
        RouteHeader {
            source: [10, 0, 0, 1].into(),
            destination: [10, 0, 0, 2].into(),
            traffic_class: 0x2e,
            flow_label: 0,
            hop_limit: 63,
            identification: 0,
            payload_len: (len + 8) as u16,
        }
    }

    fn wr<'a>(sges: &'a [Sge], flags: SendFlags) -> SendWr<'a> {
        SendWr {
            ud: Some(UdDest {
                ah: AhId(Handle::new(0, 1)),
                qpn: 0x77,
                qkey: QKey(0x11),
            }),
            ..SendWr::new(5, SendOp::SendImm(0xabcd), sges).flags(flags)
        }
    }

    /// Returns the packet sent by `b` as a single datagram with a fake ICRC.
    fn transmit(b: &mut Bench) -> Option<Vec<u8>> {
        let mut tx = TxPacket::default();
        let dst = b.qp.poll_transmit(&b.mrs, &mut b.out, &mut tx)?;
        assert_eq!(dst, peer());
        let mut bytes = Vec::new();
        tx.copy_to(&mut bytes);
        bytes.extend_from_slice(&[0; 4]);
        Some(bytes)
    }

    fn sge(b: &Bench, offset: u64, length: u32) -> Sge {
        Sge {
            addr: b.mr.addr + offset,
            length,
            lkey: b.mr.lkey,
        }
    }

    #[test]
    fn valid_transitions_occur() {
        let in_state = |state| {
            let mut b = in_rts(Qpn::new(2));
            let path: &[QpState] = match state {
                QpState::Reset => &[QpState::Reset],
                QpState::Init => &[QpState::Reset, QpState::Init],
                QpState::Rtr => &[QpState::Reset, QpState::Init, QpState::Rtr],
                QpState::Sqd => &[QpState::Sqd],
                QpState::Error => &[QpState::Error],
                QpState::Rts | QpState::Sqe => &[],
            };
            for s in path {
                b.qp.on_state(*s, &mut b.rq, &mut b.out);
            }
            if state == QpState::Sqe {
                let sges = [Sge {
                    lkey: crate::verbs::LKey(0),
                    ..sge(&b, 0, 4)
                }];
                let wr = wr(&sges, SendFlags::empty());
                b.qp.post_send(&wr, peer(), &mut b.out).unwrap();
                assert_eq!(transmit(&mut b), None);
            }
            assert_eq!(b.qp.state(), state);
            b
        };
        let states = STATES.map(|state| OfType(QpType::Ud, state));
        assert_all_taken(&states, || {
            for from in states {
                for to in states.iter().filter(|to| from.may_become(to)) {
                    if to.1 == QpState::Sqe {
                        in_state(to.1);
                        continue;
                    }
                    let mut b = in_state(from.1);
                    b.qp.on_state(to.1, &mut b.rq, &mut b.out);
                }
            }
        });
    }

    #[test]
    fn datagram_follows_route_header() {
        let mut b = in_rts(Qpn::new(0x77));
        b.memory.write(4096, b"hello");
        let send = [sge(&b, 4096, 2), sge(&b, 4098, 3)];
        b.qp.post_send(&wr(&send, SendFlags::SIGNALED), peer(), &mut b.out)
            .unwrap();
        let sent = transmit(&mut b).unwrap();
        assert!(matches!(&b.out[..], [RcEvent::Send(c)] if c.status.is_ok() && c.wr_id == WrId(5)));
        b.out.clear();
        let recv = [sge(&b, 0, 30), sge(&b, 100, 100)];
        b.rq.post(&[RecvWr {
            wr_id: WrId(8),
            sges: &recv,
        }])
        .unwrap();
        let packet = Packet::parse(&sent).unwrap();
        let header = header(sent.len());
        b.qp.handle_packet(&packet, &header, &b.mrs, &mut b.rq, &mut b.out);
        let [RcEvent::Recv(c)] = &b.out[..] else {
            panic!("{:?}", b.out);
        };
        assert_eq!(
            (c.byte_len, c.imm, c.src_qp, c.wr_id),
            (45, Some(0xabcd), 0x77, WrId(8))
        );
        assert_eq!(c.network, Some(NetworkHeader::Ipv4));
        let bytes = b.memory.whole().to_vec();
        // IP header, UDP header, BTH, DETH, immediate data, payload, padding and ICRC.
        let total = 20 + 8 + 12 + 8 + 4 + 8 + 4;
        assert_eq!(bytes[..20], [0; 20]);
        assert_eq!(bytes[20..30], [0x45, 0x2e, 0, total, 0, 0, 0x40, 0, 63, 17]);
        // Checksum and addresses of the IP header, then the payload.
        assert_eq!(bytes[100..110], [0x27, 0x7d, 10, 0, 0, 1, 10, 0, 0, 2]);
        assert_eq!(&bytes[110..116], b"hello\0");
    }

    #[test]
    fn wrong_key_or_missing_receive_drops_datagram() {
        let mut b = in_rts(Qpn::new(0x77));
        b.qp.post_send(&wr(&[], SendFlags::empty()), peer(), &mut b.out)
            .unwrap();
        let bytes = transmit(&mut b).unwrap();
        assert!(b.out.is_empty(), "not signaled");
        let packet = Packet::parse(&bytes).unwrap();
        let header = header(bytes.len());
        b.qp.handle_packet(&packet, &header, &b.mrs, &mut b.rq, &mut b.out);
        let recv = [sge(&b, 0, 64)];
        b.rq.post(&[RecvWr {
            wr_id: WrId(8),
            sges: &recv,
        }])
        .unwrap();
        b.qp.set_qkey(QKey(0x12));
        b.qp.handle_packet(&packet, &header, &b.mrs, &mut b.rq, &mut b.out);
        assert_eq!((b.qp.dropped, b.rq.len(), b.out.len()), (2, 1, 0));
    }

    #[test]
    fn invalid_lkey_stops_send_queue() {
        let mut b = in_rts(Qpn::new(0x77));
        let mut bad = sge(&b, 0, 8);
        bad.lkey.0 ^= 0x100;
        let bad = [bad];
        b.qp.post_send(&wr(&bad, SendFlags::empty()), peer(), &mut b.out)
            .unwrap();
        b.qp.post_send(&wr(&[], SendFlags::empty()), peer(), &mut b.out)
            .unwrap();
        assert_eq!(
            b.qp.post_send(&wr(&[], SendFlags::empty()), peer(), &mut b.out),
            Err(PostReason::QueueFull)
        );
        assert!(transmit(&mut b).is_none());
        let statuses: Vec<_> = b
            .out
            .drain(..)
            .map(|e| match e {
                RcEvent::Send(c) => c.status,
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(statuses, [WcStatus::LocProtErr, WcStatus::WrFlushErr]);
        assert_eq!(b.qp.state(), QpState::Sqe);
    }

    #[test]
    #[allow(unsafe_code, reason = "the region covers the whole address space")]
    fn datagram_populates_only_its_pages() {
        let mut mrs = MrTable::new(16, 8, [0; 16]);
        let memory = Memory::new(4096).unwrap();
        // SAFETY: this is never accessed, since a check for unmapped memory is done first.
        let space = unsafe { Memory::foreign(std::ptr::null_mut(), usize::MAX) };
        let access = Access::LOCAL_WRITE | Access::ON_DEMAND;
        let mr = mrs.reg(PD, &space.whole(), access).unwrap();
        let entry = |addr, length| Sge {
            addr,
            length,
            lkey: mr.lkey,
        };
        let sges = [entry(memory.addr(), 3), entry(memory.addr() + 100, 1 << 31)];
        let parts: [&[u8]; 2] = [b"ab", b"cd"];
        assert_eq!(place(PD, &mrs, &sges, &parts), WcStatus::Success);
        let bytes = memory.whole().to_vec();
        assert_eq!((&bytes[..3], bytes[100]), (&b"abc"[..], b'd'));
        let unmapped = place(PD, &mrs, &[entry(8, 4)], &parts);
        assert_eq!(unmapped, WcStatus::LocProtErr);
    }

    #[test]
    fn oversized_datagram_is_dropped() {
        let mut b = in_rts(Qpn::new(0x77));
        let send = [sge(&b, 4096, 64)];
        b.qp.post_send(&wr(&send, SendFlags::empty()), peer(), &mut b.out)
            .unwrap();
        let bytes = transmit(&mut b).unwrap();
        let short = [sge(&b, 0, GRH_LEN as u32 + 63)];
        b.rq.post(&[RecvWr {
            wr_id: WrId(8),
            sges: &short,
        }])
        .unwrap();
        let packet = Packet::parse(&bytes).unwrap();
        let header = header(bytes.len());
        b.qp.handle_packet(&packet, &header, &b.mrs, &mut b.rq, &mut b.out);
        assert_eq!(b.qp.state(), QpState::Rts);
        assert_eq!((b.qp.dropped, b.rq.len(), b.out.len()), (1, 1, 0));
    }
}
