//! What rsockets send each other, as rdma-core's do: connection data, immediate data, segments.
//!
//! There is no specification but rdma-core's `docs/rsocket`. Connection data are in network byte
//! order. What one end writes into a list of the other end is in the byte order of the end that
//! reads it, which is in the connection data.

/// Version of the protocol.
const VERSION: u8 = 1;

/// Flag of connection data: the sender is big-endian.
const FLAG_BIG_ENDIAN: u8 = 1;

/// Flag of connection data: the sender has a list of iomaps behind its target list.
const FLAG_IOMAP: u8 = 2;

/// Length of connection data in bytes.
pub(super) const CONN_DATA_LEN: usize = 40;

/// Length of a segment of a target list in bytes.
pub(super) const SEGMENT_LEN: usize = 16;

/// Length of an entry of a list of iomaps in bytes.
pub(super) const IOMAP_LEN: usize = 24;

/// Most bytes of a data message: 29 bits count them.
pub(super) const MAX_DATA: u32 = (1 << 29) - 1;

/// Memory of an end that the other end writes to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Segment {
    /// Address at the end that has it.
    pub(super) addr: u64,
    /// Its remote key.
    pub(super) key: u32,
    /// Bytes, or for a target list entries.
    pub(super) length: u32,
}

impl Segment {
    fn to_network(self) -> [u8; SEGMENT_LEN] {
        let mut bytes = [0; SEGMENT_LEN];
        bytes[..8].copy_from_slice(&self.addr.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.key.to_be_bytes());
        bytes[12..].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }

    fn from_network(bytes: &[u8; SEGMENT_LEN]) -> Self {
        Self {
            addr: u64::from_be_bytes(part(bytes, 0)),
            key: u32::from_be_bytes(part(bytes, 8)),
            length: u32::from_be_bytes(part(bytes, 12)),
        }
    }

    /// An entry of a list, for an end of the given byte order.
    pub(super) fn to_entry(self, is_big_endian: bool) -> [u8; SEGMENT_LEN] {
        if is_big_endian {
            return self.to_network();
        }
        let mut bytes = [0; SEGMENT_LEN];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.key.to_le_bytes());
        bytes[12..].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    /// An entry of our own list, which the other end has written in our byte order.
    pub(super) fn from_entry(bytes: &[u8; SEGMENT_LEN]) -> Self {
        Self {
            addr: u64::from_ne_bytes(part(bytes, 0)),
            key: u32::from_ne_bytes(part(bytes, 8)),
            length: u32::from_ne_bytes(part(bytes, 12)),
        }
    }
}

/// Memory that the program of an end maps at an offset, for the other end to write to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Iomap {
    /// Offset that the programs name it by.
    pub(super) offset: u64,
    /// The memory.
    pub(super) segment: Segment,
}

impl Iomap {
    /// An entry of a list, for an end of the given byte order.
    pub(super) fn to_entry(self, is_big_endian: bool) -> [u8; IOMAP_LEN] {
        let mut bytes = [0; IOMAP_LEN];
        let offset = match is_big_endian {
            true => self.offset.to_be_bytes(),
            false => self.offset.to_le_bytes(),
        };
        bytes[..8].copy_from_slice(&offset);
        bytes[8..].copy_from_slice(&self.segment.to_entry(is_big_endian));
        bytes
    }

    /// An entry of our own list.
    pub(super) fn from_entry(bytes: &[u8; IOMAP_LEN]) -> Self {
        Self {
            offset: u64::from_ne_bytes(part(bytes, 0)),
            segment: Segment::from_entry(&part(bytes, 8)),
        }
    }
}

/// `N` bytes of a longer array, from an index on.
fn part<const N: usize, const M: usize>(bytes: &[u8; M], at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&bytes[at..at + N]);
    part
}

/// Private data of a connection request and of its reply.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ConnData {
    /// The sender is big-endian.
    pub(super) is_big_endian: bool,
    /// Messages that the sender has receives for.
    pub(super) credits: u16,
    /// Entries of the list of iomaps, which is behind the target list.
    pub(super) iomaps: u16,
    /// The target list: its address, key and number of entries.
    pub(super) targets: Segment,
    /// The first segment for data.
    pub(super) data: Segment,
}

impl ConnData {
    /// The bytes that are sent.
    pub(super) fn encode(&self) -> [u8; CONN_DATA_LEN] {
        let mut bytes = [0; CONN_DATA_LEN];
        bytes[0] = VERSION;
        bytes[1] = FLAG_IOMAP;
        if self.is_big_endian {
            bytes[1] |= FLAG_BIG_ENDIAN;
        }
        bytes[2..4].copy_from_slice(&self.credits.to_be_bytes());
        bytes[7] = iomap_code(self.iomaps);
        bytes[8..24].copy_from_slice(&self.targets.to_network());
        bytes[24..].copy_from_slice(&self.data.to_network());
        bytes
    }

    /// What a peer has sent. Private data are padded, so there may be more bytes. `None` for
    /// another version, too few bytes or a list without an entry.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; CONN_DATA_LEN] = bytes.first_chunk()?;
        let targets = Segment::from_network(&part(bytes, 8));
        if bytes[0] != VERSION || targets.length == 0 {
            return None;
        }
        let has_iomaps = bytes[1] & FLAG_IOMAP != 0;
        Some(Self {
            is_big_endian: bytes[1] & FLAG_BIG_ENDIAN != 0,
            credits: u16::from_be_bytes(part(bytes, 2)),
            iomaps: if has_iomaps { iomap_count(bytes[7]) } else { 0 },
            targets,
            data: Segment::from_network(&part(bytes, 24)),
        })
    }
}

/// Code of a number of iomaps: itself up to 128, and beyond that a multiple of 256.
fn iomap_code(count: u16) -> u8 {
    match count {
        0..=0x80 => count as u8,
        _ => 0x80 | (count >> 8) as u8,
    }
}

fn iomap_count(code: u8) -> u16 {
    match code {
        0..=0x80 => code.into(),
        _ => u16::from(code & 0x7f) << 8,
    }
}

/// The number of iomaps that a list has where the program asks for `count`: one that has a code.
pub(super) fn supported_iomaps(count: u32) -> u16 {
    iomap_count(iomap_code(
        u16::try_from(count).unwrap_or(0x7fff).min(0x7fff),
    ))
}

/// Immediate data of an RDMA write.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Message {
    /// So many bytes are in the current segment.
    Data(u32),
    /// Messages that may be sent, counted from the connection on; and an entry of the target list
    /// may have been written.
    Credits(u16),
    /// An entry of the list of iomaps has been written.
    Iomap(u16),
    /// The sender neither sends nor receives from now on.
    Disconnect,
    /// The sender is alive.
    KeepAlive,
    /// The sender sends no more.
    Shutdown,
    /// A kind that is reserved.
    Reserved,
}

impl Message {
    /// The immediate data.
    pub(super) fn encode(self) -> u32 {
        let (kind, value) = match self {
            Self::Data(length) => (0, length),
            Self::Credits(limit) => (4, limit.into()),
            Self::Iomap(index) => (6, index.into()),
            Self::Disconnect => (7, 0),
            Self::KeepAlive => (7, 1),
            Self::Shutdown => (7, 2),
            Self::Reserved => (1, 0),
        };
        kind << 29 | value & MAX_DATA
    }

    /// What a peer has sent.
    pub(super) fn decode(imm: u32) -> Self {
        let value = imm & MAX_DATA;
        match (imm >> 29, value) {
            (0, length) => Self::Data(length),
            // rdma-core lets the count run over: its lower 16 bits count.
            (4, limit) => Self::Credits(limit as u16),
            (6, index) => Self::Iomap(index as u16),
            (7, 0) => Self::Disconnect,
            (7, 1) => Self::KeepAlive,
            (7, 2) => Self::Shutdown,
            _ => Self::Reserved,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_data_are_those_of_rdma_core() {
        let data = ConnData {
            is_big_endian: false,
            credits: 384,
            iomaps: 1,
            targets: Segment {
                addr: 0x0102_0304_0506_0708,
                key: 0x1112_1314,
                length: 2,
            },
            data: Segment {
                addr: 0x2122_2324_2526_2728,
                key: 0x3132_3334,
                length: 0x10000,
            },
        };
        let bytes = [
            1, 2, 0x01, 0x80, 0, 0, 0, 1, //
            1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x12, 0x13, 0x14, 0, 0, 0, 2, //
            0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28, 0x31, 0x32, 0x33, 0x34, 0, 1, 0, 0,
        ];
        assert_eq!(data.encode(), bytes);
        // A request's private data are padded.
        let mut padded = bytes.to_vec();
        padded.resize(56, 0);
        assert_eq!(ConnData::decode(&padded), Some(data));
    }

    #[test]
    fn connection_data_of_another_kind_are_refused() {
        let mut bytes = [0; CONN_DATA_LEN];
        bytes[0] = 1;
        assert_eq!(ConnData::decode(&bytes), None, "no target list");
        bytes[23] = 2;
        assert!(ConnData::decode(&bytes).is_some());
        assert_eq!(ConnData::decode(&bytes[..39]), None, "too short");
        bytes[0] = 2;
        assert_eq!(ConnData::decode(&bytes), None, "another version");
    }

    #[test]
    fn messages_are_those_of_rdma_core() {
        let table = [
            (Message::Data(5), 0x0000_0005),
            (Message::Credits(0x1234), 0x8000_1234),
            (Message::Iomap(3), 0xc000_0003),
            (Message::Disconnect, 0xe000_0000),
            (Message::KeepAlive, 0xe000_0001),
            (Message::Shutdown, 0xe000_0002),
        ];
        for (message, imm) in table {
            assert_eq!(message.encode(), imm);
            assert_eq!(Message::decode(imm), message);
        }
        assert_eq!(Message::decode(0x8001_0005), Message::Credits(5));
        for imm in [0x2000_0000, 0x4000_0000, 0xa000_0000, 0xe000_0003] {
            assert_eq!(Message::decode(imm), Message::Reserved);
        }
    }

    #[test]
    fn entries_have_the_order_of_the_end_that_reads_them() {
        let segment = Segment {
            addr: 1,
            key: 2,
            length: 3,
        };
        let little = [1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0];
        assert_eq!(segment.to_entry(false), little);
        let big = [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3];
        assert_eq!(segment.to_entry(true), big);
        let own = segment.to_entry(cfg!(target_endian = "big"));
        assert_eq!(Segment::from_entry(&own), segment);
    }

    #[test]
    fn counts_of_iomaps_have_codes() {
        for (count, supported) in [(0, 0), (128, 128), (129, 128), (300, 256), (99_999, 0x7f00)] {
            assert_eq!(supported_iomaps(count), supported);
        }
    }
}
