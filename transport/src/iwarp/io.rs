//! Sockets that are ready, bytes in and out, times.

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

/// Sockets that are looked at in a round.
const ROUND: usize = 64;
/// Bytes that a socket gives in a round, in pieces of [`TURN`].
const READS: usize = 4;
/// Time that a listener rests when no connection can be accepted.
const REST: Duration = Duration::from_secs(1);

/// Gives a socket bytes; answers how many it has taken. A peer that has gone is an error and no signal.
fn give(socket: &Socket, bytes: &[u8]) -> io::Result<usize> {
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
        // Without a place in the set nothing would ever come of it: it ends by its time.
        if let Err(error) = epoll::add(&self.set, &conn.socket, data, flags) {
            warn!(%error, "a connection cannot be watched");
        }
        self.per_peer.entry(conn.peer.ip()).or_default().conns += 1;
        self.conns.insert(token, conn);
        token
    }

    /// Takes a connection out of the tables.
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

    /// Watches a socket for what its connection waits for.
    fn watch(&self, token: Token, conn: &Conn) {
        let mut flags = EventFlags::empty();
        match conn.state {
            ConnState::Connecting => flags |= EventFlags::OUT,
            _ => flags |= EventFlags::IN,
        }
        if conn.awaits_room {
            flags |= EventFlags::OUT;
        }
        // It is in the set, as long as it exists.
        let _ = epoll::modify(&self.set, &conn.socket, EventData::new_u64(token.0), flags);
    }

    /// Sets the time at which a connection is given up.
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

    /// Begins to take connections of a listener.
    ///
    /// # Errors
    /// Its socket cannot be watched.
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
            // What has come there and sent no request goes with it.
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

    /// Lets a listener rest while it has as many requests as its backlog says; others wait in the
    /// kernel.
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
        // It is in the set, as long as it exists.
        let _ = epoll::modify(&self.set, socket, data, flags);
    }

    /// Accepts a connection. One at a time: each may be a request that fills the backlog.
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
            // Such as too many open files. The listener stays readable, and would keep its owner
            // from sleeping.
            Err(error) => {
                warn!(%error, "no connection can be accepted for a second");
                let (data, none) = (EventData::new_u64(token.0), EventFlags::empty());
                // As above.
                let _ = epoll::modify(&self.set, socket, data, none);
                self.timers.insert((self.nic.now() + REST, token));
            }
        }
    }

    /// Looks at the sockets that are ready; answers how many.
    fn look(&mut self) -> usize {
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
        // Taken out while its bytes are handled, and put back.
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
                    // The connection is over; what comes is of before.
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

    /// Sends what a connection has, and what its queue pair makes.
    pub(super) fn flush(&mut self, token: Token) {
        if self.send_rest(token)
            && let Some(conn) = self.conns.get(&token)
            && let (ConnState::Open, Some(qp)) = (conn.state, conn.qp)
        {
            self.pump(token, qp);
        }
        self.shut_when_over(token);
    }

    /// Gives the socket what it has not taken; answers whether that is all.
    fn send_rest(&mut self, token: Token) -> bool {
        let Some(conn) = self.conns.get_mut(&token) else {
            return false;
        };
        while conn.has_output() {
            match give(&conn.socket, &conn.outbox[conn.sent..]) {
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
        // Its memory goes as well: most connections have nothing to keep.
        (conn.outbox, conn.sent) = (Vec::new(), 0);
        true
    }

    /// Sends what a queue pair makes, for one turn.
    fn pump(&mut self, token: Token, qp: QpId) {
        let mut output = std::mem::take(&mut self.output);
        output.clear();
        let now = self.nic.now();
        let has_more = self.nic.poll_stream(now, qp, &mut output, TURN);
        if let Some(conn) = self.conns.get_mut(&token) {
            // Straight from here, as far as the socket takes it.
            let mut sent = 0;
            while sent < output.len()
                && let Ok(len) = give(&conn.socket, &output[sent..])
            {
                sent += len;
            }
            conn.outbox.extend_from_slice(&output[sent..]);
        }
        self.output = output;
        // An error comes again, and then ends the connection.
        if self.send_rest(token) && has_more {
            self.nic.wake_stream(qp);
        }
    }

    /// Closes our direction of a connection that is over, once all was sent. A peer that does not take
    /// it has no more time than for the end.
    fn shut_when_over(&mut self, token: Token) {
        let Some(conn) = self.conns.get_mut(&token) else {
            return;
        };
        if conn.has_output() {
            let has_ended = conn.qp.is_none_or(|qp| self.nic.has_stream_ended(qp));
            if conn.state == ConnState::Open && conn.due.is_none() && has_ended {
                self.set_due(token, Some(self.nic.now() + CLOSING_TIME));
            }
            return;
        }
        if conn.is_shut {
            return;
        }
        match (conn.state, conn.qp) {
            (ConnState::Open, Some(qp)) if self.nic.is_stream_over(qp) => {
                self.close_conn(token);
            }
            (ConnState::Closing, _) => {
                conn.is_shut = true;
                // A connection that is gone already is read as such.
                let _ = conn.socket.shutdown(Shutdown::Write);
            }
            _ => {}
        }
    }

    /// Gives connections their turns; answers how many had one.
    fn send(&mut self) -> usize {
        let mut turns = 0;
        // Those that wake again meanwhile have their turn in the next round.
        for _ in 0..self.nic.ready_streams() {
            let Some(qp) = self.nic.next_stream() else {
                break;
            };
            let Some(&token) = self.by_qp.get(&qp) else {
                continue;
            };
            turns += 1;
            if self.nic.qp_num(qp).is_err() {
                // It was destroyed.
                self.close_conn(token);
            } else if self.conns.get(&token).is_some_and(|conn| conn.awaits_room) {
                self.shut_when_over(token);
            } else {
                self.flush(token);
            }
        }
        turns
    }

    /// Fires the times that have come; answers how many.
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
        self.nic.set_now(now);
        // Sending comes first, as with the software NIC: what the user posted in answer to the last
        // call's completions leaves at once.
        let sent = self.send();
        let looked = self.look();
        let answered = self.send();
        let fired = self.expire(now) + self.nic.handle_timeouts(now);
        sent + looked + answered + fired
    }

    fn deadline(&self) -> Option<Instant> {
        // A user that has not taken its events yet is not to sleep, nor one whose requests wait.
        if !self.events.is_empty() || self.nic.has_events() || self.nic.has_output() {
            return Some(self.nic.now());
        }
        let own = self.timers.first().map(|(at, _)| *at);
        [self.nic.deadline(), own].into_iter().flatten().min()
    }

    fn event_fds(&self) -> EventFds<'_> {
        EventFds::from_iter([self.set.as_fd()])
    }
}
