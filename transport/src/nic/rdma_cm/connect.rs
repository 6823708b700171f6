//! Connection calls: connect, accept, reject and disconnect.

use std::net::{IpAddr, SocketAddr};

use riser_state::become_state;

use super::calls::{check_destination, service_id};
use super::paths::cm_path;
use super::{CmAgent, IdState};
use crate::cm::{RepParams, ReqParams};
use crate::nic::Device;
use crate::verbs::{
    CmError, CmEventKind, CmId, ConnParam, MAX_ACCEPT_PRIVATE_DATA, MAX_REJECT_PRIVATE_DATA,
    MULTICAST_QPN, Mtu, PKey, QpId, QpType,
};
use crate::wire::Qpn;
use crate::wire::cm_msg::{
    AdditionalInfo, Bits, CmPath, CmTimeout, PrivateData, Redirect, RejReason,
};
use crate::wire::cma::{CMA_HEADER_LEN, CmaAddrs, CmaHeader};

/// Proposed ACK timeout: 4.096 µs × 2¹⁶, or a quarter of a second. We start to retransmit much
/// earlier, but this value is used when counting retries.
const ACK_TIMEOUT: u8 = 16;
/// Response timeout for CM messages: 4.096 µs × 2¹⁷, or half a second.
pub(super) const CM_TIMEOUT: u8 = 17;
/// Max number of retries for a CM message.
pub(super) const CM_RETRIES: u32 = 15;
/// Timeout requested with an MRA: 4.096 µs × 2²², or 17 seconds.
pub(super) const MRA_TIMEOUT: u8 = 22;

pub(super) fn check_len(data: &[u8], max: usize) -> Result<(), CmError> {
    if data.len() > max {
        return Err(CmError::PrivateDataTooLong {
            len: data.len(),
            max,
        });
    }
    Ok(())
}

pub(super) fn padded<const N: usize>(data: &[u8]) -> PrivateData<N> {
    PrivateData::new(data).expect("the length was checked")
}

impl CmAgent {
    pub(crate) fn connect(
        &mut self,
        device: &mut Device,
        id: CmId,
        param: &ConnParam,
    ) -> Result<(), CmError> {
        let (max_resources, max_depth) = {
            let limits = device.config().limits;
            (limits.max_qp_rd_atom, limits.max_qp_init_rd_atom)
        };
        let mtu = device.config().mtu;
        let entry = self.cm_id(id, "connect")?;
        if entry.state != IdState::RouteResolved {
            return Err(CmError::InvalidState("connect"));
        }
        if entry.qp_type == QpType::Ud {
            return self.send_sidr_request(device, id, param);
        }
        let mut param = param.clone();
        // If we offered the peer more than the device supports, this would only fail later, when
        // the QP is connected.
        param.responder_resources = param.responder_resources.min(max_resources);
        param.initiator_depth = param.initiator_depth.min(max_depth);
        entry.depths = Some((param.responder_resources, param.initiator_depth));
        entry.external = entry.qp.is_none().then(|| external(&param)).transpose()?;
        let mtu = entry.options.path_mtu.map_or(mtu, |most| most.min(mtu));
        self.send_request(device, id, &param, mtu)?;
        self.cm_id(id, "connect")?.param = Some(Box::new(param));
        self.pump_cm(device);
        Ok(())
    }

    /// Sends a request with the given path MTU.
    pub(super) fn send_request(
        &mut self,
        device: &mut Device,
        id: CmId,
        param: &ConnParam,
        path_mtu: Mtu,
    ) -> Result<(), CmError> {
        let entry = self.cm_id(id, "connect")?;
        let (Some(local), Some(peer)) = (entry.local, entry.peer) else {
            return Err(CmError::InvalidState("connect"));
        };
        let (space, qp_type, options) = (entry.space, entry.qp_type, entry.options);
        let (qp, external, rq_psn) = (entry.qp, entry.external, entry.rq_psn);
        let alternate = entry.alternate;
        let has_header = entry.has_header();
        let private_data = request_data(has_header, local, peer, &param.private_data)?;
        let now = device.now();
        let ack_timeout = CmTimeout::new(options.ack_timeout.unwrap_or(ACK_TIMEOUT));
        let params = ReqParams {
            service_id: service_id(space, peer.port()).0,
            qp_type,
            local_qpn: connected_qpn(device, qp, external)?,
            ece: param.ece,
            starting_psn: rq_psn,
            primary: CmPath {
                traffic_class: options.traffic_class.unwrap_or(0),
                ..CmPath::roce(local.ip().into(), peer.ip().into(), ack_timeout)
            },
            alternate: alternate.map_or(CmPath::default(), |path| cm_path(device, &path)),
            path_mtu,
            pkey: PKey::DEFAULT,
            responder_resources: param.responder_resources,
            initiator_depth: param.initiator_depth,
            flow_control: param.flow_control,
            srq: param.srq,
            retry_count: Bits::saturate(param.retry_count.into()),
            rnr_retry_count: Bits::saturate(param.rnr_retry_count.into()),
            remote_cm_timeout: CmTimeout::new(CM_TIMEOUT),
            local_cm_timeout: CmTimeout::new(CM_TIMEOUT),
            max_cm_retries: Bits::saturate(CM_RETRIES),
            private_data,
        };
        let ib = self.cm.send_req(now, peer.ip(), &params)?;
        let entry = self.cm_id(id, "connect")?;
        entry.ib = Some(ib);
        become_state(&mut entry.state, IdState::Connecting);
        self.by_ib.insert(ib, id);
        Ok(())
    }

    pub(crate) fn accept(
        &mut self,
        device: &mut Device,
        id: CmId,
        param: &ConnParam,
    ) -> Result<(), CmError> {
        let entry = self.cm_id(id, "accept")?;
        if entry.qp_type == QpType::Ud {
            return self.name_qp(device, id, param);
        }
        check_len(&param.private_data, MAX_ACCEPT_PRIVATE_DATA)?;
        let (IdState::Requested, Some(ib)) = (entry.state, entry.ib) else {
            return Err(CmError::InvalidState("accept"));
        };
        let offered = entry.said.as_ref().map(|said| said.responder_resources);
        let offered = offered.ok_or(CmError::InvalidState("accept"))?;
        let (qp, rq_psn) = (entry.qp, entry.rq_psn);
        let external = qp.is_none().then(|| external(param)).transpose()?;
        let limits = device.config().limits;
        let responder_resources = param.responder_resources.min(limits.max_qp_rd_atom);
        // The number of READs supported by a Linux peer is the value from the reply, which may be
        // less than it offered in the request.
        let initiator_depth = param
            .initiator_depth
            .min(limits.max_qp_init_rd_atom)
            .min(offered);
        let entry = self.cm_id(id, "accept")?;
        entry.depths = Some((responder_resources, initiator_depth));
        entry.external = external;
        let local_qpn = connected_qpn(device, qp, external)?;
        let failover = self.check_offered_path(device, id);
        // The QP must be ready before we send the REP, since the peer can send data as soon as it
        // receives this message.
        if let Some(qp) = qp {
            self.connect_qp(device, id, qp)?;
        }
        let params = RepParams {
            local_qpn,
            ece: param.ece,
            starting_psn: rq_psn,
            responder_resources,
            initiator_depth,
            target_ack_delay: CmTimeout::new(ACK_TIMEOUT),
            failover,
            flow_control: param.flow_control,
            rnr_retry_count: Bits::saturate(param.rnr_retry_count.into()),
            srq: param.srq,
            private_data: padded(&param.private_data),
        };
        let now = device.now();
        self.cm.send_rep(now, ib, &params)?;
        // If the RTU is lost, the connection is established when the first packet is received.
        if let Some(qp) = qp {
            device.await_first_packet(qp);
        }
        let entry = self.cm_id(id, "accept")?;
        become_state(&mut entry.state, IdState::Accepting);
        self.pump_cm(device);
        Ok(())
    }

    pub(crate) fn establish(&mut self, device: &mut Device, id: CmId) -> Result<(), CmError> {
        let entry = self.cm_id(id, "establish")?;
        let (IdState::Responded, Some(ib)) = (entry.state, entry.ib) else {
            return Err(CmError::InvalidState("establish"));
        };
        self.cm.send_rtu(ib, PrivateData::default())?;
        let entry = self.cm_id(id, "establish")?;
        become_state(&mut entry.state, IdState::Established);
        entry.was_established = true;
        self.pump_cm(device);
        Ok(())
    }

    pub(crate) fn reject(
        &mut self,
        device: &mut Device,
        id: CmId,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        if self.cm_id(id, "reject")?.qp_type == QpType::Ud {
            return self.name_no_qp(device, id, private_data);
        }
        let reason = RejReason::ConsumerDefined;
        self.refuse(device, id, reason, AdditionalInfo::default(), private_data)
    }

    pub(crate) fn redirect(
        &mut self,
        device: &mut Device,
        id: CmId,
        to: IpAddr,
    ) -> Result<(), CmError> {
        let entry = self.cm_id(id, "redirect")?;
        if entry.state != IdState::Requested || entry.qp_type == QpType::Ud {
            return Err(CmError::InvalidState("redirect"));
        }
        check_destination(device.port.addr().ip(), to, false)?;
        let info = Redirect::to_port(to.into()).emit();
        self.refuse(device, id, RejReason::PortCmRedirect, info, &[])
    }

    pub(crate) fn reject_ece(
        &mut self,
        device: &mut Device,
        id: CmId,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        if self.cm_id(id, "reject_ece")?.qp_type == QpType::Ud {
            return Err(CmError::InvalidState("reject_ece"));
        }
        self.refuse(
            device,
            id,
            RejReason::VendorOptionNotSupported,
            AdditionalInfo::default(),
            private_data,
        )
    }

    fn refuse(
        &mut self,
        device: &mut Device,
        id: CmId,
        reason: RejReason,
        info: AdditionalInfo,
        private_data: &[u8],
    ) -> Result<(), CmError> {
        check_len(private_data, MAX_REJECT_PRIVATE_DATA)?;
        let now = device.now();
        let entry = self.cm_id(id, "reject")?;
        let (IdState::Requested | IdState::Responded, Some(ib)) = (entry.state, entry.ib) else {
            return Err(CmError::InvalidState("reject"));
        };
        // Close the id even if we cannot send the message, since this is the application's final
        // decision.
        become_state(&mut entry.state, IdState::Closed);
        entry.ib = None;
        self.by_ib.remove(&ib);
        let sent = self
            .cm
            .send_rej(now, ib, reason, info, padded(private_data));
        self.pump_cm(device);
        Ok(sent?)
    }

    pub(crate) fn mra(&mut self, device: &mut Device, id: CmId) -> Result<(), CmError> {
        let entry = self.cm_id(id, "mra")?;
        let (IdState::Requested, Some(ib)) = (entry.state, entry.ib) else {
            return Err(CmError::InvalidState("mra"));
        };
        let time = CmTimeout::new(MRA_TIMEOUT);
        self.cm.send_mra(ib, time, PrivateData::default())?;
        self.pump_cm(device);
        Ok(())
    }

    pub(crate) fn notify_established(
        &mut self,
        device: &mut Device,
        id: CmId,
    ) -> Result<(), CmError> {
        let entry = self.cm_id(id, "notify_established")?;
        let (IdState::Accepting, Some(ib)) = (entry.state, entry.ib) else {
            return Err(CmError::InvalidState("notify_established"));
        };
        let now = device.now();
        self.cm.establish(now, ib)?;
        self.on_established(id, ConnParam::default());
        self.pump_cm(device);
        Ok(())
    }

    pub(crate) fn disconnect(&mut self, device: &mut Device, id: CmId) -> Result<(), CmError> {
        let now = device.now();
        let entry = self.cm_id(id, "disconnect")?;
        let (state, ib) = (entry.state, entry.ib);
        match state {
            // There is no connection state on the peer.
            _ if entry.qp_type == QpType::Ud => return Err(CmError::InvalidState("disconnect")),
            IdState::Established => {
                become_state(&mut entry.state, IdState::Disconnecting);
                // Change the state of the QP first, because it must not send any new data after the
                // DREQ. Pending acknowledgements are sent before the DREQ.
                self.fail_cm_qp(device, id);
                if let Some(ib) = ib {
                    self.cm.send_dreq(now, ib, PrivateData::default())?;
                }
            }
            IdState::Connecting | IdState::Responded | IdState::Accepting => {
                // The connection is not established, so there is no need for a DREQ. The IB CM
                // sends a REJ to cancel the REQ or REP.
                become_state(&mut entry.state, IdState::Closed);
                entry.ib = None;
                self.fail_cm_qp(device, id);
                if let Some(ib) = ib {
                    self.by_ib.remove(&ib);
                    self.cm.destroy(now, ib)?;
                }
                self.report(id, CmEventKind::Disconnected);
            }
            IdState::Disconnecting | IdState::Closed => {}
            _ => return Err(CmError::InvalidState("disconnect")),
        }
        self.pump_cm(device);
        Ok(())
    }
}

/// Returns the QP number passed to a call, for an id without a QP.
fn external(param: &ConnParam) -> Result<Qpn, CmError> {
    // QPs 0 and 1 can't be connected.
    match param.qp_num {
        2..MULTICAST_QPN => Ok(Qpn::new(param.qp_num)),
        _ => Err(CmError::InvalidState("a connection without a queue pair")),
    }
}

/// Returns the private data of a request: the address header (if required), followed by the
/// application data.
pub(super) fn request_data<const N: usize>(
    has_header: bool,
    local: SocketAddr,
    peer: SocketAddr,
    user: &[u8],
) -> Result<PrivateData<N>, CmError> {
    if !has_header {
        check_len(user, N)?;
        return Ok(padded(user));
    }
    check_len(user, N - CMA_HEADER_LEN)?;
    let header = CmaHeader {
        src_port: local.port(),
        addrs: CmaAddrs::new(local.ip(), peer.ip()).ok_or(CmError::Unreachable)?,
    };
    let mut data = [0; N];
    let bytes = header.emit();
    data[..bytes.len()].copy_from_slice(&bytes);
    data[bytes.len()..][..user.len()].copy_from_slice(user);
    Ok(PrivateData(data))
}

/// Returns the QP number of a connection, which is either managed by the id or by the
/// application.
fn connected_qpn(device: &Device, qp: Option<QpId>, external: Option<Qpn>) -> Result<Qpn, CmError> {
    match (qp, external) {
        (Some(qp), _) => Ok(Qpn::new(device.qp_num(qp)?)),
        (None, Some(qpn)) => Ok(qpn),
        (None, None) => Err(CmError::InvalidState("a connection without a queue pair")),
    }
}
