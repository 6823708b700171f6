//! Server connection for a disk, used on the disk thread.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use riser_block::poll_fds::{PollInterest, PollInterests};
use riser_block::{BlockError, Command, CommandKind};
use riser_exports::nbd::client::{
    Event, MAX_IN_FLIGHT, Negotiated, ReplyFault, Request, RequestOutcome, Requests,
};
use riser_exports::nbd::proto::{Cookie, cmd, request_header};
use riser_memory::sys::{self, ReceivePiece};

use super::outgoing::Outgoing;
use crate::backend::Backend;
use crate::operation::Operation;

/// Receive buffer size. Data received here is copied to the request buffers.
const RECEIVE: usize = 256 << 10;
/// Max receive calls per round. After this, clients get a chance.
const RECEIVES: usize = 16;
/// If the average read in flight is at least this size, data is received directly into the request
/// buffers.
const BULK: u64 = 32 << 10;
/// Additional receive space after the data, used for the next headers.
const BULK_ROOM: usize = 4096;
/// Request header length.
const HEADER: u64 = 28;

/// Request in flight.
#[derive(Debug)]
struct InFlight {
    operation: Operation,
    since: Instant,
    /// Stream offset where its header ends.
    header_end: u64,
}

/// Result of a receive call.
enum Received {
    /// No data available.
    Nothing,
    /// Data was received.
    Some {
        /// The buffer was filled completely, so there may be more data.
        has_more: bool,
    },
}

/// Server connection.
pub(crate) struct NbdBackend {
    socket: OwnedFd,
    requests: Requests<InFlight>,
    /// Queued operations, used if [`MAX_IN_FLIGHT`] is reached.
    waiting: VecDeque<Operation>,
    outgoing: Outgoing,
    received: Box<[u8]>,
    /// Unprocessed bytes in `received`.
    valid: Range<usize>,
    /// Total bytes and number of reads in flight.
    read_bytes: u64,
    reads: u64,
    timeout: Duration,
    /// Lower bound for the submit time of all requests in flight.
    oldest: Instant,
    /// Error for all new operations.
    failed: Option<BlockError>,
    is_closing: bool,
    /// Set when the disconnect request has been sent.
    has_disconnected: bool,
}

impl NbdBackend {
    /// Creates a connection on a non-blocking socket after negotiation. Status is reported using
    /// `block` bytes as the block size.
    pub(super) fn new(
        socket: OwnedFd,
        negotiated: &Negotiated,
        block: u32,
        timeout: Duration,
    ) -> Self {
        let context = negotiated.allocation_context;
        Self {
            socket,
            requests: Requests::new(negotiated.structured, context, block),
            waiting: VecDeque::new(),
            outgoing: Outgoing::default(),
            received: vec![0; RECEIVE].into_boxed_slice(),
            valid: 0..0,
            read_bytes: 0,
            reads: 0,
            timeout,
            oldest: Instant::now(),
            failed: None,
            is_closing: false,
            has_disconnected: false,
        }
    }

    fn start_operation(&mut self, operation: Operation, now: Instant) {
        if self.requests.in_flight() == 0 {
            self.oldest = now;
        }
        let Command {
            kind, offset, fua, ..
        } = operation.command;
        let len = operation.command.len as u32;
        let request = match kind {
            CommandKind::Read => Request::Read { offset, len },
            CommandKind::Write => Request::Write { offset, len, fua },
            CommandKind::Flush => Request::Flush,
            CommandKind::Discard { .. } => Request::Trim { offset, len },
            CommandKind::WriteZeroes { unmap, .. } => Request::WriteZeroes {
                offset,
                len,
                no_hole: !unmap,
                fua,
            },
            CommandKind::Status => Request::BlockStatus { offset, len },
        };
        let data = match request {
            Request::Write { .. } => Some(operation.memory().slice().clone()),
            Request::Read { len, .. } => {
                self.read_bytes += u64::from(len);
                self.reads += 1;
                None
            }
            _ => None,
        };
        let in_flight = InFlight {
            operation,
            since: now,
            header_end: self.outgoing.end_offset() + HEADER,
        };
        let header = self.requests.submit(request, in_flight);
        self.outgoing.push_header(&header);
        if let Some(data) = data {
            self.outgoing.push_data(data);
        }
    }

    fn complete_request(&mut self, request: InFlight, end: RequestOutcome) {
        let InFlight {
            operation,
            header_end,
            ..
        } = request;
        match operation.command.kind {
            CommandKind::Read => {
                self.reads -= 1;
                self.read_bytes -= operation.memory().len() as u64;
            }
            // A server can reply before it has read all data.
            CommandKind::Write if !self.outgoing.is_empty() => {
                let len = operation.memory().len() as u64;
                self.outgoing.copy_out(header_end..header_end + len);
            }
            _ => {}
        }
        operation.complete(end.result.map(|()| end.extents));
    }

    /// Closes the connection; all operations will fail.
    fn fail(&mut self, error: BlockError) {
        tracing::info!(%error, "the connection to the NBD server failed");
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        self.failed = Some(error.clone());
        self.outgoing = Outgoing::default();
        (self.reads, self.read_bytes) = (0, 0);
        let in_flight = self.requests.drain().into_iter().map(|r| r.operation);
        let all: Vec<_> = in_flight.chain(self.waiting.drain(..)).collect();
        // Waking a task may submit new operations; they will see the error.
        for operation in all {
            operation.complete(Err(error.clone()));
        }
    }

    /// Receives and processes available data. Returns whether there was any, and whether everything
    /// was received.
    fn receive_all(&mut self) -> (bool, bool) {
        let mut worked = false;
        for _ in 0..RECEIVES {
            let has_more = match self.receive() {
                Ok(Received::Nothing) => return (worked, true),
                Ok(Received::Some { has_more }) => has_more,
                Err(error) => {
                    self.fail(lost(&error));
                    return (true, true);
                }
            };
            worked = true;
            if let Err(fault) = self.handle() {
                let what = format!("the NBD server violated the protocol: {fault}");
                self.fail(BlockError::Disconnected(what));
            }
            if !has_more || self.failed.is_some() {
                return (true, true);
            }
        }
        (worked, false)
    }

    /// Fails the connection if a request has timed out.
    fn check_time(&mut self, now: Instant) {
        if self.deadline().is_none_or(|deadline| now < deadline) {
            return;
        }
        // The saved time may belong to a request that has since completed, so update it.
        let oldest = self.requests.tokens().map(|request| request.since).min();
        self.oldest = oldest.unwrap_or(self.oldest);
        if now >= self.oldest + self.timeout {
            self.fail(BlockError::TimedOut);
        }
    }

    /// Receives data from the socket.
    fn receive(&mut self) -> io::Result<Received> {
        if self.valid.start > 0 {
            self.received.copy_within(self.valid.clone(), 0);
            self.valid = 0..self.valid.len();
        }
        let mut pieces = ArrayVec::<_, 2>::new();
        let mut direct = 0;
        if let Some((request, at, left)) = self.requests.payload() {
            // All previous data has already been copied to the buffer.
            debug_assert!(self.valid.is_empty());
            let memory = request.operation.memory().slice();
            pieces.push(ReceivePiece::part(memory, at..at + left));
            direct = left;
        }
        let is_bulk = self.reads > 0 && self.read_bytes / self.reads >= BULK;
        let room = &mut self.received[self.valid.end..];
        let room_len = match is_bulk {
            true => room.len().min(BULK_ROOM),
            false => room.len(),
        };
        pieces.push(ReceivePiece::from(&mut room[..room_len]));
        let received = sys::receive(self.socket.as_fd(), &mut pieces);
        drop(pieces);
        let count = match received {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Ok(Received::Nothing);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            Err(error) => return Err(error),
        };
        let taken = count.min(direct);
        self.requests.handle_payload(taken);
        self.valid.end += count - taken;
        Ok(Received::Some {
            has_more: count == direct + room_len,
        })
    }

    /// Processes received data.
    fn handle(&mut self) -> Result<(), ReplyFault> {
        loop {
            if let Some((request, at, left)) = self.requests.payload() {
                let count = left.min(self.valid.len());
                if count == 0 {
                    return Ok(());
                }
                let bytes = &self.received[self.valid.start..self.valid.start + count];
                request.operation.memory().slice().write(at, bytes);
                self.valid.start += count;
                self.requests.handle_payload(count);
                continue;
            }
            let progress = self.requests.handle(&self.received[self.valid.clone()])?;
            self.valid.start += progress.consumed;
            match progress.event {
                // If a server could guess cookies, it could make us keep write data that it never
                // reads.
                Some(Event::Done(request, _)) if !self.outgoing.is_sent(request.header_end) => {
                    let early = ReplyFault::Early;
                    let error = BlockError::Disconnected(early.to_string());
                    request.operation.complete(Err(error));
                    return Err(early);
                }
                Some(Event::Done(request, end)) => self.complete_request(request, end),
                Some(Event::Hole(key, range)) => {
                    let memory = self.requests.token(key).operation.memory().slice();
                    memory.fill(range.start, range.len(), 0);
                }
                None if progress.consumed == 0 => return Ok(()),
                None => {}
            }
        }
    }
}

impl Backend for NbdBackend {
    fn submit(&mut self, operation: Operation, now: Instant) {
        if let Some(error) = &self.failed {
            return operation.complete(Err(error.clone()));
        }
        if self.is_closing {
            let error = BlockError::Disconnected("the disk is closed".into());
            return operation.complete(Err(error));
        }
        // Keep the order: add it after the operations that are already queued.
        if self.waiting.is_empty() && self.requests.in_flight() < MAX_IN_FLIGHT {
            self.start_operation(operation, now);
        } else {
            self.waiting.push_back(operation);
        }
    }

    fn flush(&mut self, now: Instant) {
        while self.requests.in_flight() < MAX_IN_FLIGHT
            && let Some(operation) = self.waiting.pop_front()
        {
            self.start_operation(operation, now);
        }
        let is_idle = self.requests.in_flight() == 0;
        if self.is_closing && is_idle && !self.has_disconnected && self.failed.is_none() {
            self.has_disconnected = true;
            self.oldest = now;
            let header = request_header(cmd::DISC, 0, Cookie(0), 0, 0);
            self.outgoing.push_header(&header);
        }
        if self.outgoing.is_empty() {
            return;
        }
        if let Err(error) = self.outgoing.send(self.socket.as_fd()) {
            self.fail(lost(&error));
        }
    }

    fn complete(&mut self, now: Instant) -> bool {
        if self.failed.is_some() {
            return false;
        }
        let (worked, is_all) = self.receive_all();
        // If this process was suspended, the replies have already been received, and the timeout
        // isn't caused by the server. If a single round can't receive all of them, wait for the
        // next round.
        if is_all && self.failed.is_none() {
            self.check_time(now);
        }
        worked
    }

    fn prepare_sleep(&mut self) -> bool {
        true
    }

    fn add_interests<'a>(&'a self, out: &mut PollInterests<'a>) {
        // Polling a failed socket would always return immediately.
        if self.failed.is_none() {
            out.push(PollInterest {
                fd: self.socket.as_fd(),
                to_read: true,
                to_write: !self.outgoing.is_empty(),
            });
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let waits = self.requests.in_flight() > 0 || self.has_disconnected;
        let waits = waits && self.failed.is_none();
        waits.then(|| self.oldest + self.timeout)
    }

    fn close(&mut self) {
        self.is_closing = true;
    }

    fn is_over(&self) -> bool {
        self.is_closing
            && (self.failed.is_some() || self.has_disconnected && self.outgoing.is_empty())
    }
}

fn lost(error: &io::Error) -> BlockError {
    BlockError::Disconnected(match error.kind() {
        io::ErrorKind::UnexpectedEof => "the NBD server closed the connection".into(),
        _ => error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use riser_block::Buffer;
    use riser_block::oneshot::oneshot;
    use riser_block::task::block_on;
    use riser_exports::nbd::proto::{Errno, simple_reply};

    use super::*;
    use crate::operation::{Done, Ended};

    fn submit(
        backend: &mut NbdBackend,
        kind: CommandKind,
        buffer: Option<Buffer>,
    ) -> impl Future<Output = Option<Ended>> + use<> {
        let (done, ended) = oneshot();
        let len = buffer.as_ref().map_or(0, |buffer| buffer.len() as u64);
        let operation = Operation {
            command: Command::new(kind, 0, len),
            buffer,
            done: Done::Task(done),
        };
        backend.submit(operation, Instant::now());
        ended
    }

    /// Creates a connection with this timeout, and the server socket.
    fn connection(patience: Duration) -> (NbdBackend, UnixStream) {
        let (ours, server) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let negotiated = Negotiated {
            size: 8 << 20,
            flags: 0,
            min_block: 512,
            preferred_block: None,
            max_payload: 4 << 20,
            structured: false,
            allocation_context: None,
        };
        let backend = NbdBackend::new(ours.into(), &negotiated, 512, patience);
        (backend, server)
    }

    /// Reads the next request header and returns its cookie.
    fn read_cookie(server: &mut UnixStream) -> u64 {
        let mut header = [0; 28];
        server.read_exact(&mut header).unwrap();
        u64::from_be_bytes(*header[8..].first_chunk().unwrap())
    }

    #[test]
    fn read_stalled_within_data_times_out() {
        let patience = Duration::from_millis(10);
        let (mut backend, mut server) = connection(patience);
        let buffer = Buffer::anonymous(4096).unwrap();
        let read = submit(&mut backend, CommandKind::Read, Some(buffer));
        backend.flush(Instant::now());
        let cookie = read_cookie(&mut server);
        let reply = simple_reply(Cookie(cookie), None);
        server.write_all(&reply).unwrap();
        server.write_all(&[1; 100]).unwrap();
        let begun = Instant::now();
        backend.complete(begun);
        backend.complete(begun + 2 * patience);
        assert_eq!(block_on(read).unwrap().result, Err(BlockError::TimedOut));
        assert_eq!(backend.failed, Some(BlockError::TimedOut));
        // Closing the connection should not change the error.
        backend.complete(begun + 3 * patience);
        assert_eq!(backend.failed, Some(BlockError::TimedOut));
    }

    #[test]
    fn received_reply_prevents_timeout() {
        let patience = Duration::from_millis(10);
        let (mut backend, mut server) = connection(patience);
        let flush = submit(&mut backend, CommandKind::Flush, None);
        backend.flush(Instant::now());
        let cookie = read_cookie(&mut server);
        server
            .write_all(&simple_reply(Cookie(cookie), None))
            .unwrap();
        // Same as if this host was suspended.
        backend.complete(Instant::now() + 2 * patience);
        assert_eq!(block_on(flush).unwrap().result, Ok(Vec::new()));
        assert!(backend.failed.is_none());
    }

    #[test]
    fn reply_before_request_closes_connection() {
        let (mut backend, mut server) = connection(Duration::from_secs(60));
        // The socket buffer can't hold this data, so the second header has to wait.
        let buffer = Buffer::anonymous(4 << 20).unwrap();
        let first = submit(&mut backend, CommandKind::Write, Some(buffer));
        let second = submit(&mut backend, CommandKind::Flush, None);
        let third = submit(&mut backend, CommandKind::Flush, None);
        backend.flush(Instant::now());
        assert!(!backend.outgoing.is_empty());
        let cookie = read_cookie(&mut server);
        // The server can reject a write before reading its data.
        let reply = simple_reply(Cookie(cookie), Some(Errno::NoSpc));
        server.write_all(&reply).unwrap();
        backend.complete(Instant::now());
        let ended = block_on(first).unwrap();
        assert_eq!(ended.result, Err(BlockError::NoSpace));
        assert!(backend.failed.is_none());
        // The cookie of the next request can be predicted.
        let guessed = Cookie(cookie + (1 << 32) + 1);
        server.write_all(&simple_reply(guessed, None)).unwrap();
        backend.complete(Instant::now());
        for ended in [block_on(second), block_on(third)] {
            let error = ended.unwrap().result.unwrap_err().to_string();
            assert!(error.contains("that was not sent yet"), "{error}");
        }
        assert!(backend.outgoing.is_empty(), "nothing is kept");
    }
}
