//! TCP datamover of a session.

mod events;

use std::time::Instant;

use riser_block::poll_fds::PollInterest;
use riser_scsi::iscsi::login::ConnectionParams;

use super::context::MoverError;
use crate::engine::env::Env;
use crate::engine::io::Target;
use crate::engine::tcp::{Item, TcpConn};
use crate::iscsi::session::{ControlPdu, DataOrder};
use crate::request::RequestId;
use crate::session::{ConnectError, IscsiFault};

/// The connection of a session.
#[derive(Default)]
pub(super) struct TcpMover {
    conn: Option<TcpConn>,
    /// Requests with memory still queued for sending. Bound: the queue size.
    retiring: Vec<RequestId>,
}

impl TcpMover {
    pub(super) fn poll_interest(&self) -> Option<PollInterest<'_>> {
        let conn = self.conn.as_ref()?;
        Some(PollInterest {
            fd: conn.fd(),
            to_read: true,
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

    /// Returns the time of the next connection check.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.conn.as_ref()?.check_at()
    }

    fn push(&mut self, item: Item) -> Result<(), MoverError> {
        let conn = self.conn.as_mut();
        let is_accepted = conn.is_none_or(|conn| conn.outgoing.push(item));
        let flood = MoverError::Fault(IscsiFault::Flood);
        is_accepted.then_some(()).ok_or(flood)
    }

    pub(super) fn send(&mut self, pdu: ControlPdu) -> Result<(), MoverError> {
        self.push(Item::Control(pdu))
    }

    /// Changes data segment sizes and digests: for sending, after all queued items; for receiving,
    /// immediately.
    pub(super) fn enter_full_feature(
        &mut self,
        params: ConnectionParams,
    ) -> Result<(), MoverError> {
        if let Some(conn) = &mut self.conn {
            conn.incoming.set(params.max_recv_segment, params.digests);
        }
        self.push(Item::Params(params.digests, params.max_send_segment))
    }

    pub(super) fn start_command(&mut self, request: RequestId) -> Result<(), MoverError> {
        self.push(Item::Command(request))
    }

    pub(super) fn send_data(&mut self, order: DataOrder) -> Result<(), MoverError> {
        self.push(Item::Data(order))
    }

    /// Retires a request's memory; returns false if some of it is still queued for sending.
    pub(super) fn retire(&mut self, request: RequestId) -> bool {
        let is_pending = |c: &TcpConn| c.outgoing.is_pending(request);
        let is_pending = self.conn.as_ref().is_some_and(is_pending);
        if is_pending {
            self.retiring.push(request);
        }
        !is_pending
    }

    /// Closes the connection immediately.
    pub(super) fn disconnect(&mut self) -> bool {
        self.conn = None;
        self.retiring.clear();
        true
    }
}

fn tcp_error(error: &std::io::Error) -> ConnectError {
    ConnectError::Tcp(error.raw_os_error().unwrap_or(0))
}
