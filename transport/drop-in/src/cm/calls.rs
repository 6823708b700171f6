//! What a program asks of an identifier.

use std::ffi::{c_int, c_void};
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::slice;
use std::time::Duration;

use riser_rdma_core_sys::bindings::*;
use riser_transport::rdma_core::convert::{conn_param_of, qp_attr, qp_attr_from_mask};
use riser_transport::roce::Roce;
use riser_transport::verbs::{
    CmError, CmId, CmOption, ConnParam, Ece, Gid, Mtu, PortSpace, RdmaCm, Verbs as _,
};

use super::af_ib::{Address, Service};
use super::on_device::{bind_at, is_for, listen_on};
use super::{
    Id, Path, acknowledge_kept, device_at, device_towards, id_of, is_away, next_event,
    port_space_of, returns, shared,
};
use crate::devices::devices;
use crate::errno::{Errno, minus};
use crate::object::Ref;

/// Longest queue of requests of a listener.
const BACKLOG: u32 = 1024;

/// Waits for the outcome of a call, where the identifier has no channel of the program's. The event
/// is kept for the program in the identifier.
///
/// # Errors
/// The event's, for one that reports an error; `ECONNREFUSED` for a refusal.
pub(super) fn complete(id: Ref<Id>) -> Result<(), Errno> {
    let channel = {
        let state = id.lock();
        if !state.is_synchronous {
            return Ok(());
        }
        state.channel
    };
    // SAFETY: the identifier is alive, and its events are its own.
    unsafe {
        acknowledge_kept(id);
        let event = next_event(channel.handle())?;
        (*id.c()).event = event;
        match (*event).status {
            0 => Ok(()),
            _ if (*event).event == RDMA_CM_EVENT_REJECTED => Err(Errno(libc::ECONNREFUSED)),
            status => Err(Errno(status.abs())),
        }
    }
}

/// `rdma_bind_addr(3)`.
pub(crate) unsafe extern "C" fn rdma_bind_addr(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int {
    // SAFETY: the program's pointers, as the manual page demands.
    minus(unsafe { id_of(id) }.and_then(|id| {
        // SAFETY: as above.
        let addr = unsafe { Address::read(addr) }?.ok_or(Errno::INVALID)?;
        bind(id, addr)
    }))
}

pub(super) fn bind(id: Ref<Id>, addr: Address) -> Result<(), Errno> {
    if id.is_bound() {
        return Err(Errno::INVALID);
    }
    let created = created_in(id)?;
    let addr = match addr.service {
        None => addr.socket,
        Some(service) => {
            let space = service.space(created)?;
            let mut state = id.lock();
            state.space = space;
            state.services = Some((service, Service::default()));
            SocketAddr::new(addr.socket.ip(), service.port())
        }
    };
    let is_any = is_any(addr.ip());
    let result = if is_any {
        bind_all(id, addr)
    } else {
        let device = device_at(addr.ip()).ok_or(Errno(libc::ENODEV));
        let link = device.and_then(|device| id.link_to(shared(device)?));
        let space = id.lock().space;
        link.and_then(|(context, device_id)| {
            let mut locked = context.lock();
            let port = locked.take_port(device_id, space, addr.port())?;
            let addr = SocketAddr::new(addr.ip(), port);
            Ok(locked.nic.bind_addr(device_id, addr)?)
        })
    };
    if result.is_err() {
        id.unlink();
        let mut state = id.lock();
        (state.space, state.services) = (created, None);
    } else {
        // The program sees the address that it gave, with the port that was taken.
        id.show_route();
        if id.links().is_empty() {
            id.show_addresses(Some(addr), None);
        }
    }
    result
}

/// Whether an address stands for all devices: the unspecified one does, and those of loopback, as in
/// Linux (`cma_any_addr()`), unless a device is at one of them. Then loopback is a network, in which
/// an address without a device is a mistake.
fn is_any(addr: IpAddr) -> bool {
    stands_for_all(addr, devices().iter().map(|d| d.config.addr))
}

fn stands_for_all(addr: IpAddr, mut devices: impl Iterator<Item = IpAddr>) -> bool {
    addr.is_unspecified() || (addr.is_loopback() && !devices.any(|device| device.is_loopback()))
}

/// Binds to all devices of the address's family, at one port. There may be no such device, and then
/// nothing comes: programs bind to both families without a look at the devices. One that was removed
/// is bound to when it is back.
fn bind_all(id: Ref<Id>, addr: SocketAddr) -> Result<(), Errno> {
    let all = devices().iter();
    let all = all.filter(|device| is_for(id, device, addr.ip()));
    // Before the lock, for which threads that fork or listen wait: opening a device may take seconds.
    let all: Vec<_> = all.map(|device| (device, shared(device))).collect();
    let at_all = returns::hold();
    // A device may be removed at any time.
    id.lock().any = Some(addr);
    let mut port = addr.port();
    for (device, opened) in all {
        match opened.and_then(|shared| bind_at(id, shared, SocketAddr::new(addr.ip(), port))) {
            // The first device chooses for all where the program leaves it open.
            Ok((_, taken)) => port = taken,
            Err(_) if is_away(device) => returns::await_return(device),
            Err(errno) => {
                id.lock().any = None;
                return Err(errno);
            }
        }
    }
    id.lock().any = Some(SocketAddr::new(addr.ip(), port));
    returns::enter(&at_all, id);
    Ok(())
}

/// `rdma_resolve_addr(3)`.
pub(crate) unsafe extern "C" fn rdma_resolve_addr(
    id: *mut rdma_cm_id,
    src: *mut sockaddr,
    dst: *mut sockaddr,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the program's pointers, as the manual page demands.
    minus(unsafe { id_of(id) }.and_then(|id| {
        // SAFETY: as above.
        let (src, dst) = unsafe { (Address::read(src)?, Address::read(dst)?) };
        let dst = dst.ok_or(Errno::INVALID)?;
        resolve_addr(id, src, dst, timeout_ms)?;
        complete(id)
    }))
}

pub(super) fn resolve_addr(
    id: Ref<Id>,
    src: Option<Address>,
    dst: Address,
    timeout_ms: c_int,
) -> Result<(), Errno> {
    // What is bound to all devices becomes one's.
    let _at_all = returns::hold_for(id);
    let (src, dst) = use_services(id, src, dst)?;
    let src = src.filter(|a| !is_any(a.ip()) || a.port() != 0);
    let links = id.links();
    let (context, device_id) = match links[..] {
        [] => {
            let given = src.filter(|a| !is_any(a.ip()));
            let device = match given {
                Some(src) => device_at(src.ip()).ok_or(Errno(libc::ENODEV))?,
                None => device_towards(dst)?,
            };
            id.link_to(shared(device)?)?
        }
        [link] => link,
        // It is bound to the unspecified address, of one device from now on.
        [first, ..] => {
            let towards = device_towards(dst)?.index;
            let link = links.iter().find(|(c, _)| c.device.index == towards);
            let link = link.copied().unwrap_or(first);
            id.unlink_but(link);
            link
        }
    };
    id.lock().any = None;
    let timeout = Duration::from_millis(timeout_ms.max(0) as u64);
    let space = id.lock().space;
    let mut locked = context.lock();
    let src = match locked.nic.local_addr(device_id) {
        Some(bound) => bound,
        None => {
            // An unspecified source stands for the device's own.
            let own = locked.nic.socket_addr().ip();
            let (ip, port) = src.map_or((own, 0), |a| (a.ip(), a.port()));
            let ip = if is_any(ip) { own } else { ip };
            SocketAddr::new(ip, locked.take_port(device_id, space, port)?)
        }
    };
    // A peer that stands for all devices is the device itself (`cma_resolve_loopback()`).
    let dst = match is_any(dst.ip()) {
        true => SocketAddr::new(src.ip(), dst.port()),
        false => dst,
    };
    let src = Some(src);
    locked.nic.resolve_addr(device_id, src, dst, timeout)?;
    Ok(())
}

/// The port space that an identifier was created in.
fn created_in(id: Ref<Id>) -> Result<PortSpace, Errno> {
    // SAFETY: the identifier is alive.
    let space = unsafe { (*id.c()).ps };
    // A program may write to it.
    port_space_of(space).ok_or(Errno::INVALID)
}

/// Takes the port spaces of addresses of InfiniBand over into an identifier; answers the addresses
/// with their ports.
///
/// # Errors
/// `EINVAL` where the addresses, or that which it is bound to, are of two families.
fn use_services(
    id: Ref<Id>,
    src: Option<Address>,
    dst: Address,
) -> Result<(Option<SocketAddr>, SocketAddr), Errno> {
    let is_bound = !id.links().is_empty();
    let (space, services) = {
        let state = id.lock();
        (state.space, state.services)
    };
    let created = created_in(id)?;
    let is_ib = dst.service.is_some();
    let mixes = src.is_some_and(|src| src.service.is_some() != is_ib);
    if mixes || is_bound && services.is_some() != is_ib {
        return Err(Errno::INVALID);
    }
    let Some(theirs) = dst.service else {
        return Ok((src.map(|src| src.socket), dst.socket));
    };
    let own = src.and_then(|src| src.service).unwrap_or_default();
    if !is_bound {
        own.space(created)?;
    }
    let (towards, port) = theirs.destination();
    // A request is in the port space of its destination.
    if is_bound && towards != space {
        id.unlink();
    }
    let mut state = id.lock();
    state.space = towards;
    state.services = Some((own, theirs));
    let src = src.map(|src| SocketAddr::new(src.socket.ip(), own.port()));
    Ok((src, SocketAddr::new(dst.socket.ip(), port)))
}

/// `rdma_resolve_route(3)`.
pub(crate) unsafe extern "C" fn rdma_resolve_route(
    id: *mut rdma_cm_id,
    timeout_ms: c_int,
) -> c_int {
    // SAFETY: the program's pointer, as the manual page demands.
    minus(unsafe { id_of(id) }.and_then(|id| {
        let (context, device_id) = id.link()?;
        let timeout = Duration::from_millis(timeout_ms.max(0) as u64);
        context.lock().nic.resolve_route(device_id, timeout)?;
        complete(id)
    }))
}

/// `rdma_listen(3)`.
pub(crate) unsafe extern "C" fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    // SAFETY: the program's pointer, as the manual page demands.
    minus(unsafe { id_of(id) }.and_then(|id| {
        if !id.is_bound() {
            // One that is not bound listens at a free port of all devices: that of IPv4, as Linux
            // has it, unless there is none.
            let has_v4 = devices().iter().any(|device| device.config.addr.is_ipv4());
            let any = match has_v4 {
                true => IpAddr::from([0; 4]),
                false => IpAddr::from([0u16; 8]),
            };
            let (socket, service) = (SocketAddr::new(any, 0), None);
            bind(id, Address { socket, service })?;
        }
        let given = u32::try_from(backlog).ok().filter(|n| *n > 0);
        // Linux has no more either (`net.rdma_ucm.max_backlog`).
        let backlog = given.map_or(BACKLOG, |n| n.min(BACKLOG));
        let _at_all = returns::hold_for(id);
        let mut links = id.links().into_iter();
        links.try_for_each(|link| listen_on(link, backlog))?;
        id.lock().backlog = Some(backlog);
        Ok(())
    }))
}

/// Parameters that a program gives, or those that are usual.
///
/// # Safety
/// The pointer is null, or the parameters and their private data are alive.
unsafe fn param(given: *mut rdma_conn_param) -> ConnParam {
    if given.is_null() {
        return ConnParam::default();
    }
    // SAFETY: as the caller promises.
    unsafe { conn_param_of(&*given) }
}

/// `rdma_connect(3)`.
pub(crate) unsafe extern "C" fn rdma_connect(
    id: *mut rdma_cm_id,
    given: *mut rdma_conn_param,
) -> c_int {
    // SAFETY: the program's pointers, as the manual page demands.
    minus(unsafe { id_of(id) }.and_then(|id| {
        let (context, device_id) = id.link()?;
        // SAFETY: as above.
        let mut param = unsafe { param(given) };
        if param.private_data.is_empty() {
            param.private_data.clone_from(&id.lock().connect_data);
        }
        param.ece = id.lock().local_ece;
        {
            let mut locked = context.lock();
            locked.nic.connect(device_id, &param)?;
            locked.transmit();
        }
        complete(id)
    }))
}

/// `rdma_accept(3)`.
pub(crate) unsafe extern "C" fn rdma_accept(
    id: *mut rdma_cm_id,
    given: *mut rdma_conn_param,
) -> c_int {
    // SAFETY: the program's pointers, as the manual page demands.
    minus(unsafe { id_of(id) }.and_then(|id| {
        let (context, device_id) = id.link()?;
        // SAFETY: as above.
        let mut param = unsafe { param(given) };
        param.ece = {
            let state = id.lock();
            // The answer is in the words of the vendor that has asked.
            Ece {
                vendor_id: state.remote_ece.vendor_id,
                options: state.local_ece.options,
            }
        };
        {
            let mut locked = context.lock();
            locked.nic.accept(device_id, &param)?;
            locked.transmit();
        }
        // A datagram identifier is established by that, without an event.
        // SAFETY: the identifier is alive.
        match unsafe { (*id.c()).qp_type } {
            IBV_QPT_UD => Ok(()),
            _ => complete(id),
        }
    }))
}

/// `rdma_reject(3)`.
pub(crate) unsafe extern "C" fn rdma_reject(
    id: *mut rdma_cm_id,
    data: *const c_void,
    length: u8,
) -> c_int {
    // SAFETY: as the program promises.
    unsafe { refuse(id, data, length, Roce::reject) }
}

/// `rdma_reject_ece(3)`: refuses because of the peer's vendor options.
pub(crate) unsafe extern "C" fn rdma_reject_ece(
    id: *mut rdma_cm_id,
    data: *const c_void,
    length: u8,
) -> c_int {
    // SAFETY: as the program promises.
    unsafe { refuse(id, data, length, Roce::reject_ece) }
}

/// `rdma_set_local_ece(3)`: vendor options of a queue pair that the program moves itself.
pub(crate) unsafe extern "C" fn rdma_set_local_ece(
    id: *mut rdma_cm_id,
    ece: *mut ibv_ece,
) -> c_int {
    // SAFETY: the program's pointers, as the manual page demands.
    minus(unsafe { without_qp(id) }.and_then(|id| {
        // SAFETY: as above.
        let ece = unsafe { ece.as_ref() }.ok_or(Errno::INVALID)?;
        if ece.vendor_id == 0 || ece.comp_mask != 0 {
            return Err(Errno::INVALID);
        }
        id.lock().local_ece = Ece {
            vendor_id: ece.vendor_id,
            options: ece.options,
        };
        Ok(())
    }))
}

/// `rdma_get_remote_ece(3)`: vendor options that the peer's request or answer has brought.
pub(crate) unsafe extern "C" fn rdma_get_remote_ece(
    id: *mut rdma_cm_id,
    ece: *mut ibv_ece,
) -> c_int {
    // SAFETY: the program's pointers, as the manual page demands.
    minus(unsafe { without_qp(id) }.and_then(|id| {
        if ece.is_null() {
            return Err(Errno::INVALID);
        }
        let Ece { vendor_id, options } = id.lock().remote_ece;
        let theirs = ibv_ece {
            vendor_id,
            options,
            comp_mask: 0,
        };
        // SAFETY: as above.
        unsafe { ece.write(theirs) };
        Ok(())
    }))
}

/// An identifier that has no queue pair.
///
/// # Errors
/// `EINVAL` where the pointer names none, or one with a queue pair.
///
/// # Safety
/// As [`id_of`].
unsafe fn without_qp(id: *mut rdma_cm_id) -> Result<Ref<Id>, Errno> {
    // SAFETY: as the caller promises; the identifier is alive.
    unsafe {
        let id = id_of(id)?;
        let has_none = (*id.c()).qp.is_null();
        has_none.then_some(id).ok_or(Errno::INVALID)
    }
}

/// Refuses a connection request by a call of the device.
///
/// # Safety
/// The pointers are the program's, as the manual page demands.
unsafe fn refuse(
    id: *mut rdma_cm_id,
    data: *const c_void,
    length: u8,
    call: impl FnOnce(&mut Roce, CmId, &[u8]) -> Result<(), CmError>,
) -> c_int {
    // SAFETY: as the caller promises.
    minus(unsafe { id_of(id) }.and_then(|id| {
        // SAFETY: as the caller promises.
        let data = unsafe { bytes(data, length) };
        let (context, device_id) = id.link()?;
        let mut locked = context.lock();
        call(&mut locked.nic, device_id, data)?;
        locked.transmit();
        Ok(())
    }))
}

/// Private data that a program gives.
///
/// # Safety
/// The pointer is null, or there are that many bytes for as long as `'a`.
unsafe fn bytes<'a>(data: *const c_void, length: u8) -> &'a [u8] {
    if data.is_null() {
        return &[];
    }
    // SAFETY: as the caller promises.
    unsafe { slice::from_raw_parts(data.cast::<u8>(), length.into()) }
}

/// `rdma_init_qp_attr(3)`: for a queue pair that the program takes through its states itself.
pub(crate) unsafe extern "C" fn rdma_init_qp_attr(
    id: *mut rdma_cm_id,
    attr: *mut ibv_qp_attr,
    mask: *mut c_int,
) -> c_int {
    // SAFETY: the program's pointers, as the manual page demands.
    minus(unsafe { id_of(id) }.and_then(|id| {
        let (context, device_id) = id.link()?;
        // SAFETY: as above.
        let given = unsafe { attr.as_ref() }.ok_or(Errno::INVALID)?;
        if mask.is_null() {
            return Err(Errno::INVALID);
        }
        let wanted = qp_attr_from_mask(given, IBV_QP_STATE)?.state;
        let wanted = wanted.ok_or(Errno::INVALID)?;
        let ours = context.lock().nic.init_qp_attr(device_id, wanted)?;
        let (theirs, set) = qp_attr(&ours);
        // SAFETY: the program gives places for both.
        unsafe {
            attr.write(theirs);
            mask.write(set as c_int);
        }
        Ok(())
    }))
}

/// `rdma_disconnect(3)`.
pub(crate) unsafe extern "C" fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: the program's pointer, as the manual page demands.
    minus(unsafe { id_of(id) }.and_then(|id| {
        let (context, device_id) = id.link()?;
        {
            let mut locked = context.lock();
            locked.nic.disconnect(device_id)?;
            locked.transmit();
        }
        complete(id)
    }))
}

/// `rdma_notify(3)`: the communication-established event of the queue pair is passed on.
pub(crate) unsafe extern "C" fn rdma_notify(id: *mut rdma_cm_id, event: ibv_event_type) -> c_int {
    // SAFETY: the program's pointer, as the manual page demands.
    minus(unsafe { id_of(id) }.and_then(|id| {
        let (context, device_id) = id.link()?;
        if event != IBV_EVENT_COMM_EST {
            return Err(Errno::INVALID);
        }
        context.lock().nic.notify_established(device_id)?;
        Ok(())
    }))
}

/// `rdma_get_src_port(3)`: in network byte order.
pub(crate) unsafe extern "C" fn rdma_get_src_port(id: *mut rdma_cm_id) -> __be16 {
    // SAFETY: the program's pointer, as the manual page demands.
    unsafe { id_of(id) }.map_or(0, |id| {
        // SAFETY: the identifier is alive; an address has its port at one place in both families.
        u16::to_be(unsafe { port(&raw const (*id.c()).route.addr.__bindgen_anon_1) })
    })
}

/// `rdma_get_dst_port(3)`: in network byte order.
pub(crate) unsafe extern "C" fn rdma_get_dst_port(id: *mut rdma_cm_id) -> __be16 {
    // SAFETY: the program's pointer, as the manual page demands.
    unsafe { id_of(id) }.map_or(0, |id| {
        // SAFETY: as in `rdma_get_src_port`.
        u16::to_be(unsafe { port(&raw const (*id.c()).route.addr.__bindgen_anon_2) })
    })
}

/// Port of an address of a route; 0 where there is none.
///
/// # Safety
/// The address is alive.
unsafe fn port<T>(place: *const T) -> u16 {
    // SAFETY: as the caller promises.
    let addr = unsafe { Address::read(place.cast()) };
    addr.ok().flatten().map_or(0, |a| a.socket.port())
}

/// `rdma_set_option(3)`.
pub(crate) unsafe extern "C" fn rdma_set_option(
    id: *mut rdma_cm_id,
    level: c_int,
    option: c_int,
    value: *mut c_void,
    length: usize,
) -> c_int {
    // SAFETY: the program's pointers, as the manual page demands.
    minus(unsafe { id_of(id) }.and_then(|id| {
        if level as u32 == RDMA_OPTION_IB && option as u32 == RDMA_OPTION_IB_PATH {
            // SAFETY: as above.
            return set_path(id, unsafe { path(value, length) }?);
        }
        // SAFETY: as above.
        let option = unsafe { self::option(level, option, value, length) }?;
        for (context, device_id) in id.links() {
            context.lock().nic.set_option(device_id, option)?;
        }
        // For the identifiers of devices that it gets later. The last one of a kind counts.
        let mut state = id.lock();
        let kind = mem::discriminant(&option);
        state.options.retain(|o| mem::discriminant(o) != kind);
        state.options.push(option);
        Ok(())
    }))
}

/// The path of the option for paths that serves both directions and the CM's messages, as the kernel
/// picks it (`ucma_set_ib_path`).
///
/// # Errors
/// `EINVAL` where there is none, or a length that no number of paths has.
///
/// # Safety
/// The value is null or has that length.
unsafe fn path(value: *const c_void, length: usize) -> Result<ibv_path_record, Errno> {
    const WANTED: u32 = IBV_PATH_FLAG_GMP | IBV_PATH_FLAG_PRIMARY | IBV_PATH_FLAG_BIDIRECTIONAL;
    let size = size_of::<ibv_path_data>();
    if value.is_null() || !length.is_multiple_of(size) {
        return Err(Errno::INVALID);
    }
    let mut all = (0..length / size)
        // SAFETY: as the caller promises.
        .map(|n| unsafe { value.cast::<ibv_path_data>().add(n).read_unaligned() });
    let found = all.find(|data| data.flags == WANTED);
    found.map(|data| data.path).ok_or(Errno::INVALID)
}

/// Sets the path of an identifier that has resolved an address, which resolves its route.
///
/// # Errors
/// `EINVAL` for a path between other ports or of another partition, or before an address is resolved.
fn set_path(id: Ref<Id>, record: ibv_path_record) -> Result<(), Errno> {
    /// Selector "exactly" of a value of the record.
    const EXACTLY: u8 = 2;
    let (context, device_id) = id.link()?;
    let mut locked = context.lock();
    let local = locked.nic.local_addr(device_id).ok_or(Errno::INVALID)?;
    let peer = locked.nic.peer_addr(device_id).ok_or(Errno::INVALID)?;
    // SAFETY: GIDs are bytes.
    let (sgid, dgid) = unsafe { (Gid(record.sgid.raw), Gid(record.dgid.raw)) };
    let is_ours = (sgid, dgid) == (local.ip().into(), peer.ip().into());
    let is_default = u16::from_be(record.pkey) & 0x7fff == 0x7fff;
    if !is_ours || !is_default {
        return Err(Errno::INVALID);
    }
    let most = locked.nic.query_port(1)?.active_mtu;
    let mtu = match record.mtu >> 6 {
        EXACTLY => Mtu::from_code(record.mtu & 0x3f).ok_or(Errno::INVALID)?,
        _ => most,
    };
    let path = Path {
        mtu: mtu.min(most),
        traffic_class: record.tclass,
    };
    let options = [
        CmOption::PathMtu(path.mtu),
        CmOption::TypeOfService(path.traffic_class),
    ];
    // A route is resolved once, so a path that comes too late changes nothing.
    locked.nic.resolve_route(device_id, Duration::ZERO)?;
    for option in options {
        locked.nic.set_option(device_id, option)?;
    }
    id.lock().path = Some(path);
    Ok(())
}

/// An option that a program gives.
///
/// # Errors
/// `EINVAL` for a value of the wrong length, `ENOSYS` for an option that is not known.
///
/// # Safety
/// The value is null or has that length.
unsafe fn option(
    level: c_int,
    option: c_int,
    value: *mut c_void,
    length: usize,
) -> Result<CmOption, Errno> {
    /// The value of an option, of the only length that it may have.
    ///
    /// # Safety
    /// As that of the function around it.
    unsafe fn read<T: Copy>(value: *mut c_void, length: usize) -> Result<T, Errno> {
        if value.is_null() || length != size_of::<T>() {
            return Err(Errno::INVALID);
        }
        // SAFETY: it is a number of that length, wherever the program has it.
        Ok(unsafe { value.cast::<T>().read_unaligned() })
    }
    if level as u32 != RDMA_OPTION_ID {
        return Err(Errno(libc::ENOSYS));
    }
    // SAFETY: as the caller promises.
    unsafe {
        Ok(match option as u32 {
            RDMA_OPTION_ID_TOS => CmOption::TypeOfService(read::<u8>(value, length)?),
            RDMA_OPTION_ID_REUSEADDR => CmOption::ReuseAddress(read::<c_int>(value, length)? != 0),
            RDMA_OPTION_ID_AFONLY => {
                CmOption::AddressFamilyOnly(read::<c_int>(value, length)? != 0)
            }
            RDMA_OPTION_ID_ACK_TIMEOUT => CmOption::AckTimeout(read::<u8>(value, length)?),
            _ => return Err(Errno(libc::ENOSYS)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_stands_for_all_devices_unless_one_is_there() {
        let stands = |addr: &str, device: &str| {
            stands_for_all(
                addr.parse().unwrap(),
                std::iter::once(device.parse().unwrap()),
            )
        };
        for any in ["0.0.0.0", "::", "127.0.0.1", "::1"] {
            assert!(stands(any, "192.0.2.1"), "{any}");
        }
        assert!(stands("0.0.0.0", "127.0.0.1"));
        for one in ["192.0.2.1", "127.0.0.1", "127.0.0.2", "::1"] {
            assert!(!stands(one, "127.0.0.1"), "{one}");
        }
        assert!(!stands("192.0.2.2", "192.0.2.1"));
    }
}
