//! The responder: takes the peer's packets and moves their data (IBTA 9.8.2.2, 9.9.3).
//!
//! A packet is checked in this order, and nothing changes before the last check: PSN, place in its
//! message, payload length, access flags of the queue pair, receive buffer, or key, range and access
//! flags of the region.

use super::{UcConfig, UcCounters, UcRtrParams, recv_completion};
use crate::rc::message::{WritePart, payload_len};
use crate::rc::state::Inbound;
use crate::rc::{Env, RcEvent, RecvQueue, RecvWqe};
use crate::verbs::{Access, Completion, Mtu, WcOpcode, WcStatus, WrId};
use crate::wire::{Operation, Packet, Psn};

/// Reason why a message ends before its last packet has been taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// It is lost. Its receive, if it has one, is not.
    Lost,
    /// It is lost, for it is longer than its receive.
    TooLong,
    /// Its receive has completed with an error of our owner's.
    BadReceive,
}

/// The queue pair cannot go on: a receive of its owner's was wrong, and has completed so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Broken;

#[derive(Debug)]
pub(super) struct Responder {
    access: Access,
    /// The PSN that comes next, if nothing is lost.
    expected: Psn,
    /// The message in progress. [`Inbound::None`] also while the rest of a lost one arrives.
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

    /// Forgets everything, as a queue pair in RESET does.
    pub(super) fn reset(&mut self) {
        // The scatter list's memory is kept for the next connection.
        let recv = std::mem::replace(&mut self.recv, RecvWqe::new(0));
        *self = Self::with_recv(recv);
    }

    pub(super) fn set_access(&mut self, access: Access) {
        self.access = access & Access::REMOTE;
    }

    /// Gives up the receive that a message has, or has left behind.
    pub(super) fn unbind(&mut self) -> Option<WrId> {
        self.inbound = Inbound::None;
        std::mem::take(&mut self.is_bound).then_some(self.recv.wr_id)
    }

    /// Takes in a packet.
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
        // A packet of the message is missing, or the peer has given it up itself and begins
        // another.
        if (!is_next || is_start) && self.inbound != Inbound::None {
            self.lose(cfg, WcStatus::RemInvReqErr, env, counters);
        }
        if !is_start && self.inbound == Inbound::None {
            // The rest of a message that is lost.
            counters.dropped += 1;
            return Ok(());
        }
        match self.place(cfg, mtu, pkt, env) {
            Ok(()) => {}
            Err(End::Lost) => self.lose(cfg, WcStatus::RemInvReqErr, env, counters),
            Err(End::TooLong) => self.lose(cfg, WcStatus::LocLenErr, env, counters),
            Err(End::BadReceive) => {
                self.inbound = Inbound::None;
                self.is_bound = false;
                let failed = recv_completion(cfg, self.recv.wr_id, WcStatus::LocProtErr);
                env.out.push(RcEvent::Recv(failed));
                return Err(Broken);
            }
        }
        Ok(())
    }

    /// Gives a message up. Its receive waits for the next one, unless it is of a shared queue, whose
    /// owner gets it back with an error (IBTA 9.9.3, classes D and E).
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

    /// Puts the data of a packet that is in its place where they belong.
    fn place(
        &mut self,
        cfg: &UcConfig,
        mtu: Mtu,
        pkt: &Packet<'_>,
        env: &mut Env<'_>,
    ) -> Result<(), End> {
        // A packet in the middle has to be full, or sender and receiver would disagree about where
        // the next one's data belongs.
        let len = pkt.payload.len();
        if !pkt.op.payload.allows(len, mtu.bytes() as usize) {
            return Err(End::Lost);
        }
        match (self.inbound, pkt.op.operation) {
            (Inbound::None | Inbound::Send { .. }, Operation::Send) => self.on_send(cfg, pkt, env),
            (Inbound::None | Inbound::Write { .. }, Operation::Write) => {
                self.on_write(cfg, pkt, env)
            }
            _ => Err(End::Lost),
        }
    }

    /// Provides a receive: one that a lost message has left behind, or the next of the queue.
    fn bind(&mut self, rq: &mut RecvQueue) -> Result<(), End> {
        if !self.is_bound && !rq.pop(&mut self.recv) {
            return Err(End::Lost);
        }
        self.is_bound = true;
        Ok(())
    }

    fn on_send(&mut self, cfg: &UcConfig, pkt: &Packet<'_>, env: &mut Env<'_>) -> Result<(), End> {
        let received = match self.inbound {
            Inbound::Send { received } => received,
            _ => 0,
        };
        self.bind(env.rq)?;
        // Not more than a receive holds, which is at most the longest message.
        let total = received + payload_len(pkt);
        if total > self.recv.length {
            return Err(End::TooLong);
        }
        self.recv
            .scatter(cfg.pd, env.mrs, received as usize, pkt.payload)
            .map_err(|_| End::BadReceive)?;
        self.inbound = Inbound::Send { received: total };
        if pkt.op.position.is_end() {
            self.complete(cfg, pkt, env, WcOpcode::Recv, total);
        }
        Ok(())
    }

    fn on_write(&mut self, cfg: &UcConfig, pkt: &Packet<'_>, env: &mut Env<'_>) -> Result<(), End> {
        let part = WritePart::of(self.inbound, pkt).filter(|part| part.is_allowed(self.access));
        let part = part.ok_or(End::Lost)?;
        // The whole rest of the range, and again with each packet, since the owner may have
        // invalidated the key in the middle of a message.
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
        let span = span.map_err(|_| End::Lost)?;
        // Before the payload is written: its last packet goes with its receive.
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
            // The length of the WRITE; the receive itself gets no data.
            self.complete(cfg, pkt, env, WcOpcode::RecvWriteImm, part.total);
        }
        Ok(())
    }

    /// Completes the receive of a message that is whole.
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
