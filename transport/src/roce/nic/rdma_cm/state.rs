//! The states of an RDMA CM identifier.

use riser_state::State;

/// State of an identifier, in the words of librdmacm's calls.
///
/// ```text
/// active                                        passive
///
///  Idle ──bind_addr──▶ Bound ──listen──▶ Listening
///    │                  │                   ┊ a request makes a new identifier
///    └───resolve_addr───┤                   ▼
///                       ▼               Requested ──reject──▶ Closed
///                  AddrResolved             │ accept
///                       │ resolve_route     ▼            (datagrams: Established)
///                       ▼               Accepting
///                  RouteResolved            │ RTU, or the first packet
///                       │ connect           │
///                       ▼     REP           ▼
///       Responded ◀─Connecting ────────▶ Established
///                       │                   │ disconnect      │ DREQ
///                       │ REJ, time-out     ▼                 │
///                       │              Disconnecting          │
///                       │                   │ DREP, time-out  │
///                       └───────────────────┴──▶ Closed ◀─────┘
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdState {
    /// Created, and not used yet.
    Idle,
    /// Has a local address.
    Bound,
    /// Has the peer's address.
    AddrResolved,
    /// Knows the path; may connect.
    RouteResolved,
    /// Listens for connection requests.
    Listening,
    /// A request was sent, and not answered.
    Connecting,
    /// The peer has accepted, and the owner of the queue pair has a part of its own to do.
    Responded,
    /// Made by a request that has not been answered.
    Requested,
    /// Accepted a request; the peer has not confirmed.
    Accepting,
    /// The connection is established.
    Established,
    /// Asked the peer to disconnect.
    Disconnecting,
    /// The connection is over, or never was.
    Closed,
}

impl State for IdState {
    fn may_become(&self, next: &Self) -> bool {
        use IdState::{
            Accepting, AddrResolved, Bound, Closed, Connecting, Disconnecting, Established, Idle,
            Listening, Requested, Responded, RouteResolved,
        };
        match self {
            // A bare service id is listened on without an address.
            Idle => matches!(next, Bound | AddrResolved | Listening),
            Bound => matches!(next, AddrResolved | Listening),
            AddrResolved => matches!(next, RouteResolved),
            RouteResolved => matches!(next, Connecting),
            // The request is sent again with the path MTU that the peer takes.
            Connecting => matches!(next, Connecting | Responded | Established | Closed),
            Responded => matches!(next, Established | Closed),
            // A datagram identifier waits for no confirmation.
            Requested => matches!(next, Accepting | Established | Closed),
            Accepting => matches!(next, Established | Closed),
            Established => matches!(next, Disconnecting | Closed),
            Disconnecting => matches!(next, Closed),
            Listening | Closed => false,
        }
    }
}
