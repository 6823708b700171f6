//! The layouts of INQUIRY data.
//!
//! Pages of plain numbers and flags are tables of places; the others have a function each. A field
//! that lies beyond the received bytes is left out.

use thiserror::Error;

use super::fields::{Fields, Value};

/// Why bytes are no INQUIRY data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum InquiryError {
    /// Too short for what every answer has.
    #[error("INQUIRY data is {0} bytes long")]
    TooShort(usize),
    /// The answer is to another question.
    #[error("asked for page {asked:#04x}, got page {got:#04x}")]
    WrongPage {
        /// The page that was asked for.
        asked: u8,
        /// The page that came.
        got: u8,
    },
}

/// Where a field is and how it is read. Offsets count from the page's first byte.
enum Place {
    /// A bit of a byte.
    Bit(usize, u8),
    /// Some bits of a byte: shift and mask.
    Bits(usize, u8, u8),
    /// A big-endian number: offset and length.
    Number(usize, usize),
    /// A number of which 0 says that nothing is reported.
    NonZero(usize, usize),
}

type Table = &'static [(&'static str, Place)];

use Place::{Bit, Bits, NonZero, Number};

const EXTENDED_INQUIRY: Table = &[
    ("activate_microcode", Bits(4, 6, 3)),
    ("protection_types_supported", Bits(4, 3, 7)),
    ("guard_check", Bit(4, 2)),
    ("application_tag_check", Bit(4, 1)),
    ("reference_tag_check", Bit(4, 0)),
    ("unit_attention_with_specific_sense", Bit(5, 5)),
    ("group_function", Bit(5, 4)),
    ("priority", Bit(5, 3)),
    ("head_of_queue", Bit(5, 2)),
    ("ordered", Bit(5, 1)),
    ("simple", Bit(5, 0)),
    ("write_uncorrectable", Bit(6, 3)),
    ("correction_disable", Bit(6, 2)),
    ("non_volatile_cache", Bit(6, 1)),
    ("volatile_cache", Bit(6, 0)),
    ("protection_information_interval", Bit(7, 4)),
    ("luns_cleared_by_i_t_nexus_loss", Bit(7, 0)),
    ("referrals", Bit(8, 4)),
    ("capability_based_command_security", Bit(8, 0)),
    ("multi_i_t_nexus_microcode", Bits(9, 0, 15)),
    ("extended_self_test_minutes", NonZero(10, 2)),
    ("power_on_activation", Bit(12, 7)),
    ("hard_reset_activation", Bit(12, 6)),
    ("vendor_specific_activation", Bit(12, 5)),
    ("maximum_sense_bytes", NonZero(13, 1)),
];

const BLOCK_LIMITS: Table = &[
    ("write_same_non_zero", Bit(4, 0)),
    ("maximum_compare_and_write_blocks", NonZero(5, 1)),
    ("optimal_transfer_granularity_blocks", NonZero(6, 2)),
    ("maximum_transfer_blocks", NonZero(8, 4)),
    ("optimal_transfer_blocks", NonZero(12, 4)),
    ("maximum_prefetch_blocks", NonZero(16, 4)),
    ("maximum_unmap_blocks", NonZero(20, 4)),
    ("maximum_unmap_descriptors", NonZero(24, 4)),
    ("optimal_unmap_granularity_blocks", NonZero(28, 4)),
    ("maximum_write_same_blocks", NonZero(36, 8)),
    ("maximum_atomic_transfer_blocks", NonZero(44, 4)),
    ("atomic_alignment_blocks", NonZero(48, 4)),
    ("atomic_transfer_granularity_blocks", NonZero(52, 4)),
];

const CHARACTERISTICS: Table = &[
    ("medium_rotation_rate", Number(4, 2)),
    ("product_type", Number(6, 1)),
    ("write_after_block_erase", Bits(7, 6, 3)),
    ("write_after_cryptographic_erase", Bits(7, 4, 3)),
    ("nominal_form_factor", Bits(7, 0, 15)),
    ("zoned", Bits(8, 4, 3)),
    ("fuab", Bit(8, 1)),
    ("verify_byte_check_unmapped_lba_supported", Bit(8, 0)),
];

const PROVISIONING: Table = &[
    ("threshold_exponent", Number(4, 1)),
    ("unmap", Bit(5, 7)),
    ("write_same_16_unmap", Bit(5, 6)),
    ("write_same_10_unmap", Bit(5, 5)),
    ("unmapped_blocks_read", Bits(5, 2, 7)),
    ("anchor", Bit(5, 1)),
    ("descriptor_present", Bit(5, 0)),
    ("provisioning_type", Bits(6, 0, 7)),
];

fn number(data: &[u8], at: usize, len: usize) -> Option<u64> {
    let bytes = data.get(at..at.checked_add(len)?)?;
    Some(bytes.iter().fold(0, |n, b| n << 8 | u64::from(*b)))
}

fn by_table(data: &[u8], table: Table) -> Fields {
    let mut fields = Fields::default();
    for (name, place) in table {
        let value = match *place {
            Bit(at, bit) => data.get(at).map(|b| Value::Flag(b >> bit & 1 != 0)),
            Bits(at, shift, mask) => data
                .get(at)
                .map(|b| Value::Number(u64::from(b >> shift & mask))),
            Number(at, len) => number(data, at, len).map(Value::Number),
            NonZero(at, len) => {
                number(data, at, len).map(|n| Value::Optional((n != 0).then_some(n)))
            }
        };
        if let Some(value) = value {
            fields.push(name, value);
        }
    }
    fields
}

/// Text from a target: trailing padding dropped, everything unprintable replaced, since it ends up
/// on a terminal.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes)
        .trim_end_matches(['\0', ' '])
        .chars()
        .map(|c| if c.is_control() { '\u{fffd}' } else { c })
        .collect()
}

/// Standard INQUIRY data.
///
/// # Errors
/// It has less than the 36 bytes that every target sends.
pub fn standard(data: &[u8]) -> Result<Fields, InquiryError> {
    const VERSIONS: usize = 58;
    if data.len() < 36 {
        return Err(InquiryError::TooShort(data.len()));
    }
    // What is behind the declared length is padding.
    let data = &data[..data.len().min(usize::from(data[4]) + 5).max(36)];
    let mut fields = by_table(
        data,
        &[
            ("peripheral_qualifier", Bits(0, 5, 7)),
            ("peripheral_device_type", Bits(0, 0, 31)),
            ("removable", Bit(1, 7)),
            ("version", Number(2, 1)),
            ("hierarchical_luns", Bit(3, 4)),
            ("response_data_format", Bits(3, 0, 15)),
            ("target_port_groups", Bits(5, 4, 3)),
            ("third_party_copy", Bit(5, 3)),
            ("protection", Bit(5, 0)),
            ("multi_port", Bit(6, 4)),
            ("command_queuing", Bit(7, 1)),
        ],
    );
    fields.push("vendor", Value::Text(text(&data[8..16])));
    fields.push("product", Value::Text(text(&data[16..32])));
    fields.push("revision", Value::Text(text(&data[32..36])));
    let versions = data.get(VERSIONS..data.len().min(VERSIONS + 16));
    let versions: Vec<Value> = versions
        .unwrap_or_default()
        .as_chunks::<2>()
        .0
        .iter()
        .map(|v| u16::from_be_bytes(*v))
        .filter(|v| *v != 0)
        .map(|v| Value::Text(format!("{v:#06x}")))
        .collect();
    if !versions.is_empty() {
        fields.push("version_descriptors", Value::List(versions));
    }
    Ok(fields)
}

/// A page's header, and its bytes as far as they are there.
fn checked(code: u8, data: &[u8]) -> Result<&[u8], InquiryError> {
    if data.len() < 4 {
        return Err(InquiryError::TooShort(data.len()));
    }
    if data[1] != code {
        return Err(InquiryError::WrongPage {
            asked: code,
            got: data[1],
        });
    }
    let declared = 4 + usize::from(u16::from_be_bytes([data[2], data[3]]));
    Ok(&data[..declared.min(data.len())])
}

/// The codes that page 00h lists.
///
/// # Errors
/// The data is not that page.
pub fn supported_pages(data: &[u8]) -> Result<Vec<u8>, InquiryError> {
    Ok(checked(0, data)?[4..].to_vec())
}

/// A page's name, for those that are decoded.
#[must_use]
pub fn page_name(code: u8) -> &'static str {
    match code {
        0x00 => "supported VPD pages",
        0x80 => "unit serial number",
        0x83 => "device identification",
        0x86 => "extended INQUIRY data",
        0xb0 => "block limits",
        0xb1 => "block device characteristics",
        0xb2 => "logical block provisioning",
        _ => "unknown page",
    }
}

/// A VPD page.
///
/// # Errors
/// The data is not that page.
pub fn page(code: u8, data: &[u8]) -> Result<Fields, InquiryError> {
    let data = checked(code, data)?;
    let one = |name, value| Fields(vec![(name, value)]);
    Ok(match code {
        0x00 => {
            let code = |c: &u8| Value::Text(format!("{c:02x}h {}", page_name(*c)));
            one("pages", Value::List(data[4..].iter().map(code).collect()))
        }
        0x80 => one("serial_number", Value::Text(text(&data[4..]))),
        0x83 => one("designators", Value::List(designators(&data[4..]))),
        0x86 => by_table(data, EXTENDED_INQUIRY),
        0xb0 => block_limits(data),
        0xb1 => by_table(data, CHARACTERISTICS),
        0xb2 => by_table(data, PROVISIONING),
        _ => one("data", Value::Bytes(data[4..].to_vec())),
    })
}

fn block_limits(data: &[u8]) -> Fields {
    let mut fields = by_table(data, BLOCK_LIMITS);
    // The alignment is valid where the bit before it says so.
    if let Some(alignment) = number(data, 32, 4) {
        let valid = alignment >> 31 != 0;
        fields.push(
            "unmap_granularity_alignment_blocks",
            Value::Optional(valid.then_some(alignment & 0x7fff_ffff)),
        );
    }
    fields
}

/// Designation descriptors (SPC-4 7.8.6.1).
fn designators(mut data: &[u8]) -> Vec<Value> {
    let mut out = Vec::new();
    while let Some((header, rest)) = data.split_first_chunk::<4>() {
        let len = usize::from(header[3]).min(rest.len());
        let (body, rest) = rest.split_at(len);
        data = rest;
        let mut fields = Fields::default();
        let association = match header[1] >> 4 & 3 {
            0 => "logical unit",
            1 => "target port",
            2 => "target device",
            _ => "reserved",
        };
        fields.push("association", Value::Text(association.into()));
        if header[1] & 0x80 != 0 {
            let protocol = match header[0] >> 4 {
                0 => "Fibre Channel".to_owned(),
                4 => "SRP".to_owned(),
                5 => "iSCSI".to_owned(),
                6 => "SAS".to_owned(),
                other => format!("protocol {other:x}h"),
            };
            fields.push("protocol", Value::Text(protocol));
        }
        let kind = match header[1] & 15 {
            0 => "vendor specific",
            1 => "T10 vendor identification",
            2 => "EUI-64",
            3 => "NAA",
            4 => "relative target port",
            5 => "target port group",
            6 => "logical unit group",
            7 => "MD5 logical unit identifier",
            8 => "SCSI name string",
            _ => "reserved",
        };
        fields.push("type", Value::Text(kind.into()));
        let value = match (header[1] & 15, header[0] & 15, body) {
            (4..=6, _, [_, _, high, low]) => {
                Value::Number(u16::from_be_bytes([*high, *low]).into())
            }
            (_, 2 | 3, _) => Value::Text(text(body)),
            _ => Value::Bytes(body.to_vec()),
        };
        fields.push("value", value);
        out.push(Value::Fields(fields));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn standard_data_of_a_disk() {
        let mut data = vec![0u8; 96];
        data[..8].copy_from_slice(&[0x00, 0x00, 0x06, 0x12, 91, 0x01, 0x10, 0x02]);
        data[8..36].copy_from_slice(b"ACME    Big\x1b[31m Disk   1.0 ");
        data[58..62].copy_from_slice(&[0x00, 0xa0, 0x04, 0x60]);
        let fields = standard(&data).unwrap();
        assert_eq!(fields.field("vendor"), Some(&Value::Text("ACME".into())));
        // Nothing from a target reaches the terminal's escape sequences.
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
    fn block_limits_by_their_places() {
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
        // Cut short: what is not there is left out.
        let short = page(0xb0, &data[..16]).unwrap();
        assert!(short.field("maximum_unmap_blocks").is_none());
    }

    #[test]
    fn designators_of_each_kind() {
        let data = [
            b"\x00\x83\x00\x38".as_slice(),
            b"\x01\x03\x00\x08\x30\x00\x00\x00\x00\x00\x00\x2a",
            b"\x02\x01\x00\x0aACME    S1",
            b"\x41\x94\x00\x04\x00\x00\x00\x01",
            b"\x53\xa8\x00\x08iqn.a\0\0\0",
            // A length that lies.
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
    fn an_answer_to_another_question_is_refused() {
        assert_eq!(
            page(0x80, &[0, 0x83, 0, 0]),
            Err(InquiryError::WrongPage {
                asked: 0x80,
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
        fn no_bytes_make_it_panic(code: u8, mut data in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Some(byte) = data.get_mut(1) {
                *byte = code;
            }
            let _ = page(code, &data).map(|f| f.to_string());
            let _ = standard(&data).map(|f| f.to_string());
        }
    }
}
