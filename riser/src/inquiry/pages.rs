//! INQUIRY data as named fields.
//!
//! Pages with only numbers and flags are tables of fields; each other page has a function. Fields
//! beyond the received bytes are omitted.

use riser_scsi::data::designator::{self, Designator};
use riser_scsi::data::field::Field;
use riser_scsi::data::inquiry;
use riser_scsi::data::vpd::{self, block_limits, characteristics, extended_inquiry, provisioning};
use thiserror::Error;

use super::fields::{Fields, Value};

/// Error for invalid INQUIRY data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum InquiryError {
    /// Shorter than the mandatory part.
    #[error("INQUIRY data is {0} bytes long")]
    TooShort(usize),
    /// The response is for a different page.
    #[error("requested page {requested:#04x}, received page {got:#04x}")]
    WrongPage {
        /// The requested page.
        requested: u8,
        /// The received page.
        got: u8,
    },
}

/// Presentation of a field.
enum FieldFormat {
    /// Shown as yes or no.
    Flag(Field<bool>),
    /// Shown as a number.
    Number(Field<u64>),
    /// Shown as a number; 0 means that the value is not reported.
    NonZero(Field<u64>),
}

type Table = &'static [(&'static str, FieldFormat)];

/// Returns the presentation of a flag.
const fn flag(field: Field<bool>) -> FieldFormat {
    FieldFormat::Flag(field)
}

/// Returns the presentation of a number.
const fn number<T>(field: Field<T>) -> FieldFormat {
    FieldFormat::Number(field.as_number())
}

/// Returns the presentation of a number that may not be reported.
const fn non_zero<T>(field: Field<T>) -> FieldFormat {
    FieldFormat::NonZero(field.as_number())
}

const STANDARD: Table = {
    use inquiry as field;
    &[
        ("peripheral_qualifier", number(field::PERIPHERAL_QUALIFIER)),
        (
            "peripheral_device_type",
            number(field::PERIPHERAL_DEVICE_TYPE),
        ),
        ("removable", flag(field::RMB)),
        ("version", number(field::VERSION)),
        ("hierarchical_luns", flag(field::HISUP)),
        ("response_data_format", number(field::RESPONSE_DATA_FORMAT)),
        ("target_port_groups", number(field::TPGS)),
        ("third_party_copy", flag(field::THIRD_PARTY_COPY)),
        ("protection", flag(field::PROTECT)),
        ("multi_port", flag(field::MULTIP)),
        ("command_queuing", flag(field::CMDQUE)),
    ]
};

const EXTENDED_INQUIRY: Table = {
    use extended_inquiry as field;
    &[
        ("activate_microcode", number(field::ACTIVATE_MICROCODE)),
        ("protection_types_supported", number(field::SPT)),
        ("guard_check", flag(field::GRD_CHK)),
        ("application_tag_check", flag(field::APP_CHK)),
        ("reference_tag_check", flag(field::REF_CHK)),
        ("unit_attention_with_specific_sense", flag(field::UASK_SUP)),
        ("group_function", flag(field::GROUP_SUP)),
        ("priority", flag(field::PRIOR_SUP)),
        ("head_of_queue", flag(field::HEADSUP)),
        ("ordered", flag(field::ORDSUP)),
        ("simple", flag(field::SIMPSUP)),
        ("write_uncorrectable", flag(field::WU_SUP)),
        ("correction_disable", flag(field::CRD_SUP)),
        ("non_volatile_cache", flag(field::NV_SUP)),
        ("volatile_cache", flag(field::V_SUP)),
        ("protection_information_interval", flag(field::P_I_I_SUP)),
        ("luns_cleared_by_i_t_nexus_loss", flag(field::LUICLR)),
        ("referrals", flag(field::R_SUP)),
        ("capability_based_command_security", flag(field::CBCS)),
        (
            "multi_i_t_nexus_microcode",
            number(field::MULTI_NEXUS_MICROCODE),
        ),
        (
            "extended_self_test_minutes",
            non_zero(field::EXTENDED_SELF_TEST_MINUTES),
        ),
        ("power_on_activation", flag(field::POA_SUP)),
        ("hard_reset_activation", flag(field::HRA_SUP)),
        ("vendor_specific_activation", flag(field::VSA_SUP)),
        ("maximum_sense_bytes", non_zero(field::MAXIMUM_SENSE_LENGTH)),
    ]
};

const BLOCK_LIMITS: Table = {
    use block_limits as field;
    &[
        ("write_same_non_zero", flag(field::WSNZ)),
        (
            "maximum_compare_and_write_blocks",
            non_zero(field::MAXIMUM_COMPARE_AND_WRITE_LENGTH),
        ),
        (
            "optimal_transfer_granularity_blocks",
            non_zero(field::OPTIMAL_TRANSFER_LENGTH_GRANULARITY),
        ),
        (
            "maximum_transfer_blocks",
            non_zero(field::MAXIMUM_TRANSFER_LENGTH),
        ),
        (
            "optimal_transfer_blocks",
            non_zero(field::OPTIMAL_TRANSFER_LENGTH),
        ),
        (
            "maximum_prefetch_blocks",
            non_zero(field::MAXIMUM_PREFETCH_LENGTH),
        ),
        (
            "maximum_unmap_blocks",
            non_zero(field::MAXIMUM_UNMAP_LBA_COUNT),
        ),
        (
            "maximum_unmap_descriptors",
            non_zero(field::MAXIMUM_UNMAP_BLOCK_DESCRIPTOR_COUNT),
        ),
        (
            "optimal_unmap_granularity_blocks",
            non_zero(field::OPTIMAL_UNMAP_GRANULARITY),
        ),
        (
            "maximum_write_same_blocks",
            non_zero(field::MAXIMUM_WRITE_SAME_LENGTH),
        ),
        (
            "maximum_atomic_transfer_blocks",
            non_zero(field::MAXIMUM_ATOMIC_TRANSFER_LENGTH),
        ),
        ("atomic_alignment_blocks", non_zero(field::ATOMIC_ALIGNMENT)),
        (
            "atomic_transfer_granularity_blocks",
            non_zero(field::ATOMIC_TRANSFER_LENGTH_GRANULARITY),
        ),
    ]
};

const CHARACTERISTICS: Table = {
    use characteristics as field;
    &[
        ("medium_rotation_rate", number(field::MEDIUM_ROTATION_RATE)),
        ("product_type", number(field::PRODUCT_TYPE)),
        ("write_after_block_erase", number(field::WABEREQ)),
        ("write_after_cryptographic_erase", number(field::WACEREQ)),
        ("nominal_form_factor", number(field::NOMINAL_FORM_FACTOR)),
        ("zoned", number(field::ZONED)),
        ("fuab", flag(field::FUAB)),
        (
            "verify_byte_check_unmapped_lba_supported",
            flag(field::VBULS),
        ),
    ]
};

const PROVISIONING: Table = {
    use provisioning as field;
    &[
        ("threshold_exponent", number(field::THRESHOLD_EXPONENT)),
        ("unmap", flag(field::LBPU)),
        ("write_same_16_unmap", flag(field::LBPWS)),
        ("write_same_10_unmap", flag(field::LBPWS10)),
        ("unmapped_blocks_read", number(field::LBPRZ)),
        ("anchor", flag(field::ANC_SUP)),
        ("descriptor_present", flag(field::DP)),
        ("provisioning_type", number(field::PROVISIONING_TYPE)),
    ]
};

fn by_table(data: &[u8], table: Table) -> Fields {
    let mut fields = Fields::default();
    for (name, shown) in table {
        let value = match shown {
            FieldFormat::Flag(field) => field.get(data).map(Value::Flag),
            FieldFormat::Number(field) => field.get(data).map(Value::Number),
            FieldFormat::NonZero(field) => field
                .get(data)
                .map(|n| Value::Optional((n != 0).then_some(n))),
        };
        if let Some(value) = value {
            fields.push(name, value);
        }
    }
    fields
}

/// Converts text from a target: strips trailing padding and replaces control characters, because it
/// may be printed to a terminal.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes)
        .trim_end_matches(['\0', ' '])
        .chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

/// Decodes standard INQUIRY data.
///
/// # Errors
/// The data is shorter than the mandatory 36 bytes.
pub fn standard(data: &[u8]) -> Result<Fields, InquiryError> {
    let data = inquiry::received(data).ok_or(InquiryError::TooShort(data.len()))?;
    let mut fields = by_table(data, STANDARD);
    for (name, place) in [
        ("vendor", inquiry::VENDOR),
        ("product", inquiry::PRODUCT),
        ("revision", inquiry::REVISION),
    ] {
        let value = place.get(data).map(text).unwrap_or_default();
        fields.push(name, Value::Text(value));
    }
    let versions: Vec<Value> = inquiry::VERSION_DESCRIPTORS
        .iter()
        .filter_map(|field| field.get(data).filter(|version| *version != 0))
        .map(|version| Value::Text(format!("{version:#06x}")))
        .collect();
    if !versions.is_empty() {
        fields.push("version_descriptors", Value::List(versions));
    }
    Ok(fields)
}

/// Checks the header of a page and returns the received bytes.
fn checked(code: u8, data: &[u8]) -> Result<&[u8], InquiryError> {
    let got = vpd::code(data).ok_or(InquiryError::TooShort(data.len()))?;
    vpd::received(data, code).ok_or(InquiryError::WrongPage {
        requested: code,
        got,
    })
}

/// Returns the page codes listed in page 00h.
///
/// # Errors
/// The data is not this page.
pub fn supported_pages(data: &[u8]) -> Result<Vec<u8>, InquiryError> {
    Ok(checked(vpd::SUPPORTED_PAGES, data)?[vpd::HEADER_LEN..].to_vec())
}

/// Returns the name of a page that can be decoded.
#[must_use]
pub fn page_name(code: u8) -> &'static str {
    match code {
        vpd::SUPPORTED_PAGES => "supported VPD pages",
        vpd::UNIT_SERIAL_NUMBER => "unit serial number",
        vpd::DEVICE_IDENTIFICATION => "device identification",
        vpd::EXTENDED_INQUIRY => "extended INQUIRY data",
        vpd::BLOCK_LIMITS => "block limits",
        vpd::BLOCK_DEVICE_CHARACTERISTICS => "block device characteristics",
        vpd::LOGICAL_BLOCK_PROVISIONING => "logical block provisioning",
        _ => "unknown page",
    }
}

/// Decodes a VPD page.
///
/// # Errors
/// The data is not this page.
pub fn page(code: u8, data: &[u8]) -> Result<Fields, InquiryError> {
    let data = checked(code, data)?;
    let body = &data[vpd::HEADER_LEN..];
    let one = |name, value| Fields(vec![(name, value)]);
    Ok(match code {
        vpd::SUPPORTED_PAGES => {
            let code = |c: &u8| Value::Text(format!("{c:02x}h {}", page_name(*c)));
            one("pages", Value::List(body.iter().map(code).collect()))
        }
        vpd::UNIT_SERIAL_NUMBER => one("serial_number", Value::Text(text(body))),
        vpd::DEVICE_IDENTIFICATION => one(
            "designators",
            Value::List(designator::parse(body).iter().map(designator).collect()),
        ),
        vpd::EXTENDED_INQUIRY => by_table(data, EXTENDED_INQUIRY),
        vpd::BLOCK_LIMITS => block_limits(data),
        vpd::BLOCK_DEVICE_CHARACTERISTICS => by_table(data, CHARACTERISTICS),
        vpd::LOGICAL_BLOCK_PROVISIONING => by_table(data, PROVISIONING),
        _ => one("data", Value::Bytes(body.to_vec())),
    })
}

fn block_limits(data: &[u8]) -> Fields {
    let mut fields = by_table(data, BLOCK_LIMITS);
    if let Some(alignment) = block_limits::UNMAP_GRANULARITY_ALIGNMENT.get(data) {
        let valid = block_limits::UGAVALID.get(data) == Some(true);
        fields.push(
            "unmap_granularity_alignment_blocks",
            Value::Optional(valid.then_some(u64::from(alignment & 0x7fff_ffff))),
        );
    }
    fields
}

fn designator(one: &Designator<'_>) -> Value {
    use designator as of;
    let mut fields = Fields::default();
    let association = match one.association {
        of::LOGICAL_UNIT => "logical unit",
        of::TARGET_PORT => "target port",
        of::TARGET_DEVICE => "target device",
        _ => "reserved",
    };
    fields.push("association", Value::Text(association.into()));
    if let Some(protocol) = one.protocol {
        let protocol = match protocol {
            of::FIBRE_CHANNEL => "Fibre Channel".to_owned(),
            of::SRP => "SRP".to_owned(),
            of::ISCSI => "iSCSI".to_owned(),
            of::SAS => "SAS".to_owned(),
            other => format!("protocol {other:x}h"),
        };
        fields.push("protocol", Value::Text(protocol));
    }
    let kind = match one.kind {
        of::VENDOR_SPECIFIC => "vendor specific",
        of::T10_VENDOR => "T10 vendor identification",
        of::EUI_64 => "EUI-64",
        of::NAA => "NAA",
        of::RELATIVE_TARGET_PORT => "relative target port",
        of::TARGET_PORT_GROUP => "target port group",
        of::LOGICAL_UNIT_GROUP => "logical unit group",
        of::MD5 => "MD5 logical unit identifier",
        of::SCSI_NAME_STRING => "SCSI name string",
        _ => "reserved",
    };
    fields.push("type", Value::Text(kind.into()));
    // These types are binary numbers with four bytes, and the first two are reserved (SPC-4 7.8.6).
    // For all other types, the code set is decisive, because vendors use text in any type.
    let value = match (one.kind, one.code_set, one.id) {
        (
            of::RELATIVE_TARGET_PORT | of::TARGET_PORT_GROUP | of::LOGICAL_UNIT_GROUP,
            _,
            [_, _, high, low],
        ) => Value::Number(u16::from_be_bytes([*high, *low]).into()),
        (_, of::ASCII | of::UTF8, _) => Value::Text(text(one.id)),
        _ => Value::Bytes(one.id.to_vec()),
    };
    fields.push("value", value);
    Value::Fields(fields)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn standard_data_is_decoded() {
        let mut data = vec![0u8; 96];
        data[..8].copy_from_slice(&[0x00, 0x00, 0x06, 0x12, 91, 0x01, 0x10, 0x02]);
        data[8..36].copy_from_slice(b"ACME    Big\x1b[31m Disk   1.0 ");
        data[58..62].copy_from_slice(&[0x00, 0xa0, 0x04, 0x60]);
        let fields = standard(&data).unwrap();
        assert_eq!(fields.field("vendor"), Some(&Value::Text("ACME".into())));
        // Escape sequences from a target must not reach the terminal.
        assert_eq!(
            fields.field("product"),
            Some(&Value::Text("Big\u{fffd}[31m Disk".into()))
        );
        assert_eq!(fields.field("protection"), Some(&Value::Flag(true)));
        assert_eq!(fields.field("multi_port"), Some(&Value::Flag(true)));
        assert_eq!(
            fields.field("version_descriptors").unwrap().to_string(),
            "0x00a0, 0x0460"
        );
        assert_eq!(standard(&data[..35]), Err(InquiryError::TooShort(35)));
    }

    #[test]
    fn block_limits_are_decoded() {
        let mut data = vec![0u8; 64];
        data[..4].copy_from_slice(&[0, 0xb0, 0, 60]);
        data[4] = 1;
        data[8..12].copy_from_slice(&[0, 0, 0x20, 0]);
        data[20..24].copy_from_slice(&[0xff; 4]);
        data[32..36].copy_from_slice(&[0x80, 0, 0, 8]);
        data[36..44].copy_from_slice(&[0, 0, 0, 0, 0, 1, 0, 0]);
        let fields = page(0xb0, &data).unwrap();
        let number = |name: &str| fields.field(name).unwrap().to_string();
        assert_eq!(number("write_same_non_zero"), "yes");
        assert_eq!(number("maximum_transfer_blocks"), "8192");
        assert_eq!(number("optimal_transfer_blocks"), "not reported");
        assert_eq!(number("maximum_unmap_blocks"), "4294967295");
        assert_eq!(number("unmap_granularity_alignment_blocks"), "8");
        assert_eq!(number("maximum_write_same_blocks"), "65536");
        // Truncated: missing fields are omitted.
        let short = page(0xb0, &data[..16]).unwrap();
        assert!(short.field("maximum_unmap_blocks").is_none());
    }

    #[test]
    fn designators_are_decoded() {
        let data = [
            b"\x00\x83\x00\x38".as_slice(),
            b"\x01\x03\x00\x08\x30\x00\x00\x00\x00\x00\x00\x2a",
            b"\x02\x01\x00\x0aACME    S1",
            b"\x41\x94\x00\x04\x00\x00\x00\x01",
            b"\x53\xa8\x00\x08iqn.a\0\0\0",
            // Invalid length.
            b"\x01\x03\x00\xff\x01\x02",
        ]
        .concat();
        let fields = page(0x83, &data).unwrap();
        let text = fields.to_string();
        for want in [
            "value: 300000000000002a",
            "value: ACME    S1",
            "association: target port\n    protocol: SRP\n    type: relative target port\n    value: 1\n",
            "association: target device\n    protocol: iSCSI\n    type: SCSI name string\n    value: iqn.a\n",
            "value: 0102\n",
        ] {
            assert!(text.contains(want), "no {want:?} in\n{text}");
        }
        let json = serde_json::to_value(&fields).unwrap();
        assert_eq!(json["designators"][2]["value"], 1);
    }

    #[test]
    fn response_for_other_page_is_rejected() {
        assert_eq!(
            page(0x80, &[0, 0x83, 0, 0]),
            Err(InquiryError::WrongPage {
                requested: 0x80,
                got: 0x83
            })
        );
        assert_eq!(
            supported_pages(&[0, 0, 0, 2, 0, 0x80, 9]),
            Ok(vec![0, 0x80])
        );
    }

    proptest! {
        #[test]
        fn arbitrary_data_never_panics(code: u8, mut data in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Some(byte) = data.get_mut(1) {
                *byte = code;
            }
            let _ = page(code, &data).map(|f| f.to_string());
            let _ = standard(&data).map(|f| f.to_string());
        }
    }
}
