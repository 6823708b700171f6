//! Sockets: accepting, receiving and sending through the ring. What a socket has room for is sent in
//! the call.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use riser_memory::sys::{self, SendPiece};
use riser_memory::{MemSlice, Memory};
use riser_reactor::{Completion, Handle, Receive, Ring, SubmitError, Token};

use super::Sockets;
use crate::iscsi::{ChannelConfig, Phase, TcpChannel};
use crate::worker::Worker;
use crate::worker::conns::ConnKey;
use crate::worker::fabrics::{Fabric, Input, Login, TcpConn};
use crate::worker::gate::{ConnAddrs, Transport};
use crate::worker::listener::TcpListener;
use crate::worker::login_log::Reason;
use crate::worker::slots::{Slots, connections};
use crate::worker::stream::{Sending, Stream};

/// The top byte of our tokens; the kind of operation is in the next one.
const ISCSI: u64 = 3 << 56;

/// Bytes taken from a socket at once, in full-feature phase of a normal session, once it has sent
/// more at once than the first buffer has room for.
const RECEIVE: usize = 128 << 10;

/// Bytes of a round that are sent in the calls that begin it. What is beyond goes through the ring:
/// an initiator that takes answers as fast as they come does not keep the worker from others.
const AT_ONCE: usize = 1 << 20;

/// Rest of a listener that could not accept: an error that lasts must not keep the worker busy.
const REST: Duration = Duration::from_millis(100);

/// Kind of an operation in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    Accept = 0,
    Receive = 1,
    Send = 2,
}

fn token(op: Op, place: usize) -> Token {
    Token(ISCSI | (op as u64) << 48 | place as u64)
}

/// A socket that listens, with its accept in the ring.
#[derive(Debug)]
pub(super) struct Listener {
    handle: Handle,
    address: SocketAddr,
    accepting: bool,
    /// It goes once its accept has ended.
    closing: bool,
    /// The ring was asked to end the accept.
    is_cancelled: bool,
    /// Time before which no accept is submitted, after one that failed.
    rests_until: Option<Instant>,
}

impl Listener {
    /// Address at which it listens, unless it is being closed.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        (!self.closing).then_some(self.address)
    }

    /// The same socket once more, likewise.
    pub(super) fn duplicate(&self) -> io::Result<Option<TcpListener>> {
        let Some(address) = self.address() else {
            return Ok(None);
        };
        let socket = self.handle.clone();
        TcpListener { address, socket }.try_clone().map(Some)
    }
}

impl Sockets {
    /// A round of the worker begins.
    pub(in crate::worker) fn begin_round(&mut self) {
        self.at_once = AT_ONCE;
    }

    /// Accepts from sockets that listen already.
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

    /// Stops accepting at addresses that are no longer served.
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
            // A connection that is accepted meanwhile is closed when its completion is taken.
            listener.is_cancelled = ring.cancel(token(Op::Accept, place)).is_ok();
            listener.accepting
        });
    }

    /// Accepts again where that has ended, and ends it where it goes on though it should not.
    pub(in crate::worker) fn accept(&mut self, ring: &mut Ring, now: Instant) {
        for (place, listener) in &mut self.listeners {
            if listener.closing && !listener.is_cancelled {
                listener.is_cancelled = ring.cancel(token(Op::Accept, place)).is_ok();
            }
            let rests = listener.rests_until.is_some_and(|until| until > now);
            if listener.accepting || listener.closing || rests {
                continue;
            }
            let submitted = ring.submit_accept(&listener.handle, token(Op::Accept, place));
            listener.accepting = submitted.is_ok();
            listener.rests_until = submitted.is_err().then(|| now + REST);
        }
    }

    /// Returns the time at which the next listener has rested.
    pub(in crate::worker) fn deadline(&self) -> Option<Instant> {
        let resting = self.listeners.iter().filter(|(_, l)| !l.accepting);
        resting.filter_map(|(_, l)| l.rests_until).min()
    }

    /// Takes the end of an accept, of a socket or of none; returns its listener's address, unless
    /// that is on its way out.
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

impl Worker {
    /// Takes a completion, if it is one of ours.
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
        if let Some(socket) = socket {
            let peer = socket.peer_addr().ok();
            let refused = self.open_connection(socket, listen).err();
            // A peer that has disconnected gets no audit line.
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
        // One accept at a time: a flood of connections takes one slot of the ring for each
        // listener.
        self.sockets.accept(&mut self.ring, self.now);
    }

    fn open_connection(&mut self, socket: Handle, listen: SocketAddr) -> io::Result<()> {
        let most = connections(self.catalog.limits.sessions);
        // A connection without slots of its own in the ring could wait for one for ever.
        let most = most.min(Slots::of(self.ring.capacity()).connections);
        if self.conns.tcps().count() >= most {
            return Err(io::Error::other("too many connections"));
        }
        // Whole batches are sent, so there is nothing to collect: the last segment of an answer
        // must not wait for the acknowledgment of the one before.
        socket.set_nodelay()?;
        let peer = socket.peer_addr()?;
        self.make_room_for_login(peer.ip(), most / 2);
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

    /// Ends the oldest connection that has not logged in, if there are `most` of them, or half as
    /// many from the address of the one that comes: those that do not log in keep no others from
    /// it.
    fn make_room_for_login(&mut self, address: IpAddr, most: usize) {
        let strangers = self.conns.tcps().filter(|(_, _, tcp)| {
            tcp.channel.channel().phase() == Phase::Login && !tcp.socket.is_shut
        });
        let strangers: Vec<_> = strangers
            .map(|(key, conn, _)| (conn.serial(), key, conn.peer.ip()))
            .collect();
        let from_there = strangers.iter().filter(|(_, _, ip)| *ip == address);
        // The address of the newcomer comes first: a host that opens many connections displaces
        // its own.
        let oldest = if from_there.clone().count() >= most.div_ceil(2) {
            from_there.min_by_key(|(serial, _, _)| *serial)
        } else if strangers.len() >= most {
            strangers.iter().min_by_key(|(serial, _, _)| *serial)
        } else {
            None
        };
        if let Some(key) = oldest.map(|(_, key, _)| *key) {
            self.shut_down_socket(key);
        }
    }

    /// Receives more, unless the channel has enough to do.
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
        // Only now: before full-feature phase the peer may be anyone, and many of them together
        // must not take much memory; nor must sessions that send little. Where there is none, the
        // small buffer does.
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

    /// Gives the channel what was received, as far as it takes that.
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
        // The ring has given its handle back with the completion, and gets another one with the
        // next receive, which waits until everything was read.
        let bytes = buffer.get_mut().expect("no receive is under way");
        let mut taken = 0;
        self.with_tcp(key, |ch, cx| {
            taken = ch.handle_bytes(cx, &bytes[unread]);
        });
        if let Some(conn) = self.conns.tcp_mut(key) {
            conn.socket.receive = Some(buffer);
            conn.socket.unread.start += taken;
        }
    }

    /// Sends the next batch, if there is one and none is being sent.
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
        // It grows in powers of two and never shrinks, so after a few batches nothing is
        // allocated.
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
        // What the socket has room for goes in this call: the way through the ring takes longer,
        // and the initiator has something to do meanwhile.
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
        // A part of the batch went before the shutdown. The rest cannot.
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

    /// Goes on with connections that found no slot in the ring.
    pub(in crate::worker) fn poll_stalled(&mut self) {
        if self.sockets.stalled.is_empty() {
            return;
        }
        let stalled = std::mem::take(&mut self.sockets.stalled);
        for key in stalled {
            self.conns.mark_dirty(key);
        }
        self.drain_dirty();
    }

    fn on_send_failed(&mut self, key: ConnKey) {
        if let Some(conn) = self.conns.tcp_mut(key) {
            conn.socket.sending = None;
        }
        self.with_tcp(key, |ch, cx| ch.handle_sent(cx, false));
        self.shut_down_socket(key);
    }

    /// The ring has sent some of the batch.
    fn on_sent(&mut self, key: ConnKey, len: usize) {
        if self.note_sent(key, len) {
            self.end_send(key);
        } else {
            // A socket buffer that is nearly full takes a part of the batch.
            self.submit_rest(key);
        }
    }

    /// Notes how much more of the batch is sent; whether that was all.
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

    /// The batch is sent.
    fn end_send(&mut self, key: ConnKey) {
        let Some(conn) = self.conns.tcp_mut(key) else {
            return;
        };
        conn.socket.sending = None;
        conn.socket.batch.chunks.clear();
        self.with_tcp(key, |ch, cx| ch.handle_sent(cx, true));
        self.check_gone(key);
    }

    /// Ends both directions; what is in the ring ends with that.
    pub(super) fn shut_down_socket(&mut self, key: ConnKey) {
        let Some(conn) = self.conns.tcp_mut(key) else {
            return;
        };
        if !std::mem::replace(&mut conn.socket.is_shut, true) {
            // It may be shut down by the peer already.
            let _ = conn.socket.handle.shut_down();
            // It waits for a slot, and is not in the ring: no completion would end it.
            if conn.socket.sending.is_some_and(|s| !s.is_submitted) {
                return self.on_send_failed(key);
            }
        }
        self.check_gone(key);
    }

    /// Notifies the channel once nothing of the connection is in the ring any more.
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

/// Pieces that are sent in one call.
const PIECES: usize = 128;

/// Sends what a socket has room for; returns how many bytes that was. `None` where it has no room,
/// or is one of a simulation.
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
    fn a_listener_that_could_not_accept_rests() {
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

    /// There may be many that connect and say nothing.
    #[test]
    fn a_connection_that_has_not_logged_in_takes_little_memory() {
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
