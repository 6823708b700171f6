//! Readable and writable sockets, data transfer and timeouts.

use std::collections::hash_map::Entry;
use std::io::{self, Read as _};
use std::net::Shutdown;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use socket2::Socket;
use tracing::warn;

use super::conn::{Conn, ConnState, Token};
use super::{CLOSING_TIME, Iwarp, TURN};
use crate::verbs::{CmId, EventFds, Provider, QpId};

/// Max number of sockets to handle in each round.
const ROUND: usize = 64;
/// Max number of reads per socket in each round. Each of them returns up to [`TURN`] bytes.
const READS: usize = 4;
/// How long a listener should wait if accepting a connection fails.
const REST: Duration = Duration::from_secs(1);

/// Writes to a socket. Returns the number of bytes written. If the connection is closed, this
/// returns an error without a signal.
fn send_bytes(socket: &Socket, bytes: &[u8]) -> io::Result<usize> {
    loop {
        match socket.send_with_flags(bytes, libc::MSG_NOSIGNAL) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

impl Iwarp {
    fn new_token(&mut self) -> Token {
        self.next_token += 1;
        Token(self.next_token)
    }

    /// Adds a connection.
    pub(super) fn add_conn(&mut self, conn: Conn) -> Token {
        let token = self.new_token();
        let flags = match conn.state {
            ConnState::Connecting => EventFlags::OUT,
            _ => EventFlags::IN,
        };
        let data = EventData::new_u64(token.0);
        // If we can't add it to the epoll set, there will be no events, so the connection will time
        // out.
        if let Err(error) = epoll::add(&self.set, &conn.socket, data, flags) {
            warn!(%error, "cannot add a connection to the epoll set");
        }
        self.per_peer.entry(conn.peer.ip()).or_default().conns += 1;
        self.conns.insert(token, conn);
        token
    }

    /// Removes a connection from all tables.
    pub(super) fn take_conn(&mut self, token: Token) -> Option<Conn> {
        let conn = self.conns.remove(&token)?;
        if let Entry::Occupied(mut peer) = self.per_peer.entry(conn.peer.ip()) {
            peer.get_mut().conns -= 1;
            if peer.get().conns == 0 {
                peer.remove();
            }
        }
        if let Some(due) = conn.due {
            self.timers.remove(&(due, token));
        }
        self.strangers.retain(|it| *it != token);
        Some(conn)
    }

    /// Sets the events required in the current state of a connection.
    fn watch(&self, token: Token, conn: &Conn) {
        let mut flags = EventFlags::empty();
        match conn.state {
            ConnState::Connecting => flags |= EventFlags::OUT,
            _ => flags |= EventFlags::IN,
        }
        if conn.awaits_room {
            flags |= EventFlags::OUT;
        }
        // This cannot fail because a connection is always in the epoll set.
        let _ = epoll::modify(&self.set, &conn.socket, EventData::new_u64(token.0), flags);
    }

    /// Sets the timeout of a connection.
    pub(super) fn set_due(&mut self, token: Token, due: Option<Instant>) {
        let Some(conn) = self.conns.get_mut(&token) else {
            return;
        };
        if let Some(before) = std::mem::replace(&mut conn.due, due) {
            self.timers.remove(&(before, token));
        }
        if let Some(at) = due {
            self.timers.insert((at, token));
        }
    }

    /// Starts to accept connections of a listener.
    ///
    /// # Errors
    /// Returns an error if the socket can't be added to the epoll set.
    pub(super) fn attend_listener(&mut self, id: CmId) -> io::Result<()> {
        let token = self.new_token();
        let Ok(entry) = self.ids.get_mut(id) else {
            return Ok(());
        };
        let Some(socket) = &entry.socket else {
            return Ok(());
        };
        let data = EventData::new_u64(token.0);
        epoll::add(&self.set, socket, data, EventFlags::IN)?;
        entry.listening = Some(token);
        self.listeners.insert(token, id);
        Ok(())
    }

    pub(super) fn forget_listener(&mut self, id: CmId, token: Option<Token>) {
        if let Some(token) = token {
            self.listeners.remove(&token);
            self.timers.retain(|(_, it)| *it != token);
            // Drop all connections of this listener that have not sent a request yet.
            let theirs = self.conns.iter();
            let theirs = theirs.filter(|(_, conn)| conn.listener == Some(id) && conn.id.is_none());
            let theirs: Vec<Token> = theirs
                .filter(|(_, conn)| conn.state == ConnState::AwaitsRequest)
                .map(|(token, _)| *token)
                .collect();
            for token in theirs {
                self.drop_conn(token);
            }
        }
    }

    /// Stops accepting connections while a listener has the maximum number of pending requests. New
    /// connections must wait in the kernel.
    pub(super) fn rest_or_attend(&mut self, id: CmId) {
        let Ok(entry) = self.ids.get(id) else {
            return;
        };
        let (Some(token), Some(socket)) = (entry.listening, &entry.socket) else {
            return;
        };
        let flags = match entry.requests < entry.backlog {
            true => EventFlags::IN,
            false => EventFlags::empty(),
        };
        let data = EventData::new_u64(token.0);
        // This cannot fail because a listener is always in the epoll set.
        let _ = epoll::modify(&self.set, socket, data, flags);
    }

    /// Accepts a single connection. We don't accept more at once, because its request could fill up
    /// the backlog.
    fn accept_one(&mut self, token: Token, id: CmId) {
        let Ok(entry) = self.ids.get(id) else {
            return;
        };
        if entry.requests >= entry.backlog {
            return;
        }
        let Some(socket) = &entry.socket else {
            return;
        };
        match socket.accept() {
            Ok((socket, peer)) => {
                if let Some(peer) = peer.as_socket() {
                    self.add_stranger(id, socket, peer);
                }
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Err(e) if e.kind() == io::ErrorKind::ConnectionAborted => {}
            // For example, there may be too many open files. The listener remains readable, and
            // would keep waking the owner.
            Err(error) => {
                warn!(%error, "cannot accept connections, retrying in a second");
                let (data, none) = (EventData::new_u64(token.0), EventFlags::empty());
                // Same as above.
                let _ = epoll::modify(&self.set, socket, data, none);
                self.timers.insert((self.device.now() + REST, token));
            }
        }
    }

    /// Handles all sockets that are ready. Returns their number.
    fn poll_sockets(&mut self) -> usize {
        let mut events = [epoll::Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; ROUND];
        let at_once = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let ready = epoll::wait(&self.set, &mut events[..], Some(&at_once)).unwrap_or(0);
        for event in &events[..ready] {
            let data = event.data;
            let token = Token(data.u64());
            if let Some(id) = self.listeners.get(&token) {
                self.accept_one(token, *id);
                continue;
            }
            let Some(conn) = self.conns.get_mut(&token) else {
                continue;
            };
            if conn.state == ConnState::Connecting {
                self.on_connected(token);
                if let Some(conn) = self.conns.get(&token) {
                    self.watch(token, conn);
                }
                continue;
            }
            let flags = event.flags;
            if flags.contains(EventFlags::OUT) && conn.awaits_room {
                conn.awaits_room = false;
                self.watch_again(token);
                self.flush(token);
            }
            if flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR) {
                self.read(token);
            }
        }
        ready
    }

    fn watch_again(&self, token: Token) {
        if let Some(conn) = self.conns.get(&token) {
            self.watch(token, conn);
        }
    }

    fn read(&mut self, token: Token) {
        // Take this while handling the data, and put it back afterwards.
        let mut input = std::mem::take(&mut self.input);
        for _ in 0..READS {
            let Some(conn) = self.conns.get(&token) else {
                break;
            };
            let state = conn.state;
            match (&conn.socket).read(&mut input) {
                Ok(0) => {
                    self.lose_conn(token, None);
                    break;
                }
                Ok(len) => match state {
                    ConnState::Open => self.take_stream(token, &input[..len]),
                    // The connection is already closed, so ignore any data.
                    ConnState::Closing => {}
                    _ => self.take_start(token, &input[..len]),
                },
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    self.lose_conn(token, Some(&e));
                    break;
                }
            }
        }
        self.input = input;
    }

    /// Sends all pending data of a connection and its QP.
    pub(super) fn flush(&mut self, token: Token) {
        if self.send_rest(token)
            && let Some(conn) = self.conns.get(&token)
            && let (ConnState::Open, Some(qp)) = (conn.state, conn.qp)
        {
            self.pump(token, qp);
        }
        self.shut_when_over(token);
    }

    /// Sends the remaining data to the socket. This will return `true` if everything has been sent.
    fn send_rest(&mut self, token: Token) -> bool {
        let Some(conn) = self.conns.get_mut(&token) else {
            return false;
        };
        while conn.has_output() {
            match send_bytes(&conn.socket, &conn.outbox[conn.sent..]) {
                Ok(len) => conn.sent += len,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    conn.awaits_room = true;
                    self.watch_again(token);
                    return false;
                }
                Err(e) => {
                    self.lose_conn(token, Some(&e));
                    return false;
                }
            }
        }
        // Also free the memory, since most connections have nothing to store.
        (conn.outbox, conn.sent) = (Vec::new(), 0);
        true
    }

    /// Sends data from a QP, up to the limit per round.
    fn pump(&mut self, token: Token, qp: QpId) {
        let mut output = std::mem::take(&mut self.output);
        output.clear();
        let now = self.device.now();
        let has_more = self.device.poll_stream(now, qp, &mut output, TURN);
        if let Some(conn) = self.conns.get_mut(&token) {
            // Send directly from this buffer until the socket is full.
            let mut sent = 0;
            while sent < output.len()
                && let Ok(len) = send_bytes(&conn.socket, &output[sent..])
            {
                sent += len;
            }
            conn.outbox.extend_from_slice(&output[sent..]);
        }
        self.output = output;
        // If there was an error, the next call will return it again and close the connection.
        if self.send_rest(token) && has_more {
            self.device.schedule_qp(qp);
        }
    }

    /// Shuts down the sending side of a finished connection when all data has been sent. The
    /// timeout is not extended if the peer doesn't read the data.
    fn shut_when_over(&mut self, token: Token) {
        let Some(conn) = self.conns.get_mut(&token) else {
            return;
        };
        if conn.has_output() {
            let has_ended = conn.qp.is_none_or(|qp| self.device.has_stream_ended(qp));
            if conn.state == ConnState::Open && conn.due.is_none() && has_ended {
                self.set_due(token, Some(self.device.now() + CLOSING_TIME));
            }
            return;
        }
        if conn.is_shut {
            return;
        }
        match (conn.state, conn.qp) {
            (ConnState::Open, Some(qp)) if self.device.is_stream_over(qp) => {
                self.close_conn(token);
            }
            (ConnState::Closing, _) => {
                conn.is_shut = true;
                // If the connection is already closed, this will be detected by reading from it.
                let _ = conn.socket.shutdown(Shutdown::Write);
            }
            _ => {}
        }
    }

    /// Sends data for all scheduled connections. Returns their number.
    fn send(&mut self) -> usize {
        let mut turns = 0;
        // Connections scheduled in the meantime will be handled in the next round.
        for _ in 0..self.device.schedule.ready() {
            let Some(qp) = self.device.next_stream() else {
                break;
            };
            let Some(&token) = self.by_qp.get(&qp) else {
                continue;
            };
            turns += 1;
            if self.device.qp_num(qp).is_err() {
                // The QP has been destroyed.
                self.close_conn(token);
            } else if self.conns.get(&token).is_some_and(|conn| conn.awaits_room) {
                self.shut_when_over(token);
            } else {
                self.flush(token);
            }
        }
        turns
    }

    /// Handles all expired timeouts. Returns their number.
    fn expire(&mut self, now: Instant) -> usize {
        let mut fired = 0;
        while let Some(&(at, token)) = self.timers.first()
            && at <= now
        {
            self.timers.remove(&(at, token));
            fired += 1;
            if let Some(&id) = self.listeners.get(&token) {
                self.rest_or_attend(id);
                continue;
            }
            if let Some(conn) = self.conns.get_mut(&token) {
                conn.due = None;
                let late = io::Error::from(io::ErrorKind::TimedOut);
                self.lose_conn(token, Some(&late));
            }
        }
        fired
    }
}

impl Provider for Iwarp {
    fn progress(&mut self, now: Instant) -> usize {
        self.device.set_now(now);
        // Send first, as in the software NIC: if the application has posted work based on the
        // completions of the last call, it is sent immediately.
        let sent = self.send();
        let looked = self.poll_sockets();
        let replied = self.send();
        let fired = self.expire(now) + self.device.handle_timeouts(now);
        sent + looked + replied + fired
    }

    fn deadline(&self) -> Option<Instant> {
        // Don't let the application sleep if there are unread events or pending requests.
        if !self.events.is_empty()
            || !self.device.events.is_empty()
            || self.device.schedule.has_output()
        {
            return Some(self.device.now());
        }
        let own = self.timers.first().map(|(at, _)| *at);
        [self.device.timer_deadline(), own]
            .into_iter()
            .flatten()
            .min()
    }

    fn event_fds(&self) -> EventFds<'_> {
        EventFds::from_iter([self.set.as_fd()])
    }
}
