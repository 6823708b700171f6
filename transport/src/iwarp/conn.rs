//! TCP connections and their state.

use std::net::SocketAddr;
use std::time::Instant;

use riser_state::State;
use socket2::Socket;

use crate::rdmap::wire::start::StartFrame;
use crate::verbs::{CmId, QpId};

/// Unique id of a socket, which is never reused.
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
///     │                    │ closed by us      │                    │ reject
///     │                    ▼                   │                    ▼
///     └──────────────▶ (closed) ◀──────────────┴─────────────── Closing
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnState {
    /// Waiting for the TCP connection to be established.
    Connecting,
    /// Request sent, waiting for the reply.
    AwaitsReply,
    /// Waiting for a request from the peer.
    AwaitsRequest,
    /// Request received, waiting for the application to accept it.
    Requested,
    /// The stream is used by the QP.
    Open,
    /// Sending the remaining data, then waiting for the peer to close the connection.
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

/// TCP connection.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) socket: Socket,
    pub(super) state: ConnState,
    pub(super) peer: SocketAddr,
    pub(super) local: SocketAddr,
    /// Connection id; `None` if the request has not been received yet, or if the id has been
    /// destroyed.
    pub(super) id: Option<CmId>,
    /// Listener of a connection waiting for its request.
    pub(super) listener: Option<CmId>,
    pub(super) qp: Option<QpId>,
    /// The request sent or received, until there is a response.
    pub(super) request: Option<StartFrame>,
    /// Received part of the peer's frame.
    pub(super) inbox: Vec<u8>,
    /// Data not yet accepted by the socket, starting at `sent`.
    pub(super) outbox: Vec<u8>,
    pub(super) sent: usize,
    /// Set if we are waiting for the socket to become writable.
    pub(super) awaits_room: bool,
    /// Set after the last byte has been sent.
    pub(super) is_shut: bool,
    /// Set if the connection is established by the first message from the peer.
    pub(super) awaits_first: bool,
    /// Timeout for the current state.
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

    /// Returns whether there is data waiting to be sent.
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
    fn transitions_match_diagram() {
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
