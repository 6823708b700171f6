//! Vital product data (SPC-4 7.8, SBC-3 6.6).
//!
//! Pages 00h, 80h, 83h, 86h, B0h, B1h and B2h; and C0h, which is ours: `RISERGEN` and the 16 bytes of
//! the volatile cache's generation, where there is one. An initiator that finds another generation
//! after a new login knows that writes may be lost which it has not flushed.

use super::threshold;
use crate::config::{Config, Provisioning};
use crate::nexus::{Nexus, PortName};
use crate::sense::SENSE_MAX;

/// Copies text into an ASCII field, padded with spaces (SPC-4 4.3.1).
pub(crate) fn ascii(field: &mut [u8], text: &str) {
    let take = text.len().min(field.len());
    field[..take].copy_from_slice(&text.as_bytes()[..take]);
    field[take..].fill(b' ');
}

/// Our page, the cache's generation.
const CACHE_GENERATION: u8 = 0xc0;
/// What it begins with, since other vendors' pages of that code mean other things.
const GENERATION_MARK: &[u8; 8] = b"RISERGEN";

/// The pages that identify the unit or its cache.
pub(crate) const NAMING: [u8; 3] = [0x80, 0x83, CACHE_GENERATION];

type Body = fn(&Config, Option<&Nexus>) -> Vec<u8>;

/// Page codes in ascending order, and what fills the page after its header.
static PAGES: [(u8, Body); 8] = [
    (0x00, |config, _| page_codes(config)),
    (0x80, |config, _| {
        config.identity.serial.clone().into_bytes()
    }),
    (0x83, device_identification),
    (0x86, |_, _| extended_inquiry()),
    (0xb0, |config, _| block_limits(config)),
    (0xb1, |config, _| block_device_characteristics(config)),
    (0xb2, |config, _| provisioning(config)),
    (CACHE_GENERATION, |config, _| {
        let generation = config.cache_generation.unwrap_or_default();
        [&GENERATION_MARK[..], &generation].concat()
    }),
];

/// The pages that a unit has.
fn pages(config: &Config) -> impl Iterator<Item = &'static (u8, Body)> {
    let has_generation = config.cache_generation.is_some();
    PAGES
        .iter()
        .filter(move |(code, _)| *code != CACHE_GENERATION || has_generation)
}

/// The codes of all pages.
fn page_codes(config: &Config) -> Vec<u8> {
    pages(config).map(|(code, _)| *code).collect()
}

/// A whole VPD page, or nothing when there is no such page.
pub(crate) fn page(code: u8, config: &Config, nexus: Option<&Nexus>) -> Option<Vec<u8>> {
    let (_, body) = pages(config).find(|(known, _)| *known == code)?;
    let body = body(config, nexus);
    let mut page = vec![0, code];
    page.extend((body.len() as u16).to_be_bytes());
    page.extend(body);
    Some(page)
}

/// Code sets and associations of designation descriptors (SPC-4 7.8.6.1).
const BINARY: u8 = 1;
const ASCII: u8 = 2;
const UTF8: u8 = 3;
const LOGICAL_UNIT: u8 = 0x00;
const TARGET_PORT: u8 = 0x10;
const TARGET_DEVICE: u8 = 0x20;

struct Designators(Vec<u8>);

impl Designators {
    /// Adds one descriptor; `kind` is association and designator type. With a
    /// protocol, PIV is set.
    fn push(&mut self, code_set: u8, kind: u8, protocol: Option<u8>, designator: &[u8]) {
        let piv = protocol.map_or(0, |_| 0x80);
        self.0.push(protocol.unwrap_or(0) << 4 | code_set);
        self.0.push(piv | kind);
        self.0.push(0);
        self.0.push(designator.len() as u8);
        self.0.extend_from_slice(designator);
    }

    /// A SCSI name string: UTF-8, ended and padded to four bytes by zeroes.
    fn push_name(&mut self, association: u8, protocol: u8, name: &str) {
        let mut bytes = name.as_bytes().to_vec();
        bytes.truncate(248);
        bytes.push(0);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        self.push(UTF8, association | 8, Some(protocol), &bytes);
    }
}

fn device_identification(config: &Config, nexus: Option<&Nexus>) -> Vec<u8> {
    let mut out = Designators(Vec::new());
    let identity = &config.identity;
    out.push(BINARY, LOGICAL_UNIT | 3, None, &identity.naa.bytes());
    let mut t10 = [0; 8].to_vec();
    ascii(&mut t10, &identity.vendor);
    t10.extend_from_slice(identity.product.as_bytes());
    t10.push(b' ');
    t10.extend_from_slice(identity.serial.as_bytes());
    out.push(ASCII, LOGICAL_UNIT | 1, None, &t10);
    let Some(target) = nexus.map(|nexus| &nexus.target) else {
        return out.0;
    };
    let protocol = target.name.protocol_identifier();
    let [high, low] = target.relative_id.to_be_bytes();
    out.push(BINARY, TARGET_PORT | 4, Some(protocol), &[0, 0, high, low]);
    let [high, low] = target.group.to_be_bytes();
    out.push(BINARY, TARGET_PORT | 5, Some(protocol), &[0, 0, high, low]);
    match &target.name {
        // SRP ports are named by a 16-byte EUI-64 based designator.
        PortName::Srp(id) => out.push(BINARY, TARGET_PORT | 2, Some(protocol), id),
        PortName::Iscsi(name) => {
            out.push_name(TARGET_PORT, protocol, name);
            let device = name.split(',').next().unwrap_or(name);
            out.push_name(TARGET_DEVICE, protocol, device);
        }
    }
    out.0
}

fn extended_inquiry() -> Vec<u8> {
    let mut page = vec![0; 60];
    page[1] = 0x07; // HEADSUP, ORDSUP, SIMPSUP.
    page[2] = 0x01; // V_SUP: there is a volatile cache.
    page[3] = 0x01; // LUICLR: I_T nexus conditions are kept per logical unit.
    page[9] = SENSE_MAX as u8; // MAXIMUM SUPPORTED SENSE DATA LENGTH.
    page
}

fn block_limits(config: &Config) -> Vec<u8> {
    let block = config.block_size.bytes();
    let limits = &config.limits;
    let mut page = vec![0; 60];
    page[0] = 0x01; // WSNZ: WRITE SAME must name a number of blocks.
    page[1] = config.max_compare_write();
    // OPTIMAL TRANSFER LENGTH GRANULARITY: a physical block.
    page[2..4].copy_from_slice(&(1_u16 << config.physical_exponent).to_be_bytes());
    page[4..8].copy_from_slice(&(limits.max_transfer / block).to_be_bytes());
    let optimal = limits.optimal_transfer.min(limits.max_transfer);
    page[8..12].copy_from_slice(&(optimal / block).to_be_bytes());
    if let Provisioning::Thin { granularity } = config.provisioning {
        page[16..20].copy_from_slice(&limits.max_unmap_blocks.to_be_bytes());
        page[20..24].copy_from_slice(&limits.max_unmap_descriptors.to_be_bytes());
        page[24..28].copy_from_slice(&granularity.to_be_bytes());
        page[28..32].copy_from_slice(&(1_u32 << 31).to_be_bytes()); // UGAVALID, alignment 0.
    }
    // Whoever goes by this takes no more of a limited rate at once than a transfer may.
    let same = limits
        .max_write_same_blocks
        .min(limits.max_transfer / block);
    page[32..40].copy_from_slice(&u64::from(same).to_be_bytes());
    page
}

fn block_device_characteristics(config: &Config) -> Vec<u8> {
    let mut page = vec![0; 60];
    if !config.rotational {
        page[1] = 1; // MEDIUM ROTATION RATE: non-rotating.
    }
    page
}

fn provisioning(config: &Config) -> Vec<u8> {
    if config.is_thin() {
        let exponent = config
            .threshold
            .map_or(0, |_| threshold::exponent(config.blocks));
        // LBPU, LBPWS, LBPWS10, LBPRZ; thin provisioned.
        vec![exponent, 0xe4, 0x02, 0]
    } else {
        vec![0, 0, 0, 0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::BlockSize;

    #[test]
    fn a_unit_offers_the_generation_of_its_cache_where_it_has_one() {
        let mut config = crate::tests::config(BlockSize::B512, 8);
        assert_eq!(page(0xc0, &config, None), None);
        config.cache_generation = Some([7; 16]);
        let codes = page(0x00, &config, None).unwrap();
        assert_eq!(codes.last(), Some(&0xc0));
        let mut expected = b"\0\xc0\0\x18RISERGEN".to_vec();
        expected.extend([7; 16]);
        assert_eq!(page(0xc0, &config, None), Some(expected));
    }
}
