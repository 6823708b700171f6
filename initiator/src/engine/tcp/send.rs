//! The sent stream: PDUs in order, created when there is room for them.
//!
//! Items to send are queued. A command or a sequence of data is a single item, regardless of its
//! length. When a batch of PDUs was sent, the next one is created from the queue: it contains the
//! headers, and refers to the data in place.
//!
//! Bound of the queue: for each command one item, and as many sequences as R2Ts may be outstanding;
//! plus [`MAX_CONTROLS`] control PDUs. These include responses to NOP-Ins, which a target may send
//! without reading from the connection.

use std::collections::VecDeque;
use std::ops::Range;

use riser_block::Buffer;
use riser_memory::MemSlice;
use riser_scsi::iscsi::frame::{self, DataDigest, Digests, padding};
use riser_scsi::iscsi::pdu::DataOut;

use super::{cut, read_parts};
use crate::engine::io::Io;
use crate::iscsi::session::{ControlKind, ControlPdu, DataOrder, IscsiSession, MAX_CONTROLS};
use crate::request::RequestId;

/// No further PDU is added to a batch with this many bytes.
const BATCH_BYTES: usize = 256 << 10;

/// No further PDU is added to a batch with this many chunks; a PDU adds a few.
const BATCH_CHUNKS: usize = 48;

/// A PDU or a sequence of PDUs to send.
#[derive(Debug)]
pub(in crate::engine) enum Item {
    /// A PDU without a command's data.
    Control(ControlPdu),
    /// A command with its unsolicited data.
    Command(RequestId),
    /// A sequence of solicited data.
    Data(DataOrder),
    /// Use these digests and this maximum data segment length for all following items.
    Params(Digests, u32),
}

/// A chunk of a batch.
#[derive(Debug)]
pub(super) enum Chunk {
    /// This range of the heads.
    Head(Range<usize>),
    /// A part of a command's data.
    Data(MemSlice),
}

/// A partially sent sequence.
#[derive(Debug)]
struct Sequence {
    order: DataOrder,
    sent: u32,
    data_sn: u32,
}

/// Source for PDUs: commands and their memory.
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

/// See the documentation of the module.
#[derive(Debug, Default)]
pub(in crate::engine) struct Outgoing {
    queue: VecDeque<Item>,
    /// Number of queued control PDUs by kind.
    controls: [usize; 3],
    /// Stream position before the last control PDU in the batch or sent, by kind.
    starts: [u64; 3],
    /// The sequence being sent.
    sequence: Option<Sequence>,
    digests: Digests,
    max_segment: u32,
    heads: Vec<u8>,
    chunks: Vec<Chunk>,
    len: usize,
    sent: usize,
    /// Bytes accepted by the socket, in all batches.
    position: u64,
    /// Stream position after the last item of a request, by request.
    ends: Vec<u64>,
    /// Number of items queued or in the batch, by request.
    pending: Vec<u16>,
    /// Requests with items that complete with the batch.
    ending: Vec<RequestId>,
    /// Sequences that complete with the batch.
    ended: Vec<DataOrder>,
    /// Sequences sent completely.
    done: Vec<DataOrder>,
}

impl Outgoing {
    /// Queues an item for sending; returns false if there are too many control PDUs.
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

    /// Returns whether some of a request's memory is queued for sending.
    pub(in crate::engine) fn is_pending(&self, request: RequestId) -> bool {
        self.pending.get(request.0 as usize).is_some_and(|n| *n > 0)
    }

    /// Returns whether an item of a request is queued for sending or lies beyond the first
    /// `acknowledged` bytes of the stream.
    pub(in crate::engine) fn is_under_way(&self, request: RequestId, acknowledged: u64) -> bool {
        let end = self.ends.get(request.0 as usize);
        self.is_pending(request) || end.is_some_and(|end| *end > acknowledged)
    }

    /// Returns whether the last control PDU of a kind is queued for sending, or has preceding bytes
    /// beyond the first `acknowledged` bytes of the stream. Its own bytes do not count.
    pub(in crate::engine) fn is_behind(&self, kind: ControlKind, acknowledged: u64) -> bool {
        self.controls[kind as usize] > 0 || self.starts[kind as usize] > acknowledged
    }

    /// Returns a sequence that was sent completely.
    pub(in crate::engine) fn poll_done(&mut self) -> Option<DataOrder> {
        self.done.pop()
    }

    /// Returns whether there is anything to send.
    pub(super) fn has_work(&self) -> bool {
        self.sent < self.len || self.sequence.is_some() || !self.queue.is_empty()
    }

    pub(super) fn heads(&self) -> &[u8] {
        &self.heads
    }

    pub(super) fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Returns the number of bytes sent from the batch.
    pub(super) fn sent(&self) -> usize {
        self.sent
    }

    /// Returns the number of bytes sent since the connection was established.
    pub(super) fn position(&self) -> u64 {
        self.position
    }

    /// Called when `len` more bytes were sent.
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

    /// Creates a batch if the previous one was sent; returns whether there is anything to send.
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
                    // Apply these only now, because items queued before still belong to the login.
                    (self.digests, self.max_segment) = (digests, max_segment);
                }
                Some(Item::Control(pdu)) => {
                    let kind = pdu.kind() as usize;
                    self.controls[kind] -= 1;
                    // All bytes before this batch were sent.
                    self.starts[kind] = self.position + self.len as u64;
                    let start = self.heads.len();
                    frame::put_pdu(pdu.bhs, &[], &pdu.data, self.digests, &mut self.heads);
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

    /// Adds the next PDU of the sequence.
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

    /// Adds a data segment with its padding and digest.
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

    /// Appends a chunk for the bytes in the heads from `start`.
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
    fn ping_flood_does_not_exhaust_memory() {
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
    fn ping_only_waits_for_preceding_data() {
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
        // Another batch: items after the ping do not count.
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
