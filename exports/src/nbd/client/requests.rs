//! Requests in flight on a connection, and reply processing.
//!
//! ```text
//! Reply ──simple reply of a read, data chunk──> Payload ──last chunk──> End ──> Reply
//!   │ ▲                                           │ └───── more chunks follow ───▲
//!   │ └─────── other replies, chunks ─────────────┘
//!   └──status chunk──> Extents ──> Reply or End    any of them ──fault, drain──> Closed
//! ```
//!
//! Call [`Requests::submit`] to get a header, and send it, for writes followed by the data. Pass
//! received data to [`Requests::handle`], which consumes the input for one step. If
//! [`Requests::payload`] returns a range, read data is next in the stream: the driver should
//! receive these bytes directly into the buffer and then call [`Requests::handle_payload`].

use riser_block::{BlockError, Extent, ExtentKind};
use riser_state::become_state;
use slab::Slab;
use thiserror::Error;

use super::coverage::Coverage;
use crate::nbd::cursor::Cursor;
use crate::nbd::proto::{
    self, CHUNK_LEN, Cookie, Errno, MAX_STRING, REQUEST_LEN, SIMPLE_REPLY_LEN, SIMPLE_REPLY_MAGIC,
    STRUCTURED_REPLY_MAGIC, chunk, cmd, cmd_flag,
};

/// Max requests in flight per connection. The protocol doesn't define a limit; servers have their
/// own, and then stop reading.
pub const MAX_IN_FLIGHT: usize = 1024;
/// Max separate ranges tracked for a read.
pub(super) const MAX_PIECES: usize = 16_384;
/// Max extents returned for a reply; if there are more, a smaller range is reported.
pub(super) const MAX_EXTENTS: usize = 4096;

/// Request. Offsets and lengths are in bytes, and must be within the export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Reads data.
    Read {
        /// First byte.
        offset: u64,
        /// Number of bytes, must not be 0.
        len: u32,
    },
    /// Writes the data after the header.
    Write {
        /// First byte.
        offset: u64,
        /// Number of bytes, must not be 0.
        len: u32,
        /// Data must be on stable storage before the reply.
        fua: bool,
    },
    /// Flushes completed writes to stable storage.
    Flush,
    /// Discards contents.
    Trim {
        /// First byte.
        offset: u64,
        /// Number of bytes, must not be 0.
        len: u32,
    },
    /// Sets a range to zero.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Number of bytes, must not be 0.
        len: u32,
        /// The space must remain allocated.
        no_hole: bool,
        /// Zeroes must be on stable storage before the reply.
        fua: bool,
    },
    /// Requests the allocation status of a range.
    BlockStatus {
        /// First byte.
        offset: u64,
        /// Number of bytes, must not be 0.
        len: u32,
    },
}

impl Request {
    fn header(self, cookie: Cookie) -> [u8; REQUEST_LEN] {
        let flag = |is_set: bool, flag: u16| if is_set { flag } else { 0 };
        let (command, flags, offset, len) = match self {
            Self::Read { offset, len } => (cmd::READ, 0, offset, len),
            Self::Write { offset, len, fua } => (cmd::WRITE, flag(fua, cmd_flag::FUA), offset, len),
            Self::Flush => (cmd::FLUSH, 0, 0, 0),
            Self::Trim { offset, len } => (cmd::TRIM, 0, offset, len),
            Self::WriteZeroes {
                offset,
                len,
                no_hole,
                fua,
            } => (
                cmd::WRITE_ZEROES,
                flag(no_hole, cmd_flag::NO_HOLE) | flag(fua, cmd_flag::FUA),
                offset,
                len,
            ),
            Self::BlockStatus { offset, len } => (cmd::BLOCK_STATUS, 0, offset, len),
        };
        proto::request_header(command, flags, cookie, offset, len)
    }
}

/// Protocol error in a reply from the server. The stream can no longer be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ReplyFault {
    /// Reply with an invalid magic number.
    #[error("invalid magic {0:#010x} of a reply")]
    Magic(u32),
    /// Reply for a request which is not in flight.
    #[error("reply to request {0:#x}, which is not in flight")]
    Cookie(u64),
    /// Reply received before the request was sent.
    #[error("reply to a request that was not sent yet")]
    Early,
    /// Chunk without structured replies enabled, or simple read reply with structured replies
    /// enabled.
    #[error("reply format was not negotiated")]
    Form,
    /// Chunk type which is unknown or doesn't match the request.
    #[error("unexpected chunk of type {kind} for its request")]
    Kind {
        /// Chunk type.
        kind: u16,
    },
    /// Invalid length for this chunk type.
    #[error("invalid length of {len} bytes of a chunk of type {kind}")]
    Length {
        /// Chunk type.
        kind: u16,
        /// Payload length in bytes.
        len: u32,
    },
    /// Data which was not requested, or already received.
    #[error(
        "reply with {len} bytes from byte {offset}, which were not requested or already received"
    )]
    Data {
        /// First byte in the export.
        offset: u64,
        /// Number of bytes.
        len: u32,
    },
    /// The reply is complete, but some data is missing.
    #[error("missing data in the reply to a read from byte {offset}")]
    Missing {
        /// First byte of the read.
        offset: u64,
    },
    /// Read reply with more than [`MAX_PIECES`] separate ranges.
    #[error("reply to a read has more than {MAX_PIECES} separate pieces")]
    TooManyPieces,
    /// No extents, an extent with zero length, or a context which was not selected.
    #[error("status reply without requested extents")]
    Extents,
    /// Error reply without an error code.
    #[error("error chunk with error 0")]
    NoError,
    /// Data received after a fault.
    #[error("the connection is closed")]
    Closed,
}

/// Request completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestOutcome {
    /// Error reported by the server, if any.
    pub result: Result<(), BlockError>,
    /// Extents for a status request, starting with the first byte, in whole blocks.
    pub extents: Vec<Extent>,
}

/// Result of a step.
#[derive(Debug, PartialEq, Eq)]
pub enum Event<T> {
    /// The request is complete.
    Done(T, RequestOutcome),
    /// Part of a read which must be filled with zeroes by the caller. Offsets are relative to the
    /// request; use [`Requests::token`] to get the request.
    Hole(usize, std::ops::Range<usize>),
}

/// Result of a call to [`Requests::handle`].
#[derive(Debug, PartialEq, Eq)]
pub struct Progress<T> {
    /// Number of input bytes consumed. If it is 0 and there is no event, more data is required.
    pub consumed: usize,
    /// Event caused by these bytes.
    pub event: Option<Event<T>>,
}

impl<T> Progress<T> {
    fn took(consumed: usize) -> Self {
        Self {
            consumed,
            event: None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A reply header is next.
    Reply,
    /// Read data, starting at offset `at`.
    Payload {
        key: usize,
        at: u32,
        left: u32,
        is_last: bool,
    },
    /// Extents for a status request.
    Extents {
        key: usize,
        left: u32,
        is_last: bool,
    },
    /// The reply is complete.
    End { key: usize },
    /// Protocol error, or the requests were removed.
    Closed,
}

impl riser_state::State for State {
    fn may_become(&self, next: &Self) -> bool {
        use State::{Closed, End, Extents, Payload, Reply};
        match self {
            Reply => !matches!(next, Reply),
            Payload { .. } => matches!(next, Reply | End { .. } | Closed),
            Extents { .. } => matches!(next, Reply | End { .. } | Extents { .. } | Closed),
            End { .. } => matches!(next, Reply | Closed),
            Closed => false,
        }
    }
}

/// Request in flight.
#[derive(Debug)]
struct Pending<T> {
    token: T,
    generation: u32,
    request: Request,
    coverage: Coverage,
    extents: Vec<(u32, u32)>,
    error: Option<BlockError>,
}

/// Requests in flight on a connection; the caller provides a token for each.
#[derive(Debug)]
pub struct Requests<T> {
    pending: Slab<Pending<T>>,
    state: State,
    /// Used to detect a stale cookie if the slot was reused.
    generation: u32,
    structured: bool,
    allocation_context: Option<u32>,
    /// Extent lengths are reported as multiples of this value.
    block: u32,
}

impl<T> Requests<T> {
    /// Creates an empty set for a connection with these negotiated features. Extents are reported
    /// in whole blocks with `block` bytes.
    #[must_use]
    pub fn new(structured: bool, allocation_context: Option<u32>, block: u32) -> Self {
        Self {
            pending: Slab::new(),
            state: State::Reply,
            generation: 0,
            structured,
            allocation_context,
            block,
        }
    }

    /// Number of requests in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.pending.len()
    }

    /// Tokens for requests in flight.
    pub fn tokens(&self) -> impl Iterator<Item = &T> {
        self.pending.iter().map(|(_, pending)| &pending.token)
    }

    /// Token for the request in an [`Event::Hole`].
    #[must_use]
    pub fn token(&self, key: usize) -> &T {
        &self.pending[key].token
    }

    /// Removes all requests, because there will be no more replies. The stream can't be used after
    /// this, because the remaining data may belong to a removed request.
    pub fn drain(&mut self) -> Vec<T> {
        if self.state != State::Closed {
            become_state(&mut self.state, State::Closed);
        }
        self.pending.drain().map(|pending| pending.token).collect()
    }

    /// Adds a request and returns the header to send.
    ///
    /// # Panics
    /// If there are already [`MAX_IN_FLIGHT`] requests in flight.
    pub fn submit(&mut self, request: Request, token: T) -> [u8; REQUEST_LEN] {
        assert!(self.pending.len() < MAX_IN_FLIGHT, "too many requests");
        self.generation = self.generation.wrapping_add(1);
        let generation = self.generation;
        let key = self.pending.insert(Pending {
            token,
            generation,
            request,
            coverage: Coverage::default(),
            extents: Vec::new(),
            error: None,
        });
        request.header(Cookie(u64::from(generation) << 32 | key as u64))
    }

    /// If read data is next in the stream, returns the request token, the offset in this request
    /// and the number of bytes.
    #[must_use]
    pub fn payload(&self) -> Option<(&T, usize, usize)> {
        match self.state {
            State::Payload { key, at, left, .. } => {
                Some((&self.pending[key].token, at as usize, left as usize))
            }
            _ => None,
        }
    }

    /// Must be called when the driver has received `len` bytes of data from the stream.
    ///
    /// # Panics
    /// If `len` exceeds the value returned by [`Requests::payload`].
    pub fn handle_payload(&mut self, len: usize) {
        let State::Payload {
            key,
            at,
            left,
            is_last,
        } = &mut self.state
        else {
            assert_eq!(len, 0, "no data are expected");
            return;
        };
        let len = u32::try_from(len).expect("data of one read");
        *at += len;
        *left = left.checked_sub(len).expect("more data than the chunk has");
        if *left == 0 {
            let next = after(*key, *is_last);
            become_state(&mut self.state, next);
        }
    }

    /// Processes one step of the received data, starting at the current stream position. It never
    /// requires more than a chunk header and an error message ([`MAX_STRING`]) at the same time. If
    /// read data is next, it doesn't consume anything.
    ///
    /// # Errors
    /// Returns an error if the stream is invalid; the connection can't be used after this.
    pub fn handle(&mut self, input: &[u8]) -> Result<Progress<T>, ReplyFault> {
        let step = match self.state {
            State::Reply => self.on_reply(input),
            State::Payload { .. } => Ok(Progress::took(0)),
            State::Extents { key, left, is_last } => self.on_extents(input, key, left, is_last),
            State::End { key } => self.on_request_completed(key),
            State::Closed => return Err(ReplyFault::Closed),
        };
        if step.is_err() {
            become_state(&mut self.state, State::Closed);
        }
        step
    }

    fn on_reply(&mut self, input: &[u8]) -> Result<Progress<T>, ReplyFault> {
        let Some(magic) = Cursor(input).u32() else {
            return Ok(Progress::took(0));
        };
        match magic {
            SIMPLE_REPLY_MAGIC => self.on_simple_reply(input),
            STRUCTURED_REPLY_MAGIC if self.structured => self.on_chunk(input),
            STRUCTURED_REPLY_MAGIC => Err(ReplyFault::Form),
            other => Err(ReplyFault::Magic(other)),
        }
    }

    /// Looks up the request for a reply.
    fn find(&mut self, cookie: u64) -> Result<usize, ReplyFault> {
        let key = (cookie & u64::from(u32::MAX)) as usize;
        let generation = (cookie >> 32) as u32;
        match self.pending.get(key) {
            Some(pending) if pending.generation == generation => Ok(key),
            _ => Err(ReplyFault::Cookie(cookie)),
        }
    }

    fn on_simple_reply(&mut self, input: &[u8]) -> Result<Progress<T>, ReplyFault> {
        let Some(header) = input.first_chunk::<SIMPLE_REPLY_LEN>() else {
            return Ok(Progress::took(0));
        };
        let mut cursor = Cursor(&header[4..]);
        let error = cursor.u32().expect("16 bytes");
        let key = self.find(cursor.u64().expect("16 bytes"))?;
        let pending = &mut self.pending[key];
        let next = match (pending.request, error) {
            (Request::Read { .. } | Request::BlockStatus { .. }, _) if self.structured => {
                return Err(ReplyFault::Form);
            }
            (Request::Read { len, .. }, 0) => {
                pending.coverage.add(0..len);
                State::Payload {
                    key,
                    at: 0,
                    left: len,
                    is_last: true,
                }
            }
            (_, 0) => State::End { key },
            (_, error) => {
                pending.error = Some(Errno::block_error(error, ""));
                State::End { key }
            }
        };
        become_state(&mut self.state, next);
        Ok(Progress::took(SIMPLE_REPLY_LEN))
    }

    fn on_chunk(&mut self, input: &[u8]) -> Result<Progress<T>, ReplyFault> {
        let Some(header) = input.first_chunk::<CHUNK_LEN>() else {
            return Ok(Progress::took(0));
        };
        let mut cursor = Cursor(&header[4..]);
        let flags = cursor.u16().expect("20 bytes");
        let kind = cursor.u16().expect("20 bytes");
        let key = self.find(cursor.u64().expect("20 bytes"))?;
        let len = cursor.u32().expect("20 bytes");
        let is_last = flags & chunk::FLAG_DONE != 0;
        let body = Cursor(&input[CHUNK_LEN..]);
        let bad_length = ReplyFault::Length { kind, len };
        let request = self.pending[key].request;
        match (kind, request) {
            (chunk::NONE, _) if len == 0 && is_last => {
                become_state(&mut self.state, State::End { key });
                Ok(Progress::took(CHUNK_LEN))
            }
            (chunk::NONE, _) => Err(bad_length),
            (chunk::OFFSET_DATA, Request::Read { offset, .. }) => {
                let data = len
                    .checked_sub(8)
                    .filter(|data| *data > 0)
                    .ok_or(bad_length)?;
                let Some(from) = { body }.u64() else {
                    return Ok(Progress::took(0));
                };
                let at = self.cover(key, from, data)?;
                let next = State::Payload {
                    key,
                    at: (from - offset) as u32,
                    left: data,
                    is_last,
                };
                debug_assert_eq!(at.start, (from - offset) as usize);
                become_state(&mut self.state, next);
                Ok(Progress::took(CHUNK_LEN + 8))
            }
            (chunk::OFFSET_HOLE, Request::Read { .. }) if len == 12 => {
                let mut body = body;
                let Some((from, zeroes)) = body.u64().zip(body.u32()) else {
                    return Ok(Progress::took(0));
                };
                let range = self.cover(key, from, zeroes)?;
                if is_last {
                    become_state(&mut self.state, State::End { key });
                }
                Ok(Progress {
                    consumed: CHUNK_LEN + 12,
                    event: Some(Event::Hole(key, range)),
                })
            }
            (chunk::OFFSET_HOLE, Request::Read { .. }) => Err(bad_length),
            (chunk::BLOCK_STATUS, Request::BlockStatus { .. }) => {
                let left = len.checked_sub(4).filter(|l| *l > 0 && l.is_multiple_of(8));
                let left = left.ok_or(bad_length)? / 8;
                let Some(context) = { body }.u32() else {
                    return Ok(Progress::took(0));
                };
                if Some(context) != self.allocation_context {
                    return Err(ReplyFault::Extents);
                }
                become_state(&mut self.state, State::Extents { key, left, is_last });
                Ok(Progress::took(CHUNK_LEN + 4))
            }
            // If the highest bit is set, the type is an error, even if it's defined by a later
            // version.
            (kind, _) if kind >= 1 << 15 => self.on_error(body, kind, len, key, is_last),
            (kind, _) => Err(ReplyFault::Kind { kind }),
        }
    }

    fn on_error(
        &mut self,
        body: Cursor<'_>,
        kind: u16,
        len: u32,
        key: usize,
        is_last: bool,
    ) -> Result<Progress<T>, ReplyFault> {
        let bad_length = ReplyFault::Length { kind, len };
        // Error code, message length, message, and optional offset.
        if !(6..=6 + MAX_STRING as u32 + 8).contains(&len) {
            return Err(bad_length);
        }
        let Some(data) = { body }.bytes(len as usize) else {
            return Ok(Progress::took(0));
        };
        let mut data = Cursor(data);
        let error = data.u32().expect("six bytes at least");
        let message = usize::from(data.u16().expect("six bytes at least"));
        let message = String::from_utf8_lossy(data.bytes(message).ok_or(bad_length)?);
        if error == 0 {
            return Err(ReplyFault::NoError);
        }
        let message: String = message.chars().filter(|c| !c.is_control()).collect();
        // If there are multiple errors, keep the first, because it's usually the cause.
        let kept = &mut self.pending[key].error;
        kept.get_or_insert_with(|| Errno::block_error(error, &message));
        if is_last {
            become_state(&mut self.state, State::End { key });
        }
        Ok(Progress::took(CHUNK_LEN + len as usize))
    }

    /// Adds a received part of a read. Returns the range relative to the request.
    fn cover(
        &mut self,
        key: usize,
        from: u64,
        count: u32,
    ) -> Result<std::ops::Range<usize>, ReplyFault> {
        let pending = &mut self.pending[key];
        let Request::Read { offset, len } = pending.request else {
            unreachable!("the caller checked");
        };
        let fault = ReplyFault::Data {
            offset: from,
            len: count,
        };
        let start = from.checked_sub(offset).filter(|at| *at < u64::from(len));
        let start = start.ok_or(fault)? as u32;
        if count == 0 || count > len - start {
            return Err(fault);
        }
        if !pending.coverage.add(start..start + count) {
            return Err(fault);
        }
        if pending.coverage.pieces() > MAX_PIECES {
            return Err(ReplyFault::TooManyPieces);
        }
        Ok(start as usize..(start + count) as usize)
    }

    fn on_extents(
        &mut self,
        input: &[u8],
        key: usize,
        left: u32,
        is_last: bool,
    ) -> Result<Progress<T>, ReplyFault> {
        let (descriptors, _) = input.as_chunks::<8>();
        let count = descriptors.len().min(left as usize);
        if count == 0 {
            return Ok(Progress::took(0));
        }
        let extents = &mut self.pending[key].extents;
        for descriptor in &descriptors[..count] {
            let mut cursor = Cursor(descriptor);
            let (len, flags) = cursor.u32().zip(cursor.u32()).expect("eight bytes");
            if len == 0 {
                return Err(ReplyFault::Extents);
            }
            if extents.len() < MAX_EXTENTS {
                extents.push((len, flags));
            }
        }
        let next = match left - count as u32 {
            0 => after(key, is_last),
            left => State::Extents { key, left, is_last },
        };
        become_state(&mut self.state, next);
        Ok(Progress::took(count * 8))
    }

    fn on_request_completed(&mut self, key: usize) -> Result<Progress<T>, ReplyFault> {
        let pending = &self.pending[key];
        let mut extents = Vec::new();
        match pending.request {
            _ if pending.error.is_some() => {}
            Request::Read { offset, len } if !pending.coverage.is_whole(len) => {
                return Err(ReplyFault::Missing { offset });
            }
            Request::BlockStatus { len, .. } => {
                extents = whole_blocks(&pending.extents, len.into(), self.block.into());
                if extents.is_empty() {
                    return Err(ReplyFault::Extents);
                }
            }
            _ => {}
        }
        let pending = self.pending.remove(key);
        become_state(&mut self.state, State::Reply);
        let end = RequestOutcome {
            result: pending.error.map_or(Ok(()), Err),
            extents,
        };
        Ok(Progress {
            consumed: 0,
            event: Some(Event::Done(pending.token, end)),
        })
    }
}

/// Next state after a chunk.
fn after(key: usize, is_last: bool) -> State {
    match is_last {
        true => State::End { key },
        false => State::Reply,
    }
}

/// Converts extents from a status reply to whole blocks, up to `limit` bytes. If a block contains
/// both data and a hole, it is treated as data.
fn whole_blocks(extents: &[(u32, u32)], limit: u64, block: u64) -> Vec<Extent> {
    let mut out: Vec<Extent> = Vec::new();
    // `at` is the end of the output, and `end` is the end of the processed extents.
    let (mut at, mut end) = (0, 0);
    let mut push = |len: u64, kind: ExtentKind| match out.last_mut() {
        Some(last) if last.kind == kind => last.len += len,
        _ if len > 0 => out.push(Extent { len, kind }),
        _ => {}
    };
    for (len, flags) in extents {
        if at >= limit {
            break;
        }
        end = (end + u64::from(*len)).min(limit);
        let kind = match (
            flags & chunk::STATE_HOLE != 0,
            flags & chunk::STATE_ZERO != 0,
        ) {
            (true, true) => ExtentKind::Hole,
            (false, true) => ExtentKind::Zero,
            (_, false) => ExtentKind::Data,
        };
        let to = match kind {
            ExtentKind::Data => end.next_multiple_of(block).min(limit),
            _ => end - end % block,
        };
        if to > at {
            push(to - at, kind);
            at = to;
        }
        // The last block is only partially covered by this extent: the next extent starts within
        // it.
        if kind != ExtentKind::Data && end > at {
            push(block.min(limit - at), ExtentKind::Data);
            at = (at + block).min(limit);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use riser_state::testing::{assert_all_taken, table};

    use super::*;

    fn states() -> [State; 5] {
        let is_last = false;
        [
            State::Reply,
            State::Payload {
                key: 0,
                at: 0,
                left: 1,
                is_last,
            },
            State::Extents {
                key: 0,
                left: 1,
                is_last,
            },
            State::End { key: 0 },
            State::Closed,
        ]
    }

    #[test]
    fn transition_table_matches_diagram() {
        let expected = "Reply: Payload Extents End Closed\n\
                        Payload: Reply End Closed\n\
                        Extents: Reply Extents End Closed\n\
                        End: Reply Closed\n\
                        Closed: \n";
        assert_eq!(table(&states()), expected);
    }

    /// Creates a two-byte read and a status request in flight, and returns the cookies.
    fn two() -> (Requests<char>, Cookie, Cookie) {
        let mut requests = Requests::new(true, Some(1), 512);
        let cookie = |header: [u8; REQUEST_LEN]| {
            Cookie(u64::from_be_bytes(*header[8..].first_chunk().unwrap()))
        };
        let read = cookie(requests.submit(Request::Read { offset: 0, len: 2 }, 'a'));
        let status = Request::BlockStatus {
            offset: 0,
            len: 1024,
        };
        let status = cookie(requests.submit(status, 'b'));
        (requests, read, status)
    }

    #[test]
    fn transition_coverage_is_complete() {
        let extents = |cookie, flags, count: u32| {
            let len = 4 + 8 * count;
            let mut out = proto::chunk_header(cookie, chunk::BLOCK_STATUS, flags, len).to_vec();
            out.extend(1u32.to_be_bytes());
            out
        };
        let extent = [0, 0, 2, 0, 0, 0, 0, 0];
        assert_all_taken(&states(), || {
            let (mut r, read, status) = two();
            let handle = |r: &mut Requests<char>, bytes: &[u8]| r.handle(bytes).unwrap().event;
            for at in 0..2 {
                handle(&mut r, &proto::data_chunk(read, at, 1, at == 1));
                r.handle_payload(1);
            }
            assert!(matches!(handle(&mut r, &[]), Some(Event::Done('a', _))));
            handle(&mut r, &extents(status, 0, 2));
            handle(&mut r, &extent);
            handle(&mut r, &extent);
            handle(&mut r, &extents(status, 1, 1));
            handle(&mut r, &extent);
            assert!(matches!(handle(&mut r, &[]), Some(Event::Done('b', _))));
            r.handle(&[0; 4]).unwrap_err();

            let (mut r, read, _) = two();
            handle(&mut r, &proto::done_chunk(read));
            r.handle(&[]).unwrap_err();
            let (mut r, _, status) = two();
            handle(&mut r, &extents(status, 1, 1));
            r.handle(&[0; 8]).unwrap_err();
            let (mut r, read, _) = two();
            handle(&mut r, &proto::data_chunk(read, 0, 2, true));
            r.handle_payload(1);
            // The remaining data doesn't belong to any request.
            assert_eq!(r.drain(), ['a', 'b']);
            assert!(r.payload().is_none());
            assert_eq!(r.handle(&[0]), Err(ReplyFault::Closed));
            assert!(r.drain().is_empty());
        });
    }

    #[test]
    fn extents_are_whole_blocks_preferring_data() {
        const HOLE: u32 = chunk::STATE_HOLE | chunk::STATE_ZERO;
        let kinds = |extents: &[(u32, u32)], limit| -> Vec<_> {
            let all = whole_blocks(extents, limit, 512);
            all.into_iter().map(|e| (e.len, e.kind)).collect()
        };
        use ExtentKind::{Data, Hole, Zero};
        assert_eq!(
            kinds(&[(1024, 0), (512, HOLE), (512, 2)], 4096),
            [(1024, Data), (512, Hole), (512, Zero)]
        );
        // Nothing should be reported past the limit.
        assert_eq!(kinds(&[(1 << 30, HOLE)], 4096), [(4096, Hole)]);
        assert_eq!(kinds(&[(4096, 0), (4096, HOLE)], 4096), [(4096, Data)]);
        // 700 bytes of data, then a hole: the hole should start at the next block.
        assert_eq!(
            kinds(&[(700, 0), (3396, HOLE)], 4096),
            [(1024, Data), (3072, Hole)]
        );
        // 700-byte hole, then data.
        assert_eq!(
            kinds(&[(700, HOLE), (3396, 0)], 4096),
            [(512, Hole), (3584, Data)]
        );
        // Multiple small extents in the same block.
        assert_eq!(
            kinds(&[(100, HOLE), (100, HOLE), (824, HOLE)], 1024),
            [(512, Data), (512, Hole)]
        );
        // If the zero flag isn't set for a hole, the contents are unknown.
        assert_eq!(kinds(&[(512, chunk::STATE_HOLE)], 512), [(512, Data)]);
    }
}
