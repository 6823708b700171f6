//! The service that has a device's requests.
//!
//! The disk's thread takes them out of the ring by turns, and its completions give the results
//! back, which a turn commits. Bytes are copied between a request and the disk's buffer by the
//! system call that the driver has for it: a short read's as it completes, a long one's in a turn.

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use super::commands::{Commands, Ring};
use super::data::{Descs, Direction, copy};
use super::sys::{ABORT, IoDesc, IoOp, Op};
use crate::block::{
    Bell, BlockDevice, BlockError, Buffer, Ending, Outcome, Service, Turn, ZeroOptions, serve, task,
};
use crate::poll_fds::{Waited, WaitedFds};

/// Bytes of data of one turn, in either direction, after which others have theirs.
const TURN_BYTES: u64 = 1 << 20;

/// Bytes of a read that its completion copies itself.
const INLINE_BYTES: usize = 32 << 10;

/// A device's queue, which is served somewhere.
#[derive(Debug)]
pub(super) struct Queue(Arc<Outcome>);

impl Queue {
    /// Starts to fetch requests from the device's file: on the disk's thread, or on one of its own
    /// where the disk has none. `on_end` is called on that thread when they are served no longer.
    pub(super) fn start<D: BlockDevice>(
        channel: &File,
        disk: Arc<D>,
        depth: u16,
        on_end: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        let outcome = Arc::new(Outcome::default());
        let host = disk.clone();
        let server = Box::new(Server {
            commands: Ring::new(channel.try_clone()?, depth)?,
            descs: Descs::map(channel, depth)?,
            shared: Arc::new(Shared::new(disk, channel.try_clone()?)?),
            depth,
            live: None,
            seen: 0,
            results: Vec::new(),
            ending: Ending::new(outcome.clone(), on_end),
        });
        if let Err(mut server) = host.host(server) {
            let thread = thread::Builder::new().name("ublk".into());
            thread.spawn(move || serve(&mut *server))?;
        }
        Ok(Self(outcome))
    }

    /// Waits for its end, which comes when the device is stopped.
    ///
    /// # Errors
    /// It ended before.
    pub(super) fn join(self) -> io::Result<()> {
        self.0.wait()
    }
}

/// The result of a request.
enum Done {
    /// Bytes that were moved, or a negative error number.
    Result(i32),
    /// A read whose bytes are to be copied.
    Read(Buffer),
}

/// State that requests share with the service.
struct Shared<D> {
    disk: Arc<D>,
    channel: File,
    /// Results on their way to the service.
    done: Mutex<Vec<(u16, Done)>>,
    bell: Bell,
}

impl<D> Shared<D> {
    fn new(disk: Arc<D>, channel: File) -> io::Result<Self> {
        Ok(Self {
            disk,
            channel,
            done: Mutex::default(),
            bell: Bell::new()?,
        })
    }

    fn give(&self, tag: u16, done: Done) {
        let mut all = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        all.push((tag, done));
        drop(all);
        self.bell.ring();
    }

    /// Takes all results behind those that are there.
    fn take(&self, into: &mut Vec<(u16, Done)>) {
        let mut all = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        into.append(&mut all);
    }
}

/// The service of a queue.
struct Server<D, C> {
    commands: C,
    descs: Descs,
    shared: Arc<Shared<D>>,
    depth: u16,
    /// Tags that the driver or a request has; `None` before the first turn, which fetches: the
    /// driver takes commands from the thread of the first one only.
    live: Option<u16>,
    /// Events that the last turn knew of.
    seen: u64,
    /// Results that wait for their turn, the first one last.
    results: Vec<(u16, Done)>,
    /// After all else: its end is that of the queue.
    ending: Ending,
}

impl<D: BlockDevice, C: Commands> Server<D, C> {
    fn step(&mut self) -> io::Result<Turn> {
        let mut worked = false;
        let mut left = TURN_BYTES;
        if self.live.is_none() {
            self.live = Some(self.depth);
            (0..self.depth).for_each(|tag| self.commands.push(IoOp::Fetch, tag, -1));
            worked = true;
        }
        worked |= self.commit(&mut left);
        while left > 0
            && let Some((tag, result)) = self.commands.pop()
        {
            worked = true;
            self.fetched(tag, result, &mut left);
        }
        // What was done within that call is committed with it.
        worked |= self.commit(&mut left);
        // What the kernel cannot take yet is given to it in the next turn.
        worked |= !self.commands.submit()?;
        Ok(match (self.live, worked) {
            (Some(0), _) => Turn::Over,
            (_, true) => Turn::Worked,
            (_, false) => Turn::Waiting,
        })
    }

    /// Commits results, in the order in which they came; whether there were any.
    fn commit(&mut self, left: &mut u64) -> bool {
        if self.results.is_empty() {
            self.shared.take(&mut self.results);
            self.results.reverse();
        }
        let mut any = false;
        // One without bytes costs a turn nothing.
        while let Some((tag, done)) = self
            .results
            .pop_if(|(_, done)| *left > 0 || matches!(done, Done::Result(_)))
        {
            any = true;
            let result = match done {
                Done::Result(result) => result,
                Done::Read(buffer) => {
                    *left = left.saturating_sub(buffer.len() as u64);
                    answer_read(&self.shared.channel, tag, &buffer)
                }
            };
            self.commands.push(IoOp::CommitAndFetch, tag, result);
        }
        any
    }

    fn fetched(&mut self, tag: u16, result: i32, left: &mut u64) {
        if result == 0 {
            let desc = self.descs.get(tag);
            if desc.op() == Some(Op::Write) {
                *left = left.saturating_sub(desc.len());
            }
            task::spawn(serve_request(self.shared.clone(), tag, desc));
            return;
        }
        if result != ABORT {
            let error = io::Error::from_raw_os_error(-result);
            tracing::error!(tag, %error, "the driver does not take a command");
        }
        self.live = self.live.map(|live| live.saturating_sub(1));
    }
}

impl<D: BlockDevice, C: Commands> Service for Server<D, C> {
    fn turn(&mut self) -> Turn {
        // Before anything is looked at, so that what happens meanwhile prevents the sleep.
        self.seen = self.shared.bell.events();
        match self.step() {
            Ok(Turn::Over) => {
                self.ending.note_complete();
                Turn::Over
            }
            Ok(turn) => turn,
            Err(error) => {
                self.ending.note_error(error);
                Turn::Over
            }
        }
    }

    fn prepare_sleep(&mut self) -> bool {
        self.shared.bell.prepare_sleep(self.seen)
    }

    fn put_waited<'a>(&'a self, out: &mut WaitedFds<'a>) {
        out.push(Waited::reading(self.shared.bell.fd()));
        out.push(Waited::reading(self.commands.fd()));
    }

    fn end_sleep(&mut self) {
        self.shared.bell.end_sleep();
    }
}

/// Serves one request, on the threads that complete its operations.
async fn serve_request<D: BlockDevice>(shared: Arc<Shared<D>>, tag: u16, desc: IoDesc) {
    let done = execute(&shared, tag, desc).await.unwrap_or_else(|error| {
        tracing::debug!(?desc, %error, "a request failed");
        Done::Result(-error.errno())
    });
    shared.give(tag, done);
}

async fn execute<D: BlockDevice>(
    shared: &Shared<D>,
    tag: u16,
    desc: IoDesc,
) -> Result<Done, BlockError> {
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
            if buffer.len() > INLINE_BYTES {
                return Ok(Done::Read(buffer));
            }
            Ok(Done::Result(answer_read(&shared.channel, tag, &buffer)))
        }
        Op::Write => {
            let buffer = disk.buffer(transfer_len(&**disk, len)?).await;
            copy(&shared.channel, tag, &buffer, Direction::FromRequest)?;
            disk.write(offset, buffer, desc.fua()).await?;
            Ok(Done::Result(len as i32))
        }
        Op::Flush => disk.flush().await.map(|()| Done::Result(0)),
        Op::Discard => disk.discard(range).await.map(|()| Done::Result(0)),
        Op::WriteZeroes => {
            let options = ZeroOptions {
                may_unmap: !desc.no_unmap(),
                fua: desc.fua(),
                fast: false,
            };
            let zeroed = disk.write_zeroes(range, options).await;
            zeroed.map(|()| Done::Result(0))
        }
    }
}

/// Copies what was read to its request; the result of the request.
fn answer_read(channel: &File, tag: u16, buffer: &Buffer) -> i32 {
    match copy(channel, tag, buffer, Direction::ToRequest) {
        Ok(()) => buffer.len() as i32,
        Err(error) => {
            tracing::debug!(tag, %error, "the driver does not take what was read");
            -error.errno()
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

#[cfg(test)]
mod tests;
