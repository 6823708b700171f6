//! RDMA resources for a connection, shared by all protocols: queue pair, memory keys, and
//! connection manager identifier.

use riser_memory::{MemSlice, Memory};
use riser_transport::rdma_rw::ReadSinks;
use riser_transport::verbs::{
    Access, CmError, CmId, ConnParam, CqId, DeviceAttr, LKey, MrId, Notify, PdId, QpCap, QpId,
    QpInitAttr, QpType, RecvOrder, VerbsError, WrId,
};

use super::device::Device;
use crate::fabric::{INITIATOR_DEPTH, MAX_SGE, RESPONDER_RESOURCES};

/// Device and connection manager state for a connection.
#[derive(Debug)]
pub(super) struct RdmaLink {
    /// Device index of the worker.
    pub(super) device: usize,
    pub(super) cm: CmId,
    pub(super) hardware: Hardware,
    /// Set if its completion queue is in the list of the worker.
    pub(super) is_ready: bool,
    /// Set if the CM has reported that the connection is closed.
    pub(super) is_closed: bool,
    /// Set if the connection was established, so there is a peer that can reply to a disconnect
    /// request.
    pub(super) was_established: bool,
}

impl RdmaLink {
    /// Creates the state for a connection that is not established.
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

    /// Returns the identifiers used for device events: connection manager and completion queue.
    pub(super) fn names(&self) -> ((usize, CmId), (usize, CqId)) {
        ((self.device, self.cm), (self.device, self.hardware.cq))
    }

    /// Returns true if we are waiting for a reply to our disconnect request. If this returns false,
    /// the connection was closed by both sides or never established, and the identifier may already
    /// be destroyed.
    pub(super) fn owes_disconnect(&self) -> bool {
        self.was_established && !self.is_closed
    }
}

/// Queue pair sizes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queues {
    /// Maximum number of receive requests.
    pub(super) receives: u32,
    /// Maximum number of send requests.
    pub(super) sends: u32,
    /// Maximum number of scatter-gather entries for a send request.
    pub(super) max_sge: usize,
}

/// Memory used by a queue pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct Regions<'a> {
    pub(super) receive_ring: &'a MemSlice,
    pub(super) send_ring: &'a MemSlice,
    /// Data buffers of the worker.
    pub(super) pool: &'a Memory,
}

/// Device objects of a connection.
#[derive(Debug)]
pub(super) struct Hardware {
    pd: PdId,
    pub(super) cq: CqId,
    pub(super) qp: QpId,
    mrs: Vec<MrId>,
    pub(super) receive_key: LKey,
    pub(super) send_key: LKey,
    pub(super) pool_key: LKey,
    /// Local memory of READs, if it must be registered for each READ instead of using `pool_key`.
    pub(super) sinks: Option<ReadSinks>,
    /// Set if the queues were already destroyed.
    pub(super) has_lost_queues: bool,
}

/// Error when creating a connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum SetupError {
    #[error(transparent)]
    Cm(#[from] CmError),
    #[error("cannot allocate memory: {0}")]
    Memory(#[from] std::io::Error),
    #[error("the device does not accept receives")]
    Receives,
}

impl From<VerbsError> for SetupError {
    fn from(e: VerbsError) -> Self {
        Self::Cm(e.into())
    }
}

impl Hardware {
    /// Creates a protection domain for this connection, its memory keys, and queues.
    ///
    /// Keys of other connections are not valid in this domain, so a queue pair can only access its
    /// own rings. On error, all objects are destroyed in reverse order.
    pub(super) fn make(
        dev: &mut (dyn Device + 'static),
        cm: CmId,
        queues: Queues,
        regions: Regions<'_>,
    ) -> Result<Self, SetupError> {
        let pd = dev.alloc_pd()?;
        let max_sge = queues.max_sge as u32;
        // Each READ has a work request in the send queue.
        let sinks = ReadSinks::new(dev.device_attr(), pd, queues.sends, max_sge);
        let sinks = sinks.inspect_err(|_| {
            let _ = dev.dealloc_pd(pd);
        })?;
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
                sinks,
                has_lost_queues: false,
            }),
            Err(error) => {
                // Regions have to be deregistered before the domain. `fill` has already destroyed
                // the queues.
                for mr in mrs {
                    let _ = dev.dereg_mr(mr);
                }
                let _ = dev.dealloc_pd(pd);
                Err(error)
            }
        }
    }

    /// Creates the objects in a protection domain. Registered regions are always added to `mrs`.
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
            // We don't need remote access because all transfers are done by the target, so a peer
            // can't use a key even if it's known.
            let mr = dev.reg_mr(pd, range, Access::LOCAL_WRITE)?;
            mrs.push(mr.id);
            *key = mr.lkey;
        }
        // All requests can complete before we poll the queue.
        let cq = dev.create_cq(queues.receives + queues.sends)?;
        let cap = QpCap {
            max_send_sge: queues.max_sge as u32,
            ..QpCap::new(queues.sends, queues.receives)
        };
        // Completions contain the receive, so the order doesn't matter. With this setting, an idle
        // session only uses a few pages of its ring and not all of it.
        let init = QpInitAttr {
            recv_order: RecvOrder::NewestFirst,
            ..QpInitAttr::new(pd, cq, QpType::Rc, cap)
        };
        let armed = dev.req_notify_cq(cq, Notify::Next).map(|_| ());
        let qp = armed
            .map_err(CmError::from)
            .and_then(|()| dev.create_cm_qp(cm, &init));
        let qp = qp.inspect_err(|_| {
            // It is not used yet.
            let _ = dev.destroy_cq(cq);
        })?;
        Ok((cq, qp, keys))
    }

    /// Destroys the objects. We have created all of them and they are no longer in use, so an error
    /// would be a bug. In this case, we only log it and leak the object.
    pub(super) fn destroy(&mut self, dev: &mut (dyn Device + 'static)) {
        self.destroy_queues(dev);
        let mut results: Vec<_> = self.mrs.iter().map(|mr| dev.dereg_mr(*mr)).collect();
        results.push(dev.dealloc_pd(self.pd));
        check_freed(dev, results);
    }

    /// Destroys only the queues and the sinks of READs. After this, the device will not access any
    /// buffers. Returns false if they were already destroyed.
    pub(super) fn destroy_queues(&mut self, dev: &mut (dyn Device + 'static)) -> bool {
        if std::mem::replace(&mut self.has_lost_queues, true) {
            return false;
        }
        let results = [dev.destroy_qp(self.qp), dev.destroy_cq(self.cq)];
        check_freed(dev, results);
        if let Some(sinks) = &mut self.sinks {
            let released = sinks.release_all(dev);
            check_freed(dev, [released]);
        }
        true
    }

    /// Deregisters the sinks of a chain whose READs have completed or were not posted. Do this
    /// before using the data: until then, the initiator can modify it.
    pub(super) fn release_sinks(&mut self, dev: &mut (dyn Device + 'static), chain: WrId) {
        if let Some(sinks) = &mut self.sinks {
            let released = sinks.release(dev, chain);
            check_freed(dev, [released]);
        }
    }
}

/// Returns the maximum number of scatter-gather entries for a request.
pub(super) fn max_sge(attr: &DeviceAttr) -> usize {
    (attr.max_sge.min(attr.max_sge_rd) as usize).min(MAX_SGE)
}

fn check_freed(
    dev: &(dyn Device + 'static),
    results: impl IntoIterator<Item = Result<(), VerbsError>>,
) {
    if dev.is_gone() {
        // It was already destroyed.
        return;
    }
    for error in results.into_iter().filter_map(Result::err) {
        debug_assert!(false, "{error}");
        tracing::error!(%error, "cannot free a connection's device objects");
    }
}

/// Returns the number of outstanding READs for a peer with these parameters.
pub(super) fn reads(param: &ConnParam) -> u8 {
    INITIATOR_DEPTH.min(param.initiator_depth)
}

/// Returns our reply to a connection request with these parameters.
pub(super) fn accept_params(param: &ConnParam, private_data: &[u8]) -> ConnParam {
    ConnParam {
        private_data: private_data.to_vec(),
        responder_resources: RESPONDER_RESOURCES.min(param.responder_resources),
        initiator_depth: reads(param),
        retry_count: 7,
        // The value 7 means that there is no limit. If an initiator is late with posting receives,
        // we should wait. If it never posts any, there is a timeout in the channel.
        rnr_retry_count: 7,
        ..ConnParam::default()
    }
}
