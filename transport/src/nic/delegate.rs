//! Implementations of the verbs traits for a [`Nic`](super::Nic), and for types that contain a NIC
//! or a [`Device`](super::Device).

/// Forwards all methods of [`Verbs`](crate::verbs::Verbs), except for management datagrams and
/// methods that may also involve the connection manager or the wire. See [`forward`](crate::forward::forward).
macro_rules! forward_verbs {
    ($mode:ident $field:ident) => {
        $crate::forward::forward! {
            $mode $field;
            ref device_attr [device_attr] () -> &$crate::verbs::DeviceAttr;
            @live ref query_port [query_port] (port: u8) -> Result<$crate::verbs::PortAttr, $crate::verbs::VerbsError>;
            @live mut modify_port [port.modify] (port: u8, set: $crate::verbs::PortCapabilities, clear: $crate::verbs::PortCapabilities) -> Result<(), $crate::verbs::VerbsError>;
            @live ref query_gid [port.query_gid] (port: u8, index: u16) -> Result<$crate::verbs::Gid, $crate::verbs::VerbsError>;
            @live ref query_pkey [port.query_pkey] (port: u8, index: u16) -> Result<$crate::verbs::PKey, $crate::verbs::VerbsError>;
            mut poll_async_event [events.poll] () -> Option<$crate::verbs::AsyncEvent>;
            @live mut alloc_pd [memory.alloc_pd] () -> Result<$crate::verbs::PdId, $crate::verbs::VerbsError>;
            mut dealloc_pd [memory.dealloc_pd] (pd: $crate::verbs::PdId) -> Result<(), $crate::verbs::VerbsError>;
            @live mut reg_mr [memory.reg_mr] (pd: $crate::verbs::PdId, range: &riser_memory::MemSlice, access: $crate::verbs::Access) -> Result<$crate::verbs::Mr, $crate::verbs::VerbsError>;
            @live mut reg_mr_iova [memory.reg_mr_iova] (pd: $crate::verbs::PdId, range: &riser_memory::MemSlice, iova: u64, access: $crate::verbs::Access) -> Result<$crate::verbs::Mr, $crate::verbs::VerbsError>;
            @live mut rereg_mr [memory.rereg_mr] (mr: $crate::verbs::MrId, change: &$crate::verbs::MrChange<'_>) -> Result<$crate::verbs::Mr, $crate::verbs::VerbsError>;
            @live mut alloc_null_mr [memory.alloc_null_mr] (pd: $crate::verbs::PdId) -> Result<$crate::verbs::Mr, $crate::verbs::VerbsError>;
            @live mut advise_mr [memory.advise_mr] (pd: $crate::verbs::PdId, advice: $crate::verbs::MrAdvice, sges: &[$crate::verbs::Sge]) -> Result<(), $crate::verbs::VerbsError>;
            @live mut alloc_mw [memory.alloc_mw] (pd: $crate::verbs::PdId, mw_type: $crate::verbs::MwType) -> Result<$crate::verbs::Mw, $crate::verbs::VerbsError>;
            ref query_mw [memory.query_mw] (mw: $crate::verbs::MwId) -> Result<$crate::verbs::MwAttr, $crate::verbs::VerbsError>;
            mut dealloc_mw [memory.dealloc_mw] (mw: $crate::verbs::MwId) -> Result<(), $crate::verbs::VerbsError>;
            ref query_mr [memory.query_mr] (mr: $crate::verbs::MrId) -> Result<$crate::verbs::MrAttr, $crate::verbs::VerbsError>;
            mut dereg_mr [memory.dereg_mr] (mr: $crate::verbs::MrId) -> Result<(), $crate::verbs::VerbsError>;
            @live mut alloc_fast_mr [memory.alloc_fast_mr] (pd: $crate::verbs::PdId, max_segments: u32) -> Result<$crate::verbs::Mr, $crate::verbs::VerbsError>;
            @live mut map_mr_sg [memory.map_mr_sg] (mr: $crate::verbs::MrId, segments: &[riser_memory::MemSlice]) -> Result<u64, $crate::verbs::VerbsError>;
            @live mut alloc_mr_integrity [memory.alloc_mr_integrity] (pd: $crate::verbs::PdId, max_data_segments: u32, max_protection_segments: u32) -> Result<$crate::verbs::Mr, $crate::verbs::VerbsError>;
            @live mut map_mr_sg_pi [memory.map_mr_sg_pi] (mr: $crate::verbs::MrId, data: &[riser_memory::MemSlice], protection: &[riser_memory::MemSlice], attrs: &$crate::verbs::SigAttrs) -> Result<u64, $crate::verbs::VerbsError>;
            mut check_mr_status [memory.check_mr_status] (mr: $crate::verbs::MrId) -> Result<Option<$crate::verbs::SigError>, $crate::verbs::VerbsError>;
            @live mut create_cq_with [cqs.create] (init: &$crate::verbs::CqInitAttr) -> Result<$crate::verbs::CqId, $crate::verbs::VerbsError>;
            ref query_cq [cqs.query] (cq: $crate::verbs::CqId) -> Result<$crate::verbs::CqAttr, $crate::verbs::VerbsError>;
            @live mut modify_cq [cqs.modify] (cq: $crate::verbs::CqId, moderation: $crate::verbs::Moderation) -> Result<(), $crate::verbs::VerbsError>;
            mut poll_cq_timed [cqs.poll_timed] (cq: $crate::verbs::CqId, max: usize, out: &mut Vec<$crate::verbs::TimedCompletion>) -> Result<usize, $crate::verbs::VerbsError>;
            @live mut resize_cq [cqs.resize] (cq: $crate::verbs::CqId, entries: u32) -> Result<(), $crate::verbs::VerbsError>;
            mut destroy_cq [destroy_cq] (cq: $crate::verbs::CqId) -> Result<(), $crate::verbs::VerbsError>;
            mut poll_cq [cqs.poll] (cq: $crate::verbs::CqId, max: usize, out: &mut Vec<$crate::verbs::Completion>) -> Result<usize, $crate::verbs::VerbsError>;
            ref peek_cq [cqs.peek] (cq: $crate::verbs::CqId, max: usize) -> Result<usize, $crate::verbs::VerbsError>;
            mut req_notify_cq [cqs.req_notify] (cq: $crate::verbs::CqId, notify: $crate::verbs::Notify) -> Result<bool, $crate::verbs::VerbsError>;
            mut poll_cq_event [cqs.poll_event] () -> Option<$crate::verbs::CqId>;
            @live mut create_srq [create_srq] (pd: $crate::verbs::PdId, attr: $crate::verbs::SrqAttr) -> Result<$crate::verbs::SrqId, $crate::verbs::VerbsError>;
            @live mut modify_srq [modify_srq] (srq: $crate::verbs::SrqId, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), $crate::verbs::VerbsError>;
            ref query_srq [srqs.query] (srq: $crate::verbs::SrqId) -> Result<$crate::verbs::SrqAttr, $crate::verbs::VerbsError>;
            mut destroy_srq [destroy_srq] (srq: $crate::verbs::SrqId) -> Result<(), $crate::verbs::VerbsError>;
            mut post_srq_recv [srqs.post] (srq: $crate::verbs::SrqId, wrs: &[$crate::verbs::RecvWr<'_>]) -> Result<(), $crate::verbs::PostError>;
            @live mut open_xrcd [open_xrcd] () -> Result<$crate::verbs::XrcdId, $crate::verbs::VerbsError>;
            mut close_xrcd [srqs.close_xrcd] (xrcd: $crate::verbs::XrcdId) -> Result<(), $crate::verbs::VerbsError>;
            @live mut create_xrc_srq [create_xrc_srq] (pd: $crate::verbs::PdId, xrcd: $crate::verbs::XrcdId, cq: $crate::verbs::CqId, attr: $crate::verbs::SrqAttr) -> Result<$crate::verbs::SrqId, $crate::verbs::VerbsError>;
            ref srq_num [srqs.number] (srq: $crate::verbs::SrqId) -> Result<u32, $crate::verbs::VerbsError>;
            @live mut create_qp [create_qp] (init: &$crate::verbs::QpInitAttr) -> Result<$crate::verbs::QpId, $crate::verbs::VerbsError>;
            ref qp_num [qp_num] (qp: $crate::verbs::QpId) -> Result<u32, $crate::verbs::VerbsError>;
            ref query_qp [query_qp] (qp: $crate::verbs::QpId) -> Result<$crate::verbs::QpAttr, $crate::verbs::VerbsError>;
            mut modify_qp_rate_limit [modify_qp_rate_limit] (qp: $crate::verbs::QpId, limit: $crate::verbs::RateLimit) -> Result<(), $crate::verbs::VerbsError>;
            ref query_qp_rate_limit [query_qp_rate_limit] (qp: $crate::verbs::QpId) -> Result<$crate::verbs::RateLimit, $crate::verbs::VerbsError>;
            mut post_send [post_send] (qp: $crate::verbs::QpId, wrs: &[$crate::verbs::SendWr<'_>]) -> Result<(), $crate::verbs::PostError>;
            mut post_recv [post_recv] (qp: $crate::verbs::QpId, wrs: &[$crate::verbs::RecvWr<'_>]) -> Result<(), $crate::verbs::PostError>;
            @live mut create_ah [create_ah] (pd: $crate::verbs::PdId, attr: $crate::verbs::AhAttr) -> Result<$crate::verbs::AhId, $crate::verbs::VerbsError>;
            ref query_ah [ahs.query] (ah: $crate::verbs::AhId) -> Result<$crate::verbs::AhAttr, $crate::verbs::VerbsError>;
            @live mut modify_ah [modify_ah] (ah: $crate::verbs::AhId, attr: $crate::verbs::AhAttr) -> Result<(), $crate::verbs::VerbsError>;
            mut destroy_ah [destroy_ah] (ah: $crate::verbs::AhId) -> Result<(), $crate::verbs::VerbsError>;
        }
    };
}

/// Forwards the methods of [`Verbs`](crate::verbs::Verbs) which are not included in
/// [`forward_verbs`], and don't involve the wire, to the field `nic`.
macro_rules! forward_verbs_to_nic {
    () => {
        $crate::nic::delegate::forward_verbs!(nic nic);
        $crate::forward::forward! {
            nic nic;
            mut local_mad [] (port: u8, mad: &$crate::wire::Mad) -> Result<Option<$crate::wire::Mad>, $crate::verbs::VerbsError>;
            mut modify_qp [] (qp: $crate::verbs::QpId, attr: &$crate::verbs::QpAttr) -> Result<(), $crate::verbs::VerbsError>;
            mut destroy_qp [] (qp: $crate::verbs::QpId) -> Result<(), $crate::verbs::VerbsError>;
            mut detach_mcast [] (qp: $crate::verbs::QpId, mgid: $crate::verbs::Gid, mlid: u16) -> Result<(), $crate::verbs::VerbsError>;
        }
    };
}

/// Implements [`Verbs`](crate::verbs::Verbs) and [`RdmaCm`](crate::verbs::RdmaCm) for a type using
/// its field `nic`, and using its method `join_group` to join multicast groups. RDMA CM calls can
/// start timers, so `$tick` is used to update the device clock before each call.
macro_rules! delegate_to_nic {
    ($ty:ty, $tick:ident) => {
        impl $crate::verbs::Verbs for $ty {
            $crate::nic::delegate::forward_verbs_to_nic!();

            fn attach_mcast(
                &mut self,
                qp: $crate::verbs::QpId,
                mgid: $crate::verbs::Gid,
                _mlid: u16,
            ) -> Result<(), $crate::verbs::VerbsError> {
                self.nic.device.check_present()?;
                let Some(group) = self.nic.device.attach_group(qp, mgid)? else {
                    return Ok(());
                };
                let joined = self.join_group(group);
                if joined.is_err() {
                    // We have just attached it.
                    let _ = self.nic.device.detach_group(qp, mgid);
                }
                joined
            }
        }

        impl $crate::verbs::RdmaCm for $ty {
            $crate::nic::delegate::forward_cm_calls!($tick);

            fn resolve_addr(
                &mut self,
                id: $crate::verbs::CmId,
                src: Option<std::net::SocketAddr>,
                dst: std::net::SocketAddr,
                timeout: std::time::Duration,
            ) -> Result<(), $crate::verbs::CmError> {
                self.$tick();
                self.nic.resolve_addr(id, src, dst, timeout)
            }

            fn peer_addr(&self, id: $crate::verbs::CmId) -> Option<std::net::SocketAddr> {
                self.nic.peer_addr(id)
            }

            fn poll_cm_event(&mut self) -> Option<$crate::verbs::CmEvent> {
                self.nic.poll_cm_event()
            }
        }
    };
}

/// Forwards the [`RdmaCm`](crate::verbs::RdmaCm) calls that don't refer to a peer to the field
/// `nic`.
macro_rules! forward_cm_calls {
    ($tick:ident) => {
        $crate::nic::delegate::forward_with_time! {
            $tick;
            create_id_for(space: $crate::verbs::PortSpace, qp_type: $crate::verbs::QpType) -> $crate::verbs::CmId;
            set_option(id: $crate::verbs::CmId, option: $crate::verbs::CmOption) -> ();
            bind_addr(id: $crate::verbs::CmId, addr: std::net::SocketAddr) -> ();
            resolve_route(id: $crate::verbs::CmId, timeout: std::time::Duration) -> ();
            create_cm_qp(id: $crate::verbs::CmId, init: &$crate::verbs::QpInitAttr) -> $crate::verbs::QpId;
            listen(id: $crate::verbs::CmId, backlog: u32) -> ();
            connect(id: $crate::verbs::CmId, param: &$crate::verbs::ConnParam) -> ();
            accept(id: $crate::verbs::CmId, param: &$crate::verbs::ConnParam) -> ();
            establish(id: $crate::verbs::CmId) -> ();
            reject_ece(id: $crate::verbs::CmId, private_data: &[u8]) -> ();
            redirect(id: $crate::verbs::CmId, to: std::net::IpAddr) -> ();
            reject(id: $crate::verbs::CmId, private_data: &[u8]) -> ();
            mra(id: $crate::verbs::CmId) -> ();
            load_alternate_path(id: $crate::verbs::CmId, path: &$crate::verbs::AltPath) -> ();
            notify_established(id: $crate::verbs::CmId) -> ();
            disconnect(id: $crate::verbs::CmId) -> ();
            join_multicast(id: $crate::verbs::CmId, group: std::net::IpAddr, send_only: bool) -> ();
            leave_multicast(id: $crate::verbs::CmId, group: std::net::IpAddr) -> ();
            destroy_id(id: $crate::verbs::CmId) -> ();
        }

        fn init_qp_attr(
            &self,
            id: $crate::verbs::CmId,
            state: $crate::verbs::QpState,
        ) -> Result<$crate::verbs::QpAttr, $crate::verbs::CmError> {
            self.nic.init_qp_attr(id, state)
        }

        fn local_addr(&self, id: $crate::verbs::CmId) -> Option<std::net::SocketAddr> {
            self.nic.local_addr(id)
        }
    };
}

/// Updates the device clock and forwards a call to the field `nic`.
macro_rules! forward_with_time {
    ($tick:ident; $($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {$(
        fn $name(&mut self $(, $arg: $ty)*) -> Result<$ret, $crate::verbs::CmError> {
            self.$tick();
            self.nic.$name($($arg),*)
        }
    )*};
}

/// Adds methods that return the counters of the device `$device`, and the number of objects of
/// `$owner`, which is the device or its NIC.
macro_rules! delegate_counters {
    ($ty:ty, $owner:ident, $($device:ident).+) => {
        impl $ty {
            /// Returns the device counters.
            #[must_use]
            pub fn counters(&self) -> &$crate::nic::NicCounters {
                self.$($device).+.counters()
            }

            /// Returns the port counters using their Linux names.
            pub fn hw_counters(
                &self,
            ) -> impl Iterator<Item = $crate::nic::HwCounter> + use<> {
                self.$($device).+.hw_counters()
            }

            /// Returns the number of objects of each type.
            #[must_use]
            pub fn usage(&self) -> $crate::nic::NicUsage {
                self.$owner.usage()
            }

            /// Returns the sum of the counters of all connections, including closed ones.
            #[must_use]
            pub fn rc_counters(&self) -> $crate::rc::RcCounters {
                self.$($device).+.rc_counters()
            }

            /// Iterates over the ids of all QPs, which have not been destroyed.
            pub fn qps(&self) -> impl Iterator<Item = $crate::verbs::QpId> {
                self.$($device).+.qps()
            }

            /// Returns the counters of a QP.
            ///
            /// # Errors
            /// [`VerbsError::InvalidHandle`](crate::verbs::VerbsError::InvalidHandle).
            pub fn qp_counters(
                &self,
                qp: $crate::verbs::QpId,
            ) -> Result<$crate::nic::QpCounters, $crate::verbs::VerbsError> {
                self.$($device).+.qp_counters(qp)
            }
        }
    };
}

/// Adds methods that return the counters of the field `nic`.
macro_rules! delegate_counters_to_nic {
    ($ty:ty) => {
        $crate::nic::delegate::delegate_counters!($ty, nic, nic.device);

        impl $ty {
            /// Returns the counters of the connection manager.
            #[must_use]
            pub fn cm_counters(&self) -> $crate::cm::CmCounters {
                self.nic.cm_counters()
            }
        }
    };
}

/// Implements the methods of [`RdmaCm`](crate::verbs::RdmaCm) for a NIC using its connection
/// manager. Methods marked with `@live` return an error if the device has been removed.
macro_rules! forward_to_agent {
    () => {};
    (@live $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty; $($rest:tt)*) => {
        fn $name(&mut self $(, $arg: $ty)*) -> Result<$ret, $crate::verbs::CmError> {
            self.device.check_present()?;
            self.cm.$name(&mut self.device $(, $arg)*)
        }
        $crate::nic::delegate::forward_to_agent! { $($rest)* }
    };
    ($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty; $($rest:tt)*) => {
        fn $name(&mut self $(, $arg: $ty)*) -> Result<$ret, $crate::verbs::CmError> {
            self.cm.$name(&mut self.device $(, $arg)*)
        }
        $crate::nic::delegate::forward_to_agent! { $($rest)* }
    };
}

pub(crate) use {
    delegate_counters, delegate_counters_to_nic, delegate_to_nic, forward_cm_calls,
    forward_to_agent, forward_verbs, forward_verbs_to_nic, forward_with_time,
};
