//! MADs of subnet administration (IBTA 15.2) and their records.
//!
//! A MAD has 256 bytes: the common header (24 bytes), the RMPP header (12), the SM_Key, record
//! length and component mask (20), and 200 bytes of data. Longer responses consist of several MADs
//! ([`super::rmpp`]). Each bit of the component mask selects one field of the record in a request.
//! Any value matches a field that is not selected.
//!
//! | module | attributes |
//! | --- | --- |
//! | [`path`] | PathRecord |
//! | [`service`] | ServiceRecord |
//! | [`mcmember`] | MCMemberRecord |
//! | [`inform`] | InformInfo, InformInfoRecord and Notice |
//! | [`node`] | NodeRecord, PortInfoRecord and ClassPortInfo |

pub mod inform;
pub mod mcmember;
pub mod node;
pub mod path;
pub mod service;

use bitflags::Flags;
use riser_transport::wire::mad::{MadClass, MadError, MadMethod};
use riser_transport::wire::{MAD_LEN, Mad, MadHeader, TransactionId};
use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Class version.
pub const CLASS_VERSION: u8 = 2;

/// Offset of the RMPP header, in bytes.
pub const RMPP: usize = 24;

/// Offset of the data, in bytes.
pub const DATA: usize = 56;

/// Bytes of data in one MAD.
pub const DATA_LEN: usize = MAD_LEN - DATA;

/// Number of bytes between the RMPP header and the data. RMPP includes them in the payload length.
pub const SA_HEADER_LEN: usize = 20;

/// Identifiers of attributes (IBTA table 155).
pub mod attribute {
    /// ClassPortInfo: versions and capabilities of the class.
    pub const CLASS_PORT_INFO: u16 = 0x0001;
    /// Notice: an event.
    pub const NOTICE: u16 = 0x0002;
    /// InformInfo: an event subscription.
    pub const INFORM_INFO: u16 = 0x0003;
    /// NodeRecord: a node and its name.
    pub const NODE_RECORD: u16 = 0x0011;
    /// PortInfoRecord: a port.
    pub const PORT_INFO_RECORD: u16 = 0x0012;
    /// ServiceRecord: a service and its location.
    pub const SERVICE_RECORD: u16 = 0x0031;
    /// PathRecord: a path between two ports.
    pub const PATH_RECORD: u16 = 0x0035;
    /// MCMemberRecord: a multicast group and its members.
    pub const MC_MEMBER_RECORD: u16 = 0x0038;
    /// InformInfoRecord: a subscription and its owner.
    pub const INFORM_INFO_RECORD: u16 = 0x00f3;
}

/// RMPP header (IBTA 13.6.2.1).
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct RmppHeader {
    /// Version: 1, or 0 in MADs without RMPP.
    pub version: u8,
    /// Packet type ([`rmpp_type`]).
    pub rmpp_type: u8,
    /// RRespTime in the high 5 bits (31 if unspecified), followed by [`rmpp_flags`].
    pub time_and_flags: u8,
    /// Reason for an aborted transfer.
    pub status: u8,
    /// Segment number, starting at 1. In an ACK, the last segment received in order.
    pub segment: U32,
    /// Payload length. In the first segment, the total number of bytes after this header; in the
    /// last segment, its own. In an ACK, the last segment of the window.
    pub length_or_window: U32,
}

/// Returns whether all components selected by the mask match.
pub(super) fn all_match<M: Flags + Copy>(mask: M, components: &[(M, bool)]) -> bool {
    let mut components = components.iter();
    components.all(|(bit, same)| *same || !mask.contains(*bit))
}

/// RMPP packet types (IBTA table 29).
pub mod rmpp_type {
    /// DATA: a segment.
    pub const DATA: u8 = 1;
    /// ACK: acknowledges received segments.
    pub const ACK: u8 = 2;
    /// STOP: the receiver terminates the transfer.
    pub const STOP: u8 = 3;
    /// ABORT: either side terminates the transfer.
    pub const ABORT: u8 = 4;
}

/// RMPP packet flags (IBTA 13.6.2.1).
pub mod rmpp_flags {
    /// The MAD is part of a transfer.
    pub const ACTIVE: u8 = 1;
    /// First segment.
    pub const FIRST: u8 = 2;
    /// Last segment.
    pub const LAST: u8 = 4;
}

/// RMPP version.
pub const RMPP_VERSION: u8 = 1;

/// Unspecified RRespTime.
pub const NO_RESPONSE_TIME: u8 = 31 << 3;

impl RmppHeader {
    /// Returns whether the MAD is part of a transfer.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.has(rmpp_flags::ACTIVE)
    }

    /// Returns whether a flag is set.
    #[must_use]
    pub fn has(&self, flag: u8) -> bool {
        self.time_and_flags & flag != 0
    }
}

/// All headers of a subnet-administration MAD (IBTA 15.2.1.1).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct SaHeader {
    /// Common header.
    pub mad: MadHeader,
    /// RMPP header.
    pub rmpp: RmppHeader,
    /// Key that authenticates a request to the subnet manager; 0 if unused.
    pub sm_key: U64,
    /// Length of each record in a response, including padding, in units of 8 bytes.
    pub attribute_offset: U16,
    /// Zero on the wire.
    pub reserved: U16,
    /// Fields selected by the request.
    pub component_mask: U64,
}

const _: () = assert!(size_of::<SaHeader>() == DATA);

/// Class-specific status of a response (IBTA table 154), in the upper byte of the common status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum SaStatus {
    /// ERR_NO_RESOURCES: a limit of the administrator is exceeded.
    NoResources = 0x0100,
    /// ERR_REQ_INVALID: the request is invalid.
    ReqInvalid = 0x0200,
    /// ERR_NO_RECORDS: no record matches.
    NoRecords = 0x0300,
    /// ERR_TOO_MANY_RECORDS: more than one record matches a Get.
    TooManyRecords = 0x0400,
    /// ERR_REQ_INVALID_GID: the requester does not own the GID.
    InvalidGid = 0x0500,
    /// ERR_REQ_INSUFFICIENT_COMPONENTS: a required field is missing.
    InsufficientComponents = 0x0600,
    /// ERR_REQ_DENIED: the requester is not authorized.
    Denied = 0x0700,
}

/// Subnet-administration methods that have a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum SaMethod {
    /// SubnAdmGet(): returns the only matching record.
    Get = MadMethod::Get as u8,
    /// SubnAdmSet(): creates or updates a record.
    Set = MadMethod::Set as u8,
    /// SubnAdmGetTable(): returns all matching records.
    GetTable = MadMethod::GetTable as u8,
    /// SubnAdmDelete(): removes a record.
    Delete = MadMethod::Delete as u8,
}

impl SaMethod {
    /// Returns the common method.
    #[must_use]
    pub fn mad_method(self) -> MadMethod {
        match self {
            Self::Get => MadMethod::Get,
            Self::Set => MadMethod::Set,
            Self::GetTable => MadMethod::GetTable,
            Self::Delete => MadMethod::Delete,
        }
    }

    /// Converts a method number. Returns `None` for any other method.
    #[must_use]
    pub fn of(method: u8) -> Option<Self> {
        let all = [Self::Get, Self::Set, Self::GetTable, Self::Delete];
        all.into_iter().find(|known| *known as u8 == method)
    }
}

impl SaHeader {
    /// Creates the header of a request or of another MAD without RMPP.
    #[must_use]
    pub fn new(
        method: MadMethod,
        attribute: u16,
        transaction: TransactionId,
        component_mask: u64,
    ) -> Self {
        Self {
            mad: MadHeader::new(
                MadClass::SubnetAdm,
                CLASS_VERSION,
                method,
                transaction,
                attribute,
            ),
            rmpp: RmppHeader::default(),
            sm_key: U64::ZERO,
            attribute_offset: U16::ZERO,
            reserved: U16::ZERO,
            component_mask: U64::new(component_mask),
        }
    }

    /// Splits a MAD into header and data.
    ///
    /// # Errors
    /// Returns the errors of [`MadHeader::parse`].
    pub fn parse(mad: &[u8]) -> Result<(Self, &[u8; DATA_LEN]), MadError> {
        MadHeader::parse(mad)?;
        let error = MadError::Length { len: mad.len() };
        let (header, data) = Self::read_from_prefix(mad).map_err(|_| error)?;
        Ok((header, data.try_into().map_err(|_| error)?))
    }

    /// Builds a MAD with the first 200 bytes of `data`.
    #[must_use]
    pub fn emit(&self, data: &[u8]) -> Mad {
        let mut mad = [0; MAD_LEN];
        mad[..DATA].copy_from_slice(self.as_bytes());
        let len = data.len().min(DATA_LEN);
        mad[DATA..DATA + len].copy_from_slice(&data[..len]);
        mad
    }
}

/// Record of subnet administration.
pub trait Record: FromBytes + IntoBytes + Immutable + KnownLayout + Unaligned + Copy {
    /// Attribute identifier.
    const ATTRIBUTE: u16;

    /// Length in units of 8 bytes, including padding.
    const WORDS: u16 = size_of::<Self>().div_ceil(8) as u16;

    /// Parses the record at the start of `data`. Returns `None` if it is truncated.
    #[must_use]
    fn read(data: &[u8]) -> Option<Self> {
        Self::read_from_prefix(data).ok().map(|(record, _)| record)
    }

    /// Parses the records of a response, at intervals of `words` × 8 bytes. Truncated records are
    /// skipped; nothing is returned if the interval is shorter than a record.
    fn read_all(data: &[u8], words: u16) -> impl Iterator<Item = Self> {
        let stride = usize::from(words) * 8;
        let stride = if stride < size_of::<Self>() {
            usize::MAX
        } else {
            stride
        };
        let all = data
            .chunks(stride)
            .take_while(move |_| stride != usize::MAX);
        all.filter_map(Self::read)
    }

    /// Appends the padded record to `data`.
    fn append(&self, data: &mut Vec<u8>) {
        let end = data.len() + usize::from(Self::WORDS) * 8;
        data.extend(self.as_bytes());
        data.resize(end, 0);
    }
}

/// Comparison operator of a limit, in its top two bits (IBTA 15.2.5.16).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Selector {
    /// Greater than the value.
    Greater = 0,
    /// Less than the value.
    Less = 1,
    /// Equal to the value.
    Exactly = 2,
    /// Best available value: the largest MTU or rate, or the smallest life time.
    Best = 3,
}

/// Limit: a 6-bit code with its selector.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(transparent)]
pub struct Limit(pub u8);

impl Limit {
    /// Creates a limit.
    #[must_use]
    pub fn new(selector: Selector, code: u8) -> Self {
        Self((selector as u8) << 6 | code & 0x3f)
    }

    /// Returns the code.
    #[must_use]
    pub fn code(self) -> u8 {
        self.0 & 0x3f
    }

    /// Returns the comparison operator.
    #[must_use]
    pub fn selector(self) -> Selector {
        match self.0 >> 6 {
            0 => Selector::Greater,
            1 => Selector::Less,
            2 => Selector::Exactly,
            _ => Selector::Best,
        }
    }

    /// Returns whether `code` satisfies the limit. A limit without a selector requires an exact
    /// match.
    #[must_use]
    pub fn admits(self, has_selector: bool, code: u8) -> bool {
        match self.selector() {
            _ if !has_selector => code == self.code(),
            Selector::Greater => code > self.code(),
            Selector::Less => code < self.code(),
            Selector::Exactly => code == self.code(),
            Selector::Best => true,
        }
    }
}

/// Builds a word of 4, 20 and 8 bits, such as service level, flow label and hop limit.
pub(crate) fn word(high: u8, middle: u32, low: u8) -> U32 {
    U32::new(u32::from(high) << 28 | (middle & 0x000f_ffff) << 8 | u32::from(low))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_matches_ibacm() {
        // struct ib_sa_mad of ibacm's acm_mad.h: SubnAdmGet(PathRecord) by DGID and SGID.
        let transaction = TransactionId(0x0041_0000_0002);
        let header = SaHeader::new(MadMethod::Get, 0x35, transaction, 0x0c);
        let mad = header.emit(&[0x5a; 300]);
        let mut expected = vec![1, 3, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0x41, 0, 0, 0, 2, 0, 0x35];
        expected.resize(55, 0);
        expected.push(0x0c);
        expected.resize(256, 0x5a);
        assert_eq!(mad[..], expected);
        let (parsed, data) = SaHeader::parse(&mad).unwrap();
        assert_eq!((parsed, *data), (header, [0x5a; 200]));
        assert!(!parsed.rmpp.is_active());
        assert!(SaHeader::parse(&mad[..255]).is_err());
    }

    #[test]
    fn header_layout_matches_opensm() {
        // ib_sa_mad_t of opensm's <iba/ib_types.h>.
        let header = SaHeader {
            rmpp: RmppHeader {
                version: 1,
                rmpp_type: rmpp_type::DATA,
                time_and_flags: NO_RESPONSE_TIME | rmpp_flags::ACTIVE | rmpp_flags::FIRST,
                status: 2,
                segment: U32::new(0x0304_0506),
                length_or_window: U32::new(0x0708_090a),
            },
            sm_key: U64::new(0x1112_1314_1516_1718),
            attribute_offset: U16::new(0x2122),
            component_mask: U64::new(0x3132_3334_3536_3738),
            ..SaHeader::new(MadMethod::GetTableResp, 0x11, TransactionId(0), 0)
        };
        let expected = [
            1, 1, 0xfb, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18,
            0x21, 0x22, 0, 0, 0x31, 0x32, 0x33, 0x34, 0x35, 0x36, 0x37, 0x38,
        ];
        assert_eq!(header.as_bytes()[RMPP..], expected);
        assert_eq!(header.mad.method(), 0x92);
    }

    #[test]
    fn limits_are_compared_as_their_selectors_say() {
        // The top two bits contain the selector.
        assert_eq!(Limit::new(Selector::Exactly, 5).0, 0x85);
        assert_eq!(Limit(0xc3).selector(), Selector::Best);
        for (limit, admitted) in [
            (Limit(0x03), [false, false, true]),
            (Limit(0x43), [true, false, false]),
            (Limit(0x83), [false, true, false]),
            (Limit(0xc3), [true, true, true]),
        ] {
            let got = [2, 3, 4].map(|code| limit.admits(true, code));
            assert_eq!(got, admitted, "{limit:?}");
            // An unselected selector means an exact match.
            let got = [2, 3, 4].map(|code| limit.admits(false, code));
            assert_eq!(got, [false, true, false], "{limit:?}");
        }
    }
}
