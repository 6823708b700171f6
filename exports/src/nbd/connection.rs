//! Client connection: reads requests from the stream and starts them.

use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::task::Waker;

use arrayvec::ArrayVec;
use riser_block::poll_fds::{PollInterest, PollInterests};
use riser_block::{
    BlockDevice, Buffer, ByteDevice, LossCursor, Service, ServiceStatus, Span, ZeroOptions, task,
};
use riser_memory::sys::{self, ReceivePiece};

use super::Export;
use super::budget::Share;
use super::machine::{Event, Machine};
use super::outgoing::{Piece, Shared, Ticket};
use super::proto::{self, Cookie, Errno};
use super::reply::{PendingReply, Reader, first_pieces, state_flags, try_buffer};
use super::transmission::{Command, NbdRequest};
use crate::looks::Looks;

/// Receive buffer size: enough for multiple options or thousands of requests.
const RECEIVE: usize = 64 << 10;

/// Min size for a long write. After one of these, we expect that the next write is also long, so we
/// only receive up to [`AHEAD`] bytes after a payload, because data received with the next header
/// must be copied.
const LONG_WRITE: u32 = 32 << 10;
const AHEAD: usize = 4 << 10;

/// Max receive calls, and max requests, per turn. After this, other connections get a chance.
const RECEIVES: usize = 16;
const REQUESTS: usize = 64;

/// Max unsent bytes. Above this, we stop reading requests which are rejected.
const MAX_BACKLOG: usize = 256 << 10;

/// Condition required to continue.
enum Need {
    /// More data from the client.
    Bytes,
    /// A completed request, a free buffer or socket buffer space.
    Room,
    /// A new turn.
    Turn,
    /// Nothing, because the client is done.
    Nothing,
}

/// Write with a partially received payload.
struct Receiving {
    reply: Arc<PendingReply>,
    fua: bool,
    /// Offset for the next piece.
    offset: u64,
    /// Remaining bytes in this write, starting at `offset`.
    left: u32,
    /// Next piece and its share of the export's buffers, if there is no buffer for it yet.
    share: Option<(Span, Share)>,
    piece: Option<Filling>,
}

/// Piece of a write which is currently received.
struct Filling {
    span: Span,
    buffer: Buffer,
    share: Share,
    filled: usize,
}

/// Client connection.
pub(super) struct Connection<D> {
    shared: Arc<Shared>,
    device: Arc<ByteDevice<D>>,
    machine: Machine,
    received: Vec<u8>,
    /// Unprocessed bytes in `received`.
    valid: Range<usize>,
    /// Set if the last write was a long write.
    writes_long: bool,
    receiving: Option<Receiving>,
    waker: Waker,
    ended: bool,
    /// Event count seen in the last turn.
    seen: u64,
    /// Set if the last turn needed more data.
    to_read: bool,
    /// Remaining requests which can be processed in this turn, including options and rejected
    /// requests.
    requests: usize,
    looks: Looks,
    /// Lost writes already reported to this client.
    losses: Arc<LossCursor>,
    /// Dropped with the connection.
    _presence: Arc<()>,
}

impl<D: BlockDevice> Connection<D> {
    pub(super) fn new(
        shared: Arc<Shared>,
        device: Arc<ByteDevice<D>>,
        export: Export,
        presence: Arc<()>,
    ) -> Self {
        Self {
            waker: Waker::from(shared.bell().clone()),
            shared,
            losses: Arc::new(device.loss_cursor()),
            device,
            machine: Machine::new(export),
            received: vec![0; RECEIVE],
            valid: 0..0,
            writes_long: false,
            receiving: None,
            ended: false,
            seen: 0,
            to_read: true,
            requests: 0,
            looks: Looks::new(),
            _presence: presence,
        }
    }

    /// Checks again for room, because it may have become available before we registered for
    /// notification.
    fn can_continue(&self) -> bool {
        // If there is no buffer, it has a separate waker, which is counted as an event.
        self.receiving.is_none()
            && self.shared.has_room(&self.waker)
            && self.shared.backlog() <= Some(MAX_BACKLOG)
    }

    /// Processes as much of the received data as possible.
    fn advance(&mut self) -> Need {
        loop {
            if let Some(head) = self.machine.poll_output() {
                self.shared.push(Piece {
                    head,
                    data: None,
                    share: None,
                    ticket: None,
                });
            }
            let backlog = self.shared.backlog();
            if self.ended || backlog.is_none() {
                if let Some(write) = self.receiving.take() {
                    // The connection was closed during this write.
                    write.reply.fail(Errno::Io);
                }
                return Need::Nothing;
            }
            if backlog > Some(MAX_BACKLOG) && self.receiving.is_none() {
                return Need::Room;
            }
            if self.receiving.is_some() {
                match self.advance_write() {
                    Some(need) => return need,
                    None => continue,
                }
            }
            if !self.shared.has_room(&self.waker) {
                return Need::Room;
            }
            if self.requests == 0 {
                return Need::Turn;
            }
            let input = &self.received[self.valid.clone()];
            match self.machine.handle(input) {
                Ok(progress) => {
                    self.valid.start += progress.consumed;
                    self.requests -= usize::from(progress.consumed > 0);
                    match progress.event {
                        Some(Event::Request(request)) => self.start(request),
                        Some(Event::Disconnect) => self.ended = true,
                        None if progress.consumed == 0 => return Need::Bytes,
                        None => {}
                    }
                }
                Err(fault) => {
                    tracing::info!(%fault, "NBD client violated the protocol; disconnecting it");
                    self.ended = true;
                }
            }
        }
    }

    /// Moves payload into its buffer and starts complete pieces. Returns the missing resource, or
    /// `None` if the write has been started.
    fn advance_write(&mut self) -> Option<Need> {
        let write = self.receiving.as_mut().expect("the caller checked");
        loop {
            if write.left == 0 {
                self.receiving = None;
                return None;
            }
            let piece = match &mut write.piece {
                Some(piece) => piece,
                empty => {
                    let (offset, left) = (write.offset, write.left.into());
                    let account = self.shared.account();
                    let share = write.share.take().or_else(|| {
                        let (most, least) = first_pieces(&self.device, account, offset, left);
                        account.take_or_wake(&most, &least, &self.waker)
                    });
                    let Some((mut span, share)) = share else {
                        return Some(Need::Room);
                    };
                    // Try again after registering the waker: the last buffer may have been released
                    // in between, and then nothing would wake this thread.
                    let buffer = try_buffer(&self.device, &mut span, offset, left).or_else(|| {
                        self.device.device().wake_when_free(&self.waker);
                        self.device.try_buffer(&span)
                    });
                    let Some(buffer) = buffer else {
                        write.share = Some((span, share));
                        return Some(Need::Room);
                    };
                    empty.insert(Filling {
                        span,
                        buffer,
                        share,
                        filled: 0,
                    })
                }
            };
            let n = self.valid.len().min(piece.span.len - piece.filled);
            piece.buffer.slice().write(
                piece.span.head + piece.filled,
                &self.received[self.valid.start..self.valid.start + n],
            );
            self.valid.start += n;
            piece.filled += n;
            self.machine.handle_payload(n as u32);
            if piece.filled < piece.span.len {
                return Some(Need::Bytes);
            }
            let Filling {
                span,
                buffer,
                share,
                ..
            } = write.piece.take().expect("just filled");
            write.offset += span.len as u64;
            write.left -= span.len as u32;
            let (device, reply, fua) = (self.device.clone(), write.reply.clone(), write.fua);
            task::spawn(async move {
                let result = device.write(span, buffer, fua).await;
                drop(share);
                reply.send_result(result);
            });
        }
    }

    /// Receives available data from the socket; payload is received directly into its buffer.
    /// Returns whether there was data or the stream was closed.
    fn receive(&mut self) -> bool {
        if self.valid.is_empty() {
            self.valid = 0..0;
        } else if self.valid.start > 0 {
            self.received.copy_within(self.valid.clone(), 0);
            self.valid = 0..self.valid.len();
        }
        let mut pieces = ArrayVec::<_, 2>::new();
        let mut direct = 0;
        if let Some(piece) = self.receiving.as_ref().and_then(|w| w.piece.as_ref()) {
            // All previous data has already been copied to the buffer.
            debug_assert!(self.valid.is_empty());
            direct = piece.span.len - piece.filled;
            let at = piece.span.head + piece.filled;
            pieces.push(ReceivePiece::part(piece.buffer.slice(), at..at + direct));
        }
        // There is always enough space, because the remaining data is less than one message.
        let end = if self.writes_long { AHEAD } else { RECEIVE };
        pieces.push(ReceivePiece::from(&mut self.received[self.valid.end..end]));
        let received = sys::receive(self.shared.socket().as_fd(), &mut pieces);
        drop(pieces);
        let n = match received {
            Ok(n) => n,
            Err(error) => {
                return match error.kind() {
                    io::ErrorKind::WouldBlock => false,
                    io::ErrorKind::Interrupted => true,
                    _ => {
                        tracing::debug!(%error, "NBD client disconnected");
                        self.ended = true;
                        true
                    }
                };
            }
        };
        if n == 0 {
            self.ended = true;
            return true;
        }
        let into_piece = n.min(direct);
        if let Some(piece) = self.receiving.as_mut().and_then(|w| w.piece.as_mut()) {
            piece.filled += into_piece;
            self.machine.handle_payload(into_piece as u32);
        }
        self.valid.end += n - into_piece;
        true
    }

    fn start(&mut self, request: NbdRequest) {
        let NbdRequest {
            cookie,
            command,
            offset,
            len,
        } = request;
        let range = offset..offset + u64::from(len);
        let moved = match command {
            Command::Read { .. } | Command::Write { .. } => u64::from(len),
            _ => 0,
        };
        let ticket = self.shared.ticket(moved);
        match command {
            Command::Read { dont_fragment } => {
                return self.start_read(request, dont_fragment, ticket);
            }
            Command::BlockStatus { one } => return self.start_status(cookie, range, one, ticket),
            _ => {}
        }
        let reply = Arc::new(PendingReply::new(self.shared.clone(), ticket, cookie));
        let device = self.device.clone();
        let losses = self.losses.clone();
        match command {
            Command::Write { fua } => {
                self.writes_long = len >= LONG_WRITE;
                self.receiving = Some(Receiving {
                    reply,
                    fua,
                    offset,
                    left: len,
                    share: None,
                    piece: None,
                });
            }
            Command::Flush => {
                task::spawn(async move { reply.send_result(device.flush_for(&losses).await) });
            }
            Command::Trim { fua } => task::spawn(async move {
                reply.send_result(device.discard(range).await);
                if fua {
                    reply.send_result(device.flush_for(&losses).await);
                }
            }),
            Command::WriteZeroes { fua, no_hole, fast } => {
                let options = ZeroOptions {
                    may_unmap: !no_hole,
                    fua,
                    fast,
                };
                task::spawn(async move {
                    reply.send_result(device.write_zeroes(range, options).await);
                });
            }
            // Dropping the request sends the reply.
            Command::Cache => {}
            Command::Read { .. } | Command::BlockStatus { .. } => unreachable!("handled above"),
        }
    }

    fn start_read(&self, request: NbdRequest, dont_fragment: bool, ticket: Arc<Ticket>) {
        let reader = Reader {
            shared: self.shared.clone(),
            device: self.device.clone(),
            cookie: request.cookie,
            structured: self.machine.is_structured(),
            ticket,
        };
        let (offset, len) = (request.offset, request.len);
        task::spawn(async move { reader.read(offset, len, dont_fragment).await });
    }

    fn start_status(&self, cookie: Cookie, range: Range<u64>, one: bool, ticket: Arc<Ticket>) {
        let (shared, device) = (self.shared.clone(), self.device.clone());
        task::spawn(async move {
            let head = match device.status(range).await {
                Ok(extents) => proto::status_chunk(cookie, &state_flags(&extents, one)),
                Err(error) => proto::error_chunk(cookie, Errno::from(&error), None, true),
            };
            shared.push(Piece {
                head,
                data: None,
                share: None,
                ticket: Some(ticket),
            });
        });
    }
}

impl<D: BlockDevice> Service for Connection<D> {
    fn run_once(&mut self) -> ServiceStatus {
        if self.shared.bell().events() != self.seen {
            self.looks.expect();
        } else if !self.looks.is_due() {
            return ServiceStatus::Waiting;
        }
        let mut turn = ServiceStatus::Waiting;
        self.requests = REQUESTS;
        for _ in 0..RECEIVES {
            self.seen = self.shared.bell().events();
            let has_sent = self.shared.flush();
            let need = self.advance();
            self.to_read = matches!(need, Need::Bytes);
            // Must be set before checking for free resources.
            self.shared.want_tickets(!self.to_read);
            let continues = match need {
                // Also used if we can no longer send: requests in flight still use memory and
                // descriptors, so the client remains counted until they complete.
                Need::Nothing if self.shared.is_idle() => return ServiceStatus::Over,
                Need::Nothing => false,
                Need::Turn => return ServiceStatus::Worked,
                Need::Room => self.can_continue(),
                Need::Bytes => self.receive(),
            };
            // Free resources cause an event, but if the client starts to read again, there is no
            // event.
            if continues || has_sent {
                self.looks.expect();
            } else {
                self.looks.note_vain();
            }
            if continues || self.requests < REQUESTS {
                turn = ServiceStatus::Worked;
            }
            if !continues {
                return turn;
            }
        }
        turn
    }

    fn prepare_sleep(&mut self) -> bool {
        self.shared.bell().prepare_sleep(self.seen)
    }

    fn add_interests<'a>(&'a self, out: &mut PollInterests<'a>) {
        out.push(PollInterest::reading(self.shared.bell().fd()));
        let to_write = self.shared.backlog() > Some(0);
        // If we don't need the socket, a closed connection must not prevent us from sleeping.
        if self.to_read || to_write {
            out.push(PollInterest {
                fd: self.shared.socket(),
                to_read: self.to_read,
                to_write,
            });
        }
    }

    fn end_sleep(&mut self) {
        self.shared.bell().end_sleep();
        // The socket may have caused the wakeup.
        self.looks.expect();
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use riser_block::MemoryDevice;

    use super::super::budget::{Account, Budget};
    use super::super::proto::{OPTION_MAGIC, REQUEST_MAGIC, cmd, handshake_flag, opt};
    use super::*;

    /// Creates a connection after the handshake, and its client.
    fn connection() -> (Connection<MemoryDevice>, UnixStream) {
        let device = Arc::new(MemoryDevice::new(1 << 20, 512).unwrap());
        let budget = Arc::new(Budget::new(device.buffer_bytes(), 512));
        let (ours, mut peer) = UnixStream::pair().unwrap();
        let shared = Arc::new(Shared::new(ours, Account::new(budget)).unwrap());
        let export = Export {
            name: String::new(),
            description: String::new(),
            size: 1 << 20,
            preferred_block: 4096,
            read_only: false,
            can_trim: false,
        };
        let device = Arc::new(ByteDevice::new(device));
        let mut connection = Connection::new(shared, device, export, Arc::default());
        let flags = u32::from(handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES);
        let mut bytes = flags.to_be_bytes().to_vec();
        bytes.extend(OPTION_MAGIC.to_be_bytes());
        bytes.extend(opt::EXPORT_NAME.to_be_bytes());
        bytes.extend([0; 4]);
        peer.write_all(&bytes).unwrap();
        while connection.run_once() == ServiceStatus::Worked {}
        // Greeting and export info.
        peer.read_exact(&mut [0; 18 + 10]).unwrap();
        peer.set_nonblocking(true).unwrap();
        (connection, peer)
    }

    /// Requests which complete immediately and do nothing.
    fn requests(number: usize) -> Vec<u8> {
        let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
        bytes.extend([0; 2]);
        bytes.extend(cmd::CACHE.to_be_bytes());
        bytes.extend([0; 20]);
        bytes.repeat(number)
    }

    #[test]
    fn disconnected_client_remains_until_requests_complete() {
        let (mut connection, peer) = connection();
        let ticket = connection.shared.ticket(0);
        drop(peer);
        connection.shared.push(Piece {
            head: vec![0; 16],
            data: None,
            share: None,
            ticket: None,
        });
        assert_eq!(connection.shared.backlog(), None);
        for _ in 0..100 {
            assert_ne!(connection.run_once(), ServiceStatus::Over);
        }
        assert!(connection.prepare_sleep(), "it waits for the request");
        drop(ticket);
        connection.end_sleep();
        assert_eq!(connection.run_once(), ServiceStatus::Over);
    }

    #[test]
    fn turn_handles_bounded_requests() {
        const MANY: usize = 1000;
        let (mut connection, mut peer) = connection();
        peer.write_all(&requests(MANY)).unwrap();
        let (mut received, mut turns) = (0, 0);
        let mut room = [0; 1 << 16];
        while connection.run_once() == ServiceStatus::Worked {
            turns += 1;
            let before = received;
            while let Ok(n) = peer.read(&mut room) {
                received += n;
            }
            assert!(received - before <= REQUESTS * 16, "{}", received - before);
        }
        assert_eq!(received, MANY * 16);
        assert!(turns > MANY / REQUESTS, "{turns} turns");
    }

    #[test]
    fn idle_client_is_polled_after_sleep() {
        let (mut connection, mut peer) = connection();
        let be_quiet = |connection: &mut Connection<_>| {
            for _ in 0..100 {
                assert_eq!(connection.run_once(), ServiceStatus::Waiting);
            }
        };
        be_quiet(&mut connection);
        peer.write_all(&requests(1)).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(1));
        assert_eq!(connection.run_once(), ServiceStatus::Worked);
        be_quiet(&mut connection);
        connection.looks.defer_check();
        peer.write_all(&requests(1)).unwrap();
        assert_eq!(connection.run_once(), ServiceStatus::Waiting);
        assert!(connection.prepare_sleep());
        connection.end_sleep();
        assert_eq!(connection.run_once(), ServiceStatus::Worked);
    }

    #[test]
    fn stalled_client_is_polled_like_idle() {
        let (mut connection, mut peer) = connection();
        let socket = connection.shared.socket();
        rustix::net::sockopt::set_socket_send_buffer_size(socket, 64 << 10).unwrap();
        // More than the socket buffer can hold. In the second case there is no space for new
        // requests either.
        for len in [MAX_BACKLOG, 8 * MAX_BACKLOG] {
            connection.shared.push(Piece {
                head: vec![0; len],
                data: None,
                share: None,
                ticket: None,
            });
            for _ in 0..100 {
                connection.run_once();
            }
            assert!(connection.shared.backlog() > Some(0));
            assert!(connection.looks.is_quiet());
        }
        // Reading will wake the connection, so it should send the next piece immediately.
        let (mut read, mut room) = (0, vec![0; MAX_BACKLOG]);
        while read < 9 * MAX_BACKLOG {
            read += peer.read(&mut room).unwrap();
            assert!(connection.prepare_sleep());
            connection.end_sleep();
            connection.run_once();
        }
        assert_eq!(connection.shared.backlog(), Some(0));
    }

    #[test]
    fn long_writes_are_received_in_place() {
        const LEN: usize = 64 << 10;
        let (mut connection, mut peer) = connection();
        let mut write = |connection: &mut Connection<_>, offset: u64, byte: u8| {
            let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
            bytes.extend([0; 2]);
            bytes.extend(cmd::WRITE.to_be_bytes());
            bytes.extend([byte; 8]);
            bytes.extend(offset.to_be_bytes());
            bytes.extend((LEN as u32).to_be_bytes());
            bytes.extend([byte; LEN]);
            peer.write_all(&bytes).unwrap();
            while connection.run_once() == ServiceStatus::Worked {}
            let mut reply = [0; 16];
            peer.read_exact(&mut reply).unwrap();
            assert_eq!((&reply[4..8], &reply[8..]), (&[0; 4][..], &[byte; 8][..]));
        };
        write(&mut connection, 0, 1);
        connection.received.fill(0);
        write(&mut connection, LEN as u64, 2);
        assert!(connection.received[AHEAD..].iter().all(|byte| *byte == 0));
        let mut stored = vec![0; 2 * LEN];
        let disk = connection.device.device();
        disk.memory().read(0, &mut stored);
        assert!(stored[..LEN].iter().all(|byte| *byte == 1));
        assert!(stored[LEN..].iter().all(|byte| *byte == 2));
    }

    #[test]
    fn reply_triggers_immediate_client_poll() {
        let (mut connection, mut peer) = connection();
        connection.looks.defer_check();
        peer.write_all(&requests(1)).unwrap();
        assert_eq!(connection.run_once(), ServiceStatus::Waiting);
        // Same as for a request which completes while the connection isn't running.
        connection.shared.push(Piece {
            head: vec![0; 16],
            data: None,
            share: None,
            ticket: None,
        });
        assert_eq!(connection.run_once(), ServiceStatus::Worked);
    }
}
