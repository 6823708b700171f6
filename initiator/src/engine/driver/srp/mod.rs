//! SRP sessions: performs the outputs of the machine on the channels' connections.

mod events;

use std::time::Instant;

use riser_memory::MemSlice;
use riser_transport::verbs::{Provider, VerbsError};

use super::context::{Context, Report};
use super::plan::SrpOpen;
use crate::engine::env::Env;
use crate::engine::io::Target;
use crate::engine::rdma::{ConnSlot, Device, MAX_REGIONS, Resources, Retire};
use crate::engine::srp::{DataKeys, Scratch, SrpConfig, SrpConn, Start, StartArgs};
use crate::request::RequestId;
use crate::session::Machine;
use crate::srp::session::{ChannelIndex, Output, SrpSession};

/// A session and its channels' connections.
pub(super) struct SrpLink {
    pub(super) machine: SrpSession,
    target: Target,
    config: SrpConfig,
    resources: Resources,
    keys: DataKeys,
    slots: Vec<ConnSlot<SrpConn, MAX_REGIONS>>,
    /// The receive with the information unit being handled. It is posted again after the machine's
    /// outputs, unless a response takes over the slot; then it is posted after the response was
    /// sent.
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
        let resources = Resources::new(device, pool, open.pool_wide)?;
        Ok(Self {
            machine: SrpSession::new(open.config, now),
            target,
            config: open.conn,
            keys: DataKeys {
                pool: resources.pool,
                pool_wide: open.pool_wide,
            },
            resources,
            slots: (0..channels).map(|_| ConnSlot::default()).collect(),
            receiving: None,
            scratch: Scratch::default(),
        })
    }

    pub(super) fn target(&self) -> &Target {
        &self.target
    }

    pub(super) fn release_device<P: Provider>(&self, device: &mut Device<P>) {
        debug_assert!(self.slots.iter().all(ConnSlot::is_empty));
        self.resources.release(device);
    }

    fn slot(&mut self, channel: ChannelIndex) -> &mut ConnSlot<SrpConn, MAX_REGIONS> {
        &mut self.slots[usize::from(channel.0)]
    }

    fn conn(&mut self, channel: ChannelIndex) -> Option<&mut SrpConn> {
        self.slot(channel).conn()
    }

    pub(super) fn poll<E: Env>(&mut self, cx: &mut Context<'_, E>) -> Option<Report> {
        loop {
            while let Some(output) = self.machine.poll_output() {
                let report = self.execute_output(output, cx);
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

    fn execute_output<E: Env>(
        &mut self,
        output: Output,
        cx: &mut Context<'_, E>,
    ) -> Option<Report> {
        match output {
            Output::Connect(channel) => self.resolve(channel, cx),
            Output::Start {
                request,
                channel,
                immediate,
            } => self.start_command(channel, request, immediate, cx),
            Output::Retire { request, channel } => self.retire(channel, request, cx),
            Output::SendTskMgmt(channel, iu) => {
                let conn = self.conn(channel);
                if !conn.is_some_and(|c| c.post_tsk_mgmt(cx.device(), &iu)) {
                    self.machine.handle_channel_error(channel, cx.now);
                }
            }
            Output::Reply(channel, iu) => self.send_response(channel, &iu, cx),
            Output::Disconnect(channel, logout) => {
                self.begin_close(channel, logout.as_ref().map(|iu| &iu[..]), cx);
            }
            Output::Ping => return Some(Report::Ping),
            Output::Complete(request, result) => return Some(Report::Complete(request, result)),
            Output::Event(event) => return Some(Report::Event(event)),
        }
        None
    }

    fn start_command<E: Env>(
        &mut self,
        channel: ChannelIndex,
        request: RequestId,
        immediate: bool,
        cx: &mut Context<'_, E>,
    ) {
        let io = cx.ios.get(request.0 as usize).and_then(Option::as_ref);
        let conn = self.slots[usize::from(channel.0)].conn();
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
            // Closing the connection reports all of its requests.
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
        match self.slot(channel).retire(cx.device(), request) {
            Retire::Done => self.machine.handle_retired(request, cx.now),
            Retire::Pending => {}
            Retire::Broken => self.machine.handle_channel_error(channel, cx.now),
        }
    }

    fn send_response<E: Env>(&mut self, channel: ChannelIndex, iu: &[u8], cx: &mut Context<'_, E>) {
        let Some((from, slot)) = self.receiving.take() else {
            return;
        };
        debug_assert_eq!(from, channel);
        if let Some(conn) = self.conn(channel)
            && !conn.post_response(cx.device(), slot, iu)
        {
            self.machine.handle_channel_error(channel, cx.now);
        }
    }

    /// Starts to resolve the path for a channel.
    fn resolve<E: Env>(&mut self, channel: ChannelIndex, cx: &mut Context<'_, E>) {
        let owner = cx.owner(channel.0);
        if channel.0 == 0 {
            self.target.renew();
        }
        match SrpConn::resolve(cx.device(), owner, &self.target, self.config) {
            Ok(conn) => self.slot(channel).set(conn),
            Err(error) => self.machine.handle_connect_failed(channel, error, cx.now),
        }
    }

    /// Closes a channel, after sending its logout if there is one.
    fn begin_close<E: Env>(
        &mut self,
        channel: ChannelIndex,
        logout: Option<&[u8]>,
        cx: &mut Context<'_, E>,
    ) {
        let now = cx.now;
        let slot = self.slot(channel);
        let has_logout = slot
            .conn()
            .is_some_and(|conn| logout.is_some_and(|iu| conn.post_logout(cx.device(), iu)));
        if slot.begin_close(cx.device(), has_logout, now) {
            self.machine.handle_channel_closed(channel, now);
        }
    }

    /// Closes a channel immediately.
    fn close_now<E: Env>(&mut self, channel: ChannelIndex, cx: &mut Context<'_, E>) {
        let now = cx.now;
        self.slot(channel).release(cx.device(), true, now);
        self.machine.handle_channel_closed(channel, now);
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let connections = self.slots.iter().filter_map(ConnSlot::next_deadline);
        self.machine
            .next_deadline()
            .into_iter()
            .chain(connections)
            .min()
    }

    pub(super) fn handle_timeout<E: Env>(&mut self, cx: &mut Context<'_, E>) {
        for channel in 0..self.slots.len() {
            let channel = ChannelIndex(channel as u8);
            let until = self.slot(channel).closing_until();
            if until.is_some_and(|until| until <= cx.now) {
                self.close_now(channel, cx);
            }
            let now = cx.now;
            self.slot(channel).probe(cx.device(), now);
        }
        self.machine.handle_timeout(cx.now);
    }
}
