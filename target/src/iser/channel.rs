//! The connection: its receives, its state, its end.
//!
//! # Calling order
//! 1. [`IserChannel::new`] before the connection is accepted; its first actions post the receives.
//! 2. Inputs, in any order: [`IserChannel::handle_established`], [`IserChannel::handle_recv`],
//!    [`IserChannel::handle_recv_flushed`], [`IserChannel::handle_post_done`],
//!    [`IserChannel::handle_disconnected`], [`IserChannel::handle_drained`], and through
//!    [`IserChannel::input`] everything that a [`Channel`] takes.
//! 3. After every input, [`IserChannel::poll_action`] until it has none, then
//!    [`IserChannel::poll_post`] until it has none.
//! 4. After [`IserAction::Release`] it holds nothing, and may be dropped.

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

/// Time in which an initiator that has got the last PDU may disconnect. One
/// that is cut off just then reports an error, Linux at least.
const PARTING: Duration = Duration::from_secs(1);

/// State of a connection. The names are those of isert's `iser_conn_state`.
///
/// ```text
///  Init ──established──→ Up ──login PDU──→ Bound ──login done──→ FullFeature
///    └────────────────────┴───── error, logout, disconnect ─────────┘
///                                      v
///                                 Terminating ──everything is back──→ Down
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnState {
    /// Accepted, not yet known to be established; what arrives is kept.
    Init,
    /// Established; nothing has come yet.
    Up,
    /// A login is under way.
    Bound,
    /// The login is over.
    FullFeature,
    /// The queue pair is in error and flushes; devices may still use buffers.
    Terminating,
    /// Holds nothing, and may be dropped.
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

/// Action that the worker carries out for a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IserAction {
    /// Action of the channel; neither [`Action::Disconnect`] nor [`Action::Release`].
    Channel(Action),
    /// Post this descriptor of the receive ring.
    PostRecv(RxIdx),
    /// Notify the CM that a message came before the one that establishes the connection.
    NotifyEstablished,
    /// Disconnect, which takes the queue pair to the error state, then post the drain marker: a
    /// signaled zero-length write. When it completes, call [`IserChannel::handle_drained`].
    Disconnect,
    /// The connection is [`ConnState::Down`]: destroy its queue pair, free its rings.
    Release,
}

/// Parameters of a new connection.
#[derive(Debug)]
pub struct IserConfig {
    /// Limits of the connection and of its rings.
    pub params: IserParams,
    /// Number of the connection's worker.
    pub worker: u16,
    /// The connection's number at that worker, never used twice.
    pub serial: u64,
    /// Receive ring: as long as [`IserParams::memory`] says.
    pub receive_ring: MemSlice,
    /// Send ring: the same.
    pub send_ring: MemSlice,
}

/// State of the Hello exchange (RFC 7145 6.10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hello {
    /// A Hello would be a protocol error.
    None,
    /// The next message may be one: an initiator of RFC 5046 does not announce it (RFC 7145 5.1.3).
    Possible,
    /// The next message has to be one.
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
    /// Receives that are not posted yet, since the connection is new.
    first_receives: Range<u16>,
    /// Messages that came before the connection was known to be there; each in a receive of its
    /// own.
    deferred: VecDeque<(RxIdx, u32)>,
    /// Receives that are not posted while too much waits to be sent; each once.
    held_back: VecDeque<RxIdx>,
    /// Longest data segment taken, in bytes.
    recv_segment: u32,
    hello: Hello,
    notified: bool,
    drained: bool,
    /// The channel holds nothing any more.
    let_go: bool,
    /// Everything is said; until then the initiator may disconnect by itself.
    parting: Option<Instant>,
    actions: VecDeque<IserAction>,
}

impl IserChannel {
    /// A connection that waits to be established.
    ///
    /// # Panics
    /// If the rings are shorter than the parameters say.
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
            // All of them, since the initiator may send as soon as it has our answer.
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

    /// Returns the channel, for looks at its state.
    #[must_use]
    pub fn channel(&self) -> &Channel<Iser> {
        &self.channel
    }

    /// The initiator has closed the connection.
    pub fn note_closed(&mut self) {
        self.channel.note_closed();
    }

    /// Returns the limits that it was made with.
    #[must_use]
    pub fn params(&self) -> &IserParams {
        &self.params
    }

    /// Returns the state of the connection.
    #[must_use]
    pub fn state(&self) -> ConnState {
        self.state
    }

    /// Receives that are posted.
    #[must_use]
    pub fn posted_receives(&self) -> u32 {
        self.posted_receives
    }

    /// Chains that are posted.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.channel.mover().outstanding()
    }

    /// Returns the time at which [`Channel::handle_timeout`] is due, as an [`IserChannel::input`].
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

    /// The next chain to post; `false` when there is none for the moment.
    pub fn poll_post(&mut self, now: Instant, post: &mut Post) -> bool {
        let is_posted = self
            .channel
            .poll_mover(|mover, numbers, held| mover.poll_post(numbers, held, post));
        if is_posted {
            self.channel.note_asked(now, |mover| mover.fetched());
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

    /// The connection is established.
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
        self.settle(cx);
    }

    /// A message arrived in this receive descriptor: `bytes` are what was received there.
    pub fn handle_recv(&mut self, cx: &mut Cx<'_>, rx: RxIdx, bytes: &[u8]) {
        self.posted_receives -= 1;
        match self.state {
            // A receive may complete before the CM's last message comes. The login in it is not
            // looked at until the connection is known to be established.
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
        self.settle(cx);
    }

    /// A receive ended without a message: the queue pair is in error.
    pub fn handle_recv_flushed(&mut self, cx: &mut Cx<'_>, _rx: RxIdx) {
        self.posted_receives -= 1;
        self.terminate(cx);
        self.settle(cx);
    }

    /// A chain has completed, or failed.
    ///
    /// # Panics
    /// If it was not posted.
    pub fn handle_post_done(&mut self, cx: &mut Cx<'_>, chain: ChainIdx, ok: bool) {
        self.end_chain(cx, chain, ok);
        if !ok {
            self.terminate(cx);
        }
        self.settle(cx);
    }

    /// The connection ended, by the peer or by an error.
    pub fn handle_disconnected(&mut self, cx: &mut Cx<'_>) {
        self.terminate(cx);
        self.settle(cx);
    }

    /// As [`Channel::handle_terminate`], and the queue pair goes to the error state.
    pub fn handle_terminate(&mut self, cx: &mut Cx<'_>) {
        self.channel.handle_terminate(cx);
        // Also one whose initiator might disconnect by itself: a login waits for its end.
        self.terminate(cx);
        self.settle(cx);
    }

    /// The drain marker completed: nothing posted before it is left.
    pub fn handle_drained(&mut self, cx: &mut Cx<'_>) {
        self.drained = true;
        self.settle(cx);
    }

    /// The queues are gone, alone or with their device: nothing that was posted there will happen or
    /// complete.
    pub fn handle_queues_gone(&mut self, cx: &mut Cx<'_>) {
        self.terminate(cx);
        let chains: Vec<_> = self.channel.mover().under_way().collect();
        for chain in chains {
            self.end_chain(cx, chain, false);
        }
        // Queues that are gone flush nothing.
        self.posted_receives = 0;
        self.drained = true;
        self.settle(cx);
    }

    /// Gives the channel an input that is no completion.
    pub fn input(&mut self, cx: &mut Cx<'_>, f: impl FnOnce(&mut Channel<Iser>, &mut Cx<'_>)) {
        f(&mut self.channel, cx);
        self.settle(cx);
    }

    /// As [`Channel::handle_others_gone`], with which a login may end.
    pub fn handle_others_gone(&mut self, cx: &mut Cx<'_>) {
        self.channel.handle_others_gone(cx);
        self.note_login();
        self.settle(cx);
    }

    /// As [`Channel::handle_timeout`], with which a login may end.
    pub fn handle_timeout(&mut self, cx: &mut Cx<'_>) {
        self.channel.handle_timeout(cx);
        if self.state == ConnState::Bound {
            self.note_login();
        }
        self.settle(cx);
    }

    /// As [`Channel::handle_luns`], which asks for no action.
    pub fn handle_luns(&mut self, luns: Arc<LunMap>) {
        self.channel.handle_luns(luns);
    }

    /// Ends everything at once, for a worker that ends without a shutdown; the connection is of no
    /// use then. The devices are closed already, so nothing touches a buffer.
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
        if let Some(task) = ended.answered {
            self.channel.handle_done(cx, task);
        }
        // A channel that closes waits until everything has left. With RDMA that is the last chain.
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
                    return self.broken(cx, "a data segment beyond what was agreed on");
                }
                self.channel.mover_mut().set_arriving(buffers);
                self.channel.handle_frame(cx, &frame);
                // Buffers that no command has taken must not become those of the next one.
                self.channel.mover_mut().set_arriving(Default::default());
                self.note_login();
            }
            Ok(Message::Hello(message)) if hello != Hello::None => {
                let reply = message.answer(self.params.reads);
                self.channel.mover_mut().send_hello(reply);
                if reply.rejected {
                    self.channel.close(cx.now);
                }
            }
            Ok(_) => self.broken(cx, "a message that does not belong here"),
            Err(error) => self.broken(cx, error),
        }
    }

    fn broken(&mut self, cx: &mut Cx<'_>, error: impl Display) {
        self.channel
            .handle_broken(cx, SessionEvent::FormatError, error);
    }

    /// Follows the login: its first PDU, then what was agreed on.
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

    /// Terminates, once: nothing more is received, what is posted flushes, what no device uses ends
    /// now. Commands that wait for unsolicited data go with the others.
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

    /// Follows every input: faults, actions of the channel, receives that were held back.
    fn settle(&mut self, cx: &mut Cx<'_>) {
        if let Some(fault) = self.channel.mover_mut().take_fault() {
            self.channel
                .handle_broken(cx, SessionEvent::FormatError, fault);
        }
        if self.parting.is_some_and(|until| until <= cx.now) {
            self.terminate(cx);
        }
        // Before receives are posted again: an action may terminate, and then none is.
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

    /// Posts a receive again, unless too much waits to be sent: a peer that asks for more than it
    /// takes is not listened to meanwhile.
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
