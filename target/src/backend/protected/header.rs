//! [`Header`]: the first page of a protected file.
//!
//! ```text
//!   0            8         12         16         20         24          32        36
//!   | RISER-PI   | version | block    | type     | reserved | region    | CRC-32C | zeroes |
//! ```
//!
//! Numbers are big-endian. The CRC-32C (RFC 3385) covers all bytes before it.

use crc_fast::{CrcAlgorithm, checksum};
use riser_scsi::config::ProtectionType;

/// Size of the header with the write-intent bitmap, in bytes.
pub(in crate::backend) const HEADER_LEN: u64 = 64 << 10;

/// Size of a page in bytes. The first page contains the header, and all other pages the bitmap.
pub(in crate::backend) const PAGE: usize = 4096;

/// Default size of a region of the write-intent bitmap in bytes.
const REGION: u64 = 4 << 20;

const MAGIC: [u8; 8] = *b"RISER-PI";

const VERSION: u32 = 1;

/// Number of bytes covered by the CRC.
const CHECKED: usize = 32;

/// Header of a protected file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Size of a block in bytes, without its tuple.
    pub block_size: u32,
    /// Type of the protection information, or `None` if the file was formatted without protection.
    pub protection_type: Option<ProtectionType>,
    /// Number of bytes of the file that share a bit of the write-intent bitmap.
    pub region_size: u64,
}

/// The reason why the header of a file does not match its configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The file has no header.
    #[error("has no protection information; copy its data to a new disk")]
    Missing,
    /// The file has a header, but its backend is not protected.
    #[error(
        "has protection information, but the backend has no `protection`: add it, or write zeroes to \
         the first 4096 bytes if the file contains an unprotected disk"
    )]
    Unexpected,
    /// Unknown version.
    #[error("has protection information with the unknown version {0}")]
    Version(u32),
    /// The CRC is incorrect.
    #[error("has a corrupt protection header: the checksum is incorrect")]
    Crc,
    /// Another block size.
    #[error("has blocks of {found} bytes, but the backend has a `block_size` of {wanted}")]
    BlockSize {
        /// Size in the header in bytes.
        found: u32,
        /// Configured size in bytes.
        wanted: u32,
    },
    /// A value is not valid.
    #[error("has a protection header with the invalid {field} {value}")]
    Value {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
}

impl Header {
    /// Creates the header of a new file.
    #[must_use]
    pub const fn new(block_size: u32, protection_type: Option<ProtectionType>) -> Self {
        Self {
            block_size,
            protection_type,
            region_size: REGION,
        }
    }

    /// Returns whether a file that starts with this page has a valid header for any block size. The
    /// magic is not sufficient, because an initiator can write it to an unprotected disk.
    #[must_use]
    pub fn is_present(page: &[u8; PAGE]) -> bool {
        let is_valid = |block_size| Self::parse(page, block_size).is_ok();
        let is_zero = |rest: &[u8]| rest.iter().all(|byte| *byte == 0);
        [512, 4096].into_iter().any(is_valid) && is_zero(&page[CHECKED + 4..])
    }

    /// Parses the header of a backend with this block size. `page` is the start of the file.
    ///
    /// # Errors
    /// Returns the first mismatch.
    pub fn parse(page: &[u8], block_size: u32) -> Result<Self, HeaderError> {
        if !page.starts_with(&MAGIC) || page.len() < CHECKED + 4 {
            return Err(HeaderError::Missing);
        }
        let number = |at: usize| {
            let bytes = page[at..at + 4].try_into();
            u32::from_be_bytes(bytes.expect("four bytes"))
        };
        // Check this first, because another version may have another checksum.
        let version = number(8);
        if version != VERSION {
            return Err(HeaderError::Version(version));
        }
        if crc(&page[..CHECKED]) != number(CHECKED) {
            return Err(HeaderError::Crc);
        }
        let (found, wanted) = (number(12), block_size);
        if found != wanted {
            return Err(HeaderError::BlockSize { found, wanted });
        }
        let protection_type = match number(16) {
            value @ 0..=3 => ProtectionType::from_number(value as u8),
            value => {
                return Err(HeaderError::Value {
                    field: "protection type",
                    value: value.into(),
                });
            }
        };
        let region_size = u64::from(number(24)) << 32 | u64::from(number(28));
        if region_size < PAGE as u64 || !region_size.is_power_of_two() {
            return Err(HeaderError::Value {
                field: "region size",
                value: region_size,
            });
        }
        Ok(Self {
            block_size,
            protection_type,
            region_size,
        })
    }

    /// Encodes the first page.
    #[must_use]
    pub fn encode(&self) -> [u8; PAGE] {
        let protection_type = self.protection_type.map_or(0, ProtectionType::number);
        let mut page = [0; PAGE];
        page[..8].copy_from_slice(&MAGIC);
        page[8..12].copy_from_slice(&VERSION.to_be_bytes());
        page[12..16].copy_from_slice(&self.block_size.to_be_bytes());
        page[19] = protection_type;
        page[24..32].copy_from_slice(&self.region_size.to_be_bytes());
        let crc = crc(&page[..CHECKED]);
        page[CHECKED..CHECKED + 4].copy_from_slice(&crc.to_be_bytes());
        page
    }
}

fn crc(bytes: &[u8]) -> u32 {
    // The upper bits are zero.
    checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk with blocks of 512 bytes and type 1.
    const BYTES: [u8; 36] = [
        0x52, 0x49, 0x53, 0x45, 0x52, 0x2d, 0x50, 0x49, // RISER-PI
        0x00, 0x00, 0x00, 0x01, // version
        0x00, 0x00, 0x02, 0x00, // block size
        0x00, 0x00, 0x00, 0x01, // type
        0x00, 0x00, 0x00, 0x00, // reserved
        0x00, 0x00, 0x00, 0x00, 0x00, 0x40, 0x00, 0x00, // region size
        0x7a, 0xef, 0x49, 0xca, // CRC
    ];

    #[test]
    fn header_matches_documented_bytes() {
        let page = Header::new(512, Some(ProtectionType::Type1)).encode();
        assert_eq!(page[..36], BYTES);
        assert!(page[36..].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn header_is_decoded() {
        for block_size in [512, 4096] {
            for number in 0..=3 {
                let kind = ProtectionType::from_number(number);
                let header = Header::new(block_size, kind);
                assert_eq!(Header::parse(&header.encode(), block_size), Ok(header));
            }
        }
    }

    #[test]
    fn incomplete_headers_are_not_present() {
        let good = Header::new(4096, None).encode();
        assert!(Header::is_present(&good));
        for at in [0, 8, 15, 32, 36, PAGE - 1] {
            let mut page = good;
            page[at] ^= 1;
            assert!(!Header::is_present(&page), "{at}");
        }
    }

    /// A header that can be parsed has the documented bytes.
    #[test]
    fn protected_header() {
        bolero::check!(name = "protected_header").for_each(|input: &[u8]| {
            let mut page = [0; PAGE];
            let len = input.len().min(PAGE);
            page[..len].copy_from_slice(&input[..len]);
            let fixed = {
                // Random bytes never have the checksum.
                let mut page = page;
                page[..8].copy_from_slice(&MAGIC);
                page[8..11].fill(0);
                let crc = crc(&page[..CHECKED]);
                page[CHECKED..CHECKED + 4].copy_from_slice(&crc.to_be_bytes());
                page
            };
            for page in [page, fixed] {
                let sizes = [512, 4096];
                let parsed = sizes.map(|size| (size, Header::parse(&page, size)));
                for (size, header) in &parsed {
                    let Ok(header) = header else { continue };
                    assert_eq!(header.block_size, *size);
                    let mut encoded = header.encode();
                    // Reserved bytes are ignored, but covered by the checksum.
                    encoded[20..24].copy_from_slice(&page[20..24]);
                    assert_eq!(encoded[..CHECKED], page[..CHECKED]);
                    assert_eq!(Header::parse(&header.encode(), *size), Ok(*header));
                }
                let is_ok = parsed.iter().any(|(_, header)| header.is_ok());
                let has_rest = page[CHECKED + 4..].iter().any(|byte| *byte != 0);
                assert_eq!(Header::is_present(&page), is_ok && !has_rest);
                // The bytes must not be read beyond their end.
                for len in [0, 7, 8, 35, 36] {
                    let parsed = Header::parse(&page[..len], 512);
                    assert_eq!(
                        parsed.is_ok(),
                        len == 36 && Header::parse(&page, 512).is_ok()
                    );
                }
            }
        });
    }

    #[test]
    fn invalid_headers_are_rejected() {
        let good = Header::new(512, Some(ProtectionType::Type1)).encode();
        assert_eq!(Header::parse(&[], 512), Err(HeaderError::Missing));
        assert_eq!(Header::parse(&[0; PAGE], 512), Err(HeaderError::Missing));
        assert_eq!(Header::parse(&good[..35], 512), Err(HeaderError::Missing));
        let (found, wanted) = (512, 4096);
        let error = Err(HeaderError::BlockSize { found, wanted });
        assert_eq!(Header::parse(&good, 4096), error);
        for at in 8..12 {
            let mut page = good;
            page[at] ^= 2;
            let version = u32::from_be_bytes(page[8..12].try_into().unwrap());
            let error = Err(HeaderError::Version(version));
            assert_eq!(Header::parse(&page, 512), error);
        }
        for at in 12..36 {
            let mut page = good;
            page[at] ^= 0x10;
            assert_eq!(Header::parse(&page, 512), Err(HeaderError::Crc), "{at}");
        }
        let with = |at: usize, value: u32| {
            let mut page = good;
            page[at..at + 4].copy_from_slice(&value.to_be_bytes());
            let crc = crc(&page[..CHECKED]);
            page[CHECKED..CHECKED + 4].copy_from_slice(&crc.to_be_bytes());
            Header::parse(&page, 512)
        };
        for (at, field, value) in [(16, "protection type", 4), (28, "region size", 4097)] {
            let error = Err(HeaderError::Value {
                field,
                value: value.into(),
            });
            assert_eq!(with(at, value), error);
        }
    }
}
