//! The RDMA CM: librdmacm's functions, implemented on top of the device's connection manager.
//!
//! | module | contents |
//! | --- | --- |
//! | this one | identifiers and event channels |
//! | `af_ib` | addresses, including InfiniBand addresses |
//! | `calls` | calls that use an identifier |
//! | `events` | events of identifiers |
//! | `endpoint` | `rdma_getaddrinfo` and endpoints |
//! | `groups` | multicast groups |
//! | `on_device` | identifiers on a single device |
//! | `qp` | queue pairs and receive queues of identifiers |
//! | `returns` | identifiers that use all devices, and devices that return |
//!
//! # Locks
//! Each identifier has a lock for its state. It is acquired while the device's lock is held,
//! because events are reported under the device's lock. So it must not be held when a call locks
//! the device. The lock of `returns` must be acquired before both.

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
    /// Shared with identifiers, because a program may destroy the channel first.
    events: Arc<EventQueue<Event>>,
}

impl Ref<EventChannel> {
    /// Closes the channel. The program no longer receives events of its identifiers.
    fn close(self) {
        self.events.close();
        // If another thread has already done this, there is no way to report it.
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

// SAFETY: pointers in the stored attributes are only returned to the program and never
// dereferenced.
unsafe impl Send for IdState {}

/// The values of a path set by a program that have an effect on RoCE. All other values must match
/// the defaults.
#[derive(Clone, Copy)]
struct Path {
    mtu: Mtu,
    traffic_class: u8,
}

/// A device identifier and its context.
type Link = (Ref<Context>, CmId);

/// State protected by an identifier's lock.
struct IdState {
    channel: Ref<EventChannel>,
    /// Queue of the channel. Still used after the channel was destroyed.
    queue: Arc<EventQueue<Event>>,
    /// Set if the program has not assigned a channel: each call waits for its completion.
    is_synchronous: bool,
    space: PortSpace,
    /// Device identifiers. Empty before it has an address. More than one if it listens on all
    /// devices.
    links: Vec<Link>,
    /// The address it is bound to, if this address refers to all devices. In this case, it may have
    /// no links if no device has an address of this family. Like in Linux, the program does not see
    /// any device, even if there is only one.
    any: Option<SocketAddr>,
    /// Set if it is in the list of identifiers that are, or were, bound to all devices.
    is_in_list: bool,
    /// Maximum number of pending requests, if it is listening.
    backlog: Option<u32>,
    /// Own service ID and service ID of the peer, if it uses InfiniBand addresses.
    services: Option<(Service, Service)>,
    /// Queue pair to create for each request of a listening endpoint.
    listen_qp: Option<ibv_qp_init_attr>,
    /// Private data for the connection request of an endpoint.
    connect_data: Vec<u8>,
    /// Path set by the program.
    path: Option<Path>,
    /// Options to set on new device identifiers.
    options: Vec<CmOption>,
    /// Joined multicast groups.
    groups: Vec<Group>,
    /// Vendor options if the program modifies the queue pair itself, and the peer's options.
    local_ece: Ece,
    remote_ece: Ece,
    /// Set if completion queues and channels were created with the queue pair or receive queue.
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

    /// Returns its device identifiers.
    fn links(&self) -> Vec<Link> {
        self.lock().links.clone()
    }

    /// Returns whether it has an address.
    fn is_bound(&self) -> bool {
        let state = self.lock();
        state.any.is_some() || !state.links.is_empty()
    }

    /// Returns its device identifier.
    ///
    /// # Errors
    /// Returns `EINVAL` if it has no device identifier yet.
    fn link(&self) -> Result<Link, Errno> {
        self.lock().links.first().copied().ok_or(Errno::INVALID)
    }
}

/// Returns the identifier for a program's pointer.
///
/// # Errors
/// Returns `EINVAL` if the pointer is invalid.
///
/// # Safety
/// Same as for [`Ref::get`].
unsafe fn id_of(id: *mut rdma_cm_id) -> Result<Ref<Id>, Errno> {
    // SAFETY: guaranteed by the caller.
    unsafe { Ref::get(id) }
}

/// A context shared by all identifiers of a device, with a protection domain for queue pairs that
/// are created without one. Like in librdmacm, it is never closed.
struct Shared {
    context: Ref<Context>,
    pd: Ref<Pd>,
    /// XRC domain for objects that are created without one, created on demand.
    xrcd: Mutex<Option<Ref<Xrcd>>>,
}

impl Shared {
    /// Returns the XRC domain for objects that are created without one.
    ///
    /// # Errors
    /// Returns errors of opening the domain.
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

/// Returns the shared context of a device.
///
/// # Errors
/// Returns errors of opening the device.
fn shared(device: &'static Device) -> Result<&'static Shared, Errno> {
    shared_on(device, || engine(device))
}

/// Same as [`shared`], but calls `find` to get the engine if the device is not open yet.
fn shared_on(
    device: &'static Device,
    find: impl FnOnce() -> Result<Arc<Engine>, Errno>,
) -> Result<&'static Shared, Errno> {
    let place = &device.shared;
    let known = place.load(Ordering::Acquire);
    // A context of a parent process can't be used here, and neither can a context of a removed
    // device.
    let is_useful = |context: Ref<Context>| !context.is_inherited() && !context.is_removed();
    // SAFETY: a shared context is never freed.
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
    // SAFETY: a stored shared context is never freed. A context that was not stored belongs to this
    // call.
    unsafe {
        let Err(other) = entered else {
            return Ok(&*ours);
        };
        // Another thread was faster.
        drop(Box::from_raw(ours));
        ibv_dealloc_pd(pd.handle());
        ibv_close_device(context.handle());
        Ok(&*other.cast())
    }
}

/// Returns whether a device was used by this process, was removed, and has not returned yet.
fn is_away(device: &'static Device) -> bool {
    let known = device.shared.load(Ordering::Acquire);
    // SAFETY: a shared context is never freed.
    unsafe { known.cast::<Shared>().as_ref() }.is_some_and(|shared| shared.context.is_removed())
}

/// Returns the device with this address.
fn device_at(addr: IpAddr) -> Option<&'static Device> {
    devices().iter().find(|d| d.config.addr == addr)
}

/// Returns the device for a destination: the device with the address that the host would use, or
/// the first device of the destination's family.
fn device_towards(dst: SocketAddr) -> Result<&'static Device, Errno> {
    let any: SocketAddr = match dst {
        SocketAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
        SocketAddr::V6(_) => ([0u16; 8], 0).into(),
    };
    // Connecting a datagram socket looks up the route without sending any packets.
    let local = std::net::UdpSocket::bind(any)
        .and_then(|socket| socket.connect(dst).and_then(|()| socket.local_addr()));
    let by_route = local.ok().and_then(|local| device_at(local.ip()));
    let same_family = || {
        let mut all = devices().iter();
        all.find(|d| d.config.addr.is_ipv4() == dst.is_ipv4())
    };
    by_route.or_else(same_family).ok_or(Errno(libc::ENODEV))
}

/// Reads an address passed by the program.
///
/// # Errors
/// Returns `EAFNOSUPPORT` if it is not an Internet address.
///
/// # Safety
/// The pointer must be null, or the address must have the size of its family.
unsafe fn address(addr: *const sockaddr) -> Result<Option<SocketAddr>, Errno> {
    if addr.is_null() {
        return Ok(None);
    }
    // SAFETY: all addresses start with the family.
    let family = i32::from(unsafe { (*addr).sa_family });
    let size = match family {
        libc::AF_INET => size_of::<sockaddr_in>(),
        libc::AF_INET6 => size_of::<sockaddr_in6>(),
        _ => return Err(Errno(libc::EAFNOSUPPORT)),
    };
    // SAFETY: all zeroes is valid, and there is enough space for any address.
    let storage = unsafe {
        let mut storage: sockaddr_storage = zeroed();
        ptr::copy_nonoverlapping(addr.cast::<u8>(), (&raw mut storage).cast(), size);
        storage
    };
    let addr = socket_addr(&storage).ok_or(Errno(libc::EAFNOSUPPORT))?;
    Ok(Some(SocketAddr::new(addr.ip().to_canonical(), addr.port())))
}

/// Writes an address to a route.
///
/// # Safety
/// There must be enough space for an address of any family.
unsafe fn write_address(place: *mut sockaddr, addr: SocketAddr) {
    let mut ours = SockAddr::new(addr);
    let size = if addr.is_ipv4() {
        size_of::<sockaddr_in>()
    } else {
        size_of::<sockaddr_in6>()
    };
    // SAFETY: guaranteed by the caller.
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
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    if let Ok(channel) = unsafe { Ref::<EventChannel>::get(channel) } {
        channel.close();
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
        // SAFETY: the program passes a valid pointer, as required by the manual page.
        .then(|| unsafe { Ref::<EventChannel>::get(channel) })
        .transpose()
        .and_then(|channel| {
            let channel = channel.map(|channel| (channel, Arc::clone(&channel.events)));
            create_id(channel, context, space, None)
        });
    minus(created.map(|created| {
        // SAFETY: the program provides memory for the identifier.
        unsafe { id.write(created.handle()) };
    }))
}

/// Converts a program's port space.
fn port_space_of(space: rdma_port_space) -> Option<PortSpace> {
    Some(match space {
        RDMA_PS_TCP => PortSpace::Tcp,
        RDMA_PS_UDP => PortSpace::Udp,
        RDMA_PS_IPOIB => PortSpace::IpoIb,
        RDMA_PS_IB => PortSpace::IbIp,
        _ => return None,
    })
}

/// Returns the type of queue pair for identifiers of a port space.
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
    // SAFETY: all zeroes is valid for this plain C structure.
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
    /// Creates a device identifier on the device of a shared context.
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
            // It was checked when it was set.
            let _ = locked.nic.set_option(id, option);
        }
        know(&locked, id, self);
        self.lock().links.push((shared.context, id));
        Ok((shared.context, id))
    }

    /// Destroys the device identifiers created by `link_to`.
    fn unlink(self) {
        let links = mem::take(&mut self.lock().links);
        links.into_iter().for_each(|link| self.destroy_link(link));
    }

    /// Destroys a device identifier.
    fn destroy_link(self, (context, id): Link) {
        let mut locked = context.lock();
        forget(&locked, id, self);
        locked.release_port(id);
        // It exists, so this can't fail.
        let _ = locked.nic.destroy_id(id);
        // The peer must be notified during this call, as with a kernel, because the process may
        // exit after it.
        locked.transmit();
    }

    /// Destroys all device identifiers created by `link_to` except one.
    fn unlink_but(self, kept: Link) {
        let rest = {
            let mut state = self.lock();
            let links = mem::take(&mut state.links);
            let (own, rest): (Vec<_>, Vec<_>) = links.into_iter().partition(|link| *link == kept);
            state.links = own;
            rest
        };
        rest.into_iter().for_each(|link| self.destroy_link(link));
    }

    /// Updates the device and the addresses of an identifier, as seen by the program.
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
        // SAFETY: the identifier is alive. The program reads these fields after the call or event
        // that sets them.
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

    /// Updates the addresses of an identifier, as seen by the program. The local address is shown
    /// as it was bound. Returns the bound address if it refers to all devices.
    fn show_addresses(
        self,
        local: Option<SocketAddr>,
        peer: Option<SocketAddr>,
    ) -> Option<SocketAddr> {
        let (any, services, space) = {
            let state = self.lock();
            (state.any, state.services, state.space)
        };
        // SAFETY: as in `show_route`. There is enough space for any address.
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
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    minus(unsafe { id_of(id) }.and_then(|id| {
        returns::forget(id);
        id.unlink();
        let (channel, queue, is_synchronous) = {
            let state = id.lock();
            let queue = Arc::clone(&state.queue);
            (state.channel, queue, state.is_synchronous)
        };
        // SAFETY: the event is only valid while the identifier exists.
        unsafe { acknowledge_kept(id) };
        // Drop events that were not yet returned to the program, and wait until it has acknowledged
        // the rest.
        retract(&queue, id);
        id.events.wait();
        if is_synchronous {
            channel.close();
        }
        free_route(id);
        id.retire()
    }))
}

/// `rdma_get_devices(3)`: returns contexts of all devices, followed by a null pointer.
pub(crate) unsafe extern "C" fn rdma_get_devices(count: *mut c_int) -> *mut *mut ibv_context {
    let contexts: Vec<_> = devices()
        .iter()
        .filter_map(|d| shared(d).ok())
        .map(|shared| shared.context.handle())
        .collect();
    if !count.is_null() {
        // SAFETY: the program provides memory for the number.
        unsafe { count.write(contexts.len() as c_int) };
    }
    // SAFETY: this is the size of the pointers plus one.
    let list = unsafe { libc::calloc(contexts.len() + 1, size_of::<*mut ibv_context>()) };
    let list = list.cast::<*mut ibv_context>();
    if list.is_null() {
        return pointer(Err(Errno::NO_MEMORY));
    }
    for (i, context) in contexts.into_iter().enumerate() {
        // SAFETY: the list has enough space for all of them.
        unsafe { list.add(i).write(context) };
    }
    list
}

/// `rdma_free_devices(3)`.
pub(crate) unsafe extern "C" fn rdma_free_devices(list: *mut *mut ibv_context) {
    // SAFETY: the list was allocated by `calloc`.
    unsafe { libc::free(list.cast()) };
}
