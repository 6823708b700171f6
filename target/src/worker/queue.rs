//! Posting on queue pairs, for the channels of every RDMA protocol.

use std::convert::Infallible;
use std::ops::Range;

use arrayvec::ArrayVec;
use riser_memory::Memory;
use riser_transport::verbs::{
    CmId, LKey, QpAttr, QpId, QpState, RKey, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge,
    WrId,
};

use super::Worker;
use super::device::Device;
use super::work::Work;
use crate::fabric::{Direction, RdmaRequest};

/// Receives posted in one call.
pub(super) const RECV_BATCH: usize = 32;

/// A receive to post: its name and its place, in memory of its connection.
pub(super) type Receive = (WrId, Sge);

/// The message that a chain ends with.
#[derive(Debug)]
pub(super) struct ChainSend {
    /// Where its bytes lie. The connection keeps that memory for at least as long as the chains.
    pub(super) bytes: Sge,
    pub(super) op: SendOp,
    pub(super) flags: SendFlags,
}

/// What a device took of a chain that it did not take in full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Posted {
    /// Requests at its beginning, which may be under way, and whose end no completion reports.
    Part,
    /// Nothing.
    Nothing,
}

/// Work requests of one call: those of [`CHAINS`] chains, as a rule, since a call may be a system
/// call.
const POST_BATCH: usize = 64;

/// Chains that are posted together.
const CHAINS: usize = 8;

/// Bytes of data from which chains are not held back for others, about a datagram's.
const CHAINS_BYTES: u64 = 64 << 10;

/// A range of the initiator's memory runs past the end of the address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("remote range {addr:#x}+{len} wraps")]
pub(super) struct RangeWraps {
    addr: u64,
    len: u32,
}

/// Chains of one connection, which are posted together: each some RDMA requests, and a message
/// behind them or none.
///
/// The requests of all of them go first, and then the messages. So packets of one length come in a
/// row, which the network's layers carry as one, and a reliable connection still carries each
/// message out behind the data that it is about. Chains that would hold up the messages of others,
/// with much data or with data that the peer has to send, go behind these. The memory is kept, so
/// that no chain allocates.
#[derive(Debug, Default)]
pub(super) struct Chains {
    /// At most [`CHAINS`]. On the heap as the others: the whole is moved for each connection.
    chains: Vec<Chain>,
    requests: Vec<Request>,
    sges: Vec<Sge>,
    bytes: u64,
}

/// A work request of the chains, where they are posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// One of `requests`.
    Request(usize),
    /// The message of one of `chains`.
    Message(usize),
}

#[derive(Debug)]
struct Chain {
    work: Work,
    requests: Range<usize>,
    message: Option<ChainSend>,
    /// It goes behind the messages of the others.
    is_apart: bool,
}

/// An RDMA request with its scatter-gather entries.
#[derive(Debug)]
struct Request {
    id: WrId,
    op: SendOp,
    sges: Range<usize>,
}

impl Chains {
    /// Adds a chain, unless it names memory that cannot be; `is_full` was false. The last request
    /// of it is signaled and bears the name of its work; those before it complete only if they
    /// fail. The local ranges lie in the pool's mapping, which the device knows by `lkey`.
    ///
    /// The whole chain is checked before any of it is posted: the buffer of a chain that failed
    /// goes back to the pool, so no request of it may be under way.
    pub(super) fn push<L: IntoIterator<Item = Range<usize>>>(
        &mut self,
        work: Work,
        requests: impl Iterator<Item = RdmaRequest<L>>,
        (pool, lkey): (&Memory, LKey),
        message: Option<ChainSend>,
    ) -> Result<(), RangeWraps> {
        let base = pool.addr();
        let (first, first_sge, before) = (self.requests.len(), self.sges.len(), self.bytes);
        let mut fetches = false;
        for request in requests {
            let at = self.sges.len();
            let mut len = 0;
            for range in request.local {
                let length = range.len() as u32;
                self.sges.push(Sge {
                    addr: base + range.start as u64,
                    length,
                    lkey,
                });
                len += length;
            }
            let RemoteAddr { addr, .. } = request.remote;
            // The last byte may be the address space's last.
            if addr.checked_add(u64::from(len) - 1).is_none() {
                self.requests.truncate(first);
                self.sges.truncate(first_sge);
                self.bytes = before;
                return Err(RangeWraps { addr, len });
            }
            let op = match request.direction {
                Direction::FromInitiator => SendOp::Read(request.remote),
                Direction::ToInitiator => SendOp::Write(request.remote),
            };
            fetches |= request.direction == Direction::FromInitiator;
            self.requests.push(Request {
                id: Work::Inner.id(),
                op,
                sges: at..self.sges.len(),
            });
            self.bytes += u64::from(len);
        }
        if message.is_none()
            && let Some(last) = self.requests[first..].last_mut()
        {
            last.id = work.id();
        }
        let is_apart = self.bytes >= CHAINS_BYTES || fetches;
        self.chains.push(Chain {
            work,
            requests: first..self.requests.len(),
            message,
            is_apart,
        });
        Ok(())
    }

    /// Whether the chains are to be posted before another one is added.
    pub(super) fn is_full(&self) -> bool {
        // Messages keep their order: none is added behind one that goes behind the others.
        let last = self.chains.last();
        let is_last = last.is_some_and(|chain| chain.is_apart && chain.message.is_some());
        self.chains.len() == CHAINS || self.bytes >= CHAINS_BYTES || is_last
    }

    /// Posts the chains, and forgets them.
    ///
    /// # Errors
    /// Those that the device did not take in full. The list may be empty: a device may report an
    /// error after it has taken everything, and may not start then.
    pub(super) fn post(
        &mut self,
        device: &mut (dyn Device + 'static),
        qp: QpId,
    ) -> Result<(), ArrayVec<(Work, Posted), CHAINS>> {
        let posted = self.post_all(device, qp).map_err(|taken| self.left(taken));
        self.clear();
        posted
    }

    /// Forgets the chains, of a connection that is gone.
    pub(super) fn clear(&mut self) {
        self.chains.clear();
        self.requests.clear();
        self.sges.clear();
        self.bytes = 0;
    }

    /// Goes through the work requests, in the order in which they are posted.
    fn visit<E>(&self, mut f: impl FnMut(Place) -> Result<(), E>) -> Result<(), E> {
        for chain in self.chains.iter().filter(|chain| !chain.is_apart) {
            for at in chain.requests.clone() {
                f(Place::Request(at))?;
            }
        }
        for (at, chain) in self.chains.iter().enumerate() {
            if !chain.is_apart && chain.message.is_some() {
                f(Place::Message(at))?;
            }
        }
        for (at, chain) in self.chains.iter().enumerate() {
            if !chain.is_apart {
                continue;
            }
            for at in chain.requests.clone() {
                f(Place::Request(at))?;
            }
            if chain.message.is_some() {
                f(Place::Message(at))?;
            }
        }
        Ok(())
    }

    /// The work requests, in the order in which they are posted.
    fn places(&self) -> Vec<Place> {
        let mut places = Vec::new();
        let Ok(()) = self.visit(|place| {
            places.push(place);
            Ok::<_, Infallible>(())
        });
        places
    }

    /// The chains that the device did not take in full, given the number of work requests it took.
    fn left(&self, taken: usize) -> ArrayVec<(Work, Posted), CHAINS> {
        let mut left = ArrayVec::new();
        let places = self.places();
        let (begun, rest) = places.split_at(taken.min(places.len()));
        for (at, chain) in self.chains.iter().enumerate() {
            let is_of_it = |place: &Place| match place {
                Place::Request(request) => chain.requests.contains(request),
                Place::Message(of) => *of == at,
            };
            if rest.iter().any(is_of_it) {
                let posted = match begun.iter().any(is_of_it) {
                    true => Posted::Part,
                    false => Posted::Nothing,
                };
                left.push((chain.work, posted));
            }
        }
        left
    }

    /// Posts as much as the device takes.
    ///
    /// # Errors
    /// The number of work requests that it took.
    fn post_all(&self, device: &mut (dyn Device + 'static), qp: QpId) -> Result<(), usize> {
        let mut taken = 0;
        let mut post = |batch: &mut ArrayVec<SendWr<'_>, POST_BATCH>| {
            if let Err(error) = device.post_send(qp, batch) {
                taken += error.index;
                tracing::warn!(%error, taken, "a chain was not taken");
                return Err(taken);
            }
            taken += batch.len();
            batch.clear();
            Ok(())
        };
        // In batches, since the list lies on the stack: nothing is allocated for a command. It is
        // filled where it lies: one that is collected is moved there, with the room that it does
        // not use.
        let mut batch = ArrayVec::new();
        self.visit(|place| {
            batch.push(self.work_request(place));
            match batch.is_full() {
                true => post(&mut batch),
                false => Ok(()),
            }
        })?;
        match batch.is_empty() {
            true => Ok(()),
            false => post(&mut batch),
        }
    }

    #[inline]
    fn work_request(&self, place: Place) -> SendWr<'_> {
        let (wr_id, op, flags, sges) = match place {
            Place::Request(at) => {
                let Request { id, op, sges } = &self.requests[at];
                // That of a chain without a message ends it.
                let flags = match *id == Work::Inner.id() {
                    true => SendFlags::empty(),
                    false => SendFlags::SIGNALED,
                };
                (*id, *op, flags, &self.sges[sges.clone()])
            }
            Place::Message(at) => {
                let chain = &self.chains[at];
                let send = chain.message.as_ref().expect("a chain with a message");
                let flags = send.flags | SendFlags::SIGNALED;
                (
                    chain.work.id(),
                    send.op,
                    flags,
                    std::slice::from_ref(&send.bytes),
                )
            }
        };
        SendWr {
            wr_id,
            op,
            sges,
            inline: None,
            remote_srqn: None,
            flags,
            ud: None,
        }
    }
}

impl Worker {
    /// Posts receives; how many were taken.
    pub(super) fn post_recvs(&mut self, device: usize, qp: QpId, receives: &[Receive]) -> usize {
        let mut taken = 0;
        for batch in receives.chunks(RECV_BATCH) {
            // Filled where it lies, as in `Chains::post_all`.
            let mut wrs = ArrayVec::<RecvWr<'_>, RECV_BATCH>::new();
            for (wr_id, place) in batch {
                wrs.push(RecvWr {
                    wr_id: *wr_id,
                    sges: std::slice::from_ref(place),
                });
            }
            if let Err(error) = self.devices[device].post_recv(qp, &wrs) {
                tracing::warn!(%error, "a receive was not taken");
                // Those before it are posted, and will complete or be flushed.
                return taken + error.index;
            }
            taken += batch.len();
        }
        taken
    }

    /// Ends a connection and takes its queue pair to the error state, then posts the drain marker;
    /// whether that was taken.
    pub(super) fn cut(&mut self, device: usize, cm: CmId, qp: QpId) -> bool {
        let dev = &mut self.devices[device];
        // Before the connection was tried, or after it is over, the CM has nothing to do.
        let _ = dev.disconnect(cm);
        let error = QpAttr::to(QpState::Error);
        // Already in error, as a rule.
        let _ = dev.modify_qp(qp, &error);
        self.post_empty_write(device, qp, Work::Drain)
    }

    /// Posts a signaled write of no bytes; whether it was taken.
    pub(super) fn post_empty_write(&mut self, device: usize, qp: QpId, work: Work) -> bool {
        let wr = SendWr {
            wr_id: work.id(),
            op: SendOp::Write(RemoteAddr {
                addr: 0,
                rkey: RKey(0),
            }),
            sges: &[],
            inline: None,
            remote_srqn: None,
            flags: SendFlags::SIGNALED,
            ud: None,
        };
        self.devices[device]
            .post_send(qp, &[wr])
            .inspect_err(|error| tracing::warn!(%error, ?work, "a write was not taken"))
            .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::TaskIdx;

    const LEN: u32 = 512;

    fn write_to(addr: u64) -> RdmaRequest {
        let rkey = RKey(7);
        RdmaRequest {
            direction: Direction::ToInitiator,
            remote: RemoteAddr { addr, rkey },
            local: std::iter::once(0..LEN as usize).collect(),
        }
    }

    /// Adds a chain of writes to these addresses.
    fn push(chains: &mut Chains, to: &[u64]) -> Result<(), RangeWraps> {
        let pool = Memory::new(4096).unwrap();
        let writes = to.iter().map(|addr| write_to(*addr));
        let bytes = Sge {
            addr: 64,
            length: 64,
            lkey: LKey(4),
        };
        let send = ChainSend {
            bytes,
            op: SendOp::Send,
            flags: SendFlags::empty(),
        };
        let task = TaskIdx(chains.chains.len() as u16);
        chains.push(Work::Post(task), writes, (&pool, LKey(3)), Some(send))
    }

    #[test]
    fn a_remote_range_may_end_with_the_address_space_and_not_beyond() {
        let last = u64::MAX - u64::from(LEN) + 1;
        let mut chains = Chains::default();
        push(&mut chains, &[0, last]).unwrap();
        assert_eq!(chains.requests.len(), 2);
        let addr = last + 1;
        let refused = push(&mut chains, &[0, 4096, addr]).unwrap_err();
        assert_eq!(refused, RangeWraps { addr, len: LEN });
        // What a refused chain has left is not posted with the others.
        push(&mut chains, &[4096]).unwrap();
        let counts = (
            chains.chains.len(),
            chains.requests.len(),
            chains.sges.len(),
        );
        assert_eq!((counts, chains.bytes), ((2, 3, 3), 3 * u64::from(LEN)));
    }

    #[test]
    fn a_chain_that_would_hold_up_others_goes_behind_them() {
        let mut chains = Chains::default();
        for _ in 0..CHAINS {
            assert!(!chains.is_full());
            push(&mut chains, &[]).unwrap();
        }
        assert!(chains.is_full());
        let (request, message) = (Place::Request, Place::Message);
        let together = [request(0), request(1), message(0), message(1)];
        let mut chains = Chains::default();
        push(&mut chains, &[0]).unwrap();
        push(&mut chains, &[0]).unwrap();
        assert!(!chains.is_full());
        assert_eq!(chains.places(), together);
        // Data that the initiator has to send: behind messages that are added later as well.
        let pool = Memory::new(4096).unwrap();
        let fetch = |chains: &mut Chains, task| {
            let fetch = RdmaRequest {
                direction: Direction::FromInitiator,
                ..write_to(0)
            };
            let (work, fetch) = (Work::Post(TaskIdx(task)), std::iter::once(fetch));
            chains.push(work, fetch, (&pool, LKey(3)), None).unwrap();
        };
        fetch(&mut chains, 7);
        fetch(&mut chains, 8);
        assert!(!chains.is_full(), "both in one list");
        push(&mut chains, &[0]).unwrap();
        let first = [0, 1, 4].map(request);
        let then = [0, 1, 4].map(message);
        let behind = [2, 3].map(request);
        assert_eq!(chains.places(), [&first[..], &then, &behind].concat());
        // Much data.
        let mut chains = Chains::default();
        push(&mut chains, &[]).unwrap();
        let many = CHAINS_BYTES as usize / LEN as usize;
        push(&mut chains, &vec![0; many]).unwrap();
        assert!(chains.is_full());
        let apart = (0..many).map(request).chain([message(1)]);
        let expected: Vec<_> = [message(0)].into_iter().chain(apart).collect();
        assert_eq!(chains.places(), expected);
    }

    #[test]
    fn a_chain_that_was_not_taken_in_full_may_have_begun() {
        use Posted::{Nothing, Part};
        let (first, second, third) = (TaskIdx(0), TaskIdx(1), TaskIdx(2));
        let all = [(first, Nothing), (second, Nothing), (third, Nothing)];
        let begun = [(first, Part), (second, Nothing), (third, Nothing)];
        let left = [&all[..], &begun, &begun, &all[1..], &all[2..], &[]];
        for (taken, left) in left.into_iter().enumerate() {
            let mut chains = Chains::default();
            push(&mut chains, &[0, 0]).unwrap();
            push(&mut chains, &[]).unwrap();
            let pool = Memory::new(4096).unwrap();
            let fetch = RdmaRequest {
                direction: Direction::FromInitiator,
                ..write_to(0)
            };
            let (work, fetch) = (Work::Post(third), std::iter::once(fetch));
            chains.push(work, fetch, (&pool, LKey(3)), None).unwrap();
            let left = left.iter().map(|(task, p)| (Work::Post(*task), *p));
            assert!(chains.left(taken).into_iter().eq(left), "{taken} taken");
        }
    }
}
