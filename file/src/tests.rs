//! Tests of [`Driver`] with a simulated kernel.

use std::cell::Cell;
use std::time::{Duration, Instant};

use riser_block::{Command, CommandKind};
use riser_memory::Memory;
use riser_reactor::simulated::{Disk, Kernel, Outcome};
use riser_reactor::{Fallocate, Handle, Op, Ring, RingConfig};

use super::*;

/// A disk that records a failed flush.
struct Stored {
    file: OpenFile,
    flush_failure: Option<i32>,
    flush_clears: Cell<u64>,
    keeps_errors: bool,
    has_other_drivers: bool,
    /// Number of replaced descriptors.
    closed: Cell<u64>,
}

impl Stored {
    fn new(file: OpenFile) -> Self {
        Self {
            file,
            flush_failure: None,
            flush_clears: Cell::default(),
            keeps_errors: false,
            has_other_drivers: false,
            closed: Cell::default(),
        }
    }
}

impl Storage for Stored {
    type Result = Result<Option<u64>, Failure>;
    type Error = Failure;
    type Extents = u64;

    fn result(&self, result: Self::Result) -> Self::Result {
        result
    }

    fn error(failure: Failure, _: u64) -> Failure {
        failure
    }

    fn file(&self) -> Option<&OpenFile> {
        Some(&self.file)
    }

    fn block_size(&self) -> u32 {
        512
    }

    fn has_write_cache(&self) -> bool {
        true
    }

    fn keeps_write_errors(&self) -> bool {
        self.keeps_errors
    }

    fn has_other_drivers(&self) -> bool {
        self.has_other_drivers
    }

    fn call(_: &Handle, op: &Command, _: u32) -> Result<u64, Failure> {
        Ok(op.len)
    }

    fn unknown_extents(op: &Command) -> u64 {
        op.len
    }

    fn flush_failure(&self) -> Option<i32> {
        self.flush_failure
    }

    fn flush_clears(&self) -> u64 {
        self.flush_clears.get()
    }

    fn on_flush_failed(&mut self, errno: i32, _: Instant) {
        self.flush_failure.get_or_insert(errno);
    }

    fn close(&self, _: Handle) {
        self.closed.update(|closed| closed + 1);
    }
}

struct Rig {
    ring: Ring,
    kernel: Kernel,
    driver: Driver<Stored>,
    store: StoreId,
}

impl Rig {
    fn new(device: Option<Device>) -> Self {
        Self::with(device, false)
    }

    fn with(device: Option<Device>, keeps_errors: bool) -> Self {
        let file = OpenFile::simulated(Disk::new(16 << 20).open().into(), None, device);
        Self::of(Stored {
            keeps_errors,
            ..Stored::new(file)
        })
    }

    fn of(stored: Stored) -> Self {
        let (mut ring, kernel) = Ring::simulated(RingConfig::default()).unwrap();
        let (now, config) = (Instant::now(), DriverConfig::default());
        let mut driver = Driver::new(ring.waker(), &mut ring, now, config).unwrap();
        Self {
            store: driver.attach(&mut ring, stored),
            ring,
            kernel,
            driver,
        }
    }

    /// A device that appears to support holes and zeroing.
    fn on_device() -> Self {
        Self::new(Some(Device {
            logical_block: 512,
            can_zero: true,
            ..Device::default()
        }))
    }

    fn submit(&mut self, kind: CommandKind) {
        let command = Command::new(kind, 0, 1 << 20);
        self.driver
            .submit(&mut self.ring, self.store, command, &[], 1)
            .unwrap();
        self.ring.submit().unwrap();
    }

    /// Returns the ranges that are being punched or zeroed by the kernel.
    fn fallocations(&self) -> Vec<Fallocate> {
        let operations = self.kernel.operations();
        let fallocations = operations
            .iter()
            .filter_map(|operation| match operation.op {
                Op::Fallocate { what, .. } => Some(what),
                _ => None,
            });
        fallocations.collect()
    }

    fn complete(&mut self, outcome: Outcome) {
        for operation in self.kernel.operations() {
            self.kernel.complete(operation.id, outcome);
        }
        let mut completions = Vec::new();
        self.ring.reap(&mut completions).unwrap();
        for completion in completions {
            self.driver.handle_completion(&mut self.ring, &completion);
        }
        self.ring.submit().unwrap();
    }

    /// Completes all operations and returns the result of the command.
    fn finish(&mut self) -> Result<Option<u64>, Failure> {
        loop {
            if let Some(done) = self.driver.poll_done(&mut self.ring) {
                return done.result;
            }
            self.complete(Outcome::Whole);
        }
    }
}

const UNSUPPORTED: Outcome = Outcome::Failed(libc::EOPNOTSUPP);

fn zeroes(unmap: bool, fast: bool) -> CommandKind {
    CommandKind::WriteZeroes { unmap, fast }
}

/// Other writes can interleave with a write to blocks that are aligned to pages.
#[test]
fn short_write_continues_at_whole_block() {
    for (is_unaligned, expected) in [(false, 4608), (true, 5000)] {
        let file = OpenFile::simulated(Disk::new(16 << 20).open().into(), None, None);
        let mut rig = Rig::of(Stored::new(match is_unaligned {
            true => file.with_unaligned_blocks(),
            false => file,
        }));
        let data = [Memory::new(8192).unwrap().whole()];
        for user in 0..2 {
            let command = Command::new(CommandKind::Write, 0, 8192);
            rig.driver
                .submit(&mut rig.ring, rig.store, command, &data, user)
                .unwrap();
        }
        rig.ring.submit().unwrap();
        let offsets = |rig: &Rig| {
            let offset = |op| match op {
                Op::Write { offset, .. } => offset,
                other => panic!("{other:?}"),
            };
            let operations = rig.kernel.operations().into_iter();
            operations.map(|o| offset(o.op)).collect::<Vec<_>>()
        };
        let concurrent = if is_unaligned { 1 } else { 2 };
        assert_eq!(offsets(&rig), vec![0; concurrent]);
        rig.complete(Outcome::Short(5000));
        assert_eq!(offsets(&rig), vec![expected; concurrent]);
        assert_eq!(rig.finish(), Ok(None));
        assert_eq!(rig.finish(), Ok(None));
    }
}

/// Zeroing a device cannot be cancelled if the kernel writes the zeroes, and it only reports for a
/// hole that it would have to.
#[test]
fn device_without_holes_is_filled() {
    let mut rig = Rig::on_device();
    for is_known in [false, true] {
        rig.submit(zeroes(true, false));
        if !is_known {
            assert_eq!(rig.fallocations(), [Fallocate::PunchHole]);
            rig.complete(UNSUPPORTED);
        }
        assert_eq!(rig.fallocations(), []);
        assert_eq!(rig.finish(), Ok(None));
    }
    // A file system only changes its metadata.
    let mut rig = Rig::new(None);
    rig.submit(zeroes(true, false));
    rig.complete(UNSUPPORTED);
    assert_eq!(rig.fallocations(), [Fallocate::ZeroRange]);
    assert_eq!(rig.finish(), Ok(None));
}

#[test]
fn fast_zeroes_never_write_to_device() {
    let refused = Err(Failure::Errno(libc::EOPNOTSUPP));
    let mut rig = Rig::on_device();
    rig.submit(zeroes(false, true));
    assert_eq!(rig.fallocations(), []);
    assert_eq!(rig.finish(), refused);
    rig.submit(zeroes(true, true));
    assert_eq!(rig.fallocations(), [Fallocate::PunchHole]);
    rig.complete(UNSUPPORTED);
    assert_eq!(rig.fallocations(), []);
    assert_eq!(rig.finish(), refused);
    let mut rig = Rig::new(None);
    rig.submit(zeroes(false, true));
    assert_eq!(rig.fallocations(), [Fallocate::ZeroRange]);
    assert_eq!(rig.finish(), Ok(None));
}

#[test]
fn canceled_command_ends_if_unsupported() {
    let mut rig = Rig::new(None);
    for expected in [Fallocate::PunchHole, Fallocate::ZeroRange] {
        rig.submit(zeroes(true, false));
        assert_eq!(rig.fallocations(), [expected]);
        rig.driver.cancel(&mut rig.ring, 1);
        rig.complete(UNSUPPORTED);
        assert!(rig.kernel.operations().is_empty());
        assert_eq!(rig.finish(), Err(Failure::Cancelled));
    }
}

/// The lock of a file is released with its last reference.
#[test]
fn detached_file_leaves_ring() {
    let file = rustix::fs::memfd_create("detached", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = Handle::from(file);
    let other = sys::reopen(&file).unwrap();
    let lock = |file: &Handle| {
        let exclusive = rustix::fs::FlockOperation::NonBlockingLockExclusive;
        rustix::fs::flock(file.fd().unwrap(), exclusive)
    };
    lock(&file).unwrap();
    let mut ring = Ring::new(RingConfig::default()).unwrap();
    let (now, config) = (Instant::now(), DriverConfig::default());
    let mut driver = Driver::<Stored>::new(ring.waker(), &mut ring, now, config).unwrap();
    let stored = Stored::new(OpenFile::simulated(file, None, None));
    let store = driver.attach(&mut ring, stored);
    assert!(lock(&other).is_err());
    assert!(driver.detach(&mut ring, store));
    // The kernel may close it shortly after the call.
    riser_testkit::eventually("it is closed", Duration::from_secs(60), || {
        lock(&other).is_ok()
    });
}

#[test]
fn flush_uses_descriptor_with_write_errors() {
    for keeps_errors in [false, true] {
        let mut rig = Rig::with(None, keeps_errors);
        for _ in 0..2 {
            rig.submit(CommandKind::Flush);
            let flush = &rig.kernel.operations()[0];
            let writes = rig.driver.store(rig.store).file.handle.simulated().unwrap();
            let is_same = std::ptr::eq(flush.handle.simulated().unwrap(), writes);
            assert_eq!(is_same, keeps_errors);
            assert_eq!(rig.finish(), Ok(None));
        }
    }
}

/// The kernel would report a lost write to only one of the drivers.
#[test]
fn flush_fails_without_separate_descriptor() {
    for has_other_drivers in [false, true] {
        // A socket cannot be opened again.
        let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
        let file = OpenFile::simulated(std::os::fd::OwnedFd::from(socket).into(), None, None);
        let mut rig = Rig::of(Stored {
            has_other_drivers,
            ..Stored::new(file)
        });
        rig.submit(CommandKind::Flush);
        assert_eq!(rig.kernel.operations().is_empty(), has_other_drivers);
        if has_other_drivers {
            assert_eq!(rig.finish(), Err(Failure::Errno(libc::ENXIO)));
        }
        assert_eq!(rig.driver.store(rig.store).flush_failure, None);
    }
}

/// Closing a descriptor can block the thread that owns the driver.
#[test]
fn replaced_descriptor_is_closed_by_storage() {
    let mut rig = Rig::new(None);
    for clears in 0..3 {
        rig.driver.store(rig.store).flush_clears.set(clears);
        rig.submit(CommandKind::Flush);
        assert_eq!(rig.finish(), Ok(None));
        assert_eq!(rig.driver.store(rig.store).closed.get(), clears);
    }
}

/// The ring has a reference to the descriptor until the flush has completed.
#[test]
fn descriptor_of_flush_is_closed_later() {
    let mut rig = Rig::new(None);
    rig.submit(CommandKind::Flush);
    let stored = |rig: &Rig| {
        let stored = rig.driver.store(rig.store);
        (stored.flush_clears.get(), stored.closed.get())
    };
    rig.driver.store(rig.store).flush_clears.set(1);
    let durable = Command {
        fua: true,
        ..Command::new(CommandKind::Write, 0, 4096)
    };
    let data = [Memory::new(4096).unwrap().whole()];
    rig.driver
        .submit(&mut rig.ring, rig.store, durable, &data, 2)
        .unwrap();
    assert_eq!(stored(&rig), (1, 0));
    assert_eq!(rig.finish(), Ok(None));
    assert_eq!(rig.finish(), Ok(None));
    assert_eq!(stored(&rig), (1, 1));
}
