//! Verbs: a safe API for InfiniBand objects, used by all providers.
//!
//! Objects are identified by small copyable IDs ([`QpId`], [`CqId`], …). These contain a
//! generation, so using a stale ID returns [`VerbsError::InvalidHandle`] and never accesses a
//! different object. Work requests borrow their scatter lists and are copied to the queue when
//! posted. No function will block: a call either does its work or returns an error, and later
//! results are reported as a [`Completion`], [`AsyncEvent`] or [`CmEvent`].
//!
//! - [`Verbs`]: devices, protection domains, memory, completion queues, queue pairs, posting.
//! - [`RdmaCm`]: connections by address, similar to the RDMA CM.
//! - [`Provider`]: combines both and defines how they are used by an event loop.
//!
//! # Event loop
//!
//! ```text
//! loop {
//!     provider.progress(now);                  // packets in, timers, packets out
//!     while let Some(e) = provider.poll_cm_event() { … }
//!     provider.poll_cq(cq, &mut completions) … // and post more work
//!     if idle { provider.req_notify_cq(cq, Notify::Next); poll once more;
//!               if !provider.arm_fds() {
//!                   wait for provider.event_fds() until provider.deadline() } }
//! }
//! ```
//!
//! Programs using libibverbs need more of the verbs than `riserd` and `riser`. Functions and
//! operations that neither of them uses are marked as "Currently not used", but are covered by
//! tests.
//!
//! All values use host byte order and are converted by the provider.

mod attr;
mod cm;
mod error;
mod grh;
mod gsi;
mod ids;
mod integrity;
mod path_migration;
mod poll;
pub mod qp_state;
mod wr;

use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use riser_memory::MemSlice;

pub use attr::*;
pub use cm::*;
pub use error::*;
pub use grh::{GRH_LEN, NetworkHeader, RouteHeader};
pub use gsi::{make_datagrams_ready, make_gsi_ready};
pub use ids::*;
pub use integrity::*;
pub use path_migration::PathMigState;
pub use poll::PollContext;
pub use wr::*;

/// Verbs for an open device (IBTA chapter 11).
///
/// A device can only be used by a single thread. If a process needs multiple threads, it should
/// open the device once per thread.
pub trait Verbs {
    /// Returns the device capabilities, which don't change while it is open.
    fn device_attr(&self) -> &DeviceAttr;

    /// Returns the port attributes. Port numbers start at 1.
    ///
    /// # Errors
    /// [`VerbsError::InvalidPort`].
    fn query_port(&self, port: u8) -> Result<PortAttr, VerbsError>;

    /// Sets and clears port capabilities. A capability that is in both masks is cleared. The change
    /// is visible in [`Self::query_port`] and in the PortInfo of the port.
    ///
    /// # Errors
    /// [`VerbsError::InvalidPort`], [`VerbsError::InvalidParameter`] for a capability that is not in
    /// [`PortCapabilities::OF_PROGRAMS`], or [`VerbsError::Unsupported`]. If it fails, no capability
    /// is changed.
    fn modify_port(
        &mut self,
        port: u8,
        set: PortCapabilities,
        clear: PortCapabilities,
    ) -> Result<(), VerbsError> {
        let _ = (set, clear);
        self.query_port(port)?;
        Err(VerbsError::Unsupported("port capabilities"))
    }

    /// Returns an entry in the GID table.
    ///
    /// # Errors
    /// [`VerbsError::InvalidPort`], [`VerbsError::InvalidIndex`].
    fn query_gid(&self, port: u8, index: u16) -> Result<Gid, VerbsError>;

    /// Returns the index of an address in the GID table of a port.
    ///
    /// # Errors
    /// [`VerbsError::InvalidPort`], or [`VerbsError::InvalidParameter`] if the port does not have
    /// this address.
    fn find_gid(&self, port: u8, gid: Gid) -> Result<u16, VerbsError> {
        let len = self.query_port(port)?.gid_table_len;
        (0..len)
            .find(|&index| self.query_gid(port, index) == Ok(gid))
            .ok_or(VerbsError::InvalidParameter("GID of another port"))
    }

    /// Returns an entry in the P_Key table.
    ///
    /// # Errors
    /// [`VerbsError::InvalidPort`], [`VerbsError::InvalidIndex`].
    fn query_pkey(&self, port: u8, index: u16) -> Result<PKey, VerbsError>;

    /// Processes a management datagram as if it was received by the port. Returns the response from
    /// the device, or `None` if the datagram doesn't need a response. The device supports reading
    /// attributes for subnet management (IBTA 14.2.5) and performance management (16.1). The status
    /// is contained in the response (13.4.7). Other hosts can use queue pair 1 for performance
    /// management.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InvalidPort`], [`VerbsError::Unsupported`].
    fn local_mad(&mut self, port: u8, mad: &[u8; 256]) -> Result<Option<[u8; 256]>, VerbsError> {
        let _ = (port, mad);
        Err(VerbsError::Unsupported("local management datagrams"))
    }

    /// Returns the next asynchronous event, oldest first. The queue contains at most one entry per
    /// object and event type, so its size is limited by the number of objects.
    fn poll_async_event(&mut self) -> Option<AsyncEvent>;

    /// Allocates a protection domain.
    ///
    /// # Errors
    /// [`VerbsError::InsufficientResources`] if the device limit is exceeded.
    fn alloc_pd(&mut self) -> Result<PdId, VerbsError>;

    /// Deallocates a protection domain.
    ///
    /// # Errors
    /// [`VerbsError::ResourceBusy`] if it is still in use.
    fn dealloc_pd(&mut self, pd: PdId) -> Result<(), VerbsError>;

    /// Registers a memory range. Remote addresses for the region start at its virtual address, or
    /// at 0 if [`Access::ZERO_BASED`] is set.
    ///
    /// # Errors
    /// [`VerbsError::InvalidAccess`] for remote write or atomic access without local write access.
    fn reg_mr(&mut self, pd: PdId, range: &MemSlice, access: Access) -> Result<Mr, VerbsError>;

    /// Like [`Verbs::reg_mr`], but addresses in scatter lists and requests from peers start at
    /// `iova`.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// The same as for [`Verbs::reg_mr`], or [`VerbsError::InvalidParameter`] if addresses would
    /// wrap, or if `iova` is not 0 with [`Access::ZERO_BASED`].
    fn reg_mr_iova(
        &mut self,
        pd: PdId,
        range: &MemSlice,
        iova: u64,
        access: Access,
    ) -> Result<Mr, VerbsError>;

    /// Changes the memory, protection domain or access rights of a registered region. The keys
    /// don't change (IBTA 11.2.8.6). Pending requests will use the new values when they are
    /// processed. On error, nothing is changed.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// The same as for [`Verbs::reg_mr_iova`], or [`VerbsError::InvalidParameter`] if `change` is
    /// empty, [`VerbsError::InvalidState`] for a different type of region, and
    /// [`VerbsError::ResourceBusy`] while memory windows are bound to the region.
    fn rereg_mr(&mut self, mr: MrId, change: &MrChange<'_>) -> Result<Mr, VerbsError>;

    /// Allocates a null region, which can only be used in scatter lists: it is read as zeros, and
    /// data written to it is discarded. Addresses start at 0.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InsufficientResources`], [`VerbsError::Unsupported`].
    fn alloc_null_mr(&mut self, pd: PdId) -> Result<Mr, VerbsError> {
        let _ = pd;
        Err(VerbsError::Unsupported("null regions"))
    }

    /// Prefetches the pages for these scatter list entries before returning.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`] if a key is not valid in this protection domain,
    /// [`VerbsError::InvalidAccess`], [`VerbsError::InvalidParameter`] if a range exceeds the
    /// region or is not mapped, [`VerbsError::Unsupported`].
    fn advise_mr(&mut self, pd: PdId, advice: MrAdvice, sges: &[Sge]) -> Result<(), VerbsError> {
        let _ = (pd, advice, sges);
        Err(VerbsError::Unsupported("prefetching"))
    }

    /// Allocates a memory window. The key is valid once the window has been bound using
    /// [`SendOp::BindMw`].
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InsufficientResources`], or [`VerbsError::Unsupported`] if the device does not
    /// support this type.
    fn alloc_mw(&mut self, pd: PdId, mw_type: MwType) -> Result<Mw, VerbsError>;

    /// Returns the protection domain and the current key of a memory window.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn query_mw(&self, mw: MwId) -> Result<MwAttr, VerbsError>;

    /// Deallocates a memory window. The key is not valid after this.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn dealloc_mw(&mut self, mw: MwId) -> Result<(), VerbsError>;

    /// Returns the current attributes of a region.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn query_mr(&self, mr: MrId) -> Result<MrAttr, VerbsError>;

    /// Deregisters a region. The keys are not valid after this.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], or [`VerbsError::ResourceBusy`] while memory windows are
    /// bound to the region.
    fn dereg_mr(&mut self, mr: MrId) -> Result<(), VerbsError>;

    /// Allocates a region for fast registration with up to `max_segments` segments. It cannot be
    /// used before calling [`Verbs::map_mr_sg`] and posting a [`SendOp::RegMr`].
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] if [`DeviceAttr::max_fast_reg_segments`] is exceeded.
    fn alloc_fast_mr(&mut self, pd: PdId, max_segments: u32) -> Result<Mr, VerbsError>;

    /// Sets the memory to be used by the next [`SendOp::RegMr`] for a fast-registration region,
    /// using as many `segments` as possible. Returns the size in bytes. If the keys of the region
    /// are still valid, they must be invalidated first.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], or [`VerbsError::InvalidState`] while the region is valid.
    fn map_mr_sg(&mut self, mr: MrId, segments: &[MemSlice]) -> Result<u64, VerbsError>;

    /// Allocates an integrity region with up to `max_data_segments` data segments and
    /// `max_protection_segments` protection segments. It cannot be used before calling
    /// [`Verbs::map_mr_sg_pi`] and posting a [`SendOp::RegMr`] (Linux `ib_alloc_mr_integrity`).
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] if [`DeviceAttr::max_fast_reg_segments`] is exceeded,
    /// [`VerbsError::Unsupported`] if there is no [`DeviceAttr::integrity`].
    fn alloc_mr_integrity(
        &mut self,
        pd: PdId,
        max_data_segments: u32,
        max_protection_segments: u32,
    ) -> Result<Mr, VerbsError> {
        let _ = (pd, max_data_segments, max_protection_segments);
        Err(VerbsError::Unsupported("integrity regions"))
    }

    /// Sets the memory and signature attributes to be used by the next [`SendOp::RegMr`] for an
    /// integrity region (Linux `ib_map_mr_sg_pi`). Returns the size of the wire layout in bytes,
    /// whose addresses start at 0.
    ///
    /// `protection` contains the tuples of all blocks in order. If it is empty and the memory
    /// domain has tuples, they are interleaved: each block in `data` is followed by its tuple.
    ///
    /// The peer and scatter lists can use any range of the wire layout. A block that is received in
    /// several parts is stored when its last byte arrives, if its bytes arrive in order. If a check
    /// fails or a block is incomplete, data is transferred nevertheless, so call
    /// [`Verbs::check_mr_status`] after the transfer and before using the data.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`]; [`VerbsError::InvalidState`] while the region is valid, if it
    /// is not an integrity region, or if it has an error that was not returned by
    /// [`Verbs::check_mr_status`] yet; [`VerbsError::InvalidParameter`] for invalid attributes, if
    /// the sizes do not match, or if the number of segments exceeds the maximum;
    /// [`VerbsError::InsufficientResources`], [`VerbsError::Unsupported`]. On error, nothing is
    /// changed.
    fn map_mr_sg_pi(
        &mut self,
        mr: MrId,
        data: &[MemSlice],
        protection: &[MemSlice],
        attrs: &SigAttrs,
    ) -> Result<u64, VerbsError> {
        let _ = (mr, data, protection, attrs);
        Err(VerbsError::Unsupported("integrity regions"))
    }

    /// Returns the first failed check of an integrity region since the last call, or otherwise the
    /// first incomplete block, and clears both (Linux `ib_check_mr_status` with
    /// `IB_MR_CHECK_SIG_STATUS`). The region may be valid or invalid. While it is valid, an error can
    /// be set again after this call, because the peer may repeat a READ request.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::InvalidState`] for any other type of region,
    /// [`VerbsError::Unsupported`].
    fn check_mr_status(&mut self, mr: MrId) -> Result<Option<SigError>, VerbsError> {
        let _ = mr;
        Err(VerbsError::Unsupported("integrity regions"))
    }

    /// Creates a completion queue for at least `entries` completions.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] for 0 or if [`DeviceAttr::max_cqe`] is exceeded.
    fn create_cq(&mut self, entries: u32) -> Result<CqId, VerbsError> {
        self.create_cq_with(&CqInitAttr::new(entries))
    }

    /// Creates a completion queue.
    ///
    /// # Errors
    /// The same as for [`Verbs::create_cq`], or [`VerbsError::InvalidParameter`] if the vector does
    /// not exist, and [`VerbsError::Unsupported`] for timestamps if there is no clock.
    fn create_cq_with(&mut self, init: &CqInitAttr) -> Result<CqId, VerbsError>;

    /// Returns the current attributes of a completion queue (IBTA 11.2.8.2).
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn query_cq(&self, cq: CqId) -> Result<CqAttr, VerbsError>;

    /// Sets the event moderation for a completion queue. A delayed event is sent immediately.
    /// Events are never delayed for a failed device or after an overrun.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], or [`VerbsError::InvalidParameter`] if not supported by the
    /// device.
    fn modify_cq(&mut self, cq: CqId, moderation: Moderation) -> Result<(), VerbsError>;

    /// Changes the size of a completion queue.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] if the existing completions don't fit.
    fn resize_cq(&mut self, cq: CqId, entries: u32) -> Result<(), VerbsError>;

    /// Destroys a completion queue.
    ///
    /// # Errors
    /// [`VerbsError::ResourceBusy`] if it is used by a queue pair.
    fn destroy_cq(&mut self, cq: CqId) -> Result<(), VerbsError>;

    /// Polls up to `max` completions, oldest first, and appends them to `out`. Returns the number
    /// of completions.
    ///
    /// # Errors
    /// [`VerbsError::CqOverrun`] if a completion was lost. The queue can't be used after this.
    fn poll_cq(
        &mut self,
        cq: CqId,
        max: usize,
        out: &mut Vec<Completion>,
    ) -> Result<usize, VerbsError>;

    /// Like [`Verbs::poll_cq`], but includes timestamps.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// The same as for [`Verbs::poll_cq`], or [`VerbsError::InvalidParameter`] if the queue was
    /// created without timestamps ([`CqInitAttr::is_timed`]).
    fn poll_cq_timed(
        &mut self,
        cq: CqId,
        max: usize,
        out: &mut Vec<TimedCompletion>,
    ) -> Result<usize, VerbsError>;

    /// Returns the number of available completions, up to `max`.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn peek_cq(&self, cq: CqId, max: usize) -> Result<usize, VerbsError>;

    /// Arms a completion queue: the next matching completion will generate a single
    /// [`Verbs::poll_cq_event`]. Returns whether there are already completions in the queue. In
    /// this case, you need to poll it again before sleeping. If a device uses interrupts, it may be
    /// armed later by [`Provider::arm_fds`], so that no system call is needed while the user is
    /// running.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], or [`VerbsError::InvalidParameter`] for a [`Notify::Count`]
    /// of 0 or larger than the queue, which could overrun before the event.
    fn req_notify_cq(&mut self, cq: CqId, notify: Notify) -> Result<bool, VerbsError>;

    /// Returns the next completion queue for which the armed notification was triggered.
    fn poll_cq_event(&mut self) -> Option<CqId>;

    /// Creates a shared receive queue.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] if the device limits are exceeded.
    fn create_srq(&mut self, pd: PdId, attr: SrqAttr) -> Result<SrqId, VerbsError>;

    /// Changes the size of a shared receive queue (`max_wr`) or arms its limit event (`limit`).
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] if the posted receives don't fit or if the limit exceeds
    /// the size.
    fn modify_srq(
        &mut self,
        srq: SrqId,
        max_wr: Option<u32>,
        limit: Option<u32>,
    ) -> Result<(), VerbsError>;

    /// Returns the size and armed limit of a shared receive queue.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn query_srq(&self, srq: SrqId) -> Result<SrqAttr, VerbsError>;

    /// Destroys a shared receive queue. There will be no completions for its receives.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::ResourceBusy`] if it is used by a queue pair.
    fn destroy_srq(&mut self, srq: SrqId) -> Result<(), VerbsError>;

    /// Posts receives to a shared receive queue. On error, the receives before the returned index
    /// have been posted.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// Returns [`PostError`] with the index of the first request that was not posted.
    fn post_srq_recv(&mut self, srq: SrqId, wrs: &[RecvWr<'_>]) -> Result<(), PostError>;

    /// Opens an XRC domain (IBTA annex A14), which contains shared receive queues and the queue
    /// pairs used by peers to access them.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InsufficientResources`], [`VerbsError::Unsupported`].
    fn open_xrcd(&mut self) -> Result<XrcdId, VerbsError> {
        Err(VerbsError::Unsupported("XRC domains"))
    }

    /// Closes an XRC domain.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::ResourceBusy`] if it is used by queue pairs or shared receive queues.
    fn close_xrcd(&mut self, xrcd: XrcdId) -> Result<(), VerbsError> {
        let _ = xrcd;
        Err(VerbsError::InvalidHandle("XRC domain"))
    }

    /// Creates a shared receive queue in an XRC domain, using `cq` for completions of receives.
    /// Keys used by its receives and by requests from peers are looked up in `pd`.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] if the device limits are exceeded,
    /// [`VerbsError::InvalidHandle`], [`VerbsError::Unsupported`].
    fn create_xrc_srq(
        &mut self,
        pd: PdId,
        xrcd: XrcdId,
        cq: CqId,
        attr: SrqAttr,
    ) -> Result<SrqId, VerbsError> {
        let _ = (pd, xrcd, cq, attr);
        Err(VerbsError::Unsupported("XRC domains"))
    }

    /// Returns the number used by peers to access a shared receive queue in an XRC domain.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::InvalidParameter`] for any other shared receive
    /// queue, [`VerbsError::Unsupported`].
    fn srq_num(&self, srq: SrqId) -> Result<u32, VerbsError> {
        let _ = srq;
        Err(VerbsError::Unsupported("XRC domains"))
    }

    /// Creates a queue pair in RESET.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] if the device limits are exceeded,
    /// [`VerbsError::InvalidHandle`].
    fn create_qp(&mut self, init: &QpInitAttr) -> Result<QpId, VerbsError>;

    /// Returns the queue pair number used on the wire.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn qp_num(&self, qp: QpId) -> Result<u32, VerbsError>;

    /// Changes the state and attributes based on the table in IBTA 11.2.5.2. This returns an error
    /// without any changes if the transition is not in the table, if a required attribute is
    /// missing, or if an attribute is not allowed.
    ///
    /// # Errors
    /// [`VerbsError::InvalidTransition`], [`VerbsError::MissingAttribute`],
    /// [`VerbsError::ForbiddenAttribute`], [`VerbsError::InvalidParameter`].
    fn modify_qp(&mut self, qp: QpId, attr: &QpAttr) -> Result<(), VerbsError>;

    /// Returns the current state and attributes. Attributes that were never set are `None`.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn query_qp(&self, qp: QpId) -> Result<QpAttr, VerbsError>;

    /// Sets the maximum send rate for a queue pair until it is reset. This includes all packets.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`]; [`VerbsError::InvalidParameter`] if this is less than
    /// [`DeviceAttr::min_rate_kbps`] or exceeds [`DeviceAttr::max_rate_kbps`];
    /// [`VerbsError::InvalidState`] in RESET and ERROR; [`VerbsError::WrongQpType`] for queue pair
    /// 1; [`VerbsError::Unsupported`].
    fn modify_qp_rate_limit(&mut self, qp: QpId, limit: RateLimit) -> Result<(), VerbsError> {
        let _ = (qp, limit);
        Err(VerbsError::Unsupported("rate limits"))
    }

    /// Returns the current rate limit of a queue pair.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn query_qp_rate_limit(&self, qp: QpId) -> Result<RateLimit, VerbsError> {
        self.query_qp(qp).map(|_| RateLimit::default())
    }

    /// Destroys a queue pair. There will be no completions for requests in its queues, so the queue
    /// pair should be drained first if these are needed. All type 2 memory windows bound by this
    /// queue pair are unbound.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn destroy_qp(&mut self, qp: QpId) -> Result<(), VerbsError>;

    /// Attaches a datagram queue pair to a multicast group, so that it gets a copy of each datagram
    /// sent to the group with a matching Q_Key (IBTA 11.3.1). On RoCE, the MGID is the IP address
    /// of the group, using an IPv4-mapped address for IPv4, and `mlid` is ignored. Attaching twice
    /// has no effect. The device joins the group on the network when the first queue pair is
    /// attached.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::WrongQpType`], [`VerbsError::InvalidParameter`]
    /// if this is not a multicast address or has a different address family than the device,
    /// [`VerbsError::InsufficientResources`] if [`DeviceAttr::max_mcast_grp`] or
    /// [`DeviceAttr::max_mcast_qp_attach`] is exceeded, and [`VerbsError::Os`] if the system cannot
    /// join the group.
    fn attach_mcast(&mut self, qp: QpId, mgid: Gid, mlid: u16) -> Result<(), VerbsError>;

    /// Detaches a queue pair from a multicast group (IBTA 11.3.2). This is also done when a queue
    /// pair is destroyed.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], or [`VerbsError::InvalidParameter`] if it is not attached to
    /// this group.
    fn detach_mcast(&mut self, qp: QpId, mgid: Gid, mlid: u16) -> Result<(), VerbsError>;

    /// Posts a chain of requests to the send queue. On error, the requests before the returned
    /// index have been posted.
    ///
    /// # Errors
    /// Returns [`PostError`] with the index of the first request that was not posted.
    fn post_send(&mut self, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), PostError>;

    /// Posts receives, see [`Verbs::post_send`].
    ///
    /// # Errors
    /// Returns [`PostError`] with the index of the first request that was not posted.
    fn post_recv(&mut self, qp: QpId, wrs: &[RecvWr<'_>]) -> Result<(), PostError>;

    /// Creates an address handle for sending datagrams.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] if the address can't be reached by the device.
    fn create_ah(&mut self, pd: PdId, attr: AhAttr) -> Result<AhId, VerbsError>;

    /// Returns the attributes of an address handle (IBTA 11.2.2.3).
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn query_ah(&self, ah: AhId) -> Result<AhAttr, VerbsError>;

    /// Changes the attributes of an address handle (IBTA 11.2.2.2). Sends that were already posted
    /// still use the previous attributes.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// The same as for [`Verbs::create_ah`], or [`VerbsError::InvalidHandle`].
    fn modify_ah(&mut self, ah: AhId, attr: AhAttr) -> Result<(), VerbsError>;

    /// Creates address handle attributes for sending to the source of a datagram, based on its
    /// completion and the [`GRH_LEN`] bytes before the payload: the addresses are swapped, while
    /// traffic class, flow label and hop limit are used as received.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`VerbsError::InvalidPort`], or [`VerbsError::InvalidParameter`] if the completion has no
    /// route header, the header is invalid, or the datagram was sent to a multicast group.
    fn ah_from_wc(
        &self,
        port: u8,
        wc: &Completion,
        grh: &[u8; GRH_LEN],
    ) -> Result<AhAttr, VerbsError> {
        self.query_port(port)?;
        if wc.network.is_none() {
            return Err(VerbsError::InvalidParameter(
                "completion without a route header",
            ));
        }
        grh::way_back(port, grh, |gid| self.find_gid(port, gid).ok())
    }

    /// Destroys an address handle.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn destroy_ah(&mut self, ah: AhId) -> Result<(), VerbsError>;
}

/// Connections by address, using the same calls as the RDMA CM.
///
/// All calls return immediately, and the result is reported as a [`CmEvent`]. If a call returns an
/// error, nothing is changed.
pub trait RdmaCm {
    /// Creates an ID using the default queue pair type for the port space. It is not bound to a
    /// device yet.
    ///
    /// # Errors
    /// [`CmError::TooManyIds`].
    fn create_id(&mut self, port_space: PortSpace) -> Result<CmId, CmError> {
        self.create_id_for(port_space, port_space.qp_type())
    }

    /// Creates an ID for a queue pair type. A listener only accepts requests for this type.
    ///
    /// # Errors
    /// [`CmError::TooManyIds`], or [`VerbsError::WrongQpType`] for a type that cannot be connected.
    fn create_id_for(&mut self, port_space: PortSpace, qp_type: QpType) -> Result<CmId, CmError>;

    /// Sets an option.
    ///
    /// # Errors
    /// [`CmError::InvalidState`] if the option can't be changed anymore,
    /// [`VerbsError::InvalidParameter`].
    fn set_option(&mut self, id: CmId, option: CmOption) -> Result<(), CmError>;

    /// Binds the ID to a local address, or to a free port if the port is 0. An unspecified address
    /// means the device address. This includes the IPv6 unspecified address for an IPv4 device,
    /// unless [`CmOption::AddressFamilyOnly`] is set.
    ///
    /// Only one ID per port space can use a port, unless [`CmOption::ReuseAddress`] is set.
    ///
    /// # Errors
    /// [`CmError::InvalidState`] if already bound; [`CmError::AddressInUse`] if the address and
    /// port are used by a different ID; [`CmError::AddressNotAvailable`] if this is not an address
    /// of the device, or if either this address or that of the other ID using the port is
    /// unspecified.
    fn bind_addr(&mut self, id: CmId, addr: std::net::SocketAddr) -> Result<(), CmError>;

    /// Resolves a destination to a device and GID. The result is `AddrResolved` or `AddrError`.
    ///
    /// # Errors
    /// [`CmError::InvalidState`].
    fn resolve_addr(
        &mut self,
        id: CmId,
        src: Option<std::net::SocketAddr>,
        dst: std::net::SocketAddr,
        timeout: Duration,
    ) -> Result<(), CmError>;

    /// Resolves the path to the destination. The result is `RouteResolved` or `RouteError`.
    ///
    /// # Errors
    /// [`CmError::InvalidState`].
    fn resolve_route(&mut self, id: CmId, timeout: Duration) -> Result<(), CmError>;

    /// Creates a queue pair whose state will be updated by the ID while connecting. A datagram
    /// queue pair is immediately set to RTS with the Q_Key [`DATAGRAM_QKEY`].
    ///
    /// # Errors
    /// [`CmError::InvalidState`], [`CmError::Verbs`].
    fn create_cm_qp(&mut self, id: CmId, init: &QpInitAttr) -> Result<QpId, CmError>;

    /// Starts listening on the bound address, or on a free port of the device if not bound. The
    /// address must not be used by any other ID, even if both allow sharing. `backlog` limits the
    /// number of connection requests that are not yet accepted or rejected. If it is exceeded, a
    /// request is dropped and should be resent by the peer.
    ///
    /// # Errors
    /// [`CmError::InvalidState`], [`CmError::AddressInUse`].
    fn listen(&mut self, id: CmId, backlog: u32) -> Result<(), CmError>;

    /// Returns the attributes required to set a queue pair to INIT, RTR or RTS, if its owner
    /// manages the state ([`Verbs::modify_qp`]). The attributes for INIT are available once the ID
    /// is bound or an address has been resolved, and the rest when a request or the response to a
    /// request has been received.
    ///
    /// # Errors
    /// [`CmError::InvalidState`] if they are not available yet, or [`VerbsError::InvalidParameter`]
    /// for any other state.
    fn init_qp_attr(&self, id: CmId, state: QpState) -> Result<QpAttr, CmError>;

    /// Sends a connection request. For a datagram ID, this requests the number and Q_Key of the
    /// queue pair used for the port.
    ///
    /// If the ID has no queue pair, the number is set in [`ConnParam::qp_num`] and the owner must
    /// manage the queue pair state. The result is `ConnectResponse`.
    ///
    /// # Errors
    /// [`CmError::InvalidState`], [`CmError::PrivateDataTooLong`].
    fn connect(&mut self, id: CmId, param: &ConnParam) -> Result<(), CmError>;

    /// Accepts a connection request. Receives should be posted to the queue pair before this call.
    /// A datagram ID is established by this, without an event. If the ID has no queue pair, the
    /// number is set in [`ConnParam::qp_num`] and the owner must have set its state to RTR or RTS.
    ///
    /// # Errors
    /// [`CmError::InvalidState`], [`CmError::PrivateDataTooLong`].
    fn accept(&mut self, id: CmId, param: &ConnParam) -> Result<(), CmError>;

    /// Establishes a connection after the owner of the queue pair has received `ConnectResponse`
    /// and set the state to RTS. There is no event for this.
    ///
    /// # Errors
    /// [`CmError::InvalidState`].
    fn establish(&mut self, id: CmId) -> Result<(), CmError>;

    /// Rejects a connection request or the response to a request, with private data (reason
    /// "consumer defined").
    ///
    /// # Errors
    /// [`CmError::InvalidState`], [`CmError::PrivateDataTooLong`].
    fn reject(&mut self, id: CmId, private_data: &[u8]) -> Result<(), CmError>;

    /// Like [`RdmaCm::reject`], but because the vendor options of the peer (enhanced connection
    /// establishment) are not supported (IBTA 12.6.7.2, reason 35).
    ///
    /// # Errors
    /// The same as for [`RdmaCm::reject`], or [`CmError::InvalidState`] for a datagram ID.
    fn reject_ece(&mut self, id: CmId, private_data: &[u8]) -> Result<(), CmError>;

    /// Rejects a connection request and refers the peer to the same port of another address (IBTA
    /// 12.6.7.2, reason 24). The peer may follow ([`CmOption::Redirects`]), or report the
    /// rejection.
    ///
    /// # Errors
    /// [`CmError::InvalidState`] unless there is a request for a connection,
    /// [`CmError::Unreachable`] for a different address family or if this is not the address of a
    /// host, [`VerbsError::Unsupported`] if the device does not send the address.
    fn redirect(&mut self, id: CmId, to: IpAddr) -> Result<(), CmError> {
        let _ = (id, to);
        Err(VerbsError::Unsupported("redirection").into())
    }

    /// Requests more time to respond to the peer's request.
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`CmError::InvalidState`].
    fn mra(&mut self, id: CmId) -> Result<(), CmError>;

    /// Notifies the CM that data was received for a connection without an RTU. The connection is
    /// then considered established.
    ///
    /// # Errors
    /// [`CmError::InvalidState`].
    fn notify_established(&mut self, id: CmId) -> Result<(), CmError>;

    /// Sets the queue pair to the error state and notifies the peer. This can be called multiple
    /// times.
    ///
    /// # Errors
    /// [`CmError::InvalidState`] before a connection was requested.
    fn disconnect(&mut self, id: CmId) -> Result<(), CmError>;

    /// Proposes an alternate path to the peer for the connection's queue pair (IBTA 12.8). If the
    /// ID is not connected yet, the path is sent in the request, otherwise in a LAP. The result is
    /// `AlternatePath` or `AlternatePathError`. If accepted by the peer, both queue pairs load the
    /// path and are rearmed: they will migrate automatically once they have been armed by packets,
    /// or when requested by [`Verbs::modify_qp`].
    ///
    /// Currently not used.
    ///
    /// # Errors
    /// [`CmError::InvalidState`] while connecting, if the queue pair state is managed by its owner,
    /// or while a different path is being negotiated; the errors of [`Verbs::modify_qp`] for the
    /// path; [`VerbsError::Unsupported`] if not supported by the device.
    fn load_alternate_path(&mut self, id: CmId, path: &AltPath) -> Result<(), CmError>;

    /// Joins a multicast group with a datagram ID that is bound or has resolved an address. The
    /// result is `MulticastJoin` or `MulticastError`. The event contains the MGID of the group, to
    /// which the owner must attach its queue pair. This is not required if `send_only` is set.
    ///
    /// # Errors
    /// [`CmError::InvalidState`]; [`CmError::AddressInUse`] if it has already joined the group;
    /// [`VerbsError::InvalidParameter`] if this is not a multicast address;
    /// [`CmError::Unreachable`] for a different address family;
    /// [`VerbsError::InsufficientResources`] if [`MAX_GROUPS_PER_ID`] is exceeded.
    fn join_multicast(&mut self, id: CmId, group: IpAddr, send_only: bool) -> Result<(), CmError>;

    /// Leaves a multicast group. There is no event for this.
    ///
    /// # Errors
    /// [`CmError::InvalidState`], or [`CmError::AddressNotAvailable`] if it has not joined the
    /// group.
    fn leave_multicast(&mut self, id: CmId, group: IpAddr) -> Result<(), CmError>;

    /// Destroys an ID, cancels its operations and leaves its groups. The queue pair must be
    /// destroyed by the caller.
    ///
    /// # Errors
    /// [`CmError::InvalidState`] if the ID does not exist.
    fn destroy_id(&mut self, id: CmId) -> Result<(), CmError>;

    /// Returns the local address if bound.
    fn local_addr(&self, id: CmId) -> Option<std::net::SocketAddr>;

    /// Returns the peer address if resolved or requested.
    fn peer_addr(&self, id: CmId) -> Option<std::net::SocketAddr>;

    /// Returns the next event, oldest first.
    fn poll_cm_event(&mut self) -> Option<CmEvent>;
}

/// Device file descriptors. Stored inline because they are needed before each sleep, which must not
/// allocate.
pub type EventFds<'a> = ArrayVec<BorrowedFd<'a>, 4>;

/// Device with its connection manager, as used by an event loop.
pub trait Provider: Verbs + RdmaCm {
    /// Does all work that is currently possible without blocking: processes received packets or
    /// events, handles timers that have expired by `now`, and sends packets. Returns the amount of
    /// work done, where 0 means idle.
    fn progress(&mut self, now: Instant) -> usize;

    /// Returns the next time at which [`Provider::progress`] must be called and events must be
    /// polled, even if no file descriptor is readable. If there is an event not indicated by a file
    /// descriptor, this time is already in the past.
    fn deadline(&self) -> Option<Instant>;

    /// Returns file descriptors that will be readable if there is work to do. This requires calling
    /// [`Provider::arm_fds`] after the last [`Provider::progress`].
    fn event_fds(&self) -> EventFds<'_>;

    /// Enables the file descriptors for everything received since the last [`Provider::progress`]
    /// and from now. This must be called before each sleep: if a wakeup needs a system call by the
    /// peer, this is only done when we are sleeping.
    ///
    /// Returns true if there is work not indicated by a file descriptor. In this case the caller
    /// must not sleep.
    #[must_use]
    fn arm_fds(&mut self) -> bool {
        false
    }
}
