//! Extended transport headers (IBTA 9.3), which follow the BTH as defined in the [opcode
//! table](super::opcode).

use core::time::Duration;

use num_enum::TryFromPrimitive;
use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::ids::{Msn, Qpn, U24};

/// Q_Key for queue pair 1 (IBTA 10.2.5).
pub const GSI_QKEY: u32 = 0x8001_0000;

/// Datagram extended transport header (IBTA 9.3).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Deth {
    qkey: U32,
    reserved: u8,
    src_qpn: U24,
}

const _: () = assert!(size_of::<Deth>() == 8);

impl Deth {
    /// Creates a header with the receiver's Q_Key and the sender's queue pair number.
    #[must_use]
    pub fn new(qkey: u32, src_qpn: Qpn) -> Self {
        Self {
            qkey: U32::new(qkey),
            reserved: 0,
            src_qpn: src_qpn.into(),
        }
    }

    /// Q_Key, which must match the receiver's.
    #[must_use]
    pub fn qkey(&self) -> u32 {
        self.qkey.get()
    }

    /// The sender's queue pair number.
    #[must_use]
    pub fn src_qpn(&self) -> Qpn {
        self.src_qpn.into()
    }
}

/// XRC extended transport header (IBTA annex A14), used to select the shared receive queue for a
/// request.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct XrcEth {
    reserved: u8,
    srqn: U24,
}

const _: () = assert!(size_of::<XrcEth>() == 4);

impl XrcEth {
    /// Creates a header with the 24-bit number of the receiver's shared receive queue.
    #[must_use]
    pub fn new(srqn: u32) -> Self {
        Self {
            reserved: 0,
            srqn: U24::new(srqn),
        }
    }

    /// XRCSRQ: number of the shared receive queue.
    #[must_use]
    pub fn srqn(&self) -> u32 {
        self.srqn.value()
    }
}

/// RDMA extended transport header (IBTA 9.3). Address and length are provided by the peer, so they
/// must be checked against the memory region before use.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Reth {
    va: U64,
    rkey: U32,
    dma_len: U32,
}

const _: () = assert!(size_of::<Reth>() == 16);

impl Reth {
    /// Creates a header for `dma_len` bytes at `va`, using `rkey` for the region.
    #[must_use]
    pub fn new(va: u64, rkey: u32, dma_len: u32) -> Self {
        Self {
            va: U64::new(va),
            rkey: U32::new(rkey),
            dma_len: U32::new(dma_len),
        }
    }

    /// Virtual address of the first byte.
    #[must_use]
    pub fn va(&self) -> u64 {
        self.va.get()
    }

    /// R_Key of the remote region.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        self.rkey.get()
    }

    /// Total transfer length in bytes.
    #[must_use]
    pub fn dma_len(&self) -> u32 {
        self.dma_len.get()
    }
}

/// Atomic extended transport header (IBTA 9.3).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct AtomicEth {
    va: U64,
    rkey: U32,
    swap_or_add: U64,
    compare: U64,
}

const _: () = assert!(size_of::<AtomicEth>() == 28);

impl AtomicEth {
    /// Creates a compare-and-swap request: if the eight bytes at `va` equal `compare`, they will be
    /// set to `swap`.
    #[must_use]
    pub fn compare_swap(va: u64, rkey: u32, compare: u64, swap: u64) -> Self {
        Self {
            va: U64::new(va),
            rkey: U32::new(rkey),
            swap_or_add: U64::new(swap),
            compare: U64::new(compare),
        }
    }

    /// Creates a fetch-and-add request: `add` will be added to the eight bytes at `va`, wrapping on
    /// overflow.
    #[must_use]
    pub fn fetch_add(va: u64, rkey: u32, add: u64) -> Self {
        Self {
            va: U64::new(va),
            rkey: U32::new(rkey),
            swap_or_add: U64::new(add),
            compare: U64::ZERO,
        }
    }

    /// Virtual address, which must be a multiple of eight.
    #[must_use]
    pub fn va(&self) -> u64 {
        self.va.get()
    }

    /// R_Key of the remote region.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        self.rkey.get()
    }

    /// Value to store (compare-and-swap) or to add (fetch-and-add).
    #[must_use]
    pub fn swap_or_add(&self) -> u64 {
        self.swap_or_add.get()
    }

    /// Value to compare with. Not used for fetch-and-add.
    #[must_use]
    pub fn compare(&self) -> u64 {
        self.compare.get()
    }
}

/// ACK extended transport header (IBTA 9.3).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Aeth {
    syndrome: u8,
    msn: U24,
}

const _: () = assert!(size_of::<Aeth>() == 4);

impl Aeth {
    /// Creates a header with a syndrome and the number of completed messages.
    #[must_use]
    pub fn new(syndrome: AethSyndrome, msn: Msn) -> Self {
        Self {
            syndrome: syndrome.to_wire(),
            msn: msn.into(),
        }
    }

    /// Returns the decoded syndrome.
    #[must_use]
    pub fn syndrome(&self) -> AethSyndrome {
        AethSyndrome::from_wire(self.syndrome)
    }

    /// Number of messages completed by the responder.
    #[must_use]
    pub fn msn(&self) -> Msn {
        self.msn.into()
    }
}

/// AETH syndrome, the first byte of the header (IBTA 9.7.5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AethSyndrome {
    /// All packets up to and including this PSN were received.
    Ack(Credit),
    /// No receive buffer available. The requester should retry after this time.
    RnrNak(RnrTimer),
    /// The request failed.
    Nak(NakCode),
    /// Reserved value. A requester must ignore this packet.
    Reserved(u8),
}

impl AethSyndrome {
    /// Decodes the syndrome. All values are valid.
    #[must_use]
    pub fn from_wire(byte: u8) -> Self {
        let value = byte & 0x1f;
        match byte >> 5 {
            0b000 => Self::Ack(Credit(value)),
            0b001 => Self::RnrNak(RnrTimer(value)),
            0b011 => NakCode::try_from(value).map_or(Self::Reserved(byte), Self::Nak),
            _ => Self::Reserved(byte),
        }
    }

    /// Encodes the syndrome.
    #[must_use]
    pub const fn to_wire(self) -> u8 {
        match self {
            Self::Ack(credit) => credit.0,
            Self::RnrNak(timer) => 0x20 | timer.0,
            Self::Nak(code) => 0x60 | code as u8,
            Self::Reserved(byte) => byte,
        }
    }
}

/// NAK code, indicating why a request failed (IBTA 9.7.5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromPrimitive)]
#[repr(u8)]
pub enum NakCode {
    /// A previous packet is missing. The requester must resend starting at the acknowledged PSN.
    PsnSequence = 0,
    /// The opcode, its position in the message or its length is invalid.
    InvalidRequest = 1,
    /// The key, access rights or address range are invalid.
    RemoteAccess = 2,
    /// The responder could not complete the request.
    RemoteOperation = 3,
    /// Invalid RD request. Only used for reliable datagrams.
    InvalidRdRequest = 4,
}

/// Five-bit credit code: the number of receive requests that the responder has available beyond the
/// acknowledged message (IBTA 9.7.7.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credit(u8);

/// Credits for codes 0 to 30.
const CREDITS: [u16; 31] = [
    0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768,
];

impl Credit {
    /// The responder does not use end-to-end flow control.
    pub const UNLIMITED: Self = Self(0x1f);

    /// Returns the largest code for at most `count` messages.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "a row of 31")]
    pub fn at_most(count: usize) -> Self {
        // Code 0 means no credits, so there is always a valid code.
        let above = CREDITS.partition_point(|&credits| usize::from(credits) <= count);
        Self((above - 1) as u8)
    }

    /// Returns the number of credits, or `None` if flow control is not used.
    #[must_use]
    pub fn count(self) -> Option<u32> {
        CREDITS
            .get(usize::from(self.0))
            .map(|&credits| u32::from(credits))
    }

    /// Returns the five-bit wire code.
    #[must_use]
    pub const fn code(self) -> u8 {
        self.0
    }
}

/// Five-bit code for the time a requester must wait before a retry (IBTA 9.7.5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RnrTimer(u8);

/// Timer values in units of 10 µs. Note that code 0 is the longest.
const RNR_TENS_OF_MICROS: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

impl RnrTimer {
    /// Uses the low five bits of `code`.
    #[must_use]
    pub const fn new(code: u8) -> Self {
        Self(code & 0x1f)
    }

    /// Returns the code for the shortest time that is at least `time`, or for the maximum time if
    /// `time` exceeds it.
    #[must_use]
    pub fn at_least(time: Duration) -> Self {
        (1..32)
            .map(Self)
            .find(|timer| timer.duration() >= time)
            .unwrap_or(Self(0))
    }

    /// Returns the time, 10 µs to 655.36 ms.
    #[must_use]
    pub const fn duration(self) -> Duration {
        Duration::from_micros(RNR_TENS_OF_MICROS[self.0 as usize] as u64 * 10)
    }

    /// Returns the five-bit wire code.
    #[must_use]
    pub const fn code(self) -> u8 {
        self.0
    }
}

/// Atomic ACK extended transport header (IBTA 9.3), which returns the value before the operation.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct AtomicAckEth {
    original: U64,
}

const _: () = assert!(size_of::<AtomicAckEth>() == 8);

impl AtomicAckEth {
    /// Creates a header with the original value.
    #[must_use]
    pub fn new(original: u64) -> Self {
        Self {
            original: U64::new(original),
        }
    }

    /// Returns the value before the operation.
    #[must_use]
    pub fn original(&self) -> u64 {
        self.original.get()
    }
}

/// Immediate data (IBTA 9.3): four bytes passed to the receiver's completion. This is stored in
/// wire order and returned as a big-endian number.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ImmDt {
    data: U32,
}

const _: () = assert!(size_of::<ImmDt>() == 4);

impl ImmDt {
    /// Creates a header with this immediate data.
    #[must_use]
    pub fn new(data: u32) -> Self {
        Self {
            data: U32::new(data),
        }
    }

    /// Returns the data as a number.
    #[must_use]
    pub fn data(&self) -> u32 {
        self.data.get()
    }
}

/// Invalidate extended transport header (IBTA 9.3), containing the R_Key that the receiver should
/// invalidate.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Ieth {
    rkey: U32,
}

const _: () = assert!(size_of::<Ieth>() == 4);

impl Ieth {
    /// Creates a header for `rkey`.
    #[must_use]
    pub fn new(rkey: u32) -> Self {
        Self {
            rkey: U32::new(rkey),
        }
    }

    /// R_Key to invalidate.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        self.rkey.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn syndrome_bytes_round_trip() {
        for byte in 0..=255u8 {
            assert_eq!(AethSyndrome::from_wire(byte).to_wire(), byte);
        }
        assert_eq!(
            AethSyndrome::from_wire(0x1f),
            AethSyndrome::Ack(Credit::UNLIMITED)
        );
        assert_eq!(
            AethSyndrome::from_wire(0x2e),
            AethSyndrome::RnrNak(RnrTimer::new(14))
        );
        assert_eq!(
            AethSyndrome::from_wire(0x60),
            AethSyndrome::Nak(NakCode::PsnSequence)
        );
        assert_eq!(
            AethSyndrome::from_wire(0x62),
            AethSyndrome::Nak(NakCode::RemoteAccess)
        );
        assert_eq!(AethSyndrome::from_wire(0x65), AethSyndrome::Reserved(0x65));
        assert_eq!(AethSyndrome::from_wire(0x40), AethSyndrome::Reserved(0x40));
        assert_eq!(AethSyndrome::from_wire(0x80), AethSyndrome::Reserved(0x80));
    }

    #[test]
    fn credit_codes_round_down() {
        assert_eq!(Credit::at_most(0).code(), 0);
        assert_eq!(Credit::at_most(5).code(), 4);
        assert_eq!(Credit::at_most(100).code(), 13);
        assert_eq!(Credit::at_most(usize::MAX).count(), Some(32768));
        assert_eq!(Credit::UNLIMITED.count(), None);
    }

    #[test]
    fn rnr_codes_round_up() {
        assert_eq!(RnrTimer::new(0).duration(), Duration::from_micros(655_360));
        assert_eq!(RnrTimer::new(14).duration(), Duration::from_micros(1_280));
        assert_eq!(RnrTimer::at_least(Duration::ZERO).code(), 1);
        assert_eq!(RnrTimer::at_least(Duration::from_millis(1)).code(), 14);
        assert_eq!(RnrTimer::at_least(Duration::from_millis(491)).code(), 31);
        assert_eq!(RnrTimer::at_least(Duration::from_millis(600)).code(), 0);
        assert_eq!(RnrTimer::at_least(Duration::from_secs(9)).code(), 0);
    }
}
