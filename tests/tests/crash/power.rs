//! Simulates a power failure at any point of a load.
//!
//! The daemon's file is on a FUSE disk provided by this test. We know the contents of its volatile
//! cache, because we record every write and flush by the daemon and every response to an initiator,
//! all in a single order. For each point of this record, a block can contain the stable data or any
//! later write, separately for each block. The data must never be older than the last stable data
//! that was acknowledged before: by a flush, by a write with FUA, or by any write if the unit
//! doesn't have a write cache.
//!
//! For some of these points (and for all points in some of the loads), we also create a disk image
//! as it could be after a power failure, which contains a part of the data that was not flushed and
//! can be torn at any sector. A daemon is started with this image and an initiator reads it
//! ([`images`](super::images)).
//!
//! `RISER_POWER_RUNS` sets the number of loads (default 2 of each kind), `RISER_POWER_SEED` sets
//! the random seed, `RISER_POWER_IMAGES` sets the number of images per load, and
//! `RISER_POWER_WHOLE` sets the number of loads for which we create an image for every point.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Waker;
use std::thread;
use std::time::Duration;

use riser_block::task::block_on;
use riser_block::{
    BlockDevice, BlockError, Buffer, ByteDevice, Extent, Geometry, MemoryDevice, ZeroOptions,
};
use riser_exports::fuse::{Caching, FuseMount, FuseOptions};
use riser_initiator::engine::IoData;
use riser_initiator::lun::Lun;
use riser_initiator::request::{Cdb, DataLen};
use riser_testkit::eventually_ok;
use riser_testkit::programs::{Pair, skip};
use riser_tests::contest::portals;
use riser_tests::history::{BLOCK, Port, Version};
use riser_tests::load::{Chance, setting};

use crate::frames::{self, Frames};
use crate::images::{Images, client, url};

/// Disk size in blocks, as used in the record.
pub(crate) const DISK: u64 = 3 * 64;

/// Offset of the network number for daemons that use an image.
const IMAGES: u8 = 40;

/// Maximum number of blocks per command.
const LONGEST: u64 = 24;

/// Number of commands per initiator.
const COMMANDS: usize = 60;

const PATIENCE: Duration = Duration::from_secs(60);

const GOOD: u8 = 0;
const CHECK_CONDITION: u8 = 2;

/// Block versions by block number. Zeroes have version 0.
pub(crate) type Blocks = BTreeMap<u64, u64>;

/// An event, in order.
pub(crate) enum Event {
    /// The daemon has written these versions. With FUA, they are immediately stable.
    Written { blocks: Blocks, is_stable: bool },
    /// The daemon has written these sectors of a file with frames.
    Sectors {
        /// Offset in bytes.
        offset: u64,
        bytes: Vec<u8>,
        is_stable: bool,
    },
    /// All previous writes are stable.
    Flushed,
    /// An initiator has been notified that these or later versions are stable.
    Promised(Blocks),
}

/// Events, and the versions that are zero.
#[derive(Default)]
pub(crate) struct Record {
    events: Mutex<Vec<Event>>,
    zeroes: Mutex<Zeroes>,
    /// Numbers of all commands that may have changed a block.
    issued: Mutex<BTreeMap<u64, BTreeSet<u64>>>,
}

/// Zeroes don't contain a version. But each block is only used by a single initiator, which sends
/// one command at a time, so this must be the last command that has set the block to zero.
#[derive(Default)]
struct Zeroes {
    latest: Blocks,
    /// Numbers of all commands that write zeroes.
    all: BTreeSet<u64>,
}

impl Record {
    fn events(&self) -> MutexGuard<'_, Vec<Event>> {
        self.events.lock().unwrap()
    }

    fn zeroes(&self) -> MutexGuard<'_, Zeroes> {
        self.zeroes.lock().unwrap()
    }

    /// Must be called before a command that changes these blocks is sent.
    pub(crate) fn issue(&self, blocks: Range<u64>, sequence: u64) {
        let mut issued = self.issued.lock().unwrap();
        for block in blocks {
            issued.entry(block).or_default().insert(sequence);
        }
    }

    /// Returns the numbers of all commands that may have changed a block.
    pub(crate) fn issued(&self, block: u64) -> BTreeSet<u64> {
        let issued = self.issued.lock().unwrap();
        issued.get(&block).cloned().unwrap_or_default()
    }

    /// Must be called before a command that writes zeroes is sent.
    fn announce(&self, blocks: Range<u64>, sequence: u64) {
        self.issue(blocks.clone(), sequence);
        let mut zeroes = self.zeroes();
        zeroes.all.insert(sequence);
        zeroes.latest.extend(blocks.map(|block| (block, sequence)));
    }

    /// Returns the data of a block with this version.
    pub(crate) fn fill(&self, block: u64, sequence: u64, bytes: &mut [u8]) {
        match sequence == 0 || self.zeroes().all.contains(&sequence) {
            true => bytes.fill(0),
            false => Version::new(sequence, Port(1)).fill(block, bytes),
        }
    }

    pub(crate) fn push(&self, event: Event) {
        self.events().push(event);
    }
}

/// An in-memory disk that records writes and flushes before they are acknowledged.
struct Recorder {
    disk: MemoryDevice,
    record: Arc<Record>,
    /// Record sectors instead of the versions of blocks.
    has_frames: bool,
}

impl Recorder {
    fn zeroed(&self, range: Range<u64>, is_stable: bool) {
        if self.has_frames {
            let (offset, bytes) = (range.start, vec![0; (range.end - range.start) as usize]);
            return self.record.push(Event::Sectors {
                offset,
                bytes,
                is_stable,
            });
        }
        let blocks = range.start / BLOCK as u64..range.end / BLOCK as u64;
        let latest = self.record.zeroes().latest.clone();
        let number = |block| (block, latest.get(&block).copied().unwrap_or_default());
        let blocks = blocks.map(number).collect();
        self.record.push(Event::Written { blocks, is_stable });
    }
}

impl BlockDevice for Recorder {
    fn geometry(&self) -> &Geometry {
        self.disk.geometry()
    }

    fn try_buffer(&self, len: usize) -> Option<Buffer> {
        self.disk.try_buffer(len)
    }

    fn buffer_bytes(&self) -> u64 {
        self.disk.buffer_bytes()
    }

    fn wake_when_free(&self, waker: &Waker) {
        self.disk.wake_when_free(waker);
    }

    async fn read(&self, offset: u64, buffer: Buffer) -> Result<Buffer, BlockError> {
        self.disk.read(offset, buffer).await
    }

    async fn write(&self, offset: u64, buffer: Buffer, fua: bool) -> Result<Buffer, BlockError> {
        let mut bytes = vec![0; buffer.len()];
        buffer.slice().read(0, &mut bytes);
        if self.has_frames {
            let result = self.disk.write(offset, buffer, fua).await;
            self.record.push(Event::Sectors {
                offset,
                bytes,
                is_stable: fua,
            });
            return result;
        }
        let first = offset / BLOCK as u64;
        let latest = self.record.zeroes().latest.clone();
        let blocks = bytes
            .chunks_exact(BLOCK)
            .zip(first..)
            .map(|(bytes, block)| {
                let version = Version::of(block, bytes).expect("a whole block of this load");
                let of_zeroes = latest.get(&block).copied().unwrap_or_default();
                match version.sequence {
                    0 => (block, of_zeroes),
                    sequence => (block, sequence),
                }
            });
        let blocks = blocks.collect();
        let result = self.disk.write(offset, buffer, fua).await;
        let is_stable = fua;
        self.record.push(Event::Written { blocks, is_stable });
        result
    }

    async fn flush(&self) -> Result<(), BlockError> {
        self.record.push(Event::Flushed);
        self.disk.flush().await
    }

    async fn discard(&self, range: Range<u64>) -> Result<(), BlockError> {
        self.zeroed(range.clone(), false);
        self.disk.discard(range).await
    }

    async fn write_zeroes(
        &self,
        range: Range<u64>,
        options: ZeroOptions,
    ) -> Result<(), BlockError> {
        self.zeroed(range.clone(), options.fua);
        self.disk.write_zeroes(range, options).await
    }

    async fn status(&self, range: Range<u64>) -> Result<Vec<Extent>, BlockError> {
        self.disk.status(range).await
    }
}

/// Possible states of a disk with a volatile cache at a given point of the record.
#[derive(Default)]
struct Disk {
    stable: Blocks,
    /// Later versions in order, including the number of the write.
    cached: BTreeMap<u64, Vec<(usize, u64)>>,
    promised: Blocks,
    writes: usize,
}

impl Disk {
    fn apply(&mut self, event: &Event) {
        match event {
            Event::Written { blocks, is_stable } => {
                for (&block, &version) in blocks {
                    if *is_stable {
                        self.stable.insert(block, version);
                        self.cached.remove(&block);
                    } else {
                        let versions = self.cached.entry(block).or_default();
                        versions.push((self.writes, version));
                    }
                }
                self.writes += 1;
            }
            Event::Sectors { .. } => unreachable!("a disk without frames"),
            Event::Flushed => {
                for (block, versions) in std::mem::take(&mut self.cached) {
                    let last = versions.last().map(|&(_, version)| (block, version));
                    self.stable.extend(last);
                }
            }
            Event::Promised(blocks) => {
                // A durable write may have guaranteed a later version while the flush was in
                // flight.
                for (&block, &version) in blocks {
                    let least = self.promised.entry(block).or_default();
                    *least = version.max(*least);
                }
            }
        }
    }

    fn stable(&self, block: u64) -> u64 {
        self.stable.get(&block).copied().unwrap_or_default()
    }

    /// # Panics
    /// Panics if a block could be older than guaranteed.
    fn check(&self, at: usize) {
        for (block, &least) in &self.promised {
            let cached = self.cached.get(block).into_iter().flatten();
            let versions = cached.map(|&(_, version)| version);
            let oldest = versions.chain([self.stable(*block)]).min();
            let oldest = oldest.unwrap_or_default();
            assert!(
                oldest >= least,
                "after event {at}: block {block} may hold write {oldest}, although write {least} \
                 was promised to be stable"
            );
        }
    }

    /// Returns a possible state after a power failure: either with any of the versions for each
    /// block, or with all writes up to a torn write.
    fn cut(&self, chance: &mut Chance) -> Blocks {
        let is_in_order = chance.below(2) == 0;
        let waiting = self.cached.values().flatten().map(|&(write, _)| write);
        let first = waiting.min().unwrap_or(self.writes);
        let torn = first + chance.below((self.writes - first) as u64 + 1) as usize;
        let mut state = |block| {
            let cached = self.cached.get(&block).map_or(&[][..], |cached| cached);
            let taken = match is_in_order {
                true => {
                    let taken = cached.iter().filter(|(write, _)| *write < torn).count();
                    let is_torn = cached.get(taken).is_some_and(|(write, _)| *write == torn);
                    taken + usize::from(is_torn && chance.below(2) == 0)
                }
                false => chance.below(cached.len() as u64 + 1) as usize,
            };
            match taken {
                0 => (block, self.stable(block)),
                n => (block, cached[n - 1].1),
            }
        };
        (0..DISK).map(&mut state).collect()
    }
}

/// Number of points where power could be lost, and the checks done for them.
#[derive(Default)]
struct Totals {
    cuts: usize,
    flushes: usize,
    promises: usize,
    images: usize,
}

impl Totals {
    fn count(&mut self, event: &Event) {
        self.cuts += 1;
        self.flushes += usize::from(matches!(event, Event::Flushed));
        self.promises += usize::from(matches!(event, Event::Promised(_)));
    }
}

/// State known to the initiators, which is protected by a lock: the number of a write must be
/// larger than any previous write to the same blocks.
#[derive(Default)]
struct Known {
    sequence: u64,
    acknowledged: Blocks,
}

/// An initiator that has exclusive use of some blocks and sends one command at a time. A flush
/// includes the blocks of all initiators.
struct User {
    lun: Lun,
    blocks: Range<u64>,
    /// Number of record blocks per block of the unit.
    grain: u64,
    writes_are_stable: bool,
    known: Arc<Mutex<Known>>,
    record: Arc<Record>,
    /// Current contents of its blocks.
    content: Blocks,
}

impl User {
    fn work(&mut self, chance: &mut Chance) {
        for _ in 0..COMMANDS {
            match chance.below(12) {
                0 | 1 => self.flush(),
                2 => self.unmap(chance),
                3 => self.zero(chance),
                4 | 5 => self.compare_and_write(chance),
                _ => self.write(chance),
            }
        }
        self.flush();
        let all = self.read(self.blocks.clone());
        assert!(all == self.bytes(self.blocks.clone()), "{:?}", self.blocks);
    }

    fn flush(&self) {
        let before = self.known.lock().unwrap().acknowledged.clone();
        block_on(self.lun.flush()).unwrap();
        self.record.push(Event::Promised(before));
    }

    /// Returns some of its blocks, aligned to the block size of the unit and limited to `longest`
    /// record blocks.
    fn any_blocks(&self, chance: &mut Chance, longest: u64) -> Range<u64> {
        let all = (self.blocks.end - self.blocks.start) / self.grain;
        let len = 1 + chance.below(longest / self.grain);
        let first = self.blocks.start + chance.below(all - len + 1) * self.grain;
        first..first + len * self.grain
    }

    fn next_number(&self) -> u64 {
        let mut known = self.known.lock().unwrap();
        known.sequence += 1;
        known.sequence
    }

    /// Returns the current data of these blocks.
    fn bytes(&self, blocks: Range<u64>) -> Vec<u8> {
        let mut bytes = vec![0; (blocks.end - blocks.start) as usize * BLOCK];
        for (block, bytes) in blocks.zip(bytes.chunks_exact_mut(BLOCK)) {
            let sequence = self.content.get(&block).copied().unwrap_or_default();
            self.record.fill(block, sequence, bytes);
        }
        bytes
    }

    fn read(&self, blocks: Range<u64>) -> Vec<u8> {
        let len = (blocks.end - blocks.start) as usize * BLOCK;
        let buffer = block_on(self.lun.buffers().take_buffer(len));
        let buffer = block_on(self.lun.read(blocks.start * BLOCK as u64, buffer)).unwrap();
        buffer.slice().to_vec()
    }

    /// Must be called when a command that has written these blocks was acknowledged.
    fn acknowledged(&mut self, blocks: &Blocks, is_stable: bool) {
        self.content.extend(blocks);
        self.known.lock().unwrap().acknowledged.extend(blocks);
        if is_stable || self.writes_are_stable {
            self.record.push(Event::Promised(blocks.clone()));
        }
    }

    fn write(&mut self, chance: &mut Chance) {
        let range = self.any_blocks(chance, LONGEST);
        let fua = chance.below(4) == 0;
        let sequence = self.next_number();
        self.record.issue(range.clone(), sequence);
        let blocks: Blocks = range.clone().map(|block| (block, sequence)).collect();
        let bytes = new_bytes(&blocks);
        let buffer = block_on(self.lun.buffers().take_buffer(bytes.len()));
        buffer.slice().write(0, &bytes);
        block_on(self.lun.write(range.start * BLOCK as u64, buffer, fua)).unwrap();
        self.acknowledged(&blocks, fua);
    }

    /// Sends WRITE SAME.
    fn zero(&mut self, chance: &mut Chance) {
        let blocks = self.any_blocks(chance, LONGEST);
        let sequence = self.next_number();
        self.record.announce(blocks.clone(), sequence);
        let bytes = blocks.start * BLOCK as u64..blocks.end * BLOCK as u64;
        let options = ZeroOptions {
            may_unmap: chance.below(2) == 0,
            ..ZeroOptions::default()
        };
        block_on(self.lun.write_zeroes(bytes, options)).unwrap();
        let blocks = blocks.map(|block| (block, sequence)).collect();
        self.acknowledged(&blocks, false);
    }

    /// Sends UNMAP. A unit is allowed to keep the blocks (SBC-4 clause 4.7.4.4), so we query the
    /// result.
    fn unmap(&mut self, chance: &mut Chance) {
        let blocks = self.any_blocks(chance, LONGEST);
        let before = self.bytes(blocks.clone());
        let sequence = self.next_number();
        self.record.announce(blocks.clone(), sequence);
        block_on(
            self.lun
                .discard(blocks.start * BLOCK as u64..blocks.end * BLOCK as u64),
        )
        .unwrap();
        let after = self.read(blocks.clone());
        let pairs = before.chunks_exact(BLOCK).zip(after.chunks_exact(BLOCK));
        let mut zeroed = Blocks::new();
        for (block, (before, after)) in blocks.zip(pairs) {
            if before != after {
                assert!(after.iter().all(|byte| *byte == 0), "block {block}");
                zeroed.insert(block, sequence);
            }
        }
        self.acknowledged(&zeroed, false);
    }

    /// Sends COMPARE AND WRITE for a block of the unit, using either the current data or different
    /// data for the comparison.
    fn compare_and_write(&mut self, chance: &mut Chance) {
        let range = self.any_blocks(chance, self.grain);
        let is_equal = chance.below(4) != 0;
        let fua = chance.below(2) == 0;
        let mut bytes = self.bytes(range.clone());
        let len = bytes.len();
        bytes[len - 1] ^= u8::from(!is_equal);
        let sequence = self.next_number();
        self.record.issue(range.clone(), sequence);
        let blocks: Blocks = range.clone().map(|block| (block, sequence)).collect();
        bytes.extend(new_bytes(&blocks));
        let mut cdb = [0; 16];
        (cdb[0], cdb[1], cdb[13]) = (0x89, u8::from(fua) << 3, 1);
        cdb[2..10].copy_from_slice(&(range.start / self.grain).to_be_bytes());
        let buffer = block_on(self.lun.buffers().take_buffer(bytes.len()));
        buffer.slice().write(0, &bytes);
        let out = DataLen::Out(bytes.len() as u32);
        let cdb = Cdb::new(&cdb).expect("sixteen bytes");
        let response = block_on(self.lun.scsi(cdb, out, IoData::One(buffer)));
        let status = response.result.unwrap().status;
        assert_eq!(status, if is_equal { GOOD } else { CHECK_CONDITION });
        if is_equal {
            self.acknowledged(&blocks, fua);
        }
    }
}

/// Creates new data for these blocks.
fn new_bytes(blocks: &Blocks) -> Vec<u8> {
    let mut bytes = vec![0; blocks.len() * BLOCK];
    for ((block, sequence), bytes) in blocks.iter().zip(bytes.chunks_exact_mut(BLOCK)) {
        Version::new(*sequence, Port(1)).fill(*block, bytes);
    }
    bytes
}

/// Mounts the recorder. The directory is removed on drop.
struct Mounted {
    directory: PathBuf,
    mount: Option<FuseMount>,
}

impl Mounted {
    /// Mounts a file with this content. Skips the test and returns `None` if FUSE is not available.
    fn new(record: &Arc<Record>, name: &str, content: &[u8], has_frames: bool) -> Option<Self> {
        if !Path::new("/dev/fuse").exists() {
            skip("crash power", "there is no /dev/fuse");
            return None;
        }
        let directory =
            std::env::temp_dir().join(format!("riser-power-{}-{name}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        let mut mounted = Self {
            mount: None,
            directory,
        };
        let options = FuseOptions {
            path: mounted.directory.clone(),
            name: "disk".into(),
            source: "riser:power".into(),
            caching: Caching::Direct,
            allow_other: false,
        };
        let disk = MemoryDevice::new(content.len() as u64, BLOCK as u32).unwrap();
        let buffer = disk.try_buffer(content.len()).unwrap();
        buffer.slice().write(0, content);
        block_on(disk.write(0, buffer, false)).unwrap();
        let disk = Recorder {
            disk,
            record: Arc::clone(record),
            has_frames,
        };
        match FuseMount::new(Arc::new(ByteDevice::new(Arc::new(disk))), options, || {}) {
            Ok(mount) => mounted.mount = Some(mount),
            Err(error) => {
                skip("crash power", &format!("FUSE cannot be mounted: {error}"));
                return None;
            }
        }
        Some(mounted)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        drop(self.mount.take());
        let _ = fs::remove_dir(&self.directory);
    }
}

/// A kind of disk.
struct Kind {
    /// Name of the test.
    name: &'static str,
    network: u8,
    write_cache: bool,
    block_size: u64,
    /// Additional backend keys.
    keys: &'static str,
    /// The file has protection information.
    has_frames: bool,
}

/// Runs loads on a file.
fn power_is_lost(kind: &Kind) {
    let &Kind { name, network, .. } = kind;
    let seed = setting("RISER_POWER_SEED", 1);
    let runs = setting("RISER_POWER_RUNS", 2);
    let images = setting("RISER_POWER_IMAGES", 4) as usize;
    let whole = setting("RISER_POWER_WHOLE", 0);
    println!(
        "RISER_POWER_SEED={seed} RISER_POWER_RUNS={runs} RISER_POWER_IMAGES={images} \
         RISER_POWER_WHOLE={whole} cargo test -p riser-tests --test crash {name}"
    );
    let record = Arc::new(Record::default());
    let content = match kind.has_frames {
        true => frames::new_file(IMAGES + network),
        false => vec![0; DISK as usize * BLOCK],
    };
    let Some(mounted) = Mounted::new(&record, name, &content, kind.has_frames) else {
        return;
    };
    let keys = format!(
        "write_cache: {}, block_size: {}",
        kind.write_cache, kind.block_size
    );
    let backend = format!(
        "{{ kind: file, path: {}, {keys}{} }}",
        mounted.directory.join("disk").display(),
        kind.keys
    );
    // The file on this disk is only accessible for the current user.
    let pair = Pair::with_rights(network, &backend, &portals(network));
    let schemes = ["srp", "iser", "iscsi"];
    let luns = schemes.map(|scheme| log_in(network, scheme));
    let known: Arc<Mutex<Known>> = Arc::default();
    // The image of a daemon with direct I/O is on a file system that may not support it.
    let keys = match kind.has_frames {
        true => format!("{keys}{}", kind.keys),
        false => keys,
    };
    let mut started = Images::new(IMAGES + network, &content, &keys);
    let mut file = Frames::new(Arc::clone(&record), content);
    let mut chance = Chance::new(seed, 100);
    let mut sum = Totals::default();
    for run in seed..seed + runs {
        thread::scope(|scope| {
            for (stream, lun) in (0..).zip(&luns) {
                let part = DISK / schemes.len() as u64;
                let mut user = User {
                    lun: lun.clone(),
                    blocks: stream * part..(stream + 1) * part,
                    grain: kind.block_size / BLOCK as u64,
                    writes_are_stable: !kind.write_cache,
                    known: Arc::clone(&known),
                    record: Arc::clone(&record),
                    content: known.lock().unwrap().acknowledged.clone(),
                };
                let mut chance = Chance::new(run, stream);
                scope.spawn(move || user.work(&mut chance));
            }
        });
        let events = std::mem::take(&mut *record.events());
        let step = match run < seed + whole {
            true => 1,
            false => (events.len() / images.max(1)).max(1),
        };
        let mut until_next = chance.below(step as u64) as usize;
        let mut is_chosen = || {
            let is_chosen = until_next == 0;
            until_next = if is_chosen { step } else { until_next } - 1;
            is_chosen
        };
        let mut disk = Disk::default();
        for (at, event) in events.iter().enumerate() {
            sum.count(event);
            if kind.has_frames {
                file.apply(at, event);
                if is_chosen() {
                    let image = file.cut(&mut chance);
                    started.check(&image, &frames::data(&image));
                    sum.images += 1;
                }
                continue;
            }
            disk.apply(event);
            disk.check(at);
            if is_chosen() {
                let mut image = vec![0; DISK as usize * BLOCK];
                let blocks = disk.cut(&mut chance).into_iter();
                for ((block, sequence), bytes) in blocks.zip(image.chunks_exact_mut(BLOCK)) {
                    record.fill(block, sequence, bytes);
                }
                started.check(&image, &image);
                sum.images += 1;
            }
        }
        if !kind.has_frames {
            // Each run ends with a flush, so the next run can start with a disk that has a single
            // state, which includes all guarantees.
            let acknowledged = known.lock().unwrap().acknowledged.clone();
            record.push(Event::Written {
                blocks: acknowledged,
                is_stable: true,
            });
        }
    }
    println!(
        "result: {runs} loads, {} points at which power is lost, {} promises, {} flushes of the \
         daemon's, {} images that a daemon was started on",
        sum.cuts, sum.promises, sum.flushes, sum.images
    );
    assert!(sum.flushes > 0, "the daemon never flushed");
    assert!(sum.images > 0 || images == 0, "no daemon was started");
    drop(luns);
    drop(pair);
}

pub(crate) fn log_in(network: u8, scheme: &str) -> Lun {
    let client = client(network, scheme);
    let session = eventually_ok("a login", PATIENCE, || {
        block_on(client.connect(url(network, scheme)))
    });
    block_on(session.lun(0)).unwrap()
}

#[test]
fn power_loss_with_write_cache() {
    power_is_lost(&Kind {
        name: "power_loss_with_write_cache",
        network: 171,
        write_cache: true,
        block_size: 512,
        keys: "",
        has_frames: false,
    });
}

#[test]
fn power_loss_with_cache_and_direct_io() {
    power_is_lost(&Kind {
        name: "power_loss_with_cache_and_direct_io",
        network: 172,
        write_cache: true,
        block_size: 4096,
        keys: ", direct: on",
        has_frames: false,
    });
}

#[test]
fn power_loss_without_write_cache() {
    power_is_lost(&Kind {
        name: "power_loss_without_write_cache",
        network: 173,
        write_cache: false,
        block_size: 512,
        keys: "",
        has_frames: false,
    });
}

#[test]
fn power_loss_with_protected_disk() {
    power_is_lost(&Kind {
        name: "power_loss_with_protected_disk",
        network: 179,
        write_cache: true,
        block_size: 512,
        keys: frames::KEYS,
        has_frames: true,
    });
}

mod oracle {
    use super::*;

    fn written(version: u64, is_stable: bool) -> Event {
        let blocks = Blocks::from([(7, version)]);
        Event::Written { blocks, is_stable }
    }

    fn check_all(events: &[Event]) {
        let mut disk = Disk::default();
        for (at, event) in events.iter().enumerate() {
            disk.apply(event);
            disk.check(at);
        }
    }

    /// Returns all final states, using many attempts.
    fn states(events: &[Event]) -> BTreeSet<u64> {
        let mut disk = Disk::default();
        events.iter().for_each(|event| disk.apply(event));
        let mut chance = Chance::new(1, 1);
        (0..100).map(|_| disk.cut(&mut chance)[&7]).collect()
    }

    #[test]
    fn cut_keeps_stable_or_later_data() {
        let events = [
            written(1, false),
            Event::Flushed,
            written(2, false),
            written(3, false),
        ];
        assert_eq!(states(&events), [1, 2, 3].into());
        assert_eq!(states(&[written(1, false), written(2, true)]), [2].into());
    }

    fn promised(version: u64) -> Event {
        Event::Promised(Blocks::from([(7, version)]))
    }

    #[test]
    fn guarantee_during_flush_is_kept() {
        check_all(&[
            written(1, false),
            Event::Flushed,
            promised(1),
            written(2, false),
        ]);
        check_all(&[written(1, true), promised(1)]);
    }

    #[test]
    #[should_panic(expected = "block 7 may hold write 0, although write 1")]
    fn missing_flush_is_detected() {
        check_all(&[written(1, false), promised(1)]);
    }

    #[test]
    #[should_panic(expected = "block 7 may hold write 0, although write 1")]
    fn early_flush_is_detected() {
        check_all(&[Event::Flushed, written(1, false), promised(1)]);
    }

    #[test]
    #[should_panic(expected = "block 7 may hold write 1, although write 2")]
    fn reordered_older_write_is_detected() {
        check_all(&[
            written(2, false),
            Event::Flushed,
            promised(2),
            written(1, false),
        ]);
    }
}
