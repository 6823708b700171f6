//! Tests of stores with protection information.

use riser_config::{Fault, FaultOn};
use riser_scsi::protection::Tuple;

use super::*;
use crate::backend::{Header, HeaderError};

/// Offset of the first frame with blocks of 512 bytes.
const FIRST: u64 = 127 * 520;

fn protected(source: Source, protection_type: ProtectionType) -> Spec {
    Spec {
        protection: Some(Protection::new(protection_type)),
        ..spec(source)
    }
}

fn type_1(path: PathBuf) -> Spec {
    protected(file(path, 64 << 10), ProtectionType::Type1)
}

/// A buffer of blocks, followed by their tuples.
struct Blocks {
    memory: Memory,
    blocks: u32,
}

impl Blocks {
    /// Fills each block and its tuple with the number of the block plus `first`.
    fn new(blocks: u32, first: u8) -> Self {
        let memory = Memory::new(blocks as usize * 520).unwrap();
        for n in 0..blocks as usize {
            memory.fill(n * 512, 512, first + n as u8);
            memory.fill(blocks as usize * 512 + n * 8, 8, first + n as u8);
        }
        Self { memory, blocks }
    }

    fn read(&self, lba: u64) -> BlockOp {
        BlockOp::Read {
            offset: lba * 512,
            len: self.blocks * 512,
            buffer_offset: 0,
            tags: Some(self.blocks * 512),
            fua: false,
        }
    }

    fn write(&self, lba: u64) -> BlockOp {
        BlockOp::Write {
            offset: lba * 512,
            len: self.blocks * 512,
            buffer_offset: 0,
            tags: Some(self.blocks * 512),
            fua: false,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.memory.whole().to_vec();
        bytes.truncate(self.blocks as usize * 520);
        bytes
    }
}

impl Rig {
    fn write_blocks(&mut self, lba: u64, blocks: &Blocks) -> StepResult {
        self.run(blocks.write(lba), &[blocks.memory.whole()])
    }

    fn read_blocks(&mut self, lba: u64, blocks: u32) -> (StepResult, Vec<u8>) {
        let into = Blocks::new(blocks, 0);
        let result = self.run(into.read(lba), &[into.memory.whole()]);
        (result, into.bytes())
    }
}

#[test]
fn file_contains_header_and_inverted_tuples() {
    let dir = Dir::new(&std::env::temp_dir(), "frames");
    let path = dir.file("lun");
    let store = Store::open(&type_1(path.clone())).unwrap();
    assert_eq!(store.capacity(), 64 << 10);
    let mut rig = Rig::new(store.clone());
    assert_eq!(rig.write_blocks(2, &Blocks::new(2, 0x31)), StepResult::Done);
    let mut bytes = vec![0; (FIRST + 128 * 520) as usize];
    bytes[..36].copy_from_slice(
        b"RISER-PI\x00\x00\x00\x01\x00\x00\x02\x00\x00\x00\x00\x01\x00\x00\x00\x00\
          \x00\x00\x00\x00\x00\x40\x00\x00\x7a\xef\x49\xca",
    );
    // The write is recorded in the first region.
    bytes[4096] = 1;
    bytes[66_040 + 1040..][..512].fill(0x31);
    bytes[66_040 + 1552..][..8].fill(0xce);
    bytes[66_040 + 1560..][..512].fill(0x32);
    bytes[66_040 + 2072..][..8].fill(0xcd);
    assert!(std::fs::read(&path).unwrap() == bytes);
    let (result, read) = rig.read_blocks(1, 3);
    assert_eq!(result, StepResult::Done);
    assert!(read[..512].iter().all(|byte| *byte == 0));
    assert_eq!(read[1536..1544], [0xff; 8]);
    assert_eq!(read[1544..1560], [[0x31; 8], [0x32; 8]].concat());
    let mut frame = [0; 520];
    store.read_frames(3, &mut frame).unwrap();
    assert_eq!(frame, [0x32; 520]);
}

#[test]
fn null_blocks_are_deallocated() {
    let store = Store::open(&protected(
        Source::Null { size: 1 << 20 },
        ProtectionType::Type3,
    ));
    let (result, read) = Rig::new(store.unwrap()).read_blocks(7, 2);
    assert_eq!(result, StepResult::Done);
    assert!(read[..1024].iter().all(|byte| *byte == 0));
    assert_eq!(read[1024..], [0xff; 16]);
}

#[test]
fn mismatched_files_are_rejected_unchanged() {
    let dir = Dir::new(&std::env::temp_dir(), "foreign");
    let open = |spec: &Spec| match Store::open(spec).unwrap_err() {
        OpenError::Protection { source, .. } => source,
        other => panic!("{other}"),
    };
    let foreign = dir.file("foreign");
    for bytes in [vec![7; 512], [vec![0; 65_536], vec![0]].concat()] {
        std::fs::write(&foreign, &bytes).unwrap();
        let error = open(&type_1(foreign.clone()));
        assert_eq!(error, HeaderError::Missing);
        assert!(std::fs::read(&foreign).unwrap() == bytes);
    }
    let path = dir.file("lun");
    let created = Store::open(&type_1(path.clone())).unwrap();
    created.keep();
    drop(created);
    let bytes = std::fs::read(&path).unwrap();
    let error = open(&spec(file(path.clone(), 1 << 20)));
    assert_eq!(error, HeaderError::Unexpected);
    let (found, wanted) = (512, 4096);
    let error = open(&Spec {
        block_size: wanted,
        ..type_1(path.clone())
    });
    assert_eq!(error, HeaderError::BlockSize { found, wanted });
    assert!(std::fs::read(&path).unwrap() == bytes);
    let mut corrupt = bytes;
    corrupt[15] ^= 1;
    std::fs::write(&path, &corrupt).unwrap();
    assert_eq!(open(&type_1(path.clone())), HeaderError::Crc);
    assert!(std::fs::read(&path).unwrap() == corrupt);
}

#[test]
fn direct_io_and_devices_are_rejected() {
    let dir = Dir::new(&std::env::temp_dir(), "direct");
    let path = dir.file("lun");
    let error = Store::open(&Spec {
        direct: Direct::On,
        ..type_1(path.clone())
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("it has protection information"), "{error}");
    assert!(!path.exists(), "undone");
    let device = Source::Device { path };
    let error = Store::open(&protected(device, ProtectionType::Type1)).unwrap_err();
    assert!(matches!(error, OpenError::ProtectedDevice), "{error}");
}

#[test]
fn blank_files_get_header() {
    let dir = Dir::new(&std::env::temp_dir(), "blank");
    for len in [0, 1, 4096, 65_536] {
        let path = dir.file("lun");
        std::fs::write(&path, vec![0; len]).unwrap();
        let store = Store::open(&type_1(path.clone())).unwrap();
        assert_eq!(store.capacity(), 64 << 10);
        store.keep();
        drop(store);
        let page = std::fs::read(&path).unwrap();
        let header = Header::new(512, Some(ProtectionType::Type1));
        assert_eq!(Header::parse(&page, 512), Ok(header));
        // Without `create`, a blank file is not a disk.
        std::fs::write(&path, vec![0; len]).unwrap();
        let error = Store::open(&protected(
            Source::File {
                path,
                size: None,
                create: false,
            },
            ProtectionType::Type1,
        ));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("no protection information"), "{error}");
    }
}

#[test]
fn undone_header_leaves_blank_file() {
    let dir = Dir::new(&std::env::temp_dir(), "blank-undo");
    for len in [0, 7, 4095, 4096, 65_536] {
        let path = dir.file("lun");
        std::fs::write(&path, vec![0; len]).unwrap();
        let store = Store::open(&type_1(path.clone())).unwrap();
        assert_eq!(std::fs::read(&path).unwrap()[..8], *b"RISER-PI");
        store.undo();
        assert!(std::fs::read(&path).unwrap() == vec![0; len], "{len}");
    }
}

#[test]
fn new_header_is_allocated() {
    use std::os::unix::fs::MetadataExt;
    let dir = Dir::new(&std::env::temp_dir(), "allocated");
    let path = dir.file("lun");
    let _store = Store::open(&type_1(path.clone())).unwrap();
    assert!(std::fs::metadata(&path).unwrap().blocks() * 512 >= 65_536);
}

#[test]
fn disk_with_magic_remains_usable() {
    let dir = Dir::new(&std::env::temp_dir(), "magic");
    let path = dir.file("lun");
    let bytes = [&b"RISER-PI"[..], &[0; 65_528]].concat();
    std::fs::write(&path, &bytes).unwrap();
    Store::open(&spec(file(path, 65_536))).unwrap();
}

#[test]
fn protected_disk_grows_and_reopens() {
    let dir = Dir::new(&std::env::temp_dir(), "grow");
    let path = dir.file("lun");
    let small = type_1(path.clone());
    let store = Store::open(&small).unwrap();
    let mut rig = Rig::new(store.clone());
    rig.write_blocks(127, &Blocks::new(1, 5));
    let large = protected(file(path.clone(), 128 << 10), ProtectionType::Type1);
    assert_eq!(store.grow(&large).unwrap(), Some(128 << 10));
    store.set_capacity(128 << 10);
    assert_eq!(store.measure().unwrap(), None);
    assert_eq!(store.grow(&large).unwrap(), None);
    store.check_reopen(&large).unwrap();
    let (_, read) = rig.read_blocks(127, 2);
    assert_eq!(read[1024..], [[5; 8], [0xff; 8]].concat());
    store.keep();
    store.set_protection_type(None).unwrap();
    assert_eq!(store.protection(), None);
    store
        .set_protection_type(Some(ProtectionType::Type3))
        .unwrap();
    drop((rig, store));
    assert_eq!(
        std::fs::metadata(&path).unwrap().len(),
        FIRST + 256 * 520,
        "the undone change was kept"
    );
    // The size and the type of the file apply, and not those of a new file.
    let store = Store::open(&small).unwrap();
    assert_eq!(store.capacity(), 128 << 10);
    let protection = store.protection().unwrap();
    assert_eq!(protection.protection_type, ProtectionType::Type3);
    let format = ProtectionFormat::Changeable(Some(ProtectionType::Type3));
    assert_eq!(store.geometry().protection_format, format);
}

#[test]
fn short_transfers_keep_frames() {
    let dir = Dir::new(&std::env::temp_dir(), "short-frames");
    let faults = Arc::new(Faults::default());
    let store = Store::open(&Spec {
        faults: Some(faults.clone()),
        ..type_1(dir.file("lun"))
    });
    let mut rig = Rig::new(store.unwrap());
    let blocks = Blocks::new(16, 1);
    for most in [7, 519, 521, 4096, 0] {
        faults.shorten(most);
        assert_eq!(rig.write_blocks(3, &blocks), StepResult::Done);
        let (result, read) = rig.read_blocks(3, 16);
        assert_eq!(result, StepResult::Done);
        assert!(read == blocks.bytes(), "{most}");
    }
}

#[test]
fn error_offsets_are_those_of_unit() {
    let dir = Dir::new(&std::env::temp_dir(), "offsets");
    let (path, faults) = (dir.file("lun"), Arc::new(Faults::default()));
    let store = Store::open(&Spec {
        faults: Some(faults.clone()),
        ..type_1(path.clone())
    });
    let mut rig = Rig::new(store.unwrap());
    let medium = |offset| {
        StepResult::Failed(BackendError::Medium {
            offset: Some(offset),
        })
    };
    faults.set(vec![Fault {
        on: FaultOn::Read,
        offset: 1536,
        len: 512,
        times: Some(1),
        delay: Duration::ZERO,
        error: Some(BackendError::Medium { offset: Some(1600) }),
    }]);
    assert_eq!(rig.read_blocks(0, 8).0, medium(1600));
    // The file ends in the tuple of the sixth block.
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(FIRST + 6 * 520 - 3).unwrap();
    let StepResult::Failed(BackendError::Medium {
        offset: Some(offset),
    }) = rig.read_blocks(0, 8).0
    else {
        panic!("no medium error");
    };
    assert_eq!(offset / 512, 5);
    file.set_len(FIRST + 128 * 520).unwrap();
}

/// Size of a region in some tests.
const SMALL_REGION: u64 = 64 << 10;

/// A block whose frame is in this small region only, except for the first region.
fn lba_in(region: u64) -> u64 {
    (region * SMALL_REGION - FIRST).div_ceil(520) + 1
}

/// A protected disk in memory.
struct Simulated {
    spec: Spec,
    disk: Disk,
    threads: simulated::Threads,
    start: Instant,
    store: Arc<Store>,
    rig: InMemory,
}

impl Simulated {
    fn new(protection_type: ProtectionType) -> Self {
        Self::with(protection_type, Disk::new(0))
    }

    /// Creates a disk of type 1 with small regions.
    fn with_small_regions() -> Self {
        let header = Header {
            region_size: SMALL_REGION,
            ..Header::new(512, Some(ProtectionType::Type1))
        };
        let disk = Disk::new(FIRST);
        disk.write(0, &header.encode());
        Self::with(ProtectionType::Type1, disk)
    }

    fn with(protection_type: ProtectionType, disk: Disk) -> Self {
        let spec = protected(file("/in/memory".into(), 1 << 20), protection_type);
        let start = Instant::now();
        let (threads, store) = Self::open(&spec, &disk, start);
        let rig = InMemory::new(&store);
        disk.flush();
        Self {
            spec,
            disk,
            threads,
            start,
            store,
            rig,
        }
    }

    fn open(spec: &Spec, disk: &Disk, start: Instant) -> (simulated::Threads, Arc<Store>) {
        let threads = simulated::Threads::default();
        let host = SimulatedHost::new(threads.clone(), start);
        (threads, Store::on_disk(spec, disk, Arc::new(host)).unwrap())
    }

    /// Opens the disk again, after the process was killed.
    fn reopen(&mut self) {
        (self.threads, self.store) = Self::open(&self.spec, &self.disk, self.start);
        self.rig = InMemory::new(&self.store);
    }

    fn submit(&mut self, op: BlockOp, blocks: &Blocks) {
        let layout = self.store.layout.unwrap();
        let memory = [blocks.memory.whole()];
        let data = layout.parts(&op).flat_map(|part| cut(&memory, part));
        let data: Vec<_> = data.collect();
        let rig = &mut self.rig;
        let op = rig.driver.store(rig.id).command(op);
        let (ring, id) = (&mut rig.ring, rig.id);
        rig.driver.submit(ring, id, op, &data, 1).unwrap();
        rig.ring.submit().unwrap();
    }

    /// Runs all threads, and resumes the requests that were waiting for them.
    fn run_threads(&mut self) {
        while let [thread, ..] = self.threads.runnable()[..] {
            self.threads.step(thread);
        }
        assert_eq!(self.rig.driver.poll_done(&mut self.rig.ring), None);
        self.rig.ring.submit().unwrap();
    }

    fn run(&mut self, op: BlockOp, blocks: &Blocks) -> StepResult {
        self.submit(op, blocks);
        self.run_threads();
        self.rig.run(&[])[0]
    }

    fn read(&mut self, lba: u64, blocks: u32) -> Vec<u8> {
        let into = Blocks::new(blocks, 0);
        assert_eq!(self.run(into.read(lba), &into), StepResult::Done);
        into.bytes()
    }

    /// Writes a block with a valid tuple at this time after the start. Returns the block with its
    /// tuple.
    fn write_valid(&mut self, lba: u64, byte: u8, seconds: u64) -> Vec<u8> {
        let now = self.start + Duration::from_secs(seconds);
        self.rig.driver.begin_round(now);
        let blocks = valid_blocks(lba, 1, byte);
        assert_eq!(self.run(blocks.write(lba), &blocks), StepResult::Done);
        blocks.bytes()
    }

    fn flush(&mut self) -> StepResult {
        let (offset, len) = (0, 512);
        self.submit(BlockOp::Flush { offset, len }, &Blocks::new(1, 0));
        self.rig.run(&[])[0]
    }

    /// Clears bits at this time after the start.
    fn rest(&mut self, seconds: u64) {
        self.store.rest(self.start + Duration::from_secs(seconds));
        self.run_threads();
    }

    /// Returns the first page of the bitmap in the cache.
    fn bitmap(&self) -> Vec<u8> {
        let mut page = vec![0; 4096];
        self.disk.read(4096, &mut page);
        page
    }
}

#[test]
fn frames_are_whole_during_writes() {
    let mut disk = Simulated::new(ProtectionType::Type1);
    let (first, second, read) = (Blocks::new(4, 1), Blocks::new(4, 9), Blocks::new(4, 0));
    assert_eq!(disk.run(first.write(1), &first), StepResult::Done);
    disk.submit(second.write(1), &second);
    disk.submit(read.read(1), &read);
    // The write is pending, and the read waits for it.
    assert_eq!(disk.rig.kernel.operations().len(), 1);
    disk.rig.run(&[]);
    assert_eq!(read.bytes(), second.bytes());
    assert_eq!(second.bytes(), Blocks::new(4, 9).bytes());
}

#[test]
fn first_write_waits_for_durable_intent() {
    let mut disk = Simulated::new(ProtectionType::Type1);
    let blocks = Blocks::new(1, 7);
    disk.submit(blocks.write(1), &blocks);
    assert_eq!(disk.rig.kernel.operations().len(), 0);
    assert!(disk.bitmap().iter().all(|byte| *byte == 0));
    disk.run_threads();
    assert_eq!(disk.bitmap()[..2], [1, 0]);
    assert_eq!(disk.disk.dirty(), [], "the bitmap is durable");
    assert_eq!(disk.rig.kernel.operations().len(), 1);
    assert_eq!(disk.rig.run(&[]), [StepResult::Done]);
    // The region is recorded, so another write starts immediately.
    disk.submit(blocks.write(5), &blocks);
    assert_eq!(disk.rig.kernel.operations().len(), 1);
    disk.rig.run(&[]);
    // Zeroes and discards are changes as well.
    let mut disk = Simulated::new(ProtectionType::Type1);
    let (offset, len) = (512, 512);
    disk.submit(BlockOp::Discard { offset, len }, &blocks);
    assert_eq!(disk.rig.kernel.operations().len(), 0);
    disk.run_threads();
    assert_eq!(disk.bitmap()[0], 1);
    assert_eq!(disk.rig.run(&[]), [StepResult::Done]);
}

#[test]
fn waiting_write_can_be_canceled() {
    let mut disk = Simulated::new(ProtectionType::Type1);
    let blocks = Blocks::new(1, 7);
    disk.submit(blocks.write(1), &blocks);
    let rig = &mut disk.rig;
    rig.driver.cancel(&mut rig.ring, 1);
    let done = rig.driver.poll_done(&mut rig.ring).unwrap();
    assert_eq!(done.result, StepResult::Failed(BackendError::Aborted));
    assert_eq!(blocks.bytes(), Blocks::new(1, 7).bytes());
    disk.run_threads();
    for seconds in [60, 120] {
        disk.store.rest(disk.start + Duration::from_secs(seconds));
    }
    assert_eq!(disk.threads.runnable().len(), 1, "no change is active");
}

/// The kernel cancels an operation before it has started, or interrupts it anywhere.
#[test]
fn aborted_changes_leave_frames_whole() {
    const UNSUPPORTED: Outcome = Outcome::Failed(libc::EOPNOTSUPP);
    let (old, new) = (Blocks::new(8, 1), Blocks::new(8, 0x11));
    let (offset, len) = (512, 4096);
    let zeroes = BlockOp::WriteZeroes {
        offset,
        len,
        unmap: false,
        fua: false,
    };
    let shorts = [4096, 520, 300].map(Outcome::Short);
    let canceled = Outcome::Failed(libc::ECANCELED);
    for (op, earlier) in [
        (new.write(1), &[][..]),
        (new.write(1), &shorts[..1]),
        (new.write(1), &shorts[1..]),
        (zeroes, &[UNSUPPORTED]),
        (zeroes, &[UNSUPPORTED, shorts[0]]),
        (zeroes, &[UNSUPPORTED, shorts[1], shorts[2]]),
    ] {
        for outcome in shorts.into_iter().chain([canceled]) {
            let mut disk = Simulated::new(ProtectionType::Type1);
            assert_eq!(disk.run(old.write(1), &old), StepResult::Done);
            disk.submit(op, &new);
            let rig = &mut disk.rig;
            for outcome in earlier {
                rig.complete_operations(|| *outcome);
            }
            rig.ring.submit().unwrap();
            rig.driver.cancel(&mut rig.ring, 1);
            let done = loop {
                if let Some(done) = rig.driver.poll_done(&mut rig.ring) {
                    break done;
                }
                let is_cancelled = rig.kernel.operations()[0].is_cancelled;
                rig.complete_operations(|| match is_cancelled {
                    true => outcome,
                    false => Outcome::Whole,
                });
                rig.ring.submit().unwrap();
            };
            assert_eq!(done.result, StepResult::Failed(BackendError::Aborted));
            let bytes = disk.read(1, 8);
            for n in 0..8 {
                let block = [&bytes[n * 512..][..512], &bytes[4096 + n * 8..][..8]].concat();
                let number = n as u8;
                let is_new = match op {
                    BlockOp::Write { .. } => block == [0x11 + number; 520],
                    _ => block == [[0; 512].as_slice(), &[0xff; 8]].concat(),
                };
                let is_whole = is_new || block == [1 + number; 520];
                assert!(is_whole, "{op:?} {earlier:?} {outcome:?}: {n}");
            }
        }
    }
}

#[test]
fn overlapping_writes_keep_frames_whole() {
    let mut disk = Simulated::new(ProtectionType::Type1);
    let [old, first, second] = [1, 0x11, 0x21].map(|byte| Blocks::new(2, byte));
    assert_eq!(disk.run(old.write(1), &old), StepResult::Done);
    disk.submit(first.write(1), &first);
    disk.rig.complete_operations(|| Outcome::Short(300));
    disk.submit(second.write(1), &second);
    // The kernel executes the remaining part of the first write last.
    let rig = &mut disk.rig;
    for operation in rig.kernel.operations().iter().rev() {
        rig.kernel.complete(operation.id, Outcome::Whole);
    }
    assert_eq!(rig.run(&[]), [StepResult::Done; 2]);
    assert_eq!(disk.read(1, 2), Blocks::new(2, 0x21).bytes());
}

/// Each sector of the frame is either old or new after a power failure.
#[test]
fn torn_frames_are_repaired_after_power_failure() {
    use riser_scsi::protection::guard;

    for protection_type in [
        ProtectionType::Type1,
        ProtectionType::Type2,
        ProtectionType::Type3,
    ] {
        for kept in 0..8 {
            let mut disk = Simulated::new(protection_type);
            // Valid frames with reference tags for their LBAs.
            let write = |disk: &mut Simulated, byte: u8| {
                let blocks = Blocks::new(2, byte);
                for n in 0..2 {
                    let guard = guard(&[byte + n as u8; 512]);
                    let tuple = Tuple {
                        guard,
                        application_tag: 0,
                        reference_tag: 3 + n,
                    };
                    let at = 1024 + 8 * n as usize;
                    blocks.memory.whole().write(at, &tuple.encode());
                }
                assert_eq!(disk.run(blocks.write(3), &blocks), StepResult::Done);
                blocks.bytes()
            };
            write(&mut disk, 1);
            disk.disk.flush();
            write(&mut disk, 9);
            let sectors: Vec<u64> = disk.disk.dirty().iter().map(|(n, _)| *n).collect();
            assert_eq!(sectors.len(), 3);
            disk.disk
                .crash(|n, _| (kept >> (n - sectors[0]) & 1) as usize);
            disk.reopen();
            assert!(disk.bitmap().iter().all(|byte| *byte == 0));
            let bytes = disk.read(3, 2);
            for n in 0..2 {
                let tuple = bytes[1024 + 8 * n..][..8].try_into().unwrap();
                let checked = Tuple::parse(tuple).check_stored(
                    protection_type,
                    3 + n as u64,
                    &bytes[512 * n..][..512],
                );
                assert_eq!(checked, Ok(()), "{protection_type:?} {kept:b}");
            }
        }
    }
}

#[test]
fn recovery_repairs_recorded_regions_only() {
    let dir = Dir::new(&std::env::temp_dir(), "recovery");
    let path = dir.file("lun");
    let spec = protected(file(path.clone(), 9 << 20), ProtectionType::Type1);
    let store = Store::open(&spec).unwrap();
    store.keep();
    drop(store);
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let write = |bytes: &[u8], at| {
        use std::os::unix::fs::FileExt;
        file.write_all_at(bytes, at).unwrap();
    };
    // Frames in two regions, with a wrong guard.
    let region = 4 << 20_u64;
    let far = (region - FIRST).div_ceil(520) + 10;
    for lba in [0, far] {
        write(&[1; 512], FIRST + lba * 520);
        write(&[0x55; 8], FIRST + lba * 520 + 512);
    }
    write(&[0b10], 4096);
    let open = |read_only, source| {
        Store::open(&Spec {
            read_only,
            source,
            ..spec.clone()
        })
        .unwrap()
    };
    let are_valid = || {
        [0, far].map(|lba| {
            use std::os::unix::fs::FileExt;
            let mut tuple = [0; 8];
            let at = FIRST + lba * 520 + 512;
            file.read_exact_at(&mut tuple, at).unwrap();
            let tuple = Tuple::parse(tuple.map(|byte| !byte));
            let checked = tuple.check_stored(ProtectionType::Type1, lba, &[1; 512]);
            checked.is_ok()
        })
    };
    let read_only = open(
        true,
        Source::File {
            path: path.clone(),
            size: None,
            create: false,
        },
    );
    assert_eq!(are_valid(), [false, false]);
    drop(read_only);
    let _store = open(false, spec.source.clone());
    assert_eq!(are_valid(), [false, true]);
    assert_eq!(std::fs::read(&path).unwrap()[4096], 0);
}

#[test]
fn intents_are_cleared_when_idle_and_flushed() {
    let mut disk = Simulated::new(ProtectionType::Type1);
    let blocks = Blocks::new(1, 7);
    let later = |seconds| disk.start + Duration::from_secs(seconds);
    let (soon, late) = (later(1), later(60));
    disk.run(blocks.write(1), &blocks);
    disk.store.rest(soon);
    assert!(disk.threads.runnable().is_empty());
    disk.store.rest(late);
    disk.run_threads();
    assert_eq!(disk.bitmap()[0], 0);
    let flushed = disk.disk.dirty();
    assert!(
        flushed.iter().all(|(n, _)| (8..16).contains(n)),
        "{flushed:?}"
    );
    // A lost write is found by the flush, so the frames must be checked after a crash.
    disk.run(blocks.write(1), &blocks);
    disk.disk.fail_write_back(libc::EIO, |_| true);
    disk.store.rest(late);
    disk.run_threads();
    assert_eq!(disk.bitmap()[0], 1);
    assert!(disk.store.flush_failure().is_some());
    disk.store.rest(late);
    disk.run_threads();
    assert_eq!(disk.bitmap()[0], 1);
}

#[test]
fn orderly_close_clears_intents() {
    let mut disk = Simulated::new(ProtectionType::Type1);
    let blocks = Blocks::new(1, 7);
    disk.run(blocks.write(1), &blocks);
    assert_eq!(disk.bitmap()[0], 1);
    close_all([&disk.store].into_iter());
    assert_eq!(disk.bitmap()[0], 0);
    // The next change is recorded again.
    disk.submit(blocks.write(1), &blocks);
    assert_eq!(disk.rig.kernel.operations().len(), 0);
    disk.run_threads();
    assert_eq!(disk.bitmap()[0], 1);
    disk.rig.run(&[]);
}

#[test]
fn removed_disk_clears_intents() {
    let mut disk = Simulated::new(ProtectionType::Type1);
    let blocks = Blocks::new(1, 7);
    disk.run(blocks.write(1), &blocks);
    assert_eq!(disk.bitmap()[0], 1);
    assert!(disk.rig.driver.detach(&mut disk.rig.ring, disk.rig.id));
    assert_eq!(disk.bitmap()[0], 0);
    let flushed = disk.disk.dirty();
    assert!(
        flushed.iter().all(|(n, _)| (8..16).contains(n)),
        "{flushed:?}"
    );
}

#[test]
fn removed_file_clears_intents_by_thread() {
    let dir = Dir::new(&std::env::temp_dir(), "removed-intents");
    let path = dir.file("lun");
    let store = Store::open(&type_1(path.clone())).unwrap();
    store.keep();
    let label = store.label().to_owned();
    let mut rig = Rig::new(store);
    assert_eq!(rig.write_blocks(2, &Blocks::new(2, 1)), StepResult::Done);
    let bits = || std::fs::read(&path).unwrap()[4096];
    assert_eq!(bits(), 1);
    assert!(rig.driver.detach(&mut rig.ring, rig.id));
    eventually("the file is closed", Duration::from_secs(60), || {
        !threads::has_thread(&label)
    });
    assert_eq!(bits(), 0);
}

#[test]
fn quiet_regions_are_cleared_during_writes() {
    let mut disk = Simulated::with_small_regions();
    disk.rest(0);
    for region in [2, 3, 9] {
        disk.write_valid(lba_in(region), 1, 1);
    }
    assert_eq!(disk.bitmap()[..2], [0b1100, 0b10]);
    for seconds in 2..80 {
        disk.write_valid(lba_in(2), seconds as u8, seconds);
        if seconds % 10 == 0 {
            disk.rest(seconds);
        }
    }
    assert_eq!(disk.bitmap()[..2], [0b100, 0]);
    // All data in cleared regions is durable, and a power failure may keep the old bits.
    let written = disk.write_valid(lba_in(2), 3, 80);
    disk.disk.crash(|_, _| 0);
    disk.reopen();
    assert_eq!(
        disk.read(lba_in(9), 1),
        valid_blocks(lba_in(9), 1, 1).bytes()
    );
    assert_ne!(disk.read(lba_in(2), 1), written);
}

#[test]
fn unreadable_region_keeps_bit_after_writes() {
    let mut disk = Simulated::with_small_regions();
    disk.write_valid(lba_in(3), 1, 0);
    disk.disk.flush();
    let at = FIRST + lba_in(3) * 520;
    disk.disk
        .set_unreadable(std::iter::once(at..at + 520).collect());
    disk.reopen();
    assert_eq!(disk.bitmap()[0], 0b1000);
    disk.write_valid(lba_in(2), 1, 0);
    assert_eq!(disk.bitmap()[0], 0b1100);
    disk.rest(60);
    disk.rest(120);
    assert_eq!(disk.bitmap()[0], 0b1000);
    close_all([&disk.store].into_iter());
    assert_eq!(disk.bitmap()[0], 0b1000);
    // The block can be read again, and does not match its tuple.
    disk.disk.set_unreadable(Vec::new());
    disk.disk.write(at, &[2]);
    disk.reopen();
    assert_eq!(disk.bitmap()[0], 0);
    let bytes = disk.read(lba_in(3), 1);
    let tuple = Tuple::parse(bytes[512..].try_into().unwrap());
    let checked = tuple.check_stored(ProtectionType::Type1, lba_in(3), &bytes[..512]);
    assert_eq!((bytes[0], checked), (2, Ok(())));
}

/// A descriptor reports an error again that other descriptors have reported.
#[test]
fn cleared_flush_failure_fails_no_write() {
    let mut disk = Simulated::with_small_regions();
    disk.write_valid(lba_in(2), 1, 0);
    disk.disk.fail_write_back(libc::EIO, |_| true);
    let (offset, len) = (0, 512);
    let flush = BlockOp::Flush { offset, len };
    let failed = disk.run(flush, &Blocks::new(1, 0));
    assert!(matches!(failed, StepResult::Failed(_)), "{failed:?}");
    assert!(disk.store.clear_flush_failure().is_some());
    disk.write_valid(lba_in(3), 1, 1);
    assert_eq!(disk.store.flush_failure(), None);
    disk.rest(60);
    assert_eq!(disk.store.flush_failure(), None);
    // The next recovery reads the region of the first write from the medium.
    assert_eq!(disk.bitmap()[0], 0b100);
}

/// The kernel keeps lost data in the page cache, and evicts it at any time.
#[test]
fn lost_frames_are_repaired_after_restart() {
    for is_cleared in [false, true] {
        let mut disk = Simulated::with_small_regions();
        let old = disk.write_valid(lba_in(2), 1, 0);
        disk.disk.flush();
        disk.write_valid(lba_in(2), 9, 0);
        let sectors = disk.disk.dirty();
        assert_eq!(sectors.len(), 2);
        disk.disk.fail_write_back(libc::EIO, |n| n == sectors[0].0);
        let flush = disk.flush();
        assert!(matches!(flush, StepResult::Failed(_)), "{flush:?}");
        if is_cleared {
            assert!(disk.store.clear_flush_failure().is_some());
        }
        disk.rest(60);
        disk.rest(120);
        close_all([&disk.store].into_iter());
        assert_eq!(disk.bitmap()[0], 0b100);
        disk.reopen();
        assert_eq!(disk.bitmap()[0], 0);
        disk.disk.drop_cache();
        let bytes = disk.read(lba_in(2), 1);
        assert_eq!(bytes[..10], old[..10]);
        let tuple = Tuple::parse(bytes[512..].try_into().unwrap());
        let checked = tuple.check_stored(ProtectionType::Type1, lba_in(2), &bytes[..512]);
        assert_eq!(checked, Ok(()));
    }
}

/// A durable write of a worker has received an error, and the flush that checks it is pending.
#[test]
fn renewed_descriptor_records_checked_error() {
    let mut disk = Simulated::with_small_regions();
    disk.write_valid(lba_in(2), 1, 0);
    disk.store.on_flush_failed(libc::EIO, disk.start);
    assert!(disk.store.clear_flush_failure().is_some());
    let checks = &disk.store.open_file().unwrap().flush_checks;
    checks.start_check();
    disk.write_valid(lba_in(3), 1, 1);
    let failure = disk.store.flush_failure();
    assert_eq!(failure.map(|failure| failure.errno), Some(libc::EIO));
    disk.rest(60);
    assert_eq!(disk.bitmap()[0], 0b1100);
}

#[derive(Debug, Default)]
struct SavedFailure(std::sync::Mutex<Option<FlushFailure>>);

impl FlushKeeper for SavedFailure {
    fn load(&self, _: &Identity) -> io::Result<Option<FlushFailure>> {
        Ok(*self.0.lock().unwrap())
    }

    fn save(&self, _: &Identity, failure: Option<&FlushFailure>) -> io::Result<()> {
        *self.0.lock().unwrap() = failure.copied();
        Ok(())
    }
}

/// A descriptor that is opened later reports success.
#[test]
fn recovery_records_failed_flush() {
    let mut disk = Simulated::with_small_regions();
    disk.write_valid(lba_in(2), 1, 0);
    disk.disk.fail_write_back(libc::EIO, |_| true);
    let saved = Arc::new(SavedFailure::default());
    let identity = crate::fixture::unit_config(1).identity;
    for bits in [0b100, 0] {
        (disk.threads, disk.store) = Simulated::open(&disk.spec, &disk.disk, disk.start);
        assert_eq!(disk.bitmap()[0], bits);
        let (store, now) = (&disk.store, disk.start);
        store.share_flush_failures(Arc::default());
        store.keep_flush_failures(saved.clone(), &identity, now);
        let failure = store.flush_failure();
        assert_eq!(failure.map(|failure| failure.errno), Some(libc::EIO));
        assert_eq!(*saved.0.lock().unwrap(), failure);
        disk.rig = InMemory::new(&disk.store);
        disk.run_threads();
        let flush = disk.flush();
        assert!(matches!(flush, StepResult::Failed(_)), "{flush:?}");
        disk.write_valid(lba_in(3), 1, 1);
    }
}

/// The store may be dropped because another part of the change has failed.
#[test]
fn lost_flush_outlives_dropped_store() {
    let dir = Dir::new(&std::env::temp_dir(), "lost-flush");
    let path = dir.file("lun");
    let spec = type_1(path.clone());
    let created = Store::open(&spec).unwrap();
    created.keep();
    drop(created);
    let errno = |store: &Store| store.flush_failure().map(|failure| failure.errno);
    lost_flushes::injection::fail_next_recovery(&path);
    drop(Store::open(&spec).unwrap());
    let reverted = Store::open(&spec).unwrap();
    reverted.share_flush_failures(Arc::default());
    assert_eq!(errno(&reverted), Some(libc::EIO));
    reverted.undo();
    drop(reverted);
    let served = Store::open(&spec).unwrap();
    served.share_flush_failures(Arc::default());
    served.keep();
    assert_eq!(errno(&served), Some(libc::EIO));
    assert!(served.clear_flush_failure().is_some());
    drop(served);
    let store = Store::open(&spec).unwrap();
    assert_eq!(errno(&store), None);
}

#[test]
fn failed_format_keeps_type() {
    let mut disk = Simulated::new(ProtectionType::Type1);
    disk.disk.fail_write_back(libc::EIO, |_| false);
    let error = disk.store.set_protection_type(Some(ProtectionType::Type3));
    assert_eq!(error.unwrap_err().raw_os_error(), Some(libc::EIO));
    disk.disk.flush();
    disk.reopen();
    let protection = disk.store.protection().unwrap();
    assert_eq!(protection.protection_type, ProtectionType::Type1);
}

/// The file refuses writes, as if its file system were full.
#[test]
fn refused_header_fails_no_flush() {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(memfd_create("header", flags).unwrap());
    let header = Header::new(512, Some(ProtectionType::Type1));
    file.write_all(&header.encode()).unwrap();
    file.set_len(FIRST + 128 * 520).unwrap();
    let source = Source::File {
        path: format!("/proc/self/fd/{}", file.as_raw_fd()).into(),
        size: None,
        create: false,
    };
    let store = Store::open(&protected(source, ProtectionType::Type1)).unwrap();
    fcntl_add_seals(&file, SealFlags::FUTURE_WRITE).unwrap();
    let error = store.set_protection_type(None).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EPERM));
    assert_eq!(store.flush_failure(), None);
    let current = store.protection().map(|current| current.protection_type);
    assert_eq!(current, Some(ProtectionType::Type1));
}

#[test]
fn unrestored_header_fails_flushes() {
    let mut disk = Simulated::new(ProtectionType::Type1);
    disk.disk.fail_syncs(Some(libc::EIO));
    let error = disk.store.set_protection_type(Some(ProtectionType::Type3));
    assert_eq!(error.unwrap_err().raw_os_error(), Some(libc::EIO));
    disk.disk.fail_syncs(None);
    let failure = disk.store.flush_failure();
    assert_eq!(failure.map(|failure| failure.errno), Some(libc::EIO));
    let flush = disk.flush();
    assert!(matches!(flush, StepResult::Failed(_)), "{flush:?}");
    // The header is replaced on the medium when the unit is formatted with the same type.
    assert!(disk.store.clear_flush_failure().is_some());
    disk.store
        .set_protection_type(Some(ProtectionType::Type1))
        .unwrap();
    assert_eq!(disk.disk.dirty(), []);
    disk.disk.drop_cache();
    disk.reopen();
    let protection = disk.store.protection().unwrap();
    assert_eq!(protection.protection_type, ProtectionType::Type1);
}

/// A step of a load that may be interrupted by a power failure.
#[derive(Clone, Debug)]
enum LoadStep {
    /// Submit a write, discard or zeroing of these blocks.
    Submit {
        kind: u8,
        lba: u64,
        blocks: u32,
    },
    Flush,
    /// Complete a pending operation, or a part of it.
    Complete {
        which: usize,
        outcome: Outcome,
    },
    Thread,
    Rest,
}

fn load() -> impl Strategy<Value = Vec<LoadStep>> {
    let outcome = prop_oneof![
        4 => Just(Outcome::Whole),
        2 => (1..3000_usize).prop_map(Outcome::Short),
    ];
    let step = prop_oneof![
        4 => (0..4_u8, 0..300_u64, 1..200_u32)
            .prop_map(|(kind, lba, blocks)| LoadStep::Submit { kind, lba, blocks }),
        1 => Just(LoadStep::Flush),
        6 => (any::<usize>(), outcome)
            .prop_map(|(which, outcome)| LoadStep::Complete { which, outcome }),
        4 => Just(LoadStep::Thread),
        1 => Just(LoadStep::Rest),
    ];
    prop::collection::vec(step, 1..60)
}

impl Simulated {
    /// Executes a step of a load.
    fn run_step(&mut self, step: &LoadStep, byte: u8) {
        let now = self.rig.now;
        self.rig.driver.begin_round(now);
        match *step {
            LoadStep::Submit { kind, lba, blocks } => {
                let lba = lba_in(2) + lba;
                let (offset, len) = (lba * 512, u64::from(blocks) * 512);
                let data = valid_blocks(lba, blocks, byte);
                let op = match kind {
                    0 => BlockOp::Discard { offset, len },
                    1 => BlockOp::WriteZeroes {
                        offset,
                        len,
                        unmap: false,
                        fua: false,
                    },
                    _ => data.write(lba),
                };
                self.submit(op, &data);
            }
            LoadStep::Flush => {
                let (offset, len) = (0, 512);
                self.submit(BlockOp::Flush { offset, len }, &Blocks::new(1, 0));
            }
            LoadStep::Complete { which, outcome } => {
                self.rig.ring.submit().unwrap();
                let operations = self.rig.kernel.operations();
                if !operations.is_empty() {
                    let id = operations[which % operations.len()].id;
                    self.rig.kernel.complete(id, outcome);
                }
            }
            LoadStep::Thread => {
                if let [thread, ..] = self.threads.runnable()[..] {
                    self.threads.step(thread);
                }
            }
            LoadStep::Rest => {
                self.rig.now += Duration::from_secs(20);
                self.store.rest(self.rig.now);
            }
        }
        self.rig.process_completions();
    }
}

impl InMemory {
    /// Processes completions without completing other operations.
    fn process_completions(&mut self) {
        let mut completions = Vec::new();
        self.ring.reap(&mut completions).unwrap();
        for completion in completions {
            self.driver.handle_completion(&mut self.ring, &completion);
        }
        while self.driver.poll_done(&mut self.ring).is_some() {}
        self.ring.submit().unwrap();
    }
}

/// Returns blocks with valid tuples.
fn valid_blocks(lba: u64, blocks: u32, byte: u8) -> Blocks {
    let data = Blocks::new(blocks, byte);
    for n in 0..blocks as usize {
        let block = [byte.wrapping_add(n as u8); 512];
        let tuple = Tuple {
            guard: riser_scsi::protection::guard(&block),
            application_tag: 0,
            reference_tag: lba as u32 + n as u32,
        };
        data.memory
            .whole()
            .write(blocks as usize * 512 + 8 * n, &tuple.encode());
    }
    data
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn frames_are_valid_after_power_failure(steps in load(), seed in any::<u64>()) {
        let mut disk = Simulated::with_small_regions();
        for (byte, step) in (1..).zip(&steps) {
            disk.run_step(step, byte);
        }
        let mut state = seed;
        disk.disk.crash(|_, versions| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % (versions + 1)
        });
        disk.reopen();
        prop_assert_eq!(disk.bitmap(), vec![0; 4096]);
        let mut bytes = [0; 520];
        for lba in lba_in(2)..lba_in(2) + 500 {
            disk.store.read_frames(lba, &mut bytes).unwrap();
            let tuple = Tuple::parse(bytes[512..].try_into().unwrap());
            let checked = tuple.check_stored(ProtectionType::Type1, lba, &bytes[..512]);
            prop_assert_eq!(checked, Ok(()), "{}", lba);
        }
    }
}
