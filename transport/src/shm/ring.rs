//! Packets between two processes: one ring of bytes for each direction, in shared memory.
//!
//! A ring has one writer and one reader. A packet is its length in four bytes, then its bytes, whose
//! number is a multiple of four; it may wrap around the end. Positions count bytes and wrap at 2³².
//!
//! ```text
//!   read, free again │ written, not read │ free
//!                   head                tail
//! ```
//!
//! The writer stores the tail and the reader the head, each after the bytes that it covers. Each side
//! keeps its own position in private memory and reads only the other's from shared memory. That
//! value is untrusted: it is read once, and one that no correct peer would write ends the link
//! ([`Broken`]). A packet is copied out before it is parsed.
//!
//! # Sleep
//!
//! A reader that is about to sleep sets a third word and reads the tail once more. A writer reads
//! that word after it has stored the tail. Sequentially consistent fences in between ensure that at
//! least one of them sees the other's store.

use std::sync::atomic::{AtomicU32, Ordering, fence};

use riser_memory::MemSlice;
use riser_memory::shared::SharedMemory;
use thiserror::Error;

use crate::wire::MAX_DATAGRAM;

/// Bytes of one ring: a power of two. What one queue pair has under way fills half of it
/// (`MAX_INFLIGHT` in `provider.rs`), so three busy ones of a link can fill it; what finds no room is
/// repeated.
pub(super) const RING: usize = 1 << 20;

/// Bytes of data of a link: both rings.
pub(super) const DATA: usize = 2 * RING;

/// Bytes before a packet: its length.
const PREFIX: usize = 4;

/// Bytes that are copied out at once, before the length of a packet is known: a command, an answer
/// or an acknowledgement with its length.
const GULP: usize = 128;

/// Words from one to the next, so that no two are in one cache line or in two that are fetched
/// together.
const SPACING: usize = 32;

/// The peer has written what it may not. The link is of no further use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(super) enum Broken {
    /// A position is out of its range.
    #[error("position {theirs:#x} in a ring is not within {RING} bytes of {ours:#x}")]
    Position {
        /// The peer's position.
        theirs: u32,
        /// Our position.
        ours: u32,
    },
    /// A packet has a length that no packet has, or is longer than what was written.
    #[error("length {len} of a packet where {written} bytes were written")]
    Length {
        /// Length as the peer wrote it.
        len: u32,
        /// Bytes that the peer has written, the length included.
        written: u32,
    },
}

/// Side of a link. The side that made the memory writes the first ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// Made the memory.
    Maker,
    /// Was given it.
    Taker,
}

/// Words of one ring, and where its bytes begin.
#[derive(Clone, Copy, Debug)]
struct Ring {
    tail: usize,
    head: usize,
    /// Not 0 where the reader sleeps.
    sleeps: usize,
    start: usize,
}

impl Ring {
    const fn new(index: usize) -> Self {
        Self {
            tail: 3 * index * SPACING,
            head: (3 * index + 1) * SPACING,
            sleeps: (3 * index + 2) * SPACING,
            start: index * RING,
        }
    }

    /// Calls `f` for the one or two pieces of `len` bytes from `position` on, with their place in
    /// the data and in the range.
    fn pieces(&self, position: u32, len: usize, mut f: impl FnMut(usize, std::ops::Range<usize>)) {
        let at = position as usize % RING;
        let first = len.min(RING - at);
        f(self.start + at, 0..first);
        if first < len {
            f(self.start, first..len);
        }
    }
}

/// One side's ends of both rings.
#[derive(Debug)]
pub(super) struct Rings {
    shared: SharedMemory,
    out: Ring,
    /// Next byte to write, the tail that the peer can see, and the peer's head when last read.
    tail: u32,
    published: u32,
    head_seen: u32,
    input: Ring,
    /// Next byte to read, the head that the peer can see, and the peer's tail when last read.
    head: u32,
    released: u32,
    tail_seen: u32,
    /// A packet and its length, copied out.
    packet: Box<[u8]>,
}

impl Rings {
    pub(super) fn new(shared: SharedMemory, side: Side) -> Self {
        let (out, input) = match side {
            Side::Maker => (0, 1),
            Side::Taker => (1, 0),
        };
        Self {
            shared,
            out: Ring::new(out),
            tail: 0,
            published: 0,
            head_seen: 0,
            input: Ring::new(input),
            head: 0,
            released: 0,
            tail_seen: 0,
            packet: vec![0; PREFIX + MAX_DATAGRAM].into(),
        }
    }

    fn word(&self, index: usize) -> &AtomicU32 {
        self.shared.word(index)
    }

    /// Begins a packet of `len` bytes; false if there is no room for it. Its bytes follow by
    /// [`Rings::write`] and [`Rings::write_memory`].
    pub(super) fn begin(&mut self, len: usize) -> Result<bool, Broken> {
        debug_assert!(len <= MAX_DATAGRAM && len.is_multiple_of(4));
        let need = PREFIX + len;
        if RING - (self.tail.wrapping_sub(self.head_seen) as usize) < need {
            let theirs = self.word(self.out.head).load(Ordering::Acquire);
            // The reader moves forward only, and never past what was published.
            let is_forward =
                theirs.wrapping_sub(self.head_seen) <= self.published.wrapping_sub(self.head_seen);
            if !is_forward {
                let ours = self.published;
                return Err(Broken::Position { theirs, ours });
            }
            self.head_seen = theirs;
            if RING - (self.tail.wrapping_sub(theirs) as usize) < need {
                return Ok(false);
            }
        }
        self.write(&(len as u32).to_ne_bytes());
        Ok(true)
    }

    /// Writes bytes of the packet that was begun.
    pub(super) fn write(&mut self, bytes: &[u8]) {
        let (out, shared) = (self.out, &self.shared);
        out.pieces(self.tail, bytes.len(), |at, part| {
            shared.write(at, &bytes[part]);
        });
        self.tail = self.tail.wrapping_add(bytes.len() as u32);
    }

    /// Writes registered memory as bytes of the packet that was begun.
    pub(super) fn write_memory(&mut self, slice: &MemSlice) {
        let (out, shared) = (self.out, &self.shared);
        let len = slice.len();
        out.pieces(self.tail, len, |at, part| match part.len() == len {
            true => shared.write_memory(at, slice),
            false => shared.write_memory(at, &slice.slice(part).expect("a part of it")),
        });
        self.tail = self.tail.wrapping_add(len as u32);
    }

    /// Lets the peer see what was written; returns whether it sleeps and has to be woken.
    pub(super) fn publish(&mut self) -> bool {
        if self.published == self.tail {
            return false;
        }
        self.published = self.tail;
        self.word(self.out.tail).store(self.tail, Ordering::Release);
        fence(Ordering::SeqCst);
        let sleeps = self.word(self.out.sleeps);
        // Read first: an exchange takes the line from the peer each time. It is woken once for
        // each sleep.
        sleeps.load(Ordering::Relaxed) != 0 && sleeps.swap(0, Ordering::Relaxed) != 0
    }

    /// The next packet, copied out; `None` if there is none.
    pub(super) fn next(&mut self) -> Result<Option<&[u8]>, Broken> {
        if self.tail_seen == self.head {
            self.look()?;
        }
        let written = self.tail_seen.wrapping_sub(self.head);
        if written == 0 {
            return Ok(None);
        }
        let gulp = GULP.min(written as usize);
        self.copy_out(0..gulp);
        // From our copy: the peer may write another length meanwhile.
        let prefix = self.packet.first_chunk().expect("room for a packet");
        let len = u32::from_ne_bytes(*prefix);
        // In bounds before anything is added to it.
        let is_length = len as usize <= MAX_DATAGRAM && len.is_multiple_of(4);
        if !is_length || PREFIX as u32 + len > written {
            return Err(Broken::Length { len, written });
        }
        let end = PREFIX + len as usize;
        if end > gulp {
            self.copy_out(gulp..end);
        }
        self.head = self.head.wrapping_add(end as u32);
        Ok(Some(&self.packet[PREFIX..end]))
    }

    /// Copies bytes from the head on to their places in `packet`.
    fn copy_out(&mut self, range: std::ops::Range<usize>) {
        let from = self.head.wrapping_add(range.start as u32);
        let room = &mut self.packet[range];
        let shared = &self.shared;
        self.input.pieces(from, room.len(), |at, part| {
            shared.read(at, &mut room[part]);
        });
    }

    /// Reads how far the peer has written.
    fn look(&mut self) -> Result<(), Broken> {
        let theirs = self.word(self.input.tail).load(Ordering::Acquire);
        let ours = self.head;
        let written = theirs.wrapping_sub(ours);
        // More than fits would make it overwrite what is being read, and less than before would
        // be taken for nearly 2³² bytes.
        if written as usize > RING || !written.is_multiple_of(4) {
            return Err(Broken::Position { theirs, ours });
        }
        self.tail_seen = theirs;
        Ok(())
    }

    /// Returns the room of packets that were read to the peer.
    pub(super) fn release(&mut self) {
        if self.released != self.head {
            self.released = self.head;
            self.word(self.input.head)
                .store(self.head, Ordering::Release);
        }
    }

    /// Whether a packet waits, or the peer's position is wrong.
    pub(super) fn has_input(&self) -> bool {
        self.word(self.input.tail).load(Ordering::Acquire) != self.head
    }

    /// Asks the peer for a wake-up with its next packet; returns whether there is one already.
    pub(super) fn sleep(&self) -> bool {
        self.word(self.input.sleeps).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.has_input()
    }

    /// Stops asking for wake-ups.
    pub(super) fn wake(&self) {
        self.word(self.input.sleeps).store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use riser_memory::Memory;

    use super::*;

    fn pair() -> (Rings, Rings) {
        let (ours, file) = SharedMemory::create("riser-test", DATA).unwrap();
        let theirs = SharedMemory::map(&file, DATA).unwrap();
        (
            Rings::new(ours, Side::Maker),
            Rings::new(theirs, Side::Taker),
        )
    }

    fn push(rings: &mut Rings, bytes: &[u8]) {
        assert!(rings.begin(bytes.len()).unwrap());
        rings.write(bytes);
    }

    #[test]
    fn packets_of_every_length_arrive_in_order_around_the_end() {
        let (mut a, mut b) = pair();
        let memory = Memory::new(4096).unwrap();
        // Three times around, in both directions.
        let mut sent = 0;
        for n in 0.. {
            let len = ((n * 148) % (MAX_DATAGRAM + 4)) & !3;
            let bytes = vec![n as u8; len];
            for from in [&mut a, &mut b] {
                assert!(from.begin(len).unwrap(), "{n}");
                let half = len.min(4096) / 2;
                memory.fill(0, half, n as u8);
                from.write_memory(&memory.slice(0..half).unwrap());
                from.write(&bytes[half..]);
                assert!(!from.publish());
            }
            for to in [&mut b, &mut a] {
                assert_eq!(to.next().unwrap(), Some(&bytes[..]), "{n}");
                assert_eq!(to.next().unwrap(), None);
                to.release();
            }
            sent += len;
            if sent > 3 * RING {
                break;
            }
        }
    }

    #[test]
    fn a_full_ring_refuses_a_packet_until_one_was_read() {
        let (mut a, mut b) = pair();
        let mut count = 0;
        while a.begin(4092).unwrap() {
            a.write(&[7; 4092]);
            count += 1;
        }
        assert_eq!(count, RING / 4096);
        a.publish();
        assert!(b.next().unwrap().is_some());
        assert!(!a.begin(4092).unwrap(), "read, but not given back");
        b.release();
        assert!(a.begin(4092).unwrap());
    }

    #[test]
    fn unpublished_packets_are_not_seen() {
        let (mut a, mut b) = pair();
        push(&mut a, &[1; 8]);
        assert!(b.next().unwrap().is_none() && !b.has_input());
        a.publish();
        assert!(b.has_input());
        assert_eq!(b.next().unwrap(), Some(&[1; 8][..]));
    }

    #[test]
    fn a_sleeper_is_woken_once() {
        let (mut a, mut b) = pair();
        assert!(!b.sleep());
        push(&mut a, &[1; 4]);
        assert!(a.publish());
        push(&mut a, &[2; 4]);
        assert!(!a.publish(), "it is being woken");
        assert!(b.sleep(), "there is something already");
        b.wake();
        push(&mut a, &[3; 4]);
        assert!(!a.publish());
        for n in 1..=3 {
            assert_eq!(b.next().unwrap(), Some(&[n; 4][..]));
        }
    }

    /// Reads from a ring with this tail and these first bytes.
    fn read_hostile(tail: u32, bytes: &[u8]) -> Result<Option<Vec<u8>>, Broken> {
        let (mut a, b) = pair();
        b.shared.write(b.out.start, bytes);
        b.word(b.out.tail).store(tail, Ordering::Release);
        Ok(a.next()?.map(<[u8]>::to_vec))
    }

    #[test]
    fn a_tail_out_of_range_ends_the_link() {
        for tail in [1, 2, 7, RING as u32 + 4, u32::MAX - 3, 1 << 31] {
            let wrong = Broken::Position {
                theirs: tail,
                ours: 0,
            };
            assert_eq!(read_hostile(tail, &[0; 4]), Err(wrong), "{tail}");
        }
        // A tail that goes back is one too far ahead.
        let (mut a, mut b) = pair();
        push(&mut b, &[1; 8]);
        b.publish();
        a.next().unwrap();
        b.word(b.out.tail).store(8, Ordering::Release);
        assert!(matches!(a.next(), Err(Broken::Position { ours: 12, .. })));
    }

    #[test]
    fn a_length_that_no_packet_has_ends_the_link() {
        let max = MAX_DATAGRAM as u32;
        for len in [1, 6, max + 4, RING as u32, 1 << 31, u32::MAX, u32::MAX - 3] {
            let written = RING as u32;
            let wrong = Broken::Length { len, written };
            assert_eq!(
                read_hostile(written, &len.to_ne_bytes()),
                Err(wrong),
                "{len}"
            );
        }
        // Longer than what was written, by the length itself or by more.
        for (len, written) in [(4, 4), (8, 8), (max, max), (256, 128)] {
            let wrong = Broken::Length { len, written };
            assert_eq!(read_hostile(written, &len.to_ne_bytes()), Err(wrong));
        }
        assert_eq!(read_hostile(4, &[0; 4]), Ok(Some(vec![])));
    }

    #[test]
    fn a_head_out_of_range_ends_the_link() {
        for (head, is_honest) in [
            (0, true),
            (RING as u32 - 4096, true),
            (RING as u32, true),
            (RING as u32 + 4, false),
            (u32::MAX, false),
            (1 << 31, false),
        ] {
            let (mut a, b) = pair();
            while a.begin(4092).unwrap() {
                a.write(&[0; 4092]);
            }
            a.publish();
            b.word(b.input.head).store(head, Ordering::Release);
            assert_eq!(a.begin(4092).is_ok(), is_honest, "{head:#x}");
        }
    }

    /// A peer that writes anywhere at any time can end the link, and nothing else.
    #[test]
    fn random_bytes_and_positions_never_panic() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut ended = 0;
        for _ in 0..300 {
            let (mut a, b) = pair();
            for _ in 0..200 {
                let at = random.usize(..DATA - 8);
                b.shared.write(at, &random.u64(..).to_ne_bytes());
                let next = (a.head as usize % RING) & !3;
                let len = random.u32(..5000);
                b.shared.write(b.out.start + next, &len.to_ne_bytes());
                let word = random.usize(..6) * SPACING;
                let value = match random.u8(..3) {
                    0 => random.u32(..),
                    1 => random.u32(..RING as u32) & !3,
                    _ => random.u32(..64) * 4,
                };
                b.word(word).store(value, Ordering::Relaxed);
                let len = random.usize(..MAX_DATAGRAM / 4) * 4;
                let written = a.begin(len).map(|fits| {
                    if fits {
                        a.write(&vec![0; len]);
                    }
                    a.publish()
                });
                let read = a.next().map(|_| ());
                a.release();
                if written.is_err() || read.is_err() {
                    ended += 1;
                    break;
                }
            }
        }
        assert!(ended > 100, "{ended}");
    }
}
