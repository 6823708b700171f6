//! Creating, modifying and destroying queue pairs, and posting work requests.

use std::net::IpAddr;

use chacha20::rand_core::Rng as _;

use super::objects::PORT;
use super::{Machine, Nic, Peer, Qp, QpCounters, Wire};
use crate::nic::batch::{ECN_MASK, TxPath};
use crate::nic::cq::Cq;
use crate::nic::ud::{MAX_UD_SGE, UdQp};
use crate::rc::{DrainedChange, Env, RcConfig, RcQp, RecvQueue, RtrParams, RtsParams};
use crate::rdmap::{RdmapConfig, RdmapQp};
use crate::uc::{UcConfig, UcQp, UcRtrParams};
use crate::verbs::qp_state::plan_modify;
use crate::verbs::{
    Access, AhAttr, PKey, PathMigState, PostError, PostReason, QpAttr, QpCap, QpId, QpInitAttr,
    QpState, QpType, RecvWr, SendOp, SendWr, VerbsError,
};
use crate::wire::{IcrcFlow, Psn, Qpn, ROCE_PORT, RnrTimer, Service};

const REQUIRED: &str = "the state table requires it";

/// The responder sends an acknowledgement after this number of packets even if it was not
/// requested.
const ACK_EVERY: u32 = 32;

fn refuse(reason: PostReason) -> PostError {
    PostError { index: 0, reason }
}

/// Borrows the state machine of a QP and its environment.
macro_rules! with_env {
    ($self:ident, $qp:ident, $env:ident) => {
        let rq = match $qp.srq.and_then(|s| $self.srqs.get_mut(s).ok()) {
            Some(srq) => &mut srq.queue,
            None => &mut $qp.rq,
        };
        #[allow(unused_mut, reason = "not every user changes it")]
        let mut $env = Env {
            mrs: &mut $self.mrs,
            rq,
            out: &mut $self.out,
        };
    };
}
pub(super) use with_env;

#[allow(
    missing_docs,
    reason = "the calls of the verbs traits, documented there"
)]
impl Nic {
    pub fn create_qp(&mut self, init: &QpInitAttr) -> Result<QpId, VerbsError> {
        self.check_cap(&init.cap, init.qp_type)?;
        self.check_objects(init)?;
        // When using a shared queue, the QP doesn't have its own receives, but the entries have the
        // size of the shared queue.
        let mut cap = init.cap;
        if let Some(srq) = init.srq {
            if !matches!(init.qp_type, QpType::Rc | QpType::Uc) {
                return Err(VerbsError::WrongQpType("shared receive queue"));
            }
            let srq = self.srqs.get(srq)?;
            if srq.xrc.is_some() {
                return Err(VerbsError::WrongQpType(
                    "shared receive queue of an XRC domain",
                ));
            }
            cap.max_recv_sge = srq.attr().max_sge;
            cap.max_recv_wr = 0;
        }
        match init.qp_type {
            QpType::XrcIni => (cap.max_recv_wr, cap.max_recv_sge) = (0, 0),
            // Receives can be used from any queue of the XRC domain.
            QpType::XrcTgt => {
                cap = QpCap {
                    max_recv_sge: self.config.limits.max_sge,
                    max_send_sge: 0,
                    ..QpCap::new(0, 0)
                };
            }
            _ => {}
        }
        // There is only one QP1. It does not receive CM messages, because these are handled by the
        // device.
        if init.qp_type == QpType::Gsi && self.gsi.is_some() {
            return Err(VerbsError::ResourceBusy("queue pair 1"));
        }
        // Check this before allocating a number, which would be leaked if the insertion fails.
        if self.qps.is_full() {
            return Err(VerbsError::InsufficientResources("queue pair"));
        }
        let qpn = match init.qp_type {
            QpType::Gsi => Qpn::GSI.value(),
            _ => self.qpns.allocate(&mut self.random),
        };
        // The state machine needs a handle, which is not available until we insert it into the
        // table.
        let id = self.qps.insert(Qp {
            qpn,
            pd: init.pd,
            qp_type: init.qp_type,
            machine: Machine::Ud(Box::new(UdQp::new(
                QpId(crate::verbs::Handle::new(0, 0)),
                init.pd,
                Qpn::new(qpn),
                QpCap {
                    max_send_wr: 0,
                    max_recv_wr: 0,
                    max_send_sge: 0,
                    max_recv_sge: 0,
                    max_inline: 0,
                },
                false,
                0,
            ))),
            rq: RecvQueue::new(cap.max_recv_wr, cap.max_recv_sge).with_order(init.recv_order),
            srq: init.srq,
            xrcd: init.xrcd,
            send_cq: init.send_cq,
            recv_cq: init.recv_cq,
            attr: QpAttr::default(),
            peer: None,
            alternate: None,
            mig_state: PathMigState::Migrated,
            notifies_drain: false,
            source_port: None,
            awaits_first_packet: false,
            is_queued: false,
            blocks_own_mcast: init.block_self_mcast,
            limiter: None,
            armed: None,
            counters: QpCounters::default(),
        })?;
        self.has_datagrams |= init.qp_type == QpType::Ud;
        let machine = self.machine(id, init, cap, qpn);
        self.qps.get_mut(id)?.machine = machine;
        if let Some(xrcd) = init.xrcd {
            self.xrcds.get_mut(xrcd)?.users += 1;
        } else {
            self.pds.get_mut(init.pd)?.users += 1;
            self.cqs.get_mut(init.send_cq)?.add_user();
            self.cqs.get_mut(init.recv_cq)?.add_user();
        }
        if let Some(srq) = init.srq {
            self.srqs.get_mut(srq)?.users += 1;
        }
        if init.qp_type == QpType::Gsi {
            self.gsi = Some(id);
        } else {
            self.by_qpn.insert(qpn, id);
        }
        Ok(id)
    }

    /// Checks the objects used to create a QP.
    fn check_objects(&self, init: &QpInitAttr) -> Result<(), VerbsError> {
        match (init.qp_type, init.xrcd) {
            (QpType::Smi, _) => return Err(VerbsError::Unsupported("queue pair 0")),
            (QpType::RawPacket, _) => return Err(VerbsError::Unsupported("raw packets")),
            (QpType::XrcTgt, _) if self.config.wire == Wire::Streams => {
                return Err(VerbsError::Unsupported("queue pairs of this type"));
            }
            (QpType::XrcTgt, Some(xrcd)) => return self.xrcds.get(xrcd).map(drop),
            (QpType::XrcTgt, None) => {
                return Err(VerbsError::InvalidParameter("XRC target without a domain"));
            }
            (_, Some(_)) => return Err(VerbsError::WrongQpType("XRC domain")),
            _ => {}
        }
        if init.qp_type != QpType::Rc {
            self.config.check_packets("queue pairs of this type")?;
        }
        self.pds.get(init.pd)?;
        self.cqs.get(init.send_cq)?;
        self.cqs.get(init.recv_cq)?;
        Ok(())
    }

    fn machine(&mut self, id: QpId, init: &QpInitAttr, cap: QpCap, qpn: u32) -> Machine {
        if self.config.wire == Wire::Streams {
            return Machine::Stream(Box::new(RdmapQp::new(RdmapConfig {
                qp: id,
                qp_num: qpn,
                pd: init.pd,
                cap,
                sq_sig_all: init.sq_sig_all,
                has_srq: init.srq.is_some(),
            })));
        }
        let service = match init.qp_type {
            QpType::Rc => Some(Service::Rc),
            QpType::XrcIni | QpType::XrcTgt => Some(Service::Xrc),
            _ => None,
        };
        if let Some(service) = service {
            let rc = Box::new(RcQp::new(RcConfig {
                qp_num: qpn,
                service,
                sq_sig_all: init.sq_sig_all,
                has_srq: init.srq.is_some() || init.xrcd.is_some(),
                max_inflight_bytes: self.config.max_inflight_bytes,
                ack_every: ACK_EVERY,
                seed: self.random.next_u32(),
                ..RcConfig::new(id, init.pd, cap)
            }));
            return match service {
                Service::Rc => Machine::Rc(rc),
                _ => Machine::Xrc(rc),
            };
        }
        if init.qp_type == QpType::Uc {
            return Machine::Uc(Box::new(UcQp::new(UcConfig {
                qp: id,
                qp_num: qpn,
                pd: init.pd,
                cap,
                sq_sig_all: init.sq_sig_all,
                has_srq: init.srq.is_some(),
                max_burst_bytes: self.config.max_inflight_bytes,
            })));
        }
        // MADs are always 256 bytes, regardless of the path (IBTA 13.5.1).
        let mtu = match init.qp_type {
            QpType::Gsi => 256,
            _ => self.config.mtu.bytes() as usize,
        };
        let qpn = Qpn::new(qpn);
        Machine::Ud(Box::new(UdQp::new(
            id,
            init.pd,
            qpn,
            cap,
            init.sq_sig_all,
            mtu,
        )))
    }

    /// Returns the memory in bytes used by a reliable QP with this configuration, including a
    /// separate CQ with `completions` entries. `reads` and `resources` are the number of
    /// outstanding READs of the local side and the peer, respectively.
    #[must_use]
    pub const fn queue_memory(cap: &QpCap, reads: u8, resources: u8, completions: u32) -> usize {
        size_of::<Qp>()
            + RcQp::memory(cap, reads, resources)
            + RecvQueue::memory(cap.max_recv_wr, cap.max_recv_sge)
            + Cq::memory(completions)
    }

    fn check_cap(&self, cap: &QpCap, qp_type: QpType) -> Result<(), VerbsError> {
        let l = &self.config.limits;
        // For datagrams, the scatter list has a fixed position in the queue entry.
        let sge = match qp_type {
            QpType::Ud | QpType::Gsi => l.max_sge.min(MAX_UD_SGE as u32),
            _ => l.max_sge,
        };
        if cap.max_send_wr > l.max_qp_wr || cap.max_recv_wr > l.max_qp_wr {
            return Err(VerbsError::InvalidParameter("queue depth"));
        }
        if cap.max_send_sge > sge || cap.max_recv_sge > l.max_sge {
            return Err(VerbsError::InvalidParameter("scatter-gather entries"));
        }
        if cap.max_inline > l.max_inline {
            return Err(VerbsError::InvalidParameter("inline bytes"));
        }
        Ok(())
    }

    pub fn qp_num(&self, qp: QpId) -> Result<u32, VerbsError> {
        Ok(self.qps.get(qp)?.qpn)
    }

    /// Returns the counters of a QP.
    pub fn qp_counters(&self, qp: QpId) -> Result<QpCounters, VerbsError> {
        let qp = self.qps.get(qp)?;
        let mut counters = qp.counters;
        match &qp.machine {
            Machine::Rc(rc) | Machine::Xrc(rc) => counters.rc = *rc.counters(),
            Machine::Uc(uc) => counters.uc = *uc.counters(),
            Machine::Ud(ud) => counters.dropped_datagrams = ud.dropped,
            Machine::Stream(stream) => counters.rdmap = *stream.counters(),
        }
        Ok(counters)
    }

    pub fn query_qp(&self, qp: QpId) -> Result<QpAttr, VerbsError> {
        let qp = self.qps.get(qp)?;
        let (alt_path, path_mig_state) = Self::migration_attr(qp);
        Ok(QpAttr {
            state: Some(qp.state()),
            pkey: qp.attr.pkey_index.map(|_| PKey::DEFAULT),
            alt_path,
            path_mig_state,
            sq_draining: Some(qp.machine.is_draining()),
            ..qp.attr
        })
    }

    pub fn modify_qp(&mut self, id: QpId, attr: &QpAttr) -> Result<(), VerbsError> {
        let qp = self.qps.get(id)?;
        // We need to check everything before changing any state, so that a failed modify has no
        // effect.
        let from = qp.state();
        let to = plan_modify(qp.qp_type, from, attr)?;
        // A stream is set up when its connection is established.
        if to == QpState::Rtr {
            self.config
                .check_packets("connections without the connection manager")?;
        }
        self.check_values(attr)?;
        if from == QpState::Sqd && to == QpState::Sqd {
            check_sqd(attr, qp.machine.is_draining())?;
        }
        let peer = match attr.ah {
            Some(ah) => Some(self.plan_way(id, &ah, attr)?),
            None => None,
        };
        let alternate = self.plan_alternate(id, attr)?;
        if let Some(peer) = peer {
            self.change_peer(id, peer);
        }
        // This must be done while we still know the peer, so we can send the last acknowledgements.
        if matches!(to, QpState::Error | QpState::Reset) {
            self.keep_last_answers(id);
        }
        if to == QpState::Reset {
            self.leave_peer(id);
            self.qps.get_mut(id)?.forget_alternate();
        }
        if (from, to) == (QpState::Rts, QpState::Sqd) {
            self.qps.get_mut(id)?.notifies_drain = attr.en_sqd_async_notify == Some(true);
        }
        self.apply(id, from, to, attr)?;
        self.finish_turn(id);
        // Update this after the state, since the connection is only set up by the state change.
        self.apply_alternate(id, alternate, attr.path_mig_state)?;
        if to == QpState::Reset {
            let qp = self.qps.get(id)?;
            for cq in [qp.send_cq, qp.recv_cq] {
                if let Ok(cq) = self.cqs.get_mut(cq) {
                    cq.forget(id);
                }
            }
        }
        Ok(())
    }

    fn check_values(&self, attr: &QpAttr) -> Result<(), VerbsError> {
        let l = &self.config.limits;
        // The partition key table and the port table only have a single entry.
        if let Some(index) = attr.pkey_index.filter(|&i| i != 0) {
            return Err(VerbsError::InvalidIndex(index));
        }
        if let Some(port) = attr.port.filter(|&p| p != PORT) {
            return Err(VerbsError::InvalidPort(port));
        }
        // Return an error if a value is too large for its field, because truncating it would change
        // its meaning.
        let within = |value: Option<u32>, max: u32, name| match value {
            Some(v) if v > max => Err(VerbsError::InvalidParameter(name)),
            _ => Ok(()),
        };
        let byte = |v: Option<u8>| v.map(u32::from);
        within(attr.dest_qp, 0x00ff_ffff, "dest_qp")?;
        within(attr.rq_psn, 0x00ff_ffff, "rq_psn")?;
        within(attr.sq_psn, 0x00ff_ffff, "sq_psn")?;
        within(byte(attr.min_rnr_timer), 31, "min_rnr_timer")?;
        within(byte(attr.timeout), 31, "timeout")?;
        within(byte(attr.retry_cnt), 7, "retry_cnt")?;
        within(byte(attr.rnr_retry), 7, "rnr_retry")?;
        within(
            byte(attr.max_dest_rd_atomic),
            l.max_qp_rd_atom.into(),
            "max_dest_rd_atomic",
        )?;
        within(
            byte(attr.max_rd_atomic),
            l.max_qp_init_rd_atom.into(),
            "max_rd_atomic",
        )?;
        // If the packets were larger than the interface MTU, they would all be lost, and the QP
        // would run out of retries.
        if attr.path_mtu.is_some_and(|m| m > self.config.mtu) {
            return Err(VerbsError::InvalidParameter("path_mtu"));
        }
        Ok(())
    }

    /// Returns the path for an address vector, if the number of QPs with this peer is not exceeded.
    pub(super) fn plan_way(
        &mut self,
        id: QpId,
        ah: &AhAttr,
        attr: &QpAttr,
    ) -> Result<Peer, VerbsError> {
        // If the QP is already connected to this peer, don't count it twice. The limit prevents a
        // single host from using all QPs of the device.
        let ip = self.reachable(ah)?;
        let has = self.peers.get(&ip).map_or(0, Vec::len) as u32;
        let is_there = self.qps.get(id)?.peer.is_some_and(|p| p.addr.ip() == ip);
        if has >= self.config.limits.max_qps_per_peer && !is_there {
            self.counters.refused_qps += 1;
            return Err(VerbsError::InsufficientResources(
                "queue pairs for this peer",
            ));
        }
        let addr = std::net::SocketAddr::new(ip, ROCE_PORT);
        // The GID table is not larger than this.
        let from = ah.sgid_index as u8;
        let flow = IcrcFlow::new(self.locals[usize::from(from)], addr)
            .ok_or(VerbsError::InvalidParameter("destination address"))?;
        let dest = attr.dest_qp.or(self.qps.get(id)?.attr.dest_qp);
        let is_own = dest.is_some_and(|qpn| self.keeps(addr, Qpn::new(qpn)));
        // ECN is set by the device.
        let tos = ah.traffic_class & !ECN_MASK;
        Ok(Peer {
            addr,
            from,
            flow,
            tos,
            is_own,
        })
    }

    /// Changes the path of a connection.
    pub(super) fn change_peer(&mut self, id: QpId, peer: Peer) {
        // Remove the old address before adding the new one, since they can be the same.
        self.leave_peer(id);
        self.peers.entry(peer.addr.ip()).or_default().push(id);
        if let Ok(qp) = self.qps.get_mut(id) {
            qp.peer = Some(peer);
        }
        self.share_window(peer.addr.ip());
    }

    fn leave_peer(&mut self, id: QpId) {
        let Ok(qp) = self.qps.get_mut(id) else {
            return;
        };
        // The next peer needs to verify its port again.
        qp.source_port = None;
        let Some(peer) = qp.peer.take() else {
            return;
        };
        qp.machine.set_max_inflight(self.config.max_inflight_bytes);
        let ip = peer.addr.ip();
        if let Some(qps) = self.peers.get_mut(&ip) {
            qps.retain(|&other| other != id);
            if qps.is_empty() {
                // If there are no more QPs with this peer, we won't verify the packets, so we can
                // discard all state about it.
                self.peers.remove(&ip);
                self.forget_peer(ip);
            }
        }
        self.share_window(ip);
    }

    /// Divides the in-flight bytes for a peer between the QPs, after a QP was added or removed.
    fn share_window(&mut self, ip: IpAddr) {
        let qps = self.peers.get(&ip).map_or(&[][..], Vec::as_slice);
        let count = qps.len() as u32;
        let each = self.config.max_inflight_bytes;
        let together = self.config.peer_inflight_bytes;
        let share = |count: u32| (together / count.max(1)).max(each);
        // If there are many QPs, each uses the minimum value, so this change does not affect the
        // other QPs.
        if count == 0 || share(count - 1) == each {
            return;
        }
        let share = share(count);
        for &id in qps {
            if let Ok(qp) = self.qps.get_mut(id) {
                qp.machine.set_max_inflight(share);
            }
        }
    }

    /// Applies changes after they have been verified.
    fn apply(
        &mut self,
        id: QpId,
        from: QpState,
        to: QpState,
        attr: &QpAttr,
    ) -> Result<(), VerbsError> {
        let qp = self.qps.get_mut(id)?;
        if to == QpState::Reset {
            qp.attr = QpAttr::default();
            qp.limiter = None;
        } else {
            merge(&mut qp.attr, attr);
        }
        // This includes attributes of previous requests, since access rights may have been set in
        // INIT.
        let merged = qp.attr;
        let has_srq = qp.srq.is_some();
        with_env!(self, qp, env);
        match &mut qp.machine {
            Machine::Rc(rc) | Machine::Xrc(rc) => {
                move_rc(rc, from, to, attr, &merged, &mut env);
                // In the RESET state, receives are discarded without a completion.
                if to == QpState::Reset && !has_srq {
                    env.rq.clear();
                }
            }
            Machine::Uc(uc) => {
                move_uc(uc, from, to, attr, &merged, &mut env);
                if to == QpState::Reset && !has_srq {
                    env.rq.clear();
                }
            }
            Machine::Stream(stream) => {
                move_stream(stream, from, to, attr, &mut env);
                if to == QpState::Reset && !has_srq {
                    env.rq.clear();
                }
            }
            Machine::Ud(ud) => {
                if let Some(qkey) = attr.qkey {
                    ud.set_qkey(qkey);
                }
                if let Some(psn) = attr.sq_psn {
                    ud.set_sq_psn(psn);
                }
                // Do this even if the state was already ERROR, to flush receives that have been
                // posted since.
                if from != to || to == QpState::Error {
                    ud.on_state(to, env.rq, env.out);
                }
            }
        }
        Ok(())
    }

    /// Moves a QP to the ERROR state due to an internal error of the device.
    pub(super) fn fail_qp(&mut self, id: QpId) {
        let Ok(qp) = self.qps.get_mut(id) else {
            return;
        };
        with_env!(self, qp, env);
        match &mut qp.machine {
            Machine::Rc(rc) | Machine::Xrc(rc) => rc.to_error(&mut env),
            Machine::Uc(uc) => uc.to_error(&mut env),
            Machine::Ud(ud) => ud.on_state(QpState::Error, env.rq, env.out),
            Machine::Stream(stream) => stream.to_error(&mut env),
        }
        self.finish_turn(id);
    }

    pub fn destroy_qp(&mut self, id: QpId) -> Result<(), VerbsError> {
        self.qps.get(id)?;
        // This needs the QP and its peer.
        self.keep_last_answers(id);
        self.detach_all(id);
        self.leave_peer(id);
        let qp = self.qps.remove(id)?;
        self.mrs.unbind_all(id);
        if let Machine::Rc(rc) | Machine::Xrc(rc) = &qp.machine {
            super::config::add_rc(&mut self.past, rc.counters());
        }
        if matches!(qp.machine, Machine::Stream(_)) {
            // This tells the owner to close the stream.
            self.ready.push_back(id);
        }
        if self.gsi == Some(id) {
            self.gsi = None;
        } else {
            self.by_qpn.remove(&qp.qpn);
            self.qpns.release(qp.qpn);
        }
        if let Some(xrcd) = qp.xrcd {
            self.release_xrcd(xrcd);
        } else {
            for cq in [qp.send_cq, qp.recv_cq] {
                if let Ok(cq) = self.cqs.get_mut(cq) {
                    cq.remove_user();
                }
            }
            if let Some(srq) = qp.srq.and_then(|s| self.srqs.get_mut(s).ok()) {
                srq.users -= 1;
            }
            self.release_pd(qp.pd);
        }
        self.forget_events(id);
        self.forget_cm_qp(id);
        Ok(())
    }

    pub fn post_send(&mut self, id: QpId, wrs: &[SendWr<'_>]) -> Result<(), PostError> {
        let qp = self
            .qps
            .get_mut(id)
            .map_err(|_| refuse(PostReason::InvalidHandle))?;
        with_env!(self, qp, env);
        let result = match &mut qp.machine {
            Machine::Rc(rc) => rc.post_send(wrs, &mut env),
            Machine::Xrc(rc) => post_xrc(rc, qp.qp_type, wrs, &mut env),
            Machine::Uc(uc) => uc.post_send(wrs, &mut env),
            Machine::Stream(stream) => stream.post_send(wrs, &mut env),
            Machine::Ud(ud) => {
                let ahs = &self.ahs;
                let pd = qp.pd;
                wrs.iter().enumerate().try_for_each(|(index, wr)| {
                    // An address handle must be in the same protection domain, because it was
                    // created for QPs of a different owner otherwise.
                    let way = wr
                        .ud
                        .and_then(|u| ahs.get(u.ah).ok())
                        .filter(|ah| ah.pd == pd)
                        .map(|ah| datagram_way(&ah.attr))
                        .ok_or(PostReason::InvalidKey);
                    way.and_then(|way| ud.post_send(wr, way, env.out))
                        .map_err(|reason| PostError { index, reason })
                })
            }
        };
        self.finish_turn(id);
        result
    }

    /// Removes the last `count` sends, to ensure that either all requests of a list are posted or
    /// none of them. Nothing else can be called on the device after posting them. If the QP is in
    /// the ERROR state, the requests have already completed, and this has no effect.
    pub fn unpost_send(&mut self, id: QpId, count: usize) {
        match self.qps.get_mut(id).map(|qp| &mut qp.machine) {
            Ok(Machine::Rc(rc) | Machine::Xrc(rc)) => rc.unpost_send(count),
            Ok(Machine::Uc(uc)) => uc.unpost_send(count),
            Ok(Machine::Ud(ud)) => ud.unpost_send(count),
            Ok(Machine::Stream(stream)) => stream.unpost_send(count),
            Err(_) => {}
        }
    }

    pub fn post_recv(&mut self, id: QpId, wrs: &[RecvWr<'_>]) -> Result<(), PostError> {
        let qp = self
            .qps
            .get_mut(id)
            .map_err(|_| refuse(PostReason::InvalidHandle))?;
        let state = qp.state();
        with_env!(self, qp, env);
        let result = match &mut qp.machine {
            Machine::Rc(rc) => rc.post_recv(wrs, &mut env),
            // Receives must be posted to the shared queues.
            Machine::Xrc(_) => Err(refuse(PostReason::InvalidOpcode)),
            Machine::Uc(uc) => uc.post_recv(wrs, &mut env),
            Machine::Stream(stream) => stream.post_recv(wrs, &mut env),
            Machine::Ud(_) if state == QpState::Reset => {
                Err(refuse(PostReason::InvalidState(state)))
            }
            Machine::Ud(ud) => {
                let result = env.rq.post(wrs);
                if state == QpState::Error {
                    // Like for connections, receives posted in the ERROR state are flushed
                    // immediately.
                    ud.on_state(QpState::Error, env.rq, env.out);
                }
                result
            }
        };
        self.finish_turn(id);
        result
    }
}

/// Returns the `TxPath` for an address handle. For multicast groups, the scope is limited by the hop
/// limit.
fn datagram_way(ah: &AhAttr) -> TxPath {
    let ip = ah.dgid.ip();
    let way = TxPath::to(std::net::SocketAddr::new(ip, ROCE_PORT));
    TxPath {
        from: ah.sgid_index as u8,
        tos: ah.traffic_class & !ECN_MASK,
        hop_limit: if ip.is_multicast() {
            ah.hop_limit
        } else {
            way.hop_limit
        },
        ..way
    }
}

/// If there are outstanding requests, only unrelated attributes can be changed (IBTA 10.3.1.5).
fn check_sqd(attr: &QpAttr, is_draining: bool) -> Result<(), VerbsError> {
    let waits = [
        ("ah", attr.ah.is_some()),
        ("port", attr.port.is_some()),
        ("pkey_index", attr.pkey_index.is_some()),
        ("timeout", attr.timeout.is_some()),
        ("retry_cnt", attr.retry_cnt.is_some()),
        ("rnr_retry", attr.rnr_retry.is_some()),
        ("max_rd_atomic", attr.max_rd_atomic.is_some()),
        ("max_dest_rd_atomic", attr.max_dest_rd_atomic.is_some()),
    ];
    match waits.into_iter().find(|(_, given)| *given && is_draining) {
        Some((name, _)) => Err(VerbsError::InvalidParameter(name)),
        None => Ok(()),
    }
}

fn merge(into: &mut QpAttr, attr: &QpAttr) {
    macro_rules! take {
        ($($field:ident)*) => { $(if attr.$field.is_some() { into.$field = attr.$field; })* };
    }
    take!(pkey_index port access qkey ah path_mtu dest_qp rq_psn sq_psn max_dest_rd_atomic
        max_rd_atomic min_rnr_timer timeout retry_cnt rnr_retry);
}

impl Machine {
    /// Returns whether requests started before a change to SQD are still outstanding.
    fn is_draining(&self) -> bool {
        match self {
            Self::Rc(rc) | Self::Xrc(rc) => rc.is_draining(),
            Self::Uc(uc) => uc.is_draining(),
            Self::Stream(stream) => stream.is_draining(),
            // A datagram that has been started is always complete.
            Self::Ud(_) => false,
        }
    }

    /// Changes the maximum number of in-flight bytes.
    fn set_max_inflight(&mut self, bytes: u32) {
        match self {
            Self::Rc(rc) | Self::Xrc(rc) => rc.set_max_inflight(bytes),
            Self::Uc(uc) => uc.set_max_burst(bytes),
            // A stream uses the flow control of its transport.
            Self::Ud(_) | Self::Stream(_) => {}
        }
    }
}

/// Posts to an extended connection. Each request specifies a queue of the peer.
fn post_xrc(
    rc: &mut RcQp,
    qp_type: QpType,
    wrs: &[SendWr<'_>],
    env: &mut Env<'_>,
) -> Result<(), PostError> {
    let is_good = |wr: &SendWr<'_>| qp_type.has_operation(&wr.op) && names_srq(wr);
    let bad = wrs.iter().position(|wr| !is_good(wr));
    rc.post_send(&wrs[..bad.unwrap_or(wrs.len())], env)?;
    let Some(index) = bad else {
        return Ok(());
    };
    let reason = match qp_type.has_operation(&wrs[index].op) {
        false => PostReason::InvalidOpcode,
        true => PostReason::InvalidRequest("missing remote shared receive queue"),
    };
    Err(PostError { index, reason })
}

/// Returns whether a request specifies an SRQ, or doesn't need it because nothing is sent.
fn names_srq(wr: &SendWr<'_>) -> bool {
    let is_local = matches!(
        wr.op,
        SendOp::RegMr { .. } | SendOp::BindMw(_) | SendOp::LocalInv(_)
    );
    is_local || wr.remote_srqn.is_some_and(|srqn| srqn < 1 << 24)
}

/// Changes the state of an unreliable connection. See [`move_rc`].
fn move_uc(
    uc: &mut UcQp,
    from: QpState,
    to: QpState,
    attr: &QpAttr,
    merged: &QpAttr,
    env: &mut Env<'_>,
) {
    let access = merged.access.unwrap_or_default() & Access::REMOTE;
    match (from, to) {
        (_, QpState::Reset) => uc.to_reset(),
        (_, QpState::Error) => uc.to_error(env),
        (_, QpState::Init) => uc.to_init(),
        (_, QpState::Rtr) => uc.to_rtr(&UcRtrParams {
            path_mtu: attr.path_mtu.expect(REQUIRED),
            dest_qpn: Qpn::new(attr.dest_qp.expect(REQUIRED)),
            rq_psn: Psn::new(attr.rq_psn.expect(REQUIRED)),
            access,
        }),
        (QpState::Rtr, QpState::Rts) => uc.to_rts(Psn::new(attr.sq_psn.expect(REQUIRED))),
        (QpState::Rts, QpState::Sqd) => uc.to_sqd(env),
        (QpState::Sqd | QpState::Sqe, QpState::Rts) => uc.resume(),
        _ => {}
    }
    if matches!(to, QpState::Rts | QpState::Sqd) && attr.access.is_some() {
        uc.set_access(access);
    }
}

/// Changes the state of a stream connection. See [`move_rc`].
fn move_stream(stream: &mut RdmapQp, from: QpState, to: QpState, attr: &QpAttr, env: &mut Env<'_>) {
    match (from, to) {
        (_, QpState::Reset) => stream.to_reset(),
        (_, QpState::Error) => stream.to_error(env),
        (_, QpState::Init) => stream.to_init(),
        (QpState::Rts, QpState::Sqd) => stream.to_sqd(env),
        (QpState::Sqd, QpState::Rts) => stream.resume(),
        _ => {}
    }
    if let Some(access) = attr.access
        && matches!(to, QpState::Rts | QpState::Sqd)
    {
        stream.set_access(access & Access::REMOTE);
    }
}

/// Changes the state of a reliable connection. `merged` contains all attributes that are required
/// for this state.
fn move_rc(
    rc: &mut RcQp,
    from: QpState,
    to: QpState,
    attr: &QpAttr,
    merged: &QpAttr,
    env: &mut Env<'_>,
) {
    let access = merged.access.unwrap_or_default() & Access::REMOTE;
    // For RTR and RTS, the state is changed first since this includes the attributes. For any other
    // state, this is done afterwards.
    match (from, to) {
        (_, QpState::Reset) => rc.to_reset(),
        (_, QpState::Error) => rc.to_error(env),
        (_, QpState::Init) => rc.to_init(),
        (_, QpState::Rtr) => rc.to_rtr(&RtrParams {
            path_mtu: attr.path_mtu.expect(REQUIRED),
            dest_qpn: Qpn::new(attr.dest_qp.expect(REQUIRED)),
            rq_psn: Psn::new(attr.rq_psn.expect(REQUIRED)),
            // An XRC initiator does not receive requests.
            max_dest_rd_atomic: attr.max_dest_rd_atomic.unwrap_or(0),
            min_rnr_timer: RnrTimer::new(attr.min_rnr_timer.unwrap_or(0)),
            access,
        }),
        (QpState::Rtr, QpState::Rts) => rc.to_rts(&RtsParams {
            sq_psn: Psn::new(attr.sq_psn.expect(REQUIRED)),
            timeout: attr.timeout.expect(REQUIRED),
            // An XRC target doesn't send requests.
            retry_cnt: attr.retry_cnt.unwrap_or(0),
            rnr_retry: attr.rnr_retry.unwrap_or(0),
            max_rd_atomic: attr.max_rd_atomic.unwrap_or(0),
        }),
        (QpState::Rts, QpState::Sqd) => rc.to_sqd(env),
        (QpState::Sqd, QpState::Rts) => rc.resume(),
        _ => {}
    }
    if matches!(to, QpState::Rts | QpState::Sqd) {
        if attr.access.is_some() {
            rc.set_access(access);
        }
        if let Some(code) = attr.min_rnr_timer {
            rc.set_min_rnr_timer(RnrTimer::new(code));
        }
    }
    if (from, to) == (QpState::Sqd, QpState::Sqd) {
        rc.change_drained(&DrainedChange {
            timeout: attr.timeout,
            retry_cnt: attr.retry_cnt,
            rnr_retry: attr.rnr_retry,
            max_rd_atomic: attr.max_rd_atomic,
            max_dest_rd_atomic: attr.max_dest_rd_atomic,
        });
    }
}
