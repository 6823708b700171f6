//! Requests in flight and their replies.
//!
//! A request is completed when it is dropped: [`PendingReply`] sends the reply and `LastChunk` sends the
//! final chunk on drop, so we can't lose a request.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use riser_block::{BlockDevice, BlockError, Buffer, ByteDevice, Extent, ExtentKind, Span, task};
use riser_memory::{Memory, PAGE};

use super::budget::{Account, Share};
use super::outgoing::{Piece, Shared, Ticket};
use super::proto::{self, Cookie, Errno};

/// Max extents in a `BLOCK_STATUS` reply.
const MAX_EXTENTS: usize = 4096;

/// Simple reply which is sent when all parts of the request are done, even if a part is dropped.
pub(super) struct PendingReply {
    shared: Arc<Shared>,
    ticket: Arc<Ticket>,
    cookie: Cookie,
    /// First error; 0 if there is no error.
    error: AtomicU32,
}

impl PendingReply {
    pub(super) fn new(shared: Arc<Shared>, ticket: Arc<Ticket>, cookie: Cookie) -> Self {
        Self {
            shared,
            ticket,
            cookie,
            error: AtomicU32::new(0),
        }
    }

    pub(super) fn fail(&self, error: Errno) {
        let _ = self
            .error
            .compare_exchange(0, error as u32, Ordering::AcqRel, Ordering::Relaxed);
    }

    pub(super) fn send_result(&self, result: Result<(), BlockError>) {
        if let Err(error) = result {
            tracing::debug!(%error, "NBD request failed");
            self.fail(Errno::from(&error));
        }
    }
}

impl Drop for PendingReply {
    fn drop(&mut self) {
        let mut head = proto::simple_reply(self.cookie, None).to_vec();
        head[4..8].copy_from_slice(&self.error.load(Ordering::Acquire).to_be_bytes());
        self.shared.push(Piece {
            head,
            data: None,
            share: None,
            ticket: Some(self.ticket.clone()),
        });
    }
}

/// Final chunk in a structured reply, sent when all data chunks have been sent.
struct LastChunk {
    shared: Arc<Shared>,
    ticket: Arc<Ticket>,
    cookie: Cookie,
}

impl Drop for LastChunk {
    fn drop(&mut self) {
        self.shared.push(Piece {
            head: proto::done_chunk(self.cookie),
            data: None,
            share: None,
            ticket: Some(self.ticket.clone()),
        });
    }
}

/// Converts extents to `base:allocation` format, merging adjacent extents with the same type.
pub(super) fn state_flags(extents: &[Extent], one: bool) -> Vec<(u32, u32)> {
    let mut out: Vec<(u32, u32)> = Vec::new();
    for extent in extents {
        let flags = match extent.kind {
            ExtentKind::Data => 0,
            ExtentKind::Hole => proto::chunk::STATE_HOLE | proto::chunk::STATE_ZERO,
            ExtentKind::Zero => proto::chunk::STATE_ZERO,
        };
        // The full range has a 32-bit length, so this fits.
        let len = u32::try_from(extent.len).expect("an extent is within the requested range");
        match out.last_mut() {
            Some((last, of)) if *of == flags => *last += len,
            Some(_) if one => break,
            _ => out.push((len, flags)),
        }
        if out.len() == MAX_EXTENTS {
            break;
        }
    }
    out
}

/// Returns spans for the first piece of a request, used to allocate a share of the export's
/// buffers: the largest possible piece, and the minimum which is always available to the account.
pub(super) fn first_pieces<D: BlockDevice>(
    device: &ByteDevice<D>,
    account: &Account,
    offset: u64,
    left: u64,
) -> (Span, Span) {
    let most = device.first_piece(offset, left);
    let least = device.first_piece_within(offset, left, account.floor());
    (most, least)
}

/// Allocates a buffer for the first piece of a request. A buffer must use contiguous pages, which
/// may not be available because of fragmentation: in this case we use a smaller piece. It only
/// makes sense to wait for a single page or block, so `span` is set to this size on failure.
pub(super) fn try_buffer<D: BlockDevice>(
    device: &ByteDevice<D>,
    span: &mut Span,
    offset: u64,
    left: u64,
) -> Option<Buffer> {
    loop {
        if let Some(buffer) = device.try_buffer(span) {
            return Some(buffer);
        }
        let most = (span.covering / 2).max(PAGE);
        let half = device.first_piece_within(offset, left.min(span.len as u64), most as u64);
        if half == *span {
            return None;
        }
        *span = half;
    }
}

/// Part of a reply: range, device buffer and buffer share.
type Part = (Span, Buffer, Share);

/// State for a read in flight.
pub(super) struct Reader<D> {
    pub(super) shared: Arc<Shared>,
    pub(super) device: Arc<ByteDevice<D>>,
    pub(super) cookie: Cookie,
    pub(super) structured: bool,
    pub(super) ticket: Arc<Ticket>,
}

impl<D: BlockDevice> Reader<D> {
    /// Reads data and sends the reply, using a single transfer if allowed by the request and the
    /// available buffers.
    pub(super) async fn read(self, offset: u64, len: u32, dont_fragment: bool) {
        let first = self.piece(offset, len).await;
        if first.0.len == len as usize {
            self.read_whole(first, offset).await;
        } else if self.structured && !dont_fragment {
            self.read_in_chunks(first, offset, len).await;
        } else {
            self.read_assembled(first, offset, len).await;
        }
    }

    async fn read_whole(self, (span, buffer, share): Part, offset: u64) {
        match self.device.read(span, buffer).await {
            Ok(buffer) => {
                self.reply(offset, buffer, span.head..span.head + span.len, share);
            }
            Err(error) => self.refuse(&error, offset),
        }
    }

    /// Handles a large read if the client supports chunks; each chunk is sent as soon as it is
    /// available.
    async fn read_in_chunks(self, first: Part, mut offset: u64, mut left: u32) {
        let mut next = Some(first);
        let last = Arc::new(LastChunk {
            shared: self.shared.clone(),
            ticket: self.ticket.clone(),
            cookie: self.cookie,
        });
        while left > 0 {
            let (span, buffer, share) = match next.take() {
                Some(first) => first,
                None => self.piece(offset, left).await,
            };
            let (last, device) = (last.clone(), self.device.clone());
            let cookie = self.cookie;
            // Chunks are sent when their reads complete, because structured replies can be out of
            // order. The final chunk is sent when the last task drops its reference to `last`.
            task::spawn(async move {
                let piece = match device.read(span, buffer).await {
                    Ok(buffer) => Piece {
                        head: proto::data_chunk(cookie, offset, span.len as u32, false),
                        data: Some((buffer, span.head..span.head + span.len)),
                        share: Some(share),
                        ticket: None,
                    },
                    Err(error) => Piece {
                        head: proto::error_chunk(cookie, Errno::from(&error), Some(offset), false),
                        data: None,
                        share: None,
                        ticket: None,
                    },
                };
                last.shared.push(piece);
            });
            offset += span.len as u64;
            left -= span.len as u32;
        }
    }

    /// Handles a large read if the client doesn't support chunks: assembled in separate memory.
    async fn read_assembled(self, first: Part, offset: u64, len: u32) {
        let account = self.shared.account();
        let (mut next, room) = match account.try_assemble(len.into()) {
            Some(room) => (Some(first), room),
            None => {
                // Other assembled replies may be waiting for this buffer.
                drop(first);
                (None, account.assemble(len.into()).await)
            }
        };
        let whole = match Buffer::anonymous(len as usize) {
            Ok(whole) => whole,
            Err(error) => return self.refuse(&BlockError::Io(error.to_string()), offset),
        };
        // Read piece by piece, so device memory is only used during each read: the full range may
        // be larger than the device buffers, and waiting for all of it could cause a deadlock.
        let mut done = 0;
        while done < len as usize {
            let at = offset + done as u64;
            let (span, buffer, _share) = match next.take() {
                Some(first) => first,
                None => self.piece(at, len - done as u32).await,
            };
            match self.device.read(span, buffer).await {
                Ok(buffer) => {
                    let (from, to) = (buffer.slice(), whole.slice());
                    Memory::copy(
                        from.memory(),
                        from.offset() + span.head,
                        to.memory(),
                        to.offset() + done,
                        span.len,
                    );
                }
                Err(error) => return self.refuse(&error, at),
            }
            done += span.len;
        }
        self.reply(offset, whole, 0..len as usize, room);
    }

    /// Allocates the next part of the reply.
    async fn piece(&self, offset: u64, left: u32) -> Part {
        let (account, left) = (self.shared.account(), left.into());
        let (most, least) = first_pieces(&self.device, account, offset, left);
        let (mut span, share) = account.acquire_share(&most, &least).await;
        let buffer = match try_buffer(&self.device, &mut span, offset, left) {
            Some(buffer) => buffer,
            None => self.device.device().buffer(span.covering).await,
        };
        (span, buffer, share)
    }

    fn reply(self, offset: u64, buffer: Buffer, range: Range<usize>, share: Share) {
        let head = if self.structured {
            proto::data_chunk(self.cookie, offset, range.len() as u32, true)
        } else {
            proto::simple_reply(self.cookie, None).to_vec()
        };
        self.shared.push(Piece {
            head,
            data: Some((buffer, range)),
            share: Some(share),
            ticket: Some(self.ticket),
        });
    }

    fn refuse(self, error: &BlockError, offset: u64) {
        tracing::debug!(%error, offset, "NBD read failed");
        let errno = Errno::from(error);
        let head = if self.structured {
            proto::error_chunk(self.cookie, errno, Some(offset), true)
        } else {
            proto::simple_reply(self.cookie, Some(errno)).to_vec()
        };
        self.shared.push(Piece {
            head,
            data: None,
            share: None,
            ticket: Some(self.ticket),
        });
    }
}
