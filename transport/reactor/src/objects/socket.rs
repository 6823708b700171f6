//! Sockets in memory: what a ring has of them, and what the network has.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use super::lock;

/// Bytes that a socket takes in each direction, as long as its peer sets nothing else.
const ROOM: usize = 256 << 10;

/// Connections that wait to be accepted.
const BACKLOG: usize = 256;

/// A connected socket, as operations of a ring use it. The last clone closes it.
#[derive(Debug, Clone)]
pub struct Socket {
    shared: Arc<Mutex<State>>,
    /// Only held: [`Closing`] notes the end of the last clone.
    _closing: Arc<Closing>,
    peer: SocketAddr,
}

/// The network's end of a connection: bytes arrive at the socket, and leave it, when this says so.
#[derive(Debug, Clone)]
pub struct Peer {
    shared: Arc<Mutex<State>>,
    address: SocketAddr,
}

#[derive(Debug)]
struct Closing(Arc<Mutex<State>>);

impl Drop for Closing {
    fn drop(&mut self) {
        lock(&self.0).is_shut = true;
    }
}

#[derive(Debug)]
struct State {
    inbound: VecDeque<u8>,
    inbound_room: usize,
    /// The peer has ended its direction of the stream.
    is_ended: bool,
    outbound: VecDeque<u8>,
    outbound_room: usize,
    /// This end is shut down, in both directions.
    is_shut: bool,
    /// The connection is broken, with this error number.
    broken: Option<i32>,
    /// Number of arrivals, for polls that report each.
    arrivals: u64,
}

impl Socket {
    /// A connected socket without a listener, and the network's end of it.
    #[must_use]
    pub fn connected(peer: SocketAddr) -> (Self, Peer) {
        let shared = Arc::new(Mutex::new(State {
            inbound: VecDeque::new(),
            inbound_room: ROOM,
            is_ended: false,
            outbound: VecDeque::new(),
            outbound_room: ROOM,
            is_shut: false,
            broken: None,
            arrivals: 0,
        }));
        let socket = Self {
            _closing: Arc::new(Closing(Arc::clone(&shared))),
            shared: Arc::clone(&shared),
            peer,
        };
        let far = Peer {
            shared,
            address: peer,
        };
        (socket, far)
    }

    /// Address of its peer.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    pub(crate) fn shut_down(&self) {
        lock(&self.shared).is_shut = true;
    }

    /// Whether a receive of at least `least` bytes, and one at most, would end now.
    pub(crate) fn is_readable(&self, least: usize) -> bool {
        let state = lock(&self.shared);
        state.inbound.len() >= least || state.is_ended || state.is_shut || state.broken.is_some()
    }

    /// Whether a send would move bytes, or fail, now.
    pub(crate) fn is_writable(&self) -> bool {
        let state = lock(&self.shared);
        state.outbound.len() < state.outbound_room || state.is_shut || state.broken.is_some()
    }

    /// Takes up to `most` bytes that have arrived, or the error of the connection.
    pub(crate) fn receive(&self, most: usize) -> Result<Vec<u8>, i32> {
        let mut state = lock(&self.shared);
        if let Some(errno) = state.broken {
            return Err(errno);
        }
        let len = most.min(state.inbound.len());
        Ok(state.inbound.drain(..len).collect())
    }

    /// Sends as many bytes as there is room for; returns their number.
    pub(crate) fn send(&self, bytes: &[u8]) -> Result<usize, i32> {
        let mut state = lock(&self.shared);
        if let Some(errno) = state.broken {
            return Err(errno);
        }
        if state.is_shut {
            return Err(libc::EPIPE);
        }
        let room = state.outbound_room.saturating_sub(state.outbound.len());
        let len = room.min(bytes.len());
        state.outbound.extend(&bytes[..len]);
        Ok(len)
    }

    pub(crate) fn arrivals(&self) -> u64 {
        lock(&self.shared).arrivals
    }
}

impl Peer {
    /// Address of this end.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Bytes arrive at the socket, as far as its buffer takes them; returns their number. What was
    /// shut down takes none.
    pub fn deliver(&self, bytes: &[u8]) -> usize {
        let mut state = lock(&self.shared);
        if state.is_shut || state.broken.is_some() {
            return 0;
        }
        let room = state.inbound_room.saturating_sub(state.inbound.len());
        let len = room.min(bytes.len());
        state.inbound.extend(&bytes[..len]);
        state.arrivals += u64::from(len > 0);
        len
    }

    /// Takes up to `most` bytes that the socket has sent.
    #[must_use]
    pub fn take(&self, most: usize) -> Vec<u8> {
        let mut state = lock(&self.shared);
        let len = most.min(state.outbound.len());
        state.outbound.drain(..len).collect()
    }

    /// Bytes that the socket has sent and that the peer has not taken.
    #[must_use]
    pub fn sent(&self) -> usize {
        lock(&self.shared).outbound.len()
    }

    /// Sets the sizes of the socket's buffers in bytes: one of zero makes it full.
    pub fn set_room(&self, inbound: usize, outbound: usize) {
        let mut state = lock(&self.shared);
        (state.inbound_room, state.outbound_room) = (inbound, outbound);
    }

    /// The peer ends its direction: the end of the stream arrives.
    pub fn close(&self) {
        let mut state = lock(&self.shared);
        state.is_ended = true;
        state.arrivals += 1;
    }

    /// The connection breaks with an error number, such as `ECONNRESET` or `ETIMEDOUT`; what is on
    /// the way is lost.
    pub fn break_off(&self, errno: i32) {
        let mut state = lock(&self.shared);
        state.broken = Some(errno);
        state.inbound.clear();
        state.outbound.clear();
        state.arrivals += 1;
    }

    /// Whether the socket has shut down sending, even if sent bytes are still to be taken.
    #[must_use]
    pub fn is_shut(&self) -> bool {
        lock(&self.shared).is_shut
    }

    /// Whether the socket no longer sends, and all that it has sent was taken.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        let state = lock(&self.shared);
        state.broken.is_some() || state.is_shut && state.outbound.is_empty()
    }
}

/// A socket that listens, from both sides. Clones are the same one.
#[derive(Debug, Clone)]
pub struct Listener {
    address: SocketAddr,
    waiting: Arc<Mutex<VecDeque<Socket>>>,
}

impl Listener {
    /// A socket that listens at an address.
    #[must_use]
    pub fn new(address: SocketAddr) -> Self {
        Self {
            address,
            waiting: Arc::default(),
        }
    }

    /// Address at which it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// A connection arrives; `None` if too many wait to be accepted.
    #[must_use]
    pub fn connect(&self, peer: SocketAddr) -> Option<Peer> {
        let mut waiting = lock(&self.waiting);
        if waiting.len() >= BACKLOG {
            return None;
        }
        let (socket, far) = Socket::connected(peer);
        waiting.push_back(socket);
        Some(far)
    }

    /// Whether there is another clone of it, such as a process has. If not, those that wait to be
    /// accepted are cut off.
    pub fn is_listening(&self) -> bool {
        let is_listening = Arc::strong_count(&self.waiting) > 1;
        if !is_listening {
            lock(&self.waiting).clear();
        }
        is_listening
    }

    pub(crate) fn is_waiting(&self) -> bool {
        !lock(&self.waiting).is_empty()
    }

    pub(crate) fn accept(&self) -> Option<Socket> {
        lock(&self.waiting).pop_front()
    }
}
