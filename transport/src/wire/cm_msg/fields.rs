//! Field types used in CM messages.

use core::fmt;
use core::ops::Deref;
use core::time::Duration;

use num_enum::{FromPrimitive, IntoPrimitive};
use thiserror::Error;

/// Communication ID: identifies a connection and is assigned by a node.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommId(pub u32);

impl fmt::Debug for CommId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CommId({:#010x})", self.0)
    }
}

/// Service ID of a request.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceId(pub u64);

impl ServiceId {
    /// Requests an unused ID from [`Cm::listen`](crate::cm::Cm::listen)
    /// (`IB_CM_ASSIGN_SERVICE_ID`). IDs with this first byte are assigned by the local host
    /// (IBTA annex A3).
    pub const ASSIGN: Self = Self(0x0200_0000_0000_0000);
}

impl fmt::Debug for ServiceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServiceId({:#018x})", self.0)
    }
}

/// EUI-64 of a channel adapter.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CaGuid(pub u64);

impl fmt::Debug for CaGuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CaGuid({:#018x})", self.0)
    }
}

/// Unsigned number with `N` bits, at most 31.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bits<const N: u32>(u32);

impl<const N: u32> Bits<N> {
    /// Maximum value for `N` bits.
    pub const MAX: Self = Self((1 << N) - 1);

    /// Returns the value, or `None` if it doesn't fit into `N` bits.
    #[must_use]
    pub const fn new(value: u32) -> Option<Self> {
        if value <= Self::MAX.0 {
            Some(Self(value))
        } else {
            None
        }
    }

    /// Uses the low bits of `value`.
    #[must_use]
    pub const fn truncate(value: u32) -> Self {
        Self(value & Self::MAX.0)
    }

    /// Uses `value`, limited to the maximum.
    #[must_use]
    pub const fn saturate(value: u32) -> Self {
        if value <= Self::MAX.0 {
            Self(value)
        } else {
            Self::MAX
        }
    }

    /// Returns the value as an integer.
    #[must_use]
    pub const fn value(self) -> u32 {
        self.0
    }

    /// Returns the value for a field of at most eight bits.
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

/// Timeout of 4.096 µs · 2ⁿ, where *n* is 0 to 31: 4 µs to 2.4 hours (IBTA 12.7).
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CmTimeout(Bits<5>);

impl CmTimeout {
    /// Uses the low five bits of the exponent.
    #[must_use]
    pub const fn new(exponent: u8) -> Self {
        Self(Bits::truncate(exponent as u32))
    }

    /// Returns the shortest timeout that is at least `time`, or the maximum timeout if `time`
    /// exceeds it.
    #[must_use]
    pub fn at_least(time: Duration) -> Self {
        (0..32)
            .map(Self::new)
            .find(|t| t.duration() >= time)
            .unwrap_or(Self::new(31))
    }

    /// Returns the exponent, 0 to 31.
    #[must_use]
    pub const fn exponent(self) -> u8 {
        self.0.byte()
    }

    /// Returns the timeout: 4.096 µs × 2^exponent.
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

/// The data doesn't fit into its field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("data of {len} bytes exceeds a field of {room} bytes")]
pub struct TooLong {
    /// Data size in bytes.
    pub len: usize,
    /// Field size in bytes.
    pub room: usize,
}

/// Field of `N` bytes for private data. The data size is not sent on the wire: shorter data is
/// padded with zeros.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PrivateData<const N: usize>(pub [u8; N]);

impl<const N: usize> PrivateData<N> {
    /// Field size in bytes.
    pub const LEN: usize = N;

    /// Creates the field and pads `data` with zeros.
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

/// Maximum size of the additional information in REJ, APR and SIDR_REP.
pub const ADDITIONAL_INFO_LEN: usize = 72;

/// Additional information: up to 72 bytes with a meaning that depends on the reason.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct AdditionalInfo {
    len: u8,
    bytes: [u8; ADDITIONAL_INFO_LEN],
}

impl AdditionalInfo {
    /// Creates the field with up to 72 bytes of `data`.
    pub fn new(data: &[u8]) -> Result<Self, TooLong> {
        let bytes = PrivateData::<ADDITIONAL_INFO_LEN>::new(data)?.0;
        #[expect(clippy::cast_possible_truncation, reason = "at most 72 bytes fit")]
        let len = data.len() as u8;
        Ok(Self { len, bytes })
    }

    /// Parses the field. Returns `None` if the declared length exceeds the field size.
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

/// Reason code in a REJ (IBTA 12.6.7.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromPrimitive, IntoPrimitive)]
#[repr(u16)]
pub enum RejReason {
    /// No queue pair available.
    NoQp = 1,
    /// No end-to-end context available.
    NoEec = 2,
    /// No resources are available.
    NoResources = 3,
    /// Timed out waiting for a response.
    Timeout = 4,
    /// The request is not supported.
    Unsupported = 5,
    /// Invalid communication ID.
    InvalidCommId = 6,
    /// The communication IDs, service ID or QPNs don't match.
    InvalidCommInstance = 7,
    /// No listener for this service ID.
    InvalidServiceId = 8,
    /// The service does not support this transport service.
    InvalidTransportType = 9,
    /// Stale connection: the request shows that a connection we considered established no longer
    /// exists.
    StaleConn = 10,
    /// The reliable datagram channel does not exist.
    RdcNotExist = 11,
    /// Primary remote port GID is invalid.
    InvalidGid = 12,
    /// Primary remote port LID is invalid.
    InvalidLid = 13,
    /// Primary service level is invalid.
    InvalidSl = 14,
    /// Primary traffic class is invalid.
    InvalidTrafficClass = 15,
    /// Primary hop limit is invalid.
    InvalidHopLimit = 16,
    /// Primary packet rate is invalid.
    InvalidPacketRate = 17,
    /// Alternate remote port GID is invalid.
    InvalidAltGid = 18,
    /// Alternate remote port LID is invalid.
    InvalidAltLid = 19,
    /// Alternate service level is invalid.
    InvalidAltSl = 20,
    /// Alternate traffic class is invalid.
    InvalidAltTrafficClass = 21,
    /// Alternate hop limit is invalid.
    InvalidAltHopLimit = 22,
    /// Alternate packet rate is invalid.
    InvalidAltPacketRate = 23,
    /// The request should be sent to the port and CM specified in this response.
    PortCmRedirect = 24,
    /// The request should be sent to the port specified in this response.
    PortRedirect = 25,
    /// Path MTU is invalid.
    InvalidMtu = 26,
    /// Insufficient responder resources.
    InsufficientRespResources = 27,
    /// Rejected by the consumer, which can provide a reason in the private data.
    ConsumerDefined = 28,
    /// RNR retry count is rejected.
    InvalidRnrRetry = 29,
    /// The local communication ID is already used by a different connection.
    DuplicateLocalCommId = 30,
    /// The class version is not supported.
    InvalidClassVersion = 31,
    /// Primary flow label is invalid.
    InvalidFlowLabel = 32,
    /// Alternate flow label is invalid.
    InvalidAltFlowLabel = 33,
    /// A vendor option is not supported.
    VendorOptionNotSupported = 35,
    /// Unknown code, preserved as received.
    #[num_enum(catch_all)]
    Other(u16),
}

/// Status in the response to an alternate path request (IBTA 12.8.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum AprStatus {
    /// The path was loaded.
    Success = 0,
    /// Invalid communication ID.
    InvalidCommId = 1,
    /// Alternate paths are not supported.
    Unsupported = 2,
    /// The alternate path was rejected.
    Reject = 3,
    /// The request should be sent to a different port.
    Redirect = 4,
    /// The path is already in use.
    IsCurrent = 5,
    /// Invalid queue pair number or end-to-end context.
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
    /// Unknown code, preserved as received.
    #[num_enum(catch_all)]
    Other(u8),
}

/// Status in the response to a service ID resolution request (IBTA 12.11.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum SidrStatus {
    /// Queue pair number and Q_Key are valid.
    Success = 0,
    /// The service ID is not supported.
    Unsupported = 1,
    /// Rejected by the service user.
    Reject = 2,
    /// No queue pair available.
    NoQp = 3,
    /// The request should be sent to the port specified in this response.
    Redirect = 4,
    /// The version is not supported.
    UnsupportedVersion = 5,
    /// Unknown code, preserved as received.
    #[num_enum(catch_all)]
    Other(u8),
}

/// Transport service for a connection (IBTA 12.7).
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
    /// Unknown code, preserved as received.
    #[num_enum(catch_all)]
    Other(u8),
}

/// Message acknowledged by an MRA (IBTA 12.6.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum MraOf {
    /// Connection request.
    Req = 0,
    /// Connection reply.
    Rep = 1,
    /// Load alternate path request.
    Lap = 2,
    /// Unknown code, preserved as received.
    #[num_enum(catch_all)]
    Other(u8),
}

/// Message rejected by a REJ (IBTA 12.6.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum RejOf {
    /// Connection request.
    Req = 0,
    /// Connection reply.
    Rep = 1,
    /// No message: the sender abandons the connection.
    NoMessage = 2,
    /// Unknown code, preserved as received.
    #[num_enum(catch_all)]
    Other(u8),
}

/// Failover Accepted: indicates if the passive side accepted the alternate path (IBTA 12.6.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum Failover {
    /// The alternate path was accepted or not offered.
    Accepted = 0,
    /// Failover is not supported.
    Unsupported = 1,
    /// The alternate path was rejected.
    Rejected = 2,
    /// Unknown code, preserved as received.
    #[num_enum(catch_all)]
    Other(u8),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cm_timeouts_are_powers_of_two() {
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
    fn codes_round_trip() {
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
    fn fields_reject_oversized_values() {
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
