//! Sessions of SRP: carries out what the machine asks for on the channels' connections.

use std::time::Instant;

use riser_memory::MemSlice;
use riser_scsi::srp::LOGIN_REQ_LEN;
use riser_transport::verbs::{CmEventKind, Completion, CqId, Provider, VerbsError};

use super::context::{Context, Report};
use super::plan::SrpOpen;
use crate::engine::env::Env;
use crate::engine::io::Target;
use crate::engine::rdma::{CmStep, Completed, Device, Resources, Retire, WorkRequest};
use crate::engine::srp::{
    DataKeys, RECV_LEN, Scratch, ShortIu, SrpConfig, SrpConn, Start, StartArgs,
};
use crate::request::RequestId;
use crate::session::{ConnectError, Machine};
use crate::srp::session::{ChannelIndex, Output, Session};

/// A session and its channels' connections.
pub(super) struct SrpLink {
    pub(super) machine: Session,
    target: Target,
    config: SrpConfig,
    resources: Resources,
    keys: DataKeys,
    conns: Vec<Option<SrpConn>>,
    /// The receive whose information unit is being handled. It is posted again after the machine's
    /// outputs, unless an answer takes it over, which is sent before the receive is posted.
    receiving: Option<(ChannelIndex, u16)>,
    scratch: Scratch,
}

impl SrpLink {
    pub(super) fn new<P: Provider>(
        device: &mut Device<P>,
        pool: &MemSlice,
        target: Target,
        open: &SrpOpen,
        now: Instant,
    ) -> Result<Self, VerbsError> {
        let channels = open.config.channels;
        let completions = open.conn.limits().completions() * u32::from(channels);
        let resources = Resources::new(device, pool, completions, open.pool_wide)?;
        Ok(Self {
            machine: Session::new(open.config, now),
            target,
            config: open.conn,
            keys: DataKeys {
                pool: resources.pool,
                pool_wide: open.pool_wide,
            },
            resources,
            conns: (0..channels).map(|_| None).collect(),
            receiving: None,
            scratch: Scratch::default(),
        })
    }

    pub(super) fn target(&self) -> &Target {
        &self.target
    }

    pub(super) fn cq(&self) -> CqId {
        self.resources.cq
    }

    pub(super) fn release_device<P: Provider>(&self, device: &mut Device<P>) {
        debug_assert!(self.conns.iter().all(Option::is_none));
        self.resources.release(device);
    }

    fn conn(&mut self, channel: ChannelIndex) -> Option<&mut SrpConn> {
        self.conns[usize::from(channel.0)].as_mut()
    }

    pub(super) fn poll<E: Env>(&mut self, cx: &mut Context<'_, E>) -> Option<Report> {
        loop {
            while let Some(output) = self.machine.poll_output() {
                let report = self.carry_out(output, cx);
                if report.is_some() {
                    return report;
                }
            }
            let (channel, slot) = self.receiving.take()?;
            if let Some(conn) = self.conn(channel)
                && !conn.post_recv(cx.device(), slot)
            {
                self.machine.handle_channel_error(channel, cx.now);
            }
        }
    }

    fn carry_out<E: Env>(&mut self, output: Output, cx: &mut Context<'_, E>) -> Option<Report> {
        match output {
            Output::Connect(channel) => self.resolve(channel, cx),
            Output::Start {
                request,
                channel,
                immediate,
            } => self.start(channel, request, immediate, cx),
            Output::Retire { request, channel } => self.retire(channel, request, cx),
            Output::SendTskMgmt(channel, iu) => {
                let conn = self.conn(channel);
                if !conn.is_some_and(|c| c.post_tsk_mgmt(cx.device(), &iu)) {
                    self.machine.handle_channel_error(channel, cx.now);
                }
            }
            Output::Answer(channel, iu) => self.answer(channel, &iu, cx),
            Output::Disconnect(channel, logout) => {
                self.begin_close(channel, logout.as_ref().map(|iu| &iu[..]), cx);
            }
            Output::Ping => return Some(Report::Ping),
            Output::Complete(request, result) => return Some(Report::Complete(request, result)),
            Output::Event(event) => return Some(Report::Event(event)),
        }
        None
    }

    fn start<E: Env>(
        &mut self,
        channel: ChannelIndex,
        request: RequestId,
        immediate: bool,
        cx: &mut Context<'_, E>,
    ) {
        let io = cx.ios.get(request.0 as usize).and_then(Option::as_ref);
        let conn = self.conns[usize::from(channel.0)].as_mut();
        let outcome = match (io, conn) {
            (Some(io), Some(conn)) => {
                io.io.data.slices(&mut self.scratch.slices);
                let args = StartArgs {
                    session: &self.machine,
                    channel,
                    request,
                    immediate,
                    keys: &self.keys,
                };
                conn.start(cx.device(), &args, &mut self.scratch)
            }
            _ => Start::Dropped,
        };
        match outcome {
            Start::Sent | Start::Dropped => {}
            Start::Starved => self.machine.handle_no_room(request, cx.now),
            Start::Impossible(why) => self.machine.handle_start_failed(request, why, cx.now),
            Start::Broken => self.machine.handle_channel_error(channel, cx.now),
        }
    }

    fn retire<E: Env>(
        &mut self,
        channel: ChannelIndex,
        request: RequestId,
        cx: &mut Context<'_, E>,
    ) {
        // Without a connection, its end reports all of its requests.
        let Some(conn) = self.conn(channel) else {
            return;
        };
        match conn.rdma.retire(cx.device(), request) {
            Retire::Done => self.machine.handle_retired(request, cx.now),
            Retire::Pending => {}
            Retire::Broken => self.machine.handle_channel_error(channel, cx.now),
        }
    }

    fn answer<E: Env>(&mut self, channel: ChannelIndex, iu: &[u8], cx: &mut Context<'_, E>) {
        let Some((from, slot)) = self.receiving.take() else {
            return;
        };
        debug_assert_eq!(from, channel);
        if let Some(conn) = self.conn(channel)
            && !conn.post_answer(cx.device(), slot, iu)
        {
            self.machine.handle_channel_error(channel, cx.now);
        }
    }

    pub(super) fn handle_broken(&mut self, channel: u8, now: Instant) {
        let channel = ChannelIndex(channel);
        self.machine.handle_channel_error(channel, now);
    }

    pub(super) fn handle_completion<E: Env>(
        &mut self,
        channel: u8,
        completion: &Completion,
        cx: &mut Context<'_, E>,
    ) {
        let channel = ChannelIndex(channel);
        let work = WorkRequest::of(completion.wr_id);
        let (Some(work), Some(conn)) = (work, self.conn(channel)) else {
            return;
        };
        if !completion.status.is_ok() {
            if conn.rdma.closing_until().is_some() {
                self.close_now(channel, cx);
                return;
            }
            tracing::debug!(?work, status = ?completion.status, ?channel, "work request failed");
            self.machine.handle_channel_error(channel, cx.now);
            return;
        }
        match conn.rdma.handle_completion(cx.device(), work, completion) {
            Completed::Nothing => {}
            Completed::Message(slot) => self.receive(channel, slot, completion.byte_len, cx.now),
            Completed::Retired(request) => self.machine.handle_retired(request, cx.now),
            Completed::Sent(number) => match conn.sent(number) {
                ShortIu::Answer(slot) => {
                    if !conn.post_recv(cx.device(), slot) {
                        self.machine.handle_channel_error(channel, cx.now);
                    }
                }
                ShortIu::TskMgmt(slot) => conn.on_tsk_mgmt_sent(slot),
                ShortIu::Logout => self.close_now(channel, cx),
            },
        }
    }

    fn receive(&mut self, channel: ChannelIndex, slot: u16, len: u32, now: Instant) {
        let mut iu = [0; RECV_LEN];
        let len = (len as usize).min(RECV_LEN);
        if let Some(conn) = self.conn(channel) {
            conn.received(slot, &mut iu[..len]);
            self.receiving = Some((channel, slot));
            self.machine.handle_iu(channel, &iu[..len], now);
        }
    }

    pub(super) fn handle_cm_event<E: Env>(
        &mut self,
        channel: u8,
        event: CmEventKind,
        cx: &mut Context<'_, E>,
    ) {
        let channel = ChannelIndex(channel);
        let Some(conn) = self.conn(channel) else {
            return;
        };
        match conn.rdma.handle_event(cx.device(), event) {
            CmStep::Pending => {}
            CmStep::Connect => {
                if let Err(error) = self.connect(channel, cx) {
                    self.fail(channel, error, cx);
                }
            }
            CmStep::Established(private_data) => {
                self.machine
                    .handle_connected(channel, &private_data, cx.now);
            }
            CmStep::Rejected {
                reason,
                private_data,
            } => {
                self.release(channel, false, cx);
                self.machine
                    .handle_rejected(channel, reason, &private_data, cx.now);
            }
            CmStep::Failed(error) => self.fail(channel, error, cx),
            CmStep::Lost => self.machine.handle_channel_error(channel, cx.now),
            CmStep::Closed => self.close_now(channel, cx),
        }
    }

    /// Begins to find the path for a channel.
    fn resolve<E: Env>(&mut self, channel: ChannelIndex, cx: &mut Context<'_, E>) {
        let owner = cx.owner(channel.0);
        match SrpConn::resolve(cx.device(), owner, &self.target, self.config) {
            Ok(conn) => self.conns[usize::from(channel.0)] = Some(conn),
            Err(error) => self.machine.handle_connect_failed(channel, error, cx.now),
        }
    }

    /// The path is found: makes the queue pair and sends the request with the login in it.
    fn connect<E: Env>(
        &mut self,
        channel: ChannelIndex,
        cx: &mut Context<'_, E>,
    ) -> Result<(), ConnectError> {
        let Some(conn) = self.conns[usize::from(channel.0)].as_mut() else {
            return Ok(());
        };
        let made = conn.set_up(cx.device(), &self.resources);
        made.map_err(ConnectError::Local)?;
        let login = self.machine.begin_login(channel);
        let mut private_data = vec![0; LOGIN_REQ_LEN];
        // The RDMA CM's address header leaves no room for the information unit as such.
        let len = match self.target.service_id {
            Some(_) => login.emit(&mut private_data),
            None => login.emit_rdma(&mut private_data),
        };
        private_data.truncate(len);
        conn.rdma.connect(cx.device(), private_data)
    }

    fn fail<E: Env>(
        &mut self,
        channel: ChannelIndex,
        error: ConnectError,
        cx: &mut Context<'_, E>,
    ) {
        self.release(channel, false, cx);
        self.machine.handle_connect_failed(channel, error, cx.now);
    }

    /// Closes a channel, after its logout has been sent if there is one.
    fn begin_close<E: Env>(
        &mut self,
        channel: ChannelIndex,
        logout: Option<&[u8]>,
        cx: &mut Context<'_, E>,
    ) {
        let now = cx.now;
        let waits = self.conn(channel).is_some_and(|conn| {
            let has_logout = logout.is_some_and(|iu| conn.post_logout(cx.device(), iu));
            conn.rdma.begin_close(has_logout, now)
        });
        if !waits {
            self.close_now(channel, cx);
        }
    }

    /// Closes a channel now.
    fn close_now<E: Env>(&mut self, channel: ChannelIndex, cx: &mut Context<'_, E>) {
        self.release(channel, true, cx);
        self.machine.handle_channel_gone(channel, cx.now);
    }

    fn release<E: Env>(&mut self, channel: ChannelIndex, linger: bool, cx: &mut Context<'_, E>) {
        if let Some(conn) = self.conns[usize::from(channel.0)].take() {
            let now = cx.now;
            conn.release(cx.device(), linger, now);
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let conns = self.conns.iter().flatten();
        let closings = conns.filter_map(|conn| conn.rdma.closing_until());
        self.machine
            .next_deadline()
            .into_iter()
            .chain(closings)
            .min()
    }

    pub(super) fn handle_timeout<E: Env>(&mut self, cx: &mut Context<'_, E>) {
        for channel in 0..self.conns.len() {
            let channel = ChannelIndex(channel as u8);
            let until = self.conn(channel).and_then(|c| c.rdma.closing_until());
            if until.is_some_and(|until| until <= cx.now) {
                self.close_now(channel, cx);
            }
        }
        self.machine.handle_timeout(cx.now);
    }
}
