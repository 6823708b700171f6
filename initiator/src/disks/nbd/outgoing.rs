//! Bytes on their way to the server: headers of requests, and data of writes where they are.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use arrayvec::ArrayVec;
use riser_memory::MemSlice;
use riser_memory::sys::{self, SendPiece};

/// Most pieces of one system call.
const PIECES: usize = 128;

/// Bytes of headers that are sent and still held, beyond which they are moved out.
const SENT_HEADERS: usize = 32 << 10;

/// A part of the stream.
enum Part {
    /// Number of bytes of headers.
    Headers(usize),
    /// Data of a write, in its buffer.
    Data(MemSlice),
    /// Data of a write whose buffer went back to its owner.
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

/// The queue. Its length is bounded by the requests in flight.
#[derive(Default)]
pub(super) struct Outgoing {
    headers: Vec<u8>,
    /// Bytes of `headers` that are sent.
    sent: usize,
    parts: VecDeque<Part>,
    /// Bytes of the stream that were appended, and that were sent, since it began.
    end: u64,
    sent_to: u64,
}

impl Outgoing {
    pub(super) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// Whether the stream was sent up to that place.
    pub(super) fn is_sent(&self, place: u64) -> bool {
        place <= self.sent_to
    }

    /// The place that is appended to.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// Appends a header. Headers that follow one another are one piece.
    pub(super) fn push_header(&mut self, header: &[u8]) {
        self.end += header.len() as u64;
        self.headers.extend_from_slice(header);
        match self.parts.back_mut() {
            Some(Part::Headers(len)) => *len += header.len(),
            _ => self.parts.push_back(Part::Headers(header.len())),
        }
    }

    /// Appends the data of a write.
    pub(super) fn push_data(&mut self, data: MemSlice) {
        self.end += data.len() as u64;
        self.parts.push_back(Part::Data(data));
    }

    /// Copies what was not sent yet of the data at `range` of the stream, whose owner gets the
    /// buffer back: a server may fail a write before it has read the data.
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

    /// Sends as much as the socket takes.
    ///
    /// # Errors
    /// Those of `sendmsg(2)`, except for a lack of room.
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
            self.take(sent);
            // A short count shows that the socket is full; another call would only say so.
            if sent < total {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Takes what was sent out of the queue.
    fn take(&mut self, mut count: usize) {
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
    fn what_a_full_socket_leaves_goes_out_later_in_its_order() {
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
        // What is left belongs to its owner again, who changes it.
        let end = outgoing.end();
        outgoing.copy_out(0..end);
        memory.fill(0, memory.len(), 0xff);
        let mut got = vec![0; want.len()];
        let mut at = 0;
        while at < got.len() {
            let n = peer.read(&mut got[at..]).unwrap();
            // What the kernel has already does not change.
            at += n;
            outgoing.send(ours.as_fd()).unwrap();
        }
        assert!(got == want);
        assert!(outgoing.is_empty() && outgoing.headers.is_empty());
    }

    #[test]
    fn of_writes_from_the_same_memory_one_is_copied() {
        let zeroes = Memory::new(4096).unwrap().whole();
        let mut outgoing = Outgoing::default();
        let mut places = Vec::new();
        for _ in 0..3 {
            outgoing.push_header(&[1; 28]);
            let start = outgoing.end();
            outgoing.push_data(zeroes.clone());
            places.push(start..outgoing.end());
        }
        // Of the first header some is sent.
        outgoing.take(20);
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
