//! Sessions of iSCSI on TCP.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use riser_scsi::iscsi::chap::CHALLENGE_LEN;
use riser_scsi::iscsi::name::{Found, TargetAddress};
use riser_transport::verbs::Provider;

use super::link::{Link, TcpOpen};
use super::{Driver, Target};
use crate::block::Buffer;
use crate::engine::io::Io;
use crate::engine::oneshot::Sender;
use crate::engine::park::Waited;
use crate::engine::tcp::{Item, Received, Source, TcpConn};
use crate::iscsi::session::{Output, Session};
use crate::request::RequestId;
use crate::session::{ConnectError, IscsiFault};

/// Receives of one connection in one round at most, so that no session starves another.
const ROUND: usize = 8;

/// A session and its connection.
pub(super) struct TcpLink {
    pub(super) machine: Session,
    pub(super) target: Target,
    conn: Option<TcpConn>,
    /// Requests whose memory still waits to be sent. Bound: the queue size.
    retiring: Vec<RequestId>,
    found: Option<Sender<Vec<Found>>>,
}

impl TcpLink {
    pub(super) fn new(target: Target, open: TcpOpen, now: Instant) -> Self {
        Self {
            machine: Session::new(open.config, now),
            target,
            conn: None,
            retiring: Vec::new(),
            found: open.found,
        }
    }

    /// What to wait for.
    pub(super) fn waited(&self) -> Option<Waited> {
        let conn = self.conn.as_ref()?;
        Some(Waited {
            fd: conn.fd(),
            to_write: conn.wants_write(),
        })
    }

    fn connect(&mut self, moved: Option<TargetAddress>, now: Instant) {
        let dst = match moved.as_ref().map(literal) {
            None => self.target.dst,
            Some(Some(dst)) => dst,
            Some(None) => {
                self.machine
                    .handle_connect_failed(ConnectError::Redirected, now);
                return;
            }
        };
        match TcpConn::new(self.target.src, dst) {
            Ok(conn) => self.conn = Some(conn),
            Err(error) => self.fail_connect(&error, now),
        }
    }

    fn fail_connect(&mut self, error: &std::io::Error, now: Instant) {
        self.conn = None;
        let error = ConnectError::Tcp(error.raw_os_error().unwrap_or(0));
        self.machine.handle_connect_failed(error, now);
    }

    fn push(&mut self, item: Item) {
        if let Some(conn) = &mut self.conn
            && !conn.outgoing.push(item)
        {
            self.machine.handle_fault(IscsiFault::Flood);
        }
    }

    fn retire(&mut self, request: RequestId, now: Instant) {
        let is_pending = |c: &TcpConn| c.outgoing.is_pending(request);
        if self.conn.as_ref().is_some_and(is_pending) {
            self.retiring.push(request);
        } else {
            self.machine.handle_retired(request, now);
        }
    }

    /// The connection has been made, or not.
    fn poll_connected(&mut self, now: Instant) -> bool {
        let Some(conn) = &mut self.conn else {
            return false;
        };
        match conn.poll_connected() {
            Ok(false) => false,
            Ok(true) => {
                let mut random = [0; CHALLENGE_LEN + 1];
                match getrandom::fill(&mut random) {
                    Ok(()) => self.machine.handle_connected(random, now),
                    // Without it a login could be foreseen.
                    Err(_) => self.fail_connect(&std::io::ErrorKind::Other.into(), now),
                }
                true
            }
            Err(error) => {
                self.fail_connect(&error, now);
                true
            }
        }
    }

    /// Sends what there is; whether anything was sent.
    fn flush(&mut self, ios: &[Option<Io>], now: Instant) -> bool {
        let Some(conn) = &mut self.conn else {
            return false;
        };
        let source = Source {
            session: &self.machine,
            ios,
        };
        match conn.flush(&source) {
            Ok(sent) => {
                while let Some(order) = conn.outgoing.poll_done() {
                    self.machine.handle_data_sent(&order);
                }
                if sent && !self.retiring.is_empty() {
                    let outgoing = &conn.outgoing;
                    self.retiring.retain(|request| {
                        let keep = outgoing.is_pending(*request);
                        if !keep {
                            self.machine.handle_retired(*request, now);
                        }
                        keep
                    });
                }
                sent
            }
            Err(_) => {
                self.machine.handle_broken(now);
                true
            }
        }
    }

    /// Takes the next thing that has arrived; whether there was any.
    fn take(&mut self, ios: &[Option<Io>], now: Instant) -> bool {
        let Some(conn) = &mut self.conn else {
            return false;
        };
        let machine = &mut self.machine;
        let place = |bhs: &_, len| machine.place_data(bhs, len);
        let buffers = |request: RequestId| -> &[Buffer] {
            let io = ios.get(request.0 as usize).and_then(Option::as_ref);
            io.map_or(&[], |io| io.io.data.buffers())
        };
        match conn.incoming.next(place, buffers) {
            Ok(None) => return false,
            Ok(Some(Received::Pdu(frame))) => machine.handle_pdu(&frame, now),
            Ok(Some(Received::Data {
                bhs,
                len,
                is_intact,
            })) => machine.handle_data_in(&bhs, len, is_intact, now),
            Err(fault) => machine.handle_fault(fault),
        }
        true
    }
}

/// The address of a portal that the target has moved to. A name would have to be looked up, for
/// which this thread has no time.
pub(super) fn literal(address: &TargetAddress) -> Option<SocketAddr> {
    let host = address.host.trim_start_matches('[').trim_end_matches(']');
    let ip: IpAddr = host.parse().ok()?;
    Some(SocketAddr::new(ip, address.port))
}

impl<P: Provider> Driver<P> {
    /// Carries out a session's outputs until there are none.
    pub(super) fn drain_tcp(&mut self, index: usize, now: Instant) {
        loop {
            let running = &mut self.sessions[index];
            let Link::Tcp(link) = &mut running.link else {
                return;
            };
            let Some(output) = link.machine.poll_output() else {
                return;
            };
            match output {
                Output::Connect(moved) => link.connect(moved, now),
                Output::Send(pdu) => link.push(Item::Control(pdu)),
                Output::FullFeature(params) => {
                    link.push(Item::Params(params.digests, params.max_send_segment));
                    if let Some(conn) = &mut link.conn {
                        conn.incoming.set(params.max_recv_segment, params.digests);
                    }
                }
                Output::Start(request) => link.push(Item::Command(request)),
                Output::SendData(order) => link.push(Item::Data(order)),
                Output::Retire(request) => link.retire(request, now),
                Output::Disconnect => {
                    link.conn = None;
                    link.retiring.clear();
                    link.machine.handle_gone(now);
                }
                Output::Found(found) => {
                    if let Some(reply) = link.found.take() {
                        reply.send(found);
                    }
                }
                Output::Complete(request, result) => self.complete(index, request, result, now),
                Output::Event(event) => self.handle_event(index, event, now),
            }
        }
    }

    /// Sends and receives on every TCP connection; whether there was anything to do.
    pub(super) fn run_tcp(&mut self, now: Instant) -> bool {
        let mut worked = false;
        for index in 0..self.sessions.capacity() {
            let session = self.sessions.get(index);
            if session.is_some_and(|s| matches!(s.link, Link::Tcp(_))) {
                worked |= self.run_connection(index, now);
            }
        }
        worked
    }

    fn run_connection(&mut self, index: usize, now: Instant) -> bool {
        let mut worked = self.on_tcp(index, now, |link, _| link.poll_connected(now));
        worked |= self.on_tcp(index, now, |link, ios| link.flush(ios, now));
        for _ in 0..ROUND {
            let received = self.on_tcp(index, now, |link, _| {
                match link.conn.as_mut().map(TcpConn::receive) {
                    None | Some(Ok(None)) => false,
                    Some(Ok(Some(_))) => true,
                    Some(Err(_)) => {
                        link.machine.handle_broken(now);
                        false
                    }
                }
            });
            if !received {
                break;
            }
            worked = true;
            while self.on_tcp(index, now, |link, ios| link.take(ios, now)) {}
        }
        if worked {
            self.on_tcp(index, now, |link, ios| link.flush(ios, now));
        }
        worked
    }

    /// Lets a session do something, and carries out what comes of it.
    fn on_tcp(
        &mut self,
        index: usize,
        now: Instant,
        act: impl FnOnce(&mut TcpLink, &[Option<Io>]) -> bool,
    ) -> bool {
        let running = &mut self.sessions[index];
        let Link::Tcp(link) = &mut running.link else {
            return false;
        };
        let acted = act(link, &running.ios);
        self.drain_tcp(index, now);
        acted
    }
}
