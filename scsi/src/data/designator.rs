//! Names of logical units and ports, and the designation descriptors in VPD page 83h (SPC-4 7.8.6).

use std::fmt;

use nom::bytes::complete::take;
use nom::combinator::map;
use nom::multi::many0;
use nom::number::complete::be_u32;
use nom::{IResult, Parser};

/// NAA identifier of a logical unit (SPC-4 7.8.6.6).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Naa {
    /// NAA 6h, IEEE Registered Extended: 16 bytes on the wire.
    RegisteredExtended {
        /// IEEE company identifier, 24 bits.
        company: u32,
        /// Vendor specific identifier, 36 bits.
        vendor_specific: u64,
        /// Vendor specific identifier extension.
        extension: u64,
    },
    /// NAA 3h, Locally Assigned: 8 bytes on the wire.
    LocallyAssigned(
        /// 60 bits, assigned by the administrator.
        u64,
    ),
}

impl Naa {
    pub(crate) fn is_valid(self) -> bool {
        match self {
            Self::RegisteredExtended {
                company,
                vendor_specific,
                ..
            } => company < 1 << 24 && vendor_specific < 1 << 36,
            Self::LocallyAssigned(value) => value < 1 << 60,
        }
    }

    /// Returns the designator as bytes, without the header.
    #[must_use]
    pub fn bytes(self) -> Vec<u8> {
        match self {
            Self::RegisteredExtended {
                company,
                vendor_specific,
                extension,
            } => {
                let first = 6 << 60 | u64::from(company) << 36 | vendor_specific;
                [first.to_be_bytes(), extension.to_be_bytes()].concat()
            }
            Self::LocallyAssigned(value) => (3 << 60 | value).to_be_bytes().to_vec(),
        }
    }
}

impl fmt::Display for Naa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("0x")?;
        let mut bytes = self.bytes().into_iter();
        bytes.try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// PROTOCOL IDENTIFIER for Fibre Channel (SPC-4 7.6.1).
pub const FIBRE_CHANNEL: u8 = 0;
/// PROTOCOL IDENTIFIER for SRP.
pub const SRP: u8 = 4;
/// PROTOCOL IDENTIFIER for iSCSI.
pub const ISCSI: u8 = 5;
/// PROTOCOL IDENTIFIER for SAS.
pub const SAS: u8 = 6;

/// CODE SET (SPC-4 7.8.6.1): binary.
pub const BINARY: u8 = 1;
/// CODE SET: printable ASCII.
pub const ASCII: u8 = 2;
/// CODE SET: UTF-8.
pub const UTF8: u8 = 3;

/// ASSOCIATION (SPC-4 7.8.6.1): the logical unit.
pub const LOGICAL_UNIT: u8 = 0;
/// ASSOCIATION: the target port that has received the command.
pub const TARGET_PORT: u8 = 1;
/// ASSOCIATION: the target device.
pub const TARGET_DEVICE: u8 = 2;

/// DESIGNATOR TYPE (SPC-4 7.8.6.1): vendor specific.
pub const VENDOR_SPECIFIC: u8 = 0;
/// DESIGNATOR TYPE: T10 vendor identification.
pub const T10_VENDOR: u8 = 1;
/// DESIGNATOR TYPE: EUI-64 based.
pub const EUI_64: u8 = 2;
/// DESIGNATOR TYPE: NAA.
pub const NAA: u8 = 3;
/// DESIGNATOR TYPE: relative target port identifier.
pub const RELATIVE_TARGET_PORT: u8 = 4;
/// DESIGNATOR TYPE: target port group.
pub const TARGET_PORT_GROUP: u8 = 5;
/// DESIGNATOR TYPE: logical unit group.
pub const LOGICAL_UNIT_GROUP: u8 = 6;
/// DESIGNATOR TYPE: MD5 logical unit identifier.
pub const MD5: u8 = 7;
/// DESIGNATOR TYPE: SCSI name string.
pub const SCSI_NAME_STRING: u8 = 8;

/// A designation descriptor (SPC-4 7.8.6.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Designator<'a> {
    /// PROTOCOL IDENTIFIER, if PIV is set.
    pub protocol: Option<u8>,
    /// CODE SET of the designator, 4 bits.
    pub code_set: u8,
    /// ASSOCIATION of the designator, 2 bits.
    pub association: u8,
    /// DESIGNATOR TYPE, 4 bits.
    pub kind: u8,
    /// DESIGNATOR, which may be truncated.
    pub id: &'a [u8],
    /// Set when the designator is not truncated.
    pub is_whole: bool,
}

const PIV: u8 = 0x80;

impl<'a> Designator<'a> {
    /// Creates a new designator to be sent.
    pub(crate) fn new(code_set: u8, association: u8, kind: u8, id: &'a [u8]) -> Self {
        Self {
            protocol: None,
            code_set,
            association,
            kind,
            id,
            is_whole: true,
        }
    }

    /// Sets the protocol of the port or device.
    pub(crate) fn of_protocol(self, protocol: u8) -> Self {
        Self {
            protocol: Some(protocol),
            ..self
        }
    }

    /// Appends the descriptor to `out`.
    ///
    /// # Panics
    /// If the designator is longer than 255 bytes.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let piv = self.protocol.map_or(0, |_| PIV);
        let len = u8::try_from(self.id.len()).expect("designator fits into a descriptor");
        out.extend([
            self.protocol.unwrap_or(0) << 4 | self.code_set,
            piv | self.association << 4 | self.kind,
            0,
            len,
        ]);
        out.extend_from_slice(self.id);
    }

    fn parse(data: &'a [u8]) -> IResult<&'a [u8], Self, ()> {
        let (data, [first, second, _, len]) = header(data)?;
        let declared = usize::from(len);
        // The last descriptor may be truncated at the initiator's ALLOCATION LENGTH. It's still
        // useful to show the first part of a name, so return it and mark it as truncated.
        let (data, id) = take(declared.min(data.len()))(data)?;
        let designator = Self {
            protocol: (second & PIV != 0).then_some(first >> 4),
            code_set: first & 0x0f,
            association: second >> 4 & 0b11,
            kind: second & 0x0f,
            id,
            is_whole: id.len() == declared,
        };
        Ok((data, designator))
    }
}

fn header(data: &[u8]) -> IResult<&[u8], [u8; 4], ()> {
    map(be_u32, u32::to_be_bytes).parse(data)
}

/// Parses the designation descriptors in the body of VPD page 83h. The last descriptor may be
/// truncated.
pub fn parse(body: &[u8]) -> Vec<Designator<'_>> {
    let parsed = many0(Designator::parse).parse(body);
    parsed
        .map(|(_, designators)| designators)
        .unwrap_or_default()
}

/// Returns a SCSI name string. This is UTF-8, terminated with zero and padded to a multiple of 4
/// bytes (SPC-4 7.8.6).
pub(crate) fn scsi_name_string(name: &str) -> Vec<u8> {
    let mut bytes = name.as_bytes().to_vec();
    // With the zero byte and padding, this must fit into a descriptor with a 1-byte length.
    bytes.truncate(248);
    bytes.push(0);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn designators_roundtrip_with_truncated_last() {
        assert_eq!(Naa::LocallyAssigned(7).to_string(), "0x3000000000000007");
        let naa = Naa::LocallyAssigned(7).bytes();
        let sent = [
            Designator::new(BINARY, LOGICAL_UNIT, NAA, &naa),
            Designator::new(UTF8, TARGET_DEVICE, SCSI_NAME_STRING, b"iqn.a\0\0\0")
                .of_protocol(ISCSI),
        ];
        let mut body = Vec::new();
        sent.iter().for_each(|one| one.encode(&mut body));
        assert_eq!(parse(&body), sent);
        let cut = &body[..body.len() - 3];
        let last = parse(cut)[1];
        assert_eq!((last.id, last.is_whole), (&b"iqn.a"[..], false));
        assert_eq!(parse(&body[..15]).len(), 1, "incomplete header is ignored");
        assert_eq!(parse(&[]), []);
    }
}
