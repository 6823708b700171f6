//! A session: an initiator port, a target, one connection, and the requests on it.
//!
//! [`IscsiSession`] is a machine with no I/O in it. Its owner reports what happened (`handle_*`),
//! asks it what to do ([`IscsiSession::poll_output`]) and when to wake it
//! ([`next_deadline`](crate::session::Machine::next_deadline)). The same machine serves TCP and
//! iSER: moving a command's data is up to the owner. On TCP the machine sees every PDU; on iSER the
//! transport moves the data, and there are neither Data-In nor R2T.
//!
//! # Memory
//! A request is never reported while its memory is in use. When an attempt is over the session says
//! [`Output::Retire`]; the owner answers [`IscsiSession::handle_retired`] when nothing of the
//! memory waits to be sent and the target cannot reach it. A connection that is gone ends all use
//! at once, and is left where the memory of an attempt does not come back for as long as its answer
//! had.
//!
//! # Time
//! An attempt that is not answered in time is aborted: ABORT TASK, then LOGICAL UNIT RESET, then
//! TARGET WARM RESET, then a new connection, each when the one before it fails or is not answered
//! either. The time of an attempt, of its memory, of a function and of a ping begins again while
//! they are on their way to a target that takes what was sent before them
//! ([`IscsiSession::handle_progress`]), and that of an attempt with each R2T and each part of a
//! Data-In ([`IscsiSession::handle_bytes`]), which also shows that the target is there: a slow
//! network is no silent target. The request's deadline bounds all of it: past that nothing has more
//! time, an abort and the resets that follow it have three times that of a function, and memory has
//! that of an attempt behind its abort. A target that says nothing for a while is pinged; one that
//! does not answer is left.
//!
//! # Replay
//! Error recovery level 0: each failure on the connection ends it, and the session logs in
//! again with the same ISID and no TSIH, after the time that the target demands (Time2Wait). That
//! reinstates the session (RFC 7143 6.3.5): the target
//! ends the tasks of the old one before it answers the login. So the requests for which it makes no
//! difference to be carried out twice are sent again, in the order of their submission and none
//! while an earlier one with an overlapping effect is outstanding, exactly as on SRP; see
//! [`crate::srp::session`]. Others end with
//! [`RequestError::ConnectionLost`](crate::request::RequestError::ConnectionLost).
//!
//! Only a login at the same target portal group reinstates a session. After a redirection, or where
//! an address has moved, another group has not heard of the old session, whose writes may still be on
//! their way to the disk. Then nothing is started before
//! [`Timing::settle`](crate::session::Timing::settle) has passed since the login, nor is it after
//! the end of a process whose portal group is not known.
//!
//! # Discovery
//! A session without a target asks for all targets (SendTargets=All), reports them
//! ([`Output::Found`]) and logs out.
//!
//! # Not implemented
//! Several connections in a session; error recovery levels 1 and 2; bidirectional commands.

mod connection;
mod machine;
mod receive;
mod recovery;
mod tasks;
mod types;

use std::time::{Duration, Instant};

use riser_scsi::iscsi::login::{ConnectionParams, InitiatorLogin, SessionParams};
use riser_scsi::iscsi::name::TargetAddress;
use riser_scsi::iscsi::text::Collector;
use riser_scsi::iscsi::{CmdSn, Itt, StatSn};

pub use self::types::{
    CommandPdu, ControlKind, ControlPdu, DataOrder, Output, Placement, SessionConfig,
};
use self::types::{ConnState, Ping, Slot};
use crate::session::{Core, CoreConfig, SessionState, WritePolicy};

/// Longest wait for the answer to a logout.
const LOGOUT_PATIENCE: Duration = Duration::from_millis(500);

/// Control PDUs that may wait to be sent. A session has a handful of its own at once; the rest are
/// answers to NOP-Ins, of up to 8 KiB each.
pub const MAX_CONTROLS: usize = 64;

/// Longest silence of a target before it is left, in spans of [`SessionConfig::ping`], however
/// slowly arrives what was sent before the ping: with the usual 5 seconds as long as a request has,
/// which may be one write that takes all of its time.
const MAX_SILENCE: u32 = 12;

/// Redirections followed in a row.
const MAX_REDIRECTIONS: u8 = 4;

/// Longest list of targets that a portal may report, in bytes: some ten thousand targets.
const MAX_TARGETS: usize = 4 << 20;

/// Tags of what is not a command; commands have smaller low halves.
const TMF_TAG: u32 = 0xfff1;
pub(crate) const PING_TAG: Itt = Itt(0xfff2);
const LOGOUT_TAG: Itt = Itt(0xfff3);
const TEXT_TAG: Itt = Itt(0xfff4);

/// One session. See the module's documentation.
#[derive(Debug)]
pub struct IscsiSession {
    config: SessionConfig,
    core: Core<Itt, Output>,
    conn: ConnState,
    login: Option<Box<InitiatorLogin>>,
    params: Option<(SessionParams, ConnectionParams)>,
    portal_group: Option<u16>,
    /// Portal group of a lost session whose changes may still reach the medium, if there is one.
    /// Nothing is started before they are over, so there is no second one.
    unfenced: Option<Option<u16>>,
    /// Address to which the target has moved; `moves` counts the times in a row.
    moved: Option<TargetAddress>,
    /// Address to which the target has moved permanently.
    home: Option<TargetAddress>,
    moves: u8,
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// Whether a write carries data, where the target can fetch them.
    writes: WritePolicy,
    /// Writes among the tasks.
    outstanding_writes: usize,
    cmd_sn: CmdSn,
    max_cmd_sn: CmdSn,
    exp_stat_sn: StatSn,
    /// Number of the last task-management request, a part of its tag.
    tmf_serial: u16,
    /// The ping that is unanswered.
    pinged: Option<Ping>,
    targets: Collector,
}

impl IscsiSession {
    /// A session that begins to connect at once.
    ///
    /// # Panics
    /// If the configuration has no room for a command or a request.
    #[must_use]
    pub fn new(config: SessionConfig, now: Instant) -> Self {
        assert!((1..=4096).contains(&config.queue_size));
        let mut session = Self {
            core: Core::new(
                CoreConfig {
                    channels: 1,
                    requests: config.max_requests,
                    attempts: config.max_attempts,
                    timing: config.timing,
                    ping: config.ping,
                    reconnect: config.reconnect,
                },
                now,
            ),
            conn: ConnState::Free,
            login: None,
            params: None,
            portal_group: None,
            unfenced: None,
            moved: None,
            home: None,
            moves: 0,
            slots: vec![Slot::default(); config.queue_size.into()],
            // The last is taken first, so slots in use stay close together.
            free: (0..config.queue_size).rev().collect(),
            writes: WritePolicy::new(0),
            outstanding_writes: 0,
            cmd_sn: CmdSn(1),
            max_cmd_sn: CmdSn(1),
            exp_stat_sn: StatSn(0),
            tmf_serial: 0,
            pinged: None,
            targets: Collector::with_limit(MAX_TARGETS),
            config,
        };
        session.connect(now);
        session
    }

    /// The connection that is made is one on RDMA, on which the target may fetch the data of that
    /// many writes at once. To be called before [`Self::handle_connected`]; without, as on TCP, a
    /// write has all the unsolicited data that were agreed on.
    pub fn set_reads(&mut self, reads: u8) {
        self.writes = WritePolicy::new(reads);
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

    /// Parameters that the login agreed on; `None` without a connection in full-feature phase.
    #[must_use]
    pub fn params(&self) -> Option<&(SessionParams, ConnectionParams)> {
        self.params.as_ref()
    }

    /// The portal group of the last login, if the target reported it.
    #[must_use]
    pub fn portal_group(&self) -> Option<u16> {
        self.portal_group
    }

    /// The next status that is expected, for headers that acknowledge those before it.
    #[must_use]
    pub fn exp_stat_sn(&self) -> StatSn {
        self.exp_stat_sn
    }

    /// The next thing to do.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.core.outputs.pop_front()
    }

    fn is_discovery(&self) -> bool {
        self.config.target.is_none()
    }
}

#[cfg(test)]
pub(crate) mod fixture;
#[cfg(test)]
mod tests;
