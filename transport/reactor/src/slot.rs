//! The table of operations in flight, and the resources that they keep alive.

use std::ptr;

use riser_memory::MemSlice;

use crate::error::SubmitError;
use crate::handle::Handle;

/// Identifies an operation for its caller. The ring returns it with the completion and does not
/// interpret it. Tokens do not need to be unique.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub u64);

/// Determines how a slot's completion is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A plain result.
    Plain,
    /// A non-negative result is a new descriptor, owned by the receiver of the completion.
    Accept,
    /// The ring's own read of the waker's counter. Never passed to the caller.
    Waker,
}

/// Maximum number of bytes that Linux transfers in one call.
pub(crate) const MAX_TRANSFER: usize = 0x7fff_f000;

pub(crate) struct Slot {
    generation: u32,
    busy: Option<Busy>,
    /// Vectors that the kernel may read until the last completion. The heap block of this `Vec`
    /// does not move while the slot is busy, because it is only changed by `prepare` on an idle
    /// slot.
    pub(crate) iovecs: Vec<libc::iovec>,
    /// Message header for sending or receiving multiple pieces. Boxed, so that its address is
    /// stable.
    pub(crate) msg: Box<libc::msghdr>,
    /// The caller's pieces, which keep their mappings alive.
    pub(crate) keep: Vec<MemSlice>,
}

pub(crate) struct Busy {
    pub(crate) token: Token,
    pub(crate) kind: Kind,
    /// Not read, but prevents the descriptor from being closed, and its number reused, during an
    /// operation.
    _file: Option<Handle>,
}

/// Slots by number, with a list of idle slots. The number of slots is bounded by the ring's
/// capacity.
pub(crate) struct Slots {
    slots: Box<[Slot]>,
    idle: Vec<u32>,
    max_slices: usize,
}

impl Slots {
    pub(crate) fn new(capacity: u32, max_slices: usize) -> Self {
        let slots = (0..capacity)
            .map(|_| Slot {
                generation: 0,
                busy: None,
                iovecs: Vec::new(),
                // SAFETY: `msghdr` is plain old data, and all zeroes is a valid, empty value.
                #[allow(unsafe_code, reason = "libc offers no other constructor")]
                msg: Box::new(unsafe { std::mem::zeroed() }),
                keep: Vec::new(),
            })
            .collect();
        Self {
            slots,
            idle: (0..capacity).rev().collect(),
            max_slices,
        }
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.slots.len() - self.idle.len()
    }

    pub(crate) fn max_slices(&self) -> usize {
        self.max_slices
    }

    /// Allocates and fills an idle slot. Returns its number and user data. On error the slot stays
    /// idle.
    pub(crate) fn prepare(
        &mut self,
        token: Token,
        kind: Kind,
        file: Option<Handle>,
        slices: &[MemSlice],
    ) -> Result<(u32, u64), SubmitError> {
        // Removed from the list at the end, so that the slot stays idle on error.
        let index = *self.idle.last().ok_or(SubmitError::Full)?;
        let slot = &mut self.slots[index as usize];
        slot.iovecs.clear();
        let mut total = 0usize;
        // Merge adjacent ranges into one vector. Blocks of a pool often are adjacent, and a single
        // range can use a fixed buffer.
        for s in slices.iter().filter(|s| !s.is_empty()) {
            total = total.saturating_add(s.len());
            let base = s.ptr().cast::<libc::c_void>();
            if let Some(last) = slot.iovecs.last_mut()
                && last.iov_base.addr() + last.iov_len == base.addr()
            {
                last.iov_len += s.len();
            } else if slot.iovecs.len() == self.max_slices {
                return Err(SubmitError::TooManySlices {
                    max: self.max_slices,
                });
            } else {
                slot.iovecs.push(libc::iovec {
                    iov_base: base,
                    iov_len: s.len(),
                });
            }
        }
        // Linux would truncate a longer transfer. An empty transfer with pieces is an error of the
        // caller.
        if total > MAX_TRANSFER || (total == 0 && !slices.is_empty()) {
            return Err(SubmitError::Length { len: total });
        }
        slot.msg.msg_iov = if slot.iovecs.is_empty() {
            ptr::null_mut()
        } else {
            slot.iovecs.as_mut_ptr()
        };
        slot.msg.msg_iovlen = slot.iovecs.len() as _;
        debug_assert!(slot.keep.is_empty());
        // These clones keep the mappings alive, because the caller may drop its own while the
        // kernel is still writing.
        slot.keep.extend_from_slice(slices);
        slot.busy = Some(Busy {
            token,
            kind,
            _file: file,
        });
        self.idle.pop();
        Ok((index, user_data(index, slot.generation)))
    }

    pub(crate) fn slot(&mut self, index: u32) -> &mut Slot {
        &mut self.slots[index as usize]
    }

    /// Returns the slot's operation for a completion's user data, or `None` if the operation has
    /// completed.
    pub(crate) fn busy(&self, user_data: u64) -> Option<&Busy> {
        let (index, generation) = split(user_data);
        let slot = self.slots.get(index as usize)?;
        // A completion of an operation that has already completed has an older generation.
        (slot.generation == generation)
            .then_some(slot.busy.as_ref())
            .flatten()
    }

    /// Completes the slot's operation and releases its resources.
    pub(crate) fn release(&mut self, user_data: u64) {
        let (index, generation) = split(user_data);
        let slot = &mut self.slots[index as usize];
        assert!(
            slot.generation == generation && slot.busy.is_some(),
            "slot {index} released twice"
        );
        // This must precede freeing the slot, so that a late completion can't refer to its next
        // operation.
        slot.generation = slot.generation.wrapping_add(1) & GENERATION;
        slot.busy = None;
        slot.keep.clear();
        self.idle.push(index);
    }

    /// Returns the user data of all operations in flight, including the ring's own.
    pub(crate) fn all(&self) -> impl Iterator<Item = u64> + '_ {
        self.slots
            .iter()
            .enumerate()
            .filter_map(|(i, s)| s.busy.as_ref().map(|_| user_data(i as u32, s.generation)))
    }

    /// Returns the user data of all operations in flight with this token.
    pub(crate) fn with_token(&self, token: Token) -> impl Iterator<Item = u64> + '_ {
        self.slots.iter().enumerate().filter_map(move |(i, s)| {
            let busy = s.busy.as_ref()?;
            // The waker's token is not the caller's, even if the numbers are equal.
            (busy.token == token && busy.kind != Kind::Waker)
                .then(|| user_data(i as u32, s.generation))
        })
    }
}

/// Mask for generations. The top bit of the user data is clear, because the ring uses it for its
/// own cancellations.
const GENERATION: u32 = 0x7fff_ffff;

fn user_data(index: u32, generation: u32) -> u64 {
    (u64::from(generation) << 32) | u64::from(index)
}

fn split(user_data: u64) -> (u32, u32) {
    (user_data as u32, (user_data >> 32) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use riser_memory::Memory;

    #[test]
    fn adjacent_slices_are_merged() {
        let m = Memory::new(4096).unwrap();
        let piece = |r| m.slice(r).unwrap();
        let mut slots = Slots::new(2, 2);
        let (i, ud) = slots
            .prepare(
                Token(1),
                Kind::Plain,
                None,
                &[
                    piece(0..512),
                    piece(512..512),
                    piece(512..600),
                    piece(700..800),
                ],
            )
            .unwrap();
        let lens: Vec<_> = slots.slot(i).iovecs.iter().map(|v| v.iov_len).collect();
        assert_eq!(lens, [600, 100]);
        let too_many = [piece(0..1), piece(2..3), piece(4..5)];
        assert_eq!(
            slots.prepare(Token(2), Kind::Plain, None, &too_many),
            Err(SubmitError::TooManySlices { max: 2 })
        );
        assert_eq!(slots.in_flight(), 1);
        slots.release(ud);
        assert_eq!(slots.in_flight(), 0);
    }

    #[test]
    fn late_completion_finds_no_slot() {
        let mut slots = Slots::new(1, 1);
        let (_, old) = slots.prepare(Token(1), Kind::Plain, None, &[]).unwrap();
        assert_eq!(
            slots.prepare(Token(2), Kind::Plain, None, &[]),
            Err(SubmitError::Full)
        );
        slots.release(old);
        let (_, new) = slots.prepare(Token(3), Kind::Plain, None, &[]).unwrap();
        assert!(slots.busy(old).is_none());
        assert_eq!(slots.busy(new).unwrap().token, Token(3));
        assert_eq!(slots.with_token(Token(3)).collect::<Vec<_>>(), [new]);
    }
}
