//! iSER (RFC 7145) as the datamover of a session.

use std::time::Instant;

use riser_memory::MemSlice;
use riser_scsi::iser::Message;
use riser_transport::verbs::{CmEventKind, Completion, CqId, Provider, VerbsError};

use super::context::{Context, MoverError, log_in};
use crate::engine::env::Env;
use crate::engine::io::Target;
use crate::engine::iser::{IserConfig, IserConn};
use crate::engine::rdma::{CmStep, Completed, Device, Resources, Retire, WorkRequest};
use crate::iscsi::session::{ControlPdu, Session};
use crate::request::RequestId;
use crate::session::{ConnectError, IscsiFault, SrpLoginError};

/// The connection of a session.
pub(super) struct IserMover {
    config: IserConfig,
    resources: Resources,
    conn: Option<IserConn>,
    /// The receive whose message is being handled, to be posted again after the machine's outputs.
    receiving: Option<u16>,
    /// The message that is being handled.
    message: Vec<u8>,
    /// Pieces of the memory of the command that is being started.
    slices: Vec<MemSlice>,
}

impl IserMover {
    pub(super) fn new<P: Provider>(
        device: &mut Device<P>,
        pool: &MemSlice,
        config: IserConfig,
    ) -> Result<Self, VerbsError> {
        let completions = config.limits().completions();
        Ok(Self {
            config,
            resources: Resources::new(device, pool, completions, false)?,
            conn: None,
            receiving: None,
            message: Vec::new(),
            slices: Vec::new(),
        })
    }

    pub(super) fn cq(&self) -> CqId {
        self.resources.cq
    }

    pub(super) fn region_segments(&self) -> usize {
        self.config.region_segments as usize
    }

    pub(super) fn release_device<P: Provider>(&self, device: &mut Device<P>) {
        debug_assert!(self.conn.is_none());
        self.resources.release(device);
    }

    /// The time at which a connection that is being closed is closed at the latest.
    pub(super) fn closing_until(&self) -> Option<Instant> {
        self.conn.as_ref()?.rdma.closing_until()
    }

    /// Begins to find the path.
    pub(super) fn resolve<E: Env>(
        &mut self,
        target: &Target,
        cx: &mut Context<'_, E>,
    ) -> Result<(), ConnectError> {
        let owner = cx.owner(0);
        self.conn = Some(IserConn::resolve(cx.device(), owner, target, self.config)?);
        Ok(())
    }

    pub(super) fn handle_cm_event<E: Env>(
        &mut self,
        event: CmEventKind,
        machine: &mut Session,
        cx: &mut Context<'_, E>,
    ) {
        let Some(conn) = &mut self.conn else {
            return;
        };
        match conn.rdma.handle_event(cx.device(), event) {
            CmStep::Pending => {}
            CmStep::Connect => {
                if let Err(error) = self.connect(cx) {
                    self.fail(error, machine, cx);
                }
            }
            CmStep::Established(_) => log_in(machine, cx.env, cx.now),
            CmStep::Rejected { reason, .. } => {
                let error = ConnectError::Login(SrpLoginError::Refused(reason));
                self.fail(error, machine, cx);
            }
            CmStep::Failed(error) => self.fail(error, machine, cx),
            CmStep::Lost => machine.handle_broken(cx.now),
            CmStep::Closed => self.close_now(machine, cx),
        }
    }

    /// The path is found: makes the queue pair and sends the request.
    fn connect<E: Env>(&mut self, cx: &mut Context<'_, E>) -> Result<(), ConnectError> {
        let Some(conn) = &mut self.conn else {
            return Ok(());
        };
        let made = conn.set_up(cx.device(), &self.resources);
        made.map_err(ConnectError::Local)?;
        let private_data = self.config.offer().bytes().to_vec();
        conn.rdma.connect(cx.device(), private_data)
    }

    fn fail<E: Env>(
        &mut self,
        error: ConnectError,
        machine: &mut Session,
        cx: &mut Context<'_, E>,
    ) {
        self.release(false, cx);
        machine.handle_connect_failed(error, cx.now);
    }

    /// Begins to close the connection; returns whether it is closed.
    pub(super) fn begin_close<E: Env>(&mut self, cx: &mut Context<'_, E>) -> bool {
        let conn = self.conn.as_mut();
        if conn.is_some_and(|conn| conn.rdma.begin_close(false, cx.now)) {
            return false;
        }
        self.release(true, cx);
        true
    }

    /// Closes the connection now.
    pub(super) fn close_now<E: Env>(&mut self, machine: &mut Session, cx: &mut Context<'_, E>) {
        self.release(true, cx);
        machine.handle_gone(cx.now);
    }

    fn release<E: Env>(&mut self, linger: bool, cx: &mut Context<'_, E>) {
        self.receiving = None;
        if let Some(conn) = self.conn.take() {
            let now = cx.now;
            conn.rdma.release(cx.device(), linger, now);
        }
    }

    pub(super) fn send<E: Env>(
        &mut self,
        pdu: ControlPdu,
        cx: &mut Context<'_, E>,
    ) -> Result<(), MoverError> {
        let conn = self.conn.as_mut();
        let is_sent = conn.is_some_and(|conn| conn.send_control(cx.device(), pdu));
        is_sent.then_some(()).ok_or(MoverError::Broken)
    }

    pub(super) fn enter_full_feature<E: Env>(
        &mut self,
        cx: &mut Context<'_, E>,
    ) -> Result<(), MoverError> {
        let conn = self.conn.as_mut();
        let is_entered = conn.is_some_and(|conn| conn.enter_full_feature(cx.device()));
        is_entered.then_some(()).ok_or(MoverError::Broken)
    }

    /// Sends a command. One that was given up meanwhile has used up a number that is never sent, which
    /// only a new connection makes up for.
    pub(super) fn start<E: Env>(
        &mut self,
        request: RequestId,
        machine: &Session,
        cx: &mut Context<'_, E>,
    ) -> Result<(), MoverError> {
        // Without a connection, its end reports all of its requests.
        let Some(conn) = &mut self.conn else {
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

    /// Begins to take a request's memory back; returns whether it is back.
    pub(super) fn retire<E: Env>(
        &mut self,
        request: RequestId,
        cx: &mut Context<'_, E>,
    ) -> Result<bool, MoverError> {
        let Some(conn) = &mut self.conn else {
            return Ok(false);
        };
        match conn.rdma.retire(cx.device(), request) {
            Retire::Done => Ok(true),
            Retire::Pending => Ok(false),
            Retire::Broken => Err(MoverError::Broken),
        }
    }

    pub(super) fn handle_completion<E: Env>(
        &mut self,
        completion: &Completion,
        machine: &mut Session,
        cx: &mut Context<'_, E>,
    ) -> Result<(), MoverError> {
        let work = WorkRequest::of(completion.wr_id);
        let (Some(work), Some(conn)) = (work, &mut self.conn) else {
            return Ok(());
        };
        if !completion.status.is_ok() {
            tracing::debug!(?work, status = ?completion.status, "work request failed");
            return Err(MoverError::Broken);
        }
        match conn.rdma.handle_completion(cx.device(), work, completion) {
            Completed::Nothing => Ok(()),
            Completed::Message(slot) => self.receive(slot, completion.byte_len, machine, cx.now),
            Completed::Retired(request) => {
                machine.handle_retired(request, cx.now);
                Ok(())
            }
            Completed::Sent(slot) => {
                let is_fed = conn.on_control_sent(cx.device(), slot);
                is_fed.then_some(()).ok_or(MoverError::Broken)
            }
        }
    }

    fn receive(
        &mut self,
        slot: u16,
        len: u32,
        machine: &mut Session,
        now: Instant,
    ) -> Result<(), MoverError> {
        let Some(conn) = &self.conn else {
            return Ok(());
        };
        self.receiving = Some(slot);
        conn.received(slot, len, &mut self.message);
        match Message::parse(&self.message) {
            Ok(Message::Control { frame, .. }) => {
                machine.handle_pdu(&frame, now);
                Ok(())
            }
            Ok(Message::Hello(_) | Message::HelloReply(_)) => {
                Err(MoverError::Fault(IscsiFault::Unexpected("a Hello")))
            }
            Err(error) => Err(MoverError::Fault(IscsiFault::Iser(error))),
        }
    }

    /// Posts the receive again whose message has been handled; `None` if there is none.
    pub(super) fn repost<E: Env>(
        &mut self,
        is_full_feature: bool,
        cx: &mut Context<'_, E>,
    ) -> Option<Result<(), MoverError>> {
        let slot = self.receiving.take()?;
        let Some(conn) = &mut self.conn else {
            return Some(Ok(()));
        };
        let is_posted = conn.repost(cx.device(), slot, is_full_feature);
        Some(is_posted.then_some(()).ok_or(MoverError::Broken))
    }
}
