//! The reliable connection transport (IBTA volume 1, chapter 9), implemented as pure state
//! machines.
//!
//! [`RcQp`] is one end of a connection. It does not use sockets, clocks or threads and does not
//! copy the payload on send. The caller passes packets and the current time, and receives packets,
//! completions and deadlines. There are no allocations on this path because all queues and rings
//! are created with their final size.
//!
//! | module | contents |
//! | --- | --- |
//! | [`qp`] | [`RcQp`]: queue pair (QP), its states and the transmit scheduling |
//! | [`state`] | states for both directions, with diagrams |
//! | [`send_queue`] | ring of posted send requests |
//! | [`recv_queue`] | [`RecvQueue`]: ring of posted receives, per QP or shared |
//! | `ctx` | context used by both directions during a call |
//! | `message` | packets and scatter list of a message |
//! | `emit` | request packets: opcode, headers and payload |
//! | `congestion` | congestion window of the requester |
//! | `post` | posting to a QP, including unreliable connections |
//! | `pacing` | pacing of READ responses |
//! | [`requester`] | splits send requests into packets, handles the window and retransmissions |
//! | [`completer`] | processes responses and completes send requests |
//! | [`responder`] | processes requests, transfers data and sends responses |
//!
//! # Calling order
//!
//! ```text
//! for each packet:   qp.handle_packet(now, &packet, &mut env)
//! at poll_timeout(): qp.handle_timeout(now, &mut env)
//! after either, and after posting:
//!     while qp.poll_transmit(now, &mut env, &mut tx) { send tx }
//!     drain env.out
//! ```
//!
//! The caller must check the ICRC and verify that the addresses and destination QP of the packet
//! match this connection. `env.rq` is either the QP's receive queue or the SRQ used to create it,
//! and must not change between calls.
//!
//! # Implementation choices
//!
//! - **Window.** The amount of unacknowledged data is limited to [`RcConfig::max_inflight_bytes`],
//!   so that a burst fits into a socket buffer, and to the current path capacity (`congestion.rs`).
//!   A READ exceeding this is split into multiple requests, as a responder does not know the
//!   window. The peer will treat these as separate READs.
//! - **Recovery** uses go-back-N. If the acknowledgement after a timeout shows that nothing was
//!   lost, the previous window is restored. The first retransmission is sent after a time without
//!   progress based on the measured round trip. This interval is doubled for each retransmission,
//!   up to eight times the initial value or the ACK timeout T. All intervals vary by up to a
//!   quarter.
//! - **Retries are based on time**: each interval of 3·T without progress uses one retry (the
//!   standard allows T to 4·T), regardless of the number of retransmissions. A request will
//!   therefore fail after (retry count + 1)·3·T. Sequence NAKs don't use any retries because they
//!   prove that the peer is alive.
//! - **Acknowledgements** are coalesced: the responder acknowledges the most recent packet
//!   requesting it, or every [`RcConfig::ack_every`] packets if there was no request. A pending
//!   acknowledgement is sent before any SENDs and WRITEs from our side that are ready, so that the
//!   peer gets the completion for its request before our response. It is sent after pending READs
//!   and atomics. The requester requests an acknowledgement at the end of a message, unless it is
//!   immediately followed by a new message, and at least every [`RcConfig::ack_every`] packets.
//! - **Credits** count receives, not messages: the limit is the number of acknowledged messages
//!   that consumed a receive plus the advertised count. There is no limit before the first
//!   acknowledgement.
//! - LOCAL_INV waits for previous requests using its key, so that a retransmission never needs an
//!   invalidated key, and with FENCE for all previous requests. REG_MR is executed when it reaches
//!   the head of the queue.
//!
//! - **Congestion notifications** (annex A17.9.3) are sent for data packets that were marked by a
//!   router, at most one per [`CNP_INTERVAL`]. They are only sent as a reaction to a mark, because
//!   `rdma_rxe` versions without support for them will treat the packet as an unexpected response.
//!   A requester receiving a notification reduces its window, at most once per round trip. The same
//!   happens if its READ responses are marked. A responder receiving a notification starts pacing
//!   its READ responses (`pacing.rs`).
//!
//! # Extended reliable connections (annex A14)
//!
//! For the XRC service, a QP uses the same state machine with different opcodes, and each request
//! contains the number of an SRQ. An initiator can't receive requests and a target cannot send
//! them, and the caller must not pass them. Before passing a request to a target, the caller must
//! set the receive queue for this request (`env.rq`) and its domain ([`RcQp::set_domain`]). All
//! packets of a message must use the same queue.
//!
//! XRC is not supported by Linux `rdma_rxe` (patches were proposed but not merged), but by other
//! Linux drivers.
//!
//! # Path migration (IBTA 17.2.8)
//!
//! The owner of the QP handles the paths and the migration state. In the ARMED state
//! ([`RcQp::set_armed`]), a request that runs out of retries does not fail the connection but
//! requests a switch to the alternate path ([`RcQp::take_path_wish`]). After any migration, the
//! window, round trip and retries are reset and all outstanding packets are sent again
//! ([`RcQp::on_migrated`]). A packet can only migrate a connection if its PSN is plausible for the
//! peer ([`RcQp::knows`]).
//!
//! Not implemented: resynchronization (RESYNC), and resizing a shared queue while a receive is
//! bound.

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
pub(crate) mod tests;

use std::time::Duration;

use riser_memory::MemSlice;

use crate::mr::MrTable;
use crate::verbs::{Access, AsyncEvent, Completion, Mtu, PdId, QpCap, QpId};
use crate::wire::{HeaderBuf, Psn, Qpn, RnrTimer, Service, pad_len};

pub use congestion::RECOVERY_WINDOW;
pub use qp::RcQp;
pub use recv_queue::{RecvQueue, RecvWqe};

/// Number of PSNs before the expected PSN for which we assume that the peer can still retransmit.
/// This exceeds the maximum window. An attacker would need to guess a PSN in this range out of
/// 2^24.
const RECENT: u32 = 1 << 12;

/// Minimum time between two congestion notifications for a QP.
pub const CNP_INTERVAL: Duration = Duration::from_micros(50);

/// Maximum message size in bytes (IBTA 9.7.4.1.6).
pub const MAX_MESSAGE: u32 = 1 << 31;

/// QP configuration. Only [`RcConfig::max_inflight_bytes`] can be changed later.
#[derive(Clone, Copy, Debug)]
pub struct RcConfig {
    /// QP handle, used in completions and events.
    pub qp: QpId,
    /// QP number, used in completions.
    pub qp_num: u32,
    /// Protection domain of the QP.
    pub pd: PdId,
    /// Service: [`Service::Rc`] or [`Service::Xrc`].
    pub service: Service,
    /// Queue sizes. If an SRQ is used, the receive queue size is ignored but `max_recv_sge` must
    /// match the shared queue.
    pub cap: QpCap,
    /// If set, all sends generate a completion.
    pub sq_sig_all: bool,
    /// If set, receives are taken from an SRQ and we don't advertise credits.
    pub has_srq: bool,
    /// Maximum amount of unacknowledged data, where each packet is counted as [`packet_cost`]. To
    /// avoid packet loss on an idle link, this should be well below the receiver's socket buffer
    /// size.
    pub max_inflight_bytes: u32,
    /// Maximum number of packets before the responder sends an acknowledgement or the requester
    /// requests one.
    pub ack_every: u32,
    /// Time without progress before the first retransmission, used until a round trip has been
    /// measured. Limited by the ACK timeout.
    pub first_retransmit: Duration,
    /// Minimum time without progress before a retransmission, used when the round trip is known.
    pub min_retransmit: Duration,
    /// Seed for the random numbers used to vary the timers, so that connections which lost packets
    /// at the same time don't retransmit at the same time. Set to 0 to disable.
    pub seed: u32,
}

/// Returns the number of bytes that we expect a full packet to use in the receiver's socket buffer.
/// Linux rounds up the datagram size to a power of two and adds the header size.
#[must_use]
pub const fn packet_cost(mtu: Mtu) -> u32 {
    2 * mtu.bytes() + 512
}

impl RcConfig {
    /// Creates a default configuration with QP number 0 and 128 KiB in flight. This fits into the
    /// default socket buffer size of 208 KiB and leaves some space for the other direction.
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

/// Attributes for the transition to RTR (IBTA 11.2.5.2).
#[derive(Clone, Copy, Debug)]
pub struct RtrParams {
    /// Path MTU for both directions.
    pub path_mtu: Mtu,
    /// The peer's QP number.
    pub dest_qpn: Qpn,
    /// First PSN we expect to receive.
    pub rq_psn: Psn,
    /// Maximum number of outstanding READs and atomics from the peer (responder resources).
    pub max_dest_rd_atomic: u8,
    /// Delay requested in our RNR NAKs.
    pub min_rnr_timer: RnrTimer,
    /// Access rights for the peer. Only remote rights are used.
    pub access: Access,
}

/// Attributes for the transition to RTS (IBTA 11.2.5.2).
#[derive(Clone, Copy, Debug)]
pub struct RtsParams {
    /// First PSN we will send.
    pub sq_psn: Psn,
    /// ACK timeout of 4.096 µs × 2^n, or 0 for no timeout.
    pub timeout: u8,
    /// Retry count for timeouts, up to 7.
    pub retry_cnt: u8,
    /// Retry count for RNR NAKs; 7 means unlimited.
    pub rnr_retry: u8,
    /// Maximum number of our own outstanding READs and atomics (initiator depth).
    pub max_rd_atomic: u8,
}

/// Attributes that can be changed while the QP is drained (IBTA 11.2.5.2). Use `None` to keep the
/// current value.
#[derive(Clone, Copy, Debug, Default)]
pub struct DrainedChange {
    /// ACK timeout, see [`RtsParams::timeout`].
    pub timeout: Option<u8>,
    /// Retry count for timeouts, up to 7.
    pub retry_cnt: Option<u8>,
    /// Retry count for RNR NAKs; 7 means unlimited.
    pub rnr_retry: Option<u8>,
    /// Maximum number of our own outstanding READs and atomics.
    pub max_rd_atomic: Option<u8>,
    /// Maximum number of outstanding READs and atomics from the peer.
    pub max_dest_rd_atomic: Option<u8>,
}

/// Events for the owner of the QP, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RcEvent {
    /// Completion for the send CQ.
    Send(Completion),
    /// Completion for the receive CQ.
    Recv(Completion),
    /// Event for the asynchronous event queue.
    Async(AsyncEvent),
}

/// Resources used but not owned by a QP.
#[derive(Debug)]
pub struct Env<'a> {
    /// Key table of the device.
    pub mrs: &'a mut MrTable,
    /// Receive queue of the QP, or its SRQ.
    pub rq: &'a mut RecvQueue,
    /// Output for completions and events. A single call will add at most the number of outstanding
    /// requests in both queues and a few events, so this vector stops growing if it is drained and
    /// reused.
    pub out: &'a mut Vec<RcEvent>,
}

/// Packet to send, without addresses and ICRC: headers, followed by the payload and `pad` zero
/// bytes.
///
/// The payload is either in `segments`, or in `inline` if it was copied. The caller should reuse
/// this struct, so that its buffers are only allocated once.
#[derive(Debug, Default)]
pub struct TxPacket {
    /// BTH and extended headers. The pad count is already set.
    pub headers: HeaderBuf,
    /// Payload in memory, in order. The memory is valid while the slices exist, but its contents
    /// can be modified concurrently, as with any NIC.
    pub segments: Vec<MemSlice>,
    /// Payload that was copied, either when posted or because it is small.
    pub inline: Vec<u8>,
    /// Payload size without padding, in bytes.
    pub payload_len: usize,
}

impl TxPacket {
    /// Returns the number of pad bytes following the payload.
    #[must_use]
    pub fn pad(&self) -> usize {
        pad_len(self.payload_len)
    }

    /// Returns the size of the UDP payload without the ICRC.
    #[must_use]
    pub fn len(&self) -> usize {
        self.headers.len() + self.payload_len + self.pad()
    }

    /// Always returns false, because a packet has at least a header.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.headers.is_empty()
    }

    /// Appends the headers, payload and padding to `out`.
    pub fn copy_to(&self, out: &mut Vec<u8>) {
        let end = out.len() + self.len();
        out.extend_from_slice(&self.headers);
        out.extend_from_slice(&self.inline);
        for slice in &self.segments {
            let at = out.len();
            out.resize(at + slice.len(), 0);
            // We need a copy here, as we cannot create a Rust reference to registered memory that
            // may be modified concurrently by its owner or by a peer.
            slice.read(0, &mut out[at..]);
        }
        out.resize(end, 0);
    }

    /// Clears the packet but keeps the buffers.
    pub(crate) fn clear(&mut self) {
        self.headers.clear();
        self.segments.clear();
        self.inline.clear();
        self.payload_len = 0;
    }
}

/// Counters for a QP, starting at its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RcCounters {
    /// Number of packets sent.
    pub tx_packets: u64,
    /// Number of payload bytes sent.
    pub tx_bytes: u64,
    /// Number of packets received.
    pub rx_packets: u64,
    /// Number of payload bytes received.
    pub rx_bytes: u64,
    /// Number of retransmitted request packets.
    pub retransmits: u64,
    /// Number of retransmissions caused by a timer.
    pub timeouts: u64,
    /// Number of retransmissions caused by a response that implies the loss of a previous response.
    pub implied_naks: u64,
    /// Number of PSN sequence error NAKs received.
    pub rx_nak_sequence: u64,
    /// Number of RNR NAKs received.
    pub rx_rnr_naks: u64,
    /// Number of invalid-request NAKs received.
    pub rx_nak_invalid: u64,
    /// Number of remote-access NAKs received.
    pub rx_nak_access: u64,
    /// Number of remote-operation NAKs received.
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
    /// Number of received packets with a congestion mark.
    pub rx_marked: u64,
    /// Number of congestion notifications sent.
    pub tx_cnps: u64,
    /// Number of congestion notifications received.
    pub rx_cnps: u64,
    /// Number of duplicate request packets received.
    pub duplicates: u64,
    /// Number of request packets received after a missing packet.
    pub out_of_order: u64,
    /// Number of responses that don't match an outstanding request.
    pub stale_responses: u64,
    /// Number of packets dropped because they are not valid in the current QP state.
    pub dropped: u64,
}

impl RcCounters {
    /// Returns the number of packets that were out of sequence or dropped for other reasons.
    pub(crate) fn refused(&self) -> u64 {
        self.duplicates + self.out_of_order + self.stale_responses + self.dropped
    }
}
