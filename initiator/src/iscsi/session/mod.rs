//! A session: an initiator port, a target, a connection, and its requests.
//!
//! [`IscsiSession`] is a state machine without I/O. Its owner reports events (`handle_*`), polls
//! outputs ([`IscsiSession::poll_output`]) and the next deadline
//! ([`next_deadline`](crate::session::Machine::next_deadline)). The same machine is used for TCP
//! and iSER, because the owner transfers the data of commands. On TCP, the machine receives all
//! PDUs. On iSER, the transport moves the data, so there are no Data-In and R2T PDUs.
//!
//! # Memory
//! A request never completes while its memory is in use. When an attempt has finished, the session
//! outputs [`Output::Retire`]. The owner calls [`IscsiSession::handle_retired`] when no part of the
//! memory is queued for sending, and the target cannot access it. Closing the connection retires
//! all memory. If the memory of an attempt is not retired within the timeout of an attempt, the
//! session closes the connection.
//!
//! # Time
//! An attempt without a response is aborted when it times out: ABORT TASK, then LOGICAL UNIT RESET,
//! then TARGET WARM RESET, then a new connection. Each of these steps follows if the previous one
//! fails or times out. The timeouts of an attempt, of retiring its memory, of a function and of a
//! ping restart while these are in transit to a target that acknowledges preceding data
//! ([`IscsiSession::handle_progress`]). The timeout of an attempt also restarts with every R2T and
//! every part of a Data-In ([`IscsiSession::handle_bytes`]), which also proves that the target is
//! alive: a slow network is not a silent target. All of this is bounded by the request's deadline.
//! After it no timeout is extended: an abort with the following resets has three times the timeout
//! of a function, and retiring memory after an abort has the timeout of an attempt. We ping a
//! silent target; without a response, the session will abandon the connection.
//!
//! # Replay
//! Error recovery level 0: every failure closes the connection, and the session logs in again with
//! the same ISID and no TSIH, after the time requested by the target (Time2Wait). This reinstates
//! the session (RFC 7143 6.3.5): the target terminates the tasks of the old session before it
//! responds to the login. Therefore requests that may be executed twice will be sent again, in the
//! order of their submission. A request is not sent while an earlier one with an overlapping effect
//! is outstanding, as for SRP; see [`crate::srp::session`]. All other requests fail with
//! [`RequestError::ConnectionLost`](crate::request::RequestError::ConnectionLost).
//!
//! Only a login to the same target portal group reinstates a session. After a redirection, or if an
//! address has moved, another portal group does not know the old session, whose writes may still be
//! in flight to the disk. In this case, we don't start any commands until
//! [`Timing::settle`](crate::session::Timing::settle) after the login. The same applies if a login
//! is redirected to another address than the previous one, even if both report the same group,
//! because the hosts of a cluster may use the same tags (a redirection to a host name counts by the
//! address in use, since a name may have several); and after the termination of a process
//! whose portal group is unknown.
//!
//! # Discovery
//! A session without a target requests all targets (SendTargets=All), reports them
//! ([`Output::Found`]) and logs out.
//!
//! # Not implemented
//! Multiple connections per session; error recovery levels 1 and 2; bidirectional commands.

mod connection;
mod fence;
mod machine;
mod numbers;
mod ping;
mod receive;
mod recovery;
mod redirection;
mod task_table;
mod tasks;
mod types;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use riser_scsi::iscsi::login::{ConnectionParams, InitiatorLogin, SessionParams};
use riser_scsi::iscsi::text::Collector;
use riser_scsi::iscsi::{BHS_LEN, Itt, StatSn};

use self::fence::PortalGroupFence;
use self::numbers::SequenceNumbers;
use self::ping::Ping;
use self::redirection::Redirection;
use self::task_table::TaskTable;
use self::types::ConnState;
pub use self::types::{
    CommandPdu, ControlKind, ControlPdu, DataOrder, Output, Placement, SessionConfig,
};
use crate::session::{Core, CoreConfig, SessionState};

/// Timeout for a logout.
const LOGOUT_PATIENCE: Duration = Duration::from_millis(500);

/// Maximum number of control PDUs queued for sending. A session sends only a few at a time; the
/// others are responses to NOP-Ins, with up to 8 KiB each.
pub const MAX_CONTROLS: usize = 64;

/// Maximum length of the list of targets in bytes, enough for about ten thousand targets.
const MAX_TARGETS: usize = 4 << 20;

/// Tags for requests other than commands. The lower half of a command's tag is smaller.
const TMF_TAG: u32 = 0xfff1;
pub(crate) const PING_TAG: Itt = Itt(0xfff2);
const LOGOUT_TAG: Itt = Itt(0xfff3);
const TEXT_TAG: Itt = Itt(0xfff4);

/// A session. See the documentation of the module.
#[derive(Debug)]
pub struct IscsiSession {
    config: SessionConfig,
    core: Core<Itt, Output>,
    conn: ConnState,
    login: Option<Box<InitiatorLogin>>,
    params: Option<(SessionParams, ConnectionParams)>,
    fence: PortalGroupFence,
    redirection: Redirection,
    /// Address of the current or last connection.
    peer: Option<SocketAddr>,
    tasks: TaskTable,
    numbers: SequenceNumbers,
    /// Serial number of the last task-management request, which is a part of its tag.
    tmf_serial: u16,
    /// The outstanding ping.
    pinged: Option<Ping>,
    targets: Collector,
}

impl IscsiSession {
    /// Creates a session that starts to connect immediately.
    ///
    /// # Panics
    /// Panics if the configuration has no room for a command or a request.
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
            fence: PortalGroupFence::default(),
            redirection: Redirection::default(),
            peer: None,
            tasks: TaskTable::new(config.queue_size),
            numbers: SequenceNumbers::new(),
            tmf_serial: 0,
            pinged: None,
            targets: Collector::with_limit(MAX_TARGETS),
            config,
        };
        session.connect(now);
        session
    }

    /// Configures the connection as an RDMA connection where the target can fetch the data of this
    /// many writes concurrently. Must be called before [`Self::handle_connected`]. Without this
    /// call, as on TCP, a write carries all of the negotiated unsolicited data.
    pub fn set_reads(&mut self, reads: u8) {
        self.tasks.set_reads(reads);
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

    /// Returns the parameters negotiated in the login, or `None` without a connection in
    /// full-feature phase.
    #[must_use]
    pub fn params(&self) -> Option<&(SessionParams, ConnectionParams)> {
        self.params.as_ref()
    }

    /// Returns the portal group of the last login, if reported by the target, and the address to
    /// which this login was redirected, if any.
    #[must_use]
    pub fn target_port(&self) -> (Option<u16>, Option<SocketAddr>) {
        self.fence.port()
    }

    /// Returns the next expected status number, for headers that acknowledge the previous ones.
    #[must_use]
    pub fn exp_stat_sn(&self) -> StatSn {
        self.numbers.exp_stat_sn()
    }

    /// Returns the next output.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.core.outputs.pop_front()
    }

    fn is_discovery(&self) -> bool {
        self.config.target.is_none()
    }

    /// Sends a PDU without a command's data.
    fn send_control(&mut self, bhs: [u8; BHS_LEN], data: Vec<u8>) {
        let pdu = ControlPdu { bhs, data };
        self.core.outputs.push_back(Output::Send(pdu));
    }
}

#[cfg(test)]
pub(crate) mod fixture;
#[cfg(test)]
pub(crate) mod tests;
