//! The reliable-connection transport of IBTA volume 1 chapter 9, as pure machines.
//!
//! An [`RcQp`] is one end of a connection. It owns no socket, clock or thread and copies no payload
//! on the way out: packets and the time go in, packets, completions and deadlines come out. Nothing
//! on that way allocates; every queue and ring has its final size from the start.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`qp`] | [`RcQp`]: the queue pair, its states, and who may send next |
//! | [`state`] | the states of the two directions, with their diagrams |
//! | [`send_queue`] | the ring of posted send requests |
//! | [`recv_queue`] | [`RecvQueue`]: the ring of posted receives, a queue pair's own or a shared one |
//! | `ctx` | what both directions work with during one call |
//! | `message` | the packets and the scatter list of a message |
//! | `emit` | a request packet: its opcode, headers and payload |
//! | `congestion` | the window of the requester |
//! | `post` | posts to a queue pair, also an unreliable one |
//! | `pacing` | the pace of the responder's READ responses |
//! | [`requester`] | cuts send requests into packets, keeps the window, repeats what was lost |
//! | [`completer`] | takes responses and completes send requests |
//! | [`responder`] | takes requests, moves data, answers |
//!
//! # The calling order
//!
//! ```text
//! for each packet:   qp.handle_packet(now, &packet, &mut env)
//! at poll_timeout(): qp.handle_timeout(now, &mut env)
//! after either, and after posting:
//!     while qp.poll_transmit(now, &mut env, &mut tx) { send tx }
//!     drain env.out
//! ```
//!
//! The caller has checked the ICRC and that the packet's addresses and destination queue pair are
//! this connection's. `env.rq` is the queue pair's own receive queue or the shared one that it was
//! created with; it must be the same in every call.
//!
//! # Choices the standard leaves open
//!
//! - **Window.** No more than [`RcConfig::max_inflight_bytes`] are unacknowledged, so that a burst
//!   fits a socket buffer, and no more than the path has been found to carry (`congestion.rs`). A
//!   READ longer than that is asked for in several requests, because a responder does not know the
//!   window; to the peer they are several READs.
//! - **Recovery** is go-back-N. The window comes back at once when the acknowledgement after a
//!   timeout shows that nothing was lost. The first retransmission comes after a time without
//!   progress that is derived from the measured round trip, the next after twice that and so on, up
//!   to eight times or the ACK timeout T. These times vary by a quarter.
//! - **Retries are counted in time**: one retry is spent for each 3·T without progress (the
//!   standard lets the interval be T to 4·T), however many retransmissions fall in it. A request
//!   therefore fails after (retry count + 1)·3·T. Sequence NAKs spend nothing: they prove that the
//!   peer lives.
//! - **Acknowledgements** are coalesced: a responder answers the newest of the packets that asked,
//!   or after [`RcConfig::ack_every`] packets that did not. What it has to acknowledge leaves
//!   ahead of the SENDs and WRITEs of its own that are ready, so that a program has the completion
//!   of what it has sent before that of the answer. It leaves behind READs and atomics. A requester
//!   asks at the end of a message, unless another follows at once, and at least every
//!   [`RcConfig::ack_every`] packets.
//! - **Credits** count receives, not messages: the limit is the number of receive-consuming
//!   messages acknowledged plus the advertised count. Before the first acknowledgement there is no
//!   limit.
//! - A LOCAL_INV waits for the earlier requests that name its key, so that a retransmission never
//!   meets a key that has gone, and for all with FENCE; a REG_MR runs as soon as its turn comes.
//!
//! - **Congestion notifications** (annex A17.9.3) answer packets with data that a router has
//!   marked, one in [`CNP_INTERVAL`] at most, and are never sent unasked: an `rdma_rxe` that does
//!   not know them takes one for a response that it does not expect. A requester that is sent one
//!   narrows its window, once in a round trip, and so does one whose READ responses arrive marked.
//!   A responder that is sent one paces its READ responses (`pacing.rs`).
//!
//! # Extended reliable connections (annex A14)
//!
//! A queue pair whose service is XRC is one of their ends: the same machine with other opcodes, and
//! with the number of a shared receive queue in each request. An initiator takes no requests and a
//! target sends none; the caller hands neither over. Before each request the caller has given a
//! target the receive queue that the request names (`env.rq`) and its domain
//! ([`RcQp::set_domain`]). All packets of a message name one queue.
//!
//! Linux's `rdma_rxe` does not have this service (it was proposed and never taken), other devices of
//! Linux do.
//!
//! # Path migration (IBTA 17.2.8)
//!
//! The owner knows the paths, and the state of migration. While that is ARMED
//! ([`RcQp::set_armed`]), a request whose retries are used up does not end the connection: it asks
//! for the other path ([`RcQp::take_path_wish`]). After a migration for whichever reason the
//! window, the round trip and the retries begin again, and what is outstanding is sent again
//! ([`RcQp::on_migrated`]). Only a packet whose PSN the peer has reason to send may migrate a
//! connection ([`RcQp::knows`]).
//!
//! Not implemented: resynchronisation (RESYNC), shared-queue resizing while a receive is bound.

#![cfg_attr(not(test), warn(clippy::cast_possible_truncation))]

mod completer;
mod congestion;
mod ctx;
pub(crate) mod emit;
pub(crate) mod message;
mod pacing;
pub(crate) mod post;
pub mod qp;
pub mod recv_queue;
mod requester;
mod responder;
pub mod send_queue;
pub mod state;
#[cfg(test)]
mod tests;

use std::time::Duration;

use riser_memory::MemSlice;

use crate::mr::MrTable;
use crate::verbs::{Access, AsyncEvent, Completion, Mtu, PdId, QpCap, QpId};
use crate::wire::{HeaderBuf, Psn, Qpn, RnrTimer, Service, pad_len};

pub use congestion::RECOVERY_WINDOW;
pub use qp::RcQp;
pub use recv_queue::{RecvQueue, RecvWqe};

/// PSNs before the expected one that a peer may still repeat, for all that is known: more than any
/// window has packets. A stranger has to guess one of these, of 2^24.
const RECENT: u32 = 1 << 12;

/// The shortest time between two congestion notifications of a queue pair.
pub const CNP_INTERVAL: Duration = Duration::from_micros(50);

/// Longest message, in bytes (IBTA 9.7.4.1.6).
pub const MAX_MESSAGE: u32 = 1 << 31;

/// Configuration of a queue pair, fixed when it is created but for
/// [`RcConfig::max_inflight_bytes`].
#[derive(Clone, Copy, Debug)]
pub struct RcConfig {
    /// Its handle, put into completions and events.
    pub qp: QpId,
    /// Its number, put into completions.
    pub qp_num: u32,
    /// Protection domain of the queue pair.
    pub pd: PdId,
    /// Its service: [`Service::Rc`], or [`Service::Xrc`].
    pub service: Service,
    /// Depths of its queues. A shared receive queue ignores the receive depths but not
    /// `max_recv_sge`, which must be that of the shared queue.
    pub cap: QpCap,
    /// Every send completes visibly.
    pub sq_sig_all: bool,
    /// Receives come from a shared receive queue. No credits are then advertised.
    pub has_srq: bool,
    /// Most bytes unacknowledged, each packet counted as [`packet_cost`]. To lose nothing on an
    /// idle link it should be well below the receiver's socket buffer.
    pub max_inflight_bytes: u32,
    /// Packets after which a responder acknowledges at the latest, and a requester asks for it.
    pub ack_every: u32,
    /// Time without progress before the first retransmission, as long as no round trip has been
    /// measured; the ACK timeout where that is shorter.
    pub first_retransmit: Duration,
    /// The same time at least, once the round trip is known.
    pub min_retransmit: Duration,
    /// Seed of the queue pair's random numbers. Timers vary by them, so that connections which
    /// lost packets together do not send together again. With 0 they do not.
    pub seed: u32,
}

/// Bytes that a full packet of a path MTU is taken to occupy in the receiver's socket buffer: Linux
/// charges a datagram with the power of two that holds it, and its own header beside.
#[must_use]
pub const fn packet_cost(mtu: Mtu) -> u32 {
    2 * mtu.bytes() + 512
}

impl RcConfig {
    /// A configuration with the defaults: number 0, 128 KiB in flight, which fits the usual socket
    /// buffer of 208 KiB with room for the other direction.
    #[must_use]
    pub fn new(qp: QpId, pd: PdId, cap: QpCap) -> Self {
        Self {
            qp,
            qp_num: 0,
            pd,
            service: Service::Rc,
            cap,
            sq_sig_all: false,
            has_srq: false,
            max_inflight_bytes: 128 * 1024,
            ack_every: 16,
            first_retransmit: Duration::from_millis(20),
            min_retransmit: Duration::from_millis(4),
            seed: 0,
        }
    }
}

/// Attributes of the transition to RTR (IBTA 11.2.5.2).
#[derive(Clone, Copy, Debug)]
pub struct RtrParams {
    /// Path MTU of both directions.
    pub path_mtu: Mtu,
    /// The peer's queue pair.
    pub dest_qpn: Qpn,
    /// First PSN that we expect.
    pub rq_psn: Psn,
    /// READs and atomics that the peer may have outstanding (responder resources).
    pub max_dest_rd_atomic: u8,
    /// Delay that our RNR NAKs ask for.
    pub min_rnr_timer: RnrTimer,
    /// Rights of the peer: the remote ones only.
    pub access: Access,
}

/// Attributes of the transition to RTS (IBTA 11.2.5.2).
#[derive(Clone, Copy, Debug)]
pub struct RtsParams {
    /// First PSN that we send.
    pub sq_psn: Psn,
    /// ACK timeout is 4.096 µs × 2^n; 0 waits for ever.
    pub timeout: u8,
    /// Retries after timeouts, up to 7.
    pub retry_cnt: u8,
    /// Retries after an RNR NAK; 7 is without end.
    pub rnr_retry: u8,
    /// READs and atomics that we may have outstanding (initiator depth).
    pub max_rd_atomic: u8,
}

/// Attributes that a drained queue pair may change (IBTA 11.2.5.2); `None` leaves one as it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct DrainedChange {
    /// ACK timeout, as [`RtsParams::timeout`].
    pub timeout: Option<u8>,
    /// Retries after timeouts, up to 7.
    pub retry_cnt: Option<u8>,
    /// Retries after an RNR NAK; 7 is without end.
    pub rnr_retry: Option<u8>,
    /// READs and atomics that we may have outstanding.
    pub max_rd_atomic: Option<u8>,
    /// READs and atomics that the peer may have outstanding.
    pub max_dest_rd_atomic: Option<u8>,
}

/// Something for the owner of the queue pair, in the order in which it happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RcEvent {
    /// For the send completion queue.
    Send(Completion),
    /// For the receive completion queue.
    Recv(Completion),
    /// For the asynchronous event queue.
    Async(AsyncEvent),
}

/// Resources that a queue pair uses but does not own.
#[derive(Debug)]
pub struct Env<'a> {
    /// Table of the device's keys.
    pub mrs: &'a mut MrTable,
    /// The queue pair's receive queue, its own or a shared one.
    pub rq: &'a mut RecvQueue,
    /// Destination of completions and events. One call appends at most the requests outstanding in
    /// both queues and a few events; a vector that is drained and reused stops growing there.
    pub out: &'a mut Vec<RcEvent>,
}

/// A packet to send, without addresses and ICRC: headers, then payload, then `pad` zero bytes.
///
/// The payload is `segments`, or `inline` for data that was copied; one of them is empty. A caller
/// keeps one of these and hands it in again, so that its buffers are allocated once.
#[derive(Debug, Default)]
pub struct TxPacket {
    /// BTH and extended headers; the pad count is set.
    pub headers: HeaderBuf,
    /// Payload in memory, in order. The memory stays valid as long as the slices live; its bytes
    /// may change under them, as under any NIC.
    pub segments: Vec<MemSlice>,
    /// Payload that was copied, at the post or because it is short.
    pub inline: Vec<u8>,
    /// Payload without padding, in bytes.
    pub payload_len: usize,
}

impl TxPacket {
    /// Bytes of padding after the payload.
    #[must_use]
    pub fn pad(&self) -> usize {
        pad_len(self.payload_len)
    }

    /// Bytes of the UDP payload without the ICRC.
    #[must_use]
    pub fn len(&self) -> usize {
        self.headers.len() + self.payload_len + self.pad()
    }

    /// Never true: a packet has a header.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.headers.is_empty()
    }

    /// Appends headers, payload and padding to `out`.
    pub fn copy_to(&self, out: &mut Vec<u8>) {
        let end = out.len() + self.len();
        out.extend_from_slice(&self.headers);
        out.extend_from_slice(&self.inline);
        for slice in &self.segments {
            let at = out.len();
            out.resize(at + slice.len(), 0);
            // A copy: no Rust reference may point into registered memory, which its owner or a
            // peer may write meanwhile.
            slice.read(0, &mut out[at..]);
        }
        out.resize(end, 0);
    }

    /// Empties it, keeping the buffers.
    pub(crate) fn clear(&mut self) {
        self.headers.clear();
        self.segments.clear();
        self.inline.clear();
        self.payload_len = 0;
    }
}

/// Counters of a queue pair since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RcCounters {
    /// Number of packets sent.
    pub tx_packets: u64,
    /// Number of payload bytes sent.
    pub tx_bytes: u64,
    /// Number of packets taken in.
    pub rx_packets: u64,
    /// Payload bytes taken in.
    pub rx_bytes: u64,
    /// Request packets sent again.
    pub retransmits: u64,
    /// Retransmissions that a timer began.
    pub timeouts: u64,
    /// Retransmissions begun because a response showed that an earlier one was lost.
    pub implied_naks: u64,
    /// Sequence NAKs taken in.
    pub rx_nak_sequence: u64,
    /// RNR NAKs taken in.
    pub rx_rnr_naks: u64,
    /// Invalid-request NAKs taken in.
    pub rx_nak_invalid: u64,
    /// Remote-access NAKs taken in.
    pub rx_nak_access: u64,
    /// Remote-operation NAKs taken in.
    pub rx_nak_operation: u64,
    /// Number of PSN sequence error NAKs sent.
    pub tx_nak_sequence: u64,
    /// Number of RNR NAKs sent.
    pub tx_rnr_naks: u64,
    /// Number of invalid-request NAKs sent.
    pub tx_nak_invalid: u64,
    /// Number of remote-access NAKs sent.
    pub tx_nak_access: u64,
    /// Number of remote-operation NAKs sent.
    pub tx_nak_operation: u64,
    /// Packets taken in that a router has marked for congestion.
    pub rx_marked: u64,
    /// Number of congestion notifications sent.
    pub tx_cnps: u64,
    /// Congestion notifications taken in.
    pub rx_cnps: u64,
    /// Request packets that had been taken in before.
    pub duplicates: u64,
    /// Request packets ahead of a missing one.
    pub out_of_order: u64,
    /// Responses that fit nothing outstanding.
    pub stale_responses: u64,
    /// Packets that the queue pair's state does not take.
    pub dropped: u64,
}

impl RcCounters {
    /// Packets that were in no sequence, or not taken for another reason.
    pub(crate) fn refused(&self) -> u64 {
        self.duplicates + self.out_of_order + self.stale_responses + self.dropped
    }
}
