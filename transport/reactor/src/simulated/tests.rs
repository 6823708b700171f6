//! Tests of a ring whose kernel is controlled by the test.

use std::sync::mpsc::channel;

use riser_memory::{MemSlice, Memory};

use super::*;
use crate::{Completion, Durability, Offload, Receive, Ring, RingConfig, SyncKind, Token, mailbox};

fn ring() -> (Ring, Kernel) {
    Ring::simulated(RingConfig::default()).unwrap()
}

fn reap(ring: &mut Ring) -> Vec<Completion> {
    let mut out = Vec::new();
    ring.reap(&mut out).unwrap();
    out
}

/// Returns memory filled with a byte.
fn filled(byte: u8, len: usize) -> MemSlice {
    let slice = Memory::new(len).unwrap().slice(0..len).unwrap();
    slice.fill(0, len, byte);
    slice
}

/// Submits one operation, completes it with the given outcome, and returns its result.
fn complete_operation(ring: &mut Ring, kernel: &Kernel, outcome: Outcome) -> i32 {
    ring.submit().unwrap();
    let [operation] = &kernel.operations()[..] else {
        panic!("one operation");
    };
    let result = kernel.complete(operation.id, outcome).unwrap();
    assert_eq!(reap(ring)[0].result, result);
    result
}

fn write(ring: &mut Ring, kernel: &Kernel, file: &crate::Handle, at: u64, data: &MemSlice) {
    let data = std::slice::from_ref(data);
    ring.submit_write(file, at, data, Durability::Cached, Token(1))
        .unwrap();
    complete_operation(ring, kernel, Outcome::Whole);
}

fn flush(ring: &mut Ring, kernel: &Kernel, file: &crate::Handle) -> i32 {
    ring.submit_sync(file, SyncKind::Data, Token(2)).unwrap();
    complete_operation(ring, kernel, Outcome::Whole)
}

fn byte(disk: &Disk, at: u64) -> u8 {
    let mut byte = [0];
    disk.read(at, &mut byte);
    byte[0]
}

#[test]
fn driver_chooses_completion_order() {
    let (mut ring, kernel) = ring();
    let file = crate::Handle::from(Disk::new(1 << 16).open());
    let memory = filled(7, 4096);
    for n in 0..4u64 {
        let data = [memory.clone()];
        ring.submit_write(&file, n * 4096, &data, Durability::Cached, Token(n))
            .unwrap();
    }
    assert!(kernel.operations().is_empty(), "nothing was handed over");
    assert!(reap(&mut ring).is_empty());
    let operations = kernel.operations();
    let offsets = operations.iter().map(|operation| match operation.op {
        crate::Op::Write { offset, .. } => offset,
        _ => panic!("a write"),
    });
    assert_eq!(offsets.collect::<Vec<_>>(), [0, 4096, 8192, 12_288]);
    for n in [2, 0, 3, 1] {
        assert_eq!(
            kernel.complete(operations[n].id, Outcome::Whole),
            Some(4096)
        );
    }
    let tokens: Vec<u64> = reap(&mut ring).iter().map(|c| c.token.0).collect();
    assert_eq!(tokens, [2, 0, 3, 1]);
    assert_eq!(kernel.complete(operations[0].id, Outcome::Whole), None);
    assert_eq!(ring.in_flight(), 0);
}

#[test]
fn disk_operations_can_fail_or_be_short() {
    let (mut ring, kernel) = ring();
    let disk = Disk::new(8192);
    let file = crate::Handle::from(disk.open());
    let data = [filled(7, 4096)];
    let mut write = |outcome| {
        ring.submit_write(&file, 0, &data, Durability::Cached, Token(1))
            .unwrap();
        complete_operation(&mut ring, &kernel, outcome)
    };
    assert_eq!(write(Outcome::Failed(libc::ENOSPC)), -libc::ENOSPC);
    assert_eq!(byte(&disk, 0), 0);
    assert_eq!(write(Outcome::Short(1000)), 1000);
    assert_eq!((byte(&disk, 999), byte(&disk, 1000)), (7, 0));
    assert_eq!(write(Outcome::DoneButFailed(libc::EIO)), -libc::EIO);
    assert_eq!(byte(&disk, 4095), 7);
    // A read beyond the end of the file is short.
    let into = [filled(1, 4096)];
    ring.submit_read(&file, 6000, &into, Token(1)).unwrap();
    assert_eq!(complete_operation(&mut ring, &kernel, Outcome::Whole), 2192);
    assert_eq!(into[0].to_vec()[2191..2193], [0, 1]);
}

#[test]
fn crash_keeps_any_unflushed_version() {
    let (mut ring, kernel) = ring();
    let disk = Disk::new(1 << 20);
    let file = crate::Handle::from(disk.open());
    write(&mut ring, &kernel, &file, 0, &filled(1, 2048));
    assert_eq!(flush(&mut ring, &kernel, &file), 0);
    assert!(disk.dirty().is_empty());
    write(&mut ring, &kernel, &file, 0, &filled(2, 2048));
    write(&mut ring, &kernel, &file, 512, &filled(3, 1024));
    assert_eq!(disk.dirty(), [(0, 1), (1, 2), (2, 2), (3, 1)]);
    drop((ring, kernel));
    disk.crash(|sector, versions| [0, 1, versions, 0][sector as usize]);
    let bytes = [0, 511, 512, 1023, 1024, 1535, 1536].map(|at| byte(&disk, at));
    assert_eq!(bytes, [1, 1, 2, 2, 3, 3, 1]);
    assert!(disk.dirty().is_empty());
}

#[test]
fn flush_ignores_writes_after_submission() {
    let (mut ring, kernel) = ring();
    let disk = Disk::new(1 << 20);
    let file = crate::Handle::from(disk.open());
    write(&mut ring, &kernel, &file, 0, &filled(1, 1024));
    ring.submit_sync(&file, SyncKind::Data, Token(2)).unwrap();
    ring.submit().unwrap();
    disk.write(512, &[2; 1024]);
    let [flush] = &kernel.operations()[..] else {
        panic!("one operation");
    };
    assert_eq!(kernel.complete(flush.id, Outcome::Whole), Some(0));
    assert_eq!(disk.dirty(), [(1, 1), (2, 1)]);
    disk.crash(|_, _| 0);
    let bytes = [0, 512, 1024].map(|at| byte(&disk, at));
    assert_eq!(bytes, [1, 1, 0]);
}

#[test]
fn only_durable_writes_survive_crash() {
    let (mut ring, kernel) = ring();
    let disk = Disk::new(1 << 20);
    let file = crate::Handle::from(disk.open());
    write(&mut ring, &kernel, &file, 4096, &filled(2, 512));
    ring.submit_write(&file, 0, &[filled(1, 512)], Durability::Durable, Token(1))
        .unwrap();
    complete_operation(&mut ring, &kernel, Outcome::Whole);
    disk.crash(|_, _| 0);
    assert_eq!((byte(&disk, 0), byte(&disk, 4096)), (1, 0));
}

/// Like Linux does: see `errseq_t`.
#[test]
fn write_back_error_is_reported_per_file() {
    let (mut ring, kernel) = ring();
    let disk = Disk::new(1 << 20);
    let (one, two) = (disk.open().into(), disk.open().into());
    write(&mut ring, &kernel, &one, 0, &filled(1, 512));
    write(&mut ring, &kernel, &one, 512, &filled(2, 512));
    disk.fail_write_back(libc::EIO, |sector| sector == 0);
    assert_eq!(byte(&disk, 0), 1, "the cache has it still");
    assert_eq!(flush(&mut ring, &kernel, &one), -libc::EIO);
    assert_eq!(flush(&mut ring, &kernel, &one), 0);
    let three = disk.open().into();
    assert_eq!(flush(&mut ring, &kernel, &three), 0, "it was reported");
    assert_eq!(flush(&mut ring, &kernel, &two), -libc::EIO);
    disk.drop_cache();
    assert_eq!((byte(&disk, 0), byte(&disk, 512)), (0, 2));
    // An error that was not reported to any file is reported to the next file that is opened.
    disk.fail_write_back(libc::ENOSPC, |_| true);
    assert_eq!(
        flush(&mut ring, &kernel, &disk.open().into()),
        -libc::ENOSPC
    );
}

#[test]
fn extents_match_written_ranges() {
    let disk = Disk::new(1 << 20);
    disk.write(4096, &[1; 4096]);
    disk.zero(5120, 1000, false);
    assert_eq!(disk.extent(0, 1 << 20), (false, 4096));
    assert_eq!(disk.extent(4096, 4096), (true, 1024));
    assert_eq!(disk.extent(5120, 4096), (false, 512));
    assert_eq!(disk.extent(5632, 1 << 20), (true, 2560));
    assert_eq!(disk.allocated(), 3584);
    disk.set_len(4096 + 10);
    assert_eq!((disk.len(), disk.allocated()), (4106, 512));
    disk.set_len(8192);
    assert_eq!((byte(&disk, 4105), byte(&disk, 4106)), (1, 0));
}

#[test]
fn full_socket_sends_part_and_waits() {
    let (mut ring, kernel) = ring();
    let (socket, peer) = Socket::connected(([192, 0, 2, 1], 1).into());
    let socket = crate::Handle::from(socket);
    peer.set_room(4096, 1000);
    ring.submit_send(&socket, &[filled(5, 2500)], Token(1))
        .unwrap();
    ring.submit().unwrap();
    assert_eq!((kernel.complete_all(), peer.sent()), (0, 1000));
    assert!(!kernel.operations()[0].is_ready);
    assert_eq!(peer.read_bytes(600).len(), 600);
    assert_eq!((kernel.complete_all(), peer.sent()), (0, 1000));
    assert_eq!(peer.read_bytes(5000).len(), 1000);
    assert_eq!((kernel.complete_all(), peer.sent()), (1, 900));
    assert_eq!(reap(&mut ring)[0].result, 2500);
    // If the connection breaks during a send, the bytes sent before are reported.
    assert_eq!(peer.read_bytes(5000).len(), 900);
    ring.submit_send(&socket, &[filled(5, 2500)], Token(2))
        .unwrap();
    ring.submit().unwrap();
    kernel.complete_all();
    peer.break_off(libc::ECONNRESET);
    kernel.complete_all();
    assert_eq!(reap(&mut ring)[0].result, 1000);
    ring.submit_recv(&socket, &[filled(0, 10)], Receive::Some, Token(3))
        .unwrap();
    assert_eq!(
        complete_operation(&mut ring, &kernel, Outcome::Whole),
        -libc::ECONNRESET
    );
}

#[test]
fn last_handle_closes_socket() {
    let (socket, peer) = Socket::connected(([192, 0, 2, 1], 1).into());
    let socket = crate::Handle::from(socket);
    let other = socket.clone();
    drop(socket);
    assert!(!peer.is_closed());
    drop(other);
    assert!(peer.is_closed());
    assert_eq!(peer.deliver(b"late"), 0);
}

#[test]
fn cancel_interrupts_socket_but_not_disk() {
    let (mut ring, kernel) = ring();
    let (socket, _peer) = Socket::connected(([192, 0, 2, 1], 1).into());
    let socket = crate::Handle::from(socket);
    let disk = Disk::new(4096);
    ring.submit_recv(&socket, &[filled(0, 10)], Receive::Some, Token(1))
        .unwrap();
    ring.submit_write(
        &disk.open().into(),
        0,
        &[filled(9, 512)],
        Durability::Cached,
        Token(1),
    )
    .unwrap();
    ring.submit().unwrap();
    assert_eq!(ring.cancel(Token(1)).unwrap(), 2);
    assert!(kernel.operations().iter().all(|o| o.is_cancelled));
    assert_eq!(kernel.complete_all(), 2);
    let results: Vec<i32> = reap(&mut ring).iter().map(|c| c.result).collect();
    assert_eq!(results, [-libc::ECANCELED, 512]);
}

#[test]
fn simulated_wake_needs_no_descriptor() {
    let (mut ring, kernel) = ring();
    let waker = ring.waker();
    let (sender, mut mail) = mailbox(4, waker.clone());
    sender.send("mail").unwrap();
    assert!(waker.is_pending());
    let mut out = Vec::new();
    ring.park(None).unwrap();
    assert!(ring.reap(&mut out).unwrap().woken && !waker.is_pending());
    assert!(!ring.reap(&mut out).unwrap().woken);
    assert_eq!(mail.poll_message(), Some("mail"));
    assert_eq!((ring.in_flight(), kernel.operations().len()), (0, 0));
}

#[test]
fn dropped_ring_executes_no_operations() {
    let (mut ring, kernel) = ring();
    let disk = Disk::new(4096);
    ring.submit_write(
        &disk.open().into(),
        0,
        &[filled(9, 512)],
        Durability::Cached,
        Token(1),
    )
    .unwrap();
    ring.submit().unwrap();
    let operation = kernel.operations()[0].clone();
    drop(ring);
    assert!(kernel.is_closed() && kernel.operations().is_empty());
    assert_eq!(kernel.complete(operation.id, Outcome::Whole), None);
    assert_eq!(byte(&disk, 0), 0);
}

#[test]
fn helper_jobs_run_as_ordered_steps() {
    let (ring, _kernel) = ring();
    let threads = Threads::default();
    let mut helper = Offload::new(2, ring.waker(), &threads).unwrap();
    assert!(threads.runnable().is_empty());
    helper.submit(Token(1), || "one").unwrap();
    helper.submit(Token(2), || "two").unwrap();
    assert_eq!(helper.submit(Token(3), || "three"), Err(crate::OffloadFull));
    let [thread] = threads.runnable()[..] else {
        panic!("one thread");
    };
    assert!(threads.step(thread) && ring.waker().is_pending());
    assert_eq!(helper.poll_result(), Some((Token(1), "one")));
    assert_eq!(helper.poll_result(), None);
    // A detached thread exits after its remaining jobs, and their results are dropped.
    drop(helper);
    assert!(threads.step(thread) && !threads.step(thread));
    assert!(threads.runnable().is_empty());
}

#[test]
fn spawned_thread_is_joined() {
    use crate::Threads as _;
    let threads = Threads::default();
    let (done, is_done) = channel();
    let job = move || done.send(()).unwrap();
    let thread = threads.spawn("once", Box::new(job)).unwrap();
    assert!(is_done.try_recv().is_err());
    thread.join();
    assert!(is_done.try_recv().is_ok() && threads.runnable().is_empty());
}

/// Creates a ring with this capacity, for which the kernel's default number of threads may be too
/// small.
fn small_ring(capacity: u32) -> (Ring, Kernel) {
    Ring::simulated(RingConfig {
        capacity,
        ..RingConfig::default()
    })
    .unwrap()
}

/// Returns the number of operations waiting for a kernel thread.
fn queued(kernel: &Kernel) -> usize {
    let operations = kernel.operations();
    operations.iter().filter(|one| one.is_queued).count()
}

/// Operations on a disk that hangs leave threads for operations on another disk.
#[test]
fn hung_disk_leaves_threads_for_healthy_disk() {
    let (mut ring, kernel) = small_ring(64);
    let [hung, healthy] = [(), ()].map(|()| Disk::new(1 << 20));
    hung.set_blocks_threads(true);
    let [hung, healthy] = [&hung, &healthy].map(|disk| crate::Handle::from(disk.open()));
    for n in 0..60 {
        let data = [filled(1, 512)];
        ring.submit_write(&hung, n * 512, &data, Durability::Cached, Token(n))
            .unwrap();
    }
    ring.submit_sync(&healthy, SyncKind::Data, Token(60))
        .unwrap();
    ring.submit().unwrap();
    assert_eq!((queued(&kernel), kernel.operations().len()), (0, 61));
}

/// Writes to a file through the page cache use one thread at a time.
#[test]
fn buffered_writes_to_file_are_serialized() {
    let (mut ring, kernel) = small_ring(64);
    let disk = Disk::new(1 << 20);
    let file = crate::Handle::from(disk.open().buffered());
    for n in 0..3 {
        let data = [filled(1, 512)];
        ring.submit_write(&file, 0, &data, Durability::Cached, Token(n))
            .unwrap();
    }
    ring.submit_sync(&file, SyncKind::Data, Token(3)).unwrap();
    ring.submit().unwrap();
    assert_eq!(queued(&kernel), 2);
    let ids: Vec<_> = kernel.operations().iter().map(|one| one.id).collect();
    assert_eq!(kernel.complete(ids[1], Outcome::Whole), None, "no thread");
    // An operation that has a thread is not interrupted, but a queued one is cancelled.
    ring.cancel(Token(0)).unwrap();
    ring.cancel(Token(1)).unwrap();
    let is_ready = |at: usize| kernel.operations()[at].is_ready;
    assert!(is_ready(0) && is_ready(1) && !is_ready(2) && is_ready(3));
    assert_eq!(
        kernel.complete(ids[1], Outcome::Whole),
        Some(-libc::ECANCELED)
    );
    assert_eq!(queued(&kernel), 1, "the thread is not free");
    assert_eq!(kernel.complete(ids[0], Outcome::Whole), Some(512));
    assert_eq!(queued(&kernel), 0);
}
