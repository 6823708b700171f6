//! What was written where: the generation of each block, in memory and, with a state file, beyond a
//! crash of this process.
//!
//! A block's generation grows with each write. One write of a block is in flight at a time, so the
//! blocks on the device are of the acknowledged generation, or of that in flight.
//!
//! ```text
//!   file: magic 8 | seed 8 | block size 8 | first byte 8 | length 8 | checksum kind 8 | 0 … 4096
//!         then 8 bytes for each block, little-endian: acknowledged 4 | in flight 4
//! ```
//!
//! The file is written before a write starts and after it was acknowledged, by system calls that the
//! kernel carries out even if the process is killed at once. It does not survive a crash of the
//! host, and says nothing about caches of the device.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use super::error::BenchError;
use super::job::Checksum;

const MAGIC: u64 = u64::from_le_bytes(*b"RISERBV1");
const FILE_HEADER: u64 = 4096;

/// Most blocks: their generations take 2 GiB of memory.
const MAX_BLOCKS: u64 = 1 << 28;

/// The content is not known: never written, or trimmed. In the half in flight: it is a trim.
const UNKNOWN: u32 = 1 << 31;

/// Blocks that a batch of the file has.
const BATCH: usize = 8192;

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

    /// Generation that the device has, if it is known and no trim is in flight.
    pub(super) fn acknowledged(self) -> Option<u32> {
        let is_known = (self.acknowledged | self.in_flight) & UNKNOWN == 0;
        (is_known && self.acknowledged > 0).then_some(self.acknowledged)
    }

    /// Generation of a write in flight.
    pub(super) fn in_flight(self) -> Option<u32> {
        (self.in_flight & UNKNOWN == 0 && self.in_flight > 0).then_some(self.in_flight)
    }

    /// Newest generation that the device may have.
    pub(super) fn newest(self) -> u32 {
        (self.acknowledged & !UNKNOWN).max(self.in_flight & !UNKNOWN)
    }

    /// A write or a trim is in flight.
    pub(super) fn is_busy(self) -> bool {
        self.in_flight != 0
    }
}

/// The blocks of a region, shared by all clones of a job.
#[derive(Debug)]
pub(super) struct Ledger {
    region: Range<u64>,
    block: u64,
    entries: Vec<AtomicU64>,
    file: Option<(File, String)>,
}

/// Properties that a state file has to have in common with its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Bytes of the device.
    pub(super) region: Range<u64>,
    /// Size of a block in bytes.
    pub(super) block: u64,
    pub(super) seed: u64,
    pub(super) checksum: Checksum,
}

impl Layout {
    fn header(&self) -> [u64; 6] {
        let checksum = match self.checksum {
            Checksum::Crc32c => 1,
            Checksum::Crc32 => 2,
            Checksum::Crc64 => 3,
        };
        let len = self.region.end - self.region.start;
        [
            MAGIC,
            self.seed,
            self.block,
            self.region.start,
            len,
            checksum,
        ]
    }

    /// Reads that of a state file.
    ///
    /// # Errors
    /// It cannot be read, or is no state file.
    pub(super) fn of(path: &Path) -> Result<Self, BenchError> {
        let fail = |reason: String| BenchError::State {
            path: path.display().to_string(),
            reason,
        };
        let mut header = [0; 48];
        let file = File::open(path).map_err(|error| fail(error.to_string()))?;
        file.read_exact_at(&mut header, 0)
            .map_err(|error| fail(error.to_string()))?;
        let words: Vec<u64> = header.chunks_exact(8).map(word).collect();
        let checksum = match words[5] {
            1 => Some(Checksum::Crc32c),
            2 => Some(Checksum::Crc32),
            3 => Some(Checksum::Crc64),
            _ => None,
        };
        let end = words[3].checked_add(words[4]);
        match (words[0], words[2], end, checksum) {
            (MAGIC, 40.., Some(end), Some(checksum)) => Ok(Self {
                region: words[3]..end,
                block: words[2],
                seed: words[1],
                checksum,
            }),
            _ => Err(fail("it is not a state file of riser bench".into())),
        }
    }
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("8 bytes"))
}

impl Ledger {
    /// A ledger of blocks of which nothing is known.
    ///
    /// # Errors
    /// The region has more blocks than fit into memory.
    pub(super) fn new(layout: &Layout) -> Result<Self, BenchError> {
        let blocks = (layout.region.end - layout.region.start) / layout.block;
        if blocks > MAX_BLOCKS {
            return Err(BenchError::Config(format!(
                "{blocks} blocks are too many to verify, {MAX_BLOCKS} are possible: a smaller size or \
                 larger blocks will do"
            )));
        }
        Ok(Self {
            region: layout.region.clone(),
            block: layout.block,
            entries: (0..blocks).map(|_| AtomicU64::new(0)).collect(),
            file: None,
        })
    }

    /// Opens a state file. If it exists, its blocks are known from the start; otherwise it is made,
    /// unless `must_exist`.
    ///
    /// # Errors
    /// It cannot be opened or written, or is of another job.
    pub(super) fn open(path: &Path, layout: &Layout, must_exist: bool) -> Result<Self, BenchError> {
        let name = path.display().to_string();
        let fail = |reason: String| BenchError::State {
            path: name.clone(),
            reason,
        };
        let io = |error: io::Error| fail(error.to_string());
        let mut ledger = Self::new(layout)?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(!must_exist)
            .truncate(false)
            .open(path)
            .map_err(io)?;
        let whole = FILE_HEADER + 8 * ledger.entries.len() as u64;
        match file.metadata().map_err(io)?.len() {
            // A crash may have come between the two steps of making it.
            0 if !must_exist => {
                let header: Vec<u8> = layout
                    .header()
                    .iter()
                    .flat_map(|w| w.to_le_bytes())
                    .collect();
                file.write_all_at(&header, 0).map_err(io)?;
                file.set_len(whole).map_err(io)?;
            }
            len => {
                let mut header = [0; 48];
                file.read_exact_at(&mut header, 0).map_err(io)?;
                check_header(&header, layout).map_err(fail)?;
                if len != whole {
                    return Err(fail(format!("it has {len} bytes instead of {whole}")));
                }
                ledger.load(&file).map_err(io)?;
            }
        }
        ledger.file = Some((file, name));
        Ok(ledger)
    }

    fn load(&mut self, file: &File) -> io::Result<()> {
        let mut bytes = vec![0; 8 * BATCH];
        for (batch, entries) in self.entries.chunks(BATCH).enumerate() {
            let bytes = &mut bytes[..8 * entries.len()];
            file.read_exact_at(bytes, FILE_HEADER + (8 * batch * BATCH) as u64)?;
            for (entry, bytes) in entries.iter().zip(bytes.chunks_exact(8)) {
                entry.store(word(bytes), Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// Bytes of the device that it has blocks of.
    pub(super) fn region(&self) -> &Range<u64> {
        &self.region
    }

    fn index(&self, range: &Range<u64>) -> Range<usize> {
        let index = |at: u64| ((at - self.region.start) / self.block) as usize;
        index(range.start)..index(range.end)
    }

    /// State of the block at an offset.
    pub(super) fn entry(&self, offset: u64) -> Entry {
        let index = self.index(&(offset..offset)).start;
        Entry::unpack(self.entries[index].load(Ordering::Acquire))
    }

    /// Returns whether any block of the range is known.
    pub(super) fn knows(&self, range: &Range<u64>) -> bool {
        let entries = self.entries[self.index(range)].iter();
        let mut entries = entries.map(|e| Entry::unpack(e.load(Ordering::Relaxed)));
        entries.any(|e| e.acknowledged().is_some() || e.is_busy())
    }

    /// Number of blocks whose last write or trim has not been acknowledged.
    pub(super) fn unresolved(&self) -> u64 {
        let entries = self.entries.iter();
        let busy = entries.filter(|e| Entry::unpack(e.load(Ordering::Relaxed)).is_busy());
        busy.count() as u64
    }

    /// Begins a write or a trim. Returns false, and changes nothing, while another one of any of
    /// the blocks is in flight.
    ///
    /// # Errors
    /// The state file cannot be written.
    pub(super) fn begin(&self, range: &Range<u64>, is_trim: bool) -> Result<bool, BenchError> {
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
                for index in blocks.start..index {
                    self.update(index, |entry| Entry {
                        in_flight: 0,
                        ..entry
                    });
                }
                return Ok(false);
            }
        }
        self.save(blocks)?;
        Ok(true)
    }

    /// The write or trim was acknowledged.
    ///
    /// # Errors
    /// The state file cannot be written.
    pub(super) fn end(&self, range: &Range<u64>) -> Result<(), BenchError> {
        for index in self.index(range) {
            self.update(index, |entry| Entry {
                acknowledged: entry.in_flight,
                in_flight: 0,
            });
        }
        self.save(self.index(range))
    }

    /// The block at an offset was read, and is of this generation; `None`: of none that is known.
    ///
    /// # Errors
    /// The state file cannot be written.
    pub(super) fn resolve(&self, offset: u64, generation: Option<u32>) -> Result<(), BenchError> {
        let index = self.index(&(offset..offset)).start;
        self.update(index, |entry| match generation {
            // The number of the write that did not arrive is not used again.
            None => Entry {
                acknowledged: entry.newest() | UNKNOWN,
                in_flight: 0,
            },
            Some(generation) => Entry {
                acknowledged: generation,
                in_flight: 0,
            },
        });
        self.save(index..index + 1)
    }

    fn update(&self, index: usize, change: impl Fn(Entry) -> Entry) {
        let change = |word| Some(change(Entry::unpack(word)).pack());
        let updated = self.entries[index].fetch_update(Ordering::AcqRel, Ordering::Acquire, change);
        updated.expect("the change is always made");
    }

    fn save(&self, blocks: Range<usize>) -> Result<(), BenchError> {
        let Some((file, name)) = &self.file else {
            return Ok(());
        };
        let at = FILE_HEADER + 8 * blocks.start as u64;
        let words = self.entries[blocks].iter();
        let bytes: Vec<u8> = words
            .flat_map(|e| e.load(Ordering::Acquire).to_le_bytes())
            .collect();
        file.write_all_at(&bytes, at)
            .map_err(|error| BenchError::State {
                path: name.clone(),
                reason: error.to_string(),
            })
    }
}

fn check_header(header: &[u8; 48], layout: &Layout) -> Result<(), String> {
    let names = ["", "seed", "block size", "offset", "size", "checksum"];
    let word = |index: usize| word(&header[8 * index..8 * index + 8]);
    if word(0) != MAGIC {
        return Err("it is not a state file of riser bench".into());
    }
    for (index, expected) in layout.header().into_iter().enumerate().skip(1) {
        let (name, found) = (names[index], word(index));
        if found != expected {
            return Err(format!(
                "it is of another job: its {name} is {found}, and that of this job {expected}"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> Layout {
        Layout {
            region: 8192..8192 + 16 * 4096,
            block: 4096,
            seed: 7,
            checksum: Checksum::Crc32c,
        }
    }

    fn path(name: &str) -> std::path::PathBuf {
        let name = format!("riser-ledger-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_file(&path);
        path
    }

    #[test]
    fn generations_grow_and_a_block_has_one_write_in_flight() {
        let ledger = Ledger::new(&layout()).unwrap();
        let wide = 8192..8192 + 3 * 4096;
        let middle = 12288..16384;
        assert_eq!(ledger.begin(&middle, false), Ok(true));
        assert_eq!(ledger.begin(&wide, false), Ok(false));
        assert_eq!(ledger.entry(8192), Entry::unpack(0), "nothing was begun");
        assert_eq!(ledger.entry(12288).in_flight(), Some(1));
        ledger.end(&middle).unwrap();
        assert_eq!(ledger.begin(&wide, false), Ok(true));
        assert_eq!(ledger.entry(12288).acknowledged(), Some(1));
        assert_eq!(ledger.entry(12288).in_flight(), Some(2));
        ledger.end(&wide).unwrap();
        assert_eq!(ledger.entry(12288).acknowledged(), Some(2));
        assert_eq!(ledger.entry(8192).acknowledged(), Some(1));
        assert!(ledger.knows(&wide) && !ledger.knows(&(20480..24576)));
    }

    #[test]
    fn a_trimmed_block_is_not_known_and_its_generations_are_not_used_again() {
        let ledger = Ledger::new(&layout()).unwrap();
        let block = 8192..12288;
        for is_trim in [false, true] {
            assert_eq!(ledger.begin(&block, is_trim), Ok(true));
            ledger.end(&block).unwrap();
        }
        assert_eq!(ledger.entry(8192).acknowledged(), None);
        assert_eq!(ledger.begin(&block, false), Ok(true));
        assert_eq!(ledger.entry(8192).in_flight(), Some(3));
    }

    #[test]
    fn a_state_file_has_what_was_acknowledged_and_what_was_in_flight() {
        let path = path("state");
        let ledger = Ledger::open(&path, &layout(), false).unwrap();
        let (first, second) = (8192..16384, 12288..16384);
        ledger.begin(&first, false).unwrap();
        ledger.end(&first).unwrap();
        ledger.begin(&second, false).unwrap();
        // The process is killed here.
        drop(ledger);
        assert_eq!(Layout::of(&path), Ok(layout()));
        let ledger = Ledger::open(&path, &layout(), true).unwrap();
        assert_eq!(ledger.entry(8192).acknowledged(), Some(1));
        assert_eq!(ledger.entry(12288).acknowledged(), Some(1));
        assert_eq!(ledger.entry(12288).in_flight(), Some(2));
        assert_eq!(ledger.unresolved(), 1);
        ledger.resolve(12288, Some(1)).unwrap();
        drop(ledger);
        let ledger = Ledger::open(&path, &layout(), true).unwrap();
        assert_eq!(ledger.unresolved(), 0);
        assert_eq!(ledger.entry(12288).acknowledged(), Some(1));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn files_of_other_jobs_and_other_files_are_refused() {
        let path = path("foreign");
        let open = |layout: &Layout, must_exist| {
            Ledger::open(&path, layout, must_exist)
                .unwrap_err()
                .to_string()
        };
        assert!(open(&layout(), true).contains("No such file"));
        drop(Ledger::open(&path, &layout(), false).unwrap());
        let other = Layout {
            seed: 8,
            ..layout()
        };
        assert!(open(&other, false).contains("its seed is 7, and that of this job 8"));
        std::fs::write(&path, [1; 100]).unwrap();
        assert!(
            Layout::of(&path)
                .unwrap_err()
                .to_string()
                .contains("not a state file")
        );
        assert!(open(&layout(), false).contains("not a state file"));
        std::fs::write(&path, b"short").unwrap();
        assert!(open(&layout(), false).contains("state file"));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_region_with_too_many_blocks_is_refused() {
        let large = Layout {
            region: 0..1 << 50,
            ..layout()
        };
        assert!(
            Ledger::new(&large)
                .unwrap_err()
                .to_string()
                .contains("too many")
        );
    }
}
