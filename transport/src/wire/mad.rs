//! Management datagrams (IBTA 13.4). These are 256 bytes long, and the first 24 bytes are a header
//! common to all classes.

use thiserror::Error;
use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Size of a MAD in bytes.
pub const MAD_LEN: usize = 256;

/// Number of bytes following the common header.
pub const MAD_BODY_LEN: usize = MAD_LEN - size_of::<MadHeader>();

/// Supported base version.
pub const BASE_VERSION: u8 = 1;

/// Complete MAD of 256 bytes.
pub type Mad = [u8; MAD_LEN];

/// Common MAD header in wire format.
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
    /// Subn: LID-routed subnet management class. This uses queue pair 0, which does not exist on
    /// RoCE.
    SubnLid = 0x01,
    /// SubnAdm: subnet administration class.
    SubnetAdm = 0x03,
    /// Perf: performance management class.
    Performance = 0x04,
    /// DevMgt: device management class.
    DeviceMgmt = 0x06,
    /// ComMgt: communication management class.
    ComMgt = 0x07,
    /// Subn: directed-route subnet management class.
    SubnDirected = 0x81,
}

/// Methods (IBTA 13.4.5). The top bit is set in a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum MadMethod {
    /// Get(): read an attribute.
    Get = 0x01,
    /// Set(): write an attribute.
    Set = 0x02,
    /// Send(): a datagram without a response at this layer. Used for all CM messages.
    Send = 0x03,
    /// Trap(): event notice.
    Trap = 0x05,
    /// Report(): notice forwarded to a subscriber.
    Report = 0x06,
    /// TrapRepress(): stops the repetition of a trap.
    TrapRepress = 0x07,
    /// SubnAdmGetTable(): reads all matching records (IBTA 15.2.2).
    GetTable = 0x12,
    /// SubnAdmDelete(): removes a record.
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

/// Set in methods that are responses, which must not be responded to.
pub const RESPONSE: u8 = 0x80;

/// Response status codes common to all classes (IBTA 13.4.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum MadStatus {
    /// The request succeeded.
    Success = 0,
    /// The class or class version is not supported.
    BadVersion = 0x0004,
    /// The method is not supported.
    UnsupportedMethod = 0x0008,
    /// The method is not supported for this attribute.
    UnsupportedAttribute = 0x000c,
    /// The modifier or an attribute field has an invalid value.
    InvalidField = 0x001c,
}

/// ClassPortInfo (IBTA 13.4.8.1), which is supported by all classes, without redirection and traps.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct ClassPortInfo {
    base_version: u8,
    class_version: u8,
    capabilities: U16,
    /// The low 5 bits are the response time, and the rest are additional capabilities.
    response_time: U32,
    /// Addresses for redirected requests and traps.
    rest: [u8; 64],
}

const _: () = assert!(size_of::<ClassPortInfo>() == 72);

impl ClassPortInfo {
    /// Creates the attribute for a class version with these capabilities and a maximum response
    /// time of 4.096 µs × 2^`response_time`.
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

/// Transaction ID, which must be copied from a request to its response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct TransactionId(pub u64);

/// Error returned for data that is not a MAD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum MadError {
    /// The length is not 256 bytes.
    #[error("invalid MAD length {len}")]
    Length {
        /// Number of bytes received.
        len: usize,
    },
    /// The base version is not 1.
    #[error("unsupported MAD base version {version}")]
    BaseVersion {
        /// Base version received.
        version: u8,
    },
}

impl MadHeader {
    /// Creates a request header with status, class-specific field and modifier set to zero.
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

    /// Splits a MAD into header and body.
    pub fn parse(mad: &[u8]) -> Result<(Self, &[u8; MAD_BODY_LEN]), MadError> {
        let error = MadError::Length { len: mad.len() };
        let mad: &Mad = mad.try_into().map_err(|_| error)?;
        let (header, body) = Self::read_from_prefix(mad).map_err(|_| error)?;
        let body = body.try_into().map_err(|_| error)?;
        // MADs with a different base version could use a different layout.
        if header.base_version != BASE_VERSION {
            return Err(MadError::BaseVersion {
                version: header.base_version,
            });
        }
        Ok((header, body))
    }

    /// Returns the header of a MAD with any base version.
    #[must_use]
    pub fn of(mad: &Mad) -> Self {
        let (header, _) = Self::read_from_prefix(mad).expect("a MAD is longer than its header");
        header
    }

    /// Sets the response status.
    #[must_use]
    pub fn with_status(mut self, status: u16) -> Self {
        self.status = U16::new(status);
        self
    }

    /// Returns the response header: a copy with the corresponding response method and a new status.
    /// Note that Get() and Set() use the same response method (IBTA 13.4.5).
    #[must_use]
    pub fn response(self, status: MadStatus) -> Self {
        let method = match self.method {
            set if set == MadMethod::Set as u8 => MadMethod::GetResp as u8,
            method => method | RESPONSE,
        };
        Self { method, ..self }.with_status(status as u16)
    }

    /// Sets the attribute modifier.
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

    /// Class-specific field next to the status: hop pointer and hop count for a directed route.
    #[must_use]
    pub fn class_specific(&self) -> u16 {
        self.class_specific.get()
    }

    /// Management class as received.
    #[must_use]
    pub fn class(&self) -> u8 {
        self.class
    }

    /// Class version.
    #[must_use]
    pub fn class_version(&self) -> u8 {
        self.class_version
    }

    /// Method as received, including the response bit.
    #[must_use]
    pub fn method(&self) -> u8 {
        self.method
    }

    /// Status; 0 is success.
    #[must_use]
    pub fn status(&self) -> u16 {
        self.status.get()
    }

    /// Transaction ID, which must be copied to the response.
    #[must_use]
    pub fn transaction(&self) -> TransactionId {
        TransactionId(self.transaction.get())
    }

    /// Attribute ID.
    #[must_use]
    pub fn attribute(&self) -> u16 {
        self.attribute.get()
    }

    /// Attribute modifier.
    #[must_use]
    pub fn modifier(&self) -> u32 {
        self.modifier.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mad_header_matches_specification_bytes() {
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
    fn class_port_info_matches_specification_bytes() {
        let info = ClassPortInfo::new(2, 0x0300, 18);
        let mut expected = [0; 72];
        expected[..8].copy_from_slice(&[1, 2, 0x03, 0x00, 0, 0, 0, 18]);
        assert_eq!(info.as_bytes(), expected);
    }
}
