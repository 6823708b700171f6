//! Packets on their way out, gathered for as few system calls as possible.
//!
//! The device appends packets; consecutive packets to one queue pair that have one length (the last
//! may be shorter) form a [`Group`], which the socket sends with one segmented send. Packets to
//! different queue pairs of one address stay apart, because the peer may steer each to another
//! worker and sees only a train's first packet when it does. For the same reason datagrams to queue
//! pair 1, which all workers share, go alone; packets that may be marked for congestion and those
//! that may not stay apart. A packet's place in its group is the IPv4 identification that the
//! kernel will give it, so the ICRC can only be made once the place is known: [`TxBatch::begin`]
//! returns it.
//!
//! Payload is referred to, not copied: a piece of memory keeps its mapping alive until the batch
//! is cleared. Headers, padding, ICRCs and short payload lie in one buffer whose neighbours are
//! merged, so that a packet of one segment costs two vectors, and a group of short ones costs one.
//! The ICRC is computed over each packet in one piece.
//!
//! # Whose memory a batch refers to
//!
//! That of requests that are not complete. A request may complete as soon as a packet is received
//! or a verb is called, even with packets of it still in the batch: a peer can acknowledge a packet
//! before it is sent, and a queue pair that ends flushes its requests. Its owner may then fill the
//! buffer with another session's data. So between two calls of [`TxBatch::drain`] a batch refers to
//! no memory at all: where the socket is full, the payload of what is left is copied into the
//! batch. A socket with room costs no copy.
//!
//! Bounds: [`MAX_GROUP_SEGMENTS`] packets, [`MAX_GROUP_BYTES`] bytes and [`MAX_GROUP_PIECES`]
//! pieces in a group; [`MAX_UNSEGMENTED`] destinations remembered; the device stops appending at
//! the number of groups and bytes that it was asked for, which also bounds the copy.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use riser_memory::MemSlice;

use crate::rc::TxPacket;
use crate::wire::{Bth, ICRC_LEN, IcrcFlow, MAX_DATAGRAM, Qpn};

/// Hop limit, or TTL, of what we send to single hosts: as
/// [`DriverConfig::on_link`](super::driver::DriverConfig::on_link) demands at the other end.
pub const HOP_LIMIT: u8 = 255;

/// ECN codepoint of packets that may be marked, and where it is in the type of service (RFC 3168,
/// section 5).
pub const ECT_0: u8 = 0b10;
pub(super) const ECN_MASK: u8 = 0b11;

/// Most packets of a group: Linux's `UDP_MAX_SEGMENTS` of the kernels before 6.2.
pub const MAX_GROUP_SEGMENTS: usize = 64;

/// Most bytes of a group: the longest UDP payload over IPv4.
pub const MAX_GROUP_BYTES: usize = 65_507;

/// Most pieces of a group: `UIO_MAXIOV`, less what the largest packet can add.
pub const MAX_GROUP_PIECES: usize = 1024 - 80;

/// Most destinations that are remembered as unable to take segmented sends. While there are that
/// many, no destination gets any.
pub const MAX_UNSEGMENTED: usize = 64;

/// Time for which a destination whose segmented send failed gets its packets one by one, before
/// another attempt: routes and devices change, and a failed attempt costs a retransmission.
pub const SEGMENT_RETRY: Duration = Duration::from_secs(60);

/// Result of offering groups to a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offered {
    /// It took this many, or dropped them for an error of their own. At least one.
    Taken(usize),
    /// It dropped the first, because the route to its destination cannot segment.
    Unsegmentable,
    /// The batch has no room for it.
    Full,
}

/// Result of sending a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOutcome {
    /// Everything was sent, or dropped for an error of its own.
    Done,
    /// The socket is full; the rest stays for the next call.
    Blocked,
}

/// A piece of a packet.
#[derive(Clone, Debug)]
pub enum Piece {
    /// A range of the batch's own bytes.
    Bytes(Range<usize>),
    /// Registered memory, referred to until it is sent.
    Memory(MemSlice),
}

/// Destination of a packet, and how it is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// Address of the destination.
    pub dst: SocketAddr,
    /// Address of the device's that it leaves from, by its index in the GID table.
    pub from: u8,
    /// Type of service, or traffic class, of the IP header.
    pub tos: u8,
    /// Hop limit, or time to live, of the IP header.
    pub hop_limit: u8,
    /// It goes to an address that may be made up, or to a peer that may be gone, and so by a
    /// socket of its own, and alone.
    pub is_to_stranger: bool,
}

impl Way {
    /// By the ordinary socket to a peer that is known, not to be marked.
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

    /// The same, where routers may mark the packet for congestion (RFC 3168) if `is_markable`,
    /// since its receiver passes that on.
    #[must_use]
    pub const fn markable(self, is_markable: bool) -> Self {
        let ecn = if is_markable { ECT_0 } else { 0 };
        Self {
            tos: self.tos & !ECN_MASK | ecn,
            ..self
        }
    }
}

/// Packets that one segmented send takes.
#[derive(Clone, Debug)]
pub struct Group {
    /// Their destination, and how they are sent.
    pub way: Way,
    /// The queue pair there.
    pub qpn: Qpn,
    /// Their pieces in the batch's list.
    pub pieces: Range<usize>,
    /// Length of every packet but the last, which may be shorter, in bytes.
    pub segment: usize,
    /// Number of packets in the group.
    pub count: usize,
    /// Number of bytes in all packets.
    pub bytes: usize,
    /// It takes no other packet: a shorter one ended it, or its destination gets single ones.
    closed: bool,
}

/// Packets on their way out.
#[derive(Debug)]
pub struct TxBatch {
    bytes: Vec<u8>,
    /// A packet in one piece, to compute its ICRC.
    whole: Box<[u8]>,
    pieces: Vec<Piece>,
    groups: Vec<Group>,
    /// Groups that the socket has taken.
    taken: usize,
    max_segments: usize,
    /// Destinations that cannot take segmented sends, and until when this is assumed; oldest first.
    unsegmented: ArrayVec<(IpAddr, Instant), MAX_UNSEGMENTED>,
    total: usize,
    packets: usize,
}

impl TxBatch {
    /// An empty batch whose groups have at most `max_segments` packets; 1 without segmentation.
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

    /// Forgets all packets, keeping the buffers.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.pieces.clear();
        self.groups.clear();
        self.taken = 0;
        self.total = 0;
        self.packets = 0;
    }

    /// Offers the groups that are left to a socket, in order, until it has all of them or is full.
    /// `send` gets the batch and the groups that are left, at least one. A batch that is done is
    /// cleared; one that is not refers to no memory any longer.
    pub fn drain(
        &mut self,
        now: Instant,
        mut send: impl FnMut(&Self, &[Group]) -> Offered,
    ) -> SendOutcome {
        // Routes change, so a destination has another attempt after a while.
        self.unsegmented.retain(|(_, until)| *until > now);
        while let Some(group) = self.groups.get(self.taken) {
            let dst = group.way.dst.ip();
            match send(self, &self.groups[self.taken..]) {
                // In order, so that a full socket keeps the rest in their order.
                Offered::Taken(n) => self.taken += n,
                Offered::Unsegmentable => {
                    // Its packets are lost; their queue pairs repeat them, one by one from now
                    // on.
                    self.taken += 1;
                    self.stop_segmenting(dst, now + SEGMENT_RETRY);
                }
                Offered::Full => {
                    // From here on the caller may complete requests, whose memory must not be
                    // sent any more.
                    self.copy_payload();
                    return SendOutcome::Blocked;
                }
            }
        }
        self.clear();
        SendOutcome::Done
    }

    /// Copies the payload of what is left into the batch's own bytes.
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

    /// Returns whether packets to `dst` go one by one.
    fn sends_singly(&self, dst: IpAddr) -> bool {
        self.unsegmented.is_full() || self.unsegmented.iter().any(|(ip, _)| *ip == dst)
    }

    /// Whether there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Number of packets in the batch.
    #[must_use]
    pub fn packets(&self) -> usize {
        self.packets
    }

    /// Number of bytes in the batch.
    #[must_use]
    pub fn total_bytes(&self) -> usize {
        self.total
    }

    /// The groups, in the order to send them.
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// The pieces of a group.
    #[must_use]
    pub fn pieces(&self, group: &Group) -> &[Piece] {
        &self.pieces[group.pieces.clone()]
    }

    /// The batch's own bytes that a piece names.
    #[must_use]
    pub fn own(&self, range: &Range<usize>) -> &[u8] {
        &self.bytes[range.clone()]
    }

    /// Appends a packet with its ICRC; without a flow the ICRC is zero. Takes the segments of `tx`.
    pub(super) fn push_packet(&mut self, flow: Option<&IcrcFlow>, way: &Way, tx: &mut TxPacket) {
        let len = tx.len() + ICRC_LEN;
        // The ICRC covers the IPv4 identification, which is the packet's place in its segmented
        // send. Hence the place first.
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
        // The ICRC is taken from memory now, and the kernel copies the payload when it sends. If
        // the owner writes in between, the peer drops the packet as corrupt and it is sent again:
        // owners must leave the memory of a request alone until it completes.
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

    /// Begins a packet of `len` bytes to queue pair `qpn`. Returns its IPv4 identification.
    pub fn begin(&mut self, way: Way, qpn: Qpn, len: usize) -> u16 {
        self.total += len;
        self.packets += 1;
        if let Some(g) = self.groups.last_mut() {
            // Datagrams of one segmented send have one destination and one length, but for the
            // last.
            let fits = !g.closed
                // A longer packet begins another group: the kernel cuts all segments to one
                // length.
                && len <= g.segment
                && g.qpn == qpn
                && qpn != Qpn::GSI
                && g.way == way
                && g.count < self.max_segments
                && g.bytes + len <= MAX_GROUP_BYTES
                && g.pieces.len() < MAX_GROUP_PIECES;
            if fits {
                // A short segment can only be the last.
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

    /// Appends bytes of the device's own to the packet.
    pub fn push_bytes(&mut self, data: &[u8]) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(data);
        self.name_bytes(start);
    }

    /// Makes the batch's own bytes from `start` on a piece of the packet.
    fn name_bytes(&mut self, start: usize) {
        let end = self.bytes.len();
        let group = self.groups.last_mut().expect("a packet was begun");
        // Bytes that follow on bytes of the same group are one vector. Those of the group before
        // must not grow into this one, which is another message.
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

    /// The packets of a group, each in one piece, for captures and tests.
    #[must_use]
    pub fn copy_packets(&self, group: &Group) -> Vec<Vec<u8>> {
        let mut all = Vec::with_capacity(group.bytes);
        self.copy_group(group, &mut all);
        all.chunks(group.segment).map(<[u8]>::to_vec).collect()
    }

    /// Appends the packets of a group to `all`, one after the other.
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

/// Copies a packet whose last segment is `last` to the beginning of `whole`, without its ICRC.
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

/// The destination queue pair that a header names.
pub(super) fn destination(headers: &[u8]) -> Qpn {
    debug_assert!(headers.len() >= Bth::LEN);
    Qpn::new(u32::from_be_bytes([0, headers[5], headers[6], headers[7]]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use riser_memory::Memory;

    fn way(n: u8) -> Way {
        Way::to(SocketAddr::from(([127, 0, 0, n], 4791)))
    }

    fn packet(b: &mut TxBatch, dst: u8, len: usize) -> u16 {
        let id = b.begin(way(dst), Qpn::new(2), len);
        b.push_bytes(&vec![id as u8; len]);
        id
    }

    #[test]
    fn equal_packets_to_one_address_are_one_group_and_a_short_one_ends_it() {
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
        let stranger = Way {
            is_to_stranger: true,
            ..way(1)
        };
        b.begin(stranger, Qpn::new(3), 8);
        assert_eq!(b.begin(stranger, Qpn::new(3), 8), 0, "each alone");
    }

    #[test]
    fn groups_are_bounded_by_count_and_by_bytes() {
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
    fn packets_are_sealed_whole_whether_their_payload_is_copied_or_referred_to() {
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
        // Those with copied payload are one piece with the header that follows.
        assert_eq!(b.pieces(&b.groups()[0]).len(), 1 + (1 + 2 + 3) + 3);
    }

    #[test]
    fn tail_and_next_header_are_one_piece() {
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
    fn what_a_full_socket_leaves_is_sent_as_it_was_when_it_was_made() {
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

    /// Number of groups that two packets to `dst` make.
    fn groups_of_two(b: &mut TxBatch, dst: u8, now: Instant) -> usize {
        packet(b, dst, 8);
        packet(b, dst, 8);
        let groups = b.groups().len();
        b.drain(now, |_, groups| Offered::Taken(groups.len()));
        groups
    }

    #[test]
    fn a_destination_that_cannot_segment_gets_single_packets_for_a_while() {
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
    fn many_destinations_that_cannot_segment_take_bounded_memory() {
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
