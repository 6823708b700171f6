//! Events of identifiers.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int};
use std::mem::{self, zeroed};
use std::net::{IpAddr, SocketAddr};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard};

use riser_rdma_core_sys::bindings::*;
use riser_transport::rdma_core::convert::{conn_param, ud_param};
use riser_transport::verbs::{CmEvent, CmEventKind, CmId, ConnParam, RdmaCm as _, Verbs as _};

use super::af_ib::Service;
use super::groups::on_join;
use super::{EventChannel, Id, create_id, device_at, id_of, returns};
use crate::cancel::{read_count, step};
use crate::context::Context;
use crate::engine::State;
use crate::errno::{Errno, minus};
use crate::lock::unpoisoned;
use crate::object::{Ref, kind};
use crate::queue::EventQueue;

/// An event that was not yet returned to the program.
pub(crate) struct Event {
    id: Ref<Id>,
    listener: Option<Ref<Id>>,
    kind: CmEventKind,
}

impl Event {
    /// Returns the identifier that receives the event on its channel and waits for its
    /// acknowledgement.
    fn owner(&self) -> Ref<Id> {
        self.listener.unwrap_or(self.id)
    }
}

/// An event that was returned to the program, with its private data.
pub(crate) struct DeliveredEvent {
    /// The identifier that waits for its acknowledgement.
    owner: Ref<Id>,
    _private_data: Vec<u8>,
}

kind!(DeliveredEvent, rdma_cm_event, b"evnt");

/// Reports an event of a device, whose lock is held.
pub(crate) fn report(state: &mut State, event: CmEvent) {
    let CmEvent { id, kind } = event;
    if let CmEventKind::ConnectRequest { listener, .. } = &kind {
        let Some(listener) = find_id(state, *listener) else {
            return;
        };
        match accept_request(state, listener, id) {
            Ok(new) => push(Event {
                id: new,
                listener: Some(listener),
                kind,
            }),
            Err(errno) => {
                tracing::warn!("cannot deliver a connection request: error {}", errno.0);
                // The peer will retransmit its request or give up.
                let _ = state.nic.destroy_id(id);
            }
        }
        return;
    }
    let Some(ours) = find_id(state, id) else {
        return;
    };
    if kind == CmEventKind::DeviceRemoval {
        on_removal(state, id, ours);
        return;
    }
    push(Event {
        id: ours,
        listener: None,
        kind,
    });
}

/// All identifiers, indexed by the address of the device and its own identifier.
static IDS: Mutex<BTreeMap<(IpAddr, CmId), Ref<Id>>> = Mutex::new(BTreeMap::new());

fn ids() -> MutexGuard<'static, BTreeMap<(IpAddr, CmId), Ref<Id>>> {
    unpoisoned(IDS.lock())
}

fn find_id(state: &State, id: CmId) -> Option<Ref<Id>> {
    ids().get(&(state.nic.socket_addr().ip(), id)).copied()
}

/// Registers an identifier for events of a device identifier.
pub(super) fn know(state: &State, id: CmId, ours: Ref<Id>) {
    ids().insert((state.nic.socket_addr().ip(), id), ours);
}

/// Removes a device identifier. If the device was removed, a new device may already have used the
/// same number for a different identifier of the program.
pub(super) fn forget(state: &State, id: CmId, ours: Ref<Id>) {
    let place = (state.nic.socket_addr().ip(), id);
    let mut ids = ids();
    if ids.get(&place) == Some(&ours) {
        ids.remove(&place);
    }
}

/// Handles the removal of an identifier's device. An identifier that uses all devices continues on
/// the remaining devices without an event, and on this device when it returns.
fn on_removal(state: &State, id: CmId, ours: Ref<Id>) {
    forget(state, id, ours);
    let addr = state.nic.socket_addr().ip();
    let is_on_all = {
        let mut ours = ours.lock();
        let is_on_all = ours.any.is_some();
        if is_on_all {
            // The device may already have returned.
            let is_gone =
                |context: Ref<Context>| context.device.config.addr == addr && context.is_removed();
            ours.links.retain(|(context, _)| !is_gone(*context));
        }
        is_on_all
    };
    match device_at(addr) {
        Some(device) if is_on_all => returns::await_return(device),
        _ => push(Event {
            id: ours,
            listener: None,
            kind: CmEventKind::DeviceRemoval,
        }),
    }
}

fn push(event: Event) {
    let owner = event.owner();
    // We hold the lock while pushing, because the identifier may be moved to another channel.
    let state = owner.lock();
    if event.listener.is_some() {
        event.id.move_to(state.channel, &state.queue);
    }
    state.queue.push(event);
}

/// Creates the identifier of a connection request. It uses its listener's channel and context.
fn accept_request(state: &mut State, listener: Ref<Id>, id: CmId) -> Result<Ref<Id>, Errno> {
    // SAFETY: the listener is alive, because it is registered at the device.
    let (context, space, kind) = unsafe {
        let c = &*listener.c();
        (c.context, c.ps, c.qp_type)
    };
    let (channel, links, ours, services) = {
        let state = listener.lock();
        let channel = (state.channel, Arc::clone(&state.queue));
        (channel, state.links.clone(), state.space, state.services)
    };
    let new = create_id(Some(channel), context, space, Some(kind))?;
    let device: Option<Ref<Context>> = links
        .into_iter()
        .map(|(context, _)| context)
        .find(|context| context.device.config.addr == state.nic.socket_addr().ip());
    // We must not open another device while this one is locked.
    let device = device.filter(|device| !device.is_removed());
    let device = device.ok_or(Errno::INVALID)?;
    let pd = super::shared(device.device)?.pd.handle();
    {
        let mut state = new.lock();
        state.links.push((device, id));
        state.space = ours;
        // The request does not contain the peer's service ID.
        state.services = services.map(|(own, _)| (own, Service::default()));
    }
    know(state, id, new);
    let (local, peer) = (state.nic.local_addr(id), state.nic.peer_addr(id));
    // SAFETY: no other thread has access to the identifier yet.
    unsafe {
        let c = &mut *new.c();
        c.verbs = device.handle();
        c.port_num = 1;
        c.pd = pd;
        if let Some(local) = local {
            let gid = riser_transport::verbs::Gid::from(local.ip());
            c.route.addr.addr.ibaddr.sgid = ibv_gid { raw: gid.0 };
        }
        if let Some(peer) = peer {
            let gid = riser_transport::verbs::Gid::from(peer.ip());
            c.route.addr.addr.ibaddr.dgid = ibv_gid { raw: gid.0 };
        }
        c.route.addr.addr.ibaddr.pkey = 0xffff_u16.to_be();
    }
    new.show_addresses(local, peer);
    make_route(new, local, peer, state);
    Ok(new)
}

/// Sets the path record of an identifier. It is computed, because RoCE has no subnet
/// administration.
fn make_route(id: Ref<Id>, local: Option<SocketAddr>, peer: Option<SocketAddr>, state: &State) {
    let (Some(local), Some(peer)) = (local, peer) else {
        return;
    };
    let mtu = state.nic.query_port(1).map_or(3, |p| p.active_mtu.code());
    // SAFETY: all zeroes is valid for this plain C structure.
    let mut path: ibv_sa_path_rec = unsafe { zeroed() };
    let (sgid, dgid) = (local.ip().into(), peer.ip().into());
    let (sgid, dgid): (riser_transport::verbs::Gid, riser_transport::verbs::Gid) = (sgid, dgid);
    path.sgid = ibv_gid { raw: sgid.0 };
    path.dgid = ibv_gid { raw: dgid.0 };
    path.hop_limit = 64;
    path.reversible = 1;
    path.numb_path = 1;
    path.pkey = 0xffff_u16.to_be();
    // All values are exact (selector 2 of the record).
    path.mtu_selector = 2;
    let given = id.lock().path;
    path.mtu = given.map_or(mtu, |path| path.mtu.code());
    path.traffic_class = given.map_or(0, |path| path.traffic_class);
    path.rate_selector = 2;
    path.packet_life_time_selector = 2;
    path.packet_life_time = 14;
    let path = Box::into_raw(Box::new(path));
    // SAFETY: the identifier is alive, and its calls are serialized.
    unsafe {
        let c = &mut *id.c();
        if !c.route.path_rec.is_null() {
            drop(Box::from_raw(c.route.path_rec));
        }
        c.route.path_rec = path;
        c.route.num_paths = 1;
    }
}

/// Frees the record created by `make_route`.
pub(super) fn free_route(id: Ref<Id>) {
    // SAFETY: the identifier is alive, and its record was allocated as a box.
    unsafe {
        let path = mem::replace(&mut (*id.c()).route.path_rec, ptr::null_mut());
        if !path.is_null() {
            drop(Box::from_raw(path));
        }
    }
}

/// Removes the events of an identifier that is being destroyed. If it is a listener, this also
/// destroys its requests.
pub(super) fn retract(queue: &EventQueue<Event>, id: Ref<Id>) {
    let gone = queue.retract(|event| event.id == id || event.listener == Some(id));
    for event in gone.into_iter().filter(|event| event.listener == Some(id)) {
        let request = event.id;
        request.unlink();
        // The peer may have given up in the meantime.
        queue.retract(|event| event.id == request);
        free_route(request);
        let _ = request.retire();
    }
}

impl Ref<Id> {
    /// Moves the identifier of a request, which was not yet returned to the program, to its
    /// listener's channel, including its events. The channel may already have been destroyed, but
    /// its queue still exists.
    fn move_to(self, channel: Ref<EventChannel>, queue: &Arc<EventQueue<Event>>) {
        let mut state = self.lock();
        state.channel = channel;
        let old = mem::replace(&mut state.queue, Arc::clone(queue));
        if !Arc::ptr_eq(&old, queue) {
            for event in old.retract(|event| event.owner() == self) {
                queue.push(event);
            }
        }
        // SAFETY: the program does not have access to the identifier yet.
        unsafe { (*self.c()).channel = channel.handle() };
    }

    /// Removes the join event of a group that was left.
    pub(super) fn retract_join(self, group: IpAddr) {
        let queue = Arc::clone(&self.lock().queue);
        queue.retract(|event| {
            matches!(&event.kind, CmEventKind::MulticastJoin { param }
                if event.id == self && param.ah.is_some_and(|way| way.dgid.ip() == group))
        });
    }
}

/// `rdma_migrate_id(3)`: moves its events to another channel, including pending events.
pub(crate) unsafe extern "C" fn rdma_migrate_id(
    id: *mut rdma_cm_id,
    channel: *mut rdma_event_channel,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    minus(unsafe { id_of(id) }.and_then(|id| {
        let to = (!channel.is_null())
            // SAFETY: as above.
            .then(|| unsafe { Ref::<EventChannel>::get(channel) })
            .transpose()?;
        migrate(id, to)
    }))
}

/// Acknowledges the event of the last call, which a synchronous identifier keeps for the program.
///
/// # Safety
/// The program must no longer use the event.
pub(super) unsafe fn acknowledge_kept(id: Ref<Id>) {
    // SAFETY: the identifier is alive and owns the event.
    unsafe {
        let event = mem::replace(&mut (*id.c()).event, ptr::null_mut());
        if !event.is_null() {
            rdma_ack_cm_event(event);
        }
    }
}

/// Moves an identifier to a channel, or to a new private channel.
pub(super) fn migrate(id: Ref<Id>, to: Option<Ref<EventChannel>>) -> Result<(), Errno> {
    let is_synchronous = to.is_none();
    let to = to.map_or_else(super::create_channel, Ok)?;
    // SAFETY: the event is only valid until the next call that uses the identifier.
    unsafe { acknowledge_kept(id) };
    let (from, had_its_own) = {
        let mut state = id.lock();
        let from = mem::replace(&mut state.channel, to);
        let old = mem::replace(&mut state.queue, Arc::clone(&to.events));
        let waiting = old.retract(|event| event.owner() == id);
        let requests: Vec<_> = waiting
            .iter()
            .filter(|event| event.listener.is_some())
            .map(|event| event.id)
            .collect();
        for event in waiting {
            to.events.push(event);
        }
        // Move requests that were not yet returned to the program too.
        for request in requests {
            request.move_to(to, &to.events);
        }
        (
            from,
            mem::replace(&mut state.is_synchronous, is_synchronous),
        )
    };
    // SAFETY: the identifier is alive.
    unsafe { (*id.c()).channel = to.handle() };
    // Events that were returned to the program must be acknowledged on the old channel first.
    id.events.wait();
    if had_its_own {
        from.close();
    }
    Ok(())
}

/// `rdma_get_cm_event(3)`.
pub(crate) unsafe extern "C-unwind" fn rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    event: *mut *mut rdma_cm_event,
) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    let known = step(|| unsafe { Ref::<EventChannel>::get(channel) }.map(|c| c.events.raw_fd()));
    let Ok(fd) = known else {
        return step(|| minus(Err(Errno::INVALID)));
    };
    loop {
        // SAFETY: the program owns the channel, and no frame has anything to drop.
        let error = unsafe { read_count(fd) };
        // SAFETY: the program passes valid pointers, as required by the manual page.
        if let Some(result) = step(|| unsafe { take_event(channel, error, event) }) {
            return result;
        }
    }
}

/// Returns the next event to the program. Returns `None` if it must wait again.
///
/// # Safety
/// The program must pass valid pointers, as required by the manual page.
unsafe fn take_event(
    channel: *mut rdma_event_channel,
    error: c_int,
    event: *mut *mut rdma_cm_event,
) -> Option<c_int> {
    if error != 0 {
        return Some(minus(Err(Errno(error))));
    }
    // SAFETY: guaranteed by the caller.
    let channel = match unsafe { Ref::<EventChannel>::get(channel) } {
        Ok(channel) => channel,
        Err(errno) => return Some(minus(Err(errno))),
    };
    let next = channel.events.pop(|event| event.owner().events.add())?;
    // SAFETY: the program provides memory for the pointer.
    unsafe { event.write(into_raw_event(next)) };
    Some(0)
}

/// `rdma_get_cm_event(3)` as part of another call, during which the thread can't be cancelled.
///
/// # Errors
/// Returns the errors of that function.
///
/// # Safety
/// The channel must be alive.
pub(super) unsafe fn next_event(
    channel: *mut rdma_event_channel,
) -> Result<*mut rdma_cm_event, Errno> {
    let mut event = ptr::null_mut();
    // SAFETY: guaranteed by the caller.
    match step(|| unsafe { rdma_get_cm_event(channel, &raw mut event) }) {
        0 => Ok(event),
        _ => Err(Errno::last()),
    }
}

/// Creates an event for the program.
fn into_raw_event(event: Event) -> *mut rdma_cm_event {
    let Event { id, listener, kind } = event;
    let owner = listener.unwrap_or(id);
    // SAFETY: all zeroes is valid for this plain C structure.
    let mut c: rdma_cm_event = unsafe { zeroed() };
    c.id = id.handle();
    c.listen_id = listener.map_or(ptr::null_mut(), Ref::handle);
    // SAFETY: the identifier is alive.
    let is_ud = unsafe { (*id.c()).qp_type } == IBV_QPT_UD;
    let mut param = None;
    let mut data = Vec::new();
    let mut group_context = ptr::null_mut();
    match kind {
        CmEventKind::AddrResolved => {
            id.show_route();
            c.event = RDMA_CM_EVENT_ADDR_RESOLVED;
        }
        CmEventKind::AddrError(error) => {
            c.event = RDMA_CM_EVENT_ADDR_ERROR;
            c.status = -Errno::from(error).0;
        }
        CmEventKind::RouteResolved => {
            if let Ok((context, device_id)) = id.link() {
                let locked = context.lock();
                let local = locked.nic.local_addr(device_id);
                let peer = locked.nic.peer_addr(device_id);
                make_route(id, local, peer, &locked);
            }
            c.event = RDMA_CM_EVENT_ROUTE_RESOLVED;
        }
        CmEventKind::RouteError(error) => {
            c.event = RDMA_CM_EVENT_ROUTE_ERROR;
            c.status = -Errno::from(error).0;
        }
        CmEventKind::ConnectRequest { param: theirs, .. } => {
            id.lock().remote_ece = theirs.ece;
            c.event = RDMA_CM_EVENT_CONNECT_REQUEST;
            param = Some(theirs);
        }
        CmEventKind::ConnectResponse { param: theirs } => {
            id.lock().remote_ece = theirs.ece;
            c.event = RDMA_CM_EVENT_CONNECT_RESPONSE;
            param = Some(theirs);
        }
        CmEventKind::ConnectError(error) => {
            c.event = RDMA_CM_EVENT_CONNECT_ERROR;
            c.status = -Errno::from(error).0;
        }
        CmEventKind::Unreachable => {
            c.event = RDMA_CM_EVENT_UNREACHABLE;
            c.status = -libc::ETIMEDOUT;
        }
        CmEventKind::Rejected {
            reason,
            private_data,
        } => {
            // For datagram identifiers, the library uses a single event for all failures.
            c.event = match is_ud {
                true => RDMA_CM_EVENT_UNREACHABLE,
                false => RDMA_CM_EVENT_REJECTED,
            };
            c.status = reason.into();
            param = Some(ConnParam {
                private_data,
                responder_resources: 0,
                initiator_depth: 0,
                flow_control: false,
                retry_count: 0,
                rnr_retry_count: 0,
                ..ConnParam::default()
            });
        }
        CmEventKind::Established { param: theirs } => {
            c.event = RDMA_CM_EVENT_ESTABLISHED;
            param = Some(theirs);
            set_qp_state(id, IBV_QPS_RTS);
        }
        CmEventKind::Disconnected => {
            c.event = RDMA_CM_EVENT_DISCONNECTED;
            set_qp_state(id, IBV_QPS_ERR);
        }
        CmEventKind::DeviceRemoval => c.event = RDMA_CM_EVENT_DEVICE_REMOVAL,
        CmEventKind::TimewaitExit => c.event = RDMA_CM_EVENT_TIMEWAIT_EXIT,
        CmEventKind::MulticastJoin { param: theirs } => {
            match on_join(id, &theirs) {
                Ok(context) => {
                    c.event = RDMA_CM_EVENT_MULTICAST_JOIN;
                    group_context = context;
                }
                Err(errno) => {
                    c.event = RDMA_CM_EVENT_MULTICAST_ERROR;
                    c.status = -errno.0;
                }
            }
            param = Some(theirs);
        }
        CmEventKind::AlternatePath { .. } | CmEventKind::AlternatePathError { .. } => {
            unreachable!("the C interface neither proposes alternate paths nor allows them")
        }
        CmEventKind::MulticastError(error) => {
            c.event = RDMA_CM_EVENT_MULTICAST_ERROR;
            c.status = -Errno::from(error).0;
        }
    }
    if let Some(ours) = param {
        let no_data = ours.private_data.is_empty();
        if is_ud {
            let mut theirs = ud_param(&ours);
            if no_data {
                // Like in librdmacm, the context of a group is stored in place of the private data.
                theirs.private_data = group_context;
            }
            c.param.ud = theirs;
        } else {
            let mut theirs = conn_param(&ours, ours.qp_num);
            if no_data {
                theirs.private_data = ptr::null();
            }
            c.param.conn = theirs;
        }
        data = ours.private_data;
    }
    let given = DeliveredEvent {
        owner,
        _private_data: data,
    };
    Ref::new(c, given).handle()
}

/// Updates the state of an identifier's queue pair, as seen by the program, after the device has
/// changed it.
fn set_qp_state(id: Ref<Id>, state: ibv_qp_state) {
    // SAFETY: the identifier is alive, and so is its queue pair, if any.
    unsafe {
        let qp = (*id.c()).qp;
        if !qp.is_null() {
            (*qp).state = state;
        }
    }
}

/// `rdma_ack_cm_event(3)`.
pub(crate) unsafe extern "C" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    minus(
        unsafe { Ref::<DeliveredEvent>::get(event) }.and_then(|event| {
            let owner = event.owner;
            event.retire()?;
            owner.events.acknowledge(1);
            Ok(())
        }),
    )
}

/// `rdma_event_str(3)`.
pub(crate) extern "C" fn rdma_event_str(event: rdma_cm_event_type) -> *const c_char {
    let name: &CStr = match event {
        RDMA_CM_EVENT_ADDR_RESOLVED => c"RDMA_CM_EVENT_ADDR_RESOLVED",
        RDMA_CM_EVENT_ADDR_ERROR => c"RDMA_CM_EVENT_ADDR_ERROR",
        RDMA_CM_EVENT_ROUTE_RESOLVED => c"RDMA_CM_EVENT_ROUTE_RESOLVED",
        RDMA_CM_EVENT_ROUTE_ERROR => c"RDMA_CM_EVENT_ROUTE_ERROR",
        RDMA_CM_EVENT_CONNECT_REQUEST => c"RDMA_CM_EVENT_CONNECT_REQUEST",
        RDMA_CM_EVENT_CONNECT_RESPONSE => c"RDMA_CM_EVENT_CONNECT_RESPONSE",
        RDMA_CM_EVENT_CONNECT_ERROR => c"RDMA_CM_EVENT_CONNECT_ERROR",
        RDMA_CM_EVENT_UNREACHABLE => c"RDMA_CM_EVENT_UNREACHABLE",
        RDMA_CM_EVENT_REJECTED => c"RDMA_CM_EVENT_REJECTED",
        RDMA_CM_EVENT_ESTABLISHED => c"RDMA_CM_EVENT_ESTABLISHED",
        RDMA_CM_EVENT_DISCONNECTED => c"RDMA_CM_EVENT_DISCONNECTED",
        RDMA_CM_EVENT_DEVICE_REMOVAL => c"RDMA_CM_EVENT_DEVICE_REMOVAL",
        RDMA_CM_EVENT_MULTICAST_JOIN => c"RDMA_CM_EVENT_MULTICAST_JOIN",
        RDMA_CM_EVENT_MULTICAST_ERROR => c"RDMA_CM_EVENT_MULTICAST_ERROR",
        RDMA_CM_EVENT_ADDR_CHANGE => c"RDMA_CM_EVENT_ADDR_CHANGE",
        RDMA_CM_EVENT_TIMEWAIT_EXIT => c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
        _ => c"UNKNOWN EVENT",
    };
    name.as_ptr()
}
