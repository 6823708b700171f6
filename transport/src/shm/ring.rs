//! Packets between two processes, using a byte ring in shared memory for each direction.
//!
//! A ring has one writer and one reader. A packet starts with its length (four bytes), followed by
//! its data, which must be a multiple of four bytes. It can wrap around at the end of the ring.
//! Positions are in bytes and wrap at 2³².
//!
//! ```text
//!   read, free again │ written, not read │ free
//!                   head                tail
//! ```
//!
//! The tail is updated by the writer, and the head by the reader, after accessing the data. Each
//! side stores its own position in private memory, and only reads the position of the peer from
//! shared memory. This value is not trusted: we read it once, and if it is invalid, the link is
//! closed ([`Broken`]). Packets are copied before they are parsed.
//!
//! # Sleep
//!
//! Before it goes to sleep, a reader sets a third word and then checks the tail again. The writer
//! updates the tail and then checks this word. We use sequentially consistent fences in between, to
//! ensure that at least one side sees the update of the other.

use std::sync::atomic::{AtomicU32, Ordering, fence};

use riser_memory::MemSlice;
use riser_memory::shared::SharedMemory;
use thiserror::Error;

use crate::wire::MAX_DATAGRAM;

/// Size of a ring in bytes, which must be a power of two. In-flight data of a single QP can use up
/// to half of it (`MAX_INFLIGHT` in `provider.rs`), so a link with three busy QPs can fill the
/// ring. If a packet does not fit, it will be retransmitted.
pub(super) const RING: usize = 1 << 20;

/// Data size of a link: both rings.
pub(super) const DATA: usize = 2 * RING;

/// Size of the length field before each packet.
const PREFIX: usize = 4;

/// Number of bytes to copy at first, when we don't know the packet length yet. This is enough for a
/// command, a response or an acknowledgement including its length.
const GULP: usize = 128;

/// Distance between two words, so that they are never in the same cache line, or in two adjacent
/// lines that are fetched together.
const SPACING: usize = 32;

/// The peer has written invalid data. The link can't be used anymore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(super) enum Broken {
    /// A position is out of range.
    #[error("invalid ring position {theirs:#x}: not within {RING} bytes of {ours:#x}")]
    Position {
        /// Position of the peer.
        theirs: u32,
        /// Our position.
        ours: u32,
    },
    /// The packet length is invalid or larger than the available data.
    #[error("invalid packet length {len}: only {written} bytes were written")]
    Length {
        /// Length written by the peer.
        len: u32,
        /// Number of bytes written by the peer, including the length field.
        written: u32,
    },
}

/// Side of a link. The maker writes to the first ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// The side that has created the memory.
    Maker,
    /// The side that has received the memory.
    Taker,
}

/// Shared words of a ring, and the offset of its data.
#[derive(Clone, Copy, Debug)]
struct Ring {
    tail: usize,
    head: usize,
    /// Not 0 if the reader is sleeping.
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

    /// Calls `f` for each contiguous part of `len` bytes starting at `position`, with its offset in
    /// the data and its range. There are one or two parts.
    fn pieces(&self, position: u32, len: usize, mut f: impl FnMut(usize, std::ops::Range<usize>)) {
        let at = position as usize % RING;
        let first = len.min(RING - at);
        f(self.start + at, 0..first);
        if first < len {
            f(self.start, first..len);
        }
    }
}

/// State of both rings on one side.
#[derive(Debug)]
pub(super) struct Rings {
    shared: SharedMemory,
    out: Ring,
    /// Position of the next byte to write, the tail visible to the peer, and the last known head of
    /// the peer.
    tail: u32,
    published: u32,
    head_seen: u32,
    input: Ring,
    /// Position of the next byte to read, the head visible to the peer, and the last known tail of
    /// the peer.
    head: u32,
    released: u32,
    tail_seen: u32,
    /// Buffer for the current packet and its length.
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

    /// Starts a packet of `len` bytes, to be written using [`Rings::write`] and
    /// [`Rings::write_memory`]. This will return `false` if it doesn't fit.
    pub(super) fn begin(&mut self, len: usize) -> Result<bool, Broken> {
        debug_assert!(len <= MAX_DATAGRAM && len.is_multiple_of(4));
        let need = PREFIX + len;
        if RING - (self.tail.wrapping_sub(self.head_seen) as usize) < need {
            let theirs = self.word(self.out.head).load(Ordering::Acquire);
            // The reader can only move forward, up to the position that we have published.
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

    /// Writes data to the current packet.
    pub(super) fn write(&mut self, bytes: &[u8]) {
        let (out, shared) = (self.out, &self.shared);
        out.pieces(self.tail, bytes.len(), |at, part| {
            shared.write(at, &bytes[part]);
        });
        self.tail = self.tail.wrapping_add(bytes.len() as u32);
    }

    /// Writes registered memory to the current packet.
    pub(super) fn write_memory(&mut self, slice: &MemSlice) {
        let (out, shared) = (self.out, &self.shared);
        let len = slice.len();
        out.pieces(self.tail, len, |at, part| match part.len() == len {
            true => shared.write_memory(at, slice),
            false => shared.write_memory(at, &slice.slice(part).expect("a part of it")),
        });
        self.tail = self.tail.wrapping_add(len as u32);
    }

    /// Makes all written data visible to the peer. Returns whether the peer is sleeping and should
    /// be woken up.
    pub(super) fn publish(&mut self) -> bool {
        if self.published == self.tail {
            return false;
        }
        self.published = self.tail;
        self.word(self.out.tail).store(self.tail, Ordering::Release);
        fence(Ordering::SeqCst);
        let sleeps = self.word(self.out.sleeps);
        // Use a load first, since swap always invalidates the peer's cache line. The peer must only
        // be woken once per sleep.
        sleeps.load(Ordering::Relaxed) != 0 && sleeps.swap(0, Ordering::Relaxed) != 0
    }

    /// Copies and returns the next packet, or `None` if the ring is empty.
    pub(super) fn next(&mut self) -> Result<Option<&[u8]>, Broken> {
        if self.tail_seen == self.head {
            self.update_tail()?;
        }
        let written = self.tail_seen.wrapping_sub(self.head);
        if written == 0 {
            return Ok(None);
        }
        let gulp = GULP.min(written as usize);
        self.copy_out(0..gulp);
        // Use our copy, because the peer could modify the length at any time.
        let prefix = self.packet.first_chunk().expect("room for a packet");
        let len = u32::from_ne_bytes(*prefix);
        // Check this first, to avoid an overflow below.
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

    /// Copies data at this offset from the head to `packet`.
    fn copy_out(&mut self, range: std::ops::Range<usize>) {
        let from = self.head.wrapping_add(range.start as u32);
        let room = &mut self.packet[range];
        let shared = &self.shared;
        self.input.pieces(from, room.len(), |at, part| {
            shared.read(at, &mut room[part]);
        });
    }

    /// Updates the position of the peer's writer.
    fn update_tail(&mut self) -> Result<(), Broken> {
        let theirs = self.word(self.input.tail).load(Ordering::Acquire);
        let ours = self.head;
        let written = theirs.wrapping_sub(ours);
        // If it exceeds the ring size, the peer would overwrite unread data. If the position has
        // been moved back, this would be close to 2³² bytes.
        if written as usize > RING || !written.is_multiple_of(4) {
            return Err(Broken::Position { theirs, ours });
        }
        self.tail_seen = theirs;
        Ok(())
    }

    /// Makes the space of all read packets available to the peer.
    pub(super) fn release(&mut self) {
        if self.released != self.head {
            self.released = self.head;
            self.word(self.input.head)
                .store(self.head, Ordering::Release);
        }
    }

    /// Returns whether a packet is available or the peer's position is invalid.
    pub(super) fn has_input(&self) -> bool {
        self.word(self.input.tail).load(Ordering::Acquire) != self.head
    }

    /// Requests a wake-up for the next packet. This will return whether there already is a packet.
    pub(super) fn sleep(&self) -> bool {
        self.word(self.input.sleeps).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.has_input()
    }

    /// Disables wake-ups.
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
    fn packets_wrap_around_in_order() {
        let (mut a, mut b) = pair();
        let memory = Memory::new(4096).unwrap();
        // Fill the ring three times in both directions.
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
    fn full_ring_rejects_packets() {
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
    fn sleeping_reader_is_woken_once() {
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

    /// Reads from a ring with this tail and these initial bytes.
    fn read_hostile(tail: u32, bytes: &[u8]) -> Result<Option<Vec<u8>>, Broken> {
        let (mut a, b) = pair();
        b.shared.write(b.out.start, bytes);
        b.word(b.out.tail).store(tail, Ordering::Release);
        Ok(a.next()?.map(<[u8]>::to_vec))
    }

    #[test]
    fn invalid_tail_breaks_link() {
        for tail in [1, 2, 7, RING as u32 + 4, u32::MAX - 3, 1 << 31] {
            let wrong = Broken::Position {
                theirs: tail,
                ours: 0,
            };
            assert_eq!(read_hostile(tail, &[0; 4]), Err(wrong), "{tail}");
        }
        // If the tail has been moved back, it looks like it is too far ahead.
        let (mut a, mut b) = pair();
        push(&mut b, &[1; 8]);
        b.publish();
        a.next().unwrap();
        b.word(b.out.tail).store(8, Ordering::Release);
        assert!(matches!(a.next(), Err(Broken::Position { ours: 12, .. })));
    }

    #[test]
    fn invalid_length_breaks_link() {
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
        // Exceeds the available data by the length field or more.
        for (len, written) in [(4, 4), (8, 8), (max, max), (256, 128)] {
            let wrong = Broken::Length { len, written };
            assert_eq!(read_hostile(written, &len.to_ne_bytes()), Err(wrong));
        }
        assert_eq!(read_hostile(4, &[0; 4]), Ok(Some(vec![])));
    }

    #[test]
    fn invalid_head_breaks_link() {
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

    /// Even if a peer writes anything anywhere, it can only cause the link to be closed.
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
