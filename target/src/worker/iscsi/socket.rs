//! Sockets: accepting, receiving, sending, all through the ring.

use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_memory::{MemSlice, Memory};
use riser_reactor::{Completion, Handle, Receive, SubmitError, Token};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use super::super::Worker;
use super::gate::{Connected, Transport};
use super::{Conn, connections};
use crate::iscsi::{Batch, ChannelConfig, Chunk, Phase, TcpChannel};
use crate::worker::armed::Armed;
use crate::worker::slots::Slots;

/// The top byte of our tokens; the kind of operation is in the next one.
const ISCSI: u64 = 3 << 56;

/// Bytes taken from a socket at once, in full-feature phase of a normal session.
const RECEIVE: usize = 128 << 10;

/// The same before that, and in discovery sessions.
const LOGIN_RECEIVE: usize = 8 << 10;

/// Bytes of headers sent at once, to begin with.
const HEADS: usize = 4 << 10;

/// Connections that wait to be accepted.
const BACKLOG: i32 = 256;

/// How long a listener rests that could not accept.
const REST: Duration = Duration::from_millis(100);

/// What an operation of ours was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Accept = 0,
    Receive = 1,
    Send = 2,
}

fn token(op: Op, key: usize) -> Token {
    Token(ISCSI | (op as u64) << 48 | key as u64)
}

/// A listening socket.
#[derive(Debug)]
pub(super) struct Listener {
    handle: Handle,
    address: SocketAddr,
    accepting: bool,
    /// It goes once its accept has ended.
    closing: bool,
    /// The ring was asked to end the accept.
    is_cancelled: bool,
    /// Not before.
    rests_until: Option<Instant>,
}

impl Listener {
    /// Where it listens, unless it is on its way out.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        (!self.closing).then_some(self.address)
    }

    /// The same socket once more, likewise.
    pub(super) fn duplicate(&self) -> io::Result<Option<TcpListener>> {
        let Some(address) = self.address() else {
            return Ok(None);
        };
        let fd = self.handle.fd().try_clone()?;
        Ok(Some(TcpListener { address, fd }))
    }
}

/// A batch on its way.
#[derive(Clone, Copy, Debug)]
struct Sending {
    /// Bytes of it that are sent.
    sent: usize,
    /// Whether the rest is in the ring, or waits for a slot there.
    is_submitted: bool,
}

/// A connection's socket and what it has in the ring.
#[derive(Debug)]
pub(super) struct Connection {
    handle: Handle,
    /// The receive buffer, which is taken out while the channel reads it.
    receive: Option<Memory>,
    receiving: bool,
    /// What was received and not looked at: the channel has enough to do.
    unread: Range<usize>,
    batch: Batch,
    heads: Memory,
    /// The batch, while it is being sent.
    sending: Option<Sending>,
    /// The socket was shut down.
    is_shut: bool,
    /// The channel knows that the connection is gone.
    is_gone: bool,
}

impl Connection {
    fn new(fd: OwnedFd) -> io::Result<Self> {
        Ok(Self {
            handle: Handle::new(Arc::new(fd)),
            receive: Some(Memory::new(LOGIN_RECEIVE)?),
            receiving: false,
            unread: 0..0,
            batch: Batch::default(),
            heads: Memory::new(HEADS)?,
            sending: None,
            is_shut: false,
            is_gone: false,
        })
    }

    /// What it occupies, in bytes.
    pub(super) fn memory(&self) -> usize {
        self.receive.as_ref().map_or(0, Memory::len) + self.heads.len()
    }

    /// What is left of the batch after `sent` bytes, appended to a list.
    fn put_rest(&self, mut sent: usize, rest: &mut Vec<MemSlice>) {
        let slices = self.batch.chunks.iter().map(|chunk| match chunk {
            Chunk::Head(range) => self
                .heads
                .slice(range.clone())
                .expect("the heads were copied there"),
            Chunk::Data(slice) => slice.clone(),
        });
        for slice in slices {
            let skipped = sent.min(slice.len());
            sent -= skipped;
            rest.extend(slice.slice(skipped..slice.len()).filter(|s| !s.is_empty()));
        }
    }
}

impl Worker {
    /// Accepts from sockets that listen already.
    pub(in crate::worker) fn add_sockets(&mut self, sockets: Vec<TcpListener>) {
        for socket in sockets {
            self.iscsi.listeners.insert(Listener {
                handle: Handle::new(Arc::new(socket.fd)),
                address: socket.address,
                accepting: false,
                closing: false,
                is_cancelled: false,
                rests_until: None,
            });
        }
        self.poll_accepts();
    }

    /// Accepts no more where nobody should listen.
    pub(in crate::worker) fn stop_listening(&mut self, is_over: impl Fn(SocketAddr) -> bool) {
        let ring = &mut self.ring;
        self.iscsi.listeners.retain(|place, listener| {
            if listener.closing || !is_over(listener.address) {
                return true;
            }
            listener.closing = true;
            // A connection that is accepted meanwhile is closed when its completion is taken.
            listener.is_cancelled = ring.cancel(token(Op::Accept, place)).is_ok();
            listener.accepting
        });
    }

    /// Accepts again where that has ended, and ends it where it goes on though it should not.
    pub(in crate::worker) fn poll_accepts(&mut self) {
        for (place, listener) in &mut self.iscsi.listeners {
            if listener.closing && !listener.is_cancelled {
                listener.is_cancelled = self.ring.cancel(token(Op::Accept, place)).is_ok();
            }
            let rests = listener.rests_until.is_some_and(|until| until > self.now);
            if listener.accepting || listener.closing || rests {
                continue;
            }
            let submitted = self
                .ring
                .submit_accept(&listener.handle, token(Op::Accept, place));
            listener.accepting = submitted.is_ok();
            listener.rests_until = submitted.is_err().then(|| self.now + REST);
        }
    }

    /// When a listener has rested.
    pub(in crate::worker) fn accept_deadline(&self) -> Option<Instant> {
        let resting = self.iscsi.listeners.iter().filter(|(_, l)| !l.accepting);
        resting.filter_map(|(_, l)| l.rests_until).min()
    }

    /// Takes a completion, if it is one of ours.
    pub(in crate::worker) fn on_iscsi_completion(&mut self, completion: &mut Completion) -> bool {
        let id = completion.token.0;
        if id & (0xff << 56) != ISCSI {
            return false;
        }
        let key = (id & 0xffff_ffff) as usize;
        match (id >> 48) & 0xff {
            0 => self.on_accepted(key, completion.fd.take()),
            1 => self.on_received(key, completion.result),
            _ => self.on_sent(key, completion.result),
        }
        self.drain_dirty();
        true
    }

    fn on_accepted(&mut self, place: usize, fd: Option<OwnedFd>) {
        let Some(listener) = self.iscsi.listeners.get_mut(place) else {
            return;
        };
        listener.accepting = false;
        if listener.closing {
            self.iscsi.listeners.remove(place);
            return;
        }
        let listen = listener.address;
        match fd {
            None => listener.rests_until = Some(self.now + REST),
            Some(fd) => {
                let peer = SockRef::from(&fd).peer_addr().ok();
                let refused = self.open_connection(fd, listen).err();
                // Whoever is gone already is told nothing, and not told of.
                if let (Some(error), Some(peer)) = (refused, peer.and_then(|p| p.as_socket())) {
                    let who = Connected {
                        transport: Transport::Tcp,
                        listen,
                        peer,
                    }
                    .nobody();
                    let reason = "out_of_resources";
                    self.audit.denied(self.now, &who, reason, Some(&error));
                }
            }
        }
        self.poll_accepts();
    }

    fn open_connection(&mut self, fd: OwnedFd, listen: SocketAddr) -> io::Result<()> {
        let most = connections(self.catalog.limits.sessions);
        let most = most.min(Slots::of(self.ring.capacity()).connections);
        if self.iscsi.conns.len() >= most {
            return Err(io::Error::other("too many connections"));
        }
        let socket = SockRef::from(&fd);
        socket.set_tcp_nodelay(true)?;
        let peer = socket.peer_addr()?.as_socket();
        let peer = peer.ok_or_else(|| io::Error::other("no peer"))?;
        self.make_room_for_login(peer.ip(), most / 2);
        let serial = self.take_serial();
        let config = ChannelConfig {
            worker: self.index,
            serial,
            commands: self.catalog.commands,
            data_out_timeout: self.catalog.data_out_timeout,
        };
        let key = self.iscsi.conns.insert(Conn {
            channel: TcpChannel::new(config, self.now),
            connection: Connection::new(fd)?,
            serial,
            listen,
            peer,
            entered: None,
            armed: Armed::default(),
            waits_for_pool: false,
            is_leaving: false,
        });
        self.iscsi.dirty.push_back(key);
        Ok(())
    }

    /// Ends the oldest connection that has not logged in, if there are `most` of them, or half as many
    /// from the address of the one that comes: those that do not log in keep no others from it.
    fn make_room_for_login(&mut self, address: IpAddr, most: usize) {
        let conns = self.iscsi.conns.iter();
        let strangers = conns.filter(|(_, conn)| {
            conn.channel.channel().phase() == Phase::Login && !conn.connection.is_shut
        });
        let from_there = strangers.clone().filter(|(_, c)| c.peer.ip() == address);
        let oldest = if from_there.clone().count() >= most.div_ceil(2) {
            from_there.min_by_key(|(_, conn)| conn.serial)
        } else if strangers.clone().count() >= most {
            strangers.min_by_key(|(_, conn)| conn.serial)
        } else {
            None
        };
        if let Some(key) = oldest.map(|(key, _)| key) {
            self.shut_down_socket(key);
        }
    }

    /// Receives more, unless the channel has enough to do.
    pub(super) fn receive_next(&mut self, key: usize) {
        let Some(conn) = self.iscsi.conns.get_mut(key) else {
            return;
        };
        let connection = &mut conn.connection;
        let channel = conn.channel.channel();
        let is_busy = connection.receiving || !connection.unread.is_empty();
        if is_busy || connection.is_shut || !channel.wants_input() {
            return;
        }
        let Some(buffer) = &mut connection.receive else {
            return;
        };
        if channel.takes_commands()
            && buffer.len() < RECEIVE
            && let Ok(memory) = Memory::new(RECEIVE)
        {
            *buffer = memory;
        }
        let submitted = self.ring.submit_recv(
            &connection.handle,
            &[buffer.whole()],
            Receive::Some,
            token(Op::Receive, key),
        );
        match submitted {
            Ok(()) => connection.receiving = true,
            Err(SubmitError::Full) => self.iscsi.stalled.push(key),
            Err(_) => self.shut_down_socket(key),
        }
    }

    fn on_received(&mut self, key: usize, result: i32) {
        let Some(conn) = self.iscsi.conns.get_mut(key) else {
            return;
        };
        conn.connection.receiving = false;
        let Some(len) = usize::try_from(result).ok().filter(|len| *len > 0) else {
            if result == 0 {
                conn.channel.channel_mut().note_closed();
            }
            return self.shut_down_socket(key);
        };
        conn.connection.unread = 0..len;
        self.read_on(key);
        self.check_gone(key);
    }

    /// Gives the channel what was received, as far as it takes that.
    pub(super) fn read_on(&mut self, key: usize) {
        let Some(conn) = self.iscsi.conns.get_mut(key) else {
            return;
        };
        let unread = conn.connection.unread.clone();
        if unread.is_empty() || conn.connection.is_shut || !conn.channel.channel().wants_input() {
            return;
        }
        let Some(mut buffer) = conn.connection.receive.take() else {
            return;
        };
        // The ring has given its handle back with the completion, and gets another one with the next
        // receive, which waits until everything was read.
        let bytes = buffer.get_mut().expect("no receive is under way");
        let mut taken = 0;
        self.with_iscsi(key, |ch, cx| {
            taken = ch.handle_bytes(cx, &bytes[unread]);
        });
        if let Some(conn) = self.iscsi.conns.get_mut(key) {
            conn.connection.receive = Some(buffer);
            conn.connection.unread.start += taken;
        }
    }

    /// Sends the next batch, if there is one and none is being sent.
    pub(super) fn send_next(&mut self, key: usize) {
        let Some(conn) = self.iscsi.conns.get_mut(key) else {
            return;
        };
        let connection = &mut conn.connection;
        match connection.sending {
            Some(sending) if sending.is_submitted => return,
            Some(_) => return self.submit_rest(key),
            None => {}
        }
        if connection.is_gone || !conn.channel.poll_batch(&mut connection.batch) {
            return;
        }
        let heads = &connection.batch.heads;
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

    fn submit_rest(&mut self, key: usize) {
        let connection = &mut self.iscsi.conns[key].connection;
        let Some(sending) = connection.sending else {
            return;
        };
        if connection.is_shut {
            return self.on_send_failed(key);
        }
        let rest = &mut self.slices;
        rest.clear();
        connection.put_rest(sending.sent, rest);
        let submitted = self
            .ring
            .submit_send(&connection.handle, rest, token(Op::Send, key));
        rest.clear();
        connection.sending = Some(Sending {
            is_submitted: submitted.is_ok(),
            ..sending
        });
        match submitted {
            Ok(()) => {}
            Err(SubmitError::Full) => self.iscsi.stalled.push(key),
            Err(_) => self.on_send_failed(key),
        }
    }

    /// Goes on with connections that found no slot in the ring.
    pub(in crate::worker) fn poll_stalled(&mut self) {
        if self.iscsi.stalled.is_empty() {
            return;
        }
        let stalled = std::mem::take(&mut self.iscsi.stalled);
        self.iscsi.dirty.extend(stalled);
        self.drain_dirty();
    }

    fn on_send_failed(&mut self, key: usize) {
        self.iscsi.conns[key].connection.sending = None;
        self.with_iscsi(key, |ch, cx| ch.handle_sent(cx, false));
        self.shut_down_socket(key);
    }

    fn on_sent(&mut self, key: usize, result: i32) {
        let Some(conn) = self.iscsi.conns.get_mut(key) else {
            return;
        };
        let connection = &mut conn.connection;
        let Some(len) = usize::try_from(result).ok().filter(|len| *len > 0) else {
            return self.on_send_failed(key);
        };
        let before = connection.sending.map_or(0, |sending| sending.sent);
        let sent = before + len;
        connection.sending = Some(Sending {
            sent,
            is_submitted: false,
        });
        if sent < connection.batch.len {
            return self.submit_rest(key);
        }
        connection.sending = None;
        connection.batch.chunks.clear();
        self.with_iscsi(key, |ch, cx| ch.handle_sent(cx, true));
        self.check_gone(key);
    }

    /// Ends both directions; what is in the ring ends with that.
    pub(super) fn shut_down_socket(&mut self, key: usize) {
        let Some(conn) = self.iscsi.conns.get_mut(key) else {
            return;
        };
        if !std::mem::replace(&mut conn.connection.is_shut, true) {
            // It may be shut down by the peer already.
            let _ = SockRef::from(&**conn.connection.handle.fd()).shutdown(Shutdown::Both);
            if conn.connection.sending.is_some_and(|s| !s.is_submitted) {
                return self.on_send_failed(key);
            }
        }
        self.check_gone(key);
    }

    /// Tells the channel once nothing of the connection is in the ring any more.
    fn check_gone(&mut self, key: usize) {
        let Some(conn) = self.iscsi.conns.get_mut(key) else {
            return;
        };
        let connection = &mut conn.connection;
        let is_idle = !connection.receiving && connection.sending.is_none();
        if connection.is_shut && is_idle && !std::mem::replace(&mut connection.is_gone, true) {
            self.with_iscsi(key, |ch, cx| ch.channel_mut().handle_disconnected(cx));
        }
    }
}

/// A socket that listens, on its way to a worker or to the next program.
#[derive(Debug)]
pub struct TcpListener {
    address: SocketAddr,
    fd: OwnedFd,
}

impl TcpListener {
    /// Binds a socket; it takes no connections yet.
    ///
    /// # Errors
    /// Those of `socket(2)` and `bind(2)`.
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let fd = bind(address)?.into();
        Ok(Self { address, fd })
    }

    /// Lets it take connections, which wait until a worker has it.
    ///
    /// # Errors
    /// Those of `listen(2)`.
    pub fn listen(&self) -> io::Result<()> {
        SockRef::from(&self.fd).listen(BACKLOG)
    }

    /// A socket that listens already, wherever it does.
    ///
    /// # Errors
    /// It is no socket of TCP.
    pub fn adopt(fd: OwnedFd) -> io::Result<Self> {
        let address = SockRef::from(&fd).local_addr()?.as_socket();
        let address = address.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { address, fd })
    }

    /// The same socket once more.
    ///
    /// # Errors
    /// Those of `fcntl(2)`.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            address: self.address,
            fd: self.fd.try_clone()?,
        })
    }

    /// Where it is.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl AsFd for TcpListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<TcpListener> for OwnedFd {
    fn from(listener: TcpListener) -> Self {
        listener.fd
    }
}

fn bind(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    socket.set_reuse_address(true)?;
    // Every worker listens; the kernel deals the connections out.
    socket.set_reuse_port(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    /// There may be many that connect and say nothing.
    #[test]
    fn a_connection_that_has_not_logged_in_takes_little_memory() {
        let (socket, _peer) = UnixStream::pair().unwrap();
        let connection = Connection::new(socket.into()).unwrap();
        let config = ChannelConfig {
            worker: 0,
            serial: 0,
            commands: 4096,
            data_out_timeout: Duration::ZERO,
        };
        let channel = TcpChannel::new(config, Instant::now());
        let buffers = connection.memory() + channel.channel().memory();
        let memory = buffers + size_of::<Conn>();
        assert!(
            memory <= 20 << 10,
            "{memory} bytes, {buffers} of them buffers"
        );
        assert!(config.memory() > 4 << 20, "what it has once it works");
    }
}
