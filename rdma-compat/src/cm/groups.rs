//! Multicast groups of identifiers.

use std::ffi::{c_int, c_void};
use std::net::IpAddr;

use riser_rdma_core_sys::bindings::*;
use riser_transport::verbs::{ConnParam, Gid, RdmaCm as _, Verbs as _, mgid};

use super::af_ib::Address;
use super::{Id, complete, id_of};
use crate::errno::{Errno, minus};
use crate::object::Ref;
use crate::qp::Qp;

/// A group joined by an identifier.
#[derive(Clone, Copy)]
pub(super) struct Group {
    address: IpAddr,
    /// The program's context, returned in the event.
    context: *mut c_void,
    /// Set if the identifier's queue pair does not receive datagrams of the group.
    is_send_only: bool,
}

/// `rdma_join_multicast(3)`.
pub(crate) unsafe extern "C" fn rdma_join_multicast(
    id: *mut rdma_cm_id,
    addr: *mut sockaddr,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    minus(unsafe { id_of(id) }.and_then(|id| {
        // SAFETY: as above.
        let address = unsafe { Address::read(addr) }?.ok_or(Errno::INVALID)?;
        let address = address.socket.ip();
        join(
            id,
            Group {
                address,
                context,
                is_send_only: false,
            },
        )
    }))
}

/// `rdma_join_multicast_ex(3)`.
pub(crate) unsafe extern "C" fn rdma_join_multicast_ex(
    id: *mut rdma_cm_id,
    attr: *mut rdma_cm_join_mc_attr_ex,
    context: *mut c_void,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    minus(unsafe { id_of(id) }.and_then(|id| {
        // SAFETY: as above.
        let attr = unsafe { attr.as_ref() }.ok_or(Errno::INVALID)?;
        if attr.comp_mask >= RDMA_CM_JOIN_MC_ATTR_RESERVED {
            return Err(Errno(libc::ENOSYS));
        }
        let required = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
        if attr.comp_mask != required || attr.join_flags >= RDMA_MC_JOIN_FLAG_RESERVED {
            return Err(Errno::INVALID);
        }
        // SAFETY: as above.
        let address = unsafe { Address::read(attr.addr) }?.ok_or(Errno::INVALID)?;
        let address = address.socket.ip();
        let is_send_only = attr.join_flags == RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER;
        join(
            id,
            Group {
                address,
                context,
                is_send_only,
            },
        )
    }))
}

fn join(id: Ref<Id>, group: Group) -> Result<(), Errno> {
    let (context, device_id) = id.link()?;
    {
        let mut locked = context.lock();
        locked
            .nic
            .join_multicast(device_id, group.address, group.is_send_only)?;
        // This must be done before the event can be received.
        id.lock().groups.push(group);
    }
    complete(id)
}

/// Handles a completed join: attaches the identifier's queue pair, if any. Returns the program's
/// context of the group.
///
/// # Errors
/// Returns errors of attaching the queue pair.
pub(super) fn on_join(id: Ref<Id>, param: &ConnParam) -> Result<*mut c_void, Errno> {
    let address = param.ah.as_ref().map(|ah| ah.dgid.ip());
    let group = {
        let state = id.lock();
        let mut groups = state.groups.iter();
        groups.find(|group| Some(group.address) == address).copied()
    };
    let group = group.ok_or(Errno::INVALID)?;
    if let (Some(qp), false, Some(gid)) = (qp_of(id), group.is_send_only, mgid(group.address)) {
        attach(qp, gid)?;
    }
    Ok(group.context)
}

fn attach(qp: Ref<Qp>, group: Gid) -> Result<(), Errno> {
    Ok(qp.context.lock().nic.attach_mcast(qp.id, group, 0)?)
}

fn qp_of(id: Ref<Id>) -> Option<Ref<Qp>> {
    // SAFETY: the identifier is alive and owns its queue pair.
    unsafe { Ref::<Qp>::get((*id.c()).qp) }.ok()
}

/// `rdma_leave_multicast(3)`.
pub(crate) unsafe extern "C" fn rdma_leave_multicast(
    id: *mut rdma_cm_id,
    addr: *mut sockaddr,
) -> c_int {
    // SAFETY: the program passes valid pointers, as required by the manual page.
    minus(unsafe { id_of(id) }.and_then(|id| {
        // SAFETY: as above.
        let address = unsafe { Address::read(addr) }?.ok_or(Errno::INVALID)?;
        let address = address.socket.ip();
        let group = {
            let mut state = id.lock();
            let at = state.groups.iter().position(|g| g.address == address);
            state
                .groups
                .swap_remove(at.ok_or(Errno(libc::EADDRNOTAVAIL))?)
        };
        let (context, device_id) = id.link()?;
        if let (Some(qp), Some(gid)) = (qp_of(id), mgid(group.address)) {
            // The queue pair may not be attached, because it only sends, or because it was created
            // after the event.
            let _ = context.lock().nic.detach_mcast(qp.id, gid, 0);
        }
        context.lock().nic.leave_multicast(device_id, address)?;
        // A pending event would refer to a group that the identifier has already left.
        id.retract_join(address);
        Ok(())
    }))
}
