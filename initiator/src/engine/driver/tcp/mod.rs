//! TCP as the datamover of a session.

mod events;

use std::time::Instant;

use riser_scsi::iscsi::login::ConnectionParams;

use super::context::MoverError;
use crate::engine::env::Env;
use crate::engine::io::Target;
use crate::engine::park::Waited;
use crate::engine::tcp::{Item, TcpConn};
use crate::iscsi::session::{ControlPdu, DataOrder};
use crate::request::RequestId;
use crate::session::{ConnectError, IscsiFault};

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

    /// The time at which the connection is to be checked.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.conn.as_ref()?.check_at()
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
}

fn tcp_error(error: &std::io::Error) -> ConnectError {
    ConnectError::Tcp(error.raw_os_error().unwrap_or(0))
}
