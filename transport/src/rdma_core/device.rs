//! Implementations of the verbs traits. Posting and polling are implemented in `work`.

use std::ffi::CStr;
use std::net::{IpAddr, SocketAddr};
use std::ptr;
use std::time::Duration;

use riser_memory::MemSlice;
use riser_rdma_core_sys::bindings::*;
use riser_rdma_core_sys::ops;

use super::context::{RdmaCoreDevice, transport_type};
use super::convert::{self, checked, checked_cm, last_os_error, last_refusal, refused};
use super::objects::{Ah, Srq, Times, Xrcd, pack};
use crate::forward::forward;
use crate::verbs::*;

/// Vendor and part id of `rdma_rxe`, which doesn't report to user space which key was invalidated
/// by a receive. Our own libraries (`riser-rdma-compat`) use the same vendor id with a different part
/// id.
const RXE: (u32, u32) = (0x00ff_ffff, 0);

/// General on-demand paging capability bit.
const ODP_SUPPORT: u64 = 1;

/// Max number of scatter-gather entries per request, even if the device supports more.
const MAX_SGE: i32 = 32;

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
        let max_sge = count(d.max_sge.min(MAX_SGE));
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
            // See the module documentation.
            integrity: None,
            max_cq: count(d.max_cq),
            max_cqe: count(d.max_cqe),
            // SAFETY: the context is open.
            comp_vectors: count(unsafe { (*self.context).num_comp_vectors }),
            max_qp: count(d.max_qp),
            max_qp_wr: count(d.max_qp_wr),
            max_sge,
            // Some drivers don't set this.
            max_sge_rd: match count(d.max_sge_rd) {
                0 => max_sge,
                most => most.min(max_sge),
            },
            registered_reads: transport_type(self) == IBV_TRANSPORT_IWARP,
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
            active_mtu: convert::mtu(theirs.active_mtu).unwrap_or(Mtu::Mtu1024),
            max_msg_size: theirs.max_msg_sz,
            gid_table_len: u16::try_from(theirs.gid_tbl_len).unwrap_or(0),
            pkey_table_len: theirs.pkey_tbl_len,
            capabilities: PortCapabilities::from_bits_retain(theirs.port_cap_flags),
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

    forward! {
        device regions;
        mut alloc_pd [alloc_pd] () -> Result<PdId, VerbsError>;
        mut dealloc_pd [dealloc_pd] (pd: PdId) -> Result<(), VerbsError>;
        mut reg_mr [reg_mr] (pd: PdId, range: &MemSlice, access: Access) -> Result<Mr, VerbsError>;
        mut reg_mr_iova [reg_mr_iova] (pd: PdId, range: &MemSlice, iova: u64, access: Access) -> Result<Mr, VerbsError>;
        mut rereg_mr [rereg_mr] (mr: MrId, change: &MrChange<'_>) -> Result<Mr, VerbsError>;
        mut alloc_null_mr [alloc_null_mr] (pd: PdId) -> Result<Mr, VerbsError>;
        mut advise_mr [advise_mr] (pd: PdId, advice: MrAdvice, sges: &[Sge]) -> Result<(), VerbsError>;
        mut alloc_mw [alloc_mw] (pd: PdId, mw_type: MwType) -> Result<Mw, VerbsError>;
        ref query_mw [query_mw] (mw: MwId) -> Result<MwAttr, VerbsError>;
        mut dealloc_mw [dealloc_mw] (mw: MwId) -> Result<(), VerbsError>;
        ref query_mr [query_mr] (mr: MrId) -> Result<MrAttr, VerbsError>;
        mut dereg_mr [dereg_mr] (mr: MrId) -> Result<(), VerbsError>;
        mut map_mr_sg [map_mr_sg] (mr: MrId, segments: &[MemSlice]) -> Result<u64, VerbsError>;
    }

    fn alloc_fast_mr(&mut self, pd: PdId, max_segments: u32) -> Result<Mr, VerbsError> {
        let most = self.attr.max_fast_reg_segments;
        self.regions.alloc_fast_mr(pd, max_segments, most)
    }

    forward! {
        device cqs;
        ref query_cq [query] (cq: CqId) -> Result<CqAttr, VerbsError>;
        mut modify_cq [modify] (cq: CqId, moderation: Moderation) -> Result<(), VerbsError>;
        mut destroy_cq [destroy] (cq: CqId) -> Result<(), VerbsError>;
        ref peek_cq [peek] (cq: CqId, max: usize) -> Result<usize, VerbsError>;
        mut req_notify_cq [request_notice] (cq: CqId, notify: Notify) -> Result<bool, VerbsError>;
        mut poll_cq_event [notices.take_fired] () -> Option<CqId>;
    }

    fn create_cq_with(&mut self, init: &CqInitAttr) -> Result<CqId, VerbsError> {
        self.cqs.create(init, self.attr.max_cqe)
    }

    fn resize_cq(&mut self, cq: CqId, entries: u32) -> Result<(), VerbsError> {
        self.cqs.resize(cq, entries, self.attr.max_cqe)
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
        if self.cqs.table.get(cq)?.times.is_none() {
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

    fn create_srq(&mut self, pd: PdId, attr: SrqAttr) -> Result<SrqId, VerbsError> {
        let domain = self.regions.pd_ptr(pd)?;
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
        self.regions.use_pd(pd);
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
        self.regions.release_pd(gone.pd);
        if let Some((xrcd, cq)) = gone.xrc {
            if let Ok(xrcd) = self.xrcds.get_mut(xrcd) {
                xrcd.users -= 1;
            }
            self.cqs.change_users(cq, -1);
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
            pd: self.regions.pd_ptr(pd)?,
            xrcd: self.xrcds.get(xrcd)?.ptr,
            cq: self.cqs.ptr(cq)?,
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
        self.regions.use_pd(pd);
        self.xrcds.get_mut(xrcd)?.users += 1;
        self.cqs.change_users(cq, 1);
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
            self.choose_gid(&mut theirs.ah_attr)?;
        }
        let modify = self.core.verbs.ibv_modify_qp;
        // SAFETY: the QP is alive.
        checked(unsafe { modify(entry.ptr, &raw mut theirs, mask as i32) })?;
        if attr.state == Some(QpState::Reset) {
            self.qps.get_mut(qp)?.rate = RateLimit::default();
            self.release_requests(qp);
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
            Some(owner) => self.connections.destroy_qp(owner),
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
        let ptr = self.make_ah(pd, &attr)?;
        let id = self.ahs.insert(Ah { ptr, pd, attr })?;
        self.regions.use_pd(pd);
        Ok(id)
    }

    fn query_ah(&self, ah: AhId) -> Result<AhAttr, VerbsError> {
        Ok(self.ahs.get(ah)?.attr)
    }

    fn modify_ah(&mut self, ah: AhId, attr: AhAttr) -> Result<(), VerbsError> {
        // The library can't modify an address handle, so we need to replace it.
        let pd = self.ahs.get(ah)?.pd;
        let ptr = self.make_ah(pd, &attr)?;
        let before = std::mem::replace(self.ahs.get_mut(ah)?, Ah { ptr, pd, attr });
        // SAFETY: it has been replaced in the table.
        checked(unsafe { (self.core.verbs.ibv_destroy_ah)(before.ptr) })
    }

    fn destroy_ah(&mut self, ah: AhId) -> Result<(), VerbsError> {
        let ptr = self.ahs.get(ah)?.ptr;
        // SAFETY: the handle will be removed from the table, and there are no other references to
        // it.
        checked(unsafe { (self.core.verbs.ibv_destroy_ah)(ptr) })?;
        let pd = self.ahs.remove(ah)?.pd;
        self.regions.release_pd(pd);
        Ok(())
    }
}

impl RdmaCm for RdmaCoreDevice {
    forward! {
        device connections;
        mut create_id_for [create_id_for] (space: PortSpace, qp_type: QpType) -> Result<CmId, CmError>;
        mut set_option [set_option] (id: CmId, option: CmOption) -> Result<(), CmError>;
        mut bind_addr [bind_addr] (id: CmId, addr: SocketAddr) -> Result<(), CmError>;
        mut resolve_addr [resolve_addr] (id: CmId, src: Option<SocketAddr>, dst: SocketAddr, timeout: Duration) -> Result<(), CmError>;
        mut resolve_route [resolve_route] (id: CmId, timeout: Duration) -> Result<(), CmError>;
        mut listen [listen] (id: CmId, backlog: u32) -> Result<(), CmError>;
        mut connect [connect] (id: CmId, param: &ConnParam) -> Result<(), CmError>;
        mut accept [accept] (id: CmId, param: &ConnParam) -> Result<(), CmError>;
        ref init_qp_attr [init_qp_attr] (id: CmId, state: QpState) -> Result<QpAttr, CmError>;
        mut establish [establish] (id: CmId) -> Result<(), CmError>;
        mut reject [reject] (id: CmId, private_data: &[u8]) -> Result<(), CmError>;
        mut reject_ece [reject_ece] (id: CmId, private_data: &[u8]) -> Result<(), CmError>;
        mut mra [mra] (id: CmId) -> Result<(), CmError>;
        mut load_alternate_path [load_alternate_path] (id: CmId, path: &AltPath) -> Result<(), CmError>;
        mut notify_established [notify_established] (id: CmId) -> Result<(), CmError>;
        mut disconnect [disconnect] (id: CmId) -> Result<(), CmError>;
        mut join_multicast [join_multicast] (id: CmId, group: IpAddr, send_only: bool) -> Result<(), CmError>;
        mut leave_multicast [leave_multicast] (id: CmId, group: IpAddr) -> Result<(), CmError>;
        mut destroy_id [destroy_id] (id: CmId) -> Result<(), CmError>;
        ref local_addr [local_addr] (id: CmId) -> Option<SocketAddr>;
        ref peer_addr [peer_addr] (id: CmId) -> Option<SocketAddr>;
        mut poll_cm_event [poll_event] () -> Option<CmEvent>;
    }

    fn create_cm_qp(&mut self, id: CmId, init: &QpInitAttr) -> Result<QpId, CmError> {
        let ptr = self.connections.id_for_qp(id, init)?;
        let mut theirs = self.qp_init(init)?;
        // SAFETY: the id, domains and queues are alive and use the same context, which is the
        // context of this device.
        checked_cm(unsafe { (self.core.cm.rdma_create_qp_ex)(ptr, &raw mut theirs) })?;
        // SAFETY: the QP has just been set by the call.
        let qp = self.adopt_qp(unsafe { (*ptr).qp }, init, Some(id))?;
        self.connections.set_qp(id, qp, self.qp_num(qp)?)?;
        Ok(qp)
    }
}

impl RdmaCoreDevice {
    /// Selects the GID of the address used to open the device, since a device can have many GIDs.
    /// If the address was removed from a RoCE device, any other GID would send from a different
    /// address. The GIDs of InfiniBand and iWARP ports don't depend on their IP addresses.
    fn choose_gid(&self, attr: &mut ibv_ah_attr) -> Result<(), VerbsError> {
        match self.gid_index() {
            Some(index) => attr.grh.sgid_index = index,
            None if self.is_roce() => return Err(VerbsError::InvalidParameter("sgid_index")),
            None => {}
        }
        Ok(())
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

    /// Creates an address handle in the library.
    fn make_ah(&self, pd: PdId, attr: &AhAttr) -> Result<*mut ibv_ah, VerbsError> {
        let domain = self.regions.pd_ptr(pd)?;
        let mut theirs = convert::ah_attr(attr);
        self.choose_gid(&mut theirs)?;
        // SAFETY: the domain is alive.
        let ptr = unsafe { (self.core.verbs.ibv_create_ah)(domain, &raw mut theirs) };
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
}

#[cfg(test)]
mod tests {
    use super::super::fake::library;
    use super::*;

    #[test]
    fn missing_address_rejects_address_handle() {
        let mut device = RdmaCoreDevice::fake();
        let pd = device.alloc_pd().unwrap();
        let attr = AhAttr::new(Gid::from(IpAddr::from([10, 0, 0, 2])));
        let other = IpAddr::from([10, 0, 0, 3]);
        let mut create = |gids| {
            library(|library| library.gids = gids);
            let ah = device.create_ah(pd, attr)?;
            device.destroy_ah(ah)?;
            Ok(library(|library| library.sgid_index))
        };
        let missing = Err(VerbsError::InvalidParameter("sgid_index"));
        assert_eq!(create(vec![other, other]), missing);
        let mut table = vec![other; 255];
        table.push(IpAddr::from([127, 0, 0, 1]));
        assert_eq!(create(table.clone()), Ok(255));
        // The attribute has eight bits.
        table.insert(0, other);
        assert_eq!(create(table), missing);
        // The address of an IPoIB interface is not in the table.
        library(|library| library.link_layer = 1);
        assert_eq!(create(vec![other, other]), Ok(0));
    }

    /// The only GID of an iWARP port is its MAC address.
    #[test]
    fn iwarp_device_needs_no_gid() {
        let mut device = RdmaCoreDevice::fake();
        // SAFETY: the device is valid and only used by this thread.
        unsafe { (*(*device.context).device).transport_type = IBV_TRANSPORT_IWARP };
        library(|library| library.gids = vec![IpAddr::from([10, 0, 0, 3])]);
        let pd = device.alloc_pd().unwrap();
        let attr = AhAttr::new(Gid::from(IpAddr::from([10, 0, 0, 2])));
        device.create_ah(pd, attr).unwrap();
    }

    #[test]
    fn domain_with_address_handle_is_busy() {
        let mut device = RdmaCoreDevice::fake();
        let pd = device.alloc_pd().unwrap();
        let attr = AhAttr::new(Gid::from(IpAddr::from([10, 0, 0, 2])));
        let ah = device.create_ah(pd, attr).unwrap();
        let busy = Err(VerbsError::ResourceBusy("protection domain"));
        assert_eq!(device.dealloc_pd(pd), busy);
        device.modify_ah(ah, attr).unwrap();
        assert_eq!(device.dealloc_pd(pd), busy);
        device.destroy_ah(ah).unwrap();
        assert!(device.destroy_ah(ah).is_err());
        device.dealloc_pd(pd).unwrap();
    }

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
