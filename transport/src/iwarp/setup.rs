//! Requests, replies, and closing connections.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use riser_state::become_state;
use socket2::Socket;
use tracing::{debug, info};

use super::conn::{Conn, ConnState, Token};
use super::id::Id;
use super::{CLOSING_TIME, Iwarp, MAX_STRANGERS, OLDER_TIME, SETUP_TIME};
use crate::nic::rdma_cm::IdState;
use crate::rdmap::StreamParams;
use crate::rdmap::qp::MIN_MULPDU;
use crate::rdmap::setup::{self, NegotiatedParams};
use crate::rdmap::wire::start::{ANY_DEPTH, Enhanced, StartFrame, StartKind};
use crate::verbs::{Access, CmError, CmEvent, CmEventKind, CmId, ConnParam, QpId, VerbsError};

/// Reject reason: rejected by the user of the peer, using IB CM numbers.
const BY_CONSUMER: u16 = 28;
/// Reject reason: no listener.
const NO_LISTENER: u16 = 8;

/// Returns the maximum ULPDU size that fits into a TCP segment including length, CRC and markers
/// (RFC 5044 4.2).
fn mulpdu(socket: &Socket) -> usize {
    let mss = socket.tcp_mss().unwrap_or(536) as usize;
    let markers = 4 * mss.div_ceil(512);
    (mss - mss % 4).saturating_sub(6 + markers).max(MIN_MULPDU)
}

/// Converts the number of READs to the type used in parameters.
fn depth(number: u16) -> u8 {
    number.min(u8::MAX.into()) as u8
}

/// Returns the parameters of the peer's frame from our perspective.
fn param_of(said: Option<Enhanced>, private_data: Vec<u8>) -> ConnParam {
    let default = ConnParam::default();
    let known = |number: u16| (number != ANY_DEPTH).then(|| depth(number));
    let said = said.as_ref();
    ConnParam {
        private_data,
        responder_resources: said
            .and_then(|said| known(said.ord))
            .unwrap_or(default.responder_resources),
        initiator_depth: said
            .and_then(|said| known(said.ird))
            .unwrap_or(default.initiator_depth),
        ..default
    }
}

impl Iwarp {
    pub(super) fn report(&mut self, id: CmId, kind: CmEventKind) {
        self.events.push_back(CmEvent { id, kind });
    }

    /// Adds an accepted connection which has not sent a request yet.
    pub(super) fn add_stranger(&mut self, listener: CmId, socket: Socket, peer: SocketAddr) {
        let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
        let has = self.per_peer.get(&peer.ip()).map_or(0, |peer| peer.conns);
        if has >= self.config.limits.max_qps_per_peer {
            debug!(%peer, has, "too many connections from this peer");
            self.device.counters.refused_qps += 1;
            return;
        }
        let options = socket
            .set_nonblocking(true)
            .and_then(|()| socket.set_tcp_nodelay(true));
        let local = socket.local_addr().ok().and_then(|at| at.as_socket());
        let (Ok(()), Some(local)) = (options, local) else {
            return;
        };
        self.make_room_for(peer.ip());
        let mut conn = Conn::new(socket, ConnState::AwaitsRequest, local, peer);
        conn.listener = Some(listener);
        let token = self.add_conn(conn);
        self.strangers.push_back(token);
        self.set_due(token, Some(self.device.now() + SETUP_TIME));
    }

    /// Closes the oldest connection without a request if there are too many of them, or if half of
    /// them have the same address as the new connection. If a host opens many connections, it only
    /// affects itself.
    fn make_room_for(&mut self, ip: IpAddr) {
        let from_there = |token: &&Token| self.conns.get(token).is_some_and(|c| c.peer.ip() == ip);
        let mut theirs = self.strangers.iter().filter(from_there).copied();
        let their_oldest = theirs.next();
        let oldest = if theirs.count() + 1 >= MAX_STRANGERS / 2 {
            their_oldest
        } else if self.strangers.len() >= MAX_STRANGERS {
            self.strangers.front().copied()
        } else {
            None
        };
        if let Some(token) = oldest {
            self.drop_conn(token);
        }
    }

    /// Called when the TCP connection has been established or has failed.
    pub(super) fn on_connected(&mut self, token: Token) {
        let Some(conn) = self.conns.get_mut(&token) else {
            return;
        };
        match conn.socket.take_error() {
            Ok(None) => {}
            Ok(Some(e)) | Err(e) => return self.lose_conn(token, Some(&e)),
        }
        become_state(&mut conn.state, ConnState::AwaitsReply);
        if let Some(request) = &conn.request {
            request.emit(&mut conn.outbox);
        }
        self.set_due(token, Some(self.device.now() + SETUP_TIME));
        self.flush(token);
    }

    /// Handles data of a request or reply.
    pub(super) fn take_start(&mut self, token: Token, bytes: &[u8]) {
        let Some(conn) = self.conns.get_mut(&token) else {
            return;
        };
        let kind = match conn.state {
            ConnState::AwaitsReply => StartKind::Reply,
            ConnState::AwaitsRequest => StartKind::Request,
            // There is nothing to send while waiting for a reply.
            _ => return self.lose_conn(token, None),
        };
        if kind == StartKind::Request && conn.request.is_some() {
            return self.lose_conn(token, None);
        }
        conn.inbox.extend_from_slice(bytes);
        match StartFrame::parse(kind, &conn.inbox) {
            Ok(None) => {}
            Ok(Some((frame, len))) => {
                if let Some(peer) = self.per_peer.get_mut(&conn.peer.ip()) {
                    peer.knows_2 |= frame.revision == 2;
                }
                let rest = conn.inbox.split_off(len);
                conn.inbox = Vec::new();
                match kind {
                    StartKind::Reply => self.on_reply(token, &frame, &rest),
                    // The initiator must wait for the reply (RFC 5044 7.1.2).
                    StartKind::Request if rest.is_empty() => self.on_request(token, frame),
                    StartKind::Request => self.lose_conn(token, None),
                }
            }
            Err(error) => {
                debug!(peer = %conn.peer, %error, "no MPA connection");
                self.lose_conn(token, None);
            }
        }
    }

    fn on_request(&mut self, token: Token, request: StartFrame) {
        let Some(conn) = self.conns.get_mut(&token) else {
            return;
        };
        let (local, peer) = (conn.local, conn.peer);
        let listener = conn.listener.filter(|id| self.ids.get(*id).is_ok());
        let is_full = |entry: &Id| entry.requests >= entry.backlog;
        if listener.is_some_and(|id| self.ids.get(id).is_ok_and(is_full)) {
            // Wait until another request has been accepted or rejected, with the same timeout as
            // for the request.
            conn.request = Some(request);
            return;
        }
        self.strangers.retain(|it| *it != token);
        let is_known = matches!(request.revision, 1 | 2);
        let param = param_of(request.enhanced, request.private_data.clone());
        become_state(&mut conn.state, ConnState::Requested);
        conn.request = Some(request);
        let entry = Id {
            state: IdState::Requested,
            local: Some(local),
            peer: Some(peer),
            conn: Some(token),
            listener,
            ..Id::new()
        };
        let new = match listener {
            Some(listener) if is_known => self.ids.insert(entry).ok().map(|id| (listener, id)),
            _ => None,
        };
        let Some((listener, id)) = new else {
            return self.refuse_request(token, &[]);
        };
        if let Some(conn) = self.conns.get_mut(&token) {
            conn.id = Some(id);
        }
        self.set_due(token, None);
        if let Ok(entry) = self.ids.get_mut(listener) {
            entry.requests += 1;
        }
        self.rest_or_attend(listener);
        self.report(
            id,
            CmEventKind::ConnectRequest {
                listener,
                peer,
                param,
            },
        );
    }

    /// Called when a pending request of a listener has been accepted, rejected or closed.
    pub(super) fn on_request_completed(&mut self, listener: CmId) {
        let Ok(entry) = self.ids.get_mut(listener) else {
            return;
        };
        entry.requests -= 1;
        self.rest_or_attend(listener);
        let waits = |token: &&Token| {
            let conn = self.conns.get(token);
            conn.is_some_and(|conn| conn.listener == Some(listener) && conn.request.is_some())
        };
        let next = self.strangers.iter().find(waits).copied();
        if let Some(token) = next
            && let Some(conn) = self.conns.get_mut(&token)
            && let Some(request) = conn.request.take()
        {
            self.on_request(token, request);
        }
    }

    /// Called when the request of an id is no longer pending.
    fn leave_listener(&mut self, id: CmId) {
        let entry = self.ids.get_mut(id).ok();
        if let Some(listener) = entry.and_then(|entry| entry.listener.take()) {
            self.on_request_completed(listener);
        }
    }

    /// Sends a reply to reject a request. The connection no longer has an id.
    pub(super) fn refuse_request(&mut self, token: Token, private_data: &[u8]) {
        let Some(conn) = self.conns.get_mut(&token) else {
            return;
        };
        if let Some(request) = conn.request.take() {
            setup::refusal(&request, private_data.to_vec()).emit(&mut conn.outbox);
        }
        let id = conn.id.take();
        become_state(&mut conn.state, ConnState::Closing);
        self.set_due(token, Some(self.device.now() + CLOSING_TIME));
        if let Some(id) = id {
            self.leave_listener(id);
        }
        self.flush(token);
    }

    /// Sends a reply to accept a request, and starts the stream.
    pub(super) fn respond_to_request(
        &mut self,
        id: CmId,
        token: Token,
        qp: QpId,
        reply: &StartFrame,
        agreed: NegotiatedParams,
        by_first: bool,
    ) -> Result<(), CmError> {
        let conn = self.conns.get_mut(&token);
        let conn = conn.ok_or(CmError::InvalidState("accept"))?;
        let params = StreamParams {
            agreed,
            mulpdu: mulpdu(&conn.socket),
            access: Access::empty(),
        };
        self.device.start_stream(qp, &params)?;
        if let Ok(entry) = self.ids.get(id) {
            // The connection still works without these options.
            let _ = entry.configure(&conn.socket, conn.peer);
        }
        conn.request = None;
        conn.qp = Some(qp);
        conn.awaits_first = by_first;
        reply.emit(&mut conn.outbox);
        become_state(&mut conn.state, ConnState::Open);
        self.by_qp.insert(qp, token);
        self.set_due(token, by_first.then_some(self.device.now() + SETUP_TIME));
        let entry = self.ids.get_mut(id);
        become_state(&mut entry.map_err(CmError::from)?.state, IdState::Accepting);
        self.leave_listener(id);
        // In this case, the initiator may not send anything, so the connection is established by
        // the reply.
        if !by_first {
            self.on_established(id, ConnParam::default());
        }
        self.flush(token);
        Ok(())
    }

    fn on_reply(&mut self, token: Token, reply: &StartFrame, rest: &[u8]) {
        let Some(conn) = self.conns.get_mut(&token) else {
            return;
        };
        let (Some(id), Some(qp), Some(request)) = (conn.id, conn.qp, conn.request.take()) else {
            return self.drop_conn(token);
        };
        // The peer's user has seen the request, so don't retry.
        if reply.rejected {
            let kind = CmEventKind::Rejected {
                reason: BY_CONSUMER,
                private_data: reply.private_data.clone(),
            };
            return self.end_conn(token, kind);
        }
        if reply.revision < request.revision
            && self.retry_with_revision(token, reply.revision, &request)
        {
            return;
        }
        let (mut agreed, disagreement) = setup::negotiate(&request, reply);
        if request.enhanced.is_none() {
            // In revision 1, each side uses its own limits without comparing them.
            let requested = self.ids.get(id).ok().and_then(|entry| entry.param.as_ref());
            let depths = requested
                .map(|requested| (requested.responder_resources, requested.initiator_depth));
            let (resources, depth) = depths.unwrap_or_default();
            let wishes = self.wishes(resources, depth);
            (agreed.ird, agreed.ord) = (wishes.ird, wishes.ord);
        }
        let Some(conn) = self.conns.get_mut(&token) else {
            return;
        };
        let params = StreamParams {
            agreed,
            mulpdu: mulpdu(&conn.socket),
            access: Access::empty(),
        };
        become_state(&mut conn.state, ConnState::Open);
        self.set_due(token, None);
        if let Err(e) = self.device.start_stream(qp, &params) {
            return self.end_conn(token, CmEventKind::ConnectError(e.into()));
        }
        if let Some(disagreement) = disagreement {
            debug!(%disagreement, "incompatible reply");
            self.device.refuse_stream(qp, disagreement);
            // Send a terminate message before closing the connection.
            let error = VerbsError::Os(libc::EPROTO);
            self.leave_id(token, CmEventKind::ConnectError(error.into()));
            return;
        }
        // This is from our perspective: the peer's requested depth is the number we need to
        // support.
        let mut param = param_of(reply.enhanced, reply.private_data.clone());
        if reply.enhanced.is_none() {
            (param.responder_resources, param.initiator_depth) =
                (depth(agreed.ird), depth(agreed.ord));
        }
        self.on_established(id, param);
        if !rest.is_empty() {
            self.take_stream(token, rest);
        }
    }

    pub(super) fn on_established(&mut self, id: CmId, param: ConnParam) {
        if let Ok(entry) = self.ids.get_mut(id)
            && matches!(entry.state, IdState::Connecting | IdState::Accepting)
        {
            become_state(&mut entry.state, IdState::Established);
            entry.was_established = true;
            self.report(id, CmEventKind::Established { param });
        }
    }

    /// Handles stream data.
    pub(super) fn take_stream(&mut self, token: Token, bytes: &[u8]) {
        let Some(conn) = self.conns.get_mut(&token) else {
            return;
        };
        let (Some(qp), id) = (conn.qp, conn.id) else {
            return;
        };
        let is_first = std::mem::take(&mut conn.awaits_first);
        self.device.handle_stream(self.device.now(), qp, bytes);
        // If this message closes the connection, it was never established.
        if is_first && !self.device.has_stream_ended(qp) {
            let counters = self.device.qp_counters(qp).map(|counters| counters.rdmap);
            let has_received = counters.is_ok_and(|counters| counters.rx_segments > 0);
            match (has_received, id) {
                (true, Some(id)) => {
                    self.set_due(token, None);
                    self.on_established(id, ConnParam::default());
                }
                (true, None) => {}
                // The message is not complete.
                (false, _) => {
                    if let Some(conn) = self.conns.get_mut(&token) {
                        conn.awaits_first = true;
                    }
                }
            }
        }
    }

    /// Closes a connection on our side: sends the remaining data and waits for the peer to close
    /// it.
    pub(super) fn close_conn(&mut self, token: Token) {
        let Some(conn) = self.conns.get_mut(&token) else {
            return;
        };
        if conn.state != ConnState::Open {
            return;
        }
        become_state(&mut conn.state, ConnState::Closing);
        if let Some(qp) = conn.qp {
            self.device.fail_qp(qp);
        }
        self.set_due(token, Some(self.device.now() + CLOSING_TIME));
        self.flush(token);
    }

    /// Sends the request again with an older revision if not supported by the peer. Returns whether
    /// this is done. The private data always fits into the older request.
    fn retry_with_revision(&mut self, token: Token, revision: u8, request: &StartFrame) -> bool {
        let Some(conn) = self.conns.get(&token) else {
            return false;
        };
        let (local, peer) = (conn.local, conn.peer);
        let (Some(id), Some(qp), 1) = (conn.id, conn.qp, revision) else {
            return false;
        };
        let Ok(socket) = self.new_socket(local) else {
            return false;
        };
        info!(%peer, "retrying with MPA revision 1: the peer may not support revision 2");
        if let Some(conn) = self.take_conn(token) {
            // This releases the port immediately, and the peer does not keep a connection it would
            // wait for.
            let _ = conn.socket.set_linger(Some(Duration::ZERO));
        }
        let request = StartFrame {
            revision,
            enhanced: None,
            ..request.clone()
        };
        self.dial(id, qp, socket, (local, peer), request);
        true
    }

    /// Establishes a TCP connection, then sends the request.
    pub(super) fn dial(
        &mut self,
        id: CmId,
        qp: QpId,
        socket: Socket,
        (local, peer): (SocketAddr, SocketAddr),
        request: StartFrame,
    ) {
        let entry = self.ids.get(id);
        let configured = entry.map_or(Ok(()), |entry| entry.configure(&socket, peer));
        let started = configured.and_then(|()| match socket.connect(&peer.into()) {
            Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => Ok(()),
            other => other,
        });
        let mut conn = Conn::new(socket, ConnState::Connecting, local, peer);
        (conn.id, conn.qp, conn.request) = (Some(id), Some(qp), Some(request));
        let token = self.add_conn(conn);
        if let Ok(entry) = self.ids.get_mut(id) {
            entry.conn = Some(token);
        }
        self.by_qp.insert(qp, token);
        match started {
            Ok(()) => self.set_due(token, Some(self.device.now() + SETUP_TIME)),
            Err(e) => self.lose_conn(token, Some(&e)),
        }
    }

    /// Handles a connection that was closed by the peer or due to an error, and reports it.
    pub(super) fn lose_conn(&mut self, token: Token, error: Option<&io::Error>) {
        let Some(conn) = self.conns.get_mut(&token) else {
            return;
        };
        // There was no reply, so the peer might require an older revision (RFC 5044 7.1.2 requires
        // closing the connection in this case).
        let is_closed = error.is_none_or(|e| e.kind() == io::ErrorKind::ConnectionReset);
        let requested_at = conn.due.and_then(|due| due.checked_sub(SETUP_TIME));
        let is_early =
            requested_at.is_some_and(|requested_at| self.device.now() < requested_at + OLDER_TIME);
        let peer = self.per_peer.get(&conn.peer.ip());
        if conn.state == ConnState::AwaitsReply
            && is_closed
            && is_early
            && conn.inbox.is_empty()
            && peer.is_none_or(|peer| !peer.knows_2)
            && let Some(request) = conn.request.take_if(|request| request.revision > 1)
            && self.retry_with_revision(token, request.revision - 1, &request)
        {
            return;
        }
        let Some(conn) = self.conns.get(&token) else {
            return;
        };
        let refused = |reason| CmEventKind::Rejected {
            reason,
            private_data: Vec::new(),
        };
        let kind = match (conn.state, error.map(io::Error::kind)) {
            (ConnState::Connecting, Some(io::ErrorKind::ConnectionRefused)) => refused(NO_LISTENER),
            (
                ConnState::Connecting | ConnState::AwaitsReply,
                Some(
                    io::ErrorKind::TimedOut
                    | io::ErrorKind::HostUnreachable
                    | io::ErrorKind::NetworkUnreachable,
                ),
            ) => CmEventKind::Unreachable,
            (ConnState::Connecting, Some(_)) => {
                let errno = error.and_then(io::Error::raw_os_error);
                let error = VerbsError::Os(errno.unwrap_or(libc::EIO));
                CmEventKind::ConnectError(error.into())
            }
            (ConnState::Open | ConnState::Closing, _) => {
                let id = conn.id.and_then(|id| self.ids.get(id).ok());
                match id.is_some_and(|entry| entry.was_established) {
                    true => CmEventKind::Disconnected,
                    false => refused(BY_CONSUMER),
                }
            }
            _ => refused(BY_CONSUMER),
        };
        self.end_conn(token, kind);
    }

    /// Removes a connection and notifies the application.
    fn end_conn(&mut self, token: Token, kind: CmEventKind) {
        // Do this before removing the connection, so that the QP flushes the requests.
        self.leave_id(token, kind);
        self.drop_conn(token);
    }

    /// Releases the id and the QP of a connection.
    fn leave_id(&mut self, token: Token, kind: CmEventKind) {
        let Some(conn) = self.conns.get_mut(&token) else {
            return;
        };
        let (id, qp) = (conn.id.take(), conn.qp);
        // If the reply is not compatible with the stream, we still need to send a terminate
        // message.
        let says_more =
            conn.state == ConnState::Open && matches!(kind, CmEventKind::ConnectError(_));
        if let Some(qp) = qp.filter(|_| !says_more) {
            self.device.fail_qp(qp);
        }
        let Some(id) = id else {
            return;
        };
        self.leave_listener(id);
        let Ok(entry) = self.ids.get_mut(id) else {
            return;
        };
        entry.conn = None;
        if entry.state != IdState::Closed {
            become_state(&mut entry.state, IdState::Closed);
            let was_established = entry.was_established;
            self.report(id, kind);
            // The QP is no longer connected, and its number can be reused.
            if was_established {
                self.report(id, CmEventKind::TimewaitExit);
            }
        }
    }

    /// Removes a connection without notifying the application. Its QP fails.
    pub(super) fn drop_conn(&mut self, token: Token) {
        if let Some(conn) = self.take_conn(token)
            && let Some(qp) = conn.qp
            && self.by_qp.remove(&qp).is_some()
        {
            self.device.fail_qp(qp);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_use_receiver_perspective() {
        let said = Enhanced {
            ird: 3,
            ord: ANY_DEPTH,
            ..Enhanced::default()
        };
        let param = param_of(Some(said), vec![1]);
        assert_eq!((param.initiator_depth, param.responder_resources), (3, 16));
    }
}
