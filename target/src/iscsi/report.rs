//! State of a channel, for status pages.

use riser_scsi::iscsi::Tsih;
use riser_scsi::iscsi::login::{ConnectionParams, Identity, SessionParams};
use riser_scsi::nexus::NexusId;

use super::channel::{Channel, Phase};
use super::datamover::Datamover;
use crate::qos::{IoLimits, Waits};

/// State of a session, for status pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// Names that the initiator has logged in with.
    pub identity: Identity,
    /// Target session identifying handle, never 0.
    pub tsih: Tsih,
    /// Number of its I_T nexus; 0 in a discovery session.
    pub nexus: NexusId,
    /// Phase of the connection.
    pub phase: Phase,
    /// Parameters of the session.
    pub params: SessionParams,
    /// Parameters of the connection.
    pub connection: ConnectionParams,
    /// Commands and functions that hold a context.
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
