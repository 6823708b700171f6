//! Connections using librdmacm.
//!
//! librdmacm changes the state of queue pairs created by [`RdmaCm::create_cm_qp`]. If an identifier
//! is destroyed before its queue pair, we need to keep it until the queue pair is destroyed as
//! well, because the library releases both at the same time. Events for this identifier are dropped
//! until then.
//!
//! The library uses the port space to determine the queue pair type of an identifier. Only
//! `rdma_create_ep` can set a different type, for the port space without a fixed type
//! (`RDMA_PS_IB`), but it also binds or resolves the identifier. Therefore we don't create such an
//! identifier in the library until it is bound.

use std::collections::{HashMap, VecDeque};
use std::mem::discriminant;
use std::net::{IpAddr, SocketAddr};
use std::ptr;
use std::time::Duration;

use riser_rdma_core_sys::bindings::*;
use riser_rdma_core_sys::{
    Cm, JOIN_MC_ADDRESS, JOIN_MC_FLAGS, JOIN_MC_FULL_MEMBER, JOIN_MC_SEND_ONLY,
    rdma_cm_join_mc_attr_ex,
};

use super::convert::{self, SockAddr, checked_cm, event_error, reject_reason, socket_addr};
use super::objects::{Id, IdState, MANY};
use crate::table::Table;
use crate::verbs::*;

fn millis(timeout: Duration) -> i32 {
    i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX)
}

fn fits(private_data: &[u8], max: usize) -> Result<(), CmError> {
    let len = private_data.len();
    if len > max {
        Err(CmError::PrivateDataTooLong { len, max })
    } else {
        Ok(())
    }
}

/// Connection identifiers of a device and their events.
pub(super) struct Connections {
    cm: Cm,
    pub(super) channel: *mut rdma_event_channel,
    addr: IpAddr,
    pub(super) ids: Table<CmId, Id>,
    by_id: HashMap<usize, CmId>,
    events: VecDeque<CmEvent>,
    /// Set if the library has reported that the device was removed.
    is_removed: bool,
}

impl Connections {
    /// Creates an empty table. The channel must be open while the table is used.
    pub(super) fn new(cm: Cm, channel: *mut rdma_event_channel, addr: IpAddr) -> Self {
        Self {
            cm,
            channel,
            addr,
            ids: Table::new("connection identifiers", MANY),
            by_id: HashMap::new(),
            events: VecDeque::new(),
            is_removed: false,
        }
    }

    /// Returns whether events are available.
    pub(super) fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Returns whether the library has reported that the device was removed.
    pub(super) fn is_removed(&self) -> bool {
        self.is_removed
    }

    fn id(&self, id: CmId, call: &'static str) -> Result<&Id, CmError> {
        self.ids
            .get(id)
            .ok()
            // If the application has destroyed an id that is waiting for the QP, it cannot be used
            // for calls.
            .filter(|i| !i.zombie)
            .ok_or(CmError::InvalidState(call))
    }

    fn id_ptr(&self, id: CmId, call: &'static str) -> Result<*mut rdma_cm_id, CmError> {
        self.id(id, call).map(|i| i.ptr)
    }

    fn enter(&mut self, ptr: *mut rdma_cm_id, qp_type: QpType) -> Result<CmId, CmError> {
        let entry = Id {
            ptr,
            early: Vec::new(),
            qp_type,
            qp: None,
            state: IdState::Idle,
            offered: 0,
            zombie: false,
        };
        let id = self.ids.insert(entry).map_err(|_| CmError::TooManyIds)?;
        if !ptr.is_null() {
            self.by_id.insert(ptr as usize, id);
        }
        Ok(id)
    }

    /// Creates an id in the library and binds it to an address, if the QP type is not given by the
    /// port space.
    fn make_bound(&mut self, id: CmId, addr: SocketAddr) -> Result<(), CmError> {
        if addr.ip() != self.addr {
            return Err(CmError::AddressNotAvailable);
        }
        let entry = self.id(id, "bind")?;
        let kind = convert::qp_type(entry.qp_type);
        let kind = kind.ok_or(VerbsError::WrongQpType("connection identifier"))?;
        let early = entry.early.clone();
        let mut at = SockAddr::new(addr);
        let mut info = rdma_addrinfo {
            ai_flags: RAI_PASSIVE as i32,
            ai_qp_type: kind as i32,
            ai_port_space: RDMA_PS_IB as i32,
            ai_src_len: at.length(),
            ai_src_addr: at.as_mut_ptr(),
            ..Default::default()
        };
        let (cm, mut ptr) = (self.cm, ptr::null_mut());
        let none = ptr::null_mut();
        // SAFETY: the address outlives the call, and the id is an output parameter.
        checked_cm(unsafe {
            (cm.rdma_create_ep)(&raw mut ptr, &raw mut info, none, ptr::null_mut())
        })?;
        if ptr.is_null() {
            return Err(VerbsError::Os(libc::EIO).into());
        }
        // SAFETY: the id has just been created, and the channel is open. Calls were blocking until
        // now, but will report their result using events after this.
        let mut made = checked_cm(unsafe { (cm.rdma_migrate_id)(ptr, self.channel) });
        for option in early {
            made = made.and_then(|()| self.set_on(ptr, option));
        }
        made.inspect_err(|_| {
            // SAFETY: there are no other references to the id.
            unsafe { (cm.rdma_destroy_id)(ptr) };
        })?;
        let entry = self.ids.get_mut(id)?;
        entry.ptr = ptr;
        entry.early = Vec::new();
        self.by_id.insert(ptr as usize, id);
        self.set_state(id, IdState::Bound);
        Ok(())
    }

    /// Sets an option supported by the library.
    fn set_on(&self, ptr: *mut rdma_cm_id, option: CmOption) -> Result<(), CmError> {
        let level = RDMA_OPTION_ID as i32;
        let set = |name: u32, value: *mut libc::c_void, len: usize| {
            // SAFETY: the id is alive. The value has the size required for this option, and
            // outlives the call.
            let set = unsafe { (self.cm.rdma_set_option)(ptr, level, name as i32, value, len) };
            checked_cm(set)
        };
        match option {
            CmOption::TypeOfService(mut value) => {
                set(RDMA_OPTION_ID_TOS, (&raw mut value).cast(), 1)
            }
            CmOption::AckTimeout(mut value) => {
                set(RDMA_OPTION_ID_ACK_TIMEOUT, (&raw mut value).cast(), 1)
            }
            CmOption::ReuseAddress(value) => {
                let mut value = i32::from(value);
                set(RDMA_OPTION_ID_REUSEADDR, (&raw mut value).cast(), 4)
            }
            CmOption::AddressFamilyOnly(value) => {
                let mut value = i32::from(value);
                set(RDMA_OPTION_ID_AFONLY, (&raw mut value).cast(), 4)
            }
            CmOption::BareRequests(false) => Ok(()),
            CmOption::BareRequests(true) => Err(VerbsError::Unsupported("AF_IB address").into()),
            CmOption::PathMtu(_) => Err(VerbsError::Unsupported("path of a request").into()),
            // The kernel rejects alternate paths, or loads them if supported by the adapter.
            CmOption::AlternatePaths(_) => Err(VerbsError::Unsupported("alternate paths").into()),
            // The kernel reports the reason of a rejection, but not the port.
            CmOption::Redirects(0) => Ok(()),
            CmOption::Redirects(_) => Err(VerbsError::Unsupported("redirection").into()),
        }
    }

    /// Passes vendor options to the library if the QP is managed by the application. For its own
    /// QPs, the library gets the options from the QP.
    fn apply_ece(&self, id: CmId, param: &ConnParam, call: &'static str) -> Result<(), CmError> {
        let entry = self.id(id, call)?;
        // Otherwise, the library doesn't accept options, and does not set any by default.
        if entry.qp.is_some() || entry.qp_type == QpType::Ud || param.ece.vendor_id == 0 {
            return Ok(());
        }
        let mut ece = convert::ece(param.ece);
        // SAFETY: the id is alive.
        checked_cm(unsafe { (self.cm.rdma_set_local_ece)(entry.ptr, &raw mut ece) })
    }

    /// Returns the vendor options from the last message of the peer. This is empty if the library
    /// has a QP, since it will pass them to the QP instead.
    fn peer_ece(&self, ptr: *mut rdma_cm_id) -> Ece {
        let mut ece = ibv_ece::default();
        // SAFETY: the id is alive.
        match unsafe { (self.cm.rdma_get_remote_ece)(ptr, &raw mut ece) } {
            0 => Ece {
                vendor_id: ece.vendor_id,
                options: ece.options,
            },
            _ => Ece::default(),
        }
    }

    fn free_id(&mut self, id: CmId) {
        if let Ok(entry) = self.ids.remove(id)
            && !entry.ptr.is_null()
        {
            self.by_id.remove(&(entry.ptr as usize));
            // SAFETY: the id has just been removed from the table, and has no QP and no events.
            unsafe { (self.cm.rdma_destroy_id)(entry.ptr) };
        }
    }

    /// Destroys the QP of an id, and the id itself if it was only waiting for this.
    pub(super) fn destroy_qp(&mut self, owner: CmId) {
        let Ok(entry) = self.ids.get_mut(owner) else {
            return;
        };
        entry.qp = None;
        // SAFETY: the id is alive, and its QP was created by librdmacm.
        unsafe { (self.cm.rdma_destroy_qp)(entry.ptr) };
        // The id was waiting for this.
        if entry.zombie {
            self.free_id(owner);
        }
    }

    /// Handles all available events of the channel.
    pub(super) fn reap_events(&mut self) -> usize {
        let mut count = 0;
        loop {
            let mut event = ptr::null_mut();
            // SAFETY: the channel is open and non-blocking.
            if unsafe { (self.cm.rdma_get_cm_event)(self.channel, &raw mut event) } != 0 {
                return count;
            }
            count += 1;
            // SAFETY: we have just received the event, which is valid until we acknowledge it.
            let theirs = unsafe { &*event };
            let ours = self.on_event(theirs);
            let is_request = theirs.event == RDMA_CM_EVENT_CONNECT_REQUEST;
            let refused = (is_request && ours.is_none()).then_some(theirs.id);
            let refused = refused.filter(|request| !request.is_null());
            // SAFETY: the event is not used after this.
            unsafe { (self.cm.rdma_ack_cm_event)(event) };
            self.events.extend(ours);
            if let Some(request) = refused {
                self.refuse(request);
            }
        }
    }

    /// Rejects a request if it can't be reported to the application because there is no space for
    /// its id, or because the listener or the address is unknown. This must be called after
    /// acknowledging the event: the library waits for this before it destroys an id.
    fn refuse(&mut self, request: *mut rdma_cm_id) {
        // SAFETY: the id was created for this request and is only used by our table.
        unsafe { (self.cm.rdma_reject)(request, ptr::null(), 0) };
        match self.by_id.get(&(request as usize)) {
            Some(&id) => self.free_id(id),
            None => {
                // SAFETY: same as above; it is not in the table either.
                unsafe { (self.cm.rdma_destroy_id)(request) };
            }
        }
    }

    fn on_event(&mut self, event: &rdma_cm_event) -> Option<CmEvent> {
        // Our own probe will receive this event even if the application does not have an id.
        self.is_removed |= event.event == RDMA_CM_EVENT_DEVICE_REMOVAL;
        // A request has a new id, which was not created by us.
        let id = if event.event == RDMA_CM_EVENT_CONNECT_REQUEST {
            let listener = *self.by_id.get(&(event.listen_id as usize))?;
            let qp_type = self.ids.get(listener).ok()?.qp_type;
            let is_there = !event.id.is_null();
            is_there.then(|| self.enter(event.id, qp_type).ok())??
        } else {
            *self.by_id.get(&(event.id as usize))?
        };
        let is_ud = self.ids.get(id).is_ok_and(|i| i.qp_type == QpType::Ud);
        let param = || match is_ud {
            // SAFETY: the event is valid, and a datagram id uses datagram parameters.
            true => unsafe { convert::ud_param_of(&event.param.ud) },
            // SAFETY: any other id uses connection parameters.
            false => unsafe { convert::conn_param_of(&event.param.conn) },
        };
        if self.ids.get(id).is_ok_and(|i| i.zombie) {
            // The application has destroyed this id and doesn't expect more events.
            return None;
        }
        self.follow(id, event);
        let with_ece = |param| match is_ud {
            true => param,
            false => ConnParam {
                ece: self.peer_ece(event.id),
                ..param
            },
        };
        let kind = match event.event {
            RDMA_CM_EVENT_ADDR_RESOLVED => CmEventKind::AddrResolved,
            RDMA_CM_EVENT_ADDR_ERROR => CmEventKind::AddrError(event_error(event.status)),
            RDMA_CM_EVENT_ROUTE_RESOLVED => CmEventKind::RouteResolved,
            RDMA_CM_EVENT_ROUTE_ERROR => CmEventKind::RouteError(event_error(event.status)),
            RDMA_CM_EVENT_CONNECT_REQUEST => CmEventKind::ConnectRequest {
                listener: *self.by_id.get(&(event.listen_id as usize))?,
                peer: self.peer_addr(id)?,
                param: with_ece(param()),
            },
            RDMA_CM_EVENT_CONNECT_RESPONSE => CmEventKind::ConnectResponse {
                param: with_ece(param()),
            },
            RDMA_CM_EVENT_CONNECT_ERROR => CmEventKind::ConnectError(event_error(event.status)),
            // The library creates this event from the status of a SIDR_REP.
            RDMA_CM_EVENT_UNREACHABLE if is_ud && event.status > 0 => CmEventKind::Rejected {
                reason: u16::try_from(event.status).unwrap_or(u16::MAX),
                private_data: param().private_data,
            },
            RDMA_CM_EVENT_UNREACHABLE => CmEventKind::Unreachable,
            RDMA_CM_EVENT_REJECTED => CmEventKind::Rejected {
                reason: reject_reason(event.status),
                private_data: param().private_data,
            },
            RDMA_CM_EVENT_ESTABLISHED => CmEventKind::Established { param: param() },
            RDMA_CM_EVENT_DISCONNECTED => CmEventKind::Disconnected,
            RDMA_CM_EVENT_DEVICE_REMOVAL => CmEventKind::DeviceRemoval,
            RDMA_CM_EVENT_TIMEWAIT_EXIT => CmEventKind::TimewaitExit,
            RDMA_CM_EVENT_MULTICAST_JOIN => CmEventKind::MulticastJoin { param: param() },
            RDMA_CM_EVENT_MULTICAST_ERROR => CmEventKind::MulticastError(event_error(event.status)),
            _ => return None,
        };
        Some(CmEvent { id, kind })
    }
}

impl Connections {
    /// Updates the state of an id, and responds to a disconnect: the kernel only notifies the peer
    /// when its user has called disconnect as well.
    fn follow(&mut self, id: CmId, event: &rdma_cm_event) {
        let Ok(entry) = self.ids.get_mut(id) else {
            return;
        };
        entry.state = match event.event {
            RDMA_CM_EVENT_ADDR_RESOLVED => IdState::AddrResolved,
            RDMA_CM_EVENT_ROUTE_RESOLVED => IdState::RouteResolved,
            RDMA_CM_EVENT_ADDR_ERROR => IdState::Idle,
            RDMA_CM_EVENT_CONNECT_REQUEST => {
                if entry.qp_type != QpType::Ud {
                    // SAFETY: this type of request contains connection parameters.
                    entry.offered = unsafe { event.param.conn.initiator_depth };
                }
                IdState::Requested
            }
            RDMA_CM_EVENT_REJECTED | RDMA_CM_EVENT_UNREACHABLE | RDMA_CM_EVENT_CONNECT_ERROR => {
                IdState::Closed
            }
            RDMA_CM_EVENT_CONNECT_RESPONSE => IdState::Responded,
            RDMA_CM_EVENT_DISCONNECTED => {
                // SAFETY: the id is alive. If this fails, we have already been disconnected by the
                // local side.
                unsafe { (self.cm.rdma_disconnect)(entry.ptr) };
                entry.state
            }
            _ => entry.state,
        };
    }

    /// Returns an id if it is in one of these states.
    fn id_in(
        &self,
        id: CmId,
        call: &'static str,
        states: &[IdState],
    ) -> Result<*mut rdma_cm_id, CmError> {
        let entry = self.id(id, call)?;
        if states.contains(&entry.state) {
            Ok(entry.ptr)
        } else {
            Err(CmError::InvalidState(call))
        }
    }

    fn set_state(&mut self, id: CmId, state: IdState) {
        if let Ok(entry) = self.ids.get_mut(id) {
            entry.state = state;
        }
    }
}

impl Connections {
    pub(super) fn create_id_for(
        &mut self,
        port_space: PortSpace,
        qp_type: QpType,
    ) -> Result<CmId, CmError> {
        if qp_type != port_space.qp_type() {
            let is_any = port_space == PortSpace::IbIp;
            return match convert::qp_type(qp_type) {
                Some(_) if is_any => self.enter(ptr::null_mut(), qp_type),
                _ => Err(VerbsError::WrongQpType("connection identifier").into()),
            };
        }
        let space = match port_space {
            PortSpace::Tcp => RDMA_PS_TCP,
            PortSpace::Udp => RDMA_PS_UDP,
            PortSpace::IpoIb => RDMA_PS_IPOIB,
            PortSpace::IbIp => RDMA_PS_IB,
            PortSpace::Ib { .. } => return Err(CmError::AddressNotAvailable),
        };
        let mut ptr = ptr::null_mut();
        // SAFETY: the channel is open, and the id is an output parameter.
        checked_cm(unsafe {
            (self.cm.rdma_create_id)(self.channel, &raw mut ptr, ptr::null_mut(), space)
        })?;
        self.enter(ptr, qp_type).inspect_err(|_| {
            // SAFETY: the id has just been created, and is not in a table.
            unsafe { (self.cm.rdma_destroy_id)(ptr) };
        })
    }

    pub(super) fn set_option(&mut self, id: CmId, option: CmOption) -> Result<(), CmError> {
        let entry = self.id(id, "set_option")?;
        let has_timeout = matches!(entry.qp_type, QpType::Rc | QpType::XrcIni);
        if let CmOption::AckTimeout(exponent) = option
            && (!has_timeout || exponent > 31)
        {
            return Err(VerbsError::InvalidParameter("ACK timeout").into());
        }
        if !entry.ptr.is_null() {
            return self.set_on(entry.ptr, option);
        }
        match option {
            CmOption::TypeOfService(_) | CmOption::AckTimeout(_) => {
                let early = &mut self.ids.get_mut(id)?.early;
                early.retain(|other| discriminant(other) != discriminant(&option));
                early.push(option);
                Ok(())
            }
            // This is the default.
            CmOption::ReuseAddress(false)
            | CmOption::AddressFamilyOnly(_)
            | CmOption::BareRequests(false) => Ok(()),
            CmOption::ReuseAddress(true) => {
                let what = "shared ports for this identifier type";
                Err(VerbsError::Unsupported(what).into())
            }
            // Not supported for any id.
            CmOption::BareRequests(true)
            | CmOption::PathMtu(_)
            | CmOption::AlternatePaths(_)
            | CmOption::Redirects(_) => self.set_on(ptr::null_mut(), option),
        }
    }

    pub(super) fn bind_addr(&mut self, id: CmId, addr: SocketAddr) -> Result<(), CmError> {
        let ptr = self.id_in(id, "bind", &[IdState::Idle])?;
        let ip = if addr.ip().is_unspecified() {
            self.addr
        } else {
            addr.ip()
        };
        // The device is assigned to a single address. With a different address, the id would use
        // another device.
        if ip != self.addr {
            return Err(CmError::AddressNotAvailable);
        }
        let own = SocketAddr::new(ip, addr.port());
        if ptr.is_null() {
            return self.make_bound(id, own);
        }
        let mut at = SockAddr::new(own);
        // SAFETY: the id is alive, and the address is valid.
        checked_cm(unsafe { (self.cm.rdma_bind_addr)(ptr, at.as_mut_ptr()) })?;
        self.set_state(id, IdState::Bound);
        Ok(())
    }

    pub(super) fn resolve_addr(
        &mut self,
        id: CmId,
        src: Option<SocketAddr>,
        dst: SocketAddr,
        timeout: Duration,
    ) -> Result<(), CmError> {
        let may = [IdState::Idle, IdState::Bound];
        let mut ptr = self.id_in(id, "address resolution", &may)?;
        if dst.ip().is_unspecified() {
            // The kernel would use its own address instead.
            let kind = CmEventKind::AddrError(CmError::Unreachable);
            self.events.push_back(CmEvent { id, kind });
            return Ok(());
        }
        let src = src.unwrap_or(SocketAddr::new(self.addr, 0));
        if ptr.is_null() {
            self.make_bound(id, src)?;
            ptr = self.id_ptr(id, "address resolution")?;
        }
        let mut from = SockAddr::new(src);
        let mut to = SockAddr::new(dst);
        // SAFETY: the id is alive, and the addresses are valid.
        checked_cm(unsafe {
            let (from, to) = (from.as_mut_ptr(), to.as_mut_ptr());
            (self.cm.rdma_resolve_addr)(ptr, from, to, millis(timeout))
        })
    }

    pub(super) fn resolve_route(&mut self, id: CmId, timeout: Duration) -> Result<(), CmError> {
        let ptr = self.id_in(id, "route resolution", &[IdState::AddrResolved])?;
        // SAFETY: the id is alive.
        checked_cm(unsafe { (self.cm.rdma_resolve_route)(ptr, millis(timeout)) })
    }

    /// Returns an id for which a QP with these attributes can be created.
    pub(super) fn id_for_qp(
        &self,
        id: CmId,
        init: &QpInitAttr,
    ) -> Result<*mut rdma_cm_id, CmError> {
        let may = [
            IdState::AddrResolved,
            IdState::RouteResolved,
            IdState::Requested,
        ];
        let ptr = self.id_in(id, "queue pair creation", &may)?;
        let entry = self.id(id, "queue pair creation")?;
        if entry.qp.is_some() {
            return Err(CmError::InvalidState("a second queue pair"));
        }
        if entry.qp_type != init.qp_type {
            return Err(VerbsError::WrongQpType("connection identifier").into());
        }
        Ok(ptr)
    }

    /// Assigns a QP and its number to an id.
    pub(super) fn set_qp(&mut self, id: CmId, qp: QpId, qpn: u32) -> Result<(), CmError> {
        self.ids.get_mut(id)?.qp = Some((qp, qpn));
        Ok(())
    }

    pub(super) fn listen(&mut self, id: CmId, backlog: u32) -> Result<(), CmError> {
        // The kernel would listen on all devices.
        if self.id(id, "listen")?.state == IdState::Idle {
            self.bind_addr(id, SocketAddr::new(self.addr, 0))?;
        }
        let ptr = self.id_in(id, "listen", &[IdState::Bound])?;
        let backlog = i32::try_from(backlog).unwrap_or(i32::MAX);
        // SAFETY: the id is alive.
        checked_cm(unsafe { (self.cm.rdma_listen)(ptr, backlog) })?;
        self.set_state(id, IdState::Listening);
        Ok(())
    }

    pub(super) fn connect(&mut self, id: CmId, param: &ConnParam) -> Result<(), CmError> {
        let ptr = self.id_in(id, "connect", &[IdState::RouteResolved])?;
        let most = match self.id(id, "connect")?.qp_type {
            QpType::Ud => MAX_DATAGRAM_CONNECT_PRIVATE_DATA,
            _ => MAX_CONNECT_PRIVATE_DATA,
        };
        fits(&param.private_data, most)?;
        // A datagram id does not need a QP to request the QP of the peer.
        let qpn = match self.id(id, "connect")?.qp_type {
            QpType::Ud => 0,
            _ => self.qpn(id, param, "connect")?,
        };
        self.apply_ece(id, param, "connect")?;
        let mut theirs = convert::conn_param(param, qpn);
        // SAFETY: the id is alive, and the private data outlives the call.
        checked_cm(unsafe { (self.cm.rdma_connect)(ptr, &raw mut theirs) })?;
        self.set_state(id, IdState::Connected);
        Ok(())
    }

    pub(super) fn accept(&mut self, id: CmId, param: &ConnParam) -> Result<(), CmError> {
        let ptr = self.id_in(id, "accept", &[IdState::Requested])?;
        let most = match self.id(id, "accept")?.qp_type {
            QpType::Ud => MAX_DATAGRAM_REPLY_PRIVATE_DATA,
            _ => MAX_ACCEPT_PRIVATE_DATA,
        };
        fits(&param.private_data, most)?;
        // The library always uses its own key.
        if param.qkey.is_some_and(|qkey| qkey != DATAGRAM_QKEY) {
            return Err(VerbsError::InvalidParameter("Q_Key").into());
        }
        let qpn = self.qpn(id, param, "accept")?;
        self.apply_ece(id, param, "accept")?;
        let mut theirs = convert::conn_param(param, qpn);
        // The library limits the depth of the QP to the value from the request, but it doesn't
        // limit the value sent to the peer.
        theirs.initiator_depth = theirs.initiator_depth.min(self.id(id, "accept")?.offered);
        // SAFETY: the id is alive, and the private data outlives the call.
        checked_cm(unsafe { (self.cm.rdma_accept)(ptr, &raw mut theirs) })?;
        self.set_state(id, IdState::Connected);
        Ok(())
    }

    pub(super) fn init_qp_attr(&self, id: CmId, state: QpState) -> Result<QpAttr, CmError> {
        let known = [
            IdState::Requested,
            IdState::Responded,
            IdState::Connected,
            IdState::Bound,
            IdState::AddrResolved,
            IdState::RouteResolved,
        ];
        let known = match state {
            QpState::Init => &known[..],
            // The peer's parameters are available now.
            QpState::Rtr | QpState::Rts => &known[..3],
            _ => return Err(VerbsError::InvalidParameter("queue pair state").into()),
        };
        let ptr = self.id_in(id, "init_qp_attr", known)?;
        let (mut attr, mut mask) = (ibv_qp_attr::default(), 0);
        attr.qp_state = convert::state(state);
        let init = self.cm.rdma_init_qp_attr;
        // SAFETY: the id is alive. The attributes and their mask outlive the call.
        checked_cm(unsafe { init(ptr, &raw mut attr, &raw mut mask) })?;
        Ok(convert::qp_attr_from_mask(&attr, mask as u32)?)
    }

    pub(super) fn establish(&mut self, id: CmId) -> Result<(), CmError> {
        let ptr = self.id_in(id, "establish", &[IdState::Responded])?;
        // SAFETY: the id is alive.
        checked_cm(unsafe { (self.cm.rdma_establish)(ptr) })?;
        self.set_state(id, IdState::Connected);
        Ok(())
    }

    pub(super) fn reject(&mut self, id: CmId, private_data: &[u8]) -> Result<(), CmError> {
        self.reject_by(id, private_data, self.cm.rdma_reject)
    }

    pub(super) fn reject_ece(&mut self, id: CmId, private_data: &[u8]) -> Result<(), CmError> {
        if self.id(id, "reject_ece")?.qp_type == QpType::Ud {
            return Err(CmError::InvalidState("reject_ece"));
        }
        self.reject_by(id, private_data, self.cm.rdma_reject_ece)
    }

    /// There is no call for this, since the kernel CM will send an MRA when required.
    pub(super) fn mra(&mut self, id: CmId) -> Result<(), CmError> {
        self.id_in(id, "mra", &[IdState::Requested]).map(drop)
    }

    pub(super) fn load_alternate_path(&mut self, id: CmId, _path: &AltPath) -> Result<(), CmError> {
        self.id(id, "load_alternate_path")?;
        // librdmacm has no call for this, and Linux does not send LAP messages on RoCE.
        Err(VerbsError::Unsupported("alternate paths").into())
    }

    pub(super) fn notify_established(&mut self, id: CmId) -> Result<(), CmError> {
        let ptr = self.id_in(id, "notify", &[IdState::Connected])?;
        // SAFETY: the id is alive.
        checked_cm(unsafe { (self.cm.rdma_notify)(ptr, IBV_EVENT_COMM_EST) })
    }

    pub(super) fn disconnect(&mut self, id: CmId) -> Result<(), CmError> {
        let may = [IdState::Connected, IdState::Responded, IdState::Closed];
        let ptr = self.id_in(id, "disconnect", &may)?;
        // There is no connection state on the peer.
        if self.id(id, "disconnect")?.qp_type == QpType::Ud {
            return Err(CmError::InvalidState("disconnect"));
        }
        // The kernel wouldn't send anything, and the peer would still be waiting for the RTU.
        if self.id(id, "disconnect")?.state == IdState::Responded {
            return self.reject(id, &[]);
        }
        // SAFETY: the id is alive. If this is called again, the library returns an error without
        // changing anything.
        unsafe { (self.cm.rdma_disconnect)(ptr) };
        Ok(())
    }

    pub(super) fn join_multicast(
        &mut self,
        id: CmId,
        group: IpAddr,
        send_only: bool,
    ) -> Result<(), CmError> {
        let may = [
            IdState::Bound,
            IdState::AddrResolved,
            IdState::RouteResolved,
        ];
        let ptr = self.id_in(id, "join_multicast", &may)?;
        if self.id(id, "join_multicast")?.qp_type != QpType::Ud {
            return Err(CmError::InvalidState("join_multicast"));
        }
        mgid(group).ok_or(VerbsError::InvalidParameter("multicast group"))?;
        if group.is_ipv4() != self.addr.is_ipv4() {
            return Err(CmError::Unreachable);
        }
        let mut addr = SockAddr::new(SocketAddr::new(group, 0));
        let mut request = rdma_cm_join_mc_attr_ex {
            comp_mask: JOIN_MC_ADDRESS | JOIN_MC_FLAGS,
            join_flags: match send_only {
                true => JOIN_MC_SEND_ONLY,
                false => JOIN_MC_FULL_MEMBER,
            },
            addr: addr.as_mut_ptr(),
        };
        let (join, request) = (self.cm.rdma_join_multicast_ex, &raw mut request);
        // SAFETY: the id is alive. The request and its address outlive the call.
        checked_cm(unsafe { join(ptr, request, ptr::null_mut()) })
    }

    pub(super) fn leave_multicast(&mut self, id: CmId, group: IpAddr) -> Result<(), CmError> {
        let ptr = self.id_ptr(id, "leave_multicast")?;
        if ptr.is_null() {
            return Err(CmError::AddressNotAvailable);
        }
        let mut addr = SockAddr::new(SocketAddr::new(group, 0));
        // SAFETY: the id is alive, and the address is valid.
        checked_cm(unsafe { (self.cm.rdma_leave_multicast)(ptr, addr.as_mut_ptr()) })
    }

    pub(super) fn destroy_id(&mut self, id: CmId) -> Result<(), CmError> {
        let entry = self
            .ids
            .get_mut(id)
            .map_err(|_| CmError::InvalidState("destroy"))?;
        if entry.zombie {
            return Err(CmError::InvalidState("destroy"));
        }
        // Requests the application hasn't seen yet are only owned by their listener.
        if entry.state == IdState::Listening {
            self.refuse_waiting(id);
        }
        let entry = self.ids.get_mut(id)?;
        if entry.qp.is_some() {
            entry.zombie = true;
            // The id must be kept until the QP is destroyed, but the connection should be closed
            // now.
            if entry.state == IdState::Connected {
                // SAFETY: the id is alive. This has no effect if the connection is already closed.
                unsafe { (self.cm.rdma_disconnect)(entry.ptr) };
            }
        } else {
            self.free_id(id);
        }
        // Events must not refer to an id that has been destroyed.
        self.events.retain(|e| e.id != id);
        Ok(())
    }

    pub(super) fn local_addr(&self, id: CmId) -> Option<SocketAddr> {
        let ptr = self.id_ptr(id, "query").ok().filter(|ptr| !ptr.is_null())?;
        // SAFETY: the id is alive; its route contains a valid address or zeros.
        socket_addr(unsafe { &(*ptr).route.addr.__bindgen_anon_1.src_storage })
    }

    pub(super) fn peer_addr(&self, id: CmId) -> Option<SocketAddr> {
        let ptr = self.id_ptr(id, "query").ok().filter(|ptr| !ptr.is_null())?;
        // SAFETY: same as above.
        socket_addr(unsafe { &(*ptr).route.addr.__bindgen_anon_2.dst_storage })
    }

    pub(super) fn poll_event(&mut self) -> Option<CmEvent> {
        self.events.pop_front()
    }
}

impl Connections {
    /// Rejects a request using this library function.
    fn reject_by(
        &mut self,
        id: CmId,
        private_data: &[u8],
        reject: unsafe extern "C" fn(*mut rdma_cm_id, *const libc::c_void, u8) -> i32,
    ) -> Result<(), CmError> {
        let ptr = self.id_in(id, "reject", &[IdState::Requested, IdState::Responded])?;
        let most = match self.id(id, "reject")?.qp_type {
            QpType::Ud => MAX_DATAGRAM_REPLY_PRIVATE_DATA,
            _ => MAX_REJECT_PRIVATE_DATA,
        };
        fits(private_data, most)?;
        let len = private_data.len() as u8;
        // SAFETY: the id is alive, and the private data outlives the call.
        checked_cm(unsafe { reject(ptr, private_data.as_ptr().cast(), len) })?;
        self.set_state(id, IdState::Closed);
        Ok(())
    }

    /// Rejects all requests to a listener that have not been reported to the application yet.
    fn refuse_waiting(&mut self, listener: CmId) {
        let is_ours = |e: &CmEvent| matches!(e.kind, CmEventKind::ConnectRequest { listener: l, .. } if l == listener);
        let waiting: Vec<CmId> = self
            .events
            .iter()
            .filter(|e| is_ours(e))
            .map(|e| e.id)
            .collect();
        self.events.retain(|e| !is_ours(e));
        for id in waiting {
            // The peer may be dead, but we need to destroy the id in any case.
            let _ = self.reject(id, &[]);
            self.free_id(id);
        }
    }

    /// Returns the QP number of an id, or the number set by the application.
    fn qpn(&self, id: CmId, param: &ConnParam, call: &'static str) -> Result<u32, CmError> {
        let qpn = match self.id(id, call)?.qp {
            Some((_, qpn)) => qpn,
            None => param.qp_num,
        };
        if qpn == 0 {
            return Err(CmError::InvalidState(call));
        }
        Ok(qpn)
    }
}
