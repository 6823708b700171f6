//! Request queue: reads requests from the FUSE device and starts them.
//!
//! A request is received into two buffers: the header, and a [`Room`] for the payload, which is a
//! disk buffer. This way we can write a large payload directly from this buffer, and then need a
//! new buffer for the next request. Small payloads are copied to a buffer with the right size
//! instead, because the copy is cheaper than the memory used by a mostly empty buffer.

use std::io;
use std::sync::Arc;

use riser_block::poll_fds::{PollInterest, PollInterests};
use riser_block::{BlockDevice, Buffer, ByteDevice, Geometry, Service, ServiceStatus, Span, task};
use riser_memory::PAGE;
use riser_memory::sys::{ReceivePiece, read_pieces};
use zerocopy::{FromBytes, IntoBytes};

use super::channel::{Channel, Reply};
use super::disk::{DiskFs, Verdict, Work};
use super::requests::{self, anonymous, copy};
use super::sys::{InHeader, IoIn, MIN_ROOM, MIN_WRITE, Opcode, OpenOut};
use crate::ending::Ending;
use crate::looks::Looks;
use crate::mounts::MountId;

/// Max read and write size which we request from the kernel, in bytes.
const MAX_REQUEST: u32 = 1 << 20;

/// Max requests, and max bytes in each direction, per turn. After this, other queues get a chance.
const REQUESTS: usize = 64;
const TURN_BYTES: usize = 1 << 20;

/// Min write size for zero-copy, in bytes; smaller payloads are copied.
const LONG_WRITE: usize = 32 << 10;

/// Min number of receive rooms in the disk buffer pool before using one as our own. We never
/// release that room, so there must be enough buffers left for the largest request.
const ROOMS: u64 = 8;

/// Max request bytes which are parsed, payload excluded: the largest field is a name.
const MAX_BODY: usize = 1024;

const HEADER: usize = size_of::<InHeader>();
/// Request header plus write argument; the payload starts after it.
const HEAD: usize = HEADER + size_of::<IoIn>();

/// Returns the max write size for a disk: an aligned write should fit into a single transfer.
pub(super) fn max_write(geometry: &Geometry) -> u32 {
    let page = PAGE as u32;
    let most = geometry.split_len().min(MAX_REQUEST);
    (most - most % page).max(MIN_WRITE)
}

/// Memory used by the kernel to store payloads.
struct Room {
    buffer: Buffer,
    /// Set if this is a disk buffer, which can be used for zero-copy writes.
    is_of_disk: bool,
}

impl Room {
    fn new<D: BlockDevice>(device: &D) -> io::Result<Self> {
        let geometry = device.geometry();
        let len = (max_write(geometry) as usize).max(MIN_ROOM);
        let is_small =
            len <= geometry.max_transfer as usize && len as u64 * ROOMS <= device.buffer_bytes();
        let of_disk = is_small.then(|| device.try_buffer(len)).flatten();
        Ok(Self {
            is_of_disk: of_disk.is_some(),
            buffer: of_disk.map_or_else(|| Buffer::anonymous(len), Ok)?,
        })
    }

    /// Returns the memory, if there is a new buffer to replace it.
    fn take_memory<D: BlockDevice>(&mut self, device: &D) -> Option<Buffer> {
        if !self.is_of_disk {
            return None;
        }
        let next = device.try_buffer(self.buffer.len())?;
        Some(std::mem::replace(&mut self.buffer, next))
    }
}

/// Result of a receive call.
enum Received {
    /// Request size in bytes; the request is either in flight or complete.
    Request(usize),
    Nothing,
    /// Unmounted, or the request stream is invalid.
    End,
}

/// Queue of a mount.
pub(super) struct Queue<D> {
    channel: Arc<Channel>,
    mount: MountId,
    fs: Arc<DiskFs>,
    device: Arc<ByteDevice<D>>,
    room: Room,
    looks: Looks,
    /// Event count seen in the last poll.
    seen: u64,
    /// Set when there will be no new requests.
    ended: bool,
    /// The last poll was able to read requests.
    to_read: bool,
    /// Must be dropped last: this signals that the mount is closed.
    ending: Arc<Ending>,
}

impl<D: BlockDevice> Queue<D> {
    /// Creates a queue which reads requests from this channel.
    ///
    /// # Errors
    /// Returns an error if memory for the room can't be allocated.
    pub(super) fn new(
        channel: Arc<Channel>,
        mount: MountId,
        fs: Arc<DiskFs>,
        device: Arc<ByteDevice<D>>,
        ending: Arc<Ending>,
    ) -> io::Result<Self> {
        Ok(Self {
            room: Room::new(&**device.device())?,
            channel,
            mount,
            fs,
            device,
            looks: Looks::new(),
            seen: 0,
            ended: false,
            to_read: true,
            ending,
        })
    }

    /// Receives a request, if available.
    fn receive(&mut self) -> Received {
        let mut head = [0; HEAD];
        let mut pieces = [
            ReceivePiece::from(&mut head[..]),
            ReceivePiece::from(self.room.buffer.slice()),
        ];
        let len = match read_pieces(self.channel.fd(), &mut pieces) {
            Ok(len) => len,
            Err(error) => match error.raw_os_error() {
                Some(libc::EAGAIN) => return Received::Nothing,
                // The process waiting for this request was killed.
                Some(libc::ENOENT | libc::EINTR) => return Received::Request(0),
                // The latter is also returned if the mount was aborted during this receive.
                Some(libc::ENODEV | libc::ECONNABORTED) => return self.on_connection_closed(error),
                _ => return self.fail_queue(error),
            },
        };
        let header = InHeader::read_from_prefix(&head[..len.min(HEAD)]);
        match header {
            Ok((header, _)) if header.len.get() as usize == len => {
                self.start(&header, &head, len);
                Received::Request(len)
            }
            _ => {
                let text = format!("invalid length in the header of a FUSE request of {len} bytes");
                self.fail_queue(io::Error::new(io::ErrorKind::InvalidData, text))
            }
        }
    }

    /// The connection was closed by the kernel after an unmount. It can also be aborted while still
    /// mounted.
    fn on_connection_closed(&self, error: io::Error) -> Received {
        let error = match self.mount.is_listed() {
            Ok(false) => {
                self.ending.note_complete();
                return Received::End;
            }
            Ok(true) if error.raw_os_error() == Some(libc::ENODEV) => {
                // Caused by a forced unmount of a busy mount.
                let text = "the FUSE connection was aborted while mounted";
                io::Error::new(io::ErrorKind::NotConnected, text)
            }
            Ok(true) => error,
            Err(unreadable) => unreadable,
        };
        self.fail_queue(error)
    }

    fn fail_queue(&self, error: io::Error) -> Received {
        self.ending.note_error(error);
        Received::End
    }

    /// Starts a request with `len` bytes. The first bytes are in `head`, the remaining data in the
    /// room.
    fn start(&mut self, header: &InHeader, head: &[u8; HEAD], len: usize) {
        let (opcode, node) = (header.opcode.get(), header.nodeid.get());
        let unique = header.unique.get();
        let more = len.saturating_sub(HEAD);
        let short = &head[HEADER..len.min(HEAD)];
        let verdict = if more == 0 || opcode == Opcode::Write as u32 {
            self.fs.handle(opcode, node, short)
        } else {
            let mut body = short.to_vec();
            body.resize(short.len() + more.min(MAX_BODY), 0);
            self.room.buffer.slice().read(0, &mut body[short.len()..]);
            self.fs.handle(opcode, node, &body)
        };
        match verdict {
            Verdict::Silent => {}
            Verdict::Reply(body) => Reply::new(&self.channel, unique, 0).succeed(&body),
            Verdict::Open(flags) => {
                let out = OpenOut {
                    fh: self.fs.files.open(self.device.loss_cursor()).into(),
                    open_flags: flags.into(),
                    ..OpenOut::default()
                };
                Reply::new(&self.channel, unique, 0).succeed(out.as_bytes());
            }
            Verdict::Release(handle) => {
                self.fs.files.close(handle);
                Reply::new(&self.channel, unique, 0).succeed(&[]);
            }
            Verdict::Refuse(errno) => Reply::new(&self.channel, unique, 0).refuse(errno),
            Verdict::Start(work) => self.start_work(work, unique, more),
        }
    }

    fn start_work(&mut self, work: Work, unique: u64, payload: usize) {
        let device = self.device.clone();
        let reply = |bytes| Reply::new(&self.channel, unique, bytes);
        match work {
            Work::Read(range) if range.is_empty() => reply(0).succeed(&[]),
            Work::Read(range) => {
                let reply = reply(range.end - range.start);
                task::spawn(requests::read(device, range, reply));
            }
            // The kernel doesn't send less data than it claims.
            Work::Write { range, .. } if range.end - range.start > payload as u64 => {
                reply(0).refuse(libc::EINVAL);
            }
            Work::Write { range, .. } if range.is_empty() => requests::written(reply(0), 0),
            Work::Write { range, fua } => {
                let len = (range.end - range.start) as usize;
                self.start_write(range.start, len, fua, unique);
            }
            Work::Flush(handle) => {
                let losses = self.fs.files.cursor(handle);
                task::spawn(requests::flush(device, losses, reply(0)));
            }
            Work::Zero(range, options) => {
                task::spawn(requests::zero(device, range, options, reply(0)));
            }
            Work::Seek { from, want_data } => {
                task::spawn(requests::seek(device, from, want_data, reply(0)));
            }
        }
    }

    /// Writes the first `len` bytes in the room.
    fn start_write(&mut self, start: u64, len: usize, fua: bool, unique: u64) {
        let device = self.device.clone();
        let span = device.first_piece(start, len as u64);
        if span.len == len
            && let Some((buffer, bytes)) = self.payload(&span)
        {
            let reply = Reply::new(&self.channel, unique, bytes);
            return task::spawn(requests::write(device, (span, buffer), fua, reply));
        }
        // The room is needed for the next request, so move the payload: there is either no buffer
        // available, or it requires multiple buffers.
        let reply = Reply::new(&self.channel, unique, len as u64);
        match anonymous(len) {
            Ok(parked) => {
                copy(&self.room.buffer, 0, &parked, 0, len);
                task::spawn(requests::write_parked(device, start, parked, fua, reply));
            }
            Err(error) => reply.fail(&error),
        }
    }

    /// Returns a disk buffer with the payload at the right offset, and its memory size in bytes;
    /// `None` if no buffer is available.
    fn payload(&mut self, span: &Span) -> Option<(Buffer, u64)> {
        let device = self.device.device();
        let room = self.room.buffer.len() as u64;
        // We keep half of the disk buffers for other requests, which may be small.
        let may_take = span.is_aligned()
            && span.len >= LONG_WRITE
            && self.channel.bytes() + room <= device.buffer_bytes() / 2;
        if may_take && let Some(mut buffer) = self.room.take_memory(&**device) {
            buffer.set_len(span.len);
            return Some((buffer, room));
        }
        let buffer = self.device.try_buffer(span)?;
        copy(&self.room.buffer, 0, &buffer, span.head, span.len);
        Some((buffer, span.covering as u64))
    }

    /// Receives requests while there is room, up to the limits for this turn; returns whether there
    /// were any.
    fn receive_some(&mut self) -> bool {
        let (mut any, mut bytes) = (false, 0);
        for _ in 0..REQUESTS {
            self.to_read = self.channel.has_room();
            if !self.to_read || bytes >= TURN_BYTES {
                return any;
            }
            match self.receive() {
                Received::Request(len) => bytes += len,
                Received::Nothing => return any,
                Received::End => {
                    self.ended = true;
                    self.to_read = false;
                    return true;
                }
            }
            any = true;
        }
        any
    }
}

impl<D: BlockDevice> Service for Queue<D> {
    fn run_once(&mut self) -> ServiceStatus {
        let events = self.channel.bell().events();
        if events != self.seen {
            self.looks.expect();
        } else if !self.looks.is_due() {
            return ServiceStatus::Waiting;
        }
        // Must be set before checking for work, so that new events will prevent the sleep.
        self.seen = events;
        let mut worked = self.channel.send_waiting(TURN_BYTES);
        if !self.ended {
            worked |= self.receive_some();
        }
        if self.ended {
            // Nobody will receive these responses, but the operations are still running.
            self.channel.forget_waiting();
            if self.channel.is_idle() {
                return ServiceStatus::Over;
            }
        }
        if worked {
            self.looks.expect();
            return ServiceStatus::Worked;
        }
        self.looks.note_vain();
        ServiceStatus::Waiting
    }

    fn prepare_sleep(&mut self) -> bool {
        self.channel.bell().prepare_sleep(self.seen)
    }

    fn add_interests<'a>(&'a self, out: &mut PollInterests<'a>) {
        out.push(PollInterest::reading(self.channel.bell().fd()));
        // Otherwise we would never sleep after the mount has been closed.
        if self.to_read {
            out.push(PollInterest::reading(self.channel.fd()));
        }
    }

    fn end_sleep(&mut self) {
        self.channel.bell().end_sleep();
        // This descriptor may have caused the wakeup.
        self.looks.expect();
    }
}

impl<D> Drop for Queue<D> {
    fn drop(&mut self) {
        // Queued responses hold a reference to the channel, which owns the queue.
        self.channel.forget_waiting();
    }
}

#[cfg(test)]
mod tests;
