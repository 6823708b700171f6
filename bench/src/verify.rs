//! Verifies blocks using their headers, and the ledger if there is one.

use std::ops::{Range, RangeInclusive};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::content::{Expected, Filler};
use super::error::{BenchError, Difference, Mismatch};
use super::job::Checksum;
use super::ledger::{Entry, Ledger};
use super::outcome::Verified;

/// Blocks that are verified when they are read.
#[derive(Clone, Debug)]
pub(super) enum Check {
    /// No blocks.
    Nothing,
    /// All blocks, using only their own headers.
    Own,
    /// Blocks known to the ledger.
    Ledger(Arc<Ledger>),
}

/// Generates and verifies the blocks of a job.
#[derive(Clone, Debug)]
pub(super) struct Verifier {
    pub(super) filler: Filler,
    pub(super) check: Check,
    pub(super) checksum: Checksum,
    /// Size of a block with a header in bytes.
    pub(super) block: u64,
    /// Logical block size of the device in bytes. Writes of this size are atomic.
    pub(super) atom: u64,
    /// Set if reads also resolve operations that were in flight when another process was killed.
    pub(super) resolves: bool,
}

/// Result for a block without errors.
enum BlockState {
    /// The expected contents are unknown.
    Unknown,
    /// The block has the expected contents.
    Whole,
    /// A write was interrupted by a crash and the block contains both old and new data.
    Torn,
}

impl Verifier {
    pub(super) fn ledger(&self) -> Option<&Ledger> {
        match &self.check {
            Check::Ledger(ledger) => Some(ledger),
            Check::Nothing | Check::Own => None,
        }
    }

    fn blocks(&self, range: &Range<u64>) -> impl Iterator<Item = u64> + use<> {
        range.clone().step_by(self.block as usize)
    }

    /// Stores the oldest generation that can be found by a read starting now in `out`, for each
    /// block.
    pub(super) fn note_oldest(&self, range: &Range<u64>, out: &mut Vec<Option<u32>>) {
        out.clear();
        if let Some(ledger) = self.ledger() {
            out.extend(self.blocks(range).map(|at| ledger.entry(at).acknowledged()));
        }
    }

    /// Generates the blocks of a write that was started in the ledger.
    pub(super) fn fill(&self, ledger: &Ledger, range: &Range<u64>, out: &mut [u8]) {
        let blocks = out.chunks_mut(self.block as usize);
        for (block, at) in blocks.zip(self.blocks(range)) {
            let generation = ledger.entry(at).newest();
            self.filler
                .fill_verified(self.checksum, at, generation, block);
        }
    }

    /// Verifies the blocks returned by a read. Returns the number of blocks with known contents.
    pub(super) fn check(
        &self,
        range: &Range<u64>,
        oldest: &[Option<u32>],
        bytes: &[u8],
    ) -> Result<Verified, BenchError> {
        let blocks = bytes.chunks(self.block as usize).zip(self.blocks(range));
        let mut checked = Verified::default();
        for (index, (block, at)) in blocks.enumerate() {
            let found = match &self.check {
                Check::Nothing => BlockState::Unknown,
                Check::Own => {
                    self.check_block(at, Expected::ANY, block)?;
                    BlockState::Whole
                }
                Check::Ledger(ledger) if self.resolves => self.resolve(ledger, at, block)?,
                Check::Ledger(ledger) => {
                    let oldest = oldest.get(index).copied().flatten();
                    self.check_known(ledger.entry(at), oldest, at, block)?
                }
            };
            checked.blocks += u64::from(matches!(found, BlockState::Whole));
            checked.torn += u64::from(matches!(found, BlockState::Torn));
        }
        Ok(checked)
    }

    /// Verifies a block that was known when the read was started, unless it was trimmed since then.
    fn check_known(
        &self,
        entry: Entry,
        oldest: Option<u32>,
        at: u64,
        block: &[u8],
    ) -> Result<BlockState, BenchError> {
        let (Some(oldest), Some(_)) = (oldest, entry.acknowledged()) else {
            return Ok(BlockState::Unknown);
        };
        let newest = entry.newest();
        match self.check_block(at, Expected::between(oldest, newest), block) {
            Ok(_) => Ok(BlockState::Whole),
            // The read may contain parts of a concurrent write. These can end at any byte, because
            // the page cache is copied without a lock.
            Err(_) if self.is_mixture(1, oldest..=newest, at, block) => Ok(BlockState::Unknown),
            Err(error) => Err(error),
        }
    }

    /// Returns whether each unit of `atom` bytes belongs to one of these generations. There are
    /// few, as all were written during a single read.
    fn is_mixture(
        &self,
        atom: usize,
        generations: RangeInclusive<u32>,
        at: u64,
        block: &[u8],
    ) -> bool {
        let mut left: Vec<usize> = (0..block.len()).step_by(atom).collect();
        for generation in generations.rev() {
            let right = self
                .filler
                .verified(self.checksum, at, generation, block.len());
            let atoms = |from: usize| from..(from + atom).min(block.len());
            left.retain(|from| block[atoms(*from)] != right[atoms(*from)]);
            if left.is_empty() {
                return true;
            }
        }
        false
    }

    fn check_block(&self, at: u64, expected: Expected, block: &[u8]) -> Result<u32, BenchError> {
        let checked = self.filler.check(self.checksum, at, expected, block);
        checked.map_err(|mismatch| BenchError::Mismatch(Box::new(mismatch)))
    }

    /// Verifies a block after a crash. If a write was in flight, each logical block contains either
    /// old or new data, because disks don't provide a stronger guarantee. The contents are then
    /// recorded as acknowledged if the block is consistent, and as unknown otherwise.
    fn resolve(&self, ledger: &Ledger, at: u64, block: &[u8]) -> Result<BlockState, BenchError> {
        let entry = ledger.entry(at);
        let atom = self.atom as usize;
        match (entry.acknowledged(), entry.in_flight()) {
            (None, None) => {
                // If there is an operation in flight, it's a trim, and the contents become unknown.
                if entry.is_busy() {
                    ledger.resolve(at, None)?;
                }
                Ok(BlockState::Unknown)
            }
            (Some(old), None) => {
                self.check_block(at, Expected::between(old, old), block)?;
                Ok(BlockState::Whole)
            }
            (Some(old), Some(new)) => {
                let found = match self.check_block(at, Expected::between(old, new), block) {
                    Ok(found) => Some(found),
                    Err(_) if self.is_mixture(atom, old..=new, at, block) => None,
                    Err(error) => return Err(error),
                };
                ledger.resolve(at, found)?;
                Ok(found.map_or(BlockState::Torn, |_| BlockState::Whole))
            }
            (None, Some(new)) => self.resolve_first(ledger, new, at, block),
        }
    }

    /// Verifies a block after a crash whose contents were unknown before the write.
    fn resolve_first(
        &self,
        ledger: &Ledger,
        new: u32,
        at: u64,
        block: &[u8],
    ) -> Result<BlockState, BenchError> {
        let any = Expected::between(0, u32::MAX);
        let (generation, found) = match self.filler.check(self.checksum, at, any, block) {
            Ok(generation) if generation == new => (Some(new), BlockState::Whole),
            Err(damaged) if is_of(&damaged, new) => {
                // The logical block containing the header was written completely, so it must be
                // correct. The rest may contain unknown old data.
                if damaged.offset < at + self.atom {
                    return Err(BenchError::Mismatch(Box::new(damaged)));
                }
                (None, BlockState::Torn)
            }
            // These are the old contents, which are unknown.
            Ok(_) | Err(_) => (None, BlockState::Unknown),
        };
        ledger.resolve(at, generation)?;
        Ok(found)
    }
}

/// Returns whether a block has the header of this generation, but wrong contents.
fn is_of(mismatch: &Mismatch, new: u32) -> bool {
    matches!(mismatch.what, Difference::Byte { generation, .. } if generation == new)
}

/// Returns the next range in the region of the ledger that contains a known block.
pub(super) fn next_known(ledger: &Ledger, next: &AtomicU64, piece: u64) -> Option<Range<u64>> {
    let end = ledger.region().end;
    loop {
        let start = next.fetch_add(piece, Ordering::Relaxed);
        if start >= end {
            return None;
        }
        let range = start..(start + piece).min(end);
        if ledger.knows(&range) {
            return Some(range);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::job::Content;
    use super::super::state::Layout;
    use super::*;

    const BLOCK: Range<u64> = 4096..8192;

    struct Rig {
        verifier: Verifier,
        ledger: Arc<Ledger>,
    }

    impl Rig {
        fn new(resolves: bool) -> Self {
            let layout = Layout {
                region: 0..65536,
                block: 4096,
                checksum: Checksum::Crc32c,
                disk: 1,
                content: 1,
            };
            let ledger = Arc::new(Ledger::new(&layout).unwrap());
            let verifier = Verifier {
                filler: Filler::new(Content::default(), ledger.seed()),
                check: Check::Ledger(ledger.clone()),
                checksum: Checksum::Crc32c,
                block: 4096,
                atom: 512,
                resolves,
            };
            Self { verifier, ledger }
        }

        /// Starts a write and returns its contents.
        fn start_write(&self) -> Vec<u8> {
            assert_eq!(self.ledger.start_change(&BLOCK, false), Ok(true));
            let mut block = vec![0; 4096];
            self.verifier.fill(&self.ledger, &BLOCK, &mut block);
            block
        }

        fn write(&self) -> Vec<u8> {
            let block = self.start_write();
            self.ledger.acknowledge_change(&BLOCK).unwrap();
            block
        }

        fn read(&self, oldest: &[Option<u32>], block: &[u8]) -> Result<u64, BenchError> {
            let checked = self.verifier.check(&BLOCK, oldest, block)?;
            Ok(checked.blocks)
        }

        /// Returns the number of torn blocks after a crash.
        fn torn(&self, block: &[u8]) -> Result<u64, BenchError> {
            let checked = self.verifier.check(&BLOCK, &[], block)?;
            assert_eq!(checked.blocks, 0);
            Ok(checked.torn)
        }
    }

    #[test]
    fn concurrent_read_rejects_older_generations() {
        let rig = Rig::new(false);
        let (first, second) = (rig.write(), rig.write());
        let mut oldest = Vec::new();
        rig.verifier.note_oldest(&BLOCK, &mut oldest);
        let third = rig.start_write();
        assert_eq!(rig.read(&oldest, &second), Ok(1));
        assert_eq!(rig.read(&oldest, &third), Ok(1));
        let error = rig.read(&oldest, &first).unwrap_err().to_string();
        assert!(error.contains("generation 1, expected 2 to 3"), "{error}");
        assert_eq!(rig.read(&[None], &first), Ok(0), "it was not known");
    }

    #[test]
    fn concurrent_read_may_mix_both_generations() {
        let rig = Rig::new(false);
        let second = rig.write();
        let mut oldest = Vec::new();
        rig.verifier.note_oldest(&BLOCK, &mut oldest);
        let third = rig.start_write();
        let (old_first, new_first) = (
            [&second[..512], &third[512..]].concat(),
            [&third[..512], &second[512..]].concat(),
        );
        assert_eq!(rig.read(&oldest, &old_first), Ok(0));
        assert_eq!(rig.read(&oldest, &new_first), Ok(0));
        assert!(rig.read(&oldest, &[0; 4096]).is_err());
        let neither = [&third[..512], &[7; 512], &second[1024..]].concat();
        assert!(rig.read(&oldest, &neither).is_err());
        let mut anywhere = [&third[..600], &second[600..]].concat();
        assert_eq!(rig.read(&oldest, &anywhere), Ok(0));
        anywhere[2000..2016].fill(7);
        assert!(rig.read(&oldest, &anywhere).is_err());
        rig.ledger.acknowledge_change(&BLOCK).unwrap();
        assert_eq!(
            rig.read(&oldest, &new_first),
            Ok(0),
            "it ended in the meantime"
        );
        rig.verifier.note_oldest(&BLOCK, &mut oldest);
        let error = rig.read(&oldest, &new_first).unwrap_err();
        let BenchError::Mismatch(mismatch) = error else {
            panic!("{error}");
        };
        // The first bytes of both could be equal by chance.
        assert!((4608..4640).contains(&mismatch.offset), "{mismatch}");
    }

    #[test]
    fn block_of_previous_run_is_rejected() {
        let (earlier, rig) = (Rig::new(false), Rig::new(false));
        let (stale, new) = (earlier.write(), rig.write());
        let mut oldest = Vec::new();
        rig.verifier.note_oldest(&BLOCK, &mut oldest);
        assert_eq!(rig.read(&oldest, &new), Ok(1));
        let error = rig.read(&oldest, &stale).unwrap_err().to_string();
        assert!(error.contains("written by another run"), "{error}");
    }

    #[test]
    fn crash_keeps_old_or_new_block() {
        for new in [false, true] {
            let rig = Rig::new(true);
            let _first = rig.write();
            let (second, third) = (rig.write(), rig.start_write());
            let there = if new { &third } else { &second };
            assert_eq!(rig.read(&[], there), Ok(1));
            assert_eq!(rig.ledger.unresolved(), 0);
            let expected = if new { 3 } else { 2 };
            assert_eq!(rig.ledger.entry(4096).acknowledged(), Some(expected));
        }
        let rig = Rig::new(true);
        let (first, _second, _third) = (rig.write(), rig.write(), rig.start_write());
        assert!(rig.read(&[], &first).is_err(), "never a third content");
        assert!(rig.read(&[], &[0; 4096]).is_err());
    }

    #[test]
    fn crash_may_tear_between_logical_blocks() {
        let rig = || {
            let rig = Rig::new(true);
            let (second, third) = (rig.write(), rig.start_write());
            (rig, second, third)
        };
        for is_first_new in [false, true] {
            let (rig, second, third) = rig();
            let torn = match is_first_new {
                true => [&third[..512], &second[512..]].concat(),
                false => [&second[..3584], &third[3584..]].concat(),
            };
            assert_eq!(rig.torn(&torn), Ok(1));
            assert_eq!(rig.ledger.unresolved(), 0);
            assert_eq!(rig.ledger.entry(4096).acknowledged(), None);
        }
        let (rig, second, third) = rig();
        assert!(rig.torn(&[&third[..512], &[7; 3584]].concat()).is_err());
        assert!(rig.torn(&[&third[..100], &second[100..]].concat()).is_err());
        assert!(rig.torn(&[&[0; 512], &second[512..]].concat()).is_err());
        assert_eq!(rig.ledger.unresolved(), 1, "it stays to be settled");
    }

    #[test]
    fn crash_may_lose_first_write() {
        let rig = Rig::new(true);
        let mut damaged = rig.start_write();
        damaged[100] = !damaged[100];
        let error = rig.torn(&damaged).unwrap_err().to_string();
        assert!(error.contains("byte 4196 is"), "{error}");
        let rig = Rig::new(true);
        let torn = [&rig.start_write()[..2048], &[7; 2048]].concat();
        assert_eq!(rig.torn(&torn), Ok(1));
        assert_eq!(rig.ledger.unresolved(), 0);
        let rig = Rig::new(true);
        rig.start_write();
        assert_eq!(rig.torn(&[7; 4096]), Ok(0));
        assert_eq!(rig.ledger.unresolved(), 0);
        assert_eq!(rig.ledger.entry(4096).acknowledged(), None);
        let new = rig.start_write();
        assert_eq!(rig.read(&[], &new), Ok(1));
        assert_eq!(rig.ledger.entry(4096).acknowledged(), Some(2));
    }

    #[test]
    fn scan_skips_unknown_pieces() {
        let rig = Rig::new(false);
        rig.write();
        let next = AtomicU64::new(0);
        assert_eq!(next_known(&rig.ledger, &next, 16384), Some(0..16384));
        assert_eq!(next_known(&rig.ledger, &next, 16384), None);
    }
}
