//! Slot for a connection, which may be opened and closed many times.

use std::net::SocketAddr;
use std::time::Instant;

use riser_transport::verbs::{CmEventKind, ConnParam, Provider, VerbsError};

use super::conn::{CmStep, RdmaConn, Retire};
use super::{Device, Resources};
use crate::request::RequestId;
use crate::session::ConnectError;

/// Protocol-specific connection on RDMA: a reliable connection with at most `R` regions per
/// command, and the protocol's buffers.
pub(in crate::engine) trait RdmaProtocol<const R: usize> {
    fn rdma(&self) -> &RdmaConn<R>;

    fn rdma_mut(&mut self) -> &mut RdmaConn<R>;

    /// Prepares a new queue pair by posting the receives for the login. Returns false if it rejects
    /// them.
    fn prepare<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        resources: &Resources,
    ) -> Result<bool, VerbsError>;

    /// Releases all resources like [`RdmaConn::release`].
    fn release<P: Provider>(self, device: &mut Device<P>, linger: bool, now: Instant);
}

/// Event of a connection, for the state machine of its session.
#[derive(Debug)]
pub(in crate::engine) enum ConnEvent {
    /// Connected, with the peer's parameters.
    Established(ConnParam),
    /// Rejected and released, with the CM's reason and private data.
    Rejected { reason: u16, private_data: Vec<u8> },
    /// Connecting failed, and the connection was released.
    Failed(ConnectError),
    /// The connection is lost and must be closed.
    Lost,
    /// The connection was closing and has been released.
    Closed,
}

/// See the documentation of the module.
pub(in crate::engine) struct ConnSlot<C, const R: usize> {
    conn: Option<C>,
}

impl<C, const R: usize> Default for ConnSlot<C, R> {
    fn default() -> Self {
        Self { conn: None }
    }
}

impl<const R: usize, C: RdmaProtocol<R>> ConnSlot<C, R> {
    pub(in crate::engine) fn is_empty(&self) -> bool {
        self.conn.is_none()
    }

    pub(in crate::engine) fn conn(&mut self) -> Option<&mut C> {
        self.conn.as_mut()
    }

    /// Stores a connection that is being established.
    pub(in crate::engine) fn set(&mut self, conn: C) {
        self.conn = Some(conn);
    }

    /// Handles an event of the connection manager. `login` returns the private data for the connect
    /// request.
    pub(in crate::engine) fn handle_cm_event<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        resources: &Resources,
        event: CmEventKind,
        login: impl FnOnce() -> Vec<u8>,
        now: Instant,
    ) -> Option<ConnEvent> {
        let conn = self.conn.as_mut()?;
        let event = match conn.rdma_mut().handle_event(device, event, now) {
            CmStep::Pending => return None,
            CmStep::Connect => match connect(conn, device, resources, login) {
                Ok(()) => return None,
                Err(error) => ConnEvent::Failed(error),
            },
            CmStep::Established(param) => ConnEvent::Established(param),
            CmStep::Rejected {
                reason,
                private_data,
            } => ConnEvent::Rejected {
                reason,
                private_data,
            },
            CmStep::Failed(error) => ConnEvent::Failed(error),
            CmStep::Lost => ConnEvent::Lost,
            CmStep::Closed => ConnEvent::Closed,
        };
        match event {
            ConnEvent::Established(_) | ConnEvent::Lost => {}
            // The connection does not exist at the peer, so there is nothing to disconnect.
            ConnEvent::Rejected { .. } | ConnEvent::Failed(_) => self.release(device, false, now),
            ConnEvent::Closed => self.release(device, true, now),
        }
        Some(event)
    }

    /// Returns the address to which the connection was redirected, if any.
    pub(in crate::engine) fn redirect(&self) -> Option<SocketAddr> {
        self.conn.as_ref()?.rdma().redirect()
    }

    /// See [`RdmaConn::retire`]. Without a connection, its closing reports all of its requests.
    pub(in crate::engine) fn retire<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        request: RequestId,
    ) -> Retire {
        let conn = self.conn.as_mut();
        conn.map_or(Retire::Pending, |conn| {
            conn.rdma_mut().retire(device, request)
        })
    }

    /// Returns the latest time for closing a connection that is being closed.
    pub(in crate::engine) fn closing_until(&self) -> Option<Instant> {
        self.conn.as_ref()?.rdma().closing_until()
    }

    /// Returns the time for closing or probing the connection.
    pub(in crate::engine) fn next_deadline(&self) -> Option<Instant> {
        let rdma = self.conn.as_ref()?.rdma();
        rdma.closing_until().or_else(|| rdma.probe_at())
    }

    /// Calls [`RdmaConn::probe`] if there is a connection.
    pub(in crate::engine) fn probe<P: Provider>(&mut self, device: &mut Device<P>, now: Instant) {
        if let Some(conn) = &mut self.conn {
            conn.rdma_mut().probe(device, now);
        }
    }

    /// Starts closing the connection; returns whether it is already closed.
    pub(in crate::engine) fn begin_close<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        has_logout: bool,
        now: Instant,
    ) -> bool {
        let conn = self.conn.as_mut();
        if conn.is_some_and(|conn| conn.rdma_mut().begin_close(has_logout, now)) {
            return false;
        }
        self.release(device, true, now);
        true
    }

    /// Calls [`RdmaConn::release`] if there is a connection.
    pub(in crate::engine) fn release<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        linger: bool,
        now: Instant,
    ) {
        if let Some(conn) = self.conn.take() {
            conn.release(device, linger, now);
        }
    }
}

/// Called when the path was resolved: creates the queue pair and sends the connect request with the
/// login. On error, existing parts are released with the connection.
fn connect<const R: usize, P: Provider>(
    conn: &mut impl RdmaProtocol<R>,
    device: &mut Device<P>,
    resources: &Resources,
    login: impl FnOnce() -> Vec<u8>,
) -> Result<(), ConnectError> {
    let made = conn.rdma_mut().set_up(device, resources);
    let prepared = made.and_then(|()| conn.prepare(device, resources));
    // Before the request, because a message may directly follow the response.
    let prepared = prepared.map(|is_prepared| is_prepared && conn.rdma().flush(device));
    if !prepared.map_err(ConnectError::Local)? {
        let error = VerbsError::InvalidState("cannot post receives to the queue pair");
        return Err(ConnectError::Local(error));
    }
    conn.rdma_mut().connect(device, login())
}
