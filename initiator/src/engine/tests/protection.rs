//! Protected units with too few buffers for their data with protection information.

use std::sync::{Arc, Mutex};

use riser_block::{
    BlockDevice as _, BlockError, BufferPool, Completion, Operation, Submissions,
    Workload as BlockWorkload,
};
use riser_scsi::lun::LunId;

use super::log::log_of;
use super::*;

const KIB: usize = 1 << 10;

fn protected() -> Rig {
    let rig = rig("");
    rig.target.knobs.protected.store(true, Ordering::SeqCst);
    rig
}

/// Returns the rig with a protected disk, whose calls have this timeout.
fn protected_disk(timeout: Duration) -> (Rig, Lun, BufferPool) {
    let rig = protected();
    let session = rig.session.clone().with_timeout(timeout);
    let lun = block_on(session.lun(0)).unwrap();
    assert!(lun.protection().is_some());
    let pool = block_on(session.protection_pool(LunId::ZERO)).unwrap();
    (rig, lun, pool)
}

#[test]
fn plain_unit_excludes_reserved_buffers() {
    let rig = rig("");
    let plain = block_on(rig.session.lun(0)).unwrap();
    let all = plain.buffer_bytes();
    let pool = block_on(rig.session.protection_pool(LunId::ZERO)).unwrap();
    assert!(plain.protection().is_none() && pool.size() > 0);
    assert_eq!(plain.buffer_bytes(), all - pool.size() as u64);
}

/// Completed operations, and the times of their completion.
type Results = Arc<Mutex<Vec<(u32, Result<(), BlockError>, Instant)>>>;

/// Submits operations concurrently.
struct Concurrent {
    operations: Vec<Operation>,
    results: Results,
}

impl BlockWorkload for Concurrent {
    fn submit(&mut self, queue: &mut Submissions) {
        for (tag, operation) in (0..).zip(std::mem::take(&mut self.operations)) {
            queue.push(tag, operation);
        }
    }

    fn complete(&mut self, tag: u32, completion: Completion, _: &mut Submissions) {
        let result = (tag, completion.map(drop), world::now());
        self.results.lock().unwrap().push(result);
    }

    fn due(&self) -> Option<Instant> {
        None
    }
}

fn start(lun: &Lun, operations: Vec<Operation>) -> Results {
    let results = Results::default();
    lun.start_workload(Box::new(Concurrent {
        operations,
        results: results.clone(),
    }));
    results
}

/// Returns a write of a pattern to one of the first units of 4096 bytes.
fn write_at(lun: &Lun, index: usize, len: usize) -> Operation {
    let buffer = lun.buffers().try_take(len).unwrap();
    buffer.slice().write(0, &pattern(index, len));
    Operation::Write {
        offset: index as u64 * 4096,
        buffer,
        fua: false,
    }
}

fn start_writes(lun: &Lun, lens: &[usize]) -> Results {
    let writes = lens.iter().enumerate();
    let writes = writes.map(|(index, len)| write_at(lun, index, *len));
    start(lun, writes.collect())
}

/// Waits for a second while the world runs.
fn wait_a_second() {
    let until = world::now() + Duration::from_secs(1);
    while world::now() < until {
        world::step(Some(until));
    }
}

#[test]
fn waiting_write_times_out_without_polling() {
    let timeout = Duration::from_secs(3);
    let (_rig, lun, pool) = protected_disk(timeout);
    let _held = pool.try_take(pool.size()).unwrap();
    let before = world::now();
    let long = lun.geometry().optimal_transfer as usize * 2;
    let results = start_writes(&lun, &[4096, long]);
    let mut steps = 0;
    while results.lock().unwrap().len() < 2 {
        world::step(None);
        steps += 1;
    }
    assert!(steps < 500, "{steps} steps");
    for (tag, result, at) in results.lock().unwrap().iter() {
        assert!(
            matches!(result, Err(BlockError::TimedOut)),
            "{tag}: {result:?}"
        );
        let waited = *at - before;
        assert!(
            waited >= timeout && waited < timeout * 11 / 10,
            "{waited:?}"
        );
    }
}

#[test]
fn waiting_write_starts_when_buffer_is_released() {
    let (rig, lun, pool) = protected_disk(Duration::from_secs(30));
    let held = pool.try_take(pool.size()).unwrap();
    let results = start_writes(&lun, &[4096; 3]);
    let second = start_writes(&lun, &[4096]);
    wait_a_second();
    assert!(results.lock().unwrap().is_empty() && second.lock().unwrap().is_empty());
    drop(held);
    let released = world::now();
    eventually("all writes", || {
        results.lock().unwrap().len() == 3 && second.lock().unwrap().len() == 1
    });
    for (tag, result, at) in results.lock().unwrap().iter() {
        assert!(result.is_ok(), "{tag}: {result:?}");
        let waited = *at - released;
        assert!(waited < Duration::from_micros(500), "{waited:?}");
    }
    assert_eq!(
        rig.target.disk.lock().unwrap()[4096..8192],
        pattern(1, 4096)
    );
    assert_eq!(pool.free(), pool.size());
}

#[test]
fn busy_client_reserves_smaller_pool() {
    const MIB: usize = 1 << 20;
    // The client has 8 MiB.
    for (free, expected) in [
        (8 * MIB, 2 * MIB),
        (2 * MIB - 4 * KIB, MIB),
        (300 * KIB, 256 * KIB),
    ] {
        let rig = protected();
        let held = rig.client.buffers().try_take(8 * MIB - free);
        let text = log_of(|| {
            for lun in [3, 4] {
                let lun = LunId::new(lun).unwrap();
                let pool = block_on(rig.session.protection_pool(lun)).unwrap();
                assert_eq!(pool.size(), expected);
            }
        });
        let note = format!("reserved {expected} instead of {} bytes", 2 * MIB);
        let is_reduced = expected < 2 * MIB;
        assert_eq!(
            text.matches(&note).count(),
            usize::from(is_reduced),
            "{text}"
        );
        assert_eq!(
            text.matches("lun=3").count(),
            usize::from(is_reduced),
            "{text}"
        );
        drop(held);
        world::clear();
    }
}

/// The first call reserves the last free buffers while both calls wait for them.
#[test]
fn concurrent_openings_share_smallest_pool() {
    let rig = protected();
    let session = rig.session.clone().with_timeout(Duration::from_secs(2));
    let buffers = rig.client.buffers();
    let next = buffers.try_take(256 * KIB).unwrap();
    let _held = buffers.try_take(buffers.free()).unwrap();
    let first = begin(session.protection_pool(LunId::ZERO));
    let second = begin(session.protection_pool(LunId::ZERO));
    drop(next);
    let first = block_on(first).unwrap();
    assert_eq!(first.size(), 256 * KIB);
    let second = block_on(second).unwrap();
    let _part = second.try_take(4 * KIB).unwrap();
    assert_eq!(first.free(), 252 * KIB, "the same pool");
}

#[test]
fn excessive_length_never_lacks_memory() {
    let (_rig, lun, pool) = protected_disk(Duration::from_secs(1));
    let check = || {
        for len in [pool.size(), BLOCK + 1] {
            let read = lun.read_io(0, lun.buffers().try_take(len).unwrap());
            let write = lun.write_io(0, lun.buffers().try_take(len).unwrap(), false);
            for io in [read, write] {
                assert_eq!(io.err(), Some(LunError::OutOfRange), "{len}");
            }
        }
    };
    check();
    let _held = pool.try_take(pool.size()).unwrap();
    check();
    let read = lun.read_io(0, lun.buffers().try_take(BLOCK).unwrap());
    assert_eq!(read.err(), Some(LunError::NoMemory));
}

#[test]
fn protected_unit_without_buffers_fails() {
    let rig = protected();
    let buffers = rig.client.buffers();
    let held = buffers.try_take(buffers.size() - 128 * KIB).unwrap();
    let session = rig.session.clone().with_timeout(Duration::from_secs(2));
    let before = world::now();
    let error = block_on(session.lun(0)).unwrap_err();
    let waited = world::now() - before;
    assert!(waited < Duration::from_secs(3), "{waited:?}");
    assert_eq!(
        error.to_string(),
        "cannot use protection information: timed out waiting for free data buffers"
    );
    drop(held);
    let lun = block_on(session.lun(0)).unwrap();
    assert!(lun.protection().is_some());
}

/// Returns a disk that supports UNMAP, and an operation that discards its first 4096 bytes.
fn unmapping_disk(rig: &Rig, timeout: Duration) -> (Lun, Operation) {
    rig.target.knobs.unmaps.store(true, Ordering::SeqCst);
    let session = rig.session.clone().with_timeout(timeout);
    let lun = block_on(session.lun(0)).unwrap();
    write_bytes(&lun, 0, &pattern(1, 4096));
    (lun, Operation::Discard(0..4096))
}

#[test]
fn discard_waits_for_free_buffer() {
    for is_released in [false, true] {
        let rig = rig("");
        let timeout = Duration::from_secs(3);
        let (lun, discard) = unmapping_disk(&rig, timeout);
        let buffers = lun.buffers().clone();
        let free = buffers.free();
        let held = buffers.try_take(free).unwrap();
        let before = world::now();
        let results = start(&lun, vec![discard]);
        wait_a_second();
        assert!(results.lock().unwrap().is_empty());
        let held = (!is_released).then_some(held);
        eventually("the end of the discard", || {
            !results.lock().unwrap().is_empty()
        });
        let disk = rig.target.disk.lock().unwrap()[..4096].to_vec();
        let (_, result, at) = &results.lock().unwrap()[0];
        if is_released {
            assert!(result.is_ok() && disk == [0; 4096], "{result:?}");
            assert_eq!(buffers.free(), free);
        } else {
            assert!(matches!(result, Err(BlockError::TimedOut)), "{result:?}");
            assert!(*at - before >= timeout && disk == pattern(1, 4096));
        }
        drop(held);
        world::clear();
    }
}

/// The discard waits for the buffer of the write.
#[test]
fn waiting_discard_never_blocks_write() {
    let rig = protected();
    let (lun, discard) = unmapping_disk(&rig, Duration::from_secs(3));
    let pool = block_on(lun.session().protection_pool(LunId::ZERO)).unwrap();
    let held = pool.try_take(pool.size()).unwrap();
    let write = write_at(&lun, 1, 4096);
    let buffers = lun.buffers();
    let _others = buffers.try_take(buffers.free()).unwrap();
    let results = start(&lun, vec![discard, write]);
    wait_a_second();
    assert!(results.lock().unwrap().is_empty());
    drop(held);
    eventually("both operations", || results.lock().unwrap().len() == 2);
    let results = results.lock().unwrap();
    assert!(results.iter().all(|(_, result, _)| result.is_ok()));
    assert_eq!(results[0].0, 1, "the write");
}
