//! RDMA beneath a connection of any protocol: its queue pair, its memory keys, its identifier at
//! the connection manager.

use riser_memory::{MemSlice, Memory};
use riser_transport::verbs::{
    Access, CmError, CmId, ConnParam, CqId, LKey, MrId, Notify, PdId, QpCap, QpId, QpInitAttr,
    QpType, RecvOrder, VerbsError,
};

use super::device::Device;
use crate::fabric::{INITIATOR_DEPTH, RESPONDER_RESOURCES};

/// A connection at its device and at the connection manager.
#[derive(Debug)]
pub(super) struct RdmaLink {
    /// Number of the device among those of the worker.
    pub(super) device: usize,
    pub(super) cm: CmId,
    pub(super) hardware: Hardware,
    /// Whether its completion queue is in the worker's list.
    pub(super) is_ready: bool,
    /// The CM has reported the end of the connection.
    pub(super) is_closed: bool,
    /// It was established: there is a peer that may answer a disconnect request.
    pub(super) was_established: bool,
}

impl RdmaLink {
    /// Makes the link of a connection that is not established.
    pub(super) fn new(device: usize, cm: CmId, hardware: Hardware) -> Self {
        Self {
            device,
            cm,
            hardware,
            is_ready: false,
            is_closed: false,
            was_established: false,
        }
    }

    /// Its names in the events of a device: at the connection manager, and of its completion queue.
    pub(super) fn names(&self) -> ((usize, CmId), (usize, CqId)) {
        ((self.device, self.cm), (self.device, self.hardware.cq))
    }

    /// Whether a disconnect request is still to be answered. Otherwise the connection is over on
    /// both sides or was never established, and its identifier may be gone already.
    pub(super) fn owes_disconnect(&self) -> bool {
        self.was_established && !self.is_closed
    }
}

/// Sizes of a queue pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queues {
    /// Work requests of the receive queue.
    pub(super) receives: u32,
    /// Work requests of the send queue.
    pub(super) sends: u32,
    /// Scatter-gather entries of a send request.
    pub(super) max_sge: usize,
}

/// Memory that a queue pair uses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Regions<'a> {
    pub(super) receive_ring: &'a MemSlice,
    pub(super) send_ring: &'a MemSlice,
    /// The worker's data buffers.
    pub(super) pool: &'a Memory,
}

/// Objects of a connection at its device.
#[derive(Debug)]
pub(super) struct Hardware {
    pd: PdId,
    pub(super) cq: CqId,
    pub(super) qp: QpId,
    mrs: Vec<MrId>,
    pub(super) receive_key: LKey,
    pub(super) send_key: LKey,
    pub(super) pool_key: LKey,
    /// The queues were destroyed before the rest.
    pub(super) has_lost_queues: bool,
}

/// Reasons for which a connection cannot be made.
#[derive(Debug, thiserror::Error)]
pub(super) enum SetupError {
    #[error(transparent)]
    Cm(#[from] CmError),
    #[error("no memory: {0}")]
    Memory(#[from] std::io::Error),
    #[error("the device takes no receives")]
    Receives,
}

impl From<VerbsError> for SetupError {
    fn from(e: VerbsError) -> Self {
        Self::Cm(e.into())
    }
}

impl Hardware {
    /// Makes a protection domain of the connection's own, its memory keys, its queues.
    ///
    /// Keys of another connection name nothing in this domain, so a queue pair reaches no rings but
    /// its own. What was made is destroyed in reverse where the rest fails.
    pub(super) fn make(
        dev: &mut (dyn Device + 'static),
        cm: CmId,
        queues: Queues,
        regions: Regions<'_>,
    ) -> Result<Self, SetupError> {
        let pd = dev.alloc_pd()?;
        let mut mrs = Vec::with_capacity(3);
        let built = Self::fill(dev, cm, pd, queues, regions, &mut mrs);
        match built {
            Ok((cq, qp, [receive_key, send_key, pool_key])) => Ok(Self {
                pd,
                cq,
                qp,
                mrs,
                receive_key,
                send_key,
                pool_key,
                has_lost_queues: false,
            }),
            Err(error) => {
                // Regions before the domain that they are in; `fill` has destroyed its queues
                // itself.
                for mr in mrs {
                    let _ = dev.dereg_mr(mr);
                }
                let _ = dev.dealloc_pd(pd);
                Err(error)
            }
        }
    }

    /// Makes the objects in a protection domain; regions that were made are in `mrs` in any case.
    fn fill(
        dev: &mut (dyn Device + 'static),
        cm: CmId,
        pd: PdId,
        queues: Queues,
        regions: Regions<'_>,
        mrs: &mut Vec<MrId>,
    ) -> Result<(CqId, QpId, [LKey; 3]), SetupError> {
        let pool = regions.pool.whole();
        let ranges = [regions.receive_ring, regions.send_ring, &pool];
        let mut keys = [LKey(0); 3];
        for (key, range) in keys.iter_mut().zip(ranges) {
            // No remote access: the target itself moves all data, so a peer that guesses a key
            // reaches nothing with it.
            let mr = dev.reg_mr(pd, range, Access::LOCAL_WRITE)?;
            mrs.push(mr.id);
            *key = mr.lkey;
        }
        // Every request may complete before one completion is taken.
        let cq = dev.create_cq(queues.receives + queues.sends)?;
        let cap = QpCap {
            max_send_sge: queues.max_sge as u32,
            ..QpCap::new(queues.sends, queues.receives)
        };
        // Completions name their receives, so any order will do, and with this one an idle session
        // occupies a few pages of its ring rather than all of it.
        let init = QpInitAttr {
            recv_order: RecvOrder::NewestFirst,
            ..QpInitAttr::new(pd, cq, QpType::Rc, cap)
        };
        let armed = dev.req_notify_cq(cq, Notify::Next).map(|_| ());
        let qp = armed
            .map_err(CmError::from)
            .and_then(|()| dev.create_cm_qp(cm, &init));
        let qp = qp.inspect_err(|_| {
            // Nothing uses it yet.
            let _ = dev.destroy_cq(cq);
        })?;
        Ok((cq, qp, keys))
    }

    /// Destroys the objects. Everything was created by us and is used by nothing else, so a refusal
    /// is a bug; it costs a log line and a leak, not the daemon.
    pub(super) fn destroy(&mut self, dev: &mut (dyn Device + 'static)) {
        self.destroy_queues(dev);
        let mut results: Vec<_> = self.mrs.iter().map(|mr| dev.dereg_mr(*mr)).collect();
        results.push(dev.dealloc_pd(self.pd));
        check_freed(dev, results);
    }

    /// Destroys the queues alone: from now on the device uses no buffer. Returns whether they were
    /// there.
    pub(super) fn destroy_queues(&mut self, dev: &mut (dyn Device + 'static)) -> bool {
        if std::mem::replace(&mut self.has_lost_queues, true) {
            return false;
        }
        let results = vec![dev.destroy_qp(self.qp), dev.destroy_cq(self.cq)];
        check_freed(dev, results);
        true
    }
}

fn check_freed(dev: &(dyn Device + 'static), results: Vec<Result<(), VerbsError>>) {
    if dev.is_gone() {
        // Everything went with it.
        return;
    }
    for error in results.into_iter().filter_map(Result::err) {
        debug_assert!(false, "{error}");
        tracing::error!(%error, "cannot free a connection's device objects");
    }
}

/// Returns the number of READs that we send at once to a peer with these parameters.
pub(super) fn reads(param: &ConnParam) -> u8 {
    INITIATOR_DEPTH.min(param.initiator_depth)
}

/// Returns our answer to a peer that asks for a connection with these parameters.
pub(super) fn answer(param: &ConnParam, private_data: &[u8]) -> ConnParam {
    ConnParam {
        private_data: private_data.to_vec(),
        responder_resources: RESPONDER_RESOURCES.min(param.responder_resources),
        initiator_depth: reads(param),
        retry_count: 7,
        // Seven stands for no limit. An initiator whose receives are late is waited for; one that
        // never posts any runs into the channel's own time limits.
        rnr_retry_count: 7,
        ..ConnParam::default()
    }
}
