//! Tests a queue using a socket pair instead of `/dev/fuse`: each message is a request or a
//! response.

use std::future::poll_fn;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::{Poll, Waker};

use riser_block::{BlockError, Extent, MemoryDevice, ZeroOptions};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};
use zerocopy::IntoBytes;

use super::super::channel::MAX_IN_FLIGHT;
use super::super::disk::{Caching, Layout};
use super::super::sys::{LseekIn, OutHeader, ROOT, WriteOut};
use super::*;
use crate::ending::Outcome;

const SIZE: u64 = 1 << 20;

/// In-memory disk which records the buffer addresses used for writes, and can delay operations.
struct Watched {
    disk: MemoryDevice,
    geometry: Geometry,
    /// Buffer address and length for each write.
    writes: Mutex<Vec<(u64, usize)>>,
    is_shut: AtomicBool,
    waiting: Mutex<Vec<Waker>>,
}

impl Watched {
    fn new(disk: MemoryDevice) -> Arc<Self> {
        let geometry = disk.geometry().clone();
        Self::with(disk, geometry)
    }

    /// Creates a disk which reports this geometry.
    fn with(disk: MemoryDevice, geometry: Geometry) -> Arc<Self> {
        Arc::new(Self {
            disk,
            geometry,
            writes: Mutex::default(),
            is_shut: AtomicBool::new(false),
            waiting: Mutex::default(),
        })
    }

    fn waiting(&self) -> Vec<Waker> {
        let waiting = self.waiting.lock();
        std::mem::take(&mut *waiting.unwrap_or_else(PoisonError::into_inner))
    }

    fn open(&self) {
        self.is_shut.store(false, Ordering::SeqCst);
        self.waiting().into_iter().for_each(Waker::wake);
    }

    async fn pass(&self) {
        poll_fn(|cx| {
            if !self.is_shut.load(Ordering::SeqCst) {
                return Poll::Ready(());
            }
            self.waiting.lock().unwrap().push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    fn bytes(&self, range: Range<usize>) -> Vec<u8> {
        let mut bytes = vec![0; range.len()];
        self.disk.memory().read(range.start, &mut bytes);
        bytes
    }
}

impl BlockDevice for Watched {
    fn geometry(&self) -> &Geometry {
        &self.geometry
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
        self.pass().await;
        self.disk.read(offset, buffer).await
    }

    async fn write(&self, offset: u64, buffer: Buffer, fua: bool) -> Result<Buffer, BlockError> {
        let place = (buffer.slice().addr(), buffer.len());
        self.writes.lock().unwrap().push(place);
        self.pass().await;
        self.disk.write(offset, buffer, fua).await
    }

    async fn flush(&self) -> Result<(), BlockError> {
        self.pass().await;
        self.disk.flush().await
    }

    async fn discard(&self, range: Range<u64>) -> Result<(), BlockError> {
        self.disk.discard(range).await
    }

    async fn write_zeroes(
        &self,
        range: Range<u64>,
        options: ZeroOptions,
    ) -> Result<(), BlockError> {
        self.disk.write_zeroes(range, options).await
    }

    async fn status(&self, range: Range<u64>) -> Result<Vec<Extent>, BlockError> {
        self.disk.status(range).await
    }
}

struct Bed {
    device: Arc<Watched>,
    queue: Queue<Watched>,
    peer: OwnedFd,
    outcome: Arc<Outcome>,
}

/// Response: request ID, error code and remaining data.
type RawReply = (u64, i32, Vec<u8>);

impl Bed {
    fn new(disk: MemoryDevice) -> Self {
        Self::of(Watched::new(disk))
    }

    fn of(device: Arc<Watched>) -> Self {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let kind = SocketType::SEQPACKET;
        let (ours, peer) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
        for socket in [&ours, &peer] {
            sockopt::set_socket_send_buffer_size(socket, 1 << 20).unwrap();
        }
        let fs = DiskFs::new(device.geometry().clone(), Layout::File, Caching::Direct);
        let outcome = Arc::new(Outcome::default());
        let ending = Ending::new(outcome.clone(), || {});
        let channel = Arc::new(Channel::new(ours).unwrap());
        let bytes = Arc::new(ByteDevice::new(device.clone()));
        let (mount, fs, ending) = (MountId::unlisted(), Arc::new(fs), Arc::new(ending));
        let queue = Queue::new(channel, mount, fs, bytes, ending).unwrap();
        Self {
            device,
            queue,
            peer,
            outcome,
        }
    }

    /// Limits transfers to 64 KiB.
    fn short_transfers() -> Self {
        let disk = MemoryDevice::new(SIZE, 512).unwrap();
        Self::new(disk.with_geometry(|g| g.max_transfer = 64 << 10))
    }

    fn send(&self, opcode: Opcode, unique: u64, body: &[u8]) {
        let header = InHeader {
            len: ((HEADER + body.len()) as u32).into(),
            opcode: (opcode as u32).into(),
            unique: unique.into(),
            nodeid: ROOT.into(),
            ..InHeader::default()
        };
        let message = [header.as_bytes(), body].concat();
        let sent = rustix::io::write(&self.peer, &message).unwrap();
        assert_eq!(sent, message.len());
    }

    fn send_io(&self, opcode: Opcode, unique: u64, offset: u64, size: usize, payload: &[u8]) {
        let io = IoIn {
            offset: offset.into(),
            size: (size as u32).into(),
            ..IoIn::default()
        };
        self.send(opcode, unique, &[io.as_bytes(), payload].concat());
    }

    fn send_write(&self, unique: u64, offset: u64, payload: &[u8]) {
        self.send_io(Opcode::Write, unique, offset, payload.len(), payload);
    }

    /// Polls until idle.
    fn run(&mut self) {
        while self.queue.run_once() == ServiceStatus::Worked {}
    }

    fn replies(&self) -> Vec<RawReply> {
        let mut room = vec![0; 1 << 20];
        let mut replies = Vec::new();
        while let Ok(len) = rustix::io::read(&self.peer, &mut room[..]) {
            let (head, body) = room[..len].split_at(size_of::<OutHeader>());
            let head = OutHeader::read_from_bytes(head).unwrap();
            assert_eq!(head.len.get() as usize, len);
            replies.push((head.unique.get(), -head.error.get(), body.to_vec()));
        }
        replies
    }

    fn room(&self) -> u64 {
        self.queue.room.buffer.slice().addr()
    }

    fn in_flight(&self) -> usize {
        self.device.waiting.lock().unwrap().len()
    }
}

/// Test data, where the bytes and seeds all differ.
fn data(len: usize, seed: u8) -> Vec<u8> {
    let bytes = (0..len).map(|at| (at * 7 / 5) as u8 ^ seed);
    bytes.collect()
}

fn written(len: usize) -> Vec<u8> {
    let out = WriteOut {
        size: (len as u32).into(),
        ..WriteOut::default()
    };
    out.as_bytes().to_vec()
}

#[test]
fn long_write_uses_receive_memory() {
    let mut bed = Bed::short_transfers();
    let (first, second) = (data(64 << 10, 1), data(48 << 10, 2));
    let rooms = [bed.room()];
    bed.device.is_shut.store(true, Ordering::SeqCst);
    bed.send_write(7, 4096, &first);
    bed.run();
    let rooms = [rooms[0], bed.room()];
    assert_ne!(rooms[0], rooms[1], "the next payload goes elsewhere");
    bed.send_write(8, 128 << 10, &second);
    bed.run();
    let writes = bed.device.writes.lock().unwrap().clone();
    assert_eq!(writes, [(rooms[0], 64 << 10), (rooms[1], 48 << 10)]);
    assert!(bed.replies().is_empty(), "they are not done");
    bed.device.open();
    let replies = [(7, 0, written(64 << 10)), (8, 0, written(48 << 10))];
    assert_eq!(bed.replies(), replies);
    assert!(bed.device.bytes(4096..4096 + (64 << 10)) == first);
    let at = 128 << 10;
    assert!(bed.device.bytes(at..at + (48 << 10)) == second);
}

#[test]
fn short_and_unaligned_writes_keep_room() {
    let mut bed = Bed::short_transfers();
    let room = bed.room();
    let writes = [(8192, 512), (1001, 40_000), (60_001, 64 << 10)];
    for (at, len) in writes {
        let data = data(len, at as u8);
        bed.send_write(at, at, &data);
        bed.run();
        assert_eq!(bed.replies(), [(at, 0, written(len))]);
        let range = at as usize..at as usize + len;
        assert!(bed.device.bytes(range) == data, "{len} bytes at {at}");
    }
    assert_eq!(bed.room(), room);
    // The last write has partial blocks on both sides and requires two transfers.
    assert!(bed.device.bytes(0..1001).iter().all(|byte| *byte == 0));
}

#[test]
fn io_is_truncated_at_disk_end() {
    let mut bed = Bed::short_transfers();
    let bytes = data(64 << 10, 3);
    bed.send_write(1, SIZE - 8192, &bytes);
    bed.send_write(2, SIZE, &bytes[..1]);
    bed.run();
    let refused = (2, libc::ENOSPC, Vec::new());
    assert_eq!(bed.replies(), [(1, 0, written(8192)), refused]);
    bed.send_io(Opcode::Read, 3, SIZE - 100, 4096, &[]);
    bed.send_io(Opcode::Read, 4, SIZE, 4096, &[]);
    bed.run();
    let end = bytes[8192 - 100..8192].to_vec();
    assert_eq!(bed.replies(), [(3, 0, end), (4, 0, Vec::new())]);
    // Invalid write: more bytes claimed than sent.
    bed.send_io(Opcode::Write, 5, 0, 4096, &[1; 512]);
    bed.run();
    assert_eq!(bed.replies(), [(5, libc::EINVAL, Vec::new())]);
}

#[test]
fn long_reads_return_whole_range() {
    let mut bed = Bed::short_transfers();
    let content = data(SIZE as usize, 9);
    bed.device.disk.memory().write(0, &content);
    for (at, len) in [(65_536, 65_536), (700, 100_000), (4096, 100)] {
        bed.send_io(Opcode::Read, at, at, len, &[]);
        bed.run();
        let range = at as usize..at as usize + len;
        let replies = bed.replies();
        assert!(
            replies == [(at, 0, content[range].to_vec())],
            "{len} at {at}"
        );
    }
    bed.device.disk.spoil(8192..8704);
    bed.send_io(Opcode::Read, 1, 8000, 1000, &[]);
    bed.send_io(Opcode::Read, 2, 1, 100_000, &[]);
    bed.run();
    let failed = |unique| (unique, libc::EIO, Vec::new());
    assert_eq!(bed.replies(), [failed(1), failed(2)]);
}

#[test]
fn write_without_buffer_waits_alone() {
    let disk = MemoryDevice::new(SIZE, 512).unwrap();
    let disk = disk.with_geometry(|g| g.max_transfer = 64 << 10);
    let mut bed = Bed::new(disk.with_buffer_budget(1 << 20));
    let held: Vec<Buffer> = std::iter::from_fn(|| bed.device.try_buffer(512)).collect();
    let bytes = data(64 << 10, 5);
    bed.send_write(1, 0, &bytes);
    bed.send_write(2, 1 << 19, &bytes[..4096]);
    bed.send(Opcode::Statfs, 3, &[]);
    bed.run();
    let replies = bed.replies();
    assert_eq!(replies.len(), 1);
    assert_eq!((replies[0].0, replies[0].1), (3, 0));
    // The room is used for other requests in between.
    bed.send(Opcode::Lookup, 4, &[b'x'; 600]);
    bed.run();
    assert_eq!(bed.replies(), [(4, libc::ENOENT, Vec::new())]);
    drop(held);
    bed.run();
    let mut replies = bed.replies();
    replies.sort();
    assert_eq!(replies, [(1, 0, written(64 << 10)), (2, 0, written(4096))]);
    assert!(bed.device.bytes(0..64 << 10) == bytes);
    assert!(bed.device.bytes(1 << 19..(1 << 19) + 4096) == bytes[..4096]);
}

#[test]
fn scarce_buffers_are_reserved_for_transfers() {
    let disk = MemoryDevice::new(SIZE, 512).unwrap();
    let disk = disk.with_geometry(|g| g.max_transfer = 64 << 10);
    // One transfer, plus the blocks used for partial writes.
    let mut bed = Bed::new(disk.with_buffer_budget((64 << 10) + 4 * 512));
    let bytes = data(64 << 10, 8);
    for at in [0, 1 << 19] {
        bed.send_write(at, at, &bytes);
        bed.send_io(Opcode::Read, at + 1, at, 64 << 10, &[]);
        bed.run();
        let replies = [(at, 0, written(64 << 10)), (at + 1, 0, bytes.clone())];
        assert!(bed.replies() == replies);
    }
}

#[test]
fn excess_requests_remain_in_kernel() {
    let mut bed = Bed::short_transfers();
    bed.device.is_shut.store(true, Ordering::SeqCst);
    let (most, more) = (u64::from(MAX_IN_FLIGHT), 9);
    for unique in 0..most + more {
        bed.send(Opcode::Fsync, unique, &[0; 16]);
    }
    bed.run();
    assert_eq!(bed.in_flight(), MAX_IN_FLIGHT as usize);
    // It should sleep, without polling the descriptor, which has more data.
    assert!(bed.queue.prepare_sleep());
    let mut waited = riser_block::poll_fds::PollInterests::new();
    bed.queue.add_interests(&mut waited);
    assert_eq!(waited.len(), 1);
    bed.device.open();
    // The responses caused a wakeup.
    riser_block::poll_fds::wait(waited, None);
    bed.queue.end_sleep();
    bed.run();
    let replies = bed.replies();
    assert!(replies.iter().all(|(_, error, _)| *error == 0));
    let uniques: Vec<u64> = replies.iter().map(|reply| reply.0).collect();
    assert!(uniques.into_iter().eq(0..most + more));
}

#[test]
fn turn_handles_bounded_requests() {
    let mut bed = Bed::short_transfers();
    let many = 3 * REQUESTS + 1;
    for unique in 0..many {
        bed.send(Opcode::Getattr, unique as u64, &[0; 16]);
    }
    let mut replied = 0;
    while bed.queue.run_once() == ServiceStatus::Worked {
        let replies = bed.replies().len();
        assert!(replies <= REQUESTS, "{replies}");
        replied += replies;
    }
    assert_eq!(replied, many);
}

#[test]
fn turn_sends_bounded_bytes() {
    let mut bed = Bed::new(MemoryDevice::new(4 * SIZE, 512).unwrap());
    bed.device.is_shut.store(true, Ordering::SeqCst);
    let (many, len) = (40, 64 << 10);
    for unique in 0..many {
        bed.send_io(Opcode::Read, unique, unique << 16, len, &[]);
    }
    bed.run();
    bed.device.open();
    // The socket buffer can't hold everything sent in this poll. Make sure that responses aren't
    // sent twice.
    let mut turns = 0;
    while bed.queue.run_once() == ServiceStatus::Worked {
        turns += 1;
    }
    let least = many as usize * len / TURN_BYTES;
    assert!(turns >= least, "{turns} turns");
    assert_eq!(bed.queue.channel.bytes(), 0);
}

#[test]
fn seek_hole_without_status_returns_end() {
    let disk = MemoryDevice::new(SIZE, 512).unwrap();
    let mut geometry = disk.geometry().clone();
    // A full scan would take years.
    (geometry.capacity, geometry.reports_status) = (1 << 62, false);
    let mut bed = Bed::of(Watched::with(disk, geometry));
    let seek = |bed: &mut Bed, whence: i32, from: u64| {
        let argument = LseekIn {
            whence: whence.into(),
            offset: from.into(),
            ..LseekIn::default()
        };
        bed.send(Opcode::Lseek, 1, argument.as_bytes());
        bed.run();
        bed.replies()
    };
    let found = |at: u64| -> [RawReply; 1] { [(1, 0, at.to_ne_bytes().to_vec())] };
    assert_eq!(seek(&mut bed, libc::SEEK_HOLE, 0), found(1 << 62));
    assert_eq!(seek(&mut bed, libc::SEEK_DATA, 700), found(700));
    let beyond: [RawReply; 1] = [(1, libc::ENXIO, Vec::new())];
    assert_eq!(seek(&mut bed, libc::SEEK_HOLE, 1 << 62), beyond);
}

#[test]
fn dropped_reply_returns_error() {
    let bed = Bed::short_transfers();
    drop(Reply::new(&bed.queue.channel, 77, 0));
    assert_eq!(bed.replies(), [(77, libc::EIO, Vec::new())]);
}

#[test]
fn requests_complete_before_mount_ends() {
    let mut bed = Bed::short_transfers();
    bed.device.is_shut.store(true, Ordering::SeqCst);
    let bytes = data(4096, 1);
    bed.send_write(1, 0, &bytes);
    // Not a request: we can't parse the stream after this.
    rustix::io::write(&bed.peer, &[0; 50]).unwrap();
    bed.run();
    assert_eq!(bed.queue.run_once(), ServiceStatus::Waiting);
    assert!(!bed.outcome.is_over());
    assert!(bed.queue.prepare_sleep());
    bed.device.open();
    bed.queue.end_sleep();
    assert_eq!(bed.queue.run_once(), ServiceStatus::Over);
    assert!(bed.device.bytes(0..4096) == bytes);
    let Bed { queue, outcome, .. } = bed;
    drop(queue);
    assert!(outcome.is_over() && !outcome.is_complete());
    let error = outcome.wait().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
}

#[test]
fn reply_triggers_immediate_poll() {
    let mut bed = Bed::short_transfers();
    bed.run();
    bed.queue.looks.defer_check();
    bed.send(Opcode::Getattr, 1, &[0; 16]);
    assert_eq!(bed.queue.run_once(), ServiceStatus::Waiting);
    Reply::new(&bed.queue.channel, 2, 0).succeed(&[]);
    assert_eq!(bed.queue.run_once(), ServiceStatus::Worked);
    let uniques: Vec<u64> = bed.replies().iter().map(|reply| reply.0).collect();
    assert_eq!(uniques, [2, 1]);
}

#[test]
fn max_write_is_whole_transfers_and_pages() {
    let of_both = |transfers| {
        let disk = MemoryDevice::new(SIZE, 512).unwrap();
        max_write(
            disk.with_geometry(|g| (g.max_transfer, g.optimal_transfer) = transfers)
                .geometry(),
        )
    };
    let of = |len| of_both((len, len));
    assert_eq!(of_both((4 << 20, 64 << 10)), 64 << 10);
    assert_eq!(of(4 << 20), 1 << 20);
    assert_eq!(of(1 << 20), 1 << 20);
    assert_eq!(of((64 << 10) + 512), 64 << 10);
    assert_eq!(of(512), 4096);
}

#[test]
fn tiny_transfers_are_served_in_pieces() {
    let disk = MemoryDevice::new(SIZE, 512).unwrap();
    let mut bed = Bed::new(disk.with_geometry(|g| g.max_transfer = 1024));
    let bytes = data(4096, 6);
    bed.send_write(1, 100, &bytes);
    bed.send_io(Opcode::Read, 2, 100, 4096, &[]);
    bed.run();
    assert_eq!(bed.replies(), [(1, 0, written(4096)), (2, 0, bytes)]);
}
