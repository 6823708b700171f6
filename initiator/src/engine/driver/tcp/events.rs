//! Socket events: connected, writable, readable.

use std::time::Instant;

use riser_block::Buffer;

use super::{TcpMover, tcp_error};
use crate::engine::driver::Driver;
use crate::engine::driver::context::{Context, log_in};
use crate::engine::env::Env;
use crate::engine::io::Io;
use crate::engine::tcp::{Received, Source, TcpConn};
use crate::iscsi::session::IscsiSession;
use crate::request::RequestId;
use crate::session::{Down, Machine as _};

/// Maximum number of receives per connection and round, so that no session starves another.
const ROUND: usize = 8;

impl TcpMover {
    /// Checks whether the connection was established or has failed; returns whether either
    /// happened.
    fn poll_connected<E: Env>(
        &mut self,
        machine: &mut IscsiSession,
        env: &mut E,
        now: Instant,
    ) -> bool {
        let conn = self.conn.as_mut();
        match conn.map(|conn| conn.poll_connected(now)) {
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

    /// Sends as much as the socket accepts; returns whether anything was sent.
    fn flush(&mut self, machine: &mut IscsiSession, ios: &[Option<Io>], now: Instant) -> bool {
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

    /// Checks whether the target's host is available and whether sent data arrives at the target.
    /// Call this before any timeout is handled. Acceptance by the socket proves neither, because it
    /// may buffer several MiB, and sending these may take minutes on a slow network.
    pub(in crate::engine::driver) fn check_liveness(
        &mut self,
        machine: &mut IscsiSession,
        now: Instant,
    ) {
        let Some(conn) = &mut self.conn else {
            return;
        };
        if conn.check(now) {
            machine.abandon_connection(Down::Unresponsive, false, now);
            return;
        }
        if let Some(arrived) = conn.poll_acknowledged() {
            let outgoing = &conn.outgoing;
            machine.handle_progress(
                |request| outgoing.is_under_way(request, arrived.end),
                |kind| outgoing.is_behind(kind, arrived.start),
                now,
            );
        }
    }

    /// Receives once; returns whether data was received.
    fn receive(&mut self, machine: &mut IscsiSession, now: Instant) -> bool {
        match self.conn.as_mut().map(TcpConn::receive) {
            None | Some(Ok(None)) => false,
            Some(Ok(Some(_))) => true,
            Some(Err(_)) => {
                machine.handle_broken(now);
                false
            }
        }
    }

    /// Processes the next received PDU; returns whether there was one. A partial PDU also proves
    /// that the target is alive.
    fn process_pdu(
        &mut self,
        machine: &mut IscsiSession,
        ios: &[Option<Io>],
        now: Instant,
    ) -> bool {
        let Some(conn) = &mut self.conn else {
            return false;
        };
        let place = |bhs: &_, len| machine.place_data(bhs, len);
        let buffers = |request: RequestId| -> &[Buffer] {
            let io = ios.get(request.0 as usize).and_then(Option::as_ref);
            io.map_or(&[], |io| io.io.data.buffers())
        };
        match conn.incoming.next(place, buffers) {
            Ok(None) => {
                machine.handle_bytes(conn.incoming.arriving(), now);
                return false;
            }
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

impl<E: Env> Driver<E> {
    /// Sends and receives on all TCP connections; returns whether there was anything to do.
    pub(in crate::engine) fn run_tcp(&mut self, now: Instant) -> bool {
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

    /// The outputs of each step are processed before the next step, which may use another
    /// connection. Received data is processed PDU by PDU, and the resulting responses and commands
    /// are sent together at the end.
    fn run_connection(&mut self, index: usize, now: Instant) -> bool {
        let mut worked = self.on_tcp(index, now, |mover, machine, cx| {
            mover.poll_connected(machine, cx.env, now)
        });
        let flush = |mover: &mut TcpMover, machine: &mut IscsiSession, cx: &mut Context<'_, E>| {
            mover.flush(machine, cx.ios, now)
        };
        worked |= self.on_tcp(index, now, flush);
        for _ in 0..ROUND {
            if !self.on_tcp(index, now, |mover, machine, _| mover.receive(machine, now)) {
                break;
            }
            worked = true;
            while self.on_tcp(index, now, |mover, machine, cx| {
                mover.process_pdu(machine, cx.ios, now)
            }) {}
        }
        if worked {
            self.on_tcp(index, now, flush);
        }
        worked
    }

    /// Executes a step of a connection and processes the resulting outputs.
    fn on_tcp(
        &mut self,
        index: usize,
        now: Instant,
        act: impl FnOnce(&mut TcpMover, &mut IscsiSession, &mut Context<'_, E>) -> bool,
    ) -> bool {
        self.with_link(index, now, |link, cx: &mut Context<'_, E>| {
            let (machine, mover) = link.iscsi().and_then(|link| link.on_tcp())?;
            Some(act(mover, machine, cx))
        })
        .unwrap_or(false)
    }
}
