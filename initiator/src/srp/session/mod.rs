//! A session: an initiator port, a target port, one or more channels, and their requests.
//!
//! [`SrpSession`] is a state machine without I/O. Its owner reports events (`handle_*`), polls
//! outputs ([`SrpSession::poll_output`]) and the next deadline
//! ([`next_deadline`](crate::session::Machine::next_deadline)).
//!
//! # Memory
//! A request never completes while the target can still access its memory with a key of that
//! request. (With `register_always=0` there are no such keys: the target can access the whole data
//! buffer pool for the lifetime of the session, as with this option of Linux's `ib_srp`, and is
//! trusted not to.) When an attempt has finished for any reason, the session outputs
//! [`Output::Retire`]. The owner invalidates the memory's keys and calls
//! [`SrpSession::handle_retired`]; only then is the request completed or retried. When a channel
//! was closed, so that nothing can be received on it and its keys are invalid,
//! [`SrpSession::handle_channel_closed`] reports this for all of its requests.
//!
//! Retiring the memory of an attempt has the same timeout as its response. A target can block the
//! connection's send queue forever, including all invalidations, by responding to a command while
//! it keeps rejecting its packets (RNR NAK). In this case, the connection is closed, which
//! invalidates all keys.
//!
//! # Time
//! An attempt without a response is aborted when it times out: ABORT TASK, then LOGICAL UNIT RESET,
//! then a new connection. Each of these steps follows if the previous one fails or times out. If
//! there is no room for a command on its connection, it waits in the session, to make sure that we
//! don't send it after its own abort or a reset.
//!
//! A target that is silent for [`SessionConfig::ping`] is pinged ([`Output::Ping`]), even while
//! commands are waiting for it. The ping is a command with the usual timeouts. If it cannot be
//! aborted, the next step is a new connection instead of a reset, because a reset would terminate
//! the commands of all other initiators. If the target's host has vanished, the connection detects
//! this earlier, even if the request limit leaves no room for a ping.
//!
//! # Short writes
//! If the target supports immediate data, a short write carries its data while few writes are
//! outstanding. With many outstanding writes, the target fetches the data with RDMA READ
//! (`session/writes.rs`).
//!
//! # Replay
//! When a connection breaks, it is unknown which of its outstanding commands were executed. After
//! the new login, commands that may be executed twice are sent again ([`Effect`]): commands without
//! an effect, and commands that set blocks to a given content. This is safe because
//! - the first channel of the new login requests the termination of the old channels (MULTI-CHANNEL
//!   ACTION 0), and the target responds to it only when their commands have completed, so no
//!   command of the old connection is executed after a command of the new one;
//! - for its issuer, an unacknowledged command is still in progress: executing it a second time
//!   before the acknowledgement is one of the allowed orders of its effects;
//! - they are sent in the order of their submission, and a command is not sent while an earlier one
//!   with an overlapping effect is outstanding.
//!
//! Note that the first of these must be guaranteed by the target. `riserd` complies with it, and
//! can be identified by its cache generation page ([`crate::unit`]). Linux's `ib_srpt` disconnects
//! the old channels and responds immediately, while their commands continue in its backend. So with
//! other targets, a session with a watched unit won't start commands until
//! [`Timing::settle`](crate::session::Timing::settle) after the loss of a connection with an
//! outstanding command that modifies the medium: a write that stays in the backend for longer can
//! reach the medium after its retry, and after later writes to the same blocks. ABORT TASK cannot
//! abort it, because it only refers to commands of its own I_T nexus, and LOGICAL UNIT RESET would
//! also terminate the commands of all other initiators. The same applies to the unknown connection
//! of an earlier process, and with any target if its login or the new one was redirected to another
//! port: a port does not know the channels of another port.
//!
//! Task-management functions and commands with other effects (reservations, mode pages, compare and
//! write) are never sent again; they fail with [`RequestError::ConnectionLost`].
//!
//! # Not implemented
//! Separate recovery of additional channels: if any channel breaks, the whole session reconnects.

mod connection;
mod machine;
mod recovery;
mod requests;
mod types;

use std::net::SocketAddr;
use std::time::Instant;

use riser_scsi::sense::Sense;
use riser_scsi::srp::{Residual, Rsp, RspCode, Tag, TargetPortId};

pub use self::types::{ChannelIndex, Output, SessionConfig};
use self::types::{ConnState, Member};
use super::channel::{ChannelParameters, Received};
#[cfg(doc)]
use crate::request::Effect;
use crate::request::table::AttemptOutcome;
use crate::request::{CommandResponse, DataLen, RequestError};
use crate::session::{
    ConnectError, Core, CoreConfig, Down, FunctionOutcome, SessionState, TaskManager,
};

/// A session. See the documentation of the module.
#[derive(Debug)]
pub struct SrpSession {
    config: SessionConfig,
    core: Core<Tag, Output>,
    members: Vec<Member>,
    /// Address to which the last login was redirected, if any.
    redirect: Option<SocketAddr>,
    /// The session was lost with commands that modify the medium, and the login has not terminated
    /// them because it has reached another port.
    has_moved: bool,
}

impl SrpSession {
    /// Creates a session that starts to connect immediately.
    ///
    /// # Panics
    /// Panics if the configuration has no channels or no room for a request.
    #[must_use]
    pub fn new(config: SessionConfig, now: Instant) -> Self {
        assert!(config.channels > 0);
        let mut session = Self {
            config,
            core: Core::new(
                CoreConfig {
                    channels: config.channels,
                    requests: config.max_requests,
                    attempts: config.max_attempts,
                    timing: config.timing,
                    ping: config.ping,
                    reconnect: config.reconnect,
                },
                now,
            ),
            members: (0..config.channels)
                .map(|i| Member::new(&config, i))
                .collect(),
            redirect: None,
            has_moved: false,
        };
        session.connect(0, now);
        session
    }

    /// Returns the state of the session.
    #[must_use]
    pub fn state(&self) -> SessionState {
        self.core.life.state()
    }

    /// Returns the number of accepted, incomplete requests.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.core.requests.len()
    }

    /// Returns the number of live channels.
    #[must_use]
    pub fn live_channels(&self) -> usize {
        self.members
            .iter()
            .filter(|m| m.conn == ConnState::Established)
            .count()
    }

    /// Returns the parameters negotiated in a channel's login, or `None` before.
    #[must_use]
    pub fn agreed(&self, channel: ChannelIndex) -> Option<&ChannelParameters> {
        self.members[usize::from(channel.0)].channel.agreed()
    }

    /// Returns the number of credits held by the target without an outstanding request of ours.
    #[must_use]
    pub fn unreturned(&self) -> i64 {
        let all = self.members.iter();
        all.map(|member| member.channel.unreturned()).sum()
    }

    /// Returns the identifier of the target port, which is 0 if unknown, and its address if the last
    /// login was redirected to it.
    #[must_use]
    pub fn target_port(&self) -> (TargetPortId, Option<SocketAddr>) {
        (self.config.channel.target_port, self.redirect)
    }

    /// Returns the next output.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.core.outputs.pop_front()
    }

    /// Handles an information unit received on a channel.
    pub fn handle_iu(&mut self, channel: ChannelIndex, iu: &[u8], now: Instant) {
        let member = &mut self.members[usize::from(channel.0)];
        if member.conn != ConnState::Established {
            return;
        }
        self.core.last_received = now;
        let received = match member.channel.handle_iu(iu) {
            Ok(received) => received,
            Err(fault) => {
                self.tear_down(fault.into(), false);
                return;
            }
        };
        match received {
            Received::Response { owner, rsp } => {
                let len = self.core.requests.at(owner).spec.len;
                let end = match rsp.response {
                    None | Some(RspCode::Complete) => {
                        let response = response_from(&rsp, len);
                        self.on_attention(owner, &response);
                        // The commands to abort may be on any channel.
                        for channel in 0..self.config.channels {
                            self.pump_functions(channel, now);
                        }
                        AttemptOutcome::Responded(response)
                    }
                    Some(code) => AttemptOutcome::Refused(RequestError::Refused(code)),
                };
                self.retire_attempt(owner, channel.0, end, now);
            }
            Received::TskMgmt(code) => {
                let end = match code {
                    RspCode::Complete => FunctionOutcome::Complete,
                    _ => FunctionOutcome::Failed,
                };
                self.on_function_completed(channel.0, end, now);
            }
            Received::Reply(response) => {
                self.core
                    .outputs
                    .push_back(Output::Reply(channel, response));
            }
            Received::Event {
                lun,
                sense,
                response,
            } => {
                let sense: Box<[u8]> = Box::from(sense);
                self.hold_if(Sense::parse(&sense));
                self.core
                    .outputs
                    .push_back(Output::Reply(channel, response));
                self.core.report_unit_event(lun, sense);
            }
            Received::Logout(reason) => self.tear_down(Down::Logout(reason), false),
            Received::Stale => self.core.on_stale(),
        }
        self.pump(now);
    }
}

/// Converts a response to a command with this data length.
fn response_from(rsp: &Rsp<'_>, len: DataLen) -> CommandResponse {
    let (residual, len) = match len {
        DataLen::None => (Residual::None, 0),
        DataLen::In(len) => (rsp.data_in, len),
        DataLen::Out(len) => (rsp.data_out, len),
    };
    CommandResponse {
        status: rsp.status,
        sense: rsp.sense.map(Box::from),
        transferred: match residual {
            Residual::Under(residual) => len.saturating_sub(residual),
            _ => len,
        },
        overflow: match residual {
            Residual::Over(residual) => residual,
            _ => 0,
        },
    }
}

#[cfg(test)]
pub(crate) mod tests;
