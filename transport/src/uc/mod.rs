//! The unreliable-connection transport of IBTA volume 1, section 9.8.2, as a pure machine.
//!
//! A [`UcQp`] is one end of a connection on which nothing is acknowledged or repeated. A request
//! completes when its last packet has been handed out. It shares rings, packets and opcodes with
//! [`rc`](crate::rc), and like an [`RcQp`](crate::rc::RcQp) it owns no socket, clock or thread and
//! allocates nothing on its way.
//!
//! | module | what it is |
//! | --- | --- |
//! | `requester` | cuts send requests into packets |
//! | `pace` | how fast these leave |
//! | `responder` | takes the peer's packets and moves their data |
//!
//! ```text
//!  RESET → INIT → RTR → RTS ⇄ SQD      SQE: a request failed, later ones flush, receives go on
//!    ↑                   ↓ ↑   ↓       ERROR: everything flushes
//!    └── any state      SQE ← ─┘       any state → ERROR
//! ```
//!
//! # What the peer loses
//!
//! A message is delivered whole or not at all, in its completion; a part of it may have reached
//! memory. A packet that is not the one expected ends the message that it interrupts, and the next
//! packet that begins a message begins with it, at any PSN. So a first packet that the network
//! repeats counts as a new message: nothing tells it from one behind a gap. Also lost is a message
//! without a receive, one longer than its receive, and one that key, right or range do not allow;
//! the peer learns of none of these (IBTA 9.9.3, class D).
//!
//! The receive of a message that is lost stays in its place, and takes the next message from its
//! first byte on. One of a shared queue, which serves other queue pairs, completes with an error
//! (class E): [`WcStatus::LocLenErr`] where it is too short, else [`WcStatus::RemInvReqErr`], since
//! the rest of the message did not come. The queue pair goes on. So it is in Linux's `rdma_rxe` where
//! a message is interrupted; one that is too long ends its receive in either queue. Linux's `rdmavt`
//! keeps receives of shared queues as well.
//!
//! # Bounds
//! The depths that it was created with. What leaves is paced (`pace.rs`). Packets are not marked as
//! ECN-capable, because nothing would slow them down.

#![cfg_attr(not(test), warn(clippy::cast_possible_truncation))]

mod pace;
mod requester;
mod responder;
#[cfg(test)]
mod tests;

use std::time::Instant;

use crate::rc::post::{post_receives, post_sends};
use crate::rc::{Env, RcEvent, TxPacket};
use crate::verbs::{
    Access, AsyncEvent, Completion, Mtu, PdId, PostError, QpCap, QpId, QpState, QpType, RecvWr,
    SendWr, WcOpcode, WcStatus, WrId, qp_state,
};
use crate::wire::{Packet, Psn, Qpn, Service};

use requester::Requester;
use responder::Responder;

/// Configuration of a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct UcConfig {
    /// Its handle, put into completions and events.
    pub qp: QpId,
    /// Its number, put into completions.
    pub qp_num: u32,
    /// Protection domain of the queue pair.
    pub pd: PdId,
    /// Depths of its queues; `max_recv_sge` is that of a shared receive queue, if it has one.
    pub cap: QpCap,
    /// Every send completes visibly.
    pub sq_sig_all: bool,
    /// Receives come from a shared receive queue.
    pub has_srq: bool,
    /// Most bytes that leave at once, each packet counted as
    /// [`packet_cost`](crate::rc::packet_cost).
    pub max_burst_bytes: u32,
}

/// Attributes of the transition to RTR (IBTA 11.2.5.2).
#[derive(Clone, Copy, Debug)]
pub struct UcRtrParams {
    /// Path MTU of both directions.
    pub path_mtu: Mtu,
    /// The peer's queue pair.
    pub dest_qpn: Qpn,
    /// First PSN that we expect.
    pub rq_psn: Psn,
    /// Rights of the peer: the remote ones only.
    pub access: Access,
}

/// Counters of a queue pair since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UcCounters {
    /// Number of packets sent.
    pub tx_packets: u64,
    /// Number of payload bytes sent.
    pub tx_bytes: u64,
    /// Number of packets taken in.
    pub rx_packets: u64,
    /// Payload bytes taken in.
    pub rx_bytes: u64,
    /// Packets with another PSN than the expected one.
    pub out_of_order: u64,
    /// Messages that were given up: a packet was missing, there was no receive, or they were
    /// refused.
    pub lost_messages: u64,
    /// Packets that belong to no message, or that the state does not take.
    pub dropped: u64,
}

/// The path to the peer, known from RTR on.
#[derive(Clone, Copy, Debug)]
struct Link {
    dest: Qpn,
    mtu: Mtu,
}

/// An unreliable-connected queue pair. See the [module](self).
///
/// The caller checks a request against the table of IBTA 11.2.5.2 ([`qp_state`]) and calls the
/// `to_*` function of the new state, which panics where the table has no such transition. After
/// each call it sends what [`UcQp::poll_transmit`] gives, and drains the events.
#[derive(Debug)]
pub struct UcQp {
    cfg: UcConfig,
    state: QpState,
    link: Option<Link>,
    requester: Requester,
    responder: Responder,
    counters: UcCounters,
    /// No packet has come since RTR.
    awaits_first_packet: bool,
    /// `SqDrained` still has to be raised.
    awaits_drain: bool,
}

impl UcQp {
    /// A queue pair in RESET.
    #[must_use]
    pub fn new(cfg: UcConfig) -> Self {
        Self {
            state: QpState::Reset,
            link: None,
            requester: Requester::new(&cfg),
            responder: Responder::new(cfg.cap.max_recv_sge),
            counters: UcCounters::default(),
            awaits_first_packet: false,
            awaits_drain: false,
            cfg,
        }
    }

    /// State of the queue pair.
    #[must_use]
    pub fn state(&self) -> QpState {
        self.state
    }

    /// Counters since its creation.
    #[must_use]
    pub fn counters(&self) -> &UcCounters {
        &self.counters
    }

    /// Transition from RESET to INIT.
    pub fn to_init(&mut self) {
        self.become_state(QpState::Init);
    }

    /// INIT to RTR: packets are taken from now on.
    pub fn to_rtr(&mut self, params: &UcRtrParams) {
        self.become_state(QpState::Rtr);
        self.link = Some(Link {
            dest: params.dest_qpn,
            mtu: params.path_mtu,
        });
        self.responder.start(params);
        self.awaits_first_packet = true;
    }

    /// RTR to RTS: requests are sent from now on, the first packet with this PSN.
    pub fn to_rts(&mut self, sq_psn: Psn) {
        assert_eq!(self.state, QpState::Rtr, "SQD and SQE are left by `resume`");
        self.become_state(QpState::Rts);
        self.requester.start(sq_psn);
    }

    /// RTS to SQD: a message that has begun is finished, no other begins. `SqDrained` reports the
    /// end.
    pub fn to_sqd(&mut self, env: &mut Env<'_>) {
        self.become_state(QpState::Sqd);
        self.awaits_drain = true;
        self.check_drained(env);
    }

    /// SQD or SQE back to RTS.
    pub fn resume(&mut self) {
        assert_ne!(self.state, QpState::Rtr, "RTR is left by `to_rts`");
        self.become_state(QpState::Rts);
        self.awaits_drain = false;
    }

    /// Any state to ERROR: every request in both queues completes as flushed, sends first, each
    /// queue in order. What a shared queue holds stays there.
    pub fn to_error(&mut self, env: &mut Env<'_>) {
        let was_in_error = self.state == QpState::Error;
        self.become_state(QpState::Error);
        self.awaits_drain = false;
        self.requester.flush(&self.cfg, env.out);
        self.flush_receives(env);
        // The owner of a shared queue waits for this event before it destroys the queue pair: no
        // receive of the shared queue is taken for it any longer.
        if self.cfg.has_srq && !was_in_error {
            let event = AsyncEvent::QpLastWqeReached(self.cfg.qp);
            env.out.push(RcEvent::Async(event));
        }
    }

    /// Any state to RESET: everything is forgotten, nothing completes. The caller clears the queue
    /// pair's own receive queue.
    pub fn to_reset(&mut self) {
        self.become_state(QpState::Reset);
        self.requester.reset();
        self.responder.reset();
        self.link = None;
        self.awaits_drain = false;
    }

    /// Whether a message that had begun before a move to SQD is not complete yet.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.state == QpState::Sqd && !self.requester.is_between_messages()
    }

    /// Changes what the peer may do.
    pub fn set_access(&mut self, access: Access) {
        self.responder.set_access(access);
    }

    /// Changes the most bytes that leave at once ([`UcConfig::max_burst_bytes`]).
    pub fn set_max_burst(&mut self, bytes: u32) {
        self.requester.set_max_burst(bytes);
    }

    /// Posts a chain of send requests. In SQE and ERROR they complete as flushed at once.
    ///
    /// # Errors
    /// The index of the first request that was not posted, and why. RESET, INIT and RTR take none,
    /// and READs, atomics and SENDs that invalidate do not exist here.
    pub fn post_send(&mut self, wrs: &[SendWr<'_>], env: &mut Env<'_>) -> Result<(), PostError> {
        let result = post_sends(self.state, wrs, |wr| self.requester.post(wr));
        if matches!(self.state, QpState::Sqe | QpState::Error) {
            self.requester.flush(&self.cfg, env.out);
        }
        result
    }

    /// Takes back the newest `count` sends, before anything has been done for them.
    pub fn unpost_send(&mut self, count: usize) {
        self.requester.unpost(count);
    }

    /// Posts receives to the queue pair's own receive queue. In ERROR they complete as flushed at
    /// once.
    ///
    /// # Errors
    /// The index of the first request that was not posted, and why. RESET takes none, nor does a
    /// queue pair with a shared receive queue.
    pub fn post_recv(&mut self, wrs: &[RecvWr<'_>], env: &mut Env<'_>) -> Result<(), PostError> {
        let result = post_receives(self.state, self.cfg.has_srq, wrs, env.rq);
        if self.state == QpState::Error {
            self.flush_receives(env);
        }
        result
    }

    /// Takes in a packet for this queue pair, whose ICRC and source have been checked.
    pub fn handle_packet(&mut self, pkt: &Packet<'_>, env: &mut Env<'_>) {
        let takes = matches!(
            self.state,
            QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe
        );
        // The state first: a queue pair in RESET, INIT or ERROR takes nothing.
        let Some(link) = self.link.filter(|_| takes && pkt.op.service == Service::Uc) else {
            self.counters.dropped += 1;
            return;
        };
        if std::mem::take(&mut self.awaits_first_packet) && self.state == QpState::Rtr {
            let event = AsyncEvent::CommEstablished(self.cfg.qp);
            env.out.push(RcEvent::Async(event));
        }
        self.counters.rx_packets += 1;
        self.counters.rx_bytes += pkt.payload.len() as u64;
        let handled =
            self.responder
                .handle_packet(&self.cfg, link.mtu, pkt, env, &mut self.counters);
        // The receive itself was wrong, which is our owner's mistake.
        if handled.is_err() {
            self.to_error(env);
        }
    }

    /// Next time at which [`UcQp::handle_timeout`] must be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let sends = matches!(self.state, QpState::Rts | QpState::Sqd);
        self.requester.deadline().filter(|_| sends)
    }

    /// Ends a wait whose time has come: the next poll sends what waited.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.requester.handle_timeout(now);
    }

    /// The next packet to send, written into `tx`; false if there is none for now. With the last
    /// packet of a message its request completes.
    pub fn poll_transmit(&mut self, now: Instant, env: &mut Env<'_>, tx: &mut TxPacket) -> bool {
        tx.clear();
        let may_start = match self.state {
            QpState::Rts => true,
            QpState::Sqd => false,
            _ => return false,
        };
        let Some(link) = self.link else {
            return false;
        };
        let sent = self
            .requester
            .poll(&self.cfg, link, now, env, tx, may_start);
        let is_sent = sent.unwrap_or_else(|_| {
            tx.clear();
            self.stop_sending(env);
            false
        });
        if is_sent {
            self.counters.tx_packets += 1;
            self.counters.tx_bytes += tx.payload_len as u64;
        }
        self.check_drained(env);
        is_sent
    }

    /// A send request has failed, and completed so: the others flush, and receives go on (IBTA
    /// 10.3.1.6).
    fn stop_sending(&mut self, env: &mut Env<'_>) {
        self.become_state(QpState::Sqe);
        self.awaits_drain = false;
        self.requester.flush(&self.cfg, env.out);
    }

    fn become_state(&mut self, next: QpState) {
        qp_state::become_state(&mut self.state, QpType::Uc, next);
    }

    fn check_drained(&mut self, env: &mut Env<'_>) {
        if self.awaits_drain && self.requester.is_between_messages() {
            self.awaits_drain = false;
            let event = AsyncEvent::SqDrained(self.cfg.qp);
            env.out.push(RcEvent::Async(event));
        }
    }

    fn flush_receives(&mut self, env: &mut Env<'_>) {
        // The one that is bound is older than all in the queue.
        if let Some(wr_id) = self.responder.unbind() {
            let flushed = recv_completion(&self.cfg, wr_id, WcStatus::WrFlushErr);
            env.out.push(RcEvent::Recv(flushed));
        }
        // A shared queue serves other queue pairs, which still need what is in it.
        if !self.cfg.has_srq {
            while let Some(wr_id) = env.rq.pop_id() {
                let flushed = recv_completion(&self.cfg, wr_id, WcStatus::WrFlushErr);
                env.out.push(RcEvent::Recv(flushed));
            }
        }
    }
}

/// The completion of a receive without data.
fn recv_completion(cfg: &UcConfig, wr_id: WrId, status: WcStatus) -> Completion {
    Completion::new(wr_id, status, WcOpcode::Recv, cfg.qp, cfg.qp_num)
}
