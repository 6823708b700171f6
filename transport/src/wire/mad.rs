//! Management datagrams (IBTA 13.4): 256 bytes, of which the first 24 are the
//! header that all classes share.

use thiserror::Error;
use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Length of every MAD in bytes.
pub const MAD_LEN: usize = 256;

/// Bytes after the common header.
pub const MAD_BODY_LEN: usize = MAD_LEN - size_of::<MadHeader>();

/// The only base version.
pub const BASE_VERSION: u8 = 1;

/// A MAD of 256 bytes.
pub type Mad = [u8; MAD_LEN];

/// The common header as it lies on the wire.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct MadHeader {
    base_version: u8,
    class: u8,
    class_version: u8,
    method: u8,
    status: U16,
    class_specific: U16,
    transaction: U64,
    attribute: U16,
    reserved: U16,
    modifier: U32,
}

const _: () = assert!(size_of::<MadHeader>() == 24);

/// Management classes (IBTA 13.4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum MadClass {
    /// Subn: subnet management class, by LIDs. It is spoken on queue pair 0, which RoCE does not
    /// have.
    SubnLid = 0x01,
    /// SubnAdm: subnet administration class.
    SubnetAdm = 0x03,
    /// Perf: performance management class.
    Performance = 0x04,
    /// DevMgt: device management class.
    DeviceMgmt = 0x06,
    /// ComMgt: communication management class.
    ComMgt = 0x07,
    /// Subn: subnet management class, by directed routes.
    SubnDirected = 0x81,
}

/// Methods (IBTA 13.4.5); the top bit says response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum MadMethod {
    /// Get(): read an attribute.
    Get = 0x01,
    /// Set(): write an attribute.
    Set = 0x02,
    /// A datagram with no response at this layer; all CM messages.
    Send = 0x03,
    /// Trap(): notice of an event.
    Trap = 0x05,
    /// Report(): a notice for one that has asked for such ones.
    Report = 0x06,
    /// TrapRepress(): an end to the repetition of a trap.
    TrapRepress = 0x07,
    /// SubnAdmGetTable(): read all records that match (IBTA 15.2.2).
    GetTable = 0x12,
    /// SubnAdmDelete(): remove a record.
    Delete = 0x15,
    /// Response to [`Self::Get`] and [`Self::Set`].
    GetResp = 0x81,
    /// Response to [`Self::Report`].
    ReportResp = 0x86,
    /// Response to [`Self::GetTable`].
    GetTableResp = 0x92,
    /// Response to [`Self::Delete`].
    DeleteResp = 0x95,
}

/// Bit of the methods that are responses, which have no response themselves.
pub const RESPONSE: u8 = 0x80;

/// Status of a response: the codes that all classes share (IBTA 13.4.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum MadStatus {
    /// The request has succeeded.
    Success = 0,
    /// The class, or its version, is not supported.
    BadVersion = 0x0004,
    /// The class has no such method here.
    UnsupportedMethod = 0x0008,
    /// The method is not supported for this attribute.
    UnsupportedAttribute = 0x000c,
    /// A field of the attribute, or the modifier, has a value that is not valid.
    InvalidField = 0x001c,
}

/// ClassPortInfo (IBTA 13.4.8.1), which every class has, of one without redirection and traps.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ClassPortInfo {
    base_version: u8,
    class_version: u8,
    capabilities: U16,
    /// The low 5 bits are the response time, the others further capabilities.
    response_time: U32,
    /// Where requests are redirected to, and where traps go.
    rest: [u8; 64],
}

const _: () = assert!(size_of::<ClassPortInfo>() == 72);

impl ClassPortInfo {
    /// A version of a class with these capabilities that answers within 4.096 µs ×
    /// 2^`response_time`.
    #[must_use]
    pub fn new(class_version: u8, capabilities: u16, response_time: u8) -> Self {
        Self {
            base_version: BASE_VERSION,
            class_version,
            capabilities: U16::new(capabilities),
            response_time: U32::new(u32::from(response_time & 0x1f)),
            rest: [0; 64],
        }
    }
}

/// A transaction id: a response repeats its request's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct TransactionId(pub u64);

/// Reason why bytes are not a MAD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MadError {
    /// The length is not 256 bytes.
    #[error("MAD of {len} bytes")]
    Length {
        /// Number of bytes received.
        len: usize,
    },
    /// Base version other than 1.
    #[error("MAD base version {version}")]
    BaseVersion {
        /// Base version that was received.
        version: u8,
    },
}

impl MadHeader {
    /// A request header with status, class-specific field and modifier zero.
    #[must_use]
    pub fn new(
        class: MadClass,
        class_version: u8,
        method: MadMethod,
        transaction: TransactionId,
        attribute: u16,
    ) -> Self {
        Self {
            base_version: BASE_VERSION,
            class: class as u8,
            class_version,
            method: method as u8,
            status: U16::ZERO,
            class_specific: U16::ZERO,
            transaction: U64::new(transaction.0),
            attribute: U16::new(attribute),
            reserved: U16::ZERO,
            modifier: U32::ZERO,
        }
    }

    /// Split a MAD into header and body.
    pub fn parse(mad: &[u8]) -> Result<(Self, &[u8; MAD_BODY_LEN]), MadError> {
        let error = MadError::Length { len: mad.len() };
        let mad: &Mad = mad.try_into().map_err(|_| error)?;
        let (header, body) = Self::read_from_prefix(mad).map_err(|_| error)?;
        let body = body.try_into().map_err(|_| error)?;
        // A MAD of another base version may be laid out in another way.
        if header.base_version != BASE_VERSION {
            return Err(MadError::BaseVersion {
                version: header.base_version,
            });
        }
        Ok((header, body))
    }

    /// The header of a MAD, of any base version.
    #[must_use]
    pub fn of(mad: &Mad) -> Self {
        let (header, _) = Self::read_from_prefix(mad).expect("a MAD is longer than its header");
        header
    }

    /// With a status, as in a response.
    #[must_use]
    pub fn with_status(mut self, status: u16) -> Self {
        self.status = U16::new(status);
        self
    }

    /// Header of the response: the same, with the method's response and a status. Set() is answered
    /// like Get() (IBTA 13.4.5).
    #[must_use]
    pub fn response(self, status: MadStatus) -> Self {
        let method = match self.method {
            set if set == MadMethod::Set as u8 => MadMethod::GetResp as u8,
            method => method | RESPONSE,
        };
        Self { method, ..self }.with_status(status as u16)
    }

    /// With an attribute modifier.
    #[must_use]
    pub fn with_modifier(mut self, modifier: u32) -> Self {
        self.modifier = U32::new(modifier);
        self
    }

    /// Base version as received.
    #[must_use]
    pub fn base_version(&self) -> u8 {
        self.base_version
    }

    /// Field of the class beside the status: hop pointer and hop count of a directed route.
    #[must_use]
    pub fn class_specific(&self) -> u16 {
        self.class_specific.get()
    }

    /// Management class as received.
    #[must_use]
    pub fn class(&self) -> u8 {
        self.class
    }

    /// Version of the class.
    #[must_use]
    pub fn class_version(&self) -> u8 {
        self.class_version
    }

    /// Method as received, response bit included.
    #[must_use]
    pub fn method(&self) -> u8 {
        self.method
    }

    /// Status; 0 is success.
    #[must_use]
    pub fn status(&self) -> u16 {
        self.status.get()
    }

    /// TransactionID, which answers repeat.
    #[must_use]
    pub fn transaction(&self) -> TransactionId {
        TransactionId(self.transaction.get())
    }

    /// AttributeID of the MAD.
    #[must_use]
    pub fn attribute(&self) -> u16 {
        self.attribute.get()
    }

    /// AttributeModifier of the MAD.
    #[must_use]
    pub fn modifier(&self) -> u32 {
        self.modifier.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_has_the_bytes_of_the_specification() {
        let header = MadHeader::new(
            MadClass::ComMgt,
            2,
            MadMethod::Send,
            TransactionId(0x0102_0304_0506_0708),
            0x0010,
        );
        let expected = [
            1, 7, 2, 3, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0x10, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(header.as_bytes(), expected);
        let mut mad = [0; 256];
        mad[..24].copy_from_slice(&expected);
        assert_eq!(MadHeader::parse(&mad).unwrap().0, header);
        assert_eq!(
            MadHeader::parse(&mad[..255]),
            Err(MadError::Length { len: 255 })
        );
        mad[0] = 2;
        assert_eq!(
            MadHeader::parse(&mad),
            Err(MadError::BaseVersion { version: 2 })
        );
    }

    #[test]
    fn a_class_says_what_it_can_and_how_fast() {
        let info = ClassPortInfo::new(2, 0x0300, 18);
        let mut expected = [0; 72];
        expected[..8].copy_from_slice(&[1, 2, 0x03, 0x00, 0, 0, 0, 18]);
        assert_eq!(info.as_bytes(), expected);
    }
}
