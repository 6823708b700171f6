//! The fields of CM messages that have a meaning of their own.

use core::fmt;
use core::ops::Deref;
use core::time::Duration;

use num_enum::{FromPrimitive, IntoPrimitive};
use thiserror::Error;

/// Communication id: a connection of a node, numbered by that node.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommId(pub u32);

impl fmt::Debug for CommId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CommId({:#010x})", self.0)
    }
}

/// The service that a request is for.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceId(pub u64);

impl fmt::Debug for ServiceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServiceId({:#018x})", self.0)
    }
}

/// A channel adapter's EUI-64.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CaGuid(pub u64);

impl fmt::Debug for CaGuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CaGuid({:#018x})", self.0)
    }
}

/// An unsigned number of `N` bits, `N` at most 31.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bits<const N: u32>(u32);

impl<const N: u32> Bits<N> {
    /// Largest value of `N` bits.
    pub const MAX: Self = Self((1 << N) - 1);

    /// The value, `None` if it needs more bits.
    #[must_use]
    pub const fn new(value: u32) -> Option<Self> {
        if value <= Self::MAX.0 {
            Some(Self(value))
        } else {
            None
        }
    }

    /// The low bits of `value`.
    #[must_use]
    pub const fn truncate(value: u32) -> Self {
        Self(value & Self::MAX.0)
    }

    /// `value`, or the largest there is.
    #[must_use]
    pub const fn saturate(value: u32) -> Self {
        if value <= Self::MAX.0 {
            Self(value)
        } else {
            Self::MAX
        }
    }

    /// Value as an integer.
    #[must_use]
    pub const fn value(self) -> u32 {
        self.0
    }

    /// The number of a field of at most eight bits.
    pub(super) const fn byte(self) -> u8 {
        const { assert!(N <= 8) };
        (self.0 & 0xff) as u8
    }
}

impl<const N: u32> fmt::Debug for Bits<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// A time of 4.096 µs · 2ⁿ, *n* from 0 to 31: 4 µs to 2.4 hours (IBTA 12.7).
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CmTimeout(Bits<5>);

impl CmTimeout {
    /// The exponent's low five bits.
    #[must_use]
    pub const fn new(exponent: u8) -> Self {
        Self(Bits::truncate(exponent as u32))
    }

    /// The shortest that lasts at least `time`, or the longest there is.
    #[must_use]
    pub fn at_least(time: Duration) -> Self {
        (0..32)
            .map(Self::new)
            .find(|t| t.duration() >= time)
            .unwrap_or(Self::new(31))
    }

    /// Exponent of the code, from 0 to 31.
    #[must_use]
    pub const fn exponent(self) -> u8 {
        self.0.byte()
    }

    /// Time that the code stands for: 4.096 µs × 2^exponent.
    #[must_use]
    pub const fn duration(self) -> Duration {
        Duration::from_nanos(4096 << self.0.value())
    }
}

impl fmt::Debug for CmTimeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CmTimeout({}, {:?})", self.exponent(), self.duration())
    }
}

/// Data does not fit its field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{len} bytes for a field of {room}")]
pub struct TooLong {
    /// Number of bytes given.
    pub len: usize,
    /// Bytes there is room for.
    pub room: usize,
}

/// A field of `N` bytes for the user's own data. It has no length of its own on
/// the wire: shorter data is followed by zeros.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PrivateData<const N: usize>(pub [u8; N]);

impl<const N: usize> PrivateData<N> {
    /// Length of the field in bytes.
    pub const LEN: usize = N;

    /// `data` and zeros after it.
    pub fn new(data: &[u8]) -> Result<Self, TooLong> {
        let mut bytes = [0; N];
        let room = bytes.get_mut(..data.len()).ok_or(TooLong {
            len: data.len(),
            room: N,
        })?;
        room.copy_from_slice(data);
        Ok(Self(bytes))
    }
}

impl<const N: usize> Default for PrivateData<N> {
    fn default() -> Self {
        Self([0; N])
    }
}

impl<const N: usize> Deref for PrivateData<N> {
    type Target = [u8; N];

    fn deref(&self) -> &[u8; N] {
        &self.0
    }
}

impl<const N: usize> fmt::Debug for PrivateData<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used = self
            .0
            .iter()
            .rposition(|&byte| byte != 0)
            .map_or(0, |last| last + 1);
        write!(f, "PrivateData<{N}>({:02x?})", &self.0[..used])
    }
}

/// Bytes of additional information in REJ, APR and SIDR_REP.
pub const ADDITIONAL_INFO_LEN: usize = 72;

/// Additional information: up to 72 bytes whose meaning depends on the reason.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct AdditionalInfo {
    len: u8,
    bytes: [u8; ADDITIONAL_INFO_LEN],
}

impl AdditionalInfo {
    /// `data`, at most 72 bytes.
    pub fn new(data: &[u8]) -> Result<Self, TooLong> {
        let bytes = PrivateData::<ADDITIONAL_INFO_LEN>::new(data)?.0;
        #[expect(clippy::cast_possible_truncation, reason = "at most 72 bytes fit")]
        let len = data.len() as u8;
        Ok(Self { len, bytes })
    }

    /// From the wire: `None` if the declared length exceeds the field.
    pub(super) fn from_wire(len: u8, bytes: [u8; ADDITIONAL_INFO_LEN]) -> Option<Self> {
        (usize::from(len) <= ADDITIONAL_INFO_LEN).then_some(Self { len, bytes })
    }

    pub(super) fn wire_len(&self) -> u8 {
        self.len
    }

    pub(super) fn wire_bytes(&self) -> [u8; ADDITIONAL_INFO_LEN] {
        self.bytes
    }
}

impl Default for AdditionalInfo {
    fn default() -> Self {
        Self {
            len: 0,
            bytes: [0; ADDITIONAL_INFO_LEN],
        }
    }
}

impl Deref for AdditionalInfo {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl fmt::Debug for AdditionalInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x?}", &**self)
    }
}

/// Reason of a REJ: why a connection was refused or given up (IBTA 12.6.7.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromPrimitive, IntoPrimitive)]
#[repr(u16)]
pub enum RejReason {
    /// No queue pair available.
    NoQp = 1,
    /// No end-to-end context available.
    NoEec = 2,
    /// No resources are available.
    NoResources = 3,
    /// An answer did not come in time.
    Timeout = 4,
    /// The request is not supported.
    Unsupported = 5,
    /// No such communication id.
    InvalidCommId = 6,
    /// Communication ids, service id or QPNs do not belong together.
    InvalidCommInstance = 7,
    /// No listener on the service id.
    InvalidServiceId = 8,
    /// The service is not offered over this transport service.
    InvalidTransportType = 9,
    /// The request shows that a connection we believed in is gone.
    StaleConn = 10,
    /// The reliable datagram channel does not exist.
    RdcNotExist = 11,
    /// Primary remote port GID.
    InvalidGid = 12,
    /// Primary remote port LID.
    InvalidLid = 13,
    /// Primary service level is invalid.
    InvalidSl = 14,
    /// Primary traffic class is invalid.
    InvalidTrafficClass = 15,
    /// Primary hop limit is invalid.
    InvalidHopLimit = 16,
    /// Primary packet rate is invalid.
    InvalidPacketRate = 17,
    /// Alternate remote port GID.
    InvalidAltGid = 18,
    /// Alternate remote port LID.
    InvalidAltLid = 19,
    /// Alternate service level is invalid.
    InvalidAltSl = 20,
    /// Alternate traffic class is invalid.
    InvalidAltTrafficClass = 21,
    /// Alternate hop limit is invalid.
    InvalidAltHopLimit = 22,
    /// Alternate packet rate is invalid.
    InvalidAltPacketRate = 23,
    /// Another port and another CM serve this; the answer names both.
    PortCmRedirect = 24,
    /// Another port serves this; the answer names it.
    PortRedirect = 25,
    /// Path MTU is invalid.
    InvalidMtu = 26,
    /// Too few responder resources.
    InsufficientRespResources = 27,
    /// The consumer's own reasons, in its private data.
    ConsumerDefined = 28,
    /// RNR retry count is rejected.
    InvalidRnrRetry = 29,
    /// The local communication id is in use for another connection.
    DuplicateLocalCommId = 30,
    /// The class version is not spoken.
    InvalidClassVersion = 31,
    /// Primary flow label is invalid.
    InvalidFlowLabel = 32,
    /// Alternate flow label is invalid.
    InvalidAltFlowLabel = 33,
    /// A vendor's option is not spoken.
    VendorOptionNotSupported = 35,
    /// A code that is none of the others; kept as received.
    #[num_enum(catch_all)]
    Other(u16),
}

/// The answer to an alternate path request (IBTA 12.8.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum AprStatus {
    /// The path is loaded.
    Success = 0,
    /// No such communication id.
    InvalidCommId = 1,
    /// Alternate paths are not supported.
    Unsupported = 2,
    /// The alternate path is refused.
    Reject = 3,
    /// Another path is suggested.
    Redirect = 4,
    /// The path is in use already.
    IsCurrent = 5,
    /// Queue pair number or end-to-end context.
    InvalidQpnEecn = 6,
    /// LID of the path is invalid.
    InvalidLid = 7,
    /// GID of the path is invalid.
    InvalidGid = 8,
    /// Flow label of the path is invalid.
    InvalidFlowLabel = 9,
    /// Traffic class of the path is invalid.
    InvalidTrafficClass = 10,
    /// Hop limit of the path is invalid.
    InvalidHopLimit = 11,
    /// Packet rate of the path is invalid.
    InvalidPacketRate = 12,
    /// Service level of the path is invalid.
    InvalidSl = 13,
    /// A code that is none of the others; kept as received.
    #[num_enum(catch_all)]
    Other(u8),
}

/// The answer to a service id resolution request (IBTA 12.11.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum SidrStatus {
    /// Queue pair and queue key are valid.
    Success = 0,
    /// The service id is not offered.
    Unsupported = 1,
    /// The service's user refused.
    Reject = 2,
    /// No queue pair available.
    NoQp = 3,
    /// Another port serves this; the answer names it.
    Redirect = 4,
    /// The version is not spoken.
    UnsupportedVersion = 5,
    /// A code that is none of the others; kept as received.
    #[num_enum(catch_all)]
    Other(u8),
}

/// Transport service of a connection (IBTA 12.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum TransportType {
    /// Reliable connection (RC) service.
    Rc = 0,
    /// Unreliable connection (UC) service.
    Uc = 1,
    /// Reliable datagram (RD) service.
    Rd = 2,
    /// See the extended transport type.
    Extended = 3,
    /// A code that is none of the others; kept as received.
    #[num_enum(catch_all)]
    Other(u8),
}

/// Message that an MRA acknowledges (IBTA 12.6.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum MraOf {
    /// REQ: the request for a connection.
    Req = 0,
    /// REP: the reply to a request.
    Rep = 1,
    /// LAP: the request for an alternate path.
    Lap = 2,
    /// A code that is none of the others; kept as received.
    #[num_enum(catch_all)]
    Other(u8),
}

/// Message that a REJ refuses (IBTA 12.6.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum RejOf {
    /// REQ: the request for a connection.
    Req = 0,
    /// REP: the reply to a request.
    Rep = 1,
    /// None: the sender gives up.
    NoMessage = 2,
    /// A code that is none of the others; kept as received.
    #[num_enum(catch_all)]
    Other(u8),
}

/// Failover Accepted: whether the passive side took the alternate path (IBTA 12.6.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum Failover {
    /// It did, or none was offered.
    Accepted = 0,
    /// It does not do failover.
    Unsupported = 1,
    /// It refused this path.
    Rejected = 2,
    /// A code that is none of the others; kept as received.
    #[num_enum(catch_all)]
    Other(u8),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_powers_of_two_of_four_microseconds() {
        assert_eq!(CmTimeout::new(0).duration(), Duration::from_nanos(4096));
        assert_eq!(
            CmTimeout::new(20).duration(),
            Duration::from_nanos(4_294_967_296)
        );
        assert_eq!(CmTimeout::new(31).duration().as_secs(), 8796);
        assert_eq!(CmTimeout::at_least(Duration::from_secs(1)).exponent(), 18);
        assert_eq!(CmTimeout::at_least(Duration::MAX).exponent(), 31);
    }

    #[test]
    fn codes_survive_a_round_trip() {
        for code in 0..64 {
            assert_eq!(u16::from(RejReason::from(code)), code);
        }
        assert_eq!(RejReason::from(28), RejReason::ConsumerDefined);
        assert_eq!(RejReason::from(34), RejReason::Other(34));
        for code in 0..=255 {
            assert_eq!(u8::from(AprStatus::from(code)), code);
            assert_eq!(u8::from(SidrStatus::from(code)), code);
        }
    }

    #[test]
    fn fields_refuse_what_does_not_fit() {
        assert_eq!(
            PrivateData::<4>::new(&[1; 5]),
            Err(TooLong { len: 5, room: 4 })
        );
        assert_eq!(PrivateData::<4>::new(&[1, 2]).unwrap().0, [1, 2, 0, 0]);
        assert_eq!(
            AdditionalInfo::new(&[0; 73]),
            Err(TooLong { len: 73, room: 72 })
        );
        assert_eq!(AdditionalInfo::from_wire(73, [0; 72]), None);
        assert_eq!(&*AdditionalInfo::new(&[7, 8]).unwrap(), [7, 8]);
        assert_eq!(Bits::<3>::new(8), None);
        assert_eq!(Bits::<3>::saturate(9).value(), 7);
    }
}
