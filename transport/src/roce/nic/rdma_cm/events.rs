//! Events of the IB CM, and MADs in and out.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use riser_state::become_state;

use super::connect::MRA_TIMEOUT;
use super::{Id, IdState, MAX_WAITING_MADS};
use crate::cm::{CmRoute, IbCmEvent, IbCmEventKind, IbCmId, QpPeer};
use crate::rc::TxPacket;
use crate::roce::batch::{ECN_MASK, TxBatch, Way};
use crate::roce::nic::rx::Received;
use crate::roce::nic::{Nic, Qp};
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

    /// Takes in a CM MAD, now or in a later round; false if it is lost.
    pub(in crate::roce::nic) fn handle_cm_mad(
        &mut self,
        received: &Received<'_>,
        mad: &Mad,
    ) -> bool {
        let from = received.src.ip();
        // Connections are made at the first address. What comes by another is about one that has
        // migrated there.
        if received.ip.gid_index != 0 && !self.cm.cm.knows(from, mad) {
            return false;
        }
        if self.cm.takes_now(from, mad) {
            self.take_mad(from, mad);
            return true;
        }
        // What does not fit is lost like any datagram; peers repeat their requests.
        let fits = self.cm.waiting.len() < MAX_WAITING_MADS;
        if fits {
            self.cm.waiting.push_back((from, *mad));
        }
        fits
    }

    fn take_mad(&mut self, from: IpAddr, mad: &Mad) {
        let now = self.now();
        if let Err(e) = self.cm.cm.handle_mad(now, from, mad) {
            tracing::debug!(%from, %e, "a CM message that is none");
        }
        self.pump_cm();
    }

    /// Begins another round for the messages of strangers, with those that wait; answers how many
    /// those were.
    pub(in crate::roce) fn handle_waiting_mads(&mut self) -> usize {
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

    /// Notes whether packets stayed behind in the socket when it was read.
    pub(in crate::roce) fn set_behind(&mut self, is_behind: bool) {
        self.cm.is_behind = is_behind;
    }

    /// Next time at which the CM has something to do.
    pub(in crate::roce) fn cm_deadline(&self) -> Option<Instant> {
        // Waiting messages are due at once, in the next round.
        if !self.cm.waiting.is_empty() {
            return Some(self.now());
        }
        self.cm.cm.poll_timeout()
    }

    /// Returns whether a MAD may wait to be sent.
    pub(in crate::roce) fn has_mads(&self) -> bool {
        self.cm.may_send || self.agents.has_answers()
    }

    /// Fires the CM's timers; answers how many calls that took.
    pub(in crate::roce) fn handle_cm_timeouts(&mut self) -> usize {
        let now = self.now();
        if self.cm.cm.poll_timeout().is_none_or(|at| at > now) {
            return 0;
        }
        self.cm.cm.handle_timeout(now);
        self.pump_cm();
        1
    }

    /// The next MAD to send, and its way.
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

    /// Appends MADs of the CM and of the agents to a batch, until it has `budget` bytes.
    pub(in crate::roce) fn transmit_mads(&mut self, batch: &mut TxBatch, budget: usize) {
        while self.has_mads() && self.collected(batch).1 < budget {
            let Some((route, mad)) = self.poll_outgoing() else {
                break;
            };
            let dst = SocketAddr::new(route.peer, ROCE_PORT);
            // A message to an address that has not answered yet may wait for its neighbour, so it
            // goes by a socket of its own.
            let is_own = self.keeps(dst, Qpn::GSI);
            let is_stranger = !is_own && route.gid_index == 0 && !self.cm.cm.is_proven(route.peer);
            let from = match is_stranger {
                true => self.stranger_addr(),
                false => self.local_addrs()[usize::from(route.gid_index)],
            };
            // An address of the other family cannot be answered at all.
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
            let way = Way {
                from: route.gid_index,
                tos: route.traffic_class & !ECN_MASK,
                is_to_stranger: is_stranger,
                ..Way::to(dst)
            };
            let flow = self.config().has_icrc().then_some(&flow);
            self.batch_for(is_own, batch)
                .push_packet(flow, &way, &mut tx);
        }
    }

    /// A peer is gone, as is known from elsewhere than its silence. Ends everything with it at
    /// once: its connections and queue pairs, and requests of either side.
    pub(crate) fn lose_peer(&mut self, now: Instant, peer: IpAddr) {
        self.set_now(now);
        self.cm.cm.lose_peer(now, peer);
        self.pump_cm();
        // Those too that no identifier of the connection manager names any longer.
        let with_peer = |qp: &Qp| qp.peer.is_some_and(|it| it.addr.ip() == peer);
        let qps = self.qps.iter().filter(|(_, qp)| with_peer(qp));
        let qps: Vec<QpId> = qps.map(|(id, _)| id).collect();
        for qp in qps {
            self.fail_qp(qp);
        }
    }

    /// The device is removed: everything of the connection manager ends, without a message.
    pub(in crate::roce) fn end_cm_ids(&mut self) {
        self.cm.waiting.clear();
        self.cm.may_send = false;
        // Without an address an identifier is of no device.
        let ids = self.cm.ids.iter();
        let ids = ids.filter(|(_, entry)| entry.state != IdState::Idle);
        let ids: Vec<CmId> = ids.map(|(id, _)| id).collect();
        for id in ids {
            self.report(id, CmEventKind::DeviceRemoval);
        }
    }

    /// The first packet of a connection has arrived; its RTU may not have.
    pub(in crate::roce) fn on_first_packet(&mut self, qp: QpId) {
        if let Some(&id) = self.cm.by_qp.get(&qp) {
            // Only a connection that waits for its RTU has something to learn.
            let _ = self.notify_established(id);
        }
    }

    /// A queue pair has migrated; the messages of its connection take its path.
    pub(in crate::roce) fn migrate_cm_qp(&mut self, qp: QpId, route: CmRoute) {
        let id = self.cm.by_qp.get(&qp);
        let entry = id.and_then(|id| self.cm.ids.get(*id).ok());
        if let Some(ib) = entry.and_then(|entry| entry.ib) {
            self.cm.cm.migrate(ib, route);
        }
    }

    /// A queue pair is being destroyed; its identifier forgets it.
    pub(in crate::roce) fn forget_cm_qp(&mut self, qp: QpId) {
        if let Some(id) = self.cm.by_qp.remove(&qp)
            && let Ok(entry) = self.cm.ids.get_mut(id)
        {
            entry.qp = None;
        }
    }

    /// Takes an identifier's queue pair to ERROR, if it has one.
    pub(super) fn fail_cm_qp(&mut self, id: CmId) {
        let Some(qp) = self.cm.ids.get(id).ok().and_then(|e| e.qp) else {
            return;
        };
        let attr = QpAttr::to(QpState::Error);
        // Every state may go to ERROR, and the queue pair exists as long as the identifier names
        // it.
        let _ = self.modify_qp(qp, &attr);
    }

    /// Handles the events of the IB CM.
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
            // After its last event the IB CM may give the id to another connection.
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
        // Who refuses a path MTU says which one it takes.
        let info = match refusal {
            RejReason::InvalidMtu => AdditionalInfo::new(&[self.config().mtu.code()]),
            _ => AdditionalInfo::new(&[]),
        }
        .unwrap_or_default();
        let data = PrivateData::default();
        // A request that has ended meanwhile needs no refusal.
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
        // A listener has connections of one kind.
        if entry.qp_type != qp.qp_type {
            return Err(RejReason::InvalidTransportType);
        }
        // A path MTU above what our interface carries would lose every long packet.
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
            // No event without an identifier: the request is refused, and the peer may come
            // again.
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
                // A peer that gives up after we consider the connection established, since it
                // never had our RTU or our first packets, refuses late. To the user that
                // connection is over, not refused.
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
                // Answered before anything else: the state just checked allows it.
                let _ = self.cm.cm.send_drep(now, ib, PrivateData::default());
                self.on_closed(id, CmEventKind::Disconnected);
            }
            IbCmEventKind::DrepReceived { .. }
            | IbCmEventKind::DreqTimeout
            | IbCmEventKind::StaleConnection => self.on_closed(id, CmEventKind::Disconnected),
            // What was never a connection has ended by its refusal or time-out.
            IbCmEventKind::TimewaitExit if self.cm.ids.get(id).is_ok_and(|e| e.was_established) => {
                self.report(id, CmEventKind::TimewaitExit);
            }
            IbCmEventKind::LapReceived { lap } => self.on_lap(id, ib, &lap),
            IbCmEventKind::AprReceived { status, .. } => self.on_apr(id, status),
            IbCmEventKind::LapTimeout => self.on_no_path(id, None),
            // Time that the peer asks for is the IB CM's business.
            _ => {}
        }
    }

    /// Asks again with the path MTU that the peer takes; false if there is nothing to ask for.
    fn retry_with_mtu(&mut self, id: CmId, ib: IbCmId, info: &AdditionalInfo) -> bool {
        let takes = info.first().and_then(|&code| Mtu::from_code(code));
        let Some(mtu) = takes.filter(|&m| m < self.config().mtu) else {
            return false;
        };
        let Ok(entry) = self.cm.ids.get_mut(id) else {
            return false;
        };
        // Once: a peer that refuses every path MTU must not keep us asking.
        if entry.state != IdState::Connecting || entry.ib != Some(ib) || entry.retried {
            return false;
        }
        entry.retried = true;
        let Some(param) = entry.param.clone() else {
            return false;
        };
        // The refused id has ended with the REJ, whether another request leaves or not: the IB CM
        // may give it to another connection.
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
            // The queue pair's owner has time for its part: the peer waits on. The state just
            // reached allows it.
            let time = CmTimeout::new(MRA_TIMEOUT);
            let _ = self.cm.cm.send_mra(ib, time, PrivateData::default());
            return self.report(id, CmEventKind::ConnectResponse { param });
        }
        // The queue pair is ready before the RTU leaves: with it the peer may send.
        let outcome = match entry.qp {
            Some(q) => self.connect_qp(id, q),
            None => Err(CmError::InvalidState("connect")),
        };
        match outcome {
            Ok(()) => {
                // The state just reached allows it.
                let _ = self.cm.cm.send_rtu(ib, PrivateData::default());
                self.on_established(id, param);
            }
            // The peer holds a queue pair for us until its REP times out; a REJ frees it now.
            Err(e) => {
                let (info, none) = (AdditionalInfo::default(), PrivateData::default());
                // As above.
                let _ = self
                    .cm
                    .cm
                    .send_rej(now, ib, RejReason::NoResources, info, none);
                self.on_closed(id, CmEventKind::ConnectError(e));
            }
        }
    }

    pub(super) fn on_established(&mut self, id: CmId, param: ConnParam) {
        // RTU and first packet may both arrive: the first of them counts.
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

    /// A connection is over: its queue pair fails and its user is notified, once.
    pub(super) fn on_closed(&mut self, id: CmId, kind: CmEventKind) {
        let Ok(entry) = self.cm.ids.get_mut(id) else {
            return;
        };
        if entry.state == IdState::Closed {
            return;
        }
        become_state(&mut entry.state, IdState::Closed);
        // A datagram queue pair serves others beside the one that was asked for.
        if entry.qp_type != QpType::Ud {
            self.fail_cm_qp(id);
        }
        self.report(id, kind);
    }
}

/// The peer's port, and the user's part of a request's private data. The address header names the
/// port; its addresses are not believed, since the packet has the sender's.
pub(super) fn split_request(has_header: bool, data: &[u8]) -> Result<(u16, &[u8]), CmaError> {
    if !has_header {
        return Ok((0, data));
    }
    let (header, rest) = CmaHeader::parse(data)?;
    Ok((header.src_port, rest))
}

/// Parameters of a peer's message, from our point of view.
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
