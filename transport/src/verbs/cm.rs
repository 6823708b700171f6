//! The connection API's types.

use std::net::{IpAddr, SocketAddr};

use thiserror::Error;

use super::{AhAttr, AltPath, CmId, Gid, Mtu, QKey, QpType, VerbsError};

/// Most private data that an RDMA CM user can send in a request, in bytes (92 less the 36-byte
/// address header).
pub const MAX_CONNECT_PRIVATE_DATA: usize = 56;

/// Most private data in an accept, in bytes.
pub const MAX_ACCEPT_PRIVATE_DATA: usize = 196;

/// Most private data in a reject, in bytes.
pub const MAX_REJECT_PRIVATE_DATA: usize = 148;

/// Most private data in a request of a datagram identifier, in bytes (216 less the 36-byte address
/// header).
pub const MAX_DATAGRAM_CONNECT_PRIVATE_DATA: usize = 180;

/// Most private data in the answer to such a request, accept or reject, in bytes.
pub const MAX_DATAGRAM_ANSWER_PRIVATE_DATA: usize = 136;

/// Q_Key of datagram identifiers that ask for no other (`RDMA_UDP_QKEY` of Linux).
pub const DATAGRAM_QKEY: QKey = QKey(0x0123_4567);

/// Number of the queue pair that datagrams to a multicast group name (IBTA 10.5).
pub const MULTICAST_QPN: u32 = 0x00ff_ffff;

/// Multicast groups that an identifier may be in at a time.
pub const MAX_GROUPS_PER_ID: usize = 64;

/// MGID of a multicast group: on RoCEv2 its IPv6 address, or its IPv4 address mapped into one, as
/// for any GID (Linux: `cma_iboe_set_mgid`). `None` for an address that is no group's.
///
/// ```
/// # use riser_transport::verbs::mgid;
/// assert_eq!(mgid([239, 1, 2, 3].into()).unwrap().to_string(), "::ffff:239.1.2.3");
/// assert_eq!(mgid([192, 0, 2, 1].into()), None);
/// ```
#[must_use]
pub fn mgid(group: IpAddr) -> Option<Gid> {
    let group = group.to_canonical();
    group.is_multicast().then(|| group.into())
}

/// Range of service ids that an identifier's ports map to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PortSpace {
    /// Reliable connections: service id `0x0000000001060000 | port`.
    Tcp,
    /// Datagrams: `0x0000000001110000 | port`.
    Udp,
    /// Datagrams of IP over InfiniBand: `0x0000000000020000 | port`.
    IpoIb,
    /// Any transport service, by IP address and port: `0x00000000013f0000 | port`.
    IbIp,
    /// A bare InfiniBand service id, with no address header in the private data.
    Ib {
        /// ServiceID of 64 bits.
        service_id: u64,
        /// Bits of it that a listener compares.
        mask: u64,
    },
}

impl PortSpace {
    /// Type of the queue pairs of identifiers that are created without naming one.
    #[must_use]
    pub const fn qp_type(self) -> QpType {
        match self {
            Self::Udp | Self::IpoIb => QpType::Ud,
            Self::Tcp | Self::IbIp | Self::Ib { .. } => QpType::Rc,
        }
    }
}

/// Options of an identifier (`rdma_set_option`, level `RDMA_OPTION_ID`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CmOption {
    /// Type of service of what the identifier sends from now on: the traffic class of its messages
    /// and, from the time that it is connected, of its queue pair's packets. The low two bits
    /// belong to congestion notification (RFC 3168) and are ignored. The request carries it, and
    /// the peer answers with it.
    TypeOfService(u8),
    /// The local port may have several owners that all say so, until one of them listens. May be
    /// set until the identifier listens, and be taken back before it is bound.
    ReuseAddress(bool),
    /// The unspecified address of IPv6 stands for addresses of IPv6 only. May be set until the
    /// identifier has resolved an address or listens. Off without it; on for IPv4.
    AddressFamilyOnly(bool),
    /// Requests have no address header in their private data, all of which is the user's then; the
    /// peer learns no port. A listener and those who connect to it must agree. So do identifiers of
    /// Linux that have addresses of `AF_IB`. May be set until the identifier is bound.
    BareRequests(bool),
    /// Largest path MTU that a request asks for. May be set until the identifier connects.
    PathMtu(Mtu),
    /// ACK timeout of the connection's queue pairs: 4.096 µs × 2ⁿ, *n* up to 31. For reliable
    /// connections, before they are made. With iWARP, where eight times that is less than
    /// [`PEER_TIME`](crate::iwarp::PEER_TIME), an idle connection does not notice that its peer is gone.
    AckTimeout(u8),
    /// The peer may load an alternate path, with its request or later (IBTA 12.8). Without it such a
    /// path is refused: the peer names an address to which our packets go after a migration. A
    /// listener's requests have the listener's. rdma-core has no such option.
    AlternatePaths(bool),
}

/// Vendor options of a queue pair, which both sides exchange when they connect (enhanced connection
/// establishment). The software NIC has none of its own: its queue pairs are 0 here, and what is
/// given is for queue pairs that their owners take through their states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ece {
    /// IEEE identifier (OUI) of the vendor, 24 bits; 0 for no options.
    pub vendor_id: u32,
    /// The vendor's options.
    pub options: u32,
}

/// Parameters that both sides exchange when they connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnParam {
    /// The user's private data.
    pub private_data: Vec<u8>,
    /// Incoming READs and atomics that we hold at once.
    pub responder_resources: u8,
    /// Outgoing READs and atomics that we want at once.
    pub initiator_depth: u8,
    /// We answer with end-to-end credits.
    pub flow_control: bool,
    /// Retries after a timeout, up to 7; a request carries it for the peer to use.
    pub retry_count: u8,
    /// Retries after RNR, 7 without end.
    pub rnr_retry_count: u8,
    /// Our queue pair uses a shared receive queue.
    pub srq: bool,
    /// Number of the queue pair, 24 bits. In an event the peer's, or 0 where a request of a
    /// datagram identifier names none. In a call ours, if the identifier has no queue pair, and
    /// its owner takes one through its states by [`RdmaCm::init_qp_attr`](super::RdmaCm::init_qp_attr).
    pub qp_num: u32,
    /// Vendor options. An answer names the vendor of the request and those of its options that the
    /// other side takes.
    pub ece: Ece,
    /// Datagram identifiers: the Q_Key of the queue pair, the peer's in an event. Without one in
    /// [`RdmaCm::accept`](super::RdmaCm::accept) it is [`DATAGRAM_QKEY`].
    pub qkey: Option<QKey>,
    /// Datagram identifiers, in an event: the way to the queue pair, for
    /// [`Verbs::create_ah`](super::Verbs::create_ah).
    pub ah: Option<AhAttr>,
}

impl Default for ConnParam {
    fn default() -> Self {
        Self {
            private_data: Vec::new(),
            responder_resources: 16,
            initiator_depth: 16,
            flow_control: true,
            retry_count: 7,
            rnr_retry_count: 7,
            srq: false,
            qp_num: 0,
            ece: Ece::default(),
            qkey: None,
            ah: None,
        }
    }
}

/// Something that happened to an identifier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CmEvent {
    /// The identifier; for a connection request, the new one.
    pub id: CmId,
    /// Kind of the event.
    pub kind: CmEventKind,
}

/// The RDMA CM's events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CmEventKind {
    /// The call `resolve_addr` succeeded.
    AddrResolved,
    /// The call `resolve_addr` failed.
    AddrError(CmError),
    /// The call `resolve_route` succeeded.
    RouteResolved,
    /// The call `resolve_route` failed.
    RouteError(CmError),
    /// A peer asks to connect.
    ConnectRequest {
        /// The listener it came to.
        listener: CmId,
        /// The peer's address and port.
        peer: SocketAddr,
        /// Parameters that the peer proposes.
        param: ConnParam,
    },
    /// The peer has accepted the request of an identifier without a queue pair. The owner of the
    /// queue pair takes it to RTS and calls [`RdmaCm::establish`](super::RdmaCm::establish), or
    /// rejects.
    ConnectResponse {
        /// The peer's parameters.
        param: ConnParam,
    },
    /// The peer did not answer, or something failed on the way.
    ConnectError(CmError),
    /// The peer could not be reached: every retry timed out.
    Unreachable,
    /// The peer refused the connection.
    Rejected {
        /// The IB CM's reason (28: by the consumer, 8: no listener …). For a datagram identifier
        /// the status of the SIDR_REP (IBTA 12.11.2.1; 1: no listener, 2: refused), which
        /// librdmacm reports as unreachable.
        reason: u16,
        /// The private data of the refusal.
        private_data: Vec<u8>,
    },
    /// Both sides are connected. The active side has the peer's private data here. Of a datagram
    /// identifier only the active side gets it, with number, Q_Key and address of the queue pair.
    Established {
        /// The peer's parameters; private data is empty on the passive side.
        param: ConnParam,
    },
    /// An alternate path was agreed on, and loaded into the queue pair, whose
    /// [`PathMigState`](super::PathMigState) is REARM. Comes to both sides, behind `Established`
    /// where the request had the path.
    AlternatePath {
        /// The path, seen from here.
        path: AltPath,
    },
    /// The peer has refused an alternate path, or not answered. The connection stays as it was.
    AlternatePathError {
        /// Status of the APR (IBTA 12.8.2), such as 2: not supported, 5: in use already, 8: wrong
        /// GID. `None` without an answer, as from Linux, which has no such messages on RoCE.
        status: Option<u8>,
    },
    /// The connection ended, by either side.
    Disconnected,
    /// The device is going away; destroy everything on it.
    DeviceRemoval,
    /// The queue pair's number may be used again. The last event of a connection that was
    /// established, after `Disconnected`.
    TimewaitExit,
    /// The call `join_multicast` succeeded.
    MulticastJoin {
        /// Parameters for datagrams to the group: the way, whose GID is the group's MGID, the
        /// number [`MULTICAST_QPN`] and the Q_Key.
        param: ConnParam,
    },
    /// A group could not be joined, or is lost.
    MulticastError(CmError),
}

/// Reason why a connection call or a connection failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CmError {
    /// The identifier does not exist or is not in a state for this.
    #[error("connection identifier is not in a state for {0}")]
    InvalidState(&'static str),
    /// More identifiers than the device allows.
    #[error("too many connection identifiers")]
    TooManyIds,
    /// Something else is bound to that address and port.
    #[error("address in use")]
    AddressInUse,
    /// The address is not this device's.
    #[error("address not available on this device")]
    AddressNotAvailable,
    /// An IPv6 link-local address, which names no host without an interface.
    #[error("link-local addresses are not supported: use a global or unique local one")]
    LinkLocal,
    /// The destination's family or scope cannot be reached from this device.
    #[error("destination cannot be reached from this device")]
    Unreachable,
    /// More private data than the message has room for.
    #[error("private data is {len} bytes, {max} at most")]
    PrivateDataTooLong {
        /// Number of bytes given.
        len: usize,
        /// Number of bytes that fit.
        max: usize,
    },
    /// No answer in time.
    #[error("timed out")]
    Timeout,
    /// The queue pair or the device refused.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
}
