//! A file with protection information after a power failure.
//!
//! A block and its protection information form a frame. Frames are not aligned to sectors, so a power
//! failure can preserve a part of a frame. We record sectors, and each sector can contain the stable
//! data or any later write.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::sync::Arc;

use riser_testkit::programs::Pair;
use riser_tests::contest::portals;
use riser_tests::history::BLOCK;
use riser_tests::load::Chance;

use crate::power::{Blocks, DISK, Event, Record, log_in};

const SECTOR: usize = 512;

/// Size of a frame: a block with its protection information.
const FRAME: usize = BLOCK + 8;

/// Offset of the first frame, after the header.
const FIRST: usize = (64_usize << 10).div_ceil(FRAME) * FRAME;

/// Number of blocks, such that the file consists of whole sectors. The last one is not used.
const BLOCKS: usize = DISK as usize + 1;

/// Backend keys for a disk with protection information.
pub(crate) const KEYS: &str = ", protection: { type: 1 }";

/// Returns a new file with protection information, created by the daemon.
pub(crate) fn new_file(network: u8) -> Vec<u8> {
    let name = format!("riser-frames-{}-{network}", std::process::id());
    let file = std::env::temp_dir().join(name);
    let backend = format!(
        "{{ kind: file, path: {}, size: {}, create: true{KEYS} }}",
        file.display(),
        BLOCKS * BLOCK
    );
    let mut pair = Pair::with_target(network, &backend, &portals(network));
    // It has created the file before it accepts logins.
    drop(log_in(network, "iscsi"));
    pair.terminate();
    let content = fs::read(&file).unwrap();
    fs::remove_file(&file).unwrap();
    assert_eq!(content.len(), FIRST + BLOCKS * FRAME);
    content
}

/// Returns the data of the used blocks of a file.
pub(crate) fn data(file: &[u8]) -> Vec<u8> {
    (0..DISK)
        .flat_map(|block| &file[place(block)])
        .copied()
        .collect()
}

/// Returns the place of a block's data in the file.
fn place(block: u64) -> Range<usize> {
    let start = FIRST + block as usize * FRAME;
    start..start + BLOCK
}

/// Possible states of the file at a given point of the record.
pub(crate) struct Frames {
    record: Arc<Record>,
    stable: Vec<u8>,
    /// Later versions of each sector in order, including the number of the write.
    cached: BTreeMap<usize, Vec<(usize, Vec<u8>)>>,
    promised: Blocks,
    writes: usize,
}

impl Frames {
    pub(crate) fn new(record: Arc<Record>, content: Vec<u8>) -> Self {
        Self {
            record,
            stable: content,
            cached: BTreeMap::new(),
            promised: Blocks::new(),
            writes: 0,
        }
    }

    /// Applies an event and checks the affected blocks.
    ///
    /// # Panics
    /// Panics if any byte of a block could be older than guaranteed.
    pub(crate) fn apply(&mut self, at: usize, event: &Event) {
        match event {
            Event::Written { .. } => unreachable!("a file with frames"),
            Event::Sectors {
                offset,
                bytes,
                is_stable,
            } => {
                let start = *offset as usize;
                for (sector, bytes) in (start / SECTOR..).zip(bytes.chunks_exact(SECTOR)) {
                    if *is_stable {
                        self.stable[sector * SECTOR..][..SECTOR].copy_from_slice(bytes);
                        self.cached.remove(&sector);
                    } else {
                        let versions = self.cached.entry(sector).or_default();
                        versions.push((self.writes, bytes.to_vec()));
                    }
                }
                self.writes += 1;
                let frame = |at: usize| at.saturating_sub(FIRST) / FRAME;
                let changed = frame(start)..frame(start + bytes.len()) + 1;
                for block in changed.take_while(|block| *block < BLOCKS) {
                    self.check(at, block as u64);
                }
            }
            Event::Flushed => {
                for (sector, versions) in std::mem::take(&mut self.cached) {
                    if let Some((_, bytes)) = versions.last() {
                        self.stable[sector * SECTOR..][..SECTOR].copy_from_slice(bytes);
                    }
                }
            }
            Event::Promised(blocks) => {
                for (&block, &version) in blocks {
                    let least = self.promised.entry(block).or_default();
                    *least = version.max(*least);
                }
                for block in blocks.keys() {
                    self.check(at, *block);
                }
            }
        }
    }

    /// # Panics
    /// Panics if any byte of this block could be older than guaranteed.
    fn check(&self, at: usize, block: u64) {
        let Some(&least) = self.promised.get(&block) else {
            return;
        };
        let permitted: Vec<_> = self
            .record
            .issued(block)
            .split_off(&least)
            .into_iter()
            .map(|sequence| {
                let mut bytes = vec![0; BLOCK];
                self.record.fill(block, sequence, &mut bytes);
                bytes
            })
            .collect();
        let place = place(block);
        for sector in place.start / SECTOR..place.end.div_ceil(SECTOR) {
            let start = place.start.max(sector * SECTOR);
            let end = place.end.min((sector + 1) * SECTOR);
            let part = start - place.start..end - place.start;
            let in_sector = start - sector * SECTOR..end - sector * SECTOR;
            let stable = &self.stable[start..end];
            let cached = self.cached.get(&sector).into_iter().flatten();
            let states = cached.map(|(_, bytes)| &bytes[in_sector.clone()]);
            for state in states.chain([stable]) {
                assert!(
                    permitted.iter().any(|bytes| &bytes[part.clone()] == state),
                    "after event {at}: block {block} may be older than write {least}, which was \
                     promised to be stable"
                );
            }
        }
    }

    /// Returns a possible state after a power failure: either with any of the versions for each
    /// sector, or with all writes up to a torn write.
    pub(crate) fn cut(&self, chance: &mut Chance) -> Vec<u8> {
        let mut file = self.stable.clone();
        let is_in_order = chance.below(2) == 0;
        let waiting = self.cached.values().flatten().map(|(write, _)| *write);
        let first = waiting.min().unwrap_or(self.writes);
        let torn = first + chance.below((self.writes - first) as u64 + 1) as usize;
        for (sector, versions) in &self.cached {
            let taken = match is_in_order {
                true => {
                    let is_torn = chance.below(2) == 0;
                    let is_taken = |write| write < torn || (write == torn && is_torn);
                    versions
                        .iter()
                        .filter(|(write, _)| is_taken(*write))
                        .count()
                }
                false => chance.below(versions.len() as u64 + 1) as usize,
            };
            if let Some((_, bytes)) = versions[..taken].last() {
                file[sector * SECTOR..][..SECTOR].copy_from_slice(bytes);
            }
        }
        file
    }
}

mod oracle {
    use riser_tests::history::{Port, Version};

    use super::*;

    const BLOCK_NUMBER: u64 = 7;

    /// Returns the sectors of the block's frame, and their offset.
    fn sectors() -> Range<usize> {
        let place = place(BLOCK_NUMBER);
        place.start / SECTOR * SECTOR..place.end.div_ceil(SECTOR) * SECTOR
    }

    /// Writes this version of the block.
    fn written(record: &Record, version: u64) -> Event {
        record.issue(BLOCK_NUMBER..BLOCK_NUMBER + 1, version);
        let (place, sectors) = (place(BLOCK_NUMBER), sectors());
        let mut bytes = vec![0; sectors.len()];
        let block = &mut bytes[place.start - sectors.start..][..BLOCK];
        Version::new(version, Port(1)).fill(BLOCK_NUMBER, block);
        Event::Sectors {
            offset: sectors.start as u64,
            bytes,
            is_stable: false,
        }
    }

    fn promised(version: u64) -> Event {
        Event::Promised(Blocks::from([(BLOCK_NUMBER, version)]))
    }

    fn check_all(events: impl Fn(&Record) -> Vec<Event>) -> Frames {
        let record = Arc::new(Record::default());
        let mut frames = Frames::new(Arc::clone(&record), vec![0; FIRST + BLOCKS * FRAME]);
        for (at, event) in events(&record).iter().enumerate() {
            frames.apply(at, event);
        }
        frames
    }

    #[test]
    fn cut_can_tear_frame() {
        let frames = check_all(|record| {
            vec![
                written(record, 1),
                Event::Flushed,
                promised(1),
                written(record, 2),
            ]
        });
        let mut chance = Chance::new(1, 1);
        let mut kinds = [0; 3];
        for _ in 0..100 {
            let file = frames.cut(&mut chance);
            let version = Version::of(BLOCK_NUMBER, &file[place(BLOCK_NUMBER)]);
            kinds[version.map_or(0, |version| version.sequence as usize)] += 1;
        }
        assert!(kinds.iter().all(|count| *count > 0), "{kinds:?}");
    }

    #[test]
    #[should_panic(expected = "block 7 may be older than write 1")]
    fn missing_flush_of_frame_is_detected() {
        check_all(|record| vec![written(record, 1), promised(1)]);
    }

    #[test]
    #[should_panic(expected = "block 7 may be older than write 2")]
    fn older_sector_after_promise_is_detected() {
        check_all(|record| {
            vec![
                written(record, 2),
                Event::Flushed,
                promised(2),
                written(record, 1),
            ]
        });
    }
}
