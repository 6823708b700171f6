//! A queue of requests: takes them out of the FUSE device and sets them off.
//!
//! A request is received in two pieces: its head, and [`Room`] for the rest, which is a buffer of
//! the disk. The payload of a long write is therefore where the disk can send it from, and the
//! buffer goes with the write; another one takes its place. Short payloads are copied to a buffer
//! of their size: a copy costs less than the memory that a whole room would keep from others.

use std::io;
use std::sync::Arc;

use riser_memory::PAGE;
use riser_memory::sys::{ReceivePiece, read_pieces};
use zerocopy::FromBytes;

use super::channel::{Channel, Reply};
use super::disk::{DiskFs, Verdict, Work};
use super::requests::{self, anonymous, copy};
use super::sys::{InHeader, IoIn, MIN_ROOM, MIN_WRITE, Opcode};
use crate::block::{
    BlockDevice, Buffer, ByteDevice, Ending, Geometry, Looks, Service, Span, Turn, task,
};
use crate::mounts::MountId;
use crate::poll_fds::{Waited, WaitedFds};

/// Longest write, and read, that the kernel is asked to send, in bytes.
const MAX_REQUEST: u32 = 1 << 20;

/// Requests, and bytes in either direction, of one turn, after which others have theirs.
const REQUESTS: usize = 64;
const TURN_BYTES: usize = 1 << 20;

/// Bytes of a write from which on it takes the room with it.
const LONG_WRITE: usize = 32 << 10;

/// Rooms that the disk's buffers have at least, where one of them is the room: it is never given
/// back, and the longest request must find another.
const ROOMS: u64 = 8;

/// Bytes of a request that are looked at, payload apart: a name is the longest.
const MAX_BODY: usize = 1024;

const HEADER: usize = size_of::<InHeader>();
/// The header and the argument of a write, behind which its payload comes.
const HEAD: usize = HEADER + size_of::<IoIn>();

/// Longest write for a disk: one that is a single transfer if it is aligned.
pub(super) fn max_write(geometry: &Geometry) -> u32 {
    let page = PAGE as u32;
    let most = geometry.split_len().min(MAX_REQUEST);
    (most - most % page).max(MIN_WRITE)
}

/// Memory that the kernel writes payloads into.
struct Room {
    buffer: Buffer,
    /// It is one of the disk's, which can be written from there.
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

    /// Gives the memory away, if there is more to take its place.
    fn take<D: BlockDevice>(&mut self, device: &D) -> Option<Buffer> {
        if !self.is_of_disk {
            return None;
        }
        let next = device.try_buffer(self.buffer.len())?;
        Some(std::mem::replace(&mut self.buffer, next))
    }
}

/// Outcome of a look at the descriptor.
enum Received {
    /// Bytes of a request, which is under way or answered.
    Request(usize),
    Nothing,
    /// The mount is gone, or the stream of requests cannot be followed.
    End,
}

/// A queue of a mount.
pub(super) struct Queue<D> {
    channel: Arc<Channel>,
    mount: MountId,
    fs: Arc<DiskFs>,
    device: Arc<ByteDevice<D>>,
    room: Room,
    looks: Looks,
    /// Events that the last turn knew of.
    seen: u64,
    /// Nothing more comes.
    ended: bool,
    /// The last turn had room for requests.
    to_read: bool,
    /// After all else: its end is that of the mount.
    ending: Arc<Ending>,
}

impl<D: BlockDevice> Queue<D> {
    /// Makes a queue that reads what a mount's channel has.
    ///
    /// # Errors
    /// Those of memory for its room.
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

    /// Takes one request, if there is one.
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
                // The process that waited for that request was killed.
                Some(libc::ENOENT | libc::EINTR) => return Received::Request(0),
                // The latter also for a request that was received while the mount ended.
                Some(libc::ENODEV | libc::ECONNABORTED) => return self.end(error),
                _ => return self.give_up(error),
            },
        };
        let header = InHeader::read_from_prefix(&head[..len.min(HEAD)]);
        match header {
            Ok((header, _)) if header.len.get() as usize == len => {
                self.start(&header, &head, len);
                Received::Request(len)
            }
            _ => {
                let text = format!("a FUSE request of {len} bytes has no header of that length");
                self.give_up(io::Error::new(io::ErrorKind::InvalidData, text))
            }
        }
    }

    /// The kernel has ended the connection, as it does when the mount has gone. Others can end that
    /// of a mount that is still there.
    fn end(&self, error: io::Error) -> Received {
        let error = match self.mount.is_listed() {
            Ok(false) => {
                self.ending.note_complete();
                return Received::End;
            }
            Ok(true) if error.raw_os_error() == Some(libc::ENODEV) => {
                // As a forced unmount of a mount that is in use does.
                let text = "the connection was ended while it was mounted";
                io::Error::new(io::ErrorKind::NotConnected, text)
            }
            Ok(true) => error,
            Err(unreadable) => unreadable,
        };
        self.give_up(error)
    }

    fn give_up(&self, error: io::Error) -> Received {
        self.ending.note_error(error);
        Received::End
    }

    /// Sets off a request of `len` bytes, of which `head` has the first and the room the others.
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
            Verdict::Answer(body) => Reply::new(&self.channel, unique, 0).succeed(&body),
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
            // The kernel does not send fewer bytes than it says.
            Work::Write { range, .. } if range.end - range.start > payload as u64 => {
                reply(0).refuse(libc::EINVAL);
            }
            Work::Write { range, .. } if range.is_empty() => requests::written(reply(0), 0),
            Work::Write { range, fua } => {
                let len = (range.end - range.start) as usize;
                self.start_write(range.start, len, fua, unique);
            }
            Work::Flush => task::spawn(requests::flush(device, reply(0))),
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
        // The room is needed for the next request, so the payload waits elsewhere: for a buffer, or
        // because it takes several.
        let reply = Reply::new(&self.channel, unique, len as u64);
        match anonymous(len) {
            Ok(parked) => {
                copy(&self.room.buffer, 0, &parked, 0, len);
                task::spawn(requests::write_parked(device, start, parked, fua, reply));
            }
            Err(error) => reply.fail(&error),
        }
    }

    /// A buffer of the disk with the payload at its place, and the bytes of memory that it takes;
    /// `None` where there is none free.
    fn payload(&mut self, span: &Span) -> Option<(Buffer, u64)> {
        let device = self.device.device();
        let room = self.room.buffer.len() as u64;
        // Half of the disk's buffers are for others, whose payloads or reads may be short.
        let may_take = span.is_aligned()
            && span.len >= LONG_WRITE
            && self.channel.bytes() + room <= device.buffer_bytes() / 2;
        if may_take && let Some(mut buffer) = self.room.take(&**device) {
            buffer.set_len(span.len);
            return Some((buffer, room));
        }
        let buffer = self.device.try_buffer(span)?;
        copy(&self.room.buffer, 0, &buffer, span.head, span.len);
        Some((buffer, span.covering as u64))
    }

    /// Takes requests as long as there is room for them, and others can wait; whether there were
    /// any.
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
    fn turn(&mut self) -> Turn {
        let events = self.channel.bell().events();
        if events != self.seen {
            self.looks.expect();
        } else if !self.looks.is_due() {
            return Turn::Waiting;
        }
        // Before anything is looked at, so that what happens meanwhile prevents the sleep.
        self.seen = events;
        let mut worked = self.channel.send_waiting(TURN_BYTES);
        if !self.ended {
            worked |= self.receive_some();
        }
        if self.ended {
            // The answers have no receiver, but what they are about still goes on.
            self.channel.forget_waiting();
            if self.channel.is_idle() {
                return Turn::Over;
            }
        }
        if worked {
            self.looks.expect();
            return Turn::Worked;
        }
        self.looks.note_vain();
        Turn::Waiting
    }

    fn prepare_sleep(&mut self) -> bool {
        self.channel.bell().prepare_sleep(self.seen)
    }

    fn put_waited<'a>(&'a self, out: &mut WaitedFds<'a>) {
        out.push(Waited::reading(self.channel.bell().fd()));
        // The end of a mount would end every sleep otherwise.
        if self.to_read {
            out.push(Waited::reading(self.channel.fd()));
        }
    }

    fn end_sleep(&mut self) {
        self.channel.bell().end_sleep();
        // The descriptor may have ended the sleep.
        self.looks.expect();
    }
}

impl<D> Drop for Queue<D> {
    fn drop(&mut self) {
        // An answer that waits holds the channel, which holds it.
        self.channel.forget_waiting();
    }
}

#[cfg(test)]
mod tests;
