//! The RDMA CM: librdmacm's calls over the device's connection manager.
//!
//! | module | what it has |
//! | --- | --- |
//! | this one | identifiers and event channels |
//! | `af_ib` | addresses, those of InfiniBand among them |
//! | `calls` | what a program asks of an identifier |
//! | `events` | what happens to it |
//! | `endpoint` | `rdma_getaddrinfo` and what is built on it |
//! | `groups` | multicast groups |
//! | `on_device` | what an identifier is on one device |
//! | `qp` | queue pairs and receive queues of identifiers |
//! | `returns` | identifiers at all devices, when one comes back |
//!
//! # Locks
//! An identifier's state has a lock of its own. It is taken while the device's lock is held, since
//! events are reported under that one; so no call holds it when it locks the device. The lock of
//! `returns` comes before both.

mod af_ib;
mod calls;
mod endpoint;
mod events;
mod groups;
mod on_device;
mod qp;
mod returns;

use std::ffi::{c_int, c_void};
use std::mem::{self, zeroed};
use std::net::{IpAddr, SocketAddr};
use std::ptr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use riser_rdma_core_sys::bindings::*;
use riser_transport::rdma_core::convert::{SockAddr, socket_addr};
use riser_transport::verbs::{
    CmError, CmId, CmOption, Ece, Mtu, PortSpace, QpType, RdmaCm as _, Verbs as _,
};

use self::af_ib::Service;
pub(crate) use self::calls::*;
pub(crate) use self::endpoint::*;
pub(crate) use self::events::*;
use self::groups::Group;
pub(crate) use self::groups::*;
pub(crate) use self::qp::*;
use crate::context::{Context, ibv_close_device};
use crate::devices::{Device, devices};
use crate::domain::{Pd, Xrcd, alloc_pd, ibv_dealloc_pd, open_unnamed_xrcd};
use crate::engine::Engine;
use crate::errno::{Errno, minus, pointer};
use crate::lock::{Shielded, shielded, unpoisoned};
use crate::object::{Ref, kind};
use crate::open::{engine, open_on};
use crate::queue::{EventQueue, Unacknowledged};

/// An event channel.
pub(crate) struct EventChannel {
    /// Identifiers have it as well: a program may destroy the channel before them.
    events: Arc<EventQueue<Event>>,
}

impl Ref<EventChannel> {
    /// Ends the channel. Events of its identifiers are not shown to the program any longer.
    fn end(self) {
        self.events.close();
        // It has no way to report that another thread was faster.
        let _ = self.retire();
    }
}

kind!(EventChannel, rdma_event_channel, b"evch");

/// An identifier.
pub(crate) struct Id {
    state: Mutex<IdState>,
    events: Unacknowledged,
}

kind!(Id, rdma_cm_id, b"cmid");

// SAFETY: the pointers of the kept attributes are given back to the program and not followed.
unsafe impl Send for IdState {}

/// What a path that a program sets decides on RoCE; the rest has to be what it is anyway.
#[derive(Clone, Copy)]
struct Path {
    mtu: Mtu,
    traffic_class: u8,
}

/// An identifier of a device, and the context that it is of.
type Link = (Ref<Context>, CmId);

/// What an identifier's lock protects.
struct IdState {
    channel: Ref<EventChannel>,
    /// The channel's, also once that is destroyed.
    queue: Arc<EventQueue<Event>>,
    /// It has no channel of the program's: each call waits for its outcome.
    is_synchronous: bool,
    space: PortSpace,
    /// Its identifiers of the devices: none before it has an address, and several where it listens
    /// on all devices.
    links: Vec<Link>,
    /// The address that it is bound to, where that stands for all devices. It may have no link then,
    /// where no device has an address of that family. As in Linux, the program sees none of them, even
    /// if there is one.
    any: Option<SocketAddr>,
    /// It is in the list of those that are bound so, or were.
    is_in_list: bool,
    /// Requests that may wait for it, once it listens.
    backlog: Option<u32>,
    /// Its addresses are of InfiniBand: service ids of the own one and of the peer's.
    services: Option<(Service, Service)>,
    /// Queue pair, for each request of a listening end point.
    listen_qp: Option<ibv_qp_init_attr>,
    /// Private data of the connection request of an end point.
    connect_data: Vec<u8>,
    /// Path that the program has set.
    path: Option<Path>,
    /// Options that were set before it had an identifier of a device.
    options: Vec<CmOption>,
    /// Multicast groups that it has joined.
    groups: Vec<Group>,
    /// Vendor options of a queue pair that the program moves itself, and the peer's.
    local_ece: Ece,
    remote_ece: Ece,
    /// Completion queues and channels that were made with the queue pair, or the receive queue.
    owns_send_cq: bool,
    owns_recv_cq: bool,
}

impl From<CmError> for Errno {
    fn from(error: CmError) -> Self {
        Self(match error {
            CmError::TooManyIds => libc::ENOMEM,
            CmError::AddressInUse => libc::EADDRINUSE,
            CmError::AddressNotAvailable => libc::EADDRNOTAVAIL,
            CmError::Unreachable | CmError::LinkLocal => libc::ENETUNREACH,
            CmError::Timeout => libc::ETIMEDOUT,
            CmError::Verbs(error) => return error.into(),
            _ => libc::EINVAL,
        })
    }
}

impl Id {
    fn lock(&self) -> Shielded<'_, IdState> {
        shielded(&self.state)
    }

    /// Its identifiers of the devices.
    fn links(&self) -> Vec<Link> {
        self.lock().links.clone()
    }

    /// Whether it has an address.
    fn is_bound(&self) -> bool {
        let state = self.lock();
        state.any.is_some() || !state.links.is_empty()
    }

    /// Its identifier of the device.
    ///
    /// # Errors
    /// `EINVAL` before it has one.
    fn link(&self) -> Result<Link, Errno> {
        self.lock().links.first().copied().ok_or(Errno::INVALID)
    }
}

/// The identifier that a program's pointer names.
///
/// # Errors
/// `EINVAL` where it names none.
///
/// # Safety
/// As [`Ref::get`].
unsafe fn id_of(id: *mut rdma_cm_id) -> Result<Ref<Id>, Errno> {
    // SAFETY: as the caller promises.
    unsafe { Ref::get(id) }
}

/// A context that the identifiers of a device share, with a protection domain for queue pairs that
/// are created without one. It stays open, as in librdmacm.
struct Shared {
    context: Ref<Context>,
    pd: Ref<Pd>,
    /// XRC domain for those that are created without one, once there is such.
    xrcd: Mutex<Option<Ref<Xrcd>>>,
}

impl Shared {
    /// The XRC domain for what is created without one.
    ///
    /// # Errors
    /// Those of opening it.
    fn xrcd(&self) -> Result<Ref<Xrcd>, Errno> {
        let mut place = unpoisoned(self.xrcd.lock());
        if let Some(xrcd) = *place {
            return Ok(xrcd);
        }
        let xrcd = open_unnamed_xrcd(self.context)?;
        *place = Some(xrcd);
        Ok(xrcd)
    }
}

/// The shared context of a device.
///
/// # Errors
/// Those of opening the device.
fn shared(device: &'static Device) -> Result<&'static Shared, Errno> {
    shared_on(device, || engine(device))
}

/// The same, where the engine is `find`'s if the device is not open as yet.
fn shared_on(
    device: &'static Device,
    find: impl FnOnce() -> Result<Arc<Engine>, Errno>,
) -> Result<&'static Shared, Errno> {
    let place = &device.shared;
    let known = place.load(Ordering::Acquire);
    // That of the process that this one was forked from is of no use here, nor is that of a device
    // that was removed.
    let is_useful = |context: Ref<Context>| !context.is_inherited() && !context.is_removed();
    // SAFETY: what is in the place stays.
    let shared = unsafe { known.cast::<Shared>().as_ref() };
    if let Some(shared) = shared.filter(|shared| is_useful(shared.context)) {
        return Ok(shared);
    }
    let context = open_on(device, find()?)?;
    context.lock().on_cm_event = Some(report);
    let pd = alloc_pd(context)?;
    let xrcd = Mutex::default();
    let ours = Box::into_raw(Box::new(Shared { context, pd, xrcd }));
    let entered = place.compare_exchange(known, ours.cast(), Ordering::AcqRel, Ordering::Acquire);
    // SAFETY: what is in the place stays; what is not there is this call's.
    unsafe {
        let Err(other) = entered else {
            return Ok(&*ours);
        };
        // Another thread was sooner.
        drop(Box::from_raw(ours));
        ibv_dealloc_pd(pd.handle());
        ibv_close_device(context.handle());
        Ok(&*other.cast())
    }
}

/// Whether a device that this process has used was removed, and is not back.
fn is_away(device: &'static Device) -> bool {
    let known = device.shared.load(Ordering::Acquire);
    // SAFETY: what is in the place stays.
    unsafe { known.cast::<Shared>().as_ref() }.is_some_and(|shared| shared.context.is_removed())
}

/// The device that has an address.
fn device_at(addr: IpAddr) -> Option<&'static Device> {
    devices().iter().find(|d| d.config.addr == addr)
}

/// The device from which a destination is reached: the one whose address the host would use, or the
/// first of the destination's family.
fn device_towards(dst: SocketAddr) -> Result<&'static Device, Errno> {
    let any: SocketAddr = match dst {
        SocketAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
        SocketAddr::V6(_) => ([0u16; 8], 0).into(),
    };
    // Nothing is sent: connecting a datagram socket looks the route up.
    let local = std::net::UdpSocket::bind(any)
        .and_then(|socket| socket.connect(dst).and_then(|()| socket.local_addr()));
    let by_route = local.ok().and_then(|local| device_at(local.ip()));
    let same_family = || {
        let mut all = devices().iter();
        all.find(|d| d.config.addr.is_ipv4() == dst.is_ipv4())
    };
    by_route.or_else(same_family).ok_or(Errno(libc::ENODEV))
}

/// An address of the program's.
///
/// # Errors
/// `EAFNOSUPPORT` for another family than the Internet's.
///
/// # Safety
/// The pointer is null, or the address has the size of its family.
unsafe fn address(addr: *const sockaddr) -> Result<Option<SocketAddr>, Errno> {
    if addr.is_null() {
        return Ok(None);
    }
    // SAFETY: the family comes first in each address.
    let family = i32::from(unsafe { (*addr).sa_family });
    let size = match family {
        libc::AF_INET => size_of::<sockaddr_in>(),
        libc::AF_INET6 => size_of::<sockaddr_in6>(),
        _ => return Err(Errno(libc::EAFNOSUPPORT)),
    };
    // SAFETY: all-zero bytes are valid, and there is room for each kind of address.
    let storage = unsafe {
        let mut storage: sockaddr_storage = zeroed();
        ptr::copy_nonoverlapping(addr.cast::<u8>(), (&raw mut storage).cast(), size);
        storage
    };
    let addr = socket_addr(&storage).ok_or(Errno(libc::EAFNOSUPPORT))?;
    Ok(Some(SocketAddr::new(addr.ip().to_canonical(), addr.port())))
}

/// Writes an address where a route has one.
///
/// # Safety
/// There is room for an address of any family.
unsafe fn write_address(place: *mut sockaddr, addr: SocketAddr) {
    let mut ours = SockAddr::new(addr);
    let size = if addr.is_ipv4() {
        size_of::<sockaddr_in>()
    } else {
        size_of::<sockaddr_in6>()
    };
    // SAFETY: as the caller promises.
    unsafe { ptr::copy_nonoverlapping(ours.as_mut_ptr().cast::<u8>(), place.cast(), size) };
}

/// `rdma_create_event_channel(3)`.
pub(crate) unsafe extern "C" fn rdma_create_event_channel() -> *mut rdma_event_channel {
    pointer(create_channel().map(Ref::handle))
}

fn create_channel() -> Result<Ref<EventChannel>, Errno> {
    if devices().is_empty() {
        return Err(Errno(libc::ENODEV));
    }
    crate::fork::install();
    let events = Arc::new(EventQueue::new()?);
    let c = rdma_event_channel {
        fd: events.raw_fd(),
    };
    Ok(Ref::new(c, EventChannel { events }))
}

/// `rdma_destroy_event_channel(3)`.
pub(crate) unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    // SAFETY: the program's pointer, as the manual page demands.
    if let Ok(channel) = unsafe { Ref::<EventChannel>::get(channel) } {
        channel.end();
    }
}

/// `rdma_create_id(3)`.
pub(crate) unsafe extern "C" fn rdma_create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    context: *mut c_void,
    space: rdma_port_space,
) -> c_int {
    let created = (!channel.is_null())
        // SAFETY: the program's pointer, as the manual page demands.
        .then(|| unsafe { Ref::<EventChannel>::get(channel) })
        .transpose()
        .and_then(|channel| {
            let channel = channel.map(|channel| (channel, Arc::clone(&channel.events)));
            create_id(channel, context, space, None)
        });
    minus(created.map(|created| {
        // SAFETY: the program gives a place for the identifier.
        unsafe { id.write(created.handle()) };
    }))
}

/// The port space that a program names.
fn port_space_of(space: rdma_port_space) -> Option<PortSpace> {
    Some(match space {
        RDMA_PS_TCP => PortSpace::Tcp,
        RDMA_PS_UDP => PortSpace::Udp,
        RDMA_PS_IPOIB => PortSpace::IpoIb,
        RDMA_PS_IB => PortSpace::IbIp,
        _ => return None,
    })
}

/// Kind of queue pair that the identifiers of a port space have.
fn qp_type(space: rdma_port_space) -> ibv_qp_type {
    match space {
        RDMA_PS_UDP | RDMA_PS_IPOIB => IBV_QPT_UD,
        _ => IBV_QPT_RC,
    }
}

fn create_id(
    channel: Option<(Ref<EventChannel>, Arc<EventQueue<Event>>)>,
    context: *mut c_void,
    space: rdma_port_space,
    kind: Option<ibv_qp_type>,
) -> Result<Ref<Id>, Errno> {
    let ours = port_space_of(space).ok_or(Errno::INVALID)?;
    let kind = kind.unwrap_or_else(|| qp_type(space));
    let is_known = matches!(
        kind,
        IBV_QPT_RC | IBV_QPT_UC | IBV_QPT_UD | IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV
    );
    if !is_known {
        return Err(Errno::INVALID);
    }
    let is_synchronous = channel.is_none();
    let (channel, queue) = match channel {
        Some(given) => given,
        None => {
            let own = create_channel()?;
            (own, Arc::clone(&own.events))
        }
    };
    // SAFETY: all-zero bytes are valid for this plain C structure.
    let mut c: rdma_cm_id = unsafe { zeroed() };
    c.channel = channel.handle();
    c.context = context;
    c.ps = space;
    c.qp_type = kind;
    Ok(Ref::new(
        c,
        Id {
            state: Mutex::new(IdState {
                channel,
                queue,
                is_synchronous,
                space: ours,
                links: Vec::new(),
                any: None,
                is_in_list: false,
                backlog: None,
                services: None,
                listen_qp: None,
                connect_data: Vec::new(),
                path: None,
                options: Vec::new(),
                groups: Vec::new(),
                local_ece: Ece::default(),
                remote_ece: Ece::default(),
                owns_send_cq: false,
                owns_recv_cq: false,
            }),
            events: Unacknowledged::default(),
        },
    ))
}

impl Ref<Id> {
    /// Gives the identifier one of the device that has a shared context.
    fn link_to(self, shared: &'static Shared) -> Result<Link, Errno> {
        let (space, options) = {
            let state = self.lock();
            let bare = state.services.map(|_| CmOption::BareRequests(true));
            let options = state.options.iter().copied().chain(bare);
            (state.space, options.collect::<Vec<_>>())
        };
        // SAFETY: the identifier is alive.
        let kind = match unsafe { (*self.c()).qp_type } {
            IBV_QPT_UD => QpType::Ud,
            IBV_QPT_UC => QpType::Uc,
            IBV_QPT_XRC_SEND => QpType::XrcIni,
            IBV_QPT_XRC_RECV => QpType::XrcTgt,
            _ => QpType::Rc,
        };
        let mut locked = shared.context.lock();
        let id = locked.nic.create_id_for(space, kind)?;
        for option in options {
            // It was taken when it was set.
            let _ = locked.nic.set_option(id, option);
        }
        know(&locked, id, self);
        self.lock().links.push((shared.context, id));
        Ok((shared.context, id))
    }

    /// Takes back what `link_to` has done.
    fn unlink(self) {
        let links = mem::take(&mut self.lock().links);
        links.into_iter().for_each(|link| self.give_back(link));
    }

    /// Destroys an identifier of a device.
    fn give_back(self, (context, id): Link) {
        let mut locked = context.lock();
        forget(&locked, id, self);
        locked.give_back_port(id);
        // It existed, so it can be destroyed.
        let _ = locked.nic.destroy_id(id);
        // The peer hears of it from this call, as from a kernel: the process may end now.
        locked.transmit();
    }

    /// Takes back all that `link_to` has done but one.
    fn unlink_but(self, kept: Link) {
        let rest = {
            let mut state = self.lock();
            let links = mem::take(&mut state.links);
            let (own, rest): (Vec<_>, Vec<_>) = links.into_iter().partition(|link| *link == kept);
            state.links = own;
            rest
        };
        rest.into_iter().for_each(|link| self.give_back(link));
    }

    /// Shows the program the device and the addresses of an identifier.
    fn show_route(self) {
        let Ok((context, id)) = self.link() else {
            return;
        };
        let (local, peer, gid) = {
            let locked = context.lock();
            let gid = locked.nic.query_gid(1, 0).ok();
            (locked.nic.local_addr(id), locked.nic.peer_addr(id), gid)
        };
        let any = self.show_addresses(local, peer);
        let pd = shared(context.device).map(|shared| shared.pd.handle());
        // SAFETY: the identifier is alive; the program reads these members once it has the outcome
        // of the call, or the event, that sets them.
        unsafe {
            let c = &mut *self.c();
            if any.is_none() {
                c.verbs = context.handle();
                c.port_num = 1;
                if c.pd.is_null() {
                    c.pd = pd.unwrap_or(ptr::null_mut());
                }
                if let Some(gid) = gid {
                    c.route.addr.addr.ibaddr.sgid = ibv_gid { raw: gid.0 };
                }
                c.route.addr.addr.ibaddr.pkey = 0xffff_u16.to_be();
            }
            if let Some(peer) = peer {
                let gid = riser_transport::verbs::Gid::from(peer.ip());
                c.route.addr.addr.ibaddr.dgid = ibv_gid { raw: gid.0 };
            }
        }
    }

    /// Shows the program the addresses of an identifier, the own one as it was bound; answers the
    /// address that it is bound to, where that stands for all devices.
    fn show_addresses(
        self,
        local: Option<SocketAddr>,
        peer: Option<SocketAddr>,
    ) -> Option<SocketAddr> {
        let (any, services, space) = {
            let state = self.lock();
            (state.any, state.services, state.space)
        };
        // SAFETY: as in `show_route`; each place has room for any address.
        unsafe {
            let addr = &raw mut (*self.c()).route.addr;
            if let Some(local) = local {
                let ip = any.map_or(local.ip(), |any| any.ip());
                let shown = SocketAddr::new(ip, local.port());
                let service = services.map(|_| Service::of(space, local.port()));
                let place = (&raw mut (*addr).__bindgen_anon_1).cast();
                af_ib::write(place, shown, service);
            }
            if let Some(peer) = peer {
                let place = (&raw mut (*addr).__bindgen_anon_2).cast();
                af_ib::write(place, peer, services.map(|(_, theirs)| theirs));
            }
        }
        any
    }
}

/// `rdma_destroy_id(3)`.
pub(crate) unsafe extern "C" fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: the program's pointer, as the manual page demands.
    minus(unsafe { id_of(id) }.and_then(|id| {
        returns::forget(id);
        id.unlink();
        let (channel, queue, is_synchronous) = {
            let state = id.lock();
            let queue = Arc::clone(&state.queue);
            (state.channel, queue, state.is_synchronous)
        };
        // SAFETY: it ends with the identifier.
        unsafe { acknowledge_kept(id) };
        // What the program has not taken yet goes; what it has taken it must acknowledge.
        retract(&queue, id);
        id.events.wait();
        if is_synchronous {
            channel.end();
        }
        free_route(id);
        id.retire()
    }))
}

/// `rdma_get_devices(3)`: contexts of all devices, and a null pointer after them.
pub(crate) unsafe extern "C" fn rdma_get_devices(count: *mut c_int) -> *mut *mut ibv_context {
    let contexts: Vec<_> = devices()
        .iter()
        .filter_map(|d| shared(d).ok())
        .map(|shared| shared.context.handle())
        .collect();
    if !count.is_null() {
        // SAFETY: the program gives a place for the number.
        unsafe { count.write(contexts.len() as c_int) };
    }
    // SAFETY: the size is that of the pointers and one more.
    let list = unsafe { libc::calloc(contexts.len() + 1, size_of::<*mut ibv_context>()) };
    let list = list.cast::<*mut ibv_context>();
    if list.is_null() {
        return pointer(Err(Errno::NO_MEMORY));
    }
    for (i, context) in contexts.into_iter().enumerate() {
        // SAFETY: the list has room for all of them.
        unsafe { list.add(i).write(context) };
    }
    list
}

/// `rdma_free_devices(3)`.
pub(crate) unsafe extern "C" fn rdma_free_devices(list: *mut *mut ibv_context) {
    // SAFETY: the list came from `calloc`.
    unsafe { libc::free(list.cast()) };
}
