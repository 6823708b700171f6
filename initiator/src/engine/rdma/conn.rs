//! A reliable connection: connection management, memory, and the commands on it.
//!
//! # Memory
//! The connection's own memory is registered for local access only, with a layout defined by the
//! protocol. The data of a command is advertised to the target with fast registrations posted
//! before the command. A key is invalidated either by us, with a signaled completion, or by the
//! target (SEND with invalidate). The data is free once the command's SEND has completed, too.
//! Requests on a send queue complete in order, so the completion of our invalidation implies that
//! the SEND has completed.
//!
//! # Bounds
//! The length of each queue is in [`RdmaLimits`]. Requests are posted at the end of the round
//! ([`Device::flush`]). If the device rejects a list, the connection is broken. A command is not
//! started without a free slot, send-queue entries and regions.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use riser_memory::{MemSlice, Memory};
use riser_transport::mr_pool::{MrPool, PooledMr};
use riser_transport::verbs::{
    Access, CmError, CmEventKind, CmId, CmOption, Completion, ConnParam, CqId, Mr, PdId, PortSpace,
    Provider, QpCap, QpId, QpInitAttr, QpType, RKey, RemoteAddr, SendFlags, SendOp, SendWr, Sge,
    VerbsError,
};

use super::probe::{ACK_TIMEOUT, Probe};
use super::task::{NewTask, Tasks};
use super::{Device, MAX_REGIONS, MAX_SEND_SGE, Owner, Resources, WorkRequest};
use crate::engine::io::Target;
use crate::request::{DataLen, RequestId};
use crate::session::ConnectError;

/// Timeout for resolving an address or a route.
const RESOLVE: Duration = Duration::from_secs(2);

/// Timeout for a logout, or for a connection still being established, before the connection is
/// closed.
const CLOSING_PATIENCE: Duration = Duration::from_millis(500);

/// Sizes for a connection.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct RdmaLimits {
    /// Maximum number of outstanding commands.
    pub(in crate::engine) commands: u16,
    /// Send-queue entries shared by commands: a SEND, and two per region.
    pub(in crate::engine) command_entries: u32,
    /// Send-queue entries for other messages, which are never rejected.
    pub(in crate::engine) message_entries: u32,
    pub(in crate::engine) receives: u32,
    pub(in crate::engine) regions: usize,
    /// Segments per fast registration.
    pub(in crate::engine) region_segments: u32,
    /// Length of the connection's own memory in bytes.
    pub(in crate::engine) memory: usize,
    /// The target may invalidate keys. In this case, no completion of ours implies that a command's
    /// SEND has completed, so each SEND is signaled.
    pub(in crate::engine) remote_invalidate: bool,
    /// Maximum number of redirections of a connection request to another port.
    pub(in crate::engine) redirects: u8,
}

impl RdmaLimits {
    /// Includes one entry for the probe.
    fn send_entries(&self) -> u32 {
        self.command_entries + self.message_entries + 1
    }

    /// Returns the maximum number of outstanding completions.
    pub(in crate::engine) fn completions(&self) -> u32 {
        self.send_entries() + self.receives
    }
}

/// Next step for a connection after an event of the connection manager.
#[derive(Debug)]
pub(in crate::engine) enum CmStep {
    Pending,
    /// The route was resolved. Call [`RdmaConn::set_up`] and [`RdmaConn::connect`].
    Connect,
    /// Connected, with the peer's parameters.
    Established(ConnParam),
    /// Rejected, with the CM's reason and private data.
    Rejected {
        reason: u16,
        private_data: Vec<u8>,
    },
    /// Connecting failed.
    Failed(ConnectError),
    /// The peer or the device disconnected.
    Lost,
    /// The connection was closing and can now be released.
    Closed,
}

/// Result of a completion for the connection's user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Completed {
    Nothing,
    /// A message is in this receive.
    Message(u16),
    /// The message with this number was sent.
    Sent(u16),
    /// The request's memory is free.
    Retired(RequestId),
    /// The work request failed and broke the connection.
    Failed,
}

/// Progress of retiring a request's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Retire {
    /// The memory is free.
    Done,
    /// A later completion reports it.
    Pending,
    /// The connection is broken; closing it retires all memory.
    Broken,
}

/// Resources that exist together with the queue pair.
struct Rings {
    qp: QpId,
    cq: CqId,
    memory: Memory,
    mr: Mr,
    regions: MrPool,
}

/// A connection, starting with the first call to the connection manager. Its commands have at most
/// `R` regions.
pub(in crate::engine) struct RdmaConn<const R: usize> {
    id: CmId,
    owner: Owner,
    /// Address to which the first request is sent.
    dst: SocketAddr,
    /// Address to which the request was redirected.
    redirect: Option<SocketAddr>,
    limits: RdmaLimits,
    rings: Option<Rings>,
    tasks: Tasks<R>,
    /// The connect request was sent, but the response was not received yet.
    is_connecting: bool,
    /// Latest time to close the connection. It is closed earlier when the outstanding messages
    /// complete.
    closing_until: Option<Instant>,
    /// Used for established connections on the software NIC. Other devices have hardware timeouts.
    probe: Option<Probe>,
}

impl<const R: usize> RdmaConn<R> {
    /// Starts to resolve the path to a target.
    pub(in crate::engine) fn resolve<P: Provider>(
        device: &mut Device<P>,
        owner: Owner,
        space: PortSpace,
        target: &Target,
        limits: RdmaLimits,
    ) -> Result<Self, ConnectError> {
        let id = device.provider.create_id(space);
        let id = id.map_err(ConnectError::Cm)?;
        let is_software_nic = device.is_software_nic();
        let provider = &mut device.provider;
        let timeout = match is_software_nic {
            true => provider.set_option(id, CmOption::AckTimeout(ACK_TIMEOUT)),
            false => Ok(()),
        };
        // A device that does not support this reports the rejection.
        let _ = provider.set_option(id, CmOption::Redirects(limits.redirects));
        let begun = timeout.map_err(ConnectError::Cm).and_then(|()| {
            let resolved = provider.resolve_addr(id, target.src, target.dst, RESOLVE);
            resolved.map_err(ConnectError::Address)
        });
        if let Err(error) = begun {
            let _ = provider.destroy_id(id);
            return Err(error);
        }
        device.own_id(id, owner);
        Ok(Self {
            id,
            owner,
            dst: target.dst,
            redirect: None,
            limits,
            rings: None,
            tasks: Tasks::new(limits.commands, limits.command_entries),
            is_connecting: false,
            closing_until: None,
            probe: None,
        })
    }

    /// Handles an event of the connection manager.
    pub(in crate::engine) fn handle_event<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        event: CmEventKind,
        now: Instant,
    ) -> CmStep {
        if self.closing_until.is_some() {
            // Either the response to the connect request or the disconnect.
            return CmStep::Closed;
        }
        match event {
            CmEventKind::AddrResolved => match device.provider.resolve_route(self.id, RESOLVE) {
                Ok(()) => CmStep::Pending,
                Err(e) => CmStep::Failed(ConnectError::Cm(e)),
            },
            CmEventKind::RouteResolved => CmStep::Connect,
            CmEventKind::AddrError(e) | CmEventKind::RouteError(e) => {
                CmStep::Failed(ConnectError::Address(e))
            }
            CmEventKind::ConnectError(e) => CmStep::Failed(ConnectError::Cm(e)),
            CmEventKind::Unreachable => CmStep::Failed(ConnectError::Unreachable),
            CmEventKind::Rejected {
                reason,
                private_data,
            } => CmStep::Rejected {
                reason,
                private_data,
            },
            CmEventKind::Established { param } => {
                self.is_connecting = false;
                if self.limits.redirects > 0 {
                    let peer = device.provider.peer_addr(self.id);
                    self.redirect = peer.filter(|peer| *peer != self.dst);
                }
                if let Some(to) = self.redirect {
                    tracing::info!(target = %self.dst, %to, "login was redirected");
                }
                self.probe = device.is_software_nic().then(|| Probe::new(now));
                CmStep::Established(param)
            }
            CmEventKind::Disconnected | CmEventKind::DeviceRemoval => CmStep::Lost,
            // Events of listeners, datagrams, and queue pairs connected by their owner.
            CmEventKind::TimewaitExit
            | CmEventKind::ConnectRequest { .. }
            | CmEventKind::MulticastJoin { .. }
            | CmEventKind::AlternatePath { .. }
            | CmEventKind::AlternatePathError { .. }
            | CmEventKind::MulticastError(_)
            | CmEventKind::ConnectResponse { .. } => CmStep::Pending,
        }
    }

    /// Creates the queue pair, the connection's memory and its regions. On error, the existing
    /// parts are released by [`Self::release`].
    pub(in crate::engine) fn set_up<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        resources: &Resources,
    ) -> Result<(), VerbsError> {
        let (pd, limits) = (resources.pd, &self.limits);
        let memory = new_memory(limits.memory)?;
        let cap = QpCap {
            max_send_sge: MAX_SEND_SGE as u32,
            ..QpCap::new(limits.send_entries(), limits.receives)
        };
        let provider = &mut device.provider;
        // On error, release the previous parts here, because [`Self::release`] requires all of
        // them.
        let mut regions = MrPool::new(provider, pd, limits.regions, limits.region_segments)?;
        let mr = match provider.reg_mr(pd, &memory.whole(), Access::LOCAL_WRITE) {
            Ok(mr) => mr,
            Err(e) => {
                regions.destroy(provider);
                return Err(e);
            }
        };
        let (qp, cq) = match create_queues(provider, self.id, pd, cap, limits.completions()) {
            Ok(queues) => queues,
            Err(e) => {
                let _ = provider.dereg_mr(mr.id);
                regions.destroy(provider);
                return Err(e);
            }
        };
        device.own_qp(qp, self.owner);
        device.own_cq(cq, self.owner);
        self.rings = Some(Rings {
            qp,
            cq,
            memory,
            mr,
            regions,
        });
        Ok(())
    }

    /// Sends the connect request.
    pub(in crate::engine) fn connect<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        private_data: Vec<u8>,
    ) -> Result<(), ConnectError> {
        let param = ConnParam {
            private_data,
            ..ConnParam::default()
        };
        self.is_connecting = true;
        let sent = device.provider.connect(self.id, &param);
        sent.map_err(ConnectError::Cm)
    }

    /// Starts closing the connection; returns false if it can be released immediately.
    ///
    /// Waits for a posted logout, and also for the response to a connect request: if a peer has
    /// responded and then learns that the request was withdrawn, it may leak its resources. Linux's
    /// `ib_srpt` keeps them until its port is removed.
    pub(in crate::engine) fn begin_close(&mut self, has_logout: bool, now: Instant) -> bool {
        let waits = self.is_connecting || has_logout;
        if waits {
            self.closing_until = Some(now + CLOSING_PATIENCE);
            self.probe = None;
        }
        waits
    }

    /// Returns the address to which an established connection was redirected, if any.
    pub(in crate::engine) fn redirect(&self) -> Option<SocketAddr> {
        self.redirect
    }

    /// Returns the time of the next [`Self::probe`].
    pub(super) fn probe_at(&self) -> Option<Instant> {
        self.probe.as_ref()?.deadline()
    }

    /// Probes the peer if it has been silent for long enough.
    pub(super) fn probe<P: Provider>(&mut self, device: &mut Device<P>, now: Instant) {
        let (Some(probe), Some(rings)) = (&mut self.probe, &self.rings) else {
            return;
        };
        if !probe.begin_due(now) {
            return;
        }
        let nowhere = RemoteAddr {
            addr: 0,
            rkey: RKey(0),
        };
        let id = WorkRequest::Probe.id();
        let wr = SendWr::new(id.0, SendOp::Write(nowhere), &[]);
        device.post_send(rings.qp, &[wr]);
    }

    /// Returns the latest time for releasing a closing connection.
    pub(in crate::engine) fn closing_until(&self) -> Option<Instant> {
        self.closing_until
    }

    /// Releases all resources. After this, the peer cannot access any memory, and all of its keys
    /// are invalid. With `linger`, sends a disconnect, and the identifier remains until the peer
    /// has responded.
    pub(in crate::engine) fn release<P: Provider>(
        self,
        device: &mut Device<P>,
        linger: bool,
        now: Instant,
    ) {
        device.disown_id(self.id);
        let is_disconnecting = linger && device.provider.disconnect(self.id).is_ok();
        if let Some(mut rings) = self.rings {
            device.disown_qp(rings.qp);
            device.disown_cq(rings.cq);
            let provider = &mut device.provider;
            // Memory windows refer to the queue pair they were bound to, and Linux delays its
            // destruction until they are deallocated.
            for region in self.tasks.into_regions() {
                rings.regions.discard(provider, region);
            }
            rings.regions.destroy(provider);
            let _ = provider.destroy_qp(rings.qp);
            let _ = provider.destroy_cq(rings.cq);
            let _ = provider.dereg_mr(rings.mr.id);
        }
        match is_disconnecting {
            true => device.await_disconnect(self.id, now),
            false => drop(device.provider.destroy_id(self.id)),
        }
    }

    /// Copies bytes from the connection's memory.
    pub(in crate::engine) fn read(&self, at: usize, out: &mut [u8]) {
        if let Some(rings) = &self.rings {
            rings.memory.read(at, out);
        }
    }

    /// Copies bytes into the connection's memory.
    pub(in crate::engine) fn write(&self, at: usize, bytes: &[u8]) {
        if let Some(rings) = &self.rings {
            rings.memory.write(at, bytes);
        }
    }

    /// Posts a receive into the connection's memory; returns false if the connection is broken.
    pub(in crate::engine) fn post_recv<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        slot: u16,
        at: usize,
        len: usize,
    ) -> bool {
        let Some(rings) = &self.rings else {
            return false;
        };
        let id = WorkRequest::Recv(slot).id();
        device.post_recv(rings.qp, id, rings.own_segment(at, len));
        true
    }

    /// Posts the queued requests immediately instead of at the end of the round; returns false if
    /// the connection is broken.
    pub(super) fn flush<P: Provider>(&self, device: &mut Device<P>) -> bool {
        let rings = self.rings.as_ref();
        rings.is_some_and(|rings| device.flush_qp(rings.qp))
    }

    /// Sends a message from the connection's memory; returns false if the connection is broken.
    pub(in crate::engine) fn post_message<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        number: u16,
        at: usize,
        message: &[u8],
    ) -> bool {
        let Some(rings) = &self.rings else {
            return false;
        };
        rings.memory.write(at, message);
        let wr = SendWr {
            wr_id: WorkRequest::Message(number).id(),
            op: SendOp::Send,
            sges: &[rings.own_segment(at, message.len())],
            inline: None,
            remote_srqn: None,
            flags: SendFlags::SIGNALED,
            ud: None,
        };
        device.post_send(rings.qp, &[wr]);
        true
    }

    /// Allocates a slot, send-queue entries and regions for a command with this number of regions.
    /// Returns `None` if other commands use them.
    pub(in crate::engine) fn allocate_command(
        &mut self,
        request: RequestId,
        regions: usize,
    ) -> Option<NewTask<R>> {
        let available = self.rings.as_ref().map_or(0, |r| r.regions.available());
        if available < regions {
            return None;
        }
        self.tasks.allocate_task(request, regions)
    }

    /// Maps segments of a command's data to its next region.
    pub(in crate::engine) fn map<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        new: &mut NewTask<R>,
        pieces: &[MemSlice],
    ) -> Result<(), VerbsError> {
        let rings = self.rings.as_mut().expect("a command began on it");
        let mut region = rings.regions.get().expect("as many as counted");
        let mapped = region.map(&mut device.provider, pieces);
        new.task.regions.push(region);
        mapped.map(|_| ())
    }

    /// Releases the resources of a command that was never posted.
    pub(in crate::engine) fn abandon<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        new: NewTask<R>,
    ) {
        let regions = self.tasks.abandon(new);
        self.return_regions(device, regions);
    }

    /// Posts a command as a single chain: the registrations of its data, and the SEND of its header
    /// from the connection's memory, with `immediate` data. Returns false if the connection is
    /// broken.
    pub(in crate::engine) fn post_command<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        mut new: NewTask<R>,
        header: (usize, usize),
        immediate: &[Sge],
        len: DataLen,
    ) -> bool {
        let Some(rings) = &self.rings else {
            return false;
        };
        let (slot, task) = (new.slot, &mut new.task);
        let access = match len {
            DataLen::In(_) => Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            _ => Access::REMOTE_READ,
        };
        let mut sges: ArrayVec<Sge, MAX_SEND_SGE> = ArrayVec::new();
        sges.push(rings.own_segment(header.0, header.1));
        sges.extend(immediate.iter().copied());
        let mut chain: ArrayVec<SendWr<'_>, { MAX_REGIONS + 1 }> = ArrayVec::new();
        for region in &mut task.regions {
            chain.push(region.reg_wr(WorkRequest::Register(slot).id(), access));
        }
        // If only we invalidate keys, the completion of an invalidation implies that the SEND has
        // completed.
        let is_signaled = task.regions.is_empty() || self.limits.remote_invalidate;
        chain.push(SendWr {
            wr_id: WorkRequest::Command(slot).id(),
            op: SendOp::Send,
            sges: &sges,
            inline: None,
            remote_srqn: None,
            flags: match is_signaled {
                true => SendFlags::SIGNALED,
                false => SendFlags::empty(),
            },
            ud: None,
        });
        device.post_send(rings.qp, &chain);
        self.tasks.insert(new);
        true
    }

    /// Handles the completion of a work request.
    pub(in crate::engine) fn handle_completion<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        completion: &Completion,
        now: Instant,
    ) -> Completed {
        let Some(work) = WorkRequest::from_id(completion.wr_id) else {
            return Completed::Nothing;
        };
        if !completion.status.is_ok() {
            let owner = self.owner;
            tracing::debug!(?work, status = ?completion.status, ?owner, "work request failed");
            return Completed::Failed;
        }
        if let Some(probe) = &mut self.probe {
            probe.on_completion(now);
        }
        let slot = match work {
            WorkRequest::Recv(slot) => {
                // If the target was not allowed to invalidate this key, we still invalidate it.
                // This fails and breaks the connection. Otherwise, we would not learn when the SEND
                // has completed.
                if let Some(key) = completion.invalidated
                    && self.limits.remote_invalidate
                    && !self.tasks.on_remote_invalidated(key)
                {
                    tracing::debug!(?key, "the target invalidated an unknown key");
                }
                return Completed::Message(slot);
            }
            WorkRequest::Message(number) => return Completed::Sent(number),
            WorkRequest::Probe => {
                if let Some(probe) = &mut self.probe {
                    probe.on_acknowledged(now);
                }
                return Completed::Nothing;
            }
            WorkRequest::Register(slot) => slot,
            WorkRequest::Command(slot) => {
                self.tasks.on_sent(slot);
                slot
            }
            WorkRequest::Invalidate(slot, key) => {
                self.tasks.on_invalidated(slot, key);
                slot
            }
        };
        let retired = self.finish(device, slot);
        retired.map_or(Completed::Nothing, Completed::Retired)
    }

    /// Starts to retire a request's memory by invalidating the keys that are still valid.
    pub(in crate::engine) fn retire<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        request: RequestId,
    ) -> Retire {
        let Some(slot) = self.tasks.slot(request) else {
            return Retire::Done;
        };
        let (Some(task), Some(rings)) = (self.tasks.get_mut(slot), &self.rings) else {
            return Retire::Broken;
        };
        let invalidate = |r: &mut PooledMr| {
            let key = r.rkey();
            r.inv_wr(WorkRequest::Invalidate(slot, key).id())
        };
        let chain: ArrayVec<SendWr<'_>, MAX_REGIONS> = task.retire().map(invalidate).collect();
        device.post_send(rings.qp, &chain);
        match self.finish(device, slot) {
            Some(_) => Retire::Done,
            None => Retire::Pending,
        }
    }

    /// Frees the slot of a retired command; returns the request whose memory is now free.
    fn finish<P: Provider>(&mut self, device: &mut Device<P>, slot: u16) -> Option<RequestId> {
        let task = self.tasks.finish(slot)?;
        self.return_regions(device, task.regions);
        Some(task.request)
    }

    fn return_regions<P: Provider>(&mut self, device: &mut Device<P>, back: ArrayVec<PooledMr, R>) {
        if let Some(rings) = &mut self.rings {
            for region in back {
                let _ = rings.regions.release(&mut device.provider, region);
            }
        }
    }
}

impl Rings {
    /// Returns a segment of the connection's own memory.
    fn own_segment(&self, at: usize, len: usize) -> Sge {
        Sge {
            addr: self.mr.addr + at as u64,
            length: len as u32,
            lkey: self.mr.lkey,
        }
    }
}

/// Allocates memory for a device.
pub(in crate::engine) fn new_memory(len: usize) -> Result<Memory, VerbsError> {
    Memory::new(len).map_err(|e| VerbsError::Os(e.raw_os_error().unwrap_or(0)))
}

/// Creates the queue pair of a connection and a dedicated completion queue, so that an overrun only
/// affects this connection.
fn create_queues<P: Provider>(
    provider: &mut P,
    id: CmId,
    pd: PdId,
    cap: QpCap,
    completions: u32,
) -> Result<(QpId, CqId), VerbsError> {
    // One spare entry, so that a correct device cannot fill the queue.
    let cq = provider.create_cq(completions + 1)?;
    let init = QpInitAttr::new(pd, cq, QpType::Rc, cap);
    provider
        .create_cm_qp(id, &init)
        .map(|qp| (qp, cq))
        .map_err(|e| {
            let _ = provider.destroy_cq(cq);
            match e {
                CmError::Verbs(e) => e,
                _ => VerbsError::InvalidState("cannot create a queue pair for the identifier"),
            }
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use riser_transport::loopback::{Endpoint, FabricConfig, Pair};
    use riser_transport::mr_pool::MrState;

    const LIMITS: RdmaLimits = RdmaLimits {
        commands: 2,
        command_entries: 6,
        message_entries: 1,
        receives: 1,
        regions: 2,
        region_segments: 4,
        memory: 4096,
        remote_invalidate: true,
        redirects: 0,
    };

    /// Returns a connection whose queue pair does not accept requests, which is irrelevant for
    /// these tests.
    fn conn(limits: RdmaLimits) -> (Device<Endpoint>, RdmaConn<1>, Memory) {
        let mut device = Device::new(Pair::new(FabricConfig::default()).a);
        let nic = &mut device.provider;
        let dst = (nic.addr(), 1).into();
        let target = Target {
            dst,
            host: None,
            src: Some((nic.addr(), 0).into()),
            service_id: None,
        };
        let owner = Owner {
            session: 0,
            channel: 0,
        };
        let buffer = Memory::new(4096).unwrap();
        let resources = Resources::new(&mut device, &buffer.whole(), false).unwrap();
        let conn = RdmaConn::resolve(&mut device, owner, PortSpace::Tcp, &target, limits);
        let mut conn = conn.unwrap();
        conn.set_up(&mut device, &resources).unwrap();
        (device, conn, buffer)
    }

    /// Completes our invalidation of a key; returns the request whose memory is now free.
    fn invalidated(
        conn: &mut RdmaConn<1>,
        device: &mut Device<Endpoint>,
        slot: u16,
        key: RKey,
    ) -> Option<RequestId> {
        conn.tasks.on_invalidated(slot, key);
        conn.finish(device, slot)
    }

    fn sent(conn: &mut RdmaConn<1>, device: &mut Device<Endpoint>, slot: u16) -> Option<RequestId> {
        conn.tasks.on_sent(slot);
        conn.finish(device, slot)
    }

    /// Posts a READ command for the buffer; returns its slot.
    fn read(
        conn: &mut RdmaConn<1>,
        device: &mut Device<Endpoint>,
        request: u32,
        buffer: &Memory,
    ) -> u16 {
        let mut new = conn
            .allocate_command(RequestId(request), 1)
            .expect("there is room");
        conn.map(device, &mut new, &[buffer.whole()]).unwrap();
        let slot = new.slot;
        conn.post_command(device, new, (0, 48), &[], DataLen::In(4096));
        slot
    }

    /// The target may invalidate a key while our own invalidation is in flight, and another command
    /// may use the slot when that completes.
    #[test]
    fn invalidation_only_affects_its_key() {
        let (mut device, mut conn, buffer) = conn(LIMITS);
        let device = &mut device;

        let slot = read(&mut conn, device, 1, &buffer);
        let (first, _) = conn.tasks.key(slot);
        conn.retire(device, RequestId(1));
        assert_eq!(conn.tasks.key(slot), (first, MrState::Invalidating));
        assert!(conn.tasks.on_remote_invalidated(first));
        assert_eq!(sent(&mut conn, device, slot), Some(RequestId(1)));

        assert_eq!(read(&mut conn, device, 2, &buffer), slot);
        let (second, state) = conn.tasks.key(slot);
        assert_eq!(state, MrState::Registered);
        assert_ne!(second, first);
        assert_eq!(invalidated(&mut conn, device, slot, first), None);
        assert_eq!(conn.tasks.key(slot), (second, MrState::Registered));
        conn.retire(device, RequestId(2));
        assert_eq!(sent(&mut conn, device, slot), None, "its key works");
        let back = invalidated(&mut conn, device, slot, second);
        assert_eq!(back, Some(RequestId(2)));
    }

    #[test]
    fn local_invalidation_implies_completed_send() {
        let (mut device, mut conn, buffer) = conn(RdmaLimits {
            remote_invalidate: false,
            ..LIMITS
        });
        let slot = read(&mut conn, &mut device, 1, &buffer);
        let (key, _) = conn.tasks.key(slot);
        conn.retire(&mut device, RequestId(1));
        let back = invalidated(&mut conn, &mut device, slot, key);
        assert_eq!(back, Some(RequestId(1)));
    }

    #[test]
    fn rejected_post_breaks_connection_without_retry() {
        let (mut device, mut conn, buffer) = conn(LIMITS);
        assert!(device.flush().is_empty());
        assert!(conn.post_recv(&mut device, 0, 0, 64));
        read(&mut conn, &mut device, 1, &buffer);
        read(&mut conn, &mut device, 2, &buffer);
        assert_eq!(device.flush(), [conn.owner]);
        assert!(device.flush().is_empty(), "nothing is left");
        // Releasing the connection frees both posted and unposted regions.
        let regions = device.provider.usage().mrs;
        conn.release(&mut device, false, Instant::now());
        assert!(device.provider.usage().mrs < regions);
        assert!(device.flush().is_empty());
    }

    #[test]
    fn abandoned_command_releases_its_entries() {
        let (mut device, mut conn, buffer) = conn(RdmaLimits {
            command_entries: 3,
            ..LIMITS
        });
        let mut new = conn
            .allocate_command(RequestId(1), 1)
            .expect("there is room");
        conn.map(&mut device, &mut new, &[buffer.whole()]).unwrap();
        assert!(
            conn.allocate_command(RequestId(2), 0).is_none(),
            "no entries are left"
        );
        conn.abandon(&mut device, new);
        assert!(conn.allocate_command(RequestId(2), 1).is_some());
    }
}
