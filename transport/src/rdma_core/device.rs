//! Verbs used to create, query and destroy objects. Posting and polling are implemented in `work`.

use std::ffi::CStr;
use std::ptr;
use std::time::Duration;

use riser_memory::MemSlice;
use riser_rdma_core_sys::bindings::*;
use riser_rdma_core_sys::ops;

use super::convert::{self, checked, last_os_error, last_refusal, refused};
use super::objects::{
    Ah, Cq, Pd, RdmaCoreDevice, Region, Srq, Times, UserWindow, Window, Xrcd, pack,
};
use crate::umem;
use crate::verbs::*;

/// Vendor and part id of `rdma_rxe`, which doesn't report to user space which key was invalidated
/// by a receive. Our own libraries (`riser-rdma-compat`) use the same vendor id with a different part
/// id.
const RXE: (u32, u32) = (0x00ff_ffff, 0);

/// Fields to read from completions with timestamps.
const TIMED: u64 = (IBV_WC_EX_WITH_BYTE_LEN
    | IBV_WC_EX_WITH_IMM
    | IBV_WC_EX_WITH_QP_NUM
    | IBV_WC_EX_WITH_SRC_QP
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK) as u64;

/// General on-demand paging capability bit.
const ODP_SUPPORT: u64 = 1;

/// Max number of scatter-gather entries per request, even if the device supports more.
const MAX_SGE: i32 = 32;

/// If a peer is allowed to modify memory, the device needs write access as well (IBTA 11.2.8.2).
fn check_rights(access: Access) -> Result<(), VerbsError> {
    let remote_change = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    if access.intersects(remote_change) && !access.contains(Access::LOCAL_WRITE) {
        let what = "remote write without local write";
        return Err(VerbsError::InvalidAccess(what));
    }
    Ok(())
}

impl RdmaCoreDevice {
    pub(super) fn query_device(&mut self) -> Result<DeviceAttr, VerbsError> {
        let mut d = ibv_device_attr::default();
        // SAFETY: the context is open.
        checked(unsafe { (self.core.verbs.ibv_query_device)(self.context, &raw mut d) })?;
        // If this call is not supported, these features are not supported by the device.
        let mut more = ibv_device_attr_ex::default();
        // SAFETY: the context is open.
        if unsafe { ops::ibv_query_device_ex(self.context, &raw mut more) } != 0 {
            more = ibv_device_attr_ex::default();
        }
        self.clock_khz = more.hca_core_clock;
        // SAFETY: an open context has a device, and its name is NUL-terminated.
        let name = unsafe {
            CStr::from_ptr((self.core.verbs.ibv_get_device_name)(
                (*self.context).device,
            ))
        };
        // Linux uses signed numbers here.
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
            on_demand: more.odp_caps.general_caps & ODP_SUPPORT != 0,
            // A window has a single segment. See the module documentation for how we emulate fast
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
            min_rate_kbps: more.packet_pacing_caps.qp_rate_limit_min,
            max_rate_kbps: more.packet_pacing_caps.qp_rate_limit_max,
            ports: d.phys_port_cnt,
            path_migration: d.device_cap_flags & IBV_DEVICE_AUTO_PATH_MIG != 0,
        })
    }

    pub(super) fn pd_ptr(&self, pd: PdId) -> Result<*mut ibv_pd, VerbsError> {
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
        // SAFETY: it is not in use, and will be removed from the table.
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
        check_rights(access)?;
        if addr.checked_add(range.len() as u64).is_none()
            || (addr != 0 && access.contains(Access::ZERO_BASED))
        {
            return Err(VerbsError::InvalidParameter("address of the region"));
        }
        let domain = self.pd_ptr(pd)?;
        // Check this before creating an object in the library which we would have to destroy again.
        self.regions.check_room()?;
        // Windows must be allowed in any region, because they are used to implement fast
        // registration.
        let flags = (convert::access_flags(access) | IBV_ACCESS_MW_BIND) as i32;
        // SAFETY: the range is mapped, and the table entry keeps it mapped until it is
        // deregistered.
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
        // SAFETY: the region has just been created.
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
            return Err(VerbsError::InvalidState("region is not registered"));
        };
        if *windows > 0 {
            return Err(VerbsError::ResourceBusy("memory region"));
        }
        let (ptr, old_pd) = (*ptr, *old_pd);
        let (pd, access) = (
            change.pd.unwrap_or(old_pd),
            change.access.unwrap_or(*old_access),
        );
        check_rights(access)?;
        let (memory, addr) = match change.translation {
            // The library requires that the region uses the same address as the memory.
            Some((range, iova)) if iova != range.addr() => {
                return Err(VerbsError::Unsupported("changing the address of a region"));
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
        if flags == 0 {
            return Err(VerbsError::InvalidParameter("change"));
        }
        let rights = (convert::access_flags(access) | IBV_ACCESS_MW_BIND) as i32;
        let domain = self.pd_ptr(pd)?;
        // SAFETY: the region and the domain are alive, and the memory is mapped while the slice is
        // in the table.
        let r = unsafe {
            let start = memory.ptr().cast();
            (self.core.verbs.ibv_rereg_mr)(ptr, flags as i32, domain, start, memory.len(), rights)
        };
        if r != 0 {
            return Err(last_os_error());
        }
        // SAFETY: the region is alive. The library may have changed its keys.
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

    fn alloc_null_mr(&mut self, pd: PdId) -> Result<Mr, VerbsError> {
        let domain = self.pd_ptr(pd)?;
        self.regions.check_room()?;
        // SAFETY: the domain is alive.
        let ptr = unsafe { ops::ibv_alloc_null_mr(domain) };
        if ptr.is_null() {
            return Err(last_refusal("null regions"));
        }
        // SAFETY: the region has just been created.
        let (lkey, rkey) = unsafe { ((*ptr).lkey, (*ptr).rkey) };
        let mut mr = Mr {
            id: MrId(Handle::new(0, 0)),
            lkey: LKey(lkey),
            rkey: RKey(rkey),
            addr: 0,
            length: u64::MAX,
        };
        mr.id = self.regions.insert(Region::Null { pd, ptr, mr })?;
        if let Ok(Region::Null { mr: entry, .. }) = self.regions.get_mut(mr.id) {
            *entry = mr;
        }
        self.use_pd(pd);
        Ok(mr)
    }

    fn advise_mr(&mut self, pd: PdId, advice: MrAdvice, sges: &[Sge]) -> Result<(), VerbsError> {
        let domain = self.pd_ptr(pd)?;
        if sges.is_empty() {
            return Ok(());
        }
        let count = u32::try_from(sges.len());
        let count = count.map_err(|_| VerbsError::InvalidParameter("scatter list"))?;
        let advice = match advice {
            MrAdvice::Prefetch => IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH,
            MrAdvice::PrefetchWrite => IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE,
        };
        let theirs = sges.iter().map(|sge| ibv_sge {
            addr: sge.addr,
            length: sge.length,
            lkey: sge.lkey.0,
        });
        let mut theirs: Vec<_> = theirs.collect();
        let (flags, list) = (IB_UVERBS_ADVISE_MR_FLAG_FLUSH, theirs.as_mut_ptr());
        // SAFETY: the domain is alive, and the list contains this number of entries.
        let r = unsafe { ops::ibv_advise_mr(domain, advice, flags, list, count) };
        // Errors documented in ibv_advise_mr(3).
        match r.abs() {
            0 => Ok(()),
            libc::ENOENT => Err(VerbsError::InvalidHandle("memory region")),
            libc::EPERM => Err(VerbsError::InvalidAccess("prefetching")),
            libc::EFAULT => Err(VerbsError::InvalidParameter("range of a region")),
            libc::EINVAL => Err(VerbsError::InvalidParameter("advice")),
            other => Err(refused(other, "prefetching")),
        }
    }

    fn alloc_mw(&mut self, pd: PdId, mw_type: MwType) -> Result<Mw, VerbsError> {
        self.mws.check_room()?;
        let (theirs, what) = match mw_type {
            MwType::Type1 => (IBV_MW_TYPE_1, "memory windows of type 1"),
            MwType::Type2 => (IBV_MW_TYPE_2, "memory windows of type 2"),
        };
        // SAFETY: the domain is alive.
        let ptr = unsafe { ops::ibv_alloc_mw(self.pd_ptr(pd)?, theirs) };
        if ptr.is_null() {
            return Err(last_refusal(what));
        }
        let id = self.mws.insert(UserWindow { pd, ptr, mw_type })?;
        self.use_pd(pd);
        Ok(Mw {
            id,
            // SAFETY: the window has just been created.
            rkey: RKey(unsafe { (*ptr).rkey }),
            mw_type,
        })
    }

    fn dealloc_mw(&mut self, mw: MwId) -> Result<(), VerbsError> {
        let ptr = self.mws.get(mw)?.ptr;
        // SAFETY: the window will be removed from the table, and there are no other references to
        // it.
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
            Region::Null { pd, mr, .. } => MrAttr {
                pd: *pd,
                mr: *mr,
                access: Access::LOCAL_WRITE,
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
        // A region cannot be deregistered while windows are mapped to it.
        let pd = match self.regions.get(mr)? {
            Region::Plain { windows: 1.., .. } => {
                return Err(VerbsError::ResourceBusy("memory region"));
            }
            Region::Plain { pd, ptr, .. } | Region::Null { pd, ptr, .. } => {
                // SAFETY: the region will be removed from the table, and there are no other
                // references to it.
                checked(unsafe { (self.core.verbs.ibv_dereg_mr)(*ptr) })?;
                *pd
            }
            Region::Window(w) => {
                // SAFETY: same as above.
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
        // SAFETY: the window has just been created.
        let rkey = unsafe { (*ptr).rkey };
        let mr = |id| Mr {
            id,
            lkey: LKey(0),
            rkey: RKey(rkey),
            addr: 0,
            length: 0,
        };
        // The entry contains its own handle, which is not known until we insert it into the table.
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
        // Only use the first range, since that is all a window supports. The caller is told how
        // many bytes are covered.
        let (start, end) = (segment.addr(), segment.addr() + segment.len() as u64);
        // A window must be bound to a single region, so the segment must be inside a region of the
        // same domain.
        let covers = |r: &Region| match r {
            Region::Plain { pd: p, memory, .. } => {
                *p == pd && memory.addr() <= start && end <= memory.addr() + memory.len() as u64
            }
            Region::Null { .. } | Region::Window(_) => false,
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
            return Err(VerbsError::InvalidState("region is still valid"));
        }
        // The window now uses a new region, so its old region can be deregistered.
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
        if entries == 0 || entries > self.attr.max_cqe {
            return Err(VerbsError::InvalidParameter("number of entries"));
        }
        // Insert it first, because we need to pass the handle to the library.
        let id = self.cqs.insert(Cq::new(init.vector, init.is_timed))?;
        let cq_context = pack(id.0) as usize as *mut _;
        let ptr = if init.is_timed {
            let mut extended = ibv_cq_init_attr_ex {
                cqe: entries,
                cq_context,
                channel: self.comp,
                comp_vector: init.vector,
                wc_flags: TIMED,
                ..Default::default()
            };
            // SAFETY: the context and the channel are open. The handle is passed as an integer.
            unsafe { ops::ibv_create_cq_ex(self.context, &raw mut extended) }.cast()
        } else {
            let create = self.core.verbs.ibv_create_cq;
            let entries = i32::try_from(entries).unwrap_or(i32::MAX);
            // SAFETY: same as above.
            unsafe { create(self.context, entries, cq_context, self.comp, vector) }
        };
        if ptr.is_null() {
            let error = last_refusal("times of completions");
            self.cqs.remove(id)?;
            return Err(error);
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
            is_timed: entry.times.is_some(),
            moderation: entry.moderation,
        })
    }

    fn modify_cq(&mut self, cq: CqId, moderation: Moderation) -> Result<(), VerbsError> {
        // The library uses a 16-bit value. It is fine to use a shorter time than requested.
        let period = moderation.period.as_nanos().div_ceil(1000);
        let period = u16::try_from(period).unwrap_or(u16::MAX);
        let mut attr = ibv_modify_cq_attr {
            attr_mask: IBV_CQ_ATTR_MODERATE,
            moderate: ibv_moderate_cq {
                cq_count: moderation.count,
                cq_period: period,
            },
        };
        let entry = self.cqs.get_mut(cq)?;
        // SAFETY: the queue is alive.
        match unsafe { ops::ibv_modify_cq(entry.ptr, &raw mut attr) }.abs() {
            0 => {}
            // There is nothing to reset.
            libc::EOPNOTSUPP if period == 0 => {}
            libc::EOPNOTSUPP => return Err(VerbsError::InvalidParameter("moderation")),
            other => return Err(VerbsError::Os(other)),
        }
        entry.moderation = Moderation {
            count: moderation.count,
            period: Duration::from_micros(period.into()),
        };
        if period != 0 {
            self.stop_watching(cq);
        }
        Ok(())
    }

    fn resize_cq(&mut self, cq: CqId, entries: u32) -> Result<(), VerbsError> {
        // This includes completions which we have already removed from the queue of the library.
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
        // SAFETY: it is not in use, all events have been acknowledged, and it will be removed from
        // the table.
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
        self.poll(cq, max, |_, completion, _| out.push(completion))
    }

    fn poll_cq_timed(
        &mut self,
        cq: CqId,
        max: usize,
        out: &mut Vec<TimedCompletion>,
    ) -> Result<usize, VerbsError> {
        if self.cqs.get(cq)?.times.is_none() {
            return Err(VerbsError::InvalidParameter("queue without times"));
        }
        self.poll(cq, max, |device, completion, times| {
            out.push(TimedCompletion {
                completion,
                device_time: device.nanoseconds(times),
                wall_time: Duration::from_nanos(times.wall),
            });
        })
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
            xrc: None,
            users: 0,
            posted: Vec::new(),
        })?;
        let mut init = ibv_srq_init_attr {
            srq_context: pack(id.0) as usize as *mut _,
            attr: ibv_srq_attr {
                max_wr: attr.max_wr,
                max_sge: attr.max_sge,
                // The library ignores the limit here, so we set it below.
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
        self.set_first_limit(id, attr.limit)
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
        // SAFETY: it is not in use, and will be removed from the table.
        checked(unsafe { (self.core.verbs.ibv_destroy_srq)(entry.ptr) })?;
        let gone = self.srqs.remove(srq)?;
        // Receives of a destroyed shared queue don't complete, so we need to release their slots
        // here.
        for slot in gone.posted {
            let _ = self.slots.remove(slot);
        }
        self.release_pd(gone.pd);
        if let Some((xrcd, cq)) = gone.xrc {
            if let Ok(xrcd) = self.xrcds.get_mut(xrcd) {
                xrcd.users -= 1;
            }
            if let Ok(cq) = self.cqs.get_mut(cq) {
                cq.users -= 1;
            }
        }
        Ok(())
    }

    fn post_srq_recv(&mut self, srq: SrqId, wrs: &[RecvWr<'_>]) -> Result<(), PostError> {
        self.post_shared(srq, wrs)
    }

    fn open_xrcd(&mut self) -> Result<XrcdId, VerbsError> {
        self.xrcds.check_room()?;
        // It is only used by this process, so there is no file.
        let mut attr = ibv_xrcd_init_attr {
            comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
            fd: -1,
            oflags: libc::O_CREAT,
        };
        // SAFETY: the context is open.
        let ptr = unsafe { ops::ibv_open_xrcd(self.context, &raw mut attr) };
        if ptr.is_null() {
            return Err(last_refusal("XRC domains"));
        }
        self.xrcds.insert(Xrcd { ptr, users: 0 })
    }

    fn close_xrcd(&mut self, xrcd: XrcdId) -> Result<(), VerbsError> {
        let entry = self.xrcds.get(xrcd)?;
        if entry.users > 0 {
            return Err(VerbsError::ResourceBusy("XRC domain"));
        }
        // SAFETY: it is not in use, and will be removed from the table.
        checked(unsafe { ops::ibv_close_xrcd(entry.ptr) })?;
        self.xrcds.remove(xrcd).map(drop)
    }

    fn create_xrc_srq(
        &mut self,
        pd: PdId,
        xrcd: XrcdId,
        cq: CqId,
        attr: SrqAttr,
    ) -> Result<SrqId, VerbsError> {
        let mut init = ibv_srq_init_attr_ex {
            attr: ibv_srq_attr {
                max_wr: attr.max_wr,
                max_sge: attr.max_sge,
                // Like for any SRQ, the limit is set below.
                srq_limit: 0,
            },
            comp_mask: IBV_SRQ_INIT_ATTR_TYPE
                | IBV_SRQ_INIT_ATTR_PD
                | IBV_SRQ_INIT_ATTR_XRCD
                | IBV_SRQ_INIT_ATTR_CQ,
            srq_type: IBV_SRQT_XRC,
            pd: self.pd_ptr(pd)?,
            xrcd: self.xrcds.get(xrcd)?.ptr,
            cq: self.cqs.get(cq)?.ptr,
            ..Default::default()
        };
        let id = self.srqs.insert(Srq {
            ptr: ptr::null_mut(),
            pd,
            xrc: Some((xrcd, cq)),
            users: 0,
            posted: Vec::new(),
        })?;
        init.srq_context = pack(id.0) as usize as *mut _;
        // SAFETY: the domains and the CQ are valid and use this context.
        let ptr = unsafe { ops::ibv_create_srq_ex(self.context, &raw mut init) };
        if ptr.is_null() {
            let error = last_refusal("XRC domains");
            self.srqs.remove(id)?;
            return Err(error);
        }
        self.srqs.get_mut(id)?.ptr = ptr;
        self.use_pd(pd);
        self.xrcds.get_mut(xrcd)?.users += 1;
        self.cqs.get_mut(cq)?.users += 1;
        self.set_first_limit(id, attr.limit)
    }

    fn srq_num(&self, srq: SrqId) -> Result<u32, VerbsError> {
        let entry = self.srqs.get(srq)?;
        if entry.xrc.is_none() {
            return Err(VerbsError::InvalidParameter("shared receive queue"));
        }
        let mut number = 0;
        // SAFETY: the queue is alive.
        checked(unsafe { ops::ibv_get_srq_num(entry.ptr, &raw mut number) })?;
        Ok(number)
    }

    fn create_qp(&mut self, init: &QpInitAttr) -> Result<QpId, VerbsError> {
        let mut theirs = self.qp_init(init)?;
        let (verbs, attr) = (&self.core.verbs, &raw mut theirs);
        // SAFETY: the domains and queues are alive and use this context. As in ibv_create_qp_ex(3),
        // we use the old call if nothing but the protection domain is set.
        let ptr = unsafe {
            match theirs.comp_mask {
                IBV_QP_INIT_ATTR_PD => (verbs.ibv_create_qp)(theirs.pd, attr.cast()),
                _ => ops::ibv_create_qp_ex(self.context, attr),
            }
        };
        if ptr.is_null() {
            Err(last_refusal("queue pairs of this kind"))
        } else {
            self.adopt_qp(ptr, init, None)
        }
    }

    fn qp_num(&self, qp: QpId) -> Result<u32, VerbsError> {
        Ok(self.qps.get(qp)?.qpn)
    }

    fn modify_qp(&mut self, qp: QpId, attr: &QpAttr) -> Result<(), VerbsError> {
        let entry = self.qps.get(qp)?;
        // Get the state from the device, because it could have changed to ERROR.
        let now = self.query_qp(qp)?.state.unwrap_or(QpState::Error);
        crate::verbs::qp_state::plan_modify(entry.init.qp_type, now, attr)?;
        // If a value does not fit, it would be truncated to a different value.
        for (value, name) in [
            (attr.dest_qp, "dest_qp"),
            (attr.rq_psn, "rq_psn"),
            (attr.sq_psn, "sq_psn"),
        ] {
            if value.is_some_and(|v| v > 0x00ff_ffff) {
                return Err(VerbsError::InvalidParameter(name));
            }
        }
        if attr.alt_path.is_some_and(|path| path.ah.sgid_index > 0xff) {
            return Err(VerbsError::InvalidParameter("sgid_index"));
        }
        let (mut theirs, mask) = convert::qp_attr(attr);
        if attr.ah.is_some() {
            self.choose_gid(&mut theirs.ah_attr);
        }
        let modify = self.core.verbs.ibv_modify_qp;
        // SAFETY: the QP is alive.
        checked(unsafe { modify(entry.ptr, &raw mut theirs, mask as i32) })?;
        if attr.state == Some(QpState::Reset) {
            self.qps.get_mut(qp)?.rate = RateLimit::default();
        }
        Ok(())
    }

    fn query_qp(&self, qp: QpId) -> Result<QpAttr, VerbsError> {
        let (mut attr, mut init) = (ibv_qp_attr::default(), ibv_qp_init_attr::default());
        let mask = (IBV_QP_RATE_LIMIT - 1) as i32;
        let ptr = self.qps.get(qp)?.ptr;
        // SAFETY: the QP is alive.
        checked(unsafe {
            (self.core.verbs.ibv_query_qp)(ptr, &raw mut attr, mask & 0x1f_ffff, &raw mut init)
        })?;
        if attr.qp_state == IBV_QPS_RESET {
            // Some devices still report attributes that have been cleared by the reset.
            return Ok(QpAttr::to(QpState::Reset));
        }
        let pkey = self.query_pkey(attr.port_num, attr.pkey_index).ok();
        Ok(QpAttr {
            pkey,
            ..convert::qp_attr_of(&attr, self.qps.get(qp)?.init.qp_type)
        })
    }

    fn modify_qp_rate_limit(&mut self, qp: QpId, limit: RateLimit) -> Result<(), VerbsError> {
        let entry = self.qps.get_mut(qp)?;
        let mut attr = ibv_qp_rate_limit_attr {
            rate_limit: limit.rate_kbps,
            max_burst_sz: limit.max_burst,
            ..Default::default()
        };
        // SAFETY: the QP is alive.
        match unsafe { ops::ibv_modify_qp_rate_limit(entry.ptr, &raw mut attr) }.abs() {
            0 => entry.rate = limit,
            libc::EINVAL => return Err(VerbsError::InvalidParameter("rate limit")),
            other => return Err(refused(other, "rate limits")),
        }
        Ok(())
    }

    /// There is no library call for this, so return the last value that was set.
    fn query_qp_rate_limit(&self, qp: QpId) -> Result<RateLimit, VerbsError> {
        Ok(self.qps.get(qp)?.rate)
    }

    fn destroy_qp(&mut self, qp: QpId) -> Result<(), VerbsError> {
        let entry = self.qps.get(qp)?;
        self.leave_groups(entry);
        let entry = self.qps.get_mut(qp)?;
        entry.groups.clear();
        match entry.owner {
            Some(owner) => self.destroy_owned_qp(owner),
            // SAFETY: the QP will be removed from the table below.
            None => checked(unsafe { (self.core.verbs.ibv_destroy_qp)(entry.ptr) })?,
        }
        self.forget_qp(qp);
        Ok(())
    }

    fn attach_mcast(&mut self, qp: QpId, mgid: Gid, mlid: u16) -> Result<(), VerbsError> {
        let ptr = self.check_mcast(qp, mgid)?;
        let gid = ibv_gid { raw: mgid.0 };
        // SAFETY: the QP is alive, and the library makes a copy of the GID.
        checked(unsafe { (self.core.verbs.ibv_attach_mcast)(ptr, &raw const gid, mlid) })?;
        let groups = &mut self.qps.get_mut(qp)?.groups;
        if !groups.contains(&(mgid, mlid)) {
            groups.push((mgid, mlid));
        }
        Ok(())
    }

    fn detach_mcast(&mut self, qp: QpId, mgid: Gid, mlid: u16) -> Result<(), VerbsError> {
        let ptr = self.check_mcast(qp, mgid)?;
        let gid = ibv_gid { raw: mgid.0 };
        // SAFETY: same as above.
        let r = unsafe { (self.core.verbs.ibv_detach_mcast)(ptr, &raw const gid, mlid) };
        match r.abs() {
            libc::EINVAL => return Err(VerbsError::InvalidParameter("multicast group")),
            _ => checked(r)?,
        }
        let groups = &mut self.qps.get_mut(qp)?.groups;
        groups.retain(|group| *group != (mgid, mlid));
        Ok(())
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
        // The library can't modify an address handle, so we need to replace it.
        let before = self.ahs.get(ah)?.ptr;
        // SAFETY: the handle is alive, and so is its domain.
        let ptr = self.make_ah(unsafe { (*before).pd }, &attr)?;
        *self.ahs.get_mut(ah)? = Ah { ptr, attr };
        // SAFETY: it has been replaced in the table.
        checked(unsafe { (self.core.verbs.ibv_destroy_ah)(before) })
    }

    fn destroy_ah(&mut self, ah: AhId) -> Result<(), VerbsError> {
        let ptr = self.ahs.remove(ah)?.ptr;
        // SAFETY: the handle has just been removed from the table.
        checked(unsafe { (self.core.verbs.ibv_destroy_ah)(ptr) })
    }
}

impl RdmaCoreDevice {
    /// Selects the GID of the address used to open the device, since a device can have many GIDs.
    fn choose_gid(&self, attr: &mut ibv_ah_attr) {
        if let Some(index) = self.gid_index() {
            attr.grh.sgid_index = index as u8;
        }
    }

    /// Returns the QP for use by the library, if it can be attached to a group.
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

    /// Creates an address handle. The domain must be valid.
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

    /// Arms the limit event of a new SRQ, since the library ignores the limit when creating the
    /// queue.
    fn set_first_limit(&mut self, srq: SrqId, limit: u32) -> Result<SrqId, VerbsError> {
        if limit > 0
            && let Err(e) = self.modify_srq(srq, None, Some(limit))
        {
            // Don't leak an object if the caller doesn't get its handle.
            let _ = self.destroy_srq(srq);
            return Err(e);
        }
        Ok(srq)
    }

    /// Converts a timestamp to nanoseconds of the device clock. If the clock frequency is unknown,
    /// we return clock ticks.
    fn nanoseconds(&self, times: Times) -> u64 {
        match self.clock_khz {
            0 => times.ticks,
            khz => (u128::from(times.ticks) * 1_000_000 / u128::from(khz)) as u64,
        }
    }

    /// Called when a window is no longer mapped to a region.
    fn unmap_window(&mut self, base: Option<MrId>) {
        if let Some(Ok(Region::Plain { windows, .. })) = base.map(|b| self.regions.get_mut(b)) {
            *windows -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Some calls are only available in a library with the new function table, or depend on the
    /// driver.
    #[test]
    fn missing_calls_are_reported_by_name() {
        let mut device = RdmaCoreDevice::fake();
        let (cq, qp) = device.fake_queues();
        let pd = device.alloc_pd().unwrap();
        let sge = Sge {
            addr: 0,
            length: 1,
            lkey: LKey(1),
        };
        let timed = CqInitAttr {
            is_timed: true,
            ..CqInitAttr::new(4)
        };
        let mut quiet = QpInitAttr::new(pd, cq, QpType::Ud, QpCap::new(1, 1));
        quiet.block_self_mcast = true;
        let refusals = [
            device.open_xrcd().map(drop),
            device.alloc_null_mr(pd).map(drop),
            device.advise_mr(pd, MrAdvice::Prefetch, &[sge]),
            device.alloc_mw(pd, MwType::Type1).map(drop),
            device.alloc_mw(pd, MwType::Type2).map(drop),
            device.create_cq_with(&timed).map(drop),
            device.create_qp(&quiet).map(drop),
            device.modify_qp_rate_limit(qp, RateLimit::default()),
        ];
        for refusal in refusals {
            assert!(
                matches!(refusal, Err(VerbsError::Unsupported(_))),
                "{refusal:?}"
            );
        }
        let moderation = Moderation {
            count: 1,
            period: Duration::from_micros(1),
        };
        let refusal = device.modify_cq(cq, moderation);
        assert!(matches!(refusal, Err(VerbsError::InvalidParameter(_))));
        device.modify_cq(cq, Moderation::default()).unwrap();
        // No object must be leaked.
        device.dealloc_pd(pd).unwrap();
        assert!(device.srqs.len() + device.xrcds.len() + device.regions.len() == 0);
    }
}
