//! The stream that leaves: PDUs in order, made when there is room for them.
//!
//! What is to be sent waits as items: a command and a sequence of data are one item each, however
//! long. A batch of whole PDUs is made of them when the one before has left; its headers are bytes
//! of their own, its data are named where they lie.
//!
//! Bound of the queue: for each command one item, and as many sequences as R2Ts may be open; and
//! [`MAX_CONTROLS`] control PDUs, among them the answers to the target's NOP-Ins, which it may send
//! without reading what it is sent.

use std::collections::VecDeque;
use std::ops::Range;

use riser_memory::MemSlice;
use riser_scsi::iscsi::frame::{self, DataDigest, Digests, padding};
use riser_scsi::iscsi::pdu::DataOut;

use super::{cut, read_parts};
use crate::block::Buffer;
use crate::engine::io::Io;
use crate::iscsi::session::{ControlKind, ControlPdu, DataOrder, IscsiSession, MAX_CONTROLS};
use crate::request::RequestId;

/// A batch takes no further PDU once it has this many bytes.
const BATCH_BYTES: usize = 256 << 10;

/// A batch takes no further PDU once it has this many pieces; one more PDU adds a few.
const BATCH_CHUNKS: usize = 48;

/// A PDU or a sequence of PDUs to send.
#[derive(Debug)]
pub(in crate::engine) enum Item {
    /// A PDU without a command's data.
    Control(ControlPdu),
    /// A command, and its unsolicited data.
    Command(RequestId),
    /// A sequence of data.
    Data(DataOrder),
    /// From here on with these digests and data segments up to that many bytes.
    Params(Digests, u32),
}

/// A piece of a batch.
#[derive(Debug)]
pub(super) enum Chunk {
    /// These bytes of the heads.
    Head(Range<usize>),
    /// A part of a command's data.
    Data(MemSlice),
}

/// A sequence of which some is sent.
#[derive(Debug)]
struct Sequence {
    order: DataOrder,
    sent: u32,
    data_sn: u32,
}

/// Material of PDUs: commands and their memory.
pub(in crate::engine) struct Source<'a> {
    pub(in crate::engine) session: &'a IscsiSession,
    pub(in crate::engine) ios: &'a [Option<Io>],
}

impl<'a> Source<'a> {
    fn buffers(&self, request: RequestId) -> &'a [Buffer] {
        let io = self.ios.get(request.0 as usize).and_then(Option::as_ref);
        io.map_or(&[], |io| io.io.data.buffers())
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(in crate::engine) struct Outgoing {
    queue: VecDeque<Item>,
    /// Control PDUs in the queue, by kind.
    controls: [usize; 3],
    /// Position before the last control PDU that is in the batch or has left, by kind.
    starts: [u64; 3],
    /// The sequence that is being sent.
    sequence: Option<Sequence>,
    digests: Digests,
    max_segment: u32,
    heads: Vec<u8>,
    chunks: Vec<Chunk>,
    len: usize,
    sent: usize,
    /// Bytes that the socket has taken, of all batches.
    position: u64,
    /// Position behind the last item of a request, by request.
    ends: Vec<u64>,
    /// Items of a request that wait or are in the batch, by request.
    pending: Vec<u16>,
    /// Requests whose items end with the batch.
    ending: Vec<RequestId>,
    /// Sequences that end with the batch.
    ended: Vec<DataOrder>,
    /// Sequences that have been sent.
    done: Vec<DataOrder>,
}

impl Outgoing {
    /// Queues something to send; false where there are too many control PDUs already.
    #[must_use]
    pub(in crate::engine) fn push(&mut self, item: Item) -> bool {
        match &item {
            Item::Command(request) | Item::Data(DataOrder { request, .. }) => {
                let at = request.0 as usize;
                if at >= self.pending.len() {
                    self.pending.resize(at + 1, 0);
                    self.ends.resize(at + 1, 0);
                }
                self.pending[at] += 1;
            }
            Item::Control(_) if self.controls.iter().sum::<usize>() == MAX_CONTROLS => {
                return false;
            }
            Item::Control(pdu) => self.controls[pdu.kind() as usize] += 1,
            Item::Params(..) => {}
        }
        self.queue.push_back(item);
        true
    }

    /// Returns whether something of a request's memory waits to be sent.
    pub(in crate::engine) fn is_pending(&self, request: RequestId) -> bool {
        self.pending.get(request.0 as usize).is_some_and(|n| *n > 0)
    }

    /// Returns whether something of a request waits to be sent, or lies beyond the first
    /// `acknowledged` bytes of the stream.
    pub(in crate::engine) fn is_under_way(&self, request: RequestId, acknowledged: u64) -> bool {
        let end = self.ends.get(request.0 as usize);
        self.is_pending(request) || end.is_some_and(|end| *end > acknowledged)
    }

    /// Returns whether the last control PDU of a kind waits to be sent, or has bytes before it that
    /// lie beyond the first `acknowledged` bytes of the stream. Its own bytes do not count.
    pub(in crate::engine) fn is_behind(&self, kind: ControlKind, acknowledged: u64) -> bool {
        self.controls[kind as usize] > 0 || self.starts[kind as usize] > acknowledged
    }

    /// A sequence that has left.
    pub(in crate::engine) fn poll_done(&mut self) -> Option<DataOrder> {
        self.done.pop()
    }

    /// Returns whether there is something to send.
    pub(super) fn has_work(&self) -> bool {
        self.sent < self.len || self.sequence.is_some() || !self.queue.is_empty()
    }

    pub(super) fn heads(&self) -> &[u8] {
        &self.heads
    }

    pub(super) fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Bytes of the batch that have left.
    pub(super) fn sent(&self) -> usize {
        self.sent
    }

    /// Bytes that have left since the connection was made.
    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// `len` bytes more have left.
    pub(super) fn advance(&mut self, len: usize) {
        self.sent += len;
        self.position += len as u64;
        if self.sent < self.len {
            return;
        }
        self.heads.clear();
        self.chunks.clear();
        (self.len, self.sent) = (0, 0);
        for request in self.ending.drain(..) {
            self.pending[request.0 as usize] -= 1;
            self.ends[request.0 as usize] = self.position;
        }
        self.done.append(&mut self.ended);
    }

    /// Makes a batch if none is on its way; whether there is something to send.
    pub(super) fn fill(&mut self, source: &Source<'_>) -> bool {
        if self.sent < self.len {
            return true;
        }
        while self.len < BATCH_BYTES && self.chunks.len() < BATCH_CHUNKS {
            if self.sequence.is_some() {
                self.put_data(source);
                continue;
            }
            match self.queue.pop_front() {
                None => break,
                Some(Item::Params(digests, max_segment)) => {
                    // Not earlier: what was queued before still belongs to the login.
                    (self.digests, self.max_segment) = (digests, max_segment);
                }
                Some(Item::Control(pdu)) => {
                    let kind = pdu.kind() as usize;
                    self.controls[kind] -= 1;
                    // All of the batch before this one has left.
                    self.starts[kind] = self.position + self.len as u64;
                    let start = self.heads.len();
                    frame::put(pdu.bhs, &[], &pdu.data, self.digests, &mut self.heads);
                    self.push_head(start);
                }
                Some(Item::Command(request)) => self.put_command(request, source),
                Some(Item::Data(order)) => {
                    self.sequence = Some(Sequence {
                        order,
                        sent: 0,
                        data_sn: 0,
                    });
                }
            }
        }
        self.len > 0
    }

    fn put_command(&mut self, request: RequestId, source: &Source<'_>) {
        let Some(command) = source.session.emit_command(request) else {
            self.pending[request.0 as usize] -= 1;
            return;
        };
        let start = self.heads.len();
        let len = command.immediate;
        frame::put_header(
            command.bhs,
            &command.ahs,
            len,
            self.digests,
            &mut self.heads,
        );
        self.push_head(start);
        self.put_segment(request, 0, len, source);
        match command.unsolicited {
            Some(order) => {
                self.sequence = Some(Sequence {
                    order,
                    sent: 0,
                    data_sn: 0,
                });
            }
            None => self.ending.push(request),
        }
    }

    /// The next PDU of the sequence.
    fn put_data(&mut self, source: &Source<'_>) {
        let Some(sequence) = &mut self.sequence else {
            return;
        };
        let order = sequence.order;
        let offset = order.offset + sequence.sent;
        let len = (order.len - sequence.sent).min(self.max_segment);
        let is_final = sequence.sent + len == order.len;
        let pdu = DataOut {
            is_final,
            lun: order.lun,
            itt: order.itt,
            ttt: order.ttt,
            exp_stat_sn: source.session.exp_stat_sn(),
            data_sn: sequence.data_sn,
            offset,
        };
        sequence.sent += len;
        sequence.data_sn += 1;
        let start = self.heads.len();
        frame::put_header(pdu.header(), &[], len, self.digests, &mut self.heads);
        self.push_head(start);
        self.put_segment(order.request, offset, len, source);
        if is_final {
            self.sequence = None;
            self.ending.push(order.request);
            self.ended.push(order);
        }
    }

    /// A data segment with its padding and digest.
    fn put_segment(&mut self, request: RequestId, offset: u32, len: u32, source: &Source<'_>) {
        if len == 0 {
            return;
        }
        let mut digest = self.digests.data.then(DataDigest::new);
        let slices = source.buffers(request).iter().map(Buffer::slice);
        cut(slices, offset as usize, len as usize, |slice| {
            if let Some(digest) = &mut digest {
                read_parts(&slice, |part| digest.update(part));
            }
            self.len += slice.len();
            self.chunks.push(Chunk::Data(slice));
        });
        let start = self.heads.len();
        let pad = &[0; 3][..padding(len as usize)];
        self.heads.extend_from_slice(pad);
        if let Some(mut digest) = digest {
            digest.update(pad);
            self.heads.extend(digest.finish());
        }
        self.push_head(start);
    }

    /// Appends what was written to the heads from `start` on.
    fn push_head(&mut self, start: usize) {
        let end = self.heads.len();
        self.len += end - start;
        match self.chunks.last_mut() {
            _ if start == end => {}
            Some(Chunk::Head(last)) if last.end == start => last.end = end,
            _ => self.chunks.push(Chunk::Head(start..end)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use riser_scsi::iscsi::BHS_LEN;

    use super::*;
    use crate::iscsi::session::PING_TAG;
    use crate::iscsi::session::fixture::config;

    #[test]
    fn a_target_that_pings_and_does_not_read_fills_no_memory() {
        let mut outgoing = Outgoing::default();
        let control = || {
            Item::Control(ControlPdu {
                bhs: [0; BHS_LEN],
                data: vec![0; 8192],
            })
        };
        let taken = (0..100_000)
            .take_while(|_| outgoing.push(control()))
            .count();
        assert_eq!(taken, MAX_CONTROLS);
    }

    #[test]
    fn a_ping_is_behind_what_was_sent_before_it_only() {
        let session = IscsiSession::new(config(), Instant::now());
        let source = Source {
            session: &session,
            ios: &[],
        };
        let mut outgoing = Outgoing::default();
        let push = |outgoing: &mut Outgoing, itt: u32| {
            let mut bhs = [0; BHS_LEN];
            bhs[16..20].copy_from_slice(&itt.to_be_bytes());
            let data = Vec::new();
            assert!(outgoing.push(Item::Control(ControlPdu { bhs, data })));
        };
        let ping = PING_TAG.0;
        for itt in [1, 2, ping, 3] {
            push(&mut outgoing, itt);
        }
        assert!(outgoing.is_behind(ControlKind::Ping, 0), "it waits");
        assert!(outgoing.fill(&source));
        for (acknowledged, is_behind) in [(0, true), (95, true), (96, false), (97, false)] {
            assert_eq!(
                outgoing.is_behind(ControlKind::Ping, acknowledged),
                is_behind
            );
        }
        outgoing.advance(4 * BHS_LEN);
        // Another batch: what comes behind the ping does not count.
        push(&mut outgoing, 4);
        assert!(outgoing.fill(&source));
        assert!(!outgoing.is_behind(ControlKind::Ping, 96));
        push(&mut outgoing, ping);
        outgoing.advance(BHS_LEN);
        assert!(outgoing.fill(&source));
        assert!(outgoing.is_behind(ControlKind::Ping, 4 * 48));
        assert!(!outgoing.is_behind(ControlKind::Ping, 5 * 48));
    }
}
