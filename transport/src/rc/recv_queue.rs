//! Ring of posted receives, either for a single QP or shared.

use crate::mr::{KeyError, MrTable};
use crate::verbs::{LKey, PdId, PostError, PostReason, RecvOrder, RecvWr, Sge, WrId};

use super::MAX_MESSAGE;
use super::message::walk;

/// Posted receives, consumed in the order they were posted or newest first ([`RecvOrder`]). If the
/// queue is full, posting returns [`PostReason::QueueFull`].
#[derive(Debug)]
pub struct RecvQueue {
    heads: Box<[Head]>,
    /// `max_sge` entries per slot.
    sges: Box<[Sge]>,
    max_sge: u32,
    order: RecvOrder,
    first: usize,
    len: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Head {
    wr_id: WrId,
    sges: u32,
    length: u32,
}

/// Receive consumed by a message: work request ID, scatter list and size.
#[derive(Debug)]
pub struct RecvWqe {
    /// Returned in the completion.
    pub wr_id: WrId,
    /// Total size in bytes.
    pub length: u32,
    sges: Box<[Sge]>,
    count: usize,
}

pub(super) const NO_SGE: Sge = Sge {
    addr: 0,
    length: 0,
    lkey: LKey(0),
};

impl RecvWqe {
    /// Creates an empty receive with space for `max_sge` entries.
    #[must_use]
    pub fn new(max_sge: u32) -> Self {
        Self {
            wr_id: WrId(0),
            length: 0,
            sges: vec![NO_SGE; max_sge as usize].into_boxed_slice(),
            count: 0,
        }
    }

    pub(super) fn footprint(&self) -> usize {
        size_of_val(&*self.sges)
    }

    /// Returns the scatter list.
    #[must_use]
    pub fn sges(&self) -> &[Sge] {
        &self.sges[..self.count]
    }

    /// Writes a packet at `offset` in the message. On error, nothing is written.
    pub(crate) fn scatter(
        &self,
        pd: PdId,
        mrs: &MrTable,
        offset: usize,
        data: &[u8],
    ) -> Result<(), KeyError> {
        let sges = self.sges();
        // We need two passes, because an entry with an invalid key must not result in a partial
        // write to the previous entries.
        if sges.len() > 1 {
            walk(sges, offset, data.len(), |sge, within, _, take| {
                let part = within..within + take;
                mrs.resolve_local_part(pd, sge, part, true).map(drop)
            })?;
        }
        walk(sges, offset, data.len(), |sge, within, done, take| {
            let span = mrs.resolve_local_part(pd, sge, within..within + take, true)?;
            span.write(within, &data[done..done + take]);
            Ok(())
        })
    }
}

/// Copies a scatter list to a destination of the same length.
pub(super) fn copy_sges(to: &mut [Sge], from: &[Sge]) {
    // Most lists have a single entry, for which calling `memcpy` would be slow.
    match (&mut *to, from) {
        ([to], [from]) => *to = *from,
        _ => to.copy_from_slice(from),
    }
}

/// Returns the total size of a scatter list if it is valid for a message.
pub(crate) fn message_len(sges: &[Sge]) -> Result<u32, PostReason> {
    // We need 64 bits because the sum of two entries can exceed 32 bits.
    let sum: u64 = match sges {
        [only] => only.length.into(),
        _ => sges.iter().map(|s| u64::from(s.length)).sum(),
    };
    match u32::try_from(sum) {
        Ok(sum) if sum <= MAX_MESSAGE => Ok(sum),
        _ => Err(PostReason::MessageTooLong),
    }
}

impl RecvQueue {
    /// Creates a queue for `max_wr` receives with up to `max_sge` entries.
    #[must_use]
    pub fn new(max_wr: u32, max_sge: u32) -> Self {
        let depth = max_wr as usize;
        Self {
            heads: vec![Head::default(); depth].into_boxed_slice(),
            sges: vec![NO_SGE; depth * max_sge as usize].into_boxed_slice(),
            max_sge,
            order: RecvOrder::OldestFirst,
            first: 0,
            len: 0,
        }
    }

    /// Sets the order in which receives are consumed. The queue must be empty.
    #[must_use]
    pub fn with_order(mut self, order: RecvOrder) -> Self {
        self.order = order;
        self
    }

    /// Returns the number of posted receives.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no posted receives.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the maximum number of receives.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.heads.len()
    }

    /// Returns the maximum number of scatter list entries per receive.
    #[must_use]
    pub fn max_sge(&self) -> u32 {
        self.max_sge
    }

    /// Returns the memory size in bytes for a queue with `max_wr` receives of up to `max_sge`
    /// entries.
    #[must_use]
    pub const fn memory(max_wr: u32, max_sge: u32) -> usize {
        max_wr as usize * (size_of::<Head>() + max_sge as usize * size_of::<Sge>())
    }

    /// Returns the memory used by this queue in bytes.
    #[must_use]
    pub fn footprint(&self) -> usize {
        size_of_val(&*self.heads) + size_of_val(&*self.sges)
    }

    /// Posts receives. If this fails, the receives before the index in the error have been posted.
    ///
    /// # Errors
    /// [`PostReason::QueueFull`], [`PostReason::TooManySges`], [`PostReason::MessageTooLong`].
    pub fn post(&mut self, wrs: &[RecvWr<'_>]) -> Result<(), PostError> {
        for (index, wr) in wrs.iter().enumerate() {
            self.push(wr)
                .map_err(|reason| PostError { index, reason })?;
        }
        Ok(())
    }

    fn push(&mut self, wr: &RecvWr<'_>) -> Result<(), PostReason> {
        if wr.sges.len() > self.max_sge as usize {
            return Err(PostReason::TooManySges);
        }
        let length = message_len(wr.sges)?;
        if self.len == self.heads.len() {
            return Err(PostReason::QueueFull);
        }
        // All checks must be done before writing to the slot, so that a failed post has no effect.
        let slot = self.slot(self.len);
        #[expect(clippy::cast_possible_truncation, reason = "`max_sge` at most")]
        let sges = wr.sges.len() as u32;
        self.heads[slot] = Head {
            wr_id: wr.wr_id,
            sges,
            length,
        };
        let at = slot * self.max_sge as usize;
        copy_sges(&mut self.sges[at..at + wr.sges.len()], wr.sges);
        self.len += 1;
        Ok(())
    }

    /// Returns the slot for a position relative to the oldest receive, at most the number of slots.
    fn slot(&self, place: usize) -> usize {
        let slot = self.first + place;
        match slot.checked_sub(self.heads.len()) {
            Some(wrapped) => wrapped,
            None => slot,
        }
    }

    /// Returns the slot of the next receive, if any.
    fn next(&self) -> Option<usize> {
        let last = self.len.checked_sub(1)?;
        Some(match self.order {
            RecvOrder::OldestFirst => self.first,
            RecvOrder::NewestFirst => self.slot(last),
        })
    }

    /// Removes the next receive.
    fn advance(&mut self) {
        // For newest-first order, the last receive is removed and the positions don't change.
        if self.order == RecvOrder::OldestFirst {
            self.first = self.slot(1);
        }
        self.len -= 1;
    }

    /// Returns the size of the next receive in bytes, if any.
    #[must_use]
    pub fn next_length(&self) -> Option<u32> {
        self.next().map(|slot| self.heads[slot].length)
    }

    /// Moves the next receive to `out`, or returns false if the queue is empty.
    ///
    /// # Panics
    /// Panics if the receive has more entries than `out` has space for.
    pub fn pop(&mut self, out: &mut RecvWqe) -> bool {
        let Some(slot) = self.next() else {
            return false;
        };
        let head = self.heads[slot];
        let at = slot * self.max_sge as usize;
        let count = head.sges as usize;
        // Copy the list so that the slot can be reused for a new post while the message is still
        // being received.
        copy_sges(&mut out.sges[..count], &self.sges[at..at + count]);
        out.count = count;
        out.wr_id = head.wr_id;
        out.length = head.length;
        self.advance();
        true
    }

    /// Removes the next receive and returns only its ID. Used when flushing.
    pub fn pop_id(&mut self) -> Option<WrId> {
        let id = self.heads[self.next()?].wr_id;
        self.advance();
        Some(id)
    }

    /// Removes all receives without generating completions.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Changes the capacity and keeps all posted receives. Returns false if they don't fit.
    pub fn resize(&mut self, max_wr: u32) -> bool {
        if (max_wr as usize) < self.len {
            return false;
        }
        // Post the receives again, as the position where the ring wraps may change. This must start
        // with the oldest receive regardless of the order in which they are consumed.
        let order = std::mem::replace(&mut self.order, RecvOrder::OldestFirst);
        let mut next = Self::new(max_wr, self.max_sge).with_order(order);
        let mut wqe = RecvWqe::new(self.max_sge);
        while self.pop(&mut wqe) {
            let wr = RecvWr {
                wr_id: wqe.wr_id,
                sges: wqe.sges(),
            };
            next.push(&wr).expect("existing receives fit");
        }
        *self = next;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sge(length: u32) -> Sge {
        Sge {
            addr: 7,
            length,
            lkey: LKey(9),
        }
    }

    #[test]
    fn receives_are_consumed_in_order_within_limit() {
        let mut q = RecvQueue::new(2, 2);
        let two = [sge(3), sge(4)];
        let wr = |id, sges| RecvWr {
            wr_id: WrId(id),
            sges,
        };
        q.post(&[wr(1, &two), wr(2, &[])]).unwrap();
        let full = q.post(&[wr(3, &[])]).unwrap_err();
        assert_eq!((full.index, full.reason), (0, PostReason::QueueFull));
        let mut wqe = RecvWqe::new(2);
        assert!(q.pop(&mut wqe));
        assert_eq!((wqe.wr_id, wqe.length, wqe.sges()), (WrId(1), 7, &two[..]));
        q.post(&[wr(3, &two[..1])]).unwrap();
        assert!(q.resize(5) && !q.resize(1));
        assert_eq!((q.capacity(), q.len()), (5, 2));
        assert_eq!(
            [q.pop_id(), q.pop_id(), q.pop_id()],
            [Some(WrId(2)), Some(WrId(3)), None]
        );
    }

    #[test]
    fn newest_first_keeps_oldest_receive() {
        let mut q = RecvQueue::new(3, 1).with_order(RecvOrder::NewestFirst);
        let entry = [sge(5)];
        let wr = |id| RecvWr {
            wr_id: WrId(id),
            sges: &entry,
        };
        q.post(&[wr(1), wr(2), wr(3)]).unwrap();
        let mut wqe = RecvWqe::new(1);
        // With one message at a time, we always use the same receive.
        for _ in 0..5 {
            assert_eq!(q.next_length(), Some(5));
            assert!(q.pop(&mut wqe));
            assert_eq!(wqe.wr_id, WrId(3));
            q.post(&[wr(3)]).unwrap();
        }
        let full = q.post(&[wr(4)]).unwrap_err();
        assert_eq!(full.reason, PostReason::QueueFull);
        assert!(q.resize(4));
        q.post(&[wr(4)]).unwrap();
        let ids: Vec<_> = std::iter::from_fn(|| q.pop_id()).collect();
        assert_eq!(ids, [WrId(4), WrId(3), WrId(2), WrId(1)]);
        assert!(!q.pop(&mut wqe) && q.next_length().is_none());
    }

    #[test]
    fn oversized_receive_is_rejected_with_index() {
        let mut q = RecvQueue::new(4, 2);
        let (three, huge) = ([sge(1); 3], [sge(u32::MAX), sge(1)]);
        let wr = |sges| RecvWr {
            wr_id: WrId(0),
            sges,
        };
        let e = q.post(&[wr(&three[..1]), wr(&three)]).unwrap_err();
        assert_eq!((e.index, e.reason), (1, PostReason::TooManySges));
        let e = q.post(&[wr(&huge)]).unwrap_err();
        assert_eq!(e.reason, PostReason::MessageTooLong);
        assert_eq!(q.len(), 1);
    }
}
