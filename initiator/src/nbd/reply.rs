//! Requests in flight, and their replies.
//!
//! A request is answered by its last holder: [`Answer`] and `LastChunk` send the reply, or its
//! end, when they are dropped, so that no request can be forgotten.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use riser_memory::{Memory, PAGE};

use super::budget::{Account, Share};
use super::outgoing::{Piece, Shared, Ticket};
use super::proto::{self, Cookie, Errno};
use crate::block::{BlockDevice, BlockError, Buffer, ByteDevice, Extent, ExtentKind, Span, task};

/// Most extents in one answer to `BLOCK_STATUS`.
const MAX_EXTENTS: usize = 4096;

/// A simple reply that goes out when the last part of its request is done, even if that part is
/// lost on the way.
pub(super) struct Answer {
    shared: Arc<Shared>,
    ticket: Arc<Ticket>,
    cookie: Cookie,
    /// The first failure; 0 for none.
    error: AtomicU32,
}

impl Answer {
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

    pub(super) fn settle(&self, result: Result<(), BlockError>) {
        if let Err(error) = result {
            tracing::debug!(%error, "NBD request failed");
            self.fail(Errno::from(&error));
        }
    }
}

impl Drop for Answer {
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

/// The end of a structured reply in several chunks: goes out when all of them have.
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

/// Extents in the form of `base:allocation`, neighbours of one kind merged.
pub(super) fn state_flags(extents: &[Extent], one: bool) -> Vec<(u32, u32)> {
    let mut out: Vec<(u32, u32)> = Vec::new();
    for extent in extents {
        let flags = match extent.kind {
            ExtentKind::Data => 0,
            ExtentKind::Hole => proto::chunk::STATE_HOLE | proto::chunk::STATE_ZERO,
            ExtentKind::Zero => proto::chunk::STATE_ZERO,
        };
        // The whole range has 32 bits of length, so its parts do.
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

/// A share of the export's buffers for the first piece of a request is for one of these: the
/// longest piece, or at least what the account may always have.
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

/// A buffer for the first piece of a request. A buffer is a run of pages, and what others hold may
/// leave none that is as long: then the piece is shortened. Only one of a page, or a block, is
/// worth waiting for: that is what `span` is where there is none.
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

/// A part of a reply, a buffer of the device for it, and its share of them.
type Part = (Span, Buffer, Share);

/// State of a read in flight for its reply.
pub(super) struct Reader<D> {
    pub(super) shared: Arc<Shared>,
    pub(super) device: Arc<ByteDevice<D>>,
    pub(super) cookie: Cookie,
    pub(super) structured: bool,
    pub(super) ticket: Arc<Ticket>,
}

impl<D: BlockDevice> Reader<D> {
    /// Reads and replies: with one transfer where the request and the buffers that can be had allow
    /// it.
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

    /// A long read for a client that takes it in pieces, each as soon as it is there.
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
            // Chunks go in the order in which their reads end, which structured replies allow. The
            // end of the reply is sent when the last task drops its share of `last`.
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

    /// A long read for a client that takes it in one piece only: assembled in memory of its own.
    async fn read_assembled(self, first: Part, offset: u64, len: u32) {
        let account = self.shared.account();
        let (mut next, room) = match account.try_assemble(len.into()) {
            Some(room) => (Some(first), room),
            None => {
                // Those that are assembled by now may wait for its buffer.
                drop(first);
                (None, account.assemble(len.into()).await)
            }
        };
        let whole = match Buffer::anonymous(len as usize) {
            Ok(whole) => whole,
            Err(error) => return self.refuse(&BlockError::Io(error.to_string()), offset),
        };
        // Piece by piece, each in the device's memory only while it is read: the whole may be
        // larger than what the device has, and waiting for all of it could lock up connections.
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

    /// The first part of what is left of the reply.
    async fn piece(&self, offset: u64, left: u32) -> Part {
        let (account, left) = (self.shared.account(), left.into());
        let (most, least) = first_pieces(&self.device, account, offset, left);
        let (mut span, share) = account.take(&most, &least).await;
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
