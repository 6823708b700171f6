//! IB CM events, and sending and receiving MADs.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use riser_state::become_state;

use super::connect::MRA_TIMEOUT;
use super::{Id, IdState, MAX_WAITING_MADS};
use crate::cm::{CmRoute, IbCmEvent, IbCmEventKind, IbCmId, QpPeer};
use crate::nic::batch::{ECN_MASK, TxBatch, TxPath};
use crate::nic::rx::Received;
use crate::nic::{Nic, Qp};
use crate::rc::TxPacket;
use crate::verbs::{
    CmError, CmEvent, CmEventKind, CmId, ConnParam, Ece, Mtu, QpAttr, QpId, QpState, QpType,
};
use crate::wire::cm_msg::{AdditionalInfo, CmTimeout, PrivateData, RejReason, RepMsg, ReqMsg};
use crate::wire::cma::{CmaError, CmaHeader};
use crate::wire::mad::{MAD_LEN, Mad};
use crate::wire::{
    Bth, Deth, ExtHeaders, GSI_QKEY, IcrcFlow, Opcode, Qpn, ROCE_PORT, emit_headers,
};

impl Nic {
    pub(super) fn report(&mut self, id: CmId, kind: CmEventKind) {
        self.cm.events.push_back(CmEvent { id, kind });
    }

    /// Handles a CM MAD now or in a later round. This will return `false` if it is dropped.
    pub(in crate::nic) fn handle_cm_mad(&mut self, received: &Received<'_>, mad: &Mad) -> bool {
        let from = received.src.ip();
        // Connections are only established using the first address. Other addresses are valid for
        // connections that have been migrated.
        if received.ip.gid_index != 0 && !self.cm.cm.knows(from, mad) {
            return false;
        }
        if self.cm.takes_now(from, mad) {
            self.take_mad(from, mad);
            return true;
        }
        // If the queue is full, drop the message like any datagram; peers will retransmit their
        // requests.
        let fits = self.cm.waiting.len() < MAX_WAITING_MADS;
        if fits {
            self.cm.waiting.push_back((from, *mad));
        }
        fits
    }

    fn take_mad(&mut self, from: IpAddr, mad: &Mad) {
        let now = self.now();
        if let Err(e) = self.cm.cm.handle_mad(now, from, mad) {
            tracing::debug!(%from, %e, "malformed CM message");
        }
        self.pump_cm();
    }

    /// Starts a new round and handles queued messages from strangers. This will return the number
    /// of messages handled.
    pub(crate) fn handle_waiting_mads(&mut self) -> usize {
        self.cm.begin_round();
        let mut taken = 0;
        while self.cm.turns > 0
            && let Some((from, mad)) = self.cm.waiting.pop_front()
        {
            self.cm.turns -= 1;
            self.take_mad(from, &mad);
            taken += 1;
        }
        taken
    }

    /// Sets whether there are more packets in the socket than we could receive.
    pub(crate) fn set_behind(&mut self, is_behind: bool) {
        self.cm.is_behind = is_behind;
    }

    /// Returns the next time when the CM needs to be called.
    pub(crate) fn cm_deadline(&self) -> Option<Instant> {
        // Queued messages should be handled immediately, in the next round.
        if !self.cm.waiting.is_empty() {
            return Some(self.now());
        }
        self.cm.cm.poll_timeout()
    }

    /// Returns whether there may be a MAD to send.
    pub(crate) fn has_mads(&self) -> bool {
        self.cm.may_send || self.agents.has_answers()
    }

    /// Handles CM timers. Returns the number of calls made.
    pub(crate) fn handle_cm_timeouts(&mut self) -> usize {
        let now = self.now();
        if self.cm.cm.poll_timeout().is_none_or(|at| at > now) {
            return 0;
        }
        self.cm.cm.handle_timeout(now);
        self.pump_cm();
        1
    }

    /// Returns the next MAD to send and its route.
    fn poll_outgoing(&mut self) -> Option<(CmRoute, Mad)> {
        if self.cm.may_send {
            let of_cm = self.cm.cm.poll_transmit();
            self.cm.may_send = of_cm.is_some();
            if let Some((peer, mad)) = of_cm {
                return Some((self.cm.cm.route(peer, &mad), mad));
            }
        }
        let (peer, mad) = self.agents.poll_answer()?;
        let route = CmRoute {
            peer,
            gid_index: 0,
            traffic_class: 0,
        };
        Some((route, mad))
    }

    /// Appends MADs from the CM and the agents to a batch until it contains `budget` bytes.
    pub(crate) fn transmit_mads(&mut self, batch: &mut TxBatch, budget: usize) {
        while self.has_mads() && self.collected(batch).1 < budget {
            let Some((route, mad)) = self.poll_outgoing() else {
                break;
            };
            let dst = SocketAddr::new(route.peer, ROCE_PORT);
            // A message to an unverified address can be blocked by neighbor resolution, so it must
            // use a separate socket.
            let is_own = self.keeps(dst, Qpn::GSI);
            let is_stranger = !is_own && route.gid_index == 0 && !self.cm.cm.is_proven(route.peer);
            let from = match is_stranger {
                true => self.stranger_addr(),
                false => self.local_addrs()[usize::from(route.gid_index)],
            };
            // We cannot send to an address of the other family.
            let Some(flow) = IcrcFlow::new(from, dst) else {
                continue;
            };
            let bth = Bth::new(Opcode::UdSendOnly, Qpn::GSI, self.cm.psn);
            self.cm.psn = self.cm.psn.next();
            let ext = ExtHeaders {
                deth: Some(Deth::new(GSI_QKEY, Qpn::GSI)),
                ..ExtHeaders::default()
            };
            let mut tx = TxPacket {
                headers: emit_headers(&bth, &ext),
                inline: mad.to_vec(),
                payload_len: MAD_LEN,
                ..TxPacket::default()
            };
            let way = TxPath {
                from: route.gid_index,
                tos: route.traffic_class & !ECN_MASK,
                is_to_stranger: is_stranger,
                ..TxPath::to(dst)
            };
            let flow = self.config().has_icrc().then_some(&flow);
            self.batch_for(is_own, batch)
                .push_packet(flow, &way, &mut tx);
        }
    }

    /// Called when a peer is known to be dead, and not just since it doesn't respond. All
    /// connections, QPs and requests of this peer are closed immediately.
    pub(crate) fn lose_peer(&mut self, now: Instant, peer: IpAddr) {
        self.set_now(now);
        self.cm.cm.lose_peer(now, peer);
        self.pump_cm();
        // This includes QPs which no longer have a connection id.
        let with_peer = |qp: &Qp| qp.peer.is_some_and(|it| it.addr.ip() == peer);
        let qps = self.qps.iter().filter(|(_, qp)| with_peer(qp));
        let qps: Vec<QpId> = qps.map(|(id, _)| id).collect();
        for qp in qps {
            self.fail_qp(qp);
        }
    }

    /// Closes all ids without sending messages when the device is removed.
    pub(crate) fn end_cm_ids(&mut self) {
        self.cm.waiting.clear();
        self.cm.may_send = false;
        // An id without an address is not assigned to a device.
        let ids = self.cm.ids.iter();
        let ids = ids.filter(|(_, entry)| entry.state != IdState::Idle);
        let ids: Vec<CmId> = ids.map(|(id, _)| id).collect();
        for id in ids {
            self.report(id, CmEventKind::DeviceRemoval);
        }
    }

    /// Called when the first packet of a connection is received, which may be before the RTU.
    pub(crate) fn on_first_packet(&mut self, qp: QpId) {
        if let Some(&id) = self.cm.by_qp.get(&qp) {
            // This has no effect unless the connection is waiting for an RTU.
            let _ = self.notify_established(id);
        }
    }

    /// Called when a QP has been migrated. Messages for the connection must use the new path.
    pub(crate) fn migrate_cm_qp(&mut self, qp: QpId, route: CmRoute) {
        let id = self.cm.by_qp.get(&qp);
        let entry = id.and_then(|id| self.cm.ids.get(*id).ok());
        if let Some(ib) = entry.and_then(|entry| entry.ib) {
            self.cm.cm.migrate(ib, route);
        }
    }

    /// Called when a QP is destroyed, to remove it from its id.
    pub(crate) fn forget_cm_qp(&mut self, qp: QpId) {
        if let Some(id) = self.cm.by_qp.remove(&qp)
            && let Ok(entry) = self.cm.ids.get_mut(id)
        {
            entry.qp = None;
        }
    }

    /// Moves the QP of an id to the ERROR state.
    pub(super) fn fail_cm_qp(&mut self, id: CmId) {
        let Some(qp) = self.cm.ids.get(id).ok().and_then(|e| e.qp) else {
            return;
        };
        let attr = QpAttr::to(QpState::Error);
        // This can't fail: the transition is valid in any state, and the QP exists while it is used
        // by an id.
        let _ = self.modify_qp(qp, &attr);
    }

    /// Handles IB CM events.
    pub(super) fn pump_cm(&mut self) {
        self.cm.may_send = true;
        while let Some(IbCmEvent { id: ib, kind }) = self.cm.cm.poll_event() {
            let is_last = kind.is_last();
            match kind {
                IbCmEventKind::ReqReceived {
                    listener,
                    peer,
                    qp,
                    req,
                } => self.on_req(ib, listener, peer, qp, &req),
                IbCmEventKind::SidrReqReceived {
                    listener,
                    peer,
                    req,
                } => self.on_sidr_req(ib, listener, peer, &req),
                kind => {
                    if let Some(&id) = self.cm.by_ib.get(&ib) {
                        self.on_ib_event(id, ib, kind);
                    }
                }
            }
            // After the last event, the IB CM can reuse the id for a new connection.
            if is_last
                && let Some(id) = self.cm.by_ib.remove(&ib)
                && let Ok(entry) = self.cm.ids.get_mut(id)
            {
                entry.ib = None;
            }
        }
    }

    fn on_req(&mut self, ib: IbCmId, listener: IbCmId, peer: IpAddr, qp: QpPeer, req: &ReqMsg) {
        let refusal = match self.take_request(ib, listener, peer, qp, req) {
            Ok(()) => return,
            Err(reason) => reason,
        };
        let now = self.now();
        // If we reject a path MTU, we need to include the supported value.
        let info = match refusal {
            RejReason::InvalidMtu => AdditionalInfo::new(&[self.config().mtu.code()]),
            _ => AdditionalInfo::new(&[]),
        }
        .unwrap_or_default();
        let data = PrivateData::default();
        // We don't need to send a REJ if the request has been removed since.
        let _ = self.cm.cm.send_rej(now, ib, refusal, info, data);
    }

    fn take_request(
        &mut self,
        ib: IbCmId,
        listener: IbCmId,
        peer: IpAddr,
        qp: QpPeer,
        req: &ReqMsg,
    ) -> Result<(), RejReason> {
        let listener_id = *self
            .cm
            .by_ib
            .get(&listener)
            .ok_or(RejReason::InvalidServiceId)?;
        let rq_psn = self.new_psn();
        let entry = self
            .cm
            .ids
            .get(listener_id)
            .map_err(|_| RejReason::InvalidServiceId)?;
        if entry.qp_type == QpType::Ud {
            return Err(RejReason::InvalidServiceId);
        }
        // All connections of a listener must use the same type.
        if entry.qp_type != qp.qp_type {
            return Err(RejReason::InvalidTransportType);
        }
        // If the path MTU were larger than our interface MTU, all large packets would be lost.
        if qp.path_mtu > self.config().mtu {
            return Err(RejReason::InvalidMtu);
        }
        let (port, data) = split_request(entry.has_header(), &req.private_data.0)
            .map_err(|_| RejReason::Unsupported)?;
        let peer = SocketAddr::new(peer, port);
        let ece = Ece {
            vendor_id: req.vendor_id.value(),
            options: req.vendor_options,
        };
        let new = Id {
            state: IdState::Requested,
            local: Some(
                entry
                    .local
                    .unwrap_or(SocketAddr::new(self.local_addr().ip(), 0)),
            ),
            peer: Some(peer),
            ib: Some(ib),
            said: Some(Box::new(qp)),
            options: entry.options.of_request(),
            alternate: self.offered_path(&req.alternate),
            ..Id::new(entry.space, entry.qp_type, rq_psn)
        };
        let kind = CmEventKind::ConnectRequest {
            listener: listener_id,
            peer,
            param: param_of(&qp, ece, data.to_vec()),
        };
        let id = self
            .cm
            .ids
            .insert(new)
            // An event requires an id. If no id is free, reject the request; the peer can retry
            // later.
            .map_err(|_| RejReason::NoResources)?;
        self.cm.by_ib.insert(ib, id);
        self.report(id, kind);
        Ok(())
    }

    fn on_ib_event(&mut self, id: CmId, ib: IbCmId, kind: IbCmEventKind) {
        let now = self.now();
        match kind {
            IbCmEventKind::RepReceived { qp, rep } => {
                self.judge_answered_path(id, rep.failover);
                self.on_rep(id, ib, &qp, &rep);
            }
            IbCmEventKind::RtuReceived { .. } => self.on_established(id, ConnParam::default()),
            IbCmEventKind::SidrRepReceived { rep } => self.on_sidr_rep(id, &rep),
            IbCmEventKind::ReqTimeout
            | IbCmEventKind::RepTimeout
            | IbCmEventKind::SidrReqTimeout => {
                self.on_closed(id, CmEventKind::Unreachable);
            }
            IbCmEventKind::RejReceived {
                reason: RejReason::InvalidMtu,
                info,
                ..
            } if self.retry_with_mtu(id, ib, &info) => {}
            IbCmEventKind::RejReceived {
                reason,
                private_data,
                ..
            } => {
                // If all our RTUs and data packets are lost, the peer will time out and send a REJ
                // when the connection is already established on our side. In this case, we need to
                // report a closed connection instead of a rejected one.
                let was_up = self.cm.ids.get(id).is_ok_and(|e| {
                    matches!(e.state, IdState::Established | IdState::Disconnecting)
                });
                let kind = if was_up {
                    CmEventKind::Disconnected
                } else {
                    CmEventKind::Rejected {
                        reason: reason.into(),
                        private_data: private_data.0.to_vec(),
                    }
                };
                self.on_closed(id, kind);
            }
            IbCmEventKind::DreqReceived { .. } => {
                // Send this first. It is valid in the current state.
                let _ = self.cm.cm.send_drep(now, ib, PrivateData::default());
                self.on_closed(id, CmEventKind::Disconnected);
            }
            IbCmEventKind::DrepReceived { .. }
            | IbCmEventKind::DreqTimeout
            | IbCmEventKind::StaleConnection => self.on_closed(id, CmEventKind::Disconnected),
            // If the connection was never established, the application has already received a
            // reject or timeout event.
            IbCmEventKind::TimewaitExit if self.cm.ids.get(id).is_ok_and(|e| e.was_established) => {
                self.report(id, CmEventKind::TimewaitExit);
            }
            IbCmEventKind::LapReceived { lap } => self.on_lap(id, ib, &lap),
            IbCmEventKind::AprReceived { status, .. } => self.on_apr(id, status),
            IbCmEventKind::LapTimeout => self.on_no_path(id, None),
            // Timeouts requested by the peer are handled by the IB CM.
            _ => {}
        }
    }

    /// Sends a new request with a path MTU supported by the peer. This will return `false` if this
    /// is not possible.
    fn retry_with_mtu(&mut self, id: CmId, ib: IbCmId, info: &AdditionalInfo) -> bool {
        let takes = info.first().and_then(|&code| Mtu::from_code(code));
        let Some(mtu) = takes.filter(|&m| m < self.config().mtu) else {
            return false;
        };
        let Ok(entry) = self.cm.ids.get_mut(id) else {
            return false;
        };
        // Only retry once, because a peer could reject every path MTU.
        if entry.state != IdState::Connecting || entry.ib != Some(ib) || entry.retried {
            return false;
        }
        entry.retried = true;
        let Some(param) = entry.param.clone() else {
            return false;
        };
        // The id was closed by the REJ, even if we cannot send another request: the IB CM can reuse
        // it for a new connection.
        entry.ib = None;
        self.cm.by_ib.remove(&ib);
        self.send_request(id, &param, mtu).is_ok()
    }

    fn on_rep(&mut self, id: CmId, ib: IbCmId, qp: &QpPeer, rep: &RepMsg) {
        let now = self.now();
        let Ok(entry) = self.cm.ids.get_mut(id) else {
            return;
        };
        entry.said = Some(Box::new(*qp));
        let ece = Ece {
            vendor_id: rep.vendor_id.value(),
            options: rep.vendor_options,
        };
        let param = param_of(qp, ece, rep.private_data.0.to_vec());
        if entry.external.is_some() {
            become_state(&mut entry.state, IdState::Responded);
            // Make the peer wait, so that the owner of the QP has enough time. This is valid in the
            // new state.
            let time = CmTimeout::new(MRA_TIMEOUT);
            let _ = self.cm.cm.send_mra(ib, time, PrivateData::default());
            return self.report(id, CmEventKind::ConnectResponse { param });
        }
        // The QP must be ready before we send the RTU, since the peer can send data after that.
        let outcome = match entry.qp {
            Some(q) => self.connect_qp(id, q),
            None => Err(CmError::InvalidState("connect")),
        };
        match outcome {
            Ok(()) => {
                // This is valid in the new state.
                let _ = self.cm.cm.send_rtu(ib, PrivateData::default());
                self.on_established(id, param);
            }
            // The peer keeps a QP until its REP times out, but a REJ will release it immediately.
            Err(e) => {
                let (info, none) = (AdditionalInfo::default(), PrivateData::default());
                // This is valid in the new state.
                let _ = self
                    .cm
                    .cm
                    .send_rej(now, ib, RejReason::NoResources, info, none);
                self.on_closed(id, CmEventKind::ConnectError(e));
            }
        }
    }

    pub(super) fn on_established(&mut self, id: CmId, param: ConnParam) {
        // Only the first one counts if we receive both the RTU and a data packet.
        if let Ok(entry) = self.cm.ids.get_mut(id)
            && matches!(entry.state, IdState::Connecting | IdState::Accepting)
        {
            become_state(&mut entry.state, IdState::Established);
            entry.was_established = true;
            let alternate = entry.alternate;
            self.report(id, CmEventKind::Established { param });
            if let Some(path) = alternate {
                self.report(id, CmEventKind::AlternatePath { path });
            }
        }
    }

    /// Closes a connection: the QP is moved to the ERROR state and the application is notified
    /// once.
    pub(super) fn on_closed(&mut self, id: CmId, kind: CmEventKind) {
        let Ok(entry) = self.cm.ids.get_mut(id) else {
            return;
        };
        if entry.state == IdState::Closed {
            return;
        }
        become_state(&mut entry.state, IdState::Closed);
        // A datagram QP can also be used with other peers.
        if entry.qp_type != QpType::Ud {
            self.fail_cm_qp(id);
        }
        self.report(id, kind);
    }
}

/// Splits the private data of a request into the peer's port from the address header, and the
/// application data. We ignore the addresses in this header, and use the source address of the
/// packet instead.
pub(super) fn split_request(has_header: bool, data: &[u8]) -> Result<(u16, &[u8]), CmaError> {
    if !has_header {
        return Ok((0, data));
    }
    let (header, rest) = CmaHeader::parse(data)?;
    Ok((header.src_port, rest))
}

/// Returns the parameters received from a peer from our perspective.
fn param_of(qp: &QpPeer, ece: Ece, private_data: Vec<u8>) -> ConnParam {
    ConnParam {
        private_data,
        responder_resources: qp.initiator_depth,
        initiator_depth: qp.responder_resources,
        flow_control: qp.flow_control,
        retry_count: qp.retry_count.value() as u8,
        rnr_retry_count: qp.rnr_retry_count.value() as u8,
        srq: qp.srq,
        qp_num: qp.dest_qpn.value(),
        ece,
        qkey: None,
        ah: None,
    }
}
