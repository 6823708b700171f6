//! A TCP connection, and the state that it is in.

use std::net::SocketAddr;
use std::time::Instant;

use riser_state::State;
use socket2::Socket;

use crate::rdmap::wire::start::StartFrame;
use crate::verbs::{CmId, QpId};

/// Name of a socket, which is not used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Token(pub(super) u64);

/// State of a TCP connection.
///
/// ```text
/// active                                passive
///
/// Connecting ──TCP──▶ AwaitsReply       AwaitsRequest ──request──▶ Requested
///     │                    │ reply             │                    │ accept
///     │                    ▼                   │                    ▼
///     │                   Open ◀───────────────┼────────────────── Open
///     │                    │ end of ours       │                    │ reject
///     │                    ▼                   │                    ▼
///     └──────────────▶ (closed) ◀──────────────┴─────────────── Closing
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnState {
    /// TCP connects.
    Connecting,
    /// The request was sent.
    AwaitsReply,
    /// The peer is to send its request.
    AwaitsRequest,
    /// The request waits for its user.
    Requested,
    /// The stream belongs to the queue pair.
    Open,
    /// What was made is sent, then the peer is to close.
    Closing,
}

impl State for ConnState {
    fn may_become(&self, next: &Self) -> bool {
        use ConnState::{AwaitsReply, AwaitsRequest, Closing, Connecting, Open, Requested};
        match self {
            Connecting => matches!(next, AwaitsReply),
            AwaitsReply => matches!(next, Open),
            AwaitsRequest => matches!(next, Requested),
            Requested => matches!(next, Open | Closing),
            Open => matches!(next, Closing),
            Closing => false,
        }
    }
}

/// A TCP connection.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) socket: Socket,
    pub(super) state: ConnState,
    pub(super) peer: SocketAddr,
    pub(super) local: SocketAddr,
    /// Its identifier; `None` for a request that has not come, and when that was destroyed.
    pub(super) id: Option<CmId>,
    /// Listener of a connection that awaits its request.
    pub(super) listener: Option<CmId>,
    pub(super) qp: Option<QpId>,
    /// The request, ours or the peer's, until it is answered.
    pub(super) request: Option<StartFrame>,
    /// What has come of the peer's frame.
    pub(super) inbox: Vec<u8>,
    /// What the socket has not taken, from `sent` on.
    pub(super) outbox: Vec<u8>,
    pub(super) sent: usize,
    /// It waits until the socket takes more.
    pub(super) awaits_room: bool,
    /// The last byte of ours was sent.
    pub(super) is_shut: bool,
    /// The first message of the peer establishes the connection.
    pub(super) awaits_first: bool,
    /// Time at which it is given up.
    pub(super) due: Option<Instant>,
}

impl Conn {
    pub(super) fn new(
        socket: Socket,
        state: ConnState,
        local: SocketAddr,
        peer: SocketAddr,
    ) -> Self {
        Self {
            socket,
            state,
            peer,
            local,
            id: None,
            listener: None,
            qp: None,
            request: None,
            inbox: Vec::new(),
            outbox: Vec::new(),
            sent: 0,
            awaits_room: false,
            is_shut: false,
            awaits_first: false,
            due: None,
        }
    }

    /// Whether something waits to be taken by the socket.
    pub(super) fn has_output(&self) -> bool {
        self.sent < self.outbox.len()
    }
}

#[cfg(test)]
mod tests {
    use riser_state::testing::table;

    use super::ConnState::{AwaitsReply, AwaitsRequest, Closing, Connecting, Open, Requested};
    use super::*;

    #[test]
    fn states_are_those_of_the_diagram() {
        let all: [ConnState; 6] = [
            Connecting,
            AwaitsReply,
            AwaitsRequest,
            Requested,
            Open,
            Closing,
        ];
        let rows = table(&all);
        assert_eq!(
            rows,
            "Connecting: AwaitsReply\nAwaitsReply: Open\nAwaitsRequest: Requested\n\
             Requested: Open Closing\nOpen: Closing\nClosing: \n"
        );
    }
}
