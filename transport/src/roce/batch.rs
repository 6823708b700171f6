//! Packets on their way out, gathered for as few system calls as possible.
//!
//! The device appends packets; consecutive packets to one queue pair that have one length (the last
//! may be shorter) form a [`Group`], which the socket sends with one segmented send. Packets to
//! different queue pairs of one address stay apart, because the peer may steer each to another worker
//! and sees only a train's first packet when it does. For the same reason datagrams to queue pair 1,
//! which all workers share, go alone. A packet's
//! place in its group is the IPv4 identification that the kernel will give it, so the ICRC can only
//! be made once the place is known: [`TxBatch::begin`] answers it.
//!
//! Payload is referred to, never copied: a piece of memory keeps its mapping alive until the batch
//! is cleared. Headers, padding and ICRCs lie in one buffer whose neighbours are merged, so that a
//! packet of one segment costs two vectors.
//!
//! Bounds: [`MAX_GROUP_SEGMENTS`] packets, [`MAX_GROUP_BYTES`] bytes and [`MAX_GROUP_PIECES`] pieces
//! in a group; the device stops appending at the number of groups and bytes that it was asked for.

use std::net::SocketAddr;
use std::ops::Range;

use riser_memory::MemSlice;

use crate::wire::Qpn;

/// Most packets of a group: Linux's `UDP_MAX_SEGMENTS` of the kernels before 6.2.
pub const MAX_GROUP_SEGMENTS: usize = 64;

/// Most bytes of a group: the longest UDP payload over IPv4.
pub const MAX_GROUP_BYTES: usize = 65_507;

/// Most pieces of a group: `UIO_MAXIOV`, less what the largest packet can add.
pub const MAX_GROUP_PIECES: usize = 1024 - 80;

/// A piece of a packet.
#[derive(Clone, Debug)]
pub enum Piece {
    /// A range of the batch's own bytes.
    Bytes(Range<usize>),
    /// Registered memory.
    Memory(MemSlice),
}

/// Packets that one segmented send takes.
#[derive(Clone, Debug)]
pub struct Group {
    /// Where they go.
    pub dst: SocketAddr,
    /// The queue pair there.
    pub qpn: Qpn,
    /// Their pieces in the batch's list.
    pub pieces: Range<usize>,
    /// Length of every packet but the last, which may be shorter, in bytes.
    pub segment: usize,
    /// Packets.
    pub count: usize,
    /// Bytes in all.
    pub bytes: usize,
    /// Whether a shorter packet closed it.
    closed: bool,
}

/// Packets on their way out.
#[derive(Debug, Default)]
pub struct TxBatch {
    bytes: Vec<u8>,
    pieces: Vec<Piece>,
    groups: Vec<Group>,
    max_segments: usize,
    total: usize,
    packets: usize,
}

impl TxBatch {
    /// An empty batch whose groups have at most `max_segments` packets; 1 without segmentation.
    #[must_use]
    pub fn new(max_segments: usize) -> Self {
        Self {
            bytes: Vec::with_capacity(16 << 10),
            pieces: Vec::with_capacity(1024),
            groups: Vec::with_capacity(64),
            max_segments: max_segments.clamp(1, MAX_GROUP_SEGMENTS),
            total: 0,
            packets: 0,
        }
    }

    /// Forgets everything, keeping the buffers.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.pieces.clear();
        self.groups.clear();
        self.total = 0;
        self.packets = 0;
    }

    /// Changes how many packets a group may have. Only for an empty batch.
    pub fn set_max_segments(&mut self, max_segments: usize) {
        debug_assert!(self.is_empty());
        self.max_segments = max_segments.clamp(1, MAX_GROUP_SEGMENTS);
    }

    /// Whether there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Packets in it.
    #[must_use]
    pub fn packets(&self) -> usize {
        self.packets
    }

    /// Bytes in it.
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

    /// Begins a packet of `len` bytes to queue pair `qpn` at `dst`. Answers its IPv4 identification.
    pub fn begin(&mut self, dst: SocketAddr, qpn: Qpn, len: usize) -> u16 {
        self.total += len;
        self.packets += 1;
        if let Some(g) = self.groups.last_mut() {
            let fits = g.dst == dst
                && g.qpn == qpn
                && qpn != Qpn::GSI
                && !g.closed
                && len <= g.segment
                && g.count < self.max_segments
                && g.bytes + len <= MAX_GROUP_BYTES
                && g.pieces.len() < MAX_GROUP_PIECES;
            if fits {
                g.closed = len < g.segment;
                g.count += 1;
                g.bytes += len;
                return (g.count - 1) as u16;
            }
        }
        let at = self.pieces.len();
        self.groups.push(Group {
            dst,
            qpn,
            pieces: at..at,
            segment: len,
            count: 1,
            bytes: len,
            closed: false,
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
        let end = self.bytes.len();
        let first = self.group().pieces.start;
        if self.pieces.len() > first
            && let Some(Piece::Bytes(last)) = self.pieces.last_mut()
            && last.end == start
        {
            last.end = end;
            return;
        }
        self.pieces.push(Piece::Bytes(start..end));
        self.group().pieces.end += 1;
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
        debug_assert_eq!(all.len(), group.bytes);
        all.chunks(group.segment).map(<[u8]>::to_vec).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use riser_memory::Memory;

    fn addr(n: u8) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, n], 4791))
    }

    fn packet(b: &mut TxBatch, dst: u8, len: usize) -> u16 {
        let id = b.begin(addr(dst), Qpn::new(2), len);
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
        b.begin(addr(1), Qpn::new(2), 8);
        b.begin(addr(1), Qpn::new(3), 8);
        assert_eq!(b.groups().len(), 2, "one for each queue pair");
        b.begin(addr(1), Qpn::GSI, 8);
        assert_eq!(b.begin(addr(1), Qpn::GSI, 8), 0);
        assert_eq!(b.groups().len(), 4, "each alone");
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
    fn tail_and_next_header_are_one_piece() {
        let m = Memory::new(4096).unwrap();
        m.write(0, b"abcdefgh");
        let mut b = TxBatch::new(64);
        for half in [0..4, 4..8] {
            b.begin(addr(1), Qpn::new(2), 8);
            b.push_bytes(&[1, 2]);
            b.push_memory(m.slice(half).unwrap());
            b.push_bytes(&[3, 4]);
        }
        assert_eq!(b.pieces(&b.groups()[0]).len(), 5);
        let packets = b.copy_packets(&b.groups()[0]);
        assert_eq!(packets[1], [1, 2, b'e', b'f', b'g', b'h', 3, 4]);
    }
}
