//! Sense data, used to report errors and other information in one of two wire formats.
//!
//! [`Sense`] is the parsed value. [`Sense::encode`] will create either fixed format (SPC-4 4.5.3)
//! or descriptor format (4.5.2), depending on D_SENSE in the Control mode page. For initiators,
//! [`Sense::parse`] supports both of them.

use std::fmt;

use arrayvec::ArrayVec;
use nom::multi::{length_data, many0};
use nom::number::complete::be_u8;
use nom::{IResult, Parser};
use num_enum::{IntoPrimitive, TryFromPrimitive};

/// Maximum size of encoded sense data, in bytes.
pub const SENSE_MAX: usize = 32;

/// Encoded sense data, in either format.
pub type SenseData = ArrayVec<u8, SENSE_MAX>;

/// SENSE KEY (SPC-4 table 27).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, TryFromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum SenseKey {
    /// NO SENSE: no information available.
    NoSense = 0x0,
    /// RECOVERED ERROR: the command succeeded with recovery.
    RecoveredError = 0x1,
    /// The logical unit cannot be accessed.
    NotReady = 0x2,
    /// The medium is flawed.
    MediumError = 0x3,
    /// HARDWARE ERROR: the device has failed.
    HardwareError = 0x4,
    /// Invalid value in the CDB or a parameter.
    IllegalRequest = 0x5,
    /// The state of the LU was changed by something else.
    UnitAttention = 0x6,
    /// The medium is write protected.
    DataProtect = 0x7,
    /// A blank block was found.
    BlankCheck = 0x8,
    /// VENDOR SPECIFIC: a condition defined by the vendor.
    VendorSpecific = 0x9,
    /// A copy was aborted.
    CopyAborted = 0xa,
    /// The device server aborted the command; it may be retried.
    AbortedCommand = 0xb,
    /// Reached the end of the medium.
    VolumeOverflow = 0xd,
    /// MISCOMPARE: the data is different from the medium.
    Miscompare = 0xe,
    /// The command was successful, with additional sense data.
    Completed = 0xf,
}

impl fmt::Display for SenseKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoSense => "no sense",
            Self::RecoveredError => "recovered error",
            Self::NotReady => "not ready",
            Self::MediumError => "medium error",
            Self::HardwareError => "hardware error",
            Self::IllegalRequest => "illegal request",
            Self::UnitAttention => "unit attention",
            Self::DataProtect => "data protect",
            Self::BlankCheck => "blank check",
            Self::VendorSpecific => "vendor specific",
            Self::CopyAborted => "copy aborted",
            Self::AbortedCommand => "aborted command",
            Self::VolumeOverflow => "volume overflow",
            Self::Miscompare => "miscompare",
            Self::Completed => "completed",
        })
    }
}

/// ADDITIONAL SENSE CODE and its qualifier (SPC-4 table 28).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct AdditionalSense {
    /// ADDITIONAL SENSE CODE, in byte 12 of the fixed format.
    pub code: u8,
    /// ADDITIONAL SENSE CODE QUALIFIER.
    pub qualifier: u8,
}

macro_rules! additional_sense {
    ($(#[doc = $text:literal] $name:ident = $code:literal, $qualifier:literal;)*) => {
        impl AdditionalSense {
            $(#[doc = $text] pub const $name: Self = Self { code: $code, qualifier: $qualifier };)*

            /// Returns the name in SPC-4, if the code is known.
            #[must_use]
            pub fn name(self) -> Option<&'static str> {
                let named: &[(Self, &'static str)] = &[$((Self::$name, $text)),*];
                let (_, text) = named.iter().find(|(sense, _)| *sense == self)?;
                // Anything after a colon is just a note.
                let name = text.split_once(':').map_or(*text, |(name, _)| name);
                Some(name.trim().trim_end_matches('.'))
            }
        }
    };
}

impl fmt::Display for AdditionalSense {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { code, qualifier } = self;
        match self.name() {
            Some(name) => write!(f, "{name} ({code:02x}h/{qualifier:02x}h)"),
            None => write!(f, "additional sense {code:02x}h/{qualifier:02x}h"),
        }
    }
}

additional_sense! {
    /// NO ADDITIONAL SENSE INFORMATION.
    NONE = 0x00, 0x00;
    /// LOGICAL UNIT IS IN PROCESS OF BECOMING READY.
    BECOMING_READY = 0x04, 0x01;
    /// LOGICAL UNIT NOT READY, INITIALIZING COMMAND REQUIRED.
    INITIALIZING_COMMAND_REQUIRED = 0x04, 0x02;
    /// LOGICAL UNIT NOT READY, MANUAL INTERVENTION REQUIRED.
    MANUAL_INTERVENTION_REQUIRED = 0x04, 0x03;
    /// LOGICAL UNIT NOT READY, CAUSE NOT REPORTABLE.
    NOT_READY = 0x04, 0x00;
    /// LOGICAL UNIT COMMUNICATION FAILURE.
    COMMUNICATION_FAILURE = 0x08, 0x00;
    /// WRITE ERROR.
    WRITE_ERROR = 0x0c, 0x00;
    /// WRITE ERROR - UNEXPECTED UNSOLICITED DATA.
    UNEXPECTED_UNSOLICITED_DATA = 0x0c, 0x0c;
    /// WRITE ERROR - NOT ENOUGH UNSOLICITED DATA.
    NOT_ENOUGH_UNSOLICITED_DATA = 0x0c, 0x0d;
    /// INVALID FIELD IN COMMAND INFORMATION UNIT.
    INVALID_FIELD_IN_INFORMATION_UNIT = 0x0e, 0x03;
    /// LOGICAL BLOCK GUARD CHECK FAILED.
    GUARD_CHECK_FAILED = 0x10, 0x01;
    /// LOGICAL BLOCK APPLICATION TAG CHECK FAILED.
    APPLICATION_TAG_CHECK_FAILED = 0x10, 0x02;
    /// LOGICAL BLOCK REFERENCE TAG CHECK FAILED.
    REFERENCE_TAG_CHECK_FAILED = 0x10, 0x03;
    /// UNRECOVERED READ ERROR.
    UNRECOVERED_READ_ERROR = 0x11, 0x00;
    /// READ ERROR - FAILED RETRANSMISSION REQUEST.
    FAILED_RETRANSMISSION_REQUEST = 0x11, 0x13;
    /// PARAMETER LIST LENGTH ERROR.
    PARAMETER_LIST_LENGTH_ERROR = 0x1a, 0x00;
    /// MISCOMPARE DURING VERIFY OPERATION.
    MISCOMPARE_DURING_VERIFY = 0x1d, 0x00;
    /// INVALID COMMAND OPERATION CODE.
    INVALID_OPERATION_CODE = 0x20, 0x00;
    /// LOGICAL BLOCK ADDRESS OUT OF RANGE.
    LBA_OUT_OF_RANGE = 0x21, 0x00;
    /// INVALID FIELD IN CDB.
    INVALID_FIELD_IN_CDB = 0x24, 0x00;
    /// LOGICAL UNIT NOT SUPPORTED.
    LOGICAL_UNIT_NOT_SUPPORTED = 0x25, 0x00;
    /// INVALID FIELD IN PARAMETER LIST.
    INVALID_FIELD_IN_PARAMETER_LIST = 0x26, 0x00;
    /// INVALID RELEASE OF PERSISTENT RESERVATION.
    INVALID_RELEASE = 0x26, 0x04;
    /// WRITE PROTECTED.
    WRITE_PROTECTED = 0x27, 0x00;
    /// LOGICAL UNIT SOFTWARE WRITE PROTECTED.
    SOFTWARE_WRITE_PROTECTED = 0x27, 0x02;
    /// SPACE ALLOCATION FAILED WRITE PROTECT.
    SPACE_ALLOCATION_FAILED = 0x27, 0x07;
    /// POWER ON, RESET, OR BUS DEVICE RESET OCCURRED.
    POWER_ON_OR_RESET = 0x29, 0x00;
    /// BUS DEVICE RESET FUNCTION OCCURRED.
    DEVICE_RESET = 0x29, 0x03;
    /// I_T NEXUS LOSS OCCURRED.
    NEXUS_LOSS = 0x29, 0x07;
    /// MODE PARAMETERS CHANGED: by another nexus.
    MODE_PARAMETERS_CHANGED = 0x2a, 0x01;
    /// RESERVATIONS PREEMPTED: another nexus cleared all registrations.
    RESERVATIONS_PREEMPTED = 0x2a, 0x03;
    /// RESERVATIONS RELEASED: the reservation of another nexus ended.
    RESERVATIONS_RELEASED = 0x2a, 0x04;
    /// REGISTRATIONS PREEMPTED: another nexus removed the registration.
    REGISTRATIONS_PREEMPTED = 0x2a, 0x05;
    /// CAPACITY DATA HAS CHANGED.
    CAPACITY_CHANGED = 0x2a, 0x09;
    /// COMMANDS CLEARED BY ANOTHER INITIATOR.
    COMMANDS_CLEARED = 0x2f, 0x00;
    /// THIN PROVISIONING SOFT THRESHOLD REACHED.
    SOFT_THRESHOLD_REACHED = 0x38, 0x07;
    /// SAVING PARAMETERS NOT SUPPORTED.
    SAVING_NOT_SUPPORTED = 0x39, 0x00;
    /// INQUIRY DATA HAS CHANGED.
    INQUIRY_CHANGED = 0x3f, 0x03;
    /// REPORTED LUNS DATA HAS CHANGED.
    REPORTED_LUNS_CHANGED = 0x3f, 0x0e;
    /// INTERNAL TARGET FAILURE: not the initiator's fault.
    INTERNAL_TARGET_FAILURE = 0x44, 0x00;
    /// PROTOCOL SERVICE CRC ERROR: a digest was wrong.
    PROTOCOL_SERVICE_CRC_ERROR = 0x47, 0x05;
    /// INVALID MESSAGE ERROR: the task attribute is ACA without such an allegiance.
    INVALID_MESSAGE_ERROR = 0x49, 0x00;
    /// DATA PHASE ERROR: data could not be moved to or from the initiator.
    DATA_PHASE_ERROR = 0x4b, 0x00;
    /// OVERLAPPED COMMANDS ATTEMPTED: the tag is in use.
    OVERLAPPED_COMMANDS = 0x4e, 0x00;
    /// INSUFFICIENT RESERVATION RESOURCES: a change cannot be kept.
    INSUFFICIENT_RESERVATION_RESOURCES = 0x55, 0x02;
    /// INSUFFICIENT RESOURCES: no buffer can hold the command's data.
    INSUFFICIENT_RESOURCES = 0x55, 0x03;
    /// INSUFFICIENT REGISTRATION RESOURCES: a registration has no room or cannot be kept.
    INSUFFICIENT_REGISTRATION_RESOURCES = 0x55, 0x04;
}

/// Position of an invalid field (SPC-4 4.5.2.4.2, sense key specific data).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FieldPointer {
    /// Set when the field is in the CDB instead of the parameter list.
    pub in_cdb: bool,
    /// Offset in the CDB or parameter list, starting at 0.
    pub byte: u16,
    /// The most significant bit of the field, if this is not bit 7.
    pub bit: Option<u8>,
}

/// Parsed sense data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sense {
    /// SENSE KEY, 4 bits.
    pub key: SenseKey,
    /// ADDITIONAL SENSE CODE and qualifier.
    pub additional: AdditionalSense,
    /// INFORMATION: an LBA or offset, depending on the command.
    pub information: Option<u64>,
    /// The invalid field, used for ILLEGAL REQUEST.
    pub field: Option<FieldPointer>,
    /// Set for a deferred error. This is for an earlier command which has already returned GOOD,
    /// and the command used to report it has not been executed (SPC-4 4.5). Only used when parsing,
    /// and ignored by [`Self::encode`].
    pub is_deferred: bool,
}

/// The wire format to use (D_SENSE bit).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SenseFormat {
    /// Fixed format, response code 70h, 18 bytes.
    Fixed,
    /// Descriptor format, response code 72h.
    Descriptor,
}

impl Sense {
    /// Creates sense data without any additional fields.
    #[must_use]
    pub const fn new(key: SenseKey, additional: AdditionalSense) -> Self {
        Self {
            key,
            additional,
            information: None,
            field: None,
            is_deferred: false,
        }
    }

    /// Creates NO SENSE, used when there is nothing to report.
    #[must_use]
    pub const fn none() -> Self {
        Self::new(SenseKey::NoSense, AdditionalSense::NONE)
    }

    /// Creates an ILLEGAL REQUEST without a field pointer.
    #[must_use]
    pub const fn illegal(additional: AdditionalSense) -> Self {
        Self::new(SenseKey::IllegalRequest, additional)
    }

    /// Creates an ILLEGAL REQUEST with INVALID FIELD IN CDB, for the field at this byte and bit.
    #[must_use]
    pub const fn cdb_field(byte: u16, bit: Option<u8>) -> Self {
        let mut sense = Self::illegal(AdditionalSense::INVALID_FIELD_IN_CDB);
        sense.field = Some(FieldPointer {
            in_cdb: true,
            byte,
            bit,
        });
        sense
    }

    /// Creates an ILLEGAL REQUEST with INVALID FIELD IN PARAMETER LIST, for the field at this byte
    /// and bit.
    #[must_use]
    pub const fn parameter_field(byte: u16, bit: Option<u8>) -> Self {
        let mut sense = Self::illegal(AdditionalSense::INVALID_FIELD_IN_PARAMETER_LIST);
        sense.field = Some(FieldPointer {
            in_cdb: false,
            byte,
            bit,
        });
        sense
    }

    /// Sets the INFORMATION value.
    #[must_use]
    pub const fn with_information(mut self, information: u64) -> Self {
        self.information = Some(information);
        self
    }

    /// Encodes the sense data in the given format.
    ///
    /// The fixed format uses a 32-bit field for INFORMATION. If the value is larger, VALID is set
    /// to zero as required by SPC-4 4.5.3.
    #[must_use]
    pub fn encode(&self, format: SenseFormat) -> SenseData {
        match format {
            SenseFormat::Fixed => self.encode_fixed(),
            SenseFormat::Descriptor => self.encode_descriptor(),
        }
    }

    fn key_specific(&self) -> [u8; 3] {
        self.field.map_or([0; 3], |field| {
            let bit = field.bit.map_or(0, |bit| 0x08 | (bit & 0x07));
            let [high, low] = field.byte.to_be_bytes();
            [0x80 | if field.in_cdb { 0x40 } else { 0 } | bit, high, low]
        })
    }

    fn encode_fixed(&self) -> SenseData {
        let mut out = [0_u8; 18];
        out[0] = 0x70;
        // If we truncated an LBA, this would be a different block, so only set this if it fits.
        if let Some(Ok(information)) = self.information.map(u32::try_from) {
            out[0] |= 0x80;
            out[3..7].copy_from_slice(&information.to_be_bytes());
        }
        out[2] = self.key.into();
        // ADDITIONAL SENSE LENGTH. We always send all of the 18 bytes.
        out[7] = 10;
        out[12] = self.additional.code;
        out[13] = self.additional.qualifier;
        out[15..18].copy_from_slice(&self.key_specific());
        out.into_iter().collect()
    }

    fn encode_descriptor(&self) -> SenseData {
        let mut out = SenseData::new();
        out.extend([
            0x72,
            self.key.into(),
            self.additional.code,
            self.additional.qualifier,
        ]);
        out.extend([0; 4]);
        if let Some(information) = self.information {
            out.extend([INFORMATION, 0x0a, 0x80, 0x00]);
            out.extend(information.to_be_bytes());
        }
        if self.field.is_some() {
            out.extend([KEY_SPECIFIC, 0x06, 0x00, 0x00]);
            out.extend(self.key_specific());
            out.push(0);
        }
        // Set this last, because we don't know the number of descriptors before.
        out[7] = (out.len() - 8) as u8;
        out
    }

    /// Parses sense data in either format, for both current and deferred errors.
    ///
    /// Returns `None` if there are not enough bytes, or if the response code is unknown.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (sense, is_deferred) = match bytes.first()? & 0x7f {
            code @ (0x70 | 0x71) => (Self::parse_fixed(bytes)?, code == 0x71),
            code @ (0x72 | 0x73) => (Self::parse_descriptor(bytes)?, code == 0x73),
            _ => return None,
        };
        Some(Self {
            is_deferred,
            ..sense
        })
    }

    /// Returns whether the command that has returned this was successful. NO SENSE and RECOVERED
    /// ERROR are used for commands that were executed (SPC-4 table 48), unless this is a deferred
    /// error.
    #[must_use]
    pub fn is_success(&self) -> bool {
        !self.is_deferred && self.is_harmless()
    }

    /// Returns whether a previous command failed after it had already returned GOOD.
    #[must_use]
    pub fn is_deferred_failure(&self) -> bool {
        self.is_deferred && !self.is_harmless()
    }

    fn is_harmless(&self) -> bool {
        matches!(self.key, SenseKey::NoSense | SenseKey::RecoveredError)
    }

    fn parse_fixed(bytes: &[u8]) -> Option<Self> {
        let key = SenseKey::try_from(bytes.get(2)? & 0x0f).ok()?;
        let additional = AdditionalSense {
            // A target may truncate sense data after the key. We use zero for missing bytes,
            // because it's still useful to know the key.
            code: bytes.get(12).copied().unwrap_or(0),
            qualifier: bytes.get(13).copied().unwrap_or(0),
        };
        let information = (bytes[0] & 0x80 != 0)
            .then(|| bytes.get(3..7))
            .flatten()
            .and_then(|field| field.try_into().ok())
            .map(|field| u64::from(u32::from_be_bytes(field)));
        // For other keys these bytes have a different format, e.g. for the progress of a FORMAT
        // UNIT.
        let field = (key == SenseKey::IllegalRequest)
            .then(|| bytes.get(15..18).and_then(parse_field_pointer))
            .flatten();
        Some(Self {
            key,
            additional,
            information,
            field,
            is_deferred: false,
        })
    }

    fn parse_descriptor(bytes: &[u8]) -> Option<Self> {
        let key = SenseKey::try_from(bytes.get(1)? & 0x0f).ok()?;
        let additional = AdditionalSense {
            code: *bytes.get(2)?,
            qualifier: *bytes.get(3)?,
        };
        let mut sense = Self::new(key, additional);
        let declared = 8 + usize::from(*bytes.get(7)?);
        // The length may be more than the target has sent, or less than we have received.
        let list = &bytes[8..declared.min(bytes.len())];
        let (_, descriptors) = many0(descriptor).parse(list).ok()?;
        for (kind, body) in descriptors {
            match kind {
                INFORMATION if body.len() >= 10 && body[0] & 0x80 != 0 => {
                    sense.information = body[2..10].try_into().ok().map(u64::from_be_bytes);
                }
                KEY_SPECIFIC if body.len() >= 5 && key == SenseKey::IllegalRequest => {
                    sense.field = parse_field_pointer(&body[2..5]);
                }
                _ => {}
            }
        }
        Some(sense)
    }
}

/// DESCRIPTOR TYPE values for sense data (SPC-4 4.5.2.1).
const INFORMATION: u8 = 0x00;
const KEY_SPECIFIC: u8 = 0x02;

/// Returns the type and contents of a sense data descriptor, if it is complete.
///
/// This must use `parse_complete`. Otherwise, `length_data` would request more data for a truncated
/// descriptor, and `parse` would fail instead of returning the previous descriptors.
fn descriptor(data: &[u8]) -> IResult<&[u8], (u8, &[u8]), ()> {
    (be_u8, length_data(be_u8)).parse_complete(data)
}

fn parse_field_pointer(bytes: &[u8]) -> Option<FieldPointer> {
    let &[flags, high, low] = bytes else {
        return None;
    };
    (flags & 0x80 != 0).then(|| FieldPointer {
        in_cdb: flags & 0x40 != 0,
        byte: u16::from_be_bytes([high, low]),
        bit: (flags & 0x08 != 0).then_some(flags & 0x07),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixed_format_encodes_cdb_field() {
        let sense = Sense::cdb_field(2, Some(3)).encode(SenseFormat::Fixed);
        assert_eq!(
            sense.as_slice(),
            [
                0x70, 0, 0x05, 0, 0, 0, 0, 10, // response code, key, additional length
                0, 0, 0, 0, 0x24, 0x00, 0, // INVALID FIELD IN CDB
                0xcb, 0x00, 0x02, // SKSV, C/D, BPV, bit 3, byte 2
            ]
        );
    }

    #[test]
    fn descriptor_format_encodes_64bit_information() {
        let sense = Sense::new(
            SenseKey::MediumError,
            AdditionalSense::UNRECOVERED_READ_ERROR,
        )
        .with_information(0x1_0000_0002);
        assert_eq!(
            sense.encode(SenseFormat::Descriptor).as_slice(),
            [
                0x72, 0x03, 0x11, 0x00, 0, 0, 0, 12, // header
                0x00, 0x0a, 0x80, 0x00, 0, 0, 0, 1, 0, 0, 0, 2, // information descriptor
            ]
        );
        // This value is too large for the fixed format, so VALID should be zero.
        let fixed = sense.encode(SenseFormat::Fixed);
        assert_eq!(fixed[0], 0x70);
        assert_eq!(&fixed[3..7], [0; 4]);
    }

    #[test]
    fn sense_formats_roundtrip() {
        for format in [SenseFormat::Fixed, SenseFormat::Descriptor] {
            for sense in [
                Sense::none(),
                Sense::parameter_field(300, None),
                Sense::cdb_field(1, Some(7)),
                Sense::new(
                    SenseKey::Miscompare,
                    AdditionalSense::MISCOMPARE_DURING_VERIFY,
                )
                .with_information(513),
            ] {
                assert_eq!(Sense::parse(&sense.encode(format)), Some(sense));
            }
        }
        assert_eq!(Sense::parse(&[]), None);
        assert_eq!(Sense::parse(&[0x7f, 0, 0, 0]), None);
        assert_eq!(Sense::parse(&[0x72, 5, 0x24]), None);
    }

    #[test]
    fn deferred_and_current_errors_differ() {
        for (code, key, is_success, is_failure) in [
            (0x70, 3, false, false),
            (0x71, 3, false, true),
            (0x70, 1, true, false),
            (0x71, 1, false, false),
            (0x70, 0, true, false),
        ] {
            let fixed = [
                code, 0, key, 0, 0, 0, 0, 10, 0, 0, 0, 0, 0x0c, 0, 0, 0, 0, 0,
            ];
            let descriptor = [code + 2, key, 0x0c, 0, 0, 0, 0, 0];
            for bytes in [&fixed[..], &descriptor] {
                let sense = Sense::parse(bytes).unwrap();
                let found = (sense.is_success(), sense.is_deferred_failure());
                assert_eq!(found, (is_success, is_failure), "{bytes:02x?}");
            }
        }
    }

    /// The documentation of each code must start with the name, because this is visible to users.
    #[test]
    fn sense_code_names_match_spc() {
        let names = (0..=u16::MAX).filter_map(|n| {
            let [code, qualifier] = n.to_be_bytes();
            AdditionalSense { code, qualifier }.name()
        });
        let is_name = |name: &&str| {
            name.chars()
                .all(|c| c.is_ascii_uppercase() || " ,-_".contains(c))
        };
        assert_eq!(names.clone().find(|name| !is_name(name)), None);
        assert!(names.count() > 30);
    }

    /// A target or transport may truncate sense data at the allocation length of the initiator
    /// (SPC-4 4.5.1), which can be in the middle of a descriptor.
    #[test]
    fn truncated_descriptor_keeps_previous_descriptors() {
        let whole = Sense::cdb_field(7, None).with_information(513);
        let bytes = whole.encode(SenseFormat::Descriptor);
        let unpointed = Sense {
            field: None,
            ..whole
        };
        for len in 8..bytes.len() {
            let expected = match len {
                // The information descriptor ends at byte 20.
                ..20 => Sense::illegal(AdditionalSense::INVALID_FIELD_IN_CDB),
                _ => unpointed,
            };
            assert_eq!(Sense::parse(&bytes[..len]), Some(expected), "{len} bytes");
        }
        assert_eq!(Sense::parse(&bytes), Some(whole));
    }
}
