//! Posting on queue pairs, for the channels of every RDMA protocol.

use std::ops::Range;

use arrayvec::ArrayVec;
use riser_memory::{MemSlice, Memory};
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

/// A receive to post: its name and its place.
pub(super) type Receive = (WrId, MemSlice);

/// The message that a chain ends with.
#[derive(Debug)]
pub(super) struct ChainSend {
    pub(super) bytes: MemSlice,
    pub(super) lkey: LKey,
    pub(super) op: SendOp,
    pub(super) flags: SendFlags,
}

/// How much of a chain a device took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Posted {
    /// All of it: its last request will complete.
    Whole,
    /// Requests at its beginning, which may be under way, and whose end no completion reports.
    Part,
    /// Nothing.
    Nothing,
}

/// Work requests of one call.
const POST_BATCH: usize = 16;

/// The RDMA requests of a chain, as they are posted: each an operation with its scatter-gather
/// entries. It is kept between chains, so that none allocates.
#[derive(Debug, Default)]
pub(super) struct Chain {
    requests: Vec<(SendOp, Range<usize>)>,
    sges: Vec<Sge>,
}

/// A range of the initiator's memory runs past the end of the address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("remote range {addr:#x}+{len} wraps")]
pub(super) struct RangeWraps {
    addr: u64,
    len: u32,
}

impl Chain {
    /// Takes these requests, and no others. Their local ranges lie in the pool's mapping, which the
    /// device knows by `lkey`.
    ///
    /// The whole chain is checked before any of it is posted: the buffer of a chain that failed
    /// goes back to the pool, so no request of it may be under way.
    pub(super) fn build(
        &mut self,
        requests: impl Iterator<Item = RdmaRequest>,
        pool: &Memory,
        lkey: LKey,
    ) -> Result<(), RangeWraps> {
        self.requests.clear();
        self.sges.clear();
        for request in requests {
            let RemoteAddr { addr, .. } = request.remote;
            let len = request.bytes();
            // The last byte may be the address space's last.
            if addr.checked_add(u64::from(len) - 1).is_none() {
                return Err(RangeWraps { addr, len });
            }
            let first = self.sges.len();
            self.sges.extend(request.local.iter().map(|range| Sge {
                addr: pool.addr() + range.start as u64,
                length: range.len() as u32,
                lkey,
            }));
            let op = match request.direction {
                Direction::FromInitiator => SendOp::Read(request.remote),
                Direction::ToInitiator => SendOp::Write(request.remote),
            };
            self.requests.push((op, first..self.sges.len()));
        }
        Ok(())
    }

    /// Posts the chain, and `send` behind it. The last request of all is signaled and bears `id`;
    /// those before it complete only if they fail.
    pub(super) fn post(
        &self,
        device: &mut (dyn Device + 'static),
        qp: QpId,
        id: WrId,
        send: Option<&ChainSend>,
    ) -> Posted {
        let message = send.map(|send| {
            [Sge {
                addr: send.bytes.addr(),
                length: send.bytes.len() as u32,
                lkey: send.lkey,
            }]
        });
        let last = send.zip(message.as_ref()).map(|(send, sges)| SendWr {
            wr_id: id,
            op: send.op,
            sges,
            flags: send.flags | SendFlags::SIGNALED,
            ud: None,
        });
        let count = self.requests.len();
        let mut requests = self.requests.iter().enumerate().map(|(i, (op, sges))| {
            let is_last = last.is_none() && i + 1 == count;
            SendWr {
                wr_id: if is_last { id } else { Work::Inner.id() },
                op: *op,
                sges: &self.sges[sges.clone()],
                flags: if is_last {
                    SendFlags::SIGNALED
                } else {
                    SendFlags::empty()
                },
                ud: None,
            }
        });
        // The message is the last: a reliable connection carries requests out in order, so an
        // initiator that has it has the data that were written before.
        let mut all = requests.by_ref().chain(last);
        let mut is_begun = false;
        // In batches, since the list lies on the stack: nothing is allocated for a command. It is
        // filled where it lies: one that is collected is moved there, with the room that it does
        // not use.
        let mut batch = ArrayVec::<SendWr<'_>, POST_BATCH>::new();
        loop {
            batch.clear();
            batch.extend(all.by_ref().take(POST_BATCH));
            if batch.is_empty() {
                return Posted::Whole;
            }
            if let Err(error) = device.post_send(qp, &batch) {
                is_begun |= error.index > 0;
                tracing::warn!(%error, is_begun, "a chain was not taken");
                return match is_begun {
                    true => Posted::Part,
                    false => Posted::Nothing,
                };
            }
            is_begun = true;
        }
    }
}

impl Worker {
    /// Posts receives; how many were taken.
    pub(super) fn post_recvs(
        &mut self,
        device: usize,
        qp: QpId,
        lkey: LKey,
        receives: &[Receive],
    ) -> usize {
        let mut taken = 0;
        for batch in receives.chunks(RECV_BATCH) {
            // Filled where they lie, as in `Chain::post`.
            let mut sges = ArrayVec::<[Sge; 1], RECV_BATCH>::new();
            sges.extend(batch.iter().map(|(_, slot)| {
                [Sge {
                    addr: slot.addr(),
                    length: slot.len() as u32,
                    lkey,
                }]
            }));
            let mut wrs = ArrayVec::<RecvWr<'_>, RECV_BATCH>::new();
            wrs.extend(batch.iter().zip(&sges).map(|((wr_id, _), sges)| RecvWr {
                wr_id: *wr_id,
                sges,
            }));
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
        let error = QpAttr {
            state: Some(QpState::Error),
            ..QpAttr::default()
        };
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

    const LEN: u32 = 512;

    fn write_to(addr: u64) -> RdmaRequest {
        let rkey = RKey(7);
        RdmaRequest {
            direction: Direction::ToInitiator,
            remote: RemoteAddr { addr, rkey },
            local: std::iter::once(0..LEN as usize).collect(),
        }
    }

    /// Builds a chain of writes to these addresses.
    fn build(chain: &mut Chain, to: &[u64]) -> Result<(), RangeWraps> {
        let pool = Memory::new(4096).unwrap();
        chain.build(to.iter().map(|addr| write_to(*addr)), &pool, LKey(3))
    }

    #[test]
    fn a_remote_range_may_end_with_the_address_space_and_not_beyond() {
        let last = u64::MAX - u64::from(LEN) + 1;
        let mut chain = Chain::default();
        build(&mut chain, &[0, last]).unwrap();
        assert_eq!(chain.requests.len(), 2);
        let addr = last + 1;
        let refused = build(&mut chain, &[0, 4096, addr]).unwrap_err();
        assert_eq!(refused, RangeWraps { addr, len: LEN });
        // What a refused chain has left is not in the next one.
        build(&mut chain, &[4096]).unwrap();
        assert_eq!((chain.requests.len(), chain.sges.len()), (1, 1));
    }
}
