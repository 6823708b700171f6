//! Creating, modifying and destroying queue pairs, and posting work requests.

use std::net::IpAddr;

use super::Device;
use crate::nic::batch::ECN_MASK;
use crate::nic::config::add_rc;
use crate::nic::cq::Cq;
use crate::nic::qp::{Machine, Peer, Qp, check_sqd, merge, post_xrc};
use crate::nic::rate::{Limiter, MAX_RATE, MIN_RATE};
use crate::nic::ud::UdQp;
use crate::nic::{QpCounters, Wire, with_env};
use crate::rc::{Env, RcQp, RecvQueue};
use crate::verbs::qp_state::plan_modify;
use crate::verbs::{
    AhAttr, PKey, PathMigState, PostError, PostReason, QpAttr, QpCap, QpId, QpInitAttr, QpState,
    QpType, RateLimit, RecvWr, SendWr, VerbsError,
};
use crate::wire::{IcrcFlow, Qpn, ROCE_PORT};

fn refuse(reason: PostReason) -> PostError {
    PostError { index: 0, reason }
}

#[allow(
    missing_docs,
    reason = "the calls of the verbs traits, documented there"
)]
impl Device {
    pub fn create_qp(&mut self, init: &QpInitAttr) -> Result<QpId, VerbsError> {
        self.config.limits.check_cap(&init.cap, init.qp_type)?;
        self.check_objects(init)?;
        // When using a shared queue, the QP doesn't have its own receives, but the entries have the
        // size of the shared queue.
        let mut cap = init.cap;
        if let Some(srq) = init.srq {
            if !matches!(init.qp_type, QpType::Rc | QpType::Uc) {
                return Err(VerbsError::WrongQpType("shared receive queue"));
            }
            cap.max_recv_sge = self.srqs.attr_for_qp(srq)?.max_sge;
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
        let qpn = self.qps.allocate_number(init.qp_type, &mut self.random)?;
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
        let ids = (id, qpn);
        let machine = Machine::new(&self.config, ids, init, cap, &mut self.random);
        self.qps.get_mut(id)?.machine = machine;
        if let Some(xrcd) = init.xrcd {
            self.srqs.hold_xrcd(xrcd)?;
        } else {
            self.memory.hold_pd(init.pd)?;
            self.cqs.add_user(init.send_cq)?;
            self.cqs.add_user(init.recv_cq)?;
        }
        if let Some(srq) = init.srq {
            self.srqs.add_user(srq)?;
        }
        self.qps.publish(id, init.qp_type, qpn);
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
            (QpType::XrcTgt, Some(xrcd)) => return self.srqs.check_xrcd(xrcd),
            (QpType::XrcTgt, None) => {
                return Err(VerbsError::InvalidParameter("XRC target without a domain"));
            }
            (_, Some(_)) => return Err(VerbsError::WrongQpType("XRC domain")),
            _ => {}
        }
        if init.qp_type != QpType::Rc {
            self.config.check_packets("queue pairs of this type")?;
        }
        self.memory.check_pd(init.pd)?;
        self.cqs.check(init.send_cq)?;
        self.cqs.check(init.recv_cq)
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

    pub fn qp_num(&self, qp: QpId) -> Result<u32, VerbsError> {
        Ok(self.qps.get(qp)?.qpn)
    }

    /// Iterates over the ids of all QPs.
    pub fn qps(&self) -> impl Iterator<Item = QpId> {
        self.qps.iter().map(|(id, _)| id)
    }

    /// Returns the counters of a QP.
    pub fn qp_counters(&self, qp: QpId) -> Result<QpCounters, VerbsError> {
        Ok(self.qps.get(qp)?.counters())
    }

    pub fn query_qp(&self, qp: QpId) -> Result<QpAttr, VerbsError> {
        let qp = self.qps.get(qp)?;
        let (alt_path, path_mig_state) = qp.migration_attr();
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
        self.config.check_attr(attr)?;
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
            self.keep_last_responses(id);
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
                self.cqs.forget_qp(cq, id);
            }
        }
        Ok(())
    }

    /// Returns the path for an address vector, if the number of QPs with this peer is not exceeded.
    pub(in crate::nic) fn plan_way(
        &mut self,
        id: QpId,
        ah: &AhAttr,
        attr: &QpAttr,
    ) -> Result<Peer, VerbsError> {
        // If the QP is already connected to this peer, don't count it twice. The limit prevents a
        // single host from using all QPs of the device.
        let ip = self.port.reachable(ah)?;
        let has = self.peers.qps(ip).len() as u32;
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
        let flow = IcrcFlow::new(self.port.addrs()[usize::from(from)], addr)
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
    pub(in crate::nic) fn change_peer(&mut self, id: QpId, peer: Peer) {
        // Remove the old address before adding the new one, since they can be the same.
        self.leave_peer(id);
        self.peers.add(peer.addr.ip(), id);
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
        self.peers.remove(ip, id);
        self.share_window(ip);
    }

    /// Divides the in-flight bytes for a peer between the QPs, after a QP was added or removed.
    fn share_window(&mut self, ip: IpAddr) {
        let qps = self.peers.qps(ip);
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
        let merged = qp.attr;
        let has_srq = qp.srq.is_some();
        with_env!(self, qp, env);
        let states = (from, to);
        qp.machine.apply(states, attr, &merged, has_srq, &mut env);
        Ok(())
    }

    pub fn destroy_qp(&mut self, id: QpId) -> Result<(), VerbsError> {
        self.qps.get(id)?;
        // This needs the QP and its peer.
        self.keep_last_responses(id);
        self.groups.detach_all(id);
        self.leave_peer(id);
        let qp = self.qps.remove(id)?;
        self.memory.unbind_all(id);
        if let Machine::Rc(rc) | Machine::Xrc(rc) = &qp.machine {
            add_rc(&mut self.past, rc.counters());
        }
        if matches!(qp.machine, Machine::Stream(_)) {
            // This tells the owner to close the stream.
            self.schedule.push(id);
        }
        if let Some(xrcd) = qp.xrcd {
            self.srqs.release_xrcd(xrcd);
        } else {
            self.cqs.remove_user(qp.send_cq);
            self.cqs.remove_user(qp.recv_cq);
            if let Some(srq) = qp.srq {
                self.srqs.remove_user(srq);
            }
            self.memory.release_pd(qp.pd);
        }
        self.events.forget_qp(id);
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
                    let way = wr.ud.and_then(|u| ahs.path(u.ah, pd));
                    let way = way.ok_or(PostReason::InvalidKey);
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
        if let Ok(qp) = self.qps.get_mut(id) {
            qp.machine.unpost_send(count);
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

    /// Reports the first packet received from the peer to the connection manager.
    pub(in crate::nic) fn await_first_packet(&mut self, id: QpId) {
        if let Ok(qp) = self.qps.get_mut(id) {
            qp.awaits_first_packet = true;
        }
    }

    pub fn modify_qp_rate_limit(&mut self, id: QpId, limit: RateLimit) -> Result<(), VerbsError> {
        let now = self.clock.now();
        self.config.check_packets("rate limits")?;
        let qp = self.qps.get_mut(id)?;
        if qp.qp_type == QpType::Gsi {
            return Err(VerbsError::WrongQpType("rate limit"));
        }
        if matches!(qp.state(), QpState::Reset | QpState::Error) {
            return Err(VerbsError::InvalidState("rate limit"));
        }
        if limit.rate_kbps != 0 && !(MIN_RATE..=MAX_RATE).contains(&limit.rate_kbps) {
            return Err(VerbsError::InvalidParameter("rate limit"));
        }
        let is_limited = limit.rate_kbps != 0;
        qp.limiter = is_limited.then(|| Box::new(Limiter::new(limit, now)));
        // Packets may have been waiting for the previous limit.
        self.schedule_qp(id);
        Ok(())
    }

    pub fn query_qp_rate_limit(&self, id: QpId) -> Result<RateLimit, VerbsError> {
        let limiter = self.qps.get(id)?.limiter.as_ref();
        Ok(limiter.map_or_else(RateLimit::default, |limiter| limiter.limit))
    }
}
