//! Generates and checks the contents of blocks.
//!
//! A verified block starts with a 40-byte header (little-endian):
//!
//! ```text
//!   magic 4 | length 4 | checksum of all that follows 8 | seed 8 | offset 8 | generation 4 | 0 4
//! ```
//!
//! All other data is derived from the seed, offset and generation, so we can check each block
//! separately and report the first wrong byte. The seed identifies the run that wrote the block, so
//! blocks left by previous runs are not mistaken for blocks of this run.

use super::error::{Difference, Mismatch};
use super::job::{Checksum, Content};

/// Length of the header, in bytes.
pub(super) const HEADER: usize = 40;

/// `RBV2`.
const MAGIC: u32 = 0x3256_4252;

/// Number of bytes not covered by the checksum, at the start of the header.
const UNCOVERED: usize = 16;

/// Spreads every bit of `z` over the result (finalizer of SplitMix64).
pub(super) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Generates the contents of buffers.
#[derive(Clone, Debug)]
pub(super) struct Filler {
    content: Content,
    seed: u64,
}

/// Generations that a block may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Expected {
    /// Generation acknowledged before the read was started.
    pub(super) oldest: u32,
    /// Last generation started before the read completed.
    pub(super) newest: u32,
    /// Set if the block may have been written by any run.
    pub(super) any_seed: bool,
}

impl Expected {
    /// Any block that is consistent with its own header.
    pub(super) const ANY: Self = Self {
        oldest: 0,
        newest: u32::MAX,
        any_seed: true,
    };

    pub(super) fn between(oldest: u32, newest: u32) -> Self {
        Self {
            oldest,
            newest,
            any_seed: false,
        }
    }
}

impl Filler {
    pub(super) fn new(content: Content, seed: u64) -> Self {
        Self { content, seed }
    }

    /// Fills a buffer according to the options. The contents depend on `key`, so that blocks
    /// differ.
    pub(super) fn fill(&self, key: u64, out: &mut [u8]) {
        payload(&self.content, mix(self.seed ^ key), out);
    }

    /// Generates a verified block for this offset.
    pub(super) fn fill_verified(
        &self,
        kind: Checksum,
        offset: u64,
        generation: u32,
        out: &mut [u8],
    ) {
        let seed = self.seed;
        let key = mix(mix(seed ^ offset) ^ u64::from(generation));
        let len = out.len() as u32;
        payload(&self.content, key, &mut out[HEADER..]);
        out[..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4..8].copy_from_slice(&len.to_le_bytes());
        out[16..24].copy_from_slice(&seed.to_le_bytes());
        out[24..32].copy_from_slice(&offset.to_le_bytes());
        out[32..36].copy_from_slice(&generation.to_le_bytes());
        out[36..40].fill(0);
        let sum = checksum(kind, &out[UNCOVERED..]);
        out[8..16].copy_from_slice(&sum.to_le_bytes());
    }

    /// Checks a block that was read from this offset and returns its generation.
    pub(super) fn check(
        &self,
        kind: Checksum,
        offset: u64,
        expected: Expected,
        block: &[u8],
    ) -> Result<u32, Mismatch> {
        let fail = |what| Err(self.mismatch(offset, offset, what));
        let is_known = expected.oldest == expected.newest;
        let (magic, len) = (half(block, 0), half(block, 4));
        let seed = word(block, 16);
        let is_foreign = seed != self.seed && !expected.any_seed;
        let foreign = Difference::Seed {
            found: seed,
            expected: self.seed,
        };
        if magic != MAGIC || len as usize != block.len() {
            // If we know what was written, we can report the wrong byte even if the header itself
            // is damaged.
            let corrupt = is_known.then(|| self.corrupt(kind, offset, expected.newest, block));
            return match corrupt.flatten() {
                Some(byte) => Err(byte),
                None if magic != MAGIC => fail(Difference::NoHeader),
                // A write of this run was lost. The previous contents may use any block size.
                None if is_foreign => fail(foreign),
                None => fail(Difference::Length { found: len }),
            };
        }
        let place = word(block, 24);
        let generation = half(block, 32);
        if word(block, 8) != checksum(kind, &block[UNCOVERED..]) {
            let damaged = match is_known {
                true => self.damaged(kind, offset, expected.newest, block),
                false if expected.any_seed => {
                    let writer = Self::new(self.content.clone(), seed);
                    writer.corrupt(kind, offset, generation, block)
                }
                false => self.corrupt(kind, offset, generation, block),
            };
            return damaged.map_or_else(|| fail(Difference::Checksum), Err);
        }
        if place != offset {
            return fail(Difference::Offset { found: place });
        }
        if is_foreign {
            return fail(foreign);
        }
        if !(expected.oldest..=expected.newest).contains(&generation) {
            return fail(Difference::Generation {
                found: generation,
                oldest: expected.oldest,
                newest: expected.newest,
            });
        }
        Ok(generation)
    }

    /// Returns the first byte that differs from the block of a generation. This requires that both
    /// have the same checksum in their headers. Otherwise the header itself may be damaged, or the
    /// block was written with other options.
    fn corrupt(
        &self,
        kind: Checksum,
        offset: u64,
        generation: u32,
        block: &[u8],
    ) -> Option<Mismatch> {
        let right = self.verified(kind, offset, generation, block.len());
        let is_it = word(&right, 8) == word(block, 8);
        is_it
            .then(|| self.damaged(kind, offset, generation, block))
            .flatten()
    }

    /// Returns the block of `len` bytes for an offset and generation.
    pub(super) fn verified(
        &self,
        kind: Checksum,
        offset: u64,
        generation: u32,
        len: usize,
    ) -> Vec<u8> {
        let mut block = vec![0; len];
        self.fill_verified(kind, offset, generation, &mut block);
        block
    }

    /// Returns the first byte that differs from the block of a generation, or `None` if we don't
    /// know what was written. We know it if the checksum or all data after the header is correct.
    /// Neither is correct if the block was written with other options.
    fn damaged(
        &self,
        kind: Checksum,
        offset: u64,
        generation: u32,
        block: &[u8],
    ) -> Option<Mismatch> {
        let right = self.verified(kind, offset, generation, block.len());
        if word(block, 8) != word(&right, 8) && block[HEADER..] != right[HEADER..] {
            return None;
        }
        let differs = |at: &usize| block[*at] != right[*at];
        // Check the checksum last: if other bytes are wrong, it doesn't match either.
        let mut places = (UNCOVERED..block.len()).chain(0..UNCOVERED);
        let at = places.find(differs)?;
        let what = Difference::Byte {
            found: block[at],
            expected: right[at],
            generation,
        };
        Some(self.mismatch(offset + at as u64, offset, what))
    }

    fn mismatch(&self, offset: u64, block: u64, what: Difference) -> Mismatch {
        Mismatch {
            offset,
            block,
            what,
        }
    }
}

fn word(block: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(block[at..at + 8].try_into().expect("8 bytes"))
}

fn half(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(block[at..at + 4].try_into().expect("4 bytes"))
}

fn checksum(kind: Checksum, bytes: &[u8]) -> u64 {
    match kind {
        Checksum::Crc32c => crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes),
        Checksum::Crc32 => crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32IsoHdlc, bytes),
        Checksum::Crc64 => crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes),
    }
}

/// Generates random bytes, followed by the pattern or by zeroes, depending on the options.
fn payload(content: &Content, key: u64, out: &mut [u8]) {
    let random = match content.compress_percentage {
        Some(percent) => out.len() * (100 - usize::from(percent)) / 100,
        None if content.pattern.is_empty() => out.len(),
        None => 0,
    };
    let (random, rest) = out.split_at_mut(random);
    for (index, word) in random.chunks_mut(8).enumerate() {
        let bytes = mix(key.wrapping_add(index as u64)).to_le_bytes();
        word.copy_from_slice(&bytes[..word.len()]);
    }
    if content.pattern.is_empty() {
        rest.fill(0);
        return;
    }
    for chunk in rest.chunks_mut(content.pattern.len()) {
        chunk.copy_from_slice(&content.pattern[..chunk.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filler(content: Content) -> Filler {
        Filler::new(content, 99)
    }

    fn block(generation: u32) -> (Filler, Vec<u8>) {
        let filler = filler(Content::default());
        let mut block = vec![0; 4096];
        filler.fill_verified(Checksum::Crc32c, 8192, generation, &mut block);
        (filler, block)
    }

    #[test]
    fn verified_block_passes_all_checksum_kinds() {
        let filler = filler(Content::default());
        let mut block = vec![0; 512];
        for kind in [Checksum::Crc32c, Checksum::Crc32, Checksum::Crc64] {
            filler.fill_verified(kind, 512, 3, &mut block);
            assert_eq!(filler.check(kind, 512, Expected::ANY, &block), Ok(3));
            let expected = Expected::between(2, 3);
            assert_eq!(filler.check(kind, 512, expected, &block), Ok(3));
        }
    }

    #[test]
    fn mismatch_reports_first_wrong_byte() {
        let (filler, good) = block(5);
        for at in [0, 5, 9, 17, 25, 33, 37, 40, 1000, 4095] {
            let mut bad = good.clone();
            bad[at] = !bad[at];
            let expected = Expected::between(5, 5);
            let error = filler
                .check(Checksum::Crc32c, 8192, expected, &bad)
                .unwrap_err();
            assert_eq!((error.offset, error.block), (8192 + at as u64, 8192));
            let text = error.to_string();
            assert!(text.contains(&format!("byte {}", 8192 + at)), "{text}");
            assert!(text.contains(&format!("{:#04x}", good[at])), "{text}");
        }
    }

    #[test]
    fn changed_bit_is_detected_for_any_generation() {
        let (filler, good) = block(5);
        for at in (0..HEADER).chain([HEADER, 4095]) {
            let mut bad = good.clone();
            bad[at] ^= 2;
            for expected in [Expected::ANY, Expected::between(4, 8)] {
                let checked = filler.check(Checksum::Crc32c, 8192, expected, &bad);
                assert!(checked.is_err(), "byte {at}, {expected:?}: {checked:?}");
            }
        }
    }

    #[test]
    fn foreign_block_reports_byte_if_header_valid() {
        let (_, good) = block(5);
        let later = Filler::new(Content::default(), 1);
        let check = |at: usize| {
            let mut bad = good.clone();
            bad[at] = !bad[at];
            let checked = later.check(Checksum::Crc32c, 8192, Expected::ANY, &bad);
            checked.unwrap_err()
        };
        let error = check(1000);
        assert_eq!(error.offset, 9192);
        let what = Difference::Byte {
            found: !good[1000],
            expected: good[1000],
            generation: 5,
        };
        assert_eq!(error.what, what);
        // If the seed itself is damaged, we don't know the expected contents.
        assert_eq!(check(17).what, Difference::Checksum);
    }

    #[test]
    fn unknown_content_reports_checksum_only() {
        let writer = filler(Content {
            pattern: b"ab".to_vec(),
            ..Content::default()
        });
        let mut block = writer.verified(Checksum::Crc32c, 8192, 5, 4096);
        block[1000] = !block[1000];
        let check = |filler: &Filler| {
            let expected = Expected::between(5, 5);
            filler.check(Checksum::Crc32c, 8192, expected, &block)
        };
        let error = check(&filler(Content::default())).unwrap_err();
        assert_eq!((error.offset, error.what), (8192, Difference::Checksum));
        assert_eq!(check(&writer).unwrap_err().offset, 9192);
    }

    #[test]
    fn mismatch_reports_other_block_length() {
        let filler = filler(Content::default());
        let large = filler.verified(Checksum::Crc32c, 8192, 5, 65536);
        let first = &large[..4096];
        for expected in [Expected::ANY, Expected::between(5, 5)] {
            let error = filler.check(Checksum::Crc32c, 8192, expected, first);
            let what = error.unwrap_err().what;
            assert_eq!(what, Difference::Length { found: 65536 });
        }
        // If this run has written here, its write was lost.
        let other = Filler::new(Content::default(), 1);
        let large = other.verified(Checksum::Crc32c, 8192, 5, 65536);
        let check = |expected| {
            let checked = filler.check(Checksum::Crc32c, 8192, expected, &large[..4096]);
            checked.unwrap_err().what
        };
        let seed = Difference::Seed {
            found: 1,
            expected: 99,
        };
        assert_eq!(check(Expected::between(5, 5)), seed);
        assert_eq!(check(Expected::ANY), Difference::Length { found: 65536 });
    }

    #[test]
    fn outdated_misplaced_and_foreign_blocks_are_distinguished() {
        let (filler, five) = block(5);
        let check = |offset, expected, block: &[u8]| {
            filler
                .check(Checksum::Crc32c, offset, expected, block)
                .unwrap_err()
                .what
        };
        let old = Difference::Generation {
            found: 5,
            oldest: 6,
            newest: 7,
        };
        assert_eq!(check(8192, Expected::between(6, 7), &five), old);
        let misplaced = Difference::Offset { found: 8192 };
        assert_eq!(check(4096, Expected::between(5, 6), &five), misplaced);
        let mut foreign = vec![0; 4096];
        let other = Filler::new(Content::default(), 1);
        other.fill_verified(Checksum::Crc32c, 8192, 5, &mut foreign);
        let seed = Difference::Seed {
            found: 1,
            expected: 99,
        };
        assert_eq!(check(8192, Expected::between(4, 5), &foreign), seed);
        assert_eq!(
            check(8192, Expected::between(4, 5), &[0; 4096]),
            Difference::NoHeader
        );
        assert_eq!(
            filler.check(Checksum::Crc32c, 8192, Expected::ANY, &foreign),
            Ok(5)
        );
    }

    #[test]
    fn contents_respect_compressible_share() {
        let content = Content {
            compress_percentage: Some(75),
            ..Content::default()
        };
        let mut out = vec![1; 4096];
        filler(content).fill(7, &mut out);
        assert!(out[1024..].iter().all(|b| *b == 0));
        assert!(out[..1024].iter().filter(|b| **b == 0).count() < 20);
        let content = Content {
            pattern: vec![0xde, 0xad, 0xbe],
            ..Content::default()
        };
        let mut out = vec![0; 8];
        filler(content).fill(7, &mut out);
        assert_eq!(out, [0xde, 0xad, 0xbe, 0xde, 0xad, 0xbe, 0xde, 0xad]);
    }

    #[test]
    fn blocks_differ_by_offset_and_by_generation() {
        let (filler, five) = block(5);
        let (_, six) = block(6);
        let mut elsewhere = vec![0; 4096];
        filler.fill_verified(Checksum::Crc32c, 12288, 5, &mut elsewhere);
        let alike = |a: &[u8], b: &[u8]| a.iter().zip(b).filter(|(a, b)| a == b).count();
        assert!(alike(&five, &six) < 200 && alike(&five, &elsewhere) < 200);
    }
}
