//! Service that handles the requests for a device.
//!
//! The disk thread polls the ring for requests. Completions return their results to this thread,
//! and they are committed in its next turn. Data is copied between the request and the disk buffer
//! using the driver's system calls: for a short read on completion, for a long read in the thread's
//! turn.

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use riser_block::poll_fds::{PollInterest, PollInterests};
use riser_block::{
    BlockDevice, BlockError, Buffer, Service, ServiceStatus, ZeroOptions, serve, task,
};

use super::commands::{Commands, Ring};
use super::data::{Descs, Direction, copy};
use super::sys::{ABORT, IoDesc, IoOp, Op};
use crate::bell::Bell;
use crate::ending::{Ending, Outcome};

/// Max data bytes per turn, in each direction. After this, other services get a chance.
const TURN_BYTES: u64 = 1 << 20;

/// Max read size that a completion can copy directly, in bytes.
const INLINE_BYTES: usize = 32 << 10;

/// Device queue handle.
#[derive(Debug)]
pub(super) struct Queue(Arc<Outcome>);

impl Queue {
    /// Starts fetching requests from the device file. This uses the disk thread, or a new thread if
    /// the disk doesn't have one. `on_end` is called on this thread after the queue is closed.
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

    /// Waits until the queue is closed, because the device was stopped.
    ///
    /// # Errors
    /// Returns an error if the queue was closed before this.
    pub(super) fn join(self) -> io::Result<()> {
        self.0.wait()
    }
}

/// Request result.
enum Done {
    /// Number of bytes transferred, or a negative error code.
    Result(i32),
    /// Read with data to be copied.
    Read(Buffer),
}

/// State shared between requests and the service.
struct Shared<D> {
    disk: Arc<D>,
    channel: File,
    /// Results to be processed by the service.
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

    fn push_result(&self, tag: u16, done: Done) {
        let mut all = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        all.push((tag, done));
        drop(all);
        self.bell.ring();
    }

    /// Appends all results to `into`.
    fn take_results(&self, into: &mut Vec<(u16, Done)>) {
        let mut all = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        into.append(&mut all);
    }
}

/// Queue service.
struct Server<D, C> {
    commands: C,
    descs: Descs,
    shared: Arc<Shared<D>>,
    depth: u16,
    /// Number of tags used by the driver or a request. `None` before the first turn, because we
    /// must start fetching on the thread that will be used later: the driver only accepts commands
    /// from the first thread.
    live: Option<u16>,
    /// Event count seen in the last turn.
    seen: u64,
    /// Results to be processed in the next turns, first result last.
    results: Vec<(u16, Done)>,
    /// Must be dropped last: this signals that the queue is closed.
    ending: Ending,
}

impl<D: BlockDevice, C: Commands> Server<D, C> {
    fn step(&mut self) -> io::Result<ServiceStatus> {
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
        // Requests that complete within this call are also committed by it.
        worked |= self.commit(&mut left);
        // If the kernel can't accept all commands now, we submit the remaining commands in the next
        // turn.
        worked |= !self.commands.submit()?;
        Ok(match (self.live, worked) {
            (Some(0), _) => ServiceStatus::Over,
            (_, true) => ServiceStatus::Worked,
            (_, false) => ServiceStatus::Waiting,
        })
    }

    /// Commits results in the order of completion; returns whether there were any.
    fn commit(&mut self, left: &mut u64) -> bool {
        if self.results.is_empty() {
            self.shared.take_results(&mut self.results);
            self.results.reverse();
        }
        let mut any = false;
        // A result without data is not counted.
        while let Some((tag, done)) = self
            .results
            .pop_if(|(_, done)| *left > 0 || matches!(done, Done::Result(_)))
        {
            any = true;
            let result = match done {
                Done::Result(result) => result,
                Done::Read(buffer) => {
                    *left = left.saturating_sub(buffer.len() as u64);
                    complete_read(&self.shared.channel, tag, &buffer)
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
            tracing::error!(tag, %error, "the driver rejected a command");
        }
        self.live = self.live.map(|live| live.saturating_sub(1));
    }
}

impl<D: BlockDevice, C: Commands> Service for Server<D, C> {
    fn run_once(&mut self) -> ServiceStatus {
        // Must be set before checking for work, so that new events will prevent the sleep.
        self.seen = self.shared.bell.events();
        match self.step() {
            Ok(ServiceStatus::Over) => {
                self.ending.note_complete();
                ServiceStatus::Over
            }
            Ok(turn) => turn,
            Err(error) => {
                self.ending.note_error(error);
                ServiceStatus::Over
            }
        }
    }

    fn prepare_sleep(&mut self) -> bool {
        self.shared.bell.prepare_sleep(self.seen)
    }

    fn add_interests<'a>(&'a self, out: &mut PollInterests<'a>) {
        out.push(PollInterest::reading(self.shared.bell.fd()));
        out.push(PollInterest::reading(self.commands.fd()));
    }

    fn end_sleep(&mut self) {
        self.shared.bell.end_sleep();
    }
}

/// Executes a request. The code after an await runs on the thread that completed the operation.
async fn serve_request<D: BlockDevice>(shared: Arc<Shared<D>>, tag: u16, desc: IoDesc) {
    let done = execute(&shared, tag, desc).await.unwrap_or_else(|error| {
        tracing::debug!(?desc, %error, "request failed");
        Done::Result(-error.errno())
    });
    shared.push_result(tag, done);
}

async fn execute<D: BlockDevice>(
    shared: &Shared<D>,
    tag: u16,
    desc: IoDesc,
) -> Result<Done, BlockError> {
    let disk = &shared.disk;
    let (offset, len) = (desc.offset(), desc.len());
    let op = desc.op().ok_or(BlockError::Unsupported)?;
    // The offset isn't used for a flush.
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
            Ok(Done::Result(complete_read(&shared.channel, tag, &buffer)))
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

/// Copies read data to the request and returns the result.
fn complete_read(channel: &File, tag: u16, buffer: &Buffer) -> i32 {
    match copy(channel, tag, buffer, Direction::ToRequest) {
        Ok(()) => buffer.len() as i32,
        Err(error) => {
            tracing::debug!(tag, %error, "the driver rejected the data of a read");
            -error.errno()
        }
    }
}

/// Converts the transfer length, and checks it against the limit that was set for the device.
fn transfer_len(disk: &impl BlockDevice, len: u64) -> Result<usize, BlockError> {
    if len > u64::from(disk.geometry().max_transfer) {
        return Err(BlockError::OutOfRange);
    }
    Ok(len as usize)
}

#[cfg(test)]
mod tests;
