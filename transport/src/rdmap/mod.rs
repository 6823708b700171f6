//! RDMAP over DDP over MPA (RFC 5040, 5041, 5044, 6581, 7306): connections of iWARP, as pure machines.
//!
//! An [`RdmapQp`] is one end of a connection over a stream of bytes. It owns no socket, clock or
//! thread: bytes of the stream go in, in pieces of any length, and bytes, completions and events come
//! out. It has the send queue of reliable connections ([`rc::send_queue`](crate::rc::send_queue)),
//! their receive queues, and the keys of the device, and differs in what is between them.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`wire`] | the frames of a stream |
//! | [`setup`] | what two ends agree on before there is a stream |
//! | [`qp`] | [`RdmapQp`]: the queue pair, its states, and which message is sent next |
//! | [`requester`] | makes messages of send requests, takes answers |
//! | [`responder`] | takes messages, moves data, answers |
//!
//! # The calling order
//!
//! ```text
//! qp.to_init(); …posts…; qp.start(params)            // when both ends have agreed
//! for each piece of the stream: qp.handle_input(bytes, &mut env)
//! after that, and after posting:
//!     qp.poll_output(&mut env, &mut bytes, limit);    // append what is to be sent
//!     drain env.out;
//! when the stream has ended:    qp.to_error(&mut env)
//! once qp.is_over():            send what was made, then close the stream
//! ```
//!
//! # What differs from InfiniBand
//!
//! - A SEND or WRITE completes when its last byte is given to the stream. What the peer finds wrong
//!   with it comes as the end of the connection, with a reason.
//! - A SEND that finds no receive ends the connection: there is no RNR.
//! - Every error ends the connection, by a Terminate message that names the reason.
//! - There is no SEND with immediate data; a WRITE with immediate data is two messages (RFC 7306).
//!   Atomics and immediate data are not negotiated: a peer that does not know them, such as Linux's
//!   `siw`, ends the connection.
//! - The key of an RDMA READ's sink is a number of the READ. It gives the peer no access, and the
//!   scatter list of a READ needs no remote right.
//!
//! # Bounds
//! RDMA READs and atomics of the peer: as many as agreed. Beside its queues, a queue pair keeps one
//! FPDU as far as it has arrived.

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
pub use setup::{Agreed, Rtr, Wishes};

use wire::ddp::{Header, Opcode, Place, Queue};
use wire::fpdu::Framer;

/// Configuration of a queue pair, fixed when it is created.
#[derive(Clone, Copy, Debug)]
pub struct RdmapConfig {
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
}

/// Counters of a queue pair since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RdmapCounters {
    /// DDP segments sent.
    pub tx_segments: u64,
    /// Bytes of the stream sent.
    pub tx_bytes: u64,
    /// DDP segments taken in.
    pub rx_segments: u64,
    /// Bytes of the stream taken in.
    pub rx_bytes: u64,
    /// Terminate messages sent.
    pub tx_terminates: u64,
    /// Terminate messages taken in.
    pub rx_terminates: u64,
}

/// Context of making a segment.
struct Tx<'a> {
    cfg: &'a RdmapConfig,
    mrs: &'a mut MrTable,
    events: &'a mut Vec<RcEvent>,
    framer: &'a mut Framer,
    /// Longest ULPDU, in bytes.
    mulpdu: usize,
    /// Destination of the bytes.
    out: &'a mut Vec<u8>,
}

impl Tx<'_> {
    /// Makes an FPDU of a segment whose payload `fill` appends. Without payload where that fails, in
    /// which case nothing is left of it.
    fn segment<E>(
        &mut self,
        header: &Header,
        fill: impl FnOnce(&MrTable, &mut Vec<u8>) -> Result<(), E>,
    ) -> Result<(), E> {
        let start = Framer::begin(self.out);
        header.emit(self.out);
        if let Err(e) = fill(self.mrs, self.out) {
            self.out.truncate(start);
            return Err(e);
        }
        self.framer.end(self.out, start);
        Ok(())
    }

    /// Makes an FPDU of a message of one untagged segment.
    fn message(&mut self, opcode: Opcode, queue: Queue, msn: u32, fill: impl FnOnce(&mut Vec<u8>)) {
        let header = Header {
            opcode,
            last: true,
            place: Place::Untagged {
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
