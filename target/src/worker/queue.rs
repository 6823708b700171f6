//! Posting work requests to queue pairs, shared by all RDMA protocols.

use std::convert::Infallible;
use std::ops::Range;

use arrayvec::ArrayVec;
use riser_memory::Memory;
use riser_transport::rdma_rw::ReadSinks;
use riser_transport::verbs::{
    CmId, LKey, QpAttr, QpId, QpState, RKey, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge,
    VerbsError, WrId,
};

use super::device::{Device, Devices};
use super::work::Work;
use crate::fabric::{Direction, RdmaRequest};

/// Maximum number of receives to post in a single call.
pub(super) const RECV_BATCH: usize = 32;

/// Receive with its identifier and buffer in the memory of the connection.
pub(super) type Receive = (WrId, Sge);

/// Message at the end of a chain.
#[derive(Debug)]
pub(super) struct ChainSend {
    /// Buffer. The connection must not release this memory before the chain is complete.
    pub(super) bytes: Sge,
    pub(super) op: SendOp,
    pub(super) flags: SendFlags,
}

/// Result for a chain that was not fully posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Posted {
    /// The first requests were posted and may be in progress, but there will be no completion for
    /// them.
    Part,
    /// Nothing was posted.
    Nothing,
}

/// Maximum number of work requests in a single call, which may be a system call. This should be
/// enough for [`CHAINS`] chains.
const POST_BATCH: usize = 64;

/// Maximum number of chains to post together.
const CHAINS: usize = 8;

/// Minimum size of a large transfer in bytes, which is about the size of a datagram. These are not
/// posted with other chains.
const CHAINS_BYTES: u64 = 64 << 10;

/// The address range of the initiator exceeds the address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("remote range {addr:#x}+{len} wraps")]
pub(super) struct RangeWraps {
    addr: u64,
    len: u32,
}

/// Chains to be posted together for a single connection. Each chain has a number of RDMA requests
/// and an optional message.
///
/// All requests are posted first, followed by the messages. This creates a sequence of packets with
/// the same size, which can be merged by the network stack, and a reliable connection still
/// delivers each message after its data. If a chain would delay other messages, because it
/// transfers a large amount of data or has to wait for data from the peer, it is added to the end.
/// The memory is reused to avoid allocations.
#[derive(Debug, Default)]
pub(super) struct Chains {
    /// Up to [`CHAINS`] entries. This is not stored inline, because the struct is moved for each
    /// connection.
    chains: Vec<Chain>,
    requests: Vec<Request>,
    sges: Vec<Sge>,
    bytes: u64,
}

/// Position of a work request in the chains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Index in `requests`.
    Request(usize),
    /// Message of the chain with this index.
    Message(usize),
}

#[derive(Debug)]
struct Chain {
    work: Work,
    requests: Range<usize>,
    message: Option<ChainSend>,
    /// Set if this should be posted after the messages of all other chains.
    is_apart: bool,
}

/// RDMA request and its scatter-gather list.
#[derive(Debug)]
struct Request {
    id: WrId,
    op: SendOp,
    sges: Range<usize>,
}

impl Chains {
    /// Adds a chain if its address ranges are valid. `is_full` must be false. The last request is
    /// signaled and contains the identifier; all other requests only complete on error. Local
    /// ranges are offsets in the pool memory with the key `lkey`.
    ///
    /// The whole chain is checked before we post any requests. If there is an error, the buffer is
    /// returned to the pool, so there must not be any requests in progress.
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
            // The last byte can be at the end of the address space.
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

    /// Registers the sinks of the READs in the last chain. On error, the chain is removed, and
    /// nothing is registered.
    pub(super) fn register_sinks(
        &mut self,
        device: &mut (dyn Device + 'static),
        pool: &Memory,
        sinks: &mut ReadSinks,
    ) -> Result<(), VerbsError> {
        let Some(chain) = self.chains.last() else {
            return Ok(());
        };
        let (id, requests) = (chain.work.id(), chain.requests.clone());
        let reads = self.requests[requests].iter();
        let reads = reads.filter(|request| matches!(request.op, SendOp::Read(_)));
        let mut places = reads.flat_map(|request| request.sges.clone());
        let registered = places.try_for_each(|at| {
            let sge = &mut self.sges[at];
            let start = (sge.addr - pool.addr()) as usize;
            let memory = pool.slice(start..start + sge.length as usize);
            *sge = sinks.register(device, id, &memory.expect("a range of the pool"))?;
            Ok(())
        });
        if registered.is_err() {
            let _ = sinks.release(device, id);
            self.pop();
        }
        registered
    }

    /// Removes the last chain.
    fn pop(&mut self) {
        let Some(chain) = self.chains.pop() else {
            return;
        };
        let of_chain = &self.requests[chain.requests.clone()];
        let first_sge = of_chain
            .first()
            .map_or(self.sges.len(), |request| request.sges.start);
        let removed = self.sges.drain(first_sge..);
        self.bytes -= removed.map(|sge| u64::from(sge.length)).sum::<u64>();
        self.requests.truncate(chain.requests.start);
    }

    /// Returns true if the chains should be posted before adding the next one.
    pub(super) fn is_full(&self) -> bool {
        // To keep the order of messages, nothing can be added after a chain that is posted at the
        // end.
        let last = self.chains.last();
        let is_last = last.is_some_and(|chain| chain.is_apart && chain.message.is_some());
        self.chains.len() == CHAINS || self.bytes >= CHAINS_BYTES || is_last
    }

    /// Posts all chains and clears the list.
    ///
    /// # Errors
    /// Returns the chains that were not fully posted. This can be empty, because a device can
    /// return an error after accepting all requests, for example if it could not be started.
    pub(super) fn post(
        &mut self,
        device: &mut (dyn Device + 'static),
        qp: QpId,
    ) -> Result<(), ArrayVec<(Work, Posted), CHAINS>> {
        let posted = self.post_all(device, qp).map_err(|taken| self.left(taken));
        self.clear();
        posted
    }

    /// Clears the list for a closed connection.
    pub(super) fn clear(&mut self) {
        self.chains.clear();
        self.requests.clear();
        self.sges.clear();
        self.bytes = 0;
    }

    /// Calls `f` for each work request, in the order they are posted.
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

    /// Returns all work requests, in the order they are posted.
    fn places(&self) -> Vec<Place> {
        let mut places = Vec::new();
        let Ok(()) = self.visit(|place| {
            places.push(place);
            Ok::<_, Infallible>(())
        });
        places
    }

    /// Returns the chains that were not fully posted if only `taken` work requests were accepted.
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

    /// Posts as many work requests as possible.
    ///
    /// # Errors
    /// Returns the number of work requests that were posted.
    fn post_all(&self, device: &mut (dyn Device + 'static), qp: QpId) -> Result<(), usize> {
        let mut taken = 0;
        let mut post = |batch: &mut ArrayVec<SendWr<'_>, POST_BATCH>| {
            if let Err(error) = device.post_send(qp, batch) {
                taken += error.index;
                tracing::warn!(%error, taken, "cannot post a chain of work requests");
                return Err(taken);
            }
            taken += batch.len();
            batch.clear();
            Ok(())
        };
        // We use batches because the list is stored on the stack, so there is no allocation for
        // each command. It is filled in place, because `collect` would have to copy the full array.
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
                // This completes a chain without a message.
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

impl Devices {
    /// Posts receives. Returns the number of receives that were posted.
    pub(super) fn post_recvs(&mut self, device: usize, qp: QpId, receives: &[Receive]) -> usize {
        let mut taken = 0;
        for batch in receives.chunks(RECV_BATCH) {
            // Filled in place, like in `Chains::post_all`.
            let mut wrs = ArrayVec::<RecvWr<'_>, RECV_BATCH>::new();
            for (wr_id, place) in batch {
                wrs.push(RecvWr {
                    wr_id: *wr_id,
                    sges: std::slice::from_ref(place),
                });
            }
            if let Err(error) = self[device].post_recv(qp, &wrs) {
                tracing::warn!(%error, "cannot post a receive");
                // All receives before this were posted, and will complete or be flushed.
                return taken + error.index;
            }
            taken += batch.len();
        }
        taken
    }

    /// Disconnects a connection, sets its queue pair to the error state, and posts the drain
    /// marker. Returns false if it can't be posted.
    pub(super) fn cut(&mut self, device: usize, cm: CmId, qp: QpId) -> bool {
        let dev = &mut self[device];
        // This is not necessary if the connection was not established or is already closed.
        let _ = dev.disconnect(cm);
        let error = QpAttr::to(QpState::Error);
        // It is usually already in the error state.
        let _ = dev.modify_qp(qp, &error);
        self.post_empty_write(device, qp, Work::Drain)
    }

    /// Posts a signaled zero-length write. Returns false on error.
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
        self[device]
            .post_send(qp, &[wr])
            .inspect_err(|error| tracing::warn!(%error, ?work, "cannot post a write"))
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

    /// Adds a chain with writes to these addresses.
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
    fn remote_range_must_not_exceed_address_space() {
        let last = u64::MAX - u64::from(LEN) + 1;
        let mut chains = Chains::default();
        push(&mut chains, &[0, last]).unwrap();
        assert_eq!(chains.requests.len(), 2);
        let addr = last + 1;
        let refused = push(&mut chains, &[0, 4096, addr]).unwrap_err();
        assert_eq!(refused, RangeWraps { addr, len: LEN });
        // The requests of a refused chain must not be posted.
        push(&mut chains, &[4096]).unwrap();
        let counts = (
            chains.chains.len(),
            chains.requests.len(),
            chains.sges.len(),
        );
        assert_eq!((counts, chains.bytes), ((2, 3, 3), 3 * u64::from(LEN)));
    }

    #[test]
    fn blocking_chain_is_posted_last() {
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
        // This data has to be sent by the initiator, so it is posted after messages added later.
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
        // Large transfer.
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
    fn partly_accepted_chain_may_have_started() {
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
