//! Connections: made, lost, made again, closed.

use std::time::Instant;

use riser_scsi::srp::LoginReq;

use super::types::{Link, Member};
use super::{ChannelIndex, ConnectError, Down, Output, Session, SessionEvent, SessionState};
use crate::request::{Effect, RequestError};

impl Session {
    pub(super) fn connect(&mut self, channel: u8, now: Instant) {
        let until = now + self.patience;
        let fresh = Member::new(&self.config, channel);
        let member = &mut self.members[usize::from(channel)];
        *member = fresh;
        member.link = Link::Connecting(until);
        self.arm(until);
        self.outputs
            .push_back(Output::Connect(ChannelIndex(channel)));
    }

    /// The path is found: the login to connect with.
    ///
    /// # Panics
    /// If the channel is not being connected.
    pub fn begin_login(&mut self, channel: ChannelIndex) -> LoginReq {
        self.members[usize::from(channel.0)].channel.begin_login()
    }

    /// The connection is established; `private_data` is the target's.
    pub fn handle_connected(&mut self, channel: ChannelIndex, private_data: &[u8], now: Instant) {
        let member = &mut self.members[usize::from(channel.0)];
        if !matches!(member.link, Link::Connecting(_)) {
            return;
        }
        match member.channel.handle_established(private_data) {
            Ok(_) => member.link = Link::Up,
            Err(fault) => {
                member.channel.begin_disconnect();
                member.link = Link::Closing;
                self.outputs.push_back(Output::Disconnect(channel, None));
                if channel.0 == 0 {
                    let error = ConnectError::Login(fault.into());
                    self.tear_down(error.into(), false);
                }
                return;
            }
        }
        if channel.0 == 0 && self.state == SessionState::LoggingIn {
            self.state = SessionState::Live;
            self.ever_live = true;
            self.patience = self.config.timing.login;
            self.last_heard = now;
            self.arm(now + self.config.ping);
            self.is_checked = false;
            // A unit that is not there ends this login at once, and counts as a failure.
            match self.is_guarded {
                true => self.requests.hold(),
                false => self.backoff = self.config.timing.backoff_min,
            }
            self.outputs.push_back(Output::Event(SessionEvent::Live));
            for extra in 1..self.config.channels {
                self.connect(extra, now);
            }
        }
        self.pump(now);
    }

    /// A connection was rejected with a CM reason and private data. The owner has released what the
    /// channel held.
    pub fn handle_rejected(
        &mut self,
        channel: ChannelIndex,
        reason: u16,
        private_data: &[u8],
        now: Instant,
    ) {
        let member = &mut self.members[usize::from(channel.0)];
        let error = member.channel.handle_rejected(reason, private_data);
        self.handle_connect_failed(channel, ConnectError::Login(error), now);
    }

    /// A connection could not be made. The owner has released what the channel held.
    pub fn handle_connect_failed(
        &mut self,
        channel: ChannelIndex,
        error: ConnectError,
        now: Instant,
    ) {
        let member = &mut self.members[usize::from(channel.0)];
        if member.link == Link::Down {
            return;
        }
        member.link = Link::Down;
        member.channel.handle_disconnected();
        // The target need not grant more than one channel.
        if channel.0 == 0 && self.state == SessionState::LoggingIn {
            self.state = SessionState::TearingDown {
                why: error.into(),
                last: !self.ever_live,
            };
        }
        self.on_member_down(now);
    }

    /// A channel's connection broke, was closed by the peer, or a work request on it failed.
    pub fn handle_channel_error(&mut self, channel: ChannelIndex, _now: Instant) {
        match self.members[usize::from(channel.0)].link {
            Link::Up | Link::Connecting(_) => self.tear_down(Down::ConnectionLost, false),
            Link::Down | Link::Closing => {}
        }
    }

    /// A channel has been torn down: nothing can arrive on it any more, and the keys of all memory
    /// that was made known on it are invalid.
    pub fn handle_channel_gone(&mut self, channel: ChannelIndex, now: Instant) {
        let member = &mut self.members[usize::from(channel.0)];
        member.link = Link::Down;
        member.channel.handle_disconnected();
        member.tmf = None;
        member.aborts.clear();
        for (index, end) in self.requests.of_channel(channel.0) {
            if self.requests.at(index).spec.effect != Effect::None {
                self.settle_at = Some(now + self.config.timing.settle);
            }
            self.settle(index, end, now);
        }
        self.on_member_down(now);
    }

    /// Goes on with a tear-down once the last channel is down.
    pub(super) fn on_member_down(&mut self, now: Instant) {
        let SessionState::TearingDown { why, last } = self.state else {
            return;
        };
        if self.members.iter().any(|m| m.link != Link::Down) {
            // Channels that are up or being connected go too.
            self.close_members();
            return;
        }
        if last || !self.ever_live {
            self.state = SessionState::Closed;
            for index in self.requests.all() {
                self.complete(index, Err(RequestError::Closed));
            }
            self.timer = None;
            self.outputs
                .push_back(Output::Event(SessionEvent::Closed(why)));
            return;
        }
        let until = now + self.backoff;
        self.backoff = (self.backoff * 2).min(self.config.timing.backoff_max);
        self.state = SessionState::Backoff { until };
        self.arm(until);
        self.outputs
            .push_back(Output::Event(SessionEvent::Reconnecting(why)));
    }

    /// Begins to close every channel.
    pub(super) fn tear_down(&mut self, why: Down, last: bool) {
        let last = last || !self.config.reconnect;
        match &mut self.state {
            SessionState::Closed => return,
            SessionState::TearingDown { last: l, .. } => *l |= last,
            state => *state = SessionState::TearingDown { why, last },
        }
        self.close_members();
    }

    pub(super) fn close_members(&mut self) {
        let last = matches!(self.state, SessionState::TearingDown { last: true, .. });
        for (index, member) in self.members.iter_mut().enumerate() {
            if matches!(member.link, Link::Up | Link::Connecting(_)) {
                let logout = member.channel.begin_disconnect().filter(|_| last);
                member.link = Link::Closing;
                self.outputs
                    .push_back(Output::Disconnect(ChannelIndex(index as u8), logout));
            }
        }
    }

    /// The watched unit is of no use here: disconnects. Then it is the end, or another login is tried.
    pub fn leave(&mut self, why: Down, last: bool, now: Instant) {
        if self.state == SessionState::Live {
            self.tear_down(why, last);
            self.on_member_down(now);
        }
    }

    /// Ends the session: logs out, disconnects, and completes every request with
    /// [`RequestError::Closed`].
    pub fn close(&mut self, now: Instant) {
        self.tear_down(Down::Closed, true);
        self.on_member_down(now);
    }
}
