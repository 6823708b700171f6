//! The thread that has a device's requests.

#![allow(
    unsafe_code,
    reason = "reads what the kernel has mapped, and shows it memory by its address"
)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use io_uring::{IoUring, cqueue, opcode, types};
use rustix::event::{EventfdFlags, eventfd};
use zerocopy::IntoBytes;

use super::sys::{ABORT, DATA_OFFSET, DESCS_OFFSET, IoCmd, IoDesc, IoOp, Op, TAG_SHIFT};
use crate::block::{BlockDevice, BlockError, Buffer, ZeroOptions, task};

/// User data of the bell's completions; tags are smaller.
const BELL: u64 = u64::MAX;

/// The thread of a device.
#[derive(Debug)]
pub(super) struct Queue(JoinHandle<io::Result<()>>);

impl Queue {
    /// Starts to fetch requests from the device's file.
    pub(super) fn start<D: BlockDevice>(
        channel: &File,
        disk: Arc<D>,
        depth: u16,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            disk,
            channel: channel.try_clone()?,
            results: Results::new()?,
        });
        let descs = Descs::map(channel, depth)?;
        let thread = thread::Builder::new()
            .name("ublk".into())
            .spawn(move || Server::new(shared, descs, depth)?.run())?;
        Ok(Self(thread))
    }

    /// Waits for its end, which comes when the device is stopped.
    pub(super) fn join(self) -> io::Result<()> {
        self.0
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the thread of the block device panicked")))
    }
}

/// Results of requests on their way to the thread, and the bell that wakes it.
struct Results {
    waiting: Mutex<Vec<(u16, i32)>>,
    bell: OwnedFd,
}

impl Results {
    fn new() -> io::Result<Self> {
        Ok(Self {
            waiting: Mutex::default(),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    fn give(&self, tag: u16, result: i32) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let first = waiting.is_empty();
        waiting.push((tag, result));
        drop(waiting);
        if first {
            // A bell that rings already is as good.
            let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
        }
    }

    fn take(&self, into: &mut Vec<(u16, i32)>) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::swap(&mut *waiting, into);
    }
}

/// The descriptions of requests, which the kernel writes.
struct Descs {
    first: NonNull<IoDesc>,
    bytes: usize,
}

// SAFETY: the mapping belongs to this value alone, and is only read.
unsafe impl Send for Descs {}

impl Descs {
    fn map(channel: &File, depth: u16) -> io::Result<Self> {
        let bytes = usize::from(depth) * size_of::<IoDesc>();
        // SAFETY: a new mapping, of a length that the driver checks.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                channel.as_raw_fd(),
                DESCS_OFFSET,
            )
        };
        match NonNull::new(at.cast()) {
            Some(first) if at != libc::MAP_FAILED => Ok(Self { first, bytes }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The request with a tag that has just been fetched.
    fn get(&self, tag: u16) -> IoDesc {
        assert!(usize::from(tag) < self.bytes / size_of::<IoDesc>());
        // SAFETY: it is within the mapping; the kernel has written it before the fetch ended, and
        // writes it again only after the request's result is committed.
        unsafe { self.first.add(tag.into()).as_ptr().read_volatile() }
    }
}

impl Drop for Descs {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this address and length, and nothing refers to it any more.
        unsafe { libc::munmap(self.first.as_ptr().cast(), self.bytes) };
    }
}

/// State that requests share.
struct Shared<D> {
    disk: Arc<D>,
    channel: File,
    results: Results,
}

/// State of the queue's thread.
struct Server<D> {
    shared: Arc<Shared<D>>,
    descs: Descs,
    ring: IoUring,
    depth: u16,
    /// Tags that the driver or a request has.
    live: u16,
}

impl<D: BlockDevice> Server<D> {
    fn new(shared: Arc<Shared<D>>, descs: Descs, depth: u16) -> io::Result<Self> {
        // Each tag has one command outstanding, and the bell one.
        let ring = IoUring::builder()
            .setup_clamp()
            .build(u32::from(depth) + 1)?;
        let mut server = Self {
            shared,
            descs,
            ring,
            depth,
            live: depth,
        };
        server.listen_for_bell();
        for tag in 0..depth {
            server.command(IoOp::Fetch, tag, -1);
        }
        Ok(server)
    }

    /// Serves until the driver has nothing any more.
    fn run(mut self) -> io::Result<()> {
        let mut ends: Vec<(u64, i32, u32)> = Vec::new();
        let mut results = Vec::new();
        while self.live > 0 {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            let completions = self.ring.completion();
            ends.extend(completions.map(|c| (c.user_data(), c.result(), c.flags())));
            for (data, result, flags) in ends.drain(..) {
                if data == BELL {
                    let _ = rustix::io::read(&self.shared.results.bell, &mut [0; 8]);
                    if !cqueue::more(flags) {
                        self.listen_for_bell();
                    }
                } else {
                    self.fetched(data as u16, result);
                }
            }
            self.shared.results.take(&mut results);
            for (tag, result) in results.drain(..) {
                self.command(IoOp::CommitAndFetch, tag, result);
            }
        }
        Ok(())
    }

    fn fetched(&mut self, tag: u16, result: i32) {
        if result == 0 {
            let desc = self.descs.get(tag);
            task::spawn(serve(self.shared.clone(), tag, desc));
            return;
        }
        if result != ABORT {
            let error = io::Error::from_raw_os_error(-result);
            tracing::error!(tag, %error, "the driver does not take a command");
        }
        self.live -= 1;
    }

    fn listen_for_bell(&mut self) {
        let bell = types::Fd(self.shared.results.bell.as_raw_fd());
        let entry = opcode::PollAdd::new(bell, libc::POLLIN as u32)
            .multi(true)
            .build()
            .user_data(BELL);
        self.push(&entry);
    }

    fn command(&mut self, op: IoOp, tag: u16, result: i32) {
        let command = IoCmd {
            q_id: 0.into(),
            tag: tag.into(),
            result: result.into(),
            addr: 0.into(),
        };
        let mut bytes = [0; 16];
        bytes.copy_from_slice(command.as_bytes());
        let channel = types::Fd(self.shared.channel.as_raw_fd());
        let entry = opcode::UringCmd16::new(channel, op as u32)
            .cmd(bytes)
            .build()
            .user_data(tag.into());
        debug_assert!(tag < self.depth);
        self.push(&entry);
    }

    fn push(&mut self, entry: &io_uring::squeue::Entry) {
        // SAFETY: these entries name descriptors that live as long as the ring, and no memory.
        let pushed = unsafe { self.ring.submission().push(entry) };
        pushed.expect("a ring has an entry for every tag and the bell");
    }
}

/// Serves one request, on the threads that complete its operations.
async fn serve<D: BlockDevice>(shared: Arc<Shared<D>>, tag: u16, desc: IoDesc) {
    let result = match execute(&shared, tag, desc).await {
        Ok(bytes) => bytes as i32,
        Err(error) => {
            tracing::debug!(?desc, %error, "a request failed");
            -error.errno()
        }
    };
    shared.results.give(tag, result);
}

/// The bytes that were moved.
async fn execute<D: BlockDevice>(
    shared: &Shared<D>,
    tag: u16,
    desc: IoDesc,
) -> Result<u32, BlockError> {
    let disk = &shared.disk;
    let (offset, len) = (desc.offset(), desc.len());
    let op = desc.op().ok_or(BlockError::Unsupported)?;
    // A flush has no place on the disk.
    if op != Op::Flush && !disk.geometry().contains(offset, len) {
        return Err(BlockError::OutOfRange);
    }
    let range = offset..offset.saturating_add(len);
    match op {
        Op::Read => {
            let buffer = disk.buffer(transfer_len(&**disk, len)?).await;
            let buffer = disk.read(offset, buffer).await?;
            copy(&shared.channel, tag, &buffer, Direction::ToRequest)?;
            Ok(len as u32)
        }
        Op::Write => {
            let buffer = disk.buffer(transfer_len(&**disk, len)?).await;
            copy(&shared.channel, tag, &buffer, Direction::FromRequest)?;
            disk.write(offset, buffer, desc.fua()).await?;
            Ok(len as u32)
        }
        Op::Flush => disk.flush().await.map(|()| 0),
        Op::Discard => disk.discard(range).await.map(|()| 0),
        Op::WriteZeroes => {
            let options = ZeroOptions {
                may_unmap: !desc.no_unmap(),
                fua: desc.fua(),
            };
            disk.write_zeroes(range, options).await.map(|()| 0)
        }
    }
}

/// Length of a transfer, within the limit that the device was given.
fn transfer_len(disk: &impl BlockDevice, len: u64) -> Result<usize, BlockError> {
    if len > u64::from(disk.geometry().max_transfer) {
        return Err(BlockError::OutOfRange);
    }
    Ok(len as usize)
}

#[derive(Clone, Copy)]
enum Direction {
    ToRequest,
    FromRequest,
}

/// Copies between a request's pages and a buffer.
fn copy(channel: &File, tag: u16, buffer: &Buffer, direction: Direction) -> Result<(), BlockError> {
    let from = DATA_OFFSET + (u64::from(tag) << TAG_SHIFT);
    let mut done = 0;
    while done < buffer.len() {
        // SAFETY: `done` is within the buffer.
        let at = unsafe { buffer.slice().ptr().add(done) };
        let (fd, left) = (channel.as_raw_fd(), buffer.len() - done);
        let position = (from + done as u64) as i64;
        // SAFETY: the buffer has `left` bytes from there on; its holder is the only one that uses
        // it, and no operation on it is under way.
        let moved = unsafe {
            match direction {
                Direction::ToRequest => libc::pwrite(fd, at.cast(), left, position),
                Direction::FromRequest => libc::pread(fd, at.cast(), left, position),
            }
        };
        match moved {
            1.. => done += moved as usize,
            0 => return Err(BlockError::Io("a request has no bytes left".into())),
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(BlockError::Io(error.to_string()));
                }
            }
        }
    }
    Ok(())
}
