//! The extended transport headers (IBTA 9.3) that follow the BTH; which ones,
//! the [opcode table](super::opcode) says.

use core::time::Duration;

use num_enum::TryFromPrimitive;
use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::ids::{Msn, Qpn, U24};

/// The Q_Key of queue pair 1 (IBTA 10.2.5).
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
    /// A header with the queue key of the receiver and the sender's number.
    #[must_use]
    pub fn new(qkey: u32, src_qpn: Qpn) -> Self {
        Self {
            qkey: U32::new(qkey),
            reserved: 0,
            src_qpn: src_qpn.into(),
        }
    }

    /// The queue key that must equal the receiver's.
    #[must_use]
    pub fn qkey(&self) -> u32 {
        self.qkey.get()
    }

    /// The queue pair that sent the datagram.
    #[must_use]
    pub fn src_qpn(&self) -> Qpn {
        self.src_qpn.into()
    }
}

/// XRC extended transport header (IBTA annex A14): the shared receive queue that a request is for.
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
    /// A header with the number of the receiver's shared receive queue, of 24 bits.
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

/// RDMA extended transport header (IBTA 9.3). Address and length are the
/// peer's claims: check them against the region before use.
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
    /// A header for `dma_len` bytes at `va` in the region of `rkey`.
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

    /// Length of the whole transfer in bytes.
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
    /// Compare the eight bytes at `va` with `compare`; if equal, store `swap`.
    #[must_use]
    pub fn compare_swap(va: u64, rkey: u32, compare: u64, swap: u64) -> Self {
        Self {
            va: U64::new(va),
            rkey: U32::new(rkey),
            swap_or_add: U64::new(swap),
            compare: U64::new(compare),
        }
    }

    /// Add `add`, wrapping, to the eight bytes at `va`.
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

    /// The value to store (compare-and-swap) or to add (fetch-and-add).
    #[must_use]
    pub fn swap_or_add(&self) -> u64 {
        self.swap_or_add.get()
    }

    /// The value to compare with; means nothing in a fetch-and-add.
    #[must_use]
    pub fn compare(&self) -> u64 {
        self.compare.get()
    }
}

/// Acknowledge extended transport header (IBTA 9.3).
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
    /// A header with what happened and how many messages are complete.
    #[must_use]
    pub fn new(syndrome: AethSyndrome, msn: Msn) -> Self {
        Self {
            syndrome: syndrome.to_wire(),
            msn: msn.into(),
        }
    }

    /// Syndrome of the header, decoded.
    #[must_use]
    pub fn syndrome(&self) -> AethSyndrome {
        AethSyndrome::from_wire(self.syndrome)
    }

    /// The responder's count of completed messages.
    #[must_use]
    pub fn msn(&self) -> Msn {
        self.msn.into()
    }
}

/// The first byte of an AETH (IBTA 9.7.5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AethSyndrome {
    /// Everything up to and including the packet's PSN arrived.
    Ack(Credit),
    /// No receive buffer: send again after the time.
    RnrNak(RnrTimer),
    /// NAK: the request failed.
    Nak(NakCode),
    /// Values the specification reserves; a requester ignores such packets.
    Reserved(u8),
}

impl AethSyndrome {
    /// Decode; total, every byte has a meaning.
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

    /// Encodes the syndrome's byte.
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

/// Code of a NAK: why a request failed (IBTA 9.7.5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromPrimitive)]
#[repr(u8)]
pub enum NakCode {
    /// A packet is missing before this one: go back to the acknowledged PSN.
    PsnSequence = 0,
    /// The opcode, its place in the message or its length is wrong.
    InvalidRequest = 1,
    /// Key, access right or range was refused.
    RemoteAccess = 2,
    /// The responder could not complete the request.
    RemoteOperation = 3,
    /// Invalid RD request, of reliable datagrams only.
    InvalidRdRequest = 4,
}

/// A five-bit credit code: how many receive requests the responder has beyond
/// the acknowledged message (IBTA 9.7.7.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credit(u8);

/// Credits of codes 0 to 30.
const CREDITS: [u16; 31] = [
    0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768,
];

impl Credit {
    /// The responder does not use end-to-end flow control.
    pub const UNLIMITED: Self = Self(0x1f);

    /// The largest code that promises no more than `count` messages.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "a row of 31")]
    pub fn at_most(count: usize) -> Self {
        // Code 0 promises none, so there is always one that is not above.
        let above = CREDITS.partition_point(|&credits| usize::from(credits) <= count);
        Self((above - 1) as u8)
    }

    /// The number of messages promised, `None` without flow control.
    #[must_use]
    pub fn count(self) -> Option<u32> {
        CREDITS
            .get(usize::from(self.0))
            .map(|&credits| u32::from(credits))
    }

    /// Code of five bits, as on the wire.
    #[must_use]
    pub const fn code(self) -> u8 {
        self.0
    }
}

/// A five-bit code of the time after which a requester may try again
/// (IBTA 9.7.5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RnrTimer(u8);

/// The times of the codes in units of 10 µs; code 0 is the longest.
const RNR_TENS_OF_MICROS: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

impl RnrTimer {
    /// The low five bits of `code`.
    #[must_use]
    pub const fn new(code: u8) -> Self {
        Self(code & 0x1f)
    }

    /// The shortest code that waits at least `time`; the longest there is, if
    /// none does.
    #[must_use]
    pub fn at_least(time: Duration) -> Self {
        (1..32)
            .map(Self)
            .find(|timer| timer.duration() >= time)
            .unwrap_or(Self(0))
    }

    /// The time, 10 µs to 655.36 ms.
    #[must_use]
    pub const fn duration(self) -> Duration {
        Duration::from_micros(RNR_TENS_OF_MICROS[self.0 as usize] as u64 * 10)
    }

    /// Code of five bits, as on the wire.
    #[must_use]
    pub const fn code(self) -> u8 {
        self.0
    }
}

/// Atomic acknowledge extended transport header (IBTA 9.3): the value before
/// the operation.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct AtomicAckEth {
    original: U64,
}

const _: () = assert!(size_of::<AtomicAckEth>() == 8);

impl AtomicAckEth {
    /// A header with the value that was there before.
    #[must_use]
    pub fn new(original: u64) -> Self {
        Self {
            original: U64::new(original),
        }
    }

    /// The value that was there before.
    #[must_use]
    pub fn original(&self) -> u64 {
        self.original.get()
    }
}

/// Immediate data (IBTA 9.3): four bytes handed to the receiver's
/// completion. Held in the order of the wire and given as a big-endian number.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ImmDt {
    data: U32,
}

const _: () = assert!(size_of::<ImmDt>() == 4);

impl ImmDt {
    /// Header with these immediate data.
    #[must_use]
    pub fn new(data: u32) -> Self {
        Self {
            data: U32::new(data),
        }
    }

    /// The data as a number.
    #[must_use]
    pub fn data(&self) -> u32 {
        self.data.get()
    }
}

/// Invalidate extended transport header (IBTA 9.3): the remote key that the
/// receiver shall invalidate.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Ieth {
    rkey: U32,
}

const _: () = assert!(size_of::<Ieth>() == 4);

impl Ieth {
    /// A header for `rkey`.
    #[must_use]
    pub fn new(rkey: u32) -> Self {
        Self {
            rkey: U32::new(rkey),
        }
    }

    /// The key to invalidate.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        self.rkey.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_syndrome_byte_survives_a_round_trip() {
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
