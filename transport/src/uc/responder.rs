//! Responder: processes packets from the peer and transfers their data (IBTA 9.8.2.2, 9.9.3).
//!
//! A packet is checked in this order, and there are no side effects before the last check: PSN,
//! position in the message, payload size, access rights of the QP, receive buffer or key, range and
//! access rights of the region.

use super::{UcConfig, UcCounters, UcRtrParams, recv_completion};
use crate::rc::message::{WritePart, payload_len};
use crate::rc::state::Inbound;
use crate::rc::{Env, RcEvent, RecvQueue, RecvWqe};
use crate::verbs::{Access, Completion, Mtu, WcOpcode, WcStatus, WrId};
use crate::wire::{Operation, Packet, Psn};

/// Reason why a message was not completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DropReason {
    /// The message is lost but its receive can be used again.
    Lost,
    /// The message is lost because it exceeds its receive.
    TooLong,
    /// The receive has completed with an error caused by our owner.
    BadReceive,
}

/// Returned if the QP can't continue because a receive was invalid. The receive has already been
/// completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Broken;

#[derive(Debug)]
pub(super) struct Responder {
    access: Access,
    /// Next expected PSN if no packets are lost.
    expected: Psn,
    /// Current message. Set to [`Inbound::None`] while receiving the rest of a lost message.
    inbound: Inbound,
    recv: RecvWqe,
    is_bound: bool,
}

impl Responder {
    pub(super) fn new(max_recv_sge: u32) -> Self {
        Self::with_recv(RecvWqe::new(max_recv_sge))
    }

    fn with_recv(recv: RecvWqe) -> Self {
        Self {
            access: Access::empty(),
            expected: Psn::default(),
            inbound: Inbound::None,
            recv,
            is_bound: false,
        }
    }

    pub(super) fn start(&mut self, params: &UcRtrParams) {
        self.expected = params.rq_psn;
        self.access = params.access & Access::REMOTE;
    }

    /// Resets all state, for a QP in RESET.
    pub(super) fn reset(&mut self) {
        // Keep the memory of the scatter list for the next connection.
        let recv = std::mem::replace(&mut self.recv, RecvWqe::new(0));
        *self = Self::with_recv(recv);
    }

    pub(super) fn set_access(&mut self, access: Access) {
        self.access = access & Access::REMOTE;
    }

    /// Returns the receive bound to the current message or kept from a lost message.
    pub(super) fn unbind(&mut self) -> Option<WrId> {
        self.inbound = Inbound::None;
        std::mem::take(&mut self.is_bound).then_some(self.recv.wr_id)
    }

    /// Processes a packet.
    pub(super) fn handle_packet(
        &mut self,
        cfg: &UcConfig,
        mtu: Mtu,
        pkt: &Packet<'_>,
        env: &mut Env<'_>,
        counters: &mut UcCounters,
    ) -> Result<(), Broken> {
        let is_start = pkt.op.position.is_start();
        let is_next = pkt.bth.psn() == self.expected;
        counters.out_of_order += u64::from(!is_next);
        self.expected = pkt.bth.psn().next();
        // A packet of the current message is missing, or the peer has aborted it and started a new
        // message.
        if (!is_next || is_start) && self.inbound != Inbound::None {
            self.lose(cfg, WcStatus::RemInvReqErr, env, counters);
        }
        if !is_start && self.inbound == Inbound::None {
            // This packet belongs to a lost message.
            counters.dropped += 1;
            return Ok(());
        }
        match self.place(cfg, mtu, pkt, env) {
            Ok(()) => {}
            Err(DropReason::Lost) => self.lose(cfg, WcStatus::RemInvReqErr, env, counters),
            Err(DropReason::TooLong) => self.lose(cfg, WcStatus::LocLenErr, env, counters),
            Err(DropReason::BadReceive) => {
                self.inbound = Inbound::None;
                self.is_bound = false;
                let failed = recv_completion(cfg, self.recv.wr_id, WcStatus::LocProtErr);
                env.out.push(RcEvent::Recv(failed));
                return Err(Broken);
            }
        }
        Ok(())
    }

    /// Discards the current message. Its receive is used for the next message, or completed with an
    /// error if it is from a shared queue (IBTA 9.9.3, classes D and E).
    fn lose(
        &mut self,
        cfg: &UcConfig,
        status: WcStatus,
        env: &mut Env<'_>,
        counters: &mut UcCounters,
    ) {
        self.inbound = Inbound::None;
        counters.lost_messages += 1;
        if cfg.has_srq && std::mem::take(&mut self.is_bound) {
            let failed = recv_completion(cfg, self.recv.wr_id, status);
            env.out.push(RcEvent::Recv(failed));
        }
    }

    /// Writes the data of an expected packet to memory.
    fn place(
        &mut self,
        cfg: &UcConfig,
        mtu: Mtu,
        pkt: &Packet<'_>,
        env: &mut Env<'_>,
    ) -> Result<(), DropReason> {
        // Packets in the middle must be full-sized. Otherwise sender and receiver would not agree
        // on the position of the next packet.
        let len = pkt.payload.len();
        if !pkt.op.payload.allows(len, mtu.bytes() as usize) {
            return Err(DropReason::Lost);
        }
        match (self.inbound, pkt.op.operation) {
            (Inbound::None | Inbound::Send { .. }, Operation::Send) => self.on_send(cfg, pkt, env),
            (Inbound::None | Inbound::Write { .. }, Operation::Write) => {
                self.on_write(cfg, pkt, env)
            }
            _ => Err(DropReason::Lost),
        }
    }

    /// Binds a receive, either from a lost message or from the queue.
    fn bind(&mut self, rq: &mut RecvQueue) -> Result<(), DropReason> {
        if !self.is_bound && !rq.pop(&mut self.recv) {
            return Err(DropReason::Lost);
        }
        self.is_bound = true;
        Ok(())
    }

    fn on_send(
        &mut self,
        cfg: &UcConfig,
        pkt: &Packet<'_>,
        env: &mut Env<'_>,
    ) -> Result<(), DropReason> {
        let received = match self.inbound {
            Inbound::Send { received } => received,
            _ => 0,
        };
        self.bind(env.rq)?;
        // This cannot exceed the receive size, which is at most the maximum message size.
        let total = received + payload_len(pkt);
        if total > self.recv.length {
            return Err(DropReason::TooLong);
        }
        self.recv
            .scatter(cfg.pd, env.mrs, received as usize, pkt.payload)
            .map_err(|_| DropReason::BadReceive)?;
        self.inbound = Inbound::Send { received: total };
        if pkt.op.position.is_end() {
            self.complete(cfg, pkt, env, WcOpcode::Recv, total);
        }
        Ok(())
    }

    fn on_write(
        &mut self,
        cfg: &UcConfig,
        pkt: &Packet<'_>,
        env: &mut Env<'_>,
    ) -> Result<(), DropReason> {
        let part = WritePart::of(self.inbound, pkt).filter(|part| part.is_allowed(self.access));
        let part = part.ok_or(DropReason::Lost)?;
        // Check the remaining range. This is repeated for each packet because the owner may have
        // invalidated the key.
        let right = Access::REMOTE_WRITE;
        let head = pkt.payload.len();
        let span = env.mrs.resolve_remote_head(
            cfg.pd,
            cfg.qp,
            part.rkey,
            part.addr,
            part.remaining,
            head,
            right,
        );
        let span = span.map_err(|_| DropReason::Lost)?;
        // Do this before writing the payload, since the last packet also needs a receive.
        if pkt.op.has_imm() {
            self.bind(env.rq)?;
        }
        span.write(0, pkt.payload);
        if !pkt.op.position.is_end() {
            self.inbound = part.rest();
            return Ok(());
        }
        self.inbound = Inbound::None;
        if pkt.op.has_imm() {
            // This is the length of the WRITE. No data is written to the receive itself.
            self.complete(cfg, pkt, env, WcOpcode::RecvWriteImm, part.total);
        }
        Ok(())
    }

    /// Completes the receive for a complete message.
    fn complete(
        &mut self,
        cfg: &UcConfig,
        pkt: &Packet<'_>,
        env: &mut Env<'_>,
        opcode: WcOpcode,
        byte_len: u32,
    ) {
        self.is_bound = false;
        self.inbound = Inbound::None;
        env.out.push(RcEvent::Recv(Completion {
            opcode,
            byte_len,
            imm: pkt.ext.imm.map(|i| i.data()),
            solicited: pkt.bth.is_solicited(),
            ..recv_completion(cfg, self.recv.wr_id, WcStatus::Success)
        }));
    }
}
