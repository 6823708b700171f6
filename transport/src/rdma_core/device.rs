//! The verbs that make, query and destroy objects; posting and polling are in `work`.

use std::ffi::CStr;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::time::Instant;

use riser_memory::MemSlice;
use riser_rdma_core_sys::bindings::*;
use riser_rdma_core_sys::ops;

use super::convert::{self, checked, last_os_error};
use super::objects::{
    Ah, Cq, Pd, Qp, RdmaCoreDevice, Region, Srq, UserWindow, Window, pack, unpack,
};
use super::shared::{Object, Occurrence};
use crate::umem;
use crate::verbs::*;

/// Vendor and part of `rdma_rxe`, which keeps from user space which key a receive invalidated. Our own
/// libraries (`riser-drop-in`) report this vendor as well, but another part.
const RXE: (u32, u32) = (0x00ff_ffff, 0);

/// Most entries of the scatter list of one request that we ask a device for.
const MAX_SGE: i32 = 32;

impl RdmaCoreDevice {
    pub(super) fn query_device(&self) -> Result<DeviceAttr, VerbsError> {
        let mut d = ibv_device_attr::default();
        // SAFETY: the context is open.
        checked(unsafe { (self.core.verbs.ibv_query_device)(self.context, &raw mut d) })?;
        // SAFETY: an open context has a device, whose name ends in NUL.
        let name = unsafe {
            CStr::from_ptr((self.core.verbs.ibv_get_device_name)(
                (*self.context).device,
            ))
        };
        // Linux has these as signed numbers.
        let count = |v: i32| u32::try_from(v).unwrap_or(0);
        let depth = |v: i32| v.clamp(0, 255) as u8;
        Ok(DeviceAttr {
            name: name.to_string_lossy().into_owned(),
            provider: "rdma_core",
            node_guid: u64::from_be(d.node_guid),
            max_pd: count(d.max_pd),
            max_mr: count(d.max_mr),
            max_mr_size: d.max_mr_size,
            max_mw: count(d.max_mw),
            // Whether the device could is told by another call.
            on_demand: false,
            // A window takes one segment; see the module's docs for what stands in for fast
            // registration.
            max_fast_reg_segments: u32::from(d.max_mw > 0),
            sg_gaps: true,
            reports_invalidation: (d.vendor_id, d.vendor_part_id) != RXE,
            max_cq: count(d.max_cq),
            max_cqe: count(d.max_cqe),
            // SAFETY: the context is open.
            comp_vectors: count(unsafe { (*self.context).num_comp_vectors }),
            max_qp: count(d.max_qp),
            max_qp_wr: count(d.max_qp_wr),
            max_sge: count(d.max_sge.min(MAX_SGE)),
            max_inline: 64,
            max_srq: count(d.max_srq),
            max_srq_wr: count(d.max_srq_wr),
            max_qp_rd_atom: depth(d.max_qp_rd_atom),
            max_qp_init_rd_atom: depth(d.max_qp_init_rd_atom),
            max_ah: count(d.max_ah),
            max_mcast_grp: count(d.max_mcast_grp),
            max_mcast_qp_attach: count(d.max_mcast_qp_attach),
            min_rate_kbps: 0,
            max_rate_kbps: 0,
            ports: d.phys_port_cnt,
            path_migration: d.device_cap_flags & IBV_DEVICE_AUTO_PATH_MIG != 0,
        })
    }

    fn pd_ptr(&self, pd: PdId) -> Result<*mut ibv_pd, VerbsError> {
        Ok(self.pds.get(pd)?.ptr)
    }

    fn use_pd(&mut self, pd: PdId) {
        if let Ok(pd) = self.pds.get_mut(pd) {
            pd.users += 1;
        }
    }

    fn release_pd(&mut self, pd: PdId) {
        if let Ok(pd) = self.pds.get_mut(pd) {
            pd.users -= 1;
        }
    }

    /// The attributes for making a queue pair.
    pub(super) fn qp_init(&self, init: &QpInitAttr) -> Result<ibv_qp_init_attr, VerbsError> {
        // A kernel without it would hand them back all the same.
        if init.block_self_mcast {
            return Err(VerbsError::InvalidParameter("block_self_mcast"));
        }
        let qp_type = match init.qp_type {
            QpType::Rc => IBV_QPT_RC,
            QpType::Uc => IBV_QPT_UC,
            QpType::Ud => IBV_QPT_UD,
            QpType::Smi => return Err(VerbsError::Unsupported("queue pair 0")),
            QpType::RawPacket => return Err(VerbsError::Unsupported("raw packets")),
            QpType::XrcIni | QpType::XrcTgt => return Err(VerbsError::Unsupported("XRC domains")),
            QpType::Gsi => return Err(VerbsError::WrongQpType("the kernel keeps queue pair 1")),
        };
        let (cap, attr) = (&init.cap, &self.attr);
        for (wanted, most, what) in [
            (cap.max_send_wr, attr.max_qp_wr, "send queue depth"),
            (cap.max_recv_wr, attr.max_qp_wr, "receive queue depth"),
            (cap.max_send_sge, attr.max_sge, "send scatter list"),
            (cap.max_recv_sge, attr.max_sge, "receive scatter list"),
            (cap.max_inline, attr.max_inline, "inline data"),
        ] {
            if wanted > most {
                return Err(VerbsError::InvalidParameter(what));
            }
        }
        // Refused here and not after the library has made a queue pair that would have to be
        // destroyed.
        self.qps.check_room()?;
        Ok(ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: self.cqs.get(init.send_cq)?.ptr,
            recv_cq: self.cqs.get(init.recv_cq)?.ptr,
            srq: init
                .srq
                .map_or(Ok(ptr::null_mut()), |s| self.srqs.get(s).map(|s| s.ptr))?,
            cap: ibv_qp_cap {
                max_send_wr: init.cap.max_send_wr,
                max_recv_wr: if init.srq.is_some() {
                    0
                } else {
                    init.cap.max_recv_wr
                },
                max_send_sge: init.cap.max_send_sge.max(1),
                max_recv_sge: init.cap.max_recv_sge.max(1),
                max_inline_data: init.cap.max_inline,
            },
            qp_type,
            sq_sig_all: i32::from(init.sq_sig_all),
        })
    }

    /// Enters a queue pair that the library made, and counts what it uses. That there is room, and
    /// what it uses, was checked by [`Self::qp_init`].
    pub(super) fn adopt_qp(
        &mut self,
        ptr: *mut ibv_qp,
        init: &QpInitAttr,
        owner: Option<CmId>,
    ) -> Result<QpId, VerbsError> {
        // SAFETY: the queue pair was just made.
        let qpn = unsafe { (*ptr).qp_num };
        let id = self.qps.insert(Qp {
            ptr,
            qpn,
            init: *init,
            owner,
            sent: Default::default(),
            received: Default::default(),
        })?;
        self.qpns.insert(qpn, id);
        self.use_pd(init.pd);
        for cq in [init.send_cq, init.recv_cq] {
            self.cqs.get_mut(cq)?.users += 1;
        }
        if let Some(srq) = init.srq {
            self.srqs.get_mut(srq)?.users += 1;
        }
        Ok(id)
    }

    fn forget_qp(&mut self, id: QpId) {
        let Ok(qp) = self.qps.remove(id) else { return };
        self.qpns.remove(&qp.qpn);
        // A completion that comes for one of these after all names no slot.
        for slot in qp.sent.into_iter().chain(qp.received) {
            let _ = self.slots.remove(slot);
        }
        self.release_pd(qp.init.pd);
        for cq in [qp.init.send_cq, qp.init.recv_cq] {
            if let Ok(cq) = self.cqs.get_mut(cq) {
                cq.users -= 1;
            }
        }
        if let Some(Ok(srq)) = qp.init.srq.map(|s| self.srqs.get_mut(s)) {
            srq.users -= 1;
        }
    }

    /// Hands on to all seats at the context what its asynchronous event descriptor has.
    fn read_async_events(&mut self) {
        loop {
            let mut event = ibv_async_event::default();
            // SAFETY: the context is open and its descriptor does not block.
            if unsafe { (self.core.verbs.ibv_get_async_event)(self.context, &raw mut event) } != 0 {
                return;
            }
            // Acknowledged at once: until then the library keeps the object of the event alive,
            // and its destruction waits.
            // SAFETY: the event was just taken, and is acknowledged only then.
            unsafe {
                self.seat.report(Occurrence::of(&event));
                (self.core.verbs.ibv_ack_async_event)(&raw mut event);
            }
        }
    }

    /// Takes in what this device, or another of this process, has read of asynchronous events.
    fn reap_async_events(&mut self) -> usize {
        let mut occurrences = std::mem::take(&mut self.occurrences);
        self.seat.take_all(&mut occurrences);
        let count = occurrences.len();
        for occurrence in occurrences.drain(..) {
            if let Some(ours) = self.async_event(occurrence)
                // Each kind once, so that a device that repeats itself cannot make the queue
                // grow.
                && !self.async_events.contains(&ours)
            {
                self.async_events.push_back(ours);
            }
        }
        self.occurrences = occurrences;
        count
    }

    /// Our form of what happened, if it happened to us.
    fn async_event(&mut self, occurrence: Occurrence) -> Option<AsyncEvent> {
        // An event may be about an object that was destroyed since, or about another device of this
        // process at the same context: handle and address must both fit.
        let event = occurrence.event;
        match occurrence.to {
            Object::Queue { at, context } if event == IBV_EVENT_CQ_ERR => {
                // Remembered, so that polls report the loss: the library itself goes on to answer
                // them.
                let id = CqId(unpack(context));
                let cq = self.cqs.get_mut(id).ok()?;
                (cq.ptr as usize == at).then(|| cq.overrun = true)?;
                Some(AsyncEvent::CqError(id))
            }
            Object::Queue { at, context } => {
                let id = SrqId(unpack(context));
                let srq = self.srqs.get(id).ok()?;
                let is_limit = event == IBV_EVENT_SRQ_LIMIT_REACHED && srq.ptr as usize == at;
                is_limit.then_some(AsyncEvent::SrqLimitReached(id))
            }
            Object::Qp(number) => {
                let qp = *self.qpns.get(&number)?;
                Some(match event {
                    IBV_EVENT_QP_FATAL => AsyncEvent::QpFatal(qp),
                    IBV_EVENT_QP_REQ_ERR => AsyncEvent::QpReqError(qp),
                    IBV_EVENT_QP_ACCESS_ERR => AsyncEvent::QpAccessError(qp),
                    IBV_EVENT_COMM_EST => AsyncEvent::CommEstablished(qp),
                    IBV_EVENT_SQ_DRAINED => AsyncEvent::SqDrained(qp),
                    IBV_EVENT_PATH_MIG => AsyncEvent::PathMig(qp),
                    IBV_EVENT_PATH_MIG_ERR => AsyncEvent::PathMigError(qp),
                    IBV_EVENT_QP_LAST_WQE_REACHED => AsyncEvent::QpLastWqeReached(qp),
                    _ => return None,
                })
            }
            Object::Port(port) => Some(match event {
                IBV_EVENT_PORT_ACTIVE => AsyncEvent::PortActive(port),
                IBV_EVENT_PORT_ERR => AsyncEvent::PortError(port),
                IBV_EVENT_GID_CHANGE => AsyncEvent::GidChange(port),
                _ => return None,
            }),
            Object::Device if event == IBV_EVENT_DEVICE_FATAL => {
                self.gone = true;
                Some(AsyncEvent::DeviceFatal)
            }
            Object::Device => None,
        }
    }
}

impl RdmaCoreDevice {
    /// Returns whether there are completion events, connection events, asynchronous events: one
    /// system call where reading each would be three.
    pub(super) fn readable(&self) -> [bool; 3] {
        // SAFETY: all three objects are open as long as the device is.
        let fds = unsafe {
            [
                (*self.comp).fd,
                (*self.channel).fd,
                (*self.context).async_fd,
            ]
        };
        let mut polled = fds.map(|fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        });
        // SAFETY: three structures, which the call fills; it does not wait.
        let n = unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, 0) };
        polled.map(|p| n > 0 && p.revents != 0)
    }
}

impl Provider for RdmaCoreDevice {
    fn progress(&mut self, now: Instant) -> usize {
        let mut count = self.poll_watched();
        if self.notices.must_look(now, count > 0) {
            let [completions, connections, events] = self.readable();
            if events {
                self.read_async_events();
            }
            if completions {
                count += self.reap_cq_events();
            }
            if connections {
                count += self.reap_cm_events();
            }
        }
        // Events that another device has read come by the seat, which needs no system call to
        // look at.
        count + self.reap_async_events()
    }

    fn deadline(&self) -> Option<Instant> {
        // Everything else wakes its owner by a descriptor.
        let is_waiting =
            !self.cm_events.is_empty() || !self.async_events.is_empty() || self.notices.has_fired();
        is_waiting.then(Instant::now)
    }

    fn event_fds(&self) -> EventFds<'_> {
        // SAFETY: all four objects are open as long as the device is.
        let fds = unsafe {
            [
                (*self.comp).fd,
                (*self.channel).fd,
                (*self.context).async_fd,
                self.seat.wake_fd(),
            ]
            .map(|fd| BorrowedFd::borrow_raw(fd))
        };
        EventFds::from(fds)
    }

    fn arm_fds(&mut self) -> bool {
        self.arm_watched()
    }
}

impl Verbs for RdmaCoreDevice {
    fn device_attr(&self) -> &DeviceAttr {
        &self.attr
    }

    fn query_port(&self, port: u8) -> Result<PortAttr, VerbsError> {
        let theirs = self.port_attr(port)?;
        let active = theirs.state == IBV_PORT_ACTIVE;
        Ok(PortAttr {
            state: if active {
                PortState::Active
            } else {
                PortState::Down
            },
            max_mtu: convert::mtu(theirs.max_mtu).unwrap_or(Mtu::Mtu4096),
            active_mtu: Self::active_mtu(&theirs),
            max_msg_size: theirs.max_msg_sz,
            gid_table_len: u16::try_from(theirs.gid_tbl_len).unwrap_or(0),
            pkey_table_len: theirs.pkey_tbl_len,
            addr: self.addr,
        })
    }

    fn query_gid(&self, port: u8, index: u16) -> Result<Gid, VerbsError> {
        self.port_attr(port)?;
        self.gid(port, index)
    }

    fn query_pkey(&self, port: u8, index: u16) -> Result<PKey, VerbsError> {
        self.port_attr(port)?;
        let mut pkey = 0;
        // SAFETY: the context is open.
        let r = unsafe {
            (self.core.verbs.ibv_query_pkey)(self.context, port, i32::from(index), &raw mut pkey)
        };
        if r == 0 {
            Ok(PKey(u16::from_be(pkey)))
        } else {
            Err(VerbsError::InvalidIndex(index))
        }
    }

    fn poll_async_event(&mut self) -> Option<AsyncEvent> {
        self.async_events.pop_front()
    }

    fn alloc_pd(&mut self) -> Result<PdId, VerbsError> {
        self.pds.check_room()?;
        // SAFETY: the context is open.
        let ptr = unsafe { (self.core.verbs.ibv_alloc_pd)(self.context) };
        if ptr.is_null() {
            Err(last_os_error())
        } else {
            self.pds.insert(Pd { ptr, users: 0 })
        }
    }

    fn dealloc_pd(&mut self, pd: PdId) -> Result<(), VerbsError> {
        let entry = self.pds.get(pd)?;
        if entry.users > 0 {
            return Err(VerbsError::ResourceBusy("protection domain"));
        }
        // SAFETY: nothing uses it, and it leaves the table.
        checked(unsafe { (self.core.verbs.ibv_dealloc_pd)(entry.ptr) })?;
        self.pds.remove(pd).map(drop)
    }

    fn reg_mr(&mut self, pd: PdId, range: &MemSlice, access: Access) -> Result<Mr, VerbsError> {
        let iova = if access.contains(Access::ZERO_BASED) {
            0
        } else {
            range.addr()
        };
        self.reg_mr_iova(pd, range, iova, access)
    }

    fn reg_mr_iova(
        &mut self,
        pd: PdId,
        range: &MemSlice,
        addr: u64,
        access: Access,
    ) -> Result<Mr, VerbsError> {
        let remote_change = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        if access.intersects(remote_change) && !access.contains(Access::LOCAL_WRITE) {
            return Err(VerbsError::InvalidAccess(
                "remote write without local write",
            ));
        }
        if addr.checked_add(range.len() as u64).is_none()
            || (addr != 0 && access.contains(Access::ZERO_BASED))
        {
            return Err(VerbsError::InvalidParameter("address of the region"));
        }
        let domain = self.pd_ptr(pd)?;
        // Before the library makes what would have to be destroyed again.
        self.regions.check_room()?;
        // Any region may get windows, which stand for its fast registrations.
        let flags = (convert::access_flags(access) | IBV_ACCESS_MW_BIND) as i32;
        // SAFETY: the range is mapped, and the table entry keeps it so until it is deregistered.
        let ptr = unsafe {
            let (start, len) = (range.ptr().cast(), range.len());
            if addr == range.addr() {
                (self.core.verbs.ibv_reg_mr)(domain, start, len, flags)
            } else {
                (self.core.verbs.ibv_reg_mr_iova)(domain, start, len, addr, flags)
            }
        };
        if ptr.is_null() {
            return Err(last_os_error());
        }
        // SAFETY: the region was just made.
        let (lkey, rkey) = unsafe { ((*ptr).lkey, (*ptr).rkey) };
        let length = range.len() as u64;
        let mr = |id| Mr {
            id,
            lkey: LKey(lkey),
            rkey: RKey(rkey),
            addr,
            length,
        };
        let placeholder = mr(MrId(Handle::new(0, 0)));
        let id = self.regions.insert(Region::Plain {
            pd,
            ptr,
            access,
            mr: placeholder,
            memory: range.clone(),
            windows: 0,
        })?;
        if let Ok(Region::Plain { mr: entry, .. }) = self.regions.get_mut(id) {
            *entry = mr(id);
        }
        self.use_pd(pd);
        Ok(mr(id))
    }

    fn rereg_mr(&mut self, id: MrId, change: &MrChange<'_>) -> Result<Mr, VerbsError> {
        let Region::Plain {
            pd: old_pd,
            ptr,
            access: old_access,
            mr: old,
            memory: old_memory,
            windows,
        } = self.regions.get(id)?
        else {
            return Err(VerbsError::InvalidState("not a registered region"));
        };
        if *windows > 0 {
            return Err(VerbsError::ResourceBusy("memory region"));
        }
        let (ptr, old_pd) = (*ptr, *old_pd);
        let (pd, access) = (
            change.pd.unwrap_or(old_pd),
            change.access.unwrap_or(*old_access),
        );
        let (memory, addr) = match change.translation {
            // The library takes the address of the memory for that of the region.
            Some((range, iova)) if iova != range.addr() => {
                return Err(VerbsError::Unsupported("another address of a region"));
            }
            Some((range, iova)) => (range.clone(), iova),
            None => (old_memory.clone(), old.addr),
        };
        let flags = [
            (
                change.translation.is_some(),
                IBV_REREG_MR_CHANGE_TRANSLATION,
            ),
            (change.pd.is_some(), IBV_REREG_MR_CHANGE_PD),
            (change.access.is_some(), IBV_REREG_MR_CHANGE_ACCESS),
        ];
        let flags = flags
            .iter()
            .filter(|(is_set, _)| *is_set)
            .fold(0, |all, (_, flag)| all | flag);
        let rights = (convert::access_flags(access) | IBV_ACCESS_MW_BIND) as i32;
        let domain = self.pd_ptr(pd)?;
        // SAFETY: region and domain are alive, and the memory is mapped as long as the table has
        // its slice.
        let r = unsafe {
            let start = memory.ptr().cast();
            (self.core.verbs.ibv_rereg_mr)(ptr, flags as i32, domain, start, memory.len(), rights)
        };
        if r != 0 {
            return Err(last_os_error());
        }
        // SAFETY: the region is alive. The library may have given it other keys.
        let (lkey, rkey) = unsafe { ((*ptr).lkey, (*ptr).rkey) };
        let mr = Mr {
            id,
            lkey: LKey(lkey),
            rkey: RKey(rkey),
            addr,
            length: memory.len() as u64,
        };
        *self.regions.get_mut(id)? = Region::Plain {
            pd,
            ptr,
            access,
            mr,
            memory,
            windows: 0,
        };
        self.use_pd(pd);
        self.release_pd(old_pd);
        Ok(mr)
    }

    fn alloc_mw(&mut self, pd: PdId, mw_type: MwType) -> Result<Mw, VerbsError> {
        // The library binds these by a call that is not a work request.
        if mw_type == MwType::Type1 {
            return Err(VerbsError::Unsupported("memory windows of type 1"));
        }
        self.mws.check_room()?;
        // SAFETY: the domain is alive.
        let ptr = unsafe { ops::ibv_alloc_mw(self.pd_ptr(pd)?, IBV_MW_TYPE_2) };
        if ptr.is_null() {
            return Err(last_os_error());
        }
        let id = self.mws.insert(UserWindow { pd, ptr })?;
        self.use_pd(pd);
        Ok(Mw {
            id,
            // SAFETY: the window was just made.
            rkey: RKey(unsafe { (*ptr).rkey }),
            mw_type,
        })
    }

    fn dealloc_mw(&mut self, mw: MwId) -> Result<(), VerbsError> {
        let ptr = self.mws.get(mw)?.ptr;
        // SAFETY: the window leaves the table below; nothing else has the pointer.
        checked(unsafe { ops::ibv_dealloc_mw(ptr) })?;
        let pd = self.mws.remove(mw)?.pd;
        self.release_pd(pd);
        Ok(())
    }

    fn query_mr(&self, mr: MrId) -> Result<MrAttr, VerbsError> {
        Ok(match self.regions.get(mr)? {
            Region::Plain { pd, access, mr, .. } => MrAttr {
                pd: *pd,
                mr: *mr,
                access: *access,
                valid: true,
            },
            Region::Window(w) => MrAttr {
                pd: w.pd,
                mr: w.mr,
                access: w.access,
                valid: w.valid,
            },
        })
    }

    fn dereg_mr(&mut self, mr: MrId) -> Result<(), VerbsError> {
        // A region in which windows are mapped stays until they are gone.
        let pd = match self.regions.get(mr)? {
            Region::Plain { windows: 1.., .. } => {
                return Err(VerbsError::ResourceBusy("memory region"));
            }
            Region::Plain { pd, ptr, .. } => {
                // SAFETY: the region leaves the table below; nothing else has the pointer.
                checked(unsafe { (self.core.verbs.ibv_dereg_mr)(*ptr) })?;
                *pd
            }
            Region::Window(w) => {
                // SAFETY: as above.
                checked(unsafe { ops::ibv_dealloc_mw(w.ptr) })?;
                self.rkeys.remove(&w.mr.rkey.0);
                let (pd, mapped) = (w.pd, w.mapped.as_ref().map(|(id, _)| *id));
                self.unmap_window(mapped);
                pd
            }
        };
        self.release_pd(pd);
        self.regions.remove(mr).map(drop)
    }

    fn alloc_fast_mr(&mut self, pd: PdId, max_segments: u32) -> Result<Mr, VerbsError> {
        if max_segments == 0 || max_segments > self.attr.max_fast_reg_segments {
            return Err(VerbsError::InvalidParameter("number of segments"));
        }
        self.regions.check_room()?;
        // SAFETY: the domain is alive.
        let ptr = unsafe { ops::ibv_alloc_mw(self.pd_ptr(pd)?, IBV_MW_TYPE_2) };
        if ptr.is_null() {
            return Err(last_os_error());
        }
        // SAFETY: the window was just made.
        let rkey = unsafe { (*ptr).rkey };
        let mr = |id| Mr {
            id,
            lkey: LKey(0),
            rkey: RKey(rkey),
            addr: 0,
            length: 0,
        };
        // The table gives the handle, which the entry itself contains.
        let placeholder = mr(MrId(Handle::new(0, 0)));
        let window = Window {
            pd,
            ptr,
            mr: placeholder,
            access: Access::empty(),
            mapped: None,
            valid: false,
        };
        let id = self.regions.insert(Region::Window(window))?;
        if let Ok(Region::Window(w)) = self.regions.get_mut(id) {
            w.mr = mr(id);
        }
        self.rkeys.insert(rkey, id);
        self.use_pd(pd);
        Ok(mr(id))
    }

    fn map_mr_sg(&mut self, mr: MrId, segments: &[MemSlice]) -> Result<u64, VerbsError> {
        let Some(segment) = &umem::ranges(segments).next() else {
            return Err(VerbsError::InvalidParameter("scatter list"));
        };
        let pd = self.regions.get(mr)?.pd();
        // The first range only: that is what a window is, and the caller learns how many bytes it
        // covers.
        let (start, end) = (segment.addr(), segment.addr() + segment.len() as u64);
        // A window is bound within one region, so the segment must lie in one of the same domain.
        let covers = |r: &Region| match r {
            Region::Plain { pd: p, memory, .. } => {
                *p == pd && memory.addr() <= start && end <= memory.addr() + memory.len() as u64
            }
            Region::Window(_) => false,
        };
        let base = self
            .regions
            .iter()
            .find(|(_, r)| covers(r))
            .map(|(id, _)| id);
        let base = base.ok_or(VerbsError::InvalidParameter(
            "segment outside registered memory",
        ))?;
        let Region::Window(w) = self.regions.get_mut(mr)? else {
            return Err(VerbsError::InvalidHandle("fast-registration region"));
        };
        if w.valid {
            return Err(VerbsError::InvalidState("the region is still valid"));
        }
        // The window lets its old region be deregistered only now that it has another.
        let before = w.mapped.replace((base, segment.clone())).map(|(id, _)| id);
        w.mr.addr = start;
        w.mr.length = segment.len() as u64;
        self.unmap_window(before);
        if let Ok(Region::Plain { windows, .. }) = self.regions.get_mut(base) {
            *windows += 1;
        }
        Ok(segment.len() as u64)
    }

    fn create_cq_with(&mut self, init: &CqInitAttr) -> Result<CqId, VerbsError> {
        let entries = init.entries;
        // SAFETY: the context is open.
        let vectors = unsafe { (*self.context).num_comp_vectors };
        let vector = i32::try_from(init.vector).unwrap_or(i32::MAX);
        if vector >= vectors.max(1) {
            return Err(VerbsError::InvalidParameter("completion vector"));
        }
        if init.is_timed {
            return Err(VerbsError::InvalidParameter("times of completions"));
        }
        if entries == 0 || entries > self.attr.max_cqe {
            return Err(VerbsError::InvalidParameter("number of entries"));
        }
        // The library gets our handle with the queue, so the handle exists first.
        let id = self.cqs.insert(Cq::new(init.vector))?;
        let context = pack(id.0) as usize as *mut _;
        // SAFETY: context and channel are open; our handle travels as a number.
        let ptr = unsafe {
            (self.core.verbs.ibv_create_cq)(
                self.context,
                entries as i32,
                context,
                self.comp,
                vector,
            )
        };
        if ptr.is_null() {
            self.cqs.remove(id)?;
            return Err(last_os_error());
        }
        self.cqs.get_mut(id)?.ptr = ptr;
        Ok(id)
    }

    fn query_cq(&self, cq: CqId) -> Result<CqAttr, VerbsError> {
        let entry = self.cqs.get(cq)?;
        Ok(CqAttr {
            // SAFETY: the queue is alive.
            entries: unsafe { (*entry.ptr).cqe }.try_into().unwrap_or(0),
            vector: entry.vector,
            is_timed: false,
            moderation: Moderation::default(),
        })
    }

    fn modify_cq(&mut self, cq: CqId, moderation: Moderation) -> Result<(), VerbsError> {
        self.cqs.get(cq)?;
        // The library has its call inline, by a table that this one does not use.
        match moderation.period.is_zero() {
            true => Ok(()),
            false => Err(VerbsError::InvalidParameter("moderation")),
        }
    }

    fn resize_cq(&mut self, cq: CqId, entries: u32) -> Result<(), VerbsError> {
        // Completions that were peeked at are counted too; they are no longer in the library's
        // queue.
        let held = self.peek_cq(cq, entries as usize + 1)?;
        if entries == 0 || entries > self.attr.max_cqe || held > entries as usize {
            return Err(VerbsError::InvalidParameter("number of entries"));
        }
        // SAFETY: the queue is alive.
        checked(unsafe { (self.core.verbs.ibv_resize_cq)(self.cqs.get(cq)?.ptr, entries as i32) })
    }

    fn destroy_cq(&mut self, cq: CqId) -> Result<(), VerbsError> {
        let entry = self.cqs.get(cq)?;
        if entry.users > 0 {
            return Err(VerbsError::ResourceBusy("completion queue"));
        }
        let ptr = entry.ptr;
        self.acknowledge(cq);
        // SAFETY: nothing uses it and all its events are acknowledged; it leaves the table.
        checked(unsafe { (self.core.verbs.ibv_destroy_cq)(ptr) })?;
        self.notices.forget(cq);
        self.cqs.remove(cq).map(drop)
    }

    fn poll_cq(
        &mut self,
        cq: CqId,
        max: usize,
        out: &mut Vec<Completion>,
    ) -> Result<usize, VerbsError> {
        self.poll(cq, max, out)
    }

    fn poll_cq_timed(
        &mut self,
        cq: CqId,
        _max: usize,
        _out: &mut Vec<TimedCompletion>,
    ) -> Result<usize, VerbsError> {
        self.cqs.get(cq)?;
        Err(VerbsError::InvalidParameter("queue without times"))
    }

    fn peek_cq(&self, cq: CqId, max: usize) -> Result<usize, VerbsError> {
        self.peek(cq, max)
    }

    fn req_notify_cq(&mut self, cq: CqId, notify: Notify) -> Result<bool, VerbsError> {
        self.request_notice(cq, notify)
    }

    fn poll_cq_event(&mut self) -> Option<CqId> {
        self.notices.take_fired()
    }

    fn create_srq(&mut self, pd: PdId, attr: SrqAttr) -> Result<SrqId, VerbsError> {
        let domain = self.pd_ptr(pd)?;
        let id = self.srqs.insert(Srq {
            ptr: ptr::null_mut(),
            pd,
            users: 0,
            posted: Vec::new(),
        })?;
        let mut init = ibv_srq_init_attr {
            srq_context: pack(id.0) as usize as *mut _,
            attr: ibv_srq_attr {
                max_wr: attr.max_wr,
                max_sge: attr.max_sge,
                // The limit is set below, since the library ignores it here.
                srq_limit: 0,
            },
        };
        // SAFETY: the domain is alive.
        let ptr = unsafe { (self.core.verbs.ibv_create_srq)(domain, &raw mut init) };
        if ptr.is_null() {
            self.srqs.remove(id)?;
            return Err(last_os_error());
        }
        self.srqs.get_mut(id)?.ptr = ptr;
        self.use_pd(pd);
        if attr.limit > 0
            && let Err(e) = self.modify_srq(id, None, Some(attr.limit))
        {
            // What the caller has no handle of must not stay.
            let _ = self.destroy_srq(id);
            return Err(e);
        }
        Ok(id)
    }

    fn modify_srq(
        &mut self,
        srq: SrqId,
        max_wr: Option<u32>,
        limit: Option<u32>,
    ) -> Result<(), VerbsError> {
        let mut attr = ibv_srq_attr {
            max_wr: max_wr.unwrap_or(0),
            max_sge: 0,
            srq_limit: limit.unwrap_or(0),
        };
        let mask = max_wr.map_or(0, |_| IBV_SRQ_MAX_WR) | limit.map_or(0, |_| IBV_SRQ_LIMIT);
        let ptr = self.srqs.get(srq)?.ptr;
        // SAFETY: the queue is alive.
        checked(unsafe { (self.core.verbs.ibv_modify_srq)(ptr, &raw mut attr, mask as i32) })
    }

    fn query_srq(&self, srq: SrqId) -> Result<SrqAttr, VerbsError> {
        let mut attr = ibv_srq_attr::default();
        let ptr = self.srqs.get(srq)?.ptr;
        // SAFETY: the queue is alive.
        checked(unsafe { (self.core.verbs.ibv_query_srq)(ptr, &raw mut attr) })?;
        Ok(SrqAttr {
            max_wr: attr.max_wr,
            max_sge: attr.max_sge,
            limit: attr.srq_limit,
        })
    }

    fn destroy_srq(&mut self, srq: SrqId) -> Result<(), VerbsError> {
        let entry = self.srqs.get(srq)?;
        if entry.users > 0 {
            return Err(VerbsError::ResourceBusy("shared receive queue"));
        }
        // SAFETY: nothing uses it; it leaves the table.
        checked(unsafe { (self.core.verbs.ibv_destroy_srq)(entry.ptr) })?;
        let gone = self.srqs.remove(srq)?;
        // Receives of a shared queue that is gone do not complete, so their slots go with it.
        for slot in gone.posted {
            let _ = self.slots.remove(slot);
        }
        self.release_pd(gone.pd);
        Ok(())
    }

    fn post_srq_recv(&mut self, srq: SrqId, wrs: &[RecvWr<'_>]) -> Result<(), PostError> {
        self.post_shared(srq, wrs)
    }

    fn create_qp(&mut self, init: &QpInitAttr) -> Result<QpId, VerbsError> {
        let mut theirs = self.qp_init(init)?;
        let pd = self.pd_ptr(init.pd)?;
        // SAFETY: domain and queues are alive.
        let ptr = unsafe { (self.core.verbs.ibv_create_qp)(pd, &raw mut theirs) };
        if ptr.is_null() {
            Err(last_os_error())
        } else {
            self.adopt_qp(ptr, init, None)
        }
    }

    fn qp_num(&self, qp: QpId) -> Result<u32, VerbsError> {
        Ok(self.qps.get(qp)?.qpn)
    }

    fn modify_qp(&mut self, qp: QpId, attr: &QpAttr) -> Result<(), VerbsError> {
        let entry = self.qps.get(qp)?;
        // The state is asked of the device: it may have gone to ERROR by itself.
        let now = self.query_qp(qp)?.state.unwrap_or(QpState::Error);
        crate::verbs::qp_state::plan_modify(entry.init.qp_type, now, attr)?;
        // A value that does not fit its field would be cut, and be another one.
        for (value, name) in [
            (attr.dest_qp, "dest_qp"),
            (attr.rq_psn, "rq_psn"),
            (attr.sq_psn, "sq_psn"),
        ] {
            if value.is_some_and(|v| v > 0x00ff_ffff) {
                return Err(VerbsError::InvalidParameter(name));
            }
        }
        let (mut theirs, mask) = convert::qp_attr(attr);
        if attr.ah.is_some() {
            self.choose_gid(&mut theirs.ah_attr);
        }
        // SAFETY: the queue pair is alive.
        checked(unsafe { (self.core.verbs.ibv_modify_qp)(entry.ptr, &raw mut theirs, mask as i32) })
    }

    fn query_qp(&self, qp: QpId) -> Result<QpAttr, VerbsError> {
        let (mut attr, mut init) = (ibv_qp_attr::default(), ibv_qp_init_attr::default());
        let mask = (IBV_QP_RATE_LIMIT - 1) as i32;
        let ptr = self.qps.get(qp)?.ptr;
        // SAFETY: the queue pair is alive.
        checked(unsafe {
            (self.core.verbs.ibv_query_qp)(ptr, &raw mut attr, mask & 0x1f_ffff, &raw mut init)
        })?;
        if attr.qp_state == IBV_QPS_RESET {
            // Some devices still report the attributes that the reset has cleared.
            return Ok(QpAttr {
                state: Some(QpState::Reset),
                ..QpAttr::default()
            });
        }
        let pkey = self.query_pkey(attr.port_num, attr.pkey_index).ok();
        Ok(QpAttr {
            pkey,
            ..convert::qp_attr_of(&attr)
        })
    }

    fn destroy_qp(&mut self, qp: QpId) -> Result<(), VerbsError> {
        let entry = self.qps.get(qp)?;
        match entry.owner {
            Some(owner) => self.destroy_owned_qp(owner),
            // SAFETY: the queue pair leaves the table below.
            None => checked(unsafe { (self.core.verbs.ibv_destroy_qp)(entry.ptr) })?,
        }
        self.forget_qp(qp);
        Ok(())
    }

    fn attach_mcast(&mut self, qp: QpId, mgid: Gid, mlid: u16) -> Result<(), VerbsError> {
        let ptr = self.check_mcast(qp, mgid)?;
        let gid = ibv_gid { raw: mgid.0 };
        // SAFETY: the queue pair is alive, and the library copies the GID.
        checked(unsafe { (self.core.verbs.ibv_attach_mcast)(ptr, &raw const gid, mlid) })
    }

    fn detach_mcast(&mut self, qp: QpId, mgid: Gid, mlid: u16) -> Result<(), VerbsError> {
        let ptr = self.check_mcast(qp, mgid)?;
        let gid = ibv_gid { raw: mgid.0 };
        // SAFETY: as above.
        checked(unsafe { (self.core.verbs.ibv_detach_mcast)(ptr, &raw const gid, mlid) })
    }

    fn post_send(&mut self, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), PostError> {
        self.post_requests(qp, wrs)
    }

    fn post_recv(&mut self, qp: QpId, wrs: &[RecvWr<'_>]) -> Result<(), PostError> {
        self.post_receives(qp, wrs)
    }

    fn create_ah(&mut self, pd: PdId, attr: AhAttr) -> Result<AhId, VerbsError> {
        self.ahs.check_room()?;
        let ptr = self.make_ah(self.pd_ptr(pd)?, &attr)?;
        self.ahs.insert(Ah { ptr, attr })
    }

    fn query_ah(&self, ah: AhId) -> Result<AhAttr, VerbsError> {
        Ok(self.ahs.get(ah)?.attr)
    }

    fn modify_ah(&mut self, ah: AhId, attr: AhAttr) -> Result<(), VerbsError> {
        // The library changes none, so another takes its place.
        let before = self.ahs.get(ah)?.ptr;
        // SAFETY: the handle is alive, and so is its domain.
        let ptr = self.make_ah(unsafe { (*before).pd }, &attr)?;
        *self.ahs.get_mut(ah)? = Ah { ptr, attr };
        // SAFETY: the table has the other one now.
        checked(unsafe { (self.core.verbs.ibv_destroy_ah)(before) })
    }

    fn destroy_ah(&mut self, ah: AhId) -> Result<(), VerbsError> {
        let ptr = self.ahs.remove(ah)?.ptr;
        // SAFETY: the handle has just left the table.
        checked(unsafe { (self.core.verbs.ibv_destroy_ah)(ptr) })
    }
}

impl RdmaCoreDevice {
    /// A device has many GIDs, and ours is the one of the address that it was opened at.
    fn choose_gid(&self, attr: &mut ibv_ah_attr) {
        if let Some(index) = self.gid_index() {
            attr.grh.sgid_index = index as u8;
        }
    }

    /// The queue pair for the library, if it may be attached to a group.
    fn check_mcast(&self, qp: QpId, mgid: Gid) -> Result<*mut ibv_qp, VerbsError> {
        let entry = self.qps.get(qp)?;
        if entry.init.qp_type != QpType::Ud {
            return Err(VerbsError::WrongQpType("multicast"));
        }
        if !mgid.ip().is_multicast() {
            return Err(VerbsError::InvalidParameter("multicast group"));
        }
        Ok(entry.ptr)
    }

    /// Makes an address handle in a domain that is alive.
    fn make_ah(&self, pd: *mut ibv_pd, attr: &AhAttr) -> Result<*mut ibv_ah, VerbsError> {
        let mut theirs = convert::ah_attr(attr);
        self.choose_gid(&mut theirs);
        // SAFETY: the domain is alive.
        let ptr = unsafe { (self.core.verbs.ibv_create_ah)(pd, &raw mut theirs) };
        if ptr.is_null() {
            return Err(last_os_error());
        }
        Ok(ptr)
    }

    /// One window less lies in a region.
    fn unmap_window(&mut self, base: Option<MrId>) {
        if let Some(Ok(Region::Plain { windows, .. })) = base.map(|b| self.regions.get_mut(b)) {
            *windows -= 1;
        }
    }
}
