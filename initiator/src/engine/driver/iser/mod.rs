//! iSER (RFC 7145) datamover of a session.

mod events;

use std::time::Instant;

use riser_memory::MemSlice;
use riser_transport::verbs::{Provider, VerbsError};

use super::context::{Context, MoverError};
use crate::engine::env::Env;
use crate::engine::io::Target;
use crate::engine::iser::{IserConfig, IserConn};
use crate::engine::rdma::{ConnSlot, Device, Resources, Retire};
use crate::iscsi::session::{ControlPdu, IscsiSession};
use crate::request::RequestId;
use crate::session::ConnectError;

/// The connection of a session.
pub(super) struct IserMover {
    config: IserConfig,
    resources: Resources,
    slot: ConnSlot<IserConn, 1>,
    /// The receive with the message being handled. It is posted again after the machine's outputs.
    receiving: Option<u16>,
    /// The message being handled.
    message: Vec<u8>,
    /// Memory segments of the command being started.
    slices: Vec<MemSlice>,
}

impl IserMover {
    pub(super) fn new<P: Provider>(
        device: &mut Device<P>,
        pool: &MemSlice,
        config: IserConfig,
    ) -> Result<Self, VerbsError> {
        Ok(Self {
            config,
            resources: Resources::new(device, pool, false)?,
            slot: ConnSlot::default(),
            receiving: None,
            message: Vec::new(),
            slices: Vec::new(),
        })
    }

    pub(super) fn region_segments(&self) -> usize {
        self.config.region_segments as usize
    }

    pub(super) fn release_device<P: Provider>(&self, device: &mut Device<P>) {
        debug_assert!(self.slot.is_empty());
        self.resources.release(device);
    }

    /// Returns the latest time for closing a connection that is being closed.
    pub(super) fn closing_until(&self) -> Option<Instant> {
        self.slot.closing_until()
    }

    /// Returns the time for closing or probing the connection.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.slot.next_deadline()
    }

    /// Probes the target if it has been silent for long enough.
    pub(super) fn probe<E: Env>(&mut self, cx: &mut Context<'_, E>) {
        let now = cx.now;
        self.slot.probe(cx.device(), now);
    }

    /// Starts to resolve the path.
    pub(super) fn resolve<E: Env>(
        &mut self,
        target: &Target,
        cx: &mut Context<'_, E>,
    ) -> Result<(), ConnectError> {
        let owner = cx.owner(0);
        let conn = IserConn::resolve(cx.device(), owner, target, self.config)?;
        self.slot.set(conn);
        Ok(())
    }

    /// Starts closing the connection; returns whether it is already closed.
    pub(super) fn begin_close<E: Env>(&mut self, cx: &mut Context<'_, E>) -> bool {
        let now = cx.now;
        let is_closed = self.slot.begin_close(cx.device(), false, now);
        if is_closed {
            self.receiving = None;
        }
        is_closed
    }

    pub(super) fn send<E: Env>(
        &mut self,
        pdu: ControlPdu,
        cx: &mut Context<'_, E>,
    ) -> Result<(), MoverError> {
        let conn = self.slot.conn();
        let is_sent = conn.is_some_and(|conn| conn.send_control(cx.device(), pdu));
        is_sent.then_some(()).ok_or(MoverError::Broken)
    }

    pub(super) fn enter_full_feature<E: Env>(
        &mut self,
        cx: &mut Context<'_, E>,
    ) -> Result<(), MoverError> {
        let conn = self.slot.conn();
        let is_entered = conn.is_some_and(|conn| conn.enter_full_feature(cx.device()));
        is_entered.then_some(()).ok_or(MoverError::Broken)
    }

    /// Sends a command. If it was aborted in the meantime, its CmdSN will never be sent, and only a
    /// new connection can recover from this.
    pub(super) fn start_command<E: Env>(
        &mut self,
        request: RequestId,
        machine: &IscsiSession,
        cx: &mut Context<'_, E>,
    ) -> Result<(), MoverError> {
        // Without a connection, its closing reports all of its requests.
        let Some(conn) = self.slot.conn() else {
            return Ok(());
        };
        let io = cx.ios.get(request.0 as usize).and_then(Option::as_ref);
        let (Some(io), Some(command)) = (io, machine.emit_command(request)) else {
            return Err(MoverError::Broken);
        };
        io.io.data.slices(&mut self.slices);
        let (len, pool) = (io.io.command.len, &self.resources.pool);
        let is_sent = conn.start(cx.device(), request, &command, len, &self.slices, pool);
        is_sent.then_some(()).ok_or(MoverError::Broken)
    }

    /// Starts to retire a request's memory; returns whether it is already free.
    pub(super) fn retire<E: Env>(
        &mut self,
        request: RequestId,
        cx: &mut Context<'_, E>,
    ) -> Result<bool, MoverError> {
        match self.slot.retire(cx.device(), request) {
            Retire::Done => Ok(true),
            Retire::Pending => Ok(false),
            Retire::Broken => Err(MoverError::Broken),
        }
    }

    /// Reposts the receive of the handled message; returns `None` if there is none.
    pub(super) fn repost<E: Env>(
        &mut self,
        is_full_feature: bool,
        cx: &mut Context<'_, E>,
    ) -> Option<Result<(), MoverError>> {
        let slot = self.receiving.take()?;
        let Some(conn) = self.slot.conn() else {
            return Some(Ok(()));
        };
        let is_posted = conn.repost(cx.device(), slot, is_full_feature);
        Some(is_posted.then_some(()).ok_or(MoverError::Broken))
    }
}
