//! A connection: its receives, states and termination.
//!
//! # Calling order
//! 1. [`IserChannel::new`] before the connection is accepted. Its first actions post the receives.
//! 2. Inputs, in any order: [`IserChannel::handle_established`], [`IserChannel::handle_recv`],
//!    [`IserChannel::handle_recv_flushed`], [`IserChannel::handle_post_done`],
//!    [`IserChannel::handle_disconnected`], [`IserChannel::handle_drained`], and all inputs of a
//!    [`Channel`] via [`IserChannel::input`].
//! 3. After every input, [`IserChannel::poll_action`] until there are no more actions, then
//!    [`IserChannel::poll_post`] until it returns false.
//! 4. After [`IserAction::Release`], it does not use any resources and may be dropped.

use std::collections::VecDeque;
use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_memory::MemSlice;
use riser_scsi::iser::Message;
use riser_state::{State, become_state};

use super::mover::{ChainIdx, Iser, Post};
use super::{IserParams, RxIdx};
use crate::fabric::LunMap;
use crate::iscsi::{Action, Channel, Cx, Phase};
use crate::pool::Pool;
use crate::stats::SessionEvent;

/// Time for an initiator to disconnect after receiving the last PDU. If we disconnect first, some
/// initiators (at least Linux) report an error.
const PARTING: Duration = Duration::from_secs(1);

/// State of a connection, named as in `iser_conn_state` of isert.
///
/// ```text
///  Init ──established──→ Up ──login PDU──→ Bound ──login done──→ FullFeature
///    └────────────────────┴───── error, logout, disconnect ─────────┘
///                                      v
///                                 Terminating ──completed and idle──→ Down
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnState {
    /// Accepted, but not established yet. Received messages are queued.
    Init,
    /// Established, no message received yet.
    Up,
    /// Login in progress.
    Bound,
    /// Login completed.
    FullFeature,
    /// The queue pair is in the error state and flushes its work requests. Devices may still be
    /// using buffers.
    Terminating,
    /// Does not use any resources and may be dropped.
    Down,
}

impl State for ConnState {
    fn may_become(&self, next: &Self) -> bool {
        match self {
            Self::Init => matches!(next, Self::Up | Self::Terminating),
            Self::Up => matches!(next, Self::Bound | Self::Terminating),
            Self::Bound => matches!(next, Self::FullFeature | Self::Terminating),
            Self::FullFeature => matches!(next, Self::Terminating),
            Self::Terminating => matches!(next, Self::Down),
            Self::Down => false,
        }
    }
}

/// Action to be executed by the worker of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IserAction {
    /// Action of the channel, except [`Action::Disconnect`] and [`Action::Release`].
    Channel(Action),
    /// Post this descriptor of the receive ring.
    PostRecv(RxIdx),
    /// Notify the CM that a message was received before the connection was established.
    NotifyEstablished,
    /// Disconnect, which moves the queue pair to the error state, and then post the drain marker: a
    /// signaled zero-length write. Call [`IserChannel::handle_drained`] when it completes.
    Disconnect,
    /// The connection is [`ConnState::Down`]. Destroy its queue pair and free its rings.
    Release,
}

/// Parameters for a new connection.
#[derive(Debug)]
pub struct IserConfig {
    /// Limits for the connection and its rings.
    pub params: IserParams,
    /// Worker of the connection.
    pub worker: u16,
    /// Connection number on this worker. Numbers are never reused.
    pub serial: u64,
    /// Receive ring, with the length given by [`IserParams::memory`].
    pub receive_ring: MemSlice,
    /// Send ring, with the length given by [`IserParams::memory`].
    pub send_ring: MemSlice,
}

/// State of the Hello exchange (RFC 7145 6.10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hello {
    /// A Hello is a protocol error.
    None,
    /// The next message may be a Hello, because an RFC 5046 initiator does not announce it (RFC
    /// 7145 5.1.3).
    Possible,
    /// The next message must be a Hello.
    Due,
}

/// A channel on an RDMA connection.
#[derive(Debug)]
pub struct IserChannel {
    channel: Channel<Iser>,
    params: IserParams,
    receive_ring: MemSlice,
    state: ConnState,
    posted_receives: u32,
    /// Receives of a new connection that were not posted yet.
    first_receives: Range<u16>,
    /// Messages received before the connection was established, each with its receive descriptor.
    deferred: VecDeque<(RxIdx, u32)>,
    /// Receives that are not posted again while too many messages are queued for sending. Each is
    /// listed once.
    held_back: VecDeque<RxIdx>,
    /// Maximum data segment length to receive, in bytes.
    recv_segment: u32,
    hello: Hello,
    notified: bool,
    drained: bool,
    /// The channel has released all its resources.
    let_go: bool,
    /// All messages were sent. The initiator may disconnect until this time.
    parting: Option<Instant>,
    actions: VecDeque<IserAction>,
}

impl IserChannel {
    /// Creates a connection that is not established yet.
    ///
    /// # Panics
    /// Panics if the rings are too short for the parameters.
    #[must_use]
    pub fn new(config: IserConfig, now: Instant) -> Self {
        let params = config.params;
        assert!(config.receive_ring.len() >= params.memory().receive_ring);
        let channel_config = params.channel_config(config.worker, config.serial);
        let tasks = channel_config.contexts();
        let mover = Iser::new(params, config.send_ring, usize::from(tasks));
        let receives = params.receives();
        Self {
            channel: Channel::new(channel_config, mover, now),
            receive_ring: config.receive_ring,
            state: ConnState::Init,
            posted_receives: receives,
            // Post all receives, because the initiator may send messages as soon as it receives our
            // reply.
            first_receives: 0..receives as u16,
            deferred: VecDeque::new(),
            held_back: VecDeque::new(),
            recv_segment: params.recv_segment,
            hello: Hello::None,
            notified: false,
            drained: false,
            let_go: false,
            parting: None,
            actions: VecDeque::new(),
            params,
        }
    }

    /// Returns the channel, for read access to its state.
    #[must_use]
    pub fn channel(&self) -> &Channel<Iser> {
        &self.channel
    }

    /// Called when the initiator has closed the connection.
    pub fn note_closed(&mut self) {
        self.channel.note_closed();
    }

    /// Returns the limits of the connection.
    #[must_use]
    pub fn params(&self) -> &IserParams {
        &self.params
    }

    /// Returns the state of the connection.
    #[must_use]
    pub fn state(&self) -> ConnState {
        self.state
    }

    /// Returns the number of posted receives.
    #[must_use]
    pub fn posted_receives(&self) -> u32 {
        self.posted_receives
    }

    /// Returns the number of posted chains.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.channel.mover().outstanding()
    }

    /// Returns the time when [`Channel::handle_timeout`] must be called via
    /// [`IserChannel::handle_timeout`].
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.channel
            .deadline()
            .into_iter()
            .chain(self.parting)
            .min()
    }

    /// Returns the next action, in order.
    pub fn poll_action(&mut self) -> Option<IserAction> {
        if let Some(first) = self.first_receives.next() {
            return Some(IserAction::PostRecv(RxIdx(first)));
        }
        self.actions.pop_front()
    }

    /// Sets `post` to the next chain to post. Returns `false` if there is not any at this time.
    pub fn poll_post(&mut self, now: Instant, post: &mut Post) -> bool {
        let is_posted = self
            .channel
            .poll_mover(|mover, numbers, held| mover.poll_post(numbers, held, post));
        if is_posted {
            self.channel
                .executor_mut()
                .note_requested(now, |mover| mover.fetched());
        }
        is_posted
    }

    /// Returns the memory of a receive descriptor.
    #[must_use]
    pub fn receive_slot(&self, rx: RxIdx) -> MemSlice {
        let at = usize::from(rx.0) * self.params.receive_stride();
        self.receive_ring
            .slice(at..at + self.params.receive_len())
            .expect("descriptors lie in their ring")
    }

    /// Called when the connection is established.
    pub fn handle_established(&mut self, cx: &mut Cx<'_>) {
        if self.state == ConnState::Init {
            become_state(&mut self.state, ConnState::Up);
            while let Some((rx, len)) = self.deferred.pop_front() {
                let mut bytes = vec![0; len as usize];
                self.receive_slot(rx).read(0, &mut bytes);
                self.take_message(cx, &bytes);
                self.recycle(rx);
            }
        }
        self.finish_input(cx);
    }

    /// Called when a message (`bytes`) was received in this descriptor.
    pub fn handle_recv(&mut self, cx: &mut Cx<'_>, rx: RxIdx, bytes: &[u8]) {
        self.posted_receives -= 1;
        match self.state {
            // A receive can complete before the last CM message arrives. We don't process the login
            // until the connection is established.
            ConnState::Init => {
                self.deferred.push_back((rx, bytes.len() as u32));
                if !std::mem::replace(&mut self.notified, true) {
                    self.actions.push_back(IserAction::NotifyEstablished);
                }
            }
            ConnState::Up | ConnState::Bound | ConnState::FullFeature => {
                self.take_message(cx, bytes);
                self.recycle(rx);
            }
            ConnState::Terminating | ConnState::Down => {}
        }
        self.finish_input(cx);
    }

    /// Called when a receive was flushed, because the queue pair is in the error state.
    pub fn handle_recv_flushed(&mut self, cx: &mut Cx<'_>, _rx: RxIdx) {
        self.posted_receives -= 1;
        self.terminate(cx);
        self.finish_input(cx);
    }

    /// Called when a chain has completed or failed.
    ///
    /// # Panics
    /// Panics if the chain was not posted.
    pub fn handle_post_done(&mut self, cx: &mut Cx<'_>, chain: ChainIdx, ok: bool) {
        self.end_chain(cx, chain, ok);
        if !ok {
            self.terminate(cx);
        }
        self.finish_input(cx);
    }

    /// Called when the connection was closed by the peer or by an error.
    pub fn handle_disconnected(&mut self, cx: &mut Cx<'_>) {
        self.terminate(cx);
        self.finish_input(cx);
    }

    /// Same as [`Channel::handle_terminate`], but also moves the queue pair to the error state.
    pub fn handle_terminate(&mut self, cx: &mut Cx<'_>) {
        self.channel.handle_terminate(cx);
        // Don't wait for the initiator to disconnect, because a login is waiting for this.
        self.terminate(cx);
        self.finish_input(cx);
    }

    /// Called when the drain marker has completed, so all work requests posted before it have
    /// completed.
    pub fn handle_drained(&mut self, cx: &mut Cx<'_>) {
        self.drained = true;
        self.finish_input(cx);
    }

    /// Called when the queues were destroyed, alone or together with their device. Posted work
    /// requests will not be executed or completed.
    pub fn handle_queues_gone(&mut self, cx: &mut Cx<'_>) {
        self.terminate(cx);
        let chains: Vec<_> = self.channel.mover().under_way().collect();
        for chain in chains {
            self.end_chain(cx, chain, false);
        }
        // Destroyed queues don't flush their work requests.
        self.posted_receives = 0;
        self.drained = true;
        self.finish_input(cx);
    }

    /// Passes an input to the channel that is not a completion.
    pub fn input(&mut self, cx: &mut Cx<'_>, f: impl FnOnce(&mut Channel<Iser>, &mut Cx<'_>)) {
        f(&mut self.channel, cx);
        self.finish_input(cx);
    }

    /// Same as [`Channel::handle_others_gone`]. This can complete a login.
    pub fn handle_others_gone(&mut self, cx: &mut Cx<'_>) {
        self.channel.handle_others_gone(cx);
        self.note_login();
        self.finish_input(cx);
    }

    /// Same as [`Channel::handle_timeout`]. This can complete a login.
    pub fn handle_timeout(&mut self, cx: &mut Cx<'_>) {
        self.channel.handle_timeout(cx);
        if self.state == ConnState::Bound {
            self.note_login();
        }
        self.finish_input(cx);
    }

    /// Same as [`Channel::handle_luns`], which does not cause any actions.
    pub fn handle_luns(&mut self, luns: Arc<LunMap>) {
        self.channel.handle_luns(luns);
    }

    /// Aborts everything immediately, if a worker terminates without a shutdown. The connection
    /// cannot be used afterwards. The devices must already be closed, so the buffers are not in
    /// use.
    pub fn abandon(&mut self, pool: &mut Pool) {
        self.first_receives = 0..0;
        self.actions.clear();
        self.channel.abandon(pool);
    }

    fn end_chain(&mut self, cx: &mut Cx<'_>, chain: ChainIdx, ok: bool) {
        let ended = self.channel.mover_mut().complete(chain);
        if let Some(task) = ended.arrived {
            self.channel.handle_arrived(cx, task, ok);
        }
        if let Some(task) = ended.completed {
            self.channel.handle_done(cx, task, ok);
        }
        // A channel waits until everything was sent before it closes. With RDMA, this is when the
        // last chain completes.
        if self.outstanding() == 0 {
            let was_closing = ok && self.channel.phase() == Phase::Closing;
            self.channel.handle_flushed(cx, ok);
            if was_closing && self.channel.phase() == Phase::Closed {
                self.parting = Some(cx.now + PARTING);
            }
        }
    }

    fn take_message(&mut self, cx: &mut Cx<'_>, bytes: &[u8]) {
        if !self.channel.is_receiving() {
            return;
        }
        let hello = std::mem::replace(&mut self.hello, Hello::None);
        match Message::parse(bytes) {
            Ok(Message::Control { buffers, frame }) if hello != Hello::Due => {
                if frame.data.len() > self.recv_segment as usize {
                    return self.broken(cx, "data segment exceeds the negotiated length");
                }
                self.channel.mover_mut().set_arriving(buffers);
                self.channel.handle_frame(cx, &frame);
                // Don't use these buffers for the next command if no command has used them.
                self.channel.mover_mut().set_arriving(Default::default());
                self.note_login();
            }
            Ok(Message::Hello(message)) if hello != Hello::None => {
                let reply = message.build_reply(self.params.reads);
                self.channel.mover_mut().send_hello(reply);
                if reply.rejected {
                    self.channel.close(cx.now);
                }
            }
            Ok(_) => self.broken(cx, "unexpected message"),
            Err(error) => self.broken(cx, error),
        }
    }

    fn broken(&mut self, cx: &mut Cx<'_>, error: impl Display) {
        self.channel
            .handle_broken(cx, SessionEvent::FormatError, error);
    }

    /// Updates the state after a login PDU, and applies the negotiated parameters when the login is
    /// complete.
    fn note_login(&mut self) {
        if self.state == ConnState::Up {
            become_state(&mut self.state, ConnState::Bound);
        }
        if let Some(params) = self.channel.take_new_params() {
            become_state(&mut self.state, ConnState::FullFeature);
            self.recv_segment = self.recv_segment.min(params.max_recv_segment);
            self.hello = match self.channel.mover().hello_required() {
                None => Hello::Possible,
                Some(true) => Hello::Due,
                Some(false) => Hello::None,
            };
        }
    }

    /// Terminates the connection once: we stop receiving, flush all posted work requests, and
    /// release all resources not in use by a device. Commands waiting for unsolicited data are
    /// included.
    fn terminate(&mut self, cx: &mut Cx<'_>) {
        if matches!(self.state, ConnState::Terminating | ConnState::Down) {
            return;
        }
        become_state(&mut self.state, ConnState::Terminating);
        self.parting = None;
        self.deferred.clear();
        self.held_back.clear();
        self.actions.push_back(IserAction::Disconnect);
        self.channel.handle_disconnected(cx);
    }

    /// Called after every input to handle faults, actions of the channel, and receives that were
    /// held back.
    fn finish_input(&mut self, cx: &mut Cx<'_>) {
        if let Some(fault) = self.channel.mover_mut().take_fault() {
            self.channel
                .handle_broken(cx, SessionEvent::FormatError, fault);
        }
        if self.parting.is_some_and(|until| until <= cx.now) {
            self.terminate(cx);
        }
        // Do this before posting receives again, because an action may terminate the connection and
        // then no receives must be posted.
        while let Some(action) = self.channel.poll_action() {
            match action {
                Action::Disconnect if self.parting.is_some() => {}
                Action::Disconnect => self.terminate(cx),
                Action::Release => self.let_go = true,
                other => self.actions.push_back(IserAction::Channel(other)),
            }
        }
        while self.channel.has_room()
            && let Some(rx) = self.held_back.pop_front()
        {
            self.post_recv(rx);
        }
        let is_over = self.state == ConnState::Terminating
            && self.let_go
            && self.drained
            && self.posted_receives == 0;
        if is_over {
            become_state(&mut self.state, ConnState::Down);
            self.actions.push_back(IserAction::Release);
        }
    }

    /// Posts a receive again, unless too many messages are queued for sending. We do not receive
    /// more requests from a peer that does not read our responses.
    fn recycle(&mut self, rx: RxIdx) {
        match self.state {
            ConnState::Terminating | ConnState::Down => {}
            _ if self.channel.has_room() => self.post_recv(rx),
            _ => self.held_back.push_back(rx),
        }
    }

    fn post_recv(&mut self, rx: RxIdx) {
        self.posted_receives += 1;
        self.actions.push_back(IserAction::PostRecv(rx));
    }
}
