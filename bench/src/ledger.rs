//! Records the generation of each block in memory. If there is a state file, the record survives a
//! crash of this process.
//!
//! The generation of a block is incremented with each write. As there is only one write in flight
//! for each block, a block on the device has either the acknowledged generation or the one in
//! flight. During this time, its entry is only modified by the worker of the write, both in memory
//! and in the file.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::error::BenchError;
use super::state::{Layout, StateFile};

/// Maximum number of blocks. This uses 2 GiB of memory for the generations.
const MAX_BLOCKS: u64 = 1 << 28;

/// Set in `acknowledged` if the contents are not known because they were never written or were
/// trimmed. Set in `in_flight` for a trim.
const UNKNOWN: u32 = 1 << 31;

/// State of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    acknowledged: u32,
    in_flight: u32,
}

impl Entry {
    fn unpack(word: u64) -> Self {
        Self {
            acknowledged: word as u32,
            in_flight: (word >> 32) as u32,
        }
    }

    fn pack(self) -> u64 {
        u64::from(self.acknowledged) | u64::from(self.in_flight) << 32
    }

    /// Returns the generation on the device if it's known and there is no trim in flight.
    pub(super) fn acknowledged(self) -> Option<u32> {
        let is_known = (self.acknowledged | self.in_flight) & UNKNOWN == 0;
        (is_known && self.acknowledged > 0).then_some(self.acknowledged)
    }

    /// Returns the generation of a write in flight.
    pub(super) fn in_flight(self) -> Option<u32> {
        (self.in_flight & UNKNOWN == 0 && self.in_flight > 0).then_some(self.in_flight)
    }

    /// Returns the newest generation that could be on the device.
    pub(super) fn newest(self) -> u32 {
        (self.acknowledged & !UNKNOWN).max(self.in_flight & !UNKNOWN)
    }

    /// Returns whether there is a write or trim in flight.
    pub(super) fn is_busy(self) -> bool {
        self.in_flight != 0
    }
}

/// Blocks of a region, shared by all clones of a job.
#[derive(Debug)]
pub(super) struct Ledger {
    region: Range<u64>,
    block: u64,
    /// Seed of all blocks that are written, which distinguishes them from other runs.
    seed: u64,
    entries: Vec<AtomicU64>,
    file: Option<StateFile>,
}

impl Ledger {
    /// Creates a ledger with unknown blocks.
    ///
    /// # Errors
    /// Fails if the region has too many blocks to keep in memory.
    pub(super) fn new(layout: &Layout) -> Result<Self, BenchError> {
        let blocks = (layout.region.end - layout.region.start) / layout.block;
        if blocks > MAX_BLOCKS {
            return Err(BenchError::Config(format!(
                "cannot verify {blocks} blocks, the limit is {MAX_BLOCKS}: use a smaller size or \
                 larger blocks"
            )));
        }
        Ok(Self {
            region: layout.region.clone(),
            block: layout.block,
            seed: fastrand::u64(..),
            entries: (0..blocks).map(|_| AtomicU64::new(0)).collect(),
            file: None,
        })
    }

    /// Loads the ledger from a state file. If the file is empty, it's initialized with unknown
    /// blocks.
    ///
    /// # Errors
    /// Fails if the file can't be read or written, or belongs to another job or disk.
    pub(super) fn open(file: StateFile, layout: &Layout) -> Result<Self, BenchError> {
        let mut ledger = Self::new(layout)?;
        let blocks = ledger.entries.len();
        let found = file.header()?;
        if let Some((found, _)) = &found {
            file.check(layout, found)?;
        }
        match found {
            Some((_, seed)) if !file.is_half_made()? => {
                ledger.seed = seed;
                file.load(blocks, |index, word| {
                    ledger.entries[index].store(word, Ordering::Relaxed);
                })?;
            }
            // If the blocks were truncated, we also need a new seed. Otherwise old blocks that are
            // still on the disk would be accepted as blocks of this run.
            _ => file.make(layout, ledger.seed, blocks)?,
        }
        ledger.file = Some(file);
        Ok(ledger)
    }

    /// Returns the region of the device covered by this ledger.
    pub(super) fn region(&self) -> &Range<u64> {
        &self.region
    }

    /// Returns the seed of all blocks.
    pub(super) fn seed(&self) -> u64 {
        self.seed
    }

    fn index(&self, range: &Range<u64>) -> Range<usize> {
        let index = |at: u64| ((at - self.region.start) / self.block) as usize;
        index(range.start)..index(range.end)
    }

    /// Returns the state of the block at this offset.
    pub(super) fn entry(&self, offset: u64) -> Entry {
        let index = self.index(&(offset..offset)).start;
        Entry::unpack(self.entries[index].load(Ordering::Acquire))
    }

    /// Returns whether any block in the range is known.
    pub(super) fn knows(&self, range: &Range<u64>) -> bool {
        let entries = self.entries[self.index(range)].iter();
        let mut entries = entries.map(|e| Entry::unpack(e.load(Ordering::Relaxed)));
        entries.any(|e| e.acknowledged().is_some() || e.is_busy())
    }

    /// Returns whether no write or trim was ever started.
    pub(super) fn is_blank(&self) -> bool {
        let mut entries = self.entries.iter();
        entries.all(|entry| entry.load(Ordering::Relaxed) == 0)
    }

    /// Returns the number of blocks with an unacknowledged write or trim.
    pub(super) fn unresolved(&self) -> u64 {
        let entries = self.entries.iter();
        let busy = entries.filter(|e| Entry::unpack(e.load(Ordering::Relaxed)).is_busy());
        busy.count() as u64
    }

    /// Starts a write or trim. Returns false without any changes if there is already an operation
    /// in flight for any of the blocks.
    ///
    /// # Errors
    /// Fails if the state file can't be written.
    pub(super) fn start_change(
        &self,
        range: &Range<u64>,
        is_trim: bool,
    ) -> Result<bool, BenchError> {
        let blocks = self.index(range);
        for index in blocks.clone() {
            let begin = |word| {
                let entry = Entry::unpack(word);
                let generation = entry.newest() + 1;
                let in_flight = generation | if is_trim { UNKNOWN } else { 0 };
                (!entry.is_busy()).then(|| Entry { in_flight, ..entry }.pack())
            };
            let entry = &self.entries[index];
            if entry
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, begin)
                .is_err()
            {
                for entry in &self.entries[blocks.start..index] {
                    change(entry, |entry| Entry {
                        in_flight: 0,
                        ..entry
                    });
                }
                return Ok(false);
            }
        }
        if let Some(file) = &self.file {
            let entries = self.entries[blocks.clone()].iter();
            let words = entries.map(|entry| entry.load(Ordering::Acquire));
            file.write(blocks.start, words)?;
        }
        Ok(true)
    }

    /// Records that a write or trim was acknowledged.
    ///
    /// # Errors
    /// Fails if the state file can't be written.
    pub(super) fn acknowledge_change(&self, range: &Range<u64>) -> Result<(), BenchError> {
        self.update_entries(self.index(range), |entry| Entry {
            acknowledged: entry.in_flight,
            in_flight: 0,
        })
    }

    /// Updates a busy block after it has been read with this generation, or `None` if the contents
    /// are unknown.
    ///
    /// # Errors
    /// Fails if the state file can't be written.
    pub(super) fn resolve(&self, offset: u64, generation: Option<u32>) -> Result<(), BenchError> {
        let index = self.index(&(offset..offset)).start;
        self.update_entries(index..index + 1, |entry| Entry {
            // If the old contents are found, the next write will use the same generation and
            // contents as the lost write. If they are unknown, it will use a new generation.
            acknowledged: generation.unwrap_or(entry.newest() | UNKNOWN),
            in_flight: 0,
        })
    }

    /// Updates busy entries. The file must be written first: as soon as the entries in memory are
    /// free, another worker can start a write, and we must not overwrite its record.
    fn update_entries(
        &self,
        blocks: Range<usize>,
        completed: impl Fn(Entry) -> Entry,
    ) -> Result<(), BenchError> {
        let entries = &self.entries[blocks.clone()];
        if let Some(file) = &self.file {
            let words = entries.iter().map(|entry| {
                let entry = Entry::unpack(entry.load(Ordering::Acquire));
                completed(entry).pack()
            });
            file.write(blocks.start, words)?;
        }
        for entry in entries {
            change(entry, &completed);
        }
        Ok(())
    }
}

/// Modifies an entry, which must not be modified by any other worker.
fn change(entry: &AtomicU64, to: impl Fn(Entry) -> Entry) {
    let old = Entry::unpack(entry.load(Ordering::Acquire));
    entry.store(to(old).pack(), Ordering::Release);
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::path::PathBuf;
    use std::thread;

    use super::super::job::Checksum;
    use super::super::state::Lock;
    use super::*;

    fn layout() -> Layout {
        Layout {
            region: 8192..8192 + 16 * 4096,
            block: 4096,
            checksum: Checksum::Crc32c,
            disk: 1,
            content: 1,
        }
    }

    /// A state file that is removed on drop.
    struct Temporary(PathBuf);

    impl Temporary {
        fn new(name: &str) -> Self {
            let name = format!("riser-ledger-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            let _ = std::fs::remove_file(&path);
            Self(path)
        }

        fn open(&self) -> (Ledger, Lock) {
            let (file, lock) = StateFile::open(&self.0, true).unwrap();
            (Ledger::open(file, &layout()).unwrap(), lock)
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn block_allows_single_write_in_flight() {
        let ledger = Ledger::new(&layout()).unwrap();
        let wide = 8192..8192 + 3 * 4096;
        let middle = 12288..16384;
        assert_eq!(ledger.start_change(&middle, false), Ok(true));
        assert_eq!(ledger.start_change(&wide, false), Ok(false));
        assert_eq!(ledger.entry(8192), Entry::unpack(0), "nothing was begun");
        assert_eq!(ledger.entry(12288).in_flight(), Some(1));
        ledger.acknowledge_change(&middle).unwrap();
        assert_eq!(ledger.start_change(&wide, false), Ok(true));
        assert_eq!(ledger.entry(12288).acknowledged(), Some(1));
        assert_eq!(ledger.entry(12288).in_flight(), Some(2));
        ledger.acknowledge_change(&wide).unwrap();
        assert_eq!(ledger.entry(12288).acknowledged(), Some(2));
        assert_eq!(ledger.entry(8192).acknowledged(), Some(1));
        assert!(ledger.knows(&wide) && !ledger.knows(&(20480..24576)));
    }

    #[test]
    fn trimmed_block_is_unknown_without_reusing_generations() {
        let ledger = Ledger::new(&layout()).unwrap();
        let block = 8192..12288;
        for is_trim in [false, true] {
            assert_eq!(ledger.start_change(&block, is_trim), Ok(true));
            ledger.acknowledge_change(&block).unwrap();
        }
        assert_eq!(ledger.entry(8192).acknowledged(), None);
        assert_eq!(ledger.start_change(&block, false), Ok(true));
        assert_eq!(ledger.entry(8192).in_flight(), Some(3));
    }

    #[test]
    fn state_file_keeps_random_seed() {
        let first = Ledger::new(&layout()).unwrap();
        assert_ne!(first.seed(), Ledger::new(&layout()).unwrap().seed());
        let path = Temporary::new("seed");
        let (ledger, lock) = path.open();
        let seed = ledger.seed();
        drop((ledger, lock));
        assert_eq!(path.open().0.seed(), seed);
    }

    #[test]
    fn state_file_keeps_acknowledged_and_pending_writes() {
        let path = Temporary::new("state");
        let (ledger, lock) = path.open();
        let (first, second) = (8192..16384, 12288..16384);
        ledger.start_change(&first, false).unwrap();
        ledger.acknowledge_change(&first).unwrap();
        ledger.start_change(&second, false).unwrap();
        // Assume that the process is killed here.
        drop((ledger, lock));
        let (ledger, lock) = path.open();
        assert_eq!(ledger.entry(8192).acknowledged(), Some(1));
        assert_eq!(ledger.entry(12288).acknowledged(), Some(1));
        assert_eq!(ledger.entry(12288).in_flight(), Some(2));
        assert_eq!(ledger.unresolved(), 1);
        ledger.resolve(12288, Some(1)).unwrap();
        drop((ledger, lock));
        let (ledger, _lock) = path.open();
        assert_eq!(ledger.unresolved(), 0);
        assert_eq!(ledger.entry(12288).acknowledged(), Some(1));
    }

    #[test]
    fn write_end_keeps_next_begin_recorded() {
        const WRITES: u32 = 5000;
        let path = Temporary::new("race");
        let (ledger, _lock) = path.open();
        let file = std::fs::File::open(&path.0).unwrap();
        let block = 8192..12288;
        let write = || {
            for _ in 0..WRITES {
                while !ledger.start_change(&block, false).unwrap() {
                    thread::yield_now();
                }
                // Allow the other worker to complete its remaining steps.
                thread::yield_now();
                let mut word = [0; 8];
                file.read_exact_at(&mut word, 4096).unwrap();
                let recorded = Entry::unpack(u64::from_le_bytes(word));
                assert_eq!(recorded, ledger.entry(8192));
                ledger.acknowledge_change(&block).unwrap();
            }
        };
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(write);
            }
        });
        assert_eq!(ledger.entry(8192).acknowledged(), Some(4 * WRITES));
    }

    #[test]
    fn region_with_too_many_blocks_fails() {
        let large = Layout {
            region: 0..1 << 50,
            ..layout()
        };
        assert!(
            Ledger::new(&large)
                .unwrap_err()
                .to_string()
                .contains("cannot verify")
        );
    }
}
