//! Ring of posted send requests.
//!
//! A request is identified by its position since the QP was created, which never wraps. This allows
//! us to use three cursors: the oldest incomplete request (`head`), the request currently being
//! sent (stored in the requester), and the next request to post (`tail`).

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
    /// Not processed yet.
    Posted,
    /// Packet numbers were assigned, and some packets may have been sent.
    Started,
    /// Local operation that was executed and is waiting for previous requests.
    Executed,
    /// Failed locally. The error is reported when all previous requests are complete.
    Failed(WcStatus),
}

/// Posted send request.
#[derive(Clone, Copy, Debug)]
pub struct SendWqe {
    /// Returned in the completion.
    pub wr_id: WrId,
    /// Operation.
    pub op: SendOp,
    /// Operation flags.
    pub flags: SendFlags,
    /// Set if the data was copied when posted.
    is_inline: bool,
    /// Message size in bytes.
    pub length: u32,
    /// Current phase.
    pub phase: Phase,
    /// First packet number, relative to the start of the connection. Valid after `Started`.
    pub first: u64,
    /// Number of packets used in either direction, or 0 for a local operation.
    pub packets: u32,
    /// Number of requests consuming a receive, up to and including this one.
    pub recv_seq: u64,
    /// Number of the peer's SRQ, used for XRC.
    remote_srqn: U24,
    sges: u16,
}

impl SendWqe {
    /// Returns the number of the peer's SRQ, or 0 if not used.
    #[must_use]
    pub fn remote_srqn(&self) -> u32 {
        self.remote_srqn.value()
    }

    /// Returns the packet number following the last packet.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.first + u64::from(self.packets)
    }

    /// Returns the index of a packet number in this request.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a message of 2 GiB has less than 2^24 packets"
    )]
    pub fn index_of(&self, number: u64) -> u32 {
        (number - self.first) as u32
    }

    /// Returns true for a READ or atomic, which require a response instead of an acknowledgement.
    #[must_use]
    pub fn has_response(&self) -> bool {
        matches!(
            self.op,
            SendOp::Read(_) | SendOp::CmpSwap { .. } | SendOp::FetchAdd { .. }
        )
    }

    /// Returns true for a local operation, which doesn't send any packets.
    #[must_use]
    pub fn is_local(&self) -> bool {
        self.op.is_local()
    }

    /// Executes a local operation on the device's key table.
    pub(crate) fn run_local(&self, pd: PdId, qp: QpId, mrs: &mut MrTable) -> Result<(), KeyError> {
        match self.op {
            SendOp::RegMr { mr, key, access } => mrs.reg_fast(pd, mr, key, access),
            SendOp::BindMw(bind) => mrs.bind(pd, qp, &bind),
            SendOp::LocalInv(key) => mrs.invalidate(pd, qp, key),
            _ => unreachable!("not a local operation"),
        }
    }

    /// Returns whether this consumes a receive of the peer.
    #[must_use]
    pub fn consumes_receive(&self) -> bool {
        consumes_receive(&self.op)
    }

    /// Returns the opcode for the completion.
    #[must_use]
    pub fn wc_opcode(&self) -> WcOpcode {
        self.op.wc_opcode()
    }

    /// Creates the completion for this request.
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

/// Request data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payload<'a> {
    /// Copied when posted.
    Inline(&'a [u8]),
    /// Stored in registered memory.
    Sges(&'a [Sge]),
}

/// Size of the table for keys used by requests, which must be a power of two.
const NAMES: usize = 32;

/// Content of an unused slot.
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

/// Posted send requests, oldest first. Limited to [`QpCap::max_send_wr`].
///
/// The memory for all requests is allocated when the queue is created, so posting doesn't need an
/// allocation. A slot is only written when it is used, and an empty queue restarts at the first
/// slot, so that the number of resident pages depends on the maximum queue depth that was actually
/// used.
#[derive(Debug, Default)]
pub struct SendQueue {
    /// Slots that were used. The range from `head` to `tail` contains current requests, and the
    /// rest is unused. This and the next two fields have the capacity of the queue.
    wqes: Vec<SendWqe>,
    /// `max_sge` entries per slot.
    sges: Vec<Sge>,
    /// `max_inline` bytes per slot.
    inline: Vec<u8>,
    depth: usize,
    max_sge: usize,
    max_inline: usize,
    head: u64,
    tail: u64,
    /// Slot of the head.
    first: usize,
    recv_seq: u64,
    /// Indexed by key index, which may be shared by multiple keys: position following the last
    /// request that uses the key.
    named: [u64; NAMES],
}

impl SendQueue {
    /// Creates a queue with the given sizes.
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

    /// Returns the position of the oldest incomplete request.
    #[must_use]
    pub fn head(&self) -> u64 {
        self.head
    }

    /// Returns the position of the next post.
    #[must_use]
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// Returns the number of incomplete requests.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "`max_send_wr` at most")]
    pub fn len(&self) -> usize {
        (self.tail - self.head) as usize
    }

    /// Returns true if there are no requests.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.head == self.tail
    }

    /// Returns the memory size in bytes for a queue with the given sizes.
    #[must_use]
    pub const fn memory(cap: &QpCap) -> usize {
        let list = cap.max_send_sge as usize * size_of::<Sge>();
        let slot = size_of::<SendWqe>() + list + cap.max_inline as usize;
        cap.max_send_wr as usize * slot
    }

    /// Returns the memory used by this queue in bytes.
    #[must_use]
    pub fn footprint(&self) -> usize {
        self.wqes.capacity() * size_of::<SendWqe>()
            + self.sges.capacity() * size_of::<Sge>()
            + self.inline.capacity()
    }

    /// Adds a new slot if it was never used before. Because slots are used in order, this can only
    /// be the next slot at the end.
    fn make_slot(&mut self, slot: usize) {
        if slot == self.wqes.len() {
            self.wqes.push(UNUSED);
            self.sges.resize((slot + 1) * self.max_sge, NO_SGE);
            self.inline.resize((slot + 1) * self.max_inline, 0);
        }
    }

    /// Returns the slot for a position between head and tail.
    #[expect(clippy::cast_possible_truncation, reason = "`max_send_wr` at most")]
    fn slot(&self, at: u64) -> usize {
        // We avoid a division here because this is called several times per packet.
        let slot = self.first + (at - self.head) as usize;
        match slot.checked_sub(self.depth) {
            Some(wrapped) => wrapped,
            None => slot,
        }
    }

    /// Returns the request at a position. Panics if it is not in `head..tail`.
    #[must_use]
    pub fn wqe(&self, at: u64) -> &SendWqe {
        debug_assert!(self.head <= at && at < self.tail);
        &self.wqes[self.slot(at)]
    }

    /// Mutable version of [`SendQueue::wqe`].
    pub fn wqe_mut(&mut self, at: u64) -> &mut SendWqe {
        debug_assert!(self.head <= at && at < self.tail);
        let slot = self.slot(at);
        &mut self.wqes[slot]
    }

    /// Returns the request at a position, if it exists.
    #[must_use]
    pub fn peek(&self, at: u64) -> Option<&SendWqe> {
        (self.head <= at && at < self.tail).then(|| self.wqe(at))
    }

    /// Returns the scatter list for a request, which is empty for inline data.
    #[must_use]
    pub fn sges(&self, at: u64) -> &[Sge] {
        match self.payload(at) {
            Payload::Inline(_) => &[],
            Payload::Sges(sges) => sges,
        }
    }

    /// Returns the request data.
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

    /// Returns whether an incomplete request before this position uses the key.
    #[must_use]
    pub fn names(&self, key: RKey, before: u64) -> bool {
        // This is usually false, as owners invalidate keys that are only used by the peer.
        self.named[name_of(key.0)] > self.head
            && (self.head..before).any(|at| self.sges(at).iter().any(|sge| sge.lkey.0 == key.0))
    }

    /// Posts a single request.
    ///
    /// # Errors
    /// Returns the reason. In this case the queue was not modified.
    pub fn push(&mut self, wr: &SendWr<'_>) -> Result<(), PostReason> {
        // The destination of a connection is set in RTR. We return an error because otherwise the
        // consumer would not notice that this destination is ignored.
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
        // All checks must be done before the first write, so that a failed post has no effect.
        if self.len() == self.depth {
            return Err(PostReason::QueueFull);
        }
        let slot = self.slot(self.tail);
        self.make_slot(slot);
        // The consumer can reuse the memory for inline data as soon as this returns.
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
        // Since credits count receives of the peer, we assign each request the number of the
        // receive that it will consume. Other requests use the number of the previous request.
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

    /// Removes the last `count` requests, or fewer if processing has already started.
    pub fn unpost(&mut self, count: usize) {
        for _ in 0..count.min(self.len()) {
            let newest = *self.wqe(self.tail - 1);
            if newest.phase != Phase::Posted {
                return;
            }
            // `named` may still refer to this request, which only results in an unnecessary search.
            self.recv_seq -= u64::from(newest.consumes_receive());
            self.tail -= 1;
        }
    }

    /// Removes the oldest request. Panics if the queue is empty.
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

    /// Removes all requests. Positions restart at 0.
    pub fn clear(&mut self) {
        self.head = 0;
        self.tail = 0;
        self.first = 0;
        // Restart the numbers, because the credits for the next connection start at 0.
        self.recv_seq = 0;
        self.named = [0; NAMES];
    }
}

/// Returns the index of a key in [`SendQueue::named`]. The low byte is ignored because it can be
/// changed by the owner.
fn name_of(key: u32) -> usize {
    (key >> 8) as usize % NAMES
}

/// Validates a request without using the queue state. Returns the message size.
pub(crate) fn check_shape(wr: &SendWr<'_>) -> Result<u32, PostReason> {
    // The format is checked when posting but keys are checked when the request is started, as a
    // chain can contain a registration for a key used by a later request.
    let length = match wr.inline {
        None => message_len(wr.sges)?,
        Some(_) if !wr.sges.is_empty() => return Err(PostReason::InvalidInline),
        Some(data) => u32::try_from(data.len()).map_err(|_| PostReason::InvalidInline)?,
    };
    // READs and atomics write to the scatter list, so they can't use inline data.
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

/// Validates an atomic with a result of `length` bytes. An invalid atomic would be rejected by the
/// peer, which fails the connection.
fn check_atomic(remote: RemoteAddr, length: u32) -> Result<(), PostReason> {
    if length != 8 {
        return Err(PostReason::InvalidRequest(
            "atomic result must have eight bytes",
        ));
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
    fn inline_data_is_copied_when_posted() {
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
    fn requests_are_unposted_unless_started() {
        let mut q = SendQueue::new(&CAP);
        let send = |n| SendWr::new(n, SendOp::Send, &[]);
        q.push(&send(1)).unwrap();
        q.wqe_mut(0).phase = Phase::Started;
        q.push(&send(2)).unwrap();
        q.unpost(2);
        assert_eq!((q.len(), q.wqe(0).wr_id), (1, WrId(1)));
        // The next request uses the free slot and the correct receive number.
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
    fn invalid_requests_are_rejected_when_posted() {
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
    fn slots_are_created_for_deepest_queue() {
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
        // Test wrapping at the end of the ring without emptying it.
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
    fn incomplete_request_uses_key() {
        let mut q = SendQueue::new(&CAP);
        let by = |lkey| Sge {
            lkey: LKey(lkey),
            ..sge(0, 8)
        };
        // Two keys sharing a table index, and one sharing the key index.
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
