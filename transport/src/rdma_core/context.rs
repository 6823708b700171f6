//! The opened device: its tables, and the order in which their objects are destroyed.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::ptr;

use riser_rdma_core_sys::bindings::*;
use riser_rdma_core_sys::{RdmaCore, ops};

use super::cm::Connections;
use super::convert::{SockAddr, checked_cm, last_os_error};
use super::cqs::CqTable;
use super::objects::{Ah, MANY, Qp, Scratch, Slot, SlotId, Srq, Xrcd};
use super::regions::RegionTable;
use super::shared::{self, Occurrence, Seat};
use super::{OpenError, convert};
use crate::table::Table;
use crate::verbs::{AhId, AsyncEvent, DeviceAttr, Gid, QpId, SrqId, VerbsError, XrcdId};

/// An RDMA device using libibverbs, and librdmacm for connections.
pub struct RdmaCoreDevice {
    pub(super) core: RdmaCore,
    pub(super) context: *mut ibv_context,
    /// Keeps the context open: librdmacm can close a device if it is not used by any id.
    probe: *mut rdma_cm_id,
    /// Seat of this device, in case the context is shared with other devices in this process.
    pub(super) seat: Seat,
    /// Buffer for events read from the seat.
    pub(super) occurrences: Vec<Occurrence>,
    pub(super) attr: DeviceAttr,
    pub(super) addr: IpAddr,
    pub(super) port: u8,
    /// Device clock frequency in kHz.
    pub(super) clock_khz: u64,
    pub(super) gone: bool,
    pub(super) regions: RegionTable,
    pub(super) xrcds: Table<XrcdId, Xrcd>,
    pub(super) cqs: CqTable,
    pub(super) srqs: Table<SrqId, Srq>,
    pub(super) qps: Table<QpId, Qp>,
    pub(super) qpns: HashMap<u32, QpId>,
    pub(super) ahs: Table<AhId, Ah>,
    pub(super) connections: Connections,
    pub(super) slots: Table<SlotId, Slot>,
    pub(super) async_events: VecDeque<AsyncEvent>,
    pub(super) scratch: Scratch,
}

// SAFETY: both libraries can be used from any thread. Pointers are only owned by this value, and
// `&self` calls are either read-only or use the locks of the libraries. It is not `Sync`.
unsafe impl Send for RdmaCoreDevice {}

/// Parts used to create a device.
pub(super) struct Parts {
    pub(super) core: RdmaCore,
    pub(super) context: *mut ibv_context,
    pub(super) channel: *mut rdma_event_channel,
    pub(super) comp: *mut ibv_comp_channel,
    pub(super) probe: *mut rdma_cm_id,
    pub(super) seat: Seat,
    pub(super) port: u8,
}

/// `IBV_LINK_LAYER_ETHERNET` of `infiniband/verbs.h`, where its enum has no name.
pub(super) const LINK_LAYER_ETHERNET: u8 = 2;

impl RdmaCoreDevice {
    /// Opens the device with this local address.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(addr: IpAddr) -> Result<Self, OpenError> {
        let core = RdmaCore::load()?;
        let failed = |call| {
            move || OpenError::Call {
                call,
                source: last_os_error(),
            }
        };
        // SAFETY: no preconditions.
        let channel = unsafe { (core.cm.rdma_create_event_channel)() };
        if channel.is_null() {
            return Err(failed("rdma_create_event_channel")());
        }
        let (probe, context, port) = match probe(&core, channel, addr) {
            Ok(found) => found,
            Err(source) => {
                // SAFETY: it was created above, and has no ids.
                unsafe { (core.cm.rdma_destroy_event_channel)(channel) };
                return Err(OpenError::NoDevice { addr, source });
            }
        };
        let seat = match Seat::create(context as usize) {
            Ok(seat) => seat,
            Err(error) => {
                // SAFETY: both were created above, and there are no other objects.
                unsafe {
                    (core.cm.rdma_destroy_id)(probe);
                    (core.cm.rdma_destroy_event_channel)(channel);
                }
                return Err(OpenError::Call {
                    call: "eventfd",
                    source: VerbsError::Os(error.raw_os_error().unwrap_or(0)),
                });
            }
        };
        // SAFETY: the context is open while the probe exists.
        let comp = unsafe { (core.verbs.ibv_create_comp_channel)(context) };
        // If anything fails after this, `Drop` will clean up.
        let parts = Parts {
            core,
            context,
            channel,
            comp,
            probe,
            seat,
            port,
        };
        let mut device = Self::of_parts(parts, addr);
        if comp.is_null() {
            return Err(failed("ibv_create_comp_channel")());
        }
        device.attr = device.query_device().map_err(|source| OpenError::Call {
            call: "ibv_query_device",
            source,
        })?;
        // SAFETY: the descriptors are owned by objects that are open.
        let fds = unsafe { [(*channel).fd, (*comp).fd, (*context).async_fd] };
        for fd in fds {
            set_non_blocking(fd).map_err(|source| OpenError::Call {
                call: "fcntl",
                source,
            })?;
        }
        Ok(device)
    }

    /// Creates a device without any objects. Its limits have not been queried yet.
    pub(super) fn of_parts(parts: Parts, addr: IpAddr) -> Self {
        let Parts {
            core,
            context,
            channel,
            comp,
            probe,
            seat,
            port,
        } = parts;
        Self {
            core,
            context,
            probe,
            seat,
            occurrences: Vec::new(),
            attr: DeviceAttr::default(),
            addr,
            port,
            clock_khz: 0,
            gone: false,
            regions: RegionTable::new(core.verbs, context),
            xrcds: Table::new("XRC domains", MANY),
            cqs: CqTable::new(core.verbs, context, comp),
            srqs: Table::new("shared receive queues", MANY),
            qps: Table::new("queue pairs", MANY),
            qpns: HashMap::new(),
            ahs: Table::new("address handles", MANY),
            connections: Connections::new(core.cm, channel, addr),
            slots: Table::new("work requests", MANY << 4),
            async_events: VecDeque::new(),
            scratch: Scratch::default(),
        }
    }

    /// Returns the address used to open the device.
    #[must_use]
    pub fn addr(&self) -> IpAddr {
        self.addr
    }

    /// Returns whether the device has been removed. If so, all further calls fail.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.gone
    }

    /// Returns the GID index for our address, if it fits into an address vector. RoCE version 2 is
    /// preferred over version 1.
    pub(super) fn gid_index(&self) -> Option<u8> {
        let wanted = Gid::from(self.addr);
        let port = self.port_attr(self.port).ok()?;
        (0..=u8::MAX)
            .take_while(|i| i32::from(*i) < port.gid_tbl_len)
            .filter(|i| self.gid(self.port, (*i).into()).is_ok_and(|g| g == wanted))
            .min_by_key(|i| !is_roce_v2(&self.attr.name, self.port, *i))
    }

    /// Returns whether our port uses RoCE. The link layer of an iWARP port is Ethernet as well.
    pub(super) fn is_roce(&self) -> bool {
        let port = self.port_attr(self.port);
        transport_type(self) == IBV_TRANSPORT_IB
            && port.is_ok_and(|port| port.link_layer == LINK_LAYER_ETHERNET)
    }

    pub(super) fn port_attr(&self, port: u8) -> Result<ibv_port_attr, VerbsError> {
        if port == 0 || port > self.attr.ports {
            return Err(VerbsError::InvalidPort(port));
        }
        let mut theirs = ibv_port_attr::default();
        // SAFETY: the context is open. The function supports two versions of this structure, and we
        // use the larger one.
        let r = unsafe {
            (self.core.verbs.ibv_query_port)(self.context, port, (&raw mut theirs).cast())
        };
        convert::checked(r).map(|()| theirs)
    }

    pub(super) fn gid(&self, port: u8, index: u16) -> Result<Gid, VerbsError> {
        let mut gid = ibv_gid::default();
        // SAFETY: the context is open.
        let r = unsafe {
            (self.core.verbs.ibv_query_gid)(self.context, port, i32::from(index), &raw mut gid)
        };
        if r != 0 {
            return Err(VerbsError::InvalidIndex(index));
        }
        // SAFETY: a GID is 16 bytes, and any value is valid.
        Ok(Gid(unsafe { gid.raw }))
    }
}

impl RdmaCoreDevice {
    /// Detaches a QP from all groups before it is destroyed. Errors are ignored because destroying
    /// the QP would fail as well.
    pub(super) fn leave_groups(&self, qp: &Qp) {
        for (mgid, mlid) in &qp.groups {
            let gid = ibv_gid { raw: mgid.0 };
            // SAFETY: the QP is alive, and the library makes a copy of the GID.
            unsafe { (self.core.verbs.ibv_detach_mcast)(qp.ptr, &raw const gid, *mlid) };
        }
    }
}

impl Drop for RdmaCoreDevice {
    /// Destroys all objects in the order of their dependencies. If the device was removed, its
    /// context is closed, because the kernel is waiting for this.
    fn drop(&mut self) {
        let (verbs, cm) = (self.core.verbs, self.core.cm);
        // SAFETY: all pointers in the tables are valid and are only freed here. They can't be used
        // after this, and the order is based on the dependencies.
        unsafe {
            // QPs must be destroyed before their ids, queues and domain. If they were created by
            // librdmacm, it also needs to destroy them.
            for (_, qp) in self.qps.iter() {
                self.leave_groups(qp);
                match qp.owner.and_then(|id| self.connections.ids.get(id).ok()) {
                    Some(id) => (cm.rdma_destroy_qp)(id.ptr),
                    None => drop((verbs.ibv_destroy_qp)(qp.ptr)),
                }
            }
            for (_, id) in self
                .connections
                .ids
                .iter()
                .filter(|(_, id)| !id.ptr.is_null())
            {
                (cm.rdma_destroy_id)(id.ptr);
            }
            for (_, srq) in self.srqs.iter() {
                (verbs.ibv_destroy_srq)(srq.ptr);
            }
            for (_, xrcd) in self.xrcds.iter() {
                ops::ibv_close_xrcd(xrcd.ptr);
            }
            for (_, ah) in self.ahs.iter() {
                (verbs.ibv_destroy_ah)(ah.ptr);
            }
            self.regions.destroy_regions();
            self.cqs.destroy_all();
            self.regions.destroy_pds();
            if !self.cqs.channel.is_null() {
                (verbs.ibv_destroy_comp_channel)(self.cqs.channel);
            }
            // This must be done before destroying the probe, since the library can free the context
            // after that.
            if self.gone {
                self.seat.leave(|| shared::close_context(self.context));
            }
            (cm.rdma_destroy_id)(self.probe);
            (cm.rdma_destroy_event_channel)(self.connections.channel);
        }
    }
}

/// Returns the transport of a device: iWARP, or InfiniBand, which includes RoCE.
pub(super) fn transport_type(device: &RdmaCoreDevice) -> ibv_transport_type {
    // SAFETY: an open context has a device.
    unsafe { (*(*device.context).device).transport_type }
}

type ProbedId = (*mut rdma_cm_id, *mut ibv_context, u8);

/// Returns whether a GID of a port is used for RoCE version 2.
fn is_roce_v2(device: &str, port: u8, index: u8) -> bool {
    let path = format!("/sys/class/infiniband/{device}/ports/{port}/gid_attrs/types/{index}");
    std::fs::read_to_string(path).is_ok_and(|t| t.trim() == "RoCE v2")
}

/// Binds an id to an address, so that librdmacm opens the device.
fn probe(
    core: &RdmaCore,
    channel: *mut rdma_event_channel,
    addr: IpAddr,
) -> Result<ProbedId, crate::verbs::CmError> {
    let mut id = ptr::null_mut();
    // SAFETY: the channel is open, and the id is an output parameter.
    checked_cm(unsafe {
        (core.cm.rdma_create_id)(channel, &raw mut id, ptr::null_mut(), RDMA_PS_TCP)
    })?;
    let mut at = SockAddr::new(SocketAddr::new(addr, 0));
    // SAFETY: the id has just been created, and the address is valid.
    let bound = checked_cm(unsafe { (core.cm.rdma_bind_addr)(id, at.as_mut_ptr()) });
    // SAFETY: the id is alive.
    let (context, port) = unsafe { ((*id).verbs, (*id).port_num) };
    // A local address without an RDMA device can also be bound, but there won't be a context.
    if bound.is_err() || context.is_null() {
        // SAFETY: it was created above and is not used after this.
        unsafe { (core.cm.rdma_destroy_id)(id) };
        return Err(bound
            .err()
            .unwrap_or(crate::verbs::CmError::AddressNotAvailable));
    }
    Ok((id, context, port))
}

fn set_non_blocking(fd: i32) -> Result<(), VerbsError> {
    // SAFETY: simple system calls using an open descriptor.
    let r = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK)
    };
    if r < 0 { Err(last_os_error()) } else { Ok(()) }
}
