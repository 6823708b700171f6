//! The medium of a foreign target and its volatile cache.

use std::collections::BTreeMap;
use std::ops::Range;

use fastrand::Rng;
use riser_tests::history::BLOCK;

type Block = [u8; BLOCK];

/// A disk with an optional volatile write cache.
#[derive(Debug)]
pub(super) struct Disk {
    stable: Vec<Block>,
    /// Blocks written to the cache and not flushed; `None` without a cache.
    cache: Option<BTreeMap<u64, Block>>,
}

impl Disk {
    pub(super) fn new(blocks: u64, has_cache: bool) -> Self {
        Self {
            stable: vec![[0; BLOCK]; blocks as usize],
            cache: has_cache.then(BTreeMap::new),
        }
    }

    pub(super) fn blocks(&self) -> u64 {
        self.stable.len() as u64
    }

    pub(super) fn has_cache(&self) -> bool {
        self.cache.is_some()
    }

    /// Returns whether the blocks lie within the disk.
    pub(super) fn contains(&self, blocks: &Range<u64>) -> bool {
        blocks.start <= blocks.end && blocks.end <= self.blocks()
    }

    /// Returns the contents of the blocks, from the cache where they are cached.
    pub(super) fn read(&self, blocks: Range<u64>) -> Vec<u8> {
        let cache = self.cache.as_ref();
        let block = |at: u64| {
            let cached = cache.and_then(|cache| cache.get(&at));
            *cached.unwrap_or(&self.stable[at as usize])
        };
        blocks.flat_map(block).collect()
    }

    /// Writes whole blocks, to the medium if `fua` is set or there is no cache.
    pub(super) fn write(&mut self, first: u64, data: &[u8], fua: bool) {
        for (at, bytes) in (first..).zip(data.chunks_exact(BLOCK)) {
            let block = Block::try_from(bytes).expect("a whole block");
            match &mut self.cache {
                Some(cache) if !fua => {
                    cache.insert(at, block);
                }
                cache => {
                    self.stable[at as usize] = block;
                    if let Some(cache) = cache {
                        cache.remove(&at);
                    }
                }
            }
        }
    }

    /// Writes the cache back.
    pub(super) fn flush(&mut self) {
        let cached = self.cache.as_mut().map(std::mem::take).unwrap_or_default();
        for (at, block) in cached {
            self.stable[at as usize] = block;
        }
    }

    /// Loses cached blocks, each with probability `share`; the rest reaches the medium. Returns
    /// whether any block was lost.
    pub(super) fn lose_cache(&mut self, share: f64, rng: &mut Rng) -> bool {
        let Some(cache) = &mut self.cache else {
            return false;
        };
        let cached = cache.len();
        cache.retain(|_, _| rng.f64() >= share);
        let is_lost = cache.len() < cached;
        self.flush();
        is_lost
    }
}
