//! Accept, receive and send using the ring. If there is room in the socket buffer, data is sent
//! directly with a system call.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use riser_memory::sys::{self, SendPiece};
use riser_memory::{MemSlice, Memory};
use riser_reactor::{Completion, Handle, Receive, Ring, SubmitError, Token};

use super::Sockets;
use crate::iscsi::{ChannelConfig, Phase, TcpChannel};
use crate::sessions::budget::counted_address;
use crate::worker::conns::{ConnKey, Conns};
use crate::worker::fabrics::{Fabric, Input, Login, TcpConn};
use crate::worker::gate::{ConnAddrs, Transport};
use crate::worker::listener::TcpListener;
use crate::worker::login_log::Reason;
use crate::worker::slots::{Slots, connections};
use crate::worker::stream::{Sending, Stream};
use crate::worker::{PollGroup, Worker};

/// Token prefix. The next byte is the type of operation.
const ISCSI: u64 = 3 << 56;

/// Receive buffer size in bytes for the full-feature phase of a normal session. Only used after
/// receiving more data than the initial buffer can hold.
const RECEIVE: usize = 128 << 10;

/// Maximum number of bytes to send directly in a round. More data is sent using the ring, so that
/// the worker is not kept busy by an initiator that reads responses very fast.
const AT_ONCE: usize = 1 << 20;

/// Delay for a listener after an accept error, so that a persistent error does not keep the worker
/// busy.
const REST: Duration = Duration::from_millis(100);

/// Type of a ring operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Accept = 0,
    Receive = 1,
    Send = 2,
}

fn token(op: Op, place: usize) -> Token {
    Token(ISCSI | (op as u64) << 48 | place as u64)
}

/// Listening socket with an accept operation in the ring.
#[derive(Debug)]
pub(super) struct Listener {
    handle: Handle,
    address: SocketAddr,
    accepting: bool,
    /// Set if it should be removed when the accept is complete.
    closing: bool,
    /// Set if the accept operation was canceled.
    is_cancelled: bool,
    /// Time of the next accept after an error.
    rests_until: Option<Instant>,
}

impl Listener {
    /// Returns the local address, unless it is being closed.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        (!self.closing).then_some(self.address)
    }

    /// Returns a duplicate of the socket, unless it is being closed.
    pub(super) fn duplicate(&self) -> io::Result<Option<TcpListener>> {
        let Some(address) = self.address() else {
            return Ok(None);
        };
        let socket = self.handle.clone();
        TcpListener { address, socket }.try_clone().map(Some)
    }
}

impl Sockets {
    /// Called at the start of a round.
    pub(in crate::worker) fn begin_round(&mut self) {
        self.at_once = AT_ONCE;
    }

    /// Adds listening sockets and starts accepting connections.
    pub(in crate::worker) fn add(
        &mut self,
        ring: &mut Ring,
        now: Instant,
        sockets: Vec<TcpListener>,
    ) {
        for socket in sockets {
            self.listeners.insert(Listener {
                handle: socket.socket,
                address: socket.address,
                accepting: false,
                closing: false,
                is_cancelled: false,
                rests_until: None,
            });
        }
        self.accept(ring, now);
    }

    /// Removes listeners for addresses that are no longer used.
    pub(in crate::worker) fn close(
        &mut self,
        ring: &mut Ring,
        is_over: impl Fn(SocketAddr) -> bool,
    ) {
        self.listeners.retain(|place, listener| {
            if listener.closing || !is_over(listener.address) {
                return true;
            }
            listener.closing = true;
            // If a connection was accepted before that, it is closed when we process the
            // completion.
            listener.is_cancelled = ring.cancel(token(Op::Accept, place)).is_ok();
            listener.accepting
        });
    }

    /// Stops accepting connections. New connections will wait in the socket queue.
    pub(in crate::worker) fn pause(&mut self, ring: &mut Ring) {
        self.is_paused = true;
        for (place, listener) in &self.listeners {
            if listener.accepting && !listener.closing {
                // If there is no room in the ring, the next connection is still accepted and then
                // closed.
                let _ = ring.cancel(token(Op::Accept, place));
            }
        }
    }

    /// Resumes accepting connections.
    pub(in crate::worker) fn resume(&mut self, ring: &mut Ring, now: Instant) {
        self.is_paused = false;
        self.accept(ring, now);
    }

    /// Submits missing accept operations. If a listener should not accept connections, its
    /// operation is canceled.
    pub(in crate::worker) fn accept(&mut self, ring: &mut Ring, now: Instant) {
        for (place, listener) in &mut self.listeners {
            if listener.closing && !listener.is_cancelled {
                listener.is_cancelled = ring.cancel(token(Op::Accept, place)).is_ok();
            }
            let rests = listener.rests_until.is_some_and(|until| until > now);
            if listener.accepting || listener.closing || rests || self.is_paused {
                continue;
            }
            let submitted = ring.submit_accept(&listener.handle, token(Op::Accept, place));
            listener.accepting = submitted.is_ok();
            listener.rests_until = submitted.is_err().then(|| now + REST);
        }
    }

    /// Returns the time of the next accept after an error.
    pub(in crate::worker) fn deadline(&self) -> Option<Instant> {
        if self.is_paused {
            return None;
        }
        let resting = self.listeners.iter().filter(|(_, l)| !l.accepting);
        resting.filter_map(|(_, l)| l.rests_until).min()
    }

    /// Handles a completed accept. `is_socket` is set if there was a connection. Returns the
    /// listener address unless it is being removed.
    fn end_accept(&mut self, place: usize, now: Instant, is_socket: bool) -> Option<SocketAddr> {
        let listener = self.listeners.get_mut(place)?;
        listener.accepting = false;
        if listener.closing {
            self.listeners.remove(place);
            return None;
        }
        if !is_socket {
            listener.rests_until = Some(now + REST);
        }
        Some(listener.address)
    }
}

impl Conns<Fabric> {
    /// Returns the oldest connection in login phase if there are already `most` of them, or half of
    /// this number from the same address. It has to be closed, so that they can't block new
    /// connections.
    fn surplus_login(&self, address: IpAddr, most: usize) -> Option<ConnKey> {
        let strangers = self.tcps().filter(|(_, _, tcp)| {
            tcp.channel.channel().phase() == Phase::Login && !tcp.socket.is_shut
        });
        let strangers: Vec<_> = strangers
            .map(|(key, conn, _)| (conn.serial(), key, counted_address(conn.peer.ip())))
            .collect();
        let address = counted_address(address);
        let from_there = strangers.iter().filter(|(_, _, ip)| *ip == address);
        // Check the address first: if a host opens too many connections, we should only close its
        // own connections.
        let oldest = if from_there.clone().count() >= most.div_ceil(2) {
            from_there.min_by_key(|(serial, _, _)| *serial)
        } else if strangers.len() >= most {
            strangers.iter().min_by_key(|(serial, _, _)| *serial)
        } else {
            None
        };
        oldest.map(|(_, key, _)| *key)
    }
}

impl PollGroup {
    /// Handles a completion if it is for a socket.
    pub(in crate::worker) fn on_iscsi_completion(&mut self, completion: &mut Completion) -> bool {
        let id = completion.token.0;
        if id & (0xff << 56) != ISCSI {
            return false;
        }
        let place = (id & 0xffff_ffff) as usize;
        match (id >> 48) & 0xff {
            0 => self.on_accepted(place, completion.socket.take()),
            1 => self.on_received(ConnKey(place), completion.result),
            _ => match usize::try_from(completion.result).unwrap_or(0) {
                0 => self.on_send_failed(ConnKey(place)),
                len => self.on_sent(ConnKey(place), len),
            },
        }
        self.drain_dirty();
        true
    }

    fn on_accepted(&mut self, place: usize, socket: Option<Handle>) {
        let is_socket = socket.is_some();
        let Some(listen) = self.sockets.end_accept(place, self.now, is_socket) else {
            return;
        };
        // This was accepted just before the pause, so the initiator will have to connect again.
        let socket = socket.filter(|_| !self.sockets.is_paused);
        if let Some(socket) = socket {
            let peer = socket.peer_addr().ok();
            let refused = self.open_connection(socket, listen).err();
            // Don't add a line to the audit log if the peer has already disconnected.
            if let (Some(error), Some(peer)) = (refused, peer) {
                let addrs = ConnAddrs {
                    transport: Transport::Tcp,
                    listen,
                    peer,
                };
                let (who, reason) = (addrs.nobody(), Reason::OUT_OF_RESOURCES);
                self.logins.refuse(self.now, &who, reason, Some(&error));
            }
        }
        // There is only a single accept at a time, so a large number of new connections only uses
        // one slot for each listener.
        self.sockets.accept(&mut self.ring, self.now);
    }

    fn open_connection(&mut self, socket: Handle, listen: SocketAddr) -> io::Result<()> {
        let most = connections(self.catalog.limits.sessions);
        // Without its own slots in the ring, a connection could wait forever.
        let most = most.min(Slots::of(self.ring.capacity()).connections);
        if self.conns.tcps().count() >= most {
            return Err(io::Error::other("too many connections"));
        }
        // We always send complete batches, so Nagle's algorithm would only delay the last segment
        // of a response until the previous one is acknowledged.
        socket.set_nodelay()?;
        let peer = socket.peer_addr()?;
        if let Some(key) = self.conns.surplus_login(peer.ip(), most / 2) {
            self.shut_down_socket(key);
        }
        let serial = self.conns.take_serial();
        let config = ChannelConfig {
            worker: self.index,
            serial,
            commands: self.catalog.commands,
            data_out_timeout: self.catalog.data_out_timeout,
        };
        let conn = TcpConn {
            channel: TcpChannel::new(config, self.now),
            socket: Stream::new(socket)?,
            login: Login::at(listen),
        };
        let fabric = Fabric::Tcp(Box::new(conn));
        let key = self.conns.insert(serial, peer, fabric);
        self.conns.mark_dirty(key);
        Ok(())
    }

    /// Receives more data, unless the channel is busy.
    pub(super) fn receive_next(&mut self, key: ConnKey) {
        let Some(conn) = self.conns.tcp_mut(key) else {
            return;
        };
        let connection = &mut conn.socket;
        let channel = conn.channel.channel();
        let is_busy = connection.receiving || !connection.unread.is_empty();
        if is_busy || connection.is_shut || !channel.wants_input() {
            return;
        }
        let Some(buffer) = &mut connection.receive else {
            return;
        };
        // We don't do this earlier, because anyone can connect before full-feature phase, and a
        // large number of connections must not use too much memory. The same is true for sessions
        // that send little data. If there is no memory, we continue to use the small buffer.
        if connection.is_filled
            && channel.takes_commands()
            && buffer.len() < RECEIVE
            && let Ok(memory) = Memory::new(RECEIVE)
        {
            *buffer = memory;
        }
        let submitted = self.ring.submit_recv(
            &connection.handle,
            &[buffer.whole()],
            Receive::Some,
            token(Op::Receive, key.0),
        );
        match submitted {
            Ok(()) => connection.receiving = true,
            Err(SubmitError::Full) => self.sockets.stalled.push(key),
            Err(_) => self.shut_down_socket(key),
        }
    }

    fn on_received(&mut self, key: ConnKey, result: i32) {
        let Some(conn) = self.conns.tcp_mut(key) else {
            return;
        };
        conn.socket.receiving = false;
        let Some(len) = usize::try_from(result).ok().filter(|len| *len > 0) else {
            if result == 0 {
                conn.channel.channel_mut().note_closed();
            }
            return self.shut_down_socket(key);
        };
        conn.socket.unread = 0..len;
        let buffer = conn.socket.receive.as_ref();
        conn.socket.is_filled |= buffer.is_some_and(|buffer| buffer.len() == len);
        self.read_on(key);
        self.check_gone(key);
    }

    /// Passes received data to the channel until it stops reading.
    pub(super) fn read_on(&mut self, key: ConnKey) {
        let Some(conn) = self.conns.tcp_mut(key) else {
            return;
        };
        let unread = conn.socket.unread.clone();
        if unread.is_empty() || conn.socket.is_shut || !conn.channel.channel().wants_input() {
            return;
        }
        let Some(mut buffer) = conn.socket.receive.take() else {
            return;
        };
        // The ring has returned its handle with the completion, and gets a new one for the next
        // receive, which is only submitted after everything was read.
        let bytes = buffer.get_mut().expect("no receive is in flight");
        let mut taken = 0;
        self.with_tcp(key, |ch, cx| {
            taken = ch.handle_bytes(cx, &bytes[unread]);
        });
        if let Some(conn) = self.conns.tcp_mut(key) {
            conn.socket.receive = Some(buffer);
            conn.socket.unread.start += taken;
        }
    }

    /// Sends the next batch, if there is one and the previous batch is complete.
    pub(super) fn send_next(&mut self, key: ConnKey) {
        let Some(conn) = self.conns.tcp_mut(key) else {
            return;
        };
        let connection = &mut conn.socket;
        match connection.sending {
            Some(sending) if sending.is_submitted => return,
            Some(_) => return self.submit_rest(key),
            None => {}
        }
        if connection.is_gone || !conn.channel.poll_batch(&mut connection.batch) {
            return;
        }
        let heads = &connection.batch.heads;
        // The size is always a power of two and never decreases, so there are no allocations after
        // a few batches.
        if heads.len() > connection.heads.len() {
            match Memory::new(heads.len().next_power_of_two()) {
                Ok(memory) => connection.heads = memory,
                Err(_) => return self.on_send_failed(key),
            }
        }
        connection.heads.write(0, heads);
        connection.sending = Some(Sending {
            sent: 0,
            is_submitted: false,
        });
        self.submit_rest(key);
    }

    fn submit_rest(&mut self, key: ConnKey) {
        // Send as much as possible with this call, because using the ring takes longer. This allows
        // the initiator to continue immediately.
        while self.sockets.at_once > 0 {
            let Some(conn) = self.conns.tcp_mut(key) else {
                return;
            };
            let connection = &mut conn.socket;
            let Some(sending) = connection.sending.filter(|_| !connection.is_shut) else {
                break;
            };
            let rest = &mut self.slices;
            rest.clear();
            connection.put_rest(sending.sent, rest);
            let result = send_now(&connection.handle, rest);
            rest.clear();
            match result {
                None => break,
                Some(Err(_)) => return self.on_send_failed(key),
                Some(Ok(len)) => {
                    self.sockets.at_once = self.sockets.at_once.saturating_sub(len);
                    if self.note_sent(key, len) {
                        return self.end_send(key);
                    }
                }
            }
        }
        let Some(conn) = self.conns.tcp_mut(key) else {
            return;
        };
        let connection = &mut conn.socket;
        let Some(sending) = connection.sending else {
            return;
        };
        // A part of the batch was sent before the shutdown. We can't send the remaining part.
        if connection.is_shut {
            return self.on_send_failed(key);
        }
        let rest = &mut self.slices;
        rest.clear();
        connection.put_rest(sending.sent, rest);
        let submitted = self
            .ring
            .submit_send(&connection.handle, rest, token(Op::Send, key.0));
        rest.clear();
        connection.sending = Some(Sending {
            is_submitted: submitted.is_ok(),
            ..sending
        });
        match submitted {
            Ok(()) => {}
            Err(SubmitError::Full) => self.sockets.stalled.push(key),
            Err(_) => self.on_send_failed(key),
        }
    }

    fn on_send_failed(&mut self, key: ConnKey) {
        if let Some(conn) = self.conns.tcp_mut(key) {
            conn.socket.sending = None;
        }
        self.with_tcp(key, |ch, cx| ch.handle_sent(cx, false));
        self.shut_down_socket(key);
    }

    /// Handles a completed send operation.
    fn on_sent(&mut self, key: ConnKey, len: usize) {
        if self.note_sent(key, len) {
            self.end_send(key);
        } else {
            // Only a part of the batch was sent because the socket buffer is almost full.
            self.submit_rest(key);
        }
    }

    /// Adds to the number of bytes sent. Returns true if the batch is complete.
    fn note_sent(&mut self, key: ConnKey, len: usize) -> bool {
        let Some(conn) = self.conns.tcp_mut(key) else {
            return true;
        };
        let connection = &mut conn.socket;
        let sent = connection.sending.map_or(0, |sending| sending.sent) + len;
        connection.sending = Some(Sending {
            sent,
            is_submitted: false,
        });
        sent >= connection.batch.len
    }

    /// Called when the batch was sent.
    fn end_send(&mut self, key: ConnKey) {
        let Some(conn) = self.conns.tcp_mut(key) else {
            return;
        };
        conn.socket.sending = None;
        conn.socket.batch.chunks.clear();
        self.with_tcp(key, |ch, cx| ch.handle_sent(cx, true));
        self.check_gone(key);
    }

    /// Shuts down both directions, which completes the operations in the ring.
    pub(super) fn shut_down_socket(&mut self, key: ConnKey) {
        let Some(conn) = self.conns.tcp_mut(key) else {
            return;
        };
        if !std::mem::replace(&mut conn.socket.is_shut, true) {
            // It may already be closed by the peer.
            let _ = conn.socket.handle.shut_down();
            // This is waiting for a slot and not in the ring, so there would be no completion.
            if conn.socket.sending.is_some_and(|s| !s.is_submitted) {
                return self.on_send_failed(key);
            }
        }
        self.check_gone(key);
    }

    /// Notifies the channel when there are no more operations in the ring.
    fn check_gone(&mut self, key: ConnKey) {
        let Some(conn) = self.conns.tcp_mut(key) else {
            return;
        };
        let connection = &mut conn.socket;
        let is_idle = !connection.receiving && connection.sending.is_none();
        if connection.is_shut && is_idle && !std::mem::replace(&mut connection.is_gone, true) {
            self.input(key, Input::Disconnected);
        }
    }
}

impl Worker {
    /// Continues connections that were waiting for a slot in the ring.
    pub(in crate::worker) fn poll_stalled(&mut self) {
        if self.group.sockets.stalled.is_empty() {
            return;
        }
        let stalled = std::mem::take(&mut self.group.sockets.stalled);
        for key in stalled {
            self.group.conns.mark_dirty(key);
        }
        self.group.drain_dirty();
    }
}

/// Maximum number of buffers for a single call.
const PIECES: usize = 128;

/// Sends as much as possible and returns the number of bytes. Returns `None` if there is no room in
/// the socket buffer, or if this is a simulated socket.
fn send_now(socket: &Handle, pieces: &[MemSlice]) -> Option<io::Result<usize>> {
    let pieces: ArrayVec<_, PIECES> = pieces.iter().map(SendPiece::from).take(PIECES).collect();
    let waits = [io::ErrorKind::WouldBlock, io::ErrorKind::Interrupted];
    match sys::send(socket.fd()?, &pieces) {
        Ok(0) => None,
        Err(error) if waits.contains(&error.kind()) => None,
        result => Some(result),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use riser_reactor::RingConfig;

    use super::*;
    use crate::worker::conns::Conn;

    #[test]
    fn listener_pauses_after_failed_accept() {
        let mut ring = Ring::new(RingConfig::default()).unwrap();
        let (mut sockets, start) = (Sockets::default(), Instant::now());
        let socket = TcpListener::bind(([127, 0, 0, 1], 0).into()).unwrap();
        socket.listen().unwrap();
        sockets.add(&mut ring, start, vec![socket]);
        assert_eq!(sockets.deadline(), None, "it accepts");
        let address = sockets.listening().next();
        assert_eq!(sockets.end_accept(0, start, false), address);
        sockets.accept(&mut ring, start);
        assert_eq!(sockets.deadline(), Some(start + REST));
        sockets.accept(&mut ring, start + REST);
        assert_eq!(sockets.deadline(), None, "it accepts again");
        sockets.close(&mut ring, |_| true);
        assert_eq!(sockets.listening().next(), None);
        assert_eq!(sockets.end_accept(0, start, false), None, "it is closed");
        assert!(sockets.listeners.is_empty());
    }

    /// There can be a large number of idle connections before login.
    #[test]
    fn connection_before_login_uses_little_memory() {
        let (socket, _peer) = UnixStream::pair().unwrap();
        let connection = Stream::new(OwnedFd::from(socket).into()).unwrap();
        let config = ChannelConfig {
            worker: 0,
            serial: 0,
            commands: 4096,
            data_out_timeout: Duration::ZERO,
        };
        let channel = TcpChannel::new(config, Instant::now());
        let buffers = connection.memory() + channel.channel().memory();
        let memory = buffers + size_of::<TcpConn>() + size_of::<Conn<Fabric>>();
        assert!(
            memory <= 20 << 10,
            "{memory} bytes, {buffers} of them buffers"
        );
        assert!(config.memory() > 4 << 20, "what it has once it works");
    }
}
