//! Tuples of T10 DIF: checked, generated and passed between the domains of an integrity region.

use crc_fast::{CrcAlgorithm, Digest};

use crate::verbs::{GuardType, SigCheck, SigDomain, SigError, SigErrorKind, T10Dif, TagEscape};

/// Size of a tuple in bytes.
pub(super) const TUPLE_LEN: usize = 8;

/// Converts a block, which is followed by space for a tuple, from one domain to the other. `index`
/// is the position of the block in the region. Returns the first failed check. The block is then
/// converted as well, as by an adapter.
pub(super) fn convert(
    block: &mut [u8],
    index: u32,
    (from, to): (&SigDomain, &SigDomain),
    check: SigCheck,
) -> Option<SigError> {
    let stride = block.len() as u64;
    let (data, bytes) = block
        .split_last_chunk_mut::<TUPLE_LEN>()
        .expect("space for a tuple");
    let source = match from {
        SigDomain::None => None,
        SigDomain::T10Dif(dif) => Some((dif, Tuple::parse(*bytes))),
    };
    let failed = source.and_then(|(dif, tuple)| dif.check(tuple, data, index, check));
    if let SigDomain::T10Dif(dif) = to {
        let tuple = match source {
            None => dif.generate(data, index),
            Some((source, tuple)) => dif.pass(source, tuple, data, index),
        };
        *bytes = tuple.encode();
    }
    failed.map(|(kind, expected, actual)| SigError {
        kind,
        expected,
        actual,
        offset: u64::from(index) * stride,
    })
}

#[derive(Clone, Copy)]
struct Tuple {
    guard: u16,
    app_tag: u16,
    ref_tag: u32,
}

impl Tuple {
    fn parse([g0, g1, a0, a1, r0, r1, r2, r3]: [u8; TUPLE_LEN]) -> Self {
        Self {
            guard: u16::from_be_bytes([g0, g1]),
            app_tag: u16::from_be_bytes([a0, a1]),
            ref_tag: u32::from_be_bytes([r0, r1, r2, r3]),
        }
    }

    fn encode(self) -> [u8; TUPLE_LEN] {
        let [g0, g1] = self.guard.to_be_bytes();
        let [a0, a1] = self.app_tag.to_be_bytes();
        let [r0, r1, r2, r3] = self.ref_tag.to_be_bytes();
        [g0, g1, a0, a1, r0, r1, r2, r3]
    }

    fn is_escaped(self, escape: TagEscape) -> bool {
        match escape {
            TagEscape::None => false,
            TagEscape::AppTag => self.app_tag == u16::MAX,
            TagEscape::AppAndRefTag => self.app_tag == u16::MAX && self.ref_tag == u32::MAX,
        }
    }
}

impl T10Dif {
    fn guard(&self, data: &[u8]) -> u16 {
        match self.guard {
            GuardType::Crc => crc(self.guard_seed, data),
            GuardType::IpChecksum => ip_checksum(self.guard_seed, data),
        }
    }

    fn ref_tag(&self, index: u32) -> u32 {
        match self.ref_remap {
            true => self.ref_tag.wrapping_add(index),
            false => self.ref_tag,
        }
    }

    fn generate(&self, data: &[u8], index: u32) -> Tuple {
        Tuple {
            guard: self.guard(data),
            app_tag: self.app_tag,
            ref_tag: self.ref_tag(index),
        }
    }

    /// Returns the kind, expected and actual value of the first failed check, in the order of
    /// `mlx5_ib`: guard, reference tag, application tag.
    fn check(
        &self,
        tuple: Tuple,
        data: &[u8],
        index: u32,
        check: SigCheck,
    ) -> Option<(SigErrorKind, u32, u32)> {
        if tuple.is_escaped(self.escape) {
            return None;
        }
        if check.contains(SigCheck::GUARD) {
            let expected = self.guard(data);
            if expected != tuple.guard {
                let kind = SigErrorKind::BadGuard;
                return Some((kind, expected.into(), tuple.guard.into()));
            }
        }
        let expected = self.ref_tag(index);
        if check.contains(SigCheck::REF_TAG) && expected != tuple.ref_tag {
            return Some((SigErrorKind::BadRefTag, expected, tuple.ref_tag));
        }
        let differs = (self.app_tag ^ tuple.app_tag) & self.app_tag_check_mask != 0;
        if check.contains(SigCheck::APP_TAG) && differs {
            let kind = SigErrorKind::BadAppTag;
            return Some((kind, self.app_tag.into(), tuple.app_tag.into()));
        }
        None
    }

    /// Returns the tuple of this domain for a tuple of another domain. Fields with the same
    /// attributes are copied, so that this domain detects the same errors.
    fn pass(&self, source: &Self, tuple: Tuple, data: &[u8], index: u32) -> Tuple {
        if tuple.is_escaped(source.escape) {
            return tuple;
        }
        let same_guard = (self.guard, self.guard_seed) == (source.guard, source.guard_seed);
        let same_ref_tag = (self.ref_tag, self.ref_remap) == (source.ref_tag, source.ref_remap);
        Tuple {
            guard: match same_guard {
                true => tuple.guard,
                false => self.guard(data),
            },
            app_tag: match self.app_tag == source.app_tag {
                true => tuple.app_tag,
                false => self.app_tag,
            },
            ref_tag: match same_ref_tag {
                true => tuple.ref_tag,
                false => self.ref_tag(index),
            },
        }
    }
}

/// Returns the CRC of a block, which has at least two bytes.
fn crc(seed: u16, data: &[u8]) -> u16 {
    let mut digest = Digest::new(CrcAlgorithm::Crc16T10Dif);
    let rest = match data {
        // The CRC is not reflected, so that another initial value is the same as a change of the
        // first two bytes.
        [first, second, rest @ ..] if seed != 0 => {
            digest.update(&(seed ^ u16::from_be_bytes([*first, *second])).to_be_bytes());
            rest
        }
        _ => data,
    };
    digest.update(rest);
    digest.finalize() as u16
}

/// Returns the Internet checksum of a block with an even size of up to 64 KiB (RFC 1071).
fn ip_checksum(seed: u16, data: &[u8]) -> u16 {
    let (words, _) = data.as_chunks::<2>();
    let sum = words.iter().fold(u32::from(seed), |sum, word| {
        sum + u32::from(u16::from_be_bytes(*word))
    });
    let sum = (sum & 0xffff) + (sum >> 16);
    !((sum & 0xffff) + (sum >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// CRC-16/T10-DIF, one bit at a time.
    fn crc_by_bits(seed: u16, data: &[u8]) -> u16 {
        data.iter().fold(seed, |crc, &byte| {
            (0..8).fold(crc ^ u16::from(byte) << 8, |crc, _| {
                if crc & 0x8000 == 0 {
                    crc << 1
                } else {
                    crc << 1 ^ 0x8bb7
                }
            })
        })
    }

    #[test]
    fn crc_matches_published_values() {
        // Check value of the catalogue of CRCs, and the examples of SBC-4, table 14.
        assert_eq!(crc(0, b"123456789"), 0xd0db);
        assert_eq!(crc(0, &[0; 32]), 0x0000);
        assert_eq!(crc(0, &[0xff; 32]), 0xa293);
        let counting: [u8; 32] = std::array::from_fn(|i| i as u8);
        assert_eq!(crc(0, &counting), 0x0224);
        let descending: [u8; 32] = std::array::from_fn(|i| 0xff - i as u8);
        assert_eq!(crc(0, &descending), 0xa0b7);
    }

    #[test]
    fn crc_starts_with_seed() {
        let data: Vec<u8> = (0..512u32).map(|i| (i * 7 + 3) as u8).collect();
        for seed in [0, 1, 0x8000, 0x1234, 0xffff] {
            assert_eq!(crc(seed, &data), crc_by_bits(seed, &data), "{seed:#x}");
        }
    }

    #[test]
    fn ip_checksum_matches_rfc_1071() {
        // The example of section 3: the sum is DDF2h.
        let data = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(ip_checksum(0, &data), !0xddf2);
        assert_eq!(ip_checksum(0xffff, &[0xff; 4096]), 0);
        assert_eq!(ip_checksum(0, &[0; 512]), 0xffff);
    }
}
