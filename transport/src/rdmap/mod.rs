//! RDMAP over DDP over MPA (RFC 5040, 5041, 5044, 6581, 7306): iWARP connections, implemented as
//! pure state machines.
//!
//! [`RdmapQp`] is one end of a connection using a byte stream. It does not use sockets, clocks or
//! threads: the caller passes data from the stream in blocks of any size, and gets data to send,
//! completions and events. It uses the same send queue ([`rc::send_queue`](crate::rc::send_queue)),
//! receive queues and device keys as reliable connections, but a different protocol between them.
//!
//! | module | contents |
//! | --- | --- |
//! | [`wire`] | frames in the stream |
//! | [`setup`] | negotiation before the stream is started |
//! | [`qp`] | [`RdmapQp`]: queue pair (QP), its states, and selection of the next message to send |
//! | [`requester`] | sends messages for send requests, processes responses |
//! | [`responder`] | processes messages, transfers data, sends responses |
//!
//! # Calling order
//!
//! ```text
//! qp.to_init(); …posts…; qp.start(params)            // after the negotiation
//! for each block from the stream: qp.handle_input(bytes, &mut env)
//! after that, and after posting:
//!     qp.poll_output(&mut env, &mut bytes, limit);    // append data to send
//!     drain env.out;
//! when the stream is closed:    qp.to_error(&mut env)
//! once qp.is_over():            send remaining data, then close the stream
//! ```
//!
//! # Differences to InfiniBand
//!
//! - A SEND or WRITE completes when its last byte is written to the stream. If the peer detects an
//!   error, it will close the connection with a reason.
//! - If there is no receive for a SEND, the connection is closed, since RNR doesn't exist.
//! - All errors close the connection with a Terminate message that contains the reason.
//! - SEND with immediate data is not supported; a WRITE with immediate data uses two messages (RFC
//!   7306). Support for atomics and immediate data cannot be negotiated: a peer without support,
//!   such as Linux `siw`, will close the connection.
//! - The sink key of an RDMA READ is a number that identifies the READ. It doesn't provide any
//!   access for the peer, and the scatter list for a READ doesn't need remote access rights.
//!
//! # Limits
//! The number of RDMA READs and atomics from the peer is limited to the negotiated value. In
//! addition to its queues, a QP only stores a single partial FPDU.

#![cfg_attr(not(test), warn(clippy::cast_possible_truncation))]

pub mod qp;
pub mod requester;
pub mod responder;
pub mod setup;
#[cfg(test)]
mod tests;
pub mod wire;

use crate::mr::MrTable;
use crate::rc::RcEvent;
use crate::verbs::{PdId, QpCap, QpId};

pub use qp::{RdmapQp, StreamParams};
pub use setup::{NegotiatedParams, Rtr, Wishes};

use wire::ddp::{Header, Opcode, Placement, Queue};
use wire::fpdu::Framer;

/// QP configuration, which can't be changed later.
#[derive(Clone, Copy, Debug)]
pub struct RdmapConfig {
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
}

/// Counters for a QP, starting at its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RdmapCounters {
    /// Number of DDP segments sent.
    pub tx_segments: u64,
    /// Number of bytes sent to the stream.
    pub tx_bytes: u64,
    /// Number of DDP segments received.
    pub rx_segments: u64,
    /// Number of bytes received from the stream.
    pub rx_bytes: u64,
    /// Number of Terminate messages sent.
    pub tx_terminates: u64,
    /// Number of Terminate messages received.
    pub rx_terminates: u64,
}

/// Context used to create a segment.
struct Tx<'a> {
    cfg: &'a RdmapConfig,
    mrs: &'a mut MrTable,
    events: &'a mut Vec<RcEvent>,
    framer: &'a mut Framer,
    /// Maximum ULPDU size in bytes.
    mulpdu: usize,
    /// Output buffer.
    out: &'a mut Vec<u8>,
}

impl Tx<'_> {
    /// Creates an FPDU for a segment, with the payload appended by `fill`. If this fails, nothing
    /// is added.
    fn segment<E>(
        &mut self,
        header: &Header,
        fill: impl FnOnce(&MrTable, &mut Vec<u8>) -> Result<(), E>,
    ) -> Result<(), E> {
        let start = Framer::begin_fpdu(self.out);
        header.emit(self.out);
        if let Err(e) = fill(self.mrs, self.out) {
            self.out.truncate(start);
            return Err(e);
        }
        self.framer.end_fpdu(self.out, start);
        Ok(())
    }

    /// Creates an FPDU for a message with a single untagged segment.
    fn message(&mut self, opcode: Opcode, queue: Queue, msn: u32, fill: impl FnOnce(&mut Vec<u8>)) {
        let header = Header {
            opcode,
            last: true,
            place: Placement::Untagged {
                invalidate: 0,
                qn: queue as u32,
                msn,
                mo: 0,
            },
        };
        let filled: Result<(), std::convert::Infallible> = self.segment(&header, |_, out| {
            fill(out);
            Ok(())
        });
        let Ok(()) = filled;
    }
}
