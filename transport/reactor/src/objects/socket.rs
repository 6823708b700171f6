//! In-memory sockets, as seen by a ring and by the network.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use super::lock;

/// Default buffer size of a socket in each direction, in bytes.
const ROOM: usize = 256 << 10;

/// Maximum number of connections that have not been accepted yet.
const BACKLOG: usize = 256;

/// A connected socket, as used by operations of a ring. Dropping the last clone closes it.
#[derive(Debug, Clone)]
pub struct Socket {
    shared: Arc<Mutex<State>>,
    /// [`Closing`] detects when the last clone is dropped.
    _closing: Arc<Closing>,
    peer: SocketAddr,
}

/// The network's end of a connection. It controls when bytes arrive at the socket, and when they
/// leave it.
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
    /// Set if the peer has closed its direction of the stream.
    is_ended: bool,
    outbound: VecDeque<u8>,
    outbound_room: usize,
    /// Set if this end was shut down in both directions.
    is_shut: bool,
    /// Set to an error number if the connection is broken.
    broken: Option<i32>,
    /// Number of arrivals, for polls that report each arrival.
    arrivals: u64,
}

impl Socket {
    /// Creates a connected socket without a listener. Returns it and the network's end of the
    /// connection.
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

    /// Returns the address of the peer.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    pub(crate) fn shut_down(&self) {
        lock(&self.shared).is_shut = true;
    }

    /// Returns whether a receive of at least `least` bytes would complete immediately.
    pub(crate) fn is_readable(&self, least: usize) -> bool {
        let state = lock(&self.shared);
        state.inbound.len() >= least || state.is_ended || state.is_shut || state.broken.is_some()
    }

    /// Returns whether a send would make progress or fail.
    pub(crate) fn is_writable(&self) -> bool {
        let state = lock(&self.shared);
        state.outbound.len() < state.outbound_room || state.is_shut || state.broken.is_some()
    }

    /// Receives up to `most` bytes, or returns the connection's error.
    pub(crate) fn receive(&self, most: usize) -> Result<Vec<u8>, i32> {
        let mut state = lock(&self.shared);
        if let Some(errno) = state.broken {
            return Err(errno);
        }
        let len = most.min(state.inbound.len());
        Ok(state.inbound.drain(..len).collect())
    }

    /// Sends as many bytes as there is room for. Returns the number of bytes sent.
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
    /// Returns the address of this end.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Delivers bytes to the socket, up to the available space in its buffer. Returns the number of
    /// bytes delivered, which is 0 if the socket was shut down.
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
    pub fn read_bytes(&self, most: usize) -> Vec<u8> {
        let mut state = lock(&self.shared);
        let len = most.min(state.outbound.len());
        state.outbound.drain(..len).collect()
    }

    /// Returns the number of bytes sent by the socket that have not been taken yet.
    #[must_use]
    pub fn sent(&self) -> usize {
        lock(&self.shared).outbound.len()
    }

    /// Sets the sizes of the socket's buffers in bytes. With a size of zero, the buffer is always
    /// full.
    pub fn set_room(&self, inbound: usize, outbound: usize) {
        let mut state = lock(&self.shared);
        (state.inbound_room, state.outbound_room) = (inbound, outbound);
    }

    /// Closes the peer's direction: the socket will see the end of the stream.
    pub fn close(&self) {
        let mut state = lock(&self.shared);
        state.is_ended = true;
        state.arrivals += 1;
    }

    /// Breaks the connection with an error number, such as `ECONNRESET` or `ETIMEDOUT`. Bytes in
    /// transit are lost.
    pub fn break_off(&self, errno: i32) {
        let mut state = lock(&self.shared);
        state.broken = Some(errno);
        state.inbound.clear();
        state.outbound.clear();
        state.arrivals += 1;
    }

    /// Returns whether the socket was shut down, even if some sent bytes have not been taken yet.
    #[must_use]
    pub fn is_shut(&self) -> bool {
        lock(&self.shared).is_shut
    }

    /// Returns whether the socket no longer sends, and all sent bytes were taken.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        let state = lock(&self.shared);
        state.broken.is_some() || state.is_shut && state.outbound.is_empty()
    }
}

/// A listening socket, used by both sides. Clones refer to the same socket.
#[derive(Debug, Clone)]
pub struct Listener {
    address: SocketAddr,
    waiting: Arc<Mutex<VecDeque<Socket>>>,
}

impl Listener {
    /// Creates a socket that listens at an address.
    #[must_use]
    pub fn new(address: SocketAddr) -> Self {
        Self {
            address,
            waiting: Arc::default(),
        }
    }

    /// Returns the local address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Simulates an incoming connection. Returns `None` if the backlog is full.
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

    /// Returns whether another clone of this exists, for example in a process. If not, closes all
    /// connections that have not been accepted.
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
