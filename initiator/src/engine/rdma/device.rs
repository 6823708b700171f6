//! A device and the resources of its sessions.

use std::time::{Duration, Instant};

use riser_memory::MemSlice;
use riser_transport::verbs::{
    Access, AsyncEvent, CmEvent, CmEventKind, CmId, ConnParam, CqId, Mr, Notify, PdId, Provider,
    QpId, SendWr, Sge, VerbsError, WrId,
};
use rustc_hash::FxHashMap;

use super::posts::Posts;

/// Timeout for a disconnect, after which its identifier is destroyed.
const DISCONNECT_PATIENCE: Duration = Duration::from_secs(1);

/// Owner of a connection: a session of the engine and one of its channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) struct Owner {
    pub(in crate::engine) session: usize,
    pub(in crate::engine) channel: u8,
}

struct OwnedQp {
    owner: Owner,
    posts: Posts,
}

/// A provider, with the owners of its connections.
pub(in crate::engine) struct Device<P> {
    pub(in crate::engine) provider: P,
    /// Keyed by local numbers, like the map below, so peers cannot choose colliding keys.
    ids: FxHashMap<CmId, Owner>,
    qps: FxHashMap<QpId, OwnedQp>,
    /// Queue pairs with queued requests. May contain released queue pairs.
    unposted: Vec<QpId>,
    /// Completion queues in order of creation. Each belongs to one connection.
    cqs: Vec<(CqId, Owner)>,
    /// Disconnecting identifiers without an owner, with the latest time to destroy them.
    disconnecting: Vec<(CmId, Instant)>,
}

impl<P: Provider> Device<P> {
    pub(in crate::engine) fn new(provider: P) -> Self {
        Self {
            provider,
            ids: FxHashMap::default(),
            qps: FxHashMap::default(),
            unposted: Vec::new(),
            cqs: Vec::new(),
            disconnecting: Vec::new(),
        }
    }

    /// Returns the owner of a queue pair, or `None` if it was released.
    pub(in crate::engine) fn owner(&self, qp: QpId) -> Option<Owner> {
        self.qps.get(&qp).map(|qp| qp.owner)
    }

    /// Returns the owner of a completion queue, or `None` if it was released.
    pub(in crate::engine) fn cq_owner(&self, cq: CqId) -> Option<Owner> {
        self.cqs.iter().find(|(own, _)| *own == cq).map(|(_, o)| *o)
    }

    /// Returns the completion queues and their owners.
    pub(in crate::engine) fn cqs(&self) -> &[(CqId, Owner)] {
        &self.cqs
    }

    /// Returns the owners of the connections broken by an event.
    pub(in crate::engine) fn affected_owners(&self, event: AsyncEvent) -> Vec<Owner> {
        match event {
            AsyncEvent::QpFatal(qp)
            | AsyncEvent::QpReqError(qp)
            | AsyncEvent::QpAccessError(qp) => self.owner(qp).into_iter().collect(),
            AsyncEvent::CqError(cq) => self.cq_owner(cq).into_iter().collect(),
            AsyncEvent::DeviceFatal => self.cqs.iter().map(|(_, owner)| *owner).collect(),
            _ => Vec::new(),
        }
    }

    /// Arms all completion queues; returns whether completions are already available.
    pub(in crate::engine) fn arm(&mut self) -> bool {
        let mut waiting = false;
        for (cq, _) in &self.cqs {
            let armed = self.provider.req_notify_cq(*cq, Notify::Next);
            waiting |= armed.unwrap_or(false);
        }
        waiting
    }

    /// Returns the number of concurrent READs that a target with these parameters may use to fetch
    /// data, instead of receiving it with the commands. Returns 0 if this has no advantage.
    pub(in crate::engine) fn fetches(&self, param: &ConnParam) -> u8 {
        match self.is_software_nic() {
            // From our perspective: the number of READs that the target may have outstanding.
            true => param.responder_resources,
            false => 0,
        }
    }

    /// Returns whether the device is the software NIC (RoCEv2).
    pub(super) fn is_software_nic(&self) -> bool {
        is_software_nic(self.provider.device_attr().provider)
    }

    /// Returns the owner for an event. An event without an owner may complete a disconnect.
    pub(in crate::engine) fn route(&mut self, event: &CmEvent) -> Option<Owner> {
        let owner = self.ids.get(&event.id).copied();
        let is_end = matches!(
            event.kind,
            CmEventKind::Disconnected | CmEventKind::TimewaitExit
        );
        if owner.is_none() && is_end {
            let mut ended = self.disconnecting.iter();
            if let Some(at) = ended.position(|(id, _)| *id == event.id) {
                self.disconnecting.swap_remove(at);
                let _ = self.provider.destroy_id(event.id);
            }
        }
        owner
    }

    pub(super) fn own_id(&mut self, id: CmId, owner: Owner) {
        self.ids.insert(id, owner);
    }

    pub(super) fn own_qp(&mut self, qp: QpId, owner: Owner) {
        let posts = Posts::default();
        self.qps.insert(qp, OwnedQp { owner, posts });
    }

    /// Queues requests for posting at the end of the round, in order.
    pub(super) fn post_send(&mut self, qp: QpId, wrs: &[SendWr<'_>]) {
        if !wrs.is_empty()
            && let Some(posts) = self.posts(qp)
        {
            wrs.iter().for_each(|wr| posts.push_send(wr));
        }
    }

    /// Queues a receive for posting at the end of the round.
    pub(super) fn post_recv(&mut self, qp: QpId, id: WrId, sge: Sge) {
        if let Some(posts) = self.posts(qp) {
            posts.push_recv(id, sge);
        }
    }

    /// Returns the queued requests of a queue pair, for adding one.
    fn posts(&mut self, qp: QpId) -> Option<&mut Posts> {
        let posts = &mut self.qps.get_mut(&qp)?.posts;
        if posts.is_empty() {
            self.unposted.push(qp);
        }
        Some(posts)
    }

    /// Posts the queued requests of a queue pair; returns whether the device accepted all of them.
    pub(super) fn flush_qp(&mut self, qp: QpId) -> bool {
        let Some(entry) = self.qps.get_mut(&qp) else {
            return true;
        };
        let posted = entry.posts.post(&mut self.provider, qp);
        if let Err(error) = posted {
            let owner = entry.owner;
            tracing::debug!(%error, ?owner, "the device rejected a list of requests");
        }
        posted.is_ok()
    }

    /// Posts all queued requests. Returns the owners of queue pairs with a rejected request,
    /// because their connections are broken.
    pub(in crate::engine) fn flush(&mut self) -> Vec<Owner> {
        let mut broken = Vec::new();
        let mut unposted = std::mem::take(&mut self.unposted);
        for qp in unposted.drain(..) {
            if !self.flush_qp(qp) {
                broken.extend(self.owner(qp));
            }
        }
        self.unposted = unposted;
        broken
    }

    pub(super) fn disown_qp(&mut self, qp: QpId) {
        self.qps.remove(&qp);
    }

    pub(super) fn own_cq(&mut self, cq: CqId, owner: Owner) {
        self.cqs.push((cq, owner));
    }

    pub(super) fn disown_cq(&mut self, cq: CqId) {
        self.cqs.retain(|(own, _)| *own != cq);
    }

    pub(super) fn disown_id(&mut self, id: CmId) {
        self.ids.remove(&id);
    }

    /// Keeps an identifier until its peer has responded to the disconnect.
    pub(super) fn await_disconnect(&mut self, id: CmId, now: Instant) {
        self.disconnecting.push((id, now + DISCONNECT_PATIENCE));
    }

    /// Destroys identifiers of peers that did not respond to the disconnect in time.
    pub(in crate::engine) fn handle_timeout(&mut self, now: Instant) {
        let provider = &mut self.provider;
        self.disconnecting.retain(|(id, until)| {
            let is_late = *until <= now;
            if is_late {
                let _ = provider.destroy_id(*id);
            }
            !is_late
        });
    }

    /// Returns the time of the next timeout, either of the provider or of a disconnect.
    pub(in crate::engine) fn next_deadline(&self) -> Option<Instant> {
        let disconnects = self.disconnecting.iter().map(|(_, until)| *until);
        disconnects.chain(self.provider.deadline()).min()
    }

    /// Returns whether a disconnect is still in progress.
    pub(in crate::engine) fn is_disconnecting(&self) -> bool {
        !self.disconnecting.is_empty()
    }
}

/// Returns whether a provider is the software NIC, which sends consecutive packets of equal length
/// in a batch. Shared memory has no packets, TCP batches on its own, and a host device sends each
/// packet separately: for them, fetching would only cost an additional key and READ per write.
fn is_software_nic(provider: &str) -> bool {
    !matches!(provider, "shm" | "rdma_core" | "iwarp")
}

/// A session's objects on a device.
pub(in crate::engine) struct Resources {
    pub(in crate::engine) pd: PdId,
    /// Registration of the data buffer pool.
    pub(in crate::engine) pool: Mr,
}

impl Resources {
    /// Creates a protection domain and registers the pool. With `is_remote`, the target can access
    /// the whole pool.
    pub(in crate::engine) fn new<P: Provider>(
        device: &mut Device<P>,
        pool: &MemSlice,
        is_remote: bool,
    ) -> Result<Self, VerbsError> {
        let provider = &mut device.provider;
        let pd = provider.alloc_pd()?;
        let access = match is_remote {
            true => Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE,
            false => Access::LOCAL_WRITE,
        };
        match provider.reg_mr(pd, pool, access) {
            Ok(pool) => Ok(Self { pd, pool }),
            Err(e) => {
                let _ = provider.dealloc_pd(pd);
                Err(e)
            }
        }
    }

    pub(in crate::engine) fn release<P: Provider>(&self, device: &mut Device<P>) {
        let provider = &mut device.provider;
        let _ = provider.dereg_mr(self.pool.id);
        let _ = provider.dealloc_pd(self.pd);
    }
}

#[cfg(test)]
mod tests {
    use riser_transport::loopback::{FabricConfig, Pair};

    use super::*;

    #[test]
    fn only_software_nic_fetches_data() {
        let device = Device::new(Pair::new(FabricConfig::default()).a);
        let param = ConnParam {
            responder_resources: 7,
            initiator_depth: 9,
            ..ConnParam::default()
        };
        assert_eq!(device.fetches(&param), 7);
        let by_itself = ["shm", "rdma_core"].map(is_software_nic);
        assert_eq!((by_itself, is_software_nic("roce")), ([false; 2], true));
    }
}
