//! `rdma_getaddrinfo` and endpoints.

use std::ffi::{c_char, c_int};
use std::mem::{self, zeroed};
use std::net::SocketAddr;
use std::ptr;
use std::slice;
use std::sync::mpsc;
use std::time::Duration;

use riser_fabric::sa::wire::path::PathRecord;
use riser_rdma_core_sys::bindings::*;
use riser_transport::verbs::RdmaCm as _;

use super::af_ib::{AF_INFINIBAND, Address, Service, infiniband};
use super::{
    Id, bind, complete, create_id, create_qp, device_at, device_towards, id_of, migrate,
    next_event, rdma_ack_cm_event, rdma_destroy_id, rdma_destroy_qp, rdma_destroy_srq,
    rdma_resolve_route, rdma_set_option, resolve_addr, shared,
};
use crate::domain::Pd;
use crate::errno::{Errno, minus};
use crate::object::Ref;
use crate::qp::ExtraAttr;

/// Timeout of an endpoint for each step of connecting to its peer, in milliseconds.
const STEP_MS: c_int = 2000;

/// `rdma_getaddrinfo(3)`.
pub(crate) unsafe extern "C" fn rdma_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
    result: *mut *mut rdma_addrinfo,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    let hints = unsafe { hints.as_ref() };
    if node.is_null() && service.is_null() && hints.is_none() {
        Errno::INVALID.set();
        return libc::EAI_NONAME;
    }
    if node.is_null() && service.is_null() {
        // SAFETY: the addresses in the hints have the given lengths.
        return match unsafe { hints.and_then(|hints| from_hints(hints)) } {
            Some(mut info) => {
                add_route(&mut info);
                // SAFETY: the program provides memory for the pointer.
                unsafe { result.write(Box::into_raw(Box::new(info))) };
                0
            }
            None => {
                Errno::INVALID.set();
                libc::EAI_NONAME
            }
        };
    }
    let flags = hints.map_or(0, |h| h.ai_flags as u32);
    let kind = hints.map_or(0, |h| h.ai_qp_type);
    let space = match hints.map_or(0, |h| h.ai_port_space as u32) {
        0 if kind as ibv_qp_type == IBV_QPT_UD => RDMA_PS_UDP,
        0 => RDMA_PS_TCP,
        space => space,
    };
    let family = hints.map_or(0, |h| h.ai_family);
    let is_ib = flags & RAI_FAMILY != 0 && family == AF_INFINIBAND;
    // SAFETY: all zeroes are valid hints.
    let mut wanted: libc::addrinfo = unsafe { zeroed() };
    if flags & RAI_PASSIVE != 0 {
        wanted.ai_flags |= libc::AI_PASSIVE;
    }
    if flags & RAI_NUMERICHOST != 0 {
        wanted.ai_flags |= libc::AI_NUMERICHOST;
    }
    if flags & RAI_FAMILY != 0 && !is_ib {
        wanted.ai_family = family;
    }
    if !node.is_null() {
        wanted.ai_flags |= libc::AI_CANONNAME;
    }
    wanted.ai_socktype = match space {
        RDMA_PS_UDP => libc::SOCK_DGRAM,
        _ => libc::SOCK_STREAM,
    };
    let mut found = ptr::null_mut();
    // SAFETY: the program passes valid strings.
    let error = unsafe { libc::getaddrinfo(node, service, &raw const wanted, &raw mut found) };
    if error != 0 {
        return error;
    }
    // SAFETY: all zeroes is valid for this plain C structure.
    let mut info: rdma_addrinfo = unsafe { zeroed() };
    // SAFETY: the list has at least one entry.
    let first = unsafe { &*found };
    info.ai_flags = flags as c_int;
    info.ai_family = first.ai_family;
    info.ai_port_space = space as c_int;
    info.ai_qp_type = match kind {
        0 => super::qp_type(space) as c_int,
        kind => kind,
    };
    // SAFETY: the address is alive and has this length, and so has the InfiniBand address.
    let (copy, length) = unsafe {
        // Only numeric hosts are converted to GIDs.
        let ib = is_ib && flags & RAI_NUMERICHOST != 0;
        match Address::read(first.ai_addr.cast()) {
            Ok(Some(Address { socket, .. })) if ib => {
                info.ai_family = AF_INFINIBAND;
                let addr = infiniband(socket.ip(), of_port(space, socket.port()));
                let length = size_of_val(&addr) as socklen_t;
                (self::copy((&raw const addr).cast(), length), length)
            }
            _ => {
                let length = first.ai_addrlen;
                (self::copy(first.ai_addr.cast(), length), length)
            }
        }
    };
    let name = match first.ai_canonname.is_null() {
        true => ptr::null_mut(),
        // SAFETY: the name is a valid string.
        false => unsafe { libc::strdup(first.ai_canonname) },
    };
    if flags & RAI_PASSIVE != 0 {
        info.ai_src_addr = copy;
        info.ai_src_len = length;
        info.ai_src_canonname = name;
    } else {
        info.ai_dst_addr = copy;
        info.ai_dst_len = length;
        info.ai_dst_canonname = name;
        if let Some(hints) = hints.filter(|h| h.ai_src_len > 0 && !h.ai_src_addr.is_null()) {
            // SAFETY: the program's address has this length.
            info.ai_src_addr = unsafe { self::copy(hints.ai_src_addr, hints.ai_src_len) };
            info.ai_src_len = hints.ai_src_len;
        }
    }
    add_route(&mut info);
    // SAFETY: the list was allocated by the C library, and the program provides memory for our
    // pointer.
    unsafe {
        libc::freeaddrinfo(found);
        result.write(Box::into_raw(Box::new(info)));
    }
    0
}

/// Adds the path to the destination from the subnet administrator selected by `RISER_SA`, like
/// librdmacm from ibacm. Without a path, `rdma_create_ep` resolves the route.
fn add_route(info: &mut rdma_addrinfo) {
    if info.ai_flags as u32 & (RAI_PASSIVE | RAI_NOROUTE) != 0 {
        return;
    }
    // SAFETY: each address of the entry is null or complete.
    let [src, dst] = [info.ai_src_addr, info.ai_dst_addr].map(|addr| unsafe {
        let read = Address::read(addr).ok().flatten();
        read.map(|addr| addr.socket)
    });
    let Some(path) = dst.and_then(|dst| path_between(src, dst)) else {
        return;
    };
    let data = ibv_path_data {
        flags: IBV_PATH_FLAG_GMP | IBV_PATH_FLAG_PRIMARY | IBV_PATH_FLAG_BIDIRECTIONAL,
        // SAFETY: both are plain structures with the layout of the record on the wire.
        path: unsafe { mem::transmute_copy(&path) },
        ..Default::default()
    };
    // SAFETY: the memory is freed by `rdma_freeaddrinfo`.
    unsafe {
        let route = libc::malloc(size_of_val(&data)).cast::<ibv_path_data>();
        if !route.is_null() {
            route.write(data);
            info.ai_route = route.cast();
            info.ai_route_len = size_of_val(&data);
        }
    }
}

/// Queries the path to a host. Returns `None` without a subnet administrator, or if it has no path.
fn path_between(src: Option<SocketAddr>, dst: SocketAddr) -> Option<PathRecord> {
    const { assert!(size_of::<PathRecord>() == size_of::<ibv_path_record>()) };
    let own = src.filter(|src| !src.ip().is_unspecified());
    let device = match own {
        Some(src) => device_at(src.ip())?,
        None => device_towards(dst).ok()?,
    };
    device.config.administrator?;
    let context = shared(device).ok()?.context;
    let (done, path) = mpsc::channel();
    {
        let mut locked = context.lock();
        let requested = locked.administrate(|administration, nic| {
            administration.request_path(nic, dst.ip().into(), done);
        });
        requested.ok()?;
        locked.transmit();
    }
    // The engine's thread, or a call that polls, completes the query after its retransmissions.
    let patience = Duration::from_millis(2 * STEP_MS.unsigned_abs() as u64);
    path.recv_timeout(patience).ok()?
}

/// Returns the service ID of a port, or of all ports of a port space.
fn of_port(space: rdma_port_space, port: u16) -> Service {
    let port_mask = if port == 0 { 0 } else { 0xffff };
    Service {
        id: u64::from(space) << 16 | u64::from(port),
        mask: !0xffff | port_mask,
    }
}

/// Creates an entry using only the addresses of the hints. Returns `None` if there are no
/// addresses.
///
/// # Safety
/// Each address must be null or have the given length.
unsafe fn from_hints(hints: &rdma_addrinfo) -> Option<rdma_addrinfo> {
    let has = |addr: *mut sockaddr, len| !addr.is_null() && len > 0;
    let (src, dst) = (hints.ai_src_addr, hints.ai_dst_addr);
    let has_src = has(src, hints.ai_src_len);
    let has_dst = has(dst, hints.ai_dst_len);
    let space = match hints.ai_port_space as u32 {
        0 => RDMA_PS_TCP,
        space => space,
    };
    // SAFETY: all zeroes is valid for this plain C structure.
    let mut info: rdma_addrinfo = unsafe { zeroed() };
    info.ai_flags = hints.ai_flags;
    info.ai_port_space = space as c_int;
    info.ai_qp_type = match hints.ai_qp_type {
        0 => super::qp_type(space) as c_int,
        kind => kind,
    };
    // SAFETY: as the caller promises; the family comes first in each address.
    unsafe {
        if has_src {
            info.ai_family = (*src).sa_family.into();
            info.ai_src_addr = copy(src, hints.ai_src_len);
            info.ai_src_len = hints.ai_src_len;
        }
        if has_dst {
            info.ai_family = (*dst).sa_family.into();
            info.ai_dst_addr = copy(dst, hints.ai_dst_len);
            info.ai_dst_len = hints.ai_dst_len;
        }
    }
    (has_src || has_dst).then_some(info)
}

/// Returns a copy of an address, which is freed by [`rdma_freeaddrinfo`].
///
/// # Safety
/// The address must have `len` bytes.
unsafe fn copy(addr: *const sockaddr, len: socklen_t) -> *mut sockaddr {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let place = libc::malloc(len as usize);
        if !place.is_null() {
            ptr::copy_nonoverlapping(addr.cast::<u8>(), place.cast(), len as usize);
        }
        place.cast()
    }
}

/// `rdma_freeaddrinfo(3)`.
pub(crate) unsafe extern "C" fn rdma_freeaddrinfo(mut info: *mut rdma_addrinfo) {
    while !info.is_null() {
        // SAFETY: the entry was created by `rdma_getaddrinfo`. The program may have set connection
        // data, which it must free itself.
        unsafe {
            let entry = Box::from_raw(info);
            libc::free(entry.ai_src_addr.cast());
            libc::free(entry.ai_dst_addr.cast());
            libc::free(entry.ai_src_canonname.cast());
            libc::free(entry.ai_dst_canonname.cast());
            libc::free(entry.ai_route);
            info = entry.ai_next;
        }
    }
}

/// `rdma_create_ep(3)`.
pub(crate) unsafe extern "C" fn rdma_create_ep(
    id: *mut *mut rdma_cm_id,
    info: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    minus(unsafe { create_ep(info, pd, attr) }.map(|created| {
        // SAFETY: as above.
        unsafe { id.write(created) };
    }))
}

/// # Safety
/// The program must pass valid pointers, as required by the manual page.
unsafe fn create_ep(
    info: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> Result<*mut rdma_cm_id, Errno> {
    // SAFETY: guaranteed by the caller.
    let info = unsafe { info.as_ref() }.ok_or(Errno::INVALID)?;
    let kind = info.ai_qp_type as ibv_qp_type;
    let space = info.ai_port_space as rdma_port_space;
    let id = create_id(None, ptr::null_mut(), space, Some(kind))?;
    let pd = match pd.is_null() {
        true => Ok(None),
        // SAFETY: guaranteed by the caller.
        false => unsafe { Ref::<Pd>::get(pd) }.map(Some),
    };
    let result = pd.and_then(|pd| {
        // SAFETY: guaranteed by the caller.
        let (src, dst) = unsafe {
            (
                Address::read(info.ai_src_addr)?,
                Address::read(info.ai_dst_addr)?,
            )
        };
        // SAFETY: guaranteed by the caller.
        let attr = unsafe { attr.as_mut() };
        if info.ai_flags as u32 & RAI_PASSIVE != 0 {
            bind(id, src.ok_or(Errno::INVALID)?)?;
            if let Some(pd) = pd {
                // SAFETY: the identifier is alive.
                unsafe { (*id.c()).pd = pd.handle() };
            }
            id.lock().listen_qp = attr.map(|a| {
                a.qp_type = kind;
                *a
            });
            return Ok(());
        }
        resolve_addr(id, src, dst.ok_or(Errno::INVALID)?, STEP_MS)?;
        complete(id)?;
        if info.ai_route_len > 0 {
            // SAFETY: the identifier is alive, and the route has this length.
            let set = unsafe {
                rdma_set_option(
                    id.handle(),
                    RDMA_OPTION_IB as c_int,
                    RDMA_OPTION_IB_PATH as c_int,
                    info.ai_route,
                    info.ai_route_len,
                )
            };
            if set != 0 {
                return Err(Errno::last());
            }
            complete(id)?;
        // SAFETY: the identifier is alive.
        } else if unsafe { rdma_resolve_route(id.handle(), STEP_MS) } != 0 {
            return Err(Errno::last());
        }
        if let Some(attr) = attr {
            attr.qp_type = kind;
            create_qp(id, pd, None, attr, ExtraAttr::default())?;
        }
        if info.ai_connect_len > 0 && !info.ai_connect.is_null() {
            // SAFETY: the program's data have this length.
            let data =
                unsafe { slice::from_raw_parts(info.ai_connect.cast::<u8>(), info.ai_connect_len) };
            id.lock().connect_data = data.to_vec();
        }
        Ok(())
    });
    if let Err(errno) = result {
        // SAFETY: the identifier is alive.
        unsafe { rdma_destroy_ep(id.handle()) };
        return Err(errno);
    }
    Ok(id.handle())
}

/// `rdma_destroy_ep(3)`.
pub(crate) unsafe extern "C" fn rdma_destroy_ep(id: *mut rdma_cm_id) {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    unsafe {
        rdma_destroy_qp(id);
        rdma_destroy_srq(id);
        rdma_destroy_id(id);
    }
}

/// `rdma_get_request(3)`.
pub(crate) unsafe extern "C" fn rdma_get_request(
    listener: *mut rdma_cm_id,
    id: *mut *mut rdma_cm_id,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    minus(unsafe { id_of(listener) }.and_then(|listener| {
        if !listener.lock().is_synchronous {
            return Err(Errno::INVALID);
        }
        let channel = listener.lock().channel;
        // SAFETY: the channel belongs to the listener.
        let event = unsafe { next_event(channel.handle()) }?;
        // SAFETY: this call owns the event.
        let new = unsafe {
            if (*event).event != RDMA_CM_EVENT_CONNECT_REQUEST {
                let status = (*event).status;
                rdma_ack_cm_event(event);
                return Err(Errno(if status == 0 {
                    libc::EINVAL
                } else {
                    status.abs()
                }));
            }
            id_of((*event).id)?
        };
        if let Err(errno) = prepare(new, listener) {
            // The event must be acknowledged before the listener can be destroyed. Destroying the
            // identifier rejects the peer.
            // SAFETY: the program does not have access to either of them.
            unsafe {
                rdma_ack_cm_event(event);
                rdma_destroy_id(new.handle());
            }
            return Err(errno);
        }
        // SAFETY: the program provides memory for the identifier, whose event contains the peer's
        // data.
        unsafe {
            (*new.c()).event = event;
            id.write(new.handle());
        }
        Ok(())
    }))
}

/// Makes the identifier of a request synchronous, like its listener, and creates a queue pair if
/// the listener requires it.
fn prepare(new: Ref<Id>, listener: Ref<Id>) -> Result<(), Errno> {
    migrate(new, None)?;
    let (qp, pd) = {
        let attr = listener.lock().listen_qp;
        // SAFETY: the listener is alive.
        (attr, unsafe { (*listener.c()).pd })
    };
    let Some(mut attr) = qp else {
        return Ok(());
    };
    let pd = (!pd.is_null())
        // SAFETY: it belongs to the listener.
        .then(|| unsafe { Ref::<Pd>::get(pd) })
        .transpose()?;
    create_qp(new, pd, None, &mut attr, ExtraAttr::default())
}

/// `rdma_establish(3)`: for a queue pair that the program modifies itself.
pub(crate) unsafe extern "C" fn rdma_establish(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: the program passes a valid pointer, as required by the manual page.
    minus(unsafe { id_of(id) }.and_then(|id| {
        // SAFETY: the identifier is alive.
        if unsafe { !(*id.c()).qp.is_null() } {
            // The library has already established the connection.
            return Err(Errno::INVALID);
        }
        let (context, device_id) = id.link()?;
        let mut locked = context.lock();
        locked.nic.establish(device_id)?;
        locked.transmit();
        Ok(())
    }))
}
