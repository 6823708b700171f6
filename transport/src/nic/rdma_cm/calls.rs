//! Identifiers, addresses and listeners: calls used before and after a connection.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use riser_state::become_state;

use super::qp_attr::new_psn;
use super::{CmAgent, Id, IdState};
use crate::cm::IbCmError;
use crate::nic::Device;
use crate::verbs::{
    CmError, CmEvent, CmEventKind, CmId, PortSpace, QpId, QpInitAttr, QpState, QpType, VerbsError,
};
use crate::wire::cm_msg::{CommId, ServiceId};
use crate::wire::cma::RdmaPortSpace;
use crate::wire::{Mad, is_link_local};

impl From<IbCmError> for CmError {
    fn from(e: IbCmError) -> Self {
        match e {
            IbCmError::NoSuchId => Self::InvalidState("this call on a closed connection"),
            IbCmError::State { .. } => Self::InvalidState("this call"),
            IbCmError::TooManyIds => Self::TooManyIds,
            IbCmError::ServiceIdInUse => Self::AddressInUse,
            IbCmError::AlternatePaths => Self::InvalidState("alternate paths"),
        }
    }
}

/// States a datagram QP goes through when it is created.
const DATAGRAM_STATES: [QpState; 3] = [QpState::Init, QpState::Rtr, QpState::Rts];

/// Returns the port space used by an id. A bare service id does not use any port space.
#[must_use]
pub fn port_space(space: PortSpace) -> Option<RdmaPortSpace> {
    match space {
        PortSpace::Tcp => Some(RdmaPortSpace::Tcp),
        PortSpace::Udp => Some(RdmaPortSpace::Udp),
        PortSpace::IpoIb => Some(RdmaPortSpace::IpoIb),
        PortSpace::IbIp => Some(RdmaPortSpace::Ib),
        PortSpace::Ib { .. } => None,
    }
}

/// Returns the service id and mask for an id with this port.
pub(super) fn service_id(space: PortSpace, port: u16) -> (ServiceId, u64) {
    match (space, port_space(space)) {
        (PortSpace::Ib { service_id, mask }, _) => (ServiceId(service_id), mask),
        (_, Some(ports)) => (ports.service_id(port), u64::MAX),
        (_, None) => unreachable!("every other identifier has ports"),
    }
}

/// Checks if a destination address can be used on a device at `own`.
///
/// # Errors
/// Returns the error to be reported to the application.
pub(crate) fn check_destination(
    own: IpAddr,
    dst: IpAddr,
    takes_groups: bool,
) -> Result<(), CmError> {
    if is_link_local(dst) {
        return Err(CmError::LinkLocal);
    }
    let names_no_host = dst.is_unspecified() || dst.is_multicast() && !takes_groups;
    match dst.is_ipv4() != own.is_ipv4() || names_no_host {
        true => Err(CmError::Unreachable),
        false => Ok(()),
    }
}

/// Returns the unspecified address of this address family.
pub(crate) fn unspecified(family: IpAddr) -> IpAddr {
    match family {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// Removes the events of an id that is being destroyed. Returns the connection requests which the
/// application has not seen yet: these must be destroyed as well, since nothing else refers to
/// them.
pub(crate) fn forget_events(events: &mut VecDeque<CmEvent>, id: CmId) -> Vec<CmId> {
    let mut unseen = Vec::new();
    events.retain(|e| {
        if let CmEventKind::ConnectRequest { listener, .. } = &e.kind
            && *listener == id
        {
            unseen.push(e.id);
            return false;
        }
        e.id != id
    });
    unseen
}

impl CmAgent {
    pub(super) fn cm_id(&mut self, id: CmId, call: &'static str) -> Result<&mut Id, CmError> {
        self.ids
            .get_mut(id)
            .map_err(|_| CmError::InvalidState(call))
    }

    pub(crate) fn create_id_for(
        &mut self,
        device: &mut Device,
        space: PortSpace,
        qp_type: QpType,
    ) -> Result<CmId, CmError> {
        if matches!(qp_type, QpType::Gsi | QpType::Smi | QpType::RawPacket) {
            return Err(VerbsError::WrongQpType("connection identifier").into());
        }
        let rq_psn = new_psn(device);
        self.ids
            .insert(Id::new(space, qp_type, rq_psn))
            .map_err(|_| CmError::TooManyIds)
    }

    pub(crate) fn bind_addr(
        &mut self,
        device: &mut Device,
        id: CmId,
        addr: SocketAddr,
    ) -> Result<(), CmError> {
        let entry = self.cm_id(id, "bind_addr")?;
        if entry.state != IdState::Idle {
            return Err(CmError::InvalidState("bind_addr"));
        }
        self.bind(device, id, addr)?;
        become_state(&mut self.cm_id(id, "bind_addr")?.state, IdState::Bound);
        Ok(())
    }

    pub(crate) fn resolve_addr(
        &mut self,
        device: &mut Device,
        id: CmId,
        src: Option<SocketAddr>,
        dst: SocketAddr,
        _timeout: Duration,
    ) -> Result<(), CmError> {
        let own = device.port.addr().ip();
        let entry = self.cm_id(id, "resolve_addr")?;
        if !matches!(entry.state, IdState::Idle | IdState::Bound) {
            return Err(CmError::InvalidState("resolve_addr"));
        }
        let is_bound = entry.local.is_some();
        let takes_groups = entry.qp_type == QpType::Ud;
        let dst = SocketAddr::new(dst.ip().to_canonical(), dst.port());
        // Report errors using an event, like librdmacm does for errors during resolution.
        let outcome =
            check_destination(own, dst.ip(), takes_groups).and_then(|()| match is_bound {
                true => Ok(()),
                false => self.bind(device, id, src.unwrap_or(SocketAddr::new(own, 0))),
            });
        let kind = match outcome {
            Ok(()) => {
                let entry = self.cm_id(id, "resolve_addr")?;
                entry.peer = Some(dst);
                become_state(&mut entry.state, IdState::AddrResolved);
                CmEventKind::AddrResolved
            }
            Err(e) => CmEventKind::AddrError(e),
        };
        self.report(id, kind);
        Ok(())
    }

    pub(crate) fn resolve_route(&mut self, id: CmId, _timeout: Duration) -> Result<(), CmError> {
        let entry = self.cm_id(id, "resolve_route")?;
        if entry.state != IdState::AddrResolved {
            return Err(CmError::InvalidState("resolve_route"));
        }
        become_state(&mut entry.state, IdState::RouteResolved);
        self.report(id, CmEventKind::RouteResolved);
        Ok(())
    }

    pub(crate) fn create_cm_qp(
        &mut self,
        device: &mut Device,
        id: CmId,
        init: &QpInitAttr,
    ) -> Result<QpId, CmError> {
        let entry = self.cm_id(id, "create_cm_qp")?;
        // As in librdmacm, an id is only assigned to a device once it has an address.
        let has_device = matches!(
            entry.state,
            IdState::Bound | IdState::AddrResolved | IdState::RouteResolved | IdState::Requested
        );
        if !has_device || entry.qp.is_some() {
            return Err(CmError::InvalidState("create_cm_qp"));
        }
        if init.qp_type != entry.qp_type {
            return Err(VerbsError::WrongQpType("connection identifier").into());
        }
        let qp = device.create_qp(init)?;
        let ready = match init.qp_type {
            QpType::Ud => &DATAGRAM_STATES[..],
            _ => &[QpState::Init],
        };
        // There is no peer to wait for when using datagrams.
        let ready = ready
            .iter()
            .try_for_each(|state| self.move_qp(device, id, qp, *state));
        if let Err(e) = ready {
            // We have just created it, so it can be destroyed.
            let _ = device.destroy_qp(qp);
            return Err(e);
        }
        self.cm_id(id, "create_cm_qp")?.qp = Some(qp);
        self.by_qp.insert(qp, id);
        Ok(qp)
    }

    pub(crate) fn listen(
        &mut self,
        device: &mut Device,
        id: CmId,
        backlog: u32,
    ) -> Result<(), CmError> {
        let entry = self.cm_id(id, "listen")?;
        let is_bare = matches!(entry.space, PortSpace::Ib { .. });
        match entry.state {
            IdState::Bound => {}
            // You don't need an address to listen on a bare service id.
            IdState::Idle if is_bare => {}
            IdState::Idle => {
                let any = unspecified(device.port.addr().ip());
                self.bind_addr(device, id, SocketAddr::new(any, 0))?;
            }
            _ => return Err(CmError::InvalidState("listen")),
        }
        self.check_sole_owner(id)?;
        let entry = self.cm_id(id, "listen")?;
        let port = entry.local.map_or(0, |a| a.port());
        let (service, mask) = service_id(entry.space, port);
        // A backlog of 0 would drop all requests.
        let ib = self.cm.listen(service, mask, backlog.max(1) as usize)?;
        let entry = self.cm_id(id, "listen")?;
        // Nothing else can bind to this port now.
        entry.options.reuse = false;
        entry.ib = Some(ib);
        become_state(&mut entry.state, IdState::Listening);
        self.by_ib.insert(ib, id);
        Ok(())
    }

    pub(crate) fn destroy_id(&mut self, device: &mut Device, id: CmId) -> Result<(), CmError> {
        let entry = self
            .ids
            .remove(id)
            .map_err(|_| CmError::InvalidState("destroy_id"))?;
        self.leave_port(id, &entry);
        // Keep the QP: it is owned by the application, which can destroy it before or after its id.
        if let Some(qp) = entry.qp {
            self.by_qp.remove(&qp);
        }
        if let Some(ib) = entry.ib {
            self.by_ib.remove(&ib);
            // We can ignore the error if the IB CM has already removed this id.
            let _ = self.cm.destroy(device.now(), ib);
        }
        for request in forget_events(&mut self.events, id) {
            // This can't fail, because only this event refers to it.
            let _ = self.destroy_id(device, request);
        }
        // When a connection is released, we need to send a REJ or DREQ.
        self.pump_cm(device);
        Ok(())
    }

    /// Destroys all ids when a process exits.
    pub(crate) fn destroy_ids(&mut self, device: &mut Device) {
        let all: Vec<CmId> = self.ids.iter().map(|(id, _)| id).collect();
        for id in all {
            // Pending requests have already been destroyed with their listener.
            let _ = self.destroy_id(device, id);
        }
    }

    /// See [`Cm::watch_connections`](crate::cm::Cm::watch_connections).
    pub(crate) fn watch_connections(&mut self) {
        self.cm.watch_connections();
    }

    /// See [`Cm::poll_connection`](crate::cm::Cm::poll_connection).
    pub(crate) fn poll_connection(&mut self) -> Option<(CommId, Option<(IpAddr, Mad)>)> {
        self.cm.poll_connection()
    }

    pub(crate) fn local_addr(&self, id: CmId) -> Option<SocketAddr> {
        self.ids.get(id).ok()?.local
    }

    pub(crate) fn peer_addr(&self, id: CmId) -> Option<SocketAddr> {
        self.ids.get(id).ok()?.peer
    }

    pub(crate) fn poll_event(&mut self) -> Option<CmEvent> {
        self.events.pop_front()
    }

    /// Returns whether an event is available.
    pub(crate) fn has_events(&self) -> bool {
        !self.events.is_empty()
    }
}
