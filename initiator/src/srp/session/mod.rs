//! A session: one initiator port, one target port, one or more channels, and the requests on them.
//!
//! [`SrpSession`] is a machine with no I/O in it. Its owner reports what happened (`handle_*`),
//! asks it what to do ([`SrpSession::poll_output`]) and when to wake it
//! ([`next_deadline`](crate::session::Machine::next_deadline)).
//!
//! # Memory
//! The session never reports a request while the target could still reach its memory by a key of
//! that request. (With `register_always=0` there are no such keys: the target may reach the whole
//! pool of data buffers as long as the session lasts, as it may with Linux's `ib_srp` and that
//! option, and is trusted not to.) When an attempt is over, for any reason, the session says
//! [`Output::Retire`]; the owner invalidates the memory's keys and answers
//! [`SrpSession::handle_retired`]; only then is the request completed or tried again. When a
//! channel has been torn down, so that nothing can arrive on it any more and its keys are gone,
//! [`SrpSession::handle_channel_gone`] says so for all of its requests at once.
//!
//! The memory of an attempt has as long to come back as its answer had. A target can hold up the
//! connection's send queue without end, and with it every invalidation, by answering a command
//! whose packets it keeps refusing (RNR NAK). Then the connection is left, which ends all keys.
//!
//! # Time
//! An attempt that is not answered in time is aborted: ABORT TASK, then LOGICAL UNIT RESET, then a
//! new connection, each when the one before it fails or is not answered either. A command that has
//! no room on its connection waits here, so that none is sent behind its own abort or a reset.
//!
//! A target that is silent for [`SessionConfig::ping`] is pinged ([`Output::Ping`]), also while
//! commands wait. The ping is a command with the times of any other; if it cannot be aborted, no
//! reset follows but a new connection, since a reset would end the commands of every other
//! initiator. That the target's host has vanished its connection notices sooner, also where the
//! request limit leaves no room for a ping.
//!
//! # Short writes
//! Where the target takes immediate data, a short write carries its data while few writes are
//! outstanding; where many are, the target reads the data by RDMA READ (`session/writes.rs`).
//!
//! # Replay
//! When a connection breaks, it is not known which of its outstanding commands were carried out.
//! After the new login those are sent again for which that makes no difference ([`Effect`]):
//! commands that change nothing, and commands that set blocks to a given content. That is safe
//! because
//! - the first channel of the new login asks the target to terminate the old ones
//!   (MULTI-CHANNEL ACTION 0), and the target answers it only when their commands have ended, so no
//!   command of the old connection is carried out after one of the new;
//! - a command that was never acknowledged is, for its issuer, still in progress: carrying it out
//!   a second time before acknowledging it is one of the orders in which it may take effect;
//! - they are sent in the order of their submission, and none is sent while an earlier one with an
//!   overlapping effect is outstanding.
//!
//! The first of these is the target's promise, and `riserd` keeps it, which is known by its page of
//! the cache's generation ([`crate::unit`]). Linux's `ib_srpt` disconnects the old channels and
//! answers at once, while their commands go on at its backend. So a session with any other target,
//! whose unit is watched, starts nothing before [`Timing::settle`](crate::session::Timing::settle)
//! has passed since a connection was lost with a command outstanding that changes the medium: a
//! write that stays longer in the backend can land after its repetition, and after later writes to
//! the same blocks. ABORT TASK would not reach it, since that names commands of its own I_T nexus,
//! and LOGICAL UNIT RESET would end the commands of every other initiator with it. Nor is anything
//! known of the connection of an earlier process.
//!
//! Task-management functions and commands with other effects (reservations, mode pages, compare and
//! write) are never sent again; they end with [`RequestError::ConnectionLost`].
//!
//! # Not implemented
//! Channels beyond the first that break take the whole session through a reconnection.

mod connection;
mod machine;
mod recovery;
mod requests;
mod types;

use std::time::Instant;

use riser_scsi::sense::Sense;
use riser_scsi::srp::{Residual, Rsp, RspCode, Tag, TargetPortId};

pub use self::types::{ChannelIndex, Output, SessionConfig};
use self::types::{ConnState, Member};
use super::channel::{Agreed, Received};
#[cfg(doc)]
use crate::request::Effect;
use crate::request::table::AttemptEnd;
use crate::request::{Answer, DataLen, RequestError};
use crate::session::{
    ConnectError, Core, CoreConfig, Down, FunctionEnd, SessionState, TaskManager,
};

/// One session. See the module's documentation.
#[derive(Debug)]
pub struct SrpSession {
    config: SessionConfig,
    core: Core<Tag, Output>,
    members: Vec<Member>,
}

impl SrpSession {
    /// A session that begins to connect at once.
    ///
    /// # Panics
    /// If the configuration has no channel or no room for a request.
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
        };
        session.connect(0, now);
        session
    }

    /// State of the session's life.
    #[must_use]
    pub fn state(&self) -> SessionState {
        self.core.life.state()
    }

    /// Requests taken and not yet completed.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.core.requests.len()
    }

    /// Number of live channels.
    #[must_use]
    pub fn live_channels(&self) -> usize {
        self.members
            .iter()
            .filter(|m| m.conn == ConnState::Established)
            .count()
    }

    /// Parameters that a channel's login agreed on; `None` before.
    #[must_use]
    pub fn agreed(&self, channel: ChannelIndex) -> Option<&Agreed> {
        self.members[usize::from(channel.0)].channel.agreed()
    }

    /// Units of the request limit that the target has, though no request of ours is outstanding.
    #[must_use]
    pub fn unreturned(&self) -> i64 {
        let all = self.members.iter();
        all.map(|member| member.channel.unreturned()).sum()
    }

    /// The target port that it is with; `None` where that is not known.
    #[must_use]
    pub fn target_port(&self) -> Option<TargetPortId> {
        Some(self.config.channel.target_port).filter(|port| port.0 != [0; 16])
    }

    /// The next thing to do.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.core.outputs.pop_front()
    }

    /// Takes an information unit that arrived on a channel.
    pub fn handle_iu(&mut self, channel: ChannelIndex, iu: &[u8], now: Instant) {
        let member = &mut self.members[usize::from(channel.0)];
        if member.conn != ConnState::Established {
            return;
        }
        self.core.last_heard = now;
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
                        let answer = answer_of(&rsp, len);
                        self.on_attention(owner, &answer);
                        // The commands to abort may be on every channel.
                        for channel in 0..self.config.channels {
                            self.pump_functions(channel, now);
                        }
                        AttemptEnd::Answered(answer)
                    }
                    Some(code) => AttemptEnd::Refused(RequestError::Refused(code)),
                };
                self.end_attempt(owner, channel.0, end, now);
            }
            Received::TskMgmt(code) => {
                let end = match code {
                    RspCode::Complete => FunctionEnd::Complete,
                    _ => FunctionEnd::Failed,
                };
                self.on_function_end(channel.0, end, now);
            }
            Received::Answer(answer) => {
                self.core.outputs.push_back(Output::Answer(channel, answer));
            }
            Received::Event { lun, sense, answer } => {
                let sense: Box<[u8]> = Box::from(sense);
                self.hold_if(Sense::parse(&sense));
                self.core.outputs.push_back(Output::Answer(channel, answer));
                self.core.report_unit_event(lun, sense);
            }
            Received::Logout(reason) => self.tear_down(Down::Logout(reason), false),
            Received::Stale => self.core.on_stale(),
        }
        self.pump(now);
    }
}

/// Answer in a response to a command with data of this length.
fn answer_of(rsp: &Rsp<'_>, len: DataLen) -> Answer {
    let (residual, len) = match len {
        DataLen::None => (Residual::None, 0),
        DataLen::In(len) => (rsp.data_in, len),
        DataLen::Out(len) => (rsp.data_out, len),
    };
    Answer {
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
mod tests;
