//! The ring of posted send requests.
//!
//! Requests are named by their position since the queue pair was created, a number that never
//! wraps, so that three cursors can point into the ring: the oldest request not yet completed
//! (`head`), the request being cut into packets (the requester's own), and where the next post goes
//! (`tail`).

use crate::mr::{KeyError, MrTable};
use crate::verbs::{
    Completion, PdId, PostReason, QpCap, QpId, RKey, RemoteAddr, SendFlags, SendOp, SendWr, Sge,
    WcOpcode, WcStatus, WrId,
};

use crate::wire::ids::U24;

use super::recv_queue::{NO_SGE, copy_sges, message_len};

/// Phase of a send request.
///
/// ```text
/// Posted ──first packet──> Started ──all acknowledged──> (retired)
///    │                        │
///    ├──local operation──> Executed ──all before retired──> (retired)
///    └──────────┴──error──> Failed ──all before retired──> (retired, queue pair to ERROR)
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Nothing of it has been done.
    Posted,
    /// Has packet numbers; some packets may have gone out.
    Started,
    /// A local operation that is done and waits for the requests before it.
    Executed,
    /// Failed locally; the error is reported when the requests before it have completed.
    Failed(WcStatus),
}

/// A posted send request.
#[derive(Clone, Copy, Debug)]
pub struct SendWqe {
    /// Comes back in the completion.
    pub wr_id: WrId,
    /// Operation of the request.
    pub op: SendOp,
    /// Flags of the operation.
    pub flags: SendFlags,
    /// Its data was copied at the post.
    is_inline: bool,
    /// Bytes of its message.
    pub length: u32,
    /// Phase of the request.
    pub phase: Phase,
    /// Number of its first packet, counted since the connection began; from `Started` on.
    pub first: u64,
    /// Packets that it takes, in either direction; 0 for a local operation.
    pub packets: u32,
    /// Receive-consuming requests up to and including this one.
    pub recv_seq: u64,
    /// Number of the peer's shared receive queue, with XRC.
    remote_srqn: U24,
    sges: u16,
}

impl SendWqe {
    /// Number of the peer's shared receive queue; 0 where the request names none.
    #[must_use]
    pub fn remote_srqn(&self) -> u32 {
        self.remote_srqn.value()
    }

    /// Number of the first packet after its last.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.first + u64::from(self.packets)
    }

    /// Place of a packet number among the request's packets.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a message of 2 GiB has less than 2^24 packets"
    )]
    pub fn index_of(&self, number: u64) -> u32 {
        (number - self.first) as u32
    }

    /// Returns whether it is answered by more than an acknowledgement: a READ or an atomic.
    #[must_use]
    pub fn has_response(&self) -> bool {
        matches!(
            self.op,
            SendOp::Read(_) | SendOp::CmpSwap { .. } | SendOp::FetchAdd { .. }
        )
    }

    /// Whether it sends no packet.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(
            self.op,
            SendOp::RegMr { .. } | SendOp::BindMw(_) | SendOp::LocalInv(_)
        )
    }

    /// Carries out a local operation on the device's own table.
    pub(crate) fn run_local(&self, pd: PdId, qp: QpId, mrs: &mut MrTable) -> Result<(), KeyError> {
        match self.op {
            SendOp::RegMr { mr, key, access } => mrs.reg_fast(pd, mr, key, access),
            SendOp::BindMw(bind) => mrs.bind(pd, qp, &bind),
            SendOp::LocalInv(key) => mrs.invalidate(pd, qp, key),
            _ => unreachable!("a local operation"),
        }
    }

    /// Returns whether it takes a receive of the peer's.
    #[must_use]
    pub fn consumes_receive(&self) -> bool {
        consumes_receive(&self.op)
    }

    /// The opcode of its completion.
    #[must_use]
    pub fn wc_opcode(&self) -> WcOpcode {
        self.op.wc_opcode()
    }

    /// Makes the completion of the request.
    #[must_use]
    pub fn completion(&self, qp: QpId, qp_num: u32, status: WcStatus) -> Completion {
        Completion {
            byte_len: if status.is_ok() { self.length } else { 0 },
            ..Completion::new(self.wr_id, status, self.wc_opcode(), qp, qp_num)
        }
    }
}

fn consumes_receive(op: &SendOp) -> bool {
    matches!(
        op,
        SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_) | SendOp::WriteImm(..)
    )
}

/// The data of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload<'a> {
    /// Copied at the post.
    Inline(&'a [u8]),
    /// In memory.
    Sges(&'a [Sge]),
}

/// Places for what the requests of a queue name; a power of two.
const NAMES: usize = 32;

/// Content of a slot that no request has used.
const UNUSED: SendWqe = SendWqe {
    wr_id: WrId(0),
    op: SendOp::Send,
    flags: SendFlags::empty(),
    is_inline: false,
    length: 0,
    phase: Phase::Executed,
    first: 0,
    packets: 0,
    recv_seq: 0,
    remote_srqn: U24::new(0),
    sges: 0,
};

/// Posted send requests, oldest first. Bound: [`QpCap::max_send_wr`].
///
/// The memory of all requests is allocated with the queue, so that no post allocates. A slot is
/// written only when a request takes it, and an empty queue begins again with its first slot: so
/// the pages that become resident are those of the deepest queue that there was.
#[derive(Debug, Default)]
pub struct SendQueue {
    /// Slots that were used: those from `head` to `tail` are requests, the others hold old ones.
    /// Of the capacity of the queue, as the next two.
    wqes: Vec<SendWqe>,
    /// `max_sge` entries for each of them.
    sges: Vec<Sge>,
    /// `max_inline` bytes for each of them.
    inline: Vec<u8>,
    depth: usize,
    max_sge: usize,
    max_inline: usize,
    head: u64,
    tail: u64,
    /// Slot of the head.
    first: usize,
    recv_seq: u64,
    /// By the index of a key, which others may share: the position behind the newest request that
    /// names it.
    named: [u64; NAMES],
}

impl SendQueue {
    /// A queue of the given depths.
    #[must_use]
    pub fn new(cap: &QpCap) -> Self {
        let depth = cap.max_send_wr as usize;
        let max_sge = cap.max_send_sge as usize;
        let max_inline = cap.max_inline as usize;
        Self {
            wqes: Vec::with_capacity(depth),
            sges: Vec::with_capacity(depth * max_sge),
            inline: Vec::with_capacity(depth * max_inline),
            depth,
            max_sge,
            max_inline,
            head: 0,
            tail: 0,
            first: 0,
            recv_seq: 0,
            named: [0; NAMES],
        }
    }

    /// Position of the oldest request not completed.
    #[must_use]
    pub fn head(&self) -> u64 {
        self.head
    }

    /// Position of the next post.
    #[must_use]
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// Number of requests that are not completed.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "`max_send_wr` at most")]
    pub fn len(&self) -> usize {
        (self.tail - self.head) as usize
    }

    /// Returns whether the queue holds no request.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// Bytes of memory that a queue of the given depths holds.
    #[must_use]
    pub const fn memory(cap: &QpCap) -> usize {
        let list = cap.max_send_sge as usize * size_of::<Sge>();
        let slot = size_of::<SendWqe>() + list + cap.max_inline as usize;
        cap.max_send_wr as usize * slot
    }

    /// Bytes of memory that the queue holds.
    #[must_use]
    pub fn footprint(&self) -> usize {
        self.wqes.capacity() * size_of::<SendWqe>()
            + self.sges.capacity() * size_of::<Sge>()
            + self.inline.capacity()
    }

    /// Makes the slot that a request takes, if none has taken it before. That is the one behind the
    /// others, since slots are taken in turn.
    fn make_slot(&mut self, slot: usize) {
        if slot == self.wqes.len() {
            self.wqes.push(UNUSED);
            self.sges.resize((slot + 1) * self.max_sge, NO_SGE);
            self.inline.resize((slot + 1) * self.max_inline, 0);
        }
    }

    /// The slot of a position from the head to the tail.
    #[expect(clippy::cast_possible_truncation, reason = "`max_send_wr` at most")]
    fn slot(&self, at: u64) -> usize {
        // Without a division, since it is looked up several times for each packet.
        let slot = self.first + (at - self.head) as usize;
        match slot.checked_sub(self.depth) {
            Some(wrapped) => wrapped,
            None => slot,
        }
    }

    /// The request at a position. Panics outside `head..tail`.
    #[must_use]
    pub fn wqe(&self, at: u64) -> &SendWqe {
        debug_assert!(self.head <= at && at < self.tail);
        &self.wqes[self.slot(at)]
    }

    /// As [`SendQueue::wqe`], to change.
    pub fn wqe_mut(&mut self, at: u64) -> &mut SendWqe {
        debug_assert!(self.head <= at && at < self.tail);
        let slot = self.slot(at);
        &mut self.wqes[slot]
    }

    /// The request at a position, if there is one.
    #[must_use]
    pub fn peek(&self, at: u64) -> Option<&SendWqe> {
        (self.head <= at && at < self.tail).then(|| self.wqe(at))
    }

    /// The scatter list of a request; empty for an inline one.
    #[must_use]
    pub fn sges(&self, at: u64) -> &[Sge] {
        match self.payload(at) {
            Payload::Inline(_) => &[],
            Payload::Sges(sges) => sges,
        }
    }

    /// The data of a request.
    #[must_use]
    pub fn payload(&self, at: u64) -> Payload<'_> {
        let slot = self.slot(at);
        let wqe = &self.wqes[slot];
        if wqe.is_inline {
            let from = slot * self.max_inline;
            Payload::Inline(&self.inline[from..from + wqe.length as usize])
        } else {
            let from = slot * self.max_sge;
            Payload::Sges(&self.sges[from..from + usize::from(wqe.sges)])
        }
    }

    /// Whether a request before a position, which is not completed, reads or writes memory by a key.
    #[must_use]
    pub fn names(&self, key: RKey, before: u64) -> bool {
        // As a rule none does: owners invalidate keys that they gave to the peer.
        self.named[name_of(key.0)] > self.head
            && (self.head..before).any(|at| self.sges(at).iter().any(|sge| sge.lkey.0 == key.0))
    }

    /// Posts one request.
    ///
    /// # Errors
    /// The reason of a refusal; nothing has then changed.
    pub fn push(&mut self, wr: &SendWr<'_>) -> Result<(), PostReason> {
        // A connection's destination is fixed at RTR; one in the request would be ignored, which
        // the consumer would not notice.
        if wr.ud.is_some() {
            return Err(PostReason::InvalidRequest(
                "a destination on a connected queue pair",
            ));
        }
        let length = check_shape(wr)?;
        if wr.inline.is_some_and(|data| data.len() > self.max_inline) {
            return Err(PostReason::InvalidInline);
        }
        if wr.sges.len() > self.max_sge {
            return Err(PostReason::TooManySges);
        }
        // All checks come before the first write, so that a refused request leaves no trace.
        if self.len() == self.depth {
            return Err(PostReason::QueueFull);
        }
        let slot = self.slot(self.tail);
        self.make_slot(slot);
        // The consumer may reuse the memory of inline data as soon as the post returns.
        if let Some(data) = wr.inline {
            let at = slot * self.max_inline;
            self.inline[at..at + data.len()].copy_from_slice(data);
        } else {
            let at = slot * self.max_sge;
            copy_sges(&mut self.sges[at..at + wr.sges.len()], wr.sges);
            for sge in wr.sges {
                self.named[name_of(sge.lkey.0)] = self.tail + 1;
            }
        }
        // Credits count receives of the peer's, so each request has the number of the receive
        // that it will take. One that takes none has that of the request before it.
        self.recv_seq += u64::from(consumes_receive(&wr.op));
        #[expect(clippy::cast_possible_truncation, reason = "`max_sge` at most")]
        let sges = wr.sges.len() as u16;
        self.wqes[slot] = SendWqe {
            wr_id: wr.wr_id,
            op: wr.op,
            flags: wr.flags,
            is_inline: wr.inline.is_some(),
            length,
            phase: Phase::Posted,
            first: 0,
            packets: 0,
            recv_seq: self.recv_seq,
            remote_srqn: U24::new(wr.remote_srqn.unwrap_or(0)),
            sges,
        };
        self.tail += 1;
        Ok(())
    }

    /// Takes the newest `count` requests back, or fewer where something has been done for one.
    pub fn unpost(&mut self, count: usize) {
        for _ in 0..count.min(self.len()) {
            let newest = *self.wqe(self.tail - 1);
            if newest.phase != Phase::Posted {
                return;
            }
            // `named` may name it for longer, which costs a look at the requests and no more.
            self.recv_seq -= u64::from(newest.consumes_receive());
            self.tail -= 1;
        }
    }

    /// Takes the oldest request out. Panics on an empty queue.
    pub fn retire(&mut self) -> &SendWqe {
        assert!(!self.is_empty(), "a posted request");
        let slot = self.first;
        self.first = self.slot(self.head + 1);
        self.head += 1;
        if self.is_empty() {
            self.first = 0;
        }
        &self.wqes[slot]
    }

    /// Forgets every request; positions start again at 0.
    pub fn clear(&mut self) {
        self.head = 0;
        self.tail = 0;
        self.first = 0;
        // Numbered from the first again: the credits of the next connection begin at 0.
        self.recv_seq = 0;
        self.named = [0; NAMES];
    }
}

/// The place of a key in [`SendQueue::named`]: its low byte is its owner's.
fn name_of(key: u32) -> usize {
    (key >> 8) as usize % NAMES
}

/// Checks a request by itself, without regard to a queue; returns the length of its message.
fn check_shape(wr: &SendWr<'_>) -> Result<u32, PostReason> {
    // Shape is checked at the post, and keys when the request starts: a chain may register a
    // region in front of the request that uses it.
    let length = match wr.inline {
        None => message_len(wr.sges)?,
        Some(_) if !wr.sges.is_empty() => return Err(PostReason::InvalidInline),
        Some(data) => u32::try_from(data.len()).map_err(|_| PostReason::InvalidInline)?,
    };
    // READs and atomics write into the scatter list, so it cannot be data that was copied.
    let may_inline = match wr.op {
        SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_) => true,
        SendOp::Write(_) | SendOp::WriteImm(..) => true,
        SendOp::Read(_) => false,
        SendOp::CmpSwap { remote, .. } | SendOp::FetchAdd { remote, .. } => {
            check_atomic(remote, length)?;
            false
        }
        SendOp::RegMr { .. } | SendOp::BindMw(_) | SendOp::LocalInv(_) => {
            if !wr.sges.is_empty() {
                return Err(PostReason::InvalidRequest(
                    "a local operation has no scatter list",
                ));
            }
            false
        }
    };
    if wr.inline.is_some() && !may_inline {
        return Err(PostReason::InvalidInline);
    }
    Ok(length)
}

/// Checks an atomic whose result has `length` bytes. The peer would refuse a wrong one, and a
/// refusal ends the connection.
fn check_atomic(remote: RemoteAddr, length: u32) -> Result<(), PostReason> {
    if length != 8 {
        return Err(PostReason::InvalidRequest("an atomic returns eight bytes"));
    }
    if !remote.addr.is_multiple_of(8) {
        return Err(PostReason::InvalidRequest(
            "an atomic's address is a multiple of eight",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::LKey;

    const CAP: QpCap = QpCap {
        max_send_wr: 2,
        max_recv_wr: 0,
        max_send_sge: 2,
        max_recv_sge: 0,
        max_inline: 16,
    };

    fn sge(addr: u64, length: u32) -> Sge {
        Sge {
            addr,
            length,
            lkey: LKey(0),
        }
    }

    #[test]
    fn inline_data_is_copied_at_the_post() {
        let mut q = SendQueue::new(&CAP);
        let mut data = *b"payload";
        q.push(&SendWr::with_inline(1, SendOp::Send, &data))
            .unwrap();
        data.fill(0);
        assert_eq!(q.payload(0), Payload::Inline(b"payload"));
        assert_eq!(q.wqe(0).length, 7);
        let long = SendWr::with_inline(1, SendOp::Send, &[0; 17]);
        assert_eq!(q.push(&long), Err(PostReason::InvalidInline));
        let both = SendWr {
            sges: &[sge(8, 4)],
            ..SendWr::with_inline(1, SendOp::Send, &data)
        };
        assert_eq!(q.push(&both), Err(PostReason::InvalidInline));
        assert_eq!(q.len(), 1);
        q.push(&SendWr::with_inline(2, SendOp::Send, &[])).unwrap();
        assert_eq!(q.payload(1), Payload::Inline(b""));
    }

    #[test]
    fn requests_are_taken_back_until_something_was_done_for_them() {
        let mut q = SendQueue::new(&CAP);
        let send = |n| SendWr::new(n, SendOp::Send, &[]);
        q.push(&send(1)).unwrap();
        q.wqe_mut(0).phase = Phase::Started;
        q.push(&send(2)).unwrap();
        q.unpost(2);
        assert_eq!((q.len(), q.wqe(0).wr_id), (1, WrId(1)));
        // The next one has its place, and the number of its receive.
        q.push(&send(3)).unwrap();
        assert_eq!((q.wqe(1).wr_id, q.wqe(1).recv_seq), (WrId(3), 2));
        q.retire();
        q.unpost(5);
        assert!(q.is_empty());
        q.push(&send(4)).unwrap();
        q.push(&send(5)).unwrap();
        assert_eq!((q.wqe(1).wr_id, q.wqe(2).wr_id), (WrId(4), WrId(5)));
    }

    #[test]
    fn requests_against_the_rules_are_refused() {
        let mut q = SendQueue::new(&CAP);
        let remote = RemoteAddr {
            addr: 4,
            rkey: RKey(1),
        };
        let eight = [sge(0, 8)];
        let add = |remote| SendOp::FetchAdd { remote, add: 1 };
        let aligned = RemoteAddr { addr: 8, ..remote };
        let refused = [
            SendWr::new(0, add(remote), &eight),
            SendWr::new(0, add(aligned), &[]),
            SendWr::with_inline(0, add(aligned), &[0; 8]),
            SendWr::with_inline(0, SendOp::Read(remote), &[0; 8]),
            SendWr::with_inline(0, SendOp::LocalInv(RKey(1)), &[]),
            SendWr::new(0, SendOp::LocalInv(RKey(1)), &eight),
        ];
        for wr in refused {
            q.push(&wr).unwrap_err();
        }
        let three = [sge(0, 1); 3];
        let wr = SendWr::new(0, SendOp::Send, &three);
        assert_eq!(q.push(&wr), Err(PostReason::TooManySges));
        let wr = SendWr::new(0, SendOp::Send, &[]);
        q.push(&wr).unwrap();
        q.push(&wr).unwrap();
        assert_eq!(q.push(&wr), Err(PostReason::QueueFull));
        q.retire();
        q.push(&wr).unwrap();
        assert_eq!((q.head(), q.tail(), q.wqe(2).recv_seq), (1, 3, 3));
    }

    #[test]
    fn a_slot_is_made_for_the_deepest_queue_only() {
        let cap = QpCap {
            max_send_wr: 3,
            ..CAP
        };
        let mut q = SendQueue::new(&cap);
        let most = q.footprint();
        let list = [sge(1, 8), sge(2, 8)];
        let wr = SendWr::new(0, SendOp::Send, &list);
        for _ in 0..5 {
            q.push(&wr).unwrap();
            q.retire();
        }
        assert_eq!((q.wqes.len(), q.sges.len(), q.head()), (1, 2, 5));
        // Around the end of the ring, which is never empty meanwhile.
        q.push(&wr).unwrap();
        for n in 6..20 {
            let other = [sge(n, 8)];
            q.push(&SendWr::new(n, SendOp::Send, &other)).unwrap();
            assert_eq!((q.wqe(n).wr_id, q.sges(n)), (WrId(n), &other[..]));
            q.retire();
        }
        q.push(&wr).unwrap();
        q.push(&wr).unwrap();
        assert_eq!(q.push(&wr), Err(PostReason::QueueFull));
        assert_eq!((q.wqes.len(), q.footprint()), (3, most));
    }

    #[test]
    fn a_key_is_named_until_its_request_is_completed() {
        let mut q = SendQueue::new(&CAP);
        let by = |lkey| Sge {
            lkey: LKey(lkey),
            ..sge(0, 8)
        };
        // Keys that share a place, and one that shares the index.
        let (key, other) = (0x100, (NAMES as u32 + 1) << 8);
        let list = [by(other), by(key)];
        q.push(&SendWr::new(1, SendOp::Send, &list)).unwrap();
        q.push(&SendWr::new(2, SendOp::Send, &[by(7)])).unwrap();
        let names = |q: &SendQueue, key| q.names(RKey(key), q.tail());
        assert!(names(&q, key) && names(&q, other) && names(&q, 7));
        assert!(!names(&q, key + 1) && !names(&q, 2 * other));
        assert!(!q.names(RKey(7), 1), "it is not before that position");
        q.retire();
        assert!(!names(&q, key) && !names(&q, other) && names(&q, 7));
        q.clear();
        assert!(!names(&q, 7));
    }
}
