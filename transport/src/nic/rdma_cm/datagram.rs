//! Datagram identifiers (`RDMA_PS_UDP`): the active side requests the queue pair number and the
//! Q_Key for a port, and the passive side sends a response (SIDR, IBTA 12.11). This doesn't create
//! a connection: there is no state after the response, and neither side is notified when the other
//! side is closed.

use std::net::{IpAddr, SocketAddr};

use riser_state::become_state;

use super::calls::service_id;
use super::connect::{CM_RETRIES, CM_TIMEOUT, check_len, padded, request_data};
use super::events::split_request;
use super::qp_attr::way_to;
use super::{CmAgent, Id, IdState};
use crate::cm::{IbCmId, SidrRepParams, SidrReqParams};
use crate::nic::Device;
use crate::verbs::{
    CmError, CmEventKind, CmId, ConnParam, DATAGRAM_QKEY, MAX_DATAGRAM_REPLY_PRIVATE_DATA, PKey,
    QKey, QpType,
};
use crate::wire::cm_msg::{
    AdditionalInfo, Bits, CmTimeout, PrivateData, SidrRepMsg, SidrReqMsg, SidrStatus,
};
use crate::wire::{Psn, Qpn};

impl CmAgent {
    /// Requests the QP number for a port of the peer.
    pub(super) fn send_sidr_request(
        &mut self,
        device: &mut Device,
        id: CmId,
        param: &ConnParam,
    ) -> Result<(), CmError> {
        let entry = self.cm_id(id, "connect")?;
        let (Some(local), Some(peer)) = (entry.local, entry.peer) else {
            return Err(CmError::InvalidState("connect"));
        };
        // A multicast group does not have a QP.
        if peer.ip().is_multicast() {
            return Err(CmError::Unreachable);
        }
        let (space, class) = (entry.space, entry.options.traffic_class);
        let has_header = entry.has_header();
        let params = SidrReqParams {
            traffic_class: class.unwrap_or(0),
            service_id: service_id(space, peer.port()).0,
            pkey: PKey::DEFAULT,
            timeout: CmTimeout::new(CM_TIMEOUT),
            max_cm_retries: Bits::saturate(CM_RETRIES),
            private_data: request_data(has_header, local, peer, &param.private_data)?,
        };
        let now = device.now();
        let ib = self.cm.send_sidr_req(now, peer.ip(), &params)?;
        let entry = self.cm_id(id, "connect")?;
        entry.ib = Some(ib);
        become_state(&mut entry.state, IdState::Connecting);
        self.by_ib.insert(ib, id);
        self.pump_cm(device);
        Ok(())
    }

    /// Responds to a request with the QP of the id, or a QP managed by the application.
    pub(super) fn name_qp(
        &mut self,
        device: &mut Device,
        id: CmId,
        param: &ConnParam,
    ) -> Result<(), CmError> {
        let qp = self.cm_id(id, "accept")?.qp;
        let qpn = match qp {
            Some(qp) => device.qp_num(qp)?,
            None => param.qp_num,
        };
        // The peer can't send to an invalid QP number.
        if qpn == 0 {
            return Err(CmError::InvalidState("accept"));
        }
        let result = (SidrStatus::Success, Qpn::new(qpn));
        let qkey = param.qkey.unwrap_or(DATAGRAM_QKEY);
        self.send_sidr_response(
            device,
            id,
            IdState::Established,
            result,
            qkey,
            &param.private_data,
        )
    }

    /// Rejects a request.
    pub(super) fn name_no_qp(
        &mut self,
        device: &mut Device,
        id: CmId,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        let result = (SidrStatus::Reject, Qpn::default());
        self.send_sidr_response(device, id, IdState::Closed, result, QKey(0), private_data)
    }

    fn send_sidr_response(
        &mut self,
        device: &mut Device,
        id: CmId,
        next: IdState,
        (status, qpn): (SidrStatus, Qpn),
        qkey: QKey,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        check_len(private_data, MAX_DATAGRAM_REPLY_PRIVATE_DATA)?;
        let entry = self.cm_id(id, "response")?;
        let (IdState::Requested, Some(ib)) = (entry.state, entry.ib) else {
            return Err(CmError::InvalidState("response"));
        };
        // The IB CM removes the request after sending the response.
        become_state(&mut entry.state, next);
        entry.ib = None;
        self.by_ib.remove(&ib);
        let params = SidrRepParams {
            status,
            qpn,
            qkey: qkey.0,
            info: AdditionalInfo::default(),
            private_data: padded(private_data),
        };
        let sent = self.cm.send_sidr_rep(ib, &params);
        self.pump_cm(device);
        Ok(sent?)
    }

    /// Handles a request for the QP number of a port.
    pub(super) fn on_sidr_req(
        &mut self,
        device: &mut Device,
        ib: IbCmId,
        listener: IbCmId,
        peer: IpAddr,
        req: &SidrReqMsg,
    ) {
        let Err(status) = self.take_question(device, ib, listener, peer, req) else {
            return;
        };
        let params = SidrRepParams {
            status,
            qpn: Qpn::default(),
            qkey: 0,
            info: AdditionalInfo::default(),
            private_data: PrivateData::default(),
        };
        // We don't need to send a response if the request has been removed since.
        let _ = self.cm.send_sidr_rep(ib, &params);
    }

    fn take_question(
        &mut self,
        device: &mut Device,
        ib: IbCmId,
        listener: IbCmId,
        peer: IpAddr,
        req: &SidrReqMsg,
    ) -> Result<(), SidrStatus> {
        let listener = *self.by_ib.get(&listener).ok_or(SidrStatus::Unsupported)?;
        let entry = self.ids.get(listener);
        // If the port is used for connections, there is no datagram QP.
        let entry = entry
            .ok()
            .filter(|entry| entry.qp_type == QpType::Ud)
            .ok_or(SidrStatus::Unsupported)?;
        let (port, data) = split_request(entry.has_header(), &req.private_data.0)
            .map_err(|_| SidrStatus::UnsupportedVersion)?;
        let here = SocketAddr::new(device.port.addr().ip(), 0);
        let remote = SocketAddr::new(peer, port);
        let new = Id {
            state: IdState::Requested,
            local: Some(entry.local.unwrap_or(here)),
            peer: Some(remote),
            ib: Some(ib),
            ..Id::new(entry.space, entry.qp_type, Psn::default())
        };
        let param = ConnParam {
            private_data: data.to_vec(),
            ah: Some(way_to(peer, 0)),
            ..ConnParam::default()
        };
        // An event requires an id. If no id is free, reject the request; the peer can retry later.
        let id = self.ids.insert(new).map_err(|_| SidrStatus::NoQp)?;
        self.by_ib.insert(ib, id);
        let kind = CmEventKind::ConnectRequest {
            listener,
            peer: remote,
            param,
        };
        self.report(id, kind);
        Ok(())
    }

    /// Handles the response from a peer.
    pub(super) fn on_sidr_rep(&mut self, device: &mut Device, id: CmId, rep: &SidrRepMsg) {
        let Ok(entry) = self.ids.get(id) else {
            return;
        };
        let class = entry.options.traffic_class.unwrap_or(0);
        let Some(peer) = entry.peer else {
            return;
        };
        let private_data = rep.private_data.0.to_vec();
        if rep.status != SidrStatus::Success {
            let reason = u8::from(rep.status).into();
            return self.on_closed(
                device,
                id,
                CmEventKind::Rejected {
                    reason,
                    private_data,
                },
            );
        }
        let param = ConnParam {
            private_data,
            qp_num: rep.qpn.value(),
            qkey: Some(QKey(rep.qkey)),
            ah: Some(way_to(peer.ip(), class)),
            ..ConnParam::default()
        };
        self.on_established(id, param);
    }
}
