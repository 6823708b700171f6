//! What happens to identifiers.

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

/// An event on its way to the program.
pub(crate) struct Event {
    id: Ref<Id>,
    listener: Option<Ref<Id>>,
    kind: CmEventKind,
}

impl Event {
    /// The identifier whose channel has it, and that waits for its acknowledgement.
    fn owner(&self) -> Ref<Id> {
        self.listener.unwrap_or(self.id)
    }
}

/// An event that the program has, with its private data.
pub(crate) struct Given {
    /// The identifier that waits for its acknowledgement.
    owner: Ref<Id>,
    _private_data: Vec<u8>,
}

kind!(Given, rdma_cm_event, b"evnt");

/// Reports what has happened at a device; its lock is held.
pub(crate) fn report(state: &mut State, event: CmEvent) {
    let CmEvent { id, kind } = event;
    if let CmEventKind::ConnectRequest { listener, .. } = &kind {
        let Some(listener) = known(state, *listener) else {
            return;
        };
        match accept_request(state, listener, id) {
            Ok(new) => push(Event {
                id: new,
                listener: Some(listener),
                kind,
            }),
            Err(errno) => {
                tracing::warn!("a connection request is lost: error {}", errno.0);
                // The peer asks again, or gives up.
                let _ = state.nic.destroy_id(id);
            }
        }
        return;
    }
    let Some(ours) = known(state, id) else {
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

/// The identifiers, by the address of their device and its own identifier.
static IDS: Mutex<BTreeMap<(IpAddr, CmId), Ref<Id>>> = Mutex::new(BTreeMap::new());

fn ids() -> MutexGuard<'static, BTreeMap<(IpAddr, CmId), Ref<Id>>> {
    unpoisoned(IDS.lock())
}

fn known(state: &State, id: CmId) -> Option<Ref<Id>> {
    ids().get(&(state.nic.socket_addr().ip(), id)).copied()
}

/// Remembers which identifier the events of the device's are for.
pub(super) fn know(state: &State, id: CmId, ours: Ref<Id>) {
    ids().insert((state.nic.socket_addr().ip(), id), ours);
}

/// Forgets an identifier of the device. After the device was removed, another one may have given the
/// same to another identifier of the program's.
pub(super) fn forget(state: &State, id: CmId, ours: Ref<Id>) {
    let place = (state.nic.socket_addr().ip(), id);
    let mut ids = ids();
    if ids.get(&place) == Some(&ours) {
        ids.remove(&place);
    }
}

/// The device of an identifier was removed. One that is on all devices goes on with the others,
/// without an event, and with this one when it is back.
fn on_removal(state: &State, id: CmId, ours: Ref<Id>) {
    forget(state, id, ours);
    let addr = state.nic.socket_addr().ip();
    let is_on_all = {
        let mut ours = ours.lock();
        let is_on_all = ours.any.is_some();
        if is_on_all {
            // It may be back already.
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
    // Under the lock, so that it does not miss a change of the channel.
    let state = owner.lock();
    if event.listener.is_some() {
        event.id.move_to(state.channel, &state.queue);
    }
    state.queue.push(event);
}

/// Makes the identifier of a connection request: it has its listener's channel and context.
fn accept_request(state: &mut State, listener: Ref<Id>, id: CmId) -> Result<Ref<Id>, Errno> {
    // SAFETY: the listener is alive, since the device knows it.
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
    // Another device is not opened under this one's lock.
    let device = device.filter(|device| !device.is_removed());
    let device = device.ok_or(Errno::INVALID)?;
    let pd = super::shared(device.device)?.pd.handle();
    {
        let mut state = new.lock();
        state.links.push((device, id));
        state.space = ours;
        // The peer's service id is not in its request.
        state.services = services.map(|(own, _)| (own, Service::default()));
    }
    know(state, id, new);
    let (local, peer) = (state.nic.local_addr(id), state.nic.peer_addr(id));
    // SAFETY: no other thread knows the identifier yet.
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

/// Gives an identifier a path record, which is computed: RoCE has no subnet administration.
fn make_route(id: Ref<Id>, local: Option<SocketAddr>, peer: Option<SocketAddr>, state: &State) {
    let (Some(local), Some(peer)) = (local, peer) else {
        return;
    };
    let mtu = state.nic.query_port(1).map_or(3, |p| p.active_mtu.code());
    // SAFETY: all-zero bytes are valid for this plain C structure.
    let mut path: ibv_sa_path_rec = unsafe { zeroed() };
    let (sgid, dgid) = (local.ip().into(), peer.ip().into());
    let (sgid, dgid): (riser_transport::verbs::Gid, riser_transport::verbs::Gid) = (sgid, dgid);
    path.sgid = ibv_gid { raw: sgid.0 };
    path.dgid = ibv_gid { raw: dgid.0 };
    path.hop_limit = 64;
    path.reversible = 1;
    path.numb_path = 1;
    path.pkey = 0xffff_u16.to_be();
    // Each exactly (selector 2 of the record).
    path.mtu_selector = 2;
    let given = id.lock().path;
    path.mtu = given.map_or(mtu, |path| path.mtu.code());
    path.traffic_class = given.map_or(0, |path| path.traffic_class);
    path.rate_selector = 2;
    path.packet_life_time_selector = 2;
    path.packet_life_time = 14;
    let path = Box::into_raw(Box::new(path));
    // SAFETY: the identifier is alive, and its calls wait for each other.
    unsafe {
        let c = &mut *id.c();
        if !c.route.path_rec.is_null() {
            drop(Box::from_raw(c.route.path_rec));
        }
        c.route.path_rec = path;
        c.route.num_paths = 1;
    }
}

/// Frees what `make_route` has made.
pub(super) fn free_route(id: Ref<Id>) {
    // SAFETY: the identifier is alive; its record came from a box.
    unsafe {
        let path = mem::replace(&mut (*id.c()).route.path_rec, ptr::null_mut());
        if !path.is_null() {
            drop(Box::from_raw(path));
        }
    }
}

/// Takes back the events of an identifier that is going away. Requests to a listener end with it.
pub(super) fn retract(queue: &EventQueue<Event>, id: Ref<Id>) {
    let gone = queue.retract(|event| event.id == id || event.listener == Some(id));
    for event in gone.into_iter().filter(|event| event.listener == Some(id)) {
        let request = event.id;
        request.unlink();
        // The peer may have given up meanwhile.
        queue.retract(|event| event.id == request);
        free_route(request);
        let _ = request.retire();
    }
}

impl Ref<Id> {
    /// Moves the identifier of a request, which the program does not have yet, to its listener's channel,
    /// with what became of it.
    /// The channel may be gone, its queue is not.
    fn move_to(self, channel: Ref<EventChannel>, queue: &Arc<EventQueue<Event>>) {
        let mut state = self.lock();
        state.channel = channel;
        let old = mem::replace(&mut state.queue, Arc::clone(queue));
        if !Arc::ptr_eq(&old, queue) {
            for event in old.retract(|event| event.owner() == self) {
                queue.push(event);
            }
        }
        // SAFETY: the program does not know the identifier yet.
        unsafe { (*self.c()).channel = channel.handle() };
    }

    /// Takes back the event of a group that it has left.
    pub(super) fn retract_join(self, group: IpAddr) {
        let queue = Arc::clone(&self.lock().queue);
        queue.retract(|event| {
            matches!(&event.kind, CmEventKind::MulticastJoin { param }
                if event.id == self && param.ah.is_some_and(|way| way.dgid.ip() == group))
        });
    }
}

/// `rdma_migrate_id(3)`: its events come to another channel, also those that wait.
pub(crate) unsafe extern "C" fn rdma_migrate_id(
    id: *mut rdma_cm_id,
    channel: *mut rdma_event_channel,
) -> c_int {
    // SAFETY: the program's pointers, as the manual page demands.
    minus(unsafe { id_of(id) }.and_then(|id| {
        let to = (!channel.is_null())
            // SAFETY: as above.
            .then(|| unsafe { Ref::<EventChannel>::get(channel) })
            .transpose()?;
        migrate(id, to)
    }))
}

/// Acknowledges the event of its last call that a synchronous identifier keeps for the program.
///
/// # Safety
/// The program uses the event no longer.
pub(super) unsafe fn acknowledge_kept(id: Ref<Id>) {
    // SAFETY: the identifier is alive, and the event its own.
    unsafe {
        let event = mem::replace(&mut (*id.c()).event, ptr::null_mut());
        if !event.is_null() {
            rdma_ack_cm_event(event);
        }
    }
}

/// Moves an identifier to a channel, or to one of its own.
pub(super) fn migrate(id: Ref<Id>, to: Option<Ref<EventChannel>>) -> Result<(), Errno> {
    let is_synchronous = to.is_none();
    let to = to.map_or_else(super::create_channel, Ok)?;
    // SAFETY: it ends with the next call for the identifier.
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
        // Requests that the program does not have yet come along.
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
    // Those that the program has must be acknowledged on the old channel first.
    id.events.wait();
    if had_its_own {
        from.end();
    }
    Ok(())
}

/// `rdma_get_cm_event(3)`.
pub(crate) unsafe extern "C-unwind" fn rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    event: *mut *mut rdma_cm_event,
) -> c_int {
    // SAFETY: the program's pointer, as the manual page demands.
    let known = step(|| unsafe { Ref::<EventChannel>::get(channel) }.map(|c| c.events.raw_fd()));
    let Ok(fd) = known else {
        return step(|| minus(Err(Errno::INVALID)));
    };
    loop {
        // SAFETY: the program has the channel, and no frame has anything to drop.
        let error = unsafe { read_count(fd) };
        // SAFETY: the program's pointers, as the manual page demands.
        if let Some(result) = step(|| unsafe { take(channel, error, event) }) {
            return result;
        }
    }
}

/// Passes the next event to the program; `None` if it has to wait again.
///
/// # Safety
/// The pointers are the program's, as the manual page demands.
unsafe fn take(
    channel: *mut rdma_event_channel,
    error: c_int,
    event: *mut *mut rdma_cm_event,
) -> Option<c_int> {
    if error != 0 {
        return Some(minus(Err(Errno(error))));
    }
    // SAFETY: as the caller promises.
    let channel = match unsafe { Ref::<EventChannel>::get(channel) } {
        Ok(channel) => channel,
        Err(errno) => return Some(minus(Err(errno))),
    };
    let next = channel.events.pop(|event| event.owner().events.add())?;
    // SAFETY: the program provides memory for the pointer.
    unsafe { event.write(give(next)) };
    Some(0)
}

/// `rdma_get_cm_event(3)` within another call, in which the thread is not cancelled.
///
/// # Errors
/// Parameters of the call.
///
/// # Safety
/// The channel is alive.
pub(super) unsafe fn next_event(
    channel: *mut rdma_event_channel,
) -> Result<*mut rdma_cm_event, Errno> {
    let mut event = ptr::null_mut();
    // SAFETY: as the caller promises.
    match step(|| unsafe { rdma_get_cm_event(channel, &raw mut event) }) {
        0 => Ok(event),
        _ => Err(Errno::last()),
    }
}

/// Makes an event for the program.
fn give(event: Event) -> *mut rdma_cm_event {
    let Event { id, listener, kind } = event;
    let owner = listener.unwrap_or(id);
    // SAFETY: all-zero bytes are valid for this plain C structure.
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
            // The library has one event for all that a datagram identifier is not told.
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
                // That of a group is in the place of data, as in librdmacm.
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
    let given = Given {
        owner,
        _private_data: data,
    };
    Ref::new(c, given).handle()
}

/// Shows the program the state of an identifier's queue pair, which the device has changed.
fn set_qp_state(id: Ref<Id>, state: ibv_qp_state) {
    // SAFETY: the identifier is alive, and its queue pair, where it has one.
    unsafe {
        let qp = (*id.c()).qp;
        if !qp.is_null() {
            (*qp).state = state;
        }
    }
}

/// `rdma_ack_cm_event(3)`.
pub(crate) unsafe extern "C" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    // SAFETY: the program's pointer, as the manual page demands.
    minus(unsafe { Ref::<Given>::get(event) }.and_then(|event| {
        let owner = event.owner;
        event.retire()?;
        owner.events.acknowledge(1);
        Ok(())
    }))
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
