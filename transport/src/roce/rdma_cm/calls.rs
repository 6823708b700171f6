//! What the user of the RDMA CM asks for.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use chacha20::rand_core::Rng;

use super::{EPHEMERALS, FIRST_EPHEMERAL, Id, IdState, MAX_IB_PRIVATE_DATA, Ports};
use crate::cm::{IbCmError, RepParams, ReqParams};
use crate::roce::nic::Nic;
use crate::verbs::{
    Access, AhAttr, CmError, CmEvent, CmEventKind, CmId, ConnParam, Gid, MAX_ACCEPT_PRIVATE_DATA,
    MAX_CONNECT_PRIVATE_DATA, MAX_REJECT_PRIVATE_DATA, Mtu, PKey, PortSpace, QpAttr, QpId,
    QpInitAttr, QpState, QpType, VerbsError,
};
use crate::wire::cm_msg::{
    AdditionalInfo, Bits, CmPath, CmTimeout, Failover, PrivateData, RejReason, ServiceId,
};
use crate::wire::cma::{CmaAddrs, CmaHeader, RdmaPortSpace};
use crate::wire::{Psn, Qpn};

/// ACK timeout that we propose: 4.096 µs × 2¹⁶, a quarter of a second. Retransmission begins far
/// earlier; this is the unit in which retries are counted.
const ACK_TIMEOUT: u8 = 16;
/// Bounds for the ACK timeout that a peer proposes.
const ACK_TIMEOUTS: std::ops::RangeInclusive<u8> = 14..=21;
/// How long we wait for an answer to a CM message: 4.096 µs × 2¹⁷, half a second.
const CM_TIMEOUT: u8 = 17;
/// How often a CM message is repeated.
const CM_RETRIES: u32 = 15;
/// How much time an MRA asks for: 4.096 µs × 2²², 17 seconds.
const MRA_TIMEOUT: u8 = 22;
/// Delay that our RNR NAKs ask for: 0.64 ms (IBTA table 45).
const MIN_RNR_TIMER: u8 = 12;

impl From<IbCmError> for CmError {
    fn from(e: IbCmError) -> Self {
        match e {
            IbCmError::NoSuchId => Self::InvalidState("a connection that is over"),
            IbCmError::State { .. } => Self::InvalidState("this call"),
            IbCmError::TooManyIds => Self::TooManyIds,
            IbCmError::ServiceIdInUse => Self::AddressInUse,
            IbCmError::AlternatePaths => Self::InvalidState("alternate paths"),
        }
    }
}

fn ports(space: PortSpace) -> Option<Ports> {
    match space {
        PortSpace::Tcp => Some(Ports::Tcp),
        PortSpace::Udp => Some(Ports::Udp),
        PortSpace::Ib { .. } => None,
    }
}

/// The service id and mask that an identifier with `port` stands for.
fn service_id(space: PortSpace, port: u16) -> (ServiceId, u64) {
    match space {
        PortSpace::Tcp => (RdmaPortSpace::Tcp.service_id(port), u64::MAX),
        PortSpace::Udp => (RdmaPortSpace::Udp.service_id(port), u64::MAX),
        PortSpace::Ib { service_id, mask } => (ServiceId(service_id), mask),
    }
}

fn check_len(data: &[u8], max: usize) -> Result<(), CmError> {
    if data.len() > max {
        return Err(CmError::PrivateDataTooLong {
            len: data.len(),
            max,
        });
    }
    Ok(())
}

fn padded<const N: usize>(data: &[u8]) -> PrivateData<N> {
    PrivateData::new(data).expect("the length was checked")
}

#[allow(
    missing_docs,
    reason = "the calls of the RDMA CM trait, documented there"
)]
impl Nic {
    fn cm_id(&mut self, id: CmId, call: &'static str) -> Result<&mut Id, CmError> {
        let agent = &mut self.cm;
        agent
            .ids
            .get_mut(id)
            .map_err(|_| CmError::InvalidState(call))
    }

    pub fn create_id(&mut self, space: PortSpace) -> Result<CmId, CmError> {
        self.cm
            .ids
            .insert(Id::new(space))
            .map_err(|_| CmError::TooManyIds)
    }

    pub fn bind_addr(&mut self, id: CmId, addr: SocketAddr) -> Result<(), CmError> {
        let entry = self.cm_id(id, "bind_addr")?;
        if entry.state != IdState::Idle {
            return Err(CmError::InvalidState("bind_addr"));
        }
        self.bind(id, addr)?;
        self.cm_id(id, "bind_addr")?.state = IdState::Bound;
        Ok(())
    }

    /// Gives an identifier its local address and port.
    fn bind(&mut self, id: CmId, addr: SocketAddr) -> Result<(), CmError> {
        let own = self.local_addr().ip();
        let ip = addr.ip().to_canonical();
        let is_ours = ip == own || ip.is_unspecified() && ip.is_ipv4() == own.is_ipv4();
        if !is_ours {
            return Err(CmError::AddressNotAvailable);
        }
        let space = ports(self.cm_id(id, "bind_addr")?.space);
        let port = match (space, addr.port()) {
            (None, port) => port,
            (Some(space), 0) => self.free_port(space)?,
            (Some(space), port) => {
                if self.cm.ports.contains_key(&(space, port)) {
                    return Err(CmError::AddressInUse);
                }
                port
            }
        };
        if let Some(space) = space {
            self.cm.ports.insert((space, port), id);
        }
        let entry = self.cm_id(id, "bind_addr")?;
        entry.owns_port = space.is_some();
        entry.local = Some(SocketAddr::new(own, port));
        Ok(())
    }

    /// A port that nobody has, from a random one on.
    fn free_port(&mut self, space: Ports) -> Result<u16, CmError> {
        let start = (self.random().next_u32() % u32::from(EPHEMERALS)) as u16;
        (0..EPHEMERALS)
            .map(|i| FIRST_EPHEMERAL + (start + i) % EPHEMERALS)
            .find(|&port| !self.cm.ports.contains_key(&(space, port)))
            .ok_or(CmError::AddressInUse)
    }

    pub fn resolve_addr(
        &mut self,
        id: CmId,
        src: Option<SocketAddr>,
        dst: SocketAddr,
        _timeout: Duration,
    ) -> Result<(), CmError> {
        let own = self.local_addr().ip();
        let entry = self.cm_id(id, "resolve_addr")?;
        if !matches!(entry.state, IdState::Idle | IdState::Bound) {
            return Err(CmError::InvalidState("resolve_addr"));
        }
        let is_bound = entry.local.is_some();
        let dst = SocketAddr::new(dst.ip().to_canonical(), dst.port());
        let outcome = if dst.ip().is_ipv4() != own.is_ipv4()
            || dst.ip().is_unspecified()
            || dst.ip().is_multicast()
        {
            Err(CmError::Unreachable)
        } else if is_bound {
            Ok(())
        } else {
            self.bind(id, src.unwrap_or(SocketAddr::new(own, 0)))
        };
        let kind = match outcome {
            Ok(()) => {
                let entry = self.cm_id(id, "resolve_addr")?;
                entry.peer = Some(dst);
                entry.state = IdState::AddrResolved;
                CmEventKind::AddrResolved
            }
            Err(e) => CmEventKind::AddrError(e),
        };
        self.tell(id, kind);
        Ok(())
    }

    pub fn resolve_route(&mut self, id: CmId, _timeout: Duration) -> Result<(), CmError> {
        let entry = self.cm_id(id, "resolve_route")?;
        if entry.state != IdState::AddrResolved {
            return Err(CmError::InvalidState("resolve_route"));
        }
        entry.state = IdState::RouteResolved;
        self.tell(id, CmEventKind::RouteResolved);
        Ok(())
    }

    pub fn create_cm_qp(&mut self, id: CmId, init: &QpInitAttr) -> Result<QpId, CmError> {
        let entry = self.cm_id(id, "create_cm_qp")?;
        let has_device = matches!(
            entry.state,
            IdState::Bound | IdState::AddrResolved | IdState::RouteResolved | IdState::Requested
        );
        if !has_device || entry.qp.is_some() {
            return Err(CmError::InvalidState("create_cm_qp"));
        }
        if init.qp_type != QpType::Rc {
            return Err(VerbsError::WrongQpType("connection").into());
        }
        let qp = self.create_qp(init)?;
        let to_init = QpAttr {
            state: Some(QpState::Init),
            pkey_index: Some(0),
            port: Some(1),
            // What a peer may do with a region, the region says; the connection forbids nothing.
            access: Some(Access::REMOTE),
            ..QpAttr::default()
        };
        if let Err(e) = self.modify_qp(qp, &to_init) {
            // It was created by the lines above, so it can be destroyed.
            let _ = self.destroy_qp(qp);
            return Err(e.into());
        }
        self.cm_id(id, "create_cm_qp")?.qp = Some(qp);
        self.cm.by_qp.insert(qp, id);
        Ok(qp)
    }

    pub fn listen(&mut self, id: CmId, backlog: u32) -> Result<(), CmError> {
        let entry = self.cm_id(id, "listen")?;
        let is_bare = matches!(entry.space, PortSpace::Ib { .. });
        if entry.state != IdState::Bound && !(is_bare && entry.state == IdState::Idle) {
            return Err(CmError::InvalidState("listen"));
        }
        let port = entry.local.map_or(0, |a| a.port());
        let (service, mask) = service_id(entry.space, port);
        let ib = self.cm.cm.listen(service, mask, backlog.max(1) as usize)?;
        let entry = self.cm_id(id, "listen")?;
        entry.ib = Some(ib);
        entry.state = IdState::Listening;
        self.cm.by_ib.insert(ib, id);
        Ok(())
    }

    pub fn connect(&mut self, id: CmId, param: &ConnParam) -> Result<(), CmError> {
        let (max_resources, max_depth) = {
            let limits = self.config().limits;
            (limits.max_qp_rd_atom, limits.max_qp_init_rd_atom)
        };
        let mtu = self.config().mtu;
        let entry = self.cm_id(id, "connect")?;
        if entry.state != IdState::RouteResolved {
            return Err(CmError::InvalidState("connect"));
        }
        let mut param = param.clone();
        param.responder_resources = param.responder_resources.min(max_resources);
        param.initiator_depth = param.initiator_depth.min(max_depth);
        self.send_request(id, &param, mtu)?;
        self.cm_id(id, "connect")?.param = Some(Box::new(param));
        self.pump_cm();
        Ok(())
    }

    /// Sends a request with a path MTU.
    pub(super) fn send_request(
        &mut self,
        id: CmId,
        param: &ConnParam,
        path_mtu: Mtu,
    ) -> Result<(), CmError> {
        let entry = self.cm_id(id, "connect")?;
        let (Some(local), Some(peer), Some(qp)) = (entry.local, entry.peer, entry.qp) else {
            return Err(CmError::InvalidState("connect"));
        };
        let space = entry.space;
        let private_data = request_data(space, local, peer, &param.private_data)?;
        let now = self.now();
        let rq_psn = Psn::new(self.random().next_u32());
        let ack_timeout = CmTimeout::new(ACK_TIMEOUT);
        let params = ReqParams {
            service_id: service_id(space, peer.port()).0,
            local_qpn: Qpn::new(self.qp_num(qp)?),
            starting_psn: rq_psn,
            primary: CmPath::roce(local.ip().into(), peer.ip().into(), ack_timeout),
            alternate: CmPath::default(),
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
        let ib = self.cm.cm.send_req(now, peer.ip(), &params)?;
        let entry = self.cm_id(id, "connect")?;
        entry.ib = Some(ib);
        entry.rq_psn = rq_psn;
        entry.state = IdState::Connecting;
        self.cm.by_ib.insert(ib, id);
        Ok(())
    }

    pub fn accept(&mut self, id: CmId, param: &ConnParam) -> Result<(), CmError> {
        check_len(&param.private_data, MAX_ACCEPT_PRIVATE_DATA)?;
        let entry = self.cm_id(id, "accept")?;
        let (IdState::Requested, Some(qp), Some(ib), Some(peer)) =
            (entry.state, entry.qp, entry.ib, entry.peer)
        else {
            return Err(CmError::InvalidState("accept"));
        };
        let request = entry
            .request
            .clone()
            .ok_or(CmError::InvalidState("accept"))?;
        let limits = self.config().limits;
        let responder_resources = param.responder_resources.min(limits.max_qp_rd_atom);
        let initiator_depth = param.initiator_depth.min(limits.max_qp_init_rd_atom);
        let rq_psn = Psn::new(self.random().next_u32());
        let local_qpn = Qpn::new(self.qp_num(qp)?);
        self.connect_qp(
            qp,
            peer.ip(),
            &request,
            rq_psn,
            responder_resources,
            initiator_depth,
        )?;
        let params = RepParams {
            local_qpn,
            starting_psn: rq_psn,
            responder_resources,
            initiator_depth,
            target_ack_delay: CmTimeout::new(ACK_TIMEOUT),
            failover: Failover::Accepted,
            flow_control: param.flow_control,
            rnr_retry_count: Bits::saturate(param.rnr_retry_count.into()),
            srq: param.srq,
            private_data: padded(&param.private_data),
        };
        let now = self.now();
        self.cm.cm.send_rep(now, ib, &params)?;
        let entry = self.cm_id(id, "accept")?;
        entry.request = None;
        entry.state = IdState::Accepting;
        self.pump_cm();
        Ok(())
    }

    /// Takes a queue pair from INIT to RTS as a connection's messages say.
    pub(super) fn connect_qp(
        &mut self,
        qp: QpId,
        peer: IpAddr,
        said: &crate::cm::QpPeer,
        rq_psn: Psn,
        responder_resources: u8,
        initiator_depth: u8,
    ) -> Result<(), VerbsError> {
        let ack_timeout = said.path.ack_timeout.exponent();
        self.modify_qp(
            qp,
            &QpAttr {
                state: Some(QpState::Rtr),
                ah: Some(AhAttr {
                    dgid: Gid::from(peer),
                    sgid_index: 0,
                    hop_limit: 64,
                    traffic_class: 0,
                    port: 1,
                }),
                path_mtu: Some(said.path_mtu),
                dest_qp: Some(said.dest_qpn.value()),
                rq_psn: Some(rq_psn.value()),
                max_dest_rd_atomic: Some(responder_resources),
                min_rnr_timer: Some(MIN_RNR_TIMER),
                ..QpAttr::default()
            },
        )?;
        self.modify_qp(
            qp,
            &QpAttr {
                state: Some(QpState::Rts),
                sq_psn: Some(said.sq_psn.value()),
                max_rd_atomic: Some(initiator_depth.min(said.responder_resources)),
                timeout: Some(ack_timeout.clamp(*ACK_TIMEOUTS.start(), *ACK_TIMEOUTS.end())),
                retry_cnt: Some(said.retry_count.value() as u8),
                rnr_retry: Some(said.rnr_retry_count.value() as u8),
                ..QpAttr::default()
            },
        )
    }

    pub fn reject(&mut self, id: CmId, private_data: &[u8]) -> Result<(), CmError> {
        check_len(private_data, MAX_REJECT_PRIVATE_DATA)?;
        let now = self.now();
        let entry = self.cm_id(id, "reject")?;
        let (IdState::Requested, Some(ib)) = (entry.state, entry.ib) else {
            return Err(CmError::InvalidState("reject"));
        };
        entry.state = IdState::Closed;
        entry.ib = None;
        entry.request = None;
        self.cm.by_ib.remove(&ib);
        let info = AdditionalInfo::default();
        let reason = RejReason::ConsumerDefined;
        let sent = self
            .cm
            .cm
            .send_rej(now, ib, reason, info, padded(private_data));
        self.pump_cm();
        Ok(sent?)
    }

    pub fn mra(&mut self, id: CmId) -> Result<(), CmError> {
        let entry = self.cm_id(id, "mra")?;
        let (IdState::Requested, Some(ib)) = (entry.state, entry.ib) else {
            return Err(CmError::InvalidState("mra"));
        };
        let time = CmTimeout::new(MRA_TIMEOUT);
        self.cm.cm.send_mra(ib, time, PrivateData::default())?;
        self.pump_cm();
        Ok(())
    }

    pub fn notify_established(&mut self, id: CmId) -> Result<(), CmError> {
        let entry = self.cm_id(id, "notify_established")?;
        let (IdState::Accepting, Some(ib)) = (entry.state, entry.ib) else {
            return Err(CmError::InvalidState("notify_established"));
        };
        self.cm.cm.establish(ib)?;
        self.on_established(id, ConnParam::default());
        self.pump_cm();
        Ok(())
    }

    pub fn disconnect(&mut self, id: CmId) -> Result<(), CmError> {
        let now = self.now();
        let entry = self.cm_id(id, "disconnect")?;
        let (state, ib) = (entry.state, entry.ib);
        match state {
            IdState::Established => {
                entry.state = IdState::Disconnecting;
                self.fail_cm_qp(id);
                if let Some(ib) = ib {
                    self.cm.cm.send_dreq(now, ib, PrivateData::default())?;
                }
            }
            IdState::Connecting | IdState::Accepting => {
                entry.state = IdState::Closed;
                entry.ib = None;
                self.fail_cm_qp(id);
                if let Some(ib) = ib {
                    self.cm.by_ib.remove(&ib);
                    self.cm.cm.destroy(now, ib)?;
                }
                self.tell(id, CmEventKind::Disconnected);
            }
            IdState::Disconnecting | IdState::Closed => {}
            _ => return Err(CmError::InvalidState("disconnect")),
        }
        self.pump_cm();
        Ok(())
    }

    pub fn destroy_id(&mut self, id: CmId) -> Result<(), CmError> {
        let entry = self
            .cm
            .ids
            .remove(id)
            .map_err(|_| CmError::InvalidState("destroy_id"))?;
        if let (true, Some(space), Some(local)) = (entry.owns_port, ports(entry.space), entry.local)
        {
            self.cm.ports.remove(&(space, local.port()));
        }
        if let Some(qp) = entry.qp {
            self.cm.by_qp.remove(&qp);
        }
        if let Some(ib) = entry.ib {
            self.cm.by_ib.remove(&ib);
            // An identifier that the IB CM has finished with is what we want.
            let _ = self.cm.cm.destroy(self.now(), ib);
        }
        // Requests that nobody has seen go with their listener.
        let mut unseen = Vec::new();
        self.cm.events.retain(|e| {
            if let CmEventKind::ConnectRequest { listener, .. } = &e.kind
                && *listener == id
            {
                unseen.push(e.id);
                return false;
            }
            e.id != id
        });
        for request in unseen {
            // Each is alive: nobody else knows of it.
            let _ = self.destroy_id(request);
        }
        self.pump_cm();
        Ok(())
    }

    pub fn cm_local_addr(&self, id: CmId) -> Option<SocketAddr> {
        self.cm.ids.get(id).ok()?.local
    }

    pub fn cm_peer_addr(&self, id: CmId) -> Option<SocketAddr> {
        self.cm.ids.get(id).ok()?.peer
    }

    pub fn poll_cm_event(&mut self) -> Option<CmEvent> {
        self.cm.events.pop_front()
    }
}

/// A request's private data: the address header, where the port space has one, and the user's.
fn request_data(
    space: PortSpace,
    local: SocketAddr,
    peer: SocketAddr,
    user: &[u8],
) -> Result<PrivateData<92>, CmError> {
    if matches!(space, PortSpace::Ib { .. }) {
        check_len(user, MAX_IB_PRIVATE_DATA)?;
        return Ok(padded(user));
    }
    check_len(user, MAX_CONNECT_PRIVATE_DATA)?;
    let header = CmaHeader {
        src_port: local.port(),
        addrs: CmaAddrs::new(local.ip(), peer.ip()).ok_or(CmError::Unreachable)?,
    };
    let mut data = [0; MAX_IB_PRIVATE_DATA];
    let bytes = header.emit();
    data[..bytes.len()].copy_from_slice(&bytes);
    data[bytes.len()..][..user.len()].copy_from_slice(user);
    Ok(PrivateData(data))
}
