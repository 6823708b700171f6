//! SRP support for a worker: login, actions, completions, and teardown.

use std::fmt::Display;
use std::net::SocketAddr;

use arrayvec::ArrayVec;
use riser_memory::{MemSlice, Memory};
use riser_scsi::srp::{BufferFormats, LoginRej, LoginRejReason, LoginReq, Tag};
use riser_transport::verbs::{CmId, Completion, ConnParam, SendFlags, SendOp, Sge};

use super::conns::ConnKey;
use super::exec::release_sinks;
use super::fabrics::{Fabric, Input, SrpConn};
use super::login_log::Reason;
use super::mail::SessionInfo;
use super::queue::{ChainSend, Chains, Posted, RECV_BATCH, Receive};
use super::rdma::{Hardware, Queues, RdmaLink, Regions, SetupError, max_sge};
use super::work::Work;
use super::{PollGroup, Worker};
use crate::audit::Who;
use crate::config::Protocol;
use crate::fabric::{ConnRef, ConnectionMemory, TaskIdx};
use crate::pool::Owner;
use crate::sessions::blocklist::BLOCKED;
use crate::sessions::catalog::{Entrance, Serves};
use crate::sessions::guard::{Departure, SessionGuard};
use crate::sessions::nexus::{Endpoints, NexusKey, SessionGrant};
use crate::srp::{
    Action, ChState, Channel, ChannelConfig, ChannelParams, LoginRefused, RecvIdx, SendIu,
};

/// Accepted login before creating its channel.
struct Login<'a> {
    device: usize,
    cm: CmId,
    serial: u64,
    peer: SocketAddr,
    entrance: Entrance,
    key: NexusKey,
    grant: SessionGrant,
    guard: SessionGuard,
    /// Parameters from the connection request.
    param: &'a ConnParam,
}

/// Resources for a channel.
struct Parts {
    receive_ring: MemSlice,
    send_ring: MemSlice,
    hardware: Hardware,
    max_sge: usize,
}

impl SrpConn {
    /// Returns the work request for a receive context.
    pub(super) fn receive(&self, recv: RecvIdx) -> Receive {
        let (addr, length) = self.channel.receives().place(recv);
        let lkey = self.rdma.hardware.receive_key;
        let place = Sge { addr, length, lkey };
        (Work::Recv(recv).id(), place)
    }

    pub(super) fn info(
        &self,
        peer: SocketAddr,
        provider: &'static str,
        worker: u16,
    ) -> SessionInfo {
        let config = self.channel.config();
        SessionInfo {
            worker,
            serial: config.serial,
            nexus: config.nexus.0,
            initiator: self.key.initiator,
            target: self.key.target,
            peer,
            provider,
            state: self.channel.state(),
            in_flight: self.channel.requests().len(),
            params: config.params,
            luns: config.luns.luns().len(),
            limits: config.luns.limiter().map(|limiter| limiter.view()),
        }
    }
}

impl Worker {
    /// Handles a connection request for iSER, or for SRP with the login request in the private
    /// data.
    pub(super) fn on_connect_request(
        &mut self,
        device: usize,
        cm: CmId,
        listener: CmId,
        peer: SocketAddr,
        param: &ConnParam,
    ) {
        let Some(listener) = self.group.portals.listeners.get(device, listener) else {
            // The listener is being closed.
            let who = self.group.who_srp(device, None, peer, None);
            let reason = LoginRejReason::UnableToEstablishChannel;
            return self.refuse(device, cm, Tag(0), reason, &who, None);
        };
        let entrance = listener.entrance;
        let parsed = match (listener.serves, entrance) {
            (Serves::Iser(listen), _) => {
                return self.on_iser_request(device, cm, listen, peer, param);
            }
            (Serves::Srp, Entrance::Port(_)) => LoginReq::parse_rdma(&param.private_data),
            (Serves::Srp, Entrance::Service(_)) => LoginReq::parse(&param.private_data),
        };
        match parsed {
            Ok(req) => self.on_srp_login(device, cm, entrance, peer, &req, param),
            Err(error) => {
                let who = self.group.who_srp(device, Some(entrance), peer, None);
                let reason = LoginRejReason::UnableToEstablishChannel;
                self.refuse(device, cm, Tag(0), reason, &who, Some(&error));
            }
        }
    }

    /// Handles a connection request with an SRP login.
    fn on_srp_login(
        &mut self,
        device: usize,
        cm: CmId,
        entrance: Entrance,
        peer: SocketAddr,
        req: &LoginReq,
        param: &ConnParam,
    ) {
        let serial = self.group.conns.take_serial();
        let channel = ConnRef {
            worker: self.group.index,
            serial,
        };
        let shared = std::sync::Arc::clone(&self.group.shared);
        let key = NexusKey {
            initiator: req.initiator_port,
            target: req.target_port,
        };
        let mut who = self.group.who_srp(device, Some(entrance), peer, Some(&key));
        let ends = Endpoints {
            peer,
            local: self.group.devices.addr(device),
            entrance,
        };
        // Do this before creating the channel, because it defines the order of logins for an
        // initiator that uses several workers.
        let (mut grant, guard) = match shared.registry.login(req, ends, channel, self.group.now) {
            Ok(entered) => entered,
            Err(refused) => {
                let is_full = refused.reason == LoginRejReason::InsufficientResources;
                let bound = is_full.then(|| shared.registry.reached_bound(peer.ip()));
                let bound = bound.flatten();
                let target = self.group.catalog.target_of(&req.target_port);
                let is_blocked =
                    target.is_some_and(|t| t.blocklist.has_port(&req.initiator_port.0));
                let detail = match &bound {
                    Some(bound) => Some(bound as &dyn Display),
                    None => is_blocked.then_some(&BLOCKED as &dyn Display),
                };
                return self.refuse(device, cm, req.tag, refused, &who, detail);
            }
        };
        // The session may have units that are new for this worker.
        self.group.follow_catalog();
        self.group
            .terminate_all(std::mem::take(&mut grant.displaced));
        let nexus = grant.nexus;
        let login = Login {
            device,
            cm,
            serial,
            peer,
            entrance,
            key,
            grant,
            guard,
            param,
        };
        match self.accept_srp(login) {
            Ok(memory) => {
                self.group.log_out_unserved();
                who.nexus = Some(nexus.0);
                // It may be for a target that was unknown to this worker.
                who.target = self.group.who_srp(device, None, peer, Some(&key)).target;
                self.group.logins.accept(self.group.now, &who);
                tracing::debug!(
                    %peer, nexus = nexus.0, channel = serial, worker = self.group.index,
                    memory = memory.total(), "channel established"
                );
            }
            Err(error) => {
                let reason = LoginRejReason::InsufficientResources;
                self.refuse(device, cm, req.tag, reason, &who, Some(&error));
            }
        }
    }

    /// Called when the connection of a channel is established. Other channels are only terminated
    /// at this point, because the source of a connection request could be forged.
    pub(super) fn on_srp_established(&mut self, key: ConnKey) {
        let Some(conn) = self.group.conns.srp_mut(key) else {
            return;
        };
        conn.rdma.was_established = true;
        if conn.channel.state() != ChState::Connecting {
            return;
        }
        let nexus = conn.key;
        let channel = ConnRef {
            worker: self.group.index,
            serial: conn.channel.config().serial,
        };
        let done = self.group.shared.registry.establish(nexus, channel);
        // A login request alone doesn't prove that there is an initiator.
        if !done.terminate.contains(&channel) {
            self.group
                .pool
                .add_member(Owner(channel.serial), &nexus.initiator);
        }
        // Do this first, because the channels it is waiting for may be closed when this returns.
        self.group
            .with_srp(key, |ch, cx| ch.handle_established(cx, done.may_start));
        self.group.notify_waiting(done.start);
        self.group.terminate_all(done.terminate);
    }

    fn refuse(
        &mut self,
        device: usize,
        cm: CmId,
        tag: Tag,
        refused: impl Into<LoginRefused>,
        who: &Who,
        detail: Option<&dyn Display>,
    ) {
        let LoginRefused {
            reason,
            audit,
            redirect,
        } = refused.into();
        let names = Reason {
            logged: audit,
            counted: reason.name(),
        };
        self.group.logins.refuse(self.group.now, who, names, detail);
        let rej = LoginRej {
            reason,
            tag,
            formats: BufferFormats::DIRECT | BufferFormats::INDIRECT,
        };
        let mut bytes = [0; riser_scsi::srp::LOGIN_REJ_LEN];
        rej.emit(&mut bytes);
        let dev = &mut self.group.devices[device];
        let redirected = redirect.is_some_and(|to| dev.redirect(cm, to).is_ok());
        if !redirected {
            // The peer may have canceled the request. In this case, we don't have to reply.
            let _ = dev.reject(cm, &bytes);
        }
        let _ = dev.destroy_id(cm);
    }

    /// Creates a channel and accepts the connection. On error, the session is left again.
    fn accept_srp(&mut self, login: Login<'_>) -> Result<ConnectionMemory, SetupError> {
        let Login {
            device,
            grant,
            guard,
            ..
        } = login;
        let params = grant.outcome.params;
        let parts = match self.make_srp(device, login.cm, &params) {
            Ok(parts) => parts,
            Err(error) => {
                self.group.leave_session(guard, Departure::default());
                return Err(error);
            }
        };
        let config = ChannelConfig {
            params,
            worker: self.group.index,
            serial: login.serial,
            nexus: grant.nexus,
            luns: grant.outcome.luns,
            receive_ring: parts.receive_ring,
            send_ring: parts.send_ring,
            max_sge: parts.max_sge,
            data_out_timeout: self.group.catalog.data_out_timeout,
        };
        let conn = SrpConn {
            channel: Channel::new(config, self.group.now),
            key: login.key,
            guard,
            entrance: login.entrance,
            rdma: RdmaLink::new(device, login.cm, parts.hardware),
        };
        let fabric = Fabric::Srp(Box::new(conn));
        // Do this before sending the reply, so that all subsequent events and completions find the
        // channel.
        let key = self.group.conns.insert(login.serial, login.peer, fabric);
        let mut rsp = [0; riser_scsi::srp::LOGIN_RSP_LEN];
        grant.outcome.rsp.emit(&mut rsp);
        self.accept(key, login.param, &rsp)?;
        Ok(params.memory())
    }

    /// Creates the rings and queue pair for a channel.
    fn make_srp(
        &mut self,
        device: usize,
        cm: CmId,
        params: &ChannelParams,
    ) -> Result<Parts, SetupError> {
        let memory = params.memory();
        // The rings are allocated with their full size, but pages are only used when messages are
        // received. A peer can't increase the memory of a channel above `ChannelParams::memory`.
        let receive_ring = Memory::sparse(memory.receive_ring)?.whole();
        let send_ring = Memory::sparse(memory.send_ring)?.whole();
        let dev = &mut self.group.devices[device];
        let max_sge = max_sge(dev.device_attr());
        let queues = Queues {
            receives: params.receives(),
            sends: params.send_queue,
            max_sge,
        };
        let regions = Regions {
            receive_ring: &receive_ring,
            send_ring: &send_ring,
            pool: self.group.pool.memory(),
        };
        let hardware = Hardware::make(dev, cm, queues, regions)?;
        Ok(Parts {
            receive_ring,
            send_ring,
            hardware,
            max_sge,
        })
    }
}

impl PollGroup {
    /// Returns both ends of a connection for the audit log.
    fn who_srp(
        &self,
        device: usize,
        entrance: Option<Entrance>,
        peer: SocketAddr,
        key: Option<&NexusKey>,
    ) -> Who {
        let addr = self.devices.addr(device);
        let target = key.map(|key| match self.catalog.target_of(&key.target) {
            Some(target) => target.config.name.clone(),
            None => key.target.to_string(),
        });
        Who {
            protocol: Protocol::Srp,
            peer: peer.to_string(),
            portal: match entrance {
                Some(Entrance::Port(port)) => SocketAddr::new(addr, port).to_string(),
                _ => addr.to_string(),
            },
            initiator: key.map(|key| key.initiator.to_string()),
            user: None,
            target,
            nexus: None,
        }
    }

    /// Executes the actions of a channel.
    pub(super) fn pump_srp(&mut self, key: ConnKey) {
        let mut receives = ArrayVec::<Receive, RECV_BATCH>::new();
        let mut chains = std::mem::take(&mut self.chains);
        let mut released = false;
        // We need to look up the connection for each action, because an action can remove it.
        // Receives and chains are collected, because posting several of them costs about the same
        // as a single one. Receives are posted first: a response contains credit for a request,
        // which needs a receive.
        while let Some(conn) = self.conns.srp_mut(key) {
            let Some(action) = conn.channel.poll_action() else {
                break;
            };
            match action {
                Action::PostRecv(recv) => {
                    receives.push(conn.receive(recv));
                    if receives.is_full() {
                        self.post_srp_receives(key, &mut receives);
                    }
                }
                Action::Post { task, send } => {
                    self.add_srp_chain(key, task, send, &mut chains);
                    if chains.is_full() {
                        self.post_srp_receives(key, &mut receives);
                        self.post_srp_chains(key, &mut chains);
                    }
                }
                Action::Task(action) => self.carry_out_task(key, action),
                Action::NotifyEstablished => self.notify_established(key),
                Action::StartEarly => {
                    let (nexus, serial) = (conn.key, conn.channel.config().serial);
                    let channel = ConnRef {
                        worker: self.index,
                        serial,
                    };
                    if self.shared.registry.start_early(nexus, channel) {
                        self.with_srp(key, Channel::handle_others_gone);
                    }
                }
                Action::Probe => {
                    let (device, qp) = (conn.rdma.device, conn.rdma.hardware.qp);
                    if !self.devices.post_empty_write(device, qp, Work::Probe) {
                        self.with_srp(key, |ch, cx| ch.handle_probed(cx, false));
                    }
                }
                Action::Disconnect => {
                    // The drain marker has to be posted after everything else, and nothing can be
                    // posted to destroyed queues.
                    self.post_srp_receives(key, &mut receives);
                    self.post_srp_chains(key, &mut chains);
                    self.disconnect(key);
                }
                Action::Release => {
                    released = true;
                    break;
                }
            }
        }
        self.post_srp_receives(key, &mut receives);
        self.post_srp_chains(key, &mut chains);
        self.chains = chains;
        if released {
            self.release(key);
        }
    }

    fn post_srp_receives(&mut self, key: ConnKey, receives: &mut ArrayVec<Receive, RECV_BATCH>) {
        let Some(conn) = self.conns.srp(key).filter(|_| !receives.is_empty()) else {
            return;
        };
        let (device, qp) = (conn.rdma.device, conn.rdma.hardware.qp);
        let taken = self.devices.post_recvs(device, qp, receives);
        // These will never complete, so we handle them as flushed. Otherwise the channel would wait
        // for them before it can be released.
        for (id, _) in receives.drain(..).skip(taken) {
            if let Work::Recv(recv) = Work::of(id) {
                self.with_srp(key, |ch, cx| ch.handle_recv_flushed(cx, recv));
            }
        }
    }

    /// Adds a chain with RDMA requests and a message to be posted next.
    fn add_srp_chain(
        &mut self,
        key: ConnKey,
        task: TaskIdx,
        send: Option<SendIu>,
        chains: &mut Chains,
    ) {
        let Some(conn) = self.conns.srp_mut(key) else {
            return;
        };
        let send = send.map(|iu| ChainSend {
            bytes: Sge {
                addr: conn.channel.sender().ring().addr(task),
                length: iu.len,
                lkey: conn.rdma.hardware.send_key,
            },
            op: SendOp::Send,
            flags: if iu.solicited {
                SendFlags::SOLICITED
            } else {
                SendFlags::empty()
            },
        });
        let requests = conn.channel.requests().rdma_requests(task);
        let pool = (self.pool.memory(), conn.rdma.hardware.pool_key);
        // The addresses are set by the initiator. If one of them is invalid, the chain is not
        // posted and the channel is closed.
        if let Err(error) = chains.push(Work::Post(task), requests, pool, send) {
            tracing::debug!(%error, "a descriptor names no memory");
            return on_posted(self, key, task, false);
        }
        if let Some(sinks) = &mut conn.rdma.hardware.sinks {
            let dev = &mut self.devices[conn.rdma.device];
            if let Err(error) = chains.register_sinks(dev, self.pool.memory(), sinks) {
                tracing::warn!(%error, "cannot register memory for a READ");
                on_posted(self, key, task, false);
            }
        }
    }

    fn post_srp_chains(&mut self, key: ConnKey, chains: &mut Chains) {
        let Some(conn) = self.conns.srp(key) else {
            return chains.clear();
        };
        let (device, qp) = (conn.rdma.device, conn.rdma.hardware.qp);
        let Err(left) = chains.post(&mut self.devices[device], qp) else {
            return;
        };
        for (work, posted) in &left {
            let Work::Post(task) = *work else {
                unreachable!("a channel's chain")
            };
            match posted {
                Posted::Part => self.end_torn_chain(key, Work::Torn(task)),
                Posted::Nothing => on_posted(self, key, task, false),
            }
        }
        if left.is_empty() {
            self.input(key, Input::Disconnected);
        }
    }

    /// Handles a completion of a channel.
    pub(super) fn on_srp_completion(&mut self, key: ConnKey, completion: &Completion) {
        let ok = completion.status.is_ok();
        match Work::of(completion.wr_id) {
            Work::Recv(recv) if ok => self.on_srp_message(key, recv, completion.byte_len as usize),
            Work::Recv(recv) => self.with_srp(key, |ch, cx| ch.handle_recv_flushed(cx, recv)),
            Work::Post(task) => on_posted(self, key, task, ok),
            // The message was not sent, regardless of the status of the marker.
            Work::Torn(task) => on_posted(self, key, task, false),
            // This only completes on error, and the remaining requests of its chain will also fail.
            Work::Inner => self.input(key, Input::Disconnected),
            Work::Probe => self.with_srp(key, |ch, cx| ch.handle_probed(cx, ok)),
            Work::Drain => self.input(key, Input::Drained),
            Work::IserRecv(_) | Work::IserPost(_) | Work::IserTorn(_) => {
                unreachable!("an SRP channel posts nothing of iSER's")
            }
        }
    }

    fn on_srp_message(&mut self, key: ConnKey, recv: RecvIdx, len: usize) {
        let Some(conn) = self.conns.srp(key) else {
            return;
        };
        let slot = conn.channel.receives().slot(recv);
        self.with_received(slot, len, |group, bytes| {
            group.with_srp(key, |ch, cx| ch.handle_recv(cx, recv, bytes));
        });
    }

    /// Returns both ends of a session for the audit log.
    pub(super) fn who_of_srp(&self, peer: SocketAddr, conn: &SrpConn) -> Who {
        let (device, entrance) = (conn.rdma.device, Some(conn.entrance));
        Who {
            nexus: Some(conn.channel.config().nexus.0),
            ..self.who_srp(device, entrance, peer, Some(&conn.key))
        }
    }

    /// Returns true if the listener of a channel was removed or belongs to a different target now.
    pub(super) fn is_unserved_srp(&self, conn: &SrpConn) -> bool {
        let device = conn.rdma.device;
        let is_open = self.portals.listeners.has(device, conn.entrance);
        let addr = self.devices.addr(device);
        let is_home = || {
            self.catalog
                .portal_at(&conn.key.target, addr, conn.entrance)
                .is_some()
        };
        self.devices.is_open(device) && (!is_open || !is_home())
    }
}

/// Handles a chain that has completed or was not posted.
fn on_posted(group: &mut PollGroup, key: ConnKey, task: TaskIdx, ok: bool) {
    release_sinks(group, key, Work::Post(task));
    group.with_srp(key, |ch, cx| ch.handle_post_done(cx, task, ok));
}
