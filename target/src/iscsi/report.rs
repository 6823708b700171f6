//! Channel state for status reports.

use riser_scsi::iscsi::login::{ConnectionParams, Identity, SessionParams};
use riser_scsi::iscsi::name::IscsiName;
use riser_scsi::iscsi::{Isid, Tsih};
use riser_scsi::nexus::NexusId;

use super::channel::Channel;
use super::datamover::Datamover;
use super::phase::Phase;
use crate::qos::{IoLimits, Waits};

/// Session state for status reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// Initiator and target names used for login.
    pub identity: Identity,
    /// Target session identifying handle, must not be 0.
    pub tsih: Tsih,
    /// I_T nexus, or 0 for a discovery session.
    pub nexus: NexusId,
    /// Current connection phase.
    pub phase: Phase,
    /// Session parameters.
    pub params: SessionParams,
    /// Connection parameters.
    pub connection: ConnectionParams,
    /// Number of commands and functions with a context.
    pub in_flight: usize,
    /// Number of visible logical units.
    pub luns: usize,
    /// Rate limits for the initiator, and the current wait times.
    pub limits: Option<(IoLimits, Waits)>,
    /// Maximum number of commands in flight.
    pub commands: u16,
    /// Number of PDUs with a digest error on this connection.
    pub digest_errors: u64,
}

impl SessionInfo {
    /// Returns the initiator port (name and ISID).
    #[must_use]
    pub fn initiator(&self) -> String {
        port_name(&self.identity.initiator, self.identity.isid)
    }
}

/// Returns the name of an initiator port, as in `riserd sessions`.
pub(crate) fn port_name(initiator: &IscsiName, isid: Isid) -> String {
    format!("{initiator},{isid}")
}

impl<D: Datamover> Channel<D> {
    /// Returns the initiator port (name and ISID).
    #[must_use]
    pub fn initiator(&self) -> Option<String> {
        let identity = &self.executor.session.as_ref()?.identity;
        Some(port_name(&identity.initiator, identity.isid))
    }

    /// Returns the session state for display.
    #[must_use]
    pub fn session_info(&self) -> Option<SessionInfo> {
        let session = self.executor.session.as_ref()?;
        Some(SessionInfo {
            identity: session.identity.clone(),
            tsih: session.tsih,
            nexus: session.nexus,
            phase: self.executor.phase,
            params: session.params,
            connection: session.connection,
            in_flight: self.executor.in_flight(),
            luns: session.luns.luns().len(),
            limits: session.luns.limiter().map(|limiter| limiter.view()),
            commands: self.executor.config.commands,
            digest_errors: self.executor.stats.counters.digest_errors,
        })
    }
}
