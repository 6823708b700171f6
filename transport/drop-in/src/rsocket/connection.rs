//! A stream socket: how it gets its connection, and loses it.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::ptr;

use riser_rdma_core_sys::bindings::*;

use super::ident::{Event, Ident, checked};
use super::link::Link;
use super::options::{Defaults, Options};
use super::stream::State;
use super::wire::{CONN_DATA_LEN, ConnData};
use crate::cm::*;
use crate::errno::Errno;

/// Time for resolving an address or a route, in milliseconds.
const RESOLVE_MS: c_int = 2000;

/// Most connection requests of a listener, each of which has a descriptor.
const MAX_BACKLOG: usize = 128;

/// The answer of an attempt that has to wait.
pub(super) const AGAIN: Errno = Errno(libc::EAGAIN);

/// Phase of a stream socket.
///
/// ```text
/// Idle -> Bound -> Listening
///   \       \
///    +-------+-> ResolvingAddr -> ResolvingRoute -> Connecting --+-> Connected
///                                                   Accepting ---+
///                each of the middle row and Accepting -> Failed
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// New.
    Idle,
    /// It has an address.
    Bound,
    /// It takes connection requests.
    Listening,
    /// The peer's address is looked up.
    ResolvingAddr,
    /// The way to the peer is looked up.
    ResolvingRoute,
    /// A connection request is under way.
    Connecting,
    /// The reply to a request is under way.
    Accepting,
    /// There is a stream, which has a state of its own.
    Connected,
    /// There will be no connection.
    Failed(Errno),
}

/// A stream socket.
pub(super) struct Connection {
    phase: Phase,
    /// Before the identifier, whose queue pair it destroys.
    link: Option<Link>,
    pub(super) ident: Ident,
    pub(super) options: Options,
    /// Connection requests that the program has not accepted, with the peer's connection data.
    requests: VecDeque<(Ident, ConnData)>,
    /// Most of these; the next ones stay with the connection manager.
    backlog: usize,
    /// `SO_ERROR`.
    pub(super) error: c_int,
}

impl Connection {
    /// A new socket.
    ///
    /// # Errors
    /// Those of [`Ident::new`].
    pub(super) fn new(domain: c_int) -> Result<Self, Errno> {
        let ident = Ident::new(RDMA_PS_TCP)?;
        // SAFETY: the identifier is alive, and no one else has it. A program may ask for the address
        // of a socket that has none.
        unsafe {
            let addr = &raw mut (*ident.id()).route.addr;
            let source: *mut sockaddr = (&raw mut (*addr).__bindgen_anon_1).cast();
            (*source).sa_family = domain as sa_family_t;
        }
        Ok(Self::with(ident, Options::new(&Defaults::get())))
    }

    fn with(ident: Ident, options: Options) -> Self {
        Self {
            phase: Phase::Idle,
            link: None,
            ident,
            options,
            requests: VecDeque::new(),
            backlog: 0,
            error: 0,
        }
    }

    /// `rbind`.
    ///
    /// # Errors
    /// Those of `rdma_bind_addr(3)`.
    ///
    /// # Safety
    /// As for `rdma_bind_addr(3)`.
    pub(super) unsafe fn bind(&mut self, addr: *const sockaddr) -> Result<(), Errno> {
        if self.phase != Phase::Idle {
            return Err(Errno::INVALID);
        }
        // SAFETY: as the caller promises.
        unsafe { checked(rdma_bind_addr(self.ident.id(), addr.cast_mut())) }?;
        self.phase = Phase::Bound;
        Ok(())
    }

    /// `rlisten`.
    ///
    /// # Errors
    /// `EINVAL` for a socket that has a connection; those of `rdma_listen(3)`.
    pub(super) fn listen(&mut self, backlog: c_int) -> Result<(), Errno> {
        match self.phase {
            Phase::Listening => return Ok(()),
            Phase::Idle | Phase::Bound => {}
            _ => return Err(Errno::INVALID),
        }
        // SAFETY: the identifier is alive.
        unsafe { checked(rdma_listen(self.ident.id(), backlog)) }?;
        self.phase = Phase::Listening;
        let backlog = usize::try_from(backlog).unwrap_or(0);
        self.backlog = backlog.clamp(1, MAX_BACKLOG);
        Ok(())
    }

    /// Begins to connect. [`Self::progress`] goes on with it.
    ///
    /// # Errors
    /// Those of `connect(2)` by the socket's phase, and those of `rdma_resolve_addr(3)`.
    ///
    /// # Safety
    /// As for `rdma_resolve_addr(3)`.
    pub(super) unsafe fn connect(&mut self, addr: *const sockaddr) -> Result<(), Errno> {
        match self.phase {
            Phase::Idle | Phase::Bound => {}
            Phase::Connected => return Err(Errno(libc::EISCONN)),
            Phase::Listening => return Err(Errno::UNSUPPORTED),
            Phase::Failed(errno) => return Err(errno),
            _ => return Err(Errno(libc::EALREADY)),
        }
        let id = self.ident.id();
        let addr = addr.cast_mut();
        // SAFETY: as the caller promises.
        checked(unsafe { rdma_resolve_addr(id, ptr::null_mut(), addr, RESOLVE_MS) })?;
        self.phase = Phase::ResolvingAddr;
        Ok(())
    }

    /// Outcome of connecting: `EAGAIN` while there is none.
    ///
    /// # Errors
    /// `EAGAIN`, `ENOTCONN` for a socket that does not connect, and why it has failed.
    pub(super) fn outcome(&self) -> Result<(), Errno> {
        match self.phase {
            Phase::Connected => Ok(()),
            Phase::Failed(errno) => Err(errno),
            Phase::Idle | Phase::Bound | Phase::Listening => Err(Errno(libc::ENOTCONN)),
            _ => Err(AGAIN),
        }
    }

    /// Whether there is a peer.
    ///
    /// # Errors
    /// `ENOTCONN` where there is none.
    pub(super) fn has_peer(&self) -> Result<(), Errno> {
        match self.phase {
            Phase::Connected | Phase::Accepting => Ok(()),
            _ => Err(Errno(libc::ENOTCONN)),
        }
    }

    /// Next connection request, as a socket of its own.
    ///
    /// # Errors
    /// `EAGAIN` without one, `EINVAL` for a socket that does not listen.
    pub(super) fn accept(&mut self) -> Result<Self, Errno> {
        if self.phase != Phase::Listening {
            return Err(Errno::INVALID);
        }
        loop {
            let (ident, peer) = self.requests.pop_front().ok_or(AGAIN)?;
            let mut new = Self::with(ident, self.options.inherited());
            // A request that cannot be accepted is the peer's loss: the next one is due.
            match new.reply(peer) {
                Ok(()) => return Ok(new),
                Err(Errno(errno)) => tracing::warn!("a connection is refused: error {errno}"),
            }
        }
    }

    fn reply(&mut self, peer: ConnData) -> Result<(), Errno> {
        let mut link = Link::new(&self.ident, self.options.sizes())?;
        link.begin(peer);
        self.ident.connect(&link.conn_data().encode(), true)?;
        self.link = Some(link);
        self.phase = Phase::Accepting;
        Ok(())
    }

    /// Handles what has happened. Answers whether an event of the connection manager was taken,
    /// of which other threads do not hear.
    pub(super) fn progress(&mut self) -> bool {
        if self.phase == Phase::Connected {
            self.link().progress();
            return false;
        }
        let mut is_taken = false;
        // Strangers can make events without end; those that are left keep the descriptor readable.
        for _ in 0..MAX_BACKLOG {
            if self.phase == Phase::Listening && self.requests.len() >= self.backlog {
                break;
            }
            let Some(event) = self.ident.next_event() else {
                break;
            };
            is_taken = true;
            self.handle_event(event);
            if self.phase == Phase::Connected {
                // A caller that waits has armed nothing yet.
                self.link().completions.arm();
                self.link().progress();
                break;
            }
        }
        is_taken
    }

    fn handle_event(&mut self, event: Event) {
        let result = match (self.phase, event.kind) {
            (Phase::Listening, RDMA_CM_EVENT_CONNECT_REQUEST) => {
                self.on_request(event);
                Ok(())
            }
            (Phase::ResolvingAddr, RDMA_CM_EVENT_ADDR_RESOLVED) => {
                self.phase = Phase::ResolvingRoute;
                // SAFETY: the identifier is alive.
                unsafe { checked(rdma_resolve_route(self.ident.id(), RESOLVE_MS)) }
            }
            (Phase::ResolvingRoute, RDMA_CM_EVENT_ROUTE_RESOLVED) => self.request(),
            (Phase::Connecting, RDMA_CM_EVENT_ESTABLISHED) => self.on_reply(&event.data),
            (Phase::Accepting, RDMA_CM_EVENT_ESTABLISHED) => {
                self.phase = Phase::Connected;
                Ok(())
            }
            (Phase::Idle | Phase::Bound | Phase::Listening | Phase::Failed(_), _) => Ok(()),
            (_, RDMA_CM_EVENT_REJECTED) => Err(Errno(libc::ECONNREFUSED)),
            (_, RDMA_CM_EVENT_UNREACHABLE) => Err(Errno(libc::ETIMEDOUT)),
            (_, RDMA_CM_EVENT_DISCONNECTED) => Err(Errno(libc::ECONNRESET)),
            (_, RDMA_CM_EVENT_DEVICE_REMOVAL) => Err(Errno(libc::ENODEV)),
            (
                _,
                RDMA_CM_EVENT_ADDR_ERROR | RDMA_CM_EVENT_ROUTE_ERROR | RDMA_CM_EVENT_CONNECT_ERROR,
            ) => Err(match event.status.abs() {
                0 => Errno(libc::EHOSTUNREACH),
                errno => Errno(errno),
            }),
            _ => Ok(()),
        };
        if let Err(errno) = result {
            self.phase = Phase::Failed(errno);
            self.error = errno.0;
        }
    }

    /// Keeps a request for the program. One that is no rsocket's is refused.
    fn on_request(&mut self, event: Event) {
        let peer = ConnData::decode(&event.data);
        let Ok(ident) = Ident::adopt(event.id) else {
            return;
        };
        match peer {
            Some(peer) => self.requests.push_back((ident, peer)),
            // SAFETY: the identifier is alive.
            None => unsafe {
                rdma_reject(ident.id(), ptr::null(), 0);
            },
        }
    }

    /// Sends the connection request.
    fn request(&mut self) -> Result<(), Errno> {
        let link = Link::new(&self.ident, self.options.sizes())?;
        let data: [u8; CONN_DATA_LEN] = link.conn_data().encode();
        self.link = Some(link);
        self.phase = Phase::Connecting;
        self.ident.connect(&data, false)
    }

    fn on_reply(&mut self, data: &[u8]) -> Result<(), Errno> {
        let peer = ConnData::decode(data).ok_or(Errno(libc::EPROTO))?;
        self.link().begin(peer);
        self.phase = Phase::Connected;
        Ok(())
    }

    /// The link of a connected socket.
    ///
    /// # Panics
    /// For a socket that is not connected.
    pub(super) fn link(&mut self) -> &mut Link {
        self.link.as_mut().expect("a connected socket has a link")
    }

    /// The link of a socket that is connected, or will be once the peer has confirmed it.
    ///
    /// # Errors
    /// `ENOTCONN` for another socket.
    pub(super) fn link_for_maps(&mut self) -> Result<&mut Link, Errno> {
        self.has_peer()?;
        Ok(self.link())
    }

    /// Sizes are still open: no queue pair has them.
    pub(super) fn is_open_to_sizes(&self) -> bool {
        self.link.is_none()
    }

    /// Asks for the next event to make [`Self::event_fd`] readable.
    pub(super) fn arm(&mut self) {
        if self.phase == Phase::Connected {
            self.link().completions.arm();
        }
    }

    /// Descriptor that is readable when something has happened.
    pub(super) fn event_fd(&mut self) -> c_int {
        match self.phase {
            Phase::Connected => self.link().completions.fd(),
            _ => self.ident.fd(),
        }
    }

    /// Takes the events that have made it readable. Those of the connection manager are
    /// [`Self::progress`]'s. Answers whether there was one.
    pub(super) fn take_events(&mut self) -> bool {
        self.phase == Phase::Connected && self.link().completions.take_events()
    }

    /// Events for `rpoll`, of those that the program asks for and of those that it gets unasked.
    pub(super) fn revents(&mut self, events: i16) -> i16 {
        let answer = match self.phase {
            Phase::Listening if !self.requests.is_empty() => libc::POLLIN,
            Phase::Failed(_) => libc::POLLIN | libc::POLLOUT | libc::POLLERR,
            Phase::Connected => self.connected_revents(),
            _ => 0,
        };
        answer & (events | libc::POLLERR | libc::POLLHUP)
    }

    fn connected_revents(&mut self) -> i16 {
        let mut answer = 0;
        let can_write = self.link().can_write();
        let stream = self.link().stream();
        if stream.can_read() {
            answer |= libc::POLLIN;
        }
        // The end of writing is no reason to wait either.
        if can_write || !stream.is_write_open() {
            answer |= libc::POLLOUT;
        }
        answer
            | match stream.state() {
                // Programs stop at a hang-up: they read what has come first.
                State::Disconnected if stream.unread() == 0 => libc::POLLHUP,
                State::Failed(_) => libc::POLLERR,
                _ => 0,
            }
    }

    /// Begins to disconnect at the level of the connection manager, which the other end's queue
    /// pair notices.
    pub(super) fn disconnect(&mut self) {
        if self.phase == Phase::Connected {
            // SAFETY: the identifier is alive. It may be disconnected already.
            unsafe { rdma_disconnect(self.ident.id()) };
        }
    }
}
