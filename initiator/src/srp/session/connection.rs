//! Connections: connecting, loss, reconnecting, and closing.

use std::net::SocketAddr;
use std::time::Instant;

use riser_scsi::srp::LoginReq;
use riser_state::become_state;

use super::types::{ConnState, Member};
use super::{ChannelIndex, ConnectError, Down, Output, SessionState, SrpSession};
use crate::session::{TaskManager, WritePolicy};
use crate::srp::channel::InitiatorChannel;

impl SrpSession {
    pub(super) fn connect(&mut self, channel: u8, now: Instant) {
        let until = now + self.core.life.login_patience();
        let mut member = Member::new(&self.config, channel);
        become_state(&mut member.conn, ConnState::Connecting(until));
        self.members[usize::from(channel)] = member;
        self.core.functions.clear(channel);
        self.core.arm(until);
        self.core
            .outputs
            .push_back(Output::Connect(ChannelIndex(channel)));
    }

    /// Called when the path was resolved: returns the login for connecting.
    ///
    /// # Panics
    /// Panics if the channel is not connecting.
    pub fn begin_login(&mut self, channel: ChannelIndex) -> LoginReq {
        self.members[usize::from(channel.0)].channel.begin_login()
    }

    /// Called when the connection is established, with the private data of the target. `reads` is
    /// the number of writes for which the target may fetch the data concurrently with RDMA READ,
    /// and `redirect` the address to which the login was redirected, if any.
    pub fn handle_connected(
        &mut self,
        channel: ChannelIndex,
        private_data: &[u8],
        reads: u8,
        redirect: Option<SocketAddr>,
        now: Instant,
    ) {
        let member = &mut self.members[usize::from(channel.0)];
        if !matches!(member.conn, ConnState::Connecting(_)) {
            return;
        }
        // All channels of a session must belong to the same I_T nexus.
        if channel.0 > 0 && redirect != self.redirect {
            return self.disconnect(channel);
        }
        match member.channel.handle_established(private_data) {
            Ok(_) => {
                become_state(&mut member.conn, ConnState::Established);
                member.writes = WritePolicy::new(reads);
            }
            Err(fault) => {
                self.disconnect(channel);
                // The session works without any channels beyond the first.
                if channel.0 == 0 {
                    let error = ConnectError::Login(fault.into());
                    self.tear_down(error.into(), false);
                }
                return;
            }
        }
        if channel.0 == 0 && self.state() == SessionState::LoggingIn {
            self.core.on_live(now);
            self.fence_redirect(redirect);
            for extra in 1..self.config.channels {
                self.connect(extra, now);
            }
        }
        self.pump(now);
    }

    /// If the login has reached another port than the last login, it has not terminated the
    /// commands of lost connections: waits until these have completed.
    fn fence_redirect(&mut self, redirect: Option<SocketAddr>) {
        let is_elsewhere = std::mem::replace(&mut self.redirect, redirect) != redirect;
        let Some(at) = self.core.settle_at else {
            return;
        };
        self.has_moved |= is_elsewhere;
        if self.has_moved {
            self.core.settle_until(at);
        }
    }

    /// Called when a connection was rejected with a CM reason and private data. The owner has
    /// released the channel's resources.
    pub fn handle_rejected(
        &mut self,
        channel: ChannelIndex,
        reason: u16,
        private_data: &[u8],
        now: Instant,
    ) {
        let error = InitiatorChannel::rejection(reason, private_data);
        self.handle_connect_failed(channel, ConnectError::Login(error), now);
    }

    /// Called when connecting failed. The owner has released the channel's resources.
    pub fn handle_connect_failed(
        &mut self,
        channel: ChannelIndex,
        error: ConnectError,
        now: Instant,
    ) {
        let member = &mut self.members[usize::from(channel.0)];
        match member.conn {
            // A closing connection must be closed by its owner first.
            ConnState::Free | ConnState::Disconnecting => return,
            // A REJ may also be received for an established connection (IBTA 12.9.7). Its requests
            // are then handled like those of any lost connection.
            ConnState::Established => {
                self.tear_down(Down::ConnectionLost, false);
                return;
            }
            ConnState::Connecting(_) => {}
        }
        become_state(&mut member.conn, ConnState::Free);
        member.channel.handle_disconnected();
        // The target is not required to grant more than one channel.
        if channel.0 == 0 && self.state() == SessionState::LoggingIn {
            self.core.life.tear_down(error.into(), false);
        }
        self.on_member_down(now);
    }

    /// Called when a channel's connection broke, was closed by the peer, or had a failed work
    /// request.
    pub fn handle_channel_error(&mut self, channel: ChannelIndex, _now: Instant) {
        match self.members[usize::from(channel.0)].conn {
            ConnState::Established | ConnState::Connecting(_) => {
                self.tear_down(Down::ConnectionLost, false);
            }
            ConnState::Free | ConnState::Disconnecting => {}
        }
    }

    /// Called when a channel was closed: nothing can be received on it anymore, and the keys of all
    /// memory advertised on it are invalid.
    pub fn handle_channel_closed(&mut self, channel: ChannelIndex, now: Instant) {
        let member = &mut self.members[usize::from(channel.0)];
        become_state(&mut member.conn, ConnState::Free);
        member.channel.handle_disconnected();
        if self.core.on_channel_closed(channel.0, now) {
            self.core.settle_at = Some(now + self.config.timing.settle);
        }
        self.on_member_down(now);
    }

    /// Continues tearing down: closes the remaining channels, and when all are closed, closes the
    /// session or waits for the next login.
    pub(super) fn on_member_down(&mut self, now: Instant) {
        if !matches!(self.state(), SessionState::TearingDown { .. }) {
            return;
        }
        if self.members.iter().any(|m| m.conn != ConnState::Free) {
            self.close_members();
            return;
        }
        self.core.on_disconnected(now);
    }

    /// Starts to close all channels.
    pub(super) fn close_members(&mut self) {
        for index in 0..self.config.channels {
            self.disconnect(ChannelIndex(index));
        }
    }

    /// Starts to close a channel. A logout is only sent if the session closes: otherwise, the next
    /// login causes the target to terminate the old channels (MULTI-CHANNEL ACTION).
    pub(super) fn disconnect(&mut self, channel: ChannelIndex) {
        let last = matches!(self.state(), SessionState::TearingDown { last: true, .. });
        let member = &mut self.members[usize::from(channel.0)];
        if !member.conn.is_open() {
            return;
        }
        let logout = member.channel.begin_disconnect().filter(|_| last);
        become_state(&mut member.conn, ConnState::Disconnecting);
        self.core
            .outputs
            .push_back(Output::Disconnect(channel, logout));
    }
}
