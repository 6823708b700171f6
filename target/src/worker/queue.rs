//! Posting on queue pairs, for the channels of every RDMA protocol.

use arrayvec::ArrayVec;
use riser_memory::{MemSlice, Memory};
use riser_transport::rw::{Direction as RwDirection, LocalSegment, RemoteSegment, RwLimits};
use riser_transport::verbs::{
    CmId, LKey, QpAttr, QpId, QpState, RKey, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge,
    WrId,
};

use super::Worker;
use super::exec::Work;
use crate::srp::transfer::{Direction, RdmaWr};

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

/// A chain whose RDMA requests were gathered.
#[derive(Debug)]
pub(super) struct ChainPost {
    pub(super) device: usize,
    pub(super) qp: QpId,
    /// Which way the RDMA requests go.
    pub(super) direction: Direction,
    pub(super) max_sge: usize,
    /// The name of its last request.
    pub(super) id: WrId,
    pub(super) send: Option<ChainSend>,
}

/// The segments of RDMA requests on their way to the planner.
pub(super) struct Gather<'a> {
    pub(super) local: &'a mut Vec<LocalSegment>,
    pub(super) remote: &'a mut Vec<RemoteSegment>,
    pub(super) pool: &'a Memory,
    pub(super) lkey: LKey,
}

impl Gather<'_> {
    /// Forgets what was gathered for another chain.
    pub(super) fn clear(&mut self) {
        self.local.clear();
        self.remote.clear();
    }

    /// Takes the next request of the chain.
    pub(super) fn take(&mut self, wr: &RdmaWr) {
        let len: usize = wr.local.iter().map(ExactSizeIterator::len).sum();
        self.remote.push(RemoteSegment {
            addr: wr.remote.addr,
            rkey: wr.remote.rkey,
            len: len as u32,
        });
        let (pool, lkey) = (self.pool, self.lkey);
        self.local.extend(wr.local.iter().map(|range| LocalSegment {
            slice: pool.slice(range.clone()).expect("buffers lie in the pool"),
            lkey,
        }));
    }
}

impl Worker {
    /// Posts what was gathered, then the message, in one go; whether that succeeded. If not, what
    /// was posted of it completes with an error.
    pub(super) fn post_chain(&mut self, chain: &ChainPost) -> bool {
        let limits = RwLimits {
            max_sge: chain.max_sge as u32,
            max_message: u32::MAX,
            // The channel has taken send-queue credit for exactly these.
            max_wrs: u32::MAX,
        };
        let direction = match chain.direction {
            Direction::FromInitiator => RwDirection::Read,
            Direction::ToInitiator => RwDirection::Write,
        };
        let planned = self
            .rw
            .plan(direction, &self.rw_local, 0, &self.rw_remote, limits);
        let sge = chain.send.as_ref().map(|send| {
            [Sge {
                addr: send.bytes.addr(),
                length: send.bytes.len() as u32,
                lkey: send.lkey,
            }]
        });
        let then = chain
            .send
            .as_ref()
            .zip(sge.as_ref())
            .map(|(send, sge)| SendWr {
                wr_id: chain.id,
                op: send.op,
                sges: sge,
                flags: send.flags | SendFlags::SIGNALED,
                ud: None,
            });
        let posted = match planned {
            Ok(_) => {
                let dev = &mut self.devices[chain.device];
                self.rw
                    .post(dev, chain.qp, chain.id, Work::Inner.id(), then)
                    .inspect_err(|error| tracing::warn!(%error, "a chain was not taken"))
                    .is_ok()
            }
            Err(error) => {
                tracing::debug!(%error, "a descriptor names no memory");
                false
            }
        };
        // The pool outlives every queue pair, so nothing needs to be held for its sake.
        self.rw.release();
        posted
    }

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
            let sges: ArrayVec<[Sge; 1], RECV_BATCH> = batch
                .iter()
                .map(|(_, slot)| {
                    [Sge {
                        addr: slot.addr(),
                        length: slot.len() as u32,
                        lkey,
                    }]
                })
                .collect();
            let wrs: ArrayVec<RecvWr<'_>, RECV_BATCH> = batch
                .iter()
                .zip(&sges)
                .map(|((wr_id, _), sges)| RecvWr {
                    wr_id: *wr_id,
                    sges,
                })
                .collect();
            if let Err(error) = self.devices[device].post_recv(qp, &wrs) {
                tracing::warn!(%error, "a receive was not taken");
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
