//! Power is lost at any moment of a load.
//!
//! The daemon's file is on a disk of this test's, mounted through FUSE, whose volatile cache the
//! test knows: it records in one order each write and flush that the daemon makes, and what
//! initiators learn of it. Then, for each point of that record, the blocks may hold what was on
//! stable storage or any write behind it, each block by itself. None of these may be older than
//! what was acknowledged as stable until then: by a flush, by a write with FUA, or by each write
//! where the unit has no write cache.
//!
//! `RISER_POWER_RUNS` sets how many loads (default 2 of each kind), `RISER_POWER_SEED` which.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Waker;
use std::thread;
use std::time::Duration;

use riser_initiator::block::task::block_on;
use riser_initiator::block::{
    BlockDevice, BlockError, Buffer, ByteDevice, Extent, Geometry, MemoryDevice, ZeroOptions,
};
use riser_initiator::engine::Client;
use riser_initiator::fuse::{Caching, FuseMount, FuseOptions};
use riser_initiator::lun::Lun;
use riser_initiator::url::TargetUrl;
use riser_testkit::eventually_ok;
use riser_testkit::programs::{Pair, skip};
use riser_tests::contest::{IQN, portals};
use riser_tests::history::{BLOCK, Port, Version};
use riser_tests::load::{Chance, setting};

/// The disk in blocks of the record.
const DISK: u64 = 3 * 64;

/// Most blocks of a command.
const LONGEST: u64 = 24;

/// Commands of each initiator.
const COMMANDS: usize = 60;

const PATIENCE: Duration = Duration::from_secs(60);

/// Versions of blocks, by their numbers. Blocks of zeroes are of version 0.
type Blocks = BTreeMap<u64, u64>;

/// What happened, in order.
enum Event {
    /// The daemon wrote these versions; they are stable at once with FUA.
    Written { blocks: Blocks, is_stable: bool },
    /// All that was written before is stable.
    Flushed,
    /// An initiator knows that these versions are stable, or later ones.
    Promised(Blocks),
}

#[derive(Default)]
struct Record(Mutex<Vec<Event>>);

impl Record {
    fn events(&self) -> MutexGuard<'_, Vec<Event>> {
        self.0.lock().unwrap()
    }

    fn push(&self, event: Event) {
        self.events().push(event);
    }
}

/// A disk in memory that records writes and flushes before they are acknowledged.
struct Recorder {
    disk: MemoryDevice,
    record: Arc<Record>,
}

impl Recorder {
    fn zeroed(&self, range: Range<u64>, is_stable: bool) {
        let blocks = range.start / BLOCK as u64..range.end / BLOCK as u64;
        let blocks = blocks.map(|block| (block, 0)).collect();
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
        let first = offset / BLOCK as u64;
        let blocks = bytes
            .chunks_exact(BLOCK)
            .zip(first..)
            .map(|(bytes, block)| {
                let version = Version::of(block, bytes).expect("a whole block of this load");
                (block, version.sequence)
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

/// Where power may be lost, and what is checked there.
#[derive(Default)]
struct Figures {
    cuts: usize,
    flushes: usize,
    promises: usize,
}

/// Checks all states in which a loss of power at any point of the record could leave the disk.
///
/// # Panics
/// If a block could be older than what was promised.
fn check(events: &[Event]) -> Figures {
    let mut figures = Figures::default();
    let (mut stable, mut promised) = (Blocks::new(), Blocks::new());
    let mut cached: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for (at, event) in events.iter().enumerate() {
        figures.cuts += 1;
        match event {
            Event::Written { blocks, is_stable } => {
                for (&block, &version) in blocks {
                    if *is_stable {
                        stable.insert(block, version);
                        cached.remove(&block);
                    } else {
                        cached.entry(block).or_default().push(version);
                    }
                }
            }
            Event::Flushed => {
                figures.flushes += 1;
                for (block, versions) in std::mem::take(&mut cached) {
                    stable.extend(versions.last().map(|&version| (block, version)));
                }
            }
            Event::Promised(blocks) => {
                figures.promises += 1;
                // A durable write may have promised more while a flush was under way.
                for (&block, &version) in blocks {
                    let least = promised.entry(block).or_default();
                    *least = version.max(*least);
                }
            }
        }
        for (block, &least) in &promised {
            let stable = stable.get(block).copied().unwrap_or_default();
            let cached = cached.get(block).into_iter().flatten().copied();
            let oldest = cached.chain([stable]).min().unwrap_or_default();
            assert!(
                oldest >= least,
                "after event {at}: block {block} may hold write {oldest}, although write {least} \
                 was promised to be stable"
            );
        }
    }
    figures
}

/// What initiators know, under one lock: each write's number is greater than those of the writes
/// to its blocks before.
#[derive(Default)]
struct Known {
    sequence: u64,
    acknowledged: Blocks,
}

/// One initiator and its own blocks, which it alone writes, one command after the other. A flush
/// is for the blocks of all.
struct User {
    lun: Lun,
    blocks: Range<u64>,
    /// Blocks of the record in one of the unit's.
    grain: u64,
    writes_are_stable: bool,
    known: Arc<Mutex<Known>>,
    record: Arc<Record>,
}

impl User {
    fn work(&self, chance: &mut Chance) {
        for _ in 0..COMMANDS {
            match chance.below(6) {
                0 => self.flush(),
                _ => self.write(chance),
            }
        }
        self.flush();
    }

    fn flush(&self) {
        let before = self.known.lock().unwrap().acknowledged.clone();
        block_on(self.lun.flush()).unwrap();
        self.record.push(Event::Promised(before));
    }

    fn write(&self, chance: &mut Chance) {
        let all = (self.blocks.end - self.blocks.start) / self.grain;
        let len = 1 + chance.below(LONGEST / self.grain);
        let first = self.blocks.start + chance.below(all - len + 1) * self.grain;
        let len = len * self.grain;
        let fua = chance.below(4) == 0;
        let sequence = {
            let mut known = self.known.lock().unwrap();
            known.sequence += 1;
            known.sequence
        };
        let version = Version::new(sequence, Port(1));
        let mut bytes = vec![0; len as usize * BLOCK];
        for (block, bytes) in (first..).zip(bytes.chunks_exact_mut(BLOCK)) {
            version.fill(block, bytes);
        }
        let buffer = block_on(self.lun.buffers().take(bytes.len()));
        buffer.slice().write(0, &bytes);
        block_on(self.lun.write(first * BLOCK as u64, buffer, fua)).unwrap();
        let blocks: Blocks = (first..first + len)
            .map(|block| (block, sequence))
            .collect();
        self.known.lock().unwrap().acknowledged.extend(&blocks);
        if fua || self.writes_are_stable {
            self.record.push(Event::Promised(blocks));
        }
    }
}

/// A mount of the recorder, below a folder that goes with it.
struct Mounted {
    folder: PathBuf,
    mount: Option<FuseMount>,
}

impl Mounted {
    /// `None` where there is no FUSE; the test is noted as skipped then.
    fn new(record: &Arc<Record>, name: &str) -> Option<Self> {
        if !Path::new("/dev/fuse").exists() {
            skip("crash power", "there is no /dev/fuse");
            return None;
        }
        let folder =
            std::env::temp_dir().join(format!("riser-power-{}-{name}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let mut mounted = Self {
            mount: None,
            folder,
        };
        let options = FuseOptions {
            path: mounted.folder.clone(),
            name: "disk".into(),
            source: "riser:power".into(),
            caching: Caching::Direct,
            allow_other: false,
        };
        let disk = Recorder {
            disk: MemoryDevice::new(DISK * BLOCK as u64, BLOCK as u32).unwrap(),
            record: Arc::clone(record),
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
        let _ = fs::remove_dir(&self.folder);
    }
}

/// Loads on a file with these keys of a backend.
fn power_is_lost(name: &str, network: u8, write_cache: bool, block_size: u64, keys: &str) {
    let seed = setting("RISER_POWER_SEED", 1);
    let runs = setting("RISER_POWER_RUNS", 2);
    println!(
        "RISER_POWER_SEED={seed} RISER_POWER_RUNS={runs} cargo test -p riser-tests --test crash \
         {name}"
    );
    let record = Arc::new(Record::default());
    let Some(mounted) = Mounted::new(&record, name) else {
        return;
    };
    let backend = format!(
        "{{ kind: file, path: {}, write_cache: {write_cache}, block_size: {block_size}{keys} }}",
        mounted.folder.join("disk").display()
    );
    let pair = Pair::with_target(network, &backend, &portals(network));
    let schemes = ["srp", "iser", "iscsi"];
    let luns = schemes.map(|scheme| log_in(network, scheme));
    let known: Arc<Mutex<Known>> = Arc::default();
    let mut sum = Figures::default();
    for run in seed..seed + runs {
        thread::scope(|scope| {
            for (stream, lun) in (0..).zip(&luns) {
                let part = DISK / schemes.len() as u64;
                let user = User {
                    lun: lun.clone(),
                    blocks: stream * part..(stream + 1) * part,
                    grain: block_size / BLOCK as u64,
                    writes_are_stable: !write_cache,
                    known: Arc::clone(&known),
                    record: Arc::clone(&record),
                };
                let mut chance = Chance::new(run, stream);
                scope.spawn(move || user.work(&mut chance));
            }
        });
        // Each run ends with a flush, so the next begins with a disk that has one state.
        let figures = check(&record.events());
        record.events().clear();
        known.lock().unwrap().acknowledged.clear();
        sum.cuts += figures.cuts;
        sum.flushes += figures.flushes;
        sum.promises += figures.promises;
    }
    println!(
        "figure: {runs} loads, {} points at which power is lost, {} promises, {} flushes of the \
         daemon's",
        sum.cuts, sum.promises, sum.flushes
    );
    assert!(sum.flushes > 0, "the daemon never flushed");
    drop(luns);
    drop(pair);
}

fn log_in(network: u8, scheme: &str) -> Lun {
    let builder = Client::builder().pool(2 << 20);
    let client = match scheme {
        "iscsi" => builder.without_device(),
        "srp" => builder.open(format!("127.0.{network}.2").parse().unwrap()),
        _ => builder.open(format!("127.0.{network}.3").parse().unwrap()),
    };
    let client = client.unwrap();
    let target = match scheme {
        "srp" => "0".to_owned(),
        _ => format!("{IQN}/0"),
    };
    let url: TargetUrl = format!("{scheme}://127.0.{network}.1/{target}")
        .parse()
        .unwrap();
    let session = eventually_ok("a login", PATIENCE, || {
        block_on(client.connect(url.clone()))
    });
    block_on(session.lun(0)).unwrap()
}

#[test]
fn power_is_lost_behind_a_write_cache() {
    power_is_lost("power_is_lost_behind_a_write_cache", 171, true, 512, "");
}

#[test]
fn power_is_lost_behind_a_write_cache_with_direct_transfers() {
    let name = "power_is_lost_behind_a_write_cache_with_direct_transfers";
    power_is_lost(name, 172, true, 4096, ", direct: on");
}

#[test]
fn power_is_lost_without_a_write_cache() {
    power_is_lost("power_is_lost_without_a_write_cache", 173, false, 512, "");
}

mod oracle {
    use super::*;

    fn written(version: u64, is_stable: bool) -> Event {
        let blocks = Blocks::from([(7, version)]);
        Event::Written { blocks, is_stable }
    }

    fn promised(version: u64) -> Event {
        Event::Promised(Blocks::from([(7, version)]))
    }

    #[test]
    fn a_promise_behind_a_flush_is_kept() {
        check(&[
            written(1, false),
            Event::Flushed,
            promised(1),
            written(2, false),
        ]);
        check(&[written(1, true), promised(1)]);
    }

    #[test]
    #[should_panic(expected = "block 7 may hold write 0, although write 1")]
    fn a_flush_that_was_forgotten_is_found() {
        check(&[written(1, false), promised(1)]);
    }

    #[test]
    #[should_panic(expected = "block 7 may hold write 0, although write 1")]
    fn a_flush_before_the_write_is_found() {
        check(&[Event::Flushed, written(1, false), promised(1)]);
    }

    #[test]
    #[should_panic(expected = "block 7 may hold write 1, although write 2")]
    fn an_older_write_behind_a_later_one_is_found() {
        check(&[
            written(2, false),
            Event::Flushed,
            promised(2),
            written(1, false),
        ]);
    }
}
