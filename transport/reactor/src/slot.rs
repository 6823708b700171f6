//! The table of operations in flight, and everything each one keeps alive.

use std::ptr;

use riser_memory::MemSlice;

use crate::error::SubmitError;
use crate::handle::Handle;

/// A caller's name for an operation. The ring returns it with the completion and reads nothing
/// into it; tokens need not be unique.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub u64);

/// Meaning of a slot's completion beyond its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A result without a further meaning.
    Plain,
    /// A result that is not negative is a new descriptor, owned by the receiver of the completion.
    Accept,
    /// The ring's own read of the waker's counter; never shown to the caller.
    Waker,
}

/// The most bytes that Linux moves in one call.
pub(crate) const MAX_TRANSFER: usize = 0x7fff_f000;

pub(crate) struct Slot {
    generation: u32,
    busy: Option<Busy>,
    /// Vectors the kernel may read until the last completion. The heap block of a `Vec` does not
    /// move while the slot is busy, because only `prepare`, on an idle slot, changes it.
    pub(crate) iovecs: Vec<libc::iovec>,
    /// Message header of a send or receive of several pieces; boxed so that its address is fixed.
    pub(crate) msg: Box<libc::msghdr>,
    /// The caller's pieces, which hold their mappings.
    pub(crate) keep: Vec<MemSlice>,
}

pub(crate) struct Busy {
    pub(crate) token: Token,
    pub(crate) kind: Kind,
    /// Held, not read: a descriptor must not be closed, and its number reused, under an operation.
    _file: Option<Handle>,
}

/// Slots by number, with a list of the idle ones. The bound is the ring's capacity.
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
                // SAFETY: `msghdr` is plain old data for which all zeroes is a valid, empty value.
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

    /// Takes an idle slot and fills it; returns its number and user data. On an error the slot
    /// stays idle.
    pub(crate) fn prepare(
        &mut self,
        token: Token,
        kind: Kind,
        file: Option<Handle>,
        slices: &[MemSlice],
    ) -> Result<(u32, u64), SubmitError> {
        // Taken off the list at the end, so that an error leaves the slot idle.
        let index = *self.idle.last().ok_or(SubmitError::Full)?;
        let slot = &mut self.slots[index as usize];
        slot.iovecs.clear();
        let mut total = 0usize;
        // Neighbouring ranges become one vector: blocks of a pool often are, and one range can be a
        // fixed buffer.
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
        // Linux would cut a longer transfer short. An empty one with pieces is a mistake of the
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
        // Clones keep the mappings: the caller may drop its own while the kernel still writes.
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

    /// The slot's operation for a completion's user data; `None` for one that is over.
    pub(crate) fn busy(&self, user_data: u64) -> Option<&Busy> {
        let (index, generation) = split(user_data);
        let slot = self.slots.get(index as usize)?;
        // A completion of an operation that is over names an older generation.
        (slot.generation == generation)
            .then_some(slot.busy.as_ref())
            .flatten()
    }

    /// Ends the slot's operation and releases what it kept alive.
    pub(crate) fn release(&mut self, user_data: u64) {
        let (index, generation) = split(user_data);
        let slot = &mut self.slots[index as usize];
        assert!(
            slot.generation == generation && slot.busy.is_some(),
            "slot {index} released twice"
        );
        // Before the slot is idle, so that no late completion can mean its next operation.
        slot.generation = slot.generation.wrapping_add(1) & GENERATION;
        slot.busy = None;
        slot.keep.clear();
        self.idle.push(index);
    }

    /// User data of every operation in flight, the ring's own included.
    pub(crate) fn all(&self) -> impl Iterator<Item = u64> + '_ {
        self.slots
            .iter()
            .enumerate()
            .filter_map(|(i, s)| s.busy.as_ref().map(|_| user_data(i as u32, s.generation)))
    }

    /// User data of every operation in flight that bears the token.
    pub(crate) fn with_token(&self, token: Token) -> impl Iterator<Item = u64> + '_ {
        self.slots.iter().enumerate().filter_map(move |(i, s)| {
            let busy = s.busy.as_ref()?;
            // The waker's token is not the caller's, though it may be the same number.
            (busy.token == token && busy.kind != Kind::Waker)
                .then(|| user_data(i as u32, s.generation))
        })
    }
}

/// Generations leave the top bit of the user data clear, for the ring's own cancellations.
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
    fn neighbours_become_one_vector_and_empty_pieces_none() {
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
    fn a_late_completion_finds_no_slot() {
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
