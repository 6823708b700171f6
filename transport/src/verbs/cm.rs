//! Types for the connection API.

use std::net::{IpAddr, SocketAddr};

use thiserror::Error;

use super::{AhAttr, AltPath, CmId, Gid, Mtu, QKey, QpType, VerbsError};

/// Maximum size of private data in a connection request, in bytes (92 minus the 36-byte address
/// header).
pub const MAX_CONNECT_PRIVATE_DATA: usize = 56;

/// Maximum size of private data in an accept, in bytes.
pub const MAX_ACCEPT_PRIVATE_DATA: usize = 196;

/// Maximum size of private data in a reject, in bytes.
pub const MAX_REJECT_PRIVATE_DATA: usize = 148;

/// Maximum size of private data in a datagram request, in bytes (216 minus the 36-byte address
/// header).
pub const MAX_DATAGRAM_CONNECT_PRIVATE_DATA: usize = 180;

/// Maximum size of private data in the response to a datagram request, in bytes.
pub const MAX_DATAGRAM_REPLY_PRIVATE_DATA: usize = 136;

/// Default Q_Key for datagram IDs (`RDMA_UDP_QKEY` in Linux).
pub const DATAGRAM_QKEY: QKey = QKey(0x0123_4567);

/// Queue pair number used to send datagrams to a multicast group (IBTA 10.5).
pub const MULTICAST_QPN: u32 = 0x00ff_ffff;

/// Maximum number of multicast groups an ID can join.
pub const MAX_GROUPS_PER_ID: usize = 64;

/// Returns the MGID of a multicast group. On RoCEv2, this is the IPv6 address or the IPv4-mapped
/// address, as for any GID (`cma_iboe_set_mgid` in Linux). Returns `None` if this is not a
/// multicast address.
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

/// Port space, which determines how ports are mapped to service IDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PortSpace {
    /// Reliable connections: service ID `0x0000000001060000 | port`.
    Tcp,
    /// Datagrams: `0x0000000001110000 | port`.
    Udp,
    /// Datagrams for IP over InfiniBand: `0x0000000000020000 | port`.
    IpoIb,
    /// Any transport service, using IP address and port: `0x00000000013f0000 | port`.
    IbIp,
    /// InfiniBand service ID without an address header in the private data.
    Ib {
        /// Service ID, 64 bits.
        service_id: u64,
        /// Bits to be compared by a listener.
        mask: u64,
    },
}

impl PortSpace {
    /// Returns the default queue pair type for IDs in this port space.
    #[must_use]
    pub const fn qp_type(self) -> QpType {
        match self {
            Self::Udp | Self::IpoIb => QpType::Ud,
            Self::Tcp | Self::IbIp | Self::Ib { .. } => QpType::Rc,
        }
    }
}

/// ID options (`rdma_set_option`, level `RDMA_OPTION_ID`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CmOption {
    /// Type of service for all data sent after this: the traffic class for messages, and for
    /// packets from the queue pair after it is connected. The low two bits are ignored because they
    /// are used for congestion notification (RFC 3168). The value is sent in the request and also
    /// used by the peer.
    TypeOfService(u8),
    /// Allows the local port to be shared by multiple IDs that all set this option, until one of
    /// them is listening. Can be set before the ID is listening and cleared before it is bound.
    ReuseAddress(bool),
    /// If set, the unspecified IPv6 address only includes IPv6 addresses. Can be set before the ID
    /// has resolved an address or is listening. Disabled by default, but always enabled for IPv4.
    AddressFamilyOnly(bool),
    /// If set, requests don't contain an address header and all private data is available to the
    /// user, but the peer doesn't get the port. This must match between a listener and its peers.
    /// On Linux, this is used for IDs with `AF_IB` addresses. Can be set before the ID is bound.
    BareRequests(bool),
    /// Maximum path MTU to request. Can be set before connecting.
    PathMtu(Mtu),
    /// ACK timeout for the connection's queue pairs: 4.096 µs × 2ⁿ, *n* up to 31. Only for reliable
    /// connections, and must be set before the queue pairs are created. With iWARP, if eight times
    /// this value is less than [`PEER_TIME`](crate::iwarp::PEER_TIME), an idle connection doesn't
    /// detect that its peer is down.
    AckTimeout(u8),
    /// Allows the peer to load an alternate path, either in its request or later (IBTA 12.8). This
    /// is rejected by default, as the peer can specify an address to which our packets are sent
    /// after a migration. Requests use the option of their listener. There is no such option in
    /// rdma-core.
    AlternatePaths(bool),
    /// Maximum number of redirections to follow while connecting: if the peer rejects the request
    /// and specifies another port (IBTA 12.6.7.2, reasons 24 and 25), the request is sent to that
    /// port instead, and [`RdmaCm::peer_addr`](super::RdmaCm::peer_addr) returns its address. By
    /// default, this is 0 and the ID is rejected with this reason, as on Linux. Can be set before
    /// connecting. There is no such option in rdma-core.
    Redirects(u8),
}

/// Vendor options of a queue pair, which are exchanged when connecting (enhanced connection
/// establishment). The software NIC has no options, so this is always 0 for its queue pairs.
/// Options set here are for queue pairs whose states are managed by their owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ece {
    /// IEEE vendor ID (OUI), 24 bits, or 0 for no options.
    pub vendor_id: u32,
    /// Vendor-specific options.
    pub options: u32,
}

/// Parameters exchanged when connecting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnParam {
    /// Private data.
    pub private_data: Vec<u8>,
    /// Maximum number of incoming READs and atomics.
    pub responder_resources: u8,
    /// Maximum number of outgoing READs and atomics.
    pub initiator_depth: u8,
    /// Enables end-to-end credits.
    pub flow_control: bool,
    /// Retry count for timeouts, up to 7, sent to the peer in a request.
    pub retry_count: u8,
    /// Retry count for RNR NAKs; 7 means unlimited.
    pub rnr_retry_count: u8,
    /// Set if our queue pair uses a shared receive queue.
    pub srq: bool,
    /// Queue pair number, 24 bits. In an event, this is the peer's, or 0 for the request of a
    /// datagram ID. In a call, this is our number if the ID has no queue pair and its owner manages
    /// the states using [`RdmaCm::init_qp_attr`](super::RdmaCm::init_qp_attr).
    pub qp_num: u32,
    /// Vendor options. A response contains the vendor ID from the request and the options supported
    /// by both sides.
    pub ece: Ece,
    /// For datagram IDs: Q_Key of the queue pair, in an event that of the peer.
    /// [`RdmaCm::accept`](super::RdmaCm::accept) uses [`DATAGRAM_QKEY`] by default.
    pub qkey: Option<QKey>,
    /// For datagram IDs, in an event: address of the queue pair, to be used with
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

/// Event for a CM ID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CmEvent {
    /// CM ID. This is a new ID for a connection request.
    pub id: CmId,
    /// Event type.
    pub kind: CmEventKind,
}

/// RDMA CM event types.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CmEventKind {
    /// `resolve_addr` was successful.
    AddrResolved,
    /// `resolve_addr` has failed.
    AddrError(CmError),
    /// `resolve_route` was successful.
    RouteResolved,
    /// `resolve_route` has failed.
    RouteError(CmError),
    /// Connection request from a peer.
    ConnectRequest {
        /// Listener that received the request.
        listener: CmId,
        /// Peer address and port.
        peer: SocketAddr,
        /// Parameters proposed by the peer.
        param: ConnParam,
    },
    /// The peer has accepted the request for an ID without a queue pair. The owner of the queue
    /// pair must set its state to RTS and call [`RdmaCm::establish`](super::RdmaCm::establish), or
    /// reject the connection.
    ConnectResponse {
        /// Parameters from the peer.
        param: ConnParam,
    },
    /// There was no response from the peer, or a different error occurred.
    ConnectError(CmError),
    /// The peer could not be reached because all retries timed out.
    Unreachable,
    /// The connection was rejected by the peer.
    Rejected {
        /// Reason from the IB CM (28: rejected by the consumer, 8: no listener …). For a datagram
        /// ID, this is the status in the SIDR_REP (IBTA 12.11.2.1; 1: no listener, 2: rejected),
        /// which is reported as unreachable by librdmacm.
        reason: u16,
        /// Private data in the REJ.
        private_data: Vec<u8>,
    },
    /// The connection is established. On the active side, this contains the peer's private data.
    /// For a datagram ID, only the active side gets this event, with the number, Q_Key and address
    /// of the queue pair.
    Established {
        /// Parameters from the peer. The private data is empty on the passive side.
        param: ConnParam,
    },
    /// An alternate path was accepted and loaded into the queue pair, whose
    /// [`PathMigState`](super::PathMigState) is now REARM. This event is sent to both sides, and
    /// follows `Established` if the path was specified in the request.
    AlternatePath {
        /// Path as seen from our side.
        path: AltPath,
    },
    /// The alternate path was rejected or there was no response. The connection is not affected.
    AlternatePathError {
        /// APR status (IBTA 12.8.2), for example 2: not supported, 5: already in use, 8: invalid
        /// GID. `None` if there was no response, as with Linux, which doesn't support this on RoCE.
        status: Option<u8>,
    },
    /// The connection was closed by either side.
    Disconnected,
    /// The device is being removed. All of its objects must be destroyed.
    DeviceRemoval,
    /// The queue pair number can be reused. This is the last event for an established connection,
    /// following `Disconnected`.
    TimewaitExit,
    /// `join_multicast` was successful.
    MulticastJoin {
        /// Parameters for sending to the group: an address with the MGID, the queue pair number
        /// [`MULTICAST_QPN`] and the Q_Key.
        param: ConnParam,
    },
    /// Joining the group has failed, or the membership was lost.
    MulticastError(CmError),
}

/// Error for a connection or a connection call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CmError {
    /// The ID doesn't exist, or the call is not valid in its current state.
    #[error("connection identifier in invalid state for {0}")]
    InvalidState(&'static str),
    /// The maximum number of IDs is exceeded.
    #[error("too many connection identifiers")]
    TooManyIds,
    /// The address and port are already in use.
    #[error("address in use")]
    AddressInUse,
    /// This is not an address of this device.
    #[error("address not available on this device")]
    AddressNotAvailable,
    /// An IPv6 link-local address does not identify a host without an interface.
    #[error("link-local addresses are not supported: use a global or unique local one")]
    LinkLocal,
    /// The destination can't be reached from this device because of its address family or scope.
    #[error("destination cannot be reached from this device")]
    Unreachable,
    /// The private data exceeds the available space in the message.
    #[error("private data too long: {len} bytes, maximum is {max}")]
    PrivateDataTooLong {
        /// Private data size in bytes.
        len: usize,
        /// Maximum size in bytes.
        max: usize,
    },
    /// Timed out waiting for a response.
    #[error("timed out")]
    Timeout,
    /// Error returned by the queue pair or device.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
}
