//! Outgoing packets, batched so that we need as few system calls as possible.
//!
//! The device appends packets to a batch. Consecutive packets to the same queue pair that share the
//! same length (the last may be shorter) form a [`Group`], which the socket sends using one
//! segmented send. Packets to different queue pairs at the same address must stay in separate
//! groups, since the peer may steer each queue pair to a different worker but only looks at the
//! first packet of a train. For the same reason, datagrams to queue pair 1, which is shared by all
//! workers, are sent individually. ECN-capable and non-ECN-capable packets are kept apart as well.
//! The kernel sets the IPv4 identification of a packet to its index in the group, so we can only
//! compute the ICRC once this index is known: [`TxBatch::begin`] returns it.
//!
//! Payload is referenced, not copied: each reference keeps the memory mapping alive until the batch
//! is cleared. Headers, padding, ICRCs and short payloads are stored in a single buffer, and
//! adjacent ranges are merged, so a packet with a single segment uses two vectors, and a group of
//! short packets uses one. The ICRC is computed over each packet as contiguous bytes.
//!
//! # Memory referenced by a batch
//!
//! A batch may only reference memory of requests that are not yet complete. A request can complete
//! whenever a packet is received or a verb is called, even if some of the packets are still in the
//! batch: the peer can acknowledge a packet before we send it, and a queue pair flushes the
//! requests when it is destroyed. The application could then reuse the buffer for data of a
//! different session. To prevent this, a batch never references any memory between two calls to
//! [`TxBatch::drain`]. If the socket is full, the payload of the remaining packets is copied into
//! the batch. If the socket has room, nothing is copied.
//!
//! Bounds: up to [`MAX_GROUP_SEGMENTS`] packets, [`MAX_GROUP_BYTES`] bytes and [`MAX_GROUP_PIECES`]
//! pieces per group, and up to [`MAX_UNSEGMENTED`] remembered destinations. The device stops
//! appending once it reaches the requested number of groups and bytes, which also limits the size
//! of the copy.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use riser_memory::MemSlice;

use crate::rc::TxPacket;
use crate::wire::{Bth, ICRC_LEN, IcrcFlow, MAX_DATAGRAM, Qpn};

/// Hop limit (or TTL) used for unicast packets, as required by
/// [`DriverConfig::on_link`](crate::roce::driver::DriverConfig::on_link) on the remote side.
pub const HOP_LIMIT: u8 = 255;

/// ECN codepoint of ECN-capable packets, and the mask for the ECN field in the type of service (RFC
/// 3168, section 5).
pub const ECT_0: u8 = 0b10;
pub(super) const ECN_MASK: u8 = 0b11;

/// Max number of packets per group: `UDP_MAX_SEGMENTS` in Linux before 6.2.
pub const MAX_GROUP_SEGMENTS: usize = 64;

/// Max number of bytes per group: the maximum UDP payload size over IPv4.
pub const MAX_GROUP_BYTES: usize = 65_507;

/// Max number of pieces per group: `UIO_MAXIOV` minus the number of pieces that the largest packet
/// can add.
pub const MAX_GROUP_PIECES: usize = 1024 - 80;

/// Max number of remembered destinations that don't support segmented sends. If the list is full,
/// we don't use segmented sends for any destination.
pub const MAX_UNSEGMENTED: usize = 64;

/// After a segmented send has failed, we send packets to this destination individually for this
/// long before we try again: routes and devices can change, but a failed attempt costs a
/// retransmission.
pub const SEGMENT_RETRY: Duration = Duration::from_secs(60);

/// Result of offering groups to a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offered {
    /// The socket accepted this number of groups (at least one), including groups dropped due to an
    /// error specific to them.
    Taken(usize),
    /// The first group was dropped because the route to its destination does not support
    /// segmentation.
    Unsegmentable,
    /// The socket buffer is full.
    Full,
}

/// Result of sending a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOutcome {
    /// All groups were sent, or dropped due to an error specific to them.
    Done,
    /// The socket is full. The remaining groups will be sent by the next call.
    Blocked,
}

/// Part of a packet.
#[derive(Clone, Debug)]
pub enum Piece {
    /// Range of the batch's internal buffer.
    Bytes(Range<usize>),
    /// Registered memory, referenced until it is sent.
    Memory(MemSlice),
}

/// Destination of a packet and how to send it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TxPath {
    /// Destination address.
    pub dst: SocketAddr,
    /// Source address, as an index into the GID table.
    pub from: u8,
    /// Type of service or traffic class for the IP header.
    pub tos: u8,
    /// Hop limit or TTL for the IP header.
    pub hop_limit: u8,
    /// The destination address may be spoofed or the peer may be dead, so the packet must be sent
    /// individually, using a dedicated socket.
    pub is_to_stranger: bool,
}

impl TxPath {
    /// Creates a `TxPath` to a known peer via the ordinary socket. The packet is not ECN-capable.
    #[must_use]
    pub const fn to(dst: SocketAddr) -> Self {
        Self {
            dst,
            from: 0,
            tos: 0,
            hop_limit: HOP_LIMIT,
            is_to_stranger: false,
        }
    }

    /// Returns the same `TxPath`, but marks the packet as ECN-capable (RFC 3168) if `is_markable` is
    /// set, because its receiver will report congestion to us.
    #[must_use]
    pub const fn markable(self, is_markable: bool) -> Self {
        let ecn = if is_markable { ECT_0 } else { 0 };
        Self {
            tos: self.tos & !ECN_MASK | ecn,
            ..self
        }
    }
}

/// Packets that are sent using a single segmented send.
#[derive(Clone, Debug)]
pub struct Group {
    /// Destination of the packets and how to send them.
    pub way: TxPath,
    /// Destination QP.
    pub qpn: Qpn,
    /// Range of the packets in the batch's list of pieces.
    pub pieces: Range<usize>,
    /// Size of each packet in bytes, except for the last, which may be shorter.
    pub segment: usize,
    /// Number of packets in the group.
    pub count: usize,
    /// Total size of all packets in bytes.
    pub bytes: usize,
    /// If set, we can't add more packets: the last packet was shorter, or the destination doesn't
    /// support segmentation.
    closed: bool,
}

/// Batch of outgoing packets.
#[derive(Debug)]
pub struct TxBatch {
    bytes: Vec<u8>,
    /// Scratch buffer used to compute the ICRC over a contiguous packet.
    whole: Box<[u8]>,
    pieces: Vec<Piece>,
    groups: Vec<Group>,
    /// Number of groups already accepted by the socket.
    taken: usize,
    max_segments: usize,
    /// Destinations that don't support segmented sends, with the time when we should try again.
    /// Oldest first.
    unsegmented: ArrayVec<(IpAddr, Instant), MAX_UNSEGMENTED>,
    total: usize,
    packets: usize,
}

impl TxBatch {
    /// Creates an empty batch with up to `max_segments` packets per group, or 1 to disable
    /// segmentation.
    #[must_use]
    pub fn new(max_segments: usize) -> Self {
        Self {
            bytes: Vec::with_capacity(16 << 10),
            whole: vec![0; MAX_DATAGRAM].into_boxed_slice(),
            pieces: Vec::with_capacity(1024),
            groups: Vec::with_capacity(64),
            taken: 0,
            max_segments: max_segments.clamp(1, MAX_GROUP_SEGMENTS),
            unsegmented: ArrayVec::new(),
            total: 0,
            packets: 0,
        }
    }

    /// Removes all packets, but keeps the buffers.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.pieces.clear();
        self.groups.clear();
        self.taken = 0;
        self.total = 0;
        self.packets = 0;
    }

    /// Offers the remaining groups to a socket, in order, until they are all sent or the socket is
    /// full. `send` is called with the batch and the remaining groups, of which there is at least
    /// one. When done, the batch is cleared. Otherwise it no longer references any memory.
    pub fn drain(
        &mut self,
        now: Instant,
        mut send: impl FnMut(&Self, &[Group]) -> Offered,
    ) -> SendOutcome {
        // Routes can change, so we should try again after a while.
        self.unsegmented.retain(|(_, until)| *until > now);
        while let Some(group) = self.groups.get(self.taken) {
            let dst = group.way.dst.ip();
            match send(self, &self.groups[self.taken..]) {
                // Keep the order if the socket is full.
                Offered::Taken(n) => self.taken += n,
                Offered::Unsegmentable => {
                    // The packets are lost. Their QPs will retransmit them, and we send them
                    // individually.
                    self.taken += 1;
                    self.stop_segmenting(dst, now + SEGMENT_RETRY);
                }
                Offered::Full => {
                    // When we return, the caller may complete requests, and we must not send their
                    // memory after that.
                    self.copy_payload();
                    return SendOutcome::Blocked;
                }
            }
        }
        self.clear();
        SendOutcome::Done
    }

    /// Copies the payload of the remaining packets into the batch's internal buffer.
    fn copy_payload(&mut self) {
        let Some(first) = self.groups.get(self.taken) else {
            return;
        };
        for piece in &mut self.pieces[first.pieces.start..] {
            if let Piece::Memory(slice) = piece {
                let start = self.bytes.len();
                self.bytes.resize(start + slice.len(), 0);
                slice.read(0, &mut self.bytes[start..]);
                *piece = Piece::Bytes(start..self.bytes.len());
            }
        }
    }

    fn stop_segmenting(&mut self, dst: IpAddr, until: Instant) {
        if !self.sends_singly(dst) {
            self.unsegmented.push((dst, until));
        }
    }

    /// Returns whether packets to `dst` must be sent individually.
    fn sends_singly(&self, dst: IpAddr) -> bool {
        self.unsegmented.is_full() || self.unsegmented.iter().any(|(ip, _)| *ip == dst)
    }

    /// Returns whether the batch is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Returns the number of packets in the batch.
    #[must_use]
    pub fn packets(&self) -> usize {
        self.packets
    }

    /// Returns the number of bytes in the batch.
    #[must_use]
    pub fn total_bytes(&self) -> usize {
        self.total
    }

    /// Returns the groups in the order in which they should be sent.
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Returns the pieces of a group.
    #[must_use]
    pub fn pieces(&self, group: &Group) -> &[Piece] {
        &self.pieces[group.pieces.clone()]
    }

    /// Returns a range of the batch's internal buffer.
    #[must_use]
    pub fn own(&self, range: &Range<usize>) -> &[u8] {
        &self.bytes[range.clone()]
    }

    /// Appends a packet and its ICRC, which is zero if `flow` is `None`. Consumes the segments of
    /// `tx`.
    pub(super) fn push_packet(&mut self, flow: Option<&IcrcFlow>, way: &TxPath, tx: &mut TxPacket) {
        let len = tx.len() + ICRC_LEN;
        // The ICRC covers the IPv4 identification, which is the index of the packet in its
        // segmented send, so we need to determine this index first.
        let id = self.begin(*way, destination(&tx.headers), len);
        let pad = &[0; 3][..tx.pad()];
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&tx.headers);
        let seal = |body: &mut [u8]| flow.map_or(0, |flow| flow.compute_in_place(body, id));
        let Some(last) = tx.segments.pop() else {
            self.bytes.extend_from_slice(&tx.inline);
            if !pad.is_empty() {
                self.bytes.extend_from_slice(pad);
            }
            let icrc = seal(&mut self.bytes[start..]);
            self.bytes.extend_from_slice(&icrc.to_le_bytes());
            self.name_bytes(start);
            return;
        };
        // We read the memory now to compute the ICRC, but the kernel copies the payload when it
        // sends the packet. If the application writes to the buffer in between, the peer will drop
        // the packet as corrupt and we will retransmit it. Applications must not modify a buffer
        // until its request is complete.
        let icrc = match flow {
            Some(_) => seal(gather(&mut self.whole, tx, &last)),
            None => 0,
        };
        self.name_bytes(start);
        if !tx.segments.is_empty() {
            for slice in tx.segments.drain(..) {
                self.push_memory(slice);
            }
        }
        self.push_memory(last);
        let start = self.bytes.len();
        self.bytes.extend_from_slice(pad);
        self.bytes.extend_from_slice(&icrc.to_le_bytes());
        self.name_bytes(start);
    }

    /// Starts a packet of `len` bytes to QP `qpn`. Returns its IPv4 identification.
    pub fn begin(&mut self, way: TxPath, qpn: Qpn, len: usize) -> u16 {
        self.total += len;
        self.packets += 1;
        if let Some(g) = self.groups.last_mut() {
            // All datagrams of a segmented send must have the same destination and, except for the
            // last, the same length.
            let fits = !g.closed
                // A longer packet needs a new group since the kernel splits the data into segments
                // of the same length.
                && len <= g.segment
                && g.qpn == qpn
                && qpn != Qpn::GSI
                && g.way == way
                && g.count < self.max_segments
                && g.bytes + len <= MAX_GROUP_BYTES
                && g.pieces.len() < MAX_GROUP_PIECES;
            if fits {
                // A short segment must be the last.
                g.closed = len < g.segment;
                g.count += 1;
                g.bytes += len;
                return (g.count - 1) as u16;
            }
        }
        let at = self.pieces.len();
        self.groups.push(Group {
            way,
            qpn,
            pieces: at..at,
            segment: len,
            count: 1,
            bytes: len,
            closed: way.is_to_stranger || self.sends_singly(way.dst.ip()),
        });
        0
    }

    fn group(&mut self) -> &mut Group {
        self.groups.last_mut().expect("a packet was begun")
    }

    /// Appends bytes to the packet, copying them into the internal buffer.
    pub fn push_bytes(&mut self, data: &[u8]) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(data);
        self.name_bytes(start);
    }

    /// Adds the internal buffer, starting at `start`, as a piece of the current packet.
    fn name_bytes(&mut self, start: usize) {
        let end = self.bytes.len();
        let group = self.groups.last_mut().expect("a packet was begun");
        // Adjacent bytes of the same group are merged into a single vector. This must not extend
        // the last piece of the previous group, which is a different message.
        if self.pieces.len() > group.pieces.start
            && let Some(Piece::Bytes(last)) = self.pieces.last_mut()
            && last.end == start
        {
            last.end = end;
            return;
        }
        self.pieces.push(Piece::Bytes(start..end));
        group.pieces.end += 1;
    }

    /// Appends registered memory to the packet.
    pub fn push_memory(&mut self, slice: MemSlice) {
        if slice.is_empty() {
            return;
        }
        self.pieces.push(Piece::Memory(slice));
        self.group().pieces.end += 1;
    }

    /// Returns the packets of a group as contiguous bytes, for captures and tests.
    #[must_use]
    pub fn copy_packets(&self, group: &Group) -> Vec<Vec<u8>> {
        let mut all = Vec::with_capacity(group.bytes);
        self.copy_group(group, &mut all);
        all.chunks(group.segment).map(<[u8]>::to_vec).collect()
    }

    /// Appends all packets of a group to `all`.
    pub(super) fn copy_group(&self, group: &Group, all: &mut Vec<u8>) {
        let before = all.len();
        for piece in self.pieces(group) {
            match piece {
                Piece::Bytes(r) => all.extend_from_slice(self.own(r)),
                Piece::Memory(m) => {
                    let at = all.len();
                    all.resize(at + m.len(), 0);
                    m.read(0, &mut all[at..]);
                }
            }
        }
        debug_assert_eq!(all.len() - before, group.bytes);
    }
}

/// Copies a packet with `last` as its last segment to the start of `whole`, excluding its ICRC.
fn gather<'a>(whole: &'a mut [u8], tx: &TxPacket, last: &MemSlice) -> &'a mut [u8] {
    debug_assert!(tx.inline.is_empty(), "copied or referred to");
    let mut at = tx.headers.len();
    whole[..at].copy_from_slice(&tx.headers);
    for slice in tx.segments.iter().chain([last]) {
        slice.read(0, &mut whole[at..at + slice.len()]);
        at += slice.len();
    }
    let end = at + tx.pad();
    whole[at..end].fill(0);
    &mut whole[..end]
}

/// Returns the destination QP number from a header.
pub(super) fn destination(headers: &[u8]) -> Qpn {
    debug_assert!(headers.len() >= Bth::LEN);
    Qpn::new(u32::from_be_bytes([0, headers[5], headers[6], headers[7]]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use riser_memory::Memory;

    fn way(n: u8) -> TxPath {
        TxPath::to(SocketAddr::from(([127, 0, 0, n], 4791)))
    }

    fn packet(b: &mut TxBatch, dst: u8, len: usize) -> u16 {
        let id = b.begin(way(dst), Qpn::new(2), len);
        b.push_bytes(&vec![id as u8; len]);
        id
    }

    #[test]
    fn short_packet_closes_its_group() {
        let mut b = TxBatch::new(64);
        let ids: Vec<u16> = [(1, 8), (1, 8), (1, 4), (1, 4), (1, 8), (2, 8)]
            .into_iter()
            .map(|(dst, len)| packet(&mut b, dst, len))
            .collect();
        assert_eq!(ids, [0, 1, 2, 0, 0, 0]);
        let shape: Vec<_> = b
            .groups()
            .iter()
            .map(|g| (g.count, g.segment, g.bytes))
            .collect();
        assert_eq!(shape, [(3, 8, 20), (1, 4, 4), (1, 8, 8), (1, 8, 8)]);
        let packets = b.copy_packets(&b.groups()[0]);
        assert_eq!(packets, [vec![0; 8], vec![1; 8], vec![2; 4]]);
        assert_eq!((b.packets(), b.total_bytes()), (6, 40));
        b.clear();
        assert!(b.is_empty());
        b.begin(way(1), Qpn::new(2), 8);
        b.begin(way(1), Qpn::new(3), 8);
        assert_eq!(b.groups().len(), 2, "one for each queue pair");
        b.begin(way(1), Qpn::GSI, 8);
        assert_eq!(b.begin(way(1), Qpn::GSI, 8), 0);
        assert_eq!(b.groups().len(), 4, "each alone");
        let markable = way(1).markable(true);
        b.begin(markable, Qpn::new(3), 8);
        assert_eq!(b.begin(markable, Qpn::new(3), 8), 1);
        assert_eq!(b.begin(way(1), Qpn::new(3), 8), 0, "marked or not");
        let stranger = TxPath {
            is_to_stranger: true,
            ..way(1)
        };
        b.begin(stranger, Qpn::new(3), 8);
        assert_eq!(b.begin(stranger, Qpn::new(3), 8), 0, "each alone");
    }

    #[test]
    fn group_size_is_bounded() {
        let mut b = TxBatch::new(64);
        for n in 0..65 {
            assert_eq!(packet(&mut b, 1, 16), n % 64);
        }
        let mut b = TxBatch::new(64);
        for n in 0..16 {
            assert_eq!(packet(&mut b, 1, 4112), n % 15);
        }
        let mut b = TxBatch::new(1);
        assert_eq!(packet(&mut b, 1, 16), 0);
        assert_eq!(packet(&mut b, 1, 16), 0);
    }

    #[test]
    fn icrc_covers_copied_and_referenced_payload() {
        let (src, dst) = (way(1).dst, way(2).dst);
        let flow = IcrcFlow::new(src, dst).unwrap();
        let m = Memory::new(4096).unwrap();
        let payload: Vec<u8> = (0..301u16).map(|n| n as u8).collect();
        m.write(7, &payload);
        let cuts: [&[usize]; 3] = [&[7, 308], &[7, 8, 308], &[7, 100, 200, 308]];
        let mut b = TxBatch::new(64);
        let mut packet = |cuts: Option<&[usize]>| {
            let mut tx = TxPacket {
                payload_len: payload.len(),
                ..TxPacket::default()
            };
            let bth = [4, 0x70, 0xff, 0xff, 0, 0, 0, 2, 0, 0, 0, 9];
            tx.headers.try_extend_from_slice(&bth).unwrap();
            match cuts {
                Some(cuts) => {
                    let slices = cuts.windows(2).map(|w| m.slice(w[0]..w[1]).unwrap());
                    tx.segments.extend(slices);
                }
                None => tx.inline.extend_from_slice(&payload),
            }
            b.push_packet(Some(&flow), &way(2), &mut tx);
        };
        packet(None);
        packet(None);
        for cuts in cuts {
            packet(Some(cuts));
        }
        assert_eq!(b.groups().len(), 1);
        let packets = b.copy_packets(&b.groups()[0]);
        for (id, packet) in packets.iter().enumerate() {
            assert_eq!(packet[12..12 + 301], payload);
            assert_eq!(flow.check_exact(packet, id as u16), Ok(()));
        }
        // Packets with copied payload are merged with the header of the next packet.
        assert_eq!(b.pieces(&b.groups()[0]).len(), 1 + (1 + 2 + 3) + 3);
    }

    #[test]
    fn tail_is_merged_with_next_header() {
        let m = Memory::new(4096).unwrap();
        m.write(0, b"abcdefgh");
        let mut b = TxBatch::new(64);
        for half in [0..4, 4..8] {
            b.begin(way(1), Qpn::new(2), 8);
            b.push_bytes(&[1, 2]);
            b.push_memory(m.slice(half).unwrap());
            b.push_bytes(&[3, 4]);
        }
        assert_eq!(b.pieces(&b.groups()[0]).len(), 5);
        let packets = b.copy_packets(&b.groups()[0]);
        assert_eq!(packets[1], [1, 2, b'e', b'f', b'g', b'h', 3, 4]);
    }

    #[test]
    fn full_socket_does_not_change_queued_packets() {
        let now = Instant::now();
        let m = Memory::new(4096).unwrap();
        m.fill(0, 4096, b'A');
        let mut b = TxBatch::new(64);
        for dst in 1..=3 {
            b.begin(way(dst), Qpn::new(2), 9);
            b.push_bytes(&[dst]);
            b.push_memory(m.slice(0..8).unwrap());
        }
        let is_whole = |b: &TxBatch, g: &Group| b.copy_packets(g)[0][1..] == [b'A'; 8];
        let mut room = 1;
        let outcome = b.drain(now, |b, groups| {
            if room == 0 {
                return Offered::Full;
            }
            room -= 1;
            assert!(is_whole(b, &groups[0]));
            Offered::Taken(1)
        });
        assert_eq!(outcome, SendOutcome::Blocked);
        m.fill(0, 4096, b'S');
        let mut sent = 0;
        let outcome = b.drain(now, |b, groups| {
            assert!(groups.iter().all(|g| is_whole(b, g)));
            sent += groups.len();
            Offered::Taken(groups.len())
        });
        assert_eq!((outcome, sent), (SendOutcome::Done, 2));
        assert!(b.is_empty());
    }

    /// Returns the number of groups used for two packets to `dst`.
    fn groups_of_two(b: &mut TxBatch, dst: u8, now: Instant) -> usize {
        packet(b, dst, 8);
        packet(b, dst, 8);
        let groups = b.groups().len();
        b.drain(now, |_, groups| Offered::Taken(groups.len()));
        groups
    }

    #[test]
    fn unsegmentable_destination_gets_single_packets() {
        let mut now = Instant::now();
        let mut b = TxBatch::new(64);
        packet(&mut b, 1, 8);
        packet(&mut b, 1, 8);
        b.drain(now, |_, _| Offered::Unsegmentable);
        assert_eq!(groups_of_two(&mut b, 1, now), 2);
        assert_eq!(groups_of_two(&mut b, 2, now), 1, "another destination");
        now += SEGMENT_RETRY;
        groups_of_two(&mut b, 2, now);
        assert_eq!(groups_of_two(&mut b, 1, now), 1, "another attempt");
    }

    #[test]
    fn unsegmentable_destinations_are_bounded() {
        let now = Instant::now();
        let mut b = TxBatch::new(64);
        for dst in 1..=200 {
            packet(&mut b, dst, 8);
            b.drain(now, |_, _| Offered::Unsegmentable);
        }
        assert_eq!(b.unsegmented.len(), MAX_UNSEGMENTED);
        assert_eq!(groups_of_two(&mut b, 201, now), 2, "nothing is segmented");
        groups_of_two(&mut b, 201, now + SEGMENT_RETRY);
        assert_eq!(groups_of_two(&mut b, 201, now + SEGMENT_RETRY), 1);
    }
}
