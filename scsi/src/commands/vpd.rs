//! The VPD pages that we support (SPC-4 7.8, SBC-3 6.6).

use super::threshold;
use crate::config::{Config, ProtectionType, Provisioning};
use crate::data::designator::{self, Designator};
use crate::data::vpd::{self, block_limits, characteristics, extended_inquiry, provisioning};
use crate::lu::LogicalUnit;
use crate::nexus::{Nexus, PortName};
use crate::sense::SENSE_MAX;

/// Pages used to identify the LU or the cache.
pub(crate) const NAMING: [u8; 3] = [
    vpd::UNIT_SERIAL_NUMBER,
    vpd::DEVICE_IDENTIFICATION,
    vpd::CACHE_GENERATION,
];

type Make = fn(&LogicalUnit, Option<&Nexus>) -> Vec<u8>;

/// Page codes in ascending order, with a function to create each page.
static PAGES: [(u8, Make); 8] = [
    (vpd::SUPPORTED_PAGES, |lu, _| supported_pages(lu.config())),
    (vpd::UNIT_SERIAL_NUMBER, |lu, _| {
        let serial = &lu.config().identity.serial;
        vpd::with_body(vpd::UNIT_SERIAL_NUMBER, serial.as_bytes())
    }),
    (vpd::DEVICE_IDENTIFICATION, |lu, nexus| {
        device_identification(lu.config(), nexus)
    }),
    (vpd::EXTENDED_INQUIRY, |lu, _| extended_inquiry(lu)),
    (vpd::BLOCK_LIMITS, |lu, _| block_limits(lu.config())),
    (vpd::BLOCK_DEVICE_CHARACTERISTICS, |lu, _| {
        characteristics(lu.config())
    }),
    (vpd::LOGICAL_BLOCK_PROVISIONING, |lu, _| {
        provisioning(lu.config())
    }),
    (vpd::CACHE_GENERATION, |lu, _| {
        vpd::cache_generation_page(lu.config().cache_generation.unwrap_or_default())
    }),
];

/// Returns the pages that are supported by an LU.
fn pages(config: &Config) -> impl Iterator<Item = &'static (u8, Make)> {
    let has_generation = config.cache_generation.is_some();
    PAGES
        .iter()
        .filter(move |(code, _)| *code != vpd::CACHE_GENERATION || has_generation)
}

/// Returns a VPD page, or `None` if this page is not supported.
pub(crate) fn page(code: u8, lu: &LogicalUnit, nexus: Option<&Nexus>) -> Option<Vec<u8>> {
    let (_, make) = pages(lu.config()).find(|(known, _)| *known == code)?;
    Some(make(lu, nexus))
}

fn supported_pages(config: &Config) -> Vec<u8> {
    let codes: Vec<u8> = pages(config).map(|(code, _)| *code).collect();
    vpd::with_body(vpd::SUPPORTED_PAGES, &codes)
}

fn device_identification(config: &Config, nexus: Option<&Nexus>) -> Vec<u8> {
    use designator::{
        ASCII, BINARY, EUI_64, LOGICAL_UNIT, NAA, RELATIVE_TARGET_PORT, SCSI_NAME_STRING,
        T10_VENDOR, TARGET_DEVICE, TARGET_PORT, TARGET_PORT_GROUP, UTF8,
    };
    let identity = &config.identity;
    let mut body = Vec::new();
    Designator::new(BINARY, LOGICAL_UNIT, NAA, &identity.naa.bytes()).encode(&mut body);
    // T10 VENDOR IDENTIFICATION is an 8-byte field here too, so we need to pad a shorter name.
    let t10 = format!(
        "{:<8}{} {}",
        identity.vendor, identity.product, identity.serial
    );
    Designator::new(ASCII, LOGICAL_UNIT, T10_VENDOR, t10.as_bytes()).encode(&mut body);
    // Report the port of the nexus used for this request. Via any other path, the same LU will
    // report a different port, which is how multipath software identifies the paths.
    if let Some(target) = nexus.map(|nexus| &nexus.target) {
        let protocol = target.name.protocol_identifier();
        let mut push = |code_set, association, kind, id: &[u8]| {
            let designator = Designator::new(code_set, association, kind, id);
            designator.of_protocol(protocol).encode(&mut body);
        };
        let number = |number: u16| u32::from(number).to_be_bytes();
        push(
            BINARY,
            TARGET_PORT,
            RELATIVE_TARGET_PORT,
            &number(target.relative_id),
        );
        push(
            BINARY,
            TARGET_PORT,
            TARGET_PORT_GROUP,
            &number(target.group),
        );
        match &target.name {
            // Use a 16-byte EUI-64 based designator for SRP ports.
            PortName::Srp(id) => push(BINARY, TARGET_PORT, EUI_64, id),
            PortName::Iscsi(name) => {
                // The port name starts with the device name, up to the first comma.
                let device = name.split(',').next().unwrap_or(name);
                for (association, name) in [(TARGET_PORT, name.as_str()), (TARGET_DEVICE, device)] {
                    let name = designator::scsi_name_string(name);
                    push(UTF8, association, SCSI_NAME_STRING, &name);
                }
            }
        }
    }
    vpd::with_body(vpd::DEVICE_IDENTIFICATION, &body)
}

/// SPT: the types of protection information that a medium can be formatted with.
fn supported_types(config: &Config) -> u8 {
    use ProtectionType::{Type1, Type2, Type3};
    let allows = |protection_type| config.allows_format(Some(protection_type));
    match [Type1, Type2, Type3].map(allows) {
        [true, true, true] => 0b111,
        [_, true, _] => 0b010,
        [_, _, true] => 0b100,
        [_, _, false] => 0b000,
    }
}

fn extended_inquiry(lu: &LogicalUnit) -> Vec<u8> {
    use extended_inquiry::{
        APP_CHK, GRD_CHK, HEADSUP, LEN, LUICLR, MAXIMUM_SENSE_LENGTH, ORDSUP, REF_CHK, SIMPSUP,
        SPT, V_SUP,
    };
    let mut page = vpd::with_len(vpd::EXTENDED_INQUIRY, LEN);
    SPT.set(&mut page, supported_types(lu.config()));
    if let Some(protection) = lu.protection() {
        GRD_CHK.set(&mut page, true);
        // The expected application tag is only known for a 32-byte CDB.
        APP_CHK.set(
            &mut page,
            protection.is_type_2() && protection.client_owns_tag,
        );
        let has_reference_tag = protection.protection_type != ProtectionType::Type3;
        REF_CHK.set(&mut page, has_reference_tag);
    }
    for supported in [HEADSUP, ORDSUP, SIMPSUP, V_SUP, LUICLR] {
        supported.set(&mut page, true);
    }
    MAXIMUM_SENSE_LENGTH.set(&mut page, SENSE_MAX as u8);
    page
}

fn block_limits(config: &Config) -> Vec<u8> {
    use block_limits as field;
    let block = config.block_size.bytes();
    let limits = &config.limits;
    let mut data = vpd::with_len(vpd::BLOCK_LIMITS, field::LEN);
    let page = &mut data;
    field::WSNZ.set(page, true);
    field::MAXIMUM_COMPARE_AND_WRITE_LENGTH.set(page, config.max_compare_write());
    // The physical block size.
    field::OPTIMAL_TRANSFER_LENGTH_GRANULARITY.set(page, 1 << config.physical_exponent);
    field::MAXIMUM_TRANSFER_LENGTH.set(page, limits.max_transfer / block);
    let optimal = limits.optimal_transfer.min(limits.max_transfer);
    field::OPTIMAL_TRANSFER_LENGTH.set(page, optimal / block);
    if let Provisioning::Thin { granularity } = config.provisioning {
        field::MAXIMUM_UNMAP_LBA_COUNT.set(page, limits.max_unmap_blocks);
        field::MAXIMUM_UNMAP_BLOCK_DESCRIPTOR_COUNT.set(page, limits.max_unmap_descriptors);
        field::OPTIMAL_UNMAP_GRANULARITY.set(page, granularity);
        // The alignment is set to zero.
        field::UGAVALID.set(page, true);
    }
    // If an initiator uses this value, a single request will consume as much of a rate limit as the
    // maximum transfer size.
    let same = limits
        .max_write_same_blocks
        .min(limits.max_transfer / block);
    field::MAXIMUM_WRITE_SAME_LENGTH.set(page, same.into());
    data
}

fn characteristics(config: &Config) -> Vec<u8> {
    use characteristics::{LEN, MEDIUM_ROTATION_RATE, NON_ROTATING};
    let mut page = vpd::with_len(vpd::BLOCK_DEVICE_CHARACTERISTICS, LEN);
    if !config.rotational {
        MEDIUM_ROTATION_RATE.set(&mut page, NON_ROTATING);
    }
    page
}

fn provisioning(config: &Config) -> Vec<u8> {
    use provisioning::{
        LBPRZ, LBPU, LBPWS, LBPWS10, LEN, PROVISIONING_TYPE, READS_ZEROES, THIN, THRESHOLD_EXPONENT,
    };
    let mut page = vpd::with_len(vpd::LOGICAL_BLOCK_PROVISIONING, LEN);
    if config.is_thin() {
        let threshold = config.threshold.map(|_| threshold::exponent(config.blocks));
        THRESHOLD_EXPONENT.set(&mut page, threshold.unwrap_or(0));
        for supported in [LBPU, LBPWS, LBPWS10] {
            supported.set(&mut page, true);
        }
        LBPRZ.set(&mut page, READS_ZEROES);
        PROVISIONING_TYPE.set(&mut page, THIN);
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::BlockSize;

    #[test]
    fn cache_generation_page_requires_generation() {
        let mut config = crate::tests::config(BlockSize::B512, 8);
        let unit = |config: &Config| LogicalUnit::new(config.clone()).unwrap();
        assert_eq!(page(0xc0, &unit(&config), None), None);
        config.cache_generation = Some([7; 16]);
        let lu = unit(&config);
        let codes = page(0x00, &lu, None).unwrap();
        assert_eq!(codes.last(), Some(&0xc0));
        let mut expected = b"\0\xc0\0\x18RISERGEN".to_vec();
        expected.extend([7; 16]);
        assert_eq!(page(0xc0, &lu, None), Some(expected));
    }
}
