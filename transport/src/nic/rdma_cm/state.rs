//! States of an RDMA CM identifier.

use riser_state::State;

/// State of an id, based on the calls of librdmacm.
///
/// ```text
/// active                                        passive
///
///  Idle ──bind_addr──▶ Bound ──listen──▶ Listening
///    │                  │                   ┊ a request creates an identifier
///    └───resolve_addr───┤                   ▼
///                       ▼               Requested ──reject──▶ Closed
///                  AddrResolved             │ accept
///                       │ resolve_route     ▼            (datagrams: Established)
///                       ▼               Accepting
///                  RouteResolved            │ RTU or first packet
///                       │ connect           │
///                       ▼     REP           ▼
///       Responded ◀─Connecting ────────▶ Established
///                       │                   │ disconnect      │ DREQ
///                       │ REJ, timeout      ▼                 │
///                       │              Disconnecting          │
///                       │                   │ DREP, timeout   │
///                       └───────────────────┴──▶ Closed ◀─────┘
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdState {
    /// Created, but not used yet.
    Idle,
    /// Has a local address.
    Bound,
    /// Has the peer address.
    AddrResolved,
    /// The path is known, ready to connect.
    RouteResolved,
    /// Listening for connection requests.
    Listening,
    /// Request sent, waiting for a reply.
    Connecting,
    /// Accepted by the peer, waiting for the application that manages the QP.
    Responded,
    /// Created for a received request, waiting for the application to accept it.
    Requested,
    /// Request accepted, waiting for the peer to confirm.
    Accepting,
    /// Connection established.
    Established,
    /// Disconnect request sent.
    Disconnecting,
    /// The connection is closed, or was never established.
    Closed,
}

impl State for IdState {
    fn may_become(&self, next: &Self) -> bool {
        use IdState::{
            Accepting, AddrResolved, Bound, Closed, Connecting, Disconnecting, Established, Idle,
            Listening, Requested, Responded, RouteResolved,
        };
        match self {
            // You don't need an address to listen on a bare service id.
            Idle => matches!(next, Bound | AddrResolved | Listening),
            Bound => matches!(next, AddrResolved | Listening),
            AddrResolved => matches!(next, RouteResolved),
            RouteResolved => matches!(next, Connecting),
            // We send a new request if the peer needs a smaller path MTU, or redirects it.
            Connecting => matches!(next, Connecting | Responded | Established | Closed),
            Responded => matches!(next, Established | Closed),
            // Datagram ids don't need to be confirmed by the peer.
            Requested => matches!(next, Accepting | Established | Closed),
            Accepting => matches!(next, Established | Closed),
            Established => matches!(next, Disconnecting | Closed),
            Disconnecting => matches!(next, Closed),
            Listening | Closed => false,
        }
    }
}

impl IdState {
    /// Returns whether an id in this state may still send its first request.
    pub(super) fn precedes_request(self) -> bool {
        use IdState::{AddrResolved, Bound, Idle, RouteResolved};
        matches!(self, Idle | Bound | AddrResolved | RouteResolved)
    }
}
