//! The verbs: one set of safe types with the InfiniBand rules, for every provider.
//!
//! Objects are named by small copyable ids ([`QpId`], [`CqId`], …) that carry a generation, so a
//! stale id is an [`VerbsError::InvalidHandle`], never another object. Work requests borrow their
//! scatter lists and are copied into the queue by the post. Nothing blocks: a call either does its
//! work or says why not, and everything that happens later is a [`Completion`], an [`AsyncEvent`]
//! or a [`CmEvent`].
//!
//! - [`Verbs`]: devices, protection domains, memory, completion queues, queue pairs, posting.
//! - [`RdmaCm`]: connections by address, shaped like the RDMA CM.
//! - [`Provider`]: both, and how an event loop drives them.
//!
//! # The loop
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
//! Programs written for libibverbs need more of the verbs than `riserd` and `riser` do. Calls and
//! operations that neither of them uses are marked with "No user yet"; the tests use them all.
//!
//! Byte order: everything here is in host order; providers convert at the wire.

mod attr;
mod cm;
mod error;
mod grh;
mod gsi;
mod ids;
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
pub use path_migration::PathMigState;
pub use poll::PollContext;
pub use wr::*;

/// The channel-interface verbs of one opened device (IBTA chapter 11).
///
/// One thread owns a device; a process that wants several threads opens the device once for each.
pub trait Verbs {
    /// The device's capabilities, fixed while it is open.
    fn device_attr(&self) -> &DeviceAttr;

    /// The attributes of a port; ports count from 1.
    ///
    /// # Errors
    /// [`VerbsError::InvalidPort`].
    fn query_port(&self, port: u8) -> Result<PortAttr, VerbsError>;

    /// An entry of a port's GID table.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InvalidPort`], [`VerbsError::InvalidIndex`].
    fn query_gid(&self, port: u8, index: u16) -> Result<Gid, VerbsError>;

    /// An entry of a port's P_Key table.
    ///
    /// # Errors
    /// [`VerbsError::InvalidPort`], [`VerbsError::InvalidIndex`].
    fn query_pkey(&self, port: u8, index: u16) -> Result<PKey, VerbsError>;

    /// Answer of the device itself to a management datagram, as if it had come to a port; `None` to
    /// one that asks for no answer. The device answers reads of subnet management (IBTA 14.2.5) and
    /// performance management (16.1); whether the request has succeeded is the status in the answer
    /// (13.4.7). Other hosts get answers to the latter by queue pair 1.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InvalidPort`], [`VerbsError::Unsupported`].
    fn local_mad(&mut self, port: u8, mad: &[u8; 256]) -> Result<Option<[u8; 256]>, VerbsError> {
        let _ = (port, mad);
        Err(VerbsError::Unsupported("local management datagrams"))
    }

    /// The next asynchronous event, oldest first. The queue holds one entry for each object and
    /// kind of event at most, so it is bounded by the number of objects.
    fn poll_async_event(&mut self) -> Option<AsyncEvent>;

    /// Allocates a protection domain.
    ///
    /// # Errors
    /// [`VerbsError::InsufficientResources`] at the device's limit.
    fn alloc_pd(&mut self) -> Result<PdId, VerbsError>;

    /// Frees a protection domain.
    ///
    /// # Errors
    /// [`VerbsError::ResourceBusy`] while anything belongs to it.
    fn dealloc_pd(&mut self, pd: PdId) -> Result<(), VerbsError>;

    /// Registers a range of memory. Remote addresses of the region count from the range's virtual
    /// address, or from 0 with [`Access::ZERO_BASED`].
    ///
    /// # Errors
    /// [`VerbsError::InvalidAccess`] for remote write or atomic without local write.
    fn reg_mr(&mut self, pd: PdId, range: &MemSlice, access: Access) -> Result<Mr, VerbsError>;

    /// As [`Verbs::reg_mr`], but addresses of the region, in scatter lists and in requests of peers,
    /// count from `iova`.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// Those of [`Verbs::reg_mr`]; [`VerbsError::InvalidParameter`] where addresses would wrap, or
    /// `iova` is not 0 with [`Access::ZERO_BASED`].
    fn reg_mr_iova(
        &mut self,
        pd: PdId,
        range: &MemSlice,
        iova: u64,
        access: Access,
    ) -> Result<Mr, VerbsError>;

    /// Changes memory, domain or rights of a registered region, or several of them at once; its keys
    /// stay (IBTA 11.2.8.6). Requests under way see the region as it is when they get to it. Where
    /// this fails nothing has changed.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// Those of [`Verbs::reg_mr_iova`]; [`VerbsError::InvalidParameter`] where there is no change;
    /// [`VerbsError::InvalidState`] for a region of another kind; [`VerbsError::ResourceBusy`]
    /// while memory windows are bound to it.
    fn rereg_mr(&mut self, mr: MrId, change: &MrChange<'_>) -> Result<Mr, VerbsError>;

    /// Allocates a null region, for scatter lists only: what is read from it is zero, and what is
    /// written to it goes nowhere. Its addresses count from 0.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InsufficientResources`], [`VerbsError::Unsupported`].
    fn alloc_null_mr(&mut self, pd: PdId) -> Result<Mr, VerbsError> {
        let _ = pd;
        Err(VerbsError::Unsupported("null regions"))
    }

    /// Brings in the pages that the segments of regions cover, before this returns.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`] for a key that names no region of the domain,
    /// [`VerbsError::InvalidAccess`], [`VerbsError::InvalidParameter`] for a range outside the
    /// region or that is not mapped, [`VerbsError::Unsupported`].
    fn advise_mr(&mut self, pd: PdId, advice: MrAdvice, sges: &[Sge]) -> Result<(), VerbsError> {
        let _ = (pd, advice, sges);
        Err(VerbsError::Unsupported("prefetching"))
    }

    /// Allocates a memory window. Its key works once a [`SendOp::BindMw`] has given it a range.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InsufficientResources`], [`VerbsError::Unsupported`] for a kind that the device
    /// does not have.
    fn alloc_mw(&mut self, pd: PdId, mw_type: MwType) -> Result<Mw, VerbsError>;

    /// Frees a memory window; its key fails from now on.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn dealloc_mw(&mut self, mw: MwId) -> Result<(), VerbsError>;

    /// A region's attributes at present.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn query_mr(&self, mr: MrId) -> Result<MrAttr, VerbsError>;

    /// Deregisters a region; its keys fail from now on.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::ResourceBusy`] while memory windows are bound to
    /// it.
    fn dereg_mr(&mut self, mr: MrId) -> Result<(), VerbsError>;

    /// Allocates a region for fast registration with room for `max_segments` segments. It covers
    /// nothing until [`Verbs::map_mr_sg`] and a [`SendOp::RegMr`].
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] beyond [`DeviceAttr::max_fast_reg_segments`].
    fn alloc_fast_mr(&mut self, pd: PdId, max_segments: u32) -> Result<Mr, VerbsError>;

    /// Sets what the next [`SendOp::RegMr`] of a fast-registration region will cover: as many of
    /// `segments` as fit. Answers how many bytes that is. The keys of a region that is still valid
    /// must be invalidated first.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::InvalidState`] while the region is valid.
    fn map_mr_sg(&mut self, mr: MrId, segments: &[MemSlice]) -> Result<u64, VerbsError>;

    /// Creates a completion queue with room for at least `entries` completions.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] for 0 or more than [`DeviceAttr::max_cqe`].
    fn create_cq(&mut self, entries: u32) -> Result<CqId, VerbsError> {
        self.create_cq_with(&CqInitAttr::new(entries))
    }

    /// Creates a completion queue.
    ///
    /// # Errors
    /// Those of [`Verbs::create_cq`]; [`VerbsError::InvalidParameter`] for a vector that the device
    /// does not have, and [`VerbsError::Unsupported`] for times where it has no clock.
    fn create_cq_with(&mut self, init: &CqInitAttr) -> Result<CqId, VerbsError>;

    /// Attributes of a completion queue at present (IBTA 11.2.8.2).
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn query_cq(&self, cq: CqId) -> Result<CqAttr, VerbsError>;

    /// Sets how long events of a completion queue may wait for further completions. An event that
    /// waits comes at once. The queue of a failed device, and one that was overrun, waits for
    /// nothing.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`]; [`VerbsError::InvalidParameter`] where the device cannot.
    fn modify_cq(&mut self, cq: CqId, moderation: Moderation) -> Result<(), VerbsError>;

    /// Changes a completion queue's capacity.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] below the number of completions that it holds.
    fn resize_cq(&mut self, cq: CqId, entries: u32) -> Result<(), VerbsError>;

    /// Destroys a completion queue.
    ///
    /// # Errors
    /// [`VerbsError::ResourceBusy`] while a queue pair uses it.
    fn destroy_cq(&mut self, cq: CqId) -> Result<(), VerbsError>;

    /// Takes up to `max` completions, oldest first, appending them to `out`; answers how many.
    ///
    /// # Errors
    /// [`VerbsError::CqOverrun`] once a completion has been lost; the queue is then dead.
    fn poll_cq(
        &mut self,
        cq: CqId,
        max: usize,
        out: &mut Vec<Completion>,
    ) -> Result<usize, VerbsError>;

    /// As [`Verbs::poll_cq`], with the time of each completion.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] for a queue that was created without times
    /// ([`CqInitAttr::is_timed`]), and those of [`Verbs::poll_cq`].
    fn poll_cq_timed(
        &mut self,
        cq: CqId,
        max: usize,
        out: &mut Vec<TimedCompletion>,
    ) -> Result<usize, VerbsError>;

    /// Number of completions that wait, counting no further than `max`.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn peek_cq(&self, cq: CqId, max: usize) -> Result<usize, VerbsError>;

    /// Arms a completion queue: one [`Verbs::poll_cq_event`] for the next completion that matches.
    /// Answers whether completions are waiting already, in which case poll again before sleeping.
    /// A device that interrupts may be armed only by [`Provider::arm_fds`], so this costs no system
    /// call while the user is awake.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn req_notify_cq(&mut self, cq: CqId, notify: Notify) -> Result<bool, VerbsError>;

    /// The next completion queue whose armed notification has fired.
    fn poll_cq_event(&mut self) -> Option<CqId>;

    /// Creates a shared receive queue.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] beyond the device's limits.
    fn create_srq(&mut self, pd: PdId, attr: SrqAttr) -> Result<SrqId, VerbsError>;

    /// Resizes a shared receive queue (`max_wr`) or arms its limit event (`limit`).
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] below what is posted, or a limit above the capacity.
    fn modify_srq(
        &mut self,
        srq: SrqId,
        max_wr: Option<u32>,
        limit: Option<u32>,
    ) -> Result<(), VerbsError>;

    /// Capacity and armed limit of a shared receive queue.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn query_srq(&self, srq: SrqId) -> Result<SrqAttr, VerbsError>;

    /// Destroys a shared receive queue; what is posted to it goes without completions.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::ResourceBusy`] while a queue pair uses it.
    fn destroy_srq(&mut self, srq: SrqId) -> Result<(), VerbsError>;

    /// Posts receives to a shared receive queue. All are posted, or all from the named index on are
    /// not.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`PostError`] with the index of the first request that was not posted.
    fn post_srq_recv(&mut self, srq: SrqId, wrs: &[RecvWr<'_>]) -> Result<(), PostError>;

    /// Opens an XRC domain (IBTA annex A14): shared receive queues, and the queue pairs through which
    /// all peers reach them.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InsufficientResources`], [`VerbsError::Unsupported`].
    fn open_xrcd(&mut self) -> Result<XrcdId, VerbsError> {
        Err(VerbsError::Unsupported("XRC domains"))
    }

    /// Closes an XRC domain.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::ResourceBusy`] while queue pairs or shared receive queues belong to it.
    fn close_xrcd(&mut self, xrcd: XrcdId) -> Result<(), VerbsError> {
        let _ = xrcd;
        Err(VerbsError::InvalidHandle("XRC domain"))
    }

    /// Creates a shared receive queue of an XRC domain, whose receives complete in `cq`. Its keys,
    /// and those of what peers do through it, are looked up in `pd`.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] beyond the device's limits, [`VerbsError::InvalidHandle`],
    /// [`VerbsError::Unsupported`].
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

    /// The number of a shared receive queue of an XRC domain, by which peers name it.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::InvalidParameter`] for another shared receive
    /// queue, [`VerbsError::Unsupported`].
    fn srq_num(&self, srq: SrqId) -> Result<u32, VerbsError> {
        let _ = srq;
        Err(VerbsError::Unsupported("XRC domains"))
    }

    /// Creates a queue pair in state RESET.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] beyond the device's limits, [`VerbsError::InvalidHandle`].
    fn create_qp(&mut self, init: &QpInitAttr) -> Result<QpId, VerbsError>;

    /// The queue pair's number on the wire.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn qp_num(&self, qp: QpId) -> Result<u32, VerbsError>;

    /// Changes state and attributes by the table of IBTA 11.2.5.2: a transition that the table does
    /// not have, a required attribute that is missing and an attribute that it forbids are refused,
    /// and then nothing has changed.
    ///
    /// # Errors
    /// [`VerbsError::InvalidTransition`], [`VerbsError::MissingAttribute`],
    /// [`VerbsError::ForbiddenAttribute`], [`VerbsError::InvalidParameter`].
    fn modify_qp(&mut self, qp: QpId, attr: &QpAttr) -> Result<(), VerbsError>;

    /// State and attributes at present; attributes never set are `None`.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn query_qp(&self, qp: QpId) -> Result<QpAttr, VerbsError>;

    /// Limits how fast a queue pair sends from now on, until it is reset. All of its packets count.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`]; [`VerbsError::InvalidParameter`] below
    /// [`DeviceAttr::min_rate_kbps`] or above [`DeviceAttr::max_rate_kbps`];
    /// [`VerbsError::InvalidState`] in RESET and ERROR; [`VerbsError::WrongQpType`] for queue pair 1;
    /// [`VerbsError::Unsupported`].
    fn modify_qp_rate_limit(&mut self, qp: QpId, limit: RateLimit) -> Result<(), VerbsError> {
        let _ = (qp, limit);
        Err(VerbsError::Unsupported("rate limits"))
    }

    /// The limit of a queue pair at present.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn query_qp_rate_limit(&self, qp: QpId) -> Result<RateLimit, VerbsError> {
        self.query_qp(qp).map(|_| RateLimit::default())
    }

    /// Destroys a queue pair. Work still in its queues goes without completions; drain it first
    /// where they matter. Memory windows of type 2 that it has bound are unbound.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn destroy_qp(&mut self, qp: QpId) -> Result<(), VerbsError>;

    /// Attaches a datagram queue pair to a multicast group: it gets a copy of each datagram to the
    /// group with its queue key (IBTA 11.3.1). On RoCE the MGID is the group's IP address, an IPv4
    /// one mapped into IPv6, and `mlid` means nothing. To be attached twice is the same as once.
    /// The device joins the group on the network, for its first queue pair there.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::WrongQpType`], [`VerbsError::InvalidParameter`]
    /// for an address that is no group or of another family than the device's,
    /// [`VerbsError::InsufficientResources`] beyond [`DeviceAttr::max_mcast_grp`] or
    /// [`DeviceAttr::max_mcast_qp_attach`], and [`VerbsError::Os`] where the system does not join.
    fn attach_mcast(&mut self, qp: QpId, mgid: Gid, mlid: u16) -> Result<(), VerbsError>;

    /// Detaches a queue pair from a multicast group (IBTA 11.3.2). One that is destroyed is
    /// detached from all.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::InvalidParameter`] for a group that it is not
    /// attached to.
    fn detach_mcast(&mut self, qp: QpId, mgid: Gid, mlid: u16) -> Result<(), VerbsError>;

    /// Posts a chain of requests to the send queue. The chain posts whole, or fails at the named
    /// index and from there on nothing is posted.
    ///
    /// # Errors
    /// [`PostError`] with the index of the first request that was not posted.
    fn post_send(&mut self, qp: QpId, wrs: &[SendWr<'_>]) -> Result<(), PostError>;

    /// Posts receives, as [`Verbs::post_send`].
    ///
    /// # Errors
    /// [`PostError`] with the index of the first request that was not posted.
    fn post_recv(&mut self, qp: QpId, wrs: &[RecvWr<'_>]) -> Result<(), PostError>;

    /// Creates an address handle for datagram sends.
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`] for an address that the device cannot reach.
    fn create_ah(&mut self, pd: PdId, attr: AhAttr) -> Result<AhId, VerbsError>;

    /// Attributes of an address handle (IBTA 11.2.2.3).
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn query_ah(&self, ah: AhId) -> Result<AhAttr, VerbsError>;

    /// Changes the attributes of an address handle (IBTA 11.2.2.2). Sends that were posted before
    /// go where it led then.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// Those of [`Verbs::create_ah`], [`VerbsError::InvalidHandle`].
    fn modify_ah(&mut self, ah: AhId, attr: AhAttr) -> Result<(), VerbsError>;

    /// Attributes of an address handle that leads back to the sender of a datagram, by its
    /// completion and the [`GRH_LEN`] bytes before its payload: the addresses are exchanged, and
    /// traffic class, flow label and hop limit are those with which it has arrived.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`VerbsError::InvalidPort`], and [`VerbsError::InvalidParameter`] for a completion without a
    /// route header, for a header that is none, and for a datagram to a multicast group.
    fn ah_from_wc(
        &self,
        port: u8,
        wc: &Completion,
        grh: &[u8; GRH_LEN],
    ) -> Result<AhAttr, VerbsError> {
        let gids = self.query_port(port)?.gid_table_len;
        if wc.network.is_none() {
            return Err(VerbsError::InvalidParameter("completion without a header"));
        }
        grh::way_back(port, grh, |gid| {
            (0..gids).find(|&index| self.query_gid(port, index) == Ok(gid))
        })
    }

    /// Destroys an address handle.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    fn destroy_ah(&mut self, ah: AhId) -> Result<(), VerbsError>;
}

/// Connections by address (the RDMA CM's calls, one to one).
///
/// Every call returns at once; its outcome is a [`CmEvent`]. A failed call changes nothing.
pub trait RdmaCm {
    /// Creates an identifier for the usual queue pairs of its port space, not yet bound to a
    /// device.
    ///
    /// # Errors
    /// [`CmError::TooManyIds`].
    fn create_id(&mut self, port_space: PortSpace) -> Result<CmId, CmError> {
        self.create_id_for(port_space, port_space.qp_type())
    }

    /// Creates an identifier for queue pairs of a type. A listener takes the requests that ask for
    /// its type.
    ///
    /// # Errors
    /// [`CmError::TooManyIds`], [`VerbsError::WrongQpType`] for a type that cannot be connected.
    fn create_id_for(&mut self, port_space: PortSpace, qp_type: QpType) -> Result<CmId, CmError>;

    /// Sets an option.
    ///
    /// # Errors
    /// [`CmError::InvalidState`] where it is too late, [`VerbsError::InvalidParameter`].
    fn set_option(&mut self, id: CmId, option: CmOption) -> Result<(), CmError>;

    /// Binds to a local address; port 0 takes a free port. An unspecified address means the
    /// device's own; that of IPv6 also where this is of IPv4, but for an identifier with
    /// [`CmOption::AddressFamilyOnly`].
    ///
    /// A port has one owner in its port space, or several with [`CmOption::ReuseAddress`].
    ///
    /// # Errors
    /// [`CmError::InvalidState`] if it is bound; [`CmError::AddressInUse`] if another identifier is
    /// bound to this address and port; [`CmError::AddressNotAvailable`] if the address is not the
    /// device's, or if this address or that of the port's owner is unspecified.
    fn bind_addr(&mut self, id: CmId, addr: std::net::SocketAddr) -> Result<(), CmError>;

    /// Resolves a destination to a device and a GID; the answer is `AddrResolved` or `AddrError`.
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

    /// Resolves the path to the destination; the answer is `RouteResolved` or `RouteError`.
    ///
    /// # Errors
    /// [`CmError::InvalidState`].
    fn resolve_route(&mut self, id: CmId, timeout: Duration) -> Result<(), CmError>;

    /// Creates a queue pair that this identifier takes through its states while connecting. One for
    /// datagrams goes to RTS at once, with the Q_Key [`DATAGRAM_QKEY`].
    ///
    /// # Errors
    /// [`CmError::InvalidState`], [`CmError::Verbs`].
    fn create_cm_qp(&mut self, id: CmId, init: &QpInitAttr) -> Result<QpId, CmError>;

    /// Listens on the bound address, or on a free port of the device's if it is not bound; no other
    /// identifier may be bound to the same, even if both said that they share it. `backlog` bounds
    /// the connection requests not yet accepted or rejected; a request beyond it is dropped and
    /// will be sent again by its peer.
    ///
    /// # Errors
    /// [`CmError::InvalidState`], [`CmError::AddressInUse`].
    fn listen(&mut self, id: CmId, backlog: u32) -> Result<(), CmError>;

    /// Attributes that take a queue pair of the identifier's to INIT, RTR or RTS, for an owner that
    /// does it by itself ([`Verbs::modify_qp`]). Those of INIT are known once the identifier is
    /// bound or has an address resolved, the others from a request that came in, or from the answer
    /// to one that was sent.
    ///
    /// # Errors
    /// [`CmError::InvalidState`] before they are known, [`VerbsError::InvalidParameter`] for another
    /// state.
    fn init_qp_attr(&self, id: CmId, state: QpState) -> Result<QpAttr, CmError>;

    /// Sends a connection request; a datagram identifier asks for the number and the Q_Key of the
    /// queue pair behind the port.
    ///
    /// An identifier without a queue pair asks for the one that [`ConnParam::qp_num`] names, which
    /// stays its owner's to move. The answer is `ConnectResponse`.
    ///
    /// # Errors
    /// [`CmError::InvalidState`], [`CmError::PrivateDataTooLong`].
    fn connect(&mut self, id: CmId, param: &ConnParam) -> Result<(), CmError>;

    /// Accepts a connection request. Receives should be posted to the queue pair before. A datagram
    /// identifier is established by that, without an event. An identifier without a queue pair
    /// names the one of [`ConnParam::qp_num`], which its owner has taken to RTR or RTS before.
    ///
    /// # Errors
    /// [`CmError::InvalidState`], [`CmError::PrivateDataTooLong`].
    fn accept(&mut self, id: CmId, param: &ConnParam) -> Result<(), CmError>;

    /// Establishes a connection whose queue pair the owner has taken to RTS after
    /// `ConnectResponse`. No event comes for it here.
    ///
    /// # Errors
    /// [`CmError::InvalidState`].
    fn establish(&mut self, id: CmId) -> Result<(), CmError>;

    /// Rejects a connection request, or the answer to one, with private data (reason "consumer
    /// defined").
    ///
    /// # Errors
    /// [`CmError::InvalidState`], [`CmError::PrivateDataTooLong`].
    fn reject(&mut self, id: CmId, private_data: &[u8]) -> Result<(), CmError>;

    /// The same, because the peer's vendor options (enhanced connection establishment) are not
    /// those of this side (IBTA 12.6.7.2, reason 35).
    ///
    /// # Errors
    /// As [`RdmaCm::reject`]; [`CmError::InvalidState`] for a datagram identifier.
    fn reject_ece(&mut self, id: CmId, private_data: &[u8]) -> Result<(), CmError>;

    /// Asks the peer for more time to answer its request.
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`CmError::InvalidState`].
    fn mra(&mut self, id: CmId) -> Result<(), CmError>;

    /// Notifies the CM that data arrived on a connection whose RTU did not; the CM then treats it
    /// as established.
    ///
    /// # Errors
    /// [`CmError::InvalidState`].
    fn notify_established(&mut self, id: CmId) -> Result<(), CmError>;

    /// Takes the queue pair to the error state and notifies the peer. Idempotent.
    ///
    /// # Errors
    /// [`CmError::InvalidState`] before a connection was tried.
    fn disconnect(&mut self, id: CmId) -> Result<(), CmError>;

    /// Proposes an alternate path to the peer, for the connection's queue pair (IBTA 12.8). Before the
    /// identifier connects, its request names the path; on a connection a LAP does. The answer is
    /// `AlternatePath` or `AlternatePathError`. When the peer has agreed, both queue pairs have the
    /// path and are rearmed: they migrate by themselves once packets have armed them, or by
    /// [`Verbs::modify_qp`].
    ///
    /// No user yet.
    ///
    /// # Errors
    /// [`CmError::InvalidState`] while the identifier connects, for one whose queue pair its owner
    /// takes through its states, and while another path is discussed; those of
    /// [`Verbs::modify_qp`] for the path; [`VerbsError::Unsupported`] for a device that has none.
    fn load_alternate_path(&mut self, id: CmId, path: &AltPath) -> Result<(), CmError>;

    /// Joins a multicast group with a datagram identifier that is bound or has resolved an address;
    /// the answer is `MulticastJoin` or `MulticastError`. The event names the group's MGID, to which
    /// the identifier's owner attaches its queue pair; one that only sends needs no more than the
    /// event, and says so by `send_only`.
    ///
    /// # Errors
    /// [`CmError::InvalidState`]; [`CmError::AddressInUse`] for a group that it has joined;
    /// [`VerbsError::InvalidParameter`] for an address that is no group's;
    /// [`CmError::Unreachable`] for one of the other family;
    /// [`VerbsError::InsufficientResources`] beyond [`MAX_GROUPS_PER_ID`].
    fn join_multicast(&mut self, id: CmId, group: IpAddr, send_only: bool) -> Result<(), CmError>;

    /// Leaves a multicast group. No event comes for it.
    ///
    /// # Errors
    /// [`CmError::InvalidState`]; [`CmError::AddressNotAvailable`] for a group that the identifier
    /// has not joined.
    fn leave_multicast(&mut self, id: CmId, group: IpAddr) -> Result<(), CmError>;

    /// Destroys an identifier and ends its operations. It leaves its groups. Its queue pair stays
    /// the caller's to destroy.
    ///
    /// # Errors
    /// [`CmError::InvalidState`] for an id that does not exist.
    fn destroy_id(&mut self, id: CmId) -> Result<(), CmError>;

    /// The local address, once bound.
    fn local_addr(&self, id: CmId) -> Option<std::net::SocketAddr>;

    /// The peer's address, once resolved or requested.
    fn peer_addr(&self, id: CmId) -> Option<std::net::SocketAddr>;

    /// The next event, oldest first.
    fn poll_cm_event(&mut self) -> Option<CmEvent>;
}

/// Descriptors of a device: a sleep asks for them, and allocates nothing for the answer.
pub type EventFds<'a> = ArrayVec<BorrowedFd<'a>, 4>;

/// A device with its connection manager, and how an event loop drives them.
pub trait Provider: Verbs + RdmaCm {
    /// Does what can be done now without waiting: takes in packets or events, fires the timers due
    /// by `now`, sends what is ready. Answers how much it did; 0 means idle.
    fn progress(&mut self, now: Instant) -> usize;

    /// Next time at which [`Provider::progress`] must be called, and events be taken, even if no
    /// descriptor becomes readable. It has come already while an event waits that no descriptor
    /// shows.
    fn deadline(&self) -> Option<Instant>;

    /// Descriptors that become readable when there is something to do, provided that
    /// [`Provider::arm_fds`] was called after the last [`Provider::progress`].
    fn event_fds(&self) -> EventFds<'_>;

    /// Makes the descriptors readable for what has arrived since the last [`Provider::progress`] and
    /// for what arrives later. To be called before each sleep: where a wake-up costs
    /// the peer a system call, it makes one only for a sleeper.
    ///
    /// Returns whether something has come that no descriptor shows, so that the caller must not
    /// sleep.
    #[must_use]
    fn arm_fds(&mut self) -> bool {
        false
    }
}
