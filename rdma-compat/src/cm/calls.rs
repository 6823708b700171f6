//! Calls of a program that use an identifier.

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

/// Maximum length of a listener's queue of requests.
const BACKLOG: u32 = 1024;

/// Waits for the completion of a call if the program has not assigned a channel to the identifier.
/// The event is stored in the identifier for the program.
///
/// # Errors
/// Returns the error of the event, or `ECONNREFUSED` if the connection was rejected.
pub(super) fn complete(id: Ref<Id>) -> Result<(), Errno> {
    let channel = {
        let state = id.lock();
        if !state.is_synchronous {
            return Ok(());
        }
        state.channel
    };
    // SAFETY: the identifier is alive and owns its events.
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
    // SAFETY: the program passes valid pointers, as required by the manual page.
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
        // The program sees the address that it has passed, with the allocated port.
        id.show_route();
        if id.links().is_empty() {
            id.show_addresses(Some(addr), None);
        }
    }
    result
}

/// Returns whether an address refers to all devices. This is true for the unspecified address and,
/// like in Linux (`cma_any_addr()`), for loopback addresses, unless a device uses a loopback
/// address. In that case loopback is treated as a network, where it's an error if an address does
/// not belong to a device.
fn is_any(addr: IpAddr) -> bool {
    stands_for_all(addr, devices().iter().map(|d| d.config.addr))
}

fn stands_for_all(addr: IpAddr, mut devices: impl Iterator<Item = IpAddr>) -> bool {
    addr.is_unspecified() || (addr.is_loopback() && !devices.any(|device| device.is_loopback()))
}

/// Binds to all devices of the address's family, using the same port. It's not an error if there is
/// no such device, because programs bind to both families without checking the devices first, but
/// then no requests are received. A device that was removed is bound when it returns.
fn bind_all(id: Ref<Id>, addr: SocketAddr) -> Result<(), Errno> {
    let all = devices().iter();
    let all = all.filter(|device| is_for(id, device, addr.ip()));
    // This must be done without holding the lock, because threads that fork or listen wait for it,
    // and opening a device may take seconds.
    let all: Vec<_> = all.map(|device| (device, shared(device))).collect();
    let at_all = returns::hold();
    // A device may be removed at any time.
    id.lock().any = Some(addr);
    let mut port = addr.port();
    for (device, opened) in all {
        match opened.and_then(|shared| bind_at(id, shared, SocketAddr::new(addr.ip(), port))) {
            // If the program has not specified a port, the port of the first device is used for all
            // devices.
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
    // SAFETY: the program passes valid pointers, as required by the manual page.
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
    // An identifier bound to all devices is going to use a single device.
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
        // It was bound to the unspecified address, but will only use a single device.
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
            // If the source address is unspecified, use the device's address.
            let own = locked.nic.socket_addr().ip();
            let (ip, port) = src.map_or((own, 0), |a| (a.ip(), a.port()));
            let ip = if is_any(ip) { own } else { ip };
            SocketAddr::new(ip, locked.take_port(device_id, space, port)?)
        }
    };
    // If the destination address refers to all devices, use the device's own address
    // (`cma_resolve_loopback()`).
    let dst = match is_any(dst.ip()) {
        true => SocketAddr::new(src.ip(), dst.port()),
        false => dst,
    };
    let src = Some(src);
    locked.nic.resolve_addr(device_id, src, dst, timeout)?;
    Ok(())
}

/// Returns the port space in which an identifier was created.
fn created_in(id: Ref<Id>) -> Result<PortSpace, Errno> {
    // SAFETY: the identifier is alive.
    let space = unsafe { (*id.c()).ps };
    // The program may have changed it.
    port_space_of(space).ok_or(Errno::INVALID)
}

/// Updates the port space of an identifier from InfiniBand addresses. Returns the addresses with
/// their ports.
///
/// # Errors
/// Returns `EINVAL` if the addresses, including the address that the identifier is bound to, belong
/// to different families.
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
    // Requests use the port space of their destination.
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
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    minus(unsafe { id_of(id) }.and_then(|id| {
        let (context, device_id) = id.link()?;
        let timeout = Duration::from_millis(timeout_ms.max(0) as u64);
        context.lock().nic.resolve_route(device_id, timeout)?;
        complete(id)
    }))
}

/// `rdma_listen(3)`.
pub(crate) unsafe extern "C" fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    minus(unsafe { id_of(id) }.and_then(|id| {
        if !id.is_bound() {
            // An unbound identifier listens on all devices, using a free port. Like in Linux, it
            // uses IPv4 unless there is no IPv4 device.
            let has_v4 = devices().iter().any(|device| device.config.addr.is_ipv4());
            let any = match has_v4 {
                true => IpAddr::from([0; 4]),
                false => IpAddr::from([0u16; 8]),
            };
            let (socket, service) = (SocketAddr::new(any, 0), None);
            bind(id, Address { socket, service })?;
        }
        let given = u32::try_from(backlog).ok().filter(|n| *n > 0);
        // Same limit as in Linux (`net.rdma_ucm.max_backlog`).
        let backlog = given.map_or(BACKLOG, |n| n.min(BACKLOG));
        let _at_all = returns::hold_for(id);
        let mut links = id.links().into_iter();
        links.try_for_each(|link| listen_on(link, backlog))?;
        id.lock().backlog = Some(backlog);
        Ok(())
    }))
}

/// Returns parameters passed by a program, or default parameters.
///
/// # Safety
/// The pointer must be null, or the parameters and their private data must be alive.
unsafe fn param(given: *mut rdma_conn_param) -> ConnParam {
    if given.is_null() {
        return ConnParam::default();
    }
    // SAFETY: guaranteed by the caller.
    unsafe { conn_param_of(&*given) }
}

/// `rdma_connect(3)`.
pub(crate) unsafe extern "C" fn rdma_connect(
    id: *mut rdma_cm_id,
    given: *mut rdma_conn_param,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
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
    // SAFETY: the program passes valid pointers, as required by the manual page.
    minus(unsafe { id_of(id) }.and_then(|id| {
        let (context, device_id) = id.link()?;
        // SAFETY: as above.
        let mut param = unsafe { param(given) };
        param.ece = {
            let state = id.lock();
            // The response uses the vendor of the request.
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
        // This establishes datagram identifiers without an event.
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
    // SAFETY: guaranteed by the program.
    unsafe { refuse(id, data, length, Roce::reject) }
}

/// `rdma_reject_ece(3)`: rejects the request because of the peer's vendor options.
pub(crate) unsafe extern "C" fn rdma_reject_ece(
    id: *mut rdma_cm_id,
    data: *const c_void,
    length: u8,
) -> c_int {
    // SAFETY: guaranteed by the program.
    unsafe { refuse(id, data, length, Roce::reject_ece) }
}

/// `rdma_set_local_ece(3)`: sets vendor options, if the program modifies the queue pair itself.
pub(crate) unsafe extern "C" fn rdma_set_local_ece(
    id: *mut rdma_cm_id,
    ece: *mut ibv_ece,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
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

/// `rdma_get_remote_ece(3)`: returns vendor options received in the peer's request or response.
pub(crate) unsafe extern "C" fn rdma_get_remote_ece(
    id: *mut rdma_cm_id,
    ece: *mut ibv_ece,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
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

/// Returns an identifier without a queue pair.
///
/// # Errors
/// Returns `EINVAL` if the pointer is invalid, or if the identifier has a queue pair.
///
/// # Safety
/// Same as for [`id_of`].
unsafe fn without_qp(id: *mut rdma_cm_id) -> Result<Ref<Id>, Errno> {
    // SAFETY: guaranteed by the caller, and the identifier is alive.
    unsafe {
        let id = id_of(id)?;
        let has_none = (*id.c()).qp.is_null();
        has_none.then_some(id).ok_or(Errno::INVALID)
    }
}

/// Rejects a connection request using a function of the device.
///
/// # Safety
/// The program must pass valid pointers, as required by the manual page.
unsafe fn refuse(
    id: *mut rdma_cm_id,
    data: *const c_void,
    length: u8,
    call: impl FnOnce(&mut Roce, CmId, &[u8]) -> Result<(), CmError>,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    minus(unsafe { id_of(id) }.and_then(|id| {
        // SAFETY: guaranteed by the caller.
        let data = unsafe { bytes(data, length) };
        let (context, device_id) = id.link()?;
        let mut locked = context.lock();
        call(&mut locked.nic, device_id, data)?;
        locked.transmit();
        Ok(())
    }))
}

/// Returns private data passed by a program.
///
/// # Safety
/// The pointer must be null, or point to this number of bytes that live as long as `'a`.
unsafe fn bytes<'a>(data: *const c_void, length: u8) -> &'a [u8] {
    if data.is_null() {
        return &[];
    }
    // SAFETY: guaranteed by the caller.
    unsafe { slice::from_raw_parts(data.cast::<u8>(), length.into()) }
}

/// `rdma_init_qp_attr(3)`: for a queue pair that the program modifies itself.
pub(crate) unsafe extern "C" fn rdma_init_qp_attr(
    id: *mut rdma_cm_id,
    attr: *mut ibv_qp_attr,
    mask: *mut c_int,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
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
        // SAFETY: the program provides memory for both.
        unsafe {
            attr.write(theirs);
            mask.write(set as c_int);
        }
        Ok(())
    }))
}

/// `rdma_disconnect(3)`.
pub(crate) unsafe extern "C" fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
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

/// `rdma_notify(3)`: forwards the communication-established event of the queue pair.
pub(crate) unsafe extern "C" fn rdma_notify(id: *mut rdma_cm_id, event: ibv_event_type) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    minus(unsafe { id_of(id) }.and_then(|id| {
        let (context, device_id) = id.link()?;
        if event != IBV_EVENT_COMM_EST {
            return Err(Errno::INVALID);
        }
        context.lock().nic.notify_established(device_id)?;
        Ok(())
    }))
}

/// `rdma_get_src_port(3)`: returns the port in network byte order.
pub(crate) unsafe extern "C" fn rdma_get_src_port(id: *mut rdma_cm_id) -> __be16 {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    unsafe { id_of(id) }.map_or(0, |id| {
        // SAFETY: the identifier is alive, and the port has the same offset in addresses of both
        // families.
        u16::to_be(unsafe { port(&raw const (*id.c()).route.addr.__bindgen_anon_1) })
    })
}

/// `rdma_get_dst_port(3)`: returns the port in network byte order.
pub(crate) unsafe extern "C" fn rdma_get_dst_port(id: *mut rdma_cm_id) -> __be16 {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    unsafe { id_of(id) }.map_or(0, |id| {
        // SAFETY: as in `rdma_get_src_port`.
        u16::to_be(unsafe { port(&raw const (*id.c()).route.addr.__bindgen_anon_2) })
    })
}

/// Returns the port of an address in a route, or 0 if there is no address.
///
/// # Safety
/// The address must be alive.
unsafe fn port<T>(place: *const T) -> u16 {
    // SAFETY: guaranteed by the caller.
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
    // SAFETY: the program passes valid pointers, as required by the manual page.
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
        // These are needed for device identifiers that are created later. Only keep the last option
        // of each kind.
        let mut state = id.lock();
        let kind = mem::discriminant(&option);
        state.options.retain(|o| mem::discriminant(o) != kind);
        state.options.push(option);
        Ok(())
    }))
}

/// Returns the bidirectional primary path, which is also used for CM messages, from a value of the
/// path option. The kernel uses the same criteria (`ucma_set_ib_path`).
///
/// # Errors
/// Returns `EINVAL` if there is no such path, or if the length is not a multiple of the size of a
/// path.
///
/// # Safety
/// The value must be null or have this length.
unsafe fn path(value: *const c_void, length: usize) -> Result<ibv_path_record, Errno> {
    const WANTED: u32 = IBV_PATH_FLAG_GMP | IBV_PATH_FLAG_PRIMARY | IBV_PATH_FLAG_BIDIRECTIONAL;
    let size = size_of::<ibv_path_data>();
    if value.is_null() || !length.is_multiple_of(size) {
        return Err(Errno::INVALID);
    }
    let mut all = (0..length / size)
        // SAFETY: guaranteed by the caller.
        .map(|n| unsafe { value.cast::<ibv_path_data>().add(n).read_unaligned() });
    let found = all.find(|data| data.flags == WANTED);
    found.map(|data| data.path).ok_or(Errno::INVALID)
}

/// Sets the path of an identifier with a resolved address, which also resolves its route.
///
/// # Errors
/// Returns `EINVAL` if the path belongs to different ports or a different partition, or if no
/// address was resolved.
fn set_path(id: Ref<Id>, record: ibv_path_record) -> Result<(), Errno> {
    /// Selector "exactly" for a value in the record.
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
    // A route can only be resolved once, so a path that is set too late has no effect.
    locked.nic.resolve_route(device_id, Duration::ZERO)?;
    for option in options {
        locked.nic.set_option(device_id, option)?;
    }
    id.lock().path = Some(path);
    Ok(())
}

/// Returns an option passed by a program.
///
/// # Errors
/// Returns `EINVAL` if the value has the wrong length, or `ENOSYS` if the option is unknown.
///
/// # Safety
/// The value must be null or have this length.
unsafe fn option(
    level: c_int,
    option: c_int,
    value: *mut c_void,
    length: usize,
) -> Result<CmOption, Errno> {
    /// Reads the value of an option that only supports a single length.
    ///
    /// # Safety
    /// Same as for the enclosing function.
    unsafe fn read<T: Copy>(value: *mut c_void, length: usize) -> Result<T, Errno> {
        if value.is_null() || length != size_of::<T>() {
            return Err(Errno::INVALID);
        }
        // SAFETY: it is an integer of this length, possibly unaligned.
        Ok(unsafe { value.cast::<T>().read_unaligned() })
    }
    if level as u32 != RDMA_OPTION_ID {
        return Err(Errno(libc::ENOSYS));
    }
    // SAFETY: guaranteed by the caller.
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
    fn loopback_means_any_unless_device_exists() {
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
