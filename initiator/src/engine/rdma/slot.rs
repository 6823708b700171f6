//! The place of a connection, which is made and lost many times.

use std::time::Instant;

use riser_transport::verbs::{CmEventKind, ConnParam, Provider, VerbsError};

use super::conn::{CmStep, RdmaConn, Retire};
use super::{Device, Resources};
use crate::request::RequestId;
use crate::session::ConnectError;

/// A protocol's connection on RDMA: a reliable connection, whose commands have `R` regions at most,
/// and the protocol's buffers.
pub(in crate::engine) trait RdmaProtocol<const R: usize> {
    fn rdma(&self) -> &RdmaConn<R>;

    fn rdma_mut(&mut self) -> &mut RdmaConn<R>;

    /// Prepares a queue pair that has just been made: posts the receives of the login. False if it
    /// takes none.
    fn prepare<P: Provider>(
        &mut self,
        device: &mut Device<P>,
        resources: &Resources,
    ) -> Result<bool, VerbsError>;

    /// Releases everything, as [`RdmaConn::release`] does.
    fn release<P: Provider>(self, device: &mut Device<P>, linger: bool, now: Instant);
}

/// An event of a connection, for its session's machine.
#[derive(Debug)]
pub(in crate::engine) enum ConnEvent {
    /// Connected; the peer's parameters.
    Established(ConnParam),
    /// Refused and released, with the CM's reason and private data.
    Rejected { reason: u16, private_data: Vec<u8> },
    /// It could not be made, and has been released.
    Failed(ConnectError),
    /// It is gone, and is to be closed.
    Lost,
    /// It was being closed, and has been released.
    Closed,
}

/// See the module's documentation.
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

    /// Keeps a connection that has begun to be made.
    pub(in crate::engine) fn set(&mut self, conn: C) {
        self.conn = Some(conn);
    }

    /// Handles an event of the connection manager. `login` gives the private data of the request.
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
            // The peer does not know the connection, so there is nothing to disconnect.
            ConnEvent::Rejected { .. } | ConnEvent::Failed(_) => self.release(device, false, now),
            ConnEvent::Closed => self.release(device, true, now),
        }
        Some(event)
    }

    /// As [`RdmaConn::retire`]. Without a connection, its end reports all of its requests.
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

    /// The time at which a connection that is being closed is closed at the latest.
    pub(in crate::engine) fn closing_until(&self) -> Option<Instant> {
        self.conn.as_ref()?.rdma().closing_until()
    }

    /// The time at which the connection is to be closed or probed.
    pub(in crate::engine) fn next_deadline(&self) -> Option<Instant> {
        let rdma = self.conn.as_ref()?.rdma();
        rdma.closing_until().or_else(|| rdma.probe_at())
    }

    /// As [`RdmaConn::probe`], if there is a connection.
    pub(in crate::engine) fn probe<P: Provider>(&mut self, device: &mut Device<P>, now: Instant) {
        if let Some(conn) = &mut self.conn {
            conn.rdma_mut().probe(device, now);
        }
    }

    /// Begins to close the connection; returns whether it is closed.
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

    /// As [`RdmaConn::release`], if there is a connection.
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

/// The path is found: makes the queue pair and sends the request with the login in it. After an
/// error, what has been made goes with the connection's release.
fn connect<const R: usize, P: Provider>(
    conn: &mut impl RdmaProtocol<R>,
    device: &mut Device<P>,
    resources: &Resources,
    login: impl FnOnce() -> Vec<u8>,
) -> Result<(), ConnectError> {
    let made = conn.rdma_mut().set_up(device, resources);
    let prepared = made.and_then(|()| conn.prepare(device, resources));
    // Before the request, whose answer may have a message right behind it.
    let prepared = prepared.map(|is_prepared| is_prepared && conn.rdma().flush(device));
    if !prepared.map_err(ConnectError::Local)? {
        let error = VerbsError::InvalidState("queue pair takes no receives");
        return Err(ConnectError::Local(error));
    }
    conn.rdma_mut().connect(device, login())
}
