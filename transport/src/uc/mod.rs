//! The unreliable connection transport (IBTA volume 1, section 9.8.2), implemented as a pure state
//! machine.
//!
//! [`UcQp`] is one end of a connection without acknowledgements or retransmissions. A request
//! completes when its last packet has been returned to the caller. Rings, packets and opcodes are
//! shared with [`rc`](crate::rc). Like [`RcQp`](crate::rc::RcQp), it does not use sockets, clocks
//! or threads and does not allocate memory on the data path.
//!
//! | module | contents |
//! | --- | --- |
//! | `requester` | splits send requests into packets |
//! | `pace` | pacing of these packets |
//! | `responder` | processes packets from the peer and transfers their data |
//!
//! ```text
//!  RESET → INIT → RTR → RTS ⇄ SQD      SQE: a request failed, rest is flushed, can receive
//!    ↑                   ↓ ↑   ↓       ERROR: everything is flushed
//!    └── any state      SQE ← ─┘       any state → ERROR
//! ```
//!
//! # Lost messages
//!
//! A message either completes or is lost, but a part of a lost message may already have been
//! written to memory. If a packet is not the expected one, the current message is lost, and the
//! next first packet will start a new message with any PSN. A first packet that was duplicated by
//! the network is therefore treated as a new message, since it looks the same as a packet after a
//! gap. A message is also lost if there is no receive, if it exceeds the receive, or if the key,
//! access rights or range are invalid. The peer is not notified in these cases (IBTA 9.9.3, class
//! D).
//!
//! If a message is lost, its receive is used again for the next message, starting at the first
//! byte. However, a receive from a shared queue, which is used by multiple QPs, completes with an
//! error (class E): [`WcStatus::LocLenErr`] if it was too short, or else
//! [`WcStatus::RemInvReqErr`], since the rest of the message was not received. The QP is not
//! affected. Linux `rdma_rxe` does the same if a message is interrupted, but always completes the
//! receive if the message is too long. Linux `rdmavt` also keeps receives from shared queues.
//!
//! # Limits
//! Queue sizes are set at creation. Transmission is paced (`pace.rs`). Packets are not marked as
//! ECN-capable, since there is no way to slow them down.

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

/// QP configuration.
#[derive(Clone, Copy, Debug)]
pub struct UcConfig {
    /// QP handle, used in completions and events.
    pub qp: QpId,
    /// QP number, used in completions.
    pub qp_num: u32,
    /// Protection domain of the QP.
    pub pd: PdId,
    /// Queue sizes. `max_recv_sge` must match the SRQ, if used.
    pub cap: QpCap,
    /// If set, all sends generate a completion.
    pub sq_sig_all: bool,
    /// If set, receives are taken from an SRQ.
    pub has_srq: bool,
    /// Maximum burst size in bytes, where each packet is counted as
    /// [`packet_cost`](crate::rc::packet_cost).
    pub max_burst_bytes: u32,
}

/// Attributes for the transition to RTR (IBTA 11.2.5.2).
#[derive(Clone, Copy, Debug)]
pub struct UcRtrParams {
    /// Path MTU for both directions.
    pub path_mtu: Mtu,
    /// The peer's QP number.
    pub dest_qpn: Qpn,
    /// First PSN we expect to receive.
    pub rq_psn: Psn,
    /// Access rights for the peer. Only remote rights are used.
    pub access: Access,
}

/// Counters for a QP, starting at its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UcCounters {
    /// Number of packets sent.
    pub tx_packets: u64,
    /// Number of payload bytes sent.
    pub tx_bytes: u64,
    /// Number of packets received.
    pub rx_packets: u64,
    /// Number of payload bytes received.
    pub rx_bytes: u64,
    /// Number of packets received with an unexpected PSN.
    pub out_of_order: u64,
    /// Number of messages lost because of a missing packet, a missing receive or an error.
    pub lost_messages: u64,
    /// Number of packets that don't belong to a message or are not valid in the current state.
    pub dropped: u64,
}

/// Path to the peer, set on the transition to RTR.
#[derive(Clone, Copy, Debug)]
struct Link {
    dest: Qpn,
    mtu: Mtu,
}

/// Unreliable connected QP. See the [module](self) documentation.
///
/// The caller must check each transition using the table in IBTA 11.2.5.2 ([`qp_state`]) and then
/// call the corresponding `to_*` function, which will panic if the transition is not in the table.
/// After each call, it must send the packets returned by [`UcQp::poll_transmit`] and drain the
/// events.
#[derive(Debug)]
pub struct UcQp {
    cfg: UcConfig,
    state: QpState,
    link: Option<Link>,
    requester: Requester,
    responder: Responder,
    counters: UcCounters,
    /// Set if no packet was received since RTR.
    awaits_first_packet: bool,
    /// Set if `SqDrained` has not been reported yet.
    awaits_drain: bool,
}

impl UcQp {
    /// Creates a QP in RESET.
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

    /// Returns the current state.
    #[must_use]
    pub fn state(&self) -> QpState {
        self.state
    }

    /// Returns the counters since creation.
    #[must_use]
    pub fn counters(&self) -> &UcCounters {
        &self.counters
    }

    /// RESET to INIT.
    pub fn to_init(&mut self) {
        self.become_state(QpState::Init);
    }

    /// INIT to RTR. The QP will now process received packets.
    pub fn to_rtr(&mut self, params: &UcRtrParams) {
        self.become_state(QpState::Rtr);
        self.link = Some(Link {
            dest: params.dest_qpn,
            mtu: params.path_mtu,
        });
        self.responder.start(params);
        self.awaits_first_packet = true;
    }

    /// RTR to RTS. The QP will now send requests, starting with this PSN.
    pub fn to_rts(&mut self, sq_psn: Psn) {
        assert_eq!(self.state, QpState::Rtr, "SQD and SQE are left by `resume`");
        self.become_state(QpState::Rts);
        self.requester.start(sq_psn);
    }

    /// RTS to SQD. The current message is completed but no new message is started. `SqDrained` is
    /// reported when this is done.
    pub fn to_sqd(&mut self, env: &mut Env<'_>) {
        self.become_state(QpState::Sqd);
        self.awaits_drain = true;
        self.check_drained(env);
    }

    /// SQD or SQE to RTS.
    pub fn resume(&mut self) {
        assert_ne!(self.state, QpState::Rtr, "RTR is left by `to_rts`");
        self.become_state(QpState::Rts);
        self.awaits_drain = false;
    }

    /// Any state to ERROR. All requests in both queues are flushed, starting with the send queue,
    /// in order. Receives in a shared queue are not affected.
    pub fn to_error(&mut self, env: &mut Env<'_>) {
        let was_in_error = self.state == QpState::Error;
        self.become_state(QpState::Error);
        self.awaits_drain = false;
        self.requester.flush(&self.cfg, env.out);
        self.flush_receives(env);
        // The owner of a shared queue must wait for this event before destroying the QP, since it
        // indicates that no more receives will be consumed.
        if self.cfg.has_srq && !was_in_error {
            let event = AsyncEvent::QpLastWqeReached(self.cfg.qp);
            env.out.push(RcEvent::Async(event));
        }
    }

    /// Any state to RESET. All state is cleared without completing any requests. The caller must
    /// clear the QP's own receive queue.
    pub fn to_reset(&mut self) {
        self.become_state(QpState::Reset);
        self.requester.reset();
        self.responder.reset();
        self.link = None;
        self.awaits_drain = false;
    }

    /// Returns true if a message that was started before the transition to SQD is not yet complete.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.state == QpState::Sqd && !self.requester.is_between_messages()
    }

    /// Sets the access rights for the peer.
    pub fn set_access(&mut self, access: Access) {
        self.responder.set_access(access);
    }

    /// Sets the maximum burst size ([`UcConfig::max_burst_bytes`]).
    pub fn set_max_burst(&mut self, bytes: u32) {
        self.requester.set_max_burst(bytes);
    }

    /// Posts a chain of send requests. In SQE and ERROR, they are flushed immediately.
    ///
    /// # Errors
    /// Returns the index of the first request that could not be posted, and the reason. This fails
    /// in RESET, INIT and RTR, and for READs, atomics and SENDs with invalidate, which are not
    /// supported.
    pub fn post_send(&mut self, wrs: &[SendWr<'_>], env: &mut Env<'_>) -> Result<(), PostError> {
        let result = post_sends(self.state, wrs, |wr| self.requester.post(wr));
        if matches!(self.state, QpState::Sqe | QpState::Error) {
            self.requester.flush(&self.cfg, env.out);
        }
        result
    }

    /// Removes the last `count` send requests, before they are processed.
    pub fn unpost_send(&mut self, count: usize) {
        self.requester.unpost(count);
    }

    /// Posts receives to the QP's own receive queue. In ERROR, they are flushed immediately.
    ///
    /// # Errors
    /// Returns the index of the first request that could not be posted, and the reason. This fails
    /// in RESET, and if the QP uses an SRQ.
    pub fn post_recv(&mut self, wrs: &[RecvWr<'_>], env: &mut Env<'_>) -> Result<(), PostError> {
        let result = post_receives(self.state, self.cfg.has_srq, wrs, env.rq);
        if self.state == QpState::Error {
            self.flush_receives(env);
        }
        result
    }

    /// Processes a packet received for this QP. The caller must already have verified its ICRC and
    /// source address.
    pub fn handle_packet(&mut self, pkt: &Packet<'_>, env: &mut Env<'_>) {
        let takes = matches!(
            self.state,
            QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe
        );
        // Check the state first, since packets must be ignored in RESET, INIT and ERROR.
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
        // The receive was invalid, which is an error by our owner.
        if handled.is_err() {
            self.to_error(env);
        }
    }

    /// Returns the next time [`UcQp::handle_timeout`] must be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let sends = matches!(self.state, QpState::Rts | QpState::Sqd);
        self.requester.deadline().filter(|_| sends)
    }

    /// Clears an expired wait. Pending packets are sent by the next poll.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.requester.handle_timeout(now);
    }

    /// Writes the next packet to `tx`, or returns false if there is nothing to send. The last
    /// packet of a message completes its request.
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

    /// Called when a send request has failed: the remaining requests are flushed but receiving
    /// still works (IBTA 10.3.1.6).
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
        // A bound receive is older than all receives in the queue.
        if let Some(wr_id) = self.responder.unbind() {
            let flushed = recv_completion(&self.cfg, wr_id, WcStatus::WrFlushErr);
            env.out.push(RcEvent::Recv(flushed));
        }
        // Don't flush a shared queue, since it is still used by other QPs.
        if !self.cfg.has_srq {
            while let Some(wr_id) = env.rq.pop_id() {
                let flushed = recv_completion(&self.cfg, wr_id, WcStatus::WrFlushErr);
                env.out.push(RcEvent::Recv(flushed));
            }
        }
    }
}

/// Creates the completion for a receive without data.
fn recv_completion(cfg: &UcConfig, wr_id: WrId, status: WcStatus) -> Completion {
    Completion::new(wr_id, status, WcOpcode::Recv, cfg.qp, cfg.qp_num)
}
