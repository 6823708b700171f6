//! RDMA CM calls.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use riser_state::become_state;
use socket2::{Domain, Protocol, Socket, TcpKeepalive, Type};

use super::id::Id;
use super::{Iwarp, PEER_TIME};
use crate::nic::rdma_cm::{IdState, check_destination, forget_events, unspecified};
use crate::rdmap::setup;
use crate::rdmap::wire::start::StartFrame;
use crate::verbs::{
    Access, AltPath, CmError, CmEvent, CmEventKind, CmId, CmOption, ConnParam, PortSpace, QpAttr,
    QpId, QpInitAttr, QpState, QpType, RdmaCm, VerbsError,
};

/// Returns the attributes of a QP used for a connection. Access rights are set per region, so there
/// are no restrictions for the connection.
fn to_init() -> QpAttr {
    QpAttr {
        state: Some(QpState::Init),
        pkey_index: Some(0),
        port: Some(1),
        access: Some(Access::REMOTE),
        ..QpAttr::default()
    }
}

/// Creates a TCP socket with a local address. Accepted connections inherit its options.
fn new_socket(at: SocketAddr, shares_port: bool) -> io::Result<Socket> {
    let socket = Socket::new(
        Domain::for_address(at),
        Type::STREAM.nonblocking(),
        Some(Protocol::TCP),
    )?;
    // Allow the port to be reused while previous connections are in TIME_WAIT.
    socket.set_reuse_address(true)?;
    if shares_port {
        socket.set_reuse_port(true)?;
    }
    socket.set_tcp_nodelay(true)?;
    // Use keepalive to find out if the host has crashed or a cable was unplugged.
    let keepalive = TcpKeepalive::new()
        .with_time(PEER_TIME / 3)
        .with_interval(PEER_TIME / 6)
        .with_retries(4);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(PEER_TIME))?;
    socket.bind(&at.into())?;
    Ok(socket)
}

/// Converts a socket error.
fn refused(e: &io::Error) -> CmError {
    match e.kind() {
        io::ErrorKind::AddrInUse => CmError::AddressInUse,
        io::ErrorKind::AddrNotAvailable => CmError::AddressNotAvailable,
        _ => VerbsError::Os(e.raw_os_error().unwrap_or(libc::EIO)).into(),
    }
}

fn check_len(data: &[u8], max: usize) -> Result<(), CmError> {
    match data.len() {
        len if len > max => Err(CmError::PrivateDataTooLong { len, max }),
        _ => Ok(()),
    }
}

impl Iwarp {
    fn id_mut(&mut self, id: CmId, call: &'static str) -> Result<&mut Id, CmError> {
        self.ids
            .get_mut(id)
            .map_err(|_| CmError::InvalidState(call))
    }

    /// Creates the socket of an id and sets its local address and port.
    fn bind(&mut self, id: CmId, addr: SocketAddr) -> Result<(), CmError> {
        let own = self.config.addr;
        let ip = addr.ip().to_canonical();
        let entry = self.id_mut(id, "bind_addr")?;
        // Like in the software NIC, an unspecified address includes the device address.
        let takes =
            ip.is_ipv4() == own.is_ipv4() || ip.is_ipv6() && !entry.options.is_family_only(ip);
        if ip != own && !(ip.is_unspecified() && takes) {
            return Err(CmError::AddressNotAvailable);
        }
        if addr.port() != 0 {
            let shares = entry.options.reuse;
            self.check_port(id, addr.port(), ip, shares)?;
        }
        let at = SocketAddr::new(own, addr.port());
        let socket = self.new_socket(at).map_err(|e| refused(&e))?;
        let local = socket.local_addr().ok().and_then(|at| at.as_socket());
        let entry = self.id_mut(id, "bind_addr")?;
        entry.bound = Some(ip);
        entry.local = Some(local.unwrap_or(at));
        entry.socket = Some(socket);
        Ok(())
    }

    /// Creates a socket for use by the device.
    pub(super) fn new_socket(&self, at: SocketAddr) -> io::Result<Socket> {
        new_socket(at, self.config.shares_ports)
    }

    /// Checks whether an id can use a port in addition to its current owners on this device. Any
    /// other owners are checked by the kernel.
    fn check_port(&self, id: CmId, port: u16, ip: IpAddr, shares: bool) -> Result<(), CmError> {
        for (owner, entry) in self.ids.iter() {
            let is_there = entry.local.is_some_and(|at| at.port() == port);
            let Some(theirs) = entry.bound.filter(|_| is_there && owner != id) else {
                continue;
            };
            if shares && entry.options.reuse {
                continue;
            }
            if ip.is_unspecified() || theirs.is_unspecified() {
                return Err(CmError::AddressNotAvailable);
            }
            return Err(CmError::AddressInUse);
        }
        Ok(())
    }

    /// Destroys all ids when a process exits.
    pub fn destroy_ids(&mut self) {
        let all: Vec<CmId> = self.ids.iter().map(|(id, _)| id).collect();
        for id in all {
            // Pending requests have already been destroyed with their listener.
            let _ = self.destroy_id(id);
        }
    }
}

impl RdmaCm for Iwarp {
    fn create_id_for(&mut self, space: PortSpace, qp_type: QpType) -> Result<CmId, CmError> {
        if qp_type != QpType::Rc {
            return Err(VerbsError::Unsupported("connections of this type").into());
        }
        if !matches!(space, PortSpace::Tcp | PortSpace::IbIp) {
            return Err(VerbsError::Unsupported("port space").into());
        }
        self.ids.insert(Id::new()).map_err(|_| CmError::TooManyIds)
    }

    fn set_option(&mut self, id: CmId, option: CmOption) -> Result<(), CmError> {
        self.id_mut(id, "set_option")?.set(option)
    }

    fn bind_addr(&mut self, id: CmId, addr: SocketAddr) -> Result<(), CmError> {
        if self.id_mut(id, "bind_addr")?.state != IdState::Idle {
            return Err(CmError::InvalidState("bind_addr"));
        }
        self.bind(id, addr)?;
        become_state(&mut self.id_mut(id, "bind_addr")?.state, IdState::Bound);
        Ok(())
    }

    fn resolve_addr(
        &mut self,
        id: CmId,
        src: Option<SocketAddr>,
        dst: SocketAddr,
        _timeout: Duration,
    ) -> Result<(), CmError> {
        let own = self.config.addr;
        let entry = self.id_mut(id, "resolve_addr")?;
        if !matches!(entry.state, IdState::Idle | IdState::Bound) {
            return Err(CmError::InvalidState("resolve_addr"));
        }
        let is_bound = entry.local.is_some();
        let dst = SocketAddr::new(dst.ip().to_canonical(), dst.port());
        // Report errors using an event, like librdmacm does for errors during resolution.
        let outcome = check_destination(own, dst.ip(), false).and_then(|()| match is_bound {
            true => Ok(()),
            false => self.bind(id, src.unwrap_or(SocketAddr::new(own, 0))),
        });
        let kind = match outcome {
            Ok(()) => {
                let entry = self.id_mut(id, "resolve_addr")?;
                entry.peer = Some(dst);
                become_state(&mut entry.state, IdState::AddrResolved);
                CmEventKind::AddrResolved
            }
            Err(e) => CmEventKind::AddrError(e),
        };
        self.report(id, kind);
        Ok(())
    }

    fn resolve_route(&mut self, id: CmId, _timeout: Duration) -> Result<(), CmError> {
        let entry = self.id_mut(id, "resolve_route")?;
        if entry.state != IdState::AddrResolved {
            return Err(CmError::InvalidState("resolve_route"));
        }
        become_state(&mut entry.state, IdState::RouteResolved);
        self.report(id, CmEventKind::RouteResolved);
        Ok(())
    }

    fn create_cm_qp(&mut self, id: CmId, init: &QpInitAttr) -> Result<QpId, CmError> {
        let qp = self.id_mut(id, "create_cm_qp")?.qp;
        let has_qp = qp.is_some_and(|qp| self.device.qp_num(qp).is_ok());
        let entry = self.id_mut(id, "create_cm_qp")?;
        let has_device = matches!(
            entry.state,
            IdState::Bound | IdState::AddrResolved | IdState::RouteResolved | IdState::Requested
        );
        if !has_device || has_qp {
            return Err(CmError::InvalidState("create_cm_qp"));
        }
        if init.qp_type != QpType::Rc {
            return Err(VerbsError::WrongQpType("connection identifier").into());
        }
        let qp = self.device.create_qp(init)?;
        if let Err(e) = self.device.modify_qp(qp, &to_init()) {
            // We have just created it, so it can be destroyed.
            let _ = self.device.destroy_qp(qp);
            return Err(e.into());
        }
        self.id_mut(id, "create_cm_qp")?.qp = Some(qp);
        Ok(qp)
    }

    fn listen(&mut self, id: CmId, backlog: u32) -> Result<(), CmError> {
        self.tick();
        match self.id_mut(id, "listen")?.state {
            IdState::Bound => {}
            IdState::Idle => {
                let any = unspecified(self.config.addr);
                self.bind_addr(id, SocketAddr::new(any, 0))?;
            }
            _ => return Err(CmError::InvalidState("listen")),
        }
        let entry = self.id_mut(id, "listen")?;
        let (port, ip) = (entry.local.map_or(0, |at| at.port()), entry.bound);
        if let Some(ip) = ip {
            self.check_port(id, port, ip, false)?;
        }
        let entry = self.id_mut(id, "listen")?;
        let socket = entry
            .socket
            .as_ref()
            .ok_or(CmError::InvalidState("listen"))?;
        // The kernel can queue more connections than the owner's backlog, so they won't be
        // rejected.
        socket.listen(1024).map_err(|e| refused(&e))?;
        entry.backlog = backlog.max(1) as usize;
        entry.options.reuse = false;
        become_state(&mut entry.state, IdState::Listening);
        self.attend_listener(id).map_err(|e| refused(&e))
    }

    fn connect(&mut self, id: CmId, param: &ConnParam) -> Result<(), CmError> {
        self.tick();
        let entry = self.id_mut(id, "connect")?;
        let (Some(local), Some(peer)) = (entry.local, entry.peer) else {
            return Err(CmError::InvalidState("connect"));
        };
        if entry.state != IdState::RouteResolved {
            return Err(CmError::InvalidState("connect"));
        }
        let qp = entry
            .qp
            .ok_or(CmError::InvalidState("a connection without a queue pair"))?;
        let wishes = self.wishes(param.responder_resources, param.initiator_depth);
        let request = setup::request(&wishes, Vec::new());
        let room = StartFrame::room(request.enhanced.is_some());
        check_len(&param.private_data, room)?;
        let request = setup::request(&wishes, param.private_data.clone());
        let entry = self.id_mut(id, "connect")?;
        let socket = entry
            .socket
            .take()
            .ok_or(CmError::InvalidState("connect"))?;
        entry.param = Some(param.clone());
        become_state(&mut entry.state, IdState::Connecting);
        self.dial(id, qp, socket, (local, peer), request);
        Ok(())
    }

    fn init_qp_attr(&self, id: CmId, state: QpState) -> Result<QpAttr, CmError> {
        let entry = self.ids.get(id);
        let entry = entry.map_err(|_| CmError::InvalidState("init_qp_attr"))?;
        match state {
            QpState::Init if entry.local.is_some() => Ok(to_init()),
            QpState::Init => Err(CmError::InvalidState("init_qp_attr")),
            QpState::Rtr | QpState::Rts => {
                Err(VerbsError::Unsupported("connections without the connection manager").into())
            }
            _ => Err(VerbsError::InvalidParameter("queue pair state").into()),
        }
    }

    fn accept(&mut self, id: CmId, param: &ConnParam) -> Result<(), CmError> {
        self.tick();
        let entry = self.id_mut(id, "accept")?;
        let (IdState::Requested, Some(token)) = (entry.state, entry.conn) else {
            return Err(CmError::InvalidState("accept"));
        };
        let qp = entry
            .qp
            .ok_or(CmError::InvalidState("a connection without a queue pair"))?;
        let wishes = self.wishes(param.responder_resources, param.initiator_depth);
        let conn = self.conns.get(&token);
        let request = conn
            .and_then(|conn| conn.request.clone())
            .ok_or(CmError::InvalidState("accept"))?;
        let room = StartFrame::room(request.enhanced.is_some());
        check_len(&param.private_data, room)?;
        let (reply, agreed) = setup::reply(&request, &wishes, param.private_data.clone())
            // Requests using any other revision have already been rejected.
            .map_err(|_| CmError::InvalidState("accept"))?;
        let establishes = reply.enhanced.is_some_and(|said| said.peer_to_peer);
        self.respond_to_request(id, token, qp, &reply, agreed, establishes)
    }

    fn establish(&mut self, id: CmId) -> Result<(), CmError> {
        // The state of QPs is always managed by the device, so we never need to wait for the
        // application.
        self.id_mut(id, "establish")?;
        Err(CmError::InvalidState("establish"))
    }

    fn reject(&mut self, id: CmId, private_data: &[u8]) -> Result<(), CmError> {
        self.tick();
        let entry = self.id_mut(id, "reject")?;
        let (IdState::Requested, Some(token)) = (entry.state, entry.conn) else {
            return Err(CmError::InvalidState("reject"));
        };
        let request = self
            .conns
            .get(&token)
            .and_then(|conn| conn.request.as_ref());
        let is_enhanced = request.is_some_and(|request| request.enhanced.is_some());
        check_len(private_data, StartFrame::room(is_enhanced))?;
        self.refuse_request(token, private_data);
        let entry = self.id_mut(id, "reject")?;
        become_state(&mut entry.state, IdState::Closed);
        entry.conn = None;
        Ok(())
    }

    fn reject_ece(&mut self, id: CmId, private_data: &[u8]) -> Result<(), CmError> {
        // Vendor options and reject reasons are not supported.
        self.reject(id, private_data)
    }

    fn mra(&mut self, id: CmId) -> Result<(), CmError> {
        match self.id_mut(id, "mra")?.state {
            // A peer will wait while its TCP connection is open.
            IdState::Requested => Ok(()),
            _ => Err(CmError::InvalidState("mra")),
        }
    }

    fn notify_established(&mut self, id: CmId) -> Result<(), CmError> {
        match self.id_mut(id, "notify_established")?.state {
            IdState::Accepting => {
                self.on_established(id, ConnParam::default());
                Ok(())
            }
            _ => Err(CmError::InvalidState("notify_established")),
        }
    }

    fn disconnect(&mut self, id: CmId) -> Result<(), CmError> {
        self.tick();
        let entry = self.id_mut(id, "disconnect")?;
        match (entry.state, entry.conn) {
            (IdState::Established, Some(token)) => {
                become_state(&mut entry.state, IdState::Disconnecting);
                self.close_conn(token);
                Ok(())
            }
            (IdState::Connecting | IdState::Accepting, Some(token)) => {
                become_state(&mut entry.state, IdState::Closed);
                entry.conn = None;
                self.drop_conn(token);
                self.report(id, CmEventKind::Disconnected);
                Ok(())
            }
            (IdState::Disconnecting | IdState::Closed, _) => Ok(()),
            _ => Err(CmError::InvalidState("disconnect")),
        }
    }

    fn load_alternate_path(&mut self, id: CmId, _path: &AltPath) -> Result<(), CmError> {
        self.id_mut(id, "load_alternate_path")?;
        Err(VerbsError::Unsupported("alternate paths").into())
    }

    fn join_multicast(
        &mut self,
        id: CmId,
        _group: IpAddr,
        _send_only: bool,
    ) -> Result<(), CmError> {
        self.id_mut(id, "join_multicast")?;
        Err(VerbsError::Unsupported("multicast groups").into())
    }

    fn leave_multicast(&mut self, id: CmId, _group: IpAddr) -> Result<(), CmError> {
        self.id_mut(id, "leave_multicast")?;
        Err(CmError::AddressNotAvailable)
    }

    fn destroy_id(&mut self, id: CmId) -> Result<(), CmError> {
        self.tick();
        let entry = self.ids.remove(id);
        let entry = entry.map_err(|_| CmError::InvalidState("destroy_id"))?;
        if let Some(token) = entry.conn {
            match entry.state {
                IdState::Requested => self.refuse_request(token, &[]),
                IdState::Established => self.close_conn(token),
                // It will be closed without any further calls.
                IdState::Disconnecting => {}
                _ => self.drop_conn(token),
            }
            if let Some(conn) = self.conns.get_mut(&token) {
                conn.id = None;
            }
        }
        if let Some(listener) = entry.listener {
            self.on_request_completed(listener);
        }
        self.forget_listener(id, entry.listening);
        // Requests the application hasn't seen yet are destroyed with their listener.
        for request in forget_events(&mut self.events, id) {
            // This can't fail, because only this event refers to it.
            let _ = self.destroy_id(request);
        }
        Ok(())
    }

    fn local_addr(&self, id: CmId) -> Option<SocketAddr> {
        self.ids.get(id).ok()?.local
    }

    fn peer_addr(&self, id: CmId) -> Option<SocketAddr> {
        self.ids.get(id).ok()?.peer
    }

    fn poll_cm_event(&mut self) -> Option<CmEvent> {
        self.events.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silent_peer_of_listener_times_out() {
        let any = SocketAddr::new(std::net::Ipv4Addr::LOCALHOST.into(), 0);
        let listener = new_socket(any, false).unwrap();
        listener.listen(1).unwrap();
        listener.set_nonblocking(false).unwrap();
        let at = listener.local_addr().unwrap().as_socket().unwrap();
        let _peer = std::net::TcpStream::connect(at).unwrap();
        let (socket, _) = listener.accept().unwrap();
        assert!(socket.keepalive().unwrap() && socket.tcp_nodelay().unwrap());
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(PEER_TIME));
        assert_eq!(socket.tcp_keepalive_time().unwrap(), PEER_TIME / 3);
    }
}
