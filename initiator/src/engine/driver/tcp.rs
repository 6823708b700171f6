//! TCP as the datamover of a session.

use std::time::Instant;

use riser_scsi::iscsi::login::ConnectionParams;

use super::Driver;
use super::context::{Context, MoverError, log_in};
use crate::block::Buffer;
use crate::engine::env::Env;
use crate::engine::io::{Io, Target};
use crate::engine::park::Waited;
use crate::engine::tcp::{Item, Received, Source, TcpConn};
use crate::iscsi::session::{ControlPdu, DataOrder, Session};
use crate::request::RequestId;
use crate::session::{ConnectError, IscsiFault};

/// Receives of one connection in one round at most, so that no session starves another.
const ROUND: usize = 8;

/// The connection of a session.
#[derive(Default)]
pub(super) struct TcpMover {
    conn: Option<TcpConn>,
    /// Requests whose memory still waits to be sent. Bound: the queue size.
    retiring: Vec<RequestId>,
}

impl TcpMover {
    pub(super) fn waited(&self) -> Option<Waited<'_>> {
        let conn = self.conn.as_ref()?;
        Some(Waited {
            fd: conn.fd(),
            to_write: conn.wants_write(),
        })
    }

    pub(super) fn connect<E: Env>(
        &mut self,
        target: &Target,
        env: &mut E,
    ) -> Result<(), ConnectError> {
        let socket = env.connect_tcp(target.src, target.dst);
        self.conn = Some(TcpConn::new(socket.map_err(|e| tcp_error(&e))?));
        Ok(())
    }

    fn push(&mut self, item: Item) -> Result<(), MoverError> {
        let conn = self.conn.as_mut();
        let is_taken = conn.is_none_or(|conn| conn.outgoing.push(item));
        let flood = MoverError::Fault(IscsiFault::Flood);
        is_taken.then_some(()).ok_or(flood)
    }

    pub(super) fn send(&mut self, pdu: ControlPdu) -> Result<(), MoverError> {
        self.push(Item::Control(pdu))
    }

    /// The sizes and digests of what leaves change behind what waits; those of what arrives, now.
    pub(super) fn enter_full_feature(
        &mut self,
        params: ConnectionParams,
    ) -> Result<(), MoverError> {
        if let Some(conn) = &mut self.conn {
            conn.incoming.set(params.max_recv_segment, params.digests);
        }
        self.push(Item::Params(params.digests, params.max_send_segment))
    }

    pub(super) fn start(&mut self, request: RequestId) -> Result<(), MoverError> {
        self.push(Item::Command(request))
    }

    pub(super) fn send_data(&mut self, order: DataOrder) -> Result<(), MoverError> {
        self.push(Item::Data(order))
    }

    /// Takes a request's memory back; false if some of it still waits to be sent.
    pub(super) fn retire(&mut self, request: RequestId) -> bool {
        let is_pending = |c: &TcpConn| c.outgoing.is_pending(request);
        let is_pending = self.conn.as_ref().is_some_and(is_pending);
        if is_pending {
            self.retiring.push(request);
        }
        !is_pending
    }

    /// Closes the connection at once.
    pub(super) fn disconnect(&mut self) -> bool {
        self.conn = None;
        self.retiring.clear();
        true
    }

    /// Looks whether the connection has been made, or failed; returns whether it has.
    fn poll_connected<E: Env>(&mut self, machine: &mut Session, env: &mut E, now: Instant) -> bool {
        match self.conn.as_mut().map(TcpConn::poll_connected) {
            None | Some(Ok(false)) => false,
            Some(Ok(true)) => {
                log_in(machine, env, now);
                true
            }
            Some(Err(error)) => {
                self.conn = None;
                machine.handle_connect_failed(tcp_error(&error), now);
                true
            }
        }
    }

    /// Sends as much as the socket takes; returns whether there was anything.
    fn flush(&mut self, machine: &mut Session, ios: &[Option<Io>], now: Instant) -> bool {
        let Some(conn) = &mut self.conn else {
            return false;
        };
        let session = &*machine;
        let Ok(sent) = conn.flush(&Source { session, ios }) else {
            machine.handle_broken(now);
            return true;
        };
        while let Some(order) = conn.outgoing.poll_done() {
            machine.handle_data_sent(&order);
        }
        if sent {
            let outgoing = &conn.outgoing;
            self.retiring.retain(|request| {
                let keep = outgoing.is_pending(*request);
                if !keep {
                    machine.handle_retired(*request, now);
                }
                keep
            });
        }
        sent
    }

    /// Receives once; returns whether anything came.
    fn receive(&mut self, machine: &mut Session, now: Instant) -> bool {
        match self.conn.as_mut().map(TcpConn::receive) {
            None | Some(Ok(None)) => false,
            Some(Ok(Some(_))) => true,
            Some(Err(_)) => {
                machine.handle_broken(now);
                false
            }
        }
    }

    /// Takes the next PDU of what has arrived; returns whether there was one.
    fn take(&mut self, machine: &mut Session, ios: &[Option<Io>], now: Instant) -> bool {
        let Some(conn) = &mut self.conn else {
            return false;
        };
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

fn tcp_error(error: &std::io::Error) -> ConnectError {
    ConnectError::Tcp(error.raw_os_error().unwrap_or(0))
}

impl<E: Env> Driver<E> {
    /// Sends and receives on every TCP connection; whether there was anything to do.
    pub(super) fn run_tcp(&mut self, now: Instant) -> bool {
        let mut worked = false;
        for index in 0..self.sessions.capacity() {
            let session = self.sessions.get_mut(index);
            let link = session.and_then(|s| s.link.iscsi());
            if link.is_some_and(|link| link.on_tcp().is_some()) {
                worked |= self.run_connection(index, now);
            }
        }
        worked
    }

    /// Each step's outputs are carried out before the next one, which may be by another connection:
    /// what has arrived is taken PDU by PDU, and what the answers and their users have submitted
    /// meanwhile leaves at the end in one go.
    fn run_connection(&mut self, index: usize, now: Instant) -> bool {
        let mut worked = self.on_tcp(index, now, |mover, machine, cx| {
            mover.poll_connected(machine, cx.env, now)
        });
        let flush = |mover: &mut TcpMover, machine: &mut Session, cx: &mut Context<'_, E>| {
            mover.flush(machine, cx.ios, now)
        };
        worked |= self.on_tcp(index, now, flush);
        for _ in 0..ROUND {
            if !self.on_tcp(index, now, |mover, machine, _| mover.receive(machine, now)) {
                break;
            }
            worked = true;
            while self.on_tcp(index, now, |mover, machine, cx| {
                mover.take(machine, cx.ios, now)
            }) {}
        }
        if worked {
            self.on_tcp(index, now, flush);
        }
        worked
    }

    /// Gives a connection something to do, and carries out what comes of it.
    fn on_tcp(
        &mut self,
        index: usize,
        now: Instant,
        act: impl FnOnce(&mut TcpMover, &mut Session, &mut Context<'_, E>) -> bool,
    ) -> bool {
        self.with_link(index, now, |link, cx: &mut Context<'_, E>| {
            let (machine, mover) = link.iscsi().and_then(|link| link.on_tcp())?;
            Some(act(mover, machine, cx))
        })
        .unwrap_or(false)
    }
}
