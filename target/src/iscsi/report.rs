//! State of a channel, for status pages.

use riser_scsi::iscsi::Tsih;
use riser_scsi::iscsi::login::{ConnectionParams, Identity, SessionParams};
use riser_scsi::nexus::NexusId;

use super::channel::{Channel, Phase};
use super::datamover::Datamover;
use crate::qos::{IoLimits, Waits};

/// Counters of a channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Commands taken in.
    pub commands: u64,
    /// Functions taken in.
    pub task_management: u64,
    /// Requests answered.
    pub answered: u64,
    /// Commands ended by task management.
    pub aborted: u64,
    /// Requests that ended with the channel.
    pub torn_down: u64,
    /// Bytes sent to the initiator.
    pub bytes_in: u64,
    /// Bytes taken from the initiator.
    pub bytes_out: u64,
    /// PDUs rejected.
    pub rejected: u64,
    /// PDUs whose digest was wrong.
    pub digest_errors: u64,
    /// Times a command waited for a buffer.
    pub buffer_waits: u64,
}

impl std::ops::AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        self.commands += other.commands;
        self.task_management += other.task_management;
        self.answered += other.answered;
        self.aborted += other.aborted;
        self.torn_down += other.torn_down;
        self.bytes_in += other.bytes_in;
        self.bytes_out += other.bytes_out;
        self.rejected += other.rejected;
        self.digest_errors += other.digest_errors;
        self.buffer_waits += other.buffer_waits;
    }
}

impl std::ops::Add for Counters {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        self += other;
        self
    }
}

/// State of a session, for status pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// The initiator port.
    pub identity: Identity,
    /// Its handle.
    pub tsih: Tsih,
    /// Its nexus.
    pub nexus: NexusId,
    /// Phase of the connection.
    pub phase: Phase,
    /// Parameters of the session.
    pub params: SessionParams,
    /// Parameters of the connection.
    pub connection: ConnectionParams,
    /// Requests under way.
    pub in_flight: usize,
    /// Logical units that it sees.
    pub luns: usize,
    /// The initiator's limits, and what has waited for them.
    pub limits: Option<(IoLimits, Waits)>,
    /// Commands that it may have under way.
    pub commands: u16,
    /// PDUs of the connection whose digest was wrong.
    pub digest_errors: u64,
}

impl<D: Datamover> Channel<D> {
    /// The initiator port: its name with the ISID.
    #[must_use]
    pub fn initiator(&self) -> Option<String> {
        let identity = &self.session.as_ref()?.identity;
        Some(format!("{},{}", identity.initiator, identity.isid))
    }

    /// Its session, for people.
    #[must_use]
    pub fn session_info(&self) -> Option<SessionInfo> {
        let session = self.session.as_ref()?;
        Some(SessionInfo {
            identity: session.identity.clone(),
            tsih: session.tsih,
            nexus: session.nexus,
            phase: self.phase,
            params: session.params,
            connection: session.connection,
            in_flight: self.in_flight(),
            luns: session.luns.luns().len(),
            limits: session.luns.limiter().map(|limiter| limiter.view()),
            commands: self.config.commands,
            digest_errors: self.counters.digest_errors,
        })
    }
}
