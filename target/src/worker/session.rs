//! Logins, and what a channel holds besides its machine.

use std::fmt::Display;
use std::net::SocketAddr;
use std::time::Instant;

use riser_memory::Memory;
use riser_scsi::srp::{
    BufferFormats, InitiatorPortId, LoginRej, LoginRejReason, LoginReq, Tag, TargetPortId,
};
use riser_transport::verbs::{
    Access, CmError, CmId, ConnParam, CqId, LKey, MrId, Notify, PdId, QpCap, QpId, QpInitAttr,
    QpType,
};

use super::armed::Armed;
use super::mail::Mail;
use super::registry::{ChannelRef, Endpoints, Entered, NexusKey};
use super::target::{Entrance, Serves};
use super::{Endpoint, LINGER, PATIENCE, Phase, Worker};
use crate::audit::Parting;
use crate::audit::Who;
use crate::config::Protocol;
use crate::fabric::ConnectionMemory;
use crate::fabric::MAX_SGE;
use crate::qos::{IoLimits, Waits};
use crate::srp::{ChState, Channel, ChannelConfig, ChannelParams, LoginRefused};

/// Incoming READs and atomics that we allow: initiators have no business reading our memory.
pub(super) const RESPONDER_RESOURCES: u8 = 1;

/// Outgoing READs at once, if the initiator allows so many.
pub(super) const INITIATOR_DEPTH: u8 = 16;

/// A channel with its connection.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) channel: Channel,
    pub(super) key: NexusKey,
    pub(super) peer: SocketAddr,
    pub(super) device: usize,
    pub(super) cm: CmId,
    pub(super) hardware: Hardware,
    /// Timers that are set.
    pub(super) armed: Armed,
    /// Whether its completion queue is in the worker's list.
    pub(super) is_ready: bool,
    /// Whether it waits for pool memory.
    pub(super) waits_for_pool: bool,
    /// The CM has said that the connection is over.
    pub(super) is_closed: bool,
    /// It was established: there is a peer that may answer a goodbye.
    pub(super) was_established: bool,
    /// How it came in.
    pub(super) entrance: Entrance,
    /// The initiator is being logged out.
    pub(super) is_leaving: bool,
}

/// What a channel has at its device.
#[derive(Debug)]
pub(super) struct Hardware {
    pub(super) pd: PdId,
    pub(super) cq: CqId,
    pub(super) qp: QpId,
    pub(super) mrs: Vec<MrId>,
    pub(super) receive_key: LKey,
    pub(super) send_key: LKey,
    pub(super) pool_key: LKey,
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

/// A session's channel, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// The worker that has it.
    pub worker: u16,
    /// Number at that worker.
    pub serial: u64,
    /// The I_T nexus.
    pub nexus: u64,
    /// The initiator port.
    pub initiator: InitiatorPortId,
    /// The target port.
    pub target: TargetPortId,
    /// Where the initiator is.
    pub peer: SocketAddr,
    /// State.
    pub state: ChState,
    /// Requests under way.
    pub in_flight: usize,
    /// What was agreed on.
    pub params: ChannelParams,
    /// Logical units that it sees.
    pub luns: usize,
    /// The initiator's limits, and what has waited for them.
    pub limits: Option<(IoLimits, Waits)>,
}

impl Session {
    pub(super) fn info(&self, worker: u16) -> SessionInfo {
        let config = self.channel.config();
        SessionInfo {
            worker,
            serial: config.serial,
            nexus: config.nexus.0,
            initiator: self.key.initiator,
            target: self.key.target,
            peer: self.peer,
            state: self.channel.state(),
            in_flight: self.channel.in_flight(),
            params: config.params,
            luns: config.luns.luns().len(),
            limits: config.luns.limiter().map(|limiter| limiter.view()),
        }
    }
}

/// What making a channel can fail with.
#[derive(Debug, thiserror::Error)]
pub(super) enum SetupError {
    #[error(transparent)]
    Cm(#[from] CmError),
    #[error("no memory: {0}")]
    Memory(#[from] std::io::Error),
}

impl From<riser_transport::verbs::VerbsError> for SetupError {
    fn from(e: riser_transport::verbs::VerbsError) -> Self {
        Self::Cm(e.into())
    }
}

impl Worker {
    /// Number of a new channel, never used twice. Peers make channels, so it is of a width that they
    /// cannot exhaust.
    pub(super) fn take_serial(&mut self) -> u64 {
        let serial = self.next_serial;
        self.next_serial += 1;
        serial
    }

    /// A peer asks for a connection: of SRP, with its login in the private data, or of iSER.
    pub(super) fn on_connect_request(
        &mut self,
        device: usize,
        cm: CmId,
        listener: CmId,
        peer: SocketAddr,
        param: &ConnParam,
    ) {
        let Some(listener) = self.listeners.get(&(device, listener)).copied() else {
            // It is being closed.
            let who = self.who_srp(device, None, peer, None);
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
        let req = match parsed {
            Ok(req) => req,
            Err(error) => {
                let who = self.who_srp(device, Some(entrance), peer, None);
                let reason = LoginRejReason::UnableToEstablishChannel;
                return self.refuse(device, cm, Tag(0), reason, &who, Some(&error));
            }
        };
        let serial = self.take_serial();
        let channel = ChannelRef {
            worker: self.index,
            serial,
        };
        let shared = std::sync::Arc::clone(&self.shared);
        let key = NexusKey {
            initiator: req.initiator_port,
            target: req.target_port,
        };
        let mut who = self.who_srp(device, Some(entrance), peer, Some(&key));
        let ends = Endpoints {
            peer,
            local: self.devices.addr(device),
            entrance,
        };
        let mut entered = match shared.registry.login(&req, ends, channel, self.now) {
            Ok(entered) => entered,
            Err(refused) => {
                return self.refuse(device, cm, req.tag, refused, &who, None);
            }
        };
        // The login may have met units that this worker has not heard of yet.
        self.follow_catalog();
        self.terminate_all(std::mem::take(&mut entered.displaced));
        let nexus = entered.nexus;
        match self.accept(device, cm, serial, peer, key, entered, param, entrance) {
            Ok(memory) => {
                self.log_out_unserved();
                self.logins.count(Protocol::Srp);
                who.nexus = Some(nexus.0);
                // It may have met a target that was not known here before.
                who.target = self.who_srp(device, None, peer, Some(&key)).target;
                self.audit.login(self.now, &who);
                tracing::debug!(
                    %peer, nexus = nexus.0, channel = serial, worker = self.index,
                    memory = memory.total(), "channel made"
                );
            }
            Err(error) => {
                let left = shared.registry.logout(key, channel, None);
                self.start_channels(left.start);
                self.terminate_all(left.terminate);
                let reason = LoginRejReason::InsufficientResources;
                self.refuse(device, cm, req.tag, reason, &who, Some(&error));
            }
        }
    }

    /// A channel's connection is established. Only now its login ends other channels: a request alone
    /// may have come from anywhere.
    pub(super) fn on_srp_established(&mut self, slot: usize) {
        let Some(session) = self.sessions.get_mut(slot) else {
            return;
        };
        session.was_established = true;
        if session.channel.state() != ChState::Connecting {
            return;
        }
        let channel = ChannelRef {
            worker: self.index,
            serial: session.channel.config().serial,
        };
        let registry = &self.shared.registry;
        let done = registry.establish(session.key, channel, self.now);
        // First, since those that it waits for may be gone by the end of this call.
        self.with_channel(slot, |ch, cx| ch.handle_established(cx, done.may_start));
        self.start_channels(done.start);
        self.terminate_all(done.terminate);
    }

    /// Channels wait for no others any longer.
    fn start_channels(&mut self, channels: Vec<ChannelRef>) {
        for ChannelRef { worker, serial } in channels {
            self.post_mail(worker, Mail::OthersGone { serial });
        }
    }

    /// Who is at the other end of a connection, for the audit log.
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
            target,
            nexus: None,
        }
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
        let LoginRefused { reason, audit } = refused.into();
        self.audit.denied(self.now, who, audit, detail);
        self.rejects.count((Protocol::Srp, reason.name()));
        let rej = LoginRej {
            reason,
            tag,
            formats: BufferFormats::DIRECT | BufferFormats::INDIRECT,
        };
        let mut bytes = [0; riser_scsi::srp::LOGIN_REJ_LEN];
        rej.emit(&mut bytes);
        let dev = &mut self.devices[device];
        // The peer may have given up meanwhile; then there is nobody to tell.
        let _ = dev.reject(cm, &bytes);
        let _ = dev.destroy_id(cm);
    }

    /// Makes the channel and accepts the connection.
    #[allow(
        clippy::too_many_arguments,
        reason = "everything that is known of a login"
    )]
    fn accept(
        &mut self,
        device: usize,
        cm: CmId,
        serial: u64,
        peer: SocketAddr,
        key: NexusKey,
        entered: Entered,
        param: &ConnParam,
        entrance: Entrance,
    ) -> Result<ConnectionMemory, SetupError> {
        let params = entered.outcome.params;
        let memory = params.memory();
        let receive_ring = Memory::new(memory.receive_ring)?.whole();
        let send_ring = Memory::new(memory.send_ring)?.whole();
        let max_sge = (self.devices[device].device_attr().max_sge as usize).min(MAX_SGE);
        let rings = [&receive_ring, &send_ring];
        let queues = Queues {
            receives: params.receives(),
            sends: params.send_queue,
            max_sge,
        };
        let hardware = self.make_hardware(device, cm, queues, rings)?;
        let channel = Channel::new(
            ChannelConfig {
                params,
                worker: self.index,
                serial,
                nexus: entered.nexus,
                luns: entered.outcome.luns,
                receive_ring,
                send_ring,
                max_sge,
                data_out_timeout: self.catalog.data_out_timeout,
            },
            self.now,
        );
        let (qp, cq) = (hardware.qp, hardware.cq);
        let slot = self.sessions.insert(Session {
            channel,
            key,
            peer,
            device,
            cm,
            hardware,
            armed: Armed::default(),
            is_ready: false,
            waits_for_pool: false,
            is_closed: false,
            was_established: false,
            entrance,
            is_leaving: false,
        });
        self.by_cm.insert((device, cm), Endpoint::Srp(slot));
        self.by_cq.insert((device, cq), Endpoint::Srp(slot));
        self.by_serial.insert(serial, slot);
        // The receives must be there before the peer may send.
        self.drain_actions(slot);
        let mut rsp = [0; riser_scsi::srp::LOGIN_RSP_LEN];
        entered.outcome.rsp.emit(&mut rsp);
        let accepted = self.devices[device].accept(
            cm,
            &ConnParam {
                private_data: rsp.to_vec(),
                responder_resources: RESPONDER_RESOURCES.min(param.responder_resources),
                initiator_depth: INITIATOR_DEPTH.min(param.initiator_depth),
                flow_control: true,
                retry_count: 7,
                rnr_retry_count: 7,
                srq: false,
            },
        );
        if let Err(error) = accepted {
            let session = self.sessions.remove(slot);
            self.forget(&session);
            self.destroy_hardware(device, &session.hardware);
            return Err(error.into());
        }
        debug_assert!(self.devices[device].query_qp(qp).is_ok());
        self.arm_timer(slot);
        Ok(memory)
    }

    /// A protection domain of the session's own, its memory keys, its queues.
    pub(super) fn make_hardware(
        &mut self,
        device: usize,
        cm: CmId,
        queues: Queues,
        rings: [&riser_memory::MemSlice; 2],
    ) -> Result<Hardware, SetupError> {
        let dev = &mut self.devices[device];
        let pd = dev.alloc_pd()?;
        let mut mrs = Vec::with_capacity(3);
        let built = (|| {
            let pool = self.pool.memory().whole();
            let mut keys = [LKey(0); 3];
            for (key, range) in keys.iter_mut().zip([rings[0], rings[1], &pool]) {
                let mr = dev.reg_mr(pd, range, Access::LOCAL_WRITE)?;
                mrs.push(mr.id);
                *key = mr.lkey;
            }
            let entries = queues.receives + queues.sends;
            let cq = dev.create_cq(entries)?;
            let init = QpInitAttr {
                pd,
                send_cq: cq,
                recv_cq: cq,
                srq: None,
                qp_type: QpType::Rc,
                cap: QpCap {
                    max_send_wr: queues.sends,
                    max_recv_wr: queues.receives,
                    max_send_sge: queues.max_sge as u32,
                    max_recv_sge: 1,
                    max_inline: 0,
                },
                sq_sig_all: false,
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
        })();
        match built {
            Ok((cq, qp, [receive_key, send_key, pool_key])) => Ok(Hardware {
                pd,
                cq,
                qp,
                mrs,
                receive_key,
                send_key,
                pool_key,
            }),
            Err(error) => {
                for mr in mrs {
                    let _ = dev.dereg_mr(mr);
                }
                let _ = dev.dealloc_pd(pd);
                Err(error)
            }
        }
    }

    /// Destroys what a channel had at its device. Everything was created by us and is used by nobody
    /// else, so a refusal is a bug; it costs a log line and a leak, not the daemon.
    pub(super) fn destroy_hardware(&mut self, device: usize, hardware: &Hardware) {
        let dev = &mut self.devices[device];
        let mut results = vec![dev.destroy_qp(hardware.qp), dev.destroy_cq(hardware.cq)];
        results.extend(hardware.mrs.iter().map(|mr| dev.dereg_mr(*mr)));
        results.push(dev.dealloc_pd(hardware.pd));
        if dev.is_gone() {
            // Everything went with it.
            return;
        }
        for error in results.into_iter().filter_map(Result::err) {
            debug_assert!(false, "{error}");
            tracing::error!(%error, "cannot free a session's device objects");
        }
    }

    /// Takes a session out of the worker's tables.
    fn forget(&mut self, session: &Session) {
        self.by_cm.remove(&(session.device, session.cm));
        self.by_cq.remove(&(session.device, session.hardware.cq));
        self.by_serial.remove(&session.channel.config().serial);
    }

    /// The channel holds nothing any more.
    pub(super) fn release(&mut self, slot: usize) {
        let session = self.sessions.remove(slot);
        self.forget(&session);
        self.ready.retain(|&k| k != Endpoint::Srp(slot));
        self.destroy_hardware(session.device, &session.hardware);
        let serial = session.channel.config().serial;
        let channel = ChannelRef {
            worker: self.index,
            serial,
        };
        // One that only disconnects, as Linux does before it connects again, goes on with its disks.
        let again = (session.channel.end() != Parting::Logout).then_some(self.now);
        let left = self.shared.registry.logout(session.key, channel, again);
        self.start_channels(left.start);
        self.terminate_all(left.terminate);
        self.past += session.channel.counters();
        self.past_functions.merge(session.channel.functions());
        let initiator = session.key.initiator.to_string();
        session.channel.accounts().keep(&initiator);
        if session.is_closed || !session.was_established {
            // It is over on both sides, or was never established, so no DREQ is owed; the identifier may
            // be gone already.
            let _ = self.devices[session.device].destroy_id(session.cm);
        } else {
            self.lingering
                .push((session.device, session.cm, self.now + LINGER));
        }
        let (device, entrance) = (session.device, Some(session.entrance));
        let who = Who {
            nexus: Some(session.channel.nexus().0),
            ..self.who_srp(device, entrance, session.peer, Some(&session.key))
        };
        self.audit.end(self.now, &who, session.channel.end());
    }

    /// Ends identifiers whose goodbye was answered, or was not in time.
    pub(super) fn end_lingering(&mut self, closed: Option<(usize, CmId)>) {
        let now = self.now;
        let devices = &mut self.devices;
        self.lingering.retain(|&(device, cm, at)| {
            let over = at <= now || closed == Some((device, cm));
            if over && let Some(dev) = devices.get_mut(device) {
                let _ = dev.destroy_id(cm);
            }
            !over
        });
    }

    /// Brings a session to an end: commands under way finish until then.
    pub(super) fn log_out(&mut self, key: usize, until: Instant) {
        let Some(session) = self.sessions.get_mut(key) else {
            return;
        };
        if !std::mem::replace(&mut session.is_leaving, true) {
            self.with_channel(key, |ch, cx| ch.handle_shutdown(cx, until));
        }
    }

    /// Brings those sessions to an end whose way in is gone, or is another target's now.
    pub(super) fn log_out_unserved(&mut self) {
        let until = self.now + PATIENCE;
        let is_unserved = |s: &Session| {
            let mut listeners = self.listeners.iter();
            let is_open = listeners.any(|((d, _), l)| *d == s.device && l.entrance == s.entrance);
            let addr = self.devices.addr(s.device);
            let is_home = || self.catalog.has_entrance(&s.key.target, addr, s.entrance);
            self.devices.is_open(s.device) && (!is_open || !is_home())
        };
        let sessions = self.sessions.iter();
        let ended: Vec<usize> = sessions
            .filter(|(_, s)| is_unserved(s))
            .map(|(key, _)| key)
            .collect();
        for key in ended {
            self.log_out(key, until);
        }
    }

    /// Stops listening, and asks all sessions to come to an end.
    pub(super) fn begin_shutdown(&mut self, until: Instant) {
        if self.phase != Phase::Serving {
            return;
        }
        self.phase = Phase::Stopping(until);
        for ((device, cm), _) in self.listeners.drain() {
            let _ = self.devices[device].destroy_id(cm);
        }
        let keys: Vec<usize> = self.sessions.iter().map(|(k, _)| k).collect();
        for key in keys {
            self.log_out(key, until);
        }
        self.begin_iscsi_shutdown(until);
        self.begin_iser_shutdown(until);
        self.drain_dirty();
    }
}
