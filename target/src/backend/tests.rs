//! Compares all kinds of backends with a byte array.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use riser_memory::{MemSlice, Memory};
use riser_reactor::simulated::{self, Disk, Outcome};
use riser_reactor::{Ring, RingConfig, SyncKind};
use riser_scsi::config::{Identity, Protection, ProtectionFormat, ProtectionType};
use riser_scsi::step::{Allocation, BackendError, BlockOp, StepResult};

use riser_testkit::eventually;
use riser_testkit::skip::skip;

use super::*;
use crate::host::SimulatedHost;

mod protected;
mod scrub;

/// A directory that is removed after the test.
struct Dir(PathBuf);

impl Dir {
    fn new(base: &Path, name: &str) -> Self {
        let path = base.join(format!("riser-backend-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

/// Returns directories for files in memory and on disk, if available on this host.
fn places() -> Vec<PathBuf> {
    let disk = std::env::current_exe().unwrap();
    let disk = disk.parent().unwrap().to_owned();
    [PathBuf::from("/dev/shm"), disk]
        .into_iter()
        .filter(|p| p.is_dir())
        .collect()
}

fn spec(source: Source) -> Spec {
    Spec {
        name: "disk".into(),
        source,
        block_size: 512,
        direct: Direct::Auto,
        write_cache: true,
        read_only: false,
        protection: None,
        faults: None,
    }
}

fn file(path: PathBuf, size: u64) -> Source {
    Source::File {
        path,
        size: Some(size),
        create: true,
    }
}

struct Rig {
    ring: Ring,
    driver: Driver,
    id: StoreId,
    completions: Vec<riser_reactor::Completion>,
}

impl Rig {
    fn new(store: Arc<Store>) -> Self {
        Self::with(
            store,
            RingConfig::default(),
            DriverConfig {
                bounce: 8192,
                bounces: 2,
                ..DriverConfig::default()
            },
        )
    }

    fn with(store: Arc<Store>, ring: RingConfig, driver: DriverConfig) -> Self {
        let mut ring = Ring::new(ring).unwrap();
        let mut driver = Driver::new(ring.waker(), &mut ring, Instant::now(), driver).unwrap();
        let id = driver.attach(&mut ring, store);
        Self {
            ring,
            driver,
            id,
            completions: Vec::new(),
        }
    }

    fn submit(&mut self, op: BlockOp, data: &[MemSlice], user: u64) {
        self.driver.begin_round(Instant::now());
        let served = self.driver.store(self.id);
        let data = match served.layout() {
            None => data.to_vec(),
            Some(layout) => layout.parts(&op).flat_map(|part| cut(data, part)).collect(),
        };
        let op = served.command(op);
        self.driver
            .submit(&mut self.ring, self.id, op, &data, user)
            .unwrap();
    }

    /// Waits for `n` results.
    fn wait(&mut self, n: usize) -> Vec<Done> {
        let mut done = Vec::new();
        let limit = Instant::now() + Duration::from_secs(60);
        loop {
            self.driver.begin_round(Instant::now());
            done.extend(std::iter::from_fn(|| self.driver.poll_done(&mut self.ring)));
            if done.len() >= n {
                assert_eq!(done.len(), n);
                return done;
            }
            assert!(
                Instant::now() < limit,
                "{} of {n} requests finished",
                done.len()
            );
            self.ring.park(Some(Duration::from_millis(5))).unwrap();
            self.ring.reap(&mut self.completions).unwrap();
            for c in self.completions.drain(..) {
                self.driver.handle_completion(&mut self.ring, &c);
            }
        }
    }

    fn run(&mut self, op: BlockOp, data: &[MemSlice]) -> StepResult {
        self.submit(op, data, 77);
        let done = self.wait(1);
        assert_eq!(done[0].user, 77);
        done[0].result
    }
}

/// Returns a part of a buffer.
fn cut(data: &[MemSlice], part: std::ops::Range<u32>) -> Vec<MemSlice> {
    let op = riser_block::Command {
        buffer_offset: part.start as usize,
        ..riser_block::Command::new(riser_block::CommandKind::Read, 0, part.len() as u64)
    };
    let mut pieces = Vec::new();
    riser_file::cut_buffer(&op, data, &mut pieces);
    pieces
}

fn read(offset: u64, len: u32) -> BlockOp {
    BlockOp::Read {
        offset,
        len,
        buffer_offset: 0,
        tags: None,
        fua: false,
    }
}

fn write(offset: u64, len: u32) -> BlockOp {
    BlockOp::Write {
        offset,
        len,
        buffer_offset: 0,
        tags: None,
        fua: false,
    }
}

/// A step of a random sequence, in blocks.
#[derive(Debug, Clone)]
enum Action {
    Read { fua: bool },
    Write { fua: bool, byte: u8 },
    Flush,
    Discard,
    Zero { unmap: bool, fua: bool },
    Status,
}

#[derive(Debug, Clone)]
struct Step {
    action: Action,
    block: u64,
    blocks: u64,
    /// Lengths of the memory pieces, and the offset of the first piece in its page.
    cuts: Vec<usize>,
    shift: usize,
    buffer_offset: u32,
}

const BLOCKS: u64 = 64;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let action = prop_oneof![
        any::<bool>().prop_map(|fua| Action::Read { fua }),
        (any::<bool>(), 1u8..).prop_map(|(fua, byte)| Action::Write { fua, byte }),
        (any::<bool>(), 1u8..).prop_map(|(fua, byte)| Action::Write { fua, byte }),
        Just(Action::Flush),
        Just(Action::Discard),
        (any::<bool>(), any::<bool>()).prop_map(|(unmap, fua)| Action::Zero { unmap, fua }),
        Just(Action::Status),
    ];
    let step = (
        action,
        0..BLOCKS,
        1..BLOCKS,
        prop::collection::vec(1usize..20_000, 0..6),
        prop_oneof![Just(0usize), Just(512), 1usize..4096],
        prop_oneof![Just(0u32), 1u32..5000],
    )
        .prop_map(|(action, block, blocks, cuts, shift, buffer_offset)| Step {
            action,
            block,
            blocks: blocks.min(BLOCKS - block),
            cuts,
            shift,
            buffer_offset,
        });
    prop::collection::vec(step, 1..30)
}

/// Returns a buffer of `len` bytes split into the pieces of this step, with gaps between them.
fn scatter(step: &Step, len: usize) -> Vec<MemSlice> {
    let memory = Memory::new(step.shift + 2 * len + 8 * 4096).unwrap();
    let (mut at, mut left) = (step.shift, len);
    let mut out = Vec::new();
    for cut in step.cuts.iter().copied().chain([usize::MAX]) {
        let take = cut.min(left);
        out.extend(memory.slice(at..at + take));
        at += take + 24;
        left -= take;
    }
    out
}

fn gather(list: &[MemSlice]) -> Vec<u8> {
    list.iter().flat_map(MemSlice::to_vec).collect()
}

fn spread(list: &[MemSlice], bytes: &[u8]) {
    let mut at = 0;
    for piece in list {
        piece.write(0, &bytes[at..at + piece.len()]);
        at += piece.len();
    }
}

/// Executes a sequence with a backend and with an array. Tuples are after the blocks in the buffer.
fn compare(store: &Arc<Store>, steps: &[Step]) {
    let g = store.geometry();
    let block = u64::from(g.block_size);
    let mut model = vec![0u8; g.capacity as usize];
    let tuples_of = |bytes: u64| g.protection.map_or(0, |_| (bytes / block * 8) as usize);
    let mut tuples = vec![0xff_u8; tuples_of(g.capacity)];
    let mut rig = Rig::new(store.clone());
    // Clear data from a previous sequence.
    let whole = BlockOp::WriteZeroes {
        offset: 0,
        len: g.capacity,
        unmap: true,
        fua: false,
    };
    assert_eq!(rig.run(whole, &[]), StepResult::Done);
    for step in steps {
        let (offset, len) = (step.block * block, step.blocks * block);
        let range = offset as usize..(offset + len) as usize;
        let tuple_range = tuples_of(offset)..tuples_of(offset + len);
        let skip = step.buffer_offset as usize;
        let end = skip + len as usize;
        let tags = g.protection.map(|_| end as u32);
        let (length, buffer_offset) = (len as u32, step.buffer_offset);
        match step.action {
            Action::Read { fua } => {
                let data = scatter(step, end + tuple_range.len());
                spread(&data, &vec![0xee; end + tuple_range.len()]);
                let op = BlockOp::Read {
                    offset,
                    len: length,
                    buffer_offset,
                    tags,
                    fua,
                };
                assert_eq!(rig.run(op, &data), StepResult::Done, "{step:?}");
                let got = gather(&data);
                assert!(
                    got[..skip].iter().all(|&b| b == 0xee),
                    "wrote before the buffer"
                );
                assert!(got[skip..end] == model[range], "{step:?} read other bytes");
                assert_eq!(got[end..], tuples[tuple_range], "{step:?}");
            }
            Action::Write { fua, byte } => {
                let data = scatter(step, end + tuple_range.len());
                let bytes: Vec<u8> = (0..end + tuple_range.len())
                    .map(|i| byte.wrapping_add((i / 13) as u8))
                    .collect();
                spread(&data, &bytes);
                let op = BlockOp::Write {
                    offset,
                    len: length,
                    buffer_offset,
                    tags,
                    fua,
                };
                assert_eq!(rig.run(op, &data), StepResult::Done, "{step:?}");
                assert!(gather(&data) == bytes, "the buffer changed");
                model[range].copy_from_slice(&bytes[skip..end]);
                tuples[tuple_range].copy_from_slice(&bytes[end..]);
            }
            Action::Flush => {
                assert_eq!(
                    rig.run(BlockOp::Flush { offset, len }, &[]),
                    StepResult::Done
                );
            }
            Action::Discard => {
                assert_eq!(
                    rig.run(BlockOp::Discard { offset, len }, &[]),
                    StepResult::Done
                );
                // Without holes, the medium keeps the data.
                if g.unmap_granularity.is_some() {
                    model[range].fill(0);
                    tuples[tuple_range].fill(0xff);
                }
            }
            Action::Zero { unmap, fua } => {
                let op = BlockOp::WriteZeroes {
                    offset,
                    len,
                    unmap,
                    fua,
                };
                assert_eq!(rig.run(op, &[]), StepResult::Done);
                model[range].fill(0);
                tuples[tuple_range].fill(0xff);
            }
            Action::Status => match rig.run(BlockOp::Status { offset, len }, &[]) {
                StepResult::Status {
                    allocation,
                    len: got,
                } => {
                    assert!(got > 0 && got <= len && got % block == 0, "{got} of {len}");
                    if allocation == Allocation::Deallocated {
                        let part = &model[range][..got as usize];
                        assert!(part.iter().all(|&b| b == 0), "data in a hole");
                    }
                }
                other => panic!("{other:?}"),
            },
        }
    }
    let m = Memory::new(model.len() + tuples.len()).unwrap();
    let mut op = read(0, g.capacity as u32);
    if let BlockOp::Read { tags, .. } = &mut op {
        *tags = g.protection.map(|_| g.capacity as u32);
    }
    assert_eq!(rig.run(op, &[m.whole()]), StepResult::Done);
    let bytes = m.whole().to_vec();
    let (got, rest) = bytes.split_at(model.len());
    assert!(got == model, "the backend ended with other bytes");
    assert!(rest[..tuples.len()] == tuples, "other tuples");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn ram_disk_behaves_like_array(
        sequence in steps(),
        small in any::<bool>(),
        is_protected in any::<bool>(),
    ) {
        let block_size = if small { 512 } else { 4096 };
        let store = Store::open(&Spec {
            block_size,
            protection: is_protected.then(|| Protection::new(ProtectionType::Type1)),
            ..spec(Source::Ram { size: BLOCKS * u64::from(block_size) })
        }).unwrap();
        compare(&store, &sequence);
    }

    #[test]
    fn files_behave_like_arrays(
        sequence in steps(),
        small in any::<bool>(),
        buffered in any::<bool>(),
        write_cache in any::<bool>(),
        is_protected in any::<bool>(),
    ) {
        let block_size = if small { 512 } else { 4096 };
        for place in places() {
            let dir = Dir::new(&place, "array");
            let store = Store::open(&Spec {
                block_size,
                direct: if buffered { Direct::Off } else { Direct::Auto },
                write_cache,
                protection: is_protected.then(|| Protection::new(ProtectionType::Type1)),
                ..spec(file(dir.file("lun"), BLOCKS * u64::from(block_size)))
            }).unwrap();
            compare(&store, &sequence);
        }
    }
}

#[test]
fn concurrent_requests_access_their_blocks() {
    for place in places() {
        let dir = Dir::new(&place, "many");
        let store = Store::open(&Spec {
            block_size: 4096,
            ..spec(file(dir.file("lun"), 4 << 20))
        })
        .unwrap();
        // The ring is much smaller than the depth, so requests must wait for space in it.
        let ring = RingConfig {
            capacity: 4,
            ..RingConfig::default()
        };
        let config = DriverConfig {
            depth: 200,
            bounce: 4096,
            bounces: 1,
            ..DriverConfig::default()
        };
        let mut rig = Rig::with(store, ring, config);
        let m = Memory::new((4 << 20) + 4096).unwrap();
        // Every other buffer is misaligned, so some of them wait for the bounce buffer.
        let slot = |i: usize| {
            m.slice(i * 8192 + (i % 2) * 7..i * 8192 + (i % 2) * 7 + 4096)
                .unwrap()
        };
        for i in 0..200usize {
            slot(i).fill(0, 4096, i as u8 + 1);
            rig.submit(write(i as u64 * 4096, 4096), &[slot(i)], i as u64);
        }
        let full = rig
            .driver
            .submit(&mut rig.ring, rig.id, command(read(0, 512)), &[], 0);
        assert_eq!(full, Err(DriverFull));
        let done = rig.wait(200);
        assert!(done.iter().all(|d| d.result == StepResult::Done));
        let mut names: Vec<_> = done.iter().map(|d| d.user).collect();
        names.sort_unstable();
        assert!(names.into_iter().eq(0..200));
        m.fill(0, m.len(), 0);
        for i in 0..200usize {
            rig.submit(read(i as u64 * 4096, 4096), &[slot(i)], i as u64);
        }
        rig.wait(200);
        for i in 0..200usize {
            assert!(
                slot(i).to_vec().iter().all(|&b| b == i as u8 + 1),
                "block {i}"
            );
        }
        assert_eq!(rig.driver.in_flight(), 0);
        assert!(rig.driver.detach(&mut rig.ring, rig.id));
    }
}

/// Reports the thread that drops it, together with the store, and whether a thread of this backend
/// is listed.
#[derive(Debug)]
struct LastUser {
    label: String,
    dropped: std::sync::mpsc::Sender<(std::thread::ThreadId, bool)>,
}

impl LastUser {
    /// Adds a user that is dropped with this store.
    fn of(store: &Store) -> std::sync::mpsc::Receiver<(std::thread::ThreadId, bool)> {
        let (dropped, reports) = std::sync::mpsc::channel();
        let label = store.label().to_owned();
        let identity = crate::fixture::unit_config(1).identity;
        let user = Arc::new(Self { label, dropped });
        store.keep_flush_failures(user, &identity, Instant::now());
        reports
    }
}

impl Drop for LastUser {
    fn drop(&mut self) {
        let is_listed = threads::has_thread(&self.label);
        let _ = self.dropped.send((std::thread::current().id(), is_listed));
    }
}

impl FlushKeeper for LastUser {
    fn load(&self, _: &Identity) -> io::Result<Option<FlushFailure>> {
        Ok(None)
    }

    fn save(&self, _: &Identity, _: Option<&FlushFailure>) -> io::Result<()> {
        Ok(())
    }
}

/// Saves failures as soon as the sender is dropped.
#[derive(Debug)]
struct SlowKeeper(std::sync::Mutex<std::sync::mpsc::Receiver<()>>);

impl FlushKeeper for SlowKeeper {
    fn load(&self, _: &Identity) -> io::Result<Option<FlushFailure>> {
        Ok(None)
    }

    fn save(&self, _: &Identity, _: Option<&FlushFailure>) -> io::Result<()> {
        let _ = self.0.lock().unwrap().recv();
        Ok(())
    }
}

#[test]
fn flush_failure_is_saved_by_listed_thread() {
    let dir = Dir::new(&std::env::temp_dir(), "saved-failure");
    let store = Store::open(&spec(file(dir.file("lun"), 1 << 20))).unwrap();
    let (resume, blocked) = std::sync::mpsc::channel();
    let keeper = Arc::new(SlowKeeper(std::sync::Mutex::new(blocked)));
    let identity = crate::fixture::unit_config(1).identity;
    store.keep_flush_failures(keeper, &identity, Instant::now());
    store.on_flush_failed(libc::EIO, Instant::now());
    assert!(threads::has_thread(store.label()));
    drop(resume);
    eventually("the failure is saved", Duration::from_secs(60), || {
        !threads::has_thread(store.label())
    });
}

/// The kernel may write back gigabytes when a file is closed.
#[test]
fn detached_store_closes_on_other_thread() {
    let dir = Dir::new(&std::env::temp_dir(), "closed");
    let store = Store::open(&spec(file(dir.file("lun"), 1 << 20))).unwrap();
    let dropped = LastUser::of(&store);
    let mut rig = Rig::new(store);
    assert_eq!(rig.run(FLUSH, &[]), StepResult::Done);
    assert!(rig.driver.detach(&mut rig.ring, rig.id));
    let (thread, is_listed) = dropped.recv_timeout(Duration::from_secs(60)).unwrap();
    assert!(is_listed && thread != std::thread::current().id());
}

/// A hanging close on any thread would block `execve(2)`.
#[test]
fn dropped_store_lists_closing_thread() {
    let dir = Dir::new(&std::env::temp_dir(), "listed");
    let store = Store::open(&spec(file(dir.file("lun"), 1 << 20))).unwrap();
    let (label, dropped) = (store.label().to_owned(), LastUser::of(&store));
    drop(store);
    let (thread, is_listed) = dropped.try_recv().unwrap();
    assert!(is_listed && thread == std::thread::current().id());
    assert!(!threads::has_thread(&label));
}

/// A hanging backend must not use all resources shared by the backends of a worker.
#[test]
fn hanging_backend_leaves_buffers_and_helpers() {
    for place in places() {
        let dir = Dir::new(&place, "hangs");
        let open = |name: &str| Store::open(&spec(file(dir.file(name), 1 << 20))).unwrap();
        let mut rig = Rig::new(open("one"));
        let hung = rig.id;
        rig.id = rig.driver.attach(&mut rig.ring, open("other"));
        let release = rig.driver.hang(hung);
        let m = Memory::new(1 << 16).unwrap();
        // Misaligned, so direct I/O requires a bounce buffer. Several requests wait for it.
        let slots = [7, 8199, 16391, 24583].map(|at| m.slice(at..at + 4096).unwrap());
        for (n, slot) in (0u64..).zip(&slots) {
            slot.fill(0, 4096, n as u8 + 1);
            rig.submit(write(n * 4096, 4096), std::slice::from_ref(slot), n);
        }
        let done = rig.wait(4);
        assert!(done.iter().all(|d| d.result == StepResult::Done));
        let status = BlockOp::Status {
            offset: 0,
            len: 4096,
        };
        let mapped = StepResult::Status {
            allocation: Allocation::Mapped,
            len: 4096,
        };
        assert_eq!(rig.run(status, &[]), mapped);
        drop(release);
    }
}

#[test]
fn data_survives_close_as_plain_bytes() {
    for place in places() {
        let dir = Dir::new(&place, "survive");
        let path = dir.file("lun");
        let s = Spec {
            write_cache: false,
            ..spec(file(path.clone(), 1 << 20))
        };
        let m = Memory::new(4096).unwrap();
        m.fill(0, 4096, 0x42);
        {
            let mut rig = Rig::new(Store::open(&s).unwrap());
            assert_eq!(rig.run(write(8192, 4096), &[m.whole()]), StepResult::Done);
        }
        let mut bytes = Vec::new();
        File::open(&path).unwrap().read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes.len(), 1 << 20);
        assert!(bytes[8192..12288].iter().all(|&b| b == 0x42));
        assert!(bytes[..8192].iter().all(|&b| b == 0));
        let mut rig = Rig::new(Store::open(&s).unwrap());
        m.fill(0, 4096, 0);
        assert_eq!(rig.run(read(8192, 4096), &[m.whole()]), StepResult::Done);
        assert!(m.whole().to_vec().iter().all(|&b| b == 0x42));
    }
}

#[test]
fn file_in_memory_is_accessed_synchronously() {
    let place = Path::new("/dev/shm");
    if !place.is_dir() {
        return skip("files in memory", "there is no /dev/shm");
    }
    let dir = Dir::new(place, "at-once");
    let store = Store::open(&spec(file(dir.file("lun"), 1 << 20))).unwrap();
    let mut rig = Rig::new(store);
    let m = Memory::new(512 << 10).unwrap();
    m.fill(0, 512 << 10, 0x42);
    let whole = [m.whole()];
    let mut in_ring = |op, user| {
        rig.submit(op, &whole, user);
        let in_ring = rig.ring.in_flight();
        assert_eq!(rig.wait(1)[0].result, StepResult::Done, "{op:?}");
        in_ring
    };
    assert_eq!(in_ring(write(4096, 128 << 10), 1), 0);
    assert_eq!(in_ring(read(4096, 128 << 10), 2), 0);
    // This also applies to a part of the buffer.
    let middle = BlockOp::Write {
        offset: 0,
        len: 4096,
        buffer_offset: 8192,
        tags: None,
        fua: false,
    };
    assert_eq!(in_ring(middle, 2), 0);
    // The worker serves other requests in the meantime.
    assert_eq!(in_ring(write(0, 256 << 10), 3), 1);
    let flush = BlockOp::Flush { offset: 0, len: 0 };
    assert_eq!(in_ring(flush, 4), 1);
    // A long discard only delays writes to the same file.
    let discard = BlockOp::Discard {
        offset: 512 << 10,
        len: 256 << 10,
    };
    rig.submit(discard, &[], 5);
    assert_eq!(rig.ring.in_flight(), 1);
    rig.submit(write(0, 4096), &whole, 6);
    assert_eq!(rig.ring.in_flight(), 2);
    rig.submit(read(0, 4096), &whole, 7);
    rig.wait(3);
    rig.submit(write(0, 4096), &whole, 8);
    assert_eq!(rig.ring.in_flight(), 0);
    rig.wait(1);
    // A long write does the same, but short writes that had to wait for it do not.
    rig.submit(write(0, 256 << 10), &whole, 9);
    for user in [10, 11] {
        rig.submit(write(0, 4096), &whole, user);
    }
    assert_eq!(rig.ring.in_flight(), 3);
    rig.ring.park(None).unwrap();
    let mut in_ring = 3;
    while in_ring > 2 {
        rig.ring.reap(&mut rig.completions).unwrap();
        for completion in rig.completions.drain(..) {
            rig.driver.handle_completion(&mut rig.ring, &completion);
        }
        in_ring = rig.ring.in_flight();
    }
    rig.submit(write(512 << 10, 4096), &whole, 12);
    assert_eq!(rig.ring.in_flight(), in_ring);
    rig.wait(4);
    // After copying enough data in this round, remaining requests use the ring.
    rig.driver.begin_round(Instant::now());
    let (ring, id) = (&mut rig.ring, rig.id);
    for user in 0..9 {
        let op = command(read(0, 128 << 10));
        rig.driver.submit(ring, id, op, &whole, user).unwrap();
        assert_eq!(ring.in_flight(), usize::from(user == 8));
    }
    rig.wait(9);
}

/// Returns a store on a file in memory, if available on this host.
fn store_in_shared_memory(name: &str) -> Option<(Dir, Arc<Store>)> {
    let place = Path::new("/dev/shm");
    if !place.is_dir() {
        skip("files in memory", "there is no /dev/shm");
        return None;
    }
    let dir = Dir::new(place, name);
    let store = Store::open(&spec(file(dir.file("lun"), 1 << 20))).unwrap();
    Some((dir, store))
}

#[test]
fn synchronous_access_creates_no_request() {
    let Some((_dir, store)) = store_in_shared_memory("no-request") else {
        return;
    };
    let mut rig = Rig::new(store);
    let m = Memory::new(8192).unwrap();
    let (first, second) = (m.slice(0..4096).unwrap(), m.slice(4096..8192).unwrap());
    m.fill(0, 4096, 1);
    m.fill(4096, 4096, 2);
    let pieces = [second.clone(), first.clone()];
    assert_eq!(rig.run(write(4096, 8192), &pieces), StepResult::Done);
    assert_eq!(rig.run(read(4096, 8192), &[m.whole()]), StepResult::Done);
    assert_eq!(
        (first.to_vec(), second.to_vec()),
        (vec![2; 4096], vec![1; 4096])
    );
    assert!(!rig.driver.has_ended_requests());
    assert!(
        rig.driver.poll_done(&mut rig.ring).is_none(),
        "each ends once"
    );
    // A durable write requires additional steps.
    let durable = BlockOp::Write {
        offset: 0,
        len: 4096,
        buffer_offset: 0,
        tags: None,
        fua: true,
    };
    assert_eq!(rig.run(durable, &[first]), StepResult::Done);
    assert!(rig.driver.has_ended_requests());
}

/// Another worker is changing or reading the same bytes. Concurrent requests wait for this, but
/// requests for other bytes do not.
#[test]
fn synchronous_access_waits_for_its_turn() {
    let Some((_dir, store)) = store_in_shared_memory("turns") else {
        return;
    };
    let mut rig = Rig::new(store.clone());
    let m = Memory::new(4096).unwrap();
    for (other, op) in [(true, read(4096, 4096)), (false, write(4096, 4096))] {
        let waker = rig.ring.waker();
        let turn = store
            .open_file()
            .unwrap()
            .turns
            .join(4608..5120, other, || waker);
        rig.submit(op, &[m.whole()], 1);
        assert!(rig.driver.poll_done(&mut rig.ring).is_none(), "{op:?}");
        assert_eq!(rig.run(read(8192, 4096), &[m.whole()]), StepResult::Done);
        drop(turn);
        assert_eq!(rig.wait(1)[0].user, 1);
        // It has left the queue as well.
        assert!(
            store
                .open_file()
                .unwrap()
                .turns
                .try_join(4096..8192, !other)
                .is_some()
        );
        assert!(
            store
                .open_file()
                .unwrap()
                .turns
                .try_join(4096..8192, other)
                .is_some()
        );
    }
}

#[test]
fn failed_synchronous_access_becomes_request() {
    let Some((dir, store)) = store_in_shared_memory("short") else {
        return;
    };
    let mut rig = Rig::new(store.clone());
    let m = Memory::new(8192).unwrap();
    let file = File::options().write(true).open(dir.file("lun")).unwrap();
    file.set_len(4096).unwrap();
    let beyond = StepResult::Failed(BackendError::Medium { offset: Some(4096) });
    assert_eq!(rig.run(read(0, 8192), &[m.whole()]), beyond);
    assert!(rig.driver.has_ended_requests());
    // No requests are blocked.
    assert!(
        store
            .open_file()
            .unwrap()
            .turns
            .try_join(0..8192, true)
            .is_some()
    );
    assert_eq!(rig.run(write(0, 8192), &[m.whole()]), StepResult::Done);
    assert_eq!(rig.run(read(0, 8192), &[m.whole()]), StepResult::Done);
}

/// Reading pages that were accessed before returns an error, instead of raising a signal.
#[test]
fn truncated_file_in_memory_fails_reads() {
    let Some((dir, store)) = store_in_shared_memory("truncated") else {
        return;
    };
    let mut rig = Rig::new(store);
    let m = Memory::new(8192).unwrap();
    let whole = [m.whole()];
    assert_eq!(rig.run(write(0, 8192), &whole), StepResult::Done);
    assert_eq!(rig.run(read(0, 8192), &whole), StepResult::Done);
    let path = dir.file("lun");
    let file = File::options().write(true).open(&path).unwrap();
    // The last page still exists at first, but only a part of it belongs to the file.
    for len in [5000, 4096] {
        file.set_len(len).unwrap();
        let beyond = StepResult::Failed(BackendError::Medium { offset: Some(len) });
        assert_eq!(rig.run(read(0, 8192), &whole), beyond);
    }
    // Reads succeed again for existing data and after extending the file.
    file.set_len(1 << 20).unwrap();
    m.fill(0, 8192, 7);
    assert_eq!(rig.run(write(4096, 4096), &whole), StepResult::Done);
    m.fill(0, 8192, 0);
    assert_eq!(rig.run(read(0, 8192), &whole), StepResult::Done);
    assert_eq!(m.whole().to_vec()[4095..4097], [0, 7]);
}

#[test]
fn reads_of_holes_allocate_no_memory() {
    let Some((dir, store)) = store_in_shared_memory("sparse") else {
        return;
    };
    let mut rig = Rig::new(store);
    let m = Memory::new(64 << 10).unwrap();
    let whole = [m.whole()];
    let blocks = || std::fs::metadata(dir.file("lun")).unwrap().blocks();
    let read_all = |rig: &mut Rig| {
        for at in (0..1 << 20).step_by(64 << 10) {
            assert_eq!(rig.run(read(at, 64 << 10), &whole), StepResult::Done);
        }
    };
    read_all(&mut rig);
    assert_eq!(blocks(), 0);
    assert_eq!(rig.run(write(64 << 10, 64 << 10), &whole), StepResult::Done);
    read_all(&mut rig);
    assert_eq!(blocks(), 128);
    let discard = BlockOp::Discard {
        offset: 64 << 10,
        len: 64 << 10,
    };
    assert_eq!(rig.run(discard, &[]), StepResult::Done);
    read_all(&mut rig);
    assert_eq!(blocks(), 0);
}

/// A file on a ramfs, which does not support fallocate(2). It is unmounted after the test.
struct WithoutHoles(PathBuf);

impl WithoutHoles {
    fn mount(name: &str) -> Option<Self> {
        let name = format!("riser-ramfs-{}-{name}", std::process::id());
        let at = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&at).unwrap();
        let mut mount = Command::new("mount");
        let mount = mount.args(["-t", "ramfs", "none"]).arg(&at).output();
        if !mount.is_ok_and(|output| output.status.success()) {
            std::fs::remove_dir(&at).unwrap();
            skip("a file system without holes", "nothing may be mounted");
            return None;
        }
        Some(Self(at))
    }
}

impl Drop for WithoutHoles {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l"]).arg(&self.0).output();
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// Otherwise, an UNMAP of 24 bytes could write gigabytes that are not covered by a limit.
#[test]
fn discard_without_holes_writes_nothing() {
    let Some(mount) = WithoutHoles::mount("discard") else {
        return;
    };
    let store = Store::open(&spec(file(mount.0.join("disk"), 1 << 20))).unwrap();
    assert_eq!(
        store.geometry().unmap_granularity,
        None,
        "UNMAP is not offered"
    );
    let mut rig = Rig::new(store);
    let memory = Memory::new(8 << 10).unwrap();
    let (data, found) = (memory.slice(0..4096), memory.slice(4096..8192));
    let (data, found) = (data.unwrap(), found.unwrap());
    data.fill(0, 4096, 7);
    let read_back = |rig: &mut Rig| {
        assert_eq!(
            rig.run(read(4096, 4096), std::slice::from_ref(&found)),
            StepResult::Done
        );
        let mut bytes = [1; 4096];
        found.read(0, &mut bytes);
        bytes
    };
    assert_eq!(rig.run(write(4096, 4096), &[data]), StepResult::Done);
    let discard = BlockOp::Discard {
        offset: 0,
        len: 1 << 20,
    };
    // The file system refuses the first one, and this is known for the second one.
    for _ in 0..2 {
        assert_eq!(rig.run(discard, &[]), StepResult::Done);
        assert_eq!(read_back(&mut rig), [7; 4096]);
    }
    let zeroes = BlockOp::WriteZeroes {
        offset: 0,
        len: 1 << 20,
        unmap: true,
        fua: false,
    };
    assert_eq!(rig.run(zeroes, &[]), StepResult::Done);
    assert_eq!(read_back(&mut rig), [0; 4096]);
}

/// WRITE SAME must not report zeroes that were never written.
#[test]
fn refused_hole_is_filled_by_waiting_requests() {
    let Some(mount) = WithoutHoles::mount("waiting") else {
        return;
    };
    let faults = Arc::new(Faults::default());
    let store = Store::open(&Spec {
        faults: Some(faults.clone()),
        ..spec(file(mount.0.join("disk"), 1 << 20))
    });
    let mut rig = Rig::new(store.unwrap());
    let memory = Memory::new(4096).unwrap();
    memory.whole().fill(0, 4096, 7);
    let zeroes = |offset| BlockOp::WriteZeroes {
        offset,
        len: 4096,
        unmap: true,
        fua: false,
    };
    assert_eq!(rig.run(write(0, 4096), &[memory.whole()]), StepResult::Done);
    faults.hold(FaultOn::Write, 0, 4096);
    rig.submit(zeroes(0), &[], 1);
    assert_eq!(rig.run(zeroes(8192), &[]), StepResult::Done);
    faults.release();
    assert_eq!(rig.wait(1)[0].result, StepResult::Done);
    assert_eq!(rig.run(read(0, 4096), &[memory.whole()]), StepResult::Done);
    assert!(memory.whole().to_vec() == [0; 4096]);
}

/// Otherwise, a host could prevent other hosts from reading gigabytes until these are written.
#[test]
fn long_fill_delays_no_read() {
    const SIZE: u64 = 64 << 20;
    let Some(mount) = WithoutHoles::mount("fill") else {
        return;
    };
    let store = Store::open(&spec(file(mount.0.join("disk"), SIZE))).unwrap();
    let mut rig = Rig::new(store);
    let zeroes = BlockOp::WriteZeroes {
        offset: 0,
        len: SIZE,
        unmap: false,
        fua: false,
    };
    let memory = Memory::new(4096).unwrap();
    for round in 0..3 {
        rig.submit(zeroes, &[], 1);
        rig.submit(read(SIZE / 2, 4096), &[memory.whole()], 2);
        let first = rig.wait(1).remove(0);
        assert_eq!((first.user, first.result), (2, StepResult::Done), "{round}");
        assert_eq!(rig.wait(1)[0].result, StepResult::Done);
    }
}

/// A disk keeps responding even if filling it takes minutes.
#[test]
fn long_fill_is_not_reported_as_hanging() {
    const SIZE: u64 = 8 << 20;
    let Some(mount) = WithoutHoles::mount("progress") else {
        return;
    };
    let store = Store::open(&spec(file(mount.0.join("disk"), SIZE))).unwrap();
    let mut rig = Rig::new(store);
    let mut now = Instant::now();
    rig.driver.begin_round(now);
    let zeroes = BlockOp::WriteZeroes {
        offset: 0,
        len: SIZE,
        unmap: false,
        fua: false,
    };
    rig.driver
        .submit(&mut rig.ring, rig.id, command(zeroes), &[], 1)
        .unwrap();
    loop {
        rig.driver.begin_round(now);
        if let Some(done) = rig.driver.poll_done(&mut rig.ring) {
            assert_eq!(done.result, StepResult::Done);
            break;
        }
        rig.ring.park(Some(Duration::from_millis(5))).unwrap();
        rig.ring.reap(&mut rig.completions).unwrap();
        if !rig.completions.is_empty() {
            now += Duration::from_secs(10);
        }
        rig.driver.begin_round(now);
        for c in rig.completions.drain(..) {
            rig.driver.handle_completion(&mut rig.ring, &c);
        }
        let oldest = rig.driver.progress().map(|(_, since)| now - since).max();
        assert!(oldest.is_none_or(|age| age < Duration::from_secs(20)));
    }
}

#[test]
fn read_during_discard_preserves_hole() {
    let Some((dir, store)) = store_in_shared_memory("beside") else {
        return;
    };
    let mut rig = Rig::new(store);
    let m = Memory::new(8 << 10).unwrap();
    let (whole, half) = ([m.whole()], [m.slice(0..4 << 10).unwrap()]);
    assert_eq!(rig.run(write(0, 8 << 10), &whole), StepResult::Done);
    let discard = BlockOp::Discard {
        offset: 4 << 10,
        len: 4 << 10,
    };
    rig.submit(discard, &[], 1);
    // The kernel receives the discard with the next call, after this.
    assert_eq!(rig.run(read(0, 4 << 10), &half), StepResult::Done);
    assert_eq!(rig.wait(1)[0].result, StepResult::Done);
    assert_eq!(rig.run(read(4 << 10, 4 << 10), &half), StepResult::Done);
    let blocks = std::fs::metadata(dir.file("lun")).unwrap().blocks();
    assert_eq!(blocks, 8, "reading has allocated the hole");
}

#[test]
fn discard_creates_reported_holes() {
    for place in places() {
        let dir = Dir::new(&place, "holes");
        let store = Store::open(&spec(file(dir.file("lun"), 8 << 20))).unwrap();
        assert!(store.geometry().unmap_granularity.is_some());
        let mut rig = Rig::new(store);
        let m = Memory::new(1 << 20).unwrap();
        m.fill(0, 1 << 20, 1);
        assert_eq!(
            rig.run(write(1 << 20, 1 << 20), &[m.whole()]),
            StepResult::Done
        );
        let status = |offset| BlockOp::Status {
            offset,
            len: 8 << 20,
        };
        let hole = StepResult::Status {
            allocation: Allocation::Deallocated,
            len: 1 << 20,
        };
        let data = StepResult::Status {
            allocation: Allocation::Mapped,
            len: 1 << 20,
        };
        assert_eq!(rig.run(status(0), &[]), hole);
        assert_eq!(rig.run(status(1 << 20), &[]), data);
        let discard = BlockOp::Discard {
            offset: 1 << 20,
            len: 1 << 20,
        };
        assert_eq!(rig.run(discard, &[]), StepResult::Done);
        assert!(matches!(
            rig.run(status(0), &[]),
            StepResult::Status { allocation: Allocation::Deallocated, len } if len >= 8 << 20
        ));
    }
}

#[test]
fn file_lock_excludes_second_store() {
    let dir = Dir::new(&std::env::temp_dir(), "lock");
    let s = spec(file(dir.file("lun"), 1 << 20));
    let reader = Spec {
        read_only: true,
        source: Source::File {
            path: dir.file("lun"),
            size: None,
            create: false,
        },
        ..s.clone()
    };
    let first = Store::open(&s).unwrap();
    assert!(matches!(Store::open(&s), Err(OpenError::Locked { .. })));
    assert!(matches!(
        Store::open(&reader),
        Err(OpenError::Locked { .. })
    ));
    drop(first);
    let _one = Store::open(&reader).unwrap();
    let _two = Store::open(&reader).unwrap();
    assert!(matches!(Store::open(&s), Err(OpenError::Locked { .. })));
}

/// The thread of a removed backend is not another program.
#[test]
fn lock_error_reports_own_thread() {
    let dir = Dir::new(&std::env::temp_dir(), "own-lock");
    let spec = spec(file(dir.file("lun"), 1 << 20));
    let store = Store::open(&spec).unwrap();
    let error = || open_in_time(&spec, true).unwrap_err().to_string();
    assert!(error().contains("another backend or another program"));
    let entry = store.list_thread();
    let expected = "is in use: a thread of riserd is still accessing it";
    assert!(error().ends_with(expected), "{}", error());
    drop(entry);
}

/// As after a kill, because the kernel closes the files of a ring some time after the process has
/// exited.
fn a_store_is_waited_for(s: &Spec) {
    let first = Store::open(s).unwrap();
    let holder = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(1));
        drop(first);
    });
    Store::open(s).unwrap();
    holder.join().unwrap();
}

#[test]
fn open_waits_for_previous_file_holder() {
    let dir = Dir::new(&std::env::temp_dir(), "wait");
    a_store_is_waited_for(&spec(file(dir.file("lun"), 1 << 20)));
}

#[test]
fn open_waits_for_previous_device_holder() {
    let dir = Dir::new(&std::env::temp_dir(), "wait-device");
    let path = dir.file("disk");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    match Loop::new(&path) {
        Ok(device) => a_store_is_waited_for(&spec(Source::Device {
            path: device.0.clone(),
        })),
        Err(why) => skip("waiting for a block device", &why),
    }
}

#[test]
fn reopen_check_reports_missing_or_changed_file() {
    let dir = Dir::new(&std::env::temp_dir(), "reopen");
    let path = dir.file("lun");
    let with = |size, create| {
        spec(Source::File {
            path: path.clone(),
            size: Some(size),
            create,
        })
    };
    let (small, large) = (with(4096, true), with(8192, true));
    let store = Store::open(&small).unwrap();
    store.check_reopen(&small).unwrap();
    // A restart would extend it, but never truncate it.
    store.check_reopen(&large).unwrap();
    // The flush at shutdown would fail.
    store.on_flush_failed(libc::EIO, Instant::now());
    assert!(matches!(
        store.check_reopen(&small),
        Err(OpenError::FlushFailed(_))
    ));
    assert!(store.clear_flush_failure().is_some());
    store.check_reopen(&small).unwrap();
    assert!(matches!(
        store.check_reopen(&with(8192, false)),
        Err(OpenError::Size { .. })
    ));
    File::options()
        .write(true)
        .open(&path)
        .and_then(|file| file.set_len(8192))
        .unwrap();
    // A file that was extended manually is served as it is.
    store.check_reopen(&small).unwrap();
    std::fs::rename(&path, dir.file("elsewhere")).unwrap();
    assert!(matches!(
        store.check_reopen(&large),
        Err(OpenError::Io { .. })
    ));
    File::create(&path).unwrap();
    let error = store.check_reopen(&large).unwrap_err();
    assert!(matches!(error, OpenError::Moved { .. }), "{error}");
}

#[test]
fn created_image_is_private() {
    use std::os::unix::fs::PermissionsExt;
    let dir = Dir::new(&std::env::temp_dir(), "mode");
    let path = dir.file("image");
    drop(Store::open(&spec(file(path.clone(), 4096))).unwrap());
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o077, 0, "{mode:o}");
}

#[test]
fn ram_disk_larger_than_memory_is_noted() {
    let notes = |size| {
        Store::open(&spec(Source::Ram { size }))
            .unwrap()
            .notes()
            .to_vec()
    };
    assert_eq!(notes(1 << 20), [] as [String; 0]);
    let large = notes(1 << 50);
    assert!(
        large[0].starts_with("RAM disk of 1.0 PiB exceeds the memory of the host, "),
        "{large:?}"
    );
}

#[test]
fn open_error_explains_reason() {
    let dir = Dir::new(&std::env::temp_dir(), "open");
    let path = dir.file("lun");
    let open = |source| Store::open(&spec(source)).unwrap_err();
    let plain = |size, create| Source::File {
        path: path.clone(),
        size,
        create,
    };
    let text = open(plain(None, false)).to_string();
    assert!(text.contains("lun: cannot open it for writing"), "{text}");
    assert!(
        text.ends_with("`create: true` and a `size` create a file"),
        "{text}"
    );
    let text = open(Source::File {
        path: dir.file("images/lun"),
        size: Some(4096),
        create: true,
    });
    let (text, images) = (text.to_string(), dir.file("images"));
    let remedy = format!(
        "directory {0} does not exist: create it with `mkdir -p {0}`",
        images.display()
    );
    assert!(text.contains(&remedy), "{text}");
    File::create(&path).unwrap().write_all(&[1; 700]).unwrap();
    assert!(matches!(
        open(plain(Some(4096), false)),
        OpenError::Size {
            actual: 700,
            wanted: 4096,
            ..
        }
    ));
    let store = Store::open(&spec(plain(Some(512), true))).unwrap();
    assert_eq!(store.capacity(), 512);
    drop(store);
    let store = Store::open(&spec(plain(None, false))).unwrap();
    assert_eq!(store.capacity(), 512);
    assert_eq!(
        store.notes(),
        ["700 bytes are not a multiple of the block size, 512 bytes: the last 188 are not served"]
    );
    drop(store);
    File::create(&path).unwrap();
    assert!(matches!(
        open(plain(None, false)),
        OpenError::Empty { size: 0, .. }
    ));
    assert!(matches!(
        open(Source::File {
            path: dir.0.clone(),
            size: None,
            create: false
        }),
        OpenError::Io { .. } | OpenError::Kind { .. }
    ));
    assert!(matches!(
        open(Source::Device { path: path.clone() }),
        OpenError::Kind { .. }
    ));
    assert!(matches!(
        Store::open(&Spec {
            block_size: 1024,
            ..spec(Source::Null { size: 4096 })
        }),
        Err(OpenError::BlockSize(1024))
    ));
}

#[test]
fn unsupported_direct_on_is_refused_with_reason() {
    for place in places() {
        let dir = Dir::new(&place, "direct");
        for block_size in [512, 4096] {
            let at = |direct| Spec {
                direct,
                block_size,
                ..spec(file(dir.file("lun"), 1 << 20))
            };
            let auto = Store::open(&at(Direct::Auto)).unwrap().geometry().direct;
            assert!(!Store::open(&at(Direct::Off)).unwrap().geometry().direct);
            match Store::open(&at(Direct::On)) {
                Ok(store) => assert!(auto && store.geometry().direct),
                Err(OpenError::Direct { reason, .. }) => assert!(!auto && !reason.is_empty()),
                Err(e) => panic!("{e}"),
            }
        }
    }
}

#[test]
fn shrunk_file_causes_medium_error_and_resize() {
    let dir = Dir::new(&std::env::temp_dir(), "shrink");
    let path = dir.file("lun");
    let store = Store::open(&spec(file(path.clone(), 1 << 20))).unwrap();
    let mut rig = Rig::new(store.clone());
    assert_eq!(store.measure().unwrap(), None);
    File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(4096)
        .unwrap();
    let m = Memory::new(8192).unwrap();
    assert_eq!(
        rig.run(read(0, 8192), &[m.whole()]),
        StepResult::Failed(BackendError::Medium { offset: Some(4096) })
    );
    let resized = Resized {
        from: 1 << 20,
        to: 4096,
    };
    assert_eq!(store.measure().unwrap(), Some(resized));
    assert_eq!(store.geometry().capacity, 1 << 20);
    store.set_capacity(resized.to);
    assert_eq!(store.geometry().capacity, 4096);
}

#[test]
fn host_errors_are_mapped_for_unit() {
    // Writes to a file that is opened read-only are refused by the kernel.
    let dir = Dir::new(&std::env::temp_dir(), "errors");
    let path = dir.file("lun");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let read_only = Store::open(&Spec {
        read_only: true,
        source: Source::File {
            path,
            size: None,
            create: false,
        },
        ..spec(Source::Null { size: 1 })
    })
    .unwrap();
    assert!(read_only.geometry().read_only);
    let mut rig = Rig::new(read_only);
    let m = Memory::new(4096).unwrap();
    let refused = StepResult::Failed(BackendError::ReadOnly);
    assert_eq!(rig.run(write(0, 4096), &[m.whole()]), refused);
    assert_eq!(
        rig.run(
            BlockOp::Discard {
                offset: 0,
                len: 4096
            },
            &[]
        ),
        refused
    );
    assert_eq!(rig.run(read(0, 4096), &[m.whole()]), StepResult::Done);
}

#[test]
fn null_backend_ignores_writes_and_reads_zeroes() {
    let mut rig = Rig::new(Store::open(&spec(Source::Null { size: 1 << 40 })).unwrap());
    let m = Memory::new(4096).unwrap();
    m.fill(0, 4096, 9);
    assert_eq!(
        rig.run(write(1 << 30, 4096), &[m.whole()]),
        StepResult::Done
    );
    assert_eq!(rig.run(read(1 << 30, 4096), &[m.whole()]), StepResult::Done);
    assert!(m.whole().to_vec().iter().all(|&b| b == 0));
}

#[test]
fn workers_share_ram_disk() {
    let store = Store::open(&spec(Source::Ram { size: 1 << 30 })).unwrap();
    let threads: Vec<_> = (0..4u64)
        .map(|t| {
            let store = store.clone();
            std::thread::spawn(move || {
                let mut rig = Rig::new(store);
                let m = Memory::new(4096).unwrap();
                m.fill(0, 4096, t as u8 + 1);
                for i in 0..100 {
                    rig.run(write((i * 4 + t) * 4096, 4096), &[m.whole()]);
                }
            })
        })
        .collect();
    for t in threads {
        t.join().unwrap();
    }
    let mut rig = Rig::new(store);
    let m = Memory::new(4096).unwrap();
    for i in 0..400 {
        rig.run(read(i * 4096, 4096), &[m.whole()]);
        assert!(
            m.whole()
                .to_vec()
                .iter()
                .all(|&b| u64::from(b) == i % 4 + 1)
        );
    }
}

#[test]
fn injected_faults_fail_delay_and_pass() {
    let faults = Arc::new(Faults::default());
    let store = Store::open(&Spec {
        faults: Some(faults.clone()),
        ..spec(Source::Ram { size: 1 << 20 })
    })
    .unwrap();
    let mut rig = Rig::new(store);
    let fault = |delay, error| Fault {
        on: FaultOn::Write,
        offset: 0,
        len: 4096,
        times: Some(1),
        delay: Duration::from_millis(delay),
        error,
    };
    let m = Memory::new(4096).unwrap();
    faults.set(vec![fault(0, Some(BackendError::NoSpace)), fault(30, None)]);
    assert_eq!(
        rig.run(write(0, 4096), &[m.whole()]),
        StepResult::Failed(BackendError::NoSpace)
    );
    let before = Instant::now();
    rig.submit(write(0, 4096), &[m.whole()], 1);
    assert!(rig.driver.poll_deadline().is_some());
    assert_eq!(rig.wait(1)[0].result, StepResult::Done);
    assert!(before.elapsed() >= Duration::from_millis(30));
    assert_eq!(rig.driver.poll_deadline(), None);

    faults.set(vec![fault(60_000, None)]);
    rig.submit(write(0, 4096), &[m.whole()], 5);
    rig.driver.cancel(&mut rig.ring, 5);
    assert_eq!(
        rig.wait(1)[0],
        Done {
            user: 5,
            result: StepResult::Failed(BackendError::Aborted)
        }
    );
}

#[test]
fn held_request_ignores_cancel_until_release() {
    let faults = Arc::new(Faults::default());
    let store = Store::open(&Spec {
        faults: Some(faults.clone()),
        ..spec(Source::Ram { size: 1 << 20 })
    })
    .unwrap();
    let mut rig = Rig::new(store);
    let m = Memory::new(4096).unwrap();
    m.whole().fill(0, 4096, 7);
    faults.hold(FaultOn::Write, 4096, 1);
    rig.submit(write(0, 4096), &[m.whole()], 1);
    assert_eq!(rig.wait(1)[0].user, 1, "another range");
    rig.submit(write(4096, 4096), &[m.whole()], 2);
    rig.driver.cancel(&mut rig.ring, 2);
    assert!(rig.driver.poll_deadline().is_some());
    let read_back = Memory::new(4096).unwrap();
    rig.submit(read(4096, 4096), &[read_back.whole()], 3);
    assert_eq!(rig.wait(1)[0].user, 3);
    assert_eq!(read_back.whole().to_vec(), [0; 4096]);
    faults.release();
    let done = rig.wait(1)[0];
    assert_eq!((done.user, done.result), (2, StepResult::Done));
    assert_eq!(rig.driver.poll_deadline(), None);
    rig.submit(read(4096, 4096), &[read_back.whole()], 4);
    rig.wait(1);
    assert_eq!(read_back.whole().to_vec(), [7; 4096]);
}

/// If the kernel transfers less than requested, the remaining data is requested again.
#[test]
fn short_transfers_are_resumed() {
    let dir = Dir::new(&std::env::temp_dir(), "short");
    let faults = Arc::new(Faults::default());
    let store = Store::open(&Spec {
        faults: Some(faults.clone()),
        ..spec(file(dir.file("lun"), 1 << 20))
    })
    .unwrap();
    let mut rig = Rig::new(store);
    let m = Memory::new(64 << 10).unwrap();
    let bytes: Vec<u8> = (0..64 << 10).map(|i: u32| (i / 97) as u8).collect();
    m.whole().write(0, &bytes);
    for most in [4096, 12 << 10, 0] {
        faults.shorten(most);
        let at = most as u64 * 16;
        rig.run(write(at, 64 << 10), &[m.whole()]);
        let read_back = Memory::new(64 << 10).unwrap();
        rig.run(read(at, 64 << 10), &[read_back.whole()]);
        assert!(read_back.whole().to_vec() == bytes, "{most}");
    }
}

#[test]
fn canceled_requests_complete_without_leaks() {
    let dir = Dir::new(&std::env::temp_dir(), "cancel");
    let store = Store::open(&Spec {
        block_size: 4096,
        ..spec(file(dir.file("lun"), 64 << 20))
    })
    .unwrap();
    let ring = RingConfig {
        capacity: 8,
        ..RingConfig::default()
    };
    let mut rig = Rig::with(store, ring, DriverConfig::default());
    for round in 0..20u64 {
        for i in 0..32u64 {
            // Each request has separate memory, without any other references.
            let m = Memory::new(256 << 10).unwrap();
            let data = [m.slice(i as usize..(i as usize) + (128 << 10)).unwrap()];
            rig.submit(write(i * (128 << 10), 128 << 10), &data, i);
            if i % 3 == round % 3 {
                rig.submit(
                    BlockOp::Flush {
                        offset: 0,
                        len: 64 << 20,
                    },
                    &[],
                    i,
                );
            }
        }
        for i in 0..32 {
            rig.driver.cancel(&mut rig.ring, i);
        }
        let n = rig.driver.in_flight();
        for done in rig.wait(n) {
            assert!(matches!(
                done.result,
                StepResult::Done | StepResult::Failed(BackendError::Aborted)
            ));
        }
        assert_eq!((rig.driver.in_flight(), rig.ring.in_flight()), (0, 0));
    }
}

/// Returns the number of open descriptors and memory mappings of this process.
fn footprint() -> (usize, usize) {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (fds, maps.lines().count())
}

#[test]
fn opening_and_dropping_leaks_nothing() {
    const NAME: &str = "backend::tests::opening_and_dropping_leaks_nothing";
    // Use a separate process, because other tests open and close files concurrently.
    if std::env::var_os("RISER_BACKEND_CHILD").is_none() {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", NAME, "--test-threads", "1"])
            .env("RISER_BACKEND_CHILD", "1")
            .output()
            .unwrap();
        assert!(
            child.status.success(),
            "{}",
            String::from_utf8_lossy(&child.stdout)
        );
        return;
    }
    let dir = Dir::new(&std::env::temp_dir(), "leak");
    let round = || {
        let store = Store::open(&spec(file(dir.file("lun"), 1 << 20))).unwrap();
        let mut rig = Rig::new(store);
        let m = Memory::new(1 << 20).unwrap();
        rig.run(
            BlockOp::Status {
                offset: 0,
                len: 4096,
            },
            &[],
        );
        for i in 0..16 {
            rig.submit(write(i * 65536, 65536), &[m.whole()], i);
        }
        rig.ring.submit().unwrap();
    };
    round();
    // The kernel may not have closed all resources of a single round, but this is less than forty
    // rounds would leak.
    let before = footprint();
    for _ in 0..40 {
        round();
    }
    // The kernel closes the files of a ring shortly after its last reference is dropped.
    eventually(
        "all is closed and unmapped",
        Duration::from_secs(60),
        || {
            let after = footprint();
            after.0 <= before.0 && after.1 <= before.1 + 8
        },
    );
}

/// Runs a command. Returns its output, or the reason for a failure.
fn tool(name: &str, args: &[&str]) -> Result<String, String> {
    let out = std::process::Command::new(name)
        .args(args)
        .output()
        .map_err(|e| format!("{name}: {e}"))?;
    match out.status.success() {
        true => Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned()),
        false => Err(String::from_utf8_lossy(&out.stderr).trim().to_owned()),
    }
}

/// A loop device for a file, removed after the test.
struct Loop(PathBuf);

impl Loop {
    fn new(file: &Path) -> Result<Self, String> {
        let path = tool("losetup", &["--find", "--show", file.to_str().unwrap()])?;
        Ok(Self(path.into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = tool("losetup", &["--detach", self.0.to_str().unwrap()]);
    }
}

#[test]
fn block_device_behaves_like_array() {
    let dir = Dir::new(&std::env::temp_dir(), "device");
    let path = dir.file("disk");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let device = match Loop::new(&path) {
        Ok(device) => device,
        Err(why) => return skip("a block device as a backend", &why),
    };
    let at = |block_size, direct| Spec {
        block_size,
        direct,
        ..spec(Source::Device {
            path: device.0.clone(),
        })
    };
    for (block_size, direct) in [
        (512, Direct::Auto),
        (4096, Direct::Auto),
        (512, Direct::Off),
    ] {
        let store = Store::open(&at(block_size, direct)).unwrap();
        let g = store.geometry();
        assert_eq!((g.capacity, g.block_size), (1 << 20, block_size));
        assert!(g.unmap_granularity.is_some(), "a loop device can discard");
        assert!(matches!(
            Store::open(&at(512, direct)),
            Err(OpenError::Locked { .. })
        ));
        let mut rig = Rig::new(store.clone());
        let m = Memory::new(65536).unwrap();
        m.fill(0, 65536, 0x77);
        assert_eq!(rig.run(write(8192, 65536), &[m.whole()]), StepResult::Done);
        let discard = BlockOp::Discard {
            offset: 16384,
            len: 4096,
        };
        assert_eq!(rig.run(discard, &[]), StepResult::Done);
        for unmap in [false, true] {
            let zero = BlockOp::WriteZeroes {
                offset: if unmap { 32768 } else { 24576 },
                len: 4096,
                unmap,
                fua: true,
            };
            assert_eq!(rig.run(zero, &[]), StepResult::Done);
        }
        let flush = BlockOp::Flush {
            offset: 0,
            len: 1 << 20,
        };
        assert_eq!(rig.run(flush, &[]), StepResult::Done);
        assert_eq!(rig.run(read(8192, 65536), &[m.whole()]), StepResult::Done);
        for (i, block) in m.whole().to_vec().chunks(4096).enumerate() {
            let zero = [8192 + 8192, 24576, 32768].contains(&(8192 + i * 4096));
            let expected = if zero { 0 } else { 0x77 };
            assert!(block.iter().all(|&b| b == expected), "block {i}");
        }
        let status = BlockOp::Status {
            offset: 0,
            len: 1 << 20,
        };
        assert_eq!(
            rig.run(status, &[]),
            StepResult::Status {
                allocation: Allocation::Mapped,
                len: 1 << 20
            }
        );
        assert_eq!(store.measure().unwrap(), None);
    }
}

/// A mounted tmpfs, removed after the test.
struct Mount(PathBuf);

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = tool("umount", &["--lazy", self.0.to_str().unwrap()]);
    }
}

#[test]
fn full_file_system_reports_no_space() {
    let dir = Dir::new(&std::env::temp_dir(), "full");
    let at = dir.file("mnt");
    std::fs::create_dir(&at).unwrap();
    let options = [
        "-t",
        "tmpfs",
        "-o",
        "size=64k",
        "none",
        at.to_str().unwrap(),
    ];
    if let Err(why) = tool("mount", &options) {
        return skip("a backend on a full file system", &why);
    }
    let mount = Mount(at.clone());
    {
        let store = Store::open(&spec(file(at.join("lun"), 1 << 20))).unwrap();
        let mut rig = Rig::new(store);
        let m = Memory::new(256 << 10).unwrap();
        m.fill(0, 256 << 10, 1);
        // The kernel accepts as much data as possible, and refuses the remaining part of the write.
        assert_eq!(
            rig.run(write(0, 256 << 10), &[m.whole()]),
            StepResult::Failed(BackendError::NoSpace)
        );
        // Reading areas that were never written still works.
        assert_eq!(
            rig.run(read(512 << 10, 4096), &[m.whole()]),
            StepResult::Done
        );
    }
    drop(mount);
}

/// A unit with small blocks on a device with large blocks: zeroing includes every block, but a
/// discard only includes whole device blocks.
#[test]
fn small_zeroes_and_discards_on_large_blocks() {
    let dir = Dir::new(&std::env::temp_dir(), "large");
    let path = dir.file("disk");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let file = path.to_str().unwrap();
    let args = ["--find", "--show", "--sector-size", "4096", file];
    let device = match tool("losetup", &args) {
        Ok(device) => Loop(device.into()),
        Err(why) => return skip("a device of large blocks", &why),
    };
    let source = Source::Device {
        path: device.0.clone(),
    };
    let store = Store::open(&spec(source)).unwrap();
    assert!(!store.geometry().direct);
    let mut rig = Rig::new(store);
    const LEN: usize = 16 << 10;
    let data = Memory::new(LEN).unwrap();
    let mut expected = vec![0; LEN];
    let ranges = [(512, 512), (3584, 1024), (3584, 9216), (4096, 4096)];
    for (offset, len) in ranges {
        for unmap in [false, true] {
            data.fill(0, LEN, 0x77);
            let written = rig.run(write(0, LEN as u32), &[data.whole()]);
            assert_eq!(written, StepResult::Done);
            expected.fill(0x77);
            expected[offset..offset + len].fill(0);
            let zero = BlockOp::WriteZeroes {
                offset: offset as u64,
                len: len as u64,
                unmap,
                fua: true,
            };
            assert_eq!(rig.run(zero, &[]), StepResult::Done);
            assert_eq!(
                read_back(&mut rig, LEN),
                expected,
                "{offset}+{len}, {unmap}"
            );
        }
        data.fill(0, LEN, 0x77);
        rig.run(write(0, LEN as u32), &[data.whole()]);
        let discard = BlockOp::Discard {
            offset: offset as u64,
            len: len as u64,
        };
        assert_eq!(rig.run(discard, &[]), StepResult::Done);
        expected.fill(0x77);
        let (first, last) = (offset.next_multiple_of(4096), (offset + len) / 4096 * 4096);
        if first < last {
            expected[first..last].fill(0);
        }
        assert_eq!(read_back(&mut rig, LEN), expected, "discard {offset}+{len}");
    }
}

fn read_back(rig: &mut Rig, len: usize) -> Vec<u8> {
    let memory = Memory::new(len).unwrap();
    let read = BlockOp::Read {
        offset: 0,
        len: len as u32,
        buffer_offset: 0,
        tags: None,
        fua: false,
    };
    assert_eq!(rig.run(read, &[memory.whole()]), StepResult::Done);
    let mut bytes = vec![0; len];
    memory.whole().read(0, &mut bytes);
    bytes
}

#[test]
fn hanging_store_leaves_room_for_others() {
    let ram = || spec(Source::Ram { size: 1 << 20 });
    let faults = Arc::new(Faults::default());
    let hung = Store::open(&Spec {
        faults: Some(faults.clone()),
        ..ram()
    });
    let config = DriverConfig {
        depth: 16,
        ..DriverConfig::default()
    };
    let mut rig = Rig::with(hung.unwrap(), RingConfig::default(), config);
    let other = rig
        .driver
        .attach(&mut rig.ring, Store::open(&ram()).unwrap());
    faults.set(vec![Fault {
        on: FaultOn::Write,
        offset: 0,
        len: 1 << 20,
        times: None,
        delay: Duration::from_secs(3600),
        error: None,
    }]);
    let m = Memory::new(4096).unwrap();
    let submit = |rig: &mut Rig, store, user| {
        let op = command(write(0, 4096));
        let data = [m.whole()];
        rig.driver
            .submit(&mut rig.ring, store, op, &data, user)
            .is_ok()
    };
    let id = rig.id;
    let hanging = (0..).take_while(|&user| submit(&mut rig, id, user)).count() as u64;
    assert_eq!(hanging, 8);
    for round in 0..3 {
        assert!((0..4).all(|i| submit(&mut rig, other, 100 + 10 * round + i)));
        assert_eq!(rig.wait(4).len(), 4);
    }
    for user in 0..hanging {
        rig.driver.cancel(&mut rig.ring, user);
    }
    assert_eq!(rig.wait(8).len(), 8);
    assert!(submit(&mut rig, id, 99), "its requests have ended");
    rig.driver.cancel(&mut rig.ring, 99);
    rig.wait(1);
}

/// A block device with a file on a full file system, so data written to the page cache is lost in a
/// flush. Fields are dropped in order of their dependencies.
struct FullDevice {
    store: Arc<Store>,
    device: Loop,
    _mount: Mount,
    _dir: Dir,
}

impl FullDevice {
    fn new(name: &str) -> Result<Self, String> {
        let dir = Dir::new(&std::env::temp_dir(), name);
        let at = dir.file("mnt");
        std::fs::create_dir(&at).unwrap();
        let options = ["-t", "tmpfs", "-o", "size=2m", "none", at.to_str().unwrap()];
        tool("mount", &options)?;
        let mount = Mount(at.clone());
        let path = at.join("disk");
        File::create(&path).unwrap().set_len(16 << 20).unwrap();
        let device = Loop::new(&path)?;
        let mut filler = File::create(at.join("filler")).unwrap();
        while filler.write_all(&[1; 4096]).is_ok() {}
        let source = Source::Device {
            path: device.0.clone(),
        };
        let store = Store::open(&Spec {
            direct: Direct::Off,
            ..spec(source)
        });
        Ok(Self {
            store: store.unwrap(),
            device,
            _mount: mount,
            _dir: dir,
        })
    }
}

const FLUSH: BlockOp = BlockOp::Flush {
    offset: 0,
    len: 16 << 20,
};

#[test]
fn failed_flush_is_remembered() {
    let full = match FullDevice::new("flush") {
        Ok(full) => full,
        Err(why) => return skip("a device that fails", &why),
    };
    let store = &full.store;
    let mut rig = Rig::new(store.clone());
    let m = Memory::new(4096).unwrap();
    m.fill(0, 4096, 0xaa);
    // Two initiators write and receive GOOD, because the write cache is enabled.
    for at in [0, 8 << 20] {
        assert_eq!(rig.run(write(at, 4096), &[m.whole()]), StepResult::Done);
    }
    // First one initiator flushes, then the other one, which has also lost its data.
    for _ in 0..2 {
        assert!(matches!(rig.run(FLUSH, &[]), StepResult::Failed(_)));
    }
    let failure = store.flush_failure().unwrap();
    assert!(
        matches!(failure.errno, libc::EIO | libc::ENOSPC),
        "{failure:?}"
    );
    // This also applies to a worker that attaches the backend later.
    let mut later = Rig::new(store.clone());
    assert!(matches!(later.run(FLUSH, &[]), StepResult::Failed(_)));
    // Until cleared by an administrator.
    assert_eq!(store.clear_flush_failure(), Some(failure));
    assert_eq!(rig.run(FLUSH, &[]), StepResult::Done);
}

#[test]
fn workers_receive_flush_errors_independently() {
    let full = match FullDevice::new("flushes") {
        Ok(full) => full,
        Err(why) => return skip("a device that fails, for two workers", &why),
    };
    let store = &full.store;
    let (mut one, mut other) = (Rig::new(store.clone()), Rig::new(store.clone()));
    let open = || File::open(&full.device.0).unwrap();
    let before = open();
    let m = Memory::new(4096).unwrap();
    m.fill(0, 4096, 0xaa);
    assert_eq!(one.run(write(0, 4096), &[m.whole()]), StepResult::Done);
    // Concurrent flushes use a single call, and all of them fail.
    for user in 0..8 {
        one.submit(FLUSH, &[], user);
    }
    let done = one.wait(8);
    assert!(
        done.iter()
            .all(|d| matches!(d.result, StepResult::Failed(_))),
        "{done:?}"
    );
    // The kernel reports the error to other descriptors as well, but not to a descriptor opened
    // after this.
    let after = open();
    assert!(before.sync_data().is_err());
    after.sync_data().unwrap();
    // After it was cleared, no worker reports the failure again.
    assert!(store.clear_flush_failure().is_some());
    assert_eq!(other.run(FLUSH, &[]), StepResult::Done);
    assert_eq!(store.flush_failure(), None);
    // Data lost after this is reported.
    assert_eq!(one.run(write(8192, 4096), &[m.whole()]), StepResult::Done);
    assert!(matches!(other.run(FLUSH, &[]), StepResult::Failed(_)));
}

/// A write with FUA syncs its descriptor, so it may receive the only report of data lost by other
/// writes.
#[test]
fn durable_write_error_may_reveal_lost_data() {
    let now = Instant::now();
    let disk = Disk::new(16 << 20);
    let host = Arc::new(SimulatedHost::new(simulated::Threads::default(), now));
    let source = file("/in/memory".into(), 16 << 20);
    let store = Store::on_disk(&spec(source), &disk, host).unwrap();
    let (mut ring, kernel) = Ring::simulated(RingConfig::default()).unwrap();
    let mut driver = Driver::new(ring.waker(), &mut ring, now, DriverConfig::default()).unwrap();
    let id = driver.attach(&mut ring, store.clone());
    let m = Memory::new(4096).unwrap();
    // Executes a write. The first ring operation has this outcome, and all others succeed.
    let mut run = |op, outcome| {
        driver
            .submit(&mut ring, id, command(op), &[m.whole()], 1)
            .unwrap();
        let mut outcomes = std::iter::once(outcome).chain(std::iter::repeat(Outcome::Whole));
        let mut completions = Vec::new();
        loop {
            if let Some(done) = driver.poll_done(&mut ring) {
                return done.result;
            }
            ring.submit().unwrap();
            for operation in kernel.operations() {
                kernel.complete(operation.id, outcomes.next().unwrap());
            }
            ring.reap(&mut completions).unwrap();
            for completion in completions.drain(..) {
                driver.handle_completion(&mut ring, &completion);
            }
        }
    };
    let durable = BlockOp::Write {
        offset: 8 << 20,
        len: 4096,
        buffer_offset: 0,
        tags: None,
        fua: true,
    };
    assert_eq!(run(write(0, 4096), Outcome::Whole), StepResult::Done);
    // If a block can't be written, this only affects its own write.
    let failed = run(durable, Outcome::Failed(libc::EIO));
    assert!(matches!(failed, StepResult::Failed(_)), "{failed:?}");
    assert_eq!(store.flush_failure(), None);
    assert_eq!(run(write(0, 4096), Outcome::Whole), StepResult::Done);
    disk.fail_write_back(libc::EIO, |_| true);
    let failed = run(durable, Outcome::Whole);
    assert!(matches!(failed, StepResult::Failed(_)), "{failed:?}");
    assert_eq!(store.flush_failure().unwrap().errno, libc::EIO);
    // From this point, such a write is checked individually.
    assert_eq!(run(durable, Outcome::Whole), StepResult::Done);
    // The same applies after an administrator has cleared the failure, without a flush in between.
    // A descriptor opened after the report would not return the error again.
    store.clear_flush_failure().unwrap();
    assert_eq!(run(write(0, 4096), Outcome::Whole), StepResult::Done);
    disk.fail_write_back(libc::EIO, |_| true);
    let failed = run(durable, Outcome::Whole);
    assert!(matches!(failed, StepResult::Failed(_)), "{failed:?}");
    assert!(store.flush_failure().is_some(), "the writer alone knows");
}

/// The same applies to a worker that cannot open a descriptor for flushes. It uses the descriptor
/// for writes, which has already reported the loss.
#[test]
fn loss_is_detected_with_single_descriptor() {
    let (store, disk) = store_in_memory();
    disk.refuse(true);
    let mut one = InMemory::new(&store);
    assert_eq!(one.run(&[write(0, 4096)]), [StepResult::Done]);
    disk.fail_write_back(libc::EIO, |_| true);
    let failed = one.run(&[DURABLE]);
    assert!(matches!(failed[..], [StepResult::Failed(_)]), "{failed:?}");
    assert!(store.flush_failure().is_some(), "the writer alone knows");
    // Another descriptor is opened as soon as possible.
    disk.refuse(false);
    store.clear_flush_failure().unwrap();
    assert_eq!(one.run(&[write(0, 4096)]), [StepResult::Done]);
    assert_eq!(one.run(&[FLUSH]), [StepResult::Done]);
    let outcome = one.run_with(&[DURABLE], Outcome::Failed(libc::EIO));
    assert!(
        matches!(outcome[..], [StepResult::Failed(_)]),
        "{outcome:?}"
    );
    assert_eq!(
        store.flush_failure(),
        None,
        "a block that cannot be written"
    );
}

/// With any overlap of durable writes, a failure cleared by an administrator is not reported again.
#[test]
fn cleared_failure_ends_despite_durable_writes() {
    let (store, disk) = store_in_memory();
    let (mut one, mut other) = (InMemory::new(&store), InMemory::new(&store));
    assert_eq!(one.run(&[write(0, 4096)]), [StepResult::Done]);
    disk.fail_write_back(libc::EIO, |_| true);
    let failed = other.run(&[FLUSH]);
    assert!(matches!(failed[..], [StepResult::Failed(_)]), "{failed:?}");
    // The descriptor for writes reports the error as well.
    let failed = one.run(&[DURABLE]);
    assert!(matches!(failed[..], [StepResult::Failed(_)]), "{failed:?}");
    one.submit(DURABLE);
    store.clear_flush_failure().unwrap();
    assert_eq!(one.run(&[DURABLE, FLUSH]), [StepResult::Done; 3]);
    assert_eq!(store.flush_failure(), None);
    // An active write may have received an error that isn't reported to the new descriptor.
    one.submit(DURABLE);
    store.on_flush_failed(libc::EIO, one.now);
    store.clear_flush_failure().unwrap();
    let failed = one.run_with(&[FLUSH], Outcome::Failed(libc::EIO));
    assert!(
        failed.iter().any(|r| matches!(r, StepResult::Failed(_))),
        "{failed:?}"
    );
    assert!(store.flush_failure().is_some());
}

/// An error that is checked by another worker isn't reported to a descriptor opened in the meantime.
#[test]
fn renewed_descriptor_fails_during_error_check() {
    let (store, disk) = store_in_memory();
    let (mut one, mut other) = (InMemory::new(&store), InMemory::new(&store));
    store.on_flush_failed(libc::EIO, one.now);
    store.clear_flush_failure().unwrap();
    assert_eq!(other.run(&[FLUSH]), [StepResult::Done]);
    assert_eq!(one.run(&[write(0, 4096)]), [StepResult::Done]);
    disk.fail_write_back(libc::EIO, |_| true);
    other.submit(DURABLE);
    other.complete_operations(|| Outcome::Whole);
    assert_eq!(store.flush_failure(), None, "it is not known yet");
    let failed = one.run(&[FLUSH]);
    assert!(matches!(failed[..], [StepResult::Failed(_)]), "{failed:?}");
    let failed = InMemory::new(&store).run(&[FLUSH]);
    assert!(matches!(failed[..], [StepResult::Failed(_)]), "{failed:?}");
    drop(other.run(&[]));
    assert!(store.flush_failure().is_some());
    // This does not affect descriptors opened after the check.
    store.clear_flush_failure().unwrap();
    assert_eq!(one.run(&[FLUSH]), [StepResult::Done]);
    assert_eq!(other.run(&[FLUSH]), [StepResult::Done]);
}

/// The same applies to a worker that attaches the backend in the meantime.
#[test]
fn new_worker_fails_during_error_check() {
    let (store, disk) = store_in_memory();
    let mut other = InMemory::new(&store);
    assert_eq!(other.run(&[write(0, 4096)]), [StepResult::Done]);
    disk.fail_write_back(libc::EIO, |_| true);
    other.submit(DURABLE);
    other.complete_operations(|| Outcome::Whole);
    let failed = InMemory::new(&store).run(&[FLUSH]);
    assert!(matches!(failed[..], [StepResult::Failed(_)]), "{failed:?}");
    drop(other.run(&[]));
}

/// The previous store of a unit may be hanging.
#[test]
fn error_check_affects_only_its_store() {
    let failures: Arc<super::FlushFailures> = Arc::default();
    let [(gone, _), (back, _)] = [store_in_memory(), store_in_memory()];
    for store in [&gone, &back] {
        store.share_flush_failures(failures.clone());
    }
    let mut one = InMemory::new(&gone);
    one.submit(DURABLE);
    one.complete_operations(|| Outcome::Failed(libc::EIO));
    let mut other = InMemory::new(&back);
    assert_eq!(other.run(&[FLUSH]), [StepResult::Done]);
    assert_eq!(back.flush_failure(), None);
}

const DURABLE: BlockOp = BlockOp::Write {
    offset: 8 << 20,
    len: 4096,
    buffer_offset: 0,
    tags: None,
    fua: true,
};

fn store_in_memory() -> (Arc<Store>, Disk) {
    store_with(Direct::Auto)
}

fn store_with(direct: Direct) -> (Arc<Store>, Disk) {
    store_of(Spec {
        direct,
        ..spec(file("/in/memory".into(), 16 << 20))
    })
}

fn store_of(spec: Spec) -> (Arc<Store>, Disk) {
    let disk = Disk::new(16 << 20);
    let host = SimulatedHost::new(simulated::Threads::default(), Instant::now());
    let store = Store::on_disk(&spec, &disk, Arc::new(host)).unwrap();
    (store, disk)
}

/// A worker's driver for a store in memory.
struct InMemory {
    ring: Ring,
    kernel: simulated::Kernel,
    driver: Driver,
    id: StoreId,
    memory: Memory,
    now: Instant,
}

impl InMemory {
    fn new(store: &Arc<Store>) -> Self {
        let now = Instant::now();
        let (mut ring, kernel) = Ring::simulated(RingConfig::default()).unwrap();
        let mut driver =
            Driver::new(ring.waker(), &mut ring, now, DriverConfig::default()).unwrap();
        let id = driver.attach(&mut ring, store.clone());
        let memory = Memory::new(4096).unwrap();
        Self {
            ring,
            kernel,
            driver,
            id,
            memory,
            now,
        }
    }

    fn submit(&mut self, op: BlockOp) {
        let data = [self.memory.whole()];
        self.driver
            .submit(&mut self.ring, self.id, command(op), &data, 1)
            .unwrap();
        self.ring.submit().unwrap();
    }

    /// Executes operations together with pending ones, and returns all results.
    fn run(&mut self, ops: &[BlockOp]) -> Vec<StepResult> {
        self.run_with(ops, Outcome::Whole)
    }

    /// Same as `run`, but the first ring operation has this outcome. All others succeed.
    fn run_with(&mut self, ops: &[BlockOp], first: Outcome) -> Vec<StepResult> {
        ops.iter().for_each(|op| self.submit(*op));
        let mut outcomes = std::iter::once(first).chain(std::iter::repeat(Outcome::Whole));
        let mut results = Vec::new();
        while self.driver.in_flight() > 0 {
            if let Some(done) = self.driver.poll_done(&mut self.ring) {
                results.push(done.result);
                continue;
            }
            self.complete_operations(|| outcomes.next().expect("endless"));
        }
        results
    }

    /// Completes all operations in the ring.
    fn complete_operations(&mut self, mut outcome: impl FnMut() -> Outcome) {
        self.ring.submit().unwrap();
        for operation in self.kernel.operations() {
            self.kernel.complete(operation.id, outcome());
        }
        let mut completions = Vec::new();
        self.ring.reap(&mut completions).unwrap();
        for completion in completions {
            self.driver.handle_completion(&mut self.ring, &completion);
        }
    }
}

/// Copies by the page cache can split a block, and we do not know which file systems use it. A
/// device does not split its own blocks.
#[test]
fn read_waits_for_divisible_write() {
    let file = file("/in/memory".into(), 16 << 20);
    let device = Source::Device {
        path: "/in/memory".into(),
    };
    for (source, direct, block_size, waits) in [
        (&file, Direct::Off, 512, true),
        (&file, Direct::Auto, 512, true),
        (&device, Direct::Off, 512, true),
        (&device, Direct::Auto, 512, false),
        (&device, Direct::Auto, 4096, true),
    ] {
        let (store, _) = store_of(Spec {
            direct,
            block_size,
            ..spec(source.clone())
        });
        let (mut one, mut other) = (InMemory::new(&store), InMemory::new(&store));
        one.memory.whole().fill(0, 4096, 7);
        one.submit(write(4096, 4096));
        other.submit(write(8192, 4096));
        other.submit(read(4096, 4096));
        assert_eq!(other.kernel.operations().len(), 2 - usize::from(waits));
        assert_eq!(one.run(&[]), [StepResult::Done]);
        assert_eq!(other.ring.waker().is_pending(), waits);
        assert_eq!(other.run(&[]), [StepResult::Done; 2]);
        assert_eq!(other.memory.whole().to_vec(), [7; 4096]);
        // An aborted request doesn't wait any longer and doesn't block other requests.
        one.submit(write(4096, 4096));
        other.submit(read(4096, 4096));
        other.driver.cancel(&mut other.ring, 1);
        let aborted = StepResult::Failed(BackendError::Aborted);
        let done = other.driver.poll_done(&mut other.ring);
        assert_eq!(done.map(|d| d.result), waits.then_some(aborted));
        assert_eq!(one.run(&[write(4096, 4096)]), [StepResult::Done; 2]);
        drop(other.run(&[]));
        assert_eq!(one.run(&[write(4096, 4096)]), [StepResult::Done]);
    }
}

/// A flush does not access any data, and may take a long time.
#[test]
fn requests_do_not_wait_for_other_flushes() {
    let (fua, unmap, buffer_offset) = (true, false, 0);
    let (offset, len) = (4096, 4096);
    let fua_read = BlockOp::Read {
        offset,
        len,
        buffer_offset,
        tags: None,
        fua,
    };
    let zero = BlockOp::WriteZeroes {
        offset,
        len: len.into(),
        unmap,
        fua,
    };
    for (op, another) in [(fua_read, write(offset, len)), (zero, read(offset, len))] {
        let (store, _) = store_with(Direct::Off);
        let (mut one, mut other) = (InMemory::new(&store), InMemory::new(&store));
        one.submit(op);
        other.submit(another);
        assert_eq!(other.kernel.operations().len(), 0, "{op:?}");
        let [copy] = &one.kernel.operations()[..] else {
            panic!("{op:?}");
        };
        one.kernel.complete(copy.id, Outcome::Whole);
        let mut completions = Vec::new();
        one.ring.reap(&mut completions).unwrap();
        for completion in completions {
            one.driver.handle_completion(&mut one.ring, &completion);
        }
        assert_eq!(one.driver.poll_done(&mut one.ring), None);
        one.ring.submit().unwrap();
        let flush = &one.kernel.operations()[0].op;
        assert_eq!(*flush, riser_reactor::Op::Sync(SyncKind::Data));
        assert_eq!(other.run(&[]), [StepResult::Done], "{op:?}");
        assert_eq!(one.run(&[]), [StepResult::Done], "{op:?}");
    }
}

/// Concurrent reads and writes of a block, for files in memory and on disk.
#[test]
fn blocks_of_files_are_whole() {
    for place in places() {
        let dir = Dir::new(&place, "whole");
        let store = Store::open(&Spec {
            block_size: 4096,
            ..spec(file(dir.file("lun"), 4096))
        });
        let store = store.unwrap();
        let end = Instant::now() + Duration::from_secs(1);
        let is_over = || Instant::now() > end;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut rig, memory) = (Rig::new(store.clone()), Memory::new(4096).unwrap());
                for fill in (0..=255).cycle().take_while(|_| !is_over()) {
                    memory.whole().fill(0, 4096, fill);
                    rig.run(write(0, 4096), &[memory.whole()]);
                }
            });
            let (mut rig, memory) = (Rig::new(store.clone()), Memory::new(4096).unwrap());
            while !is_over() {
                rig.run(read(0, 4096), &[memory.whole()]);
                let bytes = memory.whole().to_vec();
                assert!(bytes.iter().all(|byte| *byte == bytes[0]), "{place:?}");
            }
        });
    }
}

/// The descriptor for flushes may be replaced while a write is waiting.
#[test]
fn delayed_write_failure_affects_only_itself() {
    let (store, _) = store_with(Direct::Off);
    let (mut one, mut other) = (InMemory::new(&store), InMemory::new(&store));
    store.on_flush_failed(libc::EIO, one.now);
    other.submit(read(8 << 20, 4096));
    one.submit(DURABLE);
    store.clear_flush_failure().unwrap();
    let elsewhere = BlockOp::Write {
        offset: 0,
        len: 4096,
        buffer_offset: 0,
        tags: None,
        fua: true,
    };
    one.submit(elsewhere);
    let [operation] = &one.kernel.operations()[..] else {
        panic!("the other one waits");
    };
    one.kernel.complete(operation.id, Outcome::Whole);
    assert_eq!(other.run(&[]), [StepResult::Done]);
    let ended = one.run_with(&[], Outcome::Failed(libc::ENOSPC));
    assert_eq!(ended.len(), 2);
    assert!(ended.contains(&StepResult::Failed(BackendError::NoSpace)));
    assert_eq!(store.flush_failure(), None);
}

#[test]
fn zeroing_memory_yields_to_other_commands() {
    let store = Store::open(&spec(Source::Ram { size: 64 << 20 })).unwrap();
    let mut rig = Rig::new(store);
    let m = Memory::new(4096).unwrap();
    let zero = BlockOp::WriteZeroes {
        offset: 0,
        len: 64 << 20,
        unmap: false,
        fua: false,
    };
    rig.submit(zero, &[], 1);
    rig.submit(write(32 << 20, 4096), &[m.whole()], 2);
    let order: Vec<_> = rig.wait(2).iter().map(|done| done.user).collect();
    assert_eq!(order, [2, 1]);
}

#[test]
fn undo_keeps_other_file_with_same_name() {
    let dir = Dir::new(&std::env::temp_dir(), "undo");
    let path = dir.file("lun");
    let store = Store::open(&spec(file(path.clone(), 1 << 20))).unwrap();
    std::fs::rename(&path, dir.file("moved")).unwrap();
    std::fs::write(&path, "of an administrator").unwrap();
    store.undo();
    assert_eq!(std::fs::read(&path).unwrap(), b"of an administrator");
    assert!(dir.file("moved").exists());
    // A file that was extended and then renamed gets its previous length back.
    let path = dir.file("grown");
    File::create(&path).unwrap().set_len(4096).unwrap();
    let store = Store::open(&spec(file(path.clone(), 1 << 20))).unwrap();
    std::fs::rename(&path, dir.file("elsewhere")).unwrap();
    store.undo();
    assert_eq!(
        std::fs::metadata(dir.file("elsewhere")).unwrap().len(),
        4096
    );
}
