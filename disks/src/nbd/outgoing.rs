//! Bytes to be sent to the server: request headers, and write data in the original buffers.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use arrayvec::ArrayVec;
use riser_memory::MemSlice;
use riser_memory::sys::{self, SendPiece};

/// Max pieces per system call.
const PIECES: usize = 128;

/// Max header bytes to keep after sending. If there are more, they are removed from the buffer.
const SENT_HEADERS: usize = 32 << 10;

/// Part of the stream.
enum Part {
    /// Number of header bytes.
    Headers(usize),
    /// Write data in its buffer.
    Data(MemSlice),
    /// Copied write data, because the buffer was returned to its owner.
    Copied(Vec<u8>),
}

impl Part {
    fn len(&self) -> usize {
        match self {
            Self::Headers(len) => *len,
            Self::Data(data) => data.len(),
            Self::Copied(bytes) => bytes.len(),
        }
    }
}

/// Send queue. The length is limited by the number of requests in flight.
#[derive(Default)]
pub(super) struct Outgoing {
    headers: Vec<u8>,
    /// Number of bytes in `headers` already sent.
    sent: usize,
    parts: VecDeque<Part>,
    /// Stream offset of the last byte added, and of the last byte sent.
    end: u64,
    sent_to: u64,
}

impl Outgoing {
    pub(super) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Returns whether the stream has been sent up to this offset.
    pub(super) fn is_sent(&self, place: u64) -> bool {
        place <= self.sent_to
    }

    /// Current stream offset for new data.
    pub(super) fn end_offset(&self) -> u64 {
        self.end
    }

    /// Appends a header. Adjacent headers are merged into a single piece.
    pub(super) fn push_header(&mut self, header: &[u8]) {
        self.end += header.len() as u64;
        self.headers.extend_from_slice(header);
        match self.parts.back_mut() {
            Some(Part::Headers(len)) => *len += header.len(),
            _ => self.parts.push_back(Part::Headers(header.len())),
        }
    }

    /// Appends write data.
    pub(super) fn push_data(&mut self, data: MemSlice) {
        self.end += data.len() as u64;
        self.parts.push_back(Part::Data(data));
    }

    /// Copies unsent data in this stream range, so that the buffer can be returned to its owner.
    /// This is needed because a server can reject a write before reading its data.
    pub(super) fn copy_out(&mut self, range: Range<u64>) {
        let mut at = self.sent_to;
        for part in &mut self.parts {
            if at >= range.end {
                return;
            }
            let len = part.len() as u64;
            if let Part::Data(data) = part
                && at >= range.start
            {
                *part = Part::Copied(data.to_vec());
            }
            at += len;
        }
    }

    /// Sends as much data as possible.
    ///
    /// # Errors
    /// Returns an error from `sendmsg(2)`, unless the socket buffer is full.
    pub(super) fn send(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        while !self.parts.is_empty() {
            let mut pieces = ArrayVec::<_, PIECES>::new();
            let (mut at, mut total) = (self.sent, 0);
            for part in self.parts.iter().take(PIECES) {
                let piece = match part {
                    Part::Headers(len) => {
                        at += len;
                        SendPiece::from(&self.headers[at - len..at])
                    }
                    Part::Data(data) => SendPiece::from(data),
                    Part::Copied(bytes) => SendPiece::from(&bytes[..]),
                };
                total += piece.len();
                pieces.push(piece);
            }
            let sent = match sys::send(socket, &pieces) {
                Ok(sent) => sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            drop(pieces);
            self.remove_sent(sent);
            // If the count is short, the socket is full, and we can avoid another call.
            if sent < total {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Removes sent data from the queue.
    fn remove_sent(&mut self, mut count: usize) {
        self.sent_to += count as u64;
        while count > 0 {
            let part = self.parts.front_mut().expect("no more than was queued");
            let len = part.len();
            let taken = len.min(count);
            count -= taken;
            match part {
                Part::Headers(left) => {
                    self.sent += taken;
                    *left -= taken;
                }
                Part::Data(data) if taken < len => {
                    *data = data.slice(taken..len).expect("a part of it");
                }
                Part::Copied(bytes) if taken < len => drop(bytes.drain(..taken)),
                Part::Data(_) | Part::Copied(_) => {}
            }
            if taken == len {
                self.parts.pop_front();
            }
        }
        if self.parts.is_empty() || self.sent > SENT_HEADERS {
            self.headers.drain(..self.sent);
            self.sent = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use riser_memory::Memory;

    use super::*;

    #[test]
    fn full_socket_sends_remaining_data_later() {
        let (ours, mut peer) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let memory = Memory::new(1 << 20).unwrap();
        let mut outgoing = Outgoing::default();
        let mut want = Vec::new();
        for n in 0..64_u8 {
            let data = memory
                .slice(usize::from(n) << 14..usize::from(n + 1) << 14)
                .unwrap();
            data.fill(0, data.len(), n);
            outgoing.push_header(&[n; 28]);
            outgoing.push_header(&[n; 28]);
            want.extend([n; 56]);
            want.extend(data.to_vec());
            outgoing.push_data(data);
        }
        outgoing.send(ours.as_fd()).unwrap();
        assert!(!outgoing.is_empty(), "a socket holds less than 1 MiB");
        // The remaining data is returned to its owner, who will modify it.
        let end = outgoing.end_offset();
        outgoing.copy_out(0..end);
        memory.fill(0, memory.len(), 0xff);
        let mut got = vec![0; want.len()];
        let mut at = 0;
        while at < got.len() {
            let n = peer.read(&mut got[at..]).unwrap();
            // Data already sent to the kernel doesn't change.
            at += n;
            outgoing.send(ours.as_fd()).unwrap();
        }
        assert!(got == want);
        assert!(outgoing.is_empty() && outgoing.headers.is_empty());
    }

    #[test]
    fn repeated_memory_is_copied_once() {
        let zeroes = Memory::new(4096).unwrap().whole();
        let mut outgoing = Outgoing::default();
        let mut places = Vec::new();
        for _ in 0..3 {
            outgoing.push_header(&[1; 28]);
            let start = outgoing.end_offset();
            outgoing.push_data(zeroes.clone());
            places.push(start..outgoing.end_offset());
        }
        // The first header is partially sent.
        outgoing.remove_sent(20);
        outgoing.copy_out(places[1].clone());
        let is_copied = |part: &Part| match part {
            Part::Headers(_) => None,
            Part::Data(_) => Some(false),
            Part::Copied(_) => Some(true),
        };
        let copied: Vec<_> = outgoing.parts.iter().filter_map(is_copied).collect();
        assert_eq!(copied, [false, true, false]);
    }
}
