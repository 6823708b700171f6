//! Implementations of the verbs traits for types that contain a [`Nic`](super::Nic).

/// Implements [`Verbs`](crate::verbs::Verbs) for a type using its field `nic`, and using its method
/// `join_group` to join multicast groups.
macro_rules! delegate_verbs_to_nic {
    ($ty:ty) => {
        impl $crate::verbs::Verbs for $ty {
            fn attach_mcast(&mut self, qp: $crate::verbs::QpId, mgid: $crate::verbs::Gid, _mlid: u16) -> Result<(), $crate::verbs::VerbsError> {
                self.nic.check_present()?;
                let Some(group) = self.nic.attach_mcast(qp, mgid)? else {
                    return Ok(());
                };
                let joined = self.join_group(group);
                if joined.is_err() {
                    // We have just attached it.
                    let _ = self.nic.detach_mcast(qp, mgid);
                }
                joined
            }

            fn detach_mcast(&mut self, qp: $crate::verbs::QpId, mgid: $crate::verbs::Gid, _mlid: u16) -> Result<(), $crate::verbs::VerbsError> {
                self.nic.detach_mcast(qp, mgid)
            }

            $crate::nic::delegate::forward! {
                @ref device_attr() -> &$crate::verbs::DeviceAttr;
                @live ref query_port(port: u8) -> Result<$crate::verbs::PortAttr, $crate::verbs::VerbsError>;
                @live ref query_gid(port: u8, index: u16) -> Result<$crate::verbs::Gid, $crate::verbs::VerbsError>;
                @live ref query_pkey(port: u8, index: u16) -> Result<$crate::verbs::PKey, $crate::verbs::VerbsError>;
                @live mut local_mad(port: u8, mad: &$crate::wire::Mad) -> Result<Option<$crate::wire::Mad>, $crate::verbs::VerbsError>;
                @mut poll_async_event() -> Option<$crate::verbs::AsyncEvent>;
                @live mut alloc_pd() -> Result<$crate::verbs::PdId, $crate::verbs::VerbsError>;
                @mut dealloc_pd(pd: $crate::verbs::PdId) -> Result<(), $crate::verbs::VerbsError>;
                @live mut reg_mr(pd: $crate::verbs::PdId, range: &riser_memory::MemSlice, access: $crate::verbs::Access) -> Result<$crate::verbs::Mr, $crate::verbs::VerbsError>;
                @live mut reg_mr_iova(pd: $crate::verbs::PdId, range: &riser_memory::MemSlice, iova: u64, access: $crate::verbs::Access) -> Result<$crate::verbs::Mr, $crate::verbs::VerbsError>;
                @live mut rereg_mr(mr: $crate::verbs::MrId, change: &$crate::verbs::MrChange<'_>) -> Result<$crate::verbs::Mr, $crate::verbs::VerbsError>;
                @live mut alloc_null_mr(pd: $crate::verbs::PdId) -> Result<$crate::verbs::Mr, $crate::verbs::VerbsError>;
                @live mut advise_mr(pd: $crate::verbs::PdId, advice: $crate::verbs::MrAdvice, sges: &[$crate::verbs::Sge]) -> Result<(), $crate::verbs::VerbsError>;
                @live mut alloc_mw(pd: $crate::verbs::PdId, mw_type: $crate::verbs::MwType) -> Result<$crate::verbs::Mw, $crate::verbs::VerbsError>;
                @mut dealloc_mw(mw: $crate::verbs::MwId) -> Result<(), $crate::verbs::VerbsError>;
                @ref query_mr(mr: $crate::verbs::MrId) -> Result<$crate::verbs::MrAttr, $crate::verbs::VerbsError>;
                @mut dereg_mr(mr: $crate::verbs::MrId) -> Result<(), $crate::verbs::VerbsError>;
                @live mut alloc_fast_mr(pd: $crate::verbs::PdId, max_segments: u32) -> Result<$crate::verbs::Mr, $crate::verbs::VerbsError>;
                @live mut map_mr_sg(mr: $crate::verbs::MrId, segments: &[riser_memory::MemSlice]) -> Result<u64, $crate::verbs::VerbsError>;
                @live mut create_cq_with(init: &$crate::verbs::CqInitAttr) -> Result<$crate::verbs::CqId, $crate::verbs::VerbsError>;
                @ref query_cq(cq: $crate::verbs::CqId) -> Result<$crate::verbs::CqAttr, $crate::verbs::VerbsError>;
                @live mut modify_cq(cq: $crate::verbs::CqId, moderation: $crate::verbs::Moderation) -> Result<(), $crate::verbs::VerbsError>;
                @mut poll_cq_timed(cq: $crate::verbs::CqId, max: usize, out: &mut Vec<$crate::verbs::TimedCompletion>) -> Result<usize, $crate::verbs::VerbsError>;
                @live mut resize_cq(cq: $crate::verbs::CqId, entries: u32) -> Result<(), $crate::verbs::VerbsError>;
                @mut destroy_cq(cq: $crate::verbs::CqId) -> Result<(), $crate::verbs::VerbsError>;
                @mut poll_cq(cq: $crate::verbs::CqId, max: usize, out: &mut Vec<$crate::verbs::Completion>) -> Result<usize, $crate::verbs::VerbsError>;
                @ref peek_cq(cq: $crate::verbs::CqId, max: usize) -> Result<usize, $crate::verbs::VerbsError>;
                @mut req_notify_cq(cq: $crate::verbs::CqId, notify: $crate::verbs::Notify) -> Result<bool, $crate::verbs::VerbsError>;
                @mut poll_cq_event() -> Option<$crate::verbs::CqId>;
                @live mut create_srq(pd: $crate::verbs::PdId, attr: $crate::verbs::SrqAttr) -> Result<$crate::verbs::SrqId, $crate::verbs::VerbsError>;
                @live mut modify_srq(srq: $crate::verbs::SrqId, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), $crate::verbs::VerbsError>;
                @ref query_srq(srq: $crate::verbs::SrqId) -> Result<$crate::verbs::SrqAttr, $crate::verbs::VerbsError>;
                @mut destroy_srq(srq: $crate::verbs::SrqId) -> Result<(), $crate::verbs::VerbsError>;
                @mut post_srq_recv(srq: $crate::verbs::SrqId, wrs: &[$crate::verbs::RecvWr<'_>]) -> Result<(), $crate::verbs::PostError>;
                @live mut open_xrcd() -> Result<$crate::verbs::XrcdId, $crate::verbs::VerbsError>;
                @mut close_xrcd(xrcd: $crate::verbs::XrcdId) -> Result<(), $crate::verbs::VerbsError>;
                @live mut create_xrc_srq(pd: $crate::verbs::PdId, xrcd: $crate::verbs::XrcdId, cq: $crate::verbs::CqId, attr: $crate::verbs::SrqAttr) -> Result<$crate::verbs::SrqId, $crate::verbs::VerbsError>;
                @ref srq_num(srq: $crate::verbs::SrqId) -> Result<u32, $crate::verbs::VerbsError>;
                @live mut create_qp(init: &$crate::verbs::QpInitAttr) -> Result<$crate::verbs::QpId, $crate::verbs::VerbsError>;
                @ref qp_num(qp: $crate::verbs::QpId) -> Result<u32, $crate::verbs::VerbsError>;
                @live mut modify_qp(qp: $crate::verbs::QpId, attr: &$crate::verbs::QpAttr) -> Result<(), $crate::verbs::VerbsError>;
                @ref query_qp(qp: $crate::verbs::QpId) -> Result<$crate::verbs::QpAttr, $crate::verbs::VerbsError>;
                @mut modify_qp_rate_limit(qp: $crate::verbs::QpId, limit: $crate::verbs::RateLimit) -> Result<(), $crate::verbs::VerbsError>;
                @ref query_qp_rate_limit(qp: $crate::verbs::QpId) -> Result<$crate::verbs::RateLimit, $crate::verbs::VerbsError>;
                @mut destroy_qp(qp: $crate::verbs::QpId) -> Result<(), $crate::verbs::VerbsError>;
                @mut post_send(qp: $crate::verbs::QpId, wrs: &[$crate::verbs::SendWr<'_>]) -> Result<(), $crate::verbs::PostError>;
                @mut post_recv(qp: $crate::verbs::QpId, wrs: &[$crate::verbs::RecvWr<'_>]) -> Result<(), $crate::verbs::PostError>;
                @live mut create_ah(pd: $crate::verbs::PdId, attr: $crate::verbs::AhAttr) -> Result<$crate::verbs::AhId, $crate::verbs::VerbsError>;
                @ref query_ah(ah: $crate::verbs::AhId) -> Result<$crate::verbs::AhAttr, $crate::verbs::VerbsError>;
                @live mut modify_ah(ah: $crate::verbs::AhId, attr: $crate::verbs::AhAttr) -> Result<(), $crate::verbs::VerbsError>;
                @mut destroy_ah(ah: $crate::verbs::AhId) -> Result<(), $crate::verbs::VerbsError>;
            }
        }
    };
}

/// Implements [`Verbs`](crate::verbs::Verbs) and [`RdmaCm`](crate::verbs::RdmaCm) for a type using
/// its field `nic`. RDMA CM calls can start timers, so `$tick` is used to update the device clock
/// before each call.
macro_rules! delegate_to_nic {
    ($ty:ty, $tick:ident) => {
        $crate::nic::delegate::delegate_verbs_to_nic!($ty);

        impl $crate::verbs::RdmaCm for $ty {
            $crate::nic::delegate::forward_cm_calls!($tick);
            $crate::nic::delegate::forward! {
                @tick $tick resolve_addr(id: $crate::verbs::CmId, src: Option<std::net::SocketAddr>, dst: std::net::SocketAddr, timeout: std::time::Duration) -> Result<(), $crate::verbs::CmError>;
                @mut poll_cm_event() -> Option<$crate::verbs::CmEvent>;
            }

            fn peer_addr(&self, id: $crate::verbs::CmId) -> Option<std::net::SocketAddr> {
                self.nic.cm_peer_addr(id)
            }
        }
    };
}

/// Forwards the [`RdmaCm`](crate::verbs::RdmaCm) calls that don't refer to a peer.
macro_rules! forward_cm_calls {
    ($tick:ident) => {
        $crate::nic::delegate::forward! {
            @tick $tick create_id_for(space: $crate::verbs::PortSpace, qp_type: $crate::verbs::QpType) -> Result<$crate::verbs::CmId, $crate::verbs::CmError>;
            @tick $tick set_option(id: $crate::verbs::CmId, option: $crate::verbs::CmOption) -> Result<(), $crate::verbs::CmError>;
            @tick $tick bind_addr(id: $crate::verbs::CmId, addr: std::net::SocketAddr) -> Result<(), $crate::verbs::CmError>;
            @tick $tick resolve_route(id: $crate::verbs::CmId, timeout: std::time::Duration) -> Result<(), $crate::verbs::CmError>;
            @tick $tick create_cm_qp(id: $crate::verbs::CmId, init: &$crate::verbs::QpInitAttr) -> Result<$crate::verbs::QpId, $crate::verbs::CmError>;
            @tick $tick listen(id: $crate::verbs::CmId, backlog: u32) -> Result<(), $crate::verbs::CmError>;
            @tick $tick connect(id: $crate::verbs::CmId, param: &$crate::verbs::ConnParam) -> Result<(), $crate::verbs::CmError>;
            @tick $tick accept(id: $crate::verbs::CmId, param: &$crate::verbs::ConnParam) -> Result<(), $crate::verbs::CmError>;
            @live ref init_qp_attr(id: $crate::verbs::CmId, state: $crate::verbs::QpState) -> Result<$crate::verbs::QpAttr, $crate::verbs::CmError>;
            @tick $tick establish(id: $crate::verbs::CmId) -> Result<(), $crate::verbs::CmError>;
            @tick $tick reject_ece(id: $crate::verbs::CmId, private_data: &[u8]) -> Result<(), $crate::verbs::CmError>;
            @tick $tick reject(id: $crate::verbs::CmId, private_data: &[u8]) -> Result<(), $crate::verbs::CmError>;
            @tick $tick mra(id: $crate::verbs::CmId) -> Result<(), $crate::verbs::CmError>;
            @tick $tick load_alternate_path(id: $crate::verbs::CmId, path: &$crate::verbs::AltPath) -> Result<(), $crate::verbs::CmError>;
            @tick $tick notify_established(id: $crate::verbs::CmId) -> Result<(), $crate::verbs::CmError>;
            @tick $tick disconnect(id: $crate::verbs::CmId) -> Result<(), $crate::verbs::CmError>;
            @tick $tick join_multicast(id: $crate::verbs::CmId, group: std::net::IpAddr, send_only: bool) -> Result<(), $crate::verbs::CmError>;
            @end $tick leave_multicast(id: $crate::verbs::CmId, group: std::net::IpAddr) -> Result<(), $crate::verbs::CmError>;
            @end $tick destroy_id(id: $crate::verbs::CmId) -> Result<(), $crate::verbs::CmError>;
        }

        fn local_addr(&self, id: $crate::verbs::CmId) -> Option<std::net::SocketAddr> {
            self.nic.cm_local_addr(id)
        }
    };
}

/// Adds methods that return the counters of the field `nic`.
macro_rules! delegate_counters_to_nic {
    ($ty:ty) => {
        impl $ty {
            /// Returns the device counters.
            #[must_use]
            pub fn counters(&self) -> &$crate::nic::NicCounters {
                self.nic.counters()
            }

            /// Returns the port counters using their Linux names.
            pub fn hw_counters(&self) -> impl Iterator<Item = $crate::nic::HwCounter> + use<> {
                self.nic.hw_counters()
            }

            /// Returns the number of objects of each type.
            #[must_use]
            pub fn usage(&self) -> $crate::nic::NicUsage {
                self.nic.usage()
            }

            /// Returns the sum of the counters of all connections, including closed ones.
            #[must_use]
            pub fn rc_counters(&self) -> $crate::rc::RcCounters {
                self.nic.rc_counters()
            }

            /// Returns the counters of the connection manager.
            #[must_use]
            pub fn cm_counters(&self) -> $crate::cm::CmCounters {
                self.nic.cm_counters()
            }

            /// Returns the counters of a QP.
            ///
            /// # Errors
            /// [`VerbsError::InvalidHandle`](crate::verbs::VerbsError::InvalidHandle).
            pub fn qp_counters(
                &self,
                qp: $crate::verbs::QpId,
            ) -> Result<$crate::nic::QpCounters, $crate::verbs::VerbsError> {
                self.nic.qp_counters(qp)
            }
        }
    };
}

/// Forwards methods to the field `nic`. Methods marked with `@live`, and methods that update the
/// clock, return an error if the device has been removed, but destroying an object (`@end`) still
/// works.
macro_rules! forward {
    () => {};
    (@ref $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty; $($rest:tt)*) => {
        fn $name(&self $(, $arg: $ty)*) -> $ret {
            self.nic.$name($($arg),*)
        }
        $crate::nic::delegate::forward! { $($rest)* }
    };
    (@mut $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty; $($rest:tt)*) => {
        fn $name(&mut self $(, $arg: $ty)*) -> $ret {
            self.nic.$name($($arg),*)
        }
        $crate::nic::delegate::forward! { $($rest)* }
    };
    (@live ref $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty; $($rest:tt)*) => {
        fn $name(&self $(, $arg: $ty)*) -> $ret {
            self.nic.check_present()?;
            self.nic.$name($($arg),*)
        }
        $crate::nic::delegate::forward! { $($rest)* }
    };
    (@live mut $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty; $($rest:tt)*) => {
        fn $name(&mut self $(, $arg: $ty)*) -> $ret {
            self.nic.check_present()?;
            self.nic.$name($($arg),*)
        }
        $crate::nic::delegate::forward! { $($rest)* }
    };
    (@tick $tick:ident $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty; $($rest:tt)*) => {
        fn $name(&mut self $(, $arg: $ty)*) -> $ret {
            self.nic.check_present()?;
            self.$tick();
            self.nic.$name($($arg),*)
        }
        $crate::nic::delegate::forward! { $($rest)* }
    };
    (@end $tick:ident $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty; $($rest:tt)*) => {
        fn $name(&mut self $(, $arg: $ty)*) -> $ret {
            self.$tick();
            self.nic.$name($($arg),*)
        }
        $crate::nic::delegate::forward! { $($rest)* }
    };
}

pub(crate) use {
    delegate_counters_to_nic, delegate_to_nic, delegate_verbs_to_nic, forward, forward_cm_calls,
};
