//! IB CM events, and sending and receiving MADs.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use riser_state::become_state;

use super::connect::MRA_TIMEOUT;
use super::paths::offered_path;
use super::qp_attr::new_psn;
use super::{CmAgent, Id, IdState};
use crate::cm::{CmRoute, IbCmEvent, IbCmEventKind, IbCmId, QpPeer};
use crate::nic::Device;
use crate::nic::received::Received;
use crate::verbs::{
    CmError, CmEvent, CmEventKind, CmId, ConnParam, Ece, QpAttr, QpId, QpState, QpType,
};
use crate::wire::Psn;
use crate::wire::cm_msg::{AdditionalInfo, CmTimeout, PrivateData, RejReason, RepMsg, ReqMsg};
use crate::wire::cma::{CmaError, CmaHeader};
use crate::wire::mad::Mad;

impl CmAgent {
    pub(super) fn report(&mut self, id: CmId, kind: CmEventKind) {
        self.events.push_back(CmEvent { id, kind });
    }

    /// Handles a CM MAD now or in a later round. This will return `false` if it is dropped.
    pub(in crate::nic) fn handle_mad(
        &mut self,
        device: &mut Device,
        received: &Received<'_>,
        mad: &Mad,
    ) -> bool {
        let from = received.src.ip();
        // The sender has received one of our messages for this connection, so this can't be a flood
        // with spoofed addresses.
        let is_known = self.cm.knows(from, mad);
        // Connections are only established using the first address. Other addresses are valid for
        // connections that have been migrated.
        if received.ip.gid_index != 0 && !is_known {
            return false;
        }
        if is_known || self.backlog.admits() {
            self.process_mad(device, from, mad);
            return true;
        }
        // If the queue is full, drop the message like any datagram; peers will retransmit their
        // requests.
        self.backlog.push(from, mad)
    }

    fn process_mad(&mut self, device: &mut Device, from: IpAddr, mad: &Mad) {
        if let Err(e) = self.cm.handle_mad(device.now(), from, mad) {
            tracing::debug!(%from, %e, "malformed CM message");
        }
        self.pump_cm(device);
    }

    /// Sets whether there are more packets in the socket than we could receive.
    pub(crate) fn set_behind(&mut self, is_behind: bool) {
        self.backlog.set_behind(is_behind);
    }

    /// Returns the next time when the CM needs to be called.
    pub(in crate::nic) fn deadline(&self, now: Instant) -> Option<Instant> {
        // Queued messages should be handled immediately, in the next round.
        if !self.backlog.is_empty() {
            return Some(now);
        }
        self.cm.poll_timeout()
    }

    /// Starts a new round, handles queued messages from strangers and CM timers. This will return
    /// the number of messages handled and calls made.
    pub(in crate::nic) fn handle_timeouts(&mut self, device: &mut Device) -> usize {
        self.backlog.begin_round();
        let mut handled = 0;
        while let Some((from, mad)) = self.backlog.pop() {
            self.process_mad(device, from, &mad);
            handled += 1;
        }
        let now = device.now();
        if self.cm.poll_timeout().is_none_or(|at| at > now) {
            return handled;
        }
        self.cm.handle_timeout(now);
        self.pump_cm(device);
        handled + 1
    }

    /// Returns whether there may be a MAD to send.
    pub(in crate::nic) fn may_send(&self) -> bool {
        self.may_send
    }

    /// Returns the next MAD to send and its route.
    pub(in crate::nic) fn poll_transmit(&mut self) -> Option<(CmRoute, Mad)> {
        if !self.may_send {
            return None;
        }
        let next = self.cm.poll_transmit();
        self.may_send = next.is_some();
        next.map(|(peer, mad)| (self.cm.route(peer, &mad), mad))
    }

    /// Returns the PSN of the next MAD.
    pub(in crate::nic) fn next_psn(&mut self) -> Psn {
        let psn = self.psn;
        self.psn = psn.next();
        psn
    }

    /// Closes all connections and requests of a peer that is known to be dead.
    pub(in crate::nic) fn lose_peer(&mut self, device: &mut Device, peer: IpAddr) {
        self.cm.lose_peer(device.now(), peer);
        self.pump_cm(device);
    }

    /// Closes all ids without sending messages when the device is removed.
    pub(in crate::nic) fn end_ids(&mut self) {
        self.backlog.clear();
        self.may_send = false;
        // An id without an address is not assigned to a device.
        let ids = self.ids.iter();
        let ids = ids.filter(|(_, entry)| entry.state != IdState::Idle);
        let ids: Vec<CmId> = ids.map(|(id, _)| id).collect();
        for id in ids {
            self.report(id, CmEventKind::DeviceRemoval);
        }
    }

    /// Called when the first packet of a connection is received, which may be before the RTU.
    pub(crate) fn on_first_packet(&mut self, device: &mut Device, qp: QpId) {
        if let Some(&id) = self.by_qp.get(&qp) {
            // This has no effect unless the connection is waiting for an RTU.
            let _ = self.notify_established(device, id);
        }
    }

    /// Called when a QP has been migrated. Messages for the connection must use the new path.
    pub(crate) fn migrate_qp(&mut self, qp: QpId, route: CmRoute) {
        let id = self.by_qp.get(&qp);
        let entry = id.and_then(|id| self.ids.get(*id).ok());
        if let Some(ib) = entry.and_then(|entry| entry.ib) {
            self.cm.migrate(ib, route);
        }
    }

    /// Called when a QP is destroyed, to remove it from its id.
    pub(crate) fn forget_qp(&mut self, qp: QpId) {
        if let Some(id) = self.by_qp.remove(&qp)
            && let Ok(entry) = self.ids.get_mut(id)
        {
            entry.qp = None;
        }
    }

    /// Moves the QP of an id to the ERROR state.
    pub(super) fn fail_cm_qp(&mut self, device: &mut Device, id: CmId) {
        let Some(qp) = self.ids.get(id).ok().and_then(|e| e.qp) else {
            return;
        };
        let attr = QpAttr::to(QpState::Error);
        // This can't fail: the transition is valid in any state, and the QP exists while it is used
        // by an id.
        let _ = device.modify_qp(qp, &attr);
    }

    /// Handles IB CM events.
    pub(super) fn pump_cm(&mut self, device: &mut Device) {
        self.may_send = true;
        while let Some(IbCmEvent { id: ib, kind }) = self.cm.poll_event() {
            let is_last = kind.is_last();
            match kind {
                IbCmEventKind::ReqReceived {
                    listener,
                    peer,
                    qp,
                    req,
                } => self.on_req(device, ib, listener, peer, qp, &req),
                IbCmEventKind::SidrReqReceived {
                    listener,
                    peer,
                    req,
                } => self.on_sidr_req(device, ib, listener, peer, &req),
                kind => {
                    if let Some(&id) = self.by_ib.get(&ib) {
                        self.on_ib_event(device, id, ib, kind);
                    }
                }
            }
            // After the last event, the IB CM can reuse the id for a new connection.
            if is_last
                && let Some(id) = self.by_ib.remove(&ib)
                && let Ok(entry) = self.ids.get_mut(id)
            {
                entry.ib = None;
            }
        }
    }

    fn on_req(
        &mut self,
        device: &mut Device,
        ib: IbCmId,
        listener: IbCmId,
        peer: IpAddr,
        qp: QpPeer,
        req: &ReqMsg,
    ) {
        let refusal = match self.take_request(device, ib, listener, peer, qp, req) {
            Ok(()) => return,
            Err(reason) => reason,
        };
        let now = device.now();
        // If we reject a path MTU, we need to include the supported value.
        let info = match refusal {
            RejReason::InvalidMtu => AdditionalInfo::new(&[device.config().mtu.code()]),
            _ => AdditionalInfo::new(&[]),
        }
        .unwrap_or_default();
        let data = PrivateData::default();
        // We don't need to send a REJ if the request has been removed since.
        let _ = self.cm.send_rej(now, ib, refusal, info, data);
    }

    fn take_request(
        &mut self,
        device: &mut Device,
        ib: IbCmId,
        listener: IbCmId,
        peer: IpAddr,
        qp: QpPeer,
        req: &ReqMsg,
    ) -> Result<(), RejReason> {
        let listener_id = *self
            .by_ib
            .get(&listener)
            .ok_or(RejReason::InvalidServiceId)?;
        let rq_psn = new_psn(device);
        let entry = self
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
        if qp.path_mtu > device.config().mtu {
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
                    .unwrap_or(SocketAddr::new(device.port.addr().ip(), 0)),
            ),
            peer: Some(peer),
            ib: Some(ib),
            said: Some(Box::new(qp)),
            options: entry.options.of_request(),
            alternate: offered_path(device, &req.alternate),
            ..Id::new(entry.space, entry.qp_type, rq_psn)
        };
        let kind = CmEventKind::ConnectRequest {
            listener: listener_id,
            peer,
            param: param_of(&qp, ece, data.to_vec()),
        };
        let id = self
            .ids
            .insert(new)
            // An event requires an id. If no id is free, reject the request; the peer can retry
            // later.
            .map_err(|_| RejReason::NoResources)?;
        self.by_ib.insert(ib, id);
        self.report(id, kind);
        Ok(())
    }

    fn on_ib_event(&mut self, device: &mut Device, id: CmId, ib: IbCmId, kind: IbCmEventKind) {
        let now = device.now();
        match kind {
            IbCmEventKind::RepReceived { qp, rep } => {
                self.check_accepted_path(id, rep.failover);
                self.on_rep(device, id, ib, &qp, &rep);
            }
            IbCmEventKind::RtuReceived { .. } => self.on_established(id, ConnParam::default()),
            IbCmEventKind::SidrRepReceived { rep } => self.on_sidr_rep(device, id, &rep),
            IbCmEventKind::ReqTimeout
            | IbCmEventKind::RepTimeout
            | IbCmEventKind::SidrReqTimeout => {
                self.on_closed(device, id, CmEventKind::Unreachable);
            }
            IbCmEventKind::RejReceived { reason, info, .. }
                if self.retry_request(device, id, ib, reason, &info) => {}
            IbCmEventKind::RejReceived {
                reason,
                private_data,
                ..
            } => {
                // If all our RTUs and data packets are lost, the peer will time out and send a REJ
                // when the connection is already established on our side. In this case, we need to
                // report a closed connection instead of a rejected one.
                let was_up = self.ids.get(id).is_ok_and(|e| {
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
                self.on_closed(device, id, kind);
            }
            IbCmEventKind::DreqReceived { .. } => {
                // Send this first. It is valid in the current state.
                let _ = self.cm.send_drep(now, ib, PrivateData::default());
                self.on_closed(device, id, CmEventKind::Disconnected);
            }
            IbCmEventKind::DrepReceived { .. }
            | IbCmEventKind::DreqTimeout
            | IbCmEventKind::StaleConnection => {
                self.on_closed(device, id, CmEventKind::Disconnected);
            }
            // If the connection was never established, the application has already received a
            // reject or timeout event.
            IbCmEventKind::TimewaitExit if self.ids.get(id).is_ok_and(|e| e.was_established) => {
                self.report(id, CmEventKind::TimewaitExit);
            }
            IbCmEventKind::LapReceived { lap } => self.on_lap(device, id, ib, &lap),
            IbCmEventKind::AprReceived { status, .. } => self.on_apr(device, id, status),
            IbCmEventKind::LapTimeout => self.on_no_path(id, None),
            // Timeouts requested by the peer are handled by the IB CM.
            _ => {}
        }
    }

    fn on_rep(&mut self, device: &mut Device, id: CmId, ib: IbCmId, qp: &QpPeer, rep: &RepMsg) {
        let now = device.now();
        let Ok(entry) = self.ids.get_mut(id) else {
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
            let _ = self.cm.send_mra(ib, time, PrivateData::default());
            return self.report(id, CmEventKind::ConnectResponse { param });
        }
        // The QP must be ready before we send the RTU, since the peer can send data after that.
        let outcome = match entry.qp {
            Some(q) => self.connect_qp(device, id, q),
            None => Err(CmError::InvalidState("connect")),
        };
        match outcome {
            Ok(()) => {
                // This is valid in the new state.
                let _ = self.cm.send_rtu(ib, PrivateData::default());
                self.on_established(id, param);
            }
            // The peer keeps a QP until its REP times out, but a REJ will release it immediately.
            Err(e) => {
                let (info, none) = (AdditionalInfo::default(), PrivateData::default());
                // This is valid in the new state.
                let _ = self
                    .cm
                    .send_rej(now, ib, RejReason::NoResources, info, none);
                self.on_closed(device, id, CmEventKind::ConnectError(e));
            }
        }
    }

    pub(super) fn on_established(&mut self, id: CmId, param: ConnParam) {
        // Only the first one counts if we receive both the RTU and a data packet.
        if let Ok(entry) = self.ids.get_mut(id)
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
    pub(super) fn on_closed(&mut self, device: &mut Device, id: CmId, kind: CmEventKind) {
        let Ok(entry) = self.ids.get_mut(id) else {
            return;
        };
        if entry.state == IdState::Closed {
            return;
        }
        become_state(&mut entry.state, IdState::Closed);
        // A datagram QP can also be used with other peers.
        if entry.qp_type != QpType::Ud {
            self.fail_cm_qp(device, id);
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
